"""Test the tests with one-line faults, drawn anew in each run, which the quick tests of values must notice.

    make mutants                                               # 100 faults from all areas
    python tests/mutants/run.py --count 10 --seed 7            # fewer, and the ones of a seed that was printed
    python tests/mutants/run.py --only onepass/tiled --list    # what would be drawn from some files

Each fault is planted alone in a copy of the tree, and the quick tests of its module and of the module's users run there
until one fails. That test must pass without the fault, or nothing is judged. A run of more than LIMIT_S seconds hangs,
and counts as caught.

Some faults change nothing that anyone could notice: a bound one above the largest possible value, a test for a case
that the next line handles as well. So survivors are printed for people to look at, and the exit status is 1 only if
there are clearly more of them than usual (`most_survivors`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from areas import AREAS, Area, Group, reason_out_of_reach
from mutate import Mutant, can_be_parsed, draw, mutants_of

ROOT = Path(__file__).resolve().parents[2]
# All but hidden files, environments among them, and what is built.
COPIED = [path.name for path in ROOT.iterdir() if not path.name.startswith(".") and path.name not in ("build", "dist")]
# Tests that start processes of their own take longer than all others of the listed files together.
DESELECTED = ("tests/tiled/test_semantics.py::test_the_first_call_of_a_process_is_exact",)
CAUGHT, HANGS, SURVIVED = "caught", "hangs", "survived"
LIMIT_S = 1200.0
# 31 of 80 drawn faults survived. 16 of 24 that were looked at changed no result on a CPU: speed, words, work of a GPU.
SURVIVING = 0.4


@dataclass(frozen=True)
class Job:
    area: str
    group: Group
    mutant: Mutant


@dataclass(frozen=True)
class Verdict:
    """The outcome of a fault.

    Attributes:
        verdict: CAUGHT, HANGS or SURVIVED.
        by: the first test that failed.
    """

    job: Job
    verdict: str
    by: str = ""

    def __str__(self) -> str:
        return f"{self.verdict}{f' by {self.by}' if self.by else ''}: {self.job.mutant}"


def most_survivors(count: int) -> int:
    """The number of survivors of `count` faults that chance explains: the usual share, and three deviations of it."""
    return min(count, int(count * SURVIVING + 3 * math.sqrt(count * SURVIVING * (1 - SURVIVING))))


@functools.cache
def candidates() -> dict[Area, list[Mutant]]:
    """The mutants of all files in reach, by the first area that the file belongs to."""
    found: dict[Area, list[Mutant]] = {area: [] for area in AREAS}
    for path in sorted((ROOT / "onepass").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        area = next((area for area in AREAS if area.group_of(file)), None)
        if area is not None and reason_out_of_reach(file) is None:
            file_mutants = mutants_of(file, path.read_bytes())
            found[area] += [mutant for mutant in file_mutants if reason_out_of_reach(file, mutant.scope) is None]
    return found


def drawn_jobs(count: int, seed: int, only: str = "") -> list[Job]:
    """`count` faults, equally many from each area that has enough, in an order in which areas take turns.

    Args: only: a part of the path of the files that faults are drawn from.
    """
    areas = list(AREAS)
    random.Random(seed).shuffle(areas)
    faults = {}
    for area in areas:
        drawn = draw([m for m in candidates()[area] if only in m.file], 2 * count, seed)
        faults[area] = (m for m in drawn if can_be_parsed(m.applied((ROOT / m.file).read_bytes())))
    jobs: list[Job] = []
    while faults:
        for area in list(faults):
            mutant = next(faults[area], None)
            group = None if mutant is None else area.group_of(mutant.file)
            if len(jobs) == count:
                return jobs
            if mutant is None or group is None:
                del faults[area]
            else:
                jobs.append(Job(area.name, group, mutant))
    return jobs


class Tree:
    """A copy of the repository in which faults are planted and tests run."""

    def __init__(self, root: Path):
        self.root = root
        for name in COPIED:
            source, target = ROOT / name, root / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)

    @contextlib.contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        original = path.read_bytes()
        path.write_bytes(mutant.applied(original))
        try:
            yield
        finally:
            path.write_bytes(original)

    def judge(self, job: Job) -> Verdict:
        with self.with_fault(job.mutant):
            verdict, by = self.run(*job.group.tests, only=job.group.only)
        # all cases of the test: names of cases may depend on the code that had the fault
        judges = (by.partition("[")[0],) if by else job.group.tests
        if verdict == CAUGHT and self.run(*judges, only="" if by else job.group.only)[0] != SURVIVED:
            raise SystemExit(f"without a fault {' '.join(judges)} fails, so that it can judge none")
        return Verdict(job, verdict, by)

    def run(self, *tests: str, only: str = "") -> tuple[str, str]:
        """Run the quick ones of these tests.

        Returns: the verdict, SURVIVED if all pass, and the test that failed, if it was one.
        """
        arguments = [*tests, "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        arguments += ["-m", "not gpu and not slow", *(["-k", only] if only else [])]
        arguments += [f"--deselect={test}" for test in DESELECTED]
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {
                "PYTHONPATH": str(self.root),
                # Python would use the old bytecode of a file that changes within a second and keeps its size
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                # so that no kernel of another fault is loaded, and none of a fault takes the place of one of the tree's
                "ONEPASS_CACHE_DIR": cache,
                "ONEPASS_TEST_CACHE_DIR": str(self.root / "kept_kernels"),
            }
            command = [sys.executable, "-m", "pytest", *arguments]
            process = subprocess.Popen(
                command,
                cwd=self.root,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=LIMIT_S)
            except BaseException as error:
                # the process has not been waited for yet, so the group is still its own
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    return HANGS, ""
                raise
            finally:
                shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        if process.returncode == 0:
            return SURVIVED, ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if failed is not None and process.returncode in (1, 2):
            return CAUGHT, failed[1]
        # another status means that the process has crashed, or a conftest.py cannot be imported any more
        if process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED:
            raise RuntimeError(f"{' '.join(command)}\n{output[-4000:]}")
        return CAUGHT, ""


def run_all(jobs: list[Job], workers: int) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="onepass-mutants-") as directory, ThreadPoolExecutor(workers) as pool:
        trees: queue.Queue[Tree] = queue.Queue()
        for i in range(workers):
            root = Path(directory, str(i))
            root.mkdir()
            trees.put(Tree(root))

        def judge(job: Job) -> Verdict:
            tree = trees.get()
            try:
                return tree.judge(job)
            finally:
                trees.put(tree)

        verdicts = []
        started = time.monotonic()
        for verdict in pool.map(judge, jobs):
            verdicts.append(verdict)
            print(f"[{len(verdicts)}/{len(jobs)}, {time.monotonic() - started:.0f} s] {verdict}", flush=True)
        return verdicts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="how many faults (default: 100)")
    parser.add_argument("--seed", type=int, help="default: a new one, which is printed")
    parser.add_argument("--only", default="", help="a part of the path of the files that faults are drawn from")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--list", action="store_true", help="draw, and run nothing")
    args = parser.parse_args()
    if args.count < 1:
        parser.error(f"--count: expected at least 1, got {args.count}")
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    jobs = drawn_jobs(args.count, seed, args.only)
    print(f"{len(jobs)} faults of --count {args.count} --seed {seed}", flush=True)
    if args.list:
        for job in jobs:
            print(f"{job.area}: {job.mutant}")
        return
    verdicts = run_all(jobs, args.jobs)
    survivors = [v for v in verdicts if v.verdict == SURVIVED]
    print(f"{len(verdicts) - len(survivors)} of {len(verdicts)} caught; up to {most_survivors(len(jobs))} may survive")
    for verdict in survivors:
        print(f"  survived: {verdict.job.mutant}")
    sys.exit(1 if len(survivors) > most_survivors(len(jobs)) else 0)


if __name__ == "__main__":
    main()

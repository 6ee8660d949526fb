"""Test the tests with one-line faults, drawn by seed, each of which a test of values or behavior has to notice.

    make mutants                                            # all faults; writes the record anew
    python tests/mutants/run.py --areas tiled --scale 0.25  # a few of one area; the record does not change
    python tests/mutants/run.py --list                      # the faults that would be drawn

Each fault is planted alone in a copy of the tree, and the tests of its module and of the module's users run there until
one fails: the quick ones, and the slow ones if the quick ones pass. A run that takes several times as long as without a
fault hangs, and counts as caught. First, all of the quick tests have to pass without a fault.

The exit status is 1 if a fault survives that the record does not call harmless, with a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
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
from mutate import Mutant, draw, mutants_of

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("record.json")
COPIED = "onepass", "tests", "benchmarks", "pyproject.toml"
# Tests that start processes of their own take longer than all others of the listed files together.
DESELECTED = ("tests/tiled/test_semantics.py::test_the_first_call_of_a_process_is_exact",)
CAUGHT, HANGS, SURVIVED = "caught", "hangs", "survived"
QUICK, SLOW = "not gpu and not slow", "slow and not gpu"
# a run of quick tests hangs after PATIENCE times the time without a fault, plus PATIENCE_S seconds
PATIENCE, PATIENCE_S = 4.0, 60.0
SLOW_LIMIT_S = 1800.0


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
        harmless: the reason why the fault may survive.
    """

    job: Job
    verdict: str
    by: str = ""
    harmless: str = ""

    @property
    def is_bad(self) -> bool:
        return self.verdict == SURVIVED and not self.harmless

    def __str__(self) -> str:
        end = f" by {self.by}" if self.by else f" ({self.harmless})" if self.harmless else ""
        return f"{self.verdict}{end}: {self.job.mutant}"

    def entry(self) -> dict[str, str | int]:
        mutant = self.job.mutant
        found: dict[str, str | int] = {"area": self.job.area, "file": mutant.file, "line": mutant.line}
        found |= {"scope": mutant.scope, "source": mutant.source, "change": mutant.change, "verdict": self.verdict}
        return found | ({"by": self.by} if self.by else {}) | ({"harmless": self.harmless} if self.harmless else {})


def candidates(area: Area) -> list[Mutant]:
    """The mutants of all files of an area that belong to no area before it."""
    found = []
    before = AREAS[: AREAS.index(area)]
    for path in sorted((ROOT / "onepass").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if any(other.group_of(file) for other in before):
            continue
        if area.group_of(file) is not None and reason_out_of_reach(file) is None:
            file_mutants = mutants_of(file, path.read_bytes())
            found += [mutant for mutant in file_mutants if reason_out_of_reach(file, mutant.scope) is None]
    return found


def jobs_of(areas: list[Area], seed: int, scale: float) -> list[Job]:
    jobs = []
    for area in areas:
        for mutant in draw(candidates(area), max(1, round(area.count * scale)), seed):
            group = area.group_of(mutant.file)
            assert group is not None
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

    def run(self, group: Group, marks: str, limit_s: float | None) -> tuple[str, str]:
        """Run the tests of a group that have these marks.

        Returns: the verdict, SURVIVED if all pass, and the test that failed.
        """
        arguments = [*group.tests, "-x", "-q", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
        arguments += ["-m", marks, *(["-k", group.only] if group.only else [])]
        arguments += [f"--deselect={test}" for test in DESELECTED]
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {
                "PYTHONPATH": str(self.root),
                # Python would use the old bytecode of a file that changes within a second and keeps its size
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
                # so that no kernel of another fault is loaded
                "ONEPASS_CACHE_DIR": cache,
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
                output, _ = process.communicate(timeout=limit_s)
            except BaseException as error:
                # the process has not been waited for yet, so the group is still its own
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                if isinstance(error, subprocess.TimeoutExpired):
                    return HANGS, ""
                raise
            finally:
                shutil.rmtree(self.root / ".hypothesis", ignore_errors=True)
        if process.returncode == 0 or (process.returncode == pytest.ExitCode.NO_TESTS_COLLECTED and marks == SLOW):
            return SURVIVED, ""
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        if failed is None or process.returncode not in (1, 2):
            # with 3, 4 or 5, pytest itself has failed or found no test; a signal means that the process has crashed
            if process.returncode > 2:
                raise RuntimeError(f"{' '.join(command)}\n{output[-4000:]}")
            return CAUGHT, f"end of the process by {process.returncode}"
        return CAUGHT, failed[1]


def known_reasons(path: Path) -> dict[tuple[str, ...], str]:
    """Read from the record why faults are harmless, by their content: the number of their line may have changed."""
    if not path.exists():
        return {}
    entries = json.loads(path.read_text())["mutants"]
    return {(e["file"], e["scope"], e["source"], e["change"]): e["harmless"] for e in entries if e.get("harmless")}


def run_all(jobs: list[Job], workers: int, reasons: dict[tuple[str, ...], str]) -> list[Verdict]:
    with tempfile.TemporaryDirectory(prefix="onepass-mutants-") as directory, ThreadPoolExecutor(workers) as pool:
        trees: queue.Queue[Tree] = queue.Queue()
        for i in range(workers):
            root = Path(directory, str(i))
            root.mkdir()
            trees.put(Tree(root))

        def without_fault(group: Group) -> float:
            tree, started = trees.get(), time.monotonic()
            try:
                verdict, by = tree.run(group, QUICK, None)
            finally:
                trees.put(tree)
            if verdict != SURVIVED:
                raise SystemExit(f"without a fault {by} fails, so that it can judge none")
            return time.monotonic() - started

        def judge(job: Job) -> Verdict:
            tree = trees.get()
            try:
                with tree.with_fault(job.mutant):
                    verdict, by = tree.run(job.group, QUICK, PATIENCE * seconds[job.group] + PATIENCE_S)
                    if verdict == SURVIVED:
                        verdict, by = tree.run(job.group, SLOW, SLOW_LIMIT_S)
            finally:
                trees.put(tree)
            mutant = job.mutant
            reason = reasons.get((mutant.file, mutant.scope, mutant.source, mutant.change), "")
            return Verdict(job, verdict, by, reason if verdict == SURVIVED else "")

        groups = list(dict.fromkeys(job.group for job in jobs))
        seconds = dict(zip(groups, pool.map(without_fault, groups), strict=True))
        for group in groups:
            print(f"{seconds[group]:6.0f} s without a fault: {' '.join(group.tests)}", flush=True)
        verdicts = []
        started = time.monotonic()
        for verdict in pool.map(judge, jobs):
            verdicts.append(verdict)
            print(f"[{len(verdicts)}/{len(jobs)}, {time.monotonic() - started:.0f} s] {verdict}", flush=True)
        return verdicts


def write_record(path: Path, verdicts: list[Verdict], seed: int) -> None:
    counts = {name: sum(v.verdict == name for v in verdicts) for name in (CAUGHT, HANGS, SURVIVED)}
    content = {"seed": seed, "counts": counts, "mutants": [v.entry() for v in verdicts]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--areas", nargs="+", default=[a.name for a in AREAS], metavar="AREA", help="by name")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times the number of each area")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="of these, what has this text in it, such as a file")
    parser.add_argument("--record", type=Path, help="default: the one in the repository, for a run of everything")
    parser.add_argument("--list", action="store_true", help="draw, and run nothing")
    args = parser.parse_args()
    areas = [area for area in AREAS if area.name in args.areas]
    jobs = [job for job in jobs_of(areas, args.seed, args.scale) if args.only in str(job.mutant)]
    if args.list:
        for job in jobs:
            print(f"{job.area}: {job.mutant}")
        return
    verdicts = run_all(jobs, args.jobs, known_reasons(RECORD))
    is_whole = len(areas) == len(AREAS) and args.scale == 1.0 and not args.only and args.seed == 0
    record = args.record or (RECORD if is_whole else None)
    if record is not None:
        write_record(record, verdicts, args.seed)
    bad = [v for v in verdicts if v.is_bad]
    caught = sum(v.verdict != SURVIVED for v in verdicts)
    print(f"{caught} of {len(verdicts)} caught, {len(verdicts) - caught - len(bad)} harmless, {len(bad)} survived")
    for verdict in bad:
        print(f"  {verdict.job.mutant}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()

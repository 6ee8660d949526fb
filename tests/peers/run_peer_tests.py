"""Another library's tests of attention on GPUs, many processes side by side.

    python tests/peers/run_peer_tests.py --tests FOLDER --results peer-tests.json --workers 30

FOLDER has the folders of tests/peers/README.md. Each process runs one test function with one seed on one GPU, since
collecting a whole file makes half a million cases. Kernels are compiled by the process that needs them first. Cases
that have ended according to the results file are not run again, so that several short runs on a machine add up.
Processes share the memory of a GPU, and some cases need most of it: failures are tried again at the end, with two
processes on a GPU.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from onepass.testing.machine import describe
from onepass.testing.results import SCHEMA_VERSION

ROOT = Path(__file__).parents[2]
FOLDERS = ("fa2", "fa3", "fa4")
MODULES = {"fa4": ["--peer-module", "flash_attn.cute.testing=testing.py"]}
# These functions take 70 GiB of a GPU, so no other process may use it.
ALONE = {("fa3", "test_flash_attn_race_condition")}
# The ends of the names of the longest functions, which begin first.
LONG = ("kvcache", "varlen_output", "output", "qkvpacked", "causal")
FINAL = ("passed", "refused", "internal")  # a failure, for example for lack of memory, is tried again
RETRIES = 2  # processes on a GPU that try failures again, at the end
ENDED = {0, 1, 5}  # exit statuses of pytest: all cases passed, some failed, none was left to run


class Job(NamedTuple):
    """The cases of a test function with one seed."""

    folder: str
    function: str
    seed: int
    is_retry: bool = False

    @property
    def key(self) -> tuple[str, str, int]:
        return self.folder, self.function, self.seed

    @property
    def is_alone(self) -> bool:
        return (self.folder, self.function) in ALONE

    @property
    def order(self) -> tuple:
        length = next((n for n, word in enumerate(LONG) if self.function.endswith(word)), len(LONG))
        return self.is_alone, self.seed, length


def jobs_of(tests: Path, seeds: list[int]) -> list[Job]:
    found = []
    for folder in FOLDERS:
        text = (tests / folder / "test_flash_attn.py").read_text()
        names = dict.fromkeys(re.findall(r"^def (test_\w+)", text, re.MULTILINE))
        found += [Job(folder, name, seed) for name in names for seed in seeds]
    return sorted(found, key=lambda job: job.order)


class Run:
    """Processes that are under way, and what they have written."""

    def __init__(self, options: argparse.Namespace, rows: list[dict], ended: set[tuple[str, str, int]]):
        self.options, self.rows, self.ended, self.scratch = options, rows, ended, Path(tempfile.mkdtemp())
        self.running: dict[subprocess.Popen, tuple[Job, int]] = {}
        self.num_gpus = torch.cuda.device_count()

    def done(self, job: Job) -> list[str]:
        """The cases of a job that have ended."""
        return [row["case"] for row in self.rows if self.is_of(row, job) and row["outcome"] in FINAL]

    def has_failures(self, job: Job) -> bool:
        return any(self.is_of(row, job) and row["outcome"] == "failed" for row in self.rows)

    def start(self, job: Job) -> None:
        load = collections.Counter(gpu for _, gpu in self.running.values())
        gpu = min(range(self.num_gpus), key=lambda n: load[n])
        self.path(job, "done").write_text(json.dumps(self.done(job)))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "peer_tests", "-c", os.devnull, "-p", "no:cacheprovider"]
        command += ["--tb=line", "--peer-cases", str(self.options.cases), "--peer-seed", str(job.seed)]
        command += ["--peer-function", job.function, "--peer-lines", str(self.path(job, "lines"))]
        command += ["--peer-done", str(self.path(job, "done")), *MODULES.get(job.folder, []), "test_flash_attn.py"]
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "peers"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        folder = self.options.tests / job.folder
        with self.path(job, "log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.running[process] = job, gpu

    def path(self, job: Job, kind: str) -> Path:
        return self.scratch / f"{job.folder}-{job.function}-{job.seed}.{kind}"

    @staticmethod
    def is_of(row: dict, job: Job) -> bool:
        is_function = re.split(r"\[", row["case"])[0] == job.function
        return is_function and (row["tests"], row["seed"]) == (job.folder, job.seed)

    def room_for(self, job: Job) -> bool:
        if job.is_alone:
            return len(self.running) < self.num_gpus and all(other.is_alone for other, _ in self.running.values())
        return len(self.running) < (RETRIES * self.num_gpus if job.is_retry else self.options.workers)

    def collect(self, process: subprocess.Popen) -> None:
        """Take over the outcomes of a process that has ended, or has been ended."""
        job, _ = self.running.pop(process)
        lines = self.path(job, "lines").read_text().splitlines() if self.path(job, "lines").exists() else []
        for line in lines:
            row = {"tests": job.folder, "seed": job.seed} | json.loads(line)
            self.rows[:] = [r for r in self.rows if (r["tests"], r["seed"], r["case"]) != tuple(row.values())[:3]]
            self.rows.append(row)
        if process.returncode in ENDED and not self.has_failures(job):
            self.ended.add(job.key)
        end = self.path(job, "log").read_text().strip().splitlines()[-1:]
        print(f"{job.folder} {job.function} seed {job.seed}: {process.returncode} {end}", flush=True)

    def end(self) -> None:
        for process in list(self.running):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self.collect(process)


def write(path: Path, header: dict, rows: list[dict], ended: set[tuple[str, str, int]]) -> None:
    """Write a results file with a line for each test function that has ended with a seed, and for each case."""
    functions, lines = (",\n".join(map(json.dumps, found)) for found in (sorted(ended), rows))
    start = f'{{"schema_version": {SCHEMA_VERSION}, "header": {json.dumps(header)}'
    path.write_text(f'{start}, "ended": [\n{functions}\n], "rows": [\n{lines}\n]}}\n')


def show(rows: list[dict]) -> None:
    for tests, seed in sorted({(row["tests"], row["seed"]) for row in rows}):
        counts = collections.Counter(r["outcome"] for r in rows if (r["tests"], r["seed"]) == (tests, seed))
        print(tests, "seed", seed, dict(counts))
    for row in rows:
        if row["outcome"] == "failed":
            print("failed", row["tests"], row["seed"], row["case"], row["reason"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the folder with the folders fa2, fa3 and fa4")
    parser.add_argument(
        "--results", type=Path, required=True, help="results file, JSON; if it exists, the run continues it"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=3600, help="after this time, what still runs is ended")
    parser.add_argument("--cases", type=int, default=40, help="cases of each function and seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    options = parser.parse_args()
    started = time.monotonic()
    before = json.loads(options.results.read_text()) if options.results.exists() else {"rows": []}
    rows, run = before["rows"], Run(options, before["rows"], {tuple(key) for key in before.get("ended", ())})
    # to collect a test function again would take up to a minute
    jobs = [job for job in jobs_of(options.tests, options.seeds) if job.key not in run.ended]
    waiting, is_retrying = list(jobs), False
    header = describe("cuda") | {"cases": options.cases}

    def save() -> None:
        rows.sort(key=lambda row: (row["tests"], row["seed"], row["case"]))
        write(options.results, header, rows, run.ended)

    # a time limit may end this program with SIGTERM; then the results so far are written, too
    earlier_handler = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        while time.monotonic() - started < options.seconds:
            if not waiting and not run.running:
                waiting = [job._replace(is_retry=True) for job in jobs if run.has_failures(job) and not is_retrying]
                is_retrying = True
                if not waiting:
                    break
            while waiting and run.room_for(waiting[0]):
                run.start(waiting.pop(0))
            for process in [p for p in run.running if p.poll() is not None]:
                run.collect(process)
                save()
            time.sleep(0.2)
    finally:
        run.end()
        save()
        signal.signal(signal.SIGTERM, earlier_handler)
    print(f"not started: {len(waiting)} test functions")
    show(rows)


if __name__ == "__main__":
    main()

"""The record of GPU tests: which of them have passed on a GPU, and whether the kernels have changed since.

    python tests/gpu/record.py check [--kernels N]                      make gpu-record
    python tests/gpu/record.py add LOG... --gpu "NVIDIA H200" --backend sm90 --commit COMMIT --date DATE

LOG is what `pytest -v -m gpu tests/gpu ...` printed, whole or truncated by a time limit. The record
(benchmarks/results/h200-tests.json) has a row for each test file and backend: how many of its tests passed, failed and
were skipped, and with which kernels. Kernels are known by the digests of their machine code
(tests/support/code_digests.py), so a change of the host's code makes no row stale. `check` compiles the kernels and
compares them, all of them or N drawn at random.

A new row replaces the old one, so logs of runs that belong together are passed together: a test that several logs name
counts once, with its last outcome. A test that is no longer in the suite is left out, and named.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "benchmarks" / "results" / "h200-tests.json"
OUTCOME = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED) (?:\[ *\d+%\] )?(tests/gpu/test_\w+\.py::\S.*)$")
OUTCOME_LAST = re.compile(r"(tests/gpu/test_\w+\.py::\S.*?) (PASSED|FAILED|ERROR|SKIPPED)\b")


def digests(count: int | None = None) -> dict[str, str]:
    """Digests of the machine code of shipped kernels by name: of all, or of as many that are drawn at random."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]
    import code_digests

    names = [name for name, _ in code_digests.requests()]
    return code_digests.digests(names if count is None else random.sample(names, min(count, len(names))))


def known_as(kernels: dict[str, str]) -> str:
    """A short name for kernels with these digests."""
    return hashlib.sha256(json.dumps(kernels, sort_keys=True).encode()).hexdigest()[:12]


def outcomes(log: str) -> dict[str, str]:
    """The outcome of each test that a log of `pytest -v` names, with or without xdist."""
    found = {}
    for line in log.splitlines():
        if match := OUTCOME.search(line):
            found[match[2].rstrip()] = match[1]
        elif match := OUTCOME_LAST.search(line):
            found[match[1]] = match[2]
    return found


def added(record: dict, tests: dict[str, str], about: dict[str, str]) -> dict:
    """The record with the outcomes of more tests. `about` holds commit, date, kernels, gpu and backend of the rows."""
    rows = {(row["file"], row["backend"]): row for row in record["rows"]}
    by_file: dict[str, dict[str, str]] = defaultdict(dict)
    for name, outcome in tests.items():
        by_file[name.split("::")[0].removeprefix("tests/gpu/")][name] = outcome
    for file, found in sorted(by_file.items()):
        values = list(found.values())
        counts = {
            "passed": values.count("PASSED"),
            "failed": values.count("FAILED") + values.count("ERROR"),
            "skipped": values.count("SKIPPED"),
        }
        rows[file, about["backend"]] = {"file": file, **about, **counts}
    named = {row["kernels"] for row in rows.values()}
    kernels = {name: found for name, found in record["kernels"].items() if name in named}
    return {**record, "kernels": kernels, "rows": [rows[key] for key in sorted(rows)]}


def collected() -> list[str]:
    """The names of the tests that are for a GPU."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "--collect-only",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
    ]
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^tests/gpu/test_\w+\.py::.*", out, re.MULTILINE)


def report(record: dict, names: list[str], kernels: dict[str, str]) -> list[str]:
    """A line for each test file: the tests that have run on a GPU, and whether they ran with these kernels.

    A file has a line for each backend that it has run with.

    Args:
        names: the GPU tests that there are.
        kernels: digests of the kernels as they are now, by name.
    """
    counts = Counter(name.split("::")[0].removeprefix("tests/gpu/") for name in names)
    rows = {(row["file"], row["backend"]): row for row in record["rows"]}
    lines = []
    unrecorded = {(file, "sm90") for file in counts.keys() - {file for file, _ in rows}}
    for file, backend in sorted(unrecorded | {key for key in rows if key[0] in counts}):
        row, count = rows.get((file, backend)), counts[file]
        name = file if backend == "sm90" else f"{file} ({backend})"
        if row is None:
            lines.append(f"{name:40} never recorded ({count} tests)")
            continue
        then = record["kernels"].get(row["kernels"], {})
        compared = kernels.keys() & then.keys()  # the digests may cover more kernels than they did then
        changed = [kernel for kernel in compared if then[kernel] != kernels[kernel]]
        age = f"{len(changed)} of {len(compared)} kernels have changed since" if changed else "these kernels"
        if not compared:
            age = "kernels not compared"
        ran = row["passed"] + row["failed"] + row["skipped"]
        lines.append(
            f"{name:40} {row['passed']} of {count} passed, {row['failed']} failed, {count - ran} not run; "
            f"{age} ({row['commit'][:7]}, {row['date']}, {row['gpu']})"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check").add_argument("--kernels", type=int, help="compare so many kernels (default: all)")
    add = commands.add_parser("add")
    add.add_argument("logs", nargs="+", type=Path)
    for name in ("gpu", "backend", "commit", "date"):
        add.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    record = json.loads(RECORD.read_text())
    if arguments.command == "check":
        if arguments.kernels is not None and arguments.kernels < 1:
            parser.error(f"--kernels: expected at least 1, got {arguments.kernels}")
        print("\n".join(report(record, collected(), digests(arguments.kernels))))
        return 0
    tests: dict[str, str] = {}
    for log in arguments.logs:
        tests |= outcomes(log.read_text(errors="replace"))
    for name in sorted(tests.keys() - set(collected())):
        print(f"left out, for there is no such test any more: {name} {tests.pop(name)}")
    names = ("commit", "date", "gpu", "backend")
    kernels = digests()
    record["kernels"][known_as(kernels)] = kernels
    about = {"kernels": known_as(kernels), **{name: getattr(arguments, name) for name in names}}
    RECORD.write_text(json.dumps(added(record, tests, about), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

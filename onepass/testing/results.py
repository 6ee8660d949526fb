"""Results files: their form, and how they are written while a measurement runs.

Every results file is JSON of one form: "schema_version", "status", "header" (the machine, see machine.py, and what was
asked for) and "rows". Runs of case sets add a "summary", the suite of quantize_fp8 adds "calls". A file of several runs
has "runs" instead, each with its header and rows.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1

Row = dict[str, Any]


@dataclass
class Report:
    """The content of a results file; the file is written again, whole and at once, after every row.

    Attributes:
        status: "running", "complete", "interrupted" or "failed: <reason>"; only a complete report has all rows.
    """

    header: dict[str, Any]
    path: Path | None = None
    status: str = "running"
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.save()

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "status": self.status,
            "header": self.header,
            "rows": self.rows,
        }

    def save(self) -> None:
        if self.path is not None:
            write_json(self.path, self.to_dict())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A context to measure in. However it ends, the file holds the rows and the status. Ctrl-C ends it quietly."""
        self.save()
        try:
            yield
            self.status = "complete"
        except KeyboardInterrupt:
            self.status = "interrupted"
        except BaseException as error:
            self.status = f"failed: {type(error).__name__}: {error}"
            raise
        finally:
            self.save()

    def exit_status(self, ok: bool) -> int:
        """The exit status of a process: 0, 1 if something was wrong, 130 after Ctrl-C."""
        return 130 if self.status == "interrupted" else 0 if ok else 1


def finite(value: float) -> float | None:
    """The value as JSON can hold it: None for NaN and inf."""
    return value if math.isfinite(value) else None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Replace a file in one step: a reader sees the old content or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1, allow_nan=False)
            file.write("\n")
        os.chmod(name, 0o644)  # files of mkstemp are private
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_output(path: Path) -> Path:
    """Make sure that a file can be written there, before the work whose results it shall hold; make its folder.

    Returns: the path. Raises: OSError that says what was expected.
    """
    try:
        if not path.name or path.name == ".." or path.is_dir():
            raise OSError(f"expected a file to write, got {path}, which is a directory")
        if path.exists() and not path.is_file():  # such as /dev/null, which a file would replace
            raise OSError(f"expected a file to write, got {path}, which is a device or a pipe")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"expected a file that can be written, got {path}: {error.strerror.lower()}") from None
    return path


def output_file(text: str) -> Path:
    """`check_output` as the type of an argument of a parser."""
    try:
        return check_output(Path(text))
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def input_file(text: str) -> Path:
    """The path of a file to read, as the type of an argument of a parser."""
    path = Path(text)
    if not path.is_file():
        what = "which is no file" if path.exists() else "which does not exist"
        raise argparse.ArgumentTypeError(f"expected a file to read, got {text}, {what}")
    return path


def reason_of(error: Exception) -> str:
    """The first line of an error, for a row."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]

"""Python processes that this one starts: they import from where it does, and never from the current directory."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parents[1])  # where this package lies


def has_python() -> bool:
    """Whether `sys.executable` is a Python. A program that embeds Python may have none; a frozen one is itself that."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def python_command(code: str, *arguments: str) -> list[str]:
    """The command of a Python process that runs `code`, with `sys.path` as this process has it.

    An empty entry of `sys.path` (of `python -c` and of an interactive session) means the current directory, whatever
    that is: it is left out, and the folder of this package comes last instead. `-I` keeps Python from putting the
    current directory on the path itself, as it does for `-c` and `-m`, and from reading the variables PYTHON*.

    Args: arguments: `sys.argv[1:]` of the process.
    """
    path = [folder for folder in sys.path if isinstance(folder, str) and folder]
    path += [_ROOT] * (_ROOT not in path)
    return [sys.executable, "-I", "-c", f"import sys; sys.path[:] = {path!a}; {code}", *arguments]

"""The environment variables that onepass reads: what each means, and one error for what is not understood."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

BACKENDS = ("sm90", "sm80", "cpu", "tiled")  # in the order in which they are asked
_WORDS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Variable(Generic[T]):
    """A variable of the environment.

    Attributes:
        what: what it is for.
        expected: what it may be, as words for a message.
        parse: makes the value of its text. Raises: KeyError or ValueError for a text that is not understood.
        default: the value where the variable is not set, or blank.
    """

    name: str
    what: str
    expected: str
    parse: Callable[[str], T]
    default: T

    @property
    def text(self) -> str | None:
        """What the environment says; None where the variable is not set, or blank."""
        return os.environ.get(self.name, "").strip() or None

    def read(self) -> T:
        """The value, as the environment is now. Raises: ValueError if it is not understood."""
        if self.text is None:
            return self.default
        try:
            return self.parse(self.text)
        except (KeyError, ValueError):
            raise ValueError(f"{self.name}: expected {self.expected}, got {self.text!r}") from None


def _switch(name: str, what: str, default: bool) -> Variable[bool]:
    def parse(text: str) -> bool:
        return _WORDS[text.lower()]

    return Variable(name, what, "1, true, yes or on, or 0, false, no or off", parse, default)


def _backend(text: str) -> str:
    if text not in BACKENDS:
        raise ValueError
    return text


def _directory(text: str) -> Path:
    """The directory, with the home directory for a tilde. Raises: ValueError where there is no home directory."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError from None


def _absolute(text: str) -> Path | None:
    directory = Path(os.path.expanduser(text))
    return directory if directory.is_absolute() else None  # the XDG specification says to ignore another one


def _num_bytes(text: str) -> int:
    number, unit = (text[:-1], _UNITS[text[-1].upper()]) if text[-1].upper() in _UNITS else (text, 1)
    if not (number.isascii() and number.isdecimal()):
        raise ValueError
    return int(number) * unit


BACKEND: Variable[str | None] = Variable(
    "ONEPASS_BACKEND",
    "the backend of calls that name none, read when onepass is imported",
    f"one of {', '.join(sorted(BACKENDS))}",
    _backend,
    None,
)
CACHE_DIR: Variable[Path | None] = Variable(
    "ONEPASS_CACHE_DIR",
    "where compiled kernels and tuned configurations are kept",
    "a directory (~ is that of a user whose home directory is known)",
    _directory,
    None,
)
CACHE_HOME: Variable[Path | None] = Variable(
    "XDG_CACHE_HOME",
    "the directory of caches, in which onepass/ is used without ONEPASS_CACHE_DIR",
    "a directory",
    _absolute,
    None,
)
CACHE_LIMIT: Variable[int | None] = Variable(
    "ONEPASS_CACHE_LIMIT",
    "the most bytes that compiled kernels take",
    "a number of bytes, or one with K, M or G behind it",
    _num_bytes,
    None,
)
LOCAL_RANK: Variable[str] = Variable(
    "LOCAL_RANK",
    "set by torchrun; in training, rank 0 of a machine alone compiles kernels for other lengths",
    "a number",
    str,
    "0",
)
LOG = _switch("ONEPASS_LOG", "print which backend computes each kind of call, read when onepass is imported", False)
TUNED = _switch("ONEPASS_TUNED", "use the configurations that onepass tune found", True)
VLLM = _switch("ONEPASS_VLLM", "replace the attention of vLLM on a CPU", False)

ALL: tuple[Variable, ...] = (BACKEND, CACHE_DIR, CACHE_HOME, CACHE_LIMIT, LOCAL_RANK, LOG, TUNED, VLLM)

"""The backend of calls that name none: `onepass.use_backend`, and `ONEPASS_BACKEND` in the environment.

What counts, first to last: `backend=` of a call, the innermost `with use_backend(...)` block around it, the last plain
call of `use_backend` in this process, and `ONEPASS_BACKEND` as it was when onepass was imported.

A block is a context variable: of its own thread or task only. torch.compile cannot trace these, so a graph is made for
the choice of the process (which is guarded: another choice makes another graph), and its operators look for a block
when they run, see `of_operator`.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from types import TracebackType

import torch

NAMES = ("sm90", "sm80", "tiled")  # in the order in which they are asked
VARIABLE = "ONEPASS_BACKEND"
_NO_BLOCK = ""
_TRACED = "traced:"  # before the name, in an operator of a graph whose call names no backend


def refusal(name: object) -> str | None:
    """Why this is no name of a backend, in words; None if it is one."""
    if isinstance(name, str) and name in NAMES:
        return None
    given = repr(name) if isinstance(name, str) else type(name).__name__
    return f"expected one of {', '.join(sorted(NAMES))} or None, got {given}"


def _of_environment() -> str | None:
    name = os.environ.get(VARIABLE) or None
    if name is not None and (reason := refusal(name)) is not None:
        raise ValueError(f"{VARIABLE}: {reason}")
    return name


_of_process = _of_environment()
_of_block: ContextVar[str | None] = ContextVar("onepass.use_backend", default=_NO_BLOCK)


class use_backend:
    """Choose the backend of all calls that do not name one with `backend=`.

        onepass.use_backend("tiled")          # from here on, in all threads
        with onepass.use_backend("sm80"):     # in this block
            out = onepass.attention(q, k, v)

    In a `with` statement the choice is that of the block: of the thread or asyncio task that runs it and of tasks that
    are started in it, not of other threads. Any other call chooses for the whole process, from the end of the
    statement on: what decides is that the object is gone, and no block has been entered with it. `ONEPASS_BACKEND` in
    the environment chooses for the process when onepass is imported.

    As with `backend=`, a call that the chosen backend does not compute is refused with the reason; on a machine whose
    calls also have tensors on the CPU, "sm90" and "sm80" are therefore choices for blocks. The gradients of a call are
    computed by the backend of its forward, wherever they are asked for. With "tiled" no kernel of onepass runs, in
    `merge_partials` and `quantize_fp8` neither.

    Under torch.compile, another choice for the process makes another graph. A block around the call of a compiled
    function holds for the forwards in it, which look for it when they run; gradients of compiled functions follow the
    choice for the process, and `use_backend` itself cannot be called in a compiled function.

    Args:
        name: "sm90", "sm80" or "tiled"; None: each call's best one, as if nothing had been chosen.

    Raises: TypeError or ValueError if it is no such name; RuntimeError in a function that is being compiled, and for
    an object that was entered before.
    """

    _is_for_process = False

    def __init__(self, name: str | None) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("use_backend: expected a call outside of functions that torch.compile compiles")
        if name is not None and (reason := refusal(name)) is not None:
            raise (ValueError if isinstance(name, str) else TypeError)(f"use_backend: {reason}")
        self.name = name
        self._is_for_process = True

    def __enter__(self) -> None:
        if not self._is_for_process:
            raise RuntimeError("use_backend: expected a new object for each block, got one that was entered before")
        self._is_for_process = False
        self._token = _of_block.set(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _of_block.reset(self._token)

    def __del__(self) -> None:
        # Not in __init__: between it and __enter__ other threads would see what a block chooses.
        if self._is_for_process:
            _choose_for_process(self.name)

    def __repr__(self) -> str:
        """An interactive Python keeps what it shows: what is shown is in no `with` statement."""
        if self._is_for_process:
            _choose_for_process(self.name)
        return f"use_backend({self.name!r})"


def _choose_for_process(name: str | None) -> None:
    global _of_process
    _of_process = name


def current() -> str | None:
    """What is chosen where this is called; None: nothing is."""
    return _of_process if torch.compiler.is_compiling() else of_context()


def of_context() -> str | None:
    """What is chosen where this is called, as `current`, for callers that torch.compile does not trace."""
    name = _of_block.get()
    return _of_process if name == _NO_BLOCK else name


def named(requested: str | None) -> str | None:
    """The backend that a call has to run on, by its own choice or by this one; None: its best one."""
    return current() if requested is None else requested


def of_operator(name: str, requested: str | None) -> str:
    """What an operator is told to run on. Args: name: what was found. requested: by the call itself."""
    return f"{_TRACED}{name}" if requested is None and torch.compiler.is_compiling() else name


def found(told: str) -> str:
    """The name that `of_operator` was given."""
    return told.removeprefix(_TRACED)


def is_left_to_block(told: str) -> bool:
    """Whether an operator that was told so has to choose anew, for it runs in a block."""
    return told.startswith(_TRACED) and _of_block.get() != _NO_BLOCK

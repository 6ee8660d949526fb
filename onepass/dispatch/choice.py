"""The backend of calls that name none: `onepass.use_backend`, and `ONEPASS_BACKEND` in the environment.

Four choices are possible, and the first of them that was made decides: `backend=` of a call, the innermost
`with use_backend(...)` block around it, the last call of `use_backend` outside of a `with` statement in this process,
and `ONEPASS_BACKEND` as it was when onepass was imported.

A block is a context variable, seen by its own thread or task only. torch.compile cannot trace context variables, so a
graph is made for the choice of the process (which is guarded: another choice makes another graph), and the operators of
the graph look for a block when they run, see `backend_argument`.
"""

from __future__ import annotations

from contextvars import ContextVar
from types import TracebackType

import torch

from .. import variables

NAMES = variables.BACKENDS
WITHOUT_KERNELS = ("cpu", "tiled")
_NO_BLOCK = ""
_TRACED = "traced:"  # the prefix of the name in an operator of a graph, if its call names no backend


def refusal(name: object) -> str | None:
    """Why this is not the name of a backend, as words for a message; None if it is one."""
    if isinstance(name, str) and name in NAMES:
        return None
    given = repr(name) if isinstance(name, str) else type(name).__name__
    return f"expected one of {', '.join(sorted(NAMES))} or None, got {given}"


_process_choice = variables.BACKEND.read()
_block_choice: ContextVar[str | None] = ContextVar("onepass.use_backend", default=_NO_BLOCK)


class use_backend:
    """Choose the backend of all calls that do not name one with `backend=`.

        onepass.use_backend("tiled")          # from here on, in all threads
        with onepass.use_backend("sm80"):     # in this block
            out = onepass.attention(q, k, v)

    In a `with` statement the choice holds in the block: for the thread or asyncio task that runs it and for tasks that
    are started in it, not for other threads. Any other call chooses for the whole process, from the end of the
    statement on: the choice is made when the object is deleted without having entered a block. `ONEPASS_BACKEND` in
    the environment chooses for the process when onepass is imported.

    A call that the chosen backend does not compute is refused with the reason, as it is with `backend=`; on a machine
    whose calls also have tensors on the CPU, "sm90" and "sm80" are therefore choices for blocks. The gradients of a
    call are computed by the backend of its forward, wherever they are asked for. With "cpu" and "tiled" no kernel
    of onepass runs, not in `merge_partials` and `quantize_fp8` either.

    Under torch.compile, another choice for the process makes another graph. A block around the call of a compiled
    function holds for the forwards in it, which look for it when they run; gradients of compiled functions follow the
    choice for the process, and `use_backend` itself cannot be called in a compiled function.

    Args:
        name: "sm90", "sm80", "cpu" or "tiled"; None: the best backend of each call, as if nothing had been chosen.

    Raises: TypeError or ValueError if name is not one of these; RuntimeError in a function that is being compiled, and
    for an object that was entered before.
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
        self._token = _block_choice.set(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _block_choice.reset(self._token)

    def __del__(self) -> None:
        # Choosing in __init__ would let other threads see a block's choice between __init__ and __enter__.
        if self._is_for_process:
            _choose_for_process(self.name)

    def __repr__(self) -> str:
        """The call as text; it also chooses for the process.

        An interactive session keeps the last object that it shows, so `__del__` would come late. An object that is
        shown is not in a `with` statement.
        """
        if self._is_for_process:
            _choose_for_process(self.name)
        return f"use_backend({self.name!r})"


def _choose_for_process(name: str | None) -> None:
    global _process_choice
    _process_choice = name


def current() -> str | None:
    """The choice that holds where this is called; None: there is none."""
    return _process_choice if torch.compiler.is_compiling() else current_outside_compile()


def current_outside_compile() -> str | None:
    """`current` for callers that torch.compile does not trace."""
    name = _block_choice.get()
    return _process_choice if name == _NO_BLOCK else name


def named(requested: str | None) -> str | None:
    """The backend that a call has to run on, named by the call or chosen for it; None: the best one for the call."""
    return current() if requested is None else requested


def backend_argument(name: str, requested: str | None) -> str:
    """The `backend` argument of an operator.

    Args:
        name: the backend that was chosen for the call. requested: the backend that the call itself names, or None.
    """
    return f"{_TRACED}{name}" if requested is None and torch.compiler.is_compiling() else name


def backend_name(argument: str) -> str:
    """The backend's name in a `backend_argument`."""
    return argument.removeprefix(_TRACED)


def is_left_to_block(argument: str) -> bool:
    """Whether an operator with this `backend_argument` has to choose again, because it runs in a block."""
    return argument.startswith(_TRACED) and _block_choice.get() != _NO_BLOCK

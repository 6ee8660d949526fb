"""Putting onepass under torch's attention, and undoing it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ... import cpu  # noqa: F401  # imported before torch's kernels are replaced, because this backend takes them
from ...errors import REFUSALS
from . import operators

NAME = "onepass"
DEVICES = ("cuda", "cpu")

_active: Activation | None = None


class Activation:
    """The changes of `activate`; as a context manager it undoes them at the end of the block.

    Attributes:
        devices: the types of devices whose kernels are replaced.
        refused: how many calls went to the kernel that was there before, by (operator, reason).
    """

    def __init__(self, devices: tuple[str, ...]):
        self.devices, self.refused = devices, dict[tuple[str, str], int]()
        self._library: Any = None

    def put_in_place(self) -> Activation:
        """Replace the kernels. Returns: self, as a handle of torch's registry, which has a method `remove`."""
        library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():  # torch warns of the first override in a process
            warnings.filterwarnings("ignore", message="Warning only once for all operators", category=UserWarning)
            for device in self.devices:
                key = device.upper()
                for name, function in operators.functions(device).items():
                    previous = _kernel(name, key)
                    library.impl(name, self._with_fallback(name, function, previous, key), key, allow_override=True)
        self._library = library
        return self

    def remove(self) -> None:
        """Bring back the kernels that were there before."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _with_fallback(self, name: str, function: Callable, previous: Any, key: str) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except operators.NotOurs:
                if previous is None:
                    raise
            except REFUSALS as error:
                if previous is None:
                    raise
                self._count(name, str(error))
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
            return previous.call_boxed(keys, *args, **options)

        return run

    def _count(self, name: str, reason: str) -> None:
        seen = self.refused.get((name, reason), 0)
        self.refused[name, reason] = seen + 1
        if not seen:
            warnings.warn(f"{name} runs without onepass: {reason}", RuntimeWarning, stacklevel=4)

    def __enter__(self) -> Activation:
        return self

    def __exit__(self, *error: object) -> None:
        if _active is self:
            deactivate()


def _kernel(name: str, key: str) -> Any:
    """The kernel of an operator of aten for a dispatch key; None if there is none."""
    try:
        return torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return None


def activate(devices: Sequence[str] | None = None) -> Activation:
    """Let onepass compute torch's attention, in all threads of this process.

    Args:
        devices: "cuda", "cpu" or both; None = "cuda" where there is a GPU, else "cpu". The choice "cpu" is meant for
            tests: on a CPU torch's own kernel is faster.

    Returns: the changes; `with activate(): ...` undoes them at the end. A second call takes the place of the first one.
    Raises: ImportError before torch 2.11; ValueError for other devices.
    """
    global _active
    from torch.nn import attention as registry

    if not hasattr(registry, "register_flash_attention_impl") or not hasattr(torch.library, "get_kernel"):
        raise ImportError(f"torch: expected 2.11 or newer, whose attention has a registry, got {torch.__version__}")
    if devices is None:
        devices = ("cuda",) if torch.cuda.is_available() else ("cpu",)
    if not isinstance(devices, Iterable):
        raise TypeError(f"devices: expected a sequence of {DEVICES} or None, got {devices!r}")
    chosen = (devices,) if isinstance(devices, str) else tuple(devices)
    if not chosen or any(device not in DEVICES for device in chosen):
        raise ValueError(f"devices: expected some of {DEVICES}, got {devices!r}")
    deactivate()
    activation = Activation(chosen)
    registry.register_flash_attention_impl(NAME, register_fn=activation.put_in_place)
    registry.activate_flash_attention_impl(NAME)
    _active = activation
    return activation


def deactivate() -> None:
    """Bring torch's kernels back. Without an activation this does nothing."""
    global _active
    if _active is None:
        return
    from torch.nn import attention as registry

    if registry.current_flash_attention_impl() == NAME:
        registry.restore_flash_attention_impl()
    _active.remove()
    _active = None


def is_active() -> bool:
    return _active is not None


def fallbacks() -> dict[tuple[str, str], int]:
    """How many calls since `activate` went to the kernel that was there before, by (operator, reason)."""
    return {} if _active is None else dict(_active.refused)

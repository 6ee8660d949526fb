"""How a kernel gets its arguments: as one NamedTuple of onepass/kernels/arguments.py, which a launch passes flat."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import cutlass.cute as cute


def takes(arguments: type) -> Callable[[Callable], Callable]:
    """A decorator of a kernel's `__call__(self, a, stream)`, where `a` has the fields of `arguments`.

    To the compiler, and in the messages of a compiled kernel, each field is a parameter of its own. It finds the device
    and the stream of a call by its tensors, but looks for the device only among the parameters themselves: with a tuple
    of tensors as a parameter, a launch would not change to the tensors' device.
    """

    def decorate(method: Callable) -> Callable:
        body = cute.jit(method)

        def call(self, *values):
            return body(self, arguments(*values[:-1]), values[-1])

        call.__name__, call.__qualname__, call.__doc__ = method.__name__, method.__qualname__, method.__doc__
        names = "self", *arguments._fields, "stream"
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        call.__signature__ = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        return cute.jit(preprocess=False)(call)

    return decorate

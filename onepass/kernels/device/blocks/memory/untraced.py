"""Objects that kernel code may use inside run-time loops and branches."""

from __future__ import annotations


class Untraced:
    """Base of objects that name values and fragments which stay the same objects throughout a kernel.

    The tracer carries every object that a run-time loop or branch touches as the list of its run-time values. An
    untraced object has none to carry: its attributes are never rebound (its register tensors are written in place), so
    after the loop it is what it was before.

    A local name for an object that is traced, such as a kernel, must not be used inside a run-time branch: the tracer
    would carry it. An attribute of an untraced object, such as `self.kernel`, may be.
    """

    def __extract_mlir_values__(self) -> list:
        return []

    def __new_from_mlir_values__(self, values: list) -> Untraced:
        return self

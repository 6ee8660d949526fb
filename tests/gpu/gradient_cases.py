"""Shared by the GPU tests of the backward pass: gradients of a call that is made harder, and the check of them.

Gradients are taken through the public API alone: whichever backend differentiates the call is the one under test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from gpu_cases import GpuCall, assert_taken, nan_in, poisoned_memory
from random_calls import fenced
from torch import Tensor

from onepass.reference import Reference
from onepass.testing import Call, compare_gradients


class Loss(NamedTuple):
    """A loss, given by its gradients with respect to out and lse; None for an output that it does not depend on."""

    dout: Tensor | None
    dlse: Tensor | None

    def unseen(self, call: Call) -> Iterator[Tensor]:
        """The gradients of rows that belong to no sequence: those past the last packed sequence."""
        if call.is_packed:
            end = int(call.options["cu_seqlens_q"][-1])
            yield from (() if self.dout is None else (self.dout[end:],))
            yield from (() if self.dlse is None else (self.dlse[:, end:],))


def loss_of(call: Call, depends_on: str = "both") -> Loss:
    """Make a loss with normally distributed gradients between NaN fences.

    Args:
        depends_on: "out", "lse" or "both".
    """
    q, v = call.tensors["q"], call.tensors["v"]
    generator, device = torch.Generator().manual_seed(1), str(q.device)
    dout = fenced((*q.shape[:-1], v.shape[-1]), q.dtype, device, generator)
    dlse = fenced((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.float32, device, generator)
    return Loss(dout if depends_on != "lse" else None, dlse if depends_on != "out" else None)


def inputs_of(call: Call) -> dict[str, Tensor]:
    """The tensors of a call that have a gradient."""
    return call.differentiable()


def with_inputs(call: Call, inputs: dict[str, Tensor]) -> Call:
    """Return the call with these tensors in place of its own, to be run as a user runs it."""
    tensors, options = ({n: inputs.get(n, t) for n, t in d.items()} for d in (call.tensors, call.options))
    return Call(tensors, options, call.seed)


def differentiate(result: tuple[Tensor, Tensor], loss: Loss, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradients of the loss with respect to the leaves, by name."""
    used = [(t, g.to(t.dtype)) for t, g in zip(result, loss, strict=True) if g is not None and t.requires_grad]
    if not used:  # the oracle of a call without any sequence
        return {f"d{n}": torch.zeros_like(t) for n, t in leaves.items()}
    outputs, weights = zip(*used, strict=True)
    found = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True, materialize_grads=True)
    return {f"d{n}": g for n, g in zip(leaves, found, strict=True)}


def gradients(call: Call, loss: Loss, **extra: Any) -> dict[str, Tensor]:
    """Return dq, dk, dv, and dsinks, dalibi_slopes and dbias where there are such, computed as a user computes them."""
    leaves = {n: t.detach().requires_grad_() for n, t in inputs_of(call).items()}
    return differentiate(with_inputs(call, leaves).run(**extra), loss, leaves)


def hard_gradients(call: GpuCall, loss: Loss, deterministic: bool = False) -> dict[str, Tensor]:
    """Return `gradients`; what no kernel may read is NaN during forward and backward (see `GpuCall`)."""
    with nan_in([*call.unseen(), *loss.unseen(call)]), poisoned_memory():
        return gradients(call, loss, deterministic=deterministic)


class Expected(NamedTuple):
    """The values that gradients are compared with, each by the name of its gradient.

    Attributes:
        oracle: the gradients computed in float64.
        plain: the gradients computed by plain PyTorch in the dtype of the inputs.
        floors: the error that rounding alone may cause.
        result: the oracle's out and lse.
    """

    oracle: dict[str, Tensor]
    plain: dict[str, Tensor]
    floors: dict[str, Tensor]
    result: Reference

    def misses(self, actual: dict[str, Tensor], regions: dict[str, Any] | None = None) -> list[str]:
        """Describe the gradients that are over their error budget.

        Args:
            regions: by name, an index into each gradient to compare; None compares all gradients whole.
        """
        rows = []
        for name in self.oracle if regions is None else regions:
            region = ... if regions is None else regions[name]
            floor = self.floors[name] if regions is None else float(self.floors[name].max())
            rows.append(compare_gradients(name, *(g[name][region] for g in (actual, self.oracle, self.plain)), floor))
        return [str(row) for row in rows if not row.ok]


def expected_gradients(call: Call, loss: Loss) -> Expected:
    """Compute the gradients in float64 and in the dtype of the inputs."""
    dtype = call.tensors["q"].dtype
    both = []
    for compute_dtype in (torch.float64, dtype):
        # the leaves have the compute dtype, or the oracle's gradients would be rounded
        kinds = {n: t.dtype if compute_dtype == dtype else compute_dtype for n, t in inputs_of(call).items()}
        leaves = {n: t.detach().to(kinds[n]).requires_grad_() for n, t in inputs_of(call).items()}
        result = with_inputs(call, leaves).expected(compute_dtype)
        both.append((differentiate(result, loss, leaves), Reference(*(t.detach() for t in result))))
    (oracle, result), (plain, _) = both
    dout = torch.zeros_like(result.out) if loss.dout is None else loss.dout
    dlse = torch.zeros_like(result.lse) if loss.dlse is None else loss.dlse
    floors = call._floors(dout, dlse, result)
    none = {name: torch.zeros(()) for name in oracle}
    return Expected(oracle, plain, none | {name: x for name, x in floors.items() if name in oracle}, result)


def check_gradients(
    call: GpuCall, depends_on: str = "both", loss: Loss | None = None, deterministic: bool = False
) -> dict[str, Tensor]:
    """Assert that the gradients are within their budgets, and zero where the loss does not depend on an input.

    Returns:
        The gradients, by name.
    """
    assert_taken(call)
    loss = loss or loss_of(call, depends_on)
    actual, expected = hard_gradients(call, loss, deterministic), expected_gradients(call, loss)
    misses = expected.misses(actual)
    is_empty = (expected.result.out == 0).all(-1)
    # with a random dout, dv is zero exactly for the keys that no row sees
    is_unseen = (expected.oracle["dv"] == 0).all(-1) if loss.dout is not None else ...
    zeros = {"dq": is_empty, "dv": is_unseen}
    if loss.dout is not None:
        zeros["dk"] = is_unseen
    if call.options.get("dropout_p"):  # lse depends on pairs that out does not
        zeros = {}
    for name, rows in zeros.items():
        if (actual[name][rows] != 0).any():  # true for NaN as well
            misses.append(f"{name}: expected zeros where the loss does not depend on it")
    for name, t in inputs_of(call).items():
        if actual[f"d{name}"].dtype != t.dtype or actual[f"d{name}"].shape != t.shape:
            misses.append(f"d{name}: expected dtype and shape of {name}")
    if misses:
        raise AssertionError("\n  ".join((str(call), *misses)))
    return actual


def changed(call: GpuCall, **inputs: Tensor) -> GpuCall:
    """Return the call with other tensors for some of its inputs."""
    return replace(call, tensors={n: inputs.get(n, t) for n, t in call.tensors.items()})

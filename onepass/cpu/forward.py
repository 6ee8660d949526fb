"""The forward pass on a CPU: out and lse by torch's C++ operator."""

from __future__ import annotations

from torch import Tensor

from .. import tiled
from ..problem import AttentionProblem, Inputs
from ..problem.outputs import empty_outputs, in_order_of, without_keys
from ..tiled.merge import merge_in_torch
from ..tiled.sequences import merged, sequences
from . import operators
from .regions import Region, regions


def forward(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.forward` gives them."""
    results = by_operators(problem, inputs)
    return tiled.forward(problem, inputs) if results is None else results


def by_operators(problem: AttentionProblem, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
    """out and lse, or None where `tiled` computes them.

    This is where torch's settings round float32 operands, where a result is not finite, and where rounding partial
    results to 16 bits would add to their error.
    """
    if not operators.are_exact(problem):
        return None
    q, k, v = inputs[:3]
    if not (problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k):
        found = regions(problem.mask, problem.seqlen_q, problem.seqlen_k)
        if len(found) == 1 and found[0].covers(problem.seqlen_q, problem.seqlen_k) and not problem.is_empty:
            whole = _attention(problem, q, k, v, found[0].is_causal)
            return None if whole is None else (in_order_of(whole[0], q), whole[1])
    out, lse = without_keys(*empty_outputs(problem, inputs), None, None)
    for piece in merged(sequences(problem, inputs)):
        q_rows, k_rows, v_rows = piece.rows(q), piece.cols(k), piece.cols(v)
        if 0 in q_rows.shape:
            continue
        found = regions(problem.mask, q_rows.shape[1], k_rows.shape[1])
        if len(found) > 1 and problem.dtype.itemsize == 2:
            return None
        partials = [
            _attention(problem, q_rows[:, r.queries], k_rows[:, r.keys], v_rows[:, r.keys], r.is_causal) for r in found
        ]
        if None in partials:
            return None
        if partials:
            _write(piece.rows(out), piece.stats(lse), found, partials)
    return out, lse


def _attention(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor] | None:
    """out and lse of a region's queries and keys; None if a hidden key may have reached them, or a NaN was lost."""
    out, lse = operators.forward(q, k, v, problem.softmax_scale, is_causal)
    is_right = operators.are_regular(lse) and (not is_causal or operators.is_finite(out))
    return (out, lse) if is_right else None


def _write(out: Tensor, lse: Tensor, found: tuple[Region, ...], partials: list) -> None:
    """Write the results of a sequence, merged where a row has two."""
    rows = found[0].queries
    (first, first_lse), *second = partials
    if second:
        first, first_lse = merge_in_torch([p[0] for p in partials], [p[1] for p in partials])
    out[:, rows].copy_(first)
    lse[:, :, rows].copy_(first_lse)

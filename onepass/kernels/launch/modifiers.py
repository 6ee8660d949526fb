"""Modifiers of a call as kernels get them: views and small tensors, made without reading a value on the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry import philox
from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem, Blocks, Modifiers
from ..arguments import ModifierTensors
from ..config import BackwardConfigSm80, BackwardConfigSm90
from .arguments import LOG2_E, element_type, score_scales, strided_tensor

BackwardConfig = BackwardConfigSm80 | BackwardConfigSm90


def unsupported(problem: AttentionProblem) -> str | None:
    """Why no kernel computes the modifiers of a problem; None if kernels do."""
    if problem.has_query_ranges:
        return "query_ranges: expected none"
    return "block_mask: expected none" if problem.block_size is not None else None


def entries_of(problem: AttentionProblem) -> int:
    """Batch entries of tensors with rows: packed sequences have one."""
    return 1 if problem.is_packed else problem.batch


def arguments_of(
    problem: AttentionProblem, given: Modifiers | None, blocks: Blocks | None = None
) -> ModifierTensors | None:
    """The modifiers of a call as a forward kernel gets them."""
    if given is None:
        return None
    entries = entries_of(problem)
    positions, slopes, bias = given.q_positions, given.alibi_slopes, given.bias
    ranges, query_ranges = (
        None
        if t is None
        else (t[None] if problem.is_packed else t).expand(entries, problem.num_heads_q, -1, -1).permute(2, 3, 1, 0)
        for t in (given.key_ranges, given.query_ranges)
    )
    if positions is not None:
        positions = (positions if positions.dim() == 2 else positions[None]).expand(entries, -1).t()
    if slopes is not None:
        slopes = slopes.expand(problem.batch, -1).t()
    if bias is not None:
        bias = expanded_bias(problem, bias.to(kernel_dtype(bias.dtype)))
    scale = term_scale(problem) if problem.adds_terms else None
    found = ModifierTensors(
        ranges, positions, given.seqstart_k, slopes, bias, term_scale=scale, query_ranges=query_ranges
    )
    if blocks is not None:
        kinds, bits = (
            None if t is None else t.expand(problem.batch, problem.num_heads_q, -1, -1).permute(2, 3, 1, 0)
            for t in (blocks.kinds, blocks.bits)
        )
        found = found._replace(kinds=kinds, bits=bits)
    if problem.dropout_p > 0:
        assert given.dropout_state is not None
        found = found._replace(
            dropout_state=given.dropout_state.view(torch.int32),
            keep_bytes=philox.keep_bytes(problem.dropout_p),
            keep_scale=philox.keep_scale(problem.dropout_p),
            first_head=problem.first_head,
            all_heads=problem.all_heads or problem.num_heads_q,
        )
    return found


def kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels read a bias."""
    return torch.float32 if dtype == torch.float64 else dtype


def term_scale(problem: AttentionProblem) -> float:
    """What brings a term to the unit of a kernel's scores."""
    return LOG2_E / score_scales(problem)[0]


def expanded_bias(problem: AttentionProblem, bias: Tensor) -> Tensor:
    """A bias, or its gradient, as (rows, keys, heads, entries)."""
    bias = bias[None] if problem.is_packed else bias
    rows = bias.shape[2] if problem.has_q_positions and bias.shape[2] > 1 else max(problem.seqlen_q, bias.shape[2])
    if problem.has_q_positions and bias.shape[2] == 1:
        rows = 2**30  # any position has this row
    keys = bias.shape[3] if bias.shape[3] > 1 else problem.seqlen_k
    return bias.expand(entries_of(problem), problem.num_heads_q, rows, keys).permute(2, 3, 1, 0)


# ---------------------------------------------------------------- the backward


class TermGradients(NamedTuple):
    """What a backward adds the gradients of slopes and of a bias to; None where there are none."""

    slopes: Tensor | None  # (batch, heads, places)
    bias: Tensor | None


def gradients_of_terms(problem: AttentionProblem, config: BackwardConfig, inputs: AttentionInputs) -> TermGradients:
    """Zeros to which the main kernel adds."""
    given = inputs.modifiers
    assert given is not None
    slopes = bias = None
    if given.alibi_slopes is not None and not problem.constant_slopes:
        places = ceil_div(problem.seqlen_k, config.tile_n) * config.tile_warps
        slopes = torch.zeros(problem.batch, problem.num_heads_q, places, device=inputs.q.device)
    if given.bias is not None and not problem.constant_bias:
        shape = given.bias.shape
        if problem.deterministic:
            # sums over what the bias is broadcast over would come in any order: a place for each pair
            keys = shape[-1] if shape[-1] > 1 else problem.seqlen_k
            shape = torch.Size((problem.num_heads_q, problem.seqlen_q, keys))
            shape = shape if problem.is_packed else torch.Size((problem.batch, *shape))
        bias = torch.zeros(shape, device=inputs.q.device)
    return TermGradients(slopes, bias)


def backward_arguments(problem: AttentionProblem, given: ModifierTensors, terms: TermGradients) -> ModifierTensors:
    """The modifiers of a call as a backward kernel gets them. Args: given: those of `arguments_of`, with lists."""
    slopes, bias = terms
    if slopes is not None:
        slopes = slopes.permute(2, 1, 0)
    if bias is not None and problem.deterministic:
        bias = (bias[None] if problem.is_packed else bias).permute(2, 3, 1, 0)
    elif bias is not None:
        bias = expanded_bias(problem, bias)
    return given._replace(dslopes=slopes, dbias=bias)


def finished(
    problem: AttentionProblem, inputs: AttentionInputs, terms: TermGradients
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of alibi_slopes and of bias."""
    given = inputs.modifiers
    assert given is not None
    dslopes = dbias = None
    if given.alibi_slopes is not None and terms.slopes is not None:
        dslopes = terms.slopes.sum(-1)
        dslopes = dslopes.sum(0) if given.alibi_slopes.dim() == 1 else dslopes
    if given.bias is not None and terms.bias is not None:
        found = terms.bias
        if problem.deterministic and given.q_positions is not None and given.bias.shape[-2] > 1:
            found = _by_position(problem, given.bias, found, given.q_positions)
        dbias = found.sum_to_size(given.bias.shape).to(given.bias.dtype)
    return dslopes, dbias


def _by_position(problem: AttentionProblem, bias: Tensor, found: Tensor, q_positions: Tensor) -> Tensor:
    """Gradients of pairs, (.., heads, queries, keys), added up by the queries' rows of the bias, in a fixed order."""
    rows = bias.shape[-2]
    found = found[None] if problem.is_packed else found
    entries, heads, _, keys = found.shape
    positions = q_positions.view(-1, 1, q_positions.shape[-1]).expand(entries, heads, -1).long()
    positions = positions.clamp(0, rows - 1)  # a position that is none of the rows has the nearest one
    first = torch.arange(entries * heads, device=found.device).view(entries, heads, 1) * rows
    target = found.new_zeros(entries * heads * rows, keys)
    # on a GPU, too, this sums in the order of the indices, unlike index_add_
    target.index_put_(((first + positions).flatten(),), found.flatten(0, 2), accumulate=True)
    target = target.view(entries, heads, rows, keys)
    return target[0] if problem.is_packed else target


# ---------------------------------------------------------------- tracing


def fake_arguments(problem: AttentionProblem, is_backward: bool = False) -> ModifierTensors | None:
    """Stand-ins for the modifiers of a forward or a backward kernel."""
    from cutlass import Float32, Int8, Int32

    if not problem.has_modifiers:
        return None
    found: dict[str, Any] = {}
    if problem.has_key_ranges:
        found["ranges"] = strided_tensor(Int32, 4)
    if problem.has_q_positions:
        found["positions"] = strided_tensor(Int32, 2)
    if problem.has_seqstart_k:
        found["starts"] = strided_tensor(Int32, 1)
    if problem.has_alibi:
        found["slopes"] = strided_tensor(Float32, 2)
    if problem.bias_dtype is not None:
        found["bias"] = strided_tensor(element_type(kernel_dtype(problem.bias_dtype)), 4)
    if problem.dropout_p > 0:
        found |= {"dropout_state": strided_tensor(Int32, 1), "keep_bytes": Int32(1), "keep_scale": Float32(1.0)}
        found |= {"first_head": Int32(1), "all_heads": Int32(1)}
    if problem.adds_terms:
        found["term_scale"] = Float32(1.0)
    if problem.has_backward_lists if is_backward else problem.has_lists:
        found |= {name: strided_tensor(Int32, 4, first_stride=1) for name in ("numbers", "counts")}
        if is_backward and problem.deterministic:
            found["turns"] = strided_tensor(Int32, 4, first_stride=1)
    if problem.has_query_ranges:
        found["query_ranges"] = strided_tensor(Int32, 4)
    if problem.block_size is not None:
        found["kinds"] = strided_tensor(Int8, 4)
    if problem.has_block_bits:
        found["bits"] = strided_tensor(Int32, 4)
    if is_backward and problem.has_alibi and not problem.constant_slopes:
        found["dslopes"] = strided_tensor(Float32, 3)
    if is_backward and problem.has_bias and not problem.constant_bias:
        found["dbias"] = strided_tensor(Float32, 4)
    return ModifierTensors(**found)

"""The backward pass on a CPU by torch's C++ operator, which takes the lse of whole rows and any of their keys.

In 16 bits the operator adds the gradients of its blocks, up to 256 queries and 512 keys, to sums of 16 bits. The error
of such a sum grows with the number of blocks: at 4096 queries that of dk and dv is three to four times that of rounding
them once. Chunks of 2048 x 2048 have at most eight blocks, and their sums are float32.
"""

from __future__ import annotations

import collections
import itertools

import torch
from torch import Tensor

from .. import tiled
from ..geometry.block_range import tiles
from ..problem import AttentionInputs, AttentionProblem
from ..problem.outputs import empty_gradients, in_order_of
from ..tiled.scratch import Scratch
from ..tiled.sequences import head_groups, sequences
from . import operators
from .blocks import KeptBlocks, gathered, gathers
from .masks import RowMasks, groups, masks_of_whole, needs_masks
from .regions import Region, chunks, regions

CHUNK = 2048  # keys and queries; at 1024 sums take 5 % of the time, and errors are 0.85 to 1 times as large
SUMS_BYTES = 16 * 2**20  # for the float32 sums of dq, unless one head for each thread needs more


def backward(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a call, as `onepass.tiled.backward` gives them."""
    return gradients(problem, inputs, out, lse, dout, dlse)[:4]


def gradients(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of a call, as `onepass.tiled.gradients` gives them."""
    # the operator has no gradients of lse, slopes and biases
    has_constants = (problem.constant_slopes or not problem.has_alibi) and (
        problem.constant_bias or not problem.has_bias
    )
    can_run = dlse is None and has_constants and operators.are_exact(problem) and not problem.is_empty
    if can_run and (problem.dtype.itemsize > 2 or problem.head_dim >= operators.MIN_HEAD_DIM_16BIT):
        by_masks = _by_blocks if gathers(problem) else _by_masks
        compute = by_masks if needs_masks(problem) else _by_operators
        results = compute(problem, inputs, out, lse, dout)
        if results is not None:
            return *results, tiled.gradient_of_sinks(problem, inputs, out, lse, dout), None, None
    return tiled.gradients(problem, inputs, out, lse, dout, dlse)


def _by_operators(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """None: a gradient is not finite."""
    q, k, v = inputs[:3]
    is_whole = not (problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k)
    if is_whole:
        found = _regions(problem, problem.seqlen_q, problem.seqlen_k)
        if len(found) == 1 and found[0].covers(problem.seqlen_q, problem.seqlen_k):
            results = operators.backward(dout, q, k, v, out, lse, problem.softmax_scale, found[0].is_causal)
            if not operators.is_finite(*(results if found[0].is_causal else (lse,))):
                return None
            dq, dk, dv = (in_order_of(t, like) for t, like in zip(results, (q, k, v), strict=True))
            return dq, dk, dv
    dq, dk, dv, _ = empty_gradients(inputs)
    if not is_whole:
        for t in (dq, dk, dv):  # tokens outside every sequence, before its start, and keys past seqused_k
            t.zero_()
    scratch = Scratch(q, problem.accum_dtype)
    for piece in sequences(problem, inputs):
        rows = [piece.rows(t) for t in (dout, q, out, dq)]
        cols = [piece.cols(t) for t in (k, v, dk, dv)]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        found = _regions(problem, rows[0].shape[1], cols[0].shape[1])
        for group in head_groups(problem, rows[0].shape[0], _heads_together(problem, rows[0].shape[1])):
            group_rows = [group.q_rows(t).permute(0, 3, 1, 2, 4).flatten(2, 3) for t in rows]
            group_cols = [group.kv_rows(t).transpose(1, 2) for t in cols]
            _group(problem, found, group_rows, group_cols, group.stats(piece.stats(lse)).flatten(1, 2), scratch)
    return (dq, dk, dv) if operators.is_finite(dq, dk, dv) else None


def _by_masks(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`_by_operators` where regions do not do: blocks of rows, with a mask each."""
    q, k, v = inputs[:3]
    accum, is_16bit = problem.accum_dtype, problem.dtype.itemsize == 2
    scratch = Scratch(q, accum)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # exp(-inf - inf) = 0: a row without keys has no gradient
    in_blocks = is_16bit and max(problem.seqlen_q, problem.seqlen_k) > CHUNK
    whole_masks = masks_of_whole(problem, inputs, scratch, in_blocks)
    if whole_masks is not None:
        mask = whole_masks.mask((0, problem.seqlen_q), (0, problem.seqlen_k))
        results = operators.backward(dout, q, k, v, out, lse, problem.softmax_scale, whole_masks.is_causal, mask)
        dq, dk, dv = (in_order_of(t, like) for t, like in zip(results, (q, k, v), strict=True))
        return (dq, dk, dv) if operators.is_finite(dq, dk, dv) else None
    gradients = empty_gradients(inputs)[:3]
    sums = [torch.zeros_like(t, dtype=accum) if is_16bit else t.zero_() for t in gradients]
    for piece in sequences(problem, inputs):
        rows, cols = [piece.rows(t) for t in (dout, q, out, sums[0])], [piece.cols(t) for t in (k, v, *sums[1:])]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        for group in groups(problem, inputs, rows[0].shape[0], cols[0].shape[1]):
            group_rows = [group.q_rows(t).permute(0, 3, 1, 2, 4) for t in rows]
            group_cols = [group.kv_rows(t).transpose(1, 2) for t in cols]
            group_lse = group.stats(piece.stats(lse)).flatten(1, 2)
            masks = RowMasks(problem, inputs, piece, group, scratch, in_blocks)
            for queries in tiles(0, masks.seqlen_q, min(masks.num_rows, CHUNK) if is_16bit else masks.num_rows):
                seen = masks.keys_of(queries)
                if seen is None:
                    continue
                block = slice(*queries)
                *block_rows, sum_dq = (t[:, block] for t in group_rows)
                dout_rows, q_rows, out_rows = (t.flatten(2, 3) for t in block_rows)
                for keys in tiles(*seen, CHUNK if is_16bit else seen[1]):
                    k_rows, v_rows, sum_dk, sum_dv = (t[:, slice(*keys)] for t in group_cols)
                    operands = dout_rows, q_rows, k_rows, v_rows, out_rows, group_lse[..., block]
                    results = operators.backward(
                        *operands, problem.softmax_scale, masks.is_causal, masks.mask(queries, keys)
                    )
                    for total, result in zip((sum_dq, sum_dk, sum_dv), results, strict=True):
                        total.add_(result.view_as(total))
    dq, dk, dv = (g if g is t else g.copy_(t) for g, t in zip(gradients, sums, strict=True))
    return (dq, dk, dv) if operators.is_finite(dq, dk, dv) else None


def _by_blocks(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`_by_operators` for a call whose block_mask alone, with bounds on the rows, says which pairs are visible."""
    accum, is_16bit = problem.accum_dtype, problem.dtype.itemsize == 2
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # as in `_by_masks`
    dq, dk, dv = (t.zero_() for t in empty_gradients(inputs)[:3])
    for piece in sequences(problem, inputs):
        rows = [piece.rows(t) for t in (dout, inputs.q, out, dq)]
        cols = [piece.cols(t) for t in (inputs.k, inputs.v, dk, dv)]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        blocks = KeptBlocks(problem, inputs, piece)
        item_dout, q, item_out = (blocks.items(t) for t in rows[:3])
        item_lse = blocks.items(piece.stats(lse).transpose(1, 2)[..., None])[..., 0].transpose(1, 2)
        k, v = (blocks.blocks_of_keys(t) for t in cols[:2])
        sum_dq, sum_dk, sum_dv = (torch.zeros_like(t, dtype=accum) for t in (q, k, v))
        for items, keys, mask in blocks.batches(CHUNK if is_16bit else None):
            of_keys = gathered(k, keys), gathered(v, keys)
            operands = item_dout[items], q[items], *of_keys, item_out[items], item_lse[items]
            results = operators.backward(*operands, problem.softmax_scale, False, mask)
            sum_dq.index_add_(0, items, results[0].to(accum))
            for total, result in zip((sum_dk, sum_dv), results[1:], strict=True):
                total.index_add_(0, keys.flatten(), result.reshape(-1, *total.shape[1:]).to(accum))
        rows[3].copy_(blocks.rows(sum_dq))
        cols[2].copy_(blocks.keys(sum_dk))
        cols[3].copy_(blocks.keys(sum_dv))
    return (dq, dk, dv) if operators.is_finite(dq, dk, dv) else None


def _regions(problem: AttentionProblem, seqlen_q: int, seqlen_k: int) -> tuple[Region, ...]:
    found = regions(problem.mask, seqlen_q, seqlen_k)
    if problem.dtype.itemsize > 2:
        return found
    return tuple(chunk for region in found for chunk in chunks(region, CHUNK))


def _heads_together(problem: AttentionProblem, seqlen_q: int) -> int:
    """How many kv heads to compute at a time: some for each thread, few enough for SUMS_BYTES."""
    group = problem.qhead_per_kvhead
    per_thread = -(-torch.get_num_threads() // group)
    head_bytes = seqlen_q * problem.head_dim * problem.accum_dtype.itemsize * group
    return max(per_thread, SUMS_BYTES // head_bytes // per_thread * per_thread)


def _group(
    problem: AttentionProblem,
    found: tuple[Region, ...],
    rows: list[Tensor],  # dout, q, out, dq: (entries, seqlen_q, query heads, head_dim)
    cols: list[Tensor],  # k, v, dk, dv: (entries, seqlen_k, kv heads, head_dim)
    lse: Tensor,  # (entries, query heads, seqlen_q)
    scratch: Scratch,
) -> None:
    """Adds up the regions' gradients, and writes dq, dk and dv."""
    dout, q, out, dq = rows
    k, v, dk, dv = cols
    counts = collections.Counter(region.first_query for region in found)
    sums_dq = {r.first_query: _Sum(dq[:, r.queries], counts[r.first_query], scratch) for r in found}
    dq[:, : min(counts, default=dq.shape[1])] = 0  # rows that see no key
    for t in (dk, dv):  # keys that no row sees
        t[:, max((region.keys.stop for region in found), default=0) :] = 0
    for (first_key, num_keys), regions_of_keys in itertools.groupby(found, lambda region: region[2:4]):
        keys, with_these_keys = slice(first_key, first_key + num_keys), list(regions_of_keys)
        sum_dk, sum_dv = (_Sum(t[:, keys], len(with_these_keys), scratch) for t in (dk, dv))
        for region in with_these_keys:
            queries = region.queries
            tensors = dout[:, queries], q[:, queries], k[:, keys], v[:, keys], out[:, queries], lse[:, :, queries]
            results = operators.backward(*tensors, problem.softmax_scale, region.is_causal)
            for total, result in zip((sums_dq[region.first_query], sum_dk, sum_dv), results, strict=True):
                total.add(result)


class _Sum:
    """The sum of a known number of tensors, written to `target` when the last one has come.

    Tensors of 16 bits are added in the buffers' dtype, float32. Two of them need no buffer: torch adds them in float32
    and rounds once.
    """

    def __init__(self, target: Tensor, count: int, scratch: Scratch):
        self.target, self.count, self.scratch = target, count, scratch
        self.first: Tensor | None = None
        self.total: Tensor | None = None

    def add(self, t: Tensor) -> None:
        self.count -= 1
        if self.first is None:
            self.first = t
        elif self.total is None and self.count == 0:
            torch.add(self.first, t, out=self.target)
            return
        else:
            if self.total is None:
                self.total = self.first.to(self.scratch.dtype)
            self.total += self._converted(t)
        if self.count == 0:
            self.target.copy_(self.first if self.total is None else self.total)

    def _converted(self, t: Tensor) -> Tensor:
        """t in the buffers' dtype and its own order. To add another dtype, torch would make a new tensor each time."""
        entries, rows, heads, head_dim = t.shape
        if t.stride(1) < t.stride(2):
            return self.scratch.empty("result", entries, heads, rows, head_dim).transpose(1, 2).copy_(t)
        return self.scratch.empty("result", *t.shape).copy_(t)

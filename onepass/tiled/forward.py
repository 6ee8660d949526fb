"""The forward pass: out and lse in one pass over the keys, with never more than one tile of scores in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..geometry import philox
from ..geometry.block_range import key_tiles, tiles
from ..problem import AttentionInputs, AttentionProblem
from ..problem.outputs import empty_outputs, without_keys
from ..quantization import codec, dequantize
from .mask import Range, TileMask, add_visible
from .modifiers import ScoreModifiers, make_modifiers
from .online_softmax import OnlineSoftmax
from .scratch import Scratch
from .sequences import Sequences, head_groups, sequences
from .tile_sizes import TileSizes, work_dtype


def forward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    tile_sizes: TileSizes | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of a whole call.

    Returns: out, in the shape (with head_dim_v) and memory order of q, and lse (batch, num_heads_q, seqlen_q) or
    (num_heads_q, total_q), natural log. A row that sees no key has out = 0, and lse = its sink, or -inf without sinks.
    Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1.
    """
    out, lse = empty_outputs(problem, inputs)
    if inputs.descales is not None:
        inputs = dequantize.dequantized(problem, inputs)
    q = inputs.q
    pieces = sequences(problem, inputs)
    # rows without a sequence or a key keep these values; all others are overwritten
    is_covered = not (problem.is_packed or problem.has_seqstart_k) and all(piece.num_keys for piece in pieces)
    if not is_covered:
        without_keys(out, lse, inputs.sinks, inputs.cu_seqlens_q)
    scratch = Scratch(q, work_dtype(problem))
    for piece in pieces:
        views = piece.rows(q), piece.cols(inputs.k), piece.cols(inputs.v), piece.rows(out), piece.stats(lse)
        if 0 not in views[0].shape and 0 not in views[1].shape:
            _forward_sequences(problem, inputs, piece, *views, tile_sizes, scratch)
    return out, lse


def _forward_sequences(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    piece: Sequences,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile_sizes: TileSizes | None,
    scratch: Scratch,
) -> None:
    """Sequences of equal lengths, (n, seqlen, num_heads, head_dim): fills the views `out` and `lse`."""
    sizes = tile_sizes or TileSizes.choose(problem, k.shape[1])
    for group in head_groups(problem, q.shape[0], sizes.heads):
        group_sinks = None if inputs.sinks is None else group.per_head(inputs.sinks)
        _forward_group(
            problem,
            group.q_rows(q),
            group.kv_rows(k),
            group.kv_rows(v),
            group.q_rows(out),
            group.stats(lse),
            group_sinks,
            make_modifiers(problem, inputs, piece, group),
            sizes,
            scratch,
        )


def _forward_group(
    problem: AttentionProblem,
    q: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q, head_dim)
    k: Tensor,  # (entries, kv heads, seqlen_k, head_dim)
    v: Tensor,  # (entries, kv heads, seqlen_k, head_dim_v)
    out: Tensor,
    lse: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q)
    sinks: Tensor | None,  # (kv heads, qhead_per_kvhead)
    modifiers: ScoreModifiers | None,
    sizes: TileSizes,
    scratch: Scratch,
) -> None:
    """The main loop. All query heads of a kv head share its tiles: their rows are stacked into one matrix.

    An FP8 call differs in P alone: P is rounded to e4m3, and row maxima keep it in range.
    """
    is_fp8 = problem.quantization is not None
    seqlen_q, seqlen_k = q.shape[3], k.shape[2]
    geometry = (seqlen_q, seqlen_k, problem.mask.window_left, problem.mask.window_right)
    k, v = scratch.load("k", k), scratch.load("v", v)
    heads = k.shape[0]
    tile_mask = TileMask(problem, seqlen_k - seqlen_q, v)

    def visit_keys(q_tile: Tensor, acc_o: Tensor, queries: Range, fixed_reference: bool) -> OnlineSoftmax:
        """One pass over the keys that these queries see; acc_o becomes the unnormalized output."""
        softmax = OnlineSoftmax(acc_o, fixed_reference)
        if modifiers is not None and problem.has_row_ranges:
            visited = modifiers.key_tiles(queries, sizes.tile_n)
        else:
            visited = key_tiles(queries[0], queries[1], *geometry, sizes.tile_n)
        for n_start, n_end, needs_mask in visited:
            keys = n_start, n_end
            k_tile, v_tile = k[:, n_start:n_end], v[:, n_start:n_end]
            acc_s = scratch.empty("scores", heads, q_tile.shape[1], n_end - n_start)
            torch.bmm(q_tile, k_tile.transpose(1, 2), out=acc_s)
            if problem.softcap is not None:
                acc_s.div_(problem.softcap).tanh_().mul_(problem.softcap)
            by_window = needs_mask and not problem.has_row_ranges
            pairs = tile_mask.pairs(queries, keys) if by_window else None
            if modifiers is not None:
                tile = acc_s.view(*modifiers.shape, queries[1] - queries[0], n_end - n_start)
                pairs, _ = modifiers.modify_scores_(tile, pairs, queries, keys)
            p, is_first = softmax.update(acc_s, pairs)
            if is_fp8:
                _round_probabilities_(p, scratch)
            if modifiers is not None:
                modifiers.drop_(p, modifiers.kept(queries, keys, p.dtype))
            if pairs is not None and not tile_mask.operands_are_finite:
                add_visible(acc_o.zero_() if is_first else acc_o, p, v_tile, pairs.matrix)
            elif is_first:
                torch.bmm(p, v_tile, out=acc_o)
            else:
                acc_o.baddbmm_(p, v_tile)
        return softmax

    fixed_reference = not is_fp8
    for queries in tiles(0, seqlen_q, sizes.tile_m):
        rows = slice(*queries)
        q_rows, out_rows, lse_rows = q[:, :, :, rows], out[:, :, :, rows], lse[:, :, :, rows]
        num_rows = problem.qhead_per_kvhead * (queries[1] - queries[0])
        # the scale is applied to head_dim values of q instead of seqlen_k scores
        q_tile = scratch.load_scaled("q", q_rows, problem.softmax_scale).view(heads, num_rows, problem.head_dim)
        acc_o = scratch.empty("acc_o", heads, num_rows, problem.head_dim_v)
        softmax = visit_keys(q_tile, acc_o, queries, fixed_reference)
        if softmax.row_sum is None:  # no key in sight of any of these queries
            out_rows.zero_()
            lse_rows.fill_(-torch.inf) if sinks is None else lse_rows.copy_(sinks[None, :, :, None])
            continue
        if fixed_reference and not softmax.is_safe():
            fixed_reference = False  # the scores of this group are too large: from here on with row maxima
            softmax = visit_keys(q_tile, acc_o, queries, fixed_reference)
        weight, tile_lse = softmax.finish(None if sinks is None else _rows_of(sinks, q_rows).to(acc_o.dtype))
        if problem.dropout_p:
            weight.mul_(philox.keep_scale(problem.dropout_p))
        torch.mul(acc_o.view(out_rows.shape), weight.view(*lse_rows.shape, 1), out=out_rows)
        lse_rows.copy_(tile_lse.view(lse_rows.shape))


def _round_probabilities_(p: Tensor, scratch: Scratch) -> None:
    """`codec.round_probabilities_`, which works on the bits of float32, for a p of any dtype."""
    if p.dtype == torch.float32:
        codec.round_probabilities_(p, scratch.empty("binade", *p.shape))
    else:
        rounded = p.float()
        codec.round_probabilities_(rounded, torch.empty_like(rounded))
        p.copy_(rounded)


def _rows_of(sinks: Tensor, q_rows: Tensor) -> Tensor:
    """(kv heads, qhead_per_kvhead) -> (heads, rows, 1), in the order in which rows are stacked."""
    entries, kv_heads, _, tile_m, _ = q_rows.shape
    return sinks[None, :, :, None].expand(entries, -1, -1, tile_m).reshape(entries * kv_heads, -1, 1)

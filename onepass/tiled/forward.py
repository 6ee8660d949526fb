"""The forward pass: out and lse in one pass over the keys, never holding more than one tile of scores."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.blocks.block_range import key_tiles, tiles
from ..problem import AttentionInputs, AttentionProblem
from .mask import TileMask
from .online_softmax import OnlineSoftmax, scores_are_safe
from .sequences import contiguous, head_groups, sequences
from .tile_sizes import TileSizes, matmul_precision


def forward(
    problem: AttentionProblem, inputs: AttentionInputs, tile_sizes: TileSizes | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of a whole call.

    Returns: out as q (with head_dim_v), contiguous; lse (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q),
    natural log, -inf for a row that sees no key. Source: FlashAttention-2, arXiv:2307.08691, Algorithm 1.
    """
    q = inputs.q
    pieces = sequences(problem, inputs)
    out = q.new_zeros((*q.shape[:-1], problem.head_dim_v))
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=problem.accum_dtype)
    with matmul_precision(problem):
        for piece in pieces:
            views = piece.rows(q), piece.cols(inputs.k), piece.cols(inputs.v), piece.rows(out), piece.stats(lse)
            if 0 not in views[0].shape and 0 not in views[1].shape:
                _forward_sequences(problem, *views, inputs.sinks, tile_sizes)
    return out, lse


def _forward_sequences(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    sinks: Tensor | None,
    tile_sizes: TileSizes | None,
) -> None:
    """Sequences of equal lengths, (n, seqlen, num_heads, head_dim): fills the views `out` and `lse`."""
    sizes = tile_sizes or TileSizes.choose(problem, q.shape[0], q.shape[1], k.shape[1])
    for group in head_groups(problem, q.shape[0], sizes.heads):
        sinks_of_group = None if sinks is None else group.per_head(sinks)
        _forward_group(
            problem,
            group.q_rows(q),
            group.kv_rows(k),
            group.kv_rows(v),
            group.q_rows(out),
            group.stats(lse),
            sinks_of_group,
            sizes,
        )


def _forward_group(
    problem: AttentionProblem,
    q: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q, head_dim)
    k: Tensor,  # (entries, kv heads, seqlen_k, head_dim)
    v: Tensor,  # (entries, kv heads, seqlen_k, head_dim_v)
    out: Tensor,
    lse: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q)
    sinks: Tensor | None,  # (kv heads, qhead_per_kvhead)
    sizes: TileSizes,
) -> None:
    """The main loop. All query heads of a kv head share its tiles: their rows are stacked into one matrix."""
    accum = problem.accum_dtype
    seqlen_q, seqlen_k = q.shape[3], k.shape[2]
    mask = problem.mask
    geometry = (seqlen_q, seqlen_k, mask.window_left, mask.window_right)
    fixed_reference = scores_are_safe(q, k, v, problem.softmax_scale, problem.softcap)
    k, v = contiguous(k, accum), contiguous(v, accum)
    heads = k.shape[0]
    tile_mask = TileMask(problem, seqlen_k - seqlen_q, v)
    scores = k.new_empty(heads * problem.qhead_per_kvhead * sizes.tile_m * sizes.tile_n)

    for m_start, m_end in tiles(0, seqlen_q, sizes.tile_m):
        q_rows = q[:, :, :, m_start:m_end]
        # the scale is applied to head_dim values of q instead of seqlen_k scores
        q_tile = (q_rows.to(accum) * problem.softmax_scale).reshape(heads, -1, problem.head_dim)
        rows = q_tile.shape[1]
        softmax = OnlineSoftmax(q_tile.new_zeros(heads, rows, problem.head_dim_v), fixed_reference)

        for n_start, n_end, needs_mask in key_tiles(m_start, m_end, *geometry, sizes.tile_n):
            k_tile, v_tile = k[:, n_start:n_end], v[:, n_start:n_end]
            acc_s = scores[: heads * rows * (n_end - n_start)].view(heads, rows, n_end - n_start)
            torch.bmm(q_tile, k_tile.transpose(1, 2), out=acc_s)
            if problem.softcap is not None:
                acc_s.div_(problem.softcap).tanh_().mul_(problem.softcap)
            if needs_mask:
                hidden = tile_mask.hidden((m_start, m_end), (n_start, n_end))
                tile_mask.fill(acc_s, hidden, -torch.inf)
            p = softmax.update(acc_s)
            if needs_mask and not tile_mask.operands_are_finite:
                tile_mask.add_visible(softmax.acc_o, p, v_tile, hidden)
            else:
                softmax.acc_o.baddbmm_(p, v_tile)

        sinks_of_rows = None if sinks is None else _rows_of(sinks, q_rows).to(accum)
        tile_out, tile_lse = softmax.finish(sinks_of_rows)
        out[:, :, :, m_start:m_end] = tile_out.view(*q_rows.shape[:-1], -1)
        lse[:, :, :, m_start:m_end] = tile_lse.view(q_rows.shape[:-1])


def _rows_of(sinks: Tensor, q_rows: Tensor) -> Tensor:
    """(kv heads, qhead_per_kvhead) -> (heads, rows, 1), in the order in which rows are stacked."""
    entries, kv_heads, _, tile_m, _ = q_rows.shape
    return sinks[None, :, :, None].expand(entries, -1, -1, tile_m).reshape(entries * kv_heads, -1, 1)

"""The backward pass by recomputation: every tile of probabilities is rebuilt from q, k and lse, used and dropped.

With p_ij = exp(s_ij - lse_i) and dp_ij = dout_i . v_j, differentiating out_i = sum_j p_ij v_j and
lse_i = log sum_j exp(s_ij) gives, for the scaled scores s,

    dv_j  = sum_i p_ij dout_i
    ds_ij = p_ij (dp_ij - delta_i),    delta_i = dout_i . out_i - dlse_i
    dq_i  = scale * sum_j ds_ij k_j,   dk_j = scale * sum_i ds_ij q_i

(FlashAttention-2, arXiv:2307.08691, Algorithm 2; the gradient of lse enters through delta alone.)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.blocks.block_range import key_tiles, tiles
from ..problem import AttentionInputs, AttentionProblem
from .mask import TileMask
from .sequences import contiguous, head_groups, sequences
from .tile_sizes import TileSizes, matmul_precision


def backward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tile_sizes: TileSizes | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a whole call, in the same order on every run.

    Returns: dq, dk, dv as q, k, v, contiguous; dsinks as sinks (empty without sinks).
    """
    q, k, v, sinks = inputs[:4]
    pieces = sequences(problem, inputs)
    # zeros, not empty: rows outside every sequence and keys past seqused_k have zero gradients
    dq, dk, dv = (x.new_zeros(x.shape) for x in (q, k, v))
    accum = problem.accum_dtype
    delta = torch.linalg.vecdot(dout.to(accum), out.to(accum)).transpose(-1, -2)
    # a row that saw no key has lse = -inf: its delta and its probabilities are zero, whatever dlse is
    is_empty = lse == -torch.inf
    if dlse is not None:
        delta = delta - dlse
    delta = torch.where(is_empty, 0.0, delta)
    if sinks is None:
        dsinks = q.new_empty(0)
    else:
        # a sink is a key of value 0: p_sink = exp(sink - lse), dp_sink = 0, ds_sink = -p_sink * delta
        p_sink = torch.where(is_empty, 0.0, torch.exp(sinks.to(accum)[:, None] - lse))
        dsinks = -(p_sink * delta).transpose(-1, -2).flatten(0, -2).sum(0).to(sinks.dtype)
    lse = torch.where(is_empty, torch.inf, lse)
    with matmul_precision(problem):
        for piece in pieces:
            rows = [piece.rows(x) for x in (q, dout, dq)]
            cols = [piece.cols(x) for x in (k, v, dk, dv)]
            if 0 in rows[0].shape or 0 in cols[0].shape:
                continue
            n, seqlen_q, seqlen_k = rows[0].shape[0], rows[0].shape[1], cols[0].shape[1]
            sizes = tile_sizes or TileSizes.choose(problem, n, seqlen_q, seqlen_k)
            stats = [piece.stats(x) for x in (lse, delta)]
            for group in head_groups(problem, n, sizes.heads):
                _backward_group(
                    problem,
                    *(group.q_rows(x) for x in rows),
                    *(group.kv_rows(x) for x in cols),
                    *(group.stats(x) for x in stats),
                    sizes,
                )
    return dq, dk, dv, dsinks


def _augment(x: Tensor, column: Tensor | float) -> Tensor:
    """Append one column: [x, column], so that a product with [y, 1] is x y^T + column."""
    widened = x.new_empty(*x.shape[:-1], x.shape[-1] + 1)
    widened[..., :-1] = x
    widened[..., -1:] = column
    return widened


def _backward_group(
    problem: AttentionProblem,
    q: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q, head_dim)
    dout: Tensor,
    dq: Tensor,
    k: Tensor,  # (entries, kv heads, seqlen_k, head_dim)
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    lse: Tensor,  # (entries, kv heads, qhead_per_kvhead, seqlen_q)
    delta: Tensor,
    sizes: TileSizes,
) -> None:
    """The main loop. All query heads of a kv head are stacked, so dk and dv are summed over them by the GEMM."""
    accum = problem.accum_dtype
    seqlen_q, seqlen_k = q.shape[3], k.shape[2]
    head_dim, head_dim_v, softcap = problem.head_dim, problem.head_dim_v, problem.softcap
    geometry = (seqlen_q, seqlen_k, problem.mask.window_left, problem.mask.window_right)
    kv_shape = k.shape[:2]
    k, v = contiguous(k, accum), contiguous(v, accum)
    heads = k.shape[0]
    tile_mask = TileMask(problem, seqlen_k - seqlen_q, q, k, dout)
    # [k, 1] and [v, 1]: the shifts by -lse and -delta ride on the GEMMs as one more column of q and dout
    k_one, v_one = _augment(k, 1.0), _augment(v, 1.0)
    k, v = k_one[..., :-1], v_one[..., :-1]
    acc_dk, acc_dv = k.new_zeros(heads, seqlen_k, head_dim), v.new_zeros(heads, seqlen_k, head_dim_v)
    size = heads * problem.qhead_per_kvhead * sizes.tile_m * sizes.tile_n
    p_buffer, ds_buffer = k.new_empty(size), k.new_empty(size)

    def add(acc: Tensor, tile: Tensor, operand: Tensor, hidden: Tensor | None) -> None:
        if hidden is None or tile_mask.operands_are_finite:
            acc.baddbmm_(tile, operand)
        else:
            tile_mask.add_visible(acc, tile, operand, hidden)

    for m_start, m_end in tiles(0, seqlen_q, sizes.tile_m):
        rows_of = (slice(None), slice(None), slice(None), slice(m_start, m_end))
        q_tile = (q[rows_of].to(accum) * problem.softmax_scale).reshape(heads, -1, head_dim)
        dout_tile = dout[rows_of].to(accum).reshape(heads, -1, head_dim_v)
        rows = q_tile.shape[1]
        lse_tile, delta_tile = lse[rows_of].reshape(heads, rows, 1), delta[rows_of].reshape(heads, rows, 1)
        q_shifted = q_tile if softcap is not None else _augment(q_tile, -lse_tile)
        dout_shifted = _augment(dout_tile, -delta_tile)
        acc_dq = q_tile.new_zeros(heads, rows, head_dim)

        for n_start, n_end, needs_mask in key_tiles(m_start, m_end, *geometry, sizes.tile_n):
            keys = slice(n_start, n_end)
            shape = (heads, rows, n_end - n_start)
            p = p_buffer[: heads * rows * (n_end - n_start)].view(shape)
            ds = ds_buffer[: heads * rows * (n_end - n_start)].view(shape)
            if softcap is None:
                torch.bmm(q_shifted, k_one[:, keys].transpose(1, 2), out=p)  # s - lse
            else:
                torch.bmm(q_tile, k[:, keys].transpose(1, 2), out=p)
                tanh = p.div_(softcap).tanh()
                torch.mul(tanh, softcap, out=p).sub_(lse_tile)
            torch.bmm(dout_shifted, v_one[:, keys].transpose(1, 2), out=ds)  # dp - delta
            hidden = tile_mask.hidden((m_start, m_end), (n_start, n_end)) if needs_mask else None
            if hidden is not None:
                tile_mask.fill(p, hidden, -torch.inf)
                tile_mask.fill(ds, hidden, 0.0)
            p.exp_()
            add(acc_dv[:, keys], p.transpose(1, 2), dout_tile, None if hidden is None else hidden.T)
            ds.mul_(p)
            if softcap is not None:
                ds.mul_(tanh.square_().neg_().add_(1.0))  # d(c tanh(s / c)) / ds = 1 - tanh^2
            add(acc_dq, ds, k[:, keys], hidden)
            add(acc_dk[:, keys], ds.transpose(1, 2), q_tile, None if hidden is None else hidden.T)

        dq[rows_of] = acc_dq.mul_(problem.softmax_scale).view(dq[rows_of].shape)
    dk.copy_(acc_dk.unflatten(0, kv_shape))  # q_tile carries the scale already
    dv.copy_(acc_dv.unflatten(0, kv_shape))

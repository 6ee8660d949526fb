"""The backward pass by recomputation: every tile of probabilities is rebuilt from q, k and lse, used, and discarded.

With p_ij = exp(s_ij - lse_i) and dp_ij = dout_i . v_j, differentiating out_i = sum_j p_ij v_j and
lse_i = log sum_j exp(s_ij) gives, for the scaled scores s,

    dv_j  = sum_i p_ij dout_i
    ds_ij = p_ij (dp_ij - delta_i),    delta_i = dout_i . out_i - dlse_i
    dq_i  = scale * sum_j ds_ij k_j,   dk_j = scale * sum_i ds_ij q_i

(FlashAttention-2, arXiv:2307.08691, Algorithm 2; the gradient of lse enters only through delta.)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..geometry import philox
from ..geometry.block_range import query_range, tile_needs_mask, tiles
from ..problem import AttentionInputs, AttentionProblem
from ..problem.attention import NO_MODIFIERS
from ..problem.outputs import empty_gradients
from .mask import TileMask, add_visible, fill_hidden, zero_hidden
from .modifiers import Gradients, ScoreModifiers, make_modifiers
from .online_softmax import SAFE_SCORE, log_tiny
from .scratch import Scratch
from .sequences import head_groups, sequences
from .tile_sizes import TileSizes, work_dtype


def backward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tile_sizes: TileSizes | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of a whole call, summed in an order that does not change from run to run.

    Returns: dq, dk, dv, in the memory order of q, k, v; dsinks in the shape of sinks (of size 0 without sinks).
    """
    return gradients(problem, inputs, out, lse, dout, dlse, tile_sizes)[:4]


def gradients(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    tile_sizes: TileSizes | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """What `backward` returns; then the gradients of alibi_slopes and of bias, None where there are none."""
    q, k, v, sinks = inputs[:4]
    pieces = sequences(problem, inputs)
    dq, dk, dv, dsinks = empty_gradients(inputs, problem.dkv_dtype)
    if problem.is_packed or problem.has_seqused_k or problem.has_seqstart_k or problem.is_empty:
        # tokens outside every sequence, keys past seqused_k, sequences without queries or keys, heads of keys alone
        for x in (dq, dk, dv):
            x.zero_()
    accum = problem.accum_dtype
    delta = _delta(problem, inputs, out, lse, dout, dlse)
    is_empty = lse == -torch.inf
    if sinks is not None:
        dsinks = _gradient_of_sinks(sinks, lse, delta)
    lse = torch.where(is_empty, torch.inf, lse)
    # an empty row counts as safe: exp(-inf) = 0
    lse_is_safe = bool(lse.abs().masked_fill_(is_empty, 0.0).amax() <= SAFE_SCORE) if lse.numel() else True
    # A sink of NaN leaves its rows without finite probabilities, even for hidden pairs.
    has_nan = not lse_is_safe and bool(lse.isnan().any())
    scratch = Scratch(q, work_dtype(problem))
    given = inputs.modifiers or NO_MODIFIERS
    terms = (
        None if problem.constant_slopes else given.alibi_slopes,
        None if problem.constant_bias else given.bias,
    )
    sums = Gradients(*(None if t is None else torch.zeros(t.shape, dtype=accum, device=t.device) for t in terms))
    for piece in pieces:
        rows = [piece.rows(x) for x in (q, dout, dq)]
        cols = [piece.cols(x) for x in (k, v, dk, dv)]
        if 0 in rows[0].shape or 0 in cols[0].shape:
            continue
        n = rows[0].shape[0]
        sizes = tile_sizes or TileSizes.choose(problem, cols[0].shape[1])
        stats = [piece.stats(x) for x in (lse, delta)]
        for group in head_groups(problem, n, sizes.heads):
            tensors = (
                *(group.q_rows(x) for x in rows),
                *(group.kv_rows(x) for x in cols),
                *(group.stats(x) for x in stats),
            )
            _backward_group(
                problem,
                _Group(*tensors),
                modifiers=make_modifiers(problem, inputs, piece, group),
                sums=sums,
                lse_is_safe=lse_is_safe,
                lse_has_nan=has_nan,
                sizes=sizes,
                scratch=scratch,
            )
    dslopes, dbias = (None if s is None or t is None else s.to(t.dtype) for s, t in zip(sums, terms, strict=True))
    return dq, dk, dv, dsinks, dslopes, dbias


def gradient_of_sinks(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor
) -> Tensor:
    """dsinks in the shape of sinks; of size 0 without sinks."""
    if inputs.sinks is None:
        return inputs.q.new_empty(0)
    return _gradient_of_sinks(inputs.sinks, lse, _delta(problem, inputs, out, lse, dout, None))


def _delta(
    problem: AttentionProblem, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> Tensor:
    """delta of each row, in the shape of lse."""
    accum = problem.accum_dtype
    delta = torch.linalg.vecdot(dout.to(accum), out.to(accum)).transpose(-1, -2)
    if inputs.sinks is not None:  # out of a row that saw a sink alone is 0, whatever dout is
        delta = torch.where((out != 0).any(-1).transpose(-1, -2), delta, 0.0)
    if dlse is not None:
        delta = delta - dlse
    # a row that saw neither key nor sink has lse = -inf: its delta and its probabilities are zero, whatever dlse is
    return torch.where(lse == -torch.inf, 0.0, delta)


def _gradient_of_sinks(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """A sink is a key of value 0: p_sink = exp(sink - lse), dp_sink = 0, ds_sink = -p_sink * delta."""
    p_sink = torch.where(lse == -torch.inf, 0.0, torch.exp(sinks.to(lse.dtype)[:, None] - lse))
    return (-(p_sink * delta).transpose(-1, -2).flatten(0, -2).sum(0)).to(sinks.dtype)


class _Group(NamedTuple):
    """The tensors of some kv heads and of their query heads."""

    q: Tensor  # (entries, kv heads, qhead_per_kvhead, seqlen_q, head_dim)
    dout: Tensor
    dq: Tensor
    k: Tensor  # (entries, kv heads, seqlen_k, head_dim)
    v: Tensor
    dk: Tensor
    dv: Tensor
    lse: Tensor  # (entries, kv heads, qhead_per_kvhead, seqlen_q)
    delta: Tensor


class _QueryTile(NamedTuple):
    """The data of one tile of queries: loaded once, used by every tile of keys."""

    m_start: int
    m_end: int
    q: Tensor  # (heads, rows, head_dim), times softmax_scale
    dout: Tensor  # (heads, rows, head_dim_v); times exp(-lse) with a fixed reference, and the scale of dropout
    lse: Tensor  # (heads, rows, 1)
    delta: Tensor  # (heads, rows, 1); times exp(-lse) with a fixed reference
    acc_dq: Tensor  # (heads, rows, head_dim)


def _backward_group(
    problem: AttentionProblem,
    tensors: _Group,
    *,
    modifiers: ScoreModifiers | None,
    sums: Gradients,
    lse_is_safe: bool,
    lse_has_nan: bool,
    sizes: TileSizes,
    scratch: Scratch,
) -> None:
    """The main loop: keys outside, queries inside, so that dk and dv of a tile are finished before the next.

    All query heads of a kv head are stacked, so the GEMM sums dk and dv over them.
    """
    q, dout, dq, k, v, dk, dv, lse, delta = tensors
    softcap, scale = problem.softcap, problem.softmax_scale
    seqlen_q, seqlen_k = q.shape[3], k.shape[2]
    geometry = (seqlen_q, seqlen_k, problem.mask.window_left, problem.mask.window_right)
    entries, kv_heads = k.shape[:2]
    heads = entries * kv_heads
    tile_mask = TileMask(problem, seqlen_k - seqlen_q, q, k, v, dout, delta)
    keep_apart = lse_has_nan or not tile_mask.operands_are_finite
    lowest = log_tiny(scratch.dtype)
    has_gradients = any(t is not None for t in sums)
    # As in the forward pass, scores of ordinary size need no reference: p = exp(s) exp(-lse), and the second factor
    # belongs to the row, so dout and delta can carry it. |s| <= |q| |k| tells in advance; below 256 keys the norms
    # cost more than they save.
    largest_term = 0.0 if modifiers is None else modifiers.largest_term()
    fixed_reference = (
        lse_is_safe
        and seqlen_k >= 256
        and abs(scale) * scratch.largest_norm(q) * scratch.largest_norm(k) <= SAFE_SCORE - largest_term
    )
    group = problem.qhead_per_kvhead
    all_q, all_dout, all_dq = (
        scratch.empty(name, seqlen_q * heads * group * columns)
        for name, columns in (("q", problem.head_dim), ("dout", problem.head_dim_v), ("dq", problem.head_dim))
    )
    query_tiles = []
    started: set[int] = set()  # query tiles whose acc_dq holds something
    for m_start, m_end in tiles(0, seqlen_q, sizes.tile_m):

        def tile_of(source: Tensor, buffer: Tensor, rows: slice = slice(m_start, m_end)) -> Tensor:
            """The contiguous range of a buffer that belongs to the rows, filled from source."""
            columns = source.shape[-1]
            start, end = (i * heads * group * columns for i in (rows.start, rows.stop))
            tile = buffer[start:end].view(*source.shape[:3], -1, columns)
            return tile.copy_(source[:, :, :, rows]).view(heads, -1, columns)

        q_tile, dout_tile = tile_of(q, all_q).mul_(scale), tile_of(dout, all_dout)
        lse_tile, delta_tile = (x[..., m_start:m_end].reshape(heads, -1, 1) for x in (lse, delta))
        if problem.dropout_p:
            dout_tile.mul_(philox.keep_scale(problem.dropout_p))
        if fixed_reference:
            weight = torch.exp(-lse_tile)
            delta_tile = delta_tile * weight
            dout_tile.mul_(weight)
        acc_dq = all_dq[m_start * heads * group * problem.head_dim :][: q_tile.numel()].view(q_tile.shape)
        query_tiles.append(_QueryTile(m_start, m_end, q_tile, dout_tile, lse_tile, delta_tile, acc_dq))

    for n_start, n_end in tiles(0, seqlen_k, sizes.tile_n):
        k_tile, v_tile = scratch.load("k", k[:, :, n_start:n_end]), scratch.load("v", v[:, :, n_start:n_end])
        acc_dk, acc_dv = scratch.empty("dk", *k_tile.shape), scratch.empty("dv", *v_tile.shape)
        has_dkv = False  # acc_dk and acc_dv hold nothing yet
        first_query, end_query = query_range(n_start, n_end, *geometry)
        keys = n_start, n_end
        for m in query_tiles:
            queries = m.m_start, m.m_end
            if modifiers is not None and problem.has_row_ranges:
                if not modifiers.sees(queries, keys):
                    continue
            elif m.m_end <= first_query or m.m_start >= end_query:
                continue
            shape = heads, m.q.shape[1], n_end - n_start
            p, ds = scratch.empty("p", *shape), scratch.empty("ds", *shape)
            torch.bmm(m.q, k_tile.transpose(1, 2), out=p)  # scores
            torch.bmm(m.dout, v_tile.transpose(1, 2), out=ds)  # dp
            if softcap is not None:
                tanh = p.div_(softcap).tanh_().clone()
                p.mul_(softcap)
            needs_mask = not problem.has_row_ranges and tile_needs_mask(m.m_start, m.m_end, n_start, n_end, *geometry)
            pairs, has_terms = tile_mask.pairs(queries, keys) if needs_mask else None, False
            if modifiers is not None:
                tile = p.view(*modifiers.shape, m.m_end - m.m_start, n_end - n_start)
                pairs, has_terms = modifiers.modify_scores_(tile, pairs, queries, keys)
            if not fixed_reference:
                # no visible score passes its row's lse; what a hidden one would overflow to is clamped
                p.sub_(m.lse).clamp_(lowest, 0.0)
            elif has_terms:
                p.clamp_(min=lowest)  # a term may be as low as it likes
            p.exp_()
            if keep_apart:
                fill_hidden(p, pairs, 0.0)
            else:
                zero_hidden(p, pairs)
            kept = None if modifiers is None else modifiers.kept(queries, keys, p.dtype)
            if modifiers is not None:
                modifiers.drop_(ds, kept)
            ds.sub_(m.delta).mul_(p)
            if modifiers is not None:
                modifiers.drop_(p, kept)
            if modifiers is not None and has_gradients:
                fill_hidden(ds, pairs, 0.0)
                modifiers.add_gradients(
                    sums, ds.view(*modifiers.shape, m.m_end - m.m_start, n_end - n_start), queries, keys
                )
            if softcap is not None:
                ds.mul_(tanh.square_().neg_().add_(1.0))  # d(c tanh(s / c)) / ds = 1 - tanh^2
            if keep_apart and pairs is not None:
                fill_hidden(ds, pairs, 0.0)
                hidden = pairs.matrix
            else:
                hidden = None
            has_dq = m.m_start in started
            hidden_rows = None if hidden is None else hidden.mT
            _add_product(acc_dv, p.mT, m.dout, hidden_rows, has_dkv)
            _add_product(acc_dk, ds.mT, m.q, hidden_rows, has_dkv)
            _add_product(m.acc_dq, ds, k_tile, hidden, has_dq)
            has_dkv = True
            started.add(m.m_start)
        for gradient, acc in ((dk, acc_dk), (dv, acc_dv)):  # m.q carries the scale of dk
            columns = gradient[:, :, n_start:n_end]
            columns.copy_(acc.view(columns.shape)) if has_dkv else columns.zero_()
    for m in query_tiles:
        rows = dq[:, :, :, m.m_start : m.m_end]
        torch.mul(m.acc_dq.view(rows.shape), scale, out=rows) if m.m_start in started else rows.zero_()


def _add_product(acc: Tensor, tile: Tensor, operand: Tensor, hidden: Tensor | None, has_value: bool) -> None:
    """acc += tile @ operand; the first product is written instead. With `hidden`, hidden pairs are kept out of it."""
    if hidden is not None:
        add_visible(acc if has_value else acc.zero_(), tile, operand, hidden)
    elif has_value:
        acc.baddbmm_(tile, operand)
    else:
        torch.bmm(tile, operand, out=acc)

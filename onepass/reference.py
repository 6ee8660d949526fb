"""The definition of the result: the dense float64 oracle, and the steps from it to one pass.

`attention` is the written specification: every option of the API in plain dense PyTorch, differentiable by autograd,
with O(seqlen^2) memory. All tests and the bench compare with it.

The four functions after it compute one row's softmax(x) @ v with equal results. Each saves a pass over the keys (or a
matrix in memory) of the one before:

    materialised             the textbook formula; the whole row of probabilities exists at once
    three_pass_safe_softmax  the row is streamed, once for its maximum, once for its sum, once for the output
    two_pass_online_softmax  maximum and sum in one pass, by rescaling the sum whenever the maximum grows
    one_pass                 the output is rescaled along with the sum: nothing is read twice
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .geometry import philox
from .problem import Mask
from .problem.attention import EMPTY, FULL, WORD
from .validation.block_mask import BlockMask


class Reference(NamedTuple):
    out: Tensor
    lse: Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    query_ranges_of_positions: bool = False,
    block_mask: BlockMask | None = None,
    q_positions: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_state: Tensor | None = None,
    first_entry: int = 0,
    compute_dtype: torch.dtype = torch.float64,
) -> Reference:
    """Dense attention with the arguments of `onepass.attention`.

    Args:
        query_ranges_of_positions: query_ranges count positions of queries, as in `attention_decode`.
        dropout_state: (2,) int64, seed and offset of `geometry.philox`, with dropout_p.
        first_entry: the number of the first batch entry, which random bits depend on.
        compute_dtype: dtype of every intermediate: float64 for the oracle, the inputs' own dtype for the result of
            plain PyTorch in that dtype, from which error budgets are derived.

    Returns: out (batch, seqlen_q, num_heads_q, head_dim_v) and lse (batch, num_heads_q, seqlen_q), both in
    compute_dtype. A row that sees no key has out = 0, and lse = its sink, or -inf without sinks. A sink of +inf takes
    all of the probability: out = 0 and lse = +inf.
    """
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    seqlen_k = k.shape[1]
    group = num_heads_q // max(1, k.shape[2])
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.to(compute_dtype).transpose(1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    s = q @ k.mT * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    pairs = pairs_of(
        q,
        k,
        Mask.from_options(causal, window),
        seqused_k=seqused_k,
        seqstart_k=seqstart_k,
        key_ranges=key_ranges,
        query_ranges=query_ranges,
        query_ranges_of_positions=query_ranges_of_positions,
        block_mask=block_mask,
        q_positions=q_positions,
        alibi_slopes=alibi_slopes,
        bias=bias,
        dropout_p=dropout_p,
        dropout_state=dropout_state,
        first_entry=first_entry,
    )
    if pairs.terms is not None:
        s = (s + pairs.terms).to(compute_dtype)
    s = s.masked_fill(~pairs.visible, -torch.inf)
    sees_a_key = pairs.visible.any(-1)  # (batch, 1 or heads, seqlen_q)

    has_weight, lse_of_empty = sees_a_key, s.new_full((), -torch.inf)
    if sinks is not None:  # one more key of value 0
        column = sinks.to(compute_dtype)[None, :, None, None].expand(batch, -1, seqlen_q, 1)
        s = torch.cat([s, column], -1)
        v = torch.cat([v, v.new_zeros(*v.shape[:2], 1, v.shape[3])], 2)
        has_weight, lse_of_empty = sees_a_key & (column[..., 0] != torch.inf), column[..., 0]
    # empty rows get harmless scores, and their results are replaced afterwards
    s = torch.where(sees_a_key[..., None], s, 0.0)
    p = s.softmax(-1)
    if pairs.kept is not None:
        p = p * torch.nn.functional.pad(pairs.kept, (0, p.shape[-1] - seqlen_k))  # the sink's value is 0
    out = torch.where(has_weight[..., None], p @ v, 0.0)
    lse = s.logsumexp(-1) if s.shape[-1] else s.new_zeros(s.shape[:3])
    return Reference(out.transpose(1, 2), torch.where(sees_a_key, lse, lse_of_empty))


class Pairs(NamedTuple):
    """What options do to the pairs of a query and a key besides scale and softcap.

    All are (batch or 1, num_heads_q or 1, seqlen_q, seqlen_k).

    Attributes:
        visible: the pairs whose query sees the key.
        terms: what is added to scores, in the dtype of q or float32, whichever is wider.
        distance: between the position of the query and the key; the gradient of a slope is a sum of -distance * ds.
        kept: what dropout multiplies probabilities with.
    """

    visible: Tensor
    terms: Tensor | None
    distance: Tensor
    kept: Tensor | None


def pairs_of(
    q: Tensor,
    k: Tensor,
    mask: Mask,
    *,
    seqused_k: Tensor | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    query_ranges_of_positions: bool = False,
    block_mask: BlockMask | None = None,
    q_positions: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_state: Tensor | None = None,
    first_entry: int = 0,
) -> Pairs:
    """The pairs of dense attention of q and k (batch, num_heads_q, seqlen, head_dim); options: see `attention`."""
    (batch, num_heads_q, seqlen_q, _), seqlen_k, device = q.shape, k.shape[2], q.device
    j = torch.arange(seqlen_k, device=device)
    visible = visible_pairs(batch, seqlen_q, seqlen_k, mask, seqused_k, device, seqstart_k, q_positions)[:, None]
    if key_ranges is not None:
        visible = visible & (key_ranges[..., :1] <= j) & (j < key_ranges[..., 1:])
    position = positions(batch, seqlen_q, seqlen_k, seqused_k, q_positions, device)[:, None]
    if query_ranges is not None:
        low, high = query_ranges[..., None, :, 0], query_ranges[..., None, :, 1]
        i = position if query_ranges_of_positions else torch.arange(seqlen_q, device=device)[:, None]
        visible = visible & (low <= i) & (i < high)
    if block_mask is not None:
        q_block, kv_block = block_mask.block_size
        kinds = block_mask.kinds.repeat_interleave(q_block, 2).repeat_interleave(kv_block, 3)
        kinds = _of_query_heads(kinds[:, :, :seqlen_q, :seqlen_k], num_heads_q)
        visible = visible & (kinds != EMPTY)
        if block_mask.bits is not None:
            bits = block_mask.bits[:, :, :seqlen_q, j // WORD] >> (j % WORD) & 1
            visible = visible & ((kinds == FULL) | (_of_query_heads(bits, num_heads_q) == 1))
        if block_mask.key_ranges is not None:
            low, high = block_mask.key_ranges.unbind(-1)
            visible = visible & (low[..., None] <= j) & (j < high[..., None])
        if block_mask.query_ranges is not None:
            i, (low, high) = torch.arange(seqlen_q, device=device)[:, None], block_mask.query_ranges.unbind(-1)
            visible = visible & (low[..., None, :] <= i) & (i < high[..., None, :])
    distance = (position - j).abs()
    terms, dtype = None, torch.promote_types(q.dtype, torch.float32)
    if alibi_slopes is not None:
        terms = -alibi_slopes.to(dtype).expand(batch, -1)[..., None, None] * distance
    if bias is not None:
        rows = bias_of_rows(bias, seqlen_q, q_positions)
        visible = visible & (rows != -torch.inf)
        finite = rows.to(dtype).masked_fill(rows == -torch.inf, 0.0)
        terms = finite if terms is None else terms + finite
    kept = None
    if dropout_p > 0 and dropout_state is not None:
        i = torch.arange(seqlen_q, device=device).expand(batch, -1) if q_positions is None else q_positions
        entries = torch.arange(first_entry, first_entry + batch, device=device)[:, None]
        instances = (entries * num_heads_q + torch.arange(num_heads_q, device=device))[..., None, None]
        kept = philox.kept_pairs(dropout_state, dropout_p, instances, i[:, None, :, None], j)
        kept = kept.to(q.dtype) * philox.keep_scale(dropout_p)
    return Pairs(visible, terms, distance, kept)


def _of_query_heads(t: Tensor, num_heads_q: int) -> Tensor:
    """(batch, num_heads_q, num_heads_kv or 1, ..) -> (batch, num_heads_q or 1, ..)."""
    return t.repeat_interleave(num_heads_q // t.shape[1], 1) if t.shape[1] > 1 else t


def positions(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    seqused_k: Tensor | None,
    q_positions: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Where each query stands among the keys: (batch, seqlen_q, 1)."""
    if q_positions is not None:
        return q_positions.long().expand(batch, -1)[..., None]
    length = torch.full((batch,), seqlen_k, device=device) if seqused_k is None else seqused_k.long()
    return torch.arange(seqlen_q, device=device)[None, :, None] + length[:, None, None] - seqlen_q


def bias_of_rows(bias: Tensor, seqlen_q: int, q_positions: Tensor | None) -> Tensor:
    """The rows of a bias that queries use: row i, or the one of its position, or else the nearest one."""
    if q_positions is None or bias.shape[-2] == 1:
        return bias
    rows = q_positions.long().clamp(0, bias.shape[-2] - 1)[:, None, :, None]
    shape = torch.broadcast_shapes(bias.shape[:2], rows.shape[:2])
    return bias.expand(*shape, -1, -1).gather(2, rows.expand(*shape, seqlen_q, bias.shape[-1]))


def visible_pairs(
    batch: int,
    seqlen_q: int,
    seqlen_k: int,
    mask: Mask,
    seqused_k: Tensor | None,
    device: torch.device,
    seqstart_k: Tensor | None = None,
    q_positions: Tensor | None = None,
) -> Tensor:
    """Boolean (batch, seqlen_q, seqlen_k): the visible pairs of dense attention, straight from the definition."""
    j = torch.arange(seqlen_k, device=device)[None, None, :]
    length = torch.full((batch,), seqlen_k, device=device) if seqused_k is None else seqused_k.long()
    position = positions(batch, seqlen_q, seqlen_k, seqused_k, q_positions, device)
    visible = (j < length[:, None, None]) & torch.ones_like(position, dtype=torch.bool)
    if seqstart_k is not None:
        start = seqstart_k.long()[:, None, None]
        visible = visible & (j >= start) & (position >= start)
    if mask.window_left is not None:
        visible = visible & (j >= position - mask.window_left)
    if mask.window_right is not None:
        visible = visible & (j <= position + mask.window_right)
    return visible


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_k: Tensor | None = None,
    compute_dtype: torch.dtype = torch.float64,
    **options,
) -> Reference:
    """`attention` of each packed sequence: out (total_q, num_heads_q, head_dim_v), lse (num_heads_q, total_q)."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    outs, lses = [], []
    for b, (m, m_end) in enumerate(itertools.pairwise(starts_q)):
        n, n_end = starts_k[b], starts_k[b + 1]
        if seqused_k is not None:
            n_end = n + int(seqused_k[b])
        own = of_sequence(options, b, slice(m, m_end), slice(n, n_end)) | {"first_entry": b}
        one = attention(q[None, m:m_end], k[None, n:n_end], v[None, n:n_end], compute_dtype=compute_dtype, **own)
        outs.append(one.out[0])
        lses.append(one.lse[0])
    rest = q.shape[0] - starts_q[-1]  # rows past the last offset belong to no sequence
    outs.append(q.new_zeros(rest, q.shape[1], v.shape[2], dtype=compute_dtype))
    lses.append(q.new_full((q.shape[1], rest), -torch.inf, dtype=compute_dtype))
    return Reference(torch.cat(outs), torch.cat(lses, 1))


def of_sequence(options: dict, b: int, rows: slice, keys: slice) -> dict:
    """The options of `attention` for packed sequence b, which has these rows of q and of k.

    Packed, key_ranges is (1 or heads, total_q, 2), query_ranges (1 or heads, total_k, 2), q_positions (total_q,) and
    bias (1 or heads, total_q or 1, columns) or, with positions, (1 or heads, positions, columns); queries and keys are
    counted from the first ones of the sequence.
    """

    def of_entry(t: Tensor | None) -> Tensor | None:
        return t if t is None or len(t) == 1 else t[b : b + 1]

    own_rows = rows if options.get("q_positions") is None else slice(None)
    cuts = {
        "seqstart_k": lambda t: t[b : b + 1],
        "key_ranges": lambda t: t[None, :, rows],
        "query_ranges": lambda t: t[None, :, keys],
        "block_mask": lambda mask: replace(mask, kinds=of_entry(mask.kinds), bits=of_entry(mask.bits)),
        "q_positions": lambda t: t[None, rows],
        "alibi_slopes": lambda t: t[b : b + 1] if t.dim() == 2 else t,
        "bias": lambda t: t[None, :, own_rows if t.shape[1] > 1 else slice(None), : keys.stop - keys.start],
    }
    return {name: cuts[name](value) if name in cuts and value is not None else value for name, value in options.items()}


def materialised(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) @ v with the whole row of probabilities in memory.

        p_j = exp(x_j) / sum_i exp(x_i),    o = sum_j p_j v_j

    It overflows as soon as one score passes log(largest float): about 88 in float32, 709 in float64.

    Args:
        x: (n,) scores of one query. v: (n, head_dim_v).
    Returns: o, (head_dim_v,).
    """
    p = torch.exp(x)
    return (p / p.sum()) @ v


def three_pass_safe_softmax(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) @ v with the row streamed three times; nothing of length n is kept.

        pass 1   m_j = max(m_{j-1}, x_j)
        pass 2   d_j = d_{j-1} + exp(x_j - m_n)
        pass 3   o_j = o_{j-1} + exp(x_j - m_n) / d_n * v_j

    Subtracting m_n changes nothing, exp(x - m) / sum exp(x - m) = exp(x) / sum exp(x), and cannot overflow. Passes 2
    and 3 need m_n, the maximum of the whole row: that is why there are three.
    """
    m = torch.full((), -torch.inf, dtype=x.dtype)
    for x_j in x:
        m = torch.maximum(m, x_j)
    d = torch.zeros((), dtype=x.dtype)
    for x_j in x:
        d = d + torch.exp(x_j - m)
    o = torch.zeros_like(v[0])
    for x_j, v_j in zip(x, v, strict=True):
        o = o + torch.exp(x_j - m) / d * v_j
    return o


def two_pass_online_softmax(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) @ v with maximum and sum in one pass: the sum is kept relative to the maximum so far.

        pass 1   m_j = max(m_{j-1}, x_j)
                 d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)
        pass 2   o_j = o_{j-1} + exp(x_j - m_n) / d_n * v_j

    d_j = sum_{i<=j} exp(x_i - m_j) holds after every step, so d_n is the d_n of three passes.
    (Milakov & Gimelshein, arXiv:1805.02867, Algorithm 3.)
    """
    m = torch.full((), -torch.inf, dtype=x.dtype)
    d = torch.zeros((), dtype=x.dtype)
    for x_j in x:
        m_new = torch.maximum(m, x_j)
        d = d * torch.exp(m - m_new) + torch.exp(x_j - m_new)
        m = m_new
    o = torch.zeros_like(v[0])
    for x_j, v_j in zip(x, v, strict=True):
        o = o + torch.exp(x_j - m) / d * v_j
    return o


def one_pass(x: Tensor, v: Tensor) -> Tensor:
    """softmax(x) @ v in one pass: the output is accumulated along with the sum, and every score and value is read once.

        m_j = max(m_{j-1}, x_j)
        d_j = d_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j)
        a_j = a_{j-1} exp(m_{j-1} - m_j) + exp(x_j - m_j) v_j
        o   = a_n / d_n

    A softmax alone cannot be computed in one pass, since every p_j needs d_n. Attention can, because it needs only the
    sum over j, which can be divided by d_n at the end. `onepass.tiled` does this with tiles instead of elements.
    """
    m = torch.full((), -torch.inf, dtype=x.dtype)
    d = torch.zeros((), dtype=x.dtype)
    a = torch.zeros_like(v[0])
    for x_j, v_j in zip(x, v, strict=True):
        m_new = torch.maximum(m, x_j)
        rescale, p_j = torch.exp(m - m_new), torch.exp(x_j - m_new)
        d = d * rescale + p_j
        a = a * rescale + p_j * v_j
        m = m_new
    return a / d

"""Rotary positions with the names and arguments of `flash_attn.layers.rotary`, in PyTorch, on any device.

cos and sin are (positions, rotary_dim / 2); the first rotary_dim columns of each head are rotated in float32 (float64
for float64) and rounded once. Rows at positions past the tables stay as they are where positions are tensors.

Functions that work in place return an alias of their argument. Gradients flow through the returned tensor, and not
through the argument.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...tiled.cache import rotate
from ...validation.scalars import check_flag, is_integer
from ...validation.tensors import check_tensor, shape_of
from ..cache_update import is_on_host, rows_of_sequences

__all__ = [
    "ApplyRotaryEmb",
    "ApplyRotaryEmbKV_",
    "ApplyRotaryEmbQKV_",
    "RotaryEmbedding",
    "apply_rotary",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

# a turn: an index into the heads (dimension 2) of a tensor, and the tables cos and sin for these heads
Turn = tuple["int | slice", Tensor, Tensor]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate queries or keys by their positions.

    Args:
        x: (batch, seqlen, num_heads, head_dim), or packed (total, num_heads, head_dim) with its cu_seqlens.
        cos, sin: (positions, rotary_dim / 2).
        interleaved: pairs are columns (0, 1), (2, 3), ..; else the two halves of the rotated columns.
        inplace: write the result into x.
        seqlen_offsets: the position of the first row, an int or (batch,).
        cu_seqlens: (batch + 1,) int32.
        max_seqlen: has no effect.
    """
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """`apply_rotary_emb` with its arguments in another order. Args: conjugate: rotate backwards."""
    rank = 4 if cu_seqlens is None else 3
    check_tensor("x", x)
    if x.dim() != rank:
        raise ValueError(f"x: expected {rank} dimensions, got {shape_of(x)}")
    interleaved, inplace = check_flag("interleaved", interleaved), check_flag("inplace", inplace)
    cos, sin = _tables(x, cos, sin, seqlen_offsets, cu_seqlens)
    sin = -sin if check_flag("conjugate", conjugate) else sin
    if cu_seqlens is None:
        positions = _positions(x, seqlen_offsets)
    else:
        owner, step = rows_of_sequences(x.shape[0], cu_seqlens)
        last = cu_seqlens.shape[0] - 2
        starts = seqlen_offsets[owner.clamp(max=last)].long() if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        # rows past the last offset belong to no sequence and stay as they are
        positions = torch.where(owner <= last, step + starts, cos.shape[0] - 1)[None]
    rows = x if cu_seqlens is None else x[None]
    if not inplace:
        turned = rotate(rows, positions, cos, sin, interleaved)
        return turned if cu_seqlens is None else turned[0]
    turned = _TurnInPlace.apply(rows, positions, interleaved, ((slice(None), cos, sin),))
    return turned if cu_seqlens is None else turned[0]


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate queries and keys of one tensor in place.

    Args:
        qkv: (batch, seqlen, 3, num_heads, head_dim), or (batch, seqlen, num_heads_q + 2 * num_heads_k, head_dim) with
            its num_heads_q.
        cos, sin: (positions, rotary_dim / 2), for keys, too, unless cos_k and sin_k are given.
        interleaved, seqlen_offsets: as for `apply_rotary_emb`.
    """
    check_tensor("qkv", qkv)
    heads: tuple[int | slice, int | slice]
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        heads = 0, 1
    elif qkv.dim() == 4:
        total = qkv.shape[2]
        if (
            num_heads_q is None
            or not is_integer(num_heads_q)
            or not 0 < num_heads_q < total
            or (total - num_heads_q) % 2
        ):
            raise ValueError(
                f"num_heads_q: expected a number of heads that leaves as many keys as values of the {total} "
                f"heads of qkv, got {num_heads_q!r}"
            )
        heads = slice(0, num_heads_q), slice(num_heads_q, (total + num_heads_q) // 2)
    else:
        raise ValueError(
            "qkv: expected shape (batch, seqlen, 3, num_heads, head_dim) or (batch, seqlen, num_heads, head_dim), "
            f"got {shape_of(qkv)}"
        )
    keys = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    turns = tuple(
        (index, *_tables(qkv, *tables, seqlen_offsets, None))
        for index, tables in zip(heads, ((cos, sin), keys), strict=True)
    )
    return _TurnInPlace.apply(qkv, _positions(qkv, seqlen_offsets), check_flag("interleaved", interleaved), turns)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys of kv, (batch, seqlen, 2, num_heads, head_dim), in place, as `apply_rotary_emb` does."""
    check_tensor("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ValueError(f"kv: expected shape (batch, seqlen, 2, num_heads, head_dim), got {shape_of(kv)}")
    turn = (0, *_tables(kv, cos, sin, seqlen_offsets, None))
    return _TurnInPlace.apply(kv, _positions(kv, seqlen_offsets), check_flag("interleaved", interleaved), (turn,))


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """`apply_rotary_emb` of x from position 0; cos and sin may be (batch, seqlen, rotary_dim / 2), too."""
    if cos.dim() == 2:
        return apply_rotary_emb(x, cos[: x.shape[1]], sin[: x.shape[1]], interleaved)
    batch, seqlen = cos.shape[:2]
    positions = torch.arange(batch * seqlen, device=x.device).view(batch, seqlen)
    return rotate(x, positions, cos.flatten(0, 1), sin.flatten(0, 1), check_flag("interleaved", interleaved))


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """x with each pair (a, b) of columns replaced by (-b, a): a quarter turn. Pairs are those of `apply_rotary_emb`."""
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    a, b = pairs.unbind(-1 if interleaved else -2)
    return torch.stack((-b, a), -1 if interleaved else -2).flatten(-2)


class ApplyRotaryEmb:
    """`apply_rotary_emb` by the name of flash-attn's autograd function, as `apply`."""

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:
    """`apply_rotary_emb_qkv_` by the name of flash-attn's autograd function, as `apply`."""

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """`apply_rotary_emb_kv_` by the name of flash-attn's autograd function, as `apply`."""

    apply = staticmethod(apply_rotary_emb_kv_)


class _TurnInPlace(torch.autograd.Function):
    """Rotate heads of x (batch, seqlen, heads, ...) in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, interleaved: bool, turns: tuple[Turn, ...]) -> Tensor:
        indices, cos, sin = zip(*turns, strict=True)
        ctx.save_for_backward(positions, *cos, *sin)
        ctx.indices, ctx.interleaved = indices, interleaved
        _turn_(x, positions, interleaved, turns)
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        positions, *tables = ctx.saved_tensors
        count = len(ctx.indices)
        turns = tuple(
            (index, cos, -sin) for index, cos, sin in zip(ctx.indices, tables[:count], tables[count:], strict=True)
        )
        dx = gradients[0].clone()
        _turn_(dx, positions, ctx.interleaved, turns)
        return dx, None, None, None


def _turn_(x: Tensor, positions: Tensor, interleaved: bool, turns: tuple[Turn, ...]) -> None:
    for index, cos, sin in turns:
        heads = x[:, :, index]
        heads.copy_(rotate(heads, positions, cos, sin, interleaved))


def _positions(x: Tensor, offsets: int | Tensor) -> Tensor:
    """(batch, seqlen) int64: the position of each row of x (batch, seqlen, ...)."""
    steps = torch.arange(x.shape[1], device=x.device)
    starts = offsets.long()[:, None] if isinstance(offsets, Tensor) else steps.new_full((1, 1), offsets)
    return (starts + steps).expand(x.shape[0], -1)


def _tables(x: Tensor, cos: Any, sin: Any, offsets: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The tables of a call, checked, each with one more row, which leaves columns as they are."""
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table)
        if table.dim() != 2 or 2 * table.shape[1] > x.shape[-1]:
            raise ValueError(
                f"{name}: expected shape (positions, rotary_dim / 2) with rotary_dim up to {x.shape[-1]}, "
                f"got {shape_of(table)}"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"sin: expected shape {shape_of(cos)} like cos, got {shape_of(sin)}")
    if isinstance(offsets, Tensor):
        batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        if offsets.shape != (batch,) or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"seqlen_offsets: expected an int or shape ({batch},) of int32 or int64, "
                f"got {shape_of(offsets)} of {offsets.dtype}"
            )
        if is_on_host(offsets) and int(offsets.min()) < 0:
            raise ValueError(f"seqlen_offsets: expected positions from 0 on, got {offsets.tolist()}")
    elif not is_integer(offsets) or offsets < 0:
        raise ValueError(f"seqlen_offsets: expected an int from 0 on or a tensor, got {offsets!r}")
    elif cu_seqlens is None and offsets + x.shape[1] > cos.shape[0]:
        raise ValueError(f"cos: expected a row for each of the {offsets + x.shape[1]} positions, got {cos.shape[0]}")
    return torch.nn.functional.pad(cos, (0, 0, 0, 1), value=1.0), torch.nn.functional.pad(sin, (0, 0, 0, 1))


class RotaryEmbedding(torch.nn.Module):
    """Rotary positions of queries, keys and values, with tables that grow as they are needed.

    Args:
        dim: rotary_dim.
        base: from one position to the next, pair i turns by an angle of base ** (-2 i / dim).
        interleaved: as for `apply_rotary_emb`.
        scale_base: None, or the base of XPos (arXiv:2212.10554): queries are multiplied and keys divided by a factor of
            their position.
        pos_idx_in_fp32: must be True: angles are computed in float32.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: Any = None,
        *,
        pos_idx_in_fp32: bool = True,
    ):
        super().__init__()
        if not check_flag("pos_idx_in_fp32", pos_idx_in_fp32):
            raise UnsupportedError("pos_idx_in_fp32: expected True, got False")
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _columns(self, device: Any) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(self._columns(device) / self.dim)

    def _compute_scale(self, device: Any = None) -> Tensor:
        return (self._columns(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        """Make tables for positions up to seqlen, unless there are such tables."""
        found = self._cos_cached
        fits = found is not None and seqlen <= self._seq_len_cached and (found.device, found.dtype) == (device, dtype)
        if found is not None and fits and not (self.training and found.is_inference()):
            return
        self._seq_len_cached = seqlen
        # a model in 16 bits has rounded its buffers, so frequencies are computed again
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(position, inv_freq.to(position.device))
        cos, sin = angles.cos(), angles.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        power = (position - seqlen // 2) / self.scale_base
        scale = self._compute_scale(device) ** power[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Args:
            qkv: what `apply_rotary_emb_qkv_` takes; with kv the queries, (batch, seqlen, num_heads, head_dim).
            kv: (batch, seqlen, 2, num_heads, head_dim) or None.
            seqlen_offset: the position of the first row, an int or (batch,).
            max_seqlen: the number of positions that the tables hold; needed with the first seqlen_offset in a tensor.

        Returns: qkv, or queries and kv.
        """
        if max_seqlen is not None or not isinstance(seqlen_offset, Tensor):
            count = qkv.shape[1] + int(seqlen_offset) if max_seqlen is None else max_seqlen
            self._update_cos_sin_cache(count, device=qkv.device, dtype=qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen: expected an int where the first seqlen_offset is a tensor, got None")
        cos_k, sin_k = (cos, sin) if self.scale is None else (self._cos_k_cached, self._sin_k_cached)
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q)
        assert cos_k is not None
        assert sin_k is not None
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, inplace=True, seqlen_offsets=seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)

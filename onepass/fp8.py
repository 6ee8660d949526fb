"""FP8 (e4m3) attention: scales, the rotation of Q and K, and what may be subtracted before rounding.

An e4m3 number has a sign, 4 bits of exponent and 3 of mantissa: magnitudes 2^-9 to 448, each rounded by up to 1/16 of
itself. Scales keep values in that range; what limits the accuracy is the mantissa. Three things leave the result of
exact arithmetic as it is and are done before rounding:

    rotation    Q M and K M with one orthogonal M (random signs, then a Hadamard matrix): (Q M)(K M)^T = Q K^T. An
                outlier is spread over all columns; unrotated, two outliers that meet would meet with their rounding.
    mean of K   subtracting a vector m from all keys lowers each score of row i by q_i . m: softmax does not see it, and
                lse is put right with `score_shift`.
    mean of V   rows of P sum to 1, so softmax(S) (V - m) + m = softmax(S) V.

Source: FlashAttention-3, arXiv:2407.08608, section 3.3; QuIP, arXiv:2307.13304 (random signs and Hadamard matrices).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .api import fast_path as repeated
from .dispatch import attention as dispatch
from .kernels.config import LaunchConfig
from .problem import V_KEYS, AttentionInputs, AttentionProblem, Descales, Mask, Quantization, QuantizedInputs
from .problem.outputs import empty_as
from .validation import attention as validation

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
# Of rows without a number but 0. The kernel for Hopper measures P with the scale of V's block in it: with 1.0 a block
# of zeros would leave few bits to the others; with a tiny one its probabilities would be missing from the sum.
SCALE_OF_ZEROS = 2.0**-20
# Rows of one scale with granularity "block": the rows of a Hopper warpgroup, and what divides a kernel's key tiles.
Q_BLOCK = 64
KV_BLOCK = 64
# P = exp(s - row_max) <= 1 is rounded to e4m3 as 256 P: a power of two, so the largest probability stays exact, the
# largest with room for it below 448. What is left of 256 P below 2^-10 becomes 0: probabilities below 4e-6.
P_SCALE = 256.0

Granularity = Literal["row", "block", "head", "tensor"]
GRANULARITIES = ("row", "block", "head", "tensor")
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False)
class QuantizedQKV:
    """Q, K and V in e4m3 with their scales, in place of q, k and v of a call: real value = stored value * descale.

        onepass.attention(onepass.quantize_fp8(q, k, v), causal=True)

    `quantize_fp8` makes it; tensors that were quantised elsewhere need q, k, v and their descales only. In shapes,
    seqlen is seqlen_q or seqlen_k and num_heads is num_heads_q or num_heads_kv.

    Attributes:
        q, k, v: float8_e4m3fn, shapes as for `attention`, or as for `attention_varlen`. With v_keys_last, v is what
            `keys_last` makes of it.
        q_descale, k_descale, v_descale: float32, on q's device, finite and above 0. Each by itself one of
            (): one for the tensor;
            (batch, num_heads): one for each head of each batch entry or packed sequence;
            (batch, num_heads, ceil(seqlen / block)): one for each block of rows of each head; of packed sequences
                (num_heads, total // block + batch), where the blocks of sequence b start at cu_seqlens[b] // block + b
                (with a block given, they cannot be by heads).
        q_block, kv_block: rows of a block of q, and of k and v; None: no descale of theirs is by blocks.
        dtype: of out: float32, bfloat16 or float16.
        score_shift: (batch, num_heads_q, seqlen_q) or (num_heads_q, total_q) float32: what subtracting from K took from
            every q.k of a row, before softmax_scale. It is added to lse again. None: nothing.
        v_mean: (batch, num_heads_kv, head_dim_v) float32: what was subtracted from V, for each batch entry or packed
            sequence; added to out again. None: nothing.
        rotation: seed of the rotation of q and k; None: none. For information: scores do not depend on it.
        v_keys_last: v has its keys contiguous and in the order in which tensor cores take them, see `keys_last`: what
            the Hopper kernel reads without preparation. Other backends undo it; results are the same.

    Raises: TypeError or ValueError with what was expected and given.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    q_block: int | None = None
    kv_block: int | None = None
    dtype: torch.dtype = torch.bfloat16
    score_shift: Tensor | None = None
    v_mean: Tensor | None = None
    rotation: int | None = None
    v_keys_last: bool = False

    def __post_init__(self) -> None:
        validation.check_quantized(self)
        for name in ("q_block", "kv_block"):
            if type(getattr(self, name)) not in (int, type(None)):
                object.__setattr__(self, name, int(getattr(self, name)))  # of numpy
        if type(self.v_keys_last) is not bool:
            object.__setattr__(self, "v_keys_last", bool(self.v_keys_last))

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.dtype, self.q_block, self.kv_block, self.v_keys_last)

    @property
    def descales(self) -> Descales:
        return Descales(self.q_descale, self.k_descale, self.v_descale)

    def dequantize(
        self, *, cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v in float32 as attention computes with them: rotated, and without what was subtracted.

        Args: cu_seqlens_q, cu_seqlens_k: of packed sequences, as for `quantize_fp8`.
        Raises: TypeError or ValueError with what was expected and given.
        """
        validation.check_dequantize(self, cu_seqlens_q, cu_seqlens_k)
        tensors = self.q, self.k, self.v
        return _dequantized(self.quantization, *tensors, self.descales, cu_seqlens_q, cu_seqlens_k)


def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    granularity: Granularity = "block",
    rotate: bool = True,
    seed: int = 0,
    center_k: bool = False,
    center_v: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> QuantizedQKV:
    """Q, K and V rounded to e4m3, with their scales, for `attention` and `attention_varlen`.

    By one kernel on a GPU of compute capability 8.9 or more (16-bit tensors, scales of blocks, head dims in multiples
    of 16 up to 256), else in plain torch. No gradient flows through it, so where gradients are recorded tensors that
    require one are refused: `attention(..., precision="fp8")` has gradients, and `torch.no_grad()` asks for none.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); float32, bfloat16 or float16. Packed sequences (with cu_seqlens):
            (total_q, num_heads_q, head_dim).
        k, v: as for `attention`, or as for `attention_varlen`.
        granularity: what shares a scale. "tensor": everything; "head": a head of a batch entry or sequence; "block": 64
            rows of a head; "row": one row of a head, with the scale that leaves the least error of 8 that were tried
            (others map the largest magnitude to 448).
        rotate: multiply q and k with the same random orthogonal matrix, made of signs and Hadamard matrices of the
            powers of two that head_dim is the sum of.
        seed: of the signs; the same on every device.
        center_k: subtract the mean over keys from k. Not for calls with softcap, which does see it.
        center_v: subtract the mean over keys from v; it is added to out again.
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`, for packed sequences; both or none. The call must get the
            same ones.
        seqused_k: as for `attention`. What lies beyond is not read, and is 0 afterwards.

    Returns: QuantizedQKV, whose dtype is q's. NaN and inf become NaN, at their places (rotated: in their rows). On a
    Hopper GPU its v may lie as the attention kernel reads it (v_keys_last); `dequantize` gives rows either way. The
    descales may be parts of one tensor.

    Raises: TypeError or ValueError with what was expected and given; UnsupportedError if a gradient would be lost.

    Source: FlashAttention-3, arXiv:2407.08608, section 3.3; centred keys: SageAttention, arXiv:2410.02367, section 4.2.
    """
    inputs = AttentionInputs(q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k)
    key = repeated.key_of("quantize_fp8", inputs, None, (granularity, rotate, seed, center_k, center_v))
    again: Any = repeated.find(key)
    if again is not None:
        return again(inputs)
    validation.check_quantizable(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    validation.check_one_of("granularity", granularity, GRANULARITIES)
    rotate, center_k, center_v = (
        validation.check_flag(name, flag)
        for name, flag in (("rotate", rotate), ("center_k", center_k), ("center_v", center_v))
    )
    seed = validation.check_int("seed", seed)
    validation.refuse_lost_gradients({"q": q, "k": k, "v": v})
    by_kernel = _by_kernel(inputs, granularity, seed if rotate else None, center_k, center_v)
    if by_kernel is not None and not (center_k or center_v):
        repeated.keep(key, by_kernel)  # type: ignore[arg-type]  # gives a QuantizedQKV, not out and lse
    return _quantized(inputs, granularity, seed if rotate else None, center_k, center_v, by_kernel)


@dataclass(frozen=True)
class ByKernel:
    """Tensors of certain sizes quantised in one launch; holds no tensor, and its results are not checked again.

    Attributes:
        launch: see kernels/launch/quantize.py.
        attributes: what all results have beside their tensors.
    """

    launch: Callable[..., tuple[Tensor, Tensor, Tensor, Descales]]
    attributes: dict[str, Any]

    def __call__(
        self, inputs: AttentionInputs, k_mean: Tensor | None = None, v_mean: Tensor | None = None
    ) -> QuantizedQKV:
        """The tensors, quantised.

        Args: k_mean, v_mean: (batch, num_heads_kv, head_dim) float32, to be subtracted (k_mean after the rotation).
        """
        q, k, v, (q_descale, k_descale, v_descale) = self.launch(inputs, k_mean, v_mean)
        quantized = object.__new__(QuantizedQKV)
        quantized.__dict__.update(
            self.attributes, q=q, k=k, v=v, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )
        return quantized


def _by_kernel(
    inputs: AttentionInputs, granularity: str, seed: int | None, center_k: bool, center_v: bool
) -> ByKernel | None:
    """How a kernel quantises these tensors; None: plain torch does. Args: seed: of the rotation; None: none."""
    kernels = dispatch.quantization_kernels(inputs, granularity)
    if kernels is None:
        return None
    options: dict[str, Any] = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    problem = AttentionProblem.of(inputs._replace(sinks=None), **options)
    launch = kernels.prepare(problem, inputs.q.device, seed, kernels.keys_last, center_k, center_v)
    attributes = {"q_block": Q_BLOCK, "kv_block": KV_BLOCK, "dtype": inputs.q.dtype, "rotation": seed}
    attributes |= {"score_shift": None, "v_mean": None, "v_keys_last": kernels.keys_last}
    return ByKernel(launch, attributes)


def _quantized(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    center_k: bool,
    center_v: bool,
    by_kernel: ByKernel | None,
) -> QuantizedQKV:
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, _ = inputs
    if by_kernel is not None and not (center_k or center_v):
        return by_kernel(inputs)
    with torch.no_grad(), without_autocast(q):
        k_mean = v_mean = score_shift = None
        exists = _existing_keys(inputs)
        if center_k:
            k_mean = _mean_of_keys(_as_rows(k, exists), exists, cu_seqlens_k)
            score_shift = _dots(_as_rows(q).float(), k_mean, cu_seqlens_q)
            score_shift = score_shift if cu_seqlens_q is None else score_shift.squeeze(0)
        if center_v:
            v_mean = _mean_of_keys(_as_rows(v, exists), exists, cu_seqlens_k)
        if by_kernel is not None:
            if k_mean is not None and seed is not None:
                k_mean = rotated(k_mean, seed)  # (k - mean) M = k M - mean M
            return replace(by_kernel(inputs, k_mean, v_mean), score_shift=score_shift, v_mean=v_mean)
        parts, descales = _quantize_in_torch(inputs, granularity, seed, exists, k_mean, v_mean)
    q_block, kv_block = {"row": (1, 1), "block": (Q_BLOCK, KV_BLOCK)}.get(granularity, (None, None))
    return QuantizedQKV(
        q=parts[0],
        k=parts[1],
        v=parts[2],
        q_descale=descales[0],
        k_descale=descales[1],
        v_descale=descales[2],
        q_block=q_block,
        kv_block=kv_block,
        dtype=q.dtype,
        score_shift=score_shift,
        v_mean=v_mean,
        rotation=seed,
    )


def without_autocast(t: Tensor) -> contextlib.AbstractContextManager:
    """Sums and products of tensors on its device are of the dtypes that they state, whatever the caller has chosen."""
    device = t.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return contextlib.nullcontext()
    return torch.autocast(device, enabled=False)


def _quantize_in_torch(
    inputs: AttentionInputs,
    granularity: str,
    seed: int | None,
    exists: Tensor | None,
    k_mean: Tensor | None,
    v_mean: Tensor | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """q, k and v in e4m3, and their descales. Args: seed: of the rotation; None: none."""
    q, k, v, _, cu_seqlens_q, cu_seqlens_k, _ = inputs
    # rows of no sequence must not reach a scale
    of_sequences = None if cu_seqlens_q is None else (torch.arange(len(q), device=q.device) < cu_seqlens_q[-1])[None]
    x_q, x_k, x_v = (_as_rows(t, mask).float() for t, mask in ((q, of_sequences), (k, exists), (v, exists)))
    if k_mean is not None:
        x_k = _minus(x_k, k_mean, exists, cu_seqlens_k)
    if v_mean is not None:
        x_v = _minus(x_v, v_mean, exists, cu_seqlens_k)
    if seed is not None:
        x_q, x_k = rotated(x_q, seed), rotated(x_k, seed)
    parts: list[Tensor] = []
    descales: list[Tensor] = []
    for like, x, block, cu_seqlens in (
        (q, x_q, Q_BLOCK, cu_seqlens_q),
        (k, x_k, KV_BLOCK, cu_seqlens_k),
        (v, x_v, KV_BLOCK, cu_seqlens_k),
    ):
        rounded, descale = _quantize(x, granularity, block, cu_seqlens)
        stored = empty_as(like, like.shape[-1], E4M3)
        parts.append(stored.copy_(rounded if like.dim() == 4 else rounded.squeeze(0)))
        descales.append(descale)
    return parts, descales


def _as_rows(t: Tensor, exists: Tensor | None = None) -> Tensor:
    """(batch or 1, rows, heads, head_dim), 0 where there is no key."""
    rows = t if t.dim() == 4 else t.unsqueeze(0)
    return rows if exists is None else torch.where(exists[..., None, None], rows, 0.0)


# ---------------------------------------------------------------- what is subtracted


def _existing_keys(inputs: AttentionInputs) -> Tensor | None:
    """(batch or 1, seqlen_k) bool: the keys of a sequence, up to seqused_k; None: all of them."""
    total = inputs.k.shape[-3]
    row = torch.arange(total, device=inputs.k.device)
    if inputs.cu_seqlens_k is None:
        return None if inputs.seqused_k is None else row < inputs.seqused_k[:, None]
    sequence = _sequence_of(inputs.cu_seqlens_k, total)
    exists = row < inputs.cu_seqlens_k[-1]
    if inputs.seqused_k is not None and inputs.seqused_k.numel() > 0:
        exists &= row - inputs.cu_seqlens_k[sequence] < inputs.seqused_k[sequence]
    return exists[None]


def _sequence_of(cu_seqlens: Tensor, total: int) -> Tensor:
    """(total,) int64: the sequence of each row; rows past the last offset are given to the last one."""
    row = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    return sequence.clamp(0, max(0, cu_seqlens.shape[0] - 2))


def _mean_of_keys(x: Tensor, exists: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """(batch, heads, head_dim) float32: mean of the rows that exist. Any vector would be exact, so NaN and inf are left
    out.
    """
    finite = x.nan_to_num(0.0, 0.0, 0.0)
    weight = torch.ones(x.shape[:2], dtype=torch.float32, device=x.device) if exists is None else exists.float()
    if cu_seqlens is None:
        sums, count = finite.sum(1, dtype=torch.float32), weight.sum(1)
    else:
        sequence, batch = _sequence_of(cu_seqlens, x.shape[1]), cu_seqlens.shape[0] - 1
        sums = weight.new_zeros(batch, *x.shape[2:])
        count = weight.new_zeros(batch)
        if batch > 0:
            sums.index_add_(0, sequence, finite[0].float())
            count.index_add_(0, sequence, weight[0])
    return sums / count.clamp(min=1.0)[:, None, None]


def _rows_of(per_sequence: Tensor, cu_seqlens: Tensor | None, total: int) -> Tensor:
    """(batch, heads, n) -> (batch, 1, heads, n), or for packed rows (1, total, heads, n): broadcasts over x."""
    if cu_seqlens is None:
        return per_sequence[:, None]
    if per_sequence.shape[0] == 0:
        return per_sequence.new_zeros(1, total, *per_sequence.shape[1:])
    return per_sequence[_sequence_of(cu_seqlens, total)][None]


def _minus(x: Tensor, mean: Tensor, exists: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    difference = x - _rows_of(mean, cu_seqlens, x.shape[1])
    return difference if exists is None else torch.where(exists[..., None, None], difference, 0.0)


def _dots(x_q: Tensor, k_mean: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """q . mean of k, (batch or 1, num_heads_q, rows)."""
    group = x_q.shape[2] // max(1, k_mean.shape[1])
    mean = _rows_of(k_mean.repeat_interleave(group, 1), cu_seqlens_q, x_q.shape[1])
    return torch.linalg.vecdot(x_q, mean).transpose(1, 2).contiguous()


def restored(
    quantized: QuantizedQKV, out: Tensor, lse: Tensor, scale: float, sinks: Tensor | None, cu_seqlens_q: Tensor | None
) -> tuple[Tensor, Tensor]:
    """out and lse of the tensors before anything was subtracted from them, from those of a call.

    Args: sinks: of the call; where there is a score_shift, out and lse are those without them, else with them.
    """
    if quantized.score_shift is None and quantized.v_mean is None:
        return out, lse
    is_empty = lse == -torch.inf
    share = torch.ones_like(lse)  # of a row's probability that lies on its keys
    sink = None if sinks is None else sinks.to(lse.dtype)[:, None]
    if quantized.score_shift is not None:
        lse = lse_of_keys = torch.where(is_empty, lse, lse + scale * quantized.score_shift)
        if sink is not None:
            lse = torch.logaddexp(lse_of_keys, sink)
            if cu_seqlens_q is not None:  # rows of no sequence have no sink
                lse.masked_fill_(torch.arange(lse.shape[-1], device=lse.device) >= cu_seqlens_q[-1], -torch.inf)
            share = torch.where(is_empty, 0.0, torch.exp(lse_of_keys - lse))
            out = (out * share.transpose(-1, -2)[..., None]).to(out.dtype)
    elif sink is not None:
        # a row that sees no key has lse = sink; NaN is in out already, or in no key's share
        share = (1.0 - torch.exp(sink - lse)).nan_to_num(0.0)
    if quantized.v_mean is not None:
        share = torch.where(is_empty, 0.0, share)
        mean = quantized.v_mean.repeat_interleave(out.shape[-2] // max(1, quantized.v_mean.shape[1]), 1)
        mean = _rows_of(mean, cu_seqlens_q, out.shape[-3])
        mean = mean if cu_seqlens_q is None else mean[0]
        out = torch.add(out, mean * share.transpose(-1, -2)[..., None]).to(out.dtype)
    return out, lse


# ---------------------------------------------------------------- rotation


def rotated(x: Tensor, seed: int) -> Tensor:
    """x M along the last dimension: M = diag(signs) H, H orthogonal, in blocks of powers of two, the largest first.

    The fast transform: head_dim log2(head_dim) additions a row. M is the same on every device.
    """
    x = x * signs(x.shape[-1], seed, x.device)
    sizes = [2**i for i in reversed(range(x.shape[-1].bit_length())) if x.shape[-1] & 2**i]
    return torch.cat([_hadamard(piece) for piece in x.split(sizes, -1)], -1)


def signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """(head_dim,) float32 of 1 and -1: bits of a hash (splitmix64) of column and seed.

    No generator: the same on every device, and torch.compile can trace it.
    """
    x = torch.arange(1, head_dim + 1, device=device) * _signed(0x9E3779B97F4A7C15) + _signed(seed % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * _signed(factor)
    return 1.0 - 2.0 * (x >> 63 & 1).float()  # without it the sum would be of the default dtype


def _signed(word: int) -> int:
    """A word of 64 bits as torch's integers have it."""
    return word - 2**64 if word >= 2**63 else word


def _hadamard(x: Tensor) -> Tensor:
    """x H / sqrt(n) for the last dimension n, a power of two: H_1 = 1, H_2n = [[H_n, H_n], [H_n, -H_n]]."""
    n, half = x.shape[-1], 1
    while half < n:
        a, b = x.unflatten(-1, (n // (2 * half), 2, half)).unbind(-2)
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half *= 2
    return x * n**-0.5


# ---------------------------------------------------------------- V as tensor cores take it


def keys_last(v: Tensor, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """V as the Hopper kernel reads it: transposed, and the keys in the order in which P lies in registers.

    Args:
        v: (batch, seqlen_k, num_heads_kv, head_dim_v), e4m3. Packed sequences: (total_k, num_heads_kv, head_dim_v).
        cu_seqlens_k: (batch + 1,) int32 of packed sequences.

    Returns: e4m3, contiguous, (batch, num_heads_kv, head_dim_v, seqlen_k up to a multiple of 64); of packed sequences
        (num_heads_kv, head_dim_v, (total_k // 64 + batch) * 64), where sequence b begins at
        (cu_seqlens_k[b] // 64 + b) * 64. Within every 16 keys the places 4q + 2h + e hold the keys 8h + 2q + e
        (q = 0..3, h and e = 0, 1; blocks/softmax/scaled.py says why). Zeros where there is no key.
    """
    kernel = dispatch.keys_last_kernel(v, cu_seqlens_k)
    return _keys_last_in_torch(v, cu_seqlens_k) if kernel is None else kernel(v, cu_seqlens_k)


def _keys_last_in_torch(v: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    if cu_seqlens_k is None:
        batch, seqlen_k, heads, head_dim_v = v.shape
        padded = v.new_zeros(batch, heads, head_dim_v, -(-seqlen_k // V_KEYS) * V_KEYS, dtype=torch.uint8)
        padded[..., :seqlen_k] = v.view(torch.uint8).permute(0, 2, 3, 1)
    else:
        place, exists, length = _places_of_keys(v.shape[0], cu_seqlens_k)
        padded = v.new_zeros(*v.shape[1:], length + 1, dtype=torch.uint8)
        # rows of no sequence all go to the one column too many
        padded[..., torch.where(exists, place, length)] = v.view(torch.uint8).permute(1, 2, 0)
        padded = padded[..., :length]
    runs = padded.unflatten(-1, (-1, 2, 4, 2))  # (.., run, h, q, e)
    return runs.transpose(-3, -2).flatten(-4).view(v.dtype)


def keys_first(v: Tensor, rows: int, cu_seqlens_k: Tensor | None = None) -> Tensor:
    """The reverse of `keys_last`, to which it gives v; rows of no sequence are 0. Args: rows: seqlen_k or total_k."""
    runs = v.view(torch.uint8).unflatten(-1, (-1, 4, 2, 2))  # (.., run, q, h, e)
    ordered = runs.transpose(-3, -2).flatten(-4)
    if cu_seqlens_k is None:
        return ordered[..., :rows].permute(0, 3, 1, 2).view(v.dtype)
    place, exists, length = _places_of_keys(rows, cu_seqlens_k)
    found = ordered[..., torch.where(exists, place, 0).clamp(max=max(0, length - 1))].permute(2, 0, 1)
    return torch.where(exists[:, None, None], found, 0).view(v.dtype)


def _places_of_keys(total: int, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor, int]:
    """Of packed keys: (total,) int64 place in `keys_last`, and whether a sequence has them; the number of places."""
    batch = cu_seqlens_k.shape[0] - 1
    length = (total // V_KEYS + batch) * V_KEYS
    row = torch.arange(total, device=cu_seqlens_k.device)
    if batch == 0:
        return torch.zeros_like(row), row < 0, length
    sequence = _sequence_of(cu_seqlens_k, total)
    start = cu_seqlens_k.long()[sequence]
    return (start // V_KEYS + sequence) * V_KEYS + row - start, row < cu_seqlens_k[-1], length


# ---------------------------------------------------------------- P


def round_probabilities_(p: Tensor, scratch: Tensor) -> None:
    """p = e4m3(P_SCALE * p) / P_SCALE in place, for float32 p from 0 to 1 (or NaN), bit by bit as a cast would.

    Adding and taking away 1.5 * 2^23 spacings rounds to a multiple of the spacing: 2^-3 of the power of two below p,
    but never less than what the smallest numbers have. On a CPU five such passes take a tenth of the time of two casts.

    Args: scratch: float32, as p.
    """
    torch.clamp(p, min=2.0**-6 / P_SCALE, out=scratch)
    scratch.view(torch.int32).bitwise_and_(0x7F800000)  # the power of two
    scratch.mul_(1.5 * 2.0**20)
    p.add_(scratch).sub_(scratch)


# ---------------------------------------------------------------- scales


def _segments(total: int, block: int | None, cu_seqlens: Tensor | None, device: torch.device) -> tuple[Tensor, int]:
    """Which rows share a scale: blocks of them, or with None sequences. `QuantizedQKV` says where packed blocks lie.

    Returns: (total,) int64 for each row, and how many scales there are.
    """
    if cu_seqlens is None:
        row = torch.arange(total, device=device)
        return (torch.zeros_like(row), 1) if block is None else (row // block, -(-total // block))
    sequence, batch = _sequence_of(cu_seqlens, total), cu_seqlens.shape[0] - 1
    if block is None:
        return sequence, batch
    start = cu_seqlens.long()[sequence]
    row = torch.arange(total, device=device) - start
    count = total // block + batch
    # rows past the last offset have no block of their own
    return (start // block + sequence + row // block).clamp(max=max(0, count - 1)), count


def _quantize(x: Tensor, granularity: str, block: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """x (batch or 1, rows, heads, head_dim) float32 -> e4m3 of that shape, and descale as `QuantizedQKV` has it."""
    is_packed = cu_seqlens is not None
    # e4m3 has no inf, and whether a cast makes it NaN or 448 depends on torch's version
    x = torch.where(x.isinf(), torch.nan, x)
    if granularity == "tensor":
        scale = _scale_of(_largest(x).amax() if x.numel() else x.new_zeros(()))
        return (x * scale.reciprocal()).to(E4M3), scale
    rows = {"row": 1, "block": block}.get(granularity)
    index, count = _segments(x.shape[1], rows, cu_seqlens, x.device)
    shape = x.shape[0], count, x.shape[2]
    if count == 0:  # rows of no sequence, which have been cleared
        rounded, scales = x.to(E4M3), torch.ones(shape, dtype=torch.float32, device=x.device)
    elif granularity == "row":
        rounded, row_scales = _least_error(x)
        scales = torch.ones(shape, dtype=torch.float32, device=x.device)
        if x.numel():
            scales[:, index] = row_scales
    else:
        scales = torch.zeros(shape, dtype=torch.float32, device=x.device)
        if x.numel():
            at = index[None, :, None].expand(x.shape[:3])
            scales = scales.scatter_reduce_(1, at, _largest(x), "amax", include_self=True)
        scales = _scale_of(scales)
        rounded = (x * scales.reciprocal()[:, index, :, None]).to(E4M3)
    if rows is None:  # (batch, heads)
        return rounded, (scales[0] if is_packed else scales[:, 0]).contiguous()
    scales = scales.transpose(1, 2).contiguous()
    return rounded, scales[0] if is_packed else scales


def _largest(x: Tensor) -> Tensor:
    """Largest finite magnitude of each row: NaN and inf must not reach the scale, and so other rows."""
    return x.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1)


def _scale_of(largest: Tensor) -> Tensor:
    # products with a reciprocal, here and where values are scaled, as the kernels have them
    return torch.where(largest > 0, largest * (1.0 / E4M3_MAX), SCALE_OF_ZEROS).clamp(min=_TINY)


CANDIDATES = 8


def _least_error(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 of each row, and the scales (batch, rows, heads) with the least squared error of some.

    The relative error of a value falls by half from one power of two to the next, so it matters where in between the
    values of a row lie: scales are tried at equal ratios over a factor of 2. Each is then fitted, scale = x.y / y.y.
    """
    smallest = _scale_of(_largest(x))[..., None]
    best_error = torch.full_like(smallest, torch.inf)
    best, best_scale = torch.zeros_like(x, dtype=E4M3), smallest
    for i in range(CANDIDATES):
        rounded = (x / (smallest * 2 ** (i / CANDIDATES))).to(E4M3)
        y = rounded.float()
        scale = (torch.linalg.vecdot(x, y) / torch.linalg.vecdot(y, y).clamp(min=_TINY))[..., None]
        # a row of zeros, or one with NaN
        scale = torch.where(scale.isfinite() & (scale > 0), scale, smallest)
        error = (x - y * scale).square().sum(-1, keepdim=True)
        is_better = (error < best_error) | (i == 0)
        best_error = torch.where(is_better, error, best_error)
        best_scale = torch.where(is_better, scale, best_scale)
        # e4m3 has no where
        best = torch.where(is_better, rounded.view(torch.uint8), best.view(torch.uint8)).view(E4M3)
    return best, best_scale[..., 0]


def dequantized(problem: AttentionProblem, inputs: QuantizedInputs) -> AttentionInputs:
    """The inputs in float32."""
    q, k, v, descales, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k = inputs
    assert problem.quantization is not None
    tensors = _dequantized(problem.quantization, q, k, v, descales, cu_seqlens_q, cu_seqlens_k)
    return AttentionInputs(*tensors, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)


def _dequantized(
    quantization: Quantization,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    descales: Descales,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    q_block, kv_block = quantization.q_block, quantization.kv_block
    if quantization.v_keys_last:
        v = keys_first(v, k.shape[-3], cu_seqlens_k)
    return (
        q.float() * row_scales(q, descales.q, q_block, cu_seqlens_q),
        k.float() * row_scales(k, descales.k, kv_block, cu_seqlens_k),
        v.float() * row_scales(v, descales.v, kv_block, cu_seqlens_k),
    )


def row_scales(t: Tensor, descale: Tensor, block: int | None, cu_seqlens: Tensor | None) -> Tensor:
    """The descale of each row of t (.., rows, heads, head_dim): (.., rows, heads, 1), or () where it is one for all."""
    if descale.dim() == 0:
        return descale
    if t.dim() == 4:
        if descale.dim() == 2:
            return descale[:, None, :, None]
        index, _ = _segments(t.shape[1], block, None, t.device)
        return descale.transpose(1, 2)[:, index, :, None]
    index, count = _segments(t.shape[0], block, cu_seqlens, t.device)
    if count == 0:
        return descale.new_ones(t.shape[0], t.shape[1], 1)
    return (descale if block is None else descale.T)[index, :, None]


def quantized_problem(problem: AttentionProblem) -> AttentionProblem:
    """What the forward of `attention(..., precision="fp8")` computes."""
    return replace(problem, dtype=E4M3, quantization=Quantization(problem.dtype, Q_BLOCK, KV_BLOCK))


def quantized_call(problem: AttentionProblem, inputs: AttentionInputs) -> tuple[AttentionProblem, QuantizedInputs]:
    """That problem, and what it is computed from: q, k and v with the defaults of `quantize_fp8`."""
    by_kernel = _by_kernel(inputs, "block", 0, False, False)
    quantized = _quantized(inputs, "block", 0, False, False, by_kernel)
    return replace(problem, dtype=E4M3, quantization=quantized.quantization), _inputs_of(quantized, inputs)


def _inputs_of(quantized: QuantizedQKV, inputs: AttentionInputs) -> QuantizedInputs:
    """The inputs of a call with q, k and v replaced by quantised tensors."""
    return QuantizedInputs(quantized.q, quantized.k, quantized.v, quantized.descales, *inputs[3:])


def prepare_call(
    backend: str, problem: AttentionProblem, inputs: AttentionInputs, tuning: LaunchConfig | None
) -> dispatch.Forward:
    """The forward of `attention(..., precision="fp8")` for calls alike, without gradients; holds no tensor."""
    by_kernel = _by_kernel(inputs, "block", 0, False, False)
    keys_last = by_kernel is not None and by_kernel.attributes["v_keys_last"]
    quantization = Quantization(problem.dtype, Q_BLOCK, KV_BLOCK, keys_last)
    of_fp8 = replace(problem, dtype=E4M3, quantization=quantization)
    forward = dispatch.prepare(backend, of_fp8, inputs.q.device, tuning)

    def quantize_and_attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        quantized = _quantized(inputs, "block", 0, False, False, by_kernel)
        return forward(_inputs_of(quantized, inputs))

    return quantize_and_attend

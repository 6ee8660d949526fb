"""`attention` and `attention_varlen`: their arguments, their results, and the path of a first call to a backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor, overrides

from ..kernels.config import ForwardConfigSm80, ForwardConfigSm90
from ..ops.attention import NUM_INPUTS
from ..problem import AttentionInputs, Modifiers
from ..quantization import centering
from ..validation.attention import PACKED
from ..validation.block_mask import BlockMask, with_blocks
from ..validation.fp8 import QuantizedQKV
from ..validation.modifiers import NAMES, in_float32
from ..validation.tensors import check_max_seqlens
from . import fast_path, keywords, steps

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack


Window = tuple[int | None, int | None]


class AttentionOutput(NamedTuple):
    """The result of a call with `return_lse=True`.

    Attributes:
        out: in q's dtype and shape, with head_dim_v instead of head_dim.
        lse: the natural logarithm of each row's softmax denominator, float32 (float64 for float64 inputs),
            (batch, num_heads_q, seqlen_q), or (num_heads_q, total_q) for packed sequences. It includes sinks. For a
            row that sees no key it is the row's sink, or -inf without sinks; for a row that belongs to no packed
            sequence it is -inf in any case.
    """

    out: Tensor
    lse: Tensor


class CommonOptions(TypedDict, total=False):
    """The keyword arguments that all functions of attention have: for type checkers."""

    causal: bool
    window: Window | None
    softcap: float | None
    sinks: Tensor | None
    softmax_scale: float | None
    seqstart_k: Tensor | None
    key_ranges: Tensor | None
    query_ranges: Tensor | None
    q_positions: Tensor | None
    alibi_slopes: Tensor | None
    bias: Tensor | None
    backend: str | None


class Options(CommonOptions, total=False):
    """The keyword arguments of `attention` except return_lse, on which the result's type depends: for type checkers."""

    seqused_k: Tensor | None
    block_mask: BlockMask | None
    deterministic: bool | None
    dropout_p: float
    precision: Literal["fp8"] | None
    tuning: ForwardConfigSm90 | ForwardConfigSm80 | None


class PackedOptions(Options, total=False):
    """The keyword arguments of `attention_varlen` except return_lse: for type checkers."""

    cu_seqlens_q: Required[Tensor]
    cu_seqlens_k: Required[Tensor]
    max_seqlen_q: int | Tensor | None
    max_seqlen_k: int | Tensor | None


# The options that are in the key of a call, in the order in which both functions put them into a tuple.
_OPTIONS = (
    "causal",
    "softcap",
    "softmax_scale",
    "dropout_p",
    "deterministic",
    "return_lse",
    "tuning",
    "precision",
    "backend",
)
_RETURN_LSE = _OPTIONS.index("return_lse")


def _call(
    function: str,
    inputs: AttentionInputs,
    max_seqlens: tuple | None,
    window: Any,
    options: tuple,
    modifiers: tuple,
    block_mask: Any,
) -> Tensor | AttentionOutput:
    """A call of the public function of this name, with arguments as they were given.

    Args:
        inputs: q may be a `QuantizedQKV`.
        max_seqlens: max_seqlen_q and max_seqlen_k of `attention_varlen`; None: the call is one of `attention`.
        options: the values of `_OPTIONS`. modifiers: the values of `validation.modifiers.NAMES`.
    """
    launched, key = inputs, None
    tensors: Sequence[Any] = inputs
    start, ranges, positions, slopes, bias, query_ranges = modifiers
    if not start is ranges is positions is slopes is bias is query_ranges is None:
        taken = Modifiers(start, ranges, positions, in_float32(slopes), bias, query_ranges)
        tensors = (*inputs, *taken)
        inputs = launched = inputs._replace(modifiers=taken)
    if not isinstance(inputs.q, QuantizedQKV):
        if block_mask is None:
            key = fast_path.key_of(function, tensors, window, options)
        elif isinstance(block_mask, BlockMask):
            kind = block_mask.block_size, block_mask.is_of_ranges
            key = fast_path.key_of(function, (*tensors, *block_mask.tensors), window, (*options, *kind))
    elif block_mask is inputs.k is inputs.v is inputs.q.score_shift is inputs.q.v_mean is inputs.modifiers is None:
        qkv, descales = inputs.q, inputs.q.descales
        tensors = (qkv.q, qkv.k, qkv.v, *inputs[3:NUM_INPUTS], *descales)
        launched = AttentionInputs._make((*tensors[:NUM_INPUTS], None, descales, None))
        layout = qkv.dtype, qkv.q_block, qkv.kv_block, qkv.v_keys_last
        key = fast_path.key_of(f"{function} of QuantizedQKV", tensors, window, (*options, *layout))
    forward = fast_path.find(key)
    if forward is not None:
        if max_seqlens is not None:
            check_max_seqlens(*max_seqlens)
        result = forward(launched if block_mask is None else with_blocks(launched, block_mask))
    else:
        result = _first_call(inputs, max_seqlens, window, options, key, block_mask)
    return AttentionOutput(*result) if options[_RETURN_LSE] else result[0]


def _first_call(
    inputs: AttentionInputs, max_seqlens: tuple | None, window: Any, options: tuple, key: tuple | None, block_mask: Any
) -> tuple[Tensor, Tensor]:
    """Check a call, run the operator on the chosen backend, and keep a prepared forward for the next call with its key.

    Args: as for `_call`. key: None: no forward is kept.
    """
    q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k = inputs[:NUM_INPUTS]
    arguments = dict(zip(_OPTIONS, options, strict=True))
    arguments |= {"window": window, "sinks": sinks, "seqused_k": seqused_k}
    if inputs.modifiers is not None:
        arguments |= zip(NAMES, inputs.modifiers, strict=False)
    if block_mask is not None:
        arguments["block_mask"] = block_mask
    if max_seqlens is not None:
        arguments |= zip(PACKED, (cu_seqlens_q, cu_seqlens_k, *max_seqlens), strict=True)
    call = steps.prepare(q, k, v, **arguments)
    if isinstance(q, QuantizedQKV) and q.score_shift is not None:
        # a sink is compared with scores, so it is left out until the scores have their shift again
        call = call._replace(inputs=call.inputs._replace(sinks=None))
    out, lse = call.forward()
    if key is not None and not out.is_meta:
        fast_path.keep(key, call.prepared())
    if isinstance(q, QuantizedQKV):
        return centering.restored(q.score_shift, q.v_mean, out, lse, call.problem.softmax_scale, sinks, cu_seqlens_q)
    return out, lse


@overload
def attention(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...


@overload
def attention(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> AttentionOutput: ...


@overload
def attention(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | AttentionOutput: ...


@keywords.hide_unknown
def attention(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *positional: Any,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    q_positions: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: Literal["fp8"] | None = None,
    backend: str | None = None,
    tuning: ForwardConfigSm90 | ForwardConfigSm80 | None = None,
    **unknown: Any,
) -> Tensor | AttentionOutput:
    """Exact attention, softmax(softmax_scale * q k^T + mask) v, in one pass over the keys.

    Masks are aligned at the bottom right: with seqlen_q = 2 and seqlen_k = 4, `causal` keeps (1 = seen)

        1 1 1 0
        1 1 1 1

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); float64, float32, bfloat16 or float16. Strides are free; callers
            with (batch, num_heads, seqlen, head_dim) pass `x.transpose(1, 2)`, which copies nothing. A `QuantizedQKV`
            may take the place of q, k and v. No gradient flows through it: where gradients are recorded, neither its
            tensors nor sinks may require one.
        k: (batch, seqlen_k, num_heads_kv, head_dim), num_heads_q divisible by num_heads_kv: query head h uses
            kv head h // (num_heads_q // num_heads_kv). If q has 0 heads, out has none and gradients of k and v are 0.
        v: (batch, seqlen_k, num_heads_kv, head_dim_v); head_dim_v may differ from head_dim.
        causal: query i sees key j only if j <= i + seqlen_k - seqlen_q.
        window: (left, right), both inclusive, None = unbounded: query i sees key j only if
            i + shift - left <= j <= i + shift + right, where shift = seqlen_k - seqlen_q. A side may be negative:
            (None, -1) also hides a query's own position, (-3, None) all keys up to the second after it. (flash-attn
            writes -1 for an unbounded side.)
        softcap: c > 0 replaces a scaled score s by c * tanh(s / c).
        sinks: (num_heads_q,) floating point; adds exp(sinks[h]) to the denominator of every row of head h, including
            rows that see no key. A sink of -inf has no effect. A sink of +inf takes all of the probability: out = 0
            and lse = +inf. A sink of NaN makes lse of its head NaN, and out of the rows that see a key. The gradient of
            a sink of +inf or NaN is undefined; other heads do not depend on it.
        softmax_scale: multiplies q.k before the softmax, at most 1e36 in magnitude (1e300 in float64); None =
            head_dim ** -0.5.
        seqused_k: (batch,) int32 on q's device; only the first seqused_k[b] keys of batch entry b exist, and masks are
            aligned to them. Keys and values beyond them are never read. Leave it out for a causal batch that is padded
            at the end: real rows never see the padding, and the diagonal must not move.
        seqstart_k: (batch,) int32 on q's device; keys before seqstart_k[b] do not exist, and are never read (left
            padding). Queries whose position i + seqlen_k - seqlen_q is before it see nothing. Masks stay aligned to
            the last key.
        key_ranges: (batch or 1, num_heads_q or 1, seqlen_q, 2) int32 on q's device: query i sees keys
            lo <= j < hi among the keys that all other arguments leave.
        query_ranges: (batch or 1, num_heads_q or 1, seqlen_k, 2) int32 on q's device: key j is seen by the queries
            lo <= i < hi, rows of q, among those that all other arguments leave.
        q_positions: (batch or 1, seqlen_q) int32 on q's device: where each query stands among the keys, instead of
            i + seqlen_k - seqlen_q. causal, window, seqstart_k and alibi_slopes count from it, and it is the number of
            a query's row in bias and for dropout. It may be any number; beyond the rows of bias the nearest one counts.
        alibi_slopes: (num_heads_q,) or (batch, num_heads_q) float32 (bfloat16 and float16 are converted); subtracts
            slope * |position - j| from a score, after the softcap. They may require a gradient, and be negative.
        bias: (batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_k or 1), with q_positions any number of rows; added
            to scores after the softcap. A pair with a bias of -inf is hidden. It may require a gradient, which is
            undefined for hidden pairs. A row is undefined if all its biases are as low as torch.finfo(dtype).min, which
            absorbs the scores.
        block_mask: any mask, and which blocks of queries and keys are visited, see `BlockMask`.
        dropout_p: 0 <= dropout_p < 1: each probability is left out of the product with v with this probability,
            rounded to a multiple of 1 / 256, and the others are divided by 1 - dropout_p. lse does not change. Pass 0
            in evaluation: no module's `training` is known here.
            Seed and offset come from torch's generator of q's device; see `geometry/philox.py` for the bits.
        deterministic: gradients are bitwise equal from run to run; None = torch.are_deterministic_algorithms_enabled().
        return_lse: also return lse, which is differentiable.
        precision: "fp8" computes the forward in FP8: q, k and v (float32 or 16 bits) are quantized as `quantize_fp8`
            does by default. Gradients are those of exact attention at q, k and v, from the out and lse of that
            forward. None = the forward is computed in q's dtype.
        backend: name of the backend that must run; None = what `use_backend` or ONEPASS_BACKEND chose, else the best
            one that `supports` the call.
        tuning: a `ForwardConfigSm90` (backend sm90) or `ForwardConfigSm80` (sm80) that the forward is computed with,
            for measuring: it changes speed and summation order only. None = the backend's own choice.

    Returns: out, (batch, seqlen_q, num_heads_q, head_dim_v), in q's dtype and with the order of q's dimensions in
    memory (heads outside seqlen if q has them so), or AttentionOutput(out, lse). A row that sees no key has out = 0,
    and with sinks lse = sinks[h], else lse = -inf. No gradient flows through such a row to q, k and v, while the sink
    has the gradient of lse. Sums are accumulated in float32 (float64 for float64 inputs).

    Raises: TypeError, ValueError, or NotImplementedError for what no backend computes, each before any work and
    with what was expected and given.

    Source: FlashAttention-2, arXiv:2307.08691, Algorithms 1 and 2.
    """
    if unknown or positional:
        raise keywords.unexpected("attention", unknown, positional=positional)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)) and overrides.has_torch_function((q, k)):
        return keywords.overridden(attention, locals())
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = causal, softcap, softmax_scale, dropout_p, deterministic, return_lse, tuning, precision, backend
    modifiers = seqstart_k, key_ranges, q_positions, alibi_slopes, bias, query_ranges
    # validation checks their types
    inputs = AttentionInputs(q, k, v, sinks, None, None, seqused_k)  # type: ignore[arg-type]
    return _call("attention", inputs, None, window, options, modifiers, block_mask)


@overload
def attention_varlen(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[PackedOptions],
) -> Tensor: ...


@overload
def attention_varlen(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[PackedOptions],
) -> AttentionOutput: ...


@overload
def attention_varlen(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[PackedOptions],
) -> Tensor | AttentionOutput: ...


@keywords.hide_unknown
def attention_varlen(
    q: Tensor | QuantizedQKV,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *positional: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    softmax_scale: float | None = None,
    seqused_k: Tensor | None = None,
    seqstart_k: Tensor | None = None,
    key_ranges: Tensor | None = None,
    query_ranges: Tensor | None = None,
    q_positions: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: BlockMask | None = None,
    dropout_p: float = 0.0,
    deterministic: bool | None = None,
    return_lse: bool = False,
    precision: Literal["fp8"] | None = None,
    backend: str | None = None,
    tuning: ForwardConfigSm90 | ForwardConfigSm80 | None = None,
    **unknown: Any,
) -> Tensor | AttentionOutput:
    """Exact attention over packed sequences: sequence b attends to itself only.

    Args:
        q: (total_q, num_heads_q, head_dim); sequence b holds rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] - 1. A
            `QuantizedQKV` of packed sequences may take the place of q, k and v.
        k, v: (total_k, num_heads_kv, head_dim) and (total_k, num_heads_kv, head_dim_v), cut by cu_seqlens_k.
        cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32 on q's device, starting at 0 and never decreasing. Rows
            past the last offset belong to no sequence: out = 0, lse = -inf (even with sinks), zero gradients.
        max_seqlen_q, max_seqlen_k: an int, a tensor or None; hints that are never read from the device.
        seqused_k: (batch,) int32; only the first seqused_k[b] keys of sequence b exist, and masks are aligned to them.
        seqstart_k, alibi_slopes, dropout_p: as for `attention`; keys count from the first key of their sequence.
        key_ranges: (num_heads_q or 1, total_q, 2) int32. q_positions: (total_q,) int32.
        query_ranges: (num_heads_q or 1, total_k, 2) int32; queries count from the first query of their sequence.
        bias: (num_heads_q or 1, total_q or 1, columns): column j belongs to key j of each sequence. There are at least
            as many columns as the longest sequence has keys, or 1 for all keys. With q_positions
            (num_heads_q or 1, positions, columns).
        block_mask: see `BlockMask`; blocks count from the first query and key of their sequence.
        causal, window, softcap, sinks, softmax_scale, deterministic, return_lse, precision, backend, tuning: as for
            `attention`; masks are aligned to each sequence's own lengths.

    Returns: out, (total_q, num_heads_q, head_dim_v), or AttentionOutput with lse (num_heads_q, total_q).

    Raises: what `attention` raises, and from a backend that reads lengths on the host (`tiled`) ValueError for offsets
    that are out of order, and for a bias with too few columns. Kernels read lengths on the device only, and give
    undefined results for such offsets and such a bias.
    """
    if unknown or positional:
        raise keywords.unexpected("attention_varlen", unknown, positional=positional)
    if not (isinstance(q, Tensor) and isinstance(k, Tensor)) and overrides.has_torch_function((q, k)):
        return keywords.overridden(attention_varlen, locals())
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    options = causal, softcap, softmax_scale, dropout_p, deterministic, return_lse, tuning, precision, backend
    modifiers = seqstart_k, key_ranges, q_positions, alibi_slopes, bias, query_ranges
    # validation checks their types
    inputs = AttentionInputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)  # type: ignore[arg-type]
    return _call("attention_varlen", inputs, (max_seqlen_q, max_seqlen_k), window, options, modifiers, block_mask)

"""The door: every check of a caller's arguments, once, for all backends.

`check_attention` and `check_attention_varlen` turn arguments into an `AttentionProblem` or raise before any work is
done, with what was expected and what was given. The order is always the same: types, devices, dtypes, ranks,
shapes, options. Code behind the door trusts the problem and checks nothing again.

The one exception is data that only the device knows: `read_lengths` checks the values of `cu_seqlens_*` and
`seqused_k` where a backend reads them, before it computes anything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad

from ..errors import UnsupportedError
from ..kernels.config import ForwardConfig, ForwardConfigSm80
from ..problem import V_KEYS, AttentionInputs, AttentionProblem, Mask, QuantizedInputs
from . import layout_hints
from .scalars import check_flag, check_int, check_real

if TYPE_CHECKING:
    from ..ops.quantize import QuantizedQKV

SUPPORTED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
QUANTIZABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
PRECISIONS = ("fp8",)
DENSE_DIMS = "(batch, seqlen, num_heads, head_dim)"
PACKED_DIMS = "(total_tokens, num_heads, head_dim)"
LARGEST_BLOCK = 2**31 - 1
LARGEST_TENSOR = 2**56  # elements, whose bytes 64 bits still count
WIDEST_WINDOW = 2**48  # more bytes than a machine has: a window side beyond it hides nothing, and sums stay in 64 bits


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(t: torch.Tensor) -> str:
    return str(tuple(t.shape))


def check_tensor(name: str, t: Any, expected: str = "a torch.Tensor") -> torch.Tensor:
    """A dense tensor: one whose shape and strides tell where its elements are."""
    if not isinstance(t, torch.Tensor):
        raise TypeError(f"{name}: expected {expected}, got {type(t).__name__}")
    if t.is_nested:  # some of these have no shape, and all say that their layout is another or strided
        hint = " (sequences of different lengths are packed: onepass.attention_varlen)"
        raise TypeError(f"{name}: expected {expected} of one shape, got a nested tensor{hint}")
    if t.layout != torch.strided:
        raise TypeError(f"{name}: expected a strided (dense) tensor, got layout {t.layout}")
    return t


def check_call(name: str, call: Any) -> None:
    """One of the calls to come that `warmup` and `tune` take."""
    if not isinstance(call, (Mapping, AttentionProblem)):
        given = f"{type(call).__name__} {call!r}"
        raise TypeError(f"{name}: expected the arguments of a call by name, or an AttentionProblem, got {given}")


def tensor_of_shape(name: str, shape: Sequence[Any], dtype: Any, dtype_name: str = "dtype") -> torch.Tensor:
    """What stands for a tensor of which a call to come tells the shape alone: one on the "meta" device."""
    if not isinstance(dtype, torch.dtype):
        shape_given = f"beside the shape {tuple(shape)} of {name}"
        raise TypeError(f"{dtype_name}: expected a torch.dtype {shape_given}, got {dtype!r}")
    sizes = [check_int(name, size, "a shape of int", least=0) for size in shape]
    if math.prod(sizes) > LARGEST_TENSOR:
        raise ValueError(f"{name}: expected a shape of up to {LARGEST_TENSOR} elements, got {tuple(sizes)}")
    return torch.empty(sizes, dtype=dtype, device="meta")


def _is_missing(named: tuple[str, Any]) -> bool:
    """A key to sort two arguments by that need one another: the one that is given is looked at first."""
    return named[1] is None


def check_tensors(named: dict[str, Any], dtypes: tuple[torch.dtype, ...] = SUPPORTED_DTYPES) -> None:
    """All are dense tensors on one device, of one of the dtypes."""
    for name, t in named.items():
        check_tensor(name, t)
    first_name, first = next(iter(named.items()))
    for name, t in named.items():
        if t.device != first.device:
            raise ValueError(f"{name}: expected device {first.device} like {first_name}, got {t.device}")
    for name, t in named.items():
        if t.dtype not in dtypes:
            expected = ", ".join(_short(d) for d in dtypes)
            hint = ""
            if t.dtype == E4M3 and dtypes is SUPPORTED_DTYPES:
                hint = " (FP8 tensors come with their scales, as a onepass.QuantizedQKV)"
            raise TypeError(f"{name}: expected dtype {expected}, got {_short(t.dtype)}{hint}")
        if t.dtype != first.dtype:
            raise TypeError(f"{name}: expected dtype {_short(first.dtype)} like {first_name}, got {_short(t.dtype)}")


def _check_ranks(named: dict[str, torch.Tensor], dims: str, rank: int) -> None:
    for name, t in named.items():
        if t.dim() != rank:
            raise ValueError(f"{name}: expected {rank} dimensions {dims}, got {t.dim()} in shape {_shape(t)}")


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Agreement of the head counts and head dims, which are the last two dimensions in both layouts."""
    if k.shape[:-1] != v.shape[:-1]:
        hint = layout_hints.to_transpose({"v": v}) if k.shape[:-1] == layout_hints.transposed(v).shape[:-1] else ""
        raise ValueError(f"v: expected shape {tuple(k.shape[:-1])} like k up to head_dim, got {_shape(v)}{hint}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"k: expected head_dim {q.shape[-1]} like q, got {k.shape[-1]}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.shape[-1] < 1:
            raise ValueError(f"{name}: expected a head_dim of at least 1, got shape {_shape(t)}")
    check_groups({"q": q}, {"k": k, "v": v}, "k and v")


def check_groups(queries: dict[str, torch.Tensor], keys: dict[str, torch.Tensor], of: str) -> None:
    """Each kv head serves as many query heads; without query heads, of which 0 are legal, there may be any number.

    Args: queries, keys: tensors by name, heads in the last dimension but one. of: whose heads those of keys are.
    """
    (num_heads_q,), (num_heads_kv, *_) = ([t.shape[-2] for t in named.values()] for named in (queries, keys))
    if num_heads_q == 0:
        return
    if num_heads_kv == 0 or num_heads_q % num_heads_kv != 0:
        raise ValueError(
            f"q: expected a number of heads divisible by the {num_heads_kv} heads of {of}, got {num_heads_q}"
            f"{layout_hints.of_heads(queries, keys)}"
        )


def _check_lengths_tensor(name: str, t: Any, length: int, length_of: str, device: torch.device) -> None:
    check_tensor(name, t, "an int32 torch.Tensor")
    if t.dtype != torch.int32:
        raise TypeError(f"{name}: expected dtype int32, got {_short(t.dtype)}")
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {t.device}")
    if t.dim() != 1 or t.shape[0] != length:
        raise ValueError(f"{name}: expected shape ({length},), {length_of}, got {_shape(t)}")


def _check_sinks(sinks: Any, q: torch.Tensor) -> None:
    check_tensor("sinks", sinks)
    if not sinks.dtype.is_floating_point or sinks.dtype not in SUPPORTED_DTYPES:
        raise TypeError(f"sinks: expected a floating-point dtype, got {_short(sinks.dtype)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks: expected device {q.device} like q, got {sinks.device}")
    if sinks.dim() != 1 or sinks.shape[0] != q.shape[-2]:
        is_transposed = sinks.dim() == 1 and sinks.shape[0] == q.shape[-3]
        hint = layout_hints.to_transpose({"q": q}) if is_transposed else ""
        raise ValueError(f"sinks: expected shape ({q.shape[-2]},), one per query head, got {_shape(sinks)}{hint}")


def _check_window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window: expected a pair (left, right) of int or None, got {window!r}")
    return _check_window_side("left", window[0]), _check_window_side("right", window[1])


def _check_window_side(side: str, size: Any) -> int | None:
    if size is None:
        return None
    size = check_int("window", size, f"an int or None for its {side} side")
    # still a bound, for the sake of the kernel that is chosen, but one that fits where it goes
    if size > WIDEST_WINDOW:
        return WIDEST_WINDOW
    return -WIDEST_WINDOW if size < -WIDEST_WINDOW else size


def check_max_seqlens(max_seqlen_q: Any, max_seqlen_k: Any) -> None:
    """Each an int, a tensor of one integer (never read, so never a synchronisation) or None."""
    for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        _check_max_seqlen(name, value)


def _check_max_seqlen(name: str, value: Any) -> None:
    if value is None:
        return
    expected = "an int, a tensor of one integer or None"
    if isinstance(value, torch.Tensor):
        check_tensor(name, value, expected)
        if value.numel() != 1 or value.dtype.is_floating_point or value.dtype.is_complex:
            raise TypeError(f"{name}: expected {expected}, got {_short(value.dtype)} of shape {_shape(value)}")
        return
    check_int(name, value, expected, least=0)


def _options(
    q: torch.Tensor,
    *,
    causal: Any,
    window: Any,
    softcap: Any,
    sinks: Any,
    softmax_scale: Any,
    deterministic: Any,
    return_lse: Any,
    tuning: Any,
) -> dict[str, Any]:
    """Check the options that both layouts share; return them as `AttentionProblem.of` takes them."""
    causal = check_flag("causal", causal)
    check_flag("return_lse", return_lse)
    is_reproducible = check_flag("deterministic", deterministic, none_too=True)
    mask = Mask.from_options(causal, _check_window(window))
    if softcap is not None:
        softcap = check_real("softcap", softcap)
        if softcap <= 0:
            raise ValueError(f"softcap: expected a number above 0 (None = no cap), got {softcap}")
    if sinks is not None:
        _check_sinks(sinks, q)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else check_real("softmax_scale", softmax_scale)
    if tuning is not None and not isinstance(tuning, (ForwardConfig, ForwardConfigSm80)):
        raise TypeError(f"tuning: expected a ForwardConfig, a ForwardConfigSm80 or None, got {tuning!r}")
    if deterministic is None:
        is_reproducible = torch.are_deterministic_algorithms_enabled()
    return {"softmax_scale": scale, "mask": mask, "softcap": softcap, "deterministic": is_reproducible}


def _check_dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seqused_k: Any) -> None:
    """Shapes of `attention`, behind `check_tensors`."""
    _check_ranks({"q": q, "k": k, "v": v}, DENSE_DIMS, 4)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"k: expected batch {q.shape[0]} like q, got {k.shape[0]}")
    _check_heads(q, k, v)
    if seqused_k is not None:
        _check_lengths_tensor("seqused_k", seqused_k, q.shape[0], "one per batch entry", q.device)


def _check_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any
) -> None:
    """Shapes of `attention_varlen`, behind `check_tensors`."""
    of_both = ("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)
    for name, offsets in sorted(of_both, key=_is_missing):
        check_tensor(name, offsets, "an int32 torch.Tensor")
    _check_ranks({"q": q, "k": k, "v": v}, PACKED_DIMS, 3)
    _check_heads(q, k, v)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q: expected shape (batch + 1,), got {_shape(cu_seqlens_q)}")
    batch = cu_seqlens_q.shape[0] - 1
    _check_lengths_tensor("cu_seqlens_q", cu_seqlens_q, batch + 1, "batch + 1", q.device)
    _check_lengths_tensor("cu_seqlens_k", cu_seqlens_k, batch + 1, "batch + 1 like cu_seqlens_q", q.device)
    if seqused_k is not None:
        _check_lengths_tensor("seqused_k", seqused_k, batch, "one per sequence", q.device)


def check_attention(q: Any, k: Any, v: Any, *, seqused_k: Any = None, **options: Any) -> AttentionProblem:
    """The problem that `onepass.attention` was asked for.

    Raises: TypeError, ValueError or UnsupportedError (a NotImplementedError), naming the argument, what was
    expected and what was given. Nothing has been computed or changed when it raises.
    """
    check_tensors({"q": q, "k": k, "v": v})
    _check_dense(q, k, v, seqused_k)
    inputs = AttentionInputs(q, k, v, options["sinks"], seqused_k=seqused_k)
    return AttentionProblem.of(inputs, **_options(q, **options))


def check_attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    seqused_k: Any = None,
    **options: Any,
) -> AttentionProblem:
    """The problem that `onepass.attention_varlen` was asked for; raises like `check_attention`."""
    check_tensors({"q": q, "k": k, "v": v})
    _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)
    check_max_seqlens(max_seqlen_q, max_seqlen_k)
    inputs = AttentionInputs(q, k, v, options["sinks"], cu_seqlens_q, cu_seqlens_k, seqused_k)
    return AttentionProblem.of(inputs, **_options(q, **options))


# ---------------------------------------------------------------- FP8


def check_block(name: str, value: Any) -> int | None:
    """A number of rows or keys, small enough for an argument of a kernel, or None."""
    if value is None:
        return None
    block = check_int(name, value, "an int or None", least=1)
    if block > LARGEST_BLOCK:
        raise ValueError(f"{name}: expected at most {LARGEST_BLOCK}, got {block}")
    return block


def check_one_of(name: str, value: Any, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        error = ValueError if isinstance(value, str) else TypeError
        raise error(f"{name}: expected one of {', '.join(choices)}, got {value!r}")


def check_precision(precision: Any, q: torch.Tensor) -> None:
    """`precision` of a call whose tensors have been checked: "fp8" (None is the other way, and not asked here)."""
    check_one_of("precision", precision, PRECISIONS)
    if q.dtype not in QUANTIZABLE_DTYPES:
        expected = ", ".join(_short(d) for d in QUANTIZABLE_DTYPES)
        raise TypeError(f"q: expected dtype {expected} with precision='fp8', got {_short(q.dtype)}")


def check_quantizable(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, seqused_k: Any) -> None:
    """The tensors of `onepass.quantize_fp8`; raises like `check_attention`."""
    check_tensors({"q": q, "k": k, "v": v}, QUANTIZABLE_DTYPES)
    if cu_seqlens_q is None and cu_seqlens_k is None:
        _check_dense(q, k, v, seqused_k)
    else:
        _check_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k)


def check_quantized(quantized: QuantizedQKV) -> None:
    """The tensors of a `onepass.QuantizedQKV` by themselves; of packed sequences their number is not known yet."""
    q, k, v = quantized.q, quantized.k, quantized.v
    check_tensors({"q": q, "k": k, "v": v}, (E4M3,))
    check_flag("v_keys_last", quantized.v_keys_last)
    v = _as_rows(k, v) if quantized.v_keys_last else v
    if q.dim() == 3:
        _check_ranks({"q": q, "k": k, "v": v}, PACKED_DIMS, 3)
        _check_heads(q, k, v)
    else:
        _check_dense(q, k, v, None)
    if not isinstance(quantized.dtype, torch.dtype) or quantized.dtype not in QUANTIZABLE_DTYPES:
        expected = ", ".join(_short(d) for d in QUANTIZABLE_DTYPES)
        raise TypeError(f"dtype: expected {expected}, the dtype of out, got {quantized.dtype!r}")
    for name in ("q_block", "kv_block"):
        check_block(name, getattr(quantized, name))
    for name, t, block in (
        ("q_descale", q, quantized.q_block),
        ("k_descale", k, quantized.kv_block),
        ("v_descale", v, quantized.kv_block),
    ):
        _check_float32(name, getattr(quantized, name), q.device)
        _check_descale(name, getattr(quantized, name), t, block)
    is_packed, batch = q.dim() == 3, q.shape[0]
    if quantized.score_shift is not None:
        _check_float32("score_shift", quantized.score_shift, q.device)
        expected_shape = (q.shape[1], q.shape[0]) if is_packed else (batch, q.shape[2], q.shape[1])
        if tuple(quantized.score_shift.shape) != expected_shape:
            raise ValueError(f"score_shift: expected shape {expected_shape}, got {_shape(quantized.score_shift)}")
    if quantized.v_mean is not None:
        v_mean = quantized.v_mean
        _check_float32("v_mean", v_mean, q.device)
        expected_tail = (v.shape[-2], v.shape[-1])
        if v_mean.dim() != 3 or v_mean.shape[1:] != expected_tail or (not is_packed and v_mean.shape[0] != batch):
            expected = f"({'batch' if is_packed else batch}, {expected_tail[0]}, {expected_tail[1]})"
            raise ValueError(f"v_mean: expected shape {expected}, got {_shape(v_mean)}")


def check_dequantize(quantized: QuantizedQKV, cu_seqlens_q: Any, cu_seqlens_k: Any) -> None:
    """The offsets of `QuantizedQKV.dequantize`: those of packed sequences, where a scale or v depends on them."""
    is_packed = quantized.q.dim() == 3
    needed = {
        "cu_seqlens_q": quantized.q_descale.dim() > 0,
        "cu_seqlens_k": quantized.v_keys_last or quantized.k_descale.dim() > 0 or quantized.v_descale.dim() > 0,
    }
    for name, offsets in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if offsets is None and not (is_packed and needed[name]):
            continue
        check_tensor(name, offsets, "an int32 torch.Tensor")
        if not is_packed:
            raise ValueError(f"{name}: expected None beside tensors that are not packed, got a tensor")
        if offsets.dim() != 1 or offsets.shape[0] < 1:
            raise ValueError(f"{name}: expected shape (batch + 1,), got {_shape(offsets)}")
        batch = offsets.shape[0] - 1
        _check_lengths_tensor(name, offsets, batch + 1, "batch + 1", quantized.q.device)
        for of, t, block in (
            ("q_descale", quantized.q, quantized.q_block),
            ("k_descale", quantized.k, quantized.kv_block),
            (
                "v_descale",
                _as_rows(quantized.k, quantized.v) if quantized.v_keys_last else quantized.v,
                quantized.kv_block,
            ),
        ):
            if (of == "q_descale") == (name == "cu_seqlens_q"):
                _check_descale(of, getattr(quantized, of), t, block, batch)


def _as_rows(k: torch.Tensor, v: torch.Tensor, batch: int | None = None) -> torch.Tensor:
    """A stand-in with the shape that v had before `fp8.keys_last`; no data.

    Args: batch: number of packed sequences, once it is known.
    """
    if k.dim() not in (3, 4) or v.dim() != k.dim():
        raise ValueError(f"v: expected as many dimensions as k, {k.dim()}, got shape {_shape(v)}")
    total, heads, head_dim_v = k.shape[-3], k.shape[-2], v.shape[-2]
    least = total // V_KEYS * V_KEYS
    if k.dim() == 4:
        is_right = tuple(v.shape) == (k.shape[0], heads, head_dim_v, -(-total // V_KEYS) * V_KEYS)
    elif batch is None:
        is_right = v.shape[0] == heads and v.shape[-1] >= least and v.shape[-1] % V_KEYS == 0
    else:
        is_right = v.shape[0] == heads and v.shape[-1] == least + V_KEYS * batch
    if not is_right:  # only here: torch.compile would take a length that goes into text for a constant
        length = f"{least} + {V_KEYS} * batch" if batch is None else str(least + V_KEYS * batch)
        length = f"{-(-total // V_KEYS) * V_KEYS}" if k.dim() == 4 else length
        leading = f"{k.shape[0]}, " if k.dim() == 4 else ""
        raise ValueError(
            f"v: expected shape ({leading}{heads}, {head_dim_v}, {length}) with v_keys_last, got {_shape(v)}"
        )
    return k[..., :1].expand(*k.shape[:-1], head_dim_v)


def _check_float32(name: str, t: Any, device: torch.device) -> None:
    check_tensor(name, t, "a float32 torch.Tensor")
    if t.dtype != torch.float32:
        raise TypeError(f"{name}: expected dtype float32, got {_short(t.dtype)}")
    if t.device != device:
        raise ValueError(f"{name}: expected device {device} like q, got {t.device}")


def _check_descale(
    name: str, descale: torch.Tensor, t: torch.Tensor, block: int | None, batch: int | None = None
) -> None:
    """The shape of one descale beside its tensor. Args: batch: number of packed sequences, once it is known."""
    if descale.dim() == 0:
        return
    heads, total, shape = t.shape[-2], t.shape[-3], tuple(descale.shape)
    if t.dim() == 4:
        is_right = shape == (t.shape[0], heads)
        if block is not None:
            is_right = is_right or shape == (t.shape[0], heads, -(-total // block))
    elif block is None:
        is_right = len(shape) == 2 and shape[1] == heads and (batch is None or shape[0] == batch)
    else:
        least = total // block
        is_right = len(shape) == 2 and shape[0] == heads
        is_right = is_right and (shape[1] >= least if batch is None else shape[1] == least + batch)
    if is_right:
        return
    # only here: torch.compile would take a length that goes into text for a constant
    if t.dim() == 4:
        allowed = f"({t.shape[0]}, {heads})"
        allowed += "" if block is None else f" or ({t.shape[0]}, {heads}, {-(-total // block)})"
    elif block is None:
        allowed = f"({'batch' if batch is None else batch}, {heads})"
    else:
        allowed = f"({heads}, {f'{total // block} + batch' if batch is None else total // block + batch})"
    of = "" if block is None else f" with blocks of {block} rows"
    raise ValueError(f"{name}: expected shape () or {allowed}{of}, got {_shape(descale)}")


def check_quantized_call(
    quantized: QuantizedQKV, k: Any, v: Any, *, precision: Any = None, seqused_k: Any = None, **options: Any
) -> AttentionProblem:
    """The problem that `attention` or, with cu_seqlens, `attention_varlen` was asked for with a `QuantizedQKV`."""
    for name, value in (("k", k), ("v", v), ("precision", precision)):
        if value is not None:
            raise TypeError(f"{name}: expected None beside a QuantizedQKV, got {type(value).__name__}")
    is_packed = "cu_seqlens_q" in options
    cu_seqlens_q, cu_seqlens_k = (options.pop(name, None) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    max_seqlens = (options.pop(name, None) for name in ("max_seqlen_q", "max_seqlen_k"))
    tensors = quantized.q, quantized.k, quantized.v
    as_rows = tensors if not quantized.v_keys_last else (*tensors[:2], _as_rows(*tensors[1:]))
    if is_packed:
        _check_packed(*as_rows, cu_seqlens_q, cu_seqlens_k, seqused_k)
        check_max_seqlens(*max_seqlens)
        batch = cu_seqlens_q.shape[0] - 1
        if quantized.v_keys_last:
            _as_rows(*tensors[1:], batch)
        for name, t, block in zip(
            ("q_descale", "k_descale", "v_descale"),
            as_rows,
            (quantized.q_block, quantized.kv_block, quantized.kv_block),
            strict=True,
        ):
            _check_descale(name, getattr(quantized, name), t, block, batch)
        if quantized.v_mean is not None and quantized.v_mean.shape[0] != batch:
            raise ValueError(f"v_mean: expected batch {batch} like cu_seqlens_q, got {quantized.v_mean.shape[0]}")
    else:
        _check_dense(*as_rows, seqused_k)
    if quantized.score_shift is not None and options["softcap"] is not None:
        raise ValueError(
            "softcap: expected None where the mean of k was subtracted (center_k=True): a softcap sees it, "
            f"got {options['softcap']}"
        )
    sinks = options["sinks"]
    checked = _options(quantized.q, **options)
    names = "q", "k", "v", "q_descale", "k_descale", "v_descale", "score_shift", "v_mean"
    refuse_lost_gradients({name: getattr(quantized, name) for name in names} | {"sinks": sinks})
    inputs = QuantizedInputs(*tensors, quantized.descales, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)
    return AttentionProblem.of(inputs, **checked, quantization=quantized.quantization)


def refuse_lost_gradients(named: dict[str, torch.Tensor | None]) -> None:
    """Raise UnsupportedError for a tensor of FP8 that asks for a gradient, where gradients are recorded."""
    if not torch.is_grad_enabled():
        return
    for name, t in named.items():
        if t is not None and t.requires_grad:
            raise UnsupportedError(
                f"{name}: expected no requires_grad in FP8, through whose rounding no gradient flows; "
                "attention(q, k, v, precision='fp8') with q, k, v in 16 or 32 bits has gradients, "
                "and under torch.no_grad() none is asked for"
            )


def refuse_forward_mode(*tensors: torch.Tensor | None) -> None:
    """Raise UnsupportedError for a tensor with a tangent: torch would drop it without a word."""
    if forward_ad._current_level < 0 or torch.compiler.is_compiling():
        return
    for t in tensors:
        if t is not None and forward_ad.unpack_dual(t).tangent is not None:
            raise UnsupportedError(
                "onepass attention has no forward-mode derivative (torch.func.jvp, jacfwd): expected tensors without "
                "tangents; reverse mode (backward, torch.func.vjp) works"
            )


def check_partials(outs: Any, lses: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arguments of `onepass.merge_partials` as two lists of equal length; raises like `check_attention`."""
    pair = []
    for name, group in (("outs", outs), ("lses", lses)):
        if isinstance(group, torch.Tensor):
            check_tensor(name, group)
            if group.dim() == 0:
                raise ValueError(f"{name}: expected tensors stacked in dimension 0, got shape ()")
            group = list(group.unbind(0))
        if not isinstance(group, Sequence) or not group or not all(isinstance(t, torch.Tensor) for t in group):
            given = f"an empty {type(group).__name__}" if isinstance(group, Sequence) and not group else repr(group)
            raise TypeError(f"{name}: expected a non-empty sequence of tensors or one stacked tensor, got {given}")
        for i, t in enumerate(group):
            check_tensor(f"{name}[{i}]", t)
        pair.append(list(group))
    outs, lses = pair
    if len(outs) != len(lses):
        raise ValueError(f"lses: expected {len(outs)} tensors like outs, got {len(lses)}")
    out0 = outs[0]
    if out0.dim() not in (3, 4):
        raise ValueError(f"outs[0]: expected {DENSE_DIMS} or {PACKED_DIMS}, got {_shape(out0)}")
    expected_lse = (*out0.shape[:-3], out0.shape[-2], out0.shape[-3])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.dtype not in SUPPORTED_DTYPES or out.dtype != out0.dtype:
            raise TypeError(f"outs[{i}]: expected dtype {_short(out0.dtype)} like outs[0], got {_short(out.dtype)}")
        if lse.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"lses[{i}]: expected dtype float32 or float64, got {_short(lse.dtype)}")
        for name, t in (("outs", out), ("lses", lse)):
            if t.device != out0.device:
                raise ValueError(f"{name}[{i}]: expected device {out0.device} like outs[0], got {t.device}")
        if out.shape != out0.shape:
            raise ValueError(f"outs[{i}]: expected shape {_shape(out0)} like outs[0], got {_shape(out)}")
        if tuple(lse.shape) != expected_lse:
            raise ValueError(f"lses[{i}]: expected shape {expected_lse}, got {_shape(lse)}")
    return outs, lses


def read_offsets(name: str, cu_seqlens: torch.Tensor, total: int) -> list[int]:
    """Offsets of sequences into `total` tokens as a checked list. Raises: ValueError as `read_lengths`."""
    values = cu_seqlens.tolist()
    if values[0] != 0:
        raise ValueError(f"{name}: expected to start at 0, got {values[0]}")
    if any(b < a for a, b in itertools.pairwise(values)):
        raise ValueError(f"{name}: expected offsets that never decrease, got {values}")
    if values[-1] > total:
        raise ValueError(f"{name}: expected a last offset of at most {total} tokens, got {values[-1]}")
    return values


def read_lengths(
    problem: AttentionProblem,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
) -> tuple[list[int] | None, list[int] | None, list[int] | None]:
    """The three length tensors as checked lists, for a backend that works on the host.

    Raises: ValueError if offsets do not start at 0, decrease, or pass the end of the tensor, or if seqused_k is
    negative or larger than the sequence it belongs to.
    """
    offsets: list[list[int] | None] = []
    for name, cu_seqlens, total in (
        ("cu_seqlens_q", cu_seqlens_q, problem.seqlen_q),
        ("cu_seqlens_k", cu_seqlens_k, problem.seqlen_k),
    ):
        offsets.append(None if cu_seqlens is None else read_offsets(name, cu_seqlens, total))
    used = None if seqused_k is None else seqused_k.tolist()
    if used is not None:
        for i, n in enumerate(used):
            k_offsets = offsets[1]
            longest = problem.seqlen_k if k_offsets is None else k_offsets[i + 1] - k_offsets[i]
            if not 0 <= n <= longest:
                raise ValueError(f"seqused_k[{i}]: expected 0 to {longest}, the keys there are, got {n}")
    return offsets[0], offsets[1], used

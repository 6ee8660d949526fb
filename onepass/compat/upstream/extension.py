"""The functions of flash-attn's extension module `flash_attn_2_cuda`, which some libraries call by position.

They have the arguments of functions of Python in another order, and some by other names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import Parameter, Signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..flash_attn.kvcache import flash_attn_with_kvcache
from .flash_attn import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)


def _with_gradients(backward: Callable, **arguments: Any) -> tuple[Tensor, ...]:
    """dq, dk and dv, in new tensors where none are given, and softmax_d."""
    given = {f"d{t}": arguments[f"d{t}"] for t in "qkv"}
    buffers = {name: torch.empty_like(arguments[name[1:]]) if t is None else t for name, t in given.items()}
    return *buffers.values(), backward(**arguments | buffers)


def _over_cache(*, window_size_left: Any, window_size_right: Any, **arguments: Any) -> tuple[Tensor, Tensor]:
    sides = window_size_left, window_size_right
    return flash_attn_with_kvcache(**arguments, window_size=sides, return_softmax_lse=True)


_MASK = "is_causal window_size_left window_size_right softcap"
_LENGTHS = "max_seqlen_q max_seqlen_k p_dropout softmax_scale zero_tensors"
_RESULTS = "dout q k v out softmax_lse dq_ dk_ dv_"
# what computes each function, and the arguments in their order; gen_ and what follows it may be left out
_FUNCTIONS: dict[str, tuple[Callable, str]] = {
    "fwd": (
        _flash_attn_forward,
        f"q k v out_ alibi_slopes p_dropout softmax_scale {_MASK} return_softmax gen_",
    ),
    "varlen_fwd": (
        _flash_attn_varlen_forward,
        "q k v out_ cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes "
        f"{_LENGTHS} {_MASK} return_softmax gen_ num_splits",
    ),
    "bwd": (
        partial(_with_gradients, _flash_attn_backward),
        f"{_RESULTS} alibi_slopes p_dropout softmax_scale {_MASK} deterministic gen_ rng_state",
    ),
    "varlen_bwd": (
        partial(_with_gradients, _flash_attn_varlen_backward),
        f"{_RESULTS} cu_seqlens_q cu_seqlens_k alibi_slopes {_LENGTHS} {_MASK} deterministic gen_ rng_state",
    ),
    "fwd_kvcache": (
        _over_cache,
        "q kcache vcache k_ v_ seqlens_k_ rotary_cos_ rotary_sin_ cache_batch_idx_ leftpad_k_ block_table_ "
        f"alibi_slopes_ out_ softmax_scale {_MASK} is_rotary_interleaved num_splits",
    ),
}
# name of an argument -> its name in Python; other names only lose an underscore at their end
_NAMES = {
    "p_dropout": "dropout_p",
    "is_causal": "causal",
    "kcache": "k_cache",
    "vcache": "v_cache",
    "seqlens_k_": "cache_seqlens",
    "leftpad_k_": "cache_leftpad",
    "is_rotary_interleaved": "rotary_interleaved",
}


def _by_position(name: str, function: Callable, order: str) -> Callable:
    """A function of the module, whose arguments have these names and this order."""
    names = order.split()
    least = names.index("gen_") if "gen_" in names else len(names)
    others = {n: _NAMES.get(n, n.removesuffix("_")) for n in names if n not in ("out_", "gen_")}

    def call(*given: Any, **named: Any) -> list[Tensor]:
        count = len(given) + len(named)
        if not least <= count <= len(names):
            raise TypeError(f"{name}: expected {least} to {len(names)} arguments, got {count}")
        arguments = dict(zip(names, given, strict=False)) | named
        out_, generator = arguments.pop("out_", None), arguments.pop("gen_", None)
        if generator is not None:
            kind = type(generator).__name__
            raise RuntimeError(f"gen_: expected None, got {kind}: the `generator` argument is no longer supported")
        out, *rest = function(**{others[n]: value for n, value in arguments.items()})
        return [out if out_ is None else out_.copy_(out), *rest]

    defaults = [Parameter.empty] * least + [0 if n == "num_splits" else None for n in names[least:]]
    parameters = [
        Parameter(n, Parameter.POSITIONAL_OR_KEYWORD, default=d) for n, d in zip(names, defaults, strict=True)
    ]
    call.__name__, call.__signature__ = name, Signature(parameters)  # type: ignore[attr-defined]
    return call


flash_attn_gpu = SimpleNamespace(**{name: _by_position(name, *entry) for name, entry in _FUNCTIONS.items()})

"""Calls of `attention_decode` by the layers of a model, one after the other, which differ in q, k and v alone.

A layer's call takes 50 us on the host before it launches a kernel, most of which rediscovers that nothing changed.
A caller that knows that all other arguments equal those of the layer before can repeat that layer's call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..dispatch import choice
from ..dispatch.backends import Forward
from ..kernels.launch.decode import DecodeLaunch
from ..problem.decode import DecodeInputs
from . import decode, fast_path
from .attention import Window

# the number of a device's current stream; builds without CUDA do not have it
_current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

Run = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class RepeatableDecode:
    """A call of `attention_decode` that has run, and can be run again with other q, k_cache and v_cache.

    The object holds the other tensors of the call and the workspace of its kernels, so calls must follow each other on
    one stream.
    """

    def __init__(self, run: Run, kind: tuple):
        """Args: run: q, k_cache, v_cache -> (out, lse). kind: `_kind_of` the call's q, k_cache and v_cache."""
        self._run, self._kind = run, kind

    def again(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor | None:
        """out; None if this is a call of another kind, which `attention_decode` has to check."""
        if torch.compiler.is_compiling() or fast_path.is_observed() or _kind_of(q, k_cache, v_cache) != self._kind:
            return None
        return self._run(q, k_cache, v_cache)[0]


def repeatable_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    seqstart_k: Tensor | None,
    causal: bool,
    window: Window | None,
    softcap: float | None,
    softmax_scale: float | None,
) -> tuple[Tensor, RepeatableDecode | None]:
    """out of `attention_decode`, and the call if it can be repeated: None for the first call of a kind.

    Args: as for `attention_decode`.
    """
    if not torch.compiler.is_compiling():
        inputs = DecodeInputs(q, k_cache, v_cache, cache_seqlens)
        if seqstart_k is not None:
            inputs = inputs.with_modifiers((seqstart_k, *(None,) * 7))
        forward, _ = decode.find_kept(inputs, window, decode.KeyOptions(causal, softcap, softmax_scale))
        if forward is not None:
            run = _repeating(forward, inputs)
            return run(q, k_cache, v_cache)[0], RepeatableDecode(run, _kind_of(q, k_cache, v_cache))
    out = decode.attention_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cache_seqlens,
        seqstart_k=seqstart_k,
        causal=causal,
        window=window,
        softcap=softcap,
        softmax_scale=softmax_scale,
    )
    return out, None


def _repeating(forward: Forward, inputs: DecodeInputs) -> Run:
    """A run that repeats a call. Args: forward: the forward that the fast path keeps for the call with these inputs."""
    if isinstance(forward, DecodeLaunch):
        return forward.repeated(inputs)
    return lambda q, k_cache, v_cache: forward(inputs._replace(q=q, k_cache=k_cache, v_cache=v_cache))


def _kind_of(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple:
    """What has to be equal in calls that repeat each other."""
    is_recording = torch.is_grad_enabled() and (q.requires_grad or k_cache.requires_grad or v_cache.requires_grad)
    return (
        is_recording,
        choice.current_outside_compile(),
        _current_raw_stream(q.get_device()) if _current_raw_stream and q.is_cuda else None,
        (q.data_ptr() | k_cache.data_ptr() | v_cache.data_ptr()) % 16,
        *(part for t in (q, k_cache, v_cache) for part in (type(t), t.shape, t.stride(), t.dtype, t.device)),
    )

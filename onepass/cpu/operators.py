"""torch's C++ attention on a CPU, as functions of (batch, seqlen, num_heads, head_dim) tensors.

Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp of torch. The operators do not take empty tensors (they
divide by their sizes). Their masks are a triangle aligned at the top left, and a tensor that is added to scores; the
elements of a row must be contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..problem import AttentionProblem
from ..tiled.tile_sizes import float32_products_are_exact

# In 16 bits, with few columns and few keys, or keys of nearly equal weight, the values of many rows are rounded in the
# same direction: gradients of 64 rows are off in scale by up to 0.9 %. With 32 columns or more errors are independent.
MIN_HEAD_DIM_16BIT = 32

_NAME = "_scaled_dot_product_flash_attention_for_cpu"


def _kernel(name: str) -> Callable[..., Any]:
    """torch's own kernel, even after `torch_sdpa.activate` has put onepass in its place."""
    if not hasattr(torch.library, "get_kernel"):  # before torch 2.11, which `activate` needs
        return getattr(torch.ops.aten, name).default
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    return functools.partial(kernel.call_boxed, torch._C.DispatchKeySet(torch._C.DispatchKey.CPU))


_forward, _backward = _kernel(_NAME), _kernel(f"{_NAME}_backward")


def unsupported(problem: AttentionProblem) -> str | None:
    """Why torch's operators do not compute the problem; None if they do."""
    right = problem.mask.window_right
    refusals = {
        "expected no FP8": problem.quantization is not None or problem.has_e4m3_cache,
        "expected no softcap": problem.softcap is not None,
        "expected no dropout_p": problem.dropout_p > 0,
        "expected head_dim_v = head_dim": problem.head_dim != problem.head_dim_v,
        "expected results in the dtype of q, k and v": problem.float32_out or problem.float32_dkv,
    }
    if right is not None and right <= -problem.seqlen_k:
        refusals["expected a window with keys"] = True
    return next((text for text, applies in refusals.items() if applies), None)


def are_exact(problem: AttentionProblem) -> bool:
    """Whether torch's settings leave float32 operands as they are, see `work_dtype` of `tiled`."""
    return problem.dtype != torch.float32 or float32_products_are_exact("cpu")


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, num_heads_q, head_dim), and lse (batch, num_heads_q, seqlen_q).

    out is in q's memory order unless a mask keeps heads from being folded.

    Args:
        is_causal: query i sees key j if j <= i.
        mask: (batch or 1, num_heads_q or 1, seqlen_q or 1, seqlen_k or 1), added to scores.
    """
    shape, is_folded = q.shape, _can_fold(q, k, v, mask=mask)
    q, k, v = (_heads_second(t, is_folded) for t in (q, k, v))
    mask = mask.flatten(0, 1).unsqueeze(1) if mask is not None and is_folded else mask
    out, lse = _forward(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)
    return _heads_third(out, shape), lse.reshape(shape[0], shape[2], shape[1]).contiguous().data


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    is_causal: bool,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, in the memory order of q. lse is that of the whole row, and q, dout, out may be some of its rows."""
    tensors = dout, q, k, v, out
    is_folded = _can_fold(*tensors, mask=mask)
    mask = mask.flatten(0, 1).unsqueeze(1) if mask is not None and is_folded else mask
    lse = lse.flatten(0, 1).unsqueeze(1) if is_folded else lse
    gradients = _backward(
        *(_heads_second(t, is_folded) for t in tensors), lse, 0.0, is_causal, attn_mask=mask, scale=scale
    )
    dq, dk, dv = (_heads_third(g, t.shape) for g, t in zip(gradients, (q, k, v), strict=True))
    return dq, dk, dv


def is_finite(*tensors: Tensor) -> bool:
    """Whether no element is NaN or infinite; False, too, if their sum overflows."""
    return all(
        math.isfinite(float(t.sum(dtype=torch.float32) if t.dtype == torch.float16 else t.sum())) for t in tensors
    )


def are_regular(lse: Tensor) -> bool:
    """Whether every lse is finite and not 0.

    The operator gives 0 to a row whose scores are all -inf, or NaN among fewer keys than a vector register holds.
    """
    return math.isfinite(float((lse / lse).sum()))


def _can_fold(*tensors: Tensor, mask: Tensor | None) -> bool:
    """Whether heads can count as batch entries. A mask of heads that entries share would have to be copied.

    The operators write their results with heads inside seqlen, whatever the order of q. One head for each batch entry
    has one order only.
    """
    batch, _, num_heads, _ = tensors[0].shape
    if mask is not None and batch > 1 and mask.shape[:2] != (1, 1):
        return False
    return all(
        t.stride(1) < t.stride(2)
        and t.shape[2] == num_heads
        and (t.shape[0] == 1 or t.stride(0) == num_heads * t.stride(2))
        for t in tensors
    )


def _heads_second(t: Tensor, is_folded: bool) -> Tensor:
    """(batch, seqlen, num_heads, head_dim) -> (batch, num_heads, seqlen, head_dim), or (batch * num_heads, 1, ...)."""
    t = t.transpose(1, 2)
    if t.stride(-1) != 1 or t.stride(-2) < t.shape[-1]:
        t = t.contiguous()
    return t.flatten(0, 1).unsqueeze(1) if is_folded else t


def _heads_third(t: Tensor, shape: torch.Size) -> Tensor:
    """What `_heads_second` gave, as (batch, seqlen, num_heads, head_dim).

    It counts as no view (`.data`): a view that was made without a gradient must not be changed in place with one.
    """
    batch, seqlen, num_heads, head_dim = shape
    if t.shape[:2] != (batch, num_heads):
        t = t.view(batch, num_heads, seqlen, head_dim)
    return t.transpose(1, 2).data

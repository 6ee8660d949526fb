"""What the public and the private functions of flash-attn 4 share: options, and a forward with or without pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api.decode import autocast_rows
from ...errors import REFUSALS, renamed
from ...quantization.codec import E4M3
from ...validation import tensors
from ...validation.scalars import check_flag
from .. import calls, conventions
from ..cached import Cache, attend, lengths_of
from ..quantization import check_descales, score_descale
from ..sequences import Lengths

GATHER = "onepass does not gather keys by indices"
KERNEL_LANGUAGE = "it is code or data of another library's kernels"
# name of an argument in messages of onepass -> its name in flash-attn
_NAMES = {
    "window": "window_size",
    "sinks": "learnable_sink",
    "k_cache": "k",
    "v_cache": "v",
    "cache_seqlens": "seqused_k",
}


def opened(window: conventions.Window) -> conventions.Window:
    """The window for `onepass.attention`: None is unbounded, and so are two negative sides."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        return None, None
    return left, right


def options_of(
    softmax_scale: Any, causal: Any, window: conventions.Window, softcap: Any, learnable_sink: Tensor | None
) -> dict[str, Any]:
    """The scale, the mask and the sinks as arguments of `onepass.attention`."""
    return {
        "softmax_scale": softmax_scale,
        "causal": check_flag("causal", causal),
        "window": opened(window),
        "softcap": conventions.softcap_of(softcap),
        "sinks": learnable_sink,
    }


def refuse_foreign(**arguments: Any) -> None:
    """Refuse score_mod, mask_mod and block-sparse tensors. Arguments that only serve them are not refused."""
    conventions.refuse(KERNEL_LANGUAGE, **arguments)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    options: dict[str, Any],
    *,
    page_table: Tensor | None = None,
    descales: tuple[Any, Any, Any] = (None, None, None),
    num_splits: Any = 1,
    deterministic: Any = False,
    e4m3_lse: bool = True,
) -> tuple[Tensor, Any]:
    """out and lse in the shapes of the call. With a page_table, out and lse have no backward.

    Args: e4m3_lse: as for `calls.attend`.
    """
    if page_table is None:
        return calls.attend(q, k, v, lengths, options, descales, deterministic=deterministic, e4m3_lse=e4m3_lse)
    tensors.check_tensor("page_table", page_table, "an int32 torch.Tensor")
    conventions.refuse("keys in pages are not cut by offsets", cu_seqlens_k=lengths.cu_seqlens_k)
    if page_table.dim() != 2:
        raise ValueError(f"page_table: expected shape (batch, max_pages), got {tuple(page_table.shape)}")
    if lengths.cu_seqlens_q is not None:
        tensors.check_tensor("cu_seqlens_q", lengths.cu_seqlens_q, "an int32 torch.Tensor")
    rank = 4 if lengths.cu_seqlens_q is None else 3
    for name, t, count in (("q", q, rank), ("k", k, 4), ("v", v, 4)):
        if tensors.check_tensor(name, t).dim() != count:
            raise ValueError(f"{name}: expected {count} dimensions, got shape {tuple(t.shape)}")
    batch = page_table.shape[0]
    cache = Cache(k, v, page_table)
    if k.dtype == E4M3:
        check_descales(descales, batch, k)
        ones = torch.ones(batch, k.shape[-2], device=q.device)
        score, value = score_descale(descales), descales[2]
        cache = cache._replace(k_descale=ones if score is None else score, v_descale=ones if value is None else value)
    conventions.check_per_entry("seqused_k", lengths.seqused_k, batch, q.device)
    filled = lengths_of(lengths.seqused_k, batch, q.device, cache.capacity, 0, "seqused_k", "page_table")
    rows = q.bfloat16() if q.dtype == E4M3 else autocast_rows(k, q)[0]
    cut: dict[str, Any] = {"cu_seqlens_q": lengths.cu_seqlens_q, "seqused_q": lengths.seqused_q}
    try:
        if lengths.cu_seqlens_q is not None:
            meaning = "one more offset than rows of the page_table"
            tensors.check_int32("cu_seqlens_q", lengths.cu_seqlens_q, (batch + 1,), meaning, q.device)
            cut["max_seqlen_q"] = lengths.max_seqlen_q
        return attend(rows, cache, filled, num_splits=num_splits, **cut, **options)
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None


def returns_lse(return_lse: Any, *inputs: Any) -> bool:
    """Whether flash-attn 4 returns lse: where it is asked for, or an input requires a gradient."""
    return check_flag("return_lse", return_lse) or any(isinstance(t, Tensor) and t.requires_grad for t in inputs)

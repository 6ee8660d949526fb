"""What the public and the private functions of flash-attn 4 share: options, and a forward with or without pages."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...errors import REFUSALS, renamed
from ...validation import tensors
from ...validation.scalars import check_flag
from .. import calls, conventions
from ..over_cache import over_cache
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
    try:
        return over_cache(
            q,
            k,
            v,
            options=options,
            cache_seqlens=lengths.seqused_k,
            page_table=page_table,
            cu_seqlens_q=lengths.cu_seqlens_q,
            seqused_q=lengths.seqused_q,
            max_seqlen_q=lengths.max_seqlen_q,
            descales=descales,
            num_splits=num_splits,
        )
    except REFUSALS as error:
        raise renamed(error, _NAMES) from None


def returns_lse(return_lse: Any, *inputs: Any) -> bool:
    """Whether flash-attn 4 returns lse: where it is asked for, or an input requires a gradient."""
    return check_flag("return_lse", return_lse) or any(isinstance(t, Tensor) and t.requires_grad for t in inputs)

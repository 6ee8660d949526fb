"""flash-attn 2.8's autograd functions by their names, with `apply`, which takes its arguments by position.

Each `apply` calls the function with the same arguments. The classes are no subclasses of `torch.autograd.Function`, and
have neither `forward` nor `backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..flash_attn import functions


def maybe_contiguous(x: Tensor | None) -> Tensor | None:
    """x, or a contiguous copy where its last dimension has gaps."""
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def _applied(function: Callable) -> Any:
    """An `apply` that takes the arguments of a function, and then whether gradients are recorded."""

    def apply(*arguments: Any) -> Any:
        *given, is_grad_enabled = arguments
        with torch.set_grad_enabled(torch.is_grad_enabled() and bool(is_grad_enabled)):
            return function(*given)

    return staticmethod(apply)


class FlashAttnFunc:
    """`apply` has the arguments of `flash_attn_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_func)


class FlashAttnKVPackedFunc:
    """`apply` has the arguments of `flash_attn_kvpacked_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_kvpacked_func)


class FlashAttnQKVPackedFunc:
    """`apply` has the arguments of `flash_attn_qkvpacked_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_qkvpacked_func)


class FlashAttnVarlenFunc:
    """`apply` has the arguments of `flash_attn_varlen_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_varlen_func)


class FlashAttnVarlenKVPackedFunc:
    """`apply` has the arguments of `flash_attn_varlen_kvpacked_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_varlen_kvpacked_func)


class FlashAttnVarlenQKVPackedFunc:
    """`apply` has the arguments of `flash_attn_varlen_qkvpacked_func`, and whether gradients are recorded."""

    apply = _applied(functions.flash_attn_varlen_qkvpacked_func)

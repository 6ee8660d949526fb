"""The torch operator behind `merge_partials` where a kernel merges: onepass::merge_partials.

It has no gradient: `merge_partials` merges in plain PyTorch where one is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from ..dispatch import partials
from ..namespace import qualified
from ..tiled.merge import merge_in_torch
from . import attention

torch.library.define(
    qualified("merge_partials"), "(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)", tags=attention.TAGS
)


@torch.library.impl(qualified("merge_partials"), "default")
def _merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    if outs.device.type != "cuda":
        merged, lse = merge_in_torch(outs.unbind(0), lses.unbind(0))
        return merged.to(outs.dtype).contiguous(), lse.contiguous()
    return partials.load_merge(outs.device)(outs, lses)


@torch.library.register_fake(qualified("merge_partials"))
def _merge_fake(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])  # contiguous


torch.library.register_vmap(qualified("merge_partials"), attention.refuse_vmap)


def merges_in_one_kernel(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> bool:
    """Whether the merge kernel runs instead of `merge_in_torch`.

    It runs on a GPU, for calls that are neither traced nor mapped nor differentiated.
    """
    if outs[0].device.type != "cuda" or outs[0].dtype == torch.float64:
        return False
    if torch.compiler.is_compiling() or peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    if any(lse.dtype != torch.float32 for lse in lses) or not partials.has_merge_kernel(outs[0].device):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (*outs, *lses)))

"""Mask tensors as arguments of `onepass.attention`. No value is read from a device, only from the host's memory."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack

from .cache_update import is_on_host

# The ranges of keys that a mask leaves begin and end at multiples of this number. The mask itself is still applied, so
# nothing is lost, and a reduction over so many keys leaves little to look at.
RANGE_KEYS = 128

# The dtype of the bias that stands for a boolean mask; its values are 0 and -inf.
BOOLEAN_BIAS = torch.bfloat16

# A row of a mask that has no value above this one, but some value other than -inf, is lifted. Otherwise its scores are
# lost in the rounding of such numbers, and its lse, which the backward reads, does not tell how many keys share it.
LOWEST = -(2.0**14)


def four_dimensional(mask: Tensor, leading: torch.Size) -> Tensor:
    """A mask as (batch or 1, heads or 1, queries or 1, keys or 1): a view, except for some masks of many dimensions."""
    if not mask.requires_grad:
        # dimensions that were expanded shrink to 1 again, so that no copy is larger than the mask is in memory
        for dim, (size, stride) in enumerate(zip(mask.shape, mask.stride(), strict=True)):
            mask = mask.narrow(dim, 0, 1) if stride == 0 and size > 1 else mask
    rank = max(4, len(leading) + 2)
    mask = mask.reshape((1,) * (rank - mask.dim()) + mask.shape)
    if rank > 4:
        batch_shape = leading[:-1] if any(size != 1 for size in mask.shape[:-3]) else (1,) * (rank - 3)
        mask = mask.expand(*batch_shape, *mask.shape[-3:]).flatten(0, -4)
    return mask


def padding_arguments(mask: Tensor, batch: int, seqlen_q: int, is_aligned: bool) -> dict[str, Tensor] | None:
    """The arguments of `onepass.attention` for a padding mask, without a bias; None for any other mask.

    A padding mask is boolean, (batch or 1, 1, 1, seqlen_k), each of its rows is one run of True or has none, and its
    values can be read without waiting for a device.

    Args: is_aligned: whether the call has a causal mask or a window, which `seqused_k` would move.
    """
    if mask.dtype != torch.bool or mask.shape[1:3] != (1, 1) or mask.shape[-1] == 1:
        return None
    if not is_on_host(mask) or peek_interpreter_stack() is not None:
        return None
    row = mask[:, 0, 0]
    count, (first, after) = row.sum(-1), (x.byte().argmax(-1) for x in (row, row.flip(-1)))
    end = torch.where(count == 0, 0, row.shape[-1] - after)
    if not torch.equal(end - first, count):
        return None
    if first.any() or is_aligned:
        ranges = torch.stack((first, end), -1).int()
        return {"key_ranges": ranges[:, None, None].expand(-1, -1, seqlen_q, -1)}
    return {} if row.all() else {"seqused_k": end.int().expand(batch).contiguous()}


def mask_arguments(mask: Tensor, seqlen_q: int, seqlen_k: int) -> dict[str, Tensor]:
    """The arguments of `onepass.attention` for a mask of `four_dimensional`."""
    if mask.dtype == torch.bool:
        is_seen, zero = mask, torch.zeros((), dtype=BOOLEAN_BIAS, device=mask.device)
        bias = torch.where(mask, zero, zero - torch.inf)
    else:
        is_seen, bias = mask.detach() != -torch.inf, _lifted(mask)
    if mask.shape[-1] == 1:
        return {"bias": bias}
    return {"bias": bias, "key_ranges": _key_ranges(is_seen, seqlen_k).expand(-1, -1, seqlen_q, -1)}


def _lifted(mask: Tensor) -> Tensor:
    """The mask, with rows that have no value above `LOWEST` lifted to a largest value of 0: softmax does not change.

    Masks that hide keys by `torch.finfo(dtype).min` have such rows for queries that are to see nothing.
    """
    if 0 in mask.shape:
        return mask
    highest = mask.detach().amax(-1, keepdim=True)
    return mask - highest.masked_fill((highest >= LOWEST) | (highest == -torch.inf) | highest.isnan(), 0.0)


def _key_ranges(is_seen: Tensor, seqlen_k: int) -> Tensor:
    """(..., 2) int32: the range of blocks of `RANGE_KEYS` keys, from the first to the last of which a row sees a key.

    Args: is_seen: (..., seqlen_k) bool.
    """
    num_whole = seqlen_k // RANGE_KEYS
    whole, rest = is_seen.split((num_whole * RANGE_KEYS, seqlen_k - num_whole * RANGE_KEYS), -1)
    in_block = torch.cat((whole.unflatten(-1, (num_whole, RANGE_KEYS)).any(-1), rest.any(-1, keepdim=True)), -1)
    # a row that sees nothing has the numbers 0 and -1
    number = torch.arange(num_whole + 1, device=is_seen.device, dtype=torch.int32)
    last = torch.where(in_block, number, -1).amax(-1)
    first = torch.where(in_block, number, num_whole + 1).amin(-1).minimum(last + 1)
    return (torch.stack((first, last + 1), -1) * RANGE_KEYS).clamp(max=seqlen_k).to(torch.int32)

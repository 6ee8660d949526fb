"""The scales of an e4m3 cache: real value = stored value * descale, one descale for as many keys as the caller likes.

()                            one for the tensor
(num_heads_kv,)               one for each head
(batch, num_heads_kv)         one for each head of each batch entry, with pages, too
with kv_block = page_size     (num_pages, num_heads_kv): one for each head of each page
with kv_block, no pages       (batch, num_heads_kv, ceil(max_seqlen / kv_block)): for each block of keys of a head
"""

from __future__ import annotations

from torch import Tensor

from .decode import DecodeInputs

NAMES = ("k_descale", "v_descale")


def legal_shapes(inputs: DecodeInputs, kv_block: int | None) -> list[tuple[int, ...]]:
    """Those that a descale may have."""
    num_pages, size, heads = inputs.k_cache.shape[:3]
    shapes: list[tuple[int, ...]] = [(), (heads,)]
    if kv_block is None or inputs.page_table is None:
        shapes.append((inputs.batch, heads))
    if kv_block is not None:
        is_paged = inputs.page_table is not None
        shapes.append((num_pages, heads) if is_paged else (inputs.batch, heads, -(-size // kv_block)))
    return shapes


def is_by_block(descale: Tensor, kv_block: int | None, is_paged: bool) -> bool:
    """Whether it is the finest of its shapes: one for each block, or page."""
    return kv_block is not None and descale.dim() == (2 if is_paged else 3)


def descale_of_keys(descale: Tensor, inputs: DecodeInputs, kv_block: int | None, entry: Tensor, key: Tensor) -> Tensor:
    """The descales of keys by batch entry and position, integers of one shape: (.., num_heads_kv, 1), or what
    broadcasts to it."""
    if descale.dim() < 2:
        return descale.unsqueeze(-1)
    if not is_by_block(descale, kv_block, inputs.page_table is not None):
        return descale[entry].unsqueeze(-1)
    assert kv_block is not None
    block = key // kv_block
    if inputs.page_table is None:
        return descale.transpose(1, 2)[entry, block].unsqueeze(-1)
    return descale[inputs.page_table.long()[entry, block]].unsqueeze(-1)

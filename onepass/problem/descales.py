"""The descales of an e4m3 cache: real value = stored value * descale. The caller chooses which keys share a descale.

()                            one descale for the tensor
(num_heads_kv,)               one for each head
(batch, num_heads_kv)         one for each head of each batch entry, with or without pages
with kv_block = page_size     (num_pages, num_heads_kv): one for each head of each page
with kv_block, no pages       (batch, num_heads_kv, ceil(max_seqlen / kv_block)): one for each block of keys of a head
"""

from __future__ import annotations

from torch import Tensor

from .decode import DecodeInputs

NAMES = ("k_descale", "v_descale")


def legal_shapes(inputs: DecodeInputs, kv_block: int | None) -> list[tuple[int, ...]]:
    """The shapes that a descale may have."""
    num_pages, size, heads = inputs.k_cache.shape[:3]
    shapes: list[tuple[int, ...]] = [(), (heads,)]
    if kv_block is None or inputs.page_table is None:
        shapes.append((inputs.batch, heads))
    if kv_block is not None:
        is_paged = inputs.page_table is not None
        shapes.append((num_pages, heads) if is_paged else (inputs.batch, heads, -(-size // kv_block)))
    return shapes


def is_by_block(descale: Tensor, kv_block: int | None, is_paged: bool) -> bool:
    """Whether there is one descale for each block, or page, of a head."""
    return kv_block is not None and descale.dim() == (2 if is_paged else 3)


def descale_of_keys(descale: Tensor, inputs: DecodeInputs, kv_block: int | None, entry: Tensor, key: Tensor) -> Tensor:
    """The descales of the keys at (entry, key), in a shape that broadcasts to (.., num_heads_kv, 1).

    Args:
        entry, key: batch entries and positions, integers of one shape (..).
    """
    if descale.dim() < 2:
        return descale.unsqueeze(-1)
    if not is_by_block(descale, kv_block, inputs.page_table is not None):
        return descale[entry].unsqueeze(-1)
    assert kv_block is not None
    block = key // kv_block
    if inputs.page_table is None:
        return descale.transpose(1, 2)[entry, block].unsqueeze(-1)
    # a page that holds no key may be any number
    page = inputs.page_table.long()[entry, block].clamp(0, descale.shape[0] - 1)
    return descale[page].unsqueeze(-1)

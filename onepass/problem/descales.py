"""The scales of an e4m3 cache: real value = stored value * descale, one descale for as many keys as the caller likes.

()                            one for the tensor
(num_heads_kv,)               one for each head
(batch, num_heads_kv)         one for each head of each batch entry, with pages, too
with kv_block = page_size     (num_pages, num_heads_kv): one for each head of each page
with kv_block, no pages       (batch, num_heads_kv, ceil(max_seqlen / kv_block)): for each block of keys of a head
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..validation.attention import E4M3, check_tensor
from .decode import DecodeInputs

NAMES = ("k_descale", "v_descale")


def check_descales(inputs: DecodeInputs, kv_block: int | None) -> None:
    """Raises: TypeError or ValueError with what was expected and given; all but the descales has been checked."""
    descales = dict(zip(NAMES, (inputs.k_descale, inputs.v_descale), strict=True))
    if inputs.k_cache.dtype != E4M3:
        for name, value in (descales | {"kv_block": kv_block}).items():
            if value is not None:
                given = value if name == "kv_block" else type(value).__name__
                raise ValueError(f"{name}: expected None beside a cache of {inputs.k_cache.dtype}, got {given}")
        return
    _check_kv_block(inputs, kv_block)
    if all(descale is None for descale in descales.values()):
        if kv_block is not None:
            raise ValueError(f"kv_block: expected None without k_descale and v_descale, got {kv_block}")
        return
    for name, descale in descales.items():
        descale = check_tensor(name, descale, "a float32 torch.Tensor beside the other of both")
        if descale.dtype != torch.float32:
            raise TypeError(f"{name}: expected dtype float32, got {str(descale.dtype).removeprefix('torch.')}")
        if descale.device != inputs.q.device:
            raise ValueError(f"{name}: expected device {inputs.q.device} like q, got {descale.device}")
        shapes = _shapes(inputs, kv_block)
        if not any(_has_shape(descale, shape) for shape in shapes):
            expected = " or ".join(map(str, shapes))
            hint = ""
            if kv_block is None and inputs.page_table is not None:
                page_size, heads = inputs.k_cache.shape[1:3]
                hint = f", or {(inputs.k_cache.shape[0], heads)} with kv_block={page_size}, one for each page"
            elif kv_block is None and descale.dim() == 3:
                hint = ", or one for each block of keys with kv_block"
            raise ValueError(f"{name}: expected shape {expected}{hint}, got {tuple(descale.shape)}")


def _has_shape(t: Tensor, shape: tuple[int, ...]) -> bool:
    # number by number: of shapes that it does not know torch.compile finds none equal as a whole
    return t.dim() == len(shape) and all(a == b for a, b in zip(t.shape, shape, strict=True))


def _check_kv_block(inputs: DecodeInputs, kv_block: int | None) -> None:
    if kv_block is None:
        return
    page_size = inputs.k_cache.shape[1]
    if inputs.page_table is not None and kv_block != page_size:
        raise ValueError(f"kv_block: expected None or {page_size}, the keys of a page, got {kv_block}")


def _shapes(inputs: DecodeInputs, kv_block: int | None) -> list[tuple[int, ...]]:
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

"""Checks of the descales of an e4m3 cache."""

from __future__ import annotations

from torch import Tensor

from ..problem.decode import DecodeInputs
from ..problem.descales import NAMES, legal_shapes
from .tensors import E4M3, check_float32


def check_descales(inputs: DecodeInputs, kv_block: int | None) -> None:
    """Check k_descale, v_descale and kv_block; all other inputs have been checked."""
    descales = dict(zip(NAMES, (inputs.k_descale, inputs.v_descale), strict=True))
    if inputs.k_cache.dtype != E4M3:
        for name, value in (descales | {"kv_block": kv_block}).items():
            if value is not None:
                given = value if name == "kv_block" else type(value).__name__
                raise ValueError(f"{name}: expected None with a cache of {inputs.k_cache.dtype}, got {given}")
        return
    _check_kv_block(inputs, kv_block)
    if all(descale is None for descale in descales.values()):
        if kv_block is not None:
            raise ValueError(f"kv_block: expected None without k_descale and v_descale, got {kv_block}")
        return
    for name, descale in descales.items():
        expected = "a float32 torch.Tensor where the other of k_descale and v_descale is given"
        descale = check_float32(name, descale, inputs.q.device, expected)
        shapes = legal_shapes(inputs, kv_block)
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
    # compared size by size: torch.compile never finds whole shapes of unknown sizes equal
    return t.dim() == len(shape) and all(a == b for a, b in zip(t.shape, shape, strict=True))


def _check_kv_block(inputs: DecodeInputs, kv_block: int | None) -> None:
    if kv_block is None:
        return
    page_size = inputs.k_cache.shape[1]
    if inputs.page_table is not None and kv_block != page_size:
        raise ValueError(f"kv_block: expected None or {page_size}, the keys of a page, got {kv_block}")

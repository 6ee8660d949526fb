"""An e4m3 cache and its descales as kernels are given them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...problem.decode import DecodeInputs, DecodeProblem

KEYS_OF_A_DESCALE = (
    16  # what blocks and pages with descales of their own are multiples of, see blocks/softmax/cache_scales.py
)


def as_pairs(cache: Tensor, dtype: torch.dtype = torch.float16) -> Tensor:
    """An e4m3 cache as what copies take it for, pairs in 16 bits, half as many columns; others as they are.

    Raises: UnsupportedError where not every row begins with a pair.
    """
    if cache.dtype != torch.float8_e4m3fn:
        return cache
    if any(n % 2 for n in (cache.storage_offset(), *cache.stride()[:-1])):
        raise UnsupportedError(f"e4m3 cache: expected rows at even addresses, got strides {cache.stride()}")
    return cache.view(dtype)


def descale_arguments(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor | None, Tensor | None, int | None]:
    """k_descale, v_descale (batch or num_pages, num_heads_kv, blocks), by strides of 0 where some are one; kv_block."""
    if inputs.k_descale is None or inputs.v_descale is None:
        return None, None, None
    by_block, (outer, size, heads) = problem.kv_block is not None, inputs.k_cache.shape[:3]
    blocks = 1
    if not (by_block and problem.is_paged):
        outer, blocks = inputs.batch, ceil_div(size, problem.kv_block) if by_block else 1
    sizes = outer, heads, blocks
    # () -> (0, 0, 0); (heads,) -> (0, s, 0); two and three dimensions are the first ones
    k_descale, v_descale = (
        t.as_strided(sizes, (0, *t.stride(), 0) if t.dim() == 1 else (*t.stride(), 0, 0, 0)[:3])
        for t in (inputs.k_descale, inputs.v_descale)
    )
    return k_descale, v_descale, None if problem.is_paged else problem.kv_block

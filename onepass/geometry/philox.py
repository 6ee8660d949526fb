"""Random bits of dropout: Philox 4x32-10, a function of (seed, offset, batch, head, row, column) and of nothing else.

Each call of the generator gives 128 bits, a byte for each of 16 pairs of a row and a column:

    rows     2 r, 2 r + 1, 2 r + 8, 2 r + 9        of 16 rows
    columns  2 c, 2 c + 1, 2 c + 8, 2 c + 9        of 16 columns

A thread of a tensor-core GEMM holds half of these pairs in the accumulator of S, and half in that of its transpose.
A pair is kept if its byte is less than `keep_bytes(dropout_p)`.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the two words of the key after each round
MASK32 = 0xFFFFFFFF


def keep_bytes(dropout_p: float) -> int:
    """How many of the 256 values of a byte keep a pair, 1 to 256: the probability in multiples of 1 / 256, rounded."""
    return max(1, round(256 * (1.0 - dropout_p)))


def random_state(device: torch.device) -> Tensor:
    """(2,) int64: seed and offset, drawn on the device from torch's generator."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (2,), device=device)


def multiply_wide(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * b; b holds numbers below 2^32 in int64, and so do the results."""
    low_half, high_half = a * (b & 0xFFFF), a * (b >> 16)
    low = (low_half + ((high_half & 0xFFFF) << 16)) & MASK32
    high = (high_half + (low_half >> 16)) >> 16
    return high, low


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Four words of 32 random bits; all words are int64 tensors that broadcast, with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = multiply_wide(MULTIPLIERS[0], c0)
        high1, low1 = multiply_wide(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return [c0, c1, c2, c3]


def dropout_bytes(state: Tensor, instances: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The random byte of each pair, int64, in the shape to which the arguments broadcast.

    Args:
        state: (2,) int64: seed and offset.
        instances: batch entry * num_heads_q + query head.
        rows, columns: numbers of a query and of a key.
    """
    seed, offset = state.unbind()
    instances, rows, columns = (x.long() for x in (instances, rows, columns))
    column_group = (columns >> 4) * 4 + (columns % 8 >> 1)
    row_group = (rows >> 4) * 4 + (rows % 8 >> 1)
    counter = column_group & MASK32, row_group & MASK32, instances & MASK32, offset & MASK32
    key = seed & MASK32, (seed >> 32 & MASK32) ^ (offset >> 32 & MASK32)
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key)), -1)
    number = rows % 2 + 2 * (rows >> 3 & 1) + 4 * (columns % 2 + 2 * (columns >> 3 & 1))  # of the byte in 16
    shape = torch.broadcast_shapes(words.shape[:-1], number.shape)
    number = number.expand(shape)
    word = torch.gather(words.expand(*shape, 4), -1, (number >> 2).unsqueeze(-1)).squeeze(-1)
    return word >> 8 * (number & 3) & 0xFF


def kept_pairs(state: Tensor, dropout_p: float, instances: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Boolean: the pairs that dropout keeps; arguments as of `dropout_bytes`."""
    return dropout_bytes(state, instances, rows, columns) < keep_bytes(dropout_p)


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied with.

    It belongs to dropout_p as given, as in torch and in flash-attn, and not to the rounded probability, so the mean of
    the output is off by up to 1 / (512 (1 - dropout_p)) of it: 0.2 percent at 0.1.
    """
    return 1.0 / (1.0 - dropout_p)

"""Random bits of dropout: Philox 4x32-10, a function of (seed, offset, batch, head, row, column) and of nothing else.

Each call of the generator gives 128 bits, a byte for each of 16 pairs of a row and a column:

    rows     2 r, 2 r + 1, 2 r + 8, 2 r + 9        of 16 rows
    columns  2 c, 2 c + 1, 2 c + 8, 2 c + 9        of 16 columns

A thread of a tensor-core GEMM holds half of these pairs in the accumulator of S, and half in that of its transpose.
A pair is kept if its byte is less than `keep_bytes(dropout_p)`.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # added to the two words of the key after each round
MASK32 = 0xFFFFFFFF
# Counters computed at a time for each thread, in three buffers of 512 KiB; half as many take 1.4 times as long.
COUNTERS = 32 * 2**10


def keep_bytes(dropout_p: float) -> int:
    """How many of the 256 values of a byte keep a pair, 1 to 256: the probability in multiples of 1 / 256, rounded."""
    return max(1, round(256 * (1.0 - dropout_p)))


def random_state(device: torch.device) -> Tensor:
    """(2,) int64: seed and offset, drawn on the device from torch's generator."""
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (2,), device=device)


def multiply_wide(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a * b; b holds numbers below 2^32 in int64, and so do the results."""
    product = a * b  # modulo 2^64
    return product >> 32 & MASK32, product & MASK32


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Four words of 32 random bits; all words are int64 tensors that broadcast, with values below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        c0, c1, c2, c3 = one_round(c0, c1, c2, c3, k0, k1)
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return [c0, c1, c2, c3]


def one_round(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    high0, low0 = multiply_wide(MULTIPLIERS[0], c0)
    high1, low1 = multiply_wide(MULTIPLIERS[1], c2)
    return high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0


def key_of(state: Tensor) -> tuple[Tensor, Tensor]:
    seed, offset = state.unbind()
    return seed & MASK32, (seed >> 32 & MASK32) ^ (offset >> 32 & MASK32)


def dropout_bytes(state: Tensor, instances: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """The random byte of each pair, int64, in the shape to which the arguments broadcast.

    Args:
        state: (2,) int64: seed and offset.
        instances: batch entry * num_heads_q + query head.
        rows, columns: numbers of a query and of a key.
    """
    instances, rows, columns = (x.long() for x in (instances, rows, columns))
    column_group = (columns >> 4) * 4 + (columns % 8 >> 1)
    row_group = (rows >> 4) * 4 + (rows % 8 >> 1)
    counter = column_group & MASK32, row_group & MASK32, instances & MASK32, state[1] & MASK32
    words = torch.stack(torch.broadcast_tensors(*philox(counter, key_of(state))), -1)
    number = rows % 2 + 2 * (rows >> 3 & 1) + 4 * (columns % 2 + 2 * (columns >> 3 & 1))  # of the byte in 16
    shape = torch.broadcast_shapes(words.shape[:-1], number.shape)
    number = number.expand(shape)
    word = torch.gather(words.expand(*shape, 4), -1, (number >> 2).unsqueeze(-1)).squeeze(-1)
    return word >> 8 * (number & 3) & 0xFF


def kept_pairs(state: Tensor, dropout_p: float, instances: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Boolean: the pairs that dropout keeps; arguments as of `dropout_bytes`."""
    return dropout_bytes(state, instances, rows, columns) < keep_bytes(dropout_p)


def kept_tile(
    state: Tensor,
    dropout_p: float,
    instances: Tensor,
    rows: tuple[int, int],
    columns: tuple[int, int],
    dtype: torch.dtype,
    empty: Callable[..., Tensor],
) -> Tensor:
    """`kept_pairs` of neighboring rows and columns, (instances, rows, columns), as numbers 0 and 1.

    Args:
        instances: (instances,). rows, columns: half-open ranges.
        empty: (name, *shape) -> an uninitialized int64 tensor. The result is one of these.
    """
    row_blocks, column_blocks = (range(r[0] >> 4, (r[1] + 15) >> 4) for r in (rows, columns))
    row_groups, column_groups = (
        torch.arange(4 * blocks.start, 4 * blocks.stop, device=state.device) for blocks in (row_blocks, column_blocks)
    )
    num_rows, num_columns = len(row_groups), 4 * len(column_groups)
    count = len(instances) * 4 * num_rows * num_columns
    kept = empty("kept", count * dtype.itemsize // 8).view(dtype)
    kept = kept.view(len(instances), len(row_blocks), 2, 4, 2, num_columns)
    at_once = max(1, COUNTERS * torch.get_num_threads() // (num_rows * len(column_groups)))
    for some, target in zip(instances.split(at_once), kept.split(at_once), strict=True):
        words = _words(state, some, row_groups, column_groups, empty)
        shape = len(some), num_rows, num_columns
        packed = empty("packed", math.prod(shape) // 2).view(torch.int32).view(shape)
        by_word = packed.view(len(some), num_rows, len(column_blocks), 2, 4, 2)
        for number, word in enumerate(words):  # of columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9
            by_word[:, :, :, number >> 1, :, number & 1].copy_(word.view(len(some), num_rows, -1, 4))
        packed.view(torch.uint8).le_(keep_bytes(dropout_p) - 1)
        byte = empty("words", math.prod(shape) // 2).view(torch.int32).view(shape)
        for number in range(4):  # of rows 2 r, 2 r + 1, 2 r + 8, 2 r + 9
            torch.bitwise_right_shift(packed, 8 * number, out=byte).bitwise_and_(1)
            target[:, :, number >> 1, :, number & 1].copy_(byte.view(len(some), len(row_blocks), 4, -1))
    first_row, first_column = rows[0] & 15, columns[0] & 15
    tile = kept.view(len(instances), 4 * num_rows, num_columns)
    return tile[:, first_row : first_row + rows[1] - rows[0], first_column : first_column + columns[1] - columns[0]]


def _words(
    state: Tensor, instances: Tensor, row_groups: Tensor, column_groups: Tensor, empty: Callable[..., Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What `philox` returns for counters (instances, row groups, column groups), with other bits above the low 32.

    The first two rounds need few counters, because no word depends on all three indices before the second one. In the
    others c0 and c2 are halves of one tensor, so that both take one operation. A round swaps the halves.
    """
    weyl, multipliers = (torch.tensor(x, device=state.device) for x in (WEYL, MULTIPLIERS))
    keys = (torch.stack(key_of(state)) + torch.arange(ROUNDS, device=state.device)[:, None] * weyl) & MASK32
    c2, c1, c0 = instances[:, None, None], row_groups[:, None], column_groups
    c0, c1, c2, c3 = one_round(c0 & MASK32, c1 & MASK32, c2 & MASK32, state[1] & MASK32, *keys[0])
    c0, c1, c2, c3 = one_round(c0, c1, c2, c3, *keys[1])
    shape = 2, len(instances), len(row_groups), len(column_groups)
    words, products, before = (empty(name, *shape) for name in ("words", "products", "products before"))
    words[0], words[1] = c0, c2
    low: tuple[Tensor, Tensor] | Tensor = (c1, c3)  # the low halves of the last products, in the order of `products`
    orders = [
        (m.view(2, 1, 1, 1), k.view(-1, 2, 1, 1, 1))
        for m, k in ((multipliers, keys.flip(1)), (multipliers.flip(0), keys))
    ]
    for i in range(2, ROUNDS):
        own_multipliers, own_keys = orders[i % 2]
        torch.mul(words, own_multipliers, out=products)
        torch.bitwise_right_shift(products, 32, out=words)
        words[0].bitwise_xor_(low[1])
        words[1].bitwise_xor_(low[0])
        words.bitwise_xor_(own_keys[i]).bitwise_and_(MASK32)
        low = products
        products, before = before, products
    return words[0], low[0], words[1], low[1]


def keep_scale(dropout_p: float) -> float:
    """What a kept probability is multiplied with.

    It belongs to dropout_p as given, as in torch and in flash-attn, and not to the rounded probability, so the mean of
    the output is off by up to 1 / (512 (1 - dropout_p)) of it: 0.2 percent at 0.1.
    """
    return 1.0 / (1.0 - dropout_p)

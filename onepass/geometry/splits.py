"""Which keys each split of a split-KV forward handles, and how many splits there are: integer formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

from .block_range import KeyBlocks
from .integers import ceil_div, maximum, minimum, select

# The keys of a split are a multiple of this unit, which is a multiple of every tile_n that a split forward has.
SPLIT_UNIT = 64
MAX_SPLITS = 256
MAX_SPLITS_BY_SIZE = 65535  # splits of a given size: a grid has no more
# Every split has to be merged: with fewer keys than this in each, merging is a large share of the work.
LEAST_KEYS = 128
WORKSPACE_BYTES = 256 * 2**20
FEW_PARTIALS = 8  # partials of a row that the merge gives to one warp
# Estimates that `choose_num_splits` counts with.
OVERHEAD_STEPS = 1.5  # steps of a thread block besides those for its keys: the first loads, the end
MERGE_STEPS = 0.5  # steps for a thread block's partials: 16 rows of float32 written and read; a step has 64 of K and V
# On an H200 with one query of 32 heads over 131072 keys of 32 and 264 slots, 13 splits, whose second wave is 58 percent
# full, take 490 us, 12 splits (45 percent) 493, 8 (one wave) 474, and 16 (94 percent) 477 (h200-decode-splits.json).
LEAST_SHARE = 0.75
# Estimates for the Hopper kernel, whose thread blocks have a multiprocessor each and more to compute. On an H200 8
# splits take 110 us where 16, two waves, take 149, and 4 take 207 where 8 take 216 (h200-decode-rows-variants.json).
OVERHEAD_STEPS_SM90 = 4.0
LEAST_SHARE_SM90 = 1.0


class Splits(NamedTuple):
    """How a kernel's tiles are cut, see `blocks_of_split`."""

    num_splits: Any
    split_blocks: Any

    def for_sequence(self, num_splits: Any, is_split: Any) -> Splits:
        """The splits of one packed sequence.

        Args:
            num_splits: how many splits this sequence has.
            is_split: False if the sequence is left in one piece.
        """
        return Splits(num_splits, select(is_split, maximum(self.split_blocks, 0), 0))


# The value of split_blocks with which each packed sequence has as many splits as its length asks for, see
# `blocks_per_split`.
BY_LENGTH = -1
# Tiles of a thread block, if sequences are cut by their lengths: with equal splits, half of one is lost in the end.
SPLITS_PER_CTA = 4
LEAST_SPLIT_BLOCKS = 8  # blocks of 64 or 128 keys: besides its keys, a tile takes as long as 4 of them


def blocks_per_split(key_blocks: Any, num_heads: Any, num_ctas: Any) -> Any:
    """The key blocks of a split where sequences are cut by their lengths: SPLITS_PER_CTA splits for each thread block.

    Args: key_blocks: of all sequences together; each is read by num_heads tiles.
    """
    return maximum(ceil_div(key_blocks, maximum(num_ctas * SPLITS_PER_CTA // num_heads, 1)), LEAST_SPLIT_BLOCKS)


def blocks_of_split(tile: KeyBlocks, split: Any, num_splits: Any, split_blocks: Any) -> KeyBlocks:
    """The key blocks of a tile that belong to one of its splits: none (first == last) for some.

    Args:
        split_blocks: > 0: split s has the blocks from s * split_blocks on, wherever those of the tile begin, so that
            the bounds depend on nothing else; 0: the tile's own blocks are shared out evenly.
    """
    in_a_split = ceil_div(tile.last - tile.first, num_splits)
    is_fixed = split_blocks > 0
    start = select(is_fixed, split * split_blocks, tile.first + split * in_a_split)
    end = start + select(is_fixed, split_blocks, in_a_split)
    first = minimum(maximum(start, tile.first), tile.last)
    last = maximum(minimum(end, tile.last), first)
    clear_first, clear_last = (minimum(maximum(n, first), last) for n in (tile.clear_first, tile.clear_last))
    return KeyBlocks(first, clear_first, clear_last, last)


def visited_blocks(split: KeyBlocks, hidden: Any) -> KeyBlocks:
    """The blocks of a split for a kernel that visits at least one block.

    A split without blocks gets one after the last key, in which nothing is visible.

    Args: hidden: the number of that block.
    """
    is_empty = split.first == split.last
    first, clear_first, clear_last = (select(is_empty, hidden, n) for n in split[:3])
    return KeyBlocks(first, clear_first, clear_last, select(is_empty, hidden + 1, split.last))


def blocks_within(own: KeyBlocks, tile: KeyBlocks) -> KeyBlocks:
    """The blocks that some of a tile's rows visit in the tile's split, at least one.

    Args:
        own: the `key_blocks` of these rows, without regard to splits.
        tile: the `visited_blocks` of the tile's split.
    """
    last = minimum(maximum(own.last, tile.first + 1), tile.last)
    clear_first, clear_last = (minimum(maximum(n, tile.first), last) for n in (own.clear_first, own.clear_last))
    return KeyBlocks(tile.first, clear_first, clear_last, last)


def split_ranges(seqlen_k: int, num_splits: int, split_size: int | None) -> list[tuple[int, int]]:
    """The ranges of keys (start, end) of all splits that have any, for a backend that works on the host."""
    size = split_size or max(1, ceil_div(seqlen_k, num_splits))
    return [(start, min(start + size, seqlen_k)) for start in range(0, seqlen_k, size)]


def workspace_bytes(num_splits: int, rows: int, head_dim_v: int) -> int:
    """The bytes of float32 out and lse of every split. Args: rows: batch * seqlen_q * num_heads_q."""
    return 4 * num_splits * rows * (head_dim_v + 1)


def choose_num_splits(
    num_tiles: int,
    seqlen_k: int,
    slots: int,
    bytes_per_split: int,
    block_keys: int = 64,
    overhead_steps: float = OVERHEAD_STEPS,
    least_share: float = LEAST_SHARE,
) -> int:
    """The number of splits that should take the least time, with at least LEAST_KEYS keys each and in WORKSPACE_BYTES.

    Args:
        num_tiles: thread blocks without splits.
        seqlen_k: keys that a sequence may have.
        slots: thread blocks that the GPU runs at the same time.
        bytes_per_split: bytes of workspace.
        block_keys: keys of a step of a thread block.
        overhead_steps: steps of a thread block besides those for its keys.
        least_share: share of the slots, see below.

    The model: a thread block takes its steps and overhead_steps more, and each wave of `slots` thread blocks takes that
    time. After full waves, the thread blocks of the last wave have the whole memory bandwidth, so a smaller last wave
    takes less time, down to least_share of the slots: fewer thread blocks cannot use all of it. A merge reads once more
    what the splits write. The constants are guesses, those of Hopper after two measurements; the figures of
    docs/kernels/decode.md were measured with them.
    """
    num_tiles, blocks = max(1, num_tiles), ceil_div(max(1, seqlen_k), block_keys)
    most = max(1, min(MAX_SPLITS, seqlen_k // LEAST_KEYS, WORKSPACE_BYTES // max(1, bytes_per_split)))

    def steps(num_splits: int) -> float:
        full, rest = divmod(num_tiles * num_splits, slots)
        last = 1.0 if full == 0 else max(rest / slots, least_share) if rest else 0.0
        merge = MERGE_STEPS * num_tiles * num_splits / slots if num_splits > 1 else 0.0
        return (full + last) * (ceil_div(blocks, num_splits) + overhead_steps) + merge

    return min(range(1, most + 1), key=lambda n: (steps(n), n))

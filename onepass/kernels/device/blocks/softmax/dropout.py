"""Which elements of a block of scores dropout keeps: random bytes as geometry/philox.py defines them.

A call of the generator gives the bytes of a patch of 16 pairs; a thread has 8 of them and the lane 4 away the others:
rows 2 i and 2 i + 1 of an accumulator lie in these two lanes. Two neighboring patches therefore cost each of
the two lanes one call: it hands the bytes that it does not need to the other.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from .....geometry.integers import select
from .....geometry.tile_scheduler import LANES
from ....config import KEY_VECTORS
from ..memory.layouts import column_offset
from ..memory.ptx import PHILOX_ROUNDS, logical, permute_bytes, replicate_signs
from ..memory.untraced import Untraced

PATCH = 4  # columns of a thread in a patch: 0, 1, 8 and 9 of sixteen
OTHER_LANE = 4
# Half of what these rounds compute is the same in a whole tile; the keys of the others lie in shared memory.
FIRST_ROUNDS = PHILOX_ROUNDS - 4 * KEY_VECTORS // 2
HIGHEST_BITS = -0x7F7F7F80  # 0x80808080, of each byte the highest


def group_of(number) -> Int32:
    """Which of the groups of four rows (or columns) has this one: 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of sixteen."""
    return (number >> 4) * 4 + ((number & 7) >> 1)


def bit(number, i: int) -> Boolean:
    return (number >> i & 1) != 0


def flag_of(r: int, c: int, has_keys_in_rows: bool) -> tuple[int, int]:
    """The word, and the byte in it, with the flag of a thread's value in row r and column c of its block."""
    patch, c = divmod(c, PATCH)
    return (2 * patch + r, c) if has_keys_in_rows else (2 * patch + c // 2, r + 2 * (c % 2))


def flags_of(word: Int32, last: Int32) -> Int32:
    """A word whose bytes have their highest bit set where the byte of `word` is at most that of `last`."""
    lower = flags_of_lower_bits(word, last)
    return (last & (word ^ -1)) | ((last ^ word ^ -1) & lower)


def flags_of_lower_bits(word: Int32, last: Int32) -> Int32:
    """`flags_of` for bytes without their highest bits. Other bits of the result mean nothing."""
    return (last | HIGHEST_BITS) - (word & ~HIGHEST_BITS)


class KeptPairs:
    """Which elements of a block dropout keeps, while a kernel is traced.

    The block begins at a multiple of 16 in both directions, except for one of 8 columns. All lanes of the warp are
    here, and their blocks lie next to each other.

    Attributes:
        words: the flags, in the order of `flag_of`; only the highest bit of each byte means something.
    """

    def __init__(self, modifiers: Any, block: Any, columns: int):
        self.modifiers, self.block = modifiers, block
        # with positions, each query has calls of its own, and so have the heads of a group
        differs = modifiers.tensors.positions is not None or block.places[0] is not block.places[1]
        self.last = (modifiers.tensors.keep_bytes - 1) * 0x01010101  # the greatest byte that keeps a pair, four times
        self.words: list[Any] = []
        shared = 0 if differs else columns // (2 * PATCH) * (2 * PATCH)
        for c in range(0, shared, 2 * PATCH):
            self._fill_two(c)
        for c in range(shared, columns, PATCH):
            if differs or c + PATCH > columns:
                self._fill_single(c, min(PATCH, columns - c), differs)
            else:
                self._fill(c)

    def is_kept(self, r: int, c: int) -> Boolean:
        word, byte = flag_of(r, c, self.block.has_keys_in_rows)
        return bit(self.words[word], 8 * byte + 7)

    def _add(self, words: list) -> None:
        self.words += [flags_of(word, self.last) for word in words]

    # ---------------------------------------------------------------- two patches for two lanes

    def _fill_two(self, first: int) -> None:
        """The bytes of two patches: the even one of two lanes calls the generator for the first, the other one for the
        second."""
        is_odd = self._is_odd()
        mine, others = self._words(first, select(is_odd, Int32(PATCH), Int32(0)))
        got = [cute.arch.shuffle_sync_bfly(word, offset=OTHER_LANE) for word in others]
        self._add([select(is_odd, b, a) for a, b in zip(mine, got, strict=True)])
        self._add([select(is_odd, a, b) for a, b in zip(mine, got, strict=True)])

    def _fill(self, first: int) -> None:
        """The bytes of a patch, for which both lanes call the generator."""
        self._add(self._words(first, Int32(0))[0])

    def _is_odd(self) -> Boolean:
        """The thread's first row lies in a lane of this parity."""
        return bit(self.block.rows[0], 0)

    def _words(self, first: int, more_columns: Int32) -> tuple[list, list]:
        """The bytes of this lane's two rows, and those of the other lane's, from one call of the generator."""
        block, place, is_odd = self.block, self.block.places[0], self._is_odd()
        columns = group_of(block.first_column + column_offset(first)) + more_columns
        rows = group_of(block.rows[0])
        if block.has_keys_in_rows:
            return self._of_keys(self.modifiers.words(place, columns, rows), is_odd)
        return self._of_queries(self.modifiers.words(place, rows, columns), is_odd)

    def _of_queries(self, words: tuple, is_odd: Boolean) -> tuple[list, list]:
        """The bytes of this lane's two rows, which are queries, and those of the other lane's.

        A word is that of a column, in the order of the columns; two words become one, with two bytes of each.
        """
        even, odd = Int32(0x6420), Int32(0x7531)
        pairs = words[:2], words[2:]
        mine = [permute_bytes(*pair, select(is_odd, odd, even)) for pair in pairs]
        return mine, [permute_bytes(*pair, select(is_odd, even, odd)) for pair in pairs]

    def _of_keys(self, words: tuple, is_odd: Boolean) -> tuple[list, list]:
        """The words of this lane's two rows, which are keys, and those of the other lane's. Bytes are queries'."""
        pairs = words[:2], words[2:]
        return [select(is_odd, b, a) for a, b in pairs], [select(is_odd, a, b) for a, b in pairs]

    # ---------------------------------------------------------------- byte by byte

    def _fill_single(self, first: int, count: int, differs: bool) -> None:
        """The bytes of the columns first, .., one by one.

        Args: differs: whether the calls of queries differ; else the columns share them.
        """
        keys_in_rows = self.block.has_keys_in_rows
        found = self._of_key_rows(first, count, differs) if keys_in_rows else self._of_query_rows(first, count, differs)
        words = [Int32(0)] * (2 if keys_in_rows or count > 2 else 1)
        for (r, c), byte in found.items():
            word, place = flag_of(r, c, keys_in_rows)
            words[word] = words[word] | byte << 8 * place
        self._add(words)

    def _of_key_rows(self, first: int, count: int, differs: bool) -> dict:
        modifiers, place, keys = self.modifiers, self.block.places[0], self.block.rows
        rows = [modifiers.number(place, self.block.first_column + column_offset(first + i)) for i in range(count)]
        words = [modifiers.words(place, group_of(row), group_of(keys[0])) for row in (rows if differs else rows[:1])]
        found, is_odd = {}, bit(keys[0], 0)
        for i, row in enumerate(rows):
            call = words[i if differs else 0]
            for r in range(2):
                found[r, i] = self._byte(select(is_odd, call[2 * r + 1], call[2 * r]), row)
        return found

    def _of_query_rows(self, first: int, count: int, differs: bool) -> dict:
        block, modifiers = self.block, self.modifiers
        column = block.first_column + column_offset(first)
        rows = [modifiers.number(place, row) for place, row in zip(block.places, block.rows, strict=True)]
        calls = list(zip(block.places, rows, strict=True))[: 2 if differs else 1]
        words = [modifiers.words(place, group_of(row), group_of(column)) for place, row in calls]
        found = {}
        for r, row in enumerate(rows):
            call = words[r if differs else 0]
            for i in range(count):
                # which word follows from the column: 2 i, 2 i + 1, 2 i + 8, 2 i + 9
                word = call[i] if count == PATCH else select(bit(column, 3), call[2 + i], call[i])
                found[r, i] = self._byte(word, row)
        return found

    def _byte(self, word, row) -> Int32:
        return word >> 8 * ((row & 1) + 2 * (row >> 3 & 1)) & 255


class StagedFlags(Untraced):
    """The flags of a warp's block of S^T, in shared memory: drawn while its GEMM runs, and applied to P afterwards.

    Two neighboring patches cost each lane one call: the even one of two lanes calls the generator for the
    first patch, the odd one for the second. Each writes all of its call's flags, and reads those of its keys in both
    calls. So a draw needs no registers beyond it, and its writes keep it ahead of the wait for the GEMM.

    Args:
        sFlags: (4, LANES * calls + KEY_VECTORS) int32 of this warp.
        lane: of this thread.
    """

    def __init__(self, modifiers: Any, sFlags: cute.Tensor, lane: Int32):
        self.modifiers = modifiers
        self.calls = cute.size(sFlags, mode=[1]) // LANES
        self.is_odd = lane >> 2 & 1  # of the thread's first key, and of its lane among the two
        self.target = cute.domain_offset((0, lane), sFlags)
        self.source = cute.domain_offset((0, lane & ~OTHER_LANE), sFlags)
        self.keys = cute.domain_offset((0, self.calls * LANES), sFlags)
        words = [word for pair in modifiers.round_keys()[FIRST_ROUNDS:] for word in pair]
        for i, word in enumerate(words):
            self.keys[i % 4, i // 4] = word
        cute.arch.sync_warp()

    @cute.jit
    def draw(self, block: Any):
        """Write the flags of a block, whose rows are keys and begin at a multiple of 16 in each warp."""
        cute.arch.sync_warp()  # other lanes have read the flags of the block before
        last = (self.modifiers.tensors.keep_bytes - 1) * 0x01010101
        keys, queries = group_of(block.rows[0]), group_of(block.first_column) + PATCH * self.is_odd
        # read here, where no compiler moves them and what depends on them ahead of the turn that has just been passed
        round_keys = cute.make_rmem_tensor((4, KEY_VECTORS), Int32)
        for i in cutlass.range_constexpr(KEY_VECTORS):
            cute.autovec_copy(self.keys[None, i], round_keys[None, i])
        pairs = self.modifiers.round_keys()[:FIRST_ROUNDS]
        pairs += [(round_keys[2 * i], round_keys[2 * i + 1]) for i in range(cute.size(round_keys) // 2)]
        vector = cute.make_rmem_tensor((4,), Int32)
        for call in cutlass.range_constexpr(self.calls):
            words = self.modifiers.words(block.places[0], queries, keys, pairs)
            for i in cutlass.range_constexpr(4):
                # a thread reads the words of keys 2 i and 2 i + 8, or those of 2 i + 1 and 2 i + 9
                word = words[(0, 2, 1, 3)[i]]
                # `flags_of`, of which the compiler makes an instruction more
                vector[i] = logical(last, word, flags_of_lower_bits(word, last), 0xF0 & ~0xCC | ~(0xF0 ^ 0xCC) & 0xAA)
            cute.autovec_copy(vector, self.target[None, call * LANES])
            queries = queries + 2 * PATCH
        cute.arch.sync_warp()

    @cute.jit
    def apply(self, source: cute.Tensor, target: cute.Tensor):
        """target = source, or 0 where dropout does not keep a value.

        Args: source, target: pairs of 16-bit values of a thread, in the order of an accumulator: two columns of a row
            in a register.
        """
        words = cute.make_rmem_tensor((2,), Int32)  # of both keys
        for patch in cutlass.range_constexpr(cute.size(source) // PATCH):
            vector = cute.domain_offset((self.is_odd * 2, patch // 2 * LANES + patch % 2 * OTHER_LANE), self.source)
            cute.autovec_copy(cute.make_tensor(vector.iterator.align(8), cute.make_layout((2,))), words)
            for i in cutlass.range_constexpr(PATCH):
                r, half = i % 2, i // 2
                mask = replicate_signs(words[r], 2 * half, 2 * half + 1)
                target[PATCH * patch + i] = source[PATCH * patch + i] & mask


@cute.jit
def drop_packed(packed: cute.Tensor, flags: cute.Tensor):
    """Set the values to 0 that dropout does not keep.

    Args:
        packed: pairs of 16-bit values of a thread, in the order of an accumulator: two columns of a row in a register.
        flags: `KeptPairs.words`, of queries in rows.
    """
    for i in cutlass.range_constexpr(cute.size(packed)):
        (word, first), (_, second) = (flag_of(i % 2, 2 * (i // 2) + c, False) for c in range(2))
        packed[i] = packed[i] & replicate_signs(flags[word], first, second)

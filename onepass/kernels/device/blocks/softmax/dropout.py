"""Which elements of a block of scores dropout keeps: random bytes as geometry/philox.py defines them.

A call of the generator gives the bytes of a patch of 16 pairs, of which a thread has 8 and the lane 4 away the others:
rows 2 i and 2 i + 1 of an accumulator lie in these two lanes. Two patches that lie side by side therefore cost each of
the two lanes one call: it hands the bytes that it does not need to the other.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32

from .....geometry.integers import select
from ..memory.layouts import column_offset
from ..memory.ptx import permute_bytes

PATCH = 4  # columns of a thread in a patch: 0, 1, 8 and 9 of sixteen
OTHER_LANE = 4


def group_of(number) -> Int32:
    """Which of the groups of four rows (or columns) has this one: 2 i, 2 i + 1, 2 i + 8, 2 i + 9 of sixteen."""
    return (number >> 4) * 4 + ((number & 7) >> 1)


def bit(number, i: int) -> Boolean:
    return (number >> i & 1) != 0


class KeptPairs:
    """Which elements of a block dropout keeps, while a kernel is traced.

    The block begins at a multiple of 16 in both directions, except for one of 8 columns. All lanes of the warp are
    here, and their blocks lie side by side.
    """

    def __init__(self, modifiers: Any, block: Any, columns: int):
        self.modifiers, self.block = modifiers, block
        # with positions, each query has calls of its own, and so have the heads of a group
        differs = modifiers.tensors.positions is not None or block.places[0] is not block.places[1]
        # bytes of the elements, by (r, c)
        self.bytes: dict[tuple[int, int], Any] = {}
        shared = 0 if differs else columns // (2 * PATCH) * (2 * PATCH)
        for c in range(0, shared, 2 * PATCH):
            self._fill_two(c)
        for c in range(shared, columns, PATCH):
            self._fill(c, min(PATCH, columns - c), differs)

    def is_kept(self, r: int, c: int) -> Boolean:
        return self.bytes[r, c] < self.modifiers.tensors.keep_bytes

    # ---------------------------------------------------------------- two patches for two lanes

    def _fill_two(self, first: int) -> None:
        """The bytes of two patches: the even one of two lanes calls the generator for the first, the other one for the
        second."""
        block, place = self.block, self.block.places[0]
        # of the thread's first row, which lies in a lane of this parity
        is_odd = bit(block.rows[0], 0)
        columns = group_of(block.first_column + column_offset(first)) + select(is_odd, Int32(PATCH), Int32(0))
        rows = group_of(block.rows[0])
        if block.has_keys_in_rows:
            mine, others = self._of_keys(self.modifiers.words(place, columns, rows), is_odd)
        else:
            mine, others = self._of_queries(self.modifiers.words(place, rows, columns), is_odd)
        got = [cute.arch.shuffle_sync_bfly(word, offset=OTHER_LANE) for word in others]
        for i, word in enumerate(mine):
            for patch, found in enumerate((select(is_odd, got[i], word), select(is_odd, word, got[i]))):
                for j in range(4):
                    at = (i, j) if block.has_keys_in_rows else (j % 2, 2 * i + j // 2)
                    self.bytes[at[0], first + PATCH * patch + at[1]] = found >> 8 * j & 255

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

    # ---------------------------------------------------------------- a patch for one lane

    def _fill(self, first: int, count: int, differs: bool) -> None:
        """The bytes of the columns first, .., which share the generator's calls.

        Args: differs: whether the calls of queries differ.
        """
        block, modifiers, places = self.block, self.modifiers, self.block.places
        numbers = [block.first_column + column_offset(first + i) for i in range(count)]
        if block.has_keys_in_rows:
            keys, place = block.rows, places[0]
            rows = [modifiers.number(place, n) for n in numbers]
            calls = rows if differs else rows[:1]
            words = [modifiers.words(place, group_of(row), group_of(keys[0])) for row in calls]
            is_odd = bit(keys[0], 0)
            for i in range(count):
                found = words[i if differs else 0]
                for r in range(2):
                    word = select(is_odd, found[2 * r + 1], found[2 * r])
                    self.bytes[r, first + i] = self._byte(word, rows[i])
            return
        rows = [modifiers.number(place, row) for place, row in zip(places, block.rows, strict=True)]
        calls = list(zip(places, rows, strict=True))[: 2 if differs else 1]
        words = [modifiers.words(place, group_of(row), group_of(numbers[0])) for place, row in calls]
        for r in range(2):
            found = words[r if differs else 0]
            for i in range(count):
                # which word follows from the column: 2 i, 2 i + 1, 2 i + 8, 2 i + 9
                word = found[i]
                if count < PATCH:
                    word = select(bit(numbers[0], 3), found[2 + i], found[i])
                self.bytes[r, first + i] = self._byte(word, rows[r])

    def _byte(self, word, row) -> Int32:
        return word >> 8 * ((row & 1) + 2 * (row >> 3 & 1)) & 255

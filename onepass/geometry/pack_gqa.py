"""Query heads that share a kv head in one tile: its rows are (position, head in the group), position after position.

With few query rows (decoding, short prompts) a tile of one head is mostly empty, and each head of a group would read
the same K and V again. The 64 rows of a warpgroup hold 64 // group positions of all `group` heads; where group does not
divide 64, the last rows are unused. With group 1 all of this is the identity. Ampere's tiles are cut in the same way,
but as a whole.
"""

from __future__ import annotations

from typing import Any


def unpack_row(row_in_tile: Any, group: int, rows: int) -> tuple[Any, Any, Any]:
    """The position in the tile and the head in the group of a row of the tile, and whether the row is used.

    Args:
        rows: the number of rows that are packed together: the rows of a warpgroup (Hopper) or of a tile (Ampere).
    """
    positions = rows // group
    number, row = row_in_tile // rows, row_in_tile % rows
    return number * positions + row // group, row % group, row < positions * group

"""Views of tensors and of wgmma and mma register fragments that several kernels need."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind


def rows_first(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch): rows and columns of a tile first. No data moves."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, [1, 3, 2, 0]))


def partials_rows_first(t: cute.Tensor) -> cute.Tensor:
    """`rows_first` of partials: (splits, batch, seqlen, heads, dim) -> (seqlen, dim, heads, batch, splits)."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, [2, 4, 3, 1, 0]))


def by_m_tile(acc: cute.Tensor) -> list:
    """An accumulator ((2, 2), m_tiles, N) as m_tiles accumulators ((2, 2), 1, N)."""
    shape, stride = acc.layout.shape, acc.layout.stride
    if shape[1] == 1:
        return [acc]
    layout = cute.make_layout((shape[0], 1, shape[2]), stride=(stride[0], 0, stride[2]))
    return [cute.make_tensor(acc.iterator + i * stride[1], layout) for i in range(shape[1])]


def splits_as_batch(t: cute.Tensor) -> cute.Tensor:
    """(splits, batch, ..) -> (splits * batch, ..), for a workspace in which splits follow each other. No data moves."""
    layout = cute.make_layout((t.shape[0] * t.shape[1], *t.shape[2:]), stride=t.stride[1:])
    return cute.make_tensor(t.iterator, layout)


def dims_first(t: cute.Tensor) -> cute.Tensor:
    """(batch, heads, dim, seqlen) -> (dim, seqlen, heads, batch): V transposed. No data moves."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, [2, 3, 1, 0]))


def pack_heads(t: cute.Tensor, group: int) -> cute.Tensor:
    """(seqlen, dim, heads, batch) -> ((group, seqlen), dim, heads / group, batch). No data moves."""
    (seqlen, dim, heads, batch), stride = t.shape, t.stride
    shape = ((group, seqlen), dim, heads // group, batch)
    return cute.make_tensor(
        t.iterator, cute.make_layout(shape, stride=((stride[2], stride[0]), stride[1], group * stride[2], stride[3]))
    )


def first_rows(tiles: cute.Layout, rows: int) -> cute.Layout:
    """The first rows of each of the tiles (rows, columns, count) of shared memory, which stay where they are."""
    if cute.size(tiles, mode=[0]) == rows:
        return tiles
    # rows of a tile are equally spaced: one mode of any length describes them
    spacing = cute.coalesce(cute.make_layout(tiles.shape[0], stride=tiles.stride[0])).stride
    return cute.make_layout((rows, *tiles.shape[1:]), stride=(spacing, *tiles.stride[1:]))


def row_boxes(tiles: cute.Layout, rows: int) -> cute.Layout:
    """Tiles (rows of all boxes, columns, count) of shared memory as boxes (rows, columns, box in its tile, count)."""
    spacing = cute.coalesce(cute.make_layout(tiles.shape[0], stride=tiles.stride[0])).stride
    num_boxes = cute.size(tiles, mode=[0]) // rows
    (_, columns, count), (_, along_columns, along_count) = tiles.shape, tiles.stride
    return cute.make_layout(
        (rows, columns, num_boxes, count), stride=(spacing, along_columns, rows * spacing, along_count)
    )


def one_tile(tiles: cute.ComposedLayout, rows: int) -> cute.ComposedLayout:
    """The first rows of one of the tiles that `smem_tiles` makes: what a TMA load fills."""
    layout = first_rows(tiles.outer, rows)
    # cut before it is swizzled: slicing the composed layout aborts the compiler if 8 does not divide rows
    layout = cute.make_layout(layout.shape[:2], stride=layout.stride[:2])
    return cute.make_composed_layout(tiles.inner, tiles.offset, layout)


def rows_first_of_lse(lse: cute.Tensor) -> cute.Tensor:
    """(batch, heads, seqlen) -> (seqlen, 1, heads, batch): the modes of `rows_first`. No data moves."""
    (batch, heads, seqlen), stride = lse.shape, lse.stride
    return cute.make_tensor(
        lse.iterator, cute.make_layout((seqlen, 1, heads, batch), stride=(stride[2], 0, *stride[1::-1]))
    )


def partials_rows_first_of_lse(lse: cute.Tensor) -> cute.Tensor:
    """(splits, batch, heads, seqlen) -> (seqlen, 1, heads, batch, splits). No data moves."""
    (splits, batch, heads, seqlen), stride = lse.shape, lse.stride
    return cute.make_tensor(
        lse.iterator, cute.make_layout((seqlen, 1, heads, batch, splits), stride=(stride[3], 0, *stride[2::-1]))
    )


def as_batch_of_one(t: cute.Tensor) -> cute.Tensor:
    """(...) -> (1, ...), for packed sequences. No data moves."""
    return cute.make_tensor(t.iterator, cute.make_layout((1, *t.shape), stride=(0, *t.stride)))


def at_head(t: cute.Tensor, m: cute.Tensor, head, origin, is_packed: bool, along: int = 0) -> cute.Tensor:
    """A head of t (.., head, batch), which is m (seqlen, dim, head, batch) or cut into tiles from it.

    Args:
        origin: batch entry; for packed sequences, whose batch is 1, the row of m to start from.
        along: the mode of m that is the sequence.
    """
    if not is_packed:
        return t[None, None, head, origin]
    t = t[None, None, head, 0]
    start = (0, origin) if isinstance(m.shape[0], tuple) else origin  # a tuple: from `pack_heads`
    offset = (start, 0, 0, 0) if along == 0 else (0, start, 0, 0)
    moved = cute.domain_offset(offset, cute.make_tensor(t.iterator, m.layout))
    return cute.make_tensor(moved.iterator, t.layout)


def swizzle_kind(columns: int, dtype: type[cutlass.Numeric], part: int | None = None) -> SmemLayoutAtomKind:
    """The widest swizzle whose atom (128, 64 or 32 bytes of a row) divides a row of `columns` elements.

    Args: part: elements of a row of which a GEMM reads one or several: they are whole atoms, or whole parts of an atom.
    """
    row_bytes, part_bytes = (n * dtype.width // 8 for n in (columns, part or columns))
    for width, kind in ((128, SmemLayoutAtomKind.K_SW128), (64, SmemLayoutAtomKind.K_SW64)):
        if row_bytes % width == 0 and (part_bytes % width == 0 or width % part_bytes == 0):
            return kind
    return SmemLayoutAtomKind.K_SW32


def smem_tiles(
    rows: int, columns: int, count: int, dtype: type[cutlass.Numeric], part: int | None = None
) -> cute.ComposedLayout:
    """`count` swizzled tiles (rows, columns), each row contiguous: what TMA writes and wgmma reads.

    Args: part: columns that a GEMM reads by themselves, see `swizzle_kind`.
    """
    atom = warpgroup.make_smem_layout_atom(swizzle_kind(columns, dtype, part), dtype)
    return cute.tile_to_shape(atom, (rows, columns, count), order=(0, 1, 2))


def transposed(tiles: cute.Tensor) -> cute.Tensor:
    """(rows, columns, count) -> (columns, rows, count) of the same bytes: V as the B operand of P V."""
    rows, columns, count = (cute.size(tiles, mode=[i]) for i in range(3))
    return cute.composition(tiles, cute.make_ordered_layout((columns, rows, count), order=(1, 0, 2)))


def rows_and_columns(acc: cute.Tensor) -> cute.Tensor:
    """A wgmma accumulator ((2, 2, V), M, N) as (row, column): thread-local rows 0 and 1 lie 8 apart in the tile."""
    shape, stride = acc.layout.shape, acc.layout.stride
    more_shape, more_stride = (shape[0][2:], stride[0][2:]) if len(shape[0]) > 2 else ((), ())
    layout = cute.make_layout(
        ((shape[0][1], shape[1]), (shape[0][0], *more_shape, shape[2])),
        stride=((stride[0][1], stride[1]), (stride[0][0], *more_stride, stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a(acc: cute.Tensor) -> cute.Tensor:
    """16-bit values in accumulator order ((2, 2, V), M, N) as register operand A ((2, 2, 2), M, (V / 2, N)).

    The same registers: one k = 16 step of the next wgmma is two 8-column blocks of the accumulator.
    """
    divided = cute.logical_divide(acc.layout, ((None, None, 2), None, None))
    shape, stride = divided.shape, divided.stride
    layout = cute.make_layout(
        ((shape[0][0], shape[0][1], shape[0][2][0]), shape[1], (shape[0][2][1], shape[2])),
        stride=((stride[0][0], stride[0][1], stride[0][2][0]), stride[1], (stride[0][2][1], stride[2])),
    )
    return cute.make_tensor(acc.iterator, layout)


def as_operand_a_of_mma(acc: cute.Tensor) -> cute.Tensor:
    """`as_operand_a` for the accumulator ((2, 2), M, N) of a warp's mma: ((2, 2, 2), M, N / 2)."""
    divided = cute.logical_divide(acc.layout, (None, None, 2))
    shape, stride = divided.shape, divided.stride
    layout = cute.make_layout(
        ((*shape[0], shape[2][0]), shape[1], shape[2][1]),
        stride=((*stride[0], stride[2][0]), stride[1], stride[2][1]),
    )
    return cute.make_tensor(acc.iterator, layout)


def column_offset(c: int) -> int:
    """Column of a thread's c-th value of a row, counted from the thread's first column, 2 * (lane % 4)."""
    return 8 * (c // 2) + c % 2

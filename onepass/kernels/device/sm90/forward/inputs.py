"""What a consumer of the Hopper forward is given: pipelines, GEMMs, tensors, and which of the threads it is."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from ....config import ROWS_PER_WARPGROUP
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax import cache_scales, scaled
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.softmax.online import ScoreFactors
from ...blocks.softmax.sinks import Sinks
from ...blocks.tiles.paged import Pages
from .tile import WARPGROUP, Pipes


class Mmas(NamedTuple):
    """The GEMMs of one warpgroup, each with 64 queries as rows of its result."""

    qk: cute.TiledMma  # S = Q K^T
    pv: cute.TiledMma  # O += P V, P from registers


class Buffers(NamedTuple):
    """Tiles in shared memory that the GEMMs read: (rows, columns, buffers); of float32 two halves for each buffer."""

    q: cute.Tensor
    k: cute.Tensor
    v: cute.Tensor  # FP8: (columns, rows, buffers)


class Inputs(NamedTuple):
    """What a consumer reads and writes in addition to `Buffers`.

    Attributes:
        descales: of FP8 and of float32 in halves, or of an e4m3 cache.
        all_splits: for packed queries in splits, how many there are, and the rows from one split to the next.
    """

    pipes: Pipes
    mmas: Mmas
    factors: ScoreFactors
    mO: cute.Tensor
    mLSE: cute.Tensor
    sinks: Sinks | None
    sources: SourceTensors | None  # what a repair reads: 16 bits with hidden pairs, and float32
    descales: scaled.DescaleTensors | cache_scales.DescaleTensors | None
    pages: Pages | None
    all_splits: tuple | None
    modifiers: Modifiers | None


class Thread(NamedTuple):
    """A thread of the consumers.

    Attributes:
        number: its number in its warpgroup.
        lane_in_quad: its number among four neighbors.
        wg: the number of its warpgroup among the consumers.
        row: the first of its two rows of a tile; the second one lies 8 below.
    """

    number: Int32
    lane_in_quad: Int32
    wg: Int32
    row: Int32


def this_thread(first: int) -> Thread:
    """Args: first: the number of the first warpgroup of consumers."""
    number = cute.arch.thread_idx()[0] % WARPGROUP
    wg = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // WARPGROUP - first)
    return Thread(number, number % 4, wg, wg * ROWS_PER_WARPGROUP + number // 32 * 16 + number % 32 // 4)

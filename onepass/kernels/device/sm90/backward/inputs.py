"""What a consumer of the Hopper backward is given: pipelines, GEMMs, tensors, and which of the threads it is."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline

from .....geometry.tile_scheduler import LANES
from ...blocks.repair.rows import SourceTensors
from ...blocks.softmax.modifiers import Modifiers
from ...blocks.softmax.online import ScoreFactors
from ...blocks.tiles.dq_sums import Accumulator
from ..forward.tile import WARPGROUP, WARPS
from .turns import TurnBarriers


class BackwardPipes(NamedTuple):
    """The circular buffers in shared memory."""

    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync
    q: pipeline.PipelineTmaAsync
    do: pipeline.PipelineTmaAsync


class Mmas(NamedTuple):
    """The GEMMs of one warpgroup: each has 64 keys (dq: 64 queries) as rows of its result."""

    s: cute.TiledMma  # S^T = K Q^T
    dp: cute.TiledMma  # dP^T = V dO^T
    dv: cute.TiledMma  # dV += P^T dO, P from registers
    dk: cute.TiledMma  # dK += dS^T Q, dS from registers
    dq: cute.TiledMma  # dQ = dS K, over all keys of the thread block


class Buffers(NamedTuple):
    """Shared memory of the consumers, and barriers of what they send each other.

    Attributes:
        k, v: (64, columns, row blocks), the keys that this thread block has of a tile.
        q, do: (tile_m, columns, buffers).
        ds: (tile_m, 64, buffers * row blocks): queries in rows; the row blocks of keys of a buffer follow each other.
            With by_queries each warpgroup has buffers of its own, one after the other.
        stats: (STAT_ROWS * tile_m, buffers) float32, -lse * log2(e) and -delta of the rows of q.
        flags: of dropout, see StagedFlags.
        p, p_full: see `wide.Exchange`.
        peer_k, inbox, ds_empty: in pairs only, see paired.py.
    """

    k: cute.Tensor
    v: cute.Tensor
    q: cute.Tensor
    do: cute.Tensor
    ds: cute.Tensor
    stats: cute.Tensor
    ds_full: cute.Pointer
    flags: cute.Tensor | None = None
    p: cute.Tensor | None = None
    p_full: cute.Pointer | None = None
    peer_k: cute.Tensor | None = None
    inbox: cute.Tensor | None = None
    ds_empty: cute.Pointer | None = None


class Inputs(NamedTuple):
    """What a consumer reads and writes in addition to `Buffers`."""

    pipes: BackwardPipes
    mmas: Mmas
    softmax_scale: Float32
    factors: ScoreFactors
    accumulator: Accumulator
    mdK: cute.Tensor
    mdV: cute.Tensor
    mdQ: cute.Tensor | None  # with private_dq
    sources: SourceTensors | None  # what a repair reads, if pairs may be hidden
    modifiers: Modifiers | None
    turns: TurnBarriers | None  # if tiles add to dQ in turns


class Thread(NamedTuple):
    """A thread of the consumers.

    Attributes:
        number: its number in its warpgroup.
        lane, lane_in_quad: its number in its warp, and among four neighbors.
        wg, warp: the numbers of its warpgroup and of its warp among those of all consumers.
        row: the first of its two rows of an accumulator of 64 rows; the second one lies 8 below.
    """

    number: Int32
    lane: Int32
    lane_in_quad: Int32
    wg: Int32
    warp: Int32
    row: Int32


def this_thread() -> Thread:
    thread = cute.arch.thread_idx()[0]
    number = thread % WARPGROUP
    lane = number % LANES
    wg = cute.arch.make_warp_uniform(thread // WARPGROUP - 1)
    warp = cute.arch.make_warp_uniform(thread // LANES - WARPS)
    return Thread(number, lane, number % 4, wg, warp, number // LANES * 16 + lane // 4)

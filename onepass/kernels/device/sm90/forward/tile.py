"""What all roles of the Hopper forward share: a tile, the circular buffers and their states, a warpgroup's size."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, pipeline

from .....geometry.block_range import KeyBlocks
from ...blocks.softmax.mask import Geometry

WARPGROUP = 128  # threads
WARPS = 4  # warps of a warpgroup


class Tile(NamedTuple):
    """A tile of query rows and the key blocks it visits."""

    m_block: Int32
    head: Int32
    origin_q: Int32  # batch entry; for packed sequences the first row
    origin_k: Int32  # batch entry; for packed keys the first row (a cache has batch entries)
    geometry: Geometry
    # key blocks, visited from last - 1 down to first; those from clear_first to clear_last need no mask (KeyBlocks)
    first: Int32
    clear_first: Int32
    clear_last: Int32
    last: Int32
    sequence: Int32 | None  # the packed sequence, where scales or modifiers need it
    origin_out: Int32  # origin_q in out and lse, where each split has an entry or rows of its own
    num_splits: Int32 | None  # with splits of packed sequences: how many this sequence has

    @property
    def blocks(self) -> KeyBlocks:
        return KeyBlocks(self.first, self.clear_first, self.clear_last, self.last)

    def with_blocks(self, blocks: KeyBlocks) -> Tile:
        return self._replace(**blocks._asdict())


class Loads(NamedTuple):
    """For each tensor that TMA loads its atom, and its coordinates (seqlen, head_dim or head_dim_v, heads, batch)."""

    q: tuple[cute.CopyAtom, cute.Tensor]
    k: tuple[cute.CopyAtom, cute.Tensor]
    v: tuple[cute.CopyAtom, cute.Tensor]


class Pipes(NamedTuple):
    """The circular buffers in shared memory."""

    q: pipeline.PipelineTmaAsync
    k: pipeline.PipelineTmaAsync
    v: pipeline.PipelineTmaAsync


def after(state: pipeline.PipelineState) -> pipeline.PipelineState:
    """The state of the buffer after this state's; the state itself stays as it is."""
    following = state.clone()
    following.advance()
    return following

"""The producer of the Hopper forward: TMA loads of Q, K and V into circular buffers, and the warp that issues them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from .....geometry.integers import select
from .....problem import V_KEYS
from ...blocks.memory.layouts import row_boxes
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.paged import BoxLocations
from ...blocks.tiles.queue import DRAW_AHEAD
from .tile import Loads

SIGNS, NO_TILE = -0x7F7F7F80, 1  # the sign bits of four e4m3 numbers, 0x80808080; another number


class Producer(Untraced):
    """Loads of the tiles of one thread block.

    Every load waits until its buffer is empty, then fills it; the caller advances the state.
    """

    def __init__(self, kernel, loads: Loads, buffers: tuple, pipes, pages, notes=None, descales=None, modifiers=None):
        """Args:
        buffers: of Q, K and V as they are loaded.
        notes: (stages,) int32 in shared memory for the warps that convert an e4m3 cache: `SIGNS` where these warps are
            to change the sign of a tile of K, else 0; `NO_TILE` after the last tile.
        descales: those of an e4m3 cache.
        """
        self.kernel, self.pipes, self.notes, self.descales, self.modifiers = kernel, pipes, notes, descales, modifiers
        (self.tma_q, self.mQ), (self.tma_k, self.mK), (self.tma_v, self.mV) = loads
        (sQ, sK, sV), rows, clusters = buffers, kernel.buffer_n, kernel.cluster_size
        self.tQgQ, self.tQsQ = self._partition(loads.q, kernel.loaded_rows(sQ), kernel.q_rows, kernel.head_dim, 1)
        if kernel.is_paged:
            self.tKgK, self.tKsK = self._partition_pages(loads.k, sK, kernel.head_dim)
            self.tVgV, self.tVsV = self._partition_pages(loads.v, sV, kernel.head_dim_v)
            self.everyone = None
            self.boxes = BoxLocations(pages, self.mK.shape[3], kernel.box_rows, rows // kernel.box_rows)
            return
        self.tKgK, self.tKsK = self._partition(loads.k, sK, rows, kernel.head_dim, clusters)
        if kernel.loads_keys_last:  # V transposed: (head_dim_v, seqlen, ..)
            self.tVgV, self.tVsV = self._partition(loads.v, sV, kernel.head_dim_v, rows, clusters, along=1)
        else:
            self.tVgV, self.tVsV = self._partition(loads.v, sV, rows, kernel.head_dim_v, clusters)
        self.everyone = None if clusters == 1 else cutlass.Int16(2**clusters - 1)

    def _partition(self, load: tuple, s, rows: int, columns: int, cluster_size: int, along: int = 0):
        """Both ends of a TMA copy.

        They are (tile bytes, block, head, batch) in global memory, a list with a tensor for each float16 half (one
        tensor without halves), and (tile bytes, buffer) in shared memory. With a cluster, they cover this thread
        block's share of the tile.

        Args: load: a field of `Loads`. along: the mode of its tensor that is cut into blocks.
        """
        tma_atom, m = load
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if cluster_size > 1 else 0
        sources, buffers = [], None
        for half in range(self.kernel.num_halves):
            g = cute.local_tile(m, (rows, columns), (None, half, None, None) if along == 0 else (0, None, None, None))
            buffers, source = cpasync.tma_partition(
                tma_atom, rank, cute.make_layout(cluster_size), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
            )
            sources.append(source)
        return sources, buffers

    def _partition_pages(self, load: tuple, s, columns: int):
        """Both ends of a TMA copy of a box.

        They are (box bytes, box, head, page) in global memory and (box bytes, box, buffer) in shared memory.

        Args: load: a field of `Loads`, whose tensor is (page_size, .., pages).
        """
        tma_atom, m = load
        rows = self.kernel.box_rows
        boxes = cute.make_tensor(s.iterator, row_boxes(s.layout, rows))
        g = cute.local_tile(m, (rows, columns), (None, 0, None, None))
        buffers, source = cpasync.tma_partition(
            tma_atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 2), cute.group_modes(g, 0, 2)
        )
        return source, buffers

    @cute.jit
    def run(self, queue, schedule, seqlens):
        """One warp issues every load of all tiles, in the order in which consumers need them.

        The first K and the Q of a tile come before the last V of the tile before it: consumers start on the next tile
        together with that V.
        """
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Producer)
        score_buffers = self.kernel.score_buffers
        wave, number = Int32(0), queue.index
        # the V block that is still to be loaded
        v_block, v_head, v_origin = Int32(0), Int32(0), Int32(0)
        while number < schedule.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            head_kv = self.head_kv(tile)
            n_block = tile.last - 1
            signs = self.signs_of_keys(tile, head_kv)
            for buffer in cutlass.range_constexpr(score_buffers - 1, -1, -1):
                self.look_up(tile, n_block)
                self.note(k_state, signs)
                block = self.key_block(tile, n_block) * score_buffers + buffer
                self.load_k(head_kv, tile.origin_k, block, k_state)
                k_state.advance()
                if cutlass.const_expr(buffer == score_buffers - 1):
                    self.load_q(tile, wave)
                if wave > 0:
                    self.load_v(v_head, v_origin, v_block * score_buffers + buffer, v_state)
                    v_state.advance()

            num_blocks = tile.last - 1 - tile.first
            if num_blocks < DRAW_AHEAD:
                queue.want_next()
            for i in cutlass.range(num_blocks, unroll=1):
                if i == num_blocks - DRAW_AHEAD:
                    queue.want_next()
                for buffer in cutlass.range_constexpr(score_buffers - 1, -1, -1):
                    self.look_up(tile, n_block - 1 - i)
                    self.note(k_state, signs)
                    block = self.key_block(tile, n_block - 1 - i) * score_buffers + buffer
                    self.load_k(head_kv, tile.origin_k, block, k_state)
                    k_state.advance()
                    block_before = self.key_block(tile, n_block - i) * score_buffers + buffer
                    self.load_v(head_kv, self.origin_v(tile), block_before, v_state)
                    v_state.advance()
            v_block, v_head, v_origin = self.key_block(tile, tile.first), head_kv, self.origin_v(tile)
            wave += 1
            number = queue.take(wave)
        if cutlass.const_expr(self.kernel.is_paged):
            self.boxes.keep()
        for buffer in cutlass.range_constexpr(score_buffers - 1, -1, -1):
            self.load_v(v_head, v_origin, v_block * score_buffers + buffer, v_state)
            v_state.advance()
        if cutlass.const_expr(self.notes is not None):
            self.note(k_state, Int32(NO_TILE))
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.pipes.k.producer_get_barrier(k_state))
        else:
            # shared memory must outlive the consumers' last arrivals
            self.pipes.k.producer_tail(k_state)
            self.pipes.v.producer_tail(v_state)

    # ---------------------------------------------------------------- notes for warps that convert

    def signs_of_keys(self, tile, head_kv: Int32) -> Int32 | None:
        """`SIGNS` if K's descale of the tile's head is negative, else 0."""
        if self.notes is None:
            return None
        if self.descales is None:
            return Int32(0)
        return select(self.descales.k[tile.origin_k, head_kv, 0] < 0.0, Int32(SIGNS), Int32(0))

    @cute.jit
    def note(self, k_state, word: Int32 | None):
        """Leave a note for who reads the buffer of K that is filled next. The arrival of its load publishes it."""
        if cutlass.const_expr(self.notes is not None):
            self.pipes.k.sync_object_empty.wait(k_state.index, k_state.phase)
            with cute.arch.elect_one():
                self.notes[k_state.index] = word

    # ---------------------------------------------------------------- single loads, by one warp

    def key_block(self, tile, n_block: Int32) -> Int32:
        return self.kernel.key_block(tile, n_block, self.modifiers)

    def head_kv(self, tile) -> Int32:
        return tile.head // self.kernel.tile_heads_per_kvhead

    def origin_v(self, tile) -> Int32:
        """The origin of V, which is tile.origin_k but for packed sequences whose keys come last."""
        if tile.sequence is None or not self.kernel.loads_keys_last:
            return tile.origin_k
        return (tile.origin_k // V_KEYS + tile.sequence) * V_KEYS

    @cute.jit
    def load_q(self, tile, wave: Int32):
        """Load Q of a tile, the thread block's wave-th one, for each consumer warpgroup."""
        sources = [self.kernel.at_head(t, self.mQ, tile.head, tile.origin_q) for t in self.tQgQ]
        for w in cutlass.range_constexpr(self.kernel.num_warpgroups):
            state = as_producer(self.kernel.q_state(w, wave))
            block = tile.m_block * self.kernel.num_warpgroups + w
            self._load(self.pipes.q, state, self.tma_q, [t[None, block] for t in sources], self.tQsQ, None)

    @cute.jit
    def look_up(self, tile, block: Int32):
        """With pages, find where K of this block lies before it is loaded."""
        if cutlass.const_expr(self.kernel.is_paged):
            self.boxes.look_up(tile.origin_k, block, tile.geometry.seqlen_k)

    @cute.jit
    def load_k(self, head_kv: Int32, origin: Int32, block: Int32, state):
        if cutlass.const_expr(self.kernel.is_paged):
            self._load_boxes(self.pipes.k, state, self.tma_k, self.tKgK, self.tKsK, head_kv, self.boxes.k_boxes)
        else:
            sources = self._keys_at_head(self.tKgK, self.mK, head_kv, origin)
            self._load(self.pipes.k, state, self.tma_k, [t[None, block] for t in sources], self.tKsK, self.everyone)

    @cute.jit
    def load_v(self, head_kv: Int32, origin: Int32, block: Int32, state):
        if cutlass.const_expr(self.kernel.is_paged):
            self._load_boxes(self.pipes.v, state, self.tma_v, self.tVgV, self.tVsV, head_kv, self.boxes.v_boxes)
        else:
            sources = self._keys_at_head(self.tVgV, self.mV, head_kv, origin, 1 if self.kernel.loads_keys_last else 0)
            self._load(self.pipes.v, state, self.tma_v, [t[None, block] for t in sources], self.tVsV, self.everyone)

    def _keys_at_head(self, sources: list, m: cute.Tensor, head, origin, along: int = 0) -> list:
        return [self.kernel.keys_at_head(source, m, head, origin, along) for source in sources]

    @cute.jit
    def _load_boxes(self, pipe, state, tma_atom, source, buffers, head_kv: Int32, locations):
        """Load the boxes of a block, each from its page."""
        pipe.producer_acquire(state)
        for number in cutlass.range_constexpr(self.boxes.count):
            page, box = self.boxes.box(locations, number)
            cute.copy(
                tma_atom,
                source[None, box, head_kv, page],
                buffers[None, number, state.index],
                tma_bar_ptr=pipe.producer_get_barrier(state),
            )

    @cute.jit
    def _load(self, pipe, state, tma_atom, sources: list, buffers, receivers: cutlass.Constexpr):
        """Load a block: one tile, or two float16 halves into neighboring buffers whose bytes one barrier counts."""
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for half in cutlass.range_constexpr(len(sources)):
            source, buffer = sources[half], buffers[None, len(sources) * state.index + half]
            if cutlass.const_expr(receivers is None):
                cute.copy(tma_atom, source, buffer, tma_bar_ptr=barrier)
            else:
                cute.copy(tma_atom, source, buffer, tma_bar_ptr=barrier, mcast_mask=receivers)


def as_producer(state: pipeline.PipelineState) -> pipeline.PipelineState:
    """The producer's state for a consumer's buffer and phase.

    A producer waits for the opposite phase, because all buffers start empty.
    """
    return pipeline.PipelineState(state.stages, state.count, state.index, state.phase ^ 1)

"""The producer of the Hopper backward: one warp that loads K, V, Q and dO into shared memory by TMA."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, pipeline
from cutlass.cute.nvgpu import cpasync

from ....config import ROWS_PER_WARPGROUP
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.queue import DRAW_AHEAD
from .paired import PEER_PIECES, first_piece_of_peer


class BackwardProducer(Untraced):
    """Loads of the tiles of one thread block. Each waits until its buffer is empty, then fills it."""

    def __init__(self, kernel, k, v, q, do, peer_k, sStats, accumulator, pipes, background):
        """Args: k, v, q, do, peer_k: TMA atom, global tensor of coordinates, shared tensor; peer_k only in pairs."""
        self.kernel, self.accumulator, self.pipes = kernel, accumulator, pipes
        self.sStats, self.background = sStats, background
        rows_k, rows_q, clusters = ROWS_PER_WARPGROUP, kernel.tile_m, kernel.cluster_size
        self.rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster()) if clusters > 1 else 0
        self.everyone = None if clusters == 1 else cutlass.Int16(2**clusters - 1)
        self.k = self._partition(*k, rows_k, kernel.head_dim)
        self.v = self._partition(*v, rows_k, kernel.head_dim_v)
        self.q = self._partition(*q, rows_q, kernel.head_dim, clusters)
        self.do = self._partition(*do, rows_q, kernel.head_dim_v, clusters)
        self.peer_k = None if peer_k is None else self._partition(*peer_k, rows_k, kernel.dq_columns, column=None)

    def _partition(self, tma_atom, m, s, rows: int, columns: int, clusters: int = 1, column: int | None = 0):
        """What `_load` needs: the atom, m, and both ends of a copy.

        The ends are (tile bytes, block, head, batch) in global memory and (tile bytes, buffer) in shared memory; with
        clusters this thread block's share of each, and where `column` is None (tile bytes, block, column block, ...).
        """
        g = cute.local_tile(m, (rows, columns), (None, column, None, None))
        rank, ranks = (self.rank if clusters > 1 else 0), cute.make_layout(clusters)
        ts, tg = cpasync.tma_partition(tma_atom, rank, ranks, cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2))
        return tma_atom, m, tg, ts

    @cute.jit
    def run(self, queue, schedule, seqlens):
        """One warp issues every load of all tiles, in the order in which consumers need them."""
        kv_state, q_state, do_state = self.kernel.buffer_states(pipeline.PipelineUserType.Producer)
        wave, number = Int32(0), queue.start()
        while number < schedule.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = (tile.last - tile.first) * self.kernel.group
            head, m_block = self.kernel.first_visit(tile)
            if num_steps > 0:
                self._load_kv(self.pipes.k, self.k, tile, kv_state)
                if cutlass.const_expr(self.peer_k is not None):
                    self._load_peer_k(tile, kv_state)
                if cutlass.const_expr(self.background is not None):
                    # consumers add to dQ after they have seen Q arrive, and so after this
                    self.background.wait_for_rows(tile.origin_q, tile.head_kv)
                self._load_q(tile, head, m_block, q_state)
                q_state.advance()
                self._load_kv(self.pipes.v, self.v, tile, kv_state)
                kv_state.advance()
            if num_steps < DRAW_AHEAD:
                queue.want_next()
            for i in cutlass.range(num_steps, unroll=1):
                if i == num_steps - DRAW_AHEAD:
                    queue.want_next()
                block = self.kernel.query_block(tile, m_block)
                self._load(self.pipes.do, do_state, self.do, head, tile.origin_q, block, do_state.index)
                do_state.advance()
                head, m_block = self.kernel.next_visit(tile, head, m_block)
                if i < num_steps - 1:
                    self._load_q(tile, head, m_block, q_state)
                    q_state.advance()
            wave += 1
            number = queue.take(wave)
        # shared memory must outlive the consumers' last arrivals
        for pipe, state in (
            (self.pipes.k, kv_state),
            (self.pipes.v, kv_state),
            (self.pipes.q, q_state),
            (self.pipes.do, do_state),
        ):
            pipe.producer_tail(state.clone())

    @cute.jit
    def _load_kv(self, pipe, what, tile, state):
        """Load the tile's rows of K or V, in tiles of 64."""
        atom, m, tg, ts = what
        source = self.kernel.at_head(tg, m, tile.head_kv, tile.origin_k)
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        for w in cutlass.range_constexpr(self.kernel.row_blocks):
            block = self._key_block(tile, self.rank) * self.kernel.row_blocks + w
            cute.copy(atom, source[None, block], ts[None, w], tma_bar_ptr=barrier)

    def _key_block(self, tile, rank: Int32 | int) -> Int32:
        """The number of a thread block's keys among those of all thread blocks."""
        return tile.n_block if self.kernel.cluster_size == 1 else tile.n_block * self.kernel.cluster_size + rank

    @cute.jit
    def _load_peer_k(self, tile, state):
        """Load the other thread block's K, in the columns of dQ that this one adds to; K's barrier counts them."""
        atom, m, tg, ts = self.peer_k
        barrier, block = self.pipes.k.producer_get_barrier(state), self._key_block(tile, self.rank ^ 1)
        first = first_piece_of_peer(self.rank, self.kernel.num_pieces)
        for i in cutlass.range_constexpr(PEER_PIECES):
            source = self.kernel.at_head(tg[None, None, first + i, None, None], m, tile.head_kv, tile.origin_k)
            cute.copy(atom, source[None, block], ts[None, i], tma_bar_ptr=barrier)

    @cute.jit
    def _load_q(self, tile, head: Int32, m_block: Int32, state):
        """Load Q, and lse and delta of its rows."""
        m_block = self.kernel.query_block(tile, m_block)
        self._load(self.pipes.q, state, self.q, head, tile.origin_q, m_block, state.index)
        number = self.kernel.m_block_number(self.accumulator, tile, head, m_block)
        bulk = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Float32)
        with cute.arch.elect_one():
            cute.copy(
                bulk,
                self.accumulator.stats[number, None],
                self.sStats[None, state.index],
                mbar_ptr=self.pipes.q.producer_get_barrier(state),
            )

    @cute.jit
    def _load(self, pipe, state, what, head: Int32, origin: Int32, block: Int32, buffer: Int32):
        """Load one tile. Args: what: a result of `_partition`."""
        atom, m, tg, ts = what
        source = self.kernel.at_head(tg, m, head, origin)
        pipe.producer_acquire(state)
        barrier = pipe.producer_get_barrier(state)
        cute.copy(atom, source[None, block], ts[None, buffer], tma_bar_ptr=barrier, mcast_mask=self.everyone)

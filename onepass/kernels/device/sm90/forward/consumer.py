"""A consumer warpgroup of the Hopper forward: 64 query rows through the key blocks of each tile.

What runs during what, in one warpgroup (S = QK^T of a block, O += PV of the block before; time goes right):

    Algorithm 1   [S ] softmax [PV] [S ] softmax [PV]          overlap_gemm_softmax=False
    2 stages      [S,PV] softmax [S,PV] softmax                PV during the softmax; S is waited for
    3 stages      [S,PV]  [S,PV]  [S,PV]                       a block in two halves with an accumulator each: while
                  softmax softmax softmax                      the softmax of one half runs, the S of the other does,
                                                               too, and nothing is waited for

The first S of the next tile is issued with the last PV of this one (overlap_tiles), so the tensor cores do not drain
between tiles; finished rows are stored from registers meanwhile.

Source: FlashAttention-3, arXiv:2407.08608: Algorithm 1, Algorithm 2 (2 stages), appendix B.3 (3 stages; there with a
third buffer for P, here with halves of a block, which need fewer registers).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from .....geometry.block_range import KeyBlocks, blocks_of_rows, key_blocks
from .....geometry.integers import maximum, minimum
from .....geometry.splits import blocks_within
from .....geometry.tile_scheduler import LANES
from .producer import as_producer
from .tile import Tile, after
from .warpgroup import Warpgroup


@cute.jit
def is_full(pipe: pipeline.PipelineTmaAsync, state) -> Boolean:
    """Whether the buffer after this state's is full, without waiting."""
    following = after(state)
    return cute.arch.mbarrier_test_wait(pipe.producer_get_barrier(following), following.phase)


class Consumer(Warpgroup):
    """What a warpgroup does with each tile.

    Buffer states are advanced in the loops of `two_stages` and `three_stages`: an update in a callee would not be
    carried around them.
    """

    # ---------------------------------------------------------------- through all tiles of the thread block

    @cute.jit
    def two_stages(self, queue, schedule, seqlens):
        """Algorithm 1 or 2: one accumulator of scores."""
        config = self.config
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        tile, skipped, unused = self.own_blocks(self.kernel.tile_at(number, schedule, seqlens))
        self.turns.begin()
        if cutlass.const_expr(config.overlap_tiles):
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.k, k_state)
                k_state.advance()
            self.first_scores(tile, k_state, self.q_state(wave))
            k_state.advance()
        while number < queue.num_tiles:
            if cutlass.const_expr(not config.overlap_tiles):
                for _ in cutlass.range(skipped, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                self.load_first(tile, wave, k_state, v_state)
                self.first_scores(tile, k_state, self.q_state(wave))
                k_state.advance()
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.v, v_state)
                v_state.advance()
                # every warpgroup takes one turn a block
                self.turns.wait()
                self.turns.pass_on()
            self.acc_o.fill(0.0)
            self.clear_garbage(tile, v_state)

            # the keys, last block first: cut by the right edge of the mask, clear, cut by its left edge
            n_block = tile.last - 1
            ready = (Boolean(False), Boolean(False))
            clear_last, clear_first = minimum(tile.clear_last, n_block), minimum(tile.clear_first, n_block)
            if cutlass.const_expr(self.cut_sides[1]):
                for _ in cutlass.range(n_block - clear_last, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()
            n_clear = clear_last - clear_first if cutlass.const_expr(self.cut_sides[0]) else n_block - tile.first
            for _ in cutlass.range(n_clear, unroll=1):
                n_block -= 1
                ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(self.cut_sides[0]):
                for _ in cutlass.range(n_block - tile.first, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()

            if cutlass.const_expr(self.kernel.skips_first):
                # P V of the last block that is visited comes by itself, and P = 0 is left for V of the tile's first
                # block. The others are released unread in the order of their loads: K before V of the block after it.
                if unused > 0:
                    self.last_pv(v_state)
                    v_state.advance()
                    for rP in self.rP:
                        rP.fill(0.0)
                    self.skip_key_block(k_state)
                    k_state.advance()
                    for _ in cutlass.range(unused - 1, unroll=1):
                        self.skip_key_block(k_state)
                        k_state.advance()
                        self.skip(self.pipes.v, v_state)
                        v_state.advance()
            elif cutlass.const_expr(self.kernel.skips_unused):
                # in the order of their loads: K of a block comes before V of the block visited before it
                for _ in cutlass.range(unused, unroll=1):
                    self.turns.wait()
                    self.turns.pass_on()
                    self.skip(self.pipes.v, v_state)
                    v_state.advance()
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
            number = queue.take(wave + 1)
            queue.want_next()
            next_tile, skipped, unused = self.own_blocks(self.kernel.tile_at(number, schedule, seqlens))
            self.keep_done()
            if cutlass.const_expr(config.overlap_tiles):
                for _ in cutlass.range(skipped if number < queue.num_tiles else 0, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                if number < queue.num_tiles:
                    self.step_to_next_tile(tile, next_tile, k_state, v_state, self.q_state(wave + 1))
                else:
                    self.last_pv(v_state)
                    if cutlass.const_expr(not config.overlap_gemm_softmax):
                        self.store(tile)
                k_state.advance()
            else:
                self.last_pv(v_state)
            if cutlass.const_expr(config.overlap_gemm_softmax or not config.overlap_tiles):
                self.store(tile)
            v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def three_stages(self, queue, schedule, seqlens):
        """Appendix B.3: a block of keys in two halves, the upper one (1) first, each with its accumulator.

        At the start of each half step the scores of one half are there, and P holds the half before it.
        """
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        tile = self.kernel.tile_at(number, schedule, seqlens)
        self.turns.begin()
        self.load_q(self.q_state(wave))
        self.issue_qk(1, k_state, self.q_state(wave))
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        k_state.advance()
        self.issue_qk(0, k_state, self.q_state(wave))
        self.first_half(tile, k_state, self.q_state(wave))
        k_state.advance()
        while number < queue.num_tiles:
            self.acc_o.fill(0.0)
            self.clear_garbage(tile, v_state)
            n_block = tile.last - 1
            for _ in cutlass.range(n_block - tile.first, unroll=1):
                self.half_step(tile, n_block, 0, k_state, v_state, self.q_state(wave), Boolean(False))
                k_state.advance()
                v_state.advance()
                n_block -= 1
                self.half_step(tile, n_block, 1, k_state, v_state, self.q_state(wave), n_block == tile.first)
                k_state.advance()
                v_state.advance()

            number = queue.take(wave + 1)
            queue.want_next()
            next_tile = self.kernel.tile_at(number, schedule, seqlens)
            next_k, next_v = k_state.clone(), v_state.clone()
            next_k.advance()
            next_v.advance()
            if number < queue.num_tiles:
                next_q = self.q_state(wave + 1)
                self.load_q(next_q)
                self.half_step(tile, n_block, 0, k_state, v_state, next_q, Boolean(False))
                self.keep_done()
                self.issue_gemms(0, next_k, next_v, next_q)
                self.first_half(next_tile, next_k, next_q)
                self.pipes.v.consumer_release(next_v)
            else:
                self.issue_pv(v_state)
                self.half_softmax(tile, n_block, 0)
                warpgroup.wait_group(0)
                self.pipes.v.consumer_release(v_state)
                self.next_p(0)
                self.keep_done()
                self.last_pv(next_v)
            self.store(tile)
            for _ in cutlass.range_constexpr(2):
                k_state.advance()
                v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def own_blocks(self, tile: Tile):
        """The blocks of a tile that this warpgroup visits.

        Under a causal mask the rows of the first warpgroup need 64 keys fewer than those of the next one, and intervals
        may say such a mask. A skipped K is released at once, so as many blocks can be skipped as have a buffer besides
        the first one.

        Returns: the tile with the blocks that this warpgroup's rows see; how many of its last blocks they do not see;
        and how many of its first blocks it leaves out: with intervals, those that its rows do not see, and without any
        row all but one, whose S and P V it computes in vain.
        """
        skipped, unused = Int32(0), Int32(0)
        if cutlass.const_expr((self.has_window[1] or self.kernel.has_intervals) and self.producer is None):
            seqlen_q = tile.geometry.seqlen_q
            rows = self.tile_m // self.num_warpgroups
            m_start = tile.m_block * self.tile_m + self.wg * rows
            if cutlass.const_expr(self.kernel.has_intervals):
                own = self.blocks_of_intervals(tile, m_start, rows)
            else:
                m_start = minimum(m_start, seqlen_q - 1)
                own = key_blocks(m_start, minimum(m_start + rows, seqlen_q), *tile.geometry, self.tile_n)
            if cutlass.const_expr(self.kernel.is_split or self.kernel.has_intervals):
                own = blocks_within(own, tile.blocks)._replace(first=own.first)
            blocks, skipped = blocks_of_rows(tile.blocks, own, self.kernel.k_stages - 1)
            if cutlass.const_expr(self.kernel.skips_first):
                first = minimum(maximum(own.first, tile.first), blocks.last - 1)
                unused = first - tile.first
                blocks = blocks._replace(first=first)
            tile = tile.with_blocks(blocks)
        if cutlass.const_expr(self.kernel.skips_unused):
            if tile.m_block * self.tile_m + self.wg * (self.tile_m // self.num_warpgroups) >= tile.geometry.seqlen_q:
                unused = tile.last - 1 - tile.first
                tile = tile.with_blocks(KeyBlocks(tile.last - 1, tile.last - 1, tile.last - 1, tile.last))
        return tile, skipped, unused

    def blocks_of_intervals(self, tile: Tile, m_start: Int32, rows: int) -> KeyBlocks:
        """The key blocks of this warpgroup's rows, from m_start on."""
        place, lane = self.place(tile), cute.arch.lane_idx()
        queries = [(place, m_start + lane + i) for i in range(0, rows, LANES)]
        return self.modifiers.key_blocks(queries, tile.geometry.seqlen_k, self.tile_n)

    @cute.jit
    def skip_key_block(self, k_state):
        """Release a K unread, and take this warpgroup's turn for its block."""
        self.turns.wait()
        self.turns.pass_on()
        self.skip(self.pipes.k, k_state)

    @cute.jit
    def skip(self, pipe: pipeline.PipelineTmaAsync, state):
        """Release a buffer unread."""
        pipe.consumer_wait(state)
        pipe.consumer_release(state)

    # ---------------------------------------------------------------- loads, without warp specialization

    @cute.jit
    def load_first(self, tile: Tile, wave: Int32, k_state, v_state):
        """The loads that a tile starts with: Q, the first V, and two blocks of K, the second one for the first step."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.producer.load_q(tile, wave)
                self._load_k(tile, tile.last - 1, k_state)
                self._load_v(tile, tile.last - 1, v_state)
                if tile.last - 1 > tile.first:
                    self._load_k(tile, tile.last - 2, after(k_state))

    @cute.jit
    def load_next(self, tile: Tile, n_block: Int32, k_state, v_state):
        """The loads in the step of K_n and V_(n+1), while its GEMMs run: V_n and K_(n-1)."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                if n_block > tile.first:
                    self._load_k(tile, n_block - 1, after(k_state))
                self._load_v(tile, n_block, after(v_state))

    def _load_k(self, tile: Tile, n_block: Int32, state):
        self.producer.load_k(self.producer.head_kv(tile), tile.origin_k, n_block, as_producer(state))

    def _load_v(self, tile: Tile, n_block: Int32, state):
        self.producer.load_v(self.producer.head_kv(tile), self.producer.origin_v(tile), n_block, as_producer(state))

    # ---------------------------------------------------------------- steps

    @cute.jit
    def step(self, tile: Tile, n_block: Int32, k_state, v_state, q_state, ready, is_masked: cutlass.Constexpr[bool]):
        """S = Q K_n^T issued with O += P V_(n+1); softmax of S while PV runs; then P = S and O rescaled.

        Args: ready: whether K_n and V_(n+1) were already seen in shared memory.
        Returns: `ready` of the next step.
        """
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.issue_gemms(0, k_state, v_state, q_state, ready)
            self.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(1)
        else:
            # Algorithm 1: PV first, and nothing of this warpgroup runs during its softmax
            if cutlass.const_expr(self.config.two_level_sums):
                # PV and QK^T in one turn: between two turns the tensor cores would go to another warpgroup
                self.pipes.k.consumer_wait(k_state, ready[0])
                self.pipes.v.consumer_wait(v_state, ready[1])
                self.turns.wait()
                self.last_pv(v_state)
            else:
                self.last_pv(v_state)
                self.turns.wait()
            self.issue_qk(0, k_state, q_state)
            self.turns.pass_on()
            self.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        # asked now, so that the answers, about 80 cycles away each, are there when the next step begins
        ready = is_full(self.pipes.k, k_state), is_full(self.pipes.v, v_state)
        self.modify_scores(tile, n_block, 0)
        if cutlass.const_expr(is_masked):
            self.apply_mask(tile, n_block, 0)
        self.update_softmax(0, is_masked)
        self.drop(tile, n_block, 0)
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            warpgroup.wait_group(0)
            self.finish_pv(v_state)
        self.next_p(0)
        return ready

    @cute.jit
    def first_scores(self, tile: Tile, k_state, q_state):
        """S = Q K^T and softmax of a tile's first block of keys (its last), alone."""
        self.load_q(q_state)
        self.load_scales(tile)
        self.issue_qk(0, k_state, q_state)
        warpgroup.wait_group(0)
        self.first_softmax(tile, k_state, q_state)
        self.pack_p(0)

    @cute.jit
    def step_to_next_tile(self, tile: Tile, next_tile: Tile, k_state, v_state, next_q_state):
        """The step between tiles: the first S of the next tile is issued with the last PV of this one.

        Without overlap_gemm_softmax that S comes after the PV, and the finished rows are stored during it.
        """
        if cutlass.const_expr(not self.config.overlap_gemm_softmax):
            self.turns.wait()
            self.last_pv(v_state)
            self.load_q(next_q_state)
            self.load_scales(next_tile)
            self.issue_qk(0, k_state, next_q_state)
            self.turns.pass_on()
            self.store(tile)
            warpgroup.wait_group(0)
            self.first_softmax(next_tile, k_state, next_q_state)
        else:
            self.load_q(next_q_state)
            self.load_scales(next_tile)
            self.issue_gemms(0, k_state, v_state, next_q_state)
            warpgroup.wait_group(1)
            self.first_softmax(next_tile, k_state, next_q_state)
            warpgroup.wait_group(0)
            self.finish_pv(v_state)
        self.pack_p(0)

    @cute.jit
    def first_softmax(self, tile: Tile, k_state, q_state):
        """Softmax of a tile's first scores, which are masked only where needed: one branch for the tile."""
        self.pipes.k.consumer_release(k_state)
        n_block = tile.last - 1
        self.release_q(q_state, n_block == tile.first)
        self.modify_scores(tile, n_block, 0, is_first=True)
        self.mask_if_needed(tile, n_block, 0)
        self.softmax.begin(self.s[0])
        self.drop(tile, n_block, 0)

    @cute.jit
    def half_step(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int], k_state, v_state, q_state, ends_q):
        """Softmax of one half of block n, while the S of the half after it and the PV of the half before it run.

        Args:
            buffer: the number of the half, which is that of its score buffer.
            ends_q: whether that S is the last one of this Q.
        """
        self.issue_gemms(1 - buffer, k_state, v_state, q_state)
        self.half_softmax(tile, n_block, buffer)
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, ends_q)
        self.pipes.v.consumer_release(v_state)
        self.next_p(buffer)

    @cute.jit
    def first_half(self, tile: Tile, k_state, q_state):
        """Softmax of a tile's first half block, while the GEMMs issued before run."""
        n_block = tile.last - 1
        self.modify_scores(tile, n_block, 1)
        self.mask_if_needed(tile, n_block, 1)
        self.softmax.begin(self.s[1])
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        self.pack_p(1)

    @cute.jit
    def half_softmax(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        self.modify_scores(tile, n_block, buffer)
        self.mask_if_needed(tile, n_block, buffer)
        self.update_softmax(buffer, True)

    @cute.jit
    def next_p(self, buffer: cutlass.Constexpr[int]):
        """The exponentials become P of the next PV, and O is brought to their reference."""
        self.pack_p(buffer)
        if cutlass.const_expr(not self.is_lazy):
            self.softmax.rescale(self.o)
        elif cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.softmax.rescale_lazily(self.o)

    @cute.jit
    def update_softmax(self, buffer: cutlass.Constexpr[int], is_masked: cutlass.Constexpr[bool]):
        if cutlass.const_expr(self.is_lazy):
            # while P V still runs, O has to wait for its new reference until `next_p`
            acc_o = None if self.config.overlap_gemm_softmax else self.o
            self.softmax.update_lazily(self.s[buffer], is_masked, acc_o)
        else:
            self.softmax.update(self.s[buffer])

    @cute.jit
    def last_pv(self, v_state):
        """O += P V alone."""
        if cutlass.const_expr(self.pv_blocks > 1):
            self.pv_by_blocks(v_state)
        else:
            self.issue_pv(v_state)
            warpgroup.wait_group(0)
            self.finish_pv(v_state)

"""A consumer warpgroup of the Hopper forward: 64 query rows through the key blocks of each tile.

What runs during what, in one warpgroup (S = QK^T of a block, O += PV of the block before; time goes right):

    Algorithm 1   [S ] softmax [PV] [S ] softmax [PV]          overlap_gemm_softmax=False
    2 stages      [S,PV] softmax [S,PV] softmax                PV during the softmax; S is waited for
    3 stages      [S,PV]  [S,PV]  [S,PV]                       a block in two halves with an accumulator each: while
                  softmax softmax softmax                      the softmax of one half runs, the S of the other does,
                                                               too; the only wait comes after the softmax

The first S of the next tile is issued with the last PV of this one (overlap_tiles), so the tensor cores do not drain
between tiles; while a warpgroup stores finished rows from registers, the GEMMs of the others run.

What a step calls are parts of the consumer, each in a file of its own. The rows of the softmax belong to
`scales.softmax`, S, P and O to `gemms`, and the rows of a tile that waits for its last PV to `output`:

    gemms            gemms.py         operands and accumulators of both GEMMs
    scores           scores.py        how S becomes P: scales.py, mask, modifiers, softmax
    pingpong         blocks/tiles/pingpong.py      which warpgroup issues its GEMMs
    output           output.py        rows of a finished tile to global memory, repair
    own_blocks       own_blocks.py    which key blocks of a tile this warpgroup's rows see
    past_the_end     past_the_end.py  zeros past the end of a sequence
    loads            own_loads.py     loads, without warp specialization

Source: FlashAttention-3, arXiv:2407.08608: Algorithm 1, Algorithm 2 (2 stages), appendix B.3 (3 stages; there with a
third buffer for P, here with halves of a block, which need fewer registers).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, pipeline
from cutlass.cute.nvgpu import warpgroup

from .....geometry.integers import minimum
from ...blocks.memory.untraced import Untraced
from ...blocks.tiles.pingpong import Pingpong
from .gemms import ForwardGemms
from .inputs import Buffers, Inputs, this_thread
from .output import Output
from .own_blocks import OwnBlocks
from .own_loads import OwnLoads
from .past_the_end import PastTheEnd
from .producer import Producer
from .rows import Rows
from .scales import make_scales
from .scores import ForwardScores
from .tile import Tile, after


@cute.jit
def is_full(pipe: pipeline.PipelineTmaAsync, state) -> Boolean:
    """Whether the buffer after this state's is full, without waiting."""
    following = after(state)
    return cute.arch.mbarrier_test_wait(pipe.producer_get_barrier(following), following.phase)


class Consumer(Untraced):
    """What a warpgroup does with each tile.

    Buffer states are advanced in the loops of `run_blocks` and `run_halves`: an update in a callee would not be
    carried around them.
    """

    def __init__(self, kernel, buffers: Buffers, inputs: Inputs, producer: Producer | None = None):
        """Args: producer: None: a warp of its own issues the loads."""
        self.kernel, self.config, self.pipes = kernel, kernel.config, inputs.pipes
        self.thread = thread = this_thread(1 if producer is None else 0)
        self.pingpong = Pingpong(self.config.pingpong and kernel.num_warpgroups > 1, thread.wg, kernel.num_warpgroups)
        self.gemms = ForwardGemms(kernel, thread, inputs.mmas, buffers)
        rows = Rows(kernel, thread)
        scales = make_scales(kernel, rows, inputs)
        self.scores = ForwardScores(kernel, rows, self.gemms, scales, inputs.modifiers)
        self.output = Output(kernel, rows, self.gemms, scales, inputs)
        self.own_blocks = OwnBlocks(kernel, rows, inputs.modifiers)
        self.past_the_end = PastTheEnd(kernel, thread, inputs.pipes, buffers, inputs.modifiers)
        self.loads = OwnLoads(producer)

    # ---------------------------------------------------------------- through all tiles of the thread block

    @cute.jit
    def run_blocks(self, queue, schedule, seqlens):
        """Algorithm 1 or 2: a step computes a block of keys, in one accumulator of scores."""
        config = self.config
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()  # wave: how many tiles this thread block has had
        tile, skipped, unused = self.own_blocks.find(self.kernel.tile_at(number, schedule, seqlens))
        self.pingpong.begin()
        if cutlass.const_expr(config.overlap_tiles):
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.k, k_state)
                k_state.advance()
            self.begin_scores(tile, k_state, self.q_state(wave))
            k_state.advance()
        while number < queue.num_tiles:
            if cutlass.const_expr(not config.overlap_tiles):
                for _ in cutlass.range(skipped, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                self.loads.begin(tile, wave, k_state, v_state)
                self.begin_scores(tile, k_state, self.q_state(wave))
                k_state.advance()
            for _ in cutlass.range(skipped, unroll=1):
                self.skip(self.pipes.v, v_state)
                v_state.advance()
                # every warpgroup takes one turn a block
                self.pingpong.wait()
                self.pingpong.pass_on()
            self.gemms.acc_o.fill(0.0)
            self.past_the_end.clear_values(tile, v_state)

            # the keys, last block first: cut by the right edge of the mask, clear, cut by its left edge
            n_block = tile.last - 1
            ready = (Boolean(False), Boolean(False))
            clear_last, clear_first = minimum(tile.clear_last, n_block), minimum(tile.clear_first, n_block)
            if cutlass.const_expr(self.kernel.cut_sides[1]):
                for _ in cutlass.range(n_block - clear_last, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()
            n_clear = clear_last - clear_first if cutlass.const_expr(self.kernel.cut_sides[0]) else n_block - tile.first
            for _ in cutlass.range(n_clear, unroll=1):
                n_block -= 1
                ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, False)
                k_state.advance()
                v_state.advance()
            if cutlass.const_expr(self.kernel.cut_sides[0]):
                for _ in cutlass.range(n_block - tile.first, unroll=1):
                    n_block -= 1
                    ready = self.step(tile, n_block, k_state, v_state, self.q_state(wave), ready, True)
                    k_state.advance()
                    v_state.advance()

            if cutlass.const_expr(self.kernel.skips_lowest):
                # P V of the last block that is visited comes by itself, and P = 0 is left for V of the tile's first
                # block. The others are released unread in the order of their loads: K before V of the block after it.
                if unused > 0:
                    self.last_pv(v_state)
                    v_state.advance()
                    for rP in self.gemms.rP:
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
                    self.pingpong.wait()
                    self.pingpong.pass_on()
                    self.skip(self.pipes.v, v_state)
                    v_state.advance()
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
            number = queue.take(wave + 1)
            queue.want_next()
            next_tile, skipped, unused = self.own_blocks.find(self.kernel.tile_at(number, schedule, seqlens))
            self.output.keep_done()
            if cutlass.const_expr(config.overlap_tiles):
                for _ in cutlass.range(skipped if number < queue.num_tiles else 0, unroll=1):
                    self.skip(self.pipes.k, k_state)
                    k_state.advance()
                if number < queue.num_tiles:
                    self.step_to_next_tile(tile, next_tile, k_state, v_state, self.q_state(wave + 1))
                else:
                    self.last_pv(v_state)
                    if cutlass.const_expr(not config.overlap_gemm_softmax):
                        self.output.store(tile)
                k_state.advance()
            else:
                self.last_pv(v_state)
            if cutlass.const_expr(config.overlap_gemm_softmax or not config.overlap_tiles):
                self.output.store(tile)
            v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def run_halves(self, queue, schedule, seqlens):
        """Appendix B.3: a block of keys in two halves, the upper one (1) first, each with its accumulator.

        At the start of each half step the scores of one half are there, and P holds the half before it.
        """
        k_state, v_state = self.kernel.buffer_states(pipeline.PipelineUserType.Consumer)
        wave, number = Int32(0), queue.first()
        tile = self.kernel.tile_at(number, schedule, seqlens)
        self.pingpong.begin()
        self.pipes.q.consumer_wait(self.q_state(wave))
        self.issue_qk(1, k_state, self.q_state(wave))
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        k_state.advance()
        self.issue_qk(0, k_state, self.q_state(wave))
        self.begin_half(tile, k_state, self.q_state(wave))
        k_state.advance()
        while number < queue.num_tiles:
            self.gemms.acc_o.fill(0.0)
            self.past_the_end.clear_values(tile, v_state)
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
                self.pipes.q.consumer_wait(next_q)
                self.half_step(tile, n_block, 0, k_state, v_state, next_q, Boolean(False))
                self.output.keep_done()
                self.issue_gemms(0, next_k, next_v, next_q)
                self.begin_half(next_tile, next_k, next_q)
                self.pipes.v.consumer_release(next_v)
            else:
                self.issue_pv(v_state)
                self.half_softmax(tile, n_block, 0)
                warpgroup.wait_group(0)
                self.pipes.v.consumer_release(v_state)
                self.scores.next_p(0)
                self.output.keep_done()
                self.last_pv(next_v)
            self.output.store(tile)
            for _ in cutlass.range_constexpr(2):
                k_state.advance()
                v_state.advance()
            wave += 1
            tile = next_tile

    @cute.jit
    def skip_key_block(self, k_state):
        """Release a K unread, and take this warpgroup's turn for its block."""
        self.pingpong.wait()
        self.pingpong.pass_on()
        self.skip(self.pipes.k, k_state)

    @cute.jit
    def skip(self, pipe: pipeline.PipelineTmaAsync, state):
        """Release a buffer unread."""
        pipe.consumer_wait(state)
        pipe.consumer_release(state)

    # ---------------------------------------------------------------- GEMMs

    def q_state(self, tile_count) -> pipeline.PipelineState:
        return self.kernel.q_state(self.thread.wg, tile_count)

    @cute.jit
    def release_q(self, q_state, is_last: Boolean):
        if is_last:
            self.pipes.q.consumer_release(q_state)

    @cute.jit
    def issue_gemms(self, buffer: cutlass.Constexpr[int], k_state, v_state, q_state, ready=(None, None)):
        """S[buffer] = Q K^T and O += P V, issued in this order in this warpgroup's turn.

        Args: ready: whether K and V were already seen in shared memory; False or None: not known.
        """
        self.pipes.k.consumer_wait(k_state, ready[0])
        self.pingpong.wait()
        self.gemms.issue_qk(buffer, k_state, q_state)
        self.issue_pv(v_state, ready[1])
        self.pingpong.pass_on()

    @cute.jit
    def issue_qk(self, buffer: cutlass.Constexpr[int], k_state, q_state):
        self.pipes.k.consumer_wait(k_state)
        self.gemms.issue_qk(buffer, k_state, q_state)

    @cute.jit
    def issue_pv(self, v_state, is_ready=None):
        self.pipes.v.consumer_wait(v_state, is_ready)
        self.gemms.issue_pv(v_state)

    @cute.jit
    def finish_pv(self, v_state):
        """What follows when P V is computed: V is released, and with two_level_sums P V is added to O."""
        self.pipes.v.consumer_release(v_state)
        if cutlass.const_expr(self.config.two_level_sums):
            self.gemms.add_pv()

    @cute.jit
    def last_pv(self, v_state):
        """O += P V alone."""
        if cutlass.const_expr(self.gemms.pv_blocks > 1):
            self.pv_by_blocks(v_state)
        else:
            self.issue_pv(v_state)
            warpgroup.wait_group(0)
            self.finish_pv(v_state)

    @cute.jit
    def pv_by_blocks(self, v_state):
        """O += P V, `pv_columns` columns at a time, each added to O before the next is computed."""
        self.pipes.v.consumer_wait(v_state)
        for block in cutlass.range_constexpr(self.gemms.pv_blocks):
            self.gemms.issue_pv_block(block, v_state)
            warpgroup.wait_group(0)
            if cutlass.const_expr(block == self.gemms.pv_blocks - 1):
                self.pipes.v.consumer_release(v_state)
            self.gemms.add_pv(block)

    # ---------------------------------------------------------------- steps

    @cute.jit
    def step(self, tile: Tile, n_block: Int32, k_state, v_state, q_state, ready, is_masked: cutlass.Constexpr[bool]):
        """S = Q K_n^T issued with O += P V_(n+1); softmax of S while PV runs; then P = S and O rescaled.

        Args: ready: whether K_n and V_(n+1) were already seen in shared memory.
        Returns: `ready` of the next step.
        """
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            self.issue_gemms(0, k_state, v_state, q_state, ready)
            self.loads.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(1)
        else:
            # Algorithm 1: PV first, and nothing of this warpgroup runs during its softmax
            if cutlass.const_expr(self.config.two_level_sums):
                # PV and QK^T in one turn: between two turns the tensor cores would go to another warpgroup
                self.pipes.k.consumer_wait(k_state, ready[0])
                self.pipes.v.consumer_wait(v_state, ready[1])
                self.pingpong.wait()
                self.last_pv(v_state)
            else:
                self.last_pv(v_state)
                self.pingpong.wait()
            self.issue_qk(0, k_state, q_state)
            self.pingpong.pass_on()
            self.loads.load_next(tile, n_block, k_state, v_state)
            warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        # asked now, so that the answers, about 80 cycles away each, are there when the next step begins
        ready = is_full(self.pipes.k, k_state), is_full(self.pipes.v, v_state)
        self.scores.modify(tile, n_block, 0)
        if cutlass.const_expr(is_masked):
            self.scores.mask(tile, n_block, 0)
        self.scores.update_softmax(0, is_masked)
        self.scores.drop(tile, n_block, 0)
        if cutlass.const_expr(self.config.overlap_gemm_softmax):
            # all warps wait here: wait_group is for the whole warpgroup, and only then may single warps rescale O
            warpgroup.wait_group(0)
            self.finish_pv(v_state)
        self.scores.next_p(0)
        return ready

    @cute.jit
    def begin_scores(self, tile: Tile, k_state, q_state):
        """S = Q K^T and softmax of the last block of keys, with which a tile begins, alone."""
        self.pipes.q.consumer_wait(q_state)
        self.scores.load(tile)
        self.issue_qk(0, k_state, q_state)
        warpgroup.wait_group(0)
        self.begin_softmax(tile, k_state, q_state)
        self.scores.pack_p(0)

    @cute.jit
    def step_to_next_tile(self, tile: Tile, next_tile: Tile, k_state, v_state, next_q_state):
        """The step between tiles: the first S of the next tile is issued with the last PV of this one.

        Without overlap_gemm_softmax that S comes after the PV, and the finished rows are stored during it.
        """
        if cutlass.const_expr(not self.config.overlap_gemm_softmax):
            self.pingpong.wait()
            self.last_pv(v_state)
            self.pipes.q.consumer_wait(next_q_state)
            self.scores.load(next_tile)
            self.issue_qk(0, k_state, next_q_state)
            self.pingpong.pass_on()
            self.output.store(tile)
            warpgroup.wait_group(0)
            self.begin_softmax(next_tile, k_state, next_q_state)
        else:
            self.pipes.q.consumer_wait(next_q_state)
            self.scores.load(next_tile)
            self.issue_gemms(0, k_state, v_state, next_q_state)
            warpgroup.wait_group(1)
            self.begin_softmax(next_tile, k_state, next_q_state)
            warpgroup.wait_group(0)
            self.finish_pv(v_state)
        self.scores.pack_p(0)

    @cute.jit
    def begin_softmax(self, tile: Tile, k_state, q_state):
        """The softmax with which a tile begins; its scores are masked only where needed: one branch for the tile."""
        self.pipes.k.consumer_release(k_state)
        n_block = tile.last - 1
        self.release_q(q_state, n_block == tile.first)
        self.scores.modify(tile, n_block, 0, begins=True)
        self.scores.mask_if_needed(tile, n_block, 0)
        self.scores.begin_softmax(0)
        self.scores.drop(tile, n_block, 0)

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
        self.scores.next_p(buffer)

    @cute.jit
    def begin_half(self, tile: Tile, k_state, q_state):
        """The softmax of the half block with which a tile begins, while the GEMMs issued before run."""
        n_block = tile.last - 1
        self.scores.modify(tile, n_block, 1)
        self.scores.mask_if_needed(tile, n_block, 1)
        self.scores.begin_softmax(1)
        warpgroup.wait_group(0)
        self.pipes.k.consumer_release(k_state)
        self.release_q(q_state, n_block == tile.first)
        self.scores.pack_p(1)

    @cute.jit
    def half_softmax(self, tile: Tile, n_block: Int32, buffer: cutlass.Constexpr[int]):
        self.scores.modify(tile, n_block, buffer)
        self.scores.mask_if_needed(tile, n_block, buffer)
        self.scores.update_softmax(buffer, True)  # the half may have been masked

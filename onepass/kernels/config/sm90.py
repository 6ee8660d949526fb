"""How one launch of the Hopper kernels is computed: tiles, and the choices that the FlashAttention-3 paper ablates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from ...errors import UnsupportedError
from ...problem import AttentionProblem
from .base import MAX_RESCALE_THRESHOLD, MAX_RESCALE_THRESHOLD_FP8, STAT_ROWS, LaunchConfig, head_dim_tile

ROWS_PER_WARPGROUP = 64  # the M of a wgmma
HOPPER = "sm_90a"
SMEM_BYTES = 227 * 1024  # of a Hopper thread block
DS_BUFFERS = 2  # of the backward
KEY_VECTORS = 4  # 16-byte vectors with keys of dropout's generator, those of its last eight rounds
PROGRESS_HEADER = 8  # words of the backward's counters that are not those of a head
# Registers of a producer and of a consumer thread, by number of consumer warpgroups. A launch gives every thread the
# same multiple of 8, of 64 Ki in all; setmaxnreg only moves them (asking for more than are there waits forever).
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}
# Registers of a producer and of a consumer thread where thread blocks of one consumer warpgroup share a multiprocessor,
# by the number of these thread blocks.
REGISTERS_OF_SEVERAL = {2: (40, 216), 3: (24, 136)}
REGISTERS_TO_TRANSPOSE = REGISTERS | {2: (40, 232), 4: (32, 112)}  # V, next to a producer
REGISTERS_OF_PAGES = REGISTERS | {2: (40, 232)}  # of a producer that looks up pages
# Registers of a producer, a consumer and a converting thread, over an e4m3 cache.
REGISTERS_TO_CONVERT = {1: (56, 240, 56), 2: (48, 216, 32)}


CONVERTED_KEYS = (64, 128)  # keys of a step over an e4m3 cache; a converting warp takes 32 of them
MAX_COLUMNS_FLOAT32 = 128  # of V: O has two accumulators


def value_blocks(problem: AttentionProblem) -> int:
    """Launches of the forward that share the columns of V."""
    return 2 if problem.dtype == torch.float32 and problem.head_dim_v > MAX_COLUMNS_FLOAT32 else 1


def value_columns(problem: AttentionProblem) -> int:
    """Columns of V of such a launch."""
    return problem.head_dim_v // value_blocks(problem)


def _require_hopper(arch: str) -> None:
    if arch != HOPPER:
        raise UnsupportedError(f"architecture: expected {HOPPER}, got {arch}")


@dataclass(frozen=True)
class ForwardConfigSm90(LaunchConfig):
    """How one forward launch on Hopper is tiled and overlapped: speed and summation order, never what is asked for.

    Attributes:
        tile_n: keys of one step of the main loop.
        num_warpgroups: consumer warpgroups (1 to 4), 64 query rows each.
        num_stages: buffers for K and V, see v_stages.
        v_stages: buffers for V if they are not as many as those for K; 0 = num_stages.
        q_stages: buffers for Q; with 2 the next tile's Q is loaded while this one is still in use.
        warp_specialized: a producer warp issues all loads and gives its warpgroup's registers to the consumers; else a
            consumer warp issues them in each of its steps, while the GEMMs run.
        overlap_gemm_softmax: 2-stage pipelining inside a warpgroup: QK^T of these keys is issued with the PV of those
            before, which runs during the softmax.
        overlap_tiles: the same across tiles: the first QK^T of the next tile runs with the last PV of this one.
        pingpong: warpgroups take turns with the tensor cores, so that one's softmax hides behind another's GEMMs.
        rescale_threshold: powers of two that a row maximum may outgrow its reference by before acc_o is rescaled;
            0 = rescale in every step.
        score_buffers: 1, or 2 = 3-stage pipelining: a step's keys in two halves, each with its accumulator of scores;
            the QK^T of one half runs during the softmax of the other.
        longest_first: number the tiles by length (only meaningful where they differ), in L2-sized sections of heads.
        cluster_size: thread blocks that share their loads of K and V (TMA multicast): neighboring m_blocks of a head,
            step by step in the same key block.
        dynamic_tiles: thread blocks draw tiles from a queue (dynamic persistent scheduling), not in a stride.
        pack_gqa: the query heads of one kv head share a tile, see geometry/pack_gqa.py.
        two_level_sums: P V of a step has an accumulator of its own, which the FMA pipe adds to O: the tensor cores cut
            off what they add, and in FP8 sum with fewer bits than float32 has.
        pv_columns: with two_level_sums and without overlap_gemm_softmax, columns of V that share that accumulator, one
            block of them after another; 0 = all.
        transposes_v: in FP8, V comes as (batch, seqlen, heads, dim) and idle warps transpose it in shared memory; else
            it comes as `fp8.keys_last` lays it, by a kernel of its own before where the call's V does not lie so.
        p_codes: in FP8, P is computed by integers, not by exponentials, with up to 8 percent of error instead of 6
            (blocks/softmax/scaled.py). lse is off by up to 0.084, so calls whose lse or gradients are used refuse it.

        blocks_per_sm: thread blocks that share a multiprocessor, 1, or 2 or 3 of one warpgroup each.

    Raises: TypeError for a value of another type than its field's.
    """

    tile_n: int
    num_warpgroups: int = 2
    num_stages: int = 2
    v_stages: int = 0
    q_stages: int = 1
    warp_specialized: bool = True
    overlap_gemm_softmax: bool = True
    overlap_tiles: bool = True
    pingpong: bool = True
    rescale_threshold: float = 0.0
    score_buffers: int = 1
    longest_first: bool = True
    cluster_size: int = 1
    dynamic_tiles: bool = False
    pack_gqa: bool = False
    two_level_sums: bool = False
    pv_columns: int = 0
    transposes_v: bool = False
    p_codes: bool = False
    blocks_per_sm: int = 1

    removed: ClassVar[dict[str, object]] = {
        "q_in_registers": False,
        "exp2_fma_period": 0,
        "rescale_beside_qk": False,
        "softmax_before_wait": False,
    }

    @property
    def tile_m(self) -> int:
        return ROWS_PER_WARPGROUP * self.num_warpgroups

    @property
    def kv_stages(self) -> tuple[int, int]:
        """Buffers for K and for V."""
        return self.num_stages, self.v_stages or self.num_stages

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_warpgroups + self.warp_specialized)

    def group(self, problem: AttentionProblem) -> int:
        """Query heads that share a tile."""
        return problem.qhead_per_kvhead if self.pack_gqa else 1

    def positions(self, problem: AttentionProblem) -> int:
        """Query positions of a tile."""
        return ROWS_PER_WARPGROUP // self.group(problem) * self.num_warpgroups

    def raw_stages(self, problem: AttentionProblem) -> int:
        """Buffers for V before it is transposed, or for each of K and V before they are converted to 16 bits.

        As many as fit of 2, or 4 over an e4m3 cache. 0: neither is done.
        """
        choices = (4, 2) if problem.has_e4m3_cache else (2,) if self.transposes_v else ()
        fitting = (n for n in choices if self._smem_bytes(problem, n) <= SMEM_BYTES)
        return next(fitting, min(1, len(choices)))

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of the tiles and their barriers."""
        return self._smem_bytes(problem, self.raw_stages(problem))

    def _smem_bytes(self, problem: AttentionProblem, raw_stages: int) -> int:
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(value_columns(problem))
        q = self.q_stages * self.tile_m * d
        k_stages, v_stages = self.kv_stages
        kv = self.tile_n * (k_stages * d + v_stages * dv)
        raw = raw_stages * self.tile_n * (d + dv if problem.has_e4m3_cache else dv)  # bytes of e4m3
        # float32 is two halves of 2 bytes
        return problem.dtype.itemsize * (q + kv) + raw + 1024

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a consumer thread for S, P, O: the rest is left for addresses and the softmax."""
        dv = head_dim_tile(value_columns(problem))
        p = self.tile_n * problem.dtype.itemsize // (8 * self.score_buffers)
        if self.p_codes and self.overlap_gemm_softmax:
            p *= 2  # the next P is made while P V reads this one
        s, pv = self.tile_n // 2, 0
        if self.two_level_sums:
            pv = (self.pv_columns or dv) // 2
        # without overlap S is gone when P V comes
        s_and_pv = s + pv if self.overlap_gemm_softmax else max(s, pv)
        return s_and_pv + p + dv // 2

    def registers_to_transpose(self, problem: AttentionProblem) -> tuple[int, int]:
        """Registers of a producer and of a consumer thread where warps of the producer's warpgroup transpose V."""
        registers = REGISTERS_TO_TRANSPOSE[self.num_warpgroups]
        others = 32 if self.overlap_gemm_softmax else 16  # a softmax during P V keeps more alive
        is_enough = self.accumulator_registers(problem) <= registers[1] - others
        return registers if is_enough else REGISTERS[self.num_warpgroups]

    def check(self, problem: AttentionProblem, arch: str = HOPPER) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        _require_hopper(arch)
        if self.num_warpgroups not in REGISTERS:
            raise UnsupportedError(f"num_warpgroups: expected 1 to 4, got {self.num_warpgroups}")
        if self.score_buffers not in (1, 2):
            raise UnsupportedError(f"score_buffers: expected 1 or 2, got {self.score_buffers}")
        keys = self.tile_n // self.score_buffers  # of one wgmma
        if keys * self.score_buffers != self.tile_n or keys % 16 or not 16 <= keys <= 256:
            raise UnsupportedError(f"tile_n: expected {self.score_buffers} x 16, 32, ... 256, got {self.tile_n}")
        least = min(self.kv_stages)
        if least < 1 or self.q_stages not in (1, 2):
            raise UnsupportedError(f"stages: expected K/V >= 1 and Q 1 or 2, got {least} and {self.q_stages}")
        if self.overlap_gemm_softmax and least < 2:
            raise UnsupportedError("stages: overlap_gemm_softmax needs 2 for K and V, got 1")
        if self.overlap_tiles and not (self.overlap_gemm_softmax or self.two_level_sums):
            raise UnsupportedError("overlap_tiles: needs overlap_gemm_softmax or two_level_sums")
        if not self.warp_specialized and least < 2:
            raise UnsupportedError(
                "stages: without warp_specialized K and V need 2, got 1: the next ones are loaded early"
            )
        if not self.warp_specialized and (self.overlap_tiles or self.dynamic_tiles or self.cluster_size > 1):
            raise UnsupportedError("warp_specialized: overlap_tiles, dynamic_tiles and clusters need it")
        if self.score_buffers == 2 and not self.overlap_tiles:
            raise UnsupportedError("score_buffers: 2 need overlap_tiles")
        if not 0 <= self.rescale_threshold <= MAX_RESCALE_THRESHOLD:
            expected = f"0 to {MAX_RESCALE_THRESHOLD:g}, or probabilities outgrow float16"
            raise UnsupportedError(f"rescale_threshold: expected {expected}, got {self.rescale_threshold}")
        if self.cluster_size not in (1, 2):
            raise UnsupportedError(f"cluster_size: expected 1 or 2, got {self.cluster_size}")
        if self.cluster_size > 1 and (self.dynamic_tiles or problem.is_packed):
            raise UnsupportedError("cluster_size: above 1 it takes neither dynamic_tiles nor packed sequences")
        if self.group(problem) > ROWS_PER_WARPGROUP:
            raise UnsupportedError(
                f"pack_gqa: expected up to {ROWS_PER_WARPGROUP} query heads a kv head, got {self.group(problem)}"
            )
        if self.two_level_sums and self.score_buffers != 1:
            raise UnsupportedError("two_level_sums: needs score_buffers=1")
        if problem.has_modifiers and (
            self.pack_gqa or self.cluster_size > 1 or self.score_buffers > 1 or self.tile_n % 16
        ):
            expected = "pack_gqa off, cluster_size=1, score_buffers=1 and a tile_n that 16 divides"
            raise UnsupportedError(f"{problem.modifiers_named}: expected {expected}, got {self}")
        self._check_sums(problem)
        if self.transposes_v:
            self._check_transposes_v(problem)
        if problem.quantization is not None:
            self._check_fp8(problem.quantization.exact_lse)
        elif self.p_codes:
            raise UnsupportedError(f"p_codes: expected False for {problem.dtype}, since P is in e4m3 only in FP8")
        if problem.dtype == torch.float32:
            self._check_float32()
        if problem.has_e4m3_cache:
            self._check_e4m3_cache(problem)
        may_share = self.warp_specialized and self.num_warpgroups == 1 and self.blocks_per_sm in REGISTERS_OF_SEVERAL
        may_share = may_share and not (self.transposes_v or problem.has_e4m3_cache)
        if self.blocks_per_sm != 1 and not may_share:
            raise UnsupportedError(
                "blocks_per_sm: expected 1, or 2 or 3 with one warpgroup and a producer, which do not transpose or "
                f"convert, got {self}"
            )
        # of each thread block on a multiprocessor, the system takes 1 KiB
        needed, limit = self.smem_bytes(problem), (SMEM_BYTES + 1024) // self.blocks_per_sm - 1024
        if needed > limit:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {limit}")
        # without a producer to take them from, as many as the launch gives
        registers_of = REGISTERS_TO_CONVERT if problem.has_e4m3_cache else REGISTERS
        several = REGISTERS_OF_SEVERAL.get(self.blocks_per_sm)
        available = (several or registers_of[self.num_warpgroups])[1]
        if not self.warp_specialized:
            available = 65536 // self.num_threads // 8 * 8
        registers = self.accumulator_registers(problem)
        if registers > available - 16:
            raise UnsupportedError(f"registers: {self} needs {registers} for S, P and O, a thread has {available}")
        if several is not None:
            # ptxas compiles a GEMM only if its accumulator fits into what the launch gives: of 80 registers, 48 are
            # enough for it and 56 are not, of 128, 96 are and 128 are not
            launched = 65536 // (self.num_threads * self.blocks_per_sm) // 8 * 8
            largest = max(self.tile_n // self.score_buffers, head_dim_tile(value_columns(problem))) // 2
            if largest > launched - 32:
                raise UnsupportedError(
                    f"registers: {self} needs {largest} for the accumulator of a GEMM, a launch gives {launched}"
                )

    def _check_sums(self, problem: AttentionProblem) -> None:
        """The demands of two_level_sums on the other choices."""
        if self.pv_columns:
            columns = head_dim_tile(value_columns(problem))
            if not self.two_level_sums or self.overlap_gemm_softmax:
                raise UnsupportedError("pv_columns: it needs two_level_sums, and no overlap_gemm_softmax")
            if self.pv_columns % 32 or columns % self.pv_columns:
                raise UnsupportedError(
                    f"pv_columns: expected a multiple of 32 that divides {columns}, got {self.pv_columns}"
                )

    def _check_transposes_v(self, problem: AttentionProblem) -> None:
        if problem.quantization is None or problem.quantization.v_keys_last:
            raise UnsupportedError("transposes_v: it needs V in FP8, as (batch, seqlen, heads, dim)")
        if not self.warp_specialized or self.cluster_size > 1:
            raise UnsupportedError("transposes_v: it needs warp_specialized and cluster_size=1")

    def _check_e4m3_cache(self, problem: AttentionProblem) -> None:
        """The demands of warps that convert K and V to 16 bits on the other choices."""
        if problem.dtype.itemsize != 2 or problem.kv_dtype != torch.float8_e4m3fn:
            raise UnsupportedError(f"cache: expected e4m3 under 16-bit q, got {problem.kv_dtype} and {problem.dtype}")
        if self.tile_n not in CONVERTED_KEYS or self.num_warpgroups not in REGISTERS_TO_CONVERT:
            expected = f"tile_n of {CONVERTED_KEYS} and 1 or 2 warpgroups"
            raise UnsupportedError(f"e4m3 cache: expected {expected}, got {self}")
        if not self.warp_specialized or self.cluster_size > 1 or self.score_buffers > 1:
            expected = "warp_specialized, cluster_size=1 and score_buffers=1"
            raise UnsupportedError(f"e4m3 cache: expected {expected}, got {self}")

    def _check_float32(self) -> None:
        """The demands of float32's two halves on the other choices."""
        if self.score_buffers != 1:
            raise UnsupportedError("score_buffers: expected 1 in float32")

    def _check_fp8(self, exact_lse: bool) -> None:
        """The demands of the GEMMs and scales of FP8 on the other choices."""
        if self.tile_n % 32:
            raise UnsupportedError(f"tile_n: expected a multiple of 32 in FP8, got {self.tile_n}")
        if self.score_buffers != 1:
            raise UnsupportedError("score_buffers: expected 1 in FP8")
        if self.p_codes and exact_lse:
            raise UnsupportedError("p_codes: expected False where lse or a gradient is used: lse is off by up to 0.084")
        if self.rescale_threshold > MAX_RESCALE_THRESHOLD_FP8:
            expected = f"0 to {MAX_RESCALE_THRESHOLD_FP8:g} in FP8, or P has no room below its largest value"
            raise UnsupportedError(f"rescale_threshold: expected {expected}, got {self.rescale_threshold}")


@dataclass(frozen=True)
class BackwardConfigSm90(LaunchConfig):
    """How one backward launch on Hopper is tiled and overlapped.

    Attributes:
        tile_m: query rows of one step of the main loop, 64 or 128.
        num_warpgroups: consumer warpgroups: 2; or 1, and two thread blocks share a multiprocessor.
        by_gradient: one warpgroup has dV and the other dK, of the same 64 keys; else each has both, of its own 64 keys.
        by_queries: each warpgroup has both, of the same 64 keys, and every other block of queries; at the end of a tile
            they add their sums: see device/sm90/backward/shared_keys.py. With tile_m=64 and even numbers of buffers,
            and not for deterministic problems.
        q_stages, do_stages: buffers for Q and for dO.
        private_dq: a thread block takes all tiles of keys of a kv head, one after the other. It sums dQ by itself: no
            zeros before, no other thread block's additions, and the last tile writes dq. For many heads of short
            sequences.
        background_rows: what is to be done for query rows before and after the tiles of keys (lse and delta, zeros, dq)
            is done by idle warps during other tiles; else by kernels before and after. Not for packed sequences, with
            by_queries or with one warpgroup, and without private_dq only with dynamic_tiles.
        pingpong: warpgroups take turns with the tensor cores, so that one's exponentials hide behind another's GEMMs.
            Not with by_queries.
        longest_first: number the tiles of keys by length (only meaningful where they differ), in L2-sized sections of
            heads.
        dynamic_tiles: thread blocks draw tiles from a queue (dynamic persistent scheduling), not in a stride.
        descending_turns: tiles of keys of a deterministic problem add to a dQ from the last one to the first, not the
            other way round: see block_range.following_query_block.
        ascending_mib: with descending_turns, the last heads, whose Q, dO and sums of dQ are this many MiB together (at
            least one head), take the other order, so that the longest tiles do not come last. 0: none; so for packed
            sequences.
        ring_lag: tiles of keys of a deterministic problem without a mask go around all query blocks in rings, each this
            many blocks after the one before it: see block_range.turn_in_ring. 0: in one of the orders above. Neither
            for packed sequences, seqused_k, ranges, positions and left padding, nor with dynamic_tiles.
        overlap_gradients: dS is computed while the GEMM of dV runs, and the next P while that of dK does; else after
            them, while the other warpgroup has the tensor cores. Not with by_gradient and by_queries.
        paired: clusters of two thread blocks take the 128 keys of a tile together, 64 each. They share the loads of Q
            and dO (TMA multicast) and exchange dS, and each adds half of the columns of dQ over the keys of both: see
            device/sm90/backward/paired.py. With by_gradient, and head dims of Q and K above 128.
        heads_together: all query heads of a group visit a block of queries before any of them goes on to another one.
            The tiles of the first, third, ... wave of thread blocks begin with their last block, the others with their
            first one. Under a causal mask, longest tiles first, tiles that run at the same time then visit the same
            blocks. If False, the blocks of a head follow each other.
    """

    tile_m: int = 64
    num_warpgroups: int = 2
    by_gradient: bool = False
    q_stages: int = 2
    do_stages: int = 2
    private_dq: bool = False
    background_rows: bool = True
    pingpong: bool = True
    longest_first: bool = True
    dynamic_tiles: bool = False
    descending_turns: bool = False
    ascending_mib: int = 0
    ring_lag: int = 0
    overlap_gradients: bool = False
    paired: bool = False
    heads_together: bool = False
    by_queries: bool = False

    # of a copy: what TMA reads is aligned
    vector_bytes: ClassVar[int] = 16

    @property
    def row_blocks(self) -> int:
        """Row blocks of 64 keys that a thread block has of a tile."""
        return 1 if self.by_gradient or self.by_queries else self.num_warpgroups

    @property
    def tile_blocks(self) -> int:
        """Thread blocks that take a tile together."""
        return 2 if self.paired else 1

    @property
    def tile_n(self) -> int:
        """Keys of a tile of the grid."""
        return ROWS_PER_WARPGROUP * self.row_blocks * self.tile_blocks

    @property
    def blocks_per_sm(self) -> int:
        """Thread blocks that share a multiprocessor."""
        return 2 if self.num_warpgroups == 1 else 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer and of a consumer thread."""
        return REGISTERS_OF_SEVERAL.get(self.blocks_per_sm) or REGISTERS[self.num_warpgroups]

    @property
    def query_shares(self) -> int:
        """In how many shares the consumer warpgroups have the blocks of queries: each its own, or all together one."""
        return self.num_warpgroups if self.by_queries else 1

    @property
    def takes_turns(self) -> bool:
        """Whether warpgroups issue their GEMMs in turns."""
        return self.pingpong and self.num_warpgroups > 1 and not self.by_queries

    @property
    def ds_buffers(self) -> int:
        return 1 if self.paired else DS_BUFFERS

    @property
    def ds_tiles(self) -> int:
        """Tiles of 64 keys in all buffers of dS."""
        return self.ds_buffers * self.row_blocks * self.query_shares

    def keys_in_registers(self, problem: AttentionProblem) -> bool:
        """Whether a warpgroup has its K in registers for S^T = K Q^T, which then reads a third less shared memory.

        At head_dim 96 that is 1.02 to 1.05 times as fast (H200, 2048 to 16384). At 128 there are no registers for it.
        """
        return self.overlap_gradients and (self.tile_m == 128 or max(self.head_dims(problem)) == 96)

    @property
    def vector_adds(self) -> bool:
        """Whether four values of a dQ are added at once, and are contiguous."""
        return True

    def adds_in_turns(self, problem: AttentionProblem) -> bool:
        """Whether tiles of keys add to a dQ one after the other: with private_dq they do by themselves."""
        return problem.deterministic and not self.private_dq

    def adds_descending(self, problem: AttentionProblem) -> bool:
        """Whether these turns begin with the last tile."""
        return self.descending_turns and self.adds_in_turns(problem)

    def has_ascending_end(self, problem: AttentionProblem) -> bool:
        """Whether the last heads take the other order than those before."""
        return self.ascending_mib > 0 and self.adds_descending(problem) and not problem.is_packed

    def ascending_heads(self, problem: AttentionProblem) -> int:
        """The kv heads that do, if there is such an end."""
        fitting = (self.ascending_mib << 20) // max(1, self.bytes_per_head(problem))
        return min(problem.num_heads_kv * problem.batch, max(1, fitting))

    def bytes_per_head(self, problem: AttentionProblem) -> int:
        """What the tiles of a kv head read and write again and again: Q, dO and the sums of dQ."""
        row_bytes = 2 * (problem.head_dim + problem.head_dim_v) + 4 * self.head_dims(problem)[0]
        return problem.seqlen_q * problem.qhead_per_kvhead * row_bytes

    def adds_in_rings(self, problem: AttentionProblem) -> bool:
        """Whether these turns go around."""
        return self.ring_lag > 0 and self.adds_in_turns(problem)

    def rows_in_background(self, problem: AttentionProblem) -> bool:
        """Whether the main kernel is the only one."""
        # packed: the first tiles are those of all heads, whose rows would all have to be prepared
        is_possible = not (problem.is_packed or problem.has_modifiers or self.paired or self.by_queries)
        is_possible = is_possible and self.blocks_per_sm == 1
        takes_tiles = self.private_dq or self.dynamic_tiles
        return self.background_rows and takes_tiles and is_possible

    def zeroes_before(self, problem: AttentionProblem) -> bool:
        """Whether the kernel before writes the zeros that dQ is added to; with private_dq there are none."""
        return not self.private_dq and not self.rows_in_background(problem)

    def dq_columns(self, problem: AttentionProblem) -> int:
        """Columns of the pieces (64 rows each) that a dQ of tile_m rows is computed in."""
        if self.by_gradient or self.by_queries:
            return 64
        return self.head_dims(problem)[0] * self.tile_m // ROWS_PER_WARPGROUP // self.num_warpgroups

    def head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """The head dims that the kernel is compiled for: where dQ is in pieces of 64 columns, never 96."""
        d, dv = (head_dim_tile(d) for d in (problem.head_dim, problem.head_dim_v))
        if self.by_gradient or self.by_queries:
            d, dv = (128 if d == 96 else d), (128 if dv == 96 else dv)
        return d, dv

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        return 4 * self.num_warpgroups

    @property
    def tile_warps(self) -> int:
        """Consumer warps that work on a tile."""
        return self.consumer_warps * self.tile_blocks

    def warps_of_dq(self, problem: AttentionProblem) -> int:
        """Warps that add to a block of dQ, each to a share of its own; in pairs four to each piece."""
        return self.head_dims(problem)[0] // self.dq_columns(problem) * 4 if self.paired else self.consumer_warps

    @property
    def rows_bytes(self) -> int:
        """Shared memory of a warp that works on query rows."""
        return 4096 if self.by_gradient else 8192

    def p_copies(self, problem: AttentionProblem) -> int:
        """How often P goes through shared memory: with by_gradient, with a softcap also without its slope if terms
        have gradients."""
        return (1 + (problem.softcap is not None and problem.adds_terms)) if self.by_gradient else 0

    def flag_vectors(self, problem: AttentionProblem) -> int:
        """16-byte vectors of shared memory of a consumer warp for the flags of dropout and the keys of its generator.

        0: there is no dropout, or it draws flags in registers.
        """
        if problem.dropout_p == 0 or self.by_gradient or problem.has_q_positions:
            return 0
        return self.tile_m + KEY_VECTORS  # two patches of 16 queries are 32 vectors

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a thread block: what `BackwardSm90.kernel` allocates, in its order."""
        d, dv = self.head_dims(problem)
        keys = ROWS_PER_WARPGROUP * self.row_blocks
        kv = keys * (d + dv)
        q_do = self.tile_m * (self.q_stages * d + self.do_stages * dv)
        ds = self.ds_tiles * ROWS_PER_WARPGROUP * self.tile_m
        p = keys * self.tile_m * self.p_copies(problem)
        if self.paired:
            # P lies where dS will be; the other thread block's dS, and its keys in half of the columns of dQ
            p = keys * self.tile_m + keys * 2 * self.dq_columns(problem)
        stats = self.q_stages * STAT_ROWS * self.tile_m
        # full and empty of K, V and each buffer of Q and dO; a slot with both in the queue of tiles; full of dS and P,
        # and in pairs empty of dS
        barriers = 2 * (2 + self.q_stages + self.do_stages) + (3 if self.dynamic_tiles else 0)
        barriers += 3 if self.paired else 2 * DS_BUFFERS * self.query_shares
        if self.adds_in_turns(problem):
            barriers += 4 * self.num_warpgroups
        flags = 16 * self.consumer_warps * self.flag_vectors(problem)
        total = 2 * (kv + q_do + ds + p) + 4 * stats + flags + 8 * barriers
        if self.rows_in_background(problem):
            # the ends of two tiles, full of each warp's scratch; that of the background warps
            total += 8 * (2 + 4 + self.consumer_warps)
            total = -(-total // 128) * 128 + 2 * self.rows_bytes  # which are aligned
        return total

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a consumer thread for dK, dV, S or dP, P (with a softcap also times its slope) and dS.

        A warpgroup that is the only one computes dQ of all columns, which are counted, too.
        """
        d, dv = self.head_dims(problem)
        words = self.tile_m // 4 * (2 if problem.softcap is None else 3)
        dq = d // 2 if self.num_warpgroups == 1 else 0
        return (max(d, dv) if self.by_gradient else d + dv) // 2 + self.tile_m // 2 + words + dq

    def check(self, problem: AttentionProblem, arch: str = HOPPER) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        _require_hopper(arch)
        if self.num_warpgroups not in (1, 2):
            raise UnsupportedError(f"num_warpgroups: expected 1 or 2, got {self.num_warpgroups}")
        takes_two = self.by_gradient or self.by_queries or self.private_dq or self.tile_m != 64
        if self.num_warpgroups == 1 and takes_two:
            raise UnsupportedError(
                "num_warpgroups: expected 2 with by_gradient, by_queries, private_dq or tile_m=128, got 1"
            )
        if self.tile_m not in (64, 128):
            raise UnsupportedError(f"tile_m: expected 64 or 128, got {self.tile_m}")
        if self.by_gradient and self.tile_m != 64:
            raise UnsupportedError(f"tile_m: expected 64 with by_gradient, got {self.tile_m}")
        if (self.by_gradient or self.by_queries) and self.overlap_gradients:
            raise UnsupportedError("overlap_gradients: expected False with by_gradient and by_queries")
        if self.by_queries:
            self._check_by_queries(problem)
        can_be_rings = self.permits_rings(problem) and not self.descending_turns
        if self.ring_lag < 0 or (self.adds_in_rings(problem) and not can_be_rings):
            expected = "0 where tiles differ or are drawn, or with descending_turns"
            raise UnsupportedError(f"ring_lag: expected {expected}, got {self.ring_lag}")
        if self.adds_descending(problem) and problem.has_backward_lists:
            raise UnsupportedError(f"descending_turns: expected False with {problem.modifiers_named}")
        if self.paired:
            self._check_paired(problem)
        if self.heads_together and (problem.deterministic or problem.is_packed or self.private_dq):
            raise UnsupportedError("heads_together: expected no deterministic or packed problem and no private_dq")
        if self.private_dq and problem.has_modifiers:
            raise UnsupportedError(f"private_dq: expected False with {problem.modifiers_named}")
        if self.private_dq and (self.by_gradient or self.dynamic_tiles or problem.is_packed):
            raise UnsupportedError(
                f"private_dq: expected by_gradient and dynamic_tiles off and no packed sequences, got {self}"
            )
        if self.q_stages < 2:
            raise UnsupportedError(
                f"q_stages: expected 2 or more, for S of the next block is issued before Q is free, got {self.q_stages}"
            )
        if self.do_stages < 1:
            raise UnsupportedError(f"do_stages: expected 1 or more, got {self.do_stages}")
        if max(problem.head_dim, problem.head_dim_v) > 128 and not self.by_gradient:
            got = f"{problem.head_dim} and {problem.head_dim_v}"
            raise UnsupportedError(f"head_dim: expected up to 128 without by_gradient, got {got}")
        # of each thread block on a multiprocessor, the system takes 1 KiB
        needed, limit = self.smem_bytes(problem), (SMEM_BYTES + 1024) // self.blocks_per_sm - 1024
        if needed > limit:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {limit}")
        registers, available = self.accumulator_registers(problem), self.registers[1]
        if registers > available - 32:
            needs = f"{self} needs {registers} for dK, dV, S, P and dS"
            raise UnsupportedError(f"registers: {needs}, a thread has {available} and addresses take 32 of them")

    def permits_rings(self, problem: AttentionProblem) -> bool:
        """Whether all tiles of keys have the same query blocks, and thread blocks that are known beforehand."""
        is_even = problem.mask.is_full and not (problem.is_packed or problem.has_seqused_k or problem.has_intervals)
        return is_even and not self.dynamic_tiles

    def _check_by_queries(self, problem: AttentionProblem) -> None:
        if self.by_gradient or self.private_dq or self.tile_m != 64:
            raise UnsupportedError(f"by_queries: expected tile_m=64, no by_gradient and no private_dq, got {self}")
        # Buffers belong to one warpgroup each: one that had not seen a phase of a barrier would mistake the next one
        # for it. While a warpgroup has a block of Q it waits for its next one.
        if self.q_stages < 4 or self.q_stages % 2 or self.do_stages % 2:
            got = f"{self.q_stages} and {self.do_stages}"
            raise UnsupportedError(f"by_queries: expected even q_stages and do_stages, from 4 and 2 on, got {got}")
        if problem.deterministic:
            raise UnsupportedError("by_queries: expected a problem that is not deterministic")

    def _check_paired(self, problem: AttentionProblem) -> None:
        if not self.by_gradient or self.private_dq:
            raise UnsupportedError(f"paired: expected by_gradient and no private_dq, got {self}")
        if (d := self.head_dims(problem)[0]) not in (192, 256):
            raise UnsupportedError(f"paired: expected a head_dim above 128, got {d}")
        if self.p_copies(problem) > 1:
            raise UnsupportedError("paired: expected no softcap with gradients of slopes or of a bias")

"""How one launch is computed: tile sizes and the choices that the FlashAttention-3 paper ablates."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UnsupportedError
from ..problem import AttentionProblem

HEAD_DIM_TILES = (64, 96, 128, 192, 256)
ROWS_PER_WARPGROUP = 64  # the M of a wgmma
SMEM_BYTES = 227 * 1024  # of a Hopper thread block
# Registers of a producer and of a consumer thread, by number of consumer warpgroups: 64 Ki registers in all.
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160)}


def head_dim_tile(head_dim: int) -> int:
    """The head dim that kernels are compiled for: TMA fills the columns in between with zeros."""
    return next(tile for tile in HEAD_DIM_TILES if tile >= head_dim)


@dataclass(frozen=True)
class ForwardConfig:
    """How one forward launch on Hopper is tiled and overlapped: speed and summation order, never what is asked for.

    Attributes:
        tile_n: keys of one step of the main loop.
        num_warpgroups: consumer warpgroups, 64 query rows each.
        num_stages: buffers in flight for K, and as many for V.
        q_stages: buffers for Q; with 2 the next tile's Q is loaded while this one is still in use.
        q_in_registers: hold Q in registers instead of reading it from shared memory for every QK^T.
        overlap_gemm_softmax: 2-stage pipelining inside a warpgroup: QK^T of the next keys runs during this softmax.
        overlap_tiles: the same across tiles: the first QK^T of the next tile runs with the last PV of this one.
        pingpong: warpgroups take turns with the tensor cores, so that one's softmax hides behind another's GEMMs.
        rescale_threshold: powers of two that a row maximum may outgrow its reference by before acc_o is rescaled;
            0 = rescale in every step.
        exp2_fma_period: every so many-th exponential goes to the FMA pipe as a cubic; 0 = none.
        score_buffers: 1, or 2 = 3-stage pipelining: a step's keys in two halves, each with its accumulator of scores;
            the QK^T of one half runs during the softmax of the other.
        rescale_beside_qk: rescale acc_o after the next QK^T has been issued instead of before it.
        softmax_before_wait: keep the assembler from moving exponentials behind the wait for PV.
        longest_first: number the tiles by length (only meaningful where they differ), in L2-sized sections of heads.
        dynamic_tiles: thread blocks draw their tiles from a queue instead of taking every so many-th one.
        pack_gqa: the query heads of one kv head share a tile, see blocks/pack_gqa.py.
    """

    tile_n: int
    num_warpgroups: int = 2
    num_stages: int = 2
    q_stages: int = 1
    q_in_registers: bool = False
    overlap_gemm_softmax: bool = True
    overlap_tiles: bool = True
    pingpong: bool = True
    rescale_threshold: float = 0.0
    exp2_fma_period: int = 0
    score_buffers: int = 1
    rescale_beside_qk: bool = False
    softmax_before_wait: bool = False
    longest_first: bool = True
    dynamic_tiles: bool = False
    pack_gqa: bool = False

    @property
    def tile_m(self) -> int:
        return ROWS_PER_WARPGROUP * self.num_warpgroups

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_warpgroups + 1)

    def group(self, problem: AttentionProblem) -> int:
        """Query heads that share a tile."""
        return problem.qhead_per_kvhead if self.pack_gqa else 1

    def positions(self, problem: AttentionProblem) -> int:
        """Query positions of a tile."""
        return ROWS_PER_WARPGROUP // self.group(problem) * self.num_warpgroups

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of the tiles and their barriers."""
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        q = self.q_stages * self.tile_m * d
        kv = self.num_stages * self.tile_n * (d + dv)
        return 2 * (q + kv) + 1024

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a consumer thread for S, P, O (and Q): the rest is left for addresses and the softmax."""
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        p = self.tile_n // (4 * self.score_buffers)
        return self.tile_n // 2 + p + dv // 2 + (d // 4 if self.q_in_registers else 0)

    def check(self, problem: AttentionProblem) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        if self.num_warpgroups not in REGISTERS:
            raise UnsupportedError(f"num_warpgroups: expected 1, 2 or 3, got {self.num_warpgroups}")
        if self.score_buffers not in (1, 2):
            raise UnsupportedError(f"score_buffers: expected 1 or 2, got {self.score_buffers}")
        keys, rest = divmod(self.tile_n, self.score_buffers)  # of one wgmma
        if rest or keys % 16 or not 16 <= keys <= 256:
            raise UnsupportedError(f"tile_n: expected {self.score_buffers} x 16, 32, ... 256, got {self.tile_n}")
        if self.num_stages < 1 or self.q_stages not in (1, 2):
            raise UnsupportedError(f"stages: expected K/V >= 1 and Q 1 or 2, got {self.num_stages} and {self.q_stages}")
        if self.overlap_gemm_softmax and self.num_stages < 2:
            raise UnsupportedError("num_stages: overlap_gemm_softmax needs 2, got 1")
        if self.overlap_tiles and not self.overlap_gemm_softmax:
            raise UnsupportedError("overlap_tiles: needs overlap_gemm_softmax")
        if self.rescale_beside_qk and not self.overlap_gemm_softmax:
            raise UnsupportedError("rescale_beside_qk: needs overlap_gemm_softmax")
        if self.score_buffers == 2 and not self.overlap_tiles:
            raise UnsupportedError("score_buffers: 2 need overlap_tiles")
        if self.group(problem) > ROWS_PER_WARPGROUP:
            raise UnsupportedError(
                f"pack_gqa: expected up to {ROWS_PER_WARPGROUP} query heads a kv head, got {self.group(problem)}"
            )
        needed = self.smem_bytes(problem)
        if needed > SMEM_BYTES:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {SMEM_BYTES}")
        registers, available = self.accumulator_registers(problem), REGISTERS[self.num_warpgroups][1]
        if registers > available - 16:
            raise UnsupportedError(f"registers: {self} needs {registers} for S, P and O, a thread has {available}")

"""How one launch is computed: tile sizes and the choices that the FlashAttention-3 paper ablates."""

from __future__ import annotations

from ast import literal_eval
from dataclasses import dataclass, fields
from typing import ClassVar, TypeVar

from ..errors import UnsupportedError
from ..problem import AttentionProblem

HEAD_DIM_TILES = (64, 96, 128, 192, 256)
ROWS_PER_WARPGROUP = 64  # the M of a wgmma
HOPPER = "sm_90a"
SMEM_BYTES = 227 * 1024  # of a Hopper thread block
MAX_RESCALE_THRESHOLD = 15.0
DS_BUFFERS = 2  # of the backward
STAT_ROWS = 2  # lse and delta of a query
# Registers of a producer and of a consumer thread, by number of consumer warpgroups. A launch gives every thread the
# same multiple of 8, of 64 Ki in all; setmaxnreg only moves them (asking for more than are there waits forever).
REGISTERS = {1: (56, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}


def head_dim_tile(head_dim: int) -> int:
    """The head dim that kernels are compiled for: TMA fills the columns in between with zeros."""
    return next(tile for tile in HEAD_DIM_TILES if tile >= head_dim)


def column_block(head_dim: int, element_bytes: int = 2) -> int:
    """Columns of a tile in shared memory that lie side by side: the widest swizzled row that divides it."""
    widths = (width // element_bytes for width in (128, 64, 32))
    return next(columns for columns in widths if head_dim % columns == 0)


def _require_hopper(arch: str) -> None:
    if arch != HOPPER:
        raise UnsupportedError(f"architecture: expected {HOPPER}, got {arch}")


Config = TypeVar("Config", bound="LaunchConfig")


@dataclass(frozen=True)
class LaunchConfig:
    """What the configurations of all kernels have in common: fields of plain types, and a text that holds them.

    Raises: TypeError for a value of another type than its field's.
    """

    # All fields as "name=value ...", which is how a torch operator takes a configuration. Not a field, and made at
    # once: torch.compile can read it from a configuration that exists already, but not put it together.
    text: ClassVar[str]

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float" and type(value) is int:
                value = float(value)
                object.__setattr__(self, field.name, value)
            if type(value).__name__ not in str(field.type).replace("None", "NoneType").split(" | "):
                raise TypeError(f"{field.name}: expected {field.type}, got {value!r}")
        object.__setattr__(self, "text", " ".join(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)))

    @classmethod
    def from_text(cls: type[Config], text: str) -> Config:
        """The configuration whose `text` this is."""
        return cls(**{name: literal_eval(value) for name, value in (pair.split("=") for pair in text.split())})

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Whether a launch of this problem can have this configuration on a GPU of this architecture.

        Raises: UnsupportedError, naming the bound, what is needed and what there is.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class ForwardConfig(LaunchConfig):
    """How one forward launch on Hopper is tiled and overlapped: speed and summation order, never what is asked for.

    Attributes:
        tile_n: keys of one step of the main loop.
        num_warpgroups: consumer warpgroups (1 to 4), 64 query rows each.
        num_stages: buffers for K and V, see v_stages.
        v_stages: buffers for V if they are not as many as those for K; 0 = num_stages.
        q_stages: buffers for Q; with 2 the next tile's Q is loaded while this one is still in use.
        q_in_registers: hold Q in registers instead of reading it from shared memory for every QK^T.
        warp_specialized: a producer warp issues all loads and gives its warpgroup's registers to the consumers; else a
            consumer warp issues them between its own steps.
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
        cluster_size: thread blocks that share their loads of K and V (TMA multicast): neighbouring m_blocks of a head,
            step by step in the same key block.
        dynamic_tiles: thread blocks draw their tiles from a queue instead of taking every so many-th one.
        pack_gqa: the query heads of one kv head share a tile, see blocks/pack_gqa.py.
        two_level_sums: P V of a step has an accumulator of its own, which the FMA pipe adds to O: in FP8 the tensor
            cores sum with fewer bits than float32 has.

    Raises: TypeError for a value of another type than its field's.
    """

    tile_n: int
    num_warpgroups: int = 2
    num_stages: int = 2
    v_stages: int = 0
    q_stages: int = 1
    q_in_registers: bool = False
    warp_specialized: bool = True
    overlap_gemm_softmax: bool = True
    overlap_tiles: bool = True
    pingpong: bool = True
    rescale_threshold: float = 0.0
    exp2_fma_period: int = 0
    score_buffers: int = 1
    rescale_beside_qk: bool = False
    softmax_before_wait: bool = False
    longest_first: bool = True
    cluster_size: int = 1
    dynamic_tiles: bool = False
    pack_gqa: bool = False
    two_level_sums: bool = False

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

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of the tiles and their barriers."""
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        q = self.q_stages * self.tile_m * d
        k_stages, v_stages = self.kv_stages
        kv = self.tile_n * (k_stages * d + v_stages * dv)
        return problem.dtype.itemsize * (q + kv) + 1024

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a consumer thread for S, P, O (and Q): the rest is left for addresses and the softmax."""
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        p = self.tile_n * problem.dtype.itemsize // (8 * self.score_buffers)
        o = dv if self.two_level_sums else dv // 2
        return self.tile_n // 2 + p + o + (d // 4 if self.q_in_registers else 0)

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
        if self.overlap_tiles and not self.overlap_gemm_softmax:
            raise UnsupportedError("overlap_tiles: needs overlap_gemm_softmax")
        if self.rescale_beside_qk and not self.overlap_gemm_softmax:
            raise UnsupportedError("rescale_beside_qk: needs overlap_gemm_softmax")
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
        if self.exp2_fma_period < 0:
            raise UnsupportedError(f"exp2_fma_period: expected 0 (none) or more, got {self.exp2_fma_period}")
        if self.cluster_size not in (1, 2):
            raise UnsupportedError(f"cluster_size: expected 1 or 2, got {self.cluster_size}")
        if self.cluster_size > 1 and (self.dynamic_tiles or problem.is_packed):
            raise UnsupportedError("cluster_size: above 1 it takes neither dynamic_tiles nor packed sequences")
        if self.group(problem) > ROWS_PER_WARPGROUP:
            raise UnsupportedError(
                f"pack_gqa: expected up to {ROWS_PER_WARPGROUP} query heads a kv head, got {self.group(problem)}"
            )
        if self.two_level_sums and (self.score_buffers != 1 or self.rescale_threshold != 0):
            raise UnsupportedError("two_level_sums: needs score_buffers=1 and rescale_threshold=0")
        if problem.quantization is not None:
            self._check_fp8()
        needed = self.smem_bytes(problem)
        if needed > SMEM_BYTES:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {SMEM_BYTES}")
        # without a producer to take them from, as many as the launch gives
        available = REGISTERS[self.num_warpgroups][1] if self.warp_specialized else 65536 // self.num_threads // 8 * 8
        registers = self.accumulator_registers(problem)
        if registers > available - 16:
            raise UnsupportedError(f"registers: {self} needs {registers} for S, P and O, a thread has {available}")

    def _check_fp8(self) -> None:
        """What the GEMMs and scales of FP8 take of the choices."""
        if self.tile_n % 64 and self.tile_n != 32:
            raise UnsupportedError(f"tile_n: expected 32, 64, 128, 192 or 256 in FP8 (blocks of 64), got {self.tile_n}")
        if self.q_in_registers or self.score_buffers != 1:
            raise UnsupportedError("q_in_registers, score_buffers: expected False and 1 in FP8")
        if self.rescale_threshold != 0:
            raise UnsupportedError(
                f"rescale_threshold: expected 0 in FP8, whose P has no room above 1, got {self.rescale_threshold}"
            )


# Shared memory of a thread block, bytes; a tile of 16 query rows is the M of a warp-wide mma.
SMEM_BYTES_BY_ARCH = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_87": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": SMEM_BYTES,
    "sm_90a": SMEM_BYTES,
    "sm_100a": SMEM_BYTES,
    "sm_103a": SMEM_BYTES,
    "sm_110a": SMEM_BYTES,
    "sm_120a": 99 * 1024,
    "sm_121a": 99 * 1024,
}
ROWS_PER_MMA = 16
# where float32 in global memory are added to one by one
SCALAR_ADDS = ("sm_80", "sm_86", "sm_87", "sm_89")
MAX_REGISTERS = 255  # of a thread
VECTOR_BYTES = (16, 8, 4, 2)  # of a copy


def threads_per_row(columns: int, element_bytes: int, vector_bytes: int) -> int:
    """Threads that load a row side by side, in copies of vector_bytes: at most a warp, and within a swizzled row."""
    return min(32, column_block(columns, element_bytes) * element_bytes // vector_bytes)


@dataclass(frozen=True)
class ForwardConfigSm80(LaunchConfig):
    """How one forward launch with the instructions of Ampere is tiled and overlapped.

    Attributes:
        tile_m: query rows of a thread block, 16, 32, ... for each warp.
        tile_n: keys of one step of the main loop.
        num_warps: each takes every num_warps-th 16 rows of a tile.
        num_stages: buffers for K and for V.
        prefetch: loads run beside the GEMMs, from one buffer, too (K of the next step beside softmax and PV, V beside
            QK^T). Else a step loads its K and V, waits for them and computes.
        swizzle: 16-byte pieces of shared memory rows are exchanged so that ldmatrix meets no bank conflict.
        q_in_registers: hold Q in registers instead of reading it from shared memory in every step; of 16-bit types.
        rescale_threshold: powers of two that a row maximum may outgrow its reference by before acc_o is rescaled;
            0 = rescale in every step.
        exp2_fma_period: every so many-th exponential goes to the FMA pipe as a cubic, too coarse for float32; 0 = none.
        fold_scale: softmax_scale is part of the exponent's factor, one FMA a score; else scores are multiplied first.
        longest_first: number the tiles by length (only meaningful where they differ), in L2-sized sections of heads.
        fragments_ahead: of 16-bit types: ldmatrix of a k-step stands before the mma of the step before; else those of
            all steps before the first mma (the assembler may move them, within its registers).
        fresh_sums: of float32: sums of 16 terms leave the tensor cores, which cut off, and are added up by the FMA
            pipe, which rounds; else S and O stay in the tensor cores.
        pack_gqa: the query heads of one kv head share a tile, see blocks/pack_gqa.py.
        vector_bytes: 16, 8, 4 or 2 of a copy from and to global memory; not a choice but what addresses, strides and
            head dims are multiples of.
    """

    tile_m: int = 64
    tile_n: int = 64
    num_warps: int = 4
    num_stages: int = 2
    prefetch: bool = True
    swizzle: bool = True
    q_in_registers: bool = True
    rescale_threshold: float = 0.0
    exp2_fma_period: int = 0
    fold_scale: bool = True
    longest_first: bool = True
    fragments_ahead: bool = True
    fresh_sums: bool = True
    pack_gqa: bool = False
    vector_bytes: int = 16

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def loading_threads(self) -> int:
        """Threads that load a tile of K and V together."""
        return self.num_threads

    @property
    def block_keys(self) -> int:
        """Keys of a step of the thread block."""
        return self.tile_n

    @property
    def num_buffers(self) -> int:
        """For tile_n keys each, and as many for their values."""
        return self.num_stages

    @property
    def m_tiles(self) -> int:
        """Times 16 query rows of a warp."""
        return self.tile_m // (ROWS_PER_MMA * self.num_warps)

    def group(self, problem: AttentionProblem) -> int:
        """Query heads that share a tile."""
        return problem.qhead_per_kvhead if self.pack_gqa else 1

    def positions(self, problem: AttentionProblem) -> int:
        """Query positions of a tile."""
        return self.tile_m // self.group(problem)

    def smem_bytes(self, problem: AttentionProblem) -> int:
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        kv_bytes = problem.kv_itemsize * self.num_buffers * self.tile_n * (d + dv)
        return problem.dtype.itemsize * self.tile_m * d + kv_bytes

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a thread for S, P, O (and Q): the rest is left for fragments of K and V, addresses, softmax."""
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        s, q = self.tile_n // 2, d // 4 if self.q_in_registers else 0
        # P in 16 bits beside S; in float32 in its place, and beside it the sums of 32 columns
        p = s // 2 if problem.dtype.itemsize == 2 else 16 * self.fresh_sums
        return self.m_tiles * (s + p + dv // 2 + q)

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        if arch not in SMEM_BYTES_BY_ARCH:
            raise UnsupportedError(f"architecture: expected one of {', '.join(SMEM_BYTES_BY_ARCH)}, got {arch}")
        if self.num_warps not in (1, 2, 4, 8):
            raise UnsupportedError(f"num_warps: expected 1, 2, 4 or 8, got {self.num_warps}")
        rows = ROWS_PER_MMA * self.num_warps
        if self.tile_m < rows or self.tile_m % rows:
            raise UnsupportedError(f"tile_m: expected a multiple of {rows} ({self.num_warps} warps), got {self.tile_m}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise UnsupportedError(f"tile_n: expected 16, 32, ... 256, got {self.tile_n}")
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        element_bytes = problem.dtype.itemsize
        if self.vector_bytes not in VECTOR_BYTES or self.vector_bytes < element_bytes:
            raise UnsupportedError(f"vector_bytes: expected 16, 8, 4 or 2 of whole elements, got {self.vector_bytes}")
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size * problem.kv_itemsize % self.vector_bytes:
                raise UnsupportedError(f"vector_bytes: {self.vector_bytes} do not divide rows of {name} {size}")
        row_bytes = {d * element_bytes, d * problem.kv_itemsize, dv * problem.kv_itemsize}
        for columns in (n // element_bytes for n in row_bytes):
            # a pass of all threads over a tile is so many whole rows
            in_a_pass = self.loading_threads // threads_per_row(columns, element_bytes, self.vector_bytes)
            if self.tile_m % in_a_pass or self.tile_n % in_a_pass:
                raise UnsupportedError(
                    f"tile_m, tile_n: expected multiples of {in_a_pass}, the rows that {self.loading_threads} threads"
                    f" load at once, got {self.tile_m} and {self.tile_n}"
                )
        if self.num_stages < 1:
            raise UnsupportedError(f"num_stages: expected 1 or more, got {self.num_stages}")
        if self.num_stages > 1 and not self.prefetch:
            raise UnsupportedError(f"num_stages: expected 1 without prefetch, got {self.num_stages}")
        if not 0 <= self.rescale_threshold <= MAX_RESCALE_THRESHOLD:
            expected = f"0 to {MAX_RESCALE_THRESHOLD:g}, or probabilities outgrow float16"
            raise UnsupportedError(f"rescale_threshold: expected {expected}, got {self.rescale_threshold}")
        if self.exp2_fma_period < 0:
            raise UnsupportedError(f"exp2_fma_period: expected 0 (none) or more, got {self.exp2_fma_period}")
        if self.group(problem) > self.tile_m:
            raise UnsupportedError(
                f"pack_gqa: expected up to tile_m = {self.tile_m} query heads a kv head, got {self.group(problem)}"
            )
        if element_bytes == 4 and (self.exp2_fma_period or self.q_in_registers):
            raise UnsupportedError(
                f"exp2_fma_period, q_in_registers: expected 0 and False for float32, got {self.exp2_fma_period} and"
                f" {self.q_in_registers}"
            )
        needed, available = self.smem_bytes(problem), SMEM_BYTES_BY_ARCH[arch]
        if needed > available:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {available}")
        registers = self.accumulator_registers(problem)
        if registers > MAX_REGISTERS - 40:
            raise UnsupportedError(
                f"registers: {self} needs {registers} for S, P, O and Q, a thread has {MAX_REGISTERS}"
            )


@dataclass(frozen=True)
class BackwardConfig(LaunchConfig):
    """How one backward launch on Hopper is tiled and overlapped.

    Attributes:
        tile_m: query rows of one step of the main loop, 64 or 128.
        num_warpgroups: consumer warpgroups: 2.
        by_gradient: one warpgroup has dV and the other dK, of the same 64 keys; else each has both, of its own 64 keys.
        q_stages, do_stages: buffers for Q and for dO.
        private_dq: a thread block takes all tiles of keys of a kv head, one after the other. It sums dQ by itself: no
            zeros before, no other thread block's additions, and the last tile writes dq. For many heads of short
            sequences.
        background_zeros: idle warps write the zeros that dQ is added to, beside tiles that need others; else the kernel
            before does. Not with private_dq or packed sequences.
        pingpong: warpgroups take turns with the tensor cores, so that one's exponentials hide behind another's GEMMs.
        longest_first: number the tiles of keys by length (only meaningful where they differ), in L2-sized sections of
            heads.
        dynamic_tiles: thread blocks draw their tiles from a queue instead of taking every so many-th one.
    """

    tile_m: int = 64
    num_warpgroups: int = 2
    by_gradient: bool = False
    q_stages: int = 2
    do_stages: int = 2
    private_dq: bool = False
    background_zeros: bool = True
    pingpong: bool = True
    longest_first: bool = True
    dynamic_tiles: bool = False

    # of a copy: what TMA reads is aligned
    vector_bytes: ClassVar[int] = 16

    @property
    def key_tiles(self) -> int:
        """Tiles of 64 keys in a tile of the grid."""
        return 1 if self.by_gradient else self.num_warpgroups

    @property
    def tile_n(self) -> int:
        return ROWS_PER_WARPGROUP * self.key_tiles

    @property
    def vector_adds(self) -> bool:
        """Whether four values of a dQ are added at once, and lie side by side."""
        return True

    def adds_in_turns(self, problem: AttentionProblem) -> bool:
        """Whether tiles of keys add to a dQ in ascending order: with private_dq they do by themselves."""
        return problem.deterministic and not self.private_dq

    def zeroes_ahead(self, problem: AttentionProblem) -> bool:
        """Whether idle warps of the main kernel write the zeros that dQ is added to."""
        # packed: the first tiles are those of all heads, whose zeros would all have to be there
        return self.background_zeros and not self.private_dq and not problem.is_packed

    def zeroes_before(self, problem: AttentionProblem) -> bool:
        """Whether the kernel before writes the zeros; with private_dq there are none."""
        return not self.private_dq and not self.zeroes_ahead(problem)

    def dq_columns(self, problem: AttentionProblem) -> int:
        """Columns of the pieces (64 rows each) that a dQ of tile_m rows is computed in."""
        if self.by_gradient:
            return 64
        return self.head_dims(problem)[0] * self.tile_m // ROWS_PER_WARPGROUP // self.num_warpgroups

    def head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """What the kernel is compiled for: no 96, whose halves are no whole column blocks of shared memory."""
        d, dv = (head_dim_tile(d) for d in (problem.head_dim, problem.head_dim_v))
        return (128 if d == 96 else d), (128 if dv == 96 else dv)

    @property
    def num_threads(self) -> int:
        return 128 * (self.num_warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        return 4 * self.num_warpgroups

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a thread block: what `BackwardSm90.kernel` allocates, in its order."""
        d, dv = self.head_dims(problem)
        kv = self.tile_n * (d + dv)
        q_do = self.tile_m * (self.q_stages * d + self.do_stages * dv)
        ds = DS_BUFFERS * self.tile_n * self.tile_m
        p = self.tile_n * self.tile_m if self.by_gradient else 0
        stats = self.q_stages * STAT_ROWS * self.tile_m
        # full and empty of K, V and each buffer of Q and dO; a slot with both in the queue of tiles; full of dS and P
        barriers = 2 * (2 + self.q_stages + self.do_stages) + (3 if self.dynamic_tiles else 0) + 2 * DS_BUFFERS
        return 2 * (kv + q_do + ds + p) + 4 * stats + 8 * barriers

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a consumer thread for dK, dV, S or dP, P (with a softcap also times its slope) and dS."""
        d, dv = self.head_dims(problem)
        words = self.tile_m // 4 * (2 if problem.softcap is None else 3)
        return (max(d, dv) if self.by_gradient else d + dv) // 2 + self.tile_m // 2 + words

    def check(self, problem: AttentionProblem, arch: str = HOPPER) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        _require_hopper(arch)
        if self.num_warpgroups != 2:  # each has a half of dQ, or of the gradients
            raise UnsupportedError(f"num_warpgroups: expected 2, got {self.num_warpgroups}")
        if self.tile_m not in (64, 128):
            raise UnsupportedError(f"tile_m: expected 64 or 128, got {self.tile_m}")
        if self.by_gradient and self.tile_m != 64:
            raise UnsupportedError(f"tile_m: expected 64 with by_gradient, got {self.tile_m}")
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
        needed = self.smem_bytes(problem)
        if needed > SMEM_BYTES:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {SMEM_BYTES}")
        registers, available = self.accumulator_registers(problem), REGISTERS[self.num_warpgroups][1]
        if registers > available - 32:
            needs = f"{self} needs {registers} for dK, dV, S, P and dS"
            raise UnsupportedError(f"registers: {needs}, a thread has {available} and addresses take 32 of them")


@dataclass(frozen=True)
class BackwardConfigSm80(LaunchConfig):
    """How one backward launch with the instructions of Ampere is tiled and overlapped.

    All GEMMs of a step share the warps out in their own ways: over the rows of their result, and what is left over its
    columns. Where the warps lie along the keys only, in S and dP as in dK and dV, P and dS are operands as they are in
    registers, and only dQ needs dS from shared memory.

    In float32 all operands come from shared memory, P and dS, too, whichever way the warps lie.

    Attributes:
        tile_m: query rows of one step of the main loop.
        tile_n: keys of a thread block.
        num_warps: of a thread block.
        num_stages: buffers for Q and dO each; with one of them a step loads, waits and computes.
        s_key_warps: warps along the keys in S^T = K Q^T and dP^T = V dO^T (the others along the queries).
        dkv_key_warps: warps along the keys in dK and dV (the others along the head dim).
        dq_query_warps: warps along the queries in dQ (the others along the head dim).
        dq_pieces: dQ is computed so many columns at a time, if all of them are too many registers.
        one_score_buffer: dS is written where P was, in shared memory, at the price of two more barriers a step.
        vector_adds: four values are added to the accumulator of dQ at once, which GPUs before Hopper cannot.
        longest_first: number the tiles of keys by length (only meaningful where they differ), in L2-sized sections of
            heads.
        vector_bytes: 16, 8, 4 or 2 of a copy from and to global memory; not a choice but what addresses, strides and
            head dims are multiples of.
    """

    tile_m: int = 64
    tile_n: int = 128
    num_warps: int = 8
    num_stages: int = 2
    s_key_warps: int = 8
    dkv_key_warps: int = 8
    dq_query_warps: int = 4
    dq_pieces: int = 1
    one_score_buffer: bool = False
    vector_adds: bool = False
    longest_first: bool = True
    vector_bytes: int = 16

    # of every configuration here, where Hopper's have a choice
    private_dq: ClassVar[bool] = False

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    @property
    def consumer_warps(self) -> int:
        return self.num_warps

    def keeps_p(self, problem: AttentionProblem) -> bool:
        """Whether P and dS are operands of dV and dK as they are in registers."""
        return problem.dtype.itemsize == 2 and self.s_key_warps == self.dkv_key_warps == self.num_warps

    def adds_in_turns(self, problem: AttentionProblem) -> bool:
        """Whether tiles of keys add to a dQ in ascending order."""
        return problem.deterministic

    def zeroes_ahead(self, problem: AttentionProblem) -> bool:
        return False

    def zeroes_before(self, problem: AttentionProblem) -> bool:
        """The kernel before the main one writes the zeros that dQ is added to."""
        return True

    def head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """What the kernel is compiled for: 96 not beside a wider one, for whose sake warps share columns by halves.

        In float32, where a warp has 32 columns or a multiple of them, no 96, and 192 not beside 256.
        """
        d, dv = (head_dim_tile(d) for d in (problem.head_dim, problem.head_dim_v))
        if problem.dtype.itemsize == 4:
            d, dv = (256 if n == 192 and max(d, dv) == 256 else max(n, 128) if n == 96 else n for n in (d, dv))
        elif max(d, dv) > 96:
            d, dv = (max(n, 128) if n == 96 else n for n in (d, dv))
        return d, dv

    def dq_columns(self, problem: AttentionProblem) -> int:
        """Columns that lie together in the accumulator of dQ, for 16 rows each: all of them."""
        return self.head_dims(problem)[0]

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a thread block: what `BackwardSm80.kernel` allocates, in its order."""
        d, dv = self.head_dims(problem)
        tiles = (self.tile_n + self.num_stages * self.tile_m) * (d + dv)
        ds_and_p = self.tile_n * self.tile_m * (1 if self.keeps_p(problem) or self.one_score_buffer else 2)
        stats = self.num_stages * STAT_ROWS * self.tile_m
        return problem.dtype.itemsize * (tiles + ds_and_p) + 4 * stats + (4 if problem.deterministic else 0)

    def accumulator_registers(self, problem: AttentionProblem) -> int:
        """Registers of a thread for dK and dV, and beside them P (with a softcap also times its slope) and dP, or dS
        and dQ; in float32 also the parts of the fragments and the sums of 32 columns."""
        d, dv = self.head_dims(problem)
        s = self.tile_m * self.tile_n // self.num_threads
        words = s * problem.dtype.itemsize // 4 * (1 if problem.softcap is None else 2)
        dq = self.tile_m * d // (self.num_threads * self.dq_pieces) + (s // 2 if self.keeps_p(problem) else 0)
        gradients = self.tile_n * (d + dv) // self.num_threads
        if problem.dtype.itemsize == 2:
            return gradients + max(s + words, dq)
        s_rows, dkv_rows, dq_rows = (
            rows // (ROWS_PER_MMA * warps)
            for rows, warps in (
                (self.tile_n, self.s_key_warps),
                (self.tile_n, self.dkv_key_warps),
                (self.tile_m, self.dq_query_warps),
            )
        )
        # of 16 rows 16 registers for parts of A and 4 for each of up to four sums, which need 8 for parts of B
        in_s = min(4, self.tile_m * self.s_key_warps // (8 * self.num_warps))
        return gradients + max(
            s + words + s_rows * (16 + 4 * in_s) + 8 * in_s, 32 * dkv_rows + 32, dq + 32 * dq_rows + 32
        )

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        if arch not in SMEM_BYTES_BY_ARCH:
            raise UnsupportedError(f"architecture: expected one of {', '.join(SMEM_BYTES_BY_ARCH)}, got {arch}")
        if self.num_warps not in (1, 2, 4, 8):
            raise UnsupportedError(f"num_warps: expected 1, 2, 4 or 8, got {self.num_warps}")
        if self.tile_m not in (16, 32, 64, 128):
            raise UnsupportedError(f"tile_m: expected 16, 32, 64 or 128, got {self.tile_m}")
        element_bytes = problem.dtype.itemsize
        if self.vector_bytes not in VECTOR_BYTES or self.vector_bytes < element_bytes:
            raise UnsupportedError(f"vector_bytes: expected 16, 8, 4 or 2 of whole elements, got {self.vector_bytes}")
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size * element_bytes % self.vector_bytes:
                raise UnsupportedError(f"vector_bytes: {self.vector_bytes} do not divide rows of {name} {size}")
        if self.num_stages not in (1, 2):
            raise UnsupportedError(f"num_stages: expected 1 or 2, got {self.num_stages}")
        if self.dq_pieces not in (1, 2, 3, 4) or (
            self.dq_pieces > 1 and self.head_dims(problem)[0] % (64 * self.dq_pieces)
        ):
            raise UnsupportedError(
                f"dq_pieces: expected 1, or 2, 3 or 4 of a multiple of 64 columns, got {self.dq_pieces}"
            )
        if self.vector_adds and arch in SCALAR_ADDS:
            raise UnsupportedError(f"vector_adds: expected False on {arch}, which adds one value at a time")
        d, dv = self.head_dims(problem)
        sizes = {"tile_m": self.tile_m, "tile_n": self.tile_n, "head_dim": d, "head_dim_v": dv}
        is_float32 = element_bytes == 4
        for name, warps, rows, columns, least in (
            ("s_key_warps", self.s_key_warps, "tile_n", ("tile_m",), 8 if is_float32 else 16),
            # four blocks of 8 columns are stored together
            ("dkv_key_warps", self.dkv_key_warps, "tile_n", ("head_dim", "head_dim_v"), 32),
            ("dq_query_warps", self.dq_query_warps, "tile_m", ("head_dim",), 32 if is_float32 else 16),
        ):
            if warps not in (1, 2, 4, 8) or warps > self.num_warps:
                raise UnsupportedError(f"{name}: expected 1, 2, 4 or 8 up to num_warps, got {warps}")
            if sizes[rows] % (ROWS_PER_MMA * warps):
                raise UnsupportedError(
                    f"{rows}: expected a multiple of {ROWS_PER_MMA * warps} ({name} is {warps}), got {sizes[rows]}"
                )
            for side in columns:
                shared = least * (self.num_warps // warps)
                if is_float32 and name == "dq_query_warps":
                    shared *= self.dq_pieces
                if sizes[side] % shared:
                    raise UnsupportedError(
                        f"{name}: {self.num_warps // warps} warps share {side}, which they can if it is a multiple of"
                        f" {shared}, got {sizes[side]}"
                    )
        for columns_of_row in (d, dv):
            # a pass of all threads over a tile is so many whole rows
            in_a_pass = self.num_threads // threads_per_row(columns_of_row, element_bytes, self.vector_bytes)
            if self.tile_m % in_a_pass or self.tile_n % in_a_pass:
                raise UnsupportedError(
                    f"tile_m, tile_n: expected multiples of {in_a_pass}, the rows that {self.num_threads} threads load"
                    f" at once, got {self.tile_m} and {self.tile_n}"
                )
        needed, available = self.smem_bytes(problem), SMEM_BYTES_BY_ARCH[arch]
        if needed > available:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {available}")
        registers = self.accumulator_registers(problem)
        # 40 for fragments, which float32 counts already, and addresses
        if registers > MAX_REGISTERS - (0 if is_float32 else 40):
            raise UnsupportedError(
                f"registers: {self} needs {registers} for dK, dV, S, P, dS and dQ, a thread has {MAX_REGISTERS}"
            )

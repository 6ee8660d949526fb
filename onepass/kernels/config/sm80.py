"""How one launch of the Ampere kernels is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from ...errors import UnsupportedError
from ...problem import AttentionProblem
from .base import MAX_RESCALE_THRESHOLD, STAT_ROWS, LaunchConfig, column_block, head_dim_tile
from .sm90 import SMEM_BYTES

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
    """Threads that load a row together, in copies of vector_bytes: at most a warp, and within a swizzled row."""
    return min(32, column_block(columns, element_bytes) * element_bytes // vector_bytes)


class _ConfigSm80(LaunchConfig):
    """What the configurations of both passes have, and check."""

    tile_m: int
    tile_n: int
    num_warps: int
    vector_bytes: int

    @property
    def num_threads(self) -> int:
        return 32 * self.num_warps

    def smem_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory of a thread block."""
        raise NotImplementedError

    def _check_machine(self, problem: AttentionProblem, arch: str) -> None:
        if arch not in SMEM_BYTES_BY_ARCH:
            raise UnsupportedError(f"architecture: expected one of {', '.join(SMEM_BYTES_BY_ARCH)}, got {arch}")
        if self.num_warps not in (1, 2, 4, 8):
            raise UnsupportedError(f"num_warps: expected 1, 2, 4 or 8, got {self.num_warps}")
        if self.vector_bytes not in VECTOR_BYTES or self.vector_bytes < problem.dtype.itemsize:
            raise UnsupportedError(f"vector_bytes: expected 16, 8, 4 or 2 of whole elements, got {self.vector_bytes}")
        for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
            if size * problem.kv_itemsize % self.vector_bytes:
                raise UnsupportedError(f"vector_bytes: {self.vector_bytes} do not divide rows of {name} {size}")

    def _check_loads(self, row_bytes: Iterable[int], element_bytes: int, num_threads: int) -> None:
        """A pass of all threads over a tile has to be so many whole rows."""
        for columns in (n // element_bytes for n in row_bytes):
            in_a_pass = num_threads // threads_per_row(columns, element_bytes, self.vector_bytes)
            if self.tile_m % in_a_pass or self.tile_n % in_a_pass:
                raise UnsupportedError(
                    f"tile_m, tile_n: expected multiples of {in_a_pass}, the rows that {num_threads} threads load at"
                    f" once, got {self.tile_m} and {self.tile_n}"
                )

    def _check_shared_memory(self, problem: AttentionProblem, arch: str) -> None:
        needed, available = self.smem_bytes(problem), SMEM_BYTES_BY_ARCH[arch]
        if needed > available:
            raise UnsupportedError(f"shared memory: {self} needs {needed} bytes, a thread block has {available}")


@dataclass(frozen=True)
class ForwardConfigSm80(_ConfigSm80):
    """How one forward launch with the instructions of Ampere is tiled and overlapped.

    Attributes:
        tile_m: query rows of a thread block, 16, 32, ... for each warp.
        tile_n: keys of one step of the main loop.
        num_warps: each takes every num_warps-th 16 rows of a tile.
        num_stages: buffers for K and for V.
        prefetch: loads run during the GEMMs, from one buffer, too (K of the next step during softmax and PV, V during
            QK^T). Else a step loads its K and V, waits for them and computes.
        swizzle: 16-byte pieces of shared memory rows are exchanged so that ldmatrix meets no bank conflict.
        q_in_registers: hold Q in registers instead of reading it from shared memory in every step; of 16-bit types.
        rescale_threshold: powers of two that a row maximum may outgrow its reference by before acc_o is rescaled;
            0 = rescale in every step.
        fold_scale: softmax_scale is part of the exponent's factor, one FMA a score; else scores are multiplied first.
        longest_first: number the tiles by length (only meaningful where they differ), in L2-sized sections of heads.
        fragments_ahead: of 16-bit types: ldmatrix of a k-step stands before the mma of the step before; else those of
            all steps before the first mma (the assembler may move them, within its registers).
        pack_gqa: the query heads of one kv head share a tile, see geometry/pack_gqa.py.
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
    fold_scale: bool = True
    longest_first: bool = True
    fragments_ahead: bool = True
    pack_gqa: bool = False
    vector_bytes: int = 16

    removed: ClassVar[dict[str, object]] = {"exp2_fma_period": 0, "fresh_sums": True}

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
        # P in 16 bits in addition to S; in float32 in its place, in addition to the sums of 32 columns
        p = s // 2 if problem.dtype.itemsize == 2 else 16
        return self.m_tiles * (s + p + dv // 2 + q)

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        self._check_machine(problem, arch)
        rows = ROWS_PER_MMA * self.num_warps
        if self.tile_m < rows or self.tile_m % rows:
            raise UnsupportedError(f"tile_m: expected a multiple of {rows} ({self.num_warps} warps), got {self.tile_m}")
        if self.tile_n % 16 or not 16 <= self.tile_n <= 256:
            raise UnsupportedError(f"tile_n: expected 16, 32, ... 256, got {self.tile_n}")
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        element_bytes = problem.dtype.itemsize
        row_bytes = {d * element_bytes, d * problem.kv_itemsize, dv * problem.kv_itemsize}
        self._check_loads(row_bytes, element_bytes, self.loading_threads)
        if self.num_stages < 1:
            raise UnsupportedError(f"num_stages: expected 1 or more, got {self.num_stages}")
        if self.num_stages > 1 and not self.prefetch:
            raise UnsupportedError(f"num_stages: expected 1 without prefetch, got {self.num_stages}")
        if not 0 <= self.rescale_threshold <= MAX_RESCALE_THRESHOLD:
            expected = f"0 to {MAX_RESCALE_THRESHOLD:g}, or probabilities outgrow float16"
            raise UnsupportedError(f"rescale_threshold: expected {expected}, got {self.rescale_threshold}")
        if self.group(problem) > self.tile_m:
            raise UnsupportedError(
                f"pack_gqa: expected up to tile_m = {self.tile_m} query heads a kv head, got {self.group(problem)}"
            )
        if element_bytes == 4 and self.q_in_registers:
            raise UnsupportedError("q_in_registers: expected False for float32, got True")
        self._check_shared_memory(problem, arch)
        registers = self.accumulator_registers(problem)
        if registers > MAX_REGISTERS - 40:
            raise UnsupportedError(
                f"registers: {self} needs {registers} for S, P, O and Q, a thread has {MAX_REGISTERS}"
            )


@dataclass(frozen=True)
class BackwardConfigSm80(_ConfigSm80):
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
        descending_turns: tiles of keys of a deterministic problem add to a dQ from the last one to the first, not the
            other way round: see block_range.following_query_block.
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
    descending_turns: bool = False
    vector_bytes: int = 16

    # fixed here; the Hopper configurations have a choice
    private_dq: ClassVar[bool] = False

    @property
    def consumer_warps(self) -> int:
        return self.num_warps

    @property
    def tile_warps(self) -> int:
        return self.num_warps

    def keeps_p(self, problem: AttentionProblem) -> bool:
        """Whether P and dS are operands of dV and dK as they are in registers."""
        return problem.dtype.itemsize == 2 and self.s_key_warps == self.dkv_key_warps == self.num_warps

    def adds_in_turns(self, problem: AttentionProblem) -> bool:
        """Whether tiles of keys add to a dQ one after the other."""
        return problem.deterministic

    def adds_descending(self, problem: AttentionProblem) -> bool:
        """Whether these turns begin with the last tile."""
        return self.descending_turns and self.adds_in_turns(problem)

    def rows_in_background(self, problem: AttentionProblem) -> bool:
        return False

    def zeroes_before(self, problem: AttentionProblem) -> bool:
        """The kernel before the main one writes the zeros that dQ is added to."""
        return True

    def head_dims(self, problem: AttentionProblem) -> tuple[int, int]:
        """The head dims that the kernel is compiled for: never 96 with a wider one.

        Warps share the columns of a wider one by halves.

        In float32, where a warp has 32 columns or a multiple of them, no 96, and 192 not with 256.
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
        """Registers of a thread for dK and dV, for P (with a softcap also times its slope) and dP, or dS
        and dQ; in float32 also the limbs of the fragments and the sums of 32 columns."""
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
        # 16 rows take 16 registers for limbs of A and 4 for each of up to four sums, which need 8 for limbs of B
        in_s = min(4, self.tile_m * self.s_key_warps // (8 * self.num_warps))
        return gradients + max(
            s + words + s_rows * (16 + 4 * in_s) + 8 * in_s, 32 * dkv_rows + 32, dq + 32 * dq_rows + 32
        )

    def check(self, problem: AttentionProblem, arch: str) -> None:
        """Raises: UnsupportedError, naming the bound, what is needed and what there is."""
        self._check_machine(problem, arch)
        if self.tile_m not in (16, 32, 64, 128):
            raise UnsupportedError(f"tile_m: expected 16, 32, 64 or 128, got {self.tile_m}")
        element_bytes = problem.dtype.itemsize
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
        if self.adds_descending(problem) and problem.has_backward_lists:
            raise UnsupportedError(f"descending_turns: expected False with {problem.modifiers_named}")
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
                if name == "dq_query_warps":
                    shared *= self.dq_pieces
                if sizes[side] % shared:
                    raise UnsupportedError(
                        f"{name}: {self.num_warps // warps} warps share {side}, which they can if it is a multiple of"
                        f" {shared}, got {sizes[side]}"
                    )
        self._check_loads((d * element_bytes, dv * element_bytes), element_bytes, self.num_threads)
        self._check_shared_memory(problem, arch)
        registers = self.accumulator_registers(problem)
        # 40 for fragments, which float32 counts already, and addresses
        if registers > MAX_REGISTERS - (0 if is_float32 else 40):
            raise UnsupportedError(
                f"registers: {self} needs {registers} for dK, dV, S, P, dS and dQ, a thread has {MAX_REGISTERS}"
            )

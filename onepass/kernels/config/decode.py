"""How a launch for few query rows runs: warps along the keys, see sm80/forward/few_rows.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ...errors import UnsupportedError
from ...geometry.splits import SPLIT_UNIT
from ...problem import AttentionProblem
from . import ROWS_PER_MMA, ForwardConfigSm80, head_dim_tile

MAX_TILE_N = 32  # a lane looks up the page of a key


@dataclass(frozen=True)
class DecodeConfigSm80(ForwardConfigSm80):
    """How a forward of few rows is tiled: each warp has all rows of the tile, and keys of its own.

    Attributes:
        tile_m: query rows of a thread block, and of each of its warps: 16, 32, ...
        tile_n: keys of a step of a warp, 16 or 32.
        num_warps: warps along the rows: one.
        key_warps: warps along the keys: a thread block's step has tile_n keys for each, which divide
            `splits.SPLIT_UNIT`.
        num_stages: buffers of a warp for K and for V, 2 or more.
        early_merge: the merge is launched while this kernel runs, and waits for its end by itself: its launch takes no
            time then. From Hopper on.
    """

    tile_m: int = ROWS_PER_MMA
    tile_n: int = 16
    num_warps: int = 1
    num_stages: int = 3
    key_warps: int = 4
    early_merge: bool = False

    loading_threads: ClassVar[int] = 32

    @property
    def num_threads(self) -> int:
        return 32 * self.key_warps

    @property
    def block_keys(self) -> int:
        return self.tile_n * self.key_warps

    @property
    def num_buffers(self) -> int:
        return self.num_stages * self.key_warps

    def exchange_bytes(self, problem: AttentionProblem) -> int:
        """Shared memory in which the warps put their states together: that of K and V, which are done with then."""
        rows = self.tile_m // ROWS_PER_MMA
        # O, and for each lane's rows their maximum and their sum; whether there is a NaN
        return self.key_warps * (4 * self.tile_m * head_dim_tile(problem.head_dim_v) + rows * 32 * 2 * 2 * 4 + 4)

    def check(self, problem: AttentionProblem, arch: str) -> None:
        super().check(problem, arch)
        if self.num_warps != 1:
            raise UnsupportedError(f"num_warps: expected 1 with key_warps, got {self.num_warps}")
        if self.key_warps not in (1, 2, 4, 8):
            raise UnsupportedError(f"key_warps: expected 1, 2, 4 or 8, got {self.key_warps}")
        if self.tile_n > MAX_TILE_N or SPLIT_UNIT % self.block_keys:
            raise UnsupportedError(
                f"tile_n: expected up to {MAX_TILE_N} keys, {SPLIT_UNIT} or a fraction of them for {self.key_warps} "
                f"warps, got {self.tile_n}"
            )
        if self.num_stages < 2 or not self.prefetch:
            raise UnsupportedError(f"num_stages: expected 2 or more, and prefetch, got {self.num_stages}")
        if self.early_merge and arch.startswith("sm_8"):
            raise UnsupportedError(f"early_merge: expected False before Hopper, got True on {arch}")
        d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
        available = self.num_buffers * self.tile_n * (d + dv) * problem.kv_itemsize
        if self.exchange_bytes(problem) > available:
            raise UnsupportedError(
                f"num_stages: expected more, for {self.exchange_bytes(problem)} bytes of state fit into the "
                f"{available} of K and V, got {self.num_stages}"
            )

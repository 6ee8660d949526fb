"""A kernel whose warps draw the flags of dropout for two blocks of S^T, and apply them to ones, as Hopper's backward
does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from onepass.geometry.tile_scheduler import LANES
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.device.blocks.softmax.dropout import StagedFlags
from onepass.kernels.device.blocks.softmax.modifiers import Block, Modifiers, ModifierTensors, Place
from onepass.problem import AttentionProblem

WARPS, BLOCKS, KEYS = 2, 2, 16
HEAD, FIRST_HEAD, ALL_HEADS, ENTRY = 1, 3, 7, 2
ONES = 0x00010001


@dataclass(frozen=True)
class Draw:
    """Args: problem: with dropout. queries: of a block."""

    problem: AttentionProblem
    queries: int

    def trace(self) -> tuple[Callable, tuple]:
        state = make_fake_tensor(Int32, (4,), (1,), assumed_align=4)
        words = BLOCKS * self.queries // 2
        return self, (state, Int32(0), make_fake_tensor(Int32, (WARPS * KEYS, words), (words, 1)))

    @cute.jit
    def __call__(self, state: cute.Tensor, keep_bytes: Int32, mKept: cute.Tensor):
        self.kernel(state, keep_bytes, mKept).launch(grid=[1, 1, 1], block=[WARPS * LANES, 1, 1])

    @cute.kernel
    def kernel(self, state: cute.Tensor, keep_bytes: Int32, mKept: cute.Tensor):
        vectors = BackwardConfigSm90(tile_m=self.queries).flag_vectors(self.problem)
        layout = cute.make_ordered_layout((4, vectors, WARPS), order=(0, 1, 2))
        sFlags = SmemAllocator().allocate_tensor(Int32, layout, 128)
        tensors = ModifierTensors(
            dropout_state=state, keep_bytes=keep_bytes, first_head=Int32(FIRST_HEAD), all_heads=Int32(ALL_HEADS)
        )
        warp, lane = cute.arch.make_warp_uniform(cute.arch.warp_idx()), cute.arch.lane_idx()
        flags = StagedFlags(Modifiers(tensors, (None, None)), sFlags[None, None, warp], lane)
        place = Place(Int32(HEAD), Int32(0), Int32(0), Int32(0), Int32(ENTRY), Int32(0), Int32(0))
        key = warp * KEYS + lane // 4
        words = cute.make_rmem_tensor((self.queries // 4,), Int32)
        for number in cutlass.range(BLOCKS, unroll=1):
            first = number * self.queries + 2 * (lane % 4)
            flags.draw(Block([key, key + 8], first, 2 * [place], has_keys_in_rows=True))
            words.fill(ONES)
            flags.apply(words, words)
            for i in cutlass.range_constexpr(cute.size(words)):
                mKept[key + 8 * (i % 2), first // 2 + 4 * (i // 2)] = words[i]

"""Turns of tiles that add to the same block of dQ, for gradients that are the same in every run.

A counter in global memory says how many tiles have added to a warpgroup's part of a block (`Accumulator.turns`). A look
at it takes an answer of L2, and counting takes a fence that waits until L2 has the additions: 700 cycles or more each.
One warp of each thread block, the keeper, waits for both, so that the consumers wait for neither. Two of its lanes
serve each consumer warpgroup, one on the left and one on the right:

    waits until the counter of block i is at this tile's turn     granted
                                                                  the warpgroup adds its dQ of block i
                                                                  added             counts up block i

Each barrier has two slots: a turn may be granted before the warpgroup has added to the block before. All lanes share
the fence of a round: what they have seen before it (counters, additions) comes before what they say after it (arrivals,
counts). So the additions of one tile come before those of the next one: red, arrival and wait at `added`, fence and
count of its keeper; look and fence of the other keeper, arrival and wait at `granted`, red (PTX ISA, "Causality
order").
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...blocks.memory.ptx import increment, is_phase_over, look_at
from ...blocks.memory.untraced import Untraced

SLOTS = 2


class TurnBarriers(NamedTuple):
    """An mbarrier for each warpgroup and slot: addition number n of a warpgroup is phase n // SLOTS of slot n % SLOTS.

    Attributes:
        granted: the tiles before have added to the block: 1 arrival.
        added: this tile has: 1 arrival of each warp.
    """

    granted: cute.Pointer
    added: cute.Pointer


class TurnsOfWarp(Untraced):
    """The turns of a consumer warp to add to dQ: if the problem is deterministic, after the tiles before its own."""

    def __init__(self, are_taken: bool, wg: Int32, turns: TurnBarriers | None):
        self.are_taken, self.wg, self.turns = are_taken, wg, turns
        # how many additions there were so far
        self.additions = cute.make_rmem_tensor((1,), Int32)
        self.additions[0] = Int32(0)

    @cute.jit
    def take(self):
        """Wait until all tiles before this one have added to the block, unless any order will do."""
        if cutlass.const_expr(self.are_taken):
            slot, phase = slot_of(self.wg, self.additions[0])
            cute.arch.mbarrier_wait(self.turns.granted + slot, phase)

    @cute.jit
    def give(self):
        """One arrival of this warp: its additions to the block are issued."""
        if cutlass.const_expr(self.are_taken):
            slot, _ = slot_of(self.wg, self.additions[0])
            cute.arch.sync_warp()
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(self.turns.added + slot)
            self.additions[0] = self.additions[0] + 1


def slot_of(wg: Int32, number: Int32) -> tuple:
    """The slot of a warpgroup's addition with this number, and the parity of its phase."""
    return wg * SLOTS + number % SLOTS, number // SLOTS & 1


class TurnKeeper(Untraced):
    """The warp that looks at the counters of turns, and counts them up, for all consumers of a thread block."""

    def __init__(self, kernel, accumulator, turns: TurnBarriers, background):
        """Args: background: that of `BackwardProducer`; None: the counters are zero before the kernel begins."""
        self.kernel, self.accumulator, self.turns, self.background = kernel, accumulator, turns, background
        warpgroups, lane = kernel.num_warpgroups, cute.arch.lane_idx()
        self.lanes = 2 * warpgroups
        self.wg = lane % warpgroups
        self.grants = Int32(lane < warpgroups)  # this lane grants turns; otherwise it counts
        self.rank = cute.arch.block_idx_in_cluster() if kernel.is_paired else Int32(0)

    @cute.jit
    def run(self, queue, schedule, seqlens):
        wave, number = Int32(0), queue.first()
        additions = Int32(0)
        while number < queue.num_tiles:
            tile = self.kernel.tile_at(number, schedule, seqlens)
            num_steps = (tile.last - tile.first) * self.kernel.group
            if num_steps > 0:
                if cutlass.const_expr(self.background is not None):
                    self.background.wait_for_rows(tile.origin_q, tile.head_kv)
                if cute.arch.lane_idx() < self.lanes:
                    self.keep(tile, additions, additions + num_steps)
                cute.arch.sync_warp()
            additions += num_steps
            wave += 1
            number = queue.take(wave)
            queue.want_next()

    @cute.jit
    def keep(self, tile, number: Int32, end: Int32):
        """The turns of one tile, whose additions have the numbers [number, end)."""
        head, m_block = self.kernel.first_visit(tile)
        while number < end:
            slot, phase = slot_of(self.wg, number)
            share = self.kernel.share_of(self.accumulator, tile, head, m_block, self.wg, self.rank)
            counter = self.accumulator.turns.iterator + share
            seen = look_at(counter)
            # the addition is issued; or, for a lane that grants, the one before it in its slot
            is_added = is_phase_over(self.turns.added + slot, phase ^ self.grants)
            cute.arch.fence_acq_rel_gpu()
            adds = self.kernel.adds_share(self.wg, self.rank, m_block)
            if is_added == 1:
                is_done = Int32(1)  # this lane's part of the addition
                if self.grants == 1:
                    if adds:
                        is_done = Int32(seen == self.kernel.turn_of(tile, m_block))
                    if is_done == 1:
                        cute.arch.mbarrier_arrive(self.turns.granted + slot)
                elif adds:
                    increment(counter)
                if is_done == 1:
                    head, m_block = self.kernel.next_visit(tile, head, m_block)
                    number += 1

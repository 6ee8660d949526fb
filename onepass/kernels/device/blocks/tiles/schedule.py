"""What a kernel is told of the sequences and of the order of its tiles."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from .....geometry import tile_scheduler
from .....geometry.splits import Splits
from .packed import Lengths


class Sequences(NamedTuple):
    """Lengths as the host knows them (of packed sequences: totals), the window, and lengths on the device."""

    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    lengths: Lengths


class Schedule(NamedTuple):
    """The persistent grid's order of tiles, see geometry/tile_scheduler.py.

    Of packed sequences the host knows the number of heads only; the kernel makes a PackedSchedule of it.

    Attributes:
        batch: entries; with splits, which are entries to the order, those of all splits together.
        entries: FastDivmodDivisorV2 of those of one split.
    """

    num_tiles: Int32 | None
    num_m_blocks: Int32 | None
    batch: Int32 | None
    divisors: tile_scheduler.Divisors
    splits: Splits | None = None
    entries: cute.FastDivmodDivisorV2 | None = None


def make_schedule(num_blocks: Int32 | None, num_heads: Int32, batch: Int32, heads_per_section: Int32) -> Schedule:
    """On the host. Args: num_blocks: tiles of a head; None for packed sequences."""
    if num_blocks is None:
        divisors = tile_scheduler.Divisors(None, None, None, cute.FastDivmodDivisorV2(num_heads))
        return Schedule(None, None, None, divisors)
    heads_in_last = tile_scheduler.heads_in_last_section(num_heads * batch, heads_per_section)
    numbers = num_blocks * heads_per_section, heads_per_section, heads_in_last, num_heads
    divisors = tile_scheduler.Divisors(*(cute.FastDivmodDivisorV2(n) for n in numbers))
    return Schedule(num_blocks * num_heads * batch, num_blocks, batch, divisors)

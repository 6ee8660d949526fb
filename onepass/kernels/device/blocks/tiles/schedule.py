"""What a kernel needs to know of the sequences and of the order of its tiles."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32

from .....geometry import tile_scheduler
from .....geometry.splits import Splits
from ....arguments import ModifierTensors
from ..softmax.modifiers import Modifiers
from ..softmax.online import ScoreFactors
from .packed import Lengths


class Sequences(NamedTuple):
    """The lengths that the host knows (for packed sequences: totals), the window, and the lengths on the device."""

    seqlen_q: Int32
    seqlen_k: Int32
    window_left: Int32 | None
    window_right: Int32 | None
    lengths: Lengths
    modifiers: Modifiers | None = None


class ScoreArguments(NamedTuple):
    """The arguments of a kernel that say which pairs have scores, and what is done to these.

    Attributes:
        softmax_scale: of a backward.
        tensors: those of the modifiers.
    """

    softmax_scale: Float32 | None
    factors: ScoreFactors
    window_left: Int32 | None
    window_right: Int32 | None
    tensors: ModifierTensors | None

    @classmethod
    def of(cls, a: Any, softmax_scale: Float32 | None = None) -> ScoreArguments:
        """Args: a: the arguments of a kernel of attention."""
        return cls(softmax_scale, ScoreFactors(a.scale_log2, a.tanh_scale), a.window_left, a.window_right, a.modifiers)

    def modifiers(self, *options: Any) -> Modifiers | None:
        """Args: options: is_deterministic and block_size of `Modifiers`."""
        window = self.window_left, self.window_right
        return None if self.tensors is None else Modifiers(self.tensors, window, *options)

    def sequences(self, seqlen_q: Int32, seqlen_k: Int32, lengths: Lengths, *options: Any) -> Sequences:
        """The `Sequences` of a call; where modifiers have intervals, the window is part of these.

        Args: options: is_deterministic and block_size of `Modifiers`.
        """
        window, modifiers = (self.window_left, self.window_right), self.modifiers(*options)
        if modifiers is not None and modifiers.has_intervals:
            window = None, None
        return Sequences(seqlen_q, seqlen_k, *window, lengths, modifiers)


class Schedule(NamedTuple):
    """The persistent grid's order of tiles, see geometry/tile_scheduler.py.

    For packed sequences the host knows the number of heads only, from which the kernel makes a PackedSchedule.

    Attributes:
        tiles_of_head: tiles of queries, or in a backward of keys.
        batch: entries of the order: batch entries, or with splits (split, batch entry).
        entries: FastDivmodDivisorV2 of the batch entries of one split.
        tiles_in_ring: of tiles of keys that add to dQ in rings (see `block_range.turn_in_ring`).
    """

    num_tiles: Int32 | None
    tiles_of_head: Int32 | None
    batch: Int32 | None
    divisors: tile_scheduler.Divisors
    splits: Splits | None = None
    entries: cute.FastDivmodDivisorV2 | None = None
    tiles_in_ring: Int32 | None = None


def make_schedule(
    num_blocks: Int32 | None,
    num_heads: Int32,
    batch: Int32,
    heads_per_section: Int32 | int,
    heads_in_last: Int32 | None = None,
) -> Schedule:
    """The schedule of a grid, made on the host. Args: num_blocks: tiles of a head; None for packed sequences."""
    if num_blocks is None:
        divisors = tile_scheduler.Divisors(None, None, None, cute.FastDivmodDivisorV2(num_heads))
        return Schedule(None, None, None, divisors)
    if heads_in_last is None:
        heads_in_last = tile_scheduler.heads_in_last_section(num_heads * batch, heads_per_section)
    numbers = num_blocks * heads_per_section, heads_per_section, heads_in_last, num_heads
    divisors = tile_scheduler.Divisors(*(cute.FastDivmodDivisorV2(n) for n in numbers))
    return Schedule(num_blocks * num_heads * batch, num_blocks, batch, divisors)

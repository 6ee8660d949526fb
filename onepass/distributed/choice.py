"""The schedules among which `plan` chooses, and its choice: the fastest by the estimate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor

from ..problem import Mask
from ..validation.attention import checked_mask
from ..validation.scalars import check_int
from .cost import Estimate, Hardware, estimate
from .layouts import LAYOUTS, LayoutName, make_layout
from .schedule import Schedule, Step, make_steps, with_short_ends
from .traffic import SharedRows

Engine = Literal["heads", "keys"] | int
CHUNKS = (16, 8, 4, 2, 1)  # from which `plan` chooses
AS_FAST = 1.02  # steps whose largest one is smaller, and so its buffers, may take this factor longer


class Candidate(NamedTuple):
    """One of the schedules among which `plan` chooses."""

    engine: Engine
    layout_name: LayoutName
    schedule: Schedule
    chunks: int
    costs: Estimate


class Wanted(NamedTuple):
    """Checked arguments of `plan`.

    Attributes:
        widths: the widths of the engines among which `plan` chooses.
    """

    cu_seqlens: tuple[int, ...]
    is_packed: bool
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    mask: Mask
    layout: LayoutName | None
    chunks: int | None
    num_ranks: int
    widths: tuple[int, ...]
    training: bool = True
    keep_gathered: bool = False
    hardware: Hardware = Hardware()

    @classmethod
    def checked(
        cls,
        tokens: Any,
        num_heads_q: Any,
        num_heads_kv: Any,
        head_dim: Any,
        causal: Any,
        window: Any,
        layout: Any,
        engine: Any,
        chunks: Any,
        num_ranks: int,
    ) -> Wanted:
        cu_seqlens, is_packed = _offsets(tokens)
        heads_q = check_int("num_heads_q", num_heads_q, "an int of at least 1", least=1)
        heads_kv = check_int("num_heads_kv", num_heads_kv, "an int of at least 1", least=1)
        if heads_q % heads_kv:
            raise ValueError(f"num_heads_q: expected a multiple of num_heads_kv = {heads_kv}, got {heads_q}")
        head_dim = check_int("head_dim", head_dim, "an int of at least 1", least=1)
        if chunks is not None:
            chunks = check_int("chunks", chunks, "an int of at least 1, or None", least=1)
        mask = checked_mask(causal, window)
        if layout is not None and layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {', '.join(LAYOUTS)} or None, got {layout!r}")
        widths = tuple(widths_of(engine, num_ranks))
        return cls(cu_seqlens, is_packed, heads_q, heads_kv, head_dim, mask, layout, chunks, num_ranks, widths)

    def candidate(self, width: int) -> Candidate:
        """The schedule in which `width` ranks share queries."""
        shared: SharedRows = {}
        found = [self._candidate(width, steps, shared) for steps in self._ways_to_cut(width)]
        found.sort(key=lambda candidate: max(step.width * step.heads for step in candidate.schedule.steps))
        fastest = min(map(self.seconds, found))
        return next(candidate for candidate in found if self.seconds(candidate) <= AS_FAST * fastest)

    def _ways_to_cut(self, width: int) -> list[tuple[Step, ...]]:
        """The steps among which `plan` chooses. Those in short steps need the least memory."""
        counts = (1,) if self.num_ranks == 1 else CHUNKS if self.chunks is None else (self.chunks,)
        group = self.num_heads_q // self.num_heads_kv
        found: dict[tuple[Step, ...], None] = {}
        for chunks in counts:
            steps = make_steps(self.num_ranks, self.num_heads_q, self.num_heads_kv, width, chunks)
            found[steps] = None
            if self.chunks is None:
                for middle, has_short_end in itertools.product((1, 2), (False, True)):
                    found[with_short_ends(steps, group, middle, has_short_end)] = None
        return list(found)

    def seconds(self, candidate: Candidate) -> float:
        """The time by which candidates are compared."""
        return candidate.costs.seconds if self.training else candidate.costs.forward_seconds

    def _candidate(self, width: int, steps: tuple[Step, ...], shared: SharedRows) -> Candidate:
        name = self.layout or _best_layout(steps, self.num_ranks, self.is_packed, self.mask)
        layout = make_layout(name, self.num_ranks, self.cu_seqlens, self.mask)
        schedule = Schedule(layout, self.cu_seqlens, self.mask, self.num_heads_q, self.num_heads_kv, steps)
        engine: Engine = "heads" if width == self.num_ranks else "keys" if width == 1 else width
        costs = estimate(schedule, self.head_dim, self.hardware, keep_gathered=self.keep_gathered, shared=shared)
        return Candidate(engine, name, schedule, self.chunks or len(steps), costs)


def _offsets(tokens: Any) -> tuple[tuple[int, ...], bool]:
    if isinstance(tokens, Tensor):
        tokens = tokens.tolist()
    if not isinstance(tokens, (list, tuple)):
        return (0, check_int("tokens", tokens, "an int of at least 1, or offsets", least=1)), False
    offsets = tuple(check_int("tokens", offset, "offsets of ints", least=0) for offset in tokens)
    if len(offsets) < 2 or offsets[0] != 0 or any(a > b for a, b in pairwise(offsets)):
        raise ValueError(f"tokens: expected offsets that begin with 0 and do not fall, got {offsets}")
    if offsets[-1] == 0:
        raise ValueError(f"tokens: expected at least 1 token, got offsets {offsets}")
    return offsets, True


def widths_of(engine: Any, num_ranks: int) -> list[int]:
    if engine is None:
        return [width for width in range(num_ranks, 0, -1) if num_ranks % width == 0]
    if engine in ("heads", "keys"):
        return [num_ranks if engine == "heads" else 1]
    if isinstance(engine, str):
        raise ValueError(f"engine: expected 'heads', 'keys', a number of ranks or None, got {engine!r}")
    width = check_int("engine", engine, "'heads', 'keys', a number of ranks or None", least=1)
    if num_ranks % width:
        raise ValueError(f"engine: expected a divisor of the {num_ranks} ranks, got {width}")
    return [width]


def _best_layout(steps: Sequence[Step], num_ranks: int, is_packed: bool, mask: Mask) -> LayoutName:
    """The contiguous layout where every rank has all queries or all tokens have equal work, else a balanced one."""
    if all(step.width == num_ranks for step in steps):
        return "contiguous"
    if is_packed:
        return "balanced"
    has_equal_work = mask.window_left is not None or mask.window_right is None
    return "contiguous" if has_equal_work else "head_tail"

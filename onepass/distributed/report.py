"""What `ContextPlan.describe` says of a plan: work, bytes and balance of each rank, and the engines compared."""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import Mask
from .choice import Candidate, Engine, Wanted
from .layout import Layout
from .traffic import buffer_bytes

PICTURE_WIDTH = 64
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def report(wanted: Wanted, candidates: Sequence[Candidate], chosen: Engine) -> str:
    """The text of `ContextPlan.describe`."""
    plan = next(candidate for candidate in candidates if candidate.engine == chosen)
    schedule, found = plan.schedule, plan.costs
    mean = sum(found.pairs) / len(found.pairs) or 1.0
    sequences = len(schedule.cu_seqlens) - 1
    packed = f" in {sequences} packed sequences" if wanted.is_packed else ""
    engine = f"{chosen} ranks share heads" if isinstance(chosen, int) else f'engine "{chosen}"'
    lines = [
        f"{schedule.cu_seqlens[-1]} tokens{packed} on {wanted.num_ranks} ranks, {schedule.num_heads_q} query and "
        f"{schedule.num_heads_kv} kv heads, {_mask_in_words(schedule.mask)}",
        f'{engine}, layout "{plan.layout_name}", {len(schedule.steps)} steps',
        f"estimate: forward {found.forward_seconds * 1e3:.3g} ms, backward {found.backward_seconds * 1e3:.3g} ms, "
        f"{found.computing_seconds / found.seconds:.0%} of it computing",
        "",
        "rank   tokens   work   received forward   backward",
    ]
    for rank in range(wanted.num_ranks):
        lines.append(
            f"{rank:4d} {schedule.layout.count(rank):8d} {found.pairs[rank] / mean:6.3f} "
            f"{found.forward_bytes[rank] / 2**20:14.1f} MiB {found.backward_bytes[rank] / 2**20:6.1f} MiB"
        )
    engines = ["engine   layout       steps   forward   backward   received   buffers"]
    for candidate in candidates:
        costs = candidate.costs
        received = max(sum(sizes) for sizes in zip(costs.forward_bytes, costs.backward_bytes, strict=True))
        memory = buffer_bytes(candidate.schedule, wanted.head_dim, wanted.hardware.itemsize, wanted.keep_gathered)
        engines.append(
            f"{candidate.engine!s:8} {candidate.layout_name:10} {len(candidate.schedule.steps):7d} "
            f"{costs.forward_seconds * 1e3:6.3g} ms {costs.backward_seconds * 1e3:7.3g} ms "
            f"{received / 2**20:6.0f} MiB {memory / 2**20:5.0f} MiB"
            + ("   chosen" if candidate.engine == chosen else "")
        )
    return "\n".join([*lines, "", *engines, "", "tokens by rank:", picture(schedule.layout)])


def _mask_in_words(mask: Mask) -> str:
    if mask.is_full:
        return "no mask"
    is_causal = (mask.window_left, mask.window_right) == (None, 0)
    return "causal" if is_causal else f"window ({mask.window_left}, {mask.window_right})"


def picture(layout: Layout) -> str:
    """Equal shares of the tokens, a character for each: the rank that owns the first token of the share."""
    total = layout.owners[-1].stop
    width = min(PICTURE_WIDTH, total)
    ranks = (layout.owned(total * i // width, total * i // width + 1)[0].rank for i in range(width))
    return "".join(DIGITS[rank % len(DIGITS)] for rank in ranks)

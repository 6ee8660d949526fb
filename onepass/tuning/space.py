"""The configurations worth timing: the heuristics' choice, its relatives in their tables, and its neighbors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..kernels.config import LaunchConfig, head_dim_tile
from ..kernels.heuristics import chooser
from ..kernels.heuristics import sm80 as heuristics_sm80
from ..kernels.heuristics import sm90 as heuristics
from ..kernels.heuristics.tuned import MANY_ROWS, Direction, num_rows
from ..problem import AttentionProblem

MAX_CANDIDATES = 24
OTHER_ROWS = 3  # rows of the heuristics' tables for other head dims that are tried

Values = Sequence[Any]


class Space(NamedTuple):
    """The neighborhood of a configuration.

    Attributes:
        sizes: the values of fields that belong together: tiles, warps, buffers. They are combined with each other.
        choices: the values of the other fields, which are changed one at a time.
    """

    sizes: Mapping[str, Values]
    choices: Mapping[str, Values]


# Every field and value here has been seen to pay somewhere (docs/kernels/, docs/lab/). A field that the exact number of
# heads decides, not its power of two, stays with the heuristics (private_dq), and so does one that they need for the
# head dim or the mask (by_gradient, by_queries, blocks_per_sm).
BOTH = (False, True)
SPACES = {
    ("fwd", "sm90"): Space(
        {
            "tile_n": (48, 64, 80, 96, 112, 128, 144, 160, 176),
            "num_warpgroups": (1, 2, 3, 4),
            "num_stages": (2, 3, 4),
            "v_stages": (0, 2, 3),
        },
        {
            "dynamic_tiles": BOTH,
            "cluster_size": (1, 2),
            "overlap_tiles": BOTH,
            "q_stages": (1, 2),
            "pingpong": BOTH,
            "longest_first": BOTH,
            "pack_gqa": BOTH,
        },
    ),
    ("fwd", "sm80"): Space(
        {
            "tile_m": (64, 128, 256),
            "tile_n": (16, 32, 48, 64, 96, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2, 3),
            "q_in_registers": BOTH,
        },
        {"longest_first": BOTH, "pack_gqa": BOTH},
    ),
    ("bwd", "sm90"): Space(
        {"tile_m": (64, 128), "q_stages": (2, 3, 4), "do_stages": (1, 2, 3, 4)},
        {"dynamic_tiles": BOTH, "background_rows": BOTH, "pingpong": BOTH, "longest_first": BOTH},
    ),
    ("bwd", "sm80"): Space(
        {
            "tile_m": (32, 64, 128),
            "tile_n": (32, 64, 128),
            "num_warps": (4, 8),
            "num_stages": (1, 2),
            "s_key_warps": (2, 4, 8),
            "dkv_key_warps": (2, 4, 8),
            "dq_query_warps": (1, 2, 4),
            "dq_pieces": (1, 2, 4),
        },
        {"one_score_buffer": BOTH, "longest_first": BOTH},
    ),
}


def candidates(
    direction: Direction, backend: str, problem: AttentionProblem, arch: str, limit: int = MAX_CANDIDATES
) -> list[LaunchConfig]:
    """At most `limit` configurations that a launch of the problem can have; the heuristics' choice is the first.

    Raises: the errors of the heuristics.
    """
    usual = chooser.chooser(direction, backend).choose(problem, arch)
    found: dict[Any, None] = {usual: None}
    space = SPACES[direction, backend]
    for config in itertools.chain(_relatives(direction, backend, problem, usual), _neighbours(usual, space)):
        if len(found) == limit:
            break
        if _is_futile(config, usual, problem):
            continue
        if direction == "bwd" and problem.deterministic and not _has_order_of(config, usual):
            continue  # the order of turns goes with the order of tiles
        try:
            config.check(problem, arch)
        except UnsupportedError:
            continue
        found[config] = None
    return list(found)


def _relatives(direction: Direction, backend: str, problem: AttentionProblem, usual: Any) -> Iterator[Any]:
    """Rows of the heuristics' tables for other lengths or masks, then the nearest of the rows for other head dims.

    The fields that follow from the problem alone have the values of the usual choice.
    """
    dims = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    table: Mapping[Any, Iterable[Any]] = {}
    is_float32 = problem.dtype.itemsize == 4
    kept: tuple[str, ...] = ("vector_bytes",)
    if (direction, backend) == ("fwd", "sm90"):
        table = {pair: [row.config for row in rows] for pair, rows in heuristics.FORWARD_SM90.items()}
        table = {d: [config] for d, config in heuristics.FLOAT32_SM90.items()} if is_float32 else table
        kept = "pack_gqa", "two_level_sums", "rescale_threshold"
    elif (direction, backend) == ("fwd", "sm80"):
        few = heuristics_sm80.FORWARD_FEW_TILES
        table = {d: (*rows, *filter(None, [few.get(d)])) for d, rows in heuristics_sm80.FORWARD.items()}
        table = heuristics_sm80.FORWARD_FLOAT32 if is_float32 else table
        kept = "pack_gqa", "vector_bytes"
    elif (direction, backend) == ("bwd", "sm80"):
        small = heuristics_sm80.BACKWARD_SMALL
        table = {d: (row, small[d]) for d, row in heuristics_sm80.BACKWARD.items()}
        table = heuristics_sm80.BACKWARD_FLOAT32 if is_float32 else table
        kept = "vector_adds", "vector_bytes", "descending_turns"

    def adapted(rows: Iterable[Any]) -> list[Any]:
        return sorted(
            (replace(row, **{name: getattr(usual, name) for name in kept}) for row in rows),
            key=lambda config: distance(usual, config),
        )

    own = table.get(dims) or table.get(max(dims)) or ()
    yield from adapted(own)
    yield from adapted({row: None for rows in table.values() for row in rows if row not in own})[:OTHER_ROWS]


def _neighbours(usual: Any, space: Space) -> Iterator[Any]:
    """In turns, configurations with one choice changed and configurations with the next nearest sizes."""
    choices = [
        _changed(usual, {name: value})
        for name, values in space.choices.items()
        for value in values
        if value != getattr(usual, name)
    ]
    names = list(space.sizes)
    combined = (
        _changed(usual, dict(zip(names, values, strict=True))) for values in itertools.product(*space.sizes.values())
    )
    sizes = sorted(combined, key=lambda config: distance(usual, config))
    for pair in itertools.zip_longest(choices, sizes):
        yield from (config for config in pair if config is not None)


def _changed(usual: Any, changes: dict[str, Any]) -> Any:
    """The configuration with these changes and what follows: a queue and pairs of thread blocks exclude each other."""
    if changes.get("dynamic_tiles") and hasattr(usual, "cluster_size"):
        changes = {**changes, "cluster_size": 1}
    if changes.get("cluster_size", 1) > 1:
        changes = {**changes, "dynamic_tiles": False}
    return replace(usual, **changes)


def _is_futile(config: Any, usual: Any, problem: AttentionProblem) -> bool:
    """Whether the configuration means the same launch as the usual one, or cannot pay."""
    has_growing_tiles = problem.mask.window_right is not None and problem.mask.window_left is None
    if config.longest_first != usual.longest_first and not has_growing_tiles:
        return True
    if _differ("background_rows", config, usual) and config.rows_in_background(problem) == usual.rows_in_background(
        problem
    ):
        return True
    if _differ("pingpong", config, usual) and (config.num_warpgroups == 1 or getattr(config, "by_queries", False)):
        return True  # these warpgroups take no turns
    if getattr(config, "pack_gqa", False) and problem.qhead_per_kvhead == 1:
        return True
    if getattr(config, "v_stages", 0) == getattr(config, "num_stages", None):
        return True
    # smaller tiles occupy more multiprocessors: useless where there are enough tiles for all
    return getattr(config, "num_warpgroups", 2) == 1 != usual.num_warpgroups and num_rows(problem) >= MANY_ROWS


def _has_order_of(config: Any, usual: Any) -> bool:
    names = "dynamic_tiles", "longest_first", "descending_turns", "ascending_mib", "ring_lag"
    return not any(_differ(name, config, usual) for name in names)


def _differ(name: str, one: Any, other: Any) -> bool:
    """Whether two configurations differ in this field, if configurations of their kind have it."""
    return getattr(one, name, None) != getattr(other, name, None)


def distance(one: Any, other: Any) -> float:
    """The distance of two configurations: a field that differs counts 1/2 and the powers of two between its values."""
    total = 0.0
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if a != b:
            total += 0.5 + (abs(math.log2((a or 1) / (b or 1))) if type(a) is int else 0.5)
    return total

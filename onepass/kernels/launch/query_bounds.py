"""From the tensors of intervals to the query blocks that a backward's tiles of keys visit, by a kernel before it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.integers import ceil_div
from ...problem import AttentionProblem
from ..arguments import ModifierTensors, QueryBoundsArguments
from ..compiler.compile import CompileRequest
from ..config import BackwardConfigSm80, BackwardConfigSm90
from .arguments import fake_integers, fake_tensor, strided_tensor, traced

BackwardConfig = BackwardConfigSm80 | BackwardConfigSm90
FIELDS = {"ranges": 4, "positions": 2, "starts": 1}  # of `ModifierTensors`, with their dimensions


class Kernel(NamedTuple):
    """The key of a kernel: everything that its code depends on.

    Attributes:
        visits_all: as `QueryBounds` in device/memory_bound/query_bounds.py has it.
        fields: those of `ModifierTensors` that a problem has.
    """

    tile_m: int
    tile_n: int
    is_packed: bool
    visits_all: bool
    fields: tuple[str, ...]
    has_seqused_k: bool
    has_window_left: bool
    has_window_right: bool


class Sizes(NamedTuple):
    """The sizes of a call's bounds.

    Attributes:
        entries, heads: batch entries and heads whose bounds differ.
        group: query heads that share bounds, and whose ranges differ.
        blocks, tiles: blocks of queries and tiles of keys, of all packed sequences together.
    """

    entries: int
    heads: int
    group: int
    blocks: int
    tiles: int


def kernel_of(problem: AttentionProblem, config: BackwardConfig) -> Kernel:
    return Kernel(
        config.tile_m,
        config.tile_n,
        problem.is_packed,
        problem.deterministic,
        interval_fields(problem),
        problem.has_seqused_k,
        problem.mask.window_left is not None,
        problem.mask.window_right is not None,
    )


def interval_fields(problem: AttentionProblem) -> tuple[str, ...]:
    """The `FIELDS` of `ModifierTensors` that the problem has."""
    has = problem.has_key_ranges, problem.has_q_positions, problem.has_seqstart_k
    return tuple(name for name, is_given in zip(FIELDS, has, strict=True) if is_given)


def sizes_of(problem: AttentionProblem, config: BackwardConfig, given: ModifierTensors) -> Sizes:
    """The sizes of the bounds of a call."""
    ranges, positions = given.ranges, given.positions
    # what is broadcast has a stride of 0
    by_head = ranges is not None and ranges.stride(2) != 0
    by_entry = (
        problem.has_seqused_k
        or problem.has_seqstart_k
        or (ranges is not None and ranges.stride(3) != 0)
        or (positions is not None and positions.stride(1) != 0)
    )
    batch, (tile_m, tile_n) = problem.batch, (config.tile_m, config.tile_n)
    if problem.is_packed:
        # the last tiles may hold rows of no sequence, which come after the last one's
        blocks, tiles = problem.seqlen_q // tile_m + batch, problem.seqlen_k // tile_n + batch + 1
    else:
        blocks, tiles = ceil_div(problem.seqlen_q, tile_m), ceil_div(problem.seqlen_k, tile_n)
    entries = batch if by_entry and not problem.is_packed else 1
    heads, group = (problem.num_heads_kv, problem.qhead_per_kvhead) if by_head else (1, 1)
    return Sizes(entries, heads, group, blocks, tiles)


def launch(
    kernel: Callable,
    problem: AttentionProblem,
    config: BackwardConfig,
    given: ModifierTensors,
    window: tuple[int | None, int | None],
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_k: Tensor | None,
) -> Tensor:
    """The query blocks that tiles of keys visit, `QueryBlocks`, as (tiles, 4, kv heads, entries) int32.

    Tile n of a packed sequence has the number cu_seqlens_k[i] // tile_n + i + n.

    Args:
        given: what `modifiers.arguments_of` returns. window: of `window_bounds`.
    """
    intervals = ModifierTensors(given.ranges, given.positions, given.starts)
    sizes = sizes_of(problem, config, intervals)
    given_first = next(t for t in intervals if t is not None)
    extremes, bounds = (
        given_first.new_empty((sizes.entries, sizes.heads, count, 4), dtype=torch.int32)
        for count in (sizes.blocks, sizes.tiles)
    )
    kernel(
        *QueryBoundsArguments(
            extremes,
            bounds,
            intervals,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            group=sizes.group,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            window_left=window[0],
            window_right=window[1],
        )
    )
    entries = 1 if problem.is_packed else problem.batch
    return bounds.expand(entries, problem.num_heads_kv, -1, -1).permute(2, 3, 1, 0)


def compile_requests(problem: AttentionProblem, config: BackwardConfig, arch: str) -> list[CompileRequest]:
    """The request for the kernel of a backward's bounds, if it needs any."""
    if not problem.has_intervals or problem.has_lists:
        return []
    kernel = kernel_of(problem, config)
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return [CompileRequest("backward_bounds", (pairs,), arch, functools.partial(trace, kernel))]


def trace(kernel: Kernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Int32

    from ..device.memory_bound.query_bounds import QueryBounds

    extremes, bounds = (fake_tensor(Int32, None, None, None, 4, align_bytes=16) for _ in range(2))
    arguments = QueryBoundsArguments(
        extremes,
        bounds,
        ModifierTensors(**{name: strided_tensor(Int32, FIELDS[name]) for name in kernel.fields}),
        seqlen_q=Int32(1),
        seqlen_k=Int32(1),
        group=Int32(1),
        cu_seqlens_q=fake_integers(kernel.is_packed),
        cu_seqlens_k=fake_integers(kernel.is_packed),
        seqused_k=fake_integers(kernel.has_seqused_k),
        window_left=Int32(0) if kernel.has_window_left else None,
        window_right=Int32(0) if kernel.has_window_right else None,
    )
    return traced(QueryBounds(kernel.tile_m, kernel.tile_n, kernel.is_packed, kernel.visits_all), arguments)

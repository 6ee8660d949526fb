"""From the tensors that hide pairs to the blocks that tiles visit, by kernels before the main one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...geometry.integers import ceil_div, overlapping
from ...problem import AttentionInputs, AttentionProblem, Blocks
from ..arguments import BlockListsArguments, ModifierTensors
from ..compiler import compile
from ..compiler.compile import CompileRequest
from .arguments import fake_integers, fake_tensor, strided_tensor, traced, window_bounds

# those of `ModifierTensors` that hide pairs, with their dimensions
FIELDS = {"ranges": 4, "positions": 2, "starts": 1, "query_ranges": 4, "kinds": 4}


class Kernel(NamedTuple):
    """The key of a kernel: everything that its code depends on.

    Attributes:
        of_keys: as `BlockLists` in device/memory_bound/block_lists.py has it.
        in_turns: whether tiles add to dQ in turns, which the kernel counts.
        fields: those of `FIELDS` that a problem has.
    """

    tile_m: int
    tile_n: int
    of_keys: bool
    is_packed: bool
    block_size: tuple[int, int] | None
    has_bits: bool
    in_turns: bool
    fields: tuple[str, ...]
    has_seqused_k: bool
    has_window_left: bool
    has_window_right: bool


def kernel_of(problem: AttentionProblem, tile: tuple[int, int], of_keys: bool) -> Kernel:
    """The key of the kernel that makes the lists of a problem.

    Args: tile: queries of a block and keys of a block. of_keys: whether the lists are those of a backward.
    """
    has = (
        problem.has_key_ranges,
        problem.has_q_positions,
        problem.has_seqstart_k,
        problem.has_query_ranges,
        problem.block_size is not None,
    )
    return Kernel(
        *tile,
        of_keys,
        problem.is_packed,
        problem.block_size,
        problem.has_block_bits,
        of_keys and problem.deterministic,
        tuple(name for name, is_given in zip(FIELDS, has, strict=True) if is_given),
        problem.has_seqused_k,
        problem.mask.window_left is not None,
        problem.mask.window_right is not None,
    )


def _are_needed(problem: AttentionProblem, of_keys: bool) -> bool:
    return problem.has_backward_lists if of_keys else problem.has_lists


def prepared(
    problem: AttentionProblem, tile: tuple[int, int], of_keys: bool, arch: str
) -> Callable[[ModifierTensors, AttentionInputs], ModifierTensors] | None:
    """`with_lists` for calls of one problem; None if they have none."""
    if not _are_needed(problem, of_keys):
        return None
    (request,) = compile_requests(problem, tile, of_keys, arch)
    return functools.partial(with_lists, compile.get(*request), kernel_of(problem, tile, of_keys), problem)


def with_lists(
    run: Callable, kernel: Kernel, problem: AttentionProblem, given: ModifierTensors, inputs: AttentionInputs
) -> ModifierTensors:
    """The modifiers of a call with the lists of its tiles.

    Args:
        run: the compiled kernel.
        given: what `modifiers.arguments_of` returns.
    """
    hiding = ModifierTensors(**{name: getattr(given, name) for name in kernel.fields})
    has_heads, has_entries = _differ(kernel, hiding)
    heads = problem.num_heads_kv if kernel.of_keys else problem.num_heads_q
    own_heads, group = (heads, problem.qhead_per_kvhead if kernel.of_keys else 1) if has_heads else (1, 1)
    batch = 1 if problem.is_packed else problem.batch
    entries = batch if has_entries or problem.has_seqused_k else 1
    blocks_q, blocks_k = (
        # the last ones of packed rows may hold rows of no sequence, which come after the last sequence's
        rows // size + problem.batch + 1 if problem.is_packed else ceil_div(rows, size)
        for rows, size in ((problem.seqlen_q, kernel.tile_m), (problem.seqlen_k, kernel.tile_n))
    )
    most_q, most_k = _most(kernel, inputs.blocks, blocks_q, blocks_k)
    tiles, width = (blocks_k, most_q) if kernel.of_keys else (blocks_q, most_k)
    # turns count all tiles that visit a block: one whose list is too short, because kinds have changed, would stop all
    if inputs.blocks is not None and (most := inputs.blocks.most) is not None and not kernel.in_turns:
        width = min(width, _longest(kernel, most[kernel.of_keys]) * group)

    def empty(*shape: int) -> Tensor:
        return inputs.q.new_empty((entries, own_heads, *shape), dtype=torch.int32)

    numbers, counts = empty(tiles, max(1, width)), empty(tiles, 2)
    turns = empty(blocks_q, most_k) if kernel.in_turns else None
    left, right = window_bounds(problem)
    run(
        *BlockListsArguments(
            empty(blocks_q, 4),
            None if given.query_ranges is None else empty(blocks_k, 4),
            numbers,
            counts,
            turns,
            hiding,
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            group=group,
            **{
                name: None if (t := getattr(inputs, name)) is None else t.contiguous()
                for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
            },
            window_left=left,
            window_right=right,
        )
    )
    views = (
        None if t is None else t.expand(batch, heads, -1, -1).permute(3, 2, 1, 0) for t in (numbers, counts, turns)
    )
    return given._replace(**dict(zip(("numbers", "counts", "turns"), views, strict=True)))


def _most(kernel: Kernel, blocks: Blocks | None, blocks_q: int, blocks_k: int) -> tuple[int, int]:
    """Blocks of queries and of keys that the longest sequence may have: a packed one, as many as a mask."""
    if blocks is None or not kernel.is_packed:
        return blocks_q, blocks_k
    most_q, most_k = (
        ceil_div(count * size, tile)
        for count, size, tile in zip(blocks.kinds.shape[2:], blocks.size, (kernel.tile_m, kernel.tile_n), strict=True)
    )
    return min(blocks_q, most_q), min(blocks_k, most_k)


def _longest(kernel: Kernel, most: int) -> int:
    """The longest list of a tile. Args: most: blocks of the mask in the fullest row, or for lists of keys column."""
    assert kernel.block_size is not None
    sizes = (kernel.block_size[0], kernel.tile_m), (kernel.block_size[1], kernel.tile_n)
    (own_block, own_tile), (block, tile) = reversed(sizes) if kernel.of_keys else sizes
    return overlapping(own_tile, own_block) * most * overlapping(block, tile)


def _differ(kernel: Kernel, hiding: ModifierTensors) -> tuple[bool, bool]:
    """Whether lists differ between heads, and between entries: what is broadcast has a stride of 0."""
    tensors = {name: getattr(hiding, name) for name in kernel.fields}
    return any(t.dim() == 4 and t.stride(2) for t in tensors.values()), any(t.stride(-1) for t in tensors.values())


def compile_requests(
    problem: AttentionProblem, tile: tuple[int, int], of_keys: bool, arch: str
) -> list[CompileRequest]:
    """The request for the kernel of a call's lists, if it needs any."""
    if not _are_needed(problem, of_keys):
        return []
    kernel = kernel_of(problem, tile, of_keys)
    pairs = tuple(zip(kernel._fields, kernel, strict=True))
    return [CompileRequest("block_lists", (pairs,), arch, functools.partial(trace, kernel))]


def trace(kernel: Kernel) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Int8, Int32

    from ..device.memory_bound.block_lists import BlockLists

    def found(columns: int | None = None, align_bytes: int = 4):
        return fake_tensor(Int32, None, None, None, columns, align_bytes=align_bytes)

    arguments = BlockListsArguments(
        found(4, 16),
        found(4, 16) if "query_ranges" in kernel.fields else None,
        found(),
        found(2),
        found() if kernel.in_turns else None,
        ModifierTensors(
            **{name: strided_tensor(Int8 if name == "kinds" else Int32, FIELDS[name]) for name in kernel.fields}
        ),
        seqlen_q=Int32(1),
        seqlen_k=Int32(1),
        group=Int32(1),
        cu_seqlens_q=fake_integers(kernel.is_packed),
        cu_seqlens_k=fake_integers(kernel.is_packed),
        seqused_k=fake_integers(kernel.has_seqused_k),
        window_left=Int32(0) if kernel.has_window_left else None,
        window_right=Int32(0) if kernel.has_window_right else None,
    )
    return traced(BlockLists(*kernel[:6]), arguments)

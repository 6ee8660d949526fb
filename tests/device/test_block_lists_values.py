"""The blocks that tiles visit: what the kernels of lists write, by their PTX on the CPU.

Lists are compared with the pairs that are visible by definition, as dense masks.
"""

import functools
import itertools
import random

import block_lists_kernel
import packages
import pytest
import torch
from torch.nn.functional import pad

from onepass import BlockMask, reference
from onepass.kernels.launch import modifiers
from onepass.problem import AttentionInputs, AttentionProblem, Blocks, Mask, Modifiers

pytestmark = packages.needs_machine_code

TILES = (128, 128), (80, 64), (64, 176), (192, 80)  # the lanes of a warp do not divide 80
NAMES = "key_ranges", "query_ranges", "q_positions", "seqstart_k", "blocks"


class RandomCall:
    """A problem with some of NAMES, its inputs, and the pairs that are visible.

    Args: names: those of NAMES that the call has; None: at random.

    Attributes:
        lengths: the queries, and the keys, of each entry or sequence.
        used: how many keys each of them uses.
        offsets: cu_seqlens_q and cu_seqlens_k.
    """

    def __init__(self, seed: int, names: tuple[str, ...] | None = None, is_packed: bool | None = None):
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)

        def integers(least: int, below: int, *shape: int) -> torch.Tensor:
            return torch.randint(least, below, shape, generator=generator, dtype=torch.int32)

        def ranges(rows: int, columns: int) -> torch.Tensor:
            low = integers(-3, columns + 3, *lead(), rng.choice([1, heads, heads]), rows, 1)
            widths, order = integers(0, columns + 3, *low.shape), rng.random()
            if order < 0.3:  # some rows see nothing
                low, widths = low.sort(-2).values, widths * (integers(0, 3, *low.shape) > 0)
            elif order < 0.6:  # blocks of rows that see some blocks of columns, which heads have in common or not
                head, row = torch.arange(low.shape[-3])[:, None, None], torch.arange(rows)[:, None]
                low = ((row // 128 + head) * 128 % rng.choice([256, 384, 4096]) + rng.choice([0, 0, 1])).int()
                low = low.expand(widths.shape)
                widths.fill_(rng.choice([127, 128, 130, 300]))
            elif order < 0.95:  # most rows see most columns
                low, widths = low % rng.choice([2, 70]) - 3, (columns + 3 - low % rng.choice([2, 70])).int()
            high = low + widths
            # no interval lies before the first column: its start would count as that of what a block sees
            return torch.cat([torch.where(high <= 0, 0, low), high], -1)

        def lead() -> tuple[int, ...]:
            return () if self.is_packed else (rng.choice([1, batch]),)

        self.is_packed, batch = rng.random() < 0.5 if is_packed is None else is_packed, rng.randint(1, 3)
        num_kv, group = rng.choice([(1, 1), (1, 3), (2, 2), (2, 2)])
        heads = num_kv * group
        rows, keys = rng.choice([1, 161, 300, 700, 700, 2500]), rng.choice([1, 129, 400, 700, 700])
        if rng.random() < 0.2:
            rows, keys = keys, rows
        shape = () if self.is_packed else (batch,)
        q, k = torch.zeros(*shape, rows, heads, 64).half(), torch.zeros(*shape, keys, num_kv, 64).half()
        self.lengths = [rows] * batch, [keys] * batch
        offsets = [None, None]
        if self.is_packed:
            cuts = [sorted([0, *(rng.randint(0, n) for _ in range(batch))]) for n in (rows, keys)]
            offsets = [torch.tensor(c, dtype=torch.int32) for c in cuts]
            self.lengths = tuple(t.diff().tolist() for t in offsets)
        used = None
        if rng.random() < 0.5:
            used = torch.tensor([rng.choice([n, rng.randint(0, n)]) for n in self.lengths[1]], dtype=torch.int32)
        self.used = self.lengths[1] if used is None else used.tolist()
        if names is None:
            names = [name for name in NAMES if rng.random() < 0.45] or [rng.choice(NAMES)]
        given, blocks = {}, None
        if "seqstart_k" in names:
            starts = [rng.choice([0, rng.randint(0, n)]) for n in self.used]
            given["seqstart_k"] = torch.tensor(starts, dtype=torch.int32)
        if "key_ranges" in names:
            given["key_ranges"] = ranges(rows, keys)
        if "query_ranges" in names:
            given["query_ranges"] = ranges(keys, rows)
        if "q_positions" in names:
            given["q_positions"] = integers(0, keys + 1, *lead(), rows)
        if "blocks" in names:
            size, longest = rng.choice([(64, 64), (128, 64), (64, 192)]), [max(n) for n in self.lengths]
            lead_of_blocks = rng.choice([1, batch]), rng.choice([1, heads])
            counts = [max(1, -(-n // own)) + rng.choice([0, 1]) for n, own in zip(longest, size, strict=True)]
            kinds = integers(0, 3, *lead_of_blocks, *counts)
            kinds = torch.where(integers(0, 3, *kinds.shape) == 0, kinds, rng.choice([0, 2, 2])).to(torch.int8)
            bits = None
            if rng.random() < 0.5:
                bits = integers(-(2**31), 2**31 - 1, *lead_of_blocks, longest[0], -(-longest[1] // 32))
            most = None
            if seed % 2:  # as of a compact mask
                most = tuple(int((kinds != 0).sum(dim).max()) for dim in (-1, -2))
            blocks = Blocks(kinds, size, bits, most)
        window = rng.choice([(None, None), (None, None), (None, 0), (300, 20)])
        self.mask, self.offsets = Mask.from_options(False, window), offsets
        self.inputs = AttentionInputs(q, k, k, None, *offsets, used, Modifiers(**given), blocks=blocks)
        self.problem = AttentionProblem.of(
            self.inputs, softmax_scale=0.1, mask=self.mask, softcap=None, deterministic=seed % 3 == 0
        )

    def pairs(self, b: int, names: tuple[str, ...], num_rows: int | None = None) -> torch.Tensor:
        """(heads, queries, keys that are used): the pairs of an entry or a sequence that nothing of these names hides.

        Args: names: of NAMES, and "mask" for the window. num_rows: other than that of the sequence.
        """
        given, problem = self.inputs.modifiers, self.problem
        rows, keys = slice(None), slice(None)
        if self.is_packed:
            rows, keys = (slice(*t[b : b + 2].tolist()) for t in self.offsets)

        def own(name: str, rows: slice) -> torch.Tensor | None:
            t = getattr(given, name) if name in names else None
            if t is None:
                return None
            t = t[None] if self.is_packed else of_entry(t, b)
            return t[..., rows, :] if t.dim() == 4 else t[..., rows]

        block_mask, blocks = None, self.inputs.blocks
        if "blocks" in names and blocks is not None:
            bits = None if blocks.bits is None else of_entry(blocks.bits, b)
            block_mask = BlockMask(of_entry(blocks.kinds, b), blocks.size, bits=bits)
        starts = given.seqstart_k if "seqstart_k" in names else None
        num_rows, num_keys = self.lengths[0][b] if num_rows is None else num_rows, self.lengths[1][b]
        q, k = (torch.zeros(1, problem.num_heads_q, n, 1) for n in (num_rows, num_keys))
        visible = reference.pairs_of(
            q,
            k,
            self.mask if "mask" in names else Mask(),
            seqused_k=torch.tensor([self.used[b]]),
            seqstart_k=None if starts is None else starts[b : b + 1],
            key_ranges=own("key_ranges", rows),
            query_ranges=own("query_ranges", keys),
            block_mask=block_mask,
            q_positions=own("q_positions", rows),
        ).visible
        return visible.expand(1, problem.num_heads_q, -1, -1)[0, ..., : self.used[b]]

    def kinds(self, b: int) -> torch.Tensor:
        """(heads, queries, keys that are used): the kind of each pair's block."""
        blocks, num_rows = self.inputs.blocks, self.lengths[0][b]
        kinds = of_entry(blocks.kinds, b)[0].expand(self.problem.num_heads_q, -1, -1)
        kinds = kinds.repeat_interleave(blocks.size[0], 1).repeat_interleave(blocks.size[1], 2)
        return kinds[:, :num_rows, : self.used[b]]


def of_entry(t: torch.Tensor, b: int) -> torch.Tensor:
    """The part of a tensor of (entries or 1, ..) that an entry has."""
    return t[min(b, t.shape[0] - 1)][None]


class Tiled:
    """What dense masks (heads, queries, keys) say of blocks: (heads that have lists, blocks of queries, of keys)."""

    def __init__(self, tile: tuple[int, int], group: int):
        self.tile, self.group = tile, group

    def tiled(self, pairs: torch.Tensor, of_others: tuple[bool, bool]) -> torch.Tensor:
        """Args: of_others: the value of pairs of queries, and of keys, that do not exist."""
        (rows, keys), (tile_m, tile_n) = pairs.shape[1:], self.tile
        pairs = pad(pairs, (0, -keys % tile_n), value=of_others[1])
        pairs = pad(pairs, (0, 0, 0, -rows % tile_m), value=of_others[0])
        return pairs.unflatten(2, (-1, tile_n)).unflatten(1, (-1, tile_m)).unflatten(0, (-1, self.group))

    def some(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.tiled(pairs, (False, False)).any(5).any(3).any(1)

    def every(self, pairs: torch.Tensor, *of_others: bool) -> torch.Tensor:
        return self.tiled(pairs, of_others).all(5).all(3).all(1)


def between(some: torch.Tensor, dim: int) -> torch.Tensor:
    """Blocks that are seen, and all between them."""
    from_first = some.int().cummax(dim).values
    return (from_first & some.int().flip(dim).cummax(dim).values.flip(dim)).bool()


def blocks_of(call: RandomCall, b: int, tile: tuple[int, int], of_keys: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that tiles visit, and those of them that are full.

    A block is visited if the keys that its queries see begin before the end of the tile and end after its begin, and
    likewise the queries that its keys see: intervals in between are not known. Kinds of blocks are.
    """
    tiled, num_rows = Tiled(tile, call.problem.qhead_per_kvhead if of_keys else 1), call.lengths[0][b]
    num_blocks = -(-num_rows // tile[0])
    ignores_rows = not of_keys  # past the last query: a forward stores no others
    pairs = call.pairs(b, ("mask", "key_ranges", "q_positions", "seqstart_k"))
    visited, full = between(tiled.some(pairs), 2), tiled.every(pairs, ignores_rows, False)
    if (ranges := call.inputs.modifiers.query_ranges) is not None:
        # a range that goes on after the last query, or begins there, counts as if it had the query after the last one
        pairs = call.pairs(b, ("query_ranges",), max(num_rows + 1, int(ranges.max())))
        after = pairs[:, num_rows:].any(1, keepdim=True)
        visited &= between(tiled.some(torch.cat([pairs[:, :num_rows], after], 1)), 1)[:, :num_blocks]
        full &= tiled.every(pairs[:, :num_rows], False, True)
    if call.inputs.blocks is not None:
        kinds = call.kinds(b)
        visited &= tiled.some(kinds != 0)
        full &= tiled.every(kinds >= (2 if call.problem.has_block_bits else 1), True, True)
    full &= visited
    visible = call.pairs(b, (*NAMES, "mask"))
    assert not (tiled.some(visible) & ~visited).any()
    assert not (full & ~tiled.every(visible, ignores_rows, False)).any()
    return visited, full


def check(call: RandomCall, tile: tuple[int, int], of_keys: bool, prepared) -> None:
    """Compare lists and turns with the pairs that are visible.

    Args: prepared: as that of kernels/launch/block_lists.py, with the problem, the tile and of_keys as its arguments.
    """
    problem, inputs, which = call.problem, call.inputs, 1 if of_keys else 0
    given = modifiers.arguments_of(problem, inputs.modifiers, inputs.blocks)
    found = prepared(problem, tile, of_keys)(given, inputs)
    assert (found.turns is not None) == (of_keys and problem.deterministic)
    assert found._replace(numbers=None, counts=None, turns=None) == given

    def listed(number: int, head: int, entry: int) -> tuple[list[int], list[int]]:
        num_full, num_visited = found.counts[:, number, head, entry].tolist()
        numbers = found.numbers[:num_visited, number, head, entry].tolist()
        return numbers[:num_full], numbers[num_full:]

    nothing = [] if of_keys else [0]  # a tile of queries visits one block at least
    for b in range(problem.batch):
        visited, full = blocks_of(call, b, tile, of_keys)
        firsts, entry = [0, 0], b
        if call.is_packed:
            firsts, entry = [int(t[b]) // size + b for t, size in zip(call.offsets, tile, strict=True)], 0
        of_tiles = (visited.mT, full.mT) if of_keys else (visited, full)
        for head, number in itertools.product(*map(range, of_tiles[0].shape[:2])):
            some, every = (t[head, number] for t in of_tiles)
            partial = (some & ~every).nonzero().flatten().tolist()
            expected = every.nonzero().flatten().tolist(), partial if some.any() else nothing
            assert listed(firsts[which] + number, head, entry) == expected, (b, head, number)
        if found.turns is not None:
            for head, m, n in visited.nonzero().tolist():
                turn = found.turns[n, firsts[0] + m, head, entry]
                assert turn == visited[head, m, :n].sum(), (b, head, m, n)
    if call.is_packed:  # tiles of rows that belong to no sequence
        end, rows = int(call.offsets[which][-1]), (problem.seqlen_q, problem.seqlen_k)[which]
        for n, head in itertools.product(range(-(-(rows - end) // tile[which])), range(found.counts.shape[2])):
            assert listed(end // tile[which] + problem.batch + n, head, 0) == ([], nothing)


@pytest.mark.sampled(quick=0, slow=5)
@pytest.mark.parametrize("first", range(0, 200, 8))
def test_lists_have_the_blocks_that_are_visible(first):
    for seed in range(first, first + 8):
        prepared = functools.partial(block_lists_kernel.prepared, warps_reversed=seed % 4 > 1)
        for of_keys in (False, True):
            check(RandomCall(seed), TILES[seed % 4], of_keys, prepared)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("of_keys", [True, False])
def test_packed_sequences_with_all_that_hides_pairs(of_keys):
    call = RandomCall(423, NAMES, is_packed=True)
    assert call.problem.deterministic
    assert call.problem.has_block_bits
    check(call, TILES[1], of_keys, block_lists_kernel.prepared)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("of_keys", [True, False])
def test_more_blocks_than_a_warp_has_lanes(of_keys):
    call = RandomCall(177, ("key_ranges", "query_ranges"), is_packed=False)
    assert call.problem.deterministic
    check(call, (16, 16), of_keys, block_lists_kernel.prepared)

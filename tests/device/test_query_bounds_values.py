"""The query blocks that a backward's tiles of keys visit: what the kernel writes, by its PTX on the CPU."""

import random
from typing import NamedTuple

import packages
import pytest
import query_bounds_kernel
import query_bounds_reference
import torch

from onepass import reference
from onepass.kernels.launch import modifiers, query_bounds
from onepass.kernels.launch.arguments import window_bounds
from onepass.kernels.launch.modifiers import entries_of
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers

pytestmark = packages.needs_machine_code


class Tiles(NamedTuple):
    """What a configuration says of tiles."""

    tile_m: int
    tile_n: int


CONFIGS = Tiles(128, 128), Tiles(80, 64)  # the lanes of a warp do not divide 80


class RandomCall:
    """A problem, its inputs, and the pairs that are visible in each sequence: (heads, queries, keys)."""

    def __init__(self, seed: int, deterministic: bool = False):
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.is_packed, batch = rng.random() < 0.5, rng.randint(1, 3)
        num_kv, group = rng.choice([(1, 1), (1, 3), (2, 2), (2, 2)])
        heads = num_kv * group
        rows, keys = rng.choice([1, 100, 128, 300, 300, 2500]), rng.choice([1, 128, 200, 400, 400])
        lead = () if self.is_packed else (batch,)
        q, k = torch.zeros(*lead, rows, heads, 64).half(), torch.zeros(*lead, keys, num_kv, 64).half()
        self.offsets = [[0, rows * (b + 1)] for b in range(batch)], [[0, keys * (b + 1)] for b in range(batch)]
        cu_seqlens = [None, None]
        lengths = [keys] * batch
        if self.is_packed:
            cuts = [sorted([0, *(rng.randint(0, n) for _ in range(batch))]) for n in (rows, keys)]
            cu_seqlens = [torch.tensor(c, dtype=torch.int32) for c in cuts]
            lengths = cu_seqlens[1].diff().tolist()
        entries = 1 if self.is_packed else rng.choice([1, batch])
        shape = () if self.is_packed else (entries,)
        used = start = ranges = positions = None
        if rng.random() < 0.5:
            used = torch.tensor([rng.randint(0, n) for n in lengths], dtype=torch.int32)
        ends = lengths if used is None else used.tolist()
        if rng.random() < 0.5:
            start = torch.tensor([rng.randint(0, n) for n in ends], dtype=torch.int32)
        if start is None or rng.random() < 0.5:
            low = torch.randint(-3, keys + 3, (*shape, rng.choice([1, heads, heads]), rows, 1))
            widths, order = torch.randint(0, keys, low.shape), rng.random()
            if order < 0.4:
                low = low.sort(-2).values
            elif order < 0.8:  # blocks of queries that see one tile of keys, which heads have in common or not
                head, row = torch.arange(low.shape[-3])[:, None, None], torch.arange(rows)[:, None]
                low = ((row // 128 + head) * 128 % rng.choice([256, 384, 4096])).expand(low.shape)
                widths.fill_(rng.choice([128, 130]))
            ranges = torch.cat([low, low + widths], -1).int()
        if rng.random() < 0.4:
            positions = torch.randint(0, keys + 1, (*shape, rows)).int()
        window = rng.choice([(None, None), (None, 0), (50, 0), (30, 20)])
        self.mask = Mask.from_options(False, window)
        self.inputs = AttentionInputs(q, k, k, None, *cu_seqlens, used, Modifiers(start, ranges, positions))
        self.problem = AttentionProblem.of(
            self.inputs, softmax_scale=0.1, mask=self.mask, softcap=None, deterministic=deterministic
        )
        self.lengths, self.used, self.cu_seqlens = lengths, ends, cu_seqlens

    def sequences(self):
        """The number of each sequence, its rows, its entry in tensors of rows, and its visible pairs."""
        given, problem = self.inputs.modifiers, self.problem
        for b in range(problem.batch):
            rows, entry = slice(0, problem.seqlen_q), b
            if self.is_packed:
                rows, entry = slice(*self.cu_seqlens[0][b : b + 2].tolist()), 0
            num_rows, keys = rows.stop - rows.start, self.lengths[b]
            options = {
                "seqused_k": torch.tensor([self.used[b]]),
                "seqstart_k": None if given.seqstart_k is None else given.seqstart_k[b : b + 1],
                "q_positions": None if given.q_positions is None else self.own(given.q_positions, entry)[None, rows],
            }
            visible = reference.visible_pairs(1, num_rows, keys, self.mask, device=torch.device("cpu"), **options)
            if given.key_ranges is not None:
                low, high = self.own(given.key_ranges, entry)[:, rows].unbind(-1)
                j = torch.arange(keys)
                visible = visible & (low[..., None] <= j) & (j < high[..., None])
            yield b, rows, entry, visible.expand(problem.num_heads_q, num_rows, keys)

    def own(self, t, entry):
        return t if self.is_packed else t[min(entry, t.shape[0] - 1)]


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_intervals_are_those_of_the_definition(first):
    for seed in range(first, first + 20):
        call = RandomCall(seed)
        found = query_bounds_reference.intervals(call.problem, call.inputs)
        entries = entries_of(call.problem)
        found = found.expand(entries, call.problem.num_heads_q, call.problem.seqlen_q, 2)
        for b, rows, entry, visible in call.sequences():
            low, high = (x[..., None] for x in found[entry, :, rows].unbind(-1))
            j = torch.arange(visible.shape[-1])
            seen = (low <= j) & (j < high) & (j < call.used[b])
            assert torch.equal(seen, visible), seed


def check(call, config, bounds, seed):
    """Compare bounds with the pairs that are visible."""
    (tile_m, tile_n), problem, group = config, call.problem, call.problem.qhead_per_kvhead
    if call.is_packed:  # tiles of rows that belong to no sequence
        end = int(call.cu_seqlens[1][-1])
        for n in range(-(-(problem.seqlen_k - end) // tile_n)):
            assert not bounds[end // tile_n + problem.batch + n, ::3].any(), seed
    for b, _, entry, visible in call.sequences():
        tile = 0 if not call.is_packed else int(call.cu_seqlens[1][b]) // tile_n + b
        for n, h in ((n, h) for n in range(-(-visible.shape[-1] // tile_n)) for h in range(problem.num_heads_kv)):
            begin, clear_begin, clear_end, end = bounds[tile + n, :, h, entry].tolist()
            assert 0 <= begin <= clear_begin <= clear_end <= end
            own = visible[h * group : (h + 1) * group, :, n * tile_n : (n + 1) * tile_n]
            blocks = own.split(tile_m, 1)
            # a block whose queries see keys before the tile, and others keys after it, visits it in vain
            of_head = visible[h * group : (h + 1) * group].split(tile_m, 1)
            seen = [block.any(1).any(0).nonzero() for block in of_head]
            start, stop = n * tile_n, (n + 1) * tile_n
            seeing = [m for m, keys in enumerate(seen) if len(keys) and keys[0] < stop and keys[-1] >= start]
            assert all(m in seeing for m, block in enumerate(blocks) if block.any())
            if problem.deterministic:
                is_used = n * tile_n < call.used[b]
                assert (begin, end) == ((0, len(blocks)) if is_used and own.numel() else (0, 0)), seed
            elif seeing:
                assert (begin, end) == (seeing[0], seeing[-1] + 1), seed
            else:
                assert begin == end, seed
            is_clear = [bool(x.all()) and x.shape[1:] == (tile_m, tile_n) for x in blocks]
            assert all(is_clear[clear_begin:clear_end]), seed
            assert (clear_begin < clear_end) == any(is_clear), seed


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_the_reference_knows_the_blocks_that_see_a_tile(first, deterministic):
    for seed in range(first, first + 20):
        call, config = RandomCall(seed, deterministic), CONFIGS[seed % 2]
        check(call, config, query_bounds_reference.query_bounds(call.problem, config, call.inputs), seed)


def computed(problem, inputs, config, **order):
    """The bounds that the kernel writes. Args: order: options of `ptx_interpreter.run`."""
    return query_bounds.launch(
        query_bounds_kernel.kernel_of(problem, config, **order),
        problem,
        config,
        modifiers.arguments_of(problem, inputs.modifiers),
        window_bounds(problem),
        *(None if t is None else t.contiguous() for t in inputs[4:7]),
    )


def check_kernel(call, config, seed, **order):
    found = computed(call.problem, call.inputs, config, **order)
    check(call, config, found, seed)
    # also where no tile has the number: such tiles visit nothing
    assert torch.equal(found, query_bounds_reference.query_bounds(call.problem, config, call.inputs)), seed


@pytest.mark.sampled(quick=0, slow=5)
@pytest.mark.parametrize("first", range(0, 200, 8))
def test_the_kernel_writes_what_the_reference_does(first):
    for seed in range(first, first + 8):
        call = RandomCall(seed, deterministic=seed % 8 > 5)
        check_kernel(call, CONFIGS[seed % 2], seed, warps_reversed=seed % 4 > 1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_sequences_of_all_modifiers(deterministic):
    for seed in (169, 338) if not deterministic else (82,):
        call = RandomCall(seed, deterministic)
        assert call.is_packed
        assert all(t is not None for t in call.inputs.modifiers[:3])
        check_kernel(call, CONFIGS[1], seed)


def test_more_blocks_than_a_warp_has_lanes():
    """Blocks of queries that see exactly a tile of keys need no mask there."""
    low = (torch.arange(70 * 64) >= 40 * 64).int() * 128
    ranges = torch.stack([low, low + 128], -1)[None, None]
    q, k = torch.zeros(1, 70 * 64, 1, 64).half(), torch.zeros(1, 256, 1, 64).half()
    inputs = AttentionInputs(q, k, k, *[None] * 4, Modifiers(key_ranges=ranges))
    problem = AttentionProblem.of(inputs, softmax_scale=0.1, mask=Mask(), softcap=None, deterministic=False)
    bounds = computed(problem, inputs, Tiles(64, 128))
    assert bounds[:, :, 0, 0].tolist() == [[0, 0, 40, 40], [40, 40, 70, 70]]

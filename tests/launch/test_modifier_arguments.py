"""What kernels are given for ranges of keys, positions and left padding, beside its definition, on the CPU."""

import random

import pytest
import torch

from onepass import reference
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.launch import modifiers
from onepass.problem import AttentionProblem, Mask, ModifiedInputs, Modifiers

CONFIG = BackwardConfigSm90(tile_m=128, q_stages=2, dynamic_tiles=True)


class RandomCall:
    """A problem, its inputs, and the pairs that are visible in each sequence: (heads, queries, keys)."""

    def __init__(self, seed: int, deterministic: bool = False):
        rng = self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.is_packed, batch = rng.random() < 0.5, rng.randint(1, 3)
        num_kv, group = rng.randint(1, 2), rng.randint(1, 2)
        heads, rows, keys = num_kv * group, rng.choice([1, 100, 128, 300]), rng.choice([1, 128, 200, 400])
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
            low = torch.randint(-3, keys + 3, (*shape, rng.choice([1, heads]), rows, 1))
            low = low.sort(-2).values if rng.random() < 0.7 else low
            ranges = torch.cat([low, low + torch.randint(0, keys, low.shape)], -1).int()
        if rng.random() < 0.4:
            positions = torch.randint(0, keys + 1, (*shape, rows)).int()
        window = rng.choice([(None, None), (None, 0), (50, 0), (30, 20)])
        self.mask = Mask.from_options(False, window)
        self.inputs = ModifiedInputs(q, k, k, None, *cu_seqlens, used, Modifiers(start, ranges, positions))
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
        found = modifiers.intervals(call.problem, call.inputs)
        entries = modifiers.entries_of(call.problem)
        found = found.expand(entries, call.problem.num_heads_q, call.problem.seqlen_q, 2)
        for b, rows, entry, visible in call.sequences():
            low, high = (x[..., None] for x in found[entry, :, rows].unbind(-1))
            j = torch.arange(visible.shape[-1])
            seen = (low <= j) & (j < high) & (j < call.used[b])
            assert torch.equal(seen, visible), seed


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_tiles_of_keys_visit_the_blocks_that_see_them(first, deterministic):
    tile_m, tile_n = CONFIG.tile_m, CONFIG.tile_n
    for seed in range(first, first + 20):
        call = RandomCall(seed, deterministic)
        problem, group = call.problem, call.problem.qhead_per_kvhead
        bounds = modifiers.query_bounds(problem, CONFIG, call.inputs)
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
                seeing = [m for m, block in enumerate(blocks) if block.any()]
                if deterministic:
                    is_used = n * tile_n < call.used[b]
                    assert (begin, end) == ((0, len(blocks)) if is_used and own.numel() else (0, 0)), seed
                elif seeing:
                    assert (begin, end) == (seeing[0], seeing[-1] + 1), seed
                else:
                    assert begin == end, seed
                for m in range(clear_begin, clear_end):
                    assert blocks[m].all(), seed
                    assert blocks[m].shape[1:] == (tile_m, tile_n), seed
                is_clear = [bool(x.all()) and x.shape[1:] == (tile_m, tile_n) for x in blocks]
                assert (clear_begin < clear_end) == any(is_clear), seed


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_pairs_add_up_by_position(is_packed):
    torch.manual_seed(0)
    heads, rows, keys, num_positions = 2, 7, 5, 9
    positions = torch.randint(0, num_positions, (rows,) if is_packed else (3, rows)).int()
    bias = torch.zeros(*(() if is_packed else (1,)), heads, num_positions, keys)
    found = torch.randn(*(() if is_packed else (3,)), heads, rows, keys)
    problem = RandomCall(0).problem
    object.__setattr__(problem, "is_packed", is_packed)
    total = modifiers._by_position(problem, bias, found, positions)
    expected = torch.zeros_like(total)
    for index in range(1 if is_packed else 3):
        target, source = (expected, found) if is_packed else (expected[index], found[index])
        target.index_add_(1, (positions if is_packed else positions[index]).long(), source)
    torch.testing.assert_close(total, expected)

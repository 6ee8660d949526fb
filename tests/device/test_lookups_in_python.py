"""Device code that looks things up and ends rows, run as Python: pages, descales, softmaxes, lists of blocks."""

import functools
import itertools
import math
import random
from types import SimpleNamespace

import block_lists_kernel
import numpy as np
import packages
import pytest
import torch
from test_block_lists_values import TILES, RandomCall, check
from test_elements_in_python import Float, Values, fresh, size

from onepass.kernels.arguments import AppendArguments, BlockListsArguments
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.launch import block_lists, modifiers
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers

pytestmark = packages.needs_compiler


class Registers(Values):
    """A tensor of registers, whose coordinates may be nested."""

    def __init__(self, shape, element_type=float):
        super().__init__(np.zeros(shape, np.int64 if element_type is int else float))

    def fill(self, value):
        self.array[...] = value

    def __getitem__(self, index):
        return super().__getitem__(flat(index))

    def __setitem__(self, index, value):
        super().__setitem__(flat(index), value)


def flat(index):
    if not isinstance(index, tuple):
        return (index,)
    return tuple(i for part in index for i in (part if isinstance(part, tuple) else (part,)))


class View(Values):
    """A tensor of integers in memory that it shares."""

    def __init__(self, array):
        self.array, self.shape = array, array.shape

    def __getitem__(self, index):
        if isinstance(index, tuple) and None in index:
            return View(self.array[tuple(slice(None) if i is None else i for i in index)])
        return super().__getitem__(index)


class Lane:
    """The number of the thread's lane, for code of a warp."""

    def __init__(self):
        self.number = 0

    def __call__(self):
        return self.number


@pytest.fixture
def device(monkeypatch):
    """The modules, with the kernel language replaced by Python. Code of a whole warp runs with a warp of one lane."""
    lane = Lane()
    arch = SimpleNamespace(
        lane_idx=lane,
        fmax=max,
        rcp_approx=lambda x: 1 / x,
        vote_any_sync=bool,
        vote_ballot_sync=int,
        popc=int.bit_count,
        warp_reduction_sum=lambda value, **_: value,
        warp_redux_sync=lambda value, kind: value,
        make_warp_uniform=lambda value: value,
        thread_idx=lambda: (0, 0, 0),
    )
    cute = SimpleNamespace(
        arch=arch,
        size=size,
        ceil_div=lambda a, b: -(-a // b),
        make_rmem_tensor=lambda shape, dtype: Registers(shape, dtype),
        math=SimpleNamespace(exp2=lambda x, fastmath: 2.0**x, log2=lambda x, fastmath: math.log2(x)),
        autovec_copy=lambda source, target: np.copyto(target.array, source.array),
        domain_offset=lambda place, values: View(values.array[tuple(slice(i, None) for i in place)]),
    )
    cutlass = SimpleNamespace(
        range_constexpr=range, range=lambda *bounds, unroll: range(*bounds), const_expr=lambda value: value
    )
    stand_ins = {"cute": cute, "cutlass": cutlass, "Float32": Float, "Int32": int, "Boolean": bool, "LANES": 1}
    names = {
        "online": "blocks.softmax.online",
        "scales": "blocks.softmax.cache_scales",
        "paged": "blocks.tiles.paged",
        "packed": "blocks.tiles.packed",
        "append": "memory_bound.append",
        "lists": "memory_bound.block_lists",
        "rows": "memory_bound.backward_rows",
        "stats": "blocks.memory.row_stats",
        "sinks": "blocks.softmax.sinks",
        "modifiers": "blocks.softmax.modifiers",
        "tiles": "blocks.tiles.key_tiles",
        "repair": "blocks.repair.gradients",
        "output": "sm90.forward.output",
        "scales_sm90": "sm90.forward.scales",
        "background": "sm90.backward.rows",
        "atomic": "sm90.backward.dq_atomic",
        "wide": "sm90.backward.wide",
        "private": "sm90.backward.dq_private",
        "dkv": "sm90.backward.dkv",
        "scores": "sm90.backward.scores",
    }
    modules = {name: fresh(f"onepass.kernels.device.{path}") for name, path in names.items()}
    for module in modules.values():
        for name, stand_in in stand_ins.items():
            monkeypatch.setattr(module, name, stand_in, raising=False)
    monkeypatch.setattr(modules["online"], "weight_of_sink", modules["sinks"].weight_of_sink)
    lists, rows = modules["lists"], modules["rows"]
    owners = [(lists.BlockLists, "number_of_warp"), (lists.BlockLists, "sequence_of"), (lists.Pairs, "compared")]
    owners += [(lists.Pairs, "kinds_of"), (lists, "overlap"), (lists, "write_four")]
    for owner, name in owners:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)
    changes = {"WARPS": 1, "count": int, "sequence_of_block": rows.sequence_of_block.__wrapped__}
    for name, value in changes.items() | {"Modifiers": modules["modifiers"].Modifiers}.items():
        monkeypatch.setattr(lists, name, value)
    return SimpleNamespace(**modules, lane=lane, arch=arch)


@pytest.mark.parametrize("sink", [None, -math.inf, -3.0, 4.0, math.inf])
def test_the_end_of_a_row(device, sink):
    rng = random.Random(0)
    finish = device.online.finish.__wrapped__
    for scale_log2, _ in itertools.product((0.3, 1.5), range(20)):
        scores = [rng.uniform(-9, 9) for _ in range(rng.choice([0, 1, 7]))]
        row_max = rng.choice(scores) if scores else 0.0  # any reference will do
        row_sum = sum(2.0 ** (s * scale_log2 - row_max * scale_log2) for s in scores)
        weight, lse = finish(Float(row_max), Float(row_sum), scale_log2, None if sink is None else Float(sink))
        terms = [s * scale_log2 * math.log(2.0) for s in scores] + [sink] * (sink is not None)
        expected = torch.tensor([-math.inf, *terms], dtype=torch.float64).logsumexp(0).item()
        assert lse == pytest.approx(expected)
        share = 0.0 if not scores or sink == math.inf else math.exp(row_max * scale_log2 * math.log(2.0) - expected)
        assert weight == pytest.approx(share)


CAPACITY, PAGE_SIZE, NUM_PAGES, HEADS = 96, 16, 9, 2
TABLE = np.array([[3, 8, 0, 5, 1, 7], [2, 6, -1, 9, 4, 4]])  # pages 2 and 3 of the second sequence do not exist


def page_of(entry, key):
    return min(max(TABLE[entry, key // PAGE_SIZE], 0), NUM_PAGES - 1)


def pages_of(device):
    return device.paged.Pages(Values(TABLE), PAGE_SIZE)


def test_rows_in_pages(device):
    rows = np.arange(PAGE_SIZE * NUM_PAGES).reshape(PAGE_SIZE, 1, NUM_PAGES)
    pages = SimpleNamespace(table=Values(TABLE), page_size=PAGE_SIZE)
    for entry in range(2):
        paged = device.paged.PagedRows(Values(rows), pages, entry)
        locations = device.paged.KeyLocations(pages, entry, NUM_PAGES, 4)
        boxes = device.paged.BoxLocations(pages, NUM_PAGES, 8, 4)
        for key, seqlen_k in itertools.product(range(0, CAPACITY, 5), (1, 50, CAPACITY)):
            assert paged[key, 0] == rows[key % PAGE_SIZE, 0, page_of(entry, key)]
            for lane in range(8):  # more lanes than keys that are loaded together
                device.lane.number = lane
                locations.look_up.__wrapped__(locations, key - 7, seqlen_k)
                nearest = min(max(key - 7 + lane % 4, 0), seqlen_k - 1)
                assert locations.found.array.tolist() == [page_of(entry, nearest), nearest % PAGE_SIZE]
                boxes.keep = lambda: None
                boxes.look_up.__wrapped__(boxes, entry, key // 32, seqlen_k)
                nearest = min((key // 32 * 4 + lane % 4) * 8, seqlen_k - 1)
                assert boxes.k_boxes.array.tolist() == [page_of(entry, nearest), nearest % PAGE_SIZE // 8]


@pytest.mark.parametrize("has_dlse", [False, True])
def test_statistics_of_rows(device, monkeypatch, has_dlse):
    """Rows without keys, and rows that do not exist, have a probability and a delta of 0, whatever their dlse is."""
    stats, tile_m, num_rows, rng = device.stats, 64, 27, np.random.default_rng(0)
    monkeypatch.setattr(stats, "copy_of", lambda value: value)
    lse, dlse, products = rng.normal(size=(3, num_rows))
    lse[[3, 20]], dlse[20], products[3] = -math.inf, math.nan, math.nan
    found = Values(np.full(2 * tile_m, 7.0))
    for lane in range(32):
        device.lane.number = lane
        product = Float(products[lane] if lane < num_rows else math.nan)
        given = Values(lse), Values(dlse) if has_dlse else None
        stats.write_stats.__wrapped__(found, 16, 30, num_rows, product, *given)
    expected = np.full(2 * tile_m, 7.0)
    for row in range(30):
        place, is_empty = stats.stats_position(16 + row), row >= num_rows or lse[row] == -math.inf
        expected[place] = -math.inf if is_empty else -lse[row] / math.log(2.0)
        expected[tile_m + place] = 0.0 if is_empty else (dlse[row] if has_dlse else 0.0) - products[row]
    np.testing.assert_allclose(found.array, expected)


@pytest.mark.parametrize("added", [None, 0, 5])
def test_keys_that_are_used(device, added):
    """A length that is none counts as the nearest one: no host has read it."""
    lengths = device.packed.Lengths(None, None, Values([-40, -3, 0, 7, 78, 80, 10**6]), added)
    found = [device.packed.used_keys(lengths, entry, 80) for entry in range(7)]
    assert found == [min(max(n + (added or 0), 0), 80) for n in (-40, -3, 0, 7, 78, 80, 10**6)]
    assert device.packed.used_keys(lengths._replace(seqused_k=None), 3, 80) == 80


class Heads(int):
    """A number of heads, as a kernel divides by it."""

    divisor = property(int)


def test_tiles_over_a_cache(device, monkeypatch):
    """Rows that belong to no sequence see no key."""
    packed, schedule = device.packed, device.packed.PackedSchedule
    one_lane = SimpleNamespace(inclusive_sum=lambda x: x, count=int, broadcast=lambda x, lane: x)
    monkeypatch.setattr(packed, "warp", one_lane)
    for name in ("_count_tiles", "find"):
        monkeypatch.setattr(schedule, name, getattr(schedule, name).__wrapped__)
    offsets, used = [0, 5, 5, 38, 39, 60], [7, 3, 90, 50]
    lengths = packed.Lengths(Values(offsets[:-1]), None, Values(used))
    tiles = schedule(lengths, offsets[-1], 80, Heads(2), 16, False)
    found = [tiles.find(number) for number in range(tiles.num_tiles)]
    seen = {(t.start_q + 16 * t.m_block, t.head): (t.sequence, t.seqlen_k) for t in found}
    assert seen == {
        (start + row, head): (i, [7, 3, 80, 50, 0][i])
        for i, (start, end) in enumerate(itertools.pairwise(offsets))
        for row in range(0, end - start, 16)
        for head in range(2)
    }


@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_new"), [(1, 3), (3, 1), (2, 2), (2, 0)])
def test_rows_that_a_step_writes_and_rotates(device, monkeypatch, seqlen_q, seqlen_new, is_e4m3):
    """Each query and each new key that has a place, once, with its position; V is not rotated."""
    filled, room, written = [4, 9, -1], 10, {}
    kernel = device.append.Append(False, 2, is_e4m3)
    monkeypatch.setattr(kernel, "locate", functools.partial(type(kernel).locate.__wrapped__, kernel))

    def note(source, target, cos, sin, position, *descale):
        assert (cos is None) == (sin is None)
        written[which, source.array.item(), target.array.item()] = cos is not None, position, *descale

    for name in ("move", "round"):
        monkeypatch.setattr(kernel, name, note)

    def rows(count):
        return Values(np.arange(3 * count).reshape(3, count, 1, 1))

    q, new, cache = rows(seqlen_q), rows(seqlen_new) if seqlen_new else None, rows(room)
    count = max(seqlen_q, seqlen_new)
    for number, which in itertools.product(range(3 * count), range(3)):
        device.arch.block_idx = lambda place=(number, 0, which): place
        caches = (new, new, cache, cache) if seqlen_new else (None,) * 4
        more = {"cos": "cos", "sin": "sin", "seqlen_new": seqlen_new, "rows": count}
        arguments = AppendArguments(q, q, *caches, Values(filled), **more)
        type(kernel).kernel.__wrapped__(kernel, arguments)
    expected = {}
    for entry, start in enumerate(filled):
        for row in range(seqlen_q):
            at = entry * seqlen_q + row
            expected[2, at, at] = True, start + seqlen_new - seqlen_q + row
        for row in range(seqlen_new):
            if 0 <= start + row < room:
                for tensor in range(2):
                    place = tensor, entry * seqlen_new + row, entry * room + start + row
                    expected[place] = tensor == 0, start + row, *([None] if is_e4m3 else [])
    assert written == expected


def test_places_of_new_keys(device):
    append = device.append.Append(False, 2)
    locate = device.append.Append.locate.__wrapped__
    for entry, position in itertools.product(range(2), range(-20, CAPACITY + 20)):
        is_inside = 0 <= position < CAPACITY
        page, row, exists = locate(append, Values(np.zeros((2, CAPACITY))), None, entry, position)
        assert exists == is_inside
        assert not exists or (page, row) == (entry, position)
        page, row, exists = locate(append, Values(np.zeros((NUM_PAGES, PAGE_SIZE))), Values(TABLE), entry, position)
        assert exists == (is_inside and 0 <= TABLE[entry, position // PAGE_SIZE] < NUM_PAGES)
        assert not exists or (page, row) == (TABLE[entry, position // PAGE_SIZE], position % PAGE_SIZE)


@pytest.mark.parametrize("kind", ["entry", "block", "page"])
def test_descales_of_a_cache(device, kind):
    """A step multiplies scores by the descales of K, and P V over several steps gives values by those of V."""
    rng, tile_n, block = np.random.default_rng(0), 32, 48
    shape = NUM_PAGES if kind == "page" else 2, HEADS, CAPACITY // block if kind == "block" else 1
    given = rng.uniform(0.5, 2.0, (2, *shape)) * rng.choice([-1, 1, 4], (1, shape[0], 1, 1))
    tensors = device.scales.DescaleTensors(*(Values(t) for t in given), block if kind == "block" else None)
    pages = pages_of(device) if kind == "page" else None
    run = {name: getattr(f, "__wrapped__", None) for name, f in vars(device.scales.CacheDescales).items()}
    for entry, head, seqlen_k in itertools.product(range(2), range(HEADS), (CAPACITY, 48, 0)):
        of_keys = []
        for key in range(CAPACITY):
            key = min(key, max(seqlen_k - 1, 0))
            row = page_of(entry, key) if kind == "page" else entry
            of_keys.append(given[:, row, head, key // block if kind == "block" else 0])
        descales = device.scales.CacheDescales(tensors, pages, entry, head, tile_n, kind != "entry")
        descales.look_up = functools.partial(run["look_up"], descales)
        total, expected = Registers((1,)), 0.0
        run["begin"](descales, -16, seqlen_k)
        for first in range(-16, CAPACITY - tile_n, tile_n):
            descales.look_up(first, seqlen_k)
            scores, p = Values(np.ones((2, tile_n // 4))), Registers((2, 2, 1, tile_n // 8))
            run["scale_scores"](descales, scores, 1, 3.0)
            keys = [max(first + c // 2 * 8 + c % 2, 0) for c in range(tile_n // 4)]
            np.testing.assert_allclose(scores.array[1], [3.0 * of_keys[key][0] for key in keys])
            assert (scores.array[0] == 1.0).all()
            p.array[...], p.shape = rng.random(p.shape), (4, 1, tile_n // 8)
            expected += sum(p.array[..., n].sum() * of_keys[max(first + 8 * n, 0)][1] for n in range(tile_n // 8))
            run["scale_p"](descales, p, total)
            assert kind == "entry" or abs(p.array).max() <= 1  # P is rounded to fp16
            total[0] = total[0] + p.array.sum()
        run["finish"](descales, total)
        assert total[0] == pytest.approx(expected)


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 14, 17, 23, 24, 41, 43, 46, 48, 66, 69, 113, 133, 141, 175, 181, 183])
def test_lists_of_blocks(device, seed):
    def run(kernel, *arguments):
        given = block_lists_kernel.with_arbitrary_values(BlockListsArguments(*arguments))
        code = device.lists.BlockLists(*kernel[:6])
        tensors = device.modifiers.ModifierTensors(
            **{name: Values(t.numpy()) for name, t in given.modifiers._asdict().items() if t is not None}
        )
        lengths = device.lists.Lengths(
            *(
                None if t is None else Values(t.numpy())
                for t in (given.cu_seqlens_q, given.cu_seqlens_k, given.seqused_k)
            )
        )
        found = {name: None if (t := getattr(given, name)) is None else View(t.numpy()) for name in given._fields[:5]}
        window, seqlens = (given.window_left, given.window_right), (given.seqlen_q, given.seqlen_k)
        of_both = found["of_queries"], found["of_keys"]

        def launch(function, t, *first, last=()):
            for place in np.ndindex(t.shape[2], t.shape[1], t.shape[0]):
                device.arch.block_idx = lambda place=place: place
                function.__wrapped__(code, *first, tensors, window, lengths, seqlens, given.group, *last)

        for of_keys, t in enumerate(of_both):
            if t is not None:
                launch(type(code).extremes, t, t, last=(bool(of_keys),))
        launch(type(code).lists, found["counts"], found["numbers"], found["counts"], of_both)
        if found["turns"] is not None:
            launch(type(code).turns, found["turns"], found["turns"], of_both)

    def prepared(problem, tile, of_keys):
        kernel = block_lists.kernel_of(problem, tile, of_keys)
        return functools.partial(block_lists.with_lists, functools.partial(run, kernel), kernel, problem)

    for of_keys in (False, True):
        check(RandomCall(seed), TILES[seed % 4], of_keys, prepared)


def test_tiles_of_packed_sequences_find_their_lists(device):
    """A tile reads the list, and the turns, that the kernels of lists have written for it."""
    tile_m, tile_n, heads, group, rng = 32, 64, 2, 3, np.random.default_rng(0)
    offsets_q, offsets_k = [0, 70, 71, 71, 200], [0, 5, 140, 140, 201]
    tiles = [
        (block, head, start, end - start, offsets_q[sequence], 9, sequence, None)
        for sequence, (start, end) in enumerate(itertools.pairwise(offsets_k))
        for head in range(heads)
        for block in range(-(-(end - start) // tile_n))
    ]
    # more than there are: any number will do
    numbers, counts, turns = (rng.integers(0, 9, (n, m, heads, 1)) for n, m in ((9, 20), (2, 20), (20, 40)))
    schedule = SimpleNamespace(num_tiles=len(tiles), batch=len(offsets_k) - 1, find=lambda n: tiles[n])
    lists = SimpleNamespace(counts=View(counts), numbers=View(numbers), turns=View(turns))
    seqlens = SimpleNamespace(
        lengths=device.tiles.Lengths(None, None, None),
        modifiers=SimpleNamespace(tensors=lists),
        window_left=None,
        window_right=None,
    )
    kernel = device.tiles.KeyTiles()
    kernel.tile_m, kernel.tile_n, kernel.group, kernel.lists = tile_m, tile_n, group, lists
    kernel.is_packed = kernel.has_lists = kernel.is_descending = True
    for n, (block, head, start, _, start_q, _, sequence, _) in enumerate(tiles):
        tile = device.tiles.KeyTiles.tile_at.__wrapped__(kernel, n, schedule, seqlens)
        number = start // tile_n + sequence + block
        assert (tile.first, tile.clear_first, tile.clear_last, tile.last) == (0, 0, *counts[:, number, head, 0])
        for i, m in enumerate(numbers[:, number, head, 0]):
            assert kernel.query_block(tile, i) == m
            assert kernel.turn_of(tile, i) == turns[block, start_q // tile_m + sequence + m, head, 0]


def test_tiles_of_an_entry_find_their_lists(device):
    rng = np.random.default_rng(0)
    numbers, turns = (rng.integers(0, 9, (9, 9, 2, 3)) for _ in range(2))
    kernel = device.tiles.KeyTiles()
    kernel.is_packed, kernel.has_lists, kernel.tile_n = False, True, 64
    kernel.lists = SimpleNamespace(turns=View(turns))
    for n, head, entry, i in itertools.product(range(4), range(2), range(3), range(9)):
        names = {"n_block": n, "head_kv": head, "first_m_block": 0, "sequence": entry}
        tile = SimpleNamespace(**names, origin_q=entry, origin_k=entry, listed=numbers[:, n, head, entry])
        assert kernel.query_block(tile, i) == numbers[i, n, head, entry]
        assert kernel.turn_of(tile, i) == turns[n, numbers[i, n, head, entry], head, entry]


@pytest.mark.parametrize("is_packed", [False, True])
def test_tiles_of_a_forward_find_their_lists(monkeypatch, is_packed):
    from onepass.kernels.device.sm90.forward import kernel as forward

    monkeypatch.setattr(forward, "Int32", int)
    numbers = np.random.default_rng(0).integers(0, 99, (9, 9, 2, 1 if is_packed else 4))
    modifiers = SimpleNamespace(tensors=SimpleNamespace(numbers=View(numbers)))
    kernel = object.__new__(forward.ForwardSm90)
    kernel.is_packed, kernel.has_lists, kernel.tile_m = is_packed, True, 64
    origin, sequence, number, entry = (130, 3, 2 + 3 + 1, 0) if is_packed else (3, None, 1, 3)
    tile = SimpleNamespace(m_block=1, head=1, origin_q=origin, sequence=sequence)
    for i in range(9):
        assert kernel.key_block(tile, i, modifiers) == numbers[i, number, 1, entry]
    kernel.has_lists = False
    assert kernel.key_block(tile, 7, modifiers) == 7


@pytest.mark.parametrize("factor", [0.0, 1.25])
def test_gradients_of_a_pair_with_dropout(device, monkeypatch, factor):
    """The factor of kept pairs is in dP; that of dV is the whole sum's."""
    products = {"q": Float(0.5), "dout": Float(-3.0)}
    monkeypatch.setattr(device.repair, "dot", lambda a, b, vector_bytes: products[a])
    pairs = SimpleNamespace(score=lambda score, other: score + other, keep_factor=lambda other: factor)
    given = "q", "k", "dout", "v", Float(-1.0), Float(0.75), SimpleNamespace(scale_log2=2.0, tanh_scale=None)
    gradient = device.repair._gradient_of_score.__wrapped__
    p = 2.0 ** ((0.5 + 0.25) * 2.0 - 1.0)
    assert gradient(*given, True, 16, pairs, 0.25) == pytest.approx(p if factor else 0.0)
    assert gradient(*given, False, 16, pairs, 0.25) == pytest.approx(p * (-3.0 * factor + 0.75))


def test_splits_that_a_packed_sequence_lacks(device, monkeypatch):
    """The merge reads the lse of all splits: those past the sequence's own count as empty."""
    written = []
    monkeypatch.setattr(
        device.output.epilogue, "store_lse", lambda lse, mLSE, row, is_row, lane: written.append((lse, row))
    )
    output = SimpleNamespace(inputs=SimpleNamespace(all_splits=(5, 60)), thread=SimpleNamespace(lane_in_quad=0))
    store = device.output.Output._store_absent_splits.__wrapped__
    store(output, SimpleNamespace(num_splits=3), None, 7, True)
    assert written == [(-math.inf, 7 + 60 * split) for split in (3, 4)]


class Part:
    """A part of a tensor, which equals its place: the tensor's name, and the numbers that chose it."""

    element_type = None

    def __init__(self, *place):
        self.place = place

    def __getitem__(self, index):
        return Part(*self.place, *(i for i in index if i is not None))

    def __eq__(self, other):
        return self.place == getattr(other, "place", other)

    def __hash__(self):
        return hash(self.place)

    def __repr__(self):
        return repr(self.place)


def test_rows_of_dq_that_are_computed_again(device, monkeypatch):
    """From the tensors of the block's query head, those of its kv head, and the statistics of its head."""
    group, heads, tile_m, blocks, seqlen_q = 2, 4, 64, 2, 100
    found = []
    monkeypatch.setattr(device.background, "copy_of", lambda number: number)
    repair = SimpleNamespace(recompute_dq=lambda *given: found.append(given))
    repair.has_nan_in_row = lambda row: row.place[-1] % 3 == 0
    monkeypatch.setattr(device.background, "repair_gradients", repair)
    rows = object.__new__(device.background.BackgroundRows)
    rows.kernel = SimpleNamespace(tile_m=tile_m, group=group)
    rows.sources = SimpleNamespace(**{name: Part(name) for name in ("q", "k", "v", "dout")})
    rows.tensors = SimpleNamespace(dq=Part("dq"))
    lengths = SimpleNamespace(seqused_k=[30, 40], added_k=None)
    rows.seqlens = SimpleNamespace(seqlen_q=seqlen_q, seqlen_k=50, window_left=None, window_right=0, lengths=lengths)
    rows.progress = SimpleNamespace(blocks_of_head=blocks, heads_of_entry=heads)
    rows.accumulator = SimpleNamespace(stats=View(np.arange(2 * heads * blocks)[:, None]))
    rows.factors, rows.softmax_scale = "factors", 0.5
    for entry, head, m_block in itertools.product(range(2), range(heads), range(blocks)):
        found.clear()
        first = (entry * heads + head) * blocks
        device.background.BackgroundRows._repair_block.__wrapped__(rows, first + m_block)
        queries = [n for n in range(m_block * tile_m, min((m_block + 1) * tile_m, seqlen_q)) if n % 3 == 0]
        assert [query for _, query, *_ in found] == queries
        for dq, _, sources, stats, geometry, *factors in found:
            kv = (head // group, entry)
            assert dq == ("dq", head, entry)
            assert sources == (("q", head, entry), ("k", *kv), ("v", *kv), ("dout", head, entry))
            assert stats.array[0, 0] == first
            assert geometry == (seqlen_q, lengths.seqused_k[entry], None, 0)
            assert factors == ["factors", 0.5]


@pytest.mark.parametrize(
    ("tile_m", "head_dim", "dq_columns", "columns"), [(64, 128, 64, 128), (128, 64, 64, 40), (64, 64, 64, 32)]
)
def test_boxes_of_dq_go_where_they_belong(device, monkeypatch, tile_m, head_dim, dq_columns, columns):
    """Boxes of 16 rows lie in the order of 64 rows, part of the columns, warp, and columns of the part."""
    width, stored = 32, []
    monkeypatch.setattr(device.background.cute, "copy", lambda atom, s, g: stored.append(g), raising=False)
    rows = object.__new__(device.background.BackgroundRows)
    rows.kernel = SimpleNamespace(tile_m=tile_m, head_dim=head_dim, dq_columns=dq_columns, dtype=None)
    tma = SimpleNamespace(atom=None, partition=lambda box, start, dtype: (start, Part(box)))
    rows.tensors = SimpleNamespace(tma_dq=tma, dq=SimpleNamespace(shape=(1000, columns)))
    store = device.background.BackgroundRows._store_box.__wrapped__
    boxes = [
        (4 * group + warp, first // width)
        for group in range(tile_m // 64)
        for start in range(0, head_dim, dq_columns)
        for warp in range(4)
        for first in range(start, start + dq_columns, width)
    ]
    for number in range(len(boxes)):
        store(rows, "an address", 3, 5, 2 * tile_m, number)
    first_row = 2 * tile_m // 16
    expected = [(first_row + row, column) for row, column in boxes if column * width < columns]
    assert stored == [((16, width), row, column, 3, 5) for row, column in expected]


@pytest.mark.parametrize("nan", [None, (3, 21), (12, 4)])
@pytest.mark.parametrize("width", [16, 32])
def test_sums_become_a_box_of_dq_in_their_place(device, monkeypatch, width, nan):
    """[8 columns][lane][row / 8][column % 2] -> 16 rows, by matrices of 8 rows and columns, whose rows lanes name."""
    box, stored, named = np.arange(1.0, 16 * width + 1).reshape(16, width), {}, {}
    if nan is not None:
        box[nan[0], nan[1] % width] = math.nan
    # (row / 8, row % 8, 8 columns, column / 2, column % 2)
    memory = box.reshape(2, 8, width // 8, 4, 2).transpose(2, 1, 3, 0, 4).flatten()
    background, cute = device.background, device.background.cute
    monkeypatch.setattr(background, "LANES", 32)
    monkeypatch.setattr(background, "copy_of", lambda number: number)
    monkeypatch.setattr(background, "pack_pair", lambda a, b, dtype: (a, b))
    monkeypatch.setattr(
        background, "store_matrices", lambda row, *words: named[device.lane.number].append((row, words))
    )
    monkeypatch.setattr(device.arch, "sync_warp", lambda: None, raising=False)
    monkeypatch.setattr(cute, "AddressSpace", SimpleNamespace(smem=None), raising=False)
    monkeypatch.setattr(cute, "make_layout", lambda _: None, raising=False)
    monkeypatch.setattr(cute, "make_ptr", lambda kind, address, *_, **__: (address - 4096) // 4, raising=False)
    monkeypatch.setattr(cute, "make_tensor", lambda first, _: Values(memory[first : first + 4]), raising=False)
    rows = object.__new__(background.BackgroundRows)
    rows.kernel, rows.softmax_scale = SimpleNamespace(dq_columns=width, hides_pairs=True, dtype=None), 0.5
    found = []
    for lane in range(32):
        device.lane.number, named[lane] = lane, []
        found.append(background.BackgroundRows._convert_box.__wrapped__(rows, 4096))
    for step, lane, matrix in itertools.product(range(width // 16), range(32), range(4)):
        address, _ = named[8 * matrix + lane // 4][step]
        for c, value in enumerate(named[lane][step][1][matrix]):
            stored[(address - 4096) // 2 + 2 * (lane % 4) + c] = value
    np.testing.assert_equal([stored[i] for i in range(16 * width)], 0.5 * box.flatten())
    assert sum(found) == (nan is not None)


@pytest.mark.parametrize(
    ("head_dim", "config"),
    [
        (64, BackwardConfigSm90(tile_m=128)),
        (128, BackwardConfigSm90()),
        (72, BackwardConfigSm90()),
        (64, BackwardConfigSm90(num_warpgroups=1)),
        (192, BackwardConfigSm90(by_gradient=True)),
        (128, BackwardConfigSm90(by_queries=True)),
    ],
)
def test_sums_of_dq_are_read_as_they_were_added(device, monkeypatch, head_dim, config):
    """What a consumer warp adds for a row and a column, the postprocess finds there; columns past head_dim are left."""
    q = torch.zeros(1, 200, 1, head_dim, dtype=torch.bfloat16)
    options = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    problem = AttentionProblem.of(AttentionInputs(q, q, q), **options)
    tile_m, has_pieces = config.tile_m, config.by_gradient or config.by_queries
    columns, by_rows = config.dq_columns(problem), tile_m > 64
    kernel = SimpleNamespace(config=config, dq_columns=columns, is_dq_by_rows=by_rows, true_head_dim=head_dim)
    kernel.num_pieces = config.head_dims(problem)[0] // columns
    added, found = {}, {}

    def row_and_column(lane, i):
        """The row and the column of a lane's i-th value in the 16 rows of a warp."""
        return lane // 4 + 8 * (i // 2 % 2), i // 4 * 8 + 2 * (lane % 4) + i % 2

    for name, stand_in in {"LANES": 32, "Int64": int}.items():
        monkeypatch.setattr(device.atomic, name, stand_in)
    kind = device.wide.PieceSums if has_pieces else device.atomic.AtomicSums
    parts = range(kernel.num_pieces if has_pieces else config.num_warpgroups)
    for part, warp, lane in itertools.product(parts, range(4), range(32)):
        first_row, first_column = 16 * warp + 64 * (part if by_rows else 0), 0 if by_rows else part * columns

        def add(place, values, lane=lane, first_row=first_row, first_column=first_column):
            for c, i in enumerate(values):
                row, column = row_and_column(lane, i)
                added[place + c] = first_row + row, first_column + column

        monkeypatch.setattr(device.atomic, "add_to_global", add)
        thread = SimpleNamespace(wg=part, warp=warp if has_pieces else 4 * part + warp, lane=lane)
        accumulator = SimpleNamespace(dq=SimpleNamespace(iterator=0))
        sums = SimpleNamespace(kernel=kernel, thread=thread, accumulator=accumulator)
        sums.address = functools.partial(device.atomic.AtomicSums.address, sums)
        sums.column_blocks = functools.partial(kind.column_blocks, sums)
        share = kind.share_of_piece(sums, 0, part) if has_pieces else thread.warp
        device.atomic.AtomicSums.add_share.__wrapped__(sums, Values(np.arange(columns // 2)), share)

    postprocess = device.rows.Postprocess(problem, config)
    postprocess.rows_of_block = lambda *_: device.rows.BlockRows(0, 1000, 0, 0)
    stand_ins = {
        "make_tensor": lambda place, _: place,
        "make_layout": lambda *_, **__: None,
        "flat_divide": lambda *_: Part(),
        "make_rmem_tensor": lambda *_: SimpleNamespace(iterator=0, fill=lambda _: None),
        "autovec_copy": lambda vector, first: found.update({first: vector.place[0]}),
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(device.rows.cute, name, stand_in, raising=False)
    names = {"LANES": 32, "exit_if": lambda _: None, "epilogue": SimpleNamespace(store_runs=lambda *_: None)}
    for name, stand_in in names.items():
        monkeypatch.setattr(device.rows, name, stand_in)
    monkeypatch.setattr(device.arch, "grid_dim", lambda: (tile_m // 64, 1, 1), raising=False)
    mdq, lengths = Values(np.zeros((1000, 1, 1, 1))), SimpleNamespace(cu_seqlens_q=None)
    for group, thread in itertools.product(range(tile_m // 64), range(128)):
        monkeypatch.setattr(device.rows, "last_first", lambda group=group: (group, 0, 0))
        monkeypatch.setattr(device.arch, "thread_idx", lambda thread=thread: (thread, 0, 0))
        found.clear()
        device.rows.Postprocess.kernel.__wrapped__(postprocess, Part("sums"), mdq, lengths, 1.0, None)
        for first, vector in found.items():
            for c in range(4):
                row, column = row_and_column(thread % 32, first + c)
                is_there = column < -(-head_dim // 8) * 8
                place = (64 * group + thread // 32 * 16 + row, column) if is_there else None
                assert added.pop(4 * vector + c, None) == place
    assert not added


def test_a_thread_blocks_own_sums_of_dq(device, monkeypatch):
    """Each warp's share of each block of a group's query heads has a place of its own, and none is left over."""
    group, blocks, warps, ctas = 3, 2, 4, 2
    found = []
    for cta, head_kv in ((0, 5), (1, 0)):
        monkeypatch.setattr(device.arch, "block_idx", lambda cta=cta: (cta, 0, 0), raising=False)
        kernel = SimpleNamespace(group=group, config=SimpleNamespace(consumer_warps=warps))
        for in_group, m_block, warp in itertools.product(range(group), range(blocks), range(warps)):
            sums = SimpleNamespace(kernel=kernel, thread=SimpleNamespace(warp=warp))
            sums.accumulator = SimpleNamespace(blocks_per_head=blocks)
            share = device.private.PrivateSums.share.__wrapped__
            found.append(share(sums, SimpleNamespace(head_kv=head_kv), head_kv * group + in_group, m_block))
    assert found == list(range(ctas * group * blocks * warps))


@pytest.mark.parametrize("has_nan", [False, True])
def test_rows_of_dk_that_are_written(device, monkeypatch, has_nan):
    """Rows of the tile's own sequence are written and no others, and those with a NaN are computed again."""
    written, again = {}, []
    monkeypatch.setattr(device.dkv, "rows_and_columns", lambda acc: acc)
    epilogue = SimpleNamespace(
        store_16_bits=lambda acc, weights, rows, is_row, *_: written.update(zip(rows, is_row, strict=True))
    )
    monkeypatch.setattr(device.dkv, "epilogue", epilogue)
    monkeypatch.setattr(
        device.dkv, "repair_gradients", SimpleNamespace(nan_rows=lambda acc, is_row: [has_nan and is_row[0], 0])
    )
    monkeypatch.setattr(device.arch, "sync_warp", lambda: None, raising=False)
    kernel = SimpleNamespace(tile_n=64, at_head=lambda t, m, head, origin: Part(head, origin))
    kernel.recompute_keys = lambda tile, gradient, scale, first, *_: again.append(first)
    inputs = SimpleNamespace(mdK=Part("dk"), sources="sources", accumulator=None, factors=None, modifiers=None)
    tile = SimpleNamespace(n_block=1, rows_k=100, head_kv=3, origin_k=7)
    for warp, lane in itertools.product(range(4), range(0, 32, 4)):
        region = SimpleNamespace(row_in_tile=16 * warp + lane // 4, lane=lane, lane_in_quad=0)
        gradients = SimpleNamespace(kernel=kernel, region=region, inputs=inputs)
        device.dkv.KeyGradients._store.__wrapped__(gradients, tile, None, inputs.mdK, 0.5, False, None)
    assert written == {(3, 7, row): row < 100 for row in range(64, 128)}
    assert sorted(set(again)) == ([64, 80, 96] if has_nan else [])


@pytest.mark.parametrize("tanh_scale", [None, 3.0])
def test_the_descale_of_a_cache_is_in_one_scale(device, tanh_scale):
    """In that of the scores, or with a softcap in that of what is capped. Its sign comes with K."""
    scales = object.__new__(device.scales_sm90.CacheScales)
    scales.factors, scales.head_scale = device.online.ScoreFactors(2.0, tanh_scale), Registers((1,))
    scales.rows = SimpleNamespace(head_kv=lambda tile: 1)
    scales.descales = SimpleNamespace(k={(4, 1, 0): -0.5}, v={(4, 1, 0): -3.0})
    assert scales.of_head(SimpleNamespace(origin_k=4)) == (0.5, -3.0)
    device.scales_sm90.CacheScales.load.__wrapped__(scales, SimpleNamespace(origin_k=4))
    assert scales.with_descale(0.5) == ((1.0, None) if tanh_scale is None else (2.0, 1.5))
    assert scales.head_scale[0] == (1.0 if tanh_scale is None else 1.5)


@pytest.mark.parametrize(
    "config",
    [
        BackwardConfigSm90(),
        BackwardConfigSm90(num_warpgroups=1),
        BackwardConfigSm90(by_queries=True),
        BackwardConfigSm90(by_gradient=True),
        BackwardConfigSm90(by_gradient=True, paired=True),
    ],
    ids=["all gradients", "one warpgroup", "the same keys", "a gradient each", "pairs"],
)
def test_warps_add_to_places_of_their_own_in_dslopes(device, config):
    """Each warp of each tile of keys that computes dS has a place, and there is none for another one."""
    q, k = torch.zeros(1, 200, 2, 256), torch.zeros(1, 200, 1, 256)
    inputs = AttentionInputs(q, k, k, modifiers=Modifiers(alibi_slopes=torch.ones(2)))
    options = {"softmax_scale": 1.0, "mask": Mask(), "softcap": None, "deterministic": False}
    terms = modifiers.gradients_of_terms(AttentionProblem.of(inputs, **options), config, inputs)
    places = []
    for n_block, rank in itertools.product(range(-(-200 // config.tile_n)), range(config.tile_blocks)):
        for warp in range(config.consumer_warps):
            scores = object.__new__(device.scores.BackwardScores)
            scores.kernel, scores.region = SimpleNamespace(config=config), SimpleNamespace(warp=warp)
            scores.first_warp = rank * config.consumer_warps
            places.append(scores.slot(SimpleNamespace(n_block=n_block)))
    assert places == list(range(terms.slopes.shape[-1]))


def test_rows_of_a_thread_blocks_own_dq_that_are_computed_again(device, monkeypatch):
    """A warp computes its rows of the blocks that its tile was the last to add to, for each query head of the group."""
    found, group, tile_m, seqlen_q = [], 2, 64, 150
    monkeypatch.setattr(device.private.repair_gradients, "recompute_dq", lambda *given: found.append(given))
    kernel = SimpleNamespace(
        group=group, tile_m=tile_m, at_head=lambda t, m, head, origin: Part(*t.place, head, origin)
    )
    kernel.is_first_and_last = lambda tile, m_block: (False, m_block != 1)
    kernel.m_block_number = lambda accumulator, tile, head, m_block: 10 * head + m_block
    sums = SimpleNamespace(kernel=kernel, row=16 + 3, thread=SimpleNamespace(lane=12), mdQ=Part("dq"))
    sums.sources = SimpleNamespace(**{name: Part(name) for name in ("q", "k", "v", "dout")})
    sums.accumulator = SimpleNamespace(stats=View(np.arange(100)[:, None]))
    sums.factors, sums.softmax_scale = "factors", 0.5
    tile = SimpleNamespace(head_kv=3, origin_q=5, origin_k=7, first=0, last=3)
    tile.geometry = SimpleNamespace(seqlen_q=seqlen_q)
    device.private.PrivateSums.recompute.__wrapped__(sums, tile)
    queries = [*range(16, 32), *range(128 + 16, seqlen_q)]
    assert [(dq.place[1], query) for dq, query, *_ in found] == list(itertools.product((6, 7), queries))
    for dq, _, sources, stats, *others in found:
        head, kv = dq.place[1:], (3, 7)
        assert (dq, *sources) == (("dq", *head), ("q", *head), ("k", *kv), ("v", *kv), ("dout", *head))
        assert stats.array[0, 0] == 10 * head[0]
        assert others == [tile.geometry, "factors", 0.5]


@pytest.mark.parametrize("is_split", [False, True])
def test_rows_of_out_that_are_computed_again(device, monkeypatch, is_split):
    """Each row of the warp with its own head, reference and weight, from the keys that it sees in its split."""
    found, tile_n = [], 16
    monkeypatch.setattr(device.output, "broadcast", lambda value, lane: value if lane == 0 else (value, lane))
    monkeypatch.setattr(device.output.repair_rows, "recompute_row", lambda *row, pairs: found.append(row))
    names = "is_paged", "has_intervals", "converts"
    kernel = SimpleNamespace(**dict.fromkeys(names, False), is_split=is_split, tile_n=tile_n)
    kernel.at_head = kernel.keys_at_head = lambda t, m, head, origin: Part(*t.place, head, origin)
    output = object.__new__(device.output.Output)

    def find(tile, row):  # two heads of a group take turns in the rows of a tile; its last rows do not exist
        return row // 2, 6 + row % 2, row < 60

    output.kernel, output.rows = kernel, SimpleNamespace(head_kv=lambda tile: 3, find=find)
    output.thread = SimpleNamespace(row=48)
    sources = SimpleNamespace(**{name: Part(name) for name in "qkv"})
    output.inputs = SimpleNamespace(sources=sources, mO=Part("out"), modifiers=None)
    output.done_max, output.scales = ("upper", "lower"), SimpleNamespace(with_descale=lambda descale: "factors")
    geometry = 30, 100, None, 0  # causal
    tile = SimpleNamespace(origin_q=5, origin_k=7, origin_out=8, geometry=geometry, first=2, last=5)
    device.output.Output._recompute.__wrapped__(output, tile, ("weight", "weight below"), None)
    assert len(found) == 12
    for i, (q, k, v, out, low, high, factors, row_max, weight) in enumerate(found):
        position, head, kv = (48 + i) // 2, 6 + i % 2, (3, 7)
        assert (q, k, v) == (("q", head, 5, position), ("k", *kv), ("v", *kv))
        assert (out, factors) == (("out", head, 8, position), "factors")
        end = position + 1 + 100 - 30
        assert (low, high) == ((2 * tile_n, min(end, 5 * tile_n)) if is_split else (0, end))
        of_row = ("upper", "weight") if i < 8 else ("lower", "weight below")
        assert (row_max, weight) == (of_row if i % 8 == 0 else tuple((value, i % 8 * 4) for value in of_row))

"""Device code that works element by element, run as Python on numbers: masks, intervals, terms, sinks, rotations."""

import functools
import importlib.util
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import packages
import pytest
import torch

from onepass.geometry import philox
from onepass.geometry.rotary import rotate
from onepass.tiled.mask import hidden_pairs

pytestmark = packages.needs_compiler

COLUMNS = 8  # scores of a thread in each of its two rows, of 32 columns of a block
WIDE = 40  # of 160 columns, whose bits take two words for a row, and three for the columns
SIDES = (None, 0, 5, 40, -1, -7)
SIZES = ((30, 50), (50, 30), (7, 90))


class Float(float):
    inf = math.inf

    def to(self, dtype):
        return dtype(self)

    def __add__(self, other):
        return Float(float(self) + other)

    def __mul__(self, other):
        return Float(float(self) * other)

    def __neg__(self):
        return Float(-float(self))


class Values:
    """A tensor of Python numbers, which is not read outside."""

    element_type = Float

    def __init__(self, values):
        self.array = np.array(values)
        self.shape = self.array.shape

    def __getitem__(self, index):
        if isinstance(index, tuple) and None in index:  # None: all of a mode
            return Values(self.array[tuple(slice(None) if i is None else i for i in index)])
        assert min(index) >= 0 if isinstance(index, tuple) else index >= 0
        value = self.array[index].item()
        return value if isinstance(value, int) else Float(value)

    def __setitem__(self, index, value):
        self.array[index] = value


def size(values, mode=None):
    return math.prod(values.shape) if mode is None else values.shape[mode[0]]


def fresh(name):
    """A module of its own from the source of one: the compiler rewrites the functions that a process has compiled."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def device(monkeypatch):
    """The modules of device code, with the kernel language replaced by Python.

    A warp has one lane, except in `hide_in_warp`.
    """
    names = "blocks.softmax.mask", "blocks.softmax.modifiers", "blocks.softmax.sinks", "memory_bound.append"
    names += "memory_bound.backward_rows", "memory_bound.quantize_block", "memory_bound.quantize_values"
    modules = {name.split(".")[-1]: fresh(f"onepass.kernels.device.{name}") for name in names}
    modifiers = modules["modifiers"]
    language = SimpleNamespace(range_constexpr=range, const_expr=lambda value: value)
    arch = SimpleNamespace(
        warp_redux_sync=lambda value, kind: value,
        make_warp_uniform=lambda value: value,
        warp_reduction_sum=lambda value: value,
        lane_idx=lambda: 0,
    )
    kernel_language = SimpleNamespace(
        size=size,
        math=SimpleNamespace(absf=abs, exp2=lambda x, fastmath: 2.0**x),
        arch=arch,
        make_rmem_tensor=lambda shape, dtype: Values(np.full(shape, np.nan)),
        autovec_copy=lambda source, target: np.copyto(target.array, source.array),
        domain_offset=lambda place, values: SimpleNamespace(iterator=(values, place)),
    )

    def add_one_to_global(element, value):
        values, place = element
        values[place] = values[place] + value

    monkeypatch.setattr(modifiers, "add_one_to_global", add_one_to_global)
    monkeypatch.setattr(modifiers, "Uint32", lambda x: x % 2**32)
    monkeypatch.setattr(modifiers, "Uint64", lambda x: x % 2**64)
    monkeypatch.setattr(modifiers, "ones", ones)
    monkeypatch.setattr(modifiers, "philox", philox_of_words)
    monkeypatch.setattr(modifiers, "philox_keys", lambda key: [key])  # those of all rounds follow from the first one
    for module in modules.values():
        for name, stand_in in {
            "cutlass": language,
            "cute": kernel_language,
            "Float32": Float,
            "Int32": int,
        }.items():
            monkeypatch.setattr(module, name, stand_in, raising=False)
    rows = modules["backward_rows"]
    monkeypatch.setattr(rows, "sequence_of_block", rows.sequence_of_block.__wrapped__)
    return SimpleNamespace(**modules)


def ones(first, count):
    assert min(first, count) >= 0
    return ((1 << min(count, 32)) - 1 << min(first, 32)) % 2**32


def hide_in_warp(device, modifiers, blocks):
    """The scores of each lane of a warp whose pairs are hidden. Args: blocks: the block of each lane."""
    arch, words = device.modifiers.cute.arch, []
    for lane, block in enumerate(blocks):
        arch.lane_idx = lambda lane=lane: lane
        words.append(modifiers.masks(block, WIDE))
        assert len(words[lane]) == modifiers.num_masks(WIDE, block.has_keys_in_rows)
    found = [scores(WIDE) for _ in blocks]
    arch.shuffle_sync = lambda number, source: words[source][number]
    for lane, block in enumerate(blocks):
        arch.lane_idx = lambda lane=lane: lane
        of_rows = 2 * -(-WIDE // 32) * modifiers.sides(block.has_keys_in_rows)[0]
        # those of columns are known by their numbers, so that a shuffle finds those of other lanes
        masks = [word if i < of_rows else i for i, word in enumerate(words[lane])]
        device.modifiers.Modifiers.hide.__wrapped__(modifiers, found[lane], block, -9.0, masks)
    return found


def philox_of_words(counter, keys):
    """The generator of a kernel, which takes and gives words as int32."""
    words = philox.philox(
        *(tuple(torch.tensor(word) & philox.MASK32 for word in words) for words in (counter, keys[0]))
    )
    return [word.item() for word in words]


def column(c):
    return c // 2 * 8 + c % 2


def threads(first_row, first_column, columns=COLUMNS):
    """For each thread of a warp: its rows, its first column, and the row and the column of each of its scores."""
    for lane in range(32):
        rows, start = [first_row + lane // 4, first_row + lane // 4 + 8], first_column + 2 * (lane % 4)
        places = [(r, c, rows[r], start + column(c)) for r, c in itertools.product(range(2), range(columns))]
        yield lane % 4, rows, start, places


def scores(columns=COLUMNS):
    return Values(np.arange(2.0 * columns).reshape(2, columns))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("has_keys_in_rows", [False, True])
def test_masks(device, has_keys_in_rows, sizes):
    rng = random.Random(0)
    for window in itertools.product(SIDES, SIDES):
        geometry = device.mask.Geometry(*sizes, *window)
        hidden = hidden_pairs((0, 128), (0, 128), sizes[1] - sizes[0], *window, torch.device("cpu")).numpy()
        hidden[:, sizes[1] :] = True
        if has_keys_in_rows:
            hidden[sizes[0] :] = True
        first_row, first_column = 16 * rng.randrange(4), 32 * rng.randrange(3)
        for lane, rows, _, places in threads(first_row, first_column):
            found = scores()
            run = device.mask.apply_to_keys if has_keys_in_rows else device.mask.apply
            run.__wrapped__(found, rows, first_column, lane, geometry, *((-9.0,) if has_keys_in_rows else ()))
            for r, c, row, col in places:
                pair = (col, row) if has_keys_in_rows else (row, col)
                expected = (-9.0 if has_keys_in_rows else -math.inf) if hidden[pair] else COLUMNS * r + c
                assert found[r, c] == expected, (window, pair)


BATCH, HEADS, SEQLEN_Q, SEQLEN_K = 2, 3, 30, 50


def place_of(device, head, entry, is_packed):
    geometry = device.mask.Geometry(SEQLEN_Q, SEQLEN_K, None, None)
    origins = (SEQLEN_Q * entry, SEQLEN_K * entry) if is_packed else (entry, entry)
    return device.modifiers.place_of(head, *origins, entry, geometry, is_packed)


def rows_first(values, is_packed):
    """(entries, rows, ..) as a kernel gets it: (rows, .., entries), or one entry with the rows of all."""
    values = values.reshape(1, -1, *values.shape[2:]) if is_packed else values
    return Values(np.moveaxis(values, 0, -1))


@pytest.mark.parametrize(
    "names", [("ranges",), ("positions",), ("starts",), ("ranges", "positions", "starts")], ids=str
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_intervals(device, is_packed, names):
    rng = np.random.default_rng(0)
    ranges = np.sort(rng.integers(0, SEQLEN_K, (BATCH, SEQLEN_Q, 2, HEADS)), 2)
    positions, starts = rng.integers(-5, SEQLEN_K + 5, (BATCH, SEQLEN_Q)), rng.integers(0, SEQLEN_K, BATCH)
    given = {"ranges": rows_first(ranges, is_packed), "positions": rows_first(positions, is_packed)}
    tensors = {"starts": Values(starts)} | given
    tensors = device.modifiers.ModifierTensors(**{name: tensors[name] for name in names})
    query, key = np.arange(SEQLEN_Q), np.arange(SEQLEN_K)
    for left, right in itertools.product((None, 9, -2), (None, 0, -3)):
        modifiers = device.modifiers.Modifiers(tensors, (left, right))
        for head, entry in ((0, 1), (2, 0)):
            position = (positions[entry] if "positions" in names else query + SEQLEN_K - SEQLEN_Q)[:, None]
            seen = np.full((SEQLEN_Q, SEQLEN_K), True)
            if "ranges" in names:
                low, high = ranges[entry, :, :, head].T[..., None]
                seen &= (low <= key) & (key < high)
            if "starts" in names:
                seen &= (starts[entry] <= key) & (starts[entry] <= position)
            seen &= (left is None) | (key >= position - (left or 0))
            seen &= (right is None) | (key <= position + (right or 0))
            place = place_of(device, head, entry, is_packed)
            for i, j in rng.integers((SEQLEN_Q, SEQLEN_K), size=(40, 2)).tolist():
                score = modifiers.pairs_of_key(place, j).score(Float(1.0), i)
                assert score == (1.0 if seen[i, j] else -math.inf), (i, j)
            seen = np.pad(seen, ((0, 256 - SEQLEN_Q), (0, 256 - SEQLEN_K)))
            for has_keys_in_rows in (False, True):
                for warp in (threads(0, 0, WIDE), threads(16, 32, WIDE)):
                    check_warp(device, modifiers, warp, place, has_keys_in_rows, seen)


def check_warp(device, modifiers, warp, place, has_keys_in_rows, seen):
    """Compare what a warp hides with the pairs that are seen."""
    lanes = list(warp)
    blocks = [device.modifiers.Block(rows, start, [place, place], has_keys_in_rows) for _, rows, start, _ in lanes]
    for (*_, places), found in zip(lanes, hide_in_warp(device, modifiers, blocks), strict=True):
        for r, c, row, col in places:
            pair = (col, row) if has_keys_in_rows else (row, col)
            assert found[r, c] == (WIDE * r + c if seen[pair] else -9.0), pair


class Words(Values):
    """A tensor of int32, whose differences wrap around."""

    def __getitem__(self, index):
        return Word(super().__getitem__(index))


class Word(int):
    def __sub__(self, other):
        return (int(self) - other + 2**31) % 2**32 - 2**31


@pytest.mark.parametrize("names", [("query_ranges",), ("kinds",), ("kinds", "bits"), ("query_ranges", "kinds", "bits")])
@pytest.mark.parametrize("is_packed", [False, True])
def test_pairs_that_keys_and_blocks_hide(device, is_packed, names):
    rng, size = np.random.default_rng(0), (16, 32)
    ranges = np.sort(rng.integers(0, SEQLEN_Q + 1, (BATCH, SEQLEN_K, 2, HEADS)), 2)
    ranges[..., 0, :][ranges[..., 0, :] < 5], ranges[..., 1, :][ranges[..., 1, :] > 25] = -(2**31), 2**31 - 1
    kinds = rng.integers(0, 3, (BATCH, HEADS, 2, 2))
    bits = rng.integers(-(2**31), 2**31, (BATCH, HEADS, SEQLEN_Q, 2))
    tensors = {"query_ranges": Words(rows_first(ranges, is_packed).array)}
    tensors |= {"kinds": Values(kinds.transpose(2, 3, 1, 0)), "bits": Values(bits.transpose(2, 3, 1, 0))}
    tensors = device.modifiers.ModifierTensors(**{name: tensors[name] for name in names})
    modifiers = device.modifiers.Modifiers(tensors, (None, None), block_size=size)
    modifiers.hide_by_kind = functools.partial(device.modifiers.Modifiers.hide_by_kind.__wrapped__, modifiers)
    query, key = np.arange(SEQLEN_Q)[:, None], np.arange(SEQLEN_K)
    for head, entry in ((0, 1), (2, 0)):
        seen = np.full((SEQLEN_Q, SEQLEN_K), True)
        if "query_ranges" in names:
            low, high = ranges[entry, :, :, head].T
            seen &= (low <= query) & (query < high)
        if "kinds" in names:
            kind = kinds[entry, head, query // size[0], key // size[1]]
            bit = bits[entry, head, query, key // 32] >> key % 32 & 1
            seen &= (kind == 2) | (kind == 1) & (bit == 1) if "bits" in names else kind != 0
        place = place_of(device, head, entry, is_packed)
        for i, j in rng.integers((SEQLEN_Q, SEQLEN_K), size=(40, 2)).tolist():
            score = modifiers.pairs_of_query(place, i).score(Float(1.0), j)
            assert score == (1.0 if seen[i, j] else -math.inf), (i, j)
        seen = np.pad(seen, ((0, 256 - SEQLEN_Q), (0, 256 - SEQLEN_K)))
        for has_keys_in_rows in (False, True):
            for warp in (threads(0, 0, WIDE), threads(16, 16, WIDE)):
                check_warp(device, modifiers, warp, place, has_keys_in_rows, seen)


@pytest.mark.parametrize("seqlen_k", [SEQLEN_K, 1, 0])
def test_blocks_of_keys(device, seqlen_k):
    """The blocks that a tile visits hold all keys that its queries see, and the clear ones no other key."""
    rng = np.random.default_rng(0)
    geometry = device.mask.Geometry(SEQLEN_Q, seqlen_k, None, None)
    place, tile_n = device.modifiers.place_of(0, 0, 0, 0, geometry, False), 4
    for _ in range(300):
        ranges = np.sort(rng.integers(0, seqlen_k + 1, (2, 1, SEQLEN_Q, 2)), 3)  # some are empty
        if rng.random() < 0.5:
            ranges = ranges // 4 + np.array([0, seqlen_k // 2])
        tensors = device.modifiers.ModifierTensors(ranges=Values(ranges.transpose(2, 3, 0, 1)))
        queries = range(8 * rng.integers(0, 4).item(), SEQLEN_Q + 2)
        modifiers = device.modifiers.Modifiers(tensors, (None, None))
        first, clear_first, clear_last, last = modifiers.key_blocks([(place, q) for q in queries], seqlen_k, tile_n)
        of_queries = ranges[0, 0, queries.start :]
        seen = of_queries[of_queries[:, 0] < of_queries[:, 1]]
        assert first <= clear_first <= clear_last <= last > first
        if len(seen):
            assert first == seen[:, 0].min() // tile_n
            assert last == -(-seen[:, 1].max() // tile_n)
        in_all = [
            block for block in range(last) if all(lo <= 4 * block and 4 * block + 4 <= hi for lo, hi in of_queries)
        ]
        assert in_all == list(range(clear_first, clear_last))


@pytest.mark.parametrize("names", [("slopes",), ("bias",), ("slopes", "bias", "positions")], ids=str)
@pytest.mark.parametrize("is_packed", [False, True])
def test_terms(device, is_packed, names):
    """Terms of pairs that do not exist are those of the last ones, so no tensor is read outside."""
    rng = np.random.default_rng(0)
    bias, slopes = rng.random((BATCH, SEQLEN_Q, SEQLEN_K, HEADS)), rng.random((HEADS, BATCH))
    bias[rng.random(bias.shape) < 0.2] = -math.inf
    positions = rng.integers(-3, SEQLEN_Q + 3, (BATCH, SEQLEN_Q))  # the bias of others is that of the nearest one
    tensors = {"slopes": Values(slopes), "positions": rows_first(positions, is_packed)}
    tensors["bias"] = rows_first(bias, is_packed)
    if "positions" in names:  # rows of the bias are positions, the same ones for all packed sequences
        tensors["bias"] = rows_first(bias[:1] if is_packed else bias, False)
    tensors = device.modifiers.ModifierTensors(**{name: tensors[name] for name in names}, term_scale=3.0)
    modifiers = device.modifiers.Modifiers(tensors, (None, None))
    for head, entry, has_keys_in_rows in itertools.product((0, 2), (0, 1), (False, True)):
        place = place_of(device, head, entry, is_packed)
        for _, rows, start, places in threads(*((40, 8) if has_keys_in_rows else (16, 32))):
            block = device.modifiers.Block(rows, start, [place, place], has_keys_in_rows)
            found = scores()
            modifiers.add_terms(found, block)
            for r, c, row, col in places:
                query, key = (col, row) if has_keys_in_rows else (row, col)
                if query >= SEQLEN_Q or key >= SEQLEN_K:
                    continue
                has_positions = "positions" in names
                position = positions[entry, query] if has_positions else query + SEQLEN_K - SEQLEN_Q
                number = positions[entry, query].clip(0, SEQLEN_Q - 1) if has_positions else query
                expected = COLUMNS * r + c
                if "slopes" in names:
                    expected -= 3.0 * slopes[head, entry] * abs(position - key)
                if "bias" in names:
                    expected += 3.0 * bias[0 if is_packed and has_positions else entry, number, key, head]
                assert found[r, c] == pytest.approx(expected), (query, key)
                one = modifiers.of_pair(Float(COLUMNS * r + c), place, query, key)
                assert one == pytest.approx(expected), (query, key)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_what_tensors_lack_is_not_read(device, is_deterministic):
    """Rows of no sequence come after the last one, and a packed bias may have fewer columns than keys."""
    rng, columns = np.random.default_rng(0), SEQLEN_K - 9
    bias, slopes, starts = rng.random((1, SEQLEN_Q, columns, HEADS)), rng.random((HEADS, BATCH)), Values([3, 5])
    tensors = {"slopes": Values(slopes), "bias": rows_first(bias, True), "starts": starts, "term_scale": 1.0}
    dbias = Values(np.zeros((SEQLEN_Q, columns, HEADS, 1)))
    tensors = device.modifiers.ModifierTensors(**tensors, dbias=dbias)
    modifiers = device.modifiers.Modifiers(tensors, (None, None), is_deterministic)
    place = place_of(device, 1, 0, True)
    nobody = place._replace(entry=BATCH)
    assert modifiers.interval(nobody, 20) == modifiers.interval(place._replace(entry=BATCH - 1), 20) == (5, SEQLEN_K)
    assert modifiers.slope(nobody) == slopes[1, BATCH - 1]
    for key in (0, columns - 1, columns, SEQLEN_K - 1, SEQLEN_K + 9):
        assert modifiers.bias(place, 4, key) == bias[0, 4, min(key, columns - 1), 1]
    block = device.modifiers.Block([columns - 8, columns], 0, [place, place], has_keys_in_rows=True)
    ds = [Float(1.0)] * 4
    device.modifiers.Modifiers.add_gradients.__wrapped__(modifiers, ds, [block], 0, 1)
    assert dbias.array[:, columns - 8].sum() == dbias.array.sum() == 2.0


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_gradients_of_terms(device, is_deterministic, is_packed, has_positions):
    rng = np.random.default_rng(0)
    positions = rng.integers(0, SEQLEN_Q, (BATCH, SEQLEN_Q))
    bias, slopes = np.zeros((BATCH, SEQLEN_Q, SEQLEN_K, HEADS)), np.zeros((2, HEADS, BATCH))
    by_position = has_positions and not is_deterministic  # rows of dbias
    dbias, dslopes = rows_first(bias[:1] if by_position and is_packed else bias, is_packed), Values(slopes)
    tensors = device.modifiers.ModifierTensors(
        slopes=Values(slopes[0]),
        bias=dbias,
        positions=rows_first(positions, is_packed) if has_positions else None,
        term_scale=3.0,
        dslopes=dslopes,
        dbias=dbias,
    )
    modifiers = device.modifiers.Modifiers(tensors, (None, None), is_deterministic)
    head, entry, slot, m_tiles = 2, 1, 1, 2
    place, ds = place_of(device, head, entry, is_packed), rng.random((SEQLEN_Q + 8, SEQLEN_K + 8))
    ds[SEQLEN_Q:] = ds[:, SEQLEN_K:] = 0.0
    for _, rows, start, _ in threads(10, 0):
        blocks = [
            device.modifiers.Block([row + 16 * m for row in rows], start, [place, place], has_keys_in_rows=True)
            for m in range(m_tiles)
        ]
        found = []
        for i in range(4 * m_tiles * COLUMNS // 2):
            m, r, c = device.modifiers.element(i, m_tiles)
            found.append(Float(ds[start + column(c), rows[r] + 16 * m]))
        device.modifiers.Modifiers.add_gradients.__wrapped__(modifiers, found, blocks, slot, m_tiles)
    query, key = np.arange(SEQLEN_Q), np.arange(10, 42)
    position = positions[entry] if has_positions else query + SEQLEN_K - SEQLEN_Q
    ds = ds[:SEQLEN_Q, key]
    slopes[slot, head, entry] = -(ds * abs(position[:, None] - key)).sum()
    np.testing.assert_allclose(dslopes.array, slopes)
    row = positions[entry] if by_position else query
    np.add.at(bias[0 if by_position and is_packed else entry, :, :, head], (row[:, None], key), ds)
    expected = rows_first(bias[:1] if by_position and is_packed else bias, is_packed)
    np.testing.assert_allclose(dbias.array, expected.array)


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
def test_dropout_of_pairs(device, is_packed, has_positions):
    """q has heads 3 to 5 of a call of 7, in the second batch entry or sequence."""
    rng = np.random.default_rng(0)
    state, positions = torch.tensor([-(2**62) - 12345678901, 2**35 + 77]), rng.integers(0, 99, (BATCH, SEQLEN_Q))
    tensors = device.modifiers.ModifierTensors(
        positions=rows_first(positions, is_packed) if has_positions else None,
        dropout_state=Values(state.view(torch.int32).numpy()),
        keep_bytes=philox.keep_bytes(0.4),
        keep_scale=Float(2.5),
        first_head=3,
        all_heads=7,
    )
    modifiers = device.modifiers.Modifiers(tensors, (None, None))
    query, key, head = torch.arange(SEQLEN_Q), torch.arange(SEQLEN_K), 2
    place = place_of(device, head, 1, is_packed)
    rows = torch.from_numpy(positions[1]) if has_positions else query
    kept = philox.kept_pairs(state, 0.4, torch.tensor(1 * 7 + 3 + head), rows[:, None], key)
    for i, j in rng.integers((SEQLEN_Q, SEQLEN_K), size=(25, 2)).tolist():
        of_query, of_key = modifiers.pairs_of_query(place, i), modifiers.pairs_of_key(place, j)
        assert of_query.keep_factor(j) == of_key.keep_factor(i) == 2.5 * kept[i, j], (i, j)
        assert of_query.weight(Float(0.5), j) == 0.5 * kept[i, j]


def random_offsets(rng):
    """Offsets of up to 5 sequences, of which some are empty, and the rows after them, which belong to none."""
    lengths = rng.integers(0, 3, rng.integers(1, 6)) * rng.integers(1, 150)
    return [0, *np.cumsum(lengths).tolist()], int(rng.integers(0, 150))


def test_rows_of_a_block_of_the_backward(device):
    rng = np.random.default_rng(0)
    for _ in range(50):
        offsets, behind = random_offsets(rng)
        kernel = SimpleNamespace(tile_m=64, is_packed=True)
        find = device.backward_rows.RowsKernel.rows_of_block.__wrapped__
        for sequence, (start, end) in enumerate(itertools.pairwise(offsets)):
            for position in range(0, end - start, 64):
                found = find(kernel, start // 64 + sequence + position // 64, offsets[-1] + behind, Values(offsets))
                assert found == (start + position, end - start - position, position, sequence), offsets
    assert find(SimpleNamespace(tile_m=64, is_packed=False), 2, 150, None) == (128, 22, 128, 0)


@pytest.mark.parametrize("has_used", [False, True])
def test_rows_of_a_block_that_shares_a_scale(device, has_used):
    """Blocks after the last sequence hold rows of none, which count for nothing; they have the mean of the last one."""
    rng, find = np.random.default_rng(0), device.quantize_block.row_block.__wrapped__
    for _ in range(50):
        offsets, behind = random_offsets(rng)
        batch, total = len(offsets) - 1, offsets[-1] + behind
        used = [int(rng.integers(0, b - a + 1)) for a, b in itertools.pairwise(offsets)]
        counting = [*(used if has_used else np.diff(offsets).tolist()), 0]
        mean = Values(rng.random((batch, 2, 3)))
        for sequence, (start, end) in enumerate(itertools.pairwise([*offsets, total])):
            for position in range(0, end - start, 64):
                block = start // 64 + sequence + position // 64
                rows = find(total, block, 0, Values(offsets), Values(used) if has_used else None)
                assert (rows.start, rows.sequence) == (start + position, sequence), offsets
                assert rows.num_rows == min(64, end - start - position)
                assert max(rows.num_used, 0) == max(0, min(64, counting[sequence] - position))
                found = device.quantize_block.mean_of(mean, rows, 1)
                assert (found.array == mean.array[min(sequence, batch - 1), 1]).all()
    # an offset that no host has read may lie behind the last row
    assert find(70, 1, 0, Values([0, 100]), Values([90]) if has_used else None) == (64, 6, 6, 0)
    used = Values([100, 80]) if has_used else None
    assert find(150, 1, 1, None, used) == (64, 64, 16 if has_used else 64, 1)
    assert find(150, 2, 0, None, used) == (128, 22, -28 if has_used else 22, 0)


def test_a_mean_is_subtracted_from_keys_that_exist(device, monkeypatch):
    rng, module = np.random.default_rng(0), device.quantize_values
    monkeypatch.setattr(module, "unpack_pair", lambda pair, dtype: pair)
    kernel = SimpleNamespace(passes=1, dtype=None, region=lambda i: (0, 3), first_key=lambda four: 2)
    given, means, values = rng.random((8, 4)), Values(rng.random((8, 1))), Values(np.zeros((8, 4, 1)))
    words = {(w, key, 0): given[2 * w : 2 * w + 2, key] for w in range(4) for key in range(4)}
    for num_used in range(13):
        module.QuantizeValues.fill(kernel, values, words, means, num_used)
        expected = np.where(2 + np.array(module.KEY_OFFSETS) < num_used, given - means.array, 0.0)
        np.testing.assert_array_equal(values.array[..., 0], expected)


@pytest.mark.parametrize("m_tiles", [1, 2])
def test_elements_of_an_accumulator(device, m_tiles):
    """((2, 2), m_tiles, N): two columns, then two rows, then the pairs of rows, then the next columns."""
    order = itertools.product(range(COLUMNS // 2), range(m_tiles), range(2), range(2))
    expected = [(m, r, 2 * n + c) for n, m, r, c in order]
    assert [device.modifiers.element(i, m_tiles) for i in range(len(expected))] == expected


def test_sinks(device):
    """Packed rows from the last offset on have no sink."""
    logits = Values([0.5, -1.0])
    assert device.sinks.Sinks(logits, None).at_row(1, 10**6) == -1.0
    packed = device.sinks.Sinks(logits, Values([0, 4, 9]))
    assert [packed.at_row(0, row) for row in (0, 8, 9, 10)] == [0.5, 0.5, -math.inf, -math.inf]
    assert device.sinks.weight_of_sink(0.5, -2.0) == 0.25
    assert device.sinks.weight_of_sink(math.inf, math.nan) == 1.0


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotations_of_vectors(device, interleaved, width):
    """Vectors of any width: columns behind the rotated ones stay, and no table and no row is read outside."""
    rng = np.random.default_rng(0)
    dim, half, positions = 16, 4 if width > 2 or interleaved else 6, 7
    row, angles = rng.random((width, dim // width)), rng.random((positions, half))
    cos, sin = np.cos(angles), np.sin(angles)
    kernel = device.append.Append(interleaved, 4 * width)
    for position in (0, 5, 6, 9, -2):  # of a position without a row of the tables, the nearest one is read
        found = np.empty_like(row)
        for vector in range(dim // width):
            values = Values(row[:, vector])
            kernel.rotate.__wrapped__(kernel, values, Values(row), vector, Values(cos), Values(sin), position)
            found[:, vector] = values.array
        expected = torch.from_numpy(row.T.reshape(1, 1, 1, dim).copy())
        at = torch.tensor([[min(max(position, 0), positions - 1)]])
        expected = rotate(expected, at, torch.from_numpy(cos), torch.from_numpy(sin), interleaved)
        np.testing.assert_allclose(found.T.reshape(-1), expected.flatten().numpy())


def test_limbs_of_tf32(monkeypatch):
    """The high limb is rounded to 11 bits, so that the low one has either sign, and nothing is lost."""
    tf32 = fresh("onepass.kernels.device.sm80.tf32")
    stand_in = SimpleNamespace(
        make_rmem_tensor=lambda shape, dtype: np.zeros(shape, np.float32),
        recast_tensor=lambda values, dtype: values.view(np.int32),
    )
    monkeypatch.setattr(tf32, "cute", stand_in)
    numbers = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    pairs = np.array([tf32.limbs_of(x) for x in numbers])
    high, low = pairs.T
    assert not (high.view(np.int32) & 0x1FFF).any()
    assert (high + low == numbers).all()
    assert (np.abs(low) <= 2.0**-11 * np.exp2(np.floor(np.log2(np.abs(numbers))))).all()

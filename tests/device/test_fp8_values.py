"""The softmax of the Hopper forward in FP8, run on the CPU, against float64; and V, cleared after its last key."""

import functools

import machine_code
import numpy as np
import packages
import ptx_interpreter
import pytest
import torch

from onepass.ops import quantize
from onepass.quantization import codec
from onepass.testing.budget import P_OF_CODES

pytestmark = packages.needs_machine_code


@functools.cache
def program(softmax):
    return ptx_interpreter.parse(machine_code.read_with_ptx("sm_90a", softmax.trace)[1])


def run(softmax, s, v, q_scale, k_scale, v_scale):
    """s (16, keys), v (keys,) and the scales of rows and of blocks of 64 keys -> out, lse and P (16, keys), float64."""
    keys = s.shape[1]
    thread, column = np.arange(32), np.arange(softmax.tile_n // 4)
    key = (8 * (column // 2) + column % 2)[None] + 2 * (thread % 4)[:, None]  # (thread, column), in a tile
    row = np.stack([thread // 4, thread // 4 + 8], 1)
    tiles = np.arange(softmax.tiles)[:, None, None] * softmax.tile_n + key[None]
    given = [
        s[row[None, :, :, None], tiles[:, :, None, :]],
        v[tiles],
        q_scale,
        k_scale,
        v_scale,
    ]
    memory = ptx_interpreter.Memory(1 << 20, 1 << 32)
    addresses = [memory.put(np.ascontiguousarray(t, np.float32)) for t in given]
    sizes = (32, 2), (32, 2), (softmax.tiles, 32, softmax.tile_n // 8)
    addresses += [memory.put(np.full(size, np.nan, np.float32)) for size in sizes]
    parameters = [np.uint64(address).tobytes() for address in addresses]
    ptx_interpreter.run(program(softmax), parameters, memory, 1, 32, 1024)
    out, lse, words = (
        memory.get(address, 4 * int(np.prod(size))).view(np.float32).reshape(size)
        for address, size in zip(addresses[5:], sizes, strict=True)
    )
    # bytes of operand A: register r + 2 half of step k has the positions 32 k + 16 half + 4 q + (0 to 3) of row r
    stored = torch.from_numpy(words.view(np.uint8).copy()).view(torch.float8_e4m3fn).double().numpy()
    stored = stored.reshape(softmax.tiles, 32, softmax.tile_n // 32, 2, 2, 4)  # (tile, thread, k, half, r, byte)
    p = np.zeros((16, keys))
    for t in range(32):
        for i in range(4):
            key_of_run = 2 * (t % 4) + (0, 1, 8, 9)[i]  # the key at position 4q + i
            for r in range(2):
                runs = p[t // 4 + 8 * r].reshape(softmax.tiles, softmax.tile_n // 32, 2, 16)
                runs[..., key_of_run] = stored[:, t, :, :, r, i]
    is_first = thread % 4 == 0
    sums = out.astype(np.float64).reshape(8, 4, 2).sum(1)
    return np.concatenate([sums[:, 0], sums[:, 1]]), np.concatenate([lse[is_first, 0], lse[is_first, 1]]), p


def cases():
    from fp8_softmax import Softmax

    return {
        "n128": Softmax(128, 3, (2,), 0.8),
        "n128 every step": Softmax(128, 3, (2,), 0.0),
        "n192": Softmax(192, 3, (2, 0), 1.8),
        "n96": Softmax(96, 4, (), 2.8),
        "n32": Softmax(32, 7, (6, 5), 0.8),
        # the scales of 16 tiles of 128 keys, or of 96, are a chunk: these tiles go from one chunk to the one before
        "pages of n128": Softmax(128, 4, (), 0.8, before=14),
        "pages of n96": Softmax(96, 3, (), 0.8, before=31),
        "apart": Softmax(64, 4, (3,), 0.8, apart=True),
        "sink": Softmax(64, 5, (4,), 0.8, has_sink=True),
        "softcap": Softmax(64, 5, (4,), 0.8, has_softcap=True),
        "codes": Softmax(128, 3, (2,), 2.8, p_codes=True),
        "codes n96": Softmax(96, 4, (), 3.8, p_codes=True),
        "codes every step": Softmax(128, 3, (2,), 0.0, p_codes=True),
        "codes apart": Softmax(64, 4, (3,), 0.8, apart=True, p_codes=True),
        "codes sink": Softmax(64, 5, (4,), 2.8, has_sink=True, p_codes=True),
        "codes softcap": Softmax(64, 5, (4,), 2.8, has_softcap=True, p_codes=True),
    }


CODES = ["codes", "codes n96", "codes every step", "codes apart", "codes sink", "codes softcap"]
NAMES = ["pages of n128", "pages of n96", "n128", "n128 every step", "n192", "n96", "n32", "apart", "sink", "softcap"]


@pytest.mark.sampled(quick=1, slow=5)
@pytest.mark.parametrize(
    "spread",
    [
        pytest.param(1.0, id="normal"),
        pytest.param(6.0, id="peaked"),
        pytest.param(-3.0, id="all below 0"),
    ],
)
@pytest.mark.parametrize("name", NAMES + CODES)
def test_values(name, spread):
    from fp8_softmax import SCALE_LOG2, SINK, TANH_SCALE

    softmax = cases()[name]
    rng = np.random.default_rng(len(name))
    keys = softmax.tile_n * softmax.tiles
    q_scale = np.exp(rng.normal(size=16))
    first = softmax.before * softmax.tile_n
    k_scale, v_scale = (np.exp(rng.normal(size=-(-(first + keys) // 64))) for _ in range(2))
    s, v = spread * rng.normal(size=(16, keys)), rng.normal(size=keys)
    if spread < 0:
        s = -np.abs(s) - 5.0
    s[3, : keys // 2] -= 30.0  # a row whose reference changes a lot
    s = s.astype(np.float32)
    for tile in softmax.masked:
        columns = slice(tile * softmax.tile_n, (tile + 1) * softmax.tile_n)
        hidden = rng.random((16, softmax.tile_n)) < 0.4
        hidden[5] = True
        s[:, columns] = np.where(hidden, -np.inf, s[:, columns])
    out, lse, p = run(softmax, s, v, q_scale, k_scale, v_scale)

    q_scale, k_scale, v_scale = (x.astype(np.float32).astype(np.float64) for x in (q_scale, k_scale, v_scale))
    block_of_key = (first + np.arange(keys)) // 64
    y = s.astype(np.float64) * q_scale[:, None] * k_scale[block_of_key]
    y = np.tanh(y * TANH_SCALE * np.log(2) / 2) if softmax.has_softcap else y
    y = np.where(np.isinf(s), -np.inf, y) * SCALE_LOG2
    largest = y.max(1, keepdims=True)
    total = np.exp2(y - largest).sum(1)
    if softmax.has_sink:
        total = total + np.exp2(SINK / np.log(2) - largest[:, 0])
    expected_lse = (largest[:, 0] + np.log2(total)) * np.log(2)
    probabilities = np.exp2(y - largest) / total[:, None]
    weighted = v.astype(np.float32) * v_scale[block_of_key]
    expected_out, size = probabilities @ weighted, (probabilities * np.abs(weighted)).sum(1)
    rounding = 1e-5 * max(1.0, np.abs(expected_lse).max())
    least, largest = P_OF_CODES if softmax.p_codes else (1.0, 1.0)
    # in the sum of a row p below 2^-14 has up to 2^-13 of error, and e4m3 is rounded by up to 2^-10, of at least 2^5
    tiny = keys * v_scale.max() / v_scale.min() * 2.0**-18 if softmax.p_codes else 0.0
    assert (lse - expected_lse >= np.log(least) - tiny - rounding).all()
    assert (lse - expected_lse <= np.log(largest) + tiny + rounding).all()
    allowed = (largest - least) / (2 * least) * (size + np.abs(expected_out))
    if softmax.p_codes:
        allowed += 2.0**-15 * np.abs(v).sum() * v_scale.max() + tiny * np.abs(expected_out)
    assert (np.abs(out - expected_out) <= allowed + 2 * rounding * size + 1e-7).all()

    # P is packed times its scale, in a reference that lies at most `threshold` below the largest one so far
    exponent = y + np.log2(v_scale[block_of_key])
    tiles = exponent.reshape(16, softmax.tiles, softmax.tile_n)
    so_far = np.maximum.accumulate(tiles.max(2)[:, ::-1], 1)[:, ::-1]
    reference = np.where(np.isinf(so_far), 0.0, so_far)[..., None]
    at_least = np.exp2(tiles - reference + np.floor(np.log2(448) - softmax.threshold)).reshape(16, keys)
    at_most = at_least * 2.0**softmax.threshold
    assert (p >= at_least * (least if softmax.p_codes else 1 - 2.0**-4) - 2.0**-10 - 1e-4).all()
    assert (p <= at_most * (largest if softmax.p_codes else 1 + 2.0**-4) + 2.0**-10 + 1e-4).all()
    assert p.max() <= 448


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("name", ["n128", "codes", "codes softcap"])
def test_nan_stays_in_its_rows(name):
    """A NaN makes its row NaN, whichever of a pair of scores it is, in the first tile and in the last one."""
    softmax = cases()[name]
    keys = softmax.tile_n * softmax.tiles
    rng = np.random.default_rng(0)
    s = rng.normal(size=(16, keys))
    for row, key in ((1, 0), (2, 1), (7, keys - 2), (9, keys - 1)):
        s[row, key] = np.nan
    scales = np.ones(16), np.ones(-(-keys // 64)), np.ones(-(-keys // 64))
    out, lse, _ = run(softmax, s, rng.normal(size=keys), *scales)
    for t in (out, lse):
        assert np.flatnonzero(np.isnan(t)).tolist() == [1, 2, 7, 9]


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("name", ["codes", "codes n96"])
def test_equal_probabilities_are_exact(name):
    """Where P is a power of two, the code is exact, and so are out and lse."""
    softmax = cases()[name]
    keys = softmax.tile_n * softmax.tiles
    scales = np.ones(16), np.ones(-(-keys // 64)), np.ones(-(-keys // 64))
    out, lse, p = run(softmax, np.full((16, keys), 3.0), np.ones(keys), *scales)
    from fp8_softmax import SCALE_LOG2

    assert (p == 2.0 ** np.floor(np.log2(448) - softmax.threshold)).all()
    assert np.abs(out - 1).max() < 1e-6
    assert np.abs(lse - (3 * SCALE_LOG2 * np.log(2) + np.log(keys))).max() < 1e-5


def test_codes_of_all_probabilities():
    """Every P that e4m3 can hold lies between the two quotients that budgets are made of, and both are reached."""
    from fp8_softmax import SCALE_LOG2

    softmax = cases()["codes"]
    keys = softmax.tile_n * softmax.tiles
    # log2(P) from -9 to the largest one, once for each key, in steps of less than 1 / 64
    log2_p = np.linspace(-9, 6 + softmax.threshold, 16 * keys).reshape(16, keys)
    log2_p[:, -1] = 6.0  # of the first tile: its row's reference
    log2_p[:, -softmax.tile_n :] = np.minimum(log2_p[:, -softmax.tile_n :], 6.0)
    s = ((log2_p - 6.0) / SCALE_LOG2).astype(np.float32)
    scales = np.ones(16), np.ones(-(-keys // 64)), np.ones(-(-keys // 64))
    _, _, p = run(softmax, s, np.ones(keys), *scales)
    is_normal = log2_p >= -5.75  # a smaller one may be rounded from or to e4m3's subnormal numbers
    quotient = (p / np.exp2(log2_p))[is_normal]
    assert P_OF_CODES[0] - 1e-4 <= quotient.min() <= P_OF_CODES[0] + 2e-3
    assert P_OF_CODES[1] - 2e-3 <= quotient.max() <= P_OF_CODES[1] + 1e-4
    assert (np.abs(p - np.exp2(log2_p))[~is_normal] <= (1 - P_OF_CODES[0]) * 2.0**-5.75 + 2.0**-10).all()


@pytest.mark.sampled(quick=1, slow=0)
@pytest.mark.parametrize("name", ["n128", "sink"])
def test_a_row_without_keys(name):
    """out is 0, and lse is the sink or -inf, exactly."""
    from fp8_softmax import SINK

    softmax = cases()[name]
    keys = softmax.tile_n * softmax.tiles
    rng = np.random.default_rng(0)
    s = rng.normal(size=(16, keys))
    s[6] = -np.inf
    scales = np.ones(16), np.ones(-(-keys // 64)), np.full(-(-keys // 64), 7.0)
    out, lse, p = run(softmax, s, rng.normal(size=keys), *scales)
    assert np.isfinite(lse[np.arange(16) != 6]).all()
    assert out[6] == 0
    assert lse[6] == (SINK if softmax.has_sink else -np.inf)
    assert (p[6] == 0).all()


@pytest.mark.parametrize(("rows", "keys"), [(64, 128), (96, 32), (64, 224)])
def test_keys_behind_the_end_are_cleared(rows, keys):
    from fp8_clear import Clear

    clear = Clear(rows, keys)
    stored = torch.randint(0, 256, (rows, keys), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    position_of_key = torch.tensor([k // 16 * 16 + 4 * (k % 8 // 2) + 2 * (k % 16 // 8) + k % 2 for k in range(keys)])
    for first in (-5, 0, 1, 7, 8, 15, 16, keys - 23, keys - 1, keys, keys + 9):
        memory = ptx_interpreter.Memory(1 << 20, 1 << 32)
        address = memory.put(stored.numpy())
        parameters = [np.uint64(p).tobytes() for p in (address, memory.put(np.array([first], np.int32)))]
        ptx_interpreter.run(program(clear), parameters, memory, 1, 32, 64 << 10)
        left = torch.from_numpy(memory.get(address, rows * keys).reshape(rows, keys).copy())
        expected = stored.clone()
        expected[:, position_of_key[max(0, first) :]] = 0
        assert torch.equal(left, expected), first


@pytest.mark.parametrize(
    ("keys", "columns", "ahead"), [(128, 128, 0), (96, 64, 1), (64, 256, 3), (32, 96, 0), (192, 192, 3)]
)
def test_v_is_transposed(keys, columns, ahead):
    """The warps of transposer.py make of V in shared memory what `fp8.keys_last` makes of the same rows."""
    from fp8_transpose import THREADS, Transpose

    v = torch.randint(0, 256, (keys, columns), generator=torch.Generator().manual_seed(keys), dtype=torch.uint8)
    memory = ptx_interpreter.Memory(1 << 20, 1 << 32)
    addresses = [memory.put(t.numpy()) for t in (v, torch.zeros(columns, keys, dtype=torch.uint8))]
    parameters = [np.uint64(p).tobytes() for p in addresses]
    ptx_interpreter.run(program(Transpose(keys, columns, ahead)), parameters, memory, 1, THREADS, 128 << 10)
    stored = torch.from_numpy(memory.get(addresses[1], keys * columns).reshape(columns, keys).copy())
    expected = quantize.keys_last(v.view(codec.E4M3)[None, :, None]).view(torch.uint8)[0, 0, :, :keys]
    assert torch.equal(stored, expected)


@pytest.mark.parametrize("keys", range(32, 257, 32))
@pytest.mark.parametrize("columns", [64, 96, 128, 192, 256])
def test_lanes_that_transpose_v_meet_no_bank_conflict(keys, columns):
    """Lanes name different rows that cover both tiles, and the eight rows of a matrix lie in eight groups of banks."""
    from onepass.kernels.device.sm90.forward import transposer as t

    for first in (t.loaded_offset, t.stored_offset):
        lanes = [first(lane, keys, columns) for lane in range(32)]
        seen = []
        for step in range(columns // t.COLUMNS):
            for k in range(keys // t.KEYS):
                if first is t.loaded_offset:
                    into = [p + k * t.KEYS * t.row_bytes(columns) for p in lanes]
                    rows = [t.step_of_columns(p, step, keys, columns) for p in into]
                else:
                    into = [p + step * t.COLUMNS * t.row_bytes(keys) for p in lanes]
                    rows = [t.step_of_keys(p, k, keys, columns) for p in into]
                seen += rows
                for m in range(4):
                    assert len({row // 16 % 8 for row in rows[8 * m : 8 * m + 8]}) == 8
        assert sorted(seen) == list(range(0, keys * columns, 16))

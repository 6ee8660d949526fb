"""Tiles of an e4m3 cache in 16 bits, converted in shared memory for the Hopper forward. The PTX runs on the CPU."""

import functools

import machine_code
import numpy as np
import packages
import ptx_interpreter
import pytest
import torch

from onepass.kernels.config.sm90 import CONVERTED_KEYS

pytestmark = packages.needs_machine_code

E4M3 = torch.float8_e4m3fn


@functools.cache
def program(convert):
    return ptx_interpreter.parse(machine_code.read_with_ptx("sm_90a", convert.trace)[1])


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("keys", "columns"), [(128, 64), (128, 96), (128, 128), (64, 128)])
def test_tiles(keys, columns, dtype):
    """Every byte becomes the 16-bit number of the same value, at the same place; with `signs`, of the other sign."""
    from e4m3_tiles import TILES, WARPGROUP, Convert

    from onepass.kernels.device.sm90.forward.producer import SIGNS

    rows = torch.arange(TILES * keys * columns).roll(columns // 3).reshape(TILES * keys, columns) % 256
    rows = rows.to(torch.uint8).contiguous()
    memory = ptx_interpreter.Memory(1 << 20, 1 << 32)
    addresses = [memory.put(t.numpy()) for t in (rows, torch.zeros(*rows.shape, dtype=torch.int16))]
    parameters = [np.uint64(address).tobytes() for address in addresses] + [np.int32(SIGNS).tobytes()]
    ptx_interpreter.run(program(Convert(keys, columns, dtype)), parameters, memory, 1, WARPGROUP, 200 << 10)
    stored = memory.get(addresses[1], 2 * rows.numel()).view(np.int16).copy()
    expected = rows.view(E4M3).to(dtype)
    expected[keys:] *= -1
    out = torch.from_numpy(stored).view(dtype).reshape(rows.shape)
    assert expected.isnan().any()
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(out.signbit()[expected == 0], expected.signbit()[expected == 0])


@pytest.mark.parametrize("keys", CONVERTED_KEYS)
@pytest.mark.parametrize("columns", [64, 96, 128])
def test_lanes_meet_no_bank_conflict(keys, columns):
    """Warps load and store the whole tiles, and eight neighboring lanes lie in eight groups of banks."""
    from onepass.kernels.device.sm90.forward import converter as c

    for width, each in ((columns, 1), (2 * columns, 2)):
        seen = []
        for warp in range(4):
            lanes = [c.first_offset(warp, lane, keys, width, each) for lane in range(32)]
            for piece in range(0, width // c.COLUMNS, each * c.warps_of_rows(keys)):
                for part in range(each):
                    rows = [c.step_of_columns(p, piece + part, keys, width) for p in lanes]
                    seen += rows
                    for m in range(0, 32, 8):
                        assert len({row // 16 % 8 for row in rows[m : m + 8]}) == 8
        assert sorted(seen) == list(range(0, keys * width, 16))

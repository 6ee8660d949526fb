"""Conversions of e4m3 numbers in registers: every byte at every position, and floats. The PTX runs on the CPU."""

import packages
import sm80_decode
import torch

pytestmark = packages.needs_machine_code

E4M3 = torch.float8_e4m3fn
COUNT = 1024


def run(words, floats):
    """halves (n, 5) int32 and results (n, 4) float32 of `Convert`."""
    import e4m3_kernel
    import ptx_interpreter

    program = sm80_decode.compiled("convert", e4m3_kernel.trace, "sm_89")
    kernel = sm80_decode.Parameters()
    kernel.tensor(words)
    kernel.tensor(floats, (0, 1))
    halves, results = torch.zeros(COUNT, 5, dtype=torch.int32), torch.zeros(COUNT, 4)
    at = kernel.tensor(halves, (0, 1)), kernel.tensor(results, (0, 1))
    ptx_interpreter.run(program, kernel.values, kernel.memory, COUNT // 32, 32, 0)
    return kernel.result(at[0], halves), kernel.result(at[1], results)


def as_halves(words):
    return words.contiguous().view(torch.float16)


def assert_same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_every_byte_in_every_place():
    all_bytes = torch.arange(COUNT) % 256
    rows = torch.stack([all_bytes.roll(17 * i) for i in range(4)], 1).to(torch.uint8)
    halves, results = run(rows.view(torch.int32).flatten(), torch.ones(COUNT, 2))
    numbers = rows.view(E4M3)
    assert numbers.float().isnan().any()
    assert_same(as_halves(halves[:, :2]), numbers.half())
    assert_same(as_halves(halves[:, 2:4]), numbers.half()[:, [0, 2, 1, 3]])
    assert_same(results[:, :2], numbers.float()[:, :2])


def test_floats():
    """All e4m3 numbers, the middle between two of them and values right beside it, too large numbers, and NaN."""
    numbers = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (torch.inf, 0.0))
    special = torch.tensor([463.9, 464.0, 1e9, torch.inf, torch.nan, 1e-30])
    floats = torch.cat([numbers, middles, up, down, special])
    floats = torch.cat([floats, -floats])
    floats = torch.cat([floats, floats.new_zeros(COUNT - len(floats) % COUNT)])[:COUNT]
    halves, _ = run(torch.zeros(COUNT, dtype=torch.int32), torch.stack([floats, floats.roll(5)], 1).contiguous())
    expected = floats.clamp(-448, 448).to(E4M3).float()
    packed = halves[:, 4].contiguous().view(torch.uint8).view(COUNT, 4)[:, :2].contiguous().view(E4M3).float()
    assert_same(packed, torch.stack([expected, expected.roll(5)], 1))


def test_factors_of_rows():
    """Powers of two that bring bf16 magnitudes to 2^14, tiny ones as near as float32 allows; and their reciprocals."""
    exponents = torch.arange(-149, 128)
    largest = torch.cat([2.0**exponents, 1.75 * 2.0 ** exponents[30:], torch.tensor([0.0, torch.inf, torch.nan])])
    floats = torch.cat([largest, torch.ones(COUNT - len(largest))])
    _, results = run(torch.zeros(COUNT, dtype=torch.int32), torch.stack([floats, floats], 1).contiguous())
    factor, reciprocal = results[:, 2], results[:, 3]
    assert torch.equal(factor * reciprocal, torch.ones(COUNT))
    assert (factor.frexp().mantissa == 0.5).all()
    brought = (floats * factor)[floats.isfinite() & (floats >= 2.0**-112)]
    assert ((brought >= 2.0**14) & (brought < 2.0**15)).all()
    assert (floats * factor)[floats < 2.0**-112].max() < 2.0**15

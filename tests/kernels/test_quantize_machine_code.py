"""The kernels of `quantize_fp8` for other architectures: no spills, 16 bytes a load and a store."""

import functools
import importlib.util

import machine_code
import pytest
import torch

from onepass.kernels.fp8 import launch
from onepass.kernels.fp8.launch import Kernel

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
# 16-byte loads and stores of a thread, and its registers: with 80, an SM has 3 thread blocks of 256 threads
CASES = {
    "rows 64": (Kernel("rows", BF16, 64, rotates=True), 4, 2, 56),
    "rows 128": (Kernel("rows", BF16, 128, rotates=True), 8, 4, 80),
    "rows 256": (Kernel("rows", FP16, 256, rotates=True), 8, 4, 80),
    "rows 128 as they are": (Kernel("rows", BF16, 128), 8, 4, 80),
    "values 64": (Kernel("values", BF16, 64), 4, 2, 56),
    "values 128": (Kernel("values", BF16, 128), 8, 4, 80),
    "values 256": (Kernel("values", FP16, 256), 8, 4, 80),
    "values 128 of e4m3": (Kernel("values", E4M3, 128, is_packed=True, has_seqused=True), 4, 4, 40),
}


OTHER_ARCH = ("rows 128", "values 128")  # of the quick tests


@pytest.mark.parametrize(
    ("name", "arch"),
    [(name, "sm_90a") for name in CASES]
    + [pytest.param(name, "sm_89", marks=() if name in OTHER_ARCH else pytest.mark.slow) for name in CASES],
)
def test_machine_code(name, arch):
    kernel, loads, stores, registers = CASES[name]
    code = machine_code.read(arch, functools.partial(launch.trace, kernel))
    assert code.spills == 0
    assert code.count(r"LDG\.E\.128") == loads
    assert code.count(r"STG\.E\.128") == stores
    assert code.count("STG") - stores == (kernel.dtype != E4M3)  # the scale
    assert code.registers <= registers
    # for each 128 bits of x a product with 4 terms of the quad, twice; nothing else moves between lanes but maxima
    assert code.count("HMMA") == (2 * loads if kernel.rotates else 0)
    assert code.count("SHFL") <= 16
    if kernel.dtype != E4M3:
        # a conversion for two values, once for blocks with inf and once for all others
        assert code.count(r"F2FP\.\S*E4M3") == 2 * 4 * loads

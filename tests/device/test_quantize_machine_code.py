"""The kernels of `quantize_fp8` for other architectures: no spills, and 16 bytes a load and a store."""

import functools

import machine_code
import packages
import pytest
import torch

from onepass.kernels.launch import quantize as launch
from onepass.kernels.launch.quantize import Kernel, LayoutKernel

pytestmark = packages.needs_machine_code

BF16, FP16 = torch.bfloat16, torch.float16
# 16-byte loads and stores of a thread for each of q, k and v, and the registers of a thread:
# with 48, an SM has 10 thread blocks of 128 threads, with 80 it has 3 of 256
CASES = {
    "64": (Kernel(BF16, 64, 64, True, rotates=True), 4, 2, 48),
    "128": (Kernel(BF16, 128, 128, True, rotates=True), 8, 4, 80),
    "256": (Kernel(FP16, 256, 256, True, rotates=True), 8, 4, 80),
    "128 not rotated": (Kernel(BF16, 128, 128, True), 8, 4, 80),
    "128 as they lie": (Kernel(BF16, 128, 128, False, rotates=True), 8, 4, 80),
    "128 packed": (Kernel(BF16, 128, 128, True, rotates=True, is_packed=True), 8, 4, 80),
}


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
@pytest.mark.parametrize("name", CASES)
def test_machine_code(name, arch):
    kernel, loads, stores, registers = CASES[name]
    code = machine_code.read(arch, functools.partial(launch.trace, kernel))
    assert code.spills <= (4 if kernel.is_packed and arch == "sm_89" else 0)
    assert code.count(r"LDG\.E\.128") == 3 * loads
    assert code.count(r"STG\.E\.128") == 3 * stores
    assert code.count("STG") - 3 * stores == 3  # the scales
    assert code.registers <= registers
    # two products with 4 terms of the quad for each 128 bits of q and k; beside these, only maxima move between lanes
    assert code.count("HMMA") == (4 * loads if kernel.rotates else 0)
    assert code.count("SHFL") <= 3 * 16
    # a conversion for two values, once in the code for blocks with inf and once in the code for all others
    assert code.count(r"F2FP\.\S*E4M3") == 3 * 2 * 4 * loads


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_89"])
def test_layout_of_e4m3(arch):
    code = machine_code.read(arch, functools.partial(launch.trace, LayoutKernel(128, is_packed=True)))
    assert code.spills == 0
    assert code.count(r"LDG\.E\.128") == code.count(r"STG\.E\.128") == code.count("STG") == 4
    assert code.registers <= 40

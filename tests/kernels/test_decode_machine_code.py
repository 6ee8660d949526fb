"""The kernels of attention_decode for other architectures: everything stays in registers."""

import functools
import importlib.util

import machine_code
import pytest
import torch
from shipped import problem

from onepass.decode_problem import DecodeProblem
from onepass.kernels.heuristics_decode import decode_config_sm80
from onepass.kernels.sm80 import decode_launch

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"),
    pytest.mark.skipif(machine_code.disassembler() is None, reason="nvidia-cuda-nvdisasm is not installed"),
]


@pytest.mark.parametrize(("arch", "head_dim", "is_paged"), [("sm_90a", 128, True), ("sm_86", 256, False)])
def test_splits(arch, head_dim, is_paged):
    asked = DecodeProblem(problem(head_dim, head_dim, has_seqused_k=True), is_paged)
    config = decode_config_sm80(asked.attention, arch)
    code = machine_code.read(arch, functools.partial(decode_launch.trace, asked, config, arch, True))
    assert code.spills == 0
    assert code.count(r"HMMA\.16816\.F32") > 0
    assert code.count(r"LDGSTS\.E\.BYPASS.*\.128$") == code.count("LDGSTS") > 0
    assert code.count(r"STG\.E\.64") > 0  # two float32 of a partial
    assert code.dynamic_smem == [config.smem_bytes(asked.attention)]


def test_merge_and_append():
    merge = functools.partial(decode_launch.trace_merge, torch.float32, torch.bfloat16, 128, True)
    key = decode_launch.AppendKey(torch.bfloat16, 128, 128, True, True, (torch.float32, 64, False))
    for trace in (merge, functools.partial(decode_launch.trace_append, key)):
        assert machine_code.read("sm_90a", trace).spills == 0

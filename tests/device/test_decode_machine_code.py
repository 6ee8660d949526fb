"""The kernels of attention_decode for other architectures: everything stays in registers."""

import functools
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import problem

from onepass.kernels.config import ForwardConfigSm80, head_dim_tile
from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.kernels.heuristics.decode import decode_config_sm80
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import merge as merge_launch
from onepass.kernels.launch.forward_sm80 import ARCHS
from onepass.problem.decode import DecodeProblem

pytestmark = packages.needs_machine_code


def code_of(arch: str, is_paged: bool, is_split: bool = True, has_descales: bool = False, **changes) -> tuple:
    """The machine code of the forward that a call gets, and its configuration."""
    widths = {"head_dim_v": changes["head_dim"], "has_seqused_k": True, "seqlen_q": 1}
    heads = {"num_heads_q": 32, "num_heads_kv": 8}
    attention = replace(problem(64, 64), **(widths | heads | changes))
    kv_block = 16 if has_descales else None
    asked = DecodeProblem(attention, 16 if is_paged else None, has_descales=has_descales, kv_block=kv_block)
    config = decode_config_sm80(asked.attention, arch)
    code = machine_code.read(arch, functools.partial(decode_launch.trace, asked, config, arch, is_split))
    # for the widest float32 heads, the assembler keeps addresses in local memory
    is_wide = asked.attention.dtype == torch.float32 and changes["head_dim"] > 128
    assert code.spills <= (20 if is_wide else 0)
    assert code.spills_in_gemms == 0
    assert code.dynamic_smem == [config.smem_bytes(asked.attention)]
    assert code.count(r"LDGSTS\.E\.BYPASS.*\.128(\.\w+)?$") == code.count("LDGSTS") > 0
    return code, config


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize(
    ("arch", "head_dim", "is_paged"),
    [
        *((arch, 128, i % 2 == 0) for i, arch in enumerate(ARCHS)),
        ("sm_90a", 64, True),
    ],
)
def test_warps_along_the_keys(arch, head_dim, is_paged):
    code, config = code_of(arch, is_paged, head_dim=head_dim)
    assert isinstance(config, DecodeConfigSm80)
    d = head_dim_tile(head_dim)
    # a masked block and a clear one; in each, 16 keys of a warp for two 8-column blocks of S, and for O's columns
    assert code.count(r"HMMA\.16816\.F32") == 2 * (d // 16 * 2 + d // 8)
    # Q once; fragments of K and of V serve 16 x 16 elements each
    assert code.count(r"LDSM\.16\.M88\.4") == d // 16 + 2 * d // 16
    assert code.count(r"LDSM\.16\.MT88\.4") == 2 * d // 16
    assert code.count(r"STS\.128") == d // 8  # O of a warp, for the others ..
    assert code.count(r"LDS\.128") >= config.key_warps * 4  # .. and 32 columns from all warps
    assert code.count(r"STG\.E\.64") > 0  # two float32 values of a partial
    assert code.count(r"BAR\.SYNC") == 3  # after Q has arrived, before the exchange, and after it: none in the loop


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("changes", [{"head_dim": 256}, {"head_dim": 128, "seqlen_q": 8}])
def test_wide_heads_and_more_rows(changes):
    _, config = code_of("sm_90a", True, **changes)
    assert isinstance(config, DecodeConfigSm80)


@pytest.mark.slow
def test_float32_on_all_that_shared_memory_holds():
    code, config = code_of("sm_86", False, False, head_dim=256, dtype=torch.float32)
    assert isinstance(config, DecodeConfigSm80)
    assert code.count(r"HMMA\.1688\.F32\.TF32") > 0


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    ("arch", "head_dim", "is_paged", "is_packed"),
    [("sm_90a", 128, True, False), ("sm_86", 256, False, False), ("sm_80", 128, True, True)],
)
def test_warps_along_the_rows(arch, head_dim, is_paged, is_packed):
    code, config = code_of(arch, is_paged, head_dim=head_dim, seqlen_q=16, is_packed=is_packed)
    assert type(config) is ForwardConfigSm80
    assert code.count(r"HMMA\.16816\.F32") > 0
    assert code.count(r"STG\.E\.64") > 0


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    ("arch", "d", "is_paged"),
    [("sm_90a", 128, True), ("sm_89", 256, False), ("sm_100a", 64, True)],
)
def test_e4m3_cache(arch, d, is_paged):
    """An e4m3 cache takes as many mma as 16 bits, half the fragments, and one conversion for two numbers."""
    code, config = code_of(arch, is_paged, has_descales=True, head_dim=d, kv_dtype=torch.float8_e4m3fn)
    assert isinstance(config, DecodeConfigSm80)
    num_mma = 2 * (d // 16 * 2 + d // 8)
    assert code.count(r"HMMA\.16816\.F32") == num_mma
    assert code.count(r"LDSM\.16\.M88\.4") == code.count(r"LDSM\.16\.MT88\.4") == num_mma // 8
    # two for the fragment of an mma; some for rows that are computed again
    assert 2 * num_mma < code.count(r"F2FP\.F16\.E4M3\.UNPACK_B") <= 2 * num_mma + 16
    assert code.count(r"STG\.E\.128") > 0  # four float32 values of a partial
    assert config.q_in_registers == (
        d < 256
    )  # otherwise Q goes to shared memory in fp16, with two more barriers before the loop
    assert code.count(r"BAR\.SYNC") == (3 if config.q_in_registers else 5)


@pytest.mark.slow
@pytest.mark.nightly  # no chosen configuration has early_merge
def test_early_merge():
    """The forward lets the merge begin, and the merge waits for its end; without early_merge neither happens."""
    for is_early in (False, True):
        asked = DecodeProblem(replace(problem(128, 128), has_seqused_k=True, seqlen_q=1))
        config = replace(decode_config_sm80(asked.attention, "sm_90a"), early_merge=is_early)
        config.check(asked.attention, "sm_90a")
        forward = machine_code.read("sm_90a", functools.partial(decode_launch.trace, asked, config, "sm_90a", True))
        merge = machine_code.read("sm_90a", merge_launch.merge_request(asked.attention, config, 33, "sm_90a")[3])
        assert (forward.count("PREEXIT"), merge.count("ACQBULK")) == (int(is_early), int(is_early))
        assert forward.spills == merge.spills == 0


OF_E4M3 = {"is_e4m3": True, "has_descales": True, "descales_by_block": True}


@pytest.mark.slow
def test_merge_and_append():
    for warps in (1, 8):
        merge = merge_launch.MergeKey(torch.float32, torch.bfloat16, 128, True, 16, warps)
        code = machine_code.read("sm_90a", functools.partial(merge_launch.trace_merge, merge))
        assert code.spills == 0
        assert code.count(r"LDG\.E\.128") == 8  # loads of partials under way
    key = append_launch.AppendKey(torch.bfloat16, 128, 128, True, True, (torch.float32, 64, False), 16)
    assert machine_code.read("sm_90a", functools.partial(append_launch.trace_append, key)).spills == 0
    code = machine_code.read("sm_90a", functools.partial(append_launch.trace_append, replace(key, **OF_E4M3)))
    assert code.spills == 0
    assert (
        code.count(r"F2FP\.SATFINITE\.E4M3") == 2 * 4
    )  # a thread has 8 columns of K and of V, and converts two at a time
    assert code.count(r"STG\.E\.64") == 2

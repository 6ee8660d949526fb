"""The Hopper forward in float32: three products of float16 halves in the machine code, and its configurations."""

import functools
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import CAUSAL, problem

from onepass.errors import UnsupportedError
from onepass.kernels.config import REGISTERS, ForwardConfigSm90, p_exponent
from onepass.kernels.device.blocks.memory.wgmma import products
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import float32_halves as halves_launch
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import Mask

FULL = Mask()
BARRIER_BYTES = 1024  # an upper bound of the bytes that `smem_bytes` counts for barriers


def asked(head_dim, head_dim_v=None, **options):
    return problem(head_dim, head_dim_v or head_dim, dtype=torch.float32, **options)


QUESTIONS = {
    "64": asked(64, mask=FULL),
    "64 causal": asked(64, mask=CAUSAL),
    "96": asked(96, mask=FULL),
    "96 causal": asked(96, mask=CAUSAL),
    "128": asked(128, mask=FULL),
    "128 causal": asked(128, mask=CAUSAL),
    "64 packed causal softcap": asked(64, mask=CAUSAL, is_packed=True, softcap=5.0),
    "128 window softcap sinks GQA": asked(128, mask=Mask(64, 64), softcap=30.0, has_sinks=True, num_heads_kv=2),
    "128 packed causal seqused": asked(128, mask=CAUSAL, is_packed=True, has_seqused_k=True),
    "128 group of 4": replace(asked(128, mask=FULL, num_heads_kv=1), seqlen_q=1),
    "40/96": asked(40, 96, mask=CAUSAL),
    "192 causal": asked(192, mask=CAUSAL),
    "256": asked(256, mask=FULL),
    "64/256 window": asked(64, 256, mask=Mask(64, 64)),
}


def compiled(question, config):
    return machine_code.read(*launch.compile_request(question, config)[2:])


@pytest.mark.sampled(quick=0, slow=4)
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=packages.needs_machine_code) for name in QUESTIONS],
)
def test_machine_code(name):
    question = QUESTIONS[name]
    config = heuristics.forward_config_sm90(question)
    assert config.pack_gqa == ("group" in name)
    code = compiled(question, config)
    assert code.serialized == ""
    assert code.spills_in_gemms == 0
    if question.mask == FULL and question.head_dim <= 128:
        assert code.spills == 0
    assert code.registers <= REGISTERS[config.num_warpgroups][1] == 240
    (smem,) = code.dynamic_smem
    assert config.smem_bytes(question) - BARRIER_BYTES < smem <= config.smem_bytes(question)
    assert code.count("USETMAXREG") == 2
    # three GEMMs of one group: a fence and a wait each
    assert code.count(r"WARPGROUP\.ARRIVE") == code.count(r"WARPGROUP\.DEPBAR")
    # both halves of Q, K and V by TMA
    assert code.count("UTMALDG") >= 2 * (config.num_warpgroups + 2)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("64 causal", marks=packages.needs_machine_code),
        pytest.param("128", marks=packages.needs_machine_code),
    ],
)
def test_three_products_for_one_of_16_bits(name):
    question = QUESTIONS[name]
    config = heuristics.forward_config_sm90(question)
    code, of_16_bits = compiled(question, config), compiled(replace(question, dtype=torch.float16), config)
    assert of_16_bits.count("HGMMA") > 0
    for pattern in ("HGMMA", rf"HGMMA\.64x{config.tile_n}x16", r"HGMMA\.64x\d+x16\.F32(?!\.BF16)"):
        assert code.count(pattern) == 3 * of_16_bits.count(pattern)
    assert code.count("UTMALDG") == 2 * of_16_bits.count("UTMALDG")
    assert code.count(r"WARPGROUP\.ARRIVE") == of_16_bits.count(r"WARPGROUP\.ARRIVE")


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(
            halves_launch.Kernel(d, v, p, p), id=f"{d}{' of v' * v}{' packed' * p}", marks=packages.needs_machine_code
        )
        for d, v, p in (
            (64, True, False),
            (96, False, True),
            (128, True, False),
            (192, False, True),
            (256, False, False),
        )
    ],
)
def test_machine_code_of_the_halves_kernel(kernel):
    """No spills; a thread reads 16 bytes and writes 8 at a time, with few enough registers for 512 threads."""
    code = machine_code.read(launch.ARCH, functools.partial(halves_launch.trace, kernel))
    passes = 8 if kernel.head_dim == 64 else 16
    assert code.spills == 0
    assert code.registers <= 128
    assert code.count(r"LDG\.E\.128") == passes
    assert code.count(r"STG\.E\.64") == 2 * passes
    assert code.count("STG") - 2 * passes == 1  # the scale


def test_products_of_halves():
    """high * high comes last, low * low not at all: the error is 2^-22 of the sum of magnitudes."""
    assert products(["a"], ["b"]) == [("a", "b")]
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 64, generator=generator) for _ in range(2))

    def halves(x):
        high = x.half()
        return [high.double(), (x - high.float()).half().double()]

    pairs = products(halves(a), halves(b))
    assert len(pairs) == 3
    assert torch.equal(pairs[-1][0], a.half().double())
    assert torch.equal(pairs[-1][1], b.half().double())
    exact = a.double() @ b.double().T
    error = (sum(x @ y.T for x, y in pairs) - exact).abs()
    assert (error <= 2.0**-21 * (a.double().abs() @ b.double().abs().T)).all()


def test_p_of_halves():
    """The largest P is still a float16, with either threshold."""
    assert p_exponent(8, torch.float16) == 7
    assert p_exponent(0, torch.float16) == 15
    assert p_exponent(0.8) == 8
    for threshold in (0, 0.5, 2.8, 8, 15):
        exponent = p_exponent(threshold, torch.float16)
        assert 2.0 ** (exponent + threshold) < torch.finfo(torch.float16).max <= 2.0 ** (exponent + 1 + threshold)


def test_every_pair_of_head_dims_has_a_configuration():
    for head_dim in range(8, 257, 8):
        for head_dim_v in (*range(8, 129, 8), *range(144, 257, 16)):
            for seqlen, options in ((1, {}), (4096, {"num_heads_kv": 1}), (65536, {"mask": CAUSAL, "is_packed": True})):
                question = asked(head_dim, head_dim_v, seqlen=seqlen, **options)
                config = heuristics.forward_config_sm90(question)
                config.check(question)
                assert (
                    config.two_level_sums
                )  # the tensor cores truncate sums, a bias that grows with the number of keys


def test_configurations_by_the_wider_head_dim():
    for head_dims, tile in (
        *(((64, 64), 64), ((8, 40), 64), ((72, 64), 96), ((64, 96), 96), ((8, 128), 128), ((136, 8), 192)),
        *(((256, 256), 256), ((64, 256), 128), ((64, 192), 96)),  # V in two blocks of columns
    ):
        config = heuristics.forward_config_sm90(asked(*head_dims, seqlen=4096))
        assert config == heuristics.FLOAT32_SM90[tile]
    few = heuristics.forward_config_sm90(asked(128, seqlen=64))
    assert few == replace(heuristics.FLOAT32_SM90[128], num_warpgroups=1)
    assert heuristics.forward_config_sm90(replace(asked(64, num_heads_kv=1), seqlen_q=16)).pack_gqa


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_buffers": 2}, "score_buffers: expected 1 in float32"),
        ({"tile_n": 144}, "shared memory: .* needs .* bytes, a thread block has 232448"),
    ],
)
def test_refused_configurations(fields, message):
    config, question = ForwardConfigSm90(**{"tile_n": 64} | fields), asked(128)
    with pytest.raises(UnsupportedError, match=message):
        config.check(question)
    if "tile_n" not in fields:
        config.check(replace(question, dtype=torch.float16))


def test_memory_and_registers_of_two_halves():
    """A tile takes as many bytes as its float32 numbers; P takes twice as many registers as in 16 bits."""
    config = ForwardConfigSm90(tile_n=64)
    question = asked(128)
    of_16_bits = replace(question, dtype=torch.float16)
    assert config.smem_bytes(question) - BARRIER_BYTES == 2 * (config.smem_bytes(of_16_bits) - BARRIER_BYTES)
    assert config.smem_bytes(asked(40)) == config.smem_bytes(asked(64))  # padded
    assert config.smem_bytes(asked(128, 240)) == config.smem_bytes(asked(128))  # a block of columns
    assert config.accumulator_registers(question) == config.accumulator_registers(of_16_bits) + 64 // 4

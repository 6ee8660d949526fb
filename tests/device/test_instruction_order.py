"""Where exponentials and loads stand in the machine code, in each kernel whose text wants them beside GEMMs.

ptxas takes a wait for GEMMs to cost nothing and moves arithmetic across it, so the order of the source says little.
"""

import functools
import re
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import ROWS, problem

from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm80, backward_sm90, decode_sm90, forward_sm80, forward_sm90
from onepass.problem import Mask, Quantization
from onepass.problem.decode import DecodeProblem

pytestmark = packages.needs_machine_code

FULL, CAUSAL = Mask(), Mask(None, 0)
AMPERE = "sm_80"


def numbers(pattern: str, order: str) -> list[int]:
    return [int(n) for n in re.findall(pattern, order)]


def order_of(trace, asked, config, *arguments, arch=forward_sm90.ARCH) -> str:
    return machine_code.read(arch, functools.partial(trace, asked, config, *arguments)).order


@pytest.mark.sampled(quick=1, slow=3)
@pytest.mark.parametrize(
    ("head_dim", "options"),
    [
        (64, {"mask": CAUSAL}),
        (64, {"mask": FULL, "num_heads_kv": 1}),
        (64, {"mask": Mask(64, 64), "is_packed": True}),
        (96, {"mask": CAUSAL}),
        (96, {"mask": FULL}),
        (128, {"mask": CAUSAL}),
        (128, {"mask": FULL, "num_heads_kv": 1}),
        (128, {"mask": Mask(64, 64), "is_packed": True}),
    ],
)
def test_backward_beside_the_gradients(head_dim, options):
    """In every kind of step (first or not, last or not; with groups none is both) dS is written before the wait for dV,
    which still runs. In those that are not the last one all exponentials stand before the wait for dK."""
    asked = problem(head_dim, head_dim, 2048, **options)
    config = heuristics.backward_config_sm90(asked)
    assert config.overlap_gradients
    order = order_of(backward_sm90.trace, asked, config)
    assert numbers(r"wait 1, ex2 (\d+), wait 0", order) == 2 * [config.tile_m // 2]
    assert numbers(r"wait 1, stsm (\d+), wait 0", order) == (4 - (asked.qhead_per_kvhead > 1)) * [config.tile_m // 16]


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("options", [{"mask": FULL}, {"mask": CAUSAL}, {"mask": CAUSAL, "deterministic": True}])
@pytest.mark.parametrize("head_dims", [(192, 128), (256, 256)])
def test_backward_of_pairs(head_dims, options):
    """dV and S are issued together, and dQ before the exponentials, which run beside it; in the other warpgroup dK and
    dQ before dP."""
    asked = problem(*head_dims, 2048, **options)
    config = replace(heuristics.backward_config_sm90(asked), paired=True, background_rows=False)
    order = order_of(backward_sm90.trace, asked, config)
    of_s, of_dp = (d // 16 for d in head_dims)
    assert re.search(rf"mma {4 + of_s}, wait 1, mma 8, wait 1, ex2 32, wait 0, stsm 4,", order)
    assert re.search(rf"mma {4 + 8 + of_dp}, wait 2, wait 1, (ex2 1, )?wait 0, (ex2 1, )?ldsm 4, stsm 4,", order)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("head_dims", [(128, 128), (192, 128), (256, 256)])
def test_backward_after_the_gradients(head_dims):
    """Without overlap_gradients ptxas moves the exponentials behind dK or, above head_dim 128, dV: as measured."""
    asked = problem(*head_dims, 2048, mask=FULL)
    config = replace(heuristics.backward_config_sm90(asked), paired=False)
    assert not config.overlap_gradients
    order = order_of(backward_sm90.trace, asked, config)
    assert sum(numbers(r"wait 1, ex2 (\d+), wait 0", order)) <= 1
    assert sum(numbers(r"wait 0, ex2 (\d+)", order)) >= 2 * (config.tile_m // 2) - 1


def forward(name: str):
    row = next(row for row in ROWS if row.name == name)
    return row.problem, row.config, lambda asked, config: order_of(forward_sm90.trace, asked, config)


def forward_fp8():
    quantization = replace(Quantization(torch.bfloat16, 64, 64), v_keys_last=True)
    asked = replace(problem(128, 128, mask=FULL), dtype=torch.float8_e4m3fn, quantization=quantization)
    return asked, heuristics.forward_config_sm90(asked), lambda a, config: order_of(forward_sm90.trace, a, config)


def decode():
    sizes = {"seqlen_q": 16, "num_heads_q": 16, "num_heads_kv": 2}
    asked = DecodeProblem(replace(problem(128, 128, mask=CAUSAL), has_seqused_k=True, **sizes), None)
    config = decode_sm90.config_of(asked, torch.device("cpu"))

    def order(asked, config):
        return machine_code.read(forward_sm90.ARCH, decode_sm90.compile_request(asked, config, True)[3]).order

    return asked, config, order


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize(
    "kernel",
    [functools.partial(forward, "64 to 1024"), functools.partial(forward, "128 causal to 4096"), forward_fp8, decode],
    ids=["64", "128 causal", "fp8", "decode"],
)
def test_forward_softmax_and_the_wait_for_pv(kernel):
    """In the loop of tiles whose maximum may grow, ptxas leaves at most a quarter of the exponentials above the wait
    for P V. Held there they made no kernel faster: P V is over when the softmax is."""
    asked, config, order_of_kernel = kernel()
    assert config.overlap_gemm_softmax
    loops = re.findall(r"wait 1, ex2 (\d+), wait 0, ex2 (\d+)", order_of_kernel(asked, config))
    assert loops
    for above, below in loops:
        assert int(above) + int(below) >= config.tile_n // 2
        assert int(above) < 0.25 * (int(above) + int(below))


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_ampere_loads_and_fragments(head_dim):
    """The next K is on its way before the GEMM of S, and fragments are loaded between mma, not before all of them."""
    asked = problem(head_dim, head_dim, mask=CAUSAL)
    config = heuristics_sm80.forward_config_sm80(asked, AMPERE)
    order = order_of(forward_sm80.trace, asked, config, AMPERE, arch=AMPERE)
    loops = re.findall(r"cp\.async \d+, ldsm \d+, (mma .*?)ex2 \d+, mma", order)
    assert len(loops) == 2  # masked and not
    assert all(loop.count("ldsm") >= head_dim // 8 for loop in loops)
    config = heuristics_sm80.backward_config_sm80(asked, AMPERE)
    order = order_of(backward_sm80.trace, asked, config, AMPERE, arch=AMPERE)
    assert len(re.findall(r"mma \d+, ex2 \d+(?=, mma)", order)) >= 10  # exponentials of P between mma of dP

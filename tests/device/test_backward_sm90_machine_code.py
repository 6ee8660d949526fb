"""Every shipped configuration of the Hopper backward compiles without a GPU, and its machine code is what was meant."""

import functools
import itertools
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import problem

from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.kernels.launch import forward_sm90 as launch
from onepass.problem import Mask

pytestmark = packages.needs_machine_code

FULL, CAUSAL = Mask(), Mask(None, 0)
OPTIONS = {
    "full": {"mask": FULL},
    "causal": {"mask": CAUSAL},
    "window": {"mask": Mask(64, 64)},
    "softcap": {"mask": CAUSAL, "softcap": 30.0},
    "GQA": {"mask": CAUSAL, "num_heads_kv": 2},
    "GQA softcap": {"mask": FULL, "num_heads_kv": 2, "softcap": 30.0},
    "packed": {"mask": CAUSAL, "is_packed": True},
    "seqused": {"mask": FULL, "has_seqused_k": True},
    "float16 packed seqused GQA window softcap": {
        "dtype": torch.float16,
        "mask": Mask(64, 0),
        "is_packed": True,
        "has_seqused_k": True,
        "num_heads_kv": 1,
        "softcap": 30.0,
    },
}
PROBLEMS = {f"{d} {name}": problem(d, d, **options) for d in (64, 128) for name, options in OPTIONS.items()}
PROBLEMS |= {f"{d} long": problem(d, d, 2048, mask=FULL) for d in (64, 128, 256)}  # three kernels
PROBLEMS["128 long softcap"] = problem(128, 128, 2048, mask=FULL, softcap=30.0)
PROBLEMS |= {f"{d}/{dv}": problem(d, dv) for d, dv in ((64, 128), (128, 64), (96, 96), (192, 128))}
PROBLEMS |= {
    f"96 {name}": problem(96, 96, **OPTIONS[name])
    for name in ("full", "GQA", "window", "softcap", "seqused", "float16 packed seqused GQA window softcap")
}
PROBLEMS |= {f"{d} deterministic": problem(d, d, deterministic=True) for d in (64, 128, 192, 256)}
PROBLEMS |= {
    f"256 {name}": problem(256, 256, 64, mask=mask) for name, mask in (("64 keys", FULL), ("64 causal keys", CAUSAL))
}
PROBLEMS |= {f"{d} deterministic long": problem(d, d, 4096, deterministic=True) for d in (64, 128)}  # an ascending end
PROBLEMS |= {  # rings
    f"{d} deterministic full": replace(problem(d, d, 2048, mask=FULL, deterministic=True), batch=16)
    for d in (64, 128, 192, 256)
}
PROBLEMS["128 deterministic window"] = problem(
    128, 128, deterministic=True, mask=Mask(64, 64)
)  # turns in descending order
PROBLEMS |= {
    f"{d} {name}": problem(d, d, **OPTIONS[name])
    for d in (192, 256)
    for name in ("full", "causal", "seqused", "float16 packed seqused GQA window softcap")
}
# modifiers with which head_dim 64 has the larger tile
PROBLEMS |= {
    "64 ALiBi": problem(64, 64, mask=CAUSAL, has_alibi=True),
    "64 ALiBi packed deterministic": problem(
        64, 64, mask=Mask(64, 64), has_alibi=True, is_packed=True, deterministic=True
    ),
    "64 ranges": problem(64, 64, mask=FULL, has_key_ranges=True),
    "64 positions GQA": problem(64, 64, mask=CAUSAL, has_q_positions=True, num_heads_kv=2),
    "64 left padding": problem(64, 64, mask=CAUSAL, has_seqstart_k=True),
    "64 left padding seqused deterministic": problem(
        64, 64, mask=FULL, has_seqstart_k=True, has_seqused_k=True, deterministic=True
    ),
}
BLOCKS = {"mask": FULL, "block_size": (64, 64)}
PROBLEMS |= {f"{d} blocks of 64": problem(d, d, **BLOCKS) for d in (64, 96, 128)}
PROBLEMS |= {
    "64 bits deterministic GQA": problem(64, 64, **BLOCKS, has_block_bits=True, deterministic=True, num_heads_kv=2),
    "64 blocks of 64 dropout": problem(64, 64, **BLOCKS, dropout_p=0.1),
    "128 bits": problem(128, 128, **BLOCKS, has_block_bits=True),
    "128 blocks of 64 packed softcap GQA": problem(128, 128, **BLOCKS, is_packed=True, softcap=30.0, num_heads_kv=2),
}
HEADS = 132  # with private_dq, one for each thread block
SHORT = {
    "64 short": problem(64, 64, mask=FULL),
    "64 short causal": problem(64, 64, mask=CAUSAL),
    "96 short causal": problem(96, 96, mask=CAUSAL),
    "128 short": problem(128, 128, 200, mask=FULL),
    "128 short causal": problem(128, 128, mask=CAUSAL),
    "64 short window": problem(64, 64, mask=Mask(64, 64)),
    "128 short GQA seqused window": problem(
        128, 128, 100, torch.float16, mask=Mask(64, 0), num_heads_kv=2, has_seqused_k=True
    ),
}
SHORT = {name: replace(asked, batch=HEADS // asked.num_heads_kv) for name, asked in SHORT.items()}
PROBLEMS |= SHORT


# Loads and stores of values that do not fit into registers: numbers of a tile outside of the loop, and in turns where
# the lists of tiles lie.
FEW_SPILLS = {
    "256 float16 packed seqused GQA window softcap": 20,
    "128 short GQA seqused window": 3,
    "128 GQA": 8,
    "128 bits": 4,
    "64 left padding seqused deterministic": 4,
}
PARAMETERS = [pytest.param(name, asked, id=name) for name, asked in PROBLEMS.items()]


@pytest.mark.sampled(quick=1, slow=9)
@pytest.mark.parametrize(("name", "asked"), PARAMETERS)
def test_machine_code(name, asked):
    config = heuristics.backward_config_sm90(asked)
    config.check(asked)
    code = machine_code.read(launch.ARCH, functools.partial(backward_launch.trace, asked, config))
    assert code.serialized == ""
    assert code.spills_in_gemms == 0
    assert code.spills <= FEW_SPILLS.get(name, 0)
    assert code.count("HGMMA") > 0
    assert code.count("UTMALDG") >= 2 * config.row_blocks + 2  # K and V in tiles of 64, Q, dO by TMA
    assert code.count(r"REDG\.E\.ADD\.F32x4") > 0  # dQ to global memory: each thread adds its values
    assert code.count("USETMAXREG") == 2  # registers move from the producer to the consumers
    assert code.count(r"STG\.E\.128") > 0
    assert code.count(r"WARPGROUP\.ARRIVE") < code.count("HGMMA")  # serialized, each GEMM would have its own
    assert code.dynamic_smem == [config.smem_bytes(asked)]


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("name", ["full", "causal", "GQA"])
def test_gemms_of_head_dim_96(name):
    """dK and dV have 96 columns, a warpgroup's share of dQ 48, and S and dP sum over 96: no GEMM computes zeros."""
    asked = problem(96, 96, 2048, **OPTIONS[name])
    trace = functools.partial(backward_launch.trace, asked, heuristics.backward_config_sm90(asked))
    code = machine_code.read(launch.ARCH, trace)
    gemms = {opcode.split(".")[1]: n for opcode, n in code.opcodes.items() if opcode.startswith("HGMMA")}
    assert gemms.keys() == {"64x64x16", "64x96x16", "64x48x16"}
    assert gemms["64x64x16"] % 6 == 0
    assert gemms["64x48x16"] % 8 == 0


# How many values dropout spills.
DROPOUT = {
    "64": (problem(64, 64, mask=CAUSAL, dropout_p=0.1), 4),
    "64 GQA": (problem(64, 64, mask=CAUSAL, dropout_p=0.1, num_heads_kv=2), 0),
    "128": (problem(128, 128, mask=CAUSAL, dropout_p=0.1), 30),
    "128 full": (problem(128, 128, mask=FULL, dropout_p=0.1), 25),
}


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout(name):
    """Random bits go through shared memory, and no lane asks another one for them."""
    asked, spills = DROPOUT[name]
    config = heuristics.backward_config_sm90(asked)
    code = machine_code.read(launch.ARCH, functools.partial(backward_launch.trace, asked, config))
    assert code.serialized == ""
    assert code.spills <= spills
    assert code.dynamic_smem == [config.smem_bytes(asked)]
    without = replace(asked, dropout_p=0.0)
    ordinary = replace(config, background_rows=False)
    few = machine_code.read(launch.ARCH, functools.partial(backward_launch.trace, without, ordinary))
    assert code.count("SHFL") <= few.count("SHFL")
    assert code.count(r"STS\.128") > few.count(r"STS\.128")


def test_all_configurations_are_among_them():
    """The problems compiled here cover all that a configuration may depend on."""
    shipped = {heuristics.backward_config_sm90(asked) for asked in PROBLEMS.values()}
    for d, dv in ((64, 64), (64, 128), (128, 64), (128, 128), (192, 128), (256, 256)):
        for mask in (FULL, CAUSAL, Mask(64, 64), Mask(64, 0)):
            for options in ({}, {"softcap": 30.0}, {"is_packed": True}, {"softcap": 30.0, "is_packed": True}):
                for seqlen, batch in itertools.product((1, 512, 2**20), (1, HEADS // 4)):
                    asked = replace(problem(d, dv, seqlen, mask=mask, **options), batch=batch)
                    assert heuristics.backward_config_sm90(asked) in shipped, asked


def test_problems_of_many_short_sequences_are_among_them():
    for name, asked in SHORT.items():
        assert heuristics.backward_config_sm90(asked).private_dq, name


@pytest.mark.sampled(quick=1, slow=3)
@pytest.mark.parametrize("has_dlse", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_rows_before(head_dim, is_packed, has_dlse):
    asked = problem(head_dim, head_dim, is_packed=is_packed)
    code = check_rows(requests_of_three(asked, has_dlse)[0], "backward_preprocess")
    assert code.count(r"STG\.E\.128") > 0  # zeros for dq


@pytest.mark.sampled(quick=1, slow=3)
@pytest.mark.parametrize("options", ["full", "causal", "float16 packed seqused GQA window softcap"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256])
def test_rows_after(head_dim, options):
    asked = problem(head_dim, head_dim, **OPTIONS[options])
    code = check_rows(requests_of_three(asked, False)[2], "backward_postprocess")
    assert code.count(r"STG\.E\.128") > 0
    # exponentials of the rows that are computed again, where a mask hides pairs
    assert (code.count("MUFU") > 0) == (options != "full")


def test_gradients_of_sinks():
    asked = problem(64, 64, has_sinks=True)
    request = backward_launch.compile_requests(asked)[-1]
    assert request.name == "backward_sinks"
    code = machine_code.read(request.arch, request.trace)
    assert code.spills == 0
    assert code.count(r"LDG\.E\.128") >= 8  # four pairs of loads on their way at once


def requests_of_three(asked, has_dlse):
    """The requests of a backward in three kernels."""
    config = replace(heuristics.backward_config_sm90(asked), background_rows=False)
    return backward_launch.compile_requests(asked, has_dlse, config)


def check_rows(request, name):
    kernel, _, arch, trace = request
    assert kernel == name
    code = machine_code.read(arch, trace)
    assert code.spills == 0
    assert code.count(r"LDG\.E\.128") > 0
    return code

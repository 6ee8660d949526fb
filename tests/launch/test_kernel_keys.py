"""The key of a kernel says all that its code depends on: requests with one key trace the same kernel."""

import contextlib
import itertools
from dataclasses import replace

import packages
import pytest
import torch

from onepass.errors import UnsupportedError
from onepass.kernels.arguments import PostprocessArguments
from onepass.kernels.config import BackwardConfigSm80, BackwardConfigSm90, ForwardConfigSm80, ForwardConfigSm90
from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.kernels.launch import backward_sm80, backward_sm90, decode_sm80, decode_sm90, forward_sm80, forward_sm90
from onepass.problem import AttentionProblem, Mask, Quantization
from onepass.problem.decode import DecodeProblem

pytestmark = packages.needs_compiler

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PROBLEM = AttentionProblem(BF16, "cuda", 2, 300, 500, 4, 2, 64, 64, softmax_scale=0.25, mask=Mask())
CHANGES = (
    {"dtype": FP16},
    {"batch": 3, "seqlen_q": 70, "seqlen_k": 90, "softmax_scale": 0.5},
    {"num_heads_q": 2},
    {"head_dim": 32},
    {"head_dim_v": 32},
    *({"mask": mask} for mask in (Mask(5, None), Mask(None, 5), Mask(5, 5), Mask(-5, 9))),
    *({name: True} for name in ("has_sinks", "has_seqused_k", "is_packed", "deterministic", "has_alibi")),
    *({name: True} for name in ("has_seqstart_k", "has_key_ranges", "has_q_positions")),
    *({name: True} for name in ("constant_slopes", "constant_bias", "float32_dkv", "float32_out")),
    *({"bias_dtype": dtype} for dtype in (BF16, FP32)),
    {"softcap": 3.0},
    {"dropout_p": 0.5},
)
BASES = (
    {},
    {"is_packed": True, "mask": Mask(None, 0), "has_seqused_k": True},
    {"has_alibi": True, "bias_dtype": FP16, "has_key_ranges": True},
    {"deterministic": True, "has_alibi": True, "bias_dtype": FP16, "has_sinks": True},
)
PROBLEMS = [replace(PROBLEM, **(base | change)) for base in BASES for change in ({}, *CHANGES)]
STATIC = {"dynamic_tiles": False, "background_rows": False}
BACKWARD_SM90 = [
    BackwardConfigSm90(**options) for options in ({}, {"tile_m": 128}, STATIC, STATIC | {"private_dq": True})
]
BACKWARD_SM80 = [BackwardConfigSm80(vector_bytes=n, vector_adds=adds) for n in (8, 16) for adds in (False, True)]


def attention_requests():
    for problem, has_dlse in itertools.product(PROBLEMS, (False, True)):
        yield forward_sm80.compile_request(problem, ForwardConfigSm80(), "sm_80")
        yield forward_sm90.compile_request(problem, ForwardConfigSm90(64))
        for config in BACKWARD_SM80:
            yield from backward_sm80.compile_requests(problem, has_dlse, config, "sm_90a")
        for config in BACKWARD_SM90:
            with contextlib.suppress(UnsupportedError):
                config.check(problem)
                yield from backward_sm90.compile_requests(problem, has_dlse, config)


def quantized_requests():
    for out_dtype, block, keys_last in itertools.product((BF16, FP16), (None, 64), (False, True)):
        quantization = Quantization(out_dtype, block, block, keys_last)
        for problem in PROBLEMS:
            if not problem.has_modifiers and not problem.float32_out:
                problem = replace(problem, dtype=E4M3, quantization=quantization)
                yield forward_sm90.compile_request(problem, ForwardConfigSm90(64, transposes_v=not keys_last))


def decode_requests():
    pages = {}, {"page_size": 16}, {"page_size": 64}
    caches = {}, {"has_descales": True}, {"has_descales": True, "kv_block": 64}
    for attention, paged, is_split in itertools.product(PROBLEMS[: 2 * len(CHANGES)], pages, (False, True)):
        attention = replace(attention, has_seqused_k=True, deterministic=False)
        problem = DecodeProblem(attention, **paged)
        for config in (DecodeConfigSm80(), ForwardConfigSm80()):
            yield decode_sm80.compile_request(problem, config, "sm_90a", is_split)
            for of_cache in caches if attention.dtype != FP32 else ():
                over_e4m3 = replace(problem, attention=replace(attention, kv_dtype=E4M3), **of_cache)
                yield decode_sm80.compile_request(over_e4m3, config, "sm_90a", is_split)
        if not attention.has_modifiers:
            yield decode_sm90.compile_request(problem, ForwardConfigSm90(64), is_split)


def traced(request) -> str:
    """The attributes of a kernel, and its stand-ins, which say their dtypes, sizes and alignments."""
    kernel, (*arguments, _stream) = request.trace()
    attributes = dict(vars(kernel))
    if request.name == "backward_postprocess" and PostprocessArguments(*arguments).q is None:
        del attributes["group"]  # only rows that are computed again depend on it
    return repr((type(kernel), sorted(attributes.items()), arguments))


@pytest.mark.parametrize("requests", [attention_requests, quantized_requests, decode_requests])
def test_requests_with_one_key_trace_one_kernel(requests):
    seen = {}
    for request in requests():
        found = traced(request)
        assert seen.setdefault(request.kernel, found) == found, request.kernel
    assert len(seen) > 50


@pytest.mark.parametrize(
    "request_of",
    [
        lambda problem: forward_sm90.compile_request(problem, ForwardConfigSm90(64)),
        lambda problem: forward_sm80.compile_request(problem, ForwardConfigSm80(), "sm_80"),
    ],
    ids=["sm90", "sm80"],
)
def test_a_deterministic_call_needs_no_forward_of_its_own(request_of):
    for problem in PROBLEMS:
        kernels = {request_of(replace(problem, deterministic=is_asked)).kernel for is_asked in (False, True)}
        assert len(kernels) == 1

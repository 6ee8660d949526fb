"""A digest of the machine code of each shipped configuration, to prove that a change of the sources changed no kernel.

    python tests/support/code_digests.py write FILE     before the change
    python tests/support/code_digests.py compare FILE   after it: lists the kernels whose code differs

A digest covers the instructions of a kernel and nothing else: names of modules and functions do not count. No GPU is
needed. Compiling all kernels takes about 5 minutes on 2 cores; names of kernels after FILE select some of them. The
record of GPU tests holds such digests, too (tests/gpu/record.py).
"""

from __future__ import annotations

import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import machine_code
import torch
from shipped import CAUSAL, ROWS, problem

from onepass.kernels.config import HOPPER
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.heuristics.decode import decode_config_sm80
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import backward_sm80, backward_sm90, decode_sm80, decode_sm90, forward_sm80, forward_sm90
from onepass.kernels.launch import float32_halves as parts_launch
from onepass.kernels.launch import merge as merge_launch
from onepass.kernels.launch import quantize as quantize_launch
from onepass.problem import AttentionProblem, Mask, Quantization
from onepass.problem.decode import DecodeProblem

AMPERE = "sm_80"
FULL, WINDOW = Mask(), Mask(100, 20)
BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
FP8 = {"dtype": E4M3, "quantization": Quantization(BF16, exact_lse=False)}
FP8_WITH_LSE = {"dtype": E4M3, "quantization": Quantization(BF16)}
MASKS = {"full": FULL, "causal": CAUSAL}
FAILED = "failed: "
Request = tuple[str, Callable[[], tuple]]  # the architecture, and what gives the kernel and stand-ins of its arguments


def requests() -> Iterator[tuple[str, Request]]:
    """The kernels by name."""
    yield from _forward_sm90()
    yield from _backward_sm90()
    yield from _ampere()
    yield from _decode()
    yield from _memory_bound()


def _forward_sm90() -> Iterator[tuple[str, Request]]:
    asked = {f"bf16 {row.name}": row.problem for row in ROWS}
    for name, mask in MASKS.items():
        for head_dim, seqlen in ((64, 512), (64, 4096), (128, 512), (128, 4096), (192, 4096), (256, 512), (256, 4096)):
            asked[f"fp8 {head_dim} {name} {seqlen}"] = problem(head_dim, head_dim, seqlen, mask=mask, **FP8)
            with_lse = problem(head_dim, head_dim, seqlen, mask=mask, **FP8_WITH_LSE)
            asked[f"fp8 {head_dim} {name} {seqlen} with lse"] = with_lse
        asked[f"fp8 192/128 {name}"] = problem(192, 128, 4096, mask=mask, **FP8)
        asked[f"float32 128 {name}"] = problem(128, 128, 4096, mask=mask, dtype=FP32)
    asked |= {f"float32 {head_dim}": problem(head_dim, head_dim, 4096, dtype=FP32) for head_dim in (64, 96, 192, 256)}
    asked |= {
        "fp8 128 packed seqused sinks": problem(
            128, 128, 4096, is_packed=True, has_seqused_k=True, has_sinks=True, **FP8
        ),
        "fp8 256 window softcap": problem(256, 256, 4096, mask=WINDOW, softcap=20.0, **FP8),
        "bf16 128 packed seqused": problem(128, 128, 4096, is_packed=True, has_seqused_k=True),
        "bf16 128 window softcap sinks": problem(128, 128, 4096, mask=WINDOW, softcap=20.0, has_sinks=True),
        "fp16 64 GQA of few rows": problem(64, 64, 32, dtype=FP16, num_heads_kv=1),
        "bf16 72/40": problem(72, 40, 4096),
        "bf16 192/128": problem(192, 128, 4096),
        "bf16 128 query ranges": problem(128, 128, 4096, has_query_ranges=True),
        "bf16 64 blocks of 64": problem(64, 64, 4096, mask=FULL, block_size=(64, 64)),
        "bf16 128 blocks of 128 with bits": problem(
            128, 128, 4096, mask=FULL, block_size=(128, 128), has_block_bits=True
        ),
    }
    for name, one in asked.items():
        _, _, arch, trace = forward_sm90.compile_request(one, heuristics.forward_config_sm90(one))
        yield f"sm90 forward {name}", (arch, trace)


def _backward_sm90() -> Iterator[tuple[str, Request]]:
    asked: dict[str, AttentionProblem] = {}
    for head_dim in (64, 128, 256):
        for name, mask in MASKS.items():
            asked[f"{head_dim} {name}"] = problem(head_dim, head_dim, 4096, mask=mask)
        asked[f"{head_dim} causal deterministic"] = problem(head_dim, head_dim, 4096, deterministic=True)
    asked |= {
        "64 private dq": replace(problem(64, 64, 512, mask=FULL), batch=132),
        "96 causal": problem(96, 96, 4096),
        "192/128 causal": problem(192, 128, 4096),
        "128 packed seqused": problem(128, 128, 4096, is_packed=True, has_seqused_k=True),
        "128 window softcap fp16": problem(128, 128, 4096, mask=WINDOW, softcap=20.0, dtype=FP16),
        "128 GQA": problem(128, 128, 4096, num_heads_kv=1),
        "64 ranges": problem(64, 64, 4096, has_key_ranges=True),
        "128 query ranges": problem(128, 128, 4096, has_query_ranges=True),
        "64 blocks of 64": problem(64, 64, 4096, mask=FULL, block_size=(64, 64)),
        "128 blocks of 64": problem(128, 128, 4096, mask=FULL, block_size=(64, 64)),
    }
    whole = "128 full", "128 packed seqused", "256 causal"  # the cases that stand for kernels of query rows, too
    for name, one in asked.items():
        for kernel, _, arch, trace in backward_sm90.compile_requests(one, False, heuristics.backward_config_sm90(one)):
            if kernel in ("backward", "block_lists") or name in whole:
                yield f"sm90 {kernel.replace('_', ' ')} {name}", (arch, trace)
    for name in ("128 causal", "128 full"):  # in the main kernel, and in one before it
        kernel, _, arch, trace = backward_sm90.compile_requests(asked[name], True)[0]
        yield f"sm90 {kernel.replace('_', ' ')} {name} with dlse", (arch, trace)


def _ampere() -> Iterator[tuple[str, Request]]:
    asked = {f"{d}": problem(d, d, 4096) for d in (64, 96, 128, 192, 256)}
    asked |= {f"float32 {d}": problem(d, d, 4096, dtype=FP32) for d in (64, 128, 256)}
    asked["128 packed window softcap sinks fp16"] = problem(
        128, 128, 4096, mask=WINDOW, softcap=20.0, has_sinks=True, is_packed=True, has_seqused_k=True, dtype=FP16
    )
    asked["64 GQA of few rows"] = problem(64, 64, 8, num_heads_kv=1)
    for name, one in asked.items():
        config = heuristics_sm80.forward_config_sm80(one, AMPERE)
        _, _, arch, trace = forward_sm80.compile_request(one, config, AMPERE)
        yield f"sm80 forward {name}", (arch, trace)
        if "GQA" in name:
            continue
        one = replace(one, has_sinks=False)
        config = heuristics_sm80.backward_config_sm80(one, AMPERE)
        _, (_, _, arch, trace), _ = backward_sm80.compile_requests(one, False, config, AMPERE)
        yield f"sm80 backward {name}", (arch, trace)


def _decode() -> Iterator[tuple[str, Request]]:
    few = {"seqlen_q": 1, "has_seqused_k": True, "num_heads_q": 32, "num_heads_kv": 8}
    e4m3 = {"kv_dtype": E4M3}
    for name, head_dim, changes, options in (
        ("64 paged", 64, {}, {"page_size": 16}),
        ("128", 128, {}, {}),
        ("128 packed", 128, {"is_packed": True}, {"page_size": 16}),
        ("256 softcap window sinks", 256, {"softcap": 20.0, "mask": WINDOW, "has_sinks": True}, {}),
        ("128 float32", 128, {"dtype": FP32}, {}),
        ("128 e4m3", 128, e4m3, {"page_size": 16, "has_descales": True, "kv_block": 16}),
        ("64 e4m3", 64, e4m3, {"has_descales": True}),
    ):
        asked = DecodeProblem(replace(problem(head_dim, head_dim), **(few | changes)), **options)
        config = decode_config_sm80(asked.attention, HOPPER)
        for is_split in (False, True):
            _, _, arch, trace = decode_sm80.compile_request(asked, config, HOPPER, is_split)
            yield f"sm80 decode {name}{' split' if is_split else ''}", (arch, trace)
    many = {"seqlen_q": 16, "has_seqused_k": True, "num_heads_q": 16, "num_heads_kv": 2}
    for name, head_dim, changes, page_size in (
        ("64 paged", 64, {"seqlen_q": 300}, 16),
        ("128", 128, {}, None),
        ("128 packed", 128, {"is_packed": True, "seqlen_q": 5000}, 64),
        ("256 softcap window sinks", 256, {"softcap": 20.0, "mask": Mask(60, 0), "has_sinks": True}, 16),
        ("64 e4m3", 64, {"seqlen_q": 300, "dtype": FP16} | e4m3, None),
        ("128 packed e4m3", 128, {"is_packed": True, "seqlen_q": 5000} | e4m3, 16),
    ):
        attention = replace(problem(head_dim, head_dim), **(many | changes))
        asked = DecodeProblem(attention, page_size, has_descales=attention.has_e4m3_cache)
        config = decode_sm90.config_of(asked, torch.device("cpu"))
        for is_split in (False, True):
            _, _, arch, trace = decode_sm90.compile_request(asked, config, is_split)
            yield f"sm90 decode {name}{' split' if is_split else ''}", (arch, trace)


def _memory_bound() -> Iterator[tuple[str, Request]]:
    for name, key in {
        "merge float32": merge_launch.MergeKey(FP32, BF16, 128, False, 16, 1),
        "merge sinks": merge_launch.MergeKey(FP32, BF16, 128, True, 16, 8),
        "merge packed": replace(merge_launch.MergeKey(FP32, BF16, 128, True, 16, 1), has_offsets=True),
        "merge bf16": merge_launch.MergeKey(BF16, BF16, 64, False, 16, 1),
    }.items():
        yield name, (HOPPER, functools.partial(merge_launch.trace_merge, key))
    for name, kernel in {
        "quantize 64": quantize_launch.Kernel(BF16, 64, 64, True, rotates=True),
        "quantize 128": quantize_launch.Kernel(BF16, 128, 128, True),
        "quantize 128 packed": quantize_launch.Kernel(BF16, 128, 128, True, rotates=True, is_packed=True),
        "quantize 256 as it lies": quantize_launch.Kernel(FP16, 256, 256, False, rotates=True),
        "keys last": quantize_launch.LayoutKernel(128, is_packed=True),
    }.items():
        yield name, (HOPPER, functools.partial(quantize_launch.trace, kernel))
    for name, split in {
        "float32 halves 128": parts_launch.Kernel(128, False, False, False),
        "float32 halves of V 64 packed": parts_launch.Kernel(64, True, True, True),
    }.items():
        _, _, arch, trace = parts_launch.compile_request(split)
        yield name, (arch, trace)
    rotary = append_launch.AppendKey(BF16, 128, 128, True, True, (BF16, 64, False), 16)
    for name, key in {
        "append": rotary,
        "append to e4m3": replace(rotary, rotary=None, is_e4m3=True, has_descales=True, descales_by_block=True),
    }.items():
        yield name, (HOPPER, functools.partial(append_launch.trace_append, key))


def _digest_by_name(name: str) -> tuple[str, str]:
    try:
        return name, machine_code.read(*dict(requests())[name]).digest
    except Exception as error:
        return name, f"{FAILED}{error!r}"[:300]


def digests(names: Sequence[str]) -> dict[str, str]:
    """The digests of these kernels by name. Raises: RuntimeError if one cannot be compiled and read."""
    found = {}
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for name, value in pool.map(_digest_by_name, names):
            print(value, name, flush=True)
            found[name] = value
    if failed := [name for name, value in found.items() if value.startswith(FAILED)]:
        raise RuntimeError(f"{len(failed)} of {len(found)} kernels have no digest: {', '.join(failed)}")
    return found


def main() -> int:
    command, file, *selected = sys.argv[1:]
    names = [name for name, _ in requests()]
    found = digests([name for name in names if not selected or any(part in name for part in selected)])
    if command == "write":
        Path(file).write_text(json.dumps(found, indent=1) + "\n")
        return 0
    before = json.loads(Path(file).read_text())
    changed = [name for name, value in found.items() if before.get(name) != value]
    print(f"{len(found) - len(changed)} of {len(found)} kernels have the machine code of {file}; others: {changed}")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())

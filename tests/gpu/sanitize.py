"""Run small launches of every kind of Hopper forward and backward and of decoding under compute-sanitizer.

    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py           also: initcheck, synccheck, racecheck
    compute-sanitizer --tool racecheck python3 tests/gpu/sanitize.py queue    only the cases whose name has this word
    compute-sanitizer --tool memcheck python3 tests/gpu/sanitize.py backward  gradients alone; or: decode

Each tensor has an allocation of its own and of its exact size, so that the tool sees its ends. Results are compared
with the oracle on the host, which the tool does not slow down. The exit status is 1 if a result is wrong.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))  # as in pyproject.toml, for this script

from decode_cases import DecodeCase
from gpu_cases import BF16, DEVICE, FP16, ON_GPU, Case, case, run_as_user
from gradient_cases import Loss, expected_gradients, gradients, loss_of

import onepass
from onepass.testing import Call, compare, compare_lse

CASES = {
    "causal": case(150, 200, heads=(2, 2), head_dim=64, causal=True),
    "no mask": case(130, 70, batch=2, heads=(1, 1), head_dim=128),
    "window": case(200, 260, heads=(1, 1), head_dim=128, window=(50, 20)),
    "grouped heads, sinks, softcap": case(100, 150, heads=(4, 2), head_dim=64, sinks=True, softcap=5.0),
    "head_dim 256": case(70, 200, heads=(1, 1), head_dim=256, causal=True),
    "head_dim 40 and 72": case(70, 90, heads=(1, 1), head_dim=40, head_dim_v=72),
    "packed": case((1, 0, 130, 20), (70, 5, 140, 0), heads=(2, 1), head_dim=128, causal=True, slack=2),
    "packed, seqused_k": case((30, 70), (70, 140), heads=(2, 1), head_dim=64, used=(0, 131)),
    "seqused_k": case(70, 200, batch=3, heads=(1, 1), head_dim=128, used=(0, 129, 200)),
    # more tiles than the 132 multiprocessors, so that thread blocks take further tiles from the queue
    "queue": case(130, 2060, heads=(70, 70), head_dim=128, causal=True),
}
# forward and backward: no tile is whole, and several blocks of keys add to a row of dq
BACKWARD_CASES = {
    "backward, causal": case(150, 200, heads=(2, 2), head_dim=64, causal=True),
    "backward, no mask": case(130, 270, batch=2, heads=(1, 1), head_dim=128),
    "backward, window": case(200, 260, heads=(1, 1), head_dim=128, window=(50, 20)),
    "backward, rows without keys": case(200, 70, heads=(1, 1), head_dim=64, causal=True),
    "backward, grouped heads, sinks, softcap": case(100, 150, heads=(4, 2), head_dim=64, sinks=True, softcap=5.0),
    "backward, head_dim 256": case(70, 200, heads=(1, 1), head_dim=256, causal=True),
    # pairs of thread blocks: whole and half pairs, more of them than multiprocessors
    "backward, head_dim 256, packed": case(
        (1, 0, 300, 20), (70, 5, 280, 0), heads=(2, 1), head_dim=256, causal=True, slack=2
    ),
    "backward, head_dim 256, many tiles": case(70, 400, heads=(40, 40), head_dim=256),
    "backward, head_dim 40 and 72": case(70, 90, heads=(1, 1), head_dim=40, head_dim_v=72),
    "backward, head_dim 192 and 128": case(70, 150, heads=(1, 1), head_dim=192, head_dim_v=128, causal=True),
    "backward, packed": case((1, 0, 130, 20), (70, 5, 140, 0), heads=(2, 1), head_dim=128, causal=True, slack=2),
    "backward, packed, seqused_k": case((30, 70), (70, 140), heads=(2, 1), head_dim=64, used=(0, 131)),
    "backward, seqused_k": case(70, 200, batch=3, heads=(1, 1), head_dim=128, used=(0, 129, 200)),
    "backward, many short sequences": case(100, 150, batch=132, heads=(1, 1), head_dim=64, causal=True),
    # more blocks of keys than the 132 multiprocessors
    "backward, many tiles": case(130, 260, heads=(70, 70), head_dim=128, causal=True),
}
# these run on the Ampere kernels; the cases for Hopper's decode kernel are separate
DECODE_CASES = {
    "decode, one split": DecodeCase((150, 0, 1), head_dims=(128, 128), options=(("num_splits", 1),)),
    "decode, pages, splits, window, sinks": DecodeCase(
        (150, 9), 3, page_size=7, options=(("num_splits", 3), ("window", (60, 0)), ("has_sinks", True))
    ),
    "decode, new keys": DecodeCase((100, 0, 63), 4, page_size=16, seqlen_new=4, options=(("num_splits", 2),)),
    "decode, rotary": DecodeCase((100, 63), 1, seqlen_new=1, rotary=True),
    "decode, 32 rows": DecodeCase((150, 9), 8, head_dims=(64, 96)),
    "decode, head_dim 256": DecodeCase((150, 9), 1, head_dims=(256, 256), page_size=16),
    "decode, head_dim 5 and 7": DecodeCase((50, 9), 1, head_dims=(5, 7), page_size=3),
}
HOPPER_DECODE_CASES = {
    "decode, many rows": DecodeCase((150, 0, 1), 20, (8, 2), (128, 128), options=(("num_splits", 1),)),
    "decode, many rows, pages, splits": DecodeCase((350, 9), 20, (8, 2), (64, 96), 16, options=(("num_splits", 3),)),
    "decode, many rows, new keys": DecodeCase((200, 63), 20, (8, 2), (256, 256), 48, 20, options=(("num_splits", 2),)),
}


def on_device(arguments: dict) -> dict:
    """Copy tensors to the device without their fences, which the tool would take for parts of the tensors."""
    return {n: x.to(DEVICE, copy=True) if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def is_right(case: Case) -> bool:
    host = case.call("cpu")
    out, lse = (t.cpu() for t in run_as_user(Call(on_device(host.tensors), on_device(host.options))))
    oracle, plain = host.expected(), host.expected(host.tensors["q"].dtype)
    rows = [compare("out", out, oracle.out, plain.out), compare_lse(lse, oracle.lse)]
    for row in rows:
        if not row.ok:
            print(f"  {case}: {row}")
    return all(row.ok for row in rows)


def has_right_gradients(case: Case, deterministic: bool) -> bool:
    host = case.call("cpu")
    loss = loss_of(host)
    device_call = Call(on_device(host.tensors), on_device(host.options))
    found = gradients(device_call, Loss(**on_device(loss._asdict())), deterministic=deterministic)
    misses = expected_gradients(host, loss).misses({n: g.cpu() for n, g in found.items()})
    for miss in misses:
        print(f"  {case}: {miss}")
    return not misses


def decodes_right(case: DecodeCase, backend: str = "sm80") -> bool:
    host = case.arguments("cpu")
    call = partial(onepass.attention_decode, return_lse=True)
    out, lse = (t.cpu() for t in call(**on_device(host), backend=backend if ON_GPU else "tiled"))
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in host.items()}
    for name in ("rotary_cos", "rotary_sin"):
        if name in wide:
            wide[name] = host[name].double()
    plain, oracle = call(**on_host(host), backend="tiled"), call(**wide, backend="tiled")
    row = compare("out", out, oracle.out, plain.out, 3.0)
    if not row.ok:
        print(f"  {case}: {row}")
    return row.ok and (case.rotary or compare_lse(lse, oracle.lse).ok)


def on_host(arguments: dict) -> dict:
    """Copy tensors, since a call may write to its caches."""
    return {n: x.clone() if isinstance(x, torch.Tensor) else x for n, x in arguments.items()}


def checks() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield name and check of every case in two dtypes; names of gradients say whether they are deterministic."""
    for name, one in CASES.items():
        for dtype in (BF16, FP16) if name != "queue" else (BF16,):
            yield f"{name}, {dtype}", partial(is_right, replace(one, dtype=dtype))
    for name, one in BACKWARD_CASES.items():
        for dtype, deterministic in ((BF16, False), (FP16, True)):
            kind = "deterministic" if deterministic else "in any order"
            yield f"{name}, {dtype}, {kind}", partial(has_right_gradients, replace(one, dtype=dtype), deterministic)
    for name, decoding in DECODE_CASES.items():
        for dtype in (BF16, torch.float32):
            yield f"{name}, {dtype}", partial(decodes_right, replace(decoding, dtype=dtype))
    for name, decoding in HOPPER_DECODE_CASES.items():
        yield name, partial(decodes_right, decoding, "sm90")


def main() -> int:
    if ON_GPU:
        # one cudaMalloc per tensor; torch reads this when the first tensor is made
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    failed = 0
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, check in checks():
        if word not in name:
            continue
        started = time.perf_counter()
        ok = check()
        failed += not ok
        print(f"{name}: {'right' if ok else 'WRONG'}, {time.perf_counter() - started:.1f} s", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())

"""The Hopper forward gives the same bits in every run, whatever else the GPU does meanwhile."""

import contextlib

import pytest
import torch
from gpu_cases import BF16, DEVICE, FP16, ON_GPU, bits, case, cases, needs_hopper, run_as_user, same_bits, size

from onepass.testing import Call

pytestmark = needs_hopper

REPEATS = size(1000, 3)
LOAD_MEGABYTES = 256
CASES = [
    case(1001, 1100, batch=2, heads=(8, 4), head_dim=64),
    case(1001, 1100, batch=2, heads=(8, 4), head_dim=128, causal=True),
    case(777, 900, batch=2, heads=(6, 3), head_dim=256, causal=True, dtype=FP16),
    # in long causal calls of head_dim 128, thread blocks draw tiles from a queue, in another order in every run
    case(size(3001, 400), size(3001, 400), heads=(16, 4), head_dim=128, causal=True),
    case(size(2500, 300), size(2600, 300), batch=3, heads=(8, 1), head_dim=128, window=(1000, 0), dtype=FP16),
    case(333, 555, batch=2, heads=(32, 1), head_dim=64, sinks=True, softcap=20.0),
    case((1, 300, 0, 129, 700, 64), (500, 3, 9, 129, 650, 1), heads=(8, 2), head_dim=128, causal=True),
    case(300, 500, batch=4, heads=(4, 2), head_dim=128, used=(0, 1, 257, 500)),
    case(200, 300, heads=(3, 1), head_dim=192, head_dim_v=72, window=(50, 40)),
]


@contextlib.contextmanager
def memory_load():
    """Yield a function that queues large copies and additions on a stream of their own."""
    if not ON_GPU:
        yield lambda: None
        return
    stream = torch.cuda.Stream()
    a, b = (torch.zeros(LOAD_MEGABYTES << 18, device=DEVICE) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream())

    def push():
        with torch.cuda.stream(stream):
            b.copy_(a)  # loads all memory channels
            a[: a.numel() // 4].add_(1.0)  # loads the multiprocessors

    try:
        yield push
    finally:
        torch.cuda.synchronize()  # a and b must outlive the kernels that read them


@cases(CASES)
@pytest.mark.parametrize("load", [False, True], ids=["alone", "under memory load"])
def test_same_bits_every_time(case, load):
    """All runs have equal bits. Bits are compared on the device and read rarely, so that runs do not pause."""
    call = case.call()
    first = [bits(t).clone() for t in run_as_user(call)]
    num_different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with memory_load() if load else contextlib.nullcontext(lambda: None) as push:
        for i in range(REPEATS):
            if i % 2 == 0:
                push()
            for t, expected in zip(run_as_user(call), first, strict=True):
                num_different += (bits(t) != expected).any()
            if i % 100 == 99 or i == REPEATS - 1:
                assert num_different.item() == 0, f"other bits in one of the runs up to {i + 1}"


@pytest.mark.skipif(not ON_GPU, reason="needs streams of a GPU")
@cases([CASES[3], CASES[6]])
def test_same_bits_on_four_streams_at_once(case):
    """Launches that run side by side share nothing, in particular not the counter of a tile queue."""
    call = case.call()
    first = [bits(t).clone() for t in run_as_user(call)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    different = []
    for _ in range(REPEATS // 20):
        for stream in streams:
            with torch.cuda.stream(stream):
                different += [(bits(t) != e).any() for t, e in zip(run_as_user(call), first, strict=True)]
    torch.cuda.synchronize()
    assert not torch.stack(different).any()


@cases([CASES[1], CASES[6]])
def test_where_memory_lies_does_not_matter(case):
    """Results have equal bits at other addresses and with another order of allocation."""
    call = case.call()
    first = run_as_user(call)
    kept = []
    for pad in (1, 1000, 300_000):
        kept.append(torch.empty(pad, device=DEVICE, dtype=BF16))
        moved = Call({n: t.clone() for n, t in call.tensors.items()}, call.options)
        assert same_bits(run_as_user(moved), first)

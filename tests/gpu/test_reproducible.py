"""The Hopper forward gives the same bits in every run, whatever else the GPU does meanwhile."""

import contextlib

import pytest
import torch
from gpu_cases import BF16, DEVICE, FP16, ON_GPU, bits, case, cases, needs_hopper, plain_run, same_bits, size

from onepass.testing import Call

pytestmark = needs_hopper

REPEATS = size(1000, 3)
LOAD_MEGABYTES = 256
CASES = [
    case(1001, 1100, batch=2, heads=(8, 4), head_dim=64),
    case(1001, 1100, batch=2, heads=(8, 4), head_dim=128, causal=True),
    case(777, 900, batch=2, heads=(6, 3), head_dim=256, causal=True, dtype=FP16),
    # long causal head_dim 128: thread blocks draw their tiles from a queue, in another order in every run
    case(size(3001, 400), size(3001, 400), heads=(16, 4), head_dim=128, causal=True),
    case(size(2500, 300), size(2600, 300), batch=3, heads=(8, 1), head_dim=128, window=(1000, 0), dtype=FP16),
    case(333, 555, batch=2, heads=(32, 1), head_dim=64, sinks=True, softcap=20.0),
    case((1, 300, 0, 129, 700, 64), (500, 3, 9, 129, 650, 1), heads=(8, 2), head_dim=128, causal=True),
    case(300, 500, batch=4, heads=(4, 2), head_dim=128, used=(0, 1, 257, 500)),
    case(200, 300, heads=(3, 1), head_dim=192, head_dim_v=72, window=(50, 40)),
]


@contextlib.contextmanager
def memory_load():
    """Gives a function that queues large copies and additions on a stream of their own."""
    if not ON_GPU:
        yield lambda: None
        return
    stream = torch.cuda.Stream()
    a, b = (torch.zeros(LOAD_MEGABYTES << 18, device=DEVICE) for _ in range(2))
    stream.wait_stream(torch.cuda.current_stream())

    def push():
        with torch.cuda.stream(stream):
            b.copy_(a)  # all memory channels
            a[: a.numel() // 4].add_(1.0)  # and multiprocessors

    try:
        yield push
    finally:
        torch.cuda.synchronize()  # a and b must outlive what reads them


@cases(CASES)
@pytest.mark.parametrize("load", [False, True], ids=["alone", "under memory load"])
def test_same_bits_every_time(case, load):
    """Compared on the device, read now and then: runs follow each other without a pause."""
    call = case.call()
    first = [bits(t).clone() for t in plain_run(call)]
    num_different = torch.zeros((), dtype=torch.int64, device=DEVICE)
    with memory_load() if load else contextlib.nullcontext(lambda: None) as push:
        for i in range(REPEATS):
            if i % 2 == 0:
                push()
            for t, expected in zip(plain_run(call), first, strict=True):
                num_different += (bits(t) != expected).any()
            if i % 100 == 99 or i == REPEATS - 1:
                assert num_different.item() == 0, f"other bits in one of the runs up to {i + 1}"


@pytest.mark.skipif(not ON_GPU, reason="streams are a GPU's")
@cases([CASES[3], CASES[6]])
def test_same_bits_on_four_streams_at_once(case):
    """Launches that run side by side share nothing, the counter of a tile queue least of all."""
    call = case.call()
    first = [bits(t).clone() for t in plain_run(call)]
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    different = []
    for _ in range(REPEATS // 20):
        for stream in streams:
            with torch.cuda.stream(stream):
                different += [(bits(t) != e).any() for t, e in zip(plain_run(call), first, strict=True)]
    torch.cuda.synchronize()
    assert not torch.stack(different).any()


@cases([CASES[1], CASES[6]])
def test_where_memory_lies_does_not_matter(case):
    """Other addresses and another order of allocation: the same bits."""
    call = case.call()
    first = plain_run(call)
    kept = []
    for pad in (1, 1000, 300_000):
        kept.append(torch.empty(pad, device=DEVICE, dtype=BF16))
        moved = Call({n: t.clone() for n, t in call.tensors.items()}, call.options)
        assert same_bits(plain_run(moved), first)

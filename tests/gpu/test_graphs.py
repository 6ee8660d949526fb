"""The Hopper forward in CUDA graphs and on side streams."""

import pytest
import torch
from gpu_cases import (
    FP16,
    NAN,
    ON_GPU,
    GpuCall,
    case,
    cases,
    lengths_tensor,
    needs_hopper,
    offsets,
    run_as_user,
    same_bits,
    size,
)

pytestmark = needs_hopper
only_on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs streams of a GPU")


class Replayed:
    """A function that is captured once. On the CPU, which has no graphs, it runs again into the same tensors."""

    def __init__(self, function):
        self.function = function
        function()  # compiles, and allocates whatever is allocated once
        if not ON_GPU:
            self.results = function()
            return
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = function()

    def __call__(self):
        for t in self.results:
            t.fill_(NAN)
        if ON_GPU:
            self.graph.replay()
            torch.cuda.synchronize()
        else:
            for t, new in zip(self.results, self.function(), strict=True):
                t.copy_(new)
        return self.results


GRAPH_CASES = [
    case(500, 600, heads=(4, 2), head_dim=128, sinks=True),
    case(size(3000, 200), size(3000, 300), heads=(4, 4), head_dim=128, causal=True),  # tile queue
    case(200, 300, heads=(4, 2), head_dim=64, window=(40, 3), softcap=10.0, dtype=FP16),
    case(200, 300, batch=2, heads=(4, 2), head_dim=256, used=(300, 133)),
]


@cases(GRAPH_CASES)
def test_graph_follows_its_inputs(case):
    call = case.call()
    replay = Replayed(lambda: run_as_user(call))
    for scale in (1.0, -0.5, 2.0):
        for t in call.tensors.values():
            t.mul_(scale)
        results = replay()
        assert same_bits(results, run_as_user(call))


@cases([case((64, 136), (100, 200), heads=(4, 2), head_dim=d, causal=True, slack=40) for d in (64, 128, 256)])
def test_graph_follows_packed_lengths(case):
    """A replay follows new lengths, some of them 0, in the captured tensors: the kernel reads them, not the host."""
    call = case.call()
    call.options |= {"max_seqlen_q": 240, "max_seqlen_k": 340}
    replay = Replayed(lambda: run_as_user(call))
    for lengths_q, lengths_k in (((64, 136), (100, 200)), ((1, 239), (340, 0)), ((0, 7), (3, 129)), ((0, 0), (5, 5))):
        call.options["cu_seqlens_q"].copy_(lengths_tensor(offsets(lengths_q)))
        call.options["cu_seqlens_k"].copy_(lengths_tensor(offsets(lengths_k)))
        results = replay()
        fresh = GpuCall(call.tensors, {n: o for n, o in call.options.items() if not n.startswith("max_")})
        assert same_bits(results, fresh.run())
        fresh.check(gradients=False)


@cases([case(200, 300, batch=3, heads=(4, 2), head_dim=d, causal=True, used=(300, 133, 1)) for d in (64, 128, 256)])
def test_graph_follows_seqused_k(case):
    call = case.call()
    replay = Replayed(lambda: run_as_user(call))
    for used in ((300, 133, 1), (0, 300, 299), (128, 0, 64)):
        call.options["seqused_k"].copy_(lengths_tensor(used))
        results = replay()
        assert same_bits(results, call.run())
        call.check(gradients=False)


@only_on_gpu
@cases([GRAPH_CASES[1]])
def test_tile_queue_in_graphs_and_on_two_streams(case):
    """Replays, eager calls and calls on another stream run side by side and must not share the counter."""
    call = case.call()
    expected = [t.clone() for t in run_as_user(call)]
    replay = Replayed(lambda: run_as_user(call))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_as_user(call)
    torch.cuda.synchronize()
    for _ in range(50):
        for t in replay.results:
            t.fill_(NAN)
        torch.cuda.synchronize()
        replay.graph.replay()
        with torch.cuda.stream(side):
            beside = run_as_user(call)
        eager = run_as_user(call)
        torch.cuda.synchronize()
        for results in (replay.results, beside, eager):
            assert same_bits(results, expected)


@only_on_gpu
@cases([GRAPH_CASES[1], case((300, 0, 500), (300, 7, 500), heads=(4, 2), head_dim=128, causal=True)])
def test_two_calls_in_one_graph(case):
    """The second call reads what the first wrote, and each draws tiles from a queue of its own."""
    call = case.call()

    def twice():
        first = run_as_user(call)
        return run_as_user(GpuCall({**call.tensors, "q": first.out}, call.options))

    replay = Replayed(twice)
    for _ in range(3):
        results = [t.clone() for t in replay()]
        assert same_bits(results, twice())


@only_on_gpu
@cases([GRAPH_CASES[0], GRAPH_CASES[1], case((300, 0, 50), (30, 7, 500), heads=(4, 2), head_dim=128)])
def test_side_stream(case):
    """The kernel runs on the current stream, after the kernels that make its inputs and before its readers."""
    call = case.call()
    expected = [t.clone() for t in run_as_user(call)]
    stream = torch.cuda.Stream()
    late = {n: torch.full_like(t, NAN) for n, t in call.tensors.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on another stream would read NaN
        for n, t in late.items():
            t.copy_(call.tensors[n])
        results = [t.clone() for t in run_as_user(GpuCall(late, call.options))]
    stream.synchronize()
    assert same_bits(results, expected)

"""With deterministic=True a Hopper GPU gives gradients of the same bits in every run, in CUDA graphs and on streams."""

import pytest
import torch
from gpu_cases import (
    BF16,
    DEVICE,
    FP16,
    NAN,
    ON_GPU,
    bits,
    case,
    cases,
    lengths_tensor,
    needs_hopper,
    offsets,
    same_bits,
    size,
)
from gradient_cases import Loss, changed, check_gradients, gradients, inputs_of, loss_of, with_inputs
from test_graphs import Replayed
from test_reproducible import memory_load
from torch.utils._python_dispatch import TorchDispatchMode

from onepass.testing import Call

pytestmark = needs_hopper
only_on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs streams of a GPU")

REPEATS = size(1000, 3)
CASES = [
    case(size(1001, 201), size(1100, 300), batch=2, heads=(8, 4), head_dim=64),
    case(1001, 1100, batch=2, heads=(8, 4), head_dim=128, causal=True),
    case(777, 900, batch=2, heads=(6, 3), head_dim=256, causal=True, dtype=FP16),
    case(size(2001, 300), size(2001, 300), heads=(16, 4), head_dim=64, causal=True, dtype=FP16),
    # long: many blocks of keys add to a row of dq
    case(size(3001, 400), size(3001, 400), heads=(8, 2), head_dim=128),
    case(size(2500, 300), size(2600, 300), batch=3, heads=(8, 1), head_dim=128, window=(1000, 0), dtype=FP16),
    # one key head, to whose dk and dv 32 query heads add
    case(333, 555, batch=2, heads=(32, 1), head_dim=64, sinks=True, softcap=20.0),
    case(129, 1500, heads=(4, 4), head_dim=256, sinks=True),
    case((1, 300, 0, 129, 700, 64), (500, 3, 9, 129, 650, 1), heads=(8, 2), head_dim=128, causal=True, sinks=True),
    case(300, 500, batch=4, heads=(4, 2), head_dim=128, used=(0, 1, 257, 500)),
    case(200, 300, heads=(3, 1), head_dim=192, head_dim_v=128, window=(50, 40)),
    # tiles of keys that no query sees, and queries that see no key
    case(size(1500, 300), size(1500, 300), heads=(8, 4), head_dim=128, window=(-100, 700)),
    case(size(1500, 300), size(1500, 300), heads=(8, 4), head_dim=64, window=(700, -100)),
    # tiles in rings, and an ascending end
    case(size(1100, 200), size(1100, 200), batch=size(8, 2), heads=(3, 3), head_dim=128),
    case(size(2040, 200), size(2040, 200), batch=size(3, 1), heads=(8, 8), head_dim=128, causal=True),
]
GRAPH_CASES = [
    case(500, 600, heads=(4, 2), head_dim=128, sinks=True),
    case(size(3000, 200), size(3000, 300), heads=(4, 2), head_dim=128, causal=True),
    case(200, 300, heads=(4, 2), head_dim=64, window=(40, 3), softcap=10.0, dtype=FP16),
    case(200, 300, batch=2, heads=(4, 2), head_dim=256, used=(300, 133)),
]


def same_gradients(a, b) -> bool:
    return a.keys() == b.keys() and same_bits(a.values(), b.values())


class Backward:
    """The backward pass of one forward, which can be repeated."""

    def __init__(self, call: Call, **options):
        self.leaves = {n: t.detach().requires_grad_() for n, t in inputs_of(call).items()}
        self.outputs, self.loss = with_inputs(call, self.leaves).run(**options), loss_of(call)

    def __call__(self) -> dict[str, torch.Tensor]:
        found = torch.autograd.grad(self.outputs, list(self.leaves.values()), self.loss, retain_graph=True)
        return {f"d{n}": g for n, g in zip(self.leaves, found, strict=True)}


def assert_same_bits_every_time(backward, expected):
    """Repeat a backward under memory load. Bits are compared on the device and read rarely, so runs do not pause."""
    different = {name: torch.zeros((), dtype=torch.int64, device=DEVICE) for name in expected}
    with memory_load() as push:
        for i in range(REPEATS):
            if i % 2 == 0:
                push()
            for name, g in backward().items():
                different[name] += (bits(g) != bits(expected[name])).any()
            if i % 100 == 99 or i == REPEATS - 1:
                counts = {name: n.item() for name, n in different.items()}
                assert not any(counts.values()), f"runs with other bits, of {i + 1}: {counts}"


@cases(CASES)
def test_same_bits_every_time(case):
    """All runs have the bits of the first run, whose gradients are checked."""
    call = case.call()
    expected = check_gradients(call, deterministic=True)
    assert_same_bits_every_time(Backward(call, deterministic=True), expected)


@pytest.fixture
def _deterministic_torch():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class AskedFor(TorchDispatchMode):
    """Record the `deterministic` argument of the operators, whether or not this GPU would show the difference."""

    def __init__(self):
        super().__init__()
        self.deterministic = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function.namespace == "onepass":
            names = [a.name for a in function._schema.arguments]
            self.deterministic.append(arguments[names.index("deterministic")])
        return function(*arguments, **(keywords or {}))


@pytest.mark.usefixtures("_deterministic_torch")
@cases([CASES[1], CASES[8]])
def test_torch_is_asked_for_deterministic_algorithms(case):
    call = case.call()
    assert_same_bits_every_time(Backward(call), Backward(call, deterministic=True)())
    with AskedFor() as asked:
        Backward(call)()
        Backward(call, deterministic=False)()
    assert asked.deterministic == [True, True, False, False]  # forward and backward


@cases([CASES[1], CASES[6], CASES[8]])
def test_where_memory_lies_does_not_matter(case):
    call = case.call()
    first, kept = Backward(call, deterministic=True)(), []
    for pad in (1, 1000, 300_000):
        kept.append(torch.empty(pad, device=DEVICE, dtype=BF16))
        moved = with_inputs(call, {n: t.clone() for n, t in inputs_of(call).items()})
        assert same_gradients(Backward(moved, deterministic=True)(), first)


# ---------------------------------------------------------------- streams


@only_on_gpu
@cases([CASES[1], CASES[6], CASES[8]])
def test_same_bits_on_four_streams_at_once(case):
    """Launches that run side by side share no workspace, counter or semaphore."""
    call = case.call()
    first = Backward(call, deterministic=True)()
    streams = [torch.cuda.Stream() for _ in range(4)]
    backwards, different = [], []
    torch.cuda.synchronize()
    for stream in streams:
        with torch.cuda.stream(stream):
            backwards.append(Backward(call, deterministic=True))
    for _ in range(REPEATS // 20):
        for stream, backward in zip(streams, backwards, strict=True):
            with torch.cuda.stream(stream):
                different += [(bits(g) != bits(first[name])).any() for name, g in backward().items()]
    torch.cuda.synchronize()
    assert not torch.stack(different).any()


@only_on_gpu
@cases([CASES[1], CASES[8], GRAPH_CASES[3]])
def test_side_stream(case):
    """The backward runs on the current stream, after the kernels that make its inputs and before its readers."""
    call = case.call()
    loss = loss_of(call)
    expected = gradients(call, loss, deterministic=True)
    stream = torch.cuda.Stream()
    late = {n: torch.full_like(t, NAN) for n, t in {**call.tensors, **loss._asdict()}.items()}
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # about 10 ms: a launch on another stream would read NaN
        for n, t in late.items():
            t.copy_({**call.tensors, **loss._asdict()}[n])
        found = gradients(changed(call, **late), Loss(late["dout"], late["dlse"]), deterministic=True)
        found = {n: g.clone() for n, g in found.items()}
    stream.synchronize()
    assert same_gradients(found, expected)


@only_on_gpu
@cases([CASES[1]])
def test_late_gradients(case):
    """dout comes late on the stream of the forward, while another stream is the current one."""
    call = case.call()
    loss, stream = loss_of(call), torch.cuda.Stream()
    expected = gradients(call, loss, deterministic=True)
    late = Loss(*(torch.full_like(t, NAN) for t in loss))
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    for t, value in zip(late, loss, strict=True):
        t.copy_(value)
    with torch.cuda.stream(stream):
        backward = Backward(call, deterministic=True)  # autograd runs backward passes where the forward ran
    backward.loss = late
    found = backward()
    torch.cuda.synchronize()
    assert same_gradients(found, expected)


# ---------------------------------------------------------------- CUDA graphs


def captured(call, loss, **options):
    """Capture forward and backward in one graph. Returns: a function that replays it and gives gradients by name."""
    names = [f"d{n}" for n in inputs_of(call)]
    replay = Replayed(lambda: tuple(gradients(call, loss, deterministic=True, **options).values()))
    return lambda: dict(zip(names, replay(), strict=True))


@cases(GRAPH_CASES)
def test_graph_follows_its_inputs(case):
    call = case.call()
    loss = loss_of(call)
    replay = captured(call, loss)
    for scale in (1.0, -0.5, 2.0):
        for t in (*call.tensors.values(), *loss):
            t.mul_(scale)
        assert same_gradients(replay(), gradients(call, loss, deterministic=True))
        check_gradients(call, loss=loss, deterministic=True)


@cases(
    [
        case((64, 136), (100, 200), heads=(8, 2), head_dim=128, causal=True, sinks=True, slack=40),
        case((64, 136), (100, 200), heads=(4, 2), head_dim=256, slack=40),
    ]
)
def test_graph_follows_packed_lengths(case):
    """A replay follows new lengths, some of them 0, in the captured tensors: kernels read them, not the host."""
    call = case.call()
    loss = loss_of(call)
    replay = captured(call, loss, max_seqlen_q=240, max_seqlen_k=340)
    for lengths_q, lengths_k in (((64, 136), (100, 200)), ((1, 239), (340, 0)), ((0, 7), (3, 129)), ((0, 0), (5, 5))):
        call.options["cu_seqlens_q"].copy_(lengths_tensor(offsets(lengths_q)))
        call.options["cu_seqlens_k"].copy_(lengths_tensor(offsets(lengths_k)))
        assert same_gradients(replay(), check_gradients(call, loss=loss, deterministic=True))


@cases(
    [
        case(200, 300, batch=3, heads=(4, 2), head_dim=128, used=(300, 133, 1)),
        case(200, 300, batch=3, heads=(4, 2), head_dim=64, causal=True, used=(300, 133, 1)),
    ]
)
def test_graph_follows_seqused_k(case):
    call = case.call()
    loss = loss_of(call)
    replay = captured(call, loss)
    for used in ((300, 133, 1), (0, 300, 299), (128, 0, 64)):
        call.options["seqused_k"].copy_(lengths_tensor(used))
        assert same_gradients(replay(), check_gradients(call, loss=loss, deterministic=True))


@only_on_gpu
@cases([GRAPH_CASES[1], CASES[8]])
def test_graphs_and_eager_calls_side_by_side(case):
    """Replays, eager calls and calls on another stream share no workspace and no semaphore."""
    call = case.call()
    loss = loss_of(call)
    expected = gradients(call, loss, deterministic=True)
    names = list(expected)
    replay = Replayed(lambda: tuple(gradients(call, loss, deterministic=True).values()))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    for _ in range(50):
        for t in replay.results:
            t.fill_(NAN)
        torch.cuda.synchronize()
        replay.graph.replay()
        with torch.cuda.stream(side):
            beside = gradients(call, loss, deterministic=True)
        eager = gradients(call, loss, deterministic=True)
        torch.cuda.synchronize()
        for found in (dict(zip(names, replay.results, strict=True)), beside, eager):
            assert same_gradients(found, expected)


@only_on_gpu
@cases([GRAPH_CASES[0], GRAPH_CASES[3]])
def test_two_layers_in_one_graph(case):
    """The second layer reads what the first wrote, and gradients flow through both."""
    call = case.call()
    loss = loss_of(call)

    def step():
        leaves = {n: t.detach().requires_grad_() for n, t in inputs_of(call).items()}
        first = with_inputs(call, leaves).run(deterministic=True)
        second = with_inputs(call, {**leaves, "q": first.out}).run(deterministic=True)
        return torch.autograd.grad(second, list(leaves.values()), loss)

    replay = Replayed(step)
    for _ in range(3):
        found = [t.clone() for t in replay()]
        assert same_bits(found, step())

"""Layouts, schedules and costs: integers alone, for any number of ranks."""

import dataclasses
import itertools
import math
import random
from itertools import pairwise

import pytest
import torch

from onepass import distributed
from onepass.distributed import cost, traffic
from onepass.distributed.layout import Run, most_keys, most_queries, visible_keys, visible_pairs
from onepass.distributed.layouts import LAYOUTS, make_layout
from onepass.distributed.packed import make_tables
from onepass.distributed.schedule import Schedule, Step, make_steps, steps_over_heads, with_short_ends
from onepass.problem import Mask

CPU = torch.device("cpu")
MASKS = [Mask(), Mask(None, 0), Mask(7, 0), Mask(3, 5), Mask(None, -2), Mask(-3, None), Mask(20, -1)]


def random_offsets(rng: random.Random) -> tuple[int, ...]:
    offsets = [0]
    for _ in range(rng.randint(1, 6)):
        offsets.append(offsets[-1] + rng.choice([0, 1, 5, 30, 100]))
    return tuple(offsets) if offsets[-1] else (0, 1)


def seen_keys(offsets: tuple[int, ...], mask: Mask) -> torch.Tensor:
    """(queries, keys): whether a query sees a key, by the definition."""
    left, right, tokens = mask.window_left, mask.window_right, torch.arange(offsets[-1])
    document = torch.bucketize(tokens, torch.tensor(offsets), right=True)
    found, back = document[:, None] == document, tokens[:, None] - tokens
    found &= back <= left if left is not None else True
    return found & (-back <= right if right is not None else True)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_token_has_one_owner(name):
    rng = random.Random(1)
    for _ in range(40):
        offsets, num_ranks = random_offsets(rng), rng.randint(1, 9)
        layout = make_layout(name, num_ranks, offsets, rng.choice(MASKS))
        tokens = sorted(t for runs in layout.runs for run in runs for t in range(*run))
        assert tokens == list(range(offsets[-1]))
        assert layout.num_ranks == num_ranks
        for rank, runs in enumerate(layout.runs):
            assert all(a.stop < b.start for a, b in pairwise(runs))
            owned = [run for run in layout.owners if run.rank == rank]
            assert [run.row for run in owned] == [sum(r.size for r in runs[:i]) for i in range(len(runs))]
        start = rng.randrange(offsets[-1])
        stop = rng.randint(start, offsets[-1])
        for run in layout.owned(start, stop):
            row = 0
            for own in layout.runs[run.rank]:
                for token in range(*own):
                    if run.start <= token < run.stop:
                        assert row == run.row + token - run.start
                    row += 1
        assert sum(run.stop - run.start for run in layout.owned(start, stop)) == stop - start


def test_layouts():
    assert make_layout("contiguous", 4, (0, 10), Mask()).runs == (
        (Run(0, 3),),
        (Run(3, 6),),
        (Run(6, 9),),
        (Run(9, 10),),
    )
    assert make_layout("head_tail", 2, (0, 8), Mask()).runs == ((Run(0, 2), Run(6, 8)), (Run(2, 6),))
    assert make_layout("cyclic", 2, (0, 600), Mask()).runs == ((Run(0, 256), Run(512, 600)), (Run(256, 512),))


@pytest.mark.parametrize("name", ["head_tail", "balanced"])
def test_a_causal_mask_is_balanced(name):
    for offsets in ((0, 4096), (0, 4096) if name == "head_tail" else (0, 500, 3000, 3100, 4096)):
        layout = make_layout(name, 8, offsets, Mask(None, 0))
        work = [sum(visible_pairs(run, offsets, Mask(None, 0)) for run in runs) for runs in layout.runs]
        assert max(work) < 1.02 * sum(work) / 8
        assert len({layout.count(rank) for rank in range(8)}) == 1


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_visible_keys_and_pairs(mask):
    rng = random.Random(2)
    for _ in range(20):
        offsets = random_offsets(rng)
        start = rng.randrange(offsets[-1])
        run = Run(start, rng.randint(start + 1, offsets[-1]))
        pairs = [(q, k) for q, k in seen_keys(offsets, mask).nonzero().tolist() if q in range(*run)]
        if min(mask.window_left or 0, mask.window_right or 0) >= 0:
            assert visible_pairs(run, offsets, mask) == len(pairs)
        for first, end in pairwise(offsets):
            own = Run(max(first, run.start), min(end, run.stop))
            if own.start < own.stop:
                keys = visible_keys(own, Run(first, end), mask)
                needed = {k for q, k in pairs if q in range(*own)} | set(range(*own))
                assert needed <= set(range(*keys))
                if needed > set(range(*own)):
                    assert (min(needed), max(needed) + 1) == keys


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (8, 2), (6, 6), (10, 5), (64, 8), (7, 1), (12, 4)])
def test_steps_deal_all_heads(heads, kv_heads):
    """Every query of every head is computed once, and ranks have equal shares of the heads."""
    for num_ranks in (1, 2, 3, 4, 6, 8):
        for width in (w for w in range(1, num_ranks + 1) if num_ranks % w == 0):
            for chunks in (1, 2, 16):
                steps = make_steps(num_ranks, heads, kv_heads, width, chunks)
                check_steps(num_ranks, heads, kv_heads, steps)
                for middle, has_short_end in itertools.product((1, 2), (False, True)):
                    joined = with_short_ends(steps, heads // kv_heads, middle, has_short_end)
                    check_steps(num_ranks, heads, kv_heads, joined)
                loads = [sum(step.heads * step.width for step in steps) for _ in range(num_ranks)]
                assert loads == [heads] * num_ranks
        check_steps(num_ranks, heads, kv_heads, steps_over_heads(num_ranks, heads, kv_heads, 2))


def test_steps_with_short_ends():
    steps = make_steps(2, 32, 16, 2, 8)
    assert [step.heads for step in steps] == [2] * 8
    joined = with_short_ends(steps, 2, 1, True)
    assert joined == (Step(2, 0, 2), Step(2, 4, 12), Step(2, 28, 2))
    assert [step.heads for step in with_short_ends(steps, 2, 2, False)] == [2, 6, 8]
    assert with_short_ends(steps, 4, 1, True) == steps  # parts of a kv head
    assert with_short_ends(steps[:3], 2, 1, True) == steps[:3]
    assert with_short_ends(steps[:1], 2, 1, True) == steps[:1]
    uneven = make_steps(4, 10, 10, 4, 16)
    assert len({step.width for step in uneven}) > 1
    assert with_short_ends(uneven, 1, 1, False) == uneven


def test_a_short_first_step_is_chosen_for_long_sequences():
    """Its messages do not travel beside any computing, and the others are computed in fewer calls."""
    sizes = {"num_ranks": 2, "num_heads_q": 32, "num_heads_kv": 32, "causal": True, "training": False}
    plan = distributed.plan(32768, engine="keys", **sizes)
    first, *others = (step.heads for step in plan.schedule.steps)
    assert first < min(others)
    equal = distributed.plan(32768, engine="keys", chunks=4, **sizes)
    assert first + sum(others) == 32
    assert len(others) in (1, 2)
    seconds = [cost.estimate(one.schedule, 128, distributed.Hardware()).forward_seconds for one in (plan, equal)]
    assert seconds[0] < 0.98 * seconds[1]


def check_steps(num_ranks, heads, kv_heads, steps):
    group = heads // kv_heads
    layout = make_layout("contiguous", num_ranks, (0, 24), Mask())
    schedule = Schedule(layout, (0, 24), Mask(), heads, kv_heads, steps)
    computed = set()
    for step in steps:
        for rank in range(num_ranks):
            own = schedule.heads_q(step, rank)
            if own.start == own.stop:
                continue
            size = own.stop - own.start
            assert own.start // group == (own.stop - 1) // group or own.start % group == size % group == 0
            kv = schedule.heads_kv(step, rank)
            assert (kv.start, kv.stop) == (own.start // group, (own.stop - 1) // group + 1)
            for run in schedule.queries(step, rank):
                pairs = {(h, t) for h in range(own.start, own.stop) for t in range(run.start, run.stop)}
                assert not pairs & computed
                computed |= pairs
    assert len(computed) == heads * 24


@pytest.mark.sampled(quick=1, slow=3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_fill_buffers(name):
    """Each row of a buffer of keys comes from the rank that owns its token, and buffers hold all keys that are seen."""
    rng = random.Random(3)
    for _ in range(30):
        offsets, mask, num_ranks = random_offsets(rng), rng.choice(MASKS), rng.choice([1, 2, 4, 6])
        layout = make_layout(name, num_ranks, offsets, mask)
        steps = make_steps(num_ranks, 12, 12, rng.choice([w for w in (1, 2, num_ranks) if num_ranks % w == 0]), 2)
        schedule = Schedule(layout, offsets, mask, 12, 12, steps, from_start=rng.random() < 0.3)
        tokens = [[t for run in runs for t in range(*run)] for runs in layout.runs]
        seen = seen_keys(offsets, mask)
        for rank in range(num_ranks):
            segments = schedule.segments(steps[0], rank)
            size = sum(segment.keys.size for segment in segments)
            buffer = [None] * size
            for piece in schedule.key_pieces(steps[0], rank):
                for i in range(piece.rows):
                    assert buffer[piece.row + i] is None
                    buffer[piece.row + i] = tokens[piece.source][piece.source_row + i]
            assert None not in buffer
            rows = sum(piece.rows for piece in schedule.query_pieces(steps[0], rank))
            assert rows == sum(segment.num_queries for segment in segments)
            for segment in segments:
                assert buffer[segment.key_row : segment.key_row + segment.keys.size] == list(range(*segment.keys))
                for run in segment.runs:
                    outside = torch.ones(offsets[-1], dtype=torch.bool)
                    outside[slice(*segment.keys)] = False
                    assert not (seen[slice(*run)] & outside).any()


def test_a_window_brings_keys_of_neighbors_alone():
    plan = distributed.plan(6400, num_ranks=8, num_heads_q=8, num_heads_kv=2, window=(100, 0), engine="keys")
    assert plan.layout_name == "contiguous"
    found = cost.estimate(plan.schedule, 64, distributed.Hardware())
    assert found.forward_bytes == (0, *[100 * 2 * 2 * 64 * 2] * 7)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(distributed.Hardware)])
def test_hardware_that_does_not_exist(name):
    divides = name in ("flops", "backward_flops", "bandwidth", "copying", "itemsize", "multiprocessors")
    for value in (math.nan, math.inf, -1, "fast", None, *([0] if divides else [])):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: expected .*, got "):
            distributed.Hardware(**{name: value})


@pytest.mark.parametrize(
    ("heads", "kv_heads", "bandwidth", "ranks", "engine"),
    [(64, 8, 250e9, 2, "keys"), (32, 32, 45e9, 16, "heads"), (32, 8, 45e9, 16, 4)],
)
def test_the_estimate_chooses(heads, kv_heads, bandwidth, ranks, engine):
    """The engine that is the fastest by the estimate depends on heads, bandwidth and ranks."""
    hardware = distributed.Hardware(bandwidth=bandwidth)
    widths = [width for width in range(1, ranks + 1) if ranks % width == 0]
    seconds = {}
    for width in widths:
        name = "keys" if width == 1 else "heads" if width == ranks else width
        plan = distributed.plan(
            ranks * 8192,
            num_ranks=ranks,
            num_heads_q=heads,
            num_heads_kv=kv_heads,
            causal=True,
            engine=name,
            hardware=hardware,
        )
        seconds[name] = cost.estimate(plan.schedule, 128, hardware).seconds
    assert min(seconds, key=seconds.get) == engine


def test_most_keys():
    rng = random.Random(5)
    for _ in range(300):
        start, stop = sorted(rng.sample(range(61), 2))
        left, right = (rng.choice([None, 0, 3, 20, 60]) for _ in range(2))
        run, mask, offsets = Run(start, stop), Mask(left, right), (0, 10, 60)
        counts = []
        for query in range(start, stop):
            document = Run(0, 10) if query < 10 else Run(10, 60)
            counts.append(visible_keys(Run(query, query + 1), document, mask).size)
        assert most_keys(Run(start, min(stop, 60)), offsets, mask) == max(counts[: 60 - start], default=0), (run, mask)


def test_most_queries():
    rng = random.Random(6)
    for _ in range(300):
        offsets, mask = random_offsets(rng), rng.choice(MASKS)
        total = offsets[-1]
        bounds = sorted(rng.choices(range(total + 1), k=2 * rng.randint(1, 4)))
        runs = [Run(start, stop) for start, stop in zip(bounds[::2], bounds[1::2], strict=True) if start < stop]
        queries = [query for run in runs for query in range(*run)]
        most = int(seen_keys(offsets, mask)[queries].sum(0).max())
        assert most_queries(runs, offsets, mask) == most, (runs, offsets, mask)


def test_a_backward_with_few_kv_heads_takes_the_time_of_its_longest_tile():
    """Tiles of keys are fewer than tiles of queries, by the heads of a group: 128 of them for 16384 keys."""
    sizes = {"num_ranks": 2, "num_heads_q": 64, "num_heads_kv": 8, "causal": True, "engine": "heads"}
    seconds = {}
    for chunks in (2, 4):
        plan = distributed.plan(16384, **sizes, chunks=chunks)
        found = cost.estimate(plan.schedule, 128, cost.Hardware(bandwidth=1e15, latency=0.0))
        seconds[chunks] = found.backward_seconds
        assert found.forward_seconds < 0.5 * found.backward_seconds
    assert seconds[4] > 1.7 * seconds[2]
    assert len(distributed.plan(16384, **sizes).schedule.steps) == 2


def test_a_step_takes_more_of_the_hosts_time_where_queries_travel():
    hardware = distributed.Hardware(bandwidth=1e15, latency=0.0, step=1.0, backward_step=3.0, queries=1.5)
    seconds = {}
    for engine in ("keys", "heads"):
        plan = distributed.plan(256, num_ranks=2, num_heads_q=8, num_heads_kv=8, engine=engine, chunks=2)
        found = cost.estimate(plan.schedule, 128, hardware)
        seconds[engine] = found.forward_seconds, found.backward_seconds
    assert seconds["keys"] == pytest.approx((2 * 1.0, 2 * 3.0), rel=1e-3)
    assert seconds["heads"] == pytest.approx((2 * 1.5, 2 * 4.5), rel=1e-3)


def test_the_number_of_steps_is_chosen():
    """One step for short sequences, where the host's time counts; more for long ones, whose buffers are smaller."""
    sizes = {"num_ranks": 4, "num_heads_q": 64, "num_heads_kv": 16, "causal": True, "engine": "keys"}
    counts = [len(distributed.plan(tokens, **sizes).schedule.steps) for tokens in (256, 2**15, 2**20)]
    assert counts[0] == 1 < counts[1] < counts[2] == 16
    slow = distributed.Hardware(step=1.0)
    assert len(distributed.plan(2**18, hardware=slow, **sizes).schedule.steps) == 1
    assert len(distributed.plan(2**15, chunks=16, **sizes).schedule.steps) == 16


def test_a_plan_without_training_is_the_fastest_forward():
    sizes = {"num_ranks": 2, "num_heads_q": 32, "num_heads_kv": 32, "causal": True}
    engines = {}
    for training in (True, False):
        plan = distributed.plan(16384, training=training, **sizes)
        engines[training] = plan.engine
        costs = {found.engine: found.costs for found in plan.candidates()}
        best = min(costs, key=lambda engine: costs[engine].seconds if training else costs[engine].forward_seconds)
        assert plan.engine == best
        assert "chosen" in next(line for line in plan.describe().splitlines() if line.startswith(f"{best} "))
    assert engines == {True: "heads", False: "keys"}
    with pytest.raises(TypeError, match="training: expected"):
        distributed.plan(8, training=1, **sizes)


def test_bytes_that_are_copied():
    """Two ranks of 4 tokens and a head each: a rank sends, receives and keeps 4 rows of each tensor."""
    plan = distributed.plan(8, num_ranks=2, num_heads_q=2, num_heads_kv=2, engine="heads", chunks=1)
    found = traffic.Traffic(plan.schedule, head_dim=1, itemsize=1)
    (step,) = plan.schedule.steps
    assert not plan.schedule.sums_keys()
    assert distributed.plan(8, num_ranks=2, num_heads_q=2, num_heads_kv=1, engine="heads").schedule.sums_keys()
    # rows of q, k and v go into messages, and those that came or stayed into buffers; out goes the same ways back
    assert found.forward(step)[0].copied == 3 * 12 + 12
    # q, k, v and the gradient of out are copied like this; dq, dk and dv go back; out is read for 4 rows of two heads
    assert found.backward(step)[0].copied == 4 * 12 + 3 * 12 + 8
    slow = distributed.Hardware(copying=48 / 100.0, latency=0.0, step=0.0, backward_step=0.0)
    assert cost.estimate(plan.schedule, 1, slow, batch=1).forward_seconds > 100


def test_results_and_keys_that_are_not_copied():
    """With "keys" no rows of q are copied. Without a mask both ranks need all keys, with documents only their own."""
    sizes = {"num_ranks": 2, "num_heads_q": 2, "num_heads_kv": 2, "engine": "keys"}

    def copied(tokens, chunks):
        schedule = distributed.plan(tokens, chunks=chunks, **sizes).schedule
        found = traffic.Traffic(schedule, head_dim=1, itemsize=1)
        return [
            sum(bytes_of(step)[0].copied for step in schedule.steps) for bytes_of in (found.forward, found.backward)
        ]

    rows = 2 * 4  # of two heads
    # k and v: own rows go into a message, all rows into a buffer; dk and dv, in 4 bytes, go back and are added up
    keys, sums = 2 * 3 * rows, 2 * (rows + 2 * rows + 2 * rows) * 4
    assert copied(8, 1) == [keys, keys + sums]
    # two steps: out and dq are written to their place
    assert copied(8, 2) == [keys + rows, keys + rows + sums]
    # documents that stay on their rank: dk and dv are kept and rounded
    assert copied([0, 4, 8], 1) == [0, 2 * 2 * rows * 4]


def test_pipeline():
    """Messages overlap with computing; first, steps of 10 and 20 seconds with messages of 1 before and 2 after each."""
    assert cost._pipelined([10.0, 20.0], [(1.0, 2.0), (1.0, 2.0)]) == 1 + 10 + 20 + 2
    # the third step's messages start with the first step's computation, and the first step's results go after them;
    # the third step is computed when its messages have come
    assert cost._pipelined([10.0] * 3, [(1.0, 0.0), (1.0, 0.0), (25.0, 0.0)]) == 2 + 25 + 10
    assert cost._pipelined([1.0] * 3, [(1.0, 9.0), (1.0, 0.0), (1.0, 0.0)]) == 3 + 9 + 1
    # messages that take longer than the computation
    assert cost._pipelined([1.0, 1.0, 1.0], [(5.0, 0.0)] * 3) == 15 + 1
    assert cost._pipelined([1.0], [(0.0, 0.0)]) == 1


def test_computing_of_one_rank():
    plan = distributed.plan(100, num_ranks=1, num_heads_q=6, num_heads_kv=2, causal=True)
    assert plan.head_dim == 128
    hardware = distributed.Hardware(flops=1e3, backward_flops=1e2, multiprocessors=1)
    found = cost.estimate(plan.schedule, 64, hardware, batch=3)
    assert found.pairs == (5050 * 6 * 3,)
    tile = 128 * 100  # the tile of a head that has the most pairs
    assert found.forward_seconds == pytest.approx(4 * 64 * (5050 * 18 + tile / 4) / 1e3)
    assert found.backward_seconds == pytest.approx(10 * 64 * (5050 * 18 + 3 * tile / 32) / 1e2)  # of three query heads
    assert found.forward_bytes == found.backward_bytes == (0,)


def test_describe():
    plan = distributed.plan(1000, num_ranks=2, num_heads_q=4, num_heads_kv=2, causal=True, engine="keys", chunks=2)
    lines = plan.describe().splitlines()
    assert lines[0] == "1000 tokens on 2 ranks, 4 query and 2 kv heads, causal"
    assert lines[1] == 'engine "keys", layout "head_tail", 2 steps'
    assert lines[-1] == "0" * 16 + "1" * 32 + "0" * 16
    assert "500  1.000" in lines[5]


def test_positions_and_tokens_of_packed_sequences():
    plan = distributed.plan([0, 3, 8], num_ranks=2, rank=1, num_heads_q=2, num_heads_kv=2, layout="contiguous")
    assert plan.tokens().tolist() == [4, 5, 6, 7]
    assert plan.positions().tolist() == [1, 2, 3, 4]


def test_tables_wait_for_no_device():
    """Tables are made on the CPU and copied. Nothing is read from the device, here "meta", which allows no reading."""
    offsets = [0, 0, 30, 37, 37, 90, 128]
    for engine in ("keys", "heads", 2):
        plan = distributed.plan(offsets, num_ranks=4, rank=1, num_heads_q=8, num_heads_kv=8, causal=True, engine=engine)
        for step in plan.schedule.steps:
            found, right = (make_tables(plan, step, torch.device(device)) for device in ("meta", "cpu"))
            for name, t in right._asdict().items():
                meta = getattr(found, name)
                assert meta == t if isinstance(t, bool) else (meta.shape, meta.dtype) == (t.shape, t.dtype), name
            segments = right.cu_seqlens_q.diff().tolist()
            assert right.row_segments.tolist() == [i for i, count in enumerate(segments) for _ in range(count)]


@pytest.mark.parametrize("engine", ["keys", "heads", 3])
def test_steps_of_one_width_share_their_rows(engine):
    plan = distributed.plan(
        [0, 5, 30, 90], num_ranks=6, rank=2, num_heads_q=20, num_heads_kv=10, engine=engine, causal=True, chunks=16
    )
    schedule = plan.schedule
    assert len(schedule.steps) > 1
    for step in schedule.steps:
        assert plan.segments(step) == schedule.segments(step, plan.rank)
        assert plan.key_route(step, CPU).pieces == schedule.key_pieces(step, plan.rank)
        assert plan.query_route(step, CPU).pieces == schedule.query_pieces(step, plan.rank)
    widths = {step.width for step in schedule.steps}
    assert len(plan._kept) == 3 * len(widths)


def test_plan_chooses_for_its_hardware():
    """Between hosts, queries and results of all ranks cost more than on one host."""
    arguments = {"num_ranks": 8, "num_heads_q": 32, "num_heads_kv": 8, "causal": True}
    network = distributed.Hardware(bandwidth=45e9)
    assert distributed.plan(8 * 8192, **arguments).engine == "heads"
    plan = distributed.plan(8 * 8192, hardware=network, **arguments)
    assert plan.engine == 2
    assert plan.describe() == plan.describe(network) != plan.describe(distributed.Hardware())
    with pytest.raises(TypeError, match="hardware: expected"):
        distributed.plan(64, hardware=45, **arguments)


@pytest.mark.parametrize("keep_gathered", [False, True])
def test_candidates_are_estimated_for_the_hardware_that_is_asked_for(keep_gathered):
    network, host = distributed.Hardware(bandwidth=45e9), distributed.Hardware()
    arguments = {"num_ranks": 8, "num_heads_q": 32, "num_heads_kv": 8, "causal": True, "keep_gathered": keep_gathered}
    plan = distributed.plan(8 * 8192, hardware=network, **arguments)
    for hardware in (None, network, host):
        for found in plan.candidates(hardware):
            expected = cost.estimate(found.schedule, 128, hardware or network, keep_gathered=keep_gathered)
            assert found.costs == expected, (found.engine, hardware)
        fastest = min(plan.candidates(hardware), key=lambda found: found.costs.seconds)
        assert fastest.engine == ("heads" if hardware is host else plan.engine)


@pytest.mark.parametrize(
    ("tokens", "options", "layout"),
    [
        (1000, {"causal": True}, "head_tail"),
        (1000, {}, "contiguous"),
        (1000, {"window": (9, 0)}, "contiguous"),
        (1000, {"window": (None, 9)}, "head_tail"),
        (1000, {"causal": True, "engine": 2}, "head_tail"),
        (1000, {"causal": True, "engine": "heads"}, "contiguous"),
        ([0, 700, 1000], {"causal": True}, "balanced"),
        ([0, 700, 1000], {"engine": "heads"}, "contiguous"),
        ([0, 1000], {"causal": True, "num_ranks": 1, "engine": 1}, "contiguous"),
    ],
)
def test_the_layout_is_chosen(tokens, options, layout):
    given = {"num_ranks": 4, "num_heads_q": 8, "num_heads_kv": 8, "engine": "keys"} | options
    plan = distributed.plan(tokens, **given)
    assert plan.layout_name == layout
    if given["num_ranks"] == 1:
        assert len(distributed.plan(2**20, **given).schedule.steps) == 1


def test_describe_lists_engines():
    plan = distributed.plan(1000, num_ranks=4, num_heads_q=8, num_heads_kv=8, causal=True, engine="keys", chunks=4)
    # the plan stays what it is for other hardware
    for hardware in (None, distributed.Hardware(bandwidth=1e6, step=0.0)):
        rows = [line for line in plan.describe(hardware).splitlines() if line.endswith("chosen")]
        assert [row.split()[:3] for row in rows] == [["keys", "head_tail", "4"]]
    lines = plan.describe().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("engine   layout"))
    table = [line.split() for line in lines[first + 1 : first + 4]]
    assert [row[:3] for row in table] == [
        ["heads", "contiguous", "2"],
        ["2", "head_tail", "4"],
        ["keys", "head_tail", "4"],
    ]
    assert [row[-1] == "chosen" for row in table] == [False, False, True]


def test_buffers():
    """The buffers of three steps are there at a time: each has all keys of two kv heads, since there is no mask."""
    plan = distributed.plan(1000, num_ranks=4, num_heads_q=8, num_heads_kv=8, engine="keys", chunks=4)
    assert [step.heads for step in plan.schedule.steps] == [2, 2, 2, 2]
    assert traffic.buffer_bytes(plan.schedule, 16, 2) == 3 * (2 * 1000 * 2 * 16 * 2)
    assert traffic.buffer_bytes(plan.schedule, 16, 2, keep_gathered=True) == 4 * (2 * 1000 * 2 * 16 * 2)
    plan = distributed.plan(1000, num_ranks=4, num_heads_q=8, num_heads_kv=8, engine="heads", chunks=4)
    assert traffic.buffer_bytes(plan.schedule, 16, 2) == 2 * (3 * 1000 * 16 * 2)

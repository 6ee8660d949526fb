"""Exactness, costs, faults and modules of `onepass.distributed` on several gloo ranks."""

import pytest
import rank_checks
from ranks import run_ranks


@pytest.mark.parametrize("engine", ["keys", "heads"])
def test_errors_are_those_of_one_device(engine):
    """Errors of out, lse and gradients in bfloat16 are at most 1.05 times those of one device, by root mean square."""
    for errors in run_ranks(4, rank_checks.root_mean_square_errors, engine):
        for name, (found, alone, _) in errors.items():
            assert alone > 0
            assert found <= 1.05 * alone, (name, found, alone)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_bits_of_one_device(num_ranks):
    run_ranks(num_ranks, rank_checks.bits_of_one_device)


def test_same_bits_twice():
    run_ranks(3, rank_checks.same_bits_twice)


def test_fp8():
    run_ranks(2, rank_checks.fp8)


def test_nan_stays_out():
    run_ranks(3, rank_checks.nan_stays_out)


COSTS = [
    {"tokens": 100, "causal": True, "engine": "keys", "num_heads_q": 8, "num_heads_kv": 4},
    {"tokens": 97, "causal": True, "engine": "heads", "num_heads_q": 6, "num_heads_kv": 2},
    {"tokens": 97, "causal": True, "engine": 2, "num_heads_q": 8, "num_heads_kv": 8, "chunks": 2},
    {"tokens": 97, "window": (20, 0), "engine": "keys", "num_heads_q": 4, "num_heads_kv": 2},
    {"tokens": [0, 30, 31, 90], "causal": True, "num_heads_q": 4, "num_heads_kv": 2},
    {"tokens": 97, "causal": True, "engine": "keys", "num_heads_q": 4, "num_heads_kv": 2, "keep_gathered": True},
    {"tokens": 97, "causal": True, "engine": 2, "num_heads_q": 8, "num_heads_kv": 8, "keep_gathered": True},
]


@pytest.mark.parametrize("case", range(len(COSTS)))
def test_bytes_are_those_of_the_estimate(case):
    received = run_ranks(4, rank_checks.received_bytes, COSTS[case])
    assert sum(forward for forward, _ in received) > 0


@pytest.mark.parametrize(("num_ranks", "of_forward", "of_both"), [(2, 2.8, 1.6), (4, 3.4, 6.8)])
def test_memory(num_ranks, of_forward, of_both):
    """A gathered k and v would be 16 chunks."""
    for forward, both in run_ranks(num_ranks, rank_checks.peaks):
        assert 0 < forward < of_forward
        assert 0 < both < of_both


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_hidden_gather_is_noticed(direction):
    for message, peaks in run_ranks(2, rank_checks.hidden_gather, direction, COSTS[0]):
        assert message.startswith("AssertionError")
        assert peaks[direction == "backward"] > 15


def test_two_chunks_of_keys_are_under_way():
    """Half of each chunk comes from the other rank."""
    for most, gathered in run_ranks(2, rank_checks.largest_buffers, 16):
        assert most == 2 * gathered / 16 / 2


def test_rows_that_are_read_are_not_sent():
    for sent, read in run_ranks(2, rank_checks.messages_beside_copies):
        assert sent > 0
        assert read == 0


def test_own_keys_are_not_copied():
    """A rank that computes with its own keys alone gets them as they are."""
    assert run_ranks(2, rank_checks.copied_keys) == [[False, True]] * 2


def test_many_runs_take_no_more_operations():
    """The number of operations does not grow with the runs, since each copy takes the host 10 us."""
    counts = [run_ranks(2, rank_checks.operations, tokens) for tokens in (8192, 32768)]
    for (runs, *few), (more_runs, *many) in zip(*counts, strict=True):
        assert more_runs == 4 * runs
        assert many == few


def test_messages_of_any_place():
    run_ranks(2, rank_checks.messages_of_any_place)


def test_a_rank_that_is_gone():
    first, _ = run_ranks(2, rank_checks.a_rank_that_is_gone)
    assert first.startswith("RuntimeError: onepass.distributed: expected messages between this rank and ranks [1]")


def test_refusals():
    expected = [
        "TypeError: plan: expected a ContextPlan",
        "ValueError: plan: expected one that was made for a process group",
        "ValueError: q: expected (batch, 32, 8, head_dim)",
        "ValueError: q: expected (batch, 32, 8, head_dim)",
        "ValueError: sinks: expected",
        "ValueError: dropout_p: expected",
        "UnsupportedError: alibi_slopes: expected None",
        "ValueError: x: expected 64 tokens in dimension 1",
        "ValueError: x: expected 32 tokens in dimension 1",
        "ValueError: tokens: expected",
        "ValueError: tokens: expected offsets",
        "ValueError: engine: expected",
        "ValueError: engine: expected a divisor of the 2 ranks",
        "ValueError: layout: expected one of contiguous",
        "ValueError: transport: expected 'messages' or 'copies', got 'pigeons'",
        "ValueError: plan: with transport 'copies', expected q, k and v on GPUs, got cpu",
        "ValueError: num_heads_q: expected a multiple of num_heads_kv = 2",
        "TypeError: group: expected a ProcessGroup",
    ]
    for messages in run_ranks(2, rank_checks.refusals):
        for message, beginning in zip(messages, expected, strict=True):
            assert message.startswith(beginning)


@pytest.mark.parametrize("seq_dim", [1, 2])
def test_parallel_style(seq_dim):
    run_ranks(2, rank_checks.parallel_style, seq_dim)


def test_a_group_that_is_destroyed():
    for message in run_ranks(2, rank_checks.a_group_that_is_destroyed):
        assert message == "RuntimeError: plan: expected its process group to exist, but it has been destroyed"


def test_groups_side_by_side():
    run_ranks(4, rank_checks.groups_side_by_side)


def test_changes_in_place():
    for messages in run_ranks(2, rank_checks.changes_in_place):
        for message in messages.values():
            assert "has been modified by an inplace operation" in message


def test_parts_of_a_loss():
    for message in run_ranks(2, rank_checks.parts_of_a_loss):
        assert "once_differentiable" in message


def test_kept_buffers():
    run_ranks(2, rank_checks.kept_buffers)


def test_connections():
    """Groups with NCCL connect with their first plan, whatever other backends they have; no plan waits for a GPU."""
    for names in run_ranks(2, rank_checks.connections):
        assert names == [["allreduce_"], ["allreduce_"], [], []]

"""Ranks that disagree get an error that names the rank and the difference, on several gloo ranks."""

import inspect

import disagreements
from ranks import run_ranks

from onepass import distributed
from onepass.distributed import agreement


def keywords_of(function, *tensors):
    return set(inspect.signature(function).parameters) - set(tensors)


def test_plans_that_differ():
    assert set(disagreements.PLAN_ARGUMENTS) == keywords_of(distributed.plan)
    for messages in run_ranks(2, disagreements.plans_that_differ):
        for name, message in messages.items():
            told = {"tokens": "cu_seqlens"}.get(name, name)
            assert message.startswith(f"RuntimeError: plan: expected the same {told} on all ranks, but rank 0 has ")


def test_calls_that_differ():
    assert set(disagreements.OPTIONS) == keywords_of(distributed.attention, "q", "k", "v", "plan")
    for messages in run_ranks(3, disagreements.calls_that_differ):
        for name, message in messages.items():
            beginning = f"RuntimeError: attention: expected the same {name.strip()} on all ranks, but rank 0 has "
            assert message.startswith(beginning), name


def test_a_rank_that_does_not_come():
    first, second = run_ranks(2, disagreements.a_rank_that_does_not_come)
    words = "expected all 2 ranks to make this call within 1 s, but rank 0 did not hear from ranks [1]"
    assert first[0] == f"RuntimeError: attention: {words}"
    assert second[0] == f"RuntimeError: attention: rank 0 ended this call before rank 1 came: {words}"
    assert first[1] == second[1] == "nothing was raised"


def test_a_rank_that_goes_on():
    first, second = run_ranks(2, disagreements.a_rank_that_goes_on)
    assert first[0].startswith("RuntimeError: onepass.distributed: expected messages between this rank and ranks [1]")
    assert second[0] == (
        "RuntimeError: attention: expected all 2 ranks to make this call within 0.7 s, but rank 1 did not hear from "
        "ranks [0]; rank 0 last announced a call with softcap 5.0, where rank 1 has 6.0"
    )
    assert first[1] == second[1] == "nothing was raised"


def test_a_plan_that_one_rank_refuses():
    (first, seconds), (second, _) = run_ranks(2, disagreements.a_plan_that_one_rank_refuses)
    error = "ValueError: num_heads_q: expected a multiple of num_heads_kv = 3, got 8"
    words = "expected arguments that pass the checks on all ranks, but rank 1 raised"
    assert words in first[0]
    assert first[0].endswith(error)
    assert second[0] == error
    assert first[1] == second[1] == "nothing was raised"
    assert seconds < 10


def test_whose_calls_a_round_ended():
    """Calls equal to that of the rank that gave up, or where its arguments were refused, all calls of the function."""
    call, other = (agreement.Call.of("attention", {"softcap": softcap}) for softcap in (1.0, 2.0))
    for function, digest, concerned in (
        ("attention", call.digest, [call]),
        ("attention", "", [call, other]),
        ("decode", call.digest, []),
        ("decode", "", []),
    ):
        ended = agreement.GivenUp(1, function, digest, "words")
        assert [one for one in (call, other) if ended.concerns(one)] == concerned


def test_timeouts_that_differ():
    run_ranks(2, disagreements.timeouts_that_differ)


def test_ranks_in_another_order():
    for rank, (own, message) in enumerate(run_ranks(2, disagreements.ranks_in_another_order)):
        assert own == 1 - rank
        assert message == (
            "RuntimeError: plan: expected the same cu_seqlens on all ranks, but rank 0 has (0, 60) and rank 1 has "
            "(0, 61)"
        )


def test_repeated_calls():
    run_ranks(2, disagreements.repeated_calls)


def test_rounds_of_new_plans():
    """Each plan takes a round, and the calls of all plans take one. The store keeps only keys of the last round."""
    for rounds, keys in run_ranks(2, disagreements.rounds_of_new_plans):
        assert rounds == 6
        assert keys <= 5


def test_plans_that_come_out_differently():
    for messages in run_ranks(2, disagreements.plans_that_come_out_differently):
        assert messages[0].endswith("expected the same head_dim on all ranks, but rank 0 has 64 and rank 1 has 128")
        assert "plan: expected the same tokens and steps on all ranks, but rank 0 has balanced, " in messages[1]


def test_arguments_that_one_rank_refuses():
    (first, seconds), (second, _) = run_ranks(2, disagreements.arguments_that_one_rank_refuses)
    errors = ["ValueError: q: expected (batch, 32, 8, head_dim)", "", "ValueError: sinks: expected", ""]
    for function, error, heard, own in zip(("attention", "", "decode", ""), errors, first, second, strict=True):
        if not error:
            assert heard == own == "nothing was raised"
            continue
        words = "expected arguments that pass the checks on all ranks, but rank 1 raised"
        assert own.startswith(error)
        assert heard.startswith(f"RuntimeError: {function}: ")
        assert f"{words} {error}" in heard
    assert seconds < 10


def test_terms_of_decode():
    assert set(disagreements.DECODE_TERMS) == keywords_of(distributed.decode) - disagreements.OWN_TERMS
    for messages in run_ranks(2, disagreements.terms_of_decode):
        for name, message in messages.items():
            told = {"causal": "mask", "window": "mask"}.get(name, name)
            assert message.startswith(f"RuntimeError: decode: expected the same {told} on all ranks, but rank 0 has ")


def test_descales_of_decode():
    for messages in run_ranks(2, disagreements.descales_of_decode):
        for name, message in zip(("k_descale", "kv_block"), messages, strict=False):
            assert message.startswith(f"RuntimeError: decode: expected the same {name} on all ranks, but rank 0 has ")
        assert messages[2] == "nothing was raised"


def test_refused_steps_write_nothing():
    names = [name for name, _ in disagreements.REFUSED_STEPS]
    for rank, messages in enumerate(run_ranks(2, disagreements.refused_steps_write_nothing)):
        for name, message in zip(names, messages, strict=False):
            assert f"Error: {name}: expected" in message
        softcap, page, twice, overlapping = messages[len(names) :]
        assert "page_table[0, " in twice
        assert "for new keys alone, got page 0" in twice
        assert overlapping.startswith("ValueError: k_new: expected memory apart from k_cache")
        assert softcap.startswith("RuntimeError: decode: expected the same softcap on all ranks")
        assert page.startswith("ValueError" if rank == 1 else "RuntimeError: decode: ")
        assert page.endswith("page_table[0, 7]: expected a page 0 to 7 of the cache, got 9")


def test_values_that_one_device_refuses():
    expected = [words for words, _ in disagreements.BAD_VALUES + disagreements.BAD_PACKED_VALUES]
    for rank, (*messages, last) in enumerate(run_ranks(2, disagreements.values_that_one_device_refuses)):
        for words, message in zip(expected, messages, strict=True):
            assert message.startswith(f"ValueError: {words}")
        beginning = "ValueError: " if rank == 1 else "RuntimeError: attention: "
        assert last.startswith(beginning)
        assert "seqused_k[0]: expected 0 to 64, the keys of the sequence, got 65" in last


def test_lengths_that_are_not_read():
    run_ranks(2, disagreements.lengths_that_are_not_read)


def test_grad_mode_that_differs():
    for message in run_ranks(2, disagreements.grad_mode_that_differs):
        assert message.endswith(
            "expected the same recorded gradients of q, k, v on all ranks, but rank 0 has (False, False, False) and "
            "rank 1 has (True, True, True)"
        )


def test_a_device_without_a_backend():
    for messages in run_ranks(2, disagreements.a_device_without_a_backend):
        for message in messages:
            assert message == (
                "ValueError: q: expected a device for which the process group has a backend, cuda (gloo), got cpu"
            )


def test_tensors_to_unshard():
    for sizes, dtypes in run_ranks(2, disagreements.tensors_to_unshard):
        assert sizes.endswith("same other sizes on all ranks, but rank 0 has (1, 2) and rank 1 has (1, 3)")
        assert dtypes.endswith("same dtype on all ranks, but rank 0 has torch.float32 and rank 1 has torch.int32")


GONE = "but one of them is gone or has not come within the group's timeout ("


def test_ranks_that_are_gone():
    messages, _ = run_ranks(2, disagreements.ranks_that_are_gone)
    assert len(messages) == 5
    for message in messages:
        assert message.startswith("RuntimeError: onepass.distributed: expected ")
        assert GONE in message


def test_a_sum_that_is_gone():
    message, _ = run_ranks(2, disagreements.a_sum_that_is_gone)
    assert message.startswith("RuntimeError: onepass.distributed: expected all ranks of the group to give their part")
    assert GONE in message


def test_an_operation_that_fails():
    for message in run_ranks(2, disagreements.an_operation_that_fails):
        assert "of its group to arrive, but there was an error (shape " in message
        assert GONE not in message


def test_plans_that_differ_in_a_call():
    first, second = run_ranks(2, disagreements.plans_that_differ_in_a_call)
    assert GONE in first
    assert second.endswith("ranks [0]; rank 0 has announced this call, with this plan or another one")


def test_old_calls_are_forgotten():
    assert run_ranks(2, disagreements.old_calls_are_forgotten) == [(4, 1)] * 2

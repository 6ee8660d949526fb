"""Packed sequences in transformers models agree with each document alone."""

import sys

import pytest
import torch
from tiny_transformers import (
    PACKED,
    SEQLEN,
    HostReads,
    Layer,
    assert_close,
    make,
    packed_positions,
    tokens,
)

transformers = pytest.importorskip("transformers")

from onepass.integrations import transformers_masks  # noqa: E402
from onepass.integrations.transformers import attention_forward, padding_mask, register  # noqa: E402

REFILLS = {
    "copy_": lambda buffer, values: buffer.copy_(values),
    "data": lambda buffer, values: buffer.data.copy_(values),
    "numpy": lambda buffer, values: buffer.numpy().__setitem__(..., values.numpy()),
    "set_": lambda buffer, values: buffer.set_(values),
    "an earlier view": lambda buffer, values: buffer.detach().view(-1).copy_(values[0]),
}


@pytest.mark.parametrize("how", REFILLS)
def test_positions_that_are_refilled(how):
    """A buffer of positions has the sequences of its present content, however it has been filled."""
    model = make("Llama", {}, register())
    q, k = torch.randn(1, 4, SEQLEN, 8), torch.randn(1, 2, SEQLEN, 8)
    whole, packed = torch.arange(SEQLEN)[None], packed_positions()

    def results(positions):
        yield attention_forward(Layer(), q, k, k, None, position_ids=positions)[0]
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                yield model(tokens(1), position_ids=positions).logits

    expected = {name: list(results(positions)) for name, positions in (("whole", whole), ("packed", packed))}
    buffer = whole.clone()
    for name, positions in (("whole", whole), ("packed", packed), ("whole", whole)):
        REFILLS[how](buffer, positions.clone())
        assert all(torch.equal(*pair) for pair in zip(results(buffer), expected[name], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(*expected.values(), strict=True))


def test_positions_that_begin_at_another_number():
    """Models such as RoBERTa count from the number behind that of padding."""
    q, k = torch.randn(1, 4, SEQLEN, 8), torch.randn(1, 2, SEQLEN, 8)
    out, moved = (
        attention_forward(Layer(), q, k, k, None, position_ids=packed_positions() + first)[0] for first in (0, 2)
    )
    assert torch.equal(moved, out)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_by_position_ids(decoders, use_cache):
    eager, ours = decoders
    row = tokens(1)
    out = ours(row, position_ids=packed_positions(), use_cache=use_cache).logits
    expected = torch.cat([eager(part, use_cache=False).logits for part in row.split(PACKED, 1)], 1)
    assert_close(out, expected)


def test_packed_rows_of_a_batch(decoders):
    """Rows are cut at different positions; gpt-oss does not give them to its mask function."""
    positions = torch.stack([packed_positions()[0], torch.arange(SEQLEN), torch.arange(SEQLEN) % 7])
    eager, ours = decoders
    rows = zip(tokens().split(1), (PACKED, (SEQLEN,), (7, 4)), strict=True)
    expected = [torch.cat([eager(part).logits for part in row.split(lengths, 1)], 1) for row, lengths in rows]
    for use_cache in (False, True):
        assert_close(ours(tokens(), position_ids=positions, use_cache=use_cache).logits, torch.cat(expected))


def test_packed_by_cu_seq_lens(decoders):
    eager, ours = decoders
    row = tokens(1)
    offsets = torch.tensor([0, *PACKED]).cumsum(0)
    lengths = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 6, "max_length_k": 6}
    out = ours(row, position_ids=packed_positions(), use_cache=False, **lengths).logits
    expected = torch.cat([eager(part, use_cache=False).logits for part in row.split(PACKED, 1)], 1)
    assert_close(out, expected)


@pytest.mark.parametrize("use_cache", [False, True])
def test_packed_without_a_read(decoders, use_cache, monkeypatch):
    """While a CUDA graph is captured, nothing is read, and the graph's later runs get other positions."""
    from transformers import masking_utils

    for module in (sys.modules[attention_forward.__module__], transformers_masks):
        monkeypatch.setattr(module, "may_wait", lambda t: False)
    monkeypatch.setattr(masking_utils, "is_tracing", lambda t=None: True)
    eager, ours = decoders
    row = tokens(1)
    expected = torch.cat([eager(part, use_cache=False).logits for part in row.split(PACKED, 1)], 1)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), HostReads() as reads:
            out = ours(row, position_ids=packed_positions(), use_cache=use_cache).logits
        if ours.config.model_type != "gpt_oss":  # whose experts are chosen on the host
            assert reads.count == 0
        assert_close(out, expected)


@pytest.mark.parametrize("is_full", [False, True])
def test_packed_in_a_static_cache(is_full):
    """A cache that has been used and emptied counts its length in a tensor, which each layer changes."""
    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    row, positions = tokens(1), packed_positions()
    cache = transformers.StaticCache(config=ours.config, max_cache_len=SEQLEN if is_full else 16)
    expected = torch.cat([eager(part, use_cache=False).logits for part in row.split(PACKED, 1)], 1)
    for _ in range(2):
        with torch.no_grad():
            assert_close(ours(row, position_ids=positions, past_key_values=cache).logits, expected)
        cache.reset()


def offsets():
    found = torch.tensor([0, *PACKED]).cumsum(0)
    return {"cu_seq_lens_q": found, "cu_seq_lens_k": found}


@pytest.mark.parametrize("mask", ["none", "ones"])
def test_evaluation_of_packed_sequences(decoders, mask):
    """Evaluation keeps the cache that a model has by default, and a collator may give a mask of ones."""
    eager, ours = decoders
    row = tokens(1)
    options = {"attention_mask": torch.ones_like(row)} if mask == "ones" else {}
    with torch.no_grad():
        out = ours(row, position_ids=packed_positions(), **offsets(), **options).logits
    assert_close(out, torch.cat([eager(part, use_cache=False).logits for part in row.split(PACKED, 1)], 1))


@pytest.mark.parametrize("use_cache", [False, True])
def test_chunks_of_packed_sequences(llama4, use_cache):
    """Chunks are counted from the start of a sequence, also where only the offsets tell of sequences."""
    eager, ours = llama4
    row = tokens(1)
    expected = torch.cat([eager(part, use_cache=False).last_hidden_state for part in row.split(PACKED, 1)], 1)
    torch._dynamo.reset()
    compiled = [torch.compile(ours.forward, backend="eager")] if use_cache else []
    for forward in (ours.forward, *compiled):
        out = forward(row, position_ids=packed_positions(), use_cache=use_cache, **offsets()).last_hidden_state
        assert_close(out, expected)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_chunks_of_packed_sequences_with_a_mask_of_ones(llama4, is_compiled):
    eager, ours = llama4
    row = tokens(1)
    expected = torch.cat([eager(part, use_cache=False).last_hidden_state for part in row.split(PACKED, 1)], 1)
    torch._dynamo.reset()
    forward = torch.compile(ours.forward, backend="eager") if is_compiled else ours.forward
    out = forward(row, torch.ones_like(row), position_ids=packed_positions(), **offsets()).last_hidden_state
    assert_close(out, expected)


@pytest.mark.parametrize("hidden", [slice(0, 2), slice(4, 5), slice(9, 11)])
def test_packed_sequences_with_padding_are_refused(llama4, hidden):
    """The offsets could count the padding, or leave it out."""
    mask = torch.ones(1, SEQLEN, dtype=torch.long)
    mask[:, hidden] = 0
    for model in (make("Llama", {}, register()), llama4[1]):
        with pytest.raises(NotImplementedError, match="cu_seq_lens_q: expected None where attention_mask has padding"):
            model(tokens(1), attention_mask=mask, position_ids=packed_positions(), **offsets())


def test_packed_rows_in_a_static_cache():
    """Offsets of keys count no free slots. Another tensor for the keys could only say so if its values were read."""
    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    rows = tokens(2)
    parts = [[eager(part, use_cache=False).logits for part in row[None].split(PACKED, 1)] for row in rows]
    expected = torch.cat([torch.cat(row, 1) for row in parts])
    counts = torch.tensor(PACKED * 2)
    both = torch.nn.functional.pad(counts.cumsum(0), (1, 0))

    def run(other):
        cache = transformers.StaticCache(config=ours.config, max_cache_len=SEQLEN + 5)
        positions = packed_positions().repeat(2, 1)
        return ours(rows, position_ids=positions, past_key_values=cache, cu_seq_lens_q=both, cu_seq_lens_k=other).logits

    assert_close(run(both), expected)
    with pytest.raises(NotImplementedError, match="cu_seq_lens_k: expected the same tensor"):
        run(both.clone())


@pytest.mark.parametrize("kind", ["bool", "lowest", "infinity"])
def test_a_mask_of_four_dimensions_with_packed_sequences(decoders, kind):
    """A query sees keys of its own sequence that the mask leaves."""
    eager, ours = decoders
    seen = torch.rand(1, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.7
    seen |= torch.eye(SEQLEN, dtype=torch.bool)
    sequence = torch.arange(3).repeat_interleave(torch.tensor(PACKED))
    hidden = torch.finfo(torch.float32).min if kind == "lowest" else -torch.inf
    mask = seen if kind == "bool" else torch.where(seen, 0.0, hidden)
    both = torch.where(seen & (sequence[:, None] == sequence), 0.0, torch.finfo(torch.float32).min)
    row, positions = tokens(1), packed_positions()
    out = ours(row, position_ids=positions, attention_mask=mask, **offsets()).logits
    assert_close(out, eager(row, position_ids=positions, attention_mask=both).logits)


@pytest.mark.parametrize("waits", [True, False])
def test_a_second_part_of_a_prompt_sees_the_first(waits, monkeypatch):
    """Nothing begins behind cached keys, whatever the positions say, and wherever the host may read them."""
    from transformers import masking_utils

    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    parts = [(torch.arange(4)[None], tokens(1)[:, :4]), (torch.tensor([[4, 5, 6, 4, 5, 6, 7]]), tokens(1)[:, 4:])]

    def second(model, cache):
        with torch.no_grad():
            for positions, row in parts:
                out = model(row, position_ids=positions, past_key_values=cache).logits
        return out

    expected = second(eager, transformers.DynamicCache(config=eager.config))
    if not waits:
        for module in (sys.modules[attention_forward.__module__], transformers_masks):
            monkeypatch.setattr(module, "may_wait", lambda t: False)
        monkeypatch.setattr(masking_utils, "is_tracing", lambda t=None: True)
    assert_close(second(ours, transformers.DynamicCache(config=ours.config)), expected)
    assert_close(second(ours, transformers.StaticCache(config=ours.config, max_cache_len=16)), expected)


IGNORED_POSITIONS = {
    "of more rows": torch.tensor([0, 1, 0, 1]).expand(3, -1),
    "of more queries": torch.tensor([[0, 1, 0, 1, 2]]),
    "of several kinds": torch.tensor([0, 1, 0, 1]).expand(2, 4, -1),
}


@pytest.mark.parametrize("positions", IGNORED_POSITIONS.values(), ids=IGNORED_POSITIONS)
def test_positions_that_are_not_those_of_the_queries_cut_nothing(positions):
    q = torch.randn(2, 2, 4, 8)
    expected, _ = attention_forward(Layer(), q, q, q, None)
    assert torch.equal(attention_forward(Layer(), q, q, q, None, position_ids=positions)[0], expected)


def test_positions_of_queries_cut_no_other_keys():
    """Keys of another sequence, in cross attention, have no positions."""
    from transformers import masking_utils

    q, k, positions = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 6, 8), torch.tensor([[0, 1, 0, 1]])
    expected, _ = attention_forward(Layer(), q, k, k, None, is_causal=False)
    mask = padding_mask(1, 4, 6, mask_function=masking_utils.bidirectional_mask_function)
    for given in (None, mask):
        found, _ = attention_forward(Layer(), q, k, k, given, is_causal=False, position_ids=positions)
        assert torch.equal(found, expected)


def test_layers_with_positions_of_their_own():
    from transformers import masking_utils

    q, both = torch.randn(1, 2, 4, 8), torch.tensor([[[0, 1, 0, 1]], [[0, 1, 2, 0]]])
    mask = padding_mask(1, 4, 4, mask_function=masking_utils.causal_mask_function)
    for positions in both:
        expected, _ = attention_forward(Layer(), q, q, q, None, position_ids=positions)
        assert torch.equal(attention_forward(Layer(), q, q, q, mask, position_ids=positions)[0], expected)


def test_offsets_of_any_integer_type():
    q, ends = torch.randn(1, 2, 6, 8), torch.tensor([0, 2, 6])
    expected, _ = attention_forward(Layer(), q, q, q, None, cu_seq_lens_q=ends.int(), cu_seq_lens_k=ends.int())
    for of_queries, of_keys in ((ends, ends), (ends, ends.clone()), (ends.int(), ends), (ends, ends.int())):
        found, _ = attention_forward(Layer(), q, q, q, None, cu_seq_lens_q=of_queries, cu_seq_lens_k=of_keys)
        assert torch.equal(found, expected)


def test_a_jump_of_positions_cuts_nothing_in_a_cache():
    """Without a cache transformers takes a jump for the start of a sequence, which its own implementations do, too."""
    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    jump = torch.cat((torch.arange(8), torch.arange(40, 43)))[None]
    for use_cache in (False, True):
        expected = eager(tokens(1), position_ids=jump, use_cache=use_cache).logits
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert_close(ours(tokens(1), position_ids=jump, use_cache=use_cache).logits, expected)

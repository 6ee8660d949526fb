"""The mask of a transformers model: its values, its chunks, what writes to it, and what is refused."""

import random
import sys

import pytest
import torch
from tiny_transformers import (
    BATCH,
    LLAMA4,
    SEQLEN,
    SMALL,
    HostReads,
    Layer,
    assert_close,
    make,
    masks_of_layers,
    packed_positions,
    padding,
    tokens,
    weighted_gradient,
)

transformers = pytest.importorskip("transformers")

import onepass.api.attention  # noqa: E402
from onepass import reference  # noqa: E402
from onepass.integrations import transformers_masks  # noqa: E402
from onepass.integrations.transformers import attention_forward, padding_mask, register  # noqa: E402
from onepass.integrations.transformers_masks import ShortMask  # noqa: E402


def causal_mask(dtype=torch.float32, **options):
    from transformers import masking_utils

    return padding_mask(2, 4, 4, mask_function=masking_utils.causal_mask_function, dtype=dtype, **options)


EDITS = {
    "slice": lambda m: m[..., :3],
    "join": lambda m: torch.cat([m, torch.zeros(2, 1, 4, 2)], -1),
    "sum": lambda m: 1 + m + torch.ones(4),
    "hide": lambda m: m.masked_fill(m == 0, -1.0),
    "select": lambda m: torch.where(m[:, 0] == 0, 1.0, 2.0),
    "another type": lambda m: m.to(torch.float64).bool().logical_not(),
    "write elsewhere": lambda m: torch.zeros(2, 1, 4, 4).add_(m),
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_values_of_a_mask(name, is_compiled):
    """To a model a mask is the floating point mask of eager attention, whatever the model does with it."""
    from transformers import masking_utils

    expected = masking_utils.eager_mask(2, 4, 4, mask_function=masking_utils.causal_mask_function)
    torch._dynamo.reset()
    edit = lambda: EDITS[name](causal_mask())  # noqa: E731
    found = (torch.compile(edit, backend="eager", fullgraph=True) if is_compiled else edit)()
    assert type(found) is torch.Tensor
    assert torch.equal(found, EDITS[name](expected))


def test_a_mask_that_moves():
    """A model on several devices, or in mixed precision, sends its mask along, and no value is computed for that."""
    mask = causal_mask()
    assert mask.to("cpu") is mask.contiguous() is mask.detach() is mask
    for moved, device, dtype in ((mask.to("meta"), "meta", mask.dtype), (mask.to(torch.float64), "cpu", torch.float64)):
        assert isinstance(moved, ShortMask)
        assert (moved.device.type, moved.shape, moved.dtype) == (device, mask.shape, dtype)
        assert mask.kept == moved.kept == {}
    assert torch.equal(mask.to(torch.float64).clone(), mask.clone().double())
    assert mask.to(dtype=torch.float64).dtype == torch.float64
    for like, expected in ((torch.zeros((), dtype=torch.float64), mask.clone().double()), (torch.bool, mask != 0)):
        values = mask.to(like)
        assert type(values) is torch.Tensor
        assert torch.equal(values, expected)
    real = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert causal_mask(attention_mask=real).to("meta").pattern.first.is_meta
    assert causal_mask(torch.bfloat16).dtype == causal_mask(torch.bfloat16).clone().dtype == torch.bfloat16


@pytest.mark.parametrize(
    "write",
    [
        lambda m: m.add_(1),
        lambda m: m.__setitem__(0, 1.0),
        lambda m: m.__iadd__(1),
        lambda m: torch.add(m, 1, out=m),
        lambda m: torch.nn.functional.relu(m, inplace=True),
    ],
)
def test_a_model_that_writes_to_its_mask_is_refused(write):
    with pytest.raises(NotImplementedError, match="attention_mask: expected a model that does not write to its mask"):
        write(causal_mask())


def test_keys_that_an_indexer_chooses():
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 4, 8)
    indices = torch.tensor([[0, 3], [1, -1], [1, 2], [3, 0]]).expand(2, 4, 2)
    chosen = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()  # and not in the future
    expected = attention_forward(Layer(), q, k, k, chosen[None, None])[0]
    bool_mask = torch.ones(4, 4).tril().bool()[None, None]
    for mask in (causal_mask(), causal_mask().clone(), bool_mask):
        assert_close(attention_forward(Layer(), q, k, k, mask, indices=indices)[0], expected)


def test_compressed_keys_do_not_leak_the_future():
    """DeepSeek-V4 joins compressed keys to its keys and, if there is a mask, to the mask."""
    config = transformers.DeepseekV4Config(
        **SMALL | {"num_key_value_heads": 1, "eos_token_id": 2},
        q_lora_rank=16,
        moe_intermediate_size=32,
        n_routed_experts=2,
        num_experts_per_tok=1,
        index_topk=2,
        index_n_heads=2,
        index_head_dim=16,
        sliding_window=4,
        o_groups=1,
        o_lora_rank=16,
        qk_rope_head_dim=8,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        num_hash_layers=0,
    )
    results = []
    for implementation in ("eager", register()):
        torch.manual_seed(0)
        model = transformers.DeepseekV4ForCausalLM._from_config(config, attn_implementation=implementation).eval()
        rows = torch.randint(3, 97, (1, 150), generator=torch.Generator().manual_seed(1)).repeat(2, 1)
        rows[1, 140:] = 5
        results.append(model(rows).logits)
        assert_close(results[-1][1, :140], results[-1][0, :140])
    assert_close(*reversed(results))


def call(module=None, attention_mask=None, **kwargs):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    return attention_forward(module or Layer(), q, k, k, attention_mask, **kwargs)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("sliding_window", range(1, 7))
def test_window_edges(sliding_window, is_causal):
    """Windows around the number of keys, 5: the last one that hides a key and the first one that hides none."""
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    out, _ = attention_forward(Layer(), q, k, k, None, sliding_window=sliding_window, is_causal=is_causal)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    window = (sliding_window - 1, sliding_window - 1)
    assert_close(out.double(), reference.attention(q, k, k, causal=is_causal, window=window).out)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"output_attentions": True}, "output_attentions"),
        (
            {
                "position_bias": torch.zeros(1, 4, 5, 5),
                "cu_seq_lens_q": torch.tensor([0, 10]),
                "cu_seq_lens_k": torch.tensor([0, 10]),
            },
            "cu_seq_lens_q: expected one row with as many keys as queries where there is a mask or a position bias",
        ),
        ({"cache": object()}, "cache"),
        ({"block_table": torch.zeros(2, 1, dtype=torch.int32)}, "block_table"),
        ({"attention_mask": torch.zeros(2, 5, 5)}, r"attention_mask: expected None, .* got shape \(2, 5, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 5, 5, dtype=torch.long)}, "this model makes its own mask"),
        ({"attention_mask": torch.ones(2, 5, dtype=torch.long)}, "this model makes its own mask"),
        (
            {
                "attention_mask": torch.ones(2, 5, dtype=torch.bool),
                "cu_seq_lens_q": torch.tensor([0, 10]),
                "cu_seq_lens_k": torch.tensor([0, 10]),
            },
            "cu_seq_lens_q: expected None where attention_mask has padding",
        ),
        ({"cu_seq_lens_q": torch.tensor([0, 10])}, "cu_seq_lens_k: expected offsets, as cu_seq_lens_q has, got None"),
        ({"cu_seq_lens_k": torch.tensor([0, 10])}, "cu_seq_lens_q: expected offsets, as cu_seq_lens_k has, got None"),
        ({"attention_mask": torch.zeros(1, 1, 2, 2, dtype=torch.int32)}, "this model makes its own mask"),
        ({"attention_mask": torch.ones(2, 1, 1, 2, dtype=torch.int64)}, "this model makes its own mask"),
        ({"attention_mask": torch.ones(2, 1, 1, 5, dtype=torch.uint8)}, "this model makes its own mask"),
        ({"indices": torch.zeros(2, 5, 3, dtype=torch.long)}, "indices: expected .* attention_mask of shape None"),
        ({"sliding_window": 0}, "sliding_window: expected at least 1, the query's own key, or None, got 0"),
        ({"sliding_window": -1}, "sliding_window: expected at least 1, .*, got -1"),
    ],
)
def test_refusals(kwargs, match):
    with pytest.raises(NotImplementedError, match=match):
        call(**kwargs)


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"dropout": 2.0}, "dropout: expected"),
        ({"softcap": -1.0}, "softcap: expected"),
        ({"scaling": float("nan")}, "scaling: expected"),
        ({"s_aux": torch.zeros(3)}, "s_aux: expected"),
        ({"position_bias": torch.zeros(1, 3, 5, 5)}, "position_bias: expected"),
        (
            {"cu_seq_lens_q": torch.zeros(1, 2).int(), "cu_seq_lens_k": torch.zeros(1, 2).int()},
            "cu_seq_lens_q: expected",
        ),
    ],
)
def test_values_that_are_not_allowed(kwargs, match):
    """A message has the name that the caller has given the argument."""
    with pytest.raises(ValueError, match=match):
        call(**kwargs)


def test_unknown_alignment_is_refused():
    with pytest.raises(ValueError, match="is_causal: expected a bool here or as an attribute of Module"):
        call(torch.nn.Module())


def test_more_keys_than_queries_without_a_mask():
    """A causal layer cannot know where its queries stand; a single query sees every key."""
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 5, 8)
    expected = "attention_mask: expected a mask where a causal layer has fewer queries than keys, 2 and 5, got None"
    with pytest.raises(NotImplementedError, match=expected):
        attention_forward(Layer(), q, k, k, None)
    attention_forward(Layer(), q[:, :, :1], k, k, None)
    attention_forward(Layer(), q, k, k, None, is_causal=False)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_may_be_wider_or_narrower_than_the_keys(kind):
    """A static cache has room for more keys than there are, and a model may make its mask for all of that room."""
    q, k, offsets = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8), torch.tensor([0, 2, 5], dtype=torch.int32)
    mask = torch.rand(1, 1, 5, 9) < 0.7
    mask = mask if kind == "bool" else torch.where(mask, 0.0, -torch.inf)
    for more in ({}, {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}):
        expected, _ = attention_forward(Layer(), q, k, k, mask[..., :5], **more)
        assert torch.equal(attention_forward(Layer(), q, k, k, mask, **more)[0], expected)
    real, wide = torch.tensor([[True, False, True, True, True]]), torch.randn(1, 2, 8, 8)
    wide[:, :, :5] = k
    expected, _ = attention_forward(Layer(), q, k, k, real)
    assert torch.equal(attention_forward(Layer(), q, wide, wide, real)[0], expected)


def runs(*shape):
    """A bool mask in which each row is one run of True, or has none."""
    low, high = torch.randint(-2, shape[-1] + 2, (2, *shape[:-1], 1))
    key = torch.arange(shape[-1])
    return (low <= key) & (key < high)


@pytest.mark.parametrize(
    ("shape", "is_bias"),
    [((2, 1, 5, 9), False), ((1, 1, 5, 6), False), ((2, 1, 1, 6), False), ((2, 4, 5, 6), True), ((2, 1, 5, 1), True)],
)
def test_a_mask_of_runs(shape, is_bias, monkeypatch):
    """Where each query sees neighbors, and the same ones in all heads, ranges say so."""
    seen, attention = [], onepass.api.attention.attention
    monkeypatch.setattr(onepass.api.attention, "attention", lambda *a, **o: seen.append(o) or attention(*a, **o))
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 6, 8)
    for _ in range(10):
        mask = runs(*shape)
        out, _ = attention_forward(Layer(), q, k, k, mask)
        assert ("bias" in seen[-1]) == is_bias
        bias = torch.zeros(2, 4, 5, 6).masked_fill(~mask[..., :6], -torch.inf)
        rows = (t.transpose(1, 2).double() for t in (q, k, k))
        torch.testing.assert_close(out.double(), reference.attention(*rows, bias=bias).out, rtol=1e-4, atol=1e-5)


def test_a_mask_of_runs_with_other_options():
    q, offsets = torch.randn(1, 4, 6, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    options = {
        "position_bias": torch.randn(1, 4, 6, 6),
        "indices": torch.tensor([[0, 3, 5]]).expand(1, 6, 3),
        "s_aux": torch.randn(4),
    }
    for name, value in options.items():
        for more in ({}, {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}):
            mask = runs(1, 1, 6, 8)
            other = torch.where(mask, 0.0, -torch.inf)
            out, expected = (attention_forward(Layer(), q, q, q, m, **{name: value}, **more)[0] for m in (mask, other))
            torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


def test_who_reads_a_mask_of_four_dimensions():
    """The first layer that gets it, and the next one after a change, which torch does not count in inference mode."""
    q, mask = torch.randn(2, 4, 5, 8), torch.ones(5, 5).tril().bool()[None, None].repeat(2, 1, 1, 1)
    counts = []
    for change in (None, None, 1, None, 3):
        if change is not None:
            mask[:, :, change, 0] = not mask[0, 0, change, 0]
        with HostReads() as reads:
            out, _ = attention_forward(Layer(), q, q, q, mask)
        counts.append(reads.count)
        assert_close(out, attention_forward(Layer(), q, q, q, torch.where(mask, 0.0, -torch.inf))[0])
    assert counts == [1, 0, 1, 0, 1]
    room = torch.ones(5, 9).tril().bool()[None, None].repeat(2, 1, 1, 1)
    for start, expected in ((0, 1), (0, 0), (2, 1), (2, 0)):
        part = room[..., start : start + 5]
        with HostReads() as reads, torch.no_grad():
            out, _ = attention_forward(Layer(), q, q, q, part)
        assert reads.count == expected
        assert_close(out, attention_forward(Layer(), q, q, q, torch.where(part, 0.0, -torch.inf))[0])
    with torch.inference_mode():
        mask = torch.ones(1, 1, 5, 5).tril().bool()
        first = attention_forward(Layer(), q, q, q, mask)[0]
        mask[..., 0] = False
        assert not torch.equal(attention_forward(Layer(), q, q, q, mask)[0], first)


@pytest.mark.parametrize("is_padded", [False, True])
def test_shapes_on_the_meta_device(is_padded):
    """Nothing is read from a device that has no values."""
    from transformers import masking_utils

    q = torch.empty(2, 2, 4, 8, device="meta")
    causal = masking_utils.causal_mask_function
    blocks = masking_utils.blockwise_overlay(torch.zeros(2, 4, dtype=torch.int64, device="meta"))
    for function in (causal, masking_utils.bidirectional_mask_function, masking_utils.or_masks(causal, blocks)):
        real = torch.ones(2, 4, dtype=torch.bool, device="meta") if is_padded else None
        mask = padding_mask(2, 4, 4, mask_function=function, attention_mask=real, device="meta")
        assert attention_forward(Layer(), q, q, q, mask)[0].shape == (2, 4, 2, 8)
    own = torch.ones(2, 1, 4, 4, dtype=torch.bool, device="meta")
    assert attention_forward(Layer(), q, q, q, own)[0].shape == (2, 4, 2, 8)
    positions = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    assert attention_forward(Layer(), q, q, q, None, position_ids=positions)[0].shape == (2, 4, 2, 8)


def test_chunks_of_a_bidirectional_mask_are_a_whole_mask():
    from transformers import masking_utils

    chunks = masking_utils.chunked_overlay(2, torch.zeros(1, dtype=torch.int64))
    for first, count in ((masking_utils.bidirectional_mask_function, 8), (masking_utils.causal_mask_function, 6)):
        mask = padding_mask(1, 4, 4, mask_function=masking_utils.and_masks(first, chunks))
        q = torch.randn(1, 2, 4, 8)
        seen = mask.values() == 0
        assert seen.sum() == count
        assert_close(attention_forward(Layer(), q, q, q, mask)[0], attention_forward(Layer(), q, q, q, seen)[0])


def test_blocks_in_other_masks():
    """What is more than blocks in a causal mask, or in its window, is read from the values of the mask."""
    from transformers import masking_utils as masks

    both, causal = masks.and_masks, masks.causal_mask_function
    one, other = (masks.blockwise_overlay(torch.tensor([row])) for row in ([0, 0, 0, -1, 1, 1], [-1, -1, 0, 0, 0, -1]))
    text = masks.or_masks(causal, one)
    for function in (
        masks.or_masks(text, other),
        masks.or_masks(causal, both(one, other)),
        masks.or_masks(masks.bidirectional_mask_function, one),
        both(text, causal),
        both(text, masks.sliding_window_bidirectional_overlay(1)),
        both(masks.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 1]])), text),
        both(text, masks.packed_sequence_mask_function(torch.tensor([[0, 0, 1, 1, 1, 1]]))),
    ):
        mask, q = padding_mask(1, 6, 6, mask_function=function), torch.randn(1, 2, 6, 8)
        expected = attention_forward(Layer(), q, q, q, mask.values() == 0)[0]
        assert_close(attention_forward(Layer(), q, q, q, mask)[0], expected)


def patterns(config):
    """Masks that only a whole mask can represent, made as models make them."""
    from transformers import masking_utils

    config.attention_chunk_size = 4
    arguments = {"config": config, "inputs_embeds": torch.zeros(BATCH, SEQLEN, 32), "past_key_values": None}
    arguments["attention_mask"] = padding("left")
    return {
        "or": masking_utils.create_causal_mask(**arguments, or_mask_function=lambda b, h, i, j: j < 7),
        "and": masking_utils.create_causal_mask(**arguments, and_mask_function=lambda b, h, i, j: (i - j) % 3 < 2),
        "chunks": masking_utils.create_chunked_causal_mask(**arguments),
        "blocks": masking_utils.create_causal_mask(
            **arguments, block_sequence_ids=torch.tensor([-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, 1]).expand(BATCH, -1)
        ),
    }


@pytest.mark.parametrize("name", ["or", "and", "chunks", "blocks"])
def test_masks_with_another_pattern(name):
    """Where every query sees neighbors, ranges of keys say so; else there is a whole mask."""
    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    mask = patterns(ours.config)[name]
    found = mask.pattern.whole if name == "and" else mask.pattern.ranges
    assert found.shape == (BATCH, 1, SEQLEN, SEQLEN if name == "and" else 2)
    out = ours(tokens(), attention_mask=mask, use_cache=False).logits
    expected = eager(tokens(), attention_mask=patterns(eager.config)[name], use_cache=False).logits
    assert_close(out, expected, padding("left").bool())


IMAGES = torch.tensor([0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0]).expand(BATCH, -1)
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}


def gemma3(implementation):
    """A layer with a window of 4, which is shorter than an image, and a layer that sees all."""
    text = SMALL | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    extra = {"text_config": text, "vision_config": VISION}
    return make("Gemma3", extra, implementation, head="ForConditionalGeneration")


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_images(side, monkeypatch):
    """The tokens of an image see each other in both directions, by ranges that come from their numbers alone."""
    made = masks_of_layers(monkeypatch)
    where = torch.ones(BATCH, SEQLEN, dtype=torch.bool) if side == "none" else padding(side).bool()
    results = []
    for implementation in ("eager", register()):
        model = gemma3(implementation)
        mask = None if side == "none" else padding(side)
        out = model(tokens(), attention_mask=mask, token_type_ids=IMAGES, use_cache=False).logits[where]
        results.append((out.detach(), weighted_gradient(model, out)))
    assert [m.pattern.ranges.shape for m in made] == [(BATCH, 1, SEQLEN, 2)] * 2
    for actual, expected in zip(*reversed(results), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_after_images(cache):
    options = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static" if cache == "static" else None}
    options |= {"attention_mask": padding("left"), "token_type_ids": IMAGES * padding("left")}
    generated = [gemma3(name).generate(tokens(), **options) for name in ("eager", register())]
    assert generated[0].shape == (BATCH, SEQLEN + 5)
    assert torch.equal(*generated)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_blocks_need_no_values(side, monkeypatch):
    """The values of the mask are not made, and the host waits at most once. Padding may have any number."""
    from transformers import masking_utils

    monkeypatch.setattr(transformers_masks, "_values", lambda *a: pytest.fail("values of a mask were made"))
    numbers = torch.tensor([-1, 0, 0, -1, 1, 1, 1, -1, -1, 2, -1]).repeat(BATCH, 1)
    if side != "none":
        numbers[padding(side) == 0] = 0
    overlay = masking_utils.blockwise_overlay(numbers)
    window, causal = masking_utils.sliding_window_overlay(2), masking_utils.causal_mask_function
    compositions = {
        masking_utils.or_masks(causal, overlay): [[0, 7], [0, 7], [0, 7]],
        masking_utils.or_masks(masking_utils.and_masks(window, causal), overlay): [[3, 7], [4, 7], [4, 7]],
        masking_utils.and_masks(masking_utils.or_masks(causal, overlay), window): [[3, 7], [4, 7], [5, 7]],
    }
    for function, expected in compositions.items():
        mask = None if side == "none" else padding(side).bool()
        with HostReads() as reads:
            found = padding_mask(BATCH, SEQLEN, SEQLEN, mask_function=function, attention_mask=mask).pattern.ranges
        assert reads.count <= 1
        assert found[0, 0, 4:7].tolist() == expected


@pytest.mark.parametrize("side", ["none", "left", "right", "packed"])
def test_chunks(llama4, side, monkeypatch):
    made = masks_of_layers(monkeypatch)
    where = torch.ones(BATCH, SEQLEN, dtype=torch.bool) if side in ("none", "packed") else padding(side).bool()
    options = {"use_cache": False, "attention_mask": padding(side) if side in ("left", "right") else None}
    if side == "packed":
        options["position_ids"] = torch.stack(
            [packed_positions()[0], torch.arange(SEQLEN), torch.arange(SEQLEN) % 7 + 2]
        )
    results = []
    for model in llama4:
        out = model(tokens(), **options).last_hidden_state[where]
        results.append((out.detach(), weighted_gradient(model, out)))
    assert made[0].pattern.ranges.shape == (BATCH, 1, SEQLEN, 2)
    assert made[1].pattern.ranges is None
    for actual, expected in zip(*reversed(results), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_chunks_in_a_cache(llama4, side, cache, monkeypatch):
    made = masks_of_layers(monkeypatch)
    mask = torch.ones(BATCH, SEQLEN, dtype=torch.long) if side == "none" else padding(side)
    results = []
    for model in llama4:
        if cache == "static":
            past = transformers.StaticCache(config=model.config, max_cache_len=16)
        else:
            past = transformers.DynamicCache(config=model.config)
        parts = []
        for start, end in ((0, 6), (6, 9), (9, 10), (10, 11)):
            given = None if side == "none" else mask[:, :end]
            step = model(tokens()[:, start:end], attention_mask=given, past_key_values=past, use_cache=True)
            parts.append(step.last_hidden_state)
        results.append(torch.cat(parts, 1))
    assert_close(*reversed(results), mask.bool())
    assert all(m.pattern.whole is None for m in made)


def test_chunks_without_a_mask_wait_for_nothing():
    from transformers import masking_utils

    config = make("Llama4Text", LLAMA4, register(), head="Model").config
    arguments = {"config": config, "inputs_embeds": torch.zeros(1, 9, 32), "past_key_values": None}
    with HostReads() as reads:
        assert masking_utils.create_chunked_causal_mask(**arguments, attention_mask=None).pattern.ranges is not None
    assert reads.count == 0


def test_chunks_of_a_compiled_model(llama4, monkeypatch):
    """A cache, as in training with default settings, keeps transformers from looking for packed sequences."""
    eager, ours = llama4
    made = masks_of_layers(monkeypatch)
    torch._dynamo.reset()
    out = torch.compile(ours.forward, backend="eager")(tokens(), use_cache=True).last_hidden_state
    assert_close(out, eager(tokens(), use_cache=True).last_hidden_state)
    assert made[0].pattern.ranges.shape == (BATCH, 1, SEQLEN, 2)
    assert made[1].pattern.whole is made[1].pattern.is_real is None


def test_a_mask_of_three_dimensions_is_refused():
    from transformers import masking_utils

    with pytest.raises(NotImplementedError, match="attention_mask"):
        padding_mask(1, 9, 9, mask_function=masking_utils.causal_mask_function, attention_mask=torch.ones(1, 9, 9))
    q = torch.randn(1, 2, 9, 8)
    for shape in ((), (9,), (1, 9, 9)):
        with pytest.raises(NotImplementedError, match=r"attention_mask: expected None, .* got shape"):
            attention_forward(Layer(), q, q, q, torch.ones(shape, dtype=torch.bool), is_causal=True)


def test_who_reads_positions(monkeypatch):
    """The first layer of a prompt without a mask reads the positions, and no layer does where there is a mask."""
    read, module = [], sys.modules[attention_forward.__module__]
    monkeypatch.setattr(
        module,
        "starts_by_positions",
        lambda p, *a, real=module.starts_by_positions: read.append(p.shape) or real(p, *a),
    )
    model = make("Llama", {}, register()).eval()
    prompt = tokens(batch=1)
    model.generate(prompt, do_sample=False, max_new_tokens=3)
    assert read == [prompt.shape]
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            model(prompt, attention_mask=torch.ones_like(prompt))
    assert len(read) == 1


def random_blocks(rng, batch, tokens):
    """(batch, tokens): the number of each token's block, below 0 outside; some blocks are in several parts."""
    rows = []
    for _ in range(batch):
        row, number, step = [], 0, rng.choice([1, 0])
        while len(row) < tokens:
            row += [rng.choice([-1, number])] * rng.randint(1, 4)
            number += step
        rows.append(row[:tokens])
    return torch.tensor(rows)


def random_mask(rng):
    """The arguments of a mask: causal, a window, chunks, blocks, packed sequences, padding, a cache with room."""
    from transformers import masking_utils as masks

    batch, q_length = rng.randint(1, 3), rng.choice([1, 2, 7, 11])
    is_causal, is_packed, kind = rng.random() < 0.7, rng.random() < 0.25, rng.choice(["full", "window", "chunks"])
    kind = "full" if kind == "chunks" and (is_packed or not is_causal) else kind
    offset, room = (rng.choice([0, 0, 3, 9]), rng.choice([0, 0, 4])) if is_causal and not is_packed else (0, 0)
    other_keys = 0 if is_causal or is_packed else rng.choice([0, 0, 3])
    gone = 2 if offset and not room and rng.random() < 0.4 else 0  # keys that a sliding cache has dropped
    kv_length = q_length + offset + room + other_keys
    padded = None
    if not is_packed and rng.random() < 0.7:
        padded = torch.zeros(batch, kv_length - room, dtype=torch.bool)
        for row in padded:
            first, last = sorted(rng.sample(range(len(row) + 1), 2))
            how = rng.choice(["left", "right", "both", "holes", "none"])
            row[first if how in ("left", "both") else 0 : last if how in ("right", "both") else None] = True
            if how == "holes":
                row[:] = torch.tensor([rng.random() < 0.7 for _ in row])
    size = rng.randint(1, 5)
    conditions = [masks.causal_mask_function if is_causal else masks.bidirectional_mask_function]
    if kind == "window":
        overlay = masks.sliding_window_overlay if is_causal else masks.sliding_window_bidirectional_overlay
        conditions.insert(0, overlay(size))
    if kind == "chunks":
        left = torch.zeros(batch, dtype=torch.int64) if padded is None else (padded.cumsum(-1) == 0).sum(-1)
        conditions.insert(0, masks.chunked_overlay(size, left))
    if is_packed:
        ids = torch.stack([torch.tensor(sorted(rng.choices(range(3), k=q_length))) for _ in range(batch)])
        conditions.append(masks.packed_sequence_mask_function(ids))
    function = masks.and_masks(*conditions)
    if is_causal and not is_packed and rng.random() < 0.6:
        overlay = masks.blockwise_overlay(random_blocks(rng, batch, kv_length))
        if rng.random() < 0.5:
            function, kind = masks.or_masks(function, overlay), f"{kind}, or blocks"
        else:  # a window or chunks cut blocks, too
            conditions[-1] = masks.or_masks(masks.causal_mask_function, overlay)
            function, kind = masks.and_masks(*reversed(conditions)), f"{kind}, and blocks"
    sizes = {"batch_size": batch, "q_length": q_length, "kv_length": kv_length - gone, "kv_offset": gone}
    q_offset = torch.tensor(offset) if room and rng.random() < 0.5 else offset
    return sizes | {"q_offset": q_offset, "mask_function": function, "attention_mask": padded}, is_causal, kind


@pytest.mark.parametrize("may_wait", [True, False])
def test_random_masks(may_wait, monkeypatch):
    """What real queries see is what the values of the mask say, with a position bias or without."""
    from transformers import masking_utils

    from onepass.integrations import transformers as integration

    if not may_wait:  # as while a CUDA graph is captured
        for module in (integration, transformers_masks):
            monkeypatch.setattr(module, "may_wait", lambda t: False)
    for seed in range(150):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        arguments, is_causal, kind = random_mask(rng)
        skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        seen = masking_utils.sdpa_mask(**arguments, **skips, device="cpu")
        batch, _, q_length, kv_length = seen.shape
        q, k, v = (torch.randn(batch, h, n, 8) for h, n in ((4, q_length), (2, kv_length), (2, kv_length)))
        bias = torch.randn(1, 4, q_length, kv_length) if rng.random() < 0.2 else None
        layer = Layer()
        layer.is_causal = is_causal
        out, _ = attention_forward(layer, q, k, v, padding_mask(**arguments, device="cpu"), position_bias=bias)
        hidden = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)
        hidden = hidden if bias is None else hidden + bias
        tensors = (t.transpose(1, 2).double() for t in (q, k, v))
        expected = reference.attention(*tensors, bias=hidden.expand(batch, 4, -1, -1)).out
        padded, offset = arguments["attention_mask"], int(arguments["q_offset"])
        is_real = seen.any(-1)[:, 0]
        if padded is not None and is_causal:
            own = padded[:, offset : offset + q_length]
            is_real &= own | (~own.any(-1, keepdim=True) & ("blocks" not in kind))
        torch.testing.assert_close(out.double()[is_real], expected[is_real], rtol=1e-4, atol=1e-5, msg=f"{seed} {kind}")

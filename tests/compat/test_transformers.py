"""transformers models with onepass as their attention agree with eager attention."""

import os
import random
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

import onepass.api.attention  # noqa: E402
from onepass import reference  # noqa: E402
from onepass.api import fast_path  # noqa: E402
from onepass.api.decode import attention_decode  # noqa: E402
from onepass.api.repeated import RepeatableDecode, repeatable_decode  # noqa: E402
from onepass.integrations import transformers_masks  # noqa: E402
from onepass.integrations.transformers import attention_forward, padding_mask, register  # noqa: E402
from onepass.integrations.transformers_masks import Pattern, ShortMask  # noqa: E402

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# Each model tests one feature: GQA; a window; window, softcap and a scale that is not head_dim ** -0.5, alternating
# with full layers; sinks with alternating windows.
MODELS = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": 4}),
    "gemma2": ("Gemma2", {"sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3}),
    "gpt_oss": ("GptOss", {"sliding_window": 4, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
BATCH, SEQLEN = 3, 11
LENGTHS = (11, 6, 9)


def make(family, extra, attn_implementation, head="ForCausalLM"):
    """A tiny model with random weights, which are equal for all attention implementations."""
    config = getattr(transformers, f"{family}Config")(**(SMALL | extra))
    torch.manual_seed(0)
    model = getattr(transformers, family + head)._from_config(config, attn_implementation=attn_implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0, 0.3)  # scores are far enough from 0 for a wrong mask to show
    return model.eval()


@pytest.fixture(params=MODELS)
def decoders(request):
    family, extra = MODELS[request.param]
    return [make(family, extra, implementation) for implementation in ("eager", register())]


def tokens(batch=BATCH, seqlen=SEQLEN):
    return torch.randint(2, 97, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padding(side):
    """(batch, seqlen) of 0 and 1, LENGTHS ones in each row."""
    position = torch.arange(SEQLEN)
    rows = [position < n if side == "right" else position >= SEQLEN - n for n in LENGTHS]
    return torch.stack(rows).long()


def assert_close(actual, expected, where=None):
    if where is not None:
        actual, expected = actual[where], expected[where]
    assert actual.isfinite().all()
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5, f"expected an error of at most 1e-5, relative to the largest value, got {error:.2e}"


def test_register_twice_returns_the_name():
    assert register() == register() == "onepass"
    assert register("onepass_too") == "onepass_too"
    assert transformers.AttentionInterface()["onepass_too"] is attention_forward
    assert transformers.AttentionMaskInterface()["onepass_too"] is padding_mask


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_logits(decoders, side):
    mask = None if side == "none" else padding(side)
    eager, ours = (model(tokens(), attention_mask=mask, use_cache=False).logits for model in decoders)
    assert_close(ours, eager, None if mask is None else mask.bool())


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_gradients(decoders, side):
    where = torch.ones(BATCH, SEQLEN, dtype=torch.bool) if side == "none" else padding(side).bool()
    for model in decoders:
        logits = model(tokens(), attention_mask=where.long(), use_cache=False).logits
        logits[where].square().sum().backward()
    eager, ours = (dict(model.named_parameters()) for model in decoders)
    for name, parameter in eager.items():
        if parameter.grad is not None and parameter.grad.any():
            assert_close(ours[name].grad, parameter.grad)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_from_left_padding(decoders, cache):
    """Greedy generation of 12 tokens fills the windows of 4; the static cache never fills up."""
    generated = [
        model.generate(
            tokens(),
            attention_mask=padding("left"),
            max_new_tokens=12,
            do_sample=False,
            cache_implementation=cache if cache == "static" else None,
        )
        for model in decoders
    ]
    assert generated[0].shape == (BATCH, SEQLEN + 12)
    assert torch.equal(*generated)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_cached_steps(decoders, cache, side):
    """Prefill, then several tokens at once, then one: there are fewer queries than keys, and fewer keys than slots."""
    mask = torch.ones(BATCH, SEQLEN, dtype=torch.long) if side == "none" else padding(side)
    results = []
    for model in decoders:
        past = (
            transformers.StaticCache(config=model.config, max_cache_len=16)
            if cache == "static"
            else transformers.DynamicCache(config=model.config)
        )
        parts = []
        for start, end in ((0, 6), (6, 10), (10, 11)):
            step_mask = None if side == "none" else mask[:, :end]
            step = model(tokens()[:, start:end], attention_mask=step_mask, past_key_values=past, use_cache=True)
            parts.append(step.logits)
        results.append(torch.cat(parts, 1))
    eager, ours = results
    assert_close(ours, eager, mask.bool())


def test_padding_between_real_tokens(decoders):
    """Right-padded prompts that are continued."""
    mask = padding("right")
    mask[:, -1] = 1
    eager, ours = (model(tokens(), attention_mask=mask).logits for model in decoders)
    assert_close(ours, eager, mask.bool())


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_of_four_dimensions(decoders, kind):
    """A caller's own mask alone says what a query sees; here also keys to its right."""
    mask = torch.rand(BATCH, 1, SEQLEN, SEQLEN, generator=torch.Generator().manual_seed(2)) < 0.7
    mask |= torch.eye(SEQLEN, dtype=torch.bool)
    additive = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    eager, ours = decoders
    out = ours(tokens(), attention_mask=mask if kind == "bool" else additive, use_cache=False).logits
    assert_close(out, eager(tokens(), attention_mask=additive, use_cache=False).logits)


def test_dropout_in_training(decoders):
    """Equal seeds give equal results, and the mean over many seeds is the result without dropout."""
    _, model = decoders
    module = Layer()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    expected, _ = attention_forward(module, q, k, k, None)
    outs = [attention_forward(module, q, k, k, None, dropout=0.5)[0] for _ in range(800)]
    assert not torch.equal(*outs[:2])
    error = (torch.stack(outs).mean(0) - expected).abs()
    assert (error <= 6 * torch.stack(outs).std(0) / 800**0.5 + 1e-6).all()
    for module in model.modules():
        module.attention_dropout = 0.5
    model.train()
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(model(tokens(), attention_mask=padding("left")).logits)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize("mask", ["none", "left", "right", "holes", "whole"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_position_bias(mask, is_causal):
    """A learned bias beside padding, with its gradient."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
    masks = {
        "none": torch.ones(2, 5),
        "left": torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]),
        "right": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        "holes": torch.tensor([[1, 0, 1, 1, 1], [0, 1, 1, 0, 1]]),
    }
    masks["whole"] = masks["holes"]
    is_real = masks[mask].bool()
    seen = is_real[:, None, None] & (torch.ones(5, 5).tril().bool() | (not is_causal))
    results = []
    for ours in (True, False):
        bias = torch.randn(1, 4, 5, 5, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if ours:
            given = {"none": None, "whole": seen}.get(mask, is_real)
            out, _ = attention_forward(Layer(), q, k, k, given, position_bias=bias, is_causal=is_causal)
        else:
            total = torch.where(seen, bias, -torch.inf).double()
            out = torch.nn.functional.scaled_dot_product_attention(
                q.double(), k.double(), k.double(), attn_mask=total, enable_gqa=True
            ).transpose(1, 2)
        where = is_real if is_causal else torch.ones_like(is_real)
        out[where].square().sum().backward()
        results.append((out[where], bias.grad))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected.to(actual.dtype))


PACKED = (4, 1, 6)


def packed_positions():
    return torch.cat([torch.arange(n) for n in PACKED])[None]


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


def test_a_jump_of_positions_cuts_nothing_in_a_cache():
    """Without a cache transformers takes a jump for the start of a sequence, which its own implementations do, too."""
    eager, ours = (make("Llama", {}, implementation) for implementation in ("eager", register()))
    jump = torch.cat((torch.arange(8), torch.arange(40, 43)))[None]
    for use_cache in (False, True):
        expected = eager(tokens(1), position_ids=jump, use_cache=use_cache).logits
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                assert_close(ours(tokens(1), position_ids=jump, use_cache=use_cache).logits, expected)


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder(side):
    extra = {"type_vocab_size": 2, "num_key_value_heads": None}
    mask = None if side == "none" else padding(side)
    eager, ours = (
        make("Bert", extra, implementation, head="Model")(tokens(), attention_mask=mask).last_hidden_state
        for implementation in ("eager", register())
    )
    assert_close(ours, eager, None if mask is None else mask.bool())


@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_encoder_with_a_window(side):
    extra = {"local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 1}
    mask = None if side == "none" else padding(side)
    eager, ours = (
        make("ModernBert", extra, implementation, head="Model")(tokens(), attention_mask=mask).last_hidden_state
        for implementation in ("eager", register())
    )
    assert_close(ours, eager, None if mask is None else mask.bool())


@pytest.mark.parametrize(("side", "is_compiled"), [("none", False), ("left", False), ("right", False), ("right", True)])
def test_encoder_whose_window_includes_both_ends(side, is_compiled):
    """T5Gemma gives its layers another window than its mask function has; the mask counts."""
    sizes = {name: value for name, value in SMALL.items() if name not in ("max_position_embeddings", "eos_token_id")}
    sizes |= {"sliding_window": 3, "eos_token_id": 2}
    config = transformers.T5GemmaConfig(encoder=sizes, decoder=sizes, vocab_size=97)
    mask = None if side == "none" else padding(side)
    results = []
    torch._dynamo.reset()
    for implementation in ("eager", register()):
        torch.manual_seed(0)
        encoder = transformers.T5GemmaModel._from_config(config, attn_implementation=implementation).eval().encoder
        forward = torch.compile(encoder.forward, backend="eager") if is_compiled else encoder
        results.append(forward(tokens(), attention_mask=mask).last_hidden_state)
    assert_close(*reversed(results), None if mask is None else mask.bool())


@pytest.mark.parametrize("side", ["left", "right"])
def test_cross_attention(side):
    """Encoder and decoder have equal lengths: padding of the keys must not be taken for padding of the queries."""
    extra = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 1}
    extra |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    mask = padding(side)
    eager, ours = (
        make("Bart", extra, implementation, head="Model")(
            tokens(), attention_mask=mask, decoder_input_ids=tokens(), use_cache=False
        ).last_hidden_state
        for implementation in ("eager", register())
    )
    assert_close(ours, eager)


# --- what waits for the device, and what decodes ---


class HostReads(TorchDispatchMode):
    """Counts operators whose result the host waits for."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in self.NAMES
        return function(*args, **(kwargs or {}))


# where the integration finds attention_decode: by itself, and in calls that later layers repeat
DECODE_MODULES = sys.modules[attention_forward.__module__], sys.modules[attention_decode.__module__]


@pytest.fixture
def calls(monkeypatch):
    """The calls of attention and decoding, which compute nothing: what they read is a backend's affair."""
    made = []
    for owner, name in ((onepass.api.attention, "attention"), (onepass.api.attention, "attention_varlen")):
        monkeypatch.setattr(owner, name, lambda q, k, v, name=name, **options: made.append((name, options)) or q)
    for module in DECODE_MODULES:
        monkeypatch.setattr(
            module, "attention_decode", lambda q, k, v, **options: made.append(("attention_decode", options)) or q
        )
    return made


@pytest.mark.parametrize("side", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_layers_read_nothing(side, is_causal, calls):
    """The mask function reads once whether padding is on one side; what a layer does needs no value."""
    from transformers import masking_utils

    mask = None if side == "none" else padding("left" if side == "holes" else side)
    if side == "holes":
        mask[:, 7] = 0
    q, k = torch.randn(BATCH, 4, SEQLEN, 8), torch.randn(BATCH, 2, SEQLEN, 8)
    function = masking_utils.causal_mask_function if is_causal else masking_utils.bidirectional_mask_function
    with HostReads() as reads, torch.no_grad():
        found = padding_mask(BATCH, SEQLEN, SEQLEN, mask_function=function, attention_mask=mask)
        assert reads.count <= 3  # three flags of one tensor
        reads.count = 0
        attention_forward(Layer(), q, k, k, found, is_causal=is_causal)
        last = ShortMask.make(found.pattern, found.make_values, (BATCH, 1, 1, SEQLEN), found.dtype, "cpu")
        attention_forward(Layer(), q[:, :, -1:], k, k, last, is_causal=is_causal)
        assert reads.count == 0
    names = [name for name, _ in calls]
    assert names[0] == "attention"
    is_whole = side == "holes"
    assert ("bias" in calls[0][1]) == is_whole
    if side == "left":
        assert ("seqstart_k" if is_causal else "key_ranges") in calls[0][1]
    if side == "none" or (side == "left" and is_causal) or (side == "right" and not is_causal):
        assert names[1] == "attention_decode"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_single_queries_decode(decoders, cache, monkeypatch):
    """Each layer of each step decodes; the second one of a step repeats what the first has done, without sinks."""
    made, module = [], sys.modules[attention_forward.__module__]
    for function in (attention_decode, repeatable_decode):
        monkeypatch.setattr(
            module,
            function.__name__,
            lambda q, *a, real=function, **o: made.append((q.shape[1], o)) or real(q, *a, **o),
        )
    repeated, again = [], RepeatableDecode.again
    monkeypatch.setattr(
        RepeatableDecode, "again", lambda *a: repeated.append((a[1].shape[1], again(*a))) or repeated[-1][1]
    )
    _, ours = decoders
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static" if cache == "static" else None}
    fast_path.forget()
    ours.generate(tokens(), attention_mask=padding("left"), **options)
    steps = [o for seqlen, o in made if seqlen == 1]
    assert all("bias" not in o for o in steps)
    repeats = [out for seqlen, out in repeated if seqlen == 1]
    assert all(out is not None for out in repeats)
    assert len(steps) + len(repeats) == 2 * 5  # layers and steps after the prompt
    if ours.config.model_type == "llama":
        assert len(repeats) == 4  # the first step finds out what kind of call it is


@pytest.mark.parametrize("seed", range(40))
def test_left_padding_has_the_form_of_the_general_way(seed, monkeypatch):
    """The short way for left padding finds what the general way finds, and leaves all other masks to it."""
    from transformers.masking_utils import causal_mask_function

    draw = random.Random(seed)
    batch, seqlen = draw.randint(1, 3), draw.randint(1, 8)
    offset, slots = seqlen - draw.randint(1, min(3, seqlen)), draw.randint(0, 2)
    mask = torch.ones(batch, seqlen, dtype=torch.bool)
    for row in mask:
        place = draw.randint(0, seqlen)
        kind = draw.choice(["whole", "left", "left", "right", "holes"])
        row[:place] &= kind != "left"
        row[place:] &= kind != "right"
        row[draw.randrange(seqlen)] &= kind != "holes"
    arguments = {"mask_function": causal_mask_function, "attention_mask": mask}
    quick = transformers_masks._left_padding
    for start in (offset, torch.tensor(offset)):
        forms = []
        for way in (quick, lambda *a: None):
            monkeypatch.setattr(transformers_masks, "_left_padding", way)
            forms.append(padding_mask(batch, seqlen - offset, seqlen + slots, start, **arguments).pattern)
        for one, other in zip(*forms, strict=True):
            if isinstance(one, torch.Tensor):
                assert one.dtype == other.dtype
                assert torch.equal(one, other)
            else:
                assert one == other


def test_what_a_mask_keeps(monkeypatch):
    """A mask keeps what layers have made of it for one forward, and keeps nothing for later runs of a CUDA graph."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16)

    def mask(first, end):
        pattern = Pattern(is_causal=True, first=torch.tensor(first).int(), end=torch.tensor(end).int())
        return ShortMask.make(pattern, lambda: None, (2, 1, 1, 9), torch.float32, "cpu")

    def run(mask, layer):
        with torch.no_grad():
            return attention_forward(layer, q, k, k, mask)[0]

    layers = Layer(), Layer(), Layer()
    one, two = mask([3, 1], [9, 7]), mask([2, 0], [8, 6])
    run(one, layers[0])  # the first call of its kind
    before, other = run(one, layers[1]), run(two, layers[0])
    assert torch.equal(run(one, layers[2]), before)
    assert not torch.equal(other, before)
    for name in ("first", "end"):
        getattr(one.pattern, name).sub_(1)
    assert torch.equal(run(one, layers[0]), other)
    # where the mask of the graph's next run may be another, layers compute from it
    monkeypatch.setattr(sys.modules[attention_forward.__module__], "may_wait", lambda t: False)
    monkeypatch.setattr(RepeatableDecode, "again", lambda *a: pytest.fail("a call of another run was repeated"))
    assert torch.equal(run(one, layers[1]), other)


def masks_of_layers(monkeypatch):
    """What the layers of models get from now on as their masks."""
    made, module = [], sys.modules[attention_forward.__module__]

    def spy(layer, query, key, value, attention_mask, **kwargs):
        made.append(attention_mask)
        return attention_forward(layer, query, key, value, attention_mask, **kwargs)

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "onepass", spy)
    monkeypatch.setattr(module, "attention_forward", spy)  # what register() gives to transformers
    return made


def weighted_gradient(model, out):
    """The gradient of a model's embedding; the weights are random since a norm's output has a constant square."""
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    return torch.autograd.grad((out * weights).sum(), model.get_input_embeddings().weight)[0]


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(("name", "side"), [("llama", "left"), ("mistral", "holes"), ("gemma2", "right")])
def test_padding_of_a_compiled_model(name, side, monkeypatch):
    """No mask is dense: each key is real or not, and layers know causal and window."""
    mask = padding("left" if side == "holes" else side)
    if side == "holes":
        mask[:, 7] = 0
    family, extra = MODELS[name]
    made = masks_of_layers(monkeypatch)
    torch._dynamo.reset()
    results = []
    for implementation in (register(), "eager"):
        model = make(family, extra, implementation)
        forward = torch.compile(model.forward, backend="eager") if implementation == "onepass" else model
        logits = forward(tokens(), attention_mask=mask, use_cache=False).logits[mask.bool()]
        results.append((logits.detach(), weighted_gradient(model, logits)))
    assert all(m.pattern.is_real.shape == (BATCH, SEQLEN) and m.pattern.whole is None for m in made)
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_export(strict):
    """In a non-strict export every tensor is a fake one, whose class a mask cannot have, too."""

    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, mask):
            return self.model(ids, attention_mask=mask, use_cache=False).logits

    mask = padding("left")
    one = {"num_hidden_layers": 1}
    eager, ours = (Logits(make("Llama", one, implementation)) for implementation in ("eager", register()))
    batch = torch.export.Dim("batch", min=2, max=8)
    with torch.no_grad():
        program = torch.export.export(ours, (tokens(), mask), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
        rows = slice(0, 2)
        out = program.module()(tokens()[rows], mask[rows])
        assert_close(out, eager(tokens()[rows], mask[rows]), mask[rows].bool())


def test_a_mask_that_is_ready_stays_as_it_is():
    """transformers gives masks of a generation step to the model, which asks for its mask again."""
    from transformers import masking_utils

    function = masking_utils.causal_mask_function
    first = padding_mask(BATCH, SEQLEN, SEQLEN, mask_function=function, attention_mask=padding("left"))
    assert first.pattern.first.tolist() == [SEQLEN - n for n in LENGTHS]
    assert padding_mask(BATCH, SEQLEN, SEQLEN, mask_function=function, attention_mask=first) is first


# --- models that compute with their mask ------------------------------------------------------------------------------


def causal_mask(dtype=torch.float32):
    from transformers import masking_utils

    return padding_mask(2, 4, 4, mask_function=masking_utils.causal_mask_function, dtype=dtype)


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
    indices = torch.tensor([[0, 3], [0, -1], [1, 2], [3, 0]]).expand(2, 4, 2)
    chosen = torch.tensor([[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [1, 0, 0, 1]]).bool()  # and not in the future
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


# --- refusals ---------------------------------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    is_causal = True


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


def test_harmless_arguments_pass():
    out, weights = call(use_cache=True, output_attentions=False, position_bias=None)
    assert out.shape == (2, 5, 4, 8)
    assert weights is None


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


def test_a_whole_mask_needs_no_alignment():
    q, mask = torch.randn(1, 2, 5, 8), torch.rand(1, 1, 5, 5) < 0.7
    out, _ = attention_forward(torch.nn.Module(), q, q, q, mask)
    assert torch.equal(out, attention_forward(Layer(), q, q, q, mask)[0])


def test_more_keys_than_queries_without_a_mask():
    """A causal layer cannot know where its queries stand; a single query sees every key."""
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match="attention_mask: expected a mask where a causal layer has 2 queries"):
        attention_forward(Layer(), q, k, k, None)
    attention_forward(Layer(), q[:, :, :1], k, k, None)
    attention_forward(Layer(), q, k, k, None, is_causal=False)


def test_output_attentions_of_a_model_is_refused():
    with pytest.raises(NotImplementedError, match="output_attentions"):
        make("Llama", {}, register())(tokens(), output_attentions=True)


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


LLAMA4 = {
    "attention_chunk_size": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],  # the first layer sees chunks, the second one all
    "interleave_moe_layer_step": 2,
}


@pytest.fixture
def llama4():
    """Models whose first layer sees chunks of 4 keys: eager, and with onepass."""
    return [make("Llama4Text", LLAMA4, name, head="Model") for name in ("eager", register())]


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


def test_a_mask_of_a_single_query():
    """A step of generation has the bounds of its keys, which need not end at the query's own key."""
    from transformers import masking_utils

    causal = masking_utils.causal_mask_function
    with_blocks = masking_utils.or_masks(causal, lambda b, h, i, j: j == 2)
    without_itself = masking_utils.and_masks(causal, lambda b, h, i, j: j < 5)
    q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 9, 8)
    for function, end in ((with_blocks, 9), (without_itself, 5)):
        found = padding_mask(1, 1, 9, q_offset=8, mask_function=function)
        assert (found.pattern.first.tolist(), found.pattern.end.tolist()) == ([0], [end])
        out, _ = attention_forward(Layer(), q, k, k, found)
        seen = k[:, :, :end].transpose(1, 2)
        assert_close(out.double(), reference.attention(q.transpose(1, 2), seen, seen).out)


def test_one_chunk_is_causal():
    from transformers import masking_utils

    config = make("Llama", {"attention_chunk_size": 9}, register()).config
    arguments = {"config": config, "inputs_embeds": torch.zeros(1, 9, 32), "past_key_values": None}
    assert masking_utils.create_chunked_causal_mask(**arguments, attention_mask=None).pattern.ranges is None


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

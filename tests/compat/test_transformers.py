"""transformers models with onepass as their attention agree with eager attention."""

import random
import sys

import pytest
import torch
from tiny_transformers import (
    BATCH,
    LENGTHS,
    MODELS,
    SEQLEN,
    SMALL,
    HostReads,
    Layer,
    assert_close,
    make,
    masks_of_layers,
    padding,
    tokens,
    weighted_gradient,
)

transformers = pytest.importorskip("transformers")

import onepass.api.attention  # noqa: E402
from onepass.api import fast_path  # noqa: E402
from onepass.api.decode import attention_decode  # noqa: E402
from onepass.api.repeated import RepeatableDecode, repeatable_decode  # noqa: E402
from onepass.integrations import transformers_masks  # noqa: E402
from onepass.integrations.transformers import attention_forward, padding_mask, register  # noqa: E402
from onepass.integrations.transformers_masks import Pattern, ShortMask  # noqa: E402


def test_register_twice_returns_the_name():
    assert register() == register() == "onepass"
    assert register("onepass_too") == "onepass_too"
    assert transformers.AttentionInterface()["onepass_too"] is attention_forward
    assert transformers.AttentionMaskInterface()["onepass_too"] is padding_mask


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
    """Equal seeds give equal results, and the mean over many entries is the result without dropout."""
    _, model = decoders
    module = Layer()
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    expected, _ = attention_forward(module, q, k, k, None)
    entries = [t.expand(800, *t.shape[1:]) for t in (q, k, k)]
    out, other = (attention_forward(module, *entries, None, dropout=0.5)[0] for _ in range(2))
    assert not torch.equal(out, other)
    assert not torch.equal(*out[:2])
    error = (out.mean(0) - expected[0]).abs()
    assert (error <= 6 * out.std(0) / 800**0.5 + 1e-6).all()
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


@pytest.mark.parametrize("kind", ["dense", "packed", "whole", "decoding"])
def test_all_options_of_a_layer_reach_its_call(kind, calls):
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6 if kind != "decoding" else 9, 8)
    sinks, offsets = torch.randn(4), [torch.tensor([0, 2, 6], dtype=torch.int32) for _ in range(2)]
    lengths = dict(zip(("cu_seq_lens_q", "cu_seq_lens_k"), offsets, strict=True)) if kind == "packed" else {}
    lengths |= {"max_length_q": 4, "max_length_k": 5} if lengths else {}
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool) if kind == "whole" else None
    given = {"scaling": 0.3, "softcap": 2.0, "s_aux": sinks, "deterministic": True, "is_causal": kind != "decoding"}
    given["dropout"] = 0.0 if kind == "decoding" else 0.1
    with torch.no_grad():
        attention_forward(Layer(), q, k, k, mask, **given, **lengths)
    ((name, options),) = calls
    assert name == {"packed": "attention_varlen", "decoding": "attention_decode"}.get(kind, "attention")
    assert (options["softmax_scale"], options["softcap"]) == (0.3, 2.0)
    assert options["sinks"] is sinks
    assert options["causal"] == (kind in ("dense", "packed"))
    if kind != "decoding":  # which is not random, and has no backward
        assert (options["dropout_p"], options["deterministic"]) == (0.1, True)
    if kind == "packed":
        assert (options["cu_seqlens_q"], options["cu_seqlens_k"]) == tuple(offsets)
        assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (4, 5)


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


OWN_OPTIONS = {
    "scaling": (0.5, 2.0),
    "softcap": (0.5, 2.0),
    "s_aux": (None, torch.linspace(-1, 1, 4)),
    "position_bias": (None, torch.linspace(-2, 2, 36).view(1, 4, 1, 9)),
    "indices": (None, torch.tensor([[[0, 3]], [[1, 2]]])),
}


@pytest.mark.parametrize("option", OWN_OPTIONS)
def test_a_layer_with_an_option_of_its_own_repeats_no_call(option):
    """Layers of a model need not be alike: GPT-2 may divide the scale by a layer's number."""
    q, k = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 9, 16)

    def run(mask, value):
        with torch.no_grad():
            return attention_forward(Layer(), q, k, k, mask, **{option: value})[0]

    def mask():
        return ShortMask.make(Pattern(is_causal=True), lambda: torch.zeros(2, 1, 1, 9), (2, 1, 1, 9), q.dtype, "cpu")

    together, (usual, other) = mask(), OWN_OPTIONS[option]
    assert not torch.equal(run(mask(), usual), run(mask(), other))
    for value in (usual, usual, other, usual):  # the first call of its kind is not repeated
        assert torch.equal(run(together, value), run(mask(), value))


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

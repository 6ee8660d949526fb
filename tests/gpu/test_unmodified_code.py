"""transformers' models with attn_implementation="flash_attention_2", "_3" and "_4", unchanged, under `compat.install`.

transformers asks for a CUDA device before it imports flash-attn. On the CPU, torch.cuda.is_available answers yes.
"""

import functools
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, ON_GPU, needs_hopper, size

import onepass
from onepass import compat

transformers = pytest.importorskip("transformers", reason="needs transformers")

from transformers import modeling_flash_attention_utils as flash_utils  # noqa: E402

pytestmark = needs_hopper

SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = size(50, 5)
# grouped heads; a window; a window in every second layer, a softcap and a scale of its own at head_dim 256
MODELS = {
    "llama": ("Llama", {"head_dim": 64}),
    "mistral": ("Mistral", {"head_dim": 128, "sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 256, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 30},
    ),
}
SEQLEN = size(150, 17)
LENGTHS = (SEQLEN, SEQLEN // 2, SEQLEN - 3)
NUM_NEW = size(24, 7)
VERSIONS = 2, 3, 4
CLOSE = 1e-4  # relative to the largest value, in float32 after two layers; a wrong mask gives 1e-2 and more
PADDED, EVEN = "flash_attn_varlen_func", "flash_attn_func"  # what transformers calls with padding, and without


@pytest.fixture(autouse=True)
def called(monkeypatch):
    """Install flash-attn's modules for a test; the names of their functions that transformers has called."""
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    names, load = [], flash_utils._lazy_imports

    def watched(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            names.append(function.__name__)
            with onepass.use_backend(BACKEND):  # refused, if another backend would have to compute it
                return function(*args, **kwargs)

        return call

    def load_watched(*arguments, **options):
        functions = load(*arguments, **options)
        assert all(f.__module__.startswith("onepass.compat.flash_attn") for f in functions[:2])
        return *map(watched, functions[:2]), *functions[2:]

    monkeypatch.setattr(flash_utils, "_lazy_imports", load_watched)
    with compat.install(replace=True):
        yield names


def make(name, implementation, dtype):
    """A tiny model with random weights, which are equal for all attention implementations up to their dtype."""
    family, extra = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**(SMALL | extra))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(0.2 * torch.randn(parameter.shape))  # scores are far enough from 0 for a mask to show
    assert model.config._attn_implementation == implementation
    return model.to(DEVICE, dtype).eval()


def tokens():
    return torch.randint(2, 97, (len(LENGTHS), SEQLEN), generator=torch.Generator().manual_seed(1)).to(DEVICE)


def padding(side):
    """(batch, seqlen) of 0 and 1: LENGTHS ones in each row at the other end, or None without padding."""
    if side == "none":
        return None
    position = torch.arange(SEQLEN, device=DEVICE)
    return torch.stack([position < n if side == "right" else position >= SEQLEN - n for n in LENGTHS]).long()


def results(name, implementation, dtype, mask, **inputs):
    """Logits and gradients of all parameters, in float32. Rows of padding have no part in them."""
    model = make(name, implementation, dtype)
    logits = model(attention_mask=mask, use_cache=False, **inputs).logits.float()
    logits = logits if mask is None else logits[mask.bool()]
    logits.square().mean().backward()
    found = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
    assert len(found) > 10
    return {"logits": logits.detach(), **found}


def error(found, expected):
    """The largest error of each result, relative to the largest value."""
    assert found.keys() == expected.keys()
    return {n: float((t - expected[n]).abs().max() / expected[n].abs().max()) for n, t in found.items()}


def check(name, version, mask, **inputs):
    """float32 to float32's accuracy; bfloat16 within twice the error of eager attention in bfloat16."""
    ours, expected = f"flash_attention_{version}", results(name, "eager", torch.float32, mask, **inputs)
    wrong = {n: e for n, e in error(results(name, ours, torch.float32, mask, **inputs), expected).items() if e > CLOSE}
    assert not wrong
    roughly = error(results(name, "eager", BF16, mask, **inputs), expected)
    found = error(results(name, ours, BF16, mask, **inputs), expected)
    # rounding of bfloat16 beside it: a small error of the other implementation may be luck
    wrong = {n: (e, roughly[n]) for n, e in found.items() if e > 2 * roughly[n] + torch.finfo(BF16).eps}
    assert not wrong


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_of_padded_batches(called, name, version, side):
    check(name, version, padding(side), input_ids=tokens())
    assert set(called) == {EVEN if side == "none" else PADDED}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_packed_sequences(called, name, version):
    """Sequences that DataCollatorWithFlattening would pack: each gives the logits that it gives alone."""
    sequences = [row[:n] for row, n in zip(tokens().cpu(), LENGTHS, strict=True)]
    collator = transformers.DataCollatorWithFlattening()
    batch = collator([{"input_ids": s.tolist(), "labels": s.tolist()} for s in sequences])
    inputs = {n: batch[n].to(DEVICE) for n in ("input_ids", "position_ids")}
    eager, model = (make(name, form, torch.float32) for form in ("eager", f"flash_attention_{version}"))
    with torch.no_grad():
        packed = model(**inputs, use_cache=False).logits[0]
        assert set(called) == {PADDED}
        expected = torch.cat([eager(s[None].to(DEVICE), use_cache=False).logits[0] for s in sequences])
    assert error({"logits": packed}, {"logits": expected})["logits"] <= CLOSE


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MODELS)
def test_generate(called, name, version, side):
    """Greedy tokens in float32 are SDPA's. Where the two best logits are no further apart than rounding, either may
    follow, and the rest of the row is not compared.
    """
    found = []
    for implementation in ("sdpa" if name != "gemma2" else "eager", f"flash_attention_{version}"):
        model = make(name, implementation, torch.float32)
        options = {"max_new_tokens": NUM_NEW, "do_sample": False, "output_logits": True}
        mask = padding(side)
        if mask is None:
            mask = torch.ones_like(tokens())
        found.append(model.generate(tokens(), attention_mask=mask, return_dict_in_generate=True, **options))
    assert found[0].sequences.shape == (len(LENGTHS), SEQLEN + NUM_NEW)
    is_same = torch.ones(len(LENGTHS), dtype=torch.bool, device=DEVICE)  # rows whose tokens so far are equal
    for step, (expected, logits) in enumerate(zip(found[0].logits, found[1].logits, strict=True)):
        largest = expected.abs().max()
        assert ((logits - expected).abs().amax(-1)[is_same] <= CLOSE * largest).all(), f"step {step}"
        best = expected.topk(2).values
        is_same &= best.diff().abs().squeeze(-1) > 2 * CLOSE * largest
        tokens_now = [f.sequences[:, SEQLEN + step] for f in found]
        assert torch.equal(*(t[is_same] for t in tokens_now)), f"step {step}"
    assert is_same.any()
    assert called


def test_training_step_with_dropout(called):
    """Dropout of attention is that of onepass: another seed gives other logits, the same seed the same ones."""
    model = make("llama", "flash_attention_2", BF16).train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    logits = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        logits.append(model(tokens(), attention_mask=padding("left"), use_cache=False).logits)
    mask = padding("left").bool()
    assert torch.equal(logits[0][mask], logits[1][mask])
    assert not torch.equal(logits[0][mask], logits[2][mask])
    logits[0][mask].float().square().mean().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert set(called) == {PADDED}

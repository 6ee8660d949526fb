"""transformers' other ways to generate, encoders with decoders, and training as models are set up by default."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import contextlib
import gc
import inspect

import pytest
import torch
from tiny_transformers import SMALL

transformers = pytest.importorskip("transformers")

from transformers.generation.continuous_batching import ContinuousBatchingManager  # noqa: E402
from transformers.utils import import_utils  # noqa: E402

import onepass.api.attention  # noqa: E402
import onepass.compat  # noqa: E402
import onepass.compat.flash_attn  # noqa: E402
import onepass.compat.flash_attn_3  # noqa: E402
import onepass.compat.flash_attn_4  # noqa: E402
from onepass.integrations.transformers import register  # noqa: E402

SPECIAL = {"vocab_size": 97, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
GPT2 = SPECIAL | {"n_embd": 32, "n_layer": 2, "n_head": 4}
BERT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
T5 = SPECIAL | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
GREEDY = {"do_sample": False, "max_new_tokens": 8}


def make(head, config, implementation, **changes):
    """A tiny model with random weights, which are equal for all attention implementations."""
    family = head.removesuffix("LMHeadModel").removesuffix("Model").split("For")[0]
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**(config | changes))
    model = getattr(transformers, head)._from_config(made, attn_implementation=implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.3)
    return model.eval()


def tokens(batch=3, seqlen=11):
    return torch.randint(2, 97, (batch, seqlen), generator=torch.Generator().manual_seed(1))


def padding():
    return (torch.arange(11) >= torch.tensor([[0], [5], [2]])).long()


def both(function):
    """What a function of an attention implementation gives with eager attention, and with onepass."""
    return function("eager"), function(register())


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("kind", ["assistant", "prompt lookup"])
def test_assisted_generation(kind):
    def generate(implementation):
        model = make("LlamaForCausalLM", SMALL, implementation)
        options = {"prompt_lookup_num_tokens": 3}
        if kind == "assistant":
            options = {"assistant_model": make("LlamaForCausalLM", SMALL, implementation, num_hidden_layers=1)}
        return model.generate(tokens(batch=1), **GREEDY, **options)

    expected, found = both(generate)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("head", "config"), [("GPT2LMHeadModel", GPT2), ("T5ForConditionalGeneration", T5)], ids=["GPT-2", "T5"]
)
def test_generation(head, config):
    expected, found = both(lambda name: make(head, config, name).generate(tokens(), attention_mask=padding(), **GREEDY))
    assert torch.equal(found, expected)


@contextlib.contextmanager
def a_gpu_for_the_check():
    """transformers asks for a CUDA device before it takes flash-attn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        import_utils.is_torch_cuda_available.cache_clear()
        yield
    import_utils.is_torch_cuda_available.cache_clear()


def generate_batch(model):
    """What continuous batching generates for three prompts, the longer ones in chunks, over a cache in pages."""
    generation = transformers.GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=8)
    prompts = [tokens(1, 11)[0].tolist(), tokens(1, 5)[0].tolist(), tokens(1, 20)[0].tolist()]
    gc.freeze()  # after each batch transformers searches all other objects for garbage
    with torch.no_grad():
        outputs = model.generate_batch(
            inputs=prompts, generation_config=generation, continuous_batching_config=batching, progress_bar=False
        )
    return sorted((len(o.prompt_ids), o.generated_tokens) for o in outputs.values())


FUNCTIONS = {2: onepass.compat.flash_attn, 3: onepass.compat.flash_attn_3, 4: onepass.compat.flash_attn_4}


@pytest.fixture
def expected_batch():
    model = make("LlamaForCausalLM", SMALL, "sdpa")
    found = generate_batch(model)
    assert [len(generated) for _, generated in found] == [8, 8, 8]
    return found


@pytest.fixture
def counted(monkeypatch):
    """How often transformers has called a function for packed sequences, by the version of flash-attn."""
    counts = dict.fromkeys(FUNCTIONS, 0)
    for version, module in FUNCTIONS.items():
        original = module.flash_attn_varlen_func

        def counting(*args, version=version, original=original, **kwargs):
            counts[version] += 1
            return original(*args, **kwargs)

        counting.__signature__ = inspect.signature(original)
        monkeypatch.setattr(module, "flash_attn_varlen_func", counting)
    return counts


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_continuous_batching(version, expected_batch, counted):
    with onepass.compat.install():
        with a_gpu_for_the_check():
            model = make("LlamaForCausalLM", SMALL, f"flash_attention_{version}")
        assert generate_batch(model) == expected_batch
    assert counted[version] > 0


def test_continuous_batching_of_a_registered_model(expected_batch, counted, monkeypatch):
    """transformers changes to a flash-attn that it finds, which is onepass, and back."""
    switch = ContinuousBatchingManager.switch_to_cb_friendly_attn

    def switch_with_a_gpu(*args):
        with a_gpu_for_the_check():
            switch(*args)

    model = make("LlamaForCausalLM", SMALL, register())
    with pytest.raises(ValueError, match="onepass is not supported for continuous batching"):
        generate_batch(model)
    monkeypatch.setattr(ContinuousBatchingManager, "switch_to_cb_friendly_attn", switch_with_a_gpu)
    with onepass.compat.install():
        assert generate_batch(model) == expected_batch
    assert counted[3] > 0
    assert model.config._attn_implementation == "onepass"


# ---------------------------------------------------------------- training


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(
    ("head", "config"),
    [("GPT2LMHeadModel", GPT2), ("BertForMaskedLM", BERT), ("T5ForConditionalGeneration", T5)],
    ids=["GPT-2", "BERT", "T5"],
)
def test_training_by_default(head, config, monkeypatch):
    """Dropout is 0.1 by default: with it equal seeds give equal losses, without it all is as with eager attention."""
    mask = padding().flip(1)
    batch = {"input_ids": tokens(), "attention_mask": mask, "labels": tokens().masked_fill(mask == 0, -100)}

    dropped, attention = set(), onepass.api.attention.attention

    def recording(*args, **options):
        dropped.add(options["dropout_p"])
        return attention(*args, **options)

    monkeypatch.setattr(onepass.api.attention, "attention", recording)

    def step(implementation, training=False, seed=1):
        model = make(head, config, implementation).train(training)
        torch.manual_seed(seed)
        loss = model(**batch).loss
        loss.backward()
        return loss.detach(), next(model.parameters()).grad

    (loss, gradient), (expected_loss, expected) = step(register()), step("eager")
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)
    assert dropped == {0.0}
    losses = [step(register(), True, seed)[0] for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
    assert all(loss.isfinite() for loss in losses)
    assert dropped == {0.0, 0.1}

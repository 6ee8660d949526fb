"""Many model classes of transformers, in tiny form, packed, padded, cached and with a mask of the caller's own.

The references are eager attention and, for packed sequences, each document alone. With gradients, without them and
under torch.compile the results are the same.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from onepass.integrations.transformers import register  # noqa: E402

# A configuration gets those sizes that it knows.
SIZES = {
    "vocab_size": 97,
    "vocab_size_per_layer_input": 97,
    "hidden_size": 32,
    "hidden_size_per_layer_input": 8,
    "d_model": 32,
    "n_embd": 32,
    "word_embed_proj_dim": 32,
    "intermediate_size": 48,
    "ffn_dim": 48,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "head_dim": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "sliding_window": 4,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
EXTRA = {
    **{name: {"num_key_value_heads": 4} for name in ("deepseek_v3", "deepseek_v32", "youtu")},
    "deepseek_v4": {"o_groups": 1, "o_lora_rank": 16, "num_hash_layers": 0},
    "gemma2": {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 3},
    "llama4_text": {"attention_chunk_size": 4, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
}
QUICK = [
    *("llama", "mistral", "gemma2", "gpt_oss", "llama4_text", "gpt2", "opt", "deepseek_v3", "deepseek_v32"),
    *("deepseek_v4", "doge", "qwen3_moe"),
]
SLOW = [
    *("afmoe", "apertus", "arcee", "bitnet", "cohere", "cohere2", "cwm", "diffllama", "dots1", "ernie4_5", "exaone4"),
    *("flex_olmo", "gemma", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt_neox", "granite", "granitemoe", "helium"),
    *("hunyuan_v1_dense", "jetmoe", "minimax_m2", "ministral", "mixtral", "modernbert-decoder", "nanochat", "nemotron"),
    *(
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phi3",
        "phimoe",
        "qwen2",
        "qwen3",
        "seed_oss",
        "smollm3",
        "starcoder2",
    ),
    *("persimmon", "vaultgemma", "youtu"),
]
# Where there is a cache, the layers of these models get no positions, or make a whole mask of their own.
ONE_SEQUENCE_IN_A_CACHE = {"llama4_text", "persimmon", "doge", "deepseek_v4"}
# The indexers of these models choose keys of all documents. Eager attention is the reference.
WITH_INDEXERS = {"deepseek_v32"}
COMPILED = ["gemma2", "gpt_oss"]

DOCUMENTS = (5, 7)
TOKENS = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(1))
POSITIONS = torch.cat([torch.arange(n) for n in DOCUMENTS])[None]
JUMP = torch.cat((torch.arange(9), torch.arange(40, 43)))[None]  # one sequence whose middle is missing
REAL = torch.ones(2, 12, dtype=torch.long)
REAL[1, :4] = 0


def make(name):
    """A tiny model with eager attention and random weights, far enough from 0 for a wrong mask to show."""
    config_class = CONFIG_MAPPING[name]
    known = set(inspect.signature(config_class.__init__).parameters)
    known.update(*(getattr(base, "__annotations__", {}) for base in config_class.__mro__))
    config = config_class(**{key: size for key, size in SIZES.items() if key in known} | EXTRA.get(name, {}))
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])._from_config(
        config, attn_implementation="eager"
    )
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() > 1 or "sink" in key:
                parameter.normal_(0, 0.3)
    return model.eval()


def own_mask():
    """(2, 1, 12, 12): what a caller wants to be seen, keys to the right included."""
    seen = torch.rand(2, 1, 12, 12, generator=torch.Generator().manual_seed(2)) < 0.7
    seen |= torch.eye(12, dtype=torch.bool)
    return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


def steps(model, **options):
    """Logits of 6 tokens, 4 over the cache of these, and single ones."""
    cache, parts = None, []
    for start, end in ((0, 6), (6, 10), (10, 11), (11, 12)):
        mask = {name: value[:, :end] for name, value in options.items()}
        step = model(TOKENS[:, start:end], past_key_values=cache, use_cache=True, **mask)
        cache = step.past_key_values
        parts.append(step.logits)
    return torch.cat(parts, 1)


def documents(model):
    """Logits of each document alone."""
    parts = zip(TOKENS.split(DOCUMENTS, 1), POSITIONS.split(DOCUMENTS, 1), strict=True)
    return torch.cat([model(part, position_ids=own, use_cache=False).logits for part, own in parts], 1)


def packed(model, use_cache):
    return model(TOKENS, position_ids=POSITIONS, use_cache=use_cache).logits


def packed_by_offsets(model):
    offsets = torch.tensor([0, *DOCUMENTS]).cumsum(0)
    return model(TOKENS, position_ids=POSITIONS, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).logits


def calls(name):
    """Ways to call a model: name -> (call, call that eager attention has to answer likewise)."""
    both, whole = TOKENS.repeat(2, 1), torch.arange(12)[None]
    found = {
        "plain": lambda m: m(TOKENS, use_cache=False).logits,
        "jump": lambda m: m(TOKENS, position_ids=JUMP).logits,
        "left": lambda m: m(both, attention_mask=REAL).logits[REAL.bool()],
        "right": lambda m: m(both, attention_mask=REAL.flip(1), use_cache=False).logits[REAL.flip(1).bool()],
        "own mask": lambda m: m(both, position_ids=whole, attention_mask=own_mask(), use_cache=False).logits,
        "cached": steps,
        "cached with a mask": lambda m: steps(m, attention_mask=torch.ones_like(TOKENS)),
    }
    found = {key: (call, call) for key, call in found.items()}
    alone = (lambda m: packed(m, False)) if name in WITH_INDEXERS else documents
    if name not in WITH_INDEXERS:
        found["packed by offsets"] = packed_by_offsets, alone
    found["packed"] = (lambda m: packed(m, False)), alone
    if name not in ONE_SEQUENCE_IN_A_CACHE | WITH_INDEXERS:
        found["packed, cache"] = (lambda m: packed(m, True)), alone
    return found


def logits_and_gradient(model, call):
    """The logits of a call, and a gradient of the embedding."""
    out = call(model)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
    embedding = model.get_input_embeddings().weight
    return out.detach(), torch.autograd.grad((out * weights).sum(), embedding)[0]


def error(actual, expected):
    assert actual.isfinite().all()
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_model(name):
    model = make(name)
    found = calls(name)
    expected = {key: logits_and_gradient(model, reference) for key, (_, reference) in found.items()}
    model.set_attn_implementation(register())
    for key, (call, _) in found.items():
        logits, gradient = logits_and_gradient(model, call)
        with torch.no_grad():
            without = call(model)
        errors = [error(x, expected[key][0]) for x in (logits, without)] + [error(gradient, expected[key][1])]
        assert max(errors) <= 5e-5, f"{key}: errors of logits, logits without gradients, gradient: {errors}"


OTHERS = [name for name in QUICK + SLOW if name not in COMPILED]


@pytest.mark.parametrize(
    "name",
    [
        *COMPILED,
        *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS[::4]),
        *(pytest.param(n, marks=(pytest.mark.slow, pytest.mark.nightly)) for n in OTHERS if n not in OTHERS[::4]),
    ],
)
def test_compiled_model(name):
    """The graphs are run as they are; inductor would compile them for a minute. Slow cases have one graph each."""
    model = make(name)
    found = {key: pair for key, pair in calls(name).items() if key.startswith("packed")}
    if name not in COMPILED:
        found = dict([found.popitem()])
    expected = {key: logits_and_gradient(model, reference) for key, (_, reference) in found.items()}
    model.set_attn_implementation(register())
    torch._dynamo.reset()
    forward = model.forward
    model.forward = torch.compile(forward, backend="eager")
    for key, (call, _) in found.items():
        logits, gradient = logits_and_gradient(model, call)
        errors = error(logits, expected[key][0]), error(gradient, expected[key][1])
        assert max(errors) <= 5e-5, f"{key}: errors of logits and gradient: {errors}"

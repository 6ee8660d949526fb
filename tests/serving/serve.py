"""Serve requests of tiny models by vLLM on a CPU, one model after the other, and print their tokens as JSON.

Arguments: a folder for models, and the names of the models. `test_serving.py` runs it once with onepass and once
without (ONEPASS_VLLM).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,  # tokens that depend on what came before, and do not repeat
}
GROUPED = SIZES | {"head_dim": 32}
# the class of the configuration in transformers, its arguments, and arguments of the engine
MODELS = {
    "llama": ("LlamaConfig", GROUPED, {}),
    "llama in bfloat16": ("LlamaConfig", GROUPED, {"dtype": "bfloat16"}),
    "llama, e4m3 cache": ("LlamaConfig", GROUPED, {"kv_cache_dtype": "fp8"}),
    "llama, no prefix cache, whole prompts": (
        "LlamaConfig",
        GROUPED,
        {"enable_prefix_caching": False, "enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
    ),
    "mistral, sliding window": ("MistralConfig", GROUPED | {"sliding_window": 24}, {}),
    "gemma 2, softcap": (
        "Gemma2Config",
        GROUPED | {"sliding_window": 32, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 32},
        {},
    ),
    "bloom, ALiBi": (
        "BloomConfig",
        {"hidden_size": 128, "n_layer": 2, "n_head": 4, "vocab_size": 512, "initializer_range": 0.15},
        {},
    ),
}
NEW_TOKENS = 24
PROMPTS = (5, 150, 77, 33, 1, 150)  # lengths; the last one has the tokens of the second one: its keys are in the cache


def make_model(name: str, folder: Path) -> tuple[Path, dict]:
    """The folder of a model with random weights, made if it is not there, and arguments of the engine."""
    import transformers

    config_type, arguments, engine = MODELS[name]
    path = folder / name.replace(" ", "_").replace(",", "")
    if not path.exists():
        torch.manual_seed(0)
        config = getattr(transformers, config_type)(**arguments)
        transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(path)
    return path, engine


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 500, (n,), generator=generator).tolist() for n in PROMPTS]
    return [*prompts[:-1], prompts[1]]


def by_transformers_with_e4m3_keys(path: Path, requests: list[list[int]]) -> list[list[int]]:
    """The tokens that transformers chooses in float32 with keys and values rounded to e4m3, without a cache.

    Args: requests: the tokens that follow each prompt. Each choice is made after those before it.
    """
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module, q, k, v, mask, scaling=None, **options):
        k, v = (t.to(torch.float8_e4m3fn).to(t.dtype).repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return out.transpose(1, 2).contiguous(), None

    ALL_ATTENTION_FUNCTIONS.register("e4m3_keys", attention)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="e4m3_keys").float()
    chosen = []
    for prompt, tokens in zip(make_prompts(), requests, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0]
        chosen.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    return chosen


def serve(name: str, folder: Path) -> dict[str, list]:
    """What one model gives.

    Returns: "requests", for each request and each of its tokens, greedily chosen, the most likely tokens with their
    logarithms; "attention", the class that computes attention in each of the model's layers.
    """
    from vllm import LLM, SamplingParams

    path, engine = make_model(name, folder)
    options = {"dtype": "float32", "max_model_len": 512, "max_num_batched_tokens": 64, "enable_chunked_prefill": True}
    options |= {"block_size": 32, "enforce_eager": True, "skip_tokenizer_init": True, "kv_cache_memory_bytes": 1 << 24}
    model = LLM(str(path), **(options | engine))
    requests = [{"prompt_token_ids": prompt} for prompt in make_prompts()]
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, detokenize=False, ignore_eos=True, logprobs=5)
    results = model.generate(requests[:-1], sampling) + model.generate(requests[-1:], sampling)
    steps = [zip(r.outputs[0].token_ids, r.outputs[0].logprobs, strict=True) for r in results]
    likely = [[{t: found[t].logprob for t in (token, *(set(found) - {token}))} for token, found in s] for s in steps]
    layers = model.llm_engine.vllm_config.compilation_config.static_forward_context
    attention = [type(layer.impl).__name__ for layer in layers.values()]
    return {"requests": likely, "attention": attention}


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    print(json.dumps({name: serve(name, Path(sys.argv[1])) for name in sys.argv[2:]}))

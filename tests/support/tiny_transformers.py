"""Tiny transformers models with random weights, and their inputs."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers")

from onepass.integrations.transformers import attention_forward  # noqa: E402

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
LLAMA4 = {
    "attention_chunk_size": 4,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],  # the first layer sees chunks, the second one all
    "interleave_moe_layer_step": 2,
}
BATCH, SEQLEN = 3, 11
LENGTHS = (11, 6, 9)
PACKED = (4, 1, 6)  # lengths of sequences in one row


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


def packed_positions():
    return torch.cat([torch.arange(n) for n in PACKED])[None]


class HostReads(TorchDispatchMode):
    """Counts operators whose result the host waits for."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero")

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name in self.NAMES
        return function(*args, **(kwargs or {}))


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


class Layer(torch.nn.Module):
    is_causal = True

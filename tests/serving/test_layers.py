"""One attention layer in vLLM: its options against float64, both layouts of caches, what is refused."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass import reference
from onepass.integrations.vllm import cache

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from vllm.config import VllmConfig, set_current_vllm_config

from onepass.integrations.vllm.backend import OnepassBackend, OnepassImpl, OnepassMetadata

HEADS, KV_HEADS, HEAD_SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 12
LENGTHS, QUERIES = (20, 1, 33), (3, 1, 33)  # keys and queries of three requests
TABLE = torch.tensor([[3, 7, 0], [5, 0, 0], [1, 9, 4]], dtype=torch.int32)
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 2.0},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "e4m3": {"kv_cache_dtype": "fp8"},
}


def impl(**options):
    with set_current_vllm_config(VllmConfig()):
        return OnepassImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, **{"alibi_slopes": None, **options})


def empty_cache(layout, dtype=torch.float32):
    """A cache full of NaN, where it can be."""
    shape = (BLOCKS, 2, BLOCK, KV_HEADS, HEAD_SIZE) if layout == "0.24" else (BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
    return torch.full(shape, 255 if dtype == torch.uint8 else torch.nan, dtype=dtype)


def slots_of(request, positions):
    return TABLE[request, positions // BLOCK] * BLOCK + positions % BLOCK


def step():
    offsets = torch.tensor([0, *QUERIES]).cumsum(0).int()
    return OnepassMetadata(sum(QUERIES), offsets, max(QUERIES), torch.tensor(LENGTHS, dtype=torch.int32), TABLE, True)


@pytest.mark.parametrize("layout", ["0.24", "0.32"])
@pytest.mark.parametrize("name", OPTIONS)
def test_requests_of_a_step(name, layout):
    layer = impl(**OPTIONS[name])
    is_e4m3 = name == "e4m3"
    kv_cache = empty_cache(layout, torch.uint8 if is_e4m3 else torch.float32)
    layer.process_weights_after_loading(torch.float32)
    keys, values = (torch.randn(sum(LENGTHS), KV_HEADS, HEAD_SIZE) for _ in range(2))
    start, slots = 0, []
    for request, length in enumerate(LENGTHS):
        slots.append(slots_of(request, torch.arange(length)))
        start += length
    slots = torch.cat((*slots, torch.tensor([-1, -1]))).long()  # two tokens of padding
    padded = [torch.cat((t, torch.full((2, KV_HEADS, HEAD_SIZE), 9.0))) for t in (keys, values)]
    layer.do_kv_cache_update(LAYER, *padded, kv_cache, slots)

    n = sum(QUERIES)
    query, output = torch.randn(n + 2, HEADS, HEAD_SIZE), torch.full((n + 2, HEADS * HEAD_SIZE), 7.0)
    assert layer.forward(LAYER, query, None, None, kv_cache, step(), output) is output
    assert (output[n:] == 7).all()
    if is_e4m3:
        keys, values = (
            (t / scale).to(cache.E4M3).float() * scale
            for t, scale in ((keys, LAYER._k_scale), (values, LAYER._v_scale))
        )
    options = OPTIONS[name]
    expected_options = {
        "causal": True,
        "softmax_scale": 0.2,
        "softcap": options.get("logits_soft_cap"),
        "window": (6, None) if "sliding_window" in options else None,
        "sinks": options.get("sinks"),
    }
    if "alibi_slopes" in options:
        expected_options["alibi_slopes"] = torch.tensor(options["alibi_slopes"])
    first_key = first_query = 0
    for length, queries in zip(LENGTHS, QUERIES, strict=True):
        q = query[None, first_query : first_query + queries]
        k, v = (t[None, first_key : first_key + length] for t in (keys, values))
        expected = reference.attention(q, k, v, **expected_options).out[0]
        actual = output[first_query : first_query + queries].view(queries, HEADS, HEAD_SIZE)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
        first_key, first_query = first_key + length, first_query + queries


def test_an_encoder_reads_no_cache():
    layer = impl(attn_type="encoder_only", sliding_window=3)
    n = sum(LENGTHS)
    q, k, v = torch.randn(n, HEADS, HEAD_SIZE), *(torch.randn(n, KV_HEADS, HEAD_SIZE) for _ in range(2))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    metadata = OnepassMetadata(n, offsets, max(LENGTHS), torch.tensor(LENGTHS), TABLE, False)
    layer.do_kv_cache_update(LAYER, k, v, None, None)
    output = layer.forward(LAYER, q, k, v, None, metadata, torch.empty(n, HEADS, HEAD_SIZE))
    offsets = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = reference.attention_varlen(q, k, v, **offsets, window=(2, 2), softmax_scale=0.2).out
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_run_without_metadata_gives_zeros():
    output = torch.ones(3, HEADS * HEAD_SIZE)
    assert (impl().forward(LAYER, None, None, None, None, None, output) == 0).all()


REFUSED = [
    ({"attn_type": "encoder_decoder"}, "expected decoder or encoder attention, got"),
    ({"kv_cache_dtype": "int8_per_token_head"}, "expected a cache of .* got 'int8_per_token_head'"),
    ({"use_alibi_sqrt": True}, "expected use_alibi_sqrt=False, got True"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_a_layer_refuses(options, message):
    with pytest.raises(onepass.UnsupportedError, match=message):
        impl(**options)


def test_quantized_output_is_refused():
    with pytest.raises(onepass.UnsupportedError, match="expected no quantized output"):
        impl().forward(LAYER, None, None, None, None, step(), None, output_scale=torch.ones(1))


def test_what_the_backend_says_of_itself():
    assert OnepassBackend.supports_head_size(128)
    assert not OnepassBackend.supports_head_size(257)
    assert not OnepassBackend.supports_kv_cache_dtype("fp8_e5m2")
    assert OnepassBackend.supports_block_size(48)
    assert not OnepassBackend.supports_block_size(24)
    assert OnepassBackend.get_kv_cache_shape(5, 16, 2, 64) == (5, 2, 16, 2, 64)
    assert OnepassBackend.get_name() == "CPU_ATTN"

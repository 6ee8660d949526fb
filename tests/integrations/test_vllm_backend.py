"""A layer of vLLM by onepass, with stand-ins for the classes of vLLM that it derives from.

`tests/serving/` runs the same classes in vLLM itself.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

import onepass
from onepass import reference

HEADS, KV_HEADS, HEAD_SIZE, BLOCK = 4, 2, 8, 16
LENGTHS, QUERIES = (20, 1, 33), (3, 1, 33)  # keys and queries of three requests
TABLE = torch.tensor([[3, 7, 0], [5, 0, 0], [1, 9, 4]], dtype=torch.int32)
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
SINKS = torch.linspace(-1, 1, HEADS, dtype=torch.bfloat16)


@pytest.fixture
def backend(monkeypatch):
    module = ModuleType("vllm.v1.attention.backend")
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"):
        setattr(module, name, type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)}))
    module.AttentionMetadataBuilder.__init__ = lambda self, *arguments: None
    module.AttentionCGSupport = SimpleNamespace(UNIFORM_BATCH="uniform")
    module.AttentionType = SimpleNamespace(DECODER="decoder", ENCODER="encoder", ENCODER_ONLY="encoder_only")
    module.MultipleOf = lambda n: n
    for name in ("vllm", "vllm.v1", "vllm.v1.attention"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", module)
    name = "onepass.integrations.vllm.backend"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name)
    sys.modules.pop(name, None)


OPTIONS = [
    ({}, {}),
    ({"logits_soft_cap": 0.0}, {}),
    ({"logits_soft_cap": 2.0}, {"softcap": 2.0}),
    ({"sliding_window": 7}, {"window": (6, None)}),
    ({"sinks": SINKS}, {"sinks": SINKS.double()}),
    ({"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]}, {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])}),
    ({"kv_cache_dtype": "fp8"}, {}),
]


@pytest.mark.parametrize(("theirs", "ours"), OPTIONS)
@pytest.mark.parametrize("causal", [True, False])
def test_requests_of_a_step(backend, theirs, ours, causal):
    layer = backend.OnepassImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, **theirs)
    layer.process_weights_after_loading(torch.float32)
    is_e4m3 = "kv_cache_dtype" in theirs
    kv_cache = torch.full(backend.OnepassBackend.get_kv_cache_shape(12, BLOCK, KV_HEADS, HEAD_SIZE), torch.nan)
    kv_cache = torch.full_like(kv_cache, 255, dtype=torch.uint8) if is_e4m3 else kv_cache
    keys, values = (torch.randn(sum(LENGTHS), KV_HEADS, HEAD_SIZE) for _ in range(2))
    slots = [TABLE[r, torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for r, n in enumerate(LENGTHS)]
    padded = [torch.cat((t, torch.full((2, KV_HEADS, HEAD_SIZE), 9.0))) for t in (keys, values)]
    layer.do_kv_cache_update(LAYER, *padded, kv_cache, torch.cat((*slots, torch.tensor([-1, -1]))).long())
    step = SimpleNamespace(
        num_actual_tokens=sum(QUERIES),
        query_start_loc=torch.tensor([0, *QUERIES]).cumsum(0).int(),
        max_query_len=max(QUERIES),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_table_tensor=TABLE,
        causal=causal,
    )
    metadata = backend.OnepassMetadataBuilder(None, [], None, torch.device("cpu")).build(0, step)
    n = sum(QUERIES)
    query, output = torch.randn(n + 2, HEADS, HEAD_SIZE), torch.full((n + 2, HEADS * HEAD_SIZE), 7.0)
    assert layer.forward(LAYER, query, None, None, kv_cache, metadata, output) is output
    assert (output[n:] == 7).all()
    if is_e4m3:
        keys, values = (
            (t / scale).to(torch.float8_e4m3fn).float() * scale for t, scale in ((keys, 0.5), (values, 0.25))
        )
    ours = ours | ({} if causal or "window" not in ours else {"window": (6, 6)})
    starts_q, starts_k = ([sum(sizes[:i]) for i in range(4)] for sizes in (QUERIES, LENGTHS))
    for r in range(3):
        rows, own = slice(*starts_q[r : r + 2]), slice(*starts_k[r : r + 2])
        expected = reference.attention(
            query[None, rows], keys[None, own], values[None, own], causal=causal, softmax_scale=0.2, **ours
        ).out[0]
        torch.testing.assert_close(output[rows].view(expected.shape).double(), expected, rtol=1e-5, atol=1e-5)


def test_an_encoder_reads_no_cache(backend):
    layer = backend.OnepassImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, attn_type="encoder_only", sliding_window=3)
    n = sum(LENGTHS)
    q, k, v = torch.randn(n, HEADS, HEAD_SIZE), *(torch.randn(n, KV_HEADS, HEAD_SIZE) for _ in range(2))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    metadata = backend.OnepassMetadata(n, offsets, max(LENGTHS), torch.tensor(LENGTHS), TABLE, False)
    layer.do_kv_cache_update(LAYER, k, v, None, None)
    output = layer.forward(LAYER, q, k, v, None, metadata, torch.empty(n, HEADS, HEAD_SIZE))
    cuts = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = reference.attention_varlen(q, k, v, **cuts, window=(2, 2), softmax_scale=0.2).out
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_type": "encoder_decoder"}, "expected decoder or encoder attention, got encoder_decoder"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "expected a cache of .* got 'int8_per_token_head'"),
        ({"use_alibi_sqrt": True}, "expected use_alibi_sqrt=False, got True"),
    ],
)
def test_what_a_layer_refuses(backend, options, message):
    with pytest.raises(onepass.UnsupportedError, match=message):
        backend.OnepassImpl(HEADS, HEAD_SIZE, 0.2, KV_HEADS, **options)


def test_other_calls_of_a_layer(backend):
    layer = backend.OnepassImpl(HEADS, HEAD_SIZE, 0.2)
    assert layer.num_kv_heads == HEADS
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(onepass.UnsupportedError, match="expected no quantized output"):
            layer.forward(LAYER, None, None, None, None, None, None, **{name: torch.ones(1)})
    assert (layer.forward(LAYER, None, None, None, None, None, torch.ones(3, 4)) == 0).all()
    with pytest.raises(onepass.UnsupportedError, match="all causal or all not, got a mixture"):
        backend.OnepassMetadataBuilder(None, [], None, torch.device("cpu")).build(
            0, SimpleNamespace(causal=torch.tensor([True, False]))
        )


def test_what_the_backend_says_of_itself(backend):
    said = backend.OnepassBackend
    assert [said.supports_head_size(n) for n in (8, 12, 128, 256, 264)] == [True, False, True, True, False]
    assert [said.supports_compute_capability(c) for c in (None, (7, 5), (8, 0), (9, 0))] == [True, False, True, True]
    assert [said.supports_attn_type(t) for t in ("decoder", "encoder", "encoder_decoder")] == [True, True, False]
    assert said.supports_sink()
    assert said.supports_sliding_window()
    assert said.supports_non_causal()
    assert said.get_supported_kernel_block_sizes() == [16]
    assert said.get_impl_cls() is backend.OnepassImpl
    assert said.get_builder_cls() is backend.OnepassMetadataBuilder

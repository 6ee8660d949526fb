"""One attention layer in vLLM: its options against float64, both layouts of caches, what is refused.

Where vLLM is not installed, vllm_stand_in.py stands in for its classes: onepass computes all that is tested here.
"""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
import vllm_stand_in

import onepass
from onepass import reference
from onepass.integrations import vllm as integration
from onepass.integrations.vllm import cache

VARIABLE = "ONEPASS_VLLM"
HAS_VLLM = importlib.util.find_spec("vllm") is not None
HEADS, KV_HEADS, HEAD_SIZE, BLOCK, BLOCKS = 4, 2, 32, 16, 12
LENGTHS, QUERIES = (20, 1, 33, 7), (3, 1, 33, 2)  # keys and queries of four requests
# the first and the last position of each image; the window of 7 is shorter than the last one
IMAGES = {0: [(5, 9), (16, 18)], 1: [], 2: [(2, 6), (10, 29)], 3: [(1, 3)]}
TABLE = torch.tensor([[3, 7, 0], [5, 0, 0], [1, 9, 4], [2, 0, 0]], dtype=torch.int32)
LAYER = SimpleNamespace(_k_scale=torch.tensor(0.5), _v_scale=torch.tensor(0.25))
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 7},
    "softcap": {"logits_soft_cap": 2.0},
    "softcap of 0": {"logits_soft_cap": 0.0},  # no cap
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS, dtype=torch.bfloat16)},
    "ALiBi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "e4m3": {"kv_cache_dtype": "fp8"},
}


@pytest.fixture(scope="module")
def backend():
    """The module of the backend, with stand-ins for vLLM's classes where it is not installed."""
    with pytest.MonkeyPatch.context() as patch:
        for name, module in ({} if HAS_VLLM else vllm_stand_in.modules()).items():
            patch.setitem(sys.modules, name, module)
        module = importlib.import_module(f"{integration.__name__}.backend")
        yield module
        if not HAS_VLLM:
            del sys.modules[module.__name__], integration.backend


@pytest.fixture
def impl(backend):
    from vllm.config import VllmConfig, set_current_vllm_config

    def make(kv_heads=KV_HEADS, **options):
        with set_current_vllm_config(VllmConfig()):
            return backend.OnepassImpl(HEADS, HEAD_SIZE, 0.2, kv_heads, **options)

    return make


def empty_cache(layout, dtype=torch.float32):
    """A cache full of NaN, where it can be."""
    shape = (BLOCKS, 2, BLOCK, KV_HEADS, HEAD_SIZE) if layout == "0.24" else (BLOCKS, KV_HEADS, BLOCK, 2 * HEAD_SIZE)
    return torch.full(shape, 255 if dtype == torch.uint8 else torch.nan, dtype=dtype)


def slots_of(request, positions):
    return TABLE[request, positions // BLOCK] * BLOCK + positions % BLOCK


def step(backend, causal=True, images=None, padding=0):
    """The metadata of a step, from what vLLM has. On the host it knows lengths of prompts and bounds of others."""
    offsets, lengths = torch.tensor([0, *QUERIES]).cumsum(0).int(), torch.tensor(LENGTHS, dtype=torch.int32)
    common = {"num_actual_tokens": sum(QUERIES) + padding, "query_start_loc": offsets, "max_query_len": max(QUERIES)}
    common |= {"seq_lens": lengths, "block_table_tensor": TABLE, "causal": causal}
    on_host = {"query_start_loc_cpu": offsets, "seq_lens_cpu_upper_bound": lengths + torch.tensor([0, 9, 0, 0])}
    builder = backend.OnepassMetadataBuilder(None, [], None, torch.device("cpu"))
    found = builder.build(0, SimpleNamespace(**common, **on_host, mm_req_doc_ranges=images))
    expected = {name.removesuffix("_tensor"): value for name, value in common.items()}
    assert vars(found) == expected | {"mm_prefix_range_tensor": found.mm_prefix_range_tensor}
    return found


def seen_keys(request, window, is_cut):
    """(queries, keys) bool, from the definition: causal and within a window, or in the same image."""
    q, k = torch.arange(LENGTHS[request] - QUERIES[request], LENGTHS[request])[:, None], torch.arange(LENGTHS[request])
    in_window = q - k < (window or 99)
    seen = (k <= q) & in_window
    for first, last in IMAGES[request]:
        in_image = (first <= q) & (q <= last) & (first <= k) & (k <= last)
        seen |= in_image & in_window if is_cut else in_image
    return seen


@pytest.mark.parametrize(("layout", "images"), [("0.24", None), ("0.32", None), ("0.24", "whole"), ("0.32", "cut")])
@pytest.mark.parametrize("name", OPTIONS)
def test_requests_of_a_step(name, layout, images, backend, impl):
    """Images see themselves in both directions, as far as a window reaches where the layer says so."""
    layer = impl(**OPTIONS[name])
    is_e4m3 = name == "e4m3"
    kv_cache = empty_cache(layout, torch.uint8 if is_e4m3 else torch.float32)
    layer.process_weights_after_loading(torch.float32)
    assert layer.sinks is None or layer.sinks.dtype == torch.float32
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
    scales = LAYER if images != "cut" else SimpleNamespace(**vars(LAYER), mm_prefix_clamp_sliding_window=True)
    metadata = step(backend, images=IMAGES if images else None)
    assert layer.forward(scales, query, None, None, kv_cache, metadata, output) is output
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
        "softcap": options.get("logits_soft_cap") or None,
        "window": (6, None) if "sliding_window" in options else None,
        "sinks": options["sinks"].float() if "sinks" in options else None,
    }
    if "alibi_slopes" in options:
        expected_options["alibi_slopes"] = torch.tensor(options["alibi_slopes"])
    first_key = first_query = 0
    for request, (length, queries) in enumerate(zip(LENGTHS, QUERIES, strict=True)):
        if images:
            seen = seen_keys(request, options.get("sliding_window"), images == "cut")
            bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
            expected_options |= {"causal": False, "window": None, "bias": bias[None, None]}
        q = query[None, first_query : first_query + queries]
        k, v = (t[None, first_key : first_key + length] for t in (keys, values))
        expected = reference.attention(q, k, v, **expected_options).out[0]
        actual = output[first_query : first_query + queries].view(queries, HEADS, HEAD_SIZE)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
        first_key, first_query = first_key + length, first_query + queries


def test_images_that_no_query_belongs_to(backend):
    """A request keeps its images while it generates. Some models remove them for some layers, by this name."""
    for images in (None, {}, {0: [(5, 9)], 1: [], 3: [(1, 3)]}, {0: [(5, 16), (20, 30)]}):
        assert step(backend, images=images).mm_prefix_range_tensor is None
    position, start, end = step(backend, images={0: [(16, 18), (5, 9)]}, padding=2).mm_prefix_range_tensor
    assert position[:-2].tolist() == [17, 18, 19, 0, *range(33), 5, 6]
    assert start[:3].tolist() == [16, 16, backend.LAST]
    assert end[:3].tolist() == [19, 19, 0]
    assert len(position) == len(start) == len(end) == sum(QUERIES) + 2


def test_a_step_that_is_not_causal_sees_all(backend, impl):
    """A drafter's step may be such a one, of a model with images."""
    layer, kv_cache = impl(), torch.randn_like(empty_cache("0.32"))
    query, outputs = torch.randn(sum(QUERIES), HEADS, HEAD_SIZE), []
    for images in (None, IMAGES):
        metadata = step(backend, causal=False, images=images)
        outputs.append(layer.forward(LAYER, query, None, None, kv_cache, metadata, torch.empty_like(query)))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("has_images", [False, True])
def test_steps_in_cuda_graphs(has_images, backend):
    config = SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=has_images))
    found = backend.OnepassMetadataBuilder.get_cudagraph_support(config, None)
    assert found.name == ("UNIFORM_SINGLE_TOKEN_DECODE" if has_images else "UNIFORM_BATCH")


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
def test_an_encoder_reads_no_cache(attn_type, backend, impl):
    layer = impl(kv_heads=None, attn_type=attn_type, sliding_window=3)
    n = sum(LENGTHS)
    q, k, v = (torch.randn(n, HEADS, HEAD_SIZE) for _ in range(3))
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    metadata = backend.OnepassMetadata(n, offsets, max(LENGTHS), torch.tensor(LENGTHS), TABLE, False)
    layer.do_kv_cache_update(LAYER, k, v, None, None)
    output = layer.forward(LAYER, q, k, v, None, metadata, torch.empty(n, HEADS, HEAD_SIZE))
    offsets = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    expected = reference.attention_varlen(q, k, v, **offsets, window=(2, 2), softmax_scale=0.2).out
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_mixture_of_causal_requests_and_others_is_refused(backend):
    with pytest.raises(onepass.UnsupportedError, match="expected requests that are all causal or all not"):
        step(backend, torch.tensor([True, False, True]))


def test_a_run_without_metadata_gives_zeros(impl):
    output = torch.ones(3, HEADS * HEAD_SIZE)
    assert (impl().forward(LAYER, None, None, None, None, None, output) == 0).all()


REFUSED = [
    ({"attn_type": "encoder_decoder"}, "expected decoder or encoder attention, got"),
    ({"kv_cache_dtype": "int8_per_token_head"}, "expected a cache of .* got 'int8_per_token_head'"),
    ({"use_alibi_sqrt": True}, "expected use_alibi_sqrt=False, got True"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_a_layer_refuses(options, message, impl):
    with pytest.raises(onepass.UnsupportedError, match=message):
        impl(**options)


@pytest.mark.parametrize("name", ["output_scale", "output_block_scale"])
def test_quantized_output_is_refused(name, backend, impl):
    with pytest.raises(onepass.UnsupportedError, match="expected no quantized output"):
        impl().forward(LAYER, None, None, None, None, step(backend), None, **{name: torch.ones(1)})


def test_what_the_backend_says_of_itself(backend):
    onepass_backend = backend.OnepassBackend
    assert [onepass_backend.supports_head_size(n) for n in (8, 128, 256, 257, 260, 264)] == [True] * 3 + [False] * 3
    supported = {"decoder": True, "encoder": True, "encoder_only": True, "encoder_decoder": False}
    assert {name: onepass_backend.supports_attn_type(name) for name in supported} == supported
    assert [onepass_backend.supports_compute_capability(c) for c in (None, (7, 5), (8, 0), (9, 0))] == [1, 0, 1, 1]
    assert onepass_backend.supports_sink()
    assert onepass_backend.supports_sliding_window()
    assert onepass_backend.supports_non_causal()
    assert onepass_backend.supports_mm_prefix()
    assert onepass_backend.supported_dtypes == [torch.float16, torch.bfloat16, torch.float32]
    assert onepass_backend.supported_kv_cache_dtypes == ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    # the cache is written by `do_kv_cache_update`, and out by `forward` into a tensor of vLLM
    assert onepass_backend.forward_includes_kv_cache_update is False
    assert onepass_backend.accept_output_buffer is True
    assert [size.base for size in onepass_backend.get_supported_kernel_block_sizes()] == [16]
    assert onepass_backend.get_kv_cache_shape(5, 16, 2, 64) == (5, 2, 16, 2, 64)
    assert onepass_backend.get_name() == "CPU_ATTN"
    assert onepass_backend.get_impl_cls() is backend.OnepassImpl
    assert onepass_backend.get_builder_cls() is backend.OnepassMetadataBuilder


@pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")
def test_what_vllm_reads_from_it(backend):
    assert not backend.OnepassBackend.supports_kv_cache_dtype("fp8_e5m2")
    assert [backend.OnepassBackend.supports_block_size(n) for n in (48, 24)] == [True, False]


@pytest.mark.parametrize(
    ("chosen", "is_cpu", "names"),
    [
        (None, True, ["CUSTOM"]),
        ("0", True, ["CUSTOM"]),
        ("1", True, ["CUSTOM", "CPU_ATTN"]),
        ("1", False, ["CUSTOM"]),
    ],
)
def test_registration(chosen, is_cpu, names, backend, monkeypatch):
    """On a CPU, ONEPASS_VLLM=1 makes onepass vLLM's only backend."""
    import vllm.platforms
    from vllm.v1.attention.backends import registry

    registered = {}
    monkeypatch.setattr(registry, "register_backend", lambda name, path: registered.update({name.name: path}))
    monkeypatch.setattr(vllm.platforms, "current_platform", SimpleNamespace(is_cpu=lambda: is_cpu))
    monkeypatch.delenv(VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(VARIABLE, chosen)
    integration.register()
    assert registered == dict.fromkeys(names, f"{backend.__name__}.OnepassBackend")


def test_a_variable_that_is_not_understood_is_refused(backend, monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    with pytest.raises(ValueError, match=VARIABLE):
        integration.register()

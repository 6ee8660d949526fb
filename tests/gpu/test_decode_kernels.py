"""attention_decode on a GPU: values against float64, pages, new keys, equal bits, graphs, no synchronisation.

Not run yet: no GPU has seen these kernels.
"""

import pytest
import torch
from gpu_cases import DEVICE, IS_READY, NAN, ON_GPU

import onepass
from onepass import dispatch
from onepass.testing.budget import compare, compare_lse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]
INT32 = torch.int32


@pytest.fixture(autouse=True)
def _kernels_by_default(monkeypatch):
    monkeypatch.setattr(dispatch, "_DECODE_KERNELS_HAVE_RUN", True)


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def call_of(
    filled, seqlen_q=1, heads=(8, 2), head_dim=64, page_size=None, seqlen_new=0, rotary=False, dtype=torch.bfloat16
):
    """Arguments with NaN wherever no key lies."""
    batch, room = len(filled), -(-(max(filled) + seqlen_new + 1) // 64) * 64
    room = room if page_size is None else -(-room // page_size) * page_size
    arguments = {"q": randn(batch, seqlen_q, heads[0], head_dim, dtype=dtype, seed=1)}
    for i, name in enumerate(("k_cache", "v_cache")):
        cache = randn(batch, room, heads[1], head_dim, dtype=dtype, seed=2 + i)
        for b, n in enumerate(filled):
            cache[b, n:] = NAN
        if page_size is not None:
            order = torch.randperm(batch * room // page_size + 2, generator=torch.Generator().manual_seed(5))
            table = order[:-2].view(batch, -1).int().to(DEVICE)
            pages = cache.new_full((len(order), page_size, *cache.shape[2:]), NAN)
            pages[table.flatten().long()] = cache.view(-1, page_size, *cache.shape[2:])
            arguments["page_table"] = table
            cache = pages
        arguments[name] = cache
    arguments["cache_seqlens"] = torch.tensor(filled, dtype=INT32, device=DEVICE)
    if seqlen_new:
        for i, name in enumerate(("k_new", "v_new")):
            arguments[name] = randn(batch, seqlen_new, heads[1], head_dim, dtype=dtype, seed=7 + i)
    if rotary:
        angles = torch.arange(room, device=DEVICE)[:, None] * 0.5 ** torch.arange(head_dim // 4, device=DEVICE)
        arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return arguments


def on_cpu(arguments):
    return {n: t.cpu().clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}


def check(arguments, **options):
    there = on_cpu(arguments)
    out, lse = onepass.attention_decode(**arguments, **options, return_lse=True)
    plain = onepass.attention_decode(**there, **(options | {"num_splits": None}), return_lse=True)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(arguments[name].cpu(), there[name], rtol=0.01, atol=1e-6, equal_nan=True)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in there.items()}
    wide["cache_seqlens"] = there["cache_seqlens"] + (there["k_new"].shape[1] if "k_new" in there else 0)
    for name in ("k_new", "v_new"):
        wide.pop(name, None)
    if "rotary_cos" in wide:
        for name in ("rotary_cos", "rotary_sin"):
            wide[name] = there[name].double()
    oracle = onepass.attention_decode(**wide, **(options | {"num_splits": None}), return_lse=True)
    assert compare("out", out, oracle.out, plain.out, factor=3.0).ok
    assert "rotary_cos" in there or compare_lse(lse, oracle.lse).ok
    return out, lse


@pytest.mark.parametrize("num_splits", [None, 1, 2, 7, 64])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [None, 1, 16, 48, 256])
def test_values(num_splits, head_dim, page_size):
    check(call_of((1000, 0, 1, 65, 3000), 3, (8, 2), head_dim, page_size), num_splits=num_splits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"softcap": 5.0, "causal": False}])
def test_options(dtype, options):
    arguments = call_of((1000, 130), 16, (8, 1), 128, 16, dtype=dtype)
    check(arguments | {"sinks": randn(8, dtype=torch.float32, seed=4)}, num_splits=5, **options)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("rotary", [False, True])
def test_new_keys(page_size, rotary):
    check(call_of((100, 0, 63), 4, (8, 2), 128, page_size, seqlen_new=4, rotary=rotary), num_splits=2)


def test_equal_bits_in_any_batch():
    filled = (5000, 64, 900, 1, 3333)
    arguments = call_of(filled, 2)
    options = {"split_size": 256, "return_lse": True}
    together = onepass.attention_decode(**arguments, **options)
    for b in range(len(filled)):
        alone = {n: t[b : b + 1] for n, t in arguments.items()}
        for one, many in zip(onepass.attention_decode(**alone, **options), together, strict=True):
            assert torch.equal(one, many[b : b + 1])


@pytest.mark.skipif(not ON_GPU, reason="graphs and synchronisation are a GPU's")
def test_graph_of_a_growing_cache_without_synchronisation():
    arguments = call_of((100, 7), 1, (8, 2), 128, 16, seqlen_new=1)
    onepass.attention_decode(**arguments, num_splits=3)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        onepass.attention_decode(**arguments, num_splits=3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onepass.attention_decode(**arguments, num_splits=3)
    for _ in range(5):
        graph.replay()
        torch.testing.assert_close(out, onepass.attention_decode(**arguments, num_splits=3), rtol=0, atol=0)
        arguments["cache_seqlens"] += 1


@pytest.mark.parametrize("packed", [False, True])
def test_merge_partials(packed):
    outs, lses = randn(5, 3, 70, 4, 64), randn(5, 3, 4, 70, dtype=torch.float32)
    if packed:
        outs, lses = outs[:, 0], lses[:, 0]
    merged = onepass.merge_partials(outs, lses)
    oracle = onepass.merge_partials(outs.cpu().double(), lses.cpu().double())
    plain = onepass.merge_partials(outs.cpu(), lses.cpu())
    assert compare("out", merged.out, oracle.out, plain.out).ok
    assert compare_lse(merged.lse, oracle.lse).ok

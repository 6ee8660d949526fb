"""attention_decode on a GPU: values against float64, pages, new keys, equal bits, graphs, no synchronization.

The oracle and the results in plain PyTorch come from the tiled backend on the same device.
"""

import pytest
import torch
from decode_cases import CASES, MANY_ROWS, NEW_KEYS, DecodeCase, RandomDecodeCase, captured, randn
from gpu_cases import BACKEND, DEVICE, IS_READY, NAN, ON_GPU, assert_rounded_alike, size

import onepass
from onepass.api import fast_path
from onepass.api.repeated import repeatable_decode
from onepass.ops import partials as partials_ops
from onepass.testing.budget import compare, compare_lse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]


# few and many queries, pages, rotary positions, splits
APPENDING = [
    DecodeCase((100, 7), 1, (8, 2), (128, 128), seqlen_new=1),
    DecodeCase((100, 7), 40, (8, 2), (128, 128), 16, seqlen_new=40),
    DecodeCase((100, 7), 1, (8, 2), (64, 64), seqlen_new=2, rotary=True, options=(("num_splits", 3),)),
]
needs_hopper_kernels = pytest.mark.skipif(BACKEND != "sm90", reason="needs a Hopper GPU and its kernels")


def is_read_by_tma(dtype, head_dims, page_size):
    return dtype.itemsize == 2 and all(d % 8 == 0 for d in head_dims) and (page_size or 16) % 16 == 0


def by_tiles(arguments):
    return onepass.attention_decode(**(arguments | {"num_splits": None}), return_lse=True, backend="tiled")


def expected_backend(arguments):
    """The Ampere kernels; on Hopper its own if a kv head has more than a few rows and TMA can read the cache."""
    if BACKEND != "sm90":
        return BACKEND
    (_, rows, num_heads, d), (_, size, num_heads_kv, dv) = arguments["q"].shape, arguments["v_cache"].shape
    group = num_heads // num_heads_kv
    are_few = rows * (group if group <= 64 else 1) <= (32 if max(d, dv) <= 128 else 16)
    is_read = is_read_by_tma(arguments["q"].dtype, (d, dv), size if "page_table" in arguments else None)
    return "sm90" if is_read and not are_few else "sm80"


def check(arguments):
    if "backend" not in arguments:
        assert onepass.supports(**arguments).backend == expected_backend(arguments)
    before = {name: t.clone() if isinstance(t, torch.Tensor) else t for name, t in arguments.items()}
    out, lse = onepass.attention_decode(**arguments, return_lse=True)
    before.pop("backend", None)
    plain = by_tiles(before)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(arguments[name], before[name], rtol=0.01, atol=1e-6, equal_nan=True)
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in before.items()}
    wide["cache_seqlens"] = before["cache_seqlens"] + (before["k_new"].shape[1] if "k_new" in before else 0)
    for name in ("k_new", "v_new"):
        wide.pop(name, None)
    oracle = by_tiles(wide)
    row = compare("out", out, oracle.out, plain.out, factor=3.0)
    assert row.ok, str(row)
    assert "rotary_cos" in before or compare_lse(lse, oracle.lse).ok
    return out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    check(case.arguments())


@pytest.mark.parametrize("case", MANY_ROWS, ids=str)
def test_many_rows(case):
    check(case.arguments())


RANDOM = [RandomDecodeCase(seed, many_rows) for many_rows in (False, True) for seed in range(size(50, 15))]


@pytest.mark.parametrize("case", RANDOM, ids=str)
def test_random_calls(case):
    """Random calls are right. `case.call().check()` repeats one of them."""
    call = case.call()
    support = onepass.supports(**call.arguments)
    if ON_GPU and case.many_rows:
        assert support.backend == BACKEND
    # only the tiled backend takes pages of 3 keys with descales of their own
    assert support.backend != "tiled" or not ON_GPU or "kv_block" in support.reason
    call.check()


MODIFIED = [
    RandomDecodeCase(seed, many_rows, with_modifiers=True) for many_rows in (False, True) for seed in range(1000, 1060)
]


@pytest.mark.parametrize("case", MODIFIED[:: size(1, 4)], ids=str)
def test_random_calls_with_modifiers(case):
    """Random calls are right on whichever backend takes them."""
    case.call().check()


@needs_hopper_kernels
@pytest.mark.parametrize("case", [c for c in CASES if is_read_by_tma(c.dtype, c.head_dims, c.page_size)][::3], ids=str)
def test_few_rows_on_the_hopper_kernel(case):
    """The Hopper kernel takes calls of few rows, for which onepass does not choose it by default."""
    check(case.arguments() | {"backend": "sm90"})


@pytest.mark.parametrize("case", NEW_KEYS, ids=str)
def test_new_keys(case):
    check(case.arguments())


@pytest.mark.parametrize("heads", [4, 16])
@pytest.mark.parametrize("key", [0, 20, 40, 60, 100, 129])
def test_nan_of_a_hidden_key_stays_hidden(key, heads):
    """A NaN stays hidden in keys of each warp, of the first and the last block, with one split and with two."""
    case = DecodeCase((130,), 4, (heads, 1), (128, 128), 16, options=(("window", (60, 0)),))
    arguments = case.arguments() | {"num_splits": 1 + key % 40 // 20}
    whole, _ = check(arguments)
    page, row = arguments["page_table"][0, key // 16], key % 16
    arguments["v_cache"][page, row, :, ::3] = NAN
    out = onepass.attention_decode(**arguments)
    positions = torch.arange(126, 130, device=out.device)
    sees = (key <= positions) & (positions <= key + 60)
    assert out[:, sees][..., ::3].isnan().all()
    assert_rounded_alike(out[:, ~sees], whole[:, ~sees])


@pytest.mark.parametrize("heads", [(8, 2), (40, 2)])
@pytest.mark.parametrize(("page_size", "split_size"), [(None, 256), (16, 256), (None, 192)])
def test_equal_bits_in_any_batch(page_size, split_size, heads):
    filled = (5000, 64, 900, 1, 3333)
    arguments = DecodeCase(filled, 2, heads, (128, 128), page_size).arguments()
    options = {"split_size": split_size, "return_lse": True}
    together = onepass.attention_decode(**arguments, **options)
    for b in range(len(filled)):
        shared = ("k_cache", "v_cache") if page_size else ()
        alone = {n: t if n in shared else t[b : b + 1] for n, t in arguments.items()}
        for one, many in zip(onepass.attention_decode(**alone, **options), together, strict=True):
            assert torch.equal(one, many[b : b + 1])


@pytest.mark.parametrize("heads", [(16, 2), (40, 2)])
def test_equal_bits_run_to_run(heads):
    arguments = DecodeCase((5000, 64, 900, 1, 3333), 2, heads, (128, 128), 16).arguments()
    first = onepass.attention_decode(**arguments, return_lse=True)
    for _ in range(200 if ON_GPU else 2):
        for now, then in zip(onepass.attention_decode(**arguments, return_lse=True), first, strict=True):
            assert torch.equal(now, then)


@pytest.mark.skipif(not ON_GPU, reason="needs graphs and synchronization of a GPU")
@pytest.mark.parametrize("heads", [(8, 2), (80, 2)])
def test_graph_of_a_growing_cache_without_synchronisation(heads):
    arguments = DecodeCase((100, 7), 1, heads, (128, 128), 16, seqlen_new=1).arguments()
    graph, out = captured(lambda: onepass.attention_decode(**arguments, num_splits=3))
    for _ in range(5):
        graph.replay()
        torch.testing.assert_close(out, onepass.attention_decode(**arguments, num_splits=3), rtol=0, atol=0)
        arguments["cache_seqlens"] += 1


@pytest.mark.parametrize(
    ("heads", "options"),
    [
        ((8, 2), {}),
        ((8, 2), {"window": (99, 0)}),
        ((8, 2), {"seqstart_k": (30, 0), "softcap": 20.0}),
        ((80, 2), {}),
        ((80, 2), {"window": (99, 0), "softcap": 20.0}),
    ],
    ids=str,
)
def test_cache_that_grows(heads, options):
    """One preparation serves the lengths of many tokens, and another layer that repeats a call gets its bits."""
    options = {"causal": True, "window": None, "softcap": None, "softmax_scale": None, "seqstart_k": None} | options
    if options["seqstart_k"] is not None:
        options["seqstart_k"] = torch.tensor(options["seqstart_k"], dtype=torch.int32, device=DEVICE)
    q, *caches = randn(2, 1, heads[0], 64), *(randn(2, heads[1], size(300, 90), 64) for _ in range(2))
    fast_path.forget()
    for length in range(60, caches[0].shape[2], 7):
        k_cache, v_cache = (t[:, :, :length].contiguous().transpose(1, 2) for t in caches)
        own = options | {"cache_seqlens": torch.full((2,), length, dtype=torch.int32, device=DEVICE)}
        out, _ = check({"q": q, "k_cache": k_cache, "v_cache": v_cache} | own)
        again, call = repeatable_decode(q, k_cache, v_cache, **own)
        assert torch.equal(again, out)
        if call is None:
            again, call = repeatable_decode(q, k_cache, v_cache, **own)
            assert torch.equal(again, out)
        expected = onepass.attention_decode(-q, k_cache, 2 * v_cache, **own)
        assert torch.equal(call.again(-q, k_cache, 2 * v_cache), expected)
    # up to 64, 128, 192, 256 and 320 keys, with and without lse, in tiles and of the oracle
    assert not ON_GPU or fast_path.num_kept() <= 5 * 4


@pytest.mark.parametrize("saved", ["k_cache", "v_cache"])
@pytest.mark.parametrize("case", APPENDING, ids=str)
def test_a_graph_that_saved_a_cache_is_refused_after_new_keys(case, saved):
    """A first call uses the operator and a repeated one the fast path; torch does not see a kernel's writes."""
    arguments = case.arguments()
    for _ in range(2):
        # e4m3 has no differentiable product, but a view of its bytes shares its version counter
        cache = arguments[saved].view(torch.uint8) if arguments[saved].itemsize == 1 else arguments[saved]
        graph = (torch.ones((), device=cache.device, requires_grad=True) * cache).sum()
        onepass.attention_decode(**arguments)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            graph.backward()
        version = arguments[saved]._version
        onepass.attention_decode(**(arguments | {"k_new": None, "v_new": None}))
        assert arguments[saved]._version == version


def test_caches_of_one_allocation_and_caches_that_share_elements():
    arguments = DecodeCase((100, 7), 1, (8, 2), (128, 128), seqlen_new=1).arguments()
    apart = onepass.attention_decode(**arguments)
    both = torch.stack((arguments["k_cache"], arguments["v_cache"]), 2)
    for _ in range(2):
        inside = arguments | {"k_cache": both[:, :, 0], "v_cache": both[:, :, 1]}
        assert torch.equal(onepass.attention_decode(**inside), apart)
        with pytest.raises(ValueError, match="v_cache: expected memory apart from k_cache"):
            onepass.attention_decode(**(inside | {"v_cache": both[:, :, 0]}))
    without = {name: t for name, t in inside.items() if name not in ("k_new", "v_new")}
    assert onepass.attention_decode(**(without | {"v_cache": both[:, :, 0]})).isfinite().all()


@pytest.mark.parametrize("is_in_mode", [False, True])
def test_caches_of_inference_mode_take_new_keys(is_in_mode):
    arguments = DecodeCase((100, 7), 1, (8, 2), (128, 128), seqlen_new=1).arguments()
    expected = onepass.attention_decode(**(arguments | {n: arguments[n].clone() for n in ("k_cache", "v_cache")}))
    with torch.inference_mode():
        arguments |= {n: arguments[n].clone() for n in ("k_cache", "v_cache")}
    for _ in range(2):
        with torch.inference_mode(is_in_mode):
            assert torch.equal(onepass.attention_decode(**arguments), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_merge_partials(packed):
    outs, lses = randn(5, 3, 70, 4, 64), randn(5, 3, 4, 70, dtype=torch.float32)
    if packed:
        outs, lses = outs[:, 0], lses[:, 0]
    assert partials_ops.merges_in_one_kernel(outs.unbind(0), lses.unbind(0)) == ON_GPU
    merged = onepass.merge_partials(outs, lses)
    oracle = onepass.merge_partials(outs.cpu().double(), lses.cpu().double())
    plain = onepass.merge_partials(outs.cpu(), lses.cpu())
    assert compare("out", merged.out, oracle.out, plain.out).ok
    assert compare_lse(merged.lse, oracle.lse).ok

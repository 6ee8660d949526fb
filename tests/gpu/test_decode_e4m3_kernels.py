"""attention_decode over an e4m3 cache on a GPU: values against float64, new keys, NaN, graphs.

The oracle and the results in plain PyTorch come from the tiled backend on the same device and the same e4m3 numbers.
"""

import pytest
import torch
from decode_cases import FILLED, E4m3Case, captured
from gpu_cases import BACKEND, DEVICE, IS_READY, ON_GPU, assert_rounded_alike

import onepass
from onepass.testing.budget import compare, compare_lse

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_READY, reason="needs a GPU with the kernels")]


def by_tiles(arguments):
    return onepass.attention_decode(**(arguments | {"num_splits": None}), return_lse=True, backend="tiled")


def assert_by_kernels(arguments):
    support = onepass.supports(**arguments)
    assert support.backend in (("sm90", "sm80") if ON_GPU else ("tiled",)), support.reason


def check(arguments):
    """Compare with the tiled backend in float64, over the cache that the kernels leave behind if there are new keys."""
    assert_by_kernels(arguments)
    there = {n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in arguments.items()}
    out, lse = onepass.attention_decode(**arguments, return_lse=True)
    plain = by_tiles(there)
    for name in ("k_cache", "v_cache"):
        now, other = (t[name].float() for t in (arguments, there))
        # after rotation, bf16 may differ in its last bit, and e4m3 therefore in its own last bit
        rtol = 0.13 if name == "k_cache" and "rotary_cos" in arguments else 0.0
        torch.testing.assert_close(now, other, rtol=rtol, atol=1e-6 if rtol else 0.0, equal_nan=True)
    wide = {n: t for n, t in arguments.items() if n not in ("k_new", "v_new", "rotary_cos", "rotary_sin")}
    wide["q"] = arguments["q"].double()
    if "k_new" in arguments:
        wide["cache_seqlens"] = arguments["cache_seqlens"] + arguments["k_new"].shape[1]
    if "rotary_cos" in arguments:
        assert compare("out", out, plain.out.double(), plain.out, factor=4.0).ok
        return
    oracle = by_tiles(wide)
    for row in (compare("out", out, oracle.out, plain.out), compare_lse(lse, oracle.lse)):
        assert row.ok, row


def case_of(
    descales, seqlen_q=1, d=128, page_size=None, filled=FILLED, heads=(8, 2), seqlen_new=0, rotary=False, **options
):
    dtype = options.pop("dtype", torch.bfloat16)
    options = tuple(options.items())
    return E4m3Case(filled, seqlen_q, heads, (d, d), page_size, seqlen_new, rotary, dtype, options, descales)


CASES = [
    # every kind of descales; page sizes and numbers of splits that need no kernels of their own
    *(case_of(kind, num_splits=n) for kind in ("none", "tensor", "head", "entry") for n in (1, 3)),
    *(case_of("block", num_splits=n) for n in (1, 7, 64)),
    *(case_of("page", page_size=size, num_splits=2) for size in (16, 48, 64, 256)),
    *(case_of("entry", page_size=size) for size in (1, 7)),
    case_of("page", page_size=16, filled=(70000, 1, 33333)),
    # head dims, and numbers of rows of a tile
    *(case_of("page", d=d, page_size=16, num_splits=3) for d in (64, 96, 192, 256)),
    *(case_of("entry", d=d, num_splits=1) for d in (40, 18)),
    *(case_of("page", m, page_size=16, heads=(h, 2), num_splits=2) for m, h in ((1, 32), (3, 10), (8, 8), (40, 8))),
    # options
    *(
        case_of("page", m, page_size=16, filled=(1000, 130), heads=(8, 1), num_splits=5, **options)
        for m, options in (
            (2, {"dtype": torch.float16, "window": (100, 0), "has_sinks": True}),
            (16, {"softcap": 5.0, "causal": False, "window": (300, 20)}),
        )
    ),
]
HAS_HOPPER_KERNEL = BACKEND == "sm90"
# calls that the Hopper forward takes: many rows, and descales of heads
MANY_ROWS = [
    *(case_of(kind, 40, page_size=size, num_splits=n) for kind, size, n in (("none", 16, 1), ("head", 64, 3))),
    *(case_of("entry", 300, d=d, filled=(1000, 301), num_splits=2) for d in (96, 128, 80)),
    # with splits the bits of a 16-bit cache would be others: its tiles have 192 rows, and so other shares of the keys
    case_of("entry", 300, d=64, filled=(1000, 301), num_splits=1),
    case_of("tensor", 60, page_size=48, heads=(32, 8), dtype=torch.float16, window=(100, 0), has_sinks=True),
    case_of("entry", 60, causal=False, softcap=5.0, num_splits=1),
]
NEW_KEYS = [
    case_of(kind, 4, page_size=size, filled=(100, 0, 63), seqlen_new=4, rotary=rotary, num_splits=2)
    for size, kind in ((None, "block"), (16, "page"))
    for rotary in (False, True)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    check(case.arguments())


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("case", MANY_ROWS, ids=str)
def test_many_rows(case, sign):
    arguments = case.arguments()
    assert not HAS_HOPPER_KERNEL or onepass.supports(**arguments).backend == "sm90"
    if "k_descale" in arguments:
        arguments["k_descale"] = sign * arguments["k_descale"]
    check(arguments)


@pytest.mark.parametrize("case", MANY_ROWS, ids=str)
def test_the_bits_of_a_16_bit_cache(case):
    """The Hopper forward computes the same bits from a 16-bit cache of the same values."""
    arguments = case.arguments()
    if not HAS_HOPPER_KERNEL:
        return check(arguments)
    for name in ("k_descale", "v_descale"):
        if name in arguments:
            arguments[name] = torch.ones_like(arguments[name])
    rounded = {n: t.to(arguments["q"].dtype) for n, t in arguments.items() if n in ("k_cache", "v_cache")}
    rounded = {n: t for n, t in (arguments | rounded).items() if "descale" not in n}
    found, expected = (onepass.attention_decode(**a, return_lse=True, backend="sm90") for a in (arguments, rounded))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", NEW_KEYS, ids=str)
def test_new_keys(case):
    check(case.arguments())


def test_descales_that_grow_and_shrink():
    """The accumulator O is rescaled to the largest descale of V so far."""
    arguments = case_of("page", page_size=16, filled=(256,), num_splits=1).arguments()
    by_key = torch.logspace(-12, 12, 16, device=DEVICE)
    for order in (by_key, by_key.flip(0)):
        arguments["v_descale"] = arguments["v_descale"].clone()
        arguments["v_descale"][arguments["page_table"][0, :16].long()] = order[:, None]
        check(arguments)


def test_nan_of_a_hidden_key_stays_hidden():
    arguments = case_of("block", 8, filled=(130,), heads=(4, 2), num_splits=2).arguments()
    assert_by_kernels(arguments)
    whole = onepass.attention_decode(**arguments)
    arguments["v_cache"].view(torch.uint8)[:, 126] = 0x7F
    out = onepass.attention_decode(**arguments)
    assert out[:, 4:].isnan().all()  # the queries at positions from 126 on
    assert_rounded_alike(out[:, :4], whole[:, :4])


@pytest.mark.skipif(not ON_GPU, reason="needs graphs and synchronization of a GPU")
def test_graph_of_a_growing_cache_without_synchronisation():
    arguments = case_of("page", page_size=16, filled=(100, 7), seqlen_new=1, num_splits=3).arguments()
    assert_by_kernels(arguments)
    graph, out = captured(lambda: onepass.attention_decode(**arguments))
    for _ in range(5):
        graph.replay()
        torch.testing.assert_close(out, onepass.attention_decode(**arguments), rtol=0, atol=0)
        arguments["cache_seqlens"] += 1

"""The kernels of attention_decode over an e4m3 cache compute what the tiled backend does: their PTX runs on the CPU."""

from dataclasses import replace

import packages
import pytest
import sm80_decode
import torch
from test_decode_values import OPTIONS, cache_of

from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.kernels.heuristics.decode import decode_config_sm80
from onepass.testing.budget import compare, compare_lse
from onepass.tiled import cache
from onepass.tiled.decode import decode as tiled
from onepass.validation.decode import check_decode

pytestmark = packages.needs_machine_code

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


def scales(*shape, seed):
    """Scales over three orders of magnitude."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(7).sub(5).exp()


def e4m3_cache(filled, seqlen_q, heads, head_dims, kind, **more):
    """`cache_of` in e4m3, and kv_block. Args: kind: what has a descale of its own, in the words of `descale_of`."""
    inputs = cache_of(filled, seqlen_q, heads, head_dims, **more)
    inputs = inputs._replace(k_cache=inputs.k_cache.to(E4M3), v_cache=inputs.v_cache.to(E4M3))
    kv_block = None
    if kind != "none":
        pages, size, heads_kv = inputs.k_cache.shape[:3]
        shape = {"tensor": (), "head": (heads_kv,), "entry": (len(filled), heads_kv), "page": (pages, heads_kv)}
        if kind.startswith("block of "):
            kv_block = int(kind.removeprefix("block of "))
            shape[kind] = len(filled), heads_kv, -(-size // kv_block)
        kv_block = size if kind == "page" else kv_block
        inputs = inputs._replace(k_descale=scales(*shape[kind], seed=31), v_descale=scales(*shape[kind], seed=32))
    return inputs, kv_block


def copied(inputs):
    return inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())


def check(inputs, kv_block, num_sms=4, **options):
    """Compare with the tiled backend in float64, with the error of the tiled backend in this dtype as budget."""
    options = OPTIONS | {"kv_block": kv_block} | options
    problem = check_decode(inputs, **options)
    copies = copied(inputs)
    out, lse, k_cache, v_cache = sm80_decode.decode(problem, inputs, num_sms)
    tiled_result = tiled(replace(problem, num_splits=1, split_size=None), copies)
    for now, other in ((k_cache, copies.k_cache), (v_cache, copies.v_cache)):
        assert_same_numbers(now, other)
    wide = copies._replace(q=copies.q.double(), k_new=None, v_new=None)
    wide = wide._replace(cache_seqlens=inputs.cache_seqlens + inputs.seqlen_new)
    oracle = tiled(check_decode(wide, **(options | {"num_splits": 1, "split_size": None})), wide)
    rows = compare("out", out, oracle[0], tiled_result[0]), compare_lse(lse, oracle[1])
    assert all(row.ok for row in rows), "\n".join(map(str, rows))
    return out, lse


def assert_same_numbers(a, b):
    a, b = a.float(), b.float()
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.nan_to_num(9), b.nan_to_num(9))


CASES = {
    "no descales": (e4m3_cache((200, 0, 65), 1, (8, 2), (64, 64), "none"), {"num_splits": 2}),
    "one": (e4m3_cache((200, 1), 2, (8, 2), (64, 64), "tensor", dtype=FP16), {"num_splits": 1}),
    "heads": (e4m3_cache((100, 7), 1, (4, 2), (64, 64), "head", page_size=5), {"num_splits": 2}),
    "entries": (e4m3_cache((130, 200), 4, (8, 2), (64, 64), "entry"), {"num_splits": 1, "softcap": 5.0}),
    "pages of 16": (e4m3_cache((200, 33, 0), 1, (8, 2), (64, 64), "page", page_size=16), {"num_splits": 3}),
    "pages of 48, window": (
        e4m3_cache((190, 97), 2, (8, 2), (64, 64), "page", page_size=48, dtype=FP16),
        {"num_splits": 1, "window": (70, 0)},
    ),
    "pages of 48, keys before the query": (
        e4m3_cache((190, 97), 2, (8, 2), (64, 64), "page", page_size=48, dtype=FP16),
        {"num_splits": 1, "window": (70, -20)},
    ),
    "blocks of 32": (e4m3_cache((200, 65), 3, (8, 2), (64, 64), "block of 32"), {"num_splits": 2}),
    "a head dim of 128": (e4m3_cache((150,), 1, (4, 1), (128, 128), "page", page_size=16), {"num_splits": 2}),
    "head dims of 256 and 96": (e4m3_cache((100,), 1, (2, 1), (256, 96), "block of 16"), {"num_splits": 1}),
    "small head dims": (e4m3_cache((100, 7), 2, (2, 2), (36, 20), "entry"), {"num_splits": 2}),
    "even head dims": (e4m3_cache((100, 7), 1, (2, 2), (34, 18), "entry"), {"num_splits": 1}),
    "many rows": (e4m3_cache((150, 40), 20, (8, 2), (64, 64), "page", page_size=16), {"num_splits": 2}),
    "many rows, one pass": (e4m3_cache((150, 40), 20, (8, 2), (64, 64), "block of 16"), {"num_splits": 1}),
    "32 rows": (e4m3_cache((150, 40), 8, (8, 2), (64, 64), "page", page_size=16), {"num_splits": 2}),
    "many rows of 256 columns": (e4m3_cache((70,), 20, (4, 1), (256, 64), "entry"), {"num_splits": 1}),
    "many rows of 96 and 192 columns": (e4m3_cache((70,), 20, (4, 1), (96, 192), "block of 16"), {"num_splits": 1}),
    "sinks": (
        e4m3_cache((200, 90), 1, (8, 4), (64, 64), "page", page_size=16, sinks=torch.linspace(-2, 9, 8)),
        {"num_splits": 4},
    ),
}


@pytest.mark.sampled(quick=2, slow=3)
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    (inputs, kv_block), options = CASES[name]
    check(inputs, kv_block, **options)
    problem = check_decode(inputs, **(OPTIONS | {"kv_block": kv_block}))
    is_along_keys = isinstance(decode_config_sm80(problem.attention, sm80_decode.ARCH_E4M3), DecodeConfigSm80)
    assert is_along_keys == ("many rows" not in name)


@pytest.mark.slow
def test_queries_of_any_magnitude():
    """One tile with rows of bf16 outside of fp16's range, and a row of zeros."""
    inputs, kv_block = e4m3_cache((100,), 4, (4, 1), (64, 64), "entry")
    magnitudes = torch.tensor([1e30, 1e-30, 0.0, 1.0]).view(1, 4, 1, 1)
    inputs = inputs._replace(q=(inputs.q * magnitudes).bfloat16())
    for scale in (1e-30, 1.0, 1e30):
        each = inputs._replace(q=inputs.q[:, [{1e-30: 0, 1.0: 3, 1e30: 1}[scale], 2]].contiguous())
        check(each, kv_block, softmax_scale=scale, num_splits=1)
    q = inputs.q.clone()
    q[0, 0, 0, 5], q[0, 1, 1, 6] = torch.nan, torch.inf  # in two rows
    out = sm80_decode.decode(check_decode(inputs._replace(q=q), **OPTIONS), inputs._replace(q=q))[0]
    is_number = out.isfinite().all(-1)
    assert not is_number[0, 0, 0]
    assert is_number.flatten().sum() >= 14


@pytest.mark.slow
def test_descales_that_grow_and_shrink():
    """O refers to the largest descale of V so far. Here the descales rise or fall by far more than fp16's range."""
    inputs, kv_block = e4m3_cache((256,), 1, (4, 1), (64, 64), "page", page_size=16, room=256)
    by_key = torch.logspace(-12, 12, 16)
    for order in (by_key, by_key.flip(0), by_key.roll(5)):
        v_descale = torch.ones(inputs.v_descale.shape)
        v_descale[inputs.page_table[0].long()] = order[:, None]
        check(inputs._replace(v_descale=v_descale), kv_block, num_splits=1)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("signs", [(-1.0, -1.0), (-1.0, 1.0)])
def test_negative_descales(signs):
    (inputs, kv_block), options = CASES["pages of 16"]
    by_page = torch.tensor(signs).repeat(len(inputs.v_descale))[: len(inputs.v_descale), None]
    check(inputs._replace(v_descale=inputs.v_descale * by_page), kv_block, **options)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(("key", "window"), [(126, None), (129, None), (117, (10, None))])
@pytest.mark.parametrize("kind", ["none", "block of 16"])
def test_nan_of_a_hidden_key_stays_hidden(key, window, kind):
    """A NaN in the first split (keys 0 to 127) and in the second; with a window, for rows that see both."""
    inputs, kv_block = e4m3_cache((130,), 8, (4, 1), (64, 64), kind)
    inputs = inputs._replace(q=inputs.q[:, :, :2].contiguous())  # 16 rows
    options = {"num_splits": 2, "window": window}
    whole, _ = check(inputs, kv_block, **options)
    for t in (inputs.v_cache, inputs.k_cache):
        bad = copied(inputs)
        bad[1 if t is inputs.k_cache else 2].view(torch.uint8)[:, key] = 0x7F
        out = sm80_decode.decode(check_decode(bad, **(OPTIONS | options | {"kv_block": kv_block})), bad)[0]
        positions = torch.arange(122, 130)
        sees = (key <= positions) & (window is None or positions <= key + 10)
        assert out[:, sees].isnan().all()
        torch.testing.assert_close(out[:, ~sees], whole[:, ~sees], rtol=0.02, atol=0.01)


# ---------------------------------------------------------------- append


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("kind", ["none", "entry", "page", "block of 16"])
@pytest.mark.parametrize("rotary", [False, True])
def test_append(kind, rotary):
    """The bits that the tiled backend writes, and no others; NaN stays, and what is too large becomes 448."""
    page_size = 16 if kind in ("page", "none") else None
    inputs, kv_block = e4m3_cache((14, 0, 33), 2, (4, 2), (10, 6), kind, page_size=page_size, room=48, seqlen_new=3)
    inputs.v_new[0, 0, 0, :5] = torch.tensor([1e9, -1e9, torch.inf, torch.nan, 2.0**-30])
    if rotary:
        angles = torch.arange(40)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
        inputs = inputs._replace(rotary_cos=angles.cos(), rotary_sin=angles.sin())
    problem = check_decode(inputs, **(OPTIONS | {"kv_block": kv_block}))
    _, k_cache, v_cache = sm80_decode.append(problem, copied(inputs))
    cache.append(problem, inputs)
    assert_same_numbers(v_cache, inputs.v_cache)
    if not rotary:
        assert_same_numbers(k_cache, inputs.k_cache)
    else:  # a rotation may be off by the last bit of bf16
        torch.testing.assert_close(k_cache.float(), inputs.k_cache.float(), rtol=0.13, atol=1e-6, equal_nan=True)


@pytest.mark.slow
def test_append_and_attend():
    inputs, kv_block = e4m3_cache((120, 0), 3, (8, 2), (64, 64), "page", page_size=16, seqlen_new=3)
    check(inputs, kv_block, num_splits=2)

"""The kernels of attention_decode compute what the tiled backend does: their PTX runs on the CPU."""

import itertools
from dataclasses import replace

import packages
import pytest
import sm80_decode
import torch
from decode_calls import random_decode_call

import onepass
from onepass import reference
from onepass.api import decode_calls
from onepass.kernels.launch import merge as merge_launch
from onepass.problem import Modifiers
from onepass.problem.decode import DecodeInputs
from onepass.testing.budget import compare, compare_lse
from onepass.tiled import cache
from onepass.tiled.decode import decode as tiled
from onepass.tiled.merge import merge_in_torch
from onepass.validation.decode import check_decode

pytestmark = packages.needs_machine_code

BF16, FP16, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
OPTIONS = {
    "causal": True,
    "window": None,
    "softcap": None,
    "softmax_scale": None,
    "return_lse": True,
    "rotary_interleaved": False,
    "num_splits": None,
    "split_size": None,
    "check_values": False,
    "kv_block": None,
}
NAN = float("nan")


def randn(*shape, dtype=FP32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cache_of(filled, seqlen_q, heads, head_dims, page_size=None, room=200, dtype=BF16, seqlen_new=0, **more):
    """Inputs whose cache is NaN wherever no key lies; with page_size, sequences lie in pages of random numbers."""
    batch, room = len(filled), room if page_size is None else -(-room // page_size) * page_size
    q = randn(batch, seqlen_q, heads[0], head_dims[0], dtype=dtype, seed=1)
    caches = [randn(batch, room, heads[1], d, dtype=dtype, seed=2 + i) for i, d in enumerate(head_dims)]
    for b, n in enumerate(filled):
        for rows in caches:
            rows[b, n:] = NAN
    table = None
    if page_size is not None:
        order = torch.randperm(batch * room // page_size + 2, generator=torch.Generator().manual_seed(5))
        table = order[:-2].view(batch, -1).int()
        for i, rows in enumerate(caches):
            caches[i] = rows.new_full((len(order), page_size, *rows.shape[2:]), NAN)
            caches[i][table.flatten().long()] = rows.view(-1, page_size, *rows.shape[2:])
        # after the keys a table may hold arbitrary values
        for b, n in enumerate(filled):
            table[b, -(-(n + seqlen_new) // page_size) :] = -9 if b % 2 else 10**6
    new = [None, None]
    if seqlen_new:
        new = [randn(batch, seqlen_new, heads[1], d, dtype=dtype, seed=7 + i) for i, d in enumerate(head_dims)]
    lengths = torch.tensor(filled, dtype=INT32)
    return DecodeInputs(q, *caches, lengths, table, k_new=new[0], v_new=new[1], **more)


def packed_of(filled, queries, behind, heads, head_dims, **more):
    """Packed queries of these lengths, and more rows after them."""
    inputs = cache_of(filled, max(queries), heads, head_dims, **more)
    rows = [q[:n] for q, n in zip(inputs.q, queries, strict=True)]
    q = torch.cat([*rows, randn(behind, heads[0], head_dims[0], dtype=inputs.q.dtype, seed=10)])
    return inputs._replace(q=q, cu_seqlens_q=torch.tensor([0, *itertools.accumulate(queries)], dtype=INT32))


def check(inputs, num_sms=4, **options):
    """Compare with the tiled backend in float64, with the error of PyTorch operations in this dtype as budget."""
    problem = check_decode(inputs, **(OPTIONS | options))
    copies = inputs._replace(k_cache=inputs.k_cache.clone(), v_cache=inputs.v_cache.clone())
    out, lse, k_cache, v_cache = sm80_decode.decode(problem, inputs, num_sms)
    expected = tiled(replace(problem, num_splits=1, split_size=None), copies)
    for now, other in ((k_cache, copies.k_cache), (v_cache, copies.v_cache)):
        assert torch.equal(now.isnan(), other.isnan())
        torch.testing.assert_close(now.nan_to_num(9), other.nan_to_num(9), rtol=0.01, atol=1e-6)
    wide = {
        name: t.double()
        for name, t in zip(DecodeInputs._fields, copies, strict=True)
        if isinstance(t, torch.Tensor) and t.dtype.is_floating_point
    }
    wide = copies._replace(**wide)._replace(
        k_new=None, v_new=None, cache_seqlens=inputs.cache_seqlens + inputs.seqlen_new
    )
    oracle = tiled(check_decode(wide, **(OPTIONS | options | {"num_splits": 1, "split_size": None})), wide)
    rows = compare("out", out, oracle[0], expected[0]), compare_lse(lse, oracle[1])
    assert all(row.ok for row in rows), "\n".join(map(str, rows))
    return out, lse


SINKS = randn(8, seed=9)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("num_splits", [1, 2, 3, 8])
def test_splits(num_splits):
    """An empty sequence, splits without keys, queries that stand before the first key."""
    for filled in ((200, 0, 65), (1, 128, 3)):
        check(cache_of(filled, 4, (8, 2), (64, 64)), num_splits=num_splits)


CASES = {
    "pages of 1, 16 queries": (cache_of((33, 70), 16, (8, 2), (64, 64), page_size=1, room=70), {"num_splits": 2}),
    "pages of 48": (cache_of((190, 5, 97), 1, (8, 2), (64, 64), page_size=48), {"num_splits": 3}),
    "one pass over pages": (cache_of((190, 5), 2, (8, 2), (64, 64), page_size=7), {"num_splits": 1}),
    "window, softcap, sinks": (
        cache_of((200, 90), 3, (8, 4), (40, 24), dtype=FP16, sinks=SINKS),
        {"num_splits": 4, "window": (70, 2), "softcap": 5.0, "causal": False},
    ),
    "large sinks, one of the splits": (
        cache_of((65, 0), 1, (8, 2), (64, 64), sinks=100 * SINKS),
        {"num_splits": 2},
    ),
    "float32 in pages": (
        cache_of((100, 7), 2, (5, 1), (16, 8), page_size=10, dtype=FP32),
        {"num_splits": 3},
    ),
    "sinks, a sequence without keys": (cache_of((65, 0, 2), 4, (8, 2), (64, 64), sinks=SINKS), {"num_splits": 1}),
    "packed sinks, a sequence without keys, rows of none": (
        packed_of((65, 0, 2), (4, 5, 3), 2, (8, 2), (64, 64), sinks=SINKS),
        {"num_splits": 2},
    ),
    "odd head dims": (cache_of((100, 7), 2, (2, 2), (5, 7)), {"num_splits": 2}),
    "32 rows": (cache_of((190, 5), 7, (8, 2), (64, 96), page_size=16, sinks=SINKS), {"num_splits": 1}),
    "32 rows, a window that hides all keys of some warps": (
        cache_of((200, 31), 3, (18, 2), (64, 64)),
        {"num_splits": 1, "window": (9, 0)},
    ),
    "48 rows: warps along the rows": (cache_of((130, 5), 12, (8, 2), (64, 64), page_size=16), {"num_splits": 2}),
    "two warps": (cache_of((150, 9), 1, (3, 1), (256, 136), page_size=16), {"num_splits": 2}),
    "chosen": (cache_of((1100, 700), 1, (4, 1), (64, 64), room=1200), {}),
    "splits of 64 keys": (cache_of((200, 0, 65), 4, (8, 2), (64, 64)), {"split_size": 64}),
}


def int32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=INT32)


def padded_on_the_left(inputs, starts):
    """The inputs with NaN in the rows of the caches before each sequence begins."""
    for b, start in enumerate(starts):
        for rows in inputs[1:3]:
            rows[b, :start] = NAN
    return inputs._replace(modifiers=Modifiers(seqstart_k=int32(starts)))


RANGES = torch.stack((torch.arange(3) * 20, torch.arange(3) * 20 + 90), -1).int().expand(1, 8, 3, 2).clone()
RANGES[:, 3] += 25
SLOPES = torch.linspace(0.02, 0.3, 8)
BIAS = randn(2, 1, 1, 200, seed=4)
BIAS[randn(2, 1, 1, 200, seed=5) > 1] = -torch.inf
MODIFIED = {
    "left padding, 4 heads in a tile": (
        padded_on_the_left(cache_of((190, 5, 97), 2, (8, 2), (64, 64)), (50, 0, 97)),
        {"num_splits": 3},
    ),
    "ranges of each head, ALiBi, pages": (
        cache_of((190, 90), 3, (8, 2), (64, 64), page_size=48, modifiers=Modifiers(None, RANGES, None, SLOPES)),
        {"num_splits": 2, "causal": False},
    ),
    "positions, bias, softcap, 48 rows": (
        cache_of(
            (200, 65),
            12,
            (8, 2),
            (64, 64),
            modifiers=Modifiers(q_positions=torch.arange(12)[None].int() * 15, bias=BIAS),
        ),
        {"num_splits": 1, "softcap": 5.0},
    ),
    "packed, ALiBi of each sequence, ranges, window": (
        packed_of(
            (165, 40, 2),
            (4, 5, 3),
            2,
            (8, 2),
            (64, 64),
            modifiers=Modifiers(
                key_ranges=torch.stack((torch.arange(14) * 5, torch.arange(14) * 3 + 100), -1).int()[None],
                alibi_slopes=torch.stack([SLOPES, SLOPES.flip(0), SLOPES / 2]),
            ),
        ),
        {"num_splits": 2, "window": (120, 0), "causal": False},
    ),
    "float32, left padding and ALiBi": (
        padded_on_the_left(cache_of((100, 7), 2, (5, 1), (16, 8), dtype=FP32), (20, 3)),
        {"num_splits": 3},
    ),
}


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("name", MODIFIED)
def test_modifiers(name):
    inputs, options = MODIFIED[name]
    check(inputs, **options)


NEGATIVE = ((40, -2), (-1, 40), (-3, 250), (250, -150), (-70, 70), (5, -6))


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("name", ["window, softcap, sinks", "32 rows, a window that hides all keys of some warps"])
def test_windows_with_negative_sides(name):
    """The kernels of other windows compute these as well; rows, warps and splits that see no key are among them."""
    inputs, options = CASES[name]
    for window in NEGATIVE:
        check(inputs, **(options | {"causal": False, "window": window}))


@pytest.mark.sampled(quick=1, slow=5)
@pytest.mark.parametrize("name", CASES)
def test_values(name):
    inputs, options = CASES[name]
    check(inputs, **options)


# Calls that have heads, and that the interpreter has memory for.
RANDOM = (18, 38, 2, 3, 4, 5, 7, 8, 12, 13, 14, 15, 19, 21, 23, 25, 27, 28, 29, 30, 31, 32, 33, 34, 35, 37, 41, 45)


# Calls of 16 bits that have heads and fit into memory; the first two are over pages and in splits.
PACKED = (12, 2, 0, 1, 4, 5, 6, 8, 9, 10, 13, 14)
# Calls with modifiers, whose kernels keep all values in registers.
RANDOM_MODIFIED, RANDOM_MODIFIED_PACKED = (1008, 1001, 1007), (1004, 1000, 1007, 1008)


@pytest.mark.sampled(quick=0, slow=8)
@pytest.mark.parametrize(
    ("seed", "packed", "with_modifiers"),
    [
        (seed, packed, with_modifiers)
        for packed, with_modifiers, seeds in (
            (False, False, RANDOM),
            (True, False, PACKED),
            (False, True, RANDOM_MODIFIED),
            (True, True, RANDOM_MODIFIED_PACKED),
        )
        for seed in seeds
    ],
)
def test_random_calls(seed, packed, with_modifiers, monkeypatch):
    """The kernels run one after another, in place of what `attention_decode` would run here."""

    def by_kernels(**arguments):
        problem, inputs = decode_calls.problem_of("attention_decode", arguments)
        out, lse, *caches = sm80_decode.decode(problem, inputs)
        for cache_, written in zip(inputs[1:3], caches, strict=True):
            if written is not cache_:
                cache_.view(torch.uint8).copy_(written.view(torch.uint8))
        return out, lse

    monkeypatch.setattr(onepass, "attention_decode", by_kernels)
    dtype = (BF16, FP16, BF16, FP32)[seed % 4]
    call = random_decode_call(seed, dtype, 70, packed=packed, with_modifiers=with_modifiers, for_kernels=True)
    call.check()


@pytest.mark.slow
def test_references_of_the_warps_differ():
    """Each warp meets the largest scores of a sequence once, where the sums of the other warps hardly count."""
    inputs = cache_of((128, 128, 128, 128), 1, (4, 1), (64, 64))
    for b in range(4):
        inputs.k_cache[b, 16 * b : 16 * (b + 1)] *= 40
    check(inputs, num_splits=1)


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize("page_size", [None, 5])
def test_the_order_of_copies_and_warps_changes_no_bit(page_size):
    """Buffers are full before they are read and are filled again after that, in any order of warps."""
    inputs = cache_of((250, 190), 1, (8, 2), (128, 128), page_size=page_size, room=250)
    problem = check_decode(inputs, **OPTIONS)
    results = [
        sm80_decode.forward(problem, inputs, 1, copies_late=late, warps_reversed=last_first)
        for late in (True, False)
        for last_first in (True, False)
    ]
    assert results[0][0].isfinite().all()
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_splits_of_equal_keys_give_equal_bits_in_any_batch_and_any_cache():
    """Other tiles, other splits, another grid and pages give the same bits; a split is several blocks of each warp."""
    filled = (300, 130, 64)
    inputs, paged = (cache_of(filled, 2, (8, 2), (64, 64), room=700, page_size=size) for size in (None, 20))
    together = check(paged, split_size=256)
    for b, n in enumerate(filled):
        at, room = slice(b, b + 1), -(-n // 4) * 4
        caches = (c[at, :room].clone() for c in inputs[1:3])
        alone = DecodeInputs(inputs.q[at].clone(), *caches, inputs.cache_seqlens[at])
        for one, many in zip(check(alone, split_size=256), together, strict=True):
            assert torch.equal(one, many[at])


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(("key", "window"), [(126, None), (129, None), (117, (10, None))])
def test_nan_of_a_hidden_key_stays_hidden_in_its_split(key, window):
    """A NaN in the first split (keys 0 to 127) and in the second; with a window, for rows that see both."""
    inputs = cache_of((130,), 8, (4, 1), (64, 64))
    options = {"num_splits": 2, "window": window}
    whole, _ = check(inputs, **options)
    inputs.v_cache[:, key] = NAN
    out = sm80_decode.decode(check_decode(inputs, **(OPTIONS | options)), inputs)[0]
    positions = torch.arange(122, 130)
    sees = (key <= positions) & (window is None or positions <= key + 10)
    assert out[:, sees].isnan().all()
    torch.testing.assert_close(out[:, ~sees], whole[:, ~sees], rtol=0.02, atol=0.01)


# ---------------------------------------------------------------- append


@pytest.mark.sampled(quick=2, slow=3)
@pytest.mark.parametrize("page_size", [None, 3])
@pytest.mark.parametrize(
    ("head_dims", "rotary"),
    [
        ((10, 6), None),
        ((24, 32), None),
        ((10, 6), (FP32, False)),
        ((24, 32), (BF16, False)),
        ((24, 32), (BF16, True)),
        ((5, 7), (FP32, True)),
    ],
)
def test_append(page_size, head_dims, rotary):
    """Copies of several widths write the new rows and no other; queries are rotated as if at the last keys."""
    inputs = cache_of((20, 0, 33), 5, (4, 2), head_dims, page_size=page_size, room=36, seqlen_new=3)
    options = OPTIONS
    if rotary is not None:
        dtype, is_interleaved = rotary
        options = OPTIONS | {"rotary_interleaved": is_interleaved}
        angles = torch.arange(40)[:, None] * 0.3 ** torch.arange({10: 4, 24: 8, 5: 2}[head_dims[0]])
        inputs = inputs._replace(rotary_cos=angles.cos().to(dtype), rotary_sin=angles.sin().to(dtype))
    problem = check_decode(inputs, **options)
    q, k_cache, v_cache = sm80_decode.append(problem, inputs)
    cache.append(problem, inputs)
    if rotary is not None:
        torch.testing.assert_close(q, cache.rotated_queries(problem, inputs), rtol=0.01, atol=1e-6)
    torch.testing.assert_close(k_cache, inputs.k_cache, rtol=0.01, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(v_cache, inputs.v_cache, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
def test_append_and_attend():
    inputs = cache_of((120, 0), 3, (8, 2), (64, 64), page_size=16, seqlen_new=3)
    check(inputs, num_splits=2)


@pytest.mark.parametrize("page_size", [None, 4])
def test_bad_lengths_and_pages_write_nothing_outside(page_size):
    inputs = cache_of((20, 4, 8, 8), 1, (2, 1), (8, 8), page_size=page_size, room=24, seqlen_new=2)
    if page_size is not None:
        inputs.page_table[1] = torch.tensor([-1, 10**9, -(2**31), 26, 27, 28])  # there are 26 pages
    lengths = torch.tensor([23, 4 if page_size else 24, -1, 2**28], dtype=INT32)
    problem = check_decode(inputs, **OPTIONS)
    _, k_cache, v_cache = sm80_decode.append(problem, inputs._replace(cache_seqlens=lengths))
    for now, was, new in ((k_cache, inputs.k_cache, inputs.k_new), (v_cache, inputs.v_cache, inputs.v_new)):
        for entry, position, row in ((0, 23, 0), (2, 0, 1)):  # the only rows that the cache has
            page = entry if page_size is None else inputs.page_table[entry, position // page_size]
            row_in_page = position if page_size is None else position % page_size
            if 0 <= page < len(was):
                assert torch.equal(now[page, row_in_page], new[entry, row])
                was = was.clone()
                was[page, row_in_page] = new[entry, row]
        assert torch.equal(now.nan_to_num(9), was.nan_to_num(9))


# ---------------------------------------------------------------- merge


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize(("dtype", "head_dim_v"), [(FP32, 70), (BF16, 7)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_merge(dtype, head_dim_v, has_sinks):
    """70 partials, more than a warp has lanes; rows that one, some or none of them have seen; one warp or several."""
    outs, lses = randn(70, 2, 3, 2, head_dim_v, dtype=dtype), 5 * randn(70, 2, 2, 3, seed=1)
    lses[1:, 0, :, 0] = -torch.inf
    lses[::3, 0, :, 1] = -torch.inf
    lses[:, 1, 0] = -torch.inf
    seen = (lses > -torch.inf).transpose(-1, -2)
    outs[~seen] = NAN
    sinks = torch.tensor([3.0, 200.0]) if has_sinks else None
    expected = merge_in_torch([o.double() for o in outs], [x.double() for x in lses], sinks)
    like = torch.empty(outs.shape[1:], dtype=dtype), torch.empty(lses.shape[1:])
    out, lse = sm80_decode.merge(outs, lses, *like, sinks, last_first=True)
    assert compare("out", out, expected[0], merge_in_torch(outs, lses, sinks)[0].to(dtype)).ok
    assert compare_lse(lse, expected[1]).ok
    if not has_sinks:
        assert torch.equal(out[0, 0], outs[0, 0, 0])  # a single partial is not rounded twice


@pytest.mark.parametrize(("num_partials", "is_packed"), [(3, False), (70, True)])
def test_the_launch_of_a_merge(monkeypatch, num_partials, is_packed):
    """The kernel that `merge_partials` picks for its tensors, and the arguments that it gets."""
    outs, lses = randn(num_partials, 2, 3, 2, 24, dtype=BF16), 3 * randn(num_partials, 2, 2, 3, seed=1)
    if is_packed:
        outs, lses = outs[:, 0], lses[:, 0]

    def kernel_of(key, arch):
        def kernel(outs, lses, out, lse, sinks, offsets, blocks):
            assert sinks is offsets is None
            assert blocks == merge_launch.merge_blocks(out, len(outs))
            results = sm80_decode.merge(outs, lses, out, lse, None, key=key)
            for target, result in zip((out, lse), results, strict=True):
                target.copy_(result)

        return kernel

    monkeypatch.setattr(merge_launch, "merge_kernel_of", kernel_of)
    monkeypatch.setattr(merge_launch, "arch_of", lambda device: sm80_decode.ARCH)
    out, lse = merge_launch.merge_partials(outs, lses)
    oracle = merge_in_torch([o.double() for o in outs], [x.double() for x in lses])
    assert compare("out", out, oracle[0], merge_in_torch(outs, lses)[0].to(BF16)).ok
    assert compare_lse(lse, oracle[1]).ok


@pytest.mark.parametrize("sink", [-300.0, 30.0, 80.0, 250.0])
def test_merge_with_a_sink_that_dominates_or_vanishes(sink):
    """The keys' share beside the sink is e^-20, e^-70, or one that float32 does not distinguish from 0; or it is 1.

    A row without keys has the sink alone.
    """
    outs, lses = randn(5, 2, 3, 2, 64), 3 * randn(5, 2, 2, 3, seed=1)
    lses[:, 1, :, 2], outs[:, 1, 2] = -torch.inf, NAN
    sinks = torch.tensor([sink, 1.0])
    expected = merge_in_torch([o.double() for o in outs], [x.double() for x in lses], sinks)
    in_torch = merge_in_torch(outs, lses, sinks)
    out, lse = sm80_decode.merge(outs, lses, torch.empty(outs.shape[1:]), torch.empty(lses.shape[1:]), sinks)
    # a share is as exact as the exponent that it comes from, see onepass/testing/rounding.py
    terms = (1 + expected[1].abs() + sinks.double()[:, None].abs()).mT[..., None]
    floor = torch.finfo(FP32).eps * terms * expected[0].abs()
    for h in range(2):  # each head by its own largest value
        one_head = [x[:, :, h : h + 1] for x in (out, expected[0], in_torch[0], floor)]
        row = compare("out", *one_head[:3], floor=one_head[3])
        assert row.ok, row
    assert compare_lse(lse, expected[1]).ok
    for warps, last_first in ((1, False), (8, True)):
        like = torch.empty_like(out), torch.empty_like(lse)
        again = sm80_decode.merge(outs, lses, *like, sinks, row_warps=warps, last_first=last_first)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)


def test_merge_passes_nan_on():
    outs, lses = torch.ones(2, 1, 1, 1, 4), torch.tensor([1.0, NAN]).view(2, 1, 1, 1)
    for some in (lses, torch.full_like(lses, NAN)):
        out, lse = sm80_decode.merge(outs, some, torch.empty(1, 1, 1, 4), torch.empty(1, 1, 1), None)
        assert out.isnan().all()
        assert lse.isnan().all()


def test_the_oracle_agrees():
    """The tiled backend in float64, which the kernels are compared with, computes the dense formula."""
    inputs = cache_of((100,), 4, (4, 2), (16, 16), dtype=torch.float64)
    problem = check_decode(inputs, **OPTIONS)
    expected = reference.attention(inputs.q, inputs.k_cache[:, :100], inputs.v_cache[:, :100], causal=True)
    torch.testing.assert_close(tiled(problem, inputs)[0], expected.out)

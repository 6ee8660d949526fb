"""A NaN or an inf in an input of the Hopper kernel reaches the rows that see it, and no others.

The other rows are bit-equal to those of a run without it, with two exceptions, whose rows are held to the error budget
instead. The 16 rows of a warp rescale together, and under a mask they are recomputed together once one of them is not
finite. A value in V reaches all rows of its tile, which are then recomputed.
"""

import pytest
import torch
from gpu_cases import (
    BF16,
    DEVICE,
    FP16,
    INF,
    MASKS,
    NAN,
    ON_GPU,
    GpuCall,
    bits,
    case,
    cases,
    needs_hopper,
    poisoned_memory,
    same_bits,
)

import onepass
from onepass import reference
from onepass.problem import Mask
from onepass.testing import compare, compare_lse

pytestmark = needs_hopper

ENTRY, POSITION, HEAD, COLUMN = 1, 150, 1, 5
ROWS_OF_A_WARP = 16


def run(call):
    function = onepass.attention_varlen if call.is_packed else onepass.attention
    with poisoned_memory():
        return function(**call.tensors, **call.options, return_lse=True, deterministic=False)


def with_value(call, name, value):
    tensors = dict(call.tensors)
    tensors[name] = tensors[name].clone()
    tensors[name][ENTRY, POSITION, HEAD, COLUMN] = value
    return GpuCall(tensors, call.options)


def rows_that_see_it(call, name):
    """A mask (batch, num_heads_q, seqlen_q) of rows whose own query, or a key that they see, holds the value."""
    batch, seqlen_q, heads_q, _ = call.tensors["q"].shape
    _, seqlen_k, heads_kv, _ = call.tensors["k"].shape
    mask = Mask.from_options(call.options.get("causal", False), call.options.get("window"))
    pairs = reference.visible_pairs(batch, seqlen_q, seqlen_k, mask, None, torch.device("cpu"))
    reach = torch.zeros(batch, heads_q, seqlen_q, dtype=torch.bool)
    if name == "q":
        reach[ENTRY, HEAD, POSITION] = pairs[ENTRY, POSITION].any()
    else:
        group = heads_q // heads_kv
        reach[ENTRY, HEAD * group : (HEAD + 1) * group] = pairs[ENTRY, :, POSITION]
    return reach.to(DEVICE)


def rows_that_may_round_differently(call, name, reach):
    if not ON_GPU:  # another algorithm runs for operands that are not finite
        return ~reach
    warps = torch.nn.functional.pad(reach, (0, -reach.shape[-1] % ROWS_OF_A_WARP)).unflatten(-1, (-1, ROWS_OF_A_WARP))
    rows = warps.any(-1).repeat_interleave(ROWS_OF_A_WARP, -1)[..., : reach.shape[-1]]
    if name == "v":
        group = call.tensors["q"].shape[2] // call.tensors["v"].shape[2]
        rows[ENTRY, HEAD * group : (HEAD + 1) * group] = True
    return rows & ~reach


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@cases(
    case(m, 300, batch=2, heads=(4, 2), head_dim=d, dtype=dtype, options=MASKS[mask])
    for m, mask in ((300, "causal"), (300, "window"), (250, "left"), (400, "right"), (200, "full"))
    for d, dtype in ((64, FP16), (128, BF16), (256, BF16))
)
def test_a_value_reaches_the_rows_that_see_it(case, name, value):
    call = case.call()
    clean, dirty_call = with_value(call, name, 0.0), with_value(call, name, value)
    expected, dirty = run(clean), run(dirty_call)
    reach = rows_that_see_it(call, name)
    inexact = rows_that_may_round_differently(call, name, reach)
    exact = ~(reach | inexact)
    out, out_expected = (t.transpose(1, 2) for t in (dirty.out, expected.out))

    assert torch.equal(bits(out[exact]), bits(out_expected[exact])), "out differs in rows that do not see the value"
    assert torch.equal(bits(dirty.lse[exact]), bits(expected.lse[exact])), (
        "lse differs in rows that do not see the value"
    )
    if name == "v" and ON_GPU:
        assert torch.equal(bits(dirty.lse[~inexact]), bits(expected.lse[~inexact])), "lse depends on v"
    for rows, oracle_call in ((inexact, clean), (reach, dirty_call)):
        oracle, plain = oracle_call.expected(), oracle_call.expected(case.dtype)
        mine = (out[rows], *(r.out.transpose(1, 2)[rows] for r in (oracle, plain)))
        row = compare("out", *mine)
        assert row.ok, row
        # a score of +inf makes it +inf or NaN, either of which says that there is no answer
        lse, lse_oracle = (torch.where(r.lse == INF, NAN, r.lse)[rows] for r in (dirty, oracle))
        row = compare_lse(lse, lse_oracle)
        assert row.ok, row
    if reach.any() and value != value:
        assert out[reach].isnan().any(-1).all(), "a row that sees a NaN must say so"


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@cases(
    case((70, 130, 50, 1), (90, 140, 200, 60), heads=(4, 2), head_dim=d, options=MASKS[mask])
    for d in (64, 128)
    for mask in ("full", "causal", "window")
)
def test_packed_neighbours(case, value):
    """If one sequence is all NaN or inf, all others keep their bits, even those that share a tile with it."""
    call = case.call()
    expected = run(call)
    q, k, v = (t.clone() for t in call.tensors.values())
    rows, keys = (slice(*call.options[n][1:3].tolist()) for n in ("cu_seqlens_q", "cu_seqlens_k"))
    for t, dirty in ((q, rows), (k, keys), (v, keys)):
        t[dirty] = value
    out, lse = run(GpuCall({"q": q, "k": k, "v": v}, call.options))
    others = torch.ones(q.shape[0], dtype=torch.bool, device=DEVICE)
    others[rows] = False
    assert torch.equal(bits(out[others]), bits(expected.out[others]))
    assert torch.equal(bits(lse[:, others]), bits(expected.lse[:, others]))
    assert not out[~others].isfinite().any()


USED = [
    *(case(200, 300, batch=4, heads=(4, 2), head_dim=d, used=(0, 1, 133, 300)) for d in (64, 128, 256)),
    case(200, 300, batch=4, heads=(4, 2), head_dim=128, used=(0, 1, 133, 300), causal=True, dtype=FP16),
    case(200, 300, batch=4, heads=(4, 2), head_dim=128, used=(0, 1, 133, 300), window=(30, 9), sinks=True),
    case((70, 130, 50, 9), (90, 140, 200, 0), heads=(4, 2), head_dim=128, used=(50, 0, 129, 0)),
]


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e4])
@cases(USED)
def test_nothing_past_seqused_k_matters(case, value):
    call = case.call()
    expected = run(call)
    # both calls use the same tensors, so that only values past seqused_k differ
    for rows in call.unseen():
        rows.fill_(value)
    assert same_bits(run(call), expected)
    assert not expected.out.isnan().any()


@cases([case(300, 200, batch=2, heads=(4, 2), head_dim=d, causal=True) for d in (64, 128, 256)])
def test_rows_without_keys_ignore_their_query(case):
    call = case.call()
    call.tensors["q"][:, :100] = NAN
    out, lse = run(call)
    assert (out[:, :100] == 0).all()
    assert (lse[:, :, :100] == -INF).all()
    assert out[:, 100:].isfinite().all()


@cases([case(200, 300, batch=2, heads=(4, 2), head_dim=d, causal=True) for d in (64, 128, 256)])
def test_all_is_nan(case):
    call = case.call()
    for name in "qkv":
        tensors = {n: torch.full_like(t, NAN) if n == name else t for n, t in call.tensors.items()}
        out, lse = run(GpuCall(tensors, call.options))
        assert out.isnan().all()
        assert lse.isfinite().all() if name == "v" else lse.isnan().all()

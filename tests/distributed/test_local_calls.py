"""What ranks compute in their steps, one after the other in one process, is what one device computes."""

import random

import pytest
import torch
import whole_calls

from onepass import distributed
from onepass.distributed.attention import rows_first
from onepass.distributed.local import LocalCalls, Options, OutRows, TermGradients, Terms, counts_rows
from onepass.geometry import philox


def plans_of(call, num_ranks):
    widths = [n for n in (2, 3) if n < num_ranks and num_ranks % n == 0] or [1]
    arguments = call.plan | ({"engine": widths[0]} if call.plan["engine"] == whole_calls.MESH else {})
    return [distributed.plan(**arguments, num_ranks=num_ranks, rank=rank) for rank in range(num_ranks)]


def by_ranks(call, num_ranks, state):
    """The results of `whole_calls.on_one_device`, from the local calls of all ranks; rows travel by indexing."""
    p = call.options.get("dropout_p", 0.0)
    options = Options(call.tensors["q"].shape[-1] ** -0.5, call.options.get("softcap"), False, p, None, None)
    tensors = {name: t for name, t in call.options.items() if name in Terms._fields}
    terms = Terms(**tensors, dropout_state=state if p else None)
    plans = plans_of(call, num_ranks)
    owned = [plan.tokens() for plan in plans]
    q, k, v = (rows_first(call.tensors[name], plans[0]) for name in "qkv")
    dout, dlse = whole_calls.loss_weights(call)
    dlse = dlse.t()[:, None] if call.is_packed else dlse.permute(2, 0, 1)
    dout = rows_first(dout, plans[0])
    out, lse = torch.full_like(dout, torch.nan), torch.full_like(dlse, torch.nan)
    dq, dk, dv = torch.full_like(q, torch.nan), torch.zeros_like(k), torch.zeros_like(v)
    sums = TermGradients(
        *(
            torch.zeros_like(t, dtype=q.dtype) if (t := tensors.get(n)) is not None else None
            for n in whole_calls.WITH_GRADIENT
        )
    )
    for plan in plans:
        plan = plan.for_call(counts_rows(options, terms), terms.seqused_k is not None, False)
        for step in plan.schedule.steps:
            heads, kv_heads = (f(step, plan.rank) for f in (plan.schedule.heads_q, plan.schedule.heads_kv))
            if heads.start == heads.stop:
                continue
            rows, keys = (
                torch.cat([owned[p.source][p.source_row :][: p.rows] for p in f(step, plan.rank)] or [owned[0][:0]])
                for f in (plan.schedule.query_pieces, plan.schedule.key_pieces)
            )
            local = LocalCalls(plan, step, options, terms)
            own = q[rows][:, :, heads], k[keys][:, :, kv_heads], v[keys][:, :, kv_heads]
            own_out, own_lse = local.forward(*own)
            of_out = OutRows(dout[rows][:, :, heads], own_lse, dlse[rows][:, :, heads], own_out)
            own_dq, own_dk, own_dv = local.backward(*own, of_out, sums)
            for whole, found in ((out, own_out), (lse, own_lse), (dq, own_dq)):
                whole[:, :, heads].index_copy_(0, rows, found)
            for whole, found in ((dk, own_dk), (dv, own_dv)):
                whole[:, :, kv_heads].index_add_(0, keys, found)
    batch_first = (lambda t: t.squeeze(1)) if call.is_packed else (lambda t: t.transpose(0, 1))
    found = {name: batch_first(t) for name, t in (("out", out), ("dq", dq), ("dk", dk), ("dv", dv))}
    found["lse"] = lse[:, 0].t() if call.is_packed else lse.permute(1, 2, 0)
    return found | {f"d{name}": t for name, t in zip(whole_calls.WITH_GRADIENT, sums, strict=True) if t is not None}


@pytest.mark.parametrize("first", range(100, 260, 20))
def test_random_calls(first):
    for seed in range(first, first + 20):
        check(seed)


def check(seed):
    call = whole_calls.random_call(7000 + seed, masks=("full", "causal", "window", "window"))
    num_ranks = random.Random(seed).choice([2, 3, 4, 6])
    torch.manual_seed(seed)
    state = philox.random_state("cpu")
    torch.manual_seed(seed)
    expected, found = whole_calls.on_one_device(call), by_ranks(call, num_ranks, state)
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        tolerance = 1e-5 if name == "dalibi_slopes" else 1e-9
        torch.testing.assert_close(
            found[name].to(right.dtype),
            right,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, name=name: f"seed {seed}, {name} of {call.text} on {num_ranks} ranks: {m}",
        )

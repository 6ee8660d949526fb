"""A NaN or an inf reaches the gradients that depend on it on a Hopper GPU, and no others.

All other gradients are held to the error budget of a call without the value. The loss is a sum over rows, so a row is
touched by its query, its gradient of out or lse, and the keys and values that it sees. A key is touched by the touched
rows that see it.
"""

import pytest
import torch
from gpu_cases import BF16, DEVICE, FP16, INF, MASKS, NAN, bits, case, cases, needs_hopper, same_bits
from gradient_cases import Loss, changed, expected_gradients, gradients, hard_gradients, loss_of
from test_special_values import USED

from onepass import reference
from onepass.problem import Mask

pytestmark = needs_hopper

ENTRY, POSITION, HEAD, COLUMN = 1, 150, 1, 5
NAMES = ("q", "k", "v", "dout", "dlse")


def with_value(call, loss, name, value, position=POSITION, column=COLUMN):
    """Return the call and the loss with this value in one of their tensors."""
    t = {**call.tensors, **loss._asdict()}[name].clone()
    if name == "dlse":
        t[ENTRY, HEAD, position] = value
    else:
        t[ENTRY, position, HEAD, column] = value
    return (call, loss._replace(**{name: t})) if name in Loss._fields else (changed(call, **{name: t}), loss)


def touched(call, name, position=POSITION):
    """Return, by gradient, a mask of what depends on the value: (batch, seqlen, heads), and (heads,) for dsinks."""
    batch, seqlen_q, heads_q, _ = call.tensors["q"].shape
    _, seqlen_k, heads_kv, _ = call.tensors["k"].shape
    group = heads_q // heads_kv
    mask = Mask.from_options(call.options.get("causal", False), call.options.get("window"))
    pairs = reference.visible_pairs(1, seqlen_q, seqlen_k, mask, None, torch.device("cpu"))[0]
    rows = torch.zeros(batch, heads_q, seqlen_q, dtype=torch.bool)
    if name in ("k", "v"):
        rows[ENTRY, HEAD * group : (HEAD + 1) * group] = pairs[:, position].reshape(seqlen_q, -1).any(-1)
    else:
        rows[ENTRY, HEAD, position] = pairs[position].any(-1)
    keys = ((rows.float() @ pairs.float()) > 0).unflatten(1, (heads_kv, group)).any(2)
    # probabilities, and so dv, depend neither on values nor on the gradient of lse
    values = torch.zeros_like(keys) if name in ("v", "dlse") else keys
    reach = {"dq": rows.mT, "dk": keys.mT, "dv": values.mT}
    if "sinks" in call.options:
        reach["dsinks"] = rows.any(-1).any(0)
    return {n: t.to(DEVICE) for n, t in reach.items()}


def assert_reach(clean, dirty, reach, must_say_so):
    """Assert that only the gradients under `reach` depend on the value.

    Args:
        clean, dirty: a call and its loss, without the value and with it.
    """
    actual = hard_gradients(*dirty)
    misses = expected_gradients(*clean).misses(actual, {n: ~t for n, t in reach.items()})
    assert not misses, misses
    if must_say_so:
        for name, t in reach.items():
            is_nan = actual[name][t].isnan()
            assert (is_nan if name == "dsinks" else is_nan.any(-1)).all(), f"{name} depends on a NaN and must say so"


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", NAMES)
@cases(
    [
        case(200, 300, batch=2, heads=(4, 2), head_dim=64, causal=True, sinks=True),
        case(200, 300, batch=2, heads=(4, 2), head_dim=128, dtype=FP16),
        case(300, 200, batch=2, heads=(4, 2), head_dim=256, window=(37, 21)),
    ]
)
def test_other_heads_and_batch_entries(case, name, value):
    """Other heads and batch entries are right if one head of one batch entry is all NaN or all inf."""
    call = case.call()
    loss = loss_of(call)
    dirty = with_value(call, loss, name, value, slice(None), slice(None))
    assert_reach((call, loss), dirty, touched(call, name, slice(None)), must_say_so=value != value)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", NAMES)
@cases(
    case(m, 300, batch=batch, heads=(4, 2), head_dim=d, dtype=dtype, options=MASKS[mask])
    for m, mask, d, dtype, batch in (
        (300, "causal", 64, FP16, 2),
        (300, "causal", 128, BF16, 2),
        (250, "causal", 256, BF16, 2),
        (300, "window", 64, BF16, 2),
        (200, "window", 128, FP16, 2),
        (250, "left", 128, BF16, 2),
        (400, "right", 128, BF16, 2),
        # each thread block keeps its dQ to itself
        (300, "causal", 64, FP16, 66),
        (200, "causal", 128, BF16, 66),
        (250, "window", 64, BF16, 66),
    )
)
def test_a_value_reaches_the_gradients_that_depend_on_it(case, name, value):
    """A value touches no hidden pair of its row or key, even inside of a tile beside pairs that see it."""
    call = case.call()
    clean = with_value(call, loss_of(call), name, 0.0)
    assert_reach(clean, with_value(*clean, name, value), touched(call, name), must_say_so=value != value)


@pytest.mark.parametrize("name", [*NAMES, "all"])
@cases(
    case((70, 130, 50, 1), (90, 140, 200, 60), heads=(4, 2), head_dim=d, options=MASKS[mask], sinks=mask == "full")
    for d, mask in ((64, "causal"), (128, "full"), (128, "causal"), (128, "window"), (256, "causal"))
)
def test_packed_neighbours(case, name):
    """If one sequence is all NaN, gradients of the others do not change, even if they share a tile with it."""
    call = case.call()
    loss = loss_of(call)
    tensors = {n: t.clone() for n, t in {**call.tensors, **loss._asdict()}.items()}
    rows, keys = (slice(*call.options[n][1:3].tolist()) for n in ("cu_seqlens_q", "cu_seqlens_k"))
    for n, t in tensors.items():
        if name in (n, "all"):
            (t.mT if n == "dlse" else t)[keys if n in "kv" else rows] = NAN
    dirty = changed(call, **tensors), Loss(tensors["dout"], tensors["dlse"])
    reach = {n: torch.zeros(call.tensors[n[1:]].shape[:2], dtype=torch.bool, device=DEVICE) for n in ("dq", "dk", "dv")}
    for n, t in reach.items():
        t[rows if n == "dq" else keys] = True
    # dsinks sums over sequences
    assert_reach((call, loss), dirty, reach, must_say_so=False)


@pytest.mark.parametrize("value", [NAN, INF, -INF, 3e4])
@cases(USED)
def test_nothing_past_seqused_k_matters(case, value):
    call = case.call()
    loss = loss_of(call)
    expected = gradients(call, loss, deterministic=True)
    for rows in call.unseen():
        rows.fill_(value)
    actual = gradients(call, loss, deterministic=True)
    assert same_bits(actual.values(), expected.values())
    assert all(g.isfinite().all() for g in actual.values())


@pytest.mark.parametrize("name", ["q", "dout", "dlse"])
@cases(case(200, 300, batch=4, heads=(4, 2), head_dim=d, used=(300, 1, 133, 0)) for d in (64, 128, 256))
def test_keys_past_seqused_k_have_no_gradient(case, name):
    """Keys past seqused_k have zero gradients even if all rows of a head are NaN."""
    call = case.call()
    actual = hard_gradients(*with_value(call, loss_of(call), name, NAN, slice(None), slice(None)))
    for n in ("dk", "dv"):
        assert (actual[n][ENTRY, 1:] == 0).all()


@pytest.mark.parametrize("names", [("q",), ("dout",), ("dlse",), ("q", "dout", "dlse")], ids=str)
@cases(case(300, 200, batch=2, heads=(4, 2), head_dim=d, causal=True, sinks=d == 128) for d in (64, 128, 256))
def test_rows_without_keys_ignore_their_query_and_their_gradient(case, names):
    call = case.call()
    clean = call, loss_of(call)
    tensors = {n: t.clone() for n, t in {**call.tensors, **clean[1]._asdict()}.items()}
    for name in names:
        (tensors[name].transpose(1, 2) if name == "dlse" else tensors[name])[:, :100] = NAN
    dirty = changed(call, **tensors), Loss(tensors["dout"], tensors["dlse"])
    nothing = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in gradients(*clean).items()}
    found = hard_gradients(*dirty)
    if "dsinks" in nothing and "dlse" in names:
        nothing["dsinks"].fill_(True)  # a sink is the lse of such a row
        assert found["dsinks"].isnan().all()
    assert_reach(clean, dirty, nothing, must_say_so=False)
    assert (found["dq"][:, :100] == 0).all()


@pytest.mark.parametrize("names", ["k", "v", "kv"])
@cases(case(100, 300, batch=2, heads=(4, 2), head_dim=d, window=(40, 0)) for d in (64, 128, 256))
def test_keys_that_no_row_sees_do_not_matter(case, names):
    call = case.call()
    clean = call, loss_of(call)
    tensors = {n: t.clone() for n, t in call.tensors.items()}
    for name in names:
        tensors[name][:, :160] = NAN
    dirty = changed(call, **tensors), clean[1]
    nothing = {n: torch.zeros_like(g, dtype=torch.bool) for n, g in gradients(*clean).items()}
    assert_reach(clean, dirty, nothing, must_say_so=False)
    actual = hard_gradients(*dirty)
    assert all((actual[n][:, :160] == 0).all() for n in ("dk", "dv"))


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "dlse"])
@cases([case(200, 300, batch=2, heads=(4, 2), head_dim=d, causal=True) for d in (64, 128, 256)])
def test_all_is_nan(case, name):
    call = case.call()
    loss = loss_of(call)
    actual = gradients(
        changed(call, **{n: torch.full_like(t, NAN) for n, t in call.tensors.items() if n == name}),
        Loss(*(torch.full_like(t, NAN) if n == name else t for n, t in loss._asdict().items())),
    )
    assert actual["dq"].isnan().all()
    assert actual["dk"].isnan().all()
    # probabilities depend neither on values nor on the gradient of lse
    assert actual["dv"].isfinite().all() if name in ("v", "dlse") else actual["dv"].isnan().all()


@cases(
    [
        case(200, 300, batch=2, heads=(4, 2), head_dim=128, causal=True),
        case(129, 65, batch=2, heads=(2, 1), head_dim=40, head_dim_v=72, dtype=FP16, sinks=True),
        case(300, 20, head_dim=64, window=(3, 2)),
        case((1, 0, 130, 77), (5, 20, 0, 300), heads=(4, 2), head_dim=128, causal=True, slack=3),
    ]
)
def test_recycled_memory(case):
    """NaN in the blocks that the allocator hands out next, such as workspaces of the kernels, reaches no gradient."""
    call = case.call()
    loss = loss_of(call)
    first = gradients(call, loss, deterministic=True)
    sizes = [*(t.numel() for t in first.values()), loss.dlse.numel()]
    for _ in range(3):
        old = [torch.full((n,), NAN, device=DEVICE, dtype=d) for n in sizes for d in (BF16, torch.float32) * 4]
        del old
        again = gradients(call, loss, deterministic=True)
        for name, g in again.items():
            assert torch.equal(bits(g), bits(first[name]))

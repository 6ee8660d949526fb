"""The Hopper kernel on a GPU, through the public API: values, layouts, reproducibility, and that it is the default."""

import itertools

import pytest
import torch

import onepass
from onepass import reference
from onepass.problem import Mask
from onepass.testing.inputs import Call, random_call

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]


def tensors(batch, seqlen_q, seqlen_k, heads_q, heads_kv, head_dim, head_dim_v=None, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def randn(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.float32).to(dtype)

    return {
        "q": randn(batch, seqlen_q, heads_q, head_dim),
        "k": randn(batch, seqlen_k, heads_kv, head_dim),
        "v": randn(batch, seqlen_k, heads_kv, head_dim_v or head_dim),
    }


def check(call: Call, gradients: bool = False):
    support = onepass.supports(**call.tensors, **call.options)
    assert support.backend == "sm90", support.reason
    call.check(gradients=gradients)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (128, 128), (129, 1), (1, 300), (300, 1000), (1000, 300)])
def test_lengths(causal, head_dim, seqlen_q, seqlen_k):
    check(Call(tensors(2, seqlen_q, seqlen_k, 4, 2, head_dim), {"causal": causal}))


@pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 120, 160, 192, 200])
def test_head_dims(head_dim):
    check(Call(tensors(1, 200, 300, 2, 2, head_dim), {"causal": True}))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (64, 256), (128, 64)])
def test_different_head_dims(head_dim, head_dim_v):
    check(Call(tensors(1, 200, 300, 2, 2, head_dim, head_dim_v), {}))


@pytest.mark.parametrize("seed", range(200))
def test_random_calls(seed):
    """The random cases of the CPU tests, of those that this backend takes."""
    call = random_call(seed, device="cuda", max_seqlen=700, dtype=(torch.bfloat16, torch.float16)[seed % 2])
    support = onepass.supports(**call.tensors, **call.options)
    if support.backend != "sm90":
        pytest.skip(support.reason)
    call.check(gradients=False, with_floor=True)


def test_gradients_with_the_tiled_backward():
    sinks = torch.randn(4, device="cuda")
    check(Call(tensors(2, 100, 150, 4, 2, 64), {"causal": True, "sinks": sinks}), gradients=True)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_bitwise_reproducible(head_dim):
    inputs = tensors(2, 1000, 1100, 8, 4, head_dim)
    first = onepass.attention(**inputs, causal=True, return_lse=True, backend="sm90")
    for _ in range(200):
        again = onepass.attention(**inputs, causal=True, return_lse=True, backend="sm90")
        assert torch.equal(first.out.view(torch.int16), again.out.view(torch.int16))
        assert torch.equal(first.lse.view(torch.int32), again.lse.view(torch.int32))


def test_other_strides_are_read_in_place():
    qkv = torch.randn(2, 300, 3, 4, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.unbind(2)
    check(Call({"q": q, "k": k, "v": v}, {"causal": True}))
    bhsd = {n: t.transpose(1, 2).contiguous().transpose(1, 2) for n, t in tensors(2, 300, 300, 4, 4, 128).items()}
    check(Call(bhsd, {}))


def test_unaligned_tensors_are_copied():
    t = torch.randn(2, 300, 4, 129, device="cuda", dtype=torch.bfloat16)[..., 1:]
    check(Call({"q": t, "k": t, "v": t}, {}))


def test_cuda_graph_and_side_stream():
    inputs = tensors(1, 500, 500, 4, 4, 128)
    expected = onepass.attention(**inputs, backend="sm90")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        on_stream = onepass.attention(**inputs, backend="sm90")
    stream.synchronize()
    assert torch.equal(expected, on_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onepass.attention(**inputs, backend="sm90")
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(expected, out)


def test_tensors_past_2_to_the_31_elements():
    """1.1M tokens of 16 heads: a window keeps it short; the last rows are compared with the oracle."""
    seqlen, heads = 1_100_000, 16
    q, k, v = (torch.randn(1, seqlen, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    out = onepass.attention(q, k, v, causal=True, window=(255, None), backend="sm90")
    tail = {n: t[:, -600:] for n, t in {"q": q, "k": k, "v": v}.items()}
    expected = Call(tail, {"causal": True, "window": (255, None)}).expected().out[:, 300:]
    assert (out[:, -300:].double() - expected).abs().max() < 0.02


def test_queue_of_tiles_in_graphs_and_on_two_streams():
    """Long causal problems draw their tiles from a counter: replays, eager calls and streams must not share one."""
    q, k, v = (torch.randn(1, 4096, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = onepass.attention(q, k, v, causal=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        onepass.attention(q, k, v, causal=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = onepass.attention(q, k, v, causal=True)
    for _ in range(50):
        captured.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            beside = onepass.attention(q, k, v, causal=True)
        eager = onepass.attention(q, k, v, causal=True)
        torch.cuda.synchronize()
        for out in (captured, beside, eager):
            assert torch.equal(out, expected)


def packed(lengths, slack=0, heads_q=4, heads_kv=2, head_dim=128):
    """Packed tensors of (queries, keys) a sequence and their offsets."""
    offsets = [[0, *itertools.accumulate(column)] for column in zip(*lengths, strict=True)]
    total_q, total_k = (column[-1] + slack for column in offsets)
    dense = tensors(1, max(total_q, total_k), max(total_q, total_k), heads_q, heads_kv, head_dim)
    rows = {"q": total_q, "k": total_k, "v": total_k}
    names = ("cu_seqlens_q", "cu_seqlens_k")
    cu_seqlens = {
        name: torch.tensor(o, dtype=torch.int32, device="cuda") for name, o in zip(names, offsets, strict=True)
    }
    return {name: t[0, : rows[name]] for name, t in dense.items()}, cu_seqlens


LENGTHS = [(100, 100), (0, 50), (129, 300), (1, 1), (64, 0), (300, 129), (0, 0), (128, 128), (7, 500)]


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 10)}])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS * 9, [(2000, 3000), (1, 1)]])
def test_packed_sequences(options, head_dim, lengths):
    inputs, cu_seqlens = packed(lengths, slack=140, head_dim=head_dim)
    check(Call(inputs, {**options, **cu_seqlens}))


@pytest.mark.parametrize("causal", [False, True])
def test_a_sequence_of_nan_stays_alone(causal):
    inputs, cu_seqlens = packed(LENGTHS, slack=10)
    options = {**cu_seqlens, "causal": causal, "return_lse": True, "backend": "sm90"}
    expected = onepass.attention_varlen(**inputs, **options)
    rows, keys = (cu_seqlens[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
    for b in range(len(LENGTHS)):
        broken = {name: t.clone() for name, t in inputs.items()}
        broken["q"][rows[b] : rows[b + 1]] = torch.nan
        for name in ("k", "v"):
            broken[name][keys[b] : keys[b + 1]] = torch.nan
        actual = onepass.attention_varlen(**broken, **options)
        others = torch.ones(len(inputs["q"]), dtype=torch.bool, device="cuda")
        others[rows[b] : rows[b + 1]] = False
        assert torch.equal(actual.out[others], expected.out[others])
        assert torch.equal(actual.lse[:, others], expected.lse[:, others])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (40, 10)}])
def test_nothing_past_seqused_k_matters(options):
    inputs = tensors(6, 200, 500, 4, 2, 128)
    options = {**options, "seqused_k": torch.tensor([0, 1, 100, 128, 300, 500], dtype=torch.int32, device="cuda")}
    check(Call(inputs, options))
    expected = onepass.attention(**inputs, **options, return_lse=True, backend="sm90")
    for b, used in enumerate(options["seqused_k"].tolist()):
        inputs["k"][b, used:] = inputs["v"][b, used:] = torch.nan
    actual = onepass.attention(**inputs, **options, return_lse=True, backend="sm90")
    assert torch.equal(actual.out, expected.out)
    assert torch.equal(actual.lse, expected.lse)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_lengths_stay_on_the_device(causal):
    """No synchronisation, and a captured call follows the offsets as they change."""
    inputs, cu_seqlens = packed(LENGTHS)
    options = {"causal": causal, "backend": "sm90"}
    onepass.attention_varlen(**inputs, **cu_seqlens, **options)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        onepass.attention_varlen(**inputs, **cu_seqlens, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = onepass.attention_varlen(**inputs, **cu_seqlens, **options)
    totals = [int(t[-1]) for t in cu_seqlens.values()]
    for cuts in ([0.0, 0.0, 0.1, 0.2, 0.4, 0.5, 0.7, 0.9, 1.0], [1.0] * 9, [0.0] * 8 + [0.3]):
        for t, total in zip(cu_seqlens.values(), totals, strict=True):
            t[1:] = torch.tensor([int(c * total) for c in cuts], dtype=torch.int32)
        captured.fill_(torch.nan)
        graph.replay()
        expected = onepass.attention_varlen(**inputs, **cu_seqlens, **options)
        assert torch.equal(captured, expected)
        Call(inputs, {"causal": causal, **cu_seqlens}).check(gradients=False)


def test_packed_past_2_to_the_31_elements():
    heads = 16
    lengths = torch.tensor([0, 600_000, 599_700, 300], device="cuda").cumsum(0)
    total = int(lengths[-1])
    q, k, v = (torch.randn(total, heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    assert q.numel() > 2**31
    cu_seqlens = lengths.to(torch.int32)
    options = {"causal": True, "window": (255, None)}
    out = onepass.attention_varlen(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, **options, backend="sm90")
    tail = {n: t[None, -300:] for n, t in {"q": q, "k": k, "v": v}.items()}
    expected = Call(tail, options).expected().out[0]
    assert (out[-300:].double() - expected).abs().max() < 0.02


NAN_CASES = {
    "causal": {"causal": True},
    "window": {"window": (70, 20)},
    "left": {"window": (33, None)},
    "softcap": {"causal": True, "softcap": 15.0},
    "sinks": {"window": (200, 0), "sinks": True},
}


@pytest.mark.parametrize("name", NAN_CASES)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_a_hidden_row_of_v_stays_there(name, head_dim, value):
    options = dict(NAN_CASES[name])
    if "sinks" in options:
        options["sinks"] = torch.randn(4, device="cuda")
    seqlen_q, seqlen_k = 300, 333
    inputs = tensors(2, seqlen_q, seqlen_k, 4, 2, head_dim)
    clean = Call(inputs, options).run(backend="sm90")
    mask = Mask.from_options(options.get("causal", False), options.get("window"))
    visible = reference.visible_pairs(1, seqlen_q, seqlen_k, mask, None, inputs["q"].device)[0]
    for key, column in ((0, 0), (127, 1), (128, 7), (200, 63), (332, 40)):
        broken = inputs["v"].clone()
        broken[0, key, 1, column] = value  # kv head 1 of batch entry 0: query heads 2 and 3
        actual = Call({**inputs, "v": broken}, options).run(backend="sm90")
        hit = torch.zeros_like(clean.out, dtype=torch.bool)
        hit[0, visible[:, key], 2:, column] = True
        assert not actual.out[hit].isfinite().any()
        # a row that is computed again has its P unrounded
        torch.testing.assert_close(actual.out[~hit], clean.out[~hit], rtol=2**-6, atol=2**-6)
        assert torch.equal(actual.lse, clean.lse)
    everything = Call({**inputs, "v": torch.full_like(inputs["v"], value)}, options).run(backend="sm90")
    sees_a_key = visible.any(1)
    assert not everything.out[:, sees_a_key].isfinite().any()
    assert (everything.out[:, ~sees_a_key] == 0).all()


@pytest.mark.parametrize("name", NAN_CASES)
def test_nan_in_q_and_k_reaches_the_rows_it_belongs_to(name):
    options = dict(NAN_CASES[name])
    if "sinks" in options:
        options["sinks"] = torch.randn(4, device="cuda")
    inputs = tensors(1, 300, 333, 4, 2, 128)
    clean = Call(inputs, options).run(backend="sm90")
    mask = Mask.from_options(options.get("causal", False), options.get("window"))
    visible = reference.visible_pairs(1, 300, 333, mask, None, inputs["q"].device)[0]
    q, k = inputs["q"].clone(), inputs["k"].clone()
    q[0, 130, 0, 3] = torch.nan
    k[0, 200, 1, 3] = torch.nan
    actual = Call({**inputs, "q": q, "k": k}, options).run(backend="sm90")
    hit = torch.zeros_like(clean.out, dtype=torch.bool)
    hit[0, 130, 0] = True
    hit[0, visible[:, 200], 2:] = True
    assert actual.out[hit].isnan().all()
    assert torch.equal(actual.out[~hit], clean.out[~hit])


def test_nan_in_packed_v_under_a_mask():
    inputs, cu_seqlens = packed(LENGTHS, slack=10)
    options = {**cu_seqlens, "causal": True}
    clean = Call(inputs, options).run(backend="sm90")
    # sequence 5, 300 queries over the keys from 451 on: key 100 of 129
    first_q, first_k = int(cu_seqlens["cu_seqlens_q"][5]), int(cu_seqlens["cu_seqlens_k"][5])
    broken = inputs["v"].clone()
    broken[first_k + 100] = torch.nan
    actual = Call({**inputs, "v": broken}, options).run(backend="sm90")
    hit = torch.zeros_like(clean.out, dtype=torch.bool)
    hit[first_q + 300 - 129 + 100 : first_q + 300] = True
    assert actual.out[hit].isnan().all()
    torch.testing.assert_close(actual.out[~hit], clean.out[~hit], rtol=2**-6, atol=2**-6)
    assert torch.equal(actual.lse, clean.lse)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (100, 3), "softcap": 20.0}])
@pytest.mark.parametrize("group", [2, 3, 7, 8, 33, 64])
@pytest.mark.parametrize("seqlen_q", [1, 2, 9])
def test_groups_of_heads_in_one_tile(options, group, seqlen_q):
    """Few query rows: heuristics let the heads of a group share a tile where they fit."""
    check(Call(tensors(3, seqlen_q, 700, 2 * group, 2, 128), options))


def test_nan_in_v_and_groups_of_heads_in_one_tile():
    inputs = tensors(1, 12, 333, 6, 2, 128)
    clean = Call(inputs, {"causal": True}).run(backend="sm90")
    broken = inputs["v"].clone()
    broken[0, 326, 1] = torch.nan  # query 5 is the first to see it
    actual = Call({**inputs, "v": broken}, {"causal": True}).run(backend="sm90")
    assert actual.out[:, 5:, 3:].isnan().all()
    torch.testing.assert_close(actual.out[:, :5], clean.out[:, :5], rtol=2**-6, atol=2**-6)
    assert torch.equal(actual.out[:, :, :3], clean.out[:, :, :3])

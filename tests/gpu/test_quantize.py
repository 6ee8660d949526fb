"""The kernels of `quantize_fp8`, compared with plain PyTorch on the same GPU of compute capability 8.9 or more.

V is rounded by the same operations and has equal bits. Rotated rows of Q and K are summed in another order.
"""

import pytest
import torch
from decode_cases import captured
from gpu_cases import BF16, DEVICE, FP16, INF, NAN, ON_GPU, lengths_tensor, offsets
from same_rounding import assert_same_rounding

import onepass
from onepass.api import fast_path
from onepass.dispatch import fp8
from onepass.kernels.config import p_exponent
from onepass.kernels.heuristics.sm90 import LAZY_FP8
from onepass.ops import quantize
from onepass.quantization import codec, dequantize, layout
from onepass.testing import fp8_budget

HAS_E4M3 = ON_GPU and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
IS_HOPPER = HAS_E4M3 and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_E4M3, reason="needs a GPU that has e4m3")]


def in_torch(q, k, v, **options):
    fast_path.forget()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fp8, "_has_e4m3_kernels", lambda t: False)
            quantized = onepass.quantize_fp8(q, k, v, **options)
            return quantized, quantize.keys_last(quantized.v, options.get("cu_seqlens_k"))
    finally:
        fast_path.forget()


def check(q, k, v, **options):
    expected, keys_last = in_torch(q, k, v, **options)
    first, actual = (onepass.quantize_fp8(q, k, v, **options) for _ in range(2))  # the second takes the fast path
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale"):
        a, b = (getattr(x, name).view(torch.uint8) for x in (first, actual))
        assert torch.equal(a, b), name
    lengths = options.get("cu_seqlens_q"), options.get("cu_seqlens_k")
    # rows of packed sequences are added up in any order
    assert_same_rounding(actual, expected, *lengths, same_means=lengths[1] is None)
    if IS_HOPPER:
        assert actual.v_keys_last
        is_zero = keys_last.view(torch.uint8) == 0
        assert (actual.v.view(torch.uint8)[is_zero] & 0x7F == 0).all()  # beyond the last key as well
    return actual


def randn(*shape, dtype=BF16, seed=0):
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def make(lengths=(300, 500), heads=(4, 2), head_dims=(128, 128), batch=2, dtype=BF16):
    q = randn(batch, lengths[0], heads[0], head_dims[0], dtype=dtype, seed=1)
    k, v = (randn(batch, lengths[1], heads[1], d, dtype=dtype, seed=i) for i, d in enumerate(head_dims, 2))
    k[:, :70] *= 30  # blocks of different descales
    v[:, 64:128] *= 0.01
    return q, k, v


@pytest.mark.parametrize(
    ("head_dims", "dtype"), [((128, 128), BF16), ((64, 64), FP16), ((256, 256), BF16), ((112, 80), BF16)], ids=str
)
def test_head_dims(head_dims, dtype):
    for lengths in ((1, 1), (64, 128), (300, 511), (2000, 3000)):
        check(*make(lengths, head_dims=head_dims, dtype=dtype))


def test_many_heads_and_strides():
    """Results are right for heads outside of rows and rotation by other signs, for slices of one tensor, and for an
    address that is not a multiple of 16 bytes."""
    q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in make(heads=(32, 8)))
    check(q, k, v, seed=2**63)
    check(*randn(2, 200, 3, 4, 128).unbind(2))
    check(*(torch.cat([t[..., :1], t], -1)[..., 1:] for t in make()))


def packed(lengths_q=(50, 0, 700, 64, 1), lengths_k=(90, 4, 1300, 0, 66), slack=70):
    """Make packed sequences, followed by rows of no sequence that hold NaN, which nothing may read."""
    q = randn(sum(lengths_q) + slack, 4, 128, seed=1)
    k, v = (randn(sum(lengths_k) + slack, 2, 128, seed=i) for i in (2, 3))
    for t, lengths in ((q, lengths_q), (k, lengths_k), (v, lengths_k)):
        t[sum(lengths) :] = NAN
    k[90:400] *= 30
    lengths = {f"cu_seqlens_{n}": lengths_tensor(offsets(x)) for n, x in (("q", lengths_q), ("k", lengths_k))}
    return (q, k, v), lengths


def test_packed_sequences():
    tensors, options = packed()
    check(*tensors, **options)
    used = (90, 0, 777, 0, 1)
    for start, end, n in zip(
        options["cu_seqlens_k"].tolist(), options["cu_seqlens_k"].tolist()[1:], used, strict=False
    ):
        for t in tensors[1:]:
            t[start + n : end] = NAN
    check(*tensors, **options, seqused_k=lengths_tensor(used))


def test_hidden_keys_and_means():
    q, k, v = make()
    used = lengths_tensor((0, 333))
    for t in (k, v):
        t += 4
        for b, n in enumerate(used.tolist()):
            t[b, n:] = NAN
    check(q, k, v, seqused_k=used)
    check(q, k, v, seqused_k=used, center_k=True, center_v=True)


@pytest.mark.parametrize("rotate", [True, False])
def test_nan_and_inf(rotate):
    q, k, v = make(batch=1)
    for t in (q, k, v):
        t[0, 3, 0, 5], t[0, 3, 0, 40] = INF, -INF
        t[0, 7, 0, 17], t[0, 9, 0, 63] = NAN, -INF
    v[0, 64:128], k[0, 64:128] = 2.0**-130, 0.0
    q[0, 64:128] *= 2.0**-120
    check(q, k, v, rotate=rotate)


@pytest.mark.parametrize("rows_too", ["q", "k and v"])
def test_more_than_2_31_elements(rows_too):
    """The last blocks equal those of a call with their rows alone."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GB")
    heads, rows = 16, 2**31 // (16 * 128) + 100
    x = torch.zeros(1, rows, heads, 128, dtype=BF16, device=DEVICE)
    last = rows // 64 * 64 - 64
    x[:, last:] = randn(1, rows - last, heads, 128)
    end = x[:, last:].clone()
    if rows_too == "q":
        whole, alone = onepass.quantize_fp8(x, end, end), onepass.quantize_fp8(end, end, end)
        names = ("q",)
    else:
        whole, alone = onepass.quantize_fp8(end, x, x), onepass.quantize_fp8(end, end, end)
        names = ("k", "v")
    for name in names:
        stored, stored_alone = (getattr(z, name).view(torch.uint8) for z in (whole, alone))
        is_transposed = name == "v" and whole.v_keys_last
        assert torch.equal(stored[..., last:] if is_transposed else stored[:, last:], stored_alone)
        assert torch.equal(*(getattr(z, f"{name}_descale")[..., -2:] for z in (whole, alone)))


@pytest.mark.parametrize("head_dim", [64, 128])
def test_lengths_far_apart(head_dim):
    """The thread blocks of q, k and v have consecutive numbers: none is left out and none is done twice."""
    for lengths in ((1, 5000), (5000, 1), (64, 65), (129, 4096)):
        for heads in ((6, 1), (8, 8), (3, 3)):
            check(*make(lengths, heads=heads, head_dims=(head_dim, 64), batch=3))


def test_launches_of_a_call():
    """One launch quantizes q, k and v. Attention adds another, and in a graph one that clears a counter for it."""
    tensors = make()
    assert num_kernels(lambda: onepass.quantize_fp8(*tensors)) == 1
    if IS_HOPPER:
        assert num_kernels(lambda: onepass.attention(*tensors, precision="fp8", causal=True)) in (2, 3)


def num_kernels(run) -> int:
    from cuda.bindings import driver

    run()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        run()
    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = driver.cuGraphGetNodes(raw)
    _, nodes, _ = driver.cuGraphGetNodes(raw, count)
    kinds = [driver.cuGraphNodeGetType(node)[1] for node in nodes]
    return kinds.count(driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL)


def test_tensors_that_require_grad_under_no_grad():
    q, k, v = (t.requires_grad_() for t in make())
    with torch.no_grad():
        for _ in range(2):
            out = onepass.attention(onepass.quantize_fp8(q, k, v))
    detached = [t.detach() for t in (q, k, v)]
    assert torch.equal(out, onepass.attention(onepass.quantize_fp8(*detached)))
    for _ in range(2):
        onepass.attention(q, k, v, precision="fp8").sum().backward()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


def test_keys_last_of_e4m3():
    """V may have been quantized elsewhere, with arbitrary bits."""
    codes = torch.randint(0, 256, (2, 1000, 3, 128), device=DEVICE, dtype=torch.uint8)
    codes[:, 500:] = 0x7F
    for v, lengths in ((codes, None), (codes[0], lengths_tensor((0, 9, 9, 700)))):
        v = v.view(codec.E4M3)
        assert torch.equal(
            quantize.keys_last(v, lengths).view(torch.uint8), layout.keys_last_in_torch(v, lengths).view(torch.uint8)
        )


def test_graph_and_no_wait_for_the_gpu():
    tensors = make()
    graph, replayed = captured(lambda: onepass.quantize_fp8(*tensors))
    for t in tensors:
        t.neg_().mul_(3)
    graph.replay()
    again = onepass.quantize_fp8(*tensors)
    for name in ("q", "k", "v", "q_descale", "k_descale", "v_descale"):
        a, b = (getattr(x, name).view(torch.uint8) for x in (replayed, again))
        assert torch.equal(a, b), name


@pytest.mark.skipif(not IS_HOPPER, reason="only Hopper has an FP8 attention kernel")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention(head_dim):
    """The attention kernel reads V as the quantization kernel has written it."""
    quantized = onepass.quantize_fp8(*make(head_dims=(head_dim, head_dim)))
    out = onepass.attention(quantized, causal=True, backend="sm90")
    tensors = quantized.dequantize()
    v_scale = dequantize.row_scales(tensors[2], quantized.v_descale, quantized.kv_block, None)
    rounding = {"short_sums": True, "v_scale": v_scale, "p_exponent": p_exponent(LAZY_FP8), "p_codes": True}
    budget = fp8_budget(*tensors, out.dtype, causal=True, **rounding)
    assert ((out.double() - budget.oracle.out).abs() <= budget.out).all()
    assert budget.scale(out).ok, budget.scale(out)

"""Tensors without heads are legal: results have none either, and gradients of keys that no head sees are 0."""

import pytest
import torch

import onepass
from onepass import reference
from onepass.testing import Call

INT32 = torch.int32
HEADS = [(0, 0), (0, 1), (0, 3)]


def make(heads, batch=2, seqlen_q=6, seqlen_k=9, head_dims=(16, 24), dtype=torch.float32):
    shapes = {"q": (seqlen_q, heads[0], head_dims[0])}
    shapes |= {name: (seqlen_k, heads[1], size) for name, size in zip("kv", head_dims, strict=True)}
    return {n: torch.randn(batch, *shape).to(dtype) for n, shape in shapes.items()}


OPTIONS = {
    "no options": {},
    "causal, softcap": {"causal": True, "softcap": 3.0},
    "sinks": {"sinks": torch.zeros(0)},
    "window, seqused_k": {"window": (3, -1), "seqused_k": torch.tensor([9, 0], dtype=INT32)},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_values_and_gradients(options, heads, dtype):
    Call(make(heads, dtype=dtype), options).check()
    leaves = {n: t.requires_grad_() for n, t in make(heads, dtype=dtype).items()}
    out, lse = onepass.attention(**leaves, **options, return_lse=True)
    assert out.shape == (2, 6, 0, 24)
    assert out.dtype == dtype
    assert lse.shape == (2, 0, 6)
    (out.sum() + lse.sum()).backward()
    for leaf in leaves.values():
        assert leaf.grad.shape == leaf.shape
        assert (leaf.grad == 0).all()


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_packed_sequences(heads):
    tensors = {n: t[0].requires_grad_() for n, t in make(heads, 1).items()}
    offsets = {"cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 0, 8]}
    offsets = {n: torch.tensor(o, dtype=INT32) for n, o in offsets.items()}
    Call({n: t.detach() for n, t in tensors.items()}, offsets).check()
    out, lse = onepass.attention_varlen(**tensors, **offsets, return_lse=True)
    assert out.shape == (6, 0, 24)
    assert lse.shape == (0, 6)
    out.sum().backward()
    assert all((t.grad == 0).all() for t in tensors.values())


def test_heads_without_keys_are_refused():
    expected = r"q: expected a number of heads divisible by the 0 heads of k and v, got 2"
    with pytest.raises(ValueError, match=expected):
        onepass.attention(**make((2, 0)))
    assert not onepass.supports(**make((2, 0))).ok
    q, k, v = make((2, 0)).values()
    with pytest.raises(ValueError, match=r"q: expected a number of heads divisible by the 0 heads of the cache, got 2"):
        onepass.attention_decode(q, k, v, cache_seqlens=torch.tensor([3, 9], dtype=INT32))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_head_dim_of_0_is_still_refused(heads):
    with pytest.raises(ValueError, match=r"expected a head_dim of at least 1"):
        onepass.attention(**make(heads, head_dims=(16, 0)))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("granularity", ["row", "block", "head", "tensor"])
@pytest.mark.parametrize("centers", [False, True])
def test_fp8(heads, granularity, centers):
    q, k, v = make(heads).values()
    quantized = onepass.quantize_fp8(q, k, v, granularity=granularity, center_k=centers, center_v=centers)
    out, lse = onepass.attention(quantized, causal=True, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 6, 0, 24), (2, 0, 6))
    assert [t.shape for t in quantized.dequantize()] == [q.shape, k.shape, v.shape]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    onepass.attention(*leaves, precision="fp8").sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_fp8_packed(heads):
    q, k, v = (t[0] for t in make(heads, 1).values())
    offsets = {"cu_seqlens_q": [0, 2, 6], "cu_seqlens_k": [0, 0, 8]}
    offsets = {n: torch.tensor(o, dtype=INT32) for n, o in offsets.items()}
    quantized = onepass.quantize_fp8(q, k, v, center_k=True, center_v=True, **offsets)
    assert onepass.attention_varlen(quantized, **offsets).shape == (6, 0, 24)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("splits", [{}, {"num_splits": 3}, {"split_size": 64}], ids=str)
def test_decode_still_appends(heads, is_paged, splits):
    q, k_cache, v_cache = make(heads, seqlen_q=2).values()
    k_new, v_new = (torch.randn(2, 3, heads[1], size) for size in (16, 24))
    filled, table = torch.tensor([2, 0], dtype=INT32), None
    if is_paged:
        table = torch.tensor([[1], [0]], dtype=INT32)
    angles = torch.arange(9)[:, None] * torch.ones(4)
    out, lse = onepass.attention_decode(
        q,
        k_cache,
        v_cache,
        cache_seqlens=filled,
        page_table=table,
        k_new=k_new,
        v_new=v_new,
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        return_lse=True,
        **splits,
    )
    assert (out.shape, lse.shape) == ((2, 2, 0, 24), (2, 0, 2))
    for b, n in enumerate((2, 0)):
        page = b if table is None else table[b, 0]
        assert torch.equal(v_cache[page, n : n + 3], v_new[b])
        assert torch.equal(k_cache[page, n : n + 3, :, 8:], k_new[b, :, :, 8:])


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_decode_of_packed_queries(heads):
    q, k_cache, v_cache = make(heads).values()
    lengths = {"cache_seqlens": torch.tensor([9, 4], dtype=INT32), "cu_seqlens_q": torch.tensor([0, 1, 5], dtype=INT32)}
    out, lse = onepass.attention_decode(q[0], k_cache, v_cache, **lengths, return_lse=True)
    assert (out.shape, lse.shape) == ((6, 0, 24), (0, 6))


def test_merging_and_workspace():
    out, lse = onepass.merge_partials(torch.randn(3, 2, 6, 0, 8), torch.randn(3, 2, 0, 6))
    assert (out.shape, lse.shape) == ((2, 6, 0, 8), (2, 0, 6))
    sizes = {"batch": 2, "seqlen_q": 6, "head_dim_v": 8}
    assert onepass.split_workspace_bytes(3, num_heads_q=0, **sizes) == 0


def test_oracle():
    out, lse = reference.attention(**make((0, 3)))
    assert (out.shape, lse.shape) == ((2, 6, 0, 24), (2, 0, 6))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_compiled_and_counted(heads):
    from torch.utils.flop_counter import FlopCounterMode

    tensors = make(heads)
    call = torch.compile(lambda q, k, v: onepass.attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in tensors.values()]
    call(*leaves).sum().backward()
    assert all((leaf.grad == 0).all() for leaf in leaves)
    with FlopCounterMode(display=False) as counter:
        onepass.attention(*leaves).sum().backward()
    assert counter.get_total_flops() == 0
    assert onepass.supports(**tensors).ok

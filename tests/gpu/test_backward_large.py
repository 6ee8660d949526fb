"""Gradients of long sequences and of tensors past 2^31 elements on a Hopper GPU, compared with the oracle in slices."""

import itertools

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, FP16, ON_GPU, case, lengths_tensor, needs_hopper, offsets, size
from gradient_cases import check_gradients, loss_of

import onepass
from onepass import reference
from onepass.testing import Call, compare_gradients

MEMORY = 100 * 2**30
has_memory = not ON_GPU or (torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory > MEMORY)
pytestmark = [*needs_hopper, pytest.mark.skipif(not has_memory, reason="needs 100 GiB of GPU memory")]

LONG = size(1 << 17, 1 << 11)
MILLION = size(1 << 20, 1 << 12)
PAST_31_BITS = size(2**31, 2**21)  # elements
LEFT = 255


@pytest.fixture(autouse=True)
def _all_memory_is_free():
    yield
    if ON_GPU:
        torch.cuda.empty_cache()


def randn(*shape, dtype=BF16):
    return torch.randn(shape, device=DEVICE, dtype=dtype)


class Gradients:
    """One backward pass, with out and lse of its forward. All tensors have a batch dimension, packed ones included.

    Args:
        only_rows: if given, the only rows of queries that the loss depends on. The gradients of keys and values then
            equal those of a call with these queries alone.

    Attributes:
        q, k, v, dout, dlse: the inputs of the two passes.
        out, lse, dq, dk, dv: the results of the two passes.
    """

    def __init__(self, q, k, v, only_rows=None, **options):
        leaves = [t.requires_grad_() for t in (q, k, v)]
        function = onepass.attention_varlen if "cu_seqlens_q" in options else onepass.attention
        out, lse = function(*leaves, **options, return_lse=True, backend=BACKEND)
        dout, dlse = torch.randn_like(out), torch.randn_like(lse)
        if only_rows is not None:
            dout[:, : only_rows.start], dlse[..., : only_rows.start] = 0, 0
            dout[:, only_rows.stop :], dlse[..., only_rows.stop :] = 0, 0
        gradients = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        tensors = [t.detach() for t in (q, k, v, dout, dlse, out, lse, *gradients)]
        tensors = tensors if q.dim() == 4 else [t[None] for t in tensors]
        self.q, self.k, self.v, self.dout, self.dlse, self.out, self.lse, self.dq, self.dk, self.dv = tensors


def check(name, actual, oracle, plain, floor=0.0):
    row = compare_gradients(name, actual, oracle, plain, floor)
    assert row.ok, row


def check_slice(g, rows, keys, *whole_keys, heads=slice(None), heads_kv=slice(None), entry=0, **options):
    """Check dq of these rows, and dk and dv of `whole_keys`, against a call with these rows and keys alone.

    Args:
        rows: a range of queries.
        keys: every key that these queries see.
        whole_keys: ranges within `keys`, seen by no other query that the loss depends on.
    """
    entry = slice(entry, entry + 1)
    slices = {"q": g.q[entry, rows, heads], "k": g.k[entry, keys, heads_kv], "v": g.v[entry, keys, heads_kv]}
    dout, dlse = g.dout[entry, rows, heads], g.dlse[entry, heads, rows]
    both = []
    for dtype in (slices["q"].dtype, torch.float64):
        leaves = {n: t.detach().to(dtype).requires_grad_() for n, t in slices.items()}
        result = reference.attention(**leaves, **options, compute_dtype=dtype)
        weights = dout.to(dtype), dlse.to(dtype)
        both.append(torch.autograd.grad(result, list(leaves.values()), weights))
    plain, (dq, dk, dv) = both
    floors = Call(slices, options)._floors(dout, dlse, result)
    check("dq", g.dq[entry, rows, heads], dq, plain[0], floors["dq"])
    for some in whole_keys:
        inside = slice(some.start - keys.start, some.stop - keys.start)
        for name, oracle, standard in (("dk", dk, plain[1]), ("dv", dv, plain[2])):
            mine = getattr(g, name)[entry, some, heads_kv]
            check(name, mine, oracle[:, inside], standard[:, inside], floors[name][:, inside])


def check_window(g, start, stop, end, begin=0, **indices):
    """Check rows start to stop of the sequence from begin to end, each of which sees itself and LEFT keys before it."""
    keys = slice(max(begin, start - LEFT), stop)
    # rows past `stop` also see the last LEFT of these keys
    whole = slice(start, stop if stop == end else stop - LEFT)
    check_slice(g, slice(start, stop), keys, whole, causal=True, window=(LEFT, None), **indices)


# ---------------------------------------------------------------- long sequences


def key_gradients(g, keys, causal, dtype):
    """Compute dk and dv of a few keys from their definition, with every row's lse and delta, for a call of one head."""
    q, k, v, dout, out = (t[0, :, 0].to(dtype) for t in (g.q, g.k[:, keys], g.v[:, keys], g.dout, g.out))
    scale = q.shape[-1] ** -0.5
    lse, dlse = (t[0, 0, :, None].double() for t in (g.lse, g.dlse))
    p = torch.exp((q @ k.mT * scale).double() - lse)
    if causal:
        position = torch.arange(q.shape[0], device=DEVICE)[:, None] + g.k.shape[1] - q.shape[0]
        p = torch.where(torch.arange(g.k.shape[1], device=DEVICE)[None, keys] <= position, p, 0.0)
    delta = (dout.double() * out.double()).sum(-1, keepdim=True) - dlse
    ds = (p * ((dout @ v.mT).double() - delta)).to(dtype)
    return scale * ds.mT @ q, p.to(dtype).mT @ dout


@pytest.mark.parametrize(
    ("head_dim", "dtype", "causal"), [(64, FP16, True), (128, BF16, True), (128, BF16, False), (256, BF16, True)]
)
def test_long_rows_and_columns(head_dim, dtype, causal):
    """A row of dq is a sum over 131072 keys, a row of dk and dv one over as many queries."""
    g = Gradients(*(randn(1, LONG, 1, head_dim, dtype=dtype) for _ in range(3)), causal=causal)
    for start in (0, LONG // 2 - 7, LONG - 40):
        rows = slice(start, start + 40)
        # the keys that these rows see, with the causal diagonal at the last row and the last key
        keys = slice(0, start + 40 if causal else LONG)
        check_slice(g, rows, keys, causal=causal)
        mine = g.dk[0, rows, 0], g.dv[0, rows, 0]
        oracle, plain = (key_gradients(g, rows, causal, d) for d in (torch.float64, dtype))
        for name, *three in zip(("dk", "dv"), mine, oracle, plain, strict=True):
            check(name, *three)


@pytest.mark.parametrize(("seqlen_q", "causal"), [(1, False), (64, True)])
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, BF16), (128, FP16), (256, BF16)])
def test_few_queries_against_many_keys(seqlen_q, head_dim, dtype, causal):
    check_gradients(case(seqlen_q, LONG + 3, heads=(2, 1), head_dim=head_dim, dtype=dtype, causal=causal).call())


@pytest.mark.parametrize("causal", [False, True])
def test_many_queries_against_few_keys(causal):
    """With a causal mask, nearly all queries see no key."""
    check_gradients(case(LONG + 3, 64, heads=(2, 1), head_dim=128, causal=causal).call())


@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_of_one_sign(head_dim):
    """The 131072 terms of a sum do not cancel: a sum in 16 bits would stop growing after a few hundred tiles."""
    call = case(16, LONG, heads=(1, 1), head_dim=head_dim).call()
    call.tensors["k"].add_(1.0)
    check_gradients(call, "lse")  # dq = scale * dlse * sum of p k
    call = case(LONG, 16, heads=(1, 1), head_dim=head_dim).call()
    loss = loss_of(call, "out")
    loss.dout.add_(1.0)
    check_gradients(call, loss=loss)  # dv = sum of p dout


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_million_queries_with_a_window(head_dim):
    length = MILLION + 77
    g = Gradients(*(randn(1, length, 2, head_dim) for _ in range(3)), causal=True, window=(LEFT, None))
    for start in (0, 1000, MILLION // 2 + 5, MILLION - 1000, length - 600):
        check_window(g, start, start + 600, length)


def test_a_million_packed_tokens_with_a_window():
    cu = offsets((MILLION // 2, 0, 5, MILLION // 4 + 3, 700, MILLION // 4))
    options = {"causal": True, "window": (LEFT, None)}
    tensors = [randn(cu[-1], 2, 128) for _ in range(3)]
    g = Gradients(*tensors, cu_seqlens_q=lengths_tensor(cu), cu_seqlens_k=lengths_tensor(cu), **options)
    for start, end in itertools.pairwise(cu):
        if start < end:
            check_window(g, start, min(start + 600, end), end, begin=start)
            check_window(g, max(start, end - 600), end, end, begin=start)


# ---------------------------------------------------------------- 64-bit offsets


@pytest.mark.parametrize("heads_first", [False, True])
def test_all_tensors_past_31_bits(heads_first):
    """Gradients are right in the first, the middle and the last rows, which only 64-bit offsets reach."""
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 600
    shape = (1, heads, seqlen, 128) if heads_first else (1, seqlen, heads, 128)
    q, k, v = (randn(*shape) for _ in range(3))
    assert q.numel() > PAST_31_BITS
    q, k, v = (t.transpose(1, 2) if heads_first else t for t in (q, k, v))
    g = Gradients(q, k, v, causal=True, window=(LEFT, None))
    for head in (0, heads - 1):
        one = slice(head, head + 1)
        for start in (0, seqlen // 2, seqlen - 600):
            check_window(g, start, start + 600, seqlen, heads=one, heads_kv=one)


def test_keys_past_31_bits():
    """Gradients are right in the first and the last head of two batch entries of more than 2^31 elements each."""
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 100
    q, (k, v) = randn(2, 40, 2 * heads, 128), (randn(2, seqlen, heads, 128) for _ in range(2))
    assert k[0].numel() > PAST_31_BITS
    g = Gradients(q, k, v)
    for head, entry in itertools.product((0, heads - 1), (0, 1)):
        indices = {"heads": slice(2 * head, 2 * head + 2), "heads_kv": slice(head, head + 1), "entry": entry}
        some_keys = (slice(start, start + 100) for start in (0, seqlen // 2, seqlen - 100))
        check_slice(g, slice(0, 40), slice(0, seqlen), *some_keys, **indices)


@pytest.mark.parametrize("start", ["first", "last"])
def test_queries_past_31_bits(start):
    """A loss of a few rows gives keys and values their gradients from these rows, and the other rows zeros."""
    heads = 16
    seqlen = PAST_31_BITS // (heads * 128) + 100
    rows = slice(0, 100) if start == "first" else slice(seqlen - 100, seqlen)
    q, k, v = randn(1, seqlen, heads, 128), randn(1, 300, 1, 128), randn(1, 300, 1, 128)
    assert q.numel() > PAST_31_BITS
    g = Gradients(q, k, v, only_rows=rows)
    check_slice(g, rows, slice(0, 300), slice(0, 300))
    for other_rows in (slice(100, 300), slice(seqlen // 2, seqlen // 2 + 200), slice(seqlen - 300, seqlen - 100)):
        assert (g.dq[:, other_rows] == 0).all()


def test_packed_tensors_past_31_bits():
    """The last sequence starts past 2^31 elements."""
    heads = 16
    first = PAST_31_BITS // (heads * 128) + 10
    cu = offsets((first, 0, 333))
    options = {"causal": True, "window": (LEFT, None)}
    tensors = [randn(cu[-1], heads, 128) for _ in range(3)]
    g = Gradients(*tensors, cu_seqlens_q=lengths_tensor(cu), cu_seqlens_k=lengths_tensor(cu), **options)
    for head in (0, heads - 1):
        indices = {"heads": slice(head, head + 1), "heads_kv": slice(head, head + 1)}
        check_window(g, first, cu[-1], cu[-1], begin=first, **indices)
        check_window(g, first - 600, first, first, **indices)

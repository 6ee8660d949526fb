"""The operators of calls with modifiers: schema, fakes, autograd, compile, FLOPs; and those of a refused backward."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass.geometry import philox

INT32 = torch.int32
LENGTHS = torch.tensor([5, 9], dtype=INT32)
OFFSETS = torch.tensor([0, 4, 9], dtype=INT32)
STARTS = torch.tensor([2, 0], dtype=INT32)
OPTIONS = (0.3, None, 0, None, False, "tiled", None)
DECODE_OPTIONS = (0.3, None, 0, None, 2, None, False, True, None, None, "tiled")


def rows(*shape, seed=0, requires_grad=False):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def qkv(*leading, requires_grad=False):
    return [rows(*leading, heads, 8, seed=heads + n, requires_grad=requires_grad) for n, heads in enumerate((4, 2, 2))]


def modifiers(batch=2, seqlen_q=9, packed=False, requires_grad=False):
    """The tensors of `problem.Modifiers` but the state of dropout, for q of some rows."""
    lead = () if packed else (batch,)
    ranges = torch.tensor([0, 8], dtype=INT32).expand(*lead, 4, seqlen_q, 2).contiguous()
    positions = torch.arange(seqlen_q, dtype=INT32).expand(*lead, seqlen_q).contiguous()
    slopes = torch.rand(4).requires_grad_(requires_grad)
    return STARTS, ranges, positions, slopes, rows(*lead, 1, seqlen_q, 9, requires_grad=requires_grad)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    lead = (9,) if packed else (2, 9)
    lengths = (OFFSETS, OFFSETS, None) if packed else (None, None, LENGTHS)
    given = *qkv(*lead, requires_grad=True), rows(4), *lengths, *modifiers(packed=packed, requires_grad=True)
    state = philox.random_state(torch.device("cpu"))
    torch.library.opcheck(torch.ops.onepass.attention_modified_forward.default, (*given, state, 0.25, *OPTIONS))
    without = *given[:7], *(None,) * 5, state, 0.25, *OPTIONS
    torch.library.opcheck(torch.ops.onepass.attention_modified_forward.default, without)
    lead = () if packed else (2,)
    last = torch.tensor([1, 8], dtype=INT32).expand(*lead, 1, 9, 2).contiguous()
    every = *given, state, 0.25, *OPTIONS, last
    torch.library.opcheck(torch.ops.onepass.attention_modified_forward.default, every)


@pytest.mark.parametrize("constant", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("last", [(), (torch.tensor([1, 8], dtype=INT32).expand(2, 1, 9, 2).contiguous(),)])
def test_opcheck_backward(constant, last):
    given = *qkv(2, 9), rows(4), None, None, LENGTHS, *modifiers(), None, 0.0, *OPTIONS, *last
    out, lse = torch.ops.onepass.attention_modified_forward(*given)
    arguments = torch.randn_like(out), torch.randn_like(lse), out, lse, *constant, *given
    torch.library.opcheck(torch.ops.onepass.attention_modified_backward.default, arguments)


# ---------------------------------------------------------------- over a cache


def cache(batch=2):
    return rows(batch, 9, 2, 8, seed=5), rows(batch, 9, 2, 8, seed=6)


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck_over_a_cache(packed):
    q, offsets, seqlen_q = (rows(9, 4, 8), OFFSETS, 9) if packed else (rows(2, 3, 4, 8), None, 3)
    given = q, *cache(), LENGTHS, None, None, None, rows(4), None, None, offsets
    positions = None, None
    last = torch.tensor([1, 8], dtype=INT32).expand(1, 4, 9, 2).contiguous()
    for ranges in ((), (last,)):
        torch.library.opcheck(
            torch.ops.onepass.decode_modified.default,
            (*given, *modifiers(seqlen_q=seqlen_q, packed=packed), *positions, *DECODE_OPTIONS, *ranges),
        )


def test_opcheck_with_new_keys():
    tables, new = (torch.rand(20, 4), torch.rand(20, 4)), (rows(2, 2, 2, 8), rows(2, 2, 2, 8))
    given = rows(2, 3, 4, 8), *cache(), LENGTHS - 3, None, *tables, None, None, None, None, *new
    positions = torch.zeros(1, 3, dtype=INT32), torch.ones(2, 2, dtype=INT32)
    torch.library.opcheck(
        torch.ops.onepass.decode_modified_append.default, (*given, *modifiers(seqlen_q=3), *positions, *DECODE_OPTIONS)
    )


def test_opcheck_of_a_refused_backward():
    out, lse = rows(2, 3, 4, 8), rows(2, 4, 3)
    tests = "test_schema", "test_autograd_registration", "test_faketensor"  # the fourth runs the backward
    for sources in (torch.zeros(()), torch.zeros((), requires_grad=True)):
        arguments = out, lse, sources
        torch.library.opcheck(torch.ops.onepass.without_backward.default, arguments, test_utils=tests)


def call_over_a_cache(q, k, v, slopes, bias, starts, **options):
    options = {"seqstart_k": starts, "alibi_slopes": slopes, "bias": bias, "cache_seqlens": LENGTHS} | options
    return onepass.attention_decode(q, k, v, **options, return_lse=True)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()

    def function(*tensors):
        out, lse = call_over_a_cache(*tensors)
        return out.sin(), lse

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen_q in (2, 3, 5):
        given = rows(2, seqlen_q, 4, 8), *cache(), torch.rand(4), rows(2, 1, seqlen_q, 9), STARTS
        for a, b in zip(function(*given), compiled(*given), strict=True):
            torch.testing.assert_close(a, b)


def test_compile_writes_new_keys():
    torch._dynamo.reset()
    compiled = torch.compile(call_over_a_cache, fullgraph=True, backend="aot_eager")
    terms = torch.rand(4), rows(2, 1, 1, 9), STARTS
    results = []
    for function in (call_over_a_cache, compiled):
        caches = [t.clone() for t in cache()]
        new = {"k_new": rows(2, 1, 2, 8), "v_new": rows(2, 1, 2, 8), "cache_seqlens": LENGTHS - 1}
        results.append((*function(rows(2, 1, 4, 8), *caches, *terms, **new), *caches))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    assert not torch.equal(results[0][2], cache()[0])


def test_vmap_is_refused_with_a_reason():
    given = rows(3, 2, 1, 4, 8), *cache(), torch.rand(4), rows(2, 1, 1, 9), STARTS
    with pytest.raises(NotImplementedError, match=r"cannot run under torch\.vmap"):
        torch.vmap(call_over_a_cache, in_dims=(0, *[None] * 5))(*given)


def test_flops_are_those_of_the_pairs_that_the_window_leaves():
    given = rows(2, 3, 4, 8), *cache(), torch.rand(4), rows(2, 1, 3, 9), STARTS
    for is_fake, pairs in ((False, 5 + 4 + 3 + 9 + 8 + 7), (True, 2 * (9 + 8 + 7))):
        with FakeTensorMode(allow_non_fake_inputs=True) if is_fake else torch.no_grad():
            tensors = [torch.empty_like(t) for t in given] if is_fake else given
            with FlopCounterMode(display=False) as counter:
                call_over_a_cache(*tensors, **({"cache_seqlens": torch.empty_like(LENGTHS)} if is_fake else {}))
        assert counter.get_total_flops() == 4 * 4 * 8 * pairs


def test_each_tensor_alone_has_its_gradient():
    """A gradient does not depend on which other tensors require one, and nothing else gets one."""
    tensors = {name: torch.randn(2, n, h, 8) for name, n, h in (("q", 5, 4), ("k", 7, 2), ("v", 7, 2))}
    tensors |= {"sinks": torch.randn(4), "alibi_slopes": torch.rand(4), "bias": torch.randn(1, 4, 5, 7)}

    def gradients(names):
        leaves = {n: t.detach().clone().requires_grad_(n in names) for n, t in tensors.items()}
        result = onepass.attention(**leaves, causal=True, return_lse=True)
        (result.out.sin().sum() + result.lse.cos().sum()).backward()
        return {n: t.grad for n, t in leaves.items() if t.grad is not None}

    expected = gradients(tensors)
    assert expected.keys() == tensors.keys()
    for names in (*((name,) for name in tensors), ("q", "bias"), ("q", "alibi_slopes")):
        found = gradients(names)
        assert found.keys() == set(names)
        for name in names:
            torch.testing.assert_close(found[name], expected[name])

"""The Hopper backend inside torch: torch.compile, operator checks, autocast, inference mode."""

import shutil

import pytest
import torch
import torch._dynamo.testing
from gpu_cases import BACKEND, BF16, DEVICE, FP16, ON_GPU, case, needs_hopper, run_as_user

import onepass

pytestmark = needs_hopper


def dense(q, k, v, sinks):
    out, lse = onepass.attention(
        q, k, v, causal=True, window=(50, None), softcap=9.0, sinks=sinks, return_lse=True, backend=BACKEND
    )
    return out.sin() * 2, lse


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(dense, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (60, 90, 129):
        leaves = case(seqlen, seqlen + 5, batch=2, heads=(4, 2), sinks=True).call()
        arguments = [t.detach().requires_grad_() for t in (*leaves.tensors.values(), leaves.options["sinks"])]
        results = []
        for function in (dense, compiled):
            out, lse = function(*arguments)
            results.append((out, lse, *torch.autograd.grad(out.float().sum() + lse.sum(), arguments)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_compile_with_other_numbers():
    torch._dynamo.reset()

    def function(q, k, v, scale, cap):
        out = onepass.attention(q, k, v, softmax_scale=scale, softcap=cap, causal=True, backend=BACKEND)
        return out + onepass.attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5, backend=BACKEND)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    leaves = [t.requires_grad_() for t in case(60, 65, batch=2, heads=(4, 2)).tensors().values()]
    for scale, cap in ((0.3, 5.0), (0.4, 6.0), (0.5, 7.0)):
        results = []
        for f in (function, compiled):
            out = f(*leaves, scale, cap)
            results.append((out, *torch.autograd.grad(out.float().sum(), leaves)))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [2**31, 2**48, 2**70])
def test_windows_wider_than_any_sequence_hide_nothing(size):
    leaves = [t.requires_grad_() for t in case(60, 165, batch=2, heads=(4, 2)).tensors().values()]
    cache_seqlens = torch.tensor([100, 165], dtype=torch.int32, device=DEVICE)
    results = []
    for window in ((size, size), (0, size), (size, 0)), (None, (0, None), (None, 0)):
        window_results = []
        for sides in window:
            out = onepass.attention(*leaves, window=sides, deterministic=True, backend=BACKEND)
            window_results += [out, *torch.autograd.grad(out.float().sum(), leaves)]
            with torch.no_grad():
                window_results.append(onepass.attention_decode(*leaves, cache_seqlens=cache_seqlens, window=sides))
        results.append(window_results)
    for wide, none in zip(*results, strict=True):
        torch.testing.assert_close(wide, none)


def test_lengths_do_not_recompile():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    function = torch.compile(
        lambda q, k, v, cu, used, m: onepass.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=m, max_seqlen_k=m, seqused_k=used, backend=BACKEND
        ),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for total in (70, 120, 231, 310):
        call = case((30, total - 30), (30, total - 30), used=(2, total - 30), heads=(4, 2)).call()
        cu_seqlens, used = call.options["cu_seqlens_q"], call.options["seqused_k"]
        out = function(**call.tensors, cu=cu_seqlens, used=used, m=torch.tensor(total - 30, device=DEVICE))
        assert torch.equal(out, run_as_user(call).out)
    assert counter.frame_count == 1


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "g++", "clang"))), reason="inductor needs a C compiler")
def test_compile_with_inductor():
    torch._dynamo.reset()
    q, k, v = case(100, 130, heads=(4, 2)).tensors().values()
    compiled = torch.compile(lambda q, k, v: onepass.attention(q * 2, k, v, causal=True) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), onepass.attention(q * 2, k, v, causal=True) + 1)


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs are a GPU's")
def test_compile_into_cuda_graphs():
    torch._dynamo.reset()
    compiled = torch.compile(onepass.attention, fullgraph=True, backend="cudagraphs")
    for seed in range(4):
        torch.manual_seed(seed)
        q, k, v = (torch.randn(1, 300, 4, 128, device=DEVICE, dtype=BF16) for _ in range(3))
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(compiled(q, k, v, causal=True), onepass.attention(q, k, v, causal=True))


OPCHECK = {
    "dense": (case(60, 70, heads=(4, 2)), (None, 0, None)),
    "sinks, window, softcap": (case(60, 70, heads=(4, 2), dtype=FP16, sinks=True), (20, 3, 5.0)),
    "seqused_k": (case(60, 70, batch=2, heads=(4, 2), used=(13, 70)), (None, 0, None)),
    "packed": (case((20, 0, 40), (30, 5, 35), heads=(4, 2), slack=2), (None, None, None)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("sample", OPCHECK.values(), ids=OPCHECK.keys())
def test_opcheck(sample, requires_grad):
    case, (left, right, softcap) = sample
    call = case.call()
    lengths = [call.options.get(n) for n in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")]
    tensors = [t.detach().requires_grad_(requires_grad) for t in call.tensors.values()]
    arguments = (*tensors, call.options.get("sinks"), *lengths, 0.2, left, right, softcap, False, BACKEND, None)
    torch.library.opcheck(torch.ops.onepass.attention_forward.default, arguments)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_autocast(dtype):
    q, k, v = (t.float() for t in case(60, 70, heads=(4, 2)).tensors().values())
    with torch.autocast(DEVICE, dtype=dtype):
        out, lse = onepass.attention(q, k, v, return_lse=True, backend=BACKEND)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert torch.equal(out, onepass.attention(*(t.to(dtype) for t in (q, k, v)), backend=BACKEND))


def test_inference_mode():
    q, k, v = case(60, 70, heads=(4, 2)).tensors().values()
    expected = onepass.attention(q, k, v, backend=BACKEND)
    with torch.inference_mode():
        assert torch.equal(onepass.attention(q, k, v, backend=BACKEND), expected)


@pytest.mark.parametrize("precision", [None, "fp8"])
def test_torch_func_gives_what_backward_gives(precision):
    call = case(60, 70, heads=(4, 2), sinks=True).call()
    tensors = [t.detach().clone() for t in (*call.tensors.values(), call.options["sinks"])]

    def loss(q, k, v, sinks):
        options = {"causal": True, "sinks": sinks, "deterministic": True, "precision": precision, "backend": BACKEND}
        out, lse = onepass.attention(q, k, v, **options, return_lse=True)
        return out.float().square().sum() + lse.sin().sum()

    leaves = [t.clone().requires_grad_() for t in tensors]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    function = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()
    for gradients in (function(*tensors), compiled(*tensors)):
        for result, expected_gradient in zip(gradients, expected, strict=True):
            assert torch.equal(result, expected_gradient)


def test_jacobian_row_by_row():
    q, k, v = (t[:, :2] for t in case(60, 70, heads=(4, 2)).tensors().values())

    def function(q):
        return onepass.attention(q, k, v, backend=BACKEND, deterministic=True)

    jacobian = torch.func.jacrev(function, chunk_size=1)(q)
    leaf = q.detach().clone().requires_grad_()
    assert torch.equal(jacobian[0, 1, 2, 3], torch.autograd.grad(function(leaf)[0, 1, 2, 3], leaf)[0])

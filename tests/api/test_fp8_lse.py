"""Which FP8 calls have a kernel whose lse is exact: those whose lse or gradients are used."""

from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.api import calls, fast_path
from onepass.compat import flash_attn_3, flash_attn_4
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.kernels.heuristics.sm90 import forward_config_sm90
from onepass.problem.outputs import empty_gradients, empty_outputs

OFFSETS = torch.tensor([0, 30, 70], dtype=torch.int32)


@pytest.fixture
def codes(monkeypatch):
    """A list that says, for each forward that runs, whether the Hopper kernel for it would have p_codes."""
    found = []

    def prepare(name, problem, device, tuning=None):
        p_codes = forward_config_sm90(problem).p_codes

        def forward(inputs):
            found.append(p_codes)
            return tuple(t.zero_() for t in empty_outputs(problem, inputs))

        return forward

    monkeypatch.setattr(backends, "refusal", lambda name, *_: None if name == "sm90" else "not here")

    def backward(problem, inputs, out, lse, dout, dlse):
        return tuple(t.zero_() for t in empty_gradients(inputs))

    monkeypatch.setattr(dispatch, "prepare", prepare)
    monkeypatch.setattr(dispatch, "load_backward", lambda name, problem: SimpleNamespace(backward=backward))
    fast_path.forget()
    yield found
    fast_path.forget()


def make():
    return [torch.randn(2, 70, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("is_quantized", [False, True])
def test_calls_with_and_without_lse(codes, is_quantized, is_packed):
    """The two kinds of calls take turns, so that each has a first call and repeated ones."""
    tensors, offsets = make(), {}
    if is_packed:
        tensors, offsets = [t[0] for t in tensors], {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS}
    options = {"precision": "fp8"} | offsets
    if is_quantized:
        tensors, options = [onepass.quantize_fp8(*tensors, **offsets)], offsets
    function = onepass.attention_varlen if is_packed else onepass.attention
    for return_lse in (False, True, False, True, False):
        function(*tensors, return_lse=return_lse, **options)
        assert codes.pop() != return_lse


def test_calls_with_gradients(codes):
    q, k, v = make()
    sinks = torch.zeros(4)
    for t in (q, k, v, sinks):
        t.requires_grad_()
        onepass.attention(q, k, v, sinks=sinks, precision="fp8")
        with torch.no_grad():
            onepass.attention(q, k, v, sinks=sinks, precision="fp8")
        t.requires_grad_(False)
        assert codes == [False, True]
        codes.clear()
    onepass.attention(q, k, v, sinks=sinks, precision="fp8")
    assert codes == [True]


@pytest.mark.parametrize("levels", [1, 2])
def test_gradients_of_transforms(codes, levels):
    def loss(q, k, v):
        return onepass.attention(q, k, v, precision="fp8").float().sum()

    function = loss
    if levels == 2:  # only the outer level has a gradient, and the inner one has tensors of its own

        def function(q, k, v):
            return torch.func.grad(lambda x: (x * loss(q * 1, k, v)).sum())(torch.ones(1)).sum()

    q, k, v = make()
    torch.func.grad(function)(q, k, v)
    assert codes == [False]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls(codes, backend):
    def run(q, k, v):
        return onepass.attention(q, k, v, precision="fp8")

    def run_with_lse(q, k, v):
        return onepass.attention(q, k, v, precision="fp8", return_lse=True)

    q, k, v = make()
    torch.compile(run, fullgraph=True, backend=backend)(q, k, v)
    torch.compile(run_with_lse, fullgraph=True, backend=backend)(q, k, v)
    q.requires_grad_()
    torch.compile(run, fullgraph=True, backend=backend)(q, k, v)
    assert codes == [True, False, False]


def test_functions_of_flash_attn(codes):
    """They compute lse only for callers that ask for it, though flash-attn's kernels always do."""
    e4m3 = [t.to(torch.float8_e4m3fn) for t in make()]
    packed, lengths = [t.flatten(0, 1) for t in e4m3], [torch.tensor([0, 70, 140], dtype=torch.int32)] * 2
    for name, with_lse in ((flash_attn_3, "return_attn_probs"), (flash_attn_4, "return_lse")):
        for given, more in ((e4m3, ()), (packed, (*lengths, 70, 70))):
            function = name.flash_attn_varlen_func if more else name.flash_attn_func
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            options = dict(zip(names, more, strict=False))
            plain = function(*given, **options)
            out, lse = function(*given, **options, **{with_lse: True})
            assert lse.shape == ((4, 140) if more else (2, 4, 70))
            assert (plain if name is flash_attn_3 else plain[0]).shape == out.shape
    assert codes == [True, False] * 4


def test_centered_keys_with_sinks(codes):
    """lse brings sinks into out after the kernel."""
    for center_k, has_sinks in ((False, True), (True, False), (True, True)):
        quantized = onepass.quantize_fp8(*make(), center_k=center_k)
        onepass.attention(quantized, sinks=torch.zeros(4) if has_sinks else None)
        assert codes.pop() != (center_k and has_sinks)


@pytest.mark.parametrize("is_quantized", [False, True])
def test_warmup_compiles_what_calls_need(is_quantized):
    def codes_of(**options):
        q, k, v = make()
        call = {"q": q, "k": k, "v": v, "precision": "fp8"}
        if is_quantized:
            call = {"q": onepass.quantize_fp8(q, k, v), "k": None, "v": None}
        gradients = options.pop("gradients", False)
        problem, *_ = calls.problem_of_call("warmup", call | options, "sm90", gradients)
        return forward_config_sm90(problem).p_codes

    assert codes_of()
    assert not codes_of(return_lse=True)
    # a QuantizedQKV has no gradients
    assert codes_of(gradients=True) == is_quantized


def test_warmup_of_tensors_that_require_gradients():
    q, k, v = (t.requires_grad_() for t in make())
    call = {"q": q, "k": k, "v": v, "precision": "fp8"}
    assert not forward_config_sm90(calls.problem_of_call("warmup", call, "sm90")[0]).p_codes
    with torch.no_grad():
        assert forward_config_sm90(calls.problem_of_call("warmup", call, "sm90")[0]).p_codes


def test_codes_are_refused_where_lse_is_used(codes, monkeypatch):
    monkeypatch.setattr(backends, "arch_of", lambda name, device=None: "sm_90a")
    quantized = onepass.quantize_fp8(*make())
    call = {"q": quantized, "k": None, "v": None}
    config = forward_config_sm90(calls.problem_of_call("", call, "sm90")[0])
    assert config.p_codes
    onepass.attention(quantized, tuning=config)
    with pytest.raises(onepass.UnsupportedError, match="p_codes: expected False where lse or a gradient is used"):
        onepass.attention(quantized, tuning=config, return_lse=True)

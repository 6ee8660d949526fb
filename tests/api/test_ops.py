"""The torch operators: schema, fakes, autograd, compile, functorch and autocast; and the cost of the import."""

import dataclasses
import threading
from typing import ClassVar

import fresh_process
import pytest
import torch
import torch._dynamo.testing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import onepass
from onepass.dispatch import backends
from onepass.ops import attention as ops
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.tiled import scratch

INT32 = torch.int32


def qkv(*leading, heads_q=4, heads_kv=2, dtype=torch.float64, requires_grad=False):
    return tuple(
        torch.randn(*leading, heads, 8, dtype=dtype, requires_grad=requires_grad)
        for heads in (heads_q, heads_kv, heads_kv)
    )


def samples():
    cu_seqlens = torch.tensor([0, 4, 9], dtype=INT32)
    used = torch.tensor([3, 5], dtype=INT32)
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    options = (0.3, None, 0, None, False, "tiled", None)
    dense = qkv(2, 9, requires_grad=True)
    packed = qkv(9, requires_grad=True)
    return {
        "dense": (*dense, None, None, None, None, *options),
        "sinks, window, softcap": (*dense, sinks, None, None, None, 0.3, 2, 1, 5.0, True, "tiled", None),
        "seqused_k": (*dense, None, None, None, used, *options),
        "packed": (*packed, None, cu_seqlens, cu_seqlens, None, *options),
        "negative sides": (*dense, None, None, None, None, 0.3, -2, 5, None, False, "tiled", None),
        "no heads": (*qkv(2, 9, heads_q=0, requires_grad=True), None, None, None, None, *options),
        "no gradients": (*qkv(2, 9), None, None, None, None, *options),
    }


@pytest.mark.parametrize("sample", samples().values(), ids=samples().keys())
def test_opcheck(sample):
    torch.library.opcheck(torch.ops.onepass.attention_forward.default, sample)


def test_opcheck_backward():
    q, k, v = qkv(2, 9)
    options = (0.3, None, 0, None, False, "tiled", None)
    inputs = (q, k, v, None, None, None, None)
    out, lse = torch.ops.onepass.attention_forward(*inputs, *options)
    arguments = (torch.randn_like(out), torch.randn_like(lse), out, lse, *inputs, *options)
    torch.library.opcheck(torch.ops.onepass.attention_backward.default, arguments)


GRADCHECK = {
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "negative sides": {"window": (3, -1)},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True, "causal": True},
    "seqused_k": {"seqused_k": torch.tensor([3, 0], dtype=INT32)},
}


@pytest.mark.parametrize("options", GRADCHECK.values(), ids=GRADCHECK.keys())
def test_gradcheck(options):
    options = dict(options)
    leaves = list(qkv(2, 4, requires_grad=True))
    if options.pop("sinks", False):
        leaves.append(torch.randn(4, dtype=torch.float64, requires_grad=True))

    def function(q, k, v, sinks=None):
        out, lse = onepass.attention(q, k, v, **options, sinks=sinks, return_lse=True)
        return out, torch.where(lse == -torch.inf, 0.0, lse)

    assert torch.autograd.gradcheck(function, leaves)


def test_gradcheck_packed():
    cu_seqlens = torch.tensor([0, 2, 5], dtype=INT32)
    leaves = qkv(5, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *t: onepass.attention_varlen(*t, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True), leaves
    )


def test_only_lse_or_only_out_may_be_used():
    leaves = qkv(1, 5, requires_grad=True)
    out, lse = onepass.attention(*leaves, return_lse=True)
    from_lse = torch.autograd.grad(lse.sum(), leaves, retain_graph=True)
    from_out = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    both = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    for a, b, c in zip(from_lse, from_out, both, strict=True):
        torch.testing.assert_close(a + b, c)
    assert (from_lse[2] == 0).all()


@pytest.fixture(params=["tiled", "as on a Hopper GPU", "as on an Ampere GPU"])
def traced_dtype(request, monkeypatch):
    """Calls with this dtype are traced as on the CPU, or as on a GPU; the backend tiled computes them either way."""
    torch._dynamo.reset()
    if request.param == "tiled":
        return torch.float32
    taken = "sm90" if "Hopper" in request.param else "sm80"
    monkeypatch.setattr(
        backends, "device_refusal", lambda name, problem, device: None if name == taken else "another GPU"
    )
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setitem(backends.BACKENDS, taken, backends.BACKENDS["tiled"])
    q = torch.zeros(1, 1, 1, 8, dtype=torch.bfloat16)
    assert onepass.supports(q, q, q).backend == taken
    return torch.bfloat16


@pytest.mark.sampled(quick=3, slow=3)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_without_graph_breaks(traced_dtype, dynamic):
    def function(q, k, v, sinks):
        out, lse = onepass.attention(q, k, v, causal=True, window=(5, None), softcap=3.0, sinks=sinks, return_lse=True)
        return out.sin() * 2, lse

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen in (6, 9, 11):
        leaves = qkv(2, seqlen, dtype=traced_dtype, requires_grad=True)
        sinks = torch.randn(4, requires_grad=True)
        results = []
        for f in (function, compiled):
            out, lse = f(*leaves, sinks)
            results.append((out, lse, *torch.autograd.grad(out.sum() + lse.sum(), (*leaves, sinks))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.sampled(quick=0, slow=2)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_with_other_numbers(traced_dtype, dynamic):
    def function(q, k, v, scale, cap):
        out = onepass.attention(q, k, v, softmax_scale=scale, softcap=cap, causal=True)
        return out + onepass.attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5)

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seqlen, scale, cap in ((6, 0.3, 5.0), (9, 0.4, 6.0), (11, 0.5, 7.0)):
        q, k, v = qkv(2, seqlen, dtype=traced_dtype, requires_grad=True)
        results = []
        for f in (function, compiled):
            out = f(q, k, v, scale, cap)
            results.append((out, *torch.autograd.grad(out.sum(), (q, k, v))))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)


def test_lengths_do_not_recompile(traced_dtype):
    counter = torch._dynamo.testing.CompileCounter()
    function = torch.compile(
        lambda q, k, v, cu, used, m: onepass.attention_varlen(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=m, max_seqlen_k=m, seqused_k=used
        ),
        fullgraph=True,
        dynamic=True,
        backend=counter,
    )
    for total in (7, 12, 23, 31):
        cu_seqlens = torch.tensor([0, 3, total], dtype=INT32)
        used = torch.tensor([2, total - 3], dtype=INT32)
        function(*qkv(total, dtype=traced_dtype), cu_seqlens, used, torch.tensor(total - 3))
    assert counter.frame_count == 1


def test_torch_compile_can_wrap_the_defaults_of_a_problem():
    # torch 2.10 to 2.12 wraps all of them, used or not
    for field in dataclasses.fields(AttentionProblem):
        assert field.default_factory is dataclasses.MISSING
        assert field.default in (dataclasses.MISSING, None) or type(field.default) in (bool, int, float, str)


@pytest.mark.slow
def test_compile_with_inductor():
    torch._dynamo.reset()
    q, k, v = qkv(1, 16, dtype=torch.float32)
    compiled = torch.compile(lambda q, k, v: onepass.attention(q, k, v, causal=True) + 1, fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), onepass.attention(q, k, v, causal=True) + 1)


def test_vmap_is_refused_with_a_reason():
    q, k, v = qkv(3, 2, 5)
    with pytest.raises(NotImplementedError, match=r"cannot run under torch\.vmap: it already takes a batch"):
        torch.vmap(onepass.attention)(q, k, v)
    leaf, k, v = q[0].requires_grad_(), k[0], v[0]
    out = onepass.attention(leaf, k, v)
    with pytest.raises(NotImplementedError, match=r"cannot run under torch\.vmap: it already takes a batch"):
        torch.vmap(lambda dout: torch.autograd.grad(out, leaf, dout))(torch.stack([out, out]))


def test_a_second_derivative_is_refused_with_a_reason():
    q, k, v = qkv(1, 4, requires_grad=True)
    (dq,) = torch.autograd.grad(onepass.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("options", [{}, {"alibi_slopes": torch.tensor([0.5])}], ids=["plain", "modified"])
def test_a_backward_goes_through_the_operator_where_something_watches(monkeypatch, options):
    """Elsewhere it calls the implementation itself, with the same results."""

    class Watch(TorchDispatchMode):
        seen: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    name = "attention_modified_backward" if options else "attention_backward"
    q = torch.randn(1, 5, 1, 8, requires_grad=True)
    out = onepass.attention(q, q, q, **options)
    (expected,) = torch.autograd.grad(out.sum(), q, retain_graph=True)
    loss = out.sum()
    with Watch():
        assert torch.autograd.grad(loss, q, retain_graph=True)[0].equal(expected)
    assert Watch.seen.count(f"onepass.{name}.default") == 1
    with torch.profiler.profile() as profile:
        torch.autograd.grad(loss, q, retain_graph=True)
    assert f"onepass::{name}" in {event.key for event in profile.key_averages()}
    monkeypatch.setattr(ops, "OPERATORS", None)
    assert torch.autograd.grad(loss, q, retain_graph=True)[0].equal(expected)


def test_forward_mode_is_refused_with_a_reason():
    q, k, v = qkv(1, 4)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda q: onepass.attention(q, k, v), (q,), (torch.ones_like(q),))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, torch.ones_like(k))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            onepass.attention(q, dual, v)
        # tangents of other tensors do not matter
        assert onepass.attention(q, k, v).isfinite().all()


def test_the_operator_that_merges_has_results_of_the_dtypes_that_its_fake_says():
    outs, lses = torch.randn(3, 2, 9, 4, 8).bfloat16(), torch.randn(3, 2, 4, 9)
    torch.library.opcheck(torch.ops.onepass.merge_partials, (outs, lses))
    out, lse = torch.ops.onepass.merge_partials(outs, lses)
    expected = onepass.merge_partials(outs, lses)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_inputs_and_nothing_inside(dtype):
    q, k, v = qkv(2, 9, dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        out, lse = onepass.attention(q.to(dtype), k, v, return_lse=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    expected = onepass.attention(q.to(dtype), k.to(dtype), v.to(dtype))
    # accumulated in float32: bfloat16 products inside would give other values
    assert torch.equal(out, expected)


def test_autocast_casts_what_meets_a_cache_in_its_dtype():
    q, k_new, v_new = (t[:, :2] for t in qkv(2, 9, dtype=torch.float32))
    caches = [t.bfloat16() for t in qkv(2, 9, dtype=torch.float32)[1:]]
    lengths = torch.tensor([3, 7], dtype=torch.int32)

    def decode(cast, caches):
        rows = (t.to(cast) for t in (q, k_new, v_new))
        named = dict(zip(("q", "k_new", "v_new"), rows, strict=True))
        return onepass.attention_decode(**named, k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths)

    expected = decode(torch.bfloat16, copies := [t.clone() for t in caches])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        given = {"q": q, "k_new": k_new, "v_new": v_new, "k_cache": caches[0], "v_cache": caches[1]}
        assert onepass.supports(**given, cache_seqlens=lengths)
        assert torch.equal(decode(torch.float32, caches), expected)
        assert all(torch.equal(cache, copy) for cache, copy in zip(caches, copies, strict=True))
        # a cache in another dtype stays as it is, and so do queries and keys
        assert decode(torch.float32, [t.float() for t in caches]).dtype == torch.float32
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(TypeError, match="k_cache: expected dtype"):
        decode(torch.float32, caches)


def test_inference_mode_and_default_dtype():
    q, k, v = qkv(1, 9, dtype=torch.float32)
    expected = onepass.attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(onepass.attention(q, k, v), expected)
    previous = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(onepass.attention(q, k, v), expected)
    finally:
        torch.set_default_dtype(previous)


def test_workspace_of_inference_mode_serves_a_training_step(monkeypatch):
    monkeypatch.setattr(scratch, "_kept", threading.local())  # so that none outlives an earlier call
    leaves = qkv(1, 9, requires_grad=True)
    with torch.inference_mode():
        onepass.attention(*leaves, backend="tiled")
    onepass.attention(*leaves, backend="tiled").sum().backward()
    assert leaves[0].grad is not None


def test_a_small_workspace_outlives_a_call_and_a_large_one_does_not(monkeypatch):
    monkeypatch.setattr(scratch, "_kept", threading.local())
    buffers, count = scratch.Scratch(torch.empty(0), torch.float32), scratch.KEPT_BYTES // 4
    small, _ = buffers.empty("small", count), buffers.empty("large", count + 1)
    assert set(scratch._kept.buffers[torch.float32]) == {"small"}
    again = scratch.Scratch(torch.empty(0), torch.float32)
    assert again.empty("small", 2, 3).data_ptr() == small.data_ptr()
    assert again.empty("small", count + 1).numel() == count + 1
    assert scratch.Scratch(torch.empty(0), torch.float64).empty("small", 2).dtype == torch.float64


def test_flops_are_counted():
    q, k, v = qkv(2, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        out = onepass.attention(q, k, v, causal=True)
        out.sum().backward()
    pairs = 2 * 4 * (16 * 17 // 2)
    assert counter.get_total_flops() == pairs * (4 * 8 + 10 * 8)


INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k"
MODIFIERS = "Tensor? seqstart_k, Tensor? key_ranges, Tensor? q_positions, Tensor? alibi_slopes, Tensor? bias"
SCORES = "float softmax_scale, SymInt? window_left, SymInt? window_right, float? softcap"
OPTIONS = f"{SCORES}, bool deterministic, str backend, str? tuning"
MODIFIED = f"{INPUTS}, {MODIFIERS}, Tensor? dropout_state, float dropout_p, {OPTIONS}"
RESULTS = "Tensor? dout, Tensor? dlse, Tensor out, Tensor lse"
GRADIENTS = "Tensor dq, Tensor dk, Tensor dv, Tensor dsinks"
QUANTIZATION = "ScalarType out_dtype, SymInt? q_block, SymInt? kv_block, bool v_keys_last, bool exact_lse"
DESCALES = "Tensor q_descale, Tensor k_descale, Tensor v_descale"
CACHE = (
    "Tensor cache_seqlens, Tensor? page_table, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? sinks, "
    "Tensor? k_descale, Tensor? v_descale, Tensor? cu_seqlens_q"
)
DECODE_OPTIONS = (
    f"{SCORES}, SymInt? num_splits, SymInt? split_size, bool rotary_interleaved, bool check_values, SymInt? kv_block, "
    "SymInt? max_seqlen_q, str backend"
)
POSITIONS = "Tensor? rotary_positions_q, Tensor? rotary_positions_k"
WRITTEN = f"Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, {CACHE}, Tensor k_new, Tensor v_new"
READ = f"Tensor q, Tensor k_cache, Tensor v_cache, {CACHE}"
SCHEMAS = {
    "attention_forward": (f"{INPUTS}, {OPTIONS}", "Tensor out, Tensor lse"),
    "attention_backward": (f"{RESULTS}, {INPUTS}, {OPTIONS}", GRADIENTS),
    "attention_modified_forward": (MODIFIED, "Tensor out, Tensor lse"),
    "attention_modified_backward": (
        f"{RESULTS}, bool constant_slopes, bool constant_bias, {MODIFIED}",
        f"{GRADIENTS}, Tensor dslopes, Tensor dbias",
    ),
    "attention_fp8": (f"{INPUTS}, {OPTIONS}, str forward_backend, bool exact_lse", "Tensor out, Tensor lse"),
    "attention_quantized": (f"{INPUTS}, {OPTIONS}, {DESCALES}, {QUANTIZATION}", "Tensor out, Tensor lse"),
    "decode": (f"{READ}, {DECODE_OPTIONS}", "Tensor out, Tensor lse"),
    "decode_append": (f"{WRITTEN}, {DECODE_OPTIONS}", "Tensor out, Tensor lse"),
    "decode_modified": (f"{READ}, {MODIFIERS}, {POSITIONS}, {DECODE_OPTIONS}", "Tensor out, Tensor lse"),
    "decode_modified_append": (f"{WRITTEN}, {MODIFIERS}, {POSITIONS}, {DECODE_OPTIONS}", "Tensor out, Tensor lse"),
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_programs_that_were_exported_still_load(name):
    """A schema may get new arguments with defaults at its end, and nothing else."""
    arguments, results = SCHEMAS[name]
    exported = torch._C.parse_schema(f"onepass::{name}({arguments}) -> ({results})")
    assert getattr(torch.ops.onepass, name).default._schema.is_backward_compatible_with(exported)


@pytest.mark.parametrize("packed", [{}, dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, 4]).int())])
def test_operators_get_the_flag_of_the_call_or_else_torchs(packed):
    asked = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "onepass":
                names = [argument.name for argument in func._schema.arguments]
                asked.append(args[names.index("deterministic")])
            return func(*args, **(kwargs or {}))

    q, k, v = (t.squeeze(0) if packed else t for t in qkv(1, 4))
    function = onepass.attention_varlen if packed else onepass.attention
    torch.use_deterministic_algorithms(True)
    try:
        with Watch():
            for deterministic in (None, False, True):
                function(q, k, v, deterministic=deterministic, **packed)
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked == [True, False, True]


def test_deterministic_follows_the_global_flag():
    q, k, v = qkv(1, 4)
    from onepass.validation.attention import check_attention

    def is_deterministic(**options):
        return check_attention(q, k, v, **options)[1].deterministic

    assert not is_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        assert is_deterministic()
        assert is_deterministic(deterministic=None)
        assert not is_deterministic(deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)


def test_static_holds_no_lengths():
    def problem(seqlen, scale, window):
        inputs = AttentionInputs(*qkv(1, seqlen))
        return AttentionProblem.of(inputs, softmax_scale=scale, mask=Mask(*window), softcap=None, deterministic=False)

    assert problem(4, 0.1, (3, 0)).static() == problem(9, 0.7, (8, 5)).static()
    assert problem(4, 0.1, (3, 0)).static() != problem(4, 0.1, (None, 0)).static()


def test_importing_imports_torch_only_and_changes_nothing():
    code = """
import sys, torch
import torch.utils.flop_counter  # where the operators' FLOP formulas belong; brings triton where torch has it
before = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()
loaded = set(sys.modules)
import onepass
new = {name.partition(".")[0] for name in set(sys.modules) - loaded}
foreign = {"cutlass", "cuda", "tvm_ffi", "triton", "transformers", "typer", "rich", "matplotlib", "numpy"} & new
assert not foreign, foreign
assert not any(name.startswith("onepass.kernels.sm") for name in sys.modules)
assert (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype()) == before
"""
    fresh_process.check(code)


def test_autocast_leaves_float64():
    q, k, v = (torch.randn(1, 5, 2, 8, dtype=torch.float64) for _ in range(3))
    expected = onepass.attention(q, k, v, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = onepass.attention(q, k, v, causal=True)
    assert out.dtype == torch.float64
    assert torch.equal(out, expected)

"""flash-attn 2's private functions: their tuples, and a backward from given out and lse."""

import inspect

import pytest
import torch

from onepass.api import fast_path
from onepass.compat import flash_attn as fa
from onepass.compat import flash_attn_3 as fa3
from onepass.compat import flash_attn_4 as fa4
from onepass.problem import AttentionProblem
from onepass.problem.decode import DecodeProblem

DTYPE = torch.float64
OFFSETS = torch.tensor([0, 4, 11], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 6, 16], dtype=torch.int32)
PACKED = OFFSETS, OFFSETS_K, 7, 10


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=DTYPE)


def dense():
    return randn(2, 5, 4, 8), randn(2, 7, 2, 8, seed=1), randn(2, 7, 2, 8, seed=2)


def packed():
    return randn(11, 4, 8), randn(16, 2, 8, seed=1), randn(16, 2, 8, seed=2)


SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
OPTIONS = [
    {"causal": True},
    {"window_size": (3, 1), "softcap": 2.0, "deterministic": True},
    {"dropout_p": 0.3, "alibi_slopes": SLOPES},
]


def by_position(options):
    """The options between the lengths and alibi_slopes, in the order of the private functions."""
    left, right = options.get("window_size", (-1, -1))
    p, softcap = options.get("dropout_p", 0.0), options.get("softcap", 0.0)
    return p, 0.3, options.get("causal", False), left, right, softcap, options.get("alibi_slopes")


def run(is_packed, options):
    """(out, lse, gradients) of the public function, and (out, lse, gradients, softmax_d) of the private ones."""
    tensors = packed() if is_packed else dense()
    lengths = PACKED if is_packed else ()
    public = fa.flash_attn_varlen_func if is_packed else fa.flash_attn_func
    forward = fa._flash_attn_varlen_forward if is_packed else fa._flash_attn_forward
    backward = fa._flash_attn_varlen_backward if is_packed else fa._flash_attn_backward
    dout = randn(*tensors[0].shape, seed=9)
    leaves = [t.clone().requires_grad_() for t in tensors]
    torch.manual_seed(1)
    out, lse, _ = public(*leaves, *lengths, softmax_scale=0.3, return_attn_probs=True, **options)
    expected = out, lse, torch.autograd.grad(out, leaves, dout)
    torch.manual_seed(1)
    arguments = by_position(options)
    out, lse, probs, state = forward(*tensors, *lengths, *arguments, False)
    assert probs.shape == (0,)
    assert state.dtype == torch.int64
    assert state.shape == (2,)
    buffers = [torch.full_like(t, torch.nan) for t in tensors]
    is_reproducible = options.get("deterministic", False)
    softmax_d = backward(dout, *tensors, out, lse, *buffers, *lengths, *arguments, is_reproducible, state)
    return expected, (out, lse, buffers, softmax_d, dout)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("is_packed", [False, True])
def test_forward_and_backward_are_those_of_the_public_function(is_packed, options):
    (out, lse, gradients), (found, found_lse, buffers, softmax_d, dout) = run(is_packed, options)
    assert torch.equal(found, out)
    assert torch.equal(found_lse, lse)
    for gradient, buffer in zip(gradients, buffers, strict=True):
        torch.testing.assert_close(buffer, gradient)
    sums = (dout * out).sum(-1).transpose(-1, -2).float()
    assert softmax_d.dtype == torch.float32
    assert softmax_d.shape == ((4, 11 + 128 * 2) if is_packed else (2, 4, 128))
    torch.testing.assert_close(softmax_d[..., : sums.shape[-1]], sums)
    assert not softmax_d[..., sums.shape[-1] :].any()


def test_rows_of_softmax_d_are_rounded_up():
    for seqlen_k in (7, 300):
        q, k = randn(1, 130, 2, 8), randn(1, seqlen_k, 2, 8)
        out, lse, *_ = fa._flash_attn_forward(q, k, k, *by_position({}), False)
        buffers = [torch.empty_like(t) for t in (q, k, k)]
        softmax_d = fa._flash_attn_backward(q, q, k, k, out, lse, *buffers, *by_position({}), False)
        assert softmax_d.shape == (1, 2, 256)


def test_a_ring_of_two_blocks_of_keys():
    """Partials of two blocks of keys, merged, and their backward from the merged out and lse."""
    q, k, v = dense()
    dout = randn(*q.shape, seed=9)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out = fa.flash_attn_func(*leaves, softmax_scale=0.3)
    expected = torch.autograd.grad(out, leaves, dout)
    parts = [slice(0, 3), slice(3, 7)]
    partials = [fa._flash_attn_forward(q, k[:, s], v[:, s], *by_position({}), False)[:2] for s in parts]
    lse = torch.logaddexp(*(p[1] for p in partials))
    merged = sum(o * (own - lse).exp().transpose(1, 2)[..., None] for o, own in partials)
    torch.testing.assert_close(merged, out)
    found = [torch.zeros_like(q), torch.empty_like(k), torch.empty_like(v)]
    for s in parts:
        dq, dk, dv = torch.empty_like(q), found[1][:, s], found[2][:, s]
        fa._flash_attn_backward(dout, q, k[:, s], v[:, s], merged, lse, dq, dk, dv, *by_position({}), False)
        found[0] += dq
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_probabilities_of_the_forward():
    q, k, v = dense()
    torch.manual_seed(2)
    *_, expected = fa.flash_attn_func(q, k, v, 0.3, 0.3, return_attn_probs=True)
    torch.manual_seed(2)
    assert torch.equal(fa._flash_attn_forward(q, k, v, *by_position({"dropout_p": 0.3}), True)[2], expected)
    with pytest.raises(ValueError, match="return_softmax: expected False without dropout"):
        fa._flash_attn_forward(q, k, v, *by_position({}), True)


def test_float32_results_under_autocast():
    """softmax_d and the scores of S_dmask are computed in float32, whatever autocast is on."""
    q, k, v = (t.bfloat16() for t in dense())
    found = {}
    for is_on in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            torch.manual_seed(1)
            out, lse, probabilities, state = fa._flash_attn_forward(q, k, v, *by_position({"dropout_p": 0.3}), True)
            buffers = [torch.empty_like(t) for t in (q, k, v)]
            arguments = *by_position({"dropout_p": 0.3}), False, state
            softmax_d = fa._flash_attn_backward(q, q, k, v, out, lse, *buffers, *arguments)
        found[is_on] = probabilities, softmax_d, *buffers
    for plain, under_autocast in zip(found[False], found[True], strict=True):
        assert plain.dtype == under_autocast.dtype
        assert torch.equal(plain, under_autocast)


def test_left_padding_and_used_lengths_of_packed_keys():
    q, k, v = packed()
    starts, used = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)
    k[:2], k[5:6], k[14:] = torch.nan, torch.nan, torch.nan
    out, lse, *_ = fa._flash_attn_varlen_forward(
        q, k, v, *PACKED, *by_position({"window_size": (3, 1)}), leftpad_k=starts, seqused_k=used, zero_tensors=True
    )
    for b, (first, end) in enumerate(((2, 5), (6, 14))):
        rows = slice(*OFFSETS[b : b + 2])
        own = q[None, rows], k[None, first:end], v[None, first:end]
        expected = fa.flash_attn_func(*own, softmax_scale=0.3, window_size=(3, 1), return_attn_probs=True)
        torch.testing.assert_close(out[rows], expected[0][0])
        torch.testing.assert_close(lse[:, rows], expected[1][0])


def test_pages_of_the_packed_forward():
    q, pages = randn(2, 4, 8), [randn(6, 4, 2, 8, seed=s) for s in (1, 2)]
    table, used = torch.tensor([[5, 0], [3, 1]], dtype=torch.int32), torch.tensor([7, 3], dtype=torch.int32)
    one_each = torch.tensor([0, 1, 2], dtype=torch.int32)
    arguments = {"block_table": table, "seqused_k": used, "num_splits": 0}
    out, lse, probs, state = fa._flash_attn_varlen_forward(
        q, *pages, one_each, one_each, 1, 7, *by_position({}), **arguments
    )
    assert probs.shape == (0,)
    assert state.shape == (2,)
    expected = fa.flash_attn_with_kvcache(
        q[:, None], *pages, cache_seqlens=used, block_table=table, softmax_scale=0.3, return_softmax_lse=True
    )
    torch.testing.assert_close(out, expected[0][:, 0])
    torch.testing.assert_close(lse, expected[1][..., 0].T)
    for match, changes in (
        (r"seqused_k: expected at most 8, .* got", {"seqused_k": used + 7}),
        (r"seqused_k: expected 0 to 8, .* got -1", {"seqused_k": used - 4}),
        (r"cu_seqlens_k: expected at most 8, .* got", {"seqused_k": None}),
    ):
        with pytest.raises(ValueError, match=match):
            fa._flash_attn_varlen_forward(
                q, *pages, one_each, 9 * one_each, 1, 7, *by_position({}), **(arguments | changes)
            )
    dropped = by_position({"dropout_p": 0.5})
    for asks in (False, True):
        _, _, probs, _ = fa._flash_attn_varlen_forward(
            q, *pages, one_each, one_each, 1, 7, *dropped, **arguments, return_softmax=asks
        )
        assert probs.shape == ((2, 4, 128, 128) if asks else (0,))
    starts = torch.tensor([3, 0], dtype=torch.int32)
    out, *_ = fa._flash_attn_varlen_forward(
        q, *pages, one_each, one_each, 1, 7, *by_position({}), **arguments, leftpad_k=starts
    )
    padded = {"cache_seqlens": used, "block_table": table, "cache_leftpad": starts, "softmax_scale": 0.3}
    torch.testing.assert_close(out, fa.flash_attn_with_kvcache(q[:, None], *pages, **padded)[:, 0])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        fa._flash_attn_varlen_forward(
            q, *pages, one_each, one_each, 1, 7, *by_position({}), **(arguments | {"num_splits": 2})
        )


@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        (
            {"dropout_p": 0.1},
            TypeError,
            "rng_state: expected the state that the forward with dropout returned, got None",
        ),
        (
            {"dropout_p": 0.1, "rng_state": torch.ones(3)},
            ValueError,
            r"rng_state: expected int64 of shape \(2,\), got torch.float32 of shape \(3,\)",
        ),
        ({"window_size_left": 1.5}, TypeError, "window_size_left: expected an int"),
    ],
)
def test_bad_arguments_of_the_backward(changes, error, match):
    q, k, v = dense()
    out, lse, *_ = fa._flash_attn_forward(q, k, v, *by_position({}), False)
    names = list(inspect.signature(fa._flash_attn_backward).parameters)
    arguments = dict(zip(names, (out, q, k, v, out, lse, None, None, None, *by_position({}), False), strict=False))
    assert fa._flash_attn_backward(**arguments).shape == (2, 4, 128)
    with pytest.raises(error, match=match):
        fa._flash_attn_backward(**(arguments | changes))


BAD_RESULTS = [
    ({"dout": torch.ones(2, 5, 4, 9, dtype=DTYPE)}, ValueError, r"dout: expected shape \(2, 5, 4, 8\), got"),
    ({"out": torch.ones(2, 5, 4, 9, dtype=DTYPE)}, ValueError, r"out: expected shape \(2, 5, 4, 8\), got"),
    ({"lse": torch.ones(2, 5, 4)}, ValueError, r"lse: expected shape \(2, 4, 5\)"),
    ({"lse": torch.ones(2, 4, 5).int()}, TypeError, "lse: expected floating point on cpu like q, got torch.int32"),
    ({"lse": None}, TypeError, "lse: expected a torch.Tensor"),
    ({"dq": torch.ones(2, 5, 2, 8, dtype=DTYPE)}, ValueError, r"dq: expected shape \(2, 5, 4, 8\)"),
    ({"dk": torch.ones(2, 7, 4, 8, dtype=DTYPE)}, ValueError, r"dk: expected shape \(2, 7, 2, 8\)"),
    ({"dv": torch.ones(2, 7, 2, 4, dtype=DTYPE)}, ValueError, r"dv: expected shape \(2, 7, 2, 8\)"),
]


def backward_of(library, results, **options):
    """The private backward of a version: results has dout, out and lse, and may have dq, dk and dv."""
    results = {"dq": None, "dk": None, "dv": None} | results | dict(zip("qkv", dense(), strict=True))
    if library is fa4:
        return fa4._flash_attn_bwd(**results, **options)
    results["softmax_lse"] = results.pop("lse")
    if library is fa3:
        return fa3._flash_attn_backward(**results, **options)
    names = ("dropout_p", "softmax_scale", "causal", "window_size_left", "window_size_right", "softcap", "alibi_slopes")
    usual = dict(zip(names, by_position({}), strict=True))
    return fa._flash_attn_backward(**results, **(usual | {"deterministic": False} | options))


@pytest.mark.parametrize("library", [fa, fa3, fa4])
@pytest.mark.parametrize(("changes", "error", "match"), BAD_RESULTS)
def test_bad_results_are_refused_by_every_backward(library, changes, error, match):
    out, lse = fa3.flash_attn_func(*dense(), return_attn_probs=True)
    results = {"dout": out, "out": out, "lse": lse}
    backward_of(library, results)
    with pytest.raises(error, match=match):
        backward_of(library, results | changes)


def test_results_of_private_functions_cannot_be_differentiated():
    q, k, v = dense()
    out, *_ = fa._flash_attn_forward(q.requires_grad_(), k, v, *by_position({}), False)
    with pytest.raises(NotImplementedError, match="_flash_attn_forward has no backward"):
        out.sum().backward()


# parameters of the extension module's functions that the functions of Python have under another name
OTHER_NAMES = {"p_dropout": "dropout_p", "is_causal": "causal", "is_rotary_interleaved": "rotary_interleaved"}
OTHER_NAMES |= {"kcache": "k_cache", "vcache": "v_cache", "seqlens_k": "cache_seqlens"}
WINDOW = {"window_size_left": 4, "window_size_right": 2}
ALL_OPTIONS = {"softmax_scale": 0.3, "causal": False, "softcap": 3.0, "alibi_slopes": SLOPES} | WINDOW
STARTS, ENTRIES = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([1, 0], dtype=torch.int32)


def extension_calls():
    """A function of `flash_attn_gpu`, the function of Python that it stands for, and all of their arguments by name."""
    dropped = ALL_OPTIONS | {"dropout_p": 0.4}
    rows, (q, k, v) = dict(zip("qkv", packed(), strict=True)), dense()
    rows |= zip(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), PACKED, strict=True)
    pages = {name: randn(6, 4, 2, 8, seed=seed) for seed, name in enumerate("kv", 1)}
    table = {"block_table": torch.tensor([[5, 0, 2], [3, 1, 4]], dtype=torch.int32)}
    new = {"k": randn(2, 2, 2, 8, seed=3), "v": randn(2, 2, 2, 8, seed=4), "rotary_interleaved": False}
    new |= {"rotary_cos": randn(12, 3, seed=5), "rotary_sin": randn(12, 3, seed=6)}
    cache = ALL_OPTIONS | {"cache_seqlens": torch.tensor([3, 5], dtype=torch.int32), "num_splits": 2}
    cache |= {"q": q, "k_cache": k, "v_cache": v, "cache_batch_idx": ENTRIES, "cache_leftpad": STARTS}
    in_pages = {"k_cache": pages["k"], "v_cache": pages["v"], "rotary_interleaved": True} | table
    used = {"leftpad_k": STARTS, "seqused_k": torch.tensor([5, 8], dtype=torch.int32), "return_softmax": True}
    dense_call, results = {"q": q, "k": k, "v": v, "return_softmax": True} | dropped, {}
    for kind, tensors in (("", dense_call), ("varlen_", rows | dropped)):
        out, lse, _, state = getattr(fa, f"_flash_attn_{kind}forward")(**tensors)
        results[kind] = {"dout": randn(*out.shape, seed=9), "out": out, "softmax_lse": lse, "rng_state": state}
        results[kind] |= {"deterministic": True} | {name: t for name, t in tensors.items() if name != "return_softmax"}
    return {
        "fwd": ("_flash_attn_forward", dense_call),
        "bwd": ("_flash_attn_backward", results[""]),
        "varlen_fwd": ("_flash_attn_varlen_forward", rows | dropped | used),
        "varlen_fwd, pages": ("_flash_attn_varlen_forward", rows | pages | dropped | table | {"return_softmax": True}),
        "varlen_bwd": ("_flash_attn_varlen_backward", results["varlen_"]),
        "fwd_kvcache": ("flash_attn_with_kvcache", cache | new),
        "fwd_kvcache, pages": ("flash_attn_with_kvcache", cache | in_pages),
    }


@pytest.fixture
def asked(monkeypatch):
    """What problems have of the options that change no value on a CPU, in the order in which they are made."""
    found = []
    for kind in (AttentionProblem, DecodeProblem):
        made = kind.of.__func__

        def of(cls, *arguments, made=made, **options):
            found.append({name: options.get(name) for name in ("deterministic", "num_splits")})
            return made(cls, *arguments, **options)

        monkeypatch.setattr(kind, "of", classmethod(of))
    return found


@pytest.mark.parametrize(
    "name", ["fwd", "bwd", "varlen_fwd", "varlen_fwd, pages", "varlen_bwd", "fwd_kvcache", "fwd_kvcache, pages"]
)
def test_functions_of_the_extension_module_pass_all_arguments_on(name, asked):
    """`flash_attn_gpu` has the functions of flash_attn_2_cuda, called by position."""
    target, given = extension_calls()[name]
    function = getattr(fa.flash_attn_gpu, name.partition(",")[0])
    parameters = [p.removesuffix("_") for p in inspect.signature(function).parameters]
    parameters = [OTHER_NAMES.get(p, "cache_leftpad" if p == "leftpad_k" and "kv" in name else p) for p in parameters]

    def copies():
        return {key: t.clone() if isinstance(t, torch.Tensor) else t for key, t in given.items()}

    def run(called, *arguments, **named):
        asked.clear()
        fast_path.forget()
        torch.manual_seed(3)
        return called(*arguments, **named), list(asked)

    def extension(arguments):
        arguments = {"zero_tensors": False, "num_splits": 0} | arguments
        return run(function, *(arguments.get(p) for p in parameters))

    for causal in (True, False):
        own, named = copies() | {"causal": causal}, copies() | {"causal": causal}
        found, problems = extension(own)
        if "kv" in name:
            sides = named.pop("window_size_left"), named.pop("window_size_right")
            named |= {"window_size": sides, "return_softmax_lse": True}
        buffers = {f"d{t}": torch.empty_like(given[t]) for t in "qkv"} if "bwd" in name else {}
        expected, expected_problems = run(getattr(fa, target), **named, **buffers)
        for a, b in zip(found, (*buffers.values(), expected) if buffers else expected, strict=True):
            assert torch.equal(a, b)
        assert problems == expected_problems
        for key in given.keys() & {"k_cache", "v_cache"}:
            assert torch.equal(own[key], named[key])

    for number, key in enumerate(("dq", "dk", "dv") if buffers else ("out",)):
        into = torch.empty_like(found[number])
        assert extension(copies() | {key: into})[0][number] is into
        assert torch.equal(into, found[number])
    for key in {"max_seqlen_q", "max_seqlen_k", "zero_tensors"} & set(parameters):
        with pytest.raises(TypeError, match=f"{key}: expected"):
            extension(copies() | {key: "7"})
    if "gen" in parameters:
        with pytest.raises(RuntimeError, match="`generator` argument is no longer supported"):
            extension(copies() | {"gen": torch.Generator()})


@pytest.mark.parametrize("name", ["fwd", "varlen_bwd", "fwd_kvcache"])
def test_functions_of_the_extension_module_refuse_missing_and_extra_arguments(name):
    function = getattr(fa.flash_attn_gpu, name)
    parameters = inspect.signature(function).parameters.values()
    least = sum(p.default is p.empty for p in parameters)
    for count in (least - 1, len(parameters) + 1):
        with pytest.raises(TypeError, match=f"^{name}: expected {least} to {len(parameters)} arguments, got {count}$"):
            function(*[None] * count)


def test_other_names_of_the_module():
    assert fa._wrapped_flash_attn_forward is fa._flash_attn_forward
    assert fa._wrapped_flash_attn_varlen_backward is fa._flash_attn_varlen_backward
    assert fa._get_block_size_n("cpu", 64, True, False) > 2**30
    assert fa.USE_TRITON_ROCM is False

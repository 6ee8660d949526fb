"""What a call says reaches each of its kernels under its name, whatever else a launch computes."""

from types import SimpleNamespace

import pytest
import torch
from test_decode_launch import OPTIONS, inputs_of

from onepass.kernels import arguments as kernel_arguments
from onepass.kernels.compiler import compile
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import (
    arguments,
    backward_sm80,
    backward_sm90,
    decode_sm80,
    decode_sm90,
    forward_sm80,
    forward_sm90,
)
from onepass.kernels.launch import decode as decode_launch
from onepass.problem import AttentionInputs, AttentionProblem, Mask
from onepass.problem.decode import FEW_QUERIES
from onepass.validation.decode import check_decode

INT32, BF16 = torch.int32, torch.bfloat16
NAMES = {
    "forward": kernel_arguments.ForwardSm90Arguments,
    "forward_sm80": kernel_arguments.ForwardSm80Arguments,
    "backward_preprocess": kernel_arguments.PreprocessArguments,
    "backward": kernel_arguments.BackwardSm90Arguments,
    "backward_sm80": kernel_arguments.BackwardSm80Arguments,
    "backward_postprocess": kernel_arguments.PostprocessArguments,
    "backward_sinks": kernel_arguments.SinkGradientsArguments,
    "decode": kernel_arguments.ForwardSm90Arguments,
    "decode_sm80": kernel_arguments.ForwardSm80Arguments,
    "append_to_cache": kernel_arguments.AppendArguments,
    "merge_splits": kernel_arguments.MergeArguments,
}


@pytest.fixture
def passed(monkeypatch):
    """The arguments of each kernel of a call, by their names."""
    found = {}

    def get(name, *_):
        return lambda *values: found.update({name: NAMES[name](*values)._asdict()})

    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=9))
    modules = forward_sm80, forward_sm90, backward_sm80, backward_sm90, append_launch, decode_sm80, decode_sm90
    for module in (*modules, decode_launch):
        if hasattr(module, "arch_of"):
            monkeypatch.setattr(module, "arch_of", lambda device: "sm_80")
        if hasattr(module, "tile_counter"):
            monkeypatch.setattr(module, "tile_counter", lambda device: torch.zeros(1, dtype=INT32))
        if hasattr(module, "zero_counters"):
            monkeypatch.setattr(module, "zero_counters", lambda purpose, device, count: torch.zeros(count, dtype=INT32))
    caches = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield found
    for cache in caches:
        cache.cache_clear()


def check(found, expected, is_absent=()):
    """Compare all arguments whose names the call knows."""
    for name in found.keys() & expected.keys():
        value, given = found[name], expected[name]
        if value is None and name in is_absent:
            continue
        if isinstance(given, torch.Tensor):
            assert value.is_contiguous() or value.dim() > 2, name
            assert torch.equal(value, given), name
        else:
            assert value == given, name


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(
    "modules", [(forward_sm90, backward_sm90), (forward_sm80, backward_sm80)], ids=["sm90", "sm80"]
)
def test_attention(passed, modules, is_packed, softcap):
    forward, backward = modules
    lead = (lambda n: (n,)) if is_packed else (lambda n: (2, n))
    q, dout = (torch.randn(*lead(40), 4, 64, dtype=BF16) for _ in range(2))
    k, v = (torch.randn(*lead(60), 2, 64, dtype=BF16) for _ in range(2))
    offsets_q, offsets_k, used = (torch.tensor(t, dtype=INT32) for t in ([0, 7, 40], [0, 60, 60], [33, 0]))
    every_other = (torch.stack((t, t), 1)[:, 0] for t in (offsets_q, offsets_k, used))
    given_q, given_k, given_used = every_other
    lengths = (given_q, given_k) if is_packed else (None, None)
    sinks = torch.randn(4, dtype=BF16)
    inputs = AttentionInputs(q, k, v, sinks, *lengths, given_used)
    options = {"softmax_scale": 0.3, "mask": Mask(9, 2), "softcap": softcap, "deterministic": True}
    problem = AttentionProblem.of(inputs, **options)
    scale_log2, tanh_scale = arguments.score_scales(problem)
    assert (tanh_scale is None) == (softcap is None)
    expected = {
        "q": q,
        "k": k,
        "v": v,
        "sinks": sinks.float(),
        "cu_seqlens_q": offsets_q if is_packed else None,
        "cu_seqlens_k": offsets_k if is_packed else None,
        "seqused_k": used,
        "softmax_scale": 0.3,
        "scale_log2": scale_log2,
        "tanh_scale": tanh_scale,
        "window_left": 9,
        "window_right": 2,
        "modifiers": None,
    }
    out, lse = forward.forward(problem, inputs)
    (of_forward,) = passed.values()
    assert of_forward["out"] is out
    assert of_forward["lse"] is lse
    check(of_forward, expected)
    passed.clear()
    out, lse = torch.randn_like(out), torch.randn_like(lse)
    dlse = torch.randn(*lse.mT.shape).mT
    dq, dk, dv, dsinks = backward.backward(problem, inputs, out, lse, dout, dlse)
    expected |= {"dout": dout, "out": out, "lse": lse, "dlse": dlse.contiguous()}
    for name, of_kernel in passed.items():
        # a main kernel has these only if it does what others do
        check(of_kernel, expected, ("out", "lse", "dlse") if name == "backward" else ())
        for result_name, result in (("dq", dq), ("dk", dk), ("dv", dv)):
            assert of_kernel.get(result_name) is None or of_kernel[result_name] is result
    assert dsinks.dtype == BF16
    main = passed.get("backward", passed.get("backward_sm80"))
    assert passed["backward_sinks"]["stats"] is main["stats"]
    for name in passed.keys() & {"backward_preprocess", "backward_postprocess"}:
        assert all(passed[name].get(t, main[t]) is main[t] for t in ("dq_accum", "stats"))
    assert len({kernel["blocks_per_head"] for kernel in passed.values()}) == 1
    drawn = 1 if backward is backward_sm80 else 0  # how many tiles have been drawn
    blocks = (1 if is_packed else 2) * 4 * main["blocks_per_head"]
    assert len(main["stats"]) == blocks
    assert (len(main["turns"]) - drawn) % blocks == 0


@pytest.mark.parametrize("narrow", [*arguments.VECTOR_BYTES, "q", "k", "v", "dout"])
def test_copies_are_as_wide_as_every_tensor_allows(monkeypatch, narrow):
    """Rows of one tensor that are 66 bytes apart, or of an out whose rows are as short as V's, decide for all."""
    keys = {}
    monkeypatch.setattr(compile, "get", lambda name, key, *_: keys.update({name: key}) or (lambda *passed: None))
    for cache in (forward_sm80.prepare, forward_sm80.kernel_of, backward_sm80.prepare, backward_sm80.launch_of):
        cache.cache_clear()
    monkeypatch.setattr(forward_sm80, "arch_of", lambda device: "sm_80")
    wide = 32 if isinstance(narrow, str) else narrow // 2
    sizes = {"q": 32, "k": 32, "v": wide, "dout": wide}
    rows = {n: torch.zeros(2, 5, 2, 33 if n == narrow else 40, dtype=BF16)[..., :size] for n, size in sizes.items()}
    dout = rows.pop("dout")
    inputs = AttentionInputs(**rows)
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
    out, lse = forward_sm80.forward(problem, inputs)
    backward_sm80.backward(problem, inputs, out, lse, dout, None)
    expected = 2 if isinstance(narrow, str) else narrow
    assert keys["forward_sm80"][1].vector_bytes == (16 if narrow == "dout" else expected)
    assert keys["backward_sm80"][1].vector_bytes == expected


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("module", [decode_sm80, decode_sm90], ids=["sm80", "sm90"])
def test_a_cache(passed, module, is_packed, num_splits):
    has_new = not is_packed  # packed queries come without new keys
    inputs = inputs_of(is_paged=True, has_new=has_new, has_sinks=True, is_packed=is_packed, room=64)
    filled = {
        name: torch.randn_like(t) if t.is_floating_point() else torch.randint_like(t, 0, 8)
        for name, t in zip(inputs._fields, inputs[:14], strict=False)
        if t is not None and name not in ("k_cache", "v_cache")
    }
    filled["page_table"] = filled["page_table"].mT.contiguous().mT  # kernels read its rows
    inputs = inputs._replace(**filled)
    if is_packed:
        inputs = inputs._replace(cu_seqlens_q=torch.tensor([0, 2, 6], dtype=INT32))
    options = OPTIONS | {"num_splits": num_splits, "softcap": 3.0, "softmax_scale": 0.3, "window": (9, 0)}
    problem = check_decode(inputs, **options, max_seqlen_q=FEW_QUERIES if is_packed else None)
    out, lse = module.decode(problem, inputs)
    main = passed["decode_sm80" if module is decode_sm80 else "decode"]
    scale_log2, tanh_scale = arguments.score_scales(problem.attention)
    is_split = num_splits > 1
    expected = {
        "q": inputs.q,
        "sinks": None if is_split else inputs.sinks.float(),
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": None,
        "seqused_k": inputs.cache_seqlens,
        "scale_log2": scale_log2,
        "tanh_scale": tanh_scale,
        "window_left": 9,
        "window_right": 0,
        "page_table": inputs.page_table,
        "added_k": 5 if has_new else 0,
        "num_splits": num_splits if is_split else None,
    }
    check(main, expected)
    assert all(main[name].data_ptr() == t.data_ptr() for name, t in (("k", inputs.k_cache), ("v", inputs.v_cache)))
    if is_split:
        merge = passed["merge_splits"]
        assert torch.equal(merge["sinks"], inputs.sinks.float())
        assert merge["cu_seqlens_q"] is inputs.cu_seqlens_q
        for name, result in (("out", out), ("lse", lse)):
            partials = merge[f"partial_{name}"]
            assert merge[name].data_ptr() == result.data_ptr()
            assert partials.data_ptr() == main[name].data_ptr()
            assert partials.shape == (3, *(result[None] if is_packed else result).shape)
            # each element has a place of its own
            places = torch.zeros(partials.numel(), dtype=INT32).as_strided(partials.shape, partials.stride())
            places += 1
            assert (places == 1).all()
            assert places.untyped_storage().nbytes() == partials.untyped_storage().nbytes()
    else:
        assert main["out"] is out
        assert main["lse"] is lse
    if has_new:
        expected = {name: getattr(inputs, name) for name in ("k_new", "v_new", "cache_seqlens", "page_table")}
        expected |= {"q": None, "cos": None, "sin": None, "seqlen_new": 5, "rows": 5, "num_blocks": 10}
        check(passed["append_to_cache"], expected)
        for name in ("k_cache", "v_cache"):
            assert passed["append_to_cache"][name].data_ptr() == getattr(inputs, name).data_ptr()

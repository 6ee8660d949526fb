"""Ranges of keys, ALiBi, bias and dropout in the Ampere kernels: their PTX runs on the CPU."""

from dataclasses import replace

import packages
import pytest
import sm80_forward
import torch
from test_backward_sm80_values import gradients_of
from test_forward_sm80_values import ARCH, Arguments, ptx_interpreter

from onepass import reference
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.testing.budget import compare, compare_gradients, compare_lse
from onepass.tiled import backward, forward

pytestmark = packages.needs_machine_code


TERMS = ("alibi_slopes", "bias")


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def options_of(names: set, rows: int, keys: int, heads: int) -> dict:
    low = torch.arange(rows).view(1, 1, rows, 1) // 40 * 40
    bias = normal(1, heads, rows, keys, dtype=torch.bfloat16)
    bias[torch.rand(bias.shape, generator=torch.Generator().manual_seed(1)) < 0.2] = -torch.inf
    everything = {
        "causal": True,
        "softcap": 10.0,
        "seqstart_k": torch.tensor([0, 30], dtype=torch.int32),
        "key_ranges": torch.cat([low, low + 60], -1).int().expand(1, 1, -1, -1),
        "q_positions": torch.arange(rows).flip(0).view(1, rows).int() + 3,
        "alibi_slopes": torch.tensor([0.1, 0.02]),
        "bias": bias if "q_positions" not in names else bias[:, :, :1],
        "dropout_p": 0.3,
    }
    found = {name: value for name, value in everything.items() if name in names}
    if "dropout_p" in found:
        found["dropout_state"] = torch.tensor([-(2**62) - 12345678901, 2**35 + 77])
    return found


def posed(names: set, rows: int, keys: int):
    """A problem with these options, its inputs, and the options."""
    q, k, v = (normal(2, n, h, 64, dtype=torch.bfloat16) for n, h in ((rows, 2), (keys, 1), (keys, 1)))
    options = options_of(names, rows, keys, 2)
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(*(options.get(n) for n in Modifiers._fields)))
    problem = AttentionProblem.of(
        inputs,
        softmax_scale=0.125,
        mask=Mask.from_options("causal" in names, None),
        softcap=options.get("softcap"),
        deterministic="deterministic" in names,
        dropout_p=options.get("dropout_p", 0.0),
    )
    return problem, inputs, options


NAMES = [
    {"key_ranges", "alibi_slopes", "dropout_p"},
    {"bias", "causal", "softcap"},
    {"seqstart_k", "q_positions", "alibi_slopes", "bias", "dropout_p", "causal"},
]


def cases(all_names: list) -> list:
    return [pytest.param(names, id=" ".join(sorted(names))) for names in all_names]


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("names", cases(NAMES))
def test_forward(names):
    problem, inputs, options = posed(names, 90, 130)
    config = heuristics_sm80.forward_config_sm80(problem, ARCH)
    arguments = Arguments(problem, inputs, config)
    ptx_interpreter.run(
        sm80_forward.compiled(problem, config, ARCH).program,
        arguments.values,
        arguments.memory,
        arguments.num_tiles,
        config.num_threads,
        config.smem_bytes(problem),
    )
    results = zip((arguments.out, arguments.lse), launch.empty_outputs(problem, inputs), strict=True)
    out, lse = (arguments.result(address, like) for address, like in results)
    oracle, in_torch = (
        reference.attention(*inputs[:3], compute_dtype=t, **options) for t in (torch.float64, problem.dtype)
    )
    found = compare("out", out, oracle.out, in_torch.out), compare_lse(lse, oracle.lse)
    assert all(row.ok for row in found), "\n".join(map(str, found))


@pytest.mark.slow
def test_dropout_of_some_heads_of_a_call():
    """A kernel whose q has heads 3 and 4 of 7 drops the pairs that these heads have in the whole call."""
    problem, inputs, _ = posed({"dropout_p"}, 40, 50)
    problem = replace(problem, first_head=3, all_heads=7)
    dout = normal(*inputs.q.shape, dtype=torch.bfloat16)
    out, lse = forward(problem, inputs)
    found = gradients_of(problem, inputs, out, lse, dout, None)[:3]
    for actual, right, other in zip(
        found,
        backward(problem, inputs, out, lse, dout, None),
        backward(replace(problem, first_head=2), inputs, out, lse, dout, None),
        strict=False,
    ):
        # half of the distance between what the bits of neighboring heads give
        assert (actual - right).abs().max() < 0.05 * (other - right).abs().max()


def oracle_gradients(inputs, options, dout, dtype) -> dict:
    given = dict(zip("qkv", inputs, strict=False)) | {n: options[n] for n in TERMS if n in options}
    leaves = {n: x.to(dtype, copy=True).requires_grad_() for n, x in given.items()}
    named = options | {n: x for n, x in leaves.items() if n in TERMS}
    out = reference.attention(*(leaves[n] for n in "qkv"), compute_dtype=dtype, **named).out
    found = torch.autograd.grad(out, list(leaves.values()), dout.to(dtype), materialize_grads=True, allow_unused=True)
    return {n: x.nan_to_num(nan=0.0) for n, x in zip(leaves, found, strict=True)}


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("names", cases([*NAMES[:2], NAMES[2] | {"deterministic"}]))
def test_gradients(names):
    problem, inputs, options = posed(names, 70, 90)
    dout = normal(*inputs.q.shape, dtype=torch.bfloat16)
    out, lse = forward(problem, inputs)
    dq, dk, dv, _, dslopes, dbias = gradients_of(problem, inputs, out, lse, dout, None)
    found = {"q": dq, "k": dk, "v": dv, "alibi_slopes": dslopes, "bias": dbias}
    oracle, in_torch = (oracle_gradients(inputs, options, dout, t) for t in (torch.float64, torch.bfloat16))
    # one rounding of out, of which delta is made, is left where a row sees a single key
    one = torch.finfo(torch.bfloat16).eps * float(dout.abs().max() * inputs.v.abs().max())
    for name, right in oracle.items():
        # sums over many scores, whose gradients add up to 0 in each row
        floor = 0.02 * float(right.abs().max()) + one if name in TERMS else 4 * one
        error = compare_gradients(name, found[name], right, in_torch[name].to(found[name].dtype), floor)
        assert error.error <= error.budget, str(error)
        assert name in TERMS or error.ok, str(error)


@pytest.mark.slow
def test_gradients_of_a_block_in_between_that_sees_none_of_the_keys():
    """Queries 0 to 63 and 128 to 191 see the first tile of keys, and the block between them sees the other one."""
    rows, keys = 192, 128
    low = torch.arange(rows, dtype=torch.int32) // 64 % 2 * 64
    options = {"key_ranges": torch.stack([low, low + 64], -1)[None, None]}
    q, k, v = (normal(1, n, h, 64, dtype=torch.bfloat16) for n, h in ((rows, 2), (keys, 1), (keys, 1)))
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(key_ranges=options["key_ranges"]))
    problem = AttentionProblem.of(inputs, softmax_scale=0.125, mask=Mask(), softcap=None, deterministic=False)
    dout = normal(*q.shape, dtype=torch.bfloat16)
    out, lse = forward(problem, inputs)
    found = gradients_of(problem, inputs, out, lse, dout, None)[:3]
    oracle, in_torch = (oracle_gradients(inputs, options, dout, t) for t in (torch.float64, torch.bfloat16))
    for (name, right), gradient in zip(oracle.items(), found, strict=True):
        error = compare_gradients(name, gradient, right, in_torch[name].to(gradient.dtype), 0.0)
        assert error.ok, str(error)


@pytest.mark.slow
def test_a_packed_bias_with_too_few_columns_is_not_left():
    """The host does not know the lengths. Keys without a column have the bias of the last one, and give it nothing."""
    rows, keys, columns = 40, 50, 30
    q, k, v = (normal(n, h, 64, dtype=torch.bfloat16) for n, h in ((rows, 2), (keys, 1), (keys, 1)))
    bias = normal(2, rows, columns, dtype=torch.bfloat16)
    lengths = [torch.tensor([0, n], dtype=torch.int32) for n in (rows, keys)]
    inputs = AttentionInputs(q, k, v, None, *lengths, None, Modifiers(bias=bias))
    problem = AttentionProblem.of(inputs, softmax_scale=0.125, mask=Mask(), softcap=None, deterministic=False)
    padded = torch.cat((bias, bias[..., -1:].expand(-1, -1, keys - columns)), -1)
    whole = inputs._replace(modifiers=Modifiers(bias=padded))
    dout = normal(*q.shape, dtype=torch.bfloat16)
    out, lse = forward(problem, whole)
    config = heuristics_sm80.forward_config_sm80(problem, ARCH)
    arguments = Arguments(problem, inputs, config)
    program = sm80_forward.compiled(problem, config, ARCH).program
    sizes = arguments.num_tiles, config.num_threads, config.smem_bytes(problem)
    ptx_interpreter.run(program, arguments.values, arguments.memory, *sizes)
    torch.testing.assert_close(arguments.result(arguments.out, out), out, rtol=2e-2, atol=2e-2)
    *found, _, _, dbias = gradients_of(problem, inputs, out, lse, dout, None)
    *wanted, _, _, wanted_dbias = gradients_of(problem, whole, out, lse, dout, None)
    for gradient, right in zip((*found, dbias), (*wanted, wanted_dbias[..., :columns]), strict=True):
        torch.testing.assert_close(gradient, right)

"""NaN and infinity in keys that a bias, left padding or a window hides: the PTX of the Ampere kernels, on the CPU."""

import packages
import ptx_interpreter
import pytest
import sm80_forward
import torch
from test_backward_sm80_values import gradients_of
from test_forward_sm80_values import ARCH, Arguments

from onepass import reference
from onepass.kernels.heuristics import sm80 as heuristics_sm80
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.testing.budget import compare, compare_gradients, compare_lse
from onepass.tiled import forward

pytestmark = packages.needs_machine_code

ROWS, KEYS = 40, 90
STARTS = torch.tensor([0, 70], dtype=torch.int32)


def posed():
    """Entry 1 begins at key 70: its first 20 queries stand before it. The bias hides keys 11, 40 and 80, and pairs."""
    q, k, v = (torch.randn(2, n, h, 64).bfloat16() for n, h in ((ROWS, 2), (KEYS, 1), (KEYS, 1)))
    bias = torch.randn(1, 2, ROWS, KEYS).bfloat16()
    bias[torch.rand(bias.shape) < 0.2] = -torch.inf
    hidden = torch.tensor([11, 40, 80])
    bias[..., hidden] = -torch.inf
    options = {"seqstart_k": STARTS, "bias": bias}
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(**options))
    problem = AttentionProblem.of(inputs, softmax_scale=0.125, mask=Mask(), softcap=None, deterministic=False)
    return problem, inputs, options, hidden


def computed(problem, inputs):
    config = heuristics_sm80.forward_config_sm80(problem, ARCH)
    arguments = Arguments(problem, inputs, config)
    program = sm80_forward.compiled(problem, config, ARCH).program
    sizes = arguments.num_tiles, config.num_threads, config.smem_bytes(problem)
    ptx_interpreter.run(program, arguments.values, arguments.memory, *sizes)
    results = zip((arguments.out, arguments.lse), launch.empty_outputs(problem, inputs), strict=True)
    return tuple(arguments.result(address, like) for address, like in results)


def oracle(inputs, options, dtype, dout=None):
    leaves = [t.to(dtype, copy=True).requires_grad_() for t in inputs[:3]]
    out, lse = reference.attention(*leaves, compute_dtype=dtype, **options)
    return (out, lse) if dout is None else torch.autograd.grad(out, leaves, dout.to(dtype))


def with_hidden_values(inputs, hidden):
    """The keys that nobody sees as NaN, +inf and -inf."""
    wild = [t.clone() for t in inputs[1:3]]
    for t in wild:
        t[1, :70] = torch.nan
        for key, value in zip(hidden, (torch.nan, torch.inf, -torch.inf), strict=True):
            t[:, key] = value
    return inputs._replace(k=wild[0], v=wild[1])


def test_what_a_bias_or_left_padding_hides():
    """Left padding without a causal mask."""
    problem, inputs, options, hidden = posed()
    exact, in_torch = (oracle(inputs, options, t) for t in (torch.float64, torch.bfloat16))
    assert exact[1][1, :, :20].isneginf().all()
    out, lse = computed(problem, with_hidden_values(inputs, hidden))
    found = compare("out", out, exact[0], in_torch[0]), compare_lse(lse, exact[1])
    assert all(row.ok for row in found), "\n".join(map(str, found))


@pytest.mark.slow
def test_gradients_beside_what_a_bias_or_left_padding_hides():
    problem, inputs, options, hidden = posed()
    out, lse = forward(problem, inputs)
    dout = torch.randn(out.shape).bfloat16()
    exact, in_torch = (oracle(inputs, options, t, dout) for t in (torch.float64, torch.bfloat16))
    one = 4 * torch.finfo(torch.bfloat16).eps * float(dout.abs().max() * inputs.v.abs().max())
    gradients = gradients_of(problem, with_hidden_values(inputs, hidden), out, lse, dout, None)[:3]
    for name, gradient, *right in zip("qkv", gradients, exact, in_torch, strict=True):
        row = compare_gradients(name, gradient, right[0], right[1].to(gradient.dtype), one)
        assert row.ok, str(row)
    for gradient in gradients[1:]:
        assert not gradient[:, hidden].any()
        assert not gradient[1, :70].any()


def test_gradients_of_a_window():
    """Both sides hide keys of every query but the first and last ones, and the first key is NaN where none sees it."""
    q, k, v = (torch.randn(1, n, h, 64).bfloat16() for n, h in ((100, 2), (150, 1), (150, 1)))
    options = {"window": (20, 7)}  # query i stands at key i + 50, so that keys 0 to 29 are seen by none
    inputs = AttentionInputs(q, k, v)
    problem = AttentionProblem.of(inputs, softmax_scale=0.125, mask=Mask(20, 7), softcap=None, deterministic=False)
    out, lse = forward(problem, inputs)
    dout = torch.randn(out.shape).bfloat16()
    exact, in_torch = (oracle(inputs, options, t, dout) for t in (torch.float64, torch.bfloat16))
    dirty = inputs._replace(k=k.clone(), v=v.clone())
    for t in dirty[1:3]:
        t[:, 29] = torch.nan
    gradients = gradients_of(problem, dirty, out, lse, dout, None)[:3]
    for name, gradient, *right in zip("qkv", gradients, exact, in_torch, strict=True):
        row = compare_gradients(name, gradient, right[0], right[1].to(gradient.dtype), 0.0)
        assert row.ok, str(row)
    for gradient in gradients[1:]:
        assert not gradient[:, :30].any()
        assert gradient[:, 30].any()

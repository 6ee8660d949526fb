"""The reverse mode of torch.func: `grad`, `vjp` and `jacrev` agree with `backward()`; other transforms raise."""

import pytest
import torch
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vjp

import onepass
from onepass.ops import attention as ops

INT32 = torch.int32
CU_SEQLENS = torch.tensor([0, 2, 5], dtype=INT32)


def attention(q, k, v, sinks):
    return onepass.attention(q, k, v, causal=True, window=(3, None), softcap=2.0, sinks=sinks, return_lse=True)


def attention_varlen(q, k, v, sinks):
    packed = {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS}
    return onepass.attention_varlen(q[0], k[0], v[0], **packed, causal=True, sinks=sinks, return_lse=True)


def attention_fp8(q, k, v, sinks):
    tensors = (t.to(torch.float32) for t in (q, k, v))
    return onepass.attention(*tensors, causal=True, sinks=sinks.float(), return_lse=True, precision="fp8")


def merged(q, k, v, sinks):
    partials = [
        onepass.attention(q, k[:, keys], v[:, keys], sinks=s, return_lse=True)
        for keys, s in ((slice(0, 2), sinks), (slice(2, 5), None))
    ]
    return onepass.merge_partials([partial.out for partial in partials], [partial.lse for partial in partials])


FUNCTIONS = [attention, attention_varlen, attention_fp8, merged]


def leaves(batch=1, seqlen=5):
    generator = torch.Generator().manual_seed(7)
    shapes = [(batch, seqlen, heads, 8) for heads in (4, 2, 2)] + [(4,)]
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)


def loss_of(function):
    def loss(*tensors):
        out, lse = function(*tensors)
        weights = torch.arange(out.shape[-1], dtype=out.dtype, device=out.device)
        return (out * weights).square().sum() + lse.sin().sum()

    return loss


def by_backward(function, tensors):
    tensors = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(loss_of(function)(*tensors), tensors)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_grad_is_that_backward_gradients(function):
    tensors = leaves()
    gradients = grad(loss_of(function), argnums=(0, 1, 2, 3))(*tensors)
    for result, expected in zip(gradients, by_backward(function, tensors), strict=True):
        assert torch.equal(result, expected)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_vjp_of_both_outputs_is_that_backward_gradients(function):
    tensors = leaves()
    (out, lse), pull_back = vjp(function, *tensors)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    recorded = [t.clone().requires_grad_() for t in tensors]
    expected = function(*recorded)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    backward_gradients = torch.autograd.grad(expected, recorded, (dout, dlse))
    for result, input_gradient in zip(pull_back(onepass.AttentionOutput(dout, dlse)), backward_gradients, strict=True):
        assert torch.equal(result, input_gradient)


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("function", [attention, attention_varlen, merged])
def test_jacrev_row_by_row_is_the_jacobian_of_differences(function):
    tensors = leaves(seqlen=5)
    for argument in range(4):

        def attention_of_one(x, argument=argument):
            return function(*tensors[:argument], x, *tensors[argument + 1 :])[0]

        x, step = tensors[argument], 1e-6
        jacobian = jacrev(attention_of_one, chunk_size=1)(x).flatten(-x.dim())
        for i in range(0, x.numel(), 7):
            shift = torch.zeros_like(x)
            shift.view(-1)[i] = step
            difference = (attention_of_one(x + shift) - attention_of_one(x - shift)) / (2 * step)
            torch.testing.assert_close(jacobian[..., i], difference, rtol=1e-6, atol=1e-8)


def test_auxiliary_outputs_and_values_come_along():
    tensors = leaves()

    def with_aux(*tensors):
        return loss_of(attention)(*tensors), attention(*tensors).out

    gradients, (value, out) = grad_and_value(with_aux, argnums=(0, 1, 2, 3), has_aux=True)(*tensors)
    assert torch.equal(value, loss_of(attention)(*tensors))
    assert torch.equal(out, attention(*tensors).out)
    for result, expected in zip(gradients, by_backward(attention, tensors), strict=True):
        assert torch.equal(result, expected)


def test_one_call_of_torch_func_runs_the_forward_once(monkeypatch):
    calls = []
    forward_on = ops.forward_on
    monkeypatch.setattr(ops, "forward_on", lambda *args: calls.append(args) or forward_on(*args))
    grad(loss_of(attention))(*leaves())
    assert len(calls) == 1


def test_parameters_outside_of_torch_func_keep_their_gradients():
    """A level of torch.func inside `backward()`: each level has its own derivatives."""
    tensors = [t.requires_grad_() for t in leaves()]
    out, pull_back = vjp(lambda q: attention(q, *tensors[1:]).out, tensors[0])
    expected = [t.detach().clone().requires_grad_() for t in tensors]
    expected_out = attention(*expected).out
    results = torch.autograd.grad(out.square().sum(), tensors)
    for result, input_gradient in zip(results, torch.autograd.grad(expected_out.square().sum(), expected), strict=True):
        assert torch.equal(result, input_gradient)
    assert torch.isfinite(pull_back(torch.ones_like(out))[0]).all()


def test_levels_of_torch_func_nest():
    q, k, v, sinks = leaves()
    loss = loss_of(attention)

    def inner(v):
        value, q_gradient = vjp(lambda q: loss(q, k, v, sinks), q)
        return value, q_gradient(torch.ones_like(value))[0]

    (value, q_gradient), pull_back = vjp(inner, v)
    assert torch.equal(q_gradient, by_backward(attention, (q, k, v, sinks))[0])
    with pytest.raises(NotImplementedError, match="no second derivative"):
        pull_back((torch.zeros_like(value), torch.ones_like(q_gradient)))
    (v_gradient,) = vjp(lambda v: vjp(lambda q: loss(q, k, v, sinks), q)[0], v)[1](torch.ones_like(value))
    assert torch.equal(v_gradient, by_backward(attention, (q, k, v, sinks))[2])


def test_a_module_through_functional_call():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(8, 24, dtype=torch.float64)

        def forward(self, x):
            return onepass.attention(*self.project(x).unflatten(-1, (3, 1, 8)).unbind(-3), causal=True)

    layer, x = Layer(), torch.randn(2, 6, 8, dtype=torch.float64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}
    gradients = grad(lambda p: functional_call(layer, p, (x,)).square().sum())(parameters)
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
def test_torch_compile_traces_torch_func(compiler):
    torch._dynamo.reset()
    tensors = leaves()
    function = grad(loss_of(attention), argnums=(0, 1, 2, 3))
    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for result, expected in zip(compiled(*tensors), function(*tensors), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("function", [attention, attention_fp8])
def test_second_and_forward_mode_derivatives_are_refused_at_every_level(function):
    q, *others = leaves()

    def loss(q):
        return loss_of(function)(q, *others)

    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad(lambda q: grad(loss)(q).sum())(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        jvp(grad(loss), (q,), (q,))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        hessian(loss)(q)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            torch.ops.onepass.attention_forward(dual, *others[:2], *[None] * 4, 0.3, *[None] * 3, False, "tiled", None)


FORWARD_MODE = {
    "attention": (onepass.attention, ("q", "k", "v", "sinks")),
    "modifiers": (onepass.attention, ("q", "k", "v", "sinks", "alibi_slopes", "bias")),
    "decode": (onepass.attention_decode, ("q", "k_cache", "v_cache", "sinks", "alibi_slopes", "bias")),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_no_tensor_has_a_derivative_in_forward_mode(name):
    function, names = FORWARD_MODE[name]
    sizes = {"q": (1, 3, 2, 8), "sinks": (2,), "alibi_slopes": (2,), "bias": (1, 1, 3, 5)}
    given = {key: torch.ones(sizes.get(key, (1, 5, 2, 8))) for key in names}
    lengths = {"cache_seqlens": torch.tensor([5], dtype=torch.int32)} if name == "decode" else {}
    function(**given, **lengths)
    for key, t in given.items():
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(t, torch.ones_like(t))
            with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
                function(**given | {key: dual}, **lengths)


def test_vmap_is_refused_and_the_message_names_the_way_round():
    q, *others = leaves()
    with pytest.raises(NotImplementedError, match=r"cannot run under torch\.vmap.*jacrev.*chunk_size=1"):
        jacrev(lambda q: attention(q, *others).out)(q)

"""Memory accesses of the Hopper kernels: any strides, nothing outside of their tensors, and all of their outputs."""

import importlib
import math
import sys

import pytest
import torch
from compile_ahead import problem_of
from gpu_cases import (
    BACKEND,
    BF16,
    DEVICE,
    FP16,
    NAN,
    ON_GPU,
    GpuCall,
    bits,
    case,
    cases,
    check,
    needs_hopper,
    poisoned_memory,
)
from gradient_cases import Loss, check_gradients, gradients, hard_gradients, inputs_of, loss_of, with_inputs

import onepass
from onepass.bench.memory import peak_of
from onepass.dispatch import attention as dispatch
from onepass.problem.outputs import empty_gradients, empty_outputs

pytestmark = needs_hopper

FENCE = 1024  # elements on both sides
POISON = {2: 0x7FA5, 4: 0x7FA5A5A5}  # a NaN that no arithmetic makes, in fp16, bf16 and float32

SHAPES = [
    case(200, 300, batch=2, heads=(4, 2), head_dim=128, causal=True),
    case(129, 65, batch=2, heads=(2, 1), head_dim=40, head_dim_v=72, dtype=FP16, sinks=True),
    case(1, 1, head_dim=256),
    case(1, 300, batch=3, heads=(1, 1), head_dim=64),
    case(300, 1, heads=(3, 1), head_dim=96, causal=True),
    case(200, 300, batch=2, head_dim=64, used=(133, 0)),
    case((1, 0, 130, 77), (5, 20, 0, 300), heads=(4, 2), head_dim=128, causal=True, slack=3),
]


def strides_of(shape, order=None, stride_of_ones=None):
    """Dense strides of dimensions in `order`, outermost first; a length of 1 has stride `stride_of_ones`, if given."""
    strides, step = [0] * len(shape), 1
    for i in reversed(order or range(len(shape))):
        is_one = shape[i] == 1 and i != len(shape) - 1
        strides[i] = stride_of_ones if is_one and stride_of_ones is not None else step
        step *= max(1, shape[i])
    return strides


class FencedMemory:
    """Tensors inside larger buffers of POISON, which must not change."""

    def __init__(self):
        self.buffers = []

    def empty(self, shape, dtype, order=None, stride_of_ones=None) -> torch.Tensor:
        """A tensor filled with POISON, with the strides of `strides_of`."""
        count = 1
        for n in shape:
            count *= n
        kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        buffer = torch.full((count + 2 * FENCE,), POISON[dtype.itemsize], dtype=kind, device=DEVICE)
        self.buffers.append((buffer, count))
        return buffer.view(dtype).as_strided(shape, strides_of(shape, order, stride_of_ones), FENCE)

    def copy_of(self, t: torch.Tensor, order=None) -> torch.Tensor:
        """Copy t, with an odd stride where a length is 1: no code may multiply with that stride or pass it to TMA."""
        return self.empty(tuple(t.shape), t.dtype, order, stride_of_ones=7).copy_(t)

    def assert_untouched(self):
        for buffer, count in self.buffers:
            poison = POISON[buffer.element_size()]
            assert (buffer[:FENCE] == poison).all(), "written before the start of a tensor"
            assert (buffer[FENCE + count :] == poison).all(), "written past the end of a tensor"


def module_of_backend():
    return importlib.import_module(
        {"sm90": "onepass.kernels.launch.forward_sm90", "tiled": "onepass.tiled.forward"}[BACKEND]
    )


@cases(SHAPES)
@pytest.mark.parametrize("heads_first", [False, True])
def test_nothing_is_read_or_written_beside_the_tensors(case, heads_first, monkeypatch):
    """Inputs and outputs lie between fences of NaN; lengths of 1 have odd strides; inputs keep their bits."""
    call, memory = case.call(), FencedMemory()
    rank = call.tensors["q"].dim()
    order = {3: (1, 0, 2), 4: (0, 2, 1, 3)}[rank] if heads_first else None
    call.tensors = {n: memory.copy_of(t, order) for n, t in call.tensors.items()}
    # lengths stay as they are: in int32, poison would be read as a length
    call.options = {n: memory.copy_of(o) if n == "sinks" else o for n, o in call.options.items()}
    before = {n: bits(t).clone() for n, t in call.tensors.items()}
    outputs = []

    def fenced_outputs(problem, inputs):
        for t in empty_outputs(problem, inputs):
            is_out = t.dtype == inputs.q.dtype
            outputs.append(memory.empty(tuple(t.shape), t.dtype, order if is_out else None))
        return tuple(outputs[-2:])

    monkeypatch.setattr(module_of_backend(), "empty_outputs", fenced_outputs)
    # GpuCall.run would write NaN to the inputs, but this test compares the fences and the inputs' own bits
    function = onepass.attention_varlen if call.is_packed else onepass.attention
    out, lse = function(**call.tensors, **call.options, return_lse=True, backend=BACKEND)
    memory.assert_untouched()
    for n, t in call.tensors.items():
        assert torch.equal(bits(t), before[n]), f"{n} was modified"
    assert out.data_ptr() == outputs[0].data_ptr(), "the outputs under test are not those between the fences"
    for t in (out, lse):
        assert not t.isnan().any(), "not every element is written"
    monkeypatch.undo()
    check(call)


@cases([case(200, 300, head_dim=128), case((3, 20), (7, 9), head_dim=64)])
def test_memory_is_poisoned_in_every_check(case):
    """Outputs hold NaN before the kernel runs, which GpuCall relies on."""
    call = case.call()
    seen = []
    module, original = module_of_backend(), module_of_backend().empty_outputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            module, "empty_outputs", lambda *a: seen.append([t.clone() for t in original(*a)]) or original(*a)
        )
        call.run()
    assert all(t.isnan().all() for t in seen[0])


def replace_empty_gradients(patch, call, function):
    """Replace empty_gradients in every module that imports it by name, whichever computes the call's gradients."""
    dispatch.load_backward(BACKEND, problem_of(call))  # or the first gradient may be what imports the backend's module
    for name, module in list(sys.modules.items()):
        if name.startswith("onepass.") and getattr(module, "empty_gradients", None) is empty_gradients:
            patch.setattr(module, "empty_gradients", function)


@cases(SHAPES)
@pytest.mark.parametrize("heads_first", [False, True])
def test_the_backward_reads_and_writes_nothing_beside_its_tensors(case, heads_first, monkeypatch):
    call, memory = case.call(), FencedMemory()
    order = {3: (1, 0, 2), 4: (0, 2, 1, 3)}[call.tensors["q"].dim()] if heads_first else None
    inputs = {n: memory.copy_of(t, order if t.dim() > 1 else None) for n, t in inputs_of(call).items()}
    dout, dlse = loss_of(call)
    loss = Loss(memory.copy_of(dout, order), memory.copy_of(dlse))
    before = {n: bits(t).clone() for n, t in {**inputs, **loss._asdict()}.items()}
    made = []

    def fenced_gradients(inputs, dkv_dtype=None):
        made.append([memory.empty(tuple(t.shape), t.dtype, order if t.dim() > 1 else None) for t in inputs[:3]])
        if inputs.sinks is not None:
            made[-1].append(memory.empty(tuple(inputs.sinks.shape), inputs.sinks.dtype))
        return *made[-1], *[inputs.q.new_empty(0)] * (inputs.sinks is None)

    replace_empty_gradients(monkeypatch, call, fenced_gradients)
    actual = gradients(with_inputs(call, inputs), loss)
    memory.assert_untouched()
    for n, t in {**inputs, **loss._asdict()}.items():
        assert torch.equal(bits(t), before[n]), f"{n} was modified"
    addresses = [t.data_ptr() for t in made[-1]]
    assert [g.data_ptr() for g in actual.values()] == addresses, "gradients under test are not those between the fences"
    for g in actual.values():
        assert not g.isnan().any(), "not every element is written"
    monkeypatch.undo()
    check_gradients(GpuCall({n: inputs[n] for n in "qkv"}, call.options), loss=loss)


@cases([case(200, 300, head_dim=128, sinks=True), case((3, 20), (7, 9), head_dim=64)])
def test_memory_is_poisoned_in_every_check_of_gradients(case, monkeypatch):
    """Gradients hold NaN before the kernels run, which check_gradients relies on."""
    call, seen = case.call(), []
    replace_empty_gradients(
        monkeypatch,
        call,
        lambda *a: seen.append([t.clone() for t in empty_gradients(*a)]) or empty_gradients(*a),
    )
    hard_gradients(call, loss_of(call))
    assert seen
    assert all(t.isnan().all() for t in seen[0])


LONG = 16384
MIB = 2**20


@pytest.mark.skipif(not ON_GPU, reason="tests the kernels; the tiled backend keeps more in float32")
@pytest.mark.parametrize("deterministic", [False, True])
@cases(
    [
        case(LONG, LONG, heads=(4, 4), head_dim=64, causal=True),
        case(LONG, LONG, heads=(8, 2), head_dim=128, causal=True),
        case(LONG, LONG, heads=(4, 1), head_dim=256, dtype=FP16),
        case(LONG, LONG, heads=(2, 2), head_dim=128, window=(500, 0), sinks=True),
        case((1, 5000, 0, 11383), (1, 5000, 0, 11383), heads=(4, 2), head_dim=128, causal=True),
    ]
)
def test_the_backward_needs_no_more_than_dq_in_float32(case, deterministic):
    """Beside the gradients, memory holds a float32 sum for dq and three numbers per row, and nothing of seqlen^2."""
    call = case.call()
    loss, leaves = loss_of(call), {n: t.detach().requires_grad_() for n, t in inputs_of(call).items()}
    outputs = with_inputs(call, leaves).run(deterministic=deterministic)

    def backward():
        return torch.autograd.grad(outputs, list(leaves.values()), loss, retain_graph=True)

    backward()  # compiles, and allocates whatever is allocated once
    found, peak = peak_of(backward, DEVICE)
    results = sum(t.numel() * t.element_size() for t in found)
    q, lse = call.tensors["q"], outputs.lse
    # each sequence is padded to whole tiles of up to 192 rows
    padding = 192 * (len(case.seqlen_q) if call.is_packed else 1) / q.shape[-3]
    allowed = math.ceil(4 * (q.numel() + 3 * lse.numel()) * (1 + padding)) + MIB
    assert peak.extra_bytes - results <= allowed, f"{(peak.extra_bytes - results) / MIB:.1f} of {allowed / MIB:.1f} MiB"


@cases(SHAPES)
def test_recycled_memory(case):
    """NaN in the blocks that the allocator hands out next, without torch's deterministic mode, does no harm."""
    call = case.call()
    users_call = onepass.testing.Call(call.tensors, call.options)
    first = users_call.run()
    for _ in range(3):
        old = [torch.full_like(t, NAN) for t in first for _ in range(4)]
        del old
        again = users_call.run()
        for a, b in zip(first, again, strict=True):
            assert torch.equal(bits(a), bits(b))


# ---------------------------------------------------------------- strides


def heads_first(t):
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def column_slice(t):
    """Place t in columns of a wider matrix of NaN; the tile of the kernel is wider than most head dims too."""
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 16), NAN, device=t.device, dtype=t.dtype)
    wide[..., 8:-8] = t
    return wide[..., 8:-8]


def every_other_row(t):
    wide = torch.full((t.shape[0], 2 * t.shape[1], *t.shape[2:]), NAN, device=t.device, dtype=t.dtype)
    wide[:, ::2] = t
    return wide[:, ::2]


def batch_innermost(t):
    return t.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)


def unaligned(t):
    """Copy t to an address that is not a multiple of 16 bytes; its rows are multiples of 16 bytes long."""
    flat = torch.full((t.numel() + 3,), NAN, device=t.device, dtype=t.dtype)
    flat[3:] = t.flatten()
    return flat[3:].view(t.shape)


def odd_rows(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 1), NAN, device=t.device, dtype=t.dtype)
    wide[..., :-1] = t
    return wide[..., :-1]


def last_not_unit(t):
    return t.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS = [heads_first, column_slice, every_other_row, batch_innermost, unaligned, odd_rows, last_not_unit]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@cases(
    [
        case(200, 300, batch=2, heads=(4, 2), head_dim=128, causal=True),
        case(130, 170, batch=2, heads=(4, 2), head_dim=40, head_dim_v=72, dtype=FP16),
        case(200, 300, batch=2, heads=(4, 2), head_dim=256, used=(133, 300)),
    ]
)
def test_layouts(case, layout):
    """Results have equal bits in any layout, with one tensor at a time in that layout and with all of them in it."""
    call = case.call()
    expected = call.run()
    for names in ("q", "k", "v", "qkv"):
        tensors = {n: layout(t) if n in names else t for n, t in call.tensors.items()}
        moved = GpuCall(tensors, call.options)
        check(moved)
        out, lse = moved.run()
        assert torch.equal(out, expected.out)
        assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("dims", [(0,), (1,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_expanded_inputs(dims):
    """With stride 0, one batch entry, one token or one head stands for all."""
    shape, small = [2, 150, 4, 128], [2, 150, 4, 128]
    for dim in dims:
        small[dim] = 1
    q, k, v = (torch.randn(small, device=DEVICE, dtype=BF16).expand(shape) for _ in range(3))
    call = GpuCall({"q": q, "k": k, "v": v}, {"causal": True})
    check(call)


def test_interleaved_projection():
    qkv = torch.randn(2, 300, 3, 4, 128, device=DEVICE, dtype=BF16)
    q, k, v = qkv.unbind(2)
    check(GpuCall({"q": q, "k": k, "v": v}, {"causal": True}))


def test_one_tensor_is_q_k_and_v():
    t = torch.randn(2, 300, 4, 64, device=DEVICE, dtype=FP16)
    check(GpuCall({"q": t, "k": t, "v": t}, {}))


def test_results_lie_as_q_does():
    t = torch.randn(2, 30, 4, 64, device=DEVICE, dtype=BF16)
    with poisoned_memory():
        assert onepass.attention(t, t, t).is_contiguous()
        assert onepass.attention(heads_first(t), t, t).transpose(1, 2).is_contiguous()


@cases([case(100, 100, heads=(4, 4), sinks=True), case(100, 100, heads=(4, 2), head_dim=256, sinks=True)])
def test_sinks_of_any_dtype_and_stride(case):
    call = case.call()
    wide = torch.full((4, 3), NAN, device=DEVICE)
    wide[:, 1] = call.options["sinks"]
    for sinks in (wide[:, 1], wide[:, 1].to(BF16), wide[:, 1].double(), wide[:1, 1].expand(4)):
        call.options["sinks"] = sinks
        check(call)

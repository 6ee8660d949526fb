"""Two pretended GPUs of different architectures in one machine: a call runs the kernels for the GPU of its tensors,
whichever GPU is the current one."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import onepass
from onepass import ForwardConfigSm80
from onepass.api import fast_path
from onepass.dispatch import backends
from onepass.kernels.arguments import ForwardSm90Arguments
from onepass.kernels.heuristics import tuned
from onepass.kernels.launch import forward_sm80 as launch_sm80
from onepass.kernels.launch import forward_sm90 as launch_sm90
from onepass.ops import attention as attention_ops
from onepass.ops import decode as decode_ops
from onepass.ops import partials as partials_ops
from onepass.problem import AttentionInputs, AttentionProblem, Mask

BF16, INT32 = torch.bfloat16, torch.int32
CAPABILITIES = {0: (9, 0), 1: (8, 6), 2: (7, 5)}
BACKENDS = {0: "sm90", 1: "sm80", 2: "tiled"}


@pytest.fixture(params=[0, 1, 2], ids="current {}".format)
def gpus(request, monkeypatch):
    """GPUs of these capabilities; each of them is the current one in one test."""

    def index_of(device=None):
        index = device.index if isinstance(device, torch.device) else device
        return request.param if index is None else index

    def properties(device=None):
        major, minor = CAPABILITIES[index_of(device)]
        return SimpleNamespace(major=major, minor=minor, multi_processor_count=100 + index_of(device))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITIES[index_of(device)])
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setattr(tuned, "_name_of", "GPU {}".format)
    fast_path.forget()
    with FakeTensorMode():
        yield
    fast_path.forget()


def qkv(index, dtype=BF16, dims=(2, 40)):
    return tuple(torch.zeros(*dims, heads, 64, dtype=dtype, device=f"cuda:{index}") for heads in (4, 2, 2))


def cache_call(index, cache_dtype=BF16, seqlen_q=1):
    q = torch.zeros(2, seqlen_q, 4, 64, dtype=BF16, device=f"cuda:{index}")
    k, v = (torch.zeros(2, 512, 2, 64, dtype=cache_dtype, device=f"cuda:{index}") for _ in range(2))
    lengths = torch.zeros(2, dtype=INT32, device=f"cuda:{index}")
    return {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths}


@pytest.fixture
def chosen(monkeypatch):
    """The backends that the operators received."""
    names = []
    for module, function in ((attention_ops, "options_of"), (decode_ops, "run")):
        real = getattr(module, function)

        def noted(problem, second, third=None, real=real):
            names.append(second if isinstance(second, str) else third)
            return real(problem, second, third)

        monkeypatch.setattr(module, function, noted)
    return names


@pytest.mark.parametrize("index", CAPABILITIES)
def test_a_call_runs_on_the_kernels_of_its_tensors_gpu(gpus, chosen, index):
    name = BACKENDS[index]
    q, k, v = qkv(index)
    onepass.attention(q, k, v)
    offsets = torch.zeros(3, dtype=INT32, device=q.device)
    packed = tuple(t.flatten(0, 1) for t in (q, k, v))
    onepass.attention_varlen(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets)
    assert chosen == [name] * 2
    onepass.attention(q, k, v, precision="fp8")
    assert chosen[2:] == [name]  # the backend of its gradients
    onepass.attention_decode(**cache_call(index))
    few_rows = "sm80" if index == 0 else name
    assert chosen[3:] == [few_rows]
    onepass.attention_decode(**cache_call(index, seqlen_q=100))
    assert chosen[4:] == [name]


@pytest.mark.parametrize("index", CAPABILITIES)
def test_what_supports_says_is_of_the_tensors_gpu(gpus, index):
    q, k, v = qkv(index)
    assert onepass.supports(q, k, v).backend == BACKENDS[index]
    for name, least in (("sm90", (9, 0)), ("sm80", (8, 0))):
        support = onepass.supports(q, k, v, backend=name)
        assert support.ok == (CAPABILITIES[index] >= least)
        assert support.ok or f"got {CAPABILITIES[index]}" in support.reason
    # the shared memory that a configuration has to fit into: 227 KiB on sm_90, 99 on sm_86
    large = ForwardConfigSm80(tile_m=128, tile_n=128, num_stages=4, num_warps=8)
    if index < 2:
        support = onepass.supports(q, k, v, backend="sm80", tuning=large)
        assert support.ok == (index == 0), support.reason
    quantized = onepass.QuantizedQKV(*(t.to(torch.float8_e4m3fn) for t in qkv(index)), *[q.new_ones(()).float()] * 3)
    assert onepass.supports(quantized).backend == ("sm90" if index == 0 else "tiled")
    decode = cache_call(index, cache_dtype=torch.float8_e4m3fn)
    support = onepass.supports(**{"q": decode.pop("q"), "k": None, "v": None} | decode, backend="sm80")
    assert (support.ok, "8.9" in support.reason) == (index == 0, index == 1)


@pytest.mark.parametrize("index", CAPABILITIES)
def test_whether_parts_are_merged_by_a_kernel(gpus, index):
    outs = qkv(index)[:1] * 2
    lses = [torch.zeros(2, 4, 40, device=f"cuda:{index}")] * 2
    assert partials_ops.merges_in_one_kernel(outs, lses) == (index < 2)
    assert not partials_ops.merges_in_one_kernel([t.double() for t in outs], lses)


def test_a_capture_is_looked_for_on_the_tensors_gpu(gpus, monkeypatch):
    """A captured launch has its own tile counter; a captured stream of another GPU makes no difference.

    A launch that needs more counters than are kept gets as many as it needs.
    """
    current, capturing = [torch.cuda.current_device()], [None]

    class on_device:
        def __init__(self, index):
            self.index = index

        def __enter__(self):
            self.before, current[0] = current[0], self.index

        def __exit__(self, *_):
            current[0] = self.before

    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current[0] == capturing[0])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(launch_sm90, "_counters", {})
    kept = [launch_sm90.tile_counter(index) for index in (0, 1)]
    for count in (3, 7, 5):
        assert launch_sm90.zero_counters("backward", 0, count).numel() >= count
    capturing[0] = 1
    assert launch_sm90.tile_counter(0) is kept[0]
    assert launch_sm90.tile_counter(1) is not kept[1]
    assert [launch_sm90.tile_counter(index).device.index for index in (0, 1)] == [0, 1]


def test_what_a_call_prepares_is_for_its_tensors_gpu(gpus, monkeypatch):
    """The call uses the architecture, size and tuned configurations of that GPU; kernels' keys hold no device index."""
    requests, names = [], []
    monkeypatch.setattr(launch_sm90.compile, "get", lambda *request: requests.append(request))
    real = tuned.refined

    def refined(usual, direction, backend, problem, arch, device=None):
        names.append(tuned.gpu_name(device))
        return real(usual, direction, backend, problem, arch, device)

    monkeypatch.setattr(tuned, "refined", refined)
    prepared = {}
    for index, module in ((0, launch_sm90), (1, launch_sm80)):
        module.prepare.cache_clear()
        inputs = AttentionInputs(*qkv(index))
        problem = AttentionProblem.of(inputs, softmax_scale=1.0, mask=Mask(), softcap=None, deterministic=False)
        prepared[index] = module.prepare(problem, inputs.q.device)
        module.prepare.cache_clear()
    assert names == ["GPU 0", "GPU 1"]
    assert [request[2] for request in requests] == ["sm_90a"]
    assert prepared[1].arch == "sm_86"
    assert ForwardSm90Arguments(*prepared[0].in_order(*qkv(0), None, None)).num_ctas <= 100
    assert "cuda:" not in repr(requests[0][1])

"""`onepass.warmup`: the kernels that it compiles for a call, and what it refuses. The compiler is a recorder."""

import threading

import pytest
import torch

import onepass
from onepass import ForwardConfigSm90
from onepass.api import calls
from onepass.dispatch import backends
from onepass.kernels.compiler import compile, pool
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.heuristics import chooser
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import float32_halves as halves_launch
from onepass.problem import AttentionProblem, Mask

CALL = {"q": (2, 4096, 32, 128), "k": (2, 4096, 8, 128), "v": (2, 4096, 8, 128), "dtype": torch.bfloat16}
META = {n: torch.empty(CALL[n], dtype=torch.bfloat16, device="meta") for n in "qkv"}
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 2, 4096, 4096, 32, 8, 128, 128, 0.1, Mask(None, 0))


@pytest.fixture
def compiled(monkeypatch):
    """A list of the requested kernels, as (name, key, arch), in a process with a compiler."""
    asked = []

    def get(name, key, arch, trace):
        if (name, key, arch) not in asked:
            asked.append((name, key, arch))
        return print

    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(compile, "is_cached", lambda *request: request in asked)
    return asked


def test_calls_in_every_form_need_the_same_kernel(compiled):
    made = onepass.warmup([CALL | {"causal": True}, META | {"causal": True}, PROBLEM], backend="sm90", workers=1)
    assert len(made) == len(compiled) == 1
    name, key, arch = compiled[0]
    assert (name, arch) == ("forward", "sm_90a")
    assert key == (PROBLEM.static(), heuristics.forward_config_sm90(PROBLEM))
    assert made[0].problem.mask == PROBLEM.mask
    assert (made[0].name, made[0].backend, made[0].config, made[0].was_cached) == ("forward", "sm90", key[1], False)
    assert made[0].seconds < 1
    assert [kernel.was_cached for kernel in onepass.warmup([PROBLEM], backend="sm90")] == [True]


def test_one_call_by_keyword_arguments(compiled):
    """The calling style of attention and supports; a call by itself is the same one in a list."""
    made = onepass.warmup(**CALL, causal=True, backend="sm90", workers=1, gradients=False)
    again = onepass.warmup([CALL | {"causal": True}], backend="sm90")
    assert [kernel.problem for kernel in made] == [kernel.problem for kernel in again]
    for arguments, error in ((CALL, "got neither"), ({"calls": [CALL], **CALL}, "got both: q, k, v, dtype")):
        given = {} if error == "got neither" else arguments
        for function in (onepass.warmup, onepass.tune):
            with pytest.raises(TypeError, match=f"{function.__name__}: expected calls, .*, {error}"):
                function(**given)


def test_one_kernel_each_in_the_order_of_the_calls(compiled):
    config = ForwardConfigSm90(tile_n=96)
    calls = [CALL, CALL | {"sinks": (32,)}, CALL | {"tuning": config}, CALL, CALL | {"causal": True, "window": (9, 0)}]
    made = onepass.warmup(calls, backend="sm90", workers=1)
    assert [key for _, key, _ in compiled] == [(kernel.problem.static(), kernel.config) for kernel in made]
    assert [kernel.problem.has_sinks for kernel in made] == [False, True, False, False]
    assert made[2].config == config
    assert made[3].problem.mask == Mask(9, 0)


def test_gradients_need_kernels_of_their_own(compiled):
    calls = [CALL, CALL | {"causal": True, "tuning": ForwardConfigSm90(tile_n=96)}]
    made = onepass.warmup(calls, backend="sm90", workers=1, gradients=True)
    assert [(kernel.name, kernel.problem.mask) for kernel in made] == [
        ("forward", Mask()),
        ("backward_preprocess", Mask()),
        ("backward", Mask()),
        ("backward_postprocess", Mask()),
        ("forward", Mask(None, 0)),
        ("backward", Mask(None, 0)),
    ]
    assert [(name, arch) for name, _, arch in compiled] == [(kernel.name, "sm_90a") for kernel in made]
    assert made[4].config == ForwardConfigSm90(tile_n=96)
    for kernel, (name, key, _) in zip(made, compiled, strict=True):
        if name == "backward":
            assert key == (kernel.problem.static(), kernel.config, False)
        if name != "forward":
            assert kernel.config == heuristics.backward_config_sm90(kernel.problem)
    assert all(kernel.was_cached for kernel in onepass.warmup(calls, backend="sm90", gradients=True))


@pytest.mark.parametrize(
    ("call", "kernel", "others"),
    [(CALL, "backward_preprocess", 2), (CALL | {"causal": True}, "backward", 0)],  # in three kernels, and in one
)
def test_a_gradient_of_lse_needs_lse(compiled, call, kernel, others):
    def has_dlse(call):
        compiled.clear()
        onepass.warmup([call], backend="sm90", workers=1, gradients=True)
        return [key[-1] for name, key, _ in compiled if name == kernel]

    assert has_dlse(call) == has_dlse(call | {"return_lse": False}) == [False]
    assert has_dlse(call | {"return_lse": True}) == [False, True]
    assert len(compiled) == 3 + others


def test_gradients_of_fp8_calls_are_those_of_the_16_bit_tensors(compiled):
    fp8, plain = (
        onepass.warmup([c], backend="sm90", workers=1, gradients=True) for c in (CALL | {"precision": "fp8"}, CALL)
    )
    assert fp8[0].problem.quantization.exact_lse
    assert plain[1:] == [kernel._replace(was_cached=True) for kernel in fp8[1:]]


@pytest.mark.parametrize("name", ["alibi_slopes", "bias"])
def test_terms_that_require_a_gradient_have_one(compiled, name):
    """The forward does not depend on it: it has one kernel."""
    shape = {"alibi_slopes": (32,), "bias": (1, 1, 1, 4096)}[name]
    calls = [META | {name: torch.zeros(shape, device="meta", requires_grad=needs_one)} for needs_one in (False, True)]
    onepass.warmup(calls, backend="sm90", workers=1, gradients=True)
    keys = {
        kernel: [dict(key[0]) for found, key, _ in compiled if found == kernel] for kernel in ("forward", "backward")
    }
    assert len(keys["forward"]) == 1
    flags = [(key["constant_slopes"], key["constant_bias"]) for key in keys["backward"]]
    assert flags == [(name == "alibi_slopes", name == "bias"), (False, False)]


def test_a_problem_does_not_say_whether_lse_is_returned(compiled):
    onepass.warmup([PROBLEM], backend="sm90", workers=1, gradients=True)
    assert [key[-1] for name, key, _ in compiled if name == "backward"] == [False, True]


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (BackwardConfigSm90(), ["backward_preprocess", "backward", "backward_postprocess"]),
        (BackwardConfigSm90(private_dq=True, background_rows=False), ["backward_preprocess", "backward"]),
        (BackwardConfigSm90(private_dq=True), ["backward"]),
    ],
)
def test_the_kernels_of_a_backward(compiled, monkeypatch, config, names):
    monkeypatch.setitem(chooser.BACKWARD, "sm90", chooser.Chooser(BackwardConfigSm90, lambda problem, arch: config))
    made = onepass.warmup([CALL], backend="sm90", workers=1, gradients=True)
    assert [kernel.name for kernel in made] == ["forward", *names]
    assert {kernel.config for kernel in made[1:]} == {config}


def test_a_backward_with_intervals_needs_lists_of_blocks(compiled):
    """Head counts and lengths, and what makes no difference to intervals, do not ask for another kernel."""
    ranges = CALL | {"key_ranges": (2, 1, CALL["q"][1], 2)}
    names = ["backward_preprocess", "block_lists", "backward", "backward_postprocess"]
    made = onepass.warmup([ranges], backend="sm90", workers=1, gradients=True)
    assert [kernel.name for kernel in made][1:] == names
    made = onepass.warmup([ranges, ranges | {"softcap": 3.0}], backend="sm90", workers=1, gradients=True)
    assert [kernel.name for kernel in made].count("block_lists") == 1
    made = onepass.warmup([ranges, ranges | {"causal": True}], backend="sm90", workers=1, gradients=True)
    assert [kernel.name for kernel in made].count("block_lists") == 2


HALVES = "split_rows"


def test_float32_on_hopper_needs_kernels_for_its_parts(compiled):
    """All kernels that a call needs are compiled; q and k share one, unless the call has seqused_k."""
    float32 = CALL | {"dtype": torch.float32}
    calls = [float32, float32 | {"causal": True}, float32 | {"v": (2, 4096, 8, 64), "seqused_k": (2,)}]
    made = onepass.warmup(calls, backend="sm90", workers=1)
    assert [kernel.name for kernel in made] == ["forward", HALVES, HALVES, "forward", "forward", HALVES, HALVES]
    assert {kernel.config for kernel in made if kernel.name == HALVES} == {None}
    assert all((kernel.backend, kernel.problem.dtype) == ("sm90", torch.float32) for kernel in made)
    halves_launch.kernel_of.cache_clear()
    asked = list(compiled)
    q, k, v = (torch.empty(2, 5, 1, d) for d in (128, 128, 64))
    halves_launch.split(q, k, v, 1, seqused_k=torch.tensor([1, 5], dtype=torch.int32))
    halves_launch.split(q, k, k, 1)
    halves_launch.kernel_of.cache_clear()
    assert compiled == asked
    gradients = onepass.warmup([float32], backend="sm90", workers=1, gradients=True)[3:]
    assert [kernel.name for kernel in gradients] == ["backward_preprocess", "backward_sm80", "backward_postprocess"]
    assert {kernel.backend for kernel in gradients} == {"sm80"}
    assert {arch for _, _, arch in compiled} == {"sm_90a"}


def test_a_backward_of_another_backend_needs_no_kernels(compiled):
    many = dict.fromkeys("qkv", (65536, 64, 1, 64)) | {"dtype": torch.float16}
    made = onepass.warmup([many], backend="sm90", gradients=True)
    assert [kernel.name for kernel in made] == ["forward"]
    assert onepass.warmup([CALL], backend="tiled", gradients=True) == []


class Colleague:
    """A stand-in for a process that compiles. It reports that a kernel takes 10 seconds, or why it fails.

    Its first kernel is not done before this process has begun one.
    """

    def __init__(self, this_process, failure=None):
        self.this_process, self.failure, self.names, self.has_begun = this_process, failure, [], threading.Event()

    def compile(self, request):
        self.names.append(request[0])
        self.has_begun.set()
        assert self.this_process.wait(10)
        return pool.Outcome(10.0, self.failure)

    def kill(self):
        pass

    def close(self):
        pass


@pytest.fixture
def colleagues(compiled, monkeypatch):
    """A list of the processes that are started. This process compiles nothing before each of them has begun one."""
    made, this_process = [], threading.Event()

    def make(failure=None):
        made.append(Colleague(this_process, failure))
        return made[-1]

    get = compile.get

    def wait_and_get(*request):
        this_process.set()
        assert all(one.has_begun.wait(10) for one in made)
        return get(*request)

    monkeypatch.setattr(compile, "get", wait_and_get)
    monkeypatch.setattr(compile, "has_disk_cache", lambda: True)
    monkeypatch.setattr(pool, "WorkerProcess", make)
    return made


CALLS = [CALL | {"q": (1, 64, 4, d), "k": (1, 64, 4, d), "v": (1, 64, 4, d)} for d in (64, 96, 128, 192, 256)]


def test_work_is_shared(colleagues, compiled):
    """This process is one of the workers, and loads the kernels that the others have compiled."""
    made = onepass.warmup(CALLS, backend="sm90", workers=2)
    (colleague,) = colleagues
    assert 1 <= len(colleague.names) < 5
    assert [kernel.problem.head_dim for kernel in made] == [64, 96, 128, 192, 256]
    assert [kernel.seconds for kernel in made].count(10.0) == len(colleague.names)
    assert not any(kernel.was_cached for kernel in made)
    assert len(compiled) == 5  # all of them are in this process now
    # nothing is left to share
    assert all(kernel.was_cached for kernel in onepass.warmup(CALLS, backend="sm90", workers=2))
    assert len(colleagues) == 1


def test_there_are_no_more_processes_than_kernels(colleagues):
    onepass.warmup(CALLS[:3], backend="sm90", workers=9)
    assert len(colleagues) == 2
    assert all(len(one.names) == 1 for one in colleagues)


def test_without_a_disk_cache_there_is_one_process(compiled, monkeypatch):
    monkeypatch.setattr(compile, "has_disk_cache", lambda: False)
    monkeypatch.setattr(pool, "WorkerProcess", None)
    assert len(onepass.warmup([CALL, CALL | {"causal": True}], backend="sm90", workers=2)) == 2


def test_a_worker_that_fails_says_why_and_the_others_go_on(colleagues, compiled, monkeypatch):
    make = pool.WorkerProcess
    monkeypatch.setattr(pool, "WorkerProcess", lambda: make("exit status 3: out of registers"))
    with pytest.raises(RuntimeError, match=r"(?s)\d of 5 kernels do not compile:.*exit status 3.*out of registers"):
        onepass.warmup(CALLS, backend="sm90", workers=2)
    assert len(colleagues[0].names) + len(compiled) == 5


def test_this_process_alone_raises_the_compilers_own_error(compiled, monkeypatch):
    def fail(*request):
        raise ArithmeticError("out of registers")

    monkeypatch.setattr(compile, "get", fail)
    with pytest.raises(ArithmeticError, match="out of registers"):
        onepass.warmup(CALLS, backend="sm90", workers=1)


def test_calls_that_need_no_kernel(compiled):
    tensors = {n: torch.empty(1, 4, 2, 8) for n in "qkv"}
    packed = dict.fromkeys("qkv", (9, 2, 64)) | {"cu_seqlens_q": (3,), "cu_seqlens_k": (3,), "dtype": torch.float32}
    assert onepass.warmup([]) == []
    assert onepass.warmup([tensors, CALL | {"backend": "tiled"}, packed | {"backend": "tiled"}]) == []
    if not torch.cuda.is_available():
        assert onepass.warmup([CALL, packed]) == []
    assert onepass.warmup([META], backend="tiled") == []
    for heads_kv in (0, 2):
        shapes = {"q": (2, 9, 0, 64), "k": (2, 9, heads_kv, 64), "v": (2, 9, heads_kv, 64), "dtype": torch.bfloat16}
        assert onepass.warmup([shapes], backend="sm90", gradients=True) == []
    assert compiled == []


REFUSED = [
    ({"k": (2, 4096, 8, 64)}, ValueError, "k: expected head_dim 128 like q, got 64"),
    ({"causal": 1}, TypeError, "causal: expected a bool, got 1"),
    ({"dropout": 0.1}, TypeError, "warmup: attention has no argument dropout"),
    ({"dtype": None}, TypeError, r"dtype: expected a torch.dtype with the shape \(2, 4096, 32, 128\) of q, got None"),
    ({"dtype": torch.float64}, NotImplementedError, "backend sm90: dtype: expected bfloat16, float16 or float32, got"),
    (
        {"tuning": ForwardConfigSm90(tile_n=100)},
        NotImplementedError,
        "tuning: tile_n: expected 1 x 16, .*, got 100",
    ),
    ({"tuning": 128}, TypeError, "tuning: expected a ForwardConfigSm90, a ForwardConfigSm80 or None, got 128"),
    ({"backend": "sm91"}, ValueError, "backend: expected one of .* or None, got 'sm91'"),
]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_a_bad_call_is_refused_before_anything_is_compiled(compiled, changes, error, message, gradients):
    with pytest.raises(error, match=message):
        onepass.warmup([CALL, CALL | changes], backend="sm90", workers=1, gradients=gradients)
    assert compiled == []


def test_bad_arguments(compiled):
    for given in "qkv":
        missing = ", ".join(name for name in "qkv" if name != given)
        with pytest.raises(TypeError, match=f"warmup: expected q, k and v in every call, got none for {missing}$"):
            onepass.warmup([{given: CALL[given]}])
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        onepass.warmup([], workers=0)
    for workers in (1.5, True):
        with pytest.raises(TypeError, match=f"workers: expected an int of at least 1 or None, got {workers}"):
            onepass.warmup([], workers=workers)
    for gradients in (1, None):
        with pytest.raises(TypeError, match=f"gradients: expected a bool, got {gradients}"):
            onepass.warmup([CALL], backend="sm90", gradients=gradients)
    assert compiled == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to choose for")
def test_a_gpu_that_is_not_there(compiled):
    with pytest.raises(NotImplementedError, match="backend: expected a name, such as 'sm90', where there is no GPU"):
        onepass.warmup([PROBLEM])


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", False)
    with pytest.raises(NotImplementedError, match="the kernel compiler is not installed: pip install '"):
        onepass.warmup([CALL], backend="sm90")
    # on a machine whose GPU could run it, and not only if it is requested by name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, dtype, name in (
        ((9, 0), "float16", "sm90"),
        ((9, 0), "float32", "sm90"),
        ((8, 9), "float32", "sm80"),
        ((8, 0), "float16", "sm80"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        with pytest.raises(NotImplementedError, match=f"backend {name}: the kernel compiler is not installed: pip"):
            onepass.warmup([CALL | {"dtype": getattr(torch, dtype)}])
    assert onepass.warmup([CALL | {"dtype": torch.float64}]) == []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert onepass.warmup([CALL]) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to compile for")
def test_ampere_kernels_are_for_the_gpu_that_is_there(compiled):
    with pytest.raises(NotImplementedError, match="backend sm80: expected a GPU, whose architecture to compile for"):
        onepass.warmup([CALL], backend="sm80")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (torch.ones(2), r"calls: expected the arguments of calls by name, got tensor"),
        ("abc", "calls: expected the arguments of calls by name, got 'abc'"),
        (3, "calls: expected the arguments of calls by name, got 3"),
        ([CALL, 3], r"calls\[1\]: expected the arguments of a call by name, or an AttentionProblem, got int 3"),
        (["a"], r"calls\[0\]: expected the arguments of a call by name, or an AttentionProblem, got str 'a'"),
    ],
)
def test_what_is_no_call_is_refused(compiled, given, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        onepass.warmup(given)
    assert compiled == []


def test_problems_of_calls_by_shapes():
    shapes = {"q": (1, 6, 4, 16), "k": (1, 6, 2, 16), "v": (1, 6, 2, 16)}

    def problem_of(gradients=False, **options):
        return calls.problem_of_call("warmup", shapes | options, "sm90", gradients)[0]

    wide = problem_of(dtype=torch.float64, alibi_slopes=(4,), bias=(1, 4, 6, 6), sinks=(4,))
    assert (wide.has_alibi, wide.bias_dtype, wide.has_sinks) == (True, torch.float64, True)
    for returns_lse in (False, True):
        for gradients in (False, True):
            found = problem_of(gradients, dtype=torch.bfloat16, precision="fp8", return_lse=returns_lse)
            assert found.quantization.exact_lse == (returns_lse or gradients)


def test_supports_asks_what_a_call_would_be():
    q, sinks = torch.ones(1, 6, 4, 16), torch.zeros(4)
    given = {"q": q, "k": q.bfloat16(), "v": q.bfloat16()}
    assert not onepass.supports(**given).ok
    with torch.autocast("cpu", torch.bfloat16):
        assert onepass.supports(**given).ok
    wrong = onepass.supports(q, q, q[:, :3], backend="tiled")
    assert (wrong.ok, wrong.backend) == (False, "tiled")
    offsets = torch.tensor([0, 6], dtype=torch.int32)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        other = {"cu_seqlens_q": "cu_seqlens_k", "cu_seqlens_k": "cu_seqlens_q"}[name]
        reason = onepass.supports(q[0], q[0], q[0], **{name: offsets}).reason
        assert reason == f"{other}: expected an int32 torch.Tensor, got NoneType"
    for leaf in ("q", "k", "v", "sinks"):
        tensors = {"q": q, "k": q, "v": q, "sinks": sinks}
        tensors[leaf] = tensors[leaf].clone().requires_grad_()
        rest = {"precision": "fp8", "sinks": tensors.pop("sinks")}
        assert calls._problem_of(*tensors.values(), rest).quantization.exact_lse
        with torch.no_grad():
            assert not calls._problem_of(*tensors.values(), rest).quantization.exact_lse

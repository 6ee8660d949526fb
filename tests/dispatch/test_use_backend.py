"""The backend of calls that name none: `use_backend`, as a call and around a block, and ONEPASS_BACKEND."""

import asyncio
import functools
import os
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import onepass
from onepass import use_backend
from onepass.api import fast_path
from onepass.compat import flash_attn, sdpa
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends, choice, decode, fp8, partials
from onepass.tiled import decode as tiled_decode

BF16, INT32 = torch.bfloat16, torch.int32
Q = torch.randn(1, 6, 2, 8, dtype=BF16)
CACHE = {"k_cache": Q, "v_cache": Q, "cache_seqlens": torch.tensor([6], dtype=INT32)}
OFFSETS = {"cu_seqlens_q": torch.tensor([0, 6], dtype=INT32), "cu_seqlens_k": torch.tensor([0, 6], dtype=INT32)}
CALLS = {
    "attention": lambda **o: onepass.attention(Q, Q, Q, **o),
    "attention_varlen": lambda **o: onepass.attention_varlen(Q[0], Q[0], Q[0], **OFFSETS, **o),
    "attention_decode": lambda **o: onepass.attention_decode(Q, **CACHE, **o),
    "fp8": lambda **o: onepass.attention(Q, Q, Q, precision="fp8", **o),
    "QuantizedQKV": lambda **o: onepass.attention(onepass.quantize_fp8(Q, Q, Q), **o),
}
OTHER_SIGNATURES = {
    "flash_attn_func": lambda: flash_attn.flash_attn_func(Q, Q, Q),
    "flash_attn_with_kvcache": lambda: flash_attn.flash_attn_with_kvcache(Q, Q, Q, cache_seqlens=6),
    "sdpa": lambda: sdpa.scaled_dot_product_attention(*[Q.transpose(1, 2)] * 3),
}
SUPPORTS = {
    "attention": lambda **o: onepass.supports(Q, Q, Q, **o),
    "attention_varlen": lambda **o: onepass.supports(Q[0], Q[0], Q[0], **OFFSETS, **o),
    "attention_decode": lambda **o: onepass.supports(Q, **CACHE, **o),
    "fp8": lambda **o: onepass.supports(Q, Q, Q, precision="fp8", **o),
}


@pytest.fixture(autouse=True)
def _nothing_chosen():
    torch._dynamo.reset()
    before = choice.current()
    use_backend(None)
    fast_path.forget()
    yield
    use_backend(before)
    fast_path.forget()


@pytest.fixture
def ran(monkeypatch):
    """The backends that ran, in order; tiled computes in place of each of them."""
    names = []
    monkeypatch.setattr(backends, "refusal", lambda name, problem, device: None)
    monkeypatch.setattr(decode, "_unsupported", lambda name, problem, is_named, device: None)
    real_prepare, real_backward = dispatch.prepare, dispatch.load_backward

    def noted(name, real):
        def run(*arguments):
            names.append(name)
            return real(*arguments)

        return run

    def prepare(name, problem, device, tuning=None):
        return noted(name, real_prepare("tiled", problem, device))

    def prepare_decode(name, problem, device):
        return noted(name, functools.partial(tiled_decode.decode, problem))

    def load_decode(name, device):
        return noted(name, tiled_decode.decode)

    def load_backward(name, problem):
        names.append(f"backward of {name}")
        return real_backward("tiled", problem)

    for module, functions in ((dispatch, (prepare, load_backward)), (decode, (prepare_decode, load_decode))):
        for function in functions:
            monkeypatch.setattr(module, function.__name__, function)
    return names


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("is_repeated", [False, True])
def test_what_a_call_runs_on(ran, function, is_repeated):
    """The call itself decides first, then the innermost block, then the process; a repeated call looks again."""
    call = CALLS[function]

    def backend(**options):
        ran.clear()
        for _ in range(1 + is_repeated):
            call(**options)
        assert len(set(ran)) == 1
        return ran[-1]

    assert backend() == "sm90"
    use_backend("tiled")
    assert backend() == "tiled"
    assert backend(backend="sm80") == "sm80"
    with use_backend("sm80"):
        assert backend() == "sm80"
        with use_backend(None):
            assert backend() == "sm90"
        use_backend("sm90")  # this chooses for the process, not for this block
        assert backend() == "sm80"
        assert backend(backend="tiled") == "tiled"
    assert backend() == "sm90"
    use_backend("sm80")
    use_backend(None)
    assert backend() == "sm90"


@pytest.mark.parametrize("function", OTHER_SIGNATURES)
def test_what_other_signatures_run_on(ran, function):
    for name in ("sm80", "tiled", "sm90"):
        use_backend(name)
        ran.clear()
        OTHER_SIGNATURES[function]()
        assert ran == [name]


@pytest.mark.parametrize("function", SUPPORTS)
def test_what_supports_says(function):
    supports = SUPPORTS[function]
    at_best = "tiled" if function == "fp8" else "cpu"
    assert supports().backend == at_best
    with use_backend("sm80"):
        support = supports()
        assert (support.ok, support.backend) == (False, "sm80")
        expected = "backend sm80 (by use_backend or ONEPASS_BACKEND): expected tensors on cuda, got cpu"
        assert support.reason == expected
        with pytest.raises(onepass.UnsupportedError) as refused:
            CALLS[function]()
        assert str(refused.value) == expected
        assert supports(backend="tiled").ok
    assert supports().backend == at_best


def test_a_tuning_is_of_the_chosen_backend(ran):
    with use_backend("tiled"), pytest.raises(onepass.UnsupportedError, match="tuning: backend tiled takes none"):
        onepass.attention(Q, Q, Q, tuning=onepass.ForwardConfigSm80())


def test_gradients_follow_their_forward(ran):
    leaf = Q.clone().requires_grad_()
    with use_backend("sm80"):
        out = onepass.attention(leaf, Q, Q)
    out.sum().backward()
    assert ran == ["sm80", "backward of sm80"]


def test_tiled_is_all_of_torch(monkeypatch):
    """With tiled, no kernel merges or quantizes, either."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)

    class OnGpu:
        device = torch.device("cuda:0")

    assert partials.has_merge_kernel(OnGpu.device)
    assert fp8._has_e4m3_kernels(OnGpu())
    with use_backend("tiled"):
        assert not partials.has_merge_kernel(OnGpu.device)
        assert not fp8._has_e4m3_kernels(OnGpu())


# ---------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "error", "given"),
    [
        ("sm70", ValueError, "'sm70'"),
        ("", ValueError, "''"),
        ([], TypeError, "list"),
        (7, TypeError, "int"),
        (torch.zeros(2), TypeError, "Tensor"),
        ({"sm80": 1}, TypeError, "dict"),
    ],
    ids=str,
)
def test_no_backend_has_this_name(name, error, given):
    message = f"expected one of cpu, sm80, sm90, tiled or None, got {given}"
    with pytest.raises(error, match=f"^use_backend: {message}$"):
        use_backend(name)
    assert choice.current() is None
    for call in CALLS.values():
        for _ in range(2):
            with pytest.raises(error, match=f"^backend: {message}$"):
                call(backend=name)
    for supports in SUPPORTS.values():
        support = supports(backend=name)
        assert (support.ok, support.reason) == (False, f"backend: {message}")
    shapes = {"q": (1, 6, 2, 8), "k": (1, 6, 2, 8), "v": (1, 6, 2, 8), "dtype": BF16}
    decode = {"q": (1, 1, 2, 8), "k_cache": (1, 9, 2, 8), "v_cache": (1, 9, 2, 8), "cache_seqlens": (1,)}
    for call in (shapes, decode | {"dtype": BF16}):
        with pytest.raises(error, match=f"^backend: {message}$"):
            onepass.warmup([call], backend=name)


def test_names_are_those_of_the_backends():
    assert choice.NAMES == tuple(backends.BACKENDS) == tuple(decode.MODULES) == backends.backends()
    assert (*backends.WITH_KERNELS, *choice.WITHOUT_KERNELS) == choice.NAMES


def python(code, **environment):
    root = os.path.dirname(os.path.dirname(onepass.__file__))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": root} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_the_environment():
    code = """
import torch, onepass
q = torch.zeros(1, 2, 1, 8)
print(onepass.supports(q, q, q))
with onepass.use_backend("tiled"):
    print(onepass.supports(q, q, q).ok)
onepass.use_backend(None)
print(onepass.supports(q, q, q).ok)
"""
    first, *others = python(code, ONEPASS_BACKEND="sm80").stdout.splitlines()
    assert "backend='sm80'" in first
    assert "(by use_backend or ONEPASS_BACKEND)" in first
    assert others == ["True", "True"]
    result = python("import onepass", ONEPASS_BACKEND="smm80")
    expected = "ValueError: ONEPASS_BACKEND: expected one of cpu, sm80, sm90, tiled, got 'smm80'"
    assert result.stderr.strip().endswith(expected)
    assert python("import onepass", ONEPASS_BACKEND="").returncode == 0


# ---------------------------------------------------------------- whose choice it is


def in_thread(function):
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(60)
    return results[0]


def test_a_block_is_its_threads_and_a_call_the_processs():
    use_backend("sm80")
    with use_backend("tiled"):
        assert choice.current() == "tiled"
        assert in_thread(choice.current) == "sm80"
        in_thread(lambda: use_backend("sm90"))
        assert choice.current() == "tiled"
    assert choice.current() == "sm90"
    assert in_thread(choice.current) == "sm90"


def test_no_other_thread_sees_what_a_block_chooses():
    """Other threads keep their choice, even while the block is being entered."""
    seen, is_done = set(), threading.Event()

    def watch():
        while not is_done.is_set():
            seen.add(choice.current())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in range(20_000):
            with use_backend("tiled"):
                pass
    finally:
        sys.setswitchinterval(interval)
        is_done.set()
        watcher.join(60)
    assert seen == {None}
    assert choice.current() is None


def test_a_block_is_its_tasks():
    async def task(name):
        seen = []
        with use_backend(name):
            for _ in range(3):
                await asyncio.sleep(0)
                seen.append(choice.current())
            seen.append(await asyncio.create_task(child()))
        return [*seen, choice.current()]

    async def child():
        await asyncio.sleep(0)
        return choice.current()

    async def both():
        return await asyncio.gather(task("tiled"), task("sm80"), child())

    tiled, sm80, neither = asyncio.run(both())
    assert tiled == ["tiled"] * 4 + [None]
    assert sm80 == ["sm80"] * 4 + [None]
    assert neither is None


def test_blocks_end_as_they_should():
    with pytest.raises(KeyError), use_backend("tiled"):
        raise KeyError
    assert choice.current() is None
    with ExitStack() as stack:
        stack.enter_context(use_backend("tiled"))
        stack.enter_context(use_backend("sm80"))
        assert choice.current() == "sm80"
    assert choice.current() is None
    block = use_backend("tiled")
    with block:
        with pytest.raises(RuntimeError, match="a new object for each block"), block:
            pass
        assert choice.current() == "tiled"
    with pytest.raises(RuntimeError, match="a new object for each block"), block:
        pass
    del block
    assert choice.current() is None


def test_what_an_interactive_python_shows_is_a_call():
    """An interactive session keeps the object that it shows, so showing it counts as the end of the call."""
    kept = use_backend("sm80")
    assert repr(kept) == "use_backend('sm80')"
    assert choice.current() == "sm80"


# ---------------------------------------------------------------- torch.compile


@pytest.mark.slow
def test_another_choice_for_the_process_makes_another_graph(ran):
    for call in CALLS.values():
        if call is CALLS["QuantizedQKV"]:
            continue  # quantizing reads values, which torch.compile does not trace
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(call, fullgraph=True, backend=counter)
        use_backend(None)
        for name, graphs in (("sm90", 1), ("sm80", 2), ("tiled", 3), ("sm80", 3)):
            if name != "sm90":
                use_backend(name)
            ran.clear()
            compiled()
            assert ran == [name]
            assert counter.frame_count == graphs
        ran.clear()
        torch.compile(lambda call=call: call(backend="tiled"), fullgraph=True, backend="aot_eager")()
        assert ran == ["tiled"]


@pytest.mark.sampled(quick=2, slow=2)
@pytest.mark.parametrize("function", ["attention", "attention_varlen", "attention_decode", "fp8"])
def test_a_block_around_a_compiled_function(ran, function):
    """Operators look for the block when they run, unless their call names a backend."""
    compiled = torch.compile(CALLS[function], fullgraph=True, backend="aot_eager")
    compiled()
    with use_backend("tiled"):
        compiled()
        torch.compile(lambda: CALLS[function](backend="sm80"), fullgraph=True, backend="aot_eager")()
    with use_backend("sm80"):
        compiled()
        with use_backend(None):
            compiled()
    compiled()
    assert ran == ["sm90", "tiled", "sm80", "sm80", "sm90", "sm90"]
    use_backend("tiled")
    compiled()
    with use_backend(None):
        compiled()
    assert ran[6:] == ["tiled", "sm90"]


def test_a_block_around_a_compiled_function_that_cannot_run():
    compiled = torch.compile(CALLS["attention"], fullgraph=True, backend="aot_eager")
    compiled()
    with (
        use_backend("sm80"),
        pytest.raises(onepass.UnsupportedError, match=r"backend sm80 .*: expected tensors on cuda"),
    ):
        compiled()
    use_backend("sm80")
    with pytest.raises(Exception, match="expected tensors on cuda"):
        compiled()


def test_gradients_of_a_compiled_function(ran):
    leaf = Q.clone().requires_grad_()
    compiled = torch.compile(lambda q: onepass.attention(q, Q, Q), fullgraph=True, backend="aot_eager")
    use_backend("sm80")
    compiled(leaf).sum().backward()
    assert ran == ["sm80", "backward of sm80"]


@pytest.mark.parametrize("is_block", [False, True])
def test_a_compiled_function_does_not_choose(ran, is_block):
    def chooses(q):
        if is_block:
            with use_backend("tiled"):
                return onepass.attention(q, q, q)
        use_backend("tiled")
        return onepass.attention(q, q, q)

    with pytest.raises(Exception, match="use_backend"):
        torch.compile(chooses, fullgraph=True, backend="aot_eager")(Q)
    # where graphs may break, Python runs the call outside of the graph
    torch.compile(chooses, backend="aot_eager")(Q)
    assert ran == ["tiled"]
    assert choice.current() == (None if is_block else "tiled")

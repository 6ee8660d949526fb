"""`supports` and `warmup` for calls of `attention_decode`, with a compiler that only records what it is asked for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.api import decode_calls
from onepass.dispatch import backends, decode
from onepass.kernels.compiler import compile
from onepass.kernels.launch import decode_sm80 as decode_launch

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
CALL = {
    "q": (4, 1, 32, 128),
    "k_cache": (4, 65536, 8, 128),
    "v_cache": (4, 65536, 8, 128),
    "cache_seqlens": (4,),
    "dtype": torch.bfloat16,
}
PAGED = CALL | {"k_cache": (900, 16, 8, 128), "v_cache": (900, 16, 8, 128), "page_table": (4, 225)}
NEW = {"k_new": (4, 1, 8, 128), "v_new": (4, 1, 8, 128), "rotary_cos": (4096, 64), "rotary_sin": (4096, 64)}
DESCALES = {"k_descale": (900, 8), "v_descale": (), "kv_block": 16, "cache_dtype": E4M3}


def tensors(**changes):
    """A call on the "meta" device, with caches of q's dtype."""
    call = {n: t for n, t in (CALL | changes).items() if n != "dtype"}
    return {
        n: torch.empty(t, dtype=INT32 if n == "cache_seqlens" else torch.bfloat16, device="meta")
        if isinstance(t, tuple)
        else t
        for n, t in call.items()
    }


@pytest.fixture
def hopper(monkeypatch):
    """(name, key, arch) of the kernels that were asked for, in a process with a compiler and a GPU."""
    asked = []

    def get(name, key, arch, trace):
        if (name, key, arch) not in asked:
            asked.append((name, key, arch))
        return print

    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(compile, "is_cached", lambda *request: request in asked)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(decode_launch, "arch_of", lambda device: "sm_90a")
    decode_launch.prepare.cache_clear()
    yield asked
    decode_launch.prepare.cache_clear()


# ---------------------------------------------------------------- supports


def test_supports_here():
    support = onepass.supports(**tensors())
    assert (support.ok, support.backend) == (True, "tiled")
    call = tensors()
    assert onepass.supports(call.pop("q"), call.pop("k_cache"), call.pop("v_cache"), **call) == support
    refused = onepass.supports(**tensors(), backend="sm80")
    assert refused == (False, "sm80", "backend sm80: expected tensors on cuda, got meta")
    refused = onepass.supports(**tensors(), backend="sm90")
    assert refused == (False, "sm90", "backend sm90: expected tensors on cuda, got meta")
    assert onepass.supports(**tensors(), backend="fast").reason == (
        "backend: expected one of cpu, sm80, sm90, tiled or None, got 'fast'"
    )


@pytest.mark.parametrize(
    "changes",
    [{"k_cache": (4, 100, 5, 128)}, {"num_splits": 0}, {"softcap": "much"}, {"kv_block": 16}],
)
def test_supports_says_what_the_call_would(changes):
    call = tensors(**changes)
    support = onepass.supports(**call)
    with pytest.raises((TypeError, ValueError)) as raised:
        onepass.attention_decode(**call)
    assert (support.ok, support.reason) == (False, str(raised.value))


def test_names():
    answer = onepass.supports(**tensors(), seqused_k=None)
    assert not answer.ok
    assert answer.reason.startswith("supports: attention_decode has no argument seqused_k; seqused_k: it is")
    with pytest.raises(TypeError, match="warmup: expected v_cache with the other arguments of attention_decode"):
        onepass.warmup([{n: t for n, t in CALL.items() if n != "v_cache"}])
    with pytest.raises(TypeError, match=r"dtype: expected a torch\.dtype with the shape \(4, 1, 32, 128\) of q"):
        onepass.warmup([{n: t for n, t in CALL.items() if n != "dtype"}])


MODIFIERS = {
    "seqstart_k": (4,),
    "key_ranges": (4, 1, 1, 2),
    "q_positions": (1, 1),
    "alibi_slopes": (32,),
    "bias": (1, 32, 1, 65536),
    "query_ranges": (4, 1, 65536, 2),
    "rotary_positions_q": (4, 1),
    "rotary_positions_k": (1, 1),
}


@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers(hopper, name):
    """They are asked about like everything else, and kernels take them."""
    is_rotary = name.startswith("rotary")
    call = CALL | {name: MODIFIERS[name]} | (NEW if is_rotary else {})
    if name == "query_ranges":
        check_left_to_tiled(call)
        return
    assert decode.choose_decode(on_cuda(call)).backend == "sm80"
    refused = decode.choose_decode(on_cuda(call), "sm90")
    # tables are applied before the kernel
    assert refused.ok if is_rotary else refused == (False, "sm90", f"backend sm90: {name}: expected none")
    names = ["append_to_cache"] * is_rotary + ["decode_sm80", "merge_splits"]
    assert [kernel.name for kernel in onepass.warmup([call], workers=1)] == names
    wrong = decode_calls.with_tensors(call | {name: (7, *MODIFIERS[name][1:])})
    assert onepass.supports(**wrong).reason.startswith(f"{name}: expected shape (")
    assert onepass.supports(**decode_calls.with_tensors(call)) == (True, "tiled", onepass.supports(**tensors()).reason)


def check_left_to_tiled(call):
    assert decode.choose_decode(on_cuda(call)).backend == "tiled"
    for name in ("sm90", "sm80"):
        reason = f"backend {name}: query_ranges: expected none"
        assert decode.choose_decode(on_cuda(call), name) == (False, name, reason)
    assert onepass.warmup([call], workers=1) == []
    for shape in ((7, 1, 65536, 2), (4, 1, 65535, 2)):
        wrong = decode_calls.with_tensors(call | {"query_ranges": shape})
        assert onepass.supports(**wrong).reason.startswith("query_ranges: expected shape (1 or 4, 1 or 32, 65536, 2)")


def on_cuda(call):
    """The problem of a call with its tensors on a GPU."""
    problem, _ = decode_calls.problem_of("supports", decode_calls.with_tensors(call))
    return replace(problem, attention=replace(problem.attention, device_type="cuda"))


def test_what_kernels_take_of_e4m3(hopper, monkeypatch):
    e4m3 = PAGED | DESCALES
    assert decode.choose_decode(on_cuda(e4m3), "sm80").backend == "sm80"
    pages = {"k_cache": (900, 8, 8, 128), "v_cache": (900, 8, 8, 128), "kv_block": 8}
    refusals = {
        "expected a kv_block that is a multiple of 16 keys, got 8": e4m3 | pages,
        "expected q in bfloat16 or float16 with an e4m3 cache, got torch.float32": e4m3 | {"dtype": torch.float32},
        "expected even head dims of an e4m3 cache, got 128 and 7": e4m3 | {"v_cache": (900, 16, 8, 7)},
    }
    for reason, call in refusals.items():
        support = decode.choose_decode(on_cuda(call))
        assert support[:2] == (True, "tiled")
        assert support.reason.startswith("plain PyTorch tiles run on any torch device, here cuda (sm90: ")
        assert support.reason.endswith(f"; sm80: {reason})")
        assert decode.choose_decode(on_cuda(call), "sm80") == (False, "sm80", f"backend sm80: {reason}")
    odd_pages = PAGED | {"k_cache": (900, 7, 8, 128), "v_cache": (900, 7, 8, 128), "cache_dtype": E4M3}
    assert decode.choose_decode(on_cuda(odd_pages), "sm80").ok  # its descales are not one per page
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 0))
    assert "an e4m3 cache needs a GPU of compute capability 8.9" in decode.choose_decode(on_cuda(e4m3)).reason


FEW = "rows this few take less time on the kernel for few rows"
MANY = {"q": (4, 9, 32, 128)}
OF_HEADS = {"cache_dtype": E4M3, "k_descale": (8,), "v_descale": (4, 8)}


@pytest.mark.parametrize(
    ("call", "refusal"),
    [
        (CALL, FEW),
        (CALL | {"q": (4, 8, 32, 128)}, FEW),
        (PAGED | DESCALES, "expected descales of heads, got one for each block of 16 keys"),
        (PAGED | MANY | DESCALES, "expected descales of heads, got one for each block of 16 keys"),
        (PAGED | OF_HEADS, FEW),
        (PAGED | MANY | OF_HEADS, None),
        (PAGED | MANY | {"cache_dtype": E4M3}, None),
        (
            PAGED | OF_HEADS | {"q": (4, 9, 32, 120), "k_cache": (900, 16, 8, 120)},
            "head_dim: expected a multiple of 16 up to 128 with an e4m3 cache, got 120",
        ),
        (
            PAGED | MANY | OF_HEADS | {"v_cache": (900, 16, 8, 144)},
            "head_dim_v: expected a multiple of 16 up to 128 with an e4m3 cache, got 144",
        ),
        (CALL | MANY, None),
        (PAGED | MANY, None),
        (
            CALL | MANY | {"dtype": torch.float32},
            "expected q in bfloat16 or float16, got torch.float32",
        ),
        (CALL | MANY | {"v_cache": (4, 65536, 8, 36)}, "head_dim_v: expected a multiple of 8"),
        (
            PAGED | MANY | {"k_cache": (900, 24, 8, 128), "v_cache": (900, 24, 8, 128)},
            "expected a page size that is a multiple of 16 keys, got 24",
        ),
    ],
)
def test_kernels_by_themselves(hopper, call, refusal):
    """Hopper's own kernel runs with more than 32 rows per kv head, if TMA can read the cache."""
    support = decode.choose_decode(on_cuda(call))
    assert support.backend == ("sm90" if refusal is None else "sm80")
    if refusal is None:
        assert support == (True, "sm90", "Hopper kernels (CuTe DSL)")
    else:
        assert support.reason.startswith(f"Ampere kernels (CuTe DSL); sm90: {refusal}")
        named = decode.choose_decode(on_cuda(call), "sm90")
        assert named.ok == (refusal == FEW)


def test_caches_that_tma_cannot_read(hopper):
    rows = torch.zeros(4, 700, 8, 136, dtype=torch.bfloat16)
    given = {"cache_seqlens": torch.zeros(4, dtype=INT32), "q": torch.zeros(4, 9, 32, 128, dtype=torch.bfloat16)}
    for cache, is_read in ((rows[..., :128], True), (rows[..., 8:], True), (rows[..., 1:129], False)):
        support = decode.choose_decode(on_cuda(given | {"k_cache": rows[..., 8:], "v_cache": cache}))
        assert support.backend == ("sm90" if is_read else "sm80")
        assert is_read or "sm90: expected rows of the caches at multiples of 16 bytes" in support.reason
    odd = torch.zeros(4, 700, 8, 132, dtype=torch.bfloat16)[..., :128]  # rows 264 bytes apart
    assert decode.choose_decode(on_cuda(given | {"k_cache": rows[..., 8:], "v_cache": odd})).backend == "sm80"


# ---------------------------------------------------------------- warmup


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (CALL | {"num_splits": 1}, ["decode_sm80"]),
        (CALL, ["decode_sm80", "merge_splits"]),
        (PAGED | NEW | {"num_splits": 1}, ["append_to_cache", "decode_sm80"]),
        (PAGED | NEW | DESCALES, ["append_to_cache", "decode_sm80", "merge_splits"]),
        (CALL | MANY | {"num_splits": 1}, ["decode"]),
        (
            PAGED | MANY | {"k_new": (4, 9, 8, 128), "v_new": (4, 9, 8, 128), "num_splits": 1},
            ["append_to_cache", "decode"],
        ),
    ],
)
def test_warmup(hopper, call, names):
    name = "sm90" if "decode" in names else "sm80"
    made = onepass.warmup([call | {"backend": name}, call], workers=1)
    assert [kernel.name for kernel in made] == names == [name for name, _, _ in hopper]
    assert {arch for _, _, arch in hopper} == {"sm_90a"}
    assert made[0].backend == name
    for kernel, (kind, key, _) in zip(made, hopper, strict=True):
        assert (kernel.config is not None) == (kind in ("decode_sm80", "decode"))
        if kernel.config is not None:
            assert key[1] == kernel.config
    assert all(kernel.was_cached for kernel in onepass.warmup([call], backend=name))


def test_warmup_makes_the_kernels_that_the_call_gets(hopper):
    """With aligned tensors the call asks for no further kernel."""
    small = {"k_cache": (4, 700, 8, 128), "v_cache": (4, 700, 8, 128), "k_descale": (4, 8), "v_descale": (8,)}
    call = CALL | small | {"cache_dtype": E4M3, "k_new": NEW["k_new"], "v_new": NEW["v_new"]}
    onepass.warmup([call], backend="sm80", workers=1)
    ready = list(hopper)
    shapes = {n: s for n, s in call.items() if isinstance(s, tuple)}
    dtypes = {"cache_seqlens": INT32, "k_cache": E4M3, "v_cache": E4M3} | dict.fromkeys(
        ("k_descale", "v_descale"), torch.float32
    )
    given = {n: torch.zeros(s, dtype=dtypes.get(n, torch.bfloat16)) for n, s in shapes.items()}
    inputs = onepass.problem.decode.DecodeInputs(**given)
    decode_launch.decode(on_cuda(call), inputs)
    assert [name for name, _, _ in ready] == ["append_to_cache", "decode_sm80", "merge_splits"]
    assert hopper == ready


def test_warmup_without_kernels(hopper, monkeypatch):
    assert onepass.warmup([CALL], backend="tiled") == []
    assert [kernel.name for kernel in onepass.warmup([CALL], workers=1)] == ["decode_sm80", "merge_splits"]
    assert [kernel.name for kernel in onepass.warmup([CALL], backend="sm90", workers=1)] == ["decode", "merge_splits"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("sm80", "sm90"):
        with pytest.raises(NotImplementedError, match=f"backend {name}: expected a GPU, whose size decides"):
            onepass.warmup([CALL], backend=name)


@pytest.mark.parametrize("names", [("k_cache", "v_cache"), ("q",)], ids=str)
def test_autocast_casts_what_a_call_would_cast(names):
    """Rows that meet a cache in autocast's dtype are cast; a cache is not, so that one in float32 meets no 16 bits."""
    given = {"q": torch.randn(2, 1, 4, 16), **dict.fromkeys(("k_cache", "v_cache"), torch.randn(2, 9, 2, 16))}
    given |= {name: given[name].bfloat16() for name in names}
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        support = onepass.supports(**given, cache_seqlens=lengths)
        assert support.ok == ("q" not in names), support.reason
        if support.ok:
            onepass.attention_decode(**given, cache_seqlens=lengths)

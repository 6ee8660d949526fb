"""Caches that share memory with each other or with other tensors, and writes to caches that autograd must see."""

import ctypes
import math
import random
from types import SimpleNamespace

import pytest
import torch

import onepass
from onepass.api import fast_path
from onepass.dispatch import backends
from onepass.kernels.compiler import compile
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import decode_sm90 as decode_launch_sm90
from onepass.validation import overlap
from onepass.validation.overlap import _overlap, _overlaps_itself, _steps_of

INT32 = torch.int32
SHAPE = (2, 12, 2, 8)


def call_of(k_cache, v_cache, seqlen_new=1, **changes):
    def new(cache):
        return torch.ones(2, seqlen_new, 2, cache.shape[-1]) if seqlen_new else None

    lengths = torch.tensor([3, 7], dtype=INT32)
    given = {"cache_seqlens": lengths, "k_new": new(k_cache), "v_new": new(v_cache)} | changes
    return {"q": torch.ones(2, 1, 4, 8), "k_cache": k_cache, "v_cache": v_cache} | given


def one_allocation(dim):
    """Two caches side by side in dimension `dim` of a tensor."""
    whole = torch.zeros(*SHAPE[:dim], 2, *SHAPE[dim:])
    return whole.unbind(dim)


def offset_by(elements, head_dim_v=8):
    memory = torch.zeros(4096)
    k_cache = memory[: 2 * 12 * 2 * 8].view(SHAPE)
    return k_cache, memory[elements:][: 2 * 12 * 2 * head_dim_v].view(*SHAPE[:3], head_dim_v)


CACHE, WIDE = torch.zeros(SHAPE), torch.zeros(2, 12, 2, 15)
SHARED = {
    "one tensor": lambda: (CACHE, CACHE),
    "views of one tensor": lambda: (CACHE.view(SHAPE), CACHE.view(SHAPE)),
    "memory that came another way": lambda: (CACHE, torch.from_numpy(CACHE.numpy())),
    "narrower values": lambda: (CACHE, CACHE[..., :4]),
    "overlapping halves": lambda: offset_by(2 * 12 * 2 * 8 - 1),
    "a column": lambda: (WIDE[..., :8], WIDE[..., 7:]),
    "rows apart by one": lambda: offset_by(16),
}
APART = {
    **{f"side by side in dimension {dim}": lambda dim=dim: one_allocation(dim) for dim in range(4)},
    "interleaved columns of heads": lambda: torch.zeros(2, 12, 2, 16).split(8, -1),
    "of other widths": lambda: torch.zeros(2, 12, 2, 13).split((8, 5), -1),
    "behind each other": lambda: offset_by(2 * 12 * 2 * 8),
    "heads outside": lambda: [t.transpose(1, 2) for t in torch.zeros(2, 2, 24, 8).split(12, 2)],
    "separate": lambda: (torch.zeros(SHAPE), torch.zeros(SHAPE)),
}


@pytest.fixture(autouse=True)
def _no_calls_before():
    fast_path.forget()


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED.keys())
def test_caches_with_elements_in_common_are_refused_for_new_keys(make):
    k_cache, v_cache = make()
    # a call with these shapes and strides that succeeds, so that the next ones may take the fast path
    memory = torch.zeros(4096).as_strided(v_cache.shape, v_cache.stride())
    onepass.attention_decode(**call_of(k_cache, memory))
    before = k_cache.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match="v_cache: expected memory apart from k_cache"):
            onepass.attention_decode(**call_of(k_cache, v_cache))
    assert torch.equal(k_cache, before)
    answer = onepass.supports(**call_of(k_cache, v_cache))
    assert not answer.ok
    assert answer.reason.startswith("v_cache: expected memory apart from k_cache")
    assert onepass.attention_decode(**call_of(k_cache, v_cache, seqlen_new=0)).isfinite().all()


@pytest.mark.parametrize("make", APART.values(), ids=APART.keys())
def test_caches_of_one_allocation_are_allowed(make):
    k_cache, v_cache = make()
    for _ in range(3):
        onepass.attention_decode(**call_of(k_cache, v_cache))
    assert fast_path.num_kept() == 1
    assert float(k_cache.sum()) == 2 * 2 * k_cache.shape[-1]
    assert float(v_cache.sum()) == 2 * 2 * v_cache.shape[-1]


def test_ranges_of_addresses_are_compared_before_tensors(monkeypatch):
    """The operator checks each call of a compiled graph: strides are only looked at where ranges meet."""
    monkeypatch.setattr(overlap, "_share_memory", lambda *tensors: pytest.fail("compared strides"))
    memory = torch.zeros(13, 2, 2, 8)
    k_cache, new = memory[:12].transpose(0, 1), memory[12:].transpose(0, 1)
    onepass.attention_decode(**call_of(k_cache, torch.zeros(SHAPE), k_new=new, v_new=new))
    onepass.attention_decode(**call_of(*one_allocation(2), check_values=True))


def elements(memory, t):
    """The numbers of the elements of `memory` that t, a view of it, has."""
    numbers = torch.arange(memory.numel())
    return set(numbers.as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist())


def test_slices_of_one_tensor_are_told_apart_exactly():
    """Random slices of a dense tensor of permuted dimensions, against the sets of their elements."""
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(2000):
        sizes = [rng.randint(1, 4) for _ in range(4)]
        memory = torch.zeros(math.prod(sizes), dtype=rng.choice([torch.uint8, torch.float16]))
        whole = memory.view(sizes)
        pair = []
        for _ in range(2):
            t = whole
            for dim, size in enumerate(sizes):
                start = rng.randrange(size)
                t = t.narrow(dim, start, rng.randint(1, size - start))
            pair.append(t.permute(rng.sample(range(4), 4)))
        expected = bool(elements(memory, pair[0]) & elements(memory, pair[1]))
        distance = pair[1].data_ptr() - pair[0].data_ptr()
        assert _overlap(distance, *map(_steps_of, pair)) == expected, (sizes, pair[0].stride(), pair[1].stride())
        seen[expected] += 1
    assert min(seen.values()) > 500


def test_no_shared_element_is_missed():
    """Random shapes and strides, most of which no slice of a dense tensor has."""
    rng = random.Random(0)
    shared = 0
    for _ in range(2000):
        memory = torch.zeros(4000, dtype=rng.choice([torch.uint8, torch.float16]))
        pair = []
        for _ in range(2):
            shape = [rng.choice([1, 2, 3]) for _ in range(3)] + [rng.randint(1, 6)]
            strides = [rng.randint(0, 40) for _ in range(3)] + [rng.choice([1, 2])]
            pair.append(memory.as_strided(shape, strides, rng.randint(0, 90)))
            has_one_index = len(elements(memory, pair[-1])) == pair[-1].numel()
            assert has_one_index or _overlaps_itself(pair[-1])
        if elements(memory, pair[0]) & elements(memory, pair[1]):
            shared += 1
            distance = pair[1].data_ptr() - pair[0].data_ptr()
            assert _overlap(distance, *map(_steps_of, pair)), (pair[0].stride(), pair[1].stride(), distance)
    assert shared > 500


def test_pages_of_a_whole_gpu():
    """Keys and values of interleaved pages, by rows and by heads, and of pages that end with other bytes."""
    pages, size, heads, dim = 100_000, 16, 8, 128
    row = dim * 2
    dense = ((size * heads * row, pages), (heads * row, size), (row, heads), (2, dim), (1, 2))
    by_heads = ((size * heads * 2 * row, pages), (row, size), (2 * size * row, heads), (2, dim), (1, 2))
    for k_steps, distance, expected in [
        (((2 * size * heads * row, pages), *dense[1:]), size * heads * row, False),
        (((2 * size * heads * row + 48, pages), *dense[1:]), size * heads * row, False),
        (dense, 12345 * row, True),
        (by_heads, size * row, False),
        (((size * heads * 2 * row + 48, pages), *by_heads[1:]), size * row, False),
        (by_heads, 2 * size * row, True),
        (((2 * heads * row * size, pages), (2 * heads * row, size), (2 * row, heads), (2, dim), (1, 2)), row, False),
    ]:
        assert _overlap(distance, k_steps, k_steps) is expected
    keys = ((2 * size * heads * row, pages), *dense[1:])
    values_by_heads = ((2 * size * heads * row, pages), (row, size), (size * row, heads), (2, dim), (1, 2))
    assert not _overlap(size * heads * row, keys, values_by_heads)


# tensors of a call that are views of k_cache or of v_cache
VIEWS = {
    "k_new": lambda cache: cache[:, 2:4],
    "v_new": lambda cache: cache[:, 2:4],
    "q": lambda cache: cache[:, :2],
    "sinks": lambda cache: cache[0, 0, 0, :2],
    "rotary_cos": lambda cache: cache[0, :, 0, :4],
    "rotary_sin": lambda cache: cache[1, :, 1, :4],
    "bias": lambda cache: cache[:, :2, :, :1].transpose(1, 2),
    "alibi_slopes": lambda cache: cache[:, 1, :, 0],
}


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", VIEWS)
def test_tensors_that_the_new_keys_would_overwrite_are_refused(name, cache, order):
    """Other strides of the tensor, as of a slice of a projection, must not hide it on the fast path.

    Either cache may be the first one in memory.
    """
    caches = torch.zeros(2, *SHAPE)
    call = call_of(*(caches[i] for i in order), 2) | {"q": torch.zeros(2, 2, 2, 8)}
    if name.startswith("rotary"):
        call |= {"rotary_cos": torch.ones(12, 4), "rotary_sin": torch.ones(12, 4)}
    view = VIEWS[name](call[cache])
    apart = call | {name: view.clone()}
    for _ in range(2):
        onepass.attention_decode(**apart)
        before = call["k_cache"].clone(), call["v_cache"].clone()
        with pytest.raises(ValueError, match=f"^{name}: expected memory apart from {cache}, to which new keys"):
            onepass.attention_decode(**(call | {name: view}))
        assert torch.equal(before[0], call["k_cache"])
        assert torch.equal(before[1], call["v_cache"])


def test_new_keys_of_one_projection_are_allowed():
    call = call_of(*one_allocation(1))
    rows = torch.ones(2, 1, 8, 8).split((4, 2, 2), 2)
    for _ in range(3):
        onepass.attention_decode(**(call | dict(zip(("q", "k_new", "v_new"), rows, strict=True))))
    assert fast_path.num_kept() == 1


def test_caches_that_overlap_themselves():
    k_cache = torch.zeros(4096).as_strided(SHAPE, (192, 16, 4, 1))
    with pytest.raises(ValueError, match="k_cache: expected memory of its own for every element, got strides"):
        onepass.attention_decode(**call_of(k_cache, torch.zeros(SHAPE)))


def test_the_operator_itself_refuses_shared_caches():
    """Validation cannot check a traced call, because traced tensors have no addresses."""
    torch._dynamo.reset()
    compiled = torch.compile(onepass.attention_decode, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="v_cache: expected memory apart from k_cache"):
        compiled(**call_of(CACHE, CACHE.view(SHAPE)))
    compiled(**call_of(*one_allocation(1)))


def test_tensors_without_memory_are_not_compared():
    meta = {n: t.to("meta") for n, t in call_of(*one_allocation(1)).items()}
    assert onepass.supports(**meta).ok


# ---------------------------------------------------------------- versions


@pytest.fixture(params=["tiled", "sm80", "sm90"])
def backend(request, monkeypatch):
    """A backend whose launches run on the CPU with fake kernels.

    The kernels that append write to memory without telling torch, as real kernels do; the others do nothing."""
    if request.param == "tiled":
        yield "tiled"
        return

    def get(name, *request):
        def kernel(*arguments):
            for cache in arguments[4:6] if name == "append_to_cache" else ():
                if cache is not None:
                    ctypes.memset(cache.data_ptr(), 1, 4)

        return kernel

    name = request.param
    monkeypatch.setattr(compile, "get", get)
    monkeypatch.setattr(backends, "device_refusal", lambda asked, *_: None if asked == name else "another GPU")
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    for module in (decode_launch, decode_launch_sm90):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_90a", raising=False)
    monkeypatch.setattr(decode_launch_sm90, "tile_counter", lambda device: torch.zeros(1, dtype=INT32))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    modules = append_launch, decode_launch, decode_launch_sm90
    made = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    for cache in made:
        cache.cache_clear()
    yield name
    for cache in made:
        cache.cache_clear()


def step(backend, cache_dtype=torch.bfloat16, seqlen_new=1, in_pages=False, **changes):
    """The arguments of a call with new caches."""
    shape = (12, 16, 2, 64) if in_pages else (2, 64, 2, 64)
    caches = {name: torch.zeros(shape, dtype=torch.bfloat16).to(cache_dtype) for name in ("k_cache", "v_cache")}
    new = {name: torch.ones(2, seqlen_new, 2, 64, dtype=torch.bfloat16) for name in ("k_new", "v_new")}
    others = {"q": torch.ones(2, 1, 4, 64, dtype=torch.bfloat16), "cache_seqlens": torch.tensor([0, 7], dtype=INT32)}
    if in_pages:
        others["page_table"] = torch.arange(8, dtype=INT32).view(2, 4)
    return caches | new | others | {"backend": backend} | changes


CALLS = {
    "dense": {},
    "pages": {"in_pages": True},
    "e4m3": {"cache_dtype": torch.float8_e4m3fn},
    "rotary": {"rotary_cos": torch.ones(64, 8), "rotary_sin": torch.ones(64, 8)},
    "splits": {"num_splits": 2},
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_that_saved_a_cache_is_refused_after_new_keys(backend, name):
    """The first call goes through the operator, the second takes the fast path."""
    arguments = step(backend, **CALLS[name])
    for _ in range(2):
        for saved in ("k_cache", "v_cache"):
            x = torch.ones((), requires_grad=True)
            # no product of e4m3 has a derivative; a view of its bytes shares its version
            cache = arguments[saved] if name != "e4m3" else arguments[saved].view(torch.uint8)
            graph = (x * cache).sum()
            onepass.attention_decode(**arguments)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                graph.backward()


@pytest.mark.parametrize("name", CALLS)
def test_only_new_keys_are_a_change(backend, name):
    arguments = step(backend, **CALLS[name])
    arguments |= {"k_new": None, "v_new": None}
    for _ in range(2):
        onepass.attention_decode(**arguments)
    assert [arguments[cache]._version for cache in ("k_cache", "v_cache")] == [0, 0]
    empty = step(backend, seqlen_new=0, **CALLS[name])
    onepass.attention_decode(**empty)
    assert [empty[cache]._version for cache in ("k_cache", "v_cache")] == [0, 0]


def test_calls_that_are_refused_change_nothing(backend):
    arguments = step(backend, num_splits=0)
    with pytest.raises(ValueError, match="num_splits"):
        onepass.attention_decode(**arguments)
    arguments = step(backend, k_new=torch.ones(2, 1, 2, 32, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="k_new"):
        onepass.attention_decode(**arguments)
    assert arguments["k_cache"]._version == 0


def test_the_operator_without_the_door(backend):
    options = 0.1, None, 0, None, 1, None, False, False, None, None, backend
    given = step(backend)
    leading = (given[name] for name in ("q", "k_cache", "v_cache", "cache_seqlens"))
    torch.ops.onepass.decode_append(*leading, *[None] * 7, given["k_new"], given["v_new"], *options)
    assert min(given[cache]._version for cache in ("k_cache", "v_cache")) > 0
    with pytest.raises(ValueError, match="v_cache: expected memory apart from k_cache"):
        torch.ops.onepass.decode_append(
            *(given[name] for name in ("q", "k_cache", "k_cache", "cache_seqlens")),
            *[None] * 7,
            given["k_new"],
            given["v_new"],
            *options,
        )


@pytest.mark.parametrize("is_in_mode", [True, False])
@pytest.mark.parametrize("kinds", [("k_cache", "v_cache"), ("v_cache",), ("q", "k_new", "v_new"), ()])
def test_tensors_of_inference_mode(backend, kinds, is_in_mode):
    """Tensors of inference mode have no version; other tensors of the call keep theirs."""
    arguments = step(backend)
    with torch.inference_mode():
        arguments |= {name: arguments[name].clone() for name in kinds}
    for _ in range(2):
        with torch.inference_mode(is_in_mode):
            onepass.attention_decode(**arguments)
    for name in {"k_cache", "v_cache"} - set(kinds):
        assert arguments[name]._version >= 2


def test_version_under_torch_compile():
    torch._dynamo.reset()
    compiled = torch.compile(onepass.attention_decode, fullgraph=True, backend="aot_eager")
    arguments = step("tiled")
    compiled(**arguments)
    assert min(arguments[cache]._version for cache in ("k_cache", "v_cache")) > 0

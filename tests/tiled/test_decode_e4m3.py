"""attention_decode over an e4m3 cache on the CPU: exact attention over real values, and the values written to it."""

import contextlib

import pytest
import torch

import onepass
from onepass import reference
from onepass.testing.budget import compare, compare_lse

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
BATCH, ROOM, PAGE_SIZE, NUM_PAGES = 3, 64, 16, 14
HEADS, HEAD_DIMS = (4, 2), (8, 6)
FILLED = (50, 0, 17)


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def scales(*shape, seed):
    """Descales that differ widely, so that a misplaced one shows."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).mul(6).sub(5).exp()


# name -> the shape of the descales, whether the cache has pages, kv_block
KINDS = {
    "none": (None, None, False, None),
    "none, in pages": (None, None, True, None),
    "tensor": ((), (), False, None),
    "tensor and head, in pages": ((), (HEADS[1],), True, None),
    "entry": ((BATCH, HEADS[1]), (HEADS[1],), False, None),
    "entry, in pages": ((BATCH, HEADS[1]), (BATCH, HEADS[1]), True, None),
    "page": ((NUM_PAGES, HEADS[1]), (NUM_PAGES, HEADS[1]), True, PAGE_SIZE),
    "page and tensor": ((NUM_PAGES, HEADS[1]), (), True, PAGE_SIZE),
    "block": ((BATCH, HEADS[1], 4), (BATCH, HEADS[1], 4), False, 16),
    "block of 5, entry": ((BATCH, HEADS[1], 13), (BATCH, HEADS[1]), False, 5),
}


def arguments_of(kind, seqlen_q=3, dtype=torch.bfloat16, seqlen_new=0):
    """The arguments for a cache with NaN where it has no key, and the real values of its keys (batch, room, ..)."""
    *shapes, is_paged, kv_block = KINDS[kind]
    arguments = {
        "q": randn(BATCH, seqlen_q, HEADS[0], HEAD_DIMS[0], dtype=dtype, seed=1),
        "cache_seqlens": torch.tensor(FILLED, dtype=INT32),
        "kv_block": kv_block,
    }
    order = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5))[: BATCH * ROOM // PAGE_SIZE]
    table = order.view(BATCH, -1)
    if is_paged:
        arguments["page_table"] = table.int()
    real = []
    for i, name in enumerate("kv"):
        cache = randn(BATCH, ROOM, HEADS[1], HEAD_DIMS[i], seed=2 + i).to(E4M3)
        per_key = torch.ones(BATCH, ROOM, HEADS[1])
        if shapes[i] is not None:
            descale = arguments[f"{name}_descale"] = scales(*shapes[i], seed=20 + i)
            if descale.dim() == 3:
                per_key = descale.repeat_interleave(kv_block, 2)[:, :, :ROOM].transpose(1, 2)
            elif is_paged and kv_block and descale.dim() == 2:
                per_key = descale[table].repeat_interleave(PAGE_SIZE, 1)
            else:
                per_key = (descale[:, None] if descale.dim() == 2 else descale).expand(BATCH, ROOM, HEADS[1])
        for b, n in enumerate(FILLED):
            cache.view(torch.uint8)[b, n:] = 0x7F
        real.append(cache.double() * per_key[..., None])
        if is_paged:
            pages = torch.full((NUM_PAGES, PAGE_SIZE, *cache.shape[2:]), 0xFF, dtype=torch.uint8)
            pages[order] = cache.view(torch.uint8).view(-1, PAGE_SIZE, *cache.shape[2:])
            cache = pages.view(E4M3)
        arguments[f"{name}_cache"] = cache
        if seqlen_new:
            arguments[f"{name}_new"] = randn(BATCH, seqlen_new, HEADS[1], HEAD_DIMS[i], dtype=dtype, seed=7 + i)
    return arguments, real


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values(kind, num_splits, dtype):
    """With splits and without, and with every option that changes scores: softmax sees real values."""
    arguments, (k, v) = arguments_of(kind, dtype=dtype)
    options = {"window": (30, 0), "softcap": 5.0, "sinks": randn(4, dtype=dtype, seed=9)}
    out, lse = onepass.attention_decode(**arguments, **options, num_splits=num_splits, return_lse=True)
    assert out.dtype == dtype
    for b, n in enumerate(FILLED):
        tensors = arguments["q"][b : b + 1].double(), k[b : b + 1, :n], v[b : b + 1, :n]
        oracle = reference.attention(*tensors, causal=True, **options)
        if dtype == torch.float64:
            torch.testing.assert_close(out[b : b + 1], oracle.out, rtol=1e-11, atol=1e-12)
            torch.testing.assert_close(lse[b : b + 1], oracle.lse, rtol=1e-11, atol=1e-12)
        else:
            plain_torch = reference.attention(
                *(t.to(dtype) for t in tensors), causal=True, **options, compute_dtype=dtype
            )
            rows = compare("out", out[b : b + 1], oracle.out, plain_torch.out), compare_lse(lse[b : b + 1], oracle.lse)
            assert all(row.ok for row in rows), "\n".join(map(str, rows))


@pytest.mark.parametrize("kind", KINDS)
def test_new_keys_are_rounded_with_the_descale_of_their_place(kind):
    """New keys are rotated, appended and read again: the result is attention over the cache afterwards."""
    arguments, _ = arguments_of(kind, seqlen_new=3)
    angles = torch.arange(ROOM)[:, None] * torch.tensor([1.0, 0.1])
    arguments |= {"rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    before = {name: arguments[name].clone() for name in ("k_cache", "v_cache")}
    # the expected keys are rotated by a call whose cache is not e4m3
    unquantized = {"k_cache": torch.zeros(BATCH, ROOM, 2, 8), "v_cache": torch.zeros(BATCH, ROOM, 2, 6)}
    same = {n: arguments[n] for n in ("cache_seqlens", "k_new", "v_new", "rotary_cos", "rotary_sin")}
    unquantized = {n: t.bfloat16() for n, t in unquantized.items()}
    onepass.attention_decode(arguments["q"], **unquantized, **same)
    out = onepass.attention_decode(**arguments)

    is_paged, table = "page_table" in arguments, arguments.get("page_table")
    for name in "kv":
        cache, descale = arguments[f"{name}_cache"], arguments.get(f"{name}_descale", torch.ones(()))
        was = before[f"{name}_cache"].view(torch.uint8).clone()
        for b, n in enumerate(FILLED):
            for position in range(n, n + 3):
                place = (table[b, position // PAGE_SIZE], position % PAGE_SIZE) if is_paged else (b, position)
                if descale.dim() == 3:
                    scale = descale[b, :, position // arguments["kv_block"]]
                elif descale.dim() == 2:
                    scale = descale[place[0] if arguments["kv_block"] and is_paged else b]
                else:
                    scale = descale.expand(2)
                expected = unquantized[f"{name}_cache"][b, position].float() / scale[:, None]
                expected = expected.clamp(-448, 448).to(E4M3)
                assert torch.equal(cache[place].view(torch.uint8), expected.view(torch.uint8))
                was[place] = expected.view(torch.uint8)
        assert torch.equal(cache.view(torch.uint8), was)  # no other element was written
    again = {n: t for n, t in arguments.items() if n not in ("k_new", "v_new")}
    again["cache_seqlens"] = arguments["cache_seqlens"] + 3
    assert torch.equal(out, onepass.attention_decode(**again))


def test_what_does_not_fit_saturates_and_nan_stays():
    arguments, _ = arguments_of("tensor", seqlen_new=1)
    new = torch.tensor([1e9, -1e9, torch.inf, -torch.inf, torch.nan, 448.0, 463.0, 2.0**-11])
    arguments["k_new"] = (new * arguments["k_descale"]).expand(BATCH, 1, 2, 8).bfloat16()
    onepass.attention_decode(**arguments)
    written = arguments["k_cache"][1, 0, 0].float()
    expected = torch.tensor([448.0, -448.0, 448.0, -448.0, torch.nan, 448.0, 448.0, 0.0])
    torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


def test_nan_reaches_the_queries_that_see_it():
    arguments, _ = arguments_of("page")
    whole = onepass.attention_decode(**arguments)
    page, row = arguments["page_table"][0, 49 // PAGE_SIZE], 49 % PAGE_SIZE
    arguments["v_cache"].view(torch.uint8)[page, row, 0, 2] = 0xFF  # the last key of the first sequence
    out = onepass.attention_decode(**arguments)
    assert out[0, 2, :2, 2].isnan().all()
    out[0, 2, :2, 2] = whole[0, 2, :2, 2]
    assert torch.equal(out, whole)


def test_operators():
    arguments, _ = arguments_of("page", seqlen_new=2)
    order = ("q", "k_cache", "v_cache", "cache_seqlens", "page_table")
    options = (0.3, None, 0, None, 2, None, False, False, PAGE_SIZE, None, "tiled")
    descales = arguments["k_descale"], arguments["v_descale"]
    tensors = *(arguments[n] for n in order), None, None, None, *descales, None
    tests = ("test_faketensor",)  # opcheck's test of the schema compares values, which torch cannot do in e4m3
    torch.library.opcheck(torch.ops.onepass.decode.default, (*tensors, *options), test_utils=tests)
    new = arguments["k_new"], arguments["v_new"]
    torch.library.opcheck(torch.ops.onepass.decode_append.default, (*tensors, *new, *options), test_utils=tests)


@pytest.mark.sampled(quick=1, slow=3)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", ["page", "block"])
def test_compiled_without_a_break(kind, dynamic):
    """torch.compile makes no graph break, even if it does not know the shapes."""
    (arguments, _), (second, _) = (arguments_of(kind, seqlen_new=2) for _ in range(2))
    compiled = torch.compile(onepass.attention_decode, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(**arguments), onepass.attention_decode(**second))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(arguments[name].view(torch.uint8), second[name].view(torch.uint8))


ONE = torch.ones(())
REFUSED = {
    "v_cache: expected dtype float8_e4m3fn, got bfloat16": (
        "none",
        {"v_cache": torch.zeros(BATCH, ROOM, 2, 6).bfloat16()},
    ),
    "k_cache: expected dtype float64, float32, bfloat16 or float16, got float8_e5m2": (
        "none",
        {n: torch.zeros(BATCH, ROOM, 2, d).to(torch.float8_e5m2) for n, d in (("k_cache", 8), ("v_cache", 6))},
    ),
    "q: expected dtype float64, float32, bfloat16 or float16, got float8_e4m3fn": (
        "none",
        {"q": torch.zeros(BATCH, 3, 4, 8).to(E4M3)},
    ),
    "k_descale: expected None with a cache of torch.bfloat16, got Tensor": (
        "none",
        {"k_cache": torch.zeros(BATCH, ROOM, 2, 8).bfloat16(), "v_cache": torch.zeros(BATCH, ROOM, 2, 6).bfloat16()}
        | {"k_descale": ONE, "v_descale": ONE},
    ),
    "kv_block: expected None with a cache of torch.bfloat16, got 16": (
        "none",
        {"k_cache": torch.zeros(BATCH, ROOM, 2, 8).bfloat16(), "v_cache": torch.zeros(BATCH, ROOM, 2, 6).bfloat16()}
        | {"kv_block": 16},
    ),
    "v_descale: expected a float32 torch.Tensor where the other of k_descale and v_descale is given, got None": (
        "none",
        {"k_descale": ONE},
    ),
    "k_descale: expected a float32 torch.Tensor where the other of k_descale and v_descale is given, got float": (
        "tensor",
        {"k_descale": 0.5},
    ),
    "k_descale: expected dtype float32, got bfloat16": ("tensor", {"k_descale": ONE.bfloat16()}),
    "k_descale: expected device cpu like q, got meta": ("tensor", {"k_descale": ONE.to("meta")}),
    "v_descale: expected shape () or (2,) or (3, 2), got (1,)": ("tensor", {"v_descale": ONE[None]}),
    "k_descale: expected shape () or (2,) or (3, 2), or one for each block of keys with kv_block, got (3, 2, 4)": (
        "block",
        {"kv_block": None},
    ),
    "k_descale: expected shape () or (2,) or (3, 2) or (3, 2, 2), got (3, 2, 4)": ("block", {"kv_block": 32}),
    "k_descale: expected shape () or (2,) or (3, 2), or (14, 2) with kv_block=16, one for each page, got (14, 2)": (
        "page",
        {"kv_block": None},
    ),
    "k_descale: expected shape () or (2,) or (14, 2), got (3, 2)": ("entry, in pages", {"kv_block": 16}),
    "kv_block: expected None or 16, the keys of a page, got 8": ("page", {"kv_block": 8}),
    "kv_block: expected an int or None, got 16.0": ("block", {"kv_block": 16.0}),
    "kv_block: expected at least 1, got 0": ("block", {"kv_block": 0}),
    "kv_block: expected None without k_descale and v_descale, got 16": ("none", {"kv_block": 16}),
    "k_new: expected torch.bfloat16 on cpu, got torch.float8_e4m3fn on cpu": (
        "none",
        {"k_new": torch.zeros(BATCH, 1, 2, 8).to(E4M3), "v_new": torch.zeros(BATCH, 1, 2, 6).to(E4M3)},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_refusals(message):
    kind, changes = REFUSED[message]
    arguments, _ = arguments_of(kind)
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as raised:
        onepass.attention_decode(**(arguments | changes))
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith("none")])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_descales_that_no_key_can_have(kind, value):
    """A descale of a key is refused, before new keys are written; those of places without keys may have any value."""
    arguments, _ = arguments_of(kind, seqlen_new=1)
    before = arguments["k_cache"].view(torch.uint8).clone()
    expected = onepass.attention_decode(
        **(arguments | {name: arguments[name].clone() for name in ("k_cache", "v_cache")})
    )
    for name in ("k_descale", "v_descale"):
        wrong = arguments | {name: torch.full_like(arguments[name], value)}
        with pytest.raises(
            ValueError, match=f"^{name}: expected finite numbers other than 0 for the keys of sequence 0"
        ):
            onepass.attention_decode(**wrong)
        assert torch.equal(arguments["k_cache"].view(torch.uint8), before)
    if "page" in kind and "pages" not in kind:
        ends = [-(-(n + 1) // PAGE_SIZE) for n in FILLED]
        used = torch.cat([row[:end] for row, end in zip(arguments["page_table"].long(), ends, strict=True)])
        arguments["k_descale"][[page for page in range(NUM_PAGES) if page not in used]] = value
    elif kind.startswith("block"):
        for b, n in enumerate(FILLED):
            arguments["k_descale"][b, :, n // arguments["kv_block"] + 1 :] = value
    assert torch.equal(onepass.attention_decode(**arguments), expected)


@pytest.mark.parametrize("is_paged", [False, True])
def test_descales_of_exactly_the_keys_are_checked(is_paged):
    """A descale of 0 is refused only in blocks (or pages) that hold keys between a sequence's start and its end."""
    kind = "page" if is_paged else "block"
    arguments, _ = arguments_of(kind)
    for start, end in ((0, 1), (5, 12), (15, 17), (16, 32), (17, 64), (33, 48), (20, 20)):
        arguments["cache_seqlens"] = torch.tensor([end, 0, 0], dtype=INT32)
        arguments["seqstart_k"] = torch.tensor([start, 0, 0], dtype=INT32)
        for block in range(4):
            descale = arguments["k_descale"].clone()
            descale[arguments["page_table"][0, block] if is_paged else (0, slice(None), block)] = 0.0
            holds_keys = start < end and start < 16 * (block + 1) and end > 16 * block
            refuses = pytest.raises(ValueError, match=r"^k_descale: expected finite numbers other than 0")
            with refuses if holds_keys else contextlib.nullcontext():
                onepass.attention_decode(**arguments | {"k_descale": descale})

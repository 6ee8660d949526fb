"""The arguments that attention_decode passes to its kernels, which are replaced by recorders."""

import math
from dataclasses import replace
from types import SimpleNamespace

import packages
import pytest
import torch
from launch_arguments import described
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from onepass.kernels.compiler import compile
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import decode as decode_launch_common
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import decode_sm90 as decode_launch_sm90
from onepass.problem.decode import FEW_QUERIES, DecodeInputs, RotaryPositions
from onepass.tiled import cache as tiled_cache
from onepass.validation.decode import check_decode, few_queries

INT32 = torch.int32
OPTIONS = {
    "causal": True,
    "window": None,
    "softcap": None,
    "softmax_scale": None,
    "return_lse": True,
    "rotary_interleaved": False,
    "num_splits": None,
    "split_size": None,
    "check_values": False,
    "kv_block": None,
}


@pytest.fixture
def launched(monkeypatch):
    """A list of pairs, one per kernel: the arguments of `compile.get` and those of the launch."""
    calls = []

    def get(*request):
        return lambda *arguments: calls.append((request, arguments))

    monkeypatch.setattr(compile, "get", get)
    for module in (decode_launch, decode_launch_common):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(decode_launch_sm90, "tile_counter", lambda device: torch.zeros(1, dtype=INT32))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    modules = append_launch, decode_launch, decode_launch_sm90
    caches = [f for module in modules for f in vars(module).values() if hasattr(f, "cache_clear")]
    for cache in caches:
        cache.cache_clear()
    yield calls
    for cache in caches:
        cache.cache_clear()


def inputs_of(
    is_paged=False,
    has_new=False,
    is_rotary=False,
    has_sinks=False,
    batch=2,
    seqlen_q=3,
    room=2048,
    is_packed=False,
    descales=None,  # the shapes of the descales of an e4m3 cache, () for none
    heads=(8, 2),
):
    def zeros(*shape):
        return torch.zeros(shape, dtype=torch.bfloat16)

    leading = (batch * room // 16, 16) if is_paged else (batch, room)
    caches = zeros(*leading, heads[1], 64), zeros(*leading, heads[1], 32)
    if descales is not None:
        caches = tuple(t.to(torch.float8_e4m3fn) for t in caches)
    k_descale, v_descale = (torch.zeros(shape) for shape in descales) if descales else (None, None)
    return DecodeInputs(
        zeros(*((batch * seqlen_q,) if is_packed else (batch, seqlen_q)), heads[0], 64),
        *caches,
        torch.zeros(batch, dtype=INT32),
        page_table=torch.zeros(batch, room // 16, dtype=INT32) if is_paged else None,
        rotary_cos=torch.zeros(100, 8) if is_rotary else None,
        rotary_sin=torch.zeros(100, 8) if is_rotary else None,
        sinks=zeros(heads[0]) if has_sinks else None,
        k_descale=k_descale,
        v_descale=v_descale,
        cu_seqlens_q=torch.zeros(batch + 1, dtype=INT32) if is_packed else None,
        k_new=zeros(batch, 5, heads[1], 64) if has_new else None,
        v_new=zeros(batch, 5, heads[1], 32) if has_new else None,
    )


CALLS = {
    "plain": ({}, {"num_splits": 1}, ["decode_sm80"]),
    "chosen": ({"has_sinks": True}, {}, ["decode_sm80", "merge_splits"]),
    "parts of equal keys": ({"is_paged": True}, {"split_size": 2048}, ["decode_sm80", "merge_splits"]),
    "new keys": (
        {"is_paged": True, "has_new": True, "has_sinks": True},
        {"num_splits": 1, "softcap": 3.0, "window": (3, 4)},
        ["append_to_cache", "decode_sm80"],
    ),
    "rotary": (
        {"has_new": True, "is_rotary": True},
        {"num_splits": 3},
        ["append_to_cache", "decode_sm80", "merge_splits"],
    ),
    "rotary queries alone": (
        {"is_rotary": True, "is_paged": True},
        {"num_splits": 3},
        ["append_to_cache", "decode_sm80", "merge_splits"],
    ),
    "e4m3": ({"descales": ()}, {"num_splits": 1}, ["decode_sm80"]),
    "e4m3, new keys, descales of heads": (
        {"descales": ((), (2,)), "has_new": True, "is_paged": True},
        {"num_splits": 1},
        ["append_to_cache", "decode_sm80"],
    ),
    "e4m3, of pages": (
        {"descales": ((256, 2), (256, 2)), "has_new": True, "is_paged": True, "is_rotary": True},
        {"num_splits": 3, "kv_block": 16},
        ["append_to_cache", "decode_sm80", "merge_splits"],
    ),
    "e4m3, of blocks and entries": (
        {"descales": ((2, 2, 32), (2, 2)), "has_new": True},
        {"num_splits": 1, "kv_block": 64},
        ["append_to_cache", "decode_sm80"],
    ),
    "packed": ({"is_packed": True, "is_paged": True}, {"num_splits": 1}, ["decode_sm80"]),
    "packed, as many splits as the lengths ask for": (
        {"is_packed": True, "is_paged": True},
        {},
        ["decode_sm80", "merge_splits"],
    ),
    "packed, in splits": (
        {"is_packed": True, "has_sinks": True},
        {"num_splits": 3, "max_seqlen_q": 3},
        ["decode_sm80", "merge_splits"],
    ),
}


# the Hopper kernel takes pages of 16 keys, and no descales of blocks
ON_HOPPER = {name: call for name, call in CALLS.items() if "kv_block" not in call[1]}
LAUNCHES = [*((name, decode_launch) for name in CALLS), *((name, decode_launch_sm90) for name in ON_HOPPER)]


def names_of(name, module):
    return [n.replace("decode_sm80", "decode_sm80" if module is decode_launch else "decode") for n in CALLS[name][2]]


@pytest.mark.parametrize(("name", "module"), LAUNCHES)
def test_kernels(launched, name, module):
    given, options, _ = CALLS[name]
    inputs = inputs_of(**given)
    module.decode(check_decode(inputs, **(OPTIONS | options)), inputs)
    assert [request[0] for request, _ in launched] == names_of(name, module)


@pytest.mark.parametrize(("name", "module"), LAUNCHES)
@pytest.mark.parametrize("start", [None, (3, 0)])
def test_a_repeated_call_launches_what_a_call_of_its_own_does(launched, name, module, start):
    given, options, _ = CALLS[name]
    if start is not None and (module is decode_launch_sm90 or given.get("is_packed")):
        pytest.skip("the kernel takes no such calls")
    inputs, other = inputs_of(**given), inputs_of(**given)
    if start is not None:
        inputs = inputs.with_modifiers((torch.tensor(start, dtype=INT32), *(None,) * 7))
    problem = check_decode(inputs, **(OPTIONS | options))
    launch = module.prepare(problem, torch.device("cpu"))
    run = launch.repeated(inputs)
    launched.clear()
    out, lse = run(*other[:3])
    repeated = list(launched)
    launched.clear()
    expected_out, expected_lse = launch(inputs._replace(q=other.q, k_cache=other.k_cache, v_cache=other.v_cache))
    for found, expected in ((out, expected_out), (lse, expected_lse)):
        assert (found.shape, found.stride(), found.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert [arguments_of(call) for call in repeated] == [arguments_of(call) for call in launched]
    results = [arguments for _, arguments in repeated][-1]
    assert any(t is out for t in results) or problem.attention.is_packed


def arguments_of(call):
    """The arguments of a launch, and in place of a tensor its form; of the caches also the place."""

    def described(value):
        if not isinstance(value, torch.Tensor):
            return described_all(value) if isinstance(value, tuple) else value
        return value.shape, value.stride(), value.dtype, value.data_ptr() % 16

    def described_all(values):
        return tuple(described(value) for value in values)

    (name, *_), arguments = call
    # q may have been rotated; e4m3 caches are views
    given = [t.data_ptr() for t in arguments[1:3]] if name in ("decode_sm80", "decode") else []
    return name, given, described_all(arguments)


def test_caches_that_tma_cannot_read(launched):
    """Validation sees that TMA cannot read a cache, unless it has only the strides."""
    inputs = inputs_of()
    problem = check_decode(inputs, **OPTIONS)
    odd = torch.zeros(inputs.v_cache.numel() + 1, dtype=torch.bfloat16)[1:].view(inputs.v_cache.shape)
    with pytest.raises(NotImplementedError, match="v_cache: backend sm90 expects rows at multiples of 16 bytes"):
        decode_launch_sm90.decode(problem, inputs._replace(v_cache=odd))
    assert launched == []


@pytest.mark.parametrize(("split_size", "page_size", "tile_n", "box_rows"), [(64, 16, 64, 16), (256, 192, 128, 64)])
def test_blocks_of_splits_and_pages(split_size, page_size, tile_n, box_rows):
    """A split begins at the start of a block, and a box of a TMA load lies in one page."""
    problem = check_decode(inputs_of(), **OPTIONS)
    problem = replace(problem, split_size=split_size, page_size=page_size)
    config = decode_launch_sm90.config_of(problem, torch.device("cpu"))
    assert config.tile_n == tile_n
    assert split_size % tile_n == 0
    assert decode_launch_sm90.box_rows(problem, config) == box_rows
    assert decode_launch_sm90.split_plan(problem, config, 132)[1:] == (split_size // tile_n, True)


@packages.needs_compiler
@pytest.mark.parametrize(("name", "module"), LAUNCHES)
def test_kernels_are_given_what_they_were_traced_with(launched, name, module):
    """A launch passes as many arguments as the trace, of as many dimensions, and None in the same places."""
    given, options, _ = CALLS[name]
    inputs = inputs_of(**given)
    module.decode(check_decode(inputs, **(OPTIONS | options)), inputs)
    for (_, _, _, trace), arguments in launched:
        traced = trace()[1][:-1]  # without the stream
        assert len(traced) == len(arguments)
        for stand_in, value in zip(traced, arguments, strict=True):
            assert described(stand_in) == described(value)
            if isinstance(value, torch.Tensor):
                # descales may have any stride
                assert value.stride(-1) == 1 or (value.dtype == torch.float32 and value.dim() == 3)


@pytest.mark.parametrize(("name", "module"), LAUNCHES)
def test_no_value_is_read_on_the_host(launched, monkeypatch, name, module):
    """The arguments are fake tensors, which have no values: reading one raises."""
    for reader in (decode_launch, append_launch):
        monkeypatch.setattr(reader, "vector_bytes", lambda *tensors: 16)
    monkeypatch.setattr(decode_launch_sm90, "is_aligned", lambda t: True)
    monkeypatch.setattr(decode_launch_sm90, "aligned", lambda t: t)
    given, options, _ = CALLS[name]
    with FakeTensorMode():
        inputs = inputs_of(**given)
        problem = check_decode(inputs, **(OPTIONS | options))
        out, lse = module.decode(problem, inputs)
        shapes = ((6, 8, 32), (8, 6)) if given.get("is_packed") else ((2, 3, 8, 32), (2, 8, 3))
        assert (out.shape, lse.shape) == shapes
        assert [request[0] for request, _ in launched] == names_of(name, module)
        checking = check_decode(inputs, **(OPTIONS | options | {"check_values": True}))
        with pytest.raises(DataDependentOutputException):
            module.decode(checking, inputs)


def test_workspace_is_as_large_as_said(launched):
    import onepass

    inputs = inputs_of()
    decode_launch.decode(check_decode(inputs, **(OPTIONS | {"num_splits": 5})), inputs)
    out, lse = launched[0][1][3:5]
    said = onepass.split_workspace_bytes(5, batch=2, seqlen_q=3, num_heads_q=8, head_dim_v=32)
    assert out.nbytes + lse.nbytes == said


def test_parts_of_equal_keys_follow_the_cache(launched):
    inputs = inputs_of(room=2048)
    decode_launch.decode(check_decode(inputs, **(OPTIONS | {"split_size": 128})), inputs)
    assert launched[0][1][-5:-3] == (16, 128 // 64)


NO_HEADS = [{"heads": (0, 2), "is_packed": True}, {"heads": (0, 0)}, {"heads": (0, 0), "has_new": True}]
NO_HEADS += [{"heads": (0, 2), "is_rotary": True}, {"heads": (0, 0), "has_new": True, "is_rotary": True}]


@pytest.mark.parametrize("changes", NO_HEADS, ids=str)
@pytest.mark.parametrize("module", [decode_launch, decode_launch_sm90])
def test_without_heads_nothing_is_launched(launched, changes, module):
    inputs = inputs_of(**changes)
    asked = check_decode(inputs, **OPTIONS)
    out, lse = module.decode(asked, inputs)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert launched == []
    assert module.compile_requests(asked, inputs, inputs.q.device) == []


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("changes", [{"batch": 0}, {"seqlen_q": 0}, {"room": 0}])
@pytest.mark.parametrize("module", [decode_launch, decode_launch_sm90])
def test_without_keys_nothing_is_launched(launched, changes, has_sinks, is_packed, module):
    inputs = inputs_of(**changes, is_packed=is_packed)
    if has_sinks:
        inputs = inputs._replace(sinks=torch.randn(8))
    if is_packed and changes == {"room": 0}:
        # the last two rows belong to no sequence
        inputs = inputs._replace(cu_seqlens_q=torch.tensor([0, 3, 4], dtype=INT32))
    asked = check_decode(inputs, **OPTIONS)
    out, lse = module.decode(asked, inputs)
    assert (out == 0).all()
    expected = torch.full_like(lse, -torch.inf)
    if has_sinks:
        expected[..., : 4 if is_packed else None] = inputs.sinks[:, None]
    assert torch.equal(lse, expected)
    assert launched == []
    assert module.compile_requests(asked, inputs, inputs.q.device) == []


@pytest.mark.parametrize("interleaved", [False, True])
def test_halves_are_exchanged_by_whole_vectors(interleaved):
    for columns in range(1, 33):
        tables = {f"rotary_{name}": torch.zeros(100, columns) for name in ("cos", "sin")}
        inputs = inputs_of(has_new=True)._replace(**tables)
        problem = check_decode(inputs, **OPTIONS | {"rotary_interleaved": interleaved})
        arguments = append_launch.append_arguments(problem, inputs, inputs.q)
        width = 16 if interleaved else math.gcd(16, columns * inputs.q.itemsize)
        assert append_launch.AppendKey.of(problem, inputs, arguments).vector_bytes == width


@pytest.mark.parametrize("module", [decode_launch, decode_launch_sm90])
@pytest.mark.parametrize("is_rotary", [False, True])
@pytest.mark.parametrize("empty", [{"heads": (0, 2)}, {"seqlen_q": 0}], ids=str)
def test_without_queries_new_keys_are_appended(launched, empty, is_rotary, module):
    """New keys are appended by the kernel of other calls, which is given no tensor without elements."""
    inputs = inputs_of(has_new=True, is_rotary=is_rotary, **empty)
    asked = check_decode(inputs, **OPTIONS)
    module.decode(asked, inputs)
    ((request, arguments),) = launched
    assert request[0] == "append_to_cache"
    assert (arguments[0] is not None) == is_rotary
    assert all(t.numel() > 0 for t in arguments if isinstance(t, torch.Tensor))
    assert arguments[-2:] == (5, 10)  # the rows of one batch entry and those of all
    assert [r[:3] for _, r in module.compile_requests(asked, inputs, inputs.q.device)] == [request[:3]]


@pytest.mark.parametrize(
    ("module", "changes", "words"),
    [
        (decode_launch, {"head_dim": 63}, "even head dims"),
        (decode_launch, {"head_dim_v": 31}, "even head dims"),
        (decode_launch, {"dtype": torch.float32}, "expected q in bfloat16 or float16"),
        (decode_launch, {"kv_block": 8}, "multiple of 16 keys"),
        (
            decode_launch_sm90,
            {"head_dim": 72},
            "head_dim: expected a multiple of 16 up to 128 with an e4m3 cache, got 72",
        ),
        (decode_launch_sm90, {"head_dim_v": 144}, "head_dim_v: expected a multiple of 16 up to 128"),
        (decode_launch_sm90, {"kv_block": 64}, "expected descales of heads, got one for each block of 64 keys"),
        (decode_launch_sm90, {"dtype": torch.float32}, "expected q in bfloat16 or float16"),
        (decode_launch_sm90, {"kv_dtype": None, "dtype": torch.float32}, "expected q in bfloat16 or float16"),
        (decode_launch_sm90, {"has_alibi": True}, "alibi_slopes: expected none"),
        (decode_launch_sm90, {"has_seqstart_k": True}, "seqstart_k: expected none"),
        (decode_launch_sm90, {"kv_dtype": None, "has_aligned_rows": False}, "multiples of 16 bytes"),
        (decode_launch_sm90, {"kv_dtype": None, "page_size": 24}, "multiple of 16 keys, got 24"),
    ],
)
def test_what_the_kernels_do_not_take(module, changes, words):
    asked = check_decode(inputs_of(descales=()), **OPTIONS)
    own = {name: value for name, value in changes.items() if hasattr(asked, name)}
    attention = replace(asked.attention, **{n: v for n, v in changes.items() if n not in own})
    assert words in module.unsupported(replace(asked, attention=attention, **own))
    in_16_bits = replace(asked, attention=replace(attention, kv_dtype=None, head_dim=63, dtype=torch.float16))
    assert decode_launch.unsupported(in_16_bits) is None


@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
@pytest.mark.parametrize(
    ("heads", "strides", "offset", "is_aligned"),
    [
        (2, (4096, 128, 64), 0, True),
        (2, (4096, 128, 64), 8, True),
        (2, (4096, 128, 64), 4, False),
        (2, (4224, 132, 64), 0, False),
        (2, (4224, 136, 68), 0, False),
        (1, (4096, 128, 3), 0, True),  # the stride of a single head says nothing
        (2, (4100, 128, 64), 0, False),
    ],
)
def test_rows_of_caches_at_multiples_of_16_bytes(name, heads, strides, offset, is_aligned):
    inputs = inputs_of(room=16, heads=(8, heads))
    columns = getattr(inputs, name).shape[-1]
    memory = torch.zeros(10000, dtype=torch.bfloat16).as_strided((2, 16, heads, columns), (*strides, 1), offset)
    assert check_decode(inputs._replace(**{name: memory}), **OPTIONS).has_aligned_rows == is_aligned


def test_few_packed_queries_are_a_hint():
    offsets = torch.zeros(3, dtype=INT32)
    found = [few_queries(n, offsets) for n in (None, 0, 1, FEW_QUERIES, FEW_QUERIES + 1, torch.tensor(3))]
    assert found == [None, 0, 1, FEW_QUERIES, None, None]


def test_packed_queries_are_tiled_by_the_most_that_a_sequence_has(monkeypatch):
    monkeypatch.setattr(decode_launch, "arch_of", lambda device: "sm_90a")
    packed, found = inputs_of(is_packed=True, seqlen_q=100), set()
    for n in (1, 32):
        dense = inputs_of(seqlen_q=n)
        of_packed = check_decode(packed, **OPTIONS, max_seqlen_q=n)
        config = decode_launch.config_of(of_packed, packed.q.device)
        assert config == decode_launch.config_of(check_decode(dense, **OPTIONS), dense.q.device)
        found.add(config)
    assert len(found) == 2


def test_check_values(launched):
    inputs = inputs_of()._replace(cache_seqlens=torch.tensor([1, 2049], dtype=INT32))
    with pytest.raises(ValueError, match=r"cache_seqlens: expected 0 to 2048, .* got 2049"):
        decode_launch.decode(check_decode(inputs, **(OPTIONS | {"check_values": True})), inputs)
    for inputs, message in (
        (inputs_of(is_paged=True, has_new=True), r"page_table\[0, 0\]: expected a page with rows"),
        (inputs_of(descales=((), ()))._replace(cache_seqlens=torch.ones(2, dtype=INT32)), "k_descale: expected finite"),
    ):
        with pytest.raises(ValueError, match=message):
            decode_launch.decode(check_decode(inputs, **(OPTIONS | {"check_values": True})), inputs)
    assert launched == []


@pytest.mark.parametrize(("strides", "offset"), [((65, 1), 0), ((64, 1), 1)])
def test_rows_of_e4m3_that_begin_at_odd_addresses_are_refused(launched, strides, offset):
    """Rows of e4m3 at odd addresses are refused before any write: copies and ldmatrix take two values at once."""
    inputs = inputs_of(room=16, descales=(), has_new=True)
    memory = torch.zeros(2 * 16 * 2 * 65 + 1, dtype=torch.uint8).view(torch.float8_e4m3fn)
    odd = memory.as_strided((2, 16, 2, 64), (32 * strides[0], 2 * strides[0], *strides), offset)
    inputs = inputs._replace(k_cache=odd)
    with pytest.raises(NotImplementedError, match="e4m3 cache: expected rows at even addresses"):
        decode_launch.decode(check_decode(inputs, **OPTIONS), inputs)
    assert launched == []


def test_parts_that_begin_within_a_block_are_refused():
    problem = replace(check_decode(inputs_of(seqlen_q=100), **OPTIONS), split_size=100)
    config = decode_launch_sm90.config_of(problem, torch.device("cpu"))
    assert config.tile_n == 64
    with pytest.raises(NotImplementedError, match="split_size: expected a multiple of the 64 keys of a step, got 100"):
        decode_launch_sm90.split_plan(problem, config, 132)


@packages.needs_compiler
def test_what_splits_and_pages_do_not_take():
    problem = check_decode(inputs_of(seqlen_q=100, is_paged=True), **OPTIONS)
    config = decode_launch_sm90.config_of(problem, torch.device("cpu"))
    for changes in ({"cluster_size": 2}, {"warp_specialized": False, "overlap_tiles": False}):
        trace = decode_launch_sm90.compile_request(problem, replace(config, **changes), True)[3]
        with pytest.raises(NotImplementedError, match="splits and pages: expected warp_specialized, cluster_size=1"):
            trace()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("given", [(), ("q",), ("k",), ("q", "k")], ids=str)
def test_rows_of_the_rotary_tables_are_used_before_the_kernels(given, interleaved):
    """The kernels rotate by positions of keys alone, so that queries and new keys are rotated as `tiled` does it."""
    inputs = inputs_of(has_new=True, is_rotary=True)
    angles = torch.arange(100)[:, None] * torch.linspace(0.1, 1.0, 8)
    positions = {"q": torch.tensor([[4, 0, 99]], dtype=INT32), "k": torch.randint(0, 99, (2, 5), dtype=INT32)}
    inputs = inputs._replace(
        q=torch.randn_like(inputs.q),
        k_new=torch.randn_like(inputs.k_new),
        cache_seqlens=torch.tensor([3, 40], dtype=INT32),
        rotary_cos=angles.cos(),
        rotary_sin=angles.sin(),
        rotary_positions=RotaryPositions(**{name: positions[name] for name in given}),
    )
    problem = check_decode(inputs, **(OPTIONS | {"rotary_interleaved": interleaved}))
    found = decode_launch_common.rotated(problem, inputs)
    assert found.rotary_cos is found.rotary_sin is found.rotary_positions is None
    assert torch.equal(found.q, tiled_cache.rotated_queries(problem, inputs))
    tiled_cache.append(problem, inputs)
    for entry, length in enumerate((3, 40)):
        assert torch.equal(found.k_new[entry], inputs.k_cache[entry, length : length + 5])
    unrotated = inputs._replace(rotary_cos=None, rotary_sin=None)
    assert decode_launch_common.rotated(problem, unrotated).q is inputs.q

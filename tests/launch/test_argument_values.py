"""What launches compute for their kernels on the host: windows, scales, copies, descales, terms, skipped blocks."""

import itertools
import math
import random
from dataclasses import replace

import pytest
import torch

import onepass
from onepass.kernels.arguments import BackwardSm90Arguments, PreprocessArguments
from onepass.kernels.config import BackwardConfigSm80, BackwardConfigSm90
from onepass.kernels.launch import arguments, backward_sm90, forward_sm80, forward_sm90, modifiers
from onepass.kernels.launch.backward import BackwardLaunch, counts
from onepass.kernels.launch.decode import SplitPlan
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers
from onepass.problem.decode import DecodeInputs, DecodeProblem, rounded_length
from onepass.problem.descales import descale_of_keys
from onepass.quantization import codec

INT32, E4M3 = torch.int32, torch.float8_e4m3fn
PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 2, 30, 50, 4, 2, 64, 64, softmax_scale=0.25, mask=Mask())


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(), (None, None)),
        (Mask(3, 0), (3, 0)),
        (Mask(2**48, 2**48), (50, 50)),
        (Mask(-(2**48), None), (-50, None)),
        (Mask(None, -(2**48)), (None, -50)),
    ],
)
def test_a_window_fits_into_32_bits(mask, expected):
    assert arguments.window_bounds(replace(PROBLEM, mask=mask)) == expected
    assert arguments.window_bounds(replace(PROBLEM, mask=mask, seqlen_q=50, seqlen_k=30)) == expected
    # positions may be beyond every key
    far = tuple(side if side is None or abs(side) < 50 else math.copysign(2**30, side) for side in expected)
    assert arguments.window_bounds(replace(PROBLEM, mask=mask, has_q_positions=True)) == far


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_scales_give_the_scores_in_base_2(softcap):
    scale_log2, tanh_scale = arguments.score_scales(replace(PROBLEM, softcap=softcap))
    for s in (-40.0, -3.0, 0.5, 20.0):
        score = s * PROBLEM.softmax_scale
        score = score if softcap is None else softcap * math.tanh(score / softcap)
        # the kernel's formula, see `soft_cap` of the device code
        unit = s if tanh_scale is None else 1 - 2 / (1 + 2 ** (s * tanh_scale))
        assert scale_log2 * unit == pytest.approx(score / math.log(2))


def any_layout(rng, dtype):
    """A view of memory with random strides, sizes of 1 among them, and a random first element."""
    rows, heads, columns = rng.choice([1, 3]), rng.choice([1, 2]), rng.choice([1, 3, 4, 8, 14, 16, 24])
    row = heads * columns + rng.choice([0, 0, 1, 2, 4, 8])
    head = columns if rng.random() < 0.7 else row // heads
    offset = rng.choice([0, 0, 1, 2, 4, 8])
    memory = torch.zeros(4096, dtype=torch.uint8).view(dtype)
    return memory.as_strided((rows, heads, columns), (row, head, 1), offset)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=str)
def test_copies_are_as_wide_as_addresses_rows_and_strides_allow(dtype):
    rng = random.Random(0)
    found = set()
    for _ in range(300):
        tensors = [any_layout(rng, dtype) for _ in range(rng.choice([1, 1, 2]))]
        numbers = [t.shape[-1] for t in tensors] + [t.storage_offset() for t in tensors]
        numbers += [t.stride(d) for t in tensors for d in (0, 1) if t.shape[d] > 1]
        bytes_ = math.gcd(16, *(n * dtype.itemsize for n in numbers))
        if bytes_ >= min(arguments.VECTOR_BYTES):
            assert arguments.vector_bytes(*tensors) == bytes_
            found.add(bytes_)
        for t in tensors:
            multiple = 16 if dtype == E4M3 else 8
            fits = all(t.stride(d) % multiple == 0 for d in (0, 1) if t.shape[d] > 1)
            assert arguments.is_aligned(t) == (fits and t.storage_offset() * dtype.itemsize % 16 == 0)
            assert (arguments.aligned(t) is t) == arguments.is_aligned(t)
    assert len(found) > 2


def test_every_shape_of_a_descale_says_what_it_says_by_keys():
    """Strides of 0 stand for what keys, heads or entries share."""
    q, cache = torch.zeros(3, 1, 4, 16), torch.zeros(3, 40, 2, 16).to(E4M3)
    pages, table = torch.zeros(9, 16, 2, 16).to(E4M3), torch.tensor([[3, 1, 0], [8, 2, 4], [5, 6, 7]], dtype=INT32)
    for shape, kv_block, is_paged in (
        ((), None, False),
        ((2,), None, False),
        ((3, 2), None, False),
        ((3, 2, 3), 16, False),
        ((2,), 16, False),
        ((3, 2), 16, False),
        ((2,), 16, True),
        ((9, 2), 16, True),
        ((3, 2), None, True),
    ):
        descale = torch.rand(shape)
        kept = pages if is_paged else cache
        inputs = DecodeInputs(q, kept, kept, torch.full((3,), 40, dtype=INT32), table if is_paged else None)
        inputs = inputs._replace(k_descale=descale, v_descale=2 * descale)
        attention = inputs.attention(softmax_scale=1.0, mask=Mask(), softcap=None, deterministic=False)
        problem = DecodeProblem.of(attention, inputs, kv_block=kv_block)
        k_descale, v_descale, block = arguments.descale_arguments(problem, inputs)
        assert torch.equal(v_descale, 2 * k_descale)
        assert block == (None if is_paged else kv_block)
        entry, key = torch.arange(3)[:, None].expand(3, 40), torch.arange(40).expand(3, 40)
        expected = descale_of_keys(descale, inputs, kv_block, entry, key)[..., 0].expand(3, 40, 2)
        by_block = kv_block is not None
        outer = table.long()[entry, key // 16] if is_paged and by_block else entry
        last = key // kv_block if by_block and not is_paged else torch.zeros_like(key)
        found = k_descale[outer[..., None], torch.arange(2), last[..., None]]
        assert torch.equal(found, expected), (shape, kv_block, is_paged)


def posed(**given):
    q, k = torch.zeros(2, 30, 4, 64), torch.zeros(2, 50, 2, 64)
    inputs = AttentionInputs(q, k, k, *[None] * 4, Modifiers(**given))
    problem = AttentionProblem.of(inputs, softmax_scale=0.25, mask=Mask(), softcap=None, deterministic=False)
    return problem, inputs


def test_terms_reach_a_kernel_with_rows_first():
    ranges, positions = torch.randint(0, 50, (1, 4, 30, 2)).int(), torch.randint(0, 50, (2, 30)).int()
    slopes, bias = torch.rand(4), torch.rand(2, 1, 1, 50, dtype=torch.float64)
    problem, inputs = posed(key_ranges=ranges, q_positions=positions, alibi_slopes=slopes, bias=bias)
    found = modifiers.arguments_of(problem, inputs.modifiers)
    assert torch.equal(found.ranges[7, :, 3, 1], ranges[0, 3, 7])
    assert torch.equal(found.positions[:, 1], positions[1])
    assert torch.equal(found.slopes, slopes[:, None].expand(4, 2))
    # with positions the only row of a bias is that of every position; a kernel reads no float64
    assert found.bias.shape == (2**30, 50, 4, 2)
    assert found.bias.dtype == torch.float32
    assert torch.equal(found.bias[2**30 - 1, :, 3, 1], bias[1, 0, 0].float())
    assert found.term_scale == pytest.approx(1 / 0.25)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 50), (30, 1), (30, 50)])
def test_a_bias_is_seen_in_full(rows, columns):
    bias = torch.rand(1, 4, rows, columns)
    problem, inputs = posed(bias=bias)
    seen = modifiers.arguments_of(problem, inputs.modifiers).bias
    assert torch.equal(seen, bias.expand(2, 4, 30, 50).permute(2, 3, 1, 0))


def test_dropout_knows_the_heads_of_the_whole_call():
    state = torch.tensor([5, 6])
    problem, inputs = posed(dropout_state=state)
    problem = replace(problem, dropout_p=0.5)

    def heads_of(problem):
        found = modifiers.arguments_of(problem, inputs.modifiers)
        return found.first_head, found.all_heads

    assert heads_of(problem) == (0, 4)
    problem = replace(problem, first_head=3, all_heads=12)
    assert heads_of(problem) == (3, 12)


@pytest.mark.parametrize(
    ("mask", "lengths", "may_skip"),
    [
        (Mask(), (30, 50), False),
        (Mask(None, 0), (30, 50), False),
        (Mask(None, 0), (50, 30), True),
        (Mask(None, 20), (50, 30), False),
        (Mask(None, -20), (30, 50), False),
        (Mask(None, -21), (30, 50), True),
        (Mask(0, None), (30, 50), False),
        (Mask(-1, None), (30, 50), True),
    ],
)
def test_blocks_of_queries_that_may_see_no_key(mask, lengths, may_skip):
    """Nobody writes dq of a block that no tile of keys visits."""
    problem = replace(PROBLEM, mask=mask, seqlen_q=lengths[0], seqlen_k=lengths[1])
    launch = BackwardLaunch(problem, BackwardConfigSm80(), *[None] * 5, 1, 1)
    assert launch.may_skip_blocks is may_skip
    used = BackwardLaunch(replace(problem, has_seqused_k=True), BackwardConfigSm80(), *[None] * 5, 1, 1)
    assert used.may_skip_blocks


ROW_RANGES = {"has_modifiers", "has_modifiers_beside_starts", "has_row_ranges", "has_intervals", "hides_pairs"}
TERMS = {"has_modifiers", "has_modifiers_beside_starts", "adds_terms"}
# what follows from each option alone, which decides what kernels are given
CONSEQUENCES = (
    ({}, set()),
    *(({name: True}, set()) for name in ("has_sinks", "has_seqused_k", "is_packed", "deterministic")),
    ({"softcap": 3.0}, set()),
    *(({"mask": mask}, {"hides_pairs"}) for mask in (Mask(3, None), Mask(None, 0), Mask(3, 3))),
    ({"has_seqstart_k": True}, {"has_modifiers", "has_intervals", "hides_pairs"}),
    ({"has_key_ranges": True}, ROW_RANGES),
    ({"has_q_positions": True}, ROW_RANGES),
    ({"has_alibi": True}, TERMS),
    ({"bias_dtype": torch.bfloat16}, TERMS | {"has_bias", "hides_pairs"}),  # -inf hides a pair
    ({"dropout_p": 0.1}, {"has_modifiers", "has_modifiers_beside_starts"}),
    ({"kv_dtype": E4M3}, {"has_e4m3_cache"}),
    *(({name: 0}, {"is_empty"}) for name in ("batch", "seqlen_q", "seqlen_k", "num_heads_q")),
)


@pytest.mark.parametrize(("changes", "expected"), CONSEQUENCES)
def test_what_follows_from_an_option(changes, expected):
    problem, names = replace(PROBLEM, **changes), set().union(*(names for _, names in CONSEQUENCES))
    assert {name for name in names if getattr(problem, name)} == expected


def test_rounded_lengths_are_few_and_near():
    """At most 64 keys or an eighth above, and no more than eight for each power of two."""
    lengths = range(1, 2**15)
    rounded = [rounded_length(n) for n in lengths]
    assert all(n <= r < n + max(64, n / 8 + 1) and r % 64 == 0 for n, r in zip(lengths, rounded, strict=True))
    assert rounded == sorted(rounded)
    assert len({r for r in rounded if 2**14 < r <= 2**15}) == 8
    assert len({r for r in rounded if r <= 512}) == 8


@pytest.fixture
def _arbitrary_values():
    """torch.empty gives NaN, and the largest integer, as memory from an earlier call may."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("_arbitrary_values")
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("lengths", [(30, 50), (50, 30)])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("private_dq", [False, True])
def test_what_a_backward_prepares_for_its_kernels(private_dq, is_packed, lengths, has_sinks, monkeypatch):
    """No kernel writes dq and the statistics of rows of no sequence, dq of rows that no tile visits, and counters."""
    config = BackwardConfigSm90(private_dq=private_dq)
    problem = replace(PROBLEM, has_sinks=has_sinks, is_packed=is_packed, deterministic=True, mask=Mask(None, 0))
    problem = replace(problem, seqlen_q=lengths[0], seqlen_k=lengths[1])
    given = {}

    def kernel(names=()):
        return lambda *passed: given.update((n, t) for n, t in zip(names, passed, strict=False) if t is not None)

    for name in ("tile_counter", "zero_counters"):
        monkeypatch.setattr(backward_sm90, name, lambda *_: None)
    classes = PreprocessArguments, BackwardSm90Arguments
    kernels = *(kernel(names._fields) for names in classes), kernel(), kernel()
    launch = backward_sm90.Launch(problem, config, *kernels, None, 4, 1, 1)
    rows = (lambda n: (n,)) if is_packed else (lambda n: (2, n))
    q, k = (torch.zeros(*rows(n), h, 64, dtype=torch.bfloat16) for n, h in zip(lengths, (4, 2), strict=True))
    offsets = torch.zeros(6, dtype=INT32)[::2] if is_packed else None
    inputs = AttentionInputs(q, k, k, torch.zeros(4) if has_sinks else None, offsets, offsets)
    lse, dlse = (torch.zeros(*q.shape[:-1]).transpose(-1, -2) for _ in range(2))
    dq, *_ = launch(inputs, q, lse, q, dlse)
    assert all(given[name].is_contiguous() for name in ("lse", "dlse"))
    assert all(given[name].is_contiguous() for name in ("cu_seqlens_q", "cu_seqlens_k") if is_packed)
    assert (dq == 0).all() == (is_packed or (private_dq and lengths[0] > lengths[1]))
    minus_lse, minus_delta = given["stats"].split(config.tile_m, 1)
    assert (minus_lse == -torch.inf).all() == (minus_delta == 0).all() == (is_packed and has_sinks)
    assert ("turns" in given) == config.adds_in_turns(problem)
    if "turns" in given:
        assert (given["turns"] == 0).all() == (not config.rows_in_background(problem))


def test_packed_sequences_have_blocks_and_tiles_enough():
    """The lengths are on the GPU: the numbers of blocks of queries and of tiles of keys are bounds."""
    config, rng = BackwardConfigSm90(), random.Random(0)
    most_blocks = most_tiles = 0.0
    for _ in range(200):
        batch, size = rng.choice([1, 2, 7]), rng.choice([1, 70, 300])
        lengths = [rng.choice([0, 1, size, rng.randrange(size + 1)]) for _ in range(batch)]
        problem = replace(PROBLEM, is_packed=True, batch=batch, seqlen_q=sum(lengths), seqlen_k=sum(lengths))
        blocks, tiles = counts(problem, config)
        needed = sum(-(-n // config.tile_m) for n in lengths), 2 * sum(-(-n // config.tile_n) for n in lengths)
        assert needed <= (blocks, tiles)
        # the blocks of a sequence begin behind those of the sequences before it
        begins = [start // config.tile_m + b for b, start in enumerate(itertools.accumulate(lengths, initial=0))]
        for n, first, following in zip(lengths, begins, [*begins[1:-1], blocks], strict=False):
            assert first - (-n // config.tile_m) <= following
        most_blocks, most_tiles = max(most_blocks, needed[0] / blocks), max(most_tiles, needed[1] / max(tiles, 1))
    assert most_blocks == most_tiles == 1
    dense = replace(PROBLEM, seqlen_q=3 * config.tile_m + 1, seqlen_k=2 * config.tile_n + 1)
    assert counts(dense, config) == (4, 3 * 2 * 2)


@pytest.mark.parametrize("granularity", codec.GRANULARITIES)
@pytest.mark.parametrize("is_packed", [False, True])
def test_descales_of_any_granularity_reach_the_kernel_by_heads_and_blocks(is_packed, granularity):
    lengths = torch.tensor([0, 30, 150], dtype=INT32) if is_packed else None
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lengths) if is_packed else {}
    tensors = (torch.randn(*((150,) if is_packed else (2, 150)), h, 32, dtype=torch.bfloat16) for h in (4, 2, 2))
    quantized = onepass.quantize_fp8(*tensors, granularity=granularity, **offsets)
    inputs = AttentionInputs(quantized.q, quantized.k, quantized.v, None, lengths, lengths)
    options = {"softmax_scale": 0.5, "mask": Mask(), "softcap": None, "deterministic": False}
    problem = AttentionProblem.of(inputs, quantization=quantized.quantization, **options)
    found = forward_sm90.kernel_scales(problem, quantized.descales)
    block = {"row": 1, "block": 64}.get(granularity)
    assert found[3] == (block or forward_sm90.ANY_ROWS)
    for seen, descale, heads in zip(found, quantized.descales, (4, 2, 2), strict=False):
        assert seen.data_ptr() == descale.data_ptr()
        by_blocks = (descale[None] if is_packed else descale) if block else descale[..., None]
        assert torch.equal(seen, by_blocks.expand(2, heads, by_blocks.shape[-1]))


def test_results_in_float32_are_written_by_the_merge():
    problem = DecodeProblem(PROBLEM, num_splits=1)
    assert SplitPlan.of(problem, 64, lambda: 7) == (1, 0, False)
    assert SplitPlan.of(replace(problem, attention=replace(PROBLEM, float32_out=True)), 64, lambda: 7) == (1, 0, True)
    assert SplitPlan.of(replace(problem, num_splits=None), 64, lambda: 7) == (7, 0, True)
    assert SplitPlan.of(replace(problem, num_splits=None, split_size=64), 64, lambda: 7) == (1, 1, True)


def test_a_launch_serves_caches_of_nearly_one_length_where_nothing_goes_with_the_length():
    problem = DecodeProblem(replace(PROBLEM, seqlen_k=130))
    assert problem.of_rounded_length.attention.seqlen_k == rounded_length(130) > 130
    for fixed in (
        replace(problem, page_size=16),
        replace(problem, kv_block=16),
        replace(problem, split_size=64),
        replace(problem, attention=replace(problem.attention, is_packed=True)),
        replace(problem, attention=replace(problem.attention, bias_dtype=torch.float32)),
    ):
        assert fixed.of_rounded_length is fixed


def test_inputs_without_modifiers_have_no_terms():
    q = torch.zeros(2, 30, 4, 64)
    assert modifiers.arguments_of(PROBLEM, AttentionInputs(q, q, q).modifiers) is None


def test_a_scale_that_is_not_above_0_needs_a_softcap_on_ampere():
    for scale in (0.0, -0.5):
        problem = replace(PROBLEM, softmax_scale=scale)
        assert "softmax_scale: expected a number above 0" in forward_sm80.unsupported(problem)
        assert forward_sm80.unsupported(replace(problem, softcap=5.0)) is None

"""What launches make of modifiers, on the CPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from onepass.kernels.arguments import BlockListsArguments
from onepass.kernels.config import BackwardConfigSm80
from onepass.kernels.launch import block_lists, modifiers
from onepass.problem import AttentionInputs, AttentionProblem, Blocks, Mask, Modifiers

TILE = 64, 128


def posed(lead: tuple, heads: tuple, rows: int, keys: int, **given):
    """A problem with these modifiers, and its inputs."""
    q, k = (torch.zeros(*lead, n, h, 64).half() for n, h in ((rows, heads[0]), (keys, heads[1])))
    names = {name: given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k") if name in given}
    lengths = (names.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    blocks = Blocks(given.pop("kinds"), (64, 128)) if "kinds" in given else None
    inputs = AttentionInputs(q, k, k, None, *lengths, Modifiers(**given), blocks=blocks)
    return AttentionProblem.of(inputs, softmax_scale=0.1, mask=Mask(), softcap=None, deterministic=False), inputs


def ranges(*shape: int):
    return torch.zeros(*shape, 300, 2, dtype=torch.int32)


def kinds(*shape: int):
    return torch.zeros(*shape, 5, 3, dtype=torch.int8)


LENGTHS = torch.tensor([0, 100, 300], dtype=torch.int32)
OFFSETS = {"cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}
HIDING = {
    "seqstart_k": LENGTHS[:2],
    "key_ranges": ranges(2, 4),
    "q_positions": LENGTHS.new_zeros(2, 300),
    "query_ranges": ranges(2, 1),
    "kinds": kinds(1, 4),
}


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize(
    ("lead", "given", "entries", "by_head"),
    [
        ((2,), {"key_ranges": ranges(1, 1)}, 1, False),
        ((2,), {"key_ranges": ranges(1, 4)}, 1, True),
        ((2,), {"key_ranges": ranges(2, 1)}, 2, False),
        ((2,), {"key_ranges": ranges(2, 4)}, 2, True),
        ((2,), {"query_ranges": ranges(1, 1)}, 1, False),
        ((2,), {"query_ranges": ranges(2, 4)}, 2, True),
        ((2,), {"query_ranges": ranges(1, 1), "key_ranges": ranges(1, 4)}, 1, True),
        ((2,), {"kinds": kinds(1, 1)}, 1, False),
        ((2,), {"kinds": kinds(1, 4)}, 1, True),
        ((2,), {"kinds": kinds(2, 1)}, 2, False),
        ((2,), {"key_ranges": ranges(1, 1), "seqused_k": LENGTHS[1:]}, 2, False),
        ((2,), {"key_ranges": ranges(1, 1), "seqstart_k": LENGTHS[:2]}, 2, False),
        ((2,), {"q_positions": torch.zeros(1, 300, dtype=torch.int32)}, 1, False),
        ((2,), {"q_positions": torch.zeros(2, 300, dtype=torch.int32)}, 2, False),
        ((), {"key_ranges": ranges(1)} | OFFSETS, 1, False),
        ((), {"key_ranges": ranges(4)} | OFFSETS, 1, True),
        ((), {"kinds": kinds(2, 1)} | OFFSETS, 1, False),
        ((), {"query_ranges": ranges(4)} | OFFSETS, 1, True),
    ],
)
def test_lists_are_made_once_for_what_shares_them(lead, given, entries, by_head, of_keys):
    problem, inputs = posed(lead, (4, 2), 300, 300, **given)
    problem, made = replace(problem, mask=Mask(5, -7), deterministic=True), []
    tensors = modifiers.arguments_of(problem, inputs.modifiers, inputs.blocks)
    kernel = block_lists.kernel_of(problem, TILE, of_keys)
    found = block_lists.with_lists(lambda *arguments: made.append(arguments), kernel, problem, tensors, inputs)
    (passed,) = (BlockListsArguments(*arguments) for arguments in made)
    heads, group = ((2, 2) if of_keys else (4, 1)) if by_head else (1, 1)
    assert (passed.seqlen_q, passed.seqlen_k, passed.group) == (300, 300, group)
    assert all(t is given for t, given in zip(passed[9:12], inputs[4:7], strict=True))
    assert passed[12:] == (5, -7)
    hiding = {name: t for name, t in tensors._asdict().items() if t is not None}
    assert {name: t for name, t in passed.modifiers._asdict().items() if t is not None} == hiding
    blocks = [300 // size + 3 if problem.is_packed else -(-300 // size) for size in TILE]
    assert passed.of_queries.shape == (entries, heads, blocks[0], 4)
    assert (passed.of_keys is not None) == problem.has_query_ranges
    assert passed.of_keys is None or passed.of_keys.shape == (entries, heads, blocks[1], 4)
    longest = blocks
    if problem.is_packed and inputs.blocks is not None:  # a mask has blocks enough for the longest sequence
        longest = [
            min(n, -(-count * block // size))
            for n, count, block, size in zip(blocks, (5, 3), (64, 128), TILE, strict=True)
        ]
    tiles, visited = (blocks[1], longest[0]) if of_keys else (blocks[0], longest[1])
    assert passed.numbers.shape == (entries, heads, tiles, visited)
    assert passed.counts.shape == (entries, heads, tiles, 2)
    assert (passed.turns is not None) == of_keys
    for name in ("numbers", "counts", "turns") if of_keys else ("numbers", "counts"):
        own, view = getattr(passed, name), getattr(found, name)
        assert view.shape == (*own.shape[:1:-1], 2 if of_keys else 4, 1 if problem.is_packed else 2)
        assert view.data_ptr() == own.data_ptr()
        assert (view.stride(2) > 0, view.stride(3) > 0) == (by_head, entries > 1 or problem.is_packed)
    assert found._replace(numbers=None, counts=None, turns=None) == tensors


@pytest.mark.parametrize(
    ("tile", "most", "of_keys", "longest"),
    [
        ((64, 128), (2, 4), False, 2),
        ((64, 64), (1, 4), False, 2),
        ((192, 128), (1, 4), False, 3),
        ((192, 192), (1, 4), False, 2),  # 6 blocks of keys, of which there are 2 in all
        ((64, 128), (0, 0), False, 1),
        ((64, 128), (3, 1), True, 2),  # of the two query heads of a kv head
        ((64, 128), (3, 4), True, 5),
    ],
)
def test_lists_of_a_compact_mask_are_as_long_as_its_fullest_row(tile, most, of_keys, longest):
    problem, inputs = posed((2,), (4, 2), 300, 300, kinds=kinds(1, 4))
    inputs, made = inputs._replace(blocks=inputs.blocks._replace(most=most)), []
    tensors = modifiers.arguments_of(problem, inputs.modifiers, inputs.blocks)
    for deterministic in (False, True):
        kernel = block_lists.kernel_of(replace(problem, deterministic=deterministic), tile, of_keys)
        block_lists.with_lists(lambda *arguments: made.append(arguments), kernel, problem, tensors, inputs)
    found, in_turns = (BlockListsArguments(*arguments).numbers.shape[3] for arguments in made)
    assert (found, in_turns) == (longest, 5 if of_keys else longest)


@pytest.mark.parametrize("name", [*Modifiers._fields, None])
def test_each_modifier_alone_reaches_the_kernel(name):
    given = HIDING | {
        "alibi_slopes": torch.zeros(4),
        "bias": torch.zeros(1, 1, 1, 300),
        "dropout_state": torch.tensor([1, 2]),
    }
    problem, inputs = posed((2,), (4, 2), 300, 300, **({} if name is None else {name: given[name]}))
    problem = replace(problem, dropout_p=0.5 if name == "dropout_state" else 0.0)
    assert problem.has_modifiers == (name is not None)
    assert any(t is not None for t in modifiers.arguments_of(problem, inputs.modifiers)) == (name is not None)


@pytest.mark.parametrize("is_packed", [False, True])
def test_gradients_of_pairs_add_up_by_position(is_packed):
    torch.manual_seed(0)
    heads, rows, keys, num_positions = 2, 7, 5, 9
    positions = torch.randint(-3, num_positions + 3, (rows,) if is_packed else (3, rows)).int()
    nearest = positions.clamp(0, num_positions - 1).long()
    bias = torch.zeros(*(() if is_packed else (1,)), heads, num_positions, keys)
    found = torch.randn(*(() if is_packed else (3,)), heads, rows, keys)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), LENGTHS) if is_packed else {}
    problem, _ = posed(() if is_packed else (3,), (2, 2), rows, keys, q_positions=positions, **lengths)
    total = modifiers._by_position(problem, bias, found, positions)
    expected = torch.zeros_like(total)
    for index in range(1 if is_packed else 3):
        target, source = (expected, found) if is_packed else (expected[index], found[index])
        target.index_add_(1, nearest if is_packed else nearest[index], source)
    torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("sizes", [(3, 2, 4, 5), (1, 2, 1, 5), (3, 1, 4, 1), (1, 1, 1, 1)], ids=str)
def test_what_a_kernel_adds_for_pairs_becomes_the_gradient_of_terms(sizes, is_packed, is_deterministic):
    """Slopes of all heads or of each entry; a bias that is broadcast over any of its modes."""
    torch.manual_seed(0)
    lengths = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    bias = torch.zeros(sizes, dtype=torch.bfloat16)[0 if is_packed else slice(None)]
    slopes = torch.zeros(2) if sizes[0] == 1 else torch.zeros(3, 2)
    offsets = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), lengths) if is_packed else {}
    rows, keys = 4, 5
    problem, inputs = posed(() if is_packed else (3,), (2, 1), rows, keys, bias=bias, alibi_slopes=slopes, **offsets)
    problem = replace(problem, deterministic=is_deterministic)
    terms = modifiers.gradients_of_terms(problem, BackwardConfigSm80(), inputs)
    given = modifiers.arguments_of(problem, inputs.modifiers)
    passed = modifiers.backward_arguments(problem, given, terms)
    of_slopes, of_bias = passed.dslopes, passed.dbias
    assert passed.slopes is given.slopes
    assert passed.bias is given.bias
    by_slope, by_pair = torch.randn(of_slopes.shape), torch.randint(-3, 4, (rows, keys, 2, 1 if is_packed else 3))
    of_slopes += by_slope
    for place in itertools.product(*map(range, by_pair.shape)):
        of_bias[place] += by_pair[place]
    dslopes, dbias = modifiers.finished(problem, inputs, terms)
    expected = by_slope.sum(0).t()  # (batch, heads)
    torch.testing.assert_close(dslopes, expected if slopes.dim() == 2 else expected.sum(0))
    pairs = by_pair.permute(3, 2, 0, 1).float()
    assert torch.equal(dbias, (pairs[0] if is_packed else pairs).sum_to_size(bias.shape).bfloat16())
    constant = replace(problem, constant_slopes=True, constant_bias=True)
    assert modifiers.gradients_of_terms(constant, BackwardConfigSm80(), inputs) == (None, None)


@pytest.mark.parametrize("of_keys", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", HIDING)
def test_what_a_kernel_of_lists_depends_on(name, deterministic, of_keys):
    problem, _ = posed((2,), (4, 2), 300, 300, **{name: HIDING[name]})
    problem = replace(problem, deterministic=deterministic, mask=Mask(3, None))
    kernel = block_lists.kernel_of(problem, TILE, of_keys)
    field = {"seqstart_k": "starts", "key_ranges": "ranges", "q_positions": "positions"}.get(name, name)
    assert kernel.fields == (field,)
    assert kernel.block_size == ((64, 128) if name == "kinds" else None)
    assert kernel.in_turns == (of_keys and deterministic)
    assert (kernel.has_window_left, kernel.has_window_right) == (True, False)
    assert kernel[:4] == (*TILE, of_keys, False)
    assert not kernel.has_bits
    # a forward finds the blocks of intervals by itself
    has_requests = of_keys or name in ("query_ranges", "kinds")
    assert len(block_lists.compile_requests(problem, TILE, of_keys, "sm_90a")) == has_requests


@pytest.mark.parametrize("of_keys", [False, True])
def test_calls_of_a_window_have_no_lists(of_keys):
    problem, _ = posed((2,), (4, 2), 300, 300, alibi_slopes=torch.zeros(4))
    problem = replace(problem, mask=Mask(3, 0), deterministic=True)
    assert block_lists.compile_requests(problem, TILE, of_keys, "sm_90a") == []
    assert block_lists.prepared(problem, TILE, of_keys, "sm_90a") is None

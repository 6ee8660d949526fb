"""What a backward's launch makes of modifiers, on the CPU."""

import itertools
from dataclasses import replace

import pytest
import torch

from onepass.kernels.arguments import QueryBoundsArguments
from onepass.kernels.config import BackwardConfigSm80, BackwardConfigSm90
from onepass.kernels.launch import modifiers, query_bounds
from onepass.problem import AttentionInputs, AttentionProblem, Mask, Modifiers

CONFIG = BackwardConfigSm90(tile_m=128, q_stages=2, dynamic_tiles=True)


def posed(lead: tuple, heads: tuple, rows: int, keys: int, **given):
    """A problem with these modifiers, and its inputs."""
    q, k = (torch.zeros(*lead, n, h, 64).half() for n, h in ((rows, heads[0]), (keys, heads[1])))
    names = {name: given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k") if name in given}
    lengths = (names.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    inputs = AttentionInputs(q, k, k, None, *lengths, Modifiers(**given))
    return AttentionProblem.of(inputs, softmax_scale=0.1, mask=Mask(), softcap=None, deterministic=False), inputs


def ranges(*shape: int):
    return torch.zeros(*shape, 300, 2, dtype=torch.int32)


LENGTHS = torch.tensor([0, 100, 300], dtype=torch.int32)


@pytest.mark.parametrize(
    ("lead", "given", "entries", "heads", "group"),
    [
        ((2,), {"key_ranges": ranges(1, 1)}, 1, 1, 1),
        ((2,), {"key_ranges": ranges(1, 4)}, 1, 2, 2),
        ((2,), {"key_ranges": ranges(2, 1)}, 2, 1, 1),
        ((2,), {"key_ranges": ranges(2, 4)}, 2, 2, 2),
        ((2,), {"key_ranges": ranges(1, 1), "seqused_k": LENGTHS[1:]}, 2, 1, 1),
        ((2,), {"key_ranges": ranges(1, 1), "seqstart_k": LENGTHS[:2]}, 2, 1, 1),
        ((2,), {"q_positions": torch.zeros(1, 300, dtype=torch.int32)}, 1, 1, 1),
        ((2,), {"q_positions": torch.zeros(2, 300, dtype=torch.int32)}, 2, 1, 1),
        ((), {"key_ranges": ranges(1), "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}, 1, 1, 1),
        ((), {"key_ranges": ranges(4), "cu_seqlens_q": LENGTHS, "cu_seqlens_k": LENGTHS}, 1, 2, 2),
    ],
)
def test_bounds_are_computed_once_for_what_shares_them(lead, given, entries, heads, group):
    problem, inputs = posed(lead, (4, 2), 300, 300, **given)
    made = []
    bounds = query_bounds.launch(
        lambda *arguments: made.append(arguments),
        problem,
        CONFIG,
        modifiers.arguments_of(problem, inputs.modifiers),
        (5, -7),
        *inputs[4:7],
    )
    passed = QueryBoundsArguments(*made[0])
    assert passed[3:6] == (300, 300, group)
    assert all(t is given for t, given in zip(passed[6:9], inputs[4:7], strict=True))
    assert passed[9:] == (5, -7)
    extremes, computed = passed[:2]
    tiles, blocks = (300 // CONFIG.tile_n + 3, 300 // CONFIG.tile_m + 2) if problem.is_packed else (3, 3)
    assert extremes.shape == (entries, heads, blocks, 4)
    assert computed.shape == (entries, heads, tiles, 4)
    assert bounds.shape == (tiles, 4, 2, 1 if problem.is_packed else 2)
    assert bounds.data_ptr() == computed.data_ptr()


@pytest.mark.parametrize("name", [*(name for name in Modifiers._fields if name != "query_ranges"), None])
def test_each_modifier_alone_reaches_the_kernel(name):
    given = {
        "seqstart_k": LENGTHS[:2],
        "key_ranges": ranges(2, 4),
        "q_positions": LENGTHS.new_zeros(2, 300),
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
    passed = modifiers.backward_arguments(problem, given, None, terms)
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


@pytest.mark.parametrize("name", ["seqstart_k", "key_ranges", "q_positions"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_tiles_that_take_turns_visit_every_block(deterministic, name):
    given = {"seqstart_k": LENGTHS[:2], "key_ranges": ranges(2, 4), "q_positions": LENGTHS.new_zeros(2, 300)}
    problem, _ = posed((2,), (4, 2), 300, 300, **{name: given[name]})
    kernel = query_bounds.kernel_of(replace(problem, deterministic=deterministic, mask=Mask(3, None)), CONFIG)
    assert kernel.visits_all == deterministic
    assert kernel.fields == ({"seqstart_k": "starts", "key_ranges": "ranges", "q_positions": "positions"}[name],)
    assert (kernel.has_window_left, kernel.has_window_right) == (True, False)

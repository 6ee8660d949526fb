"""What a backward's launch makes of modifiers, on the CPU."""

import pytest
import torch

from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.launch import modifiers, query_bounds
from onepass.problem import AttentionProblem, Mask, ModifiedInputs, Modifiers

CONFIG = BackwardConfigSm90(tile_m=128, q_stages=2, dynamic_tiles=True)


def posed(lead: tuple, heads: tuple, rows: int, keys: int, **given):
    """A problem with these modifiers, and its inputs."""
    q, k = (torch.zeros(*lead, n, h, 64).half() for n, h in ((rows, heads[0]), (keys, heads[1])))
    names = {name: given.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k") if name in given}
    lengths = (names.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k"))
    inputs = ModifiedInputs(q, k, k, None, *lengths, Modifiers(**given))
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
        (None, None),
        *inputs[4:7],
    )
    ((extremes, computed, _, *numbers, _, _),) = made
    assert numbers[2] == group
    tiles, blocks = (300 // CONFIG.tile_n + 3, 300 // CONFIG.tile_m + 2) if problem.is_packed else (3, 3)
    assert extremes.shape == (entries, heads, blocks, 4)
    assert computed.shape == (entries, heads, tiles, 4)
    assert bounds.shape == (tiles, 4, 2, 1 if problem.is_packed else 2)
    assert bounds.data_ptr() == computed.data_ptr()


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

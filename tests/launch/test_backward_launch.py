"""Steps of the Hopper backward's launch that plain PyTorch computes."""

import itertools
from dataclasses import replace

import packages
import pytest
import torch
from launch_arguments import assert_as_traced, lists_by

from onepass.dispatch import attention as dispatch
from onepass.geometry.block_range import query_blocks
from onepass.kernels.config import BackwardConfigSm90
from onepass.kernels.launch import backward_sm90 as backward_launch
from onepass.kernels.launch.arguments import window_bounds
from onepass.kernels.launch.backward_sm90 import Launch, unsupported
from onepass.problem import AttentionInputs, AttentionProblem, Mask


def problem(**options):
    sizes = {
        "batch": 2,
        "seqlen_q": 70,
        "seqlen_k": 90,
        "num_heads_q": 4,
        "num_heads_kv": 2,
        "head_dim": 16,
        "head_dim_v": 16,
    }
    options = {"softmax_scale": 0.25, "mask": Mask(), "has_sinks": True} | options
    return AttentionProblem(dtype=torch.bfloat16, device_type="cpu", **sizes, **options)


@packages.needs_compiler
@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({}, {}),
        ({"mask": Mask(None, 0)}, {}),
        ({"mask": Mask(3, None), "softcap": 3.0, "has_seqused_k": True}, {}),
        ({"mask": Mask(3, 5), "is_packed": True, "deterministic": True}, {}),
        ({"has_seqused_k": True, "is_packed": True}, {}),
        ({}, {"dynamic_tiles": True}),
        ({"mask": Mask(3, None), "softcap": 3.0, "has_seqused_k": True}, {"dynamic_tiles": True}),
        ({"mask": Mask(None, 0), "deterministic": True}, {"dynamic_tiles": True}),
        ({"mask": Mask(None, 0)}, {"dynamic_tiles": True, "background_rows": False}),
        ({"mask": Mask(None, 0), "deterministic": True}, {"private_dq": True}),
        ({"has_seqused_k": True}, {"private_dq": True, "background_rows": False}),
        ({"has_sinks": True}, {}),
        ({"has_sinks": True, "is_packed": True}, {}),
        ({"has_key_ranges": True, "mask": Mask(3, 5), "has_seqused_k": True, "has_sinks": True}, {}),
        ({"has_q_positions": True, "mask": Mask(None, 0)}, {"dynamic_tiles": True}),
        ({"has_seqstart_k": True, "has_q_positions": True, "is_packed": True, "deterministic": True}, {}),
        ({"has_query_ranges": True, "has_seqused_k": True, "deterministic": True}, {}),
        ({"block_size": (64, 64), "mask": Mask(None, 0), "is_packed": True}, {}),
        ({"block_size": (64, 64), "has_block_bits": True, "deterministic": True}, {"dynamic_tiles": True}),
        ({"float32_dkv": True, "is_packed": True}, {}),
        ({"has_alibi": True, "bias_dtype": torch.float16, "dropout_p": 0.5, "deterministic": True}, {}),
        ({"has_alibi": True, "bias_dtype": torch.float64, "constant_slopes": True, "is_packed": True}, {}),
        ({"bias_dtype": torch.float32, "constant_bias": True, "dropout_p": 0.5, "has_sinks": True}, {}),
    ],
)
def test_kernels_are_given_what_they_were_traced_with(options, fields, monkeypatch):
    wanted, config = problem(**{"has_sinks": False} | options), BackwardConfigSm90(**fields)
    requests = backward_launch.compile_requests(wanted, False, config)
    in_one = config.rows_in_background(wanted)
    in_all = 1 if in_one else 2 if config.private_dq else 3
    assert len(requests) == in_all + wanted.has_backward_lists + wanted.has_sinks
    monkeypatch.setattr(backward_launch, "tile_counter", lambda device: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(
        backward_launch, "zero_counters", lambda purpose, device, count: torch.zeros(count, dtype=torch.int32)
    )

    def launch(kernels):
        names = "backward_preprocess", "backward", "backward_postprocess", "backward_sinks"
        return Launch(wanted, config, *map(kernels.get, names), lists_by(kernels, wanted, config), 4, 1, 1)

    assert_as_traced(wanted, launch, requests)


@pytest.mark.parametrize(
    ("fields", "options", "expected"),
    [
        ({"dynamic_tiles": True}, {}, True),
        ({"dynamic_tiles": True}, {"mask": Mask(None, 0)}, True),
        ({"dynamic_tiles": True, "background_rows": False}, {}, False),
        ({"dynamic_tiles": False}, {}, False),
        ({"dynamic_tiles": True}, {"is_packed": True}, False),
        ({"dynamic_tiles": True}, {"has_alibi": True}, False),
        # tiles that may have no queries
        ({"dynamic_tiles": True}, {"has_seqused_k": True}, True),
        ({"dynamic_tiles": True}, {"mask": Mask(3, None)}, True),
        ({"private_dq": True}, {"has_seqused_k": True, "mask": Mask(3, 0)}, True),
    ],
)
def test_where_the_main_kernel_is_the_only_one(fields, options, expected):
    assert BackwardConfigSm90(**fields).rows_in_background(problem(**options)) is expected


def test_what_is_left_to_another_backend_says_why():
    for option in ({}, {"deterministic": True}, {"is_packed": True}, {"has_seqused_k": True}, {"softcap": 3.0}):
        assert unsupported(problem(**option)) is None
    for name in ("batch", "num_heads_q"):
        assert unsupported(replace(problem(), **{name: 65535})) is None
        assert "expected up to 65535, got 65536" in unsupported(replace(problem(), **{name: 65536}))
    float32 = replace(problem(), dtype=torch.float32)
    assert unsupported(float32) == "dtype: expected bfloat16 or float16, got float32"


SIDES = (None, 0, 3, 40, 200, -1, -40, -200)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 130), (70, 300), (300, 70)])
def test_blocks_of_queries_that_no_tile_visits_are_known(seqlen_q, seqlen_k):
    """Under private_dq only tiles of keys write dq, so it must be zeroed if a block of queries may be left out."""
    config = BackwardConfigSm90(private_dq=True, dynamic_tiles=False)
    for window in itertools.product(SIDES, SIDES):
        mask = Mask.from_options(False, window)
        asked = replace(problem(mask=mask), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        left_out = set(range(-(-seqlen_q // config.tile_m)))
        for n_start in range(0, seqlen_k, config.tile_n):
            geometry = seqlen_q, seqlen_k, *window_bounds(asked)
            first, _, _, last = query_blocks(n_start, n_start + config.tile_n, *geometry, config.tile_m)
            left_out -= set(range(first, last))
        may_skip = Launch(asked, config, *[None] * 5, 2, 1, 1).may_skip_blocks
        assert may_skip or not left_out, window
        assert may_skip == any(side is not None and side < 0 for side in mask_and_shift(mask, seqlen_k - seqlen_q))


def mask_and_shift(mask, shift):
    """The left bound of the window, and the last key in the window of the first query; None where unbounded.

    Some queries see no key if either is negative.
    """
    return mask.window_left, None if mask.window_right is None else mask.window_right + shift


def test_which_module_computes_gradients():
    assert dispatch.load_backward("sm90", problem()).__name__ == "onepass.kernels.launch.backward_sm90"
    assert dispatch.load_backward("sm90", replace(problem(), batch=70000)).__name__ == "onepass.tiled"
    assert dispatch.load_backward("tiled", problem()).__name__ == "onepass.tiled"
    float32 = replace(problem(), dtype=torch.float32)
    assert dispatch.load_backward("sm90", float32).__name__ == "onepass.kernels.launch.backward_sm80"


def test_inputs_without_keys_have_no_gradient():
    from onepass.kernels.launch.backward import without_keys

    q, kv = torch.randn(1, 3, 2, 16), torch.randn(1, 0, 2, 16)
    lse = torch.full((1, 2, 3), -torch.inf)
    gradients = without_keys(AttentionInputs(q, kv, kv), q, lse, q, torch.randn(1, 2, 3))
    assert all((g == 0).all() for g in gradients)
    assert [tuple(g.shape) for g in gradients[:3]] == [q.shape, kv.shape, kv.shape]


def test_the_sink_of_rows_without_keys_has_the_gradient_of_their_lse():
    """A sink has the gradients of lse of all empty rows. Rows with an lse of -inf, which have no sink or belong to no
    sequence, do not count."""
    from onepass.kernels.launch.backward import without_keys

    sinks, dlse = torch.tensor([1.0, -torch.inf, torch.nan]), torch.randn(3, 7)
    q, kv = torch.randn(7, 3, 16), torch.randn(0, 3, 16)
    lse = sinks[:, None].repeat(1, 7)
    lse[:, 5:], dlse[:, 5:] = -torch.inf, torch.nan
    for given in (dlse, None):
        *input_gradients, dsinks = without_keys(AttentionInputs(q, kv, kv, sinks), q, lse, q, given)
        assert all((g == 0).all() for g in input_gradients)
        expected = torch.zeros(3) if given is None else torch.tensor([float(dlse[0, :5].sum()), 0.0, torch.nan])
        torch.testing.assert_close(dsinks, expected, equal_nan=True)

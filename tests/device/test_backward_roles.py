"""The Hopper backward's own steps, run as Python: the producer and all consumers (backward_roles.py)."""

import importlib.util
from dataclasses import replace

import pytest
from shipped import problem

from onepass.kernels.config import BackwardConfigSm90
from onepass.problem import Mask

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl is not installed"
)

FULL, CAUSAL, WINDOW = Mask(), Mask(None, 0), Mask(100, 40)
CONFIG = BackwardConfigSm90(background_rows=False)


def run(config=CONFIG, seeds=1, head_dim=64, seqlens=(200, 330), mask=CAUSAL, num_ctas=1, num_heads_kv=2, **asked):
    from backward_roles import Backward

    asked = replace(problem(head_dim, head_dim, mask=mask, num_heads_kv=num_heads_kv, **asked), num_heads_q=2)
    asked = replace(asked, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    for seed in range(seeds):
        Backward(asked, config, seed, num_ctas).run()


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
@pytest.mark.parametrize("overlap_gradients", [True, False])
def test_all_gradients(overlap_gradients, mask):
    for tile_m, q_stages, do_stages in ((64, 2, 2), (128, 3, 1), (64, 3, 2)):
        config = replace(CONFIG, tile_m=tile_m, q_stages=q_stages, do_stages=do_stages)
        run(replace(config, overlap_gradients=overlap_gradients), mask=mask)


@pytest.mark.parametrize("seqlens", [(1, 1), (64, 128), (130, 20), (20, 400), (300, 129)])
def test_lengths(seqlens):
    """With more keys than queries, no query sees the first keys through a window."""
    for mask, num_heads_kv in ((CAUSAL, 1), (WINDOW, 2)):
        sizes = {"seqlens": seqlens, "mask": mask, "num_heads_kv": num_heads_kv}
        run(**sizes)
        run(replace(CONFIG, by_gradient=True), head_dim=256, **sizes)


@pytest.mark.parametrize("by_gradient", [True, False])
def test_tiles_that_are_drawn(by_gradient):
    config = replace(CONFIG, dynamic_tiles=True, by_gradient=by_gradient)
    for num_ctas in (1, 2):
        for background_rows in (True, False):
            run(
                replace(config, background_rows=background_rows), num_ctas=num_ctas, head_dim=256 if by_gradient else 64
            )


@pytest.mark.parametrize("mask", [FULL, CAUSAL, WINDOW], ids=["full", "causal", "window"])
def test_a_gradient_for_each_warpgroup(mask):
    for q_stages, num_ctas in ((2, 1), (3, 2)):
        run(replace(CONFIG, by_gradient=True, q_stages=q_stages), mask=mask, head_dim=192, num_ctas=num_ctas)


def test_a_softcap():
    """delta is what dP begins with."""
    run(softcap=20.0)

"""No deadlock in the Hopper backward, and every buffer holds what is read: its own warps, run in random orders."""

import pytest
from backward_in_python import Launch, modules

ROWS = {"background_rows": True, "dynamic_tiles": True}
EMPTY_TILES = {"has_seqused_k": True, "is_packed": False}
KINDS = {
    "all gradients": {},
    "rows in the background": ROWS,
    "a gradient each": {"by_gradient": True, "head_dim": 256},
    "tiles without steps": {"by_gradient": True, "head_dim": 256, **ROWS, **EMPTY_TILES},
    "one warpgroup": {"num_warpgroups": 1},
    "the same keys": {"by_queries": True, "head_dim": 128},
    "the same keys, tiles without steps": {"by_queries": True, "dynamic_tiles": True, **EMPTY_TILES},
    "pairs of three pieces": {"by_gradient": True, "paired": True, "head_dim": 192},
    "pairs of four pieces": {"by_gradient": True, "paired": True, "head_dim": 256},
}


def attempt(seed, **fixed):
    launch = Launch(seed, **fixed)
    try:
        launch.run()
    except Exception as error:
        raise AssertionError(f"{error}; seed {seed}, {launch.config}, {launch.problem}") from error


@pytest.mark.sampled(quick=16, slow=28)
@pytest.mark.parametrize("start", range(0, 24, 3))
@pytest.mark.parametrize(
    ("kind", "deterministic"),
    [(kind, flag) for kind in KINDS for flag in (False, True) if not (flag and "by_queries" in KINDS[kind])],
)
def test_every_gradient_has_its_terms_once(kind, deterministic, start):
    for seed in range(start, start + 3):
        attempt(seed, deterministic=deterministic, **KINDS[kind])


def test_a_warp_that_does_not_wait_is_found(monkeypatch):
    exchange = modules()["sm90.backward.exchange"].Exchange
    monkeypatch.setattr(exchange, "wait_for_ds", lambda *_: None)
    with pytest.raises(AssertionError, match=r"overwritten while it is read|parts of"):
        attempt(0)

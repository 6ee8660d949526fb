"""The work on query rows beside the tiles: no deadlock, everything once, and counters that are zero again."""

import random

import pytest
from rows_model import Rows


def random_launch(rng, **fixed):
    heads, blocks, tiles = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 5)
    num_ctas = rng.randint(1, heads * tiles)
    nan_blocks = frozenset(rng.sample(range(heads * blocks), rng.randint(0, heads * blocks)))
    unseen_tiles = frozenset(rng.sample(range(heads * tiles), rng.randint(0, heads * tiles)))
    facts = {"unseen_tiles": unseen_tiles}
    facts |= {"room": rng.randint(1, num_ctas), "nan_blocks": nan_blocks, "finishes": rng.random() < 0.8} | fixed
    return Rows(heads, blocks, tiles, num_ctas, **facts)


def attempt_all(seeds, faults=(), **fixed):
    for seed in seeds:
        launch = random_launch(random.Random(seed), **fixed)
        try:
            launch.run(seed, faults)
        except AssertionError as error:
            raise AssertionError(f"{error}; seed {seed}, {launch}") from error


@pytest.mark.parametrize("finishes", [False, True])
def test_no_deadlock_and_everything_is_done_once(finishes):
    attempt_all(range(300), finishes=finishes)


def test_one_thread_block_at_a_time():
    """Nobody waits for a thread block that may not have started."""
    attempt_all(range(300), room=1)


@pytest.mark.parametrize(
    ("fault", "fixed"),
    [
        ("waits_anyway", {"room": 1, "finishes": True}),
        ("drops_a_draw", {}),
        ("repairs_early", {"finishes": True}),
        ("leaves_early", {}),
        ("trusts_unseen_tiles", {"finishes": True, "unseen_tiles": frozenset(range(25))}),
        ("keeps_list", {"finishes": True}),
    ],
)
def test_the_model_finds_faults(fault, fixed):
    with pytest.raises(AssertionError):
        attempt_all(range(300), [fault], **fixed)

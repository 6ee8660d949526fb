"""Random runs of backward_model.py."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from backward_model import Protocol
from turn_model import Case, packed_tiles, padded_tiles


def random_tiles(rng, num_tiles, group=1, most=5):
    """Tiles of 0 to `most` blocks of `group` heads; a tile's turn at a block is how many tiles have visited it."""
    tiles, visits = [], Counter()
    for _ in range(num_tiles):
        blocks = rng.sample(range(most + 1), rng.choice((0, 1, 1, 2, 3, rng.randint(0, most))))
        keys = [(head, i) for i in blocks for head in range(group)]
        tiles.append([(key, visits[key]) for key in keys])
        visits.update(keys)
    return tiles


def tiles_of_problems(rng):
    """The tiles that the kernel gets for padded and for packed sequences."""
    left, right, group = rng.choice((None, 0, 5)), rng.choice((None, 0, 5)), rng.choice((1, 2))
    case = Case(rng.randint(1, 17), rng.randint(1, 20), left, right, 4, 6, group)
    if rng.random() < 0.5:
        return padded_tiles(case, 2, 1, rng.choice((1, 2)), [rng.randint(0, case.seqlen_k)])
    return packed_tiles(case, [(rng.randint(0, 11), rng.randint(0, 14)) for _ in range(4)], 1)


def random_protocol(rng, consumer, **fixed):
    def flag():
        return rng.random() < 0.5

    names = "pingpong", "is_dynamic", "is_deterministic", "has_garbage", "warpgroups_meet", "overlaps"
    changes = {name: flag() for name in names}
    protocol = Protocol(consumer, 2, rng.choice((2, 3)), rng.choice((1, 2)), pieces=rng.choice(((2, 2), (2, 1))))
    return replace(protocol, **{**changes, **fixed})


def attempt(seed, consumer, **fixed):
    rng = random.Random(seed)
    protocol = random_protocol(rng, consumer, **fixed)
    tiles = random_tiles(rng, rng.randint(1, 7), rng.choice((1, 1, 2))) if seed % 3 else tiles_of_problems(rng)
    try:
        protocol.run(tiles, rng.randint(1, 4), seed)
    except AssertionError as error:
        raise AssertionError(f"{error}; seed {seed}, {protocol}, {tiles}") from error


def attempt_all(seeds, consumer, **fixed):
    for seed in seeds:
        attempt(seed, consumer, **fixed)


def must_fail(consumer, match=None, **fixed):
    with pytest.raises(AssertionError, match=match):
        attempt_all(range(200), consumer, **fixed)

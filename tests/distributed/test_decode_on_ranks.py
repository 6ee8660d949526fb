"""`decode` over a cache on several gloo ranks gives what one device gives, and appends the same keys and values."""

import cache_calls
import pytest
from ranks import run_ranks

CALLS = 60


@pytest.mark.sampled(quick=1, slow=2)
@pytest.mark.parametrize("num_ranks", [2, 1, 3, 4, 8])
def test_random_calls(num_ranks):
    run_ranks(num_ranks, cache_calls.check, list(range(100 * num_ranks, 100 * num_ranks + CALLS)))


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("num_ranks", [2, 1, 3, 4])
def test_surroundings(num_ranks):
    """Autocast, caches of inference mode, bits that do not depend on the cache, pages that do not exist."""
    run_ranks(num_ranks, cache_calls.all_surroundings)


@pytest.mark.sampled(quick=1, slow=1)
@pytest.mark.parametrize("first", range(4))
def test_the_host_reads_no_value(first):
    for seed in range(10 * first, 10 * first + 10):
        cache_calls.reads_nothing(seed)

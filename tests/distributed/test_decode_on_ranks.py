"""`decode` over a cache that is spread over gloo ranks gives what one device gives, and appends what it appends."""

import cache_calls
import pytest
from ranks import run_ranks

CALLS = 40


@pytest.mark.parametrize("num_ranks", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 8))])
def test_random_calls(num_ranks):
    run_ranks(num_ranks, cache_calls.check, list(range(100 * num_ranks, 100 * num_ranks + CALLS)))

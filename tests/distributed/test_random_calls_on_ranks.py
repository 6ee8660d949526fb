"""Attention over several gloo ranks gives what one device gives, in float64, with every option."""

import pytest
import rank_checks
import whole_calls
from ranks import run_ranks

CALLS = 24


@pytest.mark.sampled(quick=2, slow=3)
@pytest.mark.parametrize(
    ("num_ranks", "first"),
    [(3, 0), (4, 0), *((n, first) for n in (1, 2, 4, 6, 8) for first in (100 * n, 100 * n + CALLS))],
)
def test_random_calls(num_ranks, first):
    run_ranks(num_ranks, whole_calls.check, list(range(first, first + CALLS)))


@pytest.mark.parametrize(("num_ranks", "first"), [(2, 5000), pytest.param(4, 5100, marks=pytest.mark.slow)])
def test_steps_with_short_ends(num_ranks, first):
    run_ranks(num_ranks, whole_calls.check, list(range(first, first + CALLS // 2)), True)


@pytest.mark.parametrize(("num_ranks", "first"), [(3, 4000), pytest.param(4, 4100, marks=pytest.mark.slow)])
def test_rows_that_are_read(num_ranks, first):
    run_ranks(num_ranks, rank_checks.read_rows, list(range(first, first + CALLS // 2)))


def test_odd_head_dims_in_16_bits():
    run_ranks(3, whole_calls.check_odd_head_dims, list(range(3000, 3020)))

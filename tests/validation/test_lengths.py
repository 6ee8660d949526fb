"""Lengths, starts, pages and rotated positions: the last value that is accepted, and the first that is refused."""

import contextlib
import random

import pytest
import torch

import onepass
from onepass.problem.lengths import refuse_shared_pages

INT32 = torch.int32


def int32(*values):
    return torch.tensor(values, dtype=INT32)


def dense(**options):
    q, k = torch.randn(2, 4, 2, 8), torch.randn(2, 9, 1, 8)
    return onepass.attention(q, k, k, **options)


def packed(**options):
    q, k = torch.randn(6, 2, 8), torch.randn(12, 1, 8)
    return onepass.attention_varlen(q, k, k, cu_seqlens_q=int32(0, 2, 6), cu_seqlens_k=int32(0, 7, 12), **options)


def decoded(q, caches, seqlen_new, lengths, **options):
    """A call over caches of zeros, which a refusal leaves alone."""
    new = torch.randn(2, seqlen_new, 1, 8)
    appended = {"k_new": new, "v_new": new} if seqlen_new else {}
    try:
        return onepass.attention_decode(q, *caches, cache_seqlens=int32(*lengths), **appended, **options)
    except ValueError:
        assert not any(cache.any() for cache in caches)
        raise


def cached(lengths=(20, 3), seqlen_new=0, **options):
    """Two sequences over a cache of 24 keys."""
    return decoded(torch.randn(2, 2, 2, 8), [torch.zeros(2, 24, 1, 8) for _ in "kv"], seqlen_new, lengths, **options)


def in_pages(table, lengths=(9, 3), seqlen_new=0, **options):
    """Two sequences over 6 pages of 4 keys."""
    options["page_table"] = torch.tensor(table, dtype=INT32)
    return decoded(torch.randn(2, 2, 2, 8), [torch.zeros(6, 4, 1, 8) for _ in "kv"], seqlen_new, lengths, **options)


def rotated(rows, **options):
    return cached(rotary_cos=torch.ones(rows, 4), rotary_sin=torch.zeros(rows, 4), **options)


def positions(q, k=None, **options):
    given = {"rotary_positions_q": torch.tensor([q, q], dtype=INT32)}
    if k is not None:
        given |= {"rotary_positions_k": torch.tensor([k], dtype=INT32), "seqlen_new": len(k)}
    return given | options


# a function, arguments that it takes, arguments that it refuses, and the message
EDGES = [
    (dense, {"seqused_k": int32(9, 0)}, {"seqused_k": int32(10, 0)}, r"seqused_k\[0\]: expected 0 to 9, .*, got 10"),
    (dense, {"seqused_k": int32(9, 0)}, {"seqused_k": int32(9, -1)}, r"seqused_k\[1\]: expected 0 to 9, .*, got -1"),
    (packed, {"seqused_k": int32(7, 5)}, {"seqused_k": int32(8, 5)}, r"seqused_k\[0\]: expected 0 to 7, .*, got 8"),
    (packed, {"seqused_k": int32(0, 5)}, {"seqused_k": int32(0, 6)}, r"seqused_k\[1\]: expected 0 to 5, .*, got 6"),
    (dense, {"seqstart_k": int32(9, 0)}, {"seqstart_k": int32(10, 0)}, r"seqstart_k\[0\]: expected 0 to 9, .* got 10"),
    (dense, {"seqstart_k": int32(0, 0)}, {"seqstart_k": int32(0, -1)}, r"seqstart_k\[1\]: expected 0 to 9, .* got -1"),
    (packed, {"seqstart_k": int32(7, 5)}, {"seqstart_k": int32(5, 7)}, r"seqstart_k\[1\]: expected 0 to 5, .* got 7"),
    *(
        (
            function,
            {"seqused_k": int32(4, 3), "seqstart_k": int32(4, 3)},
            {"seqused_k": int32(4, 3), "seqstart_k": int32(3, 4)},
            r"seqstart_k\[1\]: expected 0 to 3, .*, got 4",
        )
        for function in (dense, packed)
    ),
    (cached, {"lengths": (24, 0)}, {"lengths": (0, 25)}, "cache_seqlens: expected 0 to 24, .* of the cache, got 25"),
    (cached, {"lengths": (24, 0)}, {"lengths": (24, -1)}, "cache_seqlens: expected 0 to 24, .* got -1"),
    (
        cached,
        {"lengths": (21, 0), "seqlen_new": 3},
        {"lengths": (22, 0), "seqlen_new": 3},
        "expected 0 to 21, the 24 positions of the cache less 3 new keys, got 22",
    ),
    (
        cached,
        {"seqstart_k": int32(20, 3)},
        {"seqstart_k": int32(3, 20)},
        r"seqstart_k\[1\]: expected 0 to 3, .* got 20",
    ),
    (
        cached,
        {"seqstart_k": int32(0, 0)},
        {"seqstart_k": int32(-1, 0)},
        r"seqstart_k\[0\]: expected 0 to 20, .* got -1",
    ),
    (
        cached,
        {"seqstart_k": int32(0, 5), "seqlen_new": 2},
        {"seqstart_k": int32(0, 6), "seqlen_new": 2},
        r"seqstart_k\[1\]: expected 0 to 5, .* got 6",
    ),
    # pages of keys are checked; others may be any number
    (
        in_pages,
        {"table": [[0, 5, 2, 99], [1, -7, 99, 99]]},
        {"table": [[0, 5, 6, 0], [1, 0, 0, 0]]},
        r"page_table\[0, 2\]: expected a page 0 to 5 of the cache, got 6",
    ),
    (
        in_pages,
        {"table": [[0, 5, 2], [1, 3, 99]], "seqlen_new": 2},
        {"table": [[0, 5, 2], [1, -1, 99]], "seqlen_new": 2},
        r"page_table\[1, 1\]: expected a page 0 to 5 of the cache, got -1",
    ),
    (
        in_pages,
        {"table": [[99, 99, 2], [99, 0, 0]], "seqstart_k": int32(8, 4), "lengths": (9, 5), "causal": False},
        {"table": [[99, 6, 2], [0, 0, 0]], "seqstart_k": int32(7, 0)},
        r"page_table\[0, 1\]: expected a page 0 to 5 of the cache, got 6",
    ),
    # new keys are written to the page that holds the end of the keys, even if the sequence begins after it
    (
        in_pages,
        {"table": [[4, 0, 0], [99, 5, 0]], "lengths": (2, 4), "seqlen_new": 4, "seqstart_k": int32(6, 8)},
        {"table": [[6, 0, 0], [99, 5, 0]], "lengths": (2, 4), "seqlen_new": 4, "seqstart_k": int32(6, 8)},
        r"page_table\[0, 0\]: expected a page 0 to 5 of the cache, got 6",
    ),
    # a ring of pages: new keys are written over old ones, which a window or ranges of keys hide
    *(
        (
            in_pages,
            {"table": [[0, 1, 0], [2, 3, 4]], "lengths": (8, 3), "seqlen_new": 2, **hiding},
            {"table": [[0, 1, 0], [2, 3, 4]], "lengths": (8, 3), "seqlen_new": 2},
            r"page_table\[0, 2\]: expected a page with rows 0 to 1 for new keys alone, got page 0",
        )
        for hiding in ({"window": (4, 0)}, {"key_ranges": int32(6, 99).expand(1, 1, 2, 2)})
    ),
    (rotated, {"rows": 20}, {"rows": 19}, "rotary_cos: expected a row for each of the 20 positions, got 19"),
    (rotated, {"rows": 22, "seqlen_new": 2}, {"rows": 21, "seqlen_new": 2}, "each of the 22 positions, got 21"),
    (rotated, positions([1, 6], rows=7), positions([1, 7], rows=7), "each of the 8 positions, got 7"),
    (rotated, positions([1, 6], [6, 2], rows=7), positions([1, 6], [2, 7], rows=7), "each of the 8 positions, got 7"),
    (rotated, positions([1, 6], [6, 2], rows=7), positions([8, 6], [2, 1], rows=7), "each of the 9 positions, got 7"),
]


@pytest.mark.parametrize(("function", "taken", "bad", "message"), EDGES)
def test_the_last_value_that_is_accepted_and_the_first_that_is_not(function, taken, bad, message):
    out = function(**taken)
    assert out.isfinite().all()
    with pytest.raises(ValueError, match=message):
        function(**bad)


def test_new_keys_are_refused_exactly_where_they_overwrite_keys():
    """Random tables, against the row of a page that each key of a call has."""
    rng = random.Random(0)
    seen = {True: 0, False: 0}
    for _ in range(1000):
        size, columns, pages, hides_keys = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 6), rng.random() < 0.5
        table = [[rng.randrange(pages) for _ in range(columns)] for _ in range(rng.randint(1, 3))]
        lengths = [rng.randint(0, columns * size) for _ in table]
        ends = [rng.randint(n, min(n + 3, columns * size)) for n in lengths]
        starts = [rng.randint(0, end) for end in ends]
        used = [(b, n) for b, end in enumerate(ends) for n in range(min(starts[b], lengths[b]), end)]
        overwrites = any(
            (b, n) != (other, m)
            and (table[b][n // size], n % size) == (table[other][m // size], m % size)
            and not (hides_keys and b == other and m < lengths[b])
            for b, n in used
            if n >= lengths[b]
            for other, m in used
        )
        with pytest.raises(ValueError, match="for new keys alone") if overwrites else contextlib.nullcontext():
            refuse_shared_pages(table, size, starts, lengths, ends, hides_keys)
        seen[overwrites] += 1
    assert min(seen.values()) > 200

"""Helpers for tests of the fast path: results and refusals of a call that is repeated."""

import itertools

import torch

from onepass.api import fast_path

INT32 = torch.int32


class Seen(Exception):
    """What a function is given, in place of its result."""


def same(a, b):
    assert a.dtype == b.dtype
    assert a.stride() == b.stride()
    assert not a.requires_grad
    assert torch.equal(a, b)


# Values of each option; every value changes the result.
SCORES = {"softmax_scale": (None, 0.7, 1.3), "softcap": (None, 0.4, 0.9), "window": (None, (1, 0), (0, 0))}


OPTIONS = {"causal": (False, True)} | SCORES


def check_each_value_has_its_own_call(call, name, values):
    """A repeated call uses its own options, not the options of the call before it."""
    expected = []
    for value in values:
        fast_path.forget()
        expected.append(call(**{name: value}))
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(expected)), "the options change nothing"
    fast_path.forget()
    for _ in range(3):
        for value, out in zip(values, expected, strict=True):
            same(call(**{name: value}), out)
    assert fast_path.num_kept() == len(values)


def outcome(run):
    """All tensors that a call returns or writes, or its refusal."""
    try:
        result, caches = run()
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return [*(result if isinstance(result, tuple) else (result,)), *caches]

"""Which cases of an expensive test run when: `@pytest.mark.sampled(quick=1, slow=5)`.

Compiling a kernel or interpreting one takes seconds, and the cases of such a test share most of their code. `make test`
runs `quick` of them, `make test-slow` another `slow` of them, and `make nightly` all. The cases are drawn so that few
have much in common: each one is the case that adds the most pairs of features which no case before it has together
(a greedy covering array). Features are the parameters, the fields of a parameter that is a dataclass, and the words of
a name.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def covering_order(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """The indices of all cases, the ones that cover most first; equal ones stay in their order."""
    features = [set(_features(case)) for case in cases]
    shared = set.intersection(*features)
    pairs = [set(itertools.combinations_with_replacement(sorted(f - shared), 2)) for f in features]
    order: list[int] = []
    rest = list(range(len(cases)))
    while rest:
        best = max(rest, key=lambda i: len(pairs[i]))
        rest.remove(best)
        order.append(best)
        for i in rest:
            pairs[i] -= pairs[best]
    return order


def _features(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _features(item, f"{name}.{key}")
    elif isinstance(value, str):
        yield from ((name, word) for word in re.findall(r"[\w/]+", value))
    elif isinstance(value, (tuple, list)):
        for number, item in enumerate(value):
            yield from _features(item, f"{name}.{number}")
    elif isinstance(value, torch.Tensor):
        yield name, f"{value.dtype} {value.dim()}"
    else:
        yield name, re.sub(r" at 0x[0-9a-f]+", "", repr(value))  # an address differs from process to process

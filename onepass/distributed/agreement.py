"""Whether all ranks make the same call: compared before messages that would otherwise wait for ever."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_CONTROLS: weakref.WeakKeyDictionary[Any, Control]


class Control:
    """A group of its own beside a process group, over which ranks compare what they were called with.

    It is a gloo group on the CPU, so that a comparison neither waits for a GPU nor disturbs the messages of attention.
    """

    def __init__(self, group: Any, timeout: float):
        ranks = dist.get_process_group_ranks(group)
        self.rank, self.num_ranks, self.timeout = dist.get_rank(group), len(ranks), timeout
        made = dist.new_group(ranks, timeout=timedelta(seconds=timeout), backend="gloo", use_local_synchronization=True)
        # torch.distributed owns it: a gloo group that lives until the interpreter ends would abort the process
        self._group = weakref.ref(made)
        self.seen: set[Any] = set()

    @classmethod
    def of(cls, group: Any, timeout: float) -> Control:
        """The control group of a process group, made with the first plan for it."""
        found = _CONTROLS.get(group)
        if found is None or found.timeout != timeout:
            found = _CONTROLS[group] = cls(group, timeout)
        return found

    def compare(self, function: str, values: Mapping[str, Any]) -> None:
        """Raise RuntimeError on all ranks if one of them gives other values than rank 0, or does not come in time."""
        everyone: list[Any] = [None] * self.num_ranks
        try:
            dist.all_gather_object(everyone, (function, dict(values)), group=alive(self._group))
        except RuntimeError as error:
            raise RuntimeError(
                f"{function}: expected all {self.num_ranks} ranks to make this call within {self.timeout:g} s, but "
                f"rank {self.rank} did not hear from all of them ({_first_line(error)})"
            ) from error
        difference = first_difference(everyone)
        if difference is not None:
            raise RuntimeError(f"{function}: {difference}")

    def compare_once(self, function: str, values: Mapping[str, Any]) -> None:
        """`compare` with values that have not been compared before."""
        key = function, tuple(values.items())
        if key not in self.seen:
            self.compare(function, values)
            self.seen.add(key)


_CONTROLS = weakref.WeakKeyDictionary()


def alive(group: weakref.ref[Any]) -> Any:
    """The process group. Raises: RuntimeError if it has been destroyed."""
    found = group()
    if found is None:
        raise RuntimeError("plan: expected its process group to exist, but it has been destroyed")
    return found


def first_difference(everyone: list[tuple[str, dict[str, Any]]]) -> str | None:
    """What the first rank that differs from rank 0 has instead."""
    function, expected = everyone[0]
    for rank, (own_function, given) in enumerate(everyone):
        if own_function != function:
            return f"expected all ranks to make one call, but rank 0 calls {function} and rank {rank} {own_function}"
        for name, value in expected.items():
            if given.get(name) != value:
                return (
                    f"expected the same {name} on all ranks, but rank 0 has {_short(value)} and rank {rank} "
                    f"{_short(given.get(name))}"
                )
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def signature(t: torch.Tensor | None) -> tuple | None:
    """What ranks compare of a tensor that each of them has in full."""
    return None if t is None else (tuple(t.shape), str(t.dtype), t.requires_grad)

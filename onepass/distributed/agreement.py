"""Checks that all ranks make the same call, before they exchange messages that would otherwise wait forever."""

from __future__ import annotations

import hashlib
import json
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PAUSES = 0.0002, 0.02  # seconds between looks into the store, at first and at most
MOST_AGREED = 1024  # agreed calls that are remembered; an older one is compared again
MOST_ANNOUNCED = 4096
RECENT = 8  # new plans; a call with one of them is not compared if it was made with an earlier plan of the same age
DIGEST_DIGITS = 12
# parts of the errors that gloo, NCCL and the store raise where a rank is gone or late
GONE = ("Connection closed", "Connection reset", "Connection refused", "Broken pipe", "imed out", "imeout", "aborted")
COMPLETE = "complete"

_GENERATIONS: Counter[str] = Counter()


class Call(NamedTuple):
    """A call in the form in which ranks compare it: a short text for each value, and a digest of all values."""

    function: str
    words: dict[str, str]
    digest: str

    @classmethod
    def of(cls, function: str, values: Mapping[str, Any]) -> Call:
        return cls(function, {name: _short(value) for name, value in values.items()}, _digest((function, values)))

    @classmethod
    def read(cls, text: bytes) -> Call:
        return cls(*json.loads(text))

    def text(self) -> str:
        return json.dumps(self)


class GivenUp(NamedTuple):
    """How a round ended that a rank has given up.

    Attributes:
        rank: the rank that ended the round.
        digest: the digest of that rank's call, "" if its arguments were refused before there was a call.
    """

    rank: int
    function: str
    digest: str
    words: str

    def concerns(self, call: Call) -> bool:
        return self.function == call.function and self.digest in ("", call.digest)


class Control:
    """What the ranks of a process group tell each other about their calls, in the store that the group was made with.

    Each comparison is a round with a number. A rank writes its call, and looks until the calls of all ranks are there.
    A round ends once: it is ended by a rank that has seen all calls, by one that has waited too long, or by one whose
    arguments were refused. A rank that comes later sees how the round ended, and goes on to the next one, so that all
    ranks are in the same round again. Nothing waits for a GPU, and the group's own messages are not disturbed.
    """

    def __init__(self, group: Any):
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        pairs = (pair.split(":") for pair in dist.get_backend_config(group).split(","))
        self.backends: dict[str, str] = dict(sorted((device, backend) for device, backend in pairs))  # by device type
        self._group = weakref.ref(group)  # torch.distributed owns it
        # a group may have the name of one that was destroyed, whose rounds are still in the store
        self._prefix = f"onepass/{_GENERATIONS[group.group_name]}"
        _GENERATIONS[group.group_name] += 1
        self._round = 0
        self._old: list[str] = []  # keys of this rank that no rank will read once the next round is complete
        self._agreed: dict[Any, None] = {}  # the same on all ranks, since it grows when a round is complete
        self._plans: dict[str, int] = {}  # also the same: the number of the last plan with each fingerprint
        self._num_plans = 0
        self._last = 0
        self._announced: set[tuple[int, int]] = set()
        self.is_connected = False

    @classmethod
    def of(cls, group: Any) -> Control:
        """The control of a process group, made with the first plan for it."""
        found = _CONTROLS.get(group)
        if found is None:
            found = _CONTROLS[group] = cls(group)
        return found

    # ---------------------------------------------------------------- what calls use

    def compare(self, function: str, values: Mapping[str, Any], timeout: float) -> None:
        """Raise RuntimeError on all ranks if one of them gives other values than rank 0, or does not come in time."""
        call = Call.of(function, values)
        store = self._store()
        try:
            problem = self._compare(store, call, timeout)
        except RuntimeError as error:
            problem = (
                f"expected to compare this call with those of the other {self.num_ranks - 1} ranks, but rank "
                f"{self.rank} does not reach the store of the process group ({first_line(error)})"
            )
        if problem is not None:
            raise RuntimeError(f"{function}: {problem}")

    def compare_plans(self, values: Mapping[str, Any], fingerprint: str, timeout: float) -> None:
        """Compare the arguments of `plan`, after which the plan is known to be the same on all ranks."""
        self.compare("plan", values, timeout)
        self._plans[fingerprint] = self._num_plans
        self._num_plans += 1
        _forget(self._plans, MOST_AGREED)

    def compare_once(self, function: str, values: Mapping[str, Any], fingerprint: str, timeout: float) -> None:
        """Compare values, unless they agreed before with this plan, or with an earlier plan when it was as new."""
        key = function, tuple(values.items())
        self._announce(key)
        number = self._plans.get(fingerprint)
        age = None if number is None else self._num_plans - number
        if (key, fingerprint) in self._agreed or (key, age) in self._agreed:
            return
        self.compare(function, {**values, "plan": fingerprint}, timeout)
        self._agreed[key, fingerprint] = None
        if age is not None and age <= RECENT:
            self._agreed[key, age] = None
        _forget(self._agreed, MOST_AGREED)

    def connect(self) -> None:
        """Have a backend of GPUs make its connections, once, while all ranks are here and compared."""
        backend = self.backends.get("cuda", "gloo")  # gloo has connected when the group was made
        if self.is_connected or backend == "gloo" or not torch.cuda.is_available():
            return
        one = torch.ones(1, device="cuda")
        with in_words("all ranks of the group to connect their GPUs"):
            dist.all_reduce(one, group=alive(self._group))
        self.is_connected = True

    @contextmanager
    def reporting(self, function: str) -> Iterator[None]:
        """End the round if the block raises, so that ranks that wait in the round, or come later, report the error."""
        try:
            yield
        except Exception as error:
            words = (
                f"expected arguments that pass the checks on all ranks, but rank {self.rank} raised "
                f"{type(error).__name__}: {first_line(error)}"
            )
            with suppress(RuntimeError):  # the error of this rank matters more than a store that is gone
                self._end(self._store(), GivenUp(self.rank, function, "", words))
                self._leave()
            raise

    # ---------------------------------------------------------------- rounds

    def _compare(self, store: dist.Store, call: Call, timeout: float) -> str | None:
        """Take part in one round. Returns: what is wrong, or None."""
        while (ended := self._ended(store)) is not None:
            self._leave()
            if ended.concerns(call):
                return f"rank {ended.rank} ended this call before rank {self.rank} came: {ended.words}"
        store.set(self._key(f"{self.rank}/call"), call.text())
        store.set(self._key(self.rank), call.digest)
        written = [self._key(f"{self.rank}/call"), self._key(self.rank)]
        ended = self._wait(store, call, timeout)
        problem = None if ended is None else ended.words
        if ended is None:
            problem = self._difference(store)
            for key in self._old:  # all ranks are in this round, so none looks at an earlier one
                store.delete_key(key)
            self._old = []
        self._leave(written)
        return problem

    def _wait(self, store: dist.Store, call: Call, timeout: float) -> GivenUp | None:
        """Wait until the calls of all ranks are there, or until the round is given up."""
        keys = [self._key(rank) for rank in range(self.num_ranks)]
        end, pause = time.monotonic() + timeout, PAUSES[0]
        while not store.check(keys):
            if store.check([self._key("end")]):
                return self._ended(store)
            if time.monotonic() > end:
                return self._end(store, GivenUp(self.rank, *call[::2], self._absence(store, call, timeout)))
            time.sleep(pause)
            pause = min(2 * pause, PAUSES[1])
        return self._read_end(store.compare_set(self._key("end"), "", COMPLETE))

    def _end(self, store: dist.Store, given_up: GivenUp) -> GivenUp | None:
        """End the round, unless another rank has done so. Returns: how it was given up; None if it is complete."""
        return self._read_end(store.compare_set(self._key("end"), "", json.dumps(given_up)))

    def _ended(self, store: dist.Store) -> GivenUp | None:
        """How this rank's round was given up, if it was."""
        return self._read_end(store.get(self._key("end"))) if store.check([self._key("end")]) else None

    @staticmethod
    def _read_end(text: bytes) -> GivenUp | None:
        return None if text.decode() == COMPLETE else GivenUp(*json.loads(text))

    def _leave(self, keys: Sequence[str] = ()) -> None:
        """Go on to the next round. Args: keys: the keys that this rank has written in this one."""
        self._old += [*keys, *([self._key("end")] if self.rank == 0 else [])]
        self._round += 1

    def _difference(self, store: dist.Store) -> str | None:
        """What the first rank that differs from rank 0 has instead."""
        digests = store.multi_get([self._key(rank) for rank in range(self.num_ranks)])
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                first, other = (Call.read(store.get(self._key(f"{r}/call"))) for r in (0, rank))
                return difference(first, rank, other)
        return None

    def _absence(self, store: dist.Store, call: Call, timeout: float) -> str:
        """Which ranks have not come, and how the last call that one of them announced differs from this rank's."""
        absent = [rank for rank in range(self.num_ranks) if not store.check([self._key(rank)])]
        words = (
            f"expected all {self.num_ranks} ranks to make this call within {timeout:g} s, but rank {self.rank} did not "
            f"hear from ranks {absent}"
        )
        for rank in absent:
            key = f"{self._prefix}/last/{rank}"
            if store.check([key]):
                return f"{words}; {self._beside(call, rank, Call.read(store.get(key)))}"
        return words

    def _beside(self, call: Call, rank: int, last: Call) -> str:
        """How the call that an absent rank announced last differs from this rank's call."""
        if last.function != call.function:
            return f"rank {rank} last announced a call of {last.function}"
        for name, value in last.words.items():
            if value != call.words.get(name):
                return (
                    f"rank {rank} last announced a call with {name} {value}, where rank {self.rank} has "
                    f"{call.words.get(name)}"
                )
        return f"rank {rank} has announced this call, with this plan or another one"

    # ---------------------------------------------------------------- the store

    def _announce(self, key: tuple[str, tuple]) -> None:
        """Write this rank's call to the store, unless it came right after the same call before. Nothing waits.

        A rank that repeats its calls, in whatever order, writes nothing.
        """
        following = self._last, hash(key)
        self._last = following[1]
        if following in self._announced:
            return
        if len(self._announced) >= MOST_ANNOUNCED:
            self._announced.clear()
        self._announced.add(following)
        call = Call.of(key[0], dict(key[1]))
        # only the error messages of other ranks use announcements, so a store that is gone is no error here
        with suppress(RuntimeError):
            self._store().set(f"{self._prefix}/last/{self.rank}", call.text())

    def _key(self, name: Any) -> str:
        return f"{self._prefix}/{self._round}/{name}"

    def _store(self) -> dist.Store:
        try:
            return dist.distributed_c10d._get_process_group_store(alive(self._group))
        except KeyError:
            raise destroyed() from None


_CONTROLS: weakref.WeakKeyDictionary[Any, Control] = weakref.WeakKeyDictionary()


def alive(group: weakref.ref[Any] | None) -> Any:
    """The process group; None for None. Raises: RuntimeError if it has been destroyed."""
    if group is None:
        return None
    found = group()
    if found is None:
        raise destroyed()
    return found


def destroyed() -> RuntimeError:
    return RuntimeError("plan: expected its process group to exist, but it has been destroyed")


@contextmanager
def in_words(what: str) -> Iterator[None]:
    """Say what was expected where torch.distributed raises. Args: what: words after "expected"."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        first = first_line(error)
        is_gone = any(word in first for word in GONE)
        found = "one of them is gone or has not come within the group's timeout" if is_gone else "there was an error"
        raise RuntimeError(f"onepass.distributed: expected {what}, but {found} ({first})") from error


def difference(first: Call, rank: int, other: Call) -> str:
    """How the call of a rank differs from that of rank 0."""
    if other.function != first.function:
        functions = f"rank 0 calls {first.function} and rank {rank} {other.function}"
        return f"expected all ranks to make one call, but {functions}"
    for name in {**first.words, **other.words}:
        given = first.words.get(name), other.words.get(name)
        if given[0] != given[1]:
            return f"expected the same {name} on all ranks, but rank 0 has {given[0]} and rank {rank} has {given[1]}"
    return f"expected the same arguments on all ranks, but those of ranks 0 and {rank} differ"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:60]}... (digest {_digest(text)})"


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:DIGEST_DIGITS]


def _forget(kept: dict[Any, Any], most: int) -> None:
    """Remove the oldest entries of a dictionary, so that at most `most` are left."""
    while len(kept) > most:
        del kept[next(iter(kept))]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]


def signature(t: torch.Tensor | None) -> tuple | None:
    """What ranks compare about a tensor that every rank has in full."""
    return None if t is None else (tuple(t.shape), str(t.dtype), needs_gradient(t))


def needs_gradient(t: torch.Tensor) -> bool:
    """Whether a call with this tensor is recorded for a backward."""
    return t.requires_grad and torch.is_grad_enabled()

"""No deadlock in the Hopper backward, and every buffer holds what is read: random runs of backward_model.py."""

import itertools
from dataclasses import replace

import pytest
from backward_model import Consumer, Keeper, Lane, Protocol, Wide
from backward_runs import attempt_all, must_fail
from barrier_model import Pipe


@pytest.mark.sampled(quick=2, slow=3)
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("consumer", [Consumer, Wide])
def test_no_deadlock_and_every_buffer_holds_what_is_read(consumer, is_dynamic, is_deterministic):
    attempt_all(range(100), consumer, is_dynamic=is_dynamic, is_deterministic=is_deterministic)


@pytest.mark.parametrize("consumer", [Consumer, Wide])
def test_tiles_of_every_length_follow_each_other(consumer):
    """The tiles include some without steps, which leave all buffers and counts alone, and some with one step."""
    protocol = Protocol(consumer, is_deterministic=True)
    for lengths in itertools.product(range(4), repeat=3):
        tiles = [[((number, i), 0) for i in range(steps)] for number, steps in enumerate(lengths)]
        for num_ctas, is_dynamic in ((1, False), (2, True)):
            replace(protocol, is_dynamic=is_dynamic).run(tiles, num_ctas, 0)


# ---------------------------------------------------------------- the model finds faults


class ForgetsRelease(Consumer):
    def release(self, pipe, n):
        if self.id != (1, 0) or pipe is not self.block.do:
            yield from super().release(pipe, n)


class ReleasesTwice(Consumer):
    def release(self, pipe, n):
        yield from super().release(pipe, n)
        if self.id == (1, 0) and pipe is self.block.do:
            yield from super().release(pipe, n)


class ReleasesQBeforeDK(Consumer):
    def release(self, pipe, n):
        if pipe is not self.block.q:
            yield from super().release(pipe, n)

    def issue_dk(self, q, i):
        yield from super().issue_dk(q, i)
        yield from super().release(self.block.q, q)


class ReleasesDOBeforeDS(Consumer):
    def release(self, pipe, n):
        if pipe is not self.block.do:
            yield from super().release(pipe, n)

    def make_ds(self, i):
        yield from super().release(self.block.do, self.do)
        yield from super().make_ds(i)


class ReleasesKBeforeLastDQ(Consumer):
    def release(self, pipe, n):
        if pipe is not self.block.k:
            yield from super().release(pipe, n)

    def last_dq(self, i, count):
        yield from super().release(self.block.k, self.kv)
        yield from super().last_dq(i, count)


class PublishesTwice(Consumer):
    def publish_ds(self, count):
        yield from super().publish_ds(count)
        if self.id == (0, 1):
            yield from super().publish_ds(count)


class OtherParity(Consumer):
    def wait_for(self, barriers, count):
        yield from super().wait_for(barriers, count + 2)


class NoWaitForDS(Consumer):
    def wait_for_ds(self, count):
        yield


class NoWaitForTurn(Consumer):
    def take_turn(self):
        yield


class TurnNotGiven(Consumer):
    def give_turn(self):
        if self.id != (1, 1) or self.additions == 0:
            yield from super().give_turn()


class TurnGivenEarly(Consumer):
    """A warp says that it has added to dQ before it does."""

    def take_turn(self):
        yield from super().take_turn()
        if self.id == (1, 1):
            yield from super().give_turn()

    def give_turn(self):
        if self.id != (1, 1):
            yield from super().give_turn()


class OtherSlot(Consumer):
    """A warp waits for the turn of its last but one addition."""

    def take_turn(self):
        if self.protocol.is_deterministic:
            yield from self.wait_for(self.block.granted[self.w], self.additions - 2)


class NoFence(Keeper):
    def fence(self):
        yield


class GrantsUnseen(Lane):
    """The keeper does not look at the counter."""

    @property
    def adds(self):
        return not self.grants


class CountsUnadded(Lane):
    """The keeper counts an addition of the warpgroup when it was granted."""

    def is_ready(self):
        block = self.keeper.block
        barriers = block.added if self.grants else block.granted
        block.added, added = barriers, block.added
        is_ready = super().is_ready()
        block.added = added
        return is_ready


class TwoSlotsAhead(Lane):
    """The keeper grants a turn while the last one in its slot has not been taken."""

    def is_ready(self):
        return self.is_turn() if self.grants else super().is_ready()

    def is_turn(self):
        return not self.adds or self.keeper.run.turns[self.counter] == self.steps[self.i][1]


def with_lanes(lane):
    """Consumers with a keeper that has such lanes."""
    keeper = type("Keeps", (Keeper,), {"lane": lane})
    return type(lane.__name__, (Consumer,), {"keeper": keeper})


class NobodyFirst(Consumer):
    def prime_turns(self):
        yield


class WantsNothing(Consumer):
    def want_next(self):
        if self.id != (1, 1):
            yield from super().want_next()


class WantsTooEarly(Consumer):
    def take(self, wave):
        if self.id == (1, 1):
            yield from super().want_next()
        return (yield from super().take(wave))

    def want_next(self):
        if self.id != (1, 1) or not self.block.slot.content:
            yield from super().want_next()


class NobodyMeets(Consumer):
    def meet(self):
        yield


class StagesWhereDQReads(Consumer):
    def stage(self):
        self.count += 1
        stage = super().stage()
        self.count -= 1
        return stage


class StoresBeforeLastDQ(Consumer):
    def last_dq(self, i, count):
        yield from super().store()
        yield from super().last_dq(i, count)


class WideNobodyMeets(Wide):
    def meet(self):
        yield


class WideOtherParity(Wide):
    def wait_for(self, barriers, count):
        yield from super().wait_for(barriers, count + 2 * (barriers is self.block.p_full))


class WideNoWaitForDS(Wide):
    def wait_for_ds(self, count):
        yield


class WideNoWaitForP(Wide):
    def wait_for(self, barriers, count):
        if barriers is not self.block.p_full:
            yield from super().wait_for(barriers, count)


class WideSendsPEarly(Wide):
    def make_p(self, i):
        yield from super().make_p(i)
        if i > 0:
            yield from super().send_p(i, self.count + 1)

    def send_p(self, i, count):
        if i == 0:
            yield from super().send_p(i, count)


class WideReleasesKEarly(Wide):
    def release(self, pipe, n):
        if pipe is not self.block.k or self.w == 0:
            yield from super().release(pipe, n)

    def receive_p(self, i, count):
        if i == 0:
            yield from super().release(self.block.k, self.kv)
        yield from super().receive_p(i, count)


class WideTurnNotGiven(Wide):
    def give_turn(self):
        if self.id != (0, 1) or self.additions == 0:
            yield from super().give_turn()


FAULTS = [
    (ForgetsRelease, {}),
    (ReleasesTwice, {}),
    (ReleasesQBeforeDK, {}),
    (ReleasesDOBeforeDS, {"overlaps": True}),
    (ReleasesKBeforeLastDQ, {}),
    (PublishesTwice, {}),
    (OtherParity, {}),
    (NoWaitForDS, {}),
    (NoWaitForTurn, {"is_deterministic": True}),
    (TurnGivenEarly, {"is_deterministic": True}),
    (TurnNotGiven, {"is_deterministic": True}),
    (OtherSlot, {"is_deterministic": True}),
    (type("NoFence", (Consumer,), {"keeper": NoFence}), {"is_deterministic": True}),
    *((with_lanes(lane), {"is_deterministic": True}) for lane in (GrantsUnseen, CountsUnadded, TwoSlotsAhead)),
    (NobodyFirst, {"pingpong": True}),
    (WantsNothing, {"is_dynamic": True}),
    (WantsTooEarly, {"is_dynamic": True}),
    (NobodyMeets, {"has_garbage": True}),
    (NobodyMeets, {"has_garbage": False}),
    (StagesWhereDQReads, {}),
    (StoresBeforeLastDQ, {}),
    (Consumer, {"q_stages": 1}),
    (Consumer, {"ds_buffers": 1}),
    (WideNobodyMeets, {"has_garbage": False, "warpgroups_meet": False}),
    (WideOtherParity, {}),
    (WideNoWaitForDS, {}),
    (WideNoWaitForP, {}),
    (WideSendsPEarly, {}),
    (WideReleasesKEarly, {}),
    (WideTurnNotGiven, {"is_deterministic": True}),
    (Wide, {"q_stages": 1}),
    (Wide, {"ds_buffers": 1}),
]


@pytest.mark.parametrize(("consumer", "fixed"), FAULTS)
def test_the_model_finds_faults(consumer, fixed):
    must_fail(consumer, **fixed)


@pytest.mark.parametrize("consumer", [Consumer, Wide])
def test_the_model_finds_a_producer_that_does_not_wait(consumer, monkeypatch):
    monkeypatch.setattr(Pipe, "acquire", lambda self, n: iter(()))
    must_fail(consumer)


@pytest.mark.parametrize("consumer", [Consumer, Wide])
def test_the_model_finds_a_wrong_order_of_tiles(consumer):
    """Turns in descending order make tiles wait for tiles that no thread block computes."""
    tiles = [[((0, i), 3 - number) for i in range(3)] for number in range(4)]
    with pytest.raises(AssertionError, match="deadlock"):
        Protocol(consumer, is_deterministic=True).run(tiles, 2, 0)

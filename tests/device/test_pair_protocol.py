"""No deadlock in the Hopper backward in pairs, and every buffer holds what is read: random runs of pair_model.py."""

import itertools

import pytest
from backward_model import Protocol
from backward_runs import attempt_all, must_fail
from barrier_model import WARPS, Pipe
from pair_model import Paired, PairedBlock, PairedKeeper

PIECES = {192: (2, 1), 256: (2, 2)}  # of dQ


@pytest.mark.sampled(quick=2, slow=10)
@pytest.mark.parametrize("start", range(0, 60, 12))
@pytest.mark.parametrize("pieces", PIECES.values(), ids=PIECES.keys())
@pytest.mark.parametrize("is_deterministic", [False, True])
@pytest.mark.parametrize("is_dynamic", [False, True])
def test_no_deadlock_and_every_buffer_holds_what_is_read(is_dynamic, is_deterministic, pieces, start):
    attempt_all(
        range(start, start + 12), Paired, is_dynamic=is_dynamic, is_deterministic=is_deterministic, pieces=pieces
    )


def test_tiles_of_every_length_follow_each_other():
    """The tiles include some without steps, which leave all buffers and counts alone, and some with one step."""
    for seed, lengths in enumerate(itertools.product((0, 1, 3), repeat=3)):
        tiles = [[((number, i), 0) for i in range(steps)] for number, steps in enumerate(lengths)]
        Protocol(Paired, is_deterministic=True, pieces=PIECES[256 if seed % 2 else 192]).run(tiles, 1, seed)


# ---------------------------------------------------------------- the model finds faults


class NoWaitForSlot(Paired):
    def wait_for_slot(self, count):
        yield


class OtherParityOfSlot(Paired):
    def wait_for_slot(self, count):
        yield from super().wait_for_slot(count + 1)


class OtherParityOfP(Paired):
    def wait_for(self, barriers, count):
        yield from super().wait_for(barriers, count + (barriers is self.block.p_full))


class OtherParityOfDS(Paired):
    def wait_for_ds(self, count):
        yield from super().wait_for_ds(count + 1)


class NoWaitForDS(Paired):
    def wait_for_ds(self, count):
        yield


class NoWaitForP(Paired):
    def wait_for(self, barriers, count):
        if barriers is not self.block.p_full:
            yield from super().wait_for(barriers, count)


class FreesOwnDSOnly(Paired):
    def free_ds(self):
        self.block.arrive_at(self.block, self.block.ds_empty[0])
        yield


class OnlyOwnDQFreesDS(FreesOwnDSOnly):
    """The barrier of each thread block counts the arrivals of that one alone."""

    @staticmethod
    def launch(run, cta):
        for block in Paired.launch(run, cta):
            (barrier,) = block.ds_empty
            barrier.arrivals = barrier.pending = WARPS * run.protocol.warpgroups


class FreesDSBeforeDQ(Paired):
    """A warpgroup arrives when it has issued dQ, not when dQ is complete."""

    early = 0

    def issue_dq(self, i, count):
        yield from super().issue_dq(i, count)
        if self.w == self.early:
            yield from super().free_ds()

    def free_ds(self):
        if self.w != self.early:
            yield from super().free_ds()


class Warpgroup1FreesDSBeforeDQ(FreesDSBeforeDQ):
    early = 1


class SendsDSBeforeAllHaveWritten(Paired):
    """Without the barrier of the warpgroup, one warp sends what others have not written."""

    def send_ds(self, i, count):
        yield from self.write_ds(i, count)
        yield from self.publish_ds(i)


class PutsPWhereOthersWriteDS(Paired):
    """P of a warp has some of the queries, and dS some of the keys: without a barrier, warps overwrite others' P."""

    def place_of_p(self):
        return [part for keys in self.block.ds[0] for part in keys[self.warp :: WARPS]]


class WritesPBeforeDVHasReadIt(Paired):
    """P is made in the registers that the GEMM of the step before reads."""

    def issue_dv(self, do, i):
        yield from super().issue_dv(do, i)
        if i < len(self.steps) - 1:
            yield from super().make_p(i + 1)

    def make_p(self, i):
        if i == 0:
            yield from super().make_p(i)


class ReleasesDOBeforeDV(Paired):
    def release(self, pipe, n):
        if pipe is not self.block.do or self.w == 1:
            yield from super().release(pipe, n)

    def issue_dv(self, do, i):
        yield from super().issue_dv(do, i)
        yield from super().release(self.block.do, do)


class ReleasesQToItselfOnly(Paired):
    def release(self, pipe, n):
        if pipe is not self.block.q:
            yield from super().release(pipe, n)
        else:
            self.block.arrive_at(self.block, pipe.empty[pipe.slot(n)])
            yield


class FillsQOfPeerUnasked(ReleasesQToItselfOnly):
    """The barriers of each thread block count the arrivals of that one alone."""

    @staticmethod
    def launch(run, cta):
        for block in Paired.launch(run, cta):
            for barrier in block.q.empty:
                barrier.arrivals = barrier.pending = WARPS * run.protocol.warpgroups


class ReleasesQBeforeDK(Paired):
    def release(self, pipe, n):
        if pipe is not self.block.q or self.w == 0:
            yield from super().release(pipe, n)

    def issue_dk(self, q, i):
        yield from super().issue_dk(q, i)
        yield from super().release(self.block.q, q)


class ReleasesKEarly(Paired):
    def release(self, pipe, n):
        if pipe is not self.block.k or self.w == 1:
            yield from super().release(pipe, n)

    def make_p(self, i):
        yield from super().make_p(i)
        if i == len(self.steps) - 1:
            yield from super().release(self.block.k, self.kv)


class WantsTooEarly(Paired):
    """A warp says that it has read a number when it begins to wait for it."""

    def is_early(self):
        return self.block.rank == 1 and self.id == (1, 1)

    def take(self, wave):
        if self.is_early():
            yield from super().want_next()
        return (yield from super().take(wave))

    def want_next(self):
        if not self.is_early() or not self.block.slot.content:
            yield from super().want_next()


class WantsOnlyOwn(Paired):
    """Warps of the second thread block do not ask the scheduler of the first one."""

    def want_next(self):
        if self.block.rank == 0:
            yield from super().want_next()


class BothAddMiddlePiece(Paired):
    def adds_piece(self, i):
        return True


class NobodyAddsMiddlePiece(Paired):
    def adds_piece(self, i):
        return self.w == 0


class AddsKeptDQToNextBlock(Paired):
    """The number of the block is overwritten before the addition."""

    def add_kept_dq(self):
        if self.dq_step is not None and self.dq_step < len(self.steps) - 1:
            self.dq_step += 1
        yield from super().add_kept_dq()


class KeepsDQBeforeAddition(Paired):
    """The kept dQ is overwritten before it is added."""

    def dv_step(self, i, has_next):
        self.dq.write(self.tag(i))
        yield from super().dv_step(i, has_next)


class KeepsLastDQ(Paired):
    """The last dQ of a tile is not added there, but when the next tile is under way, if there is one."""

    def add_kept_dq(self):
        if self.dq_step != len(self.steps) - 1:
            yield from super().add_kept_dq()


class LosesLastDQ(Paired):
    def add_kept_dq(self):
        if self.dq_step == len(self.steps) - 1:
            self.dq_step = None
        yield from super().add_kept_dq()


class SamePieces(Paired):
    @property
    def part(self):
        return self.w


class NoWaitForTurn(Paired):
    def take_turn(self):
        yield


class NoFence(Paired):
    """The keepers count additions that may not be complete."""

    class keeper(PairedKeeper):
        def fence(self):
            yield


class TurnNotGiven(Paired):
    def give_turn(self):
        if self.id != (0, 1) or self.additions == 0:
            yield from super().give_turn()


class CountsMiddlePieceTwice(Paired):
    """Both keepers count the piece that one thread block adds."""

    class keeper(PairedKeeper):
        def adds(self, w, step):
            return True


READ, SUMS = "overwritten while it was read|in place of", "additions|added out of order"
FAULTS = [
    (NoWaitForSlot, READ, {}),
    (OtherParityOfSlot, "deadlock", {}),
    (OtherParityOfP, READ, {}),
    (OtherParityOfDS, READ, {}),
    (NoWaitForDS, READ, {}),
    (NoWaitForP, READ, {}),
    (FreesOwnDSOnly, "deadlock", {}),
    (OnlyOwnDQFreesDS, READ, {}),
    (FreesDSBeforeDQ, READ, {}),
    (Warpgroup1FreesDSBeforeDQ, READ, {}),
    (SendsDSBeforeAllHaveWritten, READ, {}),
    (PutsPWhereOthersWriteDS, READ, {}),
    (WritesPBeforeDVHasReadIt, READ, {}),
    (ReleasesDOBeforeDV, READ, {}),
    (ReleasesQToItselfOnly, "deadlock", {}),
    (FillsQOfPeerUnasked, READ, {}),
    (ReleasesQBeforeDK, READ, {}),
    (ReleasesKEarly, READ, {}),
    (WantsTooEarly, "another wave's number|deadlock", {"is_dynamic": True}),
    (WantsOnlyOwn, "deadlock", {"is_dynamic": True}),
    (BothAddMiddlePiece, SUMS, {"pieces": PIECES[192]}),
    (NobodyAddsMiddlePiece, SUMS, {"pieces": PIECES[192]}),
    (SamePieces, SUMS, {}),
    (AddsKeptDQToNextBlock, "in place of", {}),
    (KeepsDQBeforeAddition, "in place of", {}),
    (KeepsLastDQ, "in place of|additions", {}),
    (LosesLastDQ, "additions", {"is_deterministic": False}),
    (NoWaitForTurn, "added out of order", {"is_deterministic": True}),
    (NoFence, "added out of order", {"is_deterministic": True}),
    (CountsMiddlePieceTwice, "out of order|deadlock", {"is_deterministic": True, "pieces": PIECES[192]}),
    (TurnNotGiven, "deadlock", {"is_deterministic": True}),
    (Paired, "deadlock", {"q_stages": 1}),
]


@pytest.mark.parametrize(("consumer", "match", "fixed"), FAULTS)
def test_the_model_finds_faults(consumer, match, fixed):
    must_fail(consumer, match, **fixed)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("name", ["enter", "leave"])
def test_the_model_finds_a_missing_barrier_of_the_cluster(name, is_dynamic, monkeypatch):
    """Without the first barrier something arrives before there are barriers, without the last one after the exit."""
    monkeypatch.setattr(PairedBlock, name, lambda self, name: iter(()))
    must_fail(Paired, "has not begun, or is gone", is_dynamic=is_dynamic)


def test_the_model_finds_a_producer_that_does_not_wait(monkeypatch):
    monkeypatch.setattr(Pipe, "acquire", lambda self, n: iter(()))
    must_fail(Paired, f"{READ}|an arrival too many")

"""The Hopper backward in pairs of thread blocks, as a model: what paired.py adds to backward_model.py.

Arrivals at the other thread block's barriers land late, and so do the copies that are sent to it. Its shared memory is
there from its start, which may be late, until its last warp exits.
"""

from backward_model import Keeper, Producer, Reader, ThreadBlock, Wide
from barrier_model import WARPS, Buffer, MBarrier, NamedBarrier, Pipe

PEER_PIECES = 2  # as in paired.py
RANKS = 2


class SharedPipe(Pipe):
    """A circular buffer that both thread blocks of a pair have, and fill together: each loads half of every tile twice.

    Args: copies: the halves, and then what each thread block loads for itself.
    """

    def __init__(self, block, name, stages, copies):
        super().__init__(block.run, stages, RANKS * WARPS * block.protocol.warpgroups, copies)
        self.block, self.name = block, name

    def of_pair(self):
        return [getattr(block, self.name) for block in self.block.pair]

    def fill(self, n, content):
        yield from self.acquire(n)
        copies = len(self.of(n))
        self.full[self.slot(n)].arrive(copies=copies)
        halves = [(pipe, self.block.rank) for pipe in self.of_pair()]
        for pipe, index in halves + [(self, index) for index in range(RANKS, copies)]:
            yield
            buffer = pipe.of(n)[index]
            buffer.write("a copy on its way")
            self.run.start(pipe.copy(buffer, content, pipe.full[self.slot(n)]))

    def copy(self, buffer, content, barrier):
        yield
        self.block.check_memory()
        yield from super().copy(buffer, content, barrier)

    def release(self, n):
        for pipe in self.of_pair():
            self.block.arrive_at(pipe.block, pipe.empty[self.slot(n)])
        yield


class PairedBlock(ThreadBlock):
    """A thread block of a pair. Args: pair: both; cluster: the barrier of all their warps."""

    def __init__(self, run, cta, rank, pair, cluster):
        super().__init__(run, cta)
        self.rank, self.pair, self.cluster = rank, pair, cluster
        self.running = 0  # warps, which have shared memory
        self.late = 0  # this thread block's arrivals that have not landed
        warps = WARPS * self.protocol.warpgroups
        self.k = Pipe(run, 1, warps, 1 + PEER_PIECES)
        self.q = SharedPipe(self, "q", self.protocol.q_stages, RANKS + 1)  # with its statistics
        self.do = SharedPipe(self, "do", self.protocol.do_stages, RANKS)
        self.ds, self.inbox = self.ds[:1], Buffer()
        self.ds_full, self.ds_empty, self.p_full = [MBarrier(1)], [MBarrier(RANKS * warps)], [MBarrier(WARPS)]
        self.queue_empty = MBarrier(RANKS * (warps + 1 + self.protocol.is_deterministic))

    def begin(self):
        """The process that starts the thread block."""
        for _ in range(self.run.random.choice((0, 0, 30))):
            yield
        warps = list(self.warps(PairedProducer, self.protocol.consumer.keeper))
        slowness = self.run.random.choice((0, 0, 0.9))
        self.running = len(warps)
        for i, process in enumerate(warps):
            self.run.start(self.warp((self.rank, i), process), slowness)

    def warp(self, name, process):
        yield from self.enter(name)
        yield from process
        yield from self.leave(name)
        self.running -= 1

    def enter(self, name):
        yield from self.cluster.sync(name)

    def leave(self, name):
        yield lambda: not self.late  # arrivals land before a later one at the cluster's barrier
        yield from self.cluster.sync(name)

    def check_memory(self):
        assert self.running, "the thread block has not begun, or is gone"

    # ---------------------------------------------------------------- what is sent

    def arrive_at(self, block, barrier, copies=0):
        """An arrival at a barrier of a thread block of the pair."""
        self.late += 1
        self.run.start(self.land(block, barrier, copies))

    def land(self, block, barrier, copies):
        yield
        block.check_memory()
        barrier.arrive(copies)
        self.late -= 1

    def schedule(self):
        """The first thread block draws for both."""
        if self.rank == 0:
            yield from super().schedule()

    def hand_out(self, wave, number):
        for block in self.pair:
            self.arrive_at(block, block.queue_full, copies=1)
            self.run.start(block.receive((wave, number)))
            yield

    def receive(self, word):
        yield
        self.check_memory()
        self.slot.write(word)
        self.queue_full.copied()

    def copy_ds(self, content):
        """The process of the copy of dS to the other thread block's inbox."""
        peer, source = self.pair[1 - self.rank], [part for keys in self.ds[0] for part in keys]
        for part in source:
            part.begin_read(content, True)
        peer.inbox.write("a copy on its way")
        yield
        self.check_memory()
        peer.check_memory()
        peer.inbox.write(content)
        for part in source:
            part.end_read()
        peer.ds_full[0].copied()


class PairedReader(Reader):
    def want_next(self):
        if self.protocol.is_dynamic:
            first = self.block.pair[0]
            self.block.arrive_at(first, first.queue_empty)
            yield


class PairedProducer(PairedReader, Producer):
    """The process of the producer warp of a thread block of a pair."""


def part_of(protocol, rank, w):
    """The piece of dQ that a warpgroup of a thread block computes."""
    if has_middle_piece(protocol):
        return w + 2 * rank * (1 - w)
    return PEER_PIECES * rank + w


def has_middle_piece(protocol):
    return sum(protocol.pieces) < 2 * PEER_PIECES


def adds_piece(protocol, rank, w, step):
    (*_, m_block), _ = step
    return not has_middle_piece(protocol) or w == 0 or m_block % 2 == rank


class PairedKeeper(PairedReader, Keeper):
    """The process of the keeper of a thread block of a pair."""

    def part_of(self, w):
        return part_of(self.protocol, self.block.rank, w)

    def adds(self, w, step):
        return adds_piece(self.protocol, self.block.rank, w, step)


class Paired(PairedReader, Wide):
    """The process of a warp of `PairedConsumer`."""

    keeper = PairedKeeper

    def __init__(self, block, w, warp):
        super().__init__(block, w, warp)
        self.dq, self.dq_step = Buffer(), None  # warpgroup 0's piece of a dQ, until it is added, and its step

    @staticmethod
    def launch(run, cta):
        p = run.protocol
        cluster = NamedBarrier(RANKS * (1 + p.is_dynamic + p.is_deterministic + WARPS * p.warpgroups))
        pair = []
        for rank in range(RANKS):
            pair.append(PairedBlock(run, cta, rank, pair, cluster))
        for block in pair:
            run.start(block.begin())
        return pair

    @classmethod
    def shares(cls, protocol):
        return [(piece, warp, 0) for piece in range(sum(protocol.pieces)) for warp in range(WARPS)]

    # ---------------------------------------------------------------- steps

    def dv_step(self, i, has_next):
        block, adds_early = self.block, not self.protocol.is_deterministic
        yield from block.do.wait(self.do)
        yield from self.issue_dv(self.do, i)
        if adds_early:
            yield from self.add_kept_dq()
        if has_next:
            yield from block.q.wait(self.q)
            yield from self.issue_s(self.q, i + 1)
        if not adds_early:
            yield from self.add_kept_dq()
        if has_next:
            yield from self.read_stats(self.q, i + 1)
        yield from self.wait_group(1 if has_next else 0)
        yield from self.release(block.do, self.do)
        yield from self.wait_for_ds(self.count)
        yield from self.issue_dq(i, self.count)
        if has_next:
            yield from self.wait_group(1)
            yield from self.release(block.q, self.q)
            yield from self.make_p(i + 1)
        yield from self.wait_group(0)
        yield from self.keep_dq(i)
        if has_next:
            yield from self.send_p(i + 1, self.count + 1)
        else:
            yield from self.add_kept_dq()

    def dk_step(self, i, has_next):
        block = self.block
        yield from self.issue_dk(self.q, i)
        yield from self.wait_for_ds(self.count)
        yield from self.issue_dq(i, self.count)
        if has_next:
            yield from block.q.wait(self.q + 1)
            yield from block.do.wait(self.do)
            yield from self.issue_dp(self.do, i + 1)
        yield from self.wait_group(2 if has_next else 1)
        yield from self.release(block.q, self.q)
        yield from self.wait_group(1 if has_next else 0)
        yield from self.free_ds()
        yield from self.add_dq_in_turn(i)
        if has_next:
            yield from self.read_stats(self.q + 1, i + 1)
            yield from self.wait_group(0)
            yield from self.release(block.do, self.do)
            yield from self.receive_p(i + 1, self.count + 1)
            yield from self.make_ds(i + 1)
            yield from self.send_ds(i + 1, self.count + 1)

    # ---------------------------------------------------------------- P and dS

    def place_of_p(self):
        """Where dS of the same keys will be."""
        return self.block.ds[0][self.warp]

    def wait_for_slot(self, count):
        yield from self.wait_for(self.block.ds_empty, count + 1)

    def send_p(self, i, count):
        yield from self.wait_for_slot(count)
        yield from super().send_p(i, count)

    def send_ds(self, i, count):
        yield from self.write_ds(i, count)
        yield from self.meet()
        yield from self.publish_ds(i)

    def publish_ds(self, i):
        if self.warp == 0:
            self.block.ds_full[0].arrive(copies=1)
            yield
            self.run.start(self.block.copy_ds(self.tag(i)))
            yield

    def free_ds(self):
        for block in self.block.pair:
            self.block.arrive_at(block, block.ds_empty[0])
        yield

    # ---------------------------------------------------------------- dQ

    @property
    def part(self):
        return part_of(self.protocol, self.block.rank, self.w)

    def operands_of_dq(self, i, count):
        return [*super().operands_of_dq(i, count), (self.block.inbox, self.tag(i))]

    def adds_piece(self, i):
        return adds_piece(self.protocol, self.block.rank, self.w, self.steps[i])

    def add_dq_in_turn(self, i):
        yield from self.take_turn()
        if self.adds_piece(i):
            yield from self.add_dq(i)
        yield from self.give_turn()

    def keep_dq(self, i):
        yield from self.free_ds()
        self.dq.write(self.tag(i))
        self.dq_step = i

    def add_kept_dq(self):
        if self.dq_step is not None:
            self.dq.read(self.tag(self.dq_step))
            yield from self.add_dq_in_turn(self.dq_step)
        self.dq_step = None

"""The Hopper backward as a model: its barriers and the order of waits and arrivals, without any arithmetic.

The model has the barriers of producer.py, consumer.py, exchange.py, wide.py and turns.py of sm90/backward and of
blocks/tiles/queue.py: every warp is a process, and so are copies and additions. They run step by step in random order,
some of them seldom.
A GEMM reads its buffers from its issue until a wait covers it; contents are tagged with tile and step.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass

from barrier_model import WARPS, Buffer, MBarrier, NamedBarrier, Pipe

from onepass.geometry import tile_scheduler

DRAW_AHEAD = 2  # the value in blocks/tiles/queue.py
SLOTS = 2  # of turns.py
MISSES = 200  # processes that are found waiting before all of them are looked at

# ---------------------------------------------------------------- protocols


@dataclass(frozen=True)
class Protocol:
    """The properties of a run.

    Attributes:
        consumer: class of the consumer warps.
        has_garbage: what lies past the end of a sequence is cleared.
        warpgroups_meet: no warp sees a GEMM complete before all warps of its warpgroup have issued it, which PTX does
            not guarantee.
        overlaps: overlap_gradients; turns then pass before the last GEMM of a batch (its last instruction).
        pieces: pieces of a dQ for each warpgroup of the wide consumer.
    """

    consumer: type
    warpgroups: int = 2
    q_stages: int = 2
    do_stages: int = 2
    ds_buffers: int = 2
    pingpong: bool = True
    is_dynamic: bool = True
    is_deterministic: bool = False
    has_garbage: bool = False
    warpgroups_meet: bool = False
    overlaps: bool = False
    pieces: tuple = (2, 2)

    def run(self, tiles, num_ctas, seed):
        Run(self, tiles, num_ctas, seed).finish()


class Run:
    """A launch: thread blocks, and what they share in global memory.

    Args: tiles: for each tile ((block of dQ, turn), ...), one pair a step.
    """

    def __init__(self, protocol, tiles, num_ctas, seed):
        self.protocol, self.tiles, self.num_ctas = protocol, tiles, num_ctas
        self.random, self.counter, self.turns, self.sums = random.Random(seed), 0, Counter(), {}
        self.processes, self.slowness = [], []
        for cta in range(min(num_ctas, len(tiles))):  # the grid was made for the worst case
            protocol.consumer.launch(self, cta)

    def has_garbage(self, content):
        """Whether the tile of keys (number) or the block of queries (number, step) goes past the end of a sequence."""
        return self.protocol.has_garbage and hash(content) % 2 == 0

    def start(self, process, least_slowness=0):
        self.processes.append([process, None])
        self.slowness.append(max(least_slowness, self.random.choice((0, 0, 0, 0.9, 0.98))))

    def draw(self):
        number = self.counter
        self.counter = 0 if number >= len(self.tiles) - 1 else number + 1
        return number

    def add(self, share, number):
        """Record that a tile's addition to a share of dQ is complete."""
        before = self.sums.setdefault(share, [])
        assert not self.protocol.is_deterministic or not before or before[-1] < number, "added out of order"
        before.append(number)

    def finish(self):
        choose, misses = self.random.random, 0
        while self.processes:
            i = int(choose() * len(self.processes))
            process = self.processes[i]
            if misses > MISSES:
                assert any(condition is None or condition() for _, condition in self.processes), "deadlock"
                misses = 0
            if process[1] is not None and not process[1]():
                misses += 1
                continue
            if choose() < self.slowness[i]:
                continue
            misses = 0
            try:
                process[1] = next(process[0])
            except StopIteration:
                for entries in (self.processes, self.slowness):
                    entries[i] = entries[-1]
                    entries.pop()
        self.check()

    def check(self):
        assert self.counter == 0, "the next launch would begin with another number"
        visits = [(key, number) for number, tile in enumerate(self.tiles) for key, _ in tile]
        shares = self.protocol.consumer.shares(self.protocol)
        expected = sorted((key, *share, number) for (key, number), share in itertools.product(visits, shares))
        additions = sorted((*share, number) for share, numbers in self.sums.items() for number in numbers)
        assert additions == expected, "additions that are missing, or that nobody expects"
        if self.protocol.is_deterministic:
            assert sum(self.turns.values()) == len(visits) * len({part for part, _, _ in shares})


class ThreadBlock:
    """Shared memory, barriers and processes of a thread block."""

    def __init__(self, run, cta):
        p = self.protocol = run.protocol
        self.run, self.cta = run, cta
        warps = WARPS * p.warpgroups
        key_tiles = p.consumer.key_tiles(p)
        self.k, self.v = (Pipe(run, 1, warps, key_tiles) for _ in range(2))
        self.q, self.do = Pipe(run, p.q_stages, warps, 2), Pipe(run, p.do_stages, warps, 1)  # Q with its statistics
        # the keys of a warp (in columns), in four parts by queries (rows)
        self.ds = [[[Buffer() for _ in range(4)] for _ in range(key_tiles * WARPS)] for _ in range(p.ds_buffers)]
        self.p = [Buffer() for _ in range(WARPS)]
        self.ds_full = [MBarrier(key_tiles * WARPS) for _ in range(2)]
        self.p_full = [MBarrier(WARPS) for _ in range(2)]
        self.pingpong = [NamedBarrier(2 * WARPS) for _ in range(p.warpgroups)]
        self.meeting = [NamedBarrier(WARPS) for _ in range(p.warpgroups)]
        self.issued = [[0] * WARPS for _ in range(p.warpgroups)]
        self.slot, self.queue_full = Buffer(), MBarrier(1)
        self.queue_empty = MBarrier(warps + 1 + p.is_deterministic)
        self.granted, self.added = (
            [[MBarrier(n) for _ in range(SLOTS)] for _ in range(p.warpgroups)] for n in (1, WARPS)
        )
        self.additions = []  # additions to dQ that are not complete

    def start(self):
        for process in self.warps(Producer, self.protocol.consumer.keeper):
            self.run.start(process)

    def warps(self, producer, keeper):
        """The processes of all warps."""
        p = self.protocol
        yield producer(self).produce()
        if p.is_dynamic:
            yield self.schedule()
        if p.is_deterministic:
            yield keeper(self).keep()
        for w, warp in itertools.product(range(p.warpgroups), range(WARPS)):
            yield p.consumer(self, w, warp).consume()

    def ds_of(self, count):
        return self.ds[count % len(self.ds)]

    def schedule(self):
        """The process of `TileQueue.fill`."""
        number, wave = self.cta, 1
        while number < len(self.run.tiles):
            yield from self.queue_empty.wait(wave - 1 & 1)
            number = self.run.num_ctas + self.run.draw()
            yield from self.hand_out(wave, number)
            wave += 1

    def hand_out(self, wave, number):
        self.slot.write((wave, number))
        yield
        self.queue_full.arrive()


class Reader:
    """What the producer and the consumers have in common."""

    def __init__(self, block):
        self.block, self.run, self.protocol = block, block.run, block.protocol

    def take(self, wave):
        if not self.protocol.is_dynamic:
            return tile_scheduler.tile_number(self.block.cta, wave, self.run.num_ctas)
        yield from self.block.queue_full.wait(wave - 1 & 1)
        yield
        assert self.block.slot.content[0] == wave, "another wave's number"
        return self.block.slot.content[1]

    def want_next(self):
        if self.protocol.is_dynamic:
            self.block.queue_empty.arrive()
            yield


class Producer(Reader):
    """The process of `BackwardProducer.run`."""

    def produce(self):
        block, tiles = self.block, self.run.tiles
        kv = q = do = wave = 0
        number = block.cta
        while number < len(tiles):
            steps = len(tiles[number])
            if steps > 0:
                yield from block.k.fill(kv, number)
                yield from block.q.fill(q, (number, 0))
                q += 1
                yield from block.v.fill(kv, number)
                kv += 1
            if steps < DRAW_AHEAD:
                yield from self.want_next()
            for i in range(steps):
                if i == steps - DRAW_AHEAD:
                    yield from self.want_next()
                yield from block.do.fill(do, (number, i))
                do += 1
                if i < steps - 1:
                    yield from block.q.fill(q, (number, i + 1))
                    q += 1
            wave += 1
            number = yield from self.take(wave)
        for pipe, n in ((block.k, kv), (block.v, kv), (block.q, q), (block.do, do)):
            yield from pipe.tail(n)


class Keeper(Reader):
    """The process of `TurnKeeper.run`: its lanes share each fence."""

    lane: type

    def keep(self):
        yield from self.want_next()
        number, additions, wave = self.block.cta, 0, 0
        while number < len(self.run.tiles):
            steps = self.run.tiles[number]
            roles = itertools.product(range(self.protocol.warpgroups), (True, False))
            lanes = [self.lane(self, w, grants, steps, additions) for w, grants in roles]
            while lanes := [lane for lane in lanes if lane.i < len(steps)]:
                yield lambda lanes=lanes: any(lane.is_ready() for lane in lanes)
                ready = [lane for lane in lanes if lane.is_ready()]
                yield from self.fence()
                for lane in ready:
                    lane.act()
                    yield
            additions += len(steps)
            wave += 1
            number = yield from self.take(wave)
            yield from self.want_next()

    def fence(self):
        """Wait until the additions that were issued before are complete."""
        before = list(self.block.additions)
        yield lambda: not any(addition in self.block.additions for addition in before)

    def part_of(self, w):
        """The part of a dQ that a warpgroup adds to."""
        return w

    def adds(self, w, step):
        return True


class Lane:
    """A lane of the keeper: it grants the turns of a warpgroup in a tile, or counts its additions."""

    def __init__(self, keeper, w, grants, steps, additions):
        self.keeper, self.w, self.grants, self.steps, self.additions = keeper, w, grants, steps, additions
        self.i = 0

    @property
    def counter(self):
        key, _ = self.steps[self.i]
        return key, self.keeper.part_of(self.w)

    @property
    def adds(self):
        return self.keeper.adds(self.w, self.steps[self.i])

    def is_ready(self):
        number, block = self.additions + self.i, self.keeper.block
        parity = number // SLOTS & 1 ^ self.grants
        if block.added[self.w][number % SLOTS].phase == parity:
            return False
        return not self.grants or not self.adds or self.keeper.run.turns[self.counter] == self.steps[self.i][1]

    def act(self):
        if self.grants:
            self.keeper.block.granted[self.w][(self.additions + self.i) % SLOTS].arrive()
        elif self.adds:
            self.keeper.run.turns[self.counter] += 1
        self.i += 1


Keeper.lane = Lane


class Consumer(Reader):
    """The process of a warp of `BackwardConsumer`."""

    keeper = Keeper

    @staticmethod
    def key_tiles(protocol):
        return protocol.warpgroups

    @staticmethod
    def pieces_of(protocol, warpgroup):
        return 1

    @classmethod
    def shares(cls, protocol):
        """The shares of a dQ: (warpgroup, warp, piece). Warps have one turn for all of their pieces."""
        warps = itertools.product(range(protocol.warpgroups), range(WARPS))
        return [(w, warp, piece) for w, warp in warps for piece in range(cls.pieces_of(protocol, w))]

    @staticmethod
    def launch(run, cta):
        ThreadBlock(run, cta).start()

    def __init__(self, block, w, warp):
        super().__init__(block)
        self.w, self.warp, self.id = w, warp, (w, warp)
        self.kv = self.q = self.do = self.count = 0
        self.number = block.cta
        self.gemms, self.complete = [], 0  # buffers of each GEMM in flight; how many are complete
        self.additions = 0
        self.reg_p, self.reg_ds = Buffer(), Buffer()

    def consume(self):
        yield from self.want_next()
        yield from self.prime_turns()
        wave = 0
        while self.number < len(self.run.tiles):
            self.steps = self.run.tiles[self.number]
            if self.steps:
                yield from self.tile()
            wave += 1
            self.number = yield from self.take(wave)
            yield from self.want_next()
            yield from self.store()

    def tile(self):
        block, last = self.block, len(self.steps) - 1
        yield from block.k.wait(self.kv)
        yield from block.v.wait(self.kv)
        yield from self.clear([*block.k.of(self.kv), block.v.of(self.kv)[self.w]], self.number)
        yield from block.q.wait(self.q)
        yield from self.issue_s(self.q, 0)
        yield from self.read_stats(self.q, 0)
        yield from self.wait_group(0)
        yield from self.make_p(0)
        for i in range(last + 1):
            yield from self.clear_queries(i, self.q, self.do)
            yield from self.step(i, i > 0, i < last)
            self.q, self.do, self.count = self.q + 1, self.do + 1, self.count + 1
        yield from self.last_dq(last, self.count - 1)
        yield from self.release(block.k, self.kv)
        yield from self.release(block.v, self.kv)
        self.kv += 1

    def step(self, i, has_previous, has_next):
        block = self.block
        yield from block.do.wait(self.do)
        if has_previous:
            yield from self.wait_for_ds(self.count - 1)
        yield from self.wait_for_turn()
        if has_previous:
            yield from self.issue_dq(i - 1, self.count - 1)
        yield from self.issue_dp(self.do, i)
        yield from self.issue_last(self.issue_dv, self.do, i)
        if has_previous:
            yield from self.take_turn()
            yield from self.wait_group(2)
            yield from self.add_dq(i - 1)
            yield from self.give_turn()
        yield from self.read_stats(self.q, i)
        yield from self.wait_group(1 if self.protocol.overlaps else 0)
        if not self.protocol.overlaps:
            yield from self.release(block.do, self.do)
        yield from self.make_ds(i)
        yield from self.write_ds(i, self.count)
        yield from self.publish_ds(self.count)
        if self.protocol.overlaps:
            yield from self.wait_group(0)
            yield from self.release(block.do, self.do)
        if has_next:
            yield from block.q.wait(self.q + 1)
        yield from self.wait_for_turn()
        if has_next:
            yield from self.issue_s(self.q + 1, i + 1)
        yield from self.issue_last(self.issue_dk, self.q, i)
        if has_next:
            yield from self.read_stats(self.q + 1, i + 1)
            yield from self.wait_group(1)
            yield from self.make_p(i + 1)
        yield from self.wait_group(0)
        yield from self.release(block.q, self.q)

    def issue_last(self, issue, state, i):
        if self.protocol.overlaps:
            yield from self.pass_turn()
        yield from issue(state, i)
        if not self.protocol.overlaps:
            yield from self.pass_turn()

    def last_dq(self, i, count):
        yield from self.wait_for_ds(count)
        yield from self.issue_dq(i, count)
        yield from self.take_turn()
        yield from self.wait_group(0)
        yield from self.add_dq(i)
        yield from self.give_turn()

    # ---------------------------------------------------------------- buffers

    def release(self, pipe, n):
        yield from pipe.release(n)

    def tag(self, i):
        return self.number, i

    def read_stats(self, q, i):
        self.block.q.of(q)[-1].read(self.tag(i))
        yield

    def clear(self, buffers, expected):
        if self.run.has_garbage(expected):
            for buffer in buffers:
                buffer.clear(expected, self.warp)
                yield
            yield from self.meet()

    def meet(self):
        yield from self.block.meeting[self.w].sync(self.warp)

    def clear_queries(self, i, q, do):
        if self.run.has_garbage(self.tag(i)):
            if q is not None:
                yield from self.block.q.wait(q)
                for buffer, content in self.rows(self.block.q, q, i):
                    buffer.clear(content, self.warp)
            yield from self.block.do.wait(do)
            yield from self.clear(self.block.do.of(do), self.tag(i))

    # ---------------------------------------------------------------- GEMMs

    def issue(self, reads, is_masked=False):
        """Issue a GEMM. Args: reads: (buffer, what should be in it) of all operands."""
        for buffer, expected in reads:
            buffer.begin_read(expected, is_masked)
        self.gemms.append([buffer for buffer, _ in reads])
        self.block.issued[self.w][self.warp] += 1
        yield

    def wait_group(self, most):
        while len(self.gemms) > most:
            self.complete += 1
            if self.protocol.warpgroups_meet:
                yield self.all_have_issued
            for buffer in self.gemms.pop(0):
                buffer.end_read()
        yield

    def all_have_issued(self):
        return min(self.block.issued[self.w]) >= self.complete

    def own(self, pipe):
        return pipe.of(self.kv)[self.w], self.number

    def rows(self, pipe, n, i):
        """The operand of GEMMs in a buffer of Q or dO."""
        buffers = pipe.of(n)[:-1] if pipe is self.block.q else pipe.of(n)  # statistics come last
        return [(buffer, self.tag(i)) for buffer in buffers]

    def issue_s(self, q, i):
        yield from self.issue([self.own(self.block.k), *self.rows(self.block.q, q, i)], is_masked=True)

    def issue_dp(self, do, i):
        yield from self.issue([self.own(self.block.v), *self.rows(self.block.do, do, i)])

    def issue_dv(self, do, i):
        yield from self.issue([(self.reg_p, self.tag(i)), *self.rows(self.block.do, do, i)])

    def issue_dk(self, q, i):
        yield from self.issue([(self.reg_ds, self.tag(i)), *self.rows(self.block.q, q, i)])

    def issue_dq(self, i, count):
        yield from self.issue(self.operands_of_dq(i, count))

    def operands_of_dq(self, i, count):
        ds = [(part, self.tag(i)) for keys in self.block.ds_of(count) for part in keys]
        return ds + [(buffer, self.number) for buffer in self.block.k.of(self.kv)]

    # ---------------------------------------------------------------- P, dS, dQ

    def make_p(self, i):
        self.reg_p.write(self.tag(i))
        yield

    def make_ds(self, i):
        self.reg_p.read(self.tag(i))
        self.reg_ds.write(self.tag(i))
        yield

    def write_ds(self, i, count):
        row = self.w % self.key_tiles(self.protocol) * WARPS + self.warp
        for part in self.block.ds_of(count)[row]:
            part.write(self.tag(i))
        yield

    def publish_ds(self, count):
        self.block.ds_full[count % 2].arrive()
        yield

    def wait_for_ds(self, count):
        yield from self.wait_for(self.block.ds_full, count)

    def wait_for(self, barriers, count):
        yield from barriers[count % len(barriers)].wait(count // len(barriers) & 1)

    def take_turn(self):
        if self.protocol.is_deterministic:
            yield from self.wait_for(self.block.granted[self.w], self.additions)

    def give_turn(self):
        if self.protocol.is_deterministic:
            self.block.added[self.w][self.additions % SLOTS].arrive()
            self.additions += 1
            yield

    @property
    def part(self):
        """The part of a dQ that this warpgroup adds to."""
        return self.w

    def add_dq(self, i, piece=0):
        key, _ = self.steps[i]
        addition = (key, self.part, self.warp, piece)
        self.block.additions.append(addition)
        self.run.start(self.complete_later(addition, self.number))
        yield

    def complete_later(self, addition, number):
        yield
        self.run.add(addition, number)
        self.block.additions.remove(addition)

    # ---------------------------------------------------------------- results

    def stage(self):
        """The rows that a warp stages dv and dk in: those of some queries, with the keys of all warps."""
        return [keys[self.warp] for keys in self.block.ds_of(self.count)[self.w * WARPS : (self.w + 1) * WARPS]]

    def store(self):
        for gradient in "dv", "dk":
            content = gradient, self.id, self.count
            for part in self.stage():
                part.write(content)
            yield
            for part in self.stage():
                part.read(content)
            yield
        yield from self.meet()

    # ---------------------------------------------------------------- pingpong

    def prime_turns(self):
        if self.w == self.protocol.warpgroups - 1:
            yield from self.pass_turn()

    def wait_for_turn(self):
        if self.protocol.pingpong:
            yield from self.block.pingpong[self.w].sync(self.id)

    def pass_turn(self):
        if self.protocol.pingpong:
            self.block.pingpong[(self.w + 1) % self.protocol.warpgroups].arrive(self.id)
            yield


class Wide(Consumer):
    """The process of a warp of `WideConsumer`."""

    @staticmethod
    def key_tiles(protocol):
        return 1

    @staticmethod
    def pieces_of(protocol, warpgroup):
        return protocol.pieces[warpgroup]

    def prime_turns(self):
        yield

    def store(self):
        yield

    def tile(self):
        yield from self.dv_tile() if self.w == 0 else self.dk_tile()
        self.kv += 1

    def own(self, pipe):
        return pipe.of(self.kv)[0], self.number

    # ---------------------------------------------------------------- warpgroup 0

    def dv_tile(self):
        block, last = self.block, len(self.steps) - 1
        yield from self.release(block.v, self.kv)
        yield from block.k.wait(self.kv)
        yield from self.clear(block.k.of(self.kv), self.number)
        yield from block.q.wait(self.q)
        yield from self.issue_s(self.q, 0)
        yield from self.read_stats(self.q, 0)
        yield from self.wait_group(0)
        yield from self.release(block.q, self.q)
        self.q += 1
        yield from self.make_p(0)
        yield from self.send_p(0, self.count)
        for i in range(last + 1):
            yield from self.clear_queries(i, None, self.do)
            yield from self.dv_step(i, i < last)
            self.q, self.do, self.count = self.q + (i < last), self.do + 1, self.count + 1
        yield from self.release(block.k, self.kv)

    def dv_step(self, i, has_next):
        block = self.block
        yield from block.do.wait(self.do)
        if has_next:
            yield from block.q.wait(self.q)
            yield from self.issue_s(self.q, i + 1)
        yield from self.issue_dv(self.do, i)
        if has_next:
            yield from self.read_stats(self.q, i + 1)
            yield from self.wait_group(1)
            yield from self.release(block.q, self.q)
        yield from self.wait_group(0)
        yield from self.release(block.do, self.do)
        if has_next:
            yield from self.make_p(i + 1)
        yield from self.wait_for_ds(self.count)
        if has_next:
            yield from self.send_p(i + 1, self.count + 1)
        yield from self.add_pieces(i, self.count)

    def place_of_p(self):
        """What P of a warp is written to, and read from by the same warp of warpgroup 1."""
        return [self.block.p[self.warp]]

    def send_p(self, i, count):
        self.reg_p.read(self.tag(i))
        for part in self.place_of_p():
            part.write(("P", self.tag(i)))
        yield
        self.block.p_full[count % len(self.block.p_full)].arrive()
        yield

    # ---------------------------------------------------------------- warpgroup 1

    def dk_tile(self):
        block, last = self.block, len(self.steps) - 1
        yield from block.q.wait(self.q)
        yield from self.read_stats(self.q, 0)
        yield from block.v.wait(self.kv)
        yield from block.do.wait(self.do)
        yield from self.clear(block.v.of(self.kv), self.number)
        yield from self.clear_queries(0, self.q, self.do)
        yield from self.issue_dp(self.do, 0)
        yield from block.k.wait(self.kv)
        yield from self.wait_group(0)
        yield from self.clear(block.k.of(self.kv), self.number)
        yield from self.release(block.do, self.do)
        self.do += 1
        yield from self.receive_p(0, self.count)
        yield from self.make_ds(0)
        yield from self.send_ds(0, self.count)
        for i in range(last + 1):
            if i < last:
                yield from self.clear_queries(i + 1, self.q + 1, self.do)
            yield from self.dk_step(i, i < last)
            self.q, self.do, self.count = self.q + 1, self.do + (i < last), self.count + 1
        yield from self.release(block.v, self.kv)
        yield from self.release(block.k, self.kv)

    def dk_step(self, i, has_next):
        block = self.block
        yield from self.issue_dk(self.q, i)
        if has_next:
            yield from block.q.wait(self.q + 1)
            yield from block.do.wait(self.do)
            yield from self.issue_dp(self.do, i + 1)
            yield from self.read_stats(self.q + 1, i + 1)
        yield from self.wait_group(0)
        yield from self.release(block.q, self.q)
        if has_next:
            yield from self.release(block.do, self.do)
            yield from self.receive_p(i + 1, self.count + 1)
            yield from self.make_ds(i + 1)
            yield from self.send_ds(i + 1, self.count + 1)
        yield from self.wait_for_ds(self.count)
        yield from self.add_pieces(i, self.count)

    def receive_p(self, i, count):
        yield from self.wait_for(self.block.p_full, count)
        parts = self.place_of_p()
        for part in parts:
            part.begin_read(("P", self.tag(i)), True)
        yield
        for part in parts:
            part.end_read()
        self.reg_p.write(self.tag(i))

    def send_ds(self, i, count):
        yield from self.meet()
        yield from self.write_ds(i, count)
        yield from self.publish_ds(count)

    # ---------------------------------------------------------------- dQ

    def add_pieces(self, i, count):
        pieces = self.pieces_of(self.protocol, self.w)
        for _ in range(pieces):
            yield from self.issue(self.operands_of_dq(i, count))
        yield from self.take_turn()
        for piece in range(pieces):
            yield from self.wait_group(pieces - 1 - piece)
            yield from self.add_dq(i, piece)
        yield from self.give_turn()

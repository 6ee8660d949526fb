"""The order of waits and arrivals of the Hopper forward, as a model: no deadlock, and every buffer holds what is read.

The model has the barriers of producer.py and of `Consumer.two_stages` and no arithmetic: a warpgroup is two processes
(its first warp, which without a producer warp loads as well, and the others), run step by step in random order. With
`transposers` V goes through transposer.py's warps, with `converters` K and V go through converter.py's, and tiles may
be drawn from blocks/tiles/queue.py's queue.
A GPU would hang after an overrun (an arrival too many, a buffer written before it was read) or a deadlock.
"""

import itertools
import random
from dataclasses import dataclass

import pytest

WARPS_OF_MODEL = 2  # processes of a warpgroup
PATIENCE = 20_000  # steps in which no process ends: after that, nothing moves any more


class MBarrier:
    def __init__(self, arrivals):
        self.arrivals, self.pending, self.phase = arrivals, arrivals, 0

    def arrive(self):
        self.pending -= 1
        if self.pending == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1

    def wait(self, parity):
        """Wait until the phase of this parity is complete."""
        while self.phase == parity:
            yield


class NamedBarrier:
    def __init__(self, threads):
        self.threads, self.arrived, self.generation = threads, 0, 0

    def arrive(self):
        self.arrived += 1
        assert self.arrived <= self.threads, "somebody came twice"
        if self.arrived == self.threads:
            self.arrived, self.generation = 0, self.generation + 1

    def sync(self):
        generation = self.generation
        self.arrive()
        while self.generation == generation:
            yield


class Ring:
    """A circular buffer; the n-th fill and the n-th reading of it belong together. Each writer fills a share."""

    def __init__(self, stages, readers, writers=1):
        self.full, self.empty = ([MBarrier(n) for _ in range(stages)] for n in (writers, readers))
        self.content = [[None] * writers for _ in range(stages)]

    def at(self, n):
        return n % len(self.content), n // len(self.content) & 1

    def fill(self, n, content, writer=0):
        slot, parity = self.at(n)
        yield from self.empty[slot].wait(parity ^ 1)
        self.content[slot][writer] = content
        self.full[slot].arrive()

    def wait(self, n, expected):
        slot, parity = self.at(n)
        yield from self.full[slot].wait(parity)
        assert set(self.content[slot]) == {expected}

    def release(self, n, expected):
        slot, _ = self.at(n)
        assert set(self.content[slot]) == {expected}, "overwritten while it was read"
        self.empty[slot].arrive()


class Queue:
    """The numbers of tiles, each of which all readers take before the next one is drawn."""

    def __init__(self, readers):
        self.full, self.empty, self.slot = MBarrier(1), MBarrier(readers + 1), 0

    def fill(self, num_tiles):
        for wave in range(1, num_tiles + 1):
            yield from self.empty.wait((wave - 1) & 1)
            self.slot = wave
            self.full.arrive()

    def take(self, wave):
        yield from self.full.wait((wave - 1) & 1)
        assert self.slot == wave, "another tile than the others'"


class NoQueue:
    def fill(self, num_tiles):
        yield

    def take(self, wave):
        yield


@dataclass(frozen=True)
class Protocol:
    """Tiles are (first, last) blocks; skips[tile][warpgroup] is how many of the last blocks a warpgroup skips.

    With unused[tile][warpgroup] it leaves out as many of the first blocks.
    """

    warpgroups: int
    k_stages: int
    v_stages: int
    q_stages: int
    pingpong: bool = True
    overlap_gemm_softmax: bool = True
    overlap_tiles: bool = True
    warp_specialized: bool = True
    raw_stages: int = 1
    transposers: int = 0
    converters: int = 0
    is_dynamic: bool = False

    def want_next(self, queue):
        if self.is_dynamic:
            queue.empty.arrive()

    def run(self, tiles, skips, seed, unused=None):
        readers = WARPS_OF_MODEL * self.warpgroups
        self_ = Machine(self, tiles, skips, unused or [[0] * self.warpgroups for _ in tiles])
        self_.k = Ring(self.k_stages, readers, self.converters or 1)
        self_.v = Ring(self.v_stages, readers, self.transposers or self.converters or 1)
        self_.loaded_k, self_.loaded_v = self_.k, self_.v
        if self.transposers or self.converters:
            self_.loaded_v = Ring(self.raw_stages, self.transposers or self.converters)
        if self.converters:
            self_.loaded_k = Ring(self.raw_stages, self.converters)
        self_.queue = Queue(readers + self.transposers) if self.is_dynamic else NoQueue()
        self_.q = [Ring(self.q_stages, WARPS_OF_MODEL) for _ in range(self.warpgroups)]
        self_.turns = [NamedBarrier(2 * WARPS_OF_MODEL) for _ in range(self.warpgroups)]
        processes = [self_.consume(w, warp) for w in range(self.warpgroups) for warp in range(WARPS_OF_MODEL)]
        processes += [self_.produce()] if self.warp_specialized else []
        processes += [self_.transpose(i) for i in range(self.transposers)] + [self_.queue.fill(len(tiles))]
        processes += [self_.convert(i) for i in range(self.converters)]
        choose, idle = random.Random(seed), 0
        while processes:
            process = choose.choice(processes)
            try:
                next(process)
                idle += 1
            except StopIteration:
                processes.remove(process)
                idle = 0
            assert idle < PATIENCE, "deadlock"


class Machine:
    def __init__(self, protocol, tiles, skips, unused):
        self.protocol, self.tiles, self.skips, self.unused = protocol, tiles, skips, unused

    def own_first(self, t, w):
        return self.tiles[t][0] + self.unused[t][w]

    def produce(self):
        k = v = 0
        for t, (first, last) in enumerate(self.tiles):
            yield from self.loaded_k.fill(k, (t, last - 1))
            for ring in self.q:
                yield from ring.fill(t, t)
            if t > 0:
                yield from self.loaded_v.fill(v, (t - 1, self.tiles[t - 1][0]))
                v += 1
            k += 1
            self.protocol.want_next(self.queue)
            for n in range(last - 2, first - 1, -1):
                yield from self.loaded_k.fill(k, (t, n))
                yield from self.loaded_v.fill(v, (t, n + 1))
                k, v = k + 1, v + 1
            yield from self.queue.take(t + 1)
        yield from self.loaded_v.fill(v, (len(self.tiles) - 1, self.tiles[-1][0]))
        if self.protocol.converters:
            yield from self.loaded_k.fill(k, None)

    def convert(self, writer):
        for fill in itertools.count():
            slot, parity = self.loaded_k.at(fill)
            yield from self.loaded_k.full[slot].wait(parity)
            (block,) = self.loaded_k.content[slot]
            if block is None:
                return
            for loaded, ring in ((self.loaded_k, self.k), (self.loaded_v, self.v)):
                yield from loaded.wait(fill, block)
                yield from ring.fill(fill, block, writer)
                loaded.release(fill, block)

    def transpose(self, writer):
        v = 0
        self.protocol.want_next(self.queue)
        for t, (first, last) in enumerate(self.tiles):
            for n in range(last - 1, first - 1, -1):
                yield from self.loaded_v.wait(v, (t, n))
                yield from self.v.fill(v, (t, n), writer)
                self.loaded_v.release(v, (t, n))
                v += 1
            yield from self.queue.take(t + 1)
            self.protocol.want_next(self.queue)

    def wait_for_turn(self, w):
        if self.protocol.pingpong and self.protocol.warpgroups > 1:
            yield from self.turns[w].sync()

    def pass_turn(self, w):
        if self.protocol.pingpong and self.protocol.warpgroups > 1:
            self.turns[(w + 1) % self.protocol.warpgroups].arrive()

    def consume(self, w, warp):
        protocol = self.protocol
        is_loader = not protocol.warp_specialized and (w, warp) == (0, 0)
        k = v = 0
        protocol.want_next(self.queue)
        if w == protocol.warpgroups - 1:
            self.pass_turn(w)

        def skip_keys(t):
            for i in range(self.skips[t][w]):
                block = (t, self.tiles[t][1] - 1 - i)
                yield from self.k.wait(k + i, block)
                self.k.release(k + i, block)

        def first_scores(t, last):
            yield from self.q[w].wait(t, t)
            yield from self.k.wait(k, (t, last - 1))
            yield

        def release_first(t, first, last):
            self.k.release(k, (t, last - 1))
            if last - 1 == first:
                self.q[w].release(t, t)

        if protocol.overlap_tiles:
            yield from skip_keys(0)
            k += self.skips[0][w]
            yield from first_scores(0, self.tiles[0][1] - self.skips[0][w])
            release_first(0, self.own_first(0, w), self.tiles[0][1] - self.skips[0][w])
            k += 1
        for t, (first, whole) in enumerate(self.tiles):
            last, own_first = whole - self.skips[t][w], self.own_first(t, w)
            if not protocol.overlap_tiles:
                yield from skip_keys(t)
                k += self.skips[t][w]
                if is_loader:
                    for ring in self.q:
                        yield from ring.fill(t, t)
                    yield from self.k.fill(k, (t, last - 1))
                    yield from self.v.fill(v, (t, last - 1))
                    if last - 1 > first:
                        yield from self.k.fill(k + 1, (t, last - 2))
                yield from first_scores(t, last)
                release_first(t, own_first, last)
                k += 1
            for i in range(self.skips[t][w]):
                yield from self.v.wait(v, (t, whole - 1 - i))
                self.v.release(v, (t, whole - 1 - i))
                v += 1
                yield from self.wait_for_turn(w)
                self.pass_turn(w)
            for n in range(last - 2, own_first - 1, -1):
                yield from self.step(w, t, n, k, v, is_loader)
                k, v = k + 1, v + 1
            if own_first > first:
                yield from self.v.wait(v, (t, own_first))
                yield
                self.v.release(v, (t, own_first))
                v += 1
            for n in range(own_first - 1, first - 1, -1):
                yield from self.wait_for_turn(w)
                self.pass_turn(w)
                yield from self.k.wait(k, (t, n))
                self.k.release(k, (t, n))
                k += 1
                if n < own_first - 1:
                    yield from self.v.wait(v, (t, n + 1))
                    self.v.release(v, (t, n + 1))
                    v += 1
            yield from self.queue.take(t + 1)
            protocol.want_next(self.queue)
            if protocol.overlap_tiles and t + 1 < len(self.tiles):
                yield from skip_keys(t + 1)
                k += self.skips[t + 1][w]
                next_first, next_last = self.own_first(t + 1, w), self.tiles[t + 1][1] - self.skips[t + 1][w]
                yield from self.q[w].wait(t + 1, t + 1)
                yield from self.k.wait(k, (t + 1, next_last - 1))
                yield from self.wait_for_turn(w)
                yield from self.v.wait(v, (t, first))
                self.pass_turn(w)
                yield
                release_first(t + 1, next_first, next_last)
                k += 1
            else:
                yield from self.v.wait(v, (t, first))
            yield
            self.v.release(v, (t, first))
            v += 1

    def step(self, w, t, n, k, v, is_loader):
        overlaps = self.protocol.overlap_gemm_softmax
        if overlaps:
            yield from self.k.wait(k, (t, n))
            yield from self.wait_for_turn(w)
            yield from self.v.wait(v, (t, n + 1))
            self.pass_turn(w)
        else:
            yield from self.v.wait(v, (t, n + 1))
            yield
            self.v.release(v, (t, n + 1))
            yield from self.wait_for_turn(w)
            yield from self.k.wait(k, (t, n))
            self.pass_turn(w)
        if is_loader:
            if n > self.tiles[t][0]:
                yield from self.k.fill(k + 1, (t, n - 1))
            yield from self.v.fill(v + 1, (t, n))
        yield
        self.k.release(k, (t, n))
        if n == self.own_first(t, w):
            self.q[w].release(t, t)
        yield
        if overlaps:
            self.v.release(v, (t, n + 1))


def random_tiles(seed, warpgroups, most_skipped, is_sorted=True):
    """Args: is_sorted: they skip as they do under a causal mask. With intervals, any of them may skip the most."""
    choose = random.Random(seed)
    tiles, skips = [], []
    for _ in range(4):
        first, count = choose.randint(0, 2), choose.randint(1, 6)
        tiles.append((first, first + count))
        # one warpgroup needs all blocks: the last one, and the ones before it at most as many as the one after
        skipped = sorted((choose.randint(0, min(most_skipped, count - 1)) for _ in range(warpgroups - 1)), reverse=True)
        skips.append([*skipped, 0])
        if not is_sorted:
            choose.shuffle(skips[-1])
    return tiles, skips


STAGES = list(itertools.product((1, 2, 3, 4), (2, 3), (2, 3), (1, 2)))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("overlap_tiles", [True, False])
@pytest.mark.parametrize("pingpong", [True, False])
def test_with_a_producer(pingpong, overlap_tiles, is_sorted):
    for warpgroups, k_stages, v_stages, q_stages in STAGES:
        protocol = Protocol(warpgroups, k_stages, v_stages, q_stages, pingpong, overlap_tiles=overlap_tiles)
        for seed in range(4):
            protocol.run(*random_tiles(seed, warpgroups, k_stages - 1, is_sorted), seed)


@pytest.mark.parametrize("overlap_tiles", [True, False])
@pytest.mark.parametrize("overlap_gemm_softmax", [True, False])
def test_first_blocks_that_rows_do_not_see(overlap_gemm_softmax, overlap_tiles):
    """With intervals a warpgroup leaves out blocks on both sides."""
    for warpgroups, k_stages, v_stages, q_stages in STAGES:
        protocol = Protocol(warpgroups, k_stages, v_stages, q_stages, True, overlap_gemm_softmax, overlap_tiles)
        for seed in range(4):
            tiles, skips = random_tiles(seed, warpgroups, k_stages - 1, is_sorted=False)
            choose = random.Random(seed)
            unused = [
                [choose.randint(0, last - first - 1 - n) for n in skipped]
                for (first, last), skipped in zip(tiles, skips, strict=True)
            ]
            protocol.run(tiles, skips, seed, unused)


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("overlap_tiles", [True, False])
@pytest.mark.parametrize("raw_stages", [1, 2])
def test_with_warps_that_transpose(raw_stages, overlap_tiles, is_dynamic):
    for warpgroups, k_stages, v_stages, q_stages in STAGES:
        protocol = Protocol(
            warpgroups,
            k_stages,
            v_stages,
            q_stages,
            overlap_tiles=overlap_tiles,
            raw_stages=raw_stages,
            transposers=2,
            is_dynamic=is_dynamic,
        )
        for seed in range(3):
            protocol.run(*random_tiles(seed, warpgroups, k_stages - 1), seed)


@pytest.mark.parametrize("is_dynamic", [True, False])
@pytest.mark.parametrize("overlap_tiles", [True, False])
@pytest.mark.parametrize("raw_stages", [1, 2, 4])
def test_with_warps_that_convert(raw_stages, overlap_tiles, is_dynamic):
    for warpgroups, q_stages in itertools.product((1, 2), (1, 2)):
        options = {"overlap_tiles": overlap_tiles, "raw_stages": raw_stages, "is_dynamic": is_dynamic}
        for seed in range(6):
            tiles = random_tiles(seed, warpgroups, 1)
            Protocol(warpgroups, 2, 2, q_stages, converters=2, **options).run(*tiles, seed)


@pytest.mark.parametrize("overlap_gemm_softmax", [True, False])
@pytest.mark.parametrize("pingpong", [True, False])
def test_without_a_producer(pingpong, overlap_gemm_softmax):
    for warpgroups, k_stages, v_stages, q_stages in STAGES:
        protocol = Protocol(
            warpgroups, k_stages, v_stages, q_stages, pingpong, overlap_gemm_softmax, False, warp_specialized=False
        )
        for seed in range(4):
            protocol.run(*random_tiles(seed, warpgroups, 0), seed)


def test_one_buffer_without_overlap():
    for warpgroups, pingpong in itertools.product((1, 2, 3), (True, False)):
        Protocol(warpgroups, 1, 1, 1, pingpong, False, False).run(*random_tiles(0, warpgroups, 0), 0)


def test_the_model_sees_a_deadlock():
    """Deadlocks: more blocks skipped than there are buffers beside the first, and one buffer without a producer."""
    with pytest.raises(AssertionError, match="deadlock"):
        Protocol(3, 2, 2, 1).run([(0, 6), (0, 6)], [[2, 1, 0], [2, 1, 0]], 0)
    with pytest.raises(AssertionError, match="deadlock"):
        Protocol(2, 1, 1, 1, True, False, False, warp_specialized=False).run([(0, 4)], [[0, 0]], 0)

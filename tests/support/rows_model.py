"""The work on query rows beside the tiles of the Hopper backward (sm90/backward/rows.py) as a model.

Warps are processes that run step by step in random order. The GPU has room for some of the thread blocks only: another
one starts when one has ended, as it is with other kernels on the same GPU.
"""

import random
from collections import Counter
from dataclasses import dataclass

HEADER = "drawn_before", "started", "drawn_after", "heads_done", "written", "with_nan", "drawn_again", "finished"


@dataclass(frozen=True)
class Rows:
    """The properties of a launch.

    Attributes:
        blocks: blocks of query rows of a kv head.
        tiles: tiles of keys of a kv head.
        room: thread blocks that run at once.
        nan_blocks: blocks of dq with a NaN.
        unseen_tiles: tiles of keys that no query sees.
        finishes: dq is written when the tiles of a head are done; else tiles write it (private_dq).
    """

    heads: int
    blocks: int
    tiles: int
    num_ctas: int
    room: int
    nan_blocks: frozenset = frozenset()
    unseen_tiles: frozenset = frozenset()
    finishes: bool = True
    consumers: int = 2
    background: int = 2

    def run(self, seed, faults=()):
        Launch(self, seed, faults).finish()


class Launch:
    def __init__(self, rows, seed, faults):
        self.rows, self.random, self.faults = rows, random.Random(seed), faults
        self.words, self.prepared, self.tiles_done, self.list = Counter(), Counter(), Counter(), []
        self.nan_list, self.queue = [], rows.num_ctas
        self.was_prepared, self.was_written, self.was_repaired, self.tiles_run = (Counter() for _ in range(4))
        self.processes, self.waiting, self.running = [], list(range(rows.num_ctas)), Counter()
        self.num_blocks = rows.heads * rows.blocks
        for _ in range(min(rows.room, rows.num_ctas)):
            self.start_block()

    def start_block(self):
        cta = self.waiting.pop(0)
        block = ThreadBlock(self, cta)
        self.running[cta] = len(block.warps)
        self.words["started"] += 1
        for warp in block.warps:
            self.processes.append([self.until_end(cta, warp), None])

    def until_end(self, cta, warp):
        yield from warp
        self.running[cta] -= 1
        if self.running[cta] == 0 and self.waiting:
            self.start_block()

    def draw(self, word):
        self.words[word] += 1
        return self.words[word] - 1

    def finish(self):
        misses = 0
        while self.processes:
            i = self.random.randrange(len(self.processes))
            process = self.processes[i]
            if process[1] is not None and not process[1]():
                misses += 1
                if misses > 200:
                    assert any(wait is None or wait() for _, wait in self.processes), "deadlock"
                    misses = 0
                continue
            misses = 0
            try:
                process[1] = next(process[0])
            except StopIteration:
                self.processes[i] = self.processes[-1]
                self.processes.pop()
        self.check()

    def check(self):
        rows = self.rows
        assert not self.waiting, "a thread block has not run"
        everything = Counter(range(self.num_blocks))
        assert self.was_prepared == everything, "rows prepared"
        assert self.tiles_run == Counter(range(rows.heads * rows.tiles)), "tiles"
        if rows.finishes:
            assert self.was_written == everything, "dq written"
            assert self.was_repaired == Counter(rows.nan_blocks), "rows repaired"
        left = self.words, self.prepared, self.tiles_done
        assert not any(any(counter.values()) for counter in left), "counters are not zero"
        assert not self.list, "the list of heads is not zero"
        assert not self.nan_list, "the list of blocks is not zero"


class ThreadBlock:
    """Warps of a thread block; one process stands for the producer and the warp that draws and counts tiles."""

    def __init__(self, launch, cta):
        self.launch, self.rows, self.cta = launch, launch.rows, cta
        self.are_done, self.at_barrier = False, Counter()
        self.num_warps = self.rows.background + self.rows.consumers + self.rows.finishes
        self.warps = [self.consume(i == 0) for i in range(self.rows.consumers)]
        self.warps += [self.work() for _ in range(self.rows.background)]
        self.warps.append(self.go_through_tiles())

    def head_of(self, number):
        return number // self.rows.tiles

    def go_through_tiles(self):
        launch, number = self.launch, self.cta
        yield lambda: self.at_barrier["begin"] == self.rows.consumers
        while number < self.rows.heads * self.rows.tiles:
            head = self.head_of(number)
            if number not in self.rows.unseen_tiles:
                yield lambda head=head: launch.prepared[head] == self.rows.blocks
            yield
            launch.tiles_run[number] += 1
            if self.rows.finishes:
                launch.tiles_done[head] += 1
                if launch.tiles_done[head] == self.rows.tiles:
                    yield
                    launch.list.append(head)
            number, launch.queue = launch.queue, launch.queue + 1
            yield
        self.are_done = True
        if self.rows.finishes:
            yield from self.leave()

    def consume(self, is_first):
        yield from self.prepare((self.head_of(self.cta) + 1) * self.rows.blocks)
        self.at_barrier["begin"] += 1
        yield lambda: self.are_done
        if self.rows.finishes and self.all_have_started():
            yield from self.write()
            yield from self.repair()
        yield from self.leave()

    def work(self):
        yield from self.prepare(self.launch.num_blocks)
        if self.rows.finishes and self.all_have_started():
            yield from self.write()
        yield from self.leave()

    def all_have_started(self):
        return "waits_anyway" in self.launch.faults or self.launch.words["started"] == self.rows.num_ctas

    def prepare(self, end):
        launch = self.launch
        block = launch.draw("drawn_before")
        while block < launch.num_blocks:
            yield
            launch.was_prepared[block] += 1
            launch.prepared[block // self.rows.blocks] += 1
            yield
            if block >= end - 1:
                break
            if "drops_a_draw" in launch.faults and launch.words["drawn_before"] >= end:
                launch.draw("drawn_before")
                break
            block = launch.draw("drawn_before")

    def write(self):
        launch = self.launch
        ticket = launch.draw("drawn_after")
        while ticket < launch.num_blocks:
            position, number = divmod(ticket, self.rows.blocks)
            yield lambda position=position: len(launch.list) > position
            head = launch.list[position]
            if "trusts_unseen_tiles" not in launch.faults:
                yield lambda head=head: launch.prepared[head] == self.rows.blocks
            block = head * self.rows.blocks + number
            assert launch.was_prepared[block], "written before it is prepared"
            assert launch.tiles_done[head] == self.rows.tiles, "written too early"
            yield
            launch.was_written[block] += 1
            if block in self.rows.nan_blocks:
                launch.nan_list.append(block)
                launch.words["with_nan"] += 1
            yield
            launch.words["written"] += 1
            ticket = launch.draw("drawn_after")
            yield

    def repair(self):
        launch = self.launch
        if "repairs_early" not in launch.faults:
            yield lambda: launch.words["written"] == launch.num_blocks
        number = launch.draw("drawn_again")
        while number < launch.words["with_nan"]:
            yield
            launch.was_repaired[launch.nan_list[number]] += 1
            number = launch.draw("drawn_again")

    def leave(self):
        launch = self.launch
        yield
        last = self.num_warps * self.rows.num_ctas - 1 - ("leaves_early" in launch.faults)
        if launch.draw("finished") == last:
            for counter in (launch.words, launch.prepared, launch.tiles_done):
                counter.clear()
            launch.list.clear()
            if "keeps_list" not in launch.faults:
                launch.nan_list.clear()

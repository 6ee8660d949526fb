"""A Hopper kernel as Python: each warp is a thread, and one of them at a time takes a step, in random order.

This is the machine: mbarriers, named barriers, circular buffers, copies that land late, GEMMs that read their operands
until a wait covers them. Values are symbols: a buffer holds the name of what was copied to it, and a product the names
of its operands. kernel_language.py lets the modules of device code call the machine. What the symbols of a kernel are,
and what must have become of them in the end, is in forward_in_python.py and backward_in_python.py.
"""

import contextlib
import functools
import random
import threading
from collections import defaultdict
from types import SimpleNamespace

LANES, WARPS = 32, 4
ON_ITS_WAY = "a copy on its way"


class Ended(BaseException):
    """Raised in a thread that has no more to do."""


# ---------------------------------------------------------------- memory and barriers


class Pointer:
    """A place in a list: words of global memory, or mbarriers that `block` has allocated under a number."""

    def __init__(self, values, index=0, block=None, number=None):
        self.values, self.index, self.block, self.number = values, index, block, number

    def __add__(self, offset):
        return Pointer(self.values, self.index + offset, self.block, self.number)

    def at(self, block):
        return Pointer(block.memory[self.number], self.index, block, self.number)

    def toint(self):
        return self

    @property
    def value(self):
        return self.values[self.index]

    @value.setter
    def value(self, value):
        self.values[self.index] = value


class Words:
    """A tensor of integers in global memory. Args: before: what they are at first."""

    def __init__(self, values=None, first=0, before=0):
        self.values, self.first = defaultdict(lambda: before) if values is None else values, first

    @property
    def iterator(self):
        return Pointer(self.values, self.first)

    def __setitem__(self, index, value):
        self.values[self.first + index] = value


class MBarrier:
    """Attributes:
    missing: bytes that must be copied before the phase ends.
    ended: how many phases have.
    buffers: which copies that it counts have filled.
    """

    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.missing = self.ended = 0
        self.buffers = set()

    @property
    def phase(self):
        return self.ended & 1

    def arrive(self, num_bytes=0, count=1):
        """Arrivals. Args: num_bytes: what must be copied, too, before the phase is complete."""
        self.pending -= count
        assert self.pending >= 0, "an arrival too many"
        self.complete(-num_bytes)

    def complete(self, num_bytes):
        self.missing -= num_bytes
        if self.pending == self.missing == 0:
            self.pending, self.ended = self.arrivals, self.ended + 1


class Rendezvous:
    """A barrier that warps of a thread block, or of a cluster, arrive at."""

    def __init__(self):
        self.arrived, self.generation = {}, 0

    def arrive(self, who, count, width=1):
        assert who not in self.arrived, "a warp has arrived twice"
        self.arrived[who] = width
        if sum(self.arrived.values()) >= count:
            assert sum(self.arrived.values()) == count, "a warp too many has arrived"
            self.arrived, self.generation = {}, self.generation + 1


class Buffer:
    """Memory that is written in parts with the same content, and cleared in parts if this has garbage at its end."""

    def __init__(self, tensor=None, index=()):
        self.tensor, self.index = tensor, index
        self.parts, self.readers, self.garbage, self.end = {}, 0, set(), None

    def write(self, part, content, end=None):
        assert not self.readers, f"{self.parts} is overwritten while it is read"
        self.parts[part], self.end = content, end
        self.garbage = set() if end is None else set(range(WARPS))

    @property
    def content(self):
        assert len(set(self.parts.values())) == 1, f"parts of {self.parts}"
        content = next(iter(self.parts.values()))
        assert content is not ON_ITS_WAY, "read before it has arrived"
        return content

    def at(self, block):
        return block.memory[self.tensor.number][self.index]

    @property
    def iterator(self):
        return self

    def __add__(self, offset):
        return self


class Shared:
    """A tensor in shared memory. Indices that are numbers say which buffer."""

    def __init__(self, number):
        self.number, self.buffers = number, {}

    def __getitem__(self, index):
        index = tuple(i for i in (index if isinstance(index, tuple) else (index,)) if i is not None)
        return self.buffers.setdefault(index, Buffer(self, index))

    def __setitem__(self, index, value):
        self[index].write(0, value)

    iterator, layout = property(lambda self: self), None

    def toint(self):
        return self

    def __add__(self, offset):
        return self


class Operand:
    """A part of a buffer, whose coordinate joins the content."""

    def __init__(self, buffer, coordinate):
        self.buffer, self.coordinate = buffer, coordinate

    @property
    def content(self):
        return (*self.buffer.content, self.coordinate)


class Registers:
    """Registers of a warp with one value each, which GEMMs may be about to read or to write."""

    def __init__(self, count):
        self.values, self.readers, self.writers = [None] * count, 0, 0

    def __getitem__(self, i):
        if isinstance(i, tuple):
            return Columns(self, i[-1])
        assert not self.writers, "read before its GEMM has ended"
        return self.values[i]

    def __len__(self):
        return len(self.values)

    def __setitem__(self, i, value):
        assert not self.writers + self.readers, "overwritten during a GEMM"
        self.values[i] = value

    def fill(self, value):
        for i in range(len(self.values)):
            self[i] = value

    @property
    def content(self):
        values = {self[i] for i in range(len(self.values))}
        assert len(values) == 1, values
        return values.pop()

    layout, iterator = property(len), property(lambda self: self)


class Columns:
    """A block of columns of registers that have a value for each block."""

    def __init__(self, registers, block):
        self.registers, self.block = registers, block

    def __getitem__(self, i):
        return self.registers[self.block]

    def __setitem__(self, i, value):
        self.registers[self.block] = value


# ---------------------------------------------------------------- tensors in global memory


class Rows:
    """Something that a copy reads: a name, and where.

    Args: end_of: the row of a block from which on there is garbage; None: there is none.
    """

    def __init__(self, name, num_bytes, end_of=lambda content: None, place=()):
        self.name, self.num_bytes, self.end_of, self.place = name, num_bytes, end_of, place

    def __getitem__(self, index):
        place = *self.place, *(i for i in index if i is not None)
        return type(self)(self.name, self.num_bytes, self.end_of, place)

    @property
    def content(self):
        """The name, and the place: head, origin and block, before a half of a float32 or a block of columns."""
        return (self.name, *self.place[-3:], *self.place[:-3])

    @property
    def end(self):
        return self.end_of(self.content)


class Tensor:
    """A tensor in global memory. Args: shape: (rows, columns, heads, batch)."""

    def __init__(self, name=None, shape=None):
        self.name, self.shape = name, shape

    def __getitem__(self, index):
        return self


class Target:
    """Where copies go: a part of each buffer."""

    def __init__(self, s, part=0):
        self.s, self.part = s, part

    def __getitem__(self, index):
        *_, part, number = (self.part, *(i for i in index if i is not None))
        return part, self.s[number]


def tma_partition(atom, rank, ranks, s, g):
    return Target(s, rank), type(g)(g.name, g.num_bytes // ranks, g.end_of, g.place)


# ---------------------------------------------------------------- threads


class Process:
    """A lane of a warp, or all of it, or several warps. Args: width: how many warps."""

    def __init__(self, machine, block, warp, lane, target, width=1):
        self.machine, self.block, self.warp, self.lane, self.target = machine, block, warp, lane, target
        self.condition, self.is_muted, self.gemms, self.seen, self.question = None, False, [], None, None
        self.slowness = machine.random.choice((0, 0, 0, 0.8, 0.9))
        self.allocations, self.found, self.width, self.turn = 0, False, width, threading.Lock()
        self.turn.acquire()
        threading.Thread(target=self.main, daemon=True).start()

    def main(self):
        self.turn.acquire()
        try:
            if not self.machine.is_over:
                self.target()
        except Ended:
            pass
        except BaseException as error:
            self.machine.error = self.machine.error or error
        if not self.machine.is_over:
            self.machine.ended(self)


class Block:
    """A thread block: what its warps have allocated, in order, and its barriers."""

    def __init__(self, index, rank, cluster):
        self.index, self.rank, self.cluster = index, rank, cluster
        self.memory, self.named, self.lanes = [], defaultdict(Rendezvous), defaultdict(Rendezvous)
        self.pipes, self.turn = [], None
        self.running = 0  # warps
        self.late = 0  # arrivals and copies at other thread blocks that have not landed
        self.additions = 0  # to global memory that have not landed

    def check(self):
        assert self.running, "the thread block has not begun, or is gone"


class Machine:
    """A GPU with room for some thread blocks at a time."""

    def __init__(self, seed):
        self.random, self.processes, self.late, self.changes = random.Random(seed), [], [], 0
        self.blocks: list[Block] = []
        self.error, self.current, self.is_over, self.over = None, None, False, threading.Lock()

    # ---------------------------------------------------------------- scheduling

    def pause(self, condition=None):
        """Perhaps let others take steps, and at least until the condition holds."""
        process = self.current
        if condition is None and self.random.random() < 0.5:
            return
        process.condition = condition
        chosen = self.chosen()
        if chosen is not process:
            self.go_on(chosen)
            process.turn.acquire()
            if self.is_over:
                raise Ended
        process.condition = None

    def later(self, effect):
        """Something that happens by itself at some time."""
        self.late.append((effect, self.random.choice((0, 0.9, 0.99))))

    def chosen(self):
        """The process that goes on, after effects that come before; None: nothing is left, or can go on."""
        misses, draw = 0, self.random.random
        while self.processes or self.late:
            i = int(draw() * (len(self.processes) + len(self.late)))
            if i >= len(self.processes):
                effect, slowness = self.late[i - len(self.processes)]
                if draw() >= slowness:
                    self.late.pop(i - len(self.processes))
                    effect()
                    self.changes += 1
                continue
            process = self.processes[i]
            if process.condition is not None and not process.condition():
                misses += 1
                if misses > 200 and not self.late:
                    assert any(p.condition is None or p.condition() for p in self.processes), "deadlock"
                    misses = 0
            elif draw() >= process.slowness:
                self.current = process
                return process
        return None

    def go_on(self, process):
        """Let a process take steps, or end the run."""
        if process is not None:
            process.turn.release()
            return
        self.is_over = True
        for waiting in self.processes:
            waiting.turn.release()
        self.over.release()

    def ended(self, process):
        """A process has no more to do."""
        self.processes.remove(process)
        chosen = None
        if self.error is None:
            try:
                chosen = self.chosen()
            except Exception as error:
                self.error = error
        self.go_on(chosen)

    def run(self):
        self.over.acquire()
        self.go_on(self.chosen())
        self.over.acquire()
        if self.error is not None:
            raise self.error

    def launch(self, kernel, num_blocks, num_warps, cluster_size=1, lanes=None, room=None, warpgroups=()):
        """Run a kernel.

        Args:
            lanes: of warps whose lanes part ways.
            room: clusters that run at a time.
            warpgroups: the first warps of warpgroups that are a process each.
        """
        firsts = [warp for warp in range(num_warps) if warp // WARPS * WARPS not in warpgroups or warp % WARPS == 0]
        self.num_blocks, self.num_warps, self.num_lanes = num_blocks, num_warps, lanes or {}
        waiting = []
        for first in range(0, num_blocks, cluster_size):
            cluster = SimpleNamespace(blocks=[], barrier=Rendezvous())
            cluster.blocks += [Block(first + rank, rank, cluster) for rank in range(cluster_size)]
            self.blocks += cluster.blocks
            waiting.append(cluster)

        def start_one():
            for block in waiting.pop(0).blocks:
                self.later(lambda block=block: start(block))

        def start(block):
            block.running = len(firsts)
            self.processes += [
                Process(self, block, warp, lane, lambda lane=lane: run(block, lane), WARPS if warp in warpgroups else 1)
                for warp in firsts
                for lane in range(self.num_lanes.get(warp, 1))
            ]

        def run(block, lane):
            try:
                kernel()
            except Ended:  # the kernel's own exit, or the end of the run
                if self.is_over:
                    raise
            if lane == 0:
                block.running -= 1
                if not any(b.running for b in block.cluster.blocks) and waiting:
                    start_one()

        for _ in range(min(len(waiting), room or len(waiting))):
            start_one()
        self.run()

    # ---------------------------------------------------------------- what a warp does

    def changed(self):
        self.changes += 1
        self.pause()

    def allocate(self, make):
        """What the thread block has allocated under this number of its allocations."""
        process = self.current
        memory, number = process.block.memory, process.allocations
        process.allocations += 1
        if number == len(memory):
            memory.append(make(number))
        return memory[number]

    def barriers(self, dtype, count):
        number = self.current.allocations
        return Pointer(self.allocate(lambda number: [None] * count), 0, self.current.block, number)

    def wait(self, barrier, parity):
        self.pause(lambda: barrier.value.phase != parity)

    def arrive(self, barrier, num_bytes=0, count=None):
        """An arrival of each warp. Args: count: another number of arrivals."""
        if not self.current.is_muted:
            barrier.value.arrive(num_bytes, count or self.current.width)
            self.changed()

    def remotely(self, block, effect):
        """An effect on a thread block of the cluster."""
        own = self.current.block
        own.late += 1

        def land():
            block.check()
            effect()
            own.late -= 1

        self.later(land)

    def arrive_at(self, barrier, rank):
        if not self.current.is_muted:
            block = self.current.block.cluster.blocks[rank]
            self.remotely(block, functools.partial(barrier.at(block).value.arrive, 0, self.current.width))
            self.pause()

    @contextlib.contextmanager
    def elect_one(self):
        process = self.current
        process.is_muted = process.lane != 0
        yield
        process.is_muted = False

    def meet(self, barrier, who, count, width=1):
        generation = barrier.generation
        barrier.arrive(who, count, width)
        self.changed()
        if barrier.generation == generation:
            self.pause(lambda: barrier.generation != generation)

    def sync_warp(self):
        process = self.current
        if process.warp in self.num_lanes:
            self.meet(process.block.lanes[process.warp], process.lane, self.num_lanes[process.warp])

    def barrier(self, barrier_id=0, number_of_threads=None):
        process, warps = self.current, self.num_warps if number_of_threads is None else number_of_threads // LANES
        if process.lane == 0:
            self.meet(process.block.named[barrier_id], process.warp, warps, process.width)
        self.sync_warp()

    def barrier_arrive(self, barrier_id, number_of_threads):
        process = self.current
        process.block.named[barrier_id].arrive(process.warp, number_of_threads // LANES, process.width)
        self.changed()

    def cluster_arrive(self):
        process = self.current
        self.sync_warp()
        if process.lane == 0:
            self.pause(lambda: not process.block.late)  # arrivals land before a later one at the cluster's barrier
            cluster = process.block.cluster
            process.generation = cluster.barrier.generation
            count = len(cluster.blocks) * self.num_warps
            cluster.barrier.arrive((process.block.rank, process.warp), count, process.width)
            self.changed()

    def cluster_wait(self):
        process = self.current
        if process.lane == 0:
            self.pause(lambda: process.block.cluster.barrier.generation != process.generation)
        self.sync_warp()

    def fence(self):
        """Wait until the thread block's additions to global memory have landed."""
        block = self.current.block
        self.pause(lambda: not block.additions)

    def copy(self, atom, source, target, tma_bar_ptr=None, mbar_ptr=None, mcast_mask=None):
        barrier = mbar_ptr if tma_bar_ptr is None else tma_bar_ptr
        if barrier is None:  # between shared memory and registers: each warp has a part of the buffer
            warp = self.current.warp % WARPS
            if isinstance(target, Buffer):
                target.write(warp, source.content)
            else:
                target.fill(source.parts[warp])
            self.pause()
            return
        part, buffer = target if isinstance(target, tuple) else (0, target)
        own = self.current.block
        for block in [b for b in own.cluster.blocks if mcast_mask >> b.rank & 1] if mcast_mask else [own]:
            there = buffer.at(block)
            there.write(part, ON_ITS_WAY)
            barrier.at(block).value.buffers.add(there)
            self.remotely(block, functools.partial(self.land, there, part, source, barrier.at(block)))
        self.pause()

    def land(self, buffer, part, source, barrier):
        buffer.write(part, source.content, source.end)
        barrier.value.complete(source.num_bytes)

    def begin_gemms(self, acc, operands):
        """A group of GEMMs, which read their operands until a wait covers them."""
        for operand in operands:
            operand.readers += 1
        acc.writers += 1
        self.current.gemms.append((acc, operands))
        self.pause()

    def wait_group(self, most):
        gemms = self.current.gemms
        while len(gemms) > most:
            acc, operands = gemms.pop(0)
            acc.writers -= 1
            for operand in operands:
                operand.readers -= 1
        self.pause()

    def look_at(self, word):
        """The value of a word; a warp that looks at it again does so when something has changed."""
        process = self.current
        lanes = self.lanes_of(process)
        self.pause(lambda: process.seen != (word.index, self.changes) or any(lane.question for lane in lanes))
        process.seen = word.index, self.changes
        return word.value

    def lanes_of(self, process):
        return [p for p in self.processes if (p.block, p.warp) == (process.block, process.warp)]

    def is_phase_over(self, barrier, parity):
        """What all lanes of a warp ask at the same time, but for those that wait for the others."""
        process = self.current
        lanes = self.lanes_of(process)
        process.question, process.answer = (barrier, parity), None

        def is_answered():
            waiting = process.block.lanes[process.warp].arrived
            if process.answer is None and all(p.question or p.lane in waiting for p in lanes):
                for lane in (p for p in lanes if p.question):
                    (asked, of_lane), lane.question = lane.question, None
                    lane.answer = int(asked.value.phase != of_lane)
            return process.answer is not None

        self.pause(is_answered)
        return process.answer

    def draw(self, word):
        value = word.value
        word.value += 1
        self.changed()
        return value

    def publish(self, word, value):
        word.value = value
        self.changed()

    def wait_while_zero(self, word):
        self.pause(lambda: word.value)
        return word.value

    def send_word(self, target, value, barrier, rank):
        block = self.current.block.cluster.blocks[rank]

        def land():
            block.memory[target.number][0].write(0, value)
            barrier.at(block).value.arrive()

        self.remotely(block, land)
        self.pause()


class State:
    """pipeline.PipelineState."""

    def __init__(self, stages, count, index, phase):
        self.stages, self.count, self.index, self.phase = stages, count, index, phase

    def advance(self):
        self.index = (self.index + 1) % self.stages
        self.phase ^= self.index == 0

    def clone(self):
        return State(self.stages, self.count, self.index, self.phase)


class Pipe:
    """A circular buffer like PipelineTmaAsync, with an arrival of each warp that empties it."""

    def __init__(self, machine, num_stages, producer_group, consumer_group, tx_count, cluster_size, barrier_storage):
        self.machine, self.stages, self.num_bytes, self.cluster_size = machine, num_stages, tx_count, cluster_size
        self.full, self.empty = barrier_storage, barrier_storage + num_stages
        self.sync_object_empty = SimpleNamespace(wait=lambda index, phase: machine.wait(self.empty + index, phase))
        if self.full.value is None:
            machine.current.block.pipes.append(self)
        for i in range(num_stages):
            for first, arrivals in ((self.full, producer_group), (self.empty, consumer_group)):
                if (first + i).value is None:
                    (first + i).value = MBarrier(arrivals)

    def producer_acquire(self, state):
        self.machine.wait(self.empty + state.index, state.phase)
        self.machine.arrive(self.full + state.index, self.num_bytes, 1)

    def producer_get_barrier(self, state):
        return self.full + state.index

    def producer_tail(self, state):
        for _ in range(self.stages):
            self.machine.wait(self.empty + state.index, state.phase)
            state.advance()

    def consumer_wait(self, state, is_full=False):
        if not is_full:
            self.machine.wait(self.full + state.index, state.phase)

    def consumer_get_barrier(self, state):
        return self.empty + state.index

    def consumer_release(self, state):
        buffers = (self.full + state.index).value.buffers
        for _, operands in self.machine.current.gemms:
            assert buffers.isdisjoint(operands), "released while a GEMM reads it"
        if self.cluster_size == 1:
            self.machine.arrive(self.empty + state.index)
        else:
            for rank in range(self.cluster_size):
                self.machine.arrive_at(self.empty + state.index, rank)

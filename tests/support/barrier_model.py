"""Barriers and buffers of a thread block, as a model: processes are generators that yield after each act.

A process yields None, or what it waits for: a function that says whether the process may go on.
"""

WARPS = 2  # processes of a consumer warpgroup


class MBarrier:
    def __init__(self, arrivals):
        self.arrivals = self.pending = arrivals
        self.copies, self.phase = 0, 0

    def arrive(self, copies=0):
        """One arrival. Args: copies: the copies to be expected before the phase is complete, like bytes of TMA."""
        self.pending -= 1
        assert self.pending >= 0, "an arrival too many"
        self.copied(-copies)

    def copied(self, copies=1):
        self.copies -= copies
        if self.pending == self.copies == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1

    def wait(self, parity):
        """Wait until the phase of this parity seems complete: two phases later the parity is the same."""
        yield lambda: self.phase != parity


class NamedBarrier:
    def __init__(self, warps):
        self.warps, self.arrived, self.generation = warps, set(), 0

    def arrive(self, warp):
        assert warp not in self.arrived, "somebody came twice"
        self.arrived.add(warp)
        if len(self.arrived) == self.warps:
            self.arrived, self.generation = set(), self.generation + 1

    def sync(self, warp):
        generation = self.generation
        self.arrive(warp)
        yield lambda: self.generation != generation


class Buffer:
    """Memory that is written as a whole and then perhaps partly cleared, a share by each warp of a warpgroup."""

    def __init__(self):
        self.content, self.readers, self.garbage = None, 0, set()

    def write(self, content, has_garbage=False):
        assert not self.readers, "overwritten while it was read"
        self.content, self.garbage = content, set(range(WARPS)) if has_garbage else set()

    def clear(self, expected, share):
        """Put zeros in place of garbage; readers at the same time have masks, or have written the same zeros."""
        assert self.content == expected, "cleared too late or too early"
        self.garbage.discard(share)

    def read(self, expected, is_masked=True):
        assert self.content == expected, f"{self.content} in place of {expected}"
        assert is_masked or not self.garbage, "garbage"

    def begin_read(self, expected, is_masked):
        self.read(expected, is_masked)
        self.readers += 1

    def end_read(self):
        self.readers -= 1


class Pipe:
    """A circular buffer like PipelineTmaAsync, each fill of which is several copies."""

    def __init__(self, run, stages, readers, copies):
        self.run = run
        self.full, self.empty = ([MBarrier(n) for _ in range(stages)] for n in (1, readers))
        self.buffers = [[Buffer() for _ in range(copies)] for _ in range(stages)]

    def slot(self, n):
        return n % len(self.full)

    def parity(self, n):
        return n // len(self.full) & 1

    def of(self, n):
        return self.buffers[self.slot(n)]

    def acquire(self, n):
        yield from self.empty[self.slot(n)].wait(self.parity(n) ^ 1)

    def fill(self, n, content):
        yield from self.acquire(n)
        barrier, buffers = self.full[self.slot(n)], self.of(n)
        barrier.arrive(copies=len(buffers))
        for buffer in buffers:
            yield
            buffer.write("a copy on its way")
            self.run.start(self.copy(buffer, content, barrier))

    def copy(self, buffer, content, barrier):
        yield
        buffer.write(content, self.run.has_garbage(content))
        barrier.copied()

    def wait(self, n):
        yield from self.full[self.slot(n)].wait(self.parity(n))

    def release(self, n):
        self.empty[self.slot(n)].arrive()
        yield

    def tail(self, n):
        for i in range(len(self.full)):
            yield from self.acquire(n + i)

"""Roles of a thread block, run as Python: the methods of device code themselves, with stand-ins for the hardware.

Each role (the producer's warp, a consumer warpgroup, ...) is a thread of Python; one runs at a time, up to its next
wait. Then any role whose wait is over goes on, or any transfer that is under way arrives, in an order drawn from a
seed. A run ends with an error if nothing can go on, if a barrier has an arrival too many, if something reads what has
not arrived or is overwritten meanwhile, or if a warpgroup touches registers that its GEMMs in flight use.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

from test_elements_in_python import fresh


class Stopped(BaseException):
    """Another role has failed."""


class Role:
    """Attributes: go: a lock that is released when the role may go on. until: what it waits for; None: nothing."""

    def __init__(self, name: str, run: Callable[[], None]):
        self.name, self.run, self.until, self.what = name, run, None, ""
        self.go = threading.Lock()
        self.go.acquire()


class Machine:
    """Runs roles; what stands in for hardware waits by its `wait_until`."""

    def __init__(self, seed: int):
        self.random, self.running, self.transfers = random.Random(seed), [], []
        self.current, self.error, self.end = None, None, threading.Lock()

    def run(self, roles: dict[str, Callable[[], None]]):
        self.running = [Role(name, role) for name, role in roles.items()]
        threads = [threading.Thread(target=self._run, args=(role,), daemon=True) for role in self.running]
        self.end.acquire()
        for thread in threads:
            thread.start()
        self._go_on()
        self.end.acquire()
        for thread in threads:
            thread.join()
        if self.error is not None:
            raise self.error
        for transfer in self.transfers:
            transfer()

    def _run(self, role: Role):
        role.go.acquire()
        try:
            if self.error is None:
                role.run()
        except Stopped:
            return
        except BaseException as error:
            self.error = error
        self.running.remove(role)
        self._go_on()

    def _go_on(self):
        """Let a role go on, or all of them end."""
        role = self._chosen() if self.error is None and self.running else None
        if role is None:
            for role in self.running:
                role.go.release()
            self.end.release()
        else:
            role.go.release()

    def _chosen(self) -> Role | None:
        """The role that goes on, after transfers that come before; None, with an error, if all wait."""
        while True:
            ready = [role for role in self.running if role.until is None or role.until()]
            if not ready and not self.transfers:
                waits = "; ".join(f"{role.name} for {role.what}" for role in self.running)
                self.error = AssertionError(f"all wait: {waits}")
                return None
            number = self.random.randrange(len(ready) + bool(self.transfers))
            if number < len(ready):
                self.current = ready[number]
                return self.current
            self.transfers.pop(self.random.randrange(len(self.transfers)))()

    def wait_until(self, condition: Callable[[], bool], what: str):
        role = self.current
        role.until, role.what = condition, what
        chosen = self._chosen()
        if chosen is not role:
            if chosen is None:
                self._go_on()
            else:
                chosen.go.release()
            role.go.acquire()
            if self.error is not None:
                raise Stopped
        role.until = None

    def copy(self, source, target: Buffer, barrier: MBarrier):
        """Begin a transfer: what was in the target is gone at once, and its new content comes at any later time."""
        target.write(None)

        def arrive():
            target.write(source)
            barrier.complete()

        self.transfers.append(arrive)


class MBarrier:
    """Args: arrivals: of a phase. Transfers that a phase expects are added to its arrivals."""

    def __init__(self, machine: Machine, name: str, arrivals: int):
        self.machine, self.name, self.arrivals = machine, name, arrivals
        self.pending, self.expected, self.phase = arrivals, 0, 0

    def arrive(self):
        assert self.pending > 0, f"{self.name}: an arrival too many"
        self.pending -= 1
        self._end_phase()

    def expect(self, transfers: int):
        self.expected += transfers
        self.arrive()

    def complete(self):
        self.expected -= 1
        self._end_phase()

    def _end_phase(self):
        if self.pending == 0 and self.expected == 0:
            self.pending, self.phase = self.arrivals, self.phase ^ 1

    def is_over(self, parity: int) -> bool:
        return self.phase != parity

    def wait(self, parity: int):
        self.machine.wait_until(lambda: self.phase != parity, f"{self.name}, phase {parity}")


class NamedBarrier:
    """A hardware barrier of `threads` threads; roles count as many as they have."""

    def __init__(self, machine: Machine, name: str):
        self.machine, self.name, self.arrived, self.generation = machine, name, 0, 0

    def arrive(self, threads: int, mine: int):
        self.arrived += mine
        assert self.arrived <= threads, f"{self.name}: somebody came twice"
        if self.arrived == threads:
            self.arrived, self.generation = 0, self.generation + 1

    def sync(self, threads: int, mine: int):
        generation = self.generation
        self.arrive(threads, mine)
        self.machine.wait_until(lambda: self.generation != generation, self.name)


class State:
    """pipeline.PipelineState."""

    def __init__(self, stages: int, count: int, index: int, phase: int):
        self.stages, self.count, self.index, self.phase = stages, count, index, phase

    def clone(self) -> State:
        return State(self.stages, self.count, self.index, self.phase)

    def advance(self):
        self.index += 1
        if self.index == self.stages:
            self.index, self.phase = 0, self.phase ^ 1


class Buffer:
    """One place in shared memory. Attributes: content: None: nothing that may be read. version: counts its writes."""

    def __init__(self, name: str):
        self.name, self.content, self.version = name, None, 0

    def write(self, content):
        self.content, self.version = content, self.version + 1

    def read(self):
        assert self.content is not None, f"{self.name} is read before it has arrived"
        return self.content


class Pipe:
    """pipeline.PipelineTmaAsync and its tiles.

    Args:
        transfers: copies that fill a stage, each into a buffer of its own. 0: `writers` warps arrive instead.
        readers: arrivals that empty a stage.
    """

    def __init__(self, machine: Machine, name: str, stages: int, readers: int, transfers: int = 1, writers: int = 0):
        self.machine, self.name, self.stages, self.readers, self.transfers = machine, name, stages, readers, transfers
        self.full = [MBarrier(machine, f"{name}{i} full", writers or 1) for i in range(stages)]
        self.empty = [MBarrier(machine, f"{name}{i} empty", readers) for i in range(stages)]
        self.parts = writers or transfers
        self.buffers = [Buffer(f"{name}{i // self.parts}.{i % self.parts}") for i in range(stages * self.parts)]
        self.fills, self.releases = 0, 0
        self.sync_object_empty = SimpleNamespace(wait=lambda index, phase: self.empty[index].wait(phase))

    def tile(self, index: int) -> list:
        return self.buffers[index * self.parts : (index + 1) * self.parts]

    def consumer_wait(self, state: State, token=None):
        if not token:
            self.full[state.index].wait(state.phase)

    def consumer_release(self, state: State):
        self.machine.wait_until(lambda: True, "nothing")  # the arrival may come late
        self.releases += 1
        self.empty[state.index].arrive()

    def consumer_get_barrier(self, state: State) -> MBarrier:
        return SimpleNamespace(arrive=lambda: self.consumer_release(state))

    def producer_acquire(self, state: State):
        self.empty[state.index].wait(state.phase)
        self.fills += 1
        self.full[state.index].expect(self.transfers)

    def producer_get_barrier(self, state: State) -> MBarrier:
        return self.full[state.index]

    def producer_tail(self, state: State):
        """Wait until all buffers are empty."""
        for _ in range(self.stages):
            self.empty[state.index].wait(state.phase)
            state.advance()


class Register:
    """A register fragment. Attributes: results, operands: how many GEMMs in flight write it, and read it."""

    def __init__(self, name: str):
        self.name, self.results, self.operands, self._value = name, 0, 0, None

    @property
    def value(self):
        assert self.results == 0, f"{self.name} is read before its GEMM has ended"
        return self._value

    @value.setter
    def value(self, value):
        assert self.results == self.operands == 0, f"{self.name} is written while a GEMM uses it"
        self._value = value


class TensorCores:
    """The groups of GEMMs of a warpgroup that may not have ended."""

    def __init__(self):
        self.groups = []

    def issue(self, buffers: list[Buffer], result: Register, operands: list[Register] = ()):
        result.results += 1
        for register in operands:
            register.operands += 1
        self.groups.append(([(buffer, buffer.version) for buffer in buffers], result, operands))

    def wait(self, most: int):
        while len(self.groups) > most:
            buffers, result, operands = self.groups.pop(0)
            for buffer, version in buffers:
                assert buffer.version == version, f"{buffer.name} is overwritten while a GEMM reads it"
            result.results -= 1
            for register in operands:
                register.operands -= 1


@functools.cache
def _unwrapped(name: str):
    """A module of device code whose functions run as Python."""
    module = fresh(f"onepass.kernels.device.{name}")
    for owner in [
        module,
        *(c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__),
    ]:
        for key, value in list(vars(owner).items()):
            if hasattr(value, "__wrapped__") and not inspect.isclass(value):
                setattr(owner, key, value.__wrapped__)
    return module


def as_python(name: str, stand_ins: dict):
    """A module of device code as Python, in which these names stand for others. The next run sets them anew."""
    module = _unwrapped(name)
    for key, value in stand_ins.items():
        if hasattr(module, key):
            setattr(module, key, value)
    return module


def link(modules: list):
    """Let modules that run as Python use each other, and classes their bases, in the place of the compiled ones."""
    own = {module.__name__: module for module in modules}
    for module in modules:
        for kind in [c for c in vars(module).values() if inspect.isclass(c) and c.__module__ == module.__name__]:
            if any(base.__module__ in own for base in kind.__bases__):
                kind.__bases__ = tuple(getattr(own.get(b.__module__), b.__name__, b) for b in kind.__bases__)
        for key, value in list(vars(module).items()):
            if inspect.ismodule(value) and value.__name__ in own:
                setattr(module, key, own[value.__name__])
            origin = own.get(getattr(value, "__module__", None))
            if origin is not None and origin is not module and hasattr(origin, getattr(value, "__name__", "")):
                setattr(module, key, getattr(origin, value.__name__))


def language(machine: Machine, **arch) -> dict:
    """Stand-ins for the kernel language. Args: arch: more of `cute.arch`."""
    waits = {
        "mbarrier_wait": lambda barrier, phase: barrier.wait(phase),
        "mbarrier_arrive": lambda barrier: barrier.arrive(),
        "mbarrier_test_wait": lambda barrier, phase: barrier.is_over(phase),
    }
    nothing = {name: lambda *_, **__: None for name in ("fence_proxy", "sync_warp")}
    same = {name: lambda value, **_: value for name in ("make_warp_uniform", "shuffle_sync_bfly")}
    cute = SimpleNamespace(
        arch=SimpleNamespace(elect_one=contextlib.nullcontext, lane_idx=lambda: 0, **(waits | nothing | same | arch)),
        size=lambda values, mode=None: len(values),
        copy=lambda atom, source, target, tma_bar_ptr: machine.copy(source, target, tma_bar_ptr),
    )
    cutlass = SimpleNamespace(
        const_expr=lambda value: value, range_constexpr=range, range=lambda *bounds, unroll: range(*bounds)
    )
    cutlass.Float8E4M3FN = "e4m3"
    users = SimpleNamespace(Producer=1, Consumer=0)
    pipeline = SimpleNamespace(
        PipelineState=State,
        PipelineUserType=users,
        make_pipeline_state=lambda user, stages: State(stages, 0, 0, user),
    )
    return {"cute": cute, "cutlass": cutlass, "pipeline": pipeline, "Int32": int, "Boolean": bool, "Float32": float}

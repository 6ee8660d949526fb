"""Runs the PTX of a kernel of Ampere's instructions on the CPU, so that its results can be tested without a GPU.

A thread block runs by itself, its warps one after the other from barrier to barrier. Threads of a warp that have
diverged run apart, those that are furthest behind first. Two choices find missing waits and barriers:

    copies_late    a cp.async writes NaN at once, and its data only when the thread that issued it waits for its group;
                   else the data at once. The former shows who reads too early, the latter who overwrites too early.
    warps_reversed  the last warp of a block runs first.

Memory that nobody has written is full of NaN; an address outside raises, and so does a misaligned one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy import float32, int64, uint16, uint32, uint64

LANES = np.arange(32)
WIDTHS = {"64": uint64, "32": uint32, "16": uint16, "8": uint16}  # of registers
SIGNED = {uint64: np.int64, uint32: np.int32, uint16: np.int16}


class Memory:
    """Bytes from `base` on, 0xff (NaN) at first."""

    def __init__(self, num_bytes: int, base: int):
        self.bytes, self.base, self.used = np.full(num_bytes, 0xFF, np.uint8), base, 0

    def put(self, data: np.ndarray) -> int:
        """The address of a copy of the data, with room around it."""
        data = np.ascontiguousarray(data).view(np.uint8).ravel()
        start = (self.used + 511) // 256 * 256
        self.bytes[start : start + data.size] = data
        self.used = start + data.size
        return self.base + start

    def get(self, address: int, num_bytes: int) -> np.ndarray:
        return self.bytes[address - self.base :][:num_bytes].copy()

    def _places(self, addresses: np.ndarray, count: int) -> np.ndarray:
        starts = addresses.astype(int64) - self.base
        assert (starts >= 0).all(), "address below the memory"
        assert (starts + count <= self.bytes.size).all(), "address past the memory"
        assert (addresses % count == 0).all(), "misaligned address"
        return starts[:, None] + np.arange(count)

    def read(self, addresses: np.ndarray, count: int) -> np.ndarray:
        """(n, count) bytes."""
        return self.bytes[self._places(addresses, count)]

    def write(self, addresses: np.ndarray, data: np.ndarray):
        self.bytes[self._places(addresses, data.shape[1])] = data


GLOBAL_BASE, SHARED_BASE = 1 << 28, 1 << 10


class Instruction(NamedTuple):
    guard: str | None
    is_negated: bool
    name: str
    parts: tuple[str, ...]
    operands: list[str]
    text: str


class Program(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]
    parameter_bytes: list[int]


def parse(ptx: str) -> Program:
    """Of PTX with one kernel."""
    head, body = ptx.split(".reqntid", 1)
    scalar = {"f32": 4, "u32": 4, "b32": 4, "u64": 8, "b64": 8}
    declared = re.findall(r"\.param (?:\.align \d+ )?\.(\w+) \S+_param_\d+(?:\[(\d+)\])?", head)
    body = without_scopes(re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : body.rindex("}")]))
    body = re.sub(r"\b\w+_param_(\d+)\b", r"param\1", body)
    body = re.sub(r"(\$\w+):", r"label \1;", body)
    instructions: list[Instruction] = []
    labels = {}
    for statement in (" ".join(s.split()) for s in body.split(";")):
        if statement.startswith("label"):
            labels[statement.split()[1]] = len(instructions)
        elif statement and not statement.startswith("."):
            guard, name, rest = re.fullmatch(r"(?:@(!?%\w+) )?([\w.:]+) ?(.*)", statement).groups()
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
            is_negated = guard is not None and guard[0] == "!"
            guard = guard and guard.lstrip("!")
            instructions.append(Instruction(guard, is_negated, name, tuple(name.split(".")), operands, statement))
    return Program(instructions, labels, [int(n) if n else scalar[kind] for kind, n in declared])


def without_scopes(body: str) -> str:
    """PTX whose blocks { .reg ..; .. } of inline assembly have registers and labels like all others."""
    found = list(re.finditer(r"\{\s*\.reg", body))
    for number, match in reversed(list(enumerate(found))):
        end, depth = match.start() + 1, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(body[end], 0)
            end += 1
        block = body[match.start() + 1 : end - 1]
        names = {n.strip(): "%" for line in re.findall(r"\.reg \.\w+ ([^;]+);", block) for n in line.split(",")}
        names |= dict.fromkeys(re.findall(r"(\w+):", block), "$")
        for name, sign in names.items():
            block = re.sub(rf"(?<![\w%.$]){name}\b", f"{sign}of_block_{number}_{name}", block)
        body = body[: match.start()] + block + body[end:]
    return body


def run(
    program: Program,
    parameters: list[bytes],
    memory: Memory,
    grid: int | tuple[int, int, int],
    num_threads: int,
    smem_bytes: int,
    copies_late: bool = True,
    warps_reversed: bool = False,
):
    """All thread blocks of a grid (x, y, z), one after the other."""
    grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
    assert [len(p) for p in parameters] == program.parameter_bytes, "parameters of other sizes than the kernel's"
    for z, y, x in np.ndindex(grid[::-1]):
        shared = Memory(smem_bytes, SHARED_BASE)
        block = {"ctaid": (x, y, z), "nctaid": grid}
        warps = [Warp(program, parameters, memory, shared, block, w, copies_late) for w in range(num_threads // 32)]
        waiting = warps[::-1] if warps_reversed else warps
        while waiting:
            still = [warp for warp in waiting if warp.run_to_barrier()]
            assert not still or len(still) == len(waiting), "some warps wait for others that have ended"
            waiting = still


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(SIGNED[x.dtype.type])


def from_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    return (x.astype(uint32) << 16).view(float32) if kind == "bf16" else x.view(np.float16).astype(float32)


def to_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return x.astype(np.float16).view(uint16)
    bits = x.view(uint32).astype(uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(uint16)
    return np.where(np.isnan(x), uint16(0x7FFF), rounded)


def is_unordered(a, b):
    return np.isnan(a) | np.isnan(b)


COMPARISONS = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & ~is_unordered(a, b),
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "equ": lambda a, b: (a == b) | is_unordered(a, b),
    "num": lambda a, b: ~is_unordered(a, b),
    "nan": is_unordered,
}
FLOATS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(float32),
    "max": np.fmax,
    "min": np.fmin,
    "ex2": np.exp2,
    "lg2": np.log2,
    "div": np.divide,
    "rcp": lambda a: float32(1) / a,
    "neg": np.negative,
    "abs": np.abs,
}
INTEGERS: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "min": np.minimum,
    "max": np.maximum,
    "neg": np.negative,
    "div": lambda a, b: np.trunc(a / b).astype(a.dtype),
    "rem": np.fmod,
}


class Warp:
    def __init__(self, program, parameters, memory, shared, block: dict, number: int, copies_late: bool):
        self.program, self.parameters, self.copies_late = program, parameters, copies_late
        self.spaces = {"global": memory, "shared": shared}
        self.special = {
            "%tid.x": (LANES + 32 * number).astype(uint32),
            "%laneid": LANES.astype(uint32),
            **{
                f"%{name}.{axis}": np.full(32, n, uint32)
                for name, numbers in block.items()
                for axis, n in zip("xyz", numbers, strict=True)
            },
            "__dynamic_shmem__0": np.full(32, SHARED_BASE, uint32),
        }
        self.registers: dict[str, np.ndarray] = {}
        self.place = np.zeros(32, int)
        self.is_done = np.zeros(32, bool)
        self.groups: list[list] = []  # of copies, oldest first
        self.copies: list = []
        self.waits = 0

    def run_to_barrier(self) -> bool:
        """False: the warp has ended."""
        instructions = self.program.instructions
        with np.errstate(all="ignore"):
            while not self.is_done.all():
                place = self.place[~self.is_done].min()
                here = ~self.is_done & (self.place == place)
                if place == len(instructions):
                    self.is_done |= here
                    continue
                instruction = instructions[place]
                self.place[here] += 1
                if instruction.name == "bar.sync":
                    assert here.all(), "a barrier that not all threads of a warp meet together"
                    return True
                if instruction.guard:
                    here = here & (self.registers[instruction.guard] ^ instruction.is_negated)
                if here.any():
                    self.execute(instruction, here)
        return False

    # ---------------------------------------------------------------- operands

    def value(self, operand: str, kind: str = "b32") -> np.ndarray:
        if operand in self.special:
            return self.special[operand]
        if operand[0] == "%":
            return self.registers[operand]
        if operand.startswith("0f"):
            return np.full(32, int(operand[2:], 16), uint32)
        width = WIDTHS[kind[1:]]
        return np.full(32, int(operand, 0) & int(np.iinfo(width).max), width)

    def floats(self, operand: str) -> np.ndarray:
        return self.value(operand).view(float32)

    def set(self, register: str, value: np.ndarray, active: np.ndarray):
        if register != "_":
            old = self.registers.get(register)
            self.registers[register] = value.copy() if old is None else np.where(active, value, old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self.value(base).astype(int64) + int(offset or 0)

    # ---------------------------------------------------------------- instructions

    def execute(self, instruction: Instruction, active: np.ndarray):
        _, _, name, parts, operands, text = instruction
        kind = parts[-1]
        if parts[0] == "bra":
            self.place[active] = self.program.labels[operands[0]]
        elif parts[0] in ("ret", "exit"):
            self.is_done |= active
        elif name == "bar.warp.sync" or parts[0] == "fence":
            pass
        elif parts[0] in ("red", "atom"):
            self.add_to_memory(parts, operands, active)
        elif parts[0] in ("ld", "st"):
            # thread blocks before this one have ended: nobody will write what it waits for
            self.waits += "acquire" in parts
            assert self.waits < 100, f"waits for ever: {text}"
            self.load_or_store(parts, operands, active)
        elif name.startswith(("cp.async", "ldmatrix", "mma", "vote", "shfl")):
            self.of_warp(parts, operands, active, text)
        elif parts[0] == "mov":
            self.move(kind, operands, active)
        elif parts[0] == "selp":
            chosen = np.where(self.registers[operands[3]], self.value(operands[1], kind), self.value(operands[2], kind))
            self.set(operands[0], chosen, active)
        elif parts[0] == "cvt":
            self.set(operands[0], self.converted(parts, operands), active)
        elif parts[0] == "setp":
            self.set(operands[0], COMPARISONS[parts[1]](*self.typed(kind, operands[1:])), active)
        elif kind == "pred":
            self.set(operands[0], INTEGERS[parts[0]](*(self.registers[o] for o in operands[1:])), active)
        elif kind == "f32":
            result = FLOATS[parts[0]](*(self.floats(o) for o in operands[1:]))
            self.set(operands[0], result.astype(float32).view(uint32), active)
        else:
            result = self.integer(parts, operands[1:])
            self.set(operands[0], result.view(WIDTHS[str(result.dtype.itemsize * 8)]), active)

    def typed(self, kind: str, operands: list[str]) -> list[np.ndarray]:
        if kind == "f32":
            return [self.floats(o) for o in operands]
        values = [self.value(o, kind) for o in operands]
        return [signed(v) for v in values] if kind[0] == "s" else values

    def integer(self, parts, operands) -> np.ndarray:
        name, kind = parts[0], parts[-1]
        if name in ("mul", "mad"):
            a, b = self.typed(kind, operands[:2])
            if "lo" in parts:
                product = a * b
            else:
                product = a.astype(int64) * b.astype(int64) if kind[0] == "s" else a.astype(uint64) * b.astype(uint64)
            if "hi" in parts:
                product = (product >> (np.int64(32) if kind[0] == "s" else uint64(32))).astype(a.dtype)
            if name == "mad":
                product = product + self.value(operands[2], f"b{product.dtype.itemsize * 8}").view(product.dtype)
            return product
        if name in ("shl", "shr"):
            (a,), bits = self.typed(kind, operands[:1]), int(kind[1:])
            count = self.value(operands[1])
            shifted = (np.left_shift if name == "shl" else np.right_shift)(
                a, np.minimum(count, bits - 1).astype(a.dtype)
            )
            return shifted if kind[0] == "s" else np.where(count >= bits, a.dtype.type(0), shifted)
        if name == "popc":
            return np.array([int(x).bit_count() for x in self.value(operands[0])], uint32)
        return INTEGERS[name](*self.typed(kind, operands))

    def converted(self, parts, operands) -> np.ndarray:
        to, kind = parts[-2], parts[-1]
        if to in ("bf16x2", "f16x2"):
            high, low = (to_16_bits(self.floats(o), to[:-2]).astype(uint32) for o in operands[1:])
            return high << 16 | low
        if kind in ("bf16", "f16"):
            return from_16_bits(self.value(operands[1]), kind).view(uint32)
        if kind == "f32":
            return to_16_bits(self.floats(operands[1]), to)
        (source,) = self.typed(kind, operands[1:])
        return source.astype(int64).astype(WIDTHS[to[1:]])

    def move(self, kind: str, operands: list[str], active):
        target, source = operands
        half = {"b64": (uint64, uint32, 32), "b32": (uint32, uint16, 16)}.get(kind)
        if source[0] == "{":
            low, high = (self.value(o).astype(half[0]) for o in re.findall(r"%\w+", source))
            self.set(target, low | high << half[0](half[2]), active)
        elif target[0] == "{":
            value, (low, high) = self.value(source), re.findall(r"%\w+|_", target)
            self.set(low, value.astype(half[1]), active)
            self.set(high, (value >> half[0](half[2])).astype(half[1]), active)
        elif kind == "pred":
            self.set(target, self.registers[source] if source[0] == "%" else np.full(32, int(source) != 0), active)
        else:
            self.set(target, self.value(source, kind), active)

    def load_or_store(self, parts, operands, active):
        is_load = parts[0] == "ld"
        values, place = operands if is_load else operands[::-1]
        registers = values.strip("{} ").replace(" ", "").split(",")
        size = int(parts[-1][1:]) // 8
        space = next(part for part in parts if part in ("param", *self.spaces))
        if space == "param":
            number, _, offset = place.strip("[]").removeprefix("param").partition("+")
            data = np.frombuffer(self.parameters[int(number)], np.uint8)[int(offset or 0) :]
            data = np.tile(data[: size * len(registers)], (32, 1))
        elif is_load:
            data = np.zeros((32, size * len(registers)), np.uint8)
            data[active] = self.spaces[space].read(self.address(place)[active], data.shape[1])
        else:
            words = [self.value(r, parts[-1])[active] for r in registers]
            data = np.concatenate([np.ascontiguousarray(w).view(np.uint8).reshape(-1, size) for w in words], 1)
            self.spaces[space].write(self.address(place)[active], data)
            return
        for i, register in enumerate(registers):
            word = np.ascontiguousarray(data[:, i * size : (i + 1) * size])
            dtype = WIDTHS[str(8 * size)]
            self.set(register, word[:, 0].astype(dtype) if size == 1 else word.view(dtype)[:, 0], active)

    def add_to_memory(self, parts, operands, active):
        """red and atom, which also gives what was there, lane after lane."""
        memory, kind, is_atom = self.spaces["global"], parts[-1], parts[0] == "atom"
        place, values = operands[is_atom : is_atom + 2]
        registers = values.strip("{} ").replace(" ", "").split(",")
        dtype = np.dtype(float32 if kind == "f32" else SIGNED[WIDTHS[kind[1:]]])
        addends = np.stack([self.value(register, kind).view(dtype) for register in registers], 1)
        addresses, before = self.address(place), np.zeros(32, dtype)
        for lane in LANES[active]:
            old = memory.read(addresses[lane : lane + 1], dtype.itemsize * len(registers)).view(dtype)
            before[lane] = old[0, 0]
            memory.write(addresses[lane : lane + 1], np.ascontiguousarray(old + addends[lane]).view(np.uint8))
        if is_atom:
            self.set(operands[0], before.view(WIDTHS[kind[1:]]), active)

    def of_warp(self, parts, operands, active, text: str):
        """What other lanes, or later instructions, have a part in."""
        shared = self.spaces["shared"]
        if parts[0] == "cp" and parts[2] in ("cg", "ca"):
            self.copy(operands, active)
            return
        if parts[0] == "shfl":
            by, source = self.value(operands[2]).astype(int), self.value(operands[1])
            lane = {"bfly": LANES ^ by, "idx": by & 31, "up": np.where(by <= LANES, LANES - by, LANES)}[parts[2]]
            assert active[lane[active]].all(), f"a lane reads from one that is elsewhere: {text}"
            self.set(operands[0].split("|")[0], source[lane], active)
            return
        assert active.all(), f"not all lanes are here: {text}"
        if parts[0] == "vote":
            votes = self.registers[operands[1]]
            ballot = uint32(sum(int(vote) << i for i, vote in enumerate(votes)))
            self.set(operands[0], np.full(32, votes.any() if parts[2] == "any" else ballot), active)
        elif parts[0] == "ldmatrix":
            matrices = shared.read(self.address(operands[1]), 16).view(uint16).reshape(4, 8, 8).astype(uint32)
            row, column = LANES // 4, 2 * (LANES % 4)
            for matrix, register in zip(matrices, re.findall(r"%\w+", operands[0]), strict=True):
                m = matrix.T if "trans" in parts else matrix
                self.set(register, m[row, column] | m[row, column + 1] << 16, active)
        elif parts[0] == "mma":
            self.mma(parts[-2], [re.findall(r"[%\w]+", o) for o in operands])
        elif parts[2] == "commit_group":
            self.groups.append(self.copies)
            self.copies = []
        else:  # wait_group
            while len(self.groups) > int(operands[0]):
                for addresses, data in self.groups.pop(0):
                    shared.write(addresses, data)

    def copy(self, operands, active):
        """cp.async of 16 bytes, or of 16 zeros where there are none to read."""
        target, source = self.address(operands[0])[active], self.address(operands[1])
        count = self.value(operands[3]) if len(operands) > 3 else np.full(32, 16)
        assert set(count[active]) <= {0, 16}
        data, is_read = np.zeros((32, 16), np.uint8), active & (count == 16)
        data[is_read] = self.spaces["global"].read(source[is_read], 16)
        if self.copies_late:
            self.copies.append((target, data[active]))
            data[:] = 0xFF
        self.spaces["shared"].write(target, data[active])

    def mma(self, kind: str, operands: list[list[str]]):
        """m16n8k16 with float32 sums."""
        target, a_registers, b_registers, c_registers = operands
        a, b = np.zeros((16, 16), float32), np.zeros((16, 8), float32)
        eighth, pair = LANES // 4, 2 * (LANES % 4)
        for half, shift in enumerate((0, 16)):
            for i, register in enumerate(a_registers):
                word = (self.value(register) >> uint32(shift)).astype(uint16)
                a[eighth + i % 2 * 8, pair + i // 2 * 8 + half] = from_16_bits(word, kind)
            for i, register in enumerate(b_registers):
                word = (self.value(register) >> uint32(shift)).astype(uint16)
                b[pair + i * 8 + half, eighth] = from_16_bits(word, kind)
        product, everyone = a @ b, np.ones(32, bool)
        sums = [product[eighth + i // 2 * 8, pair + i % 2] + self.floats(c) for i, c in enumerate(c_registers)]
        for register, total in zip(target, sums, strict=True):
            self.set(register, total.astype(float32).view(uint32), everyone)

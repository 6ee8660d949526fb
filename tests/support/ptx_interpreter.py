"""Runs the PTX of a kernel of Ampere's instructions on the CPU, so that its results can be tested without a GPU.

The warps of a thread block run one after the other from barrier to barrier. Warps with the same number in all thread
blocks run together (numpy takes time per operation). Threads that have diverged run apart, the furthest behind first.
Two options find missing waits and barriers:

    copies_late     a cp.async writes NaN at once, and its data only when the thread that issued it waits for its group;
                    a barrier has to follow before threads read from shared memory. Otherwise it writes the data at
                    once. The former shows reads that come too early, the latter overwrites that come too early.
    warps_reversed  the last warp of a block runs first.

Memory that has not been written is full of NaN; an address outside raises, and so does a misaligned one.

Arithmetic is as inexact as the hardware's where float32 results depend on it: ex2.approx is off by up to 2 units in the
last place, and mma of tf32 ignores the low 13 bits of an operand and truncates its sums.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy import float32, int64, uint16, uint32, uint64

LANES = np.arange(32)
WIDTHS = {"64": uint64, "32": uint32, "16": uint16, "8": uint16}  # of registers, by their bits
SIGNED = {uint64: np.int64, uint32: np.int32, uint16: np.int16}
ITEMS = {1: np.uint8, 2: uint16, 4: uint32, 8: uint64, 16: np.dtype("V16")}  # of memory, by their bytes
BARRIERS = "bar.sync", "barrier.cta.red.or.pred"


class Memory:
    """`count` memories at the same addresses, with bytes from `base` on that are 0xff (NaN) at first."""

    def __init__(self, num_bytes: int, base: int, count: int = 1):
        self.num_bytes, self.pitch = num_bytes, (num_bytes + 15) // 16 * 16  # from one memory to the next
        self.bytes, self.base, self.used = np.full(count * self.pitch, 0xFF, np.uint8), base, 0

    def put(self, data: np.ndarray) -> int:
        """The address of a copy of the data, with room around it."""
        data = np.ascontiguousarray(data).view(np.uint8).ravel()
        start = (self.used + 511) // 256 * 256
        self.bytes[start : start + data.size] = data
        self.used = start + data.size
        return self.base + start

    def get(self, address: int, num_bytes: int) -> np.ndarray:
        return self.bytes[address - self.base :][:num_bytes].copy()

    def _items(self, addresses: np.ndarray, count: int, which: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """All items of `count` bytes, and the numbers of those at the addresses."""
        starts = addresses.astype(int64) - self.base
        assert (starts >= 0).all(), "address below the memory"
        assert (starts + count <= self.num_bytes).all(), "address past the memory"
        assert (starts % count == 0).all(), "misaligned address"
        if which is not None:
            starts = starts + which * self.pitch
        return self.bytes.view(ITEMS[count]), starts // count

    def read(self, addresses: np.ndarray, count: int, which: np.ndarray | None = None) -> np.ndarray:
        """(n, count) bytes."""
        items, numbers = self._items(addresses, count, which)
        return items[numbers].view(np.uint8).reshape(-1, count)

    def write(self, addresses: np.ndarray, data: np.ndarray, which: np.ndarray | None = None):
        items, numbers = self._items(addresses, data.shape[1], which)
        items[numbers] = np.ascontiguousarray(data).view(items.dtype)[:, 0]


GLOBAL_BASE, SHARED_BASE = 1 << 28, 1 << 10


class Instruction(NamedTuple):
    guard: str | None
    is_negated: bool
    name: str
    opcode: tuple[str, ...]
    operands: list[str]
    text: str


class Program(NamedTuple):
    instructions: list[Instruction]
    labels: dict[str, int]
    parameter_bytes: list[int]


def parse(ptx: str) -> Program:
    """The program of PTX with one kernel."""
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


def parse_all(ptx: str) -> list[Program]:
    """The programs of PTX with several kernels, in the order in which they are launched."""
    return [parse(kernel) for kernel in re.split(r"^\.visible \.entry", ptx, flags=re.MULTILINE)[1:]]


def without_scopes(body: str) -> str:
    """PTX without the scopes { .reg ..; .. } of inline assembly: their registers and labels become like all others."""
    found = list(re.finditer(r"\{\s*\.reg", body))
    for number, match in reversed(list(enumerate(found))):
        end, depth = match.start() + 1, 1
        while depth:
            depth += {"{": 1, "}": -1}.get(body[end], 0)
            end += 1
        block = body[match.start() + 1 : end - 1]
        names = {n.strip(): "%" for line in re.findall(r"\.reg \.\w+ ([^;]+);", block) for n in line.split(",")}
        names |= dict.fromkeys(re.findall(r"(?<![\w.:])(\w+):(?!:)", block), "$")
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
    one_by_one: bool = False,
):
    """Run the thread blocks of a grid (x, y, z) together or, where they wait for earlier ones, one by one."""
    assert [len(p) for p in parameters] == program.parameter_bytes, "parameters of other sizes than the kernel's"
    grid = grid if isinstance(grid, tuple) else (grid, 1, 1)
    blocks_in_order = np.array([(x, y, z) for z, y, x in np.ndindex(grid[::-1])])
    for blocks in blocks_in_order[:, None] if one_by_one else [blocks_in_order]:
        shared = Memory(smem_bytes, SHARED_BASE, len(blocks))
        warps = [
            Warp(program, parameters, memory, shared, blocks, grid, w, copies_late) for w in range(num_threads // 32)
        ]
        order = warps[::-1] if warps_reversed else warps
        while True:
            waiting = [warp.run_to_barrier() for warp in order]
            assert all((w == waiting[0]).all() for w in waiting), "some warps wait for others that have ended"
            if not waiting[0].any():
                break
            for warp in warps:
                warp.take_vote(warps)


def signed(x: np.ndarray) -> np.ndarray:
    return x.view(SIGNED[x.dtype.type])


def from_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    return (x.astype(uint32) << 16).view(float32) if kind == "bf16" else x.view(np.float16).astype(float32)


def to_16_bits(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "f16":
        return np.where(np.isnan(x), uint16(0x7FFF), x.astype(np.float16).view(uint16))
    bits = x.view(uint32).astype(uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(uint16)
    return np.where(np.isnan(x), uint16(0x7FFF), rounded)


# the value of every byte: 4 bits of exponent with bias 7, and 3 of mantissa; all ones: NaN
_MAGNITUDES = [
    (m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)) if (e, m) != (15, 7) else np.nan
    for e in range(16)
    for m in range(8)
]
E4M3 = np.array(_MAGNITUDES + [-x for x in _MAGNITUDES], float32)


def from_e4m3(x: np.ndarray, byte: int) -> np.ndarray:
    """The float16 numbers of one byte of each word."""
    return E4M3[(x >> (8 * byte)).astype(np.uint8)].astype(np.float16)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes, in 16 bits each, of the nearest e4m3 numbers, with ties to even and up to 448; NaN stays."""
    magnitude = np.minimum(np.abs(x).astype(np.float64), 448.0)
    above = np.searchsorted(E4M3[:127].astype(np.float64), magnitude)
    above = np.clip(above, 1, 126)
    low, high = (E4M3[i].astype(np.float64) for i in (above - 1, above))
    is_upper = (magnitude - low > high - magnitude) | ((magnitude - low == high - magnitude) & (above % 2 == 0))
    nearest = np.where(np.isnan(x), 0x7F, np.where(is_upper, above, above - 1)).astype(uint16)
    return nearest | np.where(np.signbit(x), uint16(0x80), uint16(0))


def cut_off(x: np.ndarray) -> np.ndarray:
    """float64 -> float32, rounded towards zero."""
    rounded = x.astype(float32)
    return np.where(np.abs(rounded) > np.abs(x), np.nextafter(rounded, float32(0)), rounded)


def approximate_exp2(x: np.ndarray) -> np.ndarray:
    """2^x with an error of -2 to 2 units in the last place, chosen by the bits of x; exactly 1 for 0, like hardware."""
    exact = np.exp2(x.astype(np.float64)).astype(float32)
    error = (x.view(uint32) * uint32(2654435761) >> uint32(16)) % uint32(5)
    off = (exact.view(uint32) + error - uint32(2)).view(float32)
    return np.where(np.isfinite(exact) & (exact > 2.0**-125) & (x != 0), off, exact)


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
    "ex2": approximate_exp2,
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
    """The warps with one number in all thread blocks: 32 lanes of each, one after the other."""

    def __init__(self, program, parameters, memory, shared, blocks: np.ndarray, grid, number: int, copies_late: bool):
        num_blocks = len(blocks)
        self.program, self.parameters, self.copies_late = program, parameters, copies_late
        self.spaces = {"global": memory, "shared": shared}
        self.num_lanes = 32 * num_blocks
        self.block, self.lane = np.repeat(np.arange(num_blocks), 32), np.tile(LANES, num_blocks)
        self.special = {
            "%tid.x": (self.lane + 32 * number).astype(uint32),
            "%laneid": self.lane.astype(uint32),
            **{f"%ctaid.{axis}": np.repeat(blocks[:, i], 32).astype(uint32) for i, axis in enumerate("xyz")},
            **{f"%nctaid.{axis}": self.full(grid[i], uint32) for i, axis in enumerate("xyz")},
            "__dynamic_shmem__0": self.full(SHARED_BASE, uint32),
        }
        self.constants: dict[tuple[str, str], np.ndarray] = {}
        self.registers: dict[str, np.ndarray] = {}
        self.position = np.zeros(self.num_lanes, int)
        self.is_everyone = False  # whether all lanes execute the current instruction
        self.is_done = np.zeros(self.num_lanes, bool)
        # groups of copies that each lane has committed; and copies: lanes, addresses, data and the numbers of groups
        self.committed = np.zeros(self.num_lanes, int)
        self.copies: list[tuple] = []
        self.has_news = np.zeros(self.num_lanes, bool)  # whether copies have ended of which no other lane knows
        self.waits = 0
        # for a barrier that is also a vote: the register of its result, the lanes that have arrived, those that say yes
        self.vote: tuple[str, np.ndarray, np.ndarray] | None = None

    def full(self, value, dtype) -> np.ndarray:
        return np.full(self.num_lanes, value, dtype)

    def of_whole_warps(self, active: np.ndarray, text: str):
        if self.is_everyone:
            return
        by_warp = active.reshape(-1, 32)
        assert (by_warp.all(1) == by_warp.any(1)).all(), f"not all lanes are here: {text}"

    def expect_barrier(self, active: np.ndarray, text: str):
        """A read of shared memory, where other lanes' copies can be seen after a barrier."""
        assert not self.has_news[active].any(), f"no barrier after a wait for copies: {text}"

    def run_to_barrier(self) -> np.ndarray:
        """Run to the next barrier. Returns: which warps have met one; the others have ended."""
        instructions = self.program.instructions
        runs, self.vote = ~self.is_done, None
        with np.errstate(all="ignore"):
            while num_running := np.count_nonzero(runs):
                position = self.position.min() if num_running == self.num_lanes else self.position[runs].min()
                here = self.position == position
                if num_running < self.num_lanes:
                    here &= runs
                self.is_everyone = np.count_nonzero(here) == self.num_lanes
                if self.is_everyone and self.run_together(position) != position:
                    continue
                if position == len(instructions):
                    self.is_done |= here
                    runs &= ~here
                    continue
                instruction = instructions[position]
                self.position[here] += 1
                if instruction.name == BARRIERS[0]:
                    self.of_whole_warps(here, instruction.text)
                    runs, self.has_news = runs & ~here, self.has_news & ~here
                    continue
                if instruction.name == BARRIERS[1]:
                    self.of_whole_warps(here, instruction.text)
                    runs, self.has_news = runs & ~here, self.has_news & ~here
                    result, _, mine = instruction.operands
                    self.vote = result, here, here & self.registers[mine]
                    continue
                if instruction.guard:
                    here = here & (self.registers[instruction.guard] ^ instruction.is_negated)
                    count = np.count_nonzero(here)
                    self.is_everyone = count == self.num_lanes
                    if count == 0:
                        continue
                self.execute(instruction, here)
                if instruction.opcode[0] in ("ret", "exit"):
                    runs &= ~here
        return ~self.is_done[::32]

    def run_together(self, position: int) -> int:
        """Run all lanes from one position on until they part, meet a barrier or end. Returns: the position there."""
        instructions, everyone = self.program.instructions, np.ones(self.num_lanes, bool)
        while position < len(instructions):
            instruction, here = instructions[position], everyone
            if instruction.name in BARRIERS or instruction.opcode[0] in ("ret", "exit"):
                break
            if instruction.guard:
                here = self.registers[instruction.guard] ^ instruction.is_negated
            count = np.count_nonzero(here) if instruction.guard else self.num_lanes
            if instruction.opcode[0] == "bra" and count:
                if count < self.num_lanes:
                    break
                position = self.program.labels[instruction.operands[0]]
                continue
            if count:
                self.is_everyone = count == self.num_lanes
                self.execute(instruction, here)
                self.is_everyone = True
            position += 1
        self.position[:] = position
        return position

    def take_vote(self, warps: list[Warp]):
        """After a barrier that is a vote, hand its result to the warps of each thread block."""
        if self.vote is None:
            return
        result, here, _ = self.vote
        votes = [warp.vote for warp in warps]
        assert all(vote is not None and (vote[1] == here).all() for vote in votes), "some warps vote, others wait"
        found = np.any([says_yes.reshape(-1, 32).any(1) for _, _, says_yes in votes], 0)
        self.is_everyone = here.all()
        self.set(result, np.repeat(found, 32), here)

    # ---------------------------------------------------------------- operands

    def value(self, operand: str, kind: str = "b32") -> np.ndarray:
        if operand in self.registers:
            return self.registers[operand]
        if operand in self.special:
            return self.special[operand]
        if (operand, kind) not in self.constants:
            if operand.startswith("0f"):
                constant = self.full(int(operand[2:], 16), uint32)
            else:
                width = WIDTHS[kind[1:]]
                constant = self.full(int(operand.rstrip("U"), 0) & int(np.iinfo(width).max), width)
            self.constants[operand, kind] = constant
        return self.constants[operand, kind]

    def floats(self, operand: str) -> np.ndarray:
        return self.value(operand).view(float32)

    def set(self, register: str, value: np.ndarray, active: np.ndarray):
        if register != "_":
            old = self.registers.get(register)
            is_whole = old is None or self.is_everyone
            # no operation writes into its operands, so registers may share an array
            self.registers[register] = value if is_whole else np.where(active, value, old)

    def address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[]").partition("+")
        return self.value(base).astype(int64) + int(offset or 0)

    # ---------------------------------------------------------------- instructions

    def execute(self, instruction: Instruction, active: np.ndarray):
        _, _, name, opcode, operands, text = instruction
        kind = opcode[-1]
        if opcode[0] == "bra":
            self.position[active] = self.program.labels[operands[0]]
        elif opcode[0] in ("ret", "exit"):
            self.is_done |= active
        elif name == "bar.warp.sync":
            self.has_news &= ~active
        elif opcode[0] == "fence":
            pass
        elif opcode[0] in ("red", "atom"):
            self.add_to_memory(opcode, operands, active)
        elif opcode[0] in ("ld", "st"):
            # thread blocks before this one have ended: nothing will write what it waits for
            self.waits += "acquire" in opcode
            assert self.waits < 100, f"waits for ever: {text}"
            if opcode[0] == "ld" and "shared" in opcode:
                self.expect_barrier(active, text)
            self.load_or_store(opcode, operands, active)
        elif name.startswith(("cp.async", "ldmatrix", "stmatrix", "mma", "vote", "shfl", "redux")):
            self.of_warp(opcode, operands, active, text)
        elif opcode[0] == "mov":
            self.move(kind, operands, active)
        elif opcode[0] == "selp":
            chosen = np.where(self.registers[operands[3]], self.value(operands[1], kind), self.value(operands[2], kind))
            self.set(operands[0], chosen, active)
        elif opcode[0] == "cvt":
            self.set(operands[0], self.converted(opcode, operands), active)
        elif opcode[0] == "setp":
            self.set(operands[0], COMPARISONS[opcode[1]](*self.typed(kind, operands[1:])), active)
        elif kind == "pred":
            self.set(operands[0], INTEGERS[opcode[0]](*(self.registers[o] for o in operands[1:])), active)
        elif kind == "f32":
            result = FLOATS[opcode[0]](*(self.floats(o) for o in operands[1:]))
            self.set(operands[0], result.astype(float32).view(uint32), active)
        elif (opcode[0], kind) == ("add", "f16x2"):
            pairs = zip(*(self.pair(o) for o in operands[1:]), strict=True)
            low, high = ((a + b).view(uint16).astype(uint32) for a, b in pairs)
            self.set(operands[0], high << uint32(16) | low, active)
        else:
            result = self.integer(opcode, operands[1:])
            result = np.maximum(result, 0) if "relu" in opcode else result
            self.set(operands[0], result.view(WIDTHS[str(result.dtype.itemsize * 8)]), active)

    def typed(self, kind: str, operands: list[str]) -> list[np.ndarray]:
        if kind == "f32":
            return [self.floats(o) for o in operands]
        values = [self.value(o, kind) for o in operands]
        return [signed(v) for v in values] if kind[0] == "s" else values

    def pair(self, operand: str) -> list[np.ndarray]:
        """Two float16 of a register, the lower one first."""
        word = self.value(operand)
        return [half.astype(uint16).view(np.float16) for half in (word & uint32(0xFFFF), word >> uint32(16))]

    def integer(self, opcode, operands) -> np.ndarray:
        name, kind = opcode[0], opcode[-1]
        if name in ("mul", "mad"):
            a, b = self.typed(kind, operands[:2])
            if "lo" in opcode:
                product = a * b
            else:
                product = a.astype(int64) * b.astype(int64) if kind[0] == "s" else a.astype(uint64) * b.astype(uint64)
            if "hi" in opcode:
                product = (product >> product.dtype.type(kind[1:])).astype(a.dtype)
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
        if name == "shf":
            assert opcode[1:3] == ("l", "wrap"), opcode
            low, high, count = (self.value(o).astype(uint64) for o in operands)
            return ((high << uint64(32) | low) << (count & uint64(31)) >> uint64(32)).astype(uint32)
        if name == "prmt":
            a, b, selector = (self.value(o) for o in operands)
            both = (a.astype(uint64) | b.astype(uint64) << uint64(32)).view(np.uint8).reshape(-1, 8)
            which = selector[:, None] >> np.arange(0, 16, 4, dtype=uint32) & uint32(15)
            chosen = np.take_along_axis(both, (which & uint32(7)).astype(int64), 1)
            signs = np.where(chosen >= 128, np.uint8(255), np.uint8(0))
            return np.where(which >= 8, signs, chosen).view(uint32)[:, 0]
        if name == "lop3":
            words, table = [self.value(o) for o in operands[:3]], int(self.value(operands[3])[0])
            result = self.full(0, uint32)
            for i in range(8):  # each combination of bits for which the table has a one
                if table >> i & 1:
                    a, b, c = (w if i >> s & 1 else ~w for w, s in zip(words, (2, 1, 0), strict=True))
                    result = result | (a & b & c)
            return result
        if name == "abs" and kind in ("bf16", "f16"):
            return self.value(operands[0]) & uint16(0x7FFF)
        if name == "bmsk":
            first, count = (np.minimum(self.value(o), 32).astype(np.uint64) for o in operands)
            return (((1 << count) - 1 << first) & np.uint64(0xFFFFFFFF)).astype(uint32)
        if name == "popc":
            return np.array([int(x).bit_count() for x in self.value(operands[0])], uint32)
        return INTEGERS[name](*self.typed(kind, operands))

    def converted(self, opcode, operands) -> np.ndarray:
        to, kind = opcode[-2], opcode[-1]
        if (to, kind) == ("e4m3x2", "f16x2"):
            low, high = (to_e4m3(x.astype(float32)) for x in self.pair(operands[1]))
            return high << uint16(8) | low
        if kind == "e4m3x2":
            low, high = (from_e4m3(self.value(operands[1]), byte).view(uint16).astype(uint32) for byte in (0, 1))
            return high << 16 | low
        if to == "e4m3x2":
            high, low = (to_e4m3(self.floats(o)) for o in operands[1:])
            return high << uint16(8) | low
        if to in ("bf16x2", "f16x2"):
            given = [self.floats(o) for o in operands[1:]]
            if "relu" in opcode:  # NaN stays
                given = [np.where(x < 0, float32(0), x) for x in given]
            high, low = (to_16_bits(x, to[:-2]).astype(uint32) for x in given)
            return high << 16 | low
        if kind in ("bf16", "f16"):
            return from_16_bits(self.value(operands[1]), kind).view(uint32)
        if kind == "f32":
            return to_16_bits(self.floats(operands[1]), to)
        (source,) = self.typed(kind, operands[1:])
        if to == "f32":
            return source.astype(float32).view(uint32)
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
            self.set(target, self.registers[source] if source[0] == "%" else self.full(int(source) != 0, bool), active)
        else:
            self.set(target, self.value(source, kind), active)

    def load_or_store(self, opcode, operands, active):
        is_load = opcode[0] == "ld"
        values, pointer = operands if is_load else operands[::-1]
        registers = values.strip("{} ").replace(" ", "").split(",")
        size = int(opcode[-1][1:]) // 8
        space = next(word for word in opcode if word in ("param", *self.spaces))
        if space == "param":
            number, _, offset = pointer.strip("[]").removeprefix("param").partition("+")
            data = np.frombuffer(self.parameters[int(number)], np.uint8)[int(offset or 0) :]
            data = np.tile(data[: size * len(registers)], (self.num_lanes, 1))
        elif is_load:
            data = np.zeros((self.num_lanes, size * len(registers)), np.uint8)
            which = self.block[active] if space == "shared" else None
            data[active] = self.spaces[space].read(self.address(pointer)[active], data.shape[1], which)
        else:
            # the low bits of a wider register
            words = [self.value(r, opcode[-1])[active].astype(WIDTHS[opcode[-1][1:]], copy=False) for r in registers]
            data = np.concatenate([np.ascontiguousarray(w).view(np.uint8).reshape(-1, size) for w in words], 1)
            which = self.block[active] if space == "shared" else None
            self.spaces[space].write(self.address(pointer)[active], data, which)
            return
        for i, register in enumerate(registers):
            word = np.ascontiguousarray(data[:, i * size : (i + 1) * size])
            dtype = WIDTHS[str(8 * size)]
            self.set(register, word[:, 0].astype(dtype) if size == 1 else word.view(dtype)[:, 0], active)

    def add_to_memory(self, opcode, operands, active):
        """Execute red, or atom, which also returns the old value. Lanes with one address go one after the other."""
        memory, kind, is_atom = self.spaces["global"], opcode[-1], opcode[0] == "atom"
        pointer, values = operands[is_atom : is_atom + 2]
        registers = values.strip("{} ").replace(" ", "").split(",")
        dtype = np.dtype(float32 if kind == "f32" else SIGNED[WIDTHS[kind[1:]]])
        addends = np.stack([self.value(register, kind).view(dtype) for register in registers], 1)
        addresses, before = self.address(pointer), np.zeros(self.num_lanes, dtype)
        lanes = np.flatnonzero(active)
        while lanes.size:
            _, first = np.unique(addresses[lanes], return_index=True)
            now = lanes[first]
            old = memory.read(addresses[now], dtype.itemsize * len(registers)).view(dtype)
            before[now] = old[:, 0]
            memory.write(addresses[now], (old + addends[now]).view(np.uint8))
            lanes = np.delete(lanes, first)
        if is_atom:
            self.set(operands[0], before.view(WIDTHS[kind[1:]]), active)

    def of_warp(self, opcode, operands, active, text: str):
        """Execute an instruction that involves other lanes, or later instructions."""
        shared = self.spaces["shared"]
        if opcode[0] == "cp" and opcode[2] in ("cg", "ca"):
            self.copy(operands, active)
            return
        if opcode[0] == "shfl":
            by, source, lane = self.value(operands[2]).astype(int), self.value(operands[1]), self.lane
            lane = {"bfly": lane ^ by, "idx": by & 31, "up": np.where(by <= lane, lane - by, lane)}[opcode[2]]
            lane = lane + 32 * self.block
            assert active[lane[active]].all(), f"a lane reads from one that is elsewhere: {text}"
            self.set(operands[0].split("|")[0], source[lane], active)
            return
        self.of_whole_warps(active, text)
        if opcode[0] == "vote":
            votes = self.registers[operands[1]].reshape(-1, 32)
            if opcode[2] == "any":
                votes = votes.any(1)
            else:
                votes = (votes.astype(uint32) << LANES.astype(uint32)).sum(1, dtype=uint32)
            self.set(operands[0], np.repeat(votes, 32), active)
        elif opcode[0] == "redux":
            values = self.value(operands[1]).view(np.int32).reshape(-1, 32)
            extremes = {"min": values.min, "max": values.max}[opcode[2]](1)
            self.set(operands[0], np.repeat(extremes, 32).view(uint32), active)
        elif opcode[0] == "ldmatrix":
            self.expect_barrier(active, text)
            # the addresses of warps that are elsewhere are arbitrary
            addresses = np.where(active, self.address(operands[1]), SHARED_BASE)
            matrices = shared.read(addresses, 16, self.block).view(uint16).reshape(-1, 4, 8, 8).astype(uint32)
            row, column = LANES // 4, 2 * (LANES % 4)
            for i, register in enumerate(re.findall(r"%\w+", operands[0])):
                m = matrices[:, i].transpose(0, 2, 1) if "trans" in opcode else matrices[:, i]
                self.set(register, (m[:, row, column] | m[:, row, column + 1] << 16).ravel(), active)
        elif opcode[0] == "stmatrix":
            # four matrices, like ldmatrix without .trans: four lanes have a word each of a row
            words = np.stack([self.value(r).reshape(-1, 8, 4) for r in re.findall(r"%\w+", operands[1])], 1)
            rows = np.ascontiguousarray(words.reshape(-1, 4)).view(np.uint8)
            shared.write(self.address(operands[0])[active], rows[active], self.block[active])
        elif opcode[0] == "mma":
            self.mma(opcode, [o.strip("{} ").replace(" ", "").split(",") for o in operands], active)
        elif opcode[2] == "commit_group":
            self.committed[active] += 1
        else:  # wait_group
            self.wait_for_copies(active, int(operands[0]))

    def copy(self, operands, active):
        """Execute cp.async of 16, 8 or 4 bytes, or of as many zeros where there is nothing to read."""
        size = int(operands[2])
        target, source = self.address(operands[0])[active], self.address(operands[1])
        count = self.value(operands[3]) if len(operands) > 3 else self.full(size, int)
        assert set(count[active]) <= {0, size}
        data, is_read = np.zeros((self.num_lanes, size), np.uint8), active & (count == size)
        data[is_read] = self.spaces["global"].read(source[is_read], size)
        if self.copies_late:
            self.copies.append((np.flatnonzero(active), target, data[active], self.committed[active]))
            data[:] = 0xFF
        self.spaces["shared"].write(target, data[active], self.block[active])

    def wait_for_copies(self, active, still_under_way: int):
        """Complete copies until only the given number of each lane's last groups is pending."""
        remaining = []
        for lanes, targets, data, groups in self.copies:
            is_due = active[lanes] & (groups < self.committed[lanes] - still_under_way)
            due = lanes[is_due]
            self.spaces["shared"].write(targets[is_due], data[is_due], self.block[due])
            self.has_news[due] = True
            if not is_due.all():
                remaining.append(tuple(x[~is_due] for x in (lanes, targets, data, groups)))
        self.copies = remaining

    def mma(self, opcode, operands: list[list[str]], active):
        """Execute mma m16n8k16 of 16-bit values or m16n8k8 of tf32, with float32 sums."""
        target, a_registers, b_registers, c_registers = operands
        if "tf32" in opcode:

            def tf32(registers: list[str]) -> np.ndarray:
                words = np.stack([self.value(r) for r in registers]) & uint32(0xFFFFE000)
                return words.view(float32).astype(np.float64)

            # registers of A: (columns + 4, rows + 8), of B: terms + 4
            a = tf32(a_registers).reshape(2, 2, -1, 8, 4).transpose(2, 1, 3, 0, 4).reshape(-1, 16, 8)
            b = tf32(b_registers).reshape(2, -1, 8, 4).transpose(1, 0, 3, 2).reshape(-1, 8, 8)
        else:

            def halves(registers: list[str]) -> np.ndarray:
                words = np.stack([self.value(r) for r in registers]).view(uint16)
                return from_16_bits(words, opcode[-2])

            # registers of A: (columns + 8, rows + 8), of B: terms + 8; two neighbors in each
            a = halves(a_registers).reshape(2, 2, -1, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(-1, 16, 16)
            b = halves(b_registers).reshape(2, -1, 8, 4, 2).transpose(1, 0, 3, 4, 2).reshape(-1, 16, 8)
        product = a @ b
        # registers of C: (rows + 8, odd columns)
        sums = product.reshape(-1, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3).reshape(4, -1)
        sums = sums + np.stack([self.floats(c) for c in c_registers])
        if sums.dtype == np.float64:
            sums = cut_off(sums)
        for register, total in zip(target, sums.view(uint32), strict=True):
            self.set(register, total, active)

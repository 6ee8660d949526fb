"""Which warpgroup instructions of a kernel stand where the warps of a warpgroup may part, read from its PTX.

All warps of a warpgroup must execute the same wgmma and setmaxnreg instructions (PTX ISA). So none may depend on a
branch that one of these warps may take and another may not: on a vote, an elected lane, a test of a barrier, a score.
Each result of an instruction has, as the fixed point of `values`, one of these kinds:

    an array    a function of the thread's number: its values in all threads
    SAME        unknown, but the same in all threads of a warpgroup: from arguments and the number of the thread block
    LANE        unknown, and the same in all warps of a warpgroup: a function of SAME and of the lane
    ANY         unknown, and different between warps

A load has the kind of its address: threads that read the same word at the same point of the program find the same, if
they have waited for it. Where warps come together again, what they have assigned while they were apart is ANY.
"""

from __future__ import annotations

import re

import numpy as np
import ptx_interpreter

SAME, LANE, ANY = range(3)
THREADS = np.arange(640)  # as many as the largest thread block has
LANES, WARPGROUP = 32, 128
OF_A_WARPGROUP = "wgmma", "setmaxnreg"
OF_A_WARP = "elect", "atom", "activemask", "match", "wgmma", "mbarrier", "ldmatrix"  # their results
WITHOUT_RESULT = "bra", "st", "red", "bar", "barrier"
FUNCTIONS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "div": np.floor_divide,
    "rem": np.remainder,
    "min": np.minimum,
    "max": np.maximum,
    "mov": np.copy,
    "cvt": np.copy,
}


def parted(ptx: str) -> list[str]:
    """The wgmma and setmaxnreg instructions of all kernels that a part of a warpgroup may execute by itself."""
    return [text for program in ptx_interpreter.parse_all(ptx) for text in _parted(program)]


def _parted(program: ptx_interpreter.Program) -> list[str]:
    instructions = program.instructions
    blocks, following = _blocks(program)
    block_of = [number for number, block in enumerate(blocks) for _ in block]
    after = _postdominators(following)
    regions = {b: _region(b, following, after[b]) for b in range(len(blocks)) if len(following[b]) > 1}
    definitions = _definitions(instructions, blocks, following)
    values: list = [SAME] * len(instructions)
    apart = [0] * len(blocks)  # of a block: the branches, as bits of the numbers of their blocks, that part its warps

    def value_of(name: str, number: int):
        """A register, as the instruction with this number reads it."""
        where = definitions[number][name]
        if any(apart[block_of[d]] & ~apart[block_of[number]] for d in where):
            return ANY
        return values[where[0]] if len(where) == 1 else max((_kind(values[d]) for d in where), default=SAME)

    has_changed = True
    while has_changed:
        has_changed = False
        for number, instruction in enumerate(instructions):
            block, value = block_of[number], SAME
            if _results(instruction):
                value = _value(instruction, {name: value_of(name, number) for name in definitions[number]})
            if instruction.guard:
                value = max(_kind(value), _kind(value_of(instruction.guard, number)))
            if instruction.opcode[0] in ("bra", "ret", "exit") and value != SAME:
                for other in regions[block]:
                    has_changed |= not apart[other] >> block & 1
                    apart[other] |= 1 << block
            if not _is_equal(values[number], value):
                values[number], has_changed = value, True
    return [
        instruction.text
        for number, instruction in enumerate(instructions)
        if instruction.opcode[0] in OF_A_WARPGROUP
        and (apart[block_of[number]] or (instruction.guard and _kind(value_of(instruction.guard, number)) != SAME))
    ]


# ---------------------------------------------------------------- the graph of basic blocks


def _blocks(program: ptx_interpreter.Program) -> tuple[list[range], list[list[int]]]:
    """The basic blocks as ranges of instructions, and the numbers of those that may follow each.

    The number one past the last block is the end of the program.
    """
    instructions, count = program.instructions, len(program.instructions)
    ends = [n + 1 for n, i in enumerate(instructions) if i.opcode[0] in ("bra", "ret", "exit")]
    starts = sorted({0, *(n for n in (*program.labels.values(), *ends) if n < count)})
    blocks = [range(a, b) for a, b in zip(starts, [*starts[1:], count], strict=True)]
    number_of = {start: number for number, start in enumerate([*starts, count])}
    following = []
    for number, block in enumerate(blocks):
        last = instructions[block[-1]]
        targets = set()
        if last.opcode[0] == "bra":
            targets.add(number_of[program.labels[last.operands[0]]])
        elif last.opcode[0] in ("ret", "exit"):
            targets.add(len(blocks))
        if last.guard or not targets:
            targets.add(number + 1)
        following.append(sorted(targets))
    return blocks, following


def _postdominators(following: list[list[int]]) -> list[int]:
    """For each block those, as bits, through which all ways from it to the end of the program go; it is one of them."""
    end = len(following)
    found = [(1 << end + 1) - 1] * end + [1 << end]
    has_changed = True
    while has_changed:
        has_changed = False
        for block in reversed(range(end)):
            common = -1
            for target in following[block]:
                common &= found[target]
            has_changed |= found[block] != common | 1 << block
            found[block] = common | 1 << block
    return found[:end]


def _region(block: int, following: list[list[int]], after: int) -> set[int]:
    """The blocks that depend on the branch at the end of a block: up to the first one that all ways reach."""
    region: set[int] = set()
    found = list(following[block])
    while found:
        number = found.pop()
        if number not in region and (number == block or not after >> number & 1):
            region.add(number)
            found += following[number]
    return region


def _definitions(instructions: list, blocks: list[range], following: list[list[int]]) -> list[dict[str, list[int]]]:
    """For each instruction the registers that it reads, and the instructions that may have assigned each last."""
    assigned: dict[str, list[int]] = {}
    for number, instruction in enumerate(instructions):
        for name in _results(instruction):
            assigned.setdefault(name, []).append(number)
    # only registers with several assignments need to be followed
    bits = {name: sum(1 << d for d in where) for name, where in assigned.items() if len(where) > 1}

    def passed(reaching: int, number: int) -> int:
        for name in _results(instructions[number]):
            if name in bits:
                reaching = reaching & ~bits[name] | 1 << number
        return reaching

    into, out = [0] * (len(blocks) + 1), [-1] * len(blocks)
    has_changed = True
    while has_changed:
        has_changed = False
        for number, block in enumerate(blocks):
            reaching = into[number]
            for i in block:
                reaching = passed(reaching, i)
            has_changed |= reaching != out[number]
            out[number] = reaching
            for target in following[number]:
                into[target] |= reaching
    found = []
    for number, block in enumerate(blocks):
        reaching = into[number]
        for i in block:
            instruction = instructions[i]
            names = {name for operand in instruction.operands for name in _registers(operand)}
            names |= {instruction.guard} if instruction.guard else set()
            found.append({})
            for name in names:
                where = assigned.get(name, [])
                found[-1][name] = [d for d in where if reaching >> d & 1] if name in bits else where
            reaching = passed(reaching, i)
    return found


# ---------------------------------------------------------------- the kinds of values


def _registers(operand: str) -> list[str]:
    return re.findall(r"%\w+", operand)


def _results(instruction: ptx_interpreter.Instruction) -> list[str]:
    """The registers that an instruction assigns."""
    if not instruction.operands or instruction.opcode[0] in WITHOUT_RESULT or instruction.operands[0][0] == "[":
        return []
    return _registers(instruction.operands[0])


def _kind(value) -> int:
    if not isinstance(value, np.ndarray):
        return value
    in_warpgroups = value.reshape(-1, WARPGROUP)
    if (in_warpgroups == in_warpgroups[:, :1]).all():
        return SAME
    in_warps = value.reshape(-1, WARPGROUP // LANES, LANES)
    return LANE if (in_warps == in_warps[:, :1]).all() else ANY


def _is_equal(a, b) -> bool:
    return type(a) is type(b) and np.array_equal(a, b)


def _value(instruction: ptx_interpreter.Instruction, registers: dict):
    """The value that an instruction computes from these."""
    opcode, operands = instruction.opcode, instruction.operands[1:]
    if opcode[0] in OF_A_WARP:
        return ANY
    given = [_operand(operand, registers) for operand in operands]
    kind = max((_kind(value) for value in given), default=SAME)
    if opcode[0] in ("vote", "redux"):
        return SAME if kind <= LANE else ANY
    if opcode[0] == "shfl":
        return _shuffled(opcode[2], *given[:2])
    if kind > SAME and all(isinstance(value, np.ndarray) for value in given):
        if opcode[0] == "setp" and len(given) == 2:
            return ptx_interpreter.COMPARISONS[opcode[1]](*given)
        if opcode[0] in FUNCTIONS and "hi" not in opcode:
            return FUNCTIONS[opcode[0]](*given)
    return kind


def _operand(operand: str, registers: dict):
    if operand == "%tid.x":
        return THREADS
    if operand == "%laneid":
        return THREADS % LANES
    if re.fullmatch(r"-?\d+|0x[0-9a-fA-F]+", operand):
        return np.full_like(THREADS, int(operand, 0))
    return max((registers[name] for name in _registers(operand)), key=_kind, default=SAME)


def _shuffled(way: str, value, lane):
    """What `shfl` returns. Args: lane: the lane that is read, or the distance to it."""
    if way == "idx" and isinstance(value, np.ndarray) and isinstance(lane, np.ndarray):
        return value[THREADS // LANES * LANES + lane % LANES]
    if way == "idx" and _kind(value) <= LANE and _kind(lane) == SAME:
        return SAME
    return max(_kind(value), _kind(lane))

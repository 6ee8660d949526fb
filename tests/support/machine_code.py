"""Compile a kernel without a GPU and read its machine code, once for all runs of the tests (kept_kernels.py)."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import os
import re
import shlex
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import divergence
import kept_kernels


class MachineCode(NamedTuple):
    """What tests check in a compiled kernel.

    Attributes:
        opcodes: how often each SASS instruction occurs, full name with its dots.
        spills_in_gemms: loads and stores of local memory between the mma of a basic block.
        registers: 1 + the highest register that any instruction names.
        serialized: the assembler's reason for draining each wgmma by itself, or "" if it overlaps them.
        dynamic_smem: bytes of shared memory of each launch.
        order: the kernel's GEMMs, waits for them, exponentials and transfers of a warp's tiles, as they stand in the
            program: "mma 12, wait 1, ex2 32, wait 0, ..." (see NAMES).
        parted: the instructions of warpgroups that some of their warps may execute without the others (divergence.py).
        digest: of the instructions and nothing else; names of modules and functions do not count.
    """

    opcodes: Counter
    spills_in_gemms: int
    registers: int
    serialized: str
    dynamic_smem: list[int]
    order: str
    parted: list[str]
    digest: str

    def count(self, pattern: str) -> int:
        return sum(n for opcode, n in self.opcodes.items() if re.match(pattern, opcode))

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.count("LDL|STL")


# What `MachineCode.order` calls instructions. "wait n": until at most n groups of wgmma run.
NAMES = {
    r"[HQ]?G?MMA": "mma",
    r"WARPGROUP\.DEPBAR": "wait",
    r"MUFU\.EX2": "ex2",
    "STSM": "stsm",
    "LDSM": "ldsm",
    "LDGSTS": "cp.async",
}


def read(arch: str, trace: Callable[[], tuple]) -> MachineCode:
    return read_with_ptx(arch, trace)[0]


def read_with_ptx(arch: str, trace: Callable[[], tuple]) -> tuple[MachineCode, str]:
    """What `compile_and_read` returns for a kernel that nothing but its arguments determines.

    Args: trace: a function of a module, a functools.partial of one, or a method of a dataclass.
    """
    fields, ptx = kept_kernels.get(arch, trace, lambda: compile_and_read(arch, trace))
    code = MachineCode(*fields)
    assert code.parted == [], "not all warps of a warpgroup are sure to execute these together"
    return code._replace(opcodes=Counter(code.opcodes)), ptx


def compile_and_read(arch: str, trace: Callable[[], tuple]) -> tuple[MachineCode, str]:
    """Compile a kernel now and read its machine code and its PTX."""
    from onepass.kernels.compiler import compile

    with tempfile.TemporaryDirectory() as directory:
        with _captured() as output:
            compiled = compile.compile_now(
                arch,
                trace,
                f"{compile.OPTIONS} --keep-ptx --keep-cubin --dump-dir={shlex.quote(directory)} remarks{{ptx}}",
            )
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(compiled.__cubin__)
        sass = subprocess.run([disassembler(), "-c", str(cubin)], capture_output=True, text=True, check=True).stdout
    blocks = [
        re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", block)
        for block in re.split(r"^\.L_\w+:", sass, flags=re.MULTILINE)
    ]
    opcodes = Counter(opcode for block in blocks for opcode in block)
    spills_in_gemms = 0
    for block in blocks:
        mma = [i for i, opcode in enumerate(block) if re.match("[HIQ]G?MMA", opcode)]
        if mma:
            spills_in_gemms += sum(opcode.startswith(("LDL", "STL")) for opcode in block[mma[0] : mma[-1]])
    registers = 1 + max(int(n) for n in re.findall(r"\bR(\d+)\b", sass))
    reason = re.search(r"wgmma\.mma_async instructions are serialized due to (.*?) in", " ".join(output[0].split()))
    smem = _dynamic_smem(str(compiled.ir_module))
    order = _order(sass)
    sections = sorted(_sections(compiled.__cubin__, b".text"))
    assert sections
    digest = hashlib.sha256(b"".join(sections)).hexdigest()[:16]
    parted = divergence.parted(compiled.__ptx__)
    code = MachineCode(opcodes, spills_in_gemms, registers, reason[1] if reason else "", smem, order, parted, digest)
    return code, compiled.__ptx__


def _order(sass: str) -> str:
    """See `MachineCode.order`: runs of the same instruction are counted."""
    names = []
    for opcode, operands in re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", sass):
        name = next((name for pattern, name in NAMES.items() if re.match(pattern + r"\b", opcode)), None)
        if name == "wait":
            name = f"wait {int(re.findall(r'0x[0-9a-f]+', operands)[0], 16)}"
        if name is not None:
            names.append(name)
    runs = [(name, len(list(run))) for name, run in itertools.groupby(names)]
    return ", ".join(name if name.startswith("wait") else f"{name} {count}" for name, count in runs)


def _sections(elf: bytes, prefix: bytes) -> Iterator[bytes]:
    """The contents of the sections of a 64-bit ELF file whose names begin like this."""
    (table,) = struct.unpack_from("<Q", elf, 40)
    entry_bytes, count, names = struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * entry_bytes) for i in range(count)]
    for name, _, _, _, offset, size in headers:
        if elf[headers[names][4] + name :].startswith(prefix):
            yield elf[offset : offset + size]


def _dynamic_smem(host_code: str) -> list[int]:
    """Bytes in the launch configurations (field 2 of cudaLaunchConfig_t) that the host's code fills in."""
    found = []
    config = r"!llvm\.struct<\(array<3 x i32>, array<3 x i32>, i64"
    for function in host_code.split("llvm.func @"):  # names of values are per function
        constants = dict(re.findall(r"(%\d+) = llvm\.mlir\.constant\((\d+) : i64\)", function))
        fields = rf"(%\d+) = llvm\.getelementptr %\S+\[0, 2\] : \(!llvm\.ptr\) -> !llvm\.ptr, {config}"
        for field in re.findall(fields, function):
            stored = re.findall(rf"llvm\.store (%\d+), {field} : i64", function)
            found += [int(constants[value]) for value in stored if value in constants]
    return found


@functools.lru_cache(maxsize=1)
def disassembler() -> str | None:
    """Path of nvdisasm from the nvidia-cuda-nvdisasm package, which is as new as the compiler; None without it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        for file in importlib.metadata.distribution("nvidia-cuda-nvdisasm").files or []:
            if file.name == "nvdisasm":
                return str(file.locate())
    return None


@contextlib.contextmanager
def _captured() -> Iterator[list[str]]:
    """What the compiler prints, through Python and past it: a list that holds one string after the block."""
    text: list[str] = []
    with tempfile.TemporaryFile() as file, open(os.dup(file.fileno()), "w") as stream:
        sys.stdout.flush()
        sys.stderr.flush()
        saved = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            # under pytest sys.stdout is not file 1: what is written to file 1 would be missed
            with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
                yield text
        finally:
            stream.flush()
            for number, copy in enumerate(saved, 1):
                os.dup2(copy, number)
                os.close(copy)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))

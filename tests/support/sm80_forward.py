"""The Ampere forward, compiled once for all tests of a process: its PTX, and a check of its machine code."""

import functools
from typing import NamedTuple

import machine_code
import ptx_interpreter
import torch

from onepass.kernels.config import ForwardConfigSm80, head_dim_tile
from onepass.kernels.launch import forward_sm80 as launch
from onepass.problem import AttentionProblem


class Compiled(NamedTuple):
    code: machine_code.MachineCode
    ptx: str

    @property
    def program(self) -> ptx_interpreter.Program:
        return _parsed(self.ptx)


_parsed = functools.lru_cache(maxsize=64)(ptx_interpreter.parse)
_compiled: dict[tuple, Compiled] = {}


def compiled(problem: AttentionProblem, config: ForwardConfigSm80, arch: str) -> Compiled:
    """The PTX of the kernel for the static part of a problem."""
    key = (problem.static(), config, arch)
    if key not in _compiled:
        code, ptx = machine_code.read_with_ptx(arch, functools.partial(launch.trace, problem, config, arch))
        check_machine_code(code, problem, config)
        _compiled[key] = Compiled(code, ptx)
    return _compiled[key]


def check_machine_code(code: machine_code.MachineCode, problem: AttentionProblem, config: ForwardConfigSm80):
    """Check the instructions that the module docstrings of the kernel promise."""
    d, dv = head_dim_tile(problem.head_dim), head_dim_tile(problem.head_dim_v)
    columns_v = problem.head_dim_v
    is_float32, vector = problem.dtype == torch.float32, config.vector_bytes
    # the main loop's: for masked blocks, clear ones, and masked ones again
    bodies = 2 if problem.mask.window_left is None and not problem.has_intervals else 3
    assert code.spills_in_gemms == 0 or problem.has_modifiers
    if is_float32:
        # for the widest heads the assembler keeps addresses in local memory
        assert code.spills < (1 if max(d, dv) <= 128 else 60)
        # three products; in a loop over column blocks of 32 for Q K^T, over 16 keys for P V
        steps = 32 // 8 * config.tile_n // 8 + 16 // 8 * dv // 8
        assert code.count(r"HMMA\.1688\.F32\.TF32") == bodies * 3 * config.m_tiles * steps
        assert code.count(r"LDS\.128") > 0
    else:
        assert code.spills == 0 or problem.has_modifiers
        steps = d // 16 * config.tile_n // 8 + config.tile_n // 16 * dv // 8
        count = code.count(r"HMMA\.16816\.F32")
        # the assembler leaves out columns that are not stored
        assert count == bodies * config.m_tiles * steps or (count < bodies * config.m_tiles * steps and dv > columns_v)
        assert code.count(r"LDSM\.16\.M88\.4") > 0
        assert code.count(r"LDSM\.16\.MT88\.4") > 0  # V transposed
    copies = {16: r"LDGSTS\.E\.BYPASS.*\.128$", 8: r"LDGSTS.*\.64$", 4: r"LDGSTS\.E(\.LTC\w+)?$", 2: r"STS\.U16$"}
    assert code.count(copies[vector]) == code.count("LDGSTS" if vector > 2 else "LDGSTS|STS") > 0
    stores = {16: r"STG\.E\.128", 8: r"STG\.E\.64" if is_float32 else r"STG\.E$", 4: r"STG\.E$", 2: r"STG\.E\.U16"}
    assert code.count(stores[vector]) > 0
    assert code.dynamic_smem == [config.smem_bytes(problem)]

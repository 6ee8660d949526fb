"""The flags of dropout that go through shared memory: the bits of geometry/philox.py, run on the CPU from their PTX."""

import functools

import machine_code
import numpy as np
import packages
import ptx_interpreter
import pytest
import torch
from shipped import problem

from onepass.geometry import philox

pytestmark = packages.needs_machine_code


@functools.lru_cache(maxsize=2)
def program(kernel) -> ptx_interpreter.Program:
    return ptx_interpreter.parse(machine_code.read_with_ptx("sm_80", kernel.trace)[1])


@pytest.mark.parametrize("dropout_p", [0.3, 0.9, 255 / 256])
@pytest.mark.parametrize("queries", [64, 128])
def test_bits(queries, dropout_p):
    from staged_flags_kernel import ALL_HEADS, BLOCKS, ENTRY, FIRST_HEAD, HEAD, KEYS, WARPS, Draw

    kernel = Draw(problem(64, 64, dropout_p=0.1), queries)
    state = torch.tensor([-(2**62) - 12345678901, 2**35 + 77])
    shape = WARPS * KEYS, BLOCKS * queries
    memory = ptx_interpreter.Memory(1 << 20, 1 << 32)
    given, kept = memory.put(state.numpy()), memory.put(np.zeros(shape, np.int16))
    keep_bytes = np.int32(philox.keep_bytes(dropout_p))
    parameters = [x.tobytes() for x in (np.uint64(given), keep_bytes, np.uint64(kept))]
    ptx_interpreter.run(program(kernel), parameters, memory, 1, 32 * WARPS, 16 << 10)
    found = torch.from_numpy(memory.get(kept, 2 * shape[0] * shape[1]).view(np.int16).reshape(shape).copy())
    instance = torch.tensor(ENTRY * ALL_HEADS + FIRST_HEAD + HEAD)
    pairs = torch.arange(shape[1]), torch.arange(shape[0])[:, None]
    assert torch.equal(found, philox.kept_pairs(state, dropout_p, instance, *pairs).short())
    assert 0 < found.float().mean() < 1

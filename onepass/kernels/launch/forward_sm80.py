"""From tensors to a launch of the Ampere kernels: which kernel, which grid, and what the tensors have to look like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...geometry import tile_scheduler
from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem
from ...problem.outputs import empty_outputs, outputs_without_keys
from ..arguments import ForwardSm80Arguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import ForwardConfigSm80
from ..config.arch import arch_of
from ..heuristics import sm80 as heuristics
from ..heuristics import tuned
from . import modifiers
from .arguments import (
    element_type,
    fake_tensor,
    in_order,
    score_arguments,
    shared_stand_ins,
    traced,
    vector_bytes,
    with_rows,
)

# The architectures for which the tests compile the kernels; SMEM_BYTES_BY_ARCH has more, for which they compile, too.
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MAX_HEAD_DIM = 256


def unsupported(problem: AttentionProblem) -> str | None:
    """Why this backend does not compute the problem; None if it does."""
    if problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype: expected bfloat16, float16 or float32, got {str(problem.dtype).removeprefix('torch.')}"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size > MAX_HEAD_DIM:
            return f"{name}: expected up to {MAX_HEAD_DIM}, got {size}"
    if problem.softcap is None and problem.softmax_scale <= 0:
        return f"softmax_scale: expected a number above 0, got {problem.softmax_scale}"
    return modifiers.unsupported(problem)


def forward(
    problem: AttentionProblem, inputs: AttentionInputs, config: ForwardConfigSm80 | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.forward` gives them.

    Tensors whose last dimension is contiguous are read where they lie, by copies of as many bytes as divide their
    addresses and strides; others are copied first.
    """
    return prepare(problem, inputs.q.device, config)(inputs)


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem, device: torch.device, config: ForwardConfigSm80 | None = None
) -> Callable[[AttentionInputs], tuple[Tensor, Tensor]]:
    """`forward` for calls of one problem on one device; holds no tensor."""
    if problem.is_empty:  # packed rows of no sequence, no keys, or no heads
        return functools.partial(outputs_without_keys, problem)
    arch = arch_of(device)
    if config is None:
        config = tuned.refined(heuristics.forward_config_sm80(problem, arch), "fwd", "sm80", problem, arch, device)
    constants = score_arguments(problem) | grid(problem, config)
    return Launch(problem, config, arch, in_order(ForwardSm80Arguments, constants))


def grid(problem: AttentionProblem, config: ForwardConfigSm80) -> dict[str, int]:
    """The arguments that say the grid: heads_per_section, and num_tiles, a thread block for each."""
    mask = problem.mask
    has_growing_tiles = problem.has_intervals or (mask.window_right is not None and mask.window_left is None)
    # with pack_gqa the heads of a group are one head to the scheduler
    group, positions = config.group(problem), config.positions(problem)
    heads = problem.num_heads_q // group
    count = tile_scheduler.max_packed_tiles if problem.is_packed else tile_scheduler.num_tiles
    tiles = count(problem.seqlen_q, positions, heads, problem.batch)
    row_bytes = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v)
    kv_bytes = problem.seqlen_k * row_bytes // (problem.qhead_per_kvhead // group)
    section = tile_scheduler.heads_per_section(
        heads * problem.batch,
        ceil_div(problem.seqlen_q, positions),
        tiles,
        kv_bytes,
        has_growing_tiles and config.longest_first,
        is_dynamic=True,  # the hardware gives out thread blocks in the order of their numbers, as a queue would
    )
    return {"heads_per_section": section, "num_tiles": tiles}


def compile_request(problem: AttentionProblem, config: ForwardConfigSm80, arch: str) -> CompileRequest:
    """The request for the kernel of this problem."""
    static = replace(problem, deterministic=False).static()  # the forward is, either way
    return CompileRequest("forward_sm80", (static, config), arch, functools.partial(trace, problem, config, arch))


@dataclass(frozen=True)
class Launch:
    """What makes the arguments of one problem's calls. The alignment of the tensors picks the kernel.

    Attributes:
        in_order: `arguments.in_order` with what all calls have in common.
    """

    problem: AttentionProblem
    config: ForwardConfigSm80
    arch: str
    in_order: Callable[..., tuple]

    def __call__(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(self.problem, inputs)
        q, k, v = with_rows(inputs.q), with_rows(inputs.k), with_rows(inputs.v)
        sinks, cu_seqlens_q, cu_seqlens_k, seqused_k = inputs[3:7]
        arguments = self.in_order(
            q,
            k,
            v,
            out,
            lse,
            sinks=None if sinks is None else sinks.float().contiguous(),
            cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
            cu_seqlens_k=None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
            seqused_k=None if seqused_k is None else seqused_k.contiguous(),
            modifiers=None if inputs.modifiers is None else modifiers.arguments_of(self.problem, inputs.modifiers),
        )
        kernel_of(self.problem, self.config, self.arch, vector_bytes(q, k, v, out))(*arguments)
        return out, lse


@functools.lru_cache(maxsize=4096)
def kernel_of(problem: AttentionProblem, config: ForwardConfigSm80, arch: str, vector_bytes: int) -> Callable:
    """The compiled kernel for tensors that copies of so many bytes can read."""
    return compile.get(*compile_request(problem, replace(config, vector_bytes=vector_bytes), arch))


def trace(problem: AttentionProblem, config: ForwardConfigSm80, arch: str) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.sm80.forward.kernel import ForwardSm80

    dtype = element_type(problem.dtype)
    batch = () if problem.is_packed else (None,)
    q, k, v, out = (
        fake_tensor(dtype, *batch, None, None, size, align_bytes=config.vector_bytes)
        for size in (problem.head_dim, problem.head_dim, problem.head_dim_v, problem.head_dim_v)
    )
    arguments = ForwardSm80Arguments(
        q,
        k,
        v,
        out,
        lse=fake_tensor(Float32, *batch, None, None, align_bytes=4),
        sinks=fake_tensor(Float32, None, align_bytes=4) if problem.has_sinks else None,
        modifiers=modifiers.fake_arguments(problem),
        heads_per_section=Int32(1),
        num_tiles=Int32(1),
        **shared_stand_ins(problem),
    )
    return traced(ForwardSm80(problem, config, dtype, arch), arguments)

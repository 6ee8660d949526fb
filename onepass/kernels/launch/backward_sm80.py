"""From tensors to the launches of a backward with the instructions of Ampere: preprocess, main kernel, postprocess."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...geometry import tile_scheduler
from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem
from ..arguments import BackwardSm80Arguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import BackwardConfigSm80
from ..heuristics import sm80 as heuristics
from ..heuristics import tuned
from . import backward as backward_launch
from . import block_lists, modifiers
from . import forward_sm80 as launch
from .arguments import element_type, fake_integers, shared_stand_ins, traced
from .backward import BackwardLaunch, counts, request_of_sinks, requests_of_rows, without_keys


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the kernels do not compute the gradients of this problem; None if they do."""
    return launch.unsupported(problem) or backward_launch.unsupported(problem)


def backward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    config: BackwardConfigSm80 | None = None,
) -> tuple[Any, ...]:
    """dq, dk, dv and dsinks of a call, as `onepass.tiled.backward` gives them; with modifiers as `gradients` does.

    Tensors are read where they lie, or copied first, as in `forward_sm80.forward`.
    """
    return prepare(problem, inputs.q.device, dlse is not None, config)(inputs, out, lse, dout, dlse)


gradients = backward  # the name under which calls with modifiers find it


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem, device: torch.device, has_dlse: bool, config: BackwardConfigSm80 | None = None
) -> Callable[..., tuple[Any, ...]]:
    """`backward` for calls of one problem on one device; holds no tensor."""
    if problem.is_empty:  # packed rows of no sequence, no keys, or no heads
        return without_keys
    arch = launch.arch_of(device)
    if config is None:
        config = tuned.refined(heuristics.backward_config_sm80(problem, arch), "bwd", "sm80", problem, arch, device)
    return functools.partial(_backward_of_any_alignment, problem, has_dlse, config, arch)


def _backward_of_any_alignment(
    problem: AttentionProblem, has_dlse: bool, config: BackwardConfigSm80, arch: str, *call
) -> tuple[Any, ...]:
    """A call whose tensors' alignment picks the kernels; gradients are new and as aligned as their rows are long."""
    inputs, out, _, dout, _ = call
    vector_bytes = launch.vector_bytes(*inputs[:3], out, dout)
    return launch_of(problem, has_dlse, replace(config, vector_bytes=vector_bytes), arch)(*call)


@functools.lru_cache(maxsize=4096)
def launch_of(problem: AttentionProblem, has_dlse: bool, config: BackwardConfigSm80, arch: str) -> Launch:
    """The compiled kernels for tensors that copies of config.vector_bytes can read."""
    config.check(problem, arch)
    kernels = {r.name: compile.get(*r) for r in compile_requests(problem, has_dlse, config, arch)}
    before, main, after = (kernels[f"backward_{name}"] for name in ("preprocess", "sm80", "postprocess"))
    sinks = kernels.get("backward_sinks")
    lists = block_lists.prepared(problem, (config.tile_m, config.tile_n), True, arch)
    blocks_per_head, num_tiles = counts(problem, config)
    section = heads_per_section(problem, config)
    return Launch(problem, config, before, main, after, sinks, lists, blocks_per_head, section, num_tiles)


def compile_requests(
    problem: AttentionProblem,
    has_dlse: bool = False,
    config: BackwardConfigSm80 | None = None,
    arch: str = launch.ARCHS[0],
) -> list[CompileRequest]:
    """The request for each kernel of this problem, in the order in which they run."""
    if config is None:
        config = tuned.refined(heuristics.backward_config_sm80(problem, arch), "bwd", "sm80", problem, arch)
    sinks = request_of_sinks(problem, config, arch)
    problem = replace(problem, has_sinks=False)  # they are in lse
    main = CompileRequest(
        "backward_sm80", (problem.static(), config), arch, functools.partial(trace, problem, config, arch)
    )
    preprocess, postprocess = requests_of_rows(problem, config, arch, has_dlse)
    lists = block_lists.compile_requests(problem, (config.tile_m, config.tile_n), True, arch)
    return [preprocess, *lists, main, postprocess, *sinks]


@dataclass(frozen=True)
class Launch(BackwardLaunch):
    """The kernels of Ampere; see BackwardLaunch."""

    num_tiles: int

    @property
    def num_turns(self) -> int:
        return super().num_turns + 1  # and how many tiles have been drawn

    def readable(self, t: Tensor) -> Tensor:
        return launch.with_rows(t)

    def launch_main(self, rows: dict[str, Any], **arguments: Any) -> None:
        self.main(
            *BackwardSm80Arguments(
                heads_per_section=self.heads_per_section,
                num_tiles=self.num_tiles,
                **arguments,
            )
        )


def heads_per_section(problem: AttentionProblem, config: BackwardConfigSm80) -> int:
    """kv heads that are worked on at a time, see geometry/tile_scheduler.py."""
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    # what a kv head's tiles read and write again and again: Q, dO and the accumulator
    row_bytes = problem.dtype.itemsize * (problem.head_dim + problem.head_dim_v) + 4 * config.head_dims(problem)[0]
    _, num_tiles = counts(problem, config)
    return tile_scheduler.heads_per_section(
        problem.num_heads_kv * problem.batch,
        ceil_div(problem.seqlen_k, config.tile_n),
        num_tiles,
        problem.seqlen_q * problem.qhead_per_kvhead * row_bytes,
        is_growing and config.longest_first and not config.adds_descending(problem),
        is_dynamic=True,  # thread blocks begin in the order of their numbers, as from a queue
    )


def trace(problem: AttentionProblem, config: BackwardConfigSm80, arch: str) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.sm80.backward.kernel import BackwardSm80

    d, dv = problem.head_dim, problem.head_dim_v
    rows = {"q": d, "k": d, "v": dv, "dout": dv}
    dq_accum, stats = backward_launch.fake_accumulator(problem, config)
    arguments = BackwardSm80Arguments(
        **{name: backward_launch.fake_rows(problem, columns, config.vector_bytes) for name, columns in rows.items()},
        **backward_launch.fake_gradients(problem, config.vector_bytes),
        dq_accum=dq_accum,
        stats=stats,
        turns=fake_integers(problem.deterministic),
        softmax_scale=Float32(1.0),
        modifiers=modifiers.fake_arguments(problem, is_backward=True),
        **shared_stand_ins(problem),
        blocks_per_head=Int32(1),
        heads_per_section=Int32(1),
        num_tiles=Int32(1),
    )
    return traced(BackwardSm80(problem, config, element_type(problem.dtype), arch), arguments)

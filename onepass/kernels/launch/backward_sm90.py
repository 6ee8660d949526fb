"""From tensors to the launches of a backward on Hopper: preprocess, main kernel, postprocess."""

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
from ..arguments import BackwardSm90Arguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import PROGRESS_HEADER, BackwardConfigSm90
from ..heuristics import sm90 as heuristics
from ..heuristics import tuned
from . import backward as backward_launch
from . import block_lists, modifiers
from .arguments import element_type, fake_integers, fake_tensor, shared_stand_ins, traced
from .backward import (
    BackwardLaunch,
    counts,
    fake_accumulator,
    fake_gradients,
    fake_lse,
    fake_rows,
    request_of_sinks,
    requests_of_rows,
    without_keys,
)
from .forward_sm90 import ARCH, tile_counter, zero_counters

__all__ = ["Launch", "backward", "compile_requests", "prepare", "unsupported"]


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the kernels do not compute the gradients of this problem; None if they do."""
    if problem.dtype == torch.float32:  # the forward takes float32
        return "dtype: expected bfloat16 or float16, got float32"
    return backward_launch.unsupported(problem)


def backward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    config: BackwardConfigSm90 | None = None,
) -> tuple[Any, ...]:
    """dq, dk, dv and dsinks of a call, as `onepass.tiled.backward` gives them; with modifiers as `gradients` does.

    Tensors that TMA cannot read where they lie (see `forward_sm90.forward`) are copied first.
    """
    return prepare(problem, inputs.q.device, dlse is not None, config)(inputs, out, lse, dout, dlse)


gradients = backward  # the name under which calls with modifiers find it


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem, device: torch.device, has_dlse: bool, config: BackwardConfigSm90 | None = None
) -> Callable[..., tuple[Any, ...]]:
    """`backward` for calls of one problem on one device; holds no tensor."""
    if problem.is_empty:  # packed rows of no sequence, no keys, or no heads
        return without_keys
    config = config or tuned.refined(heuristics.backward_config_sm90(problem), "bwd", "sm90", problem, ARCH, device)
    config.check(problem)
    blocks_per_head, tiles = counts(problem, config)
    shares = problem.num_heads_kv * problem.batch if config.private_dq else tiles
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    num_clusters = min(shares, num_sms * config.blocks_per_sm // config.tile_blocks)
    section = heads_per_section(problem, config, num_clusters)
    kernels = {request.name: compile.get(*request) for request in compile_requests(problem, has_dlse, config)}
    before, after, sinks = (kernels.get(f"backward_{name}") for name in ("preprocess", "postprocess", "sinks"))
    lists = block_lists.prepared(problem, (config.tile_m, config.tile_n), True, ARCH)
    main = kernels["backward"]
    num_ctas = num_clusters * config.tile_blocks
    return Launch(problem, config, before, main, after, sinks, lists, blocks_per_head, section, num_ctas)


def compile_requests(
    problem: AttentionProblem, has_dlse: bool = False, config: BackwardConfigSm90 | None = None, arch: str = ARCH
) -> list[CompileRequest]:
    """The request for each kernel of this problem, in the order in which they run."""
    config = config or tuned.refined(heuristics.backward_config_sm90(problem), "bwd", "sm90", problem, arch)
    sinks = request_of_sinks(problem, config, arch)
    problem = replace(problem, has_sinks=False)  # they are in lse
    key = (problem.static(), config, has_dlse and config.rows_in_background(problem))
    main = CompileRequest("backward", key, arch, functools.partial(trace, problem, config, has_dlse))
    rows = requests_of_rows(problem, config, arch, has_dlse)
    lists = block_lists.compile_requests(problem, (config.tile_m, config.tile_n), True, arch)
    return [*rows[:1], *lists, main, *rows[1:], *sinks]


@dataclass(frozen=True)
class Launch(BackwardLaunch):
    """The kernels of Hopper; see BackwardLaunch."""

    config: BackwardConfigSm90
    num_ctas: int

    @functools.cached_property
    def num_counters(self) -> int:
        """Words of the main kernel's rows.Progress."""
        return PROGRESS_HEADER + 3 * self.problem.batch * self.problem.num_heads_kv + self.num_blocks

    @functools.cached_property
    def num_turns(self) -> int:
        return self.num_blocks * self.config.warps_of_dq(self.problem)

    @functools.cached_property
    def accumulator_blocks(self) -> int:
        if self.config.private_dq:
            return self.num_ctas * self.problem.qhead_per_kvhead * self.blocks_per_head
        return super().accumulator_blocks

    @functools.cached_property
    def tiles_in_ring(self) -> int | None:
        if not self.config.adds_in_rings(self.problem):
            return None
        return tiles_in_ring(self.problem, self.config, self.num_ctas // self.config.tile_blocks)

    def launch_main(self, rows: dict[str, Any], **arguments: Any) -> None:
        device, progress = arguments["q"].get_device(), None
        if self.config.rows_in_background(self.problem):
            progress = zero_counters("backward", device, self.num_counters)
        else:
            rows = {"dq": rows["dq"]} if self.config.private_dq else {}
        self.main(
            *BackwardSm90Arguments(
                **rows,
                progress=progress,
                counter=tile_counter(device) if self.config.dynamic_tiles else None,
                heads_per_section=self.heads_per_section,
                tiles_in_ring=self.tiles_in_ring,
                num_ctas=self.num_ctas,
                **arguments,
            )
        )


# ---------------------------------------------------------------- order of tiles


def heads_per_section(problem: AttentionProblem, config: BackwardConfigSm90, num_ctas: int) -> int:
    """kv heads that are worked on at a time, see geometry/tile_scheduler.py; with ascending_mib the last ones alone.

    Args: num_ctas: thread blocks (or pairs of them) that take tiles.
    """
    heads, tiles_per_head = problem.num_heads_kv * problem.batch, ceil_div(problem.seqlen_k, config.tile_n)
    in_turns = config.adds_in_turns(problem)
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    # two sequences of 8192, causal by ranges: 2490 us at head_dim 64, 2257 to 2290 at 128; head after head 2534, 2340
    is_growing = is_growing or problem.has_key_ranges
    bytes_per_head = config.bytes_per_head(problem)
    if config.has_ascending_end(problem):
        return config.ascending_heads(problem)
    if config.adds_in_rings(problem):
        return min(heads, num_ctas // tiles_in_ring(problem, config, num_ctas))
    if in_turns:
        least = ceil_div(num_ctas, tiles_in_step(problem))
        longest_first = not config.adds_descending(problem)
    else:
        least = least_heads(heads, tiles_per_head, bytes_per_head, num_ctas)
        longest_first = is_growing and config.longest_first and not config.private_dq
    return tile_scheduler.heads_per_section(
        heads, tiles_per_head, num_ctas, bytes_per_head, longest_first, config.dynamic_tiles, least
    )


def tiles_in_ring(problem: AttentionProblem, config: BackwardConfigSm90, num_ctas: int) -> int:
    """The size of the rings of tiles that add to dQ, see BackwardConfigSm90.ring_lag."""
    tiles, blocks = ceil_div(problem.seqlen_k, config.tile_n), ceil_div(problem.seqlen_q, config.tile_m)
    heads = problem.num_heads_kv * problem.batch
    return tile_scheduler.rings(tiles, blocks, heads, num_ctas, config.ring_lag)[0]


def tiles_in_step(problem: AttentionProblem) -> int:
    """Tiles of a head that begin together when dQ is added to in ascending order, and stay a step behind each other.

    The more of them, the fewer heads are worked on at a time, and these share L2: with one at head_dim 64, causal, 2048
    order cost 51 percent more time, with 4 of them 26 (head_dim 256: with two 82, with 4 37). But each loses the steps
    that it is behind (1 percent with 16 and no mask in the model of tests/geometry/test_backward_turns.py). In
    descending order no step is lost, and heads follow each other.
    """
    if problem.mask.is_full:
        return 16
    return 8 if problem.mask.window_left is None and problem.seqlen_k >= 4096 else 4


def least_heads(heads: int, tiles_per_head: int, bytes_per_head: int, num_ctas: int) -> int:
    """kv heads that are worked on at a time, more than fit into L2 where these have fewer tiles than thread blocks.

    Longest first inside of such sections balances nothing: in the model of tests/geometry/test_backward_turns.py two
    waves take 15 to 19 % fewer steps with 4 query heads a kv head, 33 to 37 % with 8 (head_dim 128, causal, 2048 to
    8192 of 16k tokens). A head with a tile for every thread block is balanced alone, even if it does not fit itself:
    two heads of 128 MiB at a time take 45.1 ms where one takes 39.8 (H200, 64 query and 8 kv heads, positions of the
    first of two ranks, 32768 keys).
    """
    if max(1, tile_scheduler.L2_BUDGET_BYTES // bytes_per_head) * tiles_per_head >= num_ctas:
        return 1
    sections = ceil_div(heads, ceil_div(2 * num_ctas, tiles_per_head))
    return ceil_div(heads, sections)


# ---------------------------------------------------------------- tracing


def trace(problem: AttentionProblem, config: BackwardConfigSm90, has_dlse: bool = False) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.sm90.backward.kernel import BackwardSm90

    d, dv = problem.head_dim, problem.head_dim_v
    rows = {"q": d, "k": d, "v": dv, "dout": dv}
    if config.private_dq or config.rows_in_background(problem):
        rows["dq"] = d
    more = {}
    if config.rows_in_background(problem):
        rows["out"] = dv
        more["lse"] = fake_lse(problem)
        more["dlse"] = fake_lse(problem) if has_dlse else None
        more["progress"] = fake_integers()
    dq_accum, stats = fake_accumulator(problem, config)
    arguments = BackwardSm90Arguments(
        **{name: fake_rows(problem, columns) for name, columns in rows.items()},
        **fake_gradients(problem),
        **more,
        dq_accum=dq_accum,
        stats=stats,
        turns=fake_integers(config.adds_in_turns(problem)),
        softmax_scale=Float32(1.0),
        modifiers=modifiers.fake_arguments(problem, is_backward=True),
        **shared_stand_ins(problem),
        counter=fake_tensor(Int32, 1, align_bytes=4) if config.dynamic_tiles else None,
        blocks_per_head=Int32(1),
        heads_per_section=Int32(1),
        tiles_in_ring=Int32(1) if config.adds_in_rings(problem) else None,
        num_ctas=Int32(1),
    )
    return traced(BackwardSm90(problem, config, element_type(problem.dtype)), arguments)

"""The parts of a backward that all architectures share: everything but the main kernel."""

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
from ...problem.outputs import empty_gradients
from ..arguments import ModifierTensors, PostprocessArguments, PreprocessArguments, SinkGradientsArguments
from ..compiler.compile import CompileRequest
from ..config import BackwardConfigSm80, BackwardConfigSm90
from . import modifiers
from .arguments import (
    aligned,
    beyond_grid,
    element_type,
    fake_integers,
    fake_tensor,
    score_arguments,
    shared_stand_ins,
    traced,
)

unsupported = beyond_grid  # preprocess and postprocess have grids of heads and batch entries


def without_keys(
    inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Any, ...]:
    """A backward of a problem in which no query sees a key: lse of a row is its sink, so dsink sums up dlse."""
    dq, dk, dv, dsinks = (gradient.zero_() for gradient in empty_gradients(inputs))
    if inputs.sinks is not None and dlse is not None:
        # exp(sink - lse) is 1, or NaN of a sink that is none; -inf, without a sink: 0
        p = torch.where(lse == -torch.inf, 0.0, torch.exp(inputs.sinks.float()[:, None] - lse))
        dsinks.copy_(torch.where(p == 0, 0.0, p * dlse).transpose(-1, -2).flatten(0, -2).sum(0))
    if inputs.modifiers is None:
        return dq, dk, dv, dsinks
    terms = (inputs.modifiers.alibi_slopes, inputs.modifiers.bias)
    return dq, dk, dv, dsinks, *(None if t is None else torch.zeros_like(t) for t in terms)


def counts(problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80) -> tuple[int, int]:
    """Blocks of query rows of a head, and tiles of keys; of packed sequences bounds, for all of them together."""
    if problem.is_packed:
        tiles = tile_scheduler.max_packed_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
        return problem.seqlen_q // config.tile_m + problem.batch, tiles
    tiles = tile_scheduler.num_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
    return ceil_div(problem.seqlen_q, config.tile_m), tiles


@dataclass(frozen=True)
class BackwardLaunch:
    """The kernels of one problem, and the arguments that all its calls have in common.

    A subclass launches the main kernel.
    """

    problem: AttentionProblem
    config: BackwardConfigSm90 | BackwardConfigSm80
    preprocess: Callable | None  # None, like postprocess, if the main kernel does what they do
    main: Callable
    postprocess: Callable | None
    sink_gradients: Callable | None  # with sinks
    block_lists: Callable[..., ModifierTensors] | None
    blocks_per_head: int
    heads_per_section: int

    def launch_main(self, rows: dict[str, Any], **arguments: Any) -> None:
        """Launch the main kernel.

        Args:
            rows: dq, out, lse and dlse; a main kernel gets those that no other kernel writes or reads.
            arguments: the kernel's arguments that all architectures have in common, by name.
        """
        raise NotImplementedError

    def readable(self, t: Tensor) -> Tensor:
        """t itself where the kernels can read it, else a copy."""
        return aligned(t)

    @functools.cached_property
    def num_blocks(self) -> int:
        """Blocks of query rows, of all heads."""
        entries = 1 if self.problem.is_packed else self.problem.batch
        return entries * self.problem.num_heads_q * self.blocks_per_head

    @functools.cached_property
    def accumulator_blocks(self) -> int:
        """Blocks that dQ is summed in."""
        return self.num_blocks

    @functools.cached_property
    def num_turns(self) -> int:
        """Counters of a deterministic problem."""
        return self.num_blocks * self.config.consumer_warps

    @functools.cached_property
    def may_skip_blocks(self) -> bool:
        """Whether a block of queries may see no key, and so be visited by no tile."""
        mask, shift = self.problem.mask, self.problem.seqlen_k - self.problem.seqlen_q
        is_ahead = mask.window_right is not None and shift + mask.window_right < 0
        is_behind = mask.window_left is not None and mask.window_left < 0
        return self.problem.has_seqused_k or is_ahead or is_behind

    @functools.cached_property
    def shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of the accumulator of dQ and of the statistics, see `dq_sums.Accumulator`."""
        tile_m, head_dim = self.config.tile_m, self.config.head_dims(self.problem)[0]
        return (self.accumulator_blocks, tile_m * head_dim), (self.num_blocks, 2 * tile_m)

    @functools.cached_property
    def numbers(self) -> dict[str, Any]:
        """The arguments of the main kernel that are numbers, and of the postprocess for rows that it computes again."""
        return score_arguments(self.problem)

    def __call__(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        problem, config = self.problem, self.config
        dq, dk, dv, dsinks = empty_gradients(inputs, problem.dkv_dtype)
        cu_seqlens_q, cu_seqlens_k, seqused_k = (
            None if t is None else t.contiguous() for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k)
        )
        dq_accum, stats = (out.new_empty(shape, dtype=torch.float32) for shape in self.shapes)
        turns = None
        if config.adds_in_turns(problem):
            turns = out.new_empty((self.num_turns,), dtype=torch.int32)
            if not config.rows_in_background(problem):
                turns.zero_()
        if config.private_dq and self.may_skip_blocks:
            dq.zero_()
        if problem.is_packed:
            # rows of no sequence; and in stats blocks of no rows
            dq.zero_()
            if inputs.sinks is not None:
                stats[:, : config.tile_m].fill_(-torch.inf)
                stats[:, config.tile_m :].zero_()
        dout, lse = self.readable(dout), lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        out = self.readable(out)
        if self.preprocess is not None:
            self.preprocess(
                *PreprocessArguments(
                    out,
                    dout,
                    lse,
                    dlse=dlse,
                    stats=stats,
                    dq_accum=dq_accum if config.zeroes_before(problem) else None,
                    cu_seqlens_q=cu_seqlens_q,
                    blocks_per_head=self.blocks_per_head,
                )
            )
        # what the main kernel reads, and the postprocess for rows that it computes again
        sources: dict[str, Any] = {
            "q": self.readable(inputs.q),
            "k": self.readable(inputs.k),
            "v": self.readable(inputs.v),
            "dout": dout,
            "stats": stats,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            **self.numbers,
        }
        terms = None
        if problem.has_modifiers:
            assert inputs.modifiers is not None
            terms = modifiers.gradients_of_terms(problem, config, inputs)
            given = modifiers.arguments_of(problem, inputs.modifiers, inputs.blocks)
            assert given is not None
            if self.block_lists is not None:
                given = self.block_lists(given, inputs)
            sources["modifiers"] = modifiers.backward_arguments(problem, given, terms)
        shared: dict[str, Any] = {
            "dq_accum": dq_accum,
            "cu_seqlens_q": cu_seqlens_q,
            "softmax_scale": problem.softmax_scale,
            "blocks_per_head": self.blocks_per_head,
        }
        rows: dict[str, Any] = {"dq": dq, "out": out, "lse": lse, "dlse": dlse}
        self.launch_main(rows, dk=dk, dv=dv, turns=turns, **shared, **sources)
        if self.postprocess is not None:  # else the main kernel has written dq
            recomputed = sources if problem.hides_pairs else {}
            if (given := recomputed.get("modifiers")) is not None:  # one kernel whether or not tiles took turns
                recomputed = recomputed | {"modifiers": given._replace(turns=None)}
            self.postprocess(*PostprocessArguments(dq=dq, **shared, **recomputed))
        if self.sink_gradients is not None and inputs.sinks is not None:
            sinks = inputs.sinks.float().contiguous()
            found = dsinks if dsinks.dtype == torch.float32 else torch.empty_like(sinks)
            self.sink_gradients(*SinkGradientsArguments(stats, sinks, found, self.blocks_per_head))
            dsinks = found.to(dsinks.dtype)
        gradients = dq, dk, dv, dsinks
        return gradients if terms is None else (*gradients, *modifiers.finished(problem, inputs, terms))


# ---------------------------------------------------------------- tracing


def fake_rows(problem: AttentionProblem, columns: int, align_bytes: int = 16, dtype: torch.dtype | None = None):
    batch = () if problem.is_packed else (None,)
    return fake_tensor(element_type(dtype or problem.dtype), *batch, None, None, columns, align_bytes=align_bytes)


def fake_gradients(problem: AttentionProblem, align_bytes: int = 16) -> dict[str, Any]:
    """Stand-ins for dk and dv. Args: align_bytes: what divides rows of k and v."""
    align_bytes = min(16, align_bytes * (problem.dkv_dtype or problem.dtype).itemsize // problem.dtype.itemsize)
    columns = {"dk": problem.head_dim, "dv": problem.head_dim_v}
    return {name: fake_rows(problem, n, align_bytes, problem.dkv_dtype) for name, n in columns.items()}


def fake_lse(problem: AttentionProblem):
    from cutlass import Float32

    return fake_tensor(Float32, *([None, None] if problem.is_packed else [None] * 3), align_bytes=4)


def fake_accumulator(problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80) -> tuple:
    from cutlass import Float32

    head_dim = config.head_dims(problem)[0]
    return tuple(
        fake_tensor(Float32, None, columns, align_bytes=16) for columns in (config.tile_m * head_dim, 2 * config.tile_m)
    )


def requests_of_rows(
    problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80, arch: str, has_dlse: bool
) -> list[CompileRequest]:
    """The requests for preprocess and postprocess, as far as the main kernel does not do what they do.

    Args: problem: without sinks.
    """
    if config.rows_in_background(problem):
        return []
    key = (
        problem.dtype,
        problem.is_packed,
        config.tile_m,
        config.head_dims(problem),
        config.dq_columns(problem),
        config.vector_adds,
        config.private_dq,
        config.vector_bytes,
        problem.head_dim,
        problem.head_dim_v,
    )
    trace = functools.partial(trace_preprocess, problem, config, has_dlse)
    requests = [CompileRequest("backward_preprocess", (*key, has_dlse), arch, trace)]
    if not config.private_dq:
        # with a mask also what it computes rows again from
        again = replace(problem, deterministic=False).static() if problem.hides_pairs else None
        trace = functools.partial(trace_postprocess, problem, config)
        requests.append(CompileRequest("backward_postprocess", (*key, again), arch, trace))
    return requests


def request_of_sinks(
    problem: AttentionProblem, config: BackwardConfigSm80 | BackwardConfigSm90, arch: str
) -> list[CompileRequest]:
    """The request for the gradients of sinks, if there are any."""
    if not problem.has_sinks:
        return []
    trace = functools.partial(trace_sink_gradients, problem, config)
    return [CompileRequest("backward_sinks", (config.tile_m,), arch, trace)]


def trace_sink_gradients(problem: AttentionProblem, config: BackwardConfigSm80 | BackwardConfigSm90) -> tuple:
    """The kernel and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.memory_bound.sink_gradients import SinkGradients

    _, stats = fake_accumulator(problem, config)
    sinks, dsinks = (fake_tensor(Float32, None, align_bytes=4) for _ in range(2))
    arguments = SinkGradientsArguments(stats, sinks, dsinks, Int32(1))
    return traced(SinkGradients(config.tile_m), arguments)


def trace_preprocess(
    problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80, has_dlse: bool
) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Int32

    from ..device.memory_bound.backward_rows import Preprocess

    out, dout = (fake_rows(problem, problem.head_dim_v, config.vector_bytes) for _ in range(2))
    dq_accum, stats = fake_accumulator(problem, config)
    dlse = fake_lse(problem) if has_dlse else None
    arguments = PreprocessArguments(
        out,
        dout,
        lse=fake_lse(problem),
        dlse=dlse,
        stats=stats,
        dq_accum=dq_accum if config.zeroes_before(problem) else None,
        cu_seqlens_q=fake_integers(problem.is_packed),
        blocks_per_head=Int32(1),
    )
    return traced(Preprocess(problem, config), arguments)


def trace_postprocess(problem: AttentionProblem, config: BackwardConfigSm90 | BackwardConfigSm80) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.memory_bound.backward_rows import Postprocess

    d, dv = problem.head_dim, problem.head_dim_v
    dq_accum, stats = fake_accumulator(problem, config)
    sources: dict[str, Any] = {"cu_seqlens_q": fake_integers(problem.is_packed)}
    if problem.hides_pairs:
        sources = {
            "q": fake_rows(problem, d, config.vector_bytes),
            "k": fake_rows(problem, d, config.vector_bytes),
            "v": fake_rows(problem, dv, config.vector_bytes),
            "dout": fake_rows(problem, dv, config.vector_bytes),
            "stats": stats,
            "modifiers": modifiers.fake_arguments(replace(problem, deterministic=False), is_backward=True),
            **shared_stand_ins(problem),
        }
    arguments = PostprocessArguments(
        dq_accum,
        dq=fake_rows(problem, d, config.vector_bytes),
        softmax_scale=Float32(1.0),
        blocks_per_head=Int32(1),
        **sources,
    )
    return traced(Postprocess(problem, config), arguments)

"""What the launches of a backward have in common on all architectures: all but the main kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...geometry import tile_scheduler
from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem
from ...problem.outputs import empty_gradients
from ..config import BackwardConfig, BackwardConfigSm80
from .arguments import LOG2_E, aligned, element_type, fake_tensor, score_scales, window_bounds

MAX_GRID = 65535  # of CUDA, in the dimensions in which preprocess and postprocess have heads and batch
POSTPROCESS_OF_MASK = 11  # arguments of the postprocess kernel that are None without a mask


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the kernels do not compute the gradients of this problem; None if they do."""
    for name, size in (("num_heads", problem.num_heads_q), ("batch", problem.batch)):
        if size > MAX_GRID:
            return f"{name}: expected up to {MAX_GRID}, got {size}"
    return None


def without_keys(
    inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A backward of a problem in which no query sees a key: lse of a row is its sink, so dsink sums up dlse."""
    dq, dk, dv, dsinks = (gradient.zero_() for gradient in empty_gradients(inputs))
    if inputs.sinks is not None and dlse is not None:
        # exp(sink - lse) is 1, or NaN of a sink that is none; -inf, without a sink: 0
        p = torch.where(lse == -torch.inf, 0.0, torch.exp(inputs.sinks.float()[:, None] - lse))
        dsinks.copy_(torch.where(p == 0, 0.0, p * dlse).transpose(-1, -2).flatten(0, -2).sum(0))
    return dq, dk, dv, dsinks


def counts(problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80) -> tuple[int, int]:
    """Blocks of query rows of a head, and tiles of keys; of packed sequences bounds, for all of them together."""
    if problem.is_packed:
        tiles = tile_scheduler.max_packed_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
        return problem.seqlen_q // config.tile_m + problem.batch, tiles
    tiles = tile_scheduler.num_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
    return ceil_div(problem.seqlen_q, config.tile_m), tiles


@dataclass(frozen=True)
class BackwardLaunch:
    """Kernels, and what every call of one problem passes to them beside the tensors.

    A subclass launches the main one.
    """

    problem: AttentionProblem
    config: BackwardConfig | BackwardConfigSm80
    preprocess: Callable
    main: Callable
    postprocess: Callable | None  # None with private_dq
    blocks_per_head: int
    heads_per_section: int

    def launch_main(self, rows: tuple, gradients: tuple, accumulator: tuple, zeroed: Tensor | None, of_call: tuple):
        """The main kernel.

        Args:
            rows: q, k, v, dout as it can read them.
            gradients: dq, dk, dv.
            accumulator: dq, stats and turns of dq_accumulator.Accumulator.
            zeroed: of it, too.
            of_call: lengths, scales and window, as the kernel takes them.
        """
        raise NotImplementedError

    def readable(self, t: Tensor) -> Tensor:
        """t itself where the kernels can read it, else a copy."""
        return aligned(t)

    @property
    def num_blocks(self) -> int:
        """Blocks of query rows, of all heads."""
        entries = 1 if self.problem.is_packed else self.problem.batch
        return entries * self.problem.num_heads_q * self.blocks_per_head

    @property
    def accumulator_blocks(self) -> int:
        """Blocks that dQ is summed in."""
        return self.num_blocks

    @property
    def num_turns(self) -> int:
        """Counters of a deterministic problem."""
        return self.num_blocks * self.config.consumer_warps

    @property
    def lse_factor(self) -> float:
        """What makes lse subtractable from the scores, see dq_accumulator.Accumulator."""
        return 1.0 / self.problem.softmax_scale if self.problem.softcap is None else LOG2_E

    @property
    def may_skip_blocks(self) -> bool:
        """Whether a block of queries may see no key, and so be visited by no tile."""
        mask, shift = self.problem.mask, self.problem.seqlen_k - self.problem.seqlen_q
        is_ahead = mask.window_right is not None and shift + mask.window_right < 0
        is_behind = mask.window_left is not None and mask.window_left < 0
        return self.problem.has_seqused_k or is_ahead or is_behind

    def __call__(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem, config = self.problem, self.config
        dq, dk, dv, dsinks = empty_gradients(inputs)
        cu_seqlens_q, cu_seqlens_k, seqused_k = (
            None if t is None else t.contiguous() for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k)
        )
        head_dim = config.head_dims(problem)[0]
        dq_accum = out.new_empty((self.accumulator_blocks, config.tile_m * head_dim), dtype=torch.float32)
        stats = out.new_empty((self.num_blocks, 2 * config.tile_m), dtype=torch.float32)
        turns = None
        if config.adds_in_turns(problem):
            turns = out.new_zeros((self.num_turns,), dtype=torch.int32)
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
        zeroed = None
        if config.zeroes_ahead(problem):
            zeroed = out.new_empty((1 + problem.batch * problem.num_heads_q,), dtype=torch.int32)
        to_zero = dq_accum if config.zeroes_before(problem) else None
        self.preprocess(
            self.readable(out),
            dout,
            lse,
            dlse,
            stats,
            to_zero,
            zeroed,
            cu_seqlens_q,
            self.lse_factor,
            self.blocks_per_head,
        )
        rows = (*(self.readable(t) for t in (inputs.q, inputs.k, inputs.v)), dout)
        scales_and_window = *score_scales(problem), *window_bounds(problem)
        of_call = (cu_seqlens_q, cu_seqlens_k, seqused_k, problem.softmax_scale, *scales_and_window)
        self.launch_main(rows, (dq, dk, dv), (dq_accum, stats, turns), zeroed, of_call)
        of_rows = (dq_accum, dq, cu_seqlens_q, problem.softmax_scale, self.blocks_per_head)
        if self.postprocess is None:
            pass  # the main kernel has written dq
        elif problem.mask.is_full:
            self.postprocess(*of_rows, *[None] * POSTPROCESS_OF_MASK)
        else:
            self.postprocess(*of_rows, *rows, stats, cu_seqlens_k, seqused_k, *scales_and_window)
        if inputs.sinks is not None:
            of_heads = stats.view(-1, problem.num_heads_q, self.blocks_per_head, 2, config.tile_m)
            self._fill_dsinks(inputs.sinks, of_heads, dsinks)
        return dq, dk, dv, dsinks

    def _fill_dsinks(self, sinks: Tensor, stats: Tensor, dsinks: Tensor) -> None:
        """A sink is a key of value 0: p = exp(sink - lse), dp = 0, so dsink = -sum over rows of p * delta."""
        minus_lse, minus_delta = stats.unbind(3)
        p = torch.exp(sinks.float()[:, None, None] + minus_lse / self.lse_factor)
        dsinks.copy_((p * minus_delta).sum((0, 2, 3)))


# ---------------------------------------------------------------- tracing


def fake_rows(problem: AttentionProblem, columns: int, align_bytes: int = 16):
    batch = () if problem.is_packed else (None,)
    return fake_tensor(element_type(problem.dtype), *batch, None, None, columns, align_bytes=align_bytes)


def fake_lse(problem: AttentionProblem):
    from cutlass import Float32

    return fake_tensor(Float32, *([None, None] if problem.is_packed else [None] * 3), align_bytes=4)


def fake_accumulator(problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80) -> tuple:
    from cutlass import Float32

    head_dim = config.head_dims(problem)[0]
    return tuple(
        fake_tensor(Float32, None, columns, align_bytes=16) for columns in (config.tile_m * head_dim, 2 * config.tile_m)
    )


def fake_cu_seqlens(problem: AttentionProblem):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if problem.is_packed else None


def fake_seqused_k(problem: AttentionProblem):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if problem.has_seqused_k else None


def fake_scales_and_window(problem: AttentionProblem) -> tuple:
    """Stand-ins for `score_scales` and `window_bounds`."""
    from cutlass import Float32, Int32

    return (
        Float32(1.0),
        None if problem.softcap is None else Float32(1.0),
        None if problem.mask.window_left is None else Int32(0),
        None if problem.mask.window_right is None else Int32(0),
    )


def fake_zeroed(problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if config.zeroes_ahead(problem) else None


def fake_stream():
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def requests_of_rows(
    problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80, arch: str, has_dlse: bool
) -> list[tuple]:
    """The arguments of `compile.get` for preprocess and, unless the main kernel writes dq, postprocess.

    Args: problem: without sinks.
    """
    key = (
        problem.dtype,
        problem.is_packed,
        config.tile_m,
        config.head_dims(problem),
        config.dq_columns(problem),
        config.vector_adds,
        config.zeroes_ahead(problem),
        config.private_dq,
        config.vector_bytes,
        problem.head_dim,
        problem.head_dim_v,
    )
    trace = functools.partial(trace_preprocess, problem, config, has_dlse)
    requests: list[tuple] = [("backward_preprocess", (*key, has_dlse), arch, trace)]
    if not config.private_dq:
        # with a mask also what it computes rows again from
        again = None if problem.mask.is_full else replace(problem, deterministic=False).static()
        trace = functools.partial(trace_postprocess, problem, config)
        requests.append(("backward_postprocess", (*key, again), arch, trace))
    return requests


def trace_preprocess(problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80, has_dlse: bool) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..device.memory_bound.backward_rows import Preprocess

    out, dout = (fake_rows(problem, problem.head_dim_v, config.vector_bytes) for _ in range(2))
    dq_accum, stats = fake_accumulator(problem, config)
    dlse = fake_lse(problem) if has_dlse else None
    arguments = (
        out,
        dout,
        fake_lse(problem),
        dlse,
        stats,
        dq_accum if config.zeroes_before(problem) else None,
        fake_zeroed(problem, config),
        fake_cu_seqlens(problem),
        Float32(1.0),
        Int32(1),
        fake_stream(),
    )
    return Preprocess(problem, config), arguments


def trace_postprocess(problem: AttentionProblem, config: BackwardConfig | BackwardConfigSm80) -> tuple:
    """As `trace_preprocess`."""
    from cutlass import Float32, Int32

    from ..device.memory_bound.backward_rows import Postprocess

    d, dv = problem.head_dim, problem.head_dim_v
    dq_accum, stats = fake_accumulator(problem, config)
    of_mask = [None] * POSTPROCESS_OF_MASK
    if not problem.mask.is_full:
        rows = (fake_rows(problem, columns, config.vector_bytes) for columns in (d, d, dv, dv))
        of_mask = [*rows, stats, fake_cu_seqlens(problem), fake_seqused_k(problem), *fake_scales_and_window(problem)]
    dq = fake_rows(problem, d, config.vector_bytes)
    of_rows = (dq_accum, dq, fake_cu_seqlens(problem), Float32(1.0), Int32(1))
    return Postprocess(problem, config), (*of_rows, *of_mask, fake_stream())

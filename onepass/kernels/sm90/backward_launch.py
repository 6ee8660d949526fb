"""From tensors to the launches of a backward on Hopper: preprocess, main kernel, postprocess."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...outputs import empty_gradients
from ...problem import AttentionInputs, AttentionProblem
from .. import compile, heuristics
from ..arguments import LOG2_E, element_type, fake_tensor, score_scales, window_bounds
from ..blocks import tile_scheduler
from ..blocks.integers import ceil_div
from ..config import BackwardConfig
from .launch import ARCH, tile_counter, tma_ready

MAX_GRID = 65535  # of CUDA, in the dimensions in which preprocess and postprocess have heads and batch
POSTPROCESS_OF_MASK = 11  # arguments of the postprocess kernel that are None without a mask


def unsupported(problem: AttentionProblem) -> str | None:
    """Why the kernels do not compute the gradients of this problem; None if they do."""
    for name, size in (("num_heads", problem.num_heads_q), ("batch", problem.batch)):
        if size > MAX_GRID:
            return f"{name}: expected up to {MAX_GRID}, got {size}"
    return None


def backward(
    problem: AttentionProblem,
    inputs: AttentionInputs,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    config: BackwardConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and dsinks of a call, as `onepass.tiled.backward` gives them.

    Tensors that TMA cannot read where they lie (see `launch.forward`) are copied first.
    """
    return prepare(problem, inputs.q.device, dlse is not None, config)(inputs, out, lse, dout, dlse)


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem, device: torch.device, has_dlse: bool, config: BackwardConfig | None = None
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """`backward` for calls of one problem on one device; holds no tensor."""
    if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):  # packed rows of no sequence, or no keys
        return _without_keys
    config = config or heuristics.backward_config(problem)
    config.check(problem)
    if problem.is_packed:
        blocks_per_head = problem.seqlen_q // config.tile_m + problem.batch
        tiles = tile_scheduler.max_packed_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
    else:
        blocks_per_head = ceil_div(problem.seqlen_q, config.tile_m)
        tiles = tile_scheduler.num_tiles(problem.seqlen_k, config.tile_n, problem.num_heads_kv, problem.batch)
    shares = problem.num_heads_kv * problem.batch if config.private_dq else tiles
    num_ctas = min(shares, torch.cuda.get_device_properties(device).multi_processor_count)
    section = heads_per_section(problem, config, num_ctas)
    preprocess, main, *rest = (compile.get(*request) for request in compile_requests(problem, has_dlse, config))
    postprocess = rest[0] if rest else None
    return Launch(problem, config, preprocess, main, postprocess, blocks_per_head, section, num_ctas)


def compile_requests(
    problem: AttentionProblem, has_dlse: bool = False, config: BackwardConfig | None = None
) -> list[tuple]:
    """The arguments of `compile.get` for each kernel of this problem, in the order in which they run."""
    config = config or heuristics.backward_config(problem)
    problem = replace(problem, has_sinks=False)  # they are in lse
    static = problem.static()
    rows_key = (
        problem.dtype,
        problem.is_packed,
        config.tile_m,
        config.by_gradient,
        config.private_dq,
        config.zeroes_ahead(problem),
        problem.head_dim,
        problem.head_dim_v,
    )
    kernels = [
        (
            "backward_preprocess",
            (*rows_key, has_dlse),
            ARCH,
            functools.partial(trace_preprocess, problem, config, has_dlse),
        ),
        ("backward", (static, config), ARCH, functools.partial(trace, problem, config)),
    ]
    if not config.private_dq:
        # with a mask also what it computes rows again from
        key = *rows_key, None if problem.mask.is_full else replace(problem, deterministic=False).static()
        kernels.append(("backward_postprocess", key, ARCH, functools.partial(trace_postprocess, problem, config)))
    return kernels


def _without_keys(inputs: AttentionInputs, *_) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(gradient.zero_() for gradient in empty_gradients(inputs))


@dataclass(frozen=True)
class Launch:
    """Kernels, and what every call of one problem passes to them beside the tensors."""

    problem: AttentionProblem
    config: BackwardConfig
    preprocess: Callable
    main: Callable
    postprocess: Callable | None  # None with private_dq
    blocks_per_head: int
    heads_per_section: int
    num_ctas: int

    @property
    def lse_factor(self) -> float:
        """What makes lse subtractable from the scores, see dq_accumulator.Accumulator."""
        return 1.0 / self.problem.softmax_scale if self.problem.softcap is None else LOG2_E

    @property
    def may_skip_blocks(self) -> bool:
        """Whether a block of queries may see no key, and so be visited by no tile."""
        mask, shift = self.problem.mask, self.problem.seqlen_k - self.problem.seqlen_q
        is_ahead = mask.window_right is not None and shift + mask.window_right < 0
        return self.problem.has_seqused_k or is_ahead

    def __call__(
        self, inputs: AttentionInputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        problem, config = self.problem, self.config
        dq, dk, dv, dsinks = empty_gradients(inputs)
        cu_seqlens_q, cu_seqlens_k, seqused_k = (
            None if t is None else t.contiguous() for t in (inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.seqused_k)
        )
        entries = 1 if problem.is_packed else problem.batch
        blocks = entries * problem.num_heads_q * self.blocks_per_head
        head_dim = config.head_dims(problem)[0]
        private_blocks = self.num_ctas * problem.qhead_per_kvhead * self.blocks_per_head
        accum_blocks = private_blocks if config.private_dq else blocks
        dq_accum = out.new_empty((accum_blocks, config.tile_m * head_dim), dtype=torch.float32)
        stats = out.new_empty((blocks, 2 * config.tile_m), dtype=torch.float32)
        turns = None
        if config.adds_in_turns(problem):
            turns = out.new_zeros((blocks * config.consumer_warps,), dtype=torch.int32)
        if config.private_dq and self.may_skip_blocks:
            dq.zero_()
        if problem.is_packed:
            # rows of no sequence; and in stats blocks of no rows
            dq.zero_()
            if inputs.sinks is not None:
                stats[:, : config.tile_m].fill_(-torch.inf)
                stats[:, config.tile_m :].zero_()
        dout, lse = tma_ready(dout), lse.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        zeroed = None
        if config.zeroes_ahead(problem):
            zeroed = out.new_empty((1 + problem.batch * problem.num_heads_q,), dtype=torch.int32)
        to_zero = dq_accum if config.zeroes_before(problem) else None
        self.preprocess(
            tma_ready(out), dout, lse, dlse, stats, to_zero, zeroed, cu_seqlens_q, self.lse_factor, self.blocks_per_head
        )
        rows = (*(tma_ready(t) for t in (inputs.q, inputs.k, inputs.v)), dout)
        scales_and_window = *score_scales(problem), *window_bounds(problem)
        self.main(
            *rows,
            dk,
            dv,
            dq if config.private_dq else None,
            dq_accum,
            stats,
            turns,
            zeroed,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            problem.softmax_scale,
            *scales_and_window,
            tile_counter(out.get_device()) if config.dynamic_tiles else None,
            self.blocks_per_head,
            self.heads_per_section,
            self.num_ctas,
        )
        of_rows = (dq_accum, dq, cu_seqlens_q, problem.softmax_scale, self.blocks_per_head)
        if config.private_dq:
            pass  # the main kernel has written dq
        elif problem.mask.is_full:
            self.postprocess(*of_rows, *[None] * POSTPROCESS_OF_MASK)
        else:
            self.postprocess(*of_rows, *rows, stats, cu_seqlens_k, seqused_k, *scales_and_window)
        if inputs.sinks is not None:
            self._fill_dsinks(inputs.sinks, stats.view(entries, problem.num_heads_q, -1, 2, config.tile_m), dsinks)
        return dq, dk, dv, dsinks

    def _fill_dsinks(self, sinks: Tensor, stats: Tensor, dsinks: Tensor) -> None:
        """A sink is a key of value 0: p = exp(sink - lse), dp = 0, so dsink = -sum over rows of p * delta."""
        minus_lse, minus_delta = stats.unbind(3)
        p = torch.exp(sinks.float()[:, None, None] + minus_lse / self.lse_factor)
        dsinks.copy_((p * minus_delta).sum((0, 2, 3)))


# ---------------------------------------------------------------- order of tiles


def heads_per_section(problem: AttentionProblem, config: BackwardConfig, num_ctas: int) -> int:
    """kv heads that are worked on at a time, see blocks/tile_scheduler.py."""
    heads, tiles_per_head = problem.num_heads_kv * problem.batch, ceil_div(problem.seqlen_k, config.tile_n)
    in_turns = config.adds_in_turns(problem)
    is_growing = problem.mask.window_right is not None and problem.mask.window_left is None
    # what a kv head's tiles read and write again and again: Q, dO and the accumulator
    row_bytes = 2 * (problem.head_dim + problem.head_dim_v) + 4 * config.head_dims(problem)[0]
    bytes_per_head = problem.seqlen_q * problem.qhead_per_kvhead * row_bytes
    if in_turns:
        least = ceil_div(num_ctas, tiles_in_step(problem, config.tile_m))
    else:
        least = least_heads(heads, tiles_per_head, bytes_per_head, num_ctas)
    longest_first = in_turns or (is_growing and config.longest_first and not config.private_dq)
    return tile_scheduler.heads_per_section(
        heads, tiles_per_head, num_ctas, bytes_per_head, longest_first, config.dynamic_tiles, least
    )


def tiles_in_step(problem: AttentionProblem, tile_m: int) -> int:
    """Tiles of a head that begin together when sums are in order, and stay a step behind each other.

    The more of them, the fewer heads are worked on at a time, and these share L2. But steps are lost, more where later
    tiles are shorter and where tiles have few steps. In the model of tests/kernels/test_backward_turns.py these numbers
    lose 0 to 7 %; there 4 of them lost 16 % at head_dim 64, causal, 2048, of the 20 % that determinism was measured to
    cost.
    """
    if problem.mask.is_full:
        return 16
    if problem.mask.window_left is not None:
        return 4
    return max(1, min(8, problem.seqlen_k // (16 * tile_m)))


def least_heads(heads: int, tiles_per_head: int, bytes_per_head: int, num_ctas: int) -> int:
    """kv heads that are worked on at a time, more than fit into L2 where these have fewer tiles than thread blocks.

    Longest first inside of such sections balances nothing: in the model of tests/kernels/test_backward_turns.py two
    waves take 15 to 19 % fewer steps with 4 query heads a kv head, 33 to 37 % with 8 (head_dim 128, causal, 2048 to
    8192 of 16k tokens).
    """
    if tile_scheduler.L2_BUDGET_BYTES // bytes_per_head * tiles_per_head >= num_ctas:
        return 1
    sections = ceil_div(heads, ceil_div(2 * num_ctas, tiles_per_head))
    return ceil_div(heads, sections)


# ---------------------------------------------------------------- tracing


def _rows(problem: AttentionProblem, columns: int):
    batch = () if problem.is_packed else (None,)
    return fake_tensor(element_type(problem.dtype), *batch, None, None, columns, align_bytes=16)


def _lse(problem: AttentionProblem):
    from cutlass import Float32

    return fake_tensor(Float32, *([None, None] if problem.is_packed else [None] * 3), align_bytes=4)


def _accumulator(problem: AttentionProblem, config: BackwardConfig) -> tuple:
    from cutlass import Float32

    head_dim = config.head_dims(problem)[0]
    return tuple(
        fake_tensor(Float32, None, columns, align_bytes=16) for columns in (config.tile_m * head_dim, 2 * config.tile_m)
    )


def _cu_seqlens(problem: AttentionProblem):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if problem.is_packed else None


def _seqused_k(problem: AttentionProblem):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if problem.has_seqused_k else None


def _scales_and_window(problem: AttentionProblem) -> tuple:
    """Stand-ins for `score_scales` and `window_bounds`."""
    from cutlass import Float32, Int32

    return (
        Float32(1.0),
        None if problem.softcap is None else Float32(1.0),
        None if problem.mask.window_left is None else Int32(0),
        None if problem.mask.window_right is None else Int32(0),
    )


def _zeroed(problem: AttentionProblem, config: BackwardConfig):
    from cutlass import Int32

    return fake_tensor(Int32, None, align_bytes=4) if config.zeroes_ahead(problem) else None


def _stream():
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream(use_tvm_ffi_env_stream=True)


def trace_preprocess(problem: AttentionProblem, config: BackwardConfig, has_dlse: bool) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float32, Int32

    from ..backward_rows import Preprocess

    out, dout = (_rows(problem, problem.head_dim_v) for _ in range(2))
    dq_accum, stats = _accumulator(problem, config)
    dlse = _lse(problem) if has_dlse else None
    arguments = (
        out,
        dout,
        _lse(problem),
        dlse,
        stats,
        dq_accum if config.zeroes_before(problem) else None,
        _zeroed(problem, config),
        _cu_seqlens(problem),
        Float32(1.0),
        Int32(1),
        _stream(),
    )
    return Preprocess(problem, config), arguments


def trace_postprocess(problem: AttentionProblem, config: BackwardConfig) -> tuple:
    """As `trace_preprocess`."""
    from cutlass import Float32, Int32

    from ..backward_rows import Postprocess

    d, dv = problem.head_dim, problem.head_dim_v
    dq_accum, stats = _accumulator(problem, config)
    of_mask = [None] * POSTPROCESS_OF_MASK
    if not problem.mask.is_full:
        rows = (_rows(problem, columns) for columns in (d, d, dv, dv))
        of_mask = [*rows, stats, _cu_seqlens(problem), _seqused_k(problem), *_scales_and_window(problem)]
    of_rows = (dq_accum, _rows(problem, d), _cu_seqlens(problem), Float32(1.0), Int32(1))
    return Postprocess(problem, config), (*of_rows, *of_mask, _stream())


def trace(problem: AttentionProblem, config: BackwardConfig) -> tuple:
    """As `trace_preprocess`."""
    from cutlass import Float32, Int32

    from .backward import BackwardSm90

    d, dv = problem.head_dim, problem.head_dim_v
    arguments = (
        *(_rows(problem, columns) for columns in (d, d, dv, dv, d, dv)),
        _rows(problem, d) if config.private_dq else None,
        *_accumulator(problem, config),
        fake_tensor(Int32, None, align_bytes=4) if config.adds_in_turns(problem) else None,
        _zeroed(problem, config),
        _cu_seqlens(problem),
        _cu_seqlens(problem),
        _seqused_k(problem),
        Float32(1.0),
        *_scales_and_window(problem),
        fake_tensor(Int32, 1, align_bytes=4) if config.dynamic_tiles else None,
        Int32(1),
        Int32(1),
        Int32(1),
        _stream(),
    )
    return BackwardSm90(problem, config, element_type(problem.dtype)), arguments

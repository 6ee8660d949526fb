"""`attention_decode` on the Hopper forward: for more rows than leave only the memory to wait for.

decode.py has what happens before and after.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...geometry.splits import BY_LENGTH
from ...problem.decode import DecodeInputs, DecodeProblem
from ..arguments import ForwardSm90Arguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import ForwardConfigSm90
from ..heuristics.decode import decode_config_sm90, has_few_rows, most_splits_sm90, num_splits_sm90
from . import decode as decode_launch
from .arguments import (
    aligned,
    descale_arguments,
    in_order,
    is_aligned,
)
from .decode import DecodeLaunch, SplitPlan, page_table_of, query_offsets_of
from .forward_sm90 import ARCH, persistent_grid, tile_counter, trace

LEAST_BOX = 16  # keys of a page that are loaded together
MAX_HEAD_DIM_E4M3 = 128  # of an e4m3 cache: warps that convert it leave too few registers for more


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    return decode_launch.decode(problem, inputs, prepare)


def unsupported(problem: DecodeProblem) -> str | None:
    """Why this kernel does not compute a problem whose attention the Hopper forward does; None if it does."""
    attention = problem.attention
    if attention.has_modifiers:
        return f"{attention.modifiers_named}: expected none"
    if attention.dtype.itemsize != 2:
        return f"expected q in bfloat16 or float16, got {attention.dtype}"
    if attention.has_e4m3_cache:
        for name, size in (("head_dim", attention.head_dim), ("head_dim_v", attention.head_dim_v)):
            if size % 16 or size > MAX_HEAD_DIM_E4M3:
                return f"{name}: expected a multiple of 16 up to {MAX_HEAD_DIM_E4M3} with an e4m3 cache, got {size}"
        if problem.kv_block is not None:
            return f"expected descales of heads, got one for each block of {problem.kv_block} keys"
    if not problem.has_aligned_rows:
        return "expected rows of the caches at multiples of 16 bytes (TMA)"
    if problem.page_size is not None and problem.page_size % LEAST_BOX:
        return f"expected a page size that is a multiple of {LEAST_BOX} keys, got {problem.page_size}"
    return None


def slower(problem: DecodeProblem) -> str | None:
    """Why the Ampere kernels compute it in less time; None if they do not."""
    if has_few_rows(problem.attention, problem.max_seqlen_q):
        return "rows this few take less time on the kernel for few rows"
    return None


@functools.lru_cache(maxsize=4096)
def prepare(problem: DecodeProblem, device: torch.device) -> Callable[[DecodeInputs], tuple[Tensor, Tensor]]:
    """`decode` for calls of one problem on one device, but for values that are to be checked; holds no tensor.

    It also serves problems with the same `DecodeProblem.of_rounded_length`, with the same bits.
    """
    problem = problem.of_rounded_length
    return decode_launch.prepared(problem, lambda: launch_with(problem, config_of(problem, device), device))


def config_of(problem: DecodeProblem, device: torch.device) -> ForwardConfigSm90:
    return decode_config_sm90(problem.attention, problem.split_size)


def launch_with(problem: DecodeProblem, config: ForwardConfigSm90, device: torch.device) -> Launch:
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(problem, config, split_plan(problem, config, num_sms), num_sms)


def compile_requests(
    problem: DecodeProblem, inputs: DecodeInputs, device: torch.device
) -> list[tuple[Any, CompileRequest]]:
    """The configuration and the request of each kernel of a call, see `decode.compile_requests`."""
    return decode_launch.compile_requests(problem, inputs, prepare(problem, device), ARCH)


def split_plan(problem: DecodeProblem, config: ForwardConfigSm90, num_sms: int) -> SplitPlan:
    if problem.attention.is_packed and problem.num_splits is None and problem.split_size is None:
        most = most_splits_sm90(problem.attention, config, num_sms)
        return SplitPlan(most, BY_LENGTH if most > 1 else 0, most > 1)
    return SplitPlan.of(problem, config.tile_n, functools.partial(num_splits_sm90, problem.attention, config, num_sms))


class Launch(DecodeLaunch):
    """The launches of one problem: one kernel, whatever the alignment of the tensors."""

    config: ForwardConfigSm90

    def __init__(self, problem: DecodeProblem, config: ForwardConfigSm90, plan: SplitPlan, num_sms: int):
        super().__init__(problem, config, ARCH, plan)
        attention = problem.attention
        # the order of tiles takes splits for batch entries, or for heads of packed sequences
        names = ("num_heads_q", "num_heads_kv") if attention.is_packed else ("batch",)
        times = {name: getattr(attention, name) * plan.num_splits for name in names}
        grid = persistent_grid(replace(attention, **times), config, num_sms)
        self.in_order = in_order(ForwardSm90Arguments, self.constants | grid)
        self._forward: Callable | None = None

    def attend(self, q: Tensor, inputs: DecodeInputs, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        for name, cache in (("k_cache", inputs.k_cache), ("v_cache", inputs.v_cache)):
            if not is_aligned(cache):
                raise UnsupportedError(
                    f"{name}: backend sm90 expects rows at multiples of 16 bytes, got address {cache.data_ptr():#x} "
                    f"and strides {cache.stride()}; backend='sm80' takes any"
                )
        if self.is_split and self.problem.attention.is_packed:
            # the kernel takes the rows of all splits as one sequence of rows, as they do in `workspace`
            out, lse = out.flatten(0, 2), lse.transpose(0, 2).flatten(1)
        if self._forward is None:
            self._forward = compile.get(*self.forward_request(inputs)[1])
        k_descale, v_descale, _ = descale_arguments(self.problem, inputs)
        self._forward(
            *self.in_order(
                aligned(q),
                inputs.k_cache,
                inputs.v_cache,
                out,
                lse,
                sinks=sinks,
                cu_seqlens_q=query_offsets_of(inputs),
                seqused_k=inputs.cache_seqlens.contiguous(),
                k_scale=k_descale,
                v_scale=v_descale,
                counter=tile_counter(q.get_device()) if self.config.dynamic_tiles else None,
                page_table=page_table_of(inputs),
                added_k=inputs.seqlen_new,
            )
        )

    def forward_request(self, inputs: DecodeInputs) -> tuple[ForwardConfigSm90, CompileRequest]:
        return self.config, compile_request(self.problem, self.config, self.is_split)


def box_rows(problem: DecodeProblem, config: ForwardConfigSm90) -> int | None:
    """Keys of a page that one TMA load brings; None without pages."""
    return None if problem.page_size is None else math.gcd(problem.page_size, config.tile_n)


def compile_request(problem: DecodeProblem, config: ForwardConfigSm90, is_split: bool) -> CompileRequest:
    """The request for the forward kernel of this problem."""
    # sinks join when splits are merged
    attention = replace(problem.attention, has_sinks=problem.attention.has_sinks and not is_split)
    rows = box_rows(problem, config)
    cache = is_split, rows, problem.has_descales
    kind = tuple(zip(("is_split", "box_rows", "has_descales"), cache, strict=True))
    key = attention.static(), config, kind
    return CompileRequest("decode", key, ARCH, functools.partial(trace, attention, config, cache=cache))

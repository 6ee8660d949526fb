"""`attention_decode` on kernels: append and rotate, forward by splits, merge. The host reads no value.

device/memory_bound/append.py  runs only with new keys or rotary positions
a backend's forward            writes out and lse, or with several splits float32 partials to a workspace
device/memory_bound/merge.py   merges them
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import UnsupportedError
from ...geometry.integers import ceil_div
from ...geometry.rotary import rotate
from ...problem import AttentionInputs
from ...problem.decode import DecodeInputs, DecodeProblem
from ...problem.lengths import read_cache_lengths
from ...problem.outputs import empty_outputs, without_keys
from ..arguments import MergeArguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import LaunchConfig
from ..config.arch import arch_of
from .append import append, needs_append, request_of_call
from .arguments import score_arguments, with_rows
from .merge import merge_blocks, merge_request


def decode(problem: DecodeProblem, inputs: DecodeInputs, prepare: Callable) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.decode` gives them. Args: prepare: a backend's."""
    if problem.check_values:
        read_cache_lengths(inputs, problem)
    return prepare(problem, inputs.q.device)(inputs)


class SplitPlan(NamedTuple):
    """Attributes:
    num_splits, split_blocks: see geometry/splits.py.
    is_split: whether there are partials to be merged.
    """

    num_splits: int
    split_blocks: int
    is_split: bool

    @classmethod
    def of(cls, problem: DecodeProblem, block_keys: int, choose: Callable[[], int]) -> SplitPlan:
        """Args: block_keys: keys of a block. choose: the number of splits, if the caller leaves it open.

        Raises: UnsupportedError if splits of split_size keys would begin within a block.
        """
        if problem.split_size is not None:
            if problem.split_size % block_keys:
                expected = f"a multiple of the {block_keys} keys of a step"
                raise UnsupportedError(f"split_size: expected {expected}, got {problem.split_size}")
            # always merged: how many there are must not matter
            return cls(ceil_div(problem.attention.seqlen_k, problem.split_size), problem.split_size // block_keys, True)
        num_splits = problem.num_splits or choose()
        # the merge is what writes out in float32
        return cls(num_splits, 0, num_splits > 1 or problem.attention.float32_out)


class DecodeLaunch(ABC):
    """The launches of one problem: its compiled kernels, and the arguments that all calls have in common, by name."""

    def __init__(self, problem: DecodeProblem, config: LaunchConfig, arch: str, plan: SplitPlan):
        self.problem, self.config, self.arch = problem, config, arch
        self.num_splits, self.is_split = plan.num_splits, plan.is_split
        self.constants = score_arguments(problem.attention)
        if plan.is_split:
            self.constants |= {"num_splits": plan.num_splits, "split_blocks": plan.split_blocks}
        self._merge: Callable | None = None

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(self.problem.attention, AttentionInputs(*inputs[:3]))
        if self.problem.has_rotary_positions:
            inputs = rotated(self.problem, inputs)
        q = append(self.problem, inputs, self.arch) if needs_append(inputs) else inputs.q
        sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
        if not self.is_split:
            self.attend(q, inputs, out, lse, sinks)
            return out, lse
        partials = self.workspace(q)
        self.attend(q, inputs, *partials, None)
        if self._merge is None:
            self._merge = compile.get(*self.merge_request())
        merged = (out[None], lse[None]) if self.problem.attention.is_packed else (out, lse)
        offsets = None if sinks is None else query_offsets_of(inputs)
        blocks = merge_blocks(merged[0], self.num_splits)
        self._merge(*MergeArguments(*partials, *merged, sinks=sinks, cu_seqlens_q=offsets, num_blocks=blocks))
        return out, lse

    def repeated(self, inputs: DecodeInputs) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """q, k_cache, v_cache -> (out, lse), for calls with all other tensors of `inputs`, one after the other.

        These three have sizes, strides and an alignment like those of `inputs`, and the stream is the current one. lse
        and the workspace may be those of the call before.
        """
        return lambda q, k_cache, v_cache: self(inputs._replace(q=q, k_cache=k_cache, v_cache=v_cache))

    @abstractmethod
    def attend(self, q: Tensor, inputs: DecodeInputs, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        """The forward. Args: q: instead of inputs.q. out, lse: of the call, or partials. sinks: not with partials."""

    @abstractmethod
    def forward_request(self, inputs: DecodeInputs) -> tuple[LaunchConfig, CompileRequest]:
        """Its configuration for these tensors and its kernel's request."""

    def merge_request(self) -> CompileRequest:
        """The request for the merge of the splits."""
        return merge_request(self.problem.attention, self.config, self.num_splits, self.arch)

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """float32 out (splits, batch, seqlen_q, num_heads_q, head_dim_v) and lse (splits, batch, num_heads_q, seqlen_q)
        of every split. Packed queries are a batch of one, in which the rows of all splits follow each other."""
        p, n = self.problem.attention, self.num_splits
        b, m, h, dv, dtype = 1 if p.is_packed else p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v, torch.float32
        out = q.new_empty_strided((n, b, m, h, dv), (b * m * h * dv, m * h * dv, h * dv, dv, 1), dtype=dtype)
        lse_strides = (m, n * h * m, n * m, 1) if p.is_packed else (b * h * m, h * m, m, 1)
        return out, q.new_empty_strided((n, b, h, m), lse_strides, dtype=dtype)


def rotated(problem: DecodeProblem, inputs: DecodeInputs) -> DecodeInputs:
    """The inputs of a call with rotary positions, rotated in PyTorch, so that nothing is left to be rotated."""
    positions, cos, sin = inputs.rotary_positions, inputs.rotary_cos, inputs.rotary_sin
    if cos is None or sin is None or positions is None:
        return inputs._replace(rotary_positions=None)
    ends = inputs.cache_seqlens.long()[:, None]
    turned: dict[str, Any] = {}
    for name, given, first in (("q", positions.q, inputs.seqlen_new - inputs.q.shape[1]), ("k_new", positions.k, 0)):
        x: Tensor | None = getattr(inputs, name)
        if x is not None:
            rows = ends + torch.arange(first, first + x.shape[1], device=x.device)
            rows = rows if given is None else given.long().expand_as(rows)
            turned[name] = rotate(x, rows, cos, sin, problem.rotary_interleaved)
    return inputs._replace(**turned, rotary_cos=None, rotary_sin=None, rotary_positions=None)


def page_table_of(inputs: DecodeInputs) -> Tensor | None:
    """The page table with contiguous rows, as kernels read it; None without pages."""
    return None if inputs.page_table is None else with_rows(inputs.page_table)


def query_offsets_of(inputs: DecodeInputs) -> Tensor | None:
    """cu_seqlens_q, contiguous, as kernels read it; None unless queries are packed."""
    return None if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q.contiguous()


def prepared(
    problem: DecodeProblem, make: Callable[[], DecodeLaunch]
) -> Callable[[DecodeInputs], tuple[Tensor, Tensor]]:
    """A launch, if there are rows and keys."""
    if problem.attention.is_empty:
        return functools.partial(_without_keys, problem)
    return make()


def _without_keys(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    if problem.has_rotary_positions:
        inputs = rotated(problem, inputs)
    if needs_append(inputs):
        append(problem, inputs, arch_of(inputs.q.device))
    out, lse = empty_outputs(problem.attention, AttentionInputs(*inputs[:3]))
    return without_keys(out, lse, inputs.sinks, inputs.cu_seqlens_q)


def compile_requests(
    problem: DecodeProblem, inputs: DecodeInputs, launch: Callable, arch: str
) -> list[tuple[LaunchConfig | None, CompileRequest]]:
    """The configuration and the request of each kernel of a call, in the order in which they run.

    Tensors on the "meta" device count as aligned. Args: launch: what a backend has prepared for the call.
    """
    requests: list[tuple[LaunchConfig | None, CompileRequest]] = []
    if problem.has_rotary_positions:
        inputs = inputs._replace(rotary_cos=None, rotary_sin=None)  # rotated before
    if needs_append(inputs):
        requests.append((None, request_of_call(problem, inputs, arch)))
    if isinstance(launch, DecodeLaunch):
        requests.append(launch.forward_request(inputs))
        if launch.is_split:
            requests.append((None, launch.merge_request()))
    return requests

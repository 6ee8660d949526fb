"""`attention_decode` on the Ampere kernels: append and rotate, forward by splits, merge. The host reads no value.

append.py                 only with new keys or rotary positions
decode.py or forward.py   few rows or more; of one split writes out and lse, of more float32 partials to a workspace
combine.py                merges them
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...decode_problem import DecodeInputs, DecodeProblem
from ...decode_validation import read_cache_lengths
from ...outputs import empty_outputs
from ...problem import AttentionInputs, AttentionProblem
from .. import compile
from ..arguments import element_type, fake_tensor, score_scales, strided_tensor, window_bounds
from ..blocks.integers import ceil_div
from ..config import ForwardConfigSm80
from ..config_decode import DecodeConfigSm80
from ..heuristics_decode import decode_config_sm80, num_splits_sm80
from .append_launch import append, needs_append, request_of_call
from .cache_launch import KEYS_OF_A_DESCALE, as_pairs, descale_arguments
from .launch import arch_of, grid, vector_bytes, with_rows
from .merge_launch import merge_blocks, merge_request


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.decode` gives them."""
    if problem.check_values:
        read_cache_lengths(inputs)
    return prepare(problem, inputs.q.device)(inputs)


def unsupported(problem: DecodeProblem) -> str | None:
    """Why these kernels do not compute a problem whose attention they do; None if they do."""
    attention = problem.attention
    if not attention.has_e4m3_cache:
        return None
    if attention.dtype.itemsize != 2:
        return f"expected q in bfloat16 or float16 with an e4m3 cache, got {attention.dtype}"
    if attention.head_dim % 2 or attention.head_dim_v % 2:
        return f"expected even head dims of an e4m3 cache, got {attention.head_dim} and {attention.head_dim_v}"
    if problem.kv_block is not None and problem.kv_block % KEYS_OF_A_DESCALE:
        return f"expected a kv_block that is a multiple of {KEYS_OF_A_DESCALE} keys, got {problem.kv_block}"
    return None


@functools.lru_cache(maxsize=4096)
def prepare(problem: DecodeProblem, device: torch.device) -> Callable[[DecodeInputs], tuple[Tensor, Tensor]]:
    """`decode` for calls of one problem on one device, but for values that are to be checked; holds no tensor."""
    attention = problem.attention
    if 0 in (attention.batch, attention.seqlen_q, attention.seqlen_k):
        return functools.partial(_without_keys, problem)
    arch = arch_of(device)
    config = decode_config_sm80(attention, arch)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(problem, config, arch, *splits_of(problem, config, arch, num_sms))


def compile_requests(
    problem: DecodeProblem, inputs: DecodeInputs, device: torch.device
) -> list[tuple[ForwardConfigSm80 | None, tuple]]:
    """The kernels of a call, in the order in which they run, each with its configuration, as the arguments of
    `compile.get`. Tensors on the "meta" device count as aligned."""
    arch = arch_of(device)
    requests: list[tuple[ForwardConfigSm80 | None, tuple]] = []
    if needs_append(inputs):
        requests.append((None, request_of_call(problem, inputs, arch)))
    launch = prepare(problem, device)
    if isinstance(launch, Launch):
        qkv = with_rows(inputs.q), as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)
        config = replace(launch.config, vector_bytes=vector_bytes(*qkv))
        requests.append((config, compile_request(problem, config, arch, launch.is_split)))
        if launch.is_split:
            requests.append((None, launch.merge_request()))
    return requests


def _without_keys(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    if needs_append(inputs):
        append(problem, inputs, arch_of(inputs.q.device))
    out, lse = empty_outputs(problem.attention, AttentionInputs(*inputs[:3]))
    return out.zero_(), lse.fill_(-math.inf)


# ---------------------------------------------------------------- forward


def splits_of(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> tuple[int, int, bool]:
    """num_splits, split_blocks (see blocks/splits.py), and whether there are partials to be merged."""
    if problem.split_size is not None:
        # always merged: how many there are must not matter
        return ceil_div(problem.attention.seqlen_k, problem.split_size), problem.split_size // config.block_keys, True
    num_splits = problem.num_splits or num_splits_sm80(problem.attention, config, arch, num_sms)
    return num_splits, 0, num_splits > 1


class Launch:
    """What every call of one problem passes to its kernels beside the tensors, and the kernels, once they are there.

    Args: num_splits, split_blocks, is_split: see `splits_of`.
    """

    def __init__(
        self,
        problem: DecodeProblem,
        config: ForwardConfigSm80,
        arch: str,
        num_splits: int,
        split_blocks: int,
        is_split: bool,
    ):
        self.problem, self.config, self.arch = problem, config, arch
        self.num_splits, self.is_split = num_splits, is_split
        attention = problem.attention
        self.scalars = *score_scales(attention), *window_bounds(attention), *grid(attention, config)
        self.splits = (num_splits, split_blocks) if is_split else (None, None)
        self._forwards: dict[int, Callable] = {}  # by the bytes of a copy
        self._merge: Callable | None = None

    def __call__(self, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
        q, k_cache, v_cache = inputs.q, as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)
        out, lse = empty_outputs(self.problem.attention, AttentionInputs(*inputs[:3]))
        if needs_append(inputs):
            q = append(self.problem, inputs, self.arch)
        q = with_rows(q)
        sinks = None if inputs.sinks is None else inputs.sinks.float().contiguous()
        if not self.is_split:
            kernel = self.kernel(vector_bytes(q, k_cache, v_cache, out))
            kernel(q, k_cache, v_cache, out, lse, *self.other_arguments(inputs, sinks))
            return out, lse
        partials = self.workspace(q)
        kernel = self.kernel(vector_bytes(q, k_cache, v_cache))
        kernel(q, k_cache, v_cache, *partials, *self.other_arguments(inputs, None))
        if self._merge is None:
            self._merge = compile.get(*self.merge_request())
        self._merge(*partials, out, lse, sinks, merge_blocks(out, self.num_splits))
        return out, lse

    def kernel(self, aligned_to: int) -> Callable:
        """The forward for tensors that copies of so many bytes can read."""
        found = self._forwards.get(aligned_to)
        if found is None:
            config = replace(self.config, vector_bytes=aligned_to)
            found = compile.get(*compile_request(self.problem, config, self.arch, self.is_split))
            self._forwards[aligned_to] = found
        return found

    def merge_request(self) -> tuple:
        """The arguments of `compile.get` for the merge of the splits."""
        return merge_request(self.problem.attention, self.config, self.num_splits, self.arch)

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """float32 out (splits, batch, seqlen_q, num_heads_q, head_dim_v) and lse (splits, batch, num_heads_q, seqlen_q)
        of every split."""
        p, n = self.problem.attention, self.num_splits
        b, m, h, dv, dtype = p.batch, p.seqlen_q, p.num_heads_q, p.head_dim_v, torch.float32
        out = q.new_empty_strided((n, b, m, h, dv), (b * m * h * dv, m * h * dv, h * dv, dv, 1), dtype=dtype)
        return out, q.new_empty_strided((n, b, h, m), (b * h * m, h * m, m, 1), dtype=dtype)

    def other_arguments(self, inputs: DecodeInputs, sinks: Tensor | None) -> tuple:
        """Those of `ForwardSm80.__call__` after lse."""
        return (
            sinks,
            None,
            None,
            inputs.cache_seqlens.contiguous(),
            *self.scalars,
            None if inputs.page_table is None else with_rows(inputs.page_table),
            inputs.seqlen_new,
            *self.splits,
            *descale_arguments(self.problem, inputs),
        )


def compile_request(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> tuple:
    """The arguments of `compile.get` for the forward kernel of this problem."""
    by_block = problem.kv_block is not None
    kind = (
        ("is_split", is_split),
        ("is_paged", problem.is_paged),
        ("has_descales", problem.has_descales),
        ("descales_by_block", by_block),
    )
    key = _of_a_split(problem.attention, is_split).static(), config, kind
    return "decode_sm80", key, arch, functools.partial(trace, problem, config, arch, is_split)


def _of_a_split(attention: AttentionProblem, is_split: bool) -> AttentionProblem:
    """Sinks join when splits are merged."""
    return replace(attention, has_sinks=False) if is_split else attention


def trace(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> tuple:
    """The forward kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float16, Float32, Int32
    from cutlass.cute.runtime import make_fake_stream

    from ..blocks import cache_descales
    from .decode import DecodeSm80
    from .forward import ForwardSm80

    assert cache_descales.KEYS == KEYS_OF_A_DESCALE
    attention = _of_a_split(problem.attention, is_split)
    dtype, mask, by_block = element_type(attention.dtype), attention.mask, problem.kv_block is not None
    d, dv = attention.head_dim, attention.head_dim_v

    def rows(size: int, dtype: type = dtype) -> Any:
        return fake_tensor(dtype, None, None, None, size, align_bytes=config.vector_bytes)

    out, caches = rows(dv), (rows(d), rows(dv))
    if attention.has_e4m3_cache:
        caches = tuple(rows(size // 2, Float16) for size in (d, dv))
    if is_split:
        # of 16-bit types a thread stores two columns, over an e4m3 cache four, of float32 those of its copies
        align_bytes = config.vector_bytes if attention.dtype == torch.float32 else 4 if dv % 2 else 8
        if attention.has_e4m3_cache:
            align_bytes = 16 if dv % 4 == 0 else 8
        out = fake_tensor(Float32, None, None, None, None, dv, align_bytes=align_bytes)
    splits = (None,) if is_split else ()
    arguments = (
        rows(d),
        *caches,
        out,
        fake_tensor(Float32, *splits, None, None, None, align_bytes=4),
        fake_tensor(Float32, None, align_bytes=4) if attention.has_sinks else None,
        None,
        None,
        fake_tensor(Int32, None, align_bytes=4),
        Float32(1.0),
        None if attention.softcap is None else Float32(1.0),
        None if mask.window_left is None else Int32(0),
        None if mask.window_right is None else Int32(0),
        Int32(1),
        Int32(1),
        fake_tensor(Int32, None, None, align_bytes=4) if problem.is_paged else None,
        Int32(0),
        *((Int32(1), Int32(0)) if is_split else (None, None)),
        *((strided_tensor(Float32, 3), strided_tensor(Float32, 3)) if problem.has_descales else (None, None)),
        Int32(1) if by_block and not problem.is_paged else None,
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    kernel = DecodeSm80 if isinstance(config, DecodeConfigSm80) else ForwardSm80
    return kernel(attention, config, dtype, arch, is_split, problem.is_paged, by_block), arguments

"""`attention_decode` on the Ampere kernels: few_rows.py for few rows, kernel.py for more (device/sm80/forward).

decode.py has what happens before and after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...problem import AttentionInputs, AttentionProblem
from ...problem.decode import DecodeInputs, DecodeProblem
from ...problem.outputs import empty_outputs
from ..arguments import ForwardSm80Arguments
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import ForwardConfigSm80
from ..config.arch import arch_of
from ..config.decode import DecodeConfigSm80
from ..heuristics.decode import decode_config_sm80, num_splits_sm80
from . import decode as decode_launch
from . import modifiers
from .append import needs_append
from .arguments import (
    KEYS_OF_A_DESCALE,
    as_pairs,
    descale_arguments,
    element_type,
    fake_integers,
    fake_tensor,
    in_order,
    shared_stand_ins,
    strided_tensor,
    traced,
    vector_bytes,
    with_rows,
)
from .decode import DecodeLaunch, SplitPlan, page_table_of, query_offsets_of
from .forward_sm80 import grid
from .merge import merge_blocks


def decode(problem: DecodeProblem, inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    return decode_launch.decode(problem, inputs, prepare)


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
    """`decode` for calls of one problem on one device, but for values that are to be checked; holds no tensor.

    It also serves problems with the same `DecodeProblem.of_rounded_length`, with the same bits.
    """
    problem = problem.of_rounded_length
    return decode_launch.prepared(problem, lambda: launch_with(problem, config_of(problem, device), device))


def config_of(problem: DecodeProblem, device: torch.device) -> ForwardConfigSm80:
    return decode_config_sm80(problem.sizing_problem, arch_of(device))


def launch_with(problem: DecodeProblem, config: ForwardConfigSm80, device: torch.device) -> Launch:
    arch, num_sms = arch_of(device), torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(problem, config, arch, split_plan(problem, config, arch, num_sms))


def compile_requests(
    problem: DecodeProblem, inputs: DecodeInputs, device: torch.device
) -> list[tuple[Any, CompileRequest]]:
    """The configuration and the request of each kernel of a call, see `decode.compile_requests`."""
    return decode_launch.compile_requests(problem, inputs, prepare(problem, device), arch_of(device))


def split_plan(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, num_sms: int) -> SplitPlan:
    choose = functools.partial(num_splits_sm80, problem.attention, config, arch, num_sms)
    return SplitPlan.of(problem, config.block_keys, choose)


class Launch(DecodeLaunch):
    """The launches of one problem; the alignment of the tensors picks the kernel."""

    config: ForwardConfigSm80

    def __init__(self, problem: DecodeProblem, config: ForwardConfigSm80, arch: str, plan: SplitPlan):
        super().__init__(problem, config, arch, plan)
        self.in_order = in_order(ForwardSm80Arguments, self.constants | grid(problem.attention, config))
        self._forwards: dict[int, Callable] = {}  # by the bytes of a copy

    def attend(self, q: Tensor, inputs: DecodeInputs, out: Tensor, lse: Tensor, sinks: Tensor | None) -> None:
        q, k_cache, v_cache = with_rows(q), as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)
        # rows of the workspace are aligned as far as their length allows
        kernel = self.kernel(vector_bytes(q, k_cache, v_cache, *(() if self.is_split else (out,))))
        kernel(*self.arguments(inputs, q, k_cache, v_cache, out, lse, sinks))

    def repeated(self, inputs: DecodeInputs) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        q, k_cache, v_cache = inputs[:3]
        is_plain = all(t.stride(-1) == 1 and t.dtype.itemsize > 1 for t in inputs[:3])
        is_plain = is_plain and not self.problem.attention.is_packed and inputs.sinks is None
        if not is_plain or needs_append(inputs) or self.problem.has_rotary_positions:
            return super().repeated(inputs)
        out, lse = empty_outputs(self.problem.attention, AttentionInputs(q, k_cache, v_cache))
        size, strides, dtype = tuple(out.shape), out.stride(), out.dtype
        written = self.workspace(q) if self.is_split else (out, lse)
        kernel = self.kernel(vector_bytes(q, k_cache, v_cache, *(() if self.is_split else (out,))))
        others = self.arguments(inputs, q, k_cache, v_cache, *written, None)[4:]
        if not self.is_split:

            def run(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
                out = q.new_empty_strided(size, strides, dtype=dtype)
                kernel(q, k_cache, v_cache, out, *others)
                return out, lse

            return run

        if self._merge is None:
            self._merge = compile.get(*self.merge_request())
        merge, partial_out, partial_lse = self._merge, *written
        end = lse, None, None, merge_blocks(out, self.num_splits)

        def run_splits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, Tensor]:
            out = q.new_empty_strided(size, strides, dtype=dtype)
            kernel(q, k_cache, v_cache, partial_out, *others)
            merge(partial_out, partial_lse, out, *end)
            return out, lse

        return run_splits

    def arguments(
        self,
        inputs: DecodeInputs,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        out: Tensor,
        lse: Tensor,
        sinks: Tensor | None,
    ) -> tuple:
        """The values of `ForwardSm80Arguments`, with the given tensors instead of those of `inputs`."""
        k_descale, v_descale, kv_block = descale_arguments(self.problem, inputs)
        return self.in_order(
            q,
            k_cache,
            v_cache,
            out,
            lse,
            sinks=sinks,
            cu_seqlens_q=query_offsets_of(inputs),
            seqused_k=inputs.cache_seqlens.contiguous(),
            modifiers=modifiers.arguments_of(self.problem.attention, inputs.modifiers),
            page_table=page_table_of(inputs),
            added_k=inputs.seqlen_new,
            k_descale=k_descale,
            v_descale=v_descale,
            kv_block=kv_block,
        )

    def kernel(self, aligned_to: int) -> Callable:
        """The forward for tensors that copies of so many bytes can read."""
        found = self._forwards.get(aligned_to)
        if found is None:
            found = compile.get(*self._request(aligned_to)[1])
            self._forwards[aligned_to] = found
        return found

    def forward_request(self, inputs: DecodeInputs) -> tuple[ForwardConfigSm80, CompileRequest]:
        qkv = with_rows(inputs.q), as_pairs(inputs.k_cache), as_pairs(inputs.v_cache)
        return self._request(vector_bytes(*qkv))

    def _request(self, aligned_to: int) -> tuple[ForwardConfigSm80, CompileRequest]:
        config = replace(self.config, vector_bytes=aligned_to)
        return config, compile_request(self.problem, config, self.arch, self.is_split)


def compile_request(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> CompileRequest:
    """The request for the forward kernel of this problem."""
    by_block = problem.kv_block is not None
    kind = (
        ("is_split", is_split),
        ("is_paged", problem.is_paged),
        ("has_descales", problem.has_descales),
        ("descales_by_block", by_block),
    )
    key = _attention_of_launch(problem.attention, is_split).static(), config, kind
    return CompileRequest("decode_sm80", key, arch, functools.partial(trace, problem, config, arch, is_split))


def _attention_of_launch(attention: AttentionProblem, is_split: bool) -> AttentionProblem:
    """The attention of a launch: with splits it has no sinks, which join when the splits are merged."""
    return replace(attention, has_sinks=False) if is_split else attention


def trace(problem: DecodeProblem, config: ForwardConfigSm80, arch: str, is_split: bool) -> tuple:
    """The forward kernel of a static problem and stand-ins for its arguments, for `compile`."""
    from cutlass import Float16, Float32, Int32

    from ..device.blocks.softmax import cache_scales as cache_descales
    from ..device.sm80.forward.few_rows import DecodeSm80
    from ..device.sm80.forward.kernel import ForwardSm80

    assert cache_descales.KEYS == KEYS_OF_A_DESCALE
    attention = _attention_of_launch(problem.attention, is_split)
    dtype, by_block = element_type(attention.dtype), problem.kv_block is not None
    d, dv = attention.head_dim, attention.head_dim_v

    def rows(size: int, dtype: type = dtype, batch: tuple = (None,)) -> Any:
        return fake_tensor(dtype, *batch, None, None, size, align_bytes=config.vector_bytes)

    batch = () if attention.is_packed else (None,)
    q, out, caches = rows(d, batch=batch), rows(dv, batch=batch), (rows(d), rows(dv))
    if attention.has_e4m3_cache:
        caches = tuple(rows(size // 2, Float16) for size in (d, dv))
    if is_split:
        # a thread stores two columns of a 16-bit type, four over an e4m3 cache, and as many as it copies of float32
        align_bytes = config.vector_bytes if attention.dtype == torch.float32 else 4 if dv % 2 else 8
        if attention.has_e4m3_cache:
            align_bytes = 16 if dv % 4 == 0 else 8
        out = fake_tensor(Float32, None, None, None, None, dv, align_bytes=align_bytes)
    lse = (None, None) if is_split else batch  # partials have a batch
    descale = strided_tensor if problem.has_descales else lambda kind, rank: None
    arguments = ForwardSm80Arguments(
        q,
        *caches,
        out,
        lse=fake_tensor(Float32, *lse, None, None, align_bytes=4),
        sinks=fake_tensor(Float32, None, align_bytes=4) if attention.has_sinks else None,
        modifiers=modifiers.fake_arguments(attention),
        heads_per_section=Int32(1),
        num_tiles=Int32(1),
        page_table=fake_tensor(Int32, None, None, align_bytes=4) if problem.is_paged else None,
        added_k=Int32(0),
        num_splits=Int32(1) if is_split else None,
        split_blocks=Int32(0) if is_split else None,
        k_descale=descale(Float32, 3),
        v_descale=descale(Float32, 3),
        kv_block=Int32(1) if by_block and not problem.is_paged else None,
        **shared_stand_ins(attention) | {"cu_seqlens_k": None, "seqused_k": fake_integers()},
    )
    kernel = DecodeSm80 if isinstance(config, DecodeConfigSm80) else ForwardSm80
    return traced(kernel(attention, config, dtype, arch, True, is_split, problem.is_paged, by_block), arguments)

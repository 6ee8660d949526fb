"""From tensors to a launch on Hopper: which kernel, which grid, and what the tensors have to look like."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...geometry import tile_scheduler
from ...geometry.integers import ceil_div
from ...problem import AttentionInputs, AttentionProblem, Descales, Quantization
from ...problem.outputs import empty_outputs, outputs_without_keys
from ...quantization.codec import SCALE_BLOCK
from ...quantization.layout import keys_last_in_torch
from ..arguments import ForwardSm90Arguments, ModifierTensors
from ..compiler import compile
from ..compiler.compile import CompileRequest
from ..config import HOPPER, ForwardConfigSm90, head_dim_tile, value_blocks, value_columns
from ..heuristics import sm90 as heuristics
from ..heuristics import tuned
from . import block_lists, float32_halves, modifiers, quantize
from .arguments import (
    aligned,
    beyond_grid,
    element_type,
    fake_tensor,
    in_order,
    is_aligned,
    score_arguments,
    shared_stand_ins,
    strided_tensor,
    traced,
)

ARCH = HOPPER
MAX_HEAD_DIM = 256
ANY_ROWS = 2**30  # rows of a block that holds all rows


def unsupported(problem: AttentionProblem) -> str | None:
    """Why this backend does not compute the problem; None if it does."""
    if problem.has_modifiers and (problem.quantization is not None or problem.dtype == torch.float32):
        return f"{problem.modifiers_named}: expected bfloat16 or float16"
    if problem.quantization is not None:
        if (reason := _unsupported_fp8(problem)) is not None:
            return reason
    elif problem.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"dtype: expected bfloat16, float16 or float32, got {str(problem.dtype).removeprefix('torch.')}"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 8 or size > MAX_HEAD_DIM:
            return f"{name}: expected a multiple of 8 up to {MAX_HEAD_DIM} (16-byte rows for TMA), got {size}"
    if value_columns(problem) % 8:
        return f"head_dim_v: expected a multiple of 16 above 128 in float32, got {problem.head_dim_v}"
    if problem.softcap is None and problem.softmax_scale <= 0:
        return f"softmax_scale: expected a number above 0, got {problem.softmax_scale}"
    return beyond_grid(problem) if problem.has_lists else None


def _unsupported_fp8(problem: AttentionProblem) -> str | None:
    assert problem.quantization is not None
    if problem.out_dtype not in (torch.bfloat16, torch.float16):
        return f"dtype: expected out in bfloat16 or float16, got {str(problem.out_dtype).removeprefix('torch.')}"
    if problem.quantization.kv_block not in (None, SCALE_BLOCK):
        return f"kv_block: expected {SCALE_BLOCK} or None, got {problem.quantization.kv_block}"
    for name, size in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if size % 16:
            return f"{name}: expected a multiple of 16 in FP8 (16-byte rows for TMA), got {size}"
    return None


def forward(
    problem: AttentionProblem, inputs: AttentionInputs, config: ForwardConfigSm90 | None = None
) -> tuple[Tensor, Tensor]:
    """out and lse of a call, as `onepass.tiled.forward` gives them.

    Tensors whose last dimension is contiguous and whose other strides and address are multiples of 16 bytes are read
    where they lie; others are copied first, which TMA asks for.
    """
    return prepare(problem, inputs.q.device, config)(inputs)


@functools.lru_cache(maxsize=4096)
def prepare(
    problem: AttentionProblem, device: torch.device, config: ForwardConfigSm90 | None = None
) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """`forward` for calls of one problem on one device; holds no tensor."""
    if problem.is_empty:  # packed rows of no sequence, no keys, or no heads
        return functools.partial(outputs_without_keys, problem)
    if config is None:
        config = tuned.refined(heuristics.forward_config_sm90(problem), "fwd", "sm90", problem, ARCH, device)
    elif problem.quantization is not None:
        config.check(problem)  # gradients, which are not known before, may refuse it
    kernel = compile.get(*compile_request(problem, config))
    grid = persistent_grid(problem, config, torch.cuda.get_device_properties(device).multi_processor_count)
    arguments = in_order(ForwardSm90Arguments, score_arguments(problem) | grid)
    lists = block_lists.prepared(problem, (config.tile_m, config.tile_n), False, ARCH)
    return Launch(problem, kernel, arguments, config.dynamic_tiles, config.transposes_v, lists)


def persistent_grid(problem: AttentionProblem, config: ForwardConfigSm90, num_sms: int) -> dict[str, int]:
    """The arguments that say the grid: heads_per_section and num_ctas."""
    mask = problem.mask
    has_growing_tiles = problem.has_intervals or (mask.window_right is not None and mask.window_left is None)
    # with pack_gqa the heads of a group are one head to the scheduler
    group, positions = config.group(problem), config.positions(problem) * config.cluster_size
    heads = problem.num_heads_q // group
    kv_bytes = problem.dtype.itemsize * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    kv_bytes //= problem.qhead_per_kvhead // group
    count = tile_scheduler.max_packed_tiles if problem.is_packed else tile_scheduler.num_tiles
    tiles = count(problem.seqlen_q, positions, heads, problem.batch)
    num_clusters = min(tiles, num_sms * config.blocks_per_sm // config.cluster_size)
    section = tile_scheduler.heads_per_section(
        heads * problem.batch,
        ceil_div(problem.seqlen_q, positions),
        num_clusters,
        kv_bytes,
        has_growing_tiles and config.longest_first,
        config.dynamic_tiles,
    )
    return {"heads_per_section": section, "num_ctas": num_clusters * config.cluster_size}


def compile_request(
    problem: AttentionProblem, config: ForwardConfigSm90 | None = None, arch: str = ARCH
) -> CompileRequest:
    """The request for the kernel of this problem."""
    config = config or tuned.refined(heuristics.forward_config_sm90(problem), "fwd", "sm90", problem, arch)
    # the forward is deterministic either way, and scales of any granularity come to the kernel in one
    quantization = None if problem.quantization is None else Quantization(problem.out_dtype)
    problem = replace(problem, head_dim_v=value_columns(problem))
    static = replace(problem, deterministic=False, quantization=quantization).static()
    return CompileRequest("forward", (static, config), arch, functools.partial(trace, problem, config))


def helper_requests(problem: AttentionProblem, config: Any) -> list[CompileRequest]:
    """The requests for the kernels that a call runs before the forward."""
    halves = float32_halves.compile_requests(problem) if problem.dtype == torch.float32 else []
    return halves + block_lists.compile_requests(problem, (config.tile_m, config.tile_n), False, ARCH)


class KernelScales(NamedTuple):
    """The scales of FP8 tensors or of float16 halves: q_scale to q_block of `ForwardSm90Arguments`.

    Attributes:
        q, k, v: (batch, heads, blocks) float32, one scale for each block of rows.
        q_block: rows of a block of q.
    """

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    q_block: int | None


NO_SCALES = KernelScales(None, None, None, None)


@dataclass(frozen=True)
class Launch:
    """The kernel of one problem, and what makes its arguments.

    Attributes:
        in_order: `arguments.in_order` with what all calls have in common.
    """

    problem: AttentionProblem
    kernel: Callable
    in_order: Callable[..., tuple]
    is_dynamic: bool
    transposes_v: bool
    lists: Callable[..., ModifierTensors] | None

    def __call__(self, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        out, lse = empty_outputs(self.problem, inputs)
        if inputs.descales is not None:
            scales = kernel_scales(self.problem, inputs.descales)
            assert self.problem.quantization is not None
            v = inputs.v
            if not (self.problem.quantization.v_keys_last or self.transposes_v):
                v = v_keys_last(v, inputs.cu_seqlens_k)
            self.attend(inputs, out, lse, aligned(inputs.q), aligned(inputs.k), aligned(v), scales)
        elif self.problem.dtype == torch.float32:
            self.attend_halves(inputs, out, lse)
        else:
            self.attend(inputs, out, lse, aligned(inputs.q), aligned(inputs.k), aligned(inputs.v))
        return out, lse

    def attend_halves(self, inputs: AttentionInputs, out: Tensor, lse: Tensor) -> None:
        """out and lse of float32 tensors, from their float16 halves: a launch for each block of columns of V."""
        q, k, v = aligned(inputs.q), aligned(inputs.k), aligned(inputs.v)
        halves = float32_halves.split(q, k, v, value_blocks(self.problem), *inputs[4:7])
        columns = v.shape[-1] // len(halves.v)
        for i, (v_halves, v_scale) in enumerate(halves.v):
            block = slice(i * columns, (i + 1) * columns)
            scales = KernelScales(halves.q[1], halves.k[1], v_scale, SCALE_BLOCK)
            sources = q, k, v[..., block]
            self.attend(inputs, out[..., block], lse, halves.q[0], halves.k[0], v_halves, scales, sources)

    def attend(
        self,
        inputs: AttentionInputs,
        out: Tensor,
        lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scales: KernelScales = NO_SCALES,
        float32: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> None:
        """Launch the kernel, with q, k and v instead of those of `inputs`. Args: see `ForwardSm90Arguments`."""
        sinks, cu_seqlens_q, cu_seqlens_k = inputs.sinks, inputs.cu_seqlens_q, inputs.cu_seqlens_k
        seqused_k = inputs.seqused_k
        self.kernel(
            *self.in_order(
                q,
                k,
                v,
                out,
                lse,
                None if sinks is None else sinks.float().contiguous(),
                None if cu_seqlens_q is None else cu_seqlens_q.contiguous(),
                None if cu_seqlens_k is None else cu_seqlens_k.contiguous(),
                None if seqused_k is None else seqused_k.contiguous(),
                float32,
                *scales,
                modifiers=self.modifiers(inputs),
                counter=tile_counter(q.get_device()) if self.is_dynamic else None,
            )
        )

    def modifiers(self, inputs: AttentionInputs) -> ModifierTensors | None:
        found = modifiers.arguments_of(self.problem, inputs.modifiers, inputs.blocks)
        return found if self.lists is None else self.lists(found, inputs)


def v_keys_last(v: Tensor, cu_seqlens_k: Tensor | None) -> Tensor:
    """V as `keys_last` of onepass.fp8 lays it: by a kernel on a GPU, where one is made for these sizes."""
    if v.device.type == "cuda" and quantize.unsupported_layout(v, cu_seqlens_k) is None:
        return quantize.keys_last(v, cu_seqlens_k)
    return keys_last_in_torch(v, cu_seqlens_k)


def kernel_scales(problem: AttentionProblem, descales: Descales) -> KernelScales:
    """The descales of any granularity as the kernel reads them: views, no data moves."""
    assert problem.quantization is not None
    by_heads = (problem.batch, problem.num_heads_q), *((problem.batch, problem.num_heads_kv),) * 2
    views = []
    quantization = problem.quantization
    for t, heads, block in zip(
        descales, by_heads, (quantization.q_block, quantization.kv_block, quantization.kv_block), strict=True
    ):
        if t.dim() == 0:
            t = t.as_strided((*heads, 1), (0, 0, 1))
        elif t.dim() == 2 and problem.is_packed and block is not None:  # (heads, blocks of all sequences)
            t = t if t.stride(1) == 1 else t.contiguous()
            t = t.as_strided((heads[0], *t.shape), (0, *t.stride()))
        elif t.dim() == 2:
            t = t.as_strided((*heads, 1), (*t.stride(), 1))
        views.append(t if t.stride(-1) == 1 else t.contiguous())
    q, k, v = views
    return KernelScales(q, k, v, problem.quantization.q_block or ANY_ROWS)


_counters: dict[tuple[str, int, int], Tensor] = {}


def tile_counter(device: int) -> Tensor:
    """The zero that the tile queue of a launch counts from."""
    return zero_counters("tiles", device, 1)


def zero_counters(purpose: str, device: int, count: int) -> Tensor:
    """At least `count` int32 zeros for a launch that leaves them at zero again.

    Launches of one stream follow each other, so one tensor per purpose and stream does. A captured launch may be
    replayed while others run: it gets its own, zeroed by the graph.
    """
    if _is_capturing(device):
        return torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
    # torch.cuda.current_stream(device).cuda_stream without making the object around it
    key = (purpose, device, torch._C._cuda_getCurrentRawStream(device))
    counters = _counters.get(key)
    if counters is None or counters.numel() < count:
        counters = _counters[key] = torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
    return counters


def _is_capturing(device: int) -> bool:
    """Whether the device's current stream is being captured: torch asks that of the current device."""
    if torch._C._cuda_getDevice() == device:  # torch.cuda.current_device() takes three times as long
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def copied(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """The names of the tensors that a call copies before its kernel runs."""
    return [name for name, t in (("q", q), ("k", k), ("v", v)) if not is_aligned(t)]


def trace(
    problem: AttentionProblem, config: ForwardConfigSm90, cache: tuple[bool, int | None, bool] | None = None
) -> tuple:
    """The kernel of a static problem and stand-ins for its arguments, for `compile`.

    Args: cache: for `attention_decode`, the is_split, box_rows and has_descales of `ForwardSm90`.
    """
    from cutlass import Float16, Float32, Int32

    from ..device.sm90.forward.kernel import ForwardSm90

    is_float32 = problem.dtype == torch.float32
    dtype = Float16 if is_float32 else element_type(problem.dtype)
    tensor = fake_tensor

    def optional(value: object, is_given: bool):
        return value if is_given else None

    batch, keys_batch = ((),) * 2 if problem.is_packed else ((None,),) * 2
    is_split, box_rows, has_descales = False, None, False
    if cache is not None:
        is_split, box_rows, has_descales = cache
        keys_batch = (None,)
    # splits of packed queries have rows of their own
    splits = (None,) if is_split and not problem.is_packed else ()
    out_dtype = Float32 if is_split else element_type(problem.out_dtype)
    head_dim, head_dim_v, is_fp8 = problem.head_dim, problem.head_dim_v, problem.quantization is not None

    # one for each: whose sizes one stand-in stands for would have to be equal
    is_scaled = is_fp8 or is_float32
    scales = (optional(tensor(Float32, None, None, None, align_bytes=4), is_scaled) for _ in range(3))
    sizes = head_dim, head_dim, head_dim_v
    float32 = tuple(tensor(Float32, *batch, None, None, size, align_bytes=16) for size in sizes)
    if is_float32:
        head_dim, head_dim_v = (2 * head_dim_tile(size) for size in (head_dim, head_dim_v))
    q_scale, k_scale, v_scale = scales
    if has_descales:
        k_scale, v_scale = (strided_tensor(Float32, 3) for _ in range(2))
    kv_dtype = dtype if problem.kv_dtype is None else element_type(problem.kv_dtype)
    shared = shared_stand_ins(problem)
    if cache is not None:
        shared["cu_seqlens_k"] = None
    arguments = ForwardSm90Arguments(
        q=tensor(dtype, *batch, None, None, head_dim, align_bytes=16),
        k=tensor(kv_dtype, *keys_batch, None, None, head_dim, align_bytes=16),
        # transposed: only the last length is not known beforehand
        v=tensor(dtype, *batch, None, head_dim_v, None, align_bytes=16)
        if is_fp8 and not config.transposes_v
        else tensor(kv_dtype, *keys_batch, None, None, head_dim_v, align_bytes=16),
        out=tensor(out_dtype, *splits, *batch, None, None, problem.head_dim_v, align_bytes=16),
        lse=tensor(Float32, *splits, *batch, None, None, align_bytes=4),
        sinks=optional(tensor(Float32, None, align_bytes=4), problem.has_sinks),
        float32=optional(float32, is_float32),
        q_scale=q_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        q_block=optional(Int32(1), is_scaled),
        modifiers=modifiers.fake_arguments(problem),
        counter=optional(tensor(Int32, 1, align_bytes=4), config.dynamic_tiles),
        heads_per_section=Int32(1),
        num_ctas=Int32(1),
        page_table=optional(tensor(Int32, None, None, align_bytes=4), box_rows is not None),
        added_k=optional(Int32(0), cache is not None),
        num_splits=optional(Int32(1), is_split),
        split_blocks=optional(Int32(0), is_split),
        **shared,
    )
    return traced(ForwardSm90(problem, config, dtype, cache is not None, is_split, box_rows, has_descales), arguments)

"""attention_decode's kernels on the CPU: append, forward by splits and merge, each by its PTX, with the launch's own
arguments."""

import functools
import struct
from dataclasses import replace

import machine_code
import ptx_interpreter
import torch

from onepass.geometry import tile_scheduler
from onepass.geometry.integers import ceil_div
from onepass.kernels.arguments import ForwardSm80Arguments
from onepass.kernels.config import ForwardConfigSm80
from onepass.kernels.heuristics.decode import decode_config_sm80
from onepass.kernels.launch import append as append_launch
from onepass.kernels.launch import arguments as cache_launch
from onepass.kernels.launch import decode_sm80 as decode_launch
from onepass.kernels.launch import forward_sm80 as launch
from onepass.kernels.launch import merge as merge_launch
from onepass.kernels.launch.decode import SplitPlan
from onepass.problem import AttentionInputs
from onepass.problem.decode import DecodeInputs, DecodeProblem
from onepass.problem.outputs import empty_outputs

ARCH, ARCH_E4M3 = "sm_80", "sm_89"
INT32, FLOAT32 = torch.int32, torch.float32


class Parameters:
    """The parameters of a kernel, and the memory that they point to. Tensors lie between NaN."""

    def __init__(self, num_bytes: int = 1 << 22):
        self.memory = ptx_interpreter.Memory(num_bytes, ptx_interpreter.GLOBAL_BASE)
        self.values: list[bytes] = []

    def put(self, t: torch.Tensor) -> int:
        """Address of the memory that t is a view of: all strides stay as they are, and so do misaligned addresses."""
        offset = t.data_ptr() % 16
        data = torch.cat([torch.zeros(offset, dtype=torch.uint8), flat(t).view(torch.uint8)])
        return self.memory.put(data.numpy()) + offset

    def tensor(self, t: torch.Tensor, order: tuple[int, ...] | None = None, is_lse: bool = False) -> int:
        """A tensor with its modes in this order.

        The last mode of t is known when the kernel is compiled, except for its size in lse (and in vectors and tables,
        which have `order` None).
        """
        address, last = self.put(t), t.dim() - 1
        has_size = is_lse or order is None
        order = tuple(range(t.dim())) if order is None else order
        numbers = [t.shape[i] for i in order if i != last or has_size]
        strides = [t.stride(i) for i in order if i != last]
        padding = [0] if len(numbers) % 2 else []
        form = f"<Q{len(numbers) + len(padding)}i{len(strides)}q"
        self.values.append(struct.pack(form, address, *numbers, *padding, *strides))
        return address

    def strided(self, t: torch.Tensor, first_is_known: bool = False):
        """A tensor with all its sizes and strides, or all but the first stride."""
        padding, strides = [0] * (t.dim() % 2), t.stride()[first_is_known:]
        form = f"<Q{t.dim() + len(padding)}i{len(strides)}q"
        self.values.append(struct.pack(form, self.put(t), *t.shape, *padding, *strides))

    def numbers(self, *numbers: float | None):
        self.values += [struct.pack("<f" if isinstance(n, float) else "<i", n) for n in numbers if n is not None]

    def divisors(self, *numbers: int):
        """FastDivmodDivisorV2 in the form a kernel gets: divisor, multiplier, two shifts; and the divisor once more."""
        for n in numbers:
            log = (n - 1).bit_length()
            multiplier = ((2**log - n) * 2**32 // n + 1) % 2**32
            self.values += [struct.pack("<IIBBxx", n, multiplier, min(log, 1), max(log - 1, 0)), struct.pack("<i", n)]

    def modifiers(self, fields: tuple | None):
        """The fields of `ModifierTensors`: tensors of any lengths and strides, and numbers.

        Lists have a first stride of 1, which is known when a kernel is compiled.
        """
        for name, value in () if fields is None else fields._asdict().items():
            if isinstance(value, torch.Tensor):
                self.strided(value, name in ("numbers", "counts", "turns"))
            else:
                self.numbers(value)

    def end_here(self):
        """Make the memory end with what was put last, so that reading past it raises."""
        self.memory.num_bytes = self.memory.used

    def result(self, address: int, like: torch.Tensor) -> torch.Tensor:
        data = self.memory.get(address, flat(like).numel() * like.element_size())
        return torch.from_numpy(data).view(like.dtype).as_strided(like.shape, like.stride())


def flat(t: torch.Tensor) -> torch.Tensor:
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return t.as_strided((last,), (1,))


@functools.lru_cache(maxsize=64)
def parsed(ptx: str) -> ptx_interpreter.Program:
    return ptx_interpreter.parse(ptx)


_compiled: dict = {}


def compiled(key, trace, arch: str = ARCH, spills: int = 0) -> ptx_interpreter.Program:
    """A kernel whose machine code keeps everything in registers, except for the given number of loads and stores."""
    if key not in _compiled:
        code, ptx = machine_code.read_with_ptx(arch, trace)
        assert code.spills <= spills, key
        _compiled[key] = code, ptx
    return parsed(_compiled[key][1])


def forward(
    problem: DecodeProblem,
    inputs: DecodeInputs,
    num_splits: int,
    split_blocks: int = 0,
    is_split: bool | None = None,
    config: ForwardConfigSm80 | None = None,
    **order,
):
    """out and lse of the forward kernel, or with splits those of each split.

    Args: order: copies_late and warps_reversed of `ptx_interpreter.run`.
    """
    attention = problem.attention
    is_split = num_splits > 1 if is_split is None else is_split
    arch = ARCH_E4M3 if attention.has_e4m3_cache else ARCH
    config = config or decode_config_sm80(problem.sizing_problem, arch)
    out, lse = empty_outputs(attention, AttentionInputs(*inputs[:3]))
    qkv = inputs.q, *(cache_launch.as_pairs(t) for t in inputs[1:3])
    aligned_to = launch.vector_bytes(*qkv, *(() if is_split else (out,)))
    config = replace(config, vector_bytes=aligned_to)
    state = decode_launch.Launch(problem, config, arch, SplitPlan(num_splits, split_blocks, is_split))
    if is_split:
        out, lse = state.workspace(inputs.q)
    sinks = None if is_split or inputs.sinks is None else inputs.sinks.float()
    arguments = ForwardSm80Arguments(*state.arguments(inputs, *qkv, out, lse, sinks))

    kernel = Parameters()
    rows_first = {3: (0, 2, 1), 4: (1, 3, 2, 0), 5: (2, 4, 3, 1, 0)}
    for t in qkv:
        kernel.tensor(t, rows_first[t.dim()])
    out_at = kernel.tensor(out, rows_first[out.dim()])
    lse_at = kernel.tensor(lse, tuple(range(lse.dim()))[::-1], is_lse=True)
    if arguments.sinks is not None:
        kernel.tensor(arguments.sinks)
    if arguments.cu_seqlens_q is not None:
        kernel.tensor(arguments.cu_seqlens_q)
    kernel.tensor(arguments.seqused_k)
    kernel.numbers(arguments.added_k, arguments.scale_log2, arguments.tanh_scale)
    kernel.numbers(arguments.window_left, arguments.window_right)
    kernel.modifiers(arguments.modifiers)
    heads = attention.num_heads_q // config.group(attention)
    if attention.is_packed:
        kernel.divisors(heads)
    else:
        num_m_blocks, in_all = ceil_div(attention.seqlen_q, config.positions(attention)), heads * attention.batch
        kernel.numbers(arguments.num_tiles, num_m_blocks, attention.batch)
        section = arguments.heads_per_section
        in_last = tile_scheduler.heads_in_last_section(in_all, section)
        kernel.divisors(num_m_blocks * section, section, in_last, heads)
    if arguments.page_table is not None:
        kernel.tensor(arguments.page_table)
        kernel.divisors(inputs.k_cache.shape[1])
    kernel.numbers(arguments.num_splits, arguments.split_blocks)
    for descale in (arguments.k_descale, arguments.v_descale):
        if descale is not None:
            kernel.strided(descale)
    if arguments.kv_block is not None:
        kernel.divisors(arguments.kv_block)
    kernel.end_here()
    key = decode_launch.compile_request(problem, config, arch, is_split)[1]
    program = compiled(key, functools.partial(decode_launch.trace, problem, config, arch, is_split), arch)
    shape = arguments.num_tiles, num_splits, 1
    smem = config.smem_bytes(attention)
    ptx_interpreter.run(program, kernel.values, kernel.memory, shape, config.num_threads, smem, **order)
    return kernel.result(out_at, out), kernel.result(lse_at, lse)


def merge(partial_out, partial_lse, out, lse, sinks, row_warps=None, last_first=False, offsets=None, key=None):
    """What the merge kernel writes to tensors like out and lse.

    Args:
        last_first: whether the last warp of a thread block runs first.
        offsets: cu_seqlens of packed queries.
        key: the key of a kernel that a launch has picked.
    """
    kernel = Parameters()
    kernel.tensor(partial_out, (0, 1, 2, 3, 4))
    kernel.tensor(partial_lse)
    out_at, lse_at = kernel.tensor(out, (0, 1, 2, 3)), kernel.tensor(lse)
    if sinks is not None:
        kernel.tensor(sinks.float())
    if offsets is not None:
        kernel.tensor(offsets)
    num_partials = len(partial_out)
    row_warps = key.row_warps if key is not None else row_warps or merge_launch.row_warps(num_partials)
    aligned_to, dv = launch.vector_bytes(partial_out), out.shape[-1]
    key = key or merge_launch.MergeKey(
        partial_out.dtype, out.dtype, dv, sinks is not None, aligned_to, row_warps, has_offsets=offsets is not None
    )
    blocks, warps = (ceil_div(lse.numel(), merge_launch.ROWS), merge_launch.ROWS)
    if row_warps > 1:
        blocks, warps = lse.numel(), row_warps
    program = compiled(key, functools.partial(merge_launch.trace_merge, key))
    ptx_interpreter.run(program, kernel.values, kernel.memory, blocks, 32 * warps, 1 << 16, warps_reversed=last_first)
    return kernel.result(out_at, out), kernel.result(lse_at, lse)


def append(problem: DecodeProblem, inputs: DecodeInputs):
    """The rotated queries and both caches after the append kernel."""
    q_out = torch.empty_like(inputs.q)
    arguments = append_launch.append_arguments(problem, inputs, q_out)
    lengths = "cache_seqlens", "page_table"
    tensors = ("q", "q_out", "k_new", "v_new", "k_cache", "v_cache", *lengths, "cos", "sin")
    kernel, at = Parameters(), {}
    for name in tensors:
        t = getattr(arguments, name)
        at[name] = None if t is None else kernel.tensor(t, None if name in lengths else tuple(range(t.dim())))
    for descale in (arguments.k_descale, arguments.v_descale):
        if descale is not None:
            kernel.strided(descale)
    if arguments.kv_block is not None:
        kernel.numbers(arguments.kv_block)
    kernel.numbers(arguments.seqlen_new, arguments.rows)
    kernel.end_here()
    key = append_launch.AppendKey.of(problem, inputs, arguments)
    arch = ARCH_E4M3 if key.is_e4m3 else ARCH
    # the assembler stops at 40 registers, which allows 12 thread blocks a multiprocessor
    program = compiled(key, functools.partial(append_launch.trace_append, key), arch, spills=2)
    ptx_interpreter.run(program, kernel.values, kernel.memory, (arguments.num_blocks, 1, 3), 128, 0)
    results = (q_out, inputs.k_cache, inputs.v_cache)
    places = (at["q_out"], at["k_cache"], at["v_cache"])
    return tuple(t if a is None else kernel.result(a, t) for a, t in zip(places, results, strict=True))


def decode(problem: DecodeProblem, inputs: DecodeInputs, num_sms: int = 4):
    """A whole call, kernel after kernel, like in kernels/launch/decode.py. Returns both caches as well."""
    attention = problem.attention
    caches = inputs.k_cache, inputs.v_cache
    if inputs.seqlen_new or inputs.rotary_cos is not None:
        q, *caches = append(problem, inputs)
        inputs = inputs._replace(q=inputs.q if inputs.rotary_cos is None else q, k_cache=caches[0], v_cache=caches[1])
    arch = ARCH_E4M3 if attention.has_e4m3_cache else ARCH
    config = decode_config_sm80(problem.sizing_problem, arch)
    num_splits, split_blocks, is_split = decode_launch.split_plan(problem, config, arch, num_sms)
    out, lse = forward(problem, inputs, num_splits, split_blocks, is_split)
    if is_split:
        like = empty_outputs(attention, AttentionInputs(*inputs[:3]))
        if attention.is_packed:
            like = like[0][None], like[1][None]
        out, lse = merge(out, lse, *like, inputs.sinks, offsets=None if inputs.sinks is None else inputs.cu_seqlens_q)
        if attention.is_packed:
            out, lse = out[0], lse[0]
    return out, lse, *caches

"""Calls without data: whether one would run (`supports`), and compiling the kernels of calls to come (`warmup`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends, choice, decode
from ..errors import REFUSALS, UnsupportedError
from ..kernels.compiler import pool
from ..kernels.compiler.pool import CompiledKernel, Job
from ..kernels.config import ForwardConfig, ForwardConfigSm80, LaunchConfig
from ..ops import quantize
from ..ops.quantize import QuantizedQKV
from ..problem import AttentionProblem
from ..problem.decode import DecodeInputs, DecodeProblem
from ..validation import attention as validation
from ..validation import fp8, tensors
from ..validation.scalars import check_flag, check_int
from . import decode_calls, keywords
from .attention import autocast_inputs


def supports(
    q: Tensor | QuantizedQKV | None = None, k: Tensor | None = None, v: Tensor | None = None, **arguments: Any
) -> backends.Support:
    """Whether `attention` (or, with cu_seqlens_q, `attention_varlen`; with cache_seqlens, `attention_decode`) takes
    these arguments, and why (not).

    Takes the same arguments as the call, k_cache and v_cache also in the places of k and v; computes nothing. Tensors
    on the "meta" device ask about shapes alone.

    Returns: Support(ok, backend, reason), which is true where ok is; with ok=False the reason is the message that the
    call would raise. On Hopper it also says which tensors are copied before the kernel can read them.
    Raises: nothing. Arguments that the call has not, or of a kind that it does not take, are a reason.
    """
    backend = arguments.pop("backend", None)
    if backend is not None and (unknown := choice.refusal(backend)) is not None:
        return backends.Support(False, backend if isinstance(backend, str) else "", f"backend: {unknown}")
    try:
        if decode_calls.is_decode(arguments):
            problem, inputs = decode_calls.problem_of("supports", {"q": q, "k_cache": k, "v_cache": v} | arguments)
            return decode.choose_decode(problem, backend, inputs.q.device)
        return _supports(q, k, v, arguments, backend)
    except REFUSALS as error:
        reason = str(error)
    except Exception as error:  # of torch, say where its driver does not answer
        reason = f"{type(error).__name__}: {error}"
    return backends.Support(False, backend if isinstance(backend, str) else "", reason)


def _supports(q: Any, k: Any, v: Any, arguments: dict[str, Any], backend: str | None) -> backends.Support:
    """`supports` for calls of `attention` and `attention_varlen`; raises as the call would."""
    _refuse_unknown("supports", arguments)
    problem = _problem_of(q, k, v, arguments)
    device = (q.q if isinstance(q, QuantizedQKV) else q).device
    support = dispatch.choose(problem, backend, arguments.get("tuning"), device)
    tensors = [t for t in (q, k, v) if type(t) in (Tensor, torch.nn.Parameter)]
    have_addresses = not torch.compiler.is_compiling() and len(tensors) == 3
    if support.ok and support.backend == "sm90" and have_addresses:
        from ..kernels.launch import forward_sm90 as launch

        if names := launch.copied(*tensors):
            copies = f"; copies {', '.join(names)} first (TMA reads rows at addresses and strides of 16 bytes)"
            return support._replace(reason=support.reason + copies)
    return support


def warmup(
    calls: Mapping[str, Any] | AttentionProblem | Iterable[Mapping[str, Any] | AttentionProblem],
    *,
    backend: str | None = None,
    workers: int | None = None,
    gradients: bool = False,
) -> list[CompiledKernel]:
    """Compile the kernels of calls to come, several at a time, into the disk cache and this process.

        onepass.warmup([dict(q=(2, 4096, 32, 128), k=(2, 4096, 8, 128), v=(2, 4096, 8, 128), dtype=torch.bfloat16,
                             causal=True)])

    One kernel serves many calls. Strides make no difference to it; lengths, and to a backward also the batch and the
    number of heads, only by the choice of its configuration. How many heads of q share one of k is compiled in.

    Args:
        calls: one or several; for each, the arguments of `attention`, `attention_varlen` or (then with cache_seqlens)
            `attention_decode` by name. Instead of a tensor its shape, with `dtype` once for all that are not of
            integers or always float32 (and `cache_dtype` for caches, if theirs is another), or a tensor on the "meta"
            device: these stand for tensors on this machine's GPU, aligned to 16 bytes. Or an `AttentionProblem`.
        backend: for calls that name none. "sm90" compiles for Hopper wherever the compiler is, also without a GPU,
            for machines with the same CPU that get this cache directory; "sm80" for this machine's GPU; None = what the
            calls would run on here.
        workers: processes that compile at the same time; None = one a CPU.
        gradients: also the kernels of the calls' backward passes. Those for a loss that depends on lse are among them
            for a call with return_lse=True, and for an `AttentionProblem`, which does not say.

    Returns: a CompiledKernel for each kernel, in the order of `calls`; of a call its forward comes first (of
        `attention_decode` the kernels in the order in which they run). None for
    calls that run without a kernel (the list is empty where all run on `tiled`), and none for a backward that does.

    Raises: as the calls would, before anything is compiled; UnsupportedError if the kernel compiler is missing.
    """
    if workers is not None:
        workers = check_int("workers", workers, "an int of at least 1 or None", least=1)
    gradients = check_flag("gradients", gradients)
    jobs: list[pool.Job] = []
    for call in calls_of(calls):
        arguments = {} if isinstance(call, AttentionProblem) else dict(call)
        if decode_calls.is_decode(arguments):
            requested = choice.named(arguments.pop("backend", backend))
            problem_inputs = decode_calls.problem_of("warmup", decode_calls.with_tensors(arguments))
            jobs += jobs_of_decode(*problem_inputs, requested)
            continue
        problem, requested, tuning, may_have_dlse = problem_of_call("warmup", call, backend)
        name = dispatch.require_to_compile(problem, requested, tuning)
        if name is not None:
            has_dlse = () if not gradients else (False, True) if may_have_dlse else (False,)
            jobs += jobs_of(name, problem, tuning, has_dlse)
    return pool.compile_all(jobs, workers)


def calls_of(calls: Any) -> list[Mapping[str, Any] | AttentionProblem]:
    """The calls to come that a function was given: several, or one by itself."""
    if isinstance(calls, (Mapping, AttentionProblem)):
        return [calls]
    if not isinstance(calls, Iterable) or isinstance(calls, (str, Tensor)):
        raise TypeError(f"calls: expected the arguments of calls by name, got {calls!r}")
    several = list(calls)
    for i, call in enumerate(several):
        validation.check_call(f"calls[{i}]", call)
    return several


def problem_of_call(
    function: str, call: Mapping[str, Any] | AttentionProblem, backend: str | None
) -> tuple[AttentionProblem, str | None, ForwardConfig | ForwardConfigSm80 | None, bool]:
    """What a call poses on this machine's GPU, if it has one: for functions that take calls to come.

    Args:
        function: its name, for messages. call: as `warmup` takes it. backend: for a call that names none.
    Returns: the problem, the backend that must run, its tuning, and whether lse may have a gradient.
    Raises: as the call would.
    """
    arguments = {} if isinstance(call, AttentionProblem) else dict(call)
    requested, tuning = choice.named(arguments.pop("backend", backend)), arguments.get("tuning")
    may_have_dlse = isinstance(call, AttentionProblem) or arguments.get("return_lse", False)
    problem = call if isinstance(call, AttentionProblem) else _problem_of_shapes(function, arguments)
    if requested in ("sm90", "sm80") or (problem.device_type == "meta" and torch.cuda.is_available()):
        problem = replace(problem, device_type="cuda")
    return problem, requested, tuning, may_have_dlse


_LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")


def _problem_of_shapes(function: str, arguments: dict[str, Any]) -> AttentionProblem:
    """The problem of a call of which some tensors may be given as shapes."""
    missing = [name for name in ("q", "k", "v") if name not in arguments]
    if missing:
        raise TypeError(f"{function}: expected q, k and v in every call, got none for {', '.join(missing)}")
    dtype = arguments.pop("dtype", None)
    for name in ("q", "k", "v", "sinks", *_LENGTHS):
        shape = arguments.get(name)
        if isinstance(shape, (tuple, list)):
            of = torch.int32 if name in _LENGTHS else dtype
            arguments[name] = tensors.tensor_of_shape(name, shape, of)
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    _refuse_unknown(function, arguments)
    return _problem_of(q, k, v, arguments)


_DEFAULTS: dict[str, Any] = {
    "causal": False,
    "window": None,
    "softcap": None,
    "sinks": None,
    "softmax_scale": None,
    "seqused_k": None,
    "deterministic": None,
    "return_lse": False,
    "precision": None,
    "tuning": None,
}
_PACKED_DEFAULTS = {"cu_seqlens_q": None, "cu_seqlens_k": None, "max_seqlen_q": None, "max_seqlen_k": None}


def _is_packed(arguments: dict[str, Any]) -> bool:
    return "cu_seqlens_q" in arguments or "cu_seqlens_k" in arguments


def _refuse_unknown(function: str, arguments: dict[str, Any]) -> None:
    unknown = set(arguments) - set(_DEFAULTS) - (set(_PACKED_DEFAULTS) if _is_packed(arguments) else set())
    if unknown:
        raise keywords.unexpected(function, unknown, "attention or attention_varlen")


def _problem_of(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> AttentionProblem:
    """The problem of a call of `attention` or, with cu_seqlens, of `attention_varlen`; raises as the call would."""
    arguments = _DEFAULTS | (_PACKED_DEFAULTS if _is_packed(arguments) else {}) | arguments
    if isinstance(q, QuantizedQKV):
        return fp8.check_quantized_call(q, k, v, **arguments)
    q, k, v = autocast_inputs(q, k, v)
    precision = arguments.pop("precision")
    check = validation.check_attention_varlen if _is_packed(arguments) else validation.check_attention
    problem = check(q, k, v, **arguments)
    if precision is None:
        return problem
    fp8.check_precision(precision, q)
    return quantize.quantized_problem(problem)


def jobs_of(
    backend: str, problem: AttentionProblem, tuning: LaunchConfig | None = None, has_dlse: Sequence[bool] = ()
) -> list[Job]:
    """The kernels of a forward, then those of its backward for each has_dlse: whether lse has a gradient. None where
    there are no heads."""
    if problem.num_heads_q == 0:
        return []
    forward = tuning or dispatch.forward_config(backend, problem)
    request, *helpers = dispatch.forward_requests(backend, problem, forward)
    jobs = [Job(backend, problem, forward, request), *(Job(backend, problem, None, helper) for helper in helpers)]
    for is_given in has_dlse:
        requests = dispatch.backward_requests(backend, problem, is_given)
        backward = dispatch.backend_of_backward(backend, problem)
        jobs += [Job(backward, problem, config, request) for config, request in requests]
    return jobs


def jobs_of_decode(problem: DecodeProblem, inputs: DecodeInputs, requested: str | None) -> list[Job]:
    """The kernels of a call of `attention_decode`. Raises: UnsupportedError if it cannot run or not be compiled."""
    has_kernels = requested is not None and backends.has_kernels(requested)
    if has_kernels or problem.attention.device_type == "meta":
        device_type = "cuda" if has_kernels or torch.cuda.is_available() else "meta"
        problem = replace(problem, attention=replace(problem.attention, device_type=device_type))
    if has_kernels and not torch.cuda.is_available():
        raise UnsupportedError(f"backend {requested}: expected a GPU, whose size decides the splits, got none")
    name = decode.require_decode(problem, requested)
    requests = decode.decode_requests(name, problem, inputs)
    return [Job(name, problem, config, request) for config, request in requests]

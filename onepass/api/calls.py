"""Calls without data: `supports` says whether a call would run, and `warmup` compiles the kernels of later calls."""

from __future__ import annotations

import inspect
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
from ..kernels.config import ForwardConfigSm80, ForwardConfigSm90, LaunchConfig
from ..ops import quantize
from ..problem import AttentionProblem
from ..problem.arguments import TENSORS, dtype_of_shape
from ..problem.attention import NO_MODIFIERS
from ..problem.decode import DecodeInputs, DecodeProblem
from ..validation.attention import check_call, has_offsets
from ..validation.fp8 import QuantizedQKV
from ..validation.scalars import check_flag, check_int
from ..validation.tensors import tensor_of_shape
from . import decode_calls, keywords, steps
from .attention import attention, attention_varlen


def supports(
    q: Tensor | QuantizedQKV | None = None, k: Tensor | None = None, v: Tensor | None = None, **arguments: Any
) -> backends.Support:
    """Whether a call with these arguments would run, on which backend, and why (or why not).

    The call is one of `attention`; with cu_seqlens_q one of `attention_varlen`; with cache_seqlens one of
    `attention_decode`, whose k_cache and v_cache may also be passed as k and v. The arguments are those of the call,
    and nothing is computed. Tensors on the "meta" device ask about shapes alone.

    Returns: Support(ok, backend, reason), which is true where ok is; with ok=False the reason is the message that the
    call would raise. On Hopper it also says which tensors are copied before the kernel can read them.
    Raises: nothing. An argument that the call does not have, or whose type it does not take, becomes a reason.
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
    except Exception as error:  # raised by torch, for example where the driver does not answer
        reason = f"{type(error).__name__}: {error}"
    return backends.Support(False, backend if isinstance(backend, str) else "", reason)


def _supports(q: Any, k: Any, v: Any, arguments: dict[str, Any], backend: str | None) -> backends.Support:
    """`supports` for calls of `attention` and `attention_varlen`; raises what the call would raise."""
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
    calls: Mapping[str, Any] | AttentionProblem | Iterable[Mapping[str, Any] | AttentionProblem] | None = None,
    *,
    backend: str | None = None,
    workers: int | None = None,
    gradients: bool = False,
    **call: Any,
) -> list[CompiledKernel]:
    """Compile the kernels of calls to come, several at a time, into the disk cache and this process.

        onepass.warmup(q=(2, 4096, 32, 128), k=(2, 4096, 8, 128), v=(2, 4096, 8, 128), causal=True,
                       dtype=torch.bfloat16)

    One kernel serves many calls. It does not depend on strides. It depends on lengths (a backward also on the batch and
    the number of heads) only through the choice of its configuration. The number of heads of q that share a head of k
    is compiled in.

    Args:
        calls: several calls, or one; without it the keyword arguments are one call. For each, the arguments of
            `attention`, `attention_varlen` or (with cache_seqlens) `attention_decode` by name, or an
            `AttentionProblem`. Instead of a tensor the arguments may have its shape, or a tensor on the "meta" device:
            both stand for a tensor on this machine's GPU, aligned to 16 bytes. With shapes, `dtype` is given once for
            all tensors that are neither integers nor always float32, and `cache_dtype` for caches of another dtype.
        backend: backend of the calls that name none. "sm90" compiles for Hopper wherever the compiler is installed,
            even without a GPU, for machines that get this cache directory (on x86-64, with any CPU); "sm80" compiles
            for this machine's GPU; None = the backend that the calls would run on here.
        workers: processes that compile at the same time; None = one per CPU.
        gradients: also compile the kernels of the calls' backward passes. They include kernels for a loss that depends
            on lse for a call with return_lse=True, and for an `AttentionProblem`, which does not say. Slopes and a bias
            have gradients if they are tensors that require one; other kernels run if they do not.

    Returns: a CompiledKernel for each kernel, in the order of `calls`; within a call the forward comes first (for
    `attention_decode` the kernels come in the order in which they run). Calls and backward passes that run without a
    kernel have none, so the list is empty if all run on `tiled`.

    Raises: what the calls would raise, before anything is compiled; UnsupportedError if the kernel compiler is missing.
    """
    if workers is not None:
        workers = check_int("workers", workers, "an int of at least 1 or None", least=1)
    gradients = check_flag("gradients", gradients)
    jobs: list[pool.Job] = []
    for one in calls_of(given_calls("warmup", calls, call)):
        arguments = {} if isinstance(one, AttentionProblem) else dict(one)
        if decode_calls.is_decode(arguments):
            requested = choice.named(arguments.pop("backend", backend))
            decode_problem, inputs = decode_calls.problem_of("warmup", decode_calls.with_tensors(arguments))
            jobs += jobs_of_decode(decode_problem, inputs, requested)
            continue
        problem, requested, tuning, may_have_dlse = problem_of_call("warmup", one, backend, gradients)
        name = dispatch.require_to_compile(problem, requested, tuning)
        if name is not None:
            has_gradients = gradients and not isinstance(arguments.get("q"), QuantizedQKV)
            has_dlse = () if not has_gradients else (False, True) if may_have_dlse else (False,)
            jobs += jobs_of(name, problem, tuning, has_dlse)
    return pool.compile_all(jobs, workers)


def given_calls(function: str, calls: Any, call: dict[str, Any]) -> Any:
    """The calls that a function such as `warmup` was given: its argument `calls`, or one call by keyword arguments.

    Raises: TypeError for both, or neither.
    """
    if calls is not None and call:
        raise TypeError(
            f"{function}: expected calls, or the arguments of one call by name, got both: {', '.join(call)}"
        )
    if calls is None and not call:
        raise TypeError(f"{function}: expected calls, or the arguments of one call by name, got neither")
    return call if calls is None else calls


def calls_of(calls: Any) -> list[Mapping[str, Any] | AttentionProblem]:
    """The calls that a function such as `warmup` was given, several or a single one, as a list."""
    if isinstance(calls, (Mapping, AttentionProblem)):
        return [calls]
    if not isinstance(calls, Iterable) or isinstance(calls, (str, Tensor)):
        raise TypeError(f"calls: expected the arguments of calls by name, got {calls!r}")
    several = list(calls)
    for i, call in enumerate(several):
        check_call(f"calls[{i}]", call)
    return several


def problem_of_call(
    function: str, call: Mapping[str, Any] | AttentionProblem, backend: str | None, gradients: bool = False
) -> tuple[AttentionProblem, str | None, ForwardConfigSm90 | ForwardConfigSm80 | None, bool]:
    """The problem of a call without data, on this machine's GPU if it has one.

    Args:
        function: name of the public function, for messages. call: an element of `warmup`'s `calls`.
        backend: the backend of a call that names none.
        gradients: whether the call's gradients are used, whatever its tensors require.
    Returns: the problem, the backend that must run, its tuning, and whether lse may have a gradient.
    Raises: what the call would raise.
    """
    arguments = {} if isinstance(call, AttentionProblem) else dict(call)
    requested, tuning = choice.named(arguments.pop("backend", backend)), arguments.get("tuning")
    may_have_dlse = isinstance(call, AttentionProblem) or arguments.get("return_lse", False)
    problem = call if isinstance(call, AttentionProblem) else _problem_of_shapes(function, arguments)
    if gradients and arguments.get("precision") is not None:
        assert problem.quantization is not None
        problem = replace(problem, quantization=replace(problem.quantization, exact_lse=True))
    if requested in ("sm90", "sm80") or (problem.device_type == "meta" and torch.cuda.is_available()):
        problem = replace(problem, device_type="cuda")
    return problem, requested, tuning, may_have_dlse


def _problem_of_shapes(function: str, arguments: dict[str, Any]) -> AttentionProblem:
    """The problem of a call in which some tensors may be given as shapes."""
    missing = [name for name in ("q", "k", "v") if name not in arguments]
    if missing:
        raise TypeError(f"{function}: expected q, k and v in every call, got none for {', '.join(missing)}")
    dtype = arguments.pop("dtype", None)
    for name in ("q", "k", "v", *TENSORS):
        shape = arguments.get(name)
        if isinstance(shape, (tuple, list)):
            arguments[name] = tensor_of_shape(name, shape, dtype_of_shape(name, dtype))
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    _refuse_unknown(function, arguments)
    return _problem_of(q, k, v, arguments)


def _refuse_unknown(function: str, arguments: dict[str, Any]) -> None:
    called = attention_varlen if has_offsets(arguments) else attention
    unknown = set(arguments) - set(inspect.signature(called).parameters)
    if unknown:
        raise keywords.unexpected(function, unknown, called.__name__)


def _problem_of(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> AttentionProblem:
    """The problem of a call of `attention` or, with cu_seqlens, `attention_varlen`; raises what the call would."""
    inputs, problem = steps.check(q, k, v, arguments)
    if isinstance(q, QuantizedQKV):
        return problem
    if arguments.get("precision") is None:
        given = inputs.modifiers or NO_MODIFIERS
        slopes, bias = (t is not None and not t.requires_grad for t in (given.alibi_slopes, given.bias))
        return replace(problem, constant_slopes=slopes, constant_bias=bias)
    is_recording = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in inputs[:4])
    return quantize.quantized_problem(problem, exact_lse=is_recording or bool(arguments.get("return_lse")))


def jobs_of(
    backend: str, problem: AttentionProblem, tuning: LaunchConfig | None = None, has_dlse: Sequence[bool] = ()
) -> list[Job]:
    """The kernels to compile for a forward, then the kernels for its backward; none if there are no heads.

    Args:
        has_dlse: for each backward to compile, whether lse has a gradient.
    """
    if problem.num_heads_q == 0:
        return []
    # the forward does not depend on which gradients a backward leaves out
    own = replace(problem, constant_slopes=False, constant_bias=False)
    forward = tuning or dispatch.forward_config(backend, own)
    request, *helpers = dispatch.forward_requests(backend, own, forward)
    jobs = [Job(backend, own, forward, request), *(Job(backend, own, None, helper) for helper in helpers)]
    if (quantization := problem.quantization) is not None:
        # the gradients of attention(..., precision="fp8") are those of its 16-bit tensors
        problem = replace(problem, dtype=quantization.out_dtype, quantization=None)
    for is_with_dlse in has_dlse:
        requests = dispatch.backward_requests(backend, problem, is_with_dlse)
        backward = dispatch.backend_of_backward(backend, problem)
        jobs += [Job(backward, problem, config, request) for config, request in requests]
    return jobs


def jobs_of_decode(problem: DecodeProblem, inputs: DecodeInputs, requested: str | None) -> list[Job]:
    """The kernels to compile for a call of `attention_decode`.

    Raises: UnsupportedError if the call cannot run, or its kernels cannot be compiled here.
    """
    has_kernels = requested is not None and backends.has_kernels(requested)
    if has_kernels or problem.attention.device_type == "meta":
        device_type = "cuda" if has_kernels or torch.cuda.is_available() else "meta"
        problem = replace(problem, attention=replace(problem.attention, device_type=device_type))
    if has_kernels and not torch.cuda.is_available():
        raise UnsupportedError(f"backend {requested}: expected a GPU, whose size decides the splits, got none")
    name = decode.require_decode(problem, requested)
    requests = decode.decode_requests(name, problem, inputs)
    return [Job(name, problem, config, request) for config, request in requests]

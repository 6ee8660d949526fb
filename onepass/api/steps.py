"""A checked call of `attention` or `attention_varlen`, and its two steps: forward and backward.

The public functions run the forward. Rings and pipelines in other libraries call the two steps separately: they merge
partial outputs between the steps, or run one of them twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import backends, choice
from ..geometry import philox
from ..kernels.config import LaunchConfig
from ..namespace import OPERATORS
from ..ops import attention as ops
from ..ops import fp8 as fp8_ops
from ..ops import quantize
from ..ops.autocast import autocast_inputs
from ..problem import AttentionInputs, AttentionProblem
from ..problem.attention import NO_MODIFIERS
from ..validation import fp8
from ..validation.attention import check_attention
from ..validation.fp8 import QuantizedQKV


class Steps(NamedTuple):
    """A checked call.

    Attributes:
        problem: that of the call without its precision.
        backend: its name. requested: the backend that the call itself names, or None.
        fp8_backend: with precision="fp8", the name of the backend of the forward; `backend` computes the gradients.
        returns_lse: whether the caller uses lse.
    """

    inputs: AttentionInputs
    problem: AttentionProblem
    backend: str
    requested: str | None = None
    tuning: LaunchConfig | None = None
    fp8_backend: str | None = None
    returns_lse: bool = False

    @property
    def dropout_state(self) -> Tensor | None:
        """(2,) int64, seed and offset; None without dropout."""
        return None if self.inputs.modifiers is None else self.inputs.modifiers.dropout_state

    def _options(self) -> ops.Options:
        return ops.options_of(self.problem, choice.backend_argument(self.backend, self.requested), self.tuning)

    def forward(self) -> tuple[Tensor, Tensor]:
        """out and lse, as `attention` or `attention_varlen` returns them, and as differentiable."""
        options, quantization = self._options(), self.problem.quantization
        if quantization is not None:
            return OPERATORS.attention_quantized(*fp8_ops.arguments_of(self.inputs, quantization, options))
        arguments = ops.arguments_of(self.inputs, self.problem, options)
        if self.fp8_backend is not None:
            backend = choice.backend_argument(self.fp8_backend, self.requested)
            return OPERATORS.attention_fp8(*arguments, backend, self.returns_lse)
        if self.inputs.modifiers is not None:
            return OPERATORS.attention_modified_forward(*arguments)
        return OPERATORS.attention_forward(*arguments)

    def prepared(self) -> backends.Forward:
        """The forward for calls like this one without gradients. It holds no tensor, and checks none."""
        problem, device, tuning = self.problem, self.inputs.q.device, self.tuning
        if self.fp8_backend is not None:
            return quantize.prepare_call(self.fp8_backend, problem, self.inputs, tuning, self.returns_lse)
        forward = dispatch.prepare(self.backend, problem, device, tuning)
        return (lambda inputs: forward(with_dropout_state(inputs))) if problem.dropout_p else forward

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gradients dq, dk, dv and dsinks (of size 0 without sinks) that follow from dout and dlse.

        Args:
            dout, out: in the shape of the forward's out. lse, dlse: in the shape of the forward's lse. out and lse may
                belong to attention over more keys than the call has; the call computes a partial of it.
        """
        arguments = ops.arguments_of(self.inputs, self.problem, self._options())
        results = dout, dlse, out, lse.contiguous()
        if self.inputs.modifiers is not None:
            return OPERATORS.attention_modified_backward(*results, True, True, *arguments)[:4]
        return OPERATORS.attention_backward(*results, *arguments)


def with_dropout_state(inputs: AttentionInputs, state: Tensor | None = None) -> AttentionInputs:
    """The inputs of a call with dropout. Args: state: seed and offset; None: they are drawn here."""
    state = philox.random_state(inputs.q.device) if state is None else state
    return inputs._replace(modifiers=(inputs.modifiers or NO_MODIFIERS)._replace(dropout_state=state))


def check(q: Any, k: Any, v: Any, arguments: dict[str, Any]) -> tuple[AttentionInputs, AttentionProblem]:
    """The tensors of a call, cast under autocast, and its problem. Raises: what the call raises.

    Args: arguments: those of `attention` or, with offsets, of `attention_varlen`, but for the backend.
    """
    if isinstance(q, QuantizedQKV):
        return fp8.check_quantized_call(q, k, v, **arguments)
    return check_attention(*autocast_inputs(q, k, v), **arguments)


def prepare(
    q: Any, k: Any, v: Any, /, *, backend: str | None = None, dropout_state: Tensor | None = None, **arguments: Any
) -> Steps:
    """Check a call of `attention` or, with offsets, of `attention_varlen`; choose its backend.

    Args:
        dropout_state: seed and offset of an earlier call with dropout; None: they are drawn here.
        arguments: the others of `attention_varlen`; those that are left out have their defaults.

    Raises: what `attention_varlen` raises.
    """
    inputs, problem = check(q, k, v, arguments)
    device, tuning, fp8_backend = inputs.q.device, arguments.get("tuning"), None
    returns_lse = bool(arguments.get("return_lse"))
    if arguments.get("precision") is None:
        name = dispatch.require(problem, backend, tuning, device)
    else:
        fp8_backend = dispatch.require(quantize.quantized_problem(problem, returns_lse), backend, tuning, device)
        name = dispatch.require(problem, backend, None, device)
    if problem.dropout_p:
        inputs = with_dropout_state(inputs, dropout_state)
    return Steps(inputs, problem, name, backend, tuning, fp8_backend, returns_lse)

"""The two steps of a call, forward and backward, for callers that keep out, lse and the state of dropout themselves.

Rings and pipelines in other libraries call the two steps separately: they merge partial outputs between the steps, or
run one of them twice. All other callers use `attention` and `attention_varlen`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..dispatch import attention as dispatch
from ..dispatch import choice
from ..geometry import philox
from ..namespace import OPERATORS
from ..ops import attention as ops
from ..ops import modified
from ..problem import AttentionInputs, AttentionProblem, ModifiedInputs, Modifiers
from ..validation.attention import check_attention, check_attention_varlen
from ..validation.modifiers import NAMES
from .attention import autocast_inputs


@dataclass(frozen=True)
class Steps:
    """A checked call.

    Attributes:
        arguments: the arguments that the operators of forward and backward share: tensors (q, k and v first), then
            options.
        dropout_state: (2,) int64, seed and offset; None without dropout.
    """

    problem: AttentionProblem
    arguments: tuple
    dropout_state: Tensor | None = None

    def forward(self) -> tuple[Tensor, Tensor]:
        """out and lse, as `attention` or `attention_varlen` returns them, and as differentiable."""
        if self.problem.has_modifiers:
            return OPERATORS.attention_modified_forward(*self.arguments)
        return OPERATORS.attention_forward(*self.arguments)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None) -> tuple[Tensor, ...]:
        """The gradients dq, dk, dv and dsinks (of size 0 without sinks) that follow from dout and dlse.

        Args:
            dout, out: in the shape of the forward's out. lse, dlse: in the shape of the forward's lse. out and lse may
                belong to attention over more keys than the call has; the call computes a partial of it.
        """
        lse = lse.contiguous()
        if self.problem.has_modifiers:
            gradients = OPERATORS.attention_modified_backward(dout, dlse, out, lse, True, True, *self.arguments)
        else:
            gradients = OPERATORS.attention_backward(dout, dlse, out, lse, *self.arguments)
        return gradients[:4]


def prepare(
    q: Any,
    k: Any,
    v: Any,
    /,
    *,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    softmax_scale: Any = None,
    seqused_k: Any = None,
    deterministic: Any = None,
    dropout_p: Any = 0.0,
    dropout_state: Tensor | None = None,
    modifiers: Mapping[str, Any] | None = None,
) -> Steps:
    """Check a call of `attention` or, with offsets, of `attention_varlen`; cast it under autocast; choose its backend.

    Args:
        dropout_state: seed and offset of an earlier call with dropout; None: they are drawn here.
        modifiers: seqstart_k, key_ranges, q_positions, alibi_slopes and bias, by name.
        All others: as for `attention_varlen`.

    Raises: what `attention_varlen` raises.
    """
    q, k, v = autocast_inputs(q, k, v)
    given = {name: (modifiers or {}).get(name) for name in NAMES}
    options = {
        "causal": causal,
        "window": window,
        "softcap": softcap,
        "sinks": sinks,
        "softmax_scale": softmax_scale,
        "seqused_k": seqused_k,
        "deterministic": deterministic,
        "return_lse": True,
        "tuning": None,
        "modifiers": {"given": given, "dropout_p": dropout_p},
    }
    if cu_seqlens_q is None and cu_seqlens_k is None:
        problem = check_attention(q, k, v, **options)
    else:
        packed = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
        packed |= {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        problem = check_attention_varlen(q, k, v, **packed, **options)
    backend = choice.backend_argument(dispatch.require(problem, None, None, q.device), None)
    operator_options = ops.options_of(problem, backend)
    inputs = AttentionInputs(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, seqused_k)
    if not problem.has_modifiers:
        return Steps(problem, (*inputs, *operator_options))
    if problem.dropout_p and dropout_state is None:
        dropout_state = philox.random_state(q.device)
    state = dropout_state if problem.dropout_p else None
    modified_inputs = ModifiedInputs(*inputs, Modifiers(**given, dropout_state=state))
    arguments = modified.arguments_of(modified_inputs, problem.dropout_p, operator_options)
    return Steps(problem, arguments, state)

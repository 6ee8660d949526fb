"""The derivative of an operator, for `backward()` and for the reverse mode of `torch.func` alike.

`torch.library.register_autograd` gives an operator a rule that `torch.func.grad`, `vjp` and `jacrev` refuse, because
torch puts it into an autograd.Function whose forward and setup of the context are one. Here the operator's own kernel
for autograd makes the node, as torch's built-in operators do: one node for each level of `torch.func`, each of which
sees the tensors of its level and calls the next one below.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._C._functorch import peek_interpreter_stack
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..namespace import NAMESPACE, OPERATORS
from ..validation.lost_gradients import refuse_forward_mode

_library = torch.library.Library(NAMESPACE, "FRAGMENT")


class _Recording:
    """Whether an operator is running whose gradients autograd will ask for. Threads share it: it is a hint."""

    is_on = False


def is_recording() -> bool:
    """Whether the operator that runs now has inputs that require a gradient."""
    return _Recording.is_on


def register_gradient(
    name: str,
    implementation: Callable,
    backward: Callable,
    setup_context: Callable | None = None,
    recorded: Callable[..., tuple] | None = None,
) -> None:
    """Give the operator onepass::name its derivative, as `torch.library.register_autograd` does.

    Args:
        implementation: of the operator, for tensors on devices.
        backward: (ctx, *gradients of outputs) -> gradients of inputs, None where there is none.
        setup_context: (ctx, inputs, output), called after the operator: saves what backward needs.
        recorded: inputs -> those that the operator gets where gradients are recorded; None: the same.
    """
    op = getattr(OPERATORS, name).default

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, keyset: Any, is_one_level: bool, *inputs: Any) -> Any:
            inputs = inputs if recorded is None else recorded(*inputs)
            # autograd records nothing here; the levels below make, or refuse, nodes of their own
            _Recording.is_on = True
            try:
                with torch.set_grad_enabled(is_one_level), forward_ad._set_fwd_grad_enabled(is_one_level):
                    output = _below_autograd(op, implementation, keyset, inputs)
            finally:
                _Recording.is_on = False
            if setup_context is not None:
                setup_context(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple:
            return None, None, *backward(ctx, *gradients)

    Rule.__name__ = Rule.__qualname__ = f"onepass_{name}"

    def autograd_kernel(keyset: Any, *inputs: Any) -> Any:
        refuse_forward_mode(*(t for t in inputs if isinstance(t, torch.Tensor)))
        if not (torch.is_grad_enabled() and _C._any_requires_grad(*inputs)):
            return _below_autograd(op, implementation, keyset, inputs)
        if peek_interpreter_stack() is None:
            return Rule.apply(keyset, False, *inputs)
        with enable_single_level_autograd_function():
            # Function.apply would hand the call back to torch.func, which called this kernel
            return super(torch.autograd.Function, Rule).apply(keyset, True, *inputs)

    _library.impl(name, autograd_kernel, "Autograd", with_keyset=True)


def _below_autograd(op: Any, implementation: Callable, keyset: Any, inputs: tuple) -> Any:
    with _C._AutoDispatchBelowAutograd():
        if (keyset & _C._after_ADInplaceOrView_keyset).highestPriorityTypeId() in _DEVICES:
            return implementation(*inputs)  # what the dispatcher would call, which takes 6 us
        return op.redispatch(keyset & _C._after_autograd_keyset, *inputs)


def is_direct(*tensors: torch.Tensor | None) -> bool:
    """Whether an operator of these tensors would come to its implementation, with nothing recorded, traced or mapped.

    A backward that calls the implementation itself saves the way through the dispatcher, a fifth of its CPU time.
    """
    return (
        not torch.is_grad_enabled()
        and _C._len_torch_dispatch_stack() == _C._len_torch_function_stack() == 0
        and peek_interpreter_stack() is None
        and not _C._autograd._profiler_enabled()
        and all(t is None or type(t) is torch.Tensor for t in tensors)
    )


# No mode, no subclass of Tensor, and no transformation is between a call and its implementation for these devices.
_DEVICES = _C.DispatchKey.CPU, _C.DispatchKey.CUDA

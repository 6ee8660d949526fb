"""Conventions that flash-attn's versions share and that differ from those of onepass."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..validation import tensors
from ..validation.scalars import LARGEST_BLOCK, check_flag, check_int, is_real

Window = tuple[int | None, int | None]
QV = "onepass does not add the scores of qv and v"


def pair_of(window_size: Any) -> Window:
    """The two sides of a window, as Python values.

    Args:
        window_size: a tuple, a list, a tensor or an array of two. Tensors are read, which waits for their device.
    """
    sides = window_size
    if isinstance(window_size, Tensor):
        sides = _values_of(window_size)
    elif type(window_size).__module__ == "numpy" and hasattr(window_size, "tolist"):
        sides = window_size.tolist()
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"window_size: expected a pair (left, right) of int, got {window_size!r}")
    left, right = (_values_of(side) if isinstance(side, Tensor) else side for side in sides)
    return _checked_side("window_size", left, " for its left side"), _checked_side(
        "window_size", right, " for its right side"
    )


def pair_of_sides(window_size_left: Any, window_size_right: Any) -> Window:
    """The two sides of a window, from two arguments."""
    return _checked_side("window_size_left", window_size_left), _checked_side("window_size_right", window_size_right)


def _checked_side(name: str, side: Any, where: str = "") -> int | None:
    return None if side is None else check_int(name, side, f"an int or None{where}")


def _values_of(t: Tensor) -> Any:
    """A tensor of integers as a number or a list."""
    tensors.check_tensor("window_size", t)
    if t.is_meta or t.dim() > 1 or t.is_floating_point() or t.is_complex():
        raise TypeError(f"window_size: expected a pair of int, got {t.dtype} of shape {tuple(t.shape)} on {t.device}")
    return t.tolist()


def opened(window: Window) -> Window:
    """A window for `onepass.attention`, from one in which a negative side is unbounded."""
    left, right = (None if side is None or side < 0 else side for side in window)
    return left, right


def softcap_of(softcap: Any) -> Any:
    """The softcap for `onepass.attention`: 0 and negative numbers mean that there is none."""
    return None if softcap is None or (is_real(softcap) and softcap <= 0) else softcap


def options_of(
    softmax_scale: Any, causal: Any, window: Window, softcap: Any, causal_name: str = "causal"
) -> dict[str, Any]:
    """The scale and the mask as arguments of `onepass.attention`. Args: window: its negative sides are unbounded."""
    return {
        "softmax_scale": softmax_scale,
        "causal": check_flag(causal_name, causal),
        "window": opened(window),
        "softcap": softcap_of(softcap),
    }


def unpack(name: str, packed: Any, count: int, rank: int) -> tuple[Any, ...]:
    """Views of the tensors stacked in the third dimension from the end, (..., count, num_heads, head_dim)."""
    tensors.check_tensor(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        leading = "(batch, seqlen" if rank == 5 else "(total_tokens"
        raise ValueError(f"{name}: expected shape {leading}, {count}, num_heads, head_dim), got {tuple(packed.shape)}")
    return packed.unbind(-3)


def lengths_between(name: str, cu_seqlens: Any) -> Tensor:
    """The lengths of sequences from their offsets (batch + 1,), computed on the device of the offsets."""
    tensors.check_tensor(name, cu_seqlens, "an int32 torch.Tensor")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1:
        given = f"{cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        raise TypeError(f"{name}: expected an int32 torch.Tensor of shape (batch + 1,), got {given}")
    return cu_seqlens.diff()


def check_per_entry(name: str, t: Any, batch: int, device: torch.device) -> None:
    """Check an int32 tensor of one number for each batch entry, or None."""
    if t is not None:
        tensors.check_int32(name, t, (batch,), "one per batch entry or sequence", device)


def check_chunk(attention_chunk: Any) -> int:
    """The number of keys of a chunk, checked; 0: there are no chunks."""
    return min(check_int("attention_chunk", attention_chunk, least=0), LARGEST_BLOCK)


def check_into(name: str, t: Any, q: Any, v: Any) -> None:
    """Check a tensor that out is written into, or None."""
    for tensor_name, tensor in (("q", q), ("v", v)):
        tensors.check_tensor(tensor_name, tensor)
    expected = (*q.shape[:-1], *v.shape[-1:])
    if t is not None and tuple(tensors.check_tensor(name, t).shape) != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {tuple(t.shape)}")


def check_hints(*, num_splits: Any = None, pack_gqa: Any = None, sm_margin: Any = 0) -> None:
    """Check the arguments that tell flash-attn how to compute a result; they have no effect in onepass."""
    if num_splits is not None:
        check_int("num_splits", num_splits)
    check_flag("pack_gqa", pack_gqa, allow_none=True)
    check_int("sm_margin", sm_margin, least=0)


def refuse(because: str, **arguments: Any) -> None:
    """Raise NotImplementedError for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            given = "a tensor" if isinstance(value, Tensor) else repr(value)
            raise UnsupportedError(f"{name}: expected None, got {given}: {because}")


class _Arguments:
    """The arguments of a call as attributes; unlike types.SimpleNamespace, torch.compile can trace it."""

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        for name, value in values:
            setattr(self, name, value)


def takes(arguments: str) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Let a function of one object, whose attributes are the arguments, be called as flash-attn's function of its name.

    Args: arguments: the parameters of flash-attn's function, as Python writes them.
    """
    signature = inspect.signature(eval(f"lambda {arguments}: None"))
    in_order = eval(f"lambda {arguments}: ({', '.join(signature.parameters)},)")

    def decorate(function: Callable[[Any], Any]) -> Callable[..., Any]:
        in_order.__qualname__ = function.__name__  # which messages about wrong arguments say

        @functools.wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            return function(_Arguments(zip(signature.parameters, in_order(*given, **named), strict=True)))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def takes_schema(schema: str) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """`takes`, with the arguments of the schema of an operator, which the function has as its attribute `schema`."""
    arguments = torch._C.parse_schema(f"function{schema}").arguments
    defaults = (f"={a.default_value!r}" if a.has_default_value() else "" for a in arguments)
    decorate = takes(", ".join(a.name + default for a, default in zip(arguments, defaults, strict=True)))

    def decorate_with_schema(function: Callable[[Any], Any]) -> Callable[..., Any]:
        function.schema = schema  # type: ignore[attr-defined]
        return decorate(function)

    return decorate_with_schema


class _WithoutBackward(torch.autograd.Function):
    """The identity, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, function: str, *inputs: Tensor) -> Tensor:
        ctx.function = function
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise UnsupportedError(f"{ctx.function} has no backward: its result cannot be differentiated")


def without_backward(function: str, out: Tensor, *inputs: Any) -> Tensor:
    """out, through which a backward pass raises if gradients are recorded and one of the inputs requires one.

    Args:
        function: what has no backward, for the message.
        inputs: arguments of the call; the ones that are no tensors have no effect.
    """
    if not torch.is_grad_enabled():
        return out
    recorded = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    return _WithoutBackward.apply(out, function, *recorded) if recorded else out


def detached(*arguments: Any) -> Any:
    """The arguments as a tuple, with tensors detached from their history."""
    return tuple(t.detach() if isinstance(t, Tensor) else t for t in arguments)

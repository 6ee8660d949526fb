"""The backward of flash-attn's private functions: gradients from out and lse, written into given tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...api import steps
from ...errors import REFUSALS, renamed
from ...ops.autocast import without_autocast
from ...validation import tensors
from .. import conventions
from ..calls import NAMES
from ..sequences import Arranged, Lengths

Buffers = tuple[Tensor | None, Tensor | None, Tensor | None]


def check_results(q: Tensor, v: Tensor, dout: Any, out: Any, stats: dict[str, Any]) -> None:
    """Check the results of a forward, in the shapes of the call. Args: stats: as for `check_stats`."""
    tensors.check_tensors({"q": q, "dout": dout, "out": out})
    expected = (*q.shape[:-1], *v.shape[-1:])
    for name, t in (("dout", dout), ("out", out)):
        if tuple(t.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, got {tuple(t.shape)}")
    check_stats(q, stats)


def check_stats(q: Tensor, stats: dict[str, Any]) -> None:
    """Check lse and its gradient dlse, which may be None, by name, in the shapes of the call."""
    expected = (*q.shape[:-3], *q.shape[-2:-1], *q.shape[-3:-2])
    for name, t in stats.items():
        if t is None and name == "dlse":
            continue
        tensors.check_tensor(name, t)
        if not t.is_floating_point() or t.device != q.device:
            raise TypeError(f"{name}: expected floating point on {q.device} like q, got {t.dtype} on {t.device}")
        if tuple(t.shape) != expected:
            raise ValueError(f"{name}: expected shape {expected}, one for each row of out, got {tuple(t.shape)}")


def check_buffers(inputs: tuple[Tensor, ...], buffers: Buffers) -> None:
    """Check the tensors that dq, dk and dv are copied into; each may be None."""
    for name, t, buffer in zip(("dq", "dk", "dv"), inputs, buffers, strict=True):
        if buffer is not None and tensors.check_tensor(name, buffer).shape != t.shape:
            raise ValueError(f"{name}: expected shape {tuple(t.shape)}, got {tuple(buffer.shape)}")


def gradients(
    call: steps.Steps, dout: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None = None
) -> tuple[Tensor, ...]:
    """dq, dk, dv and dsinks of a call."""
    with torch.no_grad():
        return call.backward(dout, out, lse, dlse)


def into_buffers(found: tuple[Tensor, ...], inputs: tuple[Tensor, ...], buffers: Buffers) -> tuple[Tensor, ...]:
    """dq, dk and dv in the shapes of q, k and v. If there is a buffer, it gets the gradient and is returned."""
    shaped = [g.reshape(t.shape) for g, t in zip(found, inputs, strict=True)]
    with torch.no_grad():
        return tuple(g if b is None else b.copy_(g) for g, b in zip(shaped, buffers, strict=True))


def row_sums(dout: Tensor, out: Tensor) -> Tensor:
    """The float32 sums of dout * out over head_dim, (batch, num_heads, seqlen_q) or (num_heads, total_q)."""
    with without_autocast(out.device.type):
        return torch.linalg.vecdot(dout.float(), out.float()).transpose(-1, -2)


def padded_rows(sums: Tensor, length: int) -> Tensor:
    """Sums of rows with zeros behind them, up to a length of the last dimension."""
    return torch.nn.functional.pad(sums, (0, length - sums.shape[-1]))


def backward(
    dout: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    lse: Tensor,
    buffers: Buffers,
    lengths: Lengths,
    options: dict[str, Any],
    dlse: Tensor | None = None,
    lse_name: str = "softmax_lse",
) -> tuple[tuple[Tensor, ...], Tensor]:
    """dq, dk and dv in the shapes of q, k and v, and dsinks (of size 0 without sinks).

    Args:
        buffers: for each of dq, dk and dv the tensor that it is copied into and that is then returned, or None.
        options: options of `onepass.attention`. lse_name: the name of the argument lse, for messages.
    """
    q, k, v, dout, out, lse, dlse = conventions.detached(*inputs, dout, out, lse, dlse)
    try:
        call = Arranged(q, k, v, lengths)
        prepared = steps.prepare(*call.tensors, **call.options, **options)
    except REFUSALS as error:
        raise renamed(error, NAMES) from None
    check_results(q, v, dout, out, {lse_name: lse, "dlse": dlse})
    check_buffers((q, k, v), buffers)
    dlse = None if dlse is None else call.stats(dlse)
    *found, dsinks = gradients(prepared, call.rows(dout), call.rows(out), call.stats(lse), dlse)
    return into_buffers(tuple(found), (q, k, v), buffers), dsinks

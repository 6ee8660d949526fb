"""The effect that one rounding of every intermediate can have: the floor under error budgets in degenerate cases.

Where terms cancel (one key: ds = p (dp - delta) = 0 whatever the data), plain PyTorch may be exact by luck, and a
multiple of its error is no budget. The floor then comes from the terms before they cancel: the sum of their absolute
values, each off by one rounding of the accumulation dtype. A wrong mask, scale or head is off by orders of magnitude
more, and so are TF32 or bfloat16 products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import reference
from ..problem import Mask

# Kernels compute 2^x and the logarithm of a sum with ex2.approx and lg2.approx, each off by up to 2^-22, which is two
# roundings of float32 (PTX ISA). The functions of a CPU are off by about one rounding.
GPU_EXPONENTIAL = 4


def rounding_terms(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor, oracle: reference.Reference, **options
) -> dict[str, Tensor]:
    """Sums of absolute terms in out, dq, dk, dv and dsinks of one dense call, for each element or row of elements.

    dq, dk and dsinks are made from delta = dout . out, and out has been rounded to its dtype. The errors of this
    rounding are larger, but independent of one another: "dq of out" and so on are the roots of the sums of their
    squares, times 2, for one rounding of out. They show where one probability of a row is close to 1 and all others are
    close to 0.

    "dv of steps" and so on are what float16 loses of small probabilities and of ds before a matrix product: below its
    normal numbers its numbers are equally far apart.

    Args: those of `reference.attention`, the gradients of out and lse, and the oracle's result for the call.

    Returns: float64 tensors that broadcast to out, dq, dk, dv and dsinks.
    """
    batch, seqlen_q, num_heads_q, head_dim = q.shape
    group = num_heads_q // max(1, k.shape[2])
    scale = abs(options.get("softmax_scale") or head_dim**-0.5)
    softcap, sinks = options.get("softcap"), options.get("sinks")
    step = torch.finfo(q.dtype).smallest_normal * torch.finfo(q.dtype).eps
    q, k, v, dout, out = (x.detach().double().transpose(1, 2) for x in (q, k, v, dout, oracle.out))
    dlse, lse = dlse.detach().double()[..., None], oracle.lse.detach().double()[..., None]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    mask = Mask.from_options(options.get("causal", False), options.get("window"))
    visible = reference.visible_pairs(batch, seqlen_q, k.shape[2], mask, options.get("seqused_k"), q.device)[:, None]
    is_empty = lse == -torch.inf
    lse = torch.where(is_empty, 0.0, lse)

    s = q @ k.mT * (options.get("softmax_scale") or head_dim**-0.5)
    s_terms = scale * q.abs() @ k.abs().mT
    if softcap is not None:
        s, s_terms = softcap * torch.tanh(s / softcap), s_terms.clamp(max=2 * softcap)
    p = torch.where(visible, torch.exp(s - lse), 0.0)
    # relative error of p: the absolute error of the exponent s - lse, and that of exponential and logarithm
    p_terms = p * ((GPU_EXPONENTIAL if q.is_cuda else 1) + s_terms + lse.abs())
    dp, delta = dout @ v.mT, (dout * out).sum(-1, keepdim=True) - dlse
    dp_terms, delta_terms = dout.abs() @ v.abs().mT, (dout * out).abs().sum(-1, keepdim=True) + dlse.abs()
    ds_terms = p * (dp_terms + delta_terms) + p_terms * (dp - delta).abs()
    delta_terms = torch.where(is_empty, 0.0, delta_terms)

    def over_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, group)).sum(2) if group else x

    # the error of delta, and so of each ds / p in its row
    delta_of_out = torch.where(is_empty, 0.0, (dout * out).square().sum(-1, keepdim=True).sqrt())
    ds_of_out = p * delta_of_out

    # the rounding to a step, of ds as well as of the probabilities that they are made of
    lost, lost_ds = p.clamp(max=step), (p * (dp - delta)).abs().clamp(max=step)

    terms = {
        "out": p_terms @ v.abs(),
        "dq": scale * ds_terms @ k.abs(),
        "dk": scale * over_group(ds_terms.mT @ q.abs()),
        "dv": over_group(p_terms.mT @ dout.abs()),
        "dq of out": 2 * scale * (ds_of_out @ k).abs(),  # one error for the whole row
        "dk of out": 2 * scale * over_group(ds_of_out.square().mT @ q.square()).sqrt(),
        "out of steps": lost @ v.abs(),
        "dq of steps": scale * lost_ds @ k.abs(),
        "dk of steps": scale * over_group(lost_ds.mT @ q.abs()),
        "dv of steps": over_group(lost.mT @ dout.abs()),
    }
    terms = {name: x.transpose(1, 2) for name, x in terms.items()}
    if sinks is not None:
        sink = sinks.detach().double()[None, :, None, None]
        p_sink = torch.where(is_empty, 0.0, torch.exp(sink - lse))
        # a sink of -inf: 0 * inf
        p_sink_terms = torch.where(p_sink == 0, 0.0, p_sink * (1 + sink.abs() + lse.abs()))
        terms["dsinks"] = (p_sink_terms * delta_terms).sum((0, 2, 3))
        terms["dsinks of out"] = 2 * (p_sink * delta_of_out).square().sum((0, 2, 3)).sqrt()
    return terms


def floor_of_out(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, oracle: reference.Reference, **options) -> Tensor:
    """The error that rounding alone may cause in each element of out of one dense call.

    Problems of few values need it, too: there the largest error of plain PyTorch may be small by chance, while another
    order of the same sums, which another processor's matrix product has, is off by its rounding.

    Args:
        dtype: the dtype of the call under test.
        q, k, v, options: the arguments of `reference.attention`.
        oracle: its result for them.
    """
    dout, dlse = torch.zeros_like(oracle.out), torch.zeros_like(oracle.lse)
    eps = torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps
    terms = rounding_terms(q.to(dtype), k, v, dout, dlse, oracle, **options)
    return eps * terms["out"] + terms["out of steps"]

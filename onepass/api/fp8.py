"""`quantize_fp8`: q, k and v rounded to e4m3, with their descales."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.quantize import kernel_for, quantize
from ..problem import AttentionInputs
from ..quantization.codec import GRANULARITIES, Granularity
from ..validation import fp8
from ..validation.fp8 import QuantizedQKV
from ..validation.lost_gradients import refuse_lost_gradients
from ..validation.scalars import check_flag, check_int
from ..validation.tensors import check_one_of
from . import fast_path


def quantize_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    granularity: Granularity = "block",
    rotate: bool = True,
    seed: int = 0,
    center_k: bool = False,
    center_v: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> QuantizedQKV:
    """q, k and v rounded to e4m3, with their descales, for `attention` and `attention_varlen`.

    One kernel does this on a GPU of compute capability 8.9 or more (16-bit tensors, granularity "block", head dims in
    multiples of 16 up to 256), plain PyTorch elsewhere. No gradient flows through the rounding, so tensors that require
    one are refused where gradients are recorded: `attention(..., precision="fp8")` has gradients, and under
    `torch.no_grad()` none are recorded.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); float32, bfloat16 or float16. Packed sequences (with cu_seqlens):
            (total_q, num_heads_q, head_dim).
        k, v: as for `attention`, or as for `attention_varlen`.
        granularity: the values that share a descale. "tensor": all of a tensor; "head": one head of a batch entry or
            sequence; "block": 64 rows of a head; "row": one row of a head. "row" tries 8 descales and takes the one
            with the least error; the others map the largest magnitude to 448.
        rotate: multiply q and k by the same random orthogonal matrix, made of signs and Hadamard matrices of the
            powers of two that head_dim is the sum of.
        seed: seed of the signs; a seed gives the same signs on every device.
        center_k: subtract the mean over keys from k. A call with a softcap refuses the result, because centering
            changes what a softcap does.
        center_v: subtract the mean over keys from v; the attention call adds the mean to out again.
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`, for packed sequences; both or neither. The attention call
            must get equal ones.
        seqused_k: as for `attention`. Keys and values beyond these lengths are not read, and are 0 in the result.

    Returns: QuantizedQKV, whose dtype is q's. NaN and inf become NaN in the elements that hold them (rotated: in their
    rows). On a Hopper GPU v may be in the layout that the attention kernel reads (v_keys_last); `dequantize` returns
    rows either way. The descales may be views of one tensor.

    Raises: TypeError or ValueError with what was expected and given; UnsupportedError if a gradient would be lost.

    Source: FlashAttention-3, arXiv:2407.08608, section 3.3; SageAttention, arXiv:2410.02367, section 4.2 (center_k).
    """
    inputs = AttentionInputs(q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k)
    key = fast_path.key_of("quantize_fp8", inputs, None, (granularity, rotate, seed, center_k, center_v))
    kept: Any = fast_path.find(key)
    if kept is not None:
        return kept(inputs)
    fp8.check_quantizable(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    check_one_of("granularity", granularity, GRANULARITIES)
    rotate, center_k, center_v = (
        check_flag(name, flag) for name, flag in (("rotate", rotate), ("center_k", center_k), ("center_v", center_v))
    )
    seed = check_int("seed", seed)
    refuse_lost_gradients({"q": q, "k": k, "v": v})
    kernel = kernel_for(inputs, granularity, seed if rotate else None, center_k, center_v)
    if kernel is not None and not (center_k or center_v):
        fast_path.keep(key, kernel)  # type: ignore[arg-type]  # returns a QuantizedQKV, not out and lse
    return quantize(inputs, granularity, seed if rotate else None, center_k, center_v, kernel)

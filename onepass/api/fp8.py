"""`quantize_fp8`: q, k and v rounded to e4m3 with their scales."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..ops.quantize import QuantizedQKV, kernel_for, quantize
from ..problem import AttentionInputs
from ..quantization.codec import GRANULARITIES, Granularity
from ..validation import attention as validation
from ..validation import fp8, lost_gradients, tensors
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
    """Q, K and V rounded to e4m3, with their scales, for `attention` and `attention_varlen`.

    By one kernel on a GPU of compute capability 8.9 or more (16-bit tensors, scales of blocks, head dims in multiples
    of 16 up to 256), else in plain torch. No gradient flows through it, so where gradients are recorded tensors that
    require one are refused: `attention(..., precision="fp8")` has gradients, and `torch.no_grad()` asks for none.

    Args:
        q: (batch, seqlen_q, num_heads_q, head_dim); float32, bfloat16 or float16. Packed sequences (with cu_seqlens):
            (total_q, num_heads_q, head_dim).
        k, v: as for `attention`, or as for `attention_varlen`.
        granularity: what shares a scale. "tensor": everything; "head": a head of a batch entry or sequence; "block": 64
            rows of a head; "row": one row of a head, with the scale that leaves the least error of 8 that were tried
            (others map the largest magnitude to 448).
        rotate: multiply q and k with the same random orthogonal matrix, made of signs and Hadamard matrices of the
            powers of two that head_dim is the sum of.
        seed: of the signs; the same on every device.
        center_k: subtract the mean over keys from k. Not for calls with softcap, which does see it.
        center_v: subtract the mean over keys from v; it is added to out again.
        cu_seqlens_q, cu_seqlens_k: as for `attention_varlen`, for packed sequences; both or none. The call must get the
            same ones.
        seqused_k: as for `attention`. What lies beyond is not read, and is 0 afterwards.

    Returns: QuantizedQKV, whose dtype is q's. NaN and inf become NaN, at their places (rotated: in their rows). On a
    Hopper GPU its v may lie as the attention kernel reads it (v_keys_last); `dequantize` gives rows either way. The
    descales may be parts of one tensor.

    Raises: TypeError or ValueError with what was expected and given; UnsupportedError if a gradient would be lost.

    Source: FlashAttention-3, arXiv:2407.08608, section 3.3; centred keys: SageAttention, arXiv:2410.02367, section 4.2.
    """
    inputs = AttentionInputs(q, k, v, None, cu_seqlens_q, cu_seqlens_k, seqused_k)
    key = fast_path.key_of("quantize_fp8", inputs, None, (granularity, rotate, seed, center_k, center_v))
    again: Any = fast_path.find(key)
    if again is not None:
        return again(inputs)
    fp8.check_quantizable(q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_k=seqused_k)
    tensors.check_one_of("granularity", granularity, GRANULARITIES)
    rotate, center_k, center_v = (
        validation.check_flag(name, flag)
        for name, flag in (("rotate", rotate), ("center_k", center_k), ("center_v", center_v))
    )
    seed = validation.check_int("seed", seed)
    lost_gradients.refuse_lost_gradients({"q": q, "k": k, "v": v})
    by_kernel = kernel_for(inputs, granularity, seed if rotate else None, center_k, center_v)
    if by_kernel is not None and not (center_k or center_v):
        fast_path.keep(key, by_kernel)  # type: ignore[arg-type]  # gives a QuantizedQKV, not out and lse
    return quantize(inputs, granularity, seed if rotate else None, center_k, center_v, by_kernel)

"""onepass under torch's own attention: `F.scaled_dot_product_attention` and everything built on it, unmodified.

    from onepass.integrations import torch_sdpa

    torch_sdpa.activate()  # or: with torch_sdpa.activate(): ...

torch's attention dispatches to operators of aten: flash attention, cuDNN's attention, and the CPU's. `activate`
registers onepass in torch's registry of flash-attention implementations, and puts functions of this package where
the kernels of these operators and their backwards were. Models, `nn.MultiheadAttention`,
`torch.nn.attention.varlen.varlen_attn`, `context_parallel` of torch.distributed and compiled code then run onepass.

A call that onepass refuses, or would compute without a kernel on a GPU, goes to the kernel that was there before. Such
calls are counted in `fallbacks()`, with one warning for each reason.
"""

from .activation import Activation, activate, deactivate, fallbacks, is_active

__all__ = ["Activation", "activate", "deactivate", "fallbacks", "is_active"]

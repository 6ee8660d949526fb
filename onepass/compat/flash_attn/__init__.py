"""The functions of flash-attn 2.8, computed by onepass, with their names, arguments, order and defaults.

    from onepass.compat.flash_attn import flash_attn_func

Conventions of that library which differ from onepass and are translated here:

- in `window_size`, -1 (or any negative number) means unbounded;
- `softcap=0.0` means no cap;
- `deterministic=False` permits a backward pass that is not reproducible, so `torch.use_deterministic_algorithms`
  decides.

Results that differ: the log-sum-exp of a row that sees no key is -inf, where flash-attn returns +inf; and the
log-sum-exp that `return_attn_probs=True` returns has a gradient.

The private functions that other libraries call are here, too: `_flash_attn_forward`, `_flash_attn_backward`, their
packed forms, `_wrapped_*`, `FlashAttnFunc` and its siblings (with `apply` only), and `flash_attn_gpu` instead of the
extension module `flash_attn_2_cuda`.
"""

from ..upstream.autograd import (
    FlashAttnFunc,
    FlashAttnKVPackedFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    FlashAttnVarlenKVPackedFunc,
    FlashAttnVarlenQKVPackedFunc,
    maybe_contiguous,
)
from ..upstream.extension import flash_attn_gpu
from ..upstream.flash_attn import (
    USE_TRITON_ROCM,
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    _get_block_size_n,
    _wrapped_flash_attn_backward,
    _wrapped_flash_attn_forward,
    _wrapped_flash_attn_varlen_backward,
    _wrapped_flash_attn_varlen_forward,
)
from .functions import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .kvcache import flash_attn_with_kvcache

__all__ = [
    "USE_TRITON_ROCM",
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "_wrapped_flash_attn_backward",
    "_wrapped_flash_attn_forward",
    "_wrapped_flash_attn_varlen_backward",
    "_wrapped_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
]

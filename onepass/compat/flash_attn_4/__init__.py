"""The functions of flash-attn 4 (module `flash_attn.cute`), computed by onepass.

    from onepass.compat.flash_attn_4 import flash_attn_func

Names, arguments, order and defaults are those of flash-attn 4.0.0b36. In `window_size` None is an unbounded side, and a
negative side shifts the band, as in `onepass.attention`; two negative sides are both unbounded. `learnable_sink` is
`sinks`. All functions return (out, lse), where lse is None unless it is asked for or a gradient is recorded.

onepass refuses `qv` and `gather_kv_indices`, and what belongs to another library's kernel language: `score_mod`,
`mask_mod` and block-sparse tensors. Arguments that say how to compute have no effect.
"""

from ..upstream.flash_attn_4 import (
    _flash_attn_bwd,
    _flash_attn_bwd_sparse_mla,
    _flash_attn_fwd,
    _flash_attn_fwd_combine,
)
from .functions import (
    SchedulerMetadataTensorsTorch,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_varlen_func,
    get_scheduler_metadata,
)

__all__ = [
    "SchedulerMetadataTensorsTorch",
    "_flash_attn_bwd",
    "_flash_attn_bwd_sparse_mla",
    "_flash_attn_fwd",
    "_flash_attn_fwd_combine",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_scheduler_metadata",
]

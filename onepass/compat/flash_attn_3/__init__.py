"""The functions of flash-attn 3 (module `flash_attn_interface`), computed by onepass.

    from onepass.compat.flash_attn_3 import flash_attn_func

Names, arguments, order and defaults are those of flash-attn 3. Conventions that differ from onepass are translated as
in `onepass.compat.flash_attn`. `qv` is refused. Arguments that say how to compute (num_splits of functions without a
cache, pack_gqa, sm_margin, scheduler_metadata) have no effect. Beyond flash-attn 3, calls with attention_chunk and with
values wider than 256 have a backward, and the log-sum-exp has a gradient.
"""

from ..upstream.flash_attn_3 import _flash_attn_backward, _flash_attn_forward
from .functions import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    get_scheduler_metadata,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

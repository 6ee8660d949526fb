"""onepass: exact attention for PyTorch in one pass over memory.

    out = onepass.attention(q, k, v, causal=True)      # (batch, seqlen, num_heads, head_dim)

Importing onepass imports torch only and changes no global setting.
"""

from . import startup as startup  # first: it looks after Ctrl-C while torch is imported
from .api.attention import AttentionOutput, attention, attention_varlen
from .api.calls import supports, warmup
from .api.decode import attention_decode, split_workspace_bytes
from .api.fp8 import quantize_fp8
from .api.partials import merge_partials
from .dispatch.backends import Support
from .dispatch.choice import use_backend
from .errors import UnsupportedError
from .kernels.compiler.pool import CompiledKernel
from .kernels.config import ForwardConfigSm80, ForwardConfigSm90
from .tuning import TuningResult, tune
from .validation.block_mask import BlockMask
from .validation.fp8 import QuantizedQKV

ForwardConfig = ForwardConfigSm90  # its name before Ampere had one

__version__ = "0.2.0"

__all__ = [
    "AttentionOutput",
    "BlockMask",
    "CompiledKernel",
    "ForwardConfig",
    "ForwardConfigSm80",
    "ForwardConfigSm90",
    "QuantizedQKV",
    "Support",
    "TuningResult",
    "UnsupportedError",
    "attention",
    "attention_decode",
    "attention_varlen",
    "merge_partials",
    "quantize_fp8",
    "split_workspace_bytes",
    "supports",
    "tune",
    "use_backend",
    "warmup",
]

"""onepass: exact attention for PyTorch in one pass over memory.

    out = onepass.attention(q, k, v, causal=True)      # (batch, seqlen, num_heads, head_dim)

Importing onepass imports torch only and changes no global setting.
"""

from .api import AttentionOutput, attention, attention_varlen, merge_partials, supports, warmup
from .choice import use_backend
from .decode import attention_decode, split_workspace_bytes
from .dispatch import Support
from .errors import UnsupportedError
from .fp8 import QuantizedQKV, quantize_fp8
from .kernels.ahead import CompiledKernel
from .kernels.config import ForwardConfig, ForwardConfigSm80
from .tuning import TuningResult, tune

__version__ = "0.1.0"

__all__ = [
    "AttentionOutput",
    "CompiledKernel",
    "ForwardConfig",
    "ForwardConfigSm80",
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

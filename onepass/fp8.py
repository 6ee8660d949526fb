"""The import path of FP8 (e4m3) attention: `quantize_fp8`, its result, and the layout of V for Hopper kernels."""

from .api.fp8 import quantize_fp8
from .ops.quantize import keys_last
from .quantization.layout import keys_first
from .validation.fp8 import QuantizedQKV

__all__ = ["QuantizedQKV", "keys_first", "keys_last", "quantize_fp8"]

"""The torch operators behind the public functions, with their gradients, shapes and FLOP counts.

Importing this package registers them under `torch.ops.onepass`.
"""

from . import attention, decode, fp8, partials

__all__ = ["attention", "decode", "fp8", "partials"]

"""The algorithm in plain PyTorch, on any device: the code to read first.

online_softmax.py   the recurrence, and when it is not needed
forward.py          out and lse, one pass over the keys
backward.py         gradients by recomputation, from lse
modifiers.py        options that few calls use: key ranges, positions, ALiBi, bias, dropout
mask.py sequences.py  masked pairs of a tile; how a call is cut into sequences and groups of heads
"""

from .backward import backward, gradient_of_sinks, gradients
from .forward import forward

__all__ = ["backward", "forward", "gradient_of_sinks", "gradients"]

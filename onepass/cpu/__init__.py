"""The backend of a CPU: torch's own C++ attention, made exact where it is not, and `tiled` for all else.

operators.py   torch's two operators, and what they must not be given
regions.py     a mask as rectangles and triangles, which are all that the operators know
forward.py     out and lse: one call for each region, merged if a row has two
backward.py    gradients: in 16 bits by chunks, whose sums are kept in float32
decode.py      attention over a cache

The operators multiply a hidden key's probability of 0 with its value, so a NaN or an infinity there reaches rows that
must not see it. A result that is not finite is therefore computed again by `tiled`, which keeps it out.
"""

from .backward import backward, gradients
from .forward import forward
from .operators import unsupported

__all__ = ["backward", "forward", "gradients", "unsupported"]

"""The backend for CPUs: torch's own C++ attention, corrected where it is not exact, and `tiled` for everything else.

operators.py   torch's two operators, and what they cannot take
regions.py     a mask as rectangles and triangles, the only masks of the operators
forward.py     out and lse: one call for each region, merged if a row has two
backward.py    gradients: in 16 bits by chunks, whose sums are kept in float32
decode.py      attention over a cache

The operators multiply a hidden key's probability of 0 by its value, so a NaN or an infinity there reaches rows that
must not see it. So `tiled`, which keeps them out, recomputes a result that is not finite.
"""

from .backward import backward, gradients
from .forward import forward
from .operators import unsupported

__all__ = ["backward", "forward", "gradients", "unsupported"]

"""Functions with the signatures of other libraries, computed by onepass: flash-attn 2, 3 and 4, and SDPA of torch.

import onepass.compat

onepass.compat.install()  # from here on `import flash_attn` finds onepass
"""

from .installation import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]

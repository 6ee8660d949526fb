"""The old name of `onepass.compat.upstream.rotary`, for one release."""

import warnings

from .upstream.rotary import *  # noqa: F403

warnings.warn("onepass.compat.rotary is now onepass.compat.upstream.rotary", FutureWarning, stacklevel=2)

"""The old name of `onepass.compat.upstream.bert_padding`, for one release."""

import warnings

from .upstream.bert_padding import *  # noqa: F403

warnings.warn("onepass.compat.bert_padding is now onepass.compat.upstream.bert_padding", FutureWarning, stacklevel=2)

"""Functions with the signatures of other libraries, computed by onepass: `compat.flash_attn` and `compat.sdpa`."""

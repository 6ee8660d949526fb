"""The functions that users call: their arguments, their results, and the fast path of repeated calls."""

from .attention import AttentionOutput, attention_varlen
from .calls import supports, warmup
from .partials import merge_partials

__all__ = ["AttentionOutput", "attention_varlen", "merge_partials", "supports", "warmup"]

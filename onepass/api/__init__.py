"""The functions that users call: what they take, what they return, and the fast path of a call like one before."""

from .attention import AttentionOutput, attention_varlen
from .calls import supports, warmup
from .partials import merge_partials

__all__ = ["AttentionOutput", "attention_varlen", "merge_partials", "supports", "warmup"]

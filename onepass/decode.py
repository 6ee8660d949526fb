"""The import path of `attention_decode` and its options; the code is in api/decode.py."""

from .api.decode import DecodeOptions, attention_decode, split_workspace_bytes

__all__ = ["DecodeOptions", "attention_decode", "split_workspace_bytes"]

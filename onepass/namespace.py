"""The namespace of this package's torch operators.

A second copy of the package, loaded under another name (as a Hugging Face kernel is), must not define operators again
that are there already. So each copy has a namespace of its own: "onepass", or one that follows from its name.
"""

from __future__ import annotations

import re

import torch

PACKAGE = __name__.rpartition(".")[0]
NAMESPACE = re.sub(r"\W", "_", PACKAGE)
OPERATORS = getattr(torch.ops, NAMESPACE)


def qualified(name: str) -> str:
    """The name of an operator with its namespace."""
    return f"{NAMESPACE}::{name}"

"""Errors with one meaning each; all are subclasses of the built-in that a caller would expect."""

from __future__ import annotations

import re
from collections.abc import Mapping

REFUSALS = (TypeError, ValueError, NotImplementedError)  # the errors with which a call is refused


class UnsupportedError(NotImplementedError):
    """The request is well formed, but no backend of this release computes it; the message says why."""


class BeyondPagesError(ValueError, RuntimeError):
    """A length is beyond the rows that a table of pages addresses: a RuntimeError in flash-attn, a ValueError here."""


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """A refusal for a caller who knows the argument by another name, which the message then begins with.

    Args:
        names: the caller's name of an argument, by the name that it has here.
    """
    name = re.match(r"\w+", str(error))
    callers_name = name and names.get(name.group())
    return type(error)(f"{callers_name}{str(error)[name.end() :]}") if name and callers_name else error

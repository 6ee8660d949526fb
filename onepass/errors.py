"""Errors with one meaning each; all are subclasses of the built-in that a caller would expect."""

from __future__ import annotations

import re
from collections.abc import Mapping

REFUSALS = (TypeError, ValueError, NotImplementedError)  # with which a call says no


class UnsupportedError(NotImplementedError):
    """The request is well formed, but no backend of this release computes it; the message says which part."""


def renamed(error: Exception, names: Mapping[str, str]) -> Exception:
    """A refusal in the words of a caller who knows its argument by another name. Args: names: theirs by ours."""
    name = re.match(r"\w+", str(error))
    theirs = name and names.get(name.group())
    return type(error)(f"{theirs}{str(error)[name.end() :]}") if name and theirs else error

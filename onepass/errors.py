"""Errors with one meaning each; all are subclasses of the built-in that a caller would expect."""


class UnsupportedError(NotImplementedError):
    """The request is well formed, but no backend of this release computes it; the message says which part."""

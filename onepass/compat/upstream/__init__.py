"""What only flash-attn's own tests and code written against its internals reach, computed by onepass.

The public functions, in the folders next to this one, do not import it.
"""

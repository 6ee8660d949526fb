"""Checks of all arguments that a caller passes, before any work is done: shapes, dtypes, devices, options."""

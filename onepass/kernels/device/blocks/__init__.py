"""Pieces shared by all kernels. The integer formulas run on Python ints and, inside a kernel, on device ints."""

"""Pieces shared by all kernels. The integer formulas are plain functions: Python ints today, device ints in a kernel."""

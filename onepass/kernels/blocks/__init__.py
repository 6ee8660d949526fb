"""Pieces shared by all kernels. Integer formulas are plain functions: Python ints today, device ints in a kernel."""

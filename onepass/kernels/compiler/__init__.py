"""Compiling kernels: once in a process, once on a machine (the disk cache), and several at a time."""

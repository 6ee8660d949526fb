"""The Hopper backend: kernels in CuTe DSL.

forward.py   the device code: read this one
launch.py    tensors and options -> compiled kernel and grid; what dispatch calls
"""

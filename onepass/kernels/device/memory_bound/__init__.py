"""Kernels bound by memory, which read and write each element about once.

merge.py             partials of attention over disjoint keys -> one result
append.py            new keys and values into a cache, with their rotation
backward_rows.py     what a backward does before and after its main kernel
sink_gradients.py    the gradients of sinks, after a backward
quantize.py          Q, K and V to e4m3; quantize_rows.py, quantize_values.py: what a thread block does;
                     quantize_rotation.py, quantize_block.py: their steps
float32_halves.py    float32 as two float16 tensors
"""

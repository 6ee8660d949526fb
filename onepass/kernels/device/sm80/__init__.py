"""The backend for the instructions that every NVIDIA GPU since Ampere has: kernels in CuTe DSL.

forward.py    the kernel: set-up, tiles, what a thread block does with one; read this one first
warps.py      a warp's registers and single acts: GEMMs, masks, softmax, storing
loads.py      tiles from global to shared memory, asynchronously
gemms_16bit.py, gemms_float32.py, tf32.py   the matrix products of fp16 and bf16, and of float32
launch.py     tensors and options -> compiled kernel and grid

decode.py          the kernel where there are few rows: warps along the keys (docs/decoding.md)
decode_launch.py   attention over a cache, forward by splits: what ../decode_launch.py launches between append and merge
gemms_e4m3.py, e4m3.py, e4m3_rows.py   over a cache of e4m3 numbers

backward.py, backward_warps.py, backward_gemms_*.py, backward_launch.py: the same for the gradients
"""

"""The backend for the instructions that every NVIDIA GPU since Ampere has: kernels in CuTe DSL.

forward/kernel.py        the forward: set-up, tiles, what a thread block does with one; read this one first
forward/warps.py         a warp's registers and single acts: scores to P, storing, repair
forward/gemms_16bit.py, gemms_float32.py, gemms_e4m3.py   its matrix products: fp16 and bf16, float32, an e4m3 cache
forward/few_rows.py      the forward where there are few rows: warps along the keys (docs/kernels/decode.md)
backward/kernel.py       the gradients: set-up, tiles; read it before its warps.py and gemms_*.py
loads.py                 tiles from global to shared memory, asynchronously
tf32.py                  float32 products by tf32 tensor cores
"""

"""The Hopper backend: kernels in CuTe DSL.

forward.py    the kernel: set-up, roles, tiles; read this one first
producer.py   the loads, and the warp that issues them
consumer.py   what a consumer warpgroup does with a tile, step by step
warpgroup.py  its registers and single acts: GEMMs, masks, storing
parts.py      float32 as two float16 tensors, which the kernel multiplies in three products; parts_launch.py its launch
launch.py     tensors and options -> compiled kernel and grid; what dispatch calls
decode_launch.py   the same over a cache, in splits and pages (docs/decoding.md)
"""

"""The Hopper backend: kernels in CuTe DSL.

forward/kernel.py       the forward: set-up, roles, tiles; read this one first
forward/producer.py     the loads, and the warp that issues them
forward/consumer.py     what a consumer warpgroup does with a tile, step by step
forward/gemms.py        a consumer warpgroup's registers and GEMMs
forward/scores.py       its scores: scales, softcap, mask, P
forward/warpgroup.py    its finished rows: storing, repair
forward/transposer.py   warps that transpose V of e4m3
forward/converter.py    warps that bring K and V of an e4m3 cache to 16 bits
forward/tile.py         what all roles share
backward/kernel.py      the gradients: set-up, roles; read this one before the others
backward/consumer.py    a consumer warpgroup of the backward; wide.py for head_dim above 128
backward/producer.py    its loads
backward/rows.py        its work on query rows: statistics and zeros before the tiles, dq after them
"""

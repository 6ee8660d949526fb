"""The Hopper backend: kernels in CuTe DSL.

forward/kernel.py       the forward: set-up, roles, tiles; read this one first
forward/producer.py     the loads, and the warp that issues them
forward/consumer.py     what a consumer warpgroup does with a tile, step by step; its parts:
forward/gemms.py          its GEMMs
forward/scores.py         how S becomes P
forward/scales.py         scales of S, and the softmax that applies them
forward/rows.py           where its rows stand in their sequence
forward/own_blocks.py     which key blocks they see
forward/output.py         finished rows to global memory, repair
forward/past_the_end.py   zeros past the end of a sequence
forward/own_loads.py      its loads, where there is no producer
forward/inputs.py         what it is given
forward/transposer.py   warps that transpose V of e4m3
forward/converter.py    warps that bring K and V of an e4m3 cache to 16 bits
forward/tile.py         what all roles share
backward/kernel.py      the gradients: set-up, roles; read this one before the others
backward/consumer.py    a consumer warpgroup of the backward, step by step; its parts:
backward/gemms.py         its GEMMs
backward/scores.py        P and dS
backward/exchange.py      dS through shared memory
backward/dq_atomic.py     sums of dQ in global memory; dq_private.py with private_dq
backward/turns.py         turns to add to dQ, and the warp that keeps them, if the problem is deterministic
backward/dkv.py           dK and dV to global memory, repair
backward/past_the_end.py  zeros past the end of a sequence
backward/inputs.py        what it is given
backward/wide.py        consumer warpgroups for head_dim above 128, with parts of their own; paired.py in clusters
backward/producer.py    the loads of the backward
backward/rows.py        its work on query rows: statistics and zeros before the tiles, dq after them
"""

"""The Hopper forward: is it right, how fast is it, and which configuration is fastest?

    python -m benchmarks forward_sm90                                       # check, then the grid
    python -m benchmarks forward_sm90 --no-check --cases 128c8192,256n512   # some cases only
    python -m benchmarks forward_sm90 --variants "tile_n=128; tile_n=128,dynamic_tiles=True"    # these, too

A case is head_dim, c (causal) or n, and the sequence length; a variant changes fields of the default configuration. The
grid is that of the FlashAttention-3 paper, see grid.py. Contenders take turns in each case; a figure is the median over
the rounds of triton's do_bench median (which flushes the L2 cache before each run). The results go to --out as JSON.
The check has a few cases of each head dim and mask; tests/gpu/ has all others.
"""

from __future__ import annotations

from ..harness.kernels import KernelSuite

PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa3": "fa3", "fa4": "fa4"}  # as `onepass bench` calls them
KERNEL = KernelSuite("sm90", PEERS, {"bfloat16": "cudnn,fa3,fa4"}, ("fwd",))
SUITE = KERNEL.suite("forward_sm90", __doc__)

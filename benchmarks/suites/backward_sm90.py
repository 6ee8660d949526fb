"""The Hopper backward: is it right, how fast is it, and which configuration is fastest?

    python -m benchmarks backward_sm90                                    # check, then the grid
    python -m benchmarks backward_sm90 --no-check --cases 128c8192,256n512    # some cases only
    python -m benchmarks backward_sm90 --deterministic            # also with deterministic gradients
    python -m benchmarks backward_sm90 --variants "tile_m=64; q_stages=2,do_stages=1"    # these configurations, too

A case is head_dim, c (causal) or n, and the sequence length; a variant changes fields of the default configuration. The
grid is that of the FlashAttention-3 paper, see grid.py. The backward pass alone is timed: for all contenders,
torch.autograd.grad on the graph of a forward pass that was made before. These passes are so long that the CPU runs
ahead of the GPU, and its share does not count. Contenders take turns in each case; a figure is the median over the
rounds of triton's do_bench median (which flushes the L2 cache before each run). The results go to --out as JSON.
fa3-fwd has no backward.
"""

from __future__ import annotations

from ..harness.kernels import KernelSuite

PEERS = {"cudnn": "sdpa-cudnn", "fa2": "sdpa-flash", "fa4": "fa4"}  # as `onepass bench` calls them
KERNEL = KernelSuite("sm90", PEERS, {"bfloat16": "cudnn,fa2,fa4"}, ("bwd",))
SUITE = KERNEL.suite("backward_sm90", __doc__)

"""The Ampere kernels: are they right, how fast are they, and which configuration is fastest?

    python -m benchmarks sm80                       # forward, bf16: check, then the paper's grid
    python -m benchmarks sm80 --direction bwd       # the backward pass alone
    python -m benchmarks sm80 --dtype float32       # compared with torch's memory-efficient SDPA, TF32 off
    python -m benchmarks sm80 --no-check --cases 128c8192 --variants "tile_m=128,tile_n=32; num_stages=1"

The suite runs on any GPU of compute capability 8.0 or more. On Hopper, too, it times these kernels, and not what
onepass would choose there. Peers are torch's SDPA: FlashAttention-2 (`fa2`) or, in float32, memory-efficient attention
(`efficient`). Cases, variants and timing are those of backward_sm90.py. FLOPs of float32 are counted once, though each
product takes three. The results go to --out as JSON.
"""

from __future__ import annotations

from ..harness.kernels import KernelSuite

PEERS = {"fa2": "sdpa-flash", "efficient": "sdpa-efficient", "cudnn": "sdpa-cudnn"}  # as `onepass bench` calls them
DEFAULT_PEERS = {"bfloat16": "fa2", "float16": "fa2", "float32": "efficient"}
KERNEL = KernelSuite("sm80", PEERS, DEFAULT_PEERS, ("fwd", "bwd"), tuple(DEFAULT_PEERS))
SUITE = KERNEL.suite("sm80", __doc__)

"""Layers of yunchang beside full attention: `torchrun --nproc-per-node 4 -m onepass.compat run yunchang_ranks.py`.

`UlyssesAttention` exchanges heads between all ranks; in `LongContextAttention` pairs of ranks exchange heads, and two
rings of ranks pass keys on. Each rank compares its share of out and of the gradients of q, k and v with attention over
all keys in float64. The package is imported as it is.
"""

import functools

import sharded
import torch
import torch.distributed as dist
import yunchang
from flash_attn import flash_attn_func
from yunchang.kernels import AttnType

BATCH, SEQLEN, HEADS, HEADS_K, HEAD_DIM = 2, 128, 8, 4, 32
DEGREE = 2  # ranks of LongContextAttention that exchange heads
# rings take 16-bit inputs only, and the package rounds dq of its basic ring to bfloat16, whatever the inputs are
DTYPES = {
    "ulysses": (torch.bfloat16, torch.float16, torch.float32),
    "ulysses on flash-attn 3": (torch.bfloat16, torch.float16, torch.float32),
    "basic": (torch.bfloat16,),
    "zigzag": (torch.bfloat16, torch.float16),
    "strip": (torch.bfloat16, torch.float16),
}
CAUSAL_ONLY = ("zigzag", "strip")


def errors(name, dtype, causal, rank, world):
    """The largest errors of a layer and of one call over all keys, as `sharded.largest_errors` returns them."""
    *tensors, dout = sharded.random_inputs(BATCH, SEQLEN, HEADS, HEADS_K, HEAD_DIM, dtype)

    def share(t):
        """The rows of this rank, as the package deals them."""
        if name.startswith("ulysses"):
            return t.chunk(world, dim=1)[rank]
        return yunchang.EXTRACT_FUNC_DICT[name](t, rank, world_size=world, rd=world // DEGREE, ud=DEGREE)

    if name.startswith("ulysses"):
        kind = AttnType.FA if name == "ulysses" else AttnType.FA3
        layer = yunchang.UlyssesAttention(dist.group.WORLD, attn_type=kind)
    else:
        layer = yunchang.LongContextAttention(ring_impl_type=name)
    found = sharded.with_gradients(functools.partial(layer, causal=causal), [share(t) for t in tensors], share(dout))
    one_call = sharded.with_gradients(functools.partial(flash_attn_func, causal=causal), tensors, dout)
    visible = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool)
    full = sharded.full_attention(tensors, dout, visible.tril() if causal else visible)
    return sharded.largest_errors(found, one_call, full, share)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yunchang.set_seq_parallel_pg(DEGREE, dist.get_world_size() // DEGREE, dist.get_rank(), dist.get_world_size())
    cases = {}
    for name, dtypes in DTYPES.items():
        for dtype in dtypes:
            for causal in (True,) if name in CAUSAL_ONLY else (False, True):
                label = f"{name} {dtype}{' causal' if causal else ''}"
                cases[label] = functools.partial(errors, name, dtype, causal)
    sharded.run(cases)


main()

"""Rings of ring-flash-attn beside full attention: `torchrun --nproc-per-node 4 -m onepass.compat run ring_ranks.py`.

Each rank compares its share of out and of the gradients of q, k and v with attention over all keys in float64. The ring
and the zigzag variant take 16-bit inputs only: their float32 gradients would be the buffers that they are added from,
and with float64 inputs two ranks would disagree on the size of a message. The package is imported as it is; its
submodule for Hugging Face models, which needs transformers 4, is left out.
"""

import functools
import sys
import types

import torch
import torch.distributed as dist

adapters = types.ModuleType("ring_flash_attn.adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
sys.modules["ring_flash_attn.adapters"] = adapters

import ring_flash_attn as ring  # noqa: E402
import sharded  # noqa: E402
from flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402

SEQLEN, HEADS, HEADS_K, HEAD_DIM = 128, 4, 2, 32
CU_SEQLENS = torch.tensor([0, 24, 88, 128], dtype=torch.int32)
# the package rounds dq of its plain ring to bfloat16, whatever the inputs are
VARIANTS = {
    "ring": (torch.bfloat16,),
    "zigzag": (torch.bfloat16, torch.float16),
    "llama3": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
}


def causal_in_sequences(bounds):
    """Which key each query sees: causal, inside its sequence. Returns: (SEQLEN, SEQLEN) bool."""
    position = torch.arange(SEQLEN)
    owner = torch.searchsorted(bounds[1:].contiguous(), position.to(bounds.dtype), right=True)
    return (owner[:, None] == owner) & (position <= position[:, None])


def zigzag(rank, world):
    """Rows of a rank: the chunk of its number from the start and from the end."""
    return torch.cat([torch.arange(SEQLEN).chunk(2 * world)[i] for i in (rank, 2 * world - 1 - rank)])


def errors(name, dtype, rank, world):
    """The largest errors of a variant and of one call over all keys, as `sharded.largest_errors` returns them."""
    batch = 1 if name == "llama3" else 2
    *tensors, dout = sharded.random_inputs(batch, SEQLEN, HEADS, HEADS_K, HEAD_DIM, dtype)
    bounds = CU_SEQLENS if name == "llama3" else torch.tensor([0, SEQLEN], dtype=torch.int32)
    rows = zigzag(rank, world) if name == "zigzag" else torch.arange(SEQLEN).chunk(world)[rank]
    if name == "llama3":
        *lengths, local_k_slice = ring.llama3_flash_attn_prepare_cu_seqlens(bounds, True, rank, world)
        options = {"heads_k_stride": 1, "local_k_slice": local_k_slice, "causal": True}

        def sharded_call(*tensors):
            return ring.llama3_flash_attn_varlen_func(*(t[0] for t in tensors), *lengths, **options)[None]

        def call(*tensors):
            return flash_attn_varlen_func(*(t[0] for t in tensors), bounds, bounds, SEQLEN, SEQLEN, causal=True)[None]

    else:
        function = ring.zigzag_ring_flash_attn_func if name == "zigzag" else ring.ring_flash_attn_func
        sharded_call = functools.partial(function, causal=True)
        call = functools.partial(flash_attn_func, causal=True)
    found = sharded.with_gradients(sharded_call, [t[:, rows] for t in tensors], dout[:, rows])
    one_call = sharded.with_gradients(call, tensors, dout)
    full = sharded.full_attention(tensors, dout, causal_in_sequences(bounds))
    return sharded.largest_errors(found, one_call, full, lambda t: t[:, rows])


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    cases = [(name, dtype) for name, dtypes in VARIANTS.items() for dtype in dtypes]
    sharded.run({f"{name} {dtype}": functools.partial(errors, name, dtype) for name, dtype in cases})


main()

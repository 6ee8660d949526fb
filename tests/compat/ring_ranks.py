"""Rings of ring-flash-attn beside full attention: `torchrun --nproc-per-node 4 -m onepass.compat run ring_ranks.py`.

Each rank compares its share of out and of the gradients of q, k and v with attention over all keys in float64, in
bfloat16 and float16: the package adds up partial results in float32, and with float32 inputs its gradients would share
memory with its buffers. It is imported as it is; its submodule for Hugging Face models, which needs transformers 4, is
left out.
"""

import sys
import types

import torch
import torch.distributed as dist

adapters = types.ModuleType("ring_flash_attn.adapters")
adapters.substitute_hf_flash_attn = adapters.update_ring_flash_attn_params = None
sys.modules["ring_flash_attn.adapters"] = adapters

import ring_flash_attn as ring  # noqa: E402
from flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: E402

SEQLEN, HEADS, HEADS_K, HEAD_DIM = 128, 4, 2, 32
CU_SEQLENS = torch.tensor([0, 24, 88, 128], dtype=torch.int32)
# the package rounds dq of its plain ring to bfloat16, whatever the inputs are
VARIANTS = {
    "ring": (torch.bfloat16,),
    "zigzag": (torch.bfloat16, torch.float16),
    "llama3": (torch.bfloat16, torch.float16),
}
TOLERANCE = 2e-6  # of the largest value, for sums in float32


def full_attention(q, k, v, dout, bounds):
    """out, dq, dk and dv of causal attention inside each sequence, in float64. Tensors: (batch, seqlen, heads, dim)."""
    position = torch.arange(q.shape[1])
    owner = torch.searchsorted(bounds[1:].contiguous(), position.to(bounds.dtype), right=True)
    visible = (owner[:, None] == owner) & (position <= position[:, None])
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    turned = [t.transpose(1, 2) for t in leaves]
    out = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=visible, enable_gqa=True).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout.double())]


def zigzag(rank, world):
    """Rows of a rank: the chunk of its number from the start and from the end."""
    return torch.cat([torch.arange(SEQLEN).chunk(2 * world)[i] for i in (rank, 2 * world - 1 - rank)])


def relative_error(found, expected, rows=slice(None)):
    """The largest difference in some rows, relative to the largest value of all rows."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.double() - b[:, rows]).abs().max() / b.abs().max()) for a, b in pairs)


def errors(name, dtype, rank, world):
    """The largest differences from full attention, relative to the largest value, over out, dq, dk and dv.

    Returns: the error of the ring, and that of one call over all keys, which rounds to dtype, too.
    """
    generator = torch.Generator().manual_seed(0)
    batch = 1 if name == "llama3" else 2
    shapes = [(batch, SEQLEN, h, HEAD_DIM) for h in (HEADS, HEADS_K, HEADS_K, HEADS)]
    q, k, v, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    bounds = CU_SEQLENS if name == "llama3" else torch.tensor([0, SEQLEN], dtype=torch.int32)
    rows = zigzag(rank, world) if name == "zigzag" else torch.arange(SEQLEN).chunk(world)[rank]
    full = full_attention(q, k, v, dout, bounds)
    mine = [t[:, rows].clone().requires_grad_() for t in (q, k, v)]
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    if name == "llama3":
        *lengths, local_k_slice = ring.llama3_flash_attn_prepare_cu_seqlens(bounds, True, rank, world)
        options = {"heads_k_stride": 1, "local_k_slice": local_k_slice, "causal": True}
        out = ring.llama3_flash_attn_varlen_func(*(t[0] for t in mine), *lengths, **options)[None]
        whole = flash_attn_varlen_func(*(t[0] for t in leaves), bounds, bounds, SEQLEN, SEQLEN, causal=True)[None]
    else:
        function = ring.zigzag_ring_flash_attn_func if name == "zigzag" else ring.ring_flash_attn_func
        out = function(*mine, causal=True)
        whole = flash_attn_func(*leaves, causal=True)
    found = [out.detach(), *torch.autograd.grad(out, mine, dout[:, rows])]
    one_call = [whole.detach(), *torch.autograd.grad(whole, leaves, dout)]
    return relative_error(found, full, rows), relative_error(one_call, full)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, dtypes in VARIANTS.items():
        for dtype in dtypes:
            error, of_one_call = errors(name, dtype, rank, world)
            largest = torch.tensor(error)
            dist.all_reduce(largest, dist.ReduceOp.MAX)
            limit = 3 * of_one_call + TOLERANCE
            if rank == 0:
                print(f"{name} {dtype}: error {largest:.1e}, limit {limit:.1e}, {world} ranks", flush=True)
            if not float(largest) <= limit:
                sys.exit(f"{name} {dtype}: expected an error up to {limit}, got {float(largest)}")
    dist.destroy_process_group()


main()

"""What the scripts *_ranks.py share: attention over several processes beside full attention in float64."""

import sys

import torch
import torch.distributed as dist


def random_inputs(batch, seqlen, heads, heads_k, head_dim, dtype):
    """q, k, v and dout, (batch, seqlen, heads, head_dim) each, equal in all processes."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, seqlen, h, head_dim) for h in (heads, heads_k, heads_k, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def with_gradients(function, tensors, dout):
    """out, dq, dk and dv of a function of q, k and v. Args: tensors: q, k and v."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def full_attention(tensors, dout, visible):
    """out, dq, dk and dv in float64. Args: tensors: q, k and v. visible: (seqlen, seqlen) bool."""

    def attention(*tensors):
        turned = [t.transpose(1, 2) for t in tensors]
        out = torch.nn.functional.scaled_dot_product_attention(*turned, attn_mask=visible, enable_gqa=True)
        return out.transpose(1, 2)

    return with_gradients(attention, [t.double() for t in tensors], dout.double())


def largest_errors(found, one_call, full, share):
    """The largest differences from full attention, relative to the largest value, over out, dq, dk and dv.

    Args:
        found: of this process's rows. one_call, full: of all rows. share: gives this process's rows of a tensor.

    Returns: the error of found, and that of one_call, which rounds to the dtype of the call, too.
    """
    found_error = max(float((a - share(b)).abs().max() / b.abs().max()) for a, b in zip(found, full, strict=True))
    call_error = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(one_call, full, strict=True))
    return found_error, call_error


def run(cases):
    """Compute each case and end the process with a message where an error is above three times that of one call.

    Args:
        cases: name -> function of (rank, world size), which returns what `largest_errors` returns.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, errors in cases.items():
        found_error, call_error = errors(rank, world)
        largest = torch.tensor(found_error)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        if rank == 0:
            print(f"{name}: error {largest:.1e}, one call {call_error:.1e}, {world} ranks", flush=True)
        limit = 3 * call_error
        if not float(largest) <= limit:
            sys.exit(f"{name}: expected an error up to {limit}, got {float(largest)}")
    dist.destroy_process_group()

"""torch's own context parallelism over onepass, on each rank."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from onepass.integrations import torch_sdpa


def ring(rank: int, rotation: str) -> None:
    """`context_parallel` of torch, whose ring calls flash attention's operator, agrees with dense attention."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard, set_rotate_method

    num_ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    set_rotate_method(rotation)
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 2, 64, 16, generator=generator) for _ in range(4))
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)
    expected.backward(dout.double())
    buffers = [t.clone() for t in (q, k, v, dout)]
    with torch_sdpa.activate("cpu"), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        local = [t.detach().clone().requires_grad_() for t in buffers[:3]]
        tensors = [DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in local]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*tensors, 0.0, True)[0].to_local()
        out.backward(buffers[3])
        found = context_parallel_unshard(mesh, [out.detach(), *(t.grad for t in local)], [2] * 4)
        assert torch_sdpa.fallbacks() == {}
    for actual, right in zip(found, (expected.detach(), *(t.grad for t in leaves)), strict=True):
        torch.testing.assert_close(actual.double(), right, rtol=1e-4, atol=1e-5)

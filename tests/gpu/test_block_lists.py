"""Masks whose tiles visit lists of blocks: query_ranges and block_mask, forward and backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from gpu_cases import BACKEND, BF16, DEVICE, FP16, ON_GPU, GpuCall, needs_hopper, offsets, size
from gradient_cases import expected_gradients, hard_gradients, loss_of
from random_calls import fenced

import onepass
from onepass import BlockMask, masks
from onepass.dispatch import attention as dispatch

pytestmark = needs_hopper
HEADS = 4, 2


def _random_ranges(rows: int, columns: int) -> torch.Tensor:
    ranges = torch.randint(0, columns + 1, (2, 4, rows, 2)).sort(-1).values
    return ranges.int()


def _far(ranges: torch.Tensor) -> torch.Tensor:
    """Half of the ranges begin, and half end, as far away as an int32 goes."""
    is_far = torch.rand(ranges.shape) < 0.5
    return torch.where(is_far, torch.tensor([-(2**31), 2**31 - 1]).int(), ranges)


def _blocks(n: int, block: int | tuple[int, int], heads: int = 1, share: float = 0.4, batch: int = 2) -> BlockMask:
    size = block if isinstance(block, tuple) else (block, block)
    rows, columns = (-(-n // b) for b in size)
    return BlockMask.from_blocks((torch.rand(batch, heads, rows, columns) < share).to(DEVICE), size)


def _bits(n: int, heads: int = 1, batch: int = 2) -> BlockMask:
    """Blocks of 64 whose pairs are all seen, some of them, or none."""
    count = -(-n // 64)
    shares = torch.tensor([0.0, 0.5, 1.0])[torch.randint(0, 3, (batch, heads, count, count))]
    shares = shares.repeat_interleave(64, -1).repeat_interleave(64, -2)[..., :n, :n]
    return BlockMask.from_dense((torch.rand(shares.shape) < shares).to(DEVICE), (64, 64))


def _of_ranges(n: int) -> dict[str, Any]:
    ranges = {name: t.to(DEVICE) for name, t in masks.block_diffusion(n // 2, 40).items()}
    return {"block_mask": BlockMask.from_ranges(n, n, block_size=(64, 128), **ranges)}


def _of_entries(value: Any, batch: int) -> Any:
    """The first entries of an option of two."""
    if batch == 2:
        return value
    if isinstance(value, BlockMask):
        bits = None if value.bits is None else value.bits[:batch]
        return BlockMask(value.kinds[:batch], value.block_size, bits=bits)
    return value[:batch] if isinstance(value, torch.Tensor) and value.dim() == 4 else value


MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "rollouts": lambda n: masks.rollouts(n // 4, [n // 8] * 3 + [n - n // 4 - n // 8 * 3]),
    "block diffusion": lambda n: masks.block_diffusion(n // 2, 48),
    "queries of keys": lambda n: {"query_ranges": _random_ranges(n, n)},
    "both sides, causal": lambda n: {
        "query_ranges": _random_ranges(n, n), "key_ranges": _random_ranges(n, n), "causal": True
    },
    "seqused_k, window": lambda n: {
        "query_ranges": _random_ranges(n, n), "seqused_k": torch.tensor([n // 3, n - 5]).int(), "window": (90, 60)
    },
    "blocks of 64": lambda n: {"block_mask": _blocks(n, 64)},
    "blocks of 128, causal": lambda n: {"block_mask": _blocks(n, 128, heads=4), "causal": True},
    "blocks of a kv head, sinks": lambda n: {"block_mask": _blocks(n, 64, heads=2), "sinks": torch.randn(4)},
    "blocks of ranges": _of_ranges,
    "blocks, ALiBi": lambda n: {"block_mask": _blocks(n, 128), "alibi_slopes": torch.rand(4) * 0.2},
    "bits": lambda n: {"block_mask": _bits(n)},
    "bits of heads, causal, queries of keys": lambda n: {
        "block_mask": _bits(n, heads=4), "causal": True, "query_ranges": _random_ranges(n, n)
    },
    "blocks of 64, softcap": lambda n: {"block_mask": _blocks(n, 64, heads=4), "softcap": 4.0},
    "blocks of 64, dropout": lambda n: {"block_mask": _blocks(n, 64, heads=2), "dropout_p": 0.2},
    "bits, bias": lambda n: {"block_mask": _bits(n), "bias": torch.randn(1, 4, n, n, dtype=BF16)},
    "blocks, positions, left padding": lambda n: {
        "block_mask": _blocks(n, 128), "q_positions": torch.randint(0, n, (2, n)).int(), "causal": True,
        "seqstart_k": torch.tensor([n // 5, 3]).int(),
    },
    "blocks of 64 queries": lambda n: {"block_mask": _blocks(n, (64, 128))},
    "blocks of 64 keys": lambda n: {"block_mask": _blocks(n, (128, 64))},
    "blocks of 192 queries": lambda n: {"block_mask": _blocks(n, (192, 64))},
    "no key": lambda n: {"query_ranges": _random_ranges(n, n), "seqused_k": torch.tensor([0, 1]).int()},
    "far ranges": lambda n: {"query_ranges": _far(_random_ranges(n, n)), "key_ranges": _far(_random_ranges(n, n))},
    "no block": lambda n: {"block_mask": _blocks(n, 64, share=0.0)},
    "blocks of heads, compact": lambda n: {"block_mask": _blocks(n, 64, heads=4, share=0.2).compact()},
}  # fmt: skip


# of packed sequences: (total rows, the longest sequence, the number of sequences)
PACKED_MASKS: dict[str, Callable[[int, int, int], dict[str, Any]]] = {
    "queries of keys": lambda total, n, batch: {"query_ranges": _random_ranges(total, n)[0]},
    "both sides, causal": lambda total, n, batch: {
        "query_ranges": _random_ranges(total, n)[1, :1], "key_ranges": _random_ranges(total, n)[0], "causal": True
    },
    "blocks of 64": lambda total, n, batch: {"block_mask": _blocks(n, 64, batch=batch)},
    "blocks of a kv head, causal": lambda total, n, batch: {
        "block_mask": _blocks(n, 64, heads=2, batch=batch), "causal": True
    },
    "blocks of a kv head, compact": lambda total, n, batch: {
        "block_mask": _blocks(n, 128, heads=2, batch=batch, share=0.2).compact()
    },
    "bits, causal": lambda total, n, batch: {"block_mask": _bits(n, 2, batch), "causal": True},
    "blocks and queries of keys, window": lambda total, n, batch: {
        "block_mask": _blocks(n, 128, batch=batch), "query_ranges": _random_ranges(total, n)[0], "window": (200, 50)
    },
}  # fmt: skip


class ListCase(NamedTuple):
    mask: str
    seqlen: int | tuple[int, ...]
    head_dims: tuple[int, int] = (64, 64)
    dtype: torch.dtype = BF16

    def call(self, seed: int = 0) -> GpuCall:
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        (hq, hkv), (d, dv) = HEADS, self.head_dims
        if isinstance(self.seqlen, tuple):
            lead, lengths = (sum(self.seqlen) + 5,), self.seqlen
            options = PACKED_MASKS[self.mask](lead[0], max(lengths), len(lengths))
            options |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), torch.tensor(offsets(lengths)).int())
        else:
            batch = 2 if self.seqlen < 4000 else 1  # the oracle of two entries of 9000 takes 70 GiB
            lead, options = (batch, self.seqlen), MASKS[self.mask](self.seqlen)
            options = {name: _of_entries(value, batch) for name, value in options.items()}
        shapes = {"q": (*lead, hq, d), "k": (*lead, hkv, d), "v": (*lead, hkv, dv)}
        tensors = {name: fenced(shape, self.dtype, DEVICE, generator) for name, shape in shapes.items()}
        options = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in options.items()}
        return GpuCall(tensors, options, seed)


PACKED = (size(200, 70), 0, size(330, 130), 7)
CASES = [ListCase(mask, n) for mask in MASKS for n in (size(200, 70), size(650, 200))]
CASES += [ListCase(mask, size(400, 130), (128, 128)) for mask in MASKS]
CASES += [ListCase(mask, size(330, 130), (256, 256), FP16) for mask in MASKS]
CASES += [
    ListCase(mask, size(400, 130), dims) for mask in ("rollouts", "blocks of 64") for dims in ((96, 96), (192, 128))
]
CASES += [ListCase("blocks of 64", size(400, 130), dims) for dims in ((64, 128), (128, 256))]
CASES += [ListCase(mask, PACKED, (d, d)) for mask in PACKED_MASKS for d in (64, 128, 256)]
# other tiles, and lists of more blocks than a warp has lanes
CASES += [
    ListCase(mask, size(n, 260), dims)
    for mask in ("both sides, causal", "bits of heads, causal, queries of keys", "blocks of 64")
    for n, dims in ((5000, (128, 128)), (9000, (64, 64)), (2500, (96, 96)), (2500, (192, 192)))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case):
    call = case.call()
    call.check(with_floor=True)
    loss = loss_of(call)
    assert not expected_gradients(call, loss).misses(hard_gradients(call, loss))


@pytest.mark.parametrize(
    "mask", ["both sides, causal", "blocks of 128, causal", "blocks of heads, compact", "no block", "blocks, ALiBi"]
)
@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
def test_deterministic_gradients(mask, head_dims):
    _check_deterministic(ListCase(mask, size(1100, 200), head_dims))


@pytest.mark.parametrize("mask", PACKED_MASKS)
def test_deterministic_gradients_of_packed_sequences(mask):
    _check_deterministic(ListCase(mask, PACKED, (128, 128)))


def _check_deterministic(case: ListCase) -> None:
    call = case.call()
    loss = loss_of(call)
    found = [hard_gradients(call, loss, deterministic=True) for _ in range(3)]
    assert not expected_gradients(call, loss).misses(found[0])
    assert all(torch.equal(again[name], found[0][name]) for again in found[1:] for name in again)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("mask", ["rollouts", "blocks of 64"])
def test_kernels_compute_them(mask):
    call = ListCase(mask, 200).call()
    tensors = {**call.tensors, **call.options}
    assert onepass.supports(**tensors, backend=BACKEND).ok
    from onepass.validation.attention import check_attention

    _, problem = check_attention(**tensors, deterministic=False, return_lse=True)
    assert dispatch.backend_of_backward(BACKEND, problem) == BACKEND


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_no_value_is_read_on_the_host():
    call = ListCase("both sides, causal", 200).call()
    call.run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")

"""Calls with a block_mask on the backend `cpu`, compared with the oracle; random calls are in tests/api."""

import collections
import importlib

import pytest
import torch

import onepass
import onepass.tiled
from onepass import BlockMask
from onepass.cpu import blocks, masks, operators
from onepass.problem import AttentionInputs, AttentionProblem, Blocks, Mask, Modifiers
from onepass.testing import Call
from onepass.tiled.sequences import sequences

INT32 = torch.int32


@pytest.fixture
def count(monkeypatch):
    """How many times each of torch's operators has run, and how many pairs they were given."""
    counts = collections.Counter()

    def counted(name, real, first):
        def run(*arguments, **options):
            q, k = arguments[first : first + 2]
            counts[name] += 1
            counts["pairs"] += q.shape[:-1].numel() * k.shape[-2]
            return real(*arguments, **options)

        monkeypatch.setattr(operators, name, run)

    for name, first in (("_forward", 0), ("_backward", 1)):
        counted(name, getattr(operators, name), first)
    return counts


def call(heads, size=(64, 64), dtype=torch.float32, lengths=(200, 270), batch=2, **options):
    """Query heads 4, kv heads 2, and blocks of so many heads, some of which see nothing."""
    torch.manual_seed(0)
    shapes = (lengths[0], 4), (lengths[1], 2), (lengths[1], 2)
    tensors = {n: torch.randn(batch, *shape, 32).to(dtype) for n, shape in zip("qkv", shapes, strict=True)}
    kept = torch.rand(batch, heads, *(-(-n // s) for n, s in zip(lengths, size, strict=True))) < 0.5
    kept[:, 0, 1] = False
    return Call(tensors, {"block_mask": BlockMask.from_blocks(kept, size)} | options)


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (90, 20)},
    "window that the first 30 rows see no key in": {"window": (120, -100)},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "lengths": {"seqused_k": torch.tensor([130, 64], dtype=INT32), "causal": True},
    "positions": {"q_positions": torch.arange(202, 2, -1, dtype=INT32)[None], "causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_beside_the_oracle(name, dtype, count, monkeypatch):
    if dtype.itemsize > 2 or name != "sinks":  # which `tiled` computes in 16 bits
        for function in ("forward", "gradients"):
            monkeypatch.setattr(onepass.tiled, function, None)
    for heads, size in ((1, (64, 64)), (2, (64, 128)), (4, (128, 64))):
        call(heads, size, dtype, **OPTIONS[name]).check(with_floor=True, through_lse=False)
    assert count["_backward"] > 0


def test_packed_sequences(count):
    given = call(4, lengths=(233, 300), batch=1, causal=True)
    offsets = {"q": [0, 70, 70, 230], "k": [0, 100, 165, 300]}
    given.options |= {f"cu_seqlens_{n}": torch.tensor(t, dtype=INT32) for n, t in offsets.items()}
    Call({n: t[0] for n, t in given.tensors.items()}, given.options).check(with_floor=True, through_lse=False)
    assert count["_backward"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parts_of_lists(dtype, count, monkeypatch):
    """Few items at a time, and in 16 bits few keys, so that sums of a gradient come from several calls."""
    monkeypatch.setattr(blocks, "BATCH_ELEMENTS", 1)
    monkeypatch.setattr(importlib.import_module("onepass.cpu.backward"), "CHUNK", 128)
    given = call(4, dtype=dtype, lengths=(128, 500), batch=1)
    given.options["block_mask"].kinds[:, 1] = 2
    given.check(with_floor=True, through_lse=False)
    listed = (given.options["block_mask"].kinds != 0).sum(-1).flatten()
    assert count["_forward"] == int((listed > 0).sum())
    expected = -(-listed // 2) if dtype == torch.bfloat16 else listed > 0
    assert count["_backward"] == int(expected.sum())


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_no_other_block_is_computed(heads, count):
    given = call(heads, lengths=(256, 256), causal=True)
    q, k, v = (t.requires_grad_() for t in given.tensors.values())
    kept = (given.options["block_mask"].kinds != 0) & torch.ones(4, 4).tril().bool()
    pairs = int(kept.sum()) * 4 // heads * 64 * 64
    out = onepass.attention(q, k, v, **given.options)
    assert count["pairs"] == pairs
    out.sum().backward()
    assert count["pairs"] == 2 * pairs


@pytest.mark.parametrize(("heads", "together"), [(1, 2), (2, 2), (4, 1)])
def test_heads_that_see_the_same_go_together(heads, together):
    given = call(heads, lengths=(256, 256))
    kinds = given.options["block_mask"].kinds
    kinds = kinds.repeat_interleave(2, 1) if heads == 2 else kinds  # as validation gives them
    inputs = AttentionInputs(*given.tensors.values(), *[None] * 4, Modifiers(), None, Blocks(kinds, (64, 64)))
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
    found = blocks.KeptBlocks(problem, inputs, sequences(problem, inputs)[0])
    assert found.together == together
    for t in (inputs.q, given.tensors["q"][:, :, :, :1]):
        assert torch.equal(found.rows(found.items(t)), t)
    assert torch.equal(found.keys(found.blocks_of_keys(inputs.k)), inputs.k)


@pytest.mark.parametrize("lead", [(1, 1), (1, 4), (3, 1)])
def test_masks_of_blocks_are_small(lead, monkeypatch):
    """Heads and entries that share no mask are not computed together where their masks would take too much memory."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    keys = masks.MASK_ELEMENTS // masks.ROWS
    q, k, v = (torch.randn(3, n, 4, 8) for n in (masks.ROWS, keys, keys))
    kinds = torch.ones(*lead, 1, 1, dtype=torch.int8)
    modifiers = Modifiers(key_ranges=ranges(1, 1, masks.ROWS))
    inputs = AttentionInputs(q, k, v, *[None] * 4, modifiers, None, Blocks(kinds, (64, 64)))
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
    found = masks.groups(problem, inputs, 3, keys)
    sizes = {tuple(part.stop - part.start for part in (g.entries, g.heads)) for g in found}
    assert sizes == {(1 if lead[0] == 3 else 3, 1 if lead[1] == 4 else 4)}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_of_hidden_keys_in_kept_blocks(value):
    given, results = call(4, lengths=(128, 128), causal=True), []
    given.options["block_mask"].kinds.fill_(2)
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in given.tensors.values()]
        out = onepass.attention(*leaves, **given.options)[:, :100]
        results.append([out, torch.autograd.grad(out.sum(), leaves)[0][:, :100]])
        given.tensors["k"][:, 100:], given.tensors["v"][:, 100:] = value, value
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(before, after)


def ranges(*shape):
    low = torch.randint(0, 100, (*shape, 1), dtype=INT32)
    return torch.cat([low, low + torch.randint(0, 130, low.shape, dtype=INT32)], -1)


WITH_MASKS = {
    "bias": lambda: {"bias": torch.randn(1, 1, 1, 270)},
    "alibi": lambda: {"alibi_slopes": torch.rand(4) * 0.3},
    "ranges": lambda: {"key_ranges": ranges(2, 1, 200)},
    "ranges of heads": lambda: {"key_ranges": ranges(1, 4, 200), "query_ranges": ranges(2, 1, 270)},
    "starts": lambda: {"seqstart_k": torch.tensor([5, 100], dtype=INT32)},
}


@pytest.mark.parametrize("name", WITH_MASKS)
def test_what_is_computed_with_masks(name, count, monkeypatch):
    """Blocks of rows of all heads, from the first to the last key that one of them sees."""
    for name_of_module in ("forward", "backward"):
        monkeypatch.setattr(importlib.import_module(f"onepass.cpu.{name_of_module}"), "KeptBlocks", None)
    monkeypatch.setattr(masks, "ROWS", 64)
    for heads in (1, 4):
        count.clear()
        call(heads, **WITH_MASKS[name]()).check(with_floor=True, through_lse=False)
        assert count["_forward"] > 0
    given = call(2, **WITH_MASKS[name]())
    leaves = [t.requires_grad_() for t in given.tensors.values()]
    out, before = onepass.attention(*leaves, **given.options), count["_backward"]
    dout = torch.randn_like(out)
    mine = torch.autograd.grad(out, leaves, dout)
    assert count["_backward"] > before
    theirs = torch.autograd.grad(onepass.attention(*leaves, **given.options, backend="tiled"), leaves, dout)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_same_bits_every_time():
    given, found = call(4, causal=True), []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in given.tensors.values()]
        out = onepass.attention(*leaves, **given.options)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

"""`BlockMask`: its makers beside definitions pair by pair, and attention with it beside the oracle."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import onepass
from onepass import BlockMask, masks, reference, tiled
from onepass.errors import UnsupportedError
from onepass.problem import AttentionInputs, AttentionProblem, Blocks, Mask, Modifiers
from onepass.testing import Call
from onepass.tiled.tile_sizes import TileSizes

INT32, DTYPE = torch.int32, torch.float64


def randn(*shape, dtype=DTYPE):
    return torch.randn(shape, dtype=dtype)


def random_blocks(*shape, share=0.5):
    return torch.rand(shape) < share


def random_ranges(rng, lead, rows, columns):
    low = torch.randint(-3, columns + 3, (*lead, rows, 1))
    low = low.sort(-2).values if rng.random() < 0.5 else low
    return torch.cat([low, low + torch.randint(0, columns // 2 + 1, low.shape)], -1).int()


def random_pairs(rng, lead, rows, columns, size):
    """(*lead, rows, columns) bool, in blocks that are empty, full or partial."""
    kinds = torch.randint(0, 3, (*lead, -(-rows // size[0]), -(-columns // size[1])))
    kinds = kinds.repeat_interleave(size[0], -2).repeat_interleave(size[1], -1)[..., :rows, :columns]
    return (kinds == 2) | ((kinds == 1) & (torch.rand(kinds.shape) < rng.choice([0.01, 0.5, 0.99])))


def dense_mask(pairs, size):
    """`BlockMask.from_dense`, with any bits where they are not read."""
    mask = BlockMask.from_dense(pairs, size)
    is_read = (mask.kinds == 1).repeat_interleave(size[0], 2)[:, :, : pairs.shape[2]]
    is_read = is_read.repeat_interleave(size[1] // 32, 3)[..., : mask.bits.shape[-1]]
    return replace(mask, bits=torch.where(is_read, mask.bits, torch.randint_like(mask.bits, -(2**31), 2**31)))


# ---------------------------------------------------------------- attention


def random_call(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    batch, seqlen_q, seqlen_k = rng.randint(1, 2), rng.choice([1, 70, 200]), rng.choice([60, 130, 257])
    heads_kv, group = rng.randint(1, 2), rng.randint(1, 3)
    heads, size = heads_kv * group, (rng.choice([64, 128]), rng.choice([64, 128]))
    lead = rng.choice([1, batch]), rng.choice([1, heads, heads_kv])
    blocks = [-(-n // s) for n, s in zip((seqlen_q, seqlen_k), size, strict=True)]
    mask, kind = BlockMask.from_blocks(random_blocks(*lead, *blocks), size), rng.random()
    if kind < 0.4:
        mask = dense_mask(random_pairs(rng, lead, seqlen_q, seqlen_k, size), size)
    elif kind < 0.8:
        lead = rng.choice([1, batch]), rng.choice([1, heads])
        given = {"key_ranges": random_ranges(rng, lead, seqlen_q, seqlen_k)}
        if rng.random() < 0.5:
            given["query_ranges"] = random_ranges(rng, lead, seqlen_k, seqlen_q)
        if rng.random() < 0.5:
            given.pop("key_ranges")
            given["query_ranges"] = random_ranges(rng, lead, seqlen_k, seqlen_q)
        mask = BlockMask.from_ranges(seqlen_q, seqlen_k, block_size=size, **given)
    options = {"block_mask": mask}
    for name, value in (
        ("causal", True),
        ("window", rng.choice([(100, 30), (None, 50)])),
        ("softcap", 3.0),
        ("sinks", randn(heads)),
        ("seqused_k", torch.randint(0, seqlen_k + 1, (batch,), dtype=INT32)),
        ("key_ranges", random_ranges(rng, (1, 1), seqlen_q, seqlen_k)),
        ("query_ranges", random_ranges(rng, (batch, heads), seqlen_k, seqlen_q)),
        ("q_positions", torch.randperm(300)[:seqlen_q][None].int()),
        ("bias", randn(1, heads, 1, seqlen_k)),
        ("dropout_p", 0.3),
    ):
        if rng.random() < 0.25:
            options[name] = value
    if rng.random() < 0.25:
        ends = options.get("seqused_k", torch.full((batch,), seqlen_k)).tolist()
        options["seqstart_k"] = torch.tensor([rng.randint(0, end) for end in ends], dtype=INT32)
    shapes = (seqlen_q, heads), (seqlen_k, heads_kv), (seqlen_k, heads_kv)
    return Call({n: randn(batch, *shape, 8) for n, shape in zip("qkv", shapes, strict=True)}, options, seed)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_calls(first):
    for seed in range(first, first + 10):
        random_call(seed).check(with_floor=True)


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3])
def test_packed_sequences(batch, heads):
    """Blocks count from the first row of each sequence; blocks behind its end are not looked at."""
    offsets_q, offsets_k = torch.tensor([0, 70, 70, 230], dtype=INT32), torch.tensor([0, 100, 165, 300], dtype=INT32)
    mask = BlockMask.from_blocks(random_blocks(batch, heads, 3, 4), (64, 64))
    tensors = {"q": randn(233, 4, 8), "k": randn(300, 2, 8), "v": randn(300, 2, 8)}
    options = {"cu_seqlens_q": offsets_q, "cu_seqlens_k": offsets_k, "block_mask": mask}
    Call(tensors, options).check(with_floor=True)
    Call(tensors, options | {"causal": True, "sinks": randn(4)}).check(with_floor=True)
    few = BlockMask.from_blocks(random_blocks(1, 1, 3, 2), (64, 64))
    with pytest.raises(ValueError, match=r"block_mask: expected at least 3 x 3 blocks of \(64, 64\) for the longest"):
        onepass.attention_varlen(**tensors, **options | {"block_mask": few})
    with pytest.raises(ValueError, match=r"block_mask: expected kinds of shape .* got \(1, 1, 0, 2\)"):
        onepass.attention_varlen(**tensors, **options | {"block_mask": replace(few, kinds=few.kinds[:, :, :0])})
    pairs = random_pairs(random.Random(batch * heads), (batch, heads), 170, 150, (64, 64))
    options["block_mask"] = dense_mask(pairs, (64, 64))
    Call(tensors, options).check(with_floor=True)
    ranges = random_ranges(random.Random(heads), (1,), 300, 160)
    Call(tensors, options | {"query_ranges": ranges, "window": (90, 10), "sinks": randn(4)}).check(with_floor=True)
    starts = torch.tensor([50, 0, 100], dtype=INT32)  # the first queries of two sequences see nothing
    Call(tensors, options | {"seqstart_k": starts}).check(with_floor=True)
    for rows, words in ((159, 5), (160, 4)):
        few = replace(options["block_mask"], bits=options["block_mask"].bits[:, :, :rows, :words])
        message = f"expected at least 160 x 5 words of bits for the longest sequences, got {rows} x {words}"
        with pytest.raises(ValueError, match=message):
            onepass.attention_varlen(**tensors, **options | {"block_mask": few})


@pytest.mark.parametrize("is_causal", [False, True])
def test_only_nonempty_blocks_are_visited(is_causal, monkeypatch):
    visited, real = [], tiled.modifiers.ScoreModifiers.modify_scores_

    def counting(self, scores, window, queries, keys):
        visited.append((queries[0] // 64, keys[0] // 64))
        return real(self, scores, window, queries, keys)

    monkeypatch.setattr(tiled.modifiers.ScoreModifiers, "modify_scores_", counting)
    blocks = torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]).bool()
    q, k, v = (randn(1, 250, 2, 8) for _ in range(3))
    inputs = AttentionInputs(
        q, k, v, *[None] * 4, Modifiers(), None, Blocks(blocks[None, None].to(torch.int8), (64, 64))
    )
    mask = Mask.from_options(is_causal, None)
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=mask, softcap=None, deterministic=False)
    expected = [(m, n) for m, n in blocks.nonzero().tolist() if n <= m or not is_causal]
    out, lse = tiled.forward(problem, inputs, TileSizes(64, 64, 2))
    assert sorted(visited) == expected
    visited.clear()
    tiled.gradients(problem, inputs, out, lse, torch.ones_like(out), None, TileSizes(64, 64, 2))
    assert sorted(visited) == expected
    assert (out[:, 128:192] == 0).all()
    assert lse[..., 128:192].isneginf().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("has_bits", [False, True])
def test_values_of_hidden_keys_do_not_matter(value, has_bits):
    hidden = slice(64, 128)
    if has_bits:
        hidden = torch.tensor([0, 5, 31, 32, 63, 64, 100, 149])
        pairs = random_blocks(2, 4, 150, 150)
        pairs[0, :2, :, hidden] = False  # of the first kv head
        mask = BlockMask.from_dense(pairs, (64, 64))
    else:
        blocks = random_blocks(2, 4, 3, 3)
        blocks[0, :2, :, 1] = False
        mask = BlockMask.from_blocks(blocks, (64, 64))
    results = []
    leaves = [randn(2, 150, heads, 8) for heads in (4, 2, 2)]
    for _ in range(2):
        q, k, v = (t.clone().requires_grad_() for t in leaves)
        out, lse = onepass.attention(q, k, v, block_mask=mask, return_lse=True)
        loss = out.sin().sum() + lse[lse.isfinite()].sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
        leaves[1][0, hidden, 0], leaves[2][0, hidden, 0] = value, value
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(before, after)


def test_a_value_reaches_the_rows_that_see_it_by_bits():
    pairs = random_blocks(1, 1, 70, 150)
    mask, (q, k, v) = BlockMask.from_dense(pairs), (randn(1, n, 1, 8) for n in (70, 150, 150))
    before = onepass.attention(q, k, v, block_mask=mask)
    v[0, 77] = torch.nan
    after = onepass.attention(q, k, v, block_mask=mask)
    sees = pairs[0, 0, :, 77]
    assert after[0, sees].isnan().all()
    torch.testing.assert_close(after[0, ~sees], before[0, ~sees])


def test_a_mask_of_ranges_is_its_ranges():
    ranges = masks.block_diffusion(150, 20)
    mask = BlockMask.from_ranges(300, 300, **ranges, block_size=(64, 128))
    q, k, v = (randn(2, 300, 2, 8).requires_grad_() for _ in range(3))
    results = []
    for options in (ranges, {"block_mask": mask}):
        out, lse = onepass.attention(q, k, v, return_lse=True, **options)
        results.append((out, lse, *torch.autograd.grad((out * out).sum() + lse.sum(), (q, k, v))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_it_can_be_compiled():
    torch._dynamo.reset()
    mask = BlockMask.from_blocks(random_blocks(1, 2, 3, 3), (64, 64))
    pairs = random_blocks(1, 2, 150, 150)
    q, k, v = (randn(2, 150, 2, 8).requires_grad_() for _ in range(3))

    def function(q, k, v):
        out = onepass.attention(q, k, v, block_mask=mask, causal=True).sin()
        return onepass.attention(out, k, v, block_mask=BlockMask.from_dense(pairs))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    results = [(out := f(q, k, v), *torch.autograd.grad(out.sum(), (q, k, v))) for f in (function, compiled)]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)
    given = q, k, v, *[None] * 10, 0.0, 0.3, None, None, None, False, "tiled", None
    for ranges in (None, torch.tensor([0, 100], dtype=INT32).expand(1, 1, 150, 2).contiguous()):
        forward = *given, ranges, mask.kinds, 64, 64
        torch.library.opcheck(torch.ops.onepass.attention_modified_forward.default, forward)
    forward = *forward, BlockMask.from_dense(pairs).bits
    torch.library.opcheck(torch.ops.onepass.attention_modified_forward.default, forward)
    out, lse = (t.detach() for t in torch.ops.onepass.attention_modified_forward(*forward))
    backward = torch.randn_like(out), None, out, lse, False, False, *(t.detach() for t in (q, k, v)), *forward[3:]
    torch.library.opcheck(torch.ops.onepass.attention_modified_backward.default, backward)


# ---------------------------------------------------------------- makers


@pytest.mark.parametrize("seed", range(12))
def test_blocks_of_ranges(seed):
    """A block is full if no range hides a pair of it, and empty at least where a range alone hides all of them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    seqlen_q, seqlen_k, size = rng.randint(1, 300), rng.randint(1, 300), (64, rng.choice([64, 128]))
    key_ranges = random_ranges(rng, (2, 1), seqlen_q, seqlen_k)
    query_ranges = random_ranges(rng, (1, 3), seqlen_k, seqlen_q)
    wide = torch.rand(2, 1, seqlen_q // 100 + 1).lt(0.5).repeat_interleave(100, -1)[..., :seqlen_q, None]
    key_ranges = torch.where(wide, torch.tensor([0, seqlen_k], dtype=INT32), key_ranges)
    for given in ({"key_ranges": key_ranges}, {"query_ranges": query_ranges}):
        mask = BlockMask.from_ranges(seqlen_q, seqlen_k, block_size=size, **given)
        visible = masks.visible_pairs(seqlen_q, seqlen_k, **given)
        assert torch.equal(mask.kinds, masks.occupancy(visible, size))
        assert mask.key_ranges is given.get("key_ranges")
        assert mask.query_ranges is given.get("query_ranges")
    both = {"key_ranges": key_ranges, "query_ranges": query_ranges}
    mask = BlockMask.from_ranges(seqlen_q, seqlen_k, block_size=size, **both)
    found = masks.occupancy(masks.visible_pairs(seqlen_q, seqlen_k, **both), size)
    assert mask.kinds.shape == found.shape
    assert torch.equal(mask.kinds == 2, found == 2)
    assert (mask.kinds[found > 0] > 0).all()


def test_blocks_of_ranges_that_are_empty_or_short():
    """Empty intervals reach no block, and an interval within a block covers none."""
    low = torch.tensor([70, 70, 5, 64, 0, 200]).repeat_interleave(64)
    high = torch.tensor([70, 80, 3, 128, 200, 400]).repeat_interleave(64)
    ranges = torch.stack([low, high], -1)[None, None].int()
    kinds = BlockMask.from_ranges(384, 200, key_ranges=ranges, block_size=(64, 64)).kinds
    expected = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [0, 2, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]]
    assert kinds[0, 0].tolist() == expected


def test_blocks_of_ranges_without_values():
    """No value is read on the host, which would wait for the device."""
    by_query, by_key = (torch.empty(1, 1, n, 2, dtype=INT32, device="meta") for n in (384, 200))
    mask = BlockMask.from_ranges(384, 200, key_ranges=by_query, query_ranges=by_key, block_size=(128, 64))
    assert mask.kinds.shape == (1, 1, 3, 4)


def test_blocks_of_lists():
    seen = random_blocks(2, 3, 5, 7)
    counts = seen.sum(-1, dtype=INT32)
    for dtype in (torch.int32, torch.int64):
        indices = seen.byte().argsort(dim=-1, descending=True, stable=True).to(dtype)
        rest = torch.arange(7) >= counts[..., None]
        found = BlockMask.from_indices(counts, indices.masked_fill(rest, 10**6), 7, (64, 128))
        assert torch.equal(found.kinds, seen.to(torch.int8) * 2)
        assert found.block_size == (64, 128)
    longest = int(counts.max())
    assert torch.equal(BlockMask.from_indices(counts, indices[..., :longest], 7).kinds > 0, seen)
    assert torch.equal(BlockMask.from_blocks(seen).kinds > 0, seen)


def test_blocks_of_torch():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    seen = random_blocks(2, 1, 3, 4)
    counts, indices = seen.sum(-1, dtype=INT32), seen.byte().argsort(dim=-1, descending=True, stable=True).int()
    full = (counts - counts // 2, indices.contiguous()), (counts // 2, indices.flip(-1).contiguous())
    lengths = {"seq_lengths": (192, 512), "BLOCK_SIZE": (64, 128)}
    theirs = flex.BlockMask.from_kv_blocks(counts, indices, **lengths)
    mine = BlockMask.from_torch(theirs)
    assert torch.equal(mine.kinds > 0, seen)
    assert mine.block_size == (64, 128)
    other = flex.BlockMask.from_kv_blocks(*full[0], *full[1], **lengths)
    first, second = (torch.zeros(2, 1, 3, 5, dtype=torch.bool) for _ in range(2))
    for target, (count, index) in ((first, full[0]), (second, full[1])):
        for b, m in itertools.product(range(2), range(3)):
            target[b, 0, m, index[b, 0, m, : count[b, 0, m]].long()] = True
    assert torch.equal(BlockMask.from_torch(other).kinds > 0, (first | second)[..., :4])
    with pytest.raises(UnsupportedError, match="mask_mod: expected none"):
        BlockMask.from_torch(replace_mask_mod(flex, theirs))
    with pytest.raises(
        TypeError, match=r"block_mask: .* got BlockMask \(onepass\.BlockMask\.from_torch makes one of it\)"
    ):
        onepass.attention(*(randn(1, 64, 1, 8) for _ in range(3)), block_mask=theirs)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (64, 128), (70, 33), (130, 257), (0, 5), (5, 0), (0, 0)])
def test_bits_of_pairs(seqlen_q, seqlen_k):
    pairs = random_pairs(random.Random(seqlen_q), (2, 3), seqlen_q, seqlen_k, (64, 128))
    mask = BlockMask.from_dense(pairs, (64, 128))
    assert torch.equal(mask.kinds, masks.occupancy(pairs, (64, 128)))
    words = -(-seqlen_k // 32)
    assert (mask.bits.shape, mask.bits.dtype) == ((2, 3, seqlen_q, words), INT32)
    padded = torch.zeros(2, 3, seqlen_q, words * 32, dtype=torch.int64)
    padded[..., :seqlen_k] = pairs
    expected = (padded.unflatten(-1, (words, 32)) << torch.arange(32)).sum(-1)
    assert torch.equal(mask.bits.long() & 0xFFFFFFFF, expected)
    meta = mask.to("meta")
    assert {t.device.type for t in (meta.kinds, meta.bits)} == {"meta"}
    assert (meta.block_size, meta.key_ranges) == ((64, 128), None)
    unread = BlockMask.from_dense(pairs.to("meta"), (64, 128))  # a mask is made without reading a value
    assert (unread.kinds.shape, unread.bits.shape) == (mask.kinds.shape, mask.bits.shape)


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_the_oracle_sees_the_pairs(heads):
    pairs = random_pairs(random.Random(heads), (2, heads), 130, 200, (64, 64))
    assert {0, 1, 2} == set(masks.occupancy(pairs, (64, 64)).flatten().tolist())
    q, k = randn(2, 4, 130, 1), randn(2, 4, 200, 1)
    found = reference.pairs_of(q, k, Mask(), block_mask=dense_mask(pairs, (64, 64))).visible
    assert torch.equal(found.expand(-1, 4, -1, -1), pairs.repeat_interleave(4 // heads, 1))


def replace_mask_mod(flex, mask):
    return flex.BlockMask.from_kv_blocks(
        mask.kv_num_blocks, mask.kv_indices, BLOCK_SIZE=mask.BLOCK_SIZE, mask_mod=lambda b, h, i, j: i >= j
    )


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(1, 1, 2, 2),), TypeError, "kinds: expected dtype int8, got float32"),
        ((torch.ones(1, 2, 2).to(torch.int8),), ValueError, r"kinds: expected \(batch, heads, q_blocks, kv_blocks\)"),
        ((torch.ones(1, 1, 2, 2).to(torch.int8), (64, 100)), ValueError, "block_size: expected multiples of 64"),
        ((torch.ones(1, 1, 2, 2).to(torch.int8), 64), TypeError, "block_size: expected a pair"),
        ((torch.ones(1, 1, 2, 2).to(torch.int8), (64, 0)), ValueError, "block_size: "),
        (([[True]],), TypeError, "kinds: expected a torch.Tensor"),
        ((torch.ones(1, 1, 2, 2).to(torch.int8), (64, 64), None, None, [1]), TypeError, "bits: expected a torch"),
        (
            (torch.ones(1, 1, 2, 2).to(torch.int8), (64, 64), None, None, torch.ones(1, 1, 99, 4)),
            TypeError,
            "bits: expected dtype int32, got float32",
        ),
        (
            (torch.ones(1, 1, 2, 2).to(torch.int8), (64, 64), None, None, torch.ones(1, 99, 4).int()),
            ValueError,
            r"bits: expected \(batch, heads, queries, words\), got shape \(1, 99, 4\)",
        ),
    ],
)
def test_what_is_no_mask(arguments, error, message):
    with pytest.raises(error, match=message):
        BlockMask(*arguments)


def test_makers_refuse():
    with pytest.raises(TypeError, match="blocks: expected dtype bool, got int8"):
        BlockMask.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.int8))
    with pytest.raises(TypeError, match="mask: expected dtype bool, got int8"):
        BlockMask.from_dense(torch.ones(1, 1, 9, 9, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"mask: expected \(batch, heads, seqlen_q, seqlen_k\), got shape \(9, 9\)"):
        BlockMask.from_dense(torch.ones(9, 9, dtype=torch.bool))
    with pytest.raises(TypeError, match="block_size: expected a pair"):
        BlockMask.from_dense(torch.ones(1, 1, 9, 9, dtype=torch.bool), 64)
    with pytest.raises(TypeError, match="key_ranges: expected an int32"):
        BlockMask.from_ranges(3, 4)
    ranges = torch.zeros(1, 1, 4, 2).int()
    with pytest.raises(ValueError, match=r"key_ranges: expected \(batch, heads, 3, 2\), got shape \(1, 1, 4, 2\)"):
        BlockMask.from_ranges(3, 4, key_ranges=ranges)
    with pytest.raises(ValueError, match=r"query_ranges: expected \(batch, heads, 3, 2\), got shape \(1, 1, 4, 2\)"):
        BlockMask.from_ranges(4, 3, query_ranges=ranges)
    with pytest.raises(TypeError, match="key_ranges: expected dtype int32, got int64"):
        BlockMask.from_ranges(4, 4, key_ranges=ranges.long())
    with pytest.raises(TypeError, match="mask: expected torch's BlockMask, got Tensor"):
        BlockMask.from_torch(ranges)
    counts, indices = torch.ones(1, 2, 3).int(), torch.zeros(1, 2, 3, 4).int()
    with pytest.raises(ValueError, match="indices: expected numbers from 0 to 4, got 0 to 5"):
        BlockMask.from_indices(2 * counts, indices + torch.tensor([0, 5, -1, 9]), 5)
    with pytest.raises(ValueError, match="counts: expected numbers from 0 to 4, got 5 to 5"):
        BlockMask.from_indices(5 * counts, indices, 5)
    for bad in ((counts.float(), indices), (counts[0], indices[0]), (counts, indices[:, :1]), (counts, indices.bool())):
        with pytest.raises(ValueError, match=r"s: expected int32 or int64, \(batch, heads, q_blocks"):
            BlockMask.from_indices(*bad, 4)


def test_a_compact_mask_says_how_full_it_is():
    mask = BlockMask.from_blocks(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 0]])[None, None] > 0, (64, 64))
    assert mask.most is None
    compact = mask.compact()
    assert compact.most == (2, 3)
    assert compact.to("cpu").most == (2, 3)
    assert BlockMask.from_blocks(torch.ones(1, 1, 0, 2, dtype=torch.bool)).compact().most == (0, 0)
    ranges = masks.documents(torch.arange(192) // 100)
    of_ranges = BlockMask.from_ranges(192, 192, block_size=(64, 64), **ranges).compact()
    assert of_ranges.is_of_ranges
    assert of_ranges.most == (3, 3)
    tensors = {name: randn(1, 192, 2, 8) for name in "qkv"}
    for given, same in ((compact, mask), (of_ranges, ranges)):
        expected = onepass.attention(**tensors, **same if isinstance(same, dict) else {"block_mask": same})
        torch.testing.assert_close(onepass.attention(**tensors, block_mask=given), expected)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_gradients_of_a_compact_mask(backend):
    mask = BlockMask.from_blocks(random_blocks(1, 2, 3, 3), (64, 64))
    tensors = [randn(1, 192, 2, 8).requires_grad_() for _ in range(3)]

    def gradients(mask: BlockMask) -> tuple:
        return torch.autograd.grad(onepass.attention(*tensors, block_mask=mask).square().sum(), tensors)

    call = gradients if backend is None else torch.compile(gradients, backend=backend)
    for own, expected in zip(call(mask.compact()), gradients(mask), strict=True):
        torch.testing.assert_close(own, expected)


MASK = BlockMask.from_blocks(torch.ones(1, 1, 2, 2, dtype=torch.bool), (64, 64))
DENSE = BlockMask.from_dense(torch.ones(1, 1, 100, 100, dtype=torch.bool), (64, 64))


def test_a_mask_is_named_by_its_shapes():
    assert repr(MASK) == "BlockMask(kinds: (1, 1, 2, 2), blocks of (64, 64))"
    assert repr(DENSE) == "BlockMask(kinds: (1, 1, 2, 2), bits: (1, 1, 100, 4), blocks of (64, 64))"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"block_mask": True}, TypeError, "block_mask: expected a onepass.BlockMask or None, got bool"),
        ({"block_mask": MASK.kinds > 0}, TypeError, "got Tensor (onepass.BlockMask.from_dense makes one of it)"),
        (
            {"block_mask": replace(MASK, kinds=MASK.kinds[:, :, :1])},
            ValueError,
            r"block_mask: expected kinds of shape \(1 or 2, 1 or 2 or 4, 2, 2\) with blocks of \(64, 64\), got",
        ),
        ({"block_mask": replace(MASK, kinds=MASK.kinds.expand(1, 3, 2, 2))}, ValueError, "got (1, 3, 2, 2)"),
        ({"block_mask": replace(MASK, kinds=MASK.kinds.expand(3, 1, 2, 2))}, ValueError, "got (3, 1, 2, 2)"),
        (
            {"block_mask": replace(MASK, kinds=MASK.kinds.to("meta"))},
            ValueError,
            "block_mask: expected device cpu like",
        ),
        (
            {"block_mask": replace(DENSE, bits=DENSE.bits[..., :3])},
            ValueError,
            "block_mask: expected bits of shape (1 or 2, 1 or 2 or 4, 100, 4) with words of 32 keys, got (1, 1, 1",
        ),
        ({"block_mask": replace(DENSE, bits=DENSE.bits[:, :, 1:])}, ValueError, "got (1, 1, 99, 4)"),
        ({"block_mask": replace(DENSE, bits=DENSE.bits.expand(1, 3, 100, 4))}, ValueError, "got (1, 3, 100, 4)"),
        ({"block_mask": replace(DENSE, bits=DENSE.bits.expand(3, 1, 100, 4))}, ValueError, "got (3, 1, 100, 4)"),
        (
            {"block_mask": replace(DENSE, bits=DENSE.bits.to("meta"))},
            ValueError,
            "block_mask: expected device cpu like q, got meta",
        ),
        (
            {"block_mask": replace(MASK, key_ranges=torch.zeros(1, 1, 9, 2).int())},
            ValueError,
            "key_ranges: expected shape",
        ),
        (
            {"block_mask": replace(MASK, key_ranges=torch.zeros(1, 1, 100, 2).int()), "key_ranges": 3},
            TypeError,
            "key_ranges: expected a torch.Tensor",
        ),
        ({"block_mask": MASK, "precision": "fp8"}, UnsupportedError, "block_mask: expected None with precision='fp8'"),
    ],
)
def test_refusals(options, error, message):
    q, k, v = (torch.randn(2, 100, heads, 8) for heads in (4, 2, 2))
    with pytest.raises(error) as raised:
        onepass.attention(q, k, v, **options)
    assert message.replace("\\", "") in str(raised.value)


def test_where_it_is_not_taken():
    q, k, v = (torch.randn(1, 100, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    with pytest.raises(UnsupportedError, match="block_mask: expected None with a QuantizedQKV"):
        onepass.attention(onepass.quantize_fp8(q, k, v), block_mask=MASK)
    with pytest.raises(TypeError, match="block_mask: "):
        onepass.attention_decode(q, k, v, cache_seqlens=torch.tensor([100]).int(), block_mask=MASK)


@pytest.mark.parametrize(
    ("name", "mask", "expected"),
    [
        ("sm90", MASK, None),
        ("sm90", DENSE, None),
        ("sm80", MASK, "block_mask: expected none"),
        ("sm80", DENSE, "block_mask: expected none"),
    ],
)
def test_what_kernels_refuse(name, mask, expected):
    from onepass.dispatch.backends import unsupported_by

    q, k, v = (torch.randn(1, 128, 2, 64, dtype=torch.bfloat16) for _ in range(3))
    blocks = Blocks(mask.kinds, mask.block_size, mask.bits)
    inputs = AttentionInputs(q, k, v, *[None] * 4, Modifiers(), None, blocks)
    problem = AttentionProblem.of(inputs, softmax_scale=0.3, mask=Mask(), softcap=None, deterministic=False)
    assert unsupported_by(name, problem) == expected
    assert problem.modifiers_named == ("block_mask" if mask is MASK else "block_mask with bits")

"""`onepass.masks`: each mask beside one that is written pair by pair, and through attention beside the oracle."""

import doctest
import random

import pytest
import torch

import onepass
from onepass import masks
from onepass.testing import Call

INT32 = torch.int32


def pairs(seqlen, sees):
    """(seqlen, seqlen) bool of a function of query and key."""
    return torch.tensor([[bool(sees(i, j)) for j in range(seqlen)] for i in range(seqlen)])


def check(arguments, expected, **others):
    """The arguments leave the expected pairs (batch or 1, seqlen, seqlen), and attention with them is the oracle's."""
    expected = expected if expected.dim() == 3 else expected[None]
    batch, seqlen = len(expected), expected.shape[-1]
    for name, t in arguments.items():
        assert name in ("key_ranges", "query_ranges")
        assert (t.dtype, t.shape[1:]) == (INT32, (1, seqlen, 2))
    found = masks.visible_pairs(seqlen, **arguments, **others)
    assert torch.equal(found[:, 0].expand(expected.shape), expected)
    tensors = {
        name: torch.randn(batch, seqlen, heads, 8, dtype=torch.float64)
        for name, heads in zip("qkv", (4, 2, 2), strict=True)
    }
    call = Call(tensors, arguments | others)
    call.check(with_floor=True)
    bias = torch.zeros(batch, 1, seqlen, seqlen, dtype=torch.float64).masked_fill(~expected[:, None], -torch.inf)
    torch.testing.assert_close(onepass.attention(**tensors, bias=bias), onepass.attention(**tensors, **call.options))


def random_tree(rng, nodes):
    """Parents in depth-first order."""
    path, parents = [], []
    for node in range(nodes):
        while path and rng.random() < 0.4:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents


def ancestors(parents, node):
    found = set()
    while node != -1:
        found.add(node)
        node = parents[node]
    return found


@pytest.mark.parametrize("seed", range(4))
def test_trees(seed):
    rng = random.Random(seed)
    parents = [random_tree(rng, 13) for _ in range(2)]
    above = [[ancestors(own, node) for node in range(13)] for own in parents]
    expected = torch.stack([pairs(13, lambda i, j, own=own: j in own[i]) for own in above])
    check(masks.tree(torch.tensor(parents)), expected)
    check(masks.tree(parents[0]), expected[0])

    lengths = [rng.choice([0, 1, 2, 4]) for _ in range(13)]
    owner = [node for node, length in enumerate(lengths) for _ in range(length)]
    of_tokens = pairs(len(owner), lambda i, j: j <= i and owner[j] in above[0][owner[i]])
    check(masks.tree(parents[0], lengths), of_tokens)
    check(masks.tree(parents[0], torch.tensor(lengths)), of_tokens, causal=True)


def test_trees_in_any_order():
    """A tree whose nodes are shuffled is the same tree after `depth_first`."""
    rng = random.Random(0)
    parents = random_tree(rng, 15)
    names = rng.sample(range(15), 15)  # the new number of each node
    shuffled = [0] * 15
    for node, parent in enumerate(parents):
        shuffled[names[node]] = -1 if parent == -1 else names[parent]
    order, moved = masks.depth_first(torch.tensor(shuffled))
    assert sorted(order.tolist()) == list(range(15))
    above = [ancestors(shuffled, node) for node in order.tolist()]
    check(masks.tree(moved), pairs(15, lambda i, j: int(order[j]) in above[i]))
    for wrong in ([1, 0], [-1, 2, 1], [-1, 5]):
        with pytest.raises(ValueError, match="parents: expected a way from each node to a root"):
            masks.depth_first(wrong)


@pytest.mark.parametrize(
    ("parents", "node"), [([0], 0), ([-1, 1], 1), ([-1, 0, 0, 1], 3), ([-1, -1, 0], 2), ([-1, -2], 1)]
)
def test_what_is_no_tree_in_depth_first_order(parents, node):
    with pytest.raises(ValueError, match=f"parents: expected depth-first order, in which the parent of node {node} is"):
        masks.tree(parents)


@pytest.mark.parametrize("lengths", [[1, 2], [1, -1, 2], [[1, 2, 3], [1, 2, 4]]])
def test_lengths_that_do_not_fit(lengths):
    parents = [[-1, 0, 1], [-1, 0, 0]] if isinstance(lengths[0], list) else [-1, 0, 1]
    with pytest.raises(ValueError, match="lengths: expected "):
        masks.tree(parents, lengths)


def test_rollouts():
    owner = [0] * 5 + [1] * 3 + [2] + [3] * 4
    expected = pairs(13, lambda i, j: j <= i and owner[j] in (0, owner[i]))
    for lengths in ([3, 1, 4], torch.tensor([3, 1, 4])):
        check(masks.rollouts(5, lengths), expected)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_draft_behind_a_cache(is_packed):
    """Each path of the draft, alone at the end of its cache, gives the results of its nodes."""
    parents, filled = [-1, 0, 1, 0, 3], torch.tensor([7, 3], dtype=INT32)
    q, (k, v) = torch.randn(2, 5, 4, 8), torch.randn(2, 2, 16, 2, 8)
    given = masks.over_cache(masks.tree(parents)["query_ranges"], filled, 16)
    assert given["query_ranges"].shape == (2, 1, 16, 2)
    packed = {"q": q.flatten(0, 1), "cu_seqlens_q": torch.tensor([0, 5, 10], dtype=INT32)} if is_packed else {"q": q}
    out = onepass.attention_decode(k_cache=k, v_cache=v, cache_seqlens=filled + 5, **packed, **given)
    for b, n in enumerate(filled.tolist()):
        for node in range(5):
            keys = [*range(n), *(n + own for own in sorted(ancestors(parents, node)))]
            right = onepass.attention(q[b : b + 1, node : node + 1], k[b : b + 1, keys], v[b : b + 1, keys])
            torch.testing.assert_close(out.view(2, 5, 4, 8)[b, node], right[0, 0])


NUMBERS = torch.tensor([[3, 3, 3, 0, 0, 7, 3, 3, 3, 3], [1, 2, 2, 2, 2, 2, 2, 2, 2, 2]])


def document(b, i):
    """The first token of the document of token i."""
    while i and NUMBERS[b, i - 1] == NUMBERS[b, i]:
        i -= 1
    return i


@pytest.mark.parametrize("causal", [False, True])
def test_documents(causal):
    same = [pairs(10, lambda i, j, b=b: document(b, i) == document(b, j) and (j <= i or not causal)) for b in (0, 1)]
    check(masks.documents(NUMBERS), torch.stack(same), causal=causal)
    check(masks.documents(NUMBERS[0]), same[0], causal=causal)


@pytest.mark.parametrize("size", [1, 4, 20])
def test_chunks(size):
    check(masks.chunks(11, size), pairs(11, lambda i, j: i // size == j // size))
    check(masks.chunks(11, size), pairs(11, lambda i, j: i // size == j // size and j <= i), causal=True)


def test_prefixes():
    check(masks.prefix(9, 4), pairs(9, lambda i, j: j < 4 or j <= i))
    several = [pairs(9, lambda i, j, n=n: j < n or j <= i) for n in (0, 5, 9)]
    check(masks.prefix(9, torch.tensor([0, 5, 9])), torch.stack(several))


IMAGES = torch.tensor([[-1, 4, 4, 4, -1, -1, 2, 2, 5, -1, -2, -1], [0, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, 1]])


@pytest.mark.parametrize("window", [None, 0, 2])
def test_images(window):
    def sees(b, i, j):
        lower, upper = sorted((i, j))
        is_one = IMAGES[b, i] >= 0 and bool((IMAGES[b, lower : upper + 1] == IMAGES[b, i]).all())
        return is_one or (j <= i and (window is None or j >= i - window))

    expected = [pairs(12, lambda i, j, b=b: sees(b, i, j)) for b in (0, 1)]
    check(masks.images(IMAGES, window), torch.stack(expected))
    check(masks.images(IMAGES[1], window), expected[1])


@pytest.mark.parametrize(("seqlen", "block"), [(8, 2), (7, 3), (4, 4), (5, 1)])
def test_block_diffusion(seqlen, block):
    """The three terms of the paper's mask: within noisy blocks, to clean blocks before, and between clean blocks."""

    def sees(i, j):
        of_query, of_key = i % seqlen // block, j % seqlen // block
        is_clean_query, is_clean_key = i >= seqlen, j >= seqlen
        block_diagonal = of_query == of_key and is_clean_query == is_clean_key
        offset_block_causal = of_query > of_key and is_clean_key and not is_clean_query
        block_causal = of_query >= of_key and is_clean_key and is_clean_query
        return block_diagonal or offset_block_causal or block_causal

    check(masks.block_diffusion(seqlen, block), pairs(2 * seqlen, sees))


def test_ranges_of_block_diffusion_are_as_short_as_they_can_be():
    """The other ranges would hide more keys from a longer interval, but only in tiles that are visited."""
    found = masks.block_diffusion(4, 2)
    assert found["key_ranges"][0, 0].tolist() == [[0, 4], [0, 4], [2, 6], [2, 6], [4, 6], [4, 6], [4, 8], [4, 8]]
    assert found["query_ranges"][0, 0].tolist() == [[0, 2], [0, 2], [2, 4], [2, 4], [2, 8], [2, 8], [4, 8], [4, 8]]


def of_flashmask(columns, causal):
    """Hidden rows, column by column, as FlashMask's documentation has them."""
    batch, heads, seqlen, numbers = columns.shape
    visible = torch.ones(batch, heads, seqlen, seqlen, dtype=torch.bool)
    for b, h, j in torch.cartesian_prod(*map(torch.arange, (batch, heads, seqlen))).tolist():
        r = columns[b, h, j].tolist()
        column, has_end = visible[b, h, :, j], numbers == (2 if causal else 4)
        column[r[0] : r[1] if has_end else seqlen] = False
        if causal:
            column[:j] = False
        else:
            column[r[2] if has_end else 0 : r[3] if has_end else r[1]] = False
    return visible


@pytest.mark.parametrize(("causal", "numbers"), [(True, 1), (True, 2), (False, 2), (False, 4)])
def test_columns_of_flashmask(causal, numbers):
    """Columns are converted exactly where one interval of queries sees the key, and else refused."""
    seqlen, generator = 7, torch.Generator().manual_seed(numbers)
    drawn = torch.randint(0, seqlen + 1, (200, 2, seqlen, numbers), generator=generator, dtype=INT32)
    expected = of_flashmask(drawn, causal)  # (200, heads, queries, keys)
    intervals = (expected[:, :, 1:] & ~expected[:, :, :-1]).sum(2) + expected[:, :, 0]
    are_right = intervals <= 1
    # twenty batch entries whose columns can all be converted; a column keeps its place
    places = are_right.byte().argsort(0, descending=True)[:20]
    assert are_right.gather(0, places).all()
    columns = drawn.gather(0, places[..., None].expand(-1, -1, -1, numbers))
    right = expected.gather(0, places[:, :, None].expand(-1, -1, seqlen, -1))
    assert 0.1 < right.float().mean() < 0.9
    found = masks.from_flashmask(columns, causal, num_heads_q=4)
    assert torch.equal(masks.visible_pairs(seqlen, **found), right.repeat_interleave(2, 1))
    of_one_head = masks.from_flashmask(columns[:, 1:], causal)
    assert torch.equal(masks.visible_pairs(seqlen, **of_one_head), right[:, 1:])
    for entry, head, key in (~are_right).nonzero()[:20].tolist():
        wrong = columns[:2].clone()
        wrong[1, head, key] = drawn[entry, head, key]
        message = f"one interval of queries, got .* for key {key} .batch entry 1, head {head}"
        with pytest.raises(ValueError, match=message):
            masks.from_flashmask(wrong, causal)
    assert are_right.all() == (numbers == (1 if causal else 2))


def test_columns_that_flashmask_does_not_have():
    for shape, causal in (((1, 1, 4, 4), True), ((1, 1, 4, 1), False), ((1, 4, 1), True)):
        with pytest.raises(ValueError, match=r"startend_row_indices: expected \(batch, heads, seqlen_k, "):
            masks.from_flashmask(torch.zeros(shape, dtype=INT32), causal)


def test_visible_pairs_take_every_mask():
    """Each tensor that hides pairs is that of the call: attention over values that name the keys gives its rows."""
    ranges = torch.tensor([[1, 6], [0, 3]], dtype=INT32).repeat(3, 1)[None, None]
    options = {
        "window": (3, 1),
        "seqstart_k": torch.tensor([1, 0], dtype=INT32),
        "seqused_k": torch.tensor([8, 6], dtype=INT32),
        "key_ranges": ranges,
        "query_ranges": torch.stack([torch.arange(8) // 2, torch.arange(8) + 1], -1)[None, None].int(),
        "q_positions": torch.tensor([[7, 2, 3, 0, 5, 4]], dtype=INT32),
        "bias": torch.zeros(2, 3, 1, 8).index_fill_(-1, torch.tensor([4]), -torch.inf),
    }
    for names in (("window",), *((name,) for name in options), tuple(options)):
        own = {name: options[name] for name in names}
        q, v = torch.zeros(2, 6, 3, 8), torch.eye(8)[None, :, None].expand(2, 8, 3, 8)
        out = onepass.attention(q, v, v, **own)
        found = masks.visible_pairs(6, 8, **own)
        assert torch.equal((out > 0).transpose(1, 2), found.expand(2, 3, 6, 8)), names


@pytest.mark.parametrize("tile", [(2, 3), (4, 4), (16, 5), (100, 100)])
def test_occupancy(tile):
    visible = torch.rand(2, 17, 13, generator=torch.Generator().manual_seed(0)) < 0.5
    visible[0, :8] = True
    visible[1, 8:] = False
    found = masks.occupancy(visible, tile)
    assert found.shape == (2, -(-17 // tile[0]), -(-13 // tile[1]))
    for (b, m, n), kind in zip(
        torch.cartesian_prod(*map(torch.arange, found.shape)).tolist(), found.flatten(), strict=True
    ):
        own = visible[b, m * tile[0] :][: tile[0], n * tile[1] :][:, : tile[1]]
        assert kind == (2 if own.all() else 1 if own.any() else 0)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("matplotlib.image")
    masks.draw(tmp_path / "tree", 40, tile=(8, 8), **masks.rollouts(16, [8, 16]))
    masks.draw(tmp_path / "full.png", 40, 20)
    tree, full = image.imread(tmp_path / "tree", format="png"), image.imread(tmp_path / "full.png")
    blue = torch.tensor([0x2F, 0x6F, 0xB3]) / 255
    shares = [(torch.tensor(t[..., :3]) - blue).abs().amax(-1).lt(0.01).float().mean() for t in (tree, full)]
    assert 0.1 < shares[0] < 0.8 * shares[1]


def test_examples_of_docstrings():
    failed, attempted = doctest.testmod(masks)
    assert failed == 0
    assert attempted >= 14


def test_ranges_are_where_their_tensors_are():
    meta = torch.device("meta")
    found = [masks.chunks(8, 3, meta), masks.prefix(8, 3, meta), masks.block_diffusion(8, 4, meta)]
    found += [masks.tree([-1, 0], device=meta), masks.rollouts(3, [2, 1], meta)]
    found += [masks.documents(NUMBERS.to(meta)), masks.images(NUMBERS.to(meta), 3)]
    found += [masks.prefix(8, torch.tensor([3, 4], device=meta))]
    for arguments in found:
        assert {t.device for t in arguments.values()} == {meta}

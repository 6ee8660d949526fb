"""Block sparsity that trains: three ways to choose the blocks of keys that each block of queries sees.

    python examples/block_sparsity.py [--steps 80]

Blocks have 64 queries or keys, and lengths are multiples of 64. Tensors are (batch, seqlen, heads, head_dim). A choice
has no gradient: the projections before it learn from attention to the blocks that it keeps and, where a layer has a
gate, from attention to the means of all blocks. The program compares each layer that keeps all blocks with ordinary
attention, and trains the layers on a task. In the first half of a sequence, each block has a topic and a value. The
tokens of the second half have a topic each, and are to give its value. It also compares a step of generation over the
pages that a choice keeps with attention under the mask of that choice.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import onepass

SIZE = 64
TOPICS, COLUMNS = 4, 8  # of the task: 8 blocks, and values of 8 numbers
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16


def means(x: Tensor) -> Tensor:
    return x.unflatten(1, (-1, SIZE)).mean(2)


def blocks_back(scores: Tensor) -> Tensor:
    """How many blocks the keys lie before the queries, for each element of the last two dimensions."""
    number = torch.arange(scores.shape[-1], device=scores.device)
    return number[:, None] - number


def mask_of_best(scores: Tensor, count: int) -> onepass.BlockMask:
    """The `count` best blocks of keys of each row of scores (batch, heads, blocks, blocks), none at -inf."""
    best = scores.topk(min(count, scores.shape[-1])).indices
    kept = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True)
    return onepass.BlockMask.from_blocks(kept & (scores > -torch.inf), (SIZE, SIZE))


@torch.no_grad()
def video_tiles(q: Tensor, k: Tensor, count: int) -> onepass.BlockMask:
    """VSA: the tiles of keys whose means fit the mean of the tile of queries best."""
    key_means = means(k).repeat_interleave(q.shape[2] // k.shape[2], 2)
    return mask_of_best(torch.einsum("bmhd,bnhd->bhmn", means(q), key_means), count)


@torch.no_grad()
def nsa(q: Tensor, k: Tensor, count: int) -> onepass.BlockMask:
    """NSA: the first block, the own one, the one before it, and those of most weight for a group of heads."""
    first_queries = q[:, ::SIZE].unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("bmhgd,bnhd->bghmn", first_queries, means(k)) * q.shape[-1] ** -0.5
    back = blocks_back(scores)
    weights = scores.masked_fill(back <= 0, -torch.inf).softmax(-1).sum(1)
    weights[..., 0] = torch.inf
    return mask_of_best(weights.masked_fill(back <= 1, torch.inf).masked_fill(back < 0, -torch.inf), count)


@torch.no_grad()
def moba(q: Tensor, k: Tensor, count: int) -> onepass.BlockMask:
    """MoBA: the own block, and the earlier ones whose means fit the query best."""
    key_means = means(k).repeat_interleave(q.shape[2] // k.shape[2], 2)
    scores = torch.einsum("bmhd,bnhd->bhmn", q[:, ::SIZE], key_means)
    back = blocks_back(scores)
    return mask_of_best(scores.masked_fill(back == 0, torch.inf).masked_fill(back < 0, -torch.inf), count)


def decode_selected(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kept: Tensor, lengths: Tensor, count: int
) -> Tensor:
    """The newest token of each cache sees the pages that are kept: at most `count`, with its own among them.

    q is (batch, 1, num_heads_q, head_dim), and pages are (num_pages, SIZE, kv heads, head_dim). `page_table` and `kept`
    are (batch, choices, max_pages): num_heads_q / choices heads share a choice, and a page has their kv heads.
    `lengths` count the newest token.
    """
    order = kept.int().argsort(stable=True, dim=-1, descending=True)[..., :count]  # kept pages first, its own last
    keys = kept.sum(-1) * SIZE - (-lengths % SIZE)[:, None]
    out = onepass.attention_decode(
        q.reshape(keys.numel(), 1, -1, q.shape[-1]),
        k_pages,
        v_pages,
        cache_seqlens=keys.flatten().int(),
        page_table=page_table.take_along_dim(order, -1).flatten(0, 1),
    )
    return out.reshape(*q.shape[:-1], -1)


def attention_to_means(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Tiles see the means of all tiles; with causal, queries see the means of the blocks before their own."""
    if not causal:
        return onepass.attention(means(q), means(k), means(v)).repeat_interleave(SIZE, 1)
    end = torch.arange(q.shape[1], device=q.device) // SIZE
    ranges = torch.stack([torch.zeros_like(end), end], -1).int()[None, None]
    return onepass.attention(q, means(k), means(v), key_ranges=ranges)


def cubes(x: Tensor, frames: int, height: int, width: int) -> Tensor:
    """Tokens of a video (batch, frames * height * width, ...), with those of a cube of 4 x 4 x 4 next to each other."""
    x = x.unflatten(1, (frames // 4, 4, height // 4, 4, width // 4, 4))
    return x.movedim((2, 4, 6), (4, 5, 6)).flatten(1, 6)


class Layer(nn.Module):
    """A layer that keeps `count` blocks by `choose`, or all without it."""

    def __init__(self, choose=None, count=0, causal=True, has_gate=False):
        super().__init__()
        self.choose, self.count, self.causal = choose, count, causal
        self.project = nn.ModuleList(nn.Linear(TOPICS + COLUMNS + 1, n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.last = nn.Linear(HEADS * HEAD_DIM, COLUMNS)
        self.gate = nn.Parameter(torch.zeros(HEADS, 1)) if has_gate else None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(2, (-1, HEAD_DIM)) for project in self.project)
        mask = None if self.choose is None else self.choose(q, k, self.count)
        out = onepass.attention(q, k, v, causal=self.causal, block_mask=mask)
        if self.gate is not None:
            out = out + self.gate * attention_to_means(q, k, v, self.causal)
        return self.last(out.flatten(2))


LAYERS: dict[str, dict[str, Any]] = {
    "all blocks": {},
    "video_tiles, 2 of 8": {"choose": video_tiles, "count": 2, "causal": False, "has_gate": True},
    "nsa, 4 of 8": {"choose": nsa, "count": 4, "has_gate": True},
    "moba, 2 of 8": {"choose": moba, "count": 2},
}


def episode(batch: int = 4) -> tuple[Tensor, Tensor]:
    """x (batch, 512, features): a topic, a value, and a mark of the first half; and the values of the second half."""
    topics = nn.functional.one_hot(torch.rand(2, batch, TOPICS).argsort(-1), TOPICS).float()
    values = torch.randn(batch, TOPICS, COLUMNS)
    mark = torch.ones(batch, TOPICS, 1)
    halves = [torch.cat([topics[0], values, mark], -1), torch.cat([topics[1], 0 * values, 0 * mark], -1)]
    x = torch.cat(halves, 1).repeat_interleave(SIZE, 1)
    target = (topics[1] @ topics[0].mT @ values).repeat_interleave(SIZE, 1)
    return x + 0.1 * torch.randn_like(x), target


def train(layer: Layer, steps: int) -> list[float]:
    """The losses; 1 is that of a layer that has learned nothing."""
    optimizer, like = torch.optim.Adam(layer.parameters(), 0.02), layer.last.weight
    losses = []
    for _ in range(steps):
        x, target = (t.to(like) for t in episode())
        loss = (layer(x)[:, -target.shape[1] :] - target).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def difference_with_all_blocks(options: dict[str, Any], x: Tensor) -> float:
    """The largest relative difference of out and dx, with all blocks chosen, from a layer without blocks."""
    layers = [Layer(**options | changed).to(x) for changed in ({"choose": None}, {"count": x.shape[1] // SIZE})]
    layers[1].load_state_dict(layers[0].state_dict())
    x, found = x.requires_grad_(), []
    for out in (layer(x) for layer in layers):
        found.append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))
    return max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(*found, strict=True))


def difference_of_a_step(choose, count: int, like: Tensor) -> float:
    """The largest relative difference of a token's attention over pages of one kv head from that with a mask."""
    batch, blocks, row = 2, 8, 7 * SIZE  # the last block has one token
    q, k, v = (torch.randn(batch, blocks * SIZE, n, HEAD_DIM).to(like) for n in (HEADS, KV_HEADS, KV_HEADS))
    mask = choose(q, k, count)
    expected = onepass.attention(q, k, v, causal=True, block_mask=mask)[:, row : row + 1]
    kept = mask.kinds[:, :, row // SIZE] > 0
    # a cache (num_pages, num_heads_kv, SIZE, head_dim), and the pages of each sequence
    k_cache, v_cache = (x.unflatten(1, (-1, SIZE)).transpose(2, 3).flatten(0, 1) for x in (k, v))
    page_table = torch.arange(len(k_cache), dtype=torch.int32, device=q.device).view(batch, 1, blocks)
    head = torch.arange(KV_HEADS, dtype=torch.int32, device=q.device).repeat_interleave(kept.shape[1] // KV_HEADS)
    found = decode_selected(
        q[:, row : row + 1],
        k_cache.flatten(0, 1)[:, :, None],
        v_cache.flatten(0, 1)[:, :, None],
        page_table * KV_HEADS + head[:, None],
        kept,
        torch.full((batch,), row + 1, device=q.device),
        count,
    )
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    steps = parser.parse_args().steps
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(0)
    for name, options in LAYERS.items():
        difference = difference_with_all_blocks(options, episode()[0].to(device, dtype))
        losses = train(Layer(**options).to(device, dtype), steps)
        last = sum(losses[-10:]) / len(losses[-10:])
        print(f"{name}: loss {losses[0]:.2f} to {last:.3f}; with all blocks kept, off by {difference:.0e}")
    for choose, count in ((nsa, 4), (moba, 2), (moba, 8)):
        difference = difference_of_a_step(choose, count, torch.empty(0, device=device, dtype=dtype))
        print(f"{choose.__name__}, {count} of 8, a step over pages: off by {difference:.0e}")

"""The choices of blocks in examples/block_sparsity.py, compared with definitions in loops and with the oracle."""

import inspect
import runpy
from pathlib import Path

import pytest
import torch

from onepass import reference
from onepass.testing import Call, compare
from onepass.testing.rounding import floor_of_out

ROOT = Path(__file__).parents[2]
EXAMPLE = runpy.run_path(str(ROOT / "examples" / "block_sparsity.py"), run_name="block_sparsity")
SIZE, BLOCKS, DTYPE = 64, 6, torch.float64


def tensors(heads_q=4, heads_kv=2):
    torch.manual_seed(0)
    heads = {"q": heads_q, "k": heads_kv, "v": heads_kv}
    return {name: torch.randn(2, BLOCKS * SIZE, n, 16, dtype=DTYPE) for name, n in heads.items()}


def expected_blocks(name, q, k, count):
    """The numbers of the blocks that each block of queries keeps, by batch entry, head and block."""
    group, found = q.shape[2] // k.shape[2], {}
    mean = [[k[b, :, h].view(BLOCKS, SIZE, -1).mean(1) for h in range(k.shape[2])] for b in range(q.shape[0])]
    for b in range(q.shape[0]):
        for h in range(k.shape[2] if name == "nsa" else q.shape[2]):
            for m in range(BLOCKS):
                rows = slice(m * SIZE, (m + 1) * SIZE)
                if name == "video_tiles":
                    scores, always, candidates = mean[b][h // group] @ q[b, rows, h].mean(0), set(), range(BLOCKS)
                elif name == "moba":
                    scores, always, candidates = mean[b][h // group] @ q[b, rows.start, h], {m}, range(m)
                else:
                    own = q[b, rows.start, h * group : (h + 1) * group]
                    scores = (mean[b][h][:m] @ own.mT / 4).softmax(0).sum(1)
                    always = {0, max(m - 1, 0), m}
                    candidates = range(1, m - 1)
                best = sorted(candidates, key=lambda n, scores=scores: -float(scores[n]))
                found[b, h, m] = always | set(best[: count - len(always)])
    return found


@pytest.mark.parametrize(("name", "count"), [("video_tiles", 2), ("nsa", 4), ("moba", 3)])
@pytest.mark.parametrize("heads_kv", [2, 4])
def test_choices(name, count, heads_kv):
    given = tensors(heads_kv=heads_kv)
    mask = EXAMPLE[name](given["q"], given["k"], count)
    expected = expected_blocks(name, given["q"], given["k"], count)
    assert mask.kinds.shape == (2, heads_kv if name == "nsa" else 4, BLOCKS, BLOCKS)
    for where, blocks in expected.items():
        assert set(mask.kinds[where].nonzero().flatten().tolist()) == blocks
    is_causal = name != "video_tiles"
    kept = [min(count, m + 1) if is_causal else count for m in range(BLOCKS)]
    assert ((mask.kinds != 0).sum(-1) == torch.tensor(kept)).all()
    Call(given, {"block_mask": mask, "causal": is_causal}).check()


@pytest.mark.parametrize("options", list(EXAMPLE["LAYERS"].values())[1:], ids=["video_tiles", "nsa", "moba"])
def test_layers(options):
    """All blocks are ordinary attention. No causal layer looks at a later token, and each one learns."""
    torch.manual_seed(0)
    x = EXAMPLE["episode"](2)[0].double()
    assert EXAMPLE["difference_with_all_blocks"](options, x.clone()) < 1e-12
    layer = EXAMPLE["Layer"](**options).double()
    if layer.gate is not None:
        layer.gate.data.fill_(0.5)
    changed = x.clone()
    changed[:, 460:] = 5 * torch.randn_like(x[:, 460:])  # within the last block
    same = (layer(x) - layer(changed))[:, :460].abs().amax() < 1e-12
    assert same == layer.causal
    losses = EXAMPLE["train"](EXAMPLE["Layer"](**options), 30)
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


@pytest.mark.parametrize("filled", [1, 37, SIZE])
@pytest.mark.parametrize("choices", [1, 2, 4], ids=["all heads", "kv heads", "query heads"])
def test_decode_selected(choices, filled):
    """A page holds both kv heads, or one. Pages lie in any order; rows that no choice keeps are NaN."""
    given = tensors()
    q, last, block = given["q"][:, :1], torch.tensor([2, BLOCKS - 1])[:, None, None], torch.arange(BLOCKS)
    kept = (block == last) | (block < last) & (torch.rand(2, choices, BLOCKS) < 0.5)
    lengths = last.flatten() * SIZE + torch.tensor([filled, 20])
    is_seen = kept.repeat_interleave(SIZE, -1) & (torch.arange(BLOCKS * SIZE) < lengths[:, None, None])
    parts = min(choices, 2)  # of a block: its pages
    numbers = torch.randperm(2 * parts * BLOCKS).view(2, parts, BLOCKS)
    has_key, pools = is_seen.view(2, parts, -1, BLOCKS * SIZE).any(2)[..., None, None], []
    for x in (given["k"], given["v"]):
        rows = x.unflatten(2, (parts, -1)).transpose(1, 2).where(has_key, torch.nan)
        pools.append(rows.unflatten(2, (BLOCKS, SIZE)).flatten(0, 2)[numbers.flatten().argsort()])
    table = numbers.where(block <= last, 10**6).int().repeat_interleave(choices // parts, 1)
    out = EXAMPLE["decode_selected"](q, *pools, table, kept, lengths, int(kept.sum(-1).max()))
    bias = torch.zeros(is_seen.shape, dtype=DTYPE).masked_fill(~is_seen, -torch.inf)
    given |= {"q": q, "bias": bias.repeat_interleave(4 // choices, 1)[:, :, None]}
    oracle, plain = (reference.attention(**given, compute_dtype=dtype) for dtype in (DTYPE, torch.float32))
    floor = floor_of_out(DTYPE, **given, oracle=oracle)
    assert compare("out", out, oracle.out, plain.out, floor=floor).ok


@pytest.mark.parametrize(("name", "count"), [("nsa", 4), ("nsa", 8), ("moba", 2), ("moba", 8)])
def test_a_step_of_generation(name, count):
    """It is a row of attention with the mask; with all blocks, of ordinary attention."""
    torch.manual_seed(0)
    assert EXAMPLE["difference_of_a_step"](EXAMPLE[name], count, torch.empty(0, dtype=DTYPE)) < 1e-12


def test_cubes_of_a_video():
    frames, height, width = 8, 4, 12
    where = torch.cartesian_prod(*map(torch.arange, (frames, height, width)))
    found = EXAMPLE["cubes"](where.expand(2, -1, -1), frames, height, width).view(2, -1, SIZE, 3)
    assert ((found // 4).amin(2) == (found // 4).amax(2)).all()
    assert found[0].flatten(0, 1).unique(dim=0).shape == where.shape


@pytest.mark.parametrize(
    "name", ["means", "blocks_back", "mask_of_best", "video_tiles", "nsa", "moba", "decode_selected"]
)
def test_the_cookbook_shows_them(name):
    page = (ROOT / "docs" / "guide" / "masks.md").read_text(encoding="utf-8")
    assert inspect.getsource(EXAMPLE[name]) in page

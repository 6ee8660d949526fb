"""Draws docs/pictures/fp8.png and fp8.svg: what rotation does to a key with an outlier, and where its error goes.

    python docs/pictures/draw_fp8.py

Everything drawn is computed here, with the functions that `onepass.attention` uses. Needs matplotlib:
pip install ".[bench]"
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

import onepass
from onepass import reference
from onepass.quantization import codec, rotation
from onepass.testing import table3

HEAD_DIM, OUTLIER, COLUMN = 128, 20.0, 40
SEQLEN, QUERIES, SEEDS = 2048, 512, 4
INK, MUTED = "#1f2933", "#7b8794"
BEFORE, AFTER = "#d9822b", "#2f6fb3"
METHODS = [
    ("one scale a tensor", {"granularity": "tensor", "rotate": False}),
    ("+ block scales", {"rotate": False}),
    ("+ rotation", {}),
    ("scales of rows", {"granularity": "row"}),
]


def titled(ax, title: str) -> None:
    ax.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(colors=MUTED, labelsize=9)


def draw_key(ax) -> None:
    """Left: one key, before and after."""
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(HEAD_DIM, generator=generator)
    key[COLUMN] = OUTLIER
    rotated = rotation.rotated(key, 0)
    titled(ax, "A key with an outlier")
    ax.vlines(range(HEAD_DIM), 0, key, color=BEFORE, linewidth=1.2, label="as given")
    ax.vlines(range(HEAD_DIM), 0, rotated, color=AFTER, linewidth=1.2, label="rotated", alpha=0.8)
    ax.set_xlabel("column", color=MUTED, fontsize=9)
    ax.legend(frameon=False, fontsize=9)


def draw_spacing(ax) -> None:
    """Middle: the relative error of e4m3 over magnitudes: what no scale can change."""
    x = torch.logspace(-12, 8.8, 4000, base=2.0, dtype=torch.float64).float()
    error = (x.to(codec.E4M3).float() / x - 1).abs()
    titled(ax, "Relative error of e4m3")
    ax.plot(x, error, color=AFTER, linewidth=0.7)
    ax.axhline(2.0**-4, color=BEFORE, linewidth=1, linestyle=(0, (4, 3)))
    ax.text(2.0**-11.5, 2.0**-4 + 0.006, "1/16", color=BEFORE, fontsize=9)
    ax.set_xscale("log", base=2)
    ax.set_ylim(0, 0.3)
    ax.set_xlabel("stored value", color=MUTED, fontsize=9)


def draw_errors(ax) -> None:
    """Right: root mean square error of out on the paper's distribution, at a length that a CPU does in seconds."""
    errors = []
    for _, options in METHODS:
        squares = []
        for seed in range(SEEDS):
            generator = torch.Generator().manual_seed(seed)
            q, k, v = (table3.with_outliers(SEQLEN, generator) for _ in range(3))
            q = q[:, :QUERIES]
            exact = reference.attention(q, k, v).out
            out = onepass.attention(onepass.quantize_fp8(q, k, v, **options))
            squares.append((out.double() - exact).square().mean())
        errors.append(float(torch.stack(squares).mean().sqrt()))
    titled(ax, f"RMSE of out, {SEQLEN} keys with outliers")
    bars = ax.barh([name for name, _ in METHODS], errors, color=[BEFORE, BEFORE, AFTER, AFTER], height=0.6)
    ax.bar_label(bars, [f"{error:.1e}" for error in errors], padding=3, fontsize=9, color=INK)
    ax.set_xlim(0, 1.25 * max(errors))
    ax.invert_yaxis()


def main() -> None:
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.3), width_ratios=(1, 1, 1.1), layout="constrained")
    for ax, draw in zip(axes, (draw_key, draw_spacing, draw_errors), strict=True):
        draw(ax)
    here = Path(__file__).parent
    # no date in the file: the same code draws the same bytes
    figure.savefig(here / "fp8.png", dpi=150, facecolor="white", metadata={"Software": None})
    plt.rcParams["svg.hashsalt"] = "onepass"
    figure.savefig(here / "fp8.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()

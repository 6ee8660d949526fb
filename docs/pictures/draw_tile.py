"""Draws docs/pictures/tile.png and tile.svg: one query tile's way through causal attention.

    python docs/pictures/draw_tile.py

The visiting order is not drawn by hand: it comes from `block_range.key_tiles`, which the backends loop over.
Needs matplotlib: pip install ".[bench]"
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

from onepass.geometry.block_range import key_tiles, tiles

SEQLEN, TILE = 24, 4
CAUSAL = (None, 0)  # window_left, window_right
M_BLOCK = 4  # the query tile whose way is drawn

INK, MUTED = "#1f2933", "#7b8794"
Q_COLOR, K_COLOR, V_COLOR, S_COLOR, CUT_COLOR, STATE_COLOR = (
    "#2f6fb3",
    "#d9822b",
    "#3f9142",
    "#c9dcf0",
    "#f2c14e",
    "#efe6f7",
)


def box(ax, x, y, width, height, color, label="", size=11, edge=INK, text_color=INK, **options):
    """A rectangle with its lower left corner at (x, y) and a label in the middle."""
    ax.add_patch(Rectangle((x, y), width, height, facecolor=color, edgecolor=edge, linewidth=1.1, **options))
    ax.text(x + width / 2, y + height / 2, label, ha="center", va="center", fontsize=size, color=text_color)


def arrow(ax, start, end, color=INK, **options):
    ax.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=14, color=color, linewidth=1.4, **options)
    )


def draw_visits(ax) -> None:
    """Left: the whole score matrix, which is never stored; the tiles visited for one query tile are numbered."""
    ax.set_title("Which tiles are visited", loc="left", fontsize=13, fontweight="bold", color=INK)
    for i, (m_start, m_end) in enumerate(tiles(0, SEQLEN, TILE)):
        is_ours = i == M_BLOCK
        for n_start, n_end in tiles(0, SEQLEN, TILE):
            ax.add_patch(
                Rectangle((n_start, m_start), n_end - n_start, m_end - m_start, facecolor="white", edgecolor="#dde2e7")
            )
        order = key_tiles(m_start, m_end, SEQLEN, SEQLEN, *CAUSAL, TILE)
        for visit, (n_start, n_end, needs_mask) in enumerate(order, start=1):
            color = CUT_COLOR if needs_mask else S_COLOR
            patch = Rectangle((n_start, m_start), n_end - n_start, m_end - m_start, facecolor=color, edgecolor="white")
            patch.set_alpha(1.0 if is_ours else 0.35)
            ax.add_patch(patch)
            if is_ours:
                center = (n_start + n_end) / 2, (m_start + m_end) / 2
                ax.text(*center, str(visit), ha="center", va="center", fontsize=14, fontweight="bold", color=INK)
    ours = tiles(0, SEQLEN, TILE)[M_BLOCK]
    ax.add_patch(Rectangle((0, ours[0]), SEQLEN, TILE, facecolor="none", edgecolor=Q_COLOR, linewidth=2.4))
    ax.plot([0, SEQLEN], [0, SEQLEN], color=MUTED, linewidth=1, linestyle=(0, (4, 3)))
    white = {"facecolor": "white", "edgecolor": "none", "pad": 2}
    ax.text(
        18, 6.0, "skipped: no query\nsees these keys", ha="center", va="center", fontsize=10.5, color=MUTED, bbox=white
    )
    ax.text(-0.6, (ours[0] + ours[1]) / 2, "Q tile", ha="right", va="center", fontsize=11.5, color=Q_COLOR)
    ax.text(-0.6, 1.0, "queries", ha="right", va="center", fontsize=10.5, color=MUTED)
    ax.text(0, -0.7, "keys", ha="left", va="bottom", fontsize=10.5, color=MUTED)
    for x, color, label in ((0, S_COLOR, "all pairs seen"), (12, CUT_COLOR, "cut by the mask")):
        ax.add_patch(Rectangle((x, SEQLEN + 1.0), 1.2, 1.2, facecolor=color, edgecolor="white"))
        ax.text(x + 1.7, SEQLEN + 1.6, label, va="center", fontsize=10.5, color=INK)
    ax.set_xlim(-5, SEQLEN + 0.3)
    ax.set_ylim(SEQLEN + 2.6, -2)
    ax.set_aspect("equal", anchor="N")
    ax.axis("off")


def draw_step(ax) -> None:
    """Right: what happens at each visit."""
    ax.set_title("What happens at each visit", loc="left", fontsize=13, fontweight="bold", color=INK)
    order = key_tiles(M_BLOCK * TILE, (M_BLOCK + 1) * TILE, SEQLEN, SEQLEN, *CAUSAL, TILE)
    count = len(order)

    # keys and values stream by
    for visit in range(count, 0, -1):  # the next one is drawn last, in front
        x, y = 9.2 + 1.55 * (visit - 1), 15.6
        look = {"alpha": 1.0, "text_color": "white"} if visit == 1 else {"alpha": 0.35}
        box(ax, x, y, 1.3, 2.6, K_COLOR, f"K{visit}", 10.5, **look)
        box(ax, x, y - 3.0, 1.3, 2.6, V_COLOR, f"V{visit}", 10.5, **look)
    end = 9.2 + 1.55 * count
    arrow(ax, (end + 1.6, 15.3), (end + 0.1, 15.3), MUTED)
    ax.text(9.2, 18.7, "K and V tiles stream by, in this order", fontsize=11, color=INK)

    # the query tile stays
    box(ax, 0.4, 13.9, 4.2, 2.9, Q_COLOR, "Q tile", 12, text_color="white")
    ax.text(0.4, 17.2, "stays", fontsize=11, color=INK)

    # score tile, probabilities
    box(ax, 0.4, 8.3, 4.2, 2.9, S_COLOR, "S = scale · Q Kᵀ\nmasked if cut", 11)
    box(ax, 5.5, 8.3, 3.7, 2.9, S_COLOR, "P =\nexp(S − m′)", 11)
    arrow(ax, (2.5, 13.8), (2.5, 11.3))
    arrow(ax, (9.1, 16.2), (3.8, 11.3), K_COLOR, connectionstyle="arc3,rad=0.12")
    arrow(ax, (4.65, 9.75), (5.45, 9.75))

    # the running state
    ax.add_patch(Rectangle((0.4, 0.9), 17.6, 5.6, facecolor=STATE_COLOR, edgecolor=INK, linewidth=1.1))
    ax.text(0.9, 5.7, "kept for each query row; then m ← m′", fontsize=10.5, color=MUTED, va="center")
    lines = (
        ("row max", "m′ = max(m, row max of S)"),
        ("row sum", "ℓ ← exp(m − m′) ℓ + row sum of P"),
        ("accumulator", "A ← exp(m − m′) A + P V"),
    )
    for i, (name, formula) in enumerate(lines):
        y = 4.5 - 1.3 * i
        ax.text(0.9, y, name, fontsize=11, color=INK, va="center", fontweight="bold")
        ax.text(5.6, y, formula, fontsize=11.5, color=INK, va="center")
    arrow(ax, (2.5, 8.2), (2.5, 6.6))
    arrow(ax, (7.35, 8.2), (7.35, 6.6))
    arrow(ax, (9.85, 12.5), (9.85, 6.6), V_COLOR)
    arrow(ax, (9.2, 0.8), (9.2, -0.5))
    ax.text(9.2, -1.2, f"after visit {count}:   out = A / ℓ,   lse = m + log ℓ", ha="center", va="center", fontsize=12)
    ax.set_xlim(0, 19.5)
    ax.set_ylim(-2.2, 20.2)
    ax.axis("off")


def main() -> None:
    figure, axes = plt.subplots(1, 2, figsize=(11.5, 5.6), width_ratios=(1, 1.12), layout="constrained")
    draw_visits(axes[0])
    draw_step(axes[1])
    here = Path(__file__).parent
    # no date in the file: the same code draws the same bytes
    figure.savefig(here / "tile.png", dpi=150, facecolor="white", metadata={"Software": None})
    plt.rcParams["svg.hashsalt"] = "onepass"
    figure.savefig(here / "tile.svg", facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""A results file as pictures: one PNG for each case set, with bars like the FlashAttention-3 paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..testing.machine import counted

Row = dict[str, Any]

# Each contender has one color in every picture, and onepass the strongest.
_COLORS = {
    "onepass": "#d1495b",
    "onepass-no-window": "#e9b3ba",
    "onepass page 16": "#f2c9cf",
    "onepass page 64": "#e39aa5",
    "onepass page 256": "#b8717c",
    "sdpa": "#30638e",
    "sdpa-flash": "#30638e",
    "sdpa-cudnn": "#00798c",
    "sdpa-efficient": "#8d96a3",
    "fa3": "#edae49",
    "fa4": "#7a5195",
}
_FALLBACK = "#555555"
INK, MUTED, LINES = "#1f2933", "#6b7785", "#e3e8ed"  # text, what matters less, lines behind the data


def plot(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw all sets of a report (the JSON content, or `Report.to_dict()`).

    Args:
        path: the PNG file. If the report has several sets, the name of the set is added before the suffix.

    Returns: the files written, none for a report without results.
    """
    import matplotlib

    matplotlib.use("Agg")
    sets = list(dict.fromkeys(row["set"] for row in report["rows"]))
    written = []
    for name in sets:
        rows = [row for row in report["rows"] if row["set"] == name and row["contenders"]]
        if not rows:
            continue
        target = path if len(sets) == 1 else path.with_name(f"{path.stem}-{name}{path.suffix}")
        _draw(rows, report["header"], target)
        written.append(target)
    return written


def plot_ablation(report: dict[str, Any], path: Path) -> list[Path]:
    """Draw the configurations of an `onepass ablate` report as bars, in the order of its table.

    Returns: the files written, none for a report without results.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    (row,) = report["rows"]
    found = {entry["label"]: row["contenders"].get(entry["label"], {}) for entry in row["configurations"]}
    timed = {label: entry for label, entry in found.items() if "tflops" in entry}
    if not timed:
        return []
    _, unit, scale = _what_to_show([{**row, "contenders": timed}])
    size = 7.5, 1.1 + 0.32 * len(timed)
    figure, ax = plt.subplots(figsize=size)
    colors = [_COLORS["onepass"] if label == next(iter(found)) else _COLORS["sdpa-efficient"] for label in timed]
    heights = [entry["tflops"] * scale for entry in timed.values()]
    ax.barh(range(len(timed)), heights, 0.75, color=colors)
    for at, (height, entry) in enumerate(zip(heights, timed.values(), strict=True)):
        ratio = entry.get("relative_speed", {}).get("median")
        text = _number(height) if ratio is None else f"{_number(height)}  ({ratio:.3f})"
        ax.annotate(text, (height, at), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_yticks(range(len(timed)), list(timed), fontsize=8)
    ax.invert_yaxis()
    ax.set_xlim(0, 1.2 * max(heights))
    ax.set_xlabel(f"{unit} (ratio to the full configuration)", fontsize=9)
    ax.set_title(row["label"], fontsize=9)
    _without_frame(ax, "x")
    figure.suptitle(_title([row], report["header"]), fontsize=10, fontweight="bold", y=1 - 0.08 / size[1])
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return [path]


def _draw(rows: Sequence[Row], header: dict[str, Any], path: Path) -> None:
    """Draw panels by direction and causal (down) and head_dim (across), or one panel if there is only one length."""
    from matplotlib import pyplot as plt

    kind, unit, scale = _what_to_show(rows)
    is_decoding = rows[0]["measure"] == "decode"
    is_grid = is_decoding or len({row["case"]["seqlen_q"] for row in rows}) > 1
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in sorted(rows, key=_reading_order):
        panels.setdefault(_panel(row) if is_grid else ("", ""), []).append(row)
    down, across = (list(dict.fromkeys(panel[i] for panel in panels)) for i in (0, 1))
    names = [name for name in _COLORS if any(name in row["contenders"] for row in rows)]
    names += sorted({name for row in rows for name in row["contenders"]} - set(names))

    widest = max(len(members) for members in panels.values())
    width, height = max(3.4, 0.8 + 0.17 * (len(names) + 1) * widest), 2.3
    if not is_grid:
        width, height = max(6.5, 1.0 + 1.5 * widest), 3.4
    room = 1.3 if len(names) > 2 else 1.15
    margin = 0.9  # inches, for the title above and the legend below
    size = width * len(across), height * len(down) + margin
    figure, all_axes = plt.subplots(len(down), len(across), figsize=size, squeeze=False, sharey="row")
    for i, axes in enumerate(all_axes):
        for j, ax in enumerate(axes):
            members = panels.get((down[i], across[j]), [])
            if not members:
                ax.axis("off")
                continue
            _bars(ax, members, names, kind, scale, is_grid)
            ax.set_title(", ".join(filter(None, (down[i], across[j]))), fontsize=9)
            if j == 0:
                ax.set_ylabel(unit, fontsize=9)
            if is_grid and i == len(down) - 1:
                ax.set_xlabel("batch x keys" if is_decoding else "sequence length", fontsize=9)
        # room for the numbers above the bars; one scale for all panels of a row
        axes[0].set_ylim(0, room * scale * _highest(panels, down[i], kind))
    handles = [plt.Rectangle((0, 0), 1, 1, color=_COLORS.get(name, _FALLBACK)) for name in names]
    figure.suptitle(_title(rows, header), fontsize=8.5, fontweight="bold", y=1 - 0.12 / size[1])
    figure.legend(handles, names, loc="lower center", ncol=len(names), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.3 / size[1], 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _highest(panels: dict[tuple[str, str], list[Row]], down: str, kind: str) -> float:
    members = (row for panel, rows in panels.items() if panel[0] == down for row in rows)
    return max((entry[kind] for row in members for entry in row["contenders"].values()), default=0.0) or 1.0


def _reading_order(row: Row) -> tuple:
    case = row["case"]
    lengths = case["seqlen_q"], case["seqlen_k"], case["batch"]
    return case["direction"] != "fwd", case["causal"], case["head_dim"], *lengths


def _panel(row: Row) -> tuple[str, str]:
    case = row["case"]
    if row["measure"] == "decode":
        return f"{case['heads_q']} heads over {case['heads_kv']}", f"head dim {case['head_dim']}"
    direction = "forward" if case["direction"] == "fwd" else "backward"
    return f"{direction}, {'causal' if case['causal'] else 'not causal'}", f"head dim {case['head_dim']}"


def _what_to_show(rows: Sequence[Row]) -> tuple[str, str, float]:
    """The key of a contender's entry, the unit, and the factor from the JSON's unit to the one that is shown."""
    if rows[0]["measure"] == "memory":
        return "extra_bytes", "peak extra memory, MiB", 2.0**-20
    if rows[0]["measure"] == "decode":
        return "of_copy", "% of a copy's bandwidth", 100.0
    if all(row["case"]["window"] is not None for row in rows):
        # a window changes the amount of work, so the time says what TFLOP/s would hide
        return "median_ms", "ms", 1.0
    fastest = max(entry["tflops"] for row in rows for entry in row["contenders"].values())
    return ("tflops", "TFLOP/s", 1.0) if fastest >= 10 else ("tflops", "GFLOP/s", 1e3)


def _bars(ax: Any, rows: Sequence[Row], names: Sequence[str], kind: str, scale: float, is_grid: bool) -> None:
    bar = 0.84 / len(names)
    for group, row in enumerate(rows):
        present = [name for name in names if name in row["contenders"]]
        for index, name in enumerate(present):
            height = row["contenders"][name][kind] * scale
            at = group + (index + 0.5 - len(present) / 2) * bar
            ax.bar(at, height, 0.92 * bar, color=_COLORS.get(name, _FALLBACK))
            ax.annotate(
                _number(height),
                (at, height),
                xytext=(0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6 if len(names) > 2 else 7,
                rotation=90 if len(names) > 2 else 0,
            )
    labels = [_short_tick(row) if is_grid else _tick(row) for row in rows]
    ax.set_xticks(range(len(rows)), labels, fontsize=8)
    ax.set_xlim(-0.5, len(rows) - 0.5)
    _without_frame(ax, "y")


def _without_frame(ax: Any, values: str) -> None:
    """Draw lines behind the bars, at the values, and no frame."""
    ax.tick_params(axis=values, labelsize=8)
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(axis=values, color="#dddddd", linewidth=0.6)
    ax.set_axisbelow(True)


def _short_tick(row: Row) -> str:
    case = row["case"]
    if row["measure"] == "decode":
        queries = f"\n{case['seqlen_q']} queries" if case["seqlen_q"] > 1 else ""
        return f"{case['batch']} x {_length(case['seqlen_k'])}{queries}"
    return _length(case["seqlen_q"]) + _bounds(row)


def _bounds(row: Row) -> str:
    window = row["case"]["window"]
    return "" if window is None else f"\nwindow ({window[0]}, {window[1]})"


def _tick(row: Row) -> str:
    first, second = _panel(row)
    case = row["case"]
    return f"{first}\n{second}, seqlen {_length(case['seqlen_q'])}{_bounds(row)}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _length(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen >= 1024 and seqlen % 1024 == 0 else str(seqlen)


def _title(rows: Sequence[Row], header: dict[str, Any]) -> str:
    versions = header["versions"]
    dtypes = "/".join(sorted({row["case"]["dtype"] for row in rows}))
    threads = "" if header["device"].startswith("cuda") else f", {counted(header['cpu']['torch_threads'], 'thread')}"
    return (
        f"{rows[0]['set']}: {dtypes} on {header['device_name']}{threads}; "
        f"onepass {versions['onepass']}, torch {versions['torch']}"
    )

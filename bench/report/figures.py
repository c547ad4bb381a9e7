"""Figures: lines against the sequence length, from rows of results alone; their styles, legend and caption."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cases.methods import METHODS, OURS
from ..measure.memory import OUT_OF_MEMORY
from . import summary
from .text import short_bytes, short_time

Row = dict[str, Any]
Points = Sequence[tuple[int, float]]
"""Length and value."""
KIND = ("group", "head_dim", "rel_dim", "table", "is_causal", "dtype")
"""Rows that agree in these are points of the same lines."""
INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
# Ours in a strong colour; the baselines are told apart by lightness and marker, also in print and by the colour-blind.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d1495b", "marker": "o", "linewidth": 2.8, "markersize": 7, "zorder": 5},
    "shaw_gather": {"color": "#0b3954", "marker": "s"},
    "gather": {"color": "#2f7fb5", "marker": "^"},
    "skewing": {"color": "#79b4a9", "marker": "D"},
    "dense_bias": {"color": "#a8a39d", "marker": "v"},
    "plain": {"color": "#d1495b", "marker": "o", "linestyle": ":", "markersize": 4},
    "sdpa": {"color": "#6b7785", "marker": ".", "linestyle": ":"},
    "sdpa_flash": {"color": "#6b7785", "marker": "1", "linestyle": ":"},
    "sdpa_cudnn": {"color": "#6b7785", "marker": "2", "linestyle": ":"},
    "sdpa_bias": {"color": "#a8a39d", "marker": "1"},
    "sdpa_bias_cudnn": {"color": "#a8a39d", "marker": "2"},
    "sdpa_bias_efficient": {"color": "#a8a39d", "marker": "3"},
    "flex_attention": {"color": "#edae49", "marker": "P"},
    "onnxruntime": {"color": "#7a4419", "marker": "*"},
    "disentangled_flash": {"color": "#8d5a97", "marker": "X"},
    "flashdeberta": {"color": "#5b8e7d", "marker": "h"},
}
BASELINE_STYLE = {"linewidth": 1.6, "markersize": 5.5, "zorder": 3}
PANEL_HEIGHT, PANEL_WIDTH = 3.9, 5.2  # inches


def _powers(low: float, high: float, base: float, unit: float) -> list[float]:
    """Ticks unit * base^k, from the last one below low to the first one above high; both are positive."""
    tick = unit
    while tick > low:
        tick /= base
    while tick * base <= low:
        tick *= base
    ticks = [tick]
    while ticks[-1] < high or len(ticks) < 2:
        ticks.append(ticks[-1] * base)
    return ticks


def _length(value: float) -> str:
    """256, 512, 1k, 2k ..."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


QUANTITIES: dict[str, tuple[float, float, Callable[[float], str]]] = {
    "bytes": (4, 2**20, short_bytes),
    "time": (10, 1.0, short_time),
    "ratio": (2, 1.0, lambda ratio: f"{ratio:g}x"),
}
"""Base and unit of the ticks of a vertical axis, and how a value is written; times are in milliseconds."""


def ticks_of(values: Sequence[float], quantity: str) -> tuple[list[float], list[str]]:
    """Return the ticks of a logarithmic axis and their labels, for the values that are positive. quantity: one of QUANTITIES."""
    base, unit, show = QUANTITIES[quantity]
    positive = [value for value in values if value > 0] or [unit]  # a peak above the inputs may be 0
    ticks = _powers(min(positive), max(positive), base, unit)
    return ticks, [show(tick) for tick in ticks]


def style(axes: Any, title: str, xlabel: str) -> None:
    """Title, label, grid and spines of a panel."""
    axes.set_title(title, loc="left", fontsize=12.5, fontweight="bold", color=INK, pad=12)
    axes.set_xlabel(xlabel, color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, pad=6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def draw_panel(axes: Any, points: Mapping[str, Points], styles: Mapping[str, dict[str, Any]], quantity: str, title: str) -> None:
    """Lines against the sequence length, both axes logarithmic. quantity: one of QUANTITIES."""
    for name, values in points.items():
        axes.plot(*zip(*values, strict=True), label=name, clip_on=False, **(BASELINE_STYLE | styles[name]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    every = [value for values in points.values() for _, value in values]
    lengths = sorted({length for values in points.values() for length, _ in values})
    if every:
        ticks, labels = ticks_of(every, quantity)
        axes.set_yticks(ticks, labels)
        axes.set_ylim(ticks[0], ticks[-1])
        axes.set_xticks(lengths, [_length(length) for length in lengths])
    axes.minorticks_off()
    style(axes, title, "sequence length n (tokens)")


def draw_memory_panel(axes: Any, rows: Sequence[Row], direction: str, title: str) -> None:
    """Peak memory against the length, how ours grows, and a cross where a method would have taken more than the limit."""
    measured = lines(rows, direction, "peak_bytes")
    power = summary.exponent(measured.get(OURS, ()))
    grows = "" if power is None else f", ours $\\sim n^{{{power:.2f}}}$"
    draw_panel(axes, measured, STYLES, "bytes", f"{title}{grows}")
    if not measured:
        return
    failed = [row for row in rows if row["direction"] == direction and row["status"].startswith(OUT_OF_MEMORY)]
    if not failed:
        return
    limits = [float(found[1]) * UNITS_OF[found[2]] for row in failed if (found := LIMIT.search(row["status"]))]
    if not limits:
        return
    limit, (base, _, show) = max(limits), QUANTITIES["bytes"]
    ticks = list(axes.get_yticks())
    while ticks[-1] < 1.5 * limit:
        ticks.append(ticks[-1] * base)
    axes.set_yticks(ticks, [show(tick) for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])
    axes.axhline(limit, color=MUTED, linewidth=0.8)
    for row in failed:
        mark = BASELINE_STYLE | STYLES[row["method"]] | {"linestyle": "", "marker": "x", "markersize": 9, "markeredgewidth": 2.2}
        axes.plot(int(row["seqlen"]), limit, **mark)
    first = min(int(row["seqlen"]) for row in failed)
    where = {"textcoords": "offset points", "ha": "right", "va": "bottom"}
    axes.annotate(f"out of memory: limit {short_bytes(limit)}", (first, limit), (-10, 4), fontsize=9, color=INK, **where)


LIMIT = re.compile(r"more than ([\d.]+) (MiB|GiB)")
UNITS_OF = {"MiB": 2**20, "GiB": 2**30}


def kinds(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each figure row: those that agree in KIND, if they have more than one length."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KIND), []).append(row)
    several = [of_kind for of_kind in found.values() if len({row["seqlen"] for row in of_kind}) > 1]
    return several or list(found.values())


def lines(rows: Sequence[Row], direction: str, column: str) -> dict[str, Points]:
    """The points of every method that has any."""
    every = {method: summary.points(rows, method, direction, column) for method in METHODS}
    return {method: points for method, points in every.items() if points}


def title_of(row: Row) -> str:
    """The kind, in words."""
    rows, p2c, _ = row["table"].partition(" p2c")
    table = ("a row for every distance" if rows == "full" else f"table: {rows} rows") + ", a second one for the keys" * bool(p2c)
    heads = row["heads"] if row["heads"] == row["key_heads"] else f"{row['heads']}:{row['key_heads']}"
    tokens = "16k tokens" if row["group"] == "long" else f"batch {row['batch']}"
    attention = "causal" if row["is_causal"] == "True" else "full"
    return f"{tokens}, {heads} heads of {row['head_dim']}, {attention} attention, {table}, {row['dtype']}"


def caption(rows: Sequence[Row], what: str, columns: int) -> str:
    """Device, versions and commit of all rows, and what is missing; for so many panels side by side."""
    origins = {
        f"{row['device']}{', ' + row['threads'] + ' threads' if row['device'].startswith('CPU') else ''}; torch {row['torch']}, "
        f"triton {row['triton']}, triton_relattn {row['package']} at commit {row['commit']}, {row['date'][:10]}"
        for row in rows
    }
    failed = {row["method"]: row for row in rows if row["status"].startswith("out of memory")}
    ends = ", ".join(f"{method} at {row['seqlen']}" for method, row in failed.items())
    missing = f" Out of memory: {ends}." if ends else ""
    return "\n".join(textwrap.wrap(f"{what} {'; '.join(sorted(origins))}.{missing}", 75 * columns))


def draw(
    rows: Sequence[Row], panels: Callable[[Sequence[Row], Sequence[Any]], None], columns: int, what: str, path: Path
) -> None:
    """A row of panels for each kind, one legend above, the conditions below."""
    import matplotlib.pyplot as plt

    every = kinds(rows)
    with plt.rc_context({"font.size": 10.5, "font.family": "DejaVu Sans", "text.color": INK}):
        size = (PANEL_WIDTH * columns, PANEL_HEIGHT * len(every) + 1.9)
        figure, axes = plt.subplots(len(every), columns, figsize=size, squeeze=False)
        for of_kind, of_row in zip(every, axes, strict=True):
            panels(of_kind, of_row)
            heading = of_row[0].annotate(
                title_of(of_kind[0]), (0, 1), (0, 30), xycoords="axes fraction", textcoords="offset points", color=MUTED
            )
            heading.set_in_layout(False)
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        figure.tight_layout(rect=(0.01, 0.75 / size[1], 0.99, 1 - 0.75 / size[1]), h_pad=4.5, w_pad=2.5)
        ordered = [method for method in METHODS if method in handles]
        figure.legend(
            [handles[method] for method in ordered], ordered, loc="upper left", ncols=5, frameon=False, bbox_to_anchor=(0.01, 1.0)
        )
        figure.text(0.02, 0.12 / size[1], caption(rows, what, columns), fontsize=8.5, color=MUTED, linespacing=1.5, va="bottom")
        figure.savefig(path, dpi=120, facecolor="white")
        plt.close(figure)

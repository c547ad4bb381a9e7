"""The figure: peak memory and time against length, from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import report, sweep
from .environment import Environment
from .methods import METHODS, OURS

Points = Sequence[tuple[int, float]]
"""Length and value."""
INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
# Ours in a strong colour; the baselines are told apart by lightness and marker, also in print and by the colour-blind.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d1495b", "marker": "o", "linewidth": 2.8, "markersize": 7, "zorder": 5},
    "shaw_gather": {"color": "#0b3954", "marker": "s"},
    "gather": {"color": "#2f7fb5", "marker": "^"},
    "skewing": {"color": "#79b4a9", "marker": "D"},
    "dense_bias": {"color": "#a8a39d", "marker": "v"},
}
BASELINE_STYLE = {"linewidth": 1.6, "markersize": 5.5, "zorder": 3}


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
    "bytes": (4, 2**20, report.short_bytes),
    "time": (10, 1.0, report.short_time),
    "ratio": (2, 1.0, lambda ratio: f"{ratio:g}x"),
}
"""Base and unit of the ticks of a vertical axis, and how a value is written; times are in milliseconds."""


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
    base, unit, show = QUANTITIES[quantity]
    if every:
        ticks = _powers(min(every), max(every), base, unit)
        axes.set_yticks(ticks, [show(tick) for tick in ticks])
        axes.set_ylim(ticks[0], ticks[-1])
        axes.set_xticks(lengths, [_length(length) for length in lengths])
    axes.minorticks_off()
    style(axes, title, "sequence length n (tokens)")


def _draw_measured(axes: Any, rows: Sequence[sweep.Row], column: str, title: str) -> None:
    measured = {method: report.measured(rows, method, column) for method in METHODS}
    points = {method: values for method, values in measured.items() if values}
    draw_panel(axes, points, STYLES, "bytes" if column == "peak_bytes" else "time", title)
    _annotate_ratio(axes, points)


def _annotate_ratio(axes: Any, points: Mapping[str, Points]) -> None:
    """At the longest length that every method reached: how many times the best baseline takes what ours takes.

    Beyond it the best baseline may be among those that are missing, and the ratio would flatter.
    """
    values = {method: dict(measured) for method, measured in points.items()}
    shared = set.intersection(*(set(values.get(method, ())) for method in METHODS))
    if not shared:
        return
    length, ours = max(shared), values[OURS]
    best = min(values[method][length] for method in METHODS if method != OURS)
    if best <= ours[length]:
        return
    axes.annotate(
        "",
        xy=(length, ours[length]),
        xytext=(length, best),
        arrowprops={"arrowstyle": "<->", "color": INK, "linewidth": 1, "shrinkA": 6, "shrinkB": 6},
        zorder=4,
    )
    axes.annotate(
        f"{best / ours[length]:.2g}x less",
        xy=(length, ours[length]),
        xytext=(7, -11),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=11,
        fontweight="bold",
        color=INK,
    )


def draw(rows: Sequence[sweep.Row], environment: Environment, path: Path) -> None:
    """Write the figure to path: two panels, one legend, and the conditions below."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10.5, "font.family": "DejaVu Sans", "text.color": INK}):
        figure, (memory, milliseconds) = plt.subplots(1, 2, figsize=(11, 5.4), gridspec_kw={"wspace": 0.28})
        figure.subplots_adjust(left=0.085, right=0.965, top=0.8, bottom=0.2)
        _draw_measured(memory, rows, "peak_bytes", "Peak memory")
        _draw_measured(milliseconds, rows, "milliseconds", "Time")
        handles, labels = memory.get_legend_handles_labels()
        powers = {method: report.exponent(report.measured(rows, method, "peak_bytes")) for method in labels}
        named = [label if powers[label] is None else f"{label}  (memory $\\sim n^{{{powers[label]:.1f}}}$)" for label in labels]
        figure.legend(handles, named, loc="upper left", bbox_to_anchor=(0.03, 0.99), ncols=3, frameon=False)
        figure.text(0.035, 0.02, _caption(rows, environment), fontsize=8.5, color=MUTED, linespacing=1.5)
        figure.savefig(path, dpi=160, facecolor="white")
        plt.close(figure)


def _caption(rows: Sequence[sweep.Row], environment: Environment) -> str:
    """The conditions, in two lines."""
    if not rows:
        return "nothing was measured"
    row = rows[0]
    shape = f"batch {row.batch}, {row.heads} heads of {row.head_dim}, {row.dtype}"
    versions = f"torch {row.torch}, triton {row.triton}, triton_relattn {environment.package} ({environment.implementation})"
    missing = " The CSV file says why points are missing." if any(other.status != "ok" for other in rows) else ""
    return (
        f"Forward + backward, full attention, one table of 2n - 1 rows, {shape}; {environment.device_name}.\n"
        f"{versions}. Memory: peak above the inputs.{missing}"
    )

"""Figures: lines against the sequence length, from rows of results alone; their styles, labels and caption."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from triton_relattn._peaks import OUT_OF_MEMORY

from ..cases.methods import METHODS, OURS
from . import summary
from .text import short_bytes, short_time

Row = dict[str, Any]
Points = Sequence[tuple[int, float]]
"""Length and value."""
Styles = Mapping[str, dict[str, Any]]
KIND = ("group", "head_dim", "rel_dim", "table", "is_causal", "dtype")
"""Columns that the points of a line have in common."""
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
}
BEST_DENSE = "dense"
"""The best of the dense methods at each length."""
LEADING = {OURS: "triton_relattn", BEST_DENSE: "best dense PyTorch", "sdpa": "SDPA without positions"}
"""Methods that figures show by default, and their names there."""
LEADING_STYLES: dict[str, dict[str, Any]] = {
    OURS: STYLES[OURS],
    BEST_DENSE: STYLES["shaw_gather"],
    "sdpa": STYLES["sdpa"] | {"markersize": 7},
}
BASELINE_STYLE = {"linewidth": 1.6, "markersize": 5.5, "zorder": 3}
LIMIT = re.compile(r"more than ([\d.]+) (MiB|GiB)")
"""In the status of what ran out of memory."""
BYTES = {"MiB": 2**20, "GiB": 2**30}
ROOM = 1.6
"""A factor of space for words above and below ratios."""
PANEL_HEIGHT, WIDTH, DPI = 3.1, 8.0, 160  # inches; pages show figures at 620 pixels or more
FONT, SMALL = 10.5, 9.5


def short_length(value: float) -> str:
    """256, 512, 1k, 2k ..."""
    return f"{value / 1024:g}k" if value >= 1024 and value % 1024 == 0 else f"{value:g}"


QUANTITIES: dict[str, tuple[float, float, Callable[[float], str]]] = {
    "bytes": (4, 2**20, short_bytes),
    "time": (10, 1.0, short_time),
    "ratio": (2, 1.0, lambda ratio: f"{ratio:g}x"),
}
"""Base and unit of the ticks of a vertical axis, and how a value is written; times are in milliseconds."""


def set_ticks(axes: Any, values: Sequence[float], quantity: str) -> None:
    """Logarithmic ticks, from the last one below the values to the first one above; a peak above the inputs may be 0."""
    base, unit, show = QUANTITIES[quantity]
    positive = [value for value in values if value > 0] or [unit]
    first = math.floor(math.log(min(positive) / unit, base) + 1e-9)
    last = max(first + 1, math.ceil(math.log(max(positive) / unit, base) - 1e-9))
    ticks = [unit * base**power for power in range(first, last + 1)]
    axes.set_yticks(ticks, [show(tick) for tick in ticks])
    axes.set_ylim(ticks[0], ticks[-1])


def style(axes: Any, title: str, xlabel: str, subtitle: str = "") -> None:
    """Title, label, grid and spines of a panel; with a subtitle, both begin above the labels of the ticks."""
    left = -0.14 if subtitle else 0
    axes.set_title(title, loc="left", x=left, fontsize=FONT + 0.5, fontweight="bold", color=INK, pad=24 if subtitle else 10)
    above = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(subtitle, (left, 1), (0, 8), fontsize=SMALL, color=MUTED, **above)
    axes.set_xlabel(xlabel, color=MUTED)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0, pad=6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(MUTED)


def draw_panel(axes: Any, points: Mapping[str, Points], styles: Styles, quantity: str, title: str, subtitle: str = "") -> None:
    """Lines against the sequence length, both axes logarithmic. quantity: one of QUANTITIES."""
    for name, values in points.items():
        label = textwrap.shorten(f"{name}: {METHODS[name].what}", 44, placeholder=" ...") if styles is STYLES else "_"
        axes.plot(*zip(*values, strict=True), label=label, clip_on=False, **(BASELINE_STYLE | styles[name]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plotted = [value for values in points.values() for _, value in values]
    lengths = sorted({length for values in points.values() for length, _ in values})
    if plotted:
        set_ticks(axes, plotted, quantity)
        axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.minorticks_off()
    style(axes, title, "sequence length (tokens)", subtitle)


def share_range(panels: Sequence[Any], quantity: str) -> None:
    """Give panels that are compared the same vertical range, that of all their lines."""
    limits = [limit for axes in panels if axes.lines for limit in axes.get_ylim()]
    if limits:
        for axes in panels:
            set_ticks(axes, limits, quantity)


def finding(points: Mapping[str, Points], comparison: str, otherwise: str) -> str:
    """A panel's title, "Dense takes 1.1 to 75 times {comparison}": the best of the dense methods over ours, at all lengths."""
    found = sorted(ratio for _, ratio in over_ours(points).get(BEST_DENSE, ()))
    if not found:
        return otherwise
    ends = (f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}" for ratio in (found[0], found[-1]))
    return f"Dense takes {' to '.join(dict.fromkeys(ends))} times {comparison}"


def over_ours(points: Mapping[str, Points]) -> dict[str, Points]:
    """How many times ours every other method takes, where both were measured."""
    ours = dict(points.get(OURS, ()))
    ratios = {
        method: [(length, value / ours[length]) for length, value in values if length in ours]
        for method, values in points.items()
        if method != OURS
    }
    return {method: values for method, values in ratios.items() if values}


def name_lines(axes: Any, points: Mapping[str, Points], are_flat: bool = False, end_of_dense: str = "") -> None:
    """Write the names of the leading lines beside them. end_of_dense: why the best dense one ends, a second line."""
    for method, values in points.items():
        look = {"color": LEADING_STYLES[method]["color"], "fontsize": SMALL, "fontweight": "bold" if method == OURS else None}
        where = {
            "xytext": (0, 10) if method == OURS else (-11, 8 if are_flat else 1),
            "textcoords": "offset points",
            "ha": "right",
            "va": "center",
        }
        text, point = LEADING[method], values[-1]
        if method == "sdpa" and are_flat:
            where["xytext"] = (0, -13)
        elif method == "sdpa":  # the lowest line, which rises: below an early point nothing is in the way
            where |= {"xytext": (5, -10), "ha": "left"}
            point = values[len(values) > 1]
        elif method == BEST_DENSE and end_of_dense:
            text, point, where["xytext"] = f"{text},\n{end_of_dense}", values[-2:][0], (-12, 9)
        axes.annotate(text, point, **where, **look)


def failures(rows: Sequence[Row], direction: str, methods: Collection[str]) -> dict[str, int]:
    """The shortest length at which each method ran out of memory; of the best dense one, where none was left."""
    found: dict[str, int] = {}
    for row in sorted((row for row in rows if row["direction"] == direction), key=lambda row: int(row["seqlen"])):
        if OUT_OF_MEMORY in row["status"]:
            found.setdefault(row["method"], int(row["seqlen"]))
    dense = [found.get(method) for method in summary.DENSE if any(row["method"] == method for row in rows)]
    if dense and (longest := [length for length in dense if length]) and len(longest) == len(dense):
        found[BEST_DENSE] = max(longest)
    return {method: length for method, length in found.items() if method in methods}


def draw_memory_panel(axes: Any, rows: Sequence[Row], direction: str, methods: Collection[str]) -> None:
    """Peak memory against the length, and a cross where a method would have taken more than the limit."""
    measured, styles = lines(rows, direction, "peak_bytes", methods), choose_styles(methods)
    title = finding(lines(rows, direction, "peak_bytes", LEADING), "as much", "Peak memory")
    draw_panel(axes, measured, styles, "bytes", title, f"{direction.replace('+', ' + ')}: peak memory, lower is better")
    if styles is LEADING_STYLES:
        name_lines(axes, measured)
    failed = failures(rows, direction, measured)
    limits = [float(found[1]) * BYTES[found[2]] for row in rows if (found := LIMIT.search(row["status"]))]
    if not (measured and failed and limits):
        return
    limit = max(limits)
    set_ticks(axes, [*axes.get_ylim(), 1.5 * limit], "bytes")
    axes.axhline(limit, color=MUTED, linewidth=0.8)
    for method, length in failed.items():
        mark_failure(axes, length, limit, styles[method])
    where = {"textcoords": "offset points", "ha": "right", "va": "bottom"}
    first = min(failed.values())
    axes.annotate(f"out of memory: more than {short_bytes(limit)}", (first, limit), (-8, 4), fontsize=SMALL, color=INK, **where)


def mark_failure(axes: Any, length: int, value: float, style: Mapping[str, Any]) -> None:
    """A cross."""
    cross = {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2.2}
    axes.plot(length, value, clip_on=False, **(BASELINE_STYLE | dict(style) | cross))


def draw_ratio_panel(axes: Any, rows: Sequence[Row], direction: str, methods: Collection[str]) -> None:
    """Time over ours against the length; the words say which way is good."""
    ratios, styles = over_ours(lines(rows, direction, "p50_ms", methods)), choose_styles(methods)
    title = finding(lines(rows, direction, "p50_ms", LEADING), "as long", "Time over ours")
    draw_panel(axes, ratios, styles, "ratio", title, f"{direction.replace('+', ' + ')}: time / time of triton_relattn")
    if not ratios:
        return
    plotted = [1.0, *(ratio for values in ratios.values() for _, ratio in values)]
    set_ticks(axes, [min(plotted) / ROOM, max(plotted) * ROOM], "ratio")
    axes.axhline(1, color=STYLES[OURS]["color"], linewidth=2.2, zorder=2)
    for height, text in ((0.97, "\N{UPWARDS ARROW} slower than ours"), (0.03, "\N{DOWNWARDS ARROW} faster than ours")):
        where = {"transform": axes.transAxes, "va": "top" if height > 0.5 else "bottom"}
        axes.text(0.01, height, text, fontsize=SMALL, color=INK, **where)
    if styles is LEADING_STYLES:
        name_lines(axes, ratios, are_flat=True)
        last = max(length for values in ratios.values() for length, _ in values)
        ours = {"color": STYLES[OURS]["color"], "fontsize": SMALL, "fontweight": "bold", "ha": "right", "va": "center"}
        axes.annotate(LEADING[OURS], (last, 1), (0, -9), textcoords="offset points", **ours)
        if BEST_DENSE in ratios and (length := failures(rows, direction, LEADING).get(BEST_DENSE)):
            height = ratios[BEST_DENSE][-1][1]
            mark_failure(axes, length, height, LEADING_STYLES[BEST_DENSE])
            where = {"textcoords": "offset points", "ha": "center", "va": "bottom", "fontsize": SMALL, "color": INK}
            axes.annotate("out of\nmemory", (length, height), (0, 7), **where)


def kinds(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each figure row: those that agree in KIND, if they have more than one length."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KIND), []).append(row)
    several = [alike for alike in found.values() if len({row["seqlen"] for row in alike}) > 1]
    return several or list(found.values())


def choose_styles(methods: Collection[str]) -> Styles:
    return LEADING_STYLES if set(methods) == set(LEADING) else STYLES


def lines(rows: Sequence[Row], direction: str, column: str, methods: Collection[str]) -> dict[str, Points]:
    """The points of those methods that have any; the best dense one may be among them."""
    measured = {method: summary.points(rows, method, direction, column) for method in METHODS}
    best: dict[int, float] = {}
    for method in summary.DENSE:
        for length, value in measured[method]:
            best[length] = min(value, best.get(length, value))
    measured[BEST_DENSE] = sorted(best.items())
    return {method: measured[method] for method in methods if measured[method]}


def kind_title(row: Row) -> str:
    """The kind, in words."""
    rows, p2c, _ = row["table"].partition(" p2c")
    names = {"full": "a row for every distance", "none": "no table"}
    table = names.get(rows, f"table: {rows} rows") + ", a second one for the keys" * bool(p2c)
    heads = row["heads"] if row["heads"] == row["key_heads"] else f"{row['heads']}:{row['key_heads']}"
    tokens = "16k tokens" if row["group"] == "long" else f"batch {row['batch']}"
    attention = "causal" if row["is_causal"] == "True" else "full"
    return f"{tokens}, {heads} heads of {row['head_dim']}, {attention} attention, {table}, {row['dtype']}"


def caption(rows: Sequence[Row], what: str) -> str:
    """Device, versions and commit of all rows."""
    origins = {
        f"{row['device']}{', ' + row['threads'] + ' threads' if row['device'].startswith('CPU') else ''}; torch {row['torch']}, "
        f"triton {row['triton']}, triton_relattn {row['package']} at commit {row['commit']}, {row['date'][:10]}"
        for row in rows
    }
    return "\n".join(textwrap.wrap(f"{what} {'; '.join(sorted(origins))}.", 112))


@contextmanager
def new_figure(path: Path, below: str = "") -> Iterator[Any]:
    """A figure in the style of all, written to a file at the end; below: its caption."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": FONT, "font.family": "DejaVu Sans", "text.color": INK}):
        figure = plt.figure()
        yield figure
        height = figure.get_size_inches()[1]
        figure.text(0.02, 0.1 / height, below, fontsize=8, color=MUTED, linespacing=1.4, va="bottom")
        figure.savefig(path, dpi=DPI, facecolor="white")
        plt.close(figure)


def draw(rows: Sequence[Row], draw_panel_pair: Callable[[Sequence[Row], Sequence[Any]], None], what: str, path: Path) -> None:
    """A row of two panels for each kind, a legend above if lines have labels, the conditions below."""
    all_kinds, below = kinds(rows), caption(rows, what)
    with new_figure(path, below) as figure:
        axes = figure.subplots(len(all_kinds), 2, squeeze=False)
        for alike, pair in zip(all_kinds, axes, strict=True):
            draw_panel_pair(alike, pair)
            above = {"xycoords": "axes fraction", "textcoords": "offset points", "color": MUTED, "fontsize": SMALL}
            pair[0].annotate(kind_title(alike[0]), (-0.14, 1), (0, 46), **above).set_in_layout(False)
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        foot, head = 0.16 * len(below.splitlines()) + 0.2, 0.21 * -(-len(handles) // 2) + 0.3
        height = (PANEL_HEIGHT + 0.3) * len(all_kinds) + head + foot
        figure.set_size_inches(WIDTH, height)
        figure.tight_layout(rect=(0.01, foot / height, 0.99, 1 - head / height), h_pad=3.5, w_pad=1.5)
        if handles:
            where = {"loc": "upper left", "ncols": 2, "frameon": False, "bbox_to_anchor": (0.0, 1.0), "fontsize": SMALL}
            figure.legend(handles.values(), handles.keys(), **where)


PANELS: dict[str, tuple[Callable[..., None], str, str]] = {
    "memory": (draw_memory_panel, "bytes", "Peak memory above the inputs. Dotted: without a relative term."),
    "speed": (draw_ratio_panel, "ratio", "Medians of interleaved runs. Dotted: without a relative term, a lower bound."),
}
"""By verb: what draws a panel, its quantity, and what the caption says."""


def draw_directions(verb: str, rows: Sequence[Row], path: Path, methods: Collection[str]) -> None:
    """The figure of one of PANELS: forward, and forward with backward."""
    draw_one, quantity, what = PANELS[verb]

    def panels(alike: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, direction in zip(axes, summary.DIRECTIONS, strict=True):
            draw_one(axis, alike, direction, methods)
        share_range(axes, quantity)

    draw(rows, panels, what, path)

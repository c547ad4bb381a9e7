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
from .rows import is_stalled, number
from .text import short_bytes, short_time, spread

Row = dict[str, Any]
Points = Sequence[tuple[int, float]]
"""Length and value."""
KIND = ("group", "head_dim", "rel_dim", "table", "is_causal", "dtype")
"""Columns that the points of a line have in common."""
SIZE = ("batch", "heads", "key_heads")
INK, MUTED, GRID = "#1f2933", "#6b7785", "#e3e8ee"
# Ours in a strong colour; lightness and marker distinguish the baselines, also in print and by the colour-blind.
STYLES: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d1495b", "marker": "o", "linewidth": 2.8, "markersize": 7, "zorder": 5},
    "shaw_gather": {"color": "#0b3954", "marker": "s"},
    "gather": {"color": "#2f7fb5", "marker": "^"},
    "skewing": {"color": "#79b4a9", "marker": "D"},
    "dense_bias": {"color": "#a8a39d", "marker": "v"},
    "plain": {"color": "#d1495b", "marker": "o", "linestyle": ":", "markersize": 4},
    "sdpa": {"color": "#6b7785", "marker": ".", "linestyle": ":"},
    "sdpa_flash": {"color": "#6b7785", "marker": "1", "linestyle": ":"},
    "sdpa_cudnn": {"color": "#6b7785", "marker": "d", "linestyle": ":"},
    "sdpa_bias": {"color": "#a8a39d", "marker": "1"},
    "sdpa_bias_cudnn": {"color": "#a8a39d", "marker": "2"},
    "sdpa_bias_efficient": {"color": "#a8a39d", "marker": "3"},
    "flex_attention": {"color": "#edae49", "marker": "P"},
    "onnxruntime": {"color": "#7a4419", "marker": "*"},
}
BEST_DENSE, NO_TERM = "dense", "no term"
"""The best of the dense methods at each length; PyTorch's attention without positions: its choice, or FlashAttention by name."""
PYTORCH = ("sdpa", "sdpa_flash")
LEADING = {
    OURS: "triton_relattn",
    BEST_DENSE: "best dense PyTorch",
    "flex_attention": "FlexAttention",
    NO_TERM: "SDPA without positions",
    "sdpa_cudnn": "cuDNN without positions",
}
"""Methods that figures show by default, those that were measured, and their names there."""
STYLES |= {BEST_DENSE: STYLES["shaw_gather"], NO_TERM: STYLES["sdpa"] | {"markersize": 7}}
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


def draw_panel(axes: Any, points: Mapping[str, Points], quantity: str, title: str, subtitle: str = "") -> None:
    """Lines against the sequence length, both axes logarithmic. quantity: one of QUANTITIES."""
    for name, values in points.items():
        label = LEADING.get(name) or textwrap.shorten(f"{name}: {METHODS[name].what}", 44, placeholder=" ...")
        axes.plot(*zip(*values, strict=True), label=label, clip_on=False, **(BASELINE_STYLE | STYLES[name]))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plotted = [value for values in points.values() for _, value in values]
    lengths = sorted({length for values in points.values() for length, _ in values})
    if plotted:
        set_ticks(axes, plotted, quantity)
        axes.set_xticks(lengths, [short_length(length) for length in lengths])
    axes.minorticks_off()
    style(axes, title, "sequence length (tokens)", subtitle)


def finding(points: Mapping[str, Points], comparison: str, otherwise: str) -> str:
    """A panel's title, at all lengths: "Dense takes 1.1 to 75 times {comparison}", or what ours takes without a dense method."""
    ratios = over_ours(points)
    if BEST_DENSE in ratios:
        return f"Dense takes {spread(ratio for _, ratio in ratios[BEST_DENSE])} times {comparison}"
    if NO_TERM in ratios:
        return f"{spread(1 / ratio for _, ratio in ratios[NO_TERM])} times {comparison} as SDPA"
    return otherwise


def over_ours(points: Mapping[str, Points]) -> dict[str, Points]:
    """How many times ours every other method takes, where both were measured."""
    ours = dict(points.get(OURS, ()))
    ratios = {
        method: [(length, value / ours[length]) for length, value in values if length in ours]
        for method, values in points.items()
        if method != OURS
    }
    return {method: values for method, values in ratios.items() if values}


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
    measured = lines(rows, direction, "peak_bytes", methods)
    title = finding(lines(rows, direction, "peak_bytes", LEADING), "as much", "Peak memory")
    draw_panel(axes, measured, "bytes", title, f"{direction.replace('+', ' + ')}: peak memory, lower is better")
    failed = failures(rows, direction, measured)
    limits = [float(found[1]) * BYTES[found[2]] for row in rows if (found := LIMIT.search(row["status"]))]
    if not (measured and failed and limits):
        return
    limit = max(limits)
    set_ticks(axes, [*axes.get_ylim(), 1.5 * limit], "bytes")
    axes.axhline(limit, color=MUTED, linewidth=0.8)
    for method, length in failed.items():
        mark_failure(axes, length, limit, method)
    where = {"textcoords": "offset points", "ha": "right", "va": "bottom"}
    first = min(failed.values())
    axes.annotate(f"out of memory: more than {short_bytes(limit)}", (first, limit), (-8, 4), fontsize=SMALL, color=INK, **where)


def mark_failure(axes: Any, length: int, value: float, method: str) -> None:
    """A cross."""
    cross = {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2.2}
    axes.plot(length, value, clip_on=False, **(BASELINE_STYLE | STYLES[method] | cross))


def draw_ratio_panel(axes: Any, rows: Sequence[Row], direction: str, methods: Collection[str]) -> None:
    """Time over ours against the length; the words say which way is good."""
    ratios = over_ours(lines(rows, direction, "p50_ms", methods))
    title = finding(lines(rows, direction, "p50_ms", LEADING), "as long", "Time over ours")
    draw_panel(axes, ratios, "ratio", title, f"{direction.replace('+', ' + ')}: time / time of triton_relattn")
    if not ratios:
        return
    plotted = [1.0, *(ratio for values in ratios.values() for _, ratio in values)]
    set_ticks(axes, [min(plotted) / ROOM, max(plotted) * ROOM], "ratio")
    axes.axhline(1, label=LEADING[OURS], color=STYLES[OURS]["color"], linewidth=2.2, zorder=2)
    for height, text in ((0.97, "\N{UPWARDS ARROW} slower than ours"), (0.03, "\N{DOWNWARDS ARROW} faster than ours")):
        where = {"transform": axes.transAxes, "va": "top" if height > 0.5 else "bottom"}
        axes.text(0.01, height, text, fontsize=SMALL, color=INK, **where)
    for method, length in failures(rows, direction, ratios).items():
        mark_failure(axes, length, ratios[method][-1][1], method)


def draw_times(axes: Any, calls: Sequence[tuple[str, Mapping[str, Row]]]) -> None:
    """Bars of calls: ours, what it is timed beside, and a mark where attention without positions ends."""
    names, bottom, gains = [], 0.0, []
    for name, found in calls:
        other = next(column for column in found if column not in ("ours", "SDPA"))
        for column in ("ours", other):
            time, method = number(found[column], "p50_ms"), found[column]["method"]
            axes.barh(bottom, time, 0.8, color=STYLES[BEST_DENSE if column == "dense" else method]["color"])
            axes.annotate(f"{time:.1f} ms", (time, bottom), (4, 0), textcoords="offset points", va="center", fontsize=SMALL)
            names.append((bottom, "triton_relattn" if column == "ours" else {"dense": "best dense"}.get(other, other)))
            bottom += 1
        if "SDPA" in found:
            without = number(found["SDPA"], "p50_ms")
            axes.plot([without, without], [bottom - 2.5, bottom - 0.5], color=MUTED, linestyle=":")
        axes.annotate(name, (0, bottom - 2.5), (2, 2), textcoords="offset points", va="bottom", fontsize=SMALL, color=MUTED)
        gains.append(number(found[other], "p50_ms") / number(found["ours"], "p50_ms"))
        bottom += 0.9
    axes.set_yticks(*zip(*names, strict=True), fontsize=SMALL)
    axes.set_xticks([])
    axes.margins(x=0.16)
    axes.set_ylim(bottom - 1.2, -1.3)
    style(axes, f"{spread(gains)} times as fast", "dotted: SDPA without positions", "forward + backward, 32 heads of 64")
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)


def kinds(rows: Sequence[Row], methods: Collection[str]) -> list[list[Row]]:
    """Rows that agree in KIND and compare methods; all kinds if none does.

    If a length has calls of several sizes, each size is a kind: a line has one call per length.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in KIND), []).append(row)
    by_size: dict[tuple[Any, ...], list[Row]] = {}
    for kind, alike in found.items():
        is_line = len({row["case"] for row in alike}) == len({row["seqlen"] for row in alike})
        for row in alike:
            by_size.setdefault(kind if is_line else (*kind, *(row[name] for name in SIZE)), []).append(row)
    columns = {"speed": "p50_ms", "memory": "peak_bytes"}
    return [
        alike
        for alike in by_size.values()
        if any(len(lines(alike, direction, columns[alike[0]["verb"]], methods)) > 1 for direction in summary.DIRECTIONS)
    ] or list(by_size.values())


def lines(rows: Sequence[Row], direction: str, column: str, methods: Collection[str]) -> dict[str, Points]:
    """The points of those methods that have any; the best dense one and PyTorch's without a term may be among them."""
    measured = {method: summary.points(rows, method, direction, column) for method in METHODS}
    best: dict[int, float] = {}
    for method in summary.DENSE:
        for length, value in measured[method]:
            best[length] = min(value, best.get(length, value))
    measured[BEST_DENSE] = sorted(best.items())
    measured[NO_TERM] = next((measured[method] for method in PYTORCH if measured[method]), [])
    return {method: measured[method] for method in methods if measured[method]}


def kind_title(alike: Sequence[Row]) -> str:
    """The kind of some rows, in words."""
    row, batches = alike[0], sorted({int(row["batch"]) for row in alike})
    totals = {int(row["batch"]) * int(row["seqlen"]) for row in alike}
    heads = row["heads"] if row["heads"] == row["key_heads"] else f"{row['heads']}:{row['key_heads']}"
    tokens = f"batch {' to '.join(map(str, dict.fromkeys((batches[0], batches[-1]))))}"
    if len(batches) > 1 and len(totals) == 1:
        tokens = f"{short_length(totals.pop())} tokens in all"
    attention = "causal" if row["is_causal"] == "True" else "full"
    return f"{tokens}, {heads} heads of {row['head_dim']}, {attention} attention, {summary.describe_table(row)}, {row['dtype']}"


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


def draw(
    all_kinds: Sequence[Sequence[Row]], draw_panel_pair: Callable[[Sequence[Row], Sequence[Any]], None], what: str, path: Path
) -> None:
    """A row of two panels per kind, a legend above, the conditions below."""
    below = caption([row for alike in all_kinds for row in alike], what)
    with new_figure(path, below) as figure:
        axes = figure.subplots(len(all_kinds), 2, squeeze=False)
        for alike, pair in zip(all_kinds, axes, strict=True):
            draw_panel_pair(alike, pair)
            above = {"xycoords": "axes fraction", "textcoords": "offset points", "color": MUTED, "fontsize": SMALL}
            pair[0].annotate(kind_title(alike), (-0.14, 1), (0, 46), **above).set_in_layout(False)
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        handles = dict(sorted(handles.items(), key=lambda entry: entry[0] != LEADING[OURS]))
        foot, head = 0.16 * len(below.splitlines()) + 0.2, 0.21 * -(-len(handles) // 3) + 0.3
        height = (PANEL_HEIGHT + 0.3) * len(all_kinds) + head + foot
        figure.set_size_inches(WIDTH, height)
        figure.tight_layout(rect=(0.01, foot / height, 0.99, 1 - head / height), h_pad=3.5, w_pad=1.5)
        if handles:
            where = {"loc": "upper left", "ncols": 3, "frameon": False, "bbox_to_anchor": (0.0, 1.0), "fontsize": SMALL}
            figure.legend(handles.values(), handles.keys(), **where)


def draw_directions(verb: str, rows: Sequence[Row], path: Path, methods: Collection[str]) -> None:
    """The figure of "memory" or "speed": forward, and forward with backward, of all kinds of more than one length, if any."""
    draw_one = draw_memory_panel if verb == "memory" else draw_ratio_panel
    what = "Peak memory above the inputs." if verb == "memory" else "Times of interleaved runs."

    def panels(alike: Sequence[Row], pair: Sequence[Any]) -> None:
        """Both panels, with the vertical range of all their lines."""
        for axes, direction in zip(pair, summary.DIRECTIONS, strict=True):
            draw_one(axes, alike, direction, methods)
        if limits := [limit for axes in pair if axes.lines for limit in axes.get_ylim()]:
            for axes in pair:
                set_ticks(axes, limits, "bytes" if verb == "memory" else "ratio")

    drawn = kinds(rows, methods)
    drawn = [alike for alike in drawn if len({row["seqlen"] for row in alike}) > 1] or drawn
    shown = [row for alike in drawn for row in alike]
    if any(row["method"] in (*PYTORCH, "sdpa_cudnn", "plain") and {NO_TERM, row["method"]} & set(methods) for row in shown):
        what += " Dotted: without a relative term, for reference."
    if any(is_stalled(row) for row in shown):
        what += " Where launches stalled the GPU, the 20th percentile."
    if verb == "speed" and any(OUT_OF_MEMORY in row["status"] for row in shown):
        what += " Cross: out of memory."
    draw(drawn, panels, what, path)

"""Figures and tables from the CSV files of speed, memory and models, and from nothing else."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cases.methods import OURS
from ..report import summary
from ..report.figures import (
    INK,
    KIND,
    MUTED,
    STYLES,
    Points,
    Row,
    caption,
    draw,
    draw_memory_panel,
    draw_panel,
    kinds,
    lines,
    style,
    ticks_of,
    title_of,
)
from ..report.rows import STAMP, read
from .options import new_folder

MODEL_STYLES = {OURS: STYLES[OURS], "eager": STYLES["gather"], "sdpa": STYLES["dense_bias"]}
COMMON = (*("verb", "case", "method", "direction", "status", "batch", "seqlen", "p50_ms", "peak_bytes"), *STAMP)
OF_CALLS = (*COMMON, *KIND, "heads", "key_heads")
COLUMNS = {"memory": OF_CALLS, "speed": OF_CALLS, "models": (*COMMON, "layers")}
"""Columns that figures and tables are made of, by verb."""
WORDS = {"forward": "Forward", "forward+backward": "Forward + backward"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("csv", type=results, nargs="+", help="files that speed, memory and models have written")
    parser.add_argument("--out", type=new_folder, default=Path("out"), help="folder for the figures, VERB.png (%(default)s)")


def results(text: str) -> list[Row]:
    """A parser of a file of results: its rows."""
    try:
        rows = read(Path(text))
    except (OSError, UnicodeError, csv.Error) as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be read: {error}") from error
    verbs = COLUMNS.keys() & {row.get("verb") for row in rows}
    if not verbs:
        raise argparse.ArgumentTypeError(f"{text} has no rows of {', '.join(COLUMNS)}")
    if lacking := set[str]().union(*(COLUMNS[verb] for verb in verbs)) - rows[0].keys():
        raise argparse.ArgumentTypeError(f"{text} lacks the columns {', '.join(sorted(lacking))}")
    return rows


def run(options: argparse.Namespace) -> int:
    import matplotlib

    matplotlib.use("Agg")
    rows = [row for file in options.csv for row in file]
    options.out.mkdir(parents=True, exist_ok=True)
    for verb, draw_rows in (("memory", draw_memory), ("speed", draw_speed), ("models", draw_models)):
        of_verb = [row for row in rows if row["verb"] == verb and (verb != "models" or is_drawn(row))]
        if of_verb:
            draw_rows(of_verb, options.out / f"{verb}.png")
            print(options.out / f"{verb}.png")
    if models := [row for row in rows if row["verb"] == "models"]:
        print(f"\n{summary.models(models)}")
    for of_kind in kinds([row for row in rows if row["verb"] in ("speed", "memory")]):
        print(f"\n{title_of(of_kind[0])}\n\n{summary.markdown(of_kind)}")
    return 0


def is_drawn(row: Row) -> bool:
    """Whether a row of models is a point of their figure."""
    return summary.is_single(row) and (row["status"], row["direction"]) == ("ok", "forward+backward")


def speed_up(times: dict[str, Points]) -> dict[str, Points]:
    """How many times as long as ours every other method takes, where both were timed."""
    ours = dict(times.get(OURS, ()))
    ratios = {
        method: [(length, value / ours[length]) for length, value in points if length in ours]
        for method, points in times.items()
        if method != OURS
    }
    return {method: points for method, points in ratios.items() if points}


def draw_memory(rows: Sequence[Row], path: Path) -> None:
    """Peak memory against the length, forward, and forward with backward."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, direction in zip(axes, ("forward", "forward+backward"), strict=True):
            draw_memory_panel(axis, of_kind, direction, WORDS[direction])

    draw(rows, panels, 2, "Peak memory above the inputs. Dotted: without a relative term.", path)


def draw_speed(rows: Sequence[Row], path: Path) -> None:
    """Time against the length, forward, and forward with backward, and the speed-up of the latter."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, direction in zip(axes, ("forward", "forward+backward"), strict=False):
            draw_panel(axis, lines(of_kind, direction, "p50_ms"), STYLES, "time", f"Time, {WORDS[direction].lower()}")
        ratios = speed_up(lines(of_kind, "forward+backward", "p50_ms"))
        draw_panel(axes[2], ratios, STYLES, "ratio", "Time over ours, forward + backward")
        axes[2].axhline(1, color=STYLES[OURS]["color"], linewidth=1.6, zorder=2)

    draw(rows, panels, 3, "Medians of interleaved runs. Dotted: without a relative term, lower bounds.", path)


def draw_models(rows: Sequence[Row], path: Path) -> None:
    """Peak memory and time of forward and backward, a line for each model, at the longest length with a stock method."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["case"] for row in rows))
    lengths = {name: _longest_compared([row for row in rows if row["case"] == name]) for name in names}
    names.sort(key=lambda name: -_saved([row for row in rows if row["case"] == name and int(row["seqlen"]) == lengths[name]]))
    with plt.rc_context({"font.size": 9, "font.family": "DejaVu Sans", "text.color": INK}):
        height = 0.26 * len(names) + 1.9
        figure, panels = plt.subplots(1, 2, figsize=(11, height), sharey=True)
        for axis, column, quantity, title in (
            (panels[0], "peak_bytes", "bytes", "Peak memory"),
            (panels[1], "p50_ms", "time", "Time"),
        ):
            compared = [row for row in rows if int(row["seqlen"]) == lengths[row["case"]] and row[column]]
            for method, look in reversed(MODEL_STYLES.items()):
                points = [(float(row[column]), names.index(row["case"])) for row in compared if row["method"] == method]
                if points:
                    axis.plot(*zip(*points, strict=True), label=method, **{**look, "linestyle": "none", "markersize": 6})
            if compared:
                ticks, labels = ticks_of([float(row[column]) for row in compared], quantity)
                axis.set_xscale("log")
                axis.set_xlim(ticks[0], ticks[-1])
                axis.set_xticks(ticks, labels)
            axis.minorticks_off()
            style(axis, title, "")
        panels[0].set_yticks(range(len(names)), [f"{name}, {lengths[name]}" for name in names])
        panels[0].set_ylim(len(names) - 0.5, -0.5)
        what = f"Forward and backward, {rows[0]['layers']} layer of real width, one sequence of the length beside the name."
        below = caption(rows, what, 2)
        figure.tight_layout(rect=(0.01, (0.35 + 0.15 * len(below.splitlines())) / height, 0.99, 1 - 0.35 / height))
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="upper left", ncols=3, frameon=False)
        figure.text(0.02, 0.12 / height, below, fontsize=8, color=MUTED, va="bottom")
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)


def _saved(rows: Sequence[Row]) -> float:
    """Return how many times our peak the smallest one of the stock methods is; 0 if there is none."""
    peaks = {row["method"]: float(row["peak_bytes"]) for row in rows if row["peak_bytes"]}
    ours = peaks.pop(OURS, 0.0)
    return min(peaks.values(), default=0.0) / ours if ours else 0.0


def _longest_compared(rows: Sequence[Row]) -> int:
    """Return the longest length at which more than one method was measured; if there is none, the longest."""
    methods: dict[int, set[str]] = {}
    for row in rows:
        methods.setdefault(int(row["seqlen"]), set()).add(row["method"])
    return max((len(found) > 1, length) for length, found in methods.items())[1]

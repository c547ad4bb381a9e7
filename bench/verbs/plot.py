"""Figures and tables from the CSV files of speed, memory and models, and from nothing else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cases.methods import OURS
from ..report import summary
from ..report.figures import (
    INK,
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
    title_of,
)
from ..report.rows import read

MODEL_STYLES = {OURS: STYLES[OURS], "eager": STYLES["gather"], "sdpa": STYLES["dense_bias"]}
WORDS = {"forward": "Forward", "forward+backward": "Forward + backward"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("csv", type=Path, nargs="+", help="files that speed, memory and models have written")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures, VERB.png (%(default)s)")


def run(options: argparse.Namespace) -> int:
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        print('plotting needs matplotlib: pip install "triton_relattn[plots]"')
        return 2
    rows = [row for path in options.csv for row in read(path)]
    options.out.mkdir(parents=True, exist_ok=True)
    for verb, draw_rows in (("memory", draw_memory), ("speed", draw_speed), ("models", draw_models)):
        of_verb = [row for row in rows if row["verb"] == verb and (verb != "models" or summary.is_single(row))]
        if of_verb:
            draw_rows(of_verb, options.out / f"{verb}.png")
            print(options.out / f"{verb}.png")
    if models := [row for row in rows if row["verb"] == "models"]:
        print(f"\n{summary.models(models)}")
    for of_kind in kinds([row for row in rows if row["verb"] in ("speed", "memory")]):
        print(f"\n{title_of(of_kind[0])}\n\n{summary.markdown(of_kind)}")
    return 0


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
    """Peak memory and time of forward and backward against the length: two small panels for each model."""
    import matplotlib.pyplot as plt

    measured = [row for row in rows if row["status"] == "ok"]
    names = list(dict.fromkeys(row["case"] for row in measured))
    columns = 3 if len(names) > 2 else len(names)
    lines_of_panels = -(-len(names) // columns)
    with plt.rc_context({"font.size": 9, "font.family": "DejaVu Sans", "text.color": INK}):
        size = (2 * 3.3 * columns, 3.2 * lines_of_panels + 1.3)
        figure, axes = plt.subplots(lines_of_panels, 2 * columns, figsize=size, squeeze=False)
        panels = axes.reshape(-1, 2)
        for name, (memory, times) in zip(names, panels, strict=False):
            of_model = [row for row in measured if row["case"] == name]
            for axis, column, quantity in ((memory, "peak_bytes", "bytes"), (times, "p50_ms", "time")):
                points = {method: summary.points(of_model, method, "forward+backward", column) for method in MODEL_STYLES}
                shown = {method: values for method, values in points.items() if values}
                draw_panel(axis, shown, MODEL_STYLES, quantity, "")
                axis.set_title(f"{name}\n{'memory' if quantity == 'bytes' else 'time'}", loc="left", fontsize=10, color=INK)
                axis.set_visible(max(map(len, shown.values()), default=0) > 1)
        for axis in panels[len(names) :].flat:
            axis.set_visible(False)
        figure.tight_layout(rect=(0.01, 0.7 / size[1], 0.99, 1 - 0.5 / size[1]), h_pad=2, w_pad=1.5)
        handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
        ordered = [method for method in MODEL_STYLES if method in handles]
        figure.legend([handles[name] for name in ordered], ordered, loc="upper left", ncols=3, frameon=False)
        what = f"Forward and backward, {measured[0]['layers']} layer of real width, one sequence; peak above model and inputs."
        figure.text(0.02, 0.12 / size[1], caption(measured, what, columns + 1), fontsize=8, color=MUTED, va="bottom")
        figure.savefig(path, dpi=110, facecolor="white")
        plt.close(figure)

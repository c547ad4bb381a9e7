"""Figures and tables from the CSV files of speed, memory and models, and from nothing else."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from triton_relattn.demo.plot import INK, MUTED, STYLES, Points, draw_panel

from . import summary
from .methods import METHODS, OURS
from .rows import read

Row = dict[str, Any]
KIND = ("group", "head_dim", "rel_dim", "table", "is_causal", "dtype")
"""Rows that agree in these are points of the same lines."""
ALL_STYLES: dict[str, dict[str, Any]] = {
    **STYLES,
    "plain": {"color": "#d1495b", "marker": "o", "linestyle": ":", "markersize": 4},
    "sdpa": {"color": "#6b7785", "marker": ".", "linestyle": ":"},
    "sdpa_flash": {"color": "#6b7785", "marker": "1", "linestyle": ":"},
    "sdpa_cudnn": {"color": "#6b7785", "marker": "2", "linestyle": ":"},
    "flex_attention": {"color": "#edae49", "marker": "P"},
    "disentangled_flash": {"color": "#8d5a97", "marker": "X"},
    "flashdeberta": {"color": "#5b8e7d", "marker": "h"},
}
MODEL_STYLES = {OURS: STYLES[OURS], "eager": STYLES["gather"], "sdpa": STYLES["dense_bias"]}
WORDS = {"forward": "Forward", "forward+backward": "Forward + backward"}
PANEL_HEIGHT, PANEL_WIDTH = 3.9, 5.2  # inches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("csv", type=Path, nargs="+", help="files that speed, memory and models have written")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the figures, VERB.png (%(default)s)")


def run(options: argparse.Namespace) -> int:
    try:
        import matplotlib

        matplotlib.use("Agg")
    except ImportError:
        print('plotting needs matplotlib: pip install "triton_relattn[demo]"')
        return 2
    rows = [row for path in options.csv for row in read(path)]
    options.out.mkdir(parents=True, exist_ok=True)
    for verb, draw in (("memory", draw_memory), ("speed", draw_speed), ("models", draw_models)):
        of_verb = [row for row in rows if row["verb"] == verb]
        if of_verb:
            draw(of_verb, options.out / f"{verb}.png")
            print(options.out / f"{verb}.png")
    if models := [row for row in rows if row["verb"] == "models"]:
        print(f"\n{summary.models(models)}")
    for of_kind in kinds([row for row in rows if row["verb"] in ("speed", "memory")]):
        print(f"\n{title_of(of_kind[0])}\n\n{summary.markdown(of_kind)}")
    return 0


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


def speed_up(times: dict[str, Points]) -> dict[str, Points]:
    """How many times as long as ours every other method takes, where both were timed."""
    ours = dict(times.get(OURS, ()))
    ratios = {
        method: [(length, value / ours[length]) for length, value in points if length in ours]
        for method, points in times.items()
        if method != OURS
    }
    return {method: points for method, points in ratios.items() if points}


def title_of(row: Row) -> str:
    """The kind, in words."""
    table = "a row for every distance" if row["table"] == "full" else f"table: {row['table']} rows"
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
            [handles[method] for method in ordered], ordered, loc="upper left", ncols=4, frameon=False, bbox_to_anchor=(0.01, 1.0)
        )
        figure.text(0.02, 0.12 / size[1], caption(rows, what, columns), fontsize=8.5, color=MUTED, linespacing=1.5, va="bottom")
        figure.savefig(path, dpi=120, facecolor="white")
        plt.close(figure)


def draw_memory(rows: Sequence[Row], path: Path) -> None:
    """Peak memory against the length, forward, and forward with backward."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, direction in zip(axes, ("forward", "forward+backward"), strict=True):
            measured = lines(of_kind, direction, "peak_bytes")
            power = summary.exponent(measured.get(OURS, ()))
            grows = "" if power is None else f", ours $\\sim n^{{{power:.2f}}}$"
            draw_panel(axis, measured, ALL_STYLES, "bytes", f"{WORDS[direction]}{grows}")

    draw(rows, panels, 2, "Peak memory above the inputs. Dotted: without a relative term.", path)


def draw_speed(rows: Sequence[Row], path: Path) -> None:
    """Time against the length, forward, and forward with backward, and the speed-up of the latter."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, direction in zip(axes, ("forward", "forward+backward"), strict=False):
            draw_panel(axis, lines(of_kind, direction, "p50_ms"), ALL_STYLES, "time", f"Time, {WORDS[direction].lower()}")
        ratios = speed_up(lines(of_kind, "forward+backward", "p50_ms"))
        draw_panel(axes[2], ratios, ALL_STYLES, "ratio", "Time over ours, forward + backward")
        axes[2].axhline(1, color=ALL_STYLES[OURS]["color"], linewidth=1.6, zorder=2)

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

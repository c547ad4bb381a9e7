"""Figures and tables from the CSV files of speed, memory and models, and from nothing else."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..cases.methods import METHODS
from ..report import models, summary
from ..report.figures import (
    KIND,
    LEADING,
    Row,
    draw,
    draw_memory_panel,
    draw_ratio_panel,
    kinds,
    share_range,
    title_of,
)
from ..report.rows import STAMP, read
from .options import add_list, new_folder

COMMON = (*("verb", "case", "method", "direction", "status", "batch", "seqlen", "p50_ms", "peak_bytes"), *STAMP)
OF_CALLS = (*COMMON, *KIND, "heads", "key_heads")
COLUMNS = {"memory": OF_CALLS, "speed": OF_CALLS, "models": (*COMMON, "layers")}
"""Columns that figures and tables are made of, by verb."""
WORDS = {"forward": "forward", "forward+backward": "forward + backward"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("csv", type=results, nargs="+", help="files that speed, memory and models have written")
    parser.add_argument("--out", type=new_folder, default=Path("out"), help="folder for the figures, VERB.png (%(default)s)")
    what = f"methods in the figures (default: {', '.join(LEADING.values())})"
    add_list(parser, "methods", tuple(METHODS), None, what)


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
    methods = options.methods or tuple(LEADING)
    verbs: dict[str, Callable[[Sequence[Row], Path], None]] = {
        "memory": partial(draw_memory, methods=methods),
        "speed": partial(draw_speed, methods=methods),
        "models": models.draw,
    }
    for verb, draw_rows in verbs.items():
        of_verb = [row for row in rows if row["verb"] == verb]
        if verb == "models" and not models.single_lengths(of_verb):
            continue
        if of_verb:
            draw_rows(of_verb, options.out / f"{verb}.png")
            print(options.out / f"{verb}.png")
    if of_models := [row for row in rows if row["verb"] == "models"]:
        print(f"\n{models.tables(of_models)}")
    for of_kind in kinds([row for row in rows if row["verb"] in ("speed", "memory")]):
        print(f"\n{title_of(of_kind[0])}\n\n{summary.markdown(of_kind)}")
    return 0


def draw_memory(rows: Sequence[Row], path: Path, methods: Sequence[str] | None = None) -> None:
    """Peak memory against the length, forward, and forward with backward. methods: see figures.lines."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, (direction, words) in zip(axes, WORDS.items(), strict=True):
            draw_memory_panel(axis, of_kind, direction, methods, f"{words}: peak memory, lower is better")
        share_range(axes, "bytes")

    draw(rows, panels, "Peak memory above the inputs. Dotted: without a relative term.", path)


def draw_speed(rows: Sequence[Row], path: Path, methods: Sequence[str] | None = None) -> None:
    """Time over ours against the length, forward, and forward with backward. methods: see figures.lines."""

    def panels(of_kind: Sequence[Row], axes: Sequence[Any]) -> None:
        for axis, (direction, words) in zip(axes, WORDS.items(), strict=True):
            draw_ratio_panel(axis, of_kind, direction, methods, f"{words}: time / time of triton_relattn")
        share_range(axes, "ratio")

    draw(rows, panels, "Medians of interleaved runs. Dotted: without a relative term, a lower bound.", path)

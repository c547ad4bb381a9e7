"""Figures and tables from the CSV files of speed, memory and models alone."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from ..cases.methods import METHODS
from ..report import models, summary
from ..report.figures import KIND, LEADING, Row, draw_directions, kind_title, kinds
from ..report.rows import STAMP, read
from .options import add_list, new_folder

COMMON = (*("verb", "case", "method", "direction", "status", "batch", "seqlen", "p50_ms", "peak_bytes"), *STAMP)
CALLS = (*COMMON, *KIND, "heads", "key_heads")
COLUMNS = {"memory": CALLS, "speed": CALLS, "models": (*COMMON, "layers")}
"""Columns that figures and tables are made of, by verb."""


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
    by_verb = {verb: [row for row in rows if row["verb"] == verb] for verb in COLUMNS}
    options.out.mkdir(parents=True, exist_ok=True)
    for verb in ("memory", "speed"):
        if by_verb[verb]:
            draw_directions(verb, by_verb[verb], options.out / f"{verb}.png", options.methods or tuple(LEADING))
            print(options.out / f"{verb}.png")
    sentences = [row for row in by_verb["models"] if row.get("real")]
    single = [row for row in by_verb["models"] if not row.get("real")]
    if sentences:
        models.draw_sentences(sentences, options.out / "sentences.png")
        print(options.out / "sentences.png")
    if any(models.over_ours(single, length, "p50_ms") for length in models.single_lengths(single)):
        models.draw(single, options.out / "models.png")
        print(options.out / "models.png")
    elif single:
        print("No figure: no model has both ways at one length and one sequence; the tables have all rows.")
    if by_verb["models"]:
        print(f"\n{models.tables(by_verb['models'])}")
    for alike in kinds([*by_verb["speed"], *by_verb["memory"]], tuple(METHODS)):
        print(f"\n{kind_title(alike)}\n\n{summary.markdown(alike)}")
    return 0

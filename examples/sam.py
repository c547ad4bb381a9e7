"""Measure a global layer of SAM's vision encoder (ViT-B): memory and time of the stock model and of the enabled one."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bench.__main__ import main as bench
from bench.report.rows import read
from bench.report.text import short_bytes, short_time, table
from bench.verbs.options import positive_numbers

PATCH = 16
DIRECTIONS = ("forward", "forward+backward")


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.sam", description=__doc__)
    parser.add_argument("--sides", type=positive_numbers, default="512,768,1024", metavar="A,B", help="of images (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for sam.csv and sam.png (default: out)")
    parser.add_argument("--seconds", type=float, default=20.0, help="timing of one size (%(default)s)")
    parser.add_argument("--small", action="store_true", help="a small model, to try it out")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = arguments_of(argv)
    file = options.out / "sam.csv"
    tokens = {(side // PATCH) ** 2: side for side in options.sides}
    words = ["models", "--families", "sam", "--lengths", ",".join(map(str, tokens)), "--rounds", "3", "--csv", str(file)]
    code = bench([*words, "--seconds", str(options.seconds), *["--small"] * options.small])
    rows = read(file)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["image", *(f"{method}, {direction}" for direction in DIRECTIONS for method in methods)]]
    for length, side in sorted(tokens.items()):
        of_image = {(row["direction"], row["method"]): row for row in rows if int(row["seqlen"]) == length}
        cells = []
        for place in ((direction, method) for direction in DIRECTIONS for method in methods):
            row = of_image[place]
            ok = row["status"] == "ok"
            cells.append(f"{short_time(float(row['p50_ms']))}, {short_bytes(float(row['peak_bytes']))}" if ok else row["status"])
        lines.append([f"{side} x {side}", *cells])
    print(table(lines[0], lines[1:]))
    if len(tokens) > 1 and bench(["plot", str(file), "--out", str(options.out)]) == 0:
        (options.out / "models.png").replace(options.out / "sam.png")
        print(options.out / "sam.png")
    return code


if __name__ == "__main__":
    raise SystemExit(main())

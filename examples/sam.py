"""Measure a global layer of SAM's vision encoder (ViT-B): memory and time of the stock model and of the enabled one."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.__main__ import main as bench
from bench.families import FAMILIES
from bench.report.rows import read
from bench.report.text import short_bytes, short_time, table
from bench.verbs.options import new_folder, positive_numbers, seconds
from triton_relattn._command_line import Parser
from triton_relattn.integrations.transformers import enable

PATCH = 16
DIRECTIONS = ("forward", "forward+backward")
TURNS = 4


def sides(text: str) -> list[int]:
    """A parser of the sides of images, which are cut into patches."""
    found = positive_numbers(text)
    if any(side % PATCH for side in found):
        raise argparse.ArgumentTypeError(f"must be multiples of {PATCH}, got {text}")
    return found


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m examples.sam", description=__doc__)
    parser.add_argument(
        "--sides",
        type=sides,
        default="512,768,1024",
        metavar="A,B",
        help=f"sides of the images in pixels, multiples of {PATCH} (%(default)s)",
    )
    parser.add_argument("--out", type=new_folder, default=Path("out"), help="folder for sam.csv and sam.png (default: out)")
    parser.add_argument("--seconds", type=seconds, default=20.0, help="seconds to time one size (%(default)s)")
    parser.add_argument("--processor-time", action="store_true", help="processor time alone, which other processes change little")
    parser.add_argument("--small", action="store_true", help="small model, to try it out")
    return parser.parse_args(argv)


def processor_seconds(side: int, small: bool) -> dict[str, list[float]]:
    """Processor time of each model, forward, and forward and backward: the smallest of some turns, on torch's threads."""
    family = FAMILIES["sam"]
    models = {method: family.build(small=small, implementation=method) for method in ("eager", "sdpa")}
    models["triton_relattn"] = family.build(small=small)
    enable(models["triton_relattn"])
    tokens = (side // PATCH) ** 2
    given = family.make(models["eager"], tokens, [tokens])
    found: dict[str, list[float]] = {method: [float("inf"), float("inf")] for method in models}
    for _ in range(TURNS):
        for method, model in models.items():
            for number in range(len(DIRECTIONS)):
                model.zero_grad()
                start = time.process_time()
                with torch.set_grad_enabled(number == 1):
                    out = model(**given)
                if number == 1:
                    out.sum().backward()
                found[method][number] = min(found[method][number], time.process_time() - start)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    options = parse_arguments(argv)
    if options.processor_time:
        for side in options.sides:
            times = processor_seconds(side, options.small)
            body = [[method, *(short_time(1e3 * seconds) for seconds in method_times)] for method, method_times in times.items()]
            print(table([f"{side} x {side}", *DIRECTIONS], body))
        return 0
    file = options.out / "sam.csv"
    tokens = {(side // PATCH) ** 2: side for side in options.sides}
    words = ["models", "--families", "sam", "--lengths", ",".join(map(str, tokens)), "--rounds", "3", "--csv", str(file)]
    code = bench([*words, "--seconds", str(options.seconds), *["--small"] * options.small])
    rows = read(file)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = [["image", *(f"{method}, {direction}" for direction in DIRECTIONS for method in methods)]]
    for length, side in sorted(tokens.items()):
        image_rows = {(row["direction"], row["method"]): row for row in rows if int(row["seqlen"]) == length}
        cells = []
        for place in ((direction, method) for direction in DIRECTIONS for method in methods):
            row = image_rows[place]
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

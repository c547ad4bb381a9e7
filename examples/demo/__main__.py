"""The whole demo, and its command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from ..integrations.transformers import families
from . import agreement, report, sweep
from .environment import describe
from .methods import BATCH, HEAD_DIM, HEADS, METHODS
from .music import chorales

SHORTEST = 256
LONGEST, LONGEST_QUICK = 8192, 1024
TOKENS = 1024  # about half a minute of four voices; the float64 reference needs a GiB for it
BUDGET = 120.0  # seconds: with the rest, the demo stays below two and a half minutes


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m triton_relattn",
        description="Send Bach chorales through relative attention, check every gradient, measure time and memory.",
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for demo.csv and demo.png (default: out)")
    parser.add_argument("--max-length", type=int, default=LONGEST, help=f"longest sequence measured (default: {LONGEST})")
    parser.add_argument("--quick", action="store_true", help=f"only lengths up to {LONGEST_QUICK}")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch has it, else cpu")
    parser.add_argument("--seconds", type=float, default=BUDGET, help=f"time for the measurements (default: {BUDGET:.0f})")
    parser.add_argument("--families", action="store_true", help="only list the models of transformers that can be enabled")
    arguments = parser.parse_args(argv)
    if arguments.max_length < 2:
        parser.error(f"--max-length must be at least 2, got {arguments.max_length}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU here")
    return arguments


def _lengths(longest: int) -> list[int]:
    """Powers of two from 256, up to longest; longest alone if it is shorter."""
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths if longest >= SHORTEST else [longest]


def _check(device: str, lengths: list[int]) -> list[str]:
    """Print both comparisons, and return what is wrong."""
    count = min(TOKENS, lengths[-1])
    music = chorales(count + 1)  # one more: the last is only predicted
    print(f"\nMusic: {', '.join(music.titles)} by J. S. Bach, four voices in eighth notes")
    print(f"  {count} tokens to read, {music.notes} of them the beginning of a note")

    loss, rows = agreement.check_layer(music.tokens, device)
    print("\nOne causal layer of relative attention, forward and backward, float32")
    print(f"  {HEADS} heads of {HEAD_DIM}, a table for r = -{count - 1} .. 0, random weights; loss of the next token {loss:.4f}")
    print(
        "  Errors are against the dense reference in float64. Allowed: "
        f"{agreement.FACTOR} times the error of the same reference in float32"
    )
    print(f"  + {agreement.ULPS} units in the last place of the largest value.\n")
    print(report.agreement_table(rows))

    methods = agreement.check_methods(device, lengths[0])
    worst = ", ".join(f"{row.name.split(':')[0]} {row.share:.0%}" for row in methods)
    print(f"\nThe methods to be measured, at length {lengths[0]}: largest error as a share of the allowed one\n  {worst}")
    return [row.problem for row in rows + methods if row.problem is not None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0, or 1 if a result is wrong or a measurement failed."""
    arguments = _arguments(argv)
    if arguments.families:
        print(families.table())
        return 0
    started = time.monotonic()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "bfloat16" if device == "cuda" else "float32"
    longest = min(arguments.max_length, LONGEST_QUICK) if arguments.quick else arguments.max_length
    lengths = _lengths(longest)
    environment = describe(device, HEAD_DIM)
    print(f"Relative attention in linear memory\n{environment}")

    try:
        problems = _check(device, lengths)
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if problems:
        print("\nerror: " + "\n       ".join(problems), file=sys.stderr)
        return 1

    print(f"\nTime and peak memory, forward + backward, full attention, table of 2n - 1 rows, {dtype}")
    print(
        f"  batch {BATCH}, {HEADS} heads of {HEAD_DIM}; {len(METHODS)} methods, n = {lengths[0]} .. {lengths[-1]}; "
        "Ctrl-C keeps what has been measured",
        flush=True,
    )
    rows: list[sweep.Row] = []
    try:
        for row in sweep.sweep(environment, lengths, dtype, arguments.seconds):
            rows.append(row)
    except KeyboardInterrupt:
        print(f"\n  interrupted after {len(rows)} of {len(METHODS) * len(lengths)} points")
    print(f"\n{report.summary(rows)}")

    arguments.out.mkdir(parents=True, exist_ok=True)
    csv, png = arguments.out / "demo.csv", arguments.out / "demo.png"
    report.write_csv(rows, csv)
    from .plot import draw

    draw(rows, environment, png)
    print(f"\nWritten: {csv}, {png}. {time.monotonic() - started:.0f} s")
    failed = [f"{row.method} at {row.length}: {row.status}" for row in rows if row.status.startswith("failed")]
    if failed:
        print("error: " + "\n       ".join(failed), file=sys.stderr)
    return 1 if failed else 0

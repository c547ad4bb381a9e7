"""Send Bach chorales through relative attention, check every gradient, measure peak memory and time."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cases.methods import METHODS, OURS
from bench.measure import timing
from bench.report import figures, summary
from bench.report.rows import Table, stamp
from bench.report.text import short_bytes, table
from bench.verbs.options import existing_device, gibibytes, new_folder, seconds
from bench.verbs.speed import COLUMNS
from triton_relattn.__main__ import environment
from triton_relattn._command_line import Parser, available_device, bounded
from triton_relattn._peaks import SHARE, available_bytes

from ..music.tokens import chorales
from . import layer
from .sweep import BATCH, COMPARED, DIRECTION, HEAD_DIM, HEADS, make_case, sweep

SHORTEST = 256
LONGEST, LONGEST_QUICK = 8192, 1024
TOKENS = 1024  # about half a minute of four voices; the float64 reference needs a GiB for it
BUDGET = 150.0  # seconds: with the rest, the demo takes less than three minutes
MOST_MEMORY = 10 << 30  # so much that a vector for every pair fits at 4096; less where less is free


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--out", type=new_folder, default=Path("out"), help="folder for demo.csv and demo.png (default: out)")
    parser.add_argument(
        "--max-length", type=bounded(int, 2), default=LONGEST, help=f"longest sequence measured (default: {LONGEST})"
    )
    parser.add_argument("--quick", action="store_true", help=f"lengths up to {LONGEST_QUICK} alone")
    parser.add_argument("--device", type=existing_device, default=available_device(), help="device, cpu or cuda (%(default)s)")
    parser.add_argument("--seconds", type=seconds, default=BUDGET, help=f"time for the measurements (default: {BUDGET:.0f})")
    usual = f"memory per measurement on a CPU (default: {MOST_MEMORY >> 30}, or most of what is free)"
    parser.add_argument("--memory-limit", type=gibibytes, default=None, metavar="GiB", help=usual)
    arguments = parser.parse_args(argv)
    if arguments.memory_limit is None:
        arguments.memory_limit = min(MOST_MEMORY, int(SHARE * available_bytes()))
    if arguments.device == "cuda":
        arguments.memory_limit = torch.cuda.mem_get_info()[0]
    return arguments


def lengths_up_to(longest: int) -> list[int]:
    """Return powers of two from 256, up to longest; longest alone if it is shorter."""
    lengths = [SHORTEST]
    while 2 * lengths[-1] <= longest:
        lengths.append(2 * lengths[-1])
    return lengths if longest >= SHORTEST else [longest]


def check(device: str, lengths: list[int]) -> list[str]:
    """Print both comparisons, and return what is wrong."""
    count = min(TOKENS, lengths[-1])
    music = chorales(count + 1)  # one more: the last is only predicted
    print(f"\nMusic: {', '.join(music.titles)} by J. S. Bach, four voices in eighth notes")
    print(f"  {count} tokens to read, {music.notes} of them the beginning of a note")

    loss, rows = layer.check(music.tokens, device)
    print("\nOne causal layer of relative attention, forward and backward, float32")
    print(f"  {HEADS} heads of {HEAD_DIM}, a table for r = -{count - 1} .. 0, random weights; loss of the next token {loss:.4f}")
    print(f"  Errors are against the dense reference in float64. Allowed: {layer.FACTOR} times the error of the same reference")
    print(f"  in float32 + {layer.ULPS} units in the last place of the largest value.\n")
    header = ("", "largest value", "reference's error", "error", "allowed", "")
    print(table(header, [row.cells() for row in rows]))

    methods = timing.prepare(make_case(lengths[0], "fp32"), COMPARED, [DIRECTION], device, {})
    errors = ", ".join(f"{timed.method} {timed.found.get('error', float('nan')):.1e}" for timed in methods)
    print(f"\nThe methods to be measured, at length {lengths[0]}: distance from float64, of the result's norm\n  {errors}")
    wrong = [f"{timed.method}: {timed.found['status']}" for timed in methods if not timed.is_ok]
    return [row.problem for row in rows if row.problem is not None] + wrong


def report(rows: Sequence[dict[str, Any]]) -> None:
    """Print peak memory and time, lengths down and methods across, and what is missing and why."""
    print(f"\nPeak memory\n{summary.across_methods(rows, DIRECTION, 'peak_bytes', summary.show_bytes)}")
    times = summary.across_methods(rows, DIRECTION, "p50_ms", summary.show_time)
    print(f"\nTime; in brackets, time over ours: above 1x ours is faster\n{times}\n\n{summary.remarks(rows)}", end="")


def draw(rows: Sequence[dict[str, Any]], memory_limit: int, path: Path) -> None:
    """Write the figure: peak memory and time against the length."""
    import matplotlib

    matplotlib.use("Agg")

    def panels(alike: Sequence[dict[str, Any]], axes: Sequence[Any]) -> None:
        memory, milliseconds = axes
        figures.draw_memory_panel(memory, alike, DIRECTION, METHODS)
        title = figures.finding(figures.lines(alike, DIRECTION, "p50_ms", figures.LEADING), "as long", "Time")
        times = figures.lines(alike, DIRECTION, "p50_ms", METHODS)
        figures.draw_panel(milliseconds, times, "time", title, "time, lower is better")

    what = f"Forward + backward. Memory: peak above the inputs, of {short_bytes(memory_limit)} at most."
    figures.draw([rows], panels, what, path)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo. Returns the exit status: 0, or 1 if a result is wrong or a measurement failed."""
    arguments = parse_arguments(argv)
    started = time.monotonic()
    dtype = "bf16" if arguments.device == "cuda" else "fp32"
    lengths = lengths_up_to(min(arguments.max_length, LONGEST_QUICK) if arguments.quick else arguments.max_length)
    print(f"Relative attention in linear memory\n{environment(arguments.device, HEAD_DIM)}")
    try:
        problems = check(arguments.device, lengths)
    except ImportError as error:
        problems = [str(error)]
    if problems:
        print("\nerror: " + "\n       ".join(problems), file=sys.stderr)
        return 1

    print(f"\nPeak memory and time, forward + backward, full attention, table of 2n - 1 rows, {dtype}")
    print(f"  batch {BATCH}, {HEADS} heads of {HEAD_DIM}; n = {lengths[0]} .. {lengths[-1]}; each measurement may take", end=" ")
    print(f"{short_bytes(arguments.memory_limit)}; Ctrl-C keeps what has been measured", flush=True)
    results = Table(COLUMNS, stamp(arguments.device), arguments.out / "demo.csv")
    try:
        for row in sweep(lengths, dtype, arguments.device, arguments.memory_limit, arguments.seconds):
            results.add(row)
    except KeyboardInterrupt:
        print(f"\n  interrupted after {len(results.rows)} of {len(COMPARED) * len(lengths)} points")
    report(results.rows)
    if any(row["method"] == OURS and row["status"] == "ok" for row in results.rows):
        draw(results.rows, arguments.memory_limit, arguments.out / "demo.png")
        print(f"\nWritten: {arguments.out / 'demo.csv'}, {arguments.out / 'demo.png'}. {time.monotonic() - started:.0f} s")
    failed = [
        f"{row['method']} at {row['seqlen']}: {row['status']}" for row in results.rows if row["status"].startswith("failed")
    ]
    if failed:
        print("error: " + "\n       ".join(failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

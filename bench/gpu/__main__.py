"""Correctness and speed of the kernels on a GPU: ``python -m bench.gpu --results out/gpu --parts correctness,speed``.

    correctness   forward and backward against float64, by the error rule of the tests
    configs       every kernel by itself, in every configuration that is selected on this GPU
    repeats       many runs of one call are equal bit for bit
    speed         medians, memory and the share of each kernel, beside scaled_dot_product_attention
    host          what a call costs the host

Rows are appended to CSV files as they come, and a part that has spent its seconds ends with what it has. Exit status: 0, 1 if
a row failed, 2 without a GPU, 130 if interrupted. ``--device cpu --tiny`` tests this program with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from triton_relattn.kernels import kernels_are_interpreted

from . import checks, speed
from .report import Report

PARTS = {
    "correctness": checks.correctness,
    "configs": checks.every_config,
    "repeats": checks.repeats,
    "speed": speed.speed,
    "host": speed.host,
}


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s, in this order")
    parser.add_argument("--seconds", type=float, default=240.0, help="time of each part (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (on a GPU, as many as processors, at most 12)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter")
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    if options.jobs is None:
        options.jobs = min(12, os.cpu_count() or 1) if options.device == "cuda" else 1
    options.dtype = "float16" if options.device == "cpu" else "bfloat16"
    return options


def why_not(device: str) -> str | None:
    """Why nothing can run on the device, None if it can."""
    if device == "cuda" and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    if kernels_are_interpreted() != (device == "cpu"):
        return f"--device {device} needs a process {'with' if device == 'cpu' else 'without'} TRITON_INTERPRET=1"
    return None


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def run_parts(options: argparse.Namespace, report: Report) -> None:
    for part in options.parts:
        started = time.monotonic()
        try:
            PARTS[part](options, report, started + options.seconds)
        except Exception:
            report.failed += 1
            report.say(f"{part}: {traceback.format_exc()}")
        report.say(f"{part}: {time.monotonic() - started:.0f} s")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not(options.device):
        print(reason)
        return 2
    signal.signal(signal.SIGTERM, interrupt)
    report = Report(options)
    interrupted = False
    try:
        run_parts(options, report)
    except KeyboardInterrupt:
        interrupted = True
        report.say("interrupted")
    if report.speed:
        report.say(speed.summary(report.speed))
    report.say(f"{report.failed} failed; files in {report.folder}")
    return 130 if interrupted else 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

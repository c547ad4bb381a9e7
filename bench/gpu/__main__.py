"""Correctness and speed of the kernels on a GPU: ``python -m bench.gpu --results out/gpu --parts correctness,speed``.

    tests         the tests that are marked gpu
    correctness   forward and backward against float64, by the error rule of the tests
    configs       every kernel by itself, in every configuration that is selected on this GPU
    sanitizer     small calls under compute-sanitizer: memcheck and racecheck
    repeats       many runs of one call are equal bit for bit
    speed         all methods of bench in turn, and the parts of our backward
    memory        peaks against the sequence length
    host          what a call costs the host
    tune          a short search for better configurations: profile.json

Rows are appended to files as they come, and a part that has spent its share of the seconds ends with what it has; parts of a
later run are added. In the end there are log.txt, results.csv (speed and memory), speed.png, memory.png, profile.json, and
raw.tar.gz with everything else. Exit status: 0, 1 if a row failed, 2 without a GPU, 130 if interrupted. ``--device cpu --tiny``
tests this program with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import plot
from bench.options import some_of
from triton_relattn.kernels import configs, kernels_are_interpreted

from . import checks, measurements, sanitizer
from .report import Report


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest, from several processes if it can; its output is kept as far as it comes."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    if options.jobs > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(options.jobs)]
    status, lines = report.run("tests.txt", command, deadline - time.monotonic())
    passed = status == 0 and not any(line.startswith(("FAILED", "ERROR")) for line in lines)
    row = {
        "part": "tests",
        "case": "pytest -m gpu",
        "status": "ok" if passed else "FAILED",
        "message": lines[-1] if lines else "",
    }
    report.add("checks.csv", row)
    report.say(f"tests: {row['message']}")


PARTS = {
    "tests": (marked_tests, 0.14),
    "correctness": (checks.correctness, 0.18),
    "configs": (checks.every_config, 0.12),
    "sanitizer": (sanitizer.sanitizer, 0.06),
    "repeats": (checks.repeats, 0.04),
    "speed": (measurements.measure_speed, 0.26),
    "memory": (measurements.measure_memory, 0.04),
    "host": (measurements.host, 0.02),
    "tune": (measurements.search, 0.14),
}
"""What to run, and its share of the seconds if all run."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--parts", type=some_of(tuple(PARTS)), default=list(PARTS), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--seconds", type=float, default=510.0, help="time of all parts, which share it (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (on a GPU, as many as processors, at most 12)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes for the interpreter")
    parser.add_argument("--reach", type=int, default=2, help="of the search, see python -m bench tune (%(default)s)")
    options = parser.parse_args(arguments)
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
    total = sum(share for part, (_, share) in PARTS.items() if part in options.parts)
    for part, (run, share) in PARTS.items():
        if part in options.parts:
            started = time.monotonic()
            try:
                run(options, report, started + options.seconds * share / total)
            except Exception:
                report.failed += 1
                report.say(f"{part}: {traceback.format_exc()}")
            report.say(f"{part}: {time.monotonic() - started:.0f} s")
        options.verified = "correctness" in options.parts and part != "tests" and report.failed == 0


def finish(report: Report) -> None:
    """Figures, and the raw files in one."""
    if (report.folder / "results.csv").exists():
        try:
            plot.run(argparse.Namespace(csv=[report.folder / "results.csv"], out=report.folder))
        except Exception:
            report.say(f"figures: {traceback.format_exc()}")
    report.pack()


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not(options.device):
        print(reason)
        return 2
    options.verified = False
    options.arch = configs.architecture(torch.device(options.device))
    signal.signal(signal.SIGTERM, interrupt)
    report = Report(options)
    interrupted = False
    try:
        run_parts(options, report)
    except KeyboardInterrupt:
        interrupted = True
        report.say("interrupted")
    finish(report)
    report.say(f"{report.failed} failed; files in {report.folder}")
    return 130 if interrupted else 1 if report.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Correctness and speed of the kernels on a GPU, within minutes: ``python3 -m bench.gpu --results out/gpu``.

    repeats       many runs of one call are equal bit for bit
    correctness   the very kernels that are timed, by the error rule of the tests
    kinds         calls of every kind, by ``python -m triton_relattn check``
    speed         ours, ours without the term, SDPA's FlashAttention and cuDNN
    host          microseconds in which the host queues a small call
    layers        a training step of a Conformer's layers
    flex          compiled FlexAttention
    graphs        short calls captured in a CUDA graph
    memory        peaks against the sequence length
    before        speed beside an earlier commit, if .gpu/before has a checkout of it
    tune          the fastest tile sizes, kernel by kernel
    baselines     what people write today in plain torch, and SDPA with a dense bias
    tests         the tests that are marked gpu, if there is a pytest
    sanitizer     small calls under compute-sanitizer's memcheck

Each part is a process of its own and has its share of the seconds; what one leaves over is for the next. A part that crashes or
hangs ends nothing else. Lines are printed and rows appended to files as they come; report.py says which files. Calls of a kind
that a check found to be wrong are not timed. Exit status: 0, 1 if anything failed or crashed, 2 without a GPU, 3 if a part was
cut off and none failed, 130 if interrupted. ``--stub`` runs this program without a GPU, on a stub of the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

try:
    from triton import knobs
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton" or __name__ != "__main__":
        raise
    print("this needs the package triton: pip install triton", file=sys.stderr)
    raise SystemExit(2) from error

from bench.report.rows import in_one_line
from bench.verbs.options import interpreted, some_of
from triton_relattn._command_line import Parser

from . import checks, measurements, stub
from .report import CUT_OFF, FAILED, OK, Outcome, Report, wrong_kinds
from .workers import GRACE, watch

Part = Callable[[argparse.Namespace, Report, float], None]
PARTS: dict[str, tuple[Part, float]] = {
    "repeats": (checks.repeats, 20),
    "correctness": (checks.correctness, 90),
    "kinds": (checks.kinds, 60),
    "speed": (measurements.measure_speed, 150),
    "host": (measurements.measure_host, 10),
    "layers": (measurements.measure_layers, 20),
    "flex": (measurements.measure_flex, 110),
    "graphs": (measurements.measure_graphs, 15),
    "memory": (measurements.measure_memory, 25),
    "before": (measurements.measure_before, 50),
    "tune": (measurements.measure_tuned, 120),
    "baselines": (measurements.measure_baselines, 45),
    "tests": (checks.marked_tests, 60),
    "sanitizer": (checks.sanitizer, 40),
}
"""Functions to run, each with its share of the seconds if all run."""
LEAST_SECONDS = 3.0  # of a part that is worth beginning
SUMMARY_LINES = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--state", type=Path, help="folder of what a later run wants to know (default: state, in results)")
    parser.add_argument("--parts", type=some_of(tuple(PARTS)), default=list(PARTS), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--seconds", type=float, default=750.0, help="time of all parts, which share it (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (one per processor, at most 12)")
    parser.add_argument("--most", type=int, help="of each part's cases only so many, to try it out")
    parser.add_argument("--stub", action="store_true", help="without a GPU, on a stub of its driver, with made-up times")
    # Of a part in a process of its own, whose imports count: time.monotonic() is the same in all processes.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    return parser.parse_args(arguments)


def why_not(is_stub: bool) -> str | None:
    """Why nothing can run, None if it can."""
    if is_stub and torch.cuda.is_available():
        return "there is a GPU: --stub is for machines without"
    if not is_stub and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    return None


def part_command(part: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs a part in a process of its own."""
    command = [sys.executable, "-m", "bench.gpu", "--parts", part, "--until", f"{time.monotonic() + seconds:.1f}"]
    command += ["--results", str(options.results), "--state", str(options.state), "--jobs", str(options.jobs)]
    return [*command, *["--stub"] * options.stub, *(("--most", str(options.most)) if options.most else ())]


def compiled_kernels() -> int:
    """How many compiled kernels Triton has on disk."""
    return sum(1 for _ in Path(knobs.cache.dir).glob("*/*.cubin"))


class Run:
    """All parts, one after the other, each in a process of its own: their lines, and what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.outcomes, self.started = options, list[Outcome](), time.monotonic()
        self.num_cached = compiled_kernels()
        options.state.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.options.results / "log.txt").open("a") as log:
            log.write(f"{text}\n")

    def run_all(self) -> None:
        """Every part that was asked for, each with its share of the seconds that are left."""
        shares = {part: PARTS[part][1] for part in self.options.parts}
        if "correctness" in shares:
            (self.options.state / "wrong.txt").unlink(missing_ok=True)
        for part in list(shares):
            seconds_left = max(0.0, self.options.seconds - (time.monotonic() - self.started))
            self.run(part, seconds_left * shares[part] / sum(shares.values()))
            del shares[part]

    def run(self, part: str, seconds: float) -> None:
        """Run a part, and judge it."""
        outcome, began = Outcome(part), time.monotonic()
        self.outcomes.append(outcome)
        if seconds < LEAST_SECONDS:
            outcome.ended = "cut off before it began"
            return
        self.say(f"== {part}, {seconds:.0f} s from {began - self.started:.0f} s on")

        def hear(line: str) -> None:
            outcome.hear(line)
            self.say(line)

        outcome.end(watch(part_command(part, self.options, seconds), seconds + GRACE, hear), time.monotonic() - began)
        self.say(f"{part}: {outcome}")

    def summary(self) -> str:
        """What passed, what did not, and the first errors."""
        lines = ["", "== summary", *[stub.NOTE] * self.options.stub]
        lines += [f"{outcome.part:13} {outcome}"[:200] for outcome in self.outcomes]
        failed = [outcome.part for outcome in self.outcomes if outcome.has_failed]
        last = [f"{compiled_kernels() - self.num_cached} kernels compiled, {self.num_cached} were there before"]
        last += [f"not timed, since checks failed: {kind}" for kind in sorted(wrong_kinds(self.options.state) or ())][:5]
        last += [f"{len(failed)} of {len(self.outcomes)} parts failed{': ' * bool(failed)}{', '.join(failed)}"]
        errors = [f"    {outcome.part}: {error}" for outcome in self.outcomes for error in outcome.errors]
        return "\n".join([*lines, *errors[: SUMMARY_LINES - len(lines) - len(last)], *last])

    def status(self) -> int:
        """Exit status."""
        if any(outcome.has_failed for outcome in self.outcomes):
            return FAILED
        return CUT_OFF if any(outcome.ended.startswith("cut off") for outcome in self.outcomes) else OK


def run(options: argparse.Namespace) -> int:
    """Run a part in this process, or all parts in their own; whatever happens, say what there is."""
    if reason := why_not(options.stub):
        print(reason)
        return 2
    if interpreted():
        return 2
    options.jobs = 0 if options.stub else options.jobs or min(12, os.cpu_count() or 1)
    options.results = options.results.resolve()
    options.state = (options.state or options.results / "state").resolve()
    os.environ["TRITON_RELATTN_CACHE"] = str(options.state / "profiles")  # the defaults, whatever this machine's user has tuned
    with stub.without_a_gpu() if options.stub else contextlib.nullcontext():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that what a part has started ends with it
        options.results.mkdir(parents=True, exist_ok=True)
        if options.until is not None:
            report = Report(options, options.parts[0])
            try:
                PARTS[options.parts[0]][0](options, report, options.until)
            except Exception as error:
                report.say(traceback.format_exc())
                report.fail({"error": in_one_line(error)})
            return report.status
        parts, status = Run(options), 0
        try:
            parts.run_all()
        except KeyboardInterrupt:
            status = 130
            parts.say("interrupted")
        parts.say(parts.summary())
        return status or parts.status()


def main(arguments: Sequence[str] | None = None) -> int:
    return run(parse(arguments))


if __name__ == "__main__":
    raise SystemExit(main())

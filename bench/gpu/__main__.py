"""Correctness and speed of the kernels on a GPU: ``python3 -m bench.gpu --results out/gpu``, with torch, triton and numpy alone.

    smoke         first of all, in 40 s: two calls against float64, then each kernel of one call, plain and with a full table
    questions     what the design leaves open, answered by a few times: what may go, and what has to stay
    roofs         what bounds the kernels: L2, memory, products, exponentials, shuffles; beside what the model of cycles assumes
    variants      each kernel in configurations that a model of cycles finds promising, beside the selected one
    correctness   forward and backward against float64, by the error rule of the tests
    speed         all methods of bench in turn, and the parts of our backward, checked
    flex          FlexAttention and the peers, which take long to compile: a process for each case
    counters      the main kernels under ncu: misses of spills, bytes of L2 and memory, pipes
    tests         the tests that are marked gpu, if there is a pytest
    configs       every kernel by itself, in every configuration that is selected on this GPU
    memory        peaks against the sequence length
    workspaces    the backward of long calls with workspaces of several sizes
    graphs        short calls captured in a CUDA graph
    host          what a call costs the host
    repeats       many runs of one call are equal bit for bit
    sanitizer     small calls under compute-sanitizer: memcheck and racecheck
    tune          a short search for better configurations: profile.csv

Each part is a process of its own and has its share of the seconds; what one leaves over is for the next. A part that crashes or
hangs ends nothing else. Lines are printed and rows appended to files as they come; parts of a later run are added. In the end
there are log.txt, results.csv (times and memory, beside what bench/predictions.csv says), speed.png and memory.png if there is a
matplotlib, profile.csv, and raw.tar.gz with everything else. Exit status: 0, 1 if anything failed or crashed, 2 without a GPU,
3 if a part was cut off and none failed, 130 if interrupted. ``--stub`` tests this program without a GPU, with toy sizes on a stub
of the driver; ``--device cpu --tiny`` with TRITON_INTERPRET=1, in the interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import predictions
from bench.report.rows import in_one_line, output_of, read
from bench.verbs import plot
from bench.verbs.options import some_of
from triton_relattn.kernels.introspect import kernels_are_interpreted, selection

from . import checks, counters, kernels, measurements, questions, roofs, sanitizer, stub
from .report import Outcome, Report, append, outcome_of, pack, unpack
from .workers import GRACE, watch

CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,clocks_event_reasons.active"
"""What nvidia-smi is asked behind each part. The last one is not 0 where something, as power or heat, keeps clocks down."""
LEAST_SECONDS = 3.0  # of a part that is worth beginning


def marked_tests(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """pytest, from several processes if it can; its output is kept as far as it comes."""
    if importlib.util.find_spec("pytest") is None:
        report.done("there is no pytest")
        return
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=short", "-m", "gpu", "tests/gpu", "-p", "no:cacheprovider"]
    if options.jobs > 1 and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(options.jobs)]
    status, lines = report.run("tests.txt", command, deadline - time.monotonic())
    judge_tests(status, lines, report)


def judge_tests(status: int | None, lines: Sequence[str], report: Report) -> None:
    """Judge pytest by its exit status, and if it was cut off (None) by the verdicts that it had come to."""
    verdicts = [found[1] for line in lines if (found := re.search(r"(?:^|::\S+|\]) (PASSED|FAILED|ERROR)\b", line))]
    wrong = len(verdicts) - verdicts.count("PASSED")
    passed = status == 0 or (status is None and wrong == 0)
    row = {
        "part": "tests",
        "case": "pytest -m gpu",
        "value": verdicts.count("PASSED"),
        "unit": "tests",
        "status": "FAILED" if not passed else "ok" if status == 0 else "cut off",
        "message": lines[-1] if lines else "",
    }
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            report.say(f"  {line}")
    report.add("checks.csv", row)
    report.done(f"{row['value']} passed, {wrong} did not")


Part = Callable[[argparse.Namespace, Report, float], None]
PARTS: dict[str, tuple[Part, float]] = {
    "smoke": (kernels.smoke, 40),
    "questions": (questions.measure_questions, 40),
    "roofs": (roofs.measure_roofs, 10),
    "variants": (kernels.variants, 60),
    "correctness": (checks.correctness, 60),
    "speed": (measurements.measure_speed, 80),
    "flex": (measurements.measure_flex, 70),
    "counters": (counters.counters, 20),
    "tests": (marked_tests, 30),
    "configs": (checks.every_config, 25),
    "memory": (measurements.measure_memory, 15),
    "workspaces": (measurements.measure_workspaces, 15),
    "graphs": (measurements.graphs, 5),
    "host": (measurements.host, 15),
    "repeats": (checks.repeats, 15),
    "sanitizer": (sanitizer.sanitizer, 20),
    "tune": (measurements.search, 20),
}
"""Functions to run, each with its share of the seconds if all run."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--parts", type=some_of(tuple(PARTS)), default=list(PARTS), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--seconds", type=float, default=540.0, help="time of all parts, which share it (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (on a GPU, as many as processors, at most 12)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="toy sizes")
    parser.add_argument("--stub", action="store_true", help="without a GPU: toy sizes on a stub of its driver, made-up times")
    parser.add_argument("--reach", type=int, default=2, help="reach of the search, see python -m bench tune (%(default)s)")
    parser.add_argument("--here", type=Path, metavar="FOLDER", help="run parts in this process, with raw files in FOLDER")
    # Of a part in a process of its own, whose imports count: time.monotonic() is the same in all processes.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.stub:
        options.tiny, options.jobs = True, 0
    if options.jobs is None:
        options.jobs = min(12, os.cpu_count() or 1) if options.device == "cuda" else 0
    options.dtype = "float16" if options.device == "cpu" else "bfloat16"
    options.results = options.results.resolve()
    return options


def why_not(device: str, stub: bool = False) -> str | None:
    """Why nothing can run on the device, None if it can."""
    if stub and torch.cuda.is_available():
        return "there is a GPU: --stub is for machines without"
    if device == "cuda" and not stub and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    if kernels_are_interpreted() != (device == "cpu"):
        return f"--device {device} needs a process {'with' if device == 'cpu' else 'without'} TRITON_INTERPRET=1"
    return None


def run_here(part: str, options: argparse.Namespace) -> None:
    """Run a part in this process; what became of it is in a file."""
    report = Report(options, part)
    run, _ = PARTS[part]
    try:
        run(options, report, options.until or time.monotonic() + options.seconds)
    except Exception as error:
        report.say(traceback.format_exc())
        report.fail(in_one_line(error))
    report.done(report.outcome.note)


def command_of(part: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs a part in a process of its own."""
    command = [sys.executable, "-m", "bench.gpu", "--here", str(options.raw), "--parts", part]
    command += ["--until", f"{time.monotonic() + seconds:.1f}"]
    command += ["--results", str(options.results), "--device", options.device, "--jobs", str(options.jobs)]
    return [*command, "--reach", str(options.reach), *["--tiny"] * options.tiny, *["--stub"] * options.stub]


class Run:
    """All parts, one after the other: their lines, and what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.outcomes = options, list[Outcome]()
        self.started = time.monotonic()

    def say(self, text: str) -> None:
        print(text, flush=True)
        append(self.options.results / "log.txt", text)

    def run(self, part: str, command: Callable[[float], Sequence[str]], seconds: float) -> None:
        """Run a part; command makes it of the seconds that it has."""
        if seconds < LEAST_SECONDS:
            self.outcomes.append(Outcome(part, ended="cut off after 0 s", note="there was no time left"))
            return
        self.say(f"== {part}, {seconds:.0f} s from {time.monotonic() - self.started:.0f} s on")
        began = time.monotonic()
        status, interrupted = None, True
        try:
            status, interrupted = watch(command(seconds), seconds + GRACE, self.say), False
        finally:
            outcome = outcome_of(self.options.raw, part, status, time.monotonic() - began)
            outcome.ended = "interrupted" if interrupted else outcome.ended
            self.outcomes.append(outcome)
            pack(self.options.results, self.options.raw)  # also if this process is killed before its end
        if clocks := output_of("nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"):
            self.say(f"{part}: {clocks}  (after it: {CLOCKS})")
        self.say(f"{part}: {outcome.status} in {outcome.seconds:.0f} s" + f"; {outcome.note}" * bool(outcome.note))

    def run_all(self) -> None:
        """Every part that was asked for, each with its share of the seconds that are left."""
        shares = {part: share for part, (_, share) in PARTS.items() if part in self.options.parts}
        for part, share in list(shares.items()):
            left = self.options.seconds - (time.monotonic() - self.started)
            seconds = min(left, left * share / sum(shares.values()))
            self.run(part, lambda seconds, part=part: command_of(part, self.options, seconds), seconds)  # type: ignore[misc]
            del shares[part]

    def summary(self) -> str:
        """Tell what passed, what did not, and the first errors; where the model of cycles is furthest off."""
        lines = ["", "== summary", *[stub.SAYS] * self.options.stub]
        for outcome in self.outcomes:
            note = f"; {outcome.note}" * bool(outcome.note)
            lines.append(f"{outcome.part:12} {outcome.seconds:4.0f} s  {outcome.rows:4} rows  {outcome.status}{note}")
            lines += [f"    {error}" for error in outcome.errors]
        if (path := self.options.results / "results.csv").exists():
            lines += predictions.largest_deviations(read(path))
        failed, cut_off = ([o.part for o in self.outcomes if which(o)] for which in (_has_failed, _is_only_cut_off))
        lines.append(f"{len(failed)} of {len(self.outcomes)} parts failed{': ' * bool(failed)}{', '.join(failed)}")
        lines.append(f"{len(cut_off)} were cut off{': ' * bool(cut_off)}{', '.join(cut_off)}")
        return "\n".join(lines)

    def status(self) -> int:
        """Exit status."""
        return 1 if any(map(_has_failed, self.outcomes)) else 3 if any(map(_is_only_cut_off, self.outcomes)) else 0


def _has_failed(outcome: Outcome) -> bool:
    return outcome.has_failed


def _is_only_cut_off(outcome: Outcome) -> bool:
    return outcome.is_cut_off and not outcome.has_failed


def draw(options: argparse.Namespace) -> str:
    """Figures of what was measured; return what is to be said of them."""
    path = options.results / "results.csv"
    if not path.exists():
        return ""
    if importlib.util.find_spec("matplotlib") is None:
        return "there is no matplotlib: no figures"
    tables = io.StringIO()
    try:
        with contextlib.redirect_stdout(tables):
            plot.run(argparse.Namespace(csv=[path], out=options.results))
    except Exception as error:
        return f"figures: {in_one_line(error)}"
    return tables.getvalue().rstrip()


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not(options.device, options.stub):
        print(reason)
        return 2
    with stub.without_a_gpu() if options.stub else contextlib.nullcontext():
        return measure(options)


def measure(options: argparse.Namespace) -> int:
    """Run the parts that were asked for, here or each in a process of its own; return the exit status."""
    options.arch = selection.architecture(torch.device(options.device))
    signal.signal(signal.SIGTERM, interrupt)  # so that what a part has started ends with it
    if options.here is not None:
        options.raw = options.here
        for part in options.parts:
            run_here(part, options)
        return 0
    options.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        options.raw = Path(folder)
        unpack(options.results, options.raw)
        return finish(Run(options))


def finish(run: Run) -> int:
    """Run all parts, and whatever happens pack the files and say what there is."""
    status = 0
    try:
        run.run_all()
    except KeyboardInterrupt:
        status = 130
        run.say("interrupted")
    for text in (draw(run.options), *pack(run.options.results, run.options.raw), run.summary()):
        if text:
            run.say(text)
    run.say(f"files in {run.options.results}")
    return status or run.status()


if __name__ == "__main__":
    raise SystemExit(main())

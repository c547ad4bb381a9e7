"""Correctness and speed of the kernels on a GPU: ``python3 -m bench.gpu --results out/gpu``, with torch, triton and numpy alone.

    smoke         first of all: calls that stand for the main ones against float64, then each of their kernels timed
    repeats       many runs of one call are equal bit for bit
    questions     what the design leaves open, answered by whole steps: what may go, and what has to stay
    roofs         what bounds the kernels: products, memory, L2
    correctness   the very kernels that are timed, then calls of every kind, by the error rule of the tests
    diagnosis     if smoke or correctness failed: which kernel is wrong, and what mends it
    speed         ours, ours without the term, SDPA's FlashAttention and cuDNN
    baselines     what people write today in plain torch, and SDPA with a dense bias
    flex          FlexAttention, compiled while correctness runs
    variants      each kernel in other configurations, beside the selected one
    counters      the main kernels under ncu: misses of spills, bytes of L2 and memory, pipes, stalls
    memory        peaks against the sequence length
    workspaces    the backward of long calls with workspaces of several sizes
    graphs        short calls captured in a CUDA graph
    host          what a call costs the host
    tests         the tests that are marked gpu, if there is a pytest
    sanitizer     small calls under compute-sanitizer's memcheck

Each part is a process of its own and has its share of the seconds; what one leaves over is for the next. A part that crashes or
hangs ends nothing else. Lines are printed and rows appended to files as they come; report.py says which files. What a check
found to be wrong is not timed, and a kernel that was timed but not checked is a failure. If diagnosis finds a configuration that
mends a kernel, everything after it uses that. Exit status: 0, 1 if anything failed or crashed, 2 without a GPU, 3 if a part was
cut off and none failed, 130 if interrupted. ``--stub`` runs this program without a GPU, on a stub of the driver.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

try:
    from triton import knobs
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "triton":
        raise
    print("this needs the package triton: pip install triton", file=sys.stderr)
    raise SystemExit(2) from error

from bench.report.rows import ROOT, in_one_line, read
from bench.verbs.options import some_of
from triton_relattn.kernels.introspect import kernels_are_interpreted, selection

from . import checks, counters, diagnosis, kernels, questions, rest, speed, stub
from .report import Outcome, Report, State, outcome_of
from .workers import GRACE, watch

Part = Callable[[argparse.Namespace, Report, float], None]
PARTS: dict[str, tuple[Part, float]] = {
    "smoke": (kernels.smoke, 25),
    "repeats": (checks.repeats, 10),
    "questions": (questions.measure_questions, 30),
    "roofs": (rest.measure_roofs, 8),
    "correctness": (checks.correctness, 60),
    "diagnosis": (diagnosis.diagnose, 60),
    "speed": (speed.measure_speed, 110),
    "baselines": (speed.measure_baselines, 35),
    "flex": (speed.measure_flex, 60),
    "variants": (kernels.variants, 50),
    "counters": (counters.counters, 40),
    "memory": (rest.measure_memory, 20),
    "workspaces": (partial(rest.measure, rest.workspaces), 15),
    "graphs": (partial(rest.measure, rest.graphs), 8),
    "host": (partial(rest.measure, rest.host), 10),
    "tests": (rest.marked_tests, 60),
    "sanitizer": (rest.sanitizer, 40),
    "compile flex": (speed.compile_flex, 60),
}
"""Functions to run, each with its share of the seconds if all run. The last one runs beside correctness."""
DEFAULT = tuple(part for part in PARTS if part not in ("diagnosis", "compile flex"))
CHECKS = ("smoke", "correctness")
LEAST_SECONDS = 3.0  # of a part that is worth beginning
FOR_DIAGNOSIS = 75.0  # seconds that are kept until all checks have passed
SUMMARY_LINES = 30


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="folder of the files")
    parser.add_argument("--state", type=Path, help="folder of what a later run wants to know (default: state, in results)")
    parser.add_argument("--parts", type=some_of(tuple(PARTS)), default=list(DEFAULT), help=f"some of {','.join(PARTS)} (all)")
    parser.add_argument("--seconds", type=float, default=750.0, help="time of all parts, which share it (%(default)s)")
    parser.add_argument("--jobs", type=int, help="processes that compile (one per processor, at most 12)")
    parser.add_argument("--most", type=int, help="of each part's cases only so many, to try it out")
    parser.add_argument("--stub", action="store_true", help="without a GPU, on a stub of its driver, with made-up times")
    # Of a part in a process of its own, whose imports count: time.monotonic() is the same in all processes.
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.jobs = 0 if options.stub else options.jobs or min(12, os.cpu_count() or 1)
    options.results = options.results.resolve()
    options.state = (options.state or options.results / "state").resolve()
    return options


def why_not(is_stub: bool) -> str | None:
    """Why nothing can run, None if it can."""
    if is_stub and torch.cuda.is_available():
        return "there is a GPU: --stub is for machines without"
    if not is_stub and not torch.cuda.is_available():
        return "no GPU: torch.cuda.is_available() is false"
    if kernels_are_interpreted():
        return "kernels are interpreted here: run it without TRITON_INTERPRET"
    return None


def run_here(part: str, options: argparse.Namespace) -> None:
    """Run a part in this process; what became of it is in a file."""
    report = Report(options, part)
    try:
        PARTS[part][0](options, report, options.until)
    except Exception as error:
        report.say(traceback.format_exc())
        report.fail(in_one_line(error))
        report.done(report.outcome.note)


def command_of(part: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """The command that runs a part in a process of its own."""
    command = [sys.executable, "-m", "bench.gpu", "--parts", part, "--until", f"{time.monotonic() + seconds:.1f}"]
    command += ["--results", str(options.results), "--state", str(options.state), "--jobs", str(options.jobs)]
    return [*command, *["--stub"] * options.stub, *(("--most", str(options.most)) if options.most else ())]


def compiled_kernels() -> int:
    """Return how many compiled kernels Triton has on disk."""
    return sum(1 for _ in Path(knobs.cache.dir).glob("*/*.cubin"))


class Run:
    """All parts, one after the other: their lines, and what became of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.outcomes, self.started = options, list[Outcome](), time.monotonic()
        self.state, self.found = State(options.state), compiled_kernels()

    def say(self, text: str) -> None:
        print(text, flush=True)
        with (self.options.results / "log.txt").open("a") as log:
            log.write(f"{text}\n")

    def left(self) -> float:
        return self.options.seconds - (time.monotonic() - self.started)

    def run(self, part: str, seconds: float) -> Outcome:
        """Run a part in a process of its own."""
        if seconds < LEAST_SECONDS:
            self.outcomes.append(Outcome(part, ended="cut off after 0 s", note="there was no time left"))
            return self.outcomes[-1]
        self.say(f"== {part}, {seconds:.0f} s from {time.monotonic() - self.started:.0f} s on")
        (self.state.folder / f"part-{part}.json").unlink(missing_ok=True)
        began, status, interrupted = time.monotonic(), None, True
        try:
            status, interrupted = watch(command_of(part, self.options, seconds), seconds + GRACE, self.say), False
        finally:
            outcome = outcome_of(self.state.folder, part, status, time.monotonic() - began)
            outcome.ended = "interrupted" if interrupted else outcome.ended
            self.outcomes.append(outcome)
        self.say(f"{part}: {outcome.status} in {outcome.seconds:.0f} s" + f"; {outcome.note}" * bool(outcome.note))
        return outcome

    def run_all(self) -> None:
        """Every part that was asked for, each with its share of the seconds that are left."""
        shares = {part: PARTS[part][1] for part in self.options.parts}
        if CHECKS[0] in shares:
            self.state.forget()
        was_diagnosed = False
        while shares:
            part = next(iter(shares))
            kept = FOR_DIAGNOSIS if set(shares) & set(CHECKS) and not was_diagnosed else 0.0
            left = max(0.0, self.left() - kept)
            seconds = left * shares.pop(part) / (PARTS[part][1] + sum(shares.values()))
            if part == "questions" and any(outcome.has_failed for outcome in self.outcomes):
                self.outcomes.append(Outcome(part, note="kernels are wrong: not asked"))
                continue
            with self.compiling_flex(part, seconds):
                outcome = self.run(part, seconds)
            if part in CHECKS and outcome.has_failed and not was_diagnosed:
                was_diagnosed = True
                self.diagnose(part, seconds)

    def diagnose(self, part: str, seconds: float) -> None:
        """Look for the wrong kernel; if something mends it, run the part that failed again with that."""
        self.run("diagnosis", self.left() / 2 if self.options.stub else min(FOR_DIAGNOSIS, self.left()))
        finding = self.state.get("finding")
        if finding and finding["mended"]:
            self.state.forget("wrong.txt")
            self.run(part, min(seconds, self.left()))

    @contextlib.contextmanager
    def compiling_flex(self, part: str, seconds: float):  # type: ignore[no-untyped-def]
        """Let FlexAttention compile for a later run while correctness leaves processors idle."""
        if part != "correctness" or self.options.stub:
            yield
            return
        command = ["nice", "-n", "19", *command_of("compile flex", self.options, seconds)]
        beside = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        try:
            yield
            with contextlib.suppress(subprocess.TimeoutExpired):
                beside.wait(max(0.1, min(30.0, self.left() - FOR_DIAGNOSIS)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(beside.pid, signal.SIGKILL)

    def judge_kernels(self) -> None:
        """What was timed has to have been checked, in this run or in one before it."""
        if not self.state.has_checks:
            self.say("no kernel was checked: smoke and correctness do that")
        elif unchecked := self.state.unchecked():
            outcome = Outcome("timed kernels", rows=1, failed=1, is_done=True)
            outcome.errors = [f"timed but not checked: {', '.join(unchecked)}"[:300]]
            self.outcomes.append(outcome)

    def summary(self) -> str:
        """What passed, what did not, the first errors, and last the finding of the diagnosis."""
        lines = ["", "== summary", *[stub.SAYS] * self.options.stub]
        for outcome in self.outcomes:
            note = f"; {outcome.note}" * bool(outcome.note)
            lines.append(f"{outcome.part:13} {outcome.seconds:4.0f} s  {outcome.rows:4} rows  {outcome.status}{note}"[:200])
        failed = [outcome.part for outcome in self.outcomes if outcome.has_failed]
        last = [f"{compiled_kernels() - self.found} kernels compiled, {self.found} were there before"]
        last += [f"{len(failed)} of {len(self.outcomes)} parts failed{': ' * bool(failed)}{', '.join(failed)}"]
        if finding := self.state.get("finding"):
            last.append(f"finding: {finding['text']}")
        errors = [f"    {outcome.part}: {error}" for outcome in self.outcomes for error in outcome.errors]
        return "\n".join([*lines, *errors[: SUMMARY_LINES - len(lines) - len(last)], *last])

    def status(self) -> int:
        """Exit status."""
        if any(outcome.has_failed for outcome in self.outcomes):
            return 1
        return 3 if any("cut off" in outcome.status for outcome in self.outcomes) else 0


def draw(results: Path) -> str:
    """Draw what was measured, a figure per width and one of memory; return what to say of them."""
    path = results / "results.csv"
    if not path.exists():
        return ""
    if importlib.util.find_spec("matplotlib") is None:
        return "there is no matplotlib: no figures"
    try:
        import matplotlib

        from bench.verbs.plot import draw_memory, draw_speed

        matplotlib.use("Agg")
        rows = read(path)
        for width in ("64", "128"):
            of_width = [row for row in rows if (row["verb"], row["group"], row["head_dim"]) == ("speed", "long", width)]
            if of_width:
                draw_speed(of_width, results / f"speed-d{width}.png")
        if of_memory := [row for row in rows if row["verb"] == "memory"]:
            draw_memory(of_memory, results / "memory.png")
    except Exception as error:
        return f"figures: {in_one_line(error)}"
    return ""


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if reason := why_not(options.stub):
        print(reason)
        return 2
    os.environ["TRITON_RELATTN_CACHE"] = str(State(options.state).profiles)  # no profile but that of a diagnosis
    with stub.without_a_gpu() if options.stub else contextlib.nullcontext():
        options.arch = selection.architecture(torch.device("cuda"))
        signal.signal(signal.SIGTERM, interrupt)  # so that what a part has started ends with it
        options.results.mkdir(parents=True, exist_ok=True)
        if options.until is not None:
            run_here(options.parts[0], options)
            return 0
        return finish(Run(options))


def finish(run: Run) -> int:
    """Run all parts, and whatever happens say what there is."""
    status = 0
    try:
        run.run_all()
    except KeyboardInterrupt:
        status = 130
        run.say("interrupted")
    run.judge_kernels()
    for text in (draw(run.options.results), run.summary()):
        if text:
            run.say(text)
    return status or run.status()


if __name__ == "__main__":
    raise SystemExit(main())

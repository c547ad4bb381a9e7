"""Time here beside another commit or checkout: each package in its own process, interleaved minima.

``python -m bench compare REF speed --shape b1,h8,n2048``. REF: a commit, branch or tag, or a folder with a checkout. The verbs
are speed, host and models, with their own options; ``--seconds`` is the time of each case. Cases, models and clock are those of
this checkout, so only the package differs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VERBS = {"speed": "bench.verbs.speed", "host": "bench.verbs.host", "models": "bench.models"}
"""Each has timers(options): names of cases, and functions that run a case once and return times by column, in its UNIT."""
FEWEST = 3  # rounds


class Failed(Exception):
    """The package of a checkout cannot be measured."""


class Worker:
    """A process with the package of one checkout; it waits while the other one runs."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        from triton_relattn._peaks import THREADS

        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(folder), *arguments],
            cwd=ROOT,
            env={**THREADS, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, command: str) -> Any:
        """The answer to "next" (the next case's name, None after the last) or "run" (times of the case by column)."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line[7:])
                if "error" in answer:
                    raise Failed(f"the package in {self.folder} cannot be measured: {answer['error']}")
                return answer["value"]
        raise Failed(f"the process for the package in {self.folder} ended with {self.process.wait()}")

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


def serve(folder: str, verb: str, arguments: list[str]) -> None:
    """Answer the questions of Worker.ask, with the package of a folder and the verb of this checkout."""
    sys.path[0] = folder
    import triton_relattn

    assert Path(triton_relattn.__file__).is_relative_to(folder), triton_relattn.__file__
    sys.path[0] = str(ROOT)
    if os.environ.get("RELATTN_STUB"):  # as python -m bench.gpu --stub, without a GPU
        ExitStack().enter_context(importlib.import_module("bench.gpu.stub").without_a_gpu())
    timers: Any = None
    time_once: Any = None
    for line in sys.stdin:
        try:
            timers = timers or importlib.import_module(VERBS[verb]).timers(parse(verb, arguments))
            if line == "next\n":
                value, time_once = next(timers, (None, None))
            else:
                value = time_once()
            answer = {"value": value}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER " + json.dumps(answer), flush=True)


def parse(verb: str, arguments: list[str]) -> argparse.Namespace:
    """The options of a verb."""
    from triton_relattn._command_line import Parser

    module = importlib.import_module(VERBS[verb])
    parser = Parser(prog=f"python -m bench compare REF {verb}", description=module.__doc__)
    module.add_arguments(parser)
    return parser.parse_args(arguments)


@contextmanager
def checkout(ref: str) -> Iterator[Path]:
    """A temporary folder with the package at a commit; if ref is a folder with the package, that one."""
    if (Path(ref) / "triton_relattn").is_dir():
        yield Path(ref).resolve()
        return

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if shutil.which("git") is None or git("rev-parse", "--show-toplevel") != str(ROOT.resolve()):
        raise argparse.ArgumentError(None, f"{ROOT} is no git checkout; REF may be a folder with the other package")
    commit = git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if not commit:
        raise argparse.ArgumentError(None, f"{ref!r} is neither a commit here nor a folder with triton_relattn")
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent).resolve() / "checkout"
        try:
            git("worktree", "add", "--detach", str(folder), commit)
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def compare(here: Worker, there: Worker, seconds: float) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """Each case's name, and the least times here and there, by column. The first run of each warms up."""
    while (name := here.ask("next")) is not None:
        if (other := there.ask("next")) != name:
            raise Failed(f"the cases differ: {name} here, {other} there")
        here.ask("run"), there.ask("run")
        least: list[dict[str, float]] = [{}, {}]
        order, started, rounds = [(here, least[0]), (there, least[1])], time.monotonic(), 0
        while rounds < FEWEST or time.monotonic() - started < seconds:
            for worker, found in order:
                found |= {column: min(value, found.get(column, value)) for column, value in worker.ask("run").items()}
            order.reverse()
            rounds += 1
        yield name, least


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a commit, branch or tag, or a folder with a checkout")
    parser.add_argument("verb", choices=tuple(VERBS), help="what to time")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the verb")


def run(options: argparse.Namespace) -> int:
    from ..report.text import digits, interruptible, table

    given = parse(options.verb, options.arguments)
    unit = importlib.import_module(VERBS[options.verb]).UNIT
    head, body = [f"{unit}, here and at {options.ref}"], list[list[str]]()
    with ExitStack() as stack:
        folder = stack.enter_context(checkout(options.ref))
        workers = [Worker(path, [options.verb, *options.arguments]) for path in (ROOT, folder)]
        for worker in workers:
            stack.callback(worker.stop)
        try:
            with interruptible():
                for name, (ours, theirs) in compare(workers[0], workers[1], given.seconds):
                    print(f"  {name}", file=sys.stderr, flush=True)
                    head[1:] = [word for column in ours for word in (column, "there", "ratio")]
                    cells = [
                        (digits(ours[column]), digits(theirs[column]), f"{ours[column] / theirs[column]:.2f}") for column in ours
                    ]
                    body.append([name, *(cell for triple in cells for cell in triple)])
        except Failed as error:
            print(error, file=sys.stderr)
            return 1
    print(table(head, body) + "\n\nThe least of interleaved runs; ratio: here / there, below 1 this checkout is faster.")
    return 0


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3:])

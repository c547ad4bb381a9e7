"""``python -m tests.mutants``: which faults the tests notice.

Each fault is put into a copy of the repository, whose tests are run: first those that are most likely to notice, then all of
their folder. In the end the tests that noticed one are run without any. Exit status 1 if a known fault survives, no longer
applies, or cannot be judged; 130 if interrupted, with the rows so far.

--generate tries faults drawn at random from all that tools.mutants.generate makes of the package, and prints the share that the
tests notice. It ends with status 0: some of those faults change nothing.
"""

from __future__ import annotations

import argparse
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from tests.witnesses import read_witnesses, write_witnesses
from tools.mutants.fault import Fault
from tools.mutants.generate import faults as faults_of
from tools.mutants.runner import BROKEN, CAUGHT, Outcome, Runner, source_files

from .catalogue import FAULTS

ROOT = Path(__file__).parents[2]
PACKAGE = "triton_relattn"
KERNELS, MAIN = "tests/interpreter tests/implementations", "tests/cpu tests/implementations"
INTERPRETED = {"TRITON_INTERPRET": "1"}
WITHOUT_KERNELS = ("_blockwise", "_distributed", "integrations", "nn", "_reference.py", "plots.py")
"""Parts of the package that the tests of the kernels do not reach."""
GENERATED_SECONDS = 900.0
"""The longest that a folder's tests may take with a generated fault, which may be a loop without end."""


def runner_of(root: Path = ROOT) -> Runner:
    return Runner(
        root,
        PACKAGE,
        ignored=("tests/cpu/test_mutants.py",),
        variables={"tests/interpreter": INTERPRETED, "[triton_in": INTERPRETED},
    )


def generated(root: Path, count: int, seed: int, below: str = PACKAGE) -> list[Fault]:
    """Draw faults of the package, or of a folder or file of it, at random; the folders whose tests are run go with the file."""
    files = [file for file in source_files(root) if file.startswith(below) and file.endswith(".py")]
    drawn = [fault for file in files for fault in faults_of(root, file)]
    chosen = random.Random(seed).sample(drawn, min(count, len(drawn)))
    faults = []
    for each in chosen:
        part = each.edit.file.split("/")[1]
        folders = (KERNELS, MAIN) if part == "kernels" else (MAIN,) if part in WITHOUT_KERNELS else (MAIN, KERNELS)
        faults.append(Fault(str(each), "generated", (), (each.edit,), folders))
    return faults


def row(outcome: Outcome, width: int) -> str:
    what = f"{outcome.test}: {outcome.detail}" if outcome.test else outcome.detail
    return f"{outcome.status:<8}  {outcome.seconds:6.1f} s  {outcome.fault.name:<{width}}  {what[:200]}"


def attempts(runner: Runner, faults: Sequence[Fault], jobs: int) -> tuple[list[Outcome], bool]:
    """The outcomes, each shown when it is there, and whether all faults were tried."""
    outcomes: list[Outcome] = []
    width = max((len(fault.name) for fault in faults), default=0)
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(runner.attempt, fault) for fault in faults]
        for future in tqdm(futures, unit="fault"):
            outcomes.append(future.result())
            tqdm.write(row(outcomes[-1], width))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        runner.stop()
        return outcomes, False
    pool.shutdown()
    return outcomes, True


def confirmed(runner: Runner, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The outcomes; what was caught by a test that fails without a fault was not."""
    failing = runner.failing_anyway({outcome.test for outcome in outcomes if outcome.status == CAUGHT and outcome.test})
    return [
        Outcome(outcome.fault, BROKEN, outcome.test, "fails without the fault, too", outcome.seconds)
        if outcome.test in failing
        else outcome
        for outcome in outcomes
    ]


def main(arguments: Sequence[str] | None = None, runner: Runner | None = None, catalogue: Sequence[Fault] = FAULTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME,...", help="these faults (default: all)")
    parser.add_argument("--list", action="store_true", help="the faults, and what each does wrong")
    parser.add_argument("--generate", metavar="N", type=int, help="try N generated faults instead of the known ones")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="which ones (%(default)s)")
    parser.add_argument("--below", metavar="PATH", default=PACKAGE, help="folder or file whose faults are drawn (%(default)s)")
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=1, help="number of faults that are tried at a time (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="only the tests most likely to notice")
    parser.add_argument("--share", metavar="N", type=int, default=1, help="one in N of the cases of each test; make test has 16")
    parser.add_argument("--record", action="store_true", help="add the tests that noticed to tests/witnesses.txt")
    options = parser.parse_args(arguments)
    runner = runner or runner_of()
    if options.generate is not None:
        faults = generated(runner.root, options.generate, options.seed, options.below)
        runner.folder_seconds = GENERATED_SECONDS
    else:
        names = [fault.name for fault in catalogue] if options.only is None else options.only.split(",")
        if unknown := set(names) - {fault.name for fault in catalogue}:
            parser.error(f"unknown: {', '.join(sorted(unknown))}; --list shows all")
        faults = [fault for fault in catalogue if fault.name in names]
    if options.list:
        print("\n".join(f"{fault.name}: {fault.effect}" for fault in faults))
        return 0

    runner.only_quick, runner.share = options.quick, options.share
    runner.check_imports()
    outcomes, complete = attempts(runner, faults, max(options.jobs, 1))
    if complete:
        checked = confirmed(runner, outcomes)
        for outcome, before in zip(checked, outcomes, strict=True):
            if outcome is not before:
                print(row(outcome, len(outcome.fault.name)))
        outcomes = checked
    if options.record:
        write_witnesses(read_witnesses() | {outcome.test for outcome in outcomes if outcome.status == CAUGHT and outcome.test})
    caught = sum(outcome.status == CAUGHT for outcome in outcomes)
    broken = sum(outcome.status == BROKEN for outcome in outcomes)
    print(
        f"{caught} of {len(faults)} caught"
        + (f", {broken} without a verdict (no import, no end)" if broken else "")
        + ("" if complete else ", interrupted")
    )
    if not complete:
        return 130
    return 0 if caught == len(faults) or options.generate is not None else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill does what Ctrl-C does
    raise SystemExit(main())

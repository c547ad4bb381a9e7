"""``python -m tests.mutants``: which tests notice known faults.

Each fault is put into a copy of the repository, whose tests are run: first those that are most likely to notice, then all of
their folder. In the end the tests that noticed one are run without any. Exit status 1 if a fault survives, no longer applies, or
cannot be judged; 130 if interrupted, with the rows so far.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from .catalogue import FAULTS
from .fault import Fault
from .runner import BROKEN, CAUGHT, Outcome, Runner
from .witnesses import read_witnesses, write_witnesses


def row(outcome: Outcome) -> str:
    what = f"{outcome.test}: {outcome.detail}" if outcome.test else outcome.detail
    return (
        f"{outcome.status:<8}  {outcome.seconds:6.1f} s  {outcome.fault.name:<{max(len(f.name) for f in FAULTS)}}  {what[:200]}"
    )


def attempts(runner: Runner, faults: Sequence[Fault], jobs: int) -> tuple[list[Outcome], bool]:
    """The outcomes, each shown when it is there, and whether all faults were tried."""
    outcomes: list[Outcome] = []
    pool = ThreadPoolExecutor(jobs)
    try:
        futures = [pool.submit(runner.attempt, fault) for fault in faults]
        for future in tqdm(futures, unit="fault"):
            outcomes.append(future.result())
            tqdm.write(row(outcomes[-1]))
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
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="as many at a time (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="only the tests most likely to notice")
    parser.add_argument("--share", metavar="N", type=int, default=1, help="one in N of the cases of each test; make test has 16")
    parser.add_argument("--record", action="store_true", help="write the tests that noticed to tests/mutants/witnesses.csv")
    options = parser.parse_args(arguments)
    names = [fault.name for fault in catalogue] if options.only is None else options.only.split(",")
    if unknown := set(names) - {fault.name for fault in catalogue}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; --list shows all")
    faults = [fault for fault in catalogue if fault.name in names]
    if options.list:
        print("\n".join(f"{fault.name}: {fault.effect}" for fault in faults))
        return 0

    runner = runner or Runner()
    runner.only_quick, runner.share = options.quick, options.share
    runner.check_imports()
    outcomes, complete = attempts(runner, faults, max(options.jobs, 1))
    if complete:
        checked = confirmed(runner, outcomes)
        for outcome, before in zip(checked, outcomes, strict=True):
            if outcome is not before:
                print(row(outcome))
        outcomes = checked
    if options.record:
        noticed = {outcome.fault.name: outcome.test for outcome in outcomes if outcome.status == CAUGHT and outcome.test}
        known = {fault.name for fault in FAULTS}
        write_witnesses({name: test for name, test in {**read_witnesses(), **noticed}.items() if name in known})
    caught = sum(outcome.status == CAUGHT for outcome in outcomes)
    print(f"{caught} of {len(faults)} caught" + ("" if complete else ", interrupted"))
    if not complete:
        return 130
    return 0 if caught == len(faults) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill does what Ctrl-C does
    raise SystemExit(main())

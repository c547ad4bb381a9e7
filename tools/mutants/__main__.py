"""``python -m tools.mutants``: which faults the tests notice.

faults.jsonl has the faults: some that people made or nearly made, and 60 of the 10,000 that generate.py makes of the
package, drawn with seed 61. caught.json has the test that noticed each, and the seconds it took. Each fault is put into a copy of
the repository, in which that test runs first; if it passes, or is no longer there, the tests of the fault's area follow, for at
most SECONDS of CPU time. Exit status 1 if a fault survives that was caught before.

--generate tries faults drawn at random instead, and prints which share the tests notice; some of those faults change nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from .fault import Change, Fault
from .generate import faults as file_faults
from .runner import CAUGHT, Outcome, Runner, source_files

HERE = Path(__file__).parent
ROOT, PACKAGE = HERE.parents[1], "triton_relattn"
FAULTS, CAUGHT_BY = HERE / "faults.jsonl", HERE / "caught.json"
SECONDS = 60
INTERPRETED = {"TRITON_INTERPRET": "1"}
AREAS = {
    "": "operator/test_draws cpu/test_validation operator/test_edges operator/test_parts cpu/test_blockwise cpu/test_torch",
    "__main__": "interpreter/test_check",
    "_blockwise": "operator/test_draws operator/test_edges operator/test_parts cpu/test_blockwise",
    "_blockwise/grids": "operator/test_grids",
    "_core/hints": "cpu/test_validation",
    "_core/mistakes": "cpu/test_validation",
    "_core/names": "cpu/test_validation",
    "_core/watchers": "operator/test_ways",
    "_implementations": "cpu/test_validation operator/test_draws operator/test_edges cpu/test_blockwise",
    "_jagged": "cpu/test_torch",
    "_ranks": "cpu/test_distributed",
    "_sharding": "cpu/test_distributed",
    "_operators": "cpu/test_torch cpu/test_compile operator/test_draws operator/test_parts",
    "check": "interpreter/test_check",
    "distributed": "cpu/test_distributed",
    "grids": "operator/test_grids cpu/test_torch",
    "integrations": "enable/test_structure enable/test_refused enable/test_replaced enable/test_later",
    "integrations/transformers": "enable/test_families enable/test_decoding enable/test_replaced enable/test_door "
    "enable/test_packing",
    "kernels": "operator/test_sweeps operator/test_precision operator/test_draws operator/test_edges interpreter/test_calls "
    "interpreter/test_workspace",
    "kernels/bwd_dq": "operator/test_draws interpreter/test_calls",
    "kernels/bwd_stored_dq": "operator/test_draws interpreter/test_calls",
    "kernels/config": "compile/test_profiles compile/test_launches",
    "kernels/config/architectures": "compile/test_profiles compile/test_instructions compile/test_launches",
    "kernels/delta": "operator/test_draws interpreter/test_delta",
    "kernels/grid": "operator/test_grids interpreter/test_grids",
    "kernels/splits": "interpreter/test_key_splits",
    "kernels/tile/registers": "interpreter/test_rotations operator/test_draws",
    "kernels/tuning": "interpreter/test_tuning",
    "kernels/workspace": "operator/test_draws interpreter/test_workspace interpreter/test_calls",
    "measure": "cpu/test_measure",
    "nn": "cpu/test_nn cpu/test_tables",
    "plots": "cpu/test_plots",
    "tables": "cpu/test_nn cpu/test_tables",
    "testing": "cpu/test_testing",
}
"""The tests of parts of the package, best detectors first, in one process; the longest name that the file begins with counts."""


def area_tests(file: str) -> str:
    name = file.removeprefix(f"{PACKAGE}/")
    tests = AREAS[max((area for area in AREAS if name.startswith(area)), key=len)]
    return " ".join(f"tests/{test}.py" for test in tests.split())


def caught_before() -> dict[str, tuple[str, int]]:
    """The test that noticed each fault, and the seconds it took."""
    return json.loads(CAUGHT_BY.read_text()) if CAUGHT_BY.exists() else {}


def record(caught: dict[str, tuple[str, int]]) -> None:
    lines = (f"{json.dumps(name)}: {json.dumps(test)}" for name, test in sorted(caught.items()))
    CAUGHT_BY.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def known(only: Sequence[str] | None) -> Iterator[Fault]:
    """The faults of the list, each with the test that noticed it."""
    caught = caught_before()
    for line in FAULTS.read_text().splitlines():
        row = json.loads(line)
        if only is not None and row["name"] not in only:
            continue
        first = (caught[row["name"]][0],) if row["name"] in caught else tuple(row["tests"])
        changes = tuple(Change(*change) for change in row["changes"])
        yield Fault(row["name"], row["effect"], first, changes, (area_tests(row["changes"][0][0]),))


def generated(count: int, seed: int, below: str = PACKAGE) -> Iterator[Fault]:
    """Faults of the package, or of a folder or file of it, drawn at random."""
    files = [file for file in source_files(ROOT) if file.startswith(below) and file.endswith(".py")]
    drawn = [fault for file in files for fault in file_faults(ROOT, file)]
    for fault in random.Random(seed).sample(drawn, min(count, len(drawn))):
        yield Fault(str(fault), "generated", (), (fault.edit,), (area_tests(fault.edit.file),))


def attempts(runner: Runner, faults: Sequence[Fault], jobs: int) -> Iterator[Outcome]:
    """The outcomes, each as soon as it is there."""
    width = max((len(fault.name) for fault in faults), default=0)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for outcome in tqdm(pool.map(runner.attempt, faults), total=len(faults), unit="fault"):
                what = f"{outcome.test}: {outcome.detail}" if outcome.test else outcome.detail
                tqdm.write(f"{outcome.status:<8}  {outcome.seconds:6.1f} s  {outcome.fault.name:<{width}}  {what[:200]}")
                yield outcome
        except KeyboardInterrupt:
            runner.stop()
            pool.shutdown(cancel_futures=True)
            raise


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME,...", help="names of faults (default: all)")
    parser.add_argument("--list", action="store_true", help="names of all faults, and what each does wrong")
    parser.add_argument("--generate", metavar="N", type=int, help="number of generated faults to try instead of the known ones")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the generated faults (%(default)s)")
    parser.add_argument("--below", metavar="PATH", default=PACKAGE, help="folder or file whose faults are drawn (%(default)s)")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="faults tried at a time (%(default)s)")
    parser.add_argument("--record", action="store_true", help="write the tests that noticed into caught.json")
    options = parser.parse_args(arguments)
    if options.generate is not None:
        faults = list(generated(options.generate, options.seed, options.below))
    else:
        faults = list(known(options.only and options.only.split(",")))
    if options.list:
        print("\n".join(f"{fault.name}: {fault.effect}" for fault in faults))
        return 0
    variables = dict.fromkeys(("tests/interpreter", "[triton_in", "[triton]"), INTERPRETED)
    runner = Runner(ROOT, PACKAGE, variables=variables, cpu_seconds=SECONDS)
    runner.check_imports()
    before = caught_before()
    lost, number = [], 0
    for outcome in attempts(runner, faults, max(options.jobs, 1)):
        number += outcome.status == CAUGHT
        if outcome.status == CAUGHT and options.record:
            before[outcome.fault.name] = outcome.test, round(outcome.seconds)
            record(before)
        elif outcome.status != CAUGHT and outcome.fault.name in before:
            lost.append(outcome.fault.name)
    print(f"{number} of {len(faults)} caught" + (f"; no longer: {', '.join(lost)}" if lost else ""))
    return 1 if lost else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill does what Ctrl-C does
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())

"""How close does every numerical check come to failing, on this processor and on those that it can pretend to be?

``python -m tests.headroom`` runs the numerical tests with several seeds, with the vector instructions of older processors,
with one thread and with two. It prints every check that took more than half of its allowance, the worst first, and fails if there
is one. Where the allowance is a multiple of a measured error, plain torch's or that of one rounding, a result as good as that
takes half of it or more: such checks are printed from three quarters on. All checks go to ``out/headroom.csv``. On another
processor sums are rounded in another order: a check that takes half of its allowance here may take all of it there. The cure is a
bound that is derived from what is computed, or a better test. Never a larger number.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.conftest import SEED_OFFSET, THREADS
from triton_relattn._core.within import VARIABLE

ROOT = Path(__file__).parents[1]
RESULTS = Path("out/headroom.csv")
HALF = 0.5
OF_MEASURED = 0.75
"""Half as much again as plain torch's error, where twice as much is allowed. Both are the largest of many roundings, which differ
from seed to seed by a quarter."""
MINUTES_OF_A_RUN = 30
"""About what all cases of a folder take with one setting, on two idle cores."""
FOLDERS = ("tests/cpu", "tests/interpreter", "tests/implementations")
PROCESSES = FOLDERS[::2], FOLDERS[1:]
"""Folders whose tests share a process, without and with the interpreter."""
WITHOUT_NUMBERS = {
    *("test_bench.py", "test_compile_report.py", "test_cycles.py", "test_demo.py", "test_docs.py", "test_faults.py"),
    *("test_gpu_parts.py", "test_house.py", "test_imports.py", "test_memory.py", "test_music_example.py"),
    *("test_mutants.py", "test_notebook.py", "test_packaging.py", "test_plots.py", "test_predictions.py", "test_profiles.py"),
    *("test_headroom.py", "test_testing.py", "test_typing.py", "test_validation.py", "test_within.py"),
}
"""Files that compare no results, or that test the comparisons."""
OLDEST = {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
"""Environment that limits torch, oneDNN and MKL to the instructions that every processor has."""


class Setting(NamedTuple):
    """A processor to pretend to be, and a number of threads."""

    name: str
    environment: dict[str, str]
    threads: int

    def __str__(self) -> str:
        return f"{self.name}, {self.threads} thread{'s' * (self.threads > 1)}"


class Check(NamedTuple):
    """The row of a check where it came closest to failing."""

    ratio: float
    test: str
    what: str
    error: str
    allowance: str
    setting: str
    seed: int
    measured: bool
    """Whether the allowance is a multiple of a measured error."""

    @property
    def is_close(self) -> bool:
        """Whether another processor may use up the allowance."""
        return self.ratio > (OF_MEASURED if self.measured else HALF)


def flags() -> set[str]:
    """Return the instructions that the processor has, by the kernel's names; nothing where it does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.partition(":")[2].split()}


def settings() -> list[Setting]:
    """Return what this processor can pretend to be: itself first, then the oldest there is, and those between."""
    of_numpy: Any = importlib.import_module("numpy._core._multiarray_umath")
    found, dispatched = flags(), [name for name in of_numpy.__cpu_dispatch__ if of_numpy.__cpu_features__[name]]
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    processors: dict[str, dict[str, str]] = {"as it is": {}}
    newest = [name for name in dispatched if "AVX512" in name or name == "X86_V4"]
    processors["the oldest"] = {
        **OLDEST,
        "OPENBLAS_CORETYPE": "Prescott" if is_x86 else "ARMV8",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NPY_DISABLE_CPU_FEATURES": " ".join(dispatched),
    }
    if is_x86 and "avx512f" in found:
        processors["AVX-512"] = {
            "ATEN_CPU_CAPABILITY": "avx512",
            "OPENBLAS_CORETYPE": "SkylakeX",
            "DNNL_MAX_CPU_ISA": "AVX512_CORE",
        }
    if is_x86 and "avx2" in found:
        processors["AVX2"] = {
            "ATEN_CPU_CAPABILITY": "avx2",
            "OPENBLAS_CORETYPE": "Haswell",
            "DNNL_MAX_CPU_ISA": "AVX2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "NPY_DISABLE_CPU_FEATURES": " ".join(newest),
        }
    return [  # the most different ones first
        Setting(name, {key: value for key, value in environment.items() if value}, threads)
        for threads in (1, 2)
        for name, environment in processors.items()
    ]


def files() -> list[str]:
    found = (path for folder in FOLDERS for path in sorted((ROOT / folder).glob("test_*.py")))
    return [str(path.relative_to(ROOT)) for path in found if path.name not in WITHOUT_NUMBERS]


def run(tests: list[str], setting: Setting, seed: int, options: list[str]) -> tuple[list[list[str]], list[str]]:
    """Run tests that share a process; return the rows of their checks, and the tests that failed."""
    with tempfile.TemporaryDirectory(prefix="headroom-") as folder:
        file = Path(folder, "checks.csv")
        own = {VARIABLE: str(file), SEED_OFFSET: str(seed), THREADS: str(setting.threads)}
        if any(test.startswith("tests/interpreter") for test in tests):
            own["TRITON_INTERPRET"] = "1"
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-rfE", "-p", "no:cacheprovider"]
        environment = inherited | setting.environment | own
        child = subprocess.run(
            [*command, *options, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if child.returncode not in (0, 1, 5):  # passed, failed, nothing to run
            raise RuntimeError(f"pytest failed:\n{child.stdout[-2000:]}{child.stderr[-2000:]}")
        failed = [line.split(" ", 1)[1] for line in child.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        if not file.exists():
            return [], failed
        with file.open(newline="") as lines:
            return list(csv.reader(lines)), failed


def worst(rows: Iterable[list[str]], failed: list[str], setting: Setting, seed: int) -> Iterator[Check]:
    """Yield the checks of a run; not those that failed in a test that passed: it wants them to."""
    for test, what, error, allowance, ratio, measured in rows:
        if float(ratio) <= 1 or any(line.startswith(test) for line in failed):
            yield Check(float(ratio), test, what, error, allowance, str(setting), seed, measured == "1")


def parser() -> argparse.ArgumentParser:
    arguments = argparse.ArgumentParser(prog="python -m tests.headroom", description=__doc__)
    arguments.add_argument(
        "tests",
        nargs="*",
        help="files of tests/cpu, tests/interpreter and tests/implementations, or tests in them; all that compare numbers",
    )
    arguments.add_argument("--seeds", type=int, default=8, metavar="N", help="seeds, added to those of the tests; default 8")
    arguments.add_argument(
        "--share", type=int, default=8, metavar="N", help="each run takes another one in N cases; default 8, 1: all"
    )
    arguments.add_argument("--quick", action="store_true", help="one in 64 cases and a seed for each setting: minutes")
    arguments.add_argument("--every", action="store_true", help="every seed with every setting; otherwise they take turns")
    arguments.add_argument("--jobs", type=int, default=2, metavar="N", help="processes; default 2")
    arguments.add_argument("--csv", type=Path, default=RESULTS, help="file for all checks; default %(default)s")
    return arguments


def main() -> int:
    given = parser().parse_args()
    chosen = settings()
    share = 64 if given.quick else given.share
    seeds = len(chosen) if given.quick else given.seeds
    tests = given.tests or files()
    processes = [[test for test in tests if test.startswith(folders)] for folders in PROCESSES]
    steps = [
        (setting, seed, process)
        for seed in range(seeds)
        for setting in chosen
        if given.every or chosen[seed % len(chosen)] == setting
        for process in processes
        if process
    ]
    if not given.tests:
        print(f"{len(steps)} runs, about {minutes_of(len(steps), share)} minutes on two cores; --quick takes a few", flush=True)
    found: dict[tuple[str, str], Check] = {}
    failures: dict[str, str] = {}
    started = time.monotonic()
    for number, (setting, seed, chosen_tests) in enumerate(steps):
        options = ["-n", str(given.jobs)] + (["--share", str(share), "--part", str(seed)] if share > 1 else [])
        rows, failed = run(chosen_tests, setting, seed, options)
        failures |= dict.fromkeys(failed, f"{setting}, seed {seed}")
        for check in worst(rows, failed, setting, seed):
            key = (check.test, check.what)
            found[key] = max(check, found.get(key, check))
        write(given.csv, found.values())
        minutes = (time.monotonic() - started) / 60
        left = minutes / (number + 1) * (len(steps) - number - 1)
        above = sum(check.is_close for check in found.values())
        counts = f"{len(rows)} checks, {len(failed)} tests failed, {above} too close"
        times = f"{minutes:.0f} min, about {left:.0f} left"
        print(f"[{number + 1}/{len(steps)}] {setting}, seed {seed}: {counts}; {times}", flush=True)
    for line, where in failures.items():
        print(f"failed: {line} ({where})")
    close = [check for check in sorted(found.values(), reverse=True) if check.is_close]
    for check in close:
        errors = f"off by {check.error}, {check.allowance} allowed"
        print(f"{check.ratio:.2f} {check.test}: {check.what} is {errors} ({check.setting}, seed {check.seed})")
    print(f"{len(found)} checks, {len(close)} too close to their allowance; {given.csv}")
    return 1 if close or failures else 0


def minutes_of(runs: int, share: int) -> int:
    """Return about how many minutes runs take."""
    return max(1, runs * MINUTES_OF_A_RUN // share)


def write(path: Path, checks: Iterable[Check]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(Check._fields)
        table.writerows(sorted(checks, reverse=True))


if __name__ == "__main__":
    sys.exit(main())

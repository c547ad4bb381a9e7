"""``python -m tests.emulator``: run kernels compiled for a GPU in the emulator, without a GPU.

Each call runs forward and backward, in the default or in given configurations. It prints a line with the error / budget of each
result (tests/expected.py), or with what is wrong. Exit status 1 if a call is wrong, 2 if nothing can be run.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from tqdm import tqdm

from bench.measure.processes import processes
from bench.report.rows import in_one_line
from bench.report.text import progress
from bench.verbs.options import add_jobs, add_list
from tests.check import check
from tools.emulator.device import TARGETS
from tools.emulator.machine import NoCompiler, core
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig

from .calls import CALLS, DTYPES, RANDOM, Subject, unknown_words

Item = TypeVar("Item")


def tile(text: str) -> tuple[str, TileConfig]:
    """A kernel and its configuration: "forward=64x32x4x1/none", with the fields of TileConfig in order."""
    try:
        kernel, _, fields = text.partition("=")
        sizes, *others = fields.split("/")
        rest = (None if other == "none" else int(other) if other.isdigit() else other for other in others)
        config = TileConfig(*map(int, sizes.split("x")), *rest)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        others = [f"/{field.name}" for field in dataclasses.fields(TileConfig)[4:]]
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form KERNEL=MxNxWARPSxSTAGES{''.join(others)} ({error})"
        ) from None
    if kernel not in KERNELS:
        raise argparse.ArgumentTypeError(f"there is no kernel {kernel!r}, only {', '.join(KERNELS)}")
    return kernel, config


def lengths(text: str) -> tuple[int, int]:
    """ "130", or queries and keys, "33x200"."""
    num_queries, _, num_keys = text.partition("x")
    return int(num_queries), int(num_keys or num_queries)


def call_name(text: str) -> str:
    if unknown := unknown_words(text.strip()):
        raise argparse.ArgumentTypeError(f"unknown in {text!r}: {', '.join(unknown)}; see tests/emulator/calls.py")
    return text.strip()


def several(parse: Callable[[str], Item]) -> Callable[[str], list[Item]]:
    """A parser of a list with commas."""
    return lambda text: [parse(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tests.emulator", description=__doc__)
    cases = f'a table and features, "clamp causal dropout", or "random 7" (default: {len(CALLS)} kinds, --list shows them)'
    config = "KERNEL=MxNxWARPSxSTAGES[/carry[/rotation[/registers]]],..."
    add_list(made, "target", tuple(TARGETS), ("sm_90",), "GPUs to compile for")
    add_list(made, "dtype", DTYPES, ("bfloat16",))
    made.add_argument("--width", type=several(int), default=[64], metavar="A,B", help="widths of the heads (default: 64)")
    made.add_argument("--lengths", type=several(lengths), default=[(130, 130)], metavar="A,B", help="N, or NQxNK (default: 130)")
    made.add_argument("--cases", type=several(call_name), default=list(CALLS), metavar="A,B", help=cases)
    made.add_argument("--config", type=several(tile), default=[], metavar=config, help="instead of the selected configurations")
    made.add_argument("--seed", type=int, default=0, help="seed of the order in which warps run (default: 0)")
    made.add_argument("--list", action="store_true", help="show the kinds of calls, and end")
    add_jobs(made)
    return made


def row(subject: Subject, tiles: Mapping[str, TileConfig]) -> tuple[str, dict[str, float]]:
    """Check a call; return a line for it, and error / budget of its results, empty if it is wrong."""
    started, ratios = time.monotonic(), dict[str, float]()
    has_table = not subject.name.startswith("none")
    reasons = [config.why_invalid(subject.target, has_table, kernel) for kernel, config in tiles.items()]
    wrong = next(filter(None, reasons), "")
    if not wrong:
        try:
            ratios = check(subject.sample(), subject.way(**tiles))
        except AssertionError as error:  # one finding a line
            wrong = str(error).replace("\n", "\n      ")
        except Exception as error:
            wrong = in_one_line(error)
    results = wrong or ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    return f"{'WRONG' if wrong else 'ok   '} {subject}: {results} ({time.monotonic() - started:.1f} s)", ratios


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if options.list:
        print("\n".join(CALLS))
        return 0
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return 2
    try:
        core()
    except NoCompiler as error:
        print(error)
        return 2
    subjects = [
        Subject(target, dtype, width, name, sizes, options.seed)
        for target in options.target
        for dtype in options.dtype
        for width in options.width
        for name in options.cases
        for sizes in ([(0, 0)] if name.startswith(RANDOM) else options.lengths)
    ]
    wrong, largest = 0, dict[str, float]()
    with processes(options.jobs) as map_all:
        rows = map_all(partial(row, tiles=dict(options.config)), subjects)
        for _, (text, ratios) in zip(progress(subjects), rows, strict=False):
            tqdm.write(text)
            wrong += not ratios
            largest |= {name: max(ratio, largest.get(name, 0.0)) for name, ratio in ratios.items()}
    print(f"{len(subjects)} calls, {wrong} wrong")
    print("largest error / budget: " + ", ".join(f"{name} {ratio:.2f}" for name, ratio in largest.items()))
    return int(wrong > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # kill does what Ctrl-C does
    sys.exit(main())

"""``python -m tests.draws --seconds 300 --seed 0 [--kernels]``: draw samples and check them, for as long as one likes.

A failure is shrunk and printed as a command. ``--sample 'Sample(...)'`` checks that one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if __name__ == "__main__" and "--kernels" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

from tests.check import check
from tests.conftest import INTERPRETED
from tests.samples import Sample, samples
from tests.way import WAYS

T = TypeVar("T")
EVERY = list(HealthCheck)
each_the_same = settings(derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=EVERY)
one_each = settings(database=None, deadline=None, max_examples=2, phases=(Phase.generate,), suppress_health_check=EVERY)
"""A run with the simplest value and one other: five of six further ones repeat parts of those before."""


def in_every_way(sample: Sample) -> None:
    """Check the sample. In the interpreter, which is slow, in small tiles, but a fifth in the default ones. Not 16 bits by the
    reference, which rounds every step to them."""
    for way in [WAYS[sample.seed % 5 > 0]] if INTERPRETED else WAYS:
        if way.implementation != "reference" or sample.dtype in ("float32", "float64"):
            check(sample, way)


def explore(strategy: st.SearchStrategy[T], body: Callable[[T], None], seeds: Iterable[int], shrinks: bool = False) -> None:
    """The body with one value of each seed, and once with the simplest; a failure is shrunk if that is wanted: it takes long."""
    each = settings(one_each, phases=(Phase.generate, Phase.shrink)) if shrinks else one_each
    passed: set[T] = set()

    def once(value: T) -> None:
        if value not in passed:
            body(value)
            passed.add(value)

    for number in seeds:
        seed(number)(each(given(strategy)(once)))()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.draws", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--kernels", action="store_true", help="the kernels, in Triton's interpreter, instead of plain torch")
    parser.add_argument("--sample", help="check this one only, as a failure prints it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sample:
        in_every_way(eval(options.sample, {"Sample": Sample}))
        return 0
    stop, tried = time.monotonic() + options.seconds, [Sample()]

    def body(sample: Sample) -> None:
        tried.append(sample)
        in_every_way(sample)

    try:
        for number in range(options.seed * 1_000_003, sys.maxsize):
            if time.monotonic() > stop:
                break
            explore(samples(INTERPRETED), body, [number], shrinks=True)
    except Exception as error:
        print(f"{error}\npython -m tests.draws{' --kernels' * INTERPRETED} --sample '{tried[-1]!r}'")
        return 1
    print(f"{len(tried) - 1} calls are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

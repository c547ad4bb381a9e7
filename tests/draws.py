"""``python -m tests.draws --seconds 300 --seed 0 [--kernels]``: draw samples and check them, for as long as one likes.

A failure is shrunk and printed as a command. ``--sample 'Sample(...)'`` checks that one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

if __name__ == "__main__" and "--kernels" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

from tests.check import WAYS, check
from tests.conftest import INTERPRETED
from tests.samples import Sample, explore, samples


def in_every_way(sample: Sample) -> None:
    """Check the sample. In the interpreter, which is slow, in small tiles, but a fifth in the default ones. Not 16 bits by the
    reference, which rounds every step to them."""
    for way in [WAYS[sample.seed % 5 > 0]] if INTERPRETED else WAYS:
        if way.implementation != "reference" or sample.dtype in ("float32", "float64"):
            check(sample, way)


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
            explore(samples(), body, [number], shrinks=True)
    except Exception as error:
        print(f"{error}\npython -m tests.draws{' --kernels' * INTERPRETED} --sample '{tried[-1]!r}'")
        return 1
    print(f"{len(tried) - 1} calls are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

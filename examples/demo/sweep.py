"""Peak memory and time of all methods over all lengths, up to limits of memory and time, with reasons for skipped ones."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench.cases.attention import Case
from bench.cases.baselines import BASELINES
from bench.cases.methods import OURS
from bench.measure import processes
from bench.report.text import progress
from bench.verbs.speed import Failures, configurations

# One sequence through a layer of width 512, as in the Music Transformer and the base Transformer.
BATCH, HEADS, HEAD_DIM = 1, 8, 64
STRONG = ("skewing", "gather")
"""The leanest and the fastest of the dense methods. Measured first: if time runs out, only weaker ones are missing."""
COMPARED = (OURS, *STRONG, *(method for method in BASELINES if method not in STRONG))
DIRECTION = "forward+backward"
SECONDS_PER_POINT = 0.4  # a few passes at 1024, the longest length where a pass takes about 0.1 s on two cores


def make_case(length: int, dtype: str) -> Case:
    """Full attention with a table of 2n - 1 rows."""
    return Case(BATCH, HEADS, length, HEAD_DIM, dtype=dtype)


def sweep(lengths: Sequence[int], dtype: str, device: str, memory_limit: int, budget: float) -> Iterator[dict[str, Any]]:
    """Yield rows as they are measured, in about ``budget`` seconds: ours and the strongest methods first, short lengths first.

    Methods that ran out of memory are not tried at longer lengths.
    """
    end = time.monotonic() + budget
    failures = Failures()
    first = 1 + len(STRONG)
    points = [(length, method) for methods in (COMPARED[:first], COMPARED[first:]) for length in lengths for method in methods]
    for length, method in progress(points, lambda point: f"{point[1]}, {point[0]}"):
        case, seconds_left = make_case(length, dtype), end - time.monotonic()
        row = {"verb": "demo", **case.columns(), "method": method, "direction": DIRECTION}
        if method == OURS:
            row["config"] = configurations(case, DIRECTION, device)
        reason = failures.reasons(case).get(method) or ("skipped: no time left" if seconds_left <= 0 else "")
        if reason:
            row["status"] = reason
        elif device == "cuda":
            row |= processes.measure(case, method, DIRECTION, device, SECONDS_PER_POINT)
        else:
            row |= processes.measure_in_own_process(case, method, DIRECTION, memory_limit, SECONDS_PER_POINT, seconds_left)
        failures.remember(case, [row])
        yield row

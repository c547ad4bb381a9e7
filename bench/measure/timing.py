"""Calls that are checked first and then timed in turn, and the peak of their memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from triton_relattn._peaks import OUT_OF_MEMORY, is_out_of_memory, peak_cuda

from ..cases.attention import DTYPES, Case, CaseTensors
from ..cases.methods import METHODS, OURS, Function, ours
from ..report.rows import in_one_line

DIRECTIONS = ("forward", "backward", "forward+backward")
TOLERANCE = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}
"""Relative distance in norm at which a method counts as wrong. Dense methods in 16 bits round every score; a wrong formula is
off by about 1. How good ours are is for the tests, which run before."""
LARGEST_GOLDEN = {"cpu": 8 * 4096**2, "cuda": 1 << 62}
"""Pairs of query and key, times heads and batch, up to which a float64 result is worth its time."""
FLUSH_BYTES = 256 << 20  # more than any L2 cache
HEAD_START_CYCLES = 2_000_000  # about a millisecond in which the host queues what is timed
HEAD_START_MS = 1.0  # at 2 GHz, which is more than the clock of any of these GPUs' multiprocessors


class Step(NamedTuple):
    """One measured call, and what has to be there before: ``call(before())``."""

    before: Callable[[], Any]
    call: Callable[[Any], Sequence[torch.Tensor]]

    def run(self) -> Sequence[torch.Tensor]:
        return self.call(self.before())


_NOTHING = Step(lambda: None, lambda _: ())


@dataclass
class Timed:
    """One direction of a method, and what is found out about it: columns of a row."""

    method: str
    direction: str
    found: dict[str, Any] = field(default_factory=lambda: {"status": "ok"})
    milliseconds: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    """On a GPU: milliseconds in which the host queued the work."""
    step: Step = _NOTHING

    @property
    def is_ok(self) -> bool:
        return bool(self.found["status"] == "ok")


def steps(function: Function, inputs: CaseTensors, d_out: torch.Tensor, has_table: bool) -> dict[str, Step]:
    """One per direction; they return the output, or the gradients, or both."""

    count = len(inputs) if has_table else 3
    leaves = [tensor for tensor in inputs[:count] if tensor is not None]
    wanting = CaseTensors._make((*inputs[:count], *inputs.map(torch.Tensor.detach)[count:]))

    def forward(_: None) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return (function(inputs),)

    def backward(out: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(out, leaves, d_out)

    def both(_: None) -> Sequence[torch.Tensor]:
        out = function(wanting)
        return (out.detach(), *backward(out))

    return {
        "forward": Step(_NOTHING.before, forward),
        "backward": Step(lambda: function(wanting), backward),
        "forward+backward": Step(_NOTHING.before, both),
    }


def golden(
    case: Case, inputs: CaseTensors, d_out: torch.Tensor, device: str, has_table: bool
) -> tuple[Sequence[torch.Tensor], str]:
    """Output and gradients to compare with, and what they are: float64, or those of this package for cases that are large or
    for which float64 has too little memory."""

    def results(dtype: torch.dtype, implementation: str | None) -> Sequence[torch.Tensor]:
        given = inputs.map(lambda tensor: tensor.detach().to(dtype).requires_grad_())
        return steps(ours(case, has_table, implementation), given, d_out.to(dtype), has_table)["forward+backward"].run()

    if case.batch * case.heads * case.length**2 <= LARGEST_GOLDEN[device]:
        try:
            return results(torch.float64, "blockwise"), "float64"
        except Exception as error:
            if not is_out_of_memory(error):
                raise
    return results(DTYPES[case.dtype], None), OURS


@dataclass
class Expected:
    """Output and gradients to compare with, what they are, and which part of a method's results they are of."""

    results: Sequence[torch.Tensor]
    against: str
    of: Callable[[torch.Tensor], torch.Tensor] = lambda result: result


def expected_of_heads(case: Case, inputs: CaseTensors, d_out: torch.Tensor, has_table: bool) -> Expected:
    """Return out, d_query, d_key and d_value in float64, of one head of the key in the first sequence and in the last.

    Heads do not depend on each other, and all of a long call takes seconds. Gradients of tables, which heads share, are left out.
    """
    key_heads = case.key_heads or case.heads

    def chosen(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:: max(1, case.batch - 1), : tensor.shape[1] // key_heads]

    group = case.heads // key_heads
    query, key, value, table, rel_query, p2c = inputs
    rel_query = None if rel_query is None else chosen(rel_query)
    part = CaseTensors(chosen(query), chosen(key), chosen(value), table[:group] if case.bias else table, rel_query, p2c)
    part = part.map(lambda tensor: tensor.detach().double().requires_grad_())
    few = replace(case, batch=part.query.shape[0], heads=group, key_heads=None if case.key_heads is None else 1)
    every = steps(ours(few, has_table, "blockwise"), part, chosen(d_out).double(), has_table)["forward+backward"].run()
    return Expected(every[:4], "float64, one head of two sequences", chosen)


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative distance in norm; infinite if anything is not finite or the shapes differ."""
    if [result.shape for result in results] != [each.shape for each in expected]:
        return float("inf")
    apart = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, expected, strict=True)]
    return max(float("inf") if each != each else each for each in apart)


def check(timed: Timed, expected: Expected, case: Case) -> None:
    """Run once, which also warms up, and compare."""
    results = expected.results
    of_direction = {"forward": results[:1], "backward": results[1:], "forward+backward": results}
    wanted = of_direction[timed.direction]
    apart = distance([expected.of(result) for result in timed.step.run()[: len(wanted)]], wanted)
    timed.found |= {"error": apart, "checked_against": expected.against}
    if not apart <= TOLERANCE[case.dtype]:
        timed.found["status"] = f"wrong: differs from {expected.against} by {apart:.3g}"


def attempt(work: Callable[[], object], found: dict[str, Any]) -> None:
    """Do something; what goes wrong becomes the status."""
    try:
        work()
    except (ImportError, NotImplementedError) as error:
        found["status"] = f"cannot run: {in_one_line(error)}"
    except Exception as error:
        found["status"] = OUT_OF_MEMORY if is_out_of_memory(error) else f"failed: {in_one_line(error)}"


def prepare(case: Case, methods: Sequence[str], directions: Sequence[str], device: str, not_tried: dict[str, str]) -> list[Timed]:
    """Every direction of every method, checked; the status says which cannot be timed, and why.

    Args:
        not_tried: methods that have failed before, and why they are not tried again.
    """
    inputs, d_out = case.inputs(device)
    every: list[Timed] = []
    expected: dict[bool, Expected] = {}
    for name in methods:
        method = METHODS[name]
        reason = method.why_not(case, device)
        status = f"does not apply: {reason}" if reason else not_tried.get(name, "ok")
        of_method = [Timed(name, direction, {"status": status}) for direction in directions]
        every += of_method
        if status != "ok":
            continue
        if method.has_table not in expected:
            given = (case, inputs, d_out)
            expected[method.has_table] = (
                expected_of_heads(*given, method.has_table)
                if device == "cuda"
                else Expected(*golden(*given, device, method.has_table))
            )
        for timed in of_method:
            attempt(partial(_make_and_check, timed, case, inputs, d_out, device, expected[method.has_table]), timed.found)
    return every


def _make_and_check(
    timed: Timed,
    case: Case,
    inputs: CaseTensors,
    d_out: torch.Tensor,
    device: str,
    expected: Expected,
) -> None:
    method = METHODS[timed.method]
    timed.step = steps(method.make(case), inputs, d_out, method.has_table)[timed.direction]
    check(timed, expected, case)
    if timed.is_ok and device == "cuda":
        before = timed.step.before()
        timed.found["peak_bytes"] = peak_cuda(lambda: timed.step.call(before))


def _start(step: Step, flush: torch.Tensor | None) -> tuple[Callable[[], float], float]:
    """Run a step; return what gives its milliseconds once the GPU is done, and the milliseconds of the host."""
    before = step.before()
    if flush is None:
        started = time.perf_counter()
        step.call(before)
        elapsed = 1e3 * (time.perf_counter() - started)
        return lambda: elapsed, elapsed
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.amax()  # reads: what is written would go back to memory during what is timed
    torch.cuda._sleep(HEAD_START_CYCLES)
    started = time.perf_counter()
    start.record()
    step.call(before)
    stop.record()
    return lambda: start.elapsed_time(stop), 1e3 * (time.perf_counter() - started)


def time_in_turn(every: Sequence[Timed], device: str, seconds: float, rounds: int, fewest: int = 3) -> None:
    """Rounds of all that can be timed, each in an order of its own, until the seconds are spent, but at least a few.

    They have run before, to be checked; on a GPU a round more is left out, since its clocks rise with work.
    """
    warm_up = 1 if device == "cuda" else 0
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if device == "cuda" else None
    order, shuffle, started = [timed for timed in every if timed.is_ok], random.Random(0).shuffle, time.monotonic()
    for number in range(-warm_up, rounds):
        shuffle(order)
        readings = [(timed, _start(timed.step, flush)) for timed in order]
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            for timed, (reading, queued) in readings:
                timed.milliseconds.append(reading())
                timed.queued.append(queued)
        if number + 1 >= fewest and time.monotonic() - started > seconds:
            break


OF_GPU = ("queued_ms", "waits_for_host")
"""Columns that rows have besides on a GPU."""


def times_of(timed: Timed, device: str) -> dict[str, Any]:
    """Return the columns of a row: percentiles, and on a GPU the median of the host's time.

    Where the host takes longer than its head start, the GPU waits for it: such a time is not that of the kernels alone.
    """
    found = percentiles(timed.milliseconds)
    if device == "cuda" and timed.queued:
        found["queued_ms"] = sorted(timed.queued)[len(timed.queued) // 2]
        found["waits_for_host"] = "yes" if found["queued_ms"] > HEAD_START_MS else "no"
    return found


def percentiles(milliseconds: Sequence[float]) -> dict[str, Any]:
    """p20_ms, p50_ms, p80_ms and rounds: columns of a row."""
    times = sorted(milliseconds)
    if not times:
        return {}
    found = {f"p{percent}_ms": times[round(percent / 100 * (len(times) - 1))] for percent in (20, 50, 80)}
    return {**found, "rounds": len(times)}

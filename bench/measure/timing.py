"""Calls that are checked first and then timed interleaved, and the peak of their memory."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from triton_relattn._peaks import OUT_OF_MEMORY, is_out_of_memory, peak_cuda
from triton_relattn.testing import Inputs

from ..cases.attention import OPERANDS, Case
from ..cases.methods import METHODS, Function, ours
from ..report.rows import in_one_line

DIRECTIONS = ("forward", "backward", "forward+backward")
TOLERANCE = {"fp32": 1e-3, "fp16": 0.02, "bf16": 0.1}
"""Relative distance in norm at which a method counts as wrong. Dense methods in 16 bits round every score; a wrong formula is
off by about 1. How good ours are is for the tests, which run before."""
LARGEST_GOLDEN = 8 * 4096**2
"""Pairs of query and key, times heads and batch, up to which all of a float64 result on a CPU is worth its time."""
FLUSH_BYTES = 256 << 20  # more than any L2 cache
HEAD_START_CYCLES = 2_000_000  # about a millisecond in which the host queues what is timed
HEAD_START_MS = 1.0  # at 2 GHz, which is more than the clock of any of these GPUs' multiprocessors
GPU_COLUMNS = ("queued_ms", "waits_for_host")
"""Columns that rows have besides on a GPU."""


class Step(NamedTuple):
    """One measured call, and what has to be there before: ``call(before())``."""

    before: Callable[[], Any]
    call: Callable[[Any], Sequence[torch.Tensor]]

    def run(self) -> Sequence[torch.Tensor]:
        return self.call(self.before())


def step(work: Callable[[], Any]) -> Step:
    """A step with nothing before it, whose results do not matter."""
    return Step(lambda: None, lambda _: (work(), ())[1])  # type: ignore[arg-type, return-value]


@dataclass
class Timed:
    """One direction of a method, and what is found out about it: columns of a row.

    queued: on a GPU, milliseconds in which the host queued the work.
    """

    method: str
    direction: str
    found: dict[str, Any] = field(default_factory=lambda: {"status": "ok"})
    milliseconds: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)
    step: Step = field(default_factory=lambda: step(lambda: None))

    @property
    def is_ok(self) -> bool:
        return bool(self.found["status"] == "ok")


def steps(case: Case, function: Function, inputs: Inputs) -> dict[str, Step]:
    """One per direction; they return the output, or the gradients of operands and tables, or both."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in case.learned(inputs).items()}
    with_gradients = inputs._replace(**leaves)

    def forward(_: None) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return (function(inputs),)

    def backward(out: torch.Tensor) -> Sequence[torch.Tensor]:
        return torch.autograd.grad(out, list(leaves.values()), inputs.d_out)

    def both(_: None) -> Sequence[torch.Tensor]:
        out = function(with_gradients)
        return (out.detach(), *backward(out))

    return {
        "forward": Step(lambda: None, forward),
        "backward": Step(lambda: function(with_gradients), backward),
        "forward+backward": Step(lambda: None, both),
    }


@dataclass
class Expected:
    """Output and gradients to compare with, where they come from, and which part of a method's results they are."""

    results: Sequence[torch.Tensor]
    against: str
    part: Callable[[torch.Tensor], torch.Tensor] = lambda result: result


def expected_results(case: Case, inputs: Inputs) -> Expected:
    """All results, in float64."""
    step = steps(case, ours(case, "blockwise"), inputs.to(torch.float64))["forward+backward"]
    return Expected(step.run(), "float64")


def expected_of_one_head(case: Case, inputs: Inputs) -> Expected:
    """out, d_query, d_key and d_value in float64, of one head of the key in the first sequence and in the last.

    Heads do not depend on each other, and all of a long call takes seconds. Gradients of tables, which heads share, are left out.
    """
    key_heads = case.key_heads or case.heads
    group = case.heads // key_heads

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[:: max(1, case.batch - 1), : tensor.shape[1] // key_heads]

    names = (*OPERANDS, "d_out", "d_lse", *["rel_query"] * (inputs.rel_query is not None))
    chosen = {name: part(getattr(inputs, name)) for name in names}
    by_head = case.terms if case.per_head else [name for name in case.terms if name == "rel_bias"]
    chosen |= {name: getattr(inputs, name)[:group] for name in by_head}
    few = replace(case, batch=chosen["query"].shape[0], heads=group, key_heads=None if case.key_heads is None else 1)
    results = expected_results(few, inputs._replace(**chosen)).results
    return Expected(results[:4], "float64, one head of two sequences", part)


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest relative distance in norm; infinite if anything is not finite or the shapes differ."""
    if [result.shape for result in results] != [wanted.shape for wanted in expected]:
        return float("inf")
    distances = [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(results, expected, strict=True)]
    return max(float("inf") if found != found else found for found in distances)


def check(timed: Timed, expected: Expected, case: Case) -> None:
    """Run once, which also warms up, and compare."""
    results = expected.results
    wanted = {"forward": results[:1], "backward": results[1:], "forward+backward": results}[timed.direction]
    error = distance([expected.part(result) for result in timed.step.run()[: len(wanted)]], wanted)
    timed.found |= {"error": error, "checked_against": expected.against}
    if not error <= TOLERANCE[case.dtype]:
        timed.found["status"] = f"wrong: differs from {expected.against} by {error:.3g}"


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
    inputs = case.inputs(device)
    prepared: list[Timed] = []
    expected: dict[Case, Expected] = {}
    for name in methods:
        method, computed = METHODS[name], METHODS[name].case(case)
        reason = method.why_not(case, device)
        status = f"does not apply: {reason}" if reason else not_tried.get(name, "ok")
        for direction in directions:
            timed = Timed(name, direction, {"status": status})
            prepared.append(timed)
            if status == "ok":
                attempt(partial(_make_and_check, timed, computed, inputs, device, expected), timed.found)
    return prepared


def _make_and_check(timed: Timed, case: Case, inputs: Inputs, device: str, expected: dict[Case, Expected]) -> None:
    if case not in expected:
        is_small = device == "cpu" and case.batch * case.heads * case.length**2 <= LARGEST_GOLDEN
        expected[case] = (expected_results if is_small else expected_of_one_head)(case, inputs)
    timed.step = steps(case, METHODS[timed.method].make(case), inputs)[timed.direction]
    check(timed, expected[case], case)
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


def time_in_turn(
    prepared: Sequence[Timed], device: str, seconds: float, rounds: int, fewest: int = 3, drops: bool = False
) -> None:
    """Rounds of all that can be timed, each in an order of its own, until the seconds are spent, but at least a few.

    They have run before, to be checked; on a GPU a round more is left out, since its clocks rise with work. drops: what fails
    here, for lack of memory beside the others, is out; else it raises.
    """
    warm_up = 1 if device == "cuda" else 0
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if device == "cuda" else None
    order, shuffle, started = [timed for timed in prepared if timed.is_ok], random.Random(0).shuffle, time.monotonic()
    readings: list[tuple[Timed, tuple[Callable[[], float], float]]] = []

    def start(timed: Timed) -> None:
        readings.append((timed, _start(timed.step, flush)))

    for number in range(-warm_up, rounds):
        shuffle(order)
        readings.clear()
        for timed in order:
            attempt(partial(start, timed), timed.found) if drops else start(timed)
            if not timed.is_ok:
                timed.milliseconds.clear()
        order = [timed for timed in order if timed.is_ok]
        if device == "cuda":
            torch.cuda.synchronize()
        if number >= 0:
            for timed, (reading, queued) in readings:
                timed.milliseconds.append(reading())
                timed.queued.append(queued)
        if number + 1 >= fewest and time.monotonic() - started > seconds:
            break


def time_once(timed: Sequence[Timed], device: str) -> dict[str, float]:
    """For the verb compare: one more run of each, in milliseconds by direction."""
    time_in_turn(timed, device, 0.0, 1, fewest=1)
    return {one.direction: one.milliseconds[-1] for one in timed}


def times(timed: Timed, device: str) -> dict[str, Any]:
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
    ordered = sorted(milliseconds)
    if not ordered:
        return {}
    found = {f"p{percent}_ms": ordered[round(percent / 100 * (len(ordered) - 1))] for percent in (20, 50, 80)}
    return {**found, "rounds": len(ordered)}

"""Time and memory: whole calls and the kernels of the backward, beside scaled_dot_product_attention."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from triton_relattn import RelativePositions, fused_relative_attention, validation
from triton_relattn.demo.report import table as text_table
from triton_relattn.kernels import configs
from triton_relattn.kernels.arguments import Call
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.forward import forward
from triton_relattn.spec import DIFFERENTIABLE

from .report import NOT_SUPPORTED, Report, in_one_line, shown, spread, synchronize

ROUNDS, FEWEST_ROUNDS, WARM_UP_ROUNDS, SECONDS_A_POINT = 40, 7, 4, 3.0
FLUSH_BYTES = 256 << 20  # more than any L2 cache
HEAD_START_CYCLES = 2_000_000  # about a millisecond in which the host queues what is timed
LARGEST_DIFFERENCE = 0.03  # in norm, of two ways to compute the same in 16 bits
WORK = {"forward": 1.0, "backward": 2.5, "forward+backward": 3.5}  # in units of a plain forward, as FlashAttention counts
WHOLE = ("forward", "forward+backward")
WANTED = {"rows": ("query",), "rows+columns": ("query", "key", "value"), "backward": DIFFERENTIABLE}
SDPA_BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
}
RATIOS = (("full", "plain"), ("full", "sdpa"), ("clipped", "sdpa"), ("plain", "sdpa"))
Timed = Callable[[], Sequence[torch.Tensor]]
Name = tuple[str, str]
"""Variant and direction."""


@dataclass(frozen=True)
class Point:
    """One size to time."""

    batch: int
    heads: int
    length: int
    width: int
    is_causal: bool = False
    dtype: str = "bfloat16"
    clipped_rows: int = 129

    def __str__(self) -> str:
        return f"b{self.batch} h{self.heads} n{self.length} d{self.width}" + " causal" * self.is_causal

    def variants(self) -> dict[str, RelativePositions | None]:
        """Ours: with a table for all distances, with a clipped one, without one."""
        full = RelativePositions(1 - self.length, 0 if self.is_causal else self.length - 1)
        return {"full": full, "clipped": RelativePositions.centred(self.clipped_rows), "plain": None}


def speed_points(tiny: bool) -> list[Point]:
    """The most informative ones first."""
    if tiny:
        return [Point(1, 1, 45, 64, True, "float16", 17)]
    kinds = ((64, False), (128, True), (128, False), (64, True))
    lengths = (4096, 1024, 16384, 2048, 512, 8192)
    speech = [Point(32, 8, length, 64) for length in (500, 1500, 1000, 200)]
    long = [Point(16384 // n, 2048 // width, n, width, causal) for n in lengths for width, causal in kinds]
    return [*long[:4], *speech[:2], *long[4:8], *speech[2:], *long[8:]]


def sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, backend: SDPBackend | None, is_causal: bool
) -> torch.Tensor:
    with nullcontext() if backend is None else sdpa_kernel(backend):
        return scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def whole_calls(function: Callable[..., Any], leaves: Sequence[torch.Tensor], d_out: torch.Tensor) -> tuple[Timed, Timed]:
    """Forward, and forward with backward."""

    def only_forward() -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return (function(*leaves),)

    return only_forward, lambda: torch.autograd.grad(function(*leaves), leaves, d_out)


def backward_calls(
    positions: RelativePositions | None, is_causal: bool, leaves: Sequence[torch.Tensor], d_out: torch.Tensor
) -> dict[str, Timed]:
    """The backward by itself, and parts of it."""
    query, key, value, *table = (leaf.detach() for leaf in leaves)
    rel_key = table[0] if table else None
    tensors, spec = validation.resolve(query, key, value, rel_key, positions=positions, is_causal=is_causal)
    saved: list[torch.Tensor] = []

    def run(wanted: Sequence[str]) -> Sequence[torch.Tensor]:
        if not saved:  # the first time, which is not timed
            saved.extend(forward(tensors, spec))
        out, lse, statistics = saved
        gradients = backward(d_out, d_lse, out, lse, statistics, tensors, spec, [name in wanted for name in DIFFERENTIABLE])
        return [gradient for gradient in gradients if gradient is not None]

    d_lse = query.new_zeros(query.shape[:3], dtype=torch.float32)
    return {direction: partial(run, wanted) for direction, wanted in WANTED.items()}


def make_calls(point: Point, device: str, only_ours: bool = False) -> dict[Name, Timed]:
    torch.manual_seed(0)
    normal = partial(torch.randn, dtype=getattr(torch, point.dtype), device=device)
    query, key, value, d_out = (normal(point.batch, point.heads, point.length, point.width) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    calls: dict[Name, Timed] = {}
    for variant, positions in point.variants().items():
        table = [] if positions is None else [normal(positions.num_rows, point.width).requires_grad_()]
        ours = partial(fused_relative_attention, positions=positions, is_causal=point.is_causal, implementation="triton")
        found = dict(zip(WHOLE, whole_calls(ours, [*inputs, *table], d_out), strict=True))
        found |= backward_calls(positions, point.is_causal, [*inputs, *table], d_out)
        calls |= {(variant, direction): call for direction, call in found.items()}
    backends: dict[str, SDPBackend | None] = {} if only_ours else {"sdpa": None}
    if device == "cuda" and not only_ours:
        backends |= SDPA_BACKENDS
    for variant, backend in backends.items():
        both = whole_calls(partial(sdpa, backend=backend, is_causal=point.is_causal), inputs, d_out)
        calls |= {(variant, direction): call for direction, call in zip(WHOLE, both, strict=True)}
    return calls


def run_ours(point: Point, device: str) -> str:
    """Compile what a point needs, in a process that times nothing; what went wrong."""
    try:
        for call in make_calls(point, device, only_ours=True).values():
            call()
        synchronize(device)
    except Exception as error:
        return in_one_line(error)
    return ""


def peak_bytes(call: Timed, device: str) -> int | None:
    """Bytes by which the peak of a call exceeds what was allocated before."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def apart(results: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max((float((a - b).norm() / b.norm()) for a, b in zip(results, others, strict=True)), default=0.0)


def first_runs(calls: dict[Name, Timed], device: str) -> dict[Name, dict[str, Any]]:
    """Status and peak memory of every call. Those that raise or are wrong are taken out of ``calls``: they get no time."""
    rows: dict[Name, dict[str, Any]] = {}
    plain: dict[str, Sequence[torch.Tensor]] = {}
    for (variant, direction), call in list(calls.items()):
        row = rows[variant, direction] = {"status": "ok"}
        try:
            results = call()
            if variant == "plain":
                plain[direction] = results
            if not all(bool(result.isfinite().all()) for result in results):
                row["status"] = "not finite"
            elif variant == "sdpa" and direction in plain:
                difference = apart(plain[direction], results)
                row["status"] = "ok" if difference < LARGEST_DIFFERENCE else f"differs from plain by {difference:.3g}"
            del results
            row["peak_bytes"] = peak_bytes(call, device)
        except Exception as error:
            row["status"] = (f"{NOT_SUPPORTED}: " if variant in SDPA_BACKENDS else "") + in_one_line(error)
        if row["status"] != "ok":
            del calls[variant, direction]
    return rows


def time_one(call: Timed, flush: torch.Tensor | None) -> Callable[[], float]:
    """Run a call; what is returned gives the milliseconds once the GPU is done."""
    if flush is None:
        started = time.perf_counter()
        call()
        elapsed = 1e3 * (time.perf_counter() - started)
        return lambda: elapsed
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    call()
    stop.record()
    return lambda: start.elapsed_time(stop)


def time_calls(calls: dict[Name, Timed], options: argparse.Namespace, deadline: float) -> dict[Name, list[float]]:
    """Sorted milliseconds of every call, from rounds of all of them, each in an order of its own."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda") if options.device == "cuda" else None
    times: dict[Name, list[float]] = {name: [] for name in calls}
    order, shuffle, stop = list(calls), random.Random(0).shuffle, min(deadline, time.monotonic() + SECONDS_A_POINT)
    warm_up, rounds = (0, 1) if options.tiny else (WARM_UP_ROUNDS, ROUNDS)
    for number in range(warm_up + rounds):
        shuffle(order)
        readings = [(name, time_one(calls[name], flush)) for name in order]
        synchronize(options.device)
        if number >= warm_up:
            for name, reading in readings:
                times[name].append(reading())
        if number + 1 >= warm_up + FEWEST_ROUNDS and time.monotonic() > stop:
            break
    return {name: sorted(values) for name, values in times.items()}


def kernel_shares(rows: dict[Name, dict[str, Any]]) -> dict[Name, dict[str, Any]]:
    """The median of the columns and of the table kernel: of more of the backward, less that of less of it."""
    shares = {}
    for share, more, less in (("columns", "rows+columns", "rows"), ("table", "backward", "rows+columns")):
        for variant in dict.fromkeys(variant for variant, _ in rows):
            whole, rest = (rows.get((variant, direction), {}).get("p50_ms") for direction in (more, less))
            if whole is not None and rest is not None and (variant, share) != ("plain", "table"):
                shares[variant, share] = {"status": "ok", "p50_ms": whole - rest}
    return shares


def measure(point: Point, options: argparse.Namespace, deadline: float) -> dict[Name, dict[str, Any]]:
    """The measured columns."""
    calls = make_calls(point, options.device)
    rows = first_runs(calls, options.device)
    plain_work = 4 * point.batch * point.heads * point.length**2 * point.width / (2 if point.is_causal else 1)
    for (variant, direction), times in time_calls(calls, options, deadline).items():
        row = rows[variant, direction]
        row |= {f"p{percent}_ms": times[round(percent / 100 * (len(times) - 1))] for percent in (20, 50, 80)}
        if direction in WORK:
            row["tflops"] = WORK[direction] * plain_work / row["p50_ms"] / 1e9
    return rows | kernel_shares(rows)


def used_configs(point: Point, variant: str, direction: str, device: str) -> str:
    """The configurations of the kernels that ran, first to last."""
    variants = point.variants()
    if variant not in variants:
        return ""
    positions = variants[variant]
    query = torch.empty(1, dtype=getattr(torch, point.dtype), device=device).expand(1, 1, point.length, point.width)
    table = None if positions is None else query[0, 0, :1].expand(positions.num_rows, -1)
    call = Call(*validation.resolve(query, query, query, table, positions=positions, is_causal=point.is_causal))
    whole = {"forward+backward": configs.KERNELS, "backward": configs.KERNELS[1:], "rows+columns": configs.KERNELS[1:3]}
    kernels = [kernel for kernel in whole.get(direction, (direction,)) if kernel != "table" or positions is not None]
    return ", ".join(f"{kernel} {shown(call.tile(kernel))}" for kernel in kernels)


def add_rows(point: Point, options: argparse.Namespace, report: Report, deadline: float) -> None:
    for (variant, direction), measured in measure(point, options, deadline).items():
        positions = point.variants().get(variant)
        row = {"part": "speed", "case": str(point), "variant": variant, "direction": direction, **asdict(point)}
        row |= {"num_queries": point.length, "num_keys": point.length, "causal": point.is_causal}
        row |= {"num_rows": positions.num_rows if positions else 0, **measured}
        row |= {key: f"{value:.4g}" for key, value in row.items() if isinstance(value, float)}
        report.add("speed.csv", {**row, "config": used_configs(point, variant, direction, options.device)})


def speed(options: argparse.Namespace, report: Report, deadline: float) -> None:
    points = speed_points(options.tiny)
    if options.jobs > 1:
        started = time.monotonic()
        halfway = (started + deadline) / 2
        for point, problem in spread(partial(run_ours, device=options.device), points, options.jobs, halfway):
            if problem:
                report.say(f"  compiling for {point}: {problem}")
        report.say(f"speed: {time.monotonic() - started:.0f} s to compile")
    done = 0
    for point in points:
        if time.monotonic() > deadline:
            break
        try:
            add_rows(point, options, report, deadline)
        except Exception as error:
            report.add("speed.csv", {"part": "speed", "case": str(point), "status": in_one_line(error)})
        done += 1
    report.say(f"speed: {done} of {len(points)} sizes")


def host(options: argparse.Namespace, report: Report, deadline: float) -> None:
    """Microseconds of the host for a call whose work is nothing: the best of three times many calls in a row."""
    heads, length, number, times = (1, 40, 1, 1) if options.tiny else (2, 64, 200, 3)
    point = Point(1, heads, length, 64, dtype=options.dtype, clipped_rows=17)
    for (variant, direction), call in make_calls(point, options.device).items():
        if direction not in WHOLE or variant in SDPA_BACKENDS or time.monotonic() > deadline:
            continue
        row = {"part": "host", "case": str(point), "variant": variant, "direction": direction, "unit": "microseconds"}
        try:
            call()
            seconds = []
            for _ in range(times):
                synchronize(options.device)
                started = time.perf_counter()
                for _ in range(number):
                    call()
                seconds.append((time.perf_counter() - started) / number)
            row |= {"value": f"{1e6 * min(seconds):.1f}", "status": "ok"}
        except Exception as error:
            row |= {"status": "error", "message": in_one_line(error)}
        report.add("checks.csv", row)
        report.say(f"host: {variant} {direction}: {row.get('value', '-')} us a call")


def summary(rows: Iterable[dict[str, Any]]) -> str:
    """Medians of ours and of the fastest scaled_dot_product_attention, and their ratios."""
    times: dict[Name, dict[str, float]] = {}
    for row in rows:
        if "p50_ms" in row and row["direction"] in WHOLE:
            found = times.setdefault((row["direction"], row["case"]), {})
            name = row["variant"].split()[0]
            found[name] = min(float(row["p50_ms"]), found.get(name, float("inf")))
    body = []
    for (direction, case), found in sorted(times.items(), key=lambda item: item[0][0]):
        medians = [f"{found[name]:.3g}" if name in found else "-" for name in ("full", "clipped", "plain", "sdpa")]
        ratios = [f"{found[a] / found[b]:.2f}" if a in found and b in found else "-" for a, b in RATIOS]
        body.append((f"{direction:16} {case}", *medians, *ratios))
    return text_table(("milliseconds", "full", "clipped", "plain", "sdpa", *(f"{a}/{b}" for a, b in RATIOS)), body)

"""Models of Hugging Face transformers, of real width: as they are, and with their relative attention on the operator."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from triton_relattn._peaks import (
    LARGEST_MMAP_THRESHOLD,
    PAGE,
    in_own_process,
    limit_memory,
    map_blocks_from,
    peak_cpu,
    peak_cuda,
)
from triton_relattn.integrations.transformers import disable, enable

from . import families
from .cases.attention import DTYPES
from .cases.methods import OURS
from .families import FAMILIES, Family
from .measure import timing
from .report import summary
from .report.models import PACKED, tables
from .report.rows import Table, stamp
from .report.summary import DIRECTIONS
from .report.text import interruptible, progress, short_bytes
from .verbs.options import add_csv, add_list, add_machine, positive, positive_numbers, seconds

COLUMNS = (
    *("verb", "case", "method", "direction", "status", "batch", "seqlen", "layers", "dtype"),
    *("p20_ms", "p50_ms", "p80_ms", "rounds", "peak_bytes", "error", "checked_against", "real"),
)
"""error: of the output or of the gradients of all parameters, see :func:`distance`. real: the share of real tokens in a batch of
sentences, if one was asked for."""
METHODS = (OURS, "eager", "sdpa")
PACKING = ("t5", "mt5", "umt5", "deberta", "deberta_v2", "mpnet")
"""Families whose encoders pack."""
STOCK = "stock"  # the implementation that computes what a model means to: eager, unless that is wrong
WARM_UP_LENGTH, CHECKED_LENGTH = 64, 200
SPREAD = 0.8
"""The deviation of the logarithms of sentences' lengths."""
LONGEST_IN_TURN = 8192  # longer ones are timed once, while their memory is measured
PADDING = 8  # one in so many frames
ROUNDS = 20
FACTOR, UNITS = 3, 8
"""Ours may be off by FACTOR times what the stock model is in the same dtype, and UNITS in the last place; no more than others."""
UNIT = "ms"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = [name for name in FAMILIES if name != "parakeet_attention"]
    add_list(parser, "families", tuple(FAMILIES), default)
    lengths = "256,512,1024,2048,4096"
    parser.add_argument("--lengths", type=positive_numbers, default=lengths, metavar="A,B", help="frames or tokens (%(default)s)")
    parser.add_argument("--batches", type=positive_numbers, default="1", metavar="A,B", help="sequences at once (%(default)s)")
    add_list(parser, "methods", (*METHODS, PACKED, STOCK), METHODS)
    words = "shares of real tokens in batches of sentences, whose longest one has the length; of encoders alone"
    parser.add_argument("--real", type=shares, default=None, metavar="A,B", help=words)
    add_list(parser, "directions", DIRECTIONS, DIRECTIONS)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the models (%(default)s)")
    parser.add_argument("--small", action="store_true", help="small models, to try it out")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="seconds to time one model at one size (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=1, help="least number of timed rounds (%(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="no peaks, each of which is a further, slow pass")
    add_machine(parser)
    add_csv(parser)


def shares(text: str) -> list[float]:
    """A parser of shares of real tokens."""
    found = [float(part) for part in text.split(",")]
    if not all(0 < share <= 1 for share in found):
        raise argparse.ArgumentTypeError(f"shares are above 0 and at most 1, got {text}")
    return found


class Size(NamedTuple):
    """Size of a model's input: so many sequences, of so many frames or tokens, of which a share is real."""

    length: int
    batch: int = 1
    real: float | None = None

    def __str__(self) -> str:
        return str(self.length) + f" x {self.batch}" * (self.batch > 1) + f", {self.real} real" * (self.real is not None)

    def lengths(self, padding: int) -> list[int]:
        """The lengths of sequences: one in so many frames is padding; of sentences, those of a lognormal distribution."""
        if self.real is None:
            return [self.length - self.length // padding if padding else self.length] * self.batch
        draws = (SPREAD * torch.randn(self.batch - 1, generator=torch.Generator().manual_seed(1))).exp().tolist()
        wanted, low, high = self.real * self.length * self.batch - self.length, 0.0, 100.0 * self.length
        for _ in range(40):  # a scale with which the lengths have this sum
            scale = (low + high) / 2
            others = [min(max(round(scale * draw), 1), self.length) for draw in draws]
            low, high = (scale, high) if sum(others) < wanted else (low, scale)
        return [self.length, *others]


class Point(NamedTuple):
    """What one row is about."""

    size: Size
    method: str
    direction: str


def sizes(options: argparse.Namespace) -> list[Size]:
    """Those with less work for dense attention first."""
    found = itertools.product(options.lengths, options.batches, options.real or [None])
    return sorted((Size(*size) for size in found), key=lambda size: size.length**2 * size.batch)


def build(family: Family, options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    model = family.build(small=options.small).to(options.device, DTYPES[options.dtype])
    has_decoder = getattr(model.config, "is_encoder_decoder", False)
    return model.get_encoder() if options.real and has_decoder else model  # type: ignore[operator]


def make_inputs(family: Family, model: nn.Module, size: Size, padding: int = PADDING) -> dict[str, Any]:
    """The arguments of a model's forward, in its dtype: sequences whose end is padding if the model takes a mask."""
    like = next(model.parameters())
    arguments = family.make(model, size.length, size.lengths(padding))
    if size.real is not None:
        arguments = {name: arguments[name] for name in ("input_ids", "attention_mask")}
    return {name: value.to(like if value.is_floating_point() else like.device) for name, value in arguments.items()}


def use(model: nn.Module, method: str) -> None:
    disable(model)
    if method in (OURS, PACKED):
        if getattr(model, "_supports_sdpa", False):  # the eager one of some families computes something else, and is refused
            model.config._attn_implementation = "sdpa"  # type: ignore[union-attr]
        enable(model, check_calls=False, packed=method == PACKED)  # calls that are measured are ours alone
    else:
        model.config._attn_implementation = method  # type: ignore[union-attr]


def make_step(model: nn.Module, method: str, arguments: dict[str, Any], direction: str, real_only: bool = False) -> timing.Step:
    """A step of one direction: it returns the output, or that and all parameters' gradients, which stay allocated."""

    def output() -> torch.Tensor:
        # Wav2Vec2-Conformer writes zeros into its input.
        out = families.output(model(**{name: value.clone() for name, value in arguments.items()}))
        return out * arguments["attention_mask"][..., None] if real_only else out

    def forward(_: None) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return (output(),)

    def both(_: None) -> Sequence[torch.Tensor]:
        model.zero_grad(set_to_none=False)
        out = output()
        # A cotangent that is the same for all: sines of the position in memory.
        wide = torch.promote_types(out.dtype, torch.float32)
        d_out = torch.arange(out.numel(), device=out.device).to(wide).sin_().to(out.dtype)
        torch.autograd.backward(out, d_out.view_as(out))
        return (out.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None))

    return timing.Step(lambda: use(model, method), forward if direction == "forward" else both)


def check(family: Family, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Columns of each method: how far it is off from the stock model in float64, and a status if that is too far.

    Without padding: in float64, the mask of some models overflows. Of sentences the real tokens.
    """
    model, ours = build(family, options), (OURS, PACKED) if options.real else (OURS,)
    size = Size(CHECKED_LENGTH, 4, min(options.real)) if options.real else Size(CHECKED_LENGTH)
    arguments = make_inputs(family, model, size, padding=0)

    def results(method: str) -> list[torch.Tensor]:
        step = make_step(model, method, arguments, DIRECTIONS[1], real_only=size.real is not None)
        return [result.clone() for result in step.run()]

    by_method = {method: results(method) for method in (*family.stock, *ours)}
    model.double()
    arguments = {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # what a model computes in float32 on purpose
        golden = results(family.stock[0])
    errors = {method: distance(actual, golden) for method, actual in by_method.items()}
    most = dict.fromkeys(by_method, timing.TOLERANCE[options.dtype])
    for method in ours:
        most[method] = min(most[method], FACTOR * errors[family.stock[0]] + UNITS * torch.finfo(DTYPES[options.dtype]).eps)
    found: dict[str, dict[str, Any]] = {}
    for method, error in errors.items():
        found[method] = {"error": error, "checked_against": "float64"}
        if not error <= most[method]:
            found[method]["status"] = f"wrong: off by {error:.3g}, {most[method]:.3g} is allowed"
    return found


def distance(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Distance in norm over the norm: of the output, or of all gradients together if that is more."""

    def norm(tensors: Sequence[torch.Tensor]) -> float:
        return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5

    differences = [a.double() - b.double() for a, b in zip(results, expected, strict=True)]
    return max(norm(differences[part]) / norm(expected[part]) for part in (slice(0, 1), slice(1, None)))


class Measurement:
    """One family: a row for every size, method and direction.

    All peaks come first, while the heap has no holes, then the times, in turn. failed: methods that had too little memory for a
    shorter input, and why they are not tried again.
    """

    def __init__(self, family: Family, options: argparse.Namespace) -> None:
        self.family, self.options, self.failed = family, options, dict[str, str]()
        methods = dict.fromkeys(family.stock[0] if name == STOCK else name for name in options.methods)
        known = (*family.stock, OURS, *[PACKED] * bool(options.real))
        status = {name: "ok" if name in known else "does not apply: the model has none" for name in methods}
        points = (Point(size, name, way) for size in sizes(options) for name in methods for way in options.directions)
        self.found: dict[Point, dict[str, Any]] = {point: {"status": status[point.method]} for point in points}

    def rows(self) -> list[dict[str, Any]]:
        if not self.options.no_memory:
            model = build(self.family, self.options)
            for point in progress(list(self.found), lambda point: f"{self.family.name}: memory, {point.size}, {point.method}"):
                self.attempt(partial(self.measure_peak, model, point), point)
            del model
        map_blocks_from(LARGEST_MMAP_THRESHOLD)
        checks, self.failed = check(self.family, self.options), {}
        rows = []
        for size in progress(sizes(self.options), lambda size: f"{self.family.name}: time, {size}"):
            points = [point for point in self.found if point.size == size]
            right = [point for point in points if "status" not in checks.get(point.method, {})]
            if size.length <= LONGEST_IN_TURN:
                self.measure_times(size, right)
            for point in points:
                row: dict[str, Any] = {"case": self.family.name, "method": point.method, "direction": point.direction}
                row |= {"layers": 1, "seqlen": size.length, "batch": size.batch, "real": size.real}
                # What is wrong has no figures, what has no figures was not checked.
                is_shown = point in right or self.found[point]["status"] != "ok"
                rows.append(row | checks.get(point.method, {}) | (self.found[point] if is_shown else {}))
        return rows

    def measure_peak(self, model: nn.Module, point: Point) -> None:
        """The peak above model, inputs and gradients, and the time of that pass."""
        map_blocks_from(PAGE)
        warm_up = make_inputs(self.family, model, Size(WARM_UP_LENGTH))
        make_step(model, point.method, warm_up, point.direction).run()
        step = make_step(model, point.method, make_inputs(self.family, model, point.size), point.direction)
        started = time.perf_counter()
        peak = (peak_cuda if self.options.device == "cuda" else peak_cpu)(step.run)
        self.found[point] |= {"peak_bytes": peak, "p50_ms": 1e3 * (time.perf_counter() - started), "rounds": 1}

    def measure_times(self, size: Size, points: Sequence[Point]) -> None:
        """Times of what fits, instead of the one of the pass that its memory was measured in."""
        model, options = build(self.family, self.options), self.options
        arguments = make_inputs(self.family, model, size)
        timed = []
        for point in points:
            step = make_step(model, point.method, arguments, point.direction)
            if options.no_memory or size.length < LONGEST_IN_TURN // 2:
                self.attempt(step.run, point)
            timed.append(timing.Timed(point.method, point.direction, self.found[point], step=step))
        timing.time_in_turn(timed, options.device, options.seconds, max(ROUNDS, options.rounds), fewest=options.rounds)
        for result in timed:
            result.found |= timing.percentiles(result.milliseconds)

    def attempt(self, work: Callable[[], object], point: Point) -> None:
        """Do something with a method that nothing speaks against."""
        found = self.found[point]
        if found["status"] != "ok":
            return
        found["status"] = self.failed.get(point.method, "ok")
        if point.method not in self.failed:
            timing.attempt(work, found)
        if found["status"] == timing.OUT_OF_MEMORY:
            found["status"] += f": more than {short_bytes(self.options.memory_limit)}"
            self.failed[point.method] = f"not tried: {found['status']} at {point.size}"


def timers(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """For compare: each enabled model at each size, and a function that times it once, in milliseconds."""
    for name in options.families:
        for size in sizes(options):
            model = build(FAMILIES[name], options)
            arguments = make_inputs(FAMILIES[name], model, size)
            timed = [timing.Timed(OURS, way, step=make_step(model, OURS, arguments, way)) for way in options.directions]
            yield f"{name}, {size}", partial(timing.time_once, timed, options.device)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The rows of one family, in a process of its own: its heap starts without holes, and a lack of memory ends only it."""
    if options.device == "cpu":
        limit_memory(options.memory_limit)
    return {"status": "ok", "rows": Measurement(FAMILIES[name], options).rows()}


def run(options: argparse.Namespace) -> int:
    import transformers  # noqa: F401 - each family has a process of its own, which would end without a reason

    table = Table(COLUMNS, stamp(options.device), options.csv)
    with interruptible():
        for name in options.families:
            if options.real and FAMILIES[name].folder not in PACKING:
                print(f"{name}: it has no encoder that packs")
                continue
            found = in_own_process(measure, (name, options), None)
            for row in found.get("rows", [{"case": name, "method": OURS, "status": found["status"]}]):
                table.add({"verb": "models", "dtype": options.dtype, **row})
    print(tables(table.rows) + summary.remarks(table.rows))
    statuses = [row["status"] for row in table.rows if row["method"] == OURS]
    return 1 if any(status.startswith(("wrong", "failed")) for status in statuses) else 0

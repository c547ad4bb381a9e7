"""Models of Hugging Face transformers, of real width: as they are, and with their relative attention on the operator."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from triton_relattn._peaks import LARGEST_MMAP_THRESHOLD, PAGE, limit_memory, map_blocks_from, peak_cpu, peak_cuda
from triton_relattn.integrations.transformers import disable, enable

from . import families
from .cases.attention import DTYPES
from .cases.methods import OURS
from .families import EVERY, FAMILIES, Family
from .measure import timing
from .report import summary
from .report.models import tables
from .report.progress import progress
from .report.rows import ROOT, Table, stamp
from .report.text import short_bytes
from .verbs.options import add_files, add_list, add_machine, positive, positive_numbers, seconds

COLUMNS = (
    *("verb", "case", "method", "direction", "status", "batch", "seqlen", "layers", "dtype"),
    *("p20_ms", "p50_ms", "p80_ms", "rounds", "peak_bytes", "error", "checked_against"),
)
"""error: of the output and of the gradients of all parameters, see :func:`apart`."""
DIRECTIONS = ("forward", "forward+backward")
METHODS = (OURS, "eager", "sdpa")
STOCK = "stock"  # the implementation that computes what a model means to: eager, unless that is wrong
LENGTHS = (256, 512, 1024, 2048, 4096)
WARM_UP_LENGTH, CHECKED_LENGTH = 64, 200
LONGEST_IN_TURN = 8192  # longer ones are timed once, while their memory is measured
PADDING = 8  # one in so many frames
ROUNDS = 20
FACTOR, UNITS = 3, 8
"""Ours may be off by FACTOR times what the stock model is in the same dtype, and UNITS in the last place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = [family.name for family in EVERY if family.name != "parakeet_attention"]
    add_list(parser, "families", tuple(FAMILIES), default)
    usual = ",".join(map(str, LENGTHS))
    parser.add_argument("--lengths", type=positive_numbers, default=usual, metavar="A,B", help="frames or tokens (%(default)s)")
    parser.add_argument("--batches", type=positive_numbers, default="1", metavar="A,B", help="sequences at once (%(default)s)")
    add_list(parser, "methods", (*METHODS, STOCK), METHODS)
    add_list(parser, "directions", DIRECTIONS, DIRECTIONS)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="dtype of the models (%(default)s)")
    parser.add_argument("--layers", type=positive, default=1, help="layers per model (%(default)s)")
    parser.add_argument("--small", action="store_true", help="small models, to try it out")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="seconds to time one model at one size (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=1, help="least number of timed rounds (%(default)s)")
    parser.add_argument("--no-memory", action="store_true", help="no peaks, each of which is a further, slow pass")
    add_machine(parser)
    add_files(parser)
    parser.add_argument("--append", action="store_true", help="rows are added to those that the CSV file has")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)  # the process of one family


class Size(NamedTuple):
    """Size of a model's input: so many sequences, of so many frames or tokens."""

    length: int
    batch: int = 1

    def __str__(self) -> str:
        return str(self.length) + f" x {self.batch}" * (self.batch > 1)

    def work(self) -> int:
        """Grows as dense attention does."""
        return self.length**2 * self.batch


Point = tuple[Size, str, str]
"""Size, method and direction."""
Found = dict[Point, dict[str, Any]]


def make(family: Family, size: Size, options: argparse.Namespace) -> tuple[nn.Module, dict[str, Any]]:
    """A model and its inputs."""
    torch.manual_seed(0)
    model = family.build(small=options.small, layers=options.layers).to(options.device, DTYPES[options.dtype])
    return model, inputs(family, model, size, options)


def inputs(family: Family, model: nn.Module, size: Size, options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a model's forward: sequences whose end is padding if the model takes a mask."""
    arguments = family.make(model, size.length, [size.length - size.length // PADDING] * size.batch)
    return moved(arguments, model)


def moved(arguments: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Arguments on a model's device, numbers in its dtype."""
    like = next(model.parameters())
    return {name: value.to(like if value.is_floating_point() else like.device) for name, value in arguments.items()}


def use(model: nn.Module, method: str) -> None:
    disable(model)
    if method == OURS:
        enable(model, check_calls=False)  # calls that are measured are ours alone
    else:
        model.config._attn_implementation = method  # type: ignore[union-attr]


def step(model: nn.Module, method: str, arguments: dict[str, Any], direction: str) -> timing.Step:
    """Return a step of one direction: it returns the output, or that and all parameters' gradients, which stay allocated."""

    def output() -> torch.Tensor:
        # Wav2Vec2-Conformer writes zeros into its input.
        return families.output(model(**{name: value.clone() for name, value in arguments.items()}))

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

    Ours may be off, in each tensor, by FACTOR times what the stock model is in its dtype. Without padding: in float64, the mask
    of some models overflows.
    """
    model = make(family, Size(CHECKED_LENGTH), options)[0]
    arguments = moved(family.make(model, CHECKED_LENGTH, [CHECKED_LENGTH]), model)

    def results(method: str) -> list[torch.Tensor]:
        return [each.clone() for each in step(model, method, arguments, DIRECTIONS[1]).run()]

    every = {method: results(method) for method in (*family.stock, OURS)}
    model.double()
    arguments = {name: value.double() if value.is_floating_point() else value for name, value in arguments.items()}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):  # what a model computes in float32 on purpose
        golden = results(family.stock[0])
    found: dict[str, dict[str, Any]] = {}
    for method, result in every.items():
        off = apart(result, golden)
        found[method] = {"error": off, "checked_against": "float64"}
        if off > timing.TOLERANCE[options.dtype]:
            found[method]["status"] = f"wrong: off by {off:.3g}"
    names = ["out", *(name for name, parameter in model.named_parameters() if parameter.grad is not None)]
    if problem := over_budget(names, options.dtype, every[OURS], golden, every[family.stock[0]]):
        found[OURS]["status"] = f"wrong: {problem}"
    return found


def norm(*tensors: torch.Tensor) -> float:
    return float(sum(tensor.double().square().sum() for tensor in tensors)) ** 0.5


def over_budget(names: Sequence[str], dtype: str, *results: Sequence[torch.Tensor]) -> str:
    """The tensors that are off by too much, in words: those of ours, golden and reference."""
    of_all, rounding = norm(*results[1]), UNITS * torch.finfo(DTYPES[dtype]).eps
    problems = []
    for name, ours, golden, reference in zip(names, *results, strict=True):
        allowed = FACTOR * norm(reference - golden) + rounding * norm(golden) + rounding**1.5 * of_all
        if not norm(ours - golden) <= allowed:
            problems.append(f"{name} is off by {norm(ours - golden):.2g}, {allowed:.2g} is allowed")
    return "; ".join(problems)


def apart(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """Distance in norm over the norm: of the output, or of all gradients together if that is more."""
    differences = [a.double() - b.double() for a, b in zip(results, expected, strict=True)]
    return max(norm(*differences[part]) / norm(*expected[part]) for part in (slice(0, 1), slice(1, None)))


def measure(family: Family, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for every size, method and direction: first all peaks, while the heap has no holes, then the times, in turn."""
    sizes = sorted((Size(length, batch) for length in options.lengths for batch in options.batches), key=Size.work)
    methods = list(dict.fromkeys(family.stock[0] if method == STOCK else method for method in options.methods))
    points = [(size, method, direction) for size in sizes for method in methods for direction in options.directions]
    has = dict.fromkeys((*family.stock, OURS), "ok")
    found: Found = {point: {"status": has.get(point[1], "does not apply: the model has none")} for point in points}
    if not options.no_memory:
        peaks(family, found, options)

    map_blocks_from(LARGEST_MMAP_THRESHOLD)
    checks = check(family, options)
    failed: dict[str, str] = {}
    for size in progress(sizes, lambda size: f"{family.name}: time, {size}", Size.work):
        in_turn(family, size, found, failed, checks, options)
        for method in methods:
            for direction in options.directions:
                row = {"case": family.name, "method": method, "direction": direction, "layers": options.layers}
                row |= {"seqlen": size.length, "batch": size.batch}
                of_point, checked = found[size, method, direction], checks.get(method, {})
                # What is wrong has no figures, what has no figures was not checked.
                yield row | checked | (of_point if of_point["status"] != "ok" or "status" not in checked else {})


def peaks(family: Family, found: Found, options: argparse.Namespace) -> None:
    """Peaks of all sizes, the smallest first."""
    model = make(family, Size(WARM_UP_LENGTH), options)[0]
    failed: dict[str, str] = {}

    def label(point: Point) -> str:
        return f"{family.name}: memory, {point[0]}, {point[1]}"

    for point in progress(list(found), label, lambda point: point[0].work()):
        try_it(partial(peak, family, model, *point, found[point], options), point, found, failed, options)


def try_it(work: Callable[[], object], point: Point, found: Found, failed: dict[str, str], options: argparse.Namespace) -> None:
    """Do something with a method that nothing speaks against; failed: methods that had too little memory for less, in words."""
    (size, method, _), of_point = point, found[point]
    if of_point["status"] != "ok":
        return
    of_point["status"] = failed.get(method, "ok")
    if method not in failed:
        timing.attempt(work, of_point)
    if of_point["status"] == timing.OUT_OF_MEMORY:
        of_point["status"] += f": more than {short_bytes(options.memory_limit)}"
        failed[method] = f"not tried: {of_point['status']} at {size}"


def peak(
    family: Family,
    model: nn.Module,
    size: Size,
    method: str,
    direction: str,
    found: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """peak_bytes above model, inputs and gradients of the parameters, and the milliseconds of that pass."""
    map_blocks_from(PAGE)
    step(model, method, inputs(family, model, Size(WARM_UP_LENGTH), options), direction).run()
    measured = step(model, method, inputs(family, model, size, options), direction)
    started = time.perf_counter()
    found["peak_bytes"] = (peak_cuda if options.device == "cuda" else peak_cpu)(measured.run)
    found |= {"p50_ms": 1e3 * (time.perf_counter() - started), "rounds": 1}


def in_turn(
    family: Family,
    size: Size,
    found: Found,
    failed: dict[str, str],
    checks: dict[str, dict[str, Any]],
    options: argparse.Namespace,
) -> None:
    """Times of what fits and is not wrong, instead of the one of the pass that its memory was measured in."""
    if size.length > LONGEST_IN_TURN:
        return
    model, arguments = make(family, size, options)
    every = []
    for point in found:
        timed = timing.Timed(*point[1:])
        if point[0] == size and "status" not in checks.get(timed.method, {}):
            timed.step = step(model, timed.method, arguments, timed.direction)
            if options.no_memory or size.length < LONGEST_IN_TURN // 2:
                try_it(timed.step.run, point, found, failed, options)
            timed.found = found[point]
            every.append(timed)
    timing.time_in_turn(every, options.device, options.seconds, max(ROUNDS, options.rounds), fewest=options.rounds)
    for timed in every:
        timed.found |= timing.percentiles(timed.milliseconds)


def run(options: argparse.Namespace) -> int:
    if options.alone:
        if options.device == "cpu":
            limit_memory(options.memory_limit)
        for row in measure(FAMILIES[options.families[0]], options):
            print(json.dumps(row), flush=True)
        return 0
    import transformers  # noqa: F401 - each family has a process of its own, which would end without a reason

    table = Table(COLUMNS, stamp(options.device), options.csv, options.json, append=options.append)
    try:
        for name in options.families:
            for row in in_own_process(name, options):
                table.add({"verb": "models", "dtype": options.dtype, **row})
    except KeyboardInterrupt:
        print("interrupted; what has been measured is kept")
    print(tables(table.rows) + summary.remarks(table.rows))
    ours = [row["status"] for row in table.rows if row["method"] == OURS]
    return 1 if any(status.startswith(("wrong", "failed")) for status in ours) else 0


def in_own_process(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The rows of one family as they come: its heap starts without holes, and a lack of memory ends only it."""
    words = {"families": name, "memory-limit": options.memory_limit / 2**30}
    words |= {each: getattr(options, each) for each in ("device", "dtype", "layers", "seconds", "rounds")}
    words |= {each: ",".join(map(str, getattr(options, each))) for each in ("lengths", "batches", "methods", "directions")}
    command = [sys.executable, "-m", "bench", "models", "--alone"]
    command += ["--small"] * options.small + ["--no-memory"] * options.no_memory
    command += [word for option, value in words.items() for word in (f"--{option}", str(value))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout or ():
            yield json.loads(line)
    if child.returncode != 0:
        yield {"case": name, "method": OURS, "status": f"failed: ended with {child.returncode}, see above"}

"""CPU overhead of a call, without a GPU: kernels are compiled, and launched on a stub of the driver.

For each kind of call: microseconds until the first kernel would start, forward and backward, and of the whole forward and
backward; each the least of many. Triton's launcher runs up to the driver (tools/stub_gpu). Allocations and the few operations of
torch between the kernels run on tiny tensors of the CPU, whose allocator is not the GPU's. ``compare REF host`` times
another commit beside it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from unittest import mock

import torch
import triton  # noqa: F401 - so that a missing one is named

from triton_relattn import fused_relative_attention

from ..cases.attention import OPERANDS, Case
from ..report.text import progress, table
from .options import interpreted, seconds

CASE = Case(1, 2, 64, 64)
KINDS = {"plain": CASE.without_table(), "full": CASE, "clamp": CASE.resized(64, rows=17)}
COLUMNS = ("first kernel", "forward", "first of backward", "backward", "both")
UNIT = "us"
CALLS = 300  # in each round


def measure(kind: str, calls: int = CALLS) -> dict[str, float]:
    """The COLUMNS, in microseconds."""
    from tools.stub_gpu import stub_gpu
    from triton_relattn import _implementations as implementations

    from ..compiled import selected_for

    torch.set_num_threads(1)
    case, rows = KINDS[kind], list[tuple[float, ...]]()
    inputs = case.inputs("cpu")
    leaves = [getattr(inputs, name).requires_grad_() for name in (*OPERANDS, *case.terms)]
    arguments = case.tables(inputs) | case.options(inputs) | {"implementation": "triton"}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(implementations, "_why_no_kernels", lambda *_: None))
        stack.enter_context(selected_for("sm_90"))
        gpu = stack.enter_context(stub_gpu(records=False))
        for number in range(calls + 2):
            before = gpu.count()
            began = time.perf_counter()
            out = fused_relative_attention(*leaves[:3], **arguments)
            middle, forwards = time.perf_counter(), gpu.count() - before
            torch.autograd.grad(out, leaves, inputs.d_out)
            ended, starts = time.perf_counter(), gpu.starts(before)
            row = (starts[0] - began, middle - began, starts[forwards] - middle, ended - middle, ended - began)
            rows += [row] * (number > 1)  # before, kernels are compiled
    return {name: 1e6 * min(row[index] for row in rows) for index, name in enumerate(COLUMNS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=seconds, default=3.0, help="time of each kind (%(default)s)")


def timers(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    """For compare: each kind of call, and a function that measures it."""
    for kind in KINDS:
        yield kind, partial(measure, kind)


def run(options: argparse.Namespace) -> int:
    if interpreted():
        return 2
    body = []
    for kind in progress(KINDS):
        started, found = time.monotonic(), measure(kind)
        while time.monotonic() - started < options.seconds:
            again = measure(kind)
            found = {name: min(found[name], again[name]) for name in COLUMNS}
        body.append((kind, *(f"{found[name]:.0f}" for name in COLUMNS)))
    print(table(("microseconds", *COLUMNS), body))
    return 0

"""Errors against float64, of this package and of common baselines in the same precision."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from triton_relattn import fused_relative_attention
from triton_relattn._implementations import choose_implementation
from triton_relattn.testing import Inputs, make_inputs

from ..cases.attention import DTYPES
from ..cases.baselines import BASELINES
from ..cases.methods import OURS
from ..report.rows import Table, in_one_line, stamp
from ..report.text import interruptible, markdown_table, progress
from .options import add_csv, add_device, add_list, positive

RESULTS = ("out", "d_query", "d_key", "d_value", "d_table")
COLUMNS = ("verb", "case", "dtype", "method", *RESULTS, "status", "length")
"""Columns named as RESULTS hold the norm of the error over that of the result."""
EAGER, SDPA = "eager", "sdpa"
METHODS = (OURS, EAGER, SDPA)
"""Ours; S by skewing, then the formula as it stands; S as the attn_mask of scaled_dot_product_attention."""
OUTLIERS = {"near_12800": (320.0, 320.0, 0.0), "near_minus_200": (40.0, -40.0, 0.0)}
"""Values of query, key and table in one channel: a constant in all logits, which changes only what roundings are relative
to. 320 * 320 is beyond float16."""
SHARED = "shared_table"
CASES = ("normal", "sharp", *OUTLIERS, SHARED)
LENGTH = 200  # no multiple of a block


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_list(parser, "cases", CASES, CASES)
    add_list(parser, "dtypes", tuple(DTYPES), tuple(DTYPES))
    add_list(parser, "methods", METHODS, METHODS)
    parser.add_argument("--length", type=positive, default=LENGTH, help="length of the sequences (%(default)s)")
    add_device(parser)
    add_csv(parser)


def inputs(case: str, dtype: str, length: int, device: str) -> Inputs:
    """Full attention with a table of 2 length - 1 rows, normally distributed apart from the case's outliers."""
    heads = (4, 16) if case == SHARED else (1, 8)
    drawn = make_inputs(
        *heads, length, length, 64, num_rows=2 * length - 1, dtype=DTYPES[dtype], device=device, seed=0, sharp=case == "sharp"
    )
    for tensor, outlier in zip((drawn.query, drawn.key, drawn.rel_key), OUTLIERS.get(case, ()), strict=False):
        assert tensor is not None
        tensor[..., 0] = outlier
    return drawn._replace(d_lse=torch.zeros_like(drawn.d_lse))


def attend(method: str) -> Callable[..., torch.Tensor]:
    """The function of a method: from query, key, value and table to out."""
    if method == OURS:
        return fused_relative_attention
    baseline = BASELINES["skewing" if method == EAGER else "dense_bias"]
    return lambda query, key, value, table: baseline(query, key, value, table, False)


def results(function: Callable[..., torch.Tensor], given: Inputs) -> list[torch.Tensor]:
    """Return RESULTS of a function of query, key, value and table."""
    leaves = [tensor.detach().requires_grad_() for tensor in given[:4] if tensor is not None]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.d_out)]


def measure(case: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every method."""
    given = inputs(case, dtype, options.length, options.device)
    golden = results(partial(fused_relative_attention, implementation="reference"), given.to(torch.float64))
    rows = []
    for method in options.methods:
        row: dict[str, Any] = {"verb": "accuracy", "case": case, "dtype": dtype, "length": options.length, "method": method}
        try:
            if method == OURS:  # by the implementation that computes it
                row["method"] = f"{OURS} ({choose_implementation(None, given.query, given.value).name})"
            actual = results(attend(method), given)
            pairs = zip(RESULTS, actual, golden, strict=True)
            row |= {name: float((result.double() - exact).norm() / exact.norm()) for name, result, exact in pairs}
            row["status"] = "ok" if all(result.isfinite().all() for result in actual) else "not finite"
        except (NotImplementedError, RuntimeError) as error:
            row["status"] = f"failed: {in_one_line(error)}"
        rows.append(row)
    return rows


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Cases down, methods across; in a cell the errors of out and of the gradients of query, key, value and table."""
    methods = sorted(dict.fromkeys(row["method"] for row in rows), key=lambda name: not name.startswith(OURS))
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        errors = " ".join(f"{float(row[name]):.1e}" for name in RESULTS) if row["status"] == "ok" else row["status"]
        cells.setdefault((row["case"], row["dtype"]), {})[row["method"]] = errors
    body = [[*case, *(by_method.get(method, "-") for method in methods)] for case, by_method in cells.items()]
    return markdown_table(["inputs", "", *methods], body, "---") + "\n"


def run(options: argparse.Namespace) -> int:
    table = Table(COLUMNS, stamp(options.device), options.csv)
    with interruptible():
        for case, dtype in progress([(c, d) for c in options.cases for d in options.dtypes], " ".join):
            for row in measure(case, dtype, options):
                table.add(row)
    print(markdown(table.rows))
    return 0

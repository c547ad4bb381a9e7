"""Errors against float64, of this package and of common baselines in the same precision."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch

from triton_relattn._implementations import choose_implementation
from triton_relattn.testing import Inputs

from ..cases.attention import DTYPES, Case
from ..cases.methods import METHODS, OURS, ours
from ..measure import timing
from ..report.rows import Table, in_one_line, stamp
from ..report.text import interruptible, markdown_table, progress
from .options import add_csv, add_device, add_list, positive

RESULTS = ("out", "d_query", "d_key", "d_value", "d_table")
COLUMNS = ("verb", "case", "dtype", "method", *RESULTS, "status", "length")
"""Columns named as RESULTS hold the norm of the error over that of the result."""
COMPARED = {OURS: OURS, "eager": "skewing", "sdpa": "dense_bias"}
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
    parser.add_argument("--length", type=positive, default=LENGTH, help="length of the sequences (%(default)s)")
    add_device(parser)
    add_csv(parser)


def measure(name: str, dtype: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every method. Full attention, a row for every distance; inputs are normally distributed but for outliers."""
    case = Case(*((4, 16) if name == SHARED else (1, 8)), options.length, 64, dtype=dtype)
    inputs = case.inputs(options.device, sharp=name == "sharp")
    for tensor, outlier in zip((inputs.query, inputs.key, inputs.rel_key), OUTLIERS.get(name, ()), strict=False):
        assert tensor is not None
        tensor[..., 0] = outlier

    def results(function: Any, inputs: Inputs) -> Sequence[torch.Tensor]:
        return timing.steps(case, function, inputs)["forward+backward"].run()

    golden = results(ours(case, "reference"), inputs.to(torch.float64))
    rows = []
    for label, method in COMPARED.items():
        row: dict[str, Any] = {"verb": "accuracy", "case": name, "dtype": dtype, "length": options.length, "method": label}
        if method == OURS:  # by the implementation that computes it
            row["method"] = f"{OURS} ({choose_implementation(None, inputs.query, inputs.value).name})"
        try:
            actual = results(METHODS[method].make(case), inputs)
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

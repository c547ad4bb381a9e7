"""Calls of attention on a grid: the formula pair by pair, and the error rules for the results of any way to compute it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import interpolate, pad

from tests.tolerance import assert_gradients_close_fp32, assert_near, dtype_tolerance
from triton_relattn import decomposed_relative_attention
from triton_relattn.testing import assert_within_budget, dropout_mask

NAMES = ("out", "query", "key", "value", "rel_pos_h", "rel_pos_w")
Tensors = tuple[torch.Tensor, ...]


class Case(NamedTuple):
    """The sizes and numbers of a call."""

    grid: tuple[int, int]
    key_grid: tuple[int, int] | None = None
    prefix: int = 0
    rows: tuple[int, int] | None = None
    """Rows of the two tables, if they differ from what the grids need."""
    width: int = 16
    value_width: int = 12
    batch: int = 1
    heads: int = 2
    scale: float | None = None
    dropout_p: float = 0.0

    @property
    def keys(self) -> tuple[int, int]:
        return self.key_grid or self.grid

    @property
    def arguments(self) -> dict[str, Any]:
        return {"grid": self.grid, "key_grid": self.key_grid, "scale": self.scale}


def tensors(case: Case, dtype: torch.dtype = torch.float32, sharp: int = 1) -> Tensors:
    """Query, key, value, both tables, and d_out; the larger ``sharp``, the fewer keys get all of the attention."""
    generator = torch.Generator().manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)

    queries, keys = (case.prefix + height * width for height, width in (case.grid, case.keys))
    rows = case.rows or tuple(2 * max(sides) - 1 for sides in zip(case.grid, case.keys, strict=True))
    query, key = (made(case.batch, number, case.heads, case.width).transpose(1, 2) for number in (queries, keys))
    value, d_out = (made(case.batch, case.heads, number, case.value_width) + (sharp > 1) for number in (keys, queries))
    return sharp * query, key, value, *(made(number, case.width) * 2 / case.width**0.5 for number in rows), d_out


def table_row(query: int, key: int, query_side: int, key_side: int) -> int:
    """The table row for a pair of coordinates."""
    in_keys, in_queries = max(query_side / key_side, 1), max(key_side / query_side, 1)
    return int(query * in_queries - key * in_keys + (key_side - 1) * in_keys)


def dense_logits(case: Case, query: torch.Tensor, key: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    logits = query @ key.mT * (case.width**-0.5 if case.scale is None else case.scale)
    query_places, key_places = ([divmod(place, grid[1]) for place in range(grid[0] * grid[1])] for grid in (case.grid, case.keys))
    for axis, (table, *sides) in enumerate(zip(tables, case.grid, case.keys, strict=True)):
        rows = torch.tensor([[table_row(i[axis], j[axis], *sides) for j in key_places] for i in query_places])
        resized = interpolate(table.mT[None], size=2 * max(sides) - 1, mode="linear")[0]
        terms = (query[:, :, case.prefix :] @ resized).gather(-1, rows.expand(*query.shape[:2], -1, -1))
        logits = logits + pad(terms, (case.prefix, 0, case.prefix, 0))
    return logits


def by_formula(case: Case, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *tables: torch.Tensor) -> torch.Tensor:
    probs = dense_logits(case, query, key, *tables).softmax(-1)
    if case.dropout_p:
        keep = dropout_mask(*query.shape[:3], key.shape[2], case.dropout_p)  # type: ignore[call-arg]
        probs = probs * keep * (1 / (1 - case.dropout_p) if case.dropout_p < 1 else 0)
    return probs @ value


def results(function: str | Callable[..., torch.Tensor], case: Case, given: Tensors) -> Tensors:
    """out and all gradients of an implementation, or of a function of a case; nothing that is given counts as written to."""
    if isinstance(function, str):
        function = partial(attend, implementation=function)
    torch.manual_seed(3)
    leaves, versions = [tensor.detach().requires_grad_() for tensor in given[:5]], [tensor._version for tensor in given]
    out = function(case, *leaves)
    versions.append(out._version)
    gradients = torch.autograd.grad(out, leaves, given[5])
    assert versions == [tensor._version for tensor in (*given, out)], "an input, or out, was written to"
    return out.detach(), *gradients


def attend(case: Case, *leaves: torch.Tensor, implementation: str) -> torch.Tensor:
    call: Any = decomposed_relative_attention
    out: torch.Tensor = call(*leaves, **case.arguments, dropout_p=case.dropout_p, implementation=implementation)
    return out


def in_float64(given: Tensors) -> Tensors:
    return tuple(tensor.double() for tensor in given)


def assert_right(case: Case, ours: Tensors, given: Tensors, is_exact: bool = False) -> Tensors:
    """Apply the error rules to out and all gradients, and return the exact ones.

    is_exact: also in float32 gradients are compared with those of plain torch, instead of with what sums may round.
    """
    dtype, exact = given[0].dtype, results(by_formula, case, in_float64(given))
    plain, largest = results("reference", case, given), max(float(result.abs().max()) for result in exact)
    is_float32 = dtype == torch.float32 and not is_exact
    for name, found, right, usual in zip(NAMES, ours, exact, plain, strict=True):
        assert found.dtype == dtype and found.shape == right.shape
        if dtype == torch.float64:
            assert_near(name, found, right, smallest=largest / 100)
        elif not right.any() and (name == "out" or not is_float32 or not any(gradient.any() for gradient in exact[1:])):
            assert not found.any(), name
        elif name == "out":
            assert_within_budget(name, found, right, usual, factor=4 if is_float32 else 2, exact_reference=True)
        elif is_float32:
            assert_gradients_close_fp32(name, found, right, exact[1:])
        elif float(right.abs().max()) > dtype_tolerance(torch.float64):  # with one visible key it cancels to zero
            assert_within_budget(name, found, right, usual, factor=3, exact_reference=True)
    return exact

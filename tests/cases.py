"""Random cases that the tests of every implementation share."""

from __future__ import annotations

import random
from typing import Any

import torch

from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, make_inputs, with_different_strides

LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 97, 127, 129, 200)
UNEVEN_LENGTHS = ((1, 239), (239, 1), (3, 799), (799, 3), (113, 203))


def random_positions(choose: random.Random, num_queries: int, num_keys: int) -> tuple[int | None, RelativePositions | None]:
    """Rows and positions of a table that is longer than, exactly, or shorter than what the lengths need, or beside it."""
    outside = choose.choice(("clamp", "zero"))
    first, last = -(num_queries - 1), num_keys - 1
    kind = choose.choice(("none", "centred", "exact", "longer", "shorter", "one", "two", "past", "future"))
    if kind == "none":
        return None, None
    if kind == "centred":
        return choose.choice((1, 3, 17, 2 * max(num_queries, num_keys) - 1)), None
    if kind == "longer":
        first, last = first - choose.randint(1, 9), last + choose.randint(1, 9)
    elif kind == "shorter":
        first, last = sorted((choose.randint(first, last), choose.randint(first, last)))
    elif kind in ("one", "two"):
        first = choose.randint(first, last)
        last = first + (kind == "two")
    elif kind == "past":
        first, last = first - choose.randint(5, 9), first - choose.randint(1, 4)
    elif kind == "future":
        first, last = last + choose.randint(1, 4), last + choose.randint(5, 9)
    return last - first + 1, RelativePositions(first, last, outside)  # type: ignore[arg-type]


def random_case(
    seed: int,
    *,
    dtype: torch.dtype = torch.float64,
    widths: tuple[int, ...] = (1, 4, 5, 8),
    value_widths: tuple[int, ...] = (1, 3, 8),
    scales: tuple[float | None, ...] = (None, None, 1.0, 0.05, -0.3),
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs of any shape, table and strides, and arguments of any mask, offset and scale, all drawn from the seed."""
    choose = random.Random(seed)
    num_queries, num_keys = choose.choice((choose.choice(UNEVEN_LENGTHS), (choose.choice(LENGTHS), choose.choice(LENGTHS))))
    num_rows, positions = random_positions(choose, num_queries, num_keys)
    batch, heads, width, value_width = (choose.choice(sizes) for sizes in ((1, 2), (1, 2, 3), widths, value_widths))
    inputs = make_inputs(
        batch,
        heads,
        num_queries,
        num_keys,
        width,
        value_width,
        num_rows=num_rows,
        per_head=choose.random() < 0.5,
        dtype=dtype,
        seed=seed,
        sharp=choose.random() < 0.25,
    )
    if choose.random() < 0.3:
        inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))
    if choose.random() < 0.3:
        inputs = with_different_strides(inputs)
    arguments: dict[str, Any] = {"is_causal": choose.random() < 0.5}
    arguments["query_offset"] = choose.choice((0, 0, num_keys - num_queries, choose.randint(-9, 9), choose.randint(-300, 300)))
    arguments["scale"] = choose.choice(scales)
    if positions is not None:
        arguments["positions"] = positions
    if choose.random() < 0.4:
        lengths = [choose.choice((0, num_keys, choose.randint(0, num_keys))) for _ in range(batch)]
        arguments["key_lengths"] = torch.tensor(lengths, dtype=choose.choice((torch.int32, torch.int64)))
    return inputs, arguments


def one_hot_case(outside: Any, width: int, dtype: torch.dtype) -> tuple[Inputs, dict[str, Any], torch.Tensor]:
    """Inputs with a d_out of one number (query 21, batch entry 1, head 0), arguments, and the table rows (R,) that it reaches."""
    inputs = make_inputs(2, 2, 40, 50, width, num_rows=31, dtype=dtype, seed=2)
    i, first, last, offset, num_keys = 21, -20, 10, 5, 36
    d_out = torch.zeros_like(inputs.d_out)
    d_out[1, 0, i, 2] = 1
    inputs = inputs._replace(d_out=d_out, d_lse=torch.zeros_like(inputs.d_lse))
    seen = [j - i - offset for j in range(num_keys) if j <= i + offset]
    if outside == "clamp":
        seen = [max(first, min(last, r)) for r in seen]
    hit = torch.zeros(31, dtype=torch.bool)
    hit[[r - first for r in seen if first <= r <= last]] = True
    assert 0 < int(hit.sum()) < 31
    arguments = {"positions": RelativePositions(first, last, outside), "key_lengths": torch.tensor([50, num_keys])}
    return inputs, {**arguments, "is_causal": True, "query_offset": offset}, hit

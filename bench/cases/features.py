"""Feature sets by name: resolved calls with what a model has besides queries, keys and values; nothing is computed."""

from __future__ import annotations

import math
from typing import Any

import torch

from triton_relattn import RelativePositions
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.grids import GridTensors

Resolved = tuple[Any, Any]
"""Tensors and scalars of a call: AttentionTensors and AttentionSpec; on a grid GridTensors, and (scale, dropout_p)."""
LENGTH = 4096
HALF = 64  # a bounded table ends so far from its middle
INKLING_REL_DIM = 16

TABLES = ("none", "full", "clamp", "zero")
"""Table for the keys, shared by the heads: none, a row for every pair, or a bounded one and what lies beyond it."""
MODELS = (
    "shaw",
    "vits",
    "transformer_xl",
    "own_query",
    "inkling",
    "inkling_window",
    "t5",
    "t5_clamped",
    "deberta",
    "deberta_clamped",
)
"""With a table for the values too, with a bias, with a query of its own, with a table that meets the keys, ..."""
GRIDS = {"grid": (64, 64), "window": (14, 14)}
"""Attention on a grid of keys, with terms by row and by column: the sides of SAM's, in all of the image and in windows."""
FEATURES = (
    *(f"{name}{causal}" for name in TABLES for causal in ("", "_causal")),
    *(f"{name}{causal}" for name in ("shaw", "transformer_xl", "t5") for causal in ("", "_causal")),
    *("vits", "own_query", "t5_clamped", "inkling_causal", "inkling_window_causal", "deberta", "deberta_clamped"),
    *GRIDS,
)
"""The feature sets that are reported on; "_causal" is part of the name."""


def arguments(name: str, query: torch.Tensor, per_head: bool) -> dict[str, Any]:
    """Return what one of TABLES or MODELS adds to a call with this query; per_head: a table of TABLES for each head."""
    heads, length, width = query.shape[1:]
    full = RelativePositions(1 - length, length - 1)
    clamped, zero = (RelativePositions(-HALF, HALF, outside) for outside in ("clamp", "zero"))
    extent = RelativePositions(-HALF, 0, "zero")

    def rows(positions: RelativePositions, *shape: int, per_head: bool = False) -> torch.Tensor:
        return query.new_empty(*(heads,) * per_head, positions.num_rows, *shape)

    if name in TABLES:
        positions = {"full": full, "clamp": clamped, "zero": zero}.get(name)
        return {} if positions is None else {"rel_key": rows(positions, width, per_head=per_head), "positions": positions}
    if name in ("shaw", "vits"):
        positions = clamped if name == "shaw" else zero
        return {"rel_key": rows(positions, width), "rel_value": rows(positions, width), "positions": positions}
    if name == "transformer_xl":
        tables = {"rel_key": rows(full, width, per_head=True), "rel_bias": rows(full, per_head=True)}
        return {**tables, "positions": full}
    if name in ("deberta", "deberta_clamped"):
        positions = full if name == "deberta" else clamped
        return {**{table: rows(positions, width, per_head=True) for table in ("rel_key", "rel_p2c")}, "positions": positions}
    if name == "own_query":
        return {"rel_key": rows(full, width, per_head=True), "rel_query": query, "positions": full}
    if name in ("inkling", "inkling_window"):
        rel_query = query[..., :INKLING_REL_DIM]
        window = {"window_size": (HALF, -1)} if name == "inkling_window" else {}
        return {"rel_key": rows(extent, rel_query.shape[-1]), "rel_query": rel_query, "positions": extent, **window}
    if name in ("t5", "t5_clamped"):
        positions = full if name == "t5" else clamped
        return {"rel_bias": rows(positions, per_head=True), "positions": positions}
    raise ValueError(f"there is no feature set {name!r}")


def on_grid(sides: tuple[int, int], query: torch.Tensor) -> Resolved:
    """Return a call of attention on a grid with these sides, with this query."""
    rel_h, rel_w = (query.new_empty(side, side, query.shape[3], dtype=torch.float32) for side in sides)
    return GridTensors(query, query, query, rel_h, rel_w), (query.shape[3] ** -0.5, 0.0)


def call(
    features: str,
    dtype: torch.dtype,
    head_dim: int,
    *,
    has_lengths: bool = True,
    per_head: bool = False,
    length: int = LENGTH,
    heads: int = 2,
) -> Resolved:
    """A resolved call with one of TABLES or MODELS, and "_causal" after its name if it is.

    Args:
        has_lengths: whether the batch is padded.
        per_head: whether the table of TABLES is one for each head.
        has_lengths, per_head, length: not on a grid.
        heads: except for "inkling", which has eight for one of the keys; more than eight take no memory.
    """
    name = features.removesuffix("_causal")
    heads, key_heads = (8, 1) if name == "inkling" else (heads, heads)
    if name in GRIDS:
        return on_grid(GRIDS[name], torch.empty(1, heads, math.prod(GRIDS[name]), head_dim, dtype=dtype))
    query = torch.empty(1, min(heads, 8), length, head_dim, dtype=dtype)
    if heads > 8:
        query = query[:, :1, :1, :1].expand(1, heads, length, head_dim)
    key = query[:, :key_heads]
    return validation.resolve(
        Arguments(
            query,
            key,
            key,
            **arguments(name, query, per_head),
            key_lengths=torch.zeros(1, dtype=torch.int32) if has_lengths else None,
            is_causal=features.endswith("_causal"),
            enable_gqa=heads != key_heads,
        )
    )

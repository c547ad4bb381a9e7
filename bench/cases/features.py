"""Feature sets by name: calls with what a model has besides queries, keys and values, to be compiled; nothing is computed."""

from __future__ import annotations

import math
from typing import Any

import torch

from triton_relattn._core.spec import GridTensors

from .attention import CLIPPED, DTYPES, Case

Resolved = tuple[Any, Any]
"""AttentionTensors and AttentionSpec; on a grid GridTensors, and (scale, dropout_p)."""
LENGTH = 4096
HALF = CLIPPED // 2  # a bounded table ends so far from its middle
BOUNDED = {"extent": (-HALF, HALF)}
ZERO = {**BOUNDED, "outside": "zero"}
VALUES, BIAS, P2C = ("rel_key", "rel_value"), ("rel_bias",), ("rel_key", "rel_p2c")
INKLING = {"extent": (-HALF, 0), "outside": "zero", "rel_dim": 16}
TABLES: dict[str, dict[str, Any]] = {"none": {"terms": ()}, "full": {}, "clamp": BOUNDED, "zero": ZERO}
"""Table for the keys, shared by the heads: none, a row for every pair, or a bounded one and what lies beyond it."""
MODELS: dict[str, dict[str, Any]] = {
    "shaw": {**BOUNDED, "terms": VALUES},
    "vits": {**ZERO, "terms": VALUES},
    "transformer_xl": {"terms": ("rel_key", "rel_bias"), "per_head": True},
    "own_query": {"per_head": True},
    "inkling": {**INKLING, "heads": 8, "key_heads": 1},
    "inkling_window": {**INKLING, "window": (HALF, -1)},
    "t5": {"terms": BIAS},
    "t5_clamped": {**BOUNDED, "terms": BIAS},
    "deberta": {"terms": P2C, "per_head": True},
    "deberta_clamped": {**BOUNDED, "terms": P2C, "per_head": True},
}
GRIDS = {"grid": (64, 64), "window": (14, 14)}
"""Attention on a grid of keys, with terms by row and by column: the sides of SAM's, in all of the image and in windows."""
FEATURES = (
    *(f"{name}{causal}" for name in TABLES for causal in ("", "_causal")),
    *(f"{name}{causal}" for name in ("shaw", "transformer_xl", "t5") for causal in ("", "_causal")),
    *("vits", "own_query", "t5_clamped", "inkling_causal", "inkling_window_causal", "deberta", "deberta_clamped"),
    *GRIDS,
)
"""The feature sets that are reported on; "_causal" is part of the name."""


def on_grid(grid: tuple[int, int], query: torch.Tensor) -> Resolved:
    """A call of attention on a grid of keys with this query."""
    rel_h, rel_w = (query.new_empty(side, side, query.shape[3], dtype=torch.float32) for side in grid)
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
    """A resolved call with one of FEATURES.

    Args:
        has_lengths, length: not on a grid. has_lengths: whether the batch is padded.
        per_head: whether the table of TABLES is one per head.
        heads: except for "inkling", which has eight for one of the keys.
    """
    name = features.removesuffix("_causal")
    if name in GRIDS:
        return on_grid(GRIDS[name], torch.empty(1, heads, math.prod(GRIDS[name]), head_dim, dtype=dtype))
    options = {"heads": heads, "per_head": per_head, "extent": (1 - length, length - 1), **(TABLES | MODELS)[name]}
    options |= {"rel_dim": head_dim} if name == "own_query" else {}
    options |= {"padding": (1.0,)} if has_lengths else {}
    dtype_name = next(name for name, value in DTYPES.items() if value == dtype)
    case = Case(1, length=length, head_dim=head_dim, is_causal=features.endswith("_causal"), dtype=dtype_name, **options)
    return case.resolved(case.empty())

"""Conversions from the table layouts found in papers and code to ours: ``(..., R, D)``, most distant past first."""

from __future__ import annotations

import torch


def from_general_layout(table: torch.Tensor) -> torch.Tensor:
    """``(..., D, 2T - 1)``, one column per position from the most distant future to the most distant past, to ours.

    Column ``c`` of the given table stands for relative position ``T - 1 - c``; row ``r + T - 1`` of the result for ``r``.
    A view of the given table with one copy (``flip``), so gradients flow back to it.

    Raises:
        ValueError: fewer than two dimensions, or an even number of columns.
    """
    if table.dim() < 2:
        raise ValueError(f"table must have shape (..., D, 2T - 1), got {tuple(table.shape)}")
    if table.shape[-1] % 2 == 0:
        raise ValueError(f"table must have an odd number of columns, 2T - 1, got shape {tuple(table.shape)}")
    return table.transpose(-2, -1).flip(-2)


def from_future_first(table: torch.Tensor) -> torch.Tensor:
    """``(..., R, D)`` with the most distant future in row 0 to ours, with the most distant past in row 0.

    Raises:
        ValueError: fewer than two dimensions.
    """
    if table.dim() < 2:
        raise ValueError(f"table must have shape (..., R, D), got {tuple(table.shape)}")
    return table.flip(-2)

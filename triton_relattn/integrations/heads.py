"""Heads out of the states of a model, and back."""

from __future__ import annotations

from typing import Any

import torch


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshape (B, N, H * D) to (B, H, N, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def drop_probability(dropout: Any) -> float:
    """Return the probability with which a dropout module drops numbers now: 0 if it is not training, whatever its parent does."""
    return dropout.p if dropout.training else 0.0  # type: ignore[no-any-return]


def join_heads(out: torch.Tensor) -> torch.Tensor:
    """Reshape (B, H, N, D) to (B, N, H * D)."""
    return out.transpose(1, 2).flatten(2)

"""Heads out of the states of a model, and back."""

from __future__ import annotations

import torch


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshape (B, N, H * D) to (B, H, N, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(out: torch.Tensor) -> torch.Tensor:
    """Reshape (B, H, N, D) to (B, N, H * D)."""
    return out.transpose(1, 2).flatten(2)

"""What the attention modules of the families have in common."""

from __future__ import annotations

from typing import Any

import torch


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(B, N, H * D) to (B, H, N, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(out: torch.Tensor) -> torch.Tensor:
    """(B, H, N, D) to (B, N, H * D)."""
    return out.transpose(1, 2).flatten(2)


def added(attention_mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A mask as transformers' eager attention adds it to the logits: the lowest number where a key is hidden.

    Beside it all logits vanish: a query of which all keys are hidden sees them evenly. The operator does as softmax does.
    """
    if attention_mask is None or attention_mask.dtype != torch.bool:
        return attention_mask
    return torch.zeros((), dtype=dtype, device=attention_mask.device).where(attention_mask, torch.finfo(dtype).min)


def attend_evenly(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """What queries get whose logits are all replaced by the lowest number: the mean of the values.

    Where q.k is added to that number instead, it vanishes, but its gradient passes the addition. So here: the derivative of the
    softmax where all logits are equal is the covariance of keys and values.
    """
    mean = value.mean(2, keepdim=True)
    covariance = (key - key.mean(2, keepdim=True)).mT @ (value - mean).detach() / key.shape[2]
    change = scale * (query @ covariance)
    return mean + (change - change.detach())


def sees_a_key(lse: torch.Tensor) -> torch.Tensor:
    """(B, H, N, 1), False of queries whose keys are all hidden, of which transformers has its own idea."""
    return ~torch.isneginf(lse)[..., None]


def refuse_weights(asked: dict[str, Any]) -> None:
    """Raise ValueError if output_attentions is asked for."""
    if asked.get("output_attentions"):
        raise ValueError("output_attentions=True needs the weights, Nq x Nk numbers that are never made: disable(model) first")

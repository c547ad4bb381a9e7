"""Transformer-XL's terms, (q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head."""

from __future__ import annotations

from typing import Any

import torch

from ... import tables
from ...functional import fused_relative_attention
from ...positions import RelativePositions


def folded(
    query: torch.Tensor,
    rel_key: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    ends: tuple[int, int],
    scale: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the query and the other arguments of the operator for a rel_key (H, R, D) of the positions between the ends."""
    query, rel_bias = tables.fold_transformer_xl(query, rel_key, u, v, scale)
    # The gradient of u is the sum of the query's gradient, whose rounding errors would add up (docs/numerics.md).
    return query, {"rel_key": rel_key, "rel_bias": rel_bias, "positions": RelativePositions(*ends), "exact_delta": True}


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_keys: torch.Tensor,
    ends: tuple[int, int],
    attention_mask: torch.Tensor | None,
    query_offset: int = 0,
) -> torch.Tensor:
    """Compute the attention of a FastConformer's layer, (B, H, Nq, D).

    rel_keys: (1, H, R, D); or, if positions have dropout, a table for each sequence, which all its batch entries use.
    """
    masks = (None,) * len(rel_keys) if attention_mask is None else attention_mask.tensor_split(len(rel_keys))
    states = (each.tensor_split(len(rel_keys)) for each in (query, key, value))
    outs = []
    for q, k, v, mask, rel_key in zip(*states, masks, rel_keys, strict=True):
        folded_q, term = folded(q, rel_key, module.bias_u, module.bias_v, ends, module.scaling)
        out: Any = fused_relative_attention(
            folded_q,
            k,
            v,
            attn_mask=mask,
            query_offset=query_offset,
            dropout_p=module.attention_dropout if module.training else 0.0,
            scale=module.scaling,
            enable_gqa=True,
            **term,
        )
        outs.append(out)
    return torch.cat(outs)

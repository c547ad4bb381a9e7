"""What forwards in place of stock ones call: the operators, Transformer-XL's terms, and heads out of states and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import functional, grids, tables
from ..positions import RelativePositions
from .isolation import weights_dropout
from .packing import Packing


def fused_relative_attention(
    *args: Any, attn_mask: Any = None, dropout_p: float = 0.0, window_size: tuple[int, int] = (-1, -1), **kwargs: Any
) -> Any:
    """Call the operator; without dropout while a comparison runs. An explicit window: the stock class's mask is on purpose.

    attn_mask: also the Packing of tensors (1, H, total, D), which are one sequence after the other.
    """
    options: dict[str, Any] = {"dropout_p": weights_dropout(dropout_p), "window_size": window_size, **kwargs}
    if not isinstance(attn_mask, Packing):
        return functional.fused_relative_attention(*args, attn_mask=attn_mask, **options)
    query, key, value = (states[0].transpose(0, 1) for states in args)  # (total, H, D)
    starts, longest = attn_mask.starts, attn_mask.longest
    lengths: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return functional.fused_relative_attention_varlen(query, key, value, **lengths, **options).transpose(0, 1)[None]


def decomposed_relative_attention(*args: Any, dropout_p: float = 0.0, **kwargs: Any) -> Any:
    """Call the operator for grids, as above."""
    return grids.decomposed_relative_attention(*args, dropout_p=weights_dropout(dropout_p), **kwargs)


def split_heads(states: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reshape (B, N, H * D) to (B, H, N, D)."""
    return states.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def join_heads(out: torch.Tensor) -> torch.Tensor:
    """Reshape (B, H, N, D) to (B, N, H * D)."""
    return out.transpose(1, 2).flatten(2)


def drop_probability(dropout: Any) -> float:
    """Return the probability with which a dropout module drops now: 0 if it is not training, whatever its parent does."""
    return dropout.p if dropout.training else 0.0  # type: ignore[no-any-return]


def folded(
    query: torch.Tensor,
    rel_key: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    positions: RelativePositions,
    scale: float | None = None,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the query and the other arguments of the operator for a rel_key (H, R, D), a row for each of the positions."""
    query, rel_bias = tables.fold_transformer_xl(query, rel_key, u, v, scale)
    return query, {"rel_key": rel_key, "rel_bias": rel_bias, "positions": positions, "scale": scale}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_keys: torch.Tensor,
    u: torch.Tensor,
    v: torch.Tensor,
    positions: RelativePositions,
    scale: float | None = None,
    dropout_p: float = 0.0,
    **options: Any,
) -> torch.Tensor:
    """Compute Transformer-XL's attention, scores (q_i + u) . k_j + (q_i + v) . R[j - i], scaled; (B, H, Nq, D).

    rel_keys: R, (1, H, R, D), or (P, H, R, D) with a table per sequence or group of sequences, as dropout of the positions
    leaves it: then the batch, and options that have a batch dimension, are split into P parts.
    """
    parts, dropout_p = len(rel_keys), weights_dropout(dropout_p)  # noted once, not per part
    batched = {"query": query, "key": key, "value": value}
    batched |= {name: value for name, value in options.items() if isinstance(value, torch.Tensor) and len(value) == len(query)}
    outs = []
    for number, rel_key in enumerate(rel_keys):
        part = {name: tensor.tensor_split(parts)[number] for name, tensor in batched.items()} if parts > 1 else dict(batched)
        folded_query, term = folded(part.pop("query"), rel_key, u, v, positions, scale)
        outs.append(fused_relative_attention(folded_query, **{**options, **part}, **term, dropout_p=dropout_p))
    return torch.cat(outs) if parts > 1 else outs[0]  # type: ignore[no-any-return]


def module_attention(module: Any, pos_emb: torch.Tensor, positions: RelativePositions) -> Callable[..., torch.Tensor]:
    """Return :func:`attend` with the weights of a module built as ESPnet's; pos_emb (1 or B, R, C), a row per position."""
    return functools.partial(
        attend,
        rel_keys=split_heads(module.linear_pos(pos_emb), module.d_k),
        u=module.pos_bias_u,
        v=module.pos_bias_v,
        positions=positions,
        dropout_p=drop_probability(module.dropout),
    )

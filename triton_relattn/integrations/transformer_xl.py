"""Transformer-XL's terms, (q_i + u) . k_j + (q_i + v) . R[j - i], both scaled; R, a row per distance and head."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from .. import tables
from ..positions import RelativePositions
from .heads import drop_probability, split_heads
from .in_place import fused_relative_attention


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
    **options: Any,
) -> torch.Tensor:
    """Compute the attention of a Conformer's layer, (B, H, Nq, D).

    rel_keys: (1, H, R, D), or a table for each sequence, as dropout of the positions leaves it: as many batch entries have each,
    and their share of the options that have a batch dimension.
    """
    batch, parts = len(query), len(rel_keys)
    given = {"query": query, "key": key, "value": value, **options}
    shared = {name for name, each in given.items() if parts == 1 or not isinstance(each, torch.Tensor) or len(each) != batch}
    split = {name: (each,) * parts if name in shared else each.tensor_split(parts) for name, each in given.items()}
    outs = []
    for number, rel_key in enumerate(rel_keys):
        part = {name: each[number] for name, each in split.items()}
        folded_query, term = folded(part.pop("query"), rel_key, u, v, positions, scale)
        out: Any = fused_relative_attention(folded_query, **part, **term)
        outs.append(out)
    return torch.cat(outs) if parts > 1 else outs[0]


def of_module(module: Any, pos_emb: torch.Tensor, positions: RelativePositions) -> Callable[..., torch.Tensor]:
    """The operator with the term of a module that is built as ESPnet's, as NeMo's and CosyVoice's are.

    pos_emb: (1, R, C), a row for each of the positions; of a module that drops other ones for each sequence, (B, R, C).
    """
    return functools.partial(
        attend,
        rel_keys=split_heads(module.linear_pos(pos_emb), module.d_k),
        u=module.pos_bias_u,
        v=module.pos_bias_v,
        positions=positions,
        dropout_p=drop_probability(module.dropout),
    )

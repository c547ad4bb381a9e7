"""The operators' sharding strategies for DTensors: by batch and by heads.

_operators.py registers them once a program has DTensor. Positions are not sharded: of such a tensor DTensor gathers them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ._core.spec import TABLES, is_per_head
from ._implementations import IMPLEMENTATIONS
from ._operators import GRID, NUM_SAVED, SEQUENCE, AttentionOperator

BATCH, HEADS = range(2)
"""The dimensions of query, key and value that may be sharded."""


def shard_dim(name: str, tensor: torch.Tensor, kind: int) -> int | None:
    """Return the dimension of a call's tensor that counts the batch or the heads; None: it has none to shard."""
    if name in ("query", "key", "value", "rel_query", "dropout_origins"):
        return kind
    if name == "attn_mask":
        return kind if tensor.shape[kind] > 1 else None
    if name in TABLES:
        return 0 if kind == HEADS and is_per_head(name, tensor) else None
    return 0 if kind == BATCH and name in ("key_lengths", "query_offsets") else None


def register() -> None:
    """Register sharding strategies with DTensor. Each mesh dimension may replicate everything, or shard the batch, or the heads.

    Gradients of tables that the shards share are partial sums, which DTensor adds up. Packed batches are sharded by heads only.
    Grouped heads are sharded only if the mesh divides the heads of the key, so that these stay with their heads of the query.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def kinds(tensors: Any) -> list[int | None]:
        """Return what may be sharded: nothing (None), BATCH, HEADS."""
        batch = [BATCH] if getattr(tensors, "cu_seqlens_q", None) is None else []
        key_heads = tensors.key.shape[1]
        heads = tensors.query.shape[1] == key_heads or key_heads % tensors.query.mesh.size() == 0
        return [None, *batch, *([HEADS] if heads else [])]

    def place(tensors: Any, kind: int | None) -> dict[str, Any]:
        """Return the placement of each tensor of a call; None for those that are absent."""
        placed: dict[str, Any] = {}
        for name, tensor in tensors._asdict().items():
            dim = None if tensor is None or kind is None else shard_dim(name, tensor, kind)
            placed[name] = None if tensor is None else Replicate() if dim is None else Shard(dim)
        return placed

    # A strategy returns the placements of an operator's results and of its arguments, in each way to compute it.

    def forward(operator: AttentionOperator, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, _, name, save_extra = operator.split(arguments)
        has_stats, ways = IMPLEMENTATIONS[name].saves_stats, []
        for kind in kinds(tensors):
            result = Replicate() if kind is None else Shard(kind)
            results = [result, result, result if has_stats else Replicate(), result if save_extra else Replicate()]
            placed = list(place(tensors, kind).values())
            ways.append((results, placed + [None] * (len(arguments) - len(placed))))
        return ways

    def backward(operator: AttentionOperator, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, _, _, needs_grad = operator.split(arguments[NUM_SAVED:])
        ways = []
        for kind in kinds(tensors):
            result, placed, grads = Replicate() if kind is None else Shard(kind), place(tensors, kind), []
            for name, needed in zip(operator.differentiable, needs_grad, strict=True):
                grad = (placed[name] if needed else None) or Replicate()
                is_part = needed and kind is not None and placed[name] == Replicate()  # the shards share the tensor
                grads.append(Partial() if is_part else grad)
            inputs = [None if tensor is None else result for tensor in arguments[:NUM_SAVED]] + list(placed.values())
            ways.append((grads, inputs + [None] * (len(arguments) - len(inputs))))
        return ways

    for operator in (SEQUENCE, GRID):
        register_sharding(operator.forward_op)(partial(forward, operator))
        register_sharding(operator.backward_op)(partial(backward, operator))

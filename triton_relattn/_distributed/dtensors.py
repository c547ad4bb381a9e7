"""Calls whose tensors are DTensors, of which one mesh dimension shards the positions."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors, is_per_head
from .methods import attend

DIMS: dict[str, tuple[int | None, int | None, int | None]] = {
    **dict.fromkeys(("query", "key", "value", "rel_query"), (0, 1, 2)),
    **dict.fromkeys(("key_lengths", "query_offsets"), (0, None, None)),
}
"""Which dimension of a tensor counts the batch, which the heads, and which the queries (or keys) that are sharded."""


def _dims(name: str, tensor: torch.Tensor) -> tuple[int | None, int | None, int | None]:
    if name == "attn_mask":
        batch, heads, queries = (dim if tensor.shape[dim] > 1 else None for dim in range(3))
        return batch, heads, queries
    if name in TABLES:
        return None, 0 if is_per_head(name, tensor) else None, None
    return DIMS.get(name, (None, None, None))


def attend_dtensors(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: str,
    *,
    method: str = "ring",
    layout: str = "contiguous",
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as DTensors, placed as query is.

    Gradients of tables come as partial sums, which DTensor adds up; that of a plain table, which all ranks have, stays the rank's
    part. Plain masks, lengths and offsets are those of the whole call.

    Raises:
        ValueError: placements of query other than positions by one mesh dimension, and batch, heads or nothing by others.
        TypeError: key, value, rel_query, or a table of sharded heads is no DTensor.
    """
    query: Any = tensors.query
    mesh, placements = query.device_mesh, tuple(query.placements)
    kinds = (Shard(0), Shard(1), Shard(2))
    sharded = [dim for dim, placement in enumerate(placements) if placement == Shard(2)]
    if len(sharded) != 1 or not all(placement in (*kinds, Replicate()) for placement in placements):
        raise ValueError(
            "one dimension of the mesh may shard the positions of query, Shard(2), and others its batch, its heads or nothing, "
            f"got {placements}"
        )

    def local(name: str, tensor: Any) -> Any:
        dims = dict(zip(kinds, _dims(name, tensor), strict=True))
        if not isinstance(tensor, DTensor):
            is_learned = name in DIFFERENTIABLE
            if is_learned and any(dims.get(each) is not None for each in placements):
                raise TypeError(f"{name} must be a DTensor as query is, got {type(tensor).__name__}")
            if is_learned or name == "dropout_seed":
                return tensor
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        by_dim = [dims.get(each) for each in placements]
        wanted = [Replicate() if dim is None else Shard(dim) for dim in by_dim]
        of_gradient = [
            Partial() if isinstance(to, Replicate) and not isinstance(each, Replicate) else to
            for to, each in zip(wanted, placements, strict=True)
        ]
        return tensor.redistribute(placements=wanted).to_local(grad_placements=of_gradient)

    given: dict[str, Any] = {name: each for name, each in tensors._asdict().items() if each is not None}
    own = AttentionTensors(**{name: local(name, each) for name, each in given.items()})
    [dim] = sharded
    queries, keys = (_chunks(tensor.shape[2], mesh.size(dim)) for tensor in (tensors.query, tensors.key))
    out, lse = attend(
        own,
        spec,
        implementation,
        mesh.get_group(dim),
        sizes=(queries, keys),
        method=method,
        layout=layout,
        return_lse=return_lse,
    )
    shape = (*query.shape[:3], tensors.value.shape[3])

    def spread(tensor: torch.Tensor, shape: tuple[int, ...]) -> DTensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    return spread(out, shape), spread(lse, shape[:3]) if return_lse else lse


def _chunks(total: int, size: int) -> list[int]:
    """How many positions each rank has of a DTensor, which is cut as ``torch.chunk`` cuts."""
    each = -(-total // size)
    return [max(min(total - rank * each, each), 0) for rank in range(size)]

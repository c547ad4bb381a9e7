"""Calls whose tensors are DTensors, of which one mesh dimension shards the positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .._implementations import Implementation
from .attention import attend, check_heads, gather_sizes, rank_layout
from .strategies import HEADS, POSITIONS, divides_key_heads, shard_dim


def attend_dtensors(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    method: str = "gather",
    layout: str = "contiguous",
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse as DTensors, placed as query is. Gradients of tables are partial sums, which DTensor adds up; that of a
    plain table, which all ranks have, stays the rank's part. Plain masks, lengths and offsets are those of the whole call. Key
    heads that the ranks do not divide are gathered, and each rank takes those of its query heads."""
    query: Any = tensors.query
    mesh, placements = query.device_mesh, tuple(query.placements)
    allowed = (Shard(0), Shard(1), Shard(2), Replicate())
    if placements.count(Shard(POSITIONS)) != 1 or not all(placement in allowed for placement in placements):
        raise ValueError(
            "one dimension of the mesh may shard the positions of query, Shard(2), and others its batch, its heads or nothing, "
            f"got {placements}"
        )
    heads, key_heads, mesh_dim = query.shape[1], tensors.key.shape[1], placements.index(Shard(POSITIONS))
    head_dims = [dim for dim, placement in enumerate(placements) if placement == Shard(HEADS)]
    head_ranks = math.prod([mesh.size(dim) for dim in head_dims])
    if method == "all_to_all":  # here, since some ranks may have heads that theirs divide
        check_heads(heads, key_heads, head_ranks * mesh.size(mesh_dim))
    gathers_heads = not divides_key_heads(heads, key_heads, head_ranks)

    def local(name: str, tensor: Any) -> Any:
        """Return the rank's part of a tensor, as the mesh cuts query."""
        dims = [shard_dim(name, tensor, to.dim) if isinstance(to, Shard) else None for to in placements]
        if not isinstance(tensor, DTensor):
            if name in DIFFERENTIABLE and any(dim is not None for dim in dims):
                raise TypeError(f"{name} must be a DTensor as query is, got {type(tensor).__name__}")
            if name in DIFFERENTIABLE:
                return tensor
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if gathers_heads and name in ("key", "value"):
            dims = [None if dim == HEADS else dim for dim in dims]
        wanted = [Replicate() if dim is None else Shard(dim) for dim in dims]
        # Ranks that share a tensor, but not the query, each compute their part of its gradient.
        grads = [
            Partial() if dim is None and to != Replicate() else at for dim, to, at in zip(dims, placements, wanted, strict=True)
        ]
        return tensor.redistribute(placements=wanted).to_local(grad_placements=grads)

    own = AttentionTensors(**{name: local(name, tensor) for name, tensor in tensors._asdict().items() if tensor is not None})
    if gathers_heads:
        own_heads = range(heads)
        for dim in head_dims:
            sizes = chunk_sizes(len(own_heads), mesh.size(dim))
            rank = mesh.get_local_rank(dim)
            own_heads = own_heads[sum(sizes[:rank]) : sum(sizes[: rank + 1])]
        own = with_key_heads(own, own_heads, heads // key_heads)
    query_layout, key_layout = (
        rank_layout(layout, chunk_sizes(tensor.shape[2], mesh.size(mesh_dim))) for tensor in (query, tensors.key)
    )
    out, lse = attend(own, spec, implementation, mesh.get_group(mesh_dim), query_layout, key_layout, method, return_lse)
    shape = (*query.shape[:3], tensors.value.shape[3])
    out = new_dtensor(out, mesh, placements, shape)
    return out, new_dtensor(lse, mesh, placements, shape[:3]) if return_lse else lse


def spread_positions(tensors: Sequence[torch.Tensor], mesh: Any) -> tuple[DTensor, ...]:
    """Return (B, H, N, width) tensors, of which each rank has its positions, as DTensors. Wrong sizes are an error on all
    ranks."""
    ranks = gather_sizes([tensor.shape[2] for tensor in tensors], tensors[0].device, mesh.get_group())
    dtensors = []
    for tensor, *sizes in zip(tensors, *ranks, strict=True):
        total = sum(sizes)
        if (expected := chunk_sizes(total, mesh.size())) != sizes:
            raise ValueError(
                f"of {total} positions the ranks must have {expected}, as a DTensor is cut, got {sizes}; "
                "distributed.fused_relative_attention takes any numbers"
            )
        shape = (*tensor.shape[:2], total, tensor.shape[3])
        dtensors.append(new_dtensor(tensor, mesh, (Shard(POSITIONS),), shape))
    return tuple(dtensors)


def new_dtensor(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """Return the DTensor of this shape of which the rank has a tensor."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def with_key_heads(tensors: AttentionTensors, heads: range, sharing: int) -> AttentionTensors:
    """Select the heads of key and value that these query heads share: a key head twice if the range cuts its query heads."""
    step = math.gcd(sharing, heads.start, heads.stop)
    index = torch.tensor([head // sharing for head in heads[::step]], dtype=torch.int64, device=tensors.key.device)
    return tensors._replace(key=tensors.key.index_select(1, index), value=tensors.value.index_select(1, index))


def chunk_sizes(total: int, size: int) -> list[int]:
    """Return how many positions each rank has of a DTensor, which is cut as ``torch.chunk`` cuts."""
    chunk = -(-total // size)
    return [max(min(total - rank * chunk, chunk), 0) for rank in range(size)]

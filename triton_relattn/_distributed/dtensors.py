"""Calls whose tensors are DTensors, of which one mesh dimension shards the positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors, is_per_head
from .._implementations import Implementation
from .._operators.sharding import keeps_groups
from .collectives import gathered
from .exchange import attend, check_heads

DIMS: dict[str, tuple[int | None, int | None, int | None]] = {
    **dict.fromkeys(("query", "key", "value", "rel_query"), (0, 1, 2)),
    "dropout_origins": (0, 1, None),
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
    implementation: Implementation,
    *,
    method: str = "gather",
    layout: str = "contiguous",
    return_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse as DTensors, placed as query is.

    Gradients of tables come as partial sums, which DTensor adds up; that of a plain table, which all ranks have, stays the rank's
    part. Plain masks, lengths and offsets are those of the whole call. Heads of the key that the ranks do not divide are
    gathered, and each rank takes those of its heads of the query.

    Raises:
        ValueError: placements of query other than positions by one mesh dimension, and batch, heads or nothing by others; with
            "all_to_all", heads that the ranks do not divide.
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
    heads, key_heads = tensors.query.shape[1], tensors.key.shape[1]
    by_heads = [dim for dim, placement in enumerate(placements) if placement == Shard(1)]
    ranks_of_heads = math.prod([mesh.size(dim) for dim in by_heads])
    if method == "all_to_all":  # here, since some ranks may have heads that theirs divide
        check_heads(heads, key_heads, ranks_of_heads * mesh.size(*sharded))
    gathers_keys = not keeps_groups(heads, key_heads, ranks_of_heads)

    def local(name: str, tensor: Any) -> Any:
        dims = dict(zip(kinds, _dims(name, tensor), strict=True))
        if not isinstance(tensor, DTensor):
            is_learned = name in DIFFERENTIABLE
            if is_learned and any(dims.get(each) is not None for each in placements):
                raise TypeError(f"{name} must be a DTensor as query is, got {type(tensor).__name__}")
            if is_learned:
                return tensor
            tensor = DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)
        if name in ("key", "value") and gathers_keys:
            dims[Shard(1)] = None
        by_dim = [dims.get(each) for each in placements]
        wanted = [Replicate() if dim is None else Shard(dim) for dim in by_dim]
        of_gradient = [
            Partial() if isinstance(to, Replicate) and not isinstance(each, Replicate) else to
            for to, each in zip(wanted, placements, strict=True)
        ]
        return tensor.redistribute(placements=wanted).to_local(grad_placements=of_gradient)

    given: dict[str, Any] = {name: each for name, each in tensors._asdict().items() if each is not None}
    own = AttentionTensors(**{name: local(name, each) for name, each in given.items()})
    if gathers_keys:
        its_heads = range(heads)
        for each in by_heads:
            its_heads = _chunk(its_heads, mesh.size(each), mesh.get_local_rank(each))
        own = _with_keys_of(own, its_heads, heads // key_heads)
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
    spread_lse = _spread(lse, mesh, placements, shape[:3]) if return_lse else lse
    return _spread(out, mesh, placements, shape), spread_lse


def spread_positions(tensors: Sequence[torch.Tensor], mesh: Any) -> tuple[DTensor, ...]:
    """Return (B, H, N, width) tensors, of which each rank has its positions, as DTensors.

    Raises:
        ValueError: on all ranks, if they have other numbers of positions than a DTensor's shards.
    """
    every = gathered([tensor.shape[2] for tensor in tensors], tensors[0].device, mesh.get_group())
    found = []
    for tensor, *sizes in zip(tensors, *every, strict=True):
        total = sum(sizes)
        if (expected := _chunks(total, mesh.size())) != sizes:
            raise ValueError(
                f"of {total} positions the ranks must have {expected}, as a DTensor is cut, got {sizes}; "
                "distributed.fused_relative_attention takes any numbers"
            )
        found.append(_spread(tensor, mesh, (Shard(2),), (*tensor.shape[:2], total, tensor.shape[3])))
    return tuple(found)


def _spread(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: tuple[int, ...]) -> DTensor:
    """The DTensor of this shape of which the rank has a tensor."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _with_keys_of(tensors: AttentionTensors, heads: range, sharing: int) -> AttentionTensors:
    """The tensors with the heads of key and value that these heads of the query share, each for as many of them.

    A head of the key is there again if the range cuts its heads of the query into parts of their own.
    """
    each_for = math.gcd(sharing, heads.start, heads.stop)
    wanted = [head // sharing for head in heads[::each_for]]
    index = torch.tensor(wanted, dtype=torch.int64, device=tensors.key.device)
    return tensors._replace(key=tensors.key.index_select(1, index), value=tensors.value.index_select(1, index))


def _chunk(indices: range, size: int, rank: int) -> range:
    """A rank's part of a dimension of a DTensor."""
    chunks = _chunks(len(indices), size)
    start = sum(chunks[:rank])
    return indices[start : start + chunks[rank]]


def _chunks(total: int, size: int) -> list[int]:
    """How many positions each rank has of a DTensor, which is cut as ``torch.chunk`` cuts."""
    each = -(-total // size)
    return [max(min(total - rank * each, each), 0) for rank in range(size)]

"""Sharding of the operators by batch and by heads, for ``torch.distributed.tensor.DTensor``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._core.dropout import draw_seed, origins_of
from .._core.dtypes import compute_dtype
from .._core.grids import GridTensors
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionTensors, is_per_head
from .._implementations import IMPLEMENTATIONS
from . import OPERATORS

_NUM_TENSORS, _NUM_GRADIENTS = len(AttentionTensors._fields), len(DIFFERENTIABLE)
_GRID_TENSORS = len(GridTensors._fields)


def shards_positions(query: torch.Tensor) -> bool:
    """Return whether query is a DTensor whose positions are sharded, which _distributed computes, and no operator alone."""
    return any(getattr(placement, "dim", None) == 2 for placement in getattr(query, "placements", ()))


def keeps_groups(heads: int, key_heads: int, size: int) -> bool:
    """Return whether so many ranks that share the heads each have, as a DTensor is cut, the key heads of their query heads."""
    return heads == key_heads or key_heads % size == 0


def widened(table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a table in the compute dtype of query; the gradient of a DTensor is added up over shards before it is rounded."""
    wide: Any = table.to(compute_dtype(query.dtype))
    if wide is table or not hasattr(table, "placements"):
        return wide  # type: ignore[no-any-return]
    return wide.redistribute(placements=table.placements)  # type: ignore[no-any-return]


def with_wide_tables(tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call with tables that are DTensors widened."""
    given = {name: getattr(tensors, name) for name in TABLES}
    tables = {name: widened(table, tensors.query) for name, table in given.items() if hasattr(table, "placements")}
    return tensors._replace(**tables)


def draw_dropout(query: torch.Tensor, num_sequences: int) -> dict[str, torch.Tensor]:
    """Draw dropout_seed for a call; of DTensors also return dropout_origins, to be cut as query is.

    All ranks of a mesh have the largest of their seeds, so that replicas stay replicas; it is that of one process if their
    generators are in the same state.
    """
    seed = draw_seed(query.device)
    if not hasattr(query, "placements"):
        return {"dropout_seed": seed}
    from torch.distributed.tensor import DTensor, Partial, Replicate

    mesh: Any = query.device_mesh  # type: ignore[attr-defined]
    alike = [Replicate()] * mesh.ndim
    for dim in range(mesh.ndim):  # distribute_tensor, which sends what the first rank has, cannot be traced (torch 2.13)
        differs = [*alike[:dim], Partial("max"), *alike[dim + 1 :]]
        spread: Any = DTensor.from_local(seed, mesh, differs, run_check=False).redistribute(placements=alike)
        seed = spread.to_local()
    origins = origins_of(num_sequences, query.shape[1], seed.device)
    seed, origins = (DTensor.from_local(each, mesh, alike, run_check=False) for each in (seed, origins))
    return {"dropout_seed": seed, "dropout_origins": origins}


def register() -> None:
    """Register sharding strategies with DTensor. Each mesh dimension may replicate everything, or shard the batch, or the heads.

    Gradients of tables that the shards share are partial sums, which DTensor adds up. Packed batches are sharded by heads only.
    Grouped heads are sharded only if the mesh divides the heads of the key, so that these stay with their heads of the query.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.experimental import register_sharding

    def by_batch(tensors: AttentionTensors) -> dict[str, Any]:
        """Return the placement of each tensor if the batch is sharded."""
        placements: dict[str, Any] = dict.fromkeys(AttentionTensors._fields, Replicate())
        placements |= dict.fromkeys(
            ("query", "key", "value", "rel_query", "key_lengths", "query_offsets", "dropout_origins"), Shard(0)
        )
        if tensors.attn_mask is not None and tensors.attn_mask.shape[0] > 1:
            placements["attn_mask"] = Shard(0)
        return placements

    def by_heads(tensors: AttentionTensors) -> dict[str, Any]:
        """Return the placement of each tensor if the heads are sharded."""
        placements: dict[str, Any] = dict.fromkeys(AttentionTensors._fields, Replicate())
        placements |= dict.fromkeys(("query", "key", "value", "rel_query", "dropout_origins"), Shard(1))
        for name in TABLES:
            table = getattr(tensors, name)
            if table is not None and is_per_head(name, table):
                placements[name] = Shard(0)
        if tensors.attn_mask is not None and tensors.attn_mask.shape[1] > 1:
            placements["attn_mask"] = Shard(1)
        return placements

    def kinds(tensors: AttentionTensors) -> list[tuple[Any, dict[str, Any]]]:
        """Return the placement of the results and those of the tensors, for each way to distribute a call."""
        found: list[tuple[Any, dict[str, Any]]] = [(Replicate(), dict.fromkeys(AttentionTensors._fields, Replicate()))]
        if tensors.cu_seqlens_q is None:
            found.append((Shard(0), by_batch(tensors)))
        mesh: Any = tensors.query.mesh  # type: ignore[attr-defined]
        if keeps_groups(tensors.query.shape[1], tensors.key.shape[1], mesh.size()):
            found.append((Shard(1), by_heads(tensors)))
        return found

    def of_tensors(tensors: AttentionTensors, placements: dict[str, Any]) -> list[Any]:
        return [None if tensor is None else placements[name] for name, tensor in tensors._asdict().items()]

    def forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, others = AttentionTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
        ways = []
        for result, placements in kinds(tensors):
            name, keeps = others[-2:]
            has_statistics = IMPLEMENTATIONS[name].saves_statistics
            results = [result, result, result if has_statistics else Replicate(), result if keeps else Replicate()]
            ways.append((results, [*of_tensors(tensors, placements), *(None for _ in others)]))
        return ways

    def backward(
        d_out: Any, d_lse: Any, out: Any, lse: Any, softmax_stats: Any, kept: Any, *arguments: Any
    ) -> list[tuple[list[Any], list[Any]]]:
        tensors, others = AttentionTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
        wanted = others[-1]
        ways = []
        for result, placements in kinds(tensors):
            gradients = []
            for name, want in zip(DIFFERENTIABLE, wanted, strict=True):
                placement = placements[name]
                is_sum = name in TABLES and isinstance(placement, Replicate) and not isinstance(result, Replicate)
                has_gradient = want and getattr(tensors, name) is not None
                gradients.append(Replicate() if not has_gradient else Partial() if is_sum else placement)
            saved = [None if tensor is None else result for tensor in (d_out, d_lse, out, lse, softmax_stats, kept)]
            ways.append((gradients, [*saved, *of_tensors(tensors, placements), *(None for _ in others)]))
        return ways

    def on_grid(tensors: GridTensors) -> list[tuple[Any, list[Any]]]:
        """Return the placement of results and those of the tensors, for each way to distribute a call on a grid."""
        ways: list[Any] = [Replicate(), Shard(0), Shard(1)]
        if tensors.dropout_seed is None:
            return [(way, [way, way, way, Replicate(), Replicate(), None, None]) for way in ways]
        return [(way, [way, way, way, *[Replicate()] * 3, way]) for way in ways]

    def grid_forward(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, others = GridTensors(*arguments[:_GRID_TENSORS]), arguments[_GRID_TENSORS:]
        has_statistics = IMPLEMENTATIONS[others[-1]].saves_statistics
        return [
            ([way, way if has_statistics else Replicate()], [*placements, *(None for _ in others)])
            for way, placements in on_grid(tensors)
        ]

    def grid_backward(d_out: Any, out: Any, softmax_stats: Any, *arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        tensors, others = GridTensors(*arguments[:_GRID_TENSORS]), arguments[_GRID_TENSORS:]
        wanted, ways = others[-1], []
        for way, placements in on_grid(tensors):
            of_results = [way, None if out is None else way, Replicate() if out is None else way]
            of_tables = way if isinstance(way, Replicate) else Partial()
            gradients = [
                placement if want else Replicate()
                for placement, want in zip((way, way, way, of_tables, of_tables), wanted, strict=True)
            ]
            ways.append((gradients, [*of_results, *placements, *(None for _ in others)]))
        return ways

    strategies: dict[Any, Callable[..., Any]] = {
        OPERATORS.attention_forward.default: forward,
        OPERATORS.attention_backward.default: backward,
        OPERATORS.grid_attention_forward.default: grid_forward,
        OPERATORS.grid_attention_backward.default: grid_backward,
    }
    for operator, strategy in strategies.items():
        register_sharding(operator)(strategy)

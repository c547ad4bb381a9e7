"""Context parallelism: attention over a sequence whose positions are spread over the ranks of a process group.

fused_relative_attention          of the rank's queries over the keys of all ranks
fused_relative_attention_varlen   the same for a pack of sequences, cut anywhere
shard, unshard                    a rank's positions of a tensor, and the whole tensor again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ._core import validation
from ._core.arguments import Arguments, Options, OptionsVarlen
from ._core.dropout import draw_dropout
from ._core.names import require_names
from ._core.spec import TABLES, AttentionSpec, AttentionTensors
from ._implementations import choose_implementation
from ._ranks import (
    Layout,
    SummedGradients,
    attend,
    cut,
    gather_sizes,
    group_name,
    join,
    num_positions,
    rank_layout,
    zigzag,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fused_relative_attention", "fused_relative_attention_varlen", "shard", "unshard"]
METHODS = ("gather", "all_to_all")


def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    method: Literal["gather", "all_to_all"] = "gather",
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    shard_sizes: Sequence[int] | None = None,
    key_shard_sizes: Sequence[int] | None = None,
    reduce_tables: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Any:
    """:func:`triton_relattn.fused_relative_attention` of the rank's queries over the keys of all ranks.

    Every rank of the group makes the same call, with its own positions of query, key, value and rel_query; results are those of
    its queries. Memory of each rank is linear in its queries, in the keys of all ranks, and in the rows of the tables, which all
    ranks have whole.

    Args:
        query: (B, Hq, the rank's queries, D). key: (B, Hk, the rank's keys, D). value, rel_query: likewise.
        group: a process group or a DeviceMesh of one dimension; None: the default group.
        method: ``"gather"``: each rank gets the keys and values of all. ``"all_to_all"``: ranks exchange positions for heads,
            whose number they must divide, attend and exchange back: less is sent and kept, and each rank computes with whole
            sequences.
        layout: which positions a rank has, as :func:`shard` cuts them. ``"contiguous"``: any number, behind those of the rank
            before. ``"zigzag"``: a piece of the first half and the one that mirrors it in the second: with a causal mask, ranks
            then have equal work.
        shard_sizes: how many queries each rank has; key_shard_sizes: keys, by default as many. If not given, ranks tell each
            other at every call, for which the host waits (in torch.compile all have as many instead).
        reduce_tables: add up the gradients of tables over the ranks, so that each has that of the whole. False: each has the part
            of its queries (with ``"all_to_all"``, of its heads), for DDP and FSDP2, which add up those of all parameters.
        options: of :func:`triton_relattn.fused_relative_attention`; query_offset, window_size, is_causal and key_lengths count
            the positions of all ranks. attn_mask: (.., the rank's queries or 1, the keys of all ranks in their order or 1).
        implementation: as there.

    Returns:
        out (B, Hq, the rank's queries, Dv), with return_lse also lse (B, Hq, the rank's queries).
        The same as of one process but for rounding; repeatable. Dropout drops what one process drops if torch's generators of all
        ranks are in the same state.

    Raises:
        ValueError, TypeError, NotImplementedError: as there; sizes that the layout does not have; heads that the ranks do not
            divide.
        RuntimeError: a rank has gone, or the group's timeout is over; from torch.distributed.

    Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024 (gathered keys); Brandon et al., "Striped Attention", 2023
    (balance); Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    require_names("fused_relative_attention", options, Options.__annotations__)
    arguments = Arguments(query, key, value, rel_key, **options, return_lse=return_lse)
    sizes = shard_sizes, key_shard_sizes
    out, lse = _attend(arguments, group, method, layout, sizes, reduce_tables, implementation)
    return (out, lse) if return_lse else out


def fused_relative_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    method: Literal["gather", "all_to_all"] = "gather",
    layout: Literal["contiguous", "zigzag"] = "contiguous",
    shard_sizes: Sequence[int] | None = None,
    key_shard_sizes: Sequence[int] | None = None,
    reduce_tables: bool = True,
    return_lse: bool = False,
    implementation: str | None = None,
    **options: Any,
) -> Any:
    """:func:`triton_relattn.fused_relative_attention_varlen` of a pack that is cut over the ranks anywhere.

    Args:
        query: (the rank's queries, Hq, D). key: (the rank's keys, Hk, D). value, rel_query: likewise.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: of the whole pack, on every rank. One tensor for both says that
            queries and keys are packed alike, so that a rank computes with no more keys than its sequences have.

    The others are those of :func:`fused_relative_attention`, of this module.

    Returns:
        out (the rank's queries, Hq, Dv), with return_lse also lse (Hq, the rank's queries).
    """
    require_names("fused_relative_attention_varlen", options, OptionsVarlen.__annotations__)
    arguments = Arguments(
        query,
        key,
        value,
        rel_key,
        **options,
        return_lse=return_lse,
        is_packed=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    sizes = shard_sizes, key_shard_sizes
    out, lse = _attend(arguments, group, method, layout, sizes, reduce_tables, implementation)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def shard(
    tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous"
) -> torch.Tensor:
    """Return the rank's positions of a whole tensor: contiguous as ``torch.tensor_split`` cuts it, or those of a zigzag.

    Example:
        >>> tokens = shard(tokens, 1, layout="zigzag")  # (B, N) to (B, about N / ranks) # doctest: +SKIP
    """
    _, rank, size = _process_group(group)
    total = tensor.shape[dim]
    even = [total // size + (number < total % size) for number in range(size)]
    ranks = zigzag(total, size) if layout == "zigzag" else rank_layout(layout, even)
    return cut(tensor, ranks[rank], dim)


def unshard(
    tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous"
) -> torch.Tensor:
    """Return the whole of a tensor that :func:`shard` has cut, on every rank. Not differentiable."""
    process_group, _, _ = _process_group(group)
    own = tensor.detach().movedim(dim, 0)
    sizes = [size for (size,) in gather_sizes((own.shape[0],), own.device, process_group)]
    padded = own.new_zeros(max(sizes), *own.shape[1:])  # gloo gathers only what is of one size
    padded[: own.shape[0]] = own
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=process_group)
    shards = [shard[:size] for shard, size in zip(gathered, sizes, strict=True)]
    return join(shards, rank_layout(layout, sizes), 0).movedim(0, dim)


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[Any, int, int]:
    """Return the process group, the rank in it, and its size."""
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if not hasattr(group, "get_group"):
            raise TypeError(f"group must be a ProcessGroup, a DeviceMesh or None, got {type(group).__name__}")
        if group.ndim != 1:
            raise ValueError(f"group must be a DeviceMesh of one dimension, got {group.ndim}; mesh[name] is one of several")
        group = group.get_group()
    group = dist.group.WORLD if group is None else group
    if group is None:
        raise ValueError("there is no default process group; call torch.distributed.init_process_group, or pass one")
    return group, dist.get_rank(group), dist.get_world_size(group)


def _rank_sizes(
    arguments: Arguments, group: Any, shard_sizes: Sequence[int] | None, key_shard_sizes: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """Return how many queries and keys each rank has."""
    _, rank, size = _process_group(group)
    dim = 0 if arguments.is_packed else 2
    own = [
        tensor.shape[dim] if isinstance(tensor, torch.Tensor) and tensor.dim() > dim else 0  # else resolve raises, on all ranks
        for tensor in (arguments.query, arguments.key)
    ]
    if shard_sizes is None:
        if key_shard_sizes is not None:
            raise ValueError("key_shard_sizes needs shard_sizes, the number of queries of each rank")
        ranks = gather_sizes(own, arguments.query.device, group)
        return [num_queries for num_queries, _ in ranks], [num_keys for _, num_keys in ranks]
    queries, keys = list(shard_sizes), list(shard_sizes if key_shard_sizes is None else key_shard_sizes)
    for name, sizes, has in (("shard_sizes", queries, own[0]), ("key_shard_sizes", keys, own[1])):
        if len(sizes) != size or sizes[rank] != has:
            raise ValueError(f"{name} must have one number per rank ({size} ranks), {has} for rank {rank}, got {sizes}")
    return queries, keys


def _resolve(arguments: Arguments, queries: Layout, keys: Layout) -> tuple[AttentionTensors, AttentionSpec]:
    """Check the call as one of the whole sequence, by tensors without memory in its shape; return it with the rank's own."""
    given, packed = arguments._asdict(), arguments.is_packed
    dim, rank = (0, 3) if packed else (2, 4)
    num_queries, num_keys = (sum(map(num_positions, layout)) for layout in (queries, keys))
    totals = {"query": num_queries, "key": num_keys, "value": num_keys, "rel_query": num_queries}
    whole: dict[str, Any] = {}
    for name, total in totals.items():
        tensor = given[name]
        if isinstance(tensor, torch.Tensor) and tensor.dim() == rank:
            shape = (*tensor.shape[:dim], total, *tensor.shape[dim + 1 :])
            whole[name] = tensor.new_empty((1,) * rank).expand(shape)
    for name, other in (("value", "key"), ("rel_query", "query")):
        if {name, other} <= whole.keys() and given[name].shape[dim] != given[other].shape[dim]:
            raise ValueError(f"{name} must have {other}'s {given[other].shape[dim]} positions, got {given[name].shape[dim]}")
    mask = given["attn_mask"]
    if isinstance(mask, torch.Tensor) and mask.dim() > 1 and mask.shape[-2] != 1 and "query" in whole:
        if mask.shape[-2] != arguments.query.shape[2]:
            has = arguments.query.shape[2]
            raise ValueError(f"attn_mask must have one row per query of the rank ({has}), or one row, got {mask.shape[-2]}")
        # Its values are not looked at: all of a bool mask is shown, and numbers are 0.
        stand_in = mask.new_full((), mask.dtype == torch.bool).expand(*mask.shape[:-2], num_queries, mask.shape[-1])
        whole["attn_mask"] = stand_in.requires_grad_(mask.requires_grad)
    tensors, spec = validation.resolve(arguments._replace(**whole))
    local = {name: given[name] for name in totals if given[name] is not None}
    if packed:
        local = {name: tensor.transpose(0, 1)[None] for name, tensor in local.items()}
    if "attn_mask" in whole:
        local["attn_mask"] = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return tensors._replace(**local), spec


def _attend(
    arguments: Arguments,
    group: Any,
    method: str,
    layout: str,
    shard_sizes: tuple[Sequence[int] | None, Sequence[int] | None],
    reduce_tables: bool,
    implementation: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of a call by its arguments."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    if hasattr(arguments.query, "placements"):
        raise TypeError(
            "query is a DTensor; here each rank passes its own positions, query.to_local(), with the group mesh.get_group(), and "
            "triton_relattn.fused_relative_attention takes DTensors that are sharded by batch or by heads"
        )
    arguments = arguments.autocast()
    group, _, _ = _process_group(group)
    queries, keys = (rank_layout(layout, sizes) for sizes in _rank_sizes(arguments, group, *shard_sizes))
    tensors, spec = _resolve(arguments, queries, keys)
    chosen = choose_implementation(implementation, tensors.query, tensors.value, tensors.rel_query)
    if spec.dropout_p > 0:
        tensors = tensors._replace(**draw_dropout(tensors.query, tensors.num_sequences))
    tables = {name: getattr(tensors, name) for name in TABLES if getattr(tensors, name) is not None}
    tables = {name: table for name, table in tables.items() if table.requires_grad}
    if reduce_tables and tables and torch.is_grad_enabled():
        summed = SummedGradients.apply(group_name(group), *tables.values())
        tensors = tensors._replace(**dict(zip(tables, summed, strict=True)))
    return attend(tensors, spec, chosen, group, queries, keys, method, arguments.return_lse)

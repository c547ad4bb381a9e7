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
from torch.distributed.tensor import DTensor

from ._core import removed, validation
from ._core.arguments import Arguments, Options, OptionsVarlen
from ._core.names import require_names
from ._core.spec import TABLES, AttentionSpec, AttentionTensors
from ._distributed.collectives import SummedGradients, gathered, name_of
from ._distributed.dtensors import attend_dtensors
from ._distributed.exchange import METHODS, attend
from ._distributed.sharding import Sharding, zigzag
from ._implementations import choose_implementation
from ._operators.sharding import draw_dropout, with_wide_tables

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["fused_relative_attention", "fused_relative_attention_varlen", "shard", "unshard"]


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
        query: (B, Hq, the rank's queries, D). key: (B, Hk, the rank's keys, D). value, rel_query: likewise. Or DTensors whose
            positions one mesh dimension shards, ``Shard(2)``, and others the batch, the heads or nothing: group, shard_sizes and
            reduce_tables do not count then, and tables are DTensors, too.
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
        out (B, Hq, the rank's queries, Dv), with return_lse also lse (B, Hq, the rank's queries); DTensors if query is.
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
    given = Arguments(query, key, value, rel_key, **options)
    sizes, others = (shard_sizes, key_shard_sizes), {"method": method, "layout": layout, "return_lse": return_lse}
    out, lse = _attend(given, group, reduce_tables, sizes, implementation, **others)
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

    The others are those of :func:`fused_relative_attention`, of this module, without DTensors.

    Returns:
        out (the rank's queries, Hq, Dv), with return_lse also lse (Hq, the rank's queries).
    """
    require_names("fused_relative_attention_varlen", options, OptionsVarlen.__annotations__)
    given = Arguments(
        query,
        key,
        value,
        rel_key,
        **options,
        is_packed=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    sizes, others = (shard_sizes, key_shard_sizes), {"method": method, "layout": layout, "return_lse": return_lse}
    out, lse = _attend(given, group, reduce_tables, sizes, implementation, **others)
    out = out[0].transpose(0, 1)
    return (out, lse[0]) if return_lse else out


def shard(
    tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous"
) -> torch.Tensor:
    """Return the rank's positions of a whole tensor: contiguous as ``torch.tensor_split`` cuts it, or those of a zigzag.

    Example:
        >>> tokens = shard(tokens, 1, layout="zigzag")  # (B, N) to (B, about N / ranks) # doctest: +SKIP
    """
    _, rank, size = _of_group(group)
    sharding = _even(tensor.shape[dim], size, layout)
    parts = [tensor.narrow(dim, piece.positions.start, len(piece.positions)) for piece in sharding.pieces[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def unshard(
    tensor: torch.Tensor, dim: int, group: dist.ProcessGroup | DeviceMesh | None = None, layout: str = "contiguous"
) -> torch.Tensor:
    """Return the whole of a tensor that :func:`shard` has cut, on every rank. Not differentiable."""
    process_group, _, size = _of_group(group)
    mine = tensor.detach().movedim(dim, 0).contiguous()
    sizes = gathered((mine.shape[0],), mine.device, process_group)
    sharding = Sharding.of(layout, [each for (each,) in sizes])
    shards = [mine.new_empty(sharding.size(each), *mine.shape[1:]) for each in range(size)]
    # One broadcast each: gloo gathers only what is of one size.
    for each, part in enumerate(shards):
        if each == dist.get_rank(process_group):
            part.copy_(mine)
        if part.numel():
            dist.broadcast(part, group=process_group, group_src=each)
    return torch.cat([piece.of(shards[each], 0) for each, piece in sharding.in_order()]).movedim(0, dim)


def _even(total: int, size: int, layout: str) -> Sharding:
    """The sharding of so many positions over so many ranks that :func:`shard` makes."""
    if layout == "zigzag":
        return Sharding(tuple(zigzag(total, size)))
    return Sharding.of(layout, [total // size + (rank < total % size) for rank in range(size)])


def _of_group(group: dist.ProcessGroup | DeviceMesh | None) -> tuple[Any, int, int]:
    """The process group, the rank in it, and its size."""
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


def _sizes(
    query: torch.Tensor, key: torch.Tensor, dim: int, group: Any, given: Sequence[int] | None, given_keys: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    """How many queries and keys each rank has."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rank_has = [tensor.shape[dim] if isinstance(tensor, torch.Tensor) and tensor.dim() > dim else 0 for tensor in (query, key)]
    if given is None and given_keys is not None:
        raise ValueError("key_shard_sizes needs shard_sizes, the number of queries of each rank")
    if given is None:
        every = gathered(rank_has, query.device, group)
        queries, keys = ([each[which] for each in every] for which in (0, 1))
        return queries, keys
    queries, keys = list(given), list(given if given_keys is None else given_keys)
    for name, sizes, has in (("shard_sizes", queries, rank_has[0]), ("key_shard_sizes", keys, rank_has[1])):
        if len(sizes) != size or sizes[rank] != has:
            raise ValueError(f"{name} must have one number per rank ({size} ranks), {has} for rank {rank}, got {sizes}")
    return queries, keys


def _resolved(arguments: Arguments, queries: Sharding, keys: Sharding) -> tuple[AttentionTensors, AttentionSpec]:
    """Check the call as one of the whole sequence, by tensors without memory in its shape; return it with the rank's own."""
    given, packed = arguments._asdict(), arguments.is_packed
    dim, rank = (0, 3) if packed else (2, 4)
    totals = {"query": queries.total, "key": keys.total, "value": keys.total, "rel_query": queries.total}
    whole: dict[str, Any] = {}
    for name, total in totals.items():
        tensor = given.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() == rank:
            shape = (*tensor.shape[:dim], total, *tensor.shape[dim + 1 :])
            whole[name] = tensor.new_empty((1,) * rank).expand(shape)
    for name, other in (("value", "key"), ("rel_query", "query")):
        if {name, other} <= whole.keys() and given[name].shape[dim] != given[other].shape[dim]:
            raise ValueError(f"{name} must have {other}'s {given[other].shape[dim]} positions, got {given[name].shape[dim]}")
    own = given.get("attn_mask")
    if isinstance(own, torch.Tensor) and own.dim() > 1 and own.shape[-2] != 1 and "query" in whole:
        num_queries = given["query"].shape[2]
        if own.shape[-2] != num_queries:
            raise ValueError(
                f"attn_mask must have one row per query of the rank ({num_queries}), or one row, got {own.shape[-2]}"
            )
        stand_in = own.new_ones(()).expand(*own.shape[:-2], queries.total, own.shape[-1])
        whole["attn_mask"] = stand_in.requires_grad_(own.requires_grad)
    tensors, spec = validation.resolve(arguments._replace(**whole))
    local = {name: given[name] for name in totals if given.get(name) is not None}
    if packed:
        local = {name: tensor.transpose(0, 1)[None] for name, tensor in local.items()}
    if own is not None and "attn_mask" in whole:
        local["attn_mask"] = own.reshape((1,) * (4 - own.dim()) + tuple(own.shape))
    return tensors._replace(**local), spec


def _attend(
    arguments: Arguments,
    group: Any,
    reduce_tables: bool,
    shard_sizes: tuple[Sequence[int] | None, Sequence[int] | None],
    implementation: str | None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call by its arguments. others: method, layout and return_lse."""
    if others["method"] not in METHODS:
        name = others["method"]
        hint = f"; {removed.removed('it', removed.METHODS[name])}" if name in removed.METHODS else ""
        raise ValueError(f"method must be one of {tuple(METHODS)}, got {name!r}{hint}")
    arguments = arguments.autocast()._replace(return_lse=others["return_lse"])
    is_spread = isinstance(arguments.query, DTensor)
    if is_spread:
        tensors, spec = validation.resolve(arguments)
    else:
        process_group, _, _ = _of_group(group)
        dim = 0 if arguments.is_packed else 2
        sizes = _sizes(arguments.query, arguments.key, dim, process_group, *shard_sizes)
        tensors, spec = _resolved(arguments, *(Sharding.of(others["layout"], each) for each in sizes))
    chosen = choose_implementation(implementation, tensors.query, tensors.value, tensors.rel_query)
    if spec.dropout_p > 0:
        tensors = tensors._replace(**draw_dropout(tensors.query, tensors.num_sequences))
    if is_spread:
        return attend_dtensors(with_wide_tables(tensors), spec, chosen, **others)
    if reduce_tables:
        tensors = _with_summed_gradients(tensors, process_group)
    return attend(tensors, spec, chosen, process_group, sizes=sizes, **others)


def _with_summed_gradients(tensors: AttentionTensors, group: Any) -> AttentionTensors:
    learned = {name: getattr(tensors, name) for name in TABLES if getattr(tensors, name) is not None}
    learned = {name: table for name, table in learned.items() if table.requires_grad}
    if not learned or not torch.is_grad_enabled():
        return tensors
    summed = SummedGradients.apply(name_of(group), *learned.values())
    return tensors._replace(**dict(zip(learned, summed, strict=True)))

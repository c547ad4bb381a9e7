"""Attention over a sequence whose positions the ranks of a process group share.

gather: each rank gets the keys and values of all, and attends with its queries.
all_to_all (DeepSpeed-Ulysses): ranks exchange positions for heads, attend to whole sequences, and exchange back.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor

from ._core.dropout import whole_origins
from ._core.dtypes import compute_dtype
from ._core.spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from ._core.warn import untraced
from ._implementations import Implementation
from ._operators import NAMESPACE, OPERATORS, relative_attention

Layout: TypeAlias = list[list[range]]  # the ranges of positions that each rank has, in the order in which it has them
LAYOUTS = ("contiguous", "zigzag")


def rank_layout(layout: str, sizes: Sequence[int]) -> Layout:
    """Return the layout of a sequence of which the ranks have so many positions; ValueError if it cannot have these sizes.
    "contiguous": a range of any size each, in the order of the ranks."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if layout == "contiguous":
        return [[range(stop - size, stop)] for size, stop in zip(sizes, accumulate(sizes), strict=True)]
    ranks = zigzag(sum(sizes), len(sizes))
    expected = [num_positions(ranges) for ranges in ranks]
    if list(sizes) != expected:
        raise ValueError(f"in a zigzag, the ranks have {expected} of {sum(sizes)} positions, got {list(sizes)}")
    return ranks


def zigzag(total: int, size: int) -> Layout:
    """Return the layout in which rank r has pieces r and 2 * size - 1 - r, of equal size: equal work under a causal mask."""
    starts = [number * total // (2 * size) for number in range(2 * size + 1)]
    pieces = [range(start, stop) for start, stop in pairwise(starts)]
    return [[pieces[rank], pieces[-1 - rank]] for rank in range(size)]


def num_positions(ranges: list[range]) -> int:
    """Return how many positions a rank has."""
    return sum(map(len, ranges))


def join(shards: Sequence[torch.Tensor], layout: Layout, dim: int) -> torch.Tensor:
    """Return the whole of a tensor of which each rank has its shard: in the order of positions."""
    pieces: list[tuple[int, torch.Tensor]] = []
    for shard, ranges in zip(shards, layout, strict=True):
        pieces += zip([piece.start for piece in ranges], shard.split(list(map(len, ranges)), dim), strict=True)
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)


def cut(tensor: torch.Tensor, ranges: list[range], dim: int) -> torch.Tensor:
    """Return a rank's shard of a whole tensor."""
    pieces = [tensor.narrow(dim, piece.start, len(piece)) for piece in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


# Messages. Those of tensors are opaque operators: they have arrived when the operator returns. torch's own functional collectives
# return before that, and its fallback for vmap, or for batched gradients, reads what has not arrived (torch 2.13).


@untraced
def group_name(group: Any) -> str:
    """Return the name by which operators know a process group."""
    return group.group_name  # type: ignore[no-any-return]


def gather_sizes(sizes: Sequence[int], device: torch.device, group: Any) -> list[list[int]]:
    """Return the sizes of every rank, for which the host waits. In torch.compile all ranks are taken to have the same."""
    num_ranks = dist.get_world_size(group)
    if num_ranks == 1 or torch.compiler.is_compiling():
        return [list(sizes)] * num_ranks
    own = torch.tensor(sizes, device=device)
    gathered = [torch.empty_like(own) for _ in range(num_ranks)]
    dist.all_gather(gathered, own, group=group)
    return torch.stack(gathered).tolist()  # type: ignore[no-any-return]


torch.library.define(f"{NAMESPACE}::exchange", "(Tensor message, SymInt[] arriving, SymInt[] leaving, str group) -> Tensor")
torch.library.define(f"{NAMESPACE}::total", "(Tensor tensor, str group) -> Tensor")


@torch.library.impl(f"{NAMESPACE}::exchange", "CompositeExplicitAutograd")
def _(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Any) -> torch.Tensor:
    return wait_tensor(all_to_all_single(message.contiguous(), list(arriving), list(leaving), group))


@torch.library.register_fake(f"{NAMESPACE}::exchange")
def _(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str) -> torch.Tensor:
    return message.new_empty(sum(arriving))


@torch.library.impl(f"{NAMESPACE}::total", "CompositeExplicitAutograd")
def _(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return wait_tensor(all_reduce(tensor, "sum", group))


@torch.library.register_fake(f"{NAMESPACE}::total")
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


class Exchange(torch.autograd.Function):
    """A message of which each rank gets a part, for one from each rank. arriving, leaving: numbers of elements by rank."""

    generate_vmap_rule = True

    @staticmethod
    def forward(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str) -> Any:
        return OPERATORS.exchange(message, arriving, leaving, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.arriving, ctx.leaving, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Exchange.apply(gradient, ctx.leaving, ctx.arriving, ctx.group), None, None, None


class SummedGradients(torch.autograd.Function):
    """Tables in the compute dtype; in the backward the sums of their gradients over all ranks, in one message, rounded once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(group: str, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(table.view_as(table).to(compute_dtype(table.dtype)) for table in tables)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group, *tables = inputs
        ctx.dtypes = [table.dtype for table in tables]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        message = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sums = OPERATORS.total(message, ctx.group).split([gradient.numel() for gradient in gradients])
        shaped = (total.view(gradient.shape) for total, gradient in zip(sums, gradients, strict=True))
        return None, *(total.to(dtype) for total, dtype in zip(shaped, ctx.dtypes, strict=True))


def exchange(tensors: list[torch.Tensor], layouts: list[Layout], group: Any) -> list[torch.Tensor]:
    """Send tensors[i][r], (B, H, own positions, width), to each rank r, all in one message; return what has come from all ranks,
    (B, H, all positions, width)."""
    size = len(layouts[0])
    shapes = [
        (*tensor.shape[1:3], num_positions(layout[source]), tensor.shape[4])
        for source in range(size)
        for tensor, layout in zip(tensors, layouts, strict=True)
    ]
    message = torch.cat([tensor.flatten(1) for tensor in tensors], 1)  # (ranks, elements)
    elements = list(map(math.prod, shapes))
    arriving = [sum(elements[source * len(tensors) : (source + 1) * len(tensors)]) for source in range(size)]
    received = Exchange.apply(message.flatten(), arriving, [message.shape[1]] * size, group_name(group))
    parts = [part.view(shape) for part, shape in zip(received.split(elements), shapes, strict=True)]
    return [join(parts[number :: len(tensors)], layout, 2) for number, layout in enumerate(layouts)]


def exchange_back(tensor: torch.Tensor, layout: Layout, rank: int, group: Any) -> torch.Tensor:
    """Return (B, H, the rank's positions, width) of (B, the rank's heads, all positions, width)."""
    batch, heads, _, width = tensor.shape
    shards = [cut(tensor, ranges, 2).flatten() for ranges in layout]
    shape = (len(layout), batch, heads, num_positions(layout[rank]), width)
    arriving = [math.prod(shape[1:])] * len(layout)
    received = Exchange.apply(torch.cat(shards), arriving, [shard.numel() for shard in shards], group_name(group))
    return received.view(shape).transpose(0, 1).flatten(1, 2)


# The two methods.


def attend(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: dist.ProcessGroup,
    query_layout: Layout,
    key_layout: Layout,
    method: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse (only with return_lse) of the rank's queries over the keys of all ranks. spec: of the whole call."""
    if tensors.dropout_seed is not None:
        origins = whole_origins(tensors.num_sequences, tensors.query.shape[1], tensors.query.device)
        tensors = tensors._replace(dropout_origins=origins)
    if method == "all_to_all":
        return _attend_with_heads(tensors, spec, implementation, group, query_layout, key_layout, return_lse)
    for_all = [tensor.expand(len(key_layout), *tensor.shape) for tensor in (tensors.key, tensors.value)]
    key, value = exchange(for_all, [key_layout, key_layout], group)
    tensors, row, results = tensors._replace(key=key, value=value), 0, []
    for queries in query_layout[dist.get_rank(group)]:
        call = piece_call(tensors, spec, queries, slice(row, row + len(queries)))
        results.append(relative_attention(*call, implementation, return_lse))
        row += len(queries)
    outs, lses = zip(*results, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _attend_with_heads(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: dist.ProcessGroup,
    query_layout: Layout,
    key_layout: Layout,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to whole sequences with the rank's share of the heads."""
    rank, size = dist.get_rank(group), len(query_layout)
    heads, key_heads, mask = tensors.query.shape[1], tensors.key.shape[1], tensors.attn_mask
    if heads % size or key_heads % size:
        raise ValueError(
            f'method="all_to_all" splits heads evenly, but {heads} query heads and {key_heads} key heads are not divisible by '
            f'{size} ranks; method="gather" takes any number'
        )
    if mask is not None and mask.shape[2] > 1:
        raise ValueError('method="all_to_all" takes an attn_mask that is the same for all queries; method="gather" takes any')

    layouts = {"query": query_layout, "key": key_layout, "value": key_layout, "rel_query": query_layout}
    layouts = {name: layout for name, layout in layouts.items() if getattr(tensors, name) is not None}
    by_heads = [getattr(tensors, name).unflatten(1, (size, -1)).transpose(0, 1) for name in layouts]
    changes = dict(zip(layouts, exchange(by_heads, list(layouts.values()), group), strict=True))
    own = slice(rank * (heads // size), (rank + 1) * (heads // size))
    for name in TABLES:
        table = getattr(tensors, name)
        if table is not None and is_per_head(name, table):
            changes[name] = table[own]
    if mask is not None and mask.shape[1] > 1:
        changes["attn_mask"] = mask[:, own]
    if tensors.dropout_origins is not None:
        changes["dropout_origins"] = tensors.dropout_origins[:, own]
    out, lse = relative_attention(tensors._replace(**changes), spec, implementation, return_lse)
    out = exchange_back(out, query_layout, rank, group)
    return out, exchange_back(lse[..., None], query_layout, rank, group)[..., 0] if return_lse else lse


def visible_keys(tensors: AttentionTensors, spec: AttentionSpec, queries: range) -> range:
    """Return the keys, of all of a call, that any of these queries may see, as far as that is known without reading tensors."""
    first, stop = 0, tensors.key.shape[2]
    starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
    if starts_q is not None and starts_k is not None and starts_q.data_ptr() == starts_k.data_ptr():
        # Alike, so that positions differ in the pack as they do in their sequence.
        first, stop = queries.start - spec.max_seqlen_q + 1, min(stop, queries.stop - 1 + spec.max_seqlen_k)
    if tensors.query_offsets is None and starts_q is None:
        if spec.window_left >= 0:
            first = queries.start + spec.query_offset - spec.window_left
        if spec.window_right >= 0:
            stop = min(stop, queries.stop + spec.query_offset + spec.window_right)
    first = min(max(first, 0), tensors.key.shape[2])
    return range(first, max(first, stop))


def piece_call(
    tensors: AttentionTensors, spec: AttentionSpec, queries: range, rows: slice
) -> tuple[AttentionTensors, AttentionSpec]:
    """Return the call of some of a rank's queries, at these positions of the sequence and in these rows of its tensors. tensors:
    keys, values, lengths, offsets and starts of the whole call; attn_mask of the rank's queries and all keys."""
    keys = visible_keys(tensors, spec, queries)
    between = queries.start - keys.start
    offsets, mask = tensors.query_offsets, tensors.attn_mask
    piece = tensors._replace(
        query=tensors.query[:, :, rows],
        key=tensors.key.narrow(2, keys.start, len(keys)),
        value=tensors.value.narrow(2, keys.start, len(keys)),
        rel_query=None if tensors.rel_query is None else tensors.rel_query[:, :, rows],
    )
    spec = spec._replace(max_seqlen_q=min(spec.max_seqlen_q, len(queries)), max_seqlen_k=min(spec.max_seqlen_k, len(keys)))
    if tensors.cu_seqlens_q is None or tensors.cu_seqlens_k is None:
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, rows]
        if mask is not None and mask.shape[3] > 1:
            mask = mask.narrow(3, keys.start, len(keys))
        lengths = tensors.key_lengths
        piece = piece._replace(
            attn_mask=mask,
            key_lengths=None if lengths is None else (lengths - keys.start).clamp(0, len(keys)),
            query_offsets=None if offsets is None else offsets + between,
        )
        spec = spec._replace(query_offset=spec.query_offset + between if offsets is None else 0)
        first_query, first_key = (torch.full((), part.start, device=piece.key.device) for part in (queries, keys))
    else:
        starts_q, starts_k = tensors.cu_seqlens_q, tensors.cu_seqlens_k
        # A sequence that starts before the piece is entered in its middle, at range.start - start.
        first_query, first_key = (
            (part.start - starts[:-1]).clamp_min(0).minimum(starts.diff())
            for part, starts in ((queries, starts_q), (keys, starts_k))
        )
        piece = piece._replace(
            query_offsets=(spec.query_offset if offsets is None else offsets) + first_query - first_key,
            cu_seqlens_q=starts_q.clamp(queries.start, queries.stop) - queries.start,
            cu_seqlens_k=starts_k.clamp(keys.start, keys.stop) - keys.start,
        )
        spec = spec._replace(query_offset=0)
    if tensors.dropout_origins is not None:
        firsts = torch.nn.functional.pad(torch.stack((first_query, first_key), -1), (2, 0))
        piece = piece._replace(dropout_origins=tensors.dropout_origins + firsts.unsqueeze(-2))
    return piece, spec

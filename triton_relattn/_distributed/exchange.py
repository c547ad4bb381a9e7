"""The two ways to attend over the positions of all ranks.

gather: each rank gets the keys and values of all, and attends with its queries.
all_to_all (DeepSpeed-Ulysses): ranks exchange positions for heads, attend to whole sequences, and exchange back.

Sources: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2; Jacobs et al., "DeepSpeed Ulysses", 2023.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from .._core.dropout import origins_of
from .._core.spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from .._implementations import Implementation
from .._operators import ops
from .collectives import Exchange, name_of
from .sharding import Sharding, call_of_piece


def sent(tensors: list[torch.Tensor], shardings: list[Sharding], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Send each rank what tensors (ranks, B, H, own positions, width) have for it, in one message; return what has come from all
    ranks, in the order of positions, (B, H, all positions, width) each."""
    size = len(shardings[0].pieces)
    sizes = []  # elements of each tensor that come from each rank
    for tensor, sharding in zip(tensors, shardings, strict=True):
        _, batch, heads, _, width = tensor.shape
        sizes.append([batch * heads * sharding.size(source) * width for source in range(size)])
    message = torch.cat([tensor.flatten(1) for tensor in tensors], 1)
    arriving = [sum(each) for each in zip(*sizes, strict=True)]
    received = Exchange.apply(message.flatten(), arriving, [message.shape[1]] * size, name_of(group))
    by_source = [part.split(list(each)) for part, *each in zip(received.split(arriving), *sizes, strict=True)]
    found = []
    for number, (tensor, sharding) in enumerate(zip(tensors, shardings, strict=True)):
        _, batch, heads, _, width = tensor.shape
        shards = [by_source[source][number].view(batch, heads, sharding.size(source), width) for source in range(size)]
        found.append(torch.cat([piece.of(shards[source]) for source, piece in sharding.in_order()], 2))
    return found


def positions_for_heads(tensor: torch.Tensor, sharding: Sharding, rank: int, group: dist.ProcessGroup) -> torch.Tensor:
    """From (B, heads of a rank, all positions, width) back to (B, H, the rank's positions, width)."""
    size = len(sharding.pieces)
    batch, heads, _, width = tensor.shape
    messages = [tensor.narrow(2, piece.positions.start, len(piece.positions)) for pieces in sharding.pieces for piece in pieces]
    per_rank = len(sharding.pieces[0])
    shards = [torch.cat(messages[each * per_rank : (each + 1) * per_rank], 2).flatten() for each in range(size)]
    arriving = batch * heads * sharding.size(rank) * width
    received = Exchange.apply(torch.cat(shards), [arriving] * size, [each.numel() for each in shards], name_of(group))
    return received.view(size, batch, heads, sharding.size(rank), width).transpose(0, 1).flatten(1, 2)


def check_heads(heads: int, key_heads: int, size: int) -> None:
    """Raise a ValueError if the heads cannot be split evenly over the ranks."""
    if heads % size or key_heads % size:
        raise ValueError(
            f'method="all_to_all" splits heads evenly, but {heads} query heads and {key_heads} key heads are not divisible by '
            f'{size} ranks; method="gather" takes any number'
        )


def attend(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: dist.ProcessGroup,
    *,
    sizes: tuple[list[int], list[int]],
    method: str,
    layout: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of the rank's queries over the keys of all ranks, with gradients; lse only with return_lse.

    Args:
        tensors: the rank's. spec: of the whole call.
        sizes: how many queries, and how many keys, each rank has.
    """
    if tensors.dropout_seed is not None and tensors.dropout_origins is None:
        origins = origins_of(tensors.num_sequences, tensors.query.shape[1], tensors.query.device)
        tensors = tensors._replace(dropout_origins=origins)
    queries, keys = (Sharding.of(layout, each) for each in sizes)
    return METHODS[method](tensors, spec, implementation, group, queries, keys, return_lse)


def gather(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: dist.ProcessGroup,
    queries: Sharding,
    keys: Sharding,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with each piece of the rank's queries to all keys that it may see."""
    size = len(keys.pieces)
    for_all = [each.expand(size, *each.shape) for each in (tensors.key, tensors.value)]
    key, value = sent(for_all, [keys, keys], group)
    pieces = queries.pieces[dist.get_rank(group)]
    calls = [call_of_piece(tensors._replace(key=key, value=value), spec, piece) for piece in pieces]
    outs, lses = zip(*(ops.relative_attention(*call, implementation) for call in calls), strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def all_to_all(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: dist.ProcessGroup,
    queries: Sharding,
    keys: Sharding,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to whole sequences with the rank's share of the heads.

    Raises:
        ValueError: the ranks do not divide the heads, or a mask has rows, of which each rank would need all.
    """
    rank, size = dist.get_rank(group), len(queries.pieces)
    heads = tensors.query.shape[1]
    check_heads(heads, tensors.key.shape[1], size)
    mask = tensors.attn_mask
    if mask is not None and mask.shape[2] > 1:
        raise ValueError('method="all_to_all" takes an attn_mask that is the same for all queries; method="gather" takes any')

    own = slice(rank * (heads // size), (rank + 1) * (heads // size))
    given = {"query": queries, "key": keys, "value": keys, "rel_query": queries}
    moved = {name: sharding for name, sharding in given.items() if getattr(tensors, name) is not None}
    by_heads = [getattr(tensors, name).unflatten(1, (size, -1)).transpose(0, 1) for name in moved]
    whole = sent(by_heads, list(moved.values()), group)
    changed = dict(zip(moved, whole, strict=True))
    for name in TABLES:
        table = getattr(tensors, name)
        if table is not None and is_per_head(name, table):
            changed[name] = table[own]
    if mask is not None and mask.shape[1] > 1:
        changed["attn_mask"] = mask[:, own]
    if tensors.dropout_origins is not None:
        changed["dropout_origins"] = tensors.dropout_origins[:, own]
    out, lse = ops.relative_attention(tensors._replace(**changed), spec, implementation)
    out = positions_for_heads(out, queries, rank, group)
    return out, positions_for_heads(lse[..., None], queries, rank, group)[..., 0] if return_lse else lse


METHODS = {"gather": gather, "all_to_all": all_to_all}

"""One checked call, by the method that is asked for."""

from __future__ import annotations

from typing import Any

import torch

from .._core.dropout import origins_of
from .._core.spec import AttentionSpec, AttentionTensors
from .._implementations import Implementation
from .collectives import name_of
from .exchange import all_to_all_attention
from .ops import RingCall, ring_attention
from .sharding import Sharding

METHODS = ("ring", "all_to_all")


def attend(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: Implementation,
    group: Any,
    *,
    sizes: tuple[list[int], list[int]],
    method: str,
    layout: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the rank's queries over the keys of all ranks; lse only with return_lse.

    Args:
        tensors: the rank's; spec: of the whole call.
        sizes: how many queries, and how many keys, each rank has.

    Raises:
        NotImplementedError: a ring of "reference".
    """
    if tensors.dropout_seed is not None and tensors.dropout_origins is None:
        origins = origins_of(tensors.num_sequences, tensors.query.shape[1], tensors.query.device)
        tensors = tensors._replace(dropout_origins=origins)
    if method == "all_to_all":
        queries, keys = (Sharding.of(layout, each) for each in sizes)
        return all_to_all_attention(tensors, spec, implementation, group, queries, keys, return_lse)
    if implementation.is_dense:
        raise NotImplementedError('implementation="reference" computes with all keys at once; method="all_to_all" has it')
    return ring_attention(tensors, spec, RingCall(implementation.name, name_of(group), layout, *sizes))

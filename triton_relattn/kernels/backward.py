"""The backward: the order of its kernels, of which those run that the wanted gradients need.

1. delta: rowsum(out * d_out) - d_lse of each query.
2. dkv: dK and dV; with them dS = P * (dP - delta), and for rel_value P, of all pairs of some heads, to the workspace.
3. dq: dQ from dS, its product with the keys and, along the diagonals, with the table.
4. dtable: the gradients of the tables from dS and P along the diagonals. dp2c: that of rel_p2c.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._core.dtypes import gradient_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bwd_dkv import launch_dkv
from .bwd_dp2c import launch_dp2c
from .bwd_dq import launch_dq
from .bwd_dtable import launch_dtable
from .call import (
    Call,
    PerQuery,
    aligned,
    contiguous,
    strided,
    with_aligned_operands,
    with_positive_scale,
)
from .config import selection
from .config.fitting import until_it_fits
from .delta import launch_delta
from .far_keys import launch_far_keys
from .workspace import planning, table_sums


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_stats: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Sequence[bool] = (True,) * len(DIFFERENTIABLE),
    tiles: Mapping[str, selection.TileConfig] | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensors that spec.DIFFERENTIABLE names; None for those that are not wanted or not there.

    Memory beyond the gradients:

    - One float32 for each query. With clamped tables four more for rel_key and rel_bias, and four for rel_value; at the end a
      float32 copy of query for the gradient of rel_key, and of d_out for that of rel_value.
    - float32 sums for the gradient of the query, if not all pairs of a head are in the workspace at once.
    - Each table's gradient in float32, once for each of the programs that share its sum (selection.table_splits). Not if one
      program computes all of it.
    - A workspace: 2 bytes (4 with float32 inputs) for each pair of a query and a key, and as many more with
      rel_value, of as many heads or keys at a time as fit into TRITON_RELATTN_WORKSPACE bytes. If that is not set, the limit is
      256 MiB, or as much as query, key and value take, or what keeps the GPU busy (planning.limit): linear in the length.

    Args:
        d_lse: None for zeros.
        softmax_stats: as the forward returns them.
        tiles: configurations by the names of kernels, in place of the selected ones.
        residual: as the forward returns it with keeps_residual.
    """
    given_rel_query, scale_is_negative = tensors.rel_query, spec.scale < 0
    tensors, spec = with_positive_scale(tensors, spec)
    wants = dict(zip(DIFFERENTIABLE, wanted, strict=True))
    has_two_roles = given_rel_query is None and tensors.rel_query is not None
    if has_two_roles:
        wants["rel_query"] = wants["query"]
    results = _backward(d_out, d_lse, out, softmax_stats, tensors, spec, wants, tiles, residual)
    gradients = dict(zip(DIFFERENTIABLE, results, strict=True))
    if (d_query := gradients["query"]) is not None:
        if scale_is_negative:
            d_query.neg_()
        if has_two_roles:
            d_query += gradients["rel_query"]
    if has_two_roles:
        gradients["rel_query"] = None
    return tuple(gradients.values())


@until_it_fits
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_stats: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wants: Mapping[str, bool],
    tiles: Mapping[str, selection.TileConfig] | None,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Compute what backward returns, for a positive scale and a query whose two roles need no separate sums."""
    gradients: dict[str, torch.Tensor | None] = {}
    for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False):
        if tensor is None or not wants[name]:
            gradients[name] = None
        else:
            gradients[name] = gradient_like(tensor)
    query = tensors.query
    entries, heads, seqlen_q, _ = query.shape
    if entries * heads * seqlen_q * tensors.key.shape[2] == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in gradients.values())

    tensors, d_out, d_lse = with_aligned_operands(tensors), aligned(d_out), contiguous(d_lse)
    call = Call(tensors, spec, (out, d_out))
    launch_far_keys(call, tensors.key)
    kernels = ("dkv", "dq", "dtable", *["dp2c"] * (tensors.rel_p2c is not None))
    tiles = {kernel: call.tile(kernel, (tiles or {}).get(kernel)) for kernel in kernels}
    is_wanted = {name: gradient is not None for name, gradient in gradients.items()}
    is_clamped, has_rows = call.coverage == "clamp", tensors.rel_key is not None or tensors.rel_bias is not None
    wants_query = is_wanted["query"] or is_wanted["rel_query"]
    wants_rows = is_wanted["rel_key"] or is_wanted["rel_bias"]
    plan, ds, probs = planning.allocated(
        call,
        tensors,
        spec,
        tiles,
        selection.multiprocessors(query.device),
        wants_query or wants_rows or is_wanted["rel_p2c"],
        is_wanted["rel_value"],
    )
    new = query.new_empty if tensors.cu_seqlens_q is None and plan.has_whole_heads else query.new_zeros

    def sides(exist: bool, length: int) -> torch.Tensor | None:
        """Allocate two numbers of each query or key, of the pairs before and behind a clamped table."""
        return new((entries, heads, 2, length), dtype=torch.float32) if is_clamped and exist else None

    # 1. delta, and what keys beyond a clamped table add to scores and dP
    far_scores, far_values = sides(has_rows, seqlen_q), sides(tensors.rel_value is not None, seqlen_q)
    far_key_sums = sides(is_wanted["rel_p2c"], tensors.key.shape[2])
    deltas = query.new_empty(entries, heads, seqlen_q, dtype=torch.float32)
    per_query = PerQuery(*map(strided, (softmax_stats, deltas, far_scores, far_values, far_key_sums)))
    launch_delta(call, out, residual, d_out, d_lse, per_query)

    far_sums = sides(wants_rows or (tensors.rel_key is not None and wants_query), seqlen_q)
    far_probs = sides(is_wanted["rel_value"], seqlen_q)
    of_query = {name: gradients[name] for name in ("query", "rel_query")}
    if not plan.has_whole_heads:  # parts of a sum
        of_query = {n: None if each is None else torch.zeros_like(each, dtype=torch.float32) for n, each in of_query.items()}
    sums = None
    if any(is_wanted[name] for name in TABLES):
        sums = table_sums.TableSums(call, tensors, spec, gradients, tiles, plan)
    for part in plan.parts:  # always in this order, so that sums repeat
        # 2. dK and dV; dS and P to the workspace
        launch_dkv(call, tiles["dkv"], per_query, d_out, gradients["key"], gradients["value"], ds, probs, plan, part)
        # 3. dQ
        if wants_query or far_sums is not None:
            launch_dq(call, tiles["dq"], ds, of_query["query"], of_query["rel_query"], far_sums, plan, part)
        if far_probs is not None:
            launch_dq(call, tiles["dq"], probs, None, None, far_probs, plan, part)
        # 4. the tables
        if wants_rows:
            launch_dtable(call, tiles["dtable"], call.rel_query, ds, sums, plan, part, of_values=False)
        if probs is not None:
            launch_dtable(call, tiles["dtable"], d_out, probs, sums, plan, part, of_values=True)
        if is_wanted["rel_p2c"]:
            launch_dp2c(call, tiles["dp2c"], ds, sums, plan, part)
    if sums is not None:
        sums.add_up(tensors.key, d_out, far_sums, far_probs, far_key_sums)
    for name, total in of_query.items():
        if total is not None and total is not gradients[name]:
            gradients[name].copy_(total)
    return tuple(gradients.values())

"""Launcher of the backward: it runs those kernels that the wanted gradients need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._core.dtypes import gradient_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bwd_dkv import launch_dkv
from .bwd_dp2c import launch_dp2c
from .bwd_dq import launch_dq
from .bwd_dq_from_ds import launch_dq_from_ds
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

    - One float32 for each query. With clamped tables four more for rel_key and rel_bias, and four for rel_value.
    - Each table's gradient in float32, once for each of the programs that share its sum (selection.table_splits). Not if one
      program computes all of it.
    - With tables a workspace: 2 bytes (4 with float32 inputs) for each pair of a query and a key, and as many more with
      rel_value, of as many heads or keys at a time as fit into TRITON_RELATTN_WORKSPACE bytes. If that is not set, the limit is
      256 MiB, or as much as query, key and value take, or what keeps the GPU busy (planning.limit): linear in the length.

    Args:
        d_lse: None for zeros.
        softmax_stats: as the forward returns them.
        tiles: configurations by the names of kernels, in place of the selected ones.
        residual: as the forward returns it with keeps_residual.
    """
    query, given_rel_query, scale_is_negative = tensors.query, tensors.rel_query, spec.scale < 0
    tensors, spec = with_positive_scale(tensors, spec)
    # With one sum for both roles of the query, dS is multiplied by the ratio of the scales, which float16 may not hold.
    may_overflow = query.dtype == torch.float16 and abs(spec.rel_scale) > abs(spec.scale)
    if may_overflow and tensors.rel_key is not None and tensors.rel_query is None:
        tensors = tensors._replace(rel_query=query)
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
    kernels = ("dq", "dkv", "dtable", "dq_from_ds", *["dp2c"] * (tensors.rel_p2c is not None))
    tiles = {kernel: call.tile(kernel, (tiles or {}).get(kernel)) for kernel in kernels}
    wants = {name: gradient is not None for name, gradient in gradients.items()}
    (plan, query_from_ds), ds, probs = planning.allocated(
        call, tensors, spec, tiles, selection.multiprocessors(query.device), residual is not None, wants
    )

    far = _far_sums(call, tensors)
    deltas = query.new_empty(entries, heads, seqlen_q, dtype=torch.float32)
    far_key_sums = None
    if call.inputs.far_keys is not None and gradients["rel_p2c"] is not None:
        far_key_sums = query.new_zeros(entries, heads, 2, tensors.key.shape[2], dtype=torch.float32)
    per_query = PerQuery(*map(strided, (softmax_stats, deltas, *far, far_key_sums)))
    of_values = ("value", "rel_value")  # they need no delta, only the dq kernel's terms and sums of far keys
    needs_far = (far[0] is not None and gradients["value"] is not None) or (
        far[3] is not None and gradients["rel_value"] is not None
    )
    d_query, d_rel_query = gradients["query"], gradients["rel_query"]
    wants_query = d_query is not None or d_rel_query is not None
    if needs_far or any(gradient is not None for name, gradient in gradients.items() if name not in of_values):
        if query_from_ds:
            launch_delta(out, residual, d_out, d_lse, deltas, call.shape.block_dv)
        elif spec.exact_query_grad and wants_query:
            launch_dq(call, tiles["dq"], per_query, out, d_out, d_lse, None, None)
            launch_dq(call, tiles["dq"], per_query, None, d_out, d_lse, d_query, d_rel_query)
        else:
            launch_dq(call, tiles["dq"], per_query, out, d_out, d_lse, d_query, d_rel_query)

    sums = None
    if plan is not None and any(gradients[name] is not None for name in TABLES):
        sums = table_sums.TableSums(call, tensors, spec, gradients, tiles, plan)
    of_keys = (call, tiles["dkv"], per_query, d_out, gradients["key"], gradients["value"], plan)
    if ds is None and probs is None:
        if gradients["key"] is not None or gradients["value"] is not None:
            launch_dkv(*of_keys)
    else:
        for part in plan.parts:  # always in this order, so that sums repeat
            launch_dkv(*of_keys, ds, probs, part)
            if gradients["rel_key"] is not None or gradients["rel_bias"] is not None:
                launch_dtable(call, tiles["dtable"], call.rel_query, ds, sums, plan, part, of_values=False)
            if probs is not None:
                launch_dtable(call, tiles["dtable"], d_out, probs, sums, plan, part, of_values=True)
            if query_from_ds and wants_query:
                launch_dq_from_ds(call, tiles["dq_from_ds"], ds, d_query, d_rel_query, plan, part)
            if gradients["rel_p2c"] is not None:
                launch_dp2c(call, tiles["dp2c"], ds, sums, plan, part)
    if sums is not None:
        sums.add_far(tensors.key, d_out, far[2], far[3], far_key_sums)
        sums.add_up()
    return tuple(gradients.values())


def _far_sums(call: Call, tensors: AttentionTensors) -> list[torch.Tensor | None]:
    """Allocate far_scores, far_values, far_sums and far_kept of PerQuery; None for those that a call does not have."""
    query = tensors.query
    new = query.new_empty if tensors.cu_seqlens_q is None else query.new_zeros  # rows outside all sequences are summed, too
    of_scores = tensors.rel_key is not None or tensors.rel_bias is not None
    exist = (of_scores, tensors.rel_value is not None, of_scores, tensors.rel_value is not None)
    shape = (*query.shape[:2], 2, query.shape[2])
    return [new(shape, dtype=torch.float32) if call.coverage == "clamp" and each else None for each in exist]

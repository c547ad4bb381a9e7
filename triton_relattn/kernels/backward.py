"""The backward: the order of its kernels, of which those run that the wanted gradients need. minimal_backward.py has the idea.

1. delta: rowsum(out * d_out) - d_lse of each query.
2. dkv: dK and dV; with them dS = P * (dP - delta), and for rel_value P, of the pairs of some heads that a table has a row for, to
   the workspace.
3. stored_dq: dQ from dS, its product with the keys and, along the diagonals, with the table.
4. dtable: the gradients of the tables from dS and P along the diagonals. dp2c: that of rel_p2c.
5. dq, unless a table has a row for every pair: recomputes dS, for its product with the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .._core.dtypes import gradient_like
from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .bwd_dkv import dkv_kernel
from .bwd_dp2c import dp2c_kernel
from .bwd_dq import dq_kernel
from .bwd_dtable import dtable_kernel
from .bwd_stored_dq import stored_dq_kernel
from .call import Call, PerQuery, cdiv
from .config.selection import until_it_fits
from .config.tile_config import TileConfig
from .delta import CONFIG, delta_kernel, launch_far_keys
from .operands import aligned, contiguous, strided, with_aligned_operands, with_positive_scale
from .workspace import planning
from .workspace.stored import query_step
from .workspace.table_sums import TableSums


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_stats: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    needs_grad: Sequence[bool] = (True,) * len(DIFFERENTIABLE),
    tiles: Mapping[str, TileConfig] | None = None,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of the tensors that spec.DIFFERENTIABLE names; None for those that are not needed or not there.

    Memory beyond the gradients:

    - One float32 for each query. With clamped tables four more for rel_key and rel_bias, and four for rel_value; at the end a
      float32 copy of query for the gradient of rel_key, and of d_out for that of rel_value.
    - float32 sums for the gradient of the query, if not all pairs of a head are in the workspace at once, and for what a table
      without a row for every pair adds to it.
    - Each table's gradient in float32, once for each of the programs that share its sum (table_splits). Not if one
      program computes all of it.
    - A workspace: 2 bytes (4 with float32 inputs) per pair of a query and a key that a table has a row for, and twice
      that with rel_value; for all heads at once or some heads or keys at a time, within TRITON_RELATTN_WORKSPACE bytes. If that
      is not set, the limit is the most of 256 MiB, the size of query, key and value, and what keeps the GPU busy
      (planning.plan): linear in the length.

    d_lse: None for zeros. softmax_stats, residual: the forward's. tiles: configurations by kernel, in place of the selected ones.
    """
    had_rel_query, scale_is_negative = tensors.rel_query is not None, spec.scale < 0
    tensors, spec = with_positive_scale(tensors, spec)
    needs = dict(zip(DIFFERENTIABLE, needs_grad, strict=True))
    has_two_roles = not had_rel_query and tensors.rel_query is not None
    if has_two_roles:
        needs["rel_query"] = needs["query"]
    results = _backward(d_out, d_lse, out, softmax_stats, tensors, spec, needs, tiles, residual)
    gradients = dict(zip(DIFFERENTIABLE, results, strict=True))
    if (d_query := gradients["query"]) is not None:
        if scale_is_negative:
            d_query.neg_()
        if has_two_roles:
            d_query += gradients["rel_query"]
    if has_two_roles:
        gradients["rel_query"] = None
    return tuple(gradients.values())


@functools.lru_cache(maxsize=1024)
def shortened(tile: TileConfig, num_queries: int, step: int) -> TileConfig:
    """Return the tile of a kernel that reads dS, whose queries lie a step from each other, without halves that have no query."""
    block_m = tile.block_m
    while block_m > 16 and block_m // 2 * step >= num_queries:
        block_m //= 2
    return tile if block_m == tile.block_m else replace(tile, block_m=block_m)


@until_it_fits
def _backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    out: torch.Tensor | None,
    softmax_stats: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    needs: Mapping[str, bool],
    tiles: Mapping[str, TileConfig] | None,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Compute what backward returns, for a positive scale and a query whose two roles need no separate sums."""
    gradients: dict[str, torch.Tensor | None] = {}
    for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False):
        gradients[name] = gradient_like(tensor) if tensor is not None and needs[name] else None
    query, key = tensors.query, tensors.key
    entries, heads, num_queries, _ = query.shape
    if entries * heads * num_queries * key.shape[2] == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in gradients.values())

    # Which kernels run, in which tiles; the workspace
    tensors, d_out, d_lse = with_aligned_operands(tensors), aligned(d_out), contiguous(d_lse)
    call = Call(tensors, spec, (out, d_out))
    launch_far_keys(call, tensors.key)
    recomputes_ds = call.coverage != "full"  # in dq_kernel; the workspace has only pairs near the table
    kernels = ["dkv", "stored_dq", "dtable"] + ["dp2c"] * (tensors.rel_p2c is not None) + ["dq"] * recomputes_ds
    tiles = {kernel: call.tile(kernel, (tiles or {}).get(kernel)) for kernel in kernels}
    step = query_step(8 * query.element_size())
    tiles |= {kernel: shortened(tiles[kernel], spec.max_seqlen_q, step) for kernel in ("stored_dq", "dtable")}
    needed = {name for name, gradient in gradients.items() if gradient is not None}
    query_gradients, needs_rows = needed & {"query", "rel_query"}, bool(needed & {"rel_key", "rel_bias"})
    meets_table = "query" if tensors.rel_query is None else "rel_query"
    # The tensors whose gradient, or the table's part of it, stored_dq_kernel computes
    from_stored = query_gradients
    if recomputes_ds:
        from_stored = query_gradients & {meets_table} if tensors.rel_key is not None else set()
    needs_ds = bool(from_stored) or needs_rows or "rel_p2c" in needed
    plan, ds, probs = planning.allocated(call, tensors, spec, tiles["dkv"], needs_ds, "rel_value" in needed)

    new = query.new_empty if tensors.cu_seqlens_q is None and plan.has_whole_heads else query.new_zeros
    is_clamped, has_rows = call.coverage == "clamp", tensors.rel_key is not None or tensors.rel_bias is not None

    def new_past_future(exist: bool, length: int) -> torch.Tensor | None:
        """Allocate (B, H, 2, N): two numbers of each query or key, of the pairs before and behind a clamped table."""
        return new((entries, heads, 2, length), dtype=torch.float32) if is_clamped and exist else None

    # 1. delta [B, H, Nq], and what keys beyond a clamped table add to scores and dP
    far_scores, far_values = new_past_future(has_rows, num_queries), new_past_future(tensors.rel_value is not None, num_queries)
    far_key_sums = new_past_future("rel_p2c" in needed, key.shape[2])
    deltas = query.new_empty(entries, heads, num_queries, dtype=torch.float32)
    per_query = PerQuery(*map(strided, (softmax_stats, deltas, far_scores, far_values, far_key_sums)))
    call.launch(
        "delta",
        delta_kernel,
        CONFIG,
        (cdiv(num_queries, CONFIG.block_m) * entries * heads,),
        outs=strided(out),
        residuals=strided(residual),
        d_outs=strided(d_out),
        d_lses=strided(d_lse),
        per_query=per_query,
        num_queries=num_queries,
    )

    far_sums = new_past_future(needs_rows, num_queries)
    far_probs = new_past_future("rel_value" in needed, num_queries)
    stored_dq = {name: gradients[name] for name in from_stored}
    if recomputes_ds or not plan.has_whole_heads:  # more is added
        stored_dq = {name: new(gradients[name].shape, dtype=torch.float32) for name in from_stored}
    sums = TableSums(call, tensors, spec, gradients, tiles, plan) if needed.intersection(TABLES) else None

    def launch_dtable(vectors: torch.Tensor, stored: torch.Tensor | None, for_values: bool) -> None:
        call.launch(
            "dtable",
            dtable_kernel,
            tiles["dtable"],
            sums.grid,
            vectors=strided(vectors),
            stored=strided(stored),
            d_rows=sums.partial("rel_value" if for_values else "rel_key"),
            d_biases=None if for_values else sums.partial("rel_bias"),
            FOR_VALUES=for_values,
            PER_HEAD=sums.per_head,
            ADDS=sums.adds,
            **stored_part,
        )

    for part in plan.parts:  # always in this order, so that sums repeat
        stored_part = {**part._asdict(), "LAYOUT": plan.layout}
        # 2. dK and dV of a part of the keys; dS and P of their pairs, to the workspace
        call.launch(
            "dkv",
            dkv_kernel,
            tiles["dkv"],
            (part.stop_program - part.first_program,),
            d_outs=strided(d_out),
            d_keys=strided(gradients["key"]),
            d_values=strided(gradients["value"]),
            per_query=per_query,
            ds=strided(ds),
            stored_probs=strided(probs),
            first_program=part.first_program,
            LAYOUT=plan.layout,
        )
        # 3. dQ from dS, or the table's part of it
        if from_stored:
            query_blocks = cdiv(spec.max_seqlen_q, tiles["stored_dq"].block_m * step) * step
            call.launch(
                "stored_dq",
                stored_dq_kernel,
                tiles["stored_dq"],
                (query_blocks * plan.num_batch_heads(part),),
                stored=strided(ds),
                d_queries=strided(stored_dq.get("query")),
                d_rel_queries=strided(stored_dq.get("rel_query")),
                ADDS=not plan.has_whole_heads,
                **stored_part,
            )
        # 4. The tables: rel_key and rel_bias from dS and the queries, rel_value from P and d_out, rel_p2c from dS and the keys
        if needs_rows:
            launch_dtable(call.rel_query, ds, for_values=False)
        if "rel_value" in needed:
            launch_dtable(d_out, probs, for_values=True)
        if "rel_p2c" in needed:
            call.launch(
                "dp2c",
                dp2c_kernel,
                tiles["dp2c"],
                sums.key_grid(tiles["dp2c"].block_m),
                stored=strided(ds),
                d_rel_p2c=sums.partial("rel_p2c"),
                PER_HEAD=sums.per_head,
                ADDS=sums.adds,
                **stored_part,
            )
    # 5. dQ from recomputed dS; of keys beyond a clamped table sums of dS and P
    if recomputes_ds and (query_gradients or far_sums is not None or far_probs is not None):
        d_query = gradients["query"]
        call.launch(
            "dq",
            dq_kernel,
            tiles["dq"],
            (cdiv(spec.max_seqlen_q, tiles["dq"].block_m) * call.num_sequences * heads,),
            d_outs=strided(d_out),
            d_queries=strided(gradient_like(query) if d_query is None else d_query),
            d_rel_queries=strided(gradients["rel_query"]),
            table_parts=strided(stored_dq.get(meets_table)),
            far_sums=strided(far_sums),
            far_probs=strided(far_probs),
            per_query=per_query,
        )
    if sums is not None:
        sums.add_up(tensors.key, d_out, far_sums, far_probs, far_key_sums)
    if not recomputes_ds:
        for name, total in stored_dq.items():
            if total is not gradients[name]:
                gradients[name].copy_(total)
    return tuple(gradients.values())

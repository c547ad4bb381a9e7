"""The backward: the order of its kernels, of which those run that the wanted gradients need. minimal_backward.py has the idea.

1. delta: rowsum(out * d_out) - d_lse of each query.
2. dkv: dK and dV; with them dS = P * (dP - delta), and for rel_value P, of the pairs of some heads that a table has a row for, to
   the workspace.
3. stored_dq: dQ from dS, its product with the keys and, along the diagonals, with the table.
4. dtable: the gradients of the tables from dS and P along the diagonals. dp2c: that of rel_p2c.
5. dq, unless a table has a row for every pair: recomputes dS, for its product with the keys.
6. table_gradient, where a table's gradient is a sum of several programs' sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from .._core.spec import DIFFERENTIABLE, TABLES, AttentionSpec, AttentionTensors
from .._core.warn import warn
from .bwd_dkv import dkv_kernel
from .bwd_dp2c import dp2c_kernel
from .bwd_dq import EndRows, dq_kernel
from .bwd_dtable import dtable_kernel
from .bwd_stored_dq import stored_dq_kernel
from .call import Call, PerQuery, aligned, cdiv, with_aligned_operands, with_positive_scale
from .config.tile_config import TileConfig
from .delta import CONFIG, delta_kernel, launch_far_keys
from .draft import Draft, Slot, strided
from .plan import Key, Template, find
from .table_gradient import TableSums
from .workspace import planning
from .workspace.stored import query_step


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

    - One float32 per query. With clamped tables two more for rel_key and rel_bias, and two for rel_value.
    - float32 sums for the gradient of the query, if not all pairs of a head are in the workspace at once, and for what a table
      without a row for every pair adds to it.
    - Each table's gradient in float32, once for each of the programs that share its sum (table_splits). Not if one
      program computes all of it. With clamped tables two rows per block of queries.
    - A workspace: 2 bytes (4 with float32 inputs) per pair of a query and a key that a table has a row for, and twice
      that with rel_value; for all heads at once or some heads or keys at a time, within TRITON_RELATTN_WORKSPACE bytes. If that
      is not set, the limit is the most of 256 MiB, the size of query, key and value, and what keeps the GPU busy
      (planning.workspace): linear in the length.

    d_lse: None for zeros. softmax_stats, residual: the forward's. tiles: configurations by kernel, in place of the selected ones.
    If torch has no memory for the workspace, a smaller one is used, with a warning, since sums have other last bits then.
    """
    given = (d_out, d_lse, out, softmax_stats, residual, *tensors)
    options = spec, tuple(needs_grad), frozenset(tiles.items()) if tiles else None
    plan = find(plan_backward, given, (*options, planning.workspace_limit()))
    while True:
        try:
            gradients = plan(*given)
            break
        except torch.OutOfMemoryError as error:
            size = plan.workspace_bytes
            if size == 0:
                raise
            smaller = find(plan_backward, given, (*options, size // 2))
            if smaller.workspace_bytes >= size:
                needed = f"the backward needs a workspace of {size} bytes at least"
                text = f"{needed}, for {spec.max_seqlen_q} queries and one block of keys; {error}"
                raise torch.OutOfMemoryError(text) from error
            plan = smaller
        warn(
            f"no memory for a workspace of {size} bytes; a smaller one is used, with which sums may differ in their last bits. "
            f"{planning.VARIABLE} limits it from the beginning.",
            RuntimeWarning,
        )
    return tuple(gradients)


def shortened(tile: TileConfig, num_queries: int, step: int) -> TileConfig:
    """Return the tile of a kernel that reads dS, whose queries lie a step from each other, without halves that have no query."""
    block_m = tile.block_m
    while block_m > 16 and block_m // 2 * step >= num_queries:
        block_m //= 2
    return replace(tile, block_m=block_m)


def plan_backward(key: Key) -> Template:
    """Decide how to compute what backward returns."""
    draft = Draft(key)
    (d_out, d_lse, out, softmax_stats, residual), tensors = draft.given[:5], AttentionTensors(*draft.given[5:])
    spec, needs_grad, given_tiles, max_bytes = key.options
    assert d_out is not None and softmax_stats is not None
    needs = dict(zip(DIFFERENTIABLE, needs_grad, strict=True))
    gradients = {
        name: draft.new_like(tensor) if tensor is not None and needs[name] else None
        for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False)
    }
    wanted = tuple(gradients.values())
    entries, heads, num_queries, _ = tensors.query.shape
    num_keys = tensors.key.shape[2]
    if entries * heads * num_queries * num_keys == 0:
        for gradient in gradients.values():
            if gradient is not None:
                draft.end(torch.Tensor.zero_, gradient)
        return draft.compile(*wanted)
    # A query that is negated for the kernels, and meets rel_key as it was, has two gradients.
    has_two_roles = spec.scale < 0 and tensors.rel_query is None and tensors.rel_key is not None
    if has_two_roles and needs["query"]:
        gradients["rel_query"] = draft.new_like(tensors.query)
    is_negated = spec.scale < 0 and needs["query"]
    tensors, spec = with_positive_scale(draft, tensors, spec)

    # Which kernels run, in which tiles; the workspace
    query = tensors.query
    tensors, d_out = with_aligned_operands(draft, tensors), aligned(draft, d_out, query.dtype)
    call = Call(draft, tensors, spec, (out, d_out))
    launch_far_keys(call, tensors.key)
    recomputes_ds = call.coverage != "full"  # in dq_kernel; the workspace has only pairs near the table
    kernels = ["dkv", "stored_dq", "dtable"] + ["dp2c"] * (tensors.rel_p2c is not None) + ["dq"] * recomputes_ds
    given = dict(given_tiles or ())
    tiles = {kernel: call.tile(kernel, given.get(kernel)) for kernel in kernels}
    step = query_step(8 * query.element_size())
    tiles |= {kernel: shortened(tiles[kernel], spec.max_seqlen_q, step) for kernel in ("stored_dq", "dtable")}
    needed = {name for name, gradient in gradients.items() if gradient is not None}
    query_gradients, needs_rows = needed & {"query", "rel_query"}, bool(needed & {"rel_key", "rel_bias"})
    meets_table = "query" if tensors.rel_query is None else "rel_query"
    # The tensors whose gradient, or the table's part of it, stored_dq_kernel computes
    from_stored = query_gradients
    if recomputes_ds:
        from_stored = query_gradients & {meets_table} if tensors.rel_key is not None else set()
    needs_ds, needs_probs = bool(from_stored) or needs_rows or "rel_p2c" in needed, "rel_value" in needed
    workspace = planning.workspace(call, tensors, tiles["dkv"], max_bytes)
    if not needs_ds and not needs_probs:  # nothing is stored: all in one part
        all_programs, all_columns = workspace.batch_key_heads * workspace.blocks, workspace.blocks * tiles["dkv"].block_n
        workspace = workspace._replace(step=all_programs, columns=all_columns)
    ds, probs = (draft.temporary(workspace.shape, query.dtype) if needs else None for needs in (needs_ds, needs_probs))
    draft.workspace_bytes = sum(space.numel() * space.element_size() for space in (ds, probs) if space is not None)

    is_clamped, has_rows = call.coverage == "clamp", tensors.rel_key is not None or tensors.rel_bias is not None
    is_packed = tensors.cu_seqlens_q is not None

    # 1. delta [B, H, Nq], and what keys beyond a clamped table add to scores and dP [B, H, 2, Nq], the past and the future
    deltas = draft.temporary((entries, heads, num_queries))
    far_scores, far_values = (
        draft.temporary((entries, heads, 2, num_queries)) if is_clamped and exist else None
        for exist in (has_rows, tensors.rel_value is not None)
    )
    # Blocks that a sequence of a pack does not have stay 0.
    end_rows: dict[str, Slot] = {}
    for name in [name for name in TABLES if is_clamped and name in needed]:
        length, kernel = (spec.max_seqlen_k, "dkv") if name == "rel_p2c" else (spec.max_seqlen_q, "dq")
        blocks = cdiv(length, tiles[kernel].block_n if name == "rel_p2c" else tiles[kernel].block_m)
        width = 1 if name == "rel_bias" else getattr(tensors, name).shape[-1]
        end_rows[name] = draft.temporary((heads, call.num_sequences, blocks, 2, width), zeroed=is_packed)
    stats = draft.contiguous(softmax_stats)  # hooks of saved tensors may change the memory order
    per_query = PerQuery(*map(strided, (stats, deltas, far_scores, far_values, end_rows.get("rel_p2c"))))  # type: ignore[arg-type]
    call.launch(
        "delta",
        delta_kernel,
        CONFIG,
        (cdiv(num_queries, CONFIG.block_m) * entries * heads,),
        outs=strided(out),
        residuals=strided(residual),
        d_outs=d_out.strided,
        d_lses=strided(draft.contiguous(d_lse)),
        per_query=per_query,
        num_queries=num_queries,
    )

    stored_dq = {name: gradients[name] for name in sorted(from_stored)}
    if not recomputes_ds and not workspace.has_whole_heads:  # more is added
        stored_dq = {name: draft.new(slot.shape, torch.float32) for name, slot in stored_dq.items() if slot is not None}
        for name, total in stored_dq.items():
            draft.prepare(torch.Tensor.zero_, total)
            draft.end(torch.Tensor.copy_, gradients[name], total)
    elif recomputes_ds:
        is_partial = not workspace.has_whole_heads
        stored_dq = {name: draft.temporary(slot.shape, zeroed=is_partial) for name, slot in stored_dq.items() if slot is not None}
    sums = TableSums(call, tensors, gradients, tiles, workspace) if needed.intersection(TABLES) else None

    def launch_dtable(vectors: Slot, stored: Slot | None, for_values: bool) -> None:
        assert sums is not None
        call.launch(
            "dtable",
            dtable_kernel,
            tiles["dtable"],
            sums.grid,
            vectors=vectors.strided,
            stored=strided(stored),
            d_rows=sums.partial("rel_value" if for_values else "rel_key"),
            d_biases=None if for_values else sums.partial("rel_bias"),
            FOR_VALUES=for_values,
            PER_HEAD=sums.per_head,
            ADDS=sums.adds,
            **stored_part,
        )

    for part in workspace.parts:  # always in this order, so that sums repeat
        stored_part = {**part._asdict(), "LAYOUT": workspace.layout}
        # 2. dK and dV of a part of the keys; dS and P of their pairs, to the workspace
        call.launch(
            "dkv",
            dkv_kernel,
            tiles["dkv"],
            (part.stop_program - part.first_program,),
            d_outs=d_out.strided,
            d_keys=strided(gradients["key"]),
            d_values=strided(gradients["value"]),
            per_query=per_query,
            ds=strided(ds),
            stored_probs=strided(probs),
            first_program=part.first_program,
            LAYOUT=workspace.layout,
        )
        # 3. dQ from dS, or the table's part of it
        if from_stored:
            query_blocks = cdiv(spec.max_seqlen_q, tiles["stored_dq"].block_m * step) * step
            call.launch(
                "stored_dq",
                stored_dq_kernel,
                tiles["stored_dq"],
                (query_blocks * workspace.num_batch_heads(part),),
                stored=strided(ds),
                d_queries=strided(stored_dq.get("query")),
                d_rel_queries=strided(stored_dq.get("rel_query")),
                ADDS=not workspace.has_whole_heads,
                **stored_part,
            )
        # 4. The tables: rel_key and rel_bias from dS and the queries, rel_value from P and d_out, rel_p2c from dS and the keys
        if needs_rows:
            launch_dtable(call.rel_query, ds, for_values=False)
        if needs_probs:
            launch_dtable(d_out, probs, for_values=True)
        if "rel_p2c" in needed:
            assert sums is not None
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
    # 5. dQ from recomputed dS; of keys beyond a clamped table the end rows' gradients
    from_queries = EndRows(*(strided(end_rows.get(name)) for name in EndRows._fields))
    if recomputes_ds and (query_gradients or any(from_queries)):
        d_query = gradients["query"] or draft.temporary(query.shape, query.dtype)
        call.launch(
            "dq",
            dq_kernel,
            tiles["dq"],
            (cdiv(spec.max_seqlen_q, tiles["dq"].block_m) * call.num_sequences * heads,),
            d_outs=d_out.strided,
            d_queries=d_query.strided,
            d_rel_queries=strided(gradients["rel_query"]),
            table_parts=strided(stored_dq.get(meets_table)),
            end_rows=from_queries,
            per_query=per_query,
        )
    # 6. The tables' gradients from partial sums
    if sums is not None:
        sums.add_up(end_rows)
    if is_negated:
        draft.end(torch.Tensor.neg_, gradients["query"])
        if has_two_roles:
            draft.end(torch.Tensor.add_, gradients["query"], gradients["rel_query"])
    return draft.compile(*wanted)

"""Launcher of the backward: of its kernels, those that the wanted gradients need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from .._core.dtypes import gradient_like
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from . import configs, workspace
from .arguments import LAUNCH_OPTIONS, Call, aligned, cdiv, contiguous, strided, with_aligned_operands, with_positive_scale
from .bwd_columns import columns_kernel
from .bwd_diagonals import diagonals_kernel
from .bwd_rows import rows_kernel
from .bwd_table import table_ends_kernel, table_kernel
from .fitting import until_it_fits
from .walk import clamp_margin


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor | None,
    out: torch.Tensor,
    statistics: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wanted: Sequence[bool] = (True,) * len(DIFFERENTIABLE),
    tiles: Mapping[str, configs.TileConfig] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of spec.DIFFERENTIABLE, None where not wanted or not there.

    Memory beyond the gradients: a float32 for each query, with clamped tables four more for rel_key and rel_bias and four for
    rel_value, and each table's gradient in float32, once for each of the programs that share its sum (configs.table_splits);
    not even that where one program has it all. And a workspace, from which the tables' gradients are made where workspace.py does
    not say otherwise: 2 bytes (of float32 inputs 4) for each pair of a query and a key, of as many heads or keys at a time as
    TRITON_RELATTN_WORKSPACE allows: so many bytes, 0 for none. Not set: 256 MiB, or as much as query, key and value take.

    Args:
        d_lse: None for zeros.
        statistics: as the forward returns them.
        tiles: configurations by the kernels' names, for those that shall not be the selected ones.
    """
    query, given_rel_query, scale_is_negative = tensors.query, tensors.rel_query, spec.scale < 0
    tensors, spec = with_positive_scale(tensors, spec)
    # In one sum for both of the query's roles, the ratio of the scales times dS may be beyond float16.
    may_overflow = query.dtype == torch.float16 and abs(spec.rel_scale) > abs(spec.scale)
    if may_overflow and tensors.rel_key is not None and tensors.rel_query is None:
        tensors = tensors._replace(rel_query=query)
    wants = dict(zip(DIFFERENTIABLE, wanted, strict=True))
    has_two_roles = given_rel_query is None and tensors.rel_query is not None
    if has_two_roles:
        wants["rel_query"] = wants["query"]
    gradients = dict(zip(DIFFERENTIABLE, _backward(d_out, d_lse, out, statistics, tensors, spec, wants, tiles), strict=True))
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
    out: torch.Tensor,
    statistics: torch.Tensor,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    wants: Mapping[str, bool],
    tiles: Mapping[str, configs.TileConfig] | None,
) -> tuple[torch.Tensor | None, ...]:
    """The same for positive scales, and a query whose roles need no separate sums."""
    gradients = {
        name: gradient_like(tensor) if wants[name] and tensor is not None else None
        for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False)
    }
    query = tensors.query
    entries, heads, seqlen_q, _ = query.shape
    if entries * heads * seqlen_q * tensors.key.shape[2] == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in gradients.values())

    tensors, d_out, d_lse = with_aligned_operands(tensors), aligned(d_out), contiguous(d_lse)
    query, key, value = tensors.query, tensors.key, tensors.value
    rows_gradients = [gradients[name] for name in ("query", "rel_query")]
    columns_gradients = [gradients[name] for name in ("key", "value")]
    wants_tables = [name for name in ("rel_key", "rel_value", "rel_bias") if gradients[name] is not None]
    call = Call(tensors, spec, (out, d_out, *rows_gradients, *columns_gradients))
    kernels = ("rows", "columns", "table", *["diagonals"] * (workspace.why_not(call, tensors) is None))
    tiles = {kernel: call.tile(kernel, (tiles or {}).get(kernel)) for kernel in kernels}
    inputs = [
        *map(strided, (query, key, value, tensors.rel_query)),
        *call.tables,
        strided(call.attn_mask),
    ]
    delta = query.new_empty(entries, heads, seqlen_q, dtype=torch.float32)
    far_scores = far_values = far_sums = far_kept = None
    if call.outside == "clamp":
        per_side = (entries, heads, 2, seqlen_q)
        new = query.new_empty if tensors.cu_seqlens_q is None else query.new_zeros  # rows of no sequence are summed, too
        if tensors.rel_key is not None or tensors.rel_bias is not None:
            far_scores, far_sums = (new(per_side, dtype=torch.float32) for _ in range(2))
        if tensors.rel_value is not None:
            far_values, far_kept = (new(per_side, dtype=torch.float32) for _ in range(2))

    def run_rows(out: torch.Tensor | None, d_query: torch.Tensor | None, d_rel_query: torch.Tensor | None) -> None:
        programs = cdiv(spec.max_seqlen_q, tiles["rows"].block_m) * call.num_sequences * heads
        call.launch(
            *("rows", rows_kernel, tiles["rows"], (programs,)),
            *inputs,
            *map(strided, (out, d_out, d_query, d_rel_query, statistics)),
            *map(strided, (d_lse, delta, far_scores, far_values, far_sums, far_kept)),
        )

    of_values = ("value", "rel_value")  # they need no delta, only what the rows kernel has of keys beyond a clamped table
    needs_far = (far_scores is not None and gradients["value"] is not None) or (
        far_kept is not None and gradients["rel_value"] is not None
    )
    if needs_far or any(gradient is not None for name, gradient in gradients.items() if name not in of_values):
        if spec.exact_delta and any(gradient is not None for gradient in rows_gradients):
            run_rows(out, None, None)
            run_rows(None, *rows_gradients)
        else:
            run_rows(out, *rows_gradients)
    device = query.device
    # Whether or not a table's gradient is wanted, so that the others do not depend on that.
    plan = workspace.plan(call, tensors, spec, tiles, configs.multiprocessors(device))
    words = query.new_empty(plan.shape) if plan is not None and wants_tables else None

    def run_columns(programs: int, first_program: int | None = None) -> None:
        has_limits = plan is not None and (words is not None or call.outside == "clamp")
        call.launch(
            *("columns", columns_kernel, tiles["columns"], (programs,)),
            *inputs,
            *map(strided, (d_out, *columns_gradients, statistics, delta, far_scores, far_values, words)),
            *(first_program, plan.lowest if has_limits else None, plan.highest if has_limits else None),
            SKEW=0 if words is None else plan.skew,
        )

    if words is None and any(gradient is not None for gradient in columns_gradients):
        run_columns(cdiv(spec.max_seqlen_k, tiles["columns"].block_n) * call.num_sequences * call.key_heads)
    if wants_tables:
        # Tables that the heads share get a sum for each head where another table has one.
        per_head = any(
            getattr(tensors, name).dim() > 1 + (name != "rel_bias")
            for name in ("rel_key", "rel_value", "rel_bias")
            if getattr(tensors, name) is not None
        )
        table_heads = heads if per_head else 1
        num_rows = spec.last - spec.first + 1
        # Keys beyond a clamped table: near ones by distance (the margins), all far ones in one more row at either end.
        margin = clamp_margin(tiles["rows"].block_m, tiles["rows"].block_n) if call.outside == "clamp" else 0
        padding = margin + 1 if call.outside == "clamp" else 0
        tile = tiles["table" if plan is None else "diagonals"]
        row_blocks = cdiv(num_rows + 2 * margin, tile.block_n)
        if plan is None:
            splits = configs.table_splits(device, row_blocks * table_heads, call.num_sequences * heads // table_heads)
        else:  # heads that are not in the workspace have no work
            busy = row_blocks * min(table_heads, plan.items)
            splits = configs.table_splits(device, busy, cdiv(seqlen_q, tile.block_m))
        adds = plan is not None and len(plan.parts) > 1
        sums, partials = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in wants_tables:
            gradient = gradients[name]
            rank = 1 + (name != "rel_bias")
            if splits == 1 and padding == 0 and (gradient.dim() > rank) == per_head and not adds:
                sums[name] = gradient.view(1, table_heads, *gradient.shape[-rank:])  # nothing will be left to add up
            else:
                shape = (splits, table_heads, num_rows + 2 * padding, *gradient.shape[gradient.dim() + 1 - rank :])
                new = query.new_zeros if adds else query.new_empty
                sums[name] = partials[name] = new(shape, dtype=torch.float32)
        options = {"PER_HEAD": per_head, "ROWS_BLOCK_M": tiles["rows"].block_m, "ROWS_BLOCK_N": tiles["rows"].block_n}
        grid = row_blocks * table_heads, splits
        if plan is None:
            call.launch(
                *("table", table_kernel, tile, grid),
                *inputs,
                *map(strided, (d_out, *(sums.get(name) for name in ("rel_key", "rel_value", "rel_bias")), statistics, delta)),
                num_sequences=call.num_sequences,
                **options,
            )
        else:
            for part in plan.parts:  # in this order
                run_columns(part.programs, part.first_program)
                call.launch(
                    *("diagonals", diagonals_kernel, tile, grid),
                    *map(strided, (call.rel_query, words, sums.get("rel_key"), sums.get("rel_bias"))),
                    *(part.first_item, part.stop_item, part.first_key, part.stop_key, plan.lowest),
                    SKEW=plan.skew,
                    ADDS=adds,
                    **options,
                )
        if call.outside == "clamp":
            ends = (
                ("rel_key", call.rel_query, far_sums, spec.rel_scale),
                ("rel_value", d_out, far_kept, call.keep_scale),
            )
            for name, rows, of_far, factor in ends:
                if name in partials:
                    table_ends_kernel[(table_heads, splits)](
                        *map(strided, (rows, of_far, partials[name])),
                        factor,
                        entries,
                        heads,
                        seqlen_q,
                        WIDTH=rows.shape[-1],
                        BLOCK_WIDTH=configs.padded_width(rows.shape[-1]),
                        BLOCK_M=64,
                        PER_HEAD=per_head,
                        WIDE_INDEX=call.arguments["WIDE_INDEX"],
                        **LAUNCH_OPTIONS,
                    )
            if "rel_bias" in partials:
                both = far_sums.sum((0, 3)) if per_head else far_sums.sum((0, 1, 3))[None]
                for side in (0, -1):  # not [0, -1], a tensor that would have to be copied to the GPU
                    partials["rel_bias"][1:, :, side] = 0
                    partials["rel_bias"][0, :, side] = both[:, side]
        for name, partial in partials.items():
            total = partial[0] if splits == 1 else partial.sum(0)
            inner = total[:, padding : padding + num_rows]
            if padding:
                inner[:, 0] += total[:, :padding].sum(1)
                inner[:, -1] += total[:, padding + num_rows :].sum(1)
            gradient = gradients[name]
            shared = gradient.dim() == partial.dim() - 2
            gradient.copy_(inner[0] if shared and not per_head else inner.sum(0) if shared else inner)
    return tuple(gradients.values())

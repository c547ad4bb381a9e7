"""Launcher of the backward: of its kernels, those that the wanted gradients need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import triton

from ..blockwise import new_like
from ..spec import AttentionSpec
from . import configs
from .arguments import call_arguments, strided, tile_arguments
from .band import clamp_margin
from .bwd_columns import columns_kernel
from .bwd_rows import rows_kernel
from .bwd_table import table_ends_kernel, table_kernel


def backward(
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    spec: AttentionSpec,
    wanted: Sequence[bool] = (True, True, True, True),
    tiles: Mapping[str, configs.TileConfig] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key, value and rel_key, None where not wanted or not there.

    Memory beyond the gradients: a float32 for each query (five with a clamped table), and the table's gradient in float32,
    once for each of the programs that share its sum (configs.table_splits).

    Args:
        tiles: configurations by the kernels' names, for those that shall not be the selected ones.
    """
    wants_query, wants_key, wants_value, wants_table = wanted
    d_query = new_like(query, query.shape[-1]) if wants_query else None
    d_key = new_like(key, key.shape[-1]) if wants_key else None
    d_value = new_like(value, value.shape[-1]) if wants_value else None
    d_rel_key = rel_key.new_empty(rel_key.shape) if wants_table and rel_key is not None else None
    gradients = (d_query, d_key, d_value, d_rel_key)
    batch, heads, seqlen_q, head_dim = query.shape
    seqlen_k, value_dim = value.shape[2:]
    if batch * heads * seqlen_q * seqlen_k == 0:
        return tuple(None if gradient is None else gradient.zero_() for gradient in gradients)

    table = None if rel_key is None else rel_key.expand(batch, heads, -1, -1)  # a view: shared tables have stride 0
    lse, d_lse = lse.contiguous(), d_lse.contiguous()
    arguments = call_arguments(query, value, table, spec, (query, key, value, out, d_out, *gradients[:3]))
    outside = arguments["OUTSIDE"]
    arch = configs.architecture(query.device)

    def tile(kernel: str) -> configs.TileConfig:
        config = (tiles or {}).get(kernel)
        if config is None:
            return configs.select(kernel, arch, query.dtype, head_dim, value_dim, outside, spec.is_causal)
        if reason := config.why_invalid(arch, outside is not None):
            raise ValueError(f"{config} is not valid for {kernel} on {arch}: {reason}")
        return config

    delta = far_lse = far_sums = None
    if outside == "clamp":
        far_lse, far_sums = (query.new_empty(batch, heads, 2, seqlen_q, dtype=torch.float32) for _ in range(2))
    if wants_query or wants_key or d_rel_key is not None or outside == "clamp":
        delta = torch.empty_like(lse)
        config = tile("rows")
        rows_kernel[(triton.cdiv(seqlen_q, config.block_m) * batch * heads,)](
            *map(strided, (query, key, value, table, out, d_out, d_query)),
            key_lengths,
            lse,
            d_lse,
            delta,
            far_lse,
            far_sums,
            **arguments,
            **tile_arguments(config),
        )
    if wants_key or wants_value:
        config = tile("columns")
        columns_kernel[(triton.cdiv(seqlen_k, config.block_n) * batch * heads,)](
            *map(strided, (query, key, value, table, d_out, d_key, d_value)),
            key_lengths,
            lse,
            delta,
            far_lse,
            **arguments,
            **tile_arguments(config),
        )
    if d_rel_key is not None:
        config, rows_config = tile("table"), tile("rows")
        table_heads, num_rows = d_rel_key.shape[0] if d_rel_key.dim() == 3 else 1, d_rel_key.shape[-2]
        # Keys beyond a clamped table: near ones by distance (the margins), all far ones in one more row at either end.
        margin = clamp_margin(rows_config.block_m, rows_config.block_n) if outside == "clamp" else 0
        padding = margin + 1 if outside == "clamp" else 0
        programs = triton.cdiv(num_rows + 2 * margin, config.block_n) * table_heads
        splits = configs.table_splits(query.device, programs, batch * heads // table_heads)
        partials = query.new_empty(splits, table_heads, num_rows + 2 * padding, head_dim, dtype=torch.float32)
        division = {"num_batches": batch, "num_splits": splits, "PER_HEAD": d_rel_key.dim() == 3}
        table_kernel[(programs * splits,)](
            *map(strided, (query, key, value, table, d_out, partials)),
            key_lengths,
            lse,
            delta,
            ROWS_BLOCK_M=rows_config.block_m,
            ROWS_BLOCK_N=rows_config.block_n,
            **division,
            **arguments,
            **tile_arguments(config),
        )
        if outside == "clamp":
            shared = ("num_heads", "seqlen_q", "base_2_scale", "HEAD_DIM", "BLOCK_D", "WIDE_INDEX")
            table_ends_kernel[(splits * table_heads,)](
                *map(strided, (query, partials)),
                far_sums,
                BLOCK_M=64,
                **division,
                **{name: arguments[name] for name in shared},
            )
        sums = partials[0] if splits == 1 else partials.sum(0)
        inner = sums[:, padding : padding + num_rows]
        if padding:
            inner[:, 0] += sums[:, :padding].sum(1)
            inner[:, -1] += sums[:, padding + num_rows :].sum(1)
        d_rel_key.copy_(inner if d_rel_key.dim() == 3 else inner[0])
    return gradients

"""Backward, last kernel: the end rows of a clamped table's gradient, from sums over keys, or queries, beyond the table."""

import torch
import triton
import triton.language as tl

from .arguments import strided
from .configs import padded_width
from .launching import description, launch
from .tiles import head_matrix, load_rows, side_vector


@triton.jit(do_not_specialize=["num_entries", "num_heads", "num_rows"])
def dtable_ends_kernel(
    rows,
    sums,
    d_tables,
    factor,
    num_entries,
    num_heads,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    GROUP: tl.constexpr,
    PER_HEAD: tl.constexpr,
    WIDE_INDEX: tl.constexpr,
):
    """Store the gradient from far keys, ``factor * sum_i sums_i rows_i``, as first and last row of a table's partial sums.

    rows [B, H, Nq, D]: the vectors that the table is multiplied with. sums [B, H, 2, Nq]: dq_kernel's sums over far keys.
    GROUP: if it is not None, rows are the keys, each head of which so many heads share, and sums, [B, H, 2, Nk], are dkv_kernel's
    over far queries. A key that no query sees may be NaN: it is left out if both of its sums are 0.
    d_tables: the partial sums. Grid: (table heads, splits); splits share the sequences as in dtable_kernel.
    """
    table_head = tl.program_id(0)
    split, num_splits = tl.program_id(1), tl.num_programs(1)
    tile_m = tl.arange(0, BLOCK_M)
    past = tl.zeros([BLOCK_WIDTH], tl.float32)
    future = tl.zeros([BLOCK_WIDTH], tl.float32)
    num_units = num_entries if PER_HEAD else num_entries * num_heads
    for unit in range(split, num_units, num_splits):
        entry = unit if PER_HEAD else unit // num_heads
        head = table_head if PER_HEAD else unit % num_heads
        head_rows = head_matrix(rows, entry, head if GROUP is None else head // GROUP, 0, WIDE_INDEX)
        past_sums = side_vector(sums, entry, head, 0, 0)
        future_sums = side_vector(sums, entry, head, 1, 0)
        for row_start in tl.range(0, num_rows, BLOCK_M):
            valid_m = row_start + tile_m < num_rows
            past_sum = tl.load(past_sums + row_start + tile_m, mask=valid_m, other=0.0)
            future_sum = tl.load(future_sums + row_start + tile_m, mask=valid_m, other=0.0)
            if GROUP is not None:
                valid_m = (past_sum != 0.0) | (future_sum != 0.0)
            tile = load_rows(head_rows, row_start, tile_m, valid_m, WIDTH, BLOCK_WIDTH).to(tl.float32)
            past += tl.sum(tile * past_sum[:, None], axis=0)
            future += tl.sum(tile * future_sum[:, None], axis=0)

    factor = tl.cast(factor, tl.float32)
    columns = tl.arange(0, BLOCK_WIDTH)
    first_row = head_matrix(d_tables, split, table_head, 0, WIDE_INDEX)[0] + columns
    last_row = head_matrix(d_tables, split, table_head + 1, 0, WIDE_INDEX)[0] - WIDTH + columns
    tl.store(first_row, past * factor, mask=columns < WIDTH)
    tl.store(last_row, future * factor, mask=columns < WIDTH)


def launch_ends(
    vectors: torch.Tensor,
    sums: torch.Tensor,
    partial: torch.Tensor,
    factor: float,
    per_head: bool,
    wide_index: bool,
    group: int | None = None,
) -> None:
    """Launch dtable_ends_kernel; see there. partial: [splits, table heads, rows, width]."""
    entries, _, length, width = vectors.shape
    heads = sums.shape[1]
    splits, table_heads = partial.shape[:2]
    arguments = {
        "rows": strided(vectors),
        "sums": strided(sums),
        "d_tables": strided(partial),
        "factor": factor,
        "num_entries": entries,
        "num_heads": heads,
        "num_rows": length,
        "WIDTH": width,
        "BLOCK_WIDTH": padded_width(width),
        "BLOCK_M": 64,
        "GROUP": group,
        "PER_HEAD": per_head,
        "WIDE_INDEX": wide_index,
    }
    launch(dtable_ends_kernel, (table_heads, splits), arguments, description(arguments.values()))

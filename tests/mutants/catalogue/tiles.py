"""Faults in tiles: rotations, the band, masks."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    ARGUMENTS,
    BAND,
    BAND_REGISTERS,
    MASKING,
    ON_BACKWARD,
    ON_FEATURES,
    ON_FORWARD,
    ON_ROTATIONS,
    ON_TABLES,
    QUADS,
    ROWS_OF_TABLE,
    TILES,
)

OF_QUADS = (
    Fault(
        "quads-lose-a-lane",
        "elements that come round the corner of a quad are those of the row's register, not of the next",
        (f"{ON_ROTATIONS}::test_rows_are_rotated_as_by_a_gather",),
        (Change(QUADS, "lane < by if BACK else lane + by >= 4, SIGN)", "lane < by if BACK else lane + by > 4, SIGN)"),),
    ),
    Fault(
        "quads-forget-the-warp",
        "rows of odd warps are rotated as those of even ones",
        (f"{ON_ROTATIONS}::test_rows_are_rotated_as_by_a_gather",),
        (Change(QUADS, "(warp >> bit) % 2 == 1", "(warp >> bit) % 2 == 2"),),
    ),
    Fault(
        "quads-forget-the-repeat",
        "rows beyond the first 16 of each warp are rotated as those",
        (f"{ON_ROTATIONS}::test_rows_are_rotated_as_by_a_gather",),
        (Change(QUADS, "4 * WARPS * (i // 2)", "8 * WARPS * (i // 2)"),),
    ),
    Fault(
        "words-change-halves",
        "a step back by one chunk takes the older half of the older word",
        (f"{ON_ROTATIONS}::test_words",),
        (Change(QUADS, "(words << 16) | (before >> 16)", "(words << 16) | (before & 0xFFFF)"),),
    ),
    Fault(
        "words-step-twice-instead-of-once",
        "elements that wrap in odd groups are one chunk back, not two",
        (f"{ON_ROTATIONS}::test_kernels",),
        (Change(BAND_REGISTERS, "is_odd | wraps, is_odd & wraps", "is_odd | wraps, is_odd & (wraps == 0)"),),
    ),
    Fault(
        "quads-wrap-off-by-one",
        "rotated in registers, the column that has not wrapped is taken from the chunk before",
        (f"{ON_ROTATIONS}::test_kernels",),
        (Change(BAND_REGISTERS, "> n // 4 * 4  #", ">= n // 4 * 4  #"),),
    ),
    Fault(
        "bias-diagonals-forget-the-warp",
        "the bias of a tile that is rotated in registers is that of the first warp's rows",
        (f"{ON_ROTATIONS}::test_scales_at_which_float16_holds_no_terms[by a bias alone-registers]",),
        (Change(QUADS, "return lane - row - 16 * warp", "return lane - row - 0 * warp"),),
    ),
    Fault(
        "gradients-in-float16",
        "products of d_out with a table for values are rounded to float16, which has nothing left for small gradients",
        (f"{ON_ROTATIONS}::test_tiny_gradients",),
        (Change(ARGUMENTS, "values = Tile(*of_config, False,", "values = Tile(*of_config, fixed.round_terms,"),),
    ),
    Fault(
        "columns-in-another-order",
        "keys of a tile whose rows are rotated in registers are taken in the order of their columns",
        (f"{ON_ROTATIONS}::test_kernels",),
        (Change(TILES, "return n % 2 * (BLOCK_N // 2) + n // 2", "return n"),),
    ),
)


OF_BAND = (
    Fault(
        "rotation-off-by-one",
        "rows of the band are rotated by one column too many",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(BAND, "else (n - m + M) % W", "else (n - m + M - 1) % W"),),
    ),
    Fault(
        "rotation-back-off-by-one",
        "gradients are rotated back by one column too many",
        (f"{ON_BACKWARD}::test_one_table_row_reaches_only_its_diagonal[small--1]",),
        (Change(BAND, "(n + m) % W if BACK", "(n + m + 1) % W if BACK"),),
    ),
    Fault(
        "wrap-off-by-one",
        "the column that has not wrapped is taken from the chunk before",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-0]",),
        (Change(BAND, "m % W > n if ROTATED", "m % W >= n if ROTATED"),),
    ),
    Fault(
        "wrap-off-by-one-in-a-block",
        "the same in the columns of a table block, where nothing is carried",
        (f"{ON_BACKWARD}::test_one_hot_d_out_reaches_only_its_pairs[zero-torch.float32]",),
        (Change(BAND, "else m % W + n >= W", "else m % W + n > W"),),
    ),
    Fault(
        "group-of-the-lower-half",
        "with tiles twice as high as wide the lower half of the queries takes the block of the upper",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(BAND, "tl.where(group >= 2, carried[2], low)", "tl.where(group > 2, carried[2], low)"),),
    ),
    Fault(
        "carried-from-the-wrong-block",
        "a walk begins with the block of its own tile instead of the one before",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (
            Change(
                BAND,
                "n, 0, -1):\n            block = table_block(query, table, relative_position - ago * TILE.block_n",
                "n, 0, -1):\n            block = table_block(query, table, relative_position - (ago - 1) * TILE.block_n",
            ),
        ),
    ),
    Fault(
        "end-row-of-a-neighbour",
        "beyond a clamped table the last row but one is used",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (
            Change(
                ROWS_OF_TABLE,
                "rows = tl.minimum(tl.maximum(start + rows, 0), table.last - table.first)",
                "rows = tl.minimum(tl.maximum(start + rows, 0), table.last - table.first - 1)",
            ),
        ),
    ),
    Fault(
        "row-beyond-the-table",
        "one row beyond a bounded table is read: the first of the next head's, or other memory",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-zero]",),
        (
            Change(
                ROWS_OF_TABLE,
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)",
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first + 1, tl.uint32)",
            ),
        ),
    ),
    Fault(
        "far-ends-swapped",
        "far keys of the past get the last row's term, those of the future the first row's",
        (f"{ON_FORWARD}::test_tables[32x16-past-clamp]",),
        (Change(ROWS_OF_TABLE, "rows = tl.where(column == 0, 0, table.last", "rows = tl.where(column == 1, 0, table.last"),),
    ),
    Fault(
        "near-part-ends-early",
        "the far part begins where the first query of a block is beyond the table, not the last",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (Change(MASKING, "last + row_start + (BLOCK_M - 1) + query_offset + SLACK", "last + row_start + query_offset + SLACK"),),
    ),
    Fault(
        "near-part-begins-late",
        "a tile that reaches into the table by one column counts as far",
        (f"{ON_TABLES}::test_every_alignment_of_the_near_part[clamp]",),
        (Change(MASKING, "SLACK: tl.constexpr = 0 if", "SLACK: tl.constexpr = -1 if"),),
    ),
    Fault(
        "far-walk-steps-into-the-near-part",
        "behind the near part the far walk goes on too far ahead, by where the near part begins",
        (f"{ON_FORWARD}::test_tables[32x16-one_row-clamp]",),
        (Change(MASKING, "position, position + near_stop - near_start)", "position, position + near_stop)"),),
    ),
    Fault(
        "unused-rows-are-multiplied",
        "table rows that no visible pair has are multiplied by 0: NaN if they hold NaN",
        (f"{ON_BACKWARD}::test_nan_in_rows_that_no_visible_pair_has[small-longer]",),
        (Change(ROWS_OF_TABLE, "        start = tl.maximum(first, lowest)\n", "        start = first\n"),),
    ),
)


OF_MASKS = (
    Fault(
        "tail-of-keys-unmasked",
        "keys of the last tile that do not exist take part in the softmax",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(MASKING, "seen = offs_n.to(tl.uint32) < place.num_keys.to(tl.uint32)", "seen = offs_n >= 0"),),
    ),
    Fault(
        "window-off-by-one-on-the-left",
        "the key farthest in the past of a window is hidden",
        (f"{ON_FEATURES}::test_random_combination[19]", f"{ON_FEATURES}::test_random_combination"),
        (Change(MASKING, "offs_n >= offs_m + (place", "offs_n > offs_m + (place"),),
    ),
    Fault(
        "causal-without-the-diagonal",
        "a causal query does not see its own position, a window not its last",
        (f"{ON_FORWARD}::test_strides[packed]", f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]"),
        (Change(MASKING, "offs_n <= offs_m + (place", "offs_n < offs_m + (place"),),
    ),
    Fault(
        "sign-of-query-offset",
        "causal masks and windows lie where -query_offset would have them",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (Change(MASKING, "(place.query_offset + window[1])", "(window[1] - place.query_offset)"),),
    ),
    Fault(
        "walk-ends-early",
        "the last key that a block of queries sees is left out if it begins a tile",
        (f"{ON_FORWARD}::test_lengths[1]",),
        (Change(MASKING, "last_query + place.query_offset + window[1] + 1)", "last_query + place.query_offset + window[1])"),),
    ),
    Fault(
        "walk-begins-late",
        "the first key that a window shows is left out if it ends a tile",
        (f"{ON_TABLES}::test_every_alignment_of_a_window",),
        (Change(MASKING, "place.query_offset - window[0], 0)", "place.query_offset - window[0] + 1, 0)"),),
    ),
    Fault(
        "columns-walk-begins-late",
        "the first query that sees a block of keys is left out if it ends a tile",
        (f"{ON_TABLES}::test_every_alignment_of_a_window",),
        (
            Change(
                MASKING, "first_key - place.query_offset - window[1], 0)", "first_key - place.query_offset - window[1] + 1, 0)"
            ),
        ),
    ),
    Fault(
        "key-lengths-not-limited",
        "key_lengths beyond the keys lead beyond their memory",
        (f"{ON_FORWARD}::test_lengths_beyond_the_keys_are_limited",),
        (
            Change(
                MASKING,
                "tl.minimum(tl.maximum(tl.load(sequences.key_lengths + batch), 0), num_keys)",
                "tl.load(sequences.key_lengths + batch)",
            ),
        ),
    ),
    Fault(
        "keys-of-the-wrong-sequence",
        "in a packed batch the keys of a sequence begin where its queries do",
        (f"{ON_FEATURES}::test_packed[zero-0.0]",),
        (
            Change(
                MASKING,
                "key_start = tl.load(sequences.cu_seqlens_k + batch)",
                "key_start = tl.load(sequences.cu_seqlens_q + batch)",
            ),
        ),
    ),
)

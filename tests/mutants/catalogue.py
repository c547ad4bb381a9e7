"""The faults: in the kernels, their launchers, the blockwise path and what all share."""

from __future__ import annotations

from .fault import Change, Fault

OF_KERNELS = "triton_relattn/kernels"
BAND, QUADS, FORWARD, ROWS, COLUMNS, TABLE, SCORES, MASKING, TILES, ARGUMENTS, BACKWARD, CONFIGS, KEPT = (
    f"{OF_KERNELS}/{name}.py"
    for name in (
        "band",
        "quads",
        "forward",
        "bwd_rows",
        "bwd_columns",
        "bwd_table",
        "scores",
        "masking",
        "tiles",
        "arguments",
        "backward",
        "configs",
        "dropout",
    )
)
BLOCKWISE, BLOCKS, DROPOUT, SPEC, OPS, FUNCTIONAL, RESULTS, POSITIONS = (
    f"triton_relattn/{name}.py"
    for name in ("blockwise", "blocks", "dropout", "spec", "ops", "functional", "results", "positions")
)

# Tests of the kernels, and those of the rest.
ON_FORWARD, ON_FORWARD_EDGES, ON_BACKWARD, ON_BACKWARD_EDGES, ON_FEATURES, ON_GUARDS, ON_ROTATIONS, ON_KERNEL_SURVIVORS = (
    f"tests/interpreter/test_{name}.py"
    for name in ("forward", "forward_edges", "backward", "backward_edges", "features", "guards", "rotations", "survivors")
)
ON_BLOCKWISE, ON_EDGES, ON_MASKS, ON_DROPOUT, ON_VARLEN, ON_RANDOM, ON_OPS, ON_TORCH, ON_DELTA, ON_POSITIONS, ON_SURVIVORS = (
    f"tests/cpu/test_{name}.py"
    for name in (
        "blockwise",
        "blockwise_edges",
        "masks",
        "dropout",
        "varlen",
        "random",
        "ops",
        "torch",
        "delta",
        "positions",
        "survivors",
    )
)
RANDOM = (f"{ON_RANDOM}::test_against_loops", "-k", "blockwise")
RANDOM_PACKED = (f"{ON_VARLEN}::test_random_combination", "-k", "blockwise")

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
        (Change(BAND, "odd | wraps, odd & wraps", "odd | wraps, odd & (wraps == 0)"),),
    ),
    Fault(
        "quads-wrap-off-by-one",
        "rotated in registers, the column that has not wrapped is taken from the chunk before",
        (f"{ON_ROTATIONS}::test_kernels",),
        (Change(BAND, "> n // 4 * 4  #", ">= n // 4 * 4  #"),),
    ),
    Fault(
        "quads-limits-off-by-one",
        "of the columns of a band, one more than lies below the limit counts, in some rows",
        (f"{ON_ROTATIONS}::test_limits_in_the_band",),
        (Change(QUADS, "stop = (high[:, None] - by % 4 + 3 >> 2)", "stop = (high[:, None] - by % 4 + 4 >> 2)"),),
    ),
    Fault(
        "terms-in-the-other-chunk",
        "in the table kernel terms are added to the products of keys W away, in every other group of W queries",
        (f"{ON_ROTATIONS}::test_kernels",),
        (Change(BAND, "odd = (m // W % 2 == 1) ^ wraps_around(TILE)", "odd = wraps_around(TILE)"),),
    ),
    Fault(
        "gradients-in-float16",
        "products of d_out with a table for values are rounded to float16, which has nothing left for small gradients",
        (f"{ON_ROTATIONS}::test_tiny_gradients",),
        (Change(BAND, '"exact" if rotation == "packed" else rotation', "rotation"),),
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
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(BAND, "else (n - m + M) % W", "else (n - m + M - 1) % W"),),
    ),
    Fault(
        "rotation-back-off-by-one",
        "gradients are rotated back by one column too many",
        (f"{ON_BACKWARD_EDGES}::test_one_table_row_reaches_only_its_diagonal[small--1]",),
        (Change(BAND, "(n + m) % W if BACK", "(n + m + 1) % W if BACK"),),
    ),
    Fault(
        "wrap-off-by-one",
        "the column that has not wrapped is taken from the chunk before",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-0]",),
        (Change(BAND, "return m % W > n", "return m % W >= n"),),
    ),
    Fault(
        "wrap-off-by-one-in-a-block",
        "the same in the columns of a table block, where nothing is carried",
        (f"{ON_BACKWARD_EDGES}::test_one_hot_d_out_reaches_only_its_pairs[zero-torch.float32]",),
        (Change(BAND, "else m % W + n >= W", "else m % W + n > W"),),
    ),
    Fault(
        "group-of-the-lower-half",
        "with tiles twice as high as wide the lower half of the queries takes the block of the upper",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(BAND, "due = tl.where(group >= 2, carried[2], chunks[0])", "due = tl.where(group > 2, carried[2], chunks[0])"),),
    ),
    Fault(
        "carried-from-the-wrong-block",
        "a walk begins with the block of its own tile instead of the one before",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (
            Change(
                BAND,
                "TILE[1], 0, -1):\n            behind = relative_position - ago * TILE[1]",
                "TILE[1], 0, -1):\n            behind = relative_position - (ago - 1) * TILE[1]",
            ),
        ),
    ),
    Fault(
        "end-row-of-a-neighbour",
        "beyond a clamped table the last row but one is used",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (
            Change(
                BAND,
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
                BAND,
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)",
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first + 1, tl.uint32)",
            ),
        ),
    ),
    Fault(
        "far-ends-swapped",
        "far keys of the past get the last row's term, those of the future the first row's",
        (f"{ON_FORWARD}::test_tables[32x16-past-clamp]",),
        (Change(BAND, "rows = tl.where(column == 0, 0, table.last", "rows = tl.where(column == 1, 0, table.last"),),
    ),
    Fault(
        "near-part-ends-early",
        "the far part begins where the first query of a block is beyond the table, not the last",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (Change(BAND, "last + row_start + (BLOCK_M - 1) + query_offset + SLACK", "last + row_start + query_offset + SLACK"),),
    ),
    Fault(
        "near-part-begins-late",
        "a tile that reaches into the table by one column counts as far",
        (f"{ON_KERNEL_SURVIVORS}::test_every_alignment_of_the_near_part[clamp]",),
        (Change(BAND, "SLACK: tl.constexpr = 0 if", "SLACK: tl.constexpr = -1 if"),),
    ),
    Fault(
        "far-walk-steps-into-the-near-part",
        "behind the near part the far walk goes on too far ahead, by where the near part begins",
        (f"{ON_FORWARD}::test_tables[32x16-one_row-clamp]",),
        (Change(BAND, "position, position + near_stop - near_start)", "position, position + near_stop)"),),
    ),
    Fault(
        "unused-rows-are-multiplied",
        "table rows that no visible pair has are multiplied by 0: NaN if they hold NaN",
        (f"{ON_BACKWARD_EDGES}::test_nan_in_rows_that_no_visible_pair_has[small-longer]",),
        (Change(BAND, "        start = tl.maximum(first, lowest)\n", "        start = first\n"),),
    ),
)

OF_FORWARD = (
    Fault(
        "sign-of-r",
        "the forward takes the relative position of the query as the key sees it",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (
            Change(
                FORWARD,
                "relative = key_start - row_start - place.query_offset",
                "relative = row_start - key_start + place.query_offset",
            ),
        ),
    ),
    Fault(
        "accumulator-not-rescaled",
        "what was summed keeps its scale when the maximum grows",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(FORWARD, "value, acc * rescale[:, None], input", "value, acc, input"),),
    ),
    Fault(
        "pending-probabilities-not-rescaled",
        "sums of far keys' probabilities, for the end rows of rel_value, keep their scale when the maximum grows",
        (f"{ON_FEATURES}::test_sharp_attention_in_float16[clamp]",),
        (Change(FORWARD, "past, future = past * rescale, future * rescale", "past, future = past, future"),),
    ),
    Fault(
        "sum-not-rescaled",
        "the softmax's sum keeps its scale when the maximum grows",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(SCORES, "row_sum * rescale + tl.sum(probs, axis=1), rescale", "row_sum + tl.sum(probs, axis=1), rescale"),),
    ),
    Fault(
        "accumulator-in-16-bits",
        "the sum of probabilities times values is rounded to the inputs' dtype at every tile",
        (f"{ON_KERNEL_SURVIVORS}::test_long_sums_are_rounded_once",),
        (Change(FORWARD, "acc * rescale[:, None], input", "(acc * rescale[:, None]).to(value.dtype).to(tl.float32), input"),),
    ),
    Fault(
        "lse-in-base-2",
        "the factor from base 2 is missing in lse",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(FORWARD, "row_max * (scale * LN_2) + tl.log(row_sum)", "row_max * scale + tl.log(row_sum)"),),
    ),
    Fault(
        "nothing-seen-so-far",
        "-inf - -inf: a row whose first tile is hidden becomes NaN",
        (f"{ON_FORWARD_EDGES}::test_rows_that_see_nothing[torch.float32-causal]",),
        (
            Change(
                SCORES,
                'shift = tl.where(new_max == -float("inf"), 0.0, new_max * scale)',
                "shift = new_max * scale",
            ),
        ),
    ),
    Fault(
        "nothing-seen-at-all",
        "0 / 0: out of a query that sees nothing is NaN",
        (f"{ON_FORWARD_EDGES}::test_rows_that_see_nothing[torch.float32-causal]",),
        (Change(FORWARD, "row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  #", "row_sum = row_sum  #"),),
    ),
    Fault(
        "maximum-not-subtracted-first",
        "logits that a mask makes huge are scaled before the maximum is subtracted",
        (f"{ON_FEATURES}::test_mask_of_finfo_min[full-torch.float32]",),
        (Change(FORWARD, "row_max, row_sum, scale, is_additive(mask))", "row_max, row_sum, scale, False)"),),
    ),
    Fault(
        "head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_2]",),
        (Change(FORWARD, "place.entry, head // GROUP,", "place.entry, head % (num_heads // GROUP),", times=2),),
    ),
    Fault(
        "strides-of-the-key-for-the-value",
        "value is addressed with the strides of key",
        (f"{ON_FORWARD_EDGES}::test_strides[padded]",),
        (
            Change(
                FORWARD,
                "            *map(strided, (tensors.query, tensors.key, tensors.value, tensors.rel_query)),\n",
                "            *map(strided, (tensors.query, tensors.key)),\n"
                "            (tensors.value, tensors.key.stride()),\n"
                "            strided(tensors.rel_query),\n",
            ),
        ),
    ),
    Fault(
        "negative-scale-turns-the-table",
        "the query is negated for a negative scale, and the relative term with it",
        (f"{ON_FEATURES}::test_shapes_and_scales[-negative_scale_of_the_query]",),
        (
            Change(
                FORWARD,
                "rel_query = query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query",
                "rel_query = tensors.rel_query",
            ),
        ),
    ),
    Fault(
        "dropout-by-local-column",
        "the forward drops by the column within the tile",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (
            Change(
                FORWARD,
                "kept(dropout, place.batch, head, offs_m[:, None], offs_n[None, :])",
                "kept(dropout, place.batch, head, offs_m[:, None], tile_n[None, :])",
            ),
        ),
    ),
    Fault(
        "race-of-packed-queries",
        "programs also write the rows behind their sequence, which belong to the next",
        (f"{ON_GUARDS}::test_guarded[packed_everything-zero-shuffled]",),
        (Change(FORWARD, "valid_m = offs_m < place.num_queries", "valid_m = offs_m < sequences.max_seqlen_q"),),
    ),
)

OF_MASKS = (
    Fault(
        "tail-of-keys-unmasked",
        "keys of the last tile that do not exist take part in the softmax",
        (f"{ON_FORWARD_EDGES}::test_one_table_row_moves_only_its_diagonal[0-2]",),
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
        (f"{ON_FORWARD_EDGES}::test_strides[packed]", f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]"),
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
        (f"{ON_KERNEL_SURVIVORS}::test_every_alignment_of_a_window",),
        (Change(MASKING, "place.query_offset - window[0], 0)", "place.query_offset - window[0] + 1, 0)"),),
    ),
    Fault(
        "columns-walk-begins-late",
        "the first query that sees a block of keys is left out if it ends a tile",
        (f"{ON_KERNEL_SURVIVORS}::test_every_alignment_of_a_window",),
        (
            Change(
                MASKING, "first_key - place.query_offset - window[1], 0)", "first_key - place.query_offset - window[1] + 1, 0)"
            ),
        ),
    ),
    Fault(
        "key-lengths-not-limited",
        "key_lengths beyond the keys lead beyond their memory",
        (f"{ON_FORWARD_EDGES}::test_lengths_beyond_the_keys_are_limited",),
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

OF_ROWS = (
    Fault(
        "delta-without-its-correction",
        "the other kernels get rowsum(out * d_out), with the rounding of out",
        (f"{ON_FEATURES}::test_sharp_attention_in_float16[full]",),
        (Change(ROWS, "tl.store(deltas + offs_m, delta + correction", "tl.store(deltas + offs_m, delta"),),
    ),
    Fault(
        "far-sums-without-the-correction",
        "far keys' sums of dS keep the rounding of out, which the end rows' gradients add up",
        (f"{ON_FEATURES}::test_sharp_attention_in_float16[clamp]", f"{ON_BACKWARD}::test_table_gradient_needs_the_exact_delta"),
        (
            Change(ROWS, "        past -= correction * past_sum\n", ""),
            Change(ROWS, "        future -= correction * future_sum\n", ""),
        ),
    ),
    Fault(
        "cotangent-of-lse-dropped",
        "d_query lacks what comes through lse",
        (f"{ON_BACKWARD}::test_gradient_through_one_result[full-lse]",),
        (Change(ROWS, "delta -= tl.load(d_lses", "delta -= 0.0 * tl.load(d_lses"),),
    ),
    Fault(
        "cotangent-of-lse-dropped-from-delta",
        "d_key and the gradients of the tables lack what comes through lse",
        (f"{ON_BACKWARD}::test_gradient_through_one_result[full-lse]",),
        (Change(ROWS, "correction -= tl.load(d_lses", "correction -= 0.0 * tl.load(d_lses"),),
    ),
    Fault(
        "rows-slope-of-the-softcap",
        "the derivative of the softcap is missing in d_query",
        (f"{ON_FEATURES}::test_shapes_and_scales[-negative_scale_softcap]",),
        (Change(ROWS, "                d_scores *= slope\n", "                d_scores *= 1.0\n"),),
    ),
    Fault(
        "rows-dropout-unscaled",
        "the scale of dropout is missing in dP, in the rows kernel",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (Change(ROWS, "d_probs * tl.cast(dropout.keep_scale, tl.float32), 0.0)", "d_probs, 0.0)"),),
    ),
    Fault(
        "scale-for-rel-scale",
        "d_query of the relative term is scaled as the other",
        (f"{ON_FEATURES}::test_shapes_and_scales[-rel_scale_of_the_query]",),
        (
            Change(
                ROWS,
                "                    d_scores *= tl.cast(scaling.rel_scale, tl.float32)\n",
                "                    d_scores *= 1.0\n",
            ),
        ),
    ),
    Fault(
        "waiting-gradients-lost",
        "after the last tile of a walk one block of gradients too few is multiplied with the table",
        (f"{ON_FEATURES}::test_shapes_and_scales[-width_40]",),
        (
            Change(
                ROWS,
                "for ahead in tl.static_range(BLOCK_M // BLOCK_N):",
                "for ahead in tl.static_range(BLOCK_M // BLOCK_N - 1):",
            ),
        ),
    ),
    Fault(
        "rows-query-offset",
        "the gradient of the query is taken at distances with the sign of query_offset turned round",
        (f"{ON_BACKWARD_EDGES}::test_one_table_row_reaches_only_its_diagonal[small--1]",),
        (
            Change(
                ROWS,
                "relative = key_start - row_start - place.query_offset",
                "relative = key_start - row_start + place.query_offset",
            ),
        ),
    ),
)

OF_COLUMNS = (
    Fault(
        "tail-of-queries-unmasked",
        "queries that do not exist take part: zeros, or NaN with a table row that holds NaN",
        (
            f"{ON_FEATURES}::test_nan_that_no_query_sees[-lengths]",
            f"{ON_BACKWARD_EDGES}::test_nan_in_rows_that_no_visible_pair_has",
        ),
        (
            Change(
                COLUMNS,
                "seen = visible(offs_m[:, None], offs_n[None, :], place, window) & valid_m[:, None]",
                "seen = visible(offs_m[:, None], offs_n[None, :], place, window)",
            ),
        ),
    ),
    Fault(
        "columns-read-behind-the-queries",
        "queries behind the last are loaded, from memory of others",
        (f"{ON_GUARDS}::test_guarded[dropout-zero-shuffled]",),
        (
            Change(
                COLUMNS,
                "query = load_rows(head_queries, row_start, tile_m, valid_m,",
                "query = load_rows(head_queries, row_start, tile_m, tile_m >= 0,",
            ),
        ),
    ),
    Fault(
        "columns-head-modulo-groups",
        "keys collect the gradients of query heads m * Hk + h instead of h * group + m",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_2]",),
        (Change(COLUMNS, "head = key_head * GROUP + member", "head = member * (num_heads // GROUP) + key_head"),),
    ),
    Fault(
        "value-gradient-without-dropout-scale",
        "d_value is not scaled by 1 / (1 - p)",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (Change(COLUMNS, "d_value *= tl.cast(dropout.keep_scale, tl.float32)", "d_value *= 1.0"),),
    ),
    Fault(
        "value-gradient-in-16-bits",
        "the sum of probabilities times d_out is rounded to the inputs' dtype at every tile",
        (f"{ON_KERNEL_SURVIVORS}::test_long_sums_are_rounded_once",),
        (Change(COLUMNS, "d_out, d_value, input_precision", "d_out, d_value.to(d_out.dtype).to(tl.float32), input_precision"),),
    ),
    Fault(
        "columns-sides-swapped",
        "keys beyond a clamped table take the term of the other end",
        (f"{ON_BACKWARD}::test_tables[default-wholly_past-clamp]",),
        (Change(COLUMNS, "side = tl.where(row_start < near_start, 1, 0)", "side = tl.where(row_start < near_start, 0, 1)"),),
    ),
    Fault(
        "columns-limits-not-turned-round",
        "the near part of the columns' walk is that of the table as queries see it",
        (f"{ON_BACKWARD}::test_tables[default-past-clamp]",),
        (
            Change(
                COLUMNS,
                "near_keys(key_start, -last, -first, -place.query_offset,",
                "near_keys(key_start, first, last, -place.query_offset,",
            ),
        ),
    ),
    Fault(
        "race-of-packed-keys",
        "programs write zeros to the keys behind their sequence, which belong to the next",
        (f"{ON_GUARDS}::test_guarded[packed_everything-zero-shuffled]",),
        (
            Change(
                COLUMNS,
                "key_limit = sequences.max_seqlen_k if sequences.cu_seqlens_k is None else place.num_keys",
                "key_limit = sequences.max_seqlen_k",
            ),
        ),
    ),
)

OF_TABLE = (
    Fault(
        "key-lengths-ignored-by-the-table",
        "the gradient of a table counts keys beyond key_lengths",
        (f"{ON_BACKWARD}::test_tables[default-exact-zero]",),
        (
            Change(TABLE, "from .masking import locate", "from .masking import Place, locate"),
            Change(
                TABLE,
                "        head = table_head if PER_HEAD else unit - sequence * num_heads\n        head_queries",
                "        head = table_head if PER_HEAD else unit - sequence * num_heads\n"
                "        batch, entry, query_start, key_start, num_queries, num_keys, query_offset = place\n"
                "        num_keys = sequences.max_seqlen_k\n"
                "        place = Place(batch, entry, query_start, key_start, num_queries, num_keys, query_offset)\n"
                "        head_queries",
            ),
        ),
    ),
    Fault(
        "hidden-keys-are-read",
        "keys beyond key_lengths are multiplied by 0: NaN if they hold NaN",
        (f"{ON_BACKWARD_EDGES}::test_nan_in_storage_and_hidden_keys[False-zero]",),
        (
            Change(
                TABLE,
                "+ tile_n).to(tl.uint32) < place.num_keys.to(tl.uint32)",
                "+ tile_n).to(tl.uint32) < sequences.max_seqlen_k.to(tl.uint32)",
            ),
        ),
    ),
    Fault(
        "table-slope-of-the-softcap",
        "the derivative of the softcap is missing in the gradients of tables",
        (f"{ON_FEATURES}::test_shapes_and_scales[-negative_scale_softcap]",),
        (Change(TABLE, "                    d_scores *= slope\n", "                    d_scores *= 1.0\n"),),
    ),
    Fault(
        "table-dropout-by-entry",
        "in a packed batch the gradient of a table drops what the first sequence drops",
        (f"{ON_FEATURES}::test_packed[full-0.4]",),
        (Change(TABLE, "kept(dropout, place.batch, head", "kept(dropout, place.entry, head"),),
    ),
    Fault(
        "shared-table-of-the-first-heads",
        "the gradient of a table that heads share is not summed over them",
        (f"{ON_BACKWARD_EDGES}::test_number_of_splits[False-clamp]",),
        (
            Change(
                TABLE,
                "num_units = num_sequences if PER_HEAD else num_sequences * num_heads",
                "num_units = num_sequences",
            ),
        ),
    ),
    Fault(
        "table-walk-begins-late",
        "queries that meet only the last rows of a block of rows are left out",
        (f"{ON_BACKWARD}::test_lengths[15-17]",),
        (Change(TABLE, "-place.query_offset - relative - (BLOCK_N - 1), 0)", "-place.query_offset - relative, 0)"),),
    ),
    Fault(
        "table-loses-the-diagonal",
        "a block of rows that begins at the edge of the window is skipped",
        (f"{ON_KERNEL_SURVIVORS}::test_every_alignment_of_a_window",),
        (Change(TABLE, "tl.where(relative > window[1], 0, stop)", "tl.where(relative >= window[1], 0, stop)"),),
    ),
    Fault(
        "far-keys-counted-twice",
        "the first key behind the near tiles is counted by the rows kernel and by the table's",
        (f"{ON_BACKWARD}::test_tiles_of_rows_and_table_kernel[False-rows1-table1]",),
        (Change(TABLE, "near_stop - first_keys)", "near_stop + 1 - first_keys)"),),
    ),
    Fault(
        "race-of-table-splits",
        "all programs that share a block of rows write their sum to the same place",
        (f"{ON_BACKWARD_EDGES}::test_number_of_splits[True-full]",),
        (Change(TABLE, "head_matrix(d_rel_keys, split, table_head", "head_matrix(d_rel_keys, 0, table_head"),),
    ),
    Fault(
        "race-of-table-rows",
        "the last block of rows writes one row more: the first of the next head's, or memory of others",
        (f"{ON_GUARDS}::test_guarded[dropout-zero-shuffled]",),
        (
            Change(
                TABLE,
                "exists = relative + tile_n <= last + MARGIN",
                "exists = relative + tile_n <= last + MARGIN + 1",
            ),
        ),
    ),
    Fault(
        "race-of-bias-heads",
        "all heads write the gradient of rel_bias to the first head's",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_3]",),
        (Change(TABLE, "row_vector(d_rel_bias, split, table_head, row)", "row_vector(d_rel_bias, split, 0, row)"),),
    ),
)

OF_LAUNCHERS = (
    Fault(
        "clamp-taken-for-zero",
        "beyond a clamped table there is no term",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-clamp]",),
        (Change(SPEC, 'return "clamp" if self.clamp else "zero"', 'return "zero"'),),
    ),
    Fault(
        "zero-taken-for-clamp",
        "beyond a bounded table its end rows apply",
        (f"{ON_FORWARD}::test_tables[32x16-shorter-zero]",),
        (Change(SPEC, 'return "clamp" if self.clamp else "zero"', 'return "clamp"'),),
    ),
    Fault(
        "table-thought-to-cover",
        "a table whose last row is missing for one pair counts as one that covers all",
        (ON_KERNEL_SURVIVORS, "-k", "short"),
        (Change(SPEC, "farthest_future <= self.last:", "farthest_future <= self.last + 1:"),),
    ),
    Fault(
        "rel-scale-for-scale",
        "q . k is scaled by rel_scale",
        (f"{ON_FEATURES}::test_shapes_and_scales[-rel_scale]",),
        (Change(ARGUMENTS, "scale / math.log(2),", "spec.rel_scale / math.log(2),"),),
    ),
    Fault(
        "end-rows-scaled-as-the-query",
        "far keys' part of the end rows' gradients has scale for rel_scale",
        (f"{ON_KERNEL_SURVIVORS}::test_far_keys[scale-query]",),
        (Change(BACKWARD, "far_sums, spec.rel_scale)", "far_sums, spec.scale)"),),
    ),
    Fault(
        "shared-table-beside-tables-of-heads",
        "where another table has one for each head, a shared one's gradient is that of the first head",
        (ON_KERNEL_SURVIVORS, "-k", "shared"),
        (
            Change(
                BACKWARD,
                "inner[0] if shared and not per_head else inner.sum(0) if shared else inner",
                "inner[0] if shared else inner",
            ),
        ),
    ),
    Fault(
        "end-row-without-its-margin",
        "near keys beyond a clamped table are missing in the gradient of its last row",
        (f"{ON_BACKWARD}::test_tables[default-shorter-clamp]",),
        (Change(BACKWARD, "                inner[:, -1] += sums[:, padding + num_rows :].sum(1)\n", ""),),
    ),
    Fault(
        "bias-without-an-end-row",
        "far keys are missing in the gradient of rel_bias at one end, which memory that nothing has written takes",
        (f"{ON_FEATURES}::test_one_table_alone[clamp-rel_bias]",),
        (Change(BACKWARD, "for side in (0, -1):", "for side in (0,):"),),
    ),
    Fault(
        "exact-delta-skipped",
        "exact_delta makes no first pass",
        (f"{ON_FEATURES}::test_exact_delta[False]",),
        (
            Change(
                BACKWARD,
                "            run_rows(out, None, None)\n            run_rows(None, *rows_gradients)\n",
                "            run_rows(out, *rows_gradients)\n",
            ),
        ),
    ),
    Fault(
        "rows-of-no-sequence-are-summed",
        "what no program writes is summed for the end rows of a packed batch",
        (f"{ON_FEATURES}::test_rows_of_no_sequence",),
        (
            Change(
                BACKWARD,
                "new = query.new_empty if tensors.cu_seqlens_q is None else query.new_zeros",
                "new = query.new_empty",
            ),
        ),
    ),
    Fault(
        "start-in-32-bits",
        "the offset of a batch entry overflows at 2**31 elements",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_head_and_of_a_tile[entry-key]",),
        (
            Change(
                TILES,
                "    start = pointer + tl.cast(entry, tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]\n"
                "    start += tl",
                "    start = pointer + entry * strides[0] + tl.cast(head, tl.int64) * strides[1]\n    start += tl",
            ),
        ),
    ),
    Fault(
        "head-in-32-bits",
        "the offset of a head overflows at 2**31 elements",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_head_and_of_a_tile[head-key]",),
        (
            Change(
                TILES,
                "tl.cast(head, tl.int64) * strides[1]\n    start += tl.cast(first_row",
                "head * strides[1]\n    start += tl.cast(first_row",
            ),
        ),
    ),
    Fault(
        "sequence-in-32-bits",
        "the offset of a packed sequence overflows at 2**31 elements",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_packed_sequence",),
        (Change(TILES, "tl.cast(first_row, tl.int64) * strides[2]", "tl.cast(first_row, tl.int32) * strides[2]"),),
    ),
    Fault(
        "tile-in-32-bits",
        "the offset of a tile overflows at 2**31 elements",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_head_and_of_a_tile[tile-key]",),
        (Change(TILES, "matrix[0] + tl.cast(start, tl.int64) * matrix[1]", "matrix[0] + start * matrix[1]"),),
    ),
    Fault(
        "wide-rows-in-32-bits",
        "rows far apart are thought to need no 64-bit offsets",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_table[rel_key]",),
        (Change(CONFIGS, "column_stride >= 2**31", "column_stride >= 2**41"),),
    ),
    Fault(
        "wide-values-table-in-32-bits",
        "of the tables only rel_key is looked at for 64-bit offsets",
        (f"{ON_KERNEL_SURVIVORS}::test_offsets_of_a_table[rel_value]",),
        (Change(ARGUMENTS, "for table in (tensors.rel_key, tensors.rel_value):", "for table in (tensors.rel_key,):"),),
    ),
    Fault(
        "gradient-of-infinite-lse",
        "a NaN gradient of an lse that is -inf spreads",
        (f"{ON_FEATURES}::test_nan_gradient_of_an_lse_that_is_infinite[clamp]",),
        (Change(OPS, "d_lse = d_lse.masked_fill(lse == -torch.inf, 0)", "d_lse = d_lse"),),
    ),
)

OF_BLOCKWISE = (
    Fault(
        "blockwise-sign-of-query-offset",
        "relative positions have the sign of query_offset turned round",
        (f"{ON_EDGES}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "1) - self.chunk.sequence.query_offset", "1) + self.chunk.sequence.query_offset"),),
    ),
    Fault(
        "blockwise-band-off-by-one",
        "the columns of the band stand for the next relative position",
        (f"{ON_EDGES}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "return self.keys.start - (self.queries.stop - 1)", "return self.keys.start - self.queries.stop"),),
    ),
    Fault(
        "blockwise-causal-without-the-diagonal",
        "a causal query does not see its own position, a window not its last",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "self.column(right + 1, everything)", "self.column(right, everything)"),),
    ),
    Fault(
        "blockwise-window-off-by-one-on-the-left",
        "the key farthest in the past of a window is hidden",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "self.column(-left, everything)", "self.column(1 - left, everything)"),),
    ),
    Fault(
        "blockwise-block-misses-its-last-key",
        "the last query of a block does not see the last key of its window",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "min(stop + offset + right, num_keys)", "min(stop + offset + right - 1, num_keys)"),),
    ),
    Fault(
        "blockwise-clamp-for-zero",
        "clamped and bounded tables are taken for each other",
        RANDOM,
        (Change(BLOCKS, "if spec.clamp else None", "if not spec.clamp else None", times=2),),
    ),
    Fault(
        "blockwise-last-row-lost",
        "the last row of a bounded table does not apply",
        RANDOM,
        (Change(BLOCKS, "self.column(spec.last + 1, visible)", "self.column(spec.last, visible)"),),
    ),
    Fault(
        "blockwise-corner-not-cleared",
        "an element beside the scores is taken for a gradient",
        RANDOM,
        (Change(BLOCKS, "before = c < corner - m", "before = c < corner - m - 1"),),
    ),
    Fault(
        "blockwise-head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation", *RANDOM),
        (
            Change(
                BLOCKS,
                "slice(first // group, first // group + 1)",
                "slice(start % num_key_heads, start % num_key_heads + 1)",
            ),
        ),
    ),
    Fault(
        "blockwise-shared-table-of-the-first-head",
        "the gradient of a table that heads share is not summed over them",
        RANDOM,
        (Change(BLOCKWISE, "left.flatten(0, 1).mT, right.flatten(0, 1)", "left[0].mT, right[0]"),),
    ),
    Fault(
        "blockwise-cotangent-of-lse-dropped",
        "gradients lack what comes through lse",
        RANDOM,
        (Change(BLOCKWISE, ".div_(row_sum).sub_(d_lse)", ".div_(row_sum)"),),
    ),
    Fault(
        "blockwise-rounding-of-lse-in-delta",
        "delta has the rounding of lse, which dP does not",
        (f"{ON_EDGES}::test_large_logits_in_float16", ON_RANDOM, ON_BLOCKWISE),
        (Change(BLOCKWISE, "d_probs).div_(row_sum).sub_", "d_probs).sub_"),),
    ),
    Fault(
        "blockwise-dropout-by-local-column",
        "dropout counts keys from the first that a block sees",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (Change(BLOCKS, "query[:, None], self.keys)", "query[:, None], slice(0, self.num_keys))"),),
    ),
    Fault(
        "blockwise-dropout-by-local-head",
        "dropout counts heads from the first of a chunk",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (
            Change(
                BLOCKS,
                "keep_mask(seed, dropout_p, sequence, head[:, None, None],",
                "keep_mask(seed, dropout_p, sequence, head[:, None, None] - self.chunk.heads.start,",
            ),
        ),
    ),
    Fault(
        "blockwise-backward-without-dropout",
        "the gradient of value counts what was dropped",
        (f"{ON_DROPOUT}::test_backward_drops_what_the_forward_dropped",),
        (Change(BLOCKWISE, "probs = block.scores_view(band).mul_(block.dropout)", "probs = block.scores_view(band)"),),
    ),
    Fault(
        "blockwise-slope-of-the-softcap",
        "the derivative of the softcap is missing",
        RANDOM,
        (Change(BLOCKWISE, "return d_scores if slope is None else d_scores.mul_(slope)", "return d_scores"),),
    ),
    Fault(
        "blockwise-nothing-seen",
        "-inf - -inf: a row that sees nothing becomes NaN",
        (f"{ON_MASKS}::test_rows_that_see_nothing", "-k", "blockwise"),
        (Change(BLOCKWISE, "    row_max.masked_fill_(row_max == -math.inf, 0)\n", ""),),
    ),
    Fault(
        "blockwise-lse-of-a-huge-mask",
        "probabilities beside logits of finfo.min come from an lse that has no digits for the sum",
        (f"{ON_MASKS}::test_mask_of_finfo_min", "-k", "blockwise"),
        (
            Change(
                BLOCKWISE,
                "by_lse = softcap is None and (mask is None or mask.dtype == torch.bool)",
                "by_lse = softcap is None",
            ),
        ),
    ),
    Fault(
        "blockwise-scale-for-rel-scale",
        "d_rel_query has scale for rel_scale",
        RANDOM,
        (Change(BLOCKWISE, "chunk.rel_key, chunk.spec.rel_scale)", "chunk.rel_key, chunk.spec.scale)"),),
    ),
    Fault(
        "blockwise-keys-of-the-wrong-sequence",
        "the gradients of keys go to the first sequence of a packed batch",
        RANDOM_PACKED,
        (Change(BLOCKS, "shifted(self.keys, self.chunk.sequence.keys.start)", "self.keys"),),
    ),
    Fault(
        "blockwise-delta-from-out",
        "delta is computed from a rounded out",
        (f"{ON_DELTA}::test_table_gradient_is_as_good_as_one_rounding", "-k", "clipped"),
        (
            Change(
                BLOCKWISE,
                "delta = torch.linalg.vecdot(probs, d_probs).div_(row_sum).sub_(d_lse)",
                "rounded = (probs @ chunk.value[:, block.keys]).to(chunk.tensors.query.dtype).to(probs.dtype)\n"
                "    delta = torch.linalg.vecdot(rounded, d_out).sub_(d_lse)",
            ),
        ),
    ),
    Fault(
        "sums-in-the-inputs-dtype",
        "scores and sums have the dtype of the inputs",
        (f"{ON_BLOCKWISE}::test_error_rule", f"{ON_OPS}::test_return_lse"),
        (Change(RESULTS, "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype"),),
    ),
    Fault(
        "gradients-collected-in-the-inputs-dtype",
        "the gradient of key is rounded at every block of queries",
        (f"{ON_SURVIVORS}::test_gradients_are_rounded_once",),
        (
            Change(
                BLOCKWISE,
                "            add_transposed_product(self.key[block.key_rows], d_scores, block.query)\n",
                "            add_transposed_product(self.key[block.key_rows], d_scores, block.query)\n"
                "            dtype = chunk.tensors.key.dtype\n"
                "            self.key[block.key_rows] = self.key[block.key_rows].to(dtype).to(self.key.dtype)\n",
            ),
        ),
    ),
)

OF_ALL = (
    Fault(
        "dropout-from-the-start-of-the-word",
        "keys that do not begin with a word of random bits take those of the keys before",
        (f"{ON_DROPOUT}::test_words_are_philox",),
        (Change(DROPOUT, "words[..., keys.start - 4 * start : keys.stop - 4 * start]", "words[..., : keys.stop - keys.start]"),),
    ),
    Fault(
        "dropout-words-exchanged",
        "the kernels take the words of random bits in another order",
        (f"{ON_FEATURES}::test_every_implementation_drops_the_same[0.5]",),
        (Change(KEPT, "even = tl.where(offs_n & 2 == 0, word_0, word_2)", "even = tl.where(offs_n & 2 == 0, word_2, word_0)"),),
    ),
    Fault(
        "future-first",
        "tables are read with the most distant future first",
        (ON_POSITIONS,),
        (
            Change(
                POSITIONS,
                "row = relative_position.clamp(self.first, self.last) - self.first",
                "row = self.last - relative_position.clamp(self.first, self.last)",
            ),
        ),
    ),
    Fault(
        "packed-keys-of-the-wrong-sequence",
        "the keys of a packed sequence begin where its queries do",
        RANDOM_PACKED,
        (
            Change(
                SPEC,
                "slice(starts_k[batch], starts_k[batch + 1])",
                "slice(starts_q[batch], starts_q[batch] + starts_k[batch + 1] - starts_k[batch])",
            ),
        ),
    ),
    Fault(
        "key-lengths-not-limited-elsewhere",
        "where key_lengths are not checked, those beyond the keys count keys that do not exist",
        (ON_SURVIVORS,),
        (Change(SPEC, "tensors.key_lengths.clamp(0, num_keys).tolist()", "tensors.key_lengths.tolist()"),),
    ),
    Fault(
        "autocast-does-not-cast",
        "under autocast float32 inputs stay float32",
        (f"{ON_TORCH}::test_autocast_casts_as_for_sdpa",),
        (Change(FUNCTIONAL, "    dtype = torch.get_autocast_dtype(device)\n", "    dtype = torch.float32\n"),),
    ),
    Fault(
        "autocast-inside",
        "autocast rounds the products within the forward",
        (f"{ON_OPS}::test_autocast_does_not_change_the_precision[blockwise]",),
        (
            Change(
                OPS,
                "    with without_autocast(tensors.query.device):\n        return *blockwise",
                "    if True:\n        return *blockwise",
            ),
        ),
    ),
    Fault(
        "tangents-go-unnoticed",
        "forward mode gets zeros as derivatives where nothing has a gradient in reverse mode",
        (f"{ON_TORCH}::test_no_forward_mode_goes_unnoticed",),
        (Change(OPS, "    if forward_ad._current_level >= 0:\n        return True\n", ""),),
    ),
    Fault(
        "second-derivative-of-a-constant",
        "the backward cannot be told from one that nobody differentiates: terms of second derivatives are dropped",
        (f"{ON_OPS}::test_gradient_penalty_names_the_operator",),
        (Change(OPS, "run = _Backward.apply if function else", "run ="),),
    ),
    Fault(
        "gradients-in-another-order",
        "the gradients of key and value are exchanged",
        RANDOM,
        (
            Change(
                OPS,
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
                "    query, key, value, *others = gradients\n"
                "    gradients = (query, value, key, *others)\n"
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
            ),
        ),
    ),
)

FAULTS: tuple[Fault, ...] = (
    *OF_QUADS,
    *OF_BAND,
    *OF_FORWARD,
    *OF_MASKS,
    *OF_ROWS,
    *OF_COLUMNS,
    *OF_TABLE,
    *OF_LAUNCHERS,
    *OF_BLOCKWISE,
    *OF_ALL,
)

"""Faults in the kernels."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    ARGUMENTS,
    BAND,
    DKV,
    DQ,
    DTABLE,
    FORWARD,
    LOGITS,
    MASKING,
    ON_BACKWARD,
    ON_FEATURES,
    ON_FORWARD,
    ON_GUARDS,
    ON_PROBABILITIES,
    ON_ROTATIONS,
    ON_TABLES,
    ROWS_OF_TABLE,
    SCORES,
    STORED,
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
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
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
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(SCORES, "row_sum * rescale + tl.sum(probs, axis=1), rescale", "row_sum + tl.sum(probs, axis=1), rescale"),),
    ),
    Fault(
        "accumulator-in-16-bits",
        "the sum of probabilities times values is rounded to the inputs' dtype at every tile",
        (f"{ON_BACKWARD}::test_long_sums_are_rounded_once",),
        (Change(FORWARD, "acc * rescale[:, None], input", "(acc * rescale[:, None]).to(value.dtype).to(tl.float32), input"),),
    ),
    Fault(
        "lse-in-base-2",
        "the factor from base 2 is missing in lse",
        (f"{ON_FORWARD}::test_one_table_row_moves_only_its_diagonal[0-2]",),
        (Change(FORWARD, "row_max * (scale * LN_2) + log_sum * LN_2", "row_max * scale + log_sum * LN_2"),),
    ),
    Fault(
        "nothing-seen-so-far",
        "-inf - -inf: a row whose first tile is hidden becomes NaN",
        (f"{ON_FORWARD}::test_rows_that_see_nothing[torch.float32-causal]",),
        (
            Change(
                SCORES,
                'shift = tl.where(new_max == -float("inf"), 0.0, new_max)',
                "shift = new_max",
            ),
        ),
    ),
    Fault(
        "nothing-seen-at-all",
        "0 / 0: out of a query that sees nothing is NaN",
        (f"{ON_FORWARD}::test_rows_that_see_nothing[torch.float32-causal]",),
        (Change(FORWARD, "row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  #", "row_sum = row_sum  #"),),
    ),
    Fault(
        "maximum-not-subtracted-first",
        "logits are scaled before the maximum is subtracted: large ones have no digits left for their difference",
        (f"{ON_FEATURES}::test_mask_of_finfo_min[full-torch.float32]", f"{ON_PROBABILITIES}::test_large_logits[10000.0-full]"),
        (Change(SCORES, "(scores - shift[:, None]) * scale)", "scores * scale - (shift * scale)[:, None])"),),
    ),
    Fault(
        "log-sum-exp-in-one-number",
        "the backward takes the maximum and the logarithm of the sum together, which large logits leave no digits for",
        (f"{ON_PROBABILITIES}::test_large_logits[100-full]",),
        (Change(SCORES, "exceeding * scale - log_sum[:, None]", "scores * scale - (row_max * scale + log_sum[:, None])"),),
    ),
    Fault(
        "scores-above-the-maximum",
        "a score that other tiles sum to more than the forward's maximum has a probability of more than one",
        (f"{ON_PROBABILITIES}::test_scores_that_do_not_repeat[full]",),
        (Change(SCORES, "tl.minimum(scores, row_max) - row_max", "scores - row_max"),),
    ),
    Fault(
        "terms-rounded-at-any-scale",
        "attention by position alone, with a scale of 0 in bfloat16 on a GPU: all terms are float16's largest number",
        (f"{ON_ROTATIONS}::test_scales_at_which_float16_holds_no_terms[by position alone-registers]",),
        (Change(ARGUMENTS, " and selection.float16_holds_terms(scale)", ""),),
    ),
    Fault(
        "far-terms-not-rounded",
        "near a clamped table terms are rounded to float16, beyond it not: kernels with other tiles disagree on a pair",
        (f"{ON_PROBABILITIES}::test_one_visible_key_has_all_of_it[clamp-first key-float16 terms]",),
        (Change(ROWS_OF_TABLE, "past, future = rounded(past), rounded(future)", "past, future = past, future"),),
    ),
    Fault(
        "gathered-terms-not-rounded",
        "kernels that gather take terms in float32, those that rotate in registers in float16",
        (f"{ON_PROBABILITIES}::test_one_visible_key_has_all_of_it[clamp future, bias-first key-float16 terms]",),
        (Change(ROWS_OF_TABLE, 'TILE.rotation == "gather" and TILE.round_terms', "False"),),
    ),
    Fault(
        "keys-before-the-window-are-read",
        "keys that a window hides from every query are multiplied by 0: NaN if they hold NaN",
        (f"{ON_FEATURES}::test_nan_that_no_query_sees[-window]",),
        (Change(MASKING, "first_key = tl.maximum(query_offset - window[0], 0)", "first_key = 0"),),
    ),
    Fault(
        "keys-behind-all-queries-are-read",
        "keys that causality hides from every query are multiplied by 0: NaN if they hold NaN",
        (f"{ON_FEATURES}::test_nan_that_no_query_sees[-causal_offset]",),
        (Change(MASKING, "tl.minimum(num_keys, num_queries + query_offset + window[1])", "num_keys"),),
    ),
    Fault(
        "head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_2]",),
        (Change(FORWARD, "place.entry, head // SHAPE.group,", "place.entry, head % (num_heads // SHAPE.group),", times=2),),
    ),
    Fault(
        "strides-of-the-key-for-the-value",
        "value is addressed with the strides of key",
        (f"{ON_FORWARD}::test_strides[padded]",),
        (
            Change(
                ARGUMENTS,
                "            *map(strided, tensors[:4]),\n",
                "            *map(strided, tensors[:2]),\n"
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
                ARGUMENTS,
                "rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query",
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
                "keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])",
                "keep_mask(call.dropout, place.batch, head, offs_m[:, None], tile_n[None, :])",
            ),
        ),
    ),
    Fault(
        "race-of-packed-queries",
        "programs also write the rows behind their sequence, which belong to the next",
        (f"{ON_GUARDS}::test_guarded[packed_everything-zero-shuffled]",),
        (Change(FORWARD, "valid_m = offs_m < place.num_queries", "valid_m = offs_m < call.sequences.max_seqlen_q"),),
    ),
)


OF_ROWS = (
    Fault(
        "delta-without-its-correction",
        "the other kernels get rowsum(out * d_out), with the rounding of out",
        (f"{ON_FEATURES}::test_sharp_attention_in_float16[full]",),
        (Change(DQ, "tl.store(deltas + offs_m, delta + correction", "tl.store(deltas + offs_m, delta"),),
    ),
    Fault(
        "far-sums-without-the-correction",
        "far keys' sums of dS keep the rounding of out, which the end rows' gradients add up",
        (f"{ON_FEATURES}::test_sharp_attention_in_float16[clamp]", f"{ON_BACKWARD}::test_table_gradient_needs_the_exact_delta"),
        (
            Change(DQ, "lane_consistent(past - correction * past_sum,", "lane_consistent(past,"),
            Change(DQ, "lane_consistent(future - correction * future_sum,", "lane_consistent(future,"),
        ),
    ),
    Fault(
        "cotangent-of-lse-dropped",
        "d_query lacks what comes through lse",
        (f"{ON_BACKWARD}::test_gradient_through_one_result[full-lse]",),
        (Change(DQ, "delta -= tl.load(d_lses", "delta -= 0.0 * tl.load(d_lses"),),
    ),
    Fault(
        "cotangent-of-lse-dropped-from-delta",
        "d_key and the gradients of the tables lack what comes through lse",
        (f"{ON_BACKWARD}::test_gradient_through_one_result[full-lse]",),
        (Change(DQ, "correction -= tl.load(d_lses", "correction -= 0.0 * tl.load(d_lses"),),
    ),
    Fault(
        "rows-slope-of-the-softcap",
        "the derivative of the softcap is missing in d_query",
        (f"{ON_FEATURES}::test_shapes_and_scales[-negative_scale_softcap]",),
        (Change(DQ, "                d_scores *= slope\n", "                d_scores *= 1.0\n"),),
    ),
    Fault(
        "dropout-unscaled",
        "the scale of dropout is missing in dP",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (Change(SCORES, "d_probs * tl.cast(call.dropout.keep_scale, tl.float32), 0.0)", "d_probs, 0.0)"),),
    ),
    Fault(
        "scale-for-rel-scale",
        "d_query of the relative term is scaled as the other",
        (f"{ON_FEATURES}::test_shapes_and_scales[-rel_scale_of_the_query]",),
        (
            Change(
                DQ,
                "if call.scaling.rel_scale is not None:\n                        d_scores *=",
                "if False:\n                        d_scores *=",
            ),
        ),
    ),
    Fault(
        "gradients-of-the-last-block-lost",
        "of the blocks of rows that a tile's gradients lie in, the last is not multiplied with them",
        (f"{ON_FEATURES}::test_shapes_and_scales[-width_40]",),
        (
            Change(
                BAND,
                "for ahead in tl.static_range(TILE.block_m // TILE.block_n + 1):",
                "for ahead in tl.static_range(TILE.block_m // TILE.block_n):",
            ),
        ),
    ),
    Fault(
        "rows-query-offset",
        "the gradient of the query is taken at distances with the sign of query_offset turned round",
        (f"{ON_BACKWARD}::test_one_table_row_reaches_only_its_diagonal[small--1]",),
        (
            Change(
                DQ,
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
            f"{ON_BACKWARD}::test_nan_in_rows_that_no_visible_pair_has",
        ),
        (Change(LOGITS, "if CHECKS_QUERIES or mask is not None:", "if mask is not None:"),),
    ),
    Fault(
        "columns-read-behind-the-queries",
        "queries behind the last are loaded, from memory of others",
        (f"{ON_GUARDS}::test_guarded[dropout-zero-shuffled]",),
        (
            Change(
                DKV,
                "query = load_rows(head_queries, row_start, tile_m, valid_m,",
                "query = load_rows(head_queries, row_start, tile_m, tile_m >= 0,",
            ),
        ),
    ),
    Fault(
        "columns-head-modulo-groups",
        "keys collect the gradients of query heads m * Hk + h instead of h * group + m",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_2]",),
        (Change(DKV, "head = key_head * SHAPE.group + member", "head = member * (num_heads // SHAPE.group) + key_head"),),
    ),
    Fault(
        "value-gradient-without-dropout-scale",
        "d_value is not scaled by 1 / (1 - p)",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (Change(DKV, "d_value *= tl.cast(call.dropout.keep_scale, tl.float32)", "d_value *= 1.0"),),
    ),
    Fault(
        "value-gradient-in-16-bits",
        "the sum of probabilities times d_out is rounded to the inputs' dtype at every tile",
        (f"{ON_BACKWARD}::test_long_sums_are_rounded_once",),
        (Change(DKV, "d_out, d_value, input_precision", "d_out, d_value.to(d_out.dtype).to(tl.float32), input_precision"),),
    ),
    Fault(
        "columns-sides-swapped",
        "keys beyond a clamped table take the term of the other end",
        (f"{ON_BACKWARD}::test_tables[default-wholly_past-clamp]",),
        (Change(DKV, "side = tl.where(is_past, 0, 1)", "side = tl.where(is_past, 1, 0)"),),
    ),
    Fault(
        "columns-limits-not-turned-round",
        "the near part of the columns' walk is that of the table as queries see it",
        (f"{ON_BACKWARD}::test_tables[default-past-clamp]",),
        (
            Change(
                MASKING,
                "key_start, -last, -first, -place.query_offset,",
                "key_start, first, last, -place.query_offset,",
            ),
        ),
    ),
    Fault(
        "race-of-packed-keys",
        "programs write zeros to the keys behind their sequence, which belong to the next",
        (f"{ON_GUARDS}::test_guarded[packed_everything-zero-shuffled]",),
        (
            Change(
                DKV,
                "valid_n = offs_n < place.key_rows  #",
                "valid_n = offs_n < call.sequences.max_seqlen_k  #",
            ),
        ),
    ),
    Fault(
        "columns-slope-of-the-softcap",
        "the derivative of the softcap is missing in d_key and the gradients of tables",
        (f"{ON_FEATURES}::test_shapes_and_scales[-negative_scale_softcap]",),
        (Change(DKV, "                        d_scores *= slope\n", "                        d_scores *= 1.0\n"),),
    ),
    Fault(
        "columns-dropout-by-entry",
        "in a packed batch keys and tables get the gradients of what the first sequence keeps",
        (f"{ON_FEATURES}::test_packed[full-0.4]",),
        (Change(DKV, "keep_mask(call.dropout, place.batch, head", "keep_mask(call.dropout, place.entry, head"),),
    ),
)


OF_TABLE = (
    Fault(
        "shared-table-of-the-first-heads",
        "the gradient of a table that heads share is not summed over them",
        (f"{ON_BACKWARD}::test_number_of_splits[False-clamp]",),
        (Change(STORED, "        return first_item, 1\n", "        return first_item, num_heads\n"),),
    ),
    Fault(
        "table-walk-begins-late",
        "queries that meet only the last rows of a block of rows are left out",
        (f"{ON_BACKWARD}::test_lengths[15-17]",),
        (Change(DTABLE, "query_offset - relative - (BLOCK_N - 1), 0)", "query_offset - relative, 0)"),),
    ),
    Fault(
        "table-loses-the-diagonal",
        "a block of rows that begins at the edge of the window is skipped",
        (f"{ON_TABLES}::test_every_alignment_of_a_window",),
        (Change(DTABLE, "tl.where(relative > call.window[1], 0, span)", "tl.where(relative >= call.window[1], 0, span)"),),
    ),
    Fault(
        "race-of-table-splits",
        "all programs that share a block of rows write their sum to the same place",
        (f"{ON_BACKWARD}::test_number_of_splits[True-full]",),
        (Change(DTABLE, "head_matrix(d_rows, split, table_head", "head_matrix(d_rows, 0, table_head"),),
    ),
    Fault(
        "race-of-table-rows",
        "the last block of rows writes one row more: the first of the next head's, or memory of others",
        (f"{ON_GUARDS}::test_guarded[dropout-zero-shuffled]",),
        (
            Change(
                DTABLE,
                "(position <= last + MARGIN)",
                "(position <= last + MARGIN + 1)",
            ),
        ),
    ),
    Fault(
        "race-of-bias-heads",
        "all heads write the gradient of rel_bias to the first head's",
        (f"{ON_FEATURES}::test_shapes_and_scales[-groups_of_3]",),
        (Change(DTABLE, "row_vector(d_biases, split, table_head, row)", "row_vector(d_biases, split, 0, row)"),),
    ),
)

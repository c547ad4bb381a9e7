"""Faults in the kernels, their planning and their launches."""

from __future__ import annotations

from tools.mutants.fault import Change, Fault

KERNELS = (
    Fault(
        "sign-of-r",
        "the forward takes the relative position of the query as the key sees it",
        ("tests/interpreter/test_forward.py::test_tables[32x16-shorter-clamp]",),
        (
            Change(
                "triton_relattn/kernels/forward.py",
                "relative = key_start - row_start - place.query_offset",
                "relative = row_start - key_start + place.query_offset",
            ),
        ),
    ),
    Fault(
        "sign-of-query-offset",
        "causal masks and windows lie where -query_offset would have them",
        ("tests/interpreter/test_forward.py::test_tables[32x16-shorter-clamp]",),
        (Change("triton_relattn/kernels", "(place.query_offset + window[1])", "(window[1] - place.query_offset)"),),
    ),
    Fault(
        "negative-scale-turns-the-table",
        "the query is negated for a negative scale, and the relative term with it",
        ("tests/interpreter/test_features.py::test_shapes_and_scales[-negative_scale_of_the_query]",),
        (
            Change(
                "triton_relattn/kernels",
                "rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query",
                "rel_query = tensors.rel_query",
            ),
        ),
    ),
    Fault(
        "accumulator-not-rescaled",
        "what was summed keeps its scale when the maximum grows",
        ("tests/implementations/test_diagonals.py::test_one_table_row_moves_only_its_diagonal[triton_in_small_blocks-0-2]",),
        (Change("triton_relattn/kernels/forward.py", "value, acc * rescale[:, None]", "value, acc"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "nothing-seen-so-far",
        "-inf - -inf: a row whose first tile is hidden becomes NaN",
        ("tests/implementations/test_hidden.py::test_whole_blocks_that_see_nothing[triton_in_small_blocks-causal-clamp-exact]",),
        (Change("triton_relattn/kernels", 'shift = tl.where(new_max == -float("inf"), 0.0, new_max)', "shift = new_max"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "nothing-seen-at-all",
        "0 / 0: out of a query that sees nothing is NaN",
        ("tests/implementations/test_hidden.py::test_whole_blocks_that_see_nothing[triton_in_small_blocks-causal-clamp-exact]",),
        (Change("triton_relattn/kernels", "row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  #", "row_sum = row_sum  #"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "maximum-not-subtracted-first",
        "logits are scaled before the maximum is subtracted: large ones have no digits left for their difference",
        (
            "tests/interpreter/test_features.py::test_mask_of_finfo_min[full-torch.float32]",
            "tests/interpreter/test_probabilities.py::test_large_logits[10000.0-full]",
        ),
        (Change("triton_relattn/kernels", "(scores - shift[:, None]) * scale)", "scores * scale - (shift * scale)[:, None])"),),
    ),
    Fault(
        "log-sum-exp-in-one-number",
        "the backward takes the maximum and the logarithm of the sum together, which large logits leave no digits for",
        ("tests/interpreter/test_probabilities.py::test_large_logits[100-full]",),
        (
            Change(
                "triton_relattn/kernels",
                "exceeding * scale - log_sum[:, None]",
                "scores * scale - (row_max * scale + log_sum[:, None])",
            ),
        ),
    ),
    Fault(
        "scores-above-the-maximum",
        "a score that other tiles sum to more than the forward's maximum has a probability of more than one",
        ("tests/interpreter/test_probabilities.py::test_scores_that_do_not_repeat[full]",),
        (Change("triton_relattn/kernels", "tl.minimum(scores, row_max) - row_max", "scores - row_max"),),
    ),
    Fault(
        "accumulator-in-16-bits",
        "the sum of probabilities times values is rounded to the inputs' dtype at every tile",
        ("tests/interpreter/test_backward.py::test_long_sums_are_rounded_once",),
        (
            Change(
                "triton_relattn/kernels/forward.py",
                "value, acc * rescale[:, None]",
                "value, (acc * rescale[:, None]).to(value.dtype).to(tl.float32)",
            ),
        ),
    ),
    Fault(
        "rotation-off-by-one",
        "rows of the band are rotated by one column too many",
        ("tests/implementations/test_diagonals.py::test_one_table_row_moves_only_its_diagonal[triton_in_small_blocks-0-2]",),
        (Change("triton_relattn/kernels", "else (n - m + M) % W", "else (n - m + M - 1) % W"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "wrap-off-by-one",
        "the column that has not wrapped is taken from the chunk before",
        ("tests/implementations/test_diagonals.py::test_one_table_row_moves_only_its_diagonal[triton_in_small_blocks-0-0]",),
        (Change("triton_relattn/kernels", "m % W > n if ROTATED", "m % W >= n if ROTATED"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "quads-lose-a-lane",
        "elements that come round the corner of a quad are those of the row's register, not of the next",
        ("tests/interpreter/test_rotations.py::test_rows_are_rotated_as_by_a_gather",),
        (
            Change(
                "triton_relattn/kernels",
                "lane < by if BACK else lane + by >= 4, SIGN)",
                "lane < by if BACK else lane + by > 4, SIGN)",
            ),
        ),
    ),
    Fault(
        "bias-diagonals-forget-the-warp",
        "the bias of a tile that is rotated in registers is that of the first warp's rows",
        ("tests/interpreter/test_rotations.py::test_scales_at_which_float16_holds_no_terms[by a bias alone-registers]",),
        (Change("triton_relattn/kernels", "return lane - row - 16 * warp", "return lane - row - 0 * warp"),),
    ),
    Fault(
        "far-ends-swapped",
        "far keys of the past get the last row's term, those of the future the first row's",
        ("tests/interpreter/test_forward.py::test_tables[32x16-past-clamp]",),
        (
            Change(
                "triton_relattn/kernels",
                "rows = tl.where(column == 0, 0, table.last",
                "rows = tl.where(column == 1, 0, table.last",
            ),
        ),
    ),
    Fault(
        "near-part-ends-early",
        "the far part begins where the first query of a block is beyond the table, not the last",
        ("tests/interpreter/test_forward.py::test_tables[32x16-shorter-clamp]",),
        (
            Change(
                "triton_relattn/kernels",
                "last + row_start + (BLOCK_M - 1) + query_offset + SLACK",
                "last + row_start + query_offset + SLACK",
            ),
        ),
    ),
    Fault(
        "unused-rows-are-multiplied",
        "table rows that no visible pair has are multiplied by 0: NaN if they hold NaN",
        ("tests/implementations/test_hidden.py::test_rows_that_no_visible_pair_has_may_hold_nan[triton_in_small_blocks-longer]",),
        (Change("triton_relattn/kernels", "start = tl.maximum(first, lowest)", "start = first"),),
        folders=("tests/interpreter tests/implementations",),
    ),
    Fault(
        "row-beyond-the-table",
        "one row beyond a bounded table is read: the first of the next head's, or other memory",
        ("tests/interpreter/test_forward.py::test_tables[32x16-shorter-zero]",),
        (
            Change(
                "triton_relattn/kernels",
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first, tl.uint32)",
                "(start + rows).to(tl.uint32) <= tl.cast(table.last - table.first + 1, tl.uint32)",
            ),
        ),
    ),
    Fault(
        "tail-of-keys-unmasked",
        "keys of the last tile that do not exist take part in the softmax",
        ("tests/interpreter/test_forward.py::test_lengths",),
        (Change("triton_relattn/kernels", "seen = offs_n.to(tl.uint32) < place.num_keys.to(tl.uint32)", "seen = offs_n >= 0"),),
    ),
    Fault(
        "walk-ends-early",
        "the last key that a block of queries sees is left out if it begins a tile",
        ("tests/interpreter/test_forward.py::test_lengths[1]",),
        (
            Change(
                "triton_relattn/kernels",
                "last_query + place.query_offset + window[1] + 1)",
                "last_query + place.query_offset + window[1])",
            ),
        ),
    ),
    Fault(
        "key-lengths-not-limited",
        "key_lengths beyond the keys lead beyond their memory",
        ("tests/interpreter/test_forward.py::test_lengths_beyond_the_keys_are_limited",),
        (
            Change(
                "triton_relattn/kernels",
                "tl.minimum(tl.maximum(tl.load(sequences.key_lengths + batch), 0), num_keys)",
                "tl.load(sequences.key_lengths + batch)",
            ),
        ),
    ),
    Fault(
        "head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        ("tests/interpreter/test_features.py::test_shapes_and_scales[-groups_of_2]",),
        (
            Change(
                "triton_relattn/kernels/forward.py",
                "place.entry, head // SHAPE.group,",
                "place.entry, head % (num_heads // SHAPE.group),",
                times=2,
            ),
        ),
    ),
    Fault(
        "race-of-packed-queries",
        "programs also write the rows behind their sequence, which belong to the next",
        ("tests/interpreter/test_guards.py::test_guarded[packed_everything-zero-shuffled]",),
        (
            Change(
                "triton_relattn/kernels/forward.py",
                "valid_m = offs_m < place.num_queries",
                "valid_m = offs_m < call.sequences.max_seqlen_q",
            ),
        ),
    ),
    Fault(
        "dropout-by-local-column",
        "the forward drops by the column within the tile",
        ("tests/interpreter/test_features.py::test_every_kernel_drops_the_same[small]",),
        (
            Change(
                "triton_relattn/kernels/forward.py",
                "keep_mask(call.dropout, place.batch, head, offs_m[:, None], offs_n[None, :])",
                "keep_mask(call.dropout, place.batch, head, offs_m[:, None], tile_n[None, :])",
            ),
        ),
    ),
    Fault(
        "dropout-words-exchanged",
        "the kernels take the words of random bits in another order",
        ("tests/interpreter/test_features.py::test_every_implementation_drops_the_same[0.5]",),
        (
            Change(
                "triton_relattn/kernels",
                "even = tl.where(offs_n & 2 == 0, word_0, word_2)",
                "even = tl.where(offs_n & 2 == 0, word_2, word_0)",
            ),
        ),
    ),
    Fault(
        "delta-without-its-correction",
        "the other kernels get rowsum(out * d_out), with the rounding of out",
        ("tests/interpreter/test_features.py::test_sharp_attention_in_float16[full]",),
        (Change("triton_relattn/kernels", "tl.store(deltas + offs_m, delta + correction", "tl.store(deltas + offs_m, delta"),),
    ),
    Fault(
        "residual-of-small-numbers",
        "residuals of small outs are below float16's range",
        ("tests/interpreter/test_query_from_ds.py::test_delta",),
        (Change("triton_relattn/kernels", "RESIDUAL_SCALE = tl.constexpr(2048.0)", "RESIDUAL_SCALE = tl.constexpr(1.0)"),),
    ),
    Fault(
        "cotangent-of-lse-dropped",
        "d_query lacks what comes through lse",
        ("tests/interpreter/test_backward.py::test_gradient_through_one_result[full-lse]",),
        (Change("triton_relattn/kernels", "delta -= tl.load(d_lses", "delta -= 0.0 * tl.load(d_lses"),),
    ),
    Fault(
        "race-of-table-splits",
        "all programs that share a block of rows write their sum to the same place",
        ("tests/interpreter/test_backward.py::test_number_of_splits[True-full]",),
        (Change("triton_relattn/kernels", "head_matrix(d_rows, split, table_head", "head_matrix(d_rows, 0, table_head"),),
    ),
    Fault(
        "race-of-bias-heads",
        "all heads write the gradient of rel_bias to the first head's",
        ("tests/interpreter/test_features.py::test_shapes_and_scales[-groups_of_3]",),
        (
            Change(
                "triton_relattn/kernels", "row_vector(d_biases, split, table_head, row)", "row_vector(d_biases, split, 0, row)"
            ),
        ),
    ),
    Fault(
        "ds-that-nobody-wrote",
        "keys that a length hides are read, of tiles that the dkv kernel never visits",
        ("tests/interpreter/test_workspace.py::test_calls[bias_alone-zero-heads-twice-torch.float32]",),
        (
            Change(
                "triton_relattn/kernels",
                "key_low, key_high = first_key, tl.cdiv(tl.minimum(place.num_keys, stop_key), APART) * APART",
                "key_low, key_high = first_key, stop_key",
            ),
        ),
    ),
    Fault(
        "ds-of-far-keys",
        "keys far beyond a clamped table count twice: from the workspace, and in the sums of the dq kernel",
        ("tests/interpreter/test_workspace.py::test_calls[causal-clamp-whole-registers-torch.float32]",),
        (
            Change(
                "triton_relattn/kernels", "tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)", "key_low, key_high"
            ),
        ),
    ),
    Fault(
        "parts-overwrite-each-other",
        "of several parts of the workspace only the last one is in the gradient",
        ("tests/interpreter/test_workspace.py::test_calls[lengths-full-keys-twice-torch.float32]",),
        (Change("triton_relattn/kernels", "acc += load_rows(d_rows, row, tile_n", "acc += 0.0 * load_rows(d_rows, row, tile_n"),),
    ),
    Fault(
        "band-ends-early",
        "the highest position of a band is not read for queries that have it at a multiple of 16 bytes",
        ("tests/interpreter/test_workspace.py::test_bands[zero_past-registers-whole]",),
        (
            Change(
                "triton_relattn/kernels", "(place.query_offset + highest + 1), APART)", "(place.query_offset + highest), APART)"
            ),
        ),
    ),
    Fault(
        "query-from-rows-that-nobody-sees",
        "rows of the table that no pair has are multiplied, NaN too",
        ("tests/interpreter/test_query_from_ds.py::test_what_nobody_sees",),
        (
            Change(
                "triton_relattn/kernels",
                "reached_table(score_table(inputs, call, head, first, last, SHAPE, TILE), lowest, highest, TILE)",
                "score_table(inputs, call, head, first, last, SHAPE, TILE)",
            ),
        ),
    ),
    Fault(
        "rows-of-two-programs",
        "a program stores the rows, too, that it has moved on from",
        ("tests/interpreter/test_workspace.py::test_calls",),
        (Change("triton_relattn/kernels", "valid = (position >= lowest_row) &", "valid = (position >= first - MARGIN) &"),),
    ),
    Fault(
        "key-terms-of-the-next-rows",
        "the table that is turned upside down is off by one row",
        ("tests/interpreter/test_key_terms.py::test_random_combination",),
        (Change("triton_relattn/kernels", "bias_scale, -last, -first)", "bias_scale, 1 - last, 1 - first)"),),
    ),
    Fault(
        "p2c-near-pairs-of-other-limits",
        "pairs just beyond the table are taken for far by the reader of dS, and for near by its writer",
        (
            "tests/interpreter/test_workspace.py::test_calls",
            "tests/interpreter/test_key_terms.py::test_far_tiles",
        ),
        (
            Change(
                "triton_relattn/kernels",
                "near_first, near_last = near_limits(first, last, lowest, highest_stored, LAYOUT)",
                "near_first, near_last = first, last",
            ),
        ),
    ),
    Fault(
        "p2c-ends-of-another-key-head",
        "the gradient of the ends has the keys of another head",
        ("tests/interpreter/test_key_terms.py::test_far_tiles[shared keys-clamp-2-0]",),
        (
            Change(
                "triton_relattn/kernels",
                ".repeat_interleave(self.call.heads // key.shape[1], 1)",
                ".repeat(1, self.call.heads // key.shape[1], 1, 1)",
            ),
        ),
    ),
    Fault(
        "splits-overlap",
        "a tile of keys is counted by two splits",
        ("tests/interpreter/test_key_splits.py::test_decoding",),
        (
            Change(
                "triton_relattn/kernels",
                "tl.minimum(first + keys, key_stop)",
                "tl.minimum(first + keys + TILE.block_n, key_stop)",
            ),
        ),
    ),
    Fault(
        "copies-in-lanes-differ",
        "lanes store delta to one address, whose copies differ in the last bit",
        (
            "tests/emulator/test_calls.py::test_what_was_wrong",
            "-k",
            "float32",
        ),
        (
            Change(
                "triton_relattn/kernels",
                "return tl.max(tl.broadcast_to(sums[:, None], (sums.shape[0], BLOCK_N)), axis=1)",
                "return sums",
            ),
        ),
    ),
    Fault(
        "head-in-32-bits",
        "the offset of a head overflows at 2**31 elements",
        ("tests/interpreter/test_offsets.py::test_offsets_of_a_head_and_of_a_tile[head-key]",),
        (
            Change(
                "triton_relattn/kernels",
                """tl.cast(head, tl.int64) * strides[1]
    start += tl.cast(first_row""",
                """head * strides[1]
    start += tl.cast(first_row""",
            ),
        ),
    ),
    Fault(
        "launched-as-if-aligned",
        "a tensor that begins anywhere is launched with a kernel that loads 16 bytes at a time",
        ("tests/compile/test_launching.py::test_every_group_is_described",),
        (Change("triton_relattn/kernels", "ALIGNMENT = 16", "ALIGNMENT = 1"),),
    ),
    Fault(
        "launched-on-another-device",
        "a kernel that was compiled for one GPU is launched on another",
        ("tests/compile/test_launching.py::test_each_gpu_has_its_own",),
        (Change("triton_relattn/kernels", "key = kernel.fn, device,", "key = kernel.fn,"),),
    ),
    Fault(
        "launched-alike-whatever-the-call",
        "calls with other sizes, scalars and masks are launched with the kernels of an earlier one",
        ("tests/compile/test_launching.py::test_as_triton_would_find_them",),
        (Change("triton_relattn/kernels", "(*self.cache_key, config)", "(config,)"),),
    ),
    Fault(
        "a-nested-tuple-hidden-by-tritons-own",
        "the tile of the values has the name of an attribute of Triton's tuple: kernels compile up to Triton 3.7 alone",
        ("tests/compile/test_launching.py::test_no_field_is_hidden_by_an_attribute_of_tritons_tuple",),
        (
            Change("triton_relattn/kernels", "value_tile: Tile | None", "values: Tile | None"),
            Change("triton_relattn/kernels/forward.py", "TILE.value_tile", "TILE.values"),
            Change("triton_relattn/kernels/bwd_dq.py", "TILE.value_tile", "TILE.values"),
            Change("triton_relattn/kernels/bwd_dkv.py", "TILE.value_tile", "TILE.values"),
            Change("triton_relattn/kernels/bwd_dtable.py", "TILE.value_tile", "TILE.values"),
        ),
    ),
    Fault(
        "grid-kernels-lose-the-last-line",
        "the last line of a strip counts as missing",
        ("tests/interpreter/test_grids.py::test_error_rule[selected-odd sides]",),
        (
            Change(
                "triton_relattn/kernels",
                "(tile_n // CUT.columns < strip.lines - line)",
                "(tile_n // CUT.columns < strip.lines - line - 1)",
            ),
        ),
    ),
    Fault(
        "grid-kernels-lanes-disagree",
        "lanes that hold copies of a sum store what each has rounded",
        ("tests/emulator/test_grids.py::test_lanes_agree_in_float32",),
        (
            Change(
                "triton_relattn/kernels",
                "lane_consistent(tl.sum(tile, axis=1), CUT.columns)[:, None]",
                "tl.sum(tile, axis=1)[:, None]",
            ),
        ),
    ),
)

"""Faults in the kernels' term of the keys, rel_p2c."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import DKV, DP2C, KEY_TERMS, LOGITS, MASKING, ON_KEY_TERMS, ON_WORKSPACE, STORED, TABLE_SUMS, WORKSPACE

RANDOM = (f"{ON_KEY_TERMS}::test_random_combination",)
FAR = (f"{ON_KEY_TERMS}::test_far_tiles",)
CALLS = (f"{ON_WORKSPACE}::test_calls",)

OF_KEY_TERMS = (
    Fault(
        "key-terms-of-the-next-rows",
        "the table that is turned upside down is off by one row",
        RANDOM,
        (Change(LOGITS, "bias_scale, -last, -first)", "bias_scale, 1 - last, 1 - first)"),),
    ),
    Fault(
        "key-terms-of-queries-in-another-order",
        "a mirrored tile that was rotated in registers is turned as if its queries stood in order",
        RANDOM,
        (Change(KEY_TERMS, 'if TILE.key_tile.rotation != "gather":  # its queries', "if False:  # its queries"),),
    ),
    Fault(
        "key-terms-of-the-first-half-alone",
        "the second half of a tile's queries has the terms of the first",
        RANDOM,
        (
            Change(
                KEY_TERMS,
                "next_terms(key, table, carried, half * TILE.block_n - relative",
                "next_terms(key, table, carried, -relative",
            ),
        ),
    ),
    Fault(
        "key-terms-without-rel-scale-in-the-gradient",
        "d_key has k . F's part as if rel_scale were scale",
        RANDOM,
        (Change(KEY_TERMS, "return d_key + key_sums * tl.cast(scaling.rel_scale, tl.float32)", "return d_key + key_sums"),),
    ),
    Fault(
        "key-terms-of-rows-that-no-pair-has",
        "d_key is NaN where a row is that no query reaches",
        (f"{ON_KEY_TERMS}::test_nan_that_no_query_sees",),
        (Change(DKV, "reached = reached_table(keys_table, key_lowest, key_highest, KEY_TILE)", "reached = keys_table"),),
    ),
    Fault(
        "key-terms-of-rows-for-no-keys",
        "a sequence without keys takes rows for reached: d_key is NaN if they are",
        (f"{ON_KEY_TERMS}::test_nan_that_only_an_empty_sequence_would_reach[padded]",),
        (
            Change(
                KEY_TERMS,
                "tl.where(first_key <= last_key, last_key - place.query_offset, lowest - 1)",
                "last_key - place.query_offset",
            ),
        ),
    ),
    Fault(
        "key-terms-of-rows-for-no-queries",
        "keys of a packed sequence without queries are read, and rows taken for reached: gradients are NaN if these are",
        (f"{ON_KEY_TERMS}::test_nan_that_only_an_empty_sequence_would_reach[packed]",),
        (Change(MASKING, "tl.where(num_queries > 0, key_rows, 0)", "key_rows"),),
    ),
    Fault(
        "key-terms-in-the-order-of-the-tile",
        "d_key is stored as if its keys stood in the order of the tile's columns",
        RANDOM,
        (Change(DKV, "rows = tl.arange(0, TILE.block_n)", "rows = tile_n"),),
    ),
    Fault(
        "p2c-gradient-begins-a-tile-late",
        "the first keys that a block of rows meets are left out",
        (f"{ON_KEY_TERMS}::test_table_gradient_in_float16", *CALLS),
        (Change(KEY_TERMS, "place.query_offset - (TILE.block_m - 1), ", "place.query_offset, "),),
    ),
    Fault(
        "p2c-gradient-of-the-wrong-tile",
        "on the diagonal, a pair of a row and a key is the query one tile on",
        CALLS,
        (Change(DP2C, "tile_m[:, None] < tile_n[None, :], TILE.block_m", "tile_m[:, None] <= tile_n[None, :], TILE.block_m"),),
    ),
    Fault(
        "p2c-gradient-of-the-last-part-alone",
        "the parts of a workspace do not add up",
        CALLS,
        (Change(DP2C, "    if ADDS:\n        acc += load_rows", "    if False:\n        acc += load_rows"),),
    ),
    Fault(
        "far-keys-of-the-other-end",
        "a far tile has the terms of the other end of the table",
        FAR,
        (
            Change(
                KEY_TERMS, "head, tl.where(is_past, 0, 1), place.key_start)", "head, tl.where(is_past, 1, 0), place.key_start)"
            ),
        ),
    ),
    Fault(
        "key-terms-without-rel-scale",
        "k . F is not multiplied by rel_scale",
        (f"{ON_KEY_TERMS}::test_far_tiles[shared keys-clamp-2-0]", *RANDOM),
        (Change(LOGITS, "        if TILE.key_tile.has_scale:\n", "        if False:\n"),),
    ),
    Fault(
        "key-terms-of-the-first-head",
        "all heads have the first head's rel_p2c",
        (f"{ON_KEY_TERMS}::test_far_tiles[window-clamp-1-]", *RANDOM),
        (Change(LOGITS, "head_matrix(inputs.rel_p2c, 0, head, 0", "head_matrix(inputs.rel_p2c, 0, 0, 0"),),
    ),
    Fault(
        "far-queries-of-the-other-end",
        "d_key has the other end of the table for far queries",
        FAR,
        (Change(KEY_TERMS, "add_end_rows(d_key, future, past, table", "add_end_rows(d_key, past, future, table"),),
    ),
    Fault(
        "far-queries-without-rel-scale",
        "d_key has far queries' part as if rel_scale were scale",
        FAR,
        (
            Change(
                KEY_TERMS,
                "        past *= tl.cast(table.scale, tl.float32)\n        future *= tl.cast(table.scale, tl.float32)\n",
                "        past *= 1.0\n",
            ),
        ),
    ),
    Fault(
        "far-queries-on-the-wrong-side",
        "in the gradient of the ends, sums over far queries of the past and the future are exchanged",
        FAR,
        (
            Change(
                KEY_TERMS,
                "side_vector(far_key_sums, place.entry, head, 0,",
                "side_vector(far_key_sums, place.entry, head, 1 - 0,",
            ),
            Change(
                KEY_TERMS,
                "side_vector(far_key_sums, place.entry, head, 1, place",
                "side_vector(far_key_sums, place.entry, head, 0, place",
            ),
        ),
    ),
    Fault(
        "p2c-ends-of-another-key-head",
        "the gradient of the ends has the keys of another head",
        (f"{ON_KEY_TERMS}::test_far_tiles[shared keys-clamp-2-0]",),
        (
            Change(
                TABLE_SUMS,
                ".repeat_interleave(self.call.heads // key.shape[1], 1)",
                ".repeat(1, self.call.heads // key.shape[1], 1, 1)",
            ),
        ),
    ),
    Fault(
        "p2c-ends-read-keys-that-nobody-sees",
        "the gradient of the ends is NaN where padding is",
        (f"{ON_KEY_TERMS}::test_nan_of_an_end_that_no_pair_reaches",),
        (Change(TABLE_SUMS, "key.masked_fill(~is_far[..., None], 0).", "key."),),
    ),
    Fault(
        "p2c-near-pairs-count-twice",
        "rows of the gradient near the ends have pairs that the dkv kernel has summed as far",
        FAR,
        (Change(DP2C, '            if TILE.coverage == "clamp":\n', "            if False:\n"),),
    ),
    Fault(
        "p2c-near-pairs-of-other-limits",
        "pairs just beyond the table are taken for far by the reader of dS, and for near by its writer",
        (*CALLS, *FAR),
        (
            Change(
                DP2C,
                "near_first, near_last = near_limits(first, last, lowest, highest_stored, LAYOUT)",
                "near_first, near_last = first, last",
            ),
        ),
    ),
    Fault(
        "p2c-pairs-beyond-the-band",
        "the workspace lacks near pairs of tiles that reach beyond its band, and the reader has other pairs",
        (f"{ON_KEY_TERMS}::test_band",),
        (
            Change(WORKSPACE, "if is_clamped and layout.has_p2c else 0", "if False else 0"),
            Change(STORED, 'if TILE.coverage == "clamp" and LAYOUT.has_p2c:', "if False:"),
            Change(STORED, "if LAYOUT.has_p2c else 0", "if False else 0"),
        ),
    ),
    Fault(
        "p2c-margin-too-narrow",
        "pairs beyond the table that are not far for their key have no row to be summed in",
        FAR,
        (Change(TABLE_SUMS, 'margin + (of_dkv if name == "rel_p2c" else 0)', "margin"),),
    ),
)

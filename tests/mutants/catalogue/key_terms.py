"""Faults in the kernels' term of the keys, rel_p2c."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    DKV,
    DP2C,
    DP2C_WORDS,
    FAR_KEYS,
    FORWARD,
    KEY_TERMS,
    MASKING,
    ON_KEY_TERMS,
    ON_WORKSPACE,
    TABLE_ENDS,
    TABLE_SUMS,
    WORKSPACE,
)

RANDOM = (f"{ON_KEY_TERMS}::test_random_combination",)
FAR = (f"{ON_KEY_TERMS}::test_far_tiles",)
WORDS = (f"{ON_WORKSPACE}::test_calls",)

OF_KEY_TERMS = (
    Fault(
        "key-terms-of-the-next-rows",
        "the table that is turned upside down is off by one row",
        RANDOM,
        (Change(FORWARD, "None, None, -last, -first)", "None, None, 1 - last, 1 - first)"),),
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
        (Change(KEY_TERMS, "whole_tile(key, table, half * TILE.block_n - relative", "whole_tile(key, table, -relative"),),
    ),
    Fault(
        "key-terms-without-rel-scale-in-the-gradient",
        "d_key has k . F's part as if rel_scale were scale",
        RANDOM,
        (Change(KEY_TERMS, "d_key += key_sums * tl.cast(scaling.rel_scale, tl.float32)", "d_key += key_sums"),),
    ),
    Fault(
        "key-terms-of-rows-that-no-pair-has",
        "d_key is NaN where a row is that no query reaches",
        (f"{ON_KEY_TERMS}::test_nan_that_no_query_sees",),
        (Change(DKV, "key_table, key_lowest, key_highest, KEY_TILE", "key_table, -last, -first, KEY_TILE"),),
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
        "key-terms-still-wait-at-the-end",
        "the last elements that wait for their rows are forgotten",
        RANDOM,
        (Change(DKV, 'd_keys is not None and KEY_TILE.carry == "both"', "d_keys is not None and False"),),
    ),
    Fault(
        "p2c-gradient-of-both-tiles-everywhere",
        "each pair of a row and a key counts for two queries",
        RANDOM,
        (
            Change(DP2C, "place, call.window) & valid_m[:, None] & belongs", "place, call.window) & valid_m[:, None]"),
            Change(DP2C, "tl.where(belongs, d_scores, d_tile)", "d_tile + d_scores"),
        ),
    ),
    Fault(
        "p2c-gradient-begins-a-tile-late",
        "the first keys that a block of rows meets are left out",
        (f"{ON_KEY_TERMS}::test_table_gradient_in_float16", *WORDS),
        (Change(KEY_TERMS, "place.query_offset - (TILE.block_m - 1), ", "place.query_offset, "),),
    ),
    Fault(
        "p2c-words-of-the-wrong-tile",
        "on the diagonal, a pair of a row and a key is the query one tile on",
        WORDS,
        (
            Change(
                DP2C_WORDS, "tile_m[:, None] < tile_n[None, :], TILE.block_m", "tile_m[:, None] <= tile_n[None, :], TILE.block_m"
            ),
        ),
    ),
    Fault(
        "p2c-words-of-the-last-part-alone",
        "the parts of a workspace do not add up",
        WORDS,
        (Change(DP2C_WORDS, "    if ROWS.adds:\n        acc += load_rows", "    if False:\n        acc += load_rows"),),
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
        "far-keys-without-rel-scale",
        "beyond the table k . F is not multiplied by rel_scale",
        FAR,
        (Change(FAR_KEYS, "call.scaling.rel_scale, None", "None, None"),),
    ),
    Fault(
        "far-keys-of-the-first-head",
        "heads that share a key share its terms beyond the table, too",
        FAR,
        (Change(FAR_KEYS, "head_matrix(inputs.rel_p2c, 0, head, 0", "head_matrix(inputs.rel_p2c, 0, 0, 0"),),
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
        "p2c-ends-of-the-first-key-head",
        "the gradient of the ends has the keys of another head",
        FAR,
        (Change(TABLE_ENDS, "head if GROUP is None else head // GROUP", "head if GROUP is None else 0"),),
    ),
    Fault(
        "p2c-ends-read-keys-that-nobody-sees",
        "the gradient of the ends is NaN where padding is",
        (f"{ON_KEY_TERMS}::test_nan_of_an_end_that_no_pair_reaches",),
        (Change(TABLE_ENDS, "if GROUP is not None:", "if False:"),),
    ),
    Fault(
        "p2c-near-pairs-count-twice",
        "rows of the gradient near the ends have pairs that the dkv kernel has summed as far",
        FAR,
        (Change(DP2C, '                if TILE.coverage == "clamp":\n', "                if False:\n"),),
    ),
    Fault(
        "p2c-near-words-count-twice",
        "the same of the words of far pairs, which are beside near ones or of another call",
        FAR,
        (Change(DP2C_WORDS, '            if TILE.coverage == "clamp":\n', "            if False:\n"),),
    ),
    Fault(
        "p2c-near-pairs-of-other-limits",
        "with a workspace, pairs just beyond the table are taken for far by the reader, and for near by the writer of words",
        (*WORDS, *FAR),
        (Change(KEY_TERMS, "return tl.minimum(first, lowest - 1), tl.maximum(last, highest + 1)\n", "return first, last\n"),),
    ),
    Fault(
        "p2c-words-beyond-the-band",
        "the workspace lacks words of near pairs, and the reader has those of other pairs",
        (f"{ON_KEY_TERMS}::test_band_of_words",),
        (
            Change(WORKSPACE, "lowest, highest = lowest - slack, highest + slack", "pass"),
            Change(KEY_TERMS, "if HAS_P2C else 0", "if False else 0"),
        ),
    ),
    Fault(
        "p2c-margin-too-narrow",
        "pairs beyond the table that are not far for their key have no row to be summed in",
        FAR,
        (Change(TABLE_SUMS, "p2c_margin = clamp_margin(*of_dkv)", "p2c_margin = 0"),),
    ),
)

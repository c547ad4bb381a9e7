"""Faults in the kernels' term of the keys, rel_p2c."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import BACKWARD, DKV, DP2C, DP2C_WORDS, FORWARD, FULL_TABLES, KEY_TERMS, ON_KEY_TERMS, ON_WORKSPACE

RANDOM = (f"{ON_KEY_TERMS}::test_random_combination",)
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
        (Change(KEY_TERMS, 'if TILE.keys.rotation != "gather":  # its queries', "if False:  # its queries"),),
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
        (Change(DKV, "d_key += key_sums * tl.cast(call.scaling.rel_scale, tl.float32)", "d_key += key_sums"),),
    ),
    Fault(
        "key-terms-of-rows-that-no-pair-has",
        "d_key is NaN where a row is that no query reaches",
        (f"{ON_KEY_TERMS}::test_nan_that_no_query_sees",),
        (Change(DKV, "key_table, key_lowest, key_highest, KEY_TILE", "key_table, -last, -first, KEY_TILE"),),
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
        "full-tables-lose-their-ends",
        "the gradient of a clamped table's end rows lacks the keys beyond it",
        (f"{ON_KEY_TERMS}::test_table_gradient_in_float16",),
        (Change(FULL_TABLES, "total.narrow(dim, 0, 1).add_(before.sum(dim, keepdim=True))", "pass"),),
    ),
    Fault(
        "full-tables-sum-in-16-bits",
        "gradients of rows that are one end row are rounded before they are summed",
        (f"{ON_KEY_TERMS}::test_sums_of_end_rows_are_float32",),
        (Change(BACKWARD, "tensor.new_empty(tensor.shape, dtype=torch.float32)", "gradient_like(tensor)"),),
    ),
)

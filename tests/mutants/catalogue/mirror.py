"""Faults in the term of the keys, rel_p2c, in plain torch."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import BANDS, BLOCKS, BLOCKWISE, FRAME, ON_BLOCKWISE, ON_MASKS, ON_RANDOM, RANDOM, RANDOM_REFERENCE, REFERENCE

OF_MIRROR = (
    Fault(
        "mirror-positions-off-by-one",
        "keys take the row of the next relative position",
        RANDOM,
        (Change(FRAME, "-(self.first_position + start)", "-(self.first_position + start) + 1"),),
    ),
    Fault(
        "mirror-forgets-where-its-keys-begin",
        "keys near the table take the rows of those that are far",
        (f"{ON_RANDOM}::test_against_the_backward_by_hand", "-k", "blockwise"),
        (Change(FRAME, "-(self.first_position + start)", "-self.first_position"),),
    ),
    Fault(
        "mirror-has-the-window-of-the-queries",
        "rows that pairs in the past need are left out, with a window or a causal mask",
        RANDOM,
        (
            Change(
                FRAME,
                "window_left=spec.window_right, window_right=spec.window_left",
                "window_left=spec.window_left, window_right=spec.window_right",
            ),
        ),
    ),
    Fault(
        "mirror-has-no-window",
        "rows that no pair has are multiplied, too: they may be NaN",
        (f"{ON_MASKS}::test_nan_that_no_query_sees",),
        (Change(FRAME, "window_left=spec.window_right, window_right=spec.window_left", "window_left=-1, window_right=-1"),),
    ),
    Fault(
        "mirror-without-far-keys",
        "keys beyond a clamped table have no term",
        RANDOM,
        (Change(BANDS, "(0, frame.near.start, frame.near.stop, frame.num_keys)", "(frame.near.start, frame.near.stop)"),),
    ),
    Fault(
        "mirror-of-the-table-as-it-is",
        "the table that meets the keys is read from the past on",
        RANDOM,
        (Change(BLOCKS, 'self.tables["rel_p2c"].flip(1)', 'self.tables["rel_p2c"]'),),
    ),
    Fault(
        "mirror-gradient-as-it-is",
        "the gradient of the table that meets the keys has its last row first",
        RANDOM,
        (Change(BLOCKWISE, 'totals["rel_p2c"].flip(1)', 'totals["rel_p2c"]'),),
    ),
    Fault(
        "mirror-with-the-scale-of-the-keys",
        "rel_scale does not reach the term of the keys",
        RANDOM,
        (Change(BLOCKS, 'tables["rel_p2c"], scale, memory)', 'tables["rel_p2c"], self.spec.scale, memory)'),),
    ),
    Fault(
        "mirror-of-the-first-head-that-shares",
        "of heads that share a key, one adds to its gradient",
        RANDOM,
        (Change(BLOCKWISE, "d_key.unflatten(1, (-1, sharing)).sum(2)", "d_key.unflatten(1, (-1, sharing))[:, :, 0]"),),
    ),
    Fault(
        "reference-p2c-of-the-wrong-pair",
        "key j and query i take the row of query j and key i",
        RANDOM_REFERENCE,
        (
            Change(
                REFERENCE,
                "(key @ rel_p2c.mT).gather(-1, row.mT).mT",
                "(key @ rel_p2c.mT).gather(-1, (rel_p2c.shape[-2] - 1 - row).mT).mT",
            ),
        ),
    ),
    Fault(
        "mirror-memory-by-place",
        "blocks keep memory of their own for the gradients of windows until the backward ends",
        (f"{ON_BLOCKWISE}::test_memory_by_names_is_used_again",),
        (Change(BANDS, 'f"rel_p2c {len(found)}"', 'f"rel_p2c from {start}"'),),
    ),
)

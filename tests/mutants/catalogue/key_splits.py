"""Faults where several programs share the keys of a block of queries."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import KEY_SPLITS, ON_KEY_SPLITS

DECODING = (f"{ON_KEY_SPLITS}::test_decoding",)

OF_KEY_SPLITS = (
    Fault(
        "splits-begin-before-their-keys",
        "a split whose near keys began before it walks those of other splits again",
        DECODING,
        (Change(KEY_SPLITS, "tl.minimum(tl.maximum(near_start, first), stop)", "tl.minimum(near_start, stop)"),),
    ),
    Fault(
        "splits-overlap",
        "a tile of keys is counted by two splits",
        DECODING,
        (Change(KEY_SPLITS, "tl.minimum(first + keys, key_stop)", "tl.minimum(first + keys + TILE.block_n, key_stop)"),),
    ),
    Fault(
        "merged-without-the-maxima",
        "splits weigh by their sums alone, whatever their largest scores are",
        DECODING,
        (Change(KEY_SPLITS, "tl.exp2((part_max - shift) * scale + log_sum)", "tl.exp2(log_sum)"),),
    ),
    Fault(
        "merged-statistics-of-the-last-split",
        "the backward gets the sum of one split",
        (f"{ON_KEY_SPLITS}::test_repeats",),
        (Change(KEY_SPLITS, "    log_sum = tl.log2(total)\n    lse =", "    lse ="),),
    ),
)

"""Faults in the way of the query's gradient, and of a table's, from words that are read 16 bytes at a time."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import DELTAS, DQ_WORDS, DTABLE_WORDS, FORWARD, ON_QUERY_WORDS, ON_WORKSPACE, WORDS, WORKSPACE

OF_QUERY_WORDS = (
    Fault(
        "tail-of-out-alone",
        "the tail is that of the values' mean by probabilities that do not sum to one after they were rounded",
        (f"{ON_QUERY_WORDS}::test_tail", f"{ON_QUERY_WORDS}::test_sharp_attention[plain-6.0]"),
        (Change(FORWARD, "tail_of(acc * exact_by_out[:, None], ", "tail_of(acc, "),),
    ),
    Fault(
        "rounded-sum-of-an-earlier-maximum",
        "the sum of the rounded probabilities keeps the scale of earlier maxima",
        (f"{ON_QUERY_WORDS}::test_tail", f"{ON_QUERY_WORDS}::test_calls"),
        (Change(FORWARD, "rounded_sum * rescale[:, None])", "rounded_sum)"),),
    ),
    Fault(
        "tail-subtracted",
        "delta is that of an out that was rounded twice",
        (f"{ON_QUERY_WORDS}::test_delta", f"{ON_QUERY_WORDS}::test_sharp_attention"),
        (Change(DELTAS, "exact = out.to(tl.float32) + tail", "exact = out.to(tl.float32) - tail"),),
    ),
    Fault(
        "tail-of-small-numbers",
        "subnormal numbers have the step of normal ones",
        (f"{ON_QUERY_WORDS}::test_delta",),
        (Change(DELTAS, "LEAST: tl.constexpr = 127 - 14 if HALF", "LEAST: tl.constexpr = 127 - 100 if HALF"),),
    ),
    Fault(
        "delta-without-the-gradient-of-lse",
        "the gradient of lse does not reach delta",
        (f"{ON_QUERY_WORDS}::test_calls[plain-square-None]",),
        (Change(DELTAS, "delta -= tl.load(row_vector(d_lses", "delta -= 0.0 * tl.load(row_vector(d_lses"),),
    ),
    Fault(
        "query-from-some-keys",
        "the query's gradient is that of the last keys, where a workspace has some at a time",
        (f"{ON_QUERY_WORDS}::test_some_keys_at_a_time",),
        (Change(WORKSPACE, "skew == 0 and part_of_unit == blocks", "skew == 0"),),
    ),
    Fault(
        "query-words-unscaled",
        "products with rel_key lack their factor",
        (f"{ON_QUERY_WORDS}::test_calls[p2c_window-tall-20000]",),
        (Change(DQ_WORDS, "acc *= tl.cast(call.scaling.rel_scale, tl.float32)", "pass"),),
    ),
    Fault(
        "query-words-not-aligned",
        "the tiles of the walk along positions begin where no words do",
        (f"{ON_QUERY_WORDS}::test_calls",),
        (Change(DQ_WORDS, "start = lowest - ((block % APART + place.query_offset + lowest) & (APART - 1))", "start = lowest"),),
    ),
    Fault(
        "query-words-of-the-first-queries",
        "every program has the queries of the first residue",
        (f"{ON_QUERY_WORDS}::test_calls",),
        (Change(DQ_WORDS, "rows = block % APART + ", "rows = "),),
    ),
    Fault(
        "query-words-nobody-wrote",
        "keys that the window hides are read, of tiles that the dkv kernel never visits",
        (f"{ON_QUERY_WORDS}::test_calls", f"{ON_QUERY_WORDS}::test_what_nobody_sees"),
        (
            Change(
                DQ_WORDS,
                "high = tl.minimum(high, offs_m + (place.query_offset + window[1] + 1))",
                "high = tl.maximum(high, 0)",
            ),
        ),
    ),
    Fault(
        "query-words-of-rows-nobody-sees",
        "rows of the table that no pair has are multiplied, NaN too",
        (f"{ON_QUERY_WORDS}::test_what_nobody_sees",),
        (Change(DQ_WORDS, "reached = Table(part, None, None, None, reached_first, reached_last)", "reached = whole"),),
    ),
    Fault(
        "rows-do-not-move-on",
        "from one residue of queries to the next the sums of a table's rows stay where they are",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE_WORDS, "acc = tl.gather(acc, tl.broadcast_to(row_before, acc.shape), axis=0)", "pass"),),
    ),
    Fault(
        "rows-of-two-programs",
        "a program stores the rows, too, that it has moved on from",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE_WORDS, "valid = (position >= lowest_row) & ", "valid = (position >= first - MARGIN) & "),),
    ),
    Fault(
        "rows-beyond-the-window",
        "rows of hidden positions get what words that nobody wrote add up to",
        (f"{ON_WORKSPACE}::test_calls", f"{ON_WORKSPACE}::test_what_nobody_sees"),
        (Change(DTABLE_WORDS, "        seen = seen & (position <= call.window[1])\n", "        pass\n"),),
    ),
    Fault(
        "words-between-multiples",
        "words are read from the multiple of 16 bytes before them",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE_WORDS, "first_query = -shift & (APART - 1)", "first_query = shift & (APART - 1)"),),
    ),
    Fault(
        "words-before-the-part",
        "keys before those of a part are read",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(WORDS, "mask=(tile_keys >= low) & (tile_keys < high)", "mask=(tile_keys >= low - 8) & (tile_keys < high)"),),
    ),
)

"""Faults in the way of the query's gradient, and of a table's, from dS that is read 16 bytes at a time."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import DELTA, DQ_FROM_DS, DTABLE, FORWARD, ON_QUERY_FROM_DS, ON_WORKSPACE, STORED, WORKSPACE

OF_QUERY_FROM_DS = (
    Fault(
        "residual-of-out-alone",
        "the residual is that of the values' mean by probabilities that do not sum to one after they were rounded",
        (f"{ON_QUERY_FROM_DS}::test_residual", f"{ON_QUERY_FROM_DS}::test_sharp_attention[plain-6.0]"),
        (Change(FORWARD, "residual = acc * exact_by_out[:, None] - acc", "residual = acc - acc"),),
    ),
    Fault(
        "rounded-sum-of-an-earlier-maximum",
        "the sum of the rounded probabilities keeps the scale of earlier maxima",
        (f"{ON_QUERY_FROM_DS}::test_residual", f"{ON_QUERY_FROM_DS}::test_calls"),
        (Change(FORWARD, "rounded_sum * rescale[:, None])", "rounded_sum)"),),
    ),
    Fault(
        "residual-subtracted",
        "delta is that of an out that was rounded twice",
        (f"{ON_QUERY_FROM_DS}::test_delta", f"{ON_QUERY_FROM_DS}::test_sharp_attention"),
        (Change(DELTA, "out.to(tl.float32) + residual", "out.to(tl.float32) - residual"),),
    ),
    Fault(
        "residual-of-small-numbers",
        "residuals of small outs are below float16's range",
        (f"{ON_QUERY_FROM_DS}::test_delta",),
        (Change(DELTA, "RESIDUAL_SCALE = tl.constexpr(2048.0)", "RESIDUAL_SCALE = tl.constexpr(1.0)"),),
    ),
    Fault(
        "residual-as-large-as-out",
        "the residual counts 2048 times",
        (f"{ON_QUERY_FROM_DS}::test_delta",),
        (Change(DELTA, "residual.to(tl.float32) * (1.0 / RESIDUAL_SCALE)", "residual.to(tl.float32)"),),
    ),
    Fault(
        "delta-without-the-gradient-of-lse",
        "the gradient of lse does not reach delta",
        (f"{ON_QUERY_FROM_DS}::test_calls[plain-square-whole]",),
        (Change(DELTA, "delta -= tl.load(row_vector(d_lses", "delta -= 0.0 * tl.load(row_vector(d_lses"),),
    ),
    Fault(
        "query-from-some-keys",
        "the query's gradient is that of the last keys, where a workspace has some at a time",
        (f"{ON_QUERY_FROM_DS}::test_some_keys_at_a_time",),
        (
            Change(
                WORKSPACE,
                "not self.layout.is_band and self.columns >= self.blocks * self.layout.dkv_block_n",
                "not self.layout.is_band",
            ),
        ),
    ),
    Fault(
        "query-from-unscaled-rows",
        "products with rel_key lack their factor",
        (f"{ON_QUERY_FROM_DS}::test_calls[p2c_window-tall-heads]",),
        (Change(DQ_FROM_DS, "acc += rel_acc * tl.cast(call.scaling.rel_scale, tl.float32)", "acc += rel_acc"),),
    ),
    Fault(
        "query-from-between-multiples",
        "the tiles of the walk along positions do not begin at multiples of 16 bytes",
        (f"{ON_QUERY_FROM_DS}::test_calls",),
        (
            Change(
                DQ_FROM_DS,
                "start_position = lowest - ((block % APART + place.query_offset + lowest) & (APART - 1))",
                "start_position = lowest",
            ),
        ),
    ),
    Fault(
        "query-of-the-first-residue",
        "every program has the queries of the first residue",
        (f"{ON_QUERY_FROM_DS}::test_calls",),
        (Change(DQ_FROM_DS, "rows = block % APART + ", "rows = "),),
    ),
    Fault(
        "query-from-ds-that-nobody-wrote",
        "keys that the window hides are read, of tiles that the dkv kernel never visits",
        (f"{ON_QUERY_FROM_DS}::test_calls", f"{ON_QUERY_FROM_DS}::test_what_nobody_sees"),
        (
            Change(
                DQ_FROM_DS,
                "high = tl.minimum(high, offs_m + (place.query_offset + window[1] + 1))",
                "high = tl.maximum(high, 0)",
            ),
        ),
    ),
    Fault(
        "query-from-rows-that-nobody-sees",
        "rows of the table that no pair has are multiplied, NaN too",
        (f"{ON_QUERY_FROM_DS}::test_what_nobody_sees",),
        (
            Change(
                DQ_FROM_DS,
                "reached_table(score_table(inputs, call, head, first, last, SHAPE, TILE), lowest, highest, TILE)",
                "score_table(inputs, call, head, first, last, SHAPE, TILE)",
            ),
        ),
    ),
    Fault(
        "query-from-hidden-keys",
        "keys beyond key_lengths are multiplied by 0: NaN if they hold NaN",
        (f"{ON_QUERY_FROM_DS}::test_what_nobody_sees",),
        (
            Change(
                DQ_FROM_DS,
                "valid_n = exists(key_start + tile_n, place, call.window)",
                "valid_n = key_start + tile_n < call.sequences.max_seqlen_k",
            ),
        ),
    ),
    Fault(
        "rows-do-not-move-on",
        "from one residue of queries to the next the sums of a table's rows stay where they are",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE, "acc = tl.gather(acc, tl.broadcast_to(row_before, acc.shape), axis=0)", "pass"),),
    ),
    Fault(
        "rows-of-two-programs",
        "a program stores the rows, too, that it has moved on from",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE, "valid = (position >= lowest_row) & ", "valid = (position >= first - MARGIN) & "),),
    ),
    Fault(
        "rows-beyond-the-window",
        "rows of hidden positions get what numbers that nobody wrote add up to",
        (f"{ON_WORKSPACE}::test_calls", f"{ON_WORKSPACE}::test_what_nobody_sees"),
        (Change(DTABLE, "        seen = seen & (position <= call.window[1])\n", "        pass\n"),),
    ),
    Fault(
        "ds-between-multiples",
        "dS is read from the multiple of 16 bytes before them",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(DTABLE, "first_query = -shift & (APART - 1)", "first_query = shift & (APART - 1)"),),
    ),
    Fault(
        "ds-before-the-part",
        "keys before those of a part are read",
        (f"{ON_WORKSPACE}::test_calls",),
        (Change(STORED, "mask=(tile_keys >= low) & (tile_keys < high)", "mask=(tile_keys >= low - 8) & (tile_keys < high)"),),
    ),
)

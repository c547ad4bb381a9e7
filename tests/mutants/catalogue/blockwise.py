"""Faults in the blockwise path."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    AS_BLOCKWISE,
    BANDS,
    BLOCKS,
    BLOCKWISE,
    DTYPES,
    FRAME,
    ON_BLOCKWISE,
    ON_DELTA,
    ON_DROPOUT,
    ON_MASKS,
    ON_OPS,
    ON_RANDOM,
    ON_STACKS,
    RANDOM,
    RANDOM_PACKED,
    STACKS,
)

OF_BLOCKWISE = (
    Fault(
        "blockwise-sign-of-query-offset",
        "relative positions have the sign of query_offset turned round",
        (f"{ON_BLOCKWISE}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "queries.start + sequences.query_offset", "queries.start - sequences.query_offset"),),
    ),
    Fault(
        "blockwise-positions-off-by-one",
        "pairs take the row and the window of the next relative position",
        (f"{ON_BLOCKWISE}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "first - position, group.heads.start", "first - position + 1, group.heads.start"),),
    ),
    Fault(
        "blockwise-causal-without-the-diagonal",
        "a causal query does not see its own position, a window not its last",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(FRAME, "tril_(right - first - start)", "tril_(right - first - start - 1)"),),
    ),
    Fault(
        "blockwise-window-off-by-one-on-the-left",
        "the key farthest in the past of a window is hidden",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(FRAME, "triu_(-left - first)", "triu_(1 - left - first)"),),
    ),
    Fault(
        "blockwise-block-misses-its-last-key",
        "the last query of a block does not see the last key of its window",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (
            Change(
                BLOCKS, "position + num_queries + spec.window_right, stop", "position + num_queries + spec.window_right - 1, stop"
            ),
        ),
    ),
    Fault(
        "blockwise-clamp-for-zero",
        "clamped and bounded tables are taken for each other",
        RANDOM,
        (Change(BANDS, "if spec.clamp else (None, None)", "if not spec.clamp else (None, None)"),),
    ),
    Fault(
        "blockwise-far-keys-of-a-bounded-table",
        "keys that no query sees at a position of a bounded table have its end rows",
        RANDOM,
        (Change(FRAME, "if self.spec.clamp and keys.start < keys.stop", "if keys.start < keys.stop"),),
    ),
    Fault(
        "blockwise-far-ends-exchanged",
        "keys in the distant past have the last row, those in the future the first",
        RANDOM,
        (
            Change(
                FRAME,
                "((slice(0, self.near.start), slice(0, 1)), (slice(self.near.stop, self.num_keys), slice(-1, None)))",
                "((slice(0, self.near.start), slice(-1, None)), (slice(self.near.stop, self.num_keys), slice(0, 1)))",
            ),
        ),
    ),
    Fault(
        "blockwise-far-end-of-the-first-head",
        "the gradient of an end row that heads share is not summed over them",
        RANDOM,
        (
            Change(
                BANDS,
                "unflatten(0, (self.num_tables, self.sharing)).sum(1, keepdim=True)",
                "unflatten(0, (self.num_tables, self.sharing))[:, :1]",
            ),
        ),
    ),
    Fault(
        "blockwise-last-row-lost",
        "the last row of a bounded table does not apply",
        RANDOM,
        (Change(BANDS, "min(max(spec.last + 1, seen.start), seen.stop)", "min(max(spec.last, seen.start), seen.stop)"),),
    ),
    Fault(
        "blockwise-end-rows-once",
        "the gradient of an end row is that of one position beyond it, not the sum",
        (f"{ON_RANDOM}::test_tables_beside_and_short", "-k", "blockwise"),
        (Change(BANDS, "piece.sum(1, keepdim=True) if is_end else piece", "piece[:, :1] if is_end else piece"),),
    ),
    Fault(
        "blockwise-hidden-rows-are-read",
        "table rows of positions that the window hides are multiplied by zero, which NaN survives",
        (f"{ON_BLOCKWISE}::test_rows_that_no_visible_pair_has_may_hold_nan",),
        (
            Change(
                FRAME,
                "low, high = max(low, -left) if left >= 0 else low, min(high, right) if right >= 0 else high",
                "pass",
            ),
        ),
    ),
    Fault(
        "blockwise-band-not-cleared",
        "what lies beside the scores in a band is taken for a gradient",
        RANDOM,
        (Change(BANDS, "        if self.width > frame.num_near:\n            self.band.zero_()\n", ""),),
    ),
    Fault(
        "blockwise-panels-in-another-order",
        "panels take the windows of the table in the order of their positions, not of their queries",
        RANDOM,
        (Change(BANDS, ".mT.flip(1).flatten(0, 1)", ".mT.flatten(0, 1)"),),
    ),
    Fault(
        "blockwise-panels-do-not-move",
        "gradients of the windows of panels are summed as if all had the positions of the last",
        RANDOM,
        (
            Change(BANDS, "(length - panel) * depth, depth, 1)", "length * depth, depth, 1)"),
            Change(BANDS, "strides, (count - 1) * panel * depth)", "strides, 0)"),
        ),
    ),
    Fault(
        "blockwise-many-panels-in-another-order",
        "with many panels and short windows, gradients of the windows are left in the order of the queries",
        RANDOM,
        (Change(BANDS, "return total.flip(1).flatten(1, 2)", "return total.flatten(1, 2)"),),
    ),
    Fault(
        "blockwise-tables-share-their-gradient",
        "the gradients of all tables are collected in the same memory",
        (f"{ON_RANDOM}::test_against_the_backward_by_hand", "-k", "blockwise"),
        (Change(BANDS, 'f"gradient of windows of {self.name}"', '"gradient of windows"'),),
    ),
    Fault(
        "blockwise-gradient-of-what-was-there",
        "the gradient of the windows begins with what is in the call's memory",
        RANDOM,
        (Change(BANDS, "beta = 0 if self._of_windows is None else 1", "beta = 1"),),
    ),
    Fault(
        "blockwise-last-panel-not-padded",
        "the queries that the last panel lacks are whatever is in memory",
        (f"{ON_BLOCKWISE}::test_results_do_not_depend_on_how_a_call_is_cut",),
        (Change(BANDS, "packed = rows.new_zeros((*self.sizes", "packed = rows.new_empty((*self.sizes"),),
    ),
    Fault(
        "blockwise-last-panel-lost",
        "the last panel's terms are not added if it has fewer queries",
        (f"{ON_BLOCKWISE}::test_results_do_not_depend_on_how_a_call_is_cut",),
        (Change(BANDS, "zip(self.scores, self.skewed, strict=True)", "zip(self.scores[:1], self.skewed[:1], strict=True)"),),
    ),
    Fault(
        "blockwise-bias-of-the-mirrored-queries",
        "the last query of a block has the bias of the first",
        RANDOM,
        (Change(BANDS, ".unfold(1, self.frame.num_near, 1).flip(1)", ".unfold(1, self.frame.num_near, 1)"),),
    ),
    Fault(
        "blockwise-frames-live-on",
        "frames and their bands refer to each other: their memory grows until the next garbage collection",
        (f"{ON_BLOCKWISE}::test_memory_is_given_back_at_once",),
        (
            Change(
                BANDS,
                "        self.sharing =",
                "        frame.__dict__.setdefault('bands', []).append(self)\n        self.sharing =",
            ),
        ),
    ),
    Fault(
        "blockwise-frame-of-other-heads",
        "heads with tables of their own have those of the heads before",
        RANDOM,
        (Change(BLOCKS, "group.heads.start if call.has_tables_of_heads else None", "None"),),
    ),
    Fault(
        "blockwise-frame-of-another-place",
        "blocks of as many queries and keys have the relative positions of the block before",
        RANDOM,
        (Change(BLOCKS, "num_queries, self.num_keys, first_position)\n", "num_queries, self.num_keys)\n"),),
    ),
    Fault(
        "blockwise-head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        RANDOM,
        (
            Change(
                BLOCKS,
                "    rows = rows.to(dtype).reshape(sequences * heads // group, group * length, width)\n",
                "    rows = rows.to(dtype).unflatten(1, (group, heads // group)).transpose(1, 2)\n"
                "    rows = rows.reshape(sequences * heads // group, group * length, width)\n",
            ),
        ),
    ),
    Fault(
        "blockwise-heads-of-the-first-keys",
        "where heads are cut, all groups take the queries of the first",
        RANDOM,
        (
            Change(
                BLOCKS,
                "slice(sharing * keys.start + some.start, sharing * keys.start + some.stop), keys",
                "slice(some.start, some.stop), keys",
            ),
        ),
    ),
    Fault(
        "blockwise-sequences-share-the-first-mask",
        "sequences that are taken together are all masked as the first",
        (f"{ON_MASKS}::test_masks_broadcast", "-k", "blockwise"),
        (Change(BLOCKS, "wanted: tuple[slice | range, ...] = (sequences.batch,", "wanted = (slice(0, 1),"),),
    ),
    Fault(
        "blockwise-padding-is-seen",
        "sequences that are taken together see the keys that the longest has",
        (f"{ON_BLOCKWISE}::test_sequences_of_different_lengths_in_one_block",),
        (Change(BLOCKS, "hide(pairs, bounds(exists[:, None, None, self.keys], pairs.dtype))", "pass"),),
    ),
    Fault(
        "blockwise-padding-is-read",
        "keys and values beyond a sequence's length are multiplied by zero, which NaN survives",
        (f"{ON_BLOCKWISE}::test_sequences_of_different_lengths_in_one_block",),
        (Change(BLOCKS, "self.is_clean = sequences.keys is None", "self.is_clean = True"),),
    ),
    Fault(
        "blockwise-lengths-not-limited-elsewhere",
        "where key_lengths are not checked, those beyond the keys count keys that do not exist",
        (f"{ON_MASKS}::test_lengths_beyond_the_keys_are_limited",),
        (Change(STACKS, "tensors.key_lengths.clamp(0, num_keys).tolist()", "tensors.key_lengths.tolist()"),),
    ),
    Fault(
        "blockwise-sequences-of-one-offset",
        "neighbours of the same lengths have the query_offset of the first",
        (ON_STACKS,),
        (Change(STACKS, "shifts = [offset - each.query_offset for each in sequences]", "shifts = [0 for _ in sequences]"),),
    ),
    Fault(
        "blockwise-keys-of-the-wrong-sequence",
        "the keys of packed sequences begin where their queries do",
        RANDOM_PACKED,
        (Change(STACKS, "first = [start[which] for", "first = [start[0] for"),),
    ),
    Fault(
        "blockwise-cotangent-of-lse-dropped",
        "gradients lack what comes through lse",
        RANDOM,
        (Change(BLOCKWISE, "    if d_lse is not None:\n        d_scores", "    if False:\n        d_scores"),),
    ),
    Fault(
        "blockwise-probabilities-by-lse",
        "probabilities are exp(logits - lse), whose sum is not one where logits are large",
        (f"{ON_BLOCKWISE}::test_error_rule_at_any_scale", f"{ON_BLOCKWISE}::test_probabilities_sum_to_one"),
        (
            Change(
                BLOCKWISE,
                "torch.softmax(scores, -1, out=probs)",
                "torch.sub(scores, scores.logsumexp(-1, keepdim=True), out=probs).exp_()",
                times=2,
            ),
        ),
    ),
    Fault(
        "blockwise-largest-probability",
        "lse is that of the probabilities, which have taken the scores' place",
        RANDOM,
        (
            Change(
                BLOCKWISE,
                "        torch.softmax(scores, -1, out=probs)\n    blind",
                "        largest = torch.softmax(scores, -1, out=probs).amax(-1, keepdim=True)\n    blind",
            ),
        ),
    ),
    Fault(
        "blockwise-short-rows-overflow",
        "the softmax of short rows does not take off the maximum",
        (f"{ON_BLOCKWISE}::test_error_rule_at_any_scale", "-k", "11"),
        (Change(BLOCKWISE, "torch.sub(scores, largest, out=probs).exp_()", "torch.exp(scores, out=probs)"),),
    ),
    Fault(
        "blockwise-delta-from-out",
        "delta is computed from a rounded out",
        (f"{ON_DELTA}::test_table_gradient_is_as_good_as_one_rounding", "-k", "clipped"),
        (
            Change(
                BLOCKWISE,
                "    d_scores = softmax_backward(probs, d_probs) if whole is None else whole.d_scores(block, probs, d_probs)\n",
                "    rounded = torch.bmm(probs, block.value).to(block.call.tensors.query.dtype).to(probs.dtype)\n"
                "    d_scores = d_probs.sub_((rounded * rows).sum(-1, keepdim=True)).mul_(probs)\n",
            ),
        ),
    ),
    Fault(
        "blockwise-slope-of-the-softcap",
        "the derivative of the softcap is missing",
        RANDOM,
        (Change(BLOCKWISE, "    if slope is not None:\n        d_scores.mul_(slope)\n", ""),),
    ),
    Fault(
        "blockwise-keeps-with-a-softcap",
        "where probabilities are kept, the derivative of the softcap is missing",
        RANDOM,
        (Change(BLOCKWISE, " and spec.softcap is None", ""),),
    ),
    Fault(
        "blockwise-nothing-seen",
        "-inf - -inf: a row that sees nothing becomes NaN",
        (f"{ON_MASKS}::test_rows_that_see_nothing", "-k", "blockwise"),
        (Change(BLOCKWISE, "largest == -math.inf if", "largest == math.nan if"),),
    ),
    Fault(
        "blockwise-nothing-seen-in-a-window",
        "a row that the window alone leaves without keys becomes NaN",
        (f"{ON_BLOCKWISE}::test_rows_that_see_nothing",),
        (Change(FRAME, "(right >= 0 and first + self.extra > right)", "False"),),
    ),
    Fault(
        "blockwise-nothing-seen-by-some",
        "a row that sees nothing becomes NaN if another one of its block sees something",
        (f"{ON_MASKS}::test_rows_that_see_nothing", "-k", "blockwise"),
        (Change(BLOCKWISE, "not blind.any()", "not blind.all()"),),
    ),
    Fault(
        "blockwise-dropout-by-local-column",
        "dropout counts keys from the first that a block sees",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (Change(BLOCKS, "slice(self.keys.start + first_key, self.keys.stop + first_key)", "slice(0, self.num_keys)"),),
    ),
    Fault(
        "blockwise-dropout-by-local-head",
        "dropout counts heads from the first of a block",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (Change(BLOCKS, "head[:, None, None] + first_head", "head[:, None, None] - self.group.heads.start"),),
    ),
    Fault(
        "blockwise-dropout-by-local-sequence",
        "dropout counts sequences from the first of a block",
        RANDOM,
        (Change(BLOCKS, "sequence[:, None, None, None],", "sequence[:, None, None, None] - sequences.batch.start,"),),
    ),
    Fault(
        "blockwise-backward-without-dropout",
        "the gradient of value counts what was dropped",
        (f"{ON_DROPOUT}::test_backward_drops_what_the_forward_dropped",),
        (Change(BLOCKWISE, "probs if block.dropout is None else probs * block.dropout", "probs"),),
    ),
    Fault(
        "blockwise-keeps-what-dropout-left",
        "the probabilities that are kept are those after dropout",
        (f"{ON_BLOCKWISE}::test_kept_probabilities",),
        (Change(BLOCKWISE, "probs = torch.mul(probs, block.dropout, out=block.scores)", "probs = probs.mul_(block.dropout)"),),
    ),
    Fault(
        "blockwise-table-gradient-without-its-scale",
        "the gradient of rel_key is that of an unscaled term",
        RANDOM,
        (Change(BANDS, "self._overlapped(self._of_windows).mul_(self.scale)", "self._overlapped(self._of_windows)"),),
    ),
    Fault(
        "sums-in-the-inputs-dtype",
        "scores and sums have the dtype of the inputs",
        (f"{ON_BLOCKWISE}::test_error_rule", f"{ON_OPS}::test_return_lse"),
        (Change(DTYPES, "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype"),),
    ),
    Fault(
        "gradients-collected-in-the-inputs-dtype",
        "the gradient of key is rounded at every block of queries",
        (f"{ON_BLOCKWISE}::test_gradients_are_rounded_once",),
        (
            Change(
                BLOCKWISE,
                '        add_transposed_product(block, totals["key"], d_scores, query, spec.scale)\n',
                '        add_transposed_product(block, totals["key"], d_scores, query, spec.scale)\n'
                '        totals["key"].copy_(totals["key"].to(block.call.tensors.key.dtype))\n',
            ),
        ),
    ),
    Fault(
        "autocast-inside",
        "autocast rounds the products within the forward",
        (f"{ON_OPS}::test_autocast_does_not_change_the_precision[blockwise]",),
        (
            Change(
                AS_BLOCKWISE,
                "        with without_autocast(tensors.query.device):\n            softmax_stats, kept",
                "        if True:\n            softmax_stats, kept",
            ),
        ),
    ),
    Fault(
        "blockwise-keys-written-once-with-a-window",
        "the gradients of keys that a window hides are not written at all",
        (f"{ON_BLOCKWISE}::test_keys_that_no_query_sees_may_hold_nan",),
        (Change(BLOCKS, "not alike or max(spec.window_left, spec.window_right) >= 0:", "not alike:"),),
    ),
    Fault(
        "blockwise-keys-written-once-a-block",
        "the gradients of keys are those of the last block of queries, not the sum",
        (f"{ON_BLOCKWISE}::test_rows_that_no_visible_pair_has_may_hold_nan",),
        (Change(BLOCKS, "0 < stack.num_queries <= num_queries and", "0 < stack.num_queries and"),),
    ),
    Fault(
        "blockwise-keys-written-once-a-head",
        "the gradient of a key is that of the last heads that share it, not the sum",
        (f"{ON_BLOCKWISE}::test_heads_that_share_a_key_in_blocks_of_their_own",),
        (Change(BLOCKS, " and 0 < heads <= num_heads * key_heads", " and 0 < heads"),),
    ),
    Fault(
        "blockwise-blind-queries-without-lse",
        "without lse, a query all of whose logits are -inf gets NaN",
        (f"{ON_BLOCKWISE}::test_biases_that_hide_all_keys", "-k", "blockwise"),
        (Change(BLOCKS, " or self.frame.has_blind or self.call.has_infinite_table", " or self.frame.has_blind"),),
    ),
    Fault(
        "blockwise-end-rows-that-no-pair-has",
        "keys that are far for all queries are multiplied with an end row that no visible pair has",
        (f"{ON_BLOCKWISE}::test_end_rows_that_no_visible_pair_has_may_hold_nan",),
        (
            Change(
                FRAME,
                "if self.spec.clamp and keys.start < keys.stop and self.visible(keys)",
                "if self.spec.clamp and keys.start < keys.stop",
            ),
        ),
    ),
    Fault(
        "blockwise-rows-between-stacks",
        "sequences are computed together that leave rows between them unused, which may be NaN",
        (ON_STACKS,),
        (Change(STACKS, "(lowest <= high + 1 and highest >= low - 1)", "True"),),
    ),
    Fault(
        "blockwise-queries-that-a-sequence-lacks",
        "rows of other sequences are taken for queries that a sequence does not have",
        (ON_STACKS,),
        (Change(STACKS, "            index, values = index.index_select(0, exist), values.index_select(0, exist)\n", ""),),
    ),
    Fault(
        "blockwise-missing-queries-are-read",
        "what memory has beyond a sequence's queries is multiplied by zero, which NaN survives",
        (ON_STACKS,),
        (
            Change(
                BLOCKS,
                "rows if missing is None else rows.flatten(0, 2).index_fill_(0, missing, 0).view(rows.shape)",
                "rows",
            ),
        ),
    ),
    Fault(
        "blockwise-values-that-no-query-sees",
        "values beyond a sequence's keys are multiplied by zero, which NaN survives",
        (f"{ON_BLOCKWISE}::test_sequences_of_different_lengths_in_one_block",),
        (Change(BLOCKWISE, "if group.is_clean or out.sum().isfinite():", "if True:"),),
    ),
    Fault(
        "blockwise-sequences-padded-to-any-length",
        "short sequences are padded to the length of the longest",
        (f"{ON_STACKS}::test_padding_is_bounded",),
        (Change(STACKS, "and of_all <= cost + alone", "and True"),),
    ),
    Fault(
        "blockwise-gaps-of-kept-probabilities",
        "probabilities that the forward has not written are read by a backward with another number of threads",
        ("tests/cpu/test_determinism.py::test_another_number_of_threads_in_the_backward",),
        (Change(AS_BLOCKWISE, "if tensors.key_lengths is None else query.new_zeros", "if True else query.new_zeros"),),
    ),
    Fault(
        "blockwise-no-heads-uninitialised",
        "without heads of the query, gradients of keys are what memory held",
        (f"{ON_BLOCKWISE}::test_no_heads_of_the_query",),
        (Change(BLOCKS, " and 0 < heads <= num_heads * key_heads", " and heads <= num_heads * key_heads"),),
    ),
    Fault(
        "blockwise-one-query-without-the-scale",
        "the terms of a single query are not multiplied by the scale",
        (f"{ON_BLOCKWISE}::test_one_query",),
        (Change(BANDS, "self.windows[0], alpha=self.scale)", "self.windows[0])"),),
    ),
    Fault(
        "blockwise-nan-is-not-hidden",
        "a hidden logit that is NaN stays NaN",
        (f"{ON_MASKS}::test_nan_in_a_key_stays_with_those_that_see_it",),
        (
            Change(
                FRAME,
                "logits.view(least.dtype).clamp_(least, most)",
                "logits.clamp_(max=torch.where(least == most, -math.inf, math.inf).to(logits.dtype))",
            ),
        ),
    ),
)

"""Faults in the blockwise path and what all implementations share."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    BLOCKS,
    BLOCKWISE,
    DROPOUT,
    FUNCTIONAL,
    KEPT,
    ON_BLOCKWISE,
    ON_DELTA,
    ON_DROPOUT,
    ON_EDGES,
    ON_FEATURES,
    ON_MASKS,
    ON_OPS,
    ON_POSITIONS,
    ON_RANDOM,
    ON_SURVIVORS,
    ON_TORCH,
    OPS,
    POSITIONS,
    RANDOM,
    RANDOM_PACKED,
    RESULTS,
    SPEC,
)

OF_BLOCKWISE = (
    Fault(
        "blockwise-sign-of-query-offset",
        "relative positions have the sign of query_offset turned round",
        (f"{ON_EDGES}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "1) - self.chunk.sequence.query_offset", "1) + self.chunk.sequence.query_offset"),),
    ),
    Fault(
        "blockwise-band-off-by-one",
        "the columns of the band stand for the next relative position",
        (f"{ON_EDGES}::test_one_table_row_moves_only_its_diagonal",),
        (Change(BLOCKS, "return self.keys.start - (self.queries.stop - 1)", "return self.keys.start - self.queries.stop"),),
    ),
    Fault(
        "blockwise-causal-without-the-diagonal",
        "a causal query does not see its own position, a window not its last",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "self.column(right + 1, everything)", "self.column(right, everything)"),),
    ),
    Fault(
        "blockwise-window-off-by-one-on-the-left",
        "the key farthest in the past of a window is hidden",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "self.column(-left, everything)", "self.column(1 - left, everything)"),),
    ),
    Fault(
        "blockwise-block-misses-its-last-key",
        "the last query of a block does not see the last key of its window",
        (f"{ON_MASKS}::test_what_is_seen", "-k", "blockwise"),
        (Change(BLOCKS, "min(stop + offset + right, num_keys)", "min(stop + offset + right - 1, num_keys)"),),
    ),
    Fault(
        "blockwise-clamp-for-zero",
        "clamped and bounded tables are taken for each other",
        RANDOM,
        (Change(BLOCKS, "if spec.clamp else None", "if not spec.clamp else None", times=2),),
    ),
    Fault(
        "blockwise-last-row-lost",
        "the last row of a bounded table does not apply",
        RANDOM,
        (Change(BLOCKS, "self.column(spec.last + 1, visible)", "self.column(spec.last, visible)"),),
    ),
    Fault(
        "blockwise-corner-not-cleared",
        "an element beside the scores is taken for a gradient",
        RANDOM,
        (Change(BLOCKS, "before = c < corner - m", "before = c < corner - m - 1"),),
    ),
    Fault(
        "blockwise-head-modulo-groups",
        "query heads take key head h % Hk instead of h // group",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation", *RANDOM),
        (
            Change(
                BLOCKS,
                "slice(first // group, first // group + 1)",
                "slice(start % num_key_heads, start % num_key_heads + 1)",
            ),
        ),
    ),
    Fault(
        "blockwise-shared-table-of-the-first-head",
        "the gradient of a table that heads share is not summed over them",
        RANDOM,
        (Change(BLOCKWISE, "left.flatten(0, 1).mT, right.flatten(0, 1)", "left[0].mT, right[0]"),),
    ),
    Fault(
        "blockwise-cotangent-of-lse-dropped",
        "gradients lack what comes through lse",
        RANDOM,
        (Change(BLOCKWISE, ".div_(row_sum).sub_(d_lse)", ".div_(row_sum)"),),
    ),
    Fault(
        "blockwise-rounding-of-lse-in-delta",
        "delta has the rounding of lse, which dP does not",
        (f"{ON_EDGES}::test_large_logits_in_float16", ON_RANDOM, ON_BLOCKWISE),
        (Change(BLOCKWISE, "d_probs).div_(row_sum).sub_", "d_probs).sub_"),),
    ),
    Fault(
        "blockwise-dropout-by-local-column",
        "dropout counts keys from the first that a block sees",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (Change(BLOCKS, "query[:, None], self.keys)", "query[:, None], slice(0, self.num_keys))"),),
    ),
    Fault(
        "blockwise-dropout-by-local-head",
        "dropout counts heads from the first of a chunk",
        (f"{ON_DROPOUT}::test_results_are_the_same_in_every_implementation",),
        (
            Change(
                BLOCKS,
                "keep_mask(seed, dropout_p, sequence, head[:, None, None],",
                "keep_mask(seed, dropout_p, sequence, head[:, None, None] - self.chunk.heads.start,",
            ),
        ),
    ),
    Fault(
        "blockwise-backward-without-dropout",
        "the gradient of value counts what was dropped",
        (f"{ON_DROPOUT}::test_backward_drops_what_the_forward_dropped",),
        (Change(BLOCKWISE, "probs = block.scores_view(band).mul_(block.dropout)", "probs = block.scores_view(band)"),),
    ),
    Fault(
        "blockwise-slope-of-the-softcap",
        "the derivative of the softcap is missing",
        RANDOM,
        (Change(BLOCKWISE, "return d_scores if slope is None else d_scores.mul_(slope)", "return d_scores"),),
    ),
    Fault(
        "blockwise-nothing-seen",
        "-inf - -inf: a row that sees nothing becomes NaN",
        (f"{ON_MASKS}::test_rows_that_see_nothing", "-k", "blockwise"),
        (Change(BLOCKWISE, "    row_max.masked_fill_(row_max == -math.inf, 0)\n", ""),),
    ),
    Fault(
        "blockwise-lse-of-a-huge-mask",
        "probabilities beside logits of finfo.min come from an lse that has no digits for the sum",
        (f"{ON_MASKS}::test_mask_of_finfo_min", "-k", "blockwise"),
        (
            Change(
                BLOCKWISE,
                "by_lse = softcap is None and (mask is None or mask.dtype == torch.bool)",
                "by_lse = softcap is None",
            ),
        ),
    ),
    Fault(
        "blockwise-scale-for-rel-scale",
        "d_rel_query has scale for rel_scale",
        RANDOM,
        (Change(BLOCKWISE, "chunk.rel_key, chunk.spec.rel_scale)", "chunk.rel_key, chunk.spec.scale)"),),
    ),
    Fault(
        "blockwise-keys-of-the-wrong-sequence",
        "the gradients of keys go to the first sequence of a packed batch",
        RANDOM_PACKED,
        (Change(BLOCKS, "shifted(self.keys, self.chunk.sequence.keys.start)", "self.keys"),),
    ),
    Fault(
        "blockwise-delta-from-out",
        "delta is computed from a rounded out",
        (f"{ON_DELTA}::test_table_gradient_is_as_good_as_one_rounding", "-k", "clipped"),
        (
            Change(
                BLOCKWISE,
                "delta = torch.linalg.vecdot(probs, d_probs).div_(row_sum).sub_(d_lse)",
                "rounded = (probs @ chunk.value[:, block.keys]).to(chunk.tensors.query.dtype).to(probs.dtype)\n"
                "    delta = torch.linalg.vecdot(rounded, d_out).sub_(d_lse)",
            ),
        ),
    ),
    Fault(
        "sums-in-the-inputs-dtype",
        "scores and sums have the dtype of the inputs",
        (f"{ON_BLOCKWISE}::test_error_rule", f"{ON_OPS}::test_return_lse"),
        (Change(RESULTS, "return torch.float64 if dtype == torch.float64 else torch.float32", "return dtype"),),
    ),
    Fault(
        "gradients-collected-in-the-inputs-dtype",
        "the gradient of key is rounded at every block of queries",
        (f"{ON_SURVIVORS}::test_gradients_are_rounded_once",),
        (
            Change(
                BLOCKWISE,
                "            add_transposed_product(self.key[block.key_rows], d_scores, block.query)\n",
                "            add_transposed_product(self.key[block.key_rows], d_scores, block.query)\n"
                "            dtype = chunk.tensors.key.dtype\n"
                "            self.key[block.key_rows] = self.key[block.key_rows].to(dtype).to(self.key.dtype)\n",
            ),
        ),
    ),
)


OF_ALL = (
    Fault(
        "dropout-from-the-start-of-the-word",
        "keys that do not begin with a word of random bits take those of the keys before",
        (f"{ON_DROPOUT}::test_words_are_philox",),
        (Change(DROPOUT, "words[..., keys.start - 4 * start : keys.stop - 4 * start]", "words[..., : keys.stop - keys.start]"),),
    ),
    Fault(
        "dropout-words-exchanged",
        "the kernels take the words of random bits in another order",
        (f"{ON_FEATURES}::test_every_implementation_drops_the_same[0.5]",),
        (Change(KEPT, "even = tl.where(offs_n & 2 == 0, word_0, word_2)", "even = tl.where(offs_n & 2 == 0, word_2, word_0)"),),
    ),
    Fault(
        "future-first",
        "tables are read with the most distant future first",
        (ON_POSITIONS,),
        (
            Change(
                POSITIONS,
                "row = relative_position.clamp(self.first, self.last) - self.first",
                "row = self.last - relative_position.clamp(self.first, self.last)",
            ),
        ),
    ),
    Fault(
        "packed-keys-of-the-wrong-sequence",
        "the keys of a packed sequence begin where its queries do",
        RANDOM_PACKED,
        (
            Change(
                SPEC,
                "slice(starts_k[batch], starts_k[batch + 1])",
                "slice(starts_q[batch], starts_q[batch] + starts_k[batch + 1] - starts_k[batch])",
            ),
        ),
    ),
    Fault(
        "key-lengths-not-limited-elsewhere",
        "where key_lengths are not checked, those beyond the keys count keys that do not exist",
        (ON_SURVIVORS,),
        (Change(SPEC, "tensors.key_lengths.clamp(0, num_keys).tolist()", "tensors.key_lengths.tolist()"),),
    ),
    Fault(
        "autocast-does-not-cast",
        "under autocast float32 inputs stay float32",
        (f"{ON_TORCH}::test_autocast_casts_as_for_sdpa",),
        (Change(FUNCTIONAL, "    dtype = torch.get_autocast_dtype(device)\n", "    dtype = torch.float32\n"),),
    ),
    Fault(
        "autocast-inside",
        "autocast rounds the products within the forward",
        (f"{ON_OPS}::test_autocast_does_not_change_the_precision[blockwise]",),
        (
            Change(
                OPS,
                "    with without_autocast(tensors.query.device):\n        return *blockwise",
                "    if True:\n        return *blockwise",
            ),
        ),
    ),
    Fault(
        "tangents-go-unnoticed",
        "forward mode gets zeros as derivatives where nothing has a gradient in reverse mode",
        (f"{ON_TORCH}::test_no_forward_mode_goes_unnoticed",),
        (Change(OPS, "    if forward_ad._current_level >= 0:\n        return True\n", ""),),
    ),
    Fault(
        "second-derivative-of-a-constant",
        "the backward cannot be told from one that nobody differentiates: terms of second derivatives are dropped",
        (f"{ON_OPS}::test_gradient_penalty_names_the_operator",),
        (
            Change(
                OPS,
                "if not _is_differentiated(arguments):",
                "if cls is _Backward or not _is_differentiated(arguments):",
            ),
        ),
    ),
    Fault(
        "gradients-in-another-order",
        "the gradients of key and value are exchanged",
        RANDOM,
        (
            Change(
                OPS,
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
                "    query, key, value, *others = gradients\n"
                "    gradients = (query, value, key, *others)\n"
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
            ),
        ),
    ),
)

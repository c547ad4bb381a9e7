"""Faults in the way of a table's gradient through the workspace, which has dS and P of each pair."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import DKV, DTABLE, ON_BACKWARD, ON_FEATURES, ON_WORKSPACE, STORED, WORKSPACE

OF_WORKSPACE = (
    Fault(
        "ds-in-the-order-of-registers",
        "with rotations in registers dS is stored in the order in which a tile has its keys",
        (f"{ON_WORKSPACE}::test_calls[causal-clamp-whole-registers-torch.float32]",),
        (Change(STORED, 'if TILE.rotation != "gather":', 'if TILE.rotation == "none":'),),
    ),
    Fault(
        "ds-of-tiles-beyond-the-band",
        "what of a tile lies beyond the band is stored, too: where the next query has its own",
        (f"{ON_WORKSPACE}::test_bands[zero_past-registers-whole]",),
        (Change(STORED, "mask=valid_m[:, None] & within[None, :])", "mask=valid_m[:, None])"),),
    ),
    Fault(
        "ds-that-nobody-wrote",
        "keys that a length hides are read, of tiles that the dkv kernel never visits",
        (f"{ON_WORKSPACE}::test_calls[bias_alone-zero-heads-twice-torch.float32]",),
        (
            Change(
                DTABLE,
                "key_low, key_high = first_key, tl.cdiv(tl.minimum(place.num_keys, stop_key), APART) * APART",
                "key_low, key_high = first_key, stop_key",
            ),
        ),
    ),
    Fault(
        "ds-of-far-keys",
        "keys far beyond a clamped table count twice: from the workspace, and in the sums of the dq kernel",
        (f"{ON_WORKSPACE}::test_calls[causal-clamp-whole-registers-torch.float32]",),
        (Change(DTABLE, "tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)", "key_low, key_high"),),
    ),
    Fault(
        "ds-beside-a-clamped-table",
        "the dkv kernel stores no dS of keys that it takes for far and the dq kernel for near",
        (f"{ON_WORKSPACE}::test_calls[every_table-clamp-whole-twice-torch.float32]",),
        (Change(DKV, 'if TILE.coverage == "clamp":  # far', "if False:  # far"),),
    ),
    Fault(
        "parts-overwrite-each-other",
        "of several parts of the workspace only the last one is in the gradient",
        (f"{ON_WORKSPACE}::test_calls[lengths-full-keys-twice-torch.float32]",),
        (Change(DTABLE, "acc += load_rows(d_rows, row, tile_n", "acc += 0.0 * load_rows(d_rows, row, tile_n"),),
    ),
    Fault(
        "parts-overwrite-the-bias",
        "the same of the bias",
        (f"{ON_WORKSPACE}::test_calls[bias_alone-zero-heads-twice-torch.float32]",),
        (Change(DTABLE, "bias += tl.load(pointers", "bias += 0.0 * tl.load(pointers"),),
    ),
    Fault(
        "ds-of-the-first-head",
        "heads that share keys share their place in the workspace",
        (f"{ON_WORKSPACE}::test_calls[causal-clamp-whole-registers-torch.float32]",),
        (Change(DKV, "first_program // num_blocks) * SHAPE.group + member", "first_program // num_blocks) * SHAPE.group"),),
    ),
    Fault(
        "items-of-a-part",
        "with a table for each head the first part's heads are taken for those of all parts",
        (f"{ON_WORKSPACE}::test_calls[p2c_per_head-zero-heads-square-torch.float16]",),
        (Change(STORED, "(table_head + num_heads - first_item % num_heads) % num_heads", "table_head"),),
    ),
    Fault(
        "sequences-of-an-earlier-part",
        "a later part's pairs are taken for those of the first sequences: their offset, their lengths, their queries",
        (f"{ON_WORKSPACE}::test_calls",),
        (
            Change(
                DTABLE,
                "locate(call.sequences, call.window, item // num_heads)",
                "locate(call.sequences, call.window, (item - first_item) // num_heads)",
            ),
        ),
    ),
    Fault(
        "queries-of-an-earlier-part",
        "the walk along the queries begins with those of an earlier part's keys, and ends before the last of its own",
        (f"{ON_WORKSPACE}::test_bands[clamp_beside-registers-keys]", f"{ON_WORKSPACE}::test_bands"),
        (Change(DTABLE, "queries_at(relative, place.query_offset, first_key,", "queries_at(relative, place.query_offset, 0,"),),
    ),
    Fault(
        "queries-at-any-offset",
        "of sequences with offsets of their own, so many queries are visited as a part has keys: too few",
        (f"{ON_WORKSPACE}::test_more_queries_than_keys_at_offsets_of_their_own",),
        (Change(DTABLE, "stop_key - first_key + TILE.block_n + APART)", "stop_key - first_key)"),),
    ),
    Fault(
        "margin-is-not-stored",
        "of a clamped table the band has no place for near keys beside it",
        (f"{ON_WORKSPACE}::test_bands[clamp-registers-whole]",),
        (
            Change(
                WORKSPACE, "lowest, highest = spec.first - margin, spec.last + margin", "lowest, highest = spec.first, spec.last"
            ),
        ),
    ),
    Fault(
        "band-without-room-for-a-block",
        "the band has no place for the last queries of a block",
        (f"{ON_WORKSPACE}::test_bands[clamp_causal-registers-heads]",),
        (Change(WORKSPACE, " + dkv.block_m - 1 + ALIGNMENT.value - 1, 64)", " + ALIGNMENT.value - 1, 64)"),),
    ),
    Fault(
        "band-ends-early",
        "the highest position of a band is not read for queries that have it at a multiple of 16 bytes",
        (f"{ON_WORKSPACE}::test_bands[zero_past-registers-whole]",),
        (Change(DTABLE, "(place.query_offset + highest + 1), APART)", "(place.query_offset + highest), APART)"),),
    ),
    Fault(
        "probabilities-stored-for-ds",
        "where dS should be there is P",
        (f"{ON_BACKWARD}::test_tables[default-shorter-clamp]",),
        (
            Change(
                DKV,
                "store_tile(head_matrix(ds, 0, item, 0, False), d_scores,",
                "store_tile(head_matrix(ds, 0, item, 0, False), probs.to(query.dtype),",
            ),
        ),
    ),
    Fault(
        "values-table-without-dropout-scale",
        "the gradient of rel_value is not scaled by 1 / (1 - p)",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (
            Change(
                DTABLE, "unit = 1.0 if call.dropout.seed is None else tl.cast(call.dropout.keep_scale, tl.float32)", "unit = 1.0"
            ),
        ),
    ),
    Fault(
        "values-table-of-all-probabilities",
        "the gradient of rel_value counts pairs that dropout has dropped",
        (f"{ON_FEATURES}::test_every_kernel_drops_the_same[small]",),
        (Change(DKV, "store_tile(matrix_of_probs, kept_probs,", "store_tile(matrix_of_probs, probs.to(d_out.dtype),"),),
    ),
    Fault(
        "no-smaller-workspace",
        "where there is no memory for a workspace another one as large is tried",
        (f"{ON_WORKSPACE}::test_with_less_memory_the_workspace_is_smaller",),
        (Change(WORKSPACE, "most_bytes = size // 2", "most_bytes = size"),),
    ),
)

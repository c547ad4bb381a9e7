"""Faults in the way of a table's gradient through a workspace."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import DKV, DTABLE_WORDS, ON_WORKSPACE, WORDS, WORKSPACE

OF_WORKSPACE = (
    Fault(
        "words-in-the-order-of-registers",
        "with rotations in registers words are stored in the order in which a tile has its keys",
        (f"{ON_WORKSPACE}::test_calls[causal-zero-registers-20000]",),
        (Change(WORDS, 'if TILE.rotation != "gather":', 'if TILE.rotation == "none":'),),
    ),
    Fault(
        "words-of-tiles-beyond-the-band",
        "what of a tile lies beyond the band is stored, too: in the words of the next query",
        (f"{ON_WORKSPACE}::test_bands[zero-registers]",),
        (Change(WORDS, "mask=valid_m[:, None] & within[None, :])", "mask=valid_m[:, None])"),),
    ),
    Fault(
        "words-nobody-wrote",
        "keys that a length hides are read, of tiles that the dkv kernel never visits",
        (f"{ON_WORKSPACE}::test_calls[bias_alone-full-long-10000]",),
        (
            Change(
                DTABLE_WORDS,
                "key_low, key_high = first_key, tl.cdiv(tl.minimum(place.num_keys, stop_key), APART) * APART",
                "key_low, key_high = first_key, stop_key",
            ),
        ),
    ),
    Fault(
        "words-of-far-keys",
        "keys far beyond a clamped table count twice: as words, and in the sums of the dq kernel",
        (f"{ON_WORKSPACE}::test_calls[plain-clamp-twice-None]",),
        (Change(DTABLE_WORDS, "tl.maximum(near_start, key_low), tl.minimum(near_stop, key_high)", "key_low, key_high"),),
    ),
    Fault(
        "words-beside-a-clamped-table",
        "the dkv kernel leaves no words of keys that it takes for far and the dq kernel for near",
        (f"{ON_WORKSPACE}::test_calls[lengths-clamp-square-None]",),
        (Change(DKV, "if lowest is not None and TILE.coverage", "if False and TILE.coverage"),),
    ),
    Fault(
        "parts-overwrite-each-other",
        "of several parts of the workspace only the last one is in the gradient",
        (f"{ON_WORKSPACE}::test_calls[causal-zero-registers-20000]",),
        (Change(DTABLE_WORDS, "acc += load_rows(d_rel_keys, row, tile_n", "acc += 0.0 * load_rows(d_rel_keys, row, tile_n"),),
    ),
    Fault(
        "parts-overwrite-the-bias",
        "the same of the bias",
        (f"{ON_WORKSPACE}::test_calls[bias_alone-full-long-10000]",),
        (Change(DTABLE_WORDS, "bias += tl.load(pointers", "bias += 0.0 * tl.load(pointers"),),
    ),
    Fault(
        "words-of-the-first-head",
        "heads that share keys share their words",
        (f"{ON_WORKSPACE}::test_calls[causal-full-square-20000]",),
        (Change(DKV, "first_program // num_blocks) * SHAPE.group + member", "first_program // num_blocks) * SHAPE.group"),),
    ),
    Fault(
        "items-of-a-part",
        "with a table for each head the first part's heads are taken for those of all parts",
        (f"{ON_WORKSPACE}::test_calls[per_head-clamp-long-10000]",),
        (Change(WORDS, "(table_head + num_heads - first_item % num_heads) % num_heads", "table_head"),),
    ),
    Fault(
        "margin-is-not-stored",
        "of a clamped table the band has no place for near keys beside it",
        (f"{ON_WORKSPACE}::test_bands[clamp-square]",),
        (
            Change(
                WORKSPACE, "lowest, highest = spec.first - margin, spec.last + margin", "lowest, highest = spec.first, spec.last"
            ),
        ),
    ),
)

"""A likely mistake warns once and says what to write; what is meant does not warn."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from tests.conftest import forget_warnings

from .small_call import CAUSAL, LAYOUT, Changes, Positions, call, call_varlen, lengths, qkv, says, zeros


def call_warnings(**changes: Any) -> list[str]:
    """The warnings from three calls, packed ones if a change is an argument of the packed function."""
    forget_warnings()
    function = call_varlen if any("seqlen" in name for name in changes) else call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(**changes)
    assert all(warning.category is UserWarning and warning.filename == call.__code__.co_filename for warning in caught)
    return [str(warning.message) for warning in caught]


def query(length: int, heads: int = 3) -> Changes:
    return {"query": zeros(2, heads, length, 8)}


def prompt(length: int, heads: int, rows: int | None = 33) -> Changes:
    """Inputs in flash-attn's layout (batch, length, heads, width), which may also be read as `length` heads; the heads share a
    table."""
    return {**qkv(1, length, heads), "rel_key": rows and zeros(rows, 8)}


PAST_8, TWO_OF_TWO, visible = Positions(-8, 0), qkv(2, 2, 2, 7), torch.ones
SELF = qkv(2, 3, 7)
PADDING, FUTURE = (torch.arange(7) >= lengths([[7], [5]]))[:, None, None], visible(7, 7, dtype=torch.bool).triu(1)
TO_THE_LEFT = (torch.arange(7) >= lengths([[0], [3]]))[:, None, None]
MISTAKES: dict[str, tuple[Changes, str]] = {
    "outgrown_table": (
        {**query(600), "rel_key": zeros(1027, 8)},
        "stand for distances up to 513, and this call has longer ones | RelativePositions.centred(1027) says",
    ),
    "table_of_the_past": (
        {**query(1027), "rel_key": zeros(1027, 8), **CAUSAL},
        "if the last row stands for the query's own position, positions=RelativePositions(-1026, 0)",
    ),
    "odd_table_of_the_past": ({**qkv(2, 3, 9), **CAUSAL}, "up to 4 | centred(9) says | positions=RelativePositions(-8, 0)"),
    "table_of_the_future": (
        {"positions": Positions(0, 8), **CAUSAL, "query_offset": 2},
        "from 0 to 8, but is_causal or window_size hides those above 0 | RelativePositions(-8, 0); if the first row does",
    ),
    "mask_of_heads_or_entries": (
        {**TWO_OF_TWO, "attn_mask": visible(2, 1, 7, dtype=torch.bool)},
        "taken as (heads, Nq, Nk) | attn_mask[:, None] is one mask per batch entry; attn_mask[None] says",
    ),
    "mask_of_queries_or_entries": (
        {**TWO_OF_TWO, "attn_mask": visible(2, 7, dtype=torch.bool)},
        "taken as (Nq, Nk) | attn_mask[:, None, None] is one mask per batch entry; attn_mask[None, None] says",
    ),
    "opposite_offset": (
        {**query(1), **CAUSAL, "query_offset": -6},
        "no query sees a key: with query_offset=-6 | from 6 to 12 | before the first query, perhaps 6; return_lse=True",
    ),
    "offset_beyond_the_window": ({"window_size": (2, 0), "query_offset": 9}, "no query sees a key: with query_offset=9"),
    "opposite_mask": (
        {"attn_mask": zeros(2, 1, 1, 7, dtype=torch.bool)},
        "hides every key of every query. Their output is zeros. A bool mask is True where a query may attend | pass ~attn_mask",
    ),
    "padding_and_an_empty_sequence": (
        {**SELF, "attn_mask": (torch.arange(7) < lengths([[5], [0]]))[:, None, None]},
        "hides every key of every query of 1 of 2 sequences, the first of them 1",
    ),
    "lowest_mask_of_one_sequence": (
        {**SELF, "attn_mask": torch.where(torch.arange(7) < lengths([[0], [7]]), 0.0, -1e9)[:, None, None]},
        "hides every key of every query of 1 of 2 sequences, the first of them 0. A floating-point mask",
    ),
    "table_of_windows": (
        {**qkv(2, 3, 49), "rel_key": None, "rel_bias": zeros(3, 169)},
        "a table of 169 = (2 * 7 - 1)^2 rows for 49 = 7^2 tokens looks like | Swin | RelativePositions.centred(169) says",
    ),
    "opposite_mask_of_padding": (
        {**SELF, "attn_mask": PADDING},
        "hides every key of every query of 1 of 2 sequences, the first of them 0. Their output is zeros. A bool mask is True",
    ),
    "opposite_mask_of_the_future": (
        {**SELF, "attn_mask": FUTURE},
        "hides every key of some queries, and shows all others only keys at the end. A bool mask is True where | return_lse=True",
    ),
    "rows_of_the_past": (
        {"positions": PAST_8},
        "from -8 to 0, but nothing hides the future | is_causal=True hides them, window_size=(-1, -1) says that this is meant",
    ),
    "lowest_mask": (
        {"attn_mask": torch.full((5, 7), torch.finfo(torch.float32).min)},
        "hides every key of every query. A floating-point",
    ),
    "mask_of_ones": ({"attn_mask": (~PADDING).float()}, "only 0 and 1 and is added to the logits | pass attn_mask.bool()"),
    "layout": ({**prompt(300, 2), "rel_key": zeros(9, 8)}, f"query has 300 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_full_table": ({**prompt(7, 2, 13)}, f"query has 7 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_short_table": (prompt(100, 8), f"query has 100 heads | {LAYOUT}"),
    "one_step": ({**query(1), **CAUSAL}, "1 queries and 7 keys has no query_offset | query_offset=6, the"),
    "a_chunk": (CAUSAL, "the last 2 keys; | query_offset=2, the number of keys | query_offset=0 says"),
    "a_step_with_padding": (
        {**query(1), **CAUSAL, "key_lengths": lengths([1, 6])},
        "1 queries and 6 keys has no query_offset | query_offset=5, the",
    ),
    "packed_steps": ({"max_seqlen_q": 3, **CAUSAL}, "3 queries and 4 keys has no query_offset"),
}
"""Each of these warns unless the arguments show that it is intended, in the way that the message names."""
MEANT: dict[str, Changes] = {
    "clipped_as_far_as_anybody_does": {**query(600), "rel_key": zeros(1025, 8)},
    "covered": {**query(514), "rel_key": zeros(1027, 8)},
    "outgrown, said": {**query(600), "rel_key": zeros(1027, 8), "positions": Positions.centred(1027)},
    "offsets_on_the_device": {"rel_key": zeros(1027, 8), "query_offset": lengths([600, 0])},
    "one_query": qkv(2, 16, 1, 20),
    "many_heads": prompt(64, 80),
    "a_table_for_each_head": {**prompt(64, 5), "rel_key": zeros(64, 9, 8)},
    "a_mask_for_each_head": {**prompt(64, 5), "attn_mask": visible(1, 64, 5, 5, dtype=torch.bool)},
    "grouped_heads": {**qkv(1, 64, 5, 5, 8), "rel_key": zeros(33, 8), "enable_gqa": True},
    "no_table": prompt(96, 8, None),
    "cross_attention": {},
    "an_offset": {**CAUSAL, "query_offset": 2, "positions": PAST_8},
    "an_offset_of_0": {**CAUSAL, "query_offset": 0},
    "fewer_keys": {**query(9), **CAUSAL, "positions": Positions.centred(9)},
    "a_full_table_of_the_past": {**query(7), "rel_key": zeros(13, 8), **CAUSAL},
    "a_short_table_of_the_past": {**query(50), **CAUSAL},
    "a_first_token": {**qkv(2, 2, 1), **CAUSAL, "positions": PAST_8},
    "one_row": {**query(9), "rel_key": zeros(1, 8), "positions": Positions(0, 0), **CAUSAL},
    "rows_of_the_future_that_are_seen": {"positions": Positions(0, 8)},
    "a_mask_per_head, said": {**TWO_OF_TWO, "attn_mask": visible(1, 2, 1, 7, dtype=torch.bool)},
    "a_mask_per_pair, said": {**TWO_OF_TWO, "attn_mask": visible(1, 1, 2, 7, dtype=torch.bool)},
    "a_square_mask": {**qkv(2, 2, 2), "attn_mask": visible(2, 2, dtype=torch.bool)},
    "a_mask_that_shows_one_pair": {"attn_mask": (torch.arange(35) == 9).view(5, 7)},
    "padding": {**SELF, "attn_mask": ~PADDING},
    "an_empty_sequence, said": {**SELF, "attn_mask": (torch.arange(7) < lengths([[5], [0]]))[:, None, None], "return_lse": True},
    "an_empty_sequence_of_an_enabled_model": {
        **SELF,
        "attn_mask": (torch.arange(7) < lengths([[5], [0]]))[:, None, None],
        "window_size": (-1, -1),
    },
    "an_empty_sequence_by_its_length": {**SELF, "key_lengths": lengths([5, 0])},
    "a_table_of_many_rows, said": {**qkv(2, 3, 49), "rel_key": zeros(169, 8), "positions": Positions.centred(169)},
    "a_clipped_table": {**qkv(2, 3, 4), "rel_key": zeros(9, 8)},
    "padding_to_the_left": {**SELF, "attn_mask": TO_THE_LEFT},
    "padding_to_the_left_of_all": {**SELF, "attn_mask": TO_THE_LEFT[1:] & ~FUTURE},
    "the_past": {**SELF, "attn_mask": ~FUTURE},
    "the_past_without_itself": {**SELF, "attn_mask": FUTURE.T},
    "all_but_itself_and_padding": {**SELF, "attn_mask": ~torch.eye(7, dtype=torch.bool) & ~PADDING & ~PADDING.mT},
    "a_part_of_the_future_by_a_mask, said": {**SELF, "attn_mask": FUTURE, "return_lse": True},
    "rows_of_the_past, said": {"positions": PAST_8, "window_size": (-1, -1)},
    "rows_of_the_past_and_a_mask": {**SELF, "positions": PAST_8, "attn_mask": ~FUTURE},
    "rows_of_the_past_and_one_query": {**query(1), "positions": PAST_8},
    "rows_of_the_past_and_one_key": {"positions": PAST_8, "key_lengths": lengths([1, 1])},
    "an_additive_mask": {**SELF, "attn_mask": torch.where(PADDING, -math.inf, 0.0)},
    "numbers_that_hide_some_keys": {"attn_mask": torch.arange(7) * -1e9},
    "an_offset_that_shows_one_pair": {**CAUSAL, "query_offset": -4},
    "offsets_one_of_which_shows_a_pair": {**query(1), **CAUSAL, "query_offset": lengths([-6, 0])},
    "a_part_of_the_future, said": {**CAUSAL, "query_offset": -6, "return_lse": True},
    "a_mask_that_hides_a_part, said": {"attn_mask": zeros(5, 7, dtype=torch.bool), "return_lse": True},
    "a_cache_that_is_not_full": {**CAUSAL, "key_lengths": lengths([5, 3])},
    "no_queries": {**query(0), **CAUSAL},
    "packed_with_an_offset": {**CAUSAL, "max_seqlen_q": 3, "query_offset": 1},
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_likely_mistake_is_warned_of_once(case: str) -> None:
    changes, parts = MISTAKES[case]
    (message,) = call_warnings(**changes)
    says(message, parts)


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant_is_not_warned_of(case: str) -> None:
    assert call_warnings(**MEANT[case]) == []

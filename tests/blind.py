"""Calls in which some queries see no key, by each kind of mask, that the tests of every implementation share."""

from __future__ import annotations

import math
from typing import Any

import torch

BATCH, QUERIES, KEYS = 2, 30, 13


def bool_mask(*hidden_rows: int) -> torch.Tensor:
    mask = torch.ones(BATCH, 1, QUERIES, KEYS, dtype=torch.bool)
    mask[1, :, list(hidden_rows)] = False
    return mask


def float_mask(*hidden_rows: int) -> torch.Tensor:
    return torch.zeros(BATCH, 1, QUERIES, KEYS).masked_fill(~bool_mask(*hidden_rows), -math.inf)


def rows(*chosen: int, entries: tuple[int, ...] = (0, 1)) -> torch.Tensor:
    """(B, Nq), true for the chosen queries of the batch entries."""
    mask = torch.zeros(BATCH, QUERIES, dtype=torch.bool)
    for entry in entries:
        mask[entry, list(chosen)] = True
    return mask


BLIND: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    # arguments, and the queries that see nothing
    "bool_mask": ({"attn_mask": bool_mask(0, 7, 29)}, rows(0, 7, 29, entries=(1,))),
    "float_mask": ({"attn_mask": float_mask(0, 7, 29)}, rows(0, 7, 29, entries=(1,))),
    "bool_mask_of_all": ({"attn_mask": torch.zeros((), dtype=torch.bool)}, rows(*range(QUERIES))),
    "float_mask_of_all": ({"attn_mask": torch.full((KEYS,), -math.inf)}, rows(*range(QUERIES))),
    "lengths": ({"key_lengths": torch.tensor([0, 13])}, rows(*range(QUERIES), entries=(0,))),
    "causal": ({"is_causal": True, "query_offset": -17}, rows(*range(17))),
    "causal_offsets": ({"is_causal": True, "query_offset": torch.tensor([-17, 0])}, rows(*range(17), entries=(0,))),
    "window_past": ({"window_size": (2, -1)}, rows(*range(KEYS + 2, QUERIES))),
    "window_future": ({"window_size": (-1, 3), "query_offset": -9}, rows(*range(6))),
    "window_beside": ({"window_size": (1, 1), "query_offset": 100}, rows(*range(QUERIES))),
    "window_and_length": (
        {"window_size": (2, 0), "key_lengths": torch.tensor([13, 5])},
        rows(*range(15, 30)) | rows(*range(7, 30), entries=(1,)),
    ),
    "mask_and_causal": (
        {"is_causal": True, "attn_mask": torch.arange(KEYS) >= 4},
        rows(0, 1, 2, 3),
    ),
}

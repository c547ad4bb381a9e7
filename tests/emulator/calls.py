"""Samples by name: a table and features, "clamp causal rel_value dropout", or a drawn one, "random 7"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.draws import compiled, drawn
from tests.expected import INPUTS, TABLES
from tests.samples import Sample

from .way import Emulator

DTYPES = ("bfloat16", "float16", "float32", "tf32")
"""Dtypes of the inputs; tf32 is float32 after torch.set_float32_matmul_precision("high")."""
RANDOM = ("random", "random_varlen")
Fields = dict[str, Any]

TABLE_KINDS = ("none", "full", "clamp", "zero")
"""No table, one that covers all pairs, and short ones, by the positions outside."""
STRIDED_KEY = 218
"""A seed with which each column of keys is dense in memory."""
FEATURES: dict[str, Fields] = {
    "causal": {"is_causal": True},
    "one_head": {"batch": 1, "key_heads": 1},
    "per_head": {"per_head": TABLES},
    "narrow_rel_query": {"rel_width": 16},
    "narrow_value": {"value_width": 40},
    "gqa": {"group": 2},
    "dropout": {"dropout_p": 0.3},
    "softcap": {"softcap": 3.0},
    "window": {"window_size": (20, 9)},
    "rel_scale": {"rel_scale": 0.2},
    "offsets": {"query_offset": (5, -20)},
    "sharp": {"sharp": True},
    "strided": {"strided": (*INPUTS, "d_out", "d_lse")},
    "unaligned": {"strided": (*INPUTS, "d_out", "d_lse"), "in_order": True},
    "strided_key": {"strided": ("key",), "seed": STRIDED_KEY},
    "small_workspace": {"workspace": 0},
}
"""Fields of the sample. small_workspace: the backward has one block of keys of one head at a time."""
SIZED: dict[str, Callable[[int, int, int], Fields]] = {
    "rel_query": lambda n, m, width: {"rel_width": width},
    "key_lengths": lambda n, m, width: {"key_lengths": (m, max(m - 29, 0))},
    "float_mask": lambda n, m, width: {"mask": "float32", "mask_shape": (2, 1, n, m)},
    "bool_mask": lambda n, m, width: {"mask": "bool", "mask_shape": (2, 1, n, m)},
    "varlen": lambda n, m, width: {"sequences": ((n, m), (max(n // 3, 1), max(m // 2, 1)), (0, 5))},
}
"""Fields that depend on both lengths or on the width. varlen: packed sequences, one of them without queries."""
WORDS = (*FEATURES, *SIZED, "no_rel_key", *TABLES[1:])

CALLS = (
    *(f"{table}{causal}" for table in TABLE_KINDS for causal in ("", " causal")),
    *("full key_lengths", "clamp key_lengths", "full per_head", "clamp per_head"),
    *("clamp rel_value", "full rel_value", "zero rel_value per_head", "clamp causal rel_value"),
    *("full no_rel_key rel_value", "clamp no_rel_key rel_value", "full rel_value gqa per_head", "zero window rel_value rel_bias"),
    *("full rel_bias no_rel_key", "clamp rel_bias no_rel_key", "full rel_bias per_head", "clamp rel_bias"),
    *("full rel_p2c per_head", "clamp causal rel_p2c", "full rel_p2c no_rel_key dropout", "zero varlen rel_p2c rel_value"),
    *("full rel_p2c sharp", "full rel_p2c gqa key_lengths", "clamp rel_p2c rel_scale window"),
    *("full rel_query", "full narrow_rel_query", "zero causal narrow_rel_query"),
    *("clamp gqa", "full gqa", "full narrow_value", "full dropout", "clamp rel_value dropout", "full softcap"),
    *("full window", "clamp window", "full float_mask", "clamp bool_mask", "clamp offsets", "full rel_scale"),
    *("clamp strided", "full strided", "clamp strided_key", "full strided_key", "full unaligned", "clamp unaligned"),
    *("full sharp", "clamp sharp", "full causal sharp", "full rel_bias sharp"),
    *("full varlen", "clamp varlen gqa", "zero varlen rel_value dropout", "clamp varlen rel_value rel_bias"),
    *("full varlen causal rel_value", "zero varlen offsets rel_bias", "clamp varlen offsets rel_value rel_p2c"),
    *("full offsets rel_value", "zero offsets rel_value per_head", "clamp offsets rel_p2c rel_bias"),
    *("full small_workspace", "clamp rel_value small_workspace", "zero rel_bias gqa small_workspace"),
    *("full rel_p2c small_workspace", "zero varlen rel_value small_workspace", "clamp offsets rel_value small_workspace"),
    "clamp rel_value rel_bias narrow_rel_query per_head dropout softcap key_lengths",
)
"""Calls for which kernels are specialised: one or two features at a time, and one call with all terms."""


def unknown_words(name: str) -> list[str]:
    """The invalid words of a name."""
    table, *words = name.split()
    if table in RANDOM:
        return [] if len(words) == 1 and words[0].isdigit() else [name]
    return [table] * (table not in TABLE_KINDS) + [word for word in words if word not in WORDS]


def sample(name: str, num_queries: int, num_keys: int, width: int, dtype: str) -> Sample:
    """The sample of a name; the lengths and widths of random ones are drawn."""
    table, *words = name.split()
    torch_dtype = "float32" if dtype == "tf32" else dtype
    arithmetic: Fields = {"dtype": torch_dtype, "in_half": dtype == "tf32", "round_terms": dtype == "bfloat16"}
    if table in RANDOM:
        chosen = drawn(int(words[0]), compiled(getattr(torch, torch_dtype)), is_packed=table == "random_varlen")
        return Sample(**{**vars(chosen), **arithmetic})
    fields: Fields = {"batch": 2, "num_queries": num_queries, "num_keys": num_keys, "key_heads": 2, "integers": "int32"}
    fields |= {"width": width, "value_width": width}
    for word in words:
        fields |= SIZED[word](num_queries, num_keys, width) if word in SIZED else FEATURES.get(word, {})
    if table != "none":
        fields["tables"] = tuple(name for name in TABLES if name in words or (name == "rel_key" and "no_rel_key" not in words))
        fields["positions"] = (-18, 12, table)
    if table == "full":
        fields["positions"] = (1 - num_queries, 0 if "causal" in words else num_keys - 1, "clamp")
    if {"varlen", "offsets"} <= set(words):
        fields["query_offset"] = (*fields["query_offset"], 9)
    return Sample(**fields, **arithmetic)


class Subject(NamedTuple):
    """A sample by its name, and a GPU. seed: of the order in which warps take turns."""

    target: str
    dtype: str
    width: int
    name: str
    lengths: tuple[int, int] = (0, 0)
    seed: int = 0

    def sample(self) -> Sample:
        return sample(self.name, *self.lengths, self.width, self.dtype)

    def way(self, **tiles: Any) -> Emulator:
        return Emulator(target=self.target, seed=self.seed, is_tf32=self.dtype == "tf32", tiles=tiles)

    def __str__(self) -> str:
        sizes = "" if self.name.startswith("random") else f" {self.lengths[0]}x{self.lengths[1]} D={self.width}"
        return f"{self.target} {self.dtype} {self.name}{sizes}"

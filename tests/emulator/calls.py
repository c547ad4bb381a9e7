"""Build calls from names: a table and features, "clamp causal rel_value dropout"; or draw them, "random 7"."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.draws import compiled, drawn
from tests.samples import in_memory_order, with_different_strides
from triton_relattn import RelativePositions
from triton_relattn.testing import Inputs, make_inputs

BATCH, HEADS = 2, 2
OFFSETS = (5, -20, 9)
"""Offsets of sequences that have their own; of two in a batch, and three in a pack."""
DROPOUT_SEED = 5
"""Seed of torch's generator before a call, so that dropout is the same every time."""


class Call(NamedTuple):
    """The tensors of a call, and its arguments."""

    inputs: Inputs
    arguments: dict[str, Any]


class Feature(NamedTuple):
    """Arguments that a feature adds to those of make_inputs (shape) and of the call; functions are of both lengths."""

    shape: dict[str, Any]
    arguments: dict[str, Any]


def float_mask(num_queries: int, num_keys: int) -> torch.Tensor:
    """Return numbers to add to the logits; three pairs in ten are hidden."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.rand(BATCH, 1, num_queries, num_keys, generator=generator) < 0.3
    return torch.randn(hidden.shape, generator=generator).masked_fill(hidden, -torch.inf)


TABLES = ("none", "full", "clamp", "zero")
"""No table, one with a row for every pair, and short ones, by what lies beyond them."""
FEATURES = {
    "causal": Feature({}, {"is_causal": True}),
    "one_head": Feature({"batch": 1, "heads": 1}, {}),
    "per_head": Feature({"per_head": True}, {}),
    "no_rel_key": Feature({"rel_key": False}, {}),
    "rel_value": Feature({"rel_value": True}, {}),
    "rel_bias": Feature({"rel_bias": True}, {}),
    "rel_p2c": Feature({"rel_p2c": True}, {}),
    "rel_query": Feature({"rel_width": "width"}, {}),
    "narrow_rel_query": Feature({"rel_width": 16}, {}),
    "narrow_value": Feature({"value_width": 40}, {}),
    "gqa": Feature({"heads": 2 * HEADS, "key_heads": HEADS}, {"enable_gqa": True}),
    "dropout": Feature({}, {"dropout_p": 0.3}),
    "softcap": Feature({}, {"softcap": 3.0}),
    "window": Feature({}, {"window_size": (20, 9)}),
    "rel_scale": Feature({}, {"rel_scale": 0.2}),
    "key_lengths": Feature({}, {"key_lengths": lambda n, m: torch.tensor([m, max(m - 29, 0)], dtype=torch.int32)}),
    "float_mask": Feature({}, {"attn_mask": float_mask}),
    "bool_mask": Feature({}, {"attn_mask": lambda n, m: float_mask(n, m) != -torch.inf}),
    "offsets": Feature({}, {"query_offset": lambda n, m: torch.tensor(OFFSETS[:BATCH], dtype=torch.int32)}),
    "sharp": Feature({"sharp": True}, {}),
}
LAYOUTS: dict[str, Callable[[Inputs], Inputs]] = {
    "strided": with_different_strides,
    "strided_key": lambda inputs: inputs._replace(key=in_memory_order(inputs.key, 0, 1, 3, 2)),
    "unaligned": lambda inputs: of_each(inputs, lambda tensor: in_memory_order(tensor, *range(tensor.dim()))),
    "storage_offset": lambda inputs: of_each(inputs, after_one_element),
}
"""Ways to place the same numbers in memory: strides of its own for every tensor; keys side by side in each column; rows an odd
number of elements apart; dense, but from the second element of the storage on."""
PACKED = "varlen"
"""The word for sequences packed one after the other, one of them without queries."""
SMALL_WORKSPACE = "small_workspace"
"""The word for a workspace of the backward that has one block of keys of one head at a time."""
WORDS = (*FEATURES, *LAYOUTS, PACKED, SMALL_WORKSPACE)

CALLS = (
    *(f"{table}{causal}" for table in TABLES for causal in ("", " causal")),
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
    *("full storage_offset", "full sharp", "clamp sharp", "full causal sharp", "full rel_bias sharp"),
    *("full varlen", "clamp varlen gqa", "zero varlen rel_value dropout", "clamp varlen rel_value rel_bias"),
    *("full varlen causal rel_value", "zero varlen offsets rel_bias", "clamp varlen offsets rel_value rel_p2c"),
    *("full offsets rel_value", "zero offsets rel_value per_head", "clamp offsets rel_p2c rel_bias"),
    *("full small_workspace", "clamp rel_value small_workspace", "zero rel_bias gqa small_workspace"),
    *("full rel_p2c small_workspace", "zero varlen rel_value small_workspace", "clamp offsets rel_value small_workspace"),
    "clamp rel_value rel_bias narrow_rel_query per_head dropout softcap key_lengths",
)
"""Calls that the kernels distinguish: one or two features at a time, and once all terms together."""
RANDOM = ("random", "random_varlen")


def after_one_element(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to where it begins with the second element of its storage."""
    storage = tensor.new_full((tensor.numel() + 1,), torch.nan)
    return storage[1:].view(tensor.shape).copy_(tensor)


def of_each(inputs: Inputs, change: Callable[[torch.Tensor], torch.Tensor]) -> Inputs:
    """Change each tensor of the inputs."""
    return Inputs(*(None if tensor is None else change(tensor) for tensor in inputs))  # type: ignore[arg-type]


def table_of(name: str, is_causal: bool, num_queries: int, num_keys: int) -> RelativePositions | None:
    """Return which distances the rows of a table stand for."""
    if name == "none":
        return None
    if name == "full":
        return RelativePositions(1 - num_queries, 0 if is_causal else num_keys - 1)
    return RelativePositions(-18, 12, name)  # type: ignore[arg-type]


def unknown_words(name: str) -> list[str]:
    """Return the words of a name that mean nothing."""
    table, *words = name.split()
    if table in RANDOM:
        return [] if len(words) == 1 and words[0].isdigit() else [name]
    return [table] * (table not in TABLES) + [word for word in words if word not in WORDS]


def random_call(kind: str, seed: int, dtype: torch.dtype) -> Call:
    """Draw a call as the tests on a GPU do."""
    return Call(*drawn(seed, compiled(dtype), is_packed=kind == "random_varlen").inputs())


def build(name: str, num_queries: int, num_keys: int, width: int, dtype: torch.dtype, seed: int = 0) -> Call:
    """Build the call of a name. Random calls have lengths and widths of their own.

    Raises:
        ValueError: there is no such call.
    """
    if unknown := unknown_words(name):
        raise ValueError(
            f"unknown in {name!r}: {', '.join(unknown)}; a call is one of {', '.join(TABLES)} and any of "
            f"{', '.join(WORDS)}, or {' or '.join(RANDOM)} and a seed"
        )
    table, *words = name.split()
    if table in RANDOM:
        return random_call(table, int(words[0]), dtype)
    positions = table_of(table, "causal" in words, num_queries, num_keys)
    shape: dict[str, Any] = {
        "batch": BATCH,
        "heads": HEADS,
        "value_width": width,
        "num_rows": None if positions is None else positions.num_rows,
    }
    arguments: dict[str, Any] = {} if positions is None else {"positions": positions}
    for word in words:
        feature = FEATURES.get(word, Feature({}, {}))
        shape |= {key: width if value == "width" else value for key, value in feature.shape.items()}
        arguments |= {key: value(num_queries, num_keys) if callable(value) else value for key, value in feature.arguments.items()}
    batch, heads = shape.pop("batch"), shape.pop("heads")
    if PACKED in words:
        call = packed(heads, num_queries, num_keys, width, shape, arguments, dtype, seed)
    else:
        call = Call(make_inputs(batch, heads, num_queries, num_keys, width, **shape, dtype=dtype, seed=seed), arguments)
    for word in words:
        if word in LAYOUTS:
            call = call._replace(inputs=LAYOUTS[word](call.inputs))
    return call


def packed(
    heads: int,
    num_queries: int,
    num_keys: int,
    width: int,
    shape: dict[str, Any],
    arguments: dict[str, Any],
    dtype: torch.dtype,
    seed: int,
) -> Call:
    """Build a packed call: a sequence of the given lengths, a shorter one, and one without queries."""
    lengths = {"q": (num_queries, max(num_queries // 3, 1), 0), "k": (num_keys, max(num_keys // 2, 1), 5)}
    inputs = make_inputs(1, heads, sum(lengths["q"]), sum(lengths["k"]), width, **shape, dtype=dtype, seed=seed)
    by_token = {name: getattr(inputs, name) for name in ("query", "key", "value", "d_out", "rel_query")}
    tensors: dict[str, Any] = {
        name: tensor[0].transpose(0, 1).contiguous() for name, tensor in by_token.items() if tensor is not None
    }
    packing: dict[str, Any] = {"query_offset": 0}
    for which, each in lengths.items():
        packing[f"cu_seqlens_{which}"] = torch.tensor([*itertools.accumulate(each, initial=0)], dtype=torch.int32)
        packing[f"max_seqlen_{which}"] = max(each)
    if "query_offset" in arguments:
        arguments["query_offset"] = torch.tensor(OFFSETS, dtype=torch.int32)
    return Call(inputs._replace(**tensors, d_lse=inputs.d_lse[0]), {**packing, **arguments})

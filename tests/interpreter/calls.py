"""Calls with every term and argument, padded and packed, and limits that split their workspace into parts."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from triton_relattn import RelativePositions
from triton_relattn._core.spec import TABLES
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.testing import Inputs, make_inputs

POSITIONS = {
    "full": RelativePositions(-59, 59),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
LIMITS = ("whole", "heads", "keys", "block")
"""What a part of the workspace holds: everything; one key head; some of its keys; one block of its keys."""


def tile(block_m: int, block_n: int, **others: Any) -> TileConfig:
    return TileConfig(block_m, block_n, others.pop("num_warps", 1), 1, **others)


IN_REGISTERS: dict[str, Any] = {"rotation": "registers"}
TILES = {
    "twice": {
        "stored_dq": tile(32, 16),
        "dq": tile(32, 32),
        "dkv": tile(32, 16),
        "dtable": tile(32, 16),
        "dp2c": tile(16, 16),
    },
    "square": {
        "stored_dq": tile(32, 32),
        "dq": tile(32, 16, carry=None),
        "dkv": tile(16, 16),
        "dtable": tile(32, 32),
        "dp2c": tile(32, 32),
    },
    "registers": {
        "stored_dq": tile(16, 64),
        "dq": tile(32, 32, **IN_REGISTERS),
        "dkv": tile(32, 32, **IN_REGISTERS),
        "dtable": tile(16, 16),
        "dp2c": tile(32, 16),
    },
    "long": {
        "stored_dq": tile(16, 16),
        "dq": tile(32, 16, num_warps=2, carry=None, **IN_REGISTERS),
        "dkv": tile(32, 16, num_warps=2, **IN_REGISTERS),
        "dtable": tile(64, 32),
        "dp2c": tile(64, 32),
    },
    "wide": {
        "stored_dq": tile(16, 128),
        "dq": tile(64, 64),
        "dkv": tile(16, 16),
        "dtable": tile(16, 128),
        "dp2c": tile(64, 64),
    },
}


def workspace_limit(limit: str, inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig]) -> str:
    """The value of TRITON_RELATTN_WORKSPACE for one of LIMITS; "" for the default."""
    num_queries, num_keys = inputs.query.shape[2], inputs.key.shape[2]
    if "cu_seqlens_q" in arguments:
        num_queries, num_keys = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    padded_keys = -(-num_keys // tiles["dkv"].block_n) * tiles["dkv"].block_n
    group = inputs.query.shape[1] // inputs.key.shape[1]
    pairs = group * num_queries * padded_keys * (1 if inputs.rel_value is None else 2)
    size = pairs * inputs.query.element_size()
    return {"whole": "", "heads": str(size), "keys": str(size * 2 // 3), "block": "0"}[limit]


OFFSETS = torch.tensor([3, -5], dtype=torch.int32)
ALL_TABLES: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # arguments of make_inputs, arguments of the call
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True, "query_offset": 6}),
    "per_head": ({"heads": 4, "key_heads": 2, "per_head": True, "rel_bias": True}, {}),
    "rel_query": ({"rel_width": 24, "rel_bias": True}, {"rel_scale": -0.4}),
    "narrow_rel_query": ({"rel_width": 3, "per_head": True}, {"is_causal": True}),
    "bias_alone": ({"rel_key": False, "rel_bias": True}, {"key_lengths": torch.tensor([43, 17])}),
    "lengths": ({"rel_bias": True}, {"key_lengths": torch.tensor([0, 20]), "query_offset": -9}),
    "window": ({}, {"window_size": (11, 5), "query_offset": 3}),
    "window_past": ({"per_head": True}, {"window_size": (7, -1)}),
    "bool_mask": ({}, {"attn_mask": torch.arange(43) % 3 != torch.arange(37)[:, None] % 4}),
    "float_mask": ({"rel_bias": True}, {"attn_mask": torch.randn(2, 1, 43, generator=torch.Generator().manual_seed(0))}),
    "dropout": ({"rel_bias": True}, {"dropout_p": 0.3}),
    "softcap": ({"rel_width": 8}, {"softcap": 3.0}),
    "negative_scale": ({}, {"scale": -0.3}),
    "p2c": ({"rel_p2c": True}, {"key_lengths": torch.tensor([43, 17]), "query_offset": -9}),
    "p2c_alone": ({"rel_p2c": True, "rel_key": False, "per_head": True}, {"is_causal": True, "query_offset": 6}),
    "p2c_window": ({"rel_p2c": True, "rel_bias": True}, {"window_size": (11, 5), "rel_scale": 0.3}),
    "p2c_per_head": ({"heads": 4, "key_heads": 2, "per_head": True, "rel_p2c": True}, {"dropout_p": 0.3, "softcap": 3.0}),
    "rel_value": ({"rel_value": True}, {"query_offset": 4}),
    "rel_value_alone": ({"rel_value": True, "rel_key": False}, {"dropout_p": 0.3}),
    "rel_value_per_head": ({"heads": 4, "key_heads": 2, "per_head": True, "rel_value": True, "rel_bias": True}, {"scale": -0.3}),
    "rel_value_window": ({"rel_value": True, "rel_width": 12}, {"window_size": (11, 5), "rel_scale": 0.3}),
    "rel_value_lengths": (
        {"rel_value": True, "rel_key": False, "per_head": True},
        {"key_lengths": torch.tensor([20, 0]), "is_causal": True, "query_offset": 5},
    ),
    "offsets": ({"rel_bias": True}, {"query_offset": OFFSETS}),
    "offsets_window": ({"per_head": True, "rel_value": True}, {"query_offset": OFFSETS, "window_size": (11, 5)}),
    "every_table": ({**ALL_TABLES, "rel_width": 12}, {"query_offset": 3, "softcap": 9.0}),
    "every_table_offsets": ({**ALL_TABLES, "per_head": True}, {"query_offset": OFFSETS, "dropout_p": 0.2, "is_causal": True}),
    "no_table": ({"rel_key": False}, {"is_causal": True, "query_offset": 6}),
}


def padded_call(kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and arguments with two batch entries, two heads that share keys, and odd lengths."""
    positions = POSITIONS[kind]
    options: dict[str, Any] = {"batch": 2, "heads": 2, "key_heads": 1, "num_queries": 37, "num_keys": 43}
    options |= {"width": 8, "value_width": 12, "num_rows": positions.num_rows, "dtype": torch.float32, "seed": 5, **others}
    return make_inputs(**options), {"positions": positions, "enable_gqa": True}


PACKED_LENGTHS: dict[str, tuple[int, ...]] = {"q": (13, 0, 37, 5), "k": (21, 5, 40, 0)}
PACKED_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({"rel_bias": True}, {}),
    "packed_causal": ({"per_head": True, "rel_value": True}, {"is_causal": True, "query_offset": 5}),
    "packed_window": ({"rel_value": True, "rel_key": False}, {"window_size": (11, 5)}),
    "packed_p2c": ({"rel_p2c": True, "heads": 4, "key_heads": 2, "per_head": True}, {"rel_scale": -0.3}),
    "packed_offsets": ({**ALL_TABLES, "rel_width": 12}, {"query_offset": torch.tensor([4, 3, -12, 20])}),
    "packed_dropout": ({"rel_value": True, "rel_bias": True}, {"dropout_p": 0.3, "softcap": 3.0}),
}


def packed_call(kind: str, lengths: dict[str, tuple[int, ...]] = PACKED_LENGTHS, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and arguments like those of padded_call, for packed sequences of these lengths."""
    options: dict[str, Any] = {"batch": 1, "num_queries": sum(lengths["q"]), "num_keys": sum(lengths["k"])}
    inputs, arguments = padded_call(kind, **{**options, **others})
    in_order = {name: getattr(inputs, name) for name in ("query", "key", "value", "d_out", "rel_query")}
    packed: dict[str, Any] = {name: tensor[0].transpose(0, 1) for name, tensor in in_order.items() if tensor is not None}
    arguments["query_offset"] = 0
    for which, sizes in lengths.items():
        arguments |= {f"cu_seqlens_{which}": torch.tensor([*itertools.accumulate(sizes, initial=0)])}
        arguments |= {f"max_seqlen_{which}": max(sizes)}
    return inputs._replace(**packed, d_lse=inputs.d_lse[0]), arguments


def named_call(name: str, kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """One of CALLS or PACKED_CALLS."""
    shape, arguments = (CALLS | PACKED_CALLS)[name]
    inputs, table_arguments = (packed_call if name in PACKED_CALLS else padded_call)(kind, **{**shape, **others})
    if all(getattr(inputs, table) is None for table in TABLES):
        del table_arguments["positions"]
    return inputs, {**table_arguments, **arguments}

"""Calls whose backward takes a workspace, and limits with which it has one part or many."""

from __future__ import annotations

from typing import Any

import torch

from tests.interpreter.launch import resolved
from triton_relattn import RelativePositions
from triton_relattn.kernels.call import Call
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.planning import Plan
from triton_relattn.testing import Inputs, make_inputs

POSITIONS = {
    "full": RelativePositions(-59, 59),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
LIMITS = ("whole", "heads", "keys", "block")
"""What a part has: everything; all keys of one key head; some of its keys; one block of its keys."""


def tile(block_m: int, block_n: int, **others: Any) -> TileConfig:
    return TileConfig(block_m, block_n, others.pop("num_warps", 1), 1, **others)


IN_REGISTERS: dict[str, Any] = {"rotation": "registers"}
TILES = {
    "twice": {"dq": tile(32, 16), "dkv": tile(32, 16), "dtable": tile(32, 16), "dp2c": tile(16, 16)},
    "square": {"dq": tile(32, 32, carry=None), "dkv": tile(16, 16), "dtable": tile(32, 32), "dp2c": tile(32, 32)},
    "registers": {"dq": tile(16, 16), "dkv": tile(32, 32, **IN_REGISTERS), "dtable": tile(16, 16), "dp2c": tile(32, 16)},
    "long": {
        "dq": tile(16, 16, carry=None),
        "dkv": tile(32, 16, num_warps=2, **IN_REGISTERS),
        "dtable": tile(64, 32),
        "dp2c": tile(64, 32),
    },
}


def planned(
    inputs: Inputs,
    arguments: dict[str, Any],
    tiles: dict[str, TileConfig] | None = None,
    multiprocessors: int = 1,
    most_bytes: int | None = None,
) -> Any:
    """The plan of a padded or packed call."""
    _, tensors, spec = resolved(inputs, arguments)
    return planning.plan(Call(tensors, spec), tensors, spec, tiles or TILES["twice"], multiprocessors, most_bytes)


def limit_of(limit: str, inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig]) -> str:
    """The number of bytes, as the variable has it, with which the parts of a call are one of LIMITS; "" for the usual limit."""
    whole = planned(inputs, arguments, tiles, most_bytes=2**40)
    of_unit = whole.pairs * inputs.query.element_size() * whole.group // whole.items
    return {"whole": "", "heads": str(of_unit), "keys": str(of_unit * 2 // 3), "block": "0"}[limit]


def check_parts(plan: Plan | None, limit: str) -> None:
    """The parts are what the limit allows, so that a test runs what it says."""
    assert plan is not None
    programs = [part.stop_program - part.first_program for part in plan.parts]
    units = plan.parts[-1].stop_program // plan.blocks
    if limit == "whole":
        assert len(programs) == 1
    elif limit == "heads":
        assert programs == [plan.blocks] * units and units > 1
    else:
        assert not plan.has_all_keys and not plan.layout.is_band and len(programs) > units
        assert limit == "keys" or set(programs) == {1}


OFFSETS = torch.tensor([3, -5], dtype=torch.int32)
EVERY_TABLE: dict[str, Any] = {"rel_value": True, "rel_bias": True, "rel_p2c": True}
CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # of make_inputs, of the call
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
    "softcap": ({"rel_width": 8}, {"softcap": 3.0, "exact_query_grad": True}),
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
    "every_table": ({**EVERY_TABLE, "rel_width": 12}, {"query_offset": 3, "softcap": 9.0}),
    "every_table_offsets": ({**EVERY_TABLE, "per_head": True}, {"query_offset": OFFSETS, "dropout_p": 0.2, "is_causal": True}),
}


def call_of(kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Two batch entries, two heads that share their keys, odd lengths."""
    positions = POSITIONS[kind]
    options: dict[str, Any] = {"batch": 2, "heads": 2, "key_heads": 1, "num_queries": 37, "num_keys": 43}
    options |= {"width": 8, "value_width": 12, "num_rows": positions.num_rows, "dtype": torch.float32, "seed": 5, **others}
    return make_inputs(**options), {"positions": positions, "enable_gqa": True}

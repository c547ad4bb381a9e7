"""Calls, padded and packed, the rules for their results, and limits with which their workspace has one part or many."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from tests.expected import assert_table_gradient, exact_results, table_gradient_budget
from tests.interpreter.launch import GRADIENTS, check_every_term, kept, resolved, with_keep
from tests.tolerance import assert_gradients_close_fp32, within
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core.residual import keeps_residual
from triton_relattn._core.spec import TABLES
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.call import Call
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.planning import Plan
from triton_relattn.testing import Inputs, assert_within_budget, forward_backward, make_inputs

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
    "square": {"dq": tile(32, 32), "dkv": tile(16, 16), "dtable": tile(32, 32), "dp2c": tile(32, 32)},
    "registers": {"dq": tile(16, 64), "dkv": tile(32, 32, **IN_REGISTERS), "dtable": tile(16, 16), "dp2c": tile(32, 16)},
    "long": {
        "dq": tile(16, 16),
        "dkv": tile(32, 16, num_warps=2, **IN_REGISTERS),
        "dtable": tile(64, 32),
        "dp2c": tile(64, 32),
    },
    "wide": {"dq": tile(16, 128), "dkv": tile(16, 16), "dtable": tile(16, 128), "dp2c": tile(64, 64)},
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
        assert not plan.has_whole_heads and not plan.layout.is_band and len(programs) > units
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
    "every_table": ({**EVERY_TABLE, "rel_width": 12}, {"query_offset": 3, "softcap": 9.0}),
    "every_table_offsets": ({**EVERY_TABLE, "per_head": True}, {"query_offset": OFFSETS, "dropout_p": 0.2, "is_causal": True}),
}


def call_of(kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Two batch entries, two heads that share their keys, odd lengths."""
    positions = POSITIONS[kind]
    options: dict[str, Any] = {"batch": 2, "heads": 2, "key_heads": 1, "num_queries": 37, "num_keys": 43}
    options |= {"width": 8, "value_width": 12, "num_rows": positions.num_rows, "dtype": torch.float32, "seed": 5, **others}
    return make_inputs(**options), {"positions": positions, "enable_gqa": True}


LENGTHS_OF_PACK: dict[str, tuple[int, ...]] = {"q": (13, 0, 37, 5), "k": (21, 5, 40, 0)}
PACKED_CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "packed": ({"rel_bias": True}, {}),
    "packed_causal": ({"per_head": True, "rel_value": True}, {"is_causal": True, "query_offset": 5}),
    "packed_window": ({"rel_value": True, "rel_key": False}, {"window_size": (11, 5)}),
    "packed_p2c": ({"rel_p2c": True, "heads": 4, "key_heads": 2, "per_head": True}, {"rel_scale": -0.3}),
    "packed_offsets": ({**EVERY_TABLE, "rel_width": 12}, {"query_offset": torch.tensor([4, 3, -12, 20])}),
    "packed_dropout": ({"rel_value": True, "rel_bias": True}, {"dropout_p": 0.3, "softcap": 3.0}),
}


def pack_of(kind: str, lengths: dict[str, tuple[int, ...]] = LENGTHS_OF_PACK, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Return what call_of does, but sequences of these lengths, packed."""
    options: dict[str, Any] = {"batch": 1, "num_queries": sum(lengths["q"]), "num_keys": sum(lengths["k"])}
    inputs, arguments = call_of(kind, **{**options, **others})
    in_order = {name: getattr(inputs, name) for name in ("query", "key", "value", "d_out", "rel_query")}
    packed: dict[str, Any] = {name: tensor[0].transpose(0, 1) for name, tensor in in_order.items() if tensor is not None}
    arguments["query_offset"] = 0
    for which, each in lengths.items():
        arguments |= {f"cu_seqlens_{which}": torch.tensor([*itertools.accumulate(each, initial=0)])}
        arguments |= {f"max_seqlen_{which}": max(each)}
    return inputs._replace(**packed, d_lse=inputs.d_lse[0]), arguments


def named_call(name: str, kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """One of CALLS or PACKED_CALLS."""
    shape, arguments = (CALLS | PACKED_CALLS)[name]
    inputs, of_table = (pack_of if name in PACKED_CALLS else call_of)(kind, **{**shape, **others})
    return inputs, {**of_table, **arguments}


# The rules for results.


def results_of(
    inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig] | None, wanted: Any = GRADIENTS
) -> dict[str, torch.Tensor]:
    """out, lse and those gradients of a padded or packed call that are wanted and there, in the shapes of the call's tensors."""
    by_head, tensors, spec = resolved(inputs, arguments)
    keeps = keeps_residual(tensors)
    out, lse, softmax_stats, kept_residual = forward(tensors, spec, (tiles or {}).get("forward"), keeps_residual=keeps)
    wants = [name in wanted for name in GRADIENTS]
    found = backward(by_head.d_out, by_head.d_lse, out, softmax_stats, tensors, spec, wants, tiles, residual=kept_residual)
    results = {"out": out, "lse": lse, **{name: each for name, each in zip(GRADIENTS, found, strict=True) if each is not None}}
    if "cu_seqlens_q" in arguments:
        results["lse"] = lse[0]
        for name in {"out", "d_query", "d_key", "d_value", "d_rel_query"}.intersection(results):
            results[name] = results[name][0].transpose(0, 1)
    return results


def check_packed(inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig] | None) -> dict[str, torch.Tensor]:
    """The rules of check_every_term: all results are those of each sequence by itself in float64, the tables' summed."""
    results, dropout_p = results_of(inputs, arguments, tiles), arguments.get("dropout_p", 0.0)
    longest = arguments["max_seqlen_q"], arguments["max_seqlen_k"]
    sizes = len(arguments["cu_seqlens_q"]) - 1, inputs.query.shape[1], *longest
    golden = exact_results(inputs, **arguments, keep=kept(*sizes, dropout_p=dropout_p) if dropout_p else None)
    assert results.keys() == golden.keys()
    gradients = [golden[name] for name in results if name.startswith("d_")]
    is_exact = inputs.query.dtype == torch.float32
    assert is_exact or not dropout_p, "the reference would drop others"
    attend: Any = partial(fused_relative_attention_varlen, return_lse=True, implementation="reference")
    plain = {} if is_exact else forward_backward(attend, inputs, **arguments)
    for name, result in results.items():
        others = gradients if name.startswith("d_") else [golden[name].masked_fill(golden[name].isinf(), 0)]
        if not any(other.any() for other in others):
            assert torch.equal(result, golden[name].to(result.dtype)), name
        elif is_exact:
            assert_gradients_close_fp32(name, result, golden[name], others)
        else:
            factor = 3 if name.startswith("d_") else 2
            assert_within_budget(name, result, golden[name], plain[name], factor=factor, exact_reference=True)
        table = name.removeprefix("d_")
        if table in TABLES and not is_exact:
            exact, allowance = table_gradient_budget(inputs, table=table, **arguments)
            within(name, (result.double() - exact).abs(), allowance)
    return results


def check_call(inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig] | None) -> dict[str, torch.Tensor]:
    """The error rules for out, lse and all gradients of a padded or packed call."""
    if "cu_seqlens_q" in arguments:
        return check_packed(inputs, arguments, tiles)
    results = check_every_term(inputs, tiles, **arguments)
    if inputs.rel_p2c is not None and inputs.query.dtype == torch.float16:
        dense = with_keep(inputs, arguments)
        if exact_results(inputs, **dense)["d_rel_p2c"].any():
            assert_table_gradient("d_rel_p2c", results["d_rel_p2c"], inputs, table="rel_p2c", **dense)
    return results

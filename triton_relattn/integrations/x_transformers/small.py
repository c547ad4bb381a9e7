"""Small models of x-transformers."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import nn

from .. import proof, small
from ..small import HEADS, WIDTH

SETTINGS: dict[str, dict[str, Any]] = {
    "x T5": {"rel_pos_bias": True, "rel_pos_max_distance": 32},
    "x T5 causal": {"rel_pos_bias": True, "causal": True},
    "x dynamic": {"dynamic_pos_bias": True},
    "x dynamic log": {"dynamic_pos_bias": True, "dynamic_pos_bias_log_distance": True, "causal": True},
    "x alibi": {"alibi_pos_bias": True, "alibi_num_heads": 3, "attn_kv_heads": 2},
    "x inkling": {"attn_use_rel_proj_pos_bias": True, "causal": True},
}
STEPS = (4, 5, 6, 7, 9)


def build(causal: bool = False, **settings: Any) -> nn.Module:
    stock = importlib.import_module("x_transformers")
    kind = stock.Decoder if causal else stock.Encoder
    layers: nn.Module = kind(**{"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 8, **settings})
    return layers


def given(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"x": torch.randn(len(lengths), length, WIDTH), "mask": torch.arange(length) < torch.tensor(lengths)[:, None]}


def in_steps(model: Any) -> proof.Results:
    """Return the outputs of a decoder with a cache, step by step."""
    torch.default_generator.manual_seed(1)
    states, cache, outs = torch.randn(2, STEPS[-1], WIDTH, dtype=torch.float64), None, {}
    with torch.no_grad(), proof.float32_is_float64():
        for stop in STEPS:
            outs[f"the output at length {stop}"], cache = model(states[:, :stop], cache=cache, return_hiddens=True)
    return outs


def cases(stock: str) -> tuple[proof.Case, ...]:
    decoders = tuple(
        proof.Case(f"{name} with a cache", functools.partial(_varied, chosen), {"step by step": in_steps})
        for name, chosen in SETTINGS.items()
        if chosen.get("causal")
    )
    return (*small.cases(build, given, SETTINGS), *decoders)


def _varied(chosen: dict[str, Any]) -> nn.Module:
    made: nn.Module = proof.varied(build(**chosen))
    return made

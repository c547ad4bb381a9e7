"""Small attention of fairseq2, between projections."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn

from .. import small
from ..proof import Case
from ..small import HEADS, WIDTH

SETTINGS: dict[str, dict[str, Any]] = {
    "fairseq2 shaw": {"kind": "shaw"},
    "fairseq2 shaw values": {"kind": "shaw", "use_rel_pos_values": True, "bias": "CausalAttentionBias"},
    "fairseq2 window": {"kind": "shaw", "bias": "CausalAttentionBias", "bias_settings": {"attn_window_len": 9}},
    "fairseq2 relative": {"kind": "relative"},
    "fairseq2 relative causal": {"kind": "relative", "bias": "CausalAttentionBias"},
}


class Layer(nn.Module):
    """Projections around one of fairseq2's SDPA."""

    def __init__(self, sdpa: nn.Module, layout: Any, cache: Any) -> None:
        super().__init__()
        self.sdpa, self.layout, self.cache = sdpa, layout, cache
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        query, key, value = (each(x).unflatten(-1, (HEADS, -1)) for each in self.project[:3])
        layout = self.layout(x.shape[:2], lengths)
        out, _ = self.sdpa(query, layout, key, layout, value, self.cache())
        return self.project[3](out.flatten(2))  # type: ignore[no-any-return]


def build(kind: str, bias: str = "IdentityBias", bias_settings: dict[str, Any] | None = None, **settings: Any) -> nn.Module:
    biases = importlib.import_module("fairseq2.models.transformer.attention_bias")
    stock = importlib.import_module(f"fairseq2.models.transformer.sdpa.{kind}")
    made = getattr(biases, bias)(**(bias_settings or {}))
    if kind == "shaw":
        sdpa = stock.ShawRelativePositionSDPA(WIDTH, HEADS, made, **{"max_lhs_rel_pos": 5, "max_rhs_rel_pos": 3, **settings})
    else:
        sdpa = stock.RelativePositionSDPA(WIDTH, HEADS, stock.RelativePositionalEncoding(WIDTH, 4096), made)
    layout = importlib.import_module("fairseq2.nn").BatchLayout
    return Layer(sdpa, lambda shape, lengths: layout(shape, lengths), biases.AttentionBiasCache)


def given(length: int, lengths: list[int]) -> dict[str, Any]:
    return {"x": torch.randn(len(lengths), length, WIDTH), "lengths": lengths}


def cases(stock: str) -> tuple[Case, ...]:
    kind = stock.rpartition(".")[2]
    chosen = {name: each for name, each in SETTINGS.items() if each["kind"] == kind}
    return small.cases(build, given, chosen, padding_matters=False)

"""Calls as implementations get them, of which some have no public door in one process: those of ranks, and what a CPU refuses."""

from __future__ import annotations

from typing import Any

import torch

from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import draw_seed, origins_of
from triton_relattn._core.grids import GridSpec, GridTensors
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators import grid_attention, relative_attention


def resolved(*tensors: torch.Tensor | None, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """A call that has been checked; what it drops is drawn after torch.manual_seed(0)."""
    call, spec = resolve(Arguments(*tensors, **arguments))  # type: ignore[arg-type]
    if spec.dropout_p > 0:
        torch.manual_seed(0)
        call = call._replace(dropout_seed=draw_seed())
    return call, spec


def attend_resolved(call: AttentionTensors, spec: AttentionSpec, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of such a call."""
    return relative_attention(call, spec, IMPLEMENTATIONS[implementation])


def at_place(call: AttentionTensors, batch: slice, heads: slice, first_query: int, first_key: int) -> AttentionTensors:
    """A call as a part of a larger one, with these of its sequences and heads, and its queries and keys from these on."""
    origins = origins_of(batch.stop, heads.stop, call.query.device)[batch, heads]
    return call._replace(dropout_origins=origins + torch.tensor([0, 0, first_query, first_key]))


def attend_on_a_grid(
    call: AttentionTensors, rel_h: torch.Tensor, rel_w: torch.Tensor, dropout_p: float, implementation: str
) -> torch.Tensor:
    """out of a call on a grid, which has the dropout of another one."""
    tensors = GridTensors(*call[:3], rel_h, rel_w, call.dropout_seed, call.dropout_origins)
    return grid_attention(tensors, GridSpec(0.3, dropout_p), IMPLEMENTATIONS[implementation])

"""Calls as implementations get them, of which some have no public door in one process: parts of a call, as ranks have them, and
what a CPU refuses."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from triton_relattn._blockwise.attention import Whole
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import draw_seed, origins_of
from triton_relattn._core.grids import GridTensors
from triton_relattn._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from triton_relattn._core.validation import resolve
from triton_relattn._distributed import parts
from triton_relattn._distributed.sharding import Meeting, Piece
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators.grids import grid_attention
from triton_relattn._operators.ops import relative_attention


def resolved(*tensors: torch.Tensor | None, **arguments: Any) -> tuple[AttentionTensors, AttentionSpec]:
    """A call that has been checked; what it drops is drawn after torch.manual_seed(0)."""
    call, spec = resolve(Arguments.of(*tensors, **arguments))  # type: ignore[arg-type]
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
    return grid_attention(tensors, 0.3, dropout_p, IMPLEMENTATIONS[implementation])


def pieces(length: int, count: int) -> list[Piece]:
    """So many pieces of a sequence, of different lengths."""
    stops = [length * number * (number + 1) // (count * (count + 1)) for number in range(count + 1)]
    return [Piece(start, range(start, stop)) for start, stop in itertools.pairwise(stops)]


def in_parts(
    tensors: AttentionTensors, spec: AttentionSpec, implementation: str, d_out: torch.Tensor, d_lse: torch.Tensor, count: int = 3
) -> dict[str, torch.Tensor]:
    """out, lse and gradients of a resolved call, from parts that have some of its queries and some of its keys each."""
    queries, keys = pieces(tensors.query.shape[2], count), pieces(tensors.key.shape[2], count)
    computed = IMPLEMENTATIONS[implementation]
    total, unit = parts.Result.of_no_keys(tensors.query, tensors.value.shape[3]), computed.unit_of_largest(tensors, spec)
    met = [Meeting(*each) for each in itertools.product(queries, keys)]
    met = [each for each in met if each.is_visible(tensors, spec)]

    def call(meeting: Meeting) -> tuple[AttentionTensors, AttentionSpec]:
        return meeting.call(tensors, spec, tensors.key, tensors.value)

    for meeting in met:
        total.of(meeting.queries).add(computed.forward_of_part(*call(meeting)), unit)
    out, lse, blind = total.out, total.lse(unit), total.largest == -torch.inf
    delta = (out * d_out).sum(-1) - d_lse.masked_fill(blind, 0)
    whole = Whole(total.largest.masked_fill(blind, 0), total.log_sum, delta)
    named = {name: tensor for name, tensor in zip(DIFFERENTIABLE, tensors, strict=False) if tensor is not None}
    gradients = {name: torch.zeros(tensor.shape, dtype=lse.dtype) for name, tensor in named.items()}
    wanted = [name in named for name in DIFFERENTIABLE]
    for meeting in met:
        rows = Whole(*map(meeting.queries.of, whole))
        found = computed.backward_of_part(meeting.queries.of(d_out), rows, *call(meeting), wanted)
        for name, gradient in zip(DIFFERENTIABLE, found, strict=True):
            if gradient is not None:
                piece = {"query": meeting.queries, "rel_query": meeting.queries, "key": meeting.keys, "value": meeting.keys}.get(
                    name
                )
                place = gradients[name] if piece is None else piece.of(gradients[name])
                place += gradient
    return {"out": out, "lse": lse, **{f"d_{name}": gradient for name, gradient in gradients.items()}}


def as_one(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    implementation: str,
    d_out: torch.Tensor,
    d_lse: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """The same from one call, by "blockwise" or "reference", perhaps in another dtype."""
    moved = [each.to(dtype) if each is not None and dtype and each.is_floating_point() else each for each in tensors]
    named = [name for name, each in zip(DIFFERENTIABLE, moved, strict=False) if each is not None]
    tensors = AttentionTensors(*moved)  # type: ignore[arg-type]
    leaves = {name: getattr(tensors, name).detach().requires_grad_() for name in named}
    tensors = tensors._replace(**leaves)
    out, lse = relative_attention(tensors, spec, IMPLEMENTATIONS[implementation])
    gradients = torch.autograd.grad((out, lse), list(leaves.values()), (d_out.to(out.dtype), d_lse.to(lse.dtype)))
    return {"out": out.detach(), "lse": lse.detach(), **{f"d_{n}": each for n, each in zip(leaves, gradients, strict=True)}}

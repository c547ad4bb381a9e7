"""Attention over several ranks as one process can compute it: every part of every rank, one after the other."""

from __future__ import annotations

import itertools

import torch

from triton_relattn._blockwise.attention import Whole
from triton_relattn._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from triton_relattn._distributed import parts
from triton_relattn._distributed.sharding import Meeting, Piece
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators.ops import relative_attention


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

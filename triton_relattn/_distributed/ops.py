"""Ring attention as two opaque operators, so that torch.compile has one node of the graph for it, and its derivative."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import _resolve_process_group

from .._blockwise.attention import Whole
from .._core.dtypes import compute_dtype, new_like
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .._implementations import IMPLEMENTATIONS
from .._operators import NAMESPACE
from .._operators.ops import SCALARS, TENSORS
from .ring import Ring
from .sharding import Sharding

_NUM_TENSORS, _NUM_GRADIENTS = len(AttentionTensors._fields), len(DIFFERENTIABLE)


class RingCall(NamedTuple):
    """Who computes a call, and how its positions are spread. Field names are also the operators' schema."""

    implementation: str
    group: str
    """Name of the process group."""
    layout: str
    sizes_q: Sequence[int]
    """Queries of each rank."""
    sizes_k: Sequence[int]
    """Keys of each rank."""

    def ring(self, tensors: AttentionTensors, spec: AttentionSpec) -> Ring:
        queries, keys = (Sharding.of(self.layout, sizes) for sizes in (self.sizes_q, self.sizes_k))
        return Ring(tensors, spec, _resolve_process_group(self.group), queries, keys)  # type: ignore[arg-type]


_PLACE = "str implementation, str group, str layout, SymInt[] sizes_q, SymInt[] sizes_k"
_GRADIENTS = ", ".join(["Tensor"] * _NUM_GRADIENTS)
_SAVED = "Tensor d_out, Tensor? d_lse, Tensor out, Tensor softmax_stats"


def _split(arguments: Sequence[Any]) -> tuple[AttentionTensors, AttentionSpec, RingCall]:
    """Tensors, scalars and place from arguments in the order of the schema."""
    end = _NUM_TENSORS + len(AttentionSpec._fields)
    return AttentionTensors(*arguments[:_NUM_TENSORS]), AttentionSpec(*arguments[_NUM_TENSORS:end]), RingCall(*arguments[end:])


@torch.library.custom_op(
    f"{NAMESPACE}::ring_forward", mutates_args=(), schema=f"({TENSORS}, {SCALARS}, {_PLACE}) -> (Tensor, Tensor, Tensor)"
)
def ring_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """out and lse of the rank's queries, and softmax_stats, (B, Hq, 2, Nq): see parts.Result. All are in the compute dtype, out
    too, as the backward needs it for an exact delta."""
    tensors, spec, place = _split(arguments)
    implementation = IMPLEMENTATIONS[place.implementation]
    result = place.ring(tensors, spec).forward(implementation)
    lse = result.lse(implementation.unit_of_largest(tensors, spec))
    return result.out, lse, torch.stack((result.largest, result.log_sum), 2)


@ring_forward.register_fake
def _(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    query, value, dtype = arguments[0], arguments[2], compute_dtype(arguments[0].dtype)
    batch, heads, length, _ = query.shape
    lse, softmax_stats = (query.new_empty(shape, dtype=dtype) for shape in ((batch, heads, length), (batch, heads, 2, length)))
    return new_like(query, value.shape[3], dtype), lse, softmax_stats


@torch.library.custom_op(
    f"{NAMESPACE}::ring_backward",
    mutates_args=(),
    schema=f"({_SAVED}, {TENSORS}, {SCALARS}, {_PLACE}, bool[{_NUM_GRADIENTS}] wanted) -> ({_GRADIENTS})",
)
def ring_backward(
    d_out: torch.Tensor, d_lse: torch.Tensor | None, out: torch.Tensor, softmax_stats: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """The gradients; those of tables are the part that the rank's queries have in them."""
    *arguments, wanted = arguments  # type: ignore[assignment]
    tensors, spec, place = _split(arguments)
    largest, log_sum = softmax_stats.unbind(2)
    blind = largest == -torch.inf
    delta = (out * d_out).sum(-1)
    if d_lse is not None:
        delta -= d_lse.masked_fill(blind, 0)
    whole = Whole(largest.masked_fill(blind, 0), log_sum, delta)
    d_out = d_out.to(tensors.query.dtype)  # as it came: out was converted for whoever has differentiated it
    gradients = place.ring(tensors, spec).backward(d_out, whole, IMPLEMENTATIONS[place.implementation], wanted)
    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)


@ring_backward.register_fake
def _(_d_out: Any, _d_lse: Any, _out: Any, _stats: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    query, wanted = arguments[0], arguments[-1]
    return tuple(
        query.new_empty(0) if tensor is None or not want else tensor.new_empty(tensor.shape)
        for tensor, want in zip(arguments[:_NUM_GRADIENTS], wanted, strict=True)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    out, _, softmax_stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(softmax_stats)
    ctx.save_for_backward(out, softmax_stats, *inputs[:_NUM_TENSORS])
    ctx.others = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None, _: None) -> tuple[Any, ...]:
    out, softmax_stats, *tensors = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    wanted = list(ctx.needs_input_grad[:_NUM_GRADIENTS])
    gradients = ring_backward(d_out, d_lse, out, softmax_stats, *tensors, *ctx.others, wanted)
    others = (None,) * (_NUM_TENSORS - _NUM_GRADIENTS + len(ctx.others))
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *others


ring_forward.register_autograd(_differentiate, setup_context=_save_for_backward)


def ring_attention(tensors: AttentionTensors, spec: AttentionSpec, place: RingCall) -> tuple[torch.Tensor, torch.Tensor]:
    """out, in the dtype and memory order of query, and lse of the rank's queries, with gradients."""
    out, lse, _ = ring_forward(*tensors, *spec, *place)
    return out.to(tensors.query.dtype), lse

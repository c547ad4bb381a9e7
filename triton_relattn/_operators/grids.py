"""The operator of attention on a grid, registered as those of ops.py are. The fields of GridTensors are the schema."""

from __future__ import annotations

from typing import Any

import torch

from .._core.dtypes import without_autocast
from .._core.grids import GridTensors
from .._implementations import IMPLEMENTATIONS, Implementation
from . import OPERATORS
from .ops import Operator, define, refusal, register, register_elsewhere, save_nothing

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor rel_h, Tensor rel_w, Tensor? dropout_seed, Tensor? dropout_origins"
_NUM_TENSORS, _NUM_GRADIENTS = len(GridTensors._fields), 5

define(f"grid_attention_forward({_TENSORS}, float scale, float dropout_p, str implementation) -> (Tensor, Tensor)")
define(
    f"grid_attention_backward(Tensor d_out, Tensor? out, Tensor softmax_stats, {_TENSORS}, float scale, float dropout_p, "
    f"str implementation, bool[{_NUM_GRADIENTS}] wanted) -> ({', '.join(['Tensor'] * _NUM_GRADIENTS)})"
)


def _forward(*arguments):  # type: ignore[no-untyped-def]
    tensors, (*scalars, name) = GridTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    with without_autocast(tensors.query.device):
        return IMPLEMENTATIONS[name].grid_forward(tensors, *scalars)


def _forward_fake(*arguments):  # type: ignore[no-untyped-def]
    return IMPLEMENTATIONS[arguments[-1]].empty_grid_results(GridTensors(*arguments[:_NUM_TENSORS]))


def _backward(d_out, out, softmax_stats, *arguments):  # type: ignore[no-untyped-def]
    tensors, (*scalars, name, wanted) = GridTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    with without_autocast(d_out.device):
        gradients = IMPLEMENTATIONS[name].grid_backward(d_out, out, softmax_stats, tensors, *scalars, wanted)
    return tuple(d_out.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(_d_out, _out, _statistics, *arguments):  # type: ignore[no-untyped-def]
    wanted = arguments[-1]
    return tuple(
        tensor.new_empty(tensor.shape if want else 0) for tensor, want in zip(arguments[:_NUM_GRADIENTS], wanted, strict=True)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, softmax_stats = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(softmax_stats)
    ctx.save_for_backward(out if IMPLEMENTATIONS[inputs[-1]].saves_statistics else None, softmax_stats, *inputs[:_NUM_TENSORS])
    ctx.scalars = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, d_out: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    others = (None,) * (_NUM_TENSORS - _NUM_GRADIENTS + len(ctx.scalars))
    if d_out is None:
        return (None,) * _NUM_GRADIENTS + others
    wanted = ctx.needs_input_grad[:_NUM_GRADIENTS]
    gradients = OPERATORS.grid_attention_backward.default(d_out, *ctx.saved_tensors, *ctx.scalars, wanted)
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *others


class _Forward(Operator):
    """out, softmax_stats = f(tensors, scalars...); out is differentiable."""

    operator = OPERATORS.grid_attention_forward.default
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)


class _Backward(Operator):
    """The gradients, which cannot be differentiated."""

    operator = OPERATORS.grid_attention_backward.default
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refusal("grid_attention_backward", "attention on a grid"))


register(_Forward, _forward, _forward_fake)
register(_Backward, _backward, _backward_fake)


def grid_attention(tensors: GridTensors, scale: float, dropout_p: float, implementation: Implementation) -> torch.Tensor:
    """Compute out by an implementation that is not dense, with gradients. The arguments have been validated."""
    register_elsewhere()  # here too: inference mode has no autograd
    out: torch.Tensor = OPERATORS.grid_attention_forward.default(*tensors, scale, dropout_p, implementation.name)[0]
    return out

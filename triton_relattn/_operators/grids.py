"""The operator of attention on a grid, registered as those of ops.py are. The fields of GridTensors are the schema."""

from __future__ import annotations

from typing import Any

import torch

from .._blockwise import grids
from .._blockwise.grids import GridTensors
from .._core.dtypes import without_autocast
from . import OPERATORS
from .ops import Operator, define, refusal, register, register_elsewhere, save_nothing

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor rel_h, Tensor rel_w, Tensor? dropout_seed"
_NUM_TENSORS, _NUM_GRADIENTS = 6, 5

define(f"grid_attention_forward({_TENSORS}, float scale, float dropout_p) -> Tensor")
define(
    f"grid_attention_backward(Tensor d_out, {_TENSORS}, float scale, float dropout_p, bool[{_NUM_GRADIENTS}] wanted) -> "
    f"({', '.join(['Tensor'] * _NUM_GRADIENTS)})"
)


def _forward(*arguments):  # type: ignore[no-untyped-def]
    with without_autocast(arguments[0].device):
        return grids.forward(GridTensors(*arguments[:_NUM_TENSORS]), *arguments[_NUM_TENSORS:])


def _forward_fake(*arguments):  # type: ignore[no-untyped-def]
    return grids.new_out(GridTensors(*arguments[:_NUM_TENSORS]))


def _backward(d_out, *arguments):  # type: ignore[no-untyped-def]
    tensors, scalars = GridTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    with without_autocast(d_out.device):
        gradients = grids.backward(d_out, tensors, *scalars)
    return tuple(d_out.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(_d_out, *arguments):  # type: ignore[no-untyped-def]
    wanted = arguments[-1]
    return tuple(
        tensor.new_empty(tensor.shape if want else 0) for tensor, want in zip(arguments[:_NUM_GRADIENTS], wanted, strict=True)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_NUM_TENSORS])
    ctx.scalars = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
    wanted = ctx.needs_input_grad[:_NUM_GRADIENTS]
    backward = OPERATORS.grid_attention_backward.default
    gradients = backward(d_out, *ctx.saved_tensors, *ctx.scalars, wanted)
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), None, None, None


class _Forward(Operator):
    """out = f(tensors, scalars...)."""

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


def grid_attention(tensors: GridTensors, scale: float, dropout_p: float) -> torch.Tensor:
    """out by blockwise, with gradients. The arguments have been validated."""
    register_elsewhere()  # here too: inference mode has no autograd
    out: torch.Tensor = OPERATORS.grid_attention_forward.default(*tensors, scale, dropout_p)
    return out

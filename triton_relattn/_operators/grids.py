"""The operator of attention on a grid, registered as those of ops.py are. The fields of GridTensors are the schema."""

from __future__ import annotations

from typing import Any

import torch

from .._blockwise import grids as blockwise
from .._core.dtypes import without_autocast
from .._core.grids import GridTensors
from . import OPERATORS
from .ops import Operator, define, refusal, register, register_elsewhere, save_nothing

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor rel_h, Tensor rel_w, Tensor? dropout_seed"
_NUM_TENSORS, _NUM_GRADIENTS = 6, 5

define(f"grid_attention_forward({_TENSORS}, float scale, float dropout_p, str implementation) -> (Tensor, Tensor)")
define(
    f"grid_attention_backward(Tensor d_out, Tensor? out, Tensor softmax_stats, {_TENSORS}, float scale, float dropout_p, "
    f"str implementation, bool[{_NUM_GRADIENTS}] wanted) -> ({', '.join(['Tensor'] * _NUM_GRADIENTS)})"
)


def _forward(*arguments):  # type: ignore[no-untyped-def]
    tensors, (*scalars, implementation) = GridTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    with without_autocast(tensors.query.device):
        if implementation == "triton":
            from ..kernels.grid.launchers import forward

            with torch.cuda.device_of(tensors.query):
                return forward(tensors, *scalars)
        return blockwise.forward(tensors, *scalars), _statistics(tensors, implementation)


def _statistics(tensors: GridTensors, implementation: str) -> torch.Tensor:
    """Allocate what is kept for the backward: two numbers of each query for the kernels, nothing for blockwise."""
    batch, heads, length, _ = tensors.query.shape
    return tensors.query.new_empty((batch, heads, 2, length) if implementation == "triton" else 0, dtype=torch.float32)


def _forward_fake(*arguments):  # type: ignore[no-untyped-def]
    tensors = GridTensors(*arguments[:_NUM_TENSORS])
    return blockwise.new_out(tensors), _statistics(tensors, arguments[-1])


def _backward(d_out, out, softmax_stats, *arguments):  # type: ignore[no-untyped-def]
    tensors, (*scalars, implementation, wanted) = GridTensors(*arguments[:_NUM_TENSORS]), arguments[_NUM_TENSORS:]
    with without_autocast(d_out.device):
        if implementation == "triton":
            from ..kernels.grid.launchers import backward

            with torch.cuda.device_of(d_out):
                gradients = backward(d_out, out, softmax_stats, tensors, *scalars, wanted)
        else:
            gradients = blockwise.backward(d_out, tensors, *scalars, wanted)
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
    # blockwise computes delta from its blocks and does not need out.
    ctx.save_for_backward(out if inputs[-1] == "triton" else None, softmax_stats, *inputs[:_NUM_TENSORS])
    ctx.scalars = inputs[_NUM_TENSORS:]


def _differentiate(ctx: Any, d_out: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    others = (None,) * (1 + len(ctx.scalars))
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


def grid_attention(tensors: GridTensors, scale: float, dropout_p: float, implementation: str) -> torch.Tensor:
    """Compute out by "blockwise" or "triton", with gradients. The arguments have been validated."""
    register_elsewhere()  # here too: inference mode has no autograd
    out: torch.Tensor = OPERATORS.grid_attention_forward.default(*tensors, scale, dropout_p, implementation)[0]
    return out

"""Registration with torch: two opaque operators, their fakes, and the derivative of the first by the second.

The tensors of AttentionTensors and the scalars of AttentionSpec are the schema, in the order of their fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_type_hints

import torch
from torch.autograd import forward_ad

from .._core.dtypes import gradient_like
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .._core.untraced import untraced
from .._implementations import IMPLEMENTATIONS, Implementation
from .._implementations.base import Saved
from . import NAMESPACE, OPERATORS, flops, sharding

_SCHEMA_TYPES = {float: "float", float | None: "float?", int: "SymInt", bool: "bool"}
SCALARS = ", ".join(f"{_SCHEMA_TYPES[python_type]} {name}" for name, python_type in get_type_hints(AttentionSpec).items())
TENSORS = ", ".join(
    f"{'Tensor?' if name in AttentionTensors._field_defaults else 'Tensor'} {name}" for name in AttentionTensors._fields
)
_NUM_TENSORS, _NUM_GRADIENTS = len(AttentionTensors._fields), len(DIFFERENTIABLE)
_GRADIENTS = ", ".join(["Tensor"] * _NUM_GRADIENTS)

_library = torch.library.Library(NAMESPACE, "DEF")
define = _library.define
# keeps: the forward returns what the backward can use: "triton" the residual of out, "blockwise" the probabilities.
define(f"attention_forward({TENSORS}, {SCALARS}, str implementation, bool keeps) -> (Tensor, Tensor, Tensor, Tensor)")
define(
    f"attention_backward(Tensor d_out, Tensor? d_lse, Tensor? out, Tensor lse, Tensor? softmax_stats, Tensor? kept, {TENSORS}, "
    f"{SCALARS}, str implementation, bool[{_NUM_GRADIENTS}] wanted) -> ({_GRADIENTS})"
)

ATTENTION_FORWARD, ATTENTION_BACKWARD = OPERATORS.attention_forward.default, OPERATORS.attention_backward.default


def _split(arguments: Sequence[Any]) -> tuple[AttentionTensors, AttentionSpec, Implementation, Any]:
    """Return tensors, scalars, implementation and the last argument from arguments in the order of a schema."""
    *scalars, name, last = arguments[_NUM_TENSORS:]
    return AttentionTensors(*arguments[:_NUM_TENSORS]), AttentionSpec(*scalars), IMPLEMENTATIONS[name], last


def _forward(*arguments):  # type: ignore[no-untyped-def]
    tensors, spec, implementation, keeps = _split(arguments)
    return tuple(implementation.forward(tensors, spec, keeps))


def _forward_fake(*arguments):  # type: ignore[no-untyped-def]
    tensors, spec, implementation, keeps = _split(arguments)
    return tuple(implementation.empty_results(tensors, spec, keeps))


def _backward(d_out, d_lse, out, lse, softmax_stats, kept, *arguments):  # type: ignore[no-untyped-def]
    tensors, spec, implementation, wanted = _split(arguments)
    if d_lse is not None:  # for a query that sees nothing, merging of partial results may give NaN
        d_lse = d_lse.masked_fill(lse == -torch.inf, 0) if spec.with_lse else None
    gradients = implementation.backward(d_out, d_lse, Saved(out, softmax_stats, kept), tensors, spec, wanted)
    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(_d_out, _d_lse, _out, _lse, _statistics, _kept, *arguments):  # type: ignore[no-untyped-def]
    query, wanted = arguments[0], arguments[-1]
    return tuple(
        query.new_empty(0) if tensor is None or not want else gradient_like(tensor)
        for tensor, want in zip(arguments[:_NUM_GRADIENTS], wanted, strict=True)
    )


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    out, lse, softmax_stats, kept = output
    *scalars, ctx.implementation, keeps = inputs[_NUM_TENSORS:]
    ctx.set_materialize_grads(False)  # autograd's zeros would not be distributed as a DTensor is
    ctx.mark_non_differentiable(softmax_stats, kept)
    saved = (out, lse, softmax_stats) if IMPLEMENTATIONS[ctx.implementation].saves_statistics else (None, lse, None)
    ctx.save_for_backward(*saved, kept if keeps else None, *inputs[:_NUM_TENSORS])
    ctx.scalars = scalars


def _differentiate(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None, *_: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no more
    query, _, value = saved[4:7]
    if d_out is None:
        d_out = query.new_zeros(*query.shape[:3], value.shape[3])
    wanted = ctx.needs_input_grad[:_NUM_GRADIENTS]
    gradients = ATTENTION_BACKWARD(d_out, d_lse, *saved, *ctx.scalars, ctx.implementation, wanted)
    others = (None,) * (_NUM_TENSORS - _NUM_GRADIENTS + len(ctx.scalars) + 2)
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *others


def _is_differentiated(arguments: Iterable[Any]) -> bool:
    """Return whether a derivative by any of the arguments may be asked for, in reverse mode or in forward mode (which will be
    refused)."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in arguments)
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


class Operator(torch.autograd.Function):
    """One of the operators as autograd and torch.func see it. Subclasses name the operator and its derivative."""

    operator: Any

    @classmethod
    def forward(cls, *arguments: Any) -> Any:
        """Run the operator below autograd."""
        with torch._C._AutoDispatchBelowAutograd():
            return cls.operator(*arguments)

    @classmethod
    def with_autograd(cls, *arguments: Any) -> Any:
        """Run the operator, as a node of autograd's graph only if it may be differentiated: the node costs time."""
        register_elsewhere()
        if not _is_differentiated(arguments):
            return cls.forward(*arguments)
        # Function.apply without its search for transforms: this dispatch key is below theirs.
        return super(torch.autograd.Function, cls).apply(*arguments)  # type: ignore[misc]

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        raise NotImplementedError(
            'the operators of triton_relattn have no forward-mode derivatives (jvp); implementation="reference" has them'
        )

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
        """Run the operator for each index of the dimensions that vmap maps over, one call after the other."""
        if info.batch_size == 0:
            raise ValueError(f"{cls.operator}: vmap over a dimension of size 0")
        mapped = [
            [
                argument.select(dim, index) if isinstance(dim, int) else argument
                for argument, dim in zip(arguments, in_dims, strict=True)
            ]
            for index in range(info.batch_size)
        ]
        results = [cls.operator(*each) for each in mapped]
        if isinstance(results[0], torch.Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


def save_nothing(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Set up the context of an operator that cannot be differentiated."""


def refusal(name: str, what: str) -> Callable[..., None]:
    """Return the derivative of an operator that has none: it raises RuntimeError."""

    def backward(_ctx: Any, *_gradients: torch.Tensor) -> None:
        raise RuntimeError(
            f"triton_relattn::{name} cannot be differentiated: {what} has first derivatives only; "
            'implementation="reference" has all of them'
        )

    return backward


class _Forward(Operator):
    """out, lse, softmax_stats, kept = f(tensors, scalars, ...); out and lse are differentiable in those of DIFFERENTIABLE."""

    operator = ATTENTION_FORWARD
    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)


class _Backward(Operator):
    """The operator that computes the gradients. To differentiate them is an error; without this class, autograd would silently
    leave out terms."""

    operator = ATTENTION_BACKWARD
    setup_context = staticmethod(save_nothing)
    backward = staticmethod(refusal("attention_backward", "relative attention"))


def register(operator: type[Operator], run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Register an operator that has been defined: the function that computes it, and one for the shapes of its results.

    This is not done with torch.library.register_autograd: torch.func does not accept the Functions that it makes, and their
    forward-mode tangents are zero. The last key is torch.func's: apply passes the call from transform to transform, and then to
    the operator itself.
    """
    name = operator.operator._opname
    _library.impl(name, run, "CompositeExplicitAutograd")
    _library.impl(name, operator.with_autograd, "Autograd")
    _library.impl(name, operator.apply, "FuncTorchDynamicLayerFrontMode")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


register(_Forward, _forward, _forward_fake)
register(_Backward, _backward, _backward_fake)


_REGISTRATIONS = {"torch.utils.flop_counter": flops.register, "torch.distributed.tensor": sharding.register}
"""Registrations that are still to be done, by the module of torch that must have been imported before."""


@untraced
def register_elsewhere() -> None:
    """Register with those modules of torch that are imported by now. Importing them here would take a second, and triton."""
    for name in [name for name in _REGISTRATIONS if name in sys.modules]:
        _REGISTRATIONS.pop(name)()
    if torch._C._len_torch_dispatch_stack() > 0 and "torch.utils.flop_counter" in sys.modules:
        flops.add_to_counters()


def relative_attention(
    tensors: AttentionTensors, spec: AttentionSpec, implementation: Implementation, with_lse: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse, with gradients. The arguments have been validated.

    Args:
        with_lse: False if lse is not used.
    """
    if implementation.is_dense:
        return implementation.attend(tensors, spec)
    register_elsewhere()  # also here, since inference mode does not come through autograd
    if implementation.skips_lse and not with_lse:
        spec = spec._replace(with_lse=False)
    keeps = _is_differentiated(tensors) and implementation.keeps(tensors, spec)
    out, lse, *_ = ATTENTION_FORWARD(*tensors, *spec, implementation.name, keeps)
    return out, lse

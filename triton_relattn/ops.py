"""Registration with torch: two opaque operators, their fakes, and the derivative of the first by the second.

The tensors of AttentionTensors and the scalars of AttentionSpec are the schema, in the order of their fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, get_type_hints

import torch
from torch.autograd import forward_ad

from . import blockwise, flops, sharding
from .results import compute_dtype, gradient_like, new_like, without_autocast
from .spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .when_imported import when_imported

_SCHEMA_TYPES = {float: "float", float | None: "float?", int: "SymInt", bool: "bool"}
_SCALARS = ", ".join(f"{_SCHEMA_TYPES[python_type]} {name}" for name, python_type in get_type_hints(AttentionSpec).items())
_TENSORS = ", ".join(
    f"{'Tensor?' if name in AttentionTensors._field_defaults else 'Tensor'} {name}" for name in AttentionTensors._fields
)
_NUM_TENSORS, _NUM_GRADIENTS = len(AttentionTensors._fields), len(DIFFERENTIABLE)
_GRADIENTS = ", ".join(["Tensor"] * _NUM_GRADIENTS)

KEEPING = "blockwise keeping probabilities"
"""The implementation that, where it is differentiated, returns the probabilities as statistics."""

_library = torch.library.Library("triton_relattn", "DEF")
_library.define(f"attention_forward({_TENSORS}, {_SCALARS}, str implementation) -> (Tensor, Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor d_out, Tensor? d_lse, Tensor? out, Tensor lse, Tensor? statistics, {_TENSORS}, {_SCALARS}, "
    f"str implementation, bool[{_NUM_GRADIENTS}] wanted) -> ({_GRADIENTS})"
)


def _split(arguments: Sequence[Any]) -> tuple[AttentionTensors, AttentionSpec, str]:
    """Tensors, scalars and implementation from arguments in the order of the schema."""
    *scalars, implementation = arguments[_NUM_TENSORS:]
    return AttentionTensors(*arguments[:_NUM_TENSORS]), AttentionSpec(*scalars), implementation


def _forward(*arguments):  # type: ignore[no-untyped-def]
    tensors, spec, implementation = _split(arguments)
    if implementation == "triton":
        from .kernels.forward import forward

        with torch.cuda.device_of(tensors.query):
            return forward(tensors, spec)
    with without_autocast(tensors.query.device):
        kept = _forward_fake(*arguments)[2]
        return *blockwise.forward(tensors, spec, kept if implementation == KEEPING else None), kept


def _no_statistics(query: torch.Tensor) -> torch.Tensor:
    return query.new_empty(0, dtype=torch.float32)


def _forward_fake(*arguments):  # type: ignore[no-untyped-def]
    tensors, _, implementation = _split(arguments)
    query = tensors.query
    out = new_like(query, tensors.value.shape[-1])
    lse = query.new_empty(query.shape[:3], dtype=compute_dtype(query.dtype))
    if implementation == "triton" and tensors.attn_mask is not None and tensors.attn_mask.dtype != torch.bool:
        return out, lse, query.new_empty(*query.shape[:2], 2, query.shape[2], dtype=torch.float32)
    if implementation == KEEPING:
        return out, lse, query.new_empty(*query.shape[:3], tensors.key.shape[2], dtype=lse.dtype)
    return out, lse, _no_statistics(query)


def _backward(d_out, d_lse, out, lse, statistics, *arguments):  # type: ignore[no-untyped-def]
    *arguments, wanted = arguments
    tensors, spec, implementation = _split(arguments)
    if d_lse is not None:  # what merges partial results may have NaN for a query that sees nothing
        d_lse = d_lse.masked_fill(lse == -torch.inf, 0)
    if implementation == "triton":
        from .kernels.backward import backward

        with torch.cuda.device_of(tensors.query):
            gradients = backward(d_out, d_lse, out, lse, statistics, tensors, spec, wanted)
    else:
        with without_autocast(tensors.query.device):
            gradients = blockwise.backward(d_out, d_lse, tensors, spec, wanted, statistics)
    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(_d_out, _d_lse, _out, _lse, _statistics, *arguments):  # type: ignore[no-untyped-def]
    query, wanted = arguments[0], arguments[-1]
    return tuple(
        query.new_empty(0) if tensor is None or not want else gradient_like(tensor)
        for tensor, want in zip(arguments[:_NUM_GRADIENTS], wanted, strict=True)
    )


for _name, _run, _fake in (
    ("attention_forward", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"triton_relattn::{_name}", _fake, lib=_library)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    out, lse, statistics = output
    ctx.implementation = inputs[-1]
    ctx.set_materialize_grads(False)  # autograd's zeros would not be distributed as a DTensor is
    ctx.mark_non_differentiable(statistics)
    # blockwise computes delta from its blocks and does not need out.
    kernels = ctx.implementation == "triton"
    ctx.save_for_backward(out if kernels else None, lse, statistics if statistics.numel() else None, *inputs[:_NUM_TENSORS])
    ctx.scalars = inputs[_NUM_TENSORS:-1]


def _differentiate(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None, _: Any) -> tuple[Any, ...]:
    saved = ctx.saved_tensors  # once: checkpointing allows no more
    _, _, _, query, _, value, *_ = saved
    if d_out is None:
        d_out = query.new_zeros(*query.shape[:3], value.shape[3])
    # Compiled graphs refuse a second derivative by themselves, and torch.compile cannot trace one Function in another's backward.
    function = not torch.compiler.is_compiling() and _is_differentiated((d_out, d_lse, *saved))
    run = _Backward.apply if function else torch.ops.triton_relattn.attention_backward
    wanted = ctx.needs_input_grad[:_NUM_GRADIENTS]
    gradients = run(d_out, d_lse, *saved, *ctx.scalars, ctx.implementation, wanted)
    others = (None,) * (_NUM_TENSORS - _NUM_GRADIENTS + len(ctx.scalars) + 1)
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *others


def _is_differentiated(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Whether anybody may ask for a derivative by them, in reverse mode or (which is to be refused) in forward mode."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors if tensor is not None)


def _no_forward_mode(ctx: Any, *grad_inputs: Any) -> Any:
    raise NotImplementedError(
        "triton_relattn::attention_forward and attention_backward have no forward-mode derivatives (jvp); "
        'implementation="reference" has them'
    )


class _Forward(torch.autograd.Function):
    """out, lse, statistics = f(tensors, scalars...); out and lse are differentiable in the tensors of DIFFERENTIABLE."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return torch.ops.triton_relattn.attention_forward(*arguments)

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)
    jvp = staticmethod(_no_forward_mode)


class _Backward(torch.autograd.Function):
    """The gradients. Differentiating them raises; without this, terms would be dropped."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
        return torch.ops.triton_relattn.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_gradients: torch.Tensor) -> None:
        raise RuntimeError(
            "triton_relattn::attention_backward cannot be differentiated: relative attention has first derivatives only; "
            'implementation="reference" has all of them'
        )

    jvp = staticmethod(_no_forward_mode)


# A registered formula serves those who call the operator itself. The public function goes through _Forward: a registered
# formula does not work under torch.func, and its forward-mode tangents are zero where _Forward raises.
torch.library.register_autograd(
    "triton_relattn::attention_forward", _differentiate, setup_context=_save_for_backward, lib=_library
)


def _one_by_one(operator: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """The operator for each index of the dimensions that vmap maps over, one call after the other."""
    if info.batch_size == 0:
        raise ValueError(f"{operator}: vmap over a dimension of size 0")
    mapped = [
        [
            argument.select(dim, index) if isinstance(dim, int) else argument
            for argument, dim in zip(arguments, in_dims, strict=True)
        ]
        for index in range(info.batch_size)
    ]
    results = [operator(*each) for each in mapped]
    return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])


for _name in ("attention_forward", "attention_backward"):
    _operator = getattr(torch.ops.triton_relattn, _name)
    torch.library.register_vmap(f"triton_relattn::{_name}", partial(_one_by_one, _operator), lib=_library)
when_imported("torch.utils.flop_counter", flops.register)
when_imported("torch.distributed.tensor", sharding.register)


def relative_attention(tensors: AttentionTensors, spec: AttentionSpec, implementation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by "blockwise" or "triton", with gradients. The arguments have been validated."""
    # Where nobody differentiates, a Function only costs time, and torch.compile cannot trace one that marks a result as constant.
    function = not torch.compiler.is_compiling() and _is_differentiated(tensors)
    if implementation == "blockwise" and function and blockwise.keeps_probs(tensors, spec):
        implementation = KEEPING
    run = _Forward.apply if function else torch.ops.triton_relattn.attention_forward
    out, lse, _ = run(*tensors, *spec, implementation)
    return out, lse

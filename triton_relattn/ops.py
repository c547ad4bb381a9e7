"""Registration with torch: two opaque operators, their fakes, and the derivative of the first by the second.

The scalars of AttentionSpec are part of the schema, in the order of its fields.
"""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import Any

import torch

from . import blockwise
from .spec import AttentionSpec

_SCHEMA_TYPES = {"float": "float", "int": "SymInt", "bool": "bool"}
_SCALARS = ", ".join(f"{_SCHEMA_TYPES[str(field.type)]} {field.name}" for field in fields(AttentionSpec))
_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor? rel_key, Tensor? key_lengths"

_library = torch.library.Library("triton_relattn", "DEF")
_library.define(f"attention_forward({_TENSORS}, {_SCALARS}, str implementation) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor d_out, Tensor d_lse, Tensor? out, Tensor lse, {_TENSORS}, {_SCALARS}, str implementation, "
    "bool[4] wanted) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(query, key, value, rel_key, key_lengths, *scalars_and_implementation):  # type: ignore[no-untyped-def]
    *scalars, implementation = scalars_and_implementation
    run = blockwise.forward
    if implementation == "triton":
        from .kernels.forward import forward as run
    return run(query, key, value, rel_key, key_lengths, AttentionSpec(*scalars))


def _forward_fake(query, key, value, *_):  # type: ignore[no-untyped-def]
    out = blockwise.new_like(query, value.shape[-1])
    return out, query.new_empty(query.shape[:3], dtype=blockwise.compute_dtype(query.dtype))


def _backward(d_out, d_lse, out, lse, query, key, value, rel_key, key_lengths, *rest):  # type: ignore[no-untyped-def]
    *scalars, implementation, wanted = rest
    arguments = (query, key, value, rel_key, key_lengths, AttentionSpec(*scalars), wanted)
    if implementation == "triton":
        from .kernels.backward import backward

        gradients = backward(d_out, d_lse, out, lse, *arguments)
    else:
        gradients = blockwise.backward(d_out, d_lse, lse, *arguments)
    return tuple(query.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _backward_fake(_d_out, _d_lse, _out, _lse, query, key, value, rel_key, *rest):  # type: ignore[no-untyped-def]
    gradients = [blockwise.new_like(tensor, tensor.shape[-1]) for tensor in (query, key, value)]
    gradients.append(query.new_empty(0 if rel_key is None else rel_key.shape))
    return tuple(gradient if want else query.new_empty(0) for gradient, want in zip(gradients, rest[-1], strict=True))


for _name, _run, _fake in (
    ("attention_forward", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"triton_relattn::{_name}", _fake, lib=_library)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    out, lse = output
    ctx.implementation = inputs[-1]
    # blockwise computes delta from its blocks and does not need out.
    ctx.save_for_backward(out if ctx.implementation == "triton" else None, lse, *inputs[:5])
    ctx.scalars = inputs[5:-1]


def _differentiate(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> tuple[Any, ...]:
    # Compiled graphs refuse a second derivative by themselves, and torch.compile cannot trace one Function in another's backward.
    run = torch.ops.triton_relattn.attention_backward if torch.compiler.is_compiling() else _Backward.apply
    wanted = ctx.needs_input_grad[:4]
    gradients = run(d_out, d_lse, *ctx.saved_tensors, *ctx.scalars, ctx.implementation, wanted)
    not_tensors = (None,) * (2 + len(ctx.scalars))
    return *(gradient if want else None for gradient, want in zip(gradients, wanted, strict=True)), *not_tensors


class _Forward(torch.autograd.Function):
    """out, lse = f(query, key, value, rel_key; key_lengths, scalars...), differentiable in the first four, through both."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ops.triton_relattn.attention_forward(*arguments)

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)


class _Backward(torch.autograd.Function):
    """The gradients. Differentiating them raises; without this, terms would be dropped."""

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


# A registered formula serves those who call the operator itself. The public function goes through _Forward: a registered
# formula does not work under torch.func, and its forward-mode tangents are zero where _Forward raises.
torch.library.register_autograd(
    "triton_relattn::attention_forward", _differentiate, setup_context=_save_for_backward, lib=_library
)


def relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    key_lengths: torch.Tensor | None,
    spec: AttentionSpec,
    implementation: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse by "blockwise" or "triton", with gradients. The arguments have been validated."""
    return _Forward.apply(query, key, value, rel_key, key_lengths, *astuple(spec), implementation)

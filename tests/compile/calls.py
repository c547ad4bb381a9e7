"""Calls of public functions whose kernels are compiled or recorded, not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.compiled import Launch, recorded_launches
from tests.samples import Sample
from triton_relattn import fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn.testing import Inputs


@dataclass
class Call:
    """A call of a public function, and the inputs with gradients."""

    function: Callable[..., Any]
    tensors: dict[str, Tensor]
    arguments: dict[str, Any]
    d_outs: tuple[Tensor, ...]
    wanted: frozenset[str]

    def halves(self) -> Iterator[None]:
        """Run the forward, then the backward if there is one."""
        wanted = [tensor.requires_grad_() for name, tensor in sorted(self.tensors.items()) if name in self.wanted]
        outs = self.function(**self.tensors, **self.arguments)
        outs = outs if isinstance(outs, tuple) else (outs,)
        yield
        if wanted and outs[0].requires_grad:
            d_outs = [d_out.to(out.dtype) for out, d_out in zip(outs, self.d_outs, strict=False)]
            torch.autograd.grad(outs, wanted, d_outs)
            yield

    def run(self) -> None:
        for _ in self.halves():
            pass

    def resolved(self) -> tuple[AttentionTensors, AttentionSpec]:
        """What the launchers get."""
        return validation.resolve(Arguments(**self.tensors, **self.arguments))  # type: ignore[arg-type]


def unwritten(tensor: Tensor, dim: int | None = None) -> Tensor:
    """A CPU tensor with this shape and strides in untouched memory; its dimension dim spans 2**31 elements."""
    strides = list(tensor.stride())
    if dim is not None and tensor.shape[dim] > 1:
        strides[dim] = 2**31 // (tensor.shape[dim] - 1) + 1
    length = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    return torch.empty(length, dtype=tensor.dtype).as_strided(tensor.shape, strides)


def call_of(
    sample: Sample, change: Callable[[Tensor], Tensor] = unwritten, given: tuple[Inputs, dict[str, Any]] | None = None
) -> Call:
    """The sample's call, with lse. change: makes a tensor from one without memory. given: other inputs and arguments."""
    inputs, arguments = given or sample.inputs(is_meta=True)
    tensors = {name: change(tensor) for name, tensor in inputs._asdict().items() if tensor is not None}
    arguments = {"return_lse": True, **arguments}
    if "attn_mask" in arguments:
        arguments["attn_mask"] = unwritten(arguments["attn_mask"])
    function = fused_relative_attention if sample.sequences is None else fused_relative_attention_varlen
    d_outs = tensors.pop("d_out"), tensors.pop("d_lse")
    return Call(function, tensors, arguments, d_outs, frozenset(sample.requires_grad))


def compiled_launches(target: str, *samples: Sample, assembled: bool = True) -> list[Launch]:
    """Compile the kernels of calls and their backward."""
    with recorded_launches(target, assembled=assembled) as launches:
        for sample in samples:
            call_of(sample).run()
    return launches


def call(length: int = 64, table: str = "full", num_keys: int | None = None, **changes: Any) -> Sample:
    """A call with two heads of width 64 in bfloat16. Its table for the keys has a row for every pair ("full"), or is bounded
    ("clamp", "zero"); or there is "none"."""
    keys = length if num_keys is None else num_keys
    ends = {"full": (1 - length, keys - 1, "clamp"), "clamp": (-64, 64, "clamp"), "zero": (-64, 64, "zero"), "none": None}
    fields = {"dtype": "bfloat16", "num_queries": length, "num_keys": keys, "key_heads": 2, "width": 64, "value_width": 64}
    fields |= {"tables": ("rel_key",) * (table != "none"), "positions": ends[table]}
    return Sample(**{**fields, **changes})  # type: ignore[arg-type]

"""What a model or an object that holds some computes, in float64, with gradients: the same for stock and enabled ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.cpu.models import Results
from triton_relattn.integrations.isolation import Promoted


def modules_of(model: Any) -> list[nn.Module]:
    """The module, or those that an object holds."""
    if isinstance(model, nn.Module):
        return [model]
    parts = {**vars(model), **getattr(model, "components", {})}
    return [each for each in parts.values() if isinstance(each, nn.Module)]


def computed(model: Any, run: Callable[..., Any], *given: torch.Tensor, counts: torch.Tensor | None = None) -> Results:
    """The output of a run, and the gradients of arguments and parameters; without gradients the output alone."""
    leaves = [each.detach().requires_grad_() if each.dtype == torch.float64 else each for each in given]  # masks are none
    with Promoted():
        torch.manual_seed(3)
        out = run(model, *leaves)
        out = out[0] if isinstance(out, tuple) else out
        if not out.requires_grad:
            return {"out": out}
        found: Results = {f"input {n}": each for n, each in enumerate(leaves)}
        for n, root in enumerate(modules_of(model)):
            found |= {f"{n}.{name}": each for name, each in root.named_parameters()}
        found = {name: each for name, each in found.items() if each.requires_grad}
        out = out if counts is None else out.where(counts, 0.0)
        d_out = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(out, list(found.values()), d_out, allow_unused=True, materialize_grads=True)
    return {"out": out.detach(), **dict(zip(found, gradients, strict=True))}

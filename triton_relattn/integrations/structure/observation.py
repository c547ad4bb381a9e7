"""What runs of a stock forward show of a module: which children drop what, what it returns, and whether it repeats itself."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comparison import Refused, cloned_arguments, described, model_dtype, run, values
from ..shadow import copied

if TYPE_CHECKING:
    from .kind import Kind, Layout

OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that torch's own class has."""
PLAIN = bool, int, float, str


def observed(kind: type[Kind], layout: Layout, model: Any) -> Layout:
    """Return a layout with what a shadow drops and returns; raise Refused if what it computes depends on calls before."""
    stock = type(model)
    replacement = kind(stock, layout).replacement()
    sample = next(replacement.ours.samples(model, False))
    model, shapes, probabilities = copied(model), dict[str, torch.Size](), list[float]()
    dropouts = {name: child for name, child in model.named_children() if isinstance(child, nn.Dropout)}
    for name, child in dropouts.items():
        child.register_forward_pre_hook(lambda _, given, name=name: shapes.__setitem__(name, given[0].shape))
    for training in (True, False):
        model.train(training)
        before = _state(model)
        with torch.no_grad():
            dtype = model_dtype(model)
            runs = [run(replacement, model, cloned_arguments(sample, dtype), False, dtype) for _ in range(2)]
        returned = runs[0][0]
        returns = described(returned, sample)
        probabilities += runs[0][1]
        after = _state(model)
        counted = [name for name, value in after.items() if isinstance(value, PLAIN) and value != before.get(name)]
        replaced = [name for name, value in after.items() if not isinstance(value, PLAIN) and value is not before.get(name)]
        if counted or not torch.equal(*(values(out)[0] for out, _ in runs)):
            names = counted or replaced or ["something"]
            raise Refused(f"its forward changes {', '.join(names)}, on which what it computes next may depend")
    weights = [name for name, shape in shapes.items() if len(shape) >= 3 and shape[-2:] == sample.pairs]
    weights = weights or [name for name in dropouts if name not in shapes]  # torch's fused attention takes its probability
    weights = weights or [name for name, value in vars(model).items() if type(value) is float and value in probabilities]
    size = values(returned)[0].numel()
    others = [name for name, shape in shapes.items() if name not in weights and shape.numel() == size]
    return dataclasses.replace(layout, drops=next(iter(weights), None), drops_out=next(iter(others), None), returns=returns)


def _state(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its children by name, and how often buffers were changed."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        found |= {prefix + name: value for name, value in vars(module).items() if name not in OF_MODULES}
        found |= {prefix + name: buffer._version for name, buffer in module._buffers.items() if buffer is not None}
    return found

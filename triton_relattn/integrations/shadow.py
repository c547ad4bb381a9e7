"""A second instance of a module that a stock forward and ours can run on, while the module itself stays as it is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Convert = Callable[[torch.Tensor], torch.Tensor]


def shadow(module: nn.Module, convert: Convert, replace: Callable[[nn.Module], nn.Module | None] | None = None) -> Any:
    """Return a module with the same class, children, settings and hooks as a module, and with its tensors converted.

    What is assigned to the shadow or to its children does not reach the module. Other objects are shared, so that
    what holds for the module's settings holds for the shadow's; dictionaries and lists are copied, but not what they hold.

    Args:
        convert: applied to each parameter and buffer, and to each tensor that is an attribute. Tied tensors stay tied.
        replace: returns what stands in place of a child; None: its shadow.
    """
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, Any] = {}

    def tensor_of(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is not None and id(tensor) not in tensors:
            tensors[id(tensor)] = convert(tensor)
        return None if tensor is None else tensors[id(tensor)]

    def module_of(each: nn.Module) -> Any:
        if id(each) in modules:
            return modules[id(each)]
        if replace is not None and (other := replace(each)) is not None:
            modules[id(each)] = other
            return other
        new = modules[id(each)] = object.__new__(type(each))
        attributes = dict(vars(each))
        for name, value in attributes.items():
            if isinstance(value, nn.Module):
                attributes[name] = module_of(value)
            elif isinstance(value, torch.Tensor):
                attributes[name] = tensor_of(value)
            elif type(value) in (dict, list, OrderedDict):  # of a cache, and those of hooks
                attributes[name] = value.copy()
        attributes["_parameters"] = {name: tensor_of(value) for name, value in each._parameters.items()}
        attributes["_buffers"] = {name: tensor_of(value) for name, value in each._buffers.items()}
        attributes["_modules"] = {name: None if child is None else module_of(child) for name, child in each._modules.items()}
        vars(new).update(attributes)
        return new

    return module_of(module)


def widths(child: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of channels that a projection takes and gives; None if child is none.

    Linear layers, also quantised ones and those with adapters, alone or before a dropout, and convolutions of one frame.
    """
    if isinstance(child, nn.Sequential):
        first, others = next(iter(child), None), list(child)[1:]
        only_drops = all(isinstance(each, (nn.Dropout, nn.Identity)) for each in others)
        return widths(first) if isinstance(first, (nn.Linear, nn.Conv1d)) and only_drops else None
    if isinstance(child, nn.Conv1d):
        return (child.in_channels, child.out_channels) if child.kernel_size == (1,) and child.groups == 1 else None
    taken, given = getattr(child, "in_features", None), getattr(child, "out_features", None)
    return (taken, given) if isinstance(taken, int) and isinstance(given, int) else _adapted(child)


def _adapted(child: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a module that has a linear layer and a correction of lower rank; None if child is none."""
    linear = [(each.in_features, each.out_features) for each in child.modules() if isinstance(each, nn.Linear)]
    if len(linear) != 3:
        return None
    base = max(linear, key=lambda each: min(each))
    linear.remove(base)
    down, up = sorted(linear, key=lambda each: each[0] != base[0])
    return base if down[0] == base[0] and up[1] == base[1] and down[1] == up[0] < min(base) else None


def projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the widths of the projections among the children of a module, by name."""
    found = {name: widths(child) for name, child in module.named_children()}
    return {name: each for name, each in found.items() if each is not None}

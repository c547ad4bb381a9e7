"""A second instance of a module that a stock forward and ours can run on, while the module itself stays as it is."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

Convert = Callable[[torch.Tensor], torch.Tensor]
MOST_WEIGHTS = 1 << 24
"""Weights of a module up to which random ones are float64; of larger modules a copy in float64 takes time and memory."""


def shadow(module: nn.Module, convert: Convert, replace: Callable[[nn.Module], nn.Module | None] | None = None) -> Any:
    """Return a second instance of a module, with tensors converted; setting its attributes does not change the module.

    Other objects are shared, dictionaries and lists copied, and tied tensors stay tied. replace: returns what stands in place of
    a child; None: its shadow.
    """
    tensors: dict[int, torch.Tensor] = {}
    modules: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in tensors:
                tensors[id(value)] = convert(value)
            return tensors[id(value)]
        if isinstance(value, nn.Module):
            return modules[id(value)] if id(value) in modules else copied_module(value)
        return value.copy() if type(value) in (dict, list, OrderedDict) else value  # of a cache, and those of hooks

    def copied_module(part: nn.Module) -> Any:
        if replace is not None and (other := replace(part)) is not None:
            modules[id(part)] = other
            return other
        new = modules[id(part)] = object.__new__(type(part))
        attributes = {name: copied(value) for name, value in vars(part).items()}
        for name in ("_parameters", "_buffers", "_modules"):
            attributes[name] = {key: copied(value) for key, value in vars(part)[name].items()}
        vars(new).update(attributes)
        return new

    return copied_module(module)


def copied_tensor(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a copy of a tensor, or a parameter; of floating-point ones in dtype, unless that is None."""
    is_floating = tensor.is_floating_point()
    new = tensor.detach().to(tensor.dtype if dtype is None or not is_floating else dtype, copy=True)
    return nn.Parameter(new, is_floating) if isinstance(tensor, nn.Parameter) else new


def copied(model: Any) -> Any:
    """Return a shadow with the same parameters, and with buffers of its own."""
    return shadow(model, lambda tensor: tensor if isinstance(tensor, nn.Parameter) else copied_tensor(tensor))


def copied_argument(value: Any, dtype: torch.dtype | None, number: int) -> Any:
    """Return a copy of an argument, of floating-point tensors in dtype, unless that is None.

    Of a cache the layer with a number is copied, without its graph: the forward of attention writes to no other one.
    """
    if isinstance(value, (torch.Tensor, tuple, list, dict)):
        return tree_map_only(torch.Tensor, lambda tensor: copied_tensor(tensor, dtype), value)
    if not _is_cache(value):
        return copy.deepcopy(value)
    new = copy.copy(value)
    for name, part in vars(value).items():
        if name == "layers":
            new.layers = list(part)
            for layer in part[number : number + 1]:
                own = new.layers[number] = copy.copy(layer)
                vars(own).update(copied_argument(vars(layer), dtype, number))
        elif isinstance(part, dict) or _is_cache(part):
            setattr(new, name, copied_argument(part, dtype, number))
    return new


def _is_cache(value: Any) -> bool:
    """Return whether a value is a cache of transformers: of layers, or a pair of those, for own and for an encoder's states."""
    return hasattr(value, "get_seq_length") and (hasattr(value, "layers") or hasattr(value, "self_attention_cache"))


def cached_tensors(value: Any, number: int) -> list[torch.Tensor]:
    """Return the tensors of the layer with a number of a cache; none if value is something else."""
    if not _is_cache(value):
        return []
    caches = [value] if hasattr(value, "layers") else [value.self_attention_cache, value.cross_attention_cache]
    own = [vars(layer) for cache in caches for layer in cache.layers[number : number + 1]]
    return [tensor for tensor in tree_leaves(own) if isinstance(tensor, torch.Tensor)]


def with_random_weights(module: nn.Module, device: str = "cpu", changes_buffers: bool = True, are_shared: bool = False) -> Any:
    """Return a shadow with random weights, none of them zero, in float64; in float32 if there are many, or on the device "meta".

    A quantised projection becomes a linear layer. changes_buffers: a buffer without effect yet, as a gate of ones, shows by it;
    buffers of zeros and ones that are read as booleans must stay. are_shared: weights of the same shape are the same, so that of
    many layers one is held.
    """
    counts = {tuple(weight.shape) if are_shared else weight: weight.numel() for weight in module.parameters()}
    count, shared = sum(counts.values()), dict[Any, nn.Parameter]()
    dtype = torch.float64 if count <= MOST_WEIGHTS and device == "cpu" else torch.float32
    generator = torch.Generator().manual_seed(0)
    deviations: dict[int, float] = {}  # with which attention is neither even nor all on one key

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        is_parameter, is_meta = isinstance(tensor, nn.Parameter), tensor.is_meta
        if not (is_parameter or tensor.is_floating_point()):
            return torch.zeros_like(tensor, device=device) if is_meta else tensor.detach().to(device, copy=True)
        if not (is_parameter or is_meta or changes_buffers):
            return tensor.detach().to(device, dtype, copy=True)
        if are_shared and is_parameter and tensor.shape in shared:
            return shared[tensor.shape]
        new = torch.empty(tensor.shape, dtype=dtype, device=device)
        if device != "meta":
            new.normal_(generator=generator)
            if is_parameter:
                new.mul_(deviations.get(id(tensor), 0.5))
            elif not is_meta:
                new.mul_(0.1).add_(tensor.detach().to("cpu", dtype))
        if not is_parameter:
            return new
        shared[tensor.shape] = nn.Parameter(new)
        return shared[tensor.shape]

    def replace(child: nn.Module) -> nn.Module | None:
        found = widths(child)
        if found is None:
            return None
        for weight in child.parameters(recurse=False):
            if weight.dim() > 1:
                deviations[id(weight)] = math.prod(weight.shape[1:]) ** -0.5
        if isinstance(child, nn.Sequential) or any(
            type(weight) is nn.Parameter and weight.is_floating_point() for weight in child.parameters()
        ):
            return None
        bias = getattr(child, "bias", None)
        has_bias = (bias() if callable(bias) else bias) is not None
        linear = nn.Linear(*found, bias=has_bias, dtype=dtype, device="meta")
        deviations[id(linear.weight)] = found[0] ** -0.5
        return shadow(linear, convert)  # type: ignore[no-any-return]

    with torch.no_grad():
        model = shadow(module, convert, replace=replace)
    for child in model.modules():
        if "_old_forward" in vars(child):  # accelerate's hooks load the weights of the module itself
            vars(child).pop("forward")
    return model


def widths(child: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a linear layer, also a quantised or adapted one, or a convolution of one frame; None of others."""
    if isinstance(child, nn.Sequential):
        first, others = next(iter(child), None), list(child)[1:]
        only_drops = all(isinstance(other, (nn.Dropout, nn.Identity)) for other in others)
        return widths(first) if isinstance(first, (nn.Linear, nn.Conv1d)) and only_drops else None
    if isinstance(child, nn.Conv1d):
        return (child.in_channels, child.out_channels) if child.kernel_size == (1,) and child.groups == 1 else None
    taken, given = getattr(child, "in_features", None), getattr(child, "out_features", None)
    return (taken, given) if isinstance(taken, int) and isinstance(given, int) else _adapted(child)


def _adapted(child: nn.Module) -> tuple[int, int] | None:
    """Return the widths of a module that has a linear layer and a correction of lower rank; None if child is none."""
    linear = [(layer.in_features, layer.out_features) for layer in child.modules() if isinstance(layer, nn.Linear)]
    if len(linear) != 3:
        return None
    base = max(linear, key=min)
    linear.remove(base)
    down, up = sorted(linear, key=lambda sizes: sizes[0] != base[0])
    return base if down[0] == base[0] and up[1] == base[1] and down[1] == up[0] < min(base) else None


def projections(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the widths of the projections among the children of a module, by name."""
    return {name: sizes for name, child in module.named_children() if (sizes := widths(child)) is not None}

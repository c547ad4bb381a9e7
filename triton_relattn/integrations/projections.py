"""Which children of a module are projections, and how wide they are."""

from __future__ import annotations

from torch import nn


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

"""The parts that attributes and arguments of a module play: by their names where these say it, else by their order."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from ..shadow import projections

WORDS = {
    "query": ("q", "query", "queries", "wq"),
    "key": ("k", "key", "keys", "wk"),
    "value": ("v", "value", "values", "wv"),
    "out": ("o", "out", "output", "wo", "proj", "dense", "fc"),
    "position": ("pos", "position", "positional", "rel", "relative"),
    "rel_key": ("k", "key", "keys"),
    "rel_value": ("v", "value", "values"),
    "content_bias": ("u", "content"),
    "position_bias": ("v", "pos", "position"),
}
"""The words that say which part an attribute plays, the clearest first; parts in the order in which modules register them."""


def split_words(name: str) -> list[str]:
    """Return the words of a name, ``to_rel_k`` or ``toRelK``, in lower case."""
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|\d+", name)]


def assigned(names: Sequence[str], roles: Sequence[str]) -> dict[str, str] | None:
    """Return a name for each role, in the order in which roles are to be decided; None if there are not as many names.

    A name has a role if a word of that role is in no other name without a role. If a role finds none, all are given in
    the order of registration.
    """
    if len(names) != len(roles):
        return None
    remaining, found = list(names), {}
    for role in roles:
        for word in WORDS[role]:
            matching = [name for name in remaining if word in split_words(name)]
            if len(matching) == 1:
                found[role] = matching[0]
                remaining.remove(matching[0])
                break
    if len(found) == len(roles):
        return found
    return dict(zip(sorted(roles, key=list(WORDS).index), names, strict=True))


def is_table(child: nn.Module) -> bool:
    """Return whether a child is an embedding whose rows may be read without calling it. With max_norm a call changes them."""
    return isinstance(child, nn.Embedding) and child.max_norm is None


def is_readable(table: Any) -> bool:
    """Return whether the rows of a table, an embedding or a parameter, may be read now without calling it: it has no hooks."""
    if not isinstance(table, nn.Embedding):
        return True
    return is_table(table) and not (table._forward_hooks or table._forward_pre_hooks)


def table_weight(table: Any) -> Any:
    """Return the weight of an embedding, or a parameter itself."""
    return table.weight if isinstance(table, nn.Embedding) else table


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return the parameters of a module that are no child's, by name."""
    return dict(module.named_parameters(recurse=False))


def transformer_xl_roles(module: nn.Module) -> tuple[dict[str, str], tuple[int, ...]] | None:
    """Return the roles of five projections and two biases, and the shape of a bias; None if a module has others."""
    sizes, own = projections(module), own_parameters(module)
    if len(own) != 2:
        return None
    children = assigned(list(sizes), ("position", "out", "query", "key", "value"))
    biases = assigned(list(own), ("content_bias", "position_bias"))
    first, second = own.values()
    if children is None or biases is None or first.shape != second.shape:
        return None
    return ({**children, **biases}, tuple(first.shape)) if first.numel() == sizes[children["query"]][1] else None


MASK, POSITIONS, CACHE = "mask", "positions", "cache"
ARGUMENTS = {MASK: ("mask", "masks"), POSITIONS: ("pos", "position", "positions", "positional", "pe"), CACHE: ("cache",)}
"""The words by which arguments of a forward are known."""


def argument_roles(forward: Any, states: Sequence[str]) -> Iterator[dict[str, str]]:
    """Yield the roles that arguments of a forward may have, the likeliest first: by their names, and states in order.

    Without an argument that is called a mask, each one but the first may be it. Others are left at their defaults.
    """
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [item for item in list(inspect.signature(forward).parameters.values())[1:] if item.kind not in variadic]
    named: dict[str, str] = {}
    unnamed = []
    for parameter in parameters:
        words = set(split_words(parameter.name))
        role = next((role for role, names in ARGUMENTS.items() if words & set(names)), "")
        if not role:
            unnamed.append(parameter)
        elif role not in named.values():
            named[parameter.name] = role
    needed = {parameter.name for parameter in parameters if parameter.default is parameter.empty}
    masks = [None] if MASK in named.values() else [*(parameter.name for parameter in reversed(unnamed[1:])), None]
    for mask in masks:
        remaining, roles = list(states), dict(named)
        for parameter in unnamed:
            if parameter.name == mask:
                roles[mask] = MASK
            elif remaining and parameter.name in needed:
                roles[parameter.name] = remaining.pop(0)
        if states[0] in roles.values() and needed <= set(roles):
            yield roles

"""Arguments of launches, whose tensors come in named tuples, as one flat mapping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFIXES = {"inputs": "", "per_query": "", "end_rows": "end_", "common": ""}


def flat(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return all arguments, members of groups under the names of their fields ("rel_key" of end_rows is "end_rel_key")."""
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        if is_group(name, value):
            result |= {PREFIXES[name] + field: member for field, member in value._asdict().items()}
        else:
            result[name] = value
    return result


def grouped(arguments: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments in groups, with these changes by flat names."""
    result: dict[str, Any] = {}
    for name, value in arguments.items():
        if is_group(name, value):
            given = {field: changed.get(PREFIXES[name] + field, member) for field, member in value._asdict().items()}
            result[name] = value._replace(**given)
        else:
            result[name] = changed.get(name, value)
    return result


def is_group(name: str, value: Any) -> bool:
    return name in PREFIXES and hasattr(value, "_fields")

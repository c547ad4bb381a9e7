"""Floating-point operations for ``torch.utils.flop_counter``, counted as torch counts scaled_dot_product_attention.

A multiplication and an addition are two operations; masks do not reduce the count. Softmax and the rotation of the tables'
products are not counted. Each query is multiplied with as many table rows as it can reach.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .._core.spec import AttentionTensors
from . import OPERATORS

_NUM_TENSORS = len(AttentionTensors._fields)


def _operations(shapes: Any) -> tuple[int, int, int, int]:
    """Count the operations of each product: queries with keys, probabilities with values, queries with rel_key and keys with
    rel_p2c, probabilities with rel_value."""
    tensors: Any = AttentionTensors(*shapes)
    batch, heads, num_queries, width = tensors.query
    num_keys, value_width = tensors.key[2], tensors.value[3]
    rel_width = (tensors.rel_query or tensors.query)[3]
    rows, columns = 2 * batch * heads * num_queries, 2 * batch * heads * num_keys
    if tensors.cu_seqlens_k is not None:  # the sequences are counted as if equally long: their lengths may be on a GPU
        sequences = max(tensors.cu_seqlens_k[0] - 1, 1)
        num_queries, num_keys = num_queries // sequences, num_keys // sequences
    rel_key = 0 if tensors.rel_key is None else rows * min(tensors.rel_key[-2], num_keys) * rel_width
    rel_value = 0 if tensors.rel_value is None else rows * min(tensors.rel_value[-2], num_keys) * value_width
    rel_p2c = 0 if tensors.rel_p2c is None else columns * min(tensors.rel_p2c[-2], num_queries) * width
    return rows * num_keys * width, rows * num_keys * value_width, rel_key + rel_p2c, rel_value


def _forward_flops(*arguments: Any, **_: Any) -> int:
    return sum(_operations(arguments[:_NUM_TENSORS]))


def _backward_flops(*arguments: Any, **_: Any) -> int:
    scores, values, rel_scores, rel_values = _operations(arguments[6 : 6 + _NUM_TENSORS])
    return 3 * scores + 2 * values + 3 * rel_scores + 2 * rel_values


def _grid_operations(query: Any, key: Any, value: Any, rel_h: Any, rel_w: Any) -> tuple[int, int, int]:
    """Count the operations of each product on a grid: queries with keys, probabilities with values, queries with both tables."""
    batch, heads, num_queries, width = query
    rows = 2 * batch * heads * num_queries
    return rows * key[2] * width, rows * key[2] * value[3], rows * (rel_h[1] + rel_w[1]) * width


def _grid_forward_flops(*arguments: Any, **_: Any) -> int:
    return sum(_grid_operations(*arguments[:5]))


def _grid_backward_flops(*arguments: Any, **_: Any) -> int:
    scores, values, tables = _grid_operations(*arguments[3:8])
    return 3 * scores + 2 * values + 3 * tables


_FORMULAS = {
    "attention_forward": _forward_flops,
    "attention_backward": _backward_flops,
    "grid_attention_forward": _grid_forward_flops,
    "grid_attention_backward": _grid_backward_flops,
}


def register() -> None:
    """Register the formulas with torch.utils.flop_counter."""
    from torch.utils.flop_counter import register_flop_formula

    for name, formula in _FORMULAS.items():
        register_flop_formula(getattr(OPERATORS, name))(formula)


def add_to_counters() -> None:
    """Add the formulas to the counters that are active now: each has a copy of the formulas that existed when it was made."""
    from torch.utils.flop_counter import FlopCounterMode, flop_registry

    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, FlopCounterMode):
            for operator in (getattr(OPERATORS, name) for name in _FORMULAS):
                counter.flop_registry.setdefault(operator, flop_registry[operator])

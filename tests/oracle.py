"""Helpers of the CPU tests: a dense forward of their own, a typed call of the operator, and a float64 comparison."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cases import unlucky
from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn.testing import Inputs, dense_gradients, dropout_mask, forward_backward


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest magnitude (at least 1); -inf where -inf is expected."""
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: {actual.dtype}, {expected.dtype}"
    assert_near(name, actual, expected, smallest=1.0)


def attend(*tensors: torch.Tensor | None, **arguments: Any) -> Any:
    """out and lse of the operator; blockwise unless said otherwise."""
    return fused_relative_attention(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def attend_varlen(*tensors: torch.Tensor | None, **arguments: Any) -> Any:
    """out and lse of the packed operator; blockwise unless said otherwise."""
    return fused_relative_attention_varlen(*tensors, **{"implementation": "blockwise", "return_lse": True, **arguments})  # type: ignore[arg-type]


def dense_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None,
    *,
    rel_query: torch.Tensor | None = None,
    rel_value: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    rel_p2c: torch.Tensor | None = None,
    positions: RelativePositions | None = None,
    attn_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    query_offset: int | torch.Tensor = 0,
    keep: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rel_scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    exact_query_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, pair by pair: shares nothing with the package but the definition of the arguments.

    keep, bool (B, Hq, Nq, Nk), says what dropout does not drop. Autograd through this gives the gradients.
    """
    batch, heads, num_queries, width = query.shape
    num_keys, group = key.shape[2], heads // key.shape[1]
    assert (group > 1) == enable_gqa and (keep is not None) == (dropout_p > 0)
    scale = 1 / math.sqrt(width) if scale is None else scale
    rel_scale = scale if rel_scale is None else rel_scale
    tables = [tuple(table.shape) for table in (rel_key, rel_value, rel_p2c) if table is not None]
    num_rows = tables[0][-2] if tables else 0 if rel_bias is None else rel_bias.shape[-1]
    first = -(num_rows - 1) // 2 if positions is None else positions.first
    clamp = positions is None or positions.outside == "clamp"
    outs, lses = [], []
    for b, h, i in itertools.product(range(batch), range(heads), range(num_queries)):
        offset = int(query_offset[b]) if isinstance(query_offset, torch.Tensor) else query_offset
        length = num_keys if key_lengths is None else int(key_lengths[b])
        seen, rows, inside, added = [], [], [], []
        for j in range(length):
            r = j - (i + offset)
            mask = None if attn_mask is None else attn_mask.broadcast_to(batch, heads, num_queries, num_keys)[b, h, i, j].item()
            if (is_causal and r > 0) or 0 <= window_size[0] < -r or 0 <= window_size[1] < r or mask is False or mask == -math.inf:
                continue
            seen.append(j)
            rows.append(max(0, min(num_rows - 1, r - first)))
            inside.append(float(num_rows > 0 and (clamp or first <= r < first + num_rows)))
            added.append(mask if isinstance(mask, float) else 0.0)
        k, v = key[b, h // group, seen], value[b, h // group, seen]
        applies = torch.tensor(inside, dtype=torch.float64)
        logits = scale * (k * query[b, h, i]).sum(-1)
        if rel_key is not None:
            p = query[b, h, i] if rel_query is None else rel_query[b, h, i]
            logits = logits + rel_scale * applies * (of_head(rel_key, h, 2)[rows] * p).sum(-1)
        if rel_bias is not None:
            logits = logits + applies * of_head(rel_bias, h, 1)[rows]
        if rel_p2c is not None:
            logits = logits + rel_scale * applies * (of_head(rel_p2c, h, 2)[rows] * k).sum(-1)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logits = logits + torch.tensor(added, dtype=torch.float64)
        if rel_value is not None:
            v = v + applies[:, None] * of_head(rel_value, h, 2)[rows]
        lse = torch.logsumexp(logits, -1)
        weights = torch.softmax(logits, -1)
        if keep is not None:
            weights = weights * keep[b, h, i, seen].double() * (1 / (1 - dropout_p) if dropout_p < 1 else 0)
        outs.append((weights[:, None] * v).sum(0))
        # logsumexp of nothing is -inf; its gradient, too, is nothing.
        lses.append(lse if seen else (0 * query[b, h, i].sum() - math.inf))
    return torch.stack(outs).view(batch, heads, num_queries, -1), torch.stack(lses).view(batch, heads, num_queries)


def of_head(table: torch.Tensor, head: int, rank: int) -> torch.Tensor:
    """The table of a head, which may have one of its own."""
    return table[head] if table.dim() > rank else table


def with_keep(inputs: Inputs, arguments: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """The arguments, and what dropout keeps in a call after torch.manual_seed(seed)."""
    dropout_p = arguments.get("dropout_p", 0.0)
    if dropout_p == 0:
        return arguments
    torch.manual_seed(seed)
    batch, heads, num_queries, _ = inputs.query.shape
    return {**arguments, "keep": dropout_mask(batch, heads, num_queries, inputs.key.shape[2], dropout_p)}


def results_of(
    implementation: str, inputs: Inputs, function: Callable[..., Any] = attend, seed: int = 0, **arguments: Any
) -> dict[str, torch.Tensor]:
    """out, lse and all gradients of an implementation, after torch.manual_seed(seed)."""
    torch.manual_seed(seed)
    return forward_backward(function, inputs, implementation=implementation, **arguments)


def by_hand(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by dense_gradients, in float64, with the dropout of results_of."""
    return dense_gradients(inputs, **with_keep(inputs, arguments))._asdict()


def unlucky_reference(inputs: Inputs, **arguments: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Results by hand, and results of the reference that are as far off as in the worst of three draws."""
    return unlucky(inputs, lambda each: by_hand(each, **arguments), lambda each: results_of("reference", each, **arguments))


def by_loops(inputs: Inputs, **arguments: Any) -> dict[str, torch.Tensor]:
    """out, lse and all gradients by autograd through dense_forward, in float64, with the dropout of results_of."""
    return forward_backward(dense_forward, inputs.to(torch.float64), **with_keep(inputs, arguments))


def quick_and_slow(quick: int, slow: int) -> list[Any]:
    """Seeds, the first few for every run of the tests, the others for the long one."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, quick + slow))]

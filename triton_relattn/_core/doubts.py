"""Calls that are hardly meant as they stand: a mask where the table belongs, dimensions in another order, a table too short.

If such a call is wrong, its error says what to do. If it is valid, a warning says so, once, unless the call may be meant: short
tables are clipped on purpose, as by Shaw et al., and a call with positions says what its table means.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from .spec import AttentionSpec, AttentionTensors
from .warn import warn_once

LARGEST_CLIP = 512  # tables are clipped at 16 (Shaw), 64 (Wav2Vec2-BERT), 256 (DeBERTa)
MANY_HEADS = 256
LEVELS = 5  # of the stack from a warning to the caller of a public function
Resolve = TypeVar("Resolve", bound=Callable[..., Any])


def _other_layout(packed: bool) -> str:
    if packed:
        return "query, key and value look like (heads, total, width); .transpose(0, 1) makes them (total, heads, width)"
    layout, wanted = "(batch, length, heads, width)", "(batch, heads, length, width)"
    return f"query, key and value look like {layout}; .transpose(1, 2) makes them {wanted}"


def _perhaps_meant(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what may be done about a wrong call, as text, with the arguments that it changes."""
    packed = given.get("cu_seqlens") is not None
    if given.get("rel_key") is not None and given.get("attn_mask") is None and not packed:
        yield "a mask is given by its name: attn_mask=...", {"rel_key": None, "attn_mask": given["rel_key"]}
    rank, length = (3, 0) if packed else (4, 2)
    tensors = {name: given[name] for name in ("query", "key", "value", "rel_query") if given.get(name) is not None}
    if all(isinstance(each, torch.Tensor) and not each.is_nested and each.dim() == rank for each in tensors.values()):
        if "query" in tensors and tensors["query"].shape[1] > tensors["query"].shape[length]:  # more heads than positions
            yield _other_layout(packed), {name: tensor.transpose(1, length) for name, tensor in tensors.items()}


def with_cures(resolve: Resolve) -> Resolve:
    """Wrap a check so that its errors say what to do, if the call passes the check once that is done."""

    @functools.wraps(resolve)
    def run(query: Any, key: Any, value: Any, rel_key: Any = None, **others: Any) -> Any:
        try:
            return resolve(query, key, value, rel_key, **others)
        except (TypeError, ValueError) as error:
            given = {"query": query, "key": key, "value": value, "rel_key": rel_key, **others}
            for cure, changes in () if torch.compiler.is_compiling() else _perhaps_meant(given):
                try:
                    resolve(**{**given, **changes})
                except (TypeError, ValueError):
                    continue
                error.args = (f"{error}; {cure}",)
                break
            raise

    return run  # type: ignore[return-value]


def warn_of_doubts(tensors: AttentionTensors, spec: AttentionSpec, num_rows: int | None) -> None:
    """Warn of a valid call that is hardly meant.

    Args:
        num_rows: rows of the tables if the call was given no positions; else None.
    """
    heads = tensors.query.shape[1]
    if heads > spec.max_seqlen_q and heads > spec.max_seqlen_k and (heads > MANY_HEADS or num_rows == 2 * heads - 1):
        text = f"query has {heads} heads, but {spec.max_seqlen_q} positions: "
        warn_once("layout", text + _other_layout(tensors.cu_seqlens_q is not None), LEVELS)
    if num_rows is None or num_rows <= 2 * LARGEST_CLIP + 1 or tensors.query_offsets is not None:
        return
    if spec.coverage() == "clamp":
        warn_once(
            f"table of {num_rows} rows",
            f"the {num_rows} rows of a table stand for distances up to {num_rows // 2}, and this call has longer ones, "
            f"which take its end rows: positions=RelativePositions.centred({num_rows}) says that this is meant; "
            f"if the last row stands for the query's own position, positions=RelativePositions(-{num_rows - 1}, 0)",
            LEVELS,
        )

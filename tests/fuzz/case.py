"""One call of the operator as a value: it prints as one line, and the line, evaluated, is the call again."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.testing import SHARP_FACTOR, SHARP_SHIFT, in_memory_order

Layout = tuple[str, tuple[int, ...], int, tuple[int, ...]]
"""Memory layout of a tensor: its name, its dimensions in memory order (outermost first), the step of the last dimension, and the
dimensions whose stride is 0."""


def one_line(value: Any) -> str:
    """The fields of a dataclass that are not as by default; strings in double quotes, so that a shell takes it in single ones."""
    fields = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    given = (f"{field.name}={present!r}" for field, present in fields if present != field.default)
    return f"{type(value).__name__}({', '.join(given)})".replace("'", '"')


@dataclass(frozen=True, repr=False)
class Case:
    """A valid call. All numbers in its tensors come from seed."""

    seed: int = 0
    implementation: str = "blockwise"
    blocks: int = 0
    """Which of environment.BLOCKS or TILES cuts the call."""
    dtype: str = "float32"
    batch: int = 1
    num_queries: int = 1
    num_keys: int = 1
    sequences: tuple[tuple[int, int], ...] | None = None
    """Queries and keys of each packed sequence, instead of the three above."""
    slack: int = 0
    """The number by which max_seqlen_q and max_seqlen_k exceed the longest sequence."""
    key_heads: int = 1
    group: int = 1
    """Heads of the query for each of the key."""
    width: int = 1
    value_width: int = 1
    rel_width: int | None = None
    same: bool = False
    """The query is also key and value."""
    tables: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    float32_bias: bool = False
    positions: tuple[int, int, str] | None = None
    default_positions: bool = False
    mask: str | None = None
    """The mask's dtype."""
    mask_shape: tuple[int, ...] = ()
    mask_low: str = "-inf"
    """The value of hidden pairs in a mask of numbers: "-inf", "finfo.min" or "-1e4"."""
    key_lengths: tuple[int, ...] | None = None
    is_causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    query_offset: int | tuple[int, ...] = 0
    integers: str = "int64"
    strided_integers: bool = False
    dropout_p: float = 0.0
    scale: float | None = None
    rel_scale: float | None = None
    softcap: float | None = None
    return_lse: bool = True
    exact_query_grad: bool = False
    sharp: bool = False
    requires_grad: tuple[str, ...] = ()
    cotangents: str = "both"
    """Which of the results the gradients come from: "both", "out" or "lse"."""
    layouts: tuple[Layout, ...] = ()
    beside: str | None = None
    """Content of table rows that no visible pair has, "nan" or "inf"; None: numbers as in all others."""
    mode: str = "grad"
    """grad, no_grad or inference_mode of torch."""
    default_dtype: str = "float32"
    round_terms: bool = False
    """Kernels round terms to float16, as they do on a GPU for bfloat16."""
    workspace: int | None = None
    """TRITON_RELATTN_WORKSPACE."""
    spoilt: bool = False
    """Rows of tables that no pair has, and keys and values that no query sees, are NaN."""

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def num_sequences(self) -> int:
        return self.batch if self.sequences is None else len(self.sequences)

    @property
    def longest(self) -> tuple[int, int]:
        """Queries and keys of the longest sequence, as the call states them."""
        if self.sequences is None:
            return self.num_queries, self.num_keys
        queries, keys = (max((pair[which] for pair in self.sequences), default=0) for which in (0, 1))
        return queries + self.slack, keys + self.slack

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True, repr=False)
class Broken:
    """A valid call in which arguments are replaced by Python expressions of what they were, x."""

    case: Case
    changes: tuple[tuple[str, str], ...] = ()

    def __repr__(self) -> str:
        return one_line(self)


def shapes(case: Case) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that have gradients, and of d_out and d_lse."""
    heads = case.key_heads * case.group

    def rows(heads: int, which: int, width: int) -> tuple[int, ...]:
        if case.sequences is not None:
            return sum(pair[which] for pair in case.sequences), heads, width
        return case.batch, heads, (case.num_queries, case.num_keys)[which], width

    found = {
        "query": rows(heads, 0, case.width),
        "key": rows(case.key_heads, 1, case.width),
        "value": rows(case.key_heads, 1, case.value_width),
        "d_out": rows(heads, 0, case.value_width),
    }
    found["d_lse"] = found["d_out"][:-1] if case.sequences is None else (heads, found["d_out"][0])
    if case.rel_width is not None:
        found["rel_query"] = rows(heads, 0, case.rel_width)
    tails = {
        "rel_key": (case.rel_width or case.width,),
        "rel_value": (case.value_width,),
        "rel_bias": (),
        "rel_p2c": (case.width,),
    }
    for name in case.tables:
        assert case.positions is not None
        first, last, _ = case.positions
        found[name] = (*(heads,) * (name in case.per_head), last - first + 1, *tails[name])
    return found


def arranged(case: Case, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the memory that the case wants for it."""
    layout = next((layout for layout in case.layouts if layout[0] == name and len(layout[1]) == tensor.dim()), None)
    if layout is None:
        return tensor
    shape = tensor.shape
    for dim in layout[3]:
        tensor = tensor[(slice(None),) * dim + (slice(0, 1),)]
    return in_memory_order(tensor, *layout[1], step=layout[2]).expand(shape)


def normal(case: Case, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed numbers that belong to seed and name, in the memory of the case."""
    generator = torch.Generator().manual_seed(case.seed * 64 + (*DIFFERENTIABLE, "d_out", "d_lse", "attn_mask").index(name))
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.sharp and name in ("query", "rel_query"):
        numbers = numbers * SHARP_FACTOR
    if case.sharp and name in ("value", "d_out"):
        numbers = numbers + SHARP_SHIFT
    return arranged(case, name, numbers.to(dtype))


def attn_mask(case: Case) -> torch.Tensor:
    """A mask that hides some pairs, and some queries' and keys' all."""
    generator = torch.Generator().manual_seed(case.seed)
    shape = case.mask_shape
    visible = torch.rand(shape, generator=generator) < 0.8
    if len(shape) > 1:
        visible &= torch.rand((*shape[:-1], 1), generator=generator) < 0.9
    if len(shape) > 0:
        visible &= torch.rand(shape[-1], generator=generator) < 0.9
    if case.mask == "bool":
        return arranged(case, "attn_mask", visible)
    dtype = getattr(torch, str(case.mask))
    low = {"-inf": -math.inf, "finfo.min": torch.finfo(dtype).min, "-1e4": -1e4}[case.mask_low]
    return arranged(case, "attn_mask", normal(case, "attn_mask", shape, dtype).masked_fill(~visible, low))


def integers(case: Case, values: tuple[int, ...] | list[int]) -> torch.Tensor:
    vector = torch.tensor(values, dtype=getattr(torch, case.integers))
    return torch.stack((vector, torch.full_like(vector, -(2**31))), -1)[:, 0] if case.strided_integers else vector


def arguments_of(case: Case) -> dict[str, Any]:
    """All arguments of the call."""
    arguments: dict[str, Any] = {}
    for name, shape in shapes(case).items():
        if name in DIFFERENTIABLE:
            dtype = torch.float32 if name == "rel_bias" and case.float32_bias else case.torch_dtype
            arguments[name] = normal(case, name, shape, dtype)
    if case.same:
        arguments["key"] = arguments["value"] = arguments["query"]
    if case.positions is not None and not case.default_positions:
        arguments["positions"] = RelativePositions(*case.positions)  # type: ignore[arg-type]
    if case.mask is not None:
        arguments["attn_mask"] = attn_mask(case)
    if case.key_lengths is not None:
        arguments["key_lengths"] = integers(case, case.key_lengths)
    if case.sequences is not None:
        for which, name in enumerate("qk"):
            starts = itertools.accumulate((pair[which] for pair in case.sequences), initial=0)
            arguments[f"cu_seqlens_{name}"] = integers(case, list(starts))
            arguments[f"max_seqlen_{name}"] = case.longest[which]
    offset = case.query_offset
    arguments["query_offset"] = offset if isinstance(offset, int) else integers(case, offset)
    names = ("is_causal", "window_size", "dropout_p", "scale", "rel_scale", "softcap", "return_lse", "exact_query_grad")
    arguments |= {name: getattr(case, name) for name in (*names, "implementation")}
    return arguments | {"enable_gqa": case.group > 1}


def unused(case: Case) -> dict[str, torch.Tensor]:
    """The rows of the tables that no pair has, and the keys that no query sees, by their name: True where that is so."""
    if case.sequences is None:
        sizes = [(case.num_queries, case.num_keys)] * case.batch
    else:
        sizes = list(case.sequences)
    offsets = case.query_offset if isinstance(case.query_offset, tuple) else (case.query_offset,) * len(sizes)
    shown = [keys for _, keys in sizes] if case.key_lengths is None else case.key_lengths
    left, right = case.window_size[0], 0 if case.is_causal else case.window_size[1]
    first, last, outside = case.positions or (0, 0, "zero")
    rows, keys = torch.ones(last - first + 1, dtype=torch.bool), []
    for (num_queries, num_keys), offset, length in zip(sizes, offsets, shown, strict=True):
        relative = torch.arange(num_keys) - torch.arange(num_queries)[:, None] - offset
        seen = (torch.arange(num_keys) < length).expand_as(relative)
        seen = seen & (relative >= -left) if left >= 0 else seen
        seen = seen & (relative <= right) if right >= 0 else seen
        row, applies = RelativePositions(first, last, outside).rows(relative)  # type: ignore[arg-type]
        rows[row[seen & applies]] = False
        keys.append(~seen.any(0))
    found = dict.fromkeys(case.tables, rows)
    if not case.same and sizes:
        of_keys = torch.cat(keys)[:, None, None] if case.sequences is not None else torch.stack(keys)[:, None, :, None]
        found |= {"key": of_keys, "value": of_keys}
    return found


def spoilt(case: Case, call: dict[str, Any]) -> dict[str, Any]:
    """The arguments with NaN in all that is not used; tensors with a stride of 0 stay."""
    expanded = {layout[0] for layout in case.layouts if layout[3]}
    changed = {}
    for name, mask in unused(case).items() if case.spoilt else ():
        if name not in expanded:
            mask = mask[:, None] if name in ("rel_key", "rel_value", "rel_p2c") else mask
            changed[name] = arranged(case, name, call[name].masked_fill(mask, math.nan))
    return {**call, **changed}


def function_of(case: Case) -> Callable[..., Any]:
    return fused_relative_attention if case.sequences is None else fused_relative_attention_varlen


class NotApplicable(Exception):
    """A change that cannot be made to this call, since x is not what the expression takes it for."""


def changed(broken: Broken) -> dict[str, Any]:
    """The arguments of the call that is perhaps no longer valid.

    Raises:
        NotApplicable: an expression cannot be evaluated.
    """
    arguments = arguments_of(broken.case)
    names = {"torch": torch, "np": np, "math": math, "RelativePositions": RelativePositions, "text": "text", "meta": "meta"}
    for name, expression in broken.changes:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arguments[name] = eval(expression, {**names, "x": arguments.get(name)})
        except Exception as error:
            raise NotApplicable(f"{name} = {expression}") from error
    return arguments

"""One valid call of the operator as a value.

A Sample prints as one line, and the line, evaluated, is the sample again: a failure is repeated by
``python -m tests.draws --sample 'Sample(...)'``. Its tensors are drawn from its seed. It does not name an implementation: those
are in tests/check.py. Its field ``blocks`` chooses among their small blocks or tiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.expected import INPUTS
from triton_relattn import RelativePositions
from triton_relattn.testing import SHARP_FACTOR, SHARP_SHIFT, Inputs

SIDE = 16
"""Small blocks and tiles end at multiples of this."""
FAR = 2**29
"""The largest position that is allowed."""


def in_memory_order(tensor: Tensor, *order: int, step: int = 1) -> Tensor:
    """Copy a tensor to memory with dimensions in this order (outermost first), elements of the last one ``step`` apart, and NaN
    before each dimension, which no implementation may read."""
    padded = tensor.new_full([tensor.shape[dim] + 1 for dim in order] + [step], math.nan)
    view = padded[..., 0]
    for dim in range(tensor.dim()):
        view = view.narrow(dim, 1, view.shape[dim] - 1)
    return view.permute([order.index(dim) for dim in range(tensor.dim())]).copy_(tensor)


ORDERS: dict[str, tuple[int, ...]] = {
    **{"query": (0, 2, 1, 3), "key": (0, 1, 3, 2), "value": (1, 0, 2, 3), "d_out": (2, 1, 0, 3), "d_lse": (2, 0, 1)},
    **{"rel_query": (1, 2, 0, 3), "rel_key": (1, 2, 0), "rel_value": (2, 0, 1), "rel_bias": (1, 0), "rel_p2c": (1, 2, 0)},
}


def with_different_strides(inputs: Inputs) -> Inputs:
    """Copy inputs so that each tensor has different strides, storage offset and padding."""
    copies = {}
    for number, (name, tensor) in enumerate(inputs._asdict().items()):
        if tensor is not None:  # tables that heads share lack a dimension
            order = [dim for dim in ORDERS[name] if dim < tensor.dim()]
            copies[name] = in_memory_order(tensor, *order, step=1 + number % 3)
    return inputs._replace(**copies)


@dataclass(frozen=True, repr=False)
class Sample:
    """A valid call."""

    seed: int = 0
    blocks: int = 0
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
    """Heads of the query per head of the key."""
    width: int = 16
    value_width: int = 16
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
    dropout_p: float = 0.0
    scale: float | None = None
    rel_scale: float | None = None
    softcap: float | None = None
    return_lse: bool = True
    sharp: bool = False
    in_half: bool = False
    """Values are rounded to float16 first, so that TF32 represents them exactly."""
    requires_grad: tuple[str, ...] = INPUTS
    """The tensors, if present, whose gradients are computed."""
    cotangents: str = "both"
    """The results that gradients flow back from: "both", "out" or "lse"."""
    strided: tuple[str, ...] = ()
    """Tensors with unusual strides, padding between elements, and perhaps dimensions of stride 0."""
    in_order: bool = False
    """Strided tensors have the usual order of dimensions, dense rows, and an odd stride of rows."""
    spoilt: str | None = None
    """Content ("nan" or "inf") of table rows that no pair has, and of keys and values that no query sees."""
    mode: str = "grad"
    """grad, no_grad or inference_mode of torch."""
    default_dtype: str = "float32"
    round_terms: bool = False
    """Kernels round terms to float16, as they do on a GPU for bfloat16."""
    workspace: int | None = None
    """TRITON_RELATTN_WORKSPACE."""

    def __repr__(self) -> str:
        """All fields that differ from the default; strings in double quotes, so that a shell takes the line in single ones."""
        fields = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return f"Sample({', '.join(f'{field.name}={value!r}' for field, value in fields if value != field.default)})".replace(
            "'", '"'
        )

    @property
    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Queries and keys of each sequence."""
        return ((self.num_queries, self.num_keys),) * self.batch if self.sequences is None else self.sequences

    def longest(self, which: int) -> int:
        """Queries (0) or keys (1) of the longest sequence, as the call states them."""
        if self.sequences is None:
            return (self.num_queries, self.num_keys)[which]
        return max((pair[which] for pair in self.sequences), default=0) + self.slack

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors that have gradients, and of d_out and d_lse."""
        heads = self.key_heads * self.group
        tails = {"rel_key": (self.rel_width or self.width,), "rel_value": (self.value_width,), "rel_bias": ()}

        def rows(heads: int, which: int, *width: int) -> tuple[int, ...]:
            if self.sequences is not None:
                return sum(pair[which] for pair in self.sequences), heads, *width
            return self.batch, heads, (self.num_queries, self.num_keys)[which], *width

        found = {"query": rows(heads, 0, self.width), "key": rows(self.key_heads, 1, self.width)}
        found |= {"value": rows(self.key_heads, 1, self.value_width), "d_out": rows(heads, 0, self.value_width)}
        found["d_lse"] = rows(heads, 0) if self.sequences is None else rows(heads, 0)[::-1]
        if self.rel_width is not None:
            found["rel_query"] = rows(heads, 0, self.rel_width)
        first, last, _ = self.positions or (0, 0, "")
        for name in self.tables:
            found[name] = (*(heads,) * (name in self.per_head), last - first + 1, *tails.get(name, (self.width,)))
        return found

    def laid_out(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor with unusual strides if its name is in ``strided``."""
        if name not in self.strided:
            return tensor
        if self.in_order:
            return in_memory_order(tensor, *range(tensor.dim()))
        choose, shape, dims = random.Random(f"{self.seed} {name}"), tensor.shape, range(tensor.dim())
        for dim in choose.sample(dims, min(choose.choice((0, 0, 0, 1, 2)), len(dims))):
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
        return in_memory_order(tensor, *choose.sample(dims, len(dims)), step=choose.randint(1, 3)).expand(shape)

    def numbers(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, is_meta: bool = False
    ) -> Tensor:
        """Normally distributed values, determined by seed and name."""
        place = (*INPUTS, "d_out", "d_lse", "attn_mask").index(name)
        generator = torch.Generator().manual_seed(self.seed * 64 + place)
        shape = self.shapes[name] if shape is None else shape
        if is_meta:
            return self.laid_out(name, torch.empty(shape, dtype=dtype or getattr(torch, self.dtype), device="meta"))
        drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
        if self.sharp and name in ("query", "rel_query"):
            drawn = drawn * SHARP_FACTOR
        if self.sharp and name in ("value", "d_out"):
            drawn = drawn + SHARP_SHIFT
        drawn = drawn.half() if self.in_half else drawn
        return self.laid_out(name, drawn.to(dtype or getattr(torch, self.dtype)))

    def attn_mask(self, is_meta: bool = False) -> Tensor:
        """A mask that hides some pairs, and all of some queries and keys."""
        if is_meta:
            return self.numbers("attn_mask", self.mask_shape, getattr(torch, str(self.mask)), is_meta)
        generator, shape = torch.Generator().manual_seed(self.seed), self.mask_shape
        visible = torch.rand(shape, generator=generator) < 0.8
        for dims in ((*shape[:-1], 1), shape[-1:]) if shape else ():
            visible &= torch.rand(dims, generator=generator) < 0.9
        if self.mask == "bool":
            return self.laid_out("attn_mask", visible)
        dtype = getattr(torch, str(self.mask))
        low = {"-inf": -math.inf, "finfo.min": torch.finfo(dtype).min, "-1e4": -1e4}[self.mask_low]
        return self.laid_out("attn_mask", self.numbers("attn_mask", shape, dtype).masked_fill(~visible, low))

    def vector(self, values: tuple[int, ...]) -> Tensor:
        """A vector of integers; if "integers" is in ``strided``, with stride 2, or 0 if all are the same."""
        vector = torch.tensor(values, dtype=getattr(torch, self.integers))
        if "integers" in self.strided and len(values) > len({*values}) == 1:
            return vector[:1].expand(len(values))
        return torch.stack((vector, torch.full_like(vector, -(2**31))), -1)[:, 0] if "integers" in self.strided else vector

    def inputs(self, is_meta: bool = False) -> tuple[Inputs, dict[str, Any]]:
        """The input tensors with d_out and d_lse, and the other arguments."""
        arguments, dtype = self.call(is_meta), torch.promote_types(getattr(torch, self.dtype), torch.float32)
        tensors, _ = {name: arguments.pop(name, None) for name in INPUTS}, arguments.pop("return_lse")
        d_out, d_lse = self.numbers("d_out", is_meta=is_meta), self.numbers("d_lse", None, dtype, is_meta)
        return Inputs(**tensors, d_out=d_out, d_lse=d_lse), arguments

    def call(self, is_meta: bool = False) -> dict[str, Any]:
        """All arguments by name except implementation; is_meta: large tensors are on the device meta."""
        bias = torch.float32 if self.float32_bias else None
        call: dict[str, Any] = {}
        for name in self.shapes:
            call[name] = self.numbers(name, None, bias if name == "rel_bias" else None, is_meta)
        del call["d_out"], call["d_lse"]
        if self.same:
            call["key"] = call["value"] = call["query"]
        if self.positions is not None and not self.default_positions:
            call["positions"] = RelativePositions(*self.positions)  # type: ignore[arg-type]
        if self.mask is not None:
            call["attn_mask"] = self.attn_mask(is_meta)
        if self.key_lengths is not None:
            call["key_lengths"] = self.vector(self.key_lengths)
        for which, name in enumerate("qk" if self.sequences is not None else ""):
            call[f"cu_seqlens_{name}"] = self.vector((0, *itertools.accumulate(pair[which] for pair in self.sizes)))
            call[f"max_seqlen_{name}"] = self.longest(which)
        offset = self.query_offset
        call["query_offset"] = offset if isinstance(offset, int) else self.vector(offset)
        scalars = ("is_causal", "window_size", "dropout_p", "scale", "rel_scale", "softcap", "return_lse")
        return call | {name: getattr(self, name) for name in scalars} | {"enable_gqa": self.group > 1}

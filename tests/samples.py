"""One valid call of the operator as a value, and the strategy of hypothesis that draws any.

A Sample prints as one line, and the line, evaluated, is the sample again: a failure is repeated by
``python -m tests.draws --sample 'Sample(...)'``. All numbers in its tensors come from its seed. It says nothing of who computes
it (tests/check.py does), but that blocks chooses among the small blocks and tiles that a way to compute may have.

samples() draws any call, in the interpreter one that takes a second or so. First choices are the simplest ones, to which
hypothesis shrinks. Lengths, windows, offsets and tables end where tiles do, or one beside, more often than elsewhere: that is
where most faults are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.conftest import INTERPRETED
from tests.expected import INPUTS, TABLES
from triton_relattn import RelativePositions
from triton_relattn.testing import SHARP_FACTOR, SHARP_SHIFT, Inputs

T = TypeVar("T")
SIDE = 16
"""Small blocks and tiles end at multiples of this."""
FAR = 2**29
"""The largest position that is allowed."""
LARGEST_TABLE = 150


def in_memory_order(tensor: Tensor, *order: int, step: int = 1) -> Tensor:
    """Copy a tensor to other memory: dimensions in the given order (outermost first), elements of the last one ``step`` apart,
    every dimension padded in front with NaN, which no implementation may read."""
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
    """Copy inputs so that every tensor has strides, a storage offset and padding of its own."""
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
    requires_grad: tuple[str, ...] = INPUTS
    """The tensors whose gradients are asked for, if the call has them."""
    cotangents: str = "both"
    """Which of the results the gradients come from: "both", "out" or "lse"."""
    strided: tuple[str, ...] = ()
    """Tensors with strides of their own, padding between, and perhaps dimensions of stride 0."""
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
        """The fields that are not as by default; strings in double quotes, so that a shell takes it in single ones."""
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
        """The tensor in memory of its own kind, if it is one of those that are strided."""
        if name not in self.strided:
            return tensor
        choose, shape, dims = random.Random(f"{self.seed} {name}"), tensor.shape, range(tensor.dim())
        for dim in choose.sample(dims, min(choose.choice((0, 0, 0, 1, 2)), len(dims))):
            tensor = tensor.narrow(dim, 0, min(1, shape[dim]))
        return in_memory_order(tensor, *choose.sample(dims, len(dims)), step=choose.randint(1, 3)).expand(shape)

    def numbers(
        self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None, is_meta: bool = False
    ) -> Tensor:
        """Normally distributed numbers that belong to seed and name."""
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
        """Integers, and others between them if integers are strided."""
        vector = torch.tensor(values, dtype=getattr(torch, self.integers))
        return torch.stack((vector, torch.full_like(vector, -(2**31))), -1)[:, 0] if "integers" in self.strided else vector

    def inputs(self, is_meta: bool = False) -> tuple[Inputs, dict[str, Any]]:
        """The tensors with those of gradients, and the other arguments."""
        arguments, dtype = self.call(is_meta), torch.promote_types(getattr(torch, self.dtype), torch.float32)
        tensors, _ = {name: arguments.pop(name, None) for name in INPUTS}, arguments.pop("return_lse")
        d_out, d_lse = self.numbers("d_out", is_meta=is_meta), self.numbers("d_lse", None, dtype, is_meta)
        return Inputs(**tensors, d_out=d_out, d_lse=d_lse), arguments

    def call(self, is_meta: bool = False) -> dict[str, Any]:
        """All arguments, by name, but for implementation; is_meta: large tensors on the device meta."""
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


def rarely(otherwise: T, *others: T, odds: int = 3) -> st.SearchStrategy[T]:
    """otherwise, or once in odds one of the others."""
    return st.integers(0, odds - 1).flatmap(lambda number: st.sampled_from(others) if number == odds - 1 else st.just(otherwise))


def edges(limit: int) -> list[int]:
    """Lengths and distances at the borders of tiles, and one beside; the limit may lie before the first."""
    return [border + step for border in range(SIDE, max(limit, SIDE) + 1, SIDE) for step in (0, 1, -1)]


def lengths(limit: int) -> st.SearchStrategy[int]:
    beyond = [border + 1 for border in range(SIDE, limit, SIDE)]
    return st.one_of(
        st.sampled_from([1, 2, 3, 0, 5]), st.integers(0, limit), st.sampled_from(edges(limit)), st.sampled_from(beyond)
    )


@st.composite
def tables(draw: st.DrawFn, sample: Sample) -> dict[str, Any]:
    """Tables and what their rows stand for."""
    pairs = itertools.combinations(TABLES, 2)
    names = draw(st.sampled_from([*((name,) for name in TABLES), *pairs, TABLES[:3], TABLES, TABLES]))
    given, window = sample.query_offset, sample.window_size
    offsets = (given if isinstance(given, tuple) else (given,)) or (0,)
    right = 0 if sample.is_causal else window[1]
    low, high = -max(sample.longest(0) - 1, 0) - max(offsets), max(sample.longest(1) - 1, 0) - min(offsets)
    low, high = max(low, -window[0]) if window[0] >= 0 else low, min(high, right) if right >= 0 else high
    low, high = min(low, high), max(low, high)
    more = draw(st.integers(0, 20))
    covers = high - low < LARGEST_TABLE and max(-low, high) < FAR - 9
    kind = draw(st.sampled_from(["centred", "any", "one row", "beside", "far", *["borders"] * 4, *["covers"] * 3 * covers]))
    outside = draw(st.sampled_from(["clamp", "zero", "error"] if kind == "covers" else ["clamp", "zero"]))
    if kind == "centred":
        first, last = -more, more
    elif kind == "any":
        first = draw(st.integers(low - 3, high + 3))
        last = first + draw(st.integers(0, min(high - low + 6, LARGEST_TABLE)))
    elif kind == "one row":
        first = last = draw(st.integers(low - 1, high + 1))
    elif kind == "beside":
        first, last = draw(st.sampled_from([(low - 4 - more, low - more % 5), (high + more % 5, high + 4 + more)]))
    elif kind == "far":
        first, last = draw(st.sampled_from([(-FAR, -FAR + more), (FAR - more, FAR)]))
    elif kind == "borders":
        # A pair of tiles, or the last that a window shows, is just within the table or just beyond it; or rows are whole tiles.
        step = st.sampled_from([-1, 0, 1, *edges(48)])
        ends = (draw(st.sampled_from(offsets)), *(end for end in (window[0], right) if end >= 0))
        first = -draw(step) - draw(st.sampled_from([ends[0], 0, *ends[1:]]))
        last = draw(step) + draw(st.sampled_from([-ends[0], first, first - 1, *ends[1:]]))
        first, last = min(first, last), min(max(first, last), min(first, last) + LARGEST_TABLE)
    else:
        first, last = low - more % 4, high + more // 4 % 4
    first, last = max(first, -FAR), min(last, FAR)
    first, last = (first, last) if -FAR <= first <= last <= FAR else (0, more)
    return {
        "tables": names,
        "per_head": tuple(name for name in names if draw(st.booleans())),
        "positions": (first, last, outside),
        "default_positions": first == -last and outside == "clamp" and draw(st.booleans()),
        "float32_bias": "rel_bias" in names and draw(st.booleans()),
        "rel_scale": draw(rarely(None, 1.0, 0.0, -0.4, 0.2, 3.0)) if {"rel_key", "rel_p2c"} & set(names) else None,
        "rel_width": draw(rarely(None, 1, 3, 16, 24, 7)) if "rel_key" in names else None,
    }


class Limits(NamedTuple):
    """What is drawn, the simplest first."""

    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    longest: int
    """Queries and keys of a sequence."""
    farthest: int
    """Offsets and ends of windows."""
    counts: tuple[int, ...]
    """Sequences, and heads of the key."""
    is_slow: bool
    """Only one of them, and the group of heads that share a key, is more than one."""


ANY = Limits(("float64", "float32", "float16", "bfloat16"), (1, 2, 3, 8, 5, 16, 17, 33, 64), 70, 70, (1, 2, 1, 2, 3, 0), False)
OF_KERNELS = Limits(("float32", "float16"), (1, 8, 16, 3, 20, 33), 48, 20, (1, 1, 2), True)


def compiled(dtype: torch.dtype) -> Limits:
    """Calls of compiled kernels."""
    return Limits((str(dtype).removeprefix("torch."),), (16, 40, 64, 128), 200, 200, (1, 2), False)


@st.composite
def sizes(draw: st.DrawFn, limits: Limits, is_packed: bool | None) -> dict[str, Any]:
    """Sequences, heads and widths."""
    width, length, same = st.sampled_from(limits.widths), lengths(limits.longest), draw(rarely(False, True, odds=8))
    count = draw(st.sampled_from(limits.counts))
    key_heads = draw(st.sampled_from((1,) if limits.is_slow and count > 1 else limits.counts))
    alone = same or (limits.is_slow and max(count, key_heads) > 1)
    group = 1 if alone else draw(rarely(1, 2, 3, odds=4 if limits.is_slow else 2))
    chosen: dict[str, Any] = {"width": draw(width), "same": same, "key_heads": key_heads, "group": group}
    chosen["value_width"] = chosen["width"] if same else draw(width)
    pairs = tuple(draw(st.tuples(length, length)) for _ in range(count))
    pairs = tuple((keys, keys) for _, keys in pairs) if same else pairs
    if draw(rarely(False, True)) if is_packed is None else is_packed:
        return {**chosen, "sequences": pairs, "slack": draw(rarely(0, 1, 5, 9))}
    queries, keys = pairs[0] if pairs else (5, 5)
    return {**chosen, "batch": count, "num_queries": queries, "num_keys": keys}


@st.composite
def samples(draw: st.DrawFn, limits: Limits = OF_KERNELS if INTERPRETED else ANY, is_packed: bool | None = None) -> Sample:
    """Any valid call; is_packed: packed or not, None: either."""
    # The seed first, because hypothesis draws the first choice of a run until it is not that of the run's simplest sample.
    fields: dict[str, Any] = {"seed": draw(st.integers(0, 2**20)), "blocks": draw(st.integers(0, 15))}
    fields |= {"dtype": draw(st.sampled_from(limits.dtypes)), **draw(sizes(limits, is_packed))}
    sample = Sample(**fields)
    count, heads = len(sample.sizes), sample.key_heads * sample.group

    distance = lengths(limits.farthest)
    offset = st.one_of(st.sampled_from([0, sample.longest(1) - sample.longest(0), 1, -1]), distance, distance.map(lambda d: -d))
    offset = draw(rarely(st.just(0), *[offset] * 9, st.sampled_from([FAR, -FAR]), odds=2))
    fields["query_offset"] = draw(st.tuples(*[offset] * count)) if draw(rarely(False, True)) else draw(offset)
    given = fields["query_offset"]
    some = draw(st.sampled_from((given if isinstance(given, tuple) else (given,)) or (0,)))
    if draw(st.integers(0, 2)):
        # Most end where a tile does, or one beside it, as queries see it that are shifted by the offset.
        near = [[max(border + step + sign * some % SIDE, 0) for step in (1, 0, -1) for border in (0, SIDE)] for sign in (1, -1)]
        ends = (st.sampled_from(each) | st.sampled_from(each) | distance | st.sampled_from([-1, 0, 1, FAR]) for each in near)
        fields["window_size"] = draw(st.tuples(*ends))
    fields["is_causal"] = draw(rarely(False, True))
    if draw(st.integers(0, 4)):
        fields |= draw(tables(Sample(**fields)))

    if sample.sequences is None and draw(rarely(False, True)):
        full = (sample.batch, heads, sample.num_queries, sample.num_keys)
        shape = tuple(size if draw(st.booleans()) else 1 for size in full)
        ones = next((dim for dim, size in enumerate(shape) if size != 1), len(shape))
        fields["mask_shape"] = shape[draw(st.integers(0, ones)) :]
        fields["mask"] = draw(st.sampled_from(["bool", "float32", fields["dtype"]]))
        fields["mask_low"] = draw(st.sampled_from(["-inf", "finfo.min", "-1e4"]))
    if sample.sequences is None and draw(rarely(False, True)):
        length = st.sampled_from([sample.num_keys, 0]) | st.integers(0, sample.num_keys)
        fields["key_lengths"] = draw(st.tuples(*[length] * sample.batch))
    fields["integers"] = draw(st.sampled_from(["int64", "int32"]))
    fields["dropout_p"] = draw(rarely(0.0, 0.5, 0.1, 0.9, 0.3, 1.0))
    fields["scale"] = draw(rarely(None, 1.0, 0.0, -0.3, 0.05, 0.0, 1e-4, -1e-5, 2e-3, odds=2))
    fields["softcap"] = draw(rarely(None, 5.0, 0.5, 50.0, odds=4))
    fields["return_lse"] = draw(st.booleans())
    fields["sharp"] = draw(rarely(False, True, odds=4))
    fields["cotangents"] = draw(st.sampled_from(["both", "out", "lse"])) if fields["return_lse"] else "both"
    fields["mode"] = draw(rarely("grad", "no_grad", "inference_mode", odds=10))
    fields["default_dtype"] = draw(rarely("float32", "float64", "float16", odds=6))
    fields["spoilt"] = draw(rarely(None, "nan", "nan", "inf", odds=2))
    if limits.is_slow:
        fields["round_terms"] = draw(rarely(False, True, odds=2))
        fields["workspace"] = draw(rarely(None, 0, 4000, 20000, odds=2))
    names = list(Sample(**fields).shapes)
    inputs = [name for name in names if name in INPUTS]
    if not draw(st.integers(0, 4)):
        wanted = set(draw(st.lists(st.sampled_from(inputs), unique=True)))
        wanted |= {"query", "key", "value"} if sample.same and wanted & {"query", "key", "value"} else set()
        fields["requires_grad"] = tuple(name for name in INPUTS if name in wanted)
    fields["strided"] = tuple(name for name in [*names, "attn_mask", "integers"] if draw(rarely(False, True, odds=4)))
    return Sample(**fields)


EVERY = list(HealthCheck)
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=EVERY)
two_values = settings(database=None, deadline=None, max_examples=2, phases=(Phase.generate,), suppress_health_check=EVERY)
"""A run with the simplest value and one other: five of six further ones repeat parts of those before."""


def explore(strategy: st.SearchStrategy[T], body: Callable[[T], None], seeds: Iterable[int], shrinks: bool = False) -> None:
    """The body with one value of each seed, and once with the simplest; a failure is shrunk if that is wanted: it takes long."""
    settings_of_run = settings(two_values, phases=(Phase.generate, Phase.shrink)) if shrinks else two_values
    passed: set[T] = set()

    def once(value: T) -> None:
        if value not in passed:
            body(value)
            passed.add(value)

    for number in seeds:
        seed(number)(settings_of_run(given(strategy)(once)))()


def drawn(number: int, limits: Limits, is_packed: bool) -> Sample:
    """One call, which has all results and gradients."""
    found: list[Sample] = []
    explore(samples(limits, is_packed), found.append, [number])
    plain = {"same": False, "cotangents": "both", "mode": "grad", "return_lse": True, "requires_grad": INPUTS}
    return dataclasses.replace(found[-1], **plain, spoilt=None, default_dtype="float32")  # type: ignore[arg-type]

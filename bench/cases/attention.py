"""Attention calls to measure, compile and check, in named groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from triton_relattn import RelativePositions, fused_relative_attention, tables, testing
from triton_relattn.testing import Inputs

CLIPPED = 129  # rows: distances up to 64, as in Shaw's and the Conformer's clipped variants
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
OPERANDS = ("query", "key", "value")


@dataclass(frozen=True)
class Case:
    """One call: ``batch`` sequences of ``length`` queries and keys, ``heads`` heads, and its relative terms.

    Attributes:
        rows: rows of the tables; None: one for every visible distance.
        key_heads: None: as many as heads.
        rel_dim: width of a rel_query of its own; None: the query serves.
        num_queries: queries at the end of a sequence of ``length`` keys; None: as many as keys.
        terms: the tables, by the names of arguments: rel_key, rel_value, rel_p2c, rel_bias (always one row per head).
        per_head: whether tables of vectors differ between heads.
        extent: first and last distance of the tables, where rows do not tell.
        is_alibi: the bias is ALiBi's, in float32 and not learned.
        padding: length of each sequence's keys, as a share of length; empty: no padding.
        group: the name of its group in GROUPS.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool = False
    rows: int | None = None
    dtype: str = "bf16"
    key_heads: int | None = None
    rel_dim: int | None = None
    outside: str = "clamp"
    num_queries: int | None = None
    terms: tuple[str, ...] = ("rel_key",)
    per_head: bool = False
    extent: tuple[int, int] | None = None
    window: tuple[int, int] | None = None
    padding: tuple[float, ...] = ()
    is_alibi: bool = False
    group: str = ""

    def __str__(self) -> str:
        heads = f"h{self.heads}" if self.key_heads is None else f"h{self.heads}:{self.key_heads}"
        length = f"n{self.length}" if self.num_queries is None else f"n{self.num_queries}:{self.length}"
        parts = [f"b{self.batch} {heads} {length} d{self.head_dim}"]
        parts += [f"dr{self.rel_dim}"] * (self.rel_dim is not None)
        if self.terms:
            parts.append("full" if self.rows is None and self.extent is None else f"r{self.num_rows}")
            parts += ["zero"] * (self.outside == "zero") + ["per head"] * self.per_head
            parts += [self.name_of(name) for name in self.terms if name != "rel_key"]
        else:
            parts.append("no table")
        parts += ["causal"] * self.is_causal + [f"window {self.window}"] * (self.window is not None)
        parts += ["padded"] * bool(self.padding)
        return " ".join([*parts, self.dtype])

    def name_of(self, term: str) -> str:
        """The short name of a table."""
        return "alibi" if self.is_alibi else term.removeprefix("rel_")

    @property
    def positions(self) -> RelativePositions:
        """The distances of the tables' rows."""
        if self.extent is not None:
            return RelativePositions(*self.extent, "zero" if self.outside == "zero" else "clamp")
        if self.outside == "zero" or (self.is_causal and self.rows is None):
            return RelativePositions(1 - self.num_rows, 0, "zero" if self.outside == "zero" else "clamp")
        return RelativePositions.centred(self.num_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the tables."""
        if self.extent is not None:
            return self.extent[1] - self.extent[0] + 1
        return self.rows or (self.length if self.is_causal else 2 * self.length - 1)

    @property
    def is_plain(self) -> bool:
        """Whether every baseline computes it: one shared rel_key, clipped, all queries, heads not grouped."""
        common = replace(self, batch=1, heads=1, length=1, head_dim=1, is_causal=False, rows=None, dtype="bf16", group="")
        return common == Case(1, 1, 1, 1)

    def without_table(self) -> Case:
        """The case that plain attention sees."""
        return replace(self, terms=(), rows=None, rel_dim=None, outside="clamp", per_head=False, extent=None, is_alibi=False)

    def resized(self, length: int, **changes: Any) -> Case:
        return replace(self, length=length, **changes)

    def columns(self) -> dict[str, Any]:
        """The columns of a row of results that describe the case."""
        rows = "none" if not self.terms else "full" if self.rows is None else f"{self.outside} {self.rows}"
        return {
            "group": self.group,
            "case": str(self),
            "batch": self.batch,
            "heads": self.heads,
            "key_heads": self.key_heads or self.heads,
            "seqlen": self.length,
            "head_dim": self.head_dim,
            "rel_dim": self.rel_dim or self.head_dim,
            "table": " ".join([rows, *(self.name_of(name) for name in self.terms if name != "rel_key")]),
            "is_causal": self.is_causal,
            "dtype": self.dtype,
        }

    def flops(self, direction: str) -> tuple[float, float]:
        """As FlashAttention counts them (4 B H N^2 D, half if causal, 2.5 times that backward), and with the tables' products."""
        pairs = self.batch * self.heads * (self.num_queries or self.length) * self.length / (2 if self.is_causal else 1)
        widths = {"rel_key": self.rel_dim or self.head_dim, "rel_p2c": self.head_dim, "rel_value": self.head_dim}
        per_pair = sum(2.0 * min(1.0, self.num_rows / self.length) * widths.get(name, 0) for name in self.terms)
        factors = {"forward": (1.0, 1.0), "backward": (2.5, 3.0), "forward+backward": (3.5, 4.0)}
        plain, with_tables = factors[direction]
        return plain * 4 * pairs * self.head_dim, pairs * (plain * 4 * self.head_dim + with_tables * per_pair)

    def make(self, draw: Callable[..., torch.Tensor]) -> Inputs:
        """The tensors of the call, each drawn from its shape."""
        queries = (self.batch, self.heads, self.num_queries or self.length)
        keys = (self.batch, self.key_heads or self.heads, self.length)
        rel_dim = self.rel_dim or self.head_dim
        query, key, value = draw(*queries, self.head_dim), draw(*keys, self.head_dim), draw(*keys, self.head_dim)
        d_out, d_lse = draw(*queries, self.head_dim), draw(*queries)
        rows = (*(self.heads,) * self.per_head, self.num_rows)
        shapes = {"rel_key": (*rows, rel_dim), "rel_value": (*rows, self.head_dim), "rel_p2c": (*rows, self.head_dim)}
        shapes["rel_bias"] = (self.heads, self.num_rows)
        drawn = {"rel_key": None, **{name: draw(*shapes[name]) for name in self.terms}}
        if self.rel_dim is not None and self.terms:
            drawn["rel_query"] = draw(*queries, self.rel_dim)
        if self.is_alibi:
            slopes = tables.alibi_slopes(self.heads, device=query.device)
            drawn["rel_bias"] = tables.alibi_bias(slopes, self.positions.first, self.positions.last)
        return Inputs(query, key, value, d_out=d_out, d_lse=d_lse.to(torch.promote_types(d_lse.dtype, torch.float32)), **drawn)

    def inputs(self, device: str, sharp: bool = False) -> Inputs:
        """Normally distributed tensors, always the same. sharp: attention looks at few keys, as of testing.make_inputs."""
        generator = torch.Generator(device).manual_seed(0)
        inputs = self.make(partial(torch.randn, generator=generator, device=device, dtype=DTYPES[self.dtype]))
        if not sharp:
            return inputs
        rel_query = None if inputs.rel_query is None else inputs.rel_query * testing.SHARP_FACTOR
        inputs = inputs._replace(query=inputs.query * testing.SHARP_FACTOR, rel_query=rel_query)
        return inputs._replace(value=inputs.value + testing.SHARP_SHIFT, d_out=inputs.d_out + testing.SHARP_SHIFT)

    def empty(self, device: str = "cpu") -> Inputs:
        """Tensors of which only the shapes matter: they take no memory until they are touched."""
        return self.make(lambda *shape: torch.empty(shape, dtype=DTYPES[self.dtype], device=device))

    def tables(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """rel_query and the tables, by the names of arguments."""
        names = (*self.terms, "rel_query") if self.terms else ()
        return {name: tensor for name in names if (tensor := getattr(inputs, name)) is not None}

    def learned(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """What has a gradient, by the names of arguments: operands, and the tables but for ALiBi's."""
        tables = {} if self.is_alibi else self.tables(inputs)
        return {name: getattr(inputs, name) for name in OPERANDS} | tables

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """The other arguments of fused_relative_attention."""
        options: dict[str, Any] = {"is_causal": self.is_causal, "enable_gqa": self.key_heads is not None}
        options["query_offset"] = self.length - (self.num_queries or self.length)
        if self.window is not None:
            options["window_size"] = self.window
        if self.padding:
            lengths = [int(share * self.length) for share in self.padding]
            options["key_lengths"] = torch.tensor(lengths, dtype=torch.int32, device=inputs.query.device)
        return options | ({"positions": self.positions} if self.terms else {})

    def attend(self, inputs: Inputs, implementation: str | None = None) -> torch.Tensor:
        """The output of fused_relative_attention."""
        arguments: dict[str, Any] = self.tables(inputs) | self.options(inputs)
        out: torch.Tensor = fused_relative_attention(*inputs[:3], **arguments, implementation=implementation)
        return out

    def resolved(self, inputs: Inputs) -> tuple[Any, Any]:
        """AttentionTensors and AttentionSpec, as the launchers of the kernels get the call."""
        from triton_relattn._core import validation
        from triton_relattn._core.arguments import Arguments

        arguments: dict[str, Any] = self.tables(inputs) | self.options(inputs)
        return validation.resolve(Arguments(*inputs[:3], **arguments))


def _terms() -> Iterator[Case]:
    """One call with every kind of term, of 16k tokens of width 2048: all keys seen, then causal. 257 rows are a T5's bias as
    people run it, clamped."""
    for is_causal in (False, True):
        call = Case(4, 32, 4096, 64, is_causal)
        bias = replace(call, terms=BIAS)
        yield from (call, call.without_table(), replace(call, rows=CLIPPED))
        yield from (replace(bias, rows=257), replace(bias, is_alibi=True), bias)


def _long() -> Iterator[Case]:
    """16k tokens of width 2048 in sequences of every length, the most informative lengths first."""
    for length in (4096, 1024, 16384, 2048, 512, 8192):
        for head_dim, is_causal in ((64, False), (128, True), (128, False), (64, True)):
            for rows in (None, CLIPPED):
                yield Case(16384 // length, 2048 // head_dim, length, head_dim, is_causal, rows)


BIAS, P2C = ("rel_bias",), ("rel_key", "rel_p2c")
SHORT = (
    *((batch, 4, length, 32) for batch, length in ((2048, 5), (512, 16), (256, 32), (64, 64), (32, 128))),
    *((batch, 4, length, 32) for batch, length in ((8, 256), (4, 512), (1, 512))),
    *((32, 8, 128, 64), (16, 12, 128, 64), (8, 12, 250, 64), (16, 2, 150, 96), (16, 4, 200, 64)),
)
"""Batch, heads, length and width: many small sequences, and batches of T5, MPNet, WavLM, VITS and a Conformer."""
INKLING = Case(1, 64, 8192, 128, True, 1024, key_heads=8, rel_dim=16, outside="zero")
TRANSFORMER_XL: dict[str, Any] = {"terms": ("rel_key", "rel_bias"), "per_head": True}

GROUPS: dict[str, Sequence[Case]] = {
    "cpu": [Case(1, 8, 512 << k, 64, dtype="fp32") for k in range(6)],
    "cpu_bias": [Case(1, 8, 512 << k, 64, dtype="fp32", terms=BIAS) for k in range(4)],
    "terms": list(_terms()),
    "audio": [Case(1, 8, 45_001, 128, **TRANSFORMER_XL)],
    "conformer": [Case(32, 8, 500, 128, **TRANSFORMER_XL)],
    "long": list(_long()),
    "speech": [Case(32, 8, length, head_dim) for length in (500, 1500, 1000, 200) for head_dim in (64, 128)],
    "short": [Case(*sizes, dtype="fp32") for sizes in SHORT],
    "cpu_bf16": [Case(batch, 8, length, 64) for batch, length in ((1, 512), (1, 1024), (1, 4096), (8, 512), (32, 128))],
    "short_bf16": [Case(*sizes) for sizes in SHORT],
    "decode": [Case(batch, 8, 1024 << k, 64, dtype="fp32", num_queries=1) for batch in (1, 16) for k in (0, 2)],
    "memory": [Case(1, 8, 512 << k, 64) for k in range(8)],
    "deberta": [
        *(Case(2, 12, 8192, 64, rows=rows) for rows in (None, 511)),
        *(Case(16384 // n, 12, n, 64, rows=rows, terms=P2C) for n, rows in ((512, None), (2048, 1047), (8192, 1047))),
    ],
    "t5": [Case(16384 // length, 32, length, 64, terms=BIAS) for length in (2048, 512, 1024, 4096)],
    "inkling": [replace(INKLING, window=(511, -1)), INKLING],
    "dense": [
        *(Case(2, 32, 4096, 64, terms=terms) for terms in (("rel_key",), BIAS)),
        *(Case(16, 32, 1024, 64, terms=terms) for terms in (("rel_key",), BIAS)),
        Case(16, 16, 1024, 128, True),
    ],
    "flex": [case if case.rows or case.terms != ("rel_key",) else replace(case, batch=2) for case in _terms()],
    "small": [Case(1, 2, length, 16, is_causal, rows, "fp32") for length, is_causal, rows in ((64, False, None), (96, True, 9))],
}
"""cpu, cpu_bias: one layer in float32, with a full table, and with a bias alone, as in T5.
terms: 16k tokens, with every kind of term.
audio, conformer: an hour of speech, at 12.5 frames a second, and a batch of utterances of 40 seconds, as Parakeet has them.
long, speech: 16k tokens, and batches of short utterances.
short: short sequences in batches. cpu_bf16, short_bf16: the same in bfloat16, for processors that are fast at it.
decode: one query and a cache of keys. memory: one layer, ever longer.
deberta, inkling: the sizes that others report; DeBERTa v3 base, whose buckets tell distances up to 523 apart. Of Inkling, most
layers have a window.
t5: a bias alone.
dense: of 4,096 positions only two sequences, since dense tensors of four have 2^31 elements, which some backends refuse.
flex: terms, but of a full table two sequences, since FlexAttention captures Q E^T, for which the same holds.
small: for trying things out."""


def default_groups(device: str) -> list[str]:
    return ["cpu"] if device == "cpu" else ["long", "speech", "deberta", "inkling"]


def choose(groups: Sequence[str], lengths: Sequence[int] = ()) -> list[Case]:
    """The cases of some groups, those of the given lengths only if there are any. Raises KeyError."""
    cases = [replace(case, group=group) for group in groups for case in GROUPS[group]]
    return [case for case in cases if not lengths or case.length in lengths]


def gpu_cases() -> list[Case]:
    """What is timed on a GPU, the most informative calls first, since the time may be over before the last."""
    long, speech = choose(["long"]), choose(["speech"], (200, 500))
    cases = [*choose(["terms", "audio", "conformer"]), *choose(["inkling"])[:1], *choose(["deberta"])[-1:], *speech[:2]]
    cases += [*long[:8], *choose(["t5"]), *long[8:16], *speech[2:], *long[16:], *choose(["deberta", "inkling"])]
    return list({str(case): case for case in cases}.values())  # each at its first place, in its last group, which may be a curve

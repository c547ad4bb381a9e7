"""Calls to measure: sizes and kinds of attention, in named groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from triton_relattn import RelativePositions
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import AttentionSpec, AttentionTensors

CLIPPED = 129  # rows: distances up to 64, as in Shaw's and the Conformer's clipped variants
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class CaseTensors(NamedTuple):
    """Tensors that a method is called with."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    table: torch.Tensor
    rel_query: torch.Tensor | None = None
    p2c: torch.Tensor | None = None
    """A second table, which meets the keys."""

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> CaseTensors:
        return CaseTensors._make(None if tensor is None else function(tensor) for tensor in self)


@dataclass(frozen=True)
class Case:
    """One call: ``batch`` sequences of ``length`` queries and keys, ``heads`` heads, one table that the heads share."""

    batch: int
    heads: int
    length: int
    head_dim: int
    is_causal: bool = False
    rows: int | None = None
    """Rows of the table; None: one for every visible pair."""
    dtype: str = "bf16"
    key_heads: int | None = None
    """None: as many as heads."""
    rel_dim: int | None = None
    """Width of a query of its own for the table; None: the query serves."""
    outside: str = "clamp"
    num_queries: int | None = None
    """Queries at the end of a sequence of so many keys; None: as many as keys."""
    p2c: bool = False
    """Whether a second table of as many rows meets the keys."""
    bias: bool = False
    """Whether the table is a number for each head and distance, which is added to the scores, as in T5."""
    group: str = ""
    """The name of its group in GROUPS."""

    def __str__(self) -> str:
        heads = f"h{self.heads}" if self.key_heads is None else f"h{self.heads}:{self.key_heads}"
        rows = "full" if self.rows is None else f"r{self.rows}" + " zero" * (self.outside == "zero")
        own_query = "" if self.rel_dim is None else f" dr{self.rel_dim}"
        p2c = " p2c" * self.p2c + " bias" * self.bias
        length = f"n{self.length}" if self.num_queries is None else f"n{self.num_queries}:{self.length}"
        return f"b{self.batch} {heads} {length} d{self.head_dim}{own_query} {rows}{p2c}{' causal' * self.is_causal} {self.dtype}"

    @property
    def positions(self) -> RelativePositions:
        if self.outside == "zero" or (self.is_causal and self.rows is None):
            return RelativePositions(1 - self.num_rows, 0, "zero" if self.outside == "zero" else "clamp")
        return RelativePositions.centred(self.num_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.rows or (self.length if self.is_causal else 2 * self.length - 1)

    @property
    def is_plain(self) -> bool:
        """Whether it is what every baseline computes: no grouped heads, the query for the one table, clipping, all queries."""
        odd = (self.key_heads, self.rel_dim, self.num_queries, self.outside, self.p2c, self.bias)
        return odd == (None, None, None, "clamp", False, False)

    def without_table(self) -> Case:
        """Return the case that plain attention sees."""
        return replace(self, rows=None, rel_dim=None, outside="clamp", p2c=False, bias=False)

    def resized(self, length: int, **changes: Any) -> Case:
        return replace(self, length=length, **changes)

    def columns(self) -> dict[str, Any]:
        """Return the columns of a row of results that describe the case."""
        return {
            "group": self.group,
            "case": str(self),
            "batch": self.batch,
            "heads": self.heads,
            "key_heads": self.key_heads or self.heads,
            "seqlen": self.length,
            "head_dim": self.head_dim,
            "rel_dim": self.rel_dim or self.head_dim,
            "table": ("full" if self.rows is None else f"{self.outside} {self.rows}") + " p2c" * self.p2c + " bias" * self.bias,
            "is_causal": self.is_causal,
            "dtype": self.dtype,
        }

    def flops(self, direction: str, has_table: bool) -> tuple[float, float]:
        """As FlashAttention counts them (4 B H N^2 D, half if causal, 2.5 times that backward), and with the table's products."""
        pairs = self.batch * self.heads * (self.num_queries or self.length) * self.length / (2 if self.is_causal else 1)
        width = 0 if self.bias else (self.rel_dim or self.head_dim) + self.head_dim * self.p2c
        term = 2.0 * min(self.length, self.num_rows) / self.length * width * has_table
        of_direction = {"forward": (1.0, 1.0), "backward": (2.5, 3.0), "forward+backward": (3.5, 4.0)}
        plain, of_table = of_direction[direction]
        return plain * 4 * pairs * self.head_dim, pairs * (plain * 4 * self.head_dim + of_table * term)

    def inputs(self, device: str) -> tuple[CaseTensors, torch.Tensor]:
        """Normally distributed tensors that want gradients, and the gradient of the output. Always the same."""
        generator = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=DTYPES[self.dtype]).requires_grad_()

        inputs = self.tensors(normal)
        return inputs, normal(*inputs.query.shape).detach()

    def tensors(self, make: Callable[..., torch.Tensor]) -> CaseTensors:
        """The inputs, each made from its shape."""
        queries = (self.batch, self.heads, self.num_queries or self.length)
        keys = (self.batch, self.key_heads or self.heads, self.length)
        query, key, value = make(*queries, self.head_dim), make(*keys, self.head_dim), make(*keys, self.head_dim)
        rel_query = None if self.rel_dim is None else make(*queries, self.rel_dim)
        p2c = make(self.num_rows, self.head_dim) if self.p2c else None
        sizes = (self.heads, self.num_rows) if self.bias else (self.num_rows, self.rel_dim or self.head_dim)
        return CaseTensors(query, key, value, make(*sizes), rel_query, p2c)

    def terms(self, inputs: CaseTensors, has_table: bool = True) -> dict[str, Any]:
        """Return the arguments of fused_relative_attention besides query, key and value."""
        options: dict[str, Any] = {"is_causal": self.is_causal, "enable_gqa": self.key_heads is not None}
        options["query_offset"] = self.length - (self.num_queries or self.length)
        if has_table and self.bias:
            options |= {"rel_bias": inputs.table, "positions": self.positions}
        elif has_table:
            options |= {"rel_key": inputs.table, "rel_query": inputs.rel_query, "positions": self.positions}
            options["rel_p2c"] = inputs.p2c
        return options

    def resolved(self, inputs: CaseTensors, has_table: bool = True) -> tuple[AttentionTensors, AttentionSpec]:
        """The same call as the launchers of the kernels see it, without gradients."""
        inputs = inputs.map(torch.Tensor.detach)
        return validation.resolve(Arguments(*inputs[:3], **self.terms(inputs, has_table)))

    def empty(self, device: str = "cpu") -> CaseTensors:
        """Tensors that nothing is known of but their shapes: they take no memory until they are touched."""
        return self.tensors(partial(torch.empty, dtype=DTYPES[self.dtype], device=device))


def _long() -> Iterator[Case]:
    """16k tokens of width 2048 in sequences of every length, the most telling lengths first."""
    for length in (4096, 1024, 16384, 2048, 512, 8192):
        for head_dim, is_causal in ((64, False), (128, True), (128, False), (64, True)):
            for rows in (None, CLIPPED):
                yield Case(16384 // length, 2048 // head_dim, length, head_dim, is_causal, rows)


SHORT = (
    *((batch, 4, length, 32) for batch, length in ((2048, 5), (512, 16), (256, 32), (64, 64), (32, 128))),
    *((batch, 4, length, 32) for batch, length in ((8, 256), (4, 512), (1, 512))),
    *((32, 8, 128, 64), (16, 12, 128, 64), (8, 12, 250, 64), (16, 2, 150, 96), (16, 4, 200, 64)),
)
"""Batch, heads, length and width: of small ones many; and batches of T5, MPNet, WavLM, VITS and a Conformer."""

GROUPS: dict[str, Sequence[Case]] = {
    "cpu": [Case(1, 8, 512 << k, 64, dtype="fp32") for k in range(6)],
    "cpu_bias": [Case(1, 8, 512 << k, 64, dtype="fp32", bias=True) for k in range(4)],
    "long": list(_long()),
    "speech": [Case(32, 8, length, head_dim) for length in (500, 1500, 1000, 200) for head_dim in (64, 128)],
    "short": [Case(*sizes, dtype="fp32") for sizes in SHORT],
    "cpu_bf16": [Case(batch, 8, length, 64) for batch, length in ((1, 512), (1, 1024), (1, 4096), (8, 512), (32, 128))],
    "short_bf16": [Case(*sizes) for sizes in SHORT],
    "decode": [Case(batch, 8, 1024 << k, 64, dtype="fp32", num_queries=1) for batch in (1, 16) for k in (0, 2)],
    "memory": [Case(1, 8, 512 << k, 64) for k in range(8)],
    "deberta": [
        *(Case(2, 12, 8192, 64, rows=rows) for rows in (None, 511)),
        *(Case(16384 // n, 12, n, 64, rows=rows, p2c=True) for n, rows in ((512, None), (2048, 1047), (8192, 1047))),
    ],
    "t5": [Case(16384 // length, 32, length, 64, bias=True) for length in (2048, 512, 1024, 4096)],
    "inkling": [Case(1, 64, 8192, 128, True, 1024, key_heads=8, rel_dim=16, outside="zero")],
    "small": [Case(1, 2, length, 16, is_causal, rows, "fp32") for length, is_causal, rows in ((64, False, None), (96, True, 9))],
}
"""cpu, cpu_bias: one layer in float32, with a full table, and with a bias alone, as in T5.
long, speech: 16k tokens, and batches of short utterances.
short: short sequences in batches. cpu_bf16, short_bf16: the same in bfloat16, for processors that are fast at it.
decode: one query and a cache of keys. memory: one layer, ever longer.
deberta, inkling: the sizes that others report; DeBERTa v3 base, whose buckets tell distances up to 523 apart.
t5: a bias alone.
small: for trying things out."""


def default_groups(device: str) -> list[str]:
    return ["cpu"] if device == "cpu" else ["long", "speech", "deberta", "inkling"]


def choose(groups: Sequence[str], lengths: Sequence[int] = ()) -> list[Case]:
    """The cases of some groups, those of the given lengths only if there are any. Raises KeyError."""
    cases = [replace(case, group=group) for group in groups for case in GROUPS[group]]
    return [case for case in cases if not lengths or case.length in lengths]

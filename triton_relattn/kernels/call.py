"""The arguments that every launch passes to its kernel, put together once."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from .._core.dropout import keep_scale, largest_dropped
from .._core.spec import TABLES, AttentionSpec, AttentionTensors
from .config import architectures, selection
from .config.selection import padded_width
from .config.tile_config import MAX_BLOCK, TileConfig
from .launching import launch, specialization
from .operands import Extent, Strided, contiguous, extent, needs_wide_index, per_head, strided

SMALLEST_SCALE = 2.0**-60
LARGEST_TERM = 2000.0  # of a logit, that float16 must hold if terms are rounded; with the usual scale widths up to 1,024 do
MAX_QUERIES = 8 * MAX_BLOCK  # between the first and the last of a tile, whose queries need not be neighbours; see stored.py

# No field of a group of arguments may have the name of an attribute of Triton's own tuple: above all not values or type. Groups
# of tensors and numbers are such tuples in kernels. Up to Triton 3.7 a group of constants was the Python tuple itself there.
# Since 3.8 it is Triton's, too, and so is a group within a group: a field TileConstants.values was then not what it held, but
# the list of all fields. tests/compile/test_groups.py looks at every group.


class Sequences(NamedTuple):
    """The lengths, offsets and starts of the sequences of a batch; masking.locate reads them."""

    max_seqlen_q: int
    max_seqlen_k: int
    query_offset: int
    query_offsets: torch.Tensor | None  # instead of query_offset
    key_lengths: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None


class Scaling(NamedTuple):
    """Factors that turn products into logits. The kernels' scores are logits divided by scale."""

    base_2_scale: float  # scale / ln 2, computed in double: rounded once, and the same for all kernels
    rel_scale: float | None  # factor of p.E and k.F in a score; None: 1
    bias_scale: float
    softcap: float | None


class Operands(NamedTuple):
    """The tensors from which scores and out are computed, each with its strides; None: the call has none."""

    query: Strided | None
    key: Strided | None
    value: Strided | None
    rel_query: Strided | None
    rel_key: Strided | None
    rel_value: Strided | None
    rel_bias: Strided | None
    attn_mask: Strided | None
    rel_p2c: Strided | None
    far_keys: Strided | None = None  # (B, H, 2, Nk): terms of the keys with the end rows of rel_p2c; delta.py


class PerQuery(NamedTuple):
    """Numbers of each query, float32: the forward's statistics, and those of the delta kernel. At the end one of each key."""

    softmax_stats: Strided  # (B, H, 2, N): maximum of the scores, logarithm of the sum
    deltas: Strided  # (B, H, N)
    far_scores: Strided | None = None  # (B, H, 2, N): terms of keys beyond a clamped table, past and future
    far_values: Strided | None = None  # and those that such keys add to dP
    far_key_sums: Strided | None = None  # (B, H, 2, Nk): of the dkv kernel, sums of dS over the queries beyond a clamped rel_p2c


class Common(NamedTuple):
    """Arguments of all kernels besides numbers and constants: sequences, visible keys, dropout, scales."""

    sequences: Sequences
    window: tuple[int | None, int | None]
    dropout: Dropout
    scaling: Scaling


class Shape(NamedTuple):
    """Sizes of a call that a kernel is compiled for."""

    group: int  # heads of the query that share one of the key
    head_dim: int
    value_dim: int
    rel_dim: int
    block_d: int  # the same widths, padded
    block_dv: int
    block_dr: int
    wide_index: bool  # offsets within a matrix have 64 bits


class TileConstants(NamedTuple):
    """Constants by which a kernel computes a tile and its products with a table: its TileConfig, and properties of the call."""

    block_m: int
    block_n: int
    rotation: str = "gather"
    warps: int = 4
    round_terms: bool = False  # terms are rounded to float16 before they are added to the scores
    carry: str | None = None
    coverage: str = "full"  # see AttentionSpec.coverage; "no table"
    precision: str = "ieee"  # of products
    width: int = 0  # of rel_key
    block_width: int = 0  # width, padded
    has_matrix: bool = False  # the table has rows that vectors are multiplied with
    has_bias: bool = False  # and a bias
    has_scale: bool = False  # products with rows are multiplied by a factor other than 1
    # The same for rel_value, whose products are not rounded, as gradients may be too small for float16
    value_tile: TileConstants | None = None
    # and for rel_p2c, whose tiles are those of N keys and N queries; see key_terms.py
    key_tile: TileConstants | None = None


class Dropout(NamedTuple):
    """Arguments of dropout.keep_mask, and the factor of the probabilities that it keeps; all None without dropout. (Triton 3.6
    cannot compare a group that holds None with None, so kernels ask for the seed.)"""

    seed: torch.Tensor | None = None
    largest_dropped: int | None = None
    keep_scale: float | None = None
    origins: torch.Tensor | None = None  # (B, 1, 4): as what sequence, first head, first query and first key count


def cdiv(length: int, block: int) -> int:
    """Return how many blocks cover a length. (triton.cdiv, called by the host, takes as long as a tensor's allocation.)"""
    return -(-length // block)


def float16_holds_terms(scale: float) -> bool:
    """Return whether float16 can hold the terms of a call, which are divided by its scale.

    It must not limit a term of a logit up to LARGEST_TERM. And what is left of small terms, where float16 has no normal numbers,
    must change a logit by no more than rounding a term of 1 does. A scale of 0, for attention by position alone, fails the first.
    """
    info = torch.finfo(torch.float16)
    return LARGEST_TERM <= info.max * scale and info.smallest_normal * scale <= 1


@dataclass(frozen=True, eq=False)
class CallConstants:
    """What all calls with the same sizes, strides, dtype and scalars share, also packs of other numbers of sequences: computed
    once, by ``call_constants``, since it takes longer than the launches."""

    kind: selection.Kind
    shape: Shape
    tile: TileConstants  # without what a configuration says; see kernel_tile
    window: tuple[int | None, int | None]
    dropout: Dropout  # without tensors
    scaling: Scaling
    strides: tuple[tuple[int, ...] | None, ...]  # of Operands
    compiled: dict[Any, Any] = field(default_factory=dict)  # kernels of earlier launches; see launching.py


@functools.lru_cache(maxsize=1024)
def call_constants(
    spec: AttentionSpec,
    arch: str,
    precision: str,
    dtype: torch.dtype,
    has_one_offset: bool,
    operands: tuple[Extent, ...],
    others: tuple[Extent, ...],
) -> CallConstants:
    """Compute what does not depend on the values of tensors. operands: in the order of Operands. others: further tensors that
    kernels address by batch entry, head and row."""
    query, key, value, rel_query, rel_key, rel_value, rel_bias, _, rel_p2c = operands
    assert query is not None and key is not None and value is not None
    (_, num_heads, _, head_dim), key_heads, value_dim = query[0], key[0][1], value[0][-1]
    rel_dim = (rel_query or query)[0][-1]
    widths = head_dim, value_dim, rel_dim
    tables = dict(zip(TABLES, (rel_key, rel_value, rel_bias, rel_p2c), strict=True))
    coverage = spec.coverage(has_one_offset) if any(tables.values()) else "no table"
    if rel_value is not None:
        term_set = "rel_value"
    elif rel_p2c is not None:
        term_set = "rel_p2c"
    elif rel_query is not None:
        term_set = "narrow rel_query" if padded_width(rel_dim) < padded_width(head_dim) else "rel_query"
    elif rel_bias is not None:
        term_set = "rel_key and rel_bias" if rel_key is not None else "rel_bias"
    else:
        term_set = "none"
    kind = selection.call_kind(arch, dtype, max(widths), coverage, spec.window_right >= 0, term_set)

    # How many rows a tile's offsets go through decides whether 32 bits hold them.
    rows = [(tensor, MAX_QUERIES) for tensor in (query, rel_query, *others)] + [(key, MAX_BLOCK), (value, MAX_BLOCK)]
    rows += [(table, table[0][-2] + MAX_BLOCK) for name, table in tables.items() if table is not None and name != "rel_bias"]
    wide_index = any(tensor is not None and needs_wide_index(*tensor, most) for tensor, most in rows)
    wide_index |= num_heads * max(widths) * MAX_QUERIES >= 2**31  # of what is allocated for the results
    shape = Shape(num_heads // max(key_heads, 1), *widths, *map(padded_width, widths), wide_index)

    # Scores are logits divided by scale, so 0 is replaced by a number so small that q.k vanishes beside the other terms.
    scale = spec.scale if abs(spec.scale) > SMALLEST_SCALE else SMALLEST_SCALE
    rel_scale = spec.rel_scale / scale
    has_scale = (rel_key is not None or rel_p2c is not None) and rel_scale != 1
    scaling = Scaling(scale / math.log(2), rel_scale if has_scale else None, 1 / scale, spec.softcap)
    round_terms = architectures.rounds_terms(arch, dtype) and float16_holds_terms(scale)

    value_tile = TileConstants(
        0, 0, coverage=coverage, precision=precision, width=value_dim, block_width=shape.block_dv, has_matrix=True
    )
    key_tile = None
    if rel_p2c is not None:
        key_tile = value_tile._replace(round_terms=round_terms, width=head_dim, block_width=shape.block_d, has_scale=has_scale)
    tile = TileConstants(
        0,
        0,
        round_terms=round_terms and rel_key is not None,  # a bias alone is not rounded
        coverage=coverage,
        precision=precision,
        width=rel_dim,
        block_width=shape.block_dr,
        has_matrix=rel_key is not None,
        has_bias=rel_bias is not None,
        has_scale=has_scale and rel_key is not None,
        value_tile=value_tile,
        key_tile=key_tile,
    )

    strides = {name: None if tensor is None else tensor[1] for name, tensor in zip(Operands._fields, operands, strict=False)}
    for name in TABLES:
        strides[name] = per_head(strides[name], rank=1 if name == "rel_bias" else 2)
    window = (None if spec.window_left < 0 else spec.window_left, None if spec.window_right < 0 else spec.window_right)
    dropout = Dropout(None, largest_dropped(spec.dropout_p), keep_scale(spec.dropout_p))
    return CallConstants(kind, shape, tile, window, dropout, scaling, tuple(strides.values()))


@functools.lru_cache(maxsize=4096)
def kernel_tile(constants: CallConstants, config: TileConfig, kernel: str) -> TileConstants:
    """Return the constants that a kernel is compiled with."""
    # Kernels that read dS by relative position need the rows of a clamped table, and nothing beyond.
    coverage = "zero" if constants.tile.coverage == "clamp" and kernel in ("stored_dq", "dtable") else constants.tile.coverage
    # A loop over the keys can carry what belongs to its queries, one over the queries what belongs to its keys.
    carry, key_carry = (config.carry, None) if kernel in ("forward", "dq") else (None, config.carry)
    config_constants: dict[str, Any] = {
        "block_m": config.block_m,
        "block_n": config.block_n,
        "rotation": config.rotation,
        "warps": config.num_warps,
        "carry": carry,
        "coverage": coverage,
    }
    value_tile, key_tile = constants.tile.value_tile, constants.tile.key_tile
    assert value_tile is not None
    if key_tile is not None:
        in_registers = config.rotation != "gather" and config.block_n % (16 * config.num_warps) == 0
        rotation = "registers" if in_registers else "gather"
        key_tile = key_tile._replace(**config_constants | {"block_m": config.block_n, "rotation": rotation, "carry": key_carry})
    return constants.tile._replace(**config_constants, value_tile=value_tile._replace(**config_constants), key_tile=key_tile)


class Call:
    """One call as the launchers see it: its sizes, and the arguments that all kernels share."""

    def __init__(
        self,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        others: Iterable[torch.Tensor | None] = (),
        arch: str | None = None,
    ) -> None:
        """others: further tensors that kernels address by batch entry, head and row. arch: in place of the device's
        architecture."""
        query, key = tensors.query, tensors.key
        self.heads, self.key_heads = query.shape[1], key.shape[1]
        self.num_sequences = tensors.num_sequences
        self.arch = arch or architectures.architecture(query.device)
        self.selected: dict[str, TileConfig] = {}  # by kernel: configurations that self.tile has selected
        self.rel_query = query if tensors.rel_query is None else tensors.rel_query
        rel_bias, mask = tensors.rel_bias, tensors.attn_mask
        if rel_bias is not None and rel_bias.shape[-1] * rel_bias.stride(-1) >= 2**31:  # its rows are addressed in 32 bits
            rel_bias = rel_bias.contiguous()
        if mask is not None:
            mask = mask.expand(query.shape[0], self.heads, query.shape[2], key.shape[2])
        value, rel_key, rel_value = tensors.value, tensors.rel_key, tensors.rel_value
        operands = (query, key, value, tensors.rel_query, rel_key, rel_value, rel_bias, mask, tensors.rel_p2c)
        self.constants = call_constants(
            spec,
            self.arch,
            architectures.input_precision(query.dtype, self.arch),
            query.dtype,
            tensors.query_offsets is None,
            tuple(map(extent, operands)),
            tuple(map(extent, others)),
        )
        self.kind, self.coverage, self.shape = self.constants.kind, self.constants.kind.coverage, self.constants.shape
        self.length = max(spec.max_seqlen_q, spec.max_seqlen_k)
        pairs = zip(operands, self.constants.strides, strict=True)
        self.inputs = Operands(*[None if tensor is None else (tensor, strides) for tensor, strides in pairs])
        vectors = (tensors.query_offsets, tensors.key_lengths, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        sequences = Sequences(spec.max_seqlen_q, spec.max_seqlen_k, spec.query_offset, *map(contiguous, vectors))
        dropout = Dropout()
        if tensors.dropout_seed is not None:
            origins = None if tensors.dropout_origins is None else tensors.dropout_origins[:, :1].contiguous()
            dropout = self.constants.dropout._replace(seed=tensors.dropout_seed.contiguous(), origins=origins)
        self.common = Common(sequences, self.constants.window, dropout, self.constants.scaling)
        self.limits = {"first": spec.first, "last": spec.last}
        self.specialization: Any = None  # what Triton compiles for of inputs and common; see launching.py

    def add_far_keys(self, far_keys: torch.Tensor) -> None:
        """Give the terms of far keys to all kernels that are launched from now on; see delta.py."""
        self.inputs, self.specialization = self.inputs._replace(far_keys=strided(far_keys)), None

    def launch(self, name: str, kernel: Any, config: TileConfig, programs: tuple[int, ...], **arguments: Any) -> None:
        """Launch one of KERNELS, in so many programs, with the arguments that all kernels share. OutOfResources: a configuration
        that was asked for does not fit the GPU; one that was selected is replaced (selection.until_it_fits)."""
        options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.max_registers is not None:
            options["maxnreg"] = config.max_registers
        shared = {
            "inputs": self.inputs,
            "common": self.common,
            "num_heads": self.heads,
            "SHAPE": self.shape,
            "TILE": kernel_tile(self.constants, config, name),
            **self.limits,
        }
        if self.specialization is None:
            self.specialization = specialization(self._tensors())
        try:
            launch(kernel, programs, shared, arguments, options, self.constants.compiled, (name, config, self.specialization))
        except OutOfResources as error:
            if name not in self.selected:
                raise
            selection.take_smaller(name, self.arch, self.kind, self.selected[name], error)

    def _tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors of inputs and common. All else of these is in CallConstants, or no kernel is compiled for it."""
        sequences, dropout = self.common.sequences, self.common.dropout
        operands = (None if pair is None else pair[0] for pair in self.inputs)
        vectors = (sequences.query_offsets, sequences.key_lengths, sequences.cu_seqlens_q, sequences.cu_seqlens_k)
        return (*operands, *vectors, dropout.seed, dropout.origins)

    def tile(self, kernel: str, config: TileConfig | None = None) -> TileConfig:
        """Return the configuration for one of KERNELS: the given one, if it is valid, or else the one selected for this call."""
        if config is None:
            config = self.selected[kernel] = selection.select(kernel, self.arch, self.kind, self.length)
            return config
        if reason := config.why_invalid(self.arch, self.coverage != "no table", kernel):
            raise ValueError(f"{config} is not valid for {kernel} on {self.arch}: {reason}")
        return config

"""The arguments that every launch of a call passes to its kernel, as far as they are known before there are addresses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from .._core.dropout import keep_scale, largest_dropped
from .._core.spec import AttentionSpec, AttentionTensors
from .config import architectures, selection
from .config.selection import padded_width
from .config.tile_config import MAX_BLOCK, TileConfig
from .draft import Draft, Slot, Strided, contiguous_strides, described
from .plan import ALIGNMENT

SMALLEST_SCALE = 2.0**-60
LARGEST_TERM = 2000.0  # of a logit, that float16 must hold if terms are rounded; with the usual scale widths up to 1,024 do
MAX_QUERIES = 8 * MAX_BLOCK  # between the first and the last of a tile, whose queries need not be neighbours; see stored.py

# No field of a group of arguments may have the name of an attribute of Triton's own tuple: above all not values or type. Groups
# of tensors and numbers are such tuples in kernels. Up to Triton 3.7 a group of constants was the Python tuple itself there.
# Since 3.8 it is Triton's as well, and so is a group within a group: a field TileConstants.values was then not what it held, but
# the list of all fields. tests/compile/test_launches.py looks at every group.


class Sequences(NamedTuple):
    """The lengths, offsets and starts of the sequences of a batch; blocks.locate reads them."""

    max_seqlen_q: int
    max_seqlen_k: int
    query_offset: int
    query_offsets: Slot | None  # instead of query_offset
    key_lengths: Slot | None
    cu_seqlens_q: Slot | None
    cu_seqlens_k: Slot | None


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
    """Numbers of each query, float32: the forward's statistics, and those of the delta kernel. At the end what is not of
    queries."""

    softmax_stats: Strided  # (B, H, 2, N): maximum of the scores, logarithm of the sum
    deltas: Strided  # (B, H, N)
    far_scores: Strided | None = None  # (B, H, 2, N): terms of keys beyond a clamped table, past and future
    far_values: Strided | None = None  # and those that such keys add to dP
    end_rows: Strided | None = None  # of the dkv kernel: rel_p2c's sums, as those of bwd_dq.EndRows, from the queries beyond it


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
    """Arguments of blocks.keep_mask, and the factor of the probabilities that it keeps; all None without dropout. (Triton 3.6
    cannot compare a group that holds None with None, so kernels ask for the seed.)"""

    seed: Slot | None = None
    largest_dropped: int | None = None
    keep_scale: float | None = None
    origins: Slot | None = None  # (B, 1, 4): as what sequence, first head, first query and first key count


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


class Call:
    """One call as the launchers see it: its sizes, and the arguments that all kernels share.

    Attributes:
        conditions: by which its tiles are selected.
    """

    def __init__(
        self,
        draft: Draft,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        others: Iterable[Slot | None] = (),
        term_set: str | None = None,
    ) -> None:
        """others: further tensors that kernels address by batch entry, head and row. term_set: see selection.CONDITIONS."""
        self.draft, self.spec, self.arch = draft, spec, draft.key.surroundings.arch
        query, key, value, rel_query, rel_key, rel_value, rel_bias, rel_p2c, mask, *_ = tensors
        self.heads, self.key_heads, self.num_sequences = query.shape[1], key.shape[1], tensors.num_sequences
        self.rel_query = query if rel_query is None else rel_query
        self.coverage = spec.coverage(tensors.query_offsets is None) if tensors.has_table else "no table"
        self.limits = {"first": spec.first, "last": spec.last}
        widths = tuple(int(tensor.shape[3]) for tensor in (query, value, self.rel_query))  # constants of kernels

        # How its tiles are selected
        if term_set is None:
            is_narrow = padded_width(widths[2]) < padded_width(widths[0])
            sets = {
                "rel_value": rel_value,
                "rel_p2c": rel_p2c,
                "narrow rel_query" if is_narrow else "rel_query": rel_query,
                "rel_bias" if rel_key is None else "rel_key and rel_bias": rel_bias,
            }
            term_set = next((name for name, tensor in sets.items() if tensor is not None), "none")
        precision, is_causal = draft.key.surroundings.float32_precision, spec.window_right >= 0
        length = max(spec.max_seqlen_q, spec.max_seqlen_k)
        self.conditions = selection.conditions(
            self.arch, query.dtype, precision, max(widths), self.coverage, is_causal, term_set, length
        )

        # How many rows a tile's offsets go through decides whether 32 bits hold them.
        rows = [(tensor, MAX_QUERIES) for tensor in (query, rel_query, *others)] + [(key, MAX_BLOCK), (value, MAX_BLOCK)]
        rows += [(table, table.shape[-2] + MAX_BLOCK) for table in (rel_key, rel_value, rel_p2c) if table is not None]
        wide_index = any(tensor is not None and needs_wide_index(tensor.shape, tensor.strides, most) for tensor, most in rows)
        wide_index |= self.heads * max(widths) * MAX_QUERIES >= 2**31  # of what is allocated for the results
        self.shape = Shape(int(self.heads // max(self.key_heads, 1)), *widths, *map(padded_width, widths), wide_index)

        # Scores are logits divided by scale, so 0 is replaced by a number so small that q.k vanishes beside the other terms.
        scale = spec.scale if abs(spec.scale) > SMALLEST_SCALE else SMALLEST_SCALE
        rel_scale = spec.rel_scale / scale
        has_scale = (rel_key is not None or rel_p2c is not None) and rel_scale != 1
        scaling = Scaling(scale / math.log(2), rel_scale if has_scale else None, 1 / scale, spec.softcap)

        # What is compiled into the kernels, besides a configuration's tile; see kernel_tile
        round_terms = architectures.rounds_terms(self.arch, query.dtype) and float16_holds_terms(scale)
        shape = self.shape
        self.value_constants: dict[str, Any] = {
            "coverage": self.coverage,
            "precision": architectures.input_precision(query.dtype, self.arch, precision),
            "width": widths[1],
            "block_width": shape.block_dv,
            "has_matrix": True,
        }
        self.key_constants: dict[str, Any] | None = None
        if rel_p2c is not None:
            key_widths = {"width": widths[0], "block_width": shape.block_d}
            self.key_constants = self.value_constants | key_widths | {"round_terms": round_terms, "has_scale": has_scale}
        self.constants: dict[str, Any] = self.value_constants | {
            "round_terms": round_terms and rel_key is not None,  # a bias alone is not rounded
            "width": widths[2],
            "block_width": shape.block_dr,
            "has_matrix": rel_key is not None,
            "has_bias": rel_bias is not None,
            "has_scale": has_scale and rel_key is not None,
        }

        # The tensors: tables as of one batch entry, the mask as of all pairs
        if rel_bias is not None and rel_bias.shape[-1] * rel_bias.strides[-1] >= 2**31:  # its rows are addressed in 32 bits
            rel_bias = draft.copied(rel_bias)
        if mask is not None:
            sizes = query.shape[0], self.heads, query.shape[2], key.shape[2]
            steps = [0 if size == 1 else step for size, step in zip(mask.shape, mask.strides, strict=True)]
            mask = draft.view(mask, sizes, steps)
        matrices = [None if tensor is None else tensor.strided for tensor in (query, key, value, rel_query)]
        tables = [
            None if table is None else (table, per_head(table.strides, rank=1 if table is rel_bias else 2))
            for table in (rel_key, rel_value, rel_bias, rel_p2c)
        ]
        self.inputs = Operands(*matrices, *tables[:3], None if mask is None else mask.strided, tables[3])
        vectors = (tensors.query_offsets, tensors.key_lengths, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        sequences = Sequences(spec.max_seqlen_q, spec.max_seqlen_k, spec.query_offset, *map(draft.contiguous, vectors))
        dropout = Dropout()
        if tensors.dropout_seed is not None:
            origins = tensors.dropout_origins
            if origins is not None:  # of the first head
                origins = draft.contiguous(draft.view(origins, (origins.shape[0], 1, 4), origins.strides))
            seed = draft.contiguous(tensors.dropout_seed)
            dropout = Dropout(seed, largest_dropped(spec.dropout_p), keep_scale(spec.dropout_p), origins)
        window = (None if spec.window_left < 0 else spec.window_left, None if spec.window_right < 0 else spec.window_right)
        self.common = Common(sequences, window, dropout, scaling)

    def add_far_keys(self, far_keys: Slot) -> None:
        """Give the terms of far keys to all kernels that are launched from now on; see delta.py."""
        self.inputs = self.inputs._replace(far_keys=far_keys.strided)

    def tile(self, kernel: str, config: TileConfig | None = None) -> TileConfig:
        """Return the configuration for one of KERNELS: the given one, if it is valid, or else the one selected for this call."""
        if config is None:
            self.draft.selected[kernel] = self.conditions
            return self.draft.key.surroundings.tables.select(kernel, self.conditions)
        if reason := config.why_invalid(self.arch, self.coverage != "no table", kernel):
            raise ValueError(f"{config} is not valid for {kernel} on {self.arch}: {reason}")
        return config

    def kernel_tile(self, kernel: str, config: TileConfig) -> TileConstants:
        """Return the constants that a kernel is compiled with."""
        # A loop over the keys can carry what belongs to its queries, one over the queries what belongs to its keys.
        carry, key_carry = (config.carry, None) if kernel in ("forward", "dq") else (None, config.carry)
        tile: dict[str, Any] = {
            "block_m": config.block_m,
            "block_n": config.block_n,
            "rotation": config.rotation,
            "warps": config.num_warps,
            "carry": carry,
        }
        # Kernels that read dS by relative position need the rows of a clamped table, and nothing beyond.
        if self.coverage == "clamp" and kernel in ("stored_dq", "dtable"):
            tile["coverage"] = "zero"
        key_tile = None
        if self.key_constants is not None:
            in_registers = config.rotation != "gather" and config.block_n % (16 * config.num_warps) == 0
            exchanged = {"block_m": config.block_n, "rotation": "registers" if in_registers else "gather", "carry": key_carry}
            key_tile = TileConstants(**self.key_constants | tile | exchanged)
        value_tile = TileConstants(**self.value_constants | tile)
        return TileConstants(**self.constants | tile, value_tile=value_tile, key_tile=key_tile)

    def launch(self, name: str, kernel: Any, config: TileConfig, programs: tuple[int, ...], **arguments: Any) -> None:
        """Launch one of KERNELS, in so many programs, with the arguments that all kernels share."""
        shared = {
            "inputs": self.inputs,
            "common": self.common,
            "num_heads": self.heads,
            "SHAPE": self.shape,
            "TILE": self.kernel_tile(name, config),
            **self.limits,
        }
        self.draft.launch(name, kernel, config, programs, shared | arguments)


def call_of(tensors: AttentionTensors, spec: AttentionSpec, arch: str | None = None) -> Call:
    """Describe a call on its GPU or on another; its tensors may be on "meta"."""
    draft = described(tensors, arch)
    return Call(draft, AttentionTensors(*draft.given), spec)


# The tensors of a call as the kernels take them: a positive scale, rows that are loaded 16 bytes at a time, and strides.

MATRICES = ("query", "key", "value", "rel_query", "rel_key", "rel_value", "rel_p2c")
"""Names of the tensors that enter matrix products."""


def with_positive_scale(draft: Draft, tensors: AttentionTensors, spec: AttentionSpec) -> tuple[AttentionTensors, AttentionSpec]:
    """Make a negative scale positive by negating the query, which is exact; rel_key keeps the old one, which becomes
    rel_query."""
    if spec.scale >= 0:
        return tensors, spec
    rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query
    negated = draft.copied(tensors.query)
    draft.prepare(torch.Tensor.neg_, negated)
    return tensors._replace(query=negated, rel_query=rel_query), spec._replace(scale=-spec.scale)


def aligned(draft: Draft, tensor: Slot, dtype: torch.dtype) -> Slot:
    """Copy an operand of matrix products that is in another dtype, or cannot be loaded 16 bytes at a time; return others as they
    are.

    For alignment only 16-bit operands on NVIDIA GPUs are copied: those whose numbers do not lie side by side, or whose rows
    Triton does not know to begin at multiples of 16 bytes. The copy takes less time than loads of 2 bytes. Above all, such loads
    are not safe on Hopper (sm_90): if one operand in a loop is loaded by cp.async, and another cannot be because it is loaded
    less than 4 bytes at a time, Triton 3.7.1 leaves out the fence between the cp.async and the wgmma that reads its data.
    tools/emulator shows that, and tells when it is mended.
    """
    *others, step = tensor.strides
    is_aligned = tensor.alignment % ALIGNMENT == 0 and step == 1 and not any(stride % 16 for stride in others)
    unit = architectures.architecture_of(draft.key.surroundings.arch).unit
    if tensor.dtype == dtype and (is_aligned or dtype.itemsize != 2 or unit in ("mfma", "interpreter")):
        return tensor
    *sizes, width = tensor.shape
    return draft.copied(tensor, contiguous_strides((*sizes, -(-width // 16) * 16)), dtype)


def with_aligned_operands(draft: Draft, tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call with the operands of its matrix products aligned, and in the dtype of query."""
    given = {name: operand for name in MATRICES if (operand := getattr(tensors, name)) is not None}
    return tensors._replace(**{name: aligned(draft, operand, tensors.query.dtype) for name, operand in given.items()})


def per_head(strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the strides of a table as of (1, heads, R, ...): 0 between heads that share it. rank: its dimensions if shared."""
    return (0,) * (2 + rank - len(strides)) + strides


def needs_wide_index(shape: tuple[int, ...], strides: tuple[int, ...], rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of a tensor's (length, width) matrices exceed 31 bits. A tile's first row has a
    64-bit offset anyway; only a clamped table is addressed from row 0."""
    row_stride, column_stride = strides[-2:]
    return rows * row_stride + (shape[-1] + MAX_BLOCK) * column_stride >= 2**31

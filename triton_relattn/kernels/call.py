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
from .config import selection
from .config.architectures import architecture_of
from .config.fitting import DoesNotFit, Selection, current
from .launching import described, launch

Strided = tuple[torch.Tensor, tuple[int, ...]]
SMALLEST_SCALE = 2.0**-60

# No field of a group of arguments may have the name of an attribute of Triton's own tuple: above all not values or type. Groups
# of tensors and numbers are such tuples in kernels. Up to Triton 3.7 a group of constants was the Python tuple itself there.
# Since 3.8, and in 3.9, it is Triton's, too, and so is a group within a group: a field Tile.values was then not what it held,
# but the list of all fields. tests/compile/test_groups.py looks at every group.

OPERANDS = ("query", "key", "value", "rel_query", "rel_key", "rel_value", "rel_p2c")
"""Names of the tensors that enter matrix products."""


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
    far_keys: Strided | None = None  # (B, H, 2, Nk): terms of the keys with the end rows of rel_p2c; far_keys.py


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


class Tile(NamedTuple):
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
    value_tile: Tile | None = None  # the same for rel_value; products are not rounded, as gradients may be too small for float16
    key_tile: Tile | None = None  # and for rel_p2c, whose tiles are those of N keys and N queries; see key_terms.py


class Dropout(NamedTuple):
    """Arguments of dropout.keep_mask, and the factor of the probabilities that it keeps; all None without dropout. (Triton 3.6
    cannot compare a group that holds None with None, so kernels ask for the seed.)"""

    seed: torch.Tensor | None = None
    largest_dropped: int | None = None
    keep_scale: float | None = None
    origins: torch.Tensor | None = None  # (B, 1, 4): as what sequence, first head, first query and first key count


def contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    """Return a vector as the kernels take it: its elements side by side."""
    return None if vector is None else vector.contiguous()


@functools.lru_cache(maxsize=1024)
def has_aligned_rows(strides: tuple[int, ...]) -> bool:
    """Return whether rows of 16-bit numbers begin at multiples of 16 bytes for all that Triton knows, if the first one does."""
    *others, step = strides
    return step == 1 and not any(stride % 16 for stride in others)


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an operand of matrix products if it cannot be loaded 16 bytes at a time; return other operands as they are.

    Only 16-bit operands on NVIDIA GPUs are copied: those whose numbers do not lie side by side, or whose rows Triton does not
    know to begin at multiples of 16 bytes. The copy takes less time than loads of 2 bytes. Above all, such loads are not safe on
    Hopper (sm_90): if one operand in a loop is loaded by cp.async, and another cannot be because it is loaded less than 4 bytes
    at a time, Triton 3.7.1 leaves out the fence between the cp.async and the wgmma that reads its data. tools/emulator shows
    that, and tells when it is mended.
    """
    if tensor.data_ptr() % 16 == 0 and has_aligned_rows(tensor.stride()):
        return tensor
    if tensor.element_size() != 2 or architecture_of(selection.architecture(tensor.device)).unit in ("mfma", "interpreter"):
        return tensor
    *sizes, width = tensor.shape
    return tensor.new_empty(*sizes, cdiv(width, 16) * 16)[..., :width].copy_(tensor)


def with_positive_scale(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[AttentionTensors, AttentionSpec]:
    """Make a negative scale positive by negating the query, which is exact: the kernels take maxima of scores before scaling.
    rel_key is still multiplied with the query as it was, which becomes rel_query."""
    if spec.scale >= 0:
        return tensors, spec
    rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query
    return tensors._replace(query=-tensors.query, rel_query=rel_query), spec._replace(scale=-spec.scale)


def with_aligned_operands(tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call with the operands of its matrix products aligned, and in the dtype of query."""
    moved = {}
    for name in OPERANDS:
        operand = getattr(tensors, name)
        if operand is not None and (new := aligned(operand.to(tensors.query.dtype))) is not operand:
            moved[name] = new
    return tensors._replace(**moved) if moved else tensors


def strided(tensor: torch.Tensor | None) -> Strided | None:
    """Return a tensor as the kernels take it, with its strides."""
    return None if tensor is None else (tensor, tensor.stride())


def per_head(strides: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    """Return the strides of a table as of (1, heads, R, ...): 0 between heads that share it. rank: its dimensions if shared."""
    return None if strides is None else (0,) * (2 + rank - len(strides)) + strides


Layout = tuple[torch.Size, tuple[int, ...]] | None


def layout_of(tensor: torch.Tensor | None) -> Layout:
    """Return the shape and the strides of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def cdiv(length: int, block: int) -> int:
    """Return how many blocks cover a length. (triton.cdiv, called by the host, takes as long as a tensor's allocation.)"""
    return -(-length // block)


@dataclass(frozen=True, eq=False)
class Fixed:
    """Arguments that all calls with the same sizes, strides, dtype and scalars share; ``fixed`` computes them. Packs of other
    numbers of sequences share them, too."""

    kind: selection.Kind
    shape: Shape
    window: tuple[int | None, int | None]
    largest_dropped: int
    keep_scale: float
    scaling: Scaling
    round_terms: bool
    precision: str
    strides: tuple[tuple[int, ...] | None, ...]  # of Operands
    compiled: dict[Any, Any] = field(default_factory=dict)  # kernels of earlier launches; see launching.py
    derived: dict[Any, Any] = field(default_factory=dict)  # what else is computed once for such calls, by all that it depends on


@functools.lru_cache(maxsize=1024)
def fixed(
    spec: AttentionSpec,
    arch: str,
    input_precision: str,
    dtype: torch.dtype,
    has_one_offset: bool,
    operands: tuple[Layout, ...],
    others: tuple[Layout, ...],
) -> Fixed:
    """Compute the arguments of the kernels that do not depend on the values of tensors, once for all calls that are alike.

    Args:
        operands: in the order of Operands.
        others: further tensors that kernels address by batch entry, head and row.
    """
    query, key, value, rel_query, rel_key, rel_value, rel_bias, _, rel_p2c = operands
    assert query is not None and key is not None and value is not None
    (_, num_heads, _, head_dim), key_heads, value_dim = query[0], key[0][1], value[0][-1]
    rel_dim = (rel_query or query)[0][-1]
    widths = head_dim, value_dim, rel_dim
    tables = {name: each for name, each in zip(TABLES, (rel_key, rel_value, rel_bias, rel_p2c), strict=True) if each is not None}
    coverage = spec.coverage(has_one_offset) if tables else "no table"
    term_set = None
    if rel_value is not None:
        term_set = "rel_value"
    elif rel_p2c is not None:
        term_set = "rel_p2c"
    elif rel_query is not None:
        narrow = selection.padded_width(rel_dim) < selection.padded_width(head_dim)
        term_set = "narrow rel_query" if narrow else "rel_query"
    elif rel_bias is not None:
        term_set = "rel_key and rel_bias" if rel_key is not None else "rel_bias"
    # Scores are logits divided by scale, so 0 is replaced by a number so small that q.k vanishes beside the other terms.
    scale = spec.scale if abs(spec.scale) > SMALLEST_SCALE else SMALLEST_SCALE
    rel_scale = spec.rel_scale / scale
    kind = selection.Kind(arch, dtype, max(widths), coverage, spec.window_right >= 0, term_set)
    rows_apart = [(each, selection.MOST_QUERIES) for each in (query, rel_query, *others)]
    rows_apart += [(key, selection.MAX_BLOCK), (value, selection.MAX_BLOCK)]
    rows_apart += [(table, table[0][-2] + selection.MAX_BLOCK) for name, table in tables.items() if name != "rel_bias"]
    wide_index = any(each is not None and selection.needs_wide_index(*each, rows) for each, rows in rows_apart)
    wide_index |= num_heads * max(widths) * selection.MOST_QUERIES >= 2**31  # of what is allocated for the results
    shape = Shape(num_heads // max(key_heads, 1), *widths, *map(selection.padded_width, widths), wide_index)
    window = (None if spec.window_left < 0 else spec.window_left, None if spec.window_right < 0 else spec.window_right)
    is_scaled = (rel_key is not None or rel_p2c is not None) and rel_scale != 1
    scaling = Scaling(scale / math.log(2), rel_scale if is_scaled else None, 1 / scale, spec.softcap)
    rounds = selection.rounds_terms(arch, dtype) and selection.float16_holds_terms(scale)
    strides = [None if each is None else each[1] for each in operands]
    for index, rank in ((4, 2), (5, 2), (6, 1), (8, 2)):
        strides[index] = per_head(strides[index], rank)
    dropout = largest_dropped(spec.dropout_p), keep_scale(spec.dropout_p)
    return Fixed(kind, shape, window, *dropout, scaling, rounds, input_precision, tuple(strides))


class Call:
    """One call as the launchers see it: its sizes, and the arguments that all kernels share."""

    def __init__(
        self,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        others: Iterable[torch.Tensor | None] = (),
        arch: str | None = None,
    ) -> None:
        """Collect the arguments of a call.

        Args:
            others: further tensors of the user's that kernels address by batch entry, head and row; they may need 64-bit offsets.
            arch: an architecture to use instead of the device's.
        """
        query, key = tensors.query, tensors.key
        self.heads, self.key_heads = query.shape[1], key.shape[1]
        self.num_sequences = tensors.num_sequences
        self.arch = arch or selection.architecture(query.device)
        self.selected: dict[str, Selection] = {}  # by kernel: configurations that self.tile has selected
        self.rel_query = query if tensors.rel_query is None else tensors.rel_query
        rel_bias, mask = tensors.rel_bias, tensors.attn_mask
        if rel_bias is not None and rel_bias.shape[-1] * rel_bias.stride(-1) >= 2**31:  # its rows are addressed in 32 bits
            rel_bias = rel_bias.contiguous()
        if mask is not None:
            mask = mask.expand(query.shape[0], self.heads, query.shape[2], key.shape[2])
        vectors = (tensors.query_offsets, tensors.key_lengths, tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        of_sequences = [contiguous(vector) for vector in vectors]
        origins = None if tensors.dropout_origins is None else tensors.dropout_origins[:, :1]
        of_dropout = contiguous(tensors.dropout_seed), contiguous(origins)
        operands = (*tensors[:6], rel_bias, mask, tensors.rel_p2c)
        of_call = fixed(
            spec,
            self.arch,
            selection.input_precision(query.dtype, self.arch),
            query.dtype,
            tensors.query_offsets is None,
            tuple(map(layout_of, operands)),
            tuple(map(layout_of, others)),
        )
        pairs = zip(operands, of_call.strides, strict=True)
        self.inputs = Operands(*[None if tensor is None else (tensor, strides) for tensor, strides in pairs])
        self.fixed, self.kind, self.coverage, self.shape = of_call, of_call.kind, of_call.kind.coverage, of_call.shape
        self.length = max(spec.max_seqlen_q, spec.max_seqlen_k)
        sequences = Sequences(spec.max_seqlen_q, spec.max_seqlen_k, spec.query_offset, *of_sequences)
        dropout = Dropout()
        if tensors.dropout_seed is not None:
            dropout = Dropout(of_dropout[0], of_call.largest_dropped, of_call.keep_scale, of_dropout[1])
        self.common = Common(sequences, of_call.window, dropout, of_call.scaling)
        self.limits = {"first": spec.first, "last": spec.last}
        self.tensors = (*operands, *of_sequences, *of_dropout)
        self.described: Any = None  # for launches: these tensors, whose sizes and strides are fixed

    def add_far_keys(self, far_keys: torch.Tensor) -> None:
        """Give the terms of far keys to all kernels that are launched from now on; see far_keys.py."""
        self.inputs, self.described = self.inputs._replace(far_keys=strided(far_keys)), None
        self.tensors += (far_keys,)

    def launch(self, name: str, kernel: Any, config: selection.TileConfig, programs: tuple[int, ...], **arguments: Any) -> None:
        """Launch one of selection.KERNELS, in so many programs, with the arguments that all kernels share.

        Raises:
            DoesNotFit: a selected configuration does not fit the GPU.
            OutOfResources: a configuration that was asked for does not fit the GPU.
        """
        options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        if config.max_registers is not None:
            options["maxnreg"] = config.max_registers
        of_call = {
            "inputs": self.inputs,
            "call": self.common,
            "num_heads": self.heads,
            "SHAPE": self.shape,
            "TILE": self.compiled_tile(config, name),
            **self.limits,
        }
        if self.described is None:
            self.described = described(self.tensors)
        try:
            launch(kernel, programs, of_call, arguments, options, self.fixed.compiled, (name, config, self.described))
        except OutOfResources as error:
            if name not in self.selected:
                raise
            raise DoesNotFit(self.selected[name], error) from None

    def compiled_tile(self, config: selection.TileConfig, kernel: str) -> Tile:
        """Return the constants that a kernel is compiled with."""
        derived, key = self.fixed.derived, ("tile", config, kernel)
        if key not in derived:
            derived[key] = self._compiled_tile(config, kernel)
        found: Tile = derived[key]
        return found

    def _compiled_tile(self, config: selection.TileConfig, kernel: str) -> Tile:
        loops_over_keys = kernel == "forward"  # only then can anything be carried
        fixed, shape, carry = self.fixed, self.shape, config.carry if loops_over_keys else None
        # Kernels that read dS by relative position need the rows of a clamped table, and have sums over the keys beyond.
        coverage = "zero" if self.coverage == "clamp" and kernel in ("dq", "dtable") else self.coverage
        of_config = (config.block_m, config.block_n, config.rotation, config.num_warps)
        of_call = (carry, coverage, fixed.precision)
        inputs, has_scale = self.inputs, fixed.scaling.rel_scale is not None
        values = Tile(*of_config, False, *of_call, shape.value_dim, shape.block_dv, has_matrix=True)
        keys = None
        if inputs.rel_p2c is not None:
            in_registers = config.rotation != "gather" and config.block_n % (16 * config.num_warps) == 0
            square = (config.block_n, config.block_n, "registers" if in_registers else "gather", config.num_warps)
            of_keys = (
                None if loops_over_keys else config.carry,
                *of_call[1:],
                shape.head_dim,
                shape.block_d,
                True,
                False,
                has_scale,
            )
            keys = Tile(*square, fixed.round_terms, *of_keys)
        has_terms = (inputs.rel_key is not None, inputs.rel_bias is not None, inputs.rel_key is not None and has_scale)
        round_terms = fixed.round_terms and inputs.rel_key is not None  # a bias alone is not
        return Tile(*of_config, round_terms, *of_call, shape.rel_dim, shape.block_dr, *has_terms, values, keys)

    def tile(self, kernel: str, config: selection.TileConfig | None = None) -> selection.TileConfig:
        """Return the configuration for one of selection.KERNELS: the given one, or else the one selected for this call.

        Raises:
            ValueError: the given configuration is not valid.
        """
        if config is None:
            place = current(Selection(kernel, self.kind, selection.select(kernel, *self.kind, self.length)))
            self.selected[kernel] = place
            return place.config
        if reason := config.why_invalid(self.arch, self.coverage != "no table", kernel):
            raise ValueError(f"{config} is not valid for {kernel} on {self.arch}: {reason}")
        return config

"""What every launch passes to its kernel, put together once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

from ..dropout import keep_scale, largest_dropped
from ..spec import AttentionSpec, AttentionTensors
from . import configs
from .fitting import DoesNotFit, Place, current

SMALLEST_SCALE = 2.0**-60
LAUNCH_OPTIONS = {"enable_fp_fusion": True}
"""Of every launch: Triton 3.9 warns where it is left out, because 3.10 changes what that means."""


class Sequences(NamedTuple):
    """How the batch is made up of sequences; masking.locate reads it."""

    max_seqlen_q: int
    max_seqlen_k: int
    query_offset: int
    query_offsets: torch.Tensor | None  # instead of query_offset
    key_lengths: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None


class Scaling(NamedTuple):
    """From products to logits. The kernels' scores are logits divided by scale."""

    base_2_scale: float  # scale / ln 2, divided in double, so that it is rounded once, and the same for all kernels
    rel_scale: float | None  # factor of p.E in a score; None: 1
    bias_scale: float
    softcap: float | None


class Dropout(NamedTuple):
    """dropout.kept decides by it; what is kept is multiplied by keep_scale."""

    seed: torch.Tensor
    largest_dropped: int
    keep_scale: float


def contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A vector as the kernels take it: without a stride."""
    return None if vector is None else vector.contiguous()


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Copy an operand of matrix products that cannot be loaded 16 bytes at a time: one of 16 bits a number, on an NVIDIA GPU,
    whose numbers do not lie side by side, or whose rows begin where Triton cannot tell that 16 bytes do.

    The copy takes less time than loads of 2 bytes. Above all, on Hopper (sm_90) those are not safe: where one operand in a loop
    is loaded by cp.async and another, of less than 4 bytes at a time, cannot be, Triton 3.7.1 leaves out the fence between the
    cp.async and the wgmma that reads what it has brought. tests/emulator shows that, and tells when it is mended.
    """
    if tensor.element_size() != 2 or not configs.architecture(tensor.device).startswith("sm_"):
        return tensor
    *strides, step = tensor.stride()
    if step == 1 and tensor.data_ptr() % 16 == 0 and not any(stride % 16 for stride in strides):
        return tensor
    *sizes, width = tensor.shape
    return tensor.new_empty(*sizes, cdiv(width, 16) * 16)[..., :width].copy_(tensor)


def with_positive_scale(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[AttentionTensors, AttentionSpec]:
    """Turn the sign of a negative scale over to the query, which is exact: the kernels take maxima of scores that are yet to be
    scaled. What rel_key meets stays the query as it was."""
    if spec.scale >= 0:
        return tensors, spec
    rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query
    return tensors._replace(query=-tensors.query, rel_query=rel_query), spec._replace(scale=-spec.scale)


def with_aligned_operands(tensors: AttentionTensors) -> AttentionTensors:
    """The call with its operands of matrix products aligned."""
    named = {name: getattr(tensors, name) for name in ("query", "key", "value", "rel_query", "rel_key", "rel_value")}
    return tensors._replace(**{name: aligned(tensor) for name, tensor in named.items() if tensor is not None})


def strided(tensor: torch.Tensor | None) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """A tensor as the kernels take it: with its strides."""
    return None if tensor is None else (tensor, tensor.stride())


def per_head(table: torch.Tensor | None, rank: int) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """A table as (1, heads, R, ...), with its strides: 0 from head to head if they share it. rank: its dimensions then."""
    if table is None:
        return None
    return table, (0,) * (2 + rank - table.dim()) + table.stride()


def cdiv(length: int, block: int) -> int:
    """How many blocks cover a length. Triton's, called by the host, takes as long as a tensor's allocation."""
    return -(-length // block)


class Call:
    """One call as the launchers see it: its sizes, and the arguments that all kernels share."""

    def __init__(
        self,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        others: Iterable[torch.Tensor | None] = (),
        arch: str | None = None,
    ) -> None:
        """others: what else is addressed by batch entry, head and row. arch: instead of the device's."""
        query, key, value = tensors.query, tensors.key, tensors.value
        self.heads, self.key_heads = query.shape[1], key.shape[1]
        self.num_sequences = tensors.num_sequences
        self.arch = arch or configs.architecture(query.device)
        self.selected: dict[str, Place] = {}  # by kernel: what tile has chosen itself
        self.outside = spec.outside(tensors.query_offsets is None) if tensors.has_table else None
        rel_query = query if tensors.rel_query is None else tensors.rel_query
        self.widths = {"HEAD_DIM": query.shape[-1], "VALUE_DIM": value.shape[-1], "REL_DIM": rel_query.shape[-1]}
        self.rel_query = rel_query
        rel_bias = tensors.rel_bias
        if rel_bias is not None and rel_bias.shape[-1] * rel_bias.stride(-1) >= 2**31:  # its rows are addressed in 32 bits
            rel_bias = rel_bias.contiguous()
        self.tables = (per_head(tensors.rel_key, 2), per_head(tensors.rel_value, 2), per_head(rel_bias, 1))
        special = None
        if tensors.rel_value is not None:
            special = "rel_value"
        elif tensors.rel_query is not None:
            narrow = configs.padded_width(rel_query.shape[-1]) < configs.padded_width(query.shape[-1])
            special = "narrow rel_query" if narrow else "rel_query"
        elif rel_bias is not None:
            special = "rel_bias" if tensors.rel_key is None else "rel_key and rel_bias"
        widest = max(self.widths.values())
        self.kind = configs.Kind(self.arch, query.dtype, widest, self.outside, spec.window_right >= 0, special)
        self.length = max(spec.max_seqlen_q, spec.max_seqlen_k)
        mask = tensors.attn_mask
        if mask is not None:
            mask = mask.expand(query.shape[0], self.heads, query.shape[2], key.shape[2])
        self.attn_mask = mask
        # Scores are logits divided by it: 0 would not do, and this leaves nothing of q.k beside the other terms.
        scale = spec.scale if abs(spec.scale) > SMALLEST_SCALE else SMALLEST_SCALE
        rel_scale = spec.rel_scale / scale
        self.keep_scale = keep_scale(spec.dropout_p)
        addressed = (query, key, value, tensors.rel_query, *others)
        wide_index = any(configs.needs_wide_index(tensor) for tensor in addressed if tensor is not None)
        for table in (tensors.rel_key, tensors.rel_value):
            if table is not None:
                wide_index |= configs.needs_wide_index(table, rows=table.shape[-2] + configs.MAX_BLOCK)
        self.arguments: dict[str, Any] = {
            "sequences": Sequences(
                spec.max_seqlen_q,
                spec.max_seqlen_k,
                spec.query_offset,
                *map(contiguous, (tensors.query_offsets, tensors.key_lengths, tensors.cu_seqlens_q, tensors.cu_seqlens_k)),
            ),
            "window": tuple(None if size < 0 else size for size in (spec.window_left, spec.window_right)),
            "dropout": None
            if tensors.dropout_seed is None
            else Dropout(tensors.dropout_seed, largest_dropped(spec.dropout_p), self.keep_scale),
            "scaling": Scaling(
                scale / math.log(2),
                None if tensors.rel_key is None or rel_scale == 1 else rel_scale,
                1 / scale,
                spec.softcap,
            ),
            "first": spec.first,
            "last": spec.last,
            "num_heads": self.heads,
            "GROUP": self.heads // max(self.key_heads, 1),
            **self.widths,
            "BLOCK_D": configs.padded_width(query.shape[-1]),
            "BLOCK_DV": configs.padded_width(value.shape[-1]),
            "BLOCK_DR": configs.padded_width(rel_query.shape[-1]),
            "OUTSIDE": self.outside,
            "ROUND_TERMS": configs.rounds_terms(self.arch, query.dtype),
            "INPUT_PRECISION": configs.input_precision(query.dtype, self.arch),
            "WIDE_INDEX": wide_index,
        }

    def launch(
        self, name: str, kernel: Any, config: configs.TileConfig, grid: tuple[int, ...], *arguments: Any, **options: Any
    ) -> None:
        """Launch one of configs.KERNELS, in a grid of programs, with what all kernels share.

        Raises:
            DoesNotFit: a selected configuration does not fit the GPU (OutOfResources: one that was asked for).
        """
        of_tile = tile_arguments(config, walks_keys=name in ("forward", "rows"))
        try:
            kernel[grid](*arguments, **options, **self.arguments, **of_tile, **LAUNCH_OPTIONS)
        except OutOfResources as error:
            if name not in self.selected:
                raise
            raise DoesNotFit(self.selected[name], error) from None

    def tile(self, kernel: str, config: configs.TileConfig | None = None) -> configs.TileConfig:
        """The configuration of one of configs.KERNELS: the one given, if it is valid, or else the one selected."""
        if config is None:
            place = current(Place(kernel, self.kind, configs.select(kernel, *self.kind, self.length)))
            self.selected[kernel] = place
            return place.config
        if reason := config.why_invalid(self.arch, self.outside is not None):
            raise ValueError(f"{config} is not valid for {kernel} on {self.arch}: {reason}")
        return config


def tile_arguments(config: configs.TileConfig, *, walks_keys: bool = False) -> dict[str, int]:
    """A configuration, as a kernel and its launch take it; only kernels that walk along the keys can carry anything."""
    return {
        **({"CARRY": config.carry} if walks_keys else {}),
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "ROTATION": config.rotation,
        "WARPS": config.num_warps,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }

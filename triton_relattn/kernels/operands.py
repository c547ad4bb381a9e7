"""The tensors of a call as the kernels take them: a positive scale, rows that are loaded 16 bytes at a time, and strides."""

from __future__ import annotations

import functools

import torch

from .._core.spec import AttentionSpec, AttentionTensors
from .config import architectures
from .config.tile_config import MAX_BLOCK

Strided = tuple[torch.Tensor, tuple[int, ...]]
Extent = tuple[torch.Size, tuple[int, ...]] | None  # shape and strides of a tensor
MATRICES = ("query", "key", "value", "rel_query", "rel_key", "rel_value", "rel_p2c")
"""Names of the tensors that enter matrix products."""


def with_positive_scale(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[AttentionTensors, AttentionSpec]:
    """Make a negative scale positive by negating the query, which is exact; rel_key keeps the old one, which becomes
    rel_query."""
    if spec.scale >= 0:
        return tensors, spec
    rel_query = tensors.query if tensors.rel_query is None and tensors.rel_key is not None else tensors.rel_query
    return tensors._replace(query=-tensors.query, rel_query=rel_query), spec._replace(scale=-spec.scale)


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
    unit = architectures.architecture_of(architectures.architecture(tensor.device)).unit
    if tensor.element_size() != 2 or unit in ("mfma", "interpreter"):
        return tensor
    *sizes, width = tensor.shape
    return tensor.new_empty(*sizes, -(-width // 16) * 16)[..., :width].copy_(tensor)


def with_aligned_operands(tensors: AttentionTensors) -> AttentionTensors:
    """Return the tensors of a call with the operands of its matrix products aligned, and in the dtype of query."""
    moved = {}
    for name in MATRICES:
        operand = getattr(tensors, name)
        if operand is not None and (new := aligned(operand.to(tensors.query.dtype))) is not operand:
            moved[name] = new
    return tensors._replace(**moved) if moved else tensors


def contiguous(vector: torch.Tensor | None) -> torch.Tensor | None:
    """Return a vector as the kernels take it: its elements side by side."""
    return None if vector is None else vector.contiguous()


def strided(tensor: torch.Tensor | None) -> Strided | None:
    """Return a tensor as the kernels take it, with its strides."""
    return None if tensor is None else (tensor, tensor.stride())


def extent(tensor: torch.Tensor | None) -> Extent:
    """Return the shape and the strides of a tensor."""
    return None if tensor is None else (tensor.shape, tensor.stride())


def per_head(strides: tuple[int, ...] | None, rank: int) -> tuple[int, ...] | None:
    """Return the strides of a table as of (1, heads, R, ...): 0 between heads that share it. rank: its dimensions if shared."""
    return None if strides is None else (0,) * (2 + rank - len(strides)) + strides


def needs_wide_index(shape: tuple[int, ...], strides: tuple[int, ...], rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of a tensor's (length, width) matrices exceed 31 bits. A tile's first row has a
    64-bit offset anyway; only a clamped table is addressed from row 0."""
    row_stride, column_stride = strides[-2:]
    return rows * row_stride + (shape[-1] + MAX_BLOCK) * column_stride >= 2**31

"""The tensors of a call as the kernels take them: a positive scale, rows that are loaded 16 bytes at a time, and strides."""

from __future__ import annotations

import torch

from .._core.spec import AttentionSpec, AttentionTensors
from .config import architectures
from .config.tile_config import MAX_BLOCK
from .draft import Draft, Slot, contiguous_strides
from .plan import ALIGNMENT

Strided = tuple[Slot, tuple[int, ...]]
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


def contiguous(draft: Draft, tensor: Slot | None) -> Slot | None:
    """Return a tensor as kernels take those without strides: its elements side by side."""
    if tensor is None:
        return None
    dimensions = zip(tensor.shape, tensor.strides, contiguous_strides(tensor.shape), strict=True)
    is_contiguous = all(size == 1 or stride == usual for size, stride, usual in dimensions)
    return tensor if is_contiguous else draft.copied(tensor)


def new_like(draft: Draft, tensor: Slot, width: int | None = None) -> Slot:
    """Allocate a tensor like another in shape, dtype and memory order, (B, N, H, width) or (B, H, N, width); tables are
    contiguous. width: in place of the last size."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] if width is None else width)
    if len(shape) < 4 or tensor.strides[1] >= tensor.strides[2]:
        return draft.new(shape, tensor.dtype)
    batch, heads, length, width = shape
    by_batch, by_row, by_head, step = contiguous_strides((batch, length, heads, width))
    return draft.new(shape, tensor.dtype, (by_batch, by_head, by_row, step))


def strided(tensor: Slot | None) -> Strided | None:
    """Return a tensor as the kernels take it, with its strides."""
    return None if tensor is None else tensor.strided


def per_head(strides: tuple[int, ...], rank: int) -> tuple[int, ...]:
    """Return the strides of a table as of (1, heads, R, ...): 0 between heads that share it. rank: its dimensions if shared."""
    return (0,) * (2 + rank - len(strides)) + strides


def needs_wide_index(shape: tuple[int, ...], strides: tuple[int, ...], rows: int = MAX_BLOCK) -> bool:
    """Return whether offsets within so many rows of a tensor's (length, width) matrices exceed 31 bits. A tile's first row has a
    64-bit offset anyway; only a clamped table is addressed from row 0."""
    row_stride, column_stride = strides[-2:]
    return rows * row_stride + (shape[-1] + MAX_BLOCK) * column_stride >= 2**31

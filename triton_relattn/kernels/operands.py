"""The tensors of a call as the kernels can take them: a positive scale, and rows that are loaded 16 bytes at a time."""

from __future__ import annotations

import functools

import torch

from .._core.spec import AttentionSpec, AttentionTensors
from .config import selection
from .config.architectures import architecture_of

OPERANDS = ("query", "key", "value", "rel_query", "rel_key", "rel_value", "rel_p2c")
"""Names of the tensors that enter matrix products."""


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
    return tensor.new_empty(*sizes, -(-width // 16) * 16)[..., :width].copy_(tensor)


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

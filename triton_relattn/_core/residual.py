"""The residual of out, what rounding took from it: for which calls the kernels' forward keeps it for the backward."""

from __future__ import annotations

import torch

from .spec import AttentionTensors
from .untraced import untraced


@untraced
def rounds_float32() -> bool:
    """Return whether products of float32 inputs may be in tf32."""
    return torch.get_float32_matmul_precision() != "highest"


def keeps_residual(tensors: AttentionTensors) -> bool:
    """Return whether the kernels' backward needs an exact delta (kernels/delta.py).

    It does with a table for the scores, in whose gradient errors of delta add up. If products are in full float32, out is as
    exact as they are.
    """
    has_scores_table = tensors.rel_key is not None or tensors.rel_bias is not None or tensors.rel_p2c is not None
    return has_scores_table and (tensors.query.dtype != torch.float32 or rounds_float32())

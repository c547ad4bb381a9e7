"""Plain torch, block by block, as an implementation: linear memory on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._blockwise import attention, grids, short
from .._core.dtypes import compute_dtype, new_like, without_autocast
from .._core.grids import GridTensors
from .._core.spec import AttentionSpec, AttentionTensors
from .base import Gradients, Implementation, Results, Saved


class Blockwise(Implementation):
    """Plain torch. It computes delta from its blocks, so the backward needs neither out nor statistics. Of short calls it keeps
    the probabilities."""

    name = "blockwise"
    skips_lse = True

    def keeps(self, tensors: AttentionTensors, spec: AttentionSpec) -> bool:
        # Not while torch.compile traces: it would have to fix the sizes.
        return not torch.compiler.is_compiling() and attention.keeps_probs(tensors, spec)

    def empty_results(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        out, lse = new_like(tensors.query, tensors.value.shape[-1]), attention.new_lse(tensors, spec)
        return Results(out, lse, *_saved(tensors, spec, keeps))

    def forward(self, tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> Results:
        with without_autocast(tensors.query.device):
            softmax_stats, kept = _saved(tensors, spec, keeps)
            method = short if short.serves(tensors, spec) else attention
            out, lse = method.forward(tensors, spec, kept if keeps else None)
        return Results(out, lse, softmax_stats, kept)

    def backward(
        self,
        d_out: torch.Tensor,
        d_lse: torch.Tensor | None,
        saved: Saved,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        wanted: Sequence[bool],
    ) -> Gradients:
        with without_autocast(tensors.query.device):
            method = short if short.serves(tensors, spec) else attention
            return method.backward(d_out, d_lse, tensors, spec, wanted, saved.kept)

    def empty_grid_results(self, tensors: GridTensors) -> tuple[torch.Tensor, torch.Tensor]:
        return grids.new_out(tensors), tensors.query.new_empty(0, dtype=torch.float32)

    def grid_forward(self, tensors: GridTensors, scale: float, dropout_p: float) -> tuple[torch.Tensor, torch.Tensor]:
        return grids.forward(tensors, scale, dropout_p), tensors.query.new_empty(0, dtype=torch.float32)

    def grid_backward(
        self,
        d_out: torch.Tensor,
        out: torch.Tensor | None,
        softmax_stats: torch.Tensor,
        tensors: GridTensors,
        scale: float,
        dropout_p: float,
        wanted: Sequence[bool],
    ) -> Gradients:
        return grids.backward(d_out, tensors, scale, dropout_p, wanted)


def _saved(tensors: AttentionTensors, spec: AttentionSpec, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate softmax_stats, which is empty, and the probabilities, if they are kept. Those of keys outside a block's window are
    0: the backward, whose blocks depend on the number of threads at its time, may read them."""
    query, dtype = tensors.query, compute_dtype(tensors.query.dtype)
    nothing = query.new_empty(0, dtype=dtype)
    if not keeps:
        return nothing, query.new_empty(0)
    new = query.new_empty if max(spec.window_left, spec.window_right) < 0 else query.new_zeros
    return nothing, new((*query.shape[:3], tensors.key.shape[2]), dtype=dtype)

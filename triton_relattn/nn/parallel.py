"""Heads, or positions, spread over devices, with torch's own engine.

``torch.distributed.tensor.parallel.parallelize_module(module, mesh, plan())`` distributes the heads of a
RelativeMultiheadAttention. The number of heads of the key must be a multiple of the mesh's size. ``context_plan()`` distributes
the positions instead.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this device's shard of a tensor. Gradients of a replicated one are partial sums, which are added up."""
    if not _is_distributed(tensor):
        return tensor
    from torch.distributed.tensor import Partial, Replicate

    distributed: Any = tensor
    placements = [Partial() if isinstance(placement, Replicate) else placement for placement in distributed.placements]
    shard: torch.Tensor = distributed.redistribute(placements=distributed.placements).to_local(grad_placements=placements)
    return shard


def beside(parameter: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that all devices have, as an input of modules whose parameters are distributed if this one is."""
    if not _is_distributed(parameter):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing torch.distributed."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def plan() -> dict[str, Any]:
    """Return the plan that ``parallelize_module`` takes for a RelativeMultiheadAttention.

    The heads of all projections and of the encoding are sharded; inputs and outputs are replicated. The processes need the same
    seed. Therefore, with attention dropout, the first heads of each process drop the same weights. An attn_mask with a mask for
    each head is not distributed.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    projections = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    return {**projections, "out_proj": RowwiseParallel(), "attention.encoding": _encoding_parallel()}


def context_plan() -> dict[str, Any]:
    """Return the plan by which a RelativeMultiheadAttention attends over the positions of all ranks (context parallelism).

    Inputs and outputs are plain tensors of the rank's positions, cut as ``torch.chunk`` cuts; parameters stay as they are, and
    their gradients are the rank's part: DDP or FSDP2 adds them up, as those of the other modules. Lengths, offsets and masks are
    those of the whole sequence. At every call ranks tell each other how many positions they have, for which the host waits; other
    numbers are a ValueError on all of them. Transformer-XL's encoding, which computes with the query, is not distributed.

    Example:
        >>> plan = {f"layers.*.{name}": style for name, style in context_plan().items()}
        >>> parallelize_module(model, mesh, plan)  # doctest: +SKIP
    """
    return {"attention": _context_parallel()}


def _context_parallel() -> Any:
    from torch.distributed.tensor.parallel import ParallelStyle

    from .._distributed.dtensors import spread_positions

    class ContextParallel(ParallelStyle):
        """A RelativeAttention whose inputs are the rank's positions: as DTensors, so that lengths are those of all."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def spread(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                return spread_positions(inputs, device_mesh)

            def gathered(_: nn.Module, __: Any, outputs: Any) -> Any:
                return tuple(output.to_local() for output in outputs) if isinstance(outputs, tuple) else outputs.to_local()

            module.register_forward_pre_hook(spread)
            module.register_forward_hook(gathered)
            return module

    return ContextParallel()


def _encoding_parallel() -> Any:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ParallelStyle

    class EncodingParallel(ParallelStyle):
        """Shard parameters and buffers that are per head by head; replicate the others."""

        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            dims = {  # the dimension that counts heads, by the full name of each parameter or buffer that has one
                f"{prefix}.{name}" if prefix else name: dim
                for prefix, part in module.named_modules()
                for name, dim in getattr(part, "head_dims", {}).items()
            }
            for name, parameter in list(module.named_parameters()):
                owner, _, last = name.rpartition(".")
                placement = Shard(dims[name]) if name in dims else Replicate()
                sharded = nn.Parameter(distribute_tensor(parameter.data, device_mesh, [placement]), parameter.requires_grad)
                module.get_submodule(owner).register_parameter(last, sharded)
            for name, buffer in list(module.named_buffers()):
                if name in dims:
                    owner, _, last = name.rpartition(".")
                    sharded_buffer = distribute_tensor(buffer, device_mesh, [Shard(dims[name])])
                    module.get_submodule(owner).register_buffer(last, sharded_buffer, persistent=False)
            return module

    return EncodingParallel()

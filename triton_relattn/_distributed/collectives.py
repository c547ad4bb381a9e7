"""Messages between all ranks. Those of tensors are opaque operators: they have arrived when the operator returns.

torch's own functional collectives return before that, and its fallback for vmap, or for batched gradients, reads what has not
arrived (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce, all_to_all_single, wait_tensor

from .._core.dtypes import compute_dtype
from .._core.untraced import untraced
from .._operators import NAMESPACE, OPERATORS


@untraced
def name_of(group: Any) -> str:
    """Return the name by which operators know a process group."""
    return group.group_name  # type: ignore[no-any-return]


def gathered(numbers: Sequence[int], device: torch.device, group: Any) -> list[list[int]]:
    """Return the numbers of every rank, for which the host waits. In torch.compile all ranks are taken to have the same."""
    size = dist.get_world_size(group)
    if size == 1 or torch.compiler.is_compiling():
        return [list(numbers)] * size
    own = torch.tensor(numbers, device=device)
    every = [torch.empty_like(own) for _ in range(size)]
    dist.all_gather(every, own, group=group)
    return torch.stack(every).tolist()  # type: ignore[no-any-return]


_EXCHANGE, _TOTAL = f"{NAMESPACE}::exchange", f"{NAMESPACE}::total"
torch.library.define(_EXCHANGE, "(Tensor message, SymInt[] arriving, SymInt[] leaving, str group) -> Tensor")
torch.library.define(_TOTAL, "(Tensor tensor, str group) -> Tensor")


@torch.library.impl(_EXCHANGE, "CompositeExplicitAutograd")
def _(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: Any) -> torch.Tensor:
    return wait_tensor(all_to_all_single(message.contiguous(), list(arriving), list(leaving), group))


@torch.library.register_fake(_EXCHANGE)
def _(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str) -> torch.Tensor:
    return message.new_empty(sum(arriving))


@torch.library.impl(_TOTAL, "CompositeExplicitAutograd")
def _(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    return wait_tensor(all_reduce(tensor, "sum", group))


@torch.library.register_fake(_TOTAL)
def _(tensor: torch.Tensor, group: str) -> torch.Tensor:
    return torch.empty_like(tensor)


class Exchange(torch.autograd.Function):
    """A message of which each rank gets a part, for one from each rank; gradients go back where the message came from.

    arriving, leaving: numbers of elements that come from each rank, and that go to each. group: its name.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(message: torch.Tensor, arriving: Sequence[int], leaving: Sequence[int], group: str) -> Any:
        return OPERATORS.exchange(message, arriving, leaving, group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.arriving, ctx.leaving, ctx.group = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return Exchange.apply(gradient, ctx.leaving, ctx.arriving, ctx.group), None, None, None


class SummedGradients(torch.autograd.Function):
    """Tables in the compute dtype; in the backward the sums of their gradients over all ranks, in one message, rounded once."""

    generate_vmap_rule = True

    @staticmethod
    def forward(group: str, *tables: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(table.view_as(table).to(compute_dtype(table.dtype)) for table in tables)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.group, *tables = inputs
        ctx.dtypes = [table.dtype for table in tables]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        message = torch.cat([gradient.reshape(-1) for gradient in gradients])
        sums = OPERATORS.total(message, ctx.group).split([gradient.numel() for gradient in gradients])
        return None, *(
            each.view(gradient.shape).to(dtype) for each, gradient, dtype in zip(sums, gradients, ctx.dtypes, strict=True)
        )

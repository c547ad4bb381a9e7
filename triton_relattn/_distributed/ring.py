"""Ring attention: queries stay, keys and values go round, and so do their gradients.

In step s rank r has the keys of rank r - s. While it computes with them they are already on their way to rank r + 1, and those of
rank r - s - 1 are on theirs to it. With a window, or for a pack of short sequences, keys go only as far as somebody needs them.
In the backward the gradients follow their keys, a step behind, and are sent home in one message at the end. Each rank has three
shards of keys and values at most, and in the backward as many of their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .._blockwise.attention import Whole
from .._core.dtypes import compute_dtype
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from .._implementations import Implementation
from . import parts
from .sharding import Meeting, Sharding, meetings

OF_KEYS, OF_GRADIENTS = 0, 1  # tags of messages


class Transfer:
    """A message to one rank and one from another, both on their way. Empty ones are not sent."""

    def __init__(
        self, group: dist.ProcessGroup, sent: torch.Tensor, to: int, received: torch.Tensor, source: int, tag: int
    ) -> None:
        self.sent, self.received = sent, received  # both live until the messages have arrived
        ends = ((dist.isend, sent, to), (dist.irecv, received, source))
        operations = [
            dist.P2POp(operation, tensor, group=group, tag=tag, group_peer=peer)
            for operation, tensor, peer in ends
            if tensor.numel() > 0
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def arrived(self) -> torch.Tensor:
        """Wait for both messages; return the one that has come.

        Raises:
            RuntimeError: a rank has gone, or the group's timeout is over.
        """
        for work in self.works:
            work.wait()
        return self.received


class Ring:
    """A rank's view of one call."""

    def __init__(
        self, tensors: AttentionTensors, spec: AttentionSpec, group: dist.ProcessGroup, queries: Sharding, keys: Sharding
    ) -> None:
        self.tensors, self.spec, self.group, self.queries, self.keys = tensors, spec, group, queries, keys
        self.rank, self.size = group.rank(), group.size()

        def is_needed(step: int) -> bool:
            return any(self.meetings(rank, (rank - step) % self.size) for rank in range(self.size))

        self.last_step = next(filter(is_needed, reversed(range(self.size))), 0)
        """The last step in which some rank has keys that it needs."""

    def meetings(self, rank: int, owner: int) -> list[Meeting]:
        """How a rank's queries meet a rank's keys."""
        return list(meetings(self.tensors, self.spec, self.queries.pieces[rank], self.keys.pieces[owner]))

    def owner(self, step: int) -> int:
        """The rank whose keys are here in a step."""
        return (self.rank - step) % self.size

    def packed(self) -> torch.Tensor:
        """The rank's own keys and values as one message."""
        return torch.cat([tensor.reshape(-1) for tensor in (self.tensors.key, self.tensors.value)])

    def numel(self, owner: int) -> int:
        """Elements of a message with a rank's keys and values, or with their gradients."""
        key, value = self.tensors.key, self.tensors.value
        return key.shape[0] * key.shape[1] * self.keys.size(owner) * (key.shape[3] + value.shape[3])

    def unpacked(self, message: torch.Tensor, owner: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of a message: (B, Hk, keys of the owner, D) and (B, Hk, keys of the owner, Dv)."""
        (batch, heads, _, width), value_width = self.tensors.key.shape, self.tensors.value.shape[3]
        shape = (batch, heads, self.keys.size(owner))
        key, value = message.split([message.numel() * w // (width + value_width) for w in (width, value_width)])
        return key.view(*shape, width), value.view(*shape, value_width)

    def send_on(self, message: torch.Tensor, step: int, tag: int) -> Transfer:
        """Send to the next rank what is here in a step, and receive what will be here in the next one."""
        received = message.new_empty(self.numel(self.owner(step + 1)))
        return Transfer(self.group, message, (self.rank + 1) % self.size, received, (self.rank - 1) % self.size, tag)

    def forward(self, implementation: Implementation) -> parts.Result:
        """The result of the rank's queries over all keys."""
        held, unit = self.packed(), implementation.unit_of_largest(self.tensors, self.spec)
        total = parts.Result.of_no_keys(self.tensors.query, self.tensors.value.shape[3])
        for step in range(self.last_step + 1):
            transfer = self.send_on(held, step, OF_KEYS) if step < self.last_step else None
            owner = self.owner(step)
            for meeting in self.meetings(self.rank, owner):
                part = implementation.forward_of_part(*meeting.call(self.tensors, self.spec, *self.unpacked(held, owner)))
                total.of(meeting.queries).add(part, unit)
            if transfer is not None:
                held = transfer.arrived()
        return total

    def backward(
        self, d_out: torch.Tensor, of_rows: Whole, implementation: Implementation, wanted: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Gradients of spec.DIFFERENTIABLE, None where not wanted or not there: of the rank's own query, key, value and
        rel_query, and of tables the part that its queries have in them."""
        tensors, dtype, held = self.tensors, compute_dtype(self.tensors.query.dtype), self.packed()
        totals = {
            name: torch.zeros_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
            for name, tensor, want in zip(DIFFERENTIABLE, tensors, wanted, strict=False)
            if want and tensor is not None and name not in ("key", "value")
        }
        wants_keys = wanted[DIFFERENTIABLE.index("key")] or wanted[DIFFERENTIABLE.index("value")]
        behind: Transfer | None = None  # gradients of the keys that are here, from the ranks that had them before
        for step in range(self.last_step + 1):
            transfer = self.send_on(held, step, OF_KEYS) if step < self.last_step else None
            owner = self.owner(step)
            of_keys = held.new_zeros(self.numel(owner) if wants_keys else 0, dtype=dtype)
            for meeting in self.meetings(self.rank, owner):
                part, spec = meeting.call(tensors, self.spec, *self.unpacked(held, owner))
                rows = Whole(*map(meeting.queries.of, of_rows))
                found = implementation.backward_of_part(meeting.queries.of(d_out), rows, part, spec, wanted)
                places = totals | {n: meeting.queries.of(totals[n]) for n in ("query", "rel_query") if n in totals}
                if wants_keys:
                    places |= zip(("key", "value"), map(meeting.keys.of, self.unpacked(of_keys, owner)), strict=True)
                for name, gradient in zip(DIFFERENTIABLE, found, strict=True):
                    if gradient is not None:
                        places[name].add_(gradient)
                del found, gradient
            if behind is not None:
                of_keys += behind.arrived()
            if wants_keys and step < self.last_step:
                behind = self.send_on(of_keys, step, OF_GRADIENTS)
            if transfer is not None:
                held = transfer.arrived()
        if wants_keys:
            totals |= zip(("key", "value"), self.unpacked(self.sent_home(of_keys), self.rank), strict=True)
        return [
            totals[name].to(tensor.dtype, copy=name in ("key", "value")) if want and tensor is not None else None
            for name, tensor, want in zip(DIFFERENTIABLE, tensors, wanted, strict=False)
        ]

    def sent_home(self, of_keys: torch.Tensor) -> torch.Tensor:
        """Send the gradients of the keys of the last step to their owner; return those of the rank's own keys."""
        owner = self.owner(self.last_step)
        if owner == self.rank:
            return of_keys
        received = of_keys.new_empty(self.numel(self.rank))
        source = (self.rank + self.last_step) % self.size
        return Transfer(self.group, of_keys, owner, received, source, OF_GRADIENTS).arrived()

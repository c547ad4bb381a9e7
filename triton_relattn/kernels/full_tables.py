"""Tables with a row for every pair of a call, for calls with rel_p2c: their kernels know no keys beyond a table.

They are linear in the lengths, as the inputs are. A clamped table has its end rows many times then, whose gradients are summed;
one that is zero beyond its ends has rows of zeros.
"""

from __future__ import annotations

import torch

from .._core.spec import TABLES, AttentionSpec, AttentionTensors


def with_full_tables(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[AttentionTensors, AttentionSpec]:
    """Return the call with full tables in place of short ones. Waits for a tensor of query_offsets."""
    offsets = (spec.query_offset,)
    if tensors.query_offsets is not None and tensors.query_offsets.numel() > 0:
        offsets = tuple(int(each) for each in tensors.query_offsets.aminmax())
    first = spec._replace(query_offset=max(offsets)).farthest()[0]
    last = spec._replace(query_offset=min(offsets)).farthest()[1]
    if spec.first <= first and last <= spec.last:
        return tensors, spec
    full = spec._replace(first=first, last=max(first, last))
    names = [name for name in TABLES if getattr(tensors, name) is not None]
    return tensors._replace(**{name: _lengthened(getattr(tensors, name), name, spec, full) for name in names}), full


def shortened(gradient: torch.Tensor, name: str, spec: AttentionSpec, full: AttentionSpec) -> torch.Tensor:
    """Return the gradient of a table of spec from that of the full one."""
    if full == spec:
        return gradient
    before, inner, after = _parts(gradient, name, spec, full)
    dim = _rows(name)
    shape = list(gradient.shape)
    shape[dim] = spec.last - spec.first + 1
    total = gradient.new_zeros(shape)
    start = min(max(full.first - spec.first, 0), shape[dim])
    total.narrow(dim, start, inner.shape[dim]).copy_(inner)
    if spec.clamp:
        total.narrow(dim, 0, 1).add_(before.sum(dim, keepdim=True))
        total.narrow(dim, shape[dim] - 1, 1).add_(after.sum(dim, keepdim=True))
    return total


def _rows(name: str) -> int:
    """Return the dimension of a table's rows."""
    return -1 if name == "rel_bias" else -2


def _parts(table: torch.Tensor, name: str, spec: AttentionSpec, full: AttentionSpec) -> tuple[torch.Tensor, ...]:
    """Split a full table into the rows before those of a table of spec, those in common, and those behind."""
    num_rows = full.last - full.first + 1
    before = min(max(spec.first - full.first, 0), num_rows)
    after = min(max(full.last - spec.last, 0), num_rows)
    return table.split((before, num_rows - before - after, after), _rows(name))


def _lengthened(table: torch.Tensor, name: str, spec: AttentionSpec, full: AttentionSpec) -> torch.Tensor:
    dim = _rows(name)
    shape = list(table.shape)
    shape[dim] = full.last - full.first + 1
    long = table.new_zeros(shape)
    before, inner, after = _parts(long, name, spec, full)
    start = min(max(full.first - spec.first, 0), table.shape[dim])
    inner.copy_(table.narrow(dim, start, inner.shape[dim]))
    if spec.clamp:
        before.copy_(table.narrow(dim, 0, 1).expand_as(before))
        after.copy_(table.narrow(dim, table.shape[dim] - 1, 1).expand_as(after))
    return long

"""Where the queries or the keys of some sequences are in a (B, heads, N, width) tensor: rows (sequences, heads, rows, width)."""

from __future__ import annotations

import torch

from .bands import cast, narrow
from .cut import Run


class Slices:
    """Where the rows of sequences of equal lengths are: a view of the tensor."""

    exists = None  # all rows do

    def __init__(self, run: Run, heads: slice, first: int, length: int, stride: int) -> None:
        """first: the row of the first sequence. stride: rows from one sequence to the next, in a packed batch."""
        self.run, self.heads, self.first, self.length, self.stride = run, heads, first, length, stride

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the rows, (sequences, heads, length, width)."""
        run, heads, stop = self.run, self.heads, self.first + self.length
        if not run.is_packed or run.count == 1:
            part = narrow(narrow(tensor, 0, run.entry, run.entry + run.count), 1, heads.start, heads.stop)
            return narrow(part, 2, self.first, stop)
        one = tensor[run.entry, heads, self.first : stop]
        return one.as_strided((run.count, *one.shape), (self.stride * tensor.stride(2), *one.stride()), one.storage_offset())

    def read(self, tensor: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return so many rows, of which those beyond the length are zeros."""
        rows, padding = cast(self.view(tensor), dtype), num_rows - self.length
        return torch.nn.functional.pad(rows, (0, 0, 0, padding)) if padding else rows

    def write(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to the tensor, if they are not its memory."""
        view = self.view(tensor)
        if view.data_ptr() != rows.data_ptr():
            view.copy_(rows[:, :, : self.length])


class Gather:
    """Where the rows of sequences of different lengths are: an index of each."""

    def __init__(self, entry: torch.Tensor, number: torch.Tensor, exists: torch.Tensor, heads: slice) -> None:
        """entry: of each sequence, (sequences, 1). number: of each row, (sequences, length). exists: whether there is one."""
        num_heads = heads.stop - heads.start
        self.entry, self.number, self.exists = entry[..., None], number.masked_fill(~exists, 0)[:, None], exists
        self.heads, self.head = heads, torch.arange(num_heads, device=entry.device)[:, None]
        by_head = exists[:, None].expand(-1, num_heads, -1).flatten()
        self.existing, self.missing = by_head.nonzero()[:, 0], (~by_head).nonzero()[:, 0]

    def _flat(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor's memory as rows, or a copy, and the index of each row, (sequences, heads, length)."""
        width = tensor.shape[3]
        if tensor.stride(3) != 1 or any(step % width for step in tensor.stride()[:3]):
            tensor = tensor.contiguous()
        steps = [step // width for step in tensor.stride()[:3]]
        count = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, steps, strict=False))
        rows = tensor.as_strided((count, width), (width, 1), tensor.storage_offset())
        return rows, self.entry * steps[0] + self.head * steps[1] + self.number * steps[2]

    def read(self, tensor: torch.Tensor, num_rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows, (sequences, heads, num_rows, width), and zeros where there is none."""
        rows, index = self._flat(narrow(tensor, 1, self.heads.start, self.heads.stop))
        rows = rows.index_select(0, index.flatten()).index_fill_(0, self.missing, 0)
        return cast(rows.view(*index.shape, -1), dtype)

    def write(self, tensor: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows that exist to the tensor."""
        tensor = narrow(tensor, 1, self.heads.start, self.heads.stop)
        flat, index = self._flat(tensor)
        rows = rows.reshape(-1, rows.shape[3]).index_select(0, self.existing)
        flat.index_copy_(0, index.flatten().index_select(0, self.existing), cast(rows, tensor.dtype))
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat.view(tensor.shape))

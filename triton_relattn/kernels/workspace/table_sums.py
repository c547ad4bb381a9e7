"""The gradients of tables: the partial sums of programs, what is added to them afterwards, and their total."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from ..._core.dtypes import without_autocast
from ..._core.spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from ..call import Call, Strided, cdiv, strided
from ..config import selection
from ..tile.masking import clamp_margin
from .planning import Plan
from .stored import Layout, queries_apart, rows_of_program


@functools.lru_cache(maxsize=1024)
def _sizes(
    layout: Layout,
    tile: selection.TileConfig,
    is_clamped: bool,
    lengths: tuple[int, int],
    bits: int,
) -> tuple[dict[str, int], dict[str, int], int, int]:
    """Return the margins, how many rows each table has beyond either end, and numbers of blocks of rows and of queries.

    Args:
        tile: of the dtable kernel.
        lengths: numbers of rows and of queries.
        bits: of an element.
    """
    margin = clamp_margin(layout.dq_block_m, layout.dq_block_n) if is_clamped else 0
    of_dkv = clamp_margin(layout.dkv_block_m, layout.dkv_block_n) if is_clamped else 0
    margins = {name: margin + (of_dkv if name == "rel_p2c" else 0) for name in TABLES}
    padding = {name: each + is_clamped for name, each in margins.items()}
    (num_rows, num_queries), apart = lengths, queries_apart(bits)
    row_blocks = cdiv(num_rows + 2 * margin, rows_of_program(tile.block_n, apart))
    return margins, padding, row_blocks, cdiv(num_queries, tile.block_m * apart)


class TableSums:
    """Partial sums (splits, table heads, rows, ...), in float32, of the tables whose gradients are wanted.

    If one program computes all of a gradient, it stores the gradient itself. Keys beyond a clamped table have rows of their own:
    near keys one for each distance (the margins), all far keys one more at either end.

    Attributes:
        per_head: there is a sum for each head.
        adds: programs add to the sums that are there.
        margins: rows beyond either end of each clamped table, one for each distance.
        grid: of the dtable kernel.
    """

    def __init__(
        self,
        call: Call,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        gradients: Mapping[str, torch.Tensor | None],
        tiles: Mapping[str, selection.TileConfig],
        plan: Plan,
    ) -> None:
        self.call, self.spec, self.gradients = call, spec, gradients
        # If any table has a matrix for each head, all get a sum for each head, also those that the heads share.
        tables = {name: table for name in TABLES if (table := getattr(tensors, name)) is not None}
        self.per_head = any(is_per_head(name, table) for name, table in tables.items())
        table_heads = call.heads if self.per_head else 1
        self.num_rows = spec.last - spec.first + 1
        is_clamped, device = call.coverage == "clamp", tensors.query.device
        lengths, bits = (self.num_rows, spec.max_seqlen_q), 8 * tensors.query.element_size()
        sizes = _sizes(plan.layout, tiles["dtable"], is_clamped, lengths, bits)
        self.margins, self.padding, row_blocks, query_blocks = sizes
        # Programs of heads that are not in the workspace have no work.
        programs, units = row_blocks * min(table_heads, plan.items), query_blocks * cdiv(plan.items, table_heads)
        splits = selection.table_splits(device, programs, units)
        self.adds = len(plan.parts) > 1
        self.grid = row_blocks * table_heads, splits

        self.sums, self.partials = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in tables:
            gradient = gradients[name]
            if gradient is None:
                continue
            is_own = is_per_head(name, gradient) == self.per_head
            width = gradient.shape[1 + is_per_head(name, gradient) :]  # rel_bias has none
            if splits == 1 and not is_clamped and is_own and not self.adds:
                self.sums[name] = gradient.view(1, table_heads, self.num_rows, *width)  # there is nothing to add up afterwards
            else:
                shape = (splits, table_heads, self.num_rows + 2 * self.padding[name], *width)
                new = gradient.new_zeros if self.adds else gradient.new_empty
                self.sums[name] = self.partials[name] = new(shape, dtype=torch.float32)

    def partial(self, name: str) -> Strided | None:
        """Return the partial sums of a table as kernels take them; None if its gradient is not wanted."""
        return strided(self.sums.get(name))

    def add_far(
        self,
        key: torch.Tensor,
        d_out: torch.Tensor,
        far_sums: torch.Tensor | None,
        far_kept: torch.Tensor | None,
        far_key_sums: torch.Tensor | None,
    ) -> None:
        """Fill the end rows of a clamped table's partial sums from the dq kernel's sums over far keys, and the dkv kernel's over
        far queries."""
        if self.call.coverage != "clamp":
            return
        with without_autocast(key.device):
            if "rel_key" in self.partials:
                self._fill_ends("rel_key", far_sums, self.call.rel_query, self.spec.rel_scale)
            if "rel_value" in self.partials:
                self._fill_ends("rel_value", far_kept, d_out, self.call.fixed.keep_scale)
            if "rel_bias" in self.partials:
                self._fill_ends("rel_bias", far_sums, None, 1.0)
            if "rel_p2c" in self.partials:
                # A key that no query sees may be NaN; its sums are 0.
                is_far = (far_key_sums != 0).any(2).unflatten(1, (key.shape[1], -1)).any(2)
                keys = key.masked_fill(~is_far[..., None], 0).repeat_interleave(self.call.heads // key.shape[1], 1)
                self._fill_ends("rel_p2c", far_key_sums, keys, self.spec.rel_scale)

    def _fill_ends(self, name: str, sums: torch.Tensor, vectors: torch.Tensor | None, factor: float) -> None:
        """Fill the first and the last row with ``factor * sum_i sums_i vectors_i``, sums [B, H, 2, N], vectors [B, H, N, D]."""
        partial = self.partials[name]
        ends = sums.sum((0, 3)) if vectors is None else torch.einsum("bhsn,bhnd->hsd", sums, vectors.float()) * factor
        if not self.per_head:
            ends = ends.sum(0, keepdim=True)
        for side in (0, -1):  # not [0, -1], a tensor that would have to be copied to the GPU
            partial[1:, :, side] = 0
            partial[0, :, side] = ends[:, side]

    def add_up(self) -> None:
        """Write the gradients: add up the partial sums, and add the rows beyond a clamped table to its end rows."""
        for name, partial in self.partials.items():
            padding, stop = self.padding[name], self.padding[name] + self.num_rows
            total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
            inner = total[:, padding:stop]
            if padding:
                inner[:, 0] += total[:, :padding].sum(1)
                inner[:, -1] += total[:, stop:].sum(1)
            gradient = self.gradients[name]
            shared = gradient.dim() == partial.dim() - 2
            gradient.copy_(inner[0] if shared and not self.per_head else inner.sum(0) if shared else inner)

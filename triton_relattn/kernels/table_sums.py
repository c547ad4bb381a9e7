"""The gradients of tables: the partial sums of programs, what is added to them afterwards, and their total."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._core.spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from . import configs
from .arguments import Call, TableGradients, TableRows, cdiv, strided
from .bwd_dtable_ends import launch_ends
from .walk import clamp_margin
from .words import queries_apart, rows_of_program
from .workspace import Plan


class TableSums:
    """Partial sums (splits, table heads, rows, ...), in float32, of the tables whose gradients are wanted.

    If one program computes all of a gradient, it stores the gradient itself. Keys beyond a clamped table have rows of their own:
    near keys one for each distance (the margins), all far keys one more at either end.

    Attributes:
        arguments, rows, grid: passed to the kernels that compute the sums.
    """

    def __init__(
        self,
        call: Call,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        gradients: Mapping[str, torch.Tensor | None],
        tiles: Mapping[str, configs.TileConfig],
        plan: Plan | None,
    ) -> None:
        self.call, self.spec, self.gradients = call, spec, gradients
        # If any table has a matrix for each head, all get a sum for each head, also those that the heads share.
        tables = {name: table for name in TABLES if (table := getattr(tensors, name)) is not None}
        per_head = any(is_per_head(name, table) for name, table in tables.items())
        table_heads = call.heads if per_head else 1
        self.num_rows = spec.last - spec.first + 1
        is_clamped = call.coverage == "clamp"
        margin = clamp_margin(tiles["dq"].block_m, tiles["dq"].block_n) if is_clamped else 0
        of_dkv = tiles["dkv"].block_m, tiles["dkv"].block_n
        p2c_margin = clamp_margin(*of_dkv) + (0 if plan is None else margin) if is_clamped else 0
        self.padding = {name: (p2c_margin if name == "rel_p2c" else margin) + is_clamped for name in TABLES}
        device = tensors.query.device
        if plan is None:
            row_blocks = cdiv(self.num_rows + 2 * margin, tiles["dtable"].block_n)
            units = call.num_sequences * call.heads // table_heads
            splits = configs.table_splits(device, row_blocks * table_heads, units)
        else:
            tile, apart = tiles["dtable_words"], queries_apart(8 * tensors.query.element_size())
            row_blocks = cdiv(self.num_rows + 2 * margin, rows_of_program(tile.block_n, apart))
            units = cdiv(tensors.query.shape[2], tile.block_m * apart) * cdiv(plan.items, table_heads)
            # Programs of heads that are not in the workspace have no work.
            splits = configs.table_splits(device, row_blocks * min(table_heads, plan.items), units)
        adds = plan is not None and len(plan.parts) > 1
        self.rows = TableRows(per_head, tiles["dq"].block_m, tiles["dq"].block_n, *of_dkv, p2c_margin, adds)
        self.grid = row_blocks * table_heads, splits

        sums, self.partials = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in tables:
            gradient = gradients[name]
            if gradient is None:
                continue
            width = gradient.shape[1 + is_per_head(name, gradient) :]  # rel_bias has none
            if splits == 1 and not is_clamped and is_per_head(name, gradient) == per_head and not adds:
                sums[name] = gradient.view(1, table_heads, self.num_rows, *width)  # there is nothing to add up afterwards
            else:
                shape = (splits, table_heads, self.num_rows + 2 * self.padding[name], *width)
                new = gradient.new_zeros if adds else gradient.new_empty
                sums[name] = self.partials[name] = new(shape, dtype=torch.float32)
        self.arguments = TableGradients(*(strided(sums.get(name)) for name in TABLES))

    def add_far(
        self,
        key: torch.Tensor,
        d_out: torch.Tensor,
        far_sums: torch.Tensor | None,
        far_kept: torch.Tensor | None,
        far_key_sums: torch.Tensor | None,
    ) -> None:
        """Fill the end rows of a clamped table's partial sums from the dq kernel's sums over far keys, and the dkv kernel's."""
        if self.call.coverage != "clamp":
            return
        per_head, wide_index = self.rows.per_head, self.call.shape.wide_index
        ends = (
            ("rel_key", self.call.rel_query, far_sums, self.spec.rel_scale),
            ("rel_value", d_out, far_kept, self.call.fixed.keep_scale),
        )
        for name, vectors, sums, factor in ends:
            if name in self.partials:
                launch_ends(vectors, sums, self.partials[name], factor, per_head, wide_index)
        if "rel_p2c" in self.partials:
            ends_of_keys = (key, far_key_sums, self.partials["rel_p2c"], self.spec.rel_scale, per_head, wide_index)
            launch_ends(*ends_of_keys, self.call.heads // self.call.key_heads)
        if "rel_bias" in self.partials:
            partial = self.partials["rel_bias"]
            both = far_sums.sum((0, 3)) if per_head else far_sums.sum((0, 1, 3))[None]
            for side in (0, -1):  # not [0, -1], a tensor that would have to be copied to the GPU
                partial[1:, :, side] = 0
                partial[0, :, side] = both[:, side]

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
            gradient.copy_(inner[0] if shared and not self.rows.per_head else inner.sum(0) if shared else inner)

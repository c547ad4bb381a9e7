"""The gradients of tables: the partial sums of programs, what is added to them afterwards, and their total."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..._core.dtypes import without_autocast
from ..._core.spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from ..call import Call, cdiv
from ..config import architectures
from ..config.tile_config import TileConfig
from ..operands import Strided, strided
from .planning import Plan
from .stored import program_rows, query_step

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Of the dtable kernel: twice as many as fit, so that short programs fill the gaps that long ones leave."""


def table_splits(device: torch.device, programs: int, shares: int) -> int:
    """Return how many programs share each block of a table's rows: as few as keep the device busy, since each has its own sum.
    programs: blocks of rows of all tables. shares: what the programs of a block share out, blocks of queries of all heads."""
    return max(1, min(shares, PROGRAMS_PER_MULTIPROCESSOR * architectures.multiprocessors(device) // programs))


class TableSums:
    """Partial sums (splits, table heads, rows, ...), in float32, of the tables whose gradients are wanted.

    If one program computes all of a gradient, it stores the gradient itself. Pairs beyond a clamped table were summed for each
    query, or with rel_p2c for each key, and are added to the first and the last row here. Queries beyond a clamped rel_p2c that
    share a tile of the dkv kernel with others have a row for each distance in its partial sums, the margin.

    Attributes:
        per_head: there is a sum for each head.
        adds: programs add to the sums that are there.
        margin: rows of rel_p2c beyond either end.
        grid: of the dtable kernel.
    """

    def __init__(
        self,
        call: Call,
        tensors: AttentionTensors,
        spec: AttentionSpec,
        gradients: Mapping[str, torch.Tensor | None],
        tiles: Mapping[str, TileConfig],
        plan: Plan,
    ) -> None:
        self.call, self.spec, self.gradients = call, spec, gradients
        # If any table has a matrix for each head, all get a sum for each head, also those that the heads share.
        tables = {name: table for name in TABLES if (table := getattr(tensors, name)) is not None}
        self.per_head = any(is_per_head(name, table) for name, table in tables.items())
        table_heads = call.heads if self.per_head else 1
        self.num_rows = spec.last - spec.first + 1
        self.is_clamped = call.coverage == "clamp"
        self.margin = plan.layout.margin
        step = query_step(8 * tensors.query.element_size())
        row_blocks = cdiv(self.num_rows, program_rows(tiles["dtable"].block_n, step))
        query_blocks = cdiv(spec.max_seqlen_q, tiles["dtable"].block_m * step)
        # Programs of heads that are not in the workspace have no work.
        programs, shares = row_blocks * min(table_heads, plan.batch_heads), query_blocks * cdiv(plan.batch_heads, table_heads)
        splits = table_splits(tensors.query.device, programs, shares)
        self.adds = plan.step < plan.batch_key_heads * plan.blocks
        self.grid = (row_blocks * table_heads * splits,)
        self.table_heads, self.splits = table_heads, splits

        self.sums, self.partials = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name in tables:
            gradient = gradients[name]
            if gradient is None:
                continue
            same_heads = is_per_head(name, gradient) == self.per_head
            width = gradient.shape[1 + is_per_head(name, gradient) :]  # rel_bias has none
            if splits == 1 and not self.is_clamped and same_heads and not self.adds:
                self.sums[name] = gradient.view(1, table_heads, self.num_rows, *width)  # there is nothing to add up afterwards
            else:
                shape = (splits, table_heads, self.num_rows + 2 * self.padding(name), *width)
                new = gradient.new_zeros if self.adds else gradient.new_empty
                self.sums[name] = self.partials[name] = new(shape, dtype=torch.float32)

    def key_grid(self, block_m: int) -> tuple[int]:
        """Return the grid of the dp2c kernel: blocks of rows, the margin's among them, of all heads, and the programs of each."""
        return (cdiv(self.num_rows + 2 * self.margin, block_m) * self.table_heads * self.splits,)

    def padding(self, name: str) -> int:
        """Return how many rows the partial sums of a table have beyond either end of it."""
        return self.margin if name == "rel_p2c" else 0

    def partial(self, name: str) -> Strided | None:
        """Return the partial sums of a table as kernels take them; None if its gradient is not wanted."""
        return strided(self.sums.get(name))

    def add_up(
        self,
        key: torch.Tensor,
        d_out: torch.Tensor,
        far_sums: torch.Tensor | None,
        far_probs: torch.Tensor | None,
        far_key_sums: torch.Tensor | None,
    ) -> None:
        """Write the gradients: add up the partial sums, and add to the end rows of a clamped table what lies beyond it: far_sums
        and far_probs, sums of dS and P over keys [B, H, 2, Nq], and far_key_sums, of dS over queries [B, H, 2, Nk]."""
        keys = None
        if far_key_sums is not None:  # a key that no query sees may be NaN; its sums are 0
            is_far = (far_key_sums != 0).any(2).unflatten(1, (key.shape[1], -1)).any(2)
            keys = key.masked_fill(~is_far[..., None], 0).repeat_interleave(self.call.heads // key.shape[1], 1)
        beyond = {
            "rel_key": (far_sums, self.call.rel_query, self.spec.rel_scale),
            "rel_value": (far_probs, d_out, self.call.constants.dropout.keep_scale),
            "rel_bias": (far_sums, None, 1.0),
            "rel_p2c": (far_key_sums, keys, self.spec.rel_scale),
        }
        for name, partial in self.partials.items():
            padding = self.padding(name)
            stop = padding + self.num_rows
            total = partial[0] if partial.shape[0] == 1 else partial.sum(0)
            inner = total[:, padding:stop]
            if padding:
                inner[:, 0] += total[:, :padding].sum(1)
                inner[:, -1] += total[:, stop:].sum(1)
            if self.is_clamped:
                sums, vectors, factor = beyond[name]
                with without_autocast(key.device):
                    ends = sums.sum((0, 3)) if vectors is None else torch.einsum("bhsn,bhnd->hsd", sums, vectors.float()) * factor
                ends = ends if self.per_head else ends.sum(0, keepdim=True)
                inner[:, 0] += ends[:, 0]
                inner[:, -1] += ends[:, 1]
            gradient = self.gradients[name]
            shared = gradient.dim() == partial.dim() - 2
            gradient.copy_(inner[0] if shared and not self.per_head else inner.sum(0) if shared else inner)

"""A call of attention on a grid as the launchers see it: the terms of its queries, and the cut of its keys into tiles."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..._core.dtypes import without_autocast
from ..._core.spec import AttentionSpec, AttentionTensors, GridTensors, grid_terms
from ..call import Call, cdiv, with_aligned_operands, with_positive_scale
from ..config.tile_config import TileConfig
from ..draft import Draft, Slot
from .tile import Cut, Grid

MIN_COLUMNS = 8


class Sums(NamedTuple):
    """Sums of dS and of P that the dq kernel stores per query on the grid."""

    d_rows: Any  # (B, H, strips * height, queries on the grid): over the columns of a strip
    d_columns: Any  # (B, H, queries on the grid, width): over the rows
    p_rows: Any
    p_columns: Any
    corrections: Any  # (B, H, N): exact delta less the rounded one


def best_cut(height: int, width: int, prefix: int, block_n: int) -> Cut:
    """Return how tiles of block_n keys cut a grid: into the fewest tiles, and of such cuts into the widest strips."""
    widths = (MIN_COLUMNS << power for power in range((block_n // MIN_COLUMNS).bit_length()))
    _, _, columns = min((cdiv(width, size) * cdiv(height, block_n // size), -size, size) for size in widths)
    lines = block_n // columns
    return Cut(columns, lines, prefix == width % columns == height % lines == 0)


def store_terms(
    unit: float,
    row_terms: torch.Tensor,
    column_terms: torch.Tensor,
    query: torch.Tensor,
    rel_h: torch.Tensor,
    rel_w: torch.Tensor,
) -> None:
    """Compute the terms of the queries on the grid, times unit, in float32 whatever the inputs: by row (B, H, height, queries on
    the grid), by column (B, H, queries on the grid, width)."""
    with torch.no_grad(), without_autocast(query.device):  # the products are torch's
        by_place = GridTensors(query, query, query, rel_h, rel_w).by_place(query).float()
        by_row, by_column = grid_terms(by_place, unit * rel_h, unit * rel_w)
        row_terms.copy_(by_row.permute(0, 1, 4, 2, 3).flatten(3))
        column_terms.copy_(by_column.flatten(2, 3))


class GridCall(Call):
    """One call. Its kernels get ``key_grid``, tile.Grid, and its CUT, in place of a table's limits."""

    def __init__(
        self, draft: Draft, tensors: GridTensors, scale: float, dropout_p: float, others: Iterable[Slot | None] = ()
    ) -> None:
        """Collect the arguments of a call, as Call does, and compute the terms."""
        query, key, value, rel_h, rel_w, seed, origins = tensors
        spec = AttentionSpec(scale, 1.0, 0, 0, False, -1, -1, 0, query.shape[2], key.shape[2], dropout_p=dropout_p)
        operands = AttentionTensors(query, key, value, dropout_seed=seed, dropout_origins=origins)
        operands, spec = with_positive_scale(draft, operands, spec)
        super().__init__(draft, with_aligned_operands(draft, operands), spec, others, "grid")
        self.limits = {}
        self.prefix, self.height, self.width = tensors.prefix, rel_h.shape[1], rel_w.shape[1]
        batch, heads, num_queries, _ = query.shape
        self.row_terms = draft.new((batch, heads, self.height, num_queries - self.prefix), torch.float32)
        self.column_terms = draft.new((batch, heads, num_queries - self.prefix, self.width), torch.float32)
        unit = -self.common.scaling.bias_scale  # negated: see tile.py
        draft.prepare(partial(store_terms, unit), self.row_terms, self.column_terms, query, rel_h, rel_w)

    def cut(self, block_n: int) -> Cut:
        """Return how tiles of block_n keys cut the grid."""
        return best_cut(self.height, self.width, self.prefix, block_n)

    def strips(self, block_n: int) -> int:
        """Return into how many strips tiles of block_n keys cut the grid."""
        return cdiv(self.width, self.cut(block_n).columns)

    def key_tiles(self, block_n: int) -> int:
        """Return how many tiles of block_n keys there are, as tile.key_blocks counts them."""
        columns, lines, _ = self.cut(block_n)
        return cdiv(cdiv(self.prefix, columns), lines) + cdiv(self.height, lines) * self.strips(block_n)

    def new_sums(self, block_n: int) -> Sums:
        """Allocate the sums of a dq kernel with tiles of block_n keys. 16 bits do for those of P, which correct the others."""
        query, _ = self.inputs.query  # type: ignore[misc]
        batch, heads, height, on_grid = self.row_terms.shape
        shapes = (batch, heads, self.strips(block_n) * height, on_grid), self.column_terms.shape
        probs_dtype = torch.float32 if query.dtype == torch.float32 else torch.float16
        slots = (self.draft.new(shape, dtype) for dtype in (torch.float32, probs_dtype) for shape in shapes)
        return Sums(*slots, self.draft.new(query.shape[:3], torch.float32))

    def launch(self, name: str, kernel: Any, config: TileConfig, programs: tuple[int, ...], **arguments: Any) -> None:
        """Launch a kernel of attention on a grid; see Call.launch."""
        grid = Grid(
            self.row_terms.strided,
            self.column_terms.strided,
            self.height,
            self.width,
            self.prefix or None,
            self.strips(config.block_n),
        )
        super().launch(name, kernel, config, programs, key_grid=grid, CUT=self.cut(config.block_n), **arguments)

"""Backward, last kernel: the gradient of a table from the partial sums of the programs that share it.

If one program computes all of a gradient, it stores the gradient itself, and this kernel does not run. Otherwise dtable_kernel
and dp2c_kernel leave partial sums (splits, table heads, rows, width) in float32, and what lies beyond a clamped table comes from
two other kernels: each program of dq_kernel has sums over its queries, each program of dkv_kernel over its keys, for the first
row and for the last: ``end_rows``, (heads, sequences, blocks, 2, width).

Queries beyond a clamped rel_p2c that share a tile of the dkv kernel with others have a row per distance in its partial sums,
the margin: so many rows before the first and after the last. They also belong to the end rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import triton
import triton.language as tl

from .._core.spec import TABLES, AttentionTensors, is_per_head
from .call import Call, cdiv
from .config.tile_config import TileConfig
from .draft import Slot, Strided
from .workspace.planning import Workspace
from .workspace.stored import program_rows, query_step

PROGRAMS_PER_MULTIPROCESSOR = 8
"""Of the dtable kernel: twice as many as fit, so that short programs fill the gaps that long ones leave."""
CONFIG = TileConfig(32, 128, 8, 1)
"""Of table_gradient_kernel, in whose tiles 32 partial sums meet 128 elements of a gradient. Of an end row there are more sums."""
COLUMNS = 32
"""Elements of an end row that a program computes, so that several share a row."""


@triton.jit
def sum_of_terms(terms, step, num_terms, columns, valid, TERMS: tl.constexpr):
    """Return the sum [N] of so many terms, each ``step`` numbers after the one before, at these columns [N]."""
    total = tl.full([TERMS, columns.shape[0]], 0.0, tl.float32)
    for start in range(0, num_terms, TERMS):
        number = start + tl.arange(0, TERMS)
        pointers = terms + tl.cast(number, tl.int64)[:, None] * step + columns[None, :]
        total += tl.load(pointers, mask=(number < num_terms)[:, None] & valid[None, :], other=0.0)  # [TERMS, N]
    return tl.sum(total, axis=0)  # [TERMS, N] -> [N]


@triton.jit
def add_rows(
    part,
    step,
    num_parts,
    gradient,
    block,
    size,
    margin,
    HAS_ENDS: tl.constexpr,
    WIDTH: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store a block of a head's gradient, of its size elements; without the end rows if these have programs of their own."""
    element = block * BLOCK + tl.arange(0, BLOCK)
    valid = element < size
    if HAS_ENDS:
        valid = valid & (element >= WIDTH) & (element < size - WIDTH)
    total = sum_of_terms(part + margin * WIDTH, step, num_parts, element, valid, TERMS)  # behind the margin
    tl.store(gradient + element, total.to(gradient.dtype.element_ty), mask=valid)  # [BLOCK]


@triton.jit
def add_end_row(
    part,
    part_step,
    num_parts,
    end,
    end_step,
    num_ends,
    gradient,
    side,
    first_column,
    num_rows,
    margin,
    WIDTH: tl.constexpr,
    TERMS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Store COLUMNS of the first row of a head's gradient (side 0), or of the last one. A single row is both."""
    column = first_column + tl.arange(0, COLUMNS)
    valid = (column < WIDTH) & ((side == 0) | (num_rows > 1))
    total = tl.full([COLUMNS], 0.0, tl.float32)
    for SIDE in tl.static_range(2):
        # The rows of parts up to the table's first one, or from its last one on
        first, stop = 0, margin + 1
        if SIDE == 1:
            first, stop = margin + tl.maximum(num_rows - 1, 1), margin + num_rows + margin
        if (side == SIDE) | (num_rows == 1):
            for row in range(first, stop):
                total += sum_of_terms(part + tl.cast(row, tl.int64) * WIDTH, part_step, num_parts, column, valid, TERMS)
            # and the sums of queries or keys beyond the table
            total += sum_of_terms(end + SIDE * WIDTH, end_step, num_ends, column, valid, TERMS)
    row = tl.where(side == 0, 0, num_rows - 1)
    tl.store(gradient + tl.cast(row, tl.int64) * WIDTH + column, total.to(gradient.dtype.element_ty), mask=valid)  # [COLUMNS]


@triton.jit(do_not_specialize=["num_parts", "num_ends", "num_rows", "margin"])
def table_gradient_kernel(
    parts,
    ends,
    gradients,
    num_parts,
    num_ends,
    num_rows,
    margin,
    WIDTH: tl.constexpr,
    TERMS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute gradients [H or 1, R, WIDTH]: the sum of parts [num_parts, H or 1, margin + R + margin, WIDTH], and in the first
    and the last row that of the margins and of ends [num_ends, H or 1, 2, WIDTH], which may be None. parts and ends have two
    strides, between terms and between heads, gradients that between heads.

    Grid: (blocks of a head's R * WIDTH elements * heads of the gradient,), blocks fastest. With ends, the two end rows of a head
    have further blocks, each of COLUMNS.
    """
    size = tl.cast(num_rows, tl.int64) * WIDTH
    num_blocks = tl.cdiv(size, BLOCK)
    # A block of one head's elements, counted through its rows
    if ends is None:
        head, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
        part, gradient = parts[0] + head * parts[1][1], gradients[0] + head * gradients[1][0]
        add_rows(part, parts[1][0], num_parts, gradient, block, size, margin, False, WIDTH, TERMS, BLOCK)
    # With ends, behind these blocks those of the first row, then those of the last
    else:
        NUM_COLUMNS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
        head = tl.program_id(0) // (num_blocks + 2 * NUM_COLUMNS)
        block = tl.program_id(0) % (num_blocks + 2 * NUM_COLUMNS)
        part, gradient = parts[0] + head * parts[1][1], gradients[0] + head * gradients[1][0]
        if block < num_blocks:
            add_rows(part, parts[1][0], num_parts, gradient, block, size, margin, True, WIDTH, TERMS, BLOCK)
        else:
            side, first_column = (block - num_blocks) // NUM_COLUMNS, (block - num_blocks) % NUM_COLUMNS * COLUMNS
            end = ends[0] + head * ends[1][1]
            add_end_row(
                part,
                parts[1][0],
                num_parts,
                end,
                ends[1][0],
                num_ends,
                gradient,
                side,
                first_column,
                num_rows,
                margin,
                WIDTH,
                4 * TERMS,
                COLUMNS,
            )


def table_splits(multiprocessors: int, programs: int, shares: int) -> int:
    """Return how many programs share each block of a table's rows: as few as keep the device busy, since each has its own sum.
    programs: blocks of rows of all tables. shares: what the programs of a block share out, blocks of queries of all heads."""
    return max(1, min(shares, PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // programs))


class TableSums:
    """The sums of which a call's gradients of tables consist, and where kernels store them.

    Attributes:
        per_head: there is a sum per head.
        adds: programs add to the sums that are there.
        grid: of the dtable kernel.
    """

    def __init__(
        self,
        call: Call,
        tensors: AttentionTensors,
        gradients: Mapping[str, Slot | None],
        tiles: Mapping[str, TileConfig],
        workspace: Workspace,
    ) -> None:
        self.call, self.gradients = call, gradients
        # If any table has a matrix per head, all get a sum per head, also those that the heads share.
        tables = {name: table for name in TABLES if (table := getattr(tensors, name)) is not None}
        self.per_head = any(is_per_head(name, table) for name, table in tables.items())
        self.table_heads = call.heads if self.per_head else 1
        self.num_rows = call.spec.last - call.spec.first + 1
        self.margin = workspace.layout.margin
        step = query_step(8 * tensors.query.element_size())
        row_blocks = cdiv(self.num_rows, program_rows(tiles["dtable"].block_n, step))
        query_blocks = cdiv(call.spec.max_seqlen_q, tiles["dtable"].block_m * step)
        # Programs of heads that are not in the workspace have no work.
        programs, batch_heads = row_blocks * min(self.table_heads, workspace.batch_heads), workspace.batch_heads
        shares = query_blocks * cdiv(batch_heads, self.table_heads)
        self.splits = table_splits(call.draft.key.surroundings.multiprocessors, programs, shares)
        self.adds = workspace.step < workspace.batch_key_heads * workspace.blocks
        self.grid = (row_blocks * self.table_heads * self.splits,)

        self.sums, self.parts = dict[str, Slot](), dict[str, Slot]()
        for name in tables:
            gradient = gradients[name]
            if gradient is None:
                continue
            same_heads = is_per_head(name, gradient) == self.per_head
            width = gradient.shape[1 + is_per_head(name, gradient) :]  # rel_bias has none
            if self.splits == 1 and call.coverage != "clamp" and same_heads and not self.adds:  # nothing is to be added up
                shape = (1, self.table_heads, self.num_rows, *width)
                strides = (0, *gradient.strides) if self.per_head else (0, 0, *gradient.strides)
                self.sums[name] = call.draft.view(gradient, shape, strides)
            else:
                shape = (self.splits, self.table_heads, self.num_rows + 2 * self._margin(name), *width)
                self.sums[name] = self.parts[name] = call.draft.temporary(shape, zeroed=self.adds)

    def key_grid(self, block_m: int) -> tuple[int]:
        """Return the grid of the dp2c kernel: blocks of rows, the margin's among them, of all heads, and the programs of each."""
        return (cdiv(self.num_rows + 2 * self.margin, block_m) * self.table_heads * self.splits,)

    def _margin(self, name: str) -> int:
        return self.margin if name == "rel_p2c" else 0

    def partial(self, name: str) -> Strided | None:
        """Return the partial sums of a table as kernels take them; None if its gradient is not wanted."""
        return self.sums[name].strided if name in self.sums else None

    def add_up(self, end_rows: Mapping[str, Slot | None]) -> None:
        """Launch a kernel per gradient that is a sum. end_rows: by table, what lies beyond a clamped one."""
        for name, parts in self.parts.items():
            gradient, ends = self.gradients[name], end_rows.get(name)
            assert gradient is not None
            per_head = is_per_head(name, gradient)
            heads, width = (gradient.shape[0] if per_head else 1), parts.shape[3] if parts.ndim > 3 else 1
            size, rows = self.num_rows * width, parts.shape[2] * width

            # Terms of a gradient that heads share are those of all heads.
            num_parts, strides = parts.shape[0], (parts.shape[1] * rows, rows)
            if not per_head:
                num_parts, strides = parts.shape[0] * parts.shape[1], (rows, 0)
            num_ends, strided_ends = 0, None
            if ends is not None:  # (heads, sequences, blocks, 2, width)
                num_ends = math.prod(ends.shape[1:3]) * (1 if per_head else ends.shape[0])
                strided_ends = ends, (2 * width, num_ends * 2 * width if per_head else 0)
            programs = cdiv(size, CONFIG.block_n) + (0 if ends is None else 2 * cdiv(width, COLUMNS))
            arguments = {
                "parts": (parts, strides),
                "ends": strided_ends,
                "gradients": (gradient, (size,)),
                "num_parts": num_parts,
                "num_ends": num_ends,
                "num_rows": self.num_rows,
                "margin": self._margin(name),
                "WIDTH": width,
                "TERMS": CONFIG.block_m,
                "BLOCK": CONFIG.block_n,
                "COLUMNS": COLUMNS,
            }
            self.call.draft.launch("table_gradient", table_gradient_kernel, CONFIG, (programs * heads,), arguments)

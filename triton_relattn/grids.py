"""Decomposed relative positions: keys on a grid have a vector for their vertical and one for their horizontal distance.

So in MViTv2, ViTDet, SAM and its descendants. Tables are as these models have them, (2 * side - 1, D): the first row belongs to
the key that is farthest below, or to the right of, the query.
"""

from __future__ import annotations

from functools import partial

import torch

from ._core.dropout import draw_dropout, keep_mask, keep_scale
from ._core.dtypes import autocast_dtype, cast, widened, without_autocast
from ._core.spec import GridSpec, GridTensors, grid_terms
from ._core.validation import check_number, check_operand, check_pair, check_probability
from ._core.warn import warn_once
from ._implementations import REFERENCE, choose_implementation
from ._operators import grid_attention

Grid = tuple[int, int]  # height and width
MAX_EMBEDDING_ROWS = 3072
"""Rows whose gradient torch's embedding sums in one kernel on a GPU. With more it sorts them, and on an H100 with torch 2.11 the
gradients of tables of 4,096 and 4,900 did not repeat bit for bit."""


def decomposed_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
    grid: Grid,
    *,
    key_grid: Grid | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """Attention with decomposed relative positions on a grid, in memory linear in the number of positions.

    .. code-block:: text

        logits[i,j] = scale * (q_i . k_j) + q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j]
        out_i       = sum_j dropout(softmax_j(logits))[i,j] * v_j

    Position i is at row y_i = i // width and column x_i = i % width. The terms are not scaled. No (Nq, Nk) tensor is formed,
    neither forward nor backward.

    Args:
        query: (B, H, Nq, D), Nq = height * width. More positions than these come before the grid (class tokens), as many of the
            query as of the key: they have no terms, neither as queries nor as keys.
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        rel_pos_h: the table R_h, (L, D), shared by the heads. L = 2 * height - 1 rows stand for y_i - y_j = -(height - 1) ..
            height - 1. A table of another length is interpolated linearly to that one, as SAM and ViTDet do.
        rel_pos_w: the table R_w, the same for columns.
        grid: height and width of the query's grid.
        key_grid: those of the key's, by default the same. If they differ (pooling in MViTv2), the coordinates of the smaller
            grid are multiplied by the ratio of the sides and differences rounded down, and tables have 2 * (larger side) - 1
            rows.
        dropout_p: dropout probability of the attention weights, as in :func:`fused_relative_attention`.
        scale: factor of q.k, ``D ** -0.5`` by default.
        implementation: ``"triton"`` (kernels) or ``"blockwise"`` (plain torch), which both broadcast terms into blocks of scores,
            or ``"reference"`` (dense). By default triton on a GPU that can run it, else blockwise.

    Returns:
        out (B, H, Nq, Dv) in the dtype of query; differentiable once (with ``"reference"`` any number of times) in query, key,
        value and both tables.

    All tensors share one dtype and device; any strides. Scores and sums are float32 (float64 for float64), also under
    ``torch.autocast``, which casts float32 inputs. Results and gradients repeat bit for bit on the same machine and settings,
    except the gradients of tables that are interpolated on a GPU.

    Raises:
        ValueError: wrong ranks, shapes, devices or values; a grid that does not fit.
        TypeError: wrong types or dtypes.
        NotImplementedError: ``implementation="triton"`` where it cannot run.

    Warns:
        UserWarning: once, the tables have the rows of each other's sides: they, or height and width, are probably exchanged.

    Sources: Li et al., "MViTv2", 2022; Li et al., "Exploring Plain Vision Transformer Backbones for Object Detection", 2022;
    Kirillov et al., "Segment Anything", 2023.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 6 * 4, 16) for _ in range(3))
        >>> rel_pos_h, rel_pos_w = torch.randn(11, 16), torch.randn(7, 16)
        >>> decomposed_relative_attention(q, k, v, rel_pos_h, rel_pos_w, (6, 4)).shape
        torch.Size([1, 2, 24, 16])
    """
    if (dtype := autocast_dtype(query)) is not None:
        query, key, value, rel_pos_h, rel_pos_w = (cast(tensor, dtype) for tensor in (query, key, value, rel_pos_h, rel_pos_w))
    grid, key_grid, scale = _check(query, key, value, rel_pos_h, rel_pos_w, grid, key_grid, scale)
    spec = GridSpec(scale, check_probability("dropout_p", dropout_p))
    chosen = choose_implementation(implementation, query, value)
    if chosen is not REFERENCE:
        # A row of a table belongs to many pairs, the sum of whose gradients is rounded once.
        rel_pos_h, rel_pos_w = widened(rel_pos_h, query), widened(rel_pos_w, query)
    with without_autocast(query.device):
        tensors = GridTensors(query, key, value, *_pair_tables(rel_pos_h, rel_pos_w, grid, key_grid))
        if spec.dropout_p > 0:
            tensors = tensors._replace(**draw_dropout(query, query.shape[0]))
        return _reference(tensors, spec) if chosen is REFERENCE else grid_attention(tensors, spec, chosen)


def append_decomposed_positions(
    query: torch.Tensor,
    key: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
    grid: Grid,
    *,
    key_grid: Grid | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a wider query and key whose product alone is the logits of :func:`decomposed_relative_attention`.

    .. code-block:: text

        query_i = [scale * q_i, q_i . R_h[y_i - 0 .. y_i - (h - 1)], q_i . R_w[x_i - 0 .. x_i - (w - 1)]]
        key_j   = [k_j, one_hot(y_j), one_hot(x_j)]

    With them any attention with ``scale=1.0`` computes decomposed relative positions, also one that takes no bias. It is exact
    and takes D + h + w columns instead of D, h and w being the sides of the key's grid.

    Args:
        query, key, rel_pos_h, rel_pos_w, grid, key_grid, scale: as there.

    Returns:
        query (B, H, Nq, D + h + w) and key (B, H, Nk, D + h + w).

    Raises:
        ValueError, TypeError: as there.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 6 * 4, 16) for _ in range(3))
        >>> wide_q, wide_k = append_decomposed_positions(q, k, torch.randn(11, 16), torch.randn(7, 16), (6, 4))
        >>> torch.nn.functional.scaled_dot_product_attention(wide_q, wide_k, v, scale=1.0).shape
        torch.Size([1, 2, 24, 16])
    """
    grid, key_grid, scale = _check(query, key, key, rel_pos_h, rel_pos_w, grid, key_grid, scale)
    tensors = GridTensors(query, key, key, *_pair_tables(rel_pos_h, rel_pos_w, grid, key_grid))
    prefix, (height, width) = tensors.prefix, key_grid
    row_terms, column_terms = grid_terms(tensors.by_place(query), tensors.rel_h, tensors.rel_w)
    eye = partial(torch.eye, dtype=key.dtype, device=key.device)
    one_hot = torch.cat([eye(height).repeat_interleave(width, 0), eye(width).repeat(height, 1)], 1)
    one_hot = torch.nn.functional.pad(one_hot, (0, 0, prefix, 0)).expand(*key.shape[:2], -1, -1)
    terms = torch.nn.functional.pad(torch.cat([row_terms, column_terms], -1).flatten(2, 3), (0, 0, prefix, 0))
    return torch.cat([scale * query, terms], -1), torch.cat([key, one_hot], -1)


def _pair_tables(table_h: torch.Tensor, table_w: torch.Tensor, grid: Grid, key_grid: Grid) -> tuple[torch.Tensor, torch.Tensor]:
    """Return R_h[y_i - y_j] and R_w[x_i - x_j] of pairs of rows and of pairs of columns, (query side, key side, D)."""
    return _pair_table(table_h, grid[0], key_grid[0]), _pair_table(table_w, grid[1], key_grid[1])


def _pair_table(table: torch.Tensor, query_side: int, key_side: int) -> torch.Tensor:
    """Return the table's row of each pair of coordinates, (query side, key side, D), once it is interpolated to its length."""
    length = 2 * max(query_side, key_side) - 1
    if table.shape[0] != length:
        table = torch.nn.functional.interpolate(table.mT[None], size=length, mode="linear")[0].mT
    # In float32, as the models: where the ratio of the sides is no whole number, its rounding decides on rows.
    query_step, key_step = max(key_side / query_side, 1.0), max(query_side / key_side, 1.0)
    # new_ones of the table, so that these are DTensors if it is one.
    queries, keys = (table.new_ones(side, dtype=torch.int64).cumsum(0) - 1 for side in (query_side, key_side))
    queries, keys = queries[:, None] * query_step, keys[None, :] * key_step
    rows = (queries - keys + (key_side - 1) * key_step).long()
    # An embedding's gradient, unlike that of indexing, is a sum in an order that repeats: on a GPU that of few enough rows.
    parts = [torch.nn.functional.embedding(part, table) for part in rows.split(max(1, MAX_EMBEDDING_ROWS // key_side))]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reference(tensors: GridTensors, spec: GridSpec) -> torch.Tensor:
    """Compute out as :func:`decomposed_relative_attention` defines it, densely."""
    query, key, value, rel_h, rel_w, seed, _ = tensors
    prefix, batch, num_heads = tensors.prefix, *query.shape[:2]
    row_terms, column_terms = grid_terms(tensors.by_place(query), rel_h, rel_w)
    terms = (row_terms[..., :, None] + column_terms[..., None, :]).flatten(4, 5).flatten(2, 3)
    logits = spec.scale * (query @ key.mT) + torch.nn.functional.pad(terms, (prefix, 0, prefix, 0))
    probs = logits.softmax(-1)
    if seed is not None:
        sequence, head, row = (torch.arange(size, device=seed.device) for size in (batch, num_heads, query.shape[2]))
        counters = sequence.view(-1, 1, 1, 1), head.view(-1, 1, 1), row[:, None], slice(0, key.shape[2])
        probs = probs * keep_mask(seed, spec.dropout_p, *counters) * keep_scale(spec.dropout_p)
    return probs @ value


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_pos_h: torch.Tensor,
    rel_pos_w: torch.Tensor,
    grid: Grid,
    key_grid: Grid | None,
    scale: float | None,
) -> tuple[Grid, Grid, float]:
    """Check the arguments of decomposed_relative_attention; return grid, key_grid and scale, with every default filled in."""
    operands, tables = {"query": query, "key": key, "value": value}, {"rel_pos_h": rel_pos_h, "rel_pos_w": rel_pos_w}
    for name, tensor in (operands | tables).items():
        check_operand(name, tensor, query)
    for name, tensor in operands.items():
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (B, H, N, width), got {tuple(tensor.shape)}")
    grid = check_pair("grid", "(height, width)", grid)
    key_grid = grid if key_grid is None else check_pair("key_grid", "(height, width)", key_grid)
    for name, sides in (("grid", grid), ("key_grid", key_grid)):
        if min(sides) < 1:
            raise ValueError(f"{name} must be a height and a width, at least 1 each, got {sides!r}")
    batch, heads, num_queries, width = query.shape
    prefix = num_queries - grid[0] * grid[1]
    if prefix < 0:
        raise ValueError(f"grid {grid} has {grid[0] * grid[1]} positions, more than the {num_queries} of query")
    num_keys = key_grid[0] * key_grid[1] + prefix
    if key.shape != (batch, heads, num_keys, width):
        raise ValueError(
            f"key must have shape {(batch, heads, num_keys, width)}, a key_grid of {key_grid} after {prefix} other positions, "
            f"got {tuple(key.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value must have shape (B, H, Nk, Dv) with {tuple(key.shape[:3])}, got {tuple(value.shape)}")
    for name, table in tables.items():
        if table.dim() != 2 or table.shape[0] < 1 or table.shape[1] != width:
            raise ValueError(f"{name} must have shape (rows, {width}), got {tuple(table.shape)}")
    rows, wanted = [rel_pos_h.shape[0], rel_pos_w.shape[0]], [2 * max(sides) - 1 for sides in zip(grid, key_grid, strict=True)]
    # One of them alone may fit the other side by chance: the tables of a square grid on another one that has its height.
    if not torch.compiler.is_compiling() and rows != wanted and rows == wanted[::-1]:
        warn_once(
            "exchanged tables of a grid",
            f"rel_pos_h and rel_pos_w have {rows[0]} and {rows[1]} rows, but grids of {grid} (query) and {key_grid} (key), "
            f"(height, width), need {wanted[0]} and {wanted[1]}: the tables, or the sides of the grids, seem to be exchanged; "
            "interpolate the tables to these rows if they are not",
            UserWarning,
        )
    if scale is not None:
        scale = check_number("scale", scale, learned="multiply key by it and pass scale=1.0; the terms are not scaled")
    return grid, key_grid, width**-0.5 if scale is None else scale

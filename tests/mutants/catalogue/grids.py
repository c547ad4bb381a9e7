"""Faults in attention on a grid, and in its kernels."""

from __future__ import annotations

from ..fault import Change, Fault

GRIDS, CALLS = "triton_relattn/_blockwise/grids.py", "triton_relattn/grids.py"
SAM = "triton_relattn/integrations/transformers/grid_attention.py"
TESTS = "tests/cpu/test_grids.py"
FORMULA, CUTS = (f"{TESTS}::test_the_formula",), (f"{TESTS}::test_cuts",)
IMAGES = "tests/cpu/test_transformers_images.py"
KERNEL_TILES, FORWARD, DQ, DKV, LAUNCHERS, KERNEL_CALL = (
    f"triton_relattn/kernels/grid/{name}.py" for name in ("tile", "forward", "bwd_dq", "bwd_dkv", "launchers", "call")
)
ON_KERNELS = "tests/interpreter/test_grids.py"


def fault(name: str, effect: str, tests: tuple[str, ...], file: str, old: str, new: str) -> Fault:
    return Fault(f"grid-{name}", effect, tests, (Change(file, old, new),))


def on_kernels(*cases: str, test: str = "test_error_rule", tile: str = "selected-") -> tuple[str, ...]:
    """A test of the kernels, by the names of its cases."""
    return tuple(f"{ON_KERNELS}::{test}[{tile}{case}]" for case in cases)


OF_GRID_KERNELS = (
    fault(
        "kernels-pad-rows-with-keys",
        "columns of a tile beyond the last of the grid are the next row's keys",
        on_kernels("odd sides"),
        KERNEL_TILES,
        " & (tile_n % CUT.columns < strip.columns)",
        "",
    ),
    fault(
        "kernels-lose-the-last-line",
        "the last line of a strip counts as missing",
        on_kernels("odd sides"),
        KERNEL_TILES,
        "(tile_n // CUT.columns < strip.lines - line)",
        "(tile_n // CUT.columns < strip.lines - line - 1)",
    ),
    fault(
        "kernels-lines-follow-without-padding",
        "lines of a tile lie as if rows of the grid were as wide as the tile",
        on_kernels("odd sides"),
        KERNEL_TILES,
        "tile_n // CUT.columns * strip.pitch + tile_n % CUT.columns",
        "tile_n",
    ),
    fault(
        "kernels-forget-keys-before-the-grid",
        "class tokens are no keys",
        on_kernels("class token"),
        KERNEL_TILES,
        "return 0 if grid.prefix is None else -1",
        "return 0",
    ),
    fault(
        "kernels-give-class-tokens-terms",
        "keys before the grid have the terms of its first rows",
        on_kernels("class token"),
        KERNEL_TILES,
        "tl.where(strip.number < 0, 0, strip.lines - line)",
        "strip.lines - line",
    ),
    fault(
        "kernels-terms-of-other-queries",
        "behind class tokens queries have the terms of later ones",
        on_kernels("class token"),
        KERNEL_TILES,
        "return offs_m - grid.prefix, valid_m & (offs_m >= grid.prefix)",
        "return offs_m, valid_m & (offs_m >= grid.prefix)",
    ),
    fault(
        "kernels-rows-of-the-next-tile",
        "terms by row are those of the rows below",
        on_kernels("a window"),
        KERNEL_TILES,
        "start += tl.cast(line, tl.int64) * strides[2]",
        "start += tl.cast(line + 1, tl.int64) * strides[2]",
    ),
    fault(
        "kernels-terms-are-not-in-units-of-scores",
        "terms are scaled as products of queries and keys are",
        on_kernels("scale"),
        KERNEL_CALL,
        "unit * rel_h, unit * rel_w",
        "rel_h, rel_w",
    ),
    fault(
        "kernels-sums-of-the-last-tile",
        "the gradient of terms by column is that of the last tile of a strip",
        on_kernels("a window"),
        DQ,
        "d_columns += d_tile",
        "d_columns = d_tile",
    ),
    fault(
        "kernels-strips-share-sums",
        "strips write their sums over columns to the same place",
        on_kernels("several strips"),
        DQ,
        "row = number * key_grid.height + line",
        "row = line",
    ),
    fault(
        "kernels-rounded-delta-for-rows",
        "the gradient of the table by row has the error of the rounded delta",
        on_kernels("a window", test="test_table_gradients_in_float16", tile="8-"),
        LAUNCHERS,
        "corrections[:, :, None], p_rows, value=-1",
        "corrections[:, :, None], p_rows, value=0",
    ),
    fault(
        "kernels-rounded-delta-for-columns",
        "the gradient of the table by column has the error of the rounded delta",
        on_kernels("a window", test="test_table_gradients_in_float16", tile="8-"),
        LAUNCHERS,
        "corrections[..., None], sums.p_columns, value=-1",
        "corrections[..., None], sums.p_columns, value=0",
    ),
    fault(
        "kernels-rounded-delta-for-keys",
        "the gradient of the key uses the delta of the rounded out",
        (f"{ON_KERNELS}::test_delta_is_exact",),
        DQ,
        "+ offs_m, delta + correction, mask",
        "+ offs_m, delta, mask",
    ),
    fault(
        "kernels-query-stays-negated",
        "with a negative scale the gradient of the query has the other sign",
        on_kernels("negative scale"),
        LAUNCHERS,
        "        d_query.neg_()\n",
        "        d_query.abs()\n",
    ),
    fault(
        "kernels-query-lacks-terms-by-column",
        "the gradient of the query is that of products and terms by row",
        on_kernels("odd sides"),
        LAUNCHERS,
        'on_grid += torch.einsum("bgyxk,xkd->bgyxd"',
        'on_grid + torch.einsum("bgyxk,xkd->bgyxd"',
    ),
    fault(
        "kernels-tiles-beyond-the-grid-are-even",
        "grids whose height is no multiple of a tile's lines count as full",
        on_kernels("a window"),
        KERNEL_CALL,
        "prefix == width % columns == height % lines == 0",
        "prefix == width % 2 == 0",
    ),
    fault(
        "kernels-lanes-disagree",
        "lanes that hold copies of a sum store what each has rounded",
        ("tests/emulator/test_grids.py::test_lanes_agree_in_float32",),
        KERNEL_TILES,
        "lane_consistent(tl.sum(tile, axis=1), CUT.columns)[:, None]",
        "tl.sum(tile, axis=1)[:, None]",
    ),
    fault(
        "kernels-values-miss-dropout",
        "the gradient of the value is that of all probabilities",
        on_kernels("dropout"),
        DKV,
        "probs if call.dropout.seed is None else tl.where(keep, probs, 0.0)",
        "probs",
    ),
    fault(
        "kernels-drop-by-place-in-the-tile",
        "the forward counts keys for dropout from the first of their tile",
        on_kernels("dropout", tile="square-"),
        FORWARD,
        "offs_n = start + rows",
        "offs_n = rows",
    ),
)
OF_GRIDS = (
    *OF_GRID_KERNELS,
    fault(
        "distances-have-the-other-sign",
        "keys above a query take the rows of those below it",
        FORMULA,
        CALLS,
        "(queries - keys + (key_side - 1) * key_step)",
        "(keys - queries + (query_side - 1) * query_step)",
    ),
    fault(
        "ratio-of-the-other-side",
        "coordinates of the larger grid are stretched instead of the smaller one's",
        (*FORMULA, "-k", "pooled"),
        CALLS,
        "query_step, key_step = max(",
        "key_step, query_step = max(",
    ),
    fault(
        "interpolation-meets-the-ends",
        "tables of another length are stretched from end to end",
        (*FORMULA, "-k", "tables"),
        CALLS,
        'mode="linear")',
        'mode="linear", align_corners=True)',
    ),
    fault(
        "sums-of-pairs-are-rounded-on-the-way",
        "the gradient of a 16-bit table is summed up in 16 bits",
        (f"{TESTS}::test_error_rule",),
        CALLS,
        "each.to(compute_dtype(query.dtype)) for each",
        "each for each",
    ),
    fault(
        "appended-terms-are-scaled",
        "the further columns of the query are scaled as the others",
        (*FORMULA, "-k", "appended"),
        CALLS,
        "torch.cat([scale * query, of_rows, of_columns], -1)",
        "scale * torch.cat([query, of_rows, of_columns], -1)",
    ),
    fault(
        "columns-lie-along-rows",
        "on square grids a key's row and column are taken for one another",
        (*FORMULA, "-k", "square"),
        GRIDS,
        "torch.add(of_rows[..., None], of_columns[:, :, None],",
        "torch.add(of_rows[:, :, None], of_columns[..., None],",
    ),
    fault(
        "blocks-forget-the-class-token",
        "a block reads and writes queries that stand before its own",
        (*FORMULA, "-k", "class"),
        GRIDS,
        "                start = prefix + row.start * width + column.start\n                stop = prefix + ",
        "                start = row.start * width + column.start\n                stop = ",
    ),
    fault(
        "class-tokens-get-what-is-left",
        "scores of class tokens as keys are added to what the block before left there",
        (*FORMULA, "-k", "class"),
        GRIDS,
        "            scores[:, :, : self.tensors.prefix] = 0\n",
        "",
    ),
    fault(
        "table-gradient-of-the-last-block",
        "blocks of other heads overwrite what a table's gradient has",
        CUTS,
        GRIDS,
        "total[place] += torch.einsum",
        "total[place] = torch.einsum",
    ),
    fault(
        "key-gradient-is-not-scaled",
        "the gradient of the key lacks the factor of q.k",
        FORMULA,
        GRIDS,
        "d_scores.mT, query, alpha=call.scale)",
        "d_scores.mT, query)",
    ),
    fault(
        "query-gradient-is-scaled-too-late",
        "terms of the query's gradient are scaled as q.k is",
        FORMULA,
        GRIDS,
        "d_terms, table))",
        "d_terms, table).mul_(call.scale))",
    ),
    fault(
        "dropout-counts-heads-of-all-sequences",
        "from the second sequence on, other probabilities are dropped",
        CUTS,
        GRIDS,
        "heads % self.num_heads, queries",
        "heads, queries",
    ),
    fault(
        "values-miss-dropout-in-the-backward",
        "the gradient of the values is that of all probabilities",
        CUTS,
        GRIDS,
        "(probs if factors is None else probs * factors).mT, rows)",
        "probs.mT, rows)",
    ),
    fault(
        "sam-drops-in-evaluation",
        "an enabled SAM has dropout when it does not train",
        (f"{IMAGES}::test_dropout_is_eagers", "tests/cpu/test_transformers.py::test_other_settings"),
        SAM,
        "self.dropout if self.training and self.drops else 0.0",
        "0.5",
    ),
    fault(
        "sams-sdpa-drops",
        "dropout where the stock class for sdpa has none",
        (f"{IMAGES}::test_dropout_is_eagers",),
        SAM,
        "self.training and self.drops",
        "self.training",
    ),
)

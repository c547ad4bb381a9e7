"""Faults in attention on a grid."""

from __future__ import annotations

from ..fault import Change, Fault

GRIDS, CALLS = "triton_relattn/_blockwise/grids.py", "triton_relattn/grids.py"
SAM = "triton_relattn/integrations/transformers/grid_attention.py"
TESTS = "tests/cpu/test_grids.py"
FORMULA, CUTS = (f"{TESTS}::test_the_formula",), (f"{TESTS}::test_cuts",)
IMAGES = "tests/cpu/test_transformers_images.py"


def fault(name: str, effect: str, tests: tuple[str, ...], file: str, old: str, new: str) -> Fault:
    return Fault(f"grid-{name}", effect, tests, (Change(file, old, new),))


OF_GRIDS = (
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

"""What version 0.3.0 removed, and what to use instead: modules and names in them, arguments, values of arguments."""

from __future__ import annotations

from typing import NoReturn

_FLOAT64 = 'forward_backward with inputs.to(torch.float64) and implementation="reference" returns the golden results'
_OWN_TABLES = "python -m triton_relattn check compares tables' gradients; assert_within_budget serves other implementations"

NAMES = {
    "triton_relattn.integrations": {
        "arguments": "its constants are in triton_relattn.integrations.replacement and .enabled",
        "fairseq2": "fairseq2 is archived; call fused_relative_attention in its place (docs/models.md)",
        "known": "versions of libraries are no longer compared, triton_relattn.enable compares each module itself",
        "proof": "triton_relattn.enable compares each module itself, and its report has the differences",
        "small": "its models were only there for proofs",
    },
    "triton_relattn.integrations.structure": {
        "replacement_of": "enabled_class returns the class for a kind, a stock class and a layout"
    },
    "triton_relattn.integrations.transformers": {"small": "its models were only there for proofs"},
    "triton_relattn.merging": {
        "Pair": "merge_attention takes out1, lse1, out2, lse2",
        "merged": "merge_attention merges two results, and more of them one after the other",
    },
    "triton_relattn.plots": {
        "mean_by_distance": "attention_terms has the probabilities, attention_by_distance draws their means"
    },
    "triton_relattn.testing": {
        **dict.fromkeys(("DenseGradients", "dense_gradients"), _FLOAT64),
        **dict.fromkeys(("table_gradient_budget", "assert_table_gradient"), _OWN_TABLES),
        **dict.fromkeys(
            ("float32_gradient_budget", "assert_gradients_close_fp32"), "assert_within_budget serves float32 as well"
        ),
        **dict.fromkeys(("in_memory_order", "with_different_strides"), "strides of an Inputs are kept: make those you need"),
    },
}
ARGUMENTS = {
    "exact_query_grad": "the gradient of query is always as exact as those of the tables",
    "prove": "every module is compared before it is replaced; check_calls=False only leaves out the comparison of calls",
}
METHODS = {"ring": "'gather' takes all of its calls"}


def removed(what: str, instead: str) -> str:
    """Return the text of an error."""
    return f"{what} was removed in 0.3.0: {instead}"


def refuse(package: str, name: str) -> NoReturn:
    """Raise ImportError for a name that 0.3.0 removed (``from`` would drop the text of an AttributeError), else
    AttributeError."""
    if instead := NAMES.get(package, {}).get(name):
        raise ImportError(removed(f"{package}.{name}", instead), name=f"{package}.{name}")
    raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)

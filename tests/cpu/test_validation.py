"""The contract of a call: a wrong one raises, names the argument and, where it can, the cure."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_relattn
from tests.tolerance import assert_same
from triton_relattn import (
    can_run_triton,
    distributed,
    fused_relative_attention,
    fused_relative_attention_varlen,
    merge_attention,
    plots,
    tables,
)
from triton_relattn._core import names, removed
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.testing import make_inputs

from .small_call import CAUSAL, LAYOUT, Changes, Positions, call, call_varlen, lengths, meta, qkv, refused, zeros

Wrong = tuple[Changes, type[Exception], str]


def learned() -> torch.Tensor:
    return torch.nn.Parameter(zeros(()))


GQA: Changes = {"enable_gqa": True}
SWAPPED = {"query": zeros(2, 5, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4)}
SHARED = {"query": zeros(2, 8, 2, 8), "key": zeros(2, 6, 1, 8), "value": zeros(2, 6, 1, 4)}
WRONG: dict[str, Wrong] = {
    # Tensors of positions.
    "query_rank": ({"query": zeros(3, 5, 8)}, ValueError, "query must have 4 dimensions | (3, 5, 8)"),
    "key_batch": ({"key": zeros(1, 3, 7, 8)}, ValueError, "key | (2, 3, 7, 8) | (1, 3, 7, 8)"),
    "key_heads": ({"key": zeros(2, 1, 7, 8)}, ValueError, "query's 3 heads | got 1 in (2, 1, 7, 8) | enable_gqa=True"),
    "key_heads_do_not_divide": ({**GQA, **qkv(2, 3, 5, 7, 2)}, ValueError, "multiple of key's | got 3 and 2"),
    "gqa_int": ({"enable_gqa": 1}, TypeError, "enable_gqa must be a bool, got 1"),
    "value_length": ({"value": zeros(2, 3, 6, 4)}, ValueError, "value | (2, 3, 7, 4) | (2, 3, 6, 4)"),
    "value_without_width": ({"value": zeros(2, 3, 7, 0)}, ValueError, "widths must be positive | 0 (value)"),
    "key_type": ({"key": None}, TypeError, "key must be a torch.Tensor, got NoneType"),
    "query_dtype": ({"query": zeros(2, 3, 5, 8, dtype=torch.int64)}, TypeError, "query must be float16 | torch.int64"),
    "key_dtype": ({"key": zeros(2, 3, 7, 8).half()}, TypeError, "key | torch.float32 | torch.float16"),
    "nested": (
        {"query": torch.nested.nested_tensor([zeros(3, 5, 8)])},
        TypeError,
        "query must be a strided tensor, got a nested",
    ),
    # Tables.
    "table_dtype": ({"rel_key": zeros(9, 8).bfloat16()}, TypeError, "rel_key | torch.float32 | torch.bfloat16"),
    "table_width": ({"rel_key": zeros(9, 4)}, ValueError, "rel_key | width = 8 | (9, 4)"),
    "table_without_rows": ({"rel_key": zeros(0, 8)}, ValueError, "rel_key | R >= 1 | (0, 8)"),
    "value_table_width": ({"rel_value": zeros(9, 8)}, ValueError, "rel_value | width = 4 | (9, 8)"),
    "bias_heads": ({"rel_bias": zeros(2, 9)}, ValueError, "rel_bias | (3, 9) | (2, 9)"),
    "bias_dtype": ({"rel_bias": zeros(9).double()}, TypeError, "rel_bias | torch.float32 | torch.float64"),
    "p2c_width": ({"rel_query": zeros(2, 3, 5, 6), "rel_key": zeros(9, 6), "rel_p2c": zeros(9, 6)}, ValueError, "rel_p2c | = 8"),
    "p2c_rows": ({"rel_p2c": zeros(7, 8)}, ValueError, "rel_p2c must have the same number of rows R as rel_key, 9, got 7"),
    "rows_differ": ({"rel_value": zeros(11, 4)}, ValueError, "must have the same number of rows R as rel_key, 9, got 11"),
    "rel_query_length": ({"rel_query": zeros(2, 3, 7, 8)}, ValueError, "rel_query | (2, 3, 5, 8) | (2, 3, 7, 8)"),
    "rel_query_width": ({"rel_query": zeros(2, 3, 5, 6)}, ValueError, "rel_key | width = 6 | (9, 8)"),
    "rel_query_without_width": ({"rel_query": zeros(2, 3, 5, 0)}, ValueError, "widths must be positive | 0 (rel_query)"),
    "rel_query_alone": ({"rel_key": None, "rel_p2c": zeros(9, 8), "rel_query": zeros(2, 3, 5, 8)}, ValueError, "needs rel_key"),
    # Positions.
    "even_table": ({"rel_key": zeros(10, 8)}, ValueError, "even number of rows (10) | positions=RelativePositions(first, last)"),
    "too_few_rows": ({"positions": Positions(-5, 5)}, ValueError, "positions from -5 to 5 need 11 rows | R = 9"),
    "positions_alone": ({"rel_key": None, "positions": Positions(-4, 4)}, ValueError, "positions | no table"),
    "not_covered": ({"positions": Positions(-4, 4, "error")}, ValueError, 'from -4 to 4 | needs -4 to 6 | outside="error"'),
    "offset_huge": ({"query_offset": 2**63}, ValueError, "query_offset must lie within +-2**29, got 9223372036854775808"),
    "offsets_shape": ({"query_offset": lengths([1, 2, 3])}, ValueError, "query_offset | (batch,) = (2,) | (3,)"),
    # What is visible.
    "mask_dtype": ({"attn_mask": zeros(5, 7).half()}, TypeError, "attn_mask must be bool | torch.float32 | torch.float16"),
    "mask_shape": ({"attn_mask": zeros(7, 5)}, ValueError, "attn_mask must broadcast | (2, 3, 5, 7) | (7, 5)"),
    "mask_gradient": ({"attn_mask": zeros(5, 7, requires_grad=True)}, ValueError, "attn_mask is not differentiable | rel_bias"),
    "causal_int": ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    "window_none": ({"window_size": (None, 0)}, TypeError, "a pair (left, right), where -1 means no limit, got (None, 0)"),
    "window_negative": ({"window_size": (-2, 3)}, ValueError, "window_size | at least -1 | (-2, 3)"),
    "window_huge": ({"window_size": (3, 2**31)}, ValueError, "window_size must lie within +-2**29, got 2147483648"),
    "lengths_negative": ({"key_lengths": lengths([-1, 7])}, ValueError, "[0, 7] | from -1 to 7"),
    "lengths_beyond": ({"key_lengths": lengths([3, 8])}, ValueError, "[0, 7] | from 3 to 8"),
    # Numbers.
    "scale_huge": ({"scale": 1e300}, ValueError, "scale must be finite, got 1e+300 | float32 ends at"),
    "scale_tensor": ({"scale": zeros(())}, TypeError, "scale must be a float, got a tensor; .item() reads its value"),
    "rel_scale_nan": ({"rel_scale": math.nan}, ValueError, "rel_scale must be finite, got nan"),
    "rel_scale_alone": ({"rel_key": None, "rel_scale": 1.0}, ValueError, "rel_scale | rel_key and rel_p2c, which are None"),
    "dropout_negative": ({"dropout_p": -0.1}, ValueError, "dropout_p must lie in [0, 1], got -0.1"),
    "softcap_zero": ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0 | softcap=None means no limit"),
    "softcap_tiny": ({"softcap": 1e-46}, ValueError, "softcap must be positive, got 1e-46"),  # rounds to 0 in float32
    "implementation": ({"implementation": "flash"}, ValueError, "('triton', 'blockwise', 'reference') | got 'flash'"),
    # Errors that name a fix, because the fixed call is valid.
    "learned_scale": ({"scale": learned()}, TypeError, "multiply query by it, with rel_query and rel_p2c | scale=1.0"),
    "learned_scale_of_content": (
        {"scale": learned(), "rel_scale": 1.0},
        TypeError,
        "pass the unscaled query as rel_query, and scale=1.0",
    ),
    "learned_rel_scale": ({"rel_scale": learned()}, TypeError, "multiply rel_key and rel_p2c by it, and pass rel_scale=1.0"),
    "learned_softcap": ({"softcap": learned()}, TypeError, "softcap must be a float and has no gradient | with dense attention"),
    "mask_as_table": ({"rel_key": zeros(5, 7, dtype=torch.bool)}, TypeError, "rel_key must be float16 | attn_mask=..."),
    "padding_as_table": ({"rel_key": zeros(2, 1, 1, 7)}, ValueError, "rel_key must have shape | attn_mask=..."),
    "layout": (SWAPPED, ValueError, f"key must have query's 5 heads, got 7 | {LAYOUT}"),
    "layout_of_groups": ({**GQA, **SHARED}, ValueError, f"query's heads must be a multiple of key's | got 8 and 6 | {LAYOUT}"),
    "layout_of_table": ({**qkv(2, 7, 3), "rel_key": zeros(3, 9, 8)}, ValueError, f"rel_key | = (7, 9, 8) | {LAYOUT}"),
    "layout_of_mask": ({**qkv(2, 7, 3), "attn_mask": zeros(7, 7)}, ValueError, f"attn_mask must broadcast | {LAYOUT}"),
    "layout_of_lengths": ({**qkv(2, 7, 3), "key_lengths": lengths([7, 5])}, ValueError, f"must lie in [0, 3] | {LAYOUT}"),
    "embedding": ({"rel_key": torch.nn.Embedding(9, 8)}, TypeError, "rel_key | got Embedding | rel_key=module.weight"),
    "positions_tuple": ({"positions": (-4, 4)}, TypeError, "got tuple | positions=RelativePositions(-4, 4)"),
    "rows_first": ({"rel_key": zeros(9, 3, 8)}, ValueError, "got (9, 3, 8) | rel_key.transpose(0, 1) is (heads, R, width)"),
    "heads_joined": ({"rel_key": zeros(9, 24)}, ValueError, "got (9, 24) | rel_key.unflatten(1, (3, -1)).transpose(0, 1) is"),
    "transposed": ({"rel_key": zeros(8, 9)}, ValueError, "got (8, 9) | rel_key.mT is (R, width)"),
    "heads_transposed": ({"rel_key": zeros(3, 8, 9)}, ValueError, "got (3, 8, 9) | rel_key.mT is (heads, R, width)"),
    "batch_of_tables": ({"rel_key": zeros(2, 3, 9, 8)}, ValueError, "(2, 3, 9, 8) | rel_key[0] is one, which the batch shares"),
    "batch_of_joined": (
        {"rel_key": zeros(1, 9, 24)},
        ValueError,
        "rel_key[0].unflatten(1, (3, -1)).transpose(0, 1) is (heads, R",
    ),
    "batch_and_rows_first": ({"rel_key": zeros(1, 9, 3, 8)}, ValueError, "rel_key[0].transpose(0, 1) is (heads, R, width)"),
    "batch_of_biases": ({"rel_bias": zeros(1, 3, 9)}, ValueError, "rel_bias looks like a batch of tables; rel_bias[0] is one"),
    "bias_transposed": ({"rel_bias": zeros(9, 3)}, ValueError, "rel_bias looks like (R, heads); rel_bias.mT is (heads, R)"),
    "bias_of_pairs": (
        {"rel_key": None, "rel_bias": zeros(1, 3, 5, 7, requires_grad=True)},
        ValueError,
        "per distance, not per pair | t5_buckets | scale=1.0; a bias per pair is attn_mask, without a gradient, or scaled_dot",
    ),
    "bias_as_table": ({"rel_key": zeros(3, 9)}, ValueError, "a bias by distance, (R,) or (heads, R), is rel_bias"),
    "weight_of_t5": ({"rel_key": None, "rel_bias": zeros(32, 3)}, ValueError, "got (32, 3) | rel_bias=weight[tables.t5_buckets("),
    "slopes": (
        {"rel_key": None, "rel_bias": lengths([0.5, 0.25])[:, None].expand(2, 2).reshape(4), **qkv(2, 4, 7)},
        ValueError,
        "positions must be given | an even number of rows (4) | tables.alibi_bias(slopes, first, last)",
    ),
    "number_of_rows": ({"positions": 9}, TypeError, "got int; positions=RelativePositions.centred(9)"),
    "farthest_distance": ({"positions": 4}, TypeError, "got int; positions=RelativePositions(-4, 4)"),
    "other_dtype_of_table": ({"rel_key": zeros(9, 8).double()}, TypeError, "rel_key.to(query.dtype), or torch.autocast"),
    "other_dtype_of_value": ({"value": zeros(2, 3, 7, 4).half()}, TypeError, "value.to(query.dtype), or torch.autocast"),
    "half_of_the_rows": ({"positions": Positions.centred(5)}, ValueError, "need 5 rows | positions=RelativePositions.centred(9)"),
    "mask_of_entries": ({"attn_mask": zeros(2, 1, 7, dtype=torch.bool)}, ValueError, "attn_mask[:, None] is one mask per batch"),
    "padding_mask": ({"attn_mask": zeros(2, 7)}, ValueError, "attn_mask[:, None, None] is one mask per batch entry"),
    "mask_of_a_tokenizer": ({"attn_mask": zeros(2, 7, dtype=torch.int64)}, TypeError, "attn_mask[:, None, None].bool() is one"),
    "integers_of_entries": ({"attn_mask": zeros(2, 5, 7, dtype=torch.int64)}, TypeError, "attn_mask[:, None].bool() is one"),
    "mask_of_integers": ({"attn_mask": zeros(2, 1, 5, 7, dtype=torch.uint8)}, TypeError, "attn_mask.bool() is True where"),
    "list_of_lengths": ({"key_lengths": [7, 5]}, TypeError, "key_lengths=torch.tensor([7, 5], device=query.device)"),
    "one_length": ({"key_lengths": 5}, TypeError, "got int; key_lengths=torch.tensor(5, device=query.device)"),
    "list_of_offsets": ({"query_offset": [2, 1]}, TypeError, "query_offset=torch.tensor([2, 1], device=query.device)"),
    "shares_as_lengths": (
        {"key_lengths": lengths([1.0, 0.5])},
        TypeError,
        "key_lengths.int(), or, | (key_lengths * 7).round().int()",
    ),
    "mask_as_lengths": ({"key_lengths": zeros(2, 7, dtype=torch.bool)}, TypeError, "key_lengths.sum(1) counts the keys"),
    "integers_as_lengths": ({"key_lengths": zeros(2, 7, dtype=torch.int64)}, ValueError, "got (2, 7); key_lengths.sum(1) counts"),
    # Names of other libraries.
    "max_distance": ({"max_distance": 4}, TypeError, "here it is positions=RelativePositions(-d, d) | 2 d + 1 rows"),
    "num_buckets": ({"num_buckets": 32}, TypeError, "here it is rel_bias=weight[tables.t5_buckets("),
    "causal": ({"causal": None}, TypeError, "fused_relative_attention() got an unexpected | 'causal'; here it is is_causal"),
    "cu_seqlens_q": ({"cu_seqlens_q": None}, TypeError, "fused_relative_attention_varlen has it"),
    "deterministic": ({"deterministic": None}, TypeError, "there is none here: results repeat bit for bit, except"),
    "exact_query_grad": ({"exact_query_grad": True}, TypeError, "'exact_query_grad'; it was removed in 0.3.0: the gradient of"),
    "a_slip": ({"is_causl": None}, TypeError, "did you mean 'is_causal'?"),
    "unknown": ({"colour": None}, TypeError, "unexpected keyword argument 'colour'"),
}
WRONG_PACKED: dict[str, Wrong] = {
    "query_rank": ({"query": zeros(1, 5, 3, 8)}, ValueError, "query must have 3 dimensions | (total, heads, width)"),
    "key_heads": ({"key": zeros(7, 1, 8)}, ValueError, "query's 3 heads | got 1 in (7, 1, 8)"),
    "value_length": ({"value": zeros(6, 3, 4)}, ValueError, "value | (7, 3, 4) | (6, 3, 4)"),
    "k_type": ({"cu_seqlens_k": None}, TypeError, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    "q_rank": ({"cu_seqlens_q": lengths([[0, 2, 2, 5]])}, ValueError, "cu_seqlens_q | (1, 4)"),
    "q_start": ({"cu_seqlens_q": lengths([1, 2, 2, 5])}, ValueError, "rise from 0 to the total length 5 | [1, 2, 2, 5]"),
    "q_end": ({"cu_seqlens_q": lengths([0, 2, 2, 4])}, ValueError, "cu_seqlens_q must rise from 0 | 5 | [0, 2, 2, 4]"),
    "k_falling": ({"cu_seqlens_k": lengths([0, 4, 3, 7])}, ValueError, "cu_seqlens_k must rise | [0, 4, 3, 7]"),
    "numbers_differ": ({"cu_seqlens_k": lengths([0, 4, 7])}, ValueError, "cu_seqlens_k | (4,) | (3,)"),
    "q_longer": ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q must be at least 3 | cu_seqlens_q | got 2"),
    "k_longer": ({"max_seqlen_k": 1}, ValueError, "max_seqlen_k must be at least 4 | cu_seqlens_k | got 1"),
    "negative": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must not be negative, got -1"),
    "max_float": ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k must be an int, got 4.0"),
    "max_tensor": ({"max_seqlen_k": lengths(4)}, TypeError, "max_seqlen_k must be an int, got a tensor; .item() reads"),
    "offsets": ({"query_offset": lengths([1, 2])}, ValueError, "query_offset | (batch,) = (3,) | (2,)"),
    "lengths_of_sequences": (
        {"cu_seqlens_q": lengths([2, 0, 3]), "cu_seqlens_k": lengths([4, 1, 2])},
        ValueError,
        "got [2, 0, 3]; cu_seqlens are 0 and lengths added up, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))",
    ),
    "lengths_behind_0": (
        {"cu_seqlens_q": lengths([0, 2, 0, 3]), "cu_seqlens_k": lengths([0, 4, 1, 2])},
        ValueError,
        "got [0, 2, 0, 3]; cu_seqlens are lengths added up, .cumsum(0)",
    ),
    "a_batch": (
        {"query": zeros(1, 5, 3, 8), "key": zeros(1, 7, 3, 8), "value": zeros(1, 7, 3, 4)},
        ValueError,
        "(1, 5, 3, 8); .flatten(0, 1) packs (batch, length, heads, width)",
    ),
    "layout": (
        {"query": zeros(3, 5, 8), "key": zeros(3, 7, 8), "value": zeros(3, 7, 4)},
        ValueError,
        "key must have query's 5 heads | .transpose(0, 1) makes them (total, heads, width)",
    ),
    "layout_of_starts": (
        {"query": zeros(3, 5, 8), "key": zeros(3, 5, 8), "value": zeros(3, 5, 4), "cu_seqlens_k": lengths([0, 2, 2, 5])},
        ValueError,
        "rise from 0 to the total length 3 | .transpose(0, 1) makes them (total, heads, width)",
    ),
    "not_covered": ({"positions": Positions(-4, 4, "error"), "query_offset": 3}, ValueError, "from -4 to 4 | needs -5 to 0"),
    "mask": ({"attn_mask": None}, TypeError, "_varlen() got | 'attn_mask'; fused_relative_attention has it"),
    "max_seqlen": ({"max_seqlen": 3}, TypeError, "_varlen() got | 'max_seqlen'; did you mean 'max_seqlen_"),
    "triton": ({"implementation": "triton"}, NotImplementedError, 'implementation="triton" cannot run here'),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case: str) -> None:
    """The error has the argument's name and the bad value; it comes before any warning and before drawing numbers for dropout."""
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(call, {"dropout_p": 0.5, **WRONG[case][0]}, *WRONG[case][1:])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("case", WRONG_PACKED)
def test_wrong_packed_calls(case: str) -> None:
    refused(call_varlen, *WRONG_PACKED[case])


STRANGE: dict[str, Any] = {
    "a list": [[1.0]],
    "a number": 0.5,
    "text": "8",
    "a module": torch.nn.Embedding(9, 8),
    "no dimensions": zeros(()),
    "no elements": zeros(0),
    "five dimensions": zeros(1, 1, 1, 3, 9),
    "complex": zeros(2, dtype=torch.complex64),
    "integers": zeros(2, 3, 9, dtype=torch.int64),
    "sparse": zeros(9, 8).to_sparse(),
    "jagged": torch.nested.nested_tensor([zeros(3, 8)], layout=torch.jagged),
    "on another device": meta(2, 3, 7, 8),
}
TENSORS = [*("key", "value", *DIFFERENTIABLE[3:], "positions"), *("query_offset", "attn_mask", "key_lengths")]


@pytest.mark.parametrize("name", [*TENSORS, "cu_seqlens_q", "cu_seqlens_k"])
def test_strange_arguments(name: str) -> None:
    """For any value of any argument, the error names the argument and does not come from torch or from the search for a hint."""
    for what, strange in STRANGE.items():
        if (name, what) == ("attn_mask", "no dimensions"):  # broadcasts
            continue
        with pytest.raises((TypeError, ValueError)) as raised:
            (call_varlen if "cu_seqlens" in name else call)(**{name: strange})
        assert re.match(rf"{name} (must|needs)", str(raised.value)), (what, raised.value)


def test_too_many_positional_arguments() -> None:
    inputs = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0)
    with pytest.raises(TypeError, match=r"takes query, key, value, rel_key by position, .* attn_mask=.*; got 5 positional"):
        fused_relative_attention(*inputs[:4], zeros(5, 7))  # type: ignore[call-overload]


def test_names_of_other_libraries() -> None:
    """Each error gives the name used here, and every name it mentions exists."""
    for name, here in names.OTHER_NAMES.items():
        refused(call, {name: None}, TypeError, f"unexpected keyword argument {name!r}; here it is {here}")
        assert all(hasattr(tables, function) for function in re.findall(r"tables\.(\w+)", here)), here
        assert all(hasattr(triton_relattn, function) for function in re.findall(r"of (fused_\w+)", here)), here


OTHERS: dict[str, tuple[Any, Changes, type[Exception], str]] = {
    "results_first": (
        merge_attention,
        {"out1": zeros(2, 5, 4), "lse1": zeros(2, 5, 4), "out2": zeros(2, 5), "lse2": zeros(2, 5)},
        ValueError,
        "got (2, 5, 4), (2, 5, 4), (2, 5), (2, 5); the order is out1, lse1, out2, lse2",
    ),
    "a_name_for_a_picture": (
        plots.attention_terms,
        {"query": zeros(2, 3, 5, 8), "key": zeros(2, 3, 5, 8), "causal": True},
        TypeError,
        "'causal'; here it is is_causal",
    ),
    "a_name_for_ranks": (distributed.fused_relative_attention, {**qkv(2, 3, 5), "mask": None}, TypeError, "here it is attn_mask"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_wrong_calls_of_other_functions(case: str) -> None:
    refused(*OTHERS[case])


REMOVED = [(package, name) for package, entries in removed.NAMES.items() for name in entries]


@pytest.mark.parametrize(("package", "name"), REMOVED)
def test_what_was_removed(package: str, name: str) -> None:
    """Importing a removed name says what to use instead; names that never existed raise Python's usual errors."""
    text = f"{package}.{name} was removed in 0.3.0: {removed.NAMES[package][name]}"
    with pytest.raises(ImportError, match=re.escape(text)):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {package} import {name}_of_nothing")


def test_every_implementation_is_checked_alike() -> None:
    for implementation in ("blockwise", "reference"):
        refused(call, {"key": zeros(2, 1, 7, 8), "implementation": implementation}, ValueError, "(2, 1, 7, 8)")


def test_no_cure_is_named_that_is_none() -> None:
    """No fix is suggested that would not help: forgotten enable_gqa with fewer heads than positions, wrong tables, a misspelt
    mask, positions that do not cover."""
    for changes in (
        qkv(2, 4, 7, 7, 2),
        {"rel_key": zeros(9, 4)},
        {"rel_key": zeros(5, 7, dtype=torch.bool), "attn_mask": zeros(5, 7)},
        {"rel_key": zeros(8, 8).half()},
        {"positions": Positions(-3, 5, "error")},
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**changes)
        assert not any(hint in str(raised.value) for hint in ("looks like", "look like", "attn_mask", "centred"))


def test_a_learned_scale_as_the_errors_say() -> None:
    """Multiplying the query and its related tensors by the scale equals attention with that scale, and the scale gets its
    gradient."""
    scale = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    query, key, value, table, *_ = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float64, seed=0)
    assert table is not None
    other, p2c, attend = query.flip(2), table.flip(0), fused_relative_attention
    pairs: tuple[tuple[Changes, Changes], ...] = (
        ({}, {}),
        ({"rel_query": other, "rel_p2c": p2c}, {"rel_query": scale * other, "rel_p2c": scale * p2c}),
        ({"rel_scale": 0.7, "rel_p2c": p2c}, {"rel_scale": 0.7, "rel_p2c": p2c, "rel_query": query}),
    )
    for given, with_scale in pairs:
        out: Any = attend(scale * query, key, value, table, scale=1.0, **with_scale)
        assert_same("out", out, attend(query, key, value, table, scale=0.3, **given))
        assert torch.autograd.grad(out.sum(), scale)[0].abs() > 1e-6


SAME: dict[str, tuple[Changes, Changes]] = {
    "no window": ({"window_size": None}, {"window_size": (-1, -1)}),
    "one offset for all": ({"query_offset": lengths(2)}, {"query_offset": lengths([2, 2])}),
    "no offset": ({"query_offset": None}, {"query_offset": 0}),
    "one length for all": ({"key_lengths": lengths(4, dtype=torch.int32)}, {"key_lengths": lengths([4, 4])}),
    "rel_scale by default": ({"scale": 0.3}, {"scale": 0.3, "rel_scale": 0.3}),
    "no future": ({**CAUSAL, "window_size": (3, 2), "query_offset": 2}, {"window_size": (3, 0), "query_offset": 2}),
}


@pytest.mark.parametrize("name", SAME)
def test_other_ways_to_say_the_same(name: str) -> None:
    one, other = SAME[name]
    assert torch.equal(call(**one), call(**other)) and call(**one).any()


def test_numbers_of_numpy() -> None:
    """NumPy's integers and floats of any width are accepted; its arrays and booleans are not."""
    numpy = pytest.importorskip("numpy")
    expected = call(scale=0.5, query_offset=1, window_size=(3, 2), softcap=2.0, rel_scale=0.25)
    ours = {"scale": numpy.float32(0.5), "softcap": numpy.float16(2), "rel_scale": numpy.float64(0.25)}
    ours |= {"query_offset": numpy.int64(1), "window_size": (numpy.int8(3), numpy.uint32(2))}
    assert torch.equal(call(**ours), expected)
    assert torch.equal(call_varlen(max_seqlen_q=numpy.int32(3), max_seqlen_k=numpy.int64(4)), call_varlen())
    refused(call_varlen, {"max_seqlen_q": numpy.int32(2)}, ValueError, "max_seqlen_q must be at least 3")
    for name, value, message in (
        ("scale", numpy.array(0.5), "scale must be a float, got array"),
        ("scale", numpy.bool_(True), "scale must be a float, got np.True_"),
        ("query_offset", numpy.float32(1), "query_offset must be an int, got np.float32"),
        ("window_size", (numpy.bool_(True), 0), "window_size must be an int, got np.True_"),
    ):
        refused(call, {name: value}, TypeError, message)


def covering(first: int, last: int, **others: Any) -> Changes:
    return {"rel_key": zeros(last - first + 1, 8), "positions": Positions(first, last, "error"), **others}


@pytest.mark.parametrize(
    ("first", "last", "others"),
    [
        (-4, 6, {}),
        (-4, 0, CAUSAL),
        (-2, 1, {"window_size": (2, 1)}),
        (-9, 0, {**CAUSAL, "query_offset": 5}),
        (-6, 4, {"query_offset": 2}),
        (-8, 0, {**CAUSAL, "query_offset": lengths([4, 0])}),
    ],
)
def test_positions_that_cover(first: int, last: int, others: Changes) -> None:
    """Of 5 queries and 7 keys, outside="error" raises if and only if some visible pair may have no row, and says which."""
    assert call(**covering(first, last, **others)).shape == (2, 3, 5, 4)
    for bounds in ((first + 1, last), (first, last - 1)):
        parts = f"positions from {bounds[0]} to {bounds[1]} do not cover | needs {first} to {last}"
        refused(call, covering(*bounds, **others), ValueError, parts)


def test_values_are_checked_where_they_are_readable() -> None:
    """Fake and meta tensors have no values to check; values of CPU tensors are checked. Lists and integers are accepted."""
    good = {"rel_bias": zeros(3, 9), "rel_value": zeros(9, 4), "rel_p2c": zeros(9, 8), "attn_mask": zeros(1, 3, 1, 7)}
    numbers: Changes = {"dropout_p": 1, "softcap": 30, "window_size": [0, 3]}
    assert call(**good, **numbers, query_offset=lengths([1, -1])).shape == (2, 3, 5, 4)
    out = call(key_lengths=lengths([0, 7], dtype=torch.int32))
    assert not out[0].any() and out[1].all()
    with FakeTensorMode() as mode:
        tensors: Changes = {name: mode.from_tensor(zeros(5, 3, 8)) for name in ("query", "key", "value")}
        starts = mode.from_tensor(lengths([0, 9, 4]))
        packed = fused_relative_attention_varlen(
            **tensors, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5
        )
    assert isinstance(packed, torch.Tensor) and packed.shape == (5, 3, 8)
    inputs = make_inputs(2, 3, 5, 7, 8, num_rows=9, dtype=torch.float32, device="meta", seed=0)
    on_meta = call(**dict(zip(("query", "key", "value", "rel_key"), inputs[:4], strict=True)), key_lengths=meta(2).long())
    assert on_meta.shape == (2, 3, 5, 8) and on_meta.device.type == "meta"


def test_triton_on_the_cpu_says_why_and_what_to_do() -> None:
    pytest.importorskip("triton")
    why = 'implementation="triton" cannot run here | on cpu, not on a GPU | TRITON_INTERPRET=1 | implementation=None'
    refused(call, {"implementation": "triton"}, NotImplementedError, why)
    tensor = zeros(1, 1, 1, 8)
    assert not can_run_triton(tensor, tensor)
    with pytest.raises(NotImplementedError, match="on cpu, not on a GPU"):
        can_run_triton(tensor, tensor, raise_error=True)
    assert torch.equal(call(), call(implementation="blockwise"))

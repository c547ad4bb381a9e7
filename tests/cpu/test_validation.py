"""The contract of a call: a wrong one raises, names the argument and, where it can, the cure; a likely mistake warns once; and
type checkers see the types."""

from __future__ import annotations

import inspect
import math
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_relattn
from tests.conftest import forget_warnings
from tests.expected import INPUTS
from tests.tolerance import assert_same
from triton_relattn import can_run_triton, distributed, fused_relative_attention, merge_attention, plots, tables
from triton_relattn._core import names
from triton_relattn._core.arguments import Options, OptionsVarlen
from triton_relattn.testing import make_inputs

from .small_call import CAUSAL, LAYOUT, Changes, Positions, call, call_varlen, lengths, meta, qkv, refused, says, zeros


def learned() -> torch.Tensor:
    return torch.nn.Parameter(zeros(()))


def low(tensors: Changes) -> Changes:
    return {name: tensor.bfloat16() for name, tensor in tensors.items()}


GQA: Changes = {"enable_gqa": True}
SWAPPED = {"query": zeros(2, 5, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4)}
BATCH_OF_ONE = {"query": zeros(1, 5, 3, 8), "key": zeros(1, 7, 3, 8), "value": zeros(1, 7, 3, 4)}
HEADS_FIRST = {"query": zeros(3, 5, 8), "key": zeros(3, 7, 8), "value": zeros(3, 7, 4)}
ALIKE = {"key": zeros(3, 5, 8), "value": zeros(3, 5, 4), "cu_seqlens_k": lengths([0, 2, 2, 5])}
SHARED = {"query": zeros(2, 8, 2, 8), "key": zeros(2, 6, 1, 8), "value": zeros(2, 6, 1, 4)}
WRONG_VALUES: dict[str, tuple[Changes, str]] = {
    "query_rank": ({"query": zeros(3, 5, 8)}, "query must have 4 dimensions | (3, 5, 8)"),
    "key_batch": ({"key": zeros(1, 3, 7, 8)}, "key | (2, 3, 7, 8) | (1, 3, 7, 8)"),
    "key_heads": ({"key": zeros(2, 1, 7, 8)}, "query's 3 heads | got 1 in (2, 1, 7, 8) | enable_gqa=True"),
    "key_heads_do_not_divide": ({**GQA, **qkv(2, 3, 5, 7, 2)}, "multiple of key's | got 3 and 2"),
    "value_length": ({"value": zeros(2, 3, 6, 4)}, "value | (2, 3, 7, 4) | (2, 3, 6, 4)"),
    "value_without_width": ({"value": zeros(2, 3, 7, 0)}, "widths must be positive | 0 (value)"),
    "table_width": ({"rel_key": zeros(9, 4)}, "rel_key | width = 8 | (9, 4)"),
    "table_without_rows": ({"rel_key": zeros(0, 8)}, "rel_key | R >= 1 | (0, 8)"),
    "value_table_width": ({"rel_value": zeros(9, 8)}, "rel_value | width = 4 | (9, 8)"),
    "bias_heads": ({"rel_bias": zeros(2, 9)}, "rel_bias | (3, 9) | (2, 9)"),
    "p2c_width": ({"rel_query": zeros(2, 3, 5, 6), "rel_key": zeros(9, 6), "rel_p2c": zeros(9, 6)}, "rel_p2c | = 8"),
    "p2c_rows": ({"rel_p2c": zeros(7, 8)}, "rel_p2c must have the same number of rows R as rel_key, 9, got 7"),
    "rows_differ": ({"rel_value": zeros(11, 4)}, "must have the same number of rows R as rel_key, 9, got 11"),
    "rel_query_length": ({"rel_query": zeros(2, 3, 7, 8)}, "rel_query | (2, 3, 5, 8) | (2, 3, 7, 8)"),
    "rel_query_width": ({"rel_query": zeros(2, 3, 5, 6)}, "rel_key | width = 6 | (9, 8)"),
    "rel_query_without_width": ({"rel_query": zeros(2, 3, 5, 0)}, "widths must be positive | 0 (rel_query)"),
    "rel_query_alone": ({"rel_key": None, "rel_p2c": zeros(9, 8), "rel_query": zeros(2, 3, 5, 8)}, "needs rel_key"),
    "even_table": ({"rel_key": zeros(10, 8)}, "even number of rows (10) | positions=RelativePositions(first, last)"),
    "too_few_rows": ({"positions": Positions(-5, 5)}, "positions from -5 to 5 need 11 rows | R = 9"),
    "positions_alone": ({"rel_key": None, "positions": Positions(-4, 4)}, "positions | no table"),
    "not_covered": ({"positions": Positions(-4, 4, "error")}, 'from -4 to 4 | needs -4 to 6 | outside="error"'),
    "offset_huge": ({"query_offset": 2**63}, "query_offset must lie within +-2**29, got 9223372036854775808"),
    "offsets_shape": ({"query_offset": lengths([1, 2, 3])}, "query_offset | (batch,) = (2,) | (3,)"),
    "mask_shape": ({"attn_mask": zeros(7, 5)}, "attn_mask must broadcast | (2, 3, 5, 7) | (7, 5)"),
    "mask_gradient": ({"attn_mask": zeros(5, 7, requires_grad=True)}, "attn_mask is not differentiable | rel_bias"),
    "window_negative": ({"window_size": (-2, 3)}, "window_size | at least -1 | (-2, 3)"),
    "window_huge": ({"window_size": (3, 2**31)}, "window_size must lie within +-2**29, got 2147483648"),
    "lengths_negative": ({"key_lengths": lengths([-1, 7])}, "[0, 7] | from -1 to 7"),
    "lengths_beyond": ({"key_lengths": lengths([3, 8])}, "[0, 7] | from 3 to 8"),
    "scale_huge": ({"scale": 1e300}, "scale must be finite, got 1e+300 | float32 ends at"),
    "rel_scale_nan": ({"rel_scale": math.nan}, "rel_scale must be finite, got nan"),
    "rel_scale_alone": ({"rel_key": None, "rel_scale": 1.0}, "rel_scale | rel_key and rel_p2c, which are None"),
    "dropout_negative": ({"dropout_p": -0.1}, "dropout_p must lie in [0, 1], got -0.1"),
    "softcap_zero": ({"softcap": 0.0}, "softcap must be positive, got 0.0 | softcap=None means no limit"),
    "softcap_tiny": ({"softcap": 1e-46}, "softcap must be positive, got 1e-46"),
    "implementation": ({"implementation": "flash"}, "('triton', 'blockwise', 'reference') | got 'flash'"),
    "padding_as_table": ({"rel_key": zeros(2, 1, 1, 7)}, "rel_key must have shape | attn_mask=..."),
    "layout": (SWAPPED, f"key must have query's 5 heads, got 7 | {LAYOUT}"),
    "layout_of_groups": ({**GQA, **SHARED}, f"query's heads must be a multiple of key's | got 8 and 6 | {LAYOUT}"),
    "layout_of_table": ({**qkv(2, 7, 3), "rel_key": zeros(3, 9, 8)}, f"rel_key | = (7, 9, 8) | {LAYOUT}"),
    "layout_of_mask": ({**qkv(2, 7, 3), "attn_mask": zeros(7, 7)}, f"attn_mask must broadcast | {LAYOUT}"),
    "layout_of_lengths": ({**qkv(2, 7, 3), "key_lengths": lengths([7, 5])}, f"must lie in [0, 3] | {LAYOUT}"),
    "rows_first": ({"rel_key": zeros(9, 3, 8)}, "got (9, 3, 8) | rel_key.transpose(0, 1) is (heads, R, width)"),
    "heads_joined": ({"rel_key": zeros(9, 24)}, "got (9, 24) | rel_key.unflatten(1, (3, -1)).transpose(0, 1) is"),
    "transposed": ({"rel_key": zeros(8, 9)}, "got (8, 9) | rel_key.mT is (R, width)"),
    "heads_transposed": ({"rel_key": zeros(3, 8, 9)}, "got (3, 8, 9) | rel_key.mT is (heads, R, width)"),
    "batch_of_tables": ({"rel_key": zeros(2, 3, 9, 8)}, "(2, 3, 9, 8) | rel_key[0] is one, which the batch shares"),
    "batch_of_joined": ({"rel_key": zeros(1, 9, 24)}, "rel_key[0].unflatten(1, (3, -1)).transpose(0, 1) is (heads, R"),
    "batch_and_rows_first": ({"rel_key": zeros(1, 9, 3, 8)}, "rel_key[0].transpose(0, 1) is (heads, R, width)"),
    "batch_of_biases": ({"rel_bias": zeros(1, 3, 9)}, "rel_bias looks like a batch of tables; rel_bias[0] is one"),
    "bias_transposed": ({"rel_bias": zeros(9, 3)}, "rel_bias looks like (R, heads); rel_bias.mT is (heads, R)"),
    "bias_of_pairs": (
        {"rel_key": None, "rel_bias": zeros(1, 3, 5, 7, requires_grad=True)},
        "per distance, not per pair | t5_buckets | scale=1.0; a bias per pair is attn_mask, without a gradient",
    ),
    "bias_as_table": ({"rel_key": zeros(3, 9)}, "a bias by distance, (R,) or (heads, R), is rel_bias"),
    "weight_of_t5": ({"rel_key": None, "rel_bias": zeros(32, 3)}, "got (32, 3) | rel_bias=weight[tables.t5_buckets("),
    "weight_of_t5_per_head": (
        {"rel_key": None, "rel_bias": zeros(3, 32)},
        "positions must be given | per bucket | weight[tables.t5_buckets(",
    ),
    "slopes": (
        {"rel_key": None, "rel_bias": lengths([0.5, 0.25])[:, None].expand(2, 2).reshape(4), **qkv(2, 4, 7)},
        "positions must be given | an even number of rows (4) | tables.alibi_bias(slopes, first, last)",
    ),
    "half_of_the_rows": ({"positions": Positions.centred(5)}, "need 5 rows | positions=RelativePositions.centred(9)"),
    "mask_of_entries": ({"attn_mask": zeros(2, 1, 7, dtype=torch.bool)}, "attn_mask[:, None] is one mask per batch"),
    "padding_mask": ({"attn_mask": zeros(2, 7)}, "attn_mask[:, None, None] is one mask per batch entry"),
    "integers_as_lengths": ({"key_lengths": zeros(2, 7, dtype=torch.int64)}, "got (2, 7); key_lengths.sum(1) counts"),
    "packed_query_rank": ({"query": zeros(1, 5, 3, 8)}, "query must have 3 dimensions | (total, heads, width)"),
    "packed_key_heads": ({"key": zeros(7, 1, 8)}, "query's 3 heads | got 1 in (7, 1, 8)"),
    "packed_value_length": ({"value": zeros(6, 3, 4)}, "value | (7, 3, 4) | (6, 3, 4)"),
    "packed_q_rank": ({"cu_seqlens_q": lengths([[0, 2, 2, 5]])}, "cu_seqlens_q | (1, 4)"),
    "packed_q_start": ({"cu_seqlens_q": lengths([1, 2, 2, 5])}, "rise from 0 to the total length 5 | [1, 2, 2, 5]"),
    "packed_q_end": ({"cu_seqlens_q": lengths([0, 2, 2, 4])}, "cu_seqlens_q must rise from 0 | 5 | [0, 2, 2, 4]"),
    "packed_k_falling": ({"cu_seqlens_k": lengths([0, 4, 3, 7])}, "cu_seqlens_k must rise | [0, 4, 3, 7]"),
    "packed_numbers_differ": ({"cu_seqlens_k": lengths([0, 4, 7])}, "cu_seqlens_k | (4,) | (3,)"),
    "packed_q_longer": ({"max_seqlen_q": 2}, "max_seqlen_q must be at least 3 | cu_seqlens_q | got 2"),
    "packed_k_longer": ({"max_seqlen_k": 1}, "max_seqlen_k must be at least 4 | cu_seqlens_k | got 1"),
    "packed_negative": ({"max_seqlen_q": -1}, "max_seqlen_q must not be negative, got -1"),
    "packed_offsets": ({"query_offset": lengths([1, 2])}, "query_offset | (batch,) = (3,) | (2,)"),
    "packed_lengths": ({"cu_seqlens_q": lengths([2, 0, 3])}, "[2, 0, 3]; cu_seqlens are 0 and lengths | nn.functional.pad("),
    "packed_lengths_from_0": (
        {"cu_seqlens_q": lengths([0, 2, 0, 3])},
        "[0, 2, 0, 3]; cu_seqlens are lengths added up, .cumsum(0)",
    ),
    "packed_a_batch": (BATCH_OF_ONE, "(1, 5, 3, 8); .flatten(0, 1) packs (batch, length, heads, width)"),
    "packed_layout": (HEADS_FIRST, "key must have query's 5 heads | .transpose(0, 1) makes them (total, heads, width)"),
    "packed_layout_of_starts": ({**HEADS_FIRST, **ALIKE}, "to the total length 3 | .transpose(0, 1) makes them (total, heads"),
    "packed_not_covered": ({"positions": Positions(-4, 4, "error"), "query_offset": 3}, "from -4 to 4 | needs -5 to 0"),
    "offsets_huge": ({"query_offset": lengths([0, 2**40])}, "query_offset must lie within +-2**29, got 1099511627776"),
    "one_length_beyond": ({"key_lengths": lengths(8)}, "[0, 7] | from 8 to 8"),
    "reference": ({"key": zeros(2, 1, 7, 8), "implementation": "reference"}, "query's 3 heads | got 1 in (2, 1, 7, 8)"),
}
WRONG_TYPES: dict[str, tuple[Changes, str]] = {
    "gqa_int": ({"enable_gqa": 1}, "enable_gqa must be a bool, got 1"),
    "key_type": ({"key": None}, "key must be a torch.Tensor, got NoneType"),
    "query_dtype": ({"query": zeros(2, 3, 5, 8, dtype=torch.int64)}, "query must be float16 | torch.int64"),
    "key_dtype": ({"key": zeros(2, 3, 7, 8).half()}, "key | torch.float32 | torch.float16; key.to(query.dtype), or torch.auto"),
    "nested": ({"query": torch.nested.nested_tensor([zeros(3, 5, 8)])}, "query must be a strided tensor, got a nested"),
    "table_dtype": ({"rel_key": zeros(9, 8).bfloat16()}, "torch.float32 | torch.bfloat16; rel_key.to(query.dtype), or torch"),
    "bias_dtype": ({"rel_bias": zeros(9).double()}, "rel_bias | torch.float32 | torch.float64"),
    "mask_dtype": ({"attn_mask": zeros(5, 7).half()}, "attn_mask must be bool | torch.float32 | torch.float16"),
    "causal_int": ({"is_causal": 1}, "is_causal must be a bool, got 1"),
    "window_none": ({"window_size": (None, 0)}, "a pair (left, right), where -1 means no limit, got (None, 0)"),
    "scale_tensor": ({"scale": zeros(())}, "scale must be a float, got a tensor; .item() reads its value"),
    "learned_scale": ({"scale": learned()}, "multiply query by it, with rel_query and rel_p2c | scale=1.0"),
    "learned_scale_of_content": ({"scale": learned(), "rel_scale": 1.0}, "pass the unscaled query as rel_query, and scale=1.0"),
    "learned_rel_scale": ({"rel_scale": learned()}, "multiply rel_key and rel_p2c by it, and pass rel_scale=1.0"),
    "learned_softcap": ({"softcap": learned()}, "softcap must be a float and has no gradient | with dense attention"),
    "mask_as_table": ({"rel_key": zeros(5, 7, dtype=torch.bool)}, "rel_key must be float16 | attn_mask=..."),
    "embedding": ({"rel_key": torch.nn.Embedding(9, 8)}, "rel_key | got Embedding | rel_key=module.weight"),
    "positions_tuple": ({"positions": (-4, 4)}, "got tuple | positions=RelativePositions(-4, 4)"),
    "number_of_rows": ({"positions": 9}, "got int; positions=RelativePositions.centred(9)"),
    "farthest_distance": ({"positions": 4}, "got int; positions=RelativePositions(-4, 4)"),
    "mask_of_a_tokenizer": ({"attn_mask": zeros(2, 7, dtype=torch.int64)}, "attn_mask[:, None, None].bool() is one"),
    "integers_of_entries": ({"attn_mask": zeros(2, 5, 7, dtype=torch.int64)}, "attn_mask[:, None].bool() is one"),
    "mask_of_integers": ({"attn_mask": zeros(2, 1, 5, 7, dtype=torch.uint8)}, "attn_mask.bool() is True where"),
    "list_of_lengths": ({"key_lengths": [7, 5]}, "key_lengths=torch.tensor([7, 5], device=query.device)"),
    "one_length": ({"key_lengths": 5}, "got int; key_lengths=torch.tensor(5, device=query.device)"),
    "list_of_offsets": ({"query_offset": [2, 1]}, "query_offset=torch.tensor([2, 1], device=query.device)"),
    "shares_as_lengths": ({"key_lengths": lengths([1.0, 0.5])}, "key_lengths.int(), or, | (key_lengths * 7).round().int()"),
    "mask_as_lengths": ({"key_lengths": zeros(2, 7, dtype=torch.bool)}, "key_lengths.sum(1) counts the keys"),
    "max_distance": ({"max_distance": 4}, "here it is positions=RelativePositions(-d, d) | 2 d + 1 rows"),
    "num_buckets": ({"num_buckets": 32}, "here it is rel_bias=weight[tables.t5_buckets("),
    "causal": ({"causal": None}, "fused_relative_attention() got an unexpected | 'causal'; here it is is_causal"),
    "cu_seqlens_q": ({"cu_seqlens_q": None}, "fused_relative_attention_varlen has it"),
    "deterministic": ({"deterministic": None}, "there is none here: results repeat bit for bit, except"),
    "a_slip": ({"is_causl": None}, "did you mean 'is_causal'?"),
    "unknown": ({"colour": None}, "unexpected keyword argument 'colour'"),
    "packed_k_type": ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    "packed_max_float": ({"max_seqlen_k": 4.0}, "max_seqlen_k must be an int, got 4.0"),
    "packed_max_tensor": ({"max_seqlen_k": lengths(4)}, "max_seqlen_k must be an int, got a tensor; .item() reads"),
    "packed_mask": ({"attn_mask": None}, "_varlen() got | 'attn_mask'; fused_relative_attention has it"),
    "packed_max_seqlen": ({"max_seqlen": 3}, "_varlen() got | 'max_seqlen'; did you mean 'max_seqlen_"),
    "float32_table": ({**low(qkv(2, 3, 5, 7)), "rel_key": zeros(9, 8)}, "rel_key must have query's dtype torch.bfloat16"),
    "scale_bool": ({"scale": True}, "scale must be a float, got True"),
    "offset_bool": ({"query_offset": True}, "query_offset must be an int, got True"),
}
"""What is changed in a small call, a packed one if the name begins so, and parts of the message."""
WRONG = [(ValueError, *item) for item in WRONG_VALUES.items()] + [(TypeError, *item) for item in WRONG_TYPES.items()]


@pytest.mark.parametrize(("error", "case", "wrong"), WRONG, ids=[case for _, case, _ in WRONG])
def test_wrong_calls(error: type[Exception], case: str, wrong: tuple[Changes, str]) -> None:
    """The error has the argument's name and the bad value; it comes before any warning and before drawing numbers for dropout."""
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refused(call_varlen if case.startswith("packed") else call, {"dropout_p": 0.5, **wrong[0]}, error, wrong[1])
    assert torch.equal(state, torch.get_rng_state())


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
TENSORS = [*INPUTS[1:], "positions", "query_offset", "attn_mask", "key_lengths"]


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
    for name, here in names.WORDS["here it is {}"].items():
        refused(call, {name: None}, TypeError, f"unexpected keyword argument {name!r}; here it is {here}")
        assert all(hasattr(tables, function) for function in re.findall(r"tables\.(\w+)", here)), here
        assert all(hasattr(triton_relattn, function) for function in re.findall(r"of (fused_\w+)", here)), here


def test_wrong_calls_of_other_functions() -> None:
    lse, out, query = zeros(2, 5), zeros(2, 5, 4), zeros(2, 3, 5, 8)
    order = "got (2, 5, 4), (2, 5, 4), (2, 5), (2, 5); the order is out1, lse1, out2, lse2"
    refused(merge_attention, {"out1": out, "lse1": out, "out2": lse, "lse2": lse}, ValueError, order)
    refused(plots.attention_terms, {"query": query, "key": query, "causal": True}, TypeError, "'causal'; here it is is_causal")
    refused(distributed.fused_relative_attention, {**qkv(2, 3, 5), "mask": None}, TypeError, "here it is attn_mask")


def test_no_cure_is_named_that_is_none() -> None:
    """No fix is suggested that would not help: forgotten enable_gqa with fewer heads than positions, wrong tables, a misspelt
    mask, positions that do not cover, lengths of another batch, a name like none."""
    for changes in (
        qkv(2, 4, 7, 7, 2),
        {"rel_key": zeros(9, 4)},
        {"rel_key": zeros(5, 7, dtype=torch.bool), "attn_mask": zeros(5, 7)},
        {"rel_key": zeros(8, 8).half()},
        {"rel_key": zeros(8, 10)},
        {"rel_key": zeros(10, 8), "positions": 10},
        {"positions": Positions(-3, 5, "error")},
        {"key_lengths": lengths([1.0, 0.5, 0.2])},
        {"colour": None},
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**changes)
        assert not any(
            hint in str(raised.value) for hint in ("looks like", "look like", "attn_mask", "centred", "fractions", "mean")
        )


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
        packed = call_varlen(**tensors, rel_key=None, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5)
    assert packed.shape == (5, 3, 8)
    inputs = make_inputs(2, 3, 5, 7, 8, num_rows=9, dtype=torch.float32, device="meta", seed=0)
    on_meta = call(**dict(zip(("query", "key", "value", "rel_key"), inputs[:4], strict=True)), key_lengths=meta(2).long())
    assert on_meta.shape == (2, 3, 5, 8) and on_meta.device.type == "meta"


def test_triton_on_the_cpu_says_why_and_what_to_do() -> None:
    pytest.importorskip("triton")
    why = 'implementation="triton" cannot run here | on cpu, not on a GPU | TRITON_INTERPRET=1 | implementation=None'
    for function in (call, call_varlen):
        refused(function, {"implementation": "triton"}, NotImplementedError, why)
    tensor = zeros(1, 1, 1, 8)
    assert not can_run_triton(tensor, tensor)
    with pytest.raises(NotImplementedError, match="on cpu, not on a GPU"):
        can_run_triton(tensor, tensor, raise_error=True)
    assert torch.equal(call(), call(implementation="blockwise"))


# Warnings.


def call_warnings(**changes: Any) -> list[str]:
    """The warnings from three calls, packed ones if a change is an argument of the packed function."""
    forget_warnings()
    function = call_varlen if any("seqlen" in name for name in changes) else call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(**changes)
    assert all(warning.category is UserWarning and warning.filename == call.__code__.co_filename for warning in caught)
    return [str(warning.message) for warning in caught]


def query(length: int, heads: int = 3) -> Changes:
    return {"query": zeros(2, heads, length, 8)}


def prompt(length: int, heads: int, rows: int | None = 33) -> Changes:
    """Inputs in flash-attn's layout (batch, length, heads, width), which may also be read as `length` heads; the heads share a
    table."""
    return {**qkv(1, length, heads), "rel_key": rows and zeros(rows, 8)}


PAST_8, TWO_OF_TWO, visible = Positions(-8, 0), qkv(2, 2, 2, 7), torch.ones
SELF = qkv(2, 3, 7)
PADDING, FUTURE = (torch.arange(7) >= lengths([[7], [5]]))[:, None, None], visible(7, 7, dtype=torch.bool).triu(1)
ZEROS = "Their output is zeros. A bool mask is True where a query may attend"
LEFT, EMPTY = (torch.arange(7) >= lengths([[0], [3]]))[:, None, None], (torch.arange(7) < lengths([[5], [0]]))[:, None, None]
MISTAKES: dict[str, tuple[Changes, str]] = {
    "outgrown_table": ({**query(600), "rel_key": zeros(1027, 8)}, "distances up to 513 | RelativePositions.centred(1027)"),
    "table_of_the_past": (
        {**query(1027), "rel_key": zeros(1027, 8), **CAUSAL},
        "own position, positions=RelativePositions(-1026",
    ),
    "odd_table_of_the_past": ({**qkv(2, 3, 9), **CAUSAL}, "up to 4 | centred(9) says | positions=RelativePositions(-8, 0)"),
    "table_of_the_future": (
        {"positions": Positions(0, 8), **CAUSAL, "query_offset": 2},
        "from 0 to 8, but is_causal or window_size hides those above 0 | RelativePositions(-8, 0); if the first row does",
    ),
    "mask_of_heads_or_entries": (
        {**TWO_OF_TWO, "attn_mask": visible(2, 1, 7, dtype=torch.bool)},
        "taken as (heads, Nq, Nk) | attn_mask[:, None] is one mask per batch entry; attn_mask[None] says",
    ),
    "mask_of_queries_or_entries": (
        {**TWO_OF_TWO, "attn_mask": visible(2, 7, dtype=torch.bool)},
        "taken as (Nq, Nk) | attn_mask[:, None, None] is one mask per batch entry; attn_mask[None, None] says",
    ),
    "opposite_offset": (
        {**query(1), **CAUSAL, "query_offset": -6},
        "no query sees a key: with query_offset=-6 | from 6 to 12 | before the first query, perhaps 6; return_lse=True",
    ),
    "offset_beyond_the_window": ({"window_size": (2, 0), "query_offset": 9}, "no query sees a key: with query_offset=9"),
    "opposite_mask": ({"attn_mask": zeros(2, 1, 1, 7, dtype=torch.bool)}, f"every key of every query. {ZEROS} | pass ~attn_mask"),
    "padding_and_an_empty_sequence": ({**SELF, "attn_mask": EMPTY}, "of every query of 1 of 2 sequences, the first of them 1"),
    "lowest_mask_of_one": ({**SELF, "attn_mask": -1e9 * ~EMPTY.flip(0)}, "sequences, the first of them 0. A floating-point mask"),
    "lowest_mask": ({"attn_mask": torch.full((5, 7), torch.finfo().min)}, "hides every key of every query. A floating-point"),
    "opposite_mask_of_padding": ({**SELF, "attn_mask": PADDING}, f"1 of 2 sequences, the first of them 0. {ZEROS}"),
    "opposite_mask_of_the_future": (
        {**SELF, "attn_mask": FUTURE},
        "hides every key of some queries, and shows all others only keys at the end. A bool mask is True where | return_lse=True",
    ),
    "table_of_windows": (
        {**qkv(2, 3, 49), "rel_key": None, "rel_bias": zeros(3, 169)},
        "a table of 169 = (2 * 7 - 1)^2 rows for 49 = 7^2 tokens looks like | Swin | RelativePositions.centred(169) says",
    ),
    "rows_of_the_past": (
        {"positions": PAST_8},
        "from -8 to 0, but nothing hides | is_causal=True hides them, window_size=(-1, -1)",
    ),
    "mask_of_ones": (
        {**SELF, "attn_mask": (~PADDING).float()},
        "only 0 and 1 and is added to the logits | pass attn_mask.bool()",
    ),
    "layout": ({**prompt(300, 2), "rel_key": zeros(9, 8)}, f"query has 300 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_full_table": ({**prompt(7, 2, 13)}, f"query has 7 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_short_table": (prompt(100, 8), f"query has 100 heads | {LAYOUT}"),
    "one_step": ({**query(1), **CAUSAL}, "1 queries and 7 keys has no query_offset | query_offset=6, the"),
    "a_chunk": (CAUSAL, "the last 2 keys; | query_offset=2, the number of keys | query_offset=0 says"),
    "a_step_with_padding": ({**query(1), **CAUSAL, "key_lengths": lengths([1, 6])}, "1 queries and 6 keys | query_offset=5, the"),
    "packed_steps": ({"max_seqlen_q": 3, **CAUSAL}, "3 queries and 4 keys has no query_offset"),
}
"""Each of these warns unless the arguments show that it is intended, in the way that the message names."""
MEANT: dict[str, Changes] = {
    "clipped_as_far_as_anybody_does": {**query(600), "rel_key": zeros(1025, 8)},
    "covered": {**query(514), "rel_key": zeros(1027, 8)},
    "outgrown, said": {**query(600), "rel_key": zeros(1027, 8), "positions": Positions.centred(1027)},
    "offsets_on_the_device": {"rel_key": zeros(1027, 8), "query_offset": lengths([600, 0])},
    "one_query": qkv(2, 16, 1, 20),
    "many_heads": prompt(64, 80),
    "a_prompt_of_more_heads": prompt(40, 30),
    "a_short_prompt_of_few_heads": prompt(24, 5),
    "a_table_for_each_head": {**prompt(64, 5), "rel_key": zeros(64, 9, 8)},
    "a_mask_for_each_head": {**prompt(64, 5), "attn_mask": visible(1, 64, 5, 5, dtype=torch.bool)},
    "grouped_heads": {**qkv(1, 64, 5, 5, 8), "rel_key": zeros(33, 8), "enable_gqa": True},
    "no_table": prompt(96, 8, None),
    "cross_attention": {},
    "an_offset": {**CAUSAL, "query_offset": 2, "positions": PAST_8},
    "an_offset_of_0": {**CAUSAL, "query_offset": 0},
    "fewer_keys": {**query(9), **CAUSAL, "positions": Positions.centred(9)},
    "a_full_table_of_the_past": {**query(7), "rel_key": zeros(13, 8), **CAUSAL},
    "a_short_table_of_the_past": {**query(50), **CAUSAL},
    "a_first_token": {**qkv(2, 2, 1), **CAUSAL, "positions": PAST_8},
    "one_row": {**query(9), "rel_key": zeros(1, 8), "positions": Positions(0, 0), **CAUSAL},
    "rows_of_the_future_that_are_seen": {"positions": Positions(0, 8)},
    "a_mask_per_head, said": {**TWO_OF_TWO, "attn_mask": visible(1, 2, 1, 7, dtype=torch.bool)},
    "a_mask_per_pair, said": {**TWO_OF_TWO, "attn_mask": visible(1, 1, 2, 7, dtype=torch.bool)},
    "a_square_mask": {**qkv(2, 2, 2), "attn_mask": visible(2, 2, dtype=torch.bool)},
    "a_mask_that_shows_one_pair": {"attn_mask": (torch.arange(35) == 9).view(5, 7)},
    "padding": {**SELF, "attn_mask": ~PADDING},
    "an_empty_sequence, said": {**SELF, "attn_mask": EMPTY, "return_lse": True},
    "an_empty_sequence_of_an_enabled_model": {**SELF, "attn_mask": EMPTY, "window_size": (-1, -1)},
    "an_empty_sequence_by_its_length": {**SELF, "key_lengths": lengths([5, 0])},
    "a_table_of_many_rows, said": {**qkv(2, 3, 49), "rel_key": zeros(169, 8), "positions": Positions.centred(169)},
    "a_clipped_table": {**qkv(2, 3, 4), "rel_key": zeros(9, 8)},
    "padding_to_the_left": {**SELF, "attn_mask": LEFT},
    "padding_to_the_left_of_all": {**SELF, "attn_mask": LEFT[1:] & ~FUTURE},
    "the_past": {**SELF, "attn_mask": ~FUTURE},
    "the_past_without_itself": {**SELF, "attn_mask": FUTURE.T},
    "all_but_itself_and_padding": {**SELF, "attn_mask": ~torch.eye(7, dtype=torch.bool) & ~PADDING & ~PADDING.mT},
    "a_part_of_the_future_by_a_mask, said": {**SELF, "attn_mask": FUTURE, "return_lse": True},
    "rows_of_the_past, said": {"positions": PAST_8, "window_size": (-1, -1)},
    "rows_of_the_past_and_a_mask": {**SELF, "positions": PAST_8, "attn_mask": ~FUTURE},
    "rows_of_the_past_and_one_query": {**query(1), "positions": PAST_8},
    "rows_of_the_past_and_one_key": {"positions": PAST_8, "key_lengths": lengths([1, 1])},
    "numbers_up_to_1": {"attn_mask": torch.linspace(0, 1, 7)},
    "an_additive_mask": {**SELF, "attn_mask": torch.where(PADDING, -math.inf, 0.0)},
    "numbers_that_hide_some_keys": {"attn_mask": torch.arange(7) * -1e9},
    "an_offset_that_shows_one_pair": {**CAUSAL, "query_offset": -4},
    "offsets_one_of_which_shows_a_pair": {**query(1), **CAUSAL, "query_offset": lengths([-6, 0])},
    "a_part_of_the_future, said": {**CAUSAL, "query_offset": -6, "return_lse": True},
    "a_mask_that_hides_a_part, said": {"attn_mask": zeros(5, 7, dtype=torch.bool), "return_lse": True},
    "a_cache_that_is_not_full": {**CAUSAL, "key_lengths": lengths([5, 3])},
    "no_queries": {**query(0), **CAUSAL},
    "packed_with_an_offset": {**CAUSAL, "max_seqlen_q": 3, "query_offset": 1},
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_likely_mistake_is_warned_of_once(case: str) -> None:
    (message,) = call_warnings(**MISTAKES[case][0])
    says(message, MISTAKES[case][1])


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant_is_not_warned_of(case: str) -> None:
    assert call_warnings(**MEANT[case]) == []


# Types.

ROOT = Path(__file__).parents[2]
USER = Path(__file__).with_name("typed_user.py")


@pytest.mark.thorough
def test_a_user_s_file_passes_mypy_strict(tmp_path: Path) -> None:
    """Results have the type implied by return_lse, and mypy sees no public name as private."""
    pytest.importorskip("mypy")
    pytest.importorskip("setuptools")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*build, "build_py", "--build-lib", str(installed)], check=True, cwd=ROOT, capture_output=True)
    assert (installed / "triton_relattn" / "py.typed").exists()
    (installed / "others.pth").write_text(str(Path(pytest.__file__).parents[1]))  # torch is also installed there
    shutil.copy(USER, tmp_path)  # in this file's folder, mypy would find the repository
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(tmp_path / "venv" / "bin" / "python")]
    command += ["--cache-dir", str(tmp_path / "cache"), "--config-file", "", USER.name]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(("name", "options"), [("", Options), ("_varlen", OptionsVarlen)], ids=["padded", "packed"])
def test_every_option_has_its_type(name: str, options: Any) -> None:
    """The overloads, which type checkers read, have all parameters of the function, plus return_lse."""
    function: Any = getattr(triton_relattn, f"fused_relative_attention{name}")
    types, parameters = get_type_hints(function), inspect.signature(function).parameters.values()
    keywords = {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}
    assert get_type_hints(options) == {name: types[name] for name in keywords if name != "return_lse"}
    assert options.__required_keys__ == {name for name, default in keywords.items() if default is inspect.Parameter.empty}

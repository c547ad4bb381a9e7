"""Every bad argument raises before any work, with the offending values in the message."""

from __future__ import annotations

import math
import re
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.oracle import assert_same
from triton_relattn import (
    RelativePositions,
    can_run_triton,
    functional,
    fused_relative_attention,
    fused_relative_attention_varlen,
)
from triton_relattn._core import warn
from triton_relattn._implementations import choose_implementation
from triton_relattn.testing import make_inputs, with_different_strides


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the arguments were checked")

    monkeypatch.setattr(functional.ops, "relative_attention", launched)
    monkeypatch.setattr(functional, "draw_dropout", launched)


def call(**changes: Any) -> Any:
    """The operator on (B, H, Nq, Nk, D, Dv) = (2, 3, 5, 7, 8, 4), all strides different, with some arguments changed."""
    inputs = with_different_strides(make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0))
    arguments = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "rel_key": inputs.rel_key}
    return fused_relative_attention(**{**arguments, **changes})


def call_varlen(**changes: Any) -> Any:
    """The packed operator on sequences of 2, 0 and 3 queries and 4, 1 and 2 keys, (Hq, Hk, D, Dv) = (3, 3, 8, 4)."""
    inputs = make_inputs(1, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0)
    arguments: dict[str, Any] = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value")}
    arguments |= {"rel_key": inputs.rel_key, "max_seqlen_q": 3, "max_seqlen_k": 4}
    arguments |= {"cu_seqlens_q": torch.tensor([0, 2, 2, 5]), "cu_seqlens_k": torch.tensor([0, 4, 5, 7], dtype=torch.int32)}
    return fused_relative_attention_varlen(**{**arguments, **changes})


def test_the_unchanged_calls_are_valid() -> None:
    assert call().shape == (2, 3, 5, 4) and call_varlen().shape == (5, 3, 4)


def test_checks_come_before_work(no_launch: None) -> None:
    """The fixture that the cases below rely on does catch a launch."""
    for changes in ({}, {"implementation": "reference"}, {"dropout_p": 0.5}):
        with pytest.raises(AssertionError, match="work began"):
            call(**changes)
    with pytest.raises(AssertionError, match="work began"):
        call_varlen()


zeros = torch.zeros
lengths = torch.tensor
RAISES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query_rank": ({"query": zeros(3, 5, 8)}, ValueError, ["query must have 4 dimensions", "(3, 5, 8)"]),
    "key_rank": ({"key": zeros(2, 3, 1, 7, 8)}, ValueError, ["key must have 4 dimensions", "(2, 3, 1, 7, 8)"]),
    "value_rank": ({"value": zeros(7, 4)}, ValueError, ["value must have 4 dimensions", "(7, 4)"]),
    "key_batch": ({"key": zeros(1, 3, 7, 8)}, ValueError, ["key", "(2, 3, 7, 8)", "(1, 3, 7, 8)"]),
    "value_batch": ({"value": zeros(4, 3, 7, 4)}, ValueError, ["value", "(2, 3, 7, 4)", "(4, 3, 7, 4)"]),
    "key_heads": ({"key": zeros(2, 1, 7, 8)}, ValueError, ["query's 3 heads", "got 1 in (2, 1, 7, 8)", "enable_gqa=True"]),
    "key_heads_do_not_divide": (
        {"key": zeros(2, 2, 7, 8), "value": zeros(2, 2, 7, 4), "enable_gqa": True},
        ValueError,
        ["multiple of key's", "got 3 and 2"],
    ),
    "more_key_heads": (
        {"key": zeros(2, 6, 7, 8), "value": zeros(2, 6, 7, 4), "enable_gqa": True},
        ValueError,
        ["multiple of key's", "got 3 and 6"],
    ),
    "no_key_heads": (
        {"key": zeros(2, 0, 7, 8), "value": zeros(2, 0, 7, 4), "enable_gqa": True},
        ValueError,
        ["multiple of key's", "got 3 and 0"],
    ),
    "gqa_value_heads": (
        {"key": zeros(2, 1, 7, 8), "enable_gqa": True},
        ValueError,
        ["value", "(2, 1, 7, 4)", "(2, 3, 7, 4)"],
    ),
    "gqa_int": ({"enable_gqa": 1}, TypeError, ["enable_gqa must be a bool, got 1"]),
    "value_heads": ({"value": zeros(2, 6, 7, 4)}, ValueError, ["value", "(2, 3, 7, 4)", "(2, 6, 7, 4)"]),
    "key_width": ({"key": zeros(2, 3, 7, 4)}, ValueError, ["key", "(2, 3, 7, 8)", "(2, 3, 7, 4)"]),
    "value_length": ({"value": zeros(2, 3, 6, 4)}, ValueError, ["value", "(2, 3, 7, 4)", "(2, 3, 6, 4)"]),
    "query_without_width": (
        {"query": zeros(2, 3, 5, 0), "key": zeros(2, 3, 7, 0), "rel_key": None},
        ValueError,
        ["widths must be positive", "0 (query)", "4 (value)"],
    ),
    "value_without_width": ({"value": zeros(2, 3, 7, 0)}, ValueError, ["widths must be positive", "0 (value)"]),
    "table_rank": ({"rel_key": zeros(8)}, ValueError, ["rel_key", "width = 8", "(8,)"]),
    "table_rank_4": ({"rel_key": zeros(2, 3, 9, 8)}, ValueError, ["rel_key", "(2, 3, 9, 8)"]),
    "table_width": ({"rel_key": zeros(9, 4)}, ValueError, ["rel_key", "width = 8", "(9, 4)"]),
    "table_heads": ({"rel_key": zeros(2, 9, 8)}, ValueError, ["rel_key", "(3, 9, 8)", "(2, 9, 8)"]),
    "table_without_rows": ({"rel_key": zeros(0, 8)}, ValueError, ["rel_key", "R >= 1", "(0, 8)"]),
    "even_table": (
        {"rel_key": zeros(10, 8)},
        ValueError,
        ["even number of rows (10)", "positions=RelativePositions(first, last)"],
    ),
    "too_few_rows": ({"positions": RelativePositions(-5, 5)}, ValueError, ["R = 9 rows", "from -5 to 5 need 11"]),
    "too_many_rows": ({"positions": RelativePositions(-7, 0)}, ValueError, ["R = 9 rows", "from -7 to 0 need 8"]),
    "positions_of_all": ({"positions": RelativePositions(-(2**29), 2**29)}, ValueError, ["R = 9 rows, but positions from"]),
    "positions_without_table": (
        {"rel_key": None, "positions": RelativePositions(-4, 4)},
        ValueError,
        ["positions", "no table"],
    ),
    "positions_type": ({"positions": (-4, 4)}, TypeError, ["positions must be a RelativePositions, got tuple"]),
    "query_type": ({"query": [[1.0]]}, TypeError, ["query must be a torch.Tensor, got list"]),
    "key_type": ({"key": None}, TypeError, ["key must be a torch.Tensor, got NoneType"]),
    "table_type": ({"rel_key": 3.0}, TypeError, ["rel_key must be a torch.Tensor, got float"]),
    "query_dtype": ({"query": zeros(2, 3, 5, 8, dtype=torch.int64)}, TypeError, ["query must be float16", "torch.int64"]),
    "complex": ({"query": zeros(2, 3, 5, 8, dtype=torch.complex64)}, TypeError, ["query must be float16", "torch.complex64"]),
    "key_dtype": ({"key": zeros(2, 3, 7, 8).half()}, TypeError, ["key", "torch.float32", "torch.float16"]),
    "value_dtype": ({"value": zeros(2, 3, 7, 4).double()}, TypeError, ["value", "torch.float32", "torch.float64"]),
    "table_dtype": ({"rel_key": zeros(9, 8).bfloat16()}, TypeError, ["rel_key", "torch.float32", "torch.bfloat16"]),
    "nested": (
        {"query": torch.nested.nested_tensor([zeros(3, 5, 8)])},
        TypeError,
        ["query must be a strided tensor, got a nested"],
    ),
    "sparse": ({"key": zeros(2, 3, 7, 8).to_sparse()}, TypeError, ["key must be a strided tensor", "torch.sparse_coo"]),
    "key_device": ({"key": zeros(2, 3, 7, 8, device="meta")}, ValueError, ["key", "device cpu", "got meta"]),
    "value_device": ({"value": zeros(2, 3, 7, 4, device="meta")}, ValueError, ["value", "device cpu", "got meta"]),
    "table_device": ({"rel_key": zeros(9, 8, device="meta")}, ValueError, ["rel_key", "device cpu", "got meta"]),
    "rel_query_rank": ({"rel_query": zeros(3, 5, 8)}, ValueError, ["rel_query must have 4 dimensions", "(3, 5, 8)"]),
    "rel_query_heads": ({"rel_query": zeros(2, 1, 5, 8)}, ValueError, ["rel_query", "(2, 3, 5, 8)", "(2, 1, 5, 8)"]),
    "rel_query_length": ({"rel_query": zeros(2, 3, 7, 8)}, ValueError, ["rel_query", "(2, 3, 5, 8)", "(2, 3, 7, 8)"]),
    "rel_query_width": ({"rel_query": zeros(2, 3, 5, 6)}, ValueError, ["rel_key", "width = 6", "(9, 8)"]),
    "rel_query_without_width": ({"rel_query": zeros(2, 3, 5, 0)}, ValueError, ["widths must be positive", "0 (rel_query)"]),
    "rel_query_dtype": ({"rel_query": zeros(2, 3, 5, 8).half()}, TypeError, ["rel_query", "torch.float32", "torch.float16"]),
    "rel_query_device": ({"rel_query": zeros(2, 3, 5, 8, device="meta")}, ValueError, ["rel_query", "device cpu", "got meta"]),
    "rel_query_without_table": (
        {"rel_key": None, "rel_query": zeros(2, 3, 5, 8)},
        ValueError,
        ["rel_query needs rel_key"],
    ),
    "rel_query_with_another_table": (
        {"rel_key": None, "rel_bias": zeros(9), "rel_query": zeros(2, 3, 5, 8)},
        ValueError,
        ["rel_query needs rel_key"],
    ),
    "rel_scale_without_table": (
        {"rel_key": None, "rel_scale": 1.0},
        ValueError,
        ["rel_scale", "rel_key and rel_p2c, which are None"],
    ),
    "rel_scale_nan": ({"rel_scale": math.nan}, ValueError, ["rel_scale must be finite, got nan"]),
    "rel_scale_str": ({"rel_scale": "8"}, TypeError, ["rel_scale must be a float, got '8'"]),
    "rel_value_width": ({"rel_value": zeros(9, 8)}, ValueError, ["rel_value", "width = 4", "(9, 8)"]),
    "rel_value_heads": ({"rel_value": zeros(2, 9, 4)}, ValueError, ["rel_value", "(3, 9, 4)", "(2, 9, 4)"]),
    "rel_value_rank": ({"rel_value": zeros(9)}, ValueError, ["rel_value", "width = 4", "(9,)"]),
    "rel_value_dtype": ({"rel_value": zeros(9, 4).half()}, TypeError, ["rel_value", "torch.float32", "torch.float16"]),
    "rel_bias_rank": ({"rel_bias": zeros(1, 3, 9)}, ValueError, ["rel_bias", "(R,) or (heads, R)", "(1, 3, 9)"]),
    "rel_bias_scalar": ({"rel_bias": zeros(())}, ValueError, ["rel_bias", "(R,) or (heads, R)", "()"]),
    "rel_bias_heads": ({"rel_bias": zeros(2, 9)}, ValueError, ["rel_bias", "(3, 9)", "(2, 9)"]),
    "rel_bias_without_rows": ({"rel_key": None, "rel_bias": zeros(0)}, ValueError, ["rel_bias", "R >= 1", "(0,)"]),
    "rel_bias_dtype": ({"rel_bias": zeros(9).double()}, TypeError, ["rel_bias", "torch.float32", "torch.float64"]),
    "rel_bias_even": ({"rel_key": None, "rel_bias": zeros(4)}, ValueError, ["even number of rows (4)"]),
    "p2c_width": ({"rel_p2c": zeros(9, 6)}, ValueError, ["rel_p2c", "width = 8", "(9, 6)"]),
    "p2c_width_of_rel_query": (
        {"rel_query": zeros(2, 3, 5, 6), "rel_key": zeros(9, 6), "rel_p2c": zeros(9, 6)},
        ValueError,
        ["rel_p2c", "width = 8"],
    ),
    "p2c_heads": ({"rel_p2c": zeros(2, 9, 8)}, ValueError, ["rel_p2c", "(3, 9, 8)", "(2, 9, 8)"]),
    "p2c_dtype": ({"rel_p2c": zeros(9, 8).half()}, TypeError, ["rel_p2c", "torch.float32", "torch.float16"]),
    "p2c_rows": ({"rel_p2c": zeros(7, 8)}, ValueError, ["same number of rows R", "9 (rel_key)", "7 (rel_p2c)"]),
    "rel_query_with_p2c_alone": (
        {"rel_key": None, "rel_p2c": zeros(9, 8), "rel_query": zeros(2, 3, 5, 8)},
        ValueError,
        ["rel_query needs rel_key"],
    ),
    "rows_differ": ({"rel_bias": zeros(7)}, ValueError, ["same number of rows R", "9 (rel_key)", "7 (rel_bias)"]),
    "rows_of_value_differ": (
        {"rel_value": zeros(11, 4), "rel_bias": zeros(3, 9)},
        ValueError,
        ["same number of rows R", "9 (rel_key)", "11 (rel_value)", "9 (rel_bias)"],
    ),
    "not_covered": (
        {"positions": RelativePositions(-4, 4, "error")},
        ValueError,
        ["positions from -4 to 4", "needs -4 to 6", 'outside="error"'],
    ),
    "not_covered_with_an_offset": (
        {"positions": RelativePositions(-8, 0, "error"), "query_offset": 5, "is_causal": True},
        ValueError,
        ["positions from -8 to 0", "needs -9 to 0"],
    ),
    "not_covered_with_offsets": (
        {"positions": RelativePositions(-6, 2, "error"), "query_offset": lengths([4, 3]), "is_causal": True},
        ValueError,
        ["positions from -6 to 2", "needs -8 to 0"],
    ),
    "window_not_covered": (
        {"positions": RelativePositions(-2, 6, "error"), "window_size": (3, 2)},
        ValueError,
        ["positions from -2 to 6", "needs -3 to 2"],
    ),
    "mask_type": ({"attn_mask": [[True]]}, TypeError, ["attn_mask must be a torch.Tensor, got list"]),
    "mask_dtype": (
        {"attn_mask": zeros(5, 7, dtype=torch.int32)},
        TypeError,
        ["attn_mask must be bool", "torch.float32", "torch.int32"],
    ),
    "mask_half": ({"attn_mask": zeros(5, 7).half()}, TypeError, ["attn_mask must be bool", "torch.float16"]),
    "mask_shape": ({"attn_mask": zeros(7, 5)}, ValueError, ["attn_mask must broadcast", "(2, 3, 5, 7)", "(7, 5)"]),
    "mask_heads": ({"attn_mask": zeros(2, 2, 5, 7)}, ValueError, ["attn_mask must broadcast", "(2, 3, 5, 7)", "(2, 2, 5, 7)"]),
    "mask_rank": ({"attn_mask": zeros(1, 2, 3, 5, 7)}, ValueError, ["attn_mask must broadcast", "(1, 2, 3, 5, 7)"]),
    "mask_device": ({"attn_mask": zeros(5, 7, device="meta")}, ValueError, ["attn_mask", "device cpu", "got meta"]),
    "mask_gradient": ({"attn_mask": zeros(5, 7, requires_grad=True)}, ValueError, ["attn_mask has no gradient", "rel_bias"]),
    "dropout_negative": ({"dropout_p": -0.1}, ValueError, ["dropout_p must lie in [0, 1], got -0.1"]),
    "dropout_beyond": ({"dropout_p": 1.5}, ValueError, ["dropout_p must lie in [0, 1], got 1.5"]),
    "dropout_nan": ({"dropout_p": math.nan}, ValueError, ["dropout_p must be finite, got nan"]),
    "dropout_type": ({"dropout_p": None}, TypeError, ["dropout_p must be a float, got None"]),
    "softcap_zero": ({"softcap": 0.0}, ValueError, ["softcap must be positive, got 0.0"]),
    "softcap_negative": ({"softcap": -5}, ValueError, ["softcap must be positive, got -5"]),
    "softcap_tiny": ({"softcap": 1e-46}, ValueError, ["softcap must be positive, got 1e-46"]),  # 0 in float32
    "softcap_inf": ({"softcap": math.inf}, ValueError, ["softcap must be finite, got inf"]),
    "scale_tensor": ({"scale": zeros(())}, TypeError, ["scale must be a float, got a tensor; .item() reads its value"]),
    "scale_learned": (
        {"scale": torch.nn.Parameter(zeros(()))},
        TypeError,
        ["scale must be a float and has no gradient", "multiply query by it, with rel_query and rel_p2c", "scale=1.0"],
    ),
    "scale_learned_with_rel_scale": (
        {"scale": torch.nn.Parameter(zeros(())), "rel_scale": 1.0},
        TypeError,
        ["multiply query by it, pass the unscaled query as rel_query, and scale=1.0"],
    ),
    "rel_scale_learned": (
        {"rel_scale": torch.nn.Parameter(zeros(()))},
        TypeError,
        ["rel_scale must be a float", "multiply rel_key and rel_p2c by it, and pass rel_scale=1.0"],
    ),
    "softcap_learned": (
        {"softcap": torch.nn.Parameter(zeros(()))},
        TypeError,
        ["softcap must be a float and has no gradient", "train it with dense attention"],
    ),
    "softcap_type": ({"softcap": True}, TypeError, ["softcap must be a float, got True"]),
    "window_int": ({"window_size": 3}, TypeError, ["window_size must be a pair (left, right), got 3"]),
    "window_of_three": ({"window_size": (1, 2, 3)}, TypeError, ["window_size must be a pair", "(1, 2, 3)"]),
    "window_negative": ({"window_size": (-2, 3)}, ValueError, ["window_size", "at least -1", "(-2, 3)"]),
    "window_float": ({"window_size": (1.0, 3)}, TypeError, ["window_size must be an int, got 1.0"]),
    "exact_delta_int": ({"exact_query_grad": 1}, TypeError, ["exact_query_grad must be a bool, got 1"]),
    "offsets_shape": ({"query_offset": lengths([1, 2, 3])}, ValueError, ["query_offset", "(batch,) = (2,)", "(3,)"]),
    "offsets_scalar_dtype": ({"query_offset": lengths(1.0)}, TypeError, ["query_offset must be int32 or int64", "torch.float32"]),
    "offsets_dtype": ({"query_offset": lengths([1.0, 2.0])}, TypeError, ["query_offset must be int32 or int64", "torch.float32"]),
    "offsets_device": (
        {"query_offset": zeros(2, dtype=torch.int64, device="meta")},
        ValueError,
        ["query_offset", "device cpu", "got meta"],
    ),
    "lengths_type": ({"key_lengths": [7, 7]}, TypeError, ["key_lengths must be a torch.Tensor, got list"]),
    "lengths_dtype": ({"key_lengths": lengths([7.0, 7.0])}, TypeError, ["key_lengths must be int32 or int64", "torch.float32"]),
    "lengths_shape": ({"key_lengths": lengths([7, 7, 7])}, ValueError, ["key_lengths", "(batch,) = (2,)", "(3,)"]),
    "lengths_rank": ({"key_lengths": lengths([[7], [7]])}, ValueError, ["key_lengths", "(2,)", "(2, 1)"]),
    "lengths_device": ({"key_lengths": zeros(2, dtype=torch.int64, device="meta")}, ValueError, ["key_lengths", "got meta"]),
    "lengths_negative": ({"key_lengths": lengths([-1, 7])}, ValueError, ["[0, 7]", "from -1 to 7"]),
    "lengths_beyond": ({"key_lengths": lengths([3, 8])}, ValueError, ["[0, 7]", "from 3 to 8"]),
    "scale_nan": ({"scale": math.nan}, ValueError, ["scale must be finite, got nan"]),
    "scale_inf": ({"scale": -math.inf}, ValueError, ["scale must be finite, got -inf"]),
    "scale_huge": ({"scale": 1e300}, ValueError, ["scale must be finite, got 1e+300", "float32 ends at"]),
    "scale_huge_int": ({"scale": 10**400}, ValueError, ["scale must be finite, got 1000"]),
    "offset_huge": ({"query_offset": 2**63}, ValueError, ["query_offset must lie within +-2**29, got 9223372036854775808"]),
    "window_huge": ({"window_size": (3, 2**31)}, ValueError, ["window_size must lie within +-2**29, got 2147483648"]),
    "lse_str": ({"return_lse": "no"}, TypeError, ["return_lse must be a bool, got 'no'"]),
    "scale_str": ({"scale": "8"}, TypeError, ["scale must be a float, got '8'"]),
    "scale_bool": ({"scale": True}, TypeError, ["scale must be a float, got True"]),
    "offset_float": ({"query_offset": 2.0}, TypeError, ["query_offset must be an int, got 2.0"]),
    "offset_bool": ({"query_offset": False}, TypeError, ["query_offset must be an int, got False"]),
    "causal_int": ({"is_causal": 1}, TypeError, ["is_causal must be a bool, got 1"]),
    "implementation": ({"implementation": "flash"}, ValueError, ["('triton', 'blockwise', 'reference')", "got 'flash'"]),
}


@pytest.mark.parametrize("case", RAISES)
def test_bad_argument(case: str, no_launch: None) -> None:
    changes, error, parts = RAISES[case]
    with pytest.raises(error) as raised:
        call(**changes)
    for part in parts:
        assert part in str(raised.value), f"{part!r} is not in {str(raised.value)!r}"


SWAPPED = {"query": zeros(2, 5, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4)}
LAYOUT = ".transpose(1, 2) makes them (batch, heads, length, width)"
CURES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "mask": ({"rel_key": zeros(5, 7, dtype=torch.bool)}, TypeError, ["rel_key must be float16", "attn_mask=..."]),
    "float_mask": ({"rel_key": zeros(2, 1, 5, 7)}, ValueError, ["rel_key must have shape", "attn_mask=..."]),
    "padding_mask": ({"rel_key": zeros(2, 1, 1, 7)}, ValueError, ["rel_key must have shape", "attn_mask=..."]),
    "layout": (SWAPPED, ValueError, ["key must have query's 5 heads, got 7", LAYOUT]),
    "layout_of_table": (
        {"query": zeros(2, 7, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4), "rel_key": zeros(3, 9, 8)},
        ValueError,
        ["rel_key must have shape (heads, R, width) = (7, 9, 8)", LAYOUT],
    ),
    "layout_of_mask": (
        {"query": zeros(2, 7, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4), "attn_mask": zeros(7, 7)},
        ValueError,
        ["attn_mask must broadcast", LAYOUT],
    ),
    "layout_of_lengths": (
        {"query": zeros(2, 7, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4), "key_lengths": lengths([7, 5])},
        ValueError,
        ["key_lengths must lie in [0, 3]", LAYOUT],
    ),
    "embedding": (
        {"rel_key": torch.nn.Embedding(9, 8)},
        TypeError,
        ["rel_key must be a torch.Tensor, got Embedding", "pass the weights of a module: rel_key=module.weight"],
    ),
    "positions": ({"positions": (-4, 4)}, TypeError, ["got tuple", "positions=RelativePositions(-4, 4)"]),
    "rows_first": ({"rel_key": zeros(9, 3, 8)}, ValueError, ["got (9, 3, 8)", ".transpose(0, 1) makes it (heads, R, width)"]),
    "heads_joined": ({"rel_key": zeros(9, 24)}, ValueError, ["got (9, 24)", ".unflatten(1, (3, -1)).transpose(0, 1) makes it"]),
    "transposed": ({"rel_key": zeros(8, 9)}, ValueError, ["got (8, 9)", "rel_key.mT has rows of a distance each"]),
    "heads_transposed": ({"rel_key": zeros(3, 8, 9)}, ValueError, ["got (3, 8, 9)", "rel_key.mT has rows"]),
    "a_bias_as_the_table": (
        {"rel_key": zeros(3, 9)},
        ValueError,
        ["got (3, 9)", "a bias by distance, (R,) or (heads, R), is rel_bias"],
    ),
    "weight_of_t5": (
        {"rel_key": None, "rel_bias": zeros(32, 3)},
        ValueError,
        ["got (32, 3)", "rel_bias=weight[tables.t5_buckets(torch.arange(-128, 129))].T"],
    ),
    "half_of_the_rows": (
        {"positions": RelativePositions.centred(5)},
        ValueError,
        [
            "R = 9 rows, but positions from -2 to 2 need 5",
            "centred takes the number of rows: positions=RelativePositions.centred(9)",
        ],
    ),
    "mask_per_batch_entry": (
        {"attn_mask": zeros(2, 1, 7, dtype=torch.bool)},
        ValueError,
        ["attn_mask must broadcast", "attn_mask[:, None] is one mask per batch entry"],
    ),
    "padding_mask_per_batch_entry": (
        {"attn_mask": zeros(2, 7)},
        ValueError,
        ["attn_mask must broadcast", "attn_mask[:, None, None] is one mask per batch entry"],
    ),
    "mask_of_a_tokenizer": (
        {"attn_mask": zeros(2, 7, dtype=torch.int64)},
        TypeError,
        ["got torch.int64", "attn_mask[:, None, None].bool() is one mask per batch entry"],
    ),
    "mask_of_integers_per_batch_entry": (
        {"attn_mask": zeros(2, 5, 7, dtype=torch.int64)},
        TypeError,
        ["got torch.int64", "attn_mask[:, None].bool() is one mask per batch entry"],
    ),
    "mask_of_integers": (
        {"attn_mask": zeros(2, 1, 5, 7, dtype=torch.uint8)},
        TypeError,
        ["got torch.uint8", "attn_mask.bool() is True where a query may attend"],
    ),
    "layout_with_rel_query": ({**SWAPPED, "rel_query": zeros(2, 5, 3, 8)}, ValueError, ["got 7", LAYOUT]),
}


@pytest.mark.parametrize("case", CURES)
def test_an_error_names_the_cure(case: str, no_launch: None) -> None:
    """The error names the cure if a call is valid once the mask, or the dimensions, are where they belong."""
    changes, error, parts = CURES[case]
    with pytest.raises(error) as raised:
        call(**changes)
    for part in parts:
        assert part in str(raised.value), f"{part!r} is not in {str(raised.value)!r}"


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("causal", "here it is is_causal"),
        ("softmax_scale", "here it is scale"),
        ("mask", "here it is attn_mask"),
        ("dropout", "here it is dropout_p"),
        ("key_padding_mask", "here it is key_len"),
        ("alibi_slopes", "here it is rel_bias=tables.alibi_bias"),
        ("cu_seqlens", "here it is cu_seqlens_q and cu_seqlens_k of fused_relative_attention_varlen"),
        ("cu_seqlens_q", "fused_relative_attention_varlen has it"),
        ("position_bias", "here it is rel_bias"),
        ("pos_bias_u", "here it is an argument of tables.fold_transformer_xl"),
        ("att_context_size", "here it is window_size"),
        ("deterministic", "there is none here: results always repeat"),
        ("block_table", "there is none here: a paged cache"),
        ("return_softmax", "here it is return_lse"),
        ("is_causl", "did you mean 'is_causal'?"),
        ("rel_keys", "did you mean 'rel_key'?"),
    ],
)
def test_names_of_other_libraries(name: str, here: str) -> None:
    with pytest.raises(TypeError, match=rf"fused_relative_attention\(\) got an unexpected .* '{name}'; {re.escape(here)}"):
        call(**{name: None})


def test_a_learned_scale_as_the_errors_say() -> None:
    """A query, with what goes with it, times the scale is attention with that scale, and the scale gets its gradient."""
    scale = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
    inputs = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float64, seed=0)
    query, key, value, table = inputs[:4]
    assert table is not None
    other, p2c = query.flip(2), table.flip(0)
    for given, learned in (
        ({}, {}),
        ({"rel_query": other, "rel_p2c": p2c}, {"rel_query": scale * other, "rel_p2c": scale * p2c}),
        ({"rel_scale": 0.7, "rel_p2c": p2c}, {"rel_scale": 0.7, "rel_p2c": p2c, "rel_query": query}),
    ):
        expected: Any = fused_relative_attention(query, key, value, table, scale=0.3, **given)  # type: ignore[arg-type, call-overload]
        out: Any = fused_relative_attention(scale * query, key, value, table, scale=1.0, **learned)  # type: ignore[arg-type, call-overload]
        assert_same("out", out, expected)
        assert torch.autograd.grad(out.sum(), scale)[0].abs() > 1e-6


def test_names_that_mean_nothing_here() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'colour'$"):
        call(colour=None)


def test_packed_calls_say_where_masks_are_taken() -> None:
    with pytest.raises(TypeError, match=r"_varlen\(\) got .* 'attn_mask'; fused_relative_attention has it"):
        call_varlen(attn_mask=None)
    with pytest.raises(TypeError, match=r"_varlen\(\) got .* 'max_seqlen'; did you mean 'max_seqlen_"):
        call_varlen(max_seqlen=3)


def test_a_cure_is_tried_without_a_warning() -> None:
    """A call that is probably a mistake even once it is cured raises, and does no more."""
    with warnings.catch_warnings(), pytest.raises(TypeError, match=re.escape("attn_mask.bool()")):
        warnings.simplefilter("error")
        call(attn_mask=zeros(2, 1, 5, 7, dtype=torch.int64))


def test_no_cure_is_named_that_is_none() -> None:
    """Forgotten enable_gqa, of heads fewer than positions; a wrong table; a mask that has its name."""
    for changes in (
        {"query": zeros(2, 4, 7, 8), "key": zeros(2, 2, 7, 8), "value": zeros(2, 2, 7, 4)},
        {"rel_key": zeros(9, 4)},
        {"rel_key": zeros(5, 7, dtype=torch.bool), "attn_mask": zeros(5, 7)},
        {**SWAPPED, "query_offset": 0.5},
    ):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**changes)
        assert "transpose" not in str(raised.value) and "attn_mask" not in str(raised.value)


def in_layout_of_flash(length: int, heads: int) -> dict[str, torch.Tensor]:
    """Query, key and value as (batch, length, heads, width)."""
    return {name: zeros(1, length, heads, width) for name, width in (("query", 8), ("key", 8), ("value", 4))}


def doubts_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    """The warnings of three calls, packed ones if one of the changes is an argument of those."""
    monkeypatch.setattr(warn, "_given", set())
    function = call_varlen if any("seqlen" in name for name in changes) else call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(**changes)
    assert all(each.category is UserWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


TWO_OF_TWO = {"query": zeros(2, 2, 2, 8), "key": zeros(2, 2, 7, 8), "value": zeros(2, 2, 7, 4)}
DOUBTS: dict[str, tuple[dict[str, Any], str]] = {
    "outgrown_table": (
        {"query": zeros(2, 3, 600, 8), "rel_key": zeros(1027, 8)},
        "stand for distances up to 513, and this call has longer ones.*RelativePositions.centred(1027) says",
    ),
    "table_of_the_past": (
        {"query": zeros(2, 3, 1027, 8), "rel_key": zeros(1027, 8), "is_causal": True},
        "if the last row stands for the query's own position, positions=RelativePositions(-1026, 0)",
    ),
    "odd_table_of_the_past": (
        {"query": zeros(2, 3, 9, 8), "key": zeros(2, 3, 9, 8), "value": zeros(2, 3, 9, 4), "is_causal": True},
        "stand for distances up to 4.*centred(9) says.*the query's own position, positions=RelativePositions(-8, 0)",
    ),
    "odd_table_of_a_past_that_a_window_limits": (
        {"query": zeros(2, 3, 50, 8), "window_size": (8, 0)},
        "stand for distances up to 4.*positions=RelativePositions(-8, 0)",
    ),
    "table_of_the_future": (
        {"positions": RelativePositions(0, 8), "is_causal": True, "query_offset": 2},
        "from 0 to 8, but is_causal or window_size hides those above 0.*RelativePositions(-8, 0); if the first row does, tables.",
    ),
    "mask_per_head_or_batch_entry": (
        {**TWO_OF_TWO, "attn_mask": torch.ones(2, 1, 7, dtype=torch.bool)},
        "attn_mask (2, 1, 7) is taken as (heads, Nq, Nk).*attn_mask[:, None] is one mask per batch entry; attn_mask[None] says",
    ),
    "mask_per_query_or_batch_entry": (
        {**TWO_OF_TWO, "attn_mask": torch.ones(2, 7, dtype=torch.bool)},
        "attn_mask (2, 7) is taken as (Nq, Nk).*attn_mask[:, None, None] is one mask per batch entry; attn_mask[None, None] says",
    ),
    "opposite_offset": (
        {"query": zeros(2, 3, 1, 8), "is_causal": True, "query_offset": -6},
        "no query sees a key: with query_offset=-6.*from 6 to 12.*keys before the first query, perhaps 6; return_lse=True",
    ),
    "opposite_offset_of_each": (
        {"query": zeros(2, 3, 1, 8), "is_causal": True, "query_offset": lengths([-6, -2])},
        "no query sees a key: with query_offset=-6",
    ),
    "offset_beyond_the_window": ({"window_size": (2, 0), "query_offset": 9}, "no query sees a key: with query_offset=9"),
    "opposite_offset_of_packed_steps": (
        {"max_seqlen_q": 3, "is_causal": True, "query_offset": -4},
        "no query sees a key: with query_offset=-4",
    ),
    "opposite_mask": (
        {"attn_mask": zeros(2, 1, 1, 7, dtype=torch.bool)},
        "hides every key of every query: a bool mask is True where a query may attend (~attn_mask.*return_lse=True",
    ),
    "mask_of_lowest_numbers": (
        {"attn_mask": torch.full((5, 7), torch.finfo(torch.float32).min)},
        "hides every key of every query",
    ),
    "layout": (
        {"query": zeros(1, 300, 2, 8), "key": zeros(1, 300, 2, 8), "value": zeros(1, 300, 2, 4)},
        f"query has 300 heads, but 2 positions.*{LAYOUT}",
    ),
    "layout_with_a_full_table": (
        {"query": zeros(1, 7, 2, 8), "key": zeros(1, 7, 2, 8), "value": zeros(1, 7, 2, 4), "rel_key": zeros(13, 8)},
        f"query has 7 heads, but 2 positions.*{LAYOUT}",
    ),
    "layout_with_a_short_table": ({**in_layout_of_flash(100, 8), "rel_key": zeros(33, 8)}, f"query has 100 heads.*{LAYOUT}"),
    "layout_with_positions": (
        {**in_layout_of_flash(100, 8), "rel_key": zeros(9, 8), "positions": RelativePositions(-8, 0, "zero")},
        f"query has 100 heads.*{LAYOUT}",
    ),
    "one_step": (
        {"query": zeros(2, 3, 1, 8), "is_causal": True},
        "1 queries and 7 keys has no query_offset.*query_offset=6, the",
    ),
    "a_chunk": ({"is_causal": True}, "the last 2 keys;.*query_offset=2, the number of keys.*query_offset=0 says"),
    "a_window_to_the_past": ({"window_size": (2, 0)}, "query_offset=2, the number of keys before the first query"),
    "a_step_with_padding": (
        {"query": zeros(2, 3, 1, 8), "is_causal": True, "key_lengths": lengths([1, 6])},
        "1 queries and 6 keys has no query_offset.*query_offset=5, the",
    ),
    "packed_steps": ({"max_seqlen_q": 3, "is_causal": True}, "3 queries and 4 keys has no query_offset"),
}


@pytest.mark.parametrize("case", DOUBTS)
def test_a_doubtful_call_is_warned_of_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, pattern = DOUBTS[case]
    (message,) = doubts_of(monkeypatch, **changes)
    assert re.search(re.escape(pattern).replace(r"\.\*", ".*"), message), message


NO_DOUBTS: dict[str, dict[str, Any]] = {
    "clipped": {"query": zeros(2, 3, 600, 8), "rel_key": zeros(33, 8)},
    "clipped_as_far_as_anybody_does": {"query": zeros(2, 3, 600, 8), "rel_key": zeros(1025, 8)},
    "covered": {"query": zeros(2, 3, 514, 8), "rel_key": zeros(1027, 8)},
    "covered_by_a_window": {"query": zeros(2, 3, 600, 8), "rel_key": zeros(1027, 8), "window_size": (513, -1)},
    "said": {"query": zeros(2, 3, 600, 8), "rel_key": zeros(1027, 8), "positions": RelativePositions.centred(1027)},
    "offsets_on_the_device": {"rel_key": zeros(1027, 8), "query_offset": lengths([600, 0])},
    "one_query": {"query": zeros(2, 16, 1, 8), "key": zeros(2, 16, 20, 8), "value": zeros(2, 16, 20, 4)},
    "few_positions": {"query": zeros(2, 16, 5, 8), "key": zeros(2, 16, 5, 8), "value": zeros(2, 16, 5, 4)},
    "many_heads": {**in_layout_of_flash(64, 80), "rel_key": zeros(33, 8)},
    "a_prompt_and_a_table_for_each_head": {**in_layout_of_flash(64, 5), "rel_key": zeros(64, 9, 8)},
    "a_prompt_and_a_bias_for_each_head": {**in_layout_of_flash(64, 5), "rel_key": None, "rel_bias": zeros(64, 9)},
    "a_prompt_and_a_mask_for_each_head": {
        **in_layout_of_flash(64, 5),
        "rel_key": zeros(33, 8),
        "attn_mask": torch.ones(1, 64, 5, 5, dtype=torch.bool),
    },
    "a_prompt_and_grouped_heads": {
        **in_layout_of_flash(8, 5),
        "query": zeros(1, 64, 5, 8),
        "rel_key": zeros(33, 8),
        "enable_gqa": True,
    },
    "a_prompt_without_a_table": {**in_layout_of_flash(96, 8), "rel_key": None},
    "a_step_of_many_heads": {**in_layout_of_flash(64, 20), "query": zeros(1, 64, 1, 8), "rel_key": zeros(33, 8)},
    "a_first_step": {**in_layout_of_flash(64, 1), "rel_key": zeros(33, 8)},
    "cross_attention": {},
    "an_offset": {"is_causal": True, "query_offset": 2, "positions": RelativePositions(-8, 0)},
    "an_offset_of_0": {"is_causal": True, "query_offset": 0},
    "an_offset_of_each": {"is_causal": True, "query_offset": lengths([0, 0])},
    "a_window": {"window_size": (2, 2)},
    "fewer_keys": {"query": zeros(2, 3, 9, 8), "is_causal": True, "positions": RelativePositions.centred(9)},
    "a_causal_call_of_a_full_table": {"query": zeros(2, 3, 7, 8), "rel_key": zeros(13, 8), "is_causal": True},
    "a_causal_call_of_a_short_table": {"query": zeros(2, 3, 50, 8), "is_causal": True},
    "a_first_token": {
        **{name: each[:, :, :1] for name, each in TWO_OF_TWO.items()},
        "is_causal": True,
        "positions": RelativePositions(-8, 0),
    },
    "one_row": {"query": zeros(2, 3, 9, 8), "rel_key": zeros(1, 8), "positions": RelativePositions(0, 0), "is_causal": True},
    "rows_of_the_future_that_are_seen": {"positions": RelativePositions(0, 8)},
    "a_mask_per_head": {**TWO_OF_TWO, "attn_mask": torch.ones(1, 2, 1, 7, dtype=torch.bool)},
    "a_mask_per_head_of_another_batch": {"attn_mask": torch.ones(3, 1, 7, dtype=torch.bool)},
    "a_mask_per_batch_entry": {**TWO_OF_TWO, "attn_mask": torch.ones(2, 1, 1, 7, dtype=torch.bool)},
    "a_mask_per_pair": {**TWO_OF_TWO, "attn_mask": torch.ones(1, 1, 2, 7, dtype=torch.bool)},
    "a_square_mask": {
        **{name: each[:, :, :2] for name, each in TWO_OF_TWO.items()},
        "attn_mask": torch.ones(2, 2, dtype=torch.bool),
    },
    "a_mask_that_shows_one_pair": {"attn_mask": (torch.arange(35) == 9).view(5, 7)},
    "numbers_that_hide_some_keys": {"attn_mask": torch.arange(7) * -1e9},
    "an_offset_that_shows_one_pair": {"is_causal": True, "query_offset": -4},
    "offsets_one_of_which_shows_a_pair": {"query": zeros(2, 3, 1, 8), "is_causal": True, "query_offset": lengths([-6, 0])},
    "a_part_of_the_future": {"is_causal": True, "query_offset": -6, "return_lse": True},
    "a_mask_that_hides_a_part": {"attn_mask": zeros(5, 7, dtype=torch.bool), "return_lse": True},
    "a_cache_that_is_not_full": {"is_causal": True, "key_lengths": lengths([5, 3])},
    "no_queries": {"query": zeros(2, 3, 0, 8), "is_causal": True},
    "packed_alike": {"is_causal": True, "max_seqlen_q": 4},
    "packed_with_an_offset": {"is_causal": True, "max_seqlen_q": 3, "query_offset": 1},
}


@pytest.mark.parametrize("case", NO_DOUBTS)
def test_what_is_meant_is_not_warned_of(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doubts_of(monkeypatch, **NO_DOUBTS[case]) == []


SAME: dict[str, tuple[Any, Any]] = {
    "window_size": (None, (-1, -1)),
    "query_offset": (lengths(2), lengths([2, 2])),
    "query_offset by default": (None, 0),
    "key_lengths": (lengths(4, dtype=torch.int32), lengths([4, 4])),
}


@pytest.mark.parametrize("name", SAME)
def test_other_ways_to_say_the_same(name: str) -> None:
    one, other = SAME[name]
    name = name.partition(" ")[0]
    assert torch.equal(call(**{name: one}), call(**{name: other}))


def test_numbers_of_numpy() -> None:
    """Integers and floats of any width; its arrays and booleans are none."""
    numpy = pytest.importorskip("numpy")
    expected = call(scale=0.5, query_offset=1, window_size=(3, 2), softcap=2.0, rel_scale=0.25)
    ours = {"scale": numpy.float32(0.5), "softcap": numpy.float16(2), "rel_scale": numpy.float64(0.25)}
    ours |= {"query_offset": numpy.int64(1), "window_size": (numpy.int8(3), numpy.uint32(2))}
    assert torch.equal(call(**ours), expected)
    assert torch.equal(call_varlen(max_seqlen_q=numpy.int32(3), max_seqlen_k=numpy.int64(4)), call_varlen())
    with pytest.raises(ValueError, match="max_seqlen_q must be at least 3"):
        call_varlen(max_seqlen_q=numpy.int32(2))
    for name, value, message in (
        ("scale", numpy.array(0.5), "scale must be a float, got array"),
        ("scale", numpy.bool_(True), "scale must be a float, got np.True_"),
        ("query_offset", numpy.float32(1), "query_offset must be an int, got np.float32"),
        ("window_size", (numpy.bool_(True), 0), "window_size must be an int, got np.True_"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            call(**{name: value})


RAISES_VARLEN: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query_rank": ({"query": zeros(1, 5, 3, 8)}, ValueError, ["query must have 3 dimensions", "(total, heads, width)"]),
    "key_rank": ({"key": zeros(7, 8)}, ValueError, ["key must have 3 dimensions", "(7, 8)"]),
    "key_heads": ({"key": zeros(7, 1, 8)}, ValueError, ["query's 3 heads", "got 1 in (7, 1, 8)"]),
    "heads_do_not_divide": (
        {"key": zeros(7, 2, 8), "value": zeros(7, 2, 4), "enable_gqa": True},
        ValueError,
        ["multiple of key's", "got 3 and 2"],
    ),
    "key_width": ({"key": zeros(7, 3, 4)}, ValueError, ["key", "(7, 3, 8)", "(7, 3, 4)"]),
    "value_length": ({"value": zeros(6, 3, 4)}, ValueError, ["value", "(7, 3, 4)", "(6, 3, 4)"]),
    "rel_query_length": ({"rel_query": zeros(7, 3, 8)}, ValueError, ["rel_query", "(5, 3, 8)", "(7, 3, 8)"]),
    "q_type": ({"cu_seqlens_q": [0, 2, 2, 5]}, TypeError, ["cu_seqlens_q must be a torch.Tensor, got list"]),
    "k_type": ({"cu_seqlens_k": None}, TypeError, ["cu_seqlens_k must be a torch.Tensor, got NoneType"]),
    "q_dtype": ({"cu_seqlens_q": lengths([0.0, 5.0])}, TypeError, ["cu_seqlens_q must be int32 or int64", "torch.float32"]),
    "q_rank": ({"cu_seqlens_q": lengths([[0, 2, 2, 5]])}, ValueError, ["cu_seqlens_q", "(1, 4)"]),
    "q_scalar": ({"cu_seqlens_q": lengths(5)}, ValueError, ["cu_seqlens_q", "()"]),
    "q_empty": ({"cu_seqlens_q": zeros(0, dtype=torch.int64)}, ValueError, ["cu_seqlens_q", "(0,)"]),
    "q_device": ({"cu_seqlens_q": zeros(4, dtype=torch.int64, device="meta")}, ValueError, ["cu_seqlens_q", "got meta"]),
    "q_start": ({"cu_seqlens_q": lengths([1, 2, 2, 5])}, ValueError, ["rise from 0 to the total length 5", "[1, 2, 2, 5]"]),
    "q_end": ({"cu_seqlens_q": lengths([0, 2, 2, 4])}, ValueError, ["cu_seqlens_q must rise from 0", "5", "[0, 2, 2, 4]"]),
    "k_beyond": ({"cu_seqlens_k": lengths([0, 4, 5, 9])}, ValueError, ["cu_seqlens_k must rise from 0", "7", "[0, 4, 5, 9]"]),
    "k_falling": ({"cu_seqlens_k": lengths([0, 4, 3, 7])}, ValueError, ["cu_seqlens_k must rise", "[0, 4, 3, 7]"]),
    "numbers_differ": ({"cu_seqlens_k": lengths([0, 4, 7])}, ValueError, ["cu_seqlens_k", "(4,)", "(3,)"]),
    "q_longer": ({"max_seqlen_q": 2}, ValueError, ["max_seqlen_q must be at least 3", "cu_seqlens_q", "got 2"]),
    "k_longer": ({"max_seqlen_k": 1}, ValueError, ["max_seqlen_k must be at least 4", "cu_seqlens_k", "got 1"]),
    "negative": ({"max_seqlen_q": -1}, ValueError, ["max_seqlen_q must not be negative, got -1"]),
    "max_float": ({"max_seqlen_k": 4.0}, TypeError, ["max_seqlen_k must be an int, got 4.0"]),
    "max_tensor": ({"max_seqlen_k": lengths(4)}, TypeError, ["max_seqlen_k must be an int, got a tensor; .item() reads"]),
    "offsets": ({"query_offset": lengths([1, 2])}, ValueError, ["query_offset", "(batch,) = (3,)", "(2,)"]),
    "layout": (
        {"query": zeros(3, 5, 8), "key": zeros(3, 7, 8), "value": zeros(3, 7, 4)},
        ValueError,
        ["key must have query's 5 heads", ".transpose(0, 1) makes them (total, heads, width)"],
    ),
    "not_covered": (
        {"positions": RelativePositions(-4, 4, "error"), "query_offset": 3},
        ValueError,
        ["positions from -4 to 4", "needs -5 to 0"],
    ),
    "dropout": ({"dropout_p": 2.0}, ValueError, ["dropout_p must lie in [0, 1], got 2.0"]),
}


@pytest.mark.parametrize("case", RAISES_VARLEN)
def test_bad_argument_of_packed_calls(case: str, no_launch: None) -> None:
    changes, error, parts = RAISES_VARLEN[case]
    with pytest.raises(error) as raised:
        call_varlen(**changes)
    for part in parts:
        assert part in str(raised.value), f"{part!r} is not in {str(raised.value)!r}"


COVERED: dict[str, dict[str, Any]] = {
    # of 5 queries and 7 keys
    "exactly": {"rel_key": zeros(11, 8), "positions": RelativePositions(-4, 6, "error")},
    "causal": {"rel_key": zeros(5, 8), "positions": RelativePositions(-4, 0, "error"), "is_causal": True},
    "window": {"rel_key": zeros(4, 8), "positions": RelativePositions(-2, 1, "error"), "window_size": (2, 1)},
    "offsets": {
        "rel_key": zeros(9, 8),
        "positions": RelativePositions(-8, 0, "error"),
        "is_causal": True,
        "query_offset": lengths([4, 0]),
    },
}


@pytest.mark.parametrize("case", COVERED)
def test_positions_that_cover(case: str) -> None:
    """outside="error" raises only if some visible pair may have no row."""
    assert call(**COVERED[case]).shape == (2, 3, 5, 4)
    bounds = COVERED[case]["positions"]
    for first, last in ((bounds.first + 1, bounds.last), (bounds.first, bounds.last - 1)):
        fewer = {"rel_key": COVERED[case]["rel_key"][1:], "positions": RelativePositions(first, last, "error")}
        with pytest.raises(ValueError, match=f"positions from {first} to {last} do not cover"):
            call(**{**COVERED[case], **fewer})


def test_values_are_checked_where_they_are_readable() -> None:
    """A fake tensor has no values to check, a real one on the CPU has."""
    good = {
        "rel_bias": zeros(3, 9),
        "rel_value": zeros(9, 4),
        "rel_p2c": zeros(9, 8),
        "attn_mask": zeros(1, 3, 1, 7),
        "dropout_p": 1,
        "softcap": 30,
    }
    assert call(**good, window_size=[0, 3], query_offset=lengths([1, -1]), exact_query_grad=True).shape == (2, 3, 5, 4)
    with FakeTensorMode() as mode:
        tensors: dict[str, Any] = {name: mode.from_tensor(zeros(5, 3, 8)) for name in ("query", "key", "value")}
        starts = mode.from_tensor(lengths([0, 9, 4]))
        out = fused_relative_attention_varlen(**tensors, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=5, max_seqlen_k=5)
    assert isinstance(out, torch.Tensor) and out.shape == (5, 3, 8)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_every_implementation_is_checked_alike(implementation: str, no_launch: None) -> None:
    with pytest.raises(ValueError, match=re.escape("(2, 1, 7, 8)")):
        call(key=zeros(2, 1, 7, 8), implementation=implementation)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_good_lengths(dtype: torch.dtype) -> None:
    out = call(key_lengths=torch.tensor([0, 7], dtype=dtype))
    assert not out[0].any() and out[1].all()


def test_lengths_of_a_fake_device_are_not_read() -> None:
    """A meta tensor has no values: only shapes are checked, and no error speaks of values."""
    inputs = make_inputs(2, 3, 5, 7, 8, num_rows=9, dtype=torch.float32, device="meta", seed=0)
    out = fused_relative_attention(*inputs[:4], key_lengths=torch.zeros(2, dtype=torch.int64, device="meta"))  # type: ignore[arg-type]
    assert isinstance(out, torch.Tensor) and out.shape == (2, 3, 5, 8) and out.device.type == "meta"


def test_triton_on_the_cpu_says_why_and_what_to_do(no_launch: None) -> None:
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError) as raised:
        call(implementation="triton")
    with pytest.raises(NotImplementedError, match='implementation="triton" cannot run here'):
        call_varlen(implementation="triton")
    for part in ('implementation="triton" cannot run here', "on cpu, not on a GPU", "TRITON_INTERPRET=1", "implementation=None"):
        assert part in str(raised.value)
    tensor = zeros(1, 1, 1, 8)
    assert not can_run_triton(tensor, tensor)
    with pytest.raises(NotImplementedError, match="on cpu, not on a GPU"):
        can_run_triton(tensor, tensor, raise_error=True)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (zeros(1, 1, 1, 8, dtype=torch.float64), "not in torch.float64"),
        (zeros(1, 1, 1, 272), r"widths up to 256, got 272 \(query\), 272 \(value\)"),
        (zeros(1, 1, 1, 8, dtype=torch.bfloat16), "interpreter computes bfloat16 wrongly"),
    ],
    ids=["float64", "wide", "bfloat16"],
)
def test_triton_in_the_interpreter_says_what_it_cannot_do(
    tensor: torch.Tensor, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    kernels = pytest.importorskip("triton_relattn.kernels")
    monkeypatch.setattr(kernels, "kernels_are_interpreted", lambda: True)
    with pytest.raises(NotImplementedError, match=reason):
        choose_implementation("triton", tensor, tensor)
    with pytest.raises(NotImplementedError, match=r"got 8 \(query\), 8 \(value\), 272 \(rel_query\)"):
        choose_implementation("triton", zeros(1, 1, 1, 8), zeros(1, 1, 1, 8), zeros(1, 1, 1, 272))


def test_default_never_picks_triton_on_the_cpu() -> None:
    tensor = zeros(1, 1, 1, 8)
    assert choose_implementation(None, tensor, tensor).name == "blockwise"
    for name in ("blockwise", "reference"):
        assert choose_implementation(name, tensor, tensor).name == name

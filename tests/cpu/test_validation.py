"""The contract of a call: a wrong one raises and names the argument, a likely mistake warns once and says what to write."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import triton_relattn
from tests.conftest import forget_warnings
from tests.samples import with_different_strides
from tests.tolerance import assert_same
from triton_relattn import (
    RelativePositions,
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

zeros, lengths, Positions = torch.zeros, torch.tensor, RelativePositions
Changes = dict[str, Any]
Wrong = tuple[Changes, type[Exception], str]


def call(**changes: Any) -> Any:
    """The operator on (B, H, Nq, Nk, D, Dv) = (2, 3, 5, 7, 8, 4), all strides different, with some arguments changed."""
    inputs = with_different_strides(make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0))
    arguments = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "rel_key": inputs.rel_key}
    return fused_relative_attention(**{**arguments, **changes})


def call_varlen(**changes: Any) -> Any:
    """The packed operator on sequences of 2, 0 and 3 queries and 4, 1 and 2 keys, (Hq, Hk, D, Dv) = (3, 3, 8, 4)."""
    inputs = make_inputs(1, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0)
    arguments: Changes = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value")}
    arguments |= {"rel_key": inputs.rel_key, "max_seqlen_q": 3, "max_seqlen_k": 4}
    arguments |= {"cu_seqlens_q": lengths([0, 2, 2, 5]), "cu_seqlens_k": lengths([0, 4, 5, 7], dtype=torch.int32)}
    return fused_relative_attention_varlen(**{**arguments, **changes})


def says(message: str, *parts: str) -> None:
    """Assert that a message has all parts; " | " separates them."""
    for part in " | ".join(parts).split(" | "):
        assert part in message, f"{part!r} is not in {message!r}"


def refused(function: Any, changes: Changes, error: type[Exception], parts: str) -> None:
    with pytest.raises(error) as raised:
        function(**changes)
    says(str(raised.value), parts)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return zeros(*shape, dtype=dtype, device="meta")


def qkv(batch: int, heads: int, length: int, keys: int | None = None, heads_of_keys: int | None = None) -> Changes:
    """Query, key and value of these sizes; (batch, length, heads, width) if heads and lengths are exchanged."""
    keys, heads_of_keys = length if keys is None else keys, heads if heads_of_keys is None else heads_of_keys
    return {
        "query": zeros(batch, heads, length, 8),
        "key": zeros(batch, heads_of_keys, keys, 8),
        "value": zeros(batch, heads_of_keys, keys, 4),
    }


def learned() -> torch.Tensor:
    return torch.nn.Parameter(zeros(()))


GQA: Changes = {"enable_gqa": True}
SWAPPED = {"query": zeros(2, 5, 3, 8), "key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 4)}
SHARED = {"query": zeros(2, 8, 2, 8), "key": zeros(2, 6, 1, 8), "value": zeros(2, 6, 1, 4)}
LAYOUT = ".transpose(1, 2) makes them (batch, heads, length, width)"
WRONG: dict[str, Wrong] = {
    # Tensors of positions.
    "query_rank": ({"query": zeros(3, 5, 8)}, ValueError, "query must have 4 dimensions | (3, 5, 8)"),
    "key_batch": ({"key": zeros(1, 3, 7, 8)}, ValueError, "key | (2, 3, 7, 8) | (1, 3, 7, 8)"),
    "key_heads": ({"key": zeros(2, 1, 7, 8)}, ValueError, "query's 3 heads | got 1 in (2, 1, 7, 8) | enable_gqa=True"),
    "key_heads_do_not_divide": ({**GQA, **qkv(2, 3, 5, 7, 2)}, ValueError, "multiple of key's | got 3 and 2"),
    "no_key_heads": ({**GQA, **qkv(2, 3, 5, 7, 0)}, ValueError, "multiple of key's | got 3 and 0"),
    "gqa_value_heads": ({"key": zeros(2, 1, 7, 8), **GQA}, ValueError, "value | (2, 1, 7, 4) | (2, 3, 7, 4)"),
    "gqa_int": ({"enable_gqa": 1}, TypeError, "enable_gqa must be a bool, got 1"),
    "key_width": ({"key": zeros(2, 3, 7, 4)}, ValueError, "key | (2, 3, 7, 8) | (2, 3, 7, 4)"),
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
    "table_heads": ({"rel_key": zeros(2, 9, 8)}, ValueError, "rel_key | (3, 9, 8) | (2, 9, 8)"),
    "table_without_rows": ({"rel_key": zeros(0, 8)}, ValueError, "rel_key | R >= 1 | (0, 8)"),
    "value_table_width": ({"rel_value": zeros(9, 8)}, ValueError, "rel_value | width = 4 | (9, 8)"),
    "bias_heads": ({"rel_bias": zeros(2, 9)}, ValueError, "rel_bias | (3, 9) | (2, 9)"),
    "bias_without_rows": ({"rel_key": None, "rel_bias": zeros(0)}, ValueError, "rel_bias | R >= 1 | (0,)"),
    "bias_dtype": ({"rel_bias": zeros(9).double()}, TypeError, "rel_bias | torch.float32 | torch.float64"),
    "p2c_width": ({"rel_query": zeros(2, 3, 5, 6), "rel_key": zeros(9, 6), "rel_p2c": zeros(9, 6)}, ValueError, "rel_p2c | = 8"),
    "p2c_rows": ({"rel_p2c": zeros(7, 8)}, ValueError, "rel_p2c must have the same number of rows R as rel_key, 9, got 7"),
    "rows_differ": (
        {"rel_value": zeros(11, 4)},
        ValueError,
        "rel_value must have the same number of rows R as rel_key, 9, got 11",
    ),
    "rel_query_rank": ({"rel_query": zeros(3, 5, 8)}, ValueError, "rel_query must have 4 dimensions | (3, 5, 8)"),
    "rel_query_heads": ({"rel_query": zeros(2, 1, 5, 8)}, ValueError, "rel_query | (2, 3, 5, 8) | (2, 1, 5, 8)"),
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
    "offset_float": ({"query_offset": 2.0}, TypeError, "query_offset must be an int, got 2.0"),
    "offsets_shape": ({"query_offset": lengths([1, 2, 3])}, ValueError, "query_offset | (batch,) = (2,) | (3,)"),
    # What is visible.
    "mask_dtype": ({"attn_mask": zeros(5, 7).half()}, TypeError, "attn_mask must be bool | torch.float32 | torch.float16"),
    "mask_shape": ({"attn_mask": zeros(7, 5)}, ValueError, "attn_mask must broadcast | (2, 3, 5, 7) | (7, 5)"),
    "mask_gradient": ({"attn_mask": zeros(5, 7, requires_grad=True)}, ValueError, "attn_mask is not differentiable | rel_bias"),
    "causal_int": ({"is_causal": 1}, TypeError, "is_causal must be a bool, got 1"),
    "window_int": ({"window_size": 3}, TypeError, "window_size must be a pair (left, right) | got 3"),
    "window_none": ({"window_size": (None, 0)}, TypeError, "a pair (left, right), where -1 means no limit, got (None, 0)"),
    "window_negative": ({"window_size": (-2, 3)}, ValueError, "window_size | at least -1 | (-2, 3)"),
    "window_float": ({"window_size": (1.0, 3)}, TypeError, "window_size must be an int, got 1.0"),
    "window_huge": ({"window_size": (3, 2**31)}, ValueError, "window_size must lie within +-2**29, got 2147483648"),
    "lengths_dtype": ({"key_lengths": lengths([7.0, 7.0])}, TypeError, "key_lengths must be int32 or int64 | torch.float32"),
    "lengths_shape": ({"key_lengths": lengths([7, 7, 7])}, ValueError, "key_lengths | (batch,) = (2,) | (3,)"),
    "lengths_negative": ({"key_lengths": lengths([-1, 7])}, ValueError, "[0, 7] | from -1 to 7"),
    "lengths_beyond": ({"key_lengths": lengths([3, 8])}, ValueError, "[0, 7] | from 3 to 8"),
    # Numbers.
    "scale_nan": ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
    "scale_huge": ({"scale": 1e300}, ValueError, "scale must be finite, got 1e+300 | float32 ends at"),
    "scale_str": ({"scale": "8"}, TypeError, "scale must be a float, got '8'"),
    "scale_tensor": ({"scale": zeros(())}, TypeError, "scale must be a float, got a tensor; .item() reads its value"),
    "rel_scale_nan": ({"rel_scale": math.nan}, ValueError, "rel_scale must be finite, got nan"),
    "rel_scale_alone": ({"rel_key": None, "rel_scale": 1.0}, ValueError, "rel_scale | rel_key and rel_p2c, which are None"),
    "dropout_negative": ({"dropout_p": -0.1}, ValueError, "dropout_p must lie in [0, 1], got -0.1"),
    "dropout_nan": ({"dropout_p": math.nan}, ValueError, "dropout_p must be finite, got nan"),
    "dropout_type": ({"dropout_p": None}, TypeError, "dropout_p must be a float, got None"),
    "softcap_zero": ({"softcap": 0.0}, ValueError, "softcap must be positive, got 0.0 | softcap=None means no limit"),
    "softcap_tiny": ({"softcap": 1e-46}, ValueError, "softcap must be positive, got 1e-46"),  # 0 in float32
    "softcap_inf": ({"softcap": math.inf}, ValueError, "softcap must be finite, got inf"),
    "lse_str": ({"return_lse": "no"}, TypeError, "return_lse must be a bool, got 'no'"),
    "implementation": ({"implementation": "flash"}, ValueError, "('triton', 'blockwise', 'reference') | got 'flash'"),
    # Errors that name the cure, because the call is valid with it.
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
    "not_covered": ({"positions": Positions(-4, 4, "error"), "query_offset": 3}, ValueError, "from -4 to 4 | needs -5 to 0"),
    "mask": ({"attn_mask": None}, TypeError, "_varlen() got | 'attn_mask'; fused_relative_attention has it"),
    "max_seqlen": ({"max_seqlen": 3}, TypeError, "_varlen() got | 'max_seqlen'; did you mean 'max_seqlen_"),
    "triton": ({"implementation": "triton"}, NotImplementedError, 'implementation="triton" cannot run here'),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls(case: str) -> None:
    """The error has the argument's name and the offending value; no warning, and no number drawn for dropout, comes before it."""
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
    """Whatever an argument is, the error names it: none comes from torch, nor from the search for a hint."""
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
    """Each says what it is called here, and what is named there exists."""
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
    """An import says what to use instead; names that never existed have Python's errors."""
    text = f"{package}.{name} was removed in 0.3.0: {removed.NAMES[package][name]}"
    with pytest.raises(ImportError, match=re.escape(text)):
        exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match="cannot import name"):
        exec(f"from {package} import {name}_of_nothing")


def test_every_implementation_is_checked_alike() -> None:
    for implementation in ("blockwise", "reference"):
        refused(call, {"key": zeros(2, 1, 7, 8), "implementation": implementation}, ValueError, "(2, 1, 7, 8)")


def test_no_cure_is_named_that_is_none() -> None:
    """Forgotten enable_gqa, of heads fewer than positions; wrong tables; a mask by its name; positions that do not cover."""
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
    """A query, with what goes with it, times the scale is attention with that scale, and the scale gets its gradient."""
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


def warnings_of(**changes: Any) -> list[str]:
    """The warnings of three calls, packed ones if one of the changes is an argument of those."""
    forget_warnings()
    function = call_varlen if any("seqlen" in name for name in changes) else call
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            function(**changes)
    assert all(each.category is UserWarning and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


def query(length: int, heads: int = 3) -> Changes:
    return {"query": zeros(2, heads, length, 8)}


def of_prompt(length: int, heads: int, rows: int | None = 33) -> Changes:
    """As flash-attn has it, (batch, length, heads, width), or as many heads as that; with a table that heads share."""
    return {**qkv(1, length, heads), "rel_key": rows and zeros(rows, 8)}


CAUSAL: Changes = {"is_causal": True}
PAST_8, TWO_OF_TWO, visible = Positions(-8, 0), qkv(2, 2, 2, 7), torch.ones
SELF = qkv(2, 3, 7)
PADDING, FUTURE = (torch.arange(7) >= lengths([[7], [5]]))[:, None, None], visible(7, 7, dtype=torch.bool).triu(1)
TO_THE_LEFT = (torch.arange(7) >= lengths([[0], [3]]))[:, None, None]
MISTAKES: dict[str, tuple[Changes, str]] = {
    "outgrown_table": (
        {**query(600), "rel_key": zeros(1027, 8)},
        "stand for distances up to 513, and this call has longer ones | RelativePositions.centred(1027) says",
    ),
    "table_of_the_past": (
        {**query(1027), "rel_key": zeros(1027, 8), **CAUSAL},
        "if the last row stands for the query's own position, positions=RelativePositions(-1026, 0)",
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
    "opposite_mask": (
        {"attn_mask": zeros(2, 1, 1, 7, dtype=torch.bool)},
        "hides every key of every query. A bool mask is True where a query may attend | pass ~attn_mask, or return_lse=True",
    ),
    "opposite_mask_of_padding": (
        {**SELF, "attn_mask": PADDING},
        "hides every key of some queries, and shows all others only keys at the end. A bool mask is True where | return_lse=True",
    ),
    "opposite_mask_of_the_future": ({**SELF, "attn_mask": FUTURE}, "hides every key of some queries, and shows all others only"),
    "rows_of_the_past": (
        {"positions": PAST_8},
        "from -8 to 0, but nothing hides the future | is_causal=True hides them, window_size=(-1, -1) says that this is meant",
    ),
    "lowest_mask": (
        {"attn_mask": torch.full((5, 7), torch.finfo(torch.float32).min)},
        "hides every key of every query. A floating-point",
    ),
    "mask_of_ones": ({"attn_mask": (~PADDING).float()}, "only 0 and 1 and is added to the logits | pass attn_mask.bool()"),
    "layout": ({**of_prompt(300, 2), "rel_key": zeros(9, 8)}, f"query has 300 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_full_table": ({**of_prompt(7, 2, 13)}, f"query has 7 heads, but 2 positions | {LAYOUT}"),
    "layout_with_a_short_table": (of_prompt(100, 8), f"query has 100 heads | {LAYOUT}"),
    "one_step": ({**query(1), **CAUSAL}, "1 queries and 7 keys has no query_offset | query_offset=6, the"),
    "a_chunk": (CAUSAL, "the last 2 keys; | query_offset=2, the number of keys | query_offset=0 says"),
    "a_step_with_padding": (
        {**query(1), **CAUSAL, "key_lengths": lengths([1, 6])},
        "1 queries and 6 keys has no query_offset | query_offset=5, the",
    ),
    "packed_steps": ({"max_seqlen_q": 3, **CAUSAL}, "3 queries and 4 keys has no query_offset"),
}
"""Each is warned of, until the arguments say that it is meant, as these messages tell."""
MEANT: dict[str, Changes] = {
    "clipped_as_far_as_anybody_does": {**query(600), "rel_key": zeros(1025, 8)},
    "covered": {**query(514), "rel_key": zeros(1027, 8)},
    "outgrown, said": {**query(600), "rel_key": zeros(1027, 8), "positions": Positions.centred(1027)},
    "offsets_on_the_device": {"rel_key": zeros(1027, 8), "query_offset": lengths([600, 0])},
    "one_query": qkv(2, 16, 1, 20),
    "many_heads": of_prompt(64, 80),
    "a_table_for_each_head": {**of_prompt(64, 5), "rel_key": zeros(64, 9, 8)},
    "a_mask_for_each_head": {**of_prompt(64, 5), "attn_mask": visible(1, 64, 5, 5, dtype=torch.bool)},
    "grouped_heads": {**qkv(1, 64, 5, 5, 8), "rel_key": zeros(33, 8), "enable_gqa": True},
    "no_table": of_prompt(96, 8, None),
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
    "padding_and_an_empty_sequence": {**SELF, "attn_mask": (torch.arange(7) < lengths([[5], [0]]))[:, None, None]},
    "padding_to_the_left": {**SELF, "attn_mask": TO_THE_LEFT},
    "padding_to_the_left_of_all": {**SELF, "attn_mask": TO_THE_LEFT[1:] & ~FUTURE},
    "the_past": {**SELF, "attn_mask": ~FUTURE},
    "the_past_without_itself": {**SELF, "attn_mask": FUTURE.T},
    "all_but_itself_and_padding": {**SELF, "attn_mask": ~torch.eye(7, dtype=torch.bool) & ~PADDING & ~PADDING.mT},
    "a_part_of_the_future_by_a_mask, said": {**SELF, "attn_mask": FUTURE, "return_lse": True},
    "rows_of_the_past, said": {"positions": PAST_8, "window_size": (-1, -1)},
    "rows_of_the_past_and_a_mask": {**SELF, "positions": PAST_8, "attn_mask": ~FUTURE},
    "rows_of_the_past_and_one_query": {**query(1), "positions": PAST_8},
    "rows_of_the_past_and_one_key": {"positions": PAST_8, "key_lengths": lengths([1, 1])},
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
    changes, parts = MISTAKES[case]
    (message,) = warnings_of(**changes)
    says(message, parts)


@pytest.mark.parametrize("case", MEANT)
def test_what_is_meant_is_not_warned_of(case: str) -> None:
    assert warnings_of(**MEANT[case]) == []


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
    """Integers and floats of any width; its arrays and booleans are none."""
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
    """A fake tensor and one on "meta" have no values to check; real ones on the CPU have. Lists and integers are taken."""
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


def test_triton_in_the_interpreter_says_what_it_cannot_do() -> None:
    """Dtypes and widths, by a process of its own, in which kernels are interpreted."""
    pytest.importorskip("triton")
    program = """
import torch, triton_relattn
from triton_relattn import can_run_triton
def reason(*tensors):
    try:
        return str(can_run_triton(*tensors, raise_error=True))
    except NotImplementedError as error:
        return str(error)
one = torch.zeros(1, 1, 1, 8)
for tensors in ([one, one], [one.double()] * 2, [one.bfloat16()] * 2, [torch.zeros(1, 1, 1, 272)] * 2):
    print(reason(*tensors).replace(chr(10), " "))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    good, *others = done.stdout.splitlines()
    assert good == "True"
    reasons = ("not in torch.float64", "interpreter computes bfloat16 wrongly", "up to 256, got 272 (query), 272 (value)")
    for printed, expected in zip(others, reasons, strict=True):
        says(printed, expected)

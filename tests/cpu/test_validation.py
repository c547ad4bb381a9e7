"""Every bad argument raises before any work, with the offending values in the message."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from triton_relattn import RelativePositions, backends, can_run_triton, functional, fused_relative_attention
from triton_relattn.testing import make_inputs, with_different_strides


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def launched(*_: Any, **__: Any) -> None:
        raise AssertionError("work began before the arguments were checked")

    monkeypatch.setattr(functional.ops, "relative_attention", launched)
    monkeypatch.setattr(functional, "reference_attention", launched)


def call(**changes: Any) -> Any:
    """The operator on (B, H, Nq, Nk, D, Dv) = (2, 3, 5, 7, 8, 4), all strides different, with some arguments changed."""
    inputs = with_different_strides(make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=torch.float32, seed=0))
    arguments = {"query": inputs.query, "key": inputs.key, "value": inputs.value, "rel_key": inputs.rel_key}
    return fused_relative_attention(**{**arguments, **changes})


def test_the_unchanged_call_is_valid() -> None:
    assert call().shape == (2, 3, 5, 4)


def test_checks_come_before_work(no_launch: None) -> None:
    """The fixture that the cases below rely on does catch a launch."""
    with pytest.raises(AssertionError, match="work began"):
        call()


zeros = torch.zeros
lengths = torch.tensor
RAISES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "query_rank": ({"query": zeros(3, 5, 8)}, ValueError, ["query must have 4 dimensions", "(3, 5, 8)"]),
    "key_rank": ({"key": zeros(2, 3, 1, 7, 8)}, ValueError, ["key must have 4 dimensions", "(2, 3, 1, 7, 8)"]),
    "value_rank": ({"value": zeros(7, 4)}, ValueError, ["value must have 4 dimensions", "(7, 4)"]),
    "key_batch": ({"key": zeros(1, 3, 7, 8)}, ValueError, ["key", "(2, 3, 7, 8)", "(1, 3, 7, 8)"]),
    "value_batch": ({"value": zeros(4, 3, 7, 4)}, ValueError, ["value", "(2, 3, 7, 4)", "(4, 3, 7, 4)"]),
    "key_heads": ({"key": zeros(2, 1, 7, 8)}, ValueError, ["key", "(2, 3, 7, 8)", "(2, 1, 7, 8)"]),
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
    "positions_without_table": (
        {"rel_key": None, "positions": RelativePositions(-4, 4)},
        ValueError,
        ["positions", "rel_key is None"],
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
    "sparse": ({"key": zeros(2, 3, 7, 8).to_sparse()}, TypeError, ["key must be a strided tensor", "torch.sparse_coo"]),
    "key_device": ({"key": zeros(2, 3, 7, 8, device="meta")}, ValueError, ["key", "device cpu", "got meta"]),
    "value_device": ({"value": zeros(2, 3, 7, 4, device="meta")}, ValueError, ["value", "device cpu", "got meta"]),
    "table_device": ({"rel_key": zeros(9, 8, device="meta")}, ValueError, ["rel_key", "device cpu", "got meta"]),
    "lengths_type": ({"key_lengths": [7, 7]}, TypeError, ["key_lengths must be a torch.Tensor, got list"]),
    "lengths_dtype": ({"key_lengths": lengths([7.0, 7.0])}, TypeError, ["key_lengths must be int32 or int64", "torch.float32"]),
    "lengths_shape": ({"key_lengths": lengths([7, 7, 7])}, ValueError, ["key_lengths", "(batch,) = (2,)", "(3,)"]),
    "lengths_rank": ({"key_lengths": lengths([[7], [7]])}, ValueError, ["key_lengths", "(2,)", "(2, 1)"]),
    "lengths_device": ({"key_lengths": zeros(2, dtype=torch.int64, device="meta")}, ValueError, ["key_lengths", "got meta"]),
    "lengths_negative": ({"key_lengths": lengths([-1, 7])}, ValueError, ["[0, 7]", "from -1 to 7"]),
    "lengths_beyond": ({"key_lengths": lengths([3, 8])}, ValueError, ["[0, 7]", "from 3 to 8"]),
    "scale_nan": ({"scale": math.nan}, ValueError, ["scale must be finite, got nan"]),
    "scale_inf": ({"scale": -math.inf}, ValueError, ["scale must be finite, got -inf"]),
    "scale_str": ({"scale": "8"}, TypeError, ["scale must be a float, got '8'"]),
    "scale_bool": ({"scale": True}, TypeError, ["scale must be a float, got True"]),
    "offset_float": ({"query_offset": 2.0}, TypeError, ["query_offset must be an int, got 2.0"]),
    "offset_bool": ({"query_offset": False}, TypeError, ["query_offset must be an int, got False"]),
    "offset_none": ({"query_offset": None}, TypeError, ["query_offset must be an int, got None"]),
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
    with pytest.raises(RuntimeError) as raised:
        call(implementation="triton")
    for part in ('implementation="triton" cannot run here', "on cpu, not on a GPU", "TRITON_INTERPRET=1", "implementation=None"):
        assert part in str(raised.value)
    tensor = zeros(1, 1, 1, 8)
    assert not can_run_triton(tensor, tensor)
    with pytest.raises(RuntimeError, match="on cpu, not on a GPU"):
        can_run_triton(tensor, tensor, raise_error=True)


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (zeros(1, 1, 1, 8, dtype=torch.float64), "not in torch.float64"),
        (zeros(1, 1, 1, 272), r"widths up to 256, got 272 \(query\) and 272 \(value\)"),
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
    with pytest.raises(RuntimeError, match=reason):
        backends.choose_implementation("triton", tensor, tensor)


def test_default_never_picks_triton_on_the_cpu() -> None:
    tensor = zeros(1, 1, 1, 8)
    assert backends.choose_implementation(None, tensor, tensor) == "blockwise"
    for name in ("blockwise", "reference"):
        assert backends.choose_implementation(name, tensor, tensor) == name

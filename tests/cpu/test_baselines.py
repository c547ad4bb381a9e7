"""What the operator is measured against computes the same function."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from bench.cases import methods
from bench.cases.attention import BIAS, Case
from bench.cases.baselines import BASELINES
from bench.cases.methods import METHODS
from bench.measure import timing
from tests.tolerance import assert_at_most, assert_same, dtype_tolerance
from triton_relattn import fused_relative_attention
from triton_relattn.testing import forward_backward, make_inputs

CASE = Case(2, 3, 40, 16, dtype="fp32")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "num_rows"),
    [
        *((name, length, 2 * length - 1) for name in BASELINES for length in (1, 2, 17, 40)),
        *((name, 40, num_rows) for name in BASELINES if name != "skewing" for num_rows in (1, 9, 77)),
    ],
)
def test_equals_the_reference(name: str, length: int, num_rows: int, is_causal: bool) -> None:
    """Output and all gradients in float64, with a row for every distance and with fewer rows."""
    inputs = make_inputs(2, 3, length, length, 8, num_rows=num_rows, dtype=torch.float64, seed=length)
    inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))

    def baseline(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = BASELINES[name](tensors[0], tensors[1], tensors[2], tensors[3], is_causal)
        return out, 0 * out.sum(-1)

    def reference(*tensors: torch.Tensor) -> Any:
        return fused_relative_attention(*tensors, is_causal=is_causal, return_lse=True, implementation="reference")

    results, expected = forward_backward(baseline, inputs), forward_backward(reference, inputs)
    for result in ("out", "d_query", "d_key", "d_value", "d_rel_key"):
        assert_same(result, results[result], expected[result])


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "changes", [{}, {"is_causal": True}, {"rows": 9}, {"terms": ("rel_key", "rel_p2c")}, {"terms": BIAS}], ids=str
)
def test_methods_of_others_are_set_up_right(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention (not compiled here), SDPA with a dense bias, and ONNX Runtime, if installed, give the right result on a CPU.
    Those without a backward report that."""
    case = CASE.resized(40, **changes)
    monkeypatch.setattr(methods, "compiled_flex_attention", lambda: flex_attention)
    monkeypatch.setenv("CXX", sys.executable)  # any module that is installed
    inputs = case.inputs("cpu")
    expected = timing.expected_results(case, inputs).results
    names = ["flex_attention", *["sdpa_bias"] * (case.terms == BIAS)]
    if find_spec("onnxruntime") is not None and METHODS["onnxruntime"].why_not(case, "cpu") is None and not case.is_causal:
        names.append("onnxruntime")
    assert METHODS["sdpa_bias_efficient"].why_not(case, "cpu") == "needs a GPU"
    for name in names:
        assert METHODS[name].why_not(case, "cpu") is None
        function = METHODS[name].make(case)
        with torch.no_grad():
            assert_at_most(name, timing.distance([function(inputs)], expected[:1]), dtype_tolerance(torch.float32))
        if name in ("flex_attention", "onnxruntime"):
            with pytest.raises(NotImplementedError, match="has no backward on a CPU"):
                function(inputs)

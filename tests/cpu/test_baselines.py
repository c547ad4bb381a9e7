"""The baselines that the operator is measured against compute the same function."""

from __future__ import annotations

import pytest
import torch

from bench.cases.baselines import BASELINES
from tests.oracle import assert_same
from triton_relattn._reference import reference_attention
from triton_relattn.testing import forward_backward, make_inputs


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "length", "num_rows"),
    [
        *((name, length, 2 * length - 1) for name in BASELINES for length in (1, 2, 17, 40)),
        *((name, 40, num_rows) for name in BASELINES if name != "skewing" for num_rows in (1, 9, 77)),
    ],
)
def test_equals_the_reference(name: str, length: int, num_rows: int, is_causal: bool) -> None:
    """Output and all gradients, in float64, with a row for every distance or fewer."""
    inputs = make_inputs(2, 3, length, length, 8, num_rows=num_rows, dtype=torch.float64, seed=length)
    inputs = inputs._replace(d_lse=torch.zeros_like(inputs.d_lse))

    def baseline(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = BASELINES[name](tensors[0], tensors[1], tensors[2], tensors[3], is_causal)
        return out, 0 * out.sum(-1)

    results = forward_backward(baseline, inputs)
    expected = forward_backward(reference_attention, inputs, is_causal=is_causal)
    for result in ("out", "d_query", "d_key", "d_value", "d_rel_key"):
        assert_same(result, results[result], expected[result])


@pytest.mark.parametrize("name", BASELINES)
def test_refuses_other_shapes(name: str) -> None:
    query, key, value, table = (torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8), torch.zeros(7, 8))
    with pytest.raises(ValueError, match="as many keys as queries"):
        BASELINES[name](query, key, value, table, False)


def test_skewing_refuses_a_clipped_table() -> None:
    query = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="a row for every distance"):
        BASELINES["skewing"](query, query, query, torch.zeros(5, 8), False)

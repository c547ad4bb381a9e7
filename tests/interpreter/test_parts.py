"""Parts of the keys by the kernels: their gradients, from lse and delta of all keys, add up to those of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.interpreter.guard import Launch
from tests.interpreter.launch import SEED, resolve
from tests.parts import as_one, in_parts
from triton_relattn import RelativePositions
from triton_relattn._core import residual, validation
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import assert_within_budget, make_inputs

TERMS: dict[str, Any] = {"rel_value": True, "rel_bias": True, "per_head": True, "rel_width": 8}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clamp": ({"num_rows": 9, **TERMS}, {"dropout_p": 0.3, "softcap": 2.0, "query_offset": 3}),
    "zero": ({"num_rows": 9, **TERMS}, {"positions": RelativePositions(-3, 5, "zero"), "window_size": (30, 11)}),
    "full": ({"num_rows": 159}, {"is_causal": True, "query_offset": torch.tensor([5, -20]), "scale": -0.2, "rel_scale": 0.3}),
    "mask": (
        {"num_rows": 9, "key_heads": 1},
        {"attn_mask": torch.randn(2, 1, 60, 80), "enable_gqa": True, "exact_query_grad": True},
    ),
    "lowest_mask": (
        {"num_rows": 9, **TERMS},
        {"attn_mask": torch.zeros(2, 1, 60, 80).index_fill(2, torch.tensor([3, 58]), torch.finfo(torch.float32).min)},
    ),
    "lengths": ({"num_rows": None}, {"key_lengths": torch.tensor([41, 0]), "dropout_p": 0.2}),
}


def check(tensors: Any, spec: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> None:
    """The error rule. In float32 plain torch has the same parts: what is rounded between them, lse, delta and sums, is most of
    the error. In 16 bits blockwise, which computes in float32, is no yardstick."""
    golden = as_one(tensors, spec, "blockwise", d_out, d_lse, torch.float64)
    if tensors.query.dtype == torch.float32:
        reference = in_parts(tensors, spec, "blockwise", d_out, d_lse)
    else:
        reference = as_one(tensors, spec, "reference", d_out, d_lse)
    for name, actual in in_parts(tensors, spec, "triton", d_out, d_lse).items():
        assert_within_budget(name, actual, golden[name], reference[name], factor=3 if name.startswith("d_") else 2)


@pytest.mark.parametrize(
    ("case", "limit"),
    [
        pytest.param(case, limit, marks=() if number % 2 == place else pytest.mark.slow)
        for number, case in enumerate(CASES)
        for place, limit in enumerate(("", "20000"))
    ],
)
def test_parts(case: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the workspace of each has some of its keys at a time."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    of_inputs, options = CASES[case]
    inputs = make_inputs(2, 2, 60, 80, 16, dtype=torch.float32, seed=1, **of_inputs)
    check(*resolve(inputs, **options), inputs.d_out, inputs.d_lse)


@pytest.mark.thorough
def test_parts_in_float16(guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row for every pair the gradient of the query comes from dS, by the delta that is given."""
    monkeypatch.setattr(residual, "FEWEST_QUERIES", 1)
    inputs = make_inputs(2, 2, 60, 80, 16, dtype=torch.float16, seed=1, num_rows=159, rel_bias=True)
    check(*resolve(inputs, is_causal=True, query_offset=20), inputs.d_out, inputs.d_lse)
    names = {launch.kernel for launch in guarded_kernels}
    assert "dq_from_ds_kernel" in names and names.isdisjoint({"dq_kernel", "delta_kernel"})


@pytest.mark.thorough
def test_parts_of_a_pack() -> None:
    """Parts begin within sequences, and have none of some."""
    inputs = make_inputs(1, 2, 70, 70, 16, dtype=torch.float32, seed=2, num_rows=9, **TERMS)
    starts, longest = torch.tensor([0, 40, 40, 41, 70]), 40
    rows: Any = {n: t[0].transpose(0, 1) for n, t in inputs._asdict().items() if n in ("query", "key", "value", "rel_query")}
    tables: Any = {n: getattr(inputs, n) for n in ("rel_key", "rel_value", "rel_bias")}
    packing: Any = {"cu_seqlens": {"q": starts, "k": starts}, "max_seqlens": {"q": longest, "k": longest}}
    tensors, spec = validation.resolve(Arguments.of(**rows, **tables, **packing, dropout_p=0.3, is_causal=True))
    check(tensors._replace(dropout_seed=SEED), spec, inputs.d_out, inputs.d_lse)

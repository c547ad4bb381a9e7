"""delta = rowsum(P dP) from out and its residual: so exact that its errors do not add up in sums over queries or keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.check import TILES, Way, check, compute, right
from tests.expected import TABLES, assert_table_gradient
from tests.interpreter.guard import launches_seen_by
from tests.samples import Sample
from tests.tolerance import assert_at_most
from triton_relattn import fused_relative_attention
from triton_relattn.testing import make_inputs

KERNELS = Way("triton")


@contextmanager
def launched_deltas(replaced: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Iterator[list[torch.Tensor]]:
    """Record the deltas passed to dkv kernels; replaced: a function that changes them."""
    deltas = list[torch.Tensor]()

    def note(name: str, arguments: dict[str, Any]) -> None:
        if name == "dkv":
            delta, strides = arguments["per_query"].deltas
            deltas.append(delta)
            if replaced is not None:
                arguments["per_query"] = arguments["per_query"]._replace(deltas=(replaced(delta), strides))

    with launches_seen_by(note):
        yield deltas


def test_sums_over_queries_need_the_exact_delta() -> None:
    """With sharp attention the table's gradient has the error of dS rounded once, but not with rowsum(out * d_out) - d_lse. The
    sum of the queries' gradients (Transformer-XL's gradient of u) is four times as exact.

    There the rounding of out shifts all dS of a row by the same amount, which adds up in sums over all queries.
    """
    sizes: dict[str, Any] = {"key_heads": 2, "num_queries": 128, "num_keys": 128, "width": 32, "value_width": 32}
    sample = Sample(**sizes, tables=("rel_key",), positions=(-127, 127, "clamp"), dtype="float16", sharp=True, seed=1)
    inputs, arguments = sample.inputs()
    results = compute(sample, KERNELS)
    assert_table_gradient("d_rel_key", results["d_rel_key"], inputs, **arguments)
    rounded = (results["out"].float() * inputs.d_out.float()).sum(-1) - inputs.d_lse
    with launched_deltas(lambda _: rounded) as deltas:
        spoilt = compute(sample, KERNELS)
    assert 0 < (deltas[0] - rounded).abs().max() < 0.05 * deltas[0].abs().max()
    with pytest.raises(AssertionError, match="times the allowance"):
        assert_table_gradient("d_rel_key", spoilt["d_rel_key"], inputs, **arguments)
    golden = right(sample, "triton")[0]["d_query"].golden.sum(2)
    errors = [float((found["d_query"].double().sum(2) - golden).norm()) for found in (results, spoilt)]
    assert_at_most("sum of d_query", errors[0], errors[1] / 4)


SHARP_CALLS: dict[str, dict[str, Any]] = {
    "key": {"positions": (-59, 59, "clamp")},
    "causal": {"positions": (-4, 6, "clamp"), "is_causal": True, "query_offset": 6},
    "bias": {"tables": ("rel_bias",), "positions": (-4, 6, "zero"), "key_lengths": (43, 17)},
    "own query": {"tables": ("rel_key", "rel_bias"), "positions": (-4, 6, "clamp"), "rel_width": 24, "rel_scale": -0.4},
    "value": {"tables": ("rel_key", "rel_value"), "positions": (-59, 59, "clamp"), "query_offset": 4},
    "every table": {"tables": TABLES, "positions": (-4, 6, "zero"), "rel_width": 12, "query_offset": 3, "softcap": 9.0},
    # The gradient comes from one result; that of lse does not depend on value.
    "from out alone": {"positions": (-7, 9, "clamp"), "cotangents": "out", "sharp": False},
    "from lse alone": {"positions": (-59, 59, "clamp"), "cotangents": "lse", "sharp": False},
}


@pytest.mark.parametrize("offset", [0.0, 6.0])
@pytest.mark.parametrize("name", SHARP_CALLS)
def test_sharp_attention_in_float16(name: str, offset: float) -> None:
    """Gradients have the errors of dS and P rounded once, which requires an exact delta, also with an offset of all values, which
    makes delta much larger than dP - delta."""
    sizes: dict[str, Any] = {"batch": 2, "group": 2, "num_queries": 37, "num_keys": 43, "width": 8, "value_width": 12}
    fields = {**sizes, "tables": ("rel_key",), "dtype": "float16", "sharp": True, "seed": 5, **SHARP_CALLS[name]}
    sample, way = Sample(**fields), Way("triton", tiles=TILES[2])
    inputs, arguments = sample.inputs()
    inputs = inputs._replace(value=inputs.value + offset)
    if sample.cotangents != "both":
        check(sample, way, value=inputs.value)
        return
    results = compute(sample, way, value=inputs.value)
    way.check(results, inputs, **arguments)
    for table in sample.tables:
        assert_table_gradient(table, results[f"d_{table}"], inputs, table=table, **arguments)


@pytest.mark.thorough
def test_compiled() -> None:
    """torch.compile saves the residual only for gradients, gives the same bits, and compiles once for all lengths."""
    counter, kernels = CompileCounterWithBackend("aot_eager"), partial(fused_relative_attention, implementation="triton")
    compiled: Any = torch.compile(lambda *tensors: kernels(*tensors), backend=counter, dynamic=True, fullgraph=True)
    frames = []
    for length in (20, 24, 33):
        inputs = make_inputs(1, 2, length, length, 16, num_rows=2 * length - 1, dtype=torch.float16, seed=length)
        leaves: Any = [tensor.clone().requires_grad_() for tensor in inputs[:4] if tensor is not None]
        found, expected = (torch.autograd.grad(attend(*leaves), leaves, inputs.d_out) for attend in (compiled, kernels))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1
    with torch.no_grad():
        compiled(*leaves)
    nodes = [node for graph in counter.graphs for node in graph.graph.nodes]
    assert [node.args[-1] for node in nodes if "attention_forward" in str(node.target)] == [True, False]


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1.0, "float16"), (3e-5, "float16"), (1e-7, "float16"), (6e4, "float16"), (1.0, "float32")]
)
def test_delta(scale: float, dtype: str, has_lse: bool) -> None:
    """The error of delta, for an out of any magnitude, is at most that of rounding the probabilities once."""
    sizes: dict[str, Any] = {"batch": 2, "key_heads": 2, "num_queries": 75, "num_keys": 83, "width": 8, "value_width": 10}
    sample = Sample(**sizes, tables=("rel_key",), positions=(-74, 82, "clamp"), dtype=dtype, seed=2, return_lse=has_lse)
    inputs = sample.inputs()[0]
    value = (inputs.value.double().clamp(-1, 1) * scale).to(inputs.value.dtype)
    with launched_deltas() as deltas:
        compute(sample, KERNELS, value=value)
    d_out, d_lse = inputs.d_out.double(), inputs.d_lse.double() * has_lse
    expected = (right(sample, "triton", value=value)[0]["out"].golden * d_out).sum(-1)
    # The error of a mean of values with probabilities rounded once, relative to the largest value; in float32 of a sum of 83
    # terms. The residual of a subnormal value has 10 more bits, since it is stored times 2**11.
    info = torch.finfo(value.dtype)
    allowed = (info.eps / 2 * scale + info.smallest_normal * info.eps / 2**10) * d_out.abs().sum(-1)
    allowed *= 1 if dtype == "float16" else 83
    error = (deltas[0].double() + d_lse - expected).abs()
    assert_at_most("delta", error, allowed + 4 * torch.finfo(torch.float32).eps * d_lse.abs())

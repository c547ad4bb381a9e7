"""delta = rowsum(P dP) from out and its residual: so exact that its errors do not add up in sums over queries or keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.expected import assert_table_gradient, exact_results
from tests.interpreter import launch
from tests.interpreter.launch import SMALL, all_gradients, check_forward_backward, launches_seen_by, resolve
from tests.tolerance import assert_at_most
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.delta import RESIDUAL_SCALE
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import make_inputs


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


SHARP_CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    # length, rows, arguments
    "full": (128, 255, {}),
    "causal": (192, 192, {"positions": RelativePositions(-191, 0), "is_causal": True}),
    "clipped": (160, 33, {}),
}


@pytest.mark.parametrize("case", SHARP_CASES)
def test_table_gradient_needs_the_exact_delta(case: str) -> None:
    """With sharp attention the table's gradient has the error of dS rounded once, but not with rowsum(out * d_out) - d_lse.

    There the rounding of out shifts all dS of a row by the same amount, which adds up in the table's sum over all queries.
    """
    length, num_rows, arguments = SHARP_CASES[case]
    inputs = make_inputs(1, 2, length, length, 32, num_rows=num_rows, dtype=torch.float16, seed=1, sharp=True)
    results = check_forward_backward(inputs, **arguments)
    rounded = (results["out"].float() * inputs.d_out.float()).sum(-1) - inputs.d_lse
    with launched_deltas(lambda _: rounded) as deltas:
        spoilt = all_gradients(inputs, **arguments)["d_rel_key"]
    (exact,) = deltas
    assert 0 < (exact - rounded).abs().max() < 0.05 * exact.abs().max()
    with pytest.raises(AssertionError, match="times the allowance"):
        assert_table_gradient("d_rel_key", spoilt, inputs, **arguments)


@pytest.mark.parametrize("through", ["out", "lse"])
@pytest.mark.parametrize("kind", ["full", "clamp"])
def test_gradient_through_one_result(through: str, kind: str) -> None:
    """The gradient comes from out alone, or from lse alone, which does not depend on value."""
    positions = RelativePositions(-37, 45) if kind == "full" else RelativePositions(-7, 9)
    inputs = make_inputs(1, 2, 37, 45, 16, num_rows=positions.num_rows, dtype=torch.float16, seed=3)
    unused = "d_lse" if through == "out" else "d_out"
    inputs = inputs._replace(**{unused: torch.zeros_like(getattr(inputs, unused))})
    results = check_forward_backward(inputs, SMALL, positions=positions)
    assert bool(results["d_value"].any()) == (through == "out") and results["d_rel_key"].any()


@pytest.mark.thorough
def test_sums_over_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of query gradients (Transformer-XL's gradient of u) has at most a quarter of its error without the residual."""
    for seed in range(3):
        inputs = make_inputs(1, 1, 48, 48, 16, num_rows=95, sharp=True, dtype=torch.float16, seed=seed)
        golden = exact_results(inputs)["d_query"].sum(2)
        errors = []
        for keeps in (True, False):
            monkeypatch.setattr(launch, "keeps_residual", lambda *_, keeps=keeps: keeps)
            errors.append(float((all_gradients(inputs, SMALL)["d_query"].double().sum(2) - golden).norm()))
        assert_at_most(f"sum, seed {seed}", errors[0], errors[1] / 4)


@pytest.mark.thorough
def test_compiled() -> None:
    """torch.compile saves the residual only for gradients, gives the same bits, and compiles once for all lengths."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def compiled(*tensors: torch.Tensor) -> torch.Tensor:
        return fused_relative_attention(*tensors, implementation="triton")  # type: ignore[arg-type, return-value]

    frames = []
    for length in (20, 24, 33):
        inputs = make_inputs(1, 2, length, length, 16, num_rows=2 * length - 1, dtype=torch.float16, seed=length)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs[:4] if tensor is not None]
        found, expected = (
            torch.autograd.grad(attend(*leaves), leaves, inputs.d_out)
            for attend in (compiled, partial(fused_relative_attention, implementation="triton"))
        )
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1
    with torch.no_grad():
        compiled(*leaves)
    operators = [
        node.args[-1] for graph in counter.graphs for node in graph.graph.nodes if "attention_forward" in str(node.target)
    ]
    assert operators == [True, False]


def test_residual() -> None:
    """out + residual is the mean of the values with probabilities that sum to one: an offset of all values adds no error. The
    residual has the layout of out, and computing it changes no other result."""
    inputs = make_inputs(2, 2, 75, 83, 8, value_width=10, num_rows=158, dtype=torch.float16, seed=2, sharp=True)
    inputs = inputs._replace(value=(inputs.value.double() * 2**-6 + 1.7).half())
    positions = RelativePositions(-74, 83)
    tensors, spec = resolve(inputs, positions=positions)
    *plain, nothing = forward(tensors, spec)
    *others, rest = forward(tensors, spec, keeps_residual=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, others, strict=True))
    out = others[0]
    assert nothing is None and rest is not None and rest.dtype == out.dtype and rest.shape == out.shape
    assert rest.stride() == out.stride()
    exact = inputs.to(torch.float64)
    golden, _ = reference_attention(exact.query, exact.key, exact.value, exact.rel_key, positions=positions)
    unit = torch.exp2(out.double().log2().floor() - 10)
    regained = out.double() + rest.double() / RESIDUAL_SCALE.value
    assert ((out.double() - golden) / unit).std() > 0.2
    assert ((regained - golden) / unit).std() < 0.01


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1.0, torch.float16), (3e-5, torch.float16), (1e-7, torch.float16), (6e4, torch.float16), (1.0, torch.float32)],
    ids=str,
)
def test_delta(scale: float, dtype: torch.dtype, has_lse: bool) -> None:
    """The error of delta, for an out of any magnitude, is at most that of rounding the probabilities once."""
    inputs = make_inputs(2, 2, 75, 83, 8, value_width=10, num_rows=157, dtype=dtype, seed=2)
    inputs = inputs._replace(value=(inputs.value.double().clamp(-1, 1) * scale).to(dtype))
    tensors, spec = resolve(inputs, positions=RelativePositions(-74, 82))
    out, _, softmax_stats, residual = forward(tensors, spec, keeps_residual=dtype == torch.float16)
    assert (residual is None) == (dtype == torch.float32)
    d_lse = inputs.d_lse if has_lse else None
    with launched_deltas() as deltas:
        backward(inputs.d_out, d_lse, out, softmax_stats, tensors, spec, residual=residual)
    (found,) = deltas
    exact = inputs.to(torch.float64)
    d_lse = exact.d_lse if has_lse else torch.zeros_like(exact.d_lse)
    golden, _ = reference_attention(exact.query, exact.key, exact.value, exact.rel_key, positions=RelativePositions(-74, 82))
    expected = (golden * exact.d_out).sum(-1)
    # The error of a mean of values with probabilities rounded once, relative to the largest value; in float32 of a sum of 83
    # terms. The residual of a subnormal value has 10 more bits, since it is stored times 2**11.
    info = torch.finfo(dtype)
    allowed = (info.eps / 2 * scale + info.smallest_normal * info.eps / 2**10) * exact.d_out.abs().sum(-1)
    allowed *= 1 if dtype == torch.float16 else 83
    assert_at_most("delta", (found.double() + d_lse - expected).abs(), allowed + 4 * torch.finfo(torch.float32).eps * d_lse.abs())

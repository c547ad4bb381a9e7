"""The gradient of the query from the dS that the dkv kernel has stored, with delta from out and its residual."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.interpreter.guard import Launch, programs_in_order
from tests.interpreter.launch import all_gradients, check_every_term, resolve, run_backward
from tests.interpreter.workspaces import CALLS, TILES, call_of, check_parts, limit_of, tile
from tests.tolerance import within
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._core import residual
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.delta import RESIDUAL_SCALE, launch_delta
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace.planning import VARIABLE, Plan
from triton_relattn.testing import Inputs, dense_gradients, make_inputs

OF_TILES = {
    "square": {**TILES["square"], "dq_from_ds": tile(32, 32)},
    "tall": {**TILES["twice"], "dq_from_ds": tile(32, 16)},
    "wide": {**TILES["registers"], "dq_from_ds": tile(16, 64), "dtable": tile(16, 64)},
}


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "FEWEST_QUERIES", 1)


OF_SCORES = [
    name
    for name, (shape, arguments) in CALLS.items()
    if not shape.get("rel_value") and not isinstance(arguments.get("query_offset"), torch.Tensor)
]
"""Those of CALLS that keep a residual: they have no table for the values, and one offset for all sequences."""


def long_call(name: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Return one of CALLS, longer, in float16, with a row for every pair."""
    shape, arguments = CALLS[name]
    positions = RelativePositions(-60, 70)
    sizes = {"num_queries": 45, "num_keys": 53, "num_rows": positions.num_rows, "dtype": torch.float16}
    inputs, table = call_of("full", **{**shape, **sizes, **others})
    arguments = {**arguments, **table, "positions": positions, "exact_query_grad": False}
    if arguments.get("attn_mask") is not None:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.rand(2, 1, 45, 53, generator=generator) < 0.3
        numbers = torch.randn(hidden.shape, generator=generator).masked_fill(hidden, -torch.inf)
        arguments["attn_mask"] = ~hidden if arguments["attn_mask"].dtype == torch.bool else numbers
    if arguments.get("key_lengths") is not None:
        arguments["key_lengths"] = arguments["key_lengths"] + 10
    return inputs, arguments


def launched(launches: list[Launch]) -> list[str]:
    """Return the names of the backward's kernels, without those that tables of far keys take; forget the launches."""
    names = [launch.kernel.removesuffix("_kernel") for launch in launches]
    launches.clear()
    return [name for name in names if name not in ("forward", "merge")]


@pytest.mark.parametrize(
    ("name", "tiles", "limit"),
    [(name, list(OF_TILES)[number % 3], ("whole", "heads")[number // 3 % 2]) for number, name in enumerate(OF_SCORES)],
)
def test_calls(
    name: str,
    tiles: str,
    limit: str,
    plans: list[Plan | None],
    guarded_kernels: list[Launch],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All results obey the error rules, the gradients of tables those of an exact delta."""
    inputs, arguments = long_call(name)
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, OF_TILES[tiles]))
    plans.clear()
    check_every_term(inputs, OF_TILES[tiles], **arguments)
    names = launched(guarded_kernels)
    (plan,) = plans
    check_parts(plan, limit)
    assert plan is not None and plan.has_all_keys
    assert names[0] == "delta" and "dq" not in names
    assert names.count("dq_from_ds") == names.count("dkv") == len(plan.parts)


@pytest.mark.parametrize("offset", [0.0, 6.0])
@pytest.mark.parametrize("name", ["plain", "causal", "bias_alone", "rel_query"])
def test_sharp_attention(name: str, offset: float, plans: list[Plan | None]) -> None:
    """Also where all values have much in common, so that delta is much larger than dP - delta."""
    inputs, arguments = long_call(name, sharp=True)
    inputs = inputs._replace(value=inputs.value + offset)
    check_every_term(inputs, OF_TILES["square"], **arguments)
    assert plans[0] is not None


@pytest.mark.thorough
def test_sums_over_queries(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the query's gradient, as Transformer-XL's gradient of u, is as good as that of the dq kernel's exact delta.

    The usual delta makes 16 times its error, or more (docs/numerics.md): the limit is equally far from both.
    """
    arguments: dict[str, Any] = {"positions": RelativePositions(-47, 47), "exact_query_grad": True}
    for seed in range(3):
        inputs = make_inputs(1, 1, 48, 48, 16, num_rows=95, sharp=True, dtype=torch.float16, seed=seed)
        golden = dense_gradients(inputs, **arguments).d_query.sum(2)
        errors = []
        for fewest in (1, 100):
            monkeypatch.setattr(residual, "FEWEST_QUERIES", fewest)
            found = all_gradients(inputs, OF_TILES["tall"], **arguments)["d_query"].double().sum(2)
            errors.append(float((found - golden).norm()))
        within(f"sum, seed {seed}", errors[0], math.sqrt(16) * errors[1])
    assert all(plan is not None for plan in plans)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["whole", "heads"])
def test_the_same_bits(limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, with programs in another order, and whichever gradients are wanted besides."""
    inputs, arguments = long_call("rel_query", rel_width=8, batch=2 if limit == "heads" else 1)
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, OF_TILES["tall"]))
    plans.clear()
    expected = all_gradients(inputs, OF_TILES["tall"], **arguments)
    with programs_in_order("shuffled", seed=3):
        results = all_gradients(inputs, OF_TILES["tall"], **arguments)
    assert all(torch.equal(results[name], gradient) for name, gradient in expected.items())
    for wanted in (("d_query",), ("d_rel_query",), ("d_key", "d_value"), ("d_rel_key",), ("d_rel_bias", "d_query")):
        some = run_backward(inputs, OF_TILES["tall"], wanted, **arguments)
        for name in wanted:
            gradient = some[name]
            assert gradient is not None and torch.equal(gradient, expected[name]), (wanted, name)
    for plan in plans:
        check_parts(plan, limit)


@pytest.mark.thorough
def test_what_nobody_sees(plans: list[Plan | None]) -> None:
    """Rows of the table that no visible pair has may be NaN, as may keys that are padding; they change no bit."""
    inputs, arguments = long_call("window")
    arguments["key_lengths"] = torch.tensor([40, 23])
    assert inputs.rel_key is not None
    rows = torch.arange(inputs.rel_key.shape[0]) - 60
    unused = (rows < -11) | (rows > 5)
    clean = all_gradients(inputs, OF_TILES["wide"], **arguments)
    rel_key, key, value = (each.clone() for each in (inputs.rel_key, inputs.key, inputs.value))
    rel_key[unused] = torch.nan
    key[:, :, 40:], value[:, :, 40:] = torch.nan, torch.nan
    poisoned = all_gradients(inputs._replace(rel_key=rel_key, key=key, value=value), OF_TILES["wide"], **arguments)
    assert all(torch.equal(poisoned[name], gradient) for name, gradient in clean.items())
    assert not poisoned["d_rel_key"][unused].any()
    assert plans[0] is not None and plans[0].has_all_keys


@pytest.mark.thorough
def test_when(plans: list[Plan | None], guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which kernels compute what, and that the others are not launched."""
    inputs, arguments = long_call("plain", batch=1, num_queries=20)
    tiles = OF_TILES["square"]

    def names(*wanted: str, inputs: Inputs = inputs, **changes: Any) -> list[str]:
        run_backward(inputs, tiles, wanted, **{**arguments, **changes})
        return launched(guarded_kernels)

    assert names("d_query") == ["delta", "dkv", "dq_from_ds"]
    assert names("d_query", "d_rel_key") == ["delta", "dkv", "dtable", "dq_from_ds"]
    assert names("d_key") == names("d_key", "d_value") == ["delta", "dkv"]
    assert names("d_value") == ["dkv"]
    every = ("d_query", "d_key", "d_value", "d_rel_key")
    assert names(*every, exact_query_grad=True) == names(*every) == ["delta", "dkv", "dtable", "dq_from_ds"]
    assert names(*every, inputs=inputs.to(torch.float32)) == ["dq", "dkv", "dtable"]
    assert names(*every, query_offset=torch.tensor([3])) == ["dq", "dkv", "dtable"]
    with_values, _ = long_call("rel_value", batch=1, num_queries=20)
    assert names(*every, inputs=with_values)[:2] == ["dq", "dkv"]
    assert names(*every, positions=RelativePositions(-5, 125))[:2] == ["dq", "dkv"]  # it has no row for some pairs
    monkeypatch.setenv(VARIABLE, "0")
    assert names(*every) == ["dq", *["dkv", "dtable"] * 4]  # each block of 16 keys in a part of its own
    assert names("d_query") == ["dq"]
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(residual, "FEWEST_QUERIES", 21)
    assert names(*every) == ["dq", "dkv", "dtable"]


@pytest.mark.thorough
def test_compiled(plans: list[Plan | None]) -> None:
    """torch.compile keeps the residual in training, not without gradients, and compiles once for all lengths."""
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def compiled(*tensors: torch.Tensor) -> torch.Tensor:
        return fused_relative_attention(*tensors, implementation="triton")  # type: ignore[arg-type, return-value]

    frames = []
    for length in (20, 24, 33):
        inputs = make_inputs(1, 2, length, length, 16, num_rows=2 * length - 1, dtype=torch.float16, seed=length)
        leaves = [each.clone().requires_grad_() for each in inputs[:4] if each is not None]
        found, expected = (
            torch.autograd.grad(attend(*leaves), leaves, inputs.d_out)
            for attend in (compiled, partial(fused_relative_attention, implementation="triton"))
        )
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        frames.append(counter.frame_count)
    assert len(set(frames)) == 1 and plans[0] is not None
    with torch.no_grad():
        compiled(*leaves)
    operators = [
        node.args[-1] for graph in counter.graphs for node in graph.graph.nodes if "attention_forward" in str(node.target)
    ]
    assert operators == [True, False]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_blocks_of_queries(dtype: torch.dtype, plans: list[Plan | None], guarded_kernels: list[Launch]) -> None:
    """Several blocks of queries that lie apart, of which the last is not full; several programs share a block of rows."""
    inputs = make_inputs(1, 2, 150, 40, 8, num_rows=189, rel_bias=True, dtype=dtype, seed=4)
    positions = RelativePositions(-149, 39)
    check_every_term(inputs, OF_TILES["wide"], positions=positions, key_lengths=torch.tensor([37]))
    assert ("dq_from_ds" in launched(guarded_kernels)) == (dtype == torch.float16)
    assert plans[0] is not None


def test_some_keys_at_a_time(plans: list[Plan | None], guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that has a head's first keys, then the next ones, leaves the query's gradient to the dq kernel."""
    monkeypatch.setenv(VARIABLE, "3000")
    inputs = make_inputs(1, 1, 40, 50, 8, num_rows=89, dtype=torch.float16, seed=4)
    check_every_term(inputs, OF_TILES["square"], positions=RelativePositions(-39, 49))
    assert launched(guarded_kernels) == ["dq", "dkv", "dtable", "dkv", "dtable"]
    assert plans[0] is not None and not plans[0].has_all_keys


def test_band(plans: list[Plan | None], guarded_kernels: list[Launch]) -> None:
    """Where the window is short compared with the keys the workspace has a band, and the dq kernel runs."""
    inputs = make_inputs(1, 1, 40, 150, 8, num_rows=189, dtype=torch.float16, seed=4)
    arguments: dict[str, Any] = {"positions": RelativePositions(-39, 149), "window_size": (9, 2), "query_offset": 20}
    check_every_term(inputs, OF_TILES["tall"], **arguments)
    assert launched(guarded_kernels) == ["dq", "dkv", "dtable"]
    assert plans[0] is not None and plans[0].layout.is_band


def test_residual() -> None:
    """It makes of out the mean of the values by probabilities that sum to one after they were rounded: what the values have in
    common has no error but the residual's. It is as out is, and changes nothing else."""
    inputs = make_inputs(2, 2, 75, 83, 8, value_width=10, num_rows=158, dtype=torch.float16, seed=2, sharp=True)
    inputs = inputs._replace(value=(inputs.value.double() * 2**-6 + 1.7).half())
    positions = RelativePositions(-74, 83)
    tensors, spec = resolve(inputs, positions=positions)
    *plain, nothing = forward(tensors, spec)
    *kept, rest = forward(tensors, spec, keeps_residual=True)
    assert all(torch.equal(one, other) for one, other in zip(plain, kept, strict=True))
    out = kept[0]
    assert nothing is None and rest is not None and rest.dtype == out.dtype and rest.shape == out.shape
    assert rest.stride() == out.stride()
    exact = inputs.to(torch.float64)
    golden, _ = reference_attention(exact.query, exact.key, exact.value, exact.rel_key, positions=positions)
    unit = torch.exp2(out.double().log2().floor() - 10)
    regained = out.double() + rest.double() / RESIDUAL_SCALE.value
    assert ((out.double() - golden) / unit).std() > 0.2
    assert ((regained - golden) / unit).std() < 0.01


@pytest.mark.parametrize("scale", [1.0, 3e-5, 1e-7, 6e4])
def test_delta(scale: float, guarded_kernels: list[Launch]) -> None:
    """rowsum(out * d_out) - d_lse, of an out of any size, is off by no more than what rounding the probabilities costs."""
    inputs = make_inputs(2, 2, 75, 83, 8, value_width=10, num_rows=157, dtype=torch.float16, seed=2)
    inputs = inputs._replace(value=(inputs.value.double().clamp(-1, 1) * scale).half())
    tensors, spec = resolve(inputs, positions=RelativePositions(-74, 82))
    out, _, _, kept = forward(tensors, spec, keeps_residual=True)
    found = out.new_empty(2, 2, 75, dtype=torch.float32)
    assert kept is not None
    launch_delta(out, kept, inputs.d_out, inputs.d_lse, found, 16)
    exact = inputs.to(torch.float64)
    golden, _ = reference_attention(exact.query, exact.key, exact.value, exact.rel_key, positions=RelativePositions(-74, 82))
    expected = (golden * exact.d_out).sum(-1)
    rounded = (out.double() * exact.d_out).sum(-1)
    # What rounding the probabilities once costs: the error of a mean of values, relative to the largest of them.
    # The residual of a subnormal number has 10 more bits than that, since it is stored times 2**11.
    half = torch.finfo(torch.float16)
    allowed = (half.eps / 2 * scale + half.smallest_normal * half.eps / 2**10) * exact.d_out.abs().sum(-1)
    within(
        "delta", (found.double() + exact.d_lse - expected).abs(), allowed + 4 * torch.finfo(torch.float32).eps * exact.d_lse.abs()
    )
    assert (rounded + 0 * found).isfinite().all() and launched(guarded_kernels) == ["delta"]

"""The gradient of the query, from the dS that the dkv kernel has stored, and the delta of dS, from out and its residual."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from tests.expected import exact_results
from tests.interpreter import launch
from tests.interpreter.launch import all_gradients, resolve
from tests.interpreter.workspaces import TILES, check_call, check_parts, limit_of, named_call, pack_of, results_of
from tests.tolerance import within
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn._reference import reference_attention
from triton_relattn.kernels.call import Call, PerQuery, strided
from triton_relattn.kernels.delta import RESIDUAL_SCALE, launch_delta
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace.planning import VARIABLE, Plan
from triton_relattn.testing import make_inputs

APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # of make_inputs, of the call
    "full": ({"rel_bias": True}, {"positions": RelativePositions(-149, 39), "key_lengths": torch.tensor([37])}),
    "clamp_causal": ({"rel_value": True}, {"positions": RelativePositions(-40, -3), "is_causal": True, "query_offset": -100}),
    "zero_window": ({"rel_width": 12}, {"positions": RelativePositions(-4, 30, "zero"), "window_size": (20, 13)}),
    "no_table": ({"rel_key": False}, {"attn_mask": torch.arange(40) % 3 != torch.arange(150)[:, None] % 4}),
    "packed": ({"rel_width": 12, "rel_p2c": True}, {"query_offset": torch.tensor([-90, 8, 0])}),
}


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", APART)
def test_blocks_of_queries(name: str, dtype: torch.dtype) -> None:
    """Several blocks of queries that lie apart, of which the last is not full; several programs share a block of rows."""
    options, arguments = APART[name]
    positions = arguments.get("positions")
    options = {**options, "num_rows": 11 if positions is None else positions.num_rows, "dtype": dtype, "seed": 4}
    if name == "packed":
        inputs, of_pack = pack_of("clamp", {"q": (150, 0, 33), "k": (40, 9, 33)}, **options)
        arguments = {**of_pack, **arguments}
    else:
        inputs = make_inputs(1, 2, 150, 40, 8, **options)
    check_call(inputs, arguments, {**TILES["registers"], "dtable": TILES["wide"]["dtable"]})


@pytest.mark.parametrize("offset", [0.0, 6.0])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("plain", "full"), ("causal", "clamp"), ("bias_alone", "zero"), ("rel_query", "clamp"), ("rel_value", "full")],
)
def test_sharp_attention(name: str, kind: str, offset: float) -> None:
    """Also where all values have much in common, so that delta is much larger than dP - delta."""
    inputs, arguments = named_call(name, kind, sharp=True, dtype=torch.float16)
    check_call(inputs._replace(value=inputs.value + offset), arguments, TILES["square"])


@pytest.mark.thorough
def test_sums_over_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of the query's gradient, as Transformer-XL's gradient of u, is far better than with the delta of a rounded out."""
    for seed in range(3):
        inputs = make_inputs(1, 1, 48, 48, 16, num_rows=95, sharp=True, dtype=torch.float16, seed=seed)
        golden = exact_results(inputs)["d_query"].sum(2)
        errors = []
        for keeps in (True, False):
            monkeypatch.setattr(launch, "keeps_residual", lambda *_, keeps=keeps: keeps)
            errors.append(float((all_gradients(inputs, TILES["twice"])["d_query"].double().sum(2) - golden).norm()))
        within(f"sum, seed {seed}", errors[0], errors[1] / 4)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), [("rel_query", "full"), ("narrow_rel_query", "clamp")])
def test_some_keys_at_a_time(name: str, kind: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the parts of a workspace add is added up in float32, and rounded once."""
    inputs, arguments = named_call(name, kind, dtype=torch.float16, batch=1, num_queries=17, num_keys=150)
    arguments |= {"query_offset": 130}
    whole = results_of(inputs, arguments, TILES["twice"])
    monkeypatch.setenv(VARIABLE, limit_of("block", inputs, arguments, TILES["twice"]))
    found = check_call(inputs, arguments, TILES["twice"])
    check_parts(plans[-1], "block")
    for gradient in {"d_query", "d_rel_query"}.intersection(found):
        expected = whole[gradient].double()
        allowed = torch.finfo(torch.float16).eps * expected.abs() + 1e-5 * expected.abs().max()
        within(gradient, (found[gradient].double() - expected).abs(), allowed)


@pytest.mark.thorough
def test_compiled() -> None:
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
    assert len(set(frames)) == 1
    with torch.no_grad():
        compiled(*leaves)
    operators = [
        node.args[-1] for graph in counter.graphs for node in graph.graph.nodes if "attention_forward" in str(node.target)
    ]
    assert operators == [True, False]


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


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize("has_lse", [True, False])
@pytest.mark.parametrize(
    ("scale", "dtype"),
    [(1.0, torch.float16), (3e-5, torch.float16), (1e-7, torch.float16), (6e4, torch.float16), (1.0, torch.float32)],
    ids=str,
)
def test_delta(scale: float, dtype: torch.dtype, has_lse: bool) -> None:
    """rowsum(out * d_out) - d_lse, of an out of any size, is off by no more than what rounding the probabilities costs."""
    inputs = make_inputs(2, 2, 75, 83, 8, value_width=10, num_rows=157, dtype=dtype, seed=2)
    inputs = inputs._replace(value=(inputs.value.double().clamp(-1, 1) * scale).to(dtype))
    tensors, spec = resolve(inputs, positions=RelativePositions(-74, 82))
    out, _, softmax_stats, kept = forward(tensors, spec, keeps_residual=dtype == torch.float16)
    assert (kept is None) == (dtype == torch.float32)
    found = out.new_empty(2, 2, 75, dtype=torch.float32)
    per_query = PerQuery(*map(strided, (softmax_stats, found, None, None, None)))
    launch_delta(Call(tensors, spec, (out, inputs.d_out)), out, kept, inputs.d_out, inputs.d_lse if has_lse else None, per_query)
    exact = inputs.to(torch.float64)
    d_lse = exact.d_lse if has_lse else torch.zeros_like(exact.d_lse)
    golden, _ = reference_attention(exact.query, exact.key, exact.value, exact.rel_key, positions=RelativePositions(-74, 82))
    expected = (golden * exact.d_out).sum(-1)
    # What rounding the probabilities once costs: the error of a mean of values, relative to the largest of them. In float32, of
    # a mean of 83. The residual of a subnormal number has 10 more bits than that, since it is stored times 2**11.
    info = torch.finfo(dtype)
    allowed = (info.eps / 2 * scale + info.smallest_normal * info.eps / 2**10) * exact.d_out.abs().sum(-1)
    allowed *= 1 if dtype == torch.float16 else 83
    within("delta", (found.double() + d_lse - expected).abs(), allowed + 4 * torch.finfo(torch.float32).eps * d_lse.abs())

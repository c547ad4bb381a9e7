"""The registered operators: schemas, fakes, derivatives, compilation."""

from __future__ import annotations

import itertools
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cpu.oracle import assert_same, attend
from triton_relattn import RelativePositions, fused_relative_attention
from triton_relattn.spec import AttentionSpec
from triton_relattn.testing import Inputs, dense_gradients, in_memory_order, make_inputs, with_different_strides

FORWARD = torch.ops.triton_relattn.attention_forward.default
BACKWARD = torch.ops.triton_relattn.attention_backward.default

CASES: dict[str, tuple[Inputs, torch.Tensor | None, AttentionSpec]] = {
    "plain": (
        make_inputs(1, 1, 4, 4, 8, num_rows=None, dtype=torch.float32, seed=0),
        None,
        AttentionSpec(0.3, 0, 0, False, False, 0),
    ),
    "odd": (
        make_inputs(2, 3, 17, 23, 8, 5, num_rows=7, dtype=torch.float64, seed=0),
        torch.tensor([23, 11]),
        AttentionSpec(0.3, -4, 2, True, True, 6),
    ),
    "per_head_float16": (
        make_inputs(3, 2, 15, 9, 16, num_rows=4, per_head=True, dtype=torch.float16, seed=0),
        None,
        AttentionSpec(-0.3, -3, 0, False, False, -2),
    ),
    "strided": (
        with_different_strides(make_inputs(2, 3, 9, 13, 8, 4, num_rows=9, dtype=torch.float32, seed=0)),
        torch.tensor([13, 0], dtype=torch.int32),
        AttentionSpec(0.3, -4, 4, True, False, 0),
    ),
    "transposed": (
        make_inputs(2, 3, 9, 13, 8, num_rows=9, dtype=torch.bfloat16, seed=0)._replace(
            query=torch.randn(2, 9, 3, 8).bfloat16().transpose(1, 2), value=torch.randn(2, 13, 3, 8).bfloat16().transpose(1, 2)
        ),
        None,
        AttentionSpec(0.3, -4, 4, True, True, 0),
    ),
}


ALL = (True, True, True, True)


def arguments(case: str, requires_grad: bool = False, wanted: tuple[bool, ...] = ALL) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the forward and of the backward operator."""
    inputs, key_lengths, spec = CASES[case]
    tensors = [None if tensor is None else tensor.detach().requires_grad_(requires_grad) for tensor in inputs[:4]]
    forward = (*tensors, key_lengths, *astuple(spec), "blockwise")
    lse = FORWARD(*forward)[1].detach()
    plain = [None if tensor is None else tensor.detach() for tensor in tensors]
    return forward, (inputs.d_out, inputs.d_lse, None, lse, *plain, key_lengths, *astuple(spec), "blockwise", wanted)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("case", CASES)
def test_opcheck_forward(case: str, requires_grad: bool) -> None:
    torch.library.opcheck(FORWARD, arguments(case, requires_grad)[0])


@pytest.mark.parametrize("wanted", [ALL, (False, True, False, True), (False, False, False, False)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case: str, wanted: tuple[bool, ...]) -> None:
    torch.library.opcheck(BACKWARD, arguments(case, wanted=wanted)[1])


@pytest.mark.parametrize("wanted", [ALL, (True, False, True, False), (False, False, False, True)], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_fakes_have_the_real_shapes_and_strides(case: str, wanted: tuple[bool, ...]) -> None:
    for operator, real_arguments in zip((FORWARD, BACKWARD), arguments(case, wanted=wanted), strict=True):
        mode = FakeTensorMode()
        fake_arguments = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in real_arguments]
        with mode:
            fakes = operator(*fake_arguments)
        for fake, real in zip(fakes, operator(*real_arguments), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def leaves_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    tensors = {name: getattr(inputs, name) for name in ("query", "key", "value", "rel_key")}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}


def float64_inputs() -> Inputs:
    return with_different_strides(make_inputs(2, 3, 17, 19, 8, 5, num_rows=7, dtype=torch.float64, seed=0))


def test_second_derivative_names_the_operator() -> None:
    """It raises, and does not drop terms. The first derivative with create_graph=True failed with an error from inside torch."""
    inputs = float64_inputs()
    leaves = leaves_of(inputs)
    out, lse = attend(*leaves.values())
    (d_query,) = torch.autograd.grad((out, lse), leaves["query"], (inputs.d_out, inputs.d_lse), create_graph=True)
    assert_same("d_query", d_query, dense_gradients(inputs).d_query)
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="triton_relattn::attention_backward cannot be differentiated"):
            torch.autograd.grad(d_query.square().sum(), leaf, retain_graph=True)


def test_gradient_penalty_names_the_operator() -> None:
    leaves = leaves_of(float64_inputs())
    out, _ = attend(*leaves.values())
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="triton_relattn::attention_backward cannot be differentiated"):
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()


def test_reference_has_second_derivatives() -> None:
    """What the message recommends works."""
    leaves = leaves_of(float64_inputs())
    out, _ = attend(*leaves.values(), implementation="reference")
    (d_query,) = torch.autograd.grad(out.square().sum(), leaves["query"], create_graph=True)
    assert torch.autograd.grad(d_query.square().sum(), leaves["rel_key"])[0].any()


def test_under_torch_func() -> None:
    """torch.func.grad gives the gradient; forward mode, which a registered formula would answer with zeros, is refused."""
    inputs = float64_inputs()
    tensors = {name: leaf.detach() for name, leaf in leaves_of(inputs).items()}

    def loss(rel_key: torch.Tensor) -> torch.Tensor:
        out, lse = attend(*(tensors | {"rel_key": rel_key}).values())
        return (out * inputs.d_out).sum() + (lse * inputs.d_lse).sum()

    assert_same("d_rel_key", torch.func.grad(loss)(tensors["rel_key"]), dense_gradients(inputs)._asdict()["d_rel_key"])
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (tensors["rel_key"],), (torch.ones_like(tensors["rel_key"]),))


@pytest.mark.parametrize("wanted", [("rel_key",), ("value",), ("query", "key"), ("query",), ("key", "rel_key")], ids="+".join)
def test_only_some_inputs_require_grad(wanted: tuple[str, ...]) -> None:
    inputs = float64_inputs()
    leaves = leaves_of(inputs)
    tensors = {name: leaf if name in wanted else leaf.detach() for name, leaf in leaves.items()}
    out, lse = attend(*tensors.values())
    torch.autograd.backward((out, lse), (inputs.d_out, inputs.d_lse))
    expected = dense_gradients(inputs)._asdict()
    for name, tensor in tensors.items():
        if name in wanted:
            assert tensor.grad is not None
            assert_same(name, tensor.grad, expected[f"d_{name}"])
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("case", CASES)
def test_unwanted_gradients_are_not_computed(case: str) -> None:
    """What is wanted does not depend on what else is; the rest comes back empty."""
    complete = BACKWARD(*arguments(case)[1])
    for wanted in itertools.product((False, True), repeat=4):
        gradients = BACKWARD(*arguments(case, wanted=wanted)[1])
        for gradient, expected, want in zip(gradients, complete, wanted, strict=True):
            assert torch.equal(gradient, expected) if want else gradient.numel() == 0


@pytest.mark.parametrize("used", ["out", "lse"])
def test_only_one_result_is_used(used: str) -> None:
    """Either result alone can be differentiated; the other one counts as a zero gradient."""
    inputs = float64_inputs()
    other = "d_lse" if used == "out" else "d_out"
    silent = inputs._replace(**{other: torch.zeros_like(getattr(inputs, other))})
    leaves = leaves_of(inputs)
    out, lse = attend(*leaves.values())
    result, gradient = (out, inputs.d_out) if used == "out" else (lse, inputs.d_lse)
    expected = dense_gradients(silent)._asdict()
    for name, actual in zip(leaves, torch.autograd.grad(result, list(leaves.values()), gradient), strict=True):
        assert_same(name, actual, expected[f"d_{name}"])


def test_nothing_requires_grad() -> None:
    leaves = leaves_of(float64_inputs())
    detached = [leaf.detach() for leaf in leaves.values()]
    with torch.no_grad():
        without_graph = attend(*leaves.values())
    with torch.inference_mode():
        in_inference = attend(*detached)
    for results in (without_graph, in_inference, attend(*detached)):
        assert not results[0].requires_grad and not results[1].requires_grad
        assert torch.equal(results[0], without_graph[0]) and torch.equal(results[1], without_graph[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("implementation", ["blockwise", "reference", None])
def test_return_lse(implementation: str | None, dtype: torch.dtype) -> None:
    inputs = make_inputs(2, 3, 5, 7, 8, 4, num_rows=9, dtype=dtype, seed=0)
    out, lse = attend(*inputs[:4], implementation=implementation)
    assert (out.shape, out.dtype) == ((2, 3, 5, 4), dtype)
    assert (lse.shape, lse.dtype) == ((2, 3, 5), torch.float64 if dtype == torch.float64 else torch.float32)
    only_out = fused_relative_attention(*inputs[:4], implementation=implementation)  # type: ignore[arg-type]
    assert isinstance(only_out, torch.Tensor) and torch.equal(only_out, out)


def test_every_argument_arrives() -> None:
    """The public function hands each of its arguments to blockwise and to the reference alike."""
    inputs = float64_inputs()
    changes: dict[str, Any] = {
        "positions": RelativePositions(-5, 1, "zero"),
        "key_lengths": torch.tensor([3, 19]),
        "is_causal": True,
        "query_offset": 4,
        "scale": 0.9,
    }
    plain = attend(*inputs[:4])[0]
    for name, value in changes.items():
        out, lse = attend(*inputs[:4], **{name: value})
        expected_out, expected_lse = attend(*inputs[:4], **{name: value}, implementation="reference")
        assert_same(name, out, expected_out)
        assert_same(name, lse, expected_lse)
        assert not torch.equal(out, plain), name


def test_compiles_in_one_graph_for_all_lengths() -> None:
    """fullgraph, forward and backward, with the default implementation; a second pair of lengths reuses the graph."""
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.backends.debugging.aot_eager(graph, example_inputs)

    def layer(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(*tensors, positions=RelativePositions(-3, 3), is_causal=True, query_offset=2, implementation=None)

    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for num_queries, num_keys in ((17, 19), (23, 29), (40, 31)):
        inputs = make_inputs(2, 3, num_queries, num_keys, 8, 5, num_rows=7, dtype=torch.float64, seed=0)
        inputs = inputs._replace(query=in_memory_order(inputs.query, 0, 2, 1, 3))
        leaves = list(leaves_of(inputs).values())
        results, expected = compiled(*leaves), layer(*leaves)
        for name, one, other in zip(("out", "lse"), results, expected, strict=True):
            assert torch.equal(one, other), name
        gradients, expected_gradients = (
            torch.autograd.grad(pair, leaves, (inputs.d_out, inputs.d_lse)) for pair in (results, expected)
        )
        for name, one, other in zip(inputs._fields, gradients, expected_gradients, strict=False):
            assert torch.equal(one, other), name
    assert len(graphs) == 1

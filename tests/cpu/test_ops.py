"""The registered operators: schemas, fakes, derivatives, compilation."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from tests.oracle import assert_same, attend, attend_varlen
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._blockwise.attention import keeps_probs
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators.ops import relative_attention
from triton_relattn.testing import (
    Inputs,
    dense_gradients,
    forward_backward,
    in_memory_order,
    make_inputs,
    with_different_strides,
)

FORWARD = torch.ops.triton_relattn.attention_forward.default
BACKWARD = torch.ops.triton_relattn.attention_backward.default


def case(tables: dict[str, Any], strided: bool = False, **arguments: Any) -> tuple[Inputs, dict[str, Any]]:
    """Inputs of (B, H, Nq, Nk, D) = (2, 4, 9, 13, 8) but for what is given, and arguments of the public function."""
    sizes = [tables.pop(name, size) for name, size in (("batch", 2), ("heads", 4), ("queries", 9), ("keys", 13), ("width", 8))]
    inputs = make_inputs(*sizes, **{"num_rows": 9, "dtype": torch.float32, "seed": 0, **tables})
    return with_different_strides(inputs) if strided else inputs, arguments


ALL_TERMS: dict[str, Any] = {"rel_width": 3, "rel_value": True, "rel_bias": True, "rel_p2c": True}
CASES: dict[str, tuple[Inputs, dict[str, Any]]] = {
    "plain": case({"batch": 1, "heads": 1, "queries": 4, "keys": 4, "num_rows": None}),
    "odd": case(
        {"queries": 17, "keys": 23, "value_width": 5, "dtype": torch.float64},
        key_lengths=torch.tensor([23, 11]),
        is_causal=True,
        query_offset=6,
    ),
    "per_head_float16": case(
        {"width": 16, "num_rows": 4, "per_head": True, "dtype": torch.float16},
        positions=RelativePositions(-3, 0, "zero"),
        scale=-0.3,
        query_offset=-2,
    ),
    "strided": case({"value_width": 4}, strided=True, key_lengths=torch.tensor([13, 0], dtype=torch.int32)),
    "transposed": (
        make_inputs(2, 3, 9, 13, 8, num_rows=9, dtype=torch.bfloat16, seed=0)._replace(
            query=torch.randn(2, 9, 3, 8).bfloat16().transpose(1, 2), value=torch.randn(2, 13, 3, 8).bfloat16().transpose(1, 2)
        ),
        {"is_causal": True},
    ),
    "all_terms": case(dict(ALL_TERMS), rel_scale=0.7, softcap=3.0, window_size=(5, 6), exact_query_grad=True),
    "all_terms_strided": case(
        {**ALL_TERMS, "per_head": True, "value_width": 4}, strided=True, query_offset=torch.tensor([2, -1])
    ),
    "bias_alone": case({"rel_key": False, "rel_bias": True}, softcap=3.0),
    "bias_in_float32": (
        make_inputs(1, 2, 5, 6, 8, num_rows=3, dtype=torch.float16, seed=0)._replace(rel_bias=torch.randn(2, 3)),
        {},
    ),
    "p2c_alone": case({"rel_key": False, "rel_p2c": True, "per_head": True}, is_causal=True, rel_scale=0.4),
    "value_table_alone": case({"rel_key": False, "rel_value": True}, dropout_p=0.3),
    "bool_mask": case({}, attn_mask=torch.rand(4, 1, 13) < 0.7),
    "float_mask": case({"dtype": torch.float64}, attn_mask=torch.randn(2, 1, 9, 13)),
    "gqa": case({**ALL_TERMS, "key_heads": 2, "dtype": torch.float64}, enable_gqa=True, dropout_p=0.2, is_causal=True),
}
PACKED = {"packed": 0.0, "packed_with_dropout": 0.4}  # dropout_p


def resolved(name: str) -> tuple[Inputs, AttentionTensors, AttentionSpec]:
    """A case as the operators take it."""
    if name in PACKED:
        inputs = make_inputs(1, 4, 9, 13, 8, num_rows=9, key_heads=2, dtype=torch.float32, seed=0, **ALL_TERMS)
        in_order = ("query", "key", "value", "rel_query")
        packed: dict[str, Any] = {each: getattr(inputs, each) for each in DIFFERENTIABLE}
        packed |= {each: packed[each][0].transpose(0, 1) for each in in_order}
        tensors, spec = resolve(
            Arguments.of(
                **packed,
                enable_gqa=True,
                is_causal=True,
                dropout_p=PACKED[name],
                query_offset=torch.tensor([1, 0, 2]),
                cu_seqlens={"q": torch.tensor([0, 3, 3, 9]), "k": torch.tensor([0, 4, 5, 13])},
                max_seqlens={"q": 6, "k": 8},
            )
        )
    else:
        inputs, arguments = CASES[name]
        tensors, spec = resolve(Arguments.of(*inputs[:4], **inputs.terms(), **arguments))  # type: ignore[misc]
    if spec.dropout_p > 0:
        tensors = tensors._replace(dropout_seed=torch.tensor([-123456789]))
    return inputs, tensors, spec


NAMES = [*CASES, *PACKED]
ALL = (True,) * len(DIFFERENTIABLE)
SOME = (
    (False, True, False, True, True, False, False, False),
    (True, False, True, False, False, True, True, True),
    (False,) * len(DIFFERENTIABLE),
)


def test_dense_is_what_is_asked_for() -> None:
    """The reference is no operator: autograd differentiates it twice."""
    _, tensors, spec = resolved(next(iter(CASES)))
    query = tensors.query.clone().requires_grad_()
    out, _ = relative_attention(tensors._replace(query=query), spec, IMPLEMENTATIONS["reference"])
    (first,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    assert torch.autograd.grad(first.sum(), query)[0].any()


def arguments(name: str, requires_grad: bool = False, wanted: tuple[bool, ...] = ALL) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Arguments of the forward and of the backward operator. Probabilities are kept where a call may keep them and all are
    written: those beyond a window are not."""
    inputs, tensors, spec = resolved(name)
    plain = tuple(None if tensor is None else tensor.detach() for tensor in tensors)
    keeps = keeps_probs(tensors, spec) and spec.window_left == spec.window_right == -1
    _, lse, _, kept = FORWARD(*plain, *spec, "blockwise", keeps)
    leaves = [None if tensor is None else tensor.detach().requires_grad_(requires_grad) for tensor in tensors[: len(ALL)]]
    forward = (*leaves, *plain[len(ALL) :], *spec, "blockwise", keeps)
    saved = (None, lse, None, kept if keeps else None)
    return forward, (inputs.d_out, inputs.d_lse, *saved, *plain, *spec, "blockwise", wanted)


def test_schema_is_that_of_the_tensors_and_the_spec() -> None:
    """The operators' arguments have the names and order of the tensors and the spec, which callers rely on."""
    names = [argument.name for argument in FORWARD._schema.arguments]
    assert names == [*AttentionTensors._fields, *AttentionSpec._fields, "implementation", "keeps"]
    of_backward = [argument.name for argument in BACKWARD._schema.arguments]
    assert of_backward == ["d_out", "d_lse", "out", "lse", "softmax_stats", "kept", *names[:-1], "wanted"]
    assert len(FORWARD._schema.returns) == 4 and len(BACKWARD._schema.returns) == len(DIFFERENTIABLE) == 8


@pytest.mark.parametrize("requires_grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_forward(name: str, requires_grad: bool) -> None:
    torch.library.opcheck(FORWARD, arguments(name, requires_grad)[0])


@pytest.mark.parametrize("wanted", [ALL, SOME[0]], ids=["all", "some"])
@pytest.mark.parametrize("name", NAMES)
def test_opcheck_backward(name: str, wanted: tuple[bool, ...]) -> None:
    torch.library.opcheck(BACKWARD, arguments(name, wanted=wanted)[1])


def test_opcheck_backward_with_inputs_that_require_gradients() -> None:
    """All is well registered; what cannot be done is named."""
    inputs = tuple(
        each.clone().requires_grad_() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for each in arguments("all_terms")[1]
    )
    torch.library.opcheck(BACKWARD, inputs, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))
    with pytest.raises(Exception, match="attention_backward cannot be differentiated"):
        torch.library.opcheck(BACKWARD, inputs)


def test_operators_themselves_are_differentiated_like_the_function() -> None:
    """By torch.func, too; in forward mode they refuse."""
    forward, _ = arguments("odd")
    index = AttentionTensors._fields.index("rel_key")

    def of_table(table: torch.Tensor) -> torch.Tensor:
        results: tuple[torch.Tensor, ...] = FORWARD(*forward[:index], table, *forward[index + 1 :])
        return results[0].square().sum()

    table = forward[index].detach().requires_grad_()
    (expected,) = torch.autograd.grad(of_table(table), table)
    assert_same("d_rel_key", torch.func.grad(of_table)(table.detach()), expected)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(of_table, (table.detach(),), (table.detach(),))
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        of_table(forward_ad.make_dual(table.detach(), table.detach()))


@pytest.mark.parametrize("wanted", [ALL, *SOME], ids=["all", "some", "others", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_fakes_have_the_real_shapes_and_strides(name: str, wanted: tuple[bool, ...]) -> None:
    for operator, real_arguments in zip((FORWARD, BACKWARD), arguments(name, wanted=wanted), strict=True):
        mode = FakeTensorMode()
        fake_arguments = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in real_arguments]
        with mode:
            fakes = operator(*fake_arguments)
        for fake, real in zip(fakes, operator(*real_arguments), strict=True):
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


def leaves_of(inputs: Inputs) -> dict[str, Any]:
    tensors = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor is not None}


def float64_inputs(**further: Any) -> Inputs:
    return with_different_strides(make_inputs(2, 3, 17, 19, 8, 5, num_rows=7, dtype=torch.float64, seed=0, **further))


def test_second_derivative_names_the_operator() -> None:
    """It raises, and does not drop terms. The first derivative with create_graph=True failed with an error from inside torch."""
    inputs = float64_inputs()
    leaves = leaves_of(inputs)
    out, lse = attend(**leaves)
    (d_query,) = torch.autograd.grad((out, lse), leaves["query"], (inputs.d_out, inputs.d_lse), create_graph=True)
    assert_same("d_query", d_query, dense_gradients(inputs).d_query)
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="triton_relattn::attention_backward cannot be differentiated"):
            torch.autograd.grad(d_query.square().sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("name", ["plain", "all_terms"])
def test_who_watches_sees_the_operators(name: str) -> None:
    """The profiler, a mode and a class of tensors do; and what an unwatched call computes has the same bits."""
    inputs, arguments = CASES[name]
    seen: list[str] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(function.name())
            return function(*args, **(kwargs or {}))

    class Named(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(function))
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))

    def step(**changed: torch.Tensor) -> list[torch.Tensor]:
        leaves = leaves_of(inputs)
        out, _ = attend(**{**leaves, **changed}, **arguments)
        return [out.detach().as_subclass(torch.Tensor), *torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True)]

    operators = {f"triton_relattn::attention_{each}" for each in ("forward", "backward")}
    expected = step()
    assert not seen
    with torch.profiler.profile() as profile:
        found = [step()]
    assert operators <= {each.key for each in profile.key_averages()}
    with Seen():
        found.append(step())
    assert operators <= set(seen)
    seen.clear()
    found.append(step(key=inputs.key.as_subclass(Named)))
    assert "triton_relattn.attention_forward.default" in seen
    for results in found[:2]:
        assert all(torch.equal(result, each) for result, each in zip(results, expected, strict=True))
    assert torch.equal(found[2][0], expected[0])


def test_gradient_penalty_names_the_operator() -> None:
    leaves = leaves_of(float64_inputs())
    out, _ = attend(**leaves)
    gradients = torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True)
    with pytest.raises(RuntimeError, match="triton_relattn::attention_backward cannot be differentiated"):
        torch.stack([gradient.square().sum() for gradient in gradients]).sum().backward()


def test_reference_has_second_derivatives() -> None:
    """The reference has the second derivatives for which the error message recommends it."""
    leaves = leaves_of(float64_inputs())
    out, _ = attend(**leaves, implementation="reference")
    (d_query,) = torch.autograd.grad(out.square().sum(), leaves["query"], create_graph=True)
    assert torch.autograd.grad(d_query.square().sum(), leaves["rel_key"])[0].any()


def test_under_torch_func() -> None:
    """torch.func.grad gives the gradient; forward mode, which a registered formula would answer with zeros, is refused."""
    inputs = float64_inputs()
    tensors = {name: leaf.detach() for name, leaf in leaves_of(inputs).items()}

    def loss(rel_key: torch.Tensor) -> torch.Tensor:
        out, lse = attend(**(tensors | {"rel_key": rel_key}))
        return (out * inputs.d_out).sum() + (lse * inputs.d_lse).sum()

    assert_same("d_rel_key", torch.func.grad(loss)(tensors["rel_key"]), dense_gradients(inputs)._asdict()["d_rel_key"])
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(loss, (tensors["rel_key"],), (torch.ones_like(tensors["rel_key"]),))


WANTED = (
    *((name,) for name in DIFFERENTIABLE),
    ("query", "key"),
    ("key", "rel_key"),
    ("rel_query", "rel_value", "rel_bias"),
    ("key", "rel_p2c"),
)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
@pytest.mark.parametrize("wanted", WANTED, ids="+".join)
def test_only_some_inputs_require_grad(wanted: tuple[str, ...], implementation: str) -> None:
    inputs = float64_inputs(**ALL_TERMS)
    leaves = leaves_of(inputs)
    tensors = {name: leaf if name in wanted else leaf.detach() for name, leaf in leaves.items()}
    results = zip(attend(**tensors, implementation=implementation), (inputs.d_out, inputs.d_lse), strict=True)
    differentiable = [(result, gradient) for result, gradient in results if result.requires_grad]
    torch.autograd.backward([result for result, _ in differentiable], [gradient for _, gradient in differentiable])
    expected = dense_gradients(inputs)._asdict()
    for name, tensor in tensors.items():
        if name in wanted:
            assert tensor.grad is not None
            assert_same(name, tensor.grad, expected[f"d_{name}"])
        else:
            assert tensor.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_unwanted_gradients_are_not_computed(name: str) -> None:
    """A gradient has the same bits whichever others are wanted; unwanted gradients come back empty."""
    *arguments_of_all, _ = arguments(name)[1]
    there = [tensor is not None for tensor in arguments_of_all[5 : 5 + len(ALL)]]
    complete = BACKWARD(*arguments_of_all, list(ALL))
    for wanted in itertools.product(*((False, True) if each else (True,) for each in there)):
        gradients = BACKWARD(*arguments_of_all, list(wanted))
        for gradient, expected, want in zip(gradients, complete, wanted, strict=True):
            assert torch.equal(gradient, expected) if want else gradient.numel() == 0, wanted


@pytest.mark.parametrize("used", ["out", "lse"])
def test_only_one_result_is_used(used: str) -> None:
    """Either result alone can be differentiated; the other one counts as a zero gradient."""
    inputs = float64_inputs()
    other = "d_lse" if used == "out" else "d_out"
    silent = inputs._replace(**{other: torch.zeros_like(getattr(inputs, other))})
    leaves = leaves_of(inputs)
    out, lse = attend(**leaves)
    result, gradient = (out, inputs.d_out) if used == "out" else (lse, inputs.d_lse)
    expected = dense_gradients(silent)._asdict()
    for name, actual in zip(leaves, torch.autograd.grad(result, list(leaves.values()), gradient), strict=True):
        assert_same(name, actual, expected[f"d_{name}"])


def test_nothing_requires_grad() -> None:
    leaves = leaves_of(float64_inputs())
    detached = {name: leaf.detach() for name, leaf in leaves.items()}
    with torch.no_grad():
        without_graph = attend(**leaves)
    with torch.inference_mode():
        in_inference = attend(**detached)
    for results in (without_graph, in_inference, attend(**detached)):
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
    further = float64_inputs(rel_value=True, rel_bias=True, rel_p2c=True).terms() | {"rel_query": inputs.query.flip(-1)}
    changes: dict[str, Any] = {
        **further,
        "positions": RelativePositions(-5, 1, "zero"),
        "attn_mask": torch.arange(19) > 3,
        "key_lengths": torch.tensor([3, 19]),
        "is_causal": True,
        "window_size": (3, 4),
        "query_offset": 4,
        "dropout_p": 0.2,
        "scale": 0.9,
        "rel_scale": 0.1,
        "softcap": 1.5,
    }
    untouched = {"enable_gqa", "return_lse", "exact_query_grad", "implementation"}
    names = set(inspect.signature(fused_relative_attention).parameters) - {"query", "key", "value", "rel_key", "unknown"}
    assert names == set(changes) | untouched
    plain = attend(*inputs[:4])[0]
    for name, value in changes.items():
        torch.manual_seed(0)
        out, lse = attend(*inputs[:4], **{name: value})
        torch.manual_seed(0)
        expected_out, expected_lse = attend(*inputs[:4], **{name: value}, implementation="reference")
        assert_same(name, out, expected_out)
        assert_same(name, lse, expected_lse)
        assert not torch.equal(out, plain), name
    offsets = torch.tensor([4, 4])
    assert torch.equal(attend(*inputs[:4], query_offset=offsets)[0], attend(*inputs[:4], query_offset=4)[0])


def test_exact_delta_changes_nothing_here() -> None:
    """blockwise and the reference always are exact."""
    inputs = float64_inputs(**ALL_TERMS)
    for implementation in ("blockwise", "reference"):
        results, expected = (
            forward_backward(attend, inputs, implementation=implementation, exact_query_grad=exact) for exact in (True, False)
        )
        assert all(torch.equal(results[name], expected[name]) for name in expected)


def test_compiles_in_one_graph_for_all_lengths() -> None:
    """fullgraph, forward and backward, with the default implementation; a second pair of lengths reuses the graph."""
    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []
    attempts = []

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
        # Floats that the caller leaves at their default may take torch.compile two attempts at the first graph.
        attempts.append(len(graphs))
        for name, one, other in zip(("out", "lse"), results, expected, strict=True):
            assert torch.equal(one, other), name
        gradients, expected_gradients = (
            torch.autograd.grad(pair, leaves, (inputs.d_out, inputs.d_lse)) for pair in (results, expected)
        )
        for name, one, other in zip(inputs._fields, gradients, expected_gradients, strict=False):
            assert torch.equal(one, other), name
    assert len(set(attempts)) == 1 <= attempts[0], "other lengths were compiled again"


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_compiles_with_everything(kind: str) -> None:
    """fullgraph, forward and backward, with every tensor; dropout draws from the generator as it does uncompiled."""
    torch._dynamo.reset()
    inputs = make_inputs(1, 4, 9, 13, 8, 5, num_rows=7, key_heads=2, dtype=torch.float64, seed=0, **ALL_TERMS)
    leaves = leaves_of(inputs)
    arguments: dict[str, Any] = {"dropout_p": 0.3, "softcap": 4.0, "window_size": (5, 6), "enable_gqa": True, "rel_scale": 0.3}
    if kind == "packed":
        in_order = ("query", "key", "value", "rel_query")
        leaves |= {name: leaves[name].detach()[0].transpose(0, 1).requires_grad_() for name in in_order}
        starts = {"cu_seqlens_q": torch.tensor([0, 3, 9]), "cu_seqlens_k": torch.tensor([0, 4, 13])}
        arguments |= {**starts, "max_seqlen_q": 6, "max_seqlen_k": 9}
    else:
        arguments |= {"attn_mask": torch.arange(13) != 4, "query_offset": torch.tensor([2]), "key_lengths": torch.tensor([12])}
    function = attend if kind == "padded" else attend_varlen

    def layer(tensors: dict[str, torch.Tensor]) -> Any:
        return function(**tensors, **arguments)

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        out, lse = run(leaves)
        assert out.any() and (lse != -torch.inf).any()
        loss = out.square().sum() + lse[lse != -torch.inf].sum()
        results.append([out, lse, *torch.autograd.grad(loss, list(leaves.values()))])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_where_nothing_requires_a_gradient(backend: str, guard: Any) -> None:
    torch._dynamo.reset()
    inputs = make_inputs(1, 2, 5, 6, 8, 4, num_rows=7, dtype=torch.float32, seed=0)
    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    with guard():
        for one, other in zip(compiled(*inputs[:4]), attend(*inputs[:4]), strict=True):
            assert torch.equal(one, other)


def test_compiles_with_positions_that_a_window_covers() -> None:
    """outside="error" does not read the values of query_offset while compiling."""
    torch._dynamo.reset()
    inputs = make_inputs(1, 2, 5, 6, 8, 4, num_rows=7, dtype=torch.float32, seed=0)
    arguments: dict[str, Any] = {"positions": RelativePositions(-3, 3, "error"), "query_offset": torch.tensor([1])}

    def layer(*tensors: Any) -> Any:
        return attend(*tensors, **arguments, window_size=(3, 3))

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    for one, other in zip(compiled(*inputs[:4]), layer(*inputs[:4]), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_autocast_does_not_change_the_precision(implementation: str) -> None:
    """Scores and sums, forward and backward, with every term: inputs that are in autocast's dtype give the same bits."""
    inputs = make_inputs(1, 4, 9, 13, 8, 5, num_rows=7, key_heads=2, dtype=torch.bfloat16, seed=0, **ALL_TERMS)
    arguments: dict[str, Any] = {"softcap": 4.0, "enable_gqa": True, "implementation": implementation}
    results = []
    for enabled in (False, True):
        leaves = leaves_of(inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out, lse = attend(**leaves, **arguments)
            results.append((out, lse, *torch.autograd.grad((out, lse), list(leaves.values()), (inputs.d_out, inputs.d_lse))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_compiles_once_for_numbers_that_follow_from_lengths() -> None:
    """query_offset, window_size and max_seqlen of symbolic shapes: no message shows them, which would fix their values."""
    torch._dynamo.reset()
    graphs = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def layer(query: torch.Tensor, key: torch.Tensor) -> Any:
        offset = key.shape[2] - query.shape[2]
        out = fused_relative_attention(query, key, key, is_causal=True, query_offset=offset, window_size=(offset + 3, -1))
        packed, starts = key[0].transpose(0, 1), torch.stack((torch.zeros(()), torch.tensor(key.shape[2]))).int()
        packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        longest: dict[str, Any] = {"max_seqlen_q": key.shape[2], "max_seqlen_k": key.shape[2]}
        return out, fused_relative_attention_varlen(packed, packed, packed, **packing, **longest)

    compiled = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for num_queries, num_keys in ((5, 9), (6, 13), (8, 33)):
        query, key = torch.randn(1, 2, num_queries, 8), torch.randn(1, 2, num_keys, 8)
        for one, other in zip(compiled(query, key), layer(query, key), strict=True):
            assert torch.equal(one, other)
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_with_numbers_from_tensors(backend: str) -> None:
    """Longest lengths, windows and offsets that the program reads itself: fullgraph, once, and checked when it runs."""
    torch._dynamo.reset()
    query, table = torch.randn(12, 2, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)

    def layer(starts: torch.Tensor, lengths: torch.Tensor) -> Any:
        longest, packing = lengths.max().item(), {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        packed = attend_varlen(query, query, query, table, **packing, max_seqlen_q=longest, max_seqlen_k=longest)
        padded = query.transpose(0, 1)[None]
        return packed[0], attend(padded, padded, padded, table, window_size=(longest, -1), query_offset=lengths[0].item())[0]

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for first in (5, 4, 12):
            starts, lengths = torch.tensor([0, first, 12]), torch.tensor([first, 12 - first])
            for one, other in zip(compiled(starts, lengths), layer(starts, lengths), strict=True):
                assert_same("out", one, other)
        assert counter.frame_count == 1
        with pytest.raises(RuntimeError, match="u0"):
            compiled(starts, torch.tensor([-1, -1]))


@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
def test_exports_with_numbers_from_tensors(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, query: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
            longest = starts.diff().max().item()
            packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
            out: torch.Tensor = attend_varlen(query, query, query, **packing, max_seqlen_q=longest, max_seqlen_k=longest)[0]
            return out

    query, starts = torch.randn(12, 2, 8, dtype=torch.float64), torch.tensor([0, 5, 12])
    program = torch.export.export(Layer(), (query, starts), strict=strict)
    for first in (5, 2):
        starts = torch.tensor([0, first, 12])
        assert_same("out", program.module()(query, starts), Layer()(query, starts))

"""At home in torch: operators, derivatives, torch.func, compilation, export, autocast, checkpointing, FLOPs, nested tensors."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.check import attend, attend_varlen
from tests.conftest import forget_warnings
from tests.expected import exact_results
from tests.samples import in_memory_order, with_different_strides
from tests.tolerance import assert_near, assert_same
from triton_relattn import (
    RelativePositions,
    decomposed_relative_attention,
    fused_relative_attention,
    fused_relative_attention_varlen,
)
from triton_relattn.nn import RelativeMultiheadAttention
from triton_relattn.testing import Inputs, make_inputs

FORWARD = torch.ops.triton_relattn.attention_forward.default
DIFFERENTIABLE = ("query", "key", "value", "rel_key", "rel_query", "rel_value", "rel_bias", "rel_p2c")
Options = dict[str, Any]
Compiled = torch._dynamo.testing.CompileCounterWithBackend


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def attend_out(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
    """The output alone, of the default implementation."""
    out: Any = fused_relative_attention(*tensors, **options)
    return out


def four(*lengths: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """query, key, value and a table of 9 rows, which want gradients."""
    num_queries, num_keys = lengths or (10, 10)
    inputs = make_inputs(2, 2, num_queries, num_keys, 8, num_rows=9, dtype=dtype, seed=0)
    return [each.requires_grad_() for each in inputs[:4] if each is not None]


def make_leaves(inputs: Inputs) -> dict[str, Any]:
    tensors = {name: getattr(inputs, name) for name in DIFFERENTIABLE}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor is not None}


def gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor] | nn.Module) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, tuple(leaves.parameters() if isinstance(leaves, nn.Module) else leaves))


def assert_gradients_near(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    """Some parameters' gradients cancel: they are as far off as the others' terms."""
    largest = max(float(each.abs().max()) for each in exact)
    for each, right in zip(ours, exact, strict=True):
        assert_near("gradient", each, right, smallest=largest)


ALL_TERMS: Options = {"rel_width": 3, "rel_value": True, "rel_bias": True, "rel_p2c": True}
THREE = {name: torch.tensor([0, *ends]) for name, ends in (("cu_seqlens_q", (3, 3, 9)), ("cu_seqlens_k", (4, 5, 13)))}
PACKING: Options = {**THREE, "max_seqlen_q": 6, "max_seqlen_k": 8, "query_offset": torch.tensor([1, 0, 2])}


def case(*sizes: int, strided: bool = False, options: Options | None = None, **tables: Any) -> tuple[Inputs, Options]:
    """Inputs of (B, H, Nq, Nk, D) = (2, 4, 9, 13, 8) but for what is given, and arguments of the public function."""
    made = make_inputs(*(*sizes, *(2, 4, 9, 13, 8)[len(sizes) :]), **{"num_rows": 9, "dtype": torch.float32, "seed": 0, **tables})
    return with_different_strides(made) if strided else made, options or {}


CASES: dict[str, tuple[Inputs, Options]] = {
    "odd": case(2, 4, 17, 23, dtype=torch.float64, options={"key_lengths": torch.tensor([23, 11]), "is_causal": True}),
    "strided": case(strided=True, value_width=4, options={"key_lengths": torch.tensor([13, 0], dtype=torch.int32)}),
    "bfloat16": case(dtype=torch.bfloat16, options={"query_offset": 1}),  # a causal call keeps probabilities that nobody writes
    "all_terms": case(**ALL_TERMS, options={"rel_scale": 0.7, "softcap": 3.0, "window_size": (5, 6)}),
    "all_strided": case(strided=True, **ALL_TERMS, per_head=True, value_width=4, options={"query_offset": torch.tensor([2, -1])}),
    "value_table_alone": case(rel_key=False, rel_value=True, options={"dropout_p": 0.3}),
    "mask": case(options={"attn_mask": torch.rand(4, 1, 13) < 0.7}),
    "packed": case(1, **ALL_TERMS, key_heads=2, options={"enable_gqa": True, "dropout_p": 0.4, **PACKING}),
}
GRID: Options = {"grid": (4, 3), "implementation": "blockwise"}


def attend_grid(**arguments: Any) -> tuple[torch.Tensor]:
    out: Any = decomposed_relative_attention(**arguments)
    return (out,)


def grid_leaves(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of a call on a grid with a class token, in another memory order than they are used."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 13, 3, 6, dtype=dtype, generator=generator).transpose(1, 2) for _ in range(3))
    rel_pos_h, rel_pos_w = (torch.randn(rows, 6, dtype=dtype, generator=generator) for rows in (7, 5))
    leaves = {"query": query, "key": key, "value": value, "rel_pos_h": rel_pos_h, "rel_pos_w": rel_pos_w}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def get_call(name: str) -> tuple[Callable[..., Any], dict[str, torch.Tensor], tuple[torch.Tensor, ...], Options]:
    """A case: the function, its leaves, the gradients of its results, its other arguments."""
    if name.startswith("grid"):
        leaves = grid_leaves()
        return attend_grid, leaves, (torch.randn(2, 3, 13, 6),), GRID | {"dropout_p": 0.3 if name == "grid_dropout" else 0.0}
    inputs, options = CASES[name]
    if "cu_seqlens_q" not in options:
        return attend, make_leaves(inputs), (inputs.d_out, inputs.d_lse), options
    moved = {name: getattr(inputs, name)[0].transpose(0, 1) for name in ("query", "key", "value", "rel_query", "d_out")}
    inputs = inputs._replace(**moved)
    return attend_varlen, make_leaves(inputs), (inputs.d_out, inputs.d_lse[0]), options


class Recorded(TorchDispatchMode):
    """The calls of this package's operators within the context: their arguments, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "triton_relattn":
            self.calls.append((function, tuple(each.detach() if isinstance(each, torch.Tensor) else each for each in args)))
        return function(*args, **(kwargs or {}))


# Operators and their derivatives, over a sequence and on a grid.


QUICK = ("all_terms", "packed", "grid")


@pytest.mark.parametrize("wanted", ["all", "some"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in (*CASES, "grid", "grid_dropout")]
)
def test_operators_are_well_registered(name: str, wanted: str) -> None:
    """Schemas, fakes with the real shapes and strides, autograd, and all of it compiled."""
    function, leaves, d_results, options = get_call(name)
    if wanted == "some":
        leaves = {each: leaf if number % 2 else leaf.detach() for number, (each, leaf) in enumerate(leaves.items())}
    with Recorded() as recorded:
        results = function(**leaves, **options)
        torch.autograd.grad(results, [leaf for leaf in leaves.values() if leaf.requires_grad], d_results)
    (forward, forward_arguments), (backward, backward_arguments) = recorded.calls
    assert [str(operator).rsplit("_")[-1] for operator in (forward, backward)] == ["forward.default", "backward.default"]
    torch.library.opcheck(forward, forward_arguments)
    differentiable = [argument.name in (*DIFFERENTIABLE, "rel_h", "rel_w") for argument in forward._schema.arguments]
    pairs = zip(forward_arguments, differentiable, strict=True)
    torch.library.opcheck(
        forward, tuple(value.requires_grad_() if isinstance(value, torch.Tensor) and has else value for value, has in pairs)
    )
    torch.library.opcheck(backward, backward_arguments)


def test_gradients_are_those_of_differences() -> None:
    """By torch's own check; of the reference, which is what errors recommend for them, in forward mode and twice as well."""
    inputs = make_inputs(1, 2, 3, 4, 2, num_rows=3, dtype=torch.float64, seed=0, **{**ALL_TERMS, "rel_width": 1})
    for function, leaves, options in (
        (attend, make_leaves(inputs), {"softcap": 3.0}),
        (attend_grid, grid_leaves(torch.float64), {"grid": (4, 3)}),
    ):
        names, tensors = tuple(leaves), tuple(leaves.values())
        check = partial(torch.autograd.gradcheck, fast_mode=True)

        def run(implementation: str, *tensors: torch.Tensor, call: Any = (function, names, options)) -> Any:
            function, names, options = call
            return function(**dict(zip(names, tensors, strict=True)), **options, implementation=implementation)

        assert check(partial(run, "blockwise"), tensors)
        assert check(partial(run, "reference"), tensors, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(partial(run, "reference"), tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["all_strided", "packed", "grid"])
def test_only_some_inputs_require_gradients(name: str) -> None:
    """A gradient has the same bits whichever others are wanted."""

    def run(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
        function, leaves, d_results, options = get_call(name)
        tensors = {each: leaf if each in wanted else leaf.detach() for each, leaf in leaves.items()}
        torch.manual_seed(0)
        pairs = zip(function(**tensors, **options), map(torch.ones_like, d_results), strict=True)
        results, seeds = zip(*((result, seed) for result, seed in pairs if result.requires_grad), strict=True)
        return dict(zip(wanted, torch.autograd.grad(results, [tensors[each] for each in wanted], seeds), strict=True))

    names = tuple(get_call(name)[1])
    expected = run(names)
    for wanted in (*((each,) for each in names), names[:2], names[1::2], names[2:], names[:3], names[1:]):
        for each, gradient in run(wanted).items():
            assert torch.equal(gradient, expected[each]), (wanted, each)


@pytest.mark.parametrize("used", ["out", "lse", "both"])
def test_either_result_is_differentiated(used: str) -> None:
    """The other one counts as a zero gradient; where no key is seen, nobody looks at the gradient of lse."""
    inputs = with_different_strides(make_inputs(2, 3, 17, 19, 8, 5, num_rows=7, dtype=torch.float64, seed=0, **ALL_TERMS))
    options: Options = {"key_lengths": torch.tensor([19, 0])}
    leaves, d_lse = make_leaves(inputs), inputs.d_lse.clone()
    d_lse[1] = torch.nan
    out, lse = attend(**leaves, **options)
    results, seeds = {"out": ([out], [inputs.d_out]), "lse": ([lse], [d_lse])}.get(used, ([out, lse], [inputs.d_out, d_lse]))
    silent = {name: 0 * getattr(inputs, name) for name in ("d_out", "d_lse") if used not in (name[2:], "both")}
    expected = exact_results(inputs._replace(**silent), **options)
    for name, actual in zip(leaves, torch.autograd.grad(results, list(leaves.values()), seeds, allow_unused=True), strict=True):
        if used == "lse" and name in ("value", "rel_value"):
            assert actual is None or not actual.any()
        else:
            assert_same(name, actual, expected[f"d_{name}"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_results_without_a_graph(dtype: torch.dtype) -> None:
    """The same with gradients off, in inference mode, and where nothing requires one; lse is never in 16 bits."""
    tensors = [each.detach() for each in four(5, 7, dtype=dtype)]
    for implementation in ("blockwise", "reference"):
        out, lse = attend(*tensors, implementation=implementation)
        assert (out.shape, out.dtype) == ((2, 2, 5, 8), dtype) and not out.requires_grad and not lse.requires_grad
        assert (lse.shape, lse.dtype) == ((2, 2, 5), torch.float64 if dtype == torch.float64 else torch.float32)
        assert torch.equal(attend_out(*tensors, implementation=implementation), out)
    expected = attend(*tensors)
    with torch.inference_mode():
        assert all(map(torch.equal, attend(*tensors), expected))
    with torch.no_grad():
        out, lse = attend(*four(5, 7, dtype=dtype))
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1]) and not out.requires_grad


@pytest.mark.parametrize("name", ["odd", "grid"])
def test_second_derivatives_are_refused(name: str) -> None:
    """With create_graph=True first derivatives are right; a second one raises, and does not drop terms."""
    function, leaves, d_results, options = get_call(name)
    first = torch.autograd.grad(function(**leaves, **options), list(leaves.values()), d_results)
    found = torch.autograd.grad(function(**leaves, **options), list(leaves.values()), d_results, create_graph=True)
    assert all(map(torch.equal, first, found))
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
            torch.autograd.grad(found[0].square().sum(), leaf, retain_graph=True)


@pytest.mark.parametrize("index", range(4))
def test_a_changed_input_is_noticed(index: int) -> None:
    """Written to between forward and backward: torch's error, not a wrong gradient."""
    copies = [tensor.clone() for tensor in four()]
    out = attend_out(*copies)
    with torch.no_grad():
        copies[index].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# torch.func, and forward mode.

QUERY, KEY, VALUE, TABLE = (tensor.detach() for tensor in four())


def table_loss(table: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return attend_out(QUERY, KEY, VALUE, table).square().sum()


GRID_TENSORS = {name: leaf.detach() for name, leaf in grid_leaves(torch.float64).items()}


def grid_loss(rel_pos_h: torch.Tensor) -> torch.Tensor:
    """A loss of attention on a grid."""
    return attend_grid(**{**GRID_TENSORS, "rel_pos_h": rel_pos_h}, **GRID)[0].square().sum()


LOSSES: dict[str, tuple[Any, torch.Tensor]] = {"sequence": (table_loss, TABLE), "grid": (grid_loss, GRID_TENSORS["rel_pos_h"])}


def backward_of_vjp(loss: Any, table: torch.Tensor) -> torch.Tensor:
    gradient: torch.Tensor = torch.func.vjp(loss, table)[1](torch.ones((), dtype=table.dtype))[0]
    return gradient


TRANSFORMED: dict[str, Any] = {
    "grad": lambda loss, table: torch.func.grad(loss)(table),
    "vjp": backward_of_vjp,
    "primal of vjp": lambda loss, table: torch.func.grad(lambda table: torch.func.vjp(loss, table)[0])(table),
    "per sample": lambda loss, table: torch.func.vmap(torch.func.grad(loss))(torch.stack([table, -table]))[0],
    "grad of vmap": lambda loss, table: torch.func.grad(lambda table: torch.func.vmap(loss)(table[None]).sum())(table),
    "jacrev": lambda loss, table: torch.func.jacrev(lambda table: loss(table)[None])(table)[0],
}


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", TRANSFORMED)
@pytest.mark.parametrize("kind", LOSSES)
def test_torch_func(kind: str, name: str, backend: str | None) -> None:
    """Uncompiled and in one graph; an outer transform is not lost on the way through an inner one."""
    loss, table = LOSSES[kind]
    if kind == "grid" and backend is not None:
        pytest.skip("what is compiled is the operator of a sequence")
    leaf = table.clone().requires_grad_()
    transformed = partial(TRANSFORMED[name], loss)
    run = transformed if backend is None else torch.compile(transformed, backend=backend, fullgraph=True)
    assert_same(name, run(table), gradients(loss(leaf), [leaf])[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
def test_second_derivatives_under_torch_func(compiled: bool) -> None:
    """An error that says so, also of a loss to which only a part is a gradient."""
    gradient = torch.func.grad(lambda table: table_loss(table) + backward_of_vjp(table_loss, table).square().sum())
    run = torch.compile(gradient, backend="aot_eager", fullgraph=True) if compiled else gradient
    with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
        run(TABLE)


def test_vmap() -> None:
    """Over any of the tensors, lengths and offsets, forward and backward: gradients of a table per sample."""
    vmap, many, tables = torch.func.vmap, *(torch.stack([each, -each, 2 * each]) for each in (QUERY, TABLE))
    mapped = vmap(lambda q: attend_out(q, KEY, VALUE, TABLE))(many)
    assert_same("query", mapped, torch.stack([attend_out(each, KEY, VALUE, TABLE) for each in many]))
    both = vmap(lambda q, e: attend_out(q, KEY, VALUE, e), in_dims=(1, 0))(many.transpose(0, 1), tables)
    assert_same("both", both, torch.stack([attend_out(q, KEY, VALUE, e) for q, e in zip(many, tables, strict=True)]))
    wanting = tables.clone().requires_grad_()
    ways = (
        vmap(lambda e: attend_out(QUERY, KEY, VALUE, e))(wanting),
        torch.stack([attend_out(QUERY, KEY, VALUE, e) for e in wanting]),
    )
    assert_same("outside", *(gradients(each.square().sum(), [wanting])[0] for each in ways))
    gradient = torch.func.grad(lambda table, query: attend_out(query, KEY, VALUE, table).square().sum())
    per_sample = vmap(gradient, in_dims=(None, 0))(TABLE, many)
    assert_same("per sample", per_sample, torch.stack([gradient(TABLE, each) for each in many]))
    lengths = torch.tensor([[10, 4], [7, 1], [0, 9]])
    for name in ("key_lengths", "query_offset"):

        def run(each: torch.Tensor, name: str = name) -> torch.Tensor:
            return attend_out(QUERY, KEY, VALUE, TABLE, **{name: each})

        assert_same(name, vmap(run)(lengths), torch.stack([run(each) for each in lengths]))
    with pytest.raises(ValueError, match="size 0"):
        vmap(lambda q: attend_out(q, KEY, VALUE, TABLE))(QUERY.expand(0, *QUERY.shape))


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_dropout_under_vmap(implementation: str) -> None:
    """randomness says whether samples drop alike."""
    many = QUERY.expand(3, *QUERY.shape)
    run = partial(torch.func.vmap, lambda q: attend_out(q, KEY, VALUE, TABLE, dropout_p=0.5, implementation=implementation))
    different, same = run(randomness="different")(many), run(randomness="same")(many)
    assert not torch.equal(different[0], different[1]) and torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        run(randomness="error")(many)


def test_no_forward_mode_goes_unnoticed() -> None:
    """Tangents that the operator would drop are refused, wherever they come from: of any tensor, through vmap, in a backward."""
    tensors = [QUERY, KEY, VALUE, TABLE]
    refused = partial(pytest.raises, NotImplementedError, match='implementation="reference" has them')
    for index, tensor in enumerate(tensors):
        with torch.no_grad(), forward_ad.dual_level(), refused():
            attend_out(*tensors[:index], forward_ad.make_dual(tensor, tensor), *tensors[index + 1 :])
    run_table, many = partial(attend_out, QUERY, KEY, VALUE), torch.stack([TABLE, -TABLE])
    for run in (
        *(partial(torch.func.jvp, loss, (table,), (table,)) for loss, table in LOSSES.values()),
        partial(torch.func.hessian(table_loss), TABLE),
        partial(torch.func.vmap(partial(torch.func.jvp, run_table)), (many,), (many,)),
        partial(torch.func.jvp, torch.func.vmap(run_table), (many,), (many,)),
    ):
        with refused():
            run()
    query = QUERY.clone().requires_grad_()
    out = attend_out(query, KEY, VALUE, TABLE)
    with forward_ad.dual_level(), refused():
        torch.autograd.grad(out, query, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


# Compilation and export.

MODULES: dict[str, Callable[[], RelativeMultiheadAttention]] = {
    "shaw": lambda: RelativeMultiheadAttention.shaw(16, 2, 4, batch_first=True),
    "transformer_xl": lambda: RelativeMultiheadAttention.transformer_xl(16, 2, batch_first=True),
    "t5": lambda: RelativeMultiheadAttention.t5(16, 2, batch_first=True),
    "alibi": lambda: RelativeMultiheadAttention.alibi(16, 2, batch_first=True),
}


class Model(nn.Module):
    def __init__(self, kind: str = "shaw") -> None:
        super().__init__()
        self.attention = MODULES[kind]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x, x, x, is_causal=True)[0]
        return output


def test_compiles_in_one_graph_for_all_lengths() -> None:
    """fullgraph, forward and backward, of any strides; a second pair of lengths reuses the graph."""
    counter = Compiled("aot_eager")
    layer = partial(attend, positions=RelativePositions(-3, 3), is_causal=True, query_offset=2, implementation=None)
    compiled, counts = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True), set()
    for num_queries, num_keys in ((17, 19), (23, 29), (40, 31)):
        inputs = make_inputs(2, 3, num_queries, num_keys, 8, 5, num_rows=7, dtype=torch.float64, seed=0)
        leaves = list(make_leaves(inputs._replace(query=in_memory_order(inputs.query, 0, 2, 1, 3))).values())
        pairs = compiled(*leaves), layer(*leaves)
        # Floats that the caller leaves at their default may take torch.compile two attempts at the first graph.
        counts.add(counter.frame_count)
        found, expected = ((*pair, *torch.autograd.grad(pair, leaves, (inputs.d_out, inputs.d_lse))) for pair in pairs)
        assert all(map(torch.equal, found, expected))
    assert len(counts) == 1, "other lengths were compiled again"


EVERYTHING: Options = {"dropout_p": 0.3, "softcap": 4.0, "window_size": (5, 6), "enable_gqa": True, "rel_scale": 0.3}
PADDED: Options = {"attn_mask": torch.arange(13) != 4, "query_offset": torch.tensor([2]), "key_lengths": torch.tensor([12])}


@pytest.mark.parametrize("kind", ["padded", "packed", "grid_dropout"])
def test_compiles_with_everything(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph, forward and backward, with every tensor; dropout draws from the generator as it does uncompiled."""
    options = {**EVERYTHING, **(PACKING if kind == "packed" else PADDED)}
    monkeypatch.setitem(CASES, kind, case(1, **ALL_TERMS, value_width=5, key_heads=2, dtype=torch.float64, options=options))
    function, leaves, _, options = get_call(kind)

    def layer(tensors: dict[str, torch.Tensor]) -> Any:
        return function(**tensors, **options)

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(0)
        found = run(leaves)
        seen = [result[result != -torch.inf] for result in found]
        assert all(result.numel() for result in seen)
        loss = torch.cat([result.square() for result in seen]).sum()
        results.append([*found, *gradients(loss, list(leaves.values()))])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_compiles_where_nothing_requires_a_gradient(guard: Any) -> None:
    """Positions that a window covers do not read the values of query_offset."""
    tensors = [each.detach() for each in four(5, 6)]
    options: Options = {"positions": RelativePositions(-4, 4, "error"), "query_offset": torch.tensor([1, 0])}
    layer = partial(attend, **options, window_size=(4, 4))
    with guard():
        assert all(map(torch.equal, torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors), layer(*tensors)))


def test_compiles_once_for_numbers_that_follow_from_lengths() -> None:
    """query_offset, window_size and max_seqlen of symbolic shapes: no message shows them, which would fix their values."""

    def layer(query: torch.Tensor, key: torch.Tensor) -> Any:
        offset, length = key.shape[2] - query.shape[2], key.shape[2]
        out = attend_out(query, key, key, is_causal=True, query_offset=offset, window_size=(offset + 3, -1))
        packed, starts = key[0].transpose(0, 1), torch.stack((torch.zeros(()), torch.tensor(length))).int()
        packing: Options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
        return out, fused_relative_attention_varlen(packed, packed, packed, **packing)

    counter = Compiled("eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ((5, 9), (6, 13), (8, 33)):
        query, key = (torch.randn(1, 2, each, 8) for each in lengths)
        assert all(map(torch.equal, compiled(query, key), layer(query, key)))
    assert counter.frame_count == 1


def attend_values(query: torch.Tensor, starts: torch.Tensor) -> Any:
    """A packed and a padded call with numbers that the program reads from a tensor."""
    lengths, padded = starts.diff(), query.transpose(0, 1)[None]
    longest, packing = lengths.max().item(), {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed = attend_varlen(query, query, query, **packing, max_seqlen_q=longest, max_seqlen_k=longest)[0]
    return packed, attend(padded, padded, padded, window_size=(longest, -1), query_offset=lengths[0].item())[0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiles_once_for_numbers_from_tensors(backend: str) -> None:
    """fullgraph, and checked when it runs."""
    query, counter = torch.randn(12, 2, 8, dtype=torch.float64), Compiled(backend)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(attend_values, fullgraph=True, backend=counter)
        for first in (5, 4, 12):
            starts = torch.tensor([0, first, 12])
            for one, other in zip(compiled(query, starts), attend_values(query, starts), strict=True):
                assert_same("out", one, other)
        assert counter.frame_count == 1
        with pytest.raises(RuntimeError, match="u0"):
            compiled(query, torch.tensor([0, -1, -2]))


def test_a_doubtful_step_compiles_as_any_other() -> None:
    """One graph for a causal call without query_offset, which no warning breaks, and the same result as with an offset of 0."""
    forget_warnings()
    tensors, counter = [each.detach() for each in four(4, 20)], Compiled("eager")
    compiled = torch.compile(attend_out, backend=counter, fullgraph=True)
    for _ in range(2):
        assert_same("default", compiled(*tensors, is_causal=True), attend_out(*tensors, is_causal=True, query_offset=0))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [pytest.param(each, marks=() if each == "shaw" else pytest.mark.thorough) for each in MODULES])
def test_modules_compile_once_for_all_lengths(kind: str) -> None:
    """One graph each for the first length and for all others; gradients of all parameters."""
    model, counter = Model(kind), Compiled("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (10, 17, 33):
        x = torch.randn(2, length, 16)
        outputs = compiled(x), model(x)
        assert_near("output", *outputs)
        assert_gradients_near(*(gradients(each.sum(), model) for each in outputs))
    assert counter.frame_count <= 2


@pytest.mark.thorough
def test_a_training_step_by_inductor() -> None:
    model, x = Model(), torch.randn(2, 10, 16)
    compiled = torch.compile(model, backend="inductor", fullgraph=True)
    assert_gradients_near(*(gradients(each(x).sum(), model) for each in (compiled, model)))


def test_compiles_under_autocast() -> None:
    """The same bits as without compilation, forward and backward."""
    tensors = four(dtype=torch.float32)

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend_out(*tensors, is_causal=True)

    results = [run(*tensors) for run in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer)]
    assert results[0].dtype == torch.bfloat16 and torch.equal(*results)
    assert all(map(torch.equal, *(gradients(each.sum(), tensors) for each in results)))


@pytest.mark.parametrize(
    ("kind", "strict"), [("shaw", False), ("shaw", True), ("transformer_xl", False), ("t5", False), ("alibi", False)]
)
def test_export(kind: str, strict: bool) -> None:
    """One program for all batch sizes and lengths, in which the operator is one node."""
    model = Model(kind).eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    program = torch.export.export(model, (torch.randn(2, 10, 16),), dynamic_shapes=({**dims},), strict=strict)
    assert [node.target for node in program.graph.nodes].count(FORWARD) == 1
    for batch, length in ((2, 10), (3, 17), (1, 40)):
        x = torch.randn(batch, length, 16)
        assert_near("module", program.module()(x), model(x))


class AttendValues(nn.Module):
    def forward(self, query: torch.Tensor, starts: torch.Tensor) -> Any:
        return attend_values(query, starts)


def test_exports_with_numbers_from_tensors() -> None:
    query = torch.randn(12, 2, 8, dtype=torch.float64)
    program = torch.export.export(AttendValues(), (query, torch.tensor([0, 5, 12])))
    starts = torch.tensor([0, 2, 12])
    for one, other in zip(program.module()(query, starts), attend_values(query, starts), strict=True):
        assert_same("out", one, other)


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """torch.export to AOTInductor: one package for all lengths."""
    model, length = Model().eval(), torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(1, 40, 16),), dynamic_shapes=({1: length},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for size in (40, 129):
            x = torch.randn(1, size, 16)
            assert_near("the compiled program", compiled(x), model(x))


def test_traced_calls_are_refused() -> None:
    """torch.jit.trace would give the positions of the traced length to every other, and only warn."""
    with pytest.raises(NotImplementedError, match="would keep the positions of this call"):
        torch.jit.trace(lambda x: attend_out(x, x, x, torch.randn(19, 16)), torch.randn(1, 2, 10, 16))
    with pytest.raises(NotImplementedError, match=r"disable\(model\)"):
        torch.jit.trace(Model(), torch.randn(2, 10, 16))


# Autocast, checkpointing, FLOPs.


@pytest.mark.parametrize("outside", [False, True], ids=["backward_within", "backward_outside"])
def test_autocast_casts_as_for_sdpa(outside: bool) -> None:
    """float32 tensors become bfloat16 and gradients come back in float32; float64 stays; a bias by distance stays float32."""
    tensors, bias, starts = four(dtype=torch.float32), torch.randn(9, requires_grad=True), torch.tensor([0, 10])
    packing: Options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 10, "max_seqlen_k": 10}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend_out(*tensors, rel_bias=bias)
        packed: Any = [tensor[0].transpose(0, 1) for tensor in tensors[:3]]
        packed_out = attend_varlen(*packed, tensors[3], rel_bias=bias, **packing, implementation=None)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            found = gradients(out.sum(), (*tensors, bias))
        half = [tensor.detach().half() for tensor in tensors]
        assert attend_out(*half, rel_bias=bias.half(), attn_mask=torch.zeros(10, dtype=torch.float16)).dtype == torch.bfloat16
        assert attend_out(*four()).dtype == torch.float64
        on_grid = attend_grid(**grid_leaves(), **GRID)[0]
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    expected = attend_out(*low, rel_bias=bias)
    assert out.dtype == on_grid.dtype == torch.bfloat16
    assert torch.equal(out, expected) and torch.equal(packed_out.transpose(0, 1), expected[0])
    for gradient, other in zip(found, gradients(expected.sum(), (*low, bias)), strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_autocast_does_not_change_the_precision(implementation: str) -> None:
    """Scores and sums, forward and backward, with every term: inputs that are in autocast's dtype give the same bits."""
    inputs = make_inputs(1, 4, 9, 13, 8, 5, num_rows=7, key_heads=2, dtype=torch.bfloat16, seed=0, **ALL_TERMS)
    results = []
    for enabled in (False, True):
        leaves = make_leaves(inputs)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pair = attend(**leaves, softcap=4.0, enable_gqa=True, implementation=implementation)
            results.append((*pair, *torch.autograd.grad(pair, list(leaves.values()), (inputs.d_out, inputs.d_lse))))
    assert all(map(torch.equal, *results))


def save_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["reentrant", "not_reentrant", "selective"])
def test_activation_checkpointing(kind: str, dropout_p: float) -> None:
    """The same results and gradients, dropout included; a selective policy that saves the operator does not run it again."""

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        return attend_out(*(tensor.sin() for tensor in tensors), dropout_p=dropout_p).cos()

    options: Options = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, save_attention)
    results = []
    for run in (block, partial(checkpoint, block, **options)):
        torch.manual_seed(1)
        tensors = four()
        with Recorded() as recorded:
            out = run(*tensors)
            out.square().sum().backward()
        results.append([out, *(tensor.grad for tensor in tensors)])
    assert [function for function, _ in recorded.calls].count(FORWARD) == (1 if kind == "selective" else 2)
    assert all(map(torch.equal, *results))


def flops(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops())


def test_flop_counter() -> None:
    """As torch counts scaled_dot_product_attention, and a table's products: one forward, three backward."""
    query, key, value, table = four(10, 14)
    product, query_pairs, key_pairs = (2 * 2 * 2 * pairs * 8 for pairs in (10 * 14, 10 * 9, 14 * 9))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        sdpa = nn.functional.scaled_dot_product_attention
        assert flops(lambda: sdpa(query, key, value).sum().backward()) == 6 * product
    assert flops(lambda: attend_out(query, key, value).sum().backward()) == 7 * product
    assert flops(lambda: attend_out(query, key, value, table)) == 2 * product + query_pairs
    assert flops(lambda: attend_out(query, key, value, table).sum().backward()) == 7 * product + 4 * query_pairs
    assert flops(lambda: attend_out(query, key, value, rel_p2c=table).sum().backward()) == 7 * product + 4 * key_pairs
    wide, value_table, wider = torch.randn(2, 2, 14, 20).double(), torch.randn(9, 20).double(), product * 20 // 8
    assert flops(lambda: attend_out(query, key, wide, rel_value=value_table)) == product + wider + query_pairs * 20 // 8
    packed, starts = torch.randn(12, 2, 8), torch.tensor([0, 4, 8, 12])
    packing: Options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    assert flops(lambda: attend_varlen(packed, packed, packed, **packing)) == 2 * 2 * 2 * 12 * 4 * 8
    on_grid, table_products = 2 * 2 * 3 * 13 * 13 * 6, 2 * 2 * 3 * 13 * (4 + 3) * 6
    assert flops(lambda: attend_grid(**grid_leaves(), **GRID)[0].sum().backward()) == 7 * on_grid + 4 * table_products


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["", "torch.utils.flop_counter", "exported"])
def test_flop_counter_whatever_is_imported_first(first: str, tmp_path: Path) -> None:
    """The first call is counted, also that of an exported program, and our import alone brings in nothing heavy."""
    text = "import sys, torch, triton_relattn, triton_relattn.integrations.enable\n"
    text += "run = triton_relattn.fused_relative_attention\n"
    if first == "exported":

        class Attend(nn.Module):
            def forward(self, query: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
                return attend_out(query, query, query)

        torch.export.save(torch.export.export(Attend(), (torch.zeros(1, 1, 4, 8),) * 3), tmp_path / "attend.pt2")
        text += f"run = torch.export.load({str(tmp_path / 'attend.pt2')!r}).module()\n"
    elif first:
        text = f"import {first}\n{text}"
    else:
        text += 'heavy = {"torch.utils.flop_counter", "triton", "torch._dynamo", "torch.distributed.tensor"}\n'
        text += "assert not sys.modules.keys() & heavy\n"
    text += """
from torch.utils.flop_counter import FlopCounterMode
query = torch.zeros(1, 1, 4, 8)
for mode in (torch.no_grad, torch.inference_mode):
    with mode(), FlopCounterMode(display=False) as counter:
        run(query, query, query)
    assert counter.get_total_flops() == 4 * 4 * 4 * 8, counter.get_total_flops()
"""
    subprocess.run([sys.executable, "-c", text], check=True)


# Jagged nested tensors.


def jagged(width: int, seed: int, lengths: tuple[int, ...] = (5, 9, 1)) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A nested tensor (B, H, N, D), and its sequences (H, N, D), as leaves."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(each, 2, width, generator=generator, dtype=torch.float64).requires_grad_() for each in lengths]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2), parts


@pytest.mark.parametrize("causal", [False, True])
def test_nested_sequences_are_computed_one_by_one(causal: bool) -> None:
    """out, lse and all gradients."""
    table = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    (query, queries), (key, keys), (value, values) = jagged(8, 1), jagged(8, 2), jagged(6, 3)
    leaves, options = [*queries, *keys, *values, table], {"is_causal": causal, "positions": RelativePositions(-4, 4)}
    out, lse = fused_relative_attention(query, key, value, table, return_lse=True, **options)  # type: ignore[call-overload]
    assert out.is_nested and out.shape[0] == 3 and out.shape[3] == 6
    found = gradients(torch.cat([each.flatten() for each in out.transpose(1, 2).unbind()]).square().sum(), leaves)
    total = torch.zeros((), dtype=torch.float64)
    for number, parts in enumerate(zip(queries, keys, values, strict=True)):
        expected, expected_lse = attend(*(each.transpose(0, 1)[None] for each in parts), table, **options)
        assert_near("out", out.transpose(1, 2).unbind()[number], expected[0].transpose(0, 1))
        assert_near("lse", lse.transpose(1, 2).unbind()[number], expected_lse[0].T)
        total = total + expected.square().sum()
    assert_gradients_near(found, gradients(total, leaves))


def test_nested_tensors_that_are_refused() -> None:
    """Some that are not nested, lengths that differ by tensor, and holes between sequences: rows of others would be taken."""
    (query, _), (other, _), (same, _) = jagged(8, 1), jagged(8, 2, (9, 5, 1)), jagged(8, 3)
    table, plain = torch.randn(9, 8, dtype=torch.float64), torch.randn(3, 2, 9, 8, dtype=torch.float64)
    fused_relative_attention(query, query, same, table, rel_query=same)
    cache, lengths = torch.randn(2, 6, 2, 8, dtype=torch.float64), torch.tensor([3, 6])
    holes = torch.nested.narrow(cache, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    wrong: list[tuple[Sequence[torch.Tensor], Options, type[Exception], str]] = [
        ((query, plain, query), {}, TypeError, "key must be jagged as query is"),
        ((query.transpose(1, 2), query, query), {}, TypeError, "query must be jagged as query is"),
        ((query, query, query), {"key_lengths": torch.tensor([1, 1, 1])}, TypeError, "no attn_mask and no key_lengths"),
        ((query, query, other), {}, ValueError, r"value's sequences must be as long as key's, got \[9, 5, 1\] and \[5, 9, 1\]"),
        ((query, query, query), {"rel_query": other}, ValueError, "rel_query's sequences must be as long as query's"),
        ((holes.transpose(1, 2), query, query), {}, ValueError, "query has holes between its sequences"),
    ]
    for tensors, options, error, message in wrong:
        with pytest.raises(error, match=message):
            attend_out(*tensors, table, **options)

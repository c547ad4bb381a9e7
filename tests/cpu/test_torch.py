"""At home in torch: operators, derivatives, torch.func, autocast, checkpointing, FLOPs, nested tensors, and bits that repeat."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from tests.check import WAYS, Way, attend, attend_varlen, check, environment, public_function
from tests.check import run as run_sample
from tests.conftest import cut_blocks
from tests.cpu.small_call import KINDS, LENGTH, WIDTH, attend_out, four, module
from tests.draws import explore, samples
from tests.expected import INPUTS, TABLES
from tests.samples import Sample
from tests.tolerance import assert_near, assert_same
from triton_relattn import RelativePositions, decomposed_relative_attention, merge_attention
from triton_relattn.testing import Inputs, make_inputs

FORWARD = torch.ops.triton_relattn.attention_forward.default
Options = dict[str, Any]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def make_leaves(inputs: Inputs) -> dict[str, Any]:
    tensors = {name: getattr(inputs, name) for name in INPUTS}
    return {name: tensor.detach().requires_grad_() for name, tensor in tensors.items() if tensor is not None}


ALL_TERMS: Options = {"rel_width": 3, "rel_value": True, "rel_bias": True, "rel_p2c": True}
SIZES: Options = {"batch": 2, "key_heads": 4, "num_queries": 9, "num_keys": 13, "width": 8, "value_width": 8}
BASE = Sample(**SIZES, tables=TABLES[:1], positions=(-4, 4, "clamp"))
ALL = replace(BASE, tables=TABLES, rel_width=3)
CASES = {
    "odd": replace(BASE, num_queries=17, num_keys=23, dtype="float64", key_lengths=(23, 11), is_causal=True),
    "strided": replace(BASE, value_width=4, strided=INPUTS, key_lengths=(13, 0), integers="int32"),
    "bfloat16": replace(BASE, dtype="bfloat16", query_offset=1),  # a causal call stores probabilities that are never written
    "all_terms": replace(ALL, rel_scale=0.7, softcap=3.0, window_size=(5, 6)),
    "all_strided": replace(ALL, strided=INPUTS, per_head=TABLES, value_width=4, query_offset=(2, -1)),
    "value_table_alone": replace(BASE, tables=("rel_value",), dropout_p=0.3),
    "mask": replace(BASE, mask="bool", mask_shape=(4, 1, 13)),
    "packed": replace(ALL, sequences=((3, 4), (0, 1), (6, 8)), key_heads=2, group=2, dropout_p=0.4, query_offset=(1, 0, 2)),
}
GRID: Options = {"grid": (4, 3), "implementation": "blockwise"}


def attend_grid(**arguments: Any) -> tuple[torch.Tensor]:
    out: Any = decomposed_relative_attention(**arguments)
    return (out,)


def grid_leaves(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Tensors of a call on a grid with a class token, stored in another memory order than the call's."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 13, 3, 6, dtype=dtype, generator=generator).transpose(1, 2) for _ in range(3))
    rel_pos_h, rel_pos_w = (torch.randn(rows, 6, dtype=dtype, generator=generator) for rows in (7, 5))
    leaves = {"query": query, "key": key, "value": value, "rel_pos_h": rel_pos_h, "rel_pos_w": rel_pos_w}
    return {name: leaf.requires_grad_() for name, leaf in leaves.items()}


def get_call(name: str) -> tuple[Callable[..., Any], dict[str, torch.Tensor], tuple[torch.Tensor, ...], Options]:
    """A case as its function, leaves, gradients of its results, and other arguments."""
    if name.startswith("grid"):
        leaves = grid_leaves()
        return attend_grid, leaves, (torch.randn(2, 3, 13, 6),), GRID | {"dropout_p": 0.3 if name == "grid_dropout" else 0.0}
    (inputs, options), function = CASES[name].inputs(), partial(public_function(CASES[name]), return_lse=True)
    return partial(function, implementation="blockwise"), make_leaves(inputs), (inputs.d_out, inputs.d_lse), options


class Recorded(TorchDispatchMode):
    """The calls of this package's operators within the context: their arguments, detached."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "triton_relattn":
            self.calls.append((function, tuple(arg.detach() if isinstance(arg, torch.Tensor) else arg for arg in args)))
        return function(*args, **(kwargs or {}))


# Operators and their derivatives, over a sequence and on a grid.


QUICK = ("all_terms", "packed", "grid")


@pytest.mark.parametrize("wanted", ["all", "some"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.thorough) for name in (*CASES, "grid", "grid_dropout")]
)
def test_operators_are_well_registered(name: str, wanted: str) -> None:
    """Schemas, fake tensors with the real shapes and strides, autograd and compilation pass torch's checks."""
    function, leaves, d_results, options = get_call(name)
    if wanted == "some":
        leaves = {leaf_name: leaf if number % 2 else leaf.detach() for number, (leaf_name, leaf) in enumerate(leaves.items())}
    with Recorded() as recorded:
        results = function(**leaves, **options)
        torch.autograd.grad(results, [leaf for leaf in leaves.values() if leaf.requires_grad], d_results)
    (forward, forward_arguments), (backward, backward_arguments) = recorded.calls
    assert [str(operator).rsplit("_")[-1] for operator in (forward, backward)] == ["forward.default", "backward.default"]
    torch.library.opcheck(forward, forward_arguments)
    for argument, value in zip(forward._schema.arguments, forward_arguments, strict=True):
        if isinstance(value, torch.Tensor) and argument.name in (*INPUTS, "rel_h", "rel_w"):
            value.requires_grad_()
    torch.library.opcheck(forward, forward_arguments)
    torch.library.opcheck(backward, backward_arguments)


def test_gradients_are_those_of_differences() -> None:
    """Gradients pass torch's gradcheck; the reference, which errors recommend for these, also passes in forward mode and
    twice."""
    inputs = make_inputs(1, 2, 3, 4, 2, num_rows=3, dtype=torch.float64, seed=0, **{**ALL_TERMS, "rel_width": 1})
    for function, leaves, options in (
        (attend, make_leaves(inputs), {"softcap": 3.0}),
        (attend_grid, grid_leaves(torch.float64), {"grid": (4, 3)}),
    ):
        names, tensors = tuple(leaves), tuple(leaves.values())

        def run(implementation: str, *tensors: torch.Tensor, call: Any = (function, names, options)) -> Any:
            function, names, options = call
            return function(**dict(zip(names, tensors, strict=True)), **options, implementation=implementation)

        blockwise, reference = (partial(run, implementation) for implementation in ("blockwise", "reference"))
        assert torch.autograd.gradcheck(blockwise, tensors, fast_mode=True)
        assert torch.autograd.gradcheck(reference, tensors, fast_mode=True, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(reference, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["odd", "grid"])
def test_second_derivatives_are_refused(name: str) -> None:
    """With create_graph=True first derivatives are right; second derivatives raise instead of dropping terms."""
    function, leaves, d_results, options = get_call(name)
    first = torch.autograd.grad(function(**leaves, **options), list(leaves.values()), d_results)
    found = torch.autograd.grad(function(**leaves, **options), list(leaves.values()), d_results, create_graph=True)
    assert all(map(torch.equal, first, found))
    for leaf in leaves.values():
        with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
            torch.autograd.grad(found[0].square().sum(), leaf, retain_graph=True)


# torch.func, and forward mode.

QUERY, KEY, VALUE, TABLE = (tensor.detach() for tensor in four())


def table_loss(table: torch.Tensor) -> torch.Tensor:
    """A loss that depends on a table."""
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


COMPILED = [("grid", None), ("sequence", None), ("sequence", "aot_eager")]


@pytest.mark.parametrize(("kind", "backend"), [*COMPILED, pytest.param("sequence", "inductor", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func(name: str, kind: str, backend: str | None) -> None:
    """Uncompiled and in one graph; an outer transform is applied through an inner one."""
    loss, table = LOSSES[kind]
    leaf = table.clone().requires_grad_()
    transformed = partial(TRANSFORMED[name], loss)
    run = transformed if backend is None else torch.compile(transformed, backend=backend, fullgraph=True)
    assert_same(name, run(table), torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
def test_second_derivatives_under_torch_func(compiled: bool) -> None:
    """Second derivatives raise an explanation, also if the gradient is only a part of the loss."""
    gradient = torch.func.grad(lambda table: table_loss(table) + backward_of_vjp(table_loss, table).square().sum())
    run = torch.compile(gradient, backend="aot_eager", fullgraph=True) if compiled else gradient
    with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
        run(TABLE)


MANY, MANY_TABLES = (torch.stack([tensor, -tensor, 2 * tensor]) for tensor in (QUERY, TABLE))
INTEGERS = torch.tensor([[10, 4], [7, 1], [0, 9]])
VMAPPED: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "query": (lambda query: attend_out(query, KEY, VALUE, TABLE), [MANY]),
    "query and table": (lambda query, table: attend_out(query, KEY, VALUE, table), [MANY, MANY_TABLES]),
    "gradients per sample": (lambda q: torch.func.grad(lambda e: attend_out(q, KEY, VALUE, e).square().sum())(TABLE), [MANY]),
    "key_lengths": (lambda lengths: attend_out(QUERY, KEY, VALUE, TABLE, key_lengths=lengths), [INTEGERS]),
    "query_offset": (lambda offsets: attend_out(QUERY, KEY, VALUE, TABLE, query_offset=offsets), [INTEGERS]),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_vmap(name: str) -> None:
    function, batches = VMAPPED[name]
    one_by_one = torch.stack([function(*tensors) for tensors in zip(*batches, strict=True)])
    assert_same(name, torch.func.vmap(function)(*batches), one_by_one)
    assert_same(name, torch.func.vmap(function, in_dims=1)(*(batch.transpose(0, 1) for batch in batches)), one_by_one)
    with pytest.raises(ValueError, match="size 0"):
        torch.func.vmap(function)(*(batch[:0] for batch in batches))


def test_gradients_through_vmap() -> None:
    function, tables = VMAPPED["query and table"][0], MANY_TABLES.clone().requires_grad_()
    ways = torch.func.vmap(partial(function, QUERY))(tables), torch.stack([function(QUERY, table) for table in tables])
    assert_same("table", *(torch.autograd.grad(out.square().sum(), tables)[0] for out in ways))


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_dropout_under_vmap(implementation: str) -> None:
    """randomness decides whether all samples drop the same elements."""
    many = QUERY.expand(3, *QUERY.shape)
    run = partial(torch.func.vmap, lambda q: attend_out(q, KEY, VALUE, TABLE, dropout_p=0.5, implementation=implementation))
    different, same = run(randomness="different")(many), run(randomness="same")(many)
    assert not torch.equal(different[0], different[1]) and torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        run(randomness="error")(many)


def test_no_forward_mode_goes_unnoticed() -> None:
    """Tangents that the operator would drop raise an error: for any tensor, through vmap, and in a backward."""
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


# Autocast, checkpointing, FLOPs.

PACKING: Options = {f"cu_seqlens_{which}": torch.tensor([0, 10]) for which in "qk"} | {"max_seqlen_q": 10, "max_seqlen_k": 10}


@pytest.mark.parametrize("outside", [False, True], ids=["backward_within", "backward_outside"])
def test_autocast_casts_as_for_sdpa(outside: bool) -> None:
    """float32 tensors become bfloat16 and their gradients float32; float64, a bias by distance in float32 and bool masks stay as
    they are."""
    tensors, bias, mask = four(dtype=torch.float32), torch.randn(9, requires_grad=True), torch.arange(10) < 7
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, masked = attend_out(*tensors, rel_bias=bias), attend_out(*tensors, rel_bias=bias, attn_mask=mask)
        packed: Any = [tensor[0].transpose(0, 1) for tensor in tensors[:3]]
        packed_out = attend_varlen(*packed, tensors[3], rel_bias=bias, **PACKING, implementation=None)[0]
        with torch.autocast("cpu", torch.bfloat16, enabled=not outside):
            found = torch.autograd.grad(out.sum(), (*tensors, bias))
        half = [tensor.detach().half() for tensor in tensors]
        assert attend_out(*half, rel_bias=bias.half(), attn_mask=torch.zeros(10, dtype=torch.float16)).dtype == torch.bfloat16
        assert attend_out(*four()).dtype == torch.float64
        assert attend_grid(**grid_leaves(), **GRID)[0].dtype == torch.bfloat16
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    expected = attend_out(*low, rel_bias=bias)
    assert torch.equal(out, expected) and torch.equal(packed_out.transpose(0, 1), expected[0])
    assert torch.equal(masked, attend_out(*low, rel_bias=bias, attn_mask=mask))
    for gradient, other in zip(found, torch.autograd.grad(expected.sum(), (*low, bias)), strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())


@pytest.mark.parametrize("name", ["rel_key", "rel_query", "rel_value", "rel_p2c", "rel_bias"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_autocast_casts_every_table(name: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Whichever of a table and the other tensors is in float32, the call is that in bfloat16; a bias stays as it is."""
    torch.manual_seed(0)
    given = {part: torch.randn(1, 2, 10, 16, dtype=dtypes[0]) for part in ("query", "key", "value")}
    for table in ("rel_query", "rel_key") if name == "rel_query" else (name,):
        shape = {"rel_query": (1, 2, 10, 16), "rel_bias": (19,)}.get(table, (19, 16))
        given[table] = torch.randn(shape, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16):
        found = attend_out(**given)
    low = {part: tensor if part == "rel_bias" else tensor.bfloat16() for part, tensor in given.items()}
    assert torch.equal(found, attend_out(**low))


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_autocast_does_not_change_the_precision(implementation: str) -> None:
    """Inputs already in autocast's dtype give the same bits with and without autocast, forward and backward, for every term."""
    sample, results = replace(ALL, key_heads=2, group=2, value_width=5, dtype="bfloat16", softcap=4.0), []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            results.append(run_sample(sample, {**sample.call(), "implementation": implementation}))
    for name, result in results[0].items():
        assert result is not None and torch.equal(result, results[1][name]), name  # type: ignore[arg-type]


def save_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["reentrant", "not_reentrant", "selective"])
def test_activation_checkpointing(kind: str, dropout_p: float) -> None:
    """Checkpointing gives the same results and gradients with dropout; a selective policy that saves the operator does not rerun
    it."""

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
    """FLOPs are counted as for scaled_dot_product_attention, plus table products: one forward, three backward."""
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
    packed = torch.randn(10, 2, 8)
    assert flops(lambda: attend_varlen(packed, packed, packed, **PACKING)) == 2 * 2 * 2 * 10 * 10 * 8
    on_grid, table_products = 2 * 2 * 3 * 13 * 13 * 6, 2 * 2 * 3 * 13 * (4 + 3) * 6
    assert flops(lambda: attend_grid(**grid_leaves(), **GRID)[0].sum().backward()) == 7 * on_grid + 4 * table_products


@pytest.mark.thorough
@pytest.mark.parametrize("first", ["", "torch.utils.flop_counter", "exported"])
def test_flop_counter_whatever_is_imported_first(first: str, tmp_path: Path) -> None:
    """The first call is counted, also that of an exported program; importing the package alone imports no heavy modules."""
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


# Jagged nested tensors: each sequence as if it were alone, and errors instead of other sequences' rows.


def jagged(width: int, seed: int, lengths: tuple[int, ...] = (5, 9, 1)) -> tuple[Any, list[torch.Tensor]]:
    """A nested tensor (B, H, N, D), and its sequences (H, N, D), as leaves."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(length, 2, width, generator=generator, dtype=torch.float64).requires_grad_() for length in lengths]
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2), parts


@pytest.mark.parametrize("causal", [False, True])
def test_nested_sequences_are_computed_one_by_one(causal: bool) -> None:
    """out, lse and all gradients equal those of separate calls."""
    table = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    (query, queries), (key, keys), (value, values) = jagged(8, 1), jagged(8, 2), jagged(6, 3)
    leaves, options = [*queries, *keys, *values, table], {"is_causal": causal, "positions": RelativePositions(-4, 4)}
    out, lse = attend(query, key, value, table, implementation=None, **options)
    assert out.is_nested and out.shape[0] == 3 and out.shape[3] == 6
    loss = torch.cat([sequence.flatten() for sequence in out.transpose(1, 2).unbind()]).square().sum()
    expected_loss = torch.zeros((), dtype=torch.float64)
    for number, parts in enumerate(zip(queries, keys, values, strict=True)):
        expected, expected_lse = attend(*(sequence.transpose(0, 1)[None] for sequence in parts), table, **options)
        assert_near("out", out.transpose(1, 2).unbind()[number], expected[0].transpose(0, 1))
        assert_near("lse", lse.transpose(1, 2).unbind()[number], expected_lse[0].T)
        expected_loss = expected_loss + expected.square().sum()
    for found, exact in zip(*(torch.autograd.grad(total, leaves) for total in (loss, expected_loss)), strict=True):
        assert_near("gradient", found, exact)


def test_nested_tensors_that_are_refused() -> None:
    """Inputs that are not all nested, lengths that differ between tensors, and gaps between sequences, which would read other
    rows."""
    (query, _), (other, _), (same, _) = jagged(8, 1), jagged(8, 2, (9, 5, 1)), jagged(8, 3)
    table, plain = torch.randn(9, 8, dtype=torch.float64), torch.randn(3, 2, 9, 8, dtype=torch.float64)
    attend_out(query, query, same, table, rel_query=same)
    cache, lengths = torch.randn(2, 6, 2, 8, dtype=torch.float64), torch.tensor([3, 6])
    holes = torch.nested.narrow(cache, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    wrong: list[tuple[Sequence[torch.Tensor], dict[str, Any], type[Exception], str]] = [
        ((query, plain, query), {}, TypeError, "key must be jagged as query is"),
        ((query.transpose(1, 2), query, query), {}, TypeError, "query must be jagged as query is"),
        ((query, query, query), {"key_lengths": torch.tensor([1, 1, 1])}, TypeError, "no attn_mask and no key_lengths"),
        ((query, query, other), {}, ValueError, r"value's sequences must be as long as key's, got \[9, 5, 1\] and \[5, 9, 1\]"),
        ((query, query, query), {"rel_query": other}, ValueError, "rel_query's sequences must be as long as query's"),
        ((holes.transpose(1, 2), query, query), {}, ValueError, "query has holes between its sequences"),
    ]
    for tensors, options, error, message in wrong:
        with pytest.raises(error, match=message):
            attend(*tensors, table, implementation=None, **options)


# The same call twice gives the same bits, and nothing is refused where torch is asked for repeatable results.

RAISES_ON_A_GPU = set(
    "avg_pool3d_backward adaptive_avg_pool2d_backward bincount cummax cummin cumprod cumsum grid_sampler_2d_backward histc "
    "kthvalue max_unpool2d median nanmedian nll_loss2d_forward put_ put replication_pad1d_backward upsample_bilinear2d_backward "
    "mode upsample_linear1d_backward scatter_reduce _cdist_backward _ctc_loss_backward _embedding_bag "
    "reflection_pad1d_backward".split()
)
"""Torch operators that torch.use_deterministic_algorithms(True) refuses on a GPU for some arguments."""
ADDS_IN_ANY_ORDER = set(
    "index_add index_add_ scatter_add scatter_add_ index_put index_put_ _index_put_impl_ embedding_dense_backward "
    "gather_backward scatter_reduce_ index_reduce index_reduce_".split()
)
"""Torch operators whose order of additions on a GPU differs from run to run, unless determinism is requested."""


@contextmanager
def deterministic() -> Iterator[None]:
    """torch.use_deterministic_algorithms(True), which also fills what torch.empty makes with NaN."""
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]  # torch's default
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def in_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


HIDDEN: Options = {"mask": "bool", "mask_shape": (2, 1, 70, 83), "key_lengths": (83, 60), "window_size": (40, 50)}
EVERYTHING = replace(ALL, **HIDDEN, num_queries=70, num_keys=83, key_heads=2, group=2, per_head=TABLES, query_offset=(3, -2))
EVERYTHING = replace(EVERYTHING, dropout_p=0.3, softcap=5.0)
FULL_TABLES = replace(BASE, num_queries=150, num_keys=160, width=32, tables=TABLES, positions=(-149, 159, "clamp"))
REPEATED = [replace(EVERYTHING, dtype=dtype) for dtype in ("float64", "float32", "bfloat16")]


IN_THREADS = [(way, count) for way in WAYS for count in ((1,) if way.small else (2, 3))]


@pytest.mark.parametrize(
    ("way", "threads"), [pytest.param(*run, marks=pytest.mark.thorough if 3 in run else ()) for run in IN_THREADS], ids=str
)
@pytest.mark.parametrize("sample", [*REPEATED, FULL_TABLES], ids=["float64", "float32", "bfloat16", "full_tables"])
def test_results_repeat(way: Way, sample: Sample, threads: int) -> None:
    """All features at once, for each number of threads, also with deterministic algorithms only, which fill new memory with NaN.
    (Different numbers may differ: blockwise then takes larger blocks, whose sums round differently.)"""
    results = []
    for context in (nullcontext, nullcontext, deterministic):
        with in_threads(threads), environment(sample, way), context():
            results.append(run_sample(sample, {**sample.call(), "implementation": way.implementation}))
    for name, result in results[0].items():
        assert result is not None and (result.count_nonzero() or name == "lse"), f"{name} is all zeros"
        assert all(torch.equal(result, other[name]) for other in results), f"{name} differs"  # type: ignore[arg-type]
    if sample.dtype == "float64":
        with in_threads(threads):
            check(sample, way)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_another_number_of_threads_in_the_backward(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward's blocks then differ, and see other keys, from those in which the forward kept probabilities."""
    cut_blocks(monkeypatch, 16, 1 << 12, 1 << 20)
    inputs = make_inputs(2, 2, 64, 64, 32, num_rows=127, dtype=torch.float64, seed=3)
    leaves = [tensor.requires_grad_() for tensor in inputs[:4] if tensor is not None]
    gradients = []
    for threads in (before, after):
        with in_threads(before):
            out = attend_out(*leaves, window_size=(20, 5))
        with in_threads(threads):
            gradients.append(torch.autograd.grad(out, leaves, inputs.d_out))
    for ours, expected in zip(*gradients, strict=True):
        assert_near("ours", ours, expected)


def module_results(kind: str) -> dict[str, torch.Tensor]:
    """A module's output and the gradients of its parameters and input, with dropout, padding and a mask."""
    layer, x = (
        module(kind, dropout=0.2, dtype=torch.float32),
        torch.arange(2.0 * LENGTH * WIDTH).view(2, LENGTH, WIDTH).sin().requires_grad_(),
    )
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    out, _ = layer(x, x, x, key_lengths=torch.tensor([LENGTH, 6]), attn_mask=mask)
    out.square().sum().backward()
    grads = {name: value.grad for name, value in (("x", x), *layer.named_parameters()) if value.grad is not None}
    return {"out": out.detach(), **grads}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_repeat(kind: str) -> None:
    results = [module_results(kind), module_results(kind)]
    with deterministic():
        results.append(module_results(kind))
    for name, result in results[0].items():
        assert result.any() and all(torch.equal(result, other[name]) for other in results), name


def called(run: Callable[[], Any]) -> set[str]:
    """The names of the torch operators that are called, including those inside the package's operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    return {event.name.removeprefix("aten::") for event in profile.events() if event.name.startswith("aten::")}


def merged() -> None:
    query, key, value, table = four(9, 20)
    parts = [attend(query, key[:, :, at], value[:, :, at], table, query_offset=-at.start) for at in (slice(0, 11), slice(11, 20))]
    out, lse = merge_attention(*parts[0], *parts[1])
    (out.sum() + lse.sum()).backward()


def test_no_operator_that_adds_in_any_order() -> None:
    """No operator is used that is nondeterministic on a GPU or that torch refuses there for that reason."""
    used = set[str]()

    def take_part(sample: Sample, way: Way = WAYS[1]) -> None:
        with environment(sample, way):
            used.update(called(partial(run_sample, sample, {**sample.call(), "implementation": way.implementation})))

    take_part(EVERYTHING, WAYS[0])
    assert {"bmm", "baddbmm", "mm"} & used and len(used) > 20, used  # to see the operators inside
    explore(samples(), take_part, range(5))
    used |= called(merged)
    for kind in KINDS.keys() - {"t5"}:
        used |= called(partial(module_results, kind))
    assert not used & (RAISES_ON_A_GPU | ADDS_IN_ANY_ORDER)


def test_operators_with_a_repeatable_path_of_their_own() -> None:
    """The gradient of a row that is taken many times is summed by index_put, which has a deterministic path on a GPU, as has the
    reference's way to find the rows of pairs."""
    t5 = called(partial(module_results, "t5"))
    reference_operators = called(partial(run_sample, EVERYTHING, {**EVERYTHING.call(), "implementation": "reference"}))
    assert t5 & ADDS_IN_ANY_ORDER <= {"index_put", "index_put_", "_index_put_impl_", "embedding_dense_backward"}
    assert reference_operators & ADDS_IN_ANY_ORDER == {"gather_backward", "scatter_add", "scatter_add_"}
    assert not (t5 | reference_operators) & RAISES_ON_A_GPU

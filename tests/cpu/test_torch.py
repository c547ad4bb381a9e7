"""At home in torch: checkpointing, export, vmap, flop counter, version counters, autocast."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.oracle import assert_same
from tests.tolerance import assert_near, within
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._core import warn
from triton_relattn.nn import RelativeMultiheadAttention

FORWARD = torch.ops.triton_relattn.attention_forward


def leaves(*lengths: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """query, key, value and a table of 9 rows, which want gradients."""
    num_queries, num_keys = lengths or (10, 10)
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, num_queries, 8), (2, 2, num_keys, 8), (2, 2, num_keys, 8), (9, 8))
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def attend(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    out: Any = fused_relative_attention(*tensors, **arguments)
    return out


def save_attention(_context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator == FORWARD.default else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
@pytest.mark.parametrize("kind", ["reentrant", "not_reentrant", "selective"])
def test_activation_checkpointing(kind: str, dropout_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results and gradients, dropout included; a selective policy that saves the operator does not run it again."""
    from triton_relattn._blockwise import attention as blockwise

    tensors, count, forward = leaves(), [0], blockwise.forward

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return forward(*arguments)

    monkeypatch.setattr(blockwise, "forward", counted)

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        return attend(*(tensor.sin() for tensor in tensors), dropout_p=dropout_p).cos()

    options: dict[str, Any] = {"use_reentrant": kind == "reentrant"}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, save_attention)
    results = []
    for run in (block, partial(checkpoint, block, **options)):
        torch.manual_seed(1)
        count[0] = 0
        out = run(*tensors)
        results.append(
            (out, *torch.autograd.grad(out.square().sum(), tensors)) if kind != "reentrant" else backward(out, tensors)
        )
    assert count[0] == (1 if kind == "selective" else 2)
    for ours, expected in zip(*results, strict=True):
        assert torch.equal(ours, expected)


def backward(out: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """out and gradients by .backward(), which reentrant checkpointing needs."""
    for tensor in tensors:
        tensor.grad = None
    out.square().sum().backward()
    return out, *(tensor.grad.clone() for tensor in tensors if tensor.grad is not None)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = RelativeMultiheadAttention.shaw(16, 2, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x, x, x, is_causal=True)[0]
        return output


MODULES: dict[str, Any] = {
    "shaw": lambda: RelativeMultiheadAttention.shaw(16, 2, 4, batch_first=True),
    "transformer_xl": lambda: RelativeMultiheadAttention.transformer_xl(16, 2, batch_first=True),
    "t5": lambda: RelativeMultiheadAttention.t5(16, 2, batch_first=True),
    "alibi": lambda: RelativeMultiheadAttention.alibi(16, 2, batch_first=True),
}


@pytest.mark.parametrize("strict", [False, True], ids=["not_strict", "strict"])
@pytest.mark.parametrize("kind", MODULES)
def test_export(kind: str, strict: bool) -> None:
    """One program for all batch sizes and lengths, in which the operator is one node."""
    model = Model().eval()
    model.attention = MODULES[kind]()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    program = torch.export.export(model, (torch.randn(2, 10, 16),), dynamic_shapes=({**dims},), strict=strict)
    nodes = [node for node in program.graph.nodes if node.target == FORWARD.default]
    assert len(nodes) == 1
    for batch, length in ((2, 10), (3, 17), (1, 40)):
        x = torch.randn(batch, length, 16)
        assert_near("module", program.module()(x), model(x))


@pytest.mark.slow
def test_compiled_ahead_of_time(tmp_path: Path) -> None:
    """AOTInductor: one package for all lengths."""
    model = Model().eval()
    with torch.no_grad():
        program = torch.export.export(
            model, (torch.randn(2, 10, 16),), dynamic_shapes=({1: torch.export.Dim("length", min=2, max=100)},)
        )
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for length in (10, 33):
            x = torch.randn(2, length, 16)
            assert_near("loaded", loaded(x), model(x))


def assert_gradients_near(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    """Return the gradients of the same loss. That of a bias of keys cancels: it is as far off as the others' terms."""
    largest = max(float(each.abs().max()) for each in exact)
    for each, right in zip(ours, exact, strict=True):
        assert_near("gradient", each, right, smallest=largest)


@pytest.mark.parametrize("kind", MODULES)
def test_modules_compile_once_for_all_lengths(kind: str) -> None:
    """One graph each for the first length and for all others; gradients too."""
    torch.manual_seed(0)
    module = MODULES[kind]()
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length in (10, 17, 33, 24):
        x = torch.randn(2, length, 16)
        output, expected = compiled(x, x, x, is_causal=True)[0], module(x, x, x, is_causal=True)[0]
        assert_near("output", output, expected)
        ours, exact = (torch.autograd.grad(each.sum(), tuple(module.parameters())) for each in (output, expected))
        assert_gradients_near(ours, exact)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["query_offset", "window_size"])
def test_compiles_once_for_all_values(name: str) -> None:
    """Integers that change from call to call become symbols at the second value."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    tensors = leaves(4, 20)
    for value in (3, 5, 9, 12, 7):
        arguments: dict[str, Any] = {name: value if name == "query_offset" else (value, -1)}
        assert_same(name, compiled(*tensors, **arguments), attend(*tensors, **arguments))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_doubtful_step_compiles_as_any_other(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for a causal call without query_offset, which no warning breaks, and the same result as with an offset of 0."""
    monkeypatch.setattr(warn, "_given", set())
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(attend, backend=counter, fullgraph=True, dynamic=dynamic)
    query, *others = (each.detach() for each in leaves(4, 20))
    for _ in range(3):
        assert_same("default", compiled(query, *others, is_causal=True), attend(query, *others, is_causal=True, query_offset=0))
    assert counter.frame_count == 1

    class Step(torch.nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return attend(query, *others, is_causal=True)  # type: ignore[no-any-return]

    program = torch.export.export(Step(), (query,)).module()
    assert_same("exported", program(query), attend(query, *others, is_causal=True, query_offset=0))


def test_vmap() -> None:
    """Over any of the tensors, forward and backward: gradients of a table for each sample."""
    query, key, value, table = (tensor.detach() for tensor in leaves())
    many = torch.stack([query, -query, 2 * query])
    tables = torch.stack([table, -table, 2 * table])
    expected = torch.stack([attend(each, key, value, table) for each in many])
    assert_same("query", torch.func.vmap(lambda q: attend(q, key, value, table))(many), expected)
    both = torch.func.vmap(lambda q, e: attend(q, key, value, e), in_dims=(1, 0))(many.transpose(0, 1), tables)
    assert_same("both", both, torch.stack([attend(q, key, value, e) for q, e in zip(many, tables, strict=True)]))

    wanting = tables.clone().requires_grad_()
    mapped, stacked = (
        torch.func.vmap(lambda e: attend(query, key, value, e))(wanting),
        [attend(query, key, value, e) for e in wanting],
    )
    ours, exact = (torch.autograd.grad(out.square().sum(), wanting)[0] for out in (mapped, torch.stack(stacked)))
    assert_same("gradient outside", ours, exact)

    def loss(table: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, table).square().sum()

    gradient = torch.func.grad(loss)
    per_sample = torch.func.vmap(gradient, in_dims=(None, 0))(table, many)
    assert_same("per sample", per_sample, torch.stack([gradient(table, each) for each in many]))
    jacobian = torch.func.jacrev(lambda e: attend(query, key, value, e)[0, 0, 0])(table)
    rows = [torch.func.grad(lambda e, d=d: attend(query, key, value, e)[0, 0, 0, d])(table) for d in range(8)]
    assert_same("jacobian", jacobian, torch.stack(rows))


QUERY, KEY, VALUE, TABLE = (tensor.detach() for tensor in leaves())


def of_table(table: torch.Tensor) -> torch.Tensor:
    """A loss."""
    return attend(QUERY, KEY, VALUE, table).square().sum()


def backward_of_vjp(table: torch.Tensor) -> torch.Tensor:
    vjp: Any = torch.func.vjp(of_table, table)[1]
    gradient: torch.Tensor = vjp(torch.ones((), dtype=table.dtype))[0]
    return gradient


def primal_of_vjp(table: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda table: torch.func.vjp(of_table, table)[0])(table)


def sum_of_vmap(table: torch.Tensor) -> torch.Tensor:
    losses: torch.Tensor = torch.func.vmap(of_table)(table[None])
    return losses.sum()


TRANSFORMED: dict[str, Any] = {
    "grad": torch.func.grad(of_table),
    "vjp": backward_of_vjp,
    "primal of vjp": primal_of_vjp,
    "per sample": lambda table: torch.func.vmap(torch.func.grad(of_table))(torch.stack([table, -table]))[0],
    "grad of vmap": torch.func.grad(sum_of_vmap),
    "jacrev": lambda table: torch.func.jacrev(lambda table: of_table(table)[None])(table)[0],
}


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_torch_func(name: str, backend: str | None) -> None:
    """Uncompiled and in one graph; an outer transform is not lost on the way through an inner one."""
    torch._dynamo.reset()
    table = TABLE.clone().requires_grad_()
    (expected,) = torch.autograd.grad(of_table(table), table)
    transformed = TRANSFORMED[name]
    run = transformed if backend is None else torch.compile(transformed, backend=backend, fullgraph=True)
    assert_same(name, run(TABLE), expected)


@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
def test_second_derivatives_under_torch_func(compiled: bool) -> None:
    """An error that says so, also of a loss to which only a part is a gradient."""
    torch._dynamo.reset()

    def penalty(table: torch.Tensor) -> torch.Tensor:
        return of_table(table) + backward_of_vjp(table).square().sum()

    gradient = torch.func.grad(penalty)
    run = torch.compile(gradient, backend="aot_eager", fullgraph=True) if compiled else gradient
    with pytest.raises(RuntimeError, match="attention_backward cannot be differentiated"):
        run(TABLE)


def test_vmap_over_lengths_and_nothing() -> None:
    """key_lengths and query_offset may be mapped over; no samples are an error that says so."""
    query, key, value, table = (tensor.detach() for tensor in leaves())
    lengths = torch.tensor([[10, 4], [7, 1], [0, 9]])
    for name in ("key_lengths", "query_offset"):
        mapped = torch.func.vmap(lambda each, name=name: attend(query, key, value, table, **{name: each}))(lengths)
        assert_same(name, mapped, torch.stack([attend(query, key, value, table, **{name: each}) for each in lengths]))
    with pytest.raises(ValueError, match="size 0"):
        torch.func.vmap(lambda q: attend(q, key, value, table))(query.expand(0, *query.shape))


@pytest.mark.parametrize("implementation", ["blockwise", "reference"])
def test_vmap_with_dropout_draws_anew(implementation: str) -> None:
    query, key, value, table = (tensor.detach() for tensor in leaves())
    many = query.expand(3, *query.shape)
    run = partial(torch.func.vmap, lambda q: attend(q, key, value, table, dropout_p=0.5, implementation=implementation))
    different = run(randomness="different")(many)
    assert not torch.equal(different[0], different[1])
    same = run(randomness="same")(many)
    assert torch.equal(same[0], same[1])
    with pytest.raises(RuntimeError, match="randomness"):
        run(randomness="error")(many)


def test_forward_mode() -> None:
    """An error that names the implementation that has it; there, the derivative along a direction."""
    query, key, value, table = (tensor.detach() for tensor in leaves())
    with pytest.raises(NotImplementedError, match='implementation="reference" has them'):
        torch.func.jvp(lambda e: attend(query, key, value, e), (table,), (table,))
    dense: Any = partial(attend, query, key, value, implementation="reference")
    tangent = torch.func.jvp(dense, (table,), (query[0, 0, :9],))[1]
    # A central difference is off by the third derivative times the square of the step and by rounding, eps, over the step. Along
    # this direction logits move by up to moved; derivatives of a mean by probabilities are powers of that times values.
    step = torch.finfo(torch.float64).eps ** (1 / 3)
    small = step * query[0, 0, :9]
    moved = (query.abs() @ query[0, 0, :9].abs().mT).max() / query.shape[-1] ** 0.5
    difference = attend(query, key, value, table + small) - attend(query, key, value, table - small)
    allowance = step**2 * (1 + moved**3) * value.abs().max()
    within("tangent", (tangent - difference / (2 * step)).abs(), allowance)


def test_no_forward_mode_goes_unnoticed() -> None:
    """Tangents that the operator would drop are refused, wherever they come from: of any tensor, through vmap, in a backward."""
    tensors = [tensor.detach() for tensor in leaves()]
    refused = partial(pytest.raises, NotImplementedError, match="forward-mode")
    for index, tensor in enumerate(tensors):
        with torch.no_grad(), forward_ad.dual_level(), refused():
            attend(*tensors[:index], forward_ad.make_dual(tensor, tensor), *tensors[index + 1 :])
    query, key, value, table = tensors

    def of_table(table: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, table)

    for transform in (torch.func.jacfwd, torch.func.hessian):
        with refused():
            transform(lambda table: of_table(table).sum())(table)
    many = torch.stack([table, -table])
    with refused():
        torch.func.vmap(partial(torch.func.jvp, of_table))((many,), (many,))
    with refused():
        torch.func.jvp(torch.func.vmap(of_table), (many,), (many,))
    out = attend(query.requires_grad_(), key, value, table)
    with forward_ad.dual_level(), refused():
        torch.autograd.grad(out, query, forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out)))


def test_flop_counter() -> None:
    """As torch counts scaled_dot_product_attention, and a table's products: one forward, three backward."""
    from torch.utils.flop_counter import FlopCounterMode

    query, key, value, table = leaves(10, 14)
    product = 2 * 2 * 2 * 10 * 14 * 8
    of_table = 2 * 2 * 2 * 10 * 9 * 8

    def count(run: Any) -> int:
        with FlopCounterMode(display=False) as counter:
            run()
        return int(counter.get_total_flops())

    sdpa = nn.functional.scaled_dot_product_attention
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert count(lambda: sdpa(query, key, value).sum().backward()) == 6 * product
    assert count(lambda: attend(query, key, value)) == 2 * product
    assert count(lambda: attend(query, key, value).sum().backward()) == 7 * product
    assert count(lambda: attend(query, key, value, table)) == 2 * product + of_table
    assert count(lambda: attend(query, key, value, table).sum().backward()) == 7 * product + 4 * of_table
    of_keys = 2 * 2 * 2 * 14 * 9 * 8
    assert count(lambda: attend(query, key, value, rel_p2c=table).sum().backward()) == 7 * product + 4 * of_keys
    wide, values_table = torch.randn(2, 2, 14, 20, dtype=torch.float64), torch.randn(9, 20, dtype=torch.float64)
    wider = product * 20 // 8
    assert count(lambda: attend(query, key, wide).sum().backward()) == product + wider + 3 * product + 2 * wider
    of_values = of_table * 20 // 8
    assert count(lambda: attend(query, key, wide, rel_value=values_table)) == product + wider + of_values
    packed, starts = torch.randn(12, 2, 8), torch.tensor([0, 4, 8, 12])
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 4, "max_seqlen_k": 4}
    assert count(lambda: fused_relative_attention_varlen(packed, packed, packed, **packing)) == 2 * 2 * 2 * 12 * 4 * 8


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
@pytest.mark.parametrize("first", ["triton_relattn", "torch.utils.flop_counter"])
def test_flop_counter_whatever_is_imported_first(first: str, mode: str) -> None:
    """The first call is counted, and our import alone brings in neither the counter nor triton nor what compiles."""
    program = f"""
import sys, torch, {first}
import triton_relattn
if {first!r} == "triton_relattn":
    assert not sys.modules.keys() & {{"torch.utils.flop_counter", "triton", "torch._dynamo", "torch.distributed.tensor"}}
from torch.utils.flop_counter import FlopCounterMode
query = torch.zeros(1, 1, 4, 8)
with torch.{mode}(), FlopCounterMode(display=False) as counter:
    triton_relattn.fused_relative_attention(query, query, query)
assert counter.get_total_flops() == 4 * 4 * 4 * 8, counter.get_total_flops()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.thorough
def test_flop_counter_of_an_exported_call(tmp_path: Path) -> None:
    """A program that calls the operator, and none of our functions, is counted."""
    query = torch.zeros(1, 1, 4, 8)

    class Attend(nn.Module):
        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return attend(query, query, query)

    torch.export.save(torch.export.export(Attend(), (query,)), tmp_path / "attend.pt2")
    program = f"""
import torch, triton_relattn
from torch.utils.flop_counter import FlopCounterMode
attend = torch.export.load({str(tmp_path / "attend.pt2")!r}).module()
with FlopCounterMode(display=False) as counter:
    attend(torch.zeros(1, 1, 4, 8))
assert counter.get_total_flops() == 4 * 4 * 4 * 8, counter.get_total_flops()
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("index", range(4))
def test_a_changed_input_is_noticed(index: int) -> None:
    """Written to between forward and backward: torch's error, not a wrong gradient."""
    tensors = leaves()
    copies = [tensor.clone() for tensor in tensors]
    out = attend(*copies)
    with torch.no_grad():
        copies[index].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("outside", [False, True], ids=["backward_within", "backward_outside"])
def test_autocast_casts_as_for_sdpa(outside: bool) -> None:
    """float32 tensors become bfloat16 and gradients come back in float32; float64 stays; a bias by distance stays float32."""
    tensors = leaves(dtype=torch.float32)
    bias = torch.randn(9, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attend(*tensors, rel_bias=bias)
        mixed = attend(tensors[0].bfloat16(), *tensors[1:], rel_bias=bias)
        packed: Any = tuple(tensor[0].transpose(0, 1) for tensor in tensors[:3])
        starts = torch.tensor([0, 10])
        packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 10, "max_seqlen_k": 10}
        varlen: Any = fused_relative_attention_varlen
        of_packed = varlen(*packed, tensors[3], rel_bias=bias, **packing)
        if not outside:
            gradients = torch.autograd.grad(out.sum(), (*tensors, bias))
    if outside:
        gradients = torch.autograd.grad(out.sum(), (*tensors, bias))
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in tensors]
    expected = attend(*low, rel_bias=bias)
    assert out.dtype == mixed.dtype == of_packed.dtype == torch.bfloat16
    assert torch.equal(out, expected) and torch.equal(mixed, expected) and torch.equal(of_packed.transpose(0, 1), expected[0])
    exact = torch.autograd.grad(expected.sum(), (*low, bias))
    for gradient, other in zip(gradients, exact, strict=True):
        assert gradient.dtype == torch.float32 and torch.equal(gradient, other.float())
    half = [tensor.detach().half() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(*half, rel_bias=bias.half(), attn_mask=torch.zeros(10, dtype=torch.float16)).dtype == torch.bfloat16
        assert attend(*leaves()).dtype == torch.float64
        with torch.autocast("cpu", enabled=False):
            assert attend(*tensors).dtype == torch.float32


def test_dtypes_do_not_mix_outside_autocast() -> None:
    tensors = leaves(dtype=torch.float32)
    with pytest.raises(TypeError, match="query's dtype"):
        attend(tensors[0].bfloat16(), *tensors[1:], positions=RelativePositions(-4, 4))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_under_autocast(dynamic: bool) -> None:
    """The same bits as without compilation, forward and backward."""
    torch._dynamo.reset()
    tensors = leaves(dtype=torch.float32)

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return attend(*tensors, is_causal=True)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    out, expected = compiled(*tensors), loss(*tensors)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    for ours, exact in zip(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_training_step_of_a_module(backend: str) -> None:
    """A module with dropout off, fullgraph, gradients of all parameters."""
    torch._dynamo.reset()
    model, x = Model(), torch.randn(2, 10, 16)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert_gradients_near(*(torch.autograd.grad(each(x).sum(), tuple(model.parameters())) for each in (compiled, model)))


def test_traced_calls_are_refused() -> None:
    """torch.jit.trace would give the positions of the traced length to every other, and only warn."""
    query, table = torch.randn(1, 2, 10, 16), torch.randn(19, 16)
    with pytest.raises(NotImplementedError, match="would keep the positions of this call"):
        torch.jit.trace(lambda x: fused_relative_attention(x, x, x, table), query)
    with pytest.raises(NotImplementedError, match=r"disable\(model\)"):
        torch.jit.trace(Model(), torch.randn(2, 10, 16))

"""torch.compile and torch.export: one graph for all lengths, with the results and gradients of the uncompiled call."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from tests.check import attend, attend_varlen, public_function
from tests.conftest import forget_warnings
from tests.cpu.small_call import WIDTH, attend_out, four, module
from tests.expected import INPUTS, TABLES
from tests.samples import Sample, in_memory_order
from tests.tolerance import assert_near, assert_same
from triton_relattn import RelativePositions, decomposed_relative_attention, fused_relative_attention_varlen

Compiled = torch._dynamo.testing.CompileCounterWithBackend
Layer = tuple[Callable[..., Any], list[list[torch.Tensor]]]
"""A function and the tensors of several calls."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def gradients(loss: torch.Tensor, leaves: Sequence[torch.Tensor] | nn.Module) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, tuple(leaves.parameters() if isinstance(leaves, nn.Module) else leaves))


def assert_gradients_near(ours: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
    """Some parameters' gradients cancel, so their error is compared with the size of the others' terms."""
    largest = max(float(gradient.abs().max()) for gradient in exact)
    for gradient, right in zip(ours, exact, strict=True):
        assert_near("gradient", gradient, right, smallest=largest)


def numbers_from_lengths(query: torch.Tensor, key: torch.Tensor) -> Any:
    """query_offset, window_size and max_seqlen as symbolic integers: no message formats them, which would specialise the
    graph."""
    offset, length = key.shape[2] - query.shape[2], key.shape[2]
    out = attend_out(query, key, key, is_causal=True, query_offset=offset, window_size=(offset + 3, -1))
    packed, starts = key[0].transpose(0, 1), torch.stack((torch.zeros(()), torch.tensor(length))).int()
    packing: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": length, "max_seqlen_k": length}
    return out, fused_relative_attention_varlen(packed, packed, packed, **packing)


def in_autocast(*tensors: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return attend_out(*tensors, is_causal=True)


def strided(*lengths: int) -> list[torch.Tensor]:
    query, *others = four(*lengths)
    return [in_memory_order(query.detach(), 0, 2, 1, 3).requires_grad_(), *others]


def sampled(sample: Sample) -> Layer:
    """The call of a sample, as a function of its tensors that have gradients."""
    call = sample.call()
    names = [name for name in INPUTS if name in call]
    tensors, function = [call.pop(name).requires_grad_() for name in names], public_function(sample)
    return lambda *given: function(**dict(zip(names, given, strict=True)), **call, implementation="blockwise"), [tensors]


def on_grid(query: torch.Tensor, rel_pos_h: torch.Tensor, rel_pos_w: torch.Tensor) -> Any:
    return decomposed_relative_attention(query, query, query, rel_pos_h, rel_pos_w, (4, 3), dropout_p=0.3)


SIZES: dict[str, Any] = {"num_queries": 9, "num_keys": 13, "width": 8, "value_width": 5, "rel_width": 3, "key_heads": 2}
TERMS: dict[str, Any] = {"tables": TABLES, "positions": (-4, 4, "clamp"), "rel_scale": 0.3, "softcap": 4.0}
ALL = Sample(**SIZES, **TERMS, dtype="float64", group=2, dropout_p=0.3, window_size=(5, 6))
LAYERS: dict[str, Layer] = {
    "lengths": (
        partial(attend, positions=RelativePositions(-4, 4), is_causal=True, query_offset=2, implementation=None),
        [strided(*lengths) for lengths in ((17, 19), (23, 29), (40, 31))],
    ),
    "numbers_from_lengths": (
        numbers_from_lengths,
        [[torch.randn(1, 2, length, 8) for length in lengths] for lengths in ((5, 9), (6, 13), (8, 33))],
    ),
    "a_step_that_warns": (partial(attend_out, is_causal=True), [four(4, 20)]),  # does not break the graph
    "autocast": (in_autocast, [four(dtype=torch.float32)]),
    "padded": sampled(replace(ALL, mask="bool", mask_shape=(13,), query_offset=(2,), key_lengths=(12,))),
    "packed": sampled(replace(ALL, sequences=((3, 4), (0, 1), (6, 8)), query_offset=(1, 0, 2))),
    "grid": (on_grid, [[torch.randn(size).requires_grad_() for size in ((2, 3, 12, 6), (7, 6), (5, 6))]]),
}


def results_and_gradients(run: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(0)  # compiled dropout draws from the generator like uncompiled dropout
    found = run(*tensors)
    results = list(found) if isinstance(found, tuple) else [found]
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    total = torch.stack([result.nan_to_num(neginf=0.0).square().sum() for result in results]).sum()
    return [*results, *(gradients(total, leaves) if leaves else ())]


@pytest.mark.parametrize("name", LAYERS)
def test_compiles(name: str) -> None:
    """Forward and backward compile to one graph with bit-identical results, which other lengths reuse."""
    forget_warnings()
    (layer, calls), counter, counts = LAYERS[name], Compiled("aot_eager"), set()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True if len(calls) > 1 else None)
    for tensors in calls:
        results = results_and_gradients(compiled, tensors)
        # Floats left at their defaults may take torch.compile two attempts at the first graph.
        counts.add(counter.frame_count)
        assert all(map(torch.equal, results, results_and_gradients(layer, tensors)))
    assert len(counts) == 1, "other lengths were compiled again"


@pytest.mark.parametrize("guard", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_compiles_where_nothing_requires_a_gradient(guard: Any) -> None:
    """If a window covers the positions, the values of query_offset are not read."""
    tensors = [tensor.detach() for tensor in four(5, 6)]
    options: dict[str, Any] = {"positions": RelativePositions(-4, 4, "error"), "query_offset": torch.tensor([1, 0])}
    layer = partial(attend, **options, window_size=(4, 4))
    with guard():
        assert all(map(torch.equal, torch.compile(layer, fullgraph=True, backend="aot_eager")(*tensors), layer(*tensors)))


def attend_values(query: torch.Tensor, starts: torch.Tensor) -> Any:
    """A packed and a padded call with integers that are read from a tensor."""
    lengths, padded = starts.diff(), query.transpose(0, 1)[None]
    longest, packing = lengths.max().item(), {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    packed = attend_varlen(query, query, query, **packing, max_seqlen_q=longest, max_seqlen_k=longest)[0]
    return packed, attend(padded, padded, padded, window_size=(longest, -1), query_offset=lengths[0].item())[0]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.thorough)])
def test_compiles_once_for_numbers_from_tensors(backend: str) -> None:
    """With fullgraph; the integers are checked at run time."""
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


class Model(nn.Module):
    def __init__(self, kind: str = "shaw") -> None:
        super().__init__()
        self.attention = module(kind, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x, x, x, is_causal=True)[0]
        return output


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("shaw", "aot_eager"),
        *(pytest.param(kind, "aot_eager", marks=pytest.mark.thorough) for kind in ("transformer_xl", "t5", "alibi")),
        pytest.param("shaw", "inductor", marks=pytest.mark.thorough),
    ],
)
def test_modules_compile_once_for_all_lengths(kind: str, backend: str) -> None:
    """One graph for the first length and one for all others, including gradients of all parameters."""
    model, counter = Model(kind), Compiled(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for length in (10, 17, 33):
        x = torch.randn(2, length, WIDTH)
        outputs = compiled(x), model(x)
        assert_near("output", *outputs)
        assert_gradients_near(*(gradients(output.sum(), model) for output in outputs))
    assert counter.frame_count <= 2


@pytest.mark.parametrize(
    ("kind", "strict"), [("shaw", False), ("shaw", True), ("transformer_xl", False), ("t5", False), ("alibi", False)]
)
def test_export(kind: str, strict: bool) -> None:
    """One exported program for all batch sizes and lengths, in which the operator is a single node."""
    model = Model(kind).eval()
    dims = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", min=2, max=512)}
    program = torch.export.export(model, (torch.randn(2, 10, WIDTH),), dynamic_shapes=({**dims},), strict=strict)
    assert [node.target for node in program.graph.nodes].count(torch.ops.triton_relattn.attention_forward.default) == 1
    for batch, length in ((2, 10), (3, 17), (1, 40)):
        x = torch.randn(batch, length, WIDTH)
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
    """torch.export followed by AOTInductor gives one package for all lengths."""
    model, length = Model().eval(), torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(1, 40, WIDTH),), dynamic_shapes=({1: length},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for size in (40, 129):
            x = torch.randn(1, size, WIDTH)
            assert_near("the compiled program", compiled(x), model(x))


def test_traced_calls_are_refused() -> None:
    """torch.jit.trace would give the positions of the traced length to every other, and only warn."""
    with pytest.raises(NotImplementedError, match="would keep the positions of this call"):
        torch.jit.trace(lambda x: attend_out(x, x, x, torch.randn(19, 16)), torch.randn(1, 2, 10, 16))
    with pytest.raises(NotImplementedError, match=r"disable\(model\)"):
        torch.jit.trace(Model(), torch.randn(2, 10, WIDTH))

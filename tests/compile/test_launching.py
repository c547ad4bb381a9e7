"""Launches without Triton's search: the kernel that is launched is the one that Triton would find."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from bench.compiled import recorded_launches
from tools.absent_gpu import AbsentGPU
from triton_relattn import RelativePositions, kernels
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE, AttentionTensors
from triton_relattn.kernels import backward as of_backward
from triton_relattn.kernels import delta, launching
from triton_relattn.kernels import forward as of_forward
from triton_relattn.kernels.workspace import planning

SHAPE = (2, 2, 32, 64)
POSITIONS = RelativePositions(-31, 31)
Call = dict[str, Any]


def usual(dtype: torch.dtype = torch.float32) -> Call:
    """Inputs of a call with a table, each in memory of its own."""
    query, key, value = (torch.zeros(SHAPE, dtype=dtype) for _ in range(3))
    return {"query": query, "key": key, "value": value, "rel_key": torch.zeros(63, 64, dtype=dtype), "positions": POSITIONS}


def moved(name: str) -> Call:
    """The same, one of them 4 bytes beyond a multiple of 16."""
    inputs = usual()
    shape = inputs[name].shape
    inputs[name] = torch.zeros(shape.numel() + 1)[1:].view(shape)
    return inputs


def transposed(name: str) -> Call:
    """The same sizes, one of them in the memory order (B, N, H, D)."""
    inputs = usual()
    inputs[name] = inputs[name].transpose(1, 2).contiguous().transpose(1, 2)
    return inputs


CALLS: dict[str, Callable[[], Call]] = {
    "usual": usual,
    "no table": lambda: {**usual(), "rel_key": None, "positions": None},
    "bfloat16": lambda: usual(torch.bfloat16),
    "moved query": lambda: moved("query"),
    "moved key": lambda: moved("key"),
    "moved table": lambda: moved("rel_key"),
    "query in another order": lambda: transposed("query"),
    "value in another order": lambda: transposed("value"),
    "padded rows": lambda: {**usual(), "key": torch.zeros(2, 2, 32, 65)[..., :64]},
    "window": lambda: {**usual(), "window_size": (4, 16)},
    "another window": lambda: {**usual(), "window_size": (4, 1)},
    "scale": lambda: {**usual(), "scale": 0.5, "rel_scale": 1.0},
    "softcap": lambda: {**usual(), "softcap": 20.0},
    "dropout": lambda: {**usual(), "dropout_p": 0.5},
    "offset": lambda: {**usual(), "query_offset": 1, "positions": RelativePositions(-32, 30)},
    "lengths": lambda: {**usual(), "key_lengths": torch.tensor([32, 5], dtype=torch.int32)},
    "long lengths": lambda: {**usual(), "key_lengths": torch.tensor([32, 5])},
    "mask": lambda: {**usual(), "attn_mask": torch.zeros(2, 1, 32, 32)},
    "mask of all heads": lambda: {**usual(), "attn_mask": torch.zeros(2, 2, 32, 32)},
    "bias": lambda: {**usual(), "rel_bias": torch.zeros(63)},
    "far keys": lambda: {**usual(), "rel_p2c": torch.zeros(9, 64), "rel_key": None, "positions": RelativePositions(-4, 4)},
}
WANTED = {
    "none": (False,) * 8,
    "all": (True,) * 8,
    "query": tuple(name == "query" for name in DIFFERENTIABLE),
    "table": tuple(name == "rel_key" for name in DIFFERENTIABLE),
}


def launched(target: str, arguments: Call, wanted: tuple[bool, ...], d_out_moved: bool = False) -> list[tuple[Any, ...]]:
    """For each launch of a call and, if any gradient is wanted, its backward: kernel, grid, and numbers, None for each tensor."""
    tensors, spec = validation.resolve(Arguments.of(**arguments))
    if spec.dropout_p:
        tensors = tensors._replace(dropout_seed=torch.zeros(1, dtype=torch.int64))
    found = list[tuple[Any, ...]]()

    def numbers(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return None
        return tuple(map(numbers, argument)) if isinstance(argument, tuple) else argument

    def note(launch: Any, values: tuple[Any, ...]) -> None:
        found.append((launch.kernel.hash, launch.grid, numbers(values)))

    with recorded_launches(target, run=note):
        out, _, softmax_stats, _ = of_forward.forward(tensors, spec)
        if not any(wanted):
            return found
        d_out = torch.zeros(out.numel() + 1, dtype=out.dtype)[int(d_out_moved) :][: out.numel()].view(out.shape)
        present = [tensor is not None for tensor in tensors[: len(DIFFERENTIABLE)]]
        both = [want and there for want, there in zip(wanted, present, strict=True)]
        of_backward.backward(d_out, None, out, softmax_stats, tensors, spec, both)
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the kernels that Triton searches for; nothing is kept from earlier tests."""
    names = list[str]()
    inner = JITFunction.run

    def run(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return inner(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launching, "_run", run)
    monkeypatch.setattr(launching, "_compiled", {})
    yield names


def groups() -> dict[str, type[Any]]:
    """Every named tuple of the kernels' modules: arguments of launches, and what kernels put together themselves."""
    modules = [importlib.import_module(module.name) for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {each.__name__: each for each in classes if issubclass(each, tuple) and hasattr(each, "_fields")}


def test_no_field_is_hidden_by_an_attribute_of_tritons_tuple() -> None:
    """Groups of constants are Python's own tuples up to Triton 3.7, and Triton's with a later one."""
    taken = set(dir(tl.tuple(()))) | {"values", "type"}
    found = groups()
    assert {"Tile", "Operands", "Scaling", "Table", "Place", "Strip"} <= set(found)
    assert {name: hidden for name, group in found.items() if (hidden := taken & set(group._fields))} == {}


@pytest.mark.thorough
def test_as_triton_would_find_them(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second launch of each call, after all first ones, is what Triton launches, too."""
    calls = [("sm_80", "bfloat16", "all", False), *(("sm_90", name, "none", False) for name in CALLS if name != "bfloat16")]
    calls += [("sm_90", "bfloat16", wanted, False) for wanted in WANTED if wanted != "none"]
    calls += [("sm_90", "no table", "all", False)]
    calls += [("sm_90", "bias", "table", moved) for moved in (False, True)]

    def every() -> list[list[tuple[Any, ...]]]:
        return [launched(target, CALLS[name](), WANTED[wanted], late) for target, name, wanted, late in calls]

    first, before = every(), len(searches)
    quick = every()
    assert len(searches) == before, "a call that had been there was searched for"
    monkeypatch.setattr(launching, "_run", None)  # JITFunction.run is another
    searched = every()
    assert len(searches) == before + sum(map(len, searched))
    assert first == quick == searched
    kernels = {call: [kernel for kernel, *_ in launches] for call, launches in zip(calls, searched, strict=True)}
    for other in ("moved query", "moved key", "moved table", "padded rows", "mask", "dropout", "bias"):
        assert kernels["sm_90", other, "none", False] != kernels["sm_90", "usual", "none", False], other
    assert kernels["sm_90", "bias", "table", True] != kernels["sm_90", "bias", "table", False]
    assert not set(kernels["sm_80", "bfloat16", "all", False]) & set(kernels["sm_90", "bfloat16", "all", False])


def with_lengths(queries: int, keys: int, **others: Any) -> Call:
    """Inputs of a call with a table of all distances."""
    query = torch.zeros(1, 2, queries, 64, dtype=torch.bfloat16)
    key = torch.zeros(1, 2, keys, 64, dtype=torch.bfloat16)
    rel_key = torch.zeros(queries + keys - 1, 64, dtype=torch.bfloat16)
    return {
        "query": query,
        "key": key,
        "value": key,
        "rel_key": rel_key,
        "positions": RelativePositions(1 - queries, keys - 1),
        **others,
    }


def test_lengths_are_told_apart(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that Triton tells apart have kernels of their own: 1, multiples of 16, others. A new length of a kind has none."""
    calls = [with_lengths(*lengths) for lengths in ((1, 40), (1, 48), (32, 48), (33, 48), (48, 33))]
    calls += [with_lengths(33, 48, window_size=window) for window in ((1, 5), (5, 16), (5, 5))]
    first = [launched("sm_90", call, WANTED["none"]) for call in calls]
    before = len(searches)
    likewise = [with_lengths(*lengths) for lengths in ((1, 57), (1, 80), (64, 160), (35, 64), (16, 70))]
    likewise += [with_lengths(50, 80, window_size=window) for window in ((1, 7), (9, 32), (11, 3))]
    quick = [launched("sm_90", call, WANTED["none"]) for call in likewise]
    assert len(searches) == before, "a length of a known kind was searched for"
    monkeypatch.setattr(launching, "_run", None)  # JITFunction.run is another
    searched = [launched("sm_90", call, WANTED["none"]) for call in likewise]
    assert quick == searched

    def kernels(all_launches: list[list[tuple[Any, ...]]]) -> list[Any]:
        return [launches[0][0] for launches in all_launches]

    assert kernels(first) == kernels(searched) and len(set(kernels(first))) >= 6


def test_parts_share_a_kernel(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a call differ in where they begin, which no kernel is compiled for."""
    monkeypatch.setenv(planning.VARIABLE, str(200 * 2 * 64 * 64))  # 200 heads, more than there are multiprocessors
    query = torch.zeros(400, 2, 64, 64, dtype=torch.bfloat16)
    tables = {"rel_key": torch.zeros(127, 64, dtype=torch.bfloat16)}
    launches = launched("sm_90", {**dict.fromkeys(("query", "key", "value"), query), **tables}, WANTED["all"])
    assert len(searches) == len({kernel for kernel, *_ in launches}) < len(launches) / 2


@pytest.mark.thorough
def test_other_ways_are_left_to_triton(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton is asked on AMD's GPUs, when it compiles for debugging or for a profiler, and by whoever replaces its launch."""
    arguments = usual(torch.bfloat16)
    count = len(launched("sm_90", arguments, WANTED["all"]))

    def number_of_searches(target: str = "sm_90") -> int:
        before = len(searches)
        launched(target, arguments, WANTED["all"])
        return len(searches) - before

    assert number_of_searches() == 0 < count
    for _ in range(2):
        assert number_of_searches("gfx942") > 0
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        assert number_of_searches() == count
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", ""))
        assert number_of_searches() == count
    with monkeypatch.context() as patch:
        patch.setattr(launching, "_run", None)  # JITFunction.run is another
        assert number_of_searches() == count
    assert number_of_searches() == 0


def test_each_gpu_has_its_own(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that is loaded on one GPU is not launched on another, even of the same kind."""
    arguments = usual(torch.bfloat16)
    for gpu in (0, 1):
        monkeypatch.setattr(AbsentGPU, "get_current_device", lambda _, gpu=gpu: gpu)
        before = len(searches)
        count = len(launched("sm_90", arguments, WANTED["all"]))
        assert len(searches) - before == count > 0


def test_what_is_kept_is_bounded(searches: list[str]) -> None:
    """There is one entry for each compiled kernel, whatever the lengths; no tensor is kept."""
    for length in (48, 64, 80, 160, 1024):
        launched("sm_90", with_lengths(length, length), WANTED["all"])
    assert len(launching._compiled) == len(set(launching._compiled.values()))

    def leaves(key: Any) -> Iterator[Any]:
        if isinstance(key, tuple):
            for each in key:
                yield from leaves(each)
        else:
            yield key

    assert not any(isinstance(leaf, torch.Tensor) for key in launching._compiled for leaf in leaves(key))


def test_every_group_is_described() -> None:
    """Dtype and alignment of every tensor of a call, wherever it stands, are in its description."""
    for name in ("usual", "bfloat16", "lengths", "mask", "bias", "dropout"):
        tensors, spec = validation.resolve(Arguments.of(**CALLS[name]()))
        assert isinstance(tensors, AttentionTensors)
        if spec.dropout_p:
            tensors = tensors._replace(dropout_seed=torch.zeros(1, dtype=torch.int64))
        for field, tensor in zip(tensors._fields, tensors, strict=True):
            if tensor is None:
                continue
            other = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)
            likeness = [
                of_forward.Call(each, spec, arch="sm_90").fixed.cache_key
                for each in (tensors, tensors._replace(**{field: other}))
            ]
            assert likeness[0] is not likeness[1], (name, field)


def test_any_number_of_sequences() -> None:
    """A GPU takes 65,535 programs in the second and third dimension of a launch."""
    out = torch.zeros(70_000, 1, 2, 16, dtype=torch.bfloat16)
    with recorded_launches("sm_90") as launches:
        delta.launch_delta(out, out, out, None, torch.zeros(70_000, 1, 2), 16)
    (launch,) = launches
    assert launch.grid[0] == 70_000 and max(launch.grid[1:], default=1) == 1

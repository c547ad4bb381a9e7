"""Launches that skip Triton's search launch the same kernels as Triton would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

from bench.compiled import recorded_launches
from tools.absent_gpu import AbsentGPU
from triton_relattn import RelativePositions
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.spec import DIFFERENTIABLE
from triton_relattn.kernels import backward, forward, launching
from triton_relattn.kernels import call as kernel_call
from triton_relattn.kernels.workspace import planning

SHAPE = (2, 2, 32, 64)
Given = dict[str, Any]


def usual(dtype: torch.dtype = torch.float32) -> Given:
    """Inputs of a call with a table, each in its own aligned memory."""
    query, key, value = (torch.zeros(SHAPE, dtype=dtype) for _ in range(3))
    table = {"rel_key": torch.zeros(63, 64, dtype=dtype), "positions": RelativePositions(-31, 31)}
    return {"query": query, "key": key, "value": value, **table}


def moved(name: str, **others: Any) -> Given:
    """The same, with one tensor 4 bytes after a multiple of 16."""
    inputs = usual() | others
    shape = inputs[name].shape
    inputs[name] = torch.zeros(shape.numel() + 1, dtype=inputs[name].dtype)[1:].view(shape)
    return inputs


CALLS: dict[str, Callable[[], Given]] = {
    "usual": usual,
    "moved query": lambda: moved("query"),
    "moved table": lambda: moved("rel_key"),
    "bias": lambda: usual() | {"rel_bias": torch.zeros(63)},
    "moved bias": lambda: moved("rel_bias", rel_bias=torch.zeros(63)),
    "bias of 32 bits": lambda: usual(torch.bfloat16) | {"rel_bias": torch.zeros(63)},
    "bias of 16 bits": lambda: usual(torch.bfloat16) | {"rel_bias": torch.zeros(63, dtype=torch.bfloat16)},
    "mask": lambda: usual() | {"attn_mask": torch.zeros(2, 1, 32, 32)},
    "mask of booleans": lambda: usual() | {"attn_mask": torch.ones(2, 1, 32, 32, dtype=torch.bool)},
    "lengths": lambda: usual() | {"key_lengths": torch.tensor([32, 5], dtype=torch.int32)},
    "long lengths": lambda: usual() | {"key_lengths": torch.tensor([32, 5])},
    "dropout": lambda: usual() | {"dropout_p": 0.5},
    "far keys": lambda: usual() | {"rel_key": None, "rel_p2c": torch.zeros(9, 64), "positions": RelativePositions(-4, 4)},
    "bfloat16": lambda: usual(torch.bfloat16),
}


def launched(target: str, given: Given, wanted: tuple[str, ...] | None, d_out_moved: bool = False) -> list[tuple[Any, ...]]:
    """Kernel, grid and numeric arguments of the launches of a call, and of its backward for wanted gradients (() for all)."""
    tensors, spec = validation.resolve(Arguments(**given))
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
        out, _, softmax_stats, _ = forward.forward(tensors, spec)
        if wanted is not None:
            d_out = torch.zeros(out.numel() + 1, dtype=out.dtype)[int(d_out_moved) :][: out.numel()].view(out.shape)
            names = zip(DIFFERENTIABLE, tensors, strict=False)
            both = [tensor is not None and (not wanted or name in wanted) for name, tensor in names]
            backward.backward(d_out, None, out, softmax_stats, tensors, spec, both)
    return found


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Record the kernels that Triton searches for, with empty caches."""
    names = list[str]()
    inner = JITFunction.run

    def run(kernel: JITFunction, *args: Any, **options: Any) -> Any:
        names.append(kernel.__name__)
        return inner(kernel, *args, **options)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launching, "_run", run)
    kernel_call.call_constants.cache_clear()
    yield names
    kernel_call.call_constants.cache_clear()


def test_as_triton_would_find_them(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeated calls launch what Triton's search finds, and calls that Triton specialises differently have different kernels."""
    calls: list[tuple[str, str, tuple[str, ...] | None, bool]] = [("sm_90", name, None, False) for name in CALLS]
    calls += [(target, "bfloat16", (), False) for target in ("sm_80", "sm_90")]
    calls += [("sm_90", "bias", ("rel_key",), late) for late in (False, True)]

    def launch_all() -> list[list[tuple[Any, ...]]]:
        return [launched(target, CALLS[name](), wanted, late) for target, name, wanted, late in calls]

    first, before = launch_all(), len(searches)
    quick = launch_all()
    assert len(searches) == before, "a repeated call was searched for"
    monkeypatch.setattr(launching, "_run", None)  # as if JITFunction.run were replaced
    searched = launch_all()
    assert len(searches) == before + sum(map(len, searched))
    assert first == quick == searched
    kernels = {call: [kernel for kernel, *_ in launches] for call, launches in zip(calls, searched, strict=True)}
    pairs = [("usual", "moved query"), ("usual", "moved table"), ("bias", "moved bias"), ("bias of 32 bits", "bias of 16 bits")]
    pairs += [("mask", "mask of booleans"), ("lengths", "long lengths")]
    for one, other in pairs:
        assert kernels["sm_90", one, None, False] != kernels["sm_90", other, None, False], other
    assert kernels["sm_90", "bias", ("rel_key",), True] != kernels["sm_90", "bias", ("rel_key",), False]
    assert not set(kernels["sm_80", "bfloat16", (), False]) & set(kernels["sm_90", "bfloat16", (), False])


def test_parts_are_launched_without_a_search(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a workspace share their kernels; another GPU has its own."""
    monkeypatch.setenv(planning.VARIABLE, str(200 * 2 * 64 * 64))  # 200 heads, more than there are multiprocessors
    query = torch.zeros(400, 2, 64, 64, dtype=torch.bfloat16)
    given = dict.fromkeys(("query", "key", "value"), query) | {"rel_key": torch.zeros(127, 64, dtype=torch.bfloat16)}
    launches = launched("sm_90", given, ())
    assert len(searches) == len({kernel for kernel, *_ in launches}) < len(launches) / 2
    before = len(searches)
    monkeypatch.setattr(AbsentGPU, "get_current_device", lambda _: 1)
    launched("sm_90", given, ())
    assert len(searches) == 2 * before


@pytest.mark.thorough
def test_triton_searches_for_special_launches(searches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton searches on AMD GPUs, for debugging, with a profiler's hook, and if JITFunction.run is replaced."""
    given = usual(torch.bfloat16)
    count = len(launched("sm_90", given, ()))

    def number_of_searches(target: str = "sm_90") -> int:
        before = len(searches)
        launched(target, given, ())
        return len(searches) - before

    assert number_of_searches() == 0 < count
    for _ in range(2):
        assert number_of_searches("gfx942") > 0
    for owner, name, value in (
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.runtime, "add_stages_inspection_hook", lambda *_: ("", "")),
        (launching, "_run", None),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert number_of_searches() == count, name
    assert number_of_searches() == 0

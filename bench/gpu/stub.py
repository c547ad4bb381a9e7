"""The program without a GPU: "cuda" is the CPU, kernels are compiled and launched on a stub of the driver; times are invented.

So it is seen before there is a GPU that no part raises. Sizes are real, numbers are not: tensors stay uninitialised, methods of
others compute nothing, and no result is compared. RELATTN_STUB_FAULT=out lets all checks of that result fail.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from bench import compiled
from bench.cases.attention import Case
from bench.cases.methods import METHODS, OUR_METHODS
from bench.compiled import selected_for
from bench.measure import timing
from tools.stub_gpu import stub_gpu
from triton_relattn import _implementations as implementations
from triton_relattn import check, grids, testing
from triton_relattn.kernels import tuning
from triton_relattn.testing import Inputs

from . import checks

NAME = "no GPU: a stub of its driver"
NOTE = "no GPU: times are not real, and results were not compared"
FAULT = "RELATTN_STUB_FAULT"


class _OnTheCPU(TorchFunctionMode):
    """Give the CPU to whatever asks for a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.device:
            return _moved(torch.device(*args, **(kwargs or {})))
        return function(*map(_moved, args), **{name: _moved(value) for name, value in (kwargs or {}).items()})


def _moved(argument: Any) -> Any:
    is_gpu = isinstance(argument, torch.device | str) and str(argument).partition(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu else argument


class _Generator(torch.Generator):
    """A generator of the CPU, whatever it is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device=_moved(device))  # type: ignore[call-arg]


class _Event(mock.MagicMock):
    """Events with a made-up time between them."""

    times = itertools.count(1)

    def elapsed_time(self, other: _Event) -> float:
        return 1.0 + 1e-4 * next(self.times)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, L2_cache_size=50 << 20, warp_size=32
)
TORCH_CUDA = {
    "is_available": _returns(True),
    "is_initialized": _returns(True),
    "synchronize": _returns(None),
    "get_device_name": _returns(NAME),
    "get_device_capability": _returns((9, 0)),
    "get_device_properties": _returns(PROPERTIES),
    "current_device": _returns(0),
    "device_count": _returns(1),
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(1 << 20),
    "reset_peak_memory_stats": _returns(None),
    "empty_cache": _returns(None),
    "mem_get_info": _returns((79 << 30, 80 << 30)),
    "_sleep": _returns(None),
    "Event": _Event,
    "current_stream": _returns(mock.MagicMock()),
    "Stream": mock.MagicMock,
    "stream": _returns(nullcontext()),
    "CUDAGraph": mock.MagicMock,
    "graph": _returns(nullcontext()),
}


def _judged(results: dict[str, torch.Tensor], *_: Any) -> dict[str, Any]:
    """Judge all results as right, but for the one that has the fault."""
    row: dict[str, Any] = dict.fromkeys(results, "0")
    if (fault := os.environ.get(FAULT)) in results:
        return {**row, "status": "FAILED", "message": f"{fault}: a fault that was asked for"}
    return {**row, "status": "ok", "message": ""}


class _Nothing(torch.autograd.Function):
    """A method that computes nothing, in either direction."""

    @staticmethod
    def forward(context: Any, *inputs: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        context.save_for_backward(*inputs)
        return torch.empty_like(inputs[0])

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> Any:
        return tuple(torch.empty_like(saved) for saved in context.saved_tensors)


def _computes_nothing(case: Case) -> Callable[[Inputs], torch.Tensor]:
    return lambda inputs: _Nothing.apply(*inputs[:3], *case.tables(inputs).values())


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Within, this process takes a stub for an H100."""
    choose = implementations.choose_implementation

    def chosen(name: str | None, *others: Any) -> Any:
        return implementations.TRITON if name in (None, "triton") else choose(name, *others)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, value) for name, value in TORCH_CUDA.items()),
        (torch, "Generator", _Generator),
        (torch, "equal", _returns(True)),
        (torch.Tensor, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool)),
        (implementations, "choose_implementation", chosen),
        (grids, "choose_implementation", chosen),
        (compiled, "can_run_triton", _returns(True)),
        (checks, "judge", _judged),
        (check, "judge", _judged),
        (check, "can_run_triton", _returns(True)),
        (check, "remember_check", _returns(True)),
        (testing, "assert_within_budget", _returns(None)),
        (Case, "inputs", lambda case, *_: case.empty()),
        (tuning, "kernels_are_interpreted", _returns(True)),
        (timing, "distance", _returns(0.0)),
        (timing, "FLUSH_BYTES", 1),
        (timing, "expected_of_one_head", _returns(timing.Expected((torch.empty(0),) * 4, "nothing"))),
    ]
    others = {name: replace(METHODS[name], make=_computes_nothing) for name in METHODS if name not in OUR_METHODS}
    with ExitStack() as stack:
        stack.enter_context(stub_gpu(records=False))
        stack.enter_context(selected_for("sm_90"))
        stack.enter_context(_OnTheCPU())
        stack.enter_context(mock.patch.dict(METHODS, others))
        for owner, attribute, value in replaced:
            stack.enter_context(mock.patch.object(owner, attribute, value))
        yield

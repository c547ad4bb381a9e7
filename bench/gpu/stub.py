"""The whole program without a GPU: torch takes "cuda" for the CPU, kernels are launched on a stub of the driver, times
are made up.

So it is seen before there is a GPU that no part raises, and that every file is written. Kernels are compiled and launched, but
not run: what is in the memory of their results is not compared, and no figure means anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from bench.cases import configurations, methods
from bench.compiled import selected_for
from bench.measure import timing
from tools.stub_gpu import stub_gpu
from triton_relattn import _implementations as implementations
from triton_relattn import grids

from . import checks, measurements

NAME = "no GPU: a stub of its driver"
SAYS = "no GPU: times are not real, and results were not compared"


class _OnTheCPU(TorchFunctionMode):
    """Whatever asks for a GPU gets the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = (_moved(each) for each in args), {name: _moved(each) for name, each in (kwargs or {}).items()}
        return function(*args, **kwargs)


def _moved(argument: Any) -> Any:
    is_gpu = (isinstance(argument, torch.device) and argument.type == "cuda") or (
        isinstance(argument, str) and argument.partition(":")[0] == "cuda"
    )
    return torch.device("cpu") if is_gpu else argument


class _Generator(torch.Generator):
    """A generator of the CPU, whatever it is asked for."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device=_moved(device))  # type: ignore[call-arg]


class _Event:
    """Events a made-up time apart."""

    times = itertools.count(1)

    def __init__(self, enable_timing: bool = False) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 1.0 + 1e-4 * next(self.times)


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


PROPERTIES = SimpleNamespace(
    name=NAME, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, L2_cache_size=50 << 20, warp_size=32
)
OF_TORCH = {
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
    return {**dict.fromkeys(results, "0"), "status": "ok", "message": ""}


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Within, this process takes a stub for an H100."""
    of_name = implementations.choose_implementation

    def chosen(name: str | None, *others: Any, **options: Any) -> Any:
        return implementations.TRITON if name in (None, "triton") else of_name(name, *others, **options)

    def uncompiled() -> Any:
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention

    with ExitStack() as stack:
        stack.enter_context(stub_gpu(records=False))
        stack.enter_context(selected_for("sm_90"))
        stack.enter_context(_OnTheCPU())
        replaced: list[tuple[Any, str, Any]] = [(torch.cuda, name, value) for name, value in OF_TORCH.items()]
        replaced += [(torch.cuda.profiler, name, _returns(None)) for name in ("start", "stop")]
        replaced += [(implementations, "choose_implementation", chosen), (grids, "choose_implementation", chosen)]
        replaced += [(checks, "judge", _judged), (measurements, "judge", _judged), (timing, "distance", _returns(0.0))]
        replaced += [(methods, "_compiled_flex_attention", uncompiled), (configurations, "can_run_triton", _returns(True))]
        replaced += [(torch, "Generator", _Generator), (torch, "equal", _returns(True))]
        replaced += [(torch.Tensor, "isfinite", lambda tensor: torch.ones_like(tensor, dtype=torch.bool))]
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield

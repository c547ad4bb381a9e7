"""Calls through Triton's own launcher on a stub of CUDA's driver, which records what a GPU would receive.

tests/compile/test_launches.py checks the arguments of launches for all GPUs without a driver. Here they pass through the
launcher's C code for NVIDIA GPUs, which packs arguments, loads modules and launches kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from bench.compiled import selected_for
from tests.compile.calls import call, call_of
from tests.samples import Sample
from tools.stub_gpu import StubGPU, stub_gpu
from triton_relattn import decomposed_relative_attention
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose own driver is loaded")


@pytest.fixture(autouse=True)
def configurations_of_a_gpu() -> Iterator[None]:
    with selected_for("sm_90"):
        yield


Work = Callable[[], object]


def on_a_grid() -> Work:
    leaves = [torch.zeros(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    leaves += [torch.zeros(2 * side - 1, 64, dtype=torch.bfloat16, requires_grad=True) for side in (5, 6)]
    attend: Any = decomposed_relative_attention
    return lambda: attend(*leaves, (5, 6)).sum().backward()


BACKWARD = {"forward", "delta", "dkv"}
PER_HEAD = {*BACKWARD, "stored_dq", "dtable"}
FULL = {*PER_HEAD, "table_gradient"}
SHORT = {*FULL, "dq"}
FIRST: dict[str, Any] = {"positions": (-4095, 0, "clamp"), "query_offset": 4095, "is_causal": True, "requires_grad": ()}
CALLS: dict[str, tuple[Sample | None, set[str]]] = {
    "full": (call(), FULL),
    "no table": (call(table="none"), {*BACKWARD, "dq"}),
    "clamp": (call(200, positions=(-4, 4, "clamp"), per_head=("rel_key",)), SHORT),
    "zero, values": (call(tables=("rel_key", "rel_value"), positions=(-4, 4, "zero")), SHORT),
    "bias": (call(tables=("rel_bias",), per_head=("rel_bias",), scale=1.0), PER_HEAD),
    "p2c": (call(tables=("rel_key", "rel_p2c"), positions=(-16, 16, "clamp")), {*SHORT, "far_keys", "dp2c"}),
    "own query, grouped heads, causal": (call(rel_width=16, group=2, is_causal=True), FULL),
    "padding, softcap, dropout": (call(batch=2, key_lengths=(64, 5), softcap=20.0, dropout_p=0.1), FULL),
    "mask, window": (call(mask="bool", mask_shape=(64, 64), window_size=(20, 3)), FULL),
    "float32": (call(dtype="float32"), FULL),
    "128 wide, long": (call(1040, key_heads=1, width=128, value_width=128), FULL),
    "decode, split keys": (call(1, num_keys=4096, **FIRST), {"forward", "merge"}),
    "grid": (None, {"grid_forward", "grid_dq", "grid_dkv"}),
}


class Reads(TorchDispatchMode):
    """Records operations that need values on the host: on a GPU they wait, and prevent capturing a graph."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        self.found += [name] * (name in self.NAMES)
        return func(*args, **(kwargs or {}))


def agree(gpu: StubGPU) -> None:
    """Assert that the driver received the launcher's arguments, and plausible grids."""
    for launch in gpu.launches:
        assert launch.parameters == launch.given and launch.parameters, launch
        assert launch.grid[0] > 0 and launch.threads in (64, 128, 256), launch


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver receives all launches with their arguments. A second call launches the same without compiling or loading, and a
    graph can be captured: it waits for nothing and reads no values (of what is not padded)."""
    sample, kernels = CALLS[name]
    work = on_a_grid() if sample is None else call_of(sample).run
    with stub_gpu() as gpu:
        torch.manual_seed(1)  # of dropout
        work()
        agree(gpu)
        first, loaded = list(gpu.launches), (gpu.modules, gpu.waits)
        assert {launch.name for launch in first} == kernels
        gpu.launches.clear()
        monkeypatch.setattr(JITFunction, "_do_compile", None)  # calling it fails
        work()
        agree(gpu)
        assert (gpu.modules, gpu.waits) == loaded
        expected, again = (
            [
                (launch.name, launch.grid, launch.threads, launch.shared_bytes, launch.device, launch.numbers())
                for launch in launches
            ]
            for launches in (first, gpu.launches)
        )
        assert expected == again
        with Reads() as reads:
            work()
        assert (gpu.modules, gpu.waits) == loaded and (reads.found == [] or "padding" in name)


def test_little_shared_memory() -> None:
    """A configuration that does not fit in 90,000 bytes is replaced with a warning; the next call uses the smaller one."""
    work = call_of(call(256, width=128, value_width=128)).run
    with stub_gpu(most_shared=90_000) as gpu:
        with pytest.warns(RuntimeWarning, match="does not fit this GPU .*90000.* is used instead"):
            work()
        agree(gpu)
        assert max(launch.shared_bytes for launch in gpu.launches) <= 90_000
        modules = gpu.modules
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            work()
        assert gpu.modules == modules


def test_nothing_fits() -> None:
    """Triton's error is raised if no smaller configuration is left, and at once for a requested configuration."""
    tensors, spec = call_of(call(key_heads=1)).resolved()
    with stub_gpu(most_shared=10):
        with pytest.raises(OutOfResources), pytest.warns(RuntimeWarning, match="does not fit"):
            forward(tensors, spec)
        with pytest.raises(OutOfResources), warnings.catch_warnings():
            warnings.simplefilter("error")
            forward(tensors, spec, TileConfig(64, 64, 4, 2))


def test_two_devices_and_streams() -> None:
    """A kernel is loaded for each device, and launched on the current one, on its current stream."""
    work = call_of(call(table="none")).run
    loaded = []
    with stub_gpu() as gpu:
        first, second = gpu.devices
        for device, stream in ((first, 0), (second, 77), (first, 78)):
            gpu.device, gpu.stream = device, stream
            gpu.launches.clear()
            before = gpu.modules
            work()
            loaded.append(gpu.modules - before)
            assert {(launch.device, launch.stream) for launch in gpu.launches} == {(device, stream)}
    assert loaded == [len(gpu.launches)] * 2 + [0]


def test_threads() -> None:
    """Concurrent threads launch with their own arguments."""
    works = [call_of(call(32 + 16 * number, "none", requires_grad=())).run for number in range(4)]
    with stub_gpu() as gpu, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(5) for work in works]:
            future.result()
        agree(gpu)
    assert len(gpu.launches) == 20

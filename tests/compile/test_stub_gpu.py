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
from tools.stub_gpu import StubGPU, stub_gpu
from triton_relattn import RelativePositions, decomposed_relative_attention, fused_relative_attention, grids, testing
from triton_relattn import _implementations as implementations
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.tile_config import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, whose own driver is loaded")


@pytest.fixture(autouse=True)
def poisoned_memory() -> None:
    """Disabled: nothing is written to results."""


@pytest.fixture(autouse=True)
def kernels_for_an_absent_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls use the kernels in configurations for sm_90, with empty caches."""
    for module in (implementations, grids):
        monkeypatch.setattr(module, "choose_implementation", lambda *_, **__: implementations.TRITON)
    selection.forget()
    with selected_for("sm_90"):
        yield
    selection.forget()


Work = Callable[[], object]


def call(num_queries: int = 64, num_keys: int | None = None, *, grad: bool = True, **given: Any) -> Work:
    """A call and its backward, with sizes of testing.make_inputs and arguments of the operator."""
    num_keys = num_queries if num_keys is None else num_keys
    sizes: dict[str, Any] = {"batch": 1, "heads": 2, "width": 64, "num_rows": num_queries + num_keys - 1, "dtype": torch.bfloat16}
    names: tuple[str, ...] = ("batch", "heads", "width", "key_heads", "per_head", "num_rows", "dtype")
    names += ("rel_width", "rel_key", "rel_value", "rel_bias", "rel_p2c")
    sizes |= {name: given.pop(name) for name in names if name in given}
    inputs = testing.make_inputs(**sizes, num_queries=num_queries, num_keys=num_keys, seed=1)
    attend: Any = fused_relative_attention
    if grad:
        return lambda: testing.forward_backward(attend, inputs, return_lse=True, **given)
    return lambda: attend(*inputs[:4], **inputs.terms(), **given)


def on_a_grid() -> Work:
    leaves = [torch.zeros(1, 2, 30, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    leaves += [torch.zeros(2 * side - 1, 64, dtype=torch.bfloat16, requires_grad=True) for side in (5, 6)]
    attend: Any = decomposed_relative_attention
    return lambda: attend(*leaves, (5, 6)).sum().backward()


BACKWARD = {"forward", "delta", "dkv"}
PER_HEAD = {*BACKWARD, "stored_dq", "dtable"}
FULL = {*PER_HEAD, "table_gradient"}
SHORT = {*FULL, "dq"}
CALLS: dict[str, tuple[Callable[[], Work], set[str]]] = {
    "full": (call, FULL),
    "no table": (lambda: call(num_rows=None), {*BACKWARD, "dq"}),
    "clamp": (lambda: call(200, num_rows=9, per_head=True), SHORT),
    "zero, values": (
        lambda: call(num_rows=9, rel_value=True, positions=RelativePositions(-4, 4, "zero")),
        SHORT,
    ),
    "bias": (lambda: call(rel_key=False, rel_bias=True, per_head=True, scale=1.0), PER_HEAD),
    "p2c": (
        lambda: call(rel_p2c=True, num_rows=33, positions=RelativePositions(-16, 16)),
        {*SHORT, "far_keys", "dp2c"},
    ),
    "own query, grouped heads, causal": (
        lambda: call(rel_width=16, heads=4, key_heads=2, enable_gqa=True, is_causal=True),
        FULL,
    ),
    "padding, softcap, dropout": (
        lambda: call(batch=2, key_lengths=torch.tensor([64, 5]), softcap=20.0, dropout_p=0.1),
        FULL,
    ),
    "mask, window": (
        lambda: call(attn_mask=torch.ones(64, 64, dtype=torch.bool), window_size=(20, 3)),
        FULL,
    ),
    "float32": (lambda: call(dtype=torch.float32), FULL),
    "128 wide, long": (lambda: call(1040, heads=1, width=128), FULL),
    "decode, split keys": (
        lambda: call(
            1, 4096, grad=False, num_rows=4096, positions=RelativePositions(-4095, 0), query_offset=4095, is_causal=True
        ),
        {"forward", "merge"},
    ),
    "grid": (on_a_grid, {"grid_forward", "grid_dq", "grid_dkv"}),
}


def agree(gpu: StubGPU) -> None:
    """Assert that the driver received the launcher's arguments, and plausible grids."""
    for launch in gpu.launches:
        assert launch.parameters == launch.given and launch.parameters, launch
        assert launch.grid[0] > 0 and launch.threads in (64, 128, 256), launch


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver receives all launches with their arguments. A second call launches the same without compiling or loading."""
    make, kernels = CALLS[name]
    work = make()
    with stub_gpu() as gpu:
        torch.manual_seed(1)  # of dropout
        work()
        agree(gpu)
        first, modules = list(gpu.launches), gpu.modules
        assert {launch.name for launch in first} == kernels
        gpu.launches.clear()
        monkeypatch.setattr(JITFunction, "_do_compile", None)  # calling it fails
        work()
        agree(gpu)
        assert gpu.modules == modules
    expected, again = (
        [(launch.name, launch.grid, launch.threads, launch.shared_bytes, launch.device, launch.numbers()) for launch in launches]
        for launches in (first, gpu.launches)
    )
    assert expected == again


def test_parts_of_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is launched with different pointers, by kernels that are loaded once."""
    monkeypatch.setenv(planning.VARIABLE, str(2 * 1024**2))
    work = call(512, heads=8)
    with stub_gpu() as gpu:
        work()
        agree(gpu)
    dkv_launches = [launch for launch in gpu.launches if launch.name == "dkv"]
    assert len(dkv_launches) > 1 and len({launch.parameters for launch in dkv_launches}) == len(dkv_launches)


def test_little_shared_memory() -> None:
    """A configuration that does not fit in 90,000 bytes is replaced with a warning; the next call uses the smaller one."""
    work = call(256, width=128)
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
    inputs = testing.make_inputs(1, 1, 64, 64, 64, num_rows=127, dtype=torch.bfloat16, seed=1)
    tensors, spec = validation.resolve(Arguments(*inputs[:4]))  # type: ignore[arg-type]
    with stub_gpu(most_shared=10):
        with pytest.raises(OutOfResources), pytest.warns(RuntimeWarning, match="does not fit"):
            forward(tensors, spec)
        with pytest.raises(OutOfResources), warnings.catch_warnings():
            warnings.simplefilter("error")
            forward(tensors, spec, TileConfig(64, 64, 4, 2))


def test_two_devices_and_streams() -> None:
    """A kernel is loaded for each device, and launched on the current one, on its current stream."""
    work = call(num_rows=None)
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


class Reads(TorchDispatchMode):
    """Records operations that need values on the host: on a GPU they wait, and prevent capturing a graph."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in self.NAMES:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "name", ["full", "p2c", "own query, grouped heads, causal", "mask, window", "decode, split keys", "grid"]
)
def test_a_graph_can_be_captured(name: str) -> None:
    """After a warm-up, a call loads no modules, waits for nothing and reads no values."""
    work = CALLS[name][0]()
    with stub_gpu() as gpu:
        work()
        modules, waits = gpu.modules, gpu.waits
        with Reads() as reads:
            work()
        assert (gpu.modules, gpu.waits, reads.found) == (modules, waits, [])


def test_reads_are_noticed() -> None:
    with Reads() as reads:
        torch.ones(1).item()
        torch.ones(3).nonzero()
    assert reads.found == ["_local_scalar_dense", "nonzero"]


def test_threads() -> None:
    """Concurrent threads launch with their own arguments."""
    works = [call(32 + 16 * number, num_rows=None, grad=False) for number in range(4)]
    with stub_gpu() as gpu, ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work) for _ in range(5) for work in works]:
            future.result()
        agree(gpu)
    assert len(gpu.launches) == 20

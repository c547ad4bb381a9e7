"""Triton's own launcher, its C code included, on a stub of CUDA's driver: kernels are compiled, loaded and launched, but not run.

absent_gpu.py replaces launches; here they reach cuLaunchKernelEx. The stub records what a GPU would receive: the values of a
kernel's parameters, grid, shared memory, stream and context. It returns the errors that a driver would return.

with stub_gpu() as gpu:
    kernel[grid](...)  # any Triton kernel, on CPU tensors
gpu.launches[0].parameters

Not usable in a process with TRITON_INTERPRET=1, nor where there is a GPU: the driver is loaded once in a process.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import os
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.compiler import compiler
from triton.runtime.driver import driver

from ..absent_gpu import AbsentGPU, gpu_target

SOURCE = Path(__file__).with_name("libcuda.c")
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "fp64": "d", "u64": "Q"}
FORMATS |= {"u1": "B", "u8": "B", "u16": "H", "u32": "I"}
"""How Triton's launcher stores a number of each type; a pointer is a "Q"."""


@dataclass(frozen=True)
class Launch:
    """A launch as the driver received it. given: the arguments in Python, in the order of parameters."""

    name: str
    device: int
    stream: int
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    types: tuple[str, ...]
    parameters: tuple[float, ...]
    given: tuple[float, ...]

    def numbers(self) -> list[float]:
        """Return the parameters that are not pointers."""
        return [value for kind, value in zip(self.types, self.parameters, strict=True) if not kind.startswith("*")]


class _Config(ctypes.Structure):
    """The beginning of CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_bytes")),
        ("stream", ctypes.c_void_p),
    )


OBSERVER = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))


@functools.cache
def library() -> ctypes.CDLL:
    """Build the stub, and load it before Triton loads a driver, so that Triton's C code finds it by its name.

    Raises:
        RuntimeError: there is a GPU, or no C compiler.
    """
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: its own driver is loaded")
    cc = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if cc is None:
        raise RuntimeError("the stub of the driver needs a C compiler")
    folder = tempfile.mkdtemp(prefix="stub-gpu-")
    atexit.register(shutil.rmtree, folder)
    built = f"{folder}/libcuda.so.1"
    include = Path(nvidia.__file__).with_name("include")
    command = [cc, "-shared", "-fPIC", "-O1", f"-I{include}", "-Wl,-soname,libcuda.so.1", str(SOURCE), "-o", built]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(built, mode=ctypes.RTLD_GLOBAL)
    triton.knobs.nvidia.libcuda_path = folder
    loaded.stub_name.restype = ctypes.c_char_p
    for name in ("stub_modules", "stub_launches", "stub_waits"):
        getattr(loaded, name).restype = ctypes.c_long
    loaded.stub_time.argtypes, loaded.stub_time.restype = [ctypes.c_long], ctypes.c_double
    for name in ("stub_name", "stub_device"):
        getattr(loaded, name).argtypes = [ctypes.c_void_p]
    return loaded


_numbers = itertools.count()
"""Of devices. Triton keeps what it has loaded by their numbers."""


@dataclass
class StubGPU:
    """What has been launched. devices: two that nothing was loaded on before. device, stream: the current ones, which tests may
    change. errors: of the observer of launches."""

    library: ctypes.CDLL
    launches: list[Launch] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    devices: tuple[int, int] = field(default_factory=lambda: (next(_numbers), next(_numbers)))
    device: int = -1
    stream: int = 0

    def __post_init__(self) -> None:
        self.device = self.devices[0]

    @property
    def modules(self) -> int:
        """The number of modules loaded in this process."""
        return int(self.library.stub_modules())

    @property
    def waits(self) -> int:
        """The number of operations that would have waited for the GPU."""
        return int(self.library.stub_waits())

    def count(self) -> int:
        """Return how many launches there have been in this process."""
        return int(self.library.stub_launches())

    def starts(self, first: int) -> list[float]:
        """Return when launches, from that number on, reached the driver: time.perf_counter(), of the last 4,096."""
        return [float(self.library.stub_time(number)) for number in range(first, self.count())]

    def limit_shared_memory(self, size: int) -> None:
        """Limit the shared memory of programs to this many bytes."""
        self.library.stub_set_most_shared(size)
        compiler.max_shared_mem.cache_clear()


def flat(types: Any, values: Any) -> Iterator[tuple[str, Any]]:
    """Return type and value of each parameter, with groups flattened and without constants."""
    for kind, value in zip(types, values, strict=True):
        if isinstance(kind, tuple):
            yield from flat(kind, value)
        elif kind != "constexpr":
            yield kind, value


def number(kind: str, value: Any) -> float:
    """Return the expected parameter: a pointer, or the value in its type."""
    if kind.startswith("*"):
        return value if isinstance(value, int) else int(value.data_ptr())
    rounded: float = struct.unpack(FORMATS[kind], struct.pack(FORMATS[kind], value))[0]
    return rounded


def stored(kind: str, address: int) -> float:
    """Return the value of a parameter in memory."""
    layout = "Q" if kind.startswith("*") else FORMATS[kind]
    value: float = struct.unpack(layout, ctypes.string_at(address, struct.calcsize(layout)))[0]
    return value


_given = threading.local()
"""What the launch that a thread is at was given: types and values of the parameters."""


class _Launcher(nvidia.CudaLauncher):  # type: ignore[misc]
    """Triton's launcher, which first records its arguments."""

    def __init__(self, source: Any, metadata: Any) -> None:
        super().__init__(source, metadata)
        self.types = tuple(source.signature.values())

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, stream: int, function: int, *others: Any) -> None:
        given = others[len(others) - len(self.types) :]
        _given.parameters = [(kind, number(kind, value)) for kind, value in flat(self.types, given)]
        super().__call__(grid_x, grid_y, grid_z, stream, function, *others)


class _Driver(AbsentGPU):
    """Answers as Triton's driver for NVIDIA's GPUs does, from the stub."""

    def __init__(self, gpu: StubGPU, records: bool) -> None:
        super().__init__(gpu_target("sm_90"))
        self.gpu, self.utils = gpu, nvidia.CudaUtils()
        self.launcher_cls = _Launcher if records else nvidia.CudaLauncher

    def get_current_device(self) -> int:
        self.gpu.library.stub_set_device(self.gpu.device)
        return self.gpu.device

    def set_current_device(self, device: int) -> None:
        self.gpu.device = device

    def get_current_stream(self, device: int) -> int:
        return self.gpu.stream

    def note(self, config: Any, function: int, parameters: Any) -> None:
        """Called by the stub for a launch that it takes."""
        launch, kinds = config.contents, _given.parameters
        values = [stored(kind, parameters[at]) for at, (kind, _) in enumerate(kinds)]
        self.gpu.launches.append(
            Launch(
                self.gpu.library.stub_name(function).decode().removesuffix("_kernel"),
                int(self.gpu.library.stub_device(function)),
                launch.stream or 0,
                (launch.grid_x, launch.grid_y, launch.grid_z),
                launch.block_x,
                launch.shared_bytes,
                tuple(kind for kind, _ in kinds),
                tuple(values),
                tuple(value for _, value in kinds),
            )
        )


@contextmanager
def stub_gpu(most_shared: int = 232448, records: bool = True) -> Iterator[StubGPU]:
    """Make Triton launch on two simulated sm_90 GPUs with this limit of shared memory in bytes.

    records: whether launches are looked at; without, a launch takes the time that it takes, and starts() has it.

    Raises:
        RuntimeError: there is a GPU, or no C compiler.
    """
    gpu = StubGPU(library())
    stub = _Driver(gpu, records)

    def observed(*launch: Any) -> None:
        try:
            stub.note(*launch)
        except Exception as error:  # which C code cannot pass on
            gpu.errors.append(error)

    observer = OBSERVER(observed)
    active = driver._active
    gpu.limit_shared_memory(most_shared)
    gpu.library.stub_set_observer(observer if records else OBSERVER())
    driver.set_active(stub)
    try:
        yield gpu
    finally:
        driver._active = active
        gpu.library.stub_set_observer(OBSERVER())
        gpu.limit_shared_memory(232448)
    if gpu.errors:
        raise gpu.errors[0]

"""The fastest configuration of every kernel of a call, timed on this GPU and kept in the user's profile: later calls take it.

``python -m triton_relattn tune`` does it for a shape, :func:`tune` for any call; ``python -m bench tune``, from a clone, for the
calls of the benchmark.
"""

from __future__ import annotations

import csv
import io
import os
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from .._core import validation
from .._core.arguments import Arguments
from .._core.dtypes import keeps_residual
from .._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from . import kernels_are_interpreted
from .backward import backward
from .call import call_of
from .config import architectures, selection
from .config.tile_config import KERNELS, TileConfig, candidates
from .forward import forward

GRADIENTS = {
    "forward": (),
    "dkv": ("key", "value"),
    "stored_dq": ("query", "rel_query"),
    "dq": ("query", "rel_query"),
    "dtable": ("rel_key", "rel_value", "rel_bias"),
    "dp2c": ("rel_p2c",),
}
"""The gradients for which the backward launches a kernel, after those that have to come first."""
LEAST_GAIN = 0.02  # the share of the default's time by which another configuration must be faster: less may be noise
ROUNDS, WARM_UP, MILLISECONDS = 3, 5, 30
LARGEST_DIFFERENCE = {torch.float32: 2.0**-8, torch.float16: 2.0**-7, torch.bfloat16: 2.0**-5}
"""Between results of two configurations, as a share of the largest number: some ten roundings, of tf32 in float32. A wrong tile
differs by about one."""


class Tuned(NamedTuple):
    """What was found for a kernel. milliseconds: medians, of a gradient's kernel with what runs before it. tried: how many
    configurations ran and were right, the default among them."""

    kernel: str
    default: TileConfig
    best: TileConfig
    default_milliseconds: float
    milliseconds: float
    tried: int

    def __str__(self) -> str:
        gain = f"{shown(self.default)} stays" if self.best == self.default else f"{shown(self.default)} -> {shown(self.best)}"
        return f"{self.kernel:10} {self.default_milliseconds:8.3f} -> {self.milliseconds:8.3f} ms, {self.tried} tried: {gain}"


def tune(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    most: int = 12,
    profile: Path | None = None,
    report: Callable[[Tuned], None] | None = None,
    **arguments: Any,
) -> list[Tuned]:
    """Time the configurations nearest to the default one for every kernel of a call, and keep the fastest that is right.

    They go into the user's profile (``TRITON_RELATTN_CACHE``), from which calls of this kind, dtype, width and bucket of lengths
    (up to 512, 2,048, 8,192, longer) have them from now on, in this process and in others. It takes a few minutes, mostly
    compiling.

    Args:
        query, key, value, rel_key, arguments: as of :func:`triton_relattn.fused_relative_attention`, on the GPU. Their values
            do not matter, only shapes, dtypes, and strides. ``dropout_p`` does not count.
        most: configurations of each kernel to time.
        profile: the file to write, in place of the user's.
        report: called with each kernel's result as soon as it is known.

    Returns:
        One per kernel, in the order in which they run.

    Raises:
        RuntimeError: the tensors are not on a GPU.
        OSError: the profile cannot be written.
    """
    if query.device.type != "cuda" and not kernels_are_interpreted():
        raise RuntimeError(f"only a GPU can be tuned, and query is on {query.device}")
    path = profile or profile_of(query.device)
    arguments.pop("dropout_p", None)
    found = []
    with torch.no_grad():
        tensors, spec = validation.resolve(Arguments(query, key, value, rel_key, **arguments))
        for kernel in kernels_of(tensors, call_of(tensors, spec).coverage):
            found.append(_tune(kernel, tensors, spec, most, path))
            if report is not None:
                report(found[-1])
    return found


def profile_of(device: torch.device) -> Path:
    """Return the path of the user's profile for a device; OSError if the user has no folder for it."""
    path = selection.profile_path(architectures.architecture(device))
    if path is None:
        raise OSError("there is no folder for the profile: name one by TRITON_RELATTN_CACHE")
    return path


def kernels_of(tensors: AttentionTensors, coverage: str) -> list[str]:
    """Return the kernels of KERNELS that a call and its backward launch, first to last. coverage: of its tables (Call)."""
    is_full = coverage == "full"
    launches = {
        "stored_dq": is_full or tensors.rel_key is not None,
        "dtable": any(table is not None for table in (tensors.rel_key, tensors.rel_bias, tensors.rel_value)),
        "dp2c": tensors.rel_p2c is not None,
        "dq": not is_full,
    }
    return [kernel for kernel in KERNELS if launches.get(kernel, True)]


def _tune(kernel: str, tensors: AttentionTensors, spec: AttentionSpec, most: int, path: Path) -> Tuned:
    """Find the best configuration of a kernel, and save it."""
    call = call_of(tensors, spec)
    default = selection.tables(call.arch).select(kernel, call.conditions, with_profile=False)
    saved = run_forward(tensors, spec)
    run = partial(run_kernel, kernel, tensors, spec, torch.randn_like(saved[0]), saved)
    expected = run(default)
    near = nearest(kernel, call.arch, call.coverage != "no table", default)[:most]
    tiles = [default, *(config for config in near if _is_right(run, config, expected))]
    times = timed_in_turn([partial(run, config) for config in tiles])
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] >= (1 - LEAST_GAIN) * times[0]:
        best = 0
    row = selection.row_of({"kernel": kernel, **call.conditions}, tiles[best], times[best], times[0])
    save(path, call.arch, row, _provenance(tensors.query.device))
    selection.forget()
    return Tuned(kernel, default, tiles[best], times[0], times[best], len(tiles))


def nearest(kernel: str, arch: str, has_table: bool, default: TileConfig) -> list[TileConfig]:
    """Return every valid configuration but the default one, the nearest to it first."""

    def steps(config: TileConfig) -> int:
        """Count the doublings, stages, and kinds of carrying, of rotating and of limits that lie between it and the default."""
        sizes = ((getattr(config, name), getattr(default, name)) for name in ("block_m", "block_n", "num_warps"))
        doublings = sum(abs(one.bit_length() - other.bit_length()) for one, other in sizes)
        kinds = sum(getattr(config, name) != getattr(default, name) for name in ("carry", "rotation", "max_registers"))
        return doublings + abs(config.num_stages - default.num_stages) + kinds

    return sorted((config for config in candidates(kernel, arch, has_table) if config != default), key=steps)


def run_forward(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return out, softmax_stats and the residual of out."""
    out, _, softmax_stats, rounding = forward(tensors, spec, keeps_residual=keeps_residual(tensors))
    return out, softmax_stats, rounding


def run_kernel(
    kernel: str,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    d_out: torch.Tensor,
    saved: Sequence[Any],
    config: TileConfig,
) -> list[torch.Tensor]:
    """Run a kernel in a configuration and return its results. saved: as run_forward returns it."""
    if kernel == "forward":
        return list(forward(tensors, spec, config)[:2])
    wanted = [name in GRADIENTS[kernel] for name in DIFFERENTIABLE]
    out, softmax_stats, rounding = saved
    gradients = backward(d_out, None, out, softmax_stats, tensors, spec, wanted, {kernel: config}, residual=rounding)
    return [gradient for gradient in gradients if gradient is not None]


def _is_right(run: Callable[[TileConfig], list[torch.Tensor]], config: TileConfig, expected: Sequence[torch.Tensor]) -> bool:
    """Return whether a configuration compiles, fits, and gives what the default one does."""
    try:
        results = run(config)
    except Exception:  # too much shared memory, or the assembler's own reasons
        return False
    allowed = LARGEST_DIFFERENCE[expected[0].dtype]
    for result, wanted in zip(results, expected, strict=True):
        same = result == wanted  # where both are -inf, as the lse of a query without keys
        difference = (result.float() - wanted.float()).masked_fill(same, 0.0).abs().max()
        if not difference <= allowed * wanted.float().masked_fill(wanted.isinf(), 0.0).abs().max():
            return False
    return True


def timed_in_turn(works: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median milliseconds of each: all are timed, and then all again, so that a change of clock meets all."""
    from triton import testing

    def milliseconds(work: Callable[[], object]) -> float:
        if not kernels_are_interpreted():
            return float(testing.do_bench(work, warmup=WARM_UP, rep=MILLISECONDS, return_mode="median"))
        started = time.perf_counter()
        work()
        return 1e3 * (time.perf_counter() - started)

    rounds = [[milliseconds(work) for work in works] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _provenance(device: torch.device) -> str:
    """Return the comment of a profile: where its rows come from."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return f"device: {name}, torch: {torch.__version__}, triton: {triton.__version__}, date: {now}"


def save(path: Path, arch: str, row: selection.Row, comment: str) -> None:
    """Put a row at the top of a profile, in place of one of its kind, and this comment. The file is replaced in one step, for the
    processes that read it. ValueError: selection.load would not take the row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [other for other in selection.load(path, arch) if any(other[name] != row[name] for name in selection.CONDITIONS)]
    text = io.StringIO()
    text.write(f"# {comment}\n")
    table = csv.DictWriter(text, selection.COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows([row, *others])
    content = text.getvalue().encode()
    selection.parse(content, arch)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def shown(config: TileConfig) -> str:
    """Describe a configuration briefly: queries x keys, warps, stages, what is carried, rotation, limit of registers."""
    rotation = "" if config.rotation == "gather" else f" {config.rotation}"
    limit = "" if config.max_registers is None else f" r{config.max_registers}"
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} carry {config.carry}{rotation}{limit}"

"""Time that a call takes the host, on a machine without a GPU: kernels are compiled, and launched on a stub of the driver.

For each kind of call: microseconds until the first kernel would start, forward and backward, and of the whole forward and
backward; each the least of many. Triton's launcher runs up to the driver (tools/stub_gpu). Allocations and the few operations of
torch between the kernels run on tiny tensors of the CPU, whose allocator is not the GPU's.
With ``--beside FOLDER``, another checkout in turn with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import triton  # noqa: F401 - measure imports the rest, from the checkout that it measures

KINDS = ("plain", "full", "clamp")
COLUMNS = ("first kernel", "forward", "first of backward", "backward", "both")
ROOT = Path(__file__).parents[2]
SHAPE = (1, 2, 64, 64)


def measure(kind: str, calls: int) -> dict[str, float]:
    """The COLUMNS, in microseconds."""
    import torch

    from bench.compiled import selected_for
    from tools.stub_gpu import stub_gpu
    from triton_relattn import RelativePositions, fused_relative_attention
    from triton_relattn import _implementations as implementations

    torch.set_num_threads(1)
    positions = {"plain": None, "full": RelativePositions(1 - SHAPE[2], SHAPE[2] - 1), "clamp": RelativePositions(-8, 8)}[kind]
    leaves = [torch.randn(SHAPE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    options: dict[str, Any] = {"implementation": "triton"}
    if positions is not None:
        leaves.append(torch.randn(positions.num_rows, SHAPE[3], dtype=torch.bfloat16, requires_grad=True))
        options["positions"] = positions
    kept, rows = implementations._why_no_kernels, list[tuple[float, ...]]()
    implementations._why_no_kernels = lambda *_: None
    try:
        with selected_for("sm_90"), stub_gpu(records=False) as gpu:
            for number in range(calls + 2):
                before = gpu.count()
                began = time.perf_counter()
                out = fused_relative_attention(*leaves, **options)
                middle, of_forward = time.perf_counter(), gpu.count() - before
                torch.autograd.grad(out, leaves, torch.ones_like(out))
                ended, starts = time.perf_counter(), gpu.starts(before)
                row = (starts[0] - began, middle - began, starts[of_forward] - middle, ended - middle, ended - began)
                rows += [row] * (number > 1)  # before, kernels are compiled
    finally:
        implementations._why_no_kernels = kept
    return {name: 1e6 * min(row[index] for row in rows) for index, name in enumerate(COLUMNS)}


def in_checkout(folder: Path, kind: str, calls: int) -> dict[str, float]:
    """The same of another checkout of the package, in a process of its own."""
    command = [sys.executable, __file__, kind, str(calls)]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .options import positive

    parser.add_argument("--calls", type=positive, default=300, help="calls in each round (%(default)s)")
    parser.add_argument("--rounds", type=positive, default=3, help="rounds of each kind and checkout, interleaved (%(default)s)")
    parser.add_argument("--beside", type=checkout, metavar="FOLDER", help="another checkout, to compare with")


def checkout(text: str) -> Path:
    """A parser of a folder that has the package."""
    if not (Path(text) / "triton_relattn").is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of triton_relattn")
    return Path(text).resolve()


def run(options: argparse.Namespace) -> int:
    if os.environ.get("TRITON_INTERPRET") == "1":
        print("kernels are interpreted in this process, not compiled: unset TRITON_INTERPRET")
        return 2
    folders = [ROOT, *([options.beside] if options.beside else [])]
    least: dict[tuple[str, Path], dict[str, float]] = {}
    for _ in range(options.rounds):
        for kind in KINDS:
            for folder in folders:
                found = in_checkout(folder, kind, options.calls)
                before = least.get((kind, folder), found)
                least[kind, folder] = {name: min(found[name], before[name]) for name in COLUMNS}
    from bench.report.text import table

    body = [(kind, str(folder), *(f"{values[name]:.0f}" for name in COLUMNS)) for (kind, folder), values in least.items()]
    print(table(("microseconds", "checkout", *COLUMNS), body))
    return 0


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))

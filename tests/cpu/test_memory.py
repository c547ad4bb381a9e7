"""Memory is linear in the sequence length: peak of a child process, forward and backward."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEADS, WIDTH = 8, 64
CHILD = """
import sys
import torch
from triton_relattn.testing import forward_backward, in_memory_order, make_inputs
from triton_relattn import fused_relative_attention

def status(field):
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith(field + ":"))

def run(inputs):
    forward_backward(fused_relative_attention, inputs, return_lse=True, implementation=sys.argv[2])

def inputs(length):
    heads, width = int(sys.argv[3]), int(sys.argv[4])
    made = make_inputs(1, heads, length, length, width, num_rows=2 * length - 1, dtype=torch.float32, seed=0)
    return made._replace(query=in_memory_order(made.query, 0, 2, 1, 3))

torch.set_num_threads(1)
run(inputs(64))
measured = inputs(int(sys.argv[1]))
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak so far is that of making the inputs in float64
before = status("VmRSS")
run(measured)
print(status("VmHWM") - before)
"""


def peak_bytes(length: int, implementation: str) -> int:
    """Return the peak memory of one call, forward and backward, beyond its inputs."""
    command = [sys.executable, "-c", CHILD, str(length), implementation, str(HEADS), str(WIDTH)]
    # A fixed threshold: glibc gives every freed tensor back at once, so that none is measured as part of the start.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    root = Path(__file__).parents[2]
    child = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    return int(child.stdout)


pytestmark = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads the peak from Linux's /proc")


def test_peak_grows_linearly() -> None:
    """Four times the length needs at most 4.5 times the memory, and far less than one (H, N, N) tensor."""
    short, long = peak_bytes(1024, "blockwise"), peak_bytes(4096, "blockwise")
    results = 6 * HEADS * 1024 * WIDTH * 4  # out, four gradients (the table's counts twice)
    assert short >= results // 2, "the measurement misses the results themselves"
    assert long <= 4.5 * short, f"{short} bytes at length 1024, {long} at 4096"
    assert long <= HEADS * 4096**2 * 4 / 4, f"{long} bytes at length 4096"


@pytest.mark.thorough
def test_the_measurement_sees_a_square_tensor() -> None:
    """The dense reference does keep (H, N, N) tensors, and the measurement shows it."""
    assert peak_bytes(1024, "reference") >= 2 * HEADS * 1024**2 * 4

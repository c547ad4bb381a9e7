"""Correctness tests that run before a benchmark: if one fails, nothing is measured."""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile

from ..report.rows import ROOT
from .options import available_device, existing_device

TESTS = ["tests/operator/test_papers.py", *(f"tests/cpu/test_{name}.py" for name in ("blockwise", "delta", "baselines"))]
"""Tests of the implementation that a CPU has, against the reference, and of the baselines."""


def command(device: str, folder: str) -> list[str]:
    """Runs the tests; its exit status is 0 if all pass."""
    if device == "cuda":
        return [sys.executable, "-m", "bench.gpu", "--parts", "correctness", "--seconds", "300", "--results", folder]
    return [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *TESTS]


def gate(device: str) -> int:
    """Exit status of the tests of what runs on "cpu" or "cuda"; their output if they fail."""
    what = "the kernels against float64" if device == "cuda" else ", ".join(TESTS)
    if device == "cpu" and importlib.util.find_spec("pytest") is None:
        print("The tests need pytest: pip install pytest hypothesis. --no-verify measures without them; the rows then say so.")
        return 1
    print(f"verifying: {what}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tests = subprocess.Popen(command(device, folder), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        output = b""
        while piece := tests.stdout.read1(4096):  # type: ignore[union-attr]
            output += piece
            print(piece.decode(errors="replace") if sys.stdout.isatty() else "", end="", flush=True)
        status = tests.wait()
    if not sys.stdout.isatty():
        lines = output.decode(errors="replace").strip().splitlines()
        print("\n".join(lines[-1:] if status == 0 else lines[-40:]), flush=True)
    return status


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", type=existing_device, default=available_device(), help="cpu or cuda (%(default)s)")


def run(options: argparse.Namespace) -> int:
    status = gate(options.device)
    print("all pass" if status == 0 else "The tests fail: nothing should be measured.")
    return status

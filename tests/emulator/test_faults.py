"""Faults planted into PTX are caught."""

from __future__ import annotations

import re

import pytest
import torch

from tests.emulator import faults
from tests.emulator.faults import FAULTS, Fault, Planted, plant
from tools.emulator import small_kernels
from tools.emulator.device import Emulated, emulated
from tools.emulator.ptx import UnknownPTX

LENGTH, WIDTH = 136, 64
ONLY_WGMMA = {"proxy fence removed", "wgmma.fence removed"} | {fault.name for fault in FAULTS if "wgmma" in fault.name}


def attention(target: str, planted: Planted | None = None) -> tuple[torch.Tensor, list[Emulated]]:
    """A small kernel with pipelined copies, products, shuffles and masks."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(LENGTH, WIDTH, generator=generator).bfloat16() for _ in range(3))
    o = torch.full((LENGTH, WIDTH), torch.nan, dtype=torch.bfloat16)
    with emulated(target, change=planted.change if planted else None) as launches:
        small_kernels.attention[(-(-LENGTH // 64),)](q * 0.2, k, v, o, LENGTH, D=WIDTH, BLOCK_M=64, BLOCK_N=32, num_stages=3)
    return o, launches


def is_caught(target: str, planted: Planted, right: torch.Tensor) -> bool:
    """Whether anything is reported, or the results are others."""
    try:
        results, launches = attention(target, planted)
    except UnknownPTX:
        return True
    report = launches[0].report
    differ = (results.float() - right.float()).abs() > 0.02 * (1 + right.float().abs())
    return bool(report.errors) or not report.finished or bool((differ | ~results.isfinite()).any())


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_every_kind_is_caught(target: str) -> None:
    """In one place or another; but for those that say why not."""
    right, launches = attention(target)
    assert not launches[0].report.errors
    planted = {fault: list(plant(fault, {"attention": launches[0].ptx}, each=1 if fault.missed else 30)) for fault in FAULTS}
    there = {fault.name for fault, every in planted.items() if every}
    caught = {fault.name for fault, every in planted.items() if any(is_caught(target, each, right) for each in every)}
    assert there - caught <= {fault.name for fault in FAULTS if fault.missed}
    assert (there >= ONLY_WGMMA) == (target == "sm_90") and len(there) >= 14


@pytest.mark.slow
@pytest.mark.parametrize(("target", "case"), [("sm_80", "clamp causal"), ("sm_90", "full"), ("sm_90", "zero rel_value")])
def test_in_calls_of_the_package(target: str, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Most faults that are planted in the package's own kernels are caught, and some of every kind that the emulator can see."""
    status = faults.main(["--target", target, "--case", case, "--each", "3"])
    caught, every = map(int, re.findall(r"^(\d+) of (\d+) caught", capsys.readouterr().out, re.MULTILINE)[0])
    assert status == 0 and caught > 0.7 * every


def test_planting_changes_one_instruction() -> None:
    """A fault changes one instruction of its own kernel, always the same one, and no other kernel."""
    text = "\tbar.sync \t0;\n\tadd.s32 %r1, %r2, %r3;\n\tbar.sync \t0;\n"
    fault = next(fault for fault in FAULTS if fault.name == "barrier removed")
    first, second = plant(fault, {"kernel": text}, each=5)
    assert (first.line, second.line) == (1, 3) and first.ptx.count("bar.sync") == second.ptx.count("bar.sync") == 1
    assert first.change("kernel", text) == first.ptx and first.change("another", "ret;") == "ret;"
    assert list(plant(fault, {"kernel": text}, each=1)) == list(plant(fault, {"kernel": text}, each=1))


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("waits for one copy less", "\tcp.async.wait_group \t2;", "\tcp.async.wait_group \t3;"),
        ("comparison off by one", "setp.lt.s32 %p1, %r1, %r2;", "setp.le.s32 %p1, %r1, %r2;"),
        ("operands of selp swapped", "selp.b32 \t%r1, %r2, 0, %p1;", "selp.b32 \t%r1, 0, %r2, %p1;"),
        (
            "shuffle over another distance",
            "shfl.sync.bfly.b32 \t%r1, %r2, 2, 31, -1;",
            "shfl.sync.bfly.b32 \t%r1, %r2, 1, 31, -1;",
        ),
        ("load without guard", "@%p3 ld.global.b32 %r1, [%rd1];", "ld.global.b32 %r1, [%rd1];"),
    ],
)
def test_faults_are_what_they_say(name: str, before: str, after: str) -> None:
    fault: Fault = next(fault for fault in FAULTS if fault.name == name)
    (planted,) = plant(fault, {"kernel": before}, each=1)
    assert planted.ptx == after

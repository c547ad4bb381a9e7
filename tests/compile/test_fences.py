"""Fences between copies and products of Hopper kernels, which Triton before 3.7.1 omits: kernels/fences.py."""

from __future__ import annotations

import re

import pytest
import torch
from triton import knobs

from bench.compiled import recorded_launches
from tools.absent_gpu import Launch
from tools.emulator import small_kernels as small
from triton_relattn import _implementations as implementations
from triton_relattn import fused_relative_attention, testing
from triton_relattn.kernels import fences


@pytest.fixture(autouse=True)
def an_older_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the installed Triton as one that omits fences."""
    monkeypatch.setattr(fences, "LACKS_FENCES", True)
    monkeypatch.setattr(implementations, "choose_implementation", lambda *_: implementations.TRITON)


def launches_for(target: str) -> list[Launch]:
    """Compile the kernels of two calls and their backward, a table for all pairs and a short one, with tiles large enough for
    wgmma."""
    with recorded_launches(target) as launches:
        for num_rows in (9, 639):
            inputs = testing.make_inputs(1, 1, 320, 320, 64, num_rows=num_rows, dtype=torch.bfloat16, seed=1)
            testing.forward_backward(fused_relative_attention, inputs, return_lse=True)
    return launches


def products(launch: Launch) -> list[str]:
    """Return the instruction before each fence of wgmma."""
    return re.findall(rf"(\S+;?)\s+{re.escape(fences.WGMMA)}", launch.kernel.asm["ptx"])


def test_every_product_on_hopper_has_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wgmma has a fence, and kernels with and without have different keys in Triton's caches."""
    launches = launches_for("sm_90")
    before = {launch.name: products(launch) for launch in launches}
    assert {name for name, instructions in before.items() if instructions} == {"forward", "dkv", "stored_dq", "dtable", "dq"}
    assert {instruction for instructions in before.values() for instruction in instructions} == {"fence.proxy.async.shared::cta;"}
    monkeypatch.setattr(fences, "LACKS_FENCES", False)
    assert not {launch.kernel.hash for launch in launches} & {launch.kernel.hash for launch in launches_for("sm_90")}


def test_kernels_of_others_and_other_gpus_are_left_alone() -> None:
    launches_for("sm_90")
    q = torch.zeros(64, 64, dtype=torch.bfloat16)
    with recorded_launches("sm_90") as launches:
        small.attention[(1,)](q, q, q, q, 64, D=64, BLOCK_M=64, BLOCK_N=64, num_stages=2)
        assert fences.ptx_options("sm_90") == fences.MARK
    assert launches[0].kernel.metadata.ptx_options is None
    for target in ("sm_80", "sm_100", "gfx942"):
        with recorded_launches(target):
            assert fences.ptx_options(target) is None


def test_options_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs.nvidia, "ptxas_options", "--verbose")
    with recorded_launches("sm_90"):
        assert fences.ptx_options("sm_90") == f"--verbose {fences.MARK}"

"""Which configurations the kernels take on which GPU."""

from __future__ import annotations

import pytest
import torch

from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.architectures import rounds_terms


def test_rounded_terms() -> None:
    """Terms are rounded to float16 only beside bfloat16: in float16 the gradient of a table would break the error rule by it."""
    assert rounds_terms("sm_90", torch.bfloat16)
    assert not any(rounds_terms("sm_90", dtype) for dtype in (torch.float16, torch.float32))


def test_unknown_architectures(caplog: pytest.LogCaptureFixture) -> None:
    """Small tiles that fit anywhere, and a line in the log; never another GPU's configurations by accident."""
    for arch in ("sm_75", "sm_130", "gfx1201"):
        caplog.clear()
        for kernel in selection.KERNELS:
            for width in (64, 128, 256):
                config = selection.select(kernel, arch, selection.call_kind(arch, torch.bfloat16, width, "full"))
                assert max(config.block_m, config.block_n) <= 64 and config.rotation == "gather"
                assert config.why_invalid(arch, True, kernel) is None
        assert [record.getMessage() for record in caplog.records] == [
            f"the kernels have no configurations for {arch}; small tiles are used, which are slow"
        ]


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "gfx942", "interpreter"])
def test_who_rotates_how(arch: str) -> None:
    """Rotations in registers are for where accumulators lie as registers.py says."""
    found: dict[torch.dtype, set[str]] = {}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kernel in ("forward", "dkv"):  # the others have nothing to rotate by exchanges
            for width in (64, 128):
                for coverage in ("full", "clamp", "zero"):
                    config = selection.select(kernel, arch, selection.call_kind(arch, dtype, width, coverage))
                    found.setdefault(dtype, set()).add(config.rotation)
    if arch in ("sm_100", "gfx942", "interpreter"):
        assert found == {dtype: {"gather"} for dtype in found}
    else:
        # Shared memory of 100 KB makes tiles of width 128 small, and not all of them rotate so.
        half_rotations = {"registers"} if arch in ("sm_80", "sm_90") else {"gather", "registers"}
        assert found == {torch.bfloat16: half_rotations, torch.float16: half_rotations, torch.float32: {"gather"}}

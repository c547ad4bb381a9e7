"""Small Triton kernels, compiled for all kinds of GPUs and run in the emulator, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerance import assert_at_most, assert_near
from tools.absent_gpu import HOOK_IS_IN_KEYS, recorded_launches
from tools.emulator import small_kernels as small
from tools.emulator.device import TARGETS, Emulated, emulated
from triton_relattn.kernels.config.architectures import LACKS_FENCES

has_fences = pytest.mark.skipif(LACKS_FENCES, reason="Triton before 3.7.1 omits fences, which only the package's kernels add")
KINDS = ("sm_80", "sm_90")
"""mma.sync and wgmma; other targets differ little from the first."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(low: int, high: int, *shape: int) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).int()


def launch(target: str, kernel: Any, grid: tuple[int, ...], *tensors: Any, seed: int = 0, **options: Any) -> Emulated:
    """Run a kernel, which ends without findings."""
    with emulated(target, seed) as launches:
        kernel[grid](*tensors, **options)
    (found,) = launches
    assert found.report.finished and not found.report.errors, found.report.errors
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_vectors_and_reductions(target: str) -> None:
    """Predicated loads and stores with a partial last program; reductions within and between warps."""
    x, y, z = normal(1000), normal(1000, seed=1), torch.full((1000,), torch.nan)
    assert launch(target, small.add, (4,), x, y, z, 1000, BLOCK=256).grid == (4, 1, 1)
    assert torch.equal(z, x + y)
    x, y = normal(5, 300), torch.full((5, 300), torch.nan)
    launch(target, small.softmax, (5,), x, y, 300, 300, BLOCK=512)
    assert_near("y", y, x.softmax(1))


@pytest.mark.parametrize("target", KINDS)
def test_moves(target: str) -> None:
    """Shuffles by index; a transpose through shared memory."""
    x, index = normal(64, 32, dtype=torch.float16), integers(0, 32, 64, 32)
    y = torch.zeros_like(x)
    launch(target, small.gather, (1,), x, index, y, M=64, N=32)
    assert torch.equal(y, x.gather(1, index.long()))
    x, y = normal(64, 128, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16)
    launch(target, small.transpose, (1,), x, y, M=64, N=128)
    assert torch.equal(y, x.T)


@pytest.mark.parametrize("target", KINDS)
def test_integers(target: str) -> None:
    """Division, shifts, high products, 64 bits, a reduction and a scan."""
    a, b = integers(-(2**31), 2**31, 256), integers(-998, 998, 256) | 1
    z = torch.zeros_like(a)
    launch(target, small.integers, (1,), a, b, z, 1000, BLOCK=256)
    a, b = a.long(), b.long()
    product, quotient = a * b, torch.div(a, b, rounding_mode="trunc")
    high = (a % 2**32) * (b % 2**32) >> 32
    bits = quotient ^ torch.fmod(a, b) ^ (a >> 3) ^ (b << 2) ^ product ^ high
    chosen = torch.where(product >> 20 > 1000, bits, torch.minimum(a, b))
    assert torch.equal(z, (chosen + a.clamp_min(3).sum() + b.cumsum(0)).int())


TF32 = 2.0**-10
"""The unit in the last place of TF32."""
MATMULS = [
    # dtype, precision, right matrix transposed, block_m, block_n, block_k, warps, stages
    (torch.bfloat16, "ieee", False, 64, 64, 32, 4, 1),
    (torch.bfloat16, "ieee", True, 64, 32, 64, 4, 2),
    (torch.float16, "ieee", True, 128, 64, 32, 8, 3),
    (torch.float16, "ieee", True, 64, 64, 16, 4, 2),
    (torch.float32, "tf32", False, 64, 64, 32, 4, 2),
    (torch.float32, "ieee", True, 32, 32, 32, 2, 2),
]


@has_fences
@pytest.mark.parametrize("arguments", MATMULS, ids=str)
@pytest.mark.parametrize("target", KINDS)
def test_matmul(target: str, arguments: tuple[Any, ...]) -> None:
    """Products by mma.sync, wgmma with swizzles of 128, 64 and 32 bytes, and without matrix units; pipelined or not; of matrices
    whose sizes do not fill blocks; with one stage, also with unaligned rows."""
    dtype, precision, transposed, block_m, block_n, block_k, warps, stages = arguments
    m, n, k = (130, 144, 176) if stages > 1 else (130, 135, 165)
    a, b = normal(m, k, dtype=dtype), normal(*((n, k) if transposed else (k, n)), dtype=dtype, seed=1)
    c, grid = torch.full((m, n), torch.nan), (-(-m // block_m), -(-n // block_n))
    given = (a, b, c, m, n, k, k, b.shape[1], n, transposed, precision, block_m, block_n, block_k)
    ptx = launch(target, small.matmul, grid, *given, num_warps=warps, num_stages=stages).ptx
    left, right = a.double(), (b.T if transposed else b).double()
    # TF32 truncates both operands of each product by up to one unit. Otherwise float32 sums of exact products.
    unit = TF32 if precision == "tf32" else 2 * torch.finfo(torch.float32).eps
    assert_at_most("product", (c - left @ right).abs(), 2 * unit * (left.abs() @ right.abs()))
    has = {opcode: opcode in ptx for opcode in ("wgmma.mma_async", "fence.proxy.async", "mma.sync", "cp.async")}
    if precision == "ieee" and dtype == torch.float32:
        assert "mma" not in ptx
    elif target == "sm_90":
        assert has["wgmma.mma_async"] and has["fence.proxy.async"] and not has["mma.sync"]
    else:
        assert has["mma.sync"] and has["cp.async"] == (stages > 1) and "wgmma" not in ptx


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="gfx942"), emulated("gfx942"):
        pass


def test_kernels_without_machine_code_stay_apart() -> None:
    """A kernel compiled to PTX only is not reused, from memory or disk, where machine code is needed."""
    x, sizes = normal(256), []
    for assembled in (False, True, False, True):
        with recorded_launches("sm_80", assembled=assembled) as launches:
            for _ in range(2):
                small.add[(1,)](x, x, x.clone(), 256, BLOCK=64)
        assert launches[0].kernel is launches[1].kernel and launches[0].kernel.asm["ptx"]
        sizes.append(len(launches[0].kernel.asm["cubin"]))
    assert sizes[:2] == sizes[2:] and sizes[1] > 0
    assert sizes[0] == (0 if HOOK_IS_IN_KEYS else sizes[1])

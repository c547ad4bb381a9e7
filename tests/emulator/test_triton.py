"""Small Triton kernels, compiled for all kinds of GPUs and run in the emulator, compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tolerance import assert_at_most, assert_near
from tools.absent_gpu import HOOK_IS_IN_KEYS, recorded_launches
from tools.emulator import small_kernels as small
from tools.emulator.device import TARGETS, Emulated, emulated
from triton_relattn.kernels.fences import LACKS_FENCES

has_fences = pytest.mark.skipif(LACKS_FENCES, reason="Triton before 3.7.1 omits fences, which only the package's kernels add")
KINDS = ("sm_80", "sm_90")
"""mma.sync and wgmma; other targets differ little from the first."""


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_clean(launches: list[Emulated]) -> None:
    """Assert that all launches finished without findings."""
    assert launches
    for launch in launches:
        assert launch.report.finished and not launch.report.errors, launch.report.errors


def operations(launches: list[Emulated], *opcodes: str) -> list[bool]:
    """Whether the PTX has these instructions, so that the test covers them."""
    return [any(opcode in launch.ptx for launch in launches) for opcode in opcodes]


@pytest.mark.parametrize("target", TARGETS)
def test_add(target: str) -> None:
    """Predicated vector loads and stores, with a partial last program."""
    x, y, z = normal(1000), normal(1000, seed=1), torch.full((1000,), torch.nan)
    with emulated(target) as launches:
        small.add[(4,)](x, y, z, 1000, BLOCK=256)
    assert_clean(launches)
    assert torch.equal(z, x + y) and launches[0].grid == (4, 1, 1)


@pytest.mark.parametrize("target", TARGETS)
def test_softmax(target: str) -> None:
    """Reductions within and between warps."""
    x, y = normal(5, 300), torch.full((5, 300), torch.nan)
    with emulated(target) as launches:
        small.softmax[(5,)](x, y, 300, 300, BLOCK=512)
    assert_clean(launches)
    assert_near("y", y, x.softmax(1))


@pytest.mark.parametrize("target", KINDS)
def test_gather(target: str) -> None:
    """Shuffles by index."""
    x = normal(64, 32, dtype=torch.float16)
    index = torch.randint(0, 32, (64, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    y = torch.zeros_like(x)
    with emulated(target) as launches:
        small.gather[(1,)](x, index, y, M=64, N=32)
    assert_clean(launches)
    assert torch.equal(y, x.gather(1, index.long()))


@pytest.mark.parametrize("target", KINDS)
def test_integers(target: str) -> None:
    """Division, shifts, high products, 64 bits, a reduction and a scan."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-(2**31), 2**31, (256,), generator=generator).int()
    b = torch.randint(1, 999, (256,), generator=generator).int() * (
        1 - 2 * torch.randint(0, 2, (256,), generator=generator).int()
    )
    z = torch.zeros_like(a)
    with emulated(target) as launches:
        small.integers[(1,)](a, b, z, 1000, BLOCK=256)
    assert_clean(launches)
    wide_a, wide_b = a.long(), b.long()
    high = ((wide_a % 2**32) * (wide_b % 2**32 // 2**16) // 2**16 + 0).new_tensor(
        [(int(p) % 2**32) * (int(q) % 2**32) >> 32 for p, q in zip(a, b, strict=True)]
    )
    quotient = torch.div(wide_a, wide_b, rounding_mode="trunc")
    bits = quotient ^ torch.fmod(wide_a, wide_b) ^ (wide_a >> 3) ^ (wide_b << 2) ^ (wide_a * wide_b) ^ high
    chosen = torch.where((wide_a * wide_b) >> 20 > 1000, bits, torch.minimum(wide_a, wide_b))
    expected = chosen + wide_a.clamp_min(3).sum() + wide_b.cumsum(0)
    assert torch.equal(z, ((expected + 2**31) % 2**32 - 2**31).int())


@pytest.mark.parametrize("target", KINDS)
def test_transpose(target: str) -> None:
    """Through shared memory."""
    x, y = normal(64, 128, dtype=torch.bfloat16), torch.zeros(128, 64, dtype=torch.bfloat16)
    with emulated(target) as launches:
        small.transpose[(1,)](x, y, M=64, N=128)
    assert_clean(launches)
    assert torch.equal(y, x.T)


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


def check_matmul(target: str, dtype: torch.dtype, precision: str, transposed: bool, *tile: int) -> list[Emulated]:
    """Multiply matrices whose sizes do not fill blocks; with one stage, also with unaligned rows."""
    block_m, block_n, block_k, warps, stages = tile
    m, n, k = (130, 144, 176) if stages > 1 else (130, 135, 165)
    a, b, c = (
        normal(m, k, dtype=dtype),
        normal(*((n, k) if transposed else (k, n)), dtype=dtype, seed=1),
        torch.full((m, n), torch.nan),
    )
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages}
    with emulated(target) as launches:
        small.matmul[(-(-m // block_m), -(-n // block_n))](
            *(a, b, c, m, n, k, k, b.shape[1], n, transposed, precision, block_m, block_n, block_k), **options
        )
    assert_clean(launches)
    product = a.double() @ (b.T if transposed else b).double()
    # TF32 truncates both operands of each product by up to one unit. Otherwise float32 sums of exact products.
    unit = TF32 if precision == "tf32" else 2 * torch.finfo(torch.float32).eps
    allowance = 2 * unit * (a.double().abs() @ (b.T if transposed else b).double().abs())
    assert_at_most("product", (c - product).abs(), allowance)
    return launches


@has_fences
@pytest.mark.parametrize("arguments", MATMULS, ids=str)
@pytest.mark.parametrize("target", KINDS)
def test_matmul(target: str, arguments: tuple[Any, ...]) -> None:
    """Products by mma.sync, wgmma with swizzles of 128, 64 and 32 bytes, and without matrix units; pipelined or not."""
    launches = check_matmul(target, *arguments)
    if arguments[1] == "ieee" and arguments[0] == torch.float32:
        assert operations(launches, "mma") == [False]
    elif target == "sm_90":
        assert operations(launches, "wgmma.mma_async", "fence.proxy.async", "mma.sync") == [True, True, False]
    else:
        assert operations(launches, "mma.sync", "cp.async", "wgmma") == [True, arguments[-1] > 1, False]


@has_fences
@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        ("sm_80", torch.bfloat16),
        ("sm_80", torch.float32),
        ("sm_90", torch.float16),
        ("sm_90", torch.float32),
        ("sm_120", torch.float16),
    ],
    ids=str,
)
def test_attention(target: str, dtype: torch.dtype) -> None:
    """Two products in a loop, the second with a left matrix in registers."""
    width, length = 64, 200
    q, k, v = (
        normal(length, width, dtype=dtype) * 0.2,
        normal(length, width, dtype=dtype, seed=1),
        normal(length, width, dtype=dtype, seed=2),
    )
    o = torch.full((length, width), torch.nan, dtype=dtype)
    with emulated(target) as launches:
        small.attention[(4,)](q, k, v, o, length, D=width, BLOCK_M=64, BLOCK_N=64, num_stages=2)
    assert_clean(launches)
    probs = ((q.double() @ k.double().T) * 0.6931471805599453).softmax(1)
    unit = torch.finfo(dtype).eps if dtype != torch.float32 else TF32  # the default
    # One unit of the largest value each for P, V in TF32, out, and the sum.
    assert_at_most("out", (o - probs @ v.double()).abs(), 4 * unit * v.double().abs().max())


@has_fences
@pytest.mark.parametrize("target", KINDS)
def test_the_order_of_warps_changes_nothing(target: str) -> None:
    """The results have the same bits for any order of warps."""
    results = []
    for seed in range(4):
        q, o = normal(128, 64, dtype=torch.float16), torch.zeros(128, 64, dtype=torch.float16)
        with emulated(target, seed) as launches:
            small.attention[(2,)](q, q, q, o, 128, D=64, BLOCK_M=64, BLOCK_N=64, num_stages=2)
        assert_clean(launches)
        results.append(o)
    assert all(torch.equal(results[0], other) for other in results)


@has_fences
@pytest.mark.parametrize("stride", [1, 3])
def test_missing_fence(stride: int) -> None:
    """The emulator finds a fence that Triton 3.6 and 3.7 omit: keys with a stride are stored with a fence, while the copy of the
    values is still in flight, and there is none after it."""
    q, k, v = (normal(length, 64, dtype=torch.bfloat16, seed=length) for length in (64, 256 * 3, 256))
    o = torch.zeros(64, 64)
    with emulated("sm_90") as launches:
        small.strided_products[(1,)](q, k, v, o, 256, stride, D=64, BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
    names = {"wgmma reads what no proxy fence covers"} if stride == 3 else set()
    assert launches[0].report.names == names


def test_other_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="gfx942"), emulated("gfx942"):
        pass


def test_kernels_without_machine_code_stay_apart() -> None:
    """A kernel compiled to PTX only is not reused, from memory or disk, where machine code is needed."""
    x = normal(256)
    sizes = []
    for assembled in (False, True, False, True):
        with recorded_launches("sm_80", assembled=assembled) as launches:
            small.add[(1,)](x, x, x.clone(), 256, BLOCK=64)
            small.add[(1,)](x, x, x.clone(), 256, BLOCK=64)
        assert launches[0].kernel is launches[1].kernel and launches[0].kernel.asm["ptx"]
        sizes.append(len(launches[0].kernel.asm["cubin"]))
    assert sizes[:2] == sizes[2:] and sizes[1] > 0
    assert sizes[0] == (0 if HOOK_IS_IN_KEYS else sizes[1])

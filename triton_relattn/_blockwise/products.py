"""Products of matrices: in which dtype, and by which of the two libraries that torch has on a CPU.

Scores, the softmax and sums are float32 whatever the inputs are. So could products of bfloat16 inputs be: the inputs are exact
there. But processors with instructions for bfloat16 (AMX, AVX512-BF16, Arm's BF16) take a third to a half of the time for
bfloat16 products, which add up in float32 and round the result once. So there the operands of products are bfloat16, as in flash
kernels, P and dS among them. Three products stay in float32, whose rounding would show in the gradients of tables: those that
make logits, q . k and the terms of tables, and dP. (torch has no product of bfloat16 operands with a float32 result on a CPU.)

torch.mm calls MKL, which has no fast float32 kernels for AMD's processors; oneDNN has.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import time

import torch

from .._core.dtypes import compute_dtype

MIN_PRODUCTS = 1 << 25
"""Multiplications of a product below which copies of its operands take more time than they save, 1,024 heads of 32 by 32 of width
32: on two cores of an AMD EPYC with AVX512-BF16 half as many take a quarter longer with a backward."""
STEP = 64
"""oneDNN takes 0.4 ms to prepare a product of new sizes, and keeps half a megabyte: sizes are rounded up to this multiple."""
LINE = 16
"""Numbers in a line of the cache: torch.mm takes up to half as long again where rows of its result are not aligned to it."""
VARIABLE = "TRITON_RELATTN_CPU_PRODUCT"
FASTER = 1.3  # speedup over torch.mm from which oneDNN is chosen


def _has(flag: str) -> bool:
    """Return one of torch's flags of the processor; False if this version of torch lacks it."""
    return bool(getattr(torch.cpu, flag, lambda: False)())


@functools.cache
def fast_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes below float32 in which this processor multiplies matrices faster than in float32, by torch's flags."""
    if not torch.backends.mkldnn.is_available():
        return frozenset()
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags = {
            torch.bfloat16: ("_is_amx_tile_supported", "_is_avx512_bf16_supported"),
            torch.float16: ("_is_amx_fp16_supported",),
        }
        return frozenset(dtype for dtype, names in flags.items() if any(map(_has, names)))
    return frozenset({torch.bfloat16} if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ())


@functools.cache
def has_fast_fused_attention() -> bool:
    """Return whether torch's fused attention on a CPU, which takes a mask of numbers, is faster in bfloat16 than a product, a
    softmax and a product: with AMX, which it is written for. With AVX512-BF16 alone it takes as long as in float32."""
    return _has("_is_amx_tile_supported") and torch.bfloat16 in fast_dtypes()


def product_dtype(query: torch.Tensor, num_pairs: int) -> torch.dtype:
    """Return the dtype of the operands of a call's products, for its query and the number of its scores."""
    is_large = num_pairs * query.shape[3] >= MIN_PRODUCTS
    if query.device.type == "cpu" and is_large and query.dtype in fast_dtypes():
        return query.dtype
    return compute_dtype(query.dtype)


def up(number: int, step: int) -> int:
    """Round up to a multiple of step."""
    return -(-number // step) * step


def evenly(count: int, limit: int) -> list[slice]:
    """Return slices of 0 .. count of about the same size, at most the given one."""
    parts = -(-count // max(limit, 1))
    return [slice(number * count // parts, (number + 1) * count // parts) for number in range(parts)]


def select_rows(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of (S, H, M, width), all of them at once."""
    return tensor if rows.stop - rows.start == tensor.shape[2] else tensor[:, :, rows]


def with_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows have their numbers side by side. Fused attention reads them so without asking."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return rows (S, H, N, width) with zeros up to num_rows."""
    return rows if rows.shape[2] == num_rows else torch.nn.functional.pad(rows, (0, 0, 0, num_rows - rows.shape[2]))


class Memory:
    """Memory by names, on one device, which blocks use one after the other: new megabytes cost page faults."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self._buffers: dict[str, torch.Tensor] = {}
        self._layouts: dict[str, object] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of that name, uninitialised."""
        return self._view(name, shape, dtype)

    def _view(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == shape and buffer.dtype == dtype:
            return buffer
        size = math.prod(shape)
        if buffer is None or buffer.dtype != dtype or buffer.numel() < size:
            del buffer
            self._buffers.pop(name, None)  # before more is allocated
            self._buffers[name] = self.like.new_empty(shape, dtype=dtype)
            return self._buffers[name]
        return buffer.view(-1)[:size].view(shape)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, layout: object) -> torch.Tensor:
        """Return memory that is zero but for what was written to it since the last call of another layout."""
        buffer, layout = self._view(name, shape, dtype), (layout, shape, dtype)
        if self._layouts.get(name) != layout:
            buffer.zero_()
            self._layouts[name] = layout
        return buffer

    def clear(self) -> None:
        """Free all."""
        self._buffers.clear()
        self._layouts.clear()


class Products:
    """Products of matrices, (M, K) @ (K, N), or of batches of them, computed by torch.mm and torch.bmm.

    step: a multiple of it should be the sizes of matrices, but for the width of a head; band_step: the columns of bands.
    """

    step = 1

    def __init__(self, memory: Memory, band_step: int = LINE) -> None:
        self.memory, self.band_step = memory, band_step

    def new_operand(self, rows: torch.Tensor, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros for rows (H, R, width) as right operands (H, width, num_columns), in the order that is faster."""
        return rows.new_zeros(rows.shape[0], rows.shape[2], num_columns, dtype=dtype)

    def scaled(self, left: torch.Tensor, right: torch.Tensor, alpha: float, out: torch.Tensor) -> torch.Tensor:
        """Return alpha times the product: out, or new memory."""
        is_batch = left.dim() == 3
        if alpha == 1 or alpha == 0:
            left = left if alpha == 1 else left * alpha  # NaN remains
            return torch.bmm(left, right, out=out) if is_batch else torch.mm(left, right, out=out)
        return (torch.baddbmm if is_batch else torch.addmm)(out, left, right, beta=0, alpha=alpha, out=out)

    def add(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0, beta: int = 1) -> None:
        """Add alpha times the product to total; with beta = 0 write it there."""
        if total.dtype != left.dtype or alpha == 0:
            self._add_new(total, left @ right, alpha, beta)
        elif left.dim() == 2:
            total.addmm_(left, right, beta=beta, alpha=alpha)
        elif total.is_contiguous():
            total.baddbmm_(left, right, beta=beta, alpha=alpha)
        else:  # torch has batches of products for contiguous totals alone
            total.mT.baddbmm_(right.mT, left.mT, beta=beta, alpha=alpha)

    @staticmethod
    def _add_new(total: torch.Tensor, product: torch.Tensor, alpha: float, beta: int) -> None:
        total.add_(product, alpha=alpha) if beta else torch.mul(product, alpha, out=total)


class OneDNN(Products):
    """The same for one head at a time, its float32 products computed by oneDNN, whose results are new memory."""

    step = STEP

    def new_operand(self, rows: torch.Tensor, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        return rows.new_zeros(rows.shape[0], num_columns, rows.shape[2], dtype=dtype).mT

    def scaled(self, left: torch.Tensor, right: torch.Tensor, alpha: float, out: torch.Tensor) -> torch.Tensor:
        if left.dim() == 3 or left.dtype != torch.float32:
            return super().scaled(left, right, alpha, out)
        if alpha not in (0, 1) and left.shape[1] > right.shape[1]:
            return linear(left, right.t()).mul_(alpha)  # the smaller one
        return linear(left if alpha == 1 else left * alpha, right.t())

    def add(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float = 1.0, beta: int = 1) -> None:
        if left.dim() == 3 or left.dtype != torch.float32:
            return super().add(total, left, right, alpha, beta)
        if total.stride(1) != 1:  # sums of columns
            total, left, right = total.t(), right.t(), left.t()
        self._add_new(total, linear(left, right.t()), alpha, beta)


def linear(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return left right^T of float32 matrices, computed by oneDNN, in the operator's private name. With a right matrix that has
    gaps between its rows, as the part of a band, it takes a thousand times as long."""
    if not (right.is_contiguous() or right.t().is_contiguous()):
        right = right.t().contiguous().t() if right.stride(0) == 1 else right.contiguous()
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], "")
    return result


def takes_onednn(dtype: torch.dtype) -> bool:
    """Return whether oneDNN computes the products of long sequences on a CPU whose scores have this dtype: it has no float64."""
    return dtype == torch.float32 and chooses_onednn()


@functools.cache
def chooses_onednn() -> bool:
    """Return whether oneDNN computes float32 products of long sequences on a CPU, chosen once a process: by the variable
    TRITON_RELATTN_CPU_PRODUCT or else by a probe of milliseconds. Results have the same last bits where the choice is the
    same."""
    choice = os.environ.get(VARIABLE, "")
    if choice not in ("", "onednn", "torch"):
        raise ValueError(f'{VARIABLE} must be "onednn" or "torch", got {choice!r}')
    if choice == "torch":
        return False
    if not has_linear():
        if choice:
            text = f"{VARIABLE}=onednn: this build of torch {torch.__version__} has no oneDNN, or lacks its linear"
            raise NotImplementedError(text)
        return False
    return bool(choice) or is_faster()


def has_linear() -> bool:
    """Return whether torch has oneDNN and the operator, and they compute a product."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        ones = torch.ones(4, 3, dtype=torch.float32, device="cpu")
        return bool((linear(ones, ones) == 3).all())
    except (AttributeError, RuntimeError):
        return False


def is_faster() -> bool:
    """Measure whether oneDNN is faster by FASTER, and as exact, with one block of queries and a thousand keys."""
    generator = torch.Generator("cpu").manual_seed(0)
    numbers = torch.randn(128 + 1024, 64, generator=generator, dtype=torch.float32, device="cpu")
    left, right = numbers.split((128, 1024))
    exact = left.double() @ right.double().t()
    candidates = (lambda: torch.mm(left, right.t()), lambda: linear(left, right))
    errors = [(product() - exact).abs().max().item() for product in candidates]
    fastest = [math.inf, math.inf]
    for _ in range(8):
        for number, product in enumerate(candidates):
            start = time.perf_counter()
            product()
            fastest[number] = min(fastest[number], time.perf_counter() - start)
    return fastest[0] > FASTER * fastest[1] and errors[1] <= 2 * errors[0]

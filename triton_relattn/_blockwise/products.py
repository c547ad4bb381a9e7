"""The dtype in which a call's products are computed.

Scores, the softmax and sums are float32 whatever the inputs are. Products of bfloat16 inputs could be, too: the inputs are exact
there. But processors with instructions for bfloat16 (AMX, AVX512-BF16, Arm's BF16) take a third to a half of the time for
bfloat16 products, which add up in float32 and round the result once. So there the operands of products are bfloat16, as in flash
kernels, P and dS among them. Three products stay in float32, whose rounding would show in the gradients of tables: those that
make logits, q . k and the terms of tables, and dP. (torch has no product of bfloat16 operands with a float32 result on a CPU.)
"""

from __future__ import annotations

import functools
import platform

import torch

from .._core.dtypes import compute_dtype
from .frame import Buffers

FEWEST_PRODUCTS = 1 << 25
"""Multiplications of a product below which copies of its operands take more time than they save, 1,024 heads of 32 by 32 of width
32: on two cores of an AMD EPYC with AVX512-BF16 half as many take a quarter longer with a backward."""


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
    is_large = num_pairs * query.shape[3] >= FEWEST_PRODUCTS
    if query.device.type == "cpu" and is_large and query.dtype in fast_dtypes():
        return query.dtype
    return compute_dtype(query.dtype)


def product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float, beta: int = 0) -> torch.Tensor:
    """Compute beta * out + scale * left @ right in place of out, and return it. With beta = 0 what is in out does not matter.

    torch's baddbmm with alpha = beta = 0 does not write its result in 16 bits on some processors (torch 2.13, AVX512-BF16).
    """
    return out.baddbmm_(left, right, beta=beta, alpha=scale) if scale or beta else out.zero_()


def multiply(
    buffers: Buffers, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, scale: float = 1.0, beta: int = 0
) -> torch.Tensor:
    """Compute beta * out + scale * left @ right in place of out, and return it.

    Args:
        left, right: batches of matrices of one dtype.
        out: that of the product, or of sums; any view with as many numbers in the same order.
        beta: 0, and what is in out does not matter, or 1.
    """
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if out.dtype == left.dtype and out.is_contiguous():
        product_into(out.view(shape), left, right, scale, beta)
        return out
    product = product_into(buffers("product", shape, left.dtype), left, right, scale).view(out.shape)
    return out.add_(product) if beta else out.copy_(product)

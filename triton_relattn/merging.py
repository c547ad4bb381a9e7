"""Merging of attention over parts of the keys."""

from __future__ import annotations

import torch

from ._core.dtypes import compute_dtype


def merge_attention(
    out1: torch.Tensor, lse1: torch.Tensor, out2: torch.Tensor, lse2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the results of attention over two sets of keys into attention over both.

    .. code-block:: text

        lse = log(exp(lse1) + exp(lse2))
        out = exp(lse1 - lse) * out1 + exp(lse2 - lse) * out2

    This serves schemes in which queries meet the keys block by block, such as ring attention. Call
    :func:`triton_relattn.fused_relative_attention` for each block with ``return_lse=True`` and ``query_offset`` = (position of
    the first query) - (position of the block's first key), and merge. Causal masks, windows and tables then see the true
    distances. Gradients flow through out and lse; merging is associative. (With dropout the parts drop independently.)

    An lse is one number: of large logits it has no digits left for the number of keys. Where a mask of numbers adds -1e9 or the
    dtype's lowest number to all keys that a query has in a part, as masks of padding do, lse is the same for one key and for a
    thousand, and the parts of such a query are weighted alike. Hide with a boolean mask or -inf instead: then lse is -inf.
    (:mod:`triton_relattn.distributed` takes any mask: it does not merge.)

    Args:
        out1, out2: (..., Nq, Dv).
        lse1, lse2: (..., Nq), natural logarithm. -inf: no key was seen. +inf (logits that overflowed): such a result has all of
            the weight, and two of them have half each.

    Returns:
        out in the dtype of out1, and lse in that of lse1; computed in float32 (float64 for float64). A query that sees no key
        in either set has out = 0, lse = -inf and zero gradients.

    Raises:
        ValueError: shapes that do not fit.

    Sources: Rabe and Staats, "Self-attention Does Not Need O(n^2) Memory", 2021; Liu et al., "Ring Attention", 2023.

    Example:
        >>> q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
        >>> table = torch.randn(19, 16)
        >>> past = fused_relative_attention(q, k[:, :, :6], v[:, :, :6], table, return_lse=True)
        >>> rest = fused_relative_attention(q, k[:, :, 6:], v[:, :, 6:], table, query_offset=-6, return_lse=True)
        >>> out, _ = merge_attention(*past, *rest)
        >>> torch.allclose(out, fused_relative_attention(q, k, v, table), atol=1e-5)
        True
    """
    if out1.shape != out2.shape or lse1.shape != lse2.shape or out1.shape[:-1] != lse1.shape:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in (out1, lse1, out2, lse2))
        order = "; the order is out1, lse1, out2, lse2" if lse1.shape == out1.shape else ""
        raise ValueError(f"out1 and out2 must have shape (..., Nq, Dv), lse1 and lse2 (..., Nq), got {shapes}{order}")
    dtype = compute_dtype(torch.promote_types(out1.dtype, lse1.dtype))
    lses = torch.stack((lse1.to(dtype), lse2.to(dtype)))
    top = lses.detach().amax(0)
    fully_masked = top == -torch.inf
    # Of two infinite ones the difference is 0, not NaN.
    weights = (lses - top.masked_fill(fully_masked, 0)).masked_fill(lses == torch.inf, 0).exp()
    total = weights.sum(0).masked_fill(fully_masked, 1)
    shares = (weights / total).unsqueeze(-1)
    # A result without weight may be anything, even the NaN that other functions return for a query that sees nothing.
    first, second = (out.to(dtype).masked_fill(share == 0, 0) for out, share in zip((out1, out2), shares, strict=True))
    out = shares[0] * first + shares[1] * second
    return out.to(out1.dtype), (top + total.log()).to(lse1.dtype)

"""The public function."""

from __future__ import annotations

import torch

from . import backends, ops, validation
from .positions import RelativePositions
from .reference import reference_attention


def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    positions: RelativePositions | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    query_offset: int = 0,
    scale: float | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention with a learned embedding of the distance, in memory linear in the sequence lengths.

    .. code-block:: text

        r           = j - i - query_offset                           negative: past, positive: future
        logits[i,j] = scale * (q_i . k_j + q_i . E[row(r)])
        out_i       = sum_j softmax_j(logits[i,j]) v_j

    No (Nq, Nk) tensor and no (Nq, R) tensor is formed, neither forward nor backward.

    Args:
        query: (B, H, Nq, D).
        key: (B, H, Nk, D).
        value: (B, H, Nk, Dv).
        rel_key: the table E, (R, D) shared by the heads or (H, R, D). None: plain attention.
        positions: the relative positions the rows of the table stand for. By default centred,
            ``RelativePositions(-(R - 1) / 2, (R - 1) / 2, outside="clamp")``, which needs an odd R.
        key_lengths: (B,) int32 or int64, how many keys of each batch entry exist; the rest is padding.
        is_causal: hide keys in the future (r > 0).
        query_offset: query i stands at key position i + query_offset. 0 aligns the upper left corner as
            ``torch.nn.functional.scaled_dot_product_attention`` does, ``Nk - Nq`` the lower right one (a key-value cache).
        scale: factor of both terms, ``D ** -0.5`` by default.
        return_lse: also return the log-sum-exp of the logits.
        implementation: ``"triton"``, ``"blockwise"`` or ``"reference"`` (dense, O(Nq * Nk) memory). By default triton on a GPU
            that can run it, else blockwise. One that is asked for by name is used, or raises.

    Returns:
        out (B, H, Nq, Dv) in the dtype and memory order of query; with ``return_lse`` also lse (B, H, Nq), natural
        logarithm, float32 (float64 for float64 inputs). Both are differentiable, once. A query that sees no key
        gives out = 0, lse = -inf and zero gradients.

    All tensors share one dtype (float16, bfloat16, float32, float64) and device; any strides. Scores and sums are float32
    (float64 for float64). Results and gradients repeat bit for bit on the same machine and settings.

    Raises:
        ValueError: wrong ranks, shapes, devices or values. The values of key_lengths are checked on the CPU only (a check
            on a GPU would wait for it; ``TRITON_RELATTN_CHECK_VALUES=1`` asks for it); the kernels limit them to [0, Nk].
        TypeError: wrong types or dtypes.
        RuntimeError: ``implementation="triton"`` where it cannot run, with the reason.

    Sources: Shaw et al., "Self-Attention with Relative Position Representations", 2018 (the term, clipping); Huang et al.,
    "Music Transformer", 2018 (one row per distance); Rabe and Staats 2021, Dao et al. 2022 (linear memory).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
        >>> table = torch.randn(19, 16, requires_grad=True)  # r = -9 .. 9
        >>> fused_relative_attention(q, k, v, table).shape
        torch.Size([1, 2, 10, 16])
    """
    spec = validation.resolve(query, key, value, rel_key, positions, key_lengths, is_causal, query_offset, scale)
    implementation = backends.choose_implementation(implementation, query, value)
    if implementation == "reference":
        out, lse = reference_attention(
            query,
            key,
            value,
            rel_key,
            positions=positions,
            key_lengths=key_lengths,
            is_causal=is_causal,
            query_offset=query_offset,
            scale=scale,
        )
    else:
        out, lse = ops.relative_attention(query, key, value, rel_key, key_lengths, spec, implementation)
    return (out, lse) if return_lse else out

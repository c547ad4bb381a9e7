"""Conversion of the tables of papers and models to the layout of this package: R rows, the most distant past first.

All functions are plain torch, differentiable, and run on any device. Row ``r - first`` belongs to relative position
r = j - i - query_offset. Tables by buckets need no function of their own: index the weight with the bucket of each row, and
autograd sums the gradients of the rows into the weight (:func:`t5_buckets` has an example).
"""

from __future__ import annotations

import math
from typing import Literal

import torch

from ._core.dtypes import without_autocast
from ._core.hints import other_layouts
from .positions import RelativePositions, integer


def from_general_layout(table: torch.Tensor) -> torch.Tensor:
    """Convert a table ``(..., D, 2T - 1)``, with a column per position from the most distant future to the most distant past.

    Column ``c`` of the given table stands for relative position ``T - 1 - c``; row ``r + T - 1`` of the result for ``r``.
    The result is a copy (``flip``) through which gradients flow back.

    Returns:
        (..., 2T - 1, D).

    Raises:
        ValueError: fewer than two dimensions, or an even number of columns.

    Example:
        >>> from_general_layout(torch.tensor([[2, 1, 0, -1, -2], [20, 10, 0, -10, -20]])).tolist()
        [[-2, -20], [-1, -10], [0, 0], [1, 10], [2, 20]]
    """
    if table.dim() < 2:
        raise ValueError(f"table must have shape (..., D, 2T - 1), got {tuple(table.shape)}")
    if table.shape[-1] % 2 == 0:
        raise ValueError(f"table must have an odd number of columns, 2T - 1, got shape {tuple(table.shape)}")
    return from_future_first(table.transpose(-2, -1), dim=-2)


def from_future_first(table: torch.Tensor, dim: int) -> torch.Tensor:
    """Convert a table whose rows go from the most distant future to the most distant past, in the order of ``i - j``.

    Args:
        table: any shape.
        dim: the dimension of the rows: -2 of a table ``(..., R, D)``, -1 of a bias ``(R,)`` or ``(H, R)``.

    Returns:
        The same shape; a copy through which gradients flow back.

    Raises:
        ValueError: table has no such dimension.

    Example:
        >>> from_future_first(torch.tensor([[2, 20], [1, 10], [0, 0]]), dim=-2).tolist()
        [[0, 0], [1, 10], [2, 20]]
        >>> from_future_first(torch.tensor([2, 1, 0]), dim=-1).tolist()
        [0, 1, 2]
    """
    if not -table.dim() <= dim < table.dim():
        raise ValueError(f"table must have a dimension {dim}, that of its rows, got shape {tuple(table.shape)}")
    return table.flip(dim)


def t5_buckets(
    relative_position: torch.Tensor, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True
) -> torch.Tensor:
    """Return the bucket of each relative position r = key - query, as T5, MPNet, WavLM and others number them; for a decoder pass
    bidirectional=False.

    .. code-block:: text

        n = num_buckets / 2 if bidirectional else num_buckets            e = n / 2, both rounded down
        d = |r|             if bidirectional else max(-r, 0)
        bucket = d                                                       if d < e, one distance each
               = min(n - 1, e + floor((n - e) log(d / e) / log(max_distance / e)))    else
        bucket = bucket + n                                              if bidirectional and r > 0

    The logarithm is float32, as in the models: where it falls on a whole number, its rounding decides. From max_distance on the
    bucket stays the same: a clamped table with rows for -max_distance .. max_distance (0 if not bidirectional) serves any length.

    Args:
        relative_position: integers, any shape.

    Returns:
        int64, the shape of relative_position, in [0, num_buckets).

    Raises:
        TypeError: relative_position is no tensor of integers, or num_buckets or max_distance is not an integer.
        ValueError: too few buckets to have e >= 1, or max_distance <= e.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2019.

    Example:
        >>> weight = torch.randn(32, 8, requires_grad=True)  # (buckets, heads), relative_attention_bias.weight in T5
        >>> bias = weight[t5_buckets(torch.arange(-128, 129))].T  # (heads, R); a gather, so gradients flow to weight
        >>> q, k, v = (torch.randn(1, 8, 10, 16) for _ in range(3))
        >>> fused_relative_attention(q, k, v, rel_bias=bias, scale=1.0).shape
        torch.Size([1, 8, 10, 16])
        >>> bias = weight[t5_buckets(torch.arange(-128, 1), bidirectional=False)].T  # of a decoder
        >>> positions = RelativePositions(-128, 0)
        >>> fused_relative_attention(q, k, v, rel_bias=bias, positions=positions, scale=1.0, is_causal=True).shape
        torch.Size([1, 8, 10, 16])
    """
    _check_integers(relative_position)
    num_buckets, max_distance = integer("num_buckets", num_buckets), integer("max_distance", max_distance)
    size = num_buckets // 2 if bidirectional else num_buckets
    exact = size // 2
    if exact < 1:
        raise ValueError(f"num_buckets must be at least {4 if bidirectional else 2}, got {num_buckets}")
    if max_distance <= exact:
        raise ValueError(f"max_distance must be larger than the {exact} distances with a bucket each, got {max_distance}")
    relative_position = relative_position.long()
    distance = relative_position.abs() if bidirectional else -relative_position.clamp(max=0)
    steps = (distance.clamp(min=exact).float() / exact).log() / math.log(max_distance / exact) * (size - exact)
    bucket = torch.where(distance < exact, distance, (exact + steps.long()).clamp(max=size - 1))
    return bucket + size * (relative_position > 0) if bidirectional else bucket


def deberta_log_buckets(relative_position: torch.Tensor, bucket_size: int, max_position: int) -> torch.Tensor:
    """Return the signed bucket of each relative position, as ``make_log_bucket_position`` of DeBERTa-v2, DeBERTa-v3 and SEW-D.

    .. code-block:: text

        m = bucket_size / 2, rounded down
        bucket(r) = r                                                                     if |r| <= m
                  = sign(r) * (m + ceil((m - 1) log(|r| / m) / log((max_position - 1) / m)))    else

    ``-bucket_size < bucket < bucket_size`` as long as ``|r| < max_position``, and ``bucket(-r) = -bucket(r)``. The models'
    relative position is query - key = -r, and they add the span (= bucket_size). So the row for r is their row
    ``span - bucket(r)``, limited to [0, 2 * span - 1]. The logarithm is float32, as in the models.

    Args:
        relative_position: integers, any shape.

    Returns:
        int64, the shape of relative_position.

    Raises:
        TypeError: relative_position is no tensor of integers, or bucket_size or max_position is not an integer.
        ValueError: bucket_size < 2, or max_position - 1 <= m.

    Source: He et al., "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", 2020, and its code.

    Example:
        >>> position_keys = torch.randn(4, 2 * 32, 16, requires_grad=True)  # (heads, 2 * span, D)
        >>> slots = (32 - deberta_log_buckets(torch.arange(-99, 100), 32, 128)).clamp(0, 63)
        >>> position_keys[:, slots].shape  # rel_key of content to position, r = -99 .. 99
        torch.Size([4, 199, 16])
        >>> position_queries = torch.randn(4, 2 * 32, 16, requires_grad=True)
        >>> position_queries[:, slots].shape  # rel_p2c of position to content, by the same slots
        torch.Size([4, 199, 16])
    """
    _check_integers(relative_position)
    bucket_size, max_position = integer("bucket_size", bucket_size), integer("max_position", max_position)
    middle = bucket_size // 2
    if middle < 1:
        raise ValueError(f"bucket_size must be at least 2, got {bucket_size}")
    if max_position - 1 <= middle:
        raise ValueError(f"max_position must be larger than bucket_size // 2 + 1 = {middle + 1}, got {max_position}")
    relative_position = relative_position.long()
    distance = relative_position.abs()
    whole_range = torch.tensor((max_position - 1) / middle, dtype=torch.float32).log()
    steps = torch.ceil((distance.clamp(min=middle).float() / middle).log() / whole_range * (middle - 1))
    return torch.where(distance <= middle, relative_position, relative_position.sign() * (middle + steps.long()))


def alibi_slopes(num_heads: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> torch.Tensor:
    """Return the slopes of ALiBi, (num_heads,).

    If n = num_heads is a power of two they are ``2 ** (-8 k / n)``, k = 1 .. n. Else they are those of the next lower power of
    two n, and after them, as many as are missing, every second one of 2n: ``2 ** (-8 k / (2n))``, k = 1, 3, 5, ...

    Raises:
        TypeError: num_heads is not an integer.
        ValueError: num_heads < 1.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", 2021, and its code.

    Example:
        >>> alibi_slopes(3).tolist()
        [0.0625, 0.00390625, 0.25]
    """
    num_heads = integer("num_heads", num_heads)
    if num_heads < 1:
        raise ValueError(f"num_heads must be positive, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [8 * k / power for k in range(1, power + 1)] + [4 * k / power for k in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor([2.0**-exponent for exponent in exponents], dtype=dtype, device=device)


def alibi_bias(heads: int | torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return ALiBi as ``rel_bias``: ``-slope * |r|`` for r = first .. last.

    Args:
        heads: the number of heads, for the slopes of :func:`alibi_slopes`, or slopes (H,), which may be learned.
        first, last: relative positions of the first and the last row. ALiBi is not clipped, so every pair that is seen needs a
            row: first = -(Nk - 1) and last = 0 for causal attention.

    Returns:
        (H, last - first + 1), in the dtype of the slopes (float32) and on their device.

    Raises:
        TypeError: first, last or a number of heads is not an integer; slopes are not floating point numbers.
        ValueError: last < first, no heads, or slopes that are not a vector.

    Source: Press et al., "Train Short, Test Long: Attention with Linear Biases", 2021, for causal attention. For r > 0 this is
    the symmetric form.

    Example:
        >>> q, k, v = (torch.randn(1, 12, 10, 16) for _ in range(3))
        >>> positions = RelativePositions(-9, 0, outside="error")
        >>> fused_relative_attention(q, k, v, rel_bias=alibi_bias(12, -9, 0), positions=positions, is_causal=True).shape
        torch.Size([1, 12, 10, 16])
    """
    slopes = heads if isinstance(heads, torch.Tensor) else alibi_slopes(heads)
    if not slopes.is_floating_point():
        raise TypeError(f"slopes must be floating point numbers, got {slopes.dtype}")
    if slopes.dim() != 1:
        raise ValueError(f"slopes must have shape (H,), got {tuple(slopes.shape)}")
    return -slopes[:, None] * _relative_positions(first, last, slopes.device).abs()


def sinusoids(
    first: int,
    last: int,
    width: int,
    order: Literal["interleaved", "concatenated"] = "interleaved",
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the sinusoids of the distance that Transformer-XL and Conformers project to their tables.

    .. code-block:: text

        angle[r, c] = -r * base ** (-2 c / width)          r = first .. last, c = 0 .. width / 2 - 1

    The distance is -r = i - j, positive in the past. Sinusoids are computed in float64 and then rounded to dtype.

    Args:
        first, last: relative positions of the first and the last row; -(T - 1) and T - 1 for T frames.
        width: width of the model (the projection splits it into heads).
        order: ``"interleaved"``: sin, cos, sin, cos, ... (fairseq, NeMo, ESPnet; Wav2Vec2-Conformer, Parakeet).
            ``"concatenated"``: all sin, then all cos (Transformer-XL, XLNet).
        base: wavelengths grow from 2 pi to almost 2 pi * base.

    Returns:
        (last - first + 1, width).

    Raises:
        TypeError: first or last is not an integer.
        ValueError: last < first, an odd width, or an unknown order.

    Source: Vaswani et al., "Attention Is All You Need", 2017; Dai et al., "Transformer-XL", 2019.

    Example:
        >>> linear_pos = torch.nn.Linear(64, 64, bias=False)
        >>> linear_pos(sinusoids(-9, 9, 64)).view(19, 4, 16).transpose(0, 1).shape  # rel_key of 4 heads
        torch.Size([4, 19, 16])
    """
    if width < 2 or width % 2:
        raise ValueError(f"width must be even and positive, got {width}")
    if order not in ("interleaved", "concatenated"):
        raise ValueError(f'order must be "interleaved" or "concatenated", got {order!r}')
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
    angle = -_relative_positions(first, last, device)[:, None] * frequencies
    dim = -1 if order == "interleaved" else -2
    return torch.stack((angle.sin(), angle.cos()), dim).flatten(1).to(dtype)


def fold_transformer_xl(
    query: torch.Tensor, rel_key: torch.Tensor, u: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Express the two learned biases of Transformer-XL and Conformers as another query and a ``rel_bias``.

    .. code-block:: text

        scale * ((q_i + u) . k_j + (q_i + v) . E[row(r)])  =  scale * (q'_i . k_j + q'_i . E[row(r)]) + b[row(r)]
        q' = q + u                b = scale * E (v - u)

    Args:
        query: (B, H, N, D), or packed (total, H, D).
        rel_key: the table E, (R, D) or (H, R, D). The projected sinusoids of these models (:func:`sinusoids`) have the largest
            i - j in row 0, which is the order of this package already.
        u: the bias of the content term, (H, D); ``pos_bias_u`` or ``r_w_bias`` in models.
        v: the bias of the position term, (H, D); ``pos_bias_v`` or ``r_r_bias`` in models.
        scale: scale of the call, ``D ** -0.5`` by default. Leave the call's ``rel_scale`` at its default, which is scale.

    Returns:
        q' in query's shape and dtype, to pass as query, and b, (H, R), at least float32, to pass as ``rel_bias``. Pass
        ``rel_key`` unchanged. Gradients flow to all four tensors.

    Raises:
        ValueError: query has another rank, u or v is not (H, D), or rel_key does not fit them.

    Source: Dai et al., "Transformer-XL", 2019; Gulati et al., "Conformer", 2020.

    Example:
        >>> q, k, v = (torch.randn(1, 4, 10, 16) for _ in range(3))
        >>> table, pos_bias_u, pos_bias_v = torch.randn(4, 19, 16), torch.randn(4, 16), torch.randn(4, 16)
        >>> q, bias = fold_transformer_xl(q, table, pos_bias_u, pos_bias_v)
        >>> fused_relative_attention(q, k, v, table, rel_bias=bias).shape
        torch.Size([1, 4, 10, 16])
    """
    if query.dim() not in (3, 4):
        raise ValueError(f"query must have shape (B, H, N, D) or (total, H, D), got {tuple(query.shape)}")
    shape = (query.shape[1], query.shape[-1])
    heads, width = shape

    def is_table(tensor: torch.Tensor) -> bool:
        return tensor.shape[-1:] == (width,) and (tensor.dim() == 2 or (tensor.dim() == 3 and tensor.shape[0] == heads))

    if not is_table(rel_key):
        hint = next((f"; {text}" for text, other in other_layouts("rel_key", rel_key, heads) if is_table(other)), "")
        got = f"{tuple(rel_key.shape)}{hint}"
        raise ValueError(f"rel_key must have shape (R, {width}) or ({heads}, R, {width}), got {got}")
    for name, bias in (("u", u), ("v", v)):
        if tuple(bias.shape) != shape:
            hint = ""
            if tuple(bias.squeeze().shape) in (shape, (heads * width,)):
                hint = f"; {name}.reshape{shape} has it"
            elif tuple(rel_key.shape) == shape and is_table(bias):
                hint = "; the order is query, rel_key, u, v"
            raise ValueError(f"{name} must have shape (heads, width) = {shape}, got {tuple(bias.shape)}{hint}")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)
    with without_autocast(query.device):
        rel_bias = scale * ((v.to(dtype) - u.to(dtype))[:, None] @ rel_key.to(dtype).mT)[:, 0]
    return (query + (u if query.dim() == 3 else u[:, None])).to(query.dtype), rel_bias


def _check_integers(relative_position: torch.Tensor) -> None:
    if not isinstance(relative_position, torch.Tensor):
        example = "torch.arange(-128, 129) for a table with rows for -128 to 128"
        raise TypeError(f"relative_position must be a tensor of integers, as {example}, got {relative_position!r}")
    if relative_position.is_floating_point() or relative_position.is_complex() or relative_position.dtype == torch.bool:
        raise TypeError(f"relative_position must hold integers, got {relative_position.dtype}")


def _relative_positions(first: int, last: int, device: torch.device | str | None) -> torch.Tensor:
    """Return the integers from first to last, checked."""
    positions = RelativePositions(first, last)
    return torch.arange(positions.first, positions.last + 1, device=device)

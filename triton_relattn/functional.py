"""The public functions. A call takes this way:

Arguments (_core/arguments.py)          what the user gave
attend (_calls.py)                      a kind of call that is known goes on at once; else it is
resolve (_core/validation.py)           checked; from here on there are tensors and scalars (_core/spec.py)
choose_implementation                   triton, blockwise or reference (_implementations.py)
RelativeAttention (_calls.py)           autograd's node; where something watches, a torch operator (_operators.py)
forward, backward                       kernels/forward.py and backward.py, or _blockwise/attention.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from ._calls import attend
from ._core.arguments import Arguments, Options, OptionsVarlen
from ._core.names import refuse_unknown
from ._jagged import is_jagged, jagged, packed
from .positions import RelativePositions

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> torch.Tensor: ...
@overload
def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def fused_relative_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *others: Any,
    rel_query: torch.Tensor | None = None,
    rel_value: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    rel_p2c: torch.Tensor | None = None,
    positions: RelativePositions | None = None,
    attn_mask: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    query_offset: int | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rel_scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention with learned embeddings of the distance, in memory linear in the sequence lengths.

    .. code-block:: text

        r           = j - i - query_offset                           negative: past, positive: future
        logits[i,j] = scale * (q_i . k_j) + rel_scale * (p_i . E[row(r)] + k_j . F[row(r)]) + b[row(r)]
        logits      = softcap * tanh(logits / softcap)               if softcap is given
        P           = softmax_j(logits + attn_mask)                  of the keys that query i sees
        out_i       = sum_j dropout(P)[i,j] * (v_j + A[row(r)])

    No (Nq, Nk) tensor and no (Nq, R) tensor is formed, neither forward nor backward.

    Args:
        query: (B, Hq, Nq, D).
        key: (B, Hk, Nk, D).
        value: (B, Hk, Nk, Dv).
        rel_key: the table E, (R, Dr) shared by the heads or (Hq, R, Dr). All tables are optional; without any this is plain
            attention. Those that are given have the same R. (In scaled_dot_product_attention the fourth argument is the mask.)
        rel_query: p, (B, Hq, Nq, Dr), the vectors that rel_key is multiplied with; by default the query itself.
        rel_value: the table A, (R, Dv) or (Hq, R, Dv).
        rel_bias: the table b, (R,) or (Hq, R), in query's dtype or float32.
        rel_p2c: the table F, (R, D) or (Hq, R, D), which meets the key: "position to content" of DeBERTa, whose "content to
            position" is rel_key. (rel_query is no table: it is a vector of each query.)
        positions: the relative positions that the rows of the tables stand for. By default they are centred,
            ``RelativePositions(-(R - 1) / 2, (R - 1) / 2, outside="clamp")``, which needs an odd R. A short table that does
            not cover a call is clipped without a warning, as by Shaw et al. A table of more than 1025 rows gets one, since no
            model clips at distances beyond 512, and so does one in a causal call that it would cover if all rows were of the
            past. Give positions to say that it is meant; ``outside="error"`` refuses such calls.
        attn_mask: broadcasts to (B, Hq, Nq, Nk), without being expanded. Bool: True where a query may attend. Numbers, in
            query's dtype or float32, are added to the logits; they have no gradient. Three dimensions are (Hq, Nq, Nk): one
            mask per batch entry is ``attn_mask[:, None]``.
        key_lengths: (B,) int32 or int64, how many keys of each batch entry exist (the rest is padding); or a 0-d tensor, one
            number for all.
        is_causal: hide keys in the future (r > 0).
        window_size: (left, right), hide keys with r < -left or r > right; -1: that side is unbounded; None: both are. Tiles
            outside are not computed. All masks combine: a key is seen if none hides it.
        query_offset: query i stands at key position i + query_offset; an int, (B,) int32 or int64, or a 0-d tensor. 0 aligns
            the upper left corner as ``torch.nn.functional.scaled_dot_product_attention`` does, ``Nk - Nq`` the lower right
            one (a key-value cache, as FlashAttention does). None is 0, but a causal call with fewer queries than keys warns.
        dropout_p: dropout probability of the attention weights; those kept are multiplied by 1 / (1 - dropout_p). The choice of
            weights depends on torch's generator only, not on the implementation (``testing.dropout_mask`` shows it). Compiled by
            inductor, a call draws from inductor's generator, which also repeats after ``torch.manual_seed``, but differs.
        scale: factor of q.k, ``D ** -0.5`` by default.
        rel_scale: factor of p.E and of k.F, by default scale.
        softcap: limit the logits smoothly to +-softcap.
        enable_gqa: let Hq / Hk successive heads of the query share one of key and value.
        return_lse: also return the log-sum-exp of the logits, mask included, before dropout.
        implementation: ``"triton"``, ``"blockwise"`` or ``"reference"`` (dense, O(Nq * Nk) memory). By default "triton" on a GPU
            that can run it, else "blockwise". A GPU that gets "blockwise" warns why, once per reason. An implementation
            that is asked for by name is used, or the call raises.

    Returns:
        out (B, Hq, Nq, Dv) in the dtype and memory order of query; with ``return_lse`` also lse (B, Hq, Nq), natural
        logarithm, float32 (float64 for float64 inputs). Both can be differentiated once (with ``"reference"``, whose out is
        contiguous, any number of times). A query that sees no key gives out = 0, lse = -inf and zero gradients.
        Keys and values that no query sees (by key_lengths, is_causal or window_size) are not read: they may hold NaN, and their
        gradients are 0.

    Query, key and value may be jagged nested tensors (B, H, N, D), each a (B, N, H, D) transposed; the result is one as well.
    They are computed by :func:`fused_relative_attention_varlen`, without a copy.

    All tensors share one dtype (float16, bfloat16, float32, float64) and device; any strides. Scores and sums are float32
    (float64 for float64), even under ``torch.autocast``, which casts float32 inputs but not rel_bias and masks.
    Results and gradients repeat bit for bit on the same machine with the same settings and number of threads. "reference" on a
    GPU needs ``torch.use_deterministic_algorithms(True)`` for that: it gathers, and a gather's gradient adds in any order.

    Raises:
        ValueError: wrong ranks, shapes, devices or values. The message says what to do if a mask has taken rel_key's place, or
            dimensions are in the order (B, N, H, D). The values of key_lengths are checked on the CPU only, because a check on
            a GPU would wait for it (``TRITON_RELATTN_CHECK_VALUES=1`` asks for it); the kernels limit them to [0, Nk].
        TypeError: wrong types or dtypes.
        NotImplementedError: ``implementation="triton"`` where it cannot run, with the reason.

    Warns:
        RuntimeWarning: once, a GPU gets "blockwise" by default, or kernels by default that nobody has checked there
            (``python -m triton_relattn check``).
        UserWarning: once per reason, the call is probably a mistake. A causal call has fewer queries than keys, but no
            query_offset. A table does not cover the call (see positions), or is_causal hides all of its rows but the first, or
            all of its rows are of the past and nothing hides the future (``window_size=(-1, -1)`` says that this is meant). A
            mask of three dimensions also has the batch's size (or one of two dimensions that is not square): four say what is
            meant. No query sees a key, by query_offset or by attn_mask, or attn_mask seems to be True for what it hides (its
            values are read on the CPU only); ``return_lse=True`` says that this is meant. Dimensions seem to be in the order
            (B, N, H, D): there are more heads than positions, and either more than 256 heads, or as many as the positions that
            the table covers, or at least 32, more than twice the positions, with a table that heads share.

    Sources: Shaw et al., "Self-Attention with Relative Position Representations", 2018 (E, A, clipping); Huang et al., "Music
    Transformer", 2018 (one row per distance); Dai et al., "Transformer-XL", 2019 (E and b from one table); Raffel et al., "T5",
    2019, Press et al., "ALiBi", 2021 (b); He et al., "DeBERTa", 2020 (F); Rabe and Staats 2021, Dao et al. 2022 (linear memory).

    Example:
        >>> q, k, v = (torch.randn(1, 2, 10, 16) for _ in range(3))
        >>> table = torch.randn(19, 16, requires_grad=True)  # r = -9 .. 9
        >>> fused_relative_attention(q, k, v, table).shape
        torch.Size([1, 2, 10, 16])
    """
    if others or unknown:
        refuse_unknown(fused_relative_attention, others, unknown)
    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        rel_key=rel_key,
        rel_query=rel_query,
        rel_value=rel_value,
        rel_bias=rel_bias,
        rel_p2c=rel_p2c,
        positions=positions,
        attn_mask=attn_mask,
        key_lengths=key_lengths,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        dropout_p=dropout_p,
        scale=scale,
        rel_scale=rel_scale,
        softcap=softcap,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
    )
    if type(query) is not torch.Tensor and is_jagged(query):
        arguments = packed(arguments)
    out, lse = attend(arguments, implementation)
    if arguments.is_packed:
        out = jagged(out[0].transpose(0, 1), query)
        lse = jagged(lse[0].T, query) if lse is not None and return_lse else None
    return out if lse is None or not return_lse else (out, lse)


@overload
def fused_relative_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[OptionsVarlen],
) -> torch.Tensor: ...
@overload
def fused_relative_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[OptionsVarlen],
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def fused_relative_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    return_lse: bool,
    **options: Unpack[OptionsVarlen],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def fused_relative_attention_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *others: Any,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    rel_query: torch.Tensor | None = None,
    rel_value: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    rel_p2c: torch.Tensor | None = None,
    positions: RelativePositions | None = None,
    is_causal: bool = False,
    window_size: tuple[int, int] | None = None,
    query_offset: int | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    rel_scale: float | None = None,
    softcap: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    implementation: str | None = None,
    **unknown: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute :func:`fused_relative_attention` of B sequences of any lengths, packed one after the other without padding.

    Sequence b has the queries from ``cu_seqlens_q[b]`` up to ``cu_seqlens_q[b + 1]``, and likewise keys. It attends to itself
    only. Its positions start at 0: query 0 and key 0 of a sequence have r = -query_offset.

    Args:
        query: (total_q, Hq, D).
        key: (total_k, Hk, D).
        value: (total_k, Hk, Dv).
        rel_query: (total_q, Hq, Dr), by default the query.
        cu_seqlens_q: (B + 1,) int32 or int64, rising from 0 to total_q.
        cu_seqlens_k: the same for keys, to total_k. The values of both are checked on the CPU only.
        max_seqlen_q: an int, the length of the longest sequence of queries, or more. ``lengths.max().item()`` gives it, but
            waits for a GPU (and in torch.compile needs ``torch._dynamo.config.capture_scalar_outputs``).
        max_seqlen_k: the same for keys.
        query_offset: an int, or (B,), one per sequence.

    The other arguments are those of :func:`fused_relative_attention`, without attn_mask and key_lengths. Dropout in sequence b is
    that of batch entry b of the padded function.

    Returns:
        out (total_q, Hq, Dv); with ``return_lse`` also lse (Hq, total_q).

    Raises:
        ValueError, TypeError, NotImplementedError: as :func:`fused_relative_attention`.

    Example:
        >>> q, k, v = (torch.randn(12, 2, 16) for _ in range(3))  # lengths 5, 0 and 7
        >>> lengths = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        >>> packing = dict(cu_seqlens_q=lengths, cu_seqlens_k=lengths, max_seqlen_q=7, max_seqlen_k=7)
        >>> fused_relative_attention_varlen(q, k, v, torch.randn(13, 16), **packing).shape
        torch.Size([12, 2, 16])
    """
    if others or unknown:
        refuse_unknown(fused_relative_attention_varlen, others, unknown)
    arguments = Arguments(
        query=query,
        key=key,
        value=value,
        rel_key=rel_key,
        rel_query=rel_query,
        rel_value=rel_value,
        rel_bias=rel_bias,
        rel_p2c=rel_p2c,
        positions=positions,
        is_causal=is_causal,
        window_size=window_size,
        query_offset=query_offset,
        dropout_p=dropout_p,
        scale=scale,
        rel_scale=rel_scale,
        softcap=softcap,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        is_packed=True,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )
    out, lse = attend(arguments, implementation)
    out = out[0].transpose(0, 1)
    return out if lse is None or not return_lse else (out, lse[0])

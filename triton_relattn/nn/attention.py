"""Attention with an encoding of relative position, without and with projections."""

from __future__ import annotations

import inspect
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from .._core.dtypes import compute_dtype
from .._core.warn import warn_once
from ..functional import fused_relative_attention
from . import encodings

KINDS = ("shaw", "general", "music_transformer", "transformer_xl", "t5", "alibi")
NO_ENCODING = (
    "RelativeMultiheadAttention without an encoding has no positions, as torch.nn.MultiheadAttention: RelativeMultiheadAttention."
    f"{', '.join(KINDS[:-1])} or {KINDS[-1]} have some; encoding=None says that this is meant"
)


class RelativeAttention(nn.Module):
    """:func:`triton_relattn.fused_relative_attention` with an encoding that has the learned tables; no projections.

    Args:
        encoding: one of :mod:`triton_relattn.nn.encodings`, or any module like them; None: plain attention.
        dropout: dropout probability of the attention weights, in training.
        scale, softcap, window_size, enable_gqa, implementation: as in the function.

    Raises:
        ValueError: dropout lies outside [0, 1].
    """

    def __init__(
        self,
        encoding: nn.Module | None,
        *,
        dropout: float = 0.0,
        scale: float | None = None,
        softcap: float | None = None,
        window_size: tuple[int, int] | None = None,
        enable_gqa: bool = False,
        implementation: str | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= dropout <= 1.0:
            raise ValueError(f"dropout must lie in [0, 1], got {dropout}")
        self.encoding, self.dropout = encoding, dropout
        self.options: dict[str, Any] = {
            "scale": scale,
            "softcap": softcap,
            "window_size": window_size,
            "enable_gqa": enable_gqa,
            "implementation": implementation,
        }

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        attn_mask: torch.Tensor | None = None,
        key_lengths: torch.Tensor | None = None,
        is_causal: bool = False,
        query_offset: int | torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Return out (B, Hq, Nq, Dv), with return_lse also lse, for query (B, Hq, Nq, D), key (B, Hk, Nk, D) and value
        (B, Hk, Nk, Dv).

        Arguments, results and errors are those of :func:`triton_relattn.fused_relative_attention`.
        """
        terms: dict[str, Any] = {}
        if self.encoding is not None:
            offset = 0 if query_offset is None else query_offset
            query, terms = self.encoding(query, key.shape[-2], offset, is_causal, self.options["scale"])
        return fused_relative_attention(
            query,
            key,
            value,
            **terms,
            attn_mask=attn_mask,
            key_lengths=key_lengths,
            is_causal=is_causal,
            query_offset=query_offset,
            dropout_p=self.dropout if self.training else 0.0,
            return_lse=return_lse,
            **self.options,
        )

    def extra_repr(self) -> str:
        changed = {name: value for name, value in self.options.items() if value is not None and value is not False}
        return ", ".join(f"{name}={value}" for name, value in {"dropout": self.dropout, **changed}.items())


class RelativeMultiheadAttention(nn.Module):
    """Multi-head attention with relative position, in place of ``torch.nn.MultiheadAttention``.

    .. code-block:: text

        q, k, v = heads of query W_q^T + b_q, key W_k^T + b_k, value W_v^T + b_v
        output  = output_dropout(concatenated heads of RelativeAttention(q, k, v) W_o^T + b_o)

    Args:
        embed_dim, num_heads, dropout, bias, kdim, vdim, batch_first: as in ``torch.nn.MultiheadAttention``. Heads are
            embed_dim / num_heads wide.
        encoding: one of :mod:`triton_relattn.nn.encodings`; the class methods build those that are known by name. None: no
            relative position, of which a call without this argument warns once.
        num_key_heads: a smaller number of heads of key and value; each is shared by num_heads / num_key_heads of the query.
        output_dropout: dropout probability of the output's elements, in training.
        options: of :class:`RelativeAttention`: scale, softcap, window_size, implementation.

    State: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj`` (``torch.nn.Linear``) and ``attention.encoding``. ``load_state_dict``
    also takes ``in_proj_weight`` and ``in_proj_bias``, or ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``, of
    ``torch.nn.MultiheadAttention`` (with ``strict=False``, since that has no encoding).

    Differences from ``torch.nn.MultiheadAttention``:

    - Weights are not returned, and need_weights is refused, because they would be Nq x Nk. ``triton_relattn.plots`` shows them.
    - A query that sees no key gives zeros, not NaN.
    - With is_causal, attn_mask is ignored: by the contract of ``torch.nn.MultiheadAttention`` it is then the causal mask.

    If you build a ``torch.nn.TransformerEncoder`` of stock layers and replace their attention afterwards, set
    ``encoder.use_nested_tensor = False``. The encoder decided at its construction that it may use the stock layers' weights.

    Raises:
        ValueError: embed_dim is not divisible by num_heads, or num_heads by num_key_heads, or a dropout probability lies outside
            [0, 1].
        NotImplementedError: add_bias_kv or add_zero_attn.

    Example:
        >>> attention = RelativeMultiheadAttention.shaw(64, 4, max_distance=16, batch_first=True)
        >>> x = torch.randn(2, 10, 64)
        >>> attention(x, x, x)[0].shape
        torch.Size([2, 10, 64])
    """

    # In eval mode torch.nn.TransformerEncoderLayer has a fast path that would compute plain attention with this module's weights.
    # These two attributes keep it from doing so.
    _qkv_same_embed_dim = False
    in_proj_bias = None

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        encoding: nn.Module | EllipsisType | None = ...,
        num_key_heads: int | None = None,
        output_dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        allowed = ("scale", "softcap", "window_size", "implementation")
        for name in options.keys() - {*allowed}:
            kind = next((kind for kind in KINDS if name in inspect.signature(getattr(type(self), kind)).parameters), None)
            hint = f"; RelativeMultiheadAttention.{kind} has it" if kind else ""
            raise TypeError(f"RelativeMultiheadAttention() got an unexpected keyword argument {name!r}{hint}")
        super().__init__()
        num_key_heads = num_heads if num_key_heads is None else num_key_heads
        if encoding is ...:
            encoding = None
            warn_once("no encoding", NO_ENCODING, category=UserWarning)
        if add_bias_kv or add_zero_attn:
            raise NotImplementedError("add_bias_kv and add_zero_attn must be False: they add a key that has no position")
        self.embed_dim, self.num_heads, self.num_key_heads = embed_dim, num_heads, num_key_heads
        self.head_dim, self.batch_first = _head_dim(embed_dim, num_heads), batch_first
        if num_key_heads < 1 or num_heads % num_key_heads:
            raise ValueError(f"num_heads must be divisible by num_key_heads, got {num_heads} and {num_key_heads}")
        key_width = num_key_heads * self.head_dim
        factory: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.k_proj = nn.Linear(embed_dim if kdim is None else kdim, key_width, **factory)
        self.v_proj = nn.Linear(embed_dim if vdim is None else vdim, key_width, **factory)
        self.out_proj = nn.Linear(embed_dim, embed_dim, **factory)
        self.attention = RelativeAttention(encoding, dropout=dropout, enable_gqa=num_key_heads != num_heads, **options)
        self.output_dropout = nn.Dropout(output_dropout)
        self.register_load_state_dict_pre_hook(_take_packed_projections)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the projections as torch.nn.MultiheadAttention does: glorot-uniform weights, biases 0. The encoding's
        parameters stay as they are."""
        for linear in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(linear.weight)
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    @classmethod
    def shaw(
        cls, embed_dim: int, num_heads: int, max_distance: int, *, values: bool = True, per_head: bool = False, **options: Any
    ) -> RelativeMultiheadAttention:
        """Make attention with distances clipped at max_distance and tables for keys and values. Shaw et al., 2018."""
        sizes = _head_dim(embed_dim, num_heads), max_distance, num_heads if per_head else None
        return cls(embed_dim, num_heads, encoding=encodings.shaw(*sizes, values=values, **_factory(options)), **options)

    @classmethod
    def music_transformer(
        cls, embed_dim: int, num_heads: int, length: int, *, per_head: bool = True, **options: Any
    ) -> RelativeMultiheadAttention:
        """Make attention with a row per distance to the past below ``length``; call it with is_causal=True.

        Greater distances use the row of length - 1. For use beyond the training length choose a smaller ``length``: in a table
        that is as long as the training sequences, few pairs train the most distant rows. Huang et al., 2018.
        """
        sizes = _head_dim(embed_dim, num_heads), length, num_heads if per_head else None
        return cls(embed_dim, num_heads, encoding=encodings.music_transformer(*sizes, **_factory(options)), **options)

    @classmethod
    def general(
        cls, embed_dim: int, num_heads: int, length: int, *, per_head: bool = False, **options: Any
    ) -> RelativeMultiheadAttention:
        """Make attention with a row per distance below ``length``, past and future."""
        sizes = _head_dim(embed_dim, num_heads), length, num_heads if per_head else None
        return cls(embed_dim, num_heads, encoding=encodings.general(*sizes, **_factory(options)), **options)

    @classmethod
    def transformer_xl(
        cls, embed_dim: int, num_heads: int, order: str = "interleaved", **options: Any
    ) -> RelativeMultiheadAttention:
        """Make attention with projected sinusoids and two biases, as in Conformers; ``order="concatenated"`` as in
        Transformer-XL. Dai et al., 2019."""
        sizes = num_heads, _head_dim(embed_dim, num_heads), embed_dim
        encoding = encodings.TransformerXLEncoding(*sizes, order, **_factory(options))
        return cls(embed_dim, num_heads, encoding=encoding, **options)

    @classmethod
    def t5(
        cls,
        embed_dim: int,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        **options: Any,
    ) -> RelativeMultiheadAttention:
        """Make attention with a number per bucket of distances. As in T5, q.k is not scaled and projections have no bias.
        Raffel et al., 2019."""
        encoding = encodings.T5Encoding(num_heads, num_buckets, max_distance, bidirectional, **_factory(options))
        return cls(embed_dim, num_heads, encoding=encoding, **{"scale": 1.0, "bias": False, **options})

    @classmethod
    def alibi(cls, embed_dim: int, num_heads: int, *, learned: bool = False, **options: Any) -> RelativeMultiheadAttention:
        """Make attention that adds ``-slope * |r|`` to the logits. Press et al., 2021."""
        encoding = encodings.ALiBiEncoding(num_heads, learned, **_factory(options))
        return cls(embed_dim, num_heads, encoding=encoding, **options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = False,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        key_lengths: torch.Tensor | None = None,
        query_offset: int | torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """Return (output, None); torch.nn.MultiheadAttention may return weights in the second place.

        Args:
            query: (Nq, B, embed_dim), with batch_first (B, Nq, embed_dim), or (Nq, embed_dim) for a single sequence.
            key, value: the same with Nk, kdim and vdim.
            key_padding_mask: (B, Nk) or (Nk,): bool, True for hidden keys, or numbers that are added to the logits. If padding is
                at the ends, key_lengths costs less.
            attn_mask: (Nq, Nk) or (B * num_heads, Nq, Nk): bool, True for hidden pairs, or numbers that are added to the logits.
            key_lengths: (B,), how many keys of each sequence exist.
            query_offset: as in :func:`triton_relattn.fused_relative_attention`.

        Raises:
            ValueError: wrong shapes.
            TypeError: a mask that is neither bool nor floating point.
            NotImplementedError: need_weights.
        """
        if need_weights:
            raise NotImplementedError(
                "need_weights: the (Nq, Nk) weights are never formed; triton_relattn.plots shows them for short sequences"
            )
        is_batch, batch_dim = query.dim() == 3, 0 if self.batch_first else 1
        if not is_batch:
            query, key, value = (tensor.unsqueeze(batch_dim) for tensor in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        # (B, N, heads * head_dim) -> (B, heads, N, head_dim)
        projected = (proj(x) for proj, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value)))
        q, k, v = (tensor.unflatten(-1, (-1, self.head_dim)).movedim(batch_dim, 0).transpose(1, 2) for tensor in projected)
        mask = _combined_mask(None if is_causal else attn_mask, key_padding_mask, q, k.shape[2])
        out = self.attention(q, k, v, attn_mask=mask, key_lengths=key_lengths, is_causal=is_causal, query_offset=query_offset)
        out = out.transpose(1, 2).flatten(-2)
        output = self.output_dropout(self.out_proj(out if self.batch_first else out.transpose(0, 1)))
        return output if is_batch else output.squeeze(batch_dim), None

    def extra_repr(self) -> str:
        heads = f"num_heads={self.num_heads}" + f", num_key_heads={self.num_key_heads}" * (self.num_key_heads != self.num_heads)
        return f"embed_dim={self.embed_dim}, {heads}, batch_first={self.batch_first}"


def _head_dim(embed_dim: int, num_heads: int) -> int:
    """Return the width of a head."""
    if num_heads < 1 or embed_dim < 1 or embed_dim % num_heads:
        raise ValueError(f"embed_dim must be divisible by num_heads, got {embed_dim} and {num_heads}")
    return embed_dim // num_heads


def _factory(options: dict[str, Any]) -> dict[str, Any]:
    """Return those options that new parameters take."""
    return {name: options[name] for name in ("device", "dtype") if name in options}


def _combined_mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, query: torch.Tensor, num_keys: int
) -> torch.Tensor | None:
    """Combine the two masks of torch.nn.MultiheadAttention, in which True hides, into an attn_mask of the operator, in which True
    shows. query: (B, H, Nq, D)."""
    batch, heads, num_queries, _ = query.shape
    pairs, dtype = (num_queries, num_keys), compute_dtype(query.dtype)
    masks = []
    for name, mask, shapes in (
        ("attn_mask", attn_mask, (pairs, (batch * heads, *pairs))),
        ("key_padding_mask", key_padding_mask, ((batch, num_keys),)),
    ):
        if mask is None:
            continue
        if not (mask.dtype == torch.bool or mask.is_floating_point()):
            raise TypeError(f"{name} must be bool or floating point, got {mask.dtype}")
        if tuple(mask.shape) not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"{name} must have shape {expected} ({heads} heads here), got {tuple(mask.shape)}")
        if name == "key_padding_mask":
            mask = mask[:, None, None]
        masks.append(mask.unflatten(0, (batch, heads)) if mask.dim() == 3 else mask)
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        hidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~hidden
    added = [
        torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -torch.inf) if mask.dtype == torch.bool else mask.to(dtype)
        for mask in masks
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]


def _take_packed_projections(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the projections in a state dict of torch.nn.MultiheadAttention."""
    names = ("q_proj", "k_proj", "v_proj")
    for kind in ("weight", "bias"):
        packed = state.pop(f"{prefix}in_proj_{kind}", None)
        if packed is not None:
            sizes = [getattr(module, name).out_features for name in names]
            if sum(sizes) != packed.shape[0]:
                raise ValueError(f"in_proj_{kind} has {packed.shape[0]} rows, the projections need {sizes}")
            for name, part in zip(names, packed.split(sizes), strict=True):
                state[f"{prefix}{name}.{kind}"] = part
    for name in names:
        if (weight := state.pop(f"{prefix}{name}_weight", None)) is not None:
            state[f"{prefix}{name}.weight"] = weight

"""Warnings of valid calls that are probably mistakes.

A warning is given once, and not for what is common: short tables are clipped on purpose, as by Shaw et al., and a call with
positions says what its table means, as long as it uses more than one of the rows.
"""

from __future__ import annotations

import math

import torch

from .arguments import Arguments, has_values, integers_of
from .hints import LAYOUT, PACKED_LAYOUT
from .spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from .warn import warn_once, was_given

LARGEST_CLIP = 512  # tables are clipped at 16 (Shaw), 64 (Wav2Vec2-BERT), 256 (DeBERTa)
MANY_HEADS = 256
SOME_HEADS = 32  # models with a table that the heads share have up to 24
HIDING = -1e4  # BERT's number for hidden keys; others take the lowest of the dtype, or -inf
OPPOSITE = (
    "A bool mask is True where a query may attend (in nn.RelativeMultiheadAttention, True hides): pass ~attn_mask, or "
    "return_lse=True if this is meant"
)


def warn_of_likely_mistakes(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> None:
    """Warn of a valid call that is probably a mistake, once per reason; what was warned of is not looked at again."""
    for check in LIKELY_MISTAKES:
        if not was_given(check.__name__) and (text := check(args, tensors, spec)):
            warn_once(check.__name__, text, UserWarning)


def _num_centred_rows(args: Arguments, spec: AttentionSpec) -> int | None:
    """Return the number of rows of tables without positions, None if there are none."""
    return spec.last - spec.first + 1 if args.positions is None and spec.clamp else None


def _exchanged_dimensions(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """There are more heads than positions, and

    - very many heads, or as many as the positions that the table covers;
    - or more than twice as many heads as positions, in self-attention with a table that the heads share. A prompt of a few tokens
      may have that as well, but not for few heads, and not if anything else tells heads from positions: a table, a mask or keys.
    """
    heads, num_queries, num_keys = tensors.query.shape[1], spec.max_seqlen_q, spec.max_seqlen_k
    if heads <= num_queries or heads <= num_keys:
        return None
    text = f"query has {heads} heads, but {num_queries} positions: {PACKED_LAYOUT if args.is_packed else LAYOUT}"
    if heads > MANY_HEADS or _num_centred_rows(args, spec) == 2 * heads - 1:
        return text
    if args.is_packed or heads < SOME_HEADS or heads <= 2 * num_queries or not 1 < num_queries == num_keys:
        return None
    tables = [(name, getattr(tensors, name)) for name in TABLES if getattr(tensors, name) is not None]
    has_heads = any(is_per_head(name, table) for name, table in tables) or tensors.key.shape[1] != heads
    has_heads = has_heads or (tensors.attn_mask is not None and tensors.attn_mask.shape[1] > 1)
    return text if tables and not has_heads else None


def _mask_of_heads_or_entries(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    mask = args.attn_mask
    if mask is None or mask.dim() not in (2, 3) or not mask.shape[0] == tensors.num_sequences > 1:
        return None
    if mask.dim() == 3:
        layout, per_entry, as_taken = "(heads, Nq, Nk)", "[:, None]", "[None]"
    elif spec.max_seqlen_q != spec.max_seqlen_k:
        layout, per_entry, as_taken = "(Nq, Nk)", "[:, None, None]", "[None, None]"
    else:  # of all pairs of N positions, by chance in a batch of N
        return None
    return (
        f"attn_mask {tuple(mask.shape)} is taken as {layout}, but there are also {mask.shape[0]} batch entries: "
        f"attn_mask{per_entry} is one mask per batch entry; attn_mask{as_taken} says that {layout} is meant"
    )


def _causal_without_offset(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    if spec.window_right != 0 or args.query_offset is not None:
        return None
    num_queries, num_keys = spec.max_seqlen_q, spec.max_seqlen_k
    if tensors.key_lengths is not None:  # a cache that is not full yet, unless the lengths are unknown and there is one query
        lengths = integers_of(tensors.key_lengths)
        num_keys = max(lengths) if lengths else num_keys if num_queries == 1 else 0
    behind = num_keys - num_queries
    if not 0 < num_queries < num_keys:
        return None
    return (
        f"a causal call of {num_queries} queries and {num_keys} keys has no query_offset: its first query is at the "
        f"first key, as in scaled_dot_product_attention, and none sees the last {behind} keys; with a key-value cache, "
        f"query_offset={behind}, the number of keys before the first query; query_offset=0 says that this is meant"
    )


def _rows_of_the_future(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    first, last = spec.first, spec.last
    if not first >= spec.window_right >= 0 or first == last:
        return None
    return (
        f"the rows of the table stand for relative positions j - i from {first} to {last}, but is_causal or window_size "
        f"hides those above {spec.window_right}, so that only the first row is used: if the last row stands for the query's "
        f"own position, positions=RelativePositions({first - last}, 0); if the first row does, tables.from_future_first "
        "reverses them first"
    )


def _short_table(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """A table that is longer than anybody clips at, or one of the past that covers this call, if it is causal."""
    num_rows = _num_centred_rows(args, spec)
    if num_rows is None or tensors.query_offsets is not None or spec.coverage() != "clamp":
        return None
    if num_rows <= 2 * LARGEST_CLIP + 1 and not (spec.window_right == 0 and -spec.farthest()[0] < num_rows):
        return None
    return (
        f"the {num_rows} rows of a table stand for distances up to {num_rows // 2}, and this call has longer ones, "
        f"which take its end rows: positions=RelativePositions.centred({num_rows}) says that this is meant; "
        f"if the last row stands for the query's own position, positions=RelativePositions(-{num_rows - 1}, 0)"
    )


def _rows_of_the_past(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """A single query is the last one of a cache: it has no future."""
    if not spec.first < spec.last == 0 or not spec.clamp or spec.max_seqlen_q == 1 or tensors.query_offsets is not None:
        return None
    num_keys = spec.max_seqlen_k if tensors.key_lengths is None else max(integers_of(tensors.key_lengths), default=0)
    says_what_is_hidden = args.is_causal or args.window_size is not None or args.attn_mask is not None
    if says_what_is_hidden or num_keys - 1 <= spec.query_offset:
        return None
    return (
        f"the rows of the table stand for the past, relative positions from {spec.first} to 0, but nothing hides the future: "
        "its keys use the row of the query's own position; is_causal=True hides them, window_size=(-1, -1) says that this is "
        "meant"
    )


def _hidden_by_position(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """A caller who asks for lse can see that a query has no keys: parts of sequences are merged by it."""
    is_bounded = spec.window_left >= 0 or spec.window_right >= 0
    if args.return_lse or not is_bounded or 0 in (spec.max_seqlen_q, spec.max_seqlen_k):
        return None
    offsets = [spec.query_offset] if tensors.query_offsets is None else integers_of(tensors.query_offsets)
    for offset in offsets:
        farthest_past, farthest_future = spec._replace(query_offset=offset).farthest()
        if farthest_past <= farthest_future:
            return None
    if not offsets:
        return None
    behind = f", perhaps {-offsets[0]}" if offsets[0] < 0 else ""
    return (
        f"no query sees a key: with query_offset={offsets[0]} the relative positions of keys go from "
        f"{1 - spec.max_seqlen_q - offsets[0]} to {spec.max_seqlen_k - 1 - offsets[0]}, and is_causal or window_size hides all "
        f"of them; query_offset is the number of keys before the first query{behind}; return_lse=True, whose lse is -inf there, "
        "says that this is meant"
    )


def _table_of_windows(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """Swin's table has (2w - 1)^2 rows for the w^2 tokens of a window. (9 rows for 4 tokens may be Shaw's.)"""
    num_rows, num_tokens = _num_centred_rows(args, spec), spec.max_seqlen_q
    side = math.isqrt(num_tokens)
    if side < 3 or num_rows != (2 * side - 1) ** 2 or not side * side == num_tokens == spec.max_seqlen_k:
        return None
    return (
        f"a table of {num_rows} = (2 * {side} - 1)^2 rows for {num_tokens} = {side}^2 tokens looks like that of a window of "
        f"{side} x {side}, as in Swin, whose rows stand for offsets in two dimensions; here they stand for j - i. Such a bias is "
        "attn_mask=table[index], which has no gradient, or scaled_dot_product_attention's; "
        f"positions=RelativePositions.centred({num_rows}) says that distances are meant"
    )


def _mask_values(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """Masks that hide all keys of a sequence, the opposite of what is meant, or nothing. What is not at a corner of the mask is
    read only of sequences whose corners look wrong."""
    mask = tensors.attn_mask
    if mask is None or not mask.numel() or not has_values(mask) or args.window_size == (-1, -1):  # of an enabled model: meant
        return None
    is_bool = mask.dtype == torch.bool
    ends = mask[:, :, 0, 0], mask[:, :, -1, -1]  # the first query and key, the last ones
    if not is_bool and max(end.amax() for end in ends) == 1 and ((mask == 0) | (mask == 1)).all():
        return "attn_mask has only 0 and 1 and is added to the logits; if 1 means may attend, pass attn_mask.bool()"
    if args.return_lse:
        return None

    def shows(part: torch.Tensor) -> torch.Tensor:
        return part if is_bool else part > HIDING

    corners = shows(ends[0]) | shows(ends[1])
    hidden = [entry for entry in (~corners.any(1)).nonzero()[:, 0].tolist() if not shows(mask[entry]).any()]
    if hidden:
        some = f"query of {len(hidden)} of {len(mask)} sequences, the first of them {hidden[0]}"
        additive = "A floating-point mask is added to the logits; return_lse=True says that this is meant"
        return (
            f"attn_mask hides every key of every {'query' if len(hidden) == len(mask) else some}. "
            f"{f'Their output is zeros. {OPPOSITE}' if is_bool else additive}"
        )
    # As of the future: some last query sees nothing, and each query sees keys from one on.
    is_square = is_bool and spec.max_seqlen_q == spec.max_seqlen_k and spec.window_right != 0
    is_opposite = is_square and not mask[:, :, 0, 0].any() and not mask[:, :, -1].any(-1).all()
    if is_opposite and (mask[..., :-1] <= mask[..., 1:]).all():
        return f"attn_mask hides every key of some queries, and shows all others only keys at the end. {OPPOSITE}"
    return None


LIKELY_MISTAKES = (
    _exchanged_dimensions,
    _mask_of_heads_or_entries,
    _causal_without_offset,
    _rows_of_the_future,
    _short_table,
    _rows_of_the_past,
    _hidden_by_position,
    _table_of_windows,
    _mask_values,
)

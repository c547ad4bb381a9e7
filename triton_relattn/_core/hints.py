"""Hints: what to write instead of a wrong call, which its error says, and warnings of valid calls that are probably mistakes.

A warning is given once, and not for what is common: short tables are clipped on purpose, as by Shaw et al., and a call with
positions says what its table means, as long as it uses more than one of the rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch

from ..positions import RelativePositions
from .arguments import Arguments, has_values
from .spec import TABLES, AttentionSpec, AttentionTensors, is_per_head
from .warn import warn_once, was_given

Hint = tuple[bool, str]  # whether it applies, and what to write
T5_BIAS = "T5's is rel_bias=weight[tables.t5_buckets(torch.arange(-128, 129))].T, with scale=1.0"
PACKED_LAYOUT = "query, key and value look like (heads, total, width); .transpose(0, 1) makes them (total, heads, width)"
LAYOUT = "query, key and value look like (batch, length, heads, width); .transpose(1, 2) makes them (batch, heads, length, width)"


def hint_for(error: str, args: Arguments) -> str:
    """Return what to write instead of the argument by which an error begins, "" if that is not known. Those before it are
    right."""
    name = re.match(r"\w*", error)[0]  # type: ignore[index]
    return next((text for applies, text in _hints(name, args) if applies), "")


def _hints(name: str, args: Arguments) -> Iterator[Hint]:
    """Yield the hints for an argument, the likeliest first."""
    tensor = getattr(args, name, None)
    if isinstance(tensor, torch.Tensor) and tensor.device == args.query.device and name in (*TABLES, "key", "value", "rel_query"):
        has_other_dtype = tensor.is_floating_point() and tensor.dtype != args.query.dtype and _shape(tensor) != ()
        is_cast = has_other_dtype and not (name == "rel_bias" and tensor.dtype == torch.float32)
        yield is_cast, f"{name}.to(query.dtype), or torch.autocast, which casts float32 tensors"
    if name in TABLES:
        yield from _table_hints(name, args)
    elif name == "positions":
        yield from _position_hints(args)
    elif name == "attn_mask":
        yield from _mask_hints(args)
    elif name in ("key_lengths", "query_offset"):
        yield from _integer_hints(name, args)
    elif name in ("cu_seqlens_q", "cu_seqlens_k"):
        yield from _packing_hints(name, args)
    elif name == "query" and args.is_packed:
        yield len(_shape(args.query)) == 4, ".flatten(0, 1) packs (batch, length, heads, width)"
    yield _fits_exchanged(name, args), PACKED_LAYOUT if args.is_packed else LAYOUT


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) and not value.is_nested else ()


def _values(tensor: Any) -> list[int]:
    """Return the values of a vector of integers; [] of anything else, or if they cannot be read."""
    is_vector = isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1
    return tensor.tolist() if is_vector and has_values(tensor) else []


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    padded = (1,) * (len(full) - len(shape)) + shape
    return len(padded) == len(full) and all(size in (1, other) for size, other in zip(padded, full, strict=True))


def _pairs(args: Arguments) -> tuple[int, ...]:
    """Return (batch, heads, Nq, Nk) of a padded call, () of a packed one."""
    return () if args.is_packed else (*args.query.shape[:3], args.key.shape[2])


def _fits_exchanged(name: str, args: Arguments) -> bool:
    """Return whether an argument is right only with heads and positions exchanged, of which there are more positions then."""
    query, key, value = (_shape(tensor) for tensor in (args.query, args.key, args.value))
    if not len(query) == len(key) == len(value) == (3 if args.is_packed else 4):
        return False
    num_queries, num_keys = query[1], key[1]
    heads, key_heads = (query[0], key[0]) if args.is_packed else (query[2], key[2])
    if num_queries <= heads or num_keys <= heads:
        return False
    if name in ("query", "key"):
        shares = args.enable_gqa and key_heads > 0 and heads % key_heads == 0
        return num_queries != num_keys and (key_heads == heads or shares)
    shape = _shape(getattr(args, name, None))
    if name in TABLES:
        return len(shape) == 2 + len(args.row_shape(name)) and shape[0] == heads
    if name == "attn_mask":
        return not _broadcasts(shape, _pairs(args)) and _broadcasts(shape, (query[0], heads, num_queries, num_keys))
    if name in ("cu_seqlens_q", "cu_seqlens_k"):
        return _values(getattr(args, name))[-1:] == [num_queries if name == "cu_seqlens_q" else num_keys]
    if name == "key_lengths" and shape == query[:1]:
        return heads < max(_values(args.key_lengths), default=0) <= num_keys
    return False


def _table_hints(name: str, args: Arguments) -> Iterator[Hint]:
    table: Any = getattr(args, name)
    yield isinstance(getattr(table, "weight", None), torch.Tensor), f"pass the weights of a module: {name}=module.weight"
    shape, heads, pairs = _shape(table), args.query.shape[1], _pairs(args)
    if not shape or _has_shape(name, table, args):
        return
    if table.dtype == args.query.dtype or (name == "rel_bias" and table.dtype == torch.float32):
        is_bias_of_pairs = name == "rel_bias" and len(shape) > 1 and shape[-2:] == pairs[-2:] and args.attn_mask is None
        yield (
            is_bias_of_pairs and _broadcasts(shape, pairs),
            f"rel_bias has an element per distance, not per pair: {T5_BIAS}; a bias per pair is attn_mask, without a gradient, "
            "or scaled_dot_product_attention's, with one",
        )
        for text, other in other_layouts(name, table, heads):
            yield _has_shape(name, other, args) and _has_positions(name, other, args), text
        is_weight_of_t5 = name == "rel_bias" and len(shape) == 2 and shape[1] == heads and args.positions is None
        yield is_weight_of_t5, f"a weight of T5 has a row per bucket: {T5_BIAS}"
        is_bias = name == "rel_key" and args.rel_bias is None and _has_shape("rel_bias", table, args)
        yield is_bias and _has_positions("rel_bias", table, args), "a bias by distance, (R,) or (heads, R), is rel_bias"
    is_mask = name == "rel_key" and args.attn_mask is None and table.dtype in (torch.bool, torch.float32, args.query.dtype)
    yield is_mask and _broadcasts(shape, pairs), "a mask is given by its name: attn_mask=..."


def _has_shape(name: str, table: torch.Tensor, args: Arguments) -> bool:
    row = tuple(args.row_shape(name))
    extra = table.dim() - len(row) - 1  # a dimension of heads
    return extra in (0, 1) and tuple(table.shape[1 + extra :]) == row and (not extra or table.shape[0] == args.query.shape[1])


def _num_rows(name: str, table: torch.Tensor, args: Arguments) -> int:
    return table.shape[-1 - len(args.row_shape(name))]


def _has_positions(name: str, table: torch.Tensor, args: Arguments) -> bool:
    """Return whether the rows of a table are as many as positions says, or odd."""
    rows = _num_rows(name, table, args)
    return args.positions.num_rows == rows if isinstance(args.positions, RelativePositions) else rows % 2 == 1


def other_layouts(name: str, table: torch.Tensor, heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what else a table may be than (R, width) or (heads, R, width), a bias than (R,) or (heads, R), and it rearranged."""
    for layout, expression, other, wanted in _layouts(table, heads, ", width" if name != "rel_bias" else ""):
        yield f"{name} looks like {layout}; {name}{expression} is {wanted}", other


def _layouts(table: torch.Tensor, heads: int, width: str) -> Iterator[tuple[str, str, torch.Tensor, str]]:
    """Yield a layout, the expression that changes it, the table then, and its layout. width: ", width", empty for a bias."""
    per_head, dimensions = f"(heads, R{width})", table.dim() - bool(width)
    if dimensions > 1 and (dimensions > 2 or table.shape[0] == 1) and len(table):
        yield "a batch of tables", "[0]", table[0], "one, which the batch shares"
        for layout, expression, other, wanted in _layouts(table[0], heads, width):
            yield f"a batch of {layout}", f"[0]{expression}", other, wanted
    if width and table.dim() == 3:
        yield "(R, heads, width)", ".transpose(0, 1)", table.transpose(0, 1), per_head
    if width and table.dim() == 2 and heads and table.shape[1] % heads == 0:
        split = table.unflatten(1, (heads, -1)).transpose(0, 1)
        yield "(R, heads * width)", f".unflatten(1, ({heads}, -1)).transpose(0, 1)", split, per_head
    if dimensions == 2:
        yield f"(heads{width}, R)" if width else "(R, heads)", ".mT", table.mT, per_head
    elif dimensions == 1 and width:
        yield "(width, R)", ".mT", table.mT, "(R, width)"


def _position_hints(args: Arguments) -> Iterator[Hint]:
    positions: Any = args.positions
    name = next((name for name in TABLES if getattr(args, name) is not None), None)
    if name is None:
        return
    table = getattr(args, name)
    num_rows = _num_rows(name, table, args)
    if positions is None:
        is_slopes = name == "rel_bias" and table.dim() == 1 and num_rows == args.query.shape[1]
        is_buckets = name == "rel_bias" and table.dim() == 2
        yield is_buckets, f"a weight of T5 has a row per bucket, not per distance: {T5_BIAS}"
        yield is_slopes, "of ALiBi's slopes, one per head, tables.alibi_bias(slopes, first, last) is the table"
    elif isinstance(positions, int):
        yield positions == num_rows and num_rows % 2 == 1, f"positions=RelativePositions.centred({num_rows})"
        yield 2 * positions + 1 == num_rows, f"positions=RelativePositions(-{positions}, {positions})"
    elif isinstance(positions, RelativePositions):
        is_half = -positions.first == positions.last and 2 * positions.num_rows - 1 == num_rows
        yield is_half, f"RelativePositions.centred takes the number of rows: positions=RelativePositions.centred({num_rows})"
    elif isinstance(positions, (tuple, list, range)) and len(positions) > 1:
        first, last = positions[0], positions[-1]
        is_ends = isinstance(first, int) and isinstance(last, int) and last - first + 1 == num_rows
        yield is_ends, f"positions=RelativePositions({first}, {last})"


def _mask_hints(args: Arguments) -> Iterator[Hint]:
    mask, shape, pairs = args.attn_mask, _shape(args.attn_mask), _pairs(args)
    if mask is None or not shape or mask.requires_grad:
        return
    is_integer = not (mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool)
    to_bool = ".bool()" if is_integer else ""
    if is_integer or mask.dtype in (torch.bool, torch.float32, args.query.dtype):
        for rank, index in ((3, "[:, None]"), (2, "[:, None, None]")):
            is_per_entry = len(shape) == rank and _broadcasts((shape[0], *(1,) * (4 - rank), *shape[1:]), pairs)
            yield is_per_entry, f"attn_mask{index}{to_bool} is one mask per batch entry"
    yield is_integer, "attn_mask.bool() is True where a query may attend"


def _integer_hints(name: str, args: Arguments) -> Iterator[Hint]:
    value: Any = getattr(args, name)
    several = [value] if name == "key_lengths" and isinstance(value, int) else value
    is_list = isinstance(several, (list, tuple)) and set(map(type, several)) == {int}
    yield is_list, f"{name}=torch.tensor({value}, device=query.device)"
    if name != "key_lengths" or not isinstance(value, torch.Tensor) or args.is_packed:
        return
    batch, num_keys = args.key.shape[0], args.key.shape[2]
    is_fraction = value.is_floating_point() and tuple(value.shape) in ((batch,), ())
    yield is_fraction, f"key_lengths.int(), or, of fractions of the length, (key_lengths * {num_keys}).round().int()"
    is_mask = tuple(value.shape) == (batch, num_keys) and not value.is_complex()
    yield is_mask, "key_lengths.sum(1) counts the keys of a mask that is True or 1 for them"


def _packing_hints(name: str, args: Arguments) -> Iterator[Hint]:
    starts = _values(getattr(args, name))
    total = (args.query if name == "cu_seqlens_q" else args.key).shape[0]
    is_lengths = len(starts) > 0 and min(starts) >= 0 and sum(starts) == total != starts[-1]
    yield is_lengths and starts[:1] == [0], "cu_seqlens are lengths added up, .cumsum(0)"
    yield is_lengths, "cu_seqlens are 0 and lengths added up, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"


# Warnings of valid calls.

LARGEST_CLIP = 512  # tables are clipped at 16 (Shaw), 64 (Wav2Vec2-BERT), 256 (DeBERTa)
MANY_HEADS = 256
SOME_HEADS = 32  # models with a table that the heads share have up to 24
HIDING = -1e4  # BERT's number for hidden keys; others take the lowest of the dtype, or -inf
OPPOSITE = (
    "A bool mask is True where a query may attend (in nn.RelativeMultiheadAttention, True hides): pass ~attn_mask, or "
    "return_lse=True if this is meant"
)
LEVELS = 5  # of the stack from warn_of_likely_mistakes to the caller of a public function


def warn_of_likely_mistakes(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> None:
    """Warn of a valid call that is probably a mistake, once for each reason; what was warned of is not looked at again."""
    for check in LIKELY_MISTAKES:
        if not was_given(check.__name__) and (text := check(args, tensors, spec)):
            warn_once(check.__name__, text, LEVELS, UserWarning)


def _num_centred_rows(args: Arguments, spec: AttentionSpec) -> int | None:
    """Return the number of rows of tables without positions, None if there are none."""
    return spec.last - spec.first + 1 if args.positions is None and spec.clamp else None


def _exchanged_dimensions(args: Arguments, tensors: AttentionTensors, spec: AttentionSpec) -> str | None:
    """There are more heads than positions, and

    - very many heads, or as many as the positions that the table covers;
    - or more than twice as many heads as positions, in self-attention with a table that the heads share. A prompt of a few tokens
      may have that, too, but not for few heads, and not if anything else tells heads from positions: a table, a mask or keys.
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
        lengths = _values(tensors.key_lengths)
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
    num_keys = spec.max_seqlen_k if tensors.key_lengths is None else max(_values(tensors.key_lengths), default=0)
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
    offsets = [spec.query_offset] if tensors.query_offsets is None else _values(tensors.query_offsets)
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

"""Hints: what to write instead of a wrong call, which its error says.

A hint is chosen by the argument that is wrong and by the rule of the contract that it breaks (``HINTS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..positions import RelativePositions
from .arguments import Arguments, integers_of
from .names import T5_BIAS
from .spec import TABLES

TYPE, DTYPE, SHAPE, HEADS, ROWS, VALUES = "type", "dtype", "shape", "heads", "rows", "values"
"""The rules of the contract whose errors may have a hint: heads, that key's are query's; rows, that positions are as many."""
BUCKETS = f"T5's is {T5_BIAS}"
PACKED_LAYOUT = "query, key and value look like (heads, total, width); .transpose(0, 1) makes them (total, heads, width)"
LAYOUT = "query, key and value look like (batch, length, heads, width); .transpose(1, 2) makes them (batch, heads, length, width)"
Error = TypeVar("Error", bound=Exception)


def broken(name: str, rule: str, error: Error) -> Error:
    """Return an error, with the argument that breaks a rule noted on it."""
    if not torch.compiler.is_compiling():
        error.broken = name, rule  # type: ignore[attr-defined]
    return error


def hint_for(error: Exception, args: Arguments) -> str:
    """Return what to write instead of the argument that an error is about; "" if that is not known. Those before it are right."""
    name, rule = getattr(error, "broken", ("", ""))
    hints = (hint for names, rules, find in HINTS if name in names and rule in rules for hint in find(name, args))
    return next(hints, "")


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    padded = (1,) * (len(full) - len(shape)) + tuple(shape)
    return len(padded) == len(full) and all(size in (1, other) for size, other in zip(padded, full, strict=True))


def _pairs(args: Arguments) -> tuple[int, ...]:
    """Return (batch, heads, Nq, Nk) of a padded call, () of a packed one."""
    return () if args.is_packed else (*args.query.shape[:3], args.key.shape[2])


def _another_dtype(name: str, args: Arguments) -> Iterator[str]:
    tensor = getattr(args, name)
    if tensor.is_floating_point() and tensor.dim():
        yield f"{name}.to(query.dtype), or torch.autocast, which casts float32 tensors"


def _a_module(name: str, args: Arguments) -> Iterator[str]:
    if isinstance(getattr(getattr(args, name), "weight", None), torch.Tensor):
        yield f"pass the weights of a module: {name}=module.weight"


def _another_layout(name: str, args: Arguments) -> Iterator[str]:
    """Of a table."""
    table, heads, pairs = getattr(args, name), args.query.shape[1], _pairs(args)
    is_matrix = name == "rel_bias" and table.dim() > 1
    if is_matrix and table.shape[-2:] == pairs[-2:] and args.attn_mask is None and _broadcasts(table.shape, pairs):
        yield (
            f"rel_bias has an element per distance, not per pair: {BUCKETS}; a bias per pair is attn_mask, without a gradient, "
            "or scaled_dot_product_attention's, with one"
        )
    for text, other in other_layouts(name, table, heads) if table.dim() else ():
        if _has_shape(name, other, args) and _has_positions(name, other, args):
            yield text
    if is_matrix and table.dim() == 2 and table.shape[1] == heads and args.positions is None:
        yield f"a weight of T5 has a row per bucket: {BUCKETS}"
    if name == "rel_key" and args.rel_bias is None and _has_shape("rel_bias", table, args):
        if _has_positions("rel_bias", table, args):
            yield "a bias by distance, (R,) or (heads, R), is rel_bias"


def _a_mask(name: str, args: Arguments) -> Iterator[str]:
    """In place of rel_key, the fourth argument, as of scaled_dot_product_attention."""
    table: Any = args.rel_key
    is_mask = args.attn_mask is None and table.dtype in (torch.bool, torch.float32, args.query.dtype)
    if is_mask and table.dim() and _broadcasts(table.shape, _pairs(args)):
        yield "a mask is given by its name: attn_mask=..."


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


def _other_positions(name: str, args: Arguments) -> Iterator[str]:
    positions: Any = args.positions
    name, table = next((name, table) for name in TABLES if (table := getattr(args, name)) is not None)
    num_rows = _num_rows(name, table, args)
    if positions is None and name == "rel_bias" and table.dim() == 2:
        yield f"a weight of T5 has a row per bucket, not per distance: {BUCKETS}"
    elif positions is None and name == "rel_bias" and num_rows == args.query.shape[1]:
        yield "of ALiBi's slopes, one per head, tables.alibi_bias(slopes, first, last) is the table"
    elif isinstance(positions, int) and positions == num_rows and num_rows % 2 == 1:
        yield f"positions=RelativePositions.centred({num_rows})"
    elif isinstance(positions, int) and 2 * positions + 1 == num_rows:
        yield f"positions=RelativePositions(-{positions}, {positions})"
    elif isinstance(positions, RelativePositions):
        if -positions.first == positions.last and 2 * positions.num_rows - 1 == num_rows:
            yield f"RelativePositions.centred takes the number of rows: positions=RelativePositions.centred({num_rows})"
    elif isinstance(positions, (tuple, list, range)) and len(positions) > 1:
        first, last = positions[0], positions[-1]
        if isinstance(first, int) and isinstance(last, int) and last - first + 1 == num_rows:
            yield f"positions=RelativePositions({first}, {last})"


def _another_mask(name: str, args: Arguments) -> Iterator[str]:
    mask: Any = args.attn_mask
    is_integer = not (mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool)
    if not mask.dim() or not (is_integer or mask.dtype in (torch.bool, torch.float32, args.query.dtype)):
        return
    for rank, index in ((3, "[:, None]"), (2, "[:, None, None]")):
        if mask.dim() == rank and _broadcasts((mask.shape[0], *(1,) * (4 - rank), *mask.shape[1:]), _pairs(args)):
            yield f"attn_mask{index}{'.bool()' if is_integer else ''} is one mask per batch entry"
    if is_integer:
        yield "attn_mask.bool() is True where a query may attend"


def _a_list(name: str, args: Arguments) -> Iterator[str]:
    value: Any = getattr(args, name)
    several = [value] if name == "key_lengths" and isinstance(value, int) else value
    if isinstance(several, (list, tuple)) and set(map(type, several)) == {int}:
        yield f"{name}=torch.tensor({value}, device=query.device)"


def _no_lengths(name: str, args: Arguments) -> Iterator[str]:
    value: Any = args.key_lengths
    batch, num_keys = args.key.shape[0], args.key.shape[2]
    if value.is_floating_point() and tuple(value.shape) in ((batch,), ()):
        yield f"key_lengths.int(), or, of fractions of the length, (key_lengths * {num_keys}).round().int()"
    if tuple(value.shape) == (batch, num_keys) and not value.is_complex():
        yield "key_lengths.sum(1) counts the keys of a mask that is True or 1 for them"


def _no_starts(name: str, args: Arguments) -> Iterator[str]:
    starts = integers_of(getattr(args, name))
    total = (args.query if name == "cu_seqlens_q" else args.key).shape[0]
    if starts and min(starts) >= 0 and sum(starts) == total != starts[-1]:
        if starts[0] == 0:
            yield "cu_seqlens are lengths added up, .cumsum(0)"
        yield "cu_seqlens are 0 and lengths added up, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))"


def _a_batch(name: str, args: Arguments) -> Iterator[str]:
    """In place of packed sequences."""
    if args.is_packed and args.query.dim() == 4:
        yield ".flatten(0, 1) packs (batch, length, heads, width)"


def _exchanged(name: str, args: Arguments) -> Iterator[str]:
    """An argument that is right only with heads and positions exchanged, of which there are more positions then."""
    query, key = args.query.shape, args.key.shape
    num_queries, num_keys = query[1], key[1]
    heads, key_heads = (query[0], key[0]) if args.is_packed else (query[2], key[2])
    if num_queries <= heads or num_keys <= heads:
        return
    if name in ("query", "key"):
        shares = args.enable_gqa and key_heads > 0 and heads % key_heads == 0
        is_right = num_queries != num_keys and (key_heads == heads or shares)
    elif name == "attn_mask":
        shape = args.attn_mask.shape  # type: ignore[union-attr]
        is_right = _broadcasts(shape, (query[0], heads, num_queries, num_keys)) and not _broadcasts(shape, _pairs(args))
    elif name == "key_lengths":
        is_right = heads < max(integers_of(args.key_lengths), default=0) <= num_keys
    elif name in TABLES:
        shape = getattr(args, name).shape
        is_right = len(shape) == 2 + len(args.row_shape(name)) and shape[0] == heads
    else:
        is_right = integers_of(getattr(args, name))[-1:] == [num_queries if name == "cu_seqlens_q" else num_keys]
    if is_right:
        yield PACKED_LAYOUT if args.is_packed else LAYOUT


HINTS: tuple[tuple[tuple[str, ...], tuple[str, ...], Callable[[str, Arguments], Iterator[str]]], ...] = (
    (("key", "value", "rel_query", *TABLES), (DTYPE,), _another_dtype),
    (TABLES, (TYPE,), _a_module),
    (TABLES, (SHAPE,), _another_layout),
    (("rel_key",), (DTYPE, SHAPE), _a_mask),
    (("positions",), (TYPE, ROWS), _other_positions),
    (("attn_mask",), (DTYPE, SHAPE), _another_mask),
    (("key_lengths", "query_offset"), (TYPE,), _a_list),
    (("key_lengths",), (DTYPE, SHAPE), _no_lengths),
    (("cu_seqlens_q", "cu_seqlens_k"), (VALUES,), _no_starts),
    (("query",), (SHAPE,), _a_batch),
    (("query", "key"), (HEADS,), _exchanged),
    ((*TABLES, "attn_mask"), (SHAPE,), _exchanged),
    (("key_lengths", "cu_seqlens_q", "cu_seqlens_k"), (VALUES,), _exchanged),
)
"""Arguments, the rules that they may break, and what the argument may be instead: those before the others are likelier."""

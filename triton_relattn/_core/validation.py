"""The contract of the public functions: ranks, shapes, dtypes, devices and values, checked once, before any work.

No message is formatted before it is needed: that would take longer than the checks, and formatting a symbolic number fixes its
value. Every message begins with the argument's name. ``broken`` notes which rule it breaks where hints.py may know what to write
instead.
"""

from __future__ import annotations

import itertools
import numbers
from typing import Any

import torch

from ..positions import LARGEST_POSITION, RelativePositions
from .arguments import Arguments, has_values
from .hints import DTYPE, HEADS, ROWS, SHAPE, TYPE, VALUES, broken, hint_for
from .mistakes import warn_of_likely_mistakes
from .spec import TABLES, AttentionSpec, AttentionTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_NUMBER, SMALLEST_NUMBER = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
NO_TABLE = RelativePositions(0, 0, "zero")
LEARNED = {
    "scale": "multiply query by it, with rel_query and rel_p2c if they are given, and pass scale=1.0",
    "rel_scale": "multiply rel_key and rel_p2c by it, and pass rel_scale=1.0",
    "softcap": "train it with dense attention, and pass the number that comes out",
}
"""What to do with a number that is to be trained: numbers have no gradient."""


def resolve(arguments: Arguments) -> tuple[AttentionTensors, AttentionSpec]:
    """Check a call; return its tensors and scalars, defaults filled in. Packed tensors become (1, heads, total, width)."""
    try:
        tensors, spec = _resolve(arguments)
    except (TypeError, ValueError) as error:
        if not torch.compiler.is_compiling() and (hint := hint_for(error, arguments)):
            error.args = (f"{error}; {hint}",)
        raise
    if not torch.compiler.is_compiling():
        warn_of_likely_mistakes(arguments, tensors, spec)
    return tensors, spec


def _resolve(arguments: Arguments) -> tuple[AttentionTensors, AttentionSpec]:
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace would keep the positions of this call's lengths for all other lengths; torch.export and "
            "torch.compile do not, and disable(model) makes an enabled model stock again"
        )
    query, key = arguments.query, arguments.key
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query must be a torch.Tensor, got {type(query).__name__}")
    for name in ("query", "key", "value"):
        check_operand(name, getattr(arguments, name), query)
    if arguments.rel_query is not None:
        check_operand("rel_query", arguments.rel_query, query)
    for name in ("is_causal", "enable_gqa", "return_lse"):
        if not isinstance(getattr(arguments, name), bool):
            raise TypeError(f"{name} must be a bool, got {getattr(arguments, name)!r}")
    _check_shapes(arguments)
    num_rows = _check_tables(arguments)
    positions = _check_positions(arguments.positions, num_rows)

    if arguments.is_packed:
        batch, max_seqlen_q, max_seqlen_k = _check_packing(arguments)
    else:
        batch, max_seqlen_q, max_seqlen_k = query.shape[0], query.shape[2], key.shape[2]
    if arguments.attn_mask is not None:
        _check_mask(arguments.attn_mask, query, (batch, query.shape[1], query.shape[2], key.shape[2]))
    if arguments.key_lengths is not None:
        lengths = _check_integers("key_lengths", arguments.key_lengths, query, batch, "batch")
        if lengths and not 0 <= min(lengths) <= max(lengths) <= key.shape[2]:
            got = f"got values from {min(lengths)} to {max(lengths)}"
            raise broken("key_lengths", VALUES, ValueError(f"key_lengths must lie in [0, {key.shape[2]}], {got}"))
    window_left, window_right = _check_window(arguments.window_size, arguments.is_causal)
    query_offset = 0
    offsets: list[int] | None  # None: unknown
    if isinstance(arguments.query_offset, torch.Tensor):
        offsets = _check_integers("query_offset", arguments.query_offset, query, batch, "batch")
        for offset in offsets or ():
            check_integer("query_offset", offset)
    else:
        query_offset = 0 if arguments.query_offset is None else check_integer("query_offset", arguments.query_offset)
        offsets = [query_offset]
    scale, rel_scale = _check_scales(arguments)
    spec = AttentionSpec(
        scale=scale,
        rel_scale=rel_scale,
        first=positions.first,
        last=positions.last,
        clamp=positions.outside == "clamp",
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softcap=_check_softcap(arguments.softcap),
        dropout_p=check_probability("dropout_p", arguments.dropout_p),
    )
    if positions.outside == "error":
        _require_covered(positions, spec, offsets)
    return arranged(arguments), spec


def arranged(arguments: Arguments) -> AttentionTensors:
    """Return the tensors of a call that has been checked, as implementations take them, all of them views."""
    query, key, value, rel_query = arguments.query, arguments.key, arguments.value, arguments.rel_query
    mask, key_lengths, offsets = arguments.attn_mask, arguments.key_lengths, arguments.query_offset
    if arguments.is_packed:  # (total, heads, width) becomes (1, heads, total, width)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        rel_query = None if rel_query is None else rel_query.transpose(0, 1)[None]
        batch = arguments.cu_seqlens_q.shape[0] - 1  # type: ignore[union-attr]
    else:
        batch = query.shape[0]
    if mask is not None and mask.dim() != 4:
        mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    if key_lengths is not None and key_lengths.dim() == 0:
        key_lengths = key_lengths.expand(batch)
    if not isinstance(offsets, torch.Tensor):
        offsets = None
    elif offsets.dim() == 0:
        offsets = offsets.expand(batch)
    tables = arguments.rel_key, arguments.rel_value, arguments.rel_bias, arguments.rel_p2c
    starts = arguments.cu_seqlens_q, arguments.cu_seqlens_k
    return AttentionTensors(query, key, value, rel_query, *tables, mask, key_lengths, offsets, *starts)


def _require_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if tensor.shape != expected:
        error = ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(tensor.shape)}")
        raise broken(name, SHAPE, error)


def _require_tensor(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise broken(name, TYPE, TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}"))
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = "a nested one" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(f"{name} must be a strided tensor, got {layout}")
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def check_operand(name: str, tensor: torch.Tensor, query: torch.Tensor, or_float32: bool = False) -> None:
    """Check that a tensor is on query's device and in its dtype, or in float32 if that may be."""
    _require_tensor(name, tensor, query)
    if tensor.dtype not in DTYPES:
        raise broken(name, DTYPE, TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}"))
    if tensor.dtype != query.dtype and not (or_float32 and tensor.dtype == torch.float32):
        allowed = f"{query.dtype} or float32" if or_float32 else f"{query.dtype}"
        raise broken(name, DTYPE, TypeError(f"{name} must have query's dtype {allowed}, got {tensor.dtype}"))


def _check_shapes(arguments: Arguments) -> None:
    """Check the shapes of query, key, value and rel_query."""
    rank, dimensions = (3, "(total, heads, width)") if arguments.is_packed else (4, "(batch, heads, length, width)")
    for name in ("query", "key", "value", "rel_query"):
        tensor = getattr(arguments, name)
        if tensor is not None and tensor.dim() != rank:
            raise broken(name, SHAPE, ValueError(f"{name} must have {rank} dimensions {dimensions}, got {tuple(tensor.shape)}"))
    query, key, value_width = arguments.query.shape, arguments.key.shape, arguments.value.shape[-1]
    heads, width, key_heads = query[1], query[-1], key[1]
    if width == 0 or value_width == 0:
        raise ValueError(f"widths must be positive, got {width} (query), {value_width} (value)")
    if arguments.enable_gqa:
        if heads % key_heads if key_heads else heads:
            text = f"query's heads must be a multiple of key's with enable_gqa, got {heads} and {key_heads}"
            raise broken("query", HEADS, ValueError(text))
    elif key_heads != heads:
        text = f"key must have query's {heads} heads, got {key_heads} in {tuple(key)}; enable_gqa=True lets heads share"
        raise broken("key", HEADS, ValueError(text))
    expected = (*key[:-1], width) if arguments.is_packed else (query[0], *key[1:-1], width)
    _require_shape("key", arguments.key, expected, f"{dimensions} with query's batch and width")
    _require_shape("value", arguments.value, (*key[:-1], value_width), f"{dimensions} with key's heads and length")
    if arguments.rel_query is not None:
        rel_width = arguments.rel_query.shape[-1]
        if rel_width == 0:
            raise ValueError(f"widths must be positive, got {rel_width} (rel_query)")
        _require_shape("rel_query", arguments.rel_query, (*query[:-1], rel_width), f"{dimensions} with query's length")


def _check_tables(arguments: Arguments) -> int | None:
    """Check the tables; return the number of rows that all of them have, None if there is no table."""
    if arguments.rel_key is None and arguments.rel_query is not None:
        raise ValueError("rel_query needs rel_key, the table that it is multiplied with")
    first, num_rows = "", None
    for name in TABLES:
        table = getattr(arguments, name)
        if table is None:
            continue
        check_operand(name, table, arguments.query, or_float32=name == "rel_bias")
        shape, row = table.shape, arguments.row_shape(name)
        rank = 1 + len(row)
        if len(shape) not in (rank, rank + 1) or shape[len(shape) - len(row) :] != row or shape[-rank] == 0:
            wanted = (
                f"(R, width) or (heads, R, width) with R >= 1 and width = {row[0]}" if row else "(R,) or (heads, R) with R >= 1"
            )
            raise broken(name, SHAPE, ValueError(f"{name} must have shape {wanted}, got {tuple(shape)}"))
        if len(shape) > rank:
            _require_shape(name, table, (arguments.query.shape[1], *shape[1:]), "(heads, R, width)" if row else "(heads, R)")
        if num_rows is None:
            first, num_rows = name, shape[-rank]
        elif shape[-rank] != num_rows:
            raise ValueError(f"{name} must have the same number of rows R as {first}, {num_rows}, got {shape[-rank]}")
    return num_rows


def _check_positions(positions: RelativePositions | None, num_rows: int | None) -> RelativePositions:
    if num_rows is None:
        if positions is not None:
            raise ValueError("positions was given, but no table: rel_key, rel_value, rel_bias or rel_p2c")
        return NO_TABLE
    if positions is None:
        try:
            return RelativePositions.centred(num_rows)
        except ValueError as error:
            raise broken("positions", ROWS, error) from None
    if not isinstance(positions, RelativePositions):
        raise broken("positions", TYPE, TypeError(f"positions must be a RelativePositions, got {type(positions).__name__}"))
    if positions.num_rows != num_rows:
        ends = f"{positions.first} to {positions.last}"
        text = f"positions from {ends} need {positions.num_rows} rows, but the table has R = {num_rows}"
        raise broken("positions", ROWS, ValueError(text))
    return positions


def _check_packing(arguments: Arguments) -> tuple[int, int, int]:
    """Check where packed sequences start; return their number, and the maximal lengths."""
    query, starts_q, starts_k = arguments.query, arguments.cu_seqlens_q, arguments.cu_seqlens_k
    longest_q = _check_starts("q", starts_q, arguments.max_seqlen_q, query, query.shape[0])
    longest_k = _check_starts("k", starts_k, arguments.max_seqlen_k, query, arguments.key.shape[0])
    _require_shape("cu_seqlens_k", starts_k, tuple(starts_q.shape), "that of cu_seqlens_q")  # type: ignore[arg-type,union-attr]
    return starts_q.shape[0] - 1, longest_q, longest_k  # type: ignore[union-attr]


def _check_starts(which: str, cu_seqlens: Any, max_seqlen: Any, query: torch.Tensor, total: int) -> int:
    """Check cu_seqlens and max_seqlen of queries or keys; return max_seqlen as an int."""
    name = f"cu_seqlens_{which}"
    _require_tensor(name, cu_seqlens, query)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    starts = _check_integers(name, cu_seqlens, query, cu_seqlens.shape[0], "batch + 1")
    longest = check_integer(f"max_seqlen_{which}", max_seqlen)
    if not _in_range(0, longest, LARGEST_POSITION):
        raise ValueError(f"max_seqlen_{which} must not be negative, got {longest}")
    if starts is not None:
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        if min(lengths, default=0) < 0 or starts[0] != 0 or starts[-1] != total:
            raise broken(name, VALUES, ValueError(f"{name} must rise from 0 to the total length {total}, got {starts}"))
        needed = max(lengths, default=0)
        if longest < needed:
            raise ValueError(f"max_seqlen_{which} must be at least {needed}, the longest of {name}, got {longest}")
    return longest


def _check_mask(attn_mask: torch.Tensor, query: torch.Tensor, shape: tuple[int, ...]) -> None:
    _require_tensor("attn_mask", attn_mask, query)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in (query.dtype, torch.float32):
        text = f"attn_mask must be bool, query's dtype {query.dtype} or float32, got {attn_mask.dtype}"
        raise broken("attn_mask", DTYPE, TypeError(text))
    if attn_mask.requires_grad:
        raise ValueError(
            "attn_mask is not differentiable here, but requires_grad is set. Learned bias per distance: rel_bias. "
            "Learned (H, N, N) bias: scaled_dot_product_attention. As a constant: attn_mask.detach()"
        )
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    # Not "in (1, full)", of which torch.compile makes False where one of two equal sizes is symbolic.
    if len(sizes) != 4 or not all(size == 1 or size == full for size, full in zip(sizes, shape, strict=True)):
        text = f"attn_mask must broadcast to (batch, heads, Nq, Nk) = {shape}, got {tuple(attn_mask.shape)}"
        raise broken("attn_mask", SHAPE, ValueError(text))


def _check_integers(name: str, tensor: torch.Tensor, query: torch.Tensor, length: int, meaning: str) -> list[int] | None:
    """Check a vector of integers, or a single one for all; return its values, None if reading them would wait for a GPU."""
    _require_tensor(name, tensor, query)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise broken(name, DTYPE, TypeError(f"{name} must be int32 or int64, got {tensor.dtype}"))
    if tensor.dim() > 0:
        _require_shape(name, tensor, (length,), f"({meaning},)")
    if not has_values(tensor):
        return None
    return tensor.tolist() if tensor.dim() > 0 else [int(tensor)] * min(length, 1)


def _check_window(window_size: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    if window_size is None:
        return -1, 0 if is_causal else -1
    left, right = check_pair("window_size", "(left, right), where -1 means no limit", window_size)
    if not (_in_range(-1, left, LARGEST_POSITION) and _in_range(-1, right, LARGEST_POSITION)):
        raise ValueError(f"window_size must be (left, right), each at least -1 (unbounded), got {window_size}")
    return left, 0 if is_causal else right


def _check_scales(arguments: Arguments) -> tuple[float, float]:
    """Return scale and rel_scale."""
    learned = ""
    if arguments.rel_scale is not None:
        if arguments.rel_key is None and arguments.rel_p2c is None:
            raise ValueError("rel_scale is the factor of the products with rel_key and rel_p2c, which are None")
        learned = "multiply query by it, pass the unscaled query as rel_query, and scale=1.0"
    scale = arguments.query.shape[-1] ** -0.5 if arguments.scale is None else check_number("scale", arguments.scale, learned)
    return float(scale), float(scale) if arguments.rel_scale is None else check_number("rel_scale", arguments.rel_scale)


def _check_softcap(softcap: float | None) -> float | None:
    if softcap is None:
        return None
    softcap = check_number("softcap", softcap)
    if not _in_range(SMALLEST_NUMBER, softcap, LARGEST_NUMBER):
        least = f"float32 begins at {SMALLEST_NUMBER:.3g}"
        raise ValueError(f"softcap must be positive, got {softcap} ({least}); softcap=None means no limit")
    return softcap


def _in_range(low: float, value: Any, high: float) -> bool:
    """Return whether low <= value <= high. A compiled program checks a number that it computes itself, without a guard."""
    if not torch.compiler.is_compiling():
        return bool(low <= value <= high)  # of NaN neither holds
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    for holds in (low <= value, value <= high):
        if not guard_or_true(holds):
            return False
        torch._check(holds)
    return True


def _plain(name: str, value: Any, kind: Any, learned: str = "") -> Any:
    """Convert a number of another library, such as numpy's, to Python's int or float."""
    wanted, abstract = ("an int", numbers.Integral) if kind is int else ("a float", numbers.Real)
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            cure = learned or LEARNED.get(name, "detach it to say that it is not to be trained")
            raise TypeError(f"{name} must be {wanted} and has no gradient, got a tensor that requires one: {cure}")
        raise TypeError(f"{name} must be {wanted}, got a tensor; .item() reads its value")
    if isinstance(value, bool) or not isinstance(value, abstract):
        raise broken(name, TYPE, TypeError(f"{name} must be {wanted}, got {value!r}"))
    return kind(value)


def check_number(name: str, value: Any, learned: str = "") -> float:
    """Return a number as a float that float32 can hold. learned: what to do with one that is to be trained."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, bool):
        value = _plain(name, value, float, learned)
    if not _in_range(-LARGEST_NUMBER, value, LARGEST_NUMBER):
        raise ValueError(f"{name} must be finite, got {value} (float32 ends at {LARGEST_NUMBER:.3g})")
    return float(value)


def check_integer(name: str, value: Any) -> int:
    """Return an integer that is a position or a distance."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        value = _plain(name, value, int)
    if not _in_range(-LARGEST_POSITION, value, LARGEST_POSITION):
        raise ValueError(f"{name} must lie within +-2**29, got {value}")
    return value  # type: ignore[no-any-return]


def check_probability(name: str, value: Any) -> float:
    value = check_number(name, value)
    if value and not _in_range(0, value, 1):
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
    return value


def check_pair(name: str, meaning: str, value: Any) -> tuple[int, int]:
    """Return a pair of integers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or any(end is None for end in value):
        raise TypeError(f"{name} must be a pair {meaning}, got {value!r}")
    return check_integer(name, value[0]), check_integer(name, value[1])


def _require_covered(positions: RelativePositions, spec: AttentionSpec, offsets: list[int] | None) -> None:
    """Raise unless the table has a row for every pair that window, lengths and offsets (None: unknown) allow."""
    if spec.coverage(has_one_offset=False) == "full" or 0 in (spec.max_seqlen_q, spec.max_seqlen_k):
        return
    if offsets is None:
        needed = "the values of query_offset are not known here"
    else:
        low, _ = spec._replace(query_offset=max(offsets, default=0)).farthest()
        _, high = spec._replace(query_offset=min(offsets, default=0)).farthest()
        if positions.first <= low and high <= positions.last:
            return
        needed = f"this call needs {low} to {high}"
    raise ValueError(
        f"positions from {positions.first} to {positions.last} do not cover every pair that window and lengths allow ({needed}), "
        'and outside="error"'
    )

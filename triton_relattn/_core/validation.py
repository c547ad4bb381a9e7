"""The contract of the public functions: ranks, shapes, dtypes, devices and values, checked once, before any work.

No message is formatted before it is needed: that would take longer than the checks, and formatting a symbolic number fixes its
value.
"""

from __future__ import annotations

import itertools
import numbers
from typing import Any

import torch

from ..positions import LARGEST_POSITION, RelativePositions
from .arguments import Arguments, has_values
from .doubts import Known, with_advice
from .spec import AttentionSpec, AttentionTensors

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_NUMBER, SMALLEST_NUMBER = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
NO_TABLE = RelativePositions(0, 0, "zero")
LEARNED = {
    "scale": "multiply query by it, with rel_query and rel_p2c if they are given, and pass scale=1.0",
    "rel_scale": "multiply rel_key and rel_p2c by it, and pass rel_scale=1.0",
    "softcap": "train it with dense attention, and pass the number that comes out",
}
"""What to do about a number that is to be trained: numbers have no gradient."""


def _require_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...], meaning: str, of_others: str = "") -> None:
    if tensor.shape != expected:
        meaning += f" with {of_others}" if of_others else ""
        raise ValueError(f"{name} must have shape {meaning} = {expected}, got {tuple(tensor.shape)}")


def _require_tensor(name: str, tensor: torch.Tensor, query: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"{name} must be a strided tensor, got {'a nested one' if tensor.is_nested else f'layout {tensor.layout}'}"
        )
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on query's device {query.device}, got {tensor.device}")


def check_operand(name: str, tensor: torch.Tensor, query: torch.Tensor, float32_too: bool = False) -> None:
    _require_tensor(name, tensor, query)
    if tensor.dtype not in DTYPES:
        raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if tensor.dtype != query.dtype and not (float32_too and tensor.dtype == torch.float32):
        allowed = f"{query.dtype} or float32" if float32_too else f"{query.dtype}"
        raise TypeError(f"{name} must have query's dtype {allowed}, got {tensor.dtype}")


def _check_integers(
    name: str, tensor: torch.Tensor, query: torch.Tensor, length: int, meaning: str
) -> tuple[torch.Tensor, list[int] | None]:
    """Return a vector of integers, a single one repeated for all, and its values; None if reading them would wait for a GPU."""
    _require_tensor(name, tensor, query)
    if tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() == 0:
        tensor = tensor.expand(length)
    _require_shape(name, tensor, (length,), f"({meaning},)")
    return tensor, tensor.tolist() if has_values(tensor) else None


def _check_shapes(tensors: AttentionTensors, packed: bool, enable_gqa: bool) -> None:
    """Check the shapes of query, key, value and rel_query: (batch, heads, length, width), or packed (length, heads, width)."""
    rank, dimensions = (3, "(total, heads, width)") if packed else (4, "(batch, heads, length, width)")
    for name, tensor in zip(("query", "key", "value", "rel_query"), tensors, strict=False):
        if tensor is not None and tensor.dim() != rank:
            raise ValueError(f"{name} must have {rank} dimensions {dimensions}, got {tuple(tensor.shape)}")
    query, key, value_width = tensors.query.shape, tensors.key.shape, tensors.value.shape[-1]
    heads, width, key_heads = query[1], query[-1], key[1]
    if width == 0 or value_width == 0:
        raise ValueError(f"widths must be positive, got {width} (query), {value_width} (value)")
    if enable_gqa:
        if heads % key_heads if key_heads else heads:
            raise ValueError(f"with enable_gqa, query's heads must be a multiple of key's, got {heads} and {key_heads}")
    elif key_heads != heads:
        got = f"got {key_heads} in {tuple(key)}"
        raise ValueError(f"key must have query's {heads} heads, {got}; enable_gqa=True lets heads share")
    expected = (*key[:-1], width) if packed else (query[0], *key[1:-1], width)
    _require_shape("key", tensors.key, expected, dimensions, "query's batch and width")
    _require_shape("value", tensors.value, (*key[:-1], value_width), dimensions, "key's heads and length")
    if tensors.rel_query is not None:
        rel_width = tensors.rel_query.shape[-1]
        if rel_width == 0:
            raise ValueError(f"widths must be positive, got {rel_width} (rel_query)")
        _require_shape("rel_query", tensors.rel_query, (*query[:-1], rel_width), dimensions, "query's length")


def _check_tables(tensors: AttentionTensors, heads: int) -> int | None:
    """Check the tables; return the number of rows that all of them have, None if there is no table."""
    num_rows: dict[str, int] = {}
    for name, table, of_width in (
        ("rel_key", tensors.rel_key, tensors.query if tensors.rel_query is None else tensors.rel_query),
        ("rel_value", tensors.rel_value, tensors.value),
        ("rel_bias", tensors.rel_bias, None),
        ("rel_p2c", tensors.rel_p2c, tensors.key),
    ):
        if table is None:
            continue
        check_operand(name, table, tensors.query, float32_too=of_width is None)
        shape, tail = table.shape, () if of_width is None else of_width.shape[-1:]
        rank = 1 + len(tail)
        if len(shape) not in (rank, rank + 1) or shape[len(shape) - len(tail) :] != tail or shape[-rank] == 0:
            what = (
                f"(R, width) or (heads, R, width) with R >= 1 and width = {tail[0]}" if tail else "(R,) or (heads, R) with R >= 1"
            )
            raise ValueError(f"{name} must have shape {what}, got {tuple(shape)}")
        if len(shape) > rank:
            _require_shape(name, table, (heads, *shape[1:]), "(heads, R, width)" if tail else "(heads, R)")
        num_rows[name] = shape[-rank]
    first = next(iter(num_rows.values()), None)
    if any(rows != first for rows in num_rows.values()):
        rows_of = ", ".join(f"{rows} ({name})" for name, rows in num_rows.items())
        raise ValueError(f"all tables must have the same number of rows R, got {rows_of}")
    return first


def _check_mask(attn_mask: torch.Tensor, query: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Check the mask and return it with four dimensions."""
    _require_tensor("attn_mask", attn_mask, query)
    if attn_mask.dtype != torch.bool and attn_mask.dtype not in (query.dtype, torch.float32):
        raise TypeError(f"attn_mask must be bool, query's dtype {query.dtype} or float32, got {attn_mask.dtype}")
    if attn_mask.requires_grad:
        raise ValueError(
            "attn_mask is not differentiable here, but requires_grad is set. Learned bias per distance: rel_bias. "
            "Learned (H, N, N) bias: scaled_dot_product_attention. As a constant: attn_mask.detach()"
        )
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    # Not "in (1, full)", of which torch.compile makes False where one of two equal sizes is symbolic.
    if len(sizes) != 4 or not all(size == 1 or size == full for size, full in zip(sizes, shape, strict=True)):
        raise ValueError(f"attn_mask must broadcast to (batch, heads, Nq, Nk) = {shape}, got {tuple(attn_mask.shape)}")
    return attn_mask.reshape(sizes) if attn_mask.dim() != 4 else attn_mask


def _within(low: float, value: Any, high: float) -> bool:
    """Return whether a number lies in a range. If a compiled program computes the number, it checks the range itself, without a
    guard."""
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
    what, abstract = ("an int", numbers.Integral) if kind is int else ("a float", numbers.Real)
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            cure = learned or LEARNED.get(name, "detach it to say that it is not to be trained")
            raise TypeError(f"{name} must be {what} and has no gradient, got a tensor that requires one: {cure}")
        raise TypeError(f"{name} must be {what}, got a tensor; .item() reads its value")
    if isinstance(value, bool) or not isinstance(value, abstract):
        raise TypeError(f"{name} must be {what}, got {value!r}")
    return kind(value)


def check_number(name: str, value: Any, learned: str = "") -> float:
    """Check a number and return it as a float: float32, in which most calls compute, must hold it.

    Args:
        learned: what to do about a number that is to be trained, if not what LEARNED says.
    """
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) or isinstance(value, bool):
        value = _plain(name, value, float, learned)
    if not _within(-LARGEST_NUMBER, value, LARGEST_NUMBER):
        raise ValueError(f"{name} must be finite, got {value} (float32 ends at {LARGEST_NUMBER:.3g})")
    return float(value)


def check_integer(name: str, value: Any) -> int:
    """Check an integer that is a position or a distance, and return it."""
    if not isinstance(value, (int, torch.SymInt)) or isinstance(value, bool):
        value = _plain(name, value, int)
    if not _within(-LARGEST_POSITION, value, LARGEST_POSITION):
        raise ValueError(f"{name} must lie within +-2**29, got {value}")
    return value  # type: ignore[no-any-return]


def check_probability(name: str, value: Any) -> float:
    """Check a probability and return it."""
    value = check_number(name, value)
    if value and not _within(0, value, 1):
        raise ValueError(f"{name} must lie in [0, 1], got {value}")
    return value


def check_pair(name: str, meaning: str, value: Any) -> tuple[int, int]:
    """Check a pair of integers and return it."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or any(each is None for each in value):
        raise TypeError(f"{name} must be a pair {meaning}, got {value!r}")
    return check_integer(name, value[0]), check_integer(name, value[1])


def _flags(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be a bool, got {value!r}")


def _window(window_size: tuple[int, int] | None, is_causal: bool) -> tuple[int, int]:
    if window_size is None:
        return -1, 0 if is_causal else -1
    left, right = check_pair("window_size", "(left, right), where -1 means no limit", window_size)
    if not (_within(-1, left, LARGEST_POSITION) and _within(-1, right, LARGEST_POSITION)):
        raise ValueError(f"window_size must be (left, right), each at least -1 (unbounded), got {window_size}")
    return left, 0 if is_causal else right


def _resolve_positions(positions: RelativePositions | None, num_rows: int | None) -> RelativePositions:
    if num_rows is None:
        if positions is not None:
            raise ValueError("positions was given, but no table: rel_key, rel_value, rel_bias or rel_p2c")
        return NO_TABLE
    if positions is None:
        return RelativePositions.centred(num_rows)
    if not isinstance(positions, RelativePositions):
        raise TypeError(f"positions must be a RelativePositions, got {type(positions).__name__}")
    if positions.num_rows != num_rows:
        ends = f"{positions.first} to {positions.last}"
        raise ValueError(f"the table has R = {num_rows} rows, but positions from {ends} need {positions.num_rows}")
    return positions


def _require_covered(positions: RelativePositions, spec: AttentionSpec, offsets: list[int] | None) -> None:
    """Raise ValueError unless the table has a row for every pair that window and lengths allow, as ``outside="error"`` asks.

    Args:
        offsets: values of query_offset; None if they are not known.
    """
    if spec.coverage(offset_is_known=False) == "full" or 0 in (spec.max_seqlen_q, spec.max_seqlen_k):
        return
    low, high = -spec.window_left, spec.window_right
    if offsets is not None:
        farthest_past = -(spec.max_seqlen_q - 1) - max(offsets, default=0)
        farthest_future = spec.max_seqlen_k - 1 - min(offsets, default=0)
        low = max(low, farthest_past) if spec.window_left >= 0 else farthest_past
        high = min(high, farthest_future) if spec.window_right >= 0 else farthest_future
        if positions.first <= low and high <= positions.last:
            return
    needed = f"this call needs {low} to {high}" if offsets is not None else "the values of query_offset are not known here"
    raise ValueError(
        f"positions from {positions.first} to {positions.last} do not cover every pair that window and lengths allow ({needed}), "
        'and outside="error"'
    )


def refuse_tracing() -> None:
    """Raise NotImplementedError if torch.jit.trace is at work: it would fix the positions."""
    if not torch.compiler.is_compiling() and torch.jit.is_tracing():
        raise NotImplementedError(
            "torch.jit.trace would keep the positions of this call's lengths for all other lengths; torch.export and "
            "torch.compile do not, and disable(model) makes an enabled model stock again"
        )


@with_advice
def resolve(arguments: Arguments) -> tuple[AttentionTensors, AttentionSpec, Known]:
    """Check one call and return its tensors and its scalars, with every default filled in. Tensors of a packed batch are returned
    as (1, heads, total, width) views. (What with_advice needs to know is returned to it alone.)

    Raises:
        ValueError: wrong rank, shape, device or value; the message names the argument, what is wanted and what was got.
        TypeError: wrong type or dtype.
        NotImplementedError: torch.jit.trace is at work.
    """
    query, key, value, terms, attn_mask, key_lengths, is_causal, window_size, query_offset, dropout_p = arguments[:10]
    scale, softcap, enable_gqa, return_lse, cu_seqlens, max_seqlens = arguments[10:]
    rel_key, rel_query, rel_value, rel_bias, rel_p2c, positions, rel_scale = terms
    refuse_tracing()
    if not isinstance(query, torch.Tensor):
        raise TypeError(f"query must be a torch.Tensor, got {type(query).__name__}")
    tensors = AttentionTensors(query, key, value, rel_query, rel_key, rel_value, rel_bias, rel_p2c)
    for name in ("query", "key", "value"):
        check_operand(name, getattr(tensors, name), query)
    if rel_query is not None:
        check_operand("rel_query", rel_query, query)
    _flags(is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    _check_shapes(tensors, cu_seqlens is not None, enable_gqa)
    if rel_key is None and rel_query is not None:
        raise ValueError("rel_query needs rel_key, the table that it is multiplied with")
    if rel_key is None and rel_p2c is None and rel_scale is not None:
        raise ValueError("rel_scale is the factor of the products with rel_key and rel_p2c, which are None")
    num_rows = _check_tables(tensors, query.shape[1])

    if cu_seqlens is not None and max_seqlens is not None:
        max_seqlen_q = _check_packing("q", cu_seqlens["q"], max_seqlens["q"], query, query.shape[0])
        max_seqlen_k = _check_packing("k", cu_seqlens["k"], max_seqlens["k"], query, key.shape[0])
        _require_shape("cu_seqlens_k", cu_seqlens["k"], tuple(cu_seqlens["q"].shape), "that of cu_seqlens_q")
        views = [None if tensor is None else tensor.transpose(0, 1)[None] for tensor in (query, key, value, rel_query)]
        tensors = tensors._replace(**dict(zip(("query", "key", "value", "rel_query"), views, strict=True)))  # type: ignore[arg-type]
        tensors = tensors._replace(cu_seqlens_q=cu_seqlens["q"], cu_seqlens_k=cu_seqlens["k"])
    else:
        max_seqlen_q, max_seqlen_k = query.shape[2], key.shape[2]
    batch = tensors.num_sequences

    if attn_mask is not None:
        mask = _check_mask(attn_mask, query, (batch, query.shape[1], query.shape[2], key.shape[2]))
        tensors = tensors._replace(attn_mask=mask)
    lengths: list[int] | None = None
    if key_lengths is not None:
        key_lengths, lengths = _check_integers("key_lengths", key_lengths, query, batch, "batch")
        if lengths:
            low, high = min(lengths), max(lengths)
            if low < 0 or high > key.shape[2]:
                raise ValueError(f"key_lengths must lie in [0, {key.shape[2]}], got values from {low} to {high}")
        tensors = tensors._replace(key_lengths=key_lengths)
    offsets: list[int] | None
    query_offset = 0 if query_offset is None else query_offset
    if isinstance(query_offset, torch.Tensor):
        query_offset, offsets = _check_integers("query_offset", query_offset, query, batch, "batch")
        for offset in offsets or ():
            check_integer("query_offset", offset)
        tensors, query_offset = tensors._replace(query_offsets=query_offset), 0
    else:
        query_offset = check_integer("query_offset", query_offset)
        offsets = [query_offset]
    learned = "multiply query by it, pass the unscaled query as rel_query, and scale=1.0" if rel_scale is not None else ""
    scale = query.shape[-1] ** -0.5 if scale is None else check_number("scale", scale, learned)
    dropout_p = check_probability("dropout_p", dropout_p)
    if softcap is not None:
        softcap = check_number("softcap", softcap)
        if not _within(SMALLEST_NUMBER, softcap, LARGEST_NUMBER):
            least = f"float32 begins at {SMALLEST_NUMBER:.3g}"
            raise ValueError(f"softcap must be positive, got {softcap} ({least}); softcap=None means no limit")
    centred = positions is None
    positions = _resolve_positions(positions, num_rows)
    window_left, window_right = _window(window_size, is_causal)
    spec = AttentionSpec(
        scale=float(scale),
        rel_scale=float(scale) if rel_scale is None else check_number("rel_scale", rel_scale),
        first=positions.first,
        last=positions.last,
        clamp=positions.outside == "clamp",
        window_left=window_left,
        window_right=window_right,
        query_offset=query_offset,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    if positions.outside == "error":
        _require_covered(positions, spec, offsets)
    return tensors, spec, Known(num_rows if centred else None, lengths, offsets)


def _check_packing(which: str, cu_seqlens: torch.Tensor, max_seqlen: int, query: torch.Tensor, total: int) -> int:
    """Check cu_seqlens and max_seqlen of queries or keys; return max_seqlen as an int."""
    name = f"cu_seqlens_{which}"
    _require_tensor(name, cu_seqlens, query)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() == 0:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    _, starts = _check_integers(name, cu_seqlens, query, cu_seqlens.shape[0], "batch + 1")
    longest = check_integer(f"max_seqlen_{which}", max_seqlen)
    if not _within(0, longest, LARGEST_POSITION):
        raise ValueError(f"max_seqlen_{which} must not be negative, got {longest}")
    if starts is not None:
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        if min(lengths, default=0) < 0 or starts[0] != 0 or starts[-1] != total:
            raise ValueError(f"{name} must rise from 0 to the total length {total}, got {starts}")
        needed = max(lengths, default=0)
        if longest < needed:
            raise ValueError(f"max_seqlen_{which} must be at least {needed}, the longest of {name}, got {longest}")
    return longest

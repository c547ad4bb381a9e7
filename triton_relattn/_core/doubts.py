"""Likely mistakes: a mask where the table belongs or of another layout, dimensions in another order, a table that does not fit
the call, a step of decoding without its position, nothing to be seen.

If such a call is wrong, its error says what to do. If it is valid, a warning says so once, unless it is a common thing to do:
short tables are clipped on purpose, as by Shaw et al., and a call with positions says what its table means, as long as it uses
more than one of the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ..positions import LARGEST_POSITION, RelativePositions
from .arguments import Arguments, has_values
from .spec import AttentionSpec, AttentionTensors
from .warn import warn_once

LARGEST_CLIP = 512  # tables are clipped at 16 (Shaw), 64 (Wav2Vec2-BERT), 256 (DeBERTa)
MANY_HEADS = 256
SOME_HEADS = 32  # models with a table that the heads share have up to 24
HIDING = -1e4  # BERT's number for hidden keys; others take the lowest of the dtype, or -inf
LEVELS = 6  # of the stack from a warning to the caller of a public function
Resolve = Callable[[Arguments], tuple[AttentionTensors, AttentionSpec]]


class Known(NamedTuple):
    """What else is known of a call that has been checked."""

    num_rows: int | None
    """Rows of the tables if the call was given no positions; else None."""
    lengths: list[int] | None
    """Values of key_lengths; None if there are none, or they are not known."""
    offsets: list[int] | None
    """Values of query_offset; None if they are not known."""


def _other_layout(packed: bool) -> str:
    if packed:
        return "query, key and value look like (heads, total, width); .transpose(0, 1) makes them (total, heads, width)"
    layout, wanted = "(batch, length, heads, width)", "(batch, heads, length, width)"
    return f"query, key and value look like {layout}; .transpose(1, 2) makes them {wanted}"


TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")


def _perhaps_meant(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what may be done about a wrong call, as text, with the arguments that it changes."""
    packed = given.get("cu_seqlens") is not None
    modules = {name: given[name].weight for name in TABLES if isinstance(getattr(given.get(name), "weight", None), torch.Tensor)}
    if modules:
        yield "pass the weights of a module: " + ", ".join(f"{name}=module.weight" for name in modules), modules
    positions = given.get("positions")
    if isinstance(positions, (tuple, list, range)) and len(positions) > 1:
        first, last = (positions[0], positions[-1])
        if isinstance(first, int) and isinstance(last, int) and first <= last:
            yield f"positions=RelativePositions({first}, {last})", {"positions": RelativePositions(first, last)}
    if isinstance(positions, RelativePositions) and -positions.first == positions.last <= LARGEST_POSITION // 2:
        rows = 2 * positions.num_rows - 1
        cure = f"RelativePositions.centred takes the number of rows: positions=RelativePositions.centred({rows})"
        yield cure, {"positions": RelativePositions.centred(rows)}
    yield from _other_integers(given)
    yield from _other_masks(given)
    yield from _other_tables(given)
    if given.get("rel_key") is not None and given.get("attn_mask") is None and not packed:
        yield "a mask is given by its name: attn_mask=...", {"rel_key": None, "attn_mask": given["rel_key"]}
    rank, length = (3, 0) if packed else (4, 2)
    tensors = {name: given[name] for name in ("query", "key", "value", "rel_query") if given.get(name) is not None}
    if packed and all(isinstance(each, torch.Tensor) and each.dim() == 4 for each in tensors.values()):
        yield ".flatten(0, 1) packs (batch, length, heads, width)", {name: each.flatten(0, 1) for name, each in tensors.items()}
    if all(isinstance(each, torch.Tensor) and not each.is_nested and each.dim() == rank for each in tensors.values()):
        if "query" in tensors and tensors["query"].shape[1] > tensors["query"].shape[length]:  # more heads than positions
            yield _other_layout(packed), {name: tensor.transpose(1, length) for name, tensor in tensors.items()}


def _other_integers(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the other forms in which callers have lengths, offsets and where packed sequences start."""
    query, key, lengths = (given.get(name) for name in ("query", "key", "key_lengths"))
    for name in ("key_lengths", "query_offset"):
        value = given.get(name)
        several = [value] if name == "key_lengths" and isinstance(value, int) else value
        if isinstance(several, (list, tuple)) and set(map(type, several)) == {int} and isinstance(query, torch.Tensor):
            yield f"{name}=torch.tensor({value}, device=query.device)", {name: torch.tensor(value, device=query.device)}
    if isinstance(lengths, torch.Tensor) and isinstance(key, torch.Tensor) and key.dim() == 4:
        if lengths.is_floating_point():
            cure = f"key_lengths.int(), or, of fractions of the length, (key_lengths * {key.shape[2]}).round().int()"
            yield cure, {"key_lengths": lengths.int()}
        if lengths.shape == (key.shape[0], key.shape[2]):
            yield "key_lengths.sum(1) counts the keys of a mask that is True or 1 for them", {"key_lengths": lengths.sum(1)}
    starts = given.get("cu_seqlens") or {}
    if all(isinstance(each, torch.Tensor) and each.dim() == 1 for each in starts.values()):
        sums = {which: each.cumsum(0) for which, each in starts.items()}
        yield "cu_seqlens are lengths added up, .cumsum(0)", {"cu_seqlens": sums}
        padded = {which: torch.nn.functional.pad(each, (1, 0)) for which, each in sums.items()}
        yield "cu_seqlens are 0 and lengths added up, torch.nn.functional.pad(lengths.cumsum(0), (1, 0))", {"cu_seqlens": padded}


def _other_masks(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the other forms in which models have a mask: without the dimension of heads, and of integers."""
    mask = given.get("attn_mask")
    if not isinstance(mask, torch.Tensor) or mask.is_nested:
        return
    to_bool = "" if mask.is_floating_point() or mask.is_complex() or mask.dtype == torch.bool else ".bool()"
    if mask.dim() in (2, 3):
        index, per_entry = ("[:, None]", mask[:, None]) if mask.dim() == 3 else ("[:, None, None]", mask[:, None, None])
        yield (
            f"attn_mask{index}{to_bool} is one mask per batch entry",
            {"attn_mask": per_entry.bool() if to_bool else per_entry},
        )
    if to_bool:
        yield "attn_mask.bool() is True where a query may attend", {"attn_mask": mask.bool()}


def _other_tables(given: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the other layouts in which models have a table."""
    query, key = given.get("query"), given.get("key")
    if not isinstance(query, torch.Tensor) or query.is_nested or query.dim() not in (3, 4):
        return
    heads = query.shape[1]
    for name in TABLES:
        table = given.get(name)
        if not isinstance(table, torch.Tensor) or table.is_nested:
            continue
        pairs = (query.shape[2], key.shape[2]) if isinstance(key, torch.Tensor) and query.dim() == key.dim() == 4 else None
        if name == "rel_bias" and table.dim() > 1 and table.shape[-2:] == pairs:
            cure = (
                f"rel_bias has an element per distance, not per pair: {T5_BIAS}; a bias per pair is attn_mask, without a "
                "gradient, or scaled_dot_product_attention's, with one"
            )
            yield cure, {"rel_bias": None, "positions": None, "attn_mask": table.detach()}
        for text, other in other_layouts(name, table, heads):
            yield text, {name: other}
        if name == "rel_bias" and table.dim() == 2 and table.shape[1] == heads:
            yield f"a weight of T5 has a row per bucket: {T5_BIAS}", {name: table.new_zeros(heads, 257)}
        if name == "rel_key" and given.get("rel_bias") is None:
            yield "a bias by distance, (R,) or (heads, R), is rel_bias", {"rel_key": None, "rel_bias": table}


T5_BIAS = "T5's is rel_bias=weight[tables.t5_buckets(torch.arange(-128, 129))].T, with scale=1.0"


def other_layouts(name: str, table: torch.Tensor, heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what else a table may be than (R, width) or (heads, R, width), or a bias than (R,) or (heads, R)."""
    for was, write, other, wanted in _layouts(table, heads, ", width" if name != "rel_bias" else ""):
        yield f"{name} looks like {was}; {name}{write} is {wanted}", other


def _layouts(table: torch.Tensor, heads: int, width: str) -> Iterator[tuple[str, str, torch.Tensor, str]]:
    """Yield layouts, how each is changed, the table then, and its layout. width: ", width", empty for a bias."""
    per_head, dimensions = f"(heads, R{width})", table.dim() - bool(width)
    if dimensions > 1 and (dimensions > 2 or table.shape[0] == 1) and len(table):
        yield "a batch of tables", "[0]", table[0], "one, which the batch shares"
        for was, write, other, wanted in _layouts(table[0], heads, width):
            yield f"a batch of {was}", f"[0]{write}", other, wanted
    if width and table.dim() == 3:
        yield "(R, heads, width)", ".transpose(0, 1)", table.transpose(0, 1), per_head
    if width and table.dim() == 2 and heads and table.shape[1] % heads == 0:
        split = table.unflatten(1, (heads, -1)).transpose(0, 1)
        yield "(R, heads * width)", f".unflatten(1, ({heads}, -1)).transpose(0, 1)", split, per_head
    if dimensions == 2:
        yield f"(heads{width}, R)" if width else "(R, heads)", ".mT", table.mT, per_head
    elif dimensions == 1 and width:
        yield "(width, R)", ".mT", table.mT, "(R, width)"


def _seems_transposed(tensors: AttentionTensors, spec: AttentionSpec, num_rows: int | None) -> bool:
    """Return whether heads and positions seem to be exchanged: there are more heads than positions, and

    - very many heads, or as many as the positions that the table covers;
    - or more than twice as many heads as positions, in self-attention with a table that the heads share. A prompt of a few tokens
      may have that, too, but not for few heads, and not if anything else tells heads from positions: a table, a mask or keys.
    """
    heads, num_queries = tensors.query.shape[1], spec.max_seqlen_q
    is_packed = tensors.cu_seqlens_q is not None
    if heads <= num_queries or heads <= spec.max_seqlen_k:
        return False
    if heads > MANY_HEADS or num_rows == 2 * heads - 1:
        return True
    if is_packed or heads < SOME_HEADS or heads <= 2 * num_queries or not 1 < num_queries == spec.max_seqlen_k:
        return False
    tables = ((tensors.rel_key, 2), (tensors.rel_value, 2), (tensors.rel_bias, 1), (tensors.rel_p2c, 2))
    ranks = [table.dim() - rank for table, rank in tables if table is not None]
    has_heads = any(ranks) or tensors.key.shape[1] != heads or (tensors.attn_mask is not None and tensors.attn_mask.shape[1] > 1)
    return bool(ranks) and not has_heads


def _of_layout(arguments: Arguments, tensors: AttentionTensors, spec: AttentionSpec, num_rows: int | None) -> None:
    if _seems_transposed(tensors, spec, num_rows):
        text = f"query has {tensors.query.shape[1]} heads, but {spec.max_seqlen_q} positions: "
        _doubt("layout", text + _other_layout(tensors.cu_seqlens_q is not None))
    mask = arguments.attn_mask
    if mask is None or mask.dim() not in (2, 3) or not mask.shape[0] == tensors.num_sequences > 1:
        return
    if mask.dim() == 3:
        taken, per_entry, meant = "(heads, Nq, Nk)", "[:, None]", "[None]"
    elif spec.max_seqlen_q != spec.max_seqlen_k:
        taken, per_entry, meant = "(Nq, Nk)", "[:, None, None]", "[None, None]"
    else:  # of all pairs of N positions, by chance in a batch of N
        return
    _doubt(
        f"{mask.dim()}-d mask",
        f"attn_mask {tuple(mask.shape)} is taken as {taken}, but there are also {mask.shape[0]} batch entries: "
        f"attn_mask{per_entry} is one mask per batch entry; attn_mask{meant} says that {taken} is meant",
    )


def _of_offset(arguments: Arguments, tensors: AttentionTensors, spec: AttentionSpec, lengths: list[int] | None) -> None:
    if spec.window_right != 0 or arguments.query_offset is not None:
        return
    num_queries, num_keys = spec.max_seqlen_q, spec.max_seqlen_k
    if tensors.key_lengths is not None:  # not known: keys of a cache that is not full yet, unless there is one query
        num_keys = num_keys if lengths is None and num_queries == 1 else max(lengths or (), default=0)
    if 0 < num_queries < num_keys:
        behind = num_keys - num_queries
        _doubt(
            "causal without an offset",
            f"a causal call of {num_queries} queries and {num_keys} keys has no query_offset: its first query is at the "
            f"first key, as in scaled_dot_product_attention, and none sees the last {behind} keys; with a key-value cache, "
            f"query_offset={behind}, the number of keys before the first query; query_offset=0 says that this is meant",
        )


def _of_table(tensors: AttentionTensors, spec: AttentionSpec, num_rows: int | None) -> None:
    first, last = spec.first, spec.last
    if first >= spec.window_right >= 0 and last > first:
        _doubt(
            "rows of the future",
            f"the rows of the table stand for relative positions j - i from {first} to {last}, but is_causal or window_size "
            f"hides those above {spec.window_right}, so that only the first row is used: if the last row stands for the query's "
            f"own position, positions=RelativePositions({first - last}, 0); if the first row does, tables.from_future_first "
            "reverses them first",
        )
    if num_rows is None or tensors.query_offsets is not None or spec.coverage() != "clamp":
        return
    # A table of the past that covers this call, if it is causal; a longer one than anybody clips at.
    if num_rows > 2 * LARGEST_CLIP + 1 or (spec.window_right == 0 and -spec.farthest()[0] < num_rows):
        _doubt(
            f"table of {num_rows} rows",
            f"the {num_rows} rows of a table stand for distances up to {num_rows // 2}, and this call has longer ones, "
            f"which take its end rows: positions=RelativePositions.centred({num_rows}) says that this is meant; "
            f"if the last row stands for the query's own position, positions=RelativePositions(-{num_rows - 1}, 0)",
        )


def _of_past_rows(arguments: Arguments, tensors: AttentionTensors, spec: AttentionSpec, lengths: list[int] | None) -> None:
    """A single query is the last one of a cache: it has no future."""
    if not spec.first < spec.last == 0 or not spec.clamp or spec.max_seqlen_q == 1 or tensors.query_offsets is not None:
        return
    num_keys = spec.max_seqlen_k if tensors.key_lengths is None else max(lengths or (), default=0)
    says_what_is_seen = arguments.is_causal or arguments.window_size is not None or arguments.attn_mask is not None
    if not says_what_is_seen and num_keys - 1 > spec.query_offset:
        _doubt(
            "rows of the past",
            f"the rows of the table stand for the past, relative positions from {spec.first} to 0, but nothing hides the future: "
            "its keys use the row of the query's own position; is_causal=True hides them, window_size=(-1, -1) says that this "
            "is meant",
        )


def _of_hidden_keys(arguments: Arguments, tensors: AttentionTensors, spec: AttentionSpec, offsets: list[int] | None) -> None:
    """A caller who asks for lse can tell that nothing is seen: parts of sequences are attended to so, and merged."""
    if arguments.return_lse or 0 in (spec.max_seqlen_q, spec.max_seqlen_k):
        return
    meant = "return_lse=True, whose lse is -inf there, says that this is meant"
    if offsets and (spec.window_left >= 0 or spec.window_right >= 0) and all(_sees_nothing(spec, each) for each in offsets):
        behind = f", perhaps {-offsets[0]}" if offsets[0] < 0 else ""
        _doubt(
            "hidden by position",
            f"no query sees a key: with query_offset={offsets[0]} the relative positions of keys go from "
            f"{1 - spec.max_seqlen_q - offsets[0]} to {spec.max_seqlen_k - 1 - offsets[0]}, and is_causal or window_size hides "
            f"all of them; query_offset is the number of keys before the first query{behind}; {meant}",
        )
    mask = tensors.attn_mask
    if mask is None or not mask.numel() or not has_values(mask):
        return
    # The last query sees most in usual masks: the others are looked at only if it sees nothing.
    if _hides(mask[-1, -1, -1]) and _hides(mask):
        _doubt(
            "hidden by the mask", f"attn_mask hides every key of every query. {OPPOSITE if mask.dtype == torch.bool else ADDED}"
        )
    elif mask.dtype == torch.bool and spec.max_seqlen_q == spec.max_seqlen_k and spec.window_right and _seems_opposite(mask):
        _doubt(
            "opposite mask",
            f"attn_mask hides every key of some queries, and shows all others only keys at the end. {OPPOSITE}",
        )


def _sees_nothing(spec: AttentionSpec, offset: int) -> bool:
    past, future = (spec if offset == spec.query_offset else spec._replace(query_offset=offset)).farthest()
    return past > future


OPPOSITE = (
    "A bool mask is True where a query may attend (in nn.RelativeMultiheadAttention, True hides): pass ~attn_mask, or "
    "return_lse=True if this is meant"
)
ADDED = "A floating-point mask is added to the logits; return_lse=True says that this is meant"


def _of_ones(mask: torch.Tensor | None) -> None:
    """A floating-point mask of 0 and 1, probably a bool mask in another dtype. The last query sees most in usual masks."""
    if mask is None or not mask.is_floating_point() or not mask.numel() or not has_values(mask):
        return
    if (mask[-1, -1, -1] == 1).any() and ((mask == 0) | (mask == 1)).all():
        _doubt(
            "mask of 0 and 1",
            "attn_mask has only 0 and 1 and is added to the logits; if 1 means may attend, pass attn_mask.bool()",
        )


def _seems_opposite(mask: torch.Tensor) -> bool:
    """Return whether a bool mask, as one of padding or of the future in which True hides, shows the first query no first key and
    some last query nothing, and each query keys from one on."""
    if mask[:, :, 0, 0].any() or mask[:, :, -1].any(-1).all():
        return False
    return bool((mask[..., :-1] <= mask[..., 1:]).all())


def _hides(mask: torch.Tensor) -> bool:
    return not mask.any() if mask.dtype == torch.bool else bool(mask.amax() <= HIDING)


def _warn_of_doubts(arguments: Arguments, tensors: AttentionTensors, spec: AttentionSpec, known: Known) -> None:
    """Warn of a valid call that is probably a mistake."""
    _of_layout(arguments, tensors, spec, known.num_rows)
    _of_offset(arguments, tensors, spec, known.lengths)
    _of_table(tensors, spec, known.num_rows)
    if known.num_rows is None:
        _of_past_rows(arguments, tensors, spec, known.lengths)
    _of_hidden_keys(arguments, tensors, spec, known.offsets)
    _of_ones(tensors.attn_mask)


def _doubt(about: str, text: str) -> None:
    warn_once(about, text, LEVELS, UserWarning)


def with_advice(check: Callable[[Arguments], tuple[AttentionTensors, AttentionSpec, Known]]) -> Resolve:
    """Wrap a check so that its errors say what to do, if the call passes the check once that is done, and that a call which
    passes it warns of doubts."""

    @functools.wraps(check)
    def run(arguments: Arguments) -> tuple[AttentionTensors, AttentionSpec]:
        try:
            tensors, spec, known = check(arguments)
        except (TypeError, ValueError) as error:
            for cure, changes in () if torch.compiler.is_compiling() else _perhaps_meant(arguments.by_name()):
                try:
                    check(arguments.replaced(**changes))
                except (TypeError, ValueError):
                    continue
                error.args = (f"{error}; {cure}",)
                break
            raise
        if not torch.compiler.is_compiling():
            _warn_of_doubts(arguments, tensors, spec, known)
        return tensors, spec

    return run

"""Strategies of hypothesis for calls. The first choices are the simplest ones: that is where shrinking leads."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.case import Broken, Case, Layout, shapes
from tests.fuzz.properties import BLOCKS, TILES
from triton_relattn._core.spec import TABLES

T = TypeVar("T")
EDGES = (1, 2, 3, 0, 5, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 70)
FAR = 2**29
"""The largest position that is allowed."""
LARGEST_TABLE = 150

one_each = settings(
    database=None,
    deadline=None,
    max_examples=2,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
"""A run with the simplest case and one other: of further ones hypothesis makes five of six by repeating parts of those before."""


def explore(
    strategy: st.SearchStrategy[T], body: Callable[[T], None], seeds: Iterable[int], passed: set[T] | None = None
) -> None:
    """The body with one case of each seed, and once with the simplest; a failure is shrunk. passed: what need not run again."""
    passed = set() if passed is None else passed

    def once(case: T) -> None:
        if case not in passed:
            body(case)
            passed.add(case)

    for number in seeds:
        seed(number)(one_each(given(strategy)(once)))()


same_each_time = settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)


def sometimes(otherwise: T, strategy: st.SearchStrategy[T], odds: int = 3) -> st.SearchStrategy[T]:
    """otherwise, or once in odds a draw from the strategy."""
    return st.integers(0, odds - 1).flatmap(lambda chosen: strategy if chosen == odds - 1 else st.just(otherwise))


def side(kernels: bool, chosen: int) -> int:
    """Return the side whose multiples are the borders of tiles, or of blocks, which are cut along the queries only."""
    if not kernels:
        return min(BLOCKS[chosen][0], 16)
    tiles = TILES[chosen]
    return 64 if tiles is None else min(min(tile.block_m, tile.block_n) for tile in tiles.values())


def near_borders(limit: int, side: int, steps: tuple[int, ...] = (0, 1, -1)) -> st.SearchStrategy[int]:
    """Where tiles begin, and one beside it: up to the limit, or the first border if that is beyond."""
    borders = range(side, max(limit, side) + 1, side)
    return st.sampled_from([border + step for border in borders for step in steps])


def lengths(limit: int, side: int = 16) -> st.SearchStrategy[int]:
    edges = st.sampled_from([length for length in EDGES if length <= limit])
    beyond = st.sampled_from([border + 1 for border in range(side, limit, side)] or [limit])
    return st.one_of(edges, st.integers(0, limit), near_borders(limit, side), beyond, beyond)


def layouts(name: str, rank: int) -> st.SearchStrategy[Layout]:
    dims = tuple(range(rank))
    expanded = st.lists(st.sampled_from(dims), max_size=2, unique=True).map(sorted) if rank else st.just([])
    orders = st.permutations(dims).map(tuple)
    return st.tuples(st.just(name), orders, st.integers(1, 3), sometimes((), expanded.map(tuple)))  # type: ignore[arg-type]


@st.composite
def tables(
    draw: st.DrawFn,
    longest: tuple[int, int],
    offsets: tuple[int, int],
    window: tuple[int, int],
    side: int,
) -> dict[str, Any]:
    """Tables and what their rows stand for. offsets: the smallest and the largest query_offset; side: of a tile."""
    pairs = itertools.combinations(TABLES, 2)
    names = draw(st.sampled_from([*((name,) for name in TABLES), *pairs, TABLES[:3], TABLES, TABLES]))
    low, high = -max(longest[0] - 1, 0) - offsets[1], max(longest[1] - 1, 0) - offsets[0]
    low, high = max(low, -window[0]) if window[0] >= 0 else low, min(high, window[1]) if window[1] >= 0 else high
    low, high = min(low, high), max(low, high)
    coverable = high - low < LARGEST_TABLE and max(-low, high) < FAR - 9
    kinds = ["centred", "any", "one row", "past", "future", "far", *["borders"] * 4, *["covers"] * 3 * coverable]
    kind = draw(st.sampled_from(kinds))
    outside = draw(st.sampled_from(["clamp", "zero", "error"] if kind == "covers" else ["clamp", "zero"]))
    more = draw(st.integers(0, 20))
    if kind == "centred":
        first, last = -more, more
    elif kind == "any":
        first = draw(st.integers(low - 3, high + 3))
        last = first + draw(st.integers(0, min(high - low + 6, LARGEST_TABLE)))
    elif kind == "one row":
        first = last = draw(st.integers(low - 1, high + 1))
    elif kind == "past":
        last = low - draw(st.integers(0, 4))
        first = last - more
    elif kind == "future":
        first = high + draw(st.integers(0, 4))
        last = first + more
    elif kind == "borders":
        # A pair of tiles, or the last that a window shows, is just within the table or just beyond it; or rows are whole tiles.
        step = near_borders(48, side)
        ends = (draw(st.sampled_from(offsets)), *(end for end in window if end >= 0))
        first = -draw(st.sampled_from([-1, 0, 1]) | step) - draw(st.sampled_from([ends[0], 0, *ends[1:]]))
        last = draw(st.sampled_from([-1, 0, 1]) | step) + draw(st.sampled_from([-ends[0], first, first - 1, *ends[1:]]))
        first, last = min(first, last), min(max(first, last), min(first, last) + LARGEST_TABLE)
    elif kind == "far":
        first, last = draw(st.sampled_from([(-FAR, -FAR + more), (FAR - more, FAR)]))
    else:
        first, last = low - more % 4, high + more // 4 % 4
    first, last = max(first, -FAR), min(last, FAR)
    if not -FAR <= first <= last <= FAR:
        first, last = 0, more
    return {
        "tables": names,
        "per_head": tuple(name for name in names if draw(st.booleans())),
        "positions": (first, last, outside),
        "default_positions": first == -last and outside == "clamp" and draw(st.booleans()),
        "float32_bias": "rel_bias" in names and draw(st.booleans()),
    }


@st.composite
def sizes(draw: st.DrawFn, kernels: bool) -> dict[str, Any]:
    """Sequences, heads and widths; few of them in the interpreter, which is slow."""
    chosen_blocks = draw(st.sampled_from([1, 2, 3, 4, 1, 2, 3, 4, 0]) if kernels else st.integers(0, len(BLOCKS) - 1))
    tile = side(kernels, chosen_blocks)
    limit, widths = (48 if tile == 16 else 70, (1, 8, 16, 3, 20, 33)) if kernels else (70, (1, 2, 3, 8, 5, 16, 17, 33, 64))
    width, length = st.sampled_from(widths), lengths(limit, tile)
    same = draw(sometimes(False, st.just(True), 8))
    chosen: dict[str, Any] = {"blocks": chosen_blocks, "width": draw(width), "value_width": draw(width), "same": same}
    packed = draw(sometimes(False, st.just(True)))
    sequences = draw(st.sampled_from([1, 2, 1, 2, 3, 12, 0] if not kernels else [1, 1, 2]))
    key_heads = draw(st.sampled_from([1, 2, 1, 3, 0] if not kernels else [1, 1, 2] if sequences == 1 else [1]))
    chosen["key_heads"] = key_heads
    group = sometimes(1, st.integers(2, 3), 4) if kernels else sometimes(1, st.integers(2, 4), 2)
    chosen["group"] = 1 if same or (kernels and max(sequences, key_heads) > 1) else draw(group)
    if packed:
        pair = lengths(limit // 2, tile).map(lambda length: (length, length)) if same else st.tuples(length, length)
        pairs = draw(st.lists(pair, min_size=sequences, max_size=sequences))
        chosen |= {"sequences": tuple(pairs), "slack": draw(sometimes(0, st.integers(1, 9)))}
    else:
        chosen |= {"batch": sequences, "num_queries": draw(length), "num_keys": draw(length)}
    if same:
        chosen["value_width"] = chosen["width"]
        if "num_keys" in chosen:
            chosen["num_keys"] = chosen["num_queries"]
    return chosen


def windows(distance: st.SearchStrategy[int], offset: int, side: int) -> st.SearchStrategy[int]:
    """One side of a window; most end where a tile does, or one beside it, as queries see it that are shifted by the offset."""
    near = st.sampled_from([max(tiles * side + step + offset % side, 0) for step in (1, 0, -1) for tiles in (0, 1)])
    return st.one_of(near, near, near, distance, st.sampled_from([-1, 0, 1, FAR]))


@st.composite
def cases(draw: st.DrawFn, kernels: bool = False) -> Case:
    """Any valid call of one implementation."""
    dtypes = ["float32", "float16"] if kernels else ["float64", "float32", "float16", "bfloat16"]
    # First, because hypothesis draws the first choice of a run anew until it is not that of the run's simplest case.
    fields: dict[str, Any] = {"seed": draw(st.integers(0, 2**20))}
    fields |= {"implementation": "triton" if kernels else "blockwise", "dtype": draw(st.sampled_from(dtypes))}
    fields |= draw(sizes(kernels))
    case = Case(**fields)
    tile = side(kernels, fields["blocks"])

    distance = lengths(20 if kernels else 70, tile)
    offset = st.sampled_from([0, case.longest[1] - case.longest[0], 1, -1]) | distance | distance.map(operator.neg)
    offset = sometimes(0, offset, 2) if draw(st.integers(0, 19)) < 19 else st.sampled_from([FAR, -FAR])
    per_sequence = st.tuples(*[offset] * case.num_sequences)
    fields["query_offset"] = draw(per_sequence if draw(sometimes(False, st.just(True))) else offset)
    offsets = fields["query_offset"] if isinstance(fields["query_offset"], tuple) else (fields["query_offset"],)
    fields["is_causal"] = draw(sometimes(False, st.just(True)))
    some_offset = draw(st.sampled_from(offsets or (0,)))
    of_window = [windows(distance, sign * some_offset, tile) for sign in (1, -1)]
    fields["window_size"] = draw(st.tuples(*of_window)) if draw(st.integers(0, 2)) else (-1, -1)
    if draw(st.integers(0, 4)):
        right = 0 if fields["is_causal"] else fields["window_size"][1]
        bounds = (min(offsets, default=0), max(offsets, default=0))
        fields |= draw(tables(case.longest, bounds, (fields["window_size"][0], right), tile))
    if {"rel_key", "rel_p2c"} & set(fields.get("tables", ())):
        fields["rel_scale"] = draw(sometimes(None, st.sampled_from([1.0, 0.0, -0.4, 0.2, 3.0])))
    if "rel_key" in fields.get("tables", ()):
        fields["rel_width"] = draw(sometimes(None, st.sampled_from([1, 3, 16, 24, 7])))

    heads = case.key_heads * case.group
    if case.sequences is None and draw(sometimes(False, st.just(True))):
        full = (case.batch, heads, case.num_queries, case.num_keys)
        shape = tuple(size if draw(st.booleans()) else 1 for size in full)
        ones = next((dim for dim, size in enumerate(shape) if size != 1), len(shape))
        fields["mask_shape"] = shape[draw(st.integers(0, ones)) :]
        fields["mask"] = draw(st.sampled_from(["bool", "float32", fields["dtype"]]))
        fields["mask_low"] = draw(st.sampled_from(["-inf", "finfo.min", "-1e4"]))
    if case.sequences is None and draw(sometimes(False, st.just(True))):
        length = st.sampled_from([case.num_keys, 0]) | st.integers(0, case.num_keys)
        fields["key_lengths"] = draw(st.tuples(*[length] * case.batch))
    fields["integers"] = draw(st.sampled_from(["int64", "int32"]))
    fields["strided_integers"] = draw(sometimes(False, st.just(True)))
    fields["dropout_p"] = draw(sometimes(0.0, st.sampled_from([0.5, 0.1, 0.9, 0.3, 1.0])))
    fields["scale"] = draw(sometimes(None, st.sampled_from([1.0, 0.0, -0.3, 0.05, 0.0, 1e-4, -1e-5, 2e-3]), 2))
    fields["softcap"] = draw(sometimes(None, st.sampled_from([5.0, 0.5, 50.0]), 4))
    fields["return_lse"] = draw(st.booleans())
    fields["exact_query_grad"] = draw(sometimes(False, st.just(True), 4))
    fields["sharp"] = draw(sometimes(False, st.just(True), 4))
    fields["cotangents"] = draw(st.sampled_from(["both", "out", "lse"])) if fields["return_lse"] else "both"
    fields["beside"] = draw(sometimes(None, st.sampled_from(["nan", "inf"]))) if not kernels else None
    fields["mode"] = draw(sometimes("grad", st.sampled_from(["no_grad", "inference_mode"]), 10))
    fields["default_dtype"] = draw(sometimes("float32", st.sampled_from(["float64", "float16"]), 6))

    if kernels:
        fields["round_terms"] = draw(sometimes(False, st.just(True), 2))
        fields["workspace"] = draw(sometimes(None, st.sampled_from([0, 4000, 20000]), 2))
    fields["spoilt"] = draw(sometimes(False, st.just(True), 2))
    of = shapes(Case(**fields)) | ({"attn_mask": fields["mask_shape"]} if fields.get("mask") else {})
    inputs = [name for name in of if name not in ("d_out", "d_lse", "attn_mask")]
    wanted = inputs if draw(st.integers(0, 4)) else draw(st.lists(st.sampled_from(inputs), unique=True))
    if case.same and {"query", "key", "value"} & set(wanted):
        wanted = ["query", "key", "value", *wanted]
    fields["requires_grad"] = tuple(name for name in inputs if name in wanted)
    arranged = [name for name in of if draw(sometimes(False, st.just(True), 4))]
    fields["layouts"] = tuple(draw(layouts(name, len(of[name]))) for name in arranged)
    return Case(**fields)


def each(text: str) -> tuple[str, ...]:
    """Expressions, separated by semicolons."""
    return tuple(expression.strip() for expression in text.split(";"))


OF_TENSORS = each("""
    None; 1.0; text; x.tolist(); x.detach().numpy(); [x]; x.shape; torch.nn.Linear(1, 1); torch.nn.Parameter(x); x.neg();
    x.conj(); x[0]; x[None]; x[..., None]; x[..., :-1]; x[:-1]; x[:, :-1]; x[:, :, :-1]; x[:0]; x[:, :0]; x[:, :, :0]; x[..., :0];
    x.mT; x.transpose(0, -1); x.flatten(); x.squeeze(); torch.cat((x, x)); torch.cat((x, x), 1); torch.cat((x, x), -2);
    torch.cat((x, x), -1); x.repeat(2, 1, 1, 1); x.double(); x.float(); x.half(); x.bfloat16(); x.long(); x.bool();
    x.to(torch.float8_e5m2); x.to(torch.cfloat); x.to(meta); x.to_sparse(); x.to_mkldnn(); x.to_sparse_csr(); torch.zeros(());
    torch.nested.nested_tensor([x]); torch.nested.nested_tensor([x], layout=torch.jagged);
    torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8); torch.zeros_like(x, requires_grad=True); torch.zeros(0);
    torch.zeros(2, 3); torch.zeros(1, 1, 1, 1); torch.zeros(1, 1, 1, 1, 1)
""")
OF_NUMBERS = each("""
    None; math.nan; math.inf; -math.inf; text; True; 1; 0; -1; 0.5; 2.0; -0.0; 1e300; -1e39; 10**400; 1e-30; 1e-46; 1e-320; 1j;
    [1.0]; torch.tensor(1.0); np.float64(0.5); np.float32(0.5); np.int64(1); bytes(3)
""")
OF_FLAGS = each("None; True; False; 0; 1; text; np.bool_(True); torch.tensor(True); []; 1.0; math.nan")
OF_VECTORS = each("""
    None; 1; text; x.tolist(); x.numpy(); x.float(); x.bool(); x.short(); x.int(); x.to(torch.uint8); x.to(meta); x.to_sparse();
    x[None]; x[:, None]; x[:-1]; x[1:]; x[:0]; x[0]; torch.cat((x, x)); x + 1; x - 1; x + 1000; -x - 1; x - 2**62;
    x.long() + 2**40; x * 0; x.flip(0); torch.tensor(3); torch.zeros(2, dtype=torch.int64); torch.nested.nested_tensor([x])
""")
OF_MAXIMA = each("""
    None; 1.0; True; text; 0; 1; -1; 0.5; x - 1; x + 1; x + 40; 2**29 + 1; 2**31; -2**63; 2**64; 10**30; [0]; (1,);
    torch.tensor(3); np.int64(3); math.nan; math.inf; torch.zeros(2)
""")
OF_OFFSETS = each("""
    None; 1.0; True; text; 0; 1; -1; 0.5; 2**29; -2**29; 2**29 + 1; 2**31; -2**63; 2**64; 10**30; [0]; (1,); torch.tensor(3);
    np.int64(3); np.int32(3); math.nan; math.inf; torch.zeros(2); torch.zeros(1, dtype=torch.int32); torch.tensor([2**29 + 1])
""")
OF_WINDOWS = each("""
    None; 1; (1,); (1, 2, 3); [1, 2]; (-2, 3); (3, -2); (-1, -1); (0, 0); (True, 1); (1.0, 2); (None, None); text; {}; range(2);
    (2**29, 2**29); (2**29 + 1, 0); (0, 2**64); torch.tensor([1, 2]); np.array([1, 2]); (np.int64(1), 2); (math.nan, 1);
    (1, text); [[1], [2]]
""")
OF_POSITIONS = each("""
    None; (-4, 4); text; 1; x.first; RelativePositions; RelativePositions(0, 0); RelativePositions(-2**29, 2**29);
    RelativePositions(x.first, x.last + 1); RelativePositions(x.first - 1, x.last); RelativePositions(x.first + 1, x.last + 1);
    RelativePositions(np.int64(x.first), np.int32(x.last)); torch.zeros(3)
""")
OF_IMPLEMENTATIONS = each("None; text; 1; []; {}; torch.zeros(2); np.zeros(2); bytes(3); math.nan")
EXPRESSIONS = (
    dict.fromkeys(("query", "key", "value", "rel_key", "rel_query", "rel_value", "rel_bias", "rel_p2c", "attn_mask"), OF_TENSORS)
    | dict.fromkeys(("scale", "rel_scale", "softcap", "dropout_p"), OF_NUMBERS)
    | dict.fromkeys(("is_causal", "enable_gqa", "return_lse", "exact_query_grad"), OF_FLAGS)
    | dict.fromkeys(("key_lengths", "cu_seqlens_q", "cu_seqlens_k"), OF_VECTORS)
    | dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), OF_MAXIMA)
    | {"query_offset": OF_OFFSETS, "window_size": OF_WINDOWS, "positions": OF_POSITIONS, "implementation": OF_IMPLEMENTATIONS}
)
OF_PADDED, OF_PACKED = {"attn_mask", "key_lengths"}, {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"}


@st.composite
def broken(draw: st.DrawFn, kernels: bool = False) -> Broken:
    """A call with one or two arguments replaced; sometimes it still is valid."""
    case = replace(draw(cases(kernels)), spoilt=False, beside=None)  # with other arguments, what nobody sees may be seen
    missing = OF_PACKED if case.sequences is None else OF_PADDED
    absent = {name for name, tensor in (("attn_mask", case.mask), ("key_lengths", case.key_lengths)) if tensor is None}
    absent |= {"rel_query", *TABLES} - set(shapes(case))
    absent |= {"positions"} if case.positions is None or case.default_positions else set()
    changes = []
    for _ in range(draw(sometimes(1, st.just(2), 4))):
        name = draw(st.sampled_from([name for name in EXPRESSIONS if name not in missing]))
        expressions = EXPRESSIONS[name]
        if name == "query_offset" and isinstance(case.query_offset, tuple):
            expressions = OF_VECTORS + OF_OFFSETS
        if name in absent:
            expressions = tuple(expression for expression in expressions if not re.search(r"\bx\b", expression))
        changes.append((name, draw(st.sampled_from(expressions))))
    return Broken(case, tuple(changes))

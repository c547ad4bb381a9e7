"""``python -m tests.draws --seconds 300 --seed 0 [--kernels]``: draw samples and check them for a given time.

A failure is shrunk and printed as a command. ``--sample 'Sample(...)'`` checks that one.

samples() is the hypothesis strategy for any call, in the interpreter limited to calls of about a second. First choices are the
simplest ones, to which hypothesis shrinks. Lengths, windows, offsets and tables often end at the border of a tile, or one
element beside it, where most faults are.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

if __name__ == "__main__" and "--kernels" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported

import torch

from tests.check import WAYS, Way, check
from tests.conftest import INTERPRETED
from tests.expected import INPUTS, TABLES
from tests.samples import FAR, SIDE, Sample

T = TypeVar("T")
LARGEST_TABLE = 150


def rarely(otherwise: T, *others: T, odds: int = 3) -> st.SearchStrategy[T]:
    """Draw ``otherwise``, or with probability 1 / odds one of the others."""
    return st.integers(0, odds - 1).flatmap(lambda number: st.sampled_from(others) if number == odds - 1 else st.just(otherwise))


def edges(limit: int) -> list[int]:
    """Lengths and distances at the borders of tiles, and one before and after, at least those of the first border."""
    return [border + step for border in range(SIDE, max(limit, SIDE) + 1, SIDE) for step in (0, 1, -1)]


def lengths(limit: int) -> st.SearchStrategy[int]:
    beyond = [border + 1 for border in range(SIDE, limit, SIDE)]
    return st.one_of(
        st.sampled_from([1, 2, 3, 0, 5]), st.integers(0, limit), st.sampled_from(edges(limit)), st.sampled_from(beyond)
    )


@st.composite
def tables(draw: st.DrawFn, sample: Sample) -> dict[str, Any]:
    """Tables and the relative positions of their rows."""
    pairs = itertools.combinations(TABLES, 2)
    names = draw(st.sampled_from([*((name,) for name in TABLES), *pairs, TABLES[:3], TABLES, TABLES]))
    given, window = sample.query_offset, sample.window_size
    offsets = (given if isinstance(given, tuple) else (given,)) or (0,)
    right = 0 if sample.is_causal else window[1]
    low, high = -max(sample.longest(0) - 1, 0) - max(offsets), max(sample.longest(1) - 1, 0) - min(offsets)
    low, high = max(low, -window[0]) if window[0] >= 0 else low, min(high, right) if right >= 0 else high
    low, high = min(low, high), max(low, high)
    more = draw(st.integers(0, 20))
    covers = high - low < LARGEST_TABLE and max(-low, high) < FAR - 9
    kind = draw(st.sampled_from(["centred", "any", "one row", "beside", "far", *["borders"] * 4, *["covers"] * 3 * covers]))
    outside = draw(st.sampled_from(["clamp", "zero", "error"] if kind == "covers" else ["clamp", "zero"]))
    if kind == "centred":
        first, last = -more, more
    elif kind == "any":
        first = draw(st.integers(low - 3, high + 3))
        last = first + draw(st.integers(0, min(high - low + 6, LARGEST_TABLE)))
    elif kind == "one row":
        first = last = draw(st.integers(low - 1, high + 1))
    elif kind == "beside":
        first, last = draw(st.sampled_from([(low - 4 - more, low - more % 5), (high + more % 5, high + 4 + more)]))
    elif kind == "far":
        first, last = draw(st.sampled_from([(-FAR, -FAR + more), (FAR - more, FAR)]))
    elif kind == "borders":
        # Tiles, or the last pair of a window, end just inside the table or just beyond it; or the rows are whole tiles.
        step = st.sampled_from([-1, 0, 1, *edges(48)])
        ends = (draw(st.sampled_from(offsets)), *(end for end in (window[0], right) if end >= 0))
        first = -draw(step) - draw(st.sampled_from([ends[0], 0, *ends[1:]]))
        last = draw(step) + draw(st.sampled_from([-ends[0], first, first - 1, *ends[1:]]))
        first, last = min(first, last), min(max(first, last), min(first, last) + LARGEST_TABLE)
    else:
        first, last = low - more % 4, high + more // 4 % 4
    first, last = max(first, -FAR), min(last, FAR)
    first, last = (first, last) if -FAR <= first <= last <= FAR else (0, more)
    return {
        "tables": names,
        "per_head": tuple(name for name in names if draw(st.booleans())),
        "positions": (first, last, outside),
        "default_positions": first == -last and outside == "clamp" and draw(st.booleans()),
        "float32_bias": "rel_bias" in names and draw(st.booleans()),
        "rel_scale": draw(rarely(None, 1.0, 0.0, -0.4, 0.2, 3.0)) if {"rel_key", "rel_p2c"} & set(names) else None,
        "rel_width": draw(rarely(None, 1, 3, 16, 24, 7)) if "rel_key" in names else None,
    }


class Limits(NamedTuple):
    """The values to draw from, the simplest first."""

    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    longest: int
    """Queries and keys of a sequence."""
    farthest: int
    """Offsets and ends of windows."""
    counts: tuple[int, ...]
    """Sequences, and heads of the key."""
    is_slow: bool
    """Of sequences, key heads and query heads per key head, at most one number exceeds 1."""


ANY = Limits(("float64", "float32", "float16", "bfloat16"), (1, 2, 3, 8, 5, 16, 17, 33, 64), 70, 70, (1, 2, 1, 2, 3, 0), False)
KERNEL_LIMITS = Limits(("float32", "float16"), (1, 8, 16, 3, 20, 33), 48, 20, (1, 1, 2), True)


def compiled(dtype: torch.dtype) -> Limits:
    """Limits of calls for compiled kernels."""
    return Limits((str(dtype).removeprefix("torch."),), (16, 40, 64, 128), 200, 200, (1, 2), False)


@st.composite
def sizes(draw: st.DrawFn, limits: Limits, is_packed: bool | None) -> dict[str, Any]:
    """Sequences, heads and widths."""
    width, length, same = st.sampled_from(limits.widths), lengths(limits.longest), draw(rarely(False, True, odds=8))
    count = draw(st.sampled_from(limits.counts))
    key_heads = draw(st.sampled_from((1,) if limits.is_slow and count > 1 else limits.counts))
    alone = same or (limits.is_slow and max(count, key_heads) > 1)
    group = 1 if alone else draw(rarely(1, 2, 3, odds=4 if limits.is_slow else 2))
    chosen: dict[str, Any] = {"width": draw(width), "same": same, "key_heads": key_heads, "group": group}
    chosen["value_width"] = chosen["width"] if same else draw(width)
    pairs = tuple(draw(st.tuples(length, length)) for _ in range(count))
    pairs = tuple((keys, keys) for _, keys in pairs) if same else pairs
    if draw(rarely(False, True)) if is_packed is None else is_packed:
        return {**chosen, "sequences": pairs, "slack": draw(rarely(0, 1, 5, 9))}
    queries, keys = pairs[0] if pairs else (5, 5)
    return {**chosen, "batch": count, "num_queries": queries, "num_keys": keys}


@st.composite
def samples(draw: st.DrawFn, limits: Limits = KERNEL_LIMITS if INTERPRETED else ANY, is_packed: bool | None = None) -> Sample:
    """Any valid call, packed or not as is_packed says, or either for None."""
    # The seed comes first: hypothesis repeats the first choice until it differs from that of the simplest sample.
    fields: dict[str, Any] = {"seed": draw(st.integers(0, 2**20)), "blocks": draw(st.integers(0, 15))}
    fields |= {"dtype": draw(st.sampled_from(limits.dtypes)), **draw(sizes(limits, is_packed))}
    sample = Sample(**fields)
    count, heads = len(sample.sizes), sample.key_heads * sample.group

    distance = lengths(limits.farthest)
    offset = st.one_of(st.sampled_from([0, sample.longest(1) - sample.longest(0), 1, -1]), distance, distance.map(lambda d: -d))
    offset = draw(rarely(st.just(0), *[offset] * 9, st.sampled_from([FAR, -FAR]), odds=2))
    fields["query_offset"] = draw(st.tuples(*[offset] * count)) if draw(rarely(False, True)) else draw(offset)
    given = fields["query_offset"]
    some = draw(st.sampled_from((given if isinstance(given, tuple) else (given,)) or (0,)))
    if draw(st.integers(0, 2)):
        # Most windows end at the border of a tile, or one beside it, as seen by queries that the offset shifts.
        near = [[max(border + step + sign * some % SIDE, 0) for step in (1, 0, -1) for border in (0, SIDE)] for sign in (1, -1)]
        anywhere = distance | st.sampled_from([-1, 0, 1, FAR])
        fields["window_size"] = draw(st.tuples(*(st.sampled_from(ends) | st.sampled_from(ends) | anywhere for ends in near)))
    fields["is_causal"] = draw(rarely(False, True))
    if draw(st.integers(0, 4)):
        fields |= draw(tables(Sample(**fields)))

    if sample.sequences is None and draw(rarely(False, True)):
        full = (sample.batch, heads, sample.num_queries, sample.num_keys)
        shape = tuple(size if draw(st.booleans()) else 1 for size in full)
        ones = next((dim for dim, size in enumerate(shape) if size != 1), len(shape))
        fields["mask_shape"] = shape[draw(st.integers(0, ones)) :]
        fields["mask"] = draw(st.sampled_from(["bool", "float32", fields["dtype"]]))
        fields["mask_low"] = draw(st.sampled_from(["-inf", "finfo.min", "-1e4"]))
    if sample.sequences is None and draw(rarely(False, True)):
        length = st.sampled_from([sample.num_keys, 0]) | st.integers(0, sample.num_keys)
        fields["key_lengths"] = draw(st.tuples(*[length] * sample.batch))
    fields["integers"] = draw(st.sampled_from(["int64", "int32"]))
    fields["dropout_p"] = draw(rarely(0.0, 0.5, 0.1, 0.9, 0.3, 1.0))
    fields["scale"] = draw(rarely(None, 1.0, 0.0, -0.3, 0.05, 0.0, 1e-4, -1e-5, 2e-3, odds=2))
    fields["softcap"] = draw(rarely(None, 5.0, 0.5, 50.0, odds=4))
    fields["return_lse"] = draw(st.booleans())
    fields["sharp"] = draw(rarely(False, True, odds=4))
    fields["cotangents"] = draw(st.sampled_from(["both", "out", "lse"])) if fields["return_lse"] else "both"
    fields["mode"] = draw(rarely("grad", "no_grad", "inference_mode", odds=10))
    fields["default_dtype"] = draw(rarely("float32", "float64", "float16", odds=6))
    fields["spoilt"] = draw(rarely(None, "nan", "nan", "inf", odds=2))
    if limits.is_slow:
        fields["round_terms"] = draw(rarely(False, True, odds=2))
        fields["workspace"] = draw(rarely(None, 0, 4000, 20000, odds=2))
    names = list(Sample(**fields).shapes)
    inputs = [name for name in names if name in INPUTS]
    if not draw(st.integers(0, 4)):
        wanted = set(draw(st.lists(st.sampled_from(inputs), unique=True)))
        wanted |= {"query", "key", "value"} if sample.same and wanted & {"query", "key", "value"} else set()
        fields["requires_grad"] = tuple(name for name in INPUTS if name in wanted)
    fields["strided"] = tuple(name for name in [*names, "attn_mask", "integers"] if draw(rarely(False, True, odds=4)))
    return Sample(**fields)


HEALTH_CHECKS = list(HealthCheck)
repeatable = settings(derandomize=True, database=None, deadline=None, max_examples=50, suppress_health_check=HEALTH_CHECKS)
two_values = settings(database=None, deadline=None, max_examples=2, phases=(Phase.generate,), suppress_health_check=HEALTH_CHECKS)
"""A run with the simplest value and one other: most further ones repeat parts of earlier ones."""


def explore(strategy: st.SearchStrategy[T], body: Callable[[T], None], seeds: Iterable[int], shrinks: bool = False) -> None:
    """Run the body with the simplest value and one of each seed; shrinks: shrink a failure, which takes long."""
    settings_of_run = settings(two_values, phases=(Phase.generate, Phase.shrink)) if shrinks else two_values
    passed: set[T] = set()

    def once(value: T) -> None:
        if value not in passed:
            body(value)
            passed.add(value)

    for number in seeds:
        seed(number)(settings_of_run(given(strategy)(once)))()


def drawn(number: int, limits: Limits, is_packed: bool) -> Sample:
    """Draw one call with all results and gradients."""
    found: list[Sample] = []
    explore(samples(limits, is_packed), found.append, [number])
    sample = found[-1]
    positions = None if sample.positions is None else (*sample.positions[:2], sample.positions[2].replace("error", "clamp"))
    plain: dict[str, Any] = {"same": False, "cotangents": "both", "mode": "grad", "return_lse": True, "requires_grad": INPUTS}
    return dataclasses.replace(sample, **plain, positions=positions, spoilt=None, default_dtype="float32")


def kernels(sample: Sample) -> Way:
    """A way to compute the sample in the interpreter."""
    from tests.interpreter.guard import Guarded

    # Offsets of hidden pairs at the farthest positions overflow; they are never read.
    is_far = max(map(abs, (sample.positions or (0, 0))[:2])) > FAR // 2  # type: ignore[arg-type]
    return WAYS[0] if sample.seed % 5 == 0 else WAYS[1] if is_far else Guarded(small=True)


def in_every_way(sample: Sample) -> None:
    """Check the sample in all ways; in the slow interpreter only in small tiles, guarded, or for every fifth seed in the default
    ones. 16 bits are not checked with the reference, which rounds every step."""
    for way in [kernels(sample)] if INTERPRETED else WAYS:
        if way.implementation != "reference" or sample.dtype in ("float32", "float64"):
            check(sample, way)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.draws", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=300, help="how long (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (%(default)s)")
    parser.add_argument("--kernels", action="store_true", help="the kernels, in Triton's interpreter, instead of plain torch")
    parser.add_argument("--sample", help="check this one only, as a failure prints it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.sample:
        in_every_way(eval(options.sample, {"Sample": Sample}))
        return 0
    stop, tried = time.monotonic() + options.seconds, [Sample()]

    def body(sample: Sample) -> None:
        tried.append(sample)
        in_every_way(sample)

    try:
        for number in range(options.seed * 1_000_003, sys.maxsize):
            if time.monotonic() > stop:
                break
            explore(samples(), body, [number], shrinks=True)
    except Exception as error:
        print(f"{error}\npython -m tests.draws{' --kernels' * INTERPRETED} --sample '{tried[-1]!r}'")
        return 1
    print(f"{len(tried) - 1} calls are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())

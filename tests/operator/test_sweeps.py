"""Windows, tables, keys and sequences that end, and queries that begin, at each place of a tile or block.

An edge that is off by one shows only at the border of a tile, which few random calls have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.check import WAYS, Way, check
from tests.conftest import INTERPRETED
from tests.samples import SIDE, Sample

WINDOW = Sample(num_queries=33, num_keys=50, tables=("rel_key",), window_size=(3, 2))
NEAR = Sample(num_queries=20, num_keys=50, tables=("rel_key",))
LENGTHS = Sample(num_queries=20, num_keys=20, tables=("rel_key", "rel_value"), positions=(-24, 24, "zero"))


def window(shift: int) -> Sample:
    """The window and the table begin anywhere, the table before it."""
    return replace(WINDOW, seed=shift, positions=(-20 - shift, 20, "zero"), query_offset=shift)


def window_of_the_past(shift: int) -> Sample:
    tables = ("rel_p2c", "rel_bias") if shift % 2 else ("rel_key", "rel_value")
    positions = (-40, 40, "clamp") if shift % 3 else (-4 - shift, 3, "clamp")
    return replace(WINDOW, seed=shift, tables=tables, positions=positions, window_size=(shift, -1), query_offset=20)


def window_of_the_future(shift: int) -> Sample:
    positions = (-3, 4 + shift, "zero" if shift % 2 else "clamp")
    return replace(WINDOW, tables=("rel_key", "rel_bias"), positions=positions, window_size=(-1, shift), query_offset=-9)


def near_part(shift: int) -> Sample:
    """The borders between keys near a short table and those beyond it."""
    return replace(NEAR, positions=(shift - SIDE // 2, shift - SIDE // 2 + 3, "zero" if shift % 2 else "clamp"))


def near_part_of_the_other_kind(shift: int) -> Sample:
    return replace(NEAR, positions=(shift - SIDE // 2, shift - SIDE // 2 + 3, "clamp" if shift % 2 else "zero"))


def keys(shift: int) -> Sample:
    lengths = (SIDE + shift, 40 - shift)
    return replace(LENGTHS, batch=2, num_keys=40, key_lengths=lengths, is_causal=True, query_offset=(SIDE, 9), spoilt="nan")


def causal(shift: int) -> Sample:
    return replace(LENGTHS, num_keys=33, is_causal=True, query_offset=shift - 4, positions=(-30, 0, "clamp"), spoilt="nan")


def sequences(shift: int) -> Sample:
    """Packed sequences that begin and end anywhere."""
    return replace(
        LENGTHS, sequences=((shift, SIDE - shift), (SIDE + 1 - shift, shift), (SIDE, SIDE + shift)), query_offset=(0, 3, -5)
    )


SWEEPS: tuple[Callable[[int], Sample], ...] = (
    *(window, window_of_the_past, window_of_the_future, near_part, near_part_of_the_other_kind, keys, causal, sequences),
)
QUICK = window, near_part, near_part_of_the_other_kind
"""The sweeps most likely to notice a wrong edge; the others take too long in the interpreter."""
SMALL = [way for way in WAYS if way.small]
RUNS = [pytest.param(sweep, marks=() if not INTERPRETED or sweep in QUICK else pytest.mark.thorough) for sweep in SWEEPS]


@pytest.mark.parametrize("sweep", RUNS, ids=lambda sweep: sweep.__name__)
@pytest.mark.parametrize("way", SMALL, ids=str)
def test_every_place(way: Way, sweep: Callable[[int], Sample]) -> None:
    for shift in range(SIDE):
        check(sweep(shift), way)

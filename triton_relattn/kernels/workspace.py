"""The workspace of a backward: whether a call uses one, how large it is, and in which parts it is filled.

The dkv kernel stores the gradients of its scores there ("words"), rounded to the inputs' dtype as it multiplies them. From these
the dtable_words kernel computes the gradient of the table with one product, where the dtable kernel has six. Words take 2 bytes a
pair, so the dkv kernel's programs run in parts, one part after the other through the same workspace, in a fixed order.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import NamedTuple

from .._core.spec import AttentionSpec, AttentionTensors
from .architectures import architecture_of
from .arguments import Call, cdiv
from .tile_config import TileConfig
from .walk import clamp_margin
from .words import ALIGNMENT

VARIABLE = "TRITON_RELATTN_WORKSPACE"
"""The environment variable that limits the workspace, in bytes; with 0 there is none, and the dtable kernel is used."""
USUAL_LIMIT = 256 * 2**20
MOST_WORDS = 2**30
"""Largest workspace in words, which kernels address in 32 bits."""


class Part(NamedTuple):
    """One launch of the dkv kernel: its programs, and the pairs whose words they leave in the workspace."""

    first_program: int  # number in the launch for all keys
    programs: int
    first_item: int  # an item is a batch entry and head, numbered entry * heads + head
    stop_item: int
    first_key: int
    stop_key: int


class Plan(NamedTuple):
    """A workspace: its sizes, and the parts in which it is filled."""

    items: int
    rows: int
    columns: int
    skew: int  # see words.py
    lowest: int  # the lowest relative position that is wanted
    highest: int
    has_all_keys: bool  # whether each part has the words of all pairs of its items
    parts: list[Part]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, self.items, self.rows, self.columns


def limit(tensors: AttentionTensors) -> int:
    """Return the largest workspace in bytes: TRITON_RELATTN_WORKSPACE or, if it is not set, 256 MiB or as much as query, key and
    value take, whichever is more.

    Raises:
        ValueError: the variable is not a whole number.
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not given.strip().isdecimal():
            raise ValueError(f"{VARIABLE} must be a number of bytes, such as 268435456, got {given!r}")
        return int(given)
    return max(USUAL_LIMIT, sum(each.numel() * each.element_size() for each in (tensors.query, tensors.key, tensors.value)))


def why_not(call: Call, tensors: AttentionTensors) -> str | None:
    """Return the reason why a call needs the dtable kernel, whatever the workspace; None if there is none.

    The reason must not depend on which gradients are wanted, so that a gradient has the same bits with others and alone.
    """
    if tensors.rel_key is None and tensors.rel_bias is None and tensors.rel_p2c is None:
        return "there is no table for the scores"
    if tensors.rel_value is not None:
        return "a table for the values needs probabilities by relative position"
    if tensors.cu_seqlens_q is not None:
        return "sequences are packed: a rectangle for each would be mostly empty"
    if tensors.query_offsets is not None:
        return "sequences have relative positions of their own"
    if not architecture_of(call.arch).is_nvidia:
        return "nobody has looked at how words are read on AMD's GPUs"
    return None


def plan(
    call: Call, tensors: AttentionTensors, spec: AttentionSpec, tiles: Mapping[str, TileConfig], multiprocessors: int
) -> Plan | None:
    """Return how a call uses a workspace; None if it does not, because of why_not or because too little of the call fits.

    Too little fits if a part has fewer programs of the dkv kernel than there are multiprocessors, half of those that run at once.
    """
    if why_not(call, tensors) is not None:
        return None
    most_words = min(limit(tensors) // tensors.query.element_size(), MOST_WORDS)
    rows, block_n = tensors.query.shape[2], tiles["dkv"].block_n
    blocks = cdiv(tensors.key.shape[2], block_n)
    units = call.num_sequences * call.key_heads
    group = call.heads // call.key_heads

    # Columns: all keys, or if that is fewer a band: the relative positions that both the table, with the margin of keys that the
    # dq kernel takes for near, and the window have.
    margin = clamp_margin(tiles["dq"].block_m, tiles["dq"].block_n) if call.coverage == "clamp" else 0
    lowest, highest = spec.first - margin, spec.last + margin
    left, right = spec.window_left, spec.window_right
    lowest, highest = lowest if left < 0 else max(lowest, -left), highest if right < 0 else min(highest, right)
    if call.coverage == "clamp" and tensors.rel_p2c is not None:  # whose near pairs are those of the dkv kernel's near tiles
        slack = clamp_margin(tiles["dkv"].block_m, tiles["dkv"].block_n)
        lowest, highest = lowest - slack, highest + slack
    skew = tiles["dkv"].block_m
    band = cdiv(max(highest - lowest + 1, 1) + skew - 1 + ALIGNMENT.value - 1, 64) * 64
    columns = blocks * block_n
    if band < columns:
        columns = band
    else:
        skew = 0

    most_units, most_blocks = most_words // (group * rows * columns), 0
    if most_units == 0 and skew == 0:
        most_blocks = most_words // (group * rows * block_n)
    if max(min(most_units, units) * blocks, most_blocks) < max(1, min(multiprocessors, units * blocks)):
        return None
    slots = multiprocessors * tiles["dkv"].programs_at_once
    if most_units > 0:
        at_once = _part_size(units, min(most_units, units), blocks, slots)
        items, step, part_of_unit = at_once * group, at_once * blocks, blocks
    else:
        step = part_of_unit = _part_size(blocks, most_blocks, 1, slots)
        items, columns = group, part_of_unit * block_n
    has_all_keys = skew == 0 and part_of_unit == blocks
    parts = _parts(units, blocks, group, block_n, step, part_of_unit)
    return Plan(items, rows, columns, skew, lowest, highest, has_all_keys, parts)


@functools.lru_cache(maxsize=256)
def _part_size(count: int, most: int, programs: int, slots: int) -> int:
    """Return how many of count things, of so many programs each, make a part, at most ``most``.

    All parts together should take as few waves as possible, where a wave is as many programs as there are slots. Of sizes with
    as few waves, take one with the fewest parts, and of those the smallest: then parts are about equally large.
    """

    if most >= count:  # with one part there are as few waves as possible
        return count

    def waves_and_parts(size: int) -> tuple[int, int]:
        parts, rest = divmod(count, size)
        return parts * cdiv(size * programs, slots) + cdiv(rest * programs, slots), parts + (rest > 0)

    return min(range(1, most + 1), key=waves_and_parts)


def _parts(units: int, blocks: int, group: int, block_n: int, step: int, part_of_unit: int) -> list[Part]:
    """Return parts of ``step`` programs each: several whole units (a batch entry and a head of the keys), or some blocks of keys
    of one unit."""
    parts = []
    if part_of_unit == blocks:
        for first in range(0, units * blocks, step):
            stop = min(first + step, units * blocks)
            parts.append(Part(first, stop - first, first // blocks * group, stop // blocks * group, 0, blocks * block_n))
    else:
        for unit in range(units):
            for block in range(0, blocks, step):
                stop = min(block + step, blocks)
                items = unit * group, (unit + 1) * group
                parts.append(Part(unit * blocks + block, stop - block, *items, block * block_n, stop * block_n))
    return parts

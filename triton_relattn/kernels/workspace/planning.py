"""The workspace of a backward: which pairs the dkv kernel stores, and in which parts.

The dkv kernel stores dS, and with rel_value P, of each pair that a table has a row for, rounded to the inputs' dtype as it
multiplies them (stored.py). From these the other kernels compute the gradients of tables, and of the query the table's part or,
with a row for every pair, all, with one product each. dS takes 2 bytes a pair, so the dkv kernel's programs run in parts, one
part after the other through the same workspace, in a fixed order.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ..._core.spec import AttentionTensors
from ..call import Call, cdiv
from ..config.tile_config import TileConfig
from ..sizes import one_step
from ..tile.blocks import clamp_margin
from .stored import ALIGNMENT, Layout

VARIABLE = "TRITON_RELATTN_WORKSPACE"
"""The environment variable that limits the workspace, in bytes. It never has less than one block of keys of one head."""
USUAL_LIMIT = 256 * 2**20
MAX_PAIRS = 2**30  # largest number of pairs of a head, which kernels address in 32 bits
NO_LIMIT = 2**31  # of a window
MOST_BEYOND = 1.25
"""All keys of a head are stored if they take up to so many times as much as a wave of the dkv kernel's programs: the gradient of
the query need not be added up in float32 then."""
START_COST = 6
"""What a wave of the dkv kernel's programs costs beside the programs themselves, in programs of a multiprocessor: one that runs
alone leaves a multiprocessor idle most of the time. An estimate, which no GPU has confirmed."""


class Part(NamedTuple):
    """One launch of the dkv kernel: some of its programs, in the numbering of a launch for all keys."""

    first_program: int
    stop_program: int


class Workspace(NamedTuple):
    """A workspace: its sizes, what it holds, and the parts in which it is filled.

    Heads are counted through all sequences: batch * heads. Those of a group share a key head, and so the keys of a program.
    """

    batch_heads: int  # of a part
    rows: int  # queries
    columns: int  # keys, all or those of a band or of a part
    batch_key_heads: int  # of the call
    blocks: int  # of the dkv kernel's keys
    group: int  # heads that share a key head
    step: int  # programs of a part
    layout: Layout

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, self.batch_heads, self.rows, self.columns

    @property
    def has_whole_heads(self) -> bool:
        """Return whether each part has all pairs of its heads."""
        return self.layout.is_band or self.columns >= self.blocks * self.layout.block_n

    @property
    def parts(self) -> list[Part]:
        """Return the parts: so many key heads each or, if not even one fits, so many blocks of keys of one."""
        programs = self.batch_key_heads * self.blocks
        span = programs if self.has_whole_heads else self.blocks
        parts, start = [], 0
        while start < programs:
            first, stop = start, start + span
            while first < stop:
                parts.append(Part(first, min(first + self.step, stop)))
                first += self.step
            start = stop
        return parts

    def num_batch_heads(self, part: Part) -> int:
        """Return how many heads a part has."""
        return (cdiv(part.stop_program, self.blocks) - part.first_program // self.blocks) * self.group


def workspace_limit() -> int | None:
    """Return TRITON_RELATTN_WORKSPACE in bytes, None if it is not set; ValueError if it is not a whole number."""
    text = os.environ.get(VARIABLE)
    if text and not text.strip().isdecimal():
        raise ValueError(f"{VARIABLE} must be a number of bytes, such as 268435456, got {text!r}")
    return int(text) if text else None


def workspace(call: Call, tensors: AttentionTensors, dkv: TileConfig, max_bytes: int | None) -> Workspace:
    """Return the workspace of a call, whichever gradients are wanted, so that a gradient has the same bits alone. Its limit is
    max_bytes or, if that is None, the most of 256 MiB, what query, key and value take, and what one wave of the dkv kernel's
    programs needs (with the rest of a head, if that is little). It always has one block of keys of one head."""
    spec = call.spec
    rows, block_n, group = spec.max_seqlen_q, dkv.block_n, call.heads // call.key_heads
    key_heads, blocks = call.num_sequences * call.key_heads, cdiv(spec.max_seqlen_k, block_n)
    has_probs, multiprocessors = tensors.rel_value is not None, call.draft.key.surroundings.multiprocessors
    bytes_per_pair = tensors.query.element_size() * (1 + has_probs)

    # Columns: all keys, or if that is fewer a band of those in the windows of a block of queries (stored.window_in_table).
    columns = blocks * block_n
    margin = clamp_margin(dkv.block_m, block_n) if tensors.rel_p2c is not None and call.coverage == "clamp" else 0
    left = spec.window_left if spec.window_left >= 0 else NO_LIMIT
    right = spec.window_right if spec.window_right >= 0 else NO_LIMIT
    if call.coverage != "full":
        left, right = min(left, -spec.first), min(right, spec.last)
    if left + right < columns:
        window = max(left + 1 + right, 0) + 2 * margin
        columns = min(columns, cdiv(window + dkv.block_m - 1 + ALIGNMENT.value - 1, 64) * 64)
    layout = Layout(dkv.block_m, block_n, columns < blocks * block_n, margin)
    if max_bytes is None:
        # One wave's blocks of keys, or the heads that these belong to, whose bands may take less.
        slots = multiprocessors * dkv.programs_at_once
        wave_columns = min(slots * block_n, cdiv(slots, blocks) * columns)
        if wave_columns < columns <= MOST_BEYOND * wave_columns:
            wave_columns = columns
        max_bytes = max(USUAL_LIMIT, group * rows * wave_columns * bytes_per_pair)
        if max_bytes < key_heads * group * rows * columns * bytes_per_pair:  # not all fits
            inputs = (tensors.query, tensors.key, tensors.value)
            max_bytes = max(max_bytes, sum(tensor.numel() * tensor.element_size() for tensor in inputs))
    max_pairs = max_bytes // bytes_per_pair

    max_heads = min(key_heads, max_pairs // (group * rows * columns)) if rows * columns <= MAX_PAIRS else 0
    if max_heads > 0:
        part = _part_size(key_heads, max_heads, blocks, multiprocessors, dkv.programs_at_once)
        return Workspace(part * group, rows, columns, key_heads, blocks, group, part * blocks, layout)
    # Some blocks of keys of one key head at a time
    max_blocks = max(1, min(max_pairs // group, MAX_PAIRS) // (rows * block_n))
    part = _part_size(blocks, min(blocks, max_blocks), 1, multiprocessors, dkv.programs_at_once)
    layout = layout._replace(is_band=False)
    return Workspace(group, rows, part * block_n, key_heads, blocks, group, part, layout)


@one_step
@functools.lru_cache(maxsize=1024)
def _part_size(count: int, limit: int, programs: int, multiprocessors: int, at_once: int) -> int:
    """Return how many of count things, of so many programs each, make a part, at most ``limit``.

    A wave of programs takes START_COST and as much as a multiprocessor has programs in it. All parts together should cost as
    little as possible; of sizes that cost the same, take one with the fewest parts, and of those the smallest: then parts are
    about equally large.
    """
    if limit >= count:  # together they cost no more than in parts
        return count
    slots = multiprocessors * at_once

    def part_cost(size: int) -> int:
        waves, rest = divmod(size * programs, slots)
        return waves * (START_COST + at_once) + (START_COST + cdiv(rest, multiprocessors) if rest else 0)

    def cost_and_parts(size: int) -> tuple[int, int]:
        parts, rest = divmod(count, size)
        return parts * part_cost(size) + part_cost(rest), parts + (rest > 0)

    return min(range(1, limit + 1), key=cost_and_parts)

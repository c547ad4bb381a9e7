"""The workspace of a backward: which pairs the dkv kernel stores, and in which parts; and what follows from it for other kernels.

The dkv kernel stores dS, and with rel_value P, of each pair, rounded to the inputs' dtype as it multiplies them (stored.py). From
these the dtable and dp2c kernels compute the gradients of tables with one product. dS takes 2 bytes a pair, so the dkv kernel's
programs run in parts, one part after the other through the same workspace, in a fixed order.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch

from ..._core.residual import keeps_residual
from ..._core.spec import AttentionSpec, AttentionTensors
from ..call import Call, cdiv
from ..config.tile_config import TileConfig
from ..tile.masking import clamp_margin
from .stored import ALIGNMENT, Layout

VARIABLE = "TRITON_RELATTN_WORKSPACE"
"""The environment variable that limits the workspace, in bytes. It never has less than one block of keys of one head."""
USUAL_LIMIT = 256 * 2**20
MOST_PAIRS = 2**30
"""Largest number of pairs of an item, which kernels address in 32 bits."""
MOST_KEPT = 256
"""Parts of a plan that is kept for later calls: with very small workspaces there may be many thousands."""
MOST_BEYOND = 1.25
"""All keys of a head are stored if they take up to so many times as much as a wave of the dkv kernel's programs: from these the
gradient of the query is computed, too, and the dq kernel need not run."""
START_COST = 6
"""What a wave of the dkv kernel's programs costs beside the programs themselves, in programs of a multiprocessor: one that runs
alone leaves a multiprocessor idle most of the time. An estimate, which no GPU has confirmed."""


class Part(NamedTuple):
    """One launch of the dkv kernel: some of its programs, in the numbering of a launch for all keys."""

    first_program: int
    stop_program: int


class Plan(NamedTuple):
    """A workspace: its sizes, what it holds, and the parts in which it is filled. An item is a sequence and head."""

    items: int
    rows: int
    columns: int
    blocks: int  # of the dkv kernel's keys
    group: int  # heads that share one of the key
    layout: Layout
    has_ds: bool  # there are tables for the scores
    has_probs: bool  # there is a table for the values
    parts: list[Part]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return 1, self.items, self.rows, self.columns

    @property
    def pairs(self) -> int:
        """Return for how many pairs there is room, of dS and of P."""
        return self.items * self.rows * self.columns * (self.has_ds + self.has_probs)

    @property
    def has_all_keys(self) -> bool:
        """Return whether each part has all pairs of its items."""
        return not self.layout.is_band and self.columns >= self.blocks * self.layout.dkv_block_n

    def items_of(self, part: Part) -> int:
        """Return how many items a part has."""
        return (cdiv(part.stop_program, self.blocks) - part.first_program // self.blocks) * self.group


class Route(NamedTuple):
    """How a backward computes its gradients, decided once."""

    plan: Plan | None  # the workspace; None without tables
    query_from_ds: bool
    """d_query and d_rel_query come from the workspace, and delta from out and its residual; else both from the dq kernel."""

    @property
    def kernels(self) -> tuple[str, ...]:
        """Return the names of the kernels, of selection.KERNELS, that run if all gradients are wanted, first to last."""
        if self.plan is None:
            return "dq", "dkv"
        of_scores = ("dp2c",) if self.plan.layout.has_p2c else ()
        return (*("dq",) * (not self.query_from_ds), "dkv", "dtable", *("dq_from_ds",) * self.query_from_ds, *of_scores)


def route(
    call: Call,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    tiles: Mapping[str, TileConfig],
    multiprocessors: int,
    has_delta: bool,
    most_bytes: int | None = None,
) -> Route:
    """Return the route of a call. It does not depend on which gradients are wanted, so that a gradient has the same bits alone.

    Args:
        has_delta: whether delta, or the residual of out, is there.
        most_bytes: as of plan.
    """
    planned = plan(call, tensors, spec, tiles, multiprocessors, most_bytes)
    from_ds = has_delta and planned is not None and planned.has_all_keys and keeps_residual(tensors, spec)
    return Route(planned, from_ds)


def limit(tensors: AttentionTensors, wave: int) -> int:
    """Return the largest workspace in bytes: TRITON_RELATTN_WORKSPACE or, if it is not set, 256 MiB, or as much as query, key and
    value take, or one wave of the dkv kernel's programs needs (with the rest of a head, if that is little), whichever is most.

    Raises:
        ValueError: the variable is not a whole number.
    """
    given = os.environ.get(VARIABLE)
    if given:
        if not given.strip().isdecimal():
            raise ValueError(f"{VARIABLE} must be a number of bytes, such as 268435456, got {given!r}")
        return int(given)
    return max(USUAL_LIMIT, wave, sum(each.numel() * each.element_size() for each in (tensors.query, tensors.key, tensors.value)))


def plan(
    call: Call,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    tiles: Mapping[str, TileConfig],
    multiprocessors: int,
    most_bytes: int | None = None,
) -> Plan | None:
    """Return the workspace of a call; None if it has no tables.

    Args:
        most_bytes: instead of ``limit``. A workspace for one block of keys of one head may have more.
    """
    key = "plan", tiles.get("dq"), tiles.get("dkv"), multiprocessors, most_bytes, os.environ.get(VARIABLE)
    derived = call.fixed.derived
    if key in derived:
        kept: Plan | None = derived[key]
        return kept
    found = _plan(call, tensors, spec, tiles, multiprocessors, most_bytes)
    if found is None or len(found.parts) <= MOST_KEPT:
        derived[key] = found
    return found


def _plan(
    call: Call,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    tiles: Mapping[str, TileConfig],
    multiprocessors: int,
    most_bytes: int | None,
) -> Plan | None:
    has_ds = tensors.rel_key is not None or tensors.rel_bias is not None or tensors.rel_p2c is not None
    has_probs = tensors.rel_value is not None
    if not has_ds and not has_probs:
        return None
    dq, dkv = tiles["dq"], tiles["dkv"]
    layout = Layout(dq.block_m, dq.block_n, dkv.block_m, dkv.block_n, tensors.rel_p2c is not None)
    rows, block_n = spec.max_seqlen_q, dkv.block_n
    blocks = cdiv(spec.max_seqlen_k, block_n)
    units = call.num_sequences * call.key_heads
    group = call.heads // call.key_heads

    # Columns: all keys, or if that is fewer a band of relative positions.
    lowest, highest = _stored_positions(call, spec, layout)
    band = cdiv(max(highest - lowest + 1, 1) + dkv.block_m - 1 + ALIGNMENT.value - 1, 64) * 64
    columns = min(band, blocks * block_n)
    slots = multiprocessors * dkv.programs_at_once
    bytes_of_pair = tensors.query.element_size() * (has_ds + has_probs)
    if most_bytes is None:
        # One wave's blocks of keys, or the heads that these belong to, whose bands may take less.
        columns_of_wave = min(slots * block_n, cdiv(slots, blocks) * columns)
        if columns_of_wave < columns <= MOST_BEYOND * columns_of_wave:
            columns_of_wave = columns
        most_bytes = limit(tensors, group * rows * columns_of_wave * bytes_of_pair)
    most_pairs = most_bytes // bytes_of_pair

    most_units = min(units, most_pairs // (group * rows * columns)) if rows * columns <= MOST_PAIRS else 0
    if most_units > 0:
        at_once = _part_size(units, most_units, blocks, multiprocessors, dkv.programs_at_once)
        step, items = at_once * blocks, at_once * group
        layout = layout._replace(is_band=columns < blocks * block_n)
        starts = [(first, min(first + step, units * blocks)) for first in range(0, units * blocks, step)]
    else:  # some blocks of keys of one unit at a time
        most_blocks = max(1, min(most_pairs // group, MOST_PAIRS) // (rows * block_n))
        step = _part_size(blocks, min(blocks, most_blocks), 1, multiprocessors, dkv.programs_at_once)
        items, columns = group, step * block_n
        starts = [
            (unit * blocks + block, unit * blocks + min(block + step, blocks))
            for unit in range(units)
            for block in range(0, blocks, step)
        ]
    return Plan(items, rows, columns, blocks, group, layout, has_ds, has_probs, [Part(*each) for each in starts])


def _stored_positions(call: Call, spec: AttentionSpec, layout: Layout) -> tuple[int, int]:
    """Return the (lowest, highest) relative position that is wanted; stored.stored_positions does the same."""
    is_clamped = call.coverage == "clamp"
    margin = clamp_margin(layout.dq_block_m, layout.dq_block_n) if is_clamped else 0
    lowest, highest = spec.first - margin, spec.last + margin
    if spec.window_left >= 0:
        lowest = max(lowest, -spec.window_left)
    if spec.window_right >= 0:
        highest = min(highest, spec.window_right)
    slack = clamp_margin(layout.dkv_block_m, layout.dkv_block_n) if is_clamped and layout.has_p2c else 0
    return lowest - slack, highest + slack


@functools.lru_cache(maxsize=256)
def _part_size(count: int, most: int, programs: int, multiprocessors: int, at_once: int) -> int:
    """Return how many of count things, of so many programs each, make a part, at most ``most``.

    A wave of programs takes START_COST and as much as a multiprocessor has programs in it. All parts together should cost as
    little as possible; of sizes that cost the same, take one with the fewest parts, and of those the smallest: then parts are
    about equally large.
    """
    slots = multiprocessors * at_once

    def cost_of_part(size: int) -> int:
        waves, rest = divmod(size * programs, slots)
        return waves * (START_COST + at_once) + (START_COST + cdiv(rest, multiprocessors) if rest else 0)

    def cost_and_parts(size: int) -> tuple[int, int]:
        parts, rest = divmod(count, size)
        return parts * cost_of_part(size) + cost_of_part(rest), parts + (rest > 0)

    return min(range(1, most + 1), key=cost_and_parts)


def allocated(
    call: Call,
    tensors: AttentionTensors,
    spec: AttentionSpec,
    tiles: Mapping[str, TileConfig],
    multiprocessors: int,
    has_delta: bool,
    wants: Mapping[str, bool],
) -> tuple[Route, torch.Tensor | None, torch.Tensor | None]:
    """Return the route of a call and its workspace: dS and P, each None if no gradient that is wanted needs it.

    Where torch has no memory for it, the workspace is made smaller, with a warning: sums of other parts have other last bits.

    Raises:
        OutOfMemoryError: there is no memory for one block of keys of one head.
    """
    query, most_bytes = tensors.query, None
    while True:
        found = route(call, tensors, spec, tiles, multiprocessors, has_delta, most_bytes)
        planned = found.plan
        if planned is None:
            return found, None, None
        of_query = found.query_from_ds and (wants["query"] or wants["rel_query"])
        ds, needs_ds = None, of_query or any(wants[name] for name in ("rel_key", "rel_bias", "rel_p2c"))
        try:
            ds = query.new_empty(planned.shape) if needs_ds else None
            probs = query.new_empty(planned.shape) if wants["rel_value"] else None
            return found, ds, probs
        except torch.OutOfMemoryError as error:
            ds = None  # what there was room for is free again
            size = planned.pairs * query.element_size()
            most_bytes = size // 2
            smaller = plan(call, tensors, spec, tiles, multiprocessors, most_bytes)
            if smaller is None or smaller.pairs >= planned.pairs:
                text = (
                    f"the backward needs a workspace of {size} bytes at least, for {planned.rows} queries and one block of keys"
                )
                raise torch.OutOfMemoryError(f"{text}; {error}") from error
            warnings.warn(
                f"no memory for a workspace of {size} bytes; a smaller one is used, with which sums may differ in their last "
                f"bits. {VARIABLE} limits it from the beginning.",
                RuntimeWarning,
                stacklevel=2,
            )

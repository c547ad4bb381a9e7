"""The kernels with every term and argument, guarded, with the workspace in one or many parts, in any tile, with any table."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.check import TILES, Way, attend, attend_varlen, check, compute
from tests.expected import TABLES
from tests.interpreter.guard import Guarded, guarded, recorded
from tests.samples import Sample
from triton_relattn._core import validation
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig
from triton_relattn.kernels.draft import Draft
from triton_relattn.kernels.plan import DoesNotFit
from triton_relattn.testing import forward_backward, make_inputs

SMALL = Way("triton", small=True)

# All calls, with all kinds of tables and parts.

POSITIONS = {"full": (-59, 59, "clamp"), "clamp": (-4, 6, "clamp"), "zero": (-4, 6, "zero")}
LIMITS = ("whole", "heads", "keys", "block")
"""What a part of the workspace holds: everything; one key head; some of its keys; one block of its keys."""
PACK = ((13, 21), (0, 5), (33, 20), (5, 0))
SIZES: dict[str, Any] = {"batch": 2, "num_queries": 33, "num_keys": 35, "group": 2, "width": 8, "value_width": 12}
CALLS: dict[str, dict[str, Any]] = {
    "key": {},
    "no table": {"tables": (), "is_causal": True, "query_offset": 6},
    "causal": {"is_causal": True, "query_offset": 6, "mask": "bool", "mask_shape": (33, 35)},
    "per head": {
        **{"key_heads": 2, "tables": ("rel_key", "rel_bias"), "per_head": TABLES, "dropout_p": 0.3},
        **{"mask": "float32", "mask_shape": (2, 1, 1, 35)},
    },
    "own query": {
        "tables": ("rel_key", "rel_bias"),
        "rel_width": 24,
        "rel_scale": -0.4,
        "key_lengths": (0, 20),
        "query_offset": -9,
    },
    "narrow query": {"rel_width": 3, "per_head": TABLES, "window_size": (7, -1), "softcap": 3.0},
    "bias": {"tables": ("rel_bias",), "key_lengths": (35, 17)},
    "window": {"window_size": (11, 5), "query_offset": 3, "scale": -0.3},
    "p2c": {"tables": ("rel_p2c",), "per_head": TABLES, "is_causal": True, "query_offset": 6},
    "key and p2c": {"tables": ("rel_key", "rel_p2c"), "key_lengths": (35, 17), "query_offset": -9},
    "p2c, window": {"tables": ("rel_key", "rel_p2c", "rel_bias"), "window_size": (11, 5), "rel_scale": 0.3},
    "p2c per head": {"key_heads": 2, "tables": ("rel_key", "rel_p2c"), "per_head": TABLES, "dropout_p": 0.3, "softcap": 3.0},
    "value": {"tables": ("rel_value",), "per_head": TABLES, "key_lengths": (20, 0), "is_causal": True, "query_offset": 5},
    "key and value": {"tables": ("rel_key", "rel_value"), "query_offset": 4, "dropout_p": 0.3},
    "value per head": {"key_heads": 2, "tables": ("rel_key", "rel_value", "rel_bias"), "per_head": TABLES, "scale": -0.3},
    "value, window": {
        **{"tables": ("rel_key", "rel_value"), "rel_width": 12, "rel_scale": 0.3},
        **{"window_size": (11, 5), "query_offset": (3, -5)},
    },
    "bias, offsets": {"tables": ("rel_key", "rel_bias"), "query_offset": (3, -5)},
    "every table": {"tables": TABLES, "rel_width": 12, "query_offset": 3, "softcap": 9.0},
    "every table, offsets": {
        **{"tables": TABLES, "per_head": TABLES, "query_offset": (3, -5), "dropout_p": 0.2, "is_causal": True},
    },
    "packed": {"sequences": PACK, "tables": ("rel_key", "rel_bias"), "per_head": TABLES, "is_causal": True, "query_offset": 5},
    "packed, window": {"sequences": PACK, "tables": ("rel_value",), "window_size": (11, 5), "query_offset": (4, 3, -12, 20)},
    "packed, p2c": {
        **{"sequences": PACK, "key_heads": 2, "group": 1, "tables": ("rel_key", "rel_p2c"), "per_head": TABLES},
        **{"rel_scale": -0.3, "dropout_p": 0.3},
    },
    "packed, every table": {
        **{"sequences": PACK, "tables": TABLES, "rel_width": 12, "softcap": 3.0},
        **{"query_offset": (4, 3, -12, 20), "window_size": (-1, 20)},
    },
}


def workspace_limit(sample: Sample, limit: str) -> int | None:
    """The bytes of a workspace for one of LIMITS; None for the default."""
    block = TILES[sample.blocks % len(TILES)]["dkv"][1]
    pairs = sample.group * sample.longest(0) * -(-sample.longest(1) // block) * block
    size = pairs * getattr(torch, sample.dtype).itemsize * (2 if "rel_value" in sample.tables else 1)
    return {"whole": None, "heads": size, "keys": size * 2 // 3, "block": 0}[limit]


def named_call(name: str, kind: str, limit: str = "whole", **others: Any) -> Sample:
    """One of CALLS."""
    fields: dict[str, Any] = {**SIZES, "tables": ("rel_key",), "positions": POSITIONS[kind], **CALLS[name], **others}
    sample = Sample(**fields)
    return replace(sample, workspace=workspace_limit(sample, limit), positions=sample.positions if sample.tables else None)


def runs() -> list[Any]:
    """Each call with each kind of table and of parts; one combination of each call is not slow. Two in five are in float16."""
    cases = []
    for number, name in enumerate(CALLS):
        for (kind_number, kind), (limit_number, limit) in itertools.product(enumerate(POSITIONS), enumerate(LIMITS)):
            turn = number + number // 12 + kind_number + limit_number
            is_usual = kind_number == number % 3 and limit_number == number // 3 % 4
            cases.append(pytest.param(name, kind, limit, turn, marks=() if is_usual else pytest.mark.slow))
    return cases


@pytest.mark.parametrize(("name", "kind", "limit", "turn"), runs())
def test_calls(name: str, kind: str, limit: str, turn: int) -> None:
    """All results are right for any parts and order of programs, with NaN around all inputs and in uninitialised memory. No
    program accesses memory outside of tensors, or stores where another does."""
    way, dtype = Guarded(small=True), "float16" if turn % 5 < 2 else "float32"
    check(named_call(name, kind, limit, seed=turn, blocks=turn, dtype=dtype, strided=("d_out", "d_lse")), way)
    has_parts = limit != "whole" and name != "no table"  # for which nothing is stored
    assert (sum(launch.kernel == "dkv_kernel" for launch in way.launches) > 1) == has_parts
    busy = {launch.kernel for launch in way.launches if launch.loads and launch.stores}
    assert busy == {launch.kernel for launch in way.launches}  # a part of empty sequences stores nothing


# Windows and short tables, of which the workspace stores a band of keys, and keys beyond a table.

BANDS: dict[str, dict[str, Any]] = {
    "full": {"positions": (-300, 300, "clamp"), "window_size": (9, 3), "query_offset": -5},
    "clamp": {"window_size": (20, 30), "dtype": "float16"},
    "causal": {"positions": (-6, 1, "clamp"), "query_offset": 115, "window_size": (25, -1), "is_causal": True},
    "beside": {"positions": (40, 45, "clamp"), "query_offset": -20, "window_size": (16, 42)},
    "values": {"more": "rel_value", "query_offset": 90, "window_size": (10, 9), "dropout_p": 0.2},
    "values alone": {
        **{"tables": ("rel_value",), "positions": (-4, 6, "zero"), "dtype": "float16"},
        **{"query_offset": 50, "window_size": (12, 8)},
    },
    "p2c": {"num_keys": 200, "more": "rel_p2c", "window_size": (20, 30), "query_offset": 60},
    "offsets": {
        **{"batch": 2, "num_queries": 40, "more": "rel_p2c", "positions": (-300, 300, "clamp")},
        **{"query_offset": (51, 130), "window_size": (9, 3)},
    },
    "more queries than keys": {
        **{"batch": 2, "num_queries": 150, "num_keys": 60, "positions": (-200, 200, "clamp"), "query_offset": (90, -7)},
    },
    "packed": {
        **{"sequences": ((0, 9), (70, 150), (5, 130)), "more": "rel_value", "rel_width": 12},
        **{"query_offset": (0, 70, -2), "window_size": (20, 9)},
    },
    # No window: a band of the table's rows
    "table": {"key_heads": 2, "rel_width": 12, "query_offset": 60, "softcap": 3.0},
    "table of the past": {"more": "rel_value", "positions": (-19, -3, "clamp"), "query_offset": 20, "is_causal": True},
    "table of the future": {"more": "rel_value", "positions": (7, 9, "zero"), "query_offset": 3, "dropout_p": 0.2},
    "table of p2c": {"blocks": 2, "num_keys": 200, "key_heads": 2, "more": "rel_p2c", "per_head": TABLES, "query_offset": -10},
    "packed table": {
        **{"sequences": ((9, 9), (70, 150), (5, 130)), "more": "rel_p2c", "positions": (-4, 6, "zero")},
        **{"query_offset": (0, 7, -2), "is_causal": True},
    },
    # Far keys
    "shared keys": {"num_keys": 100, "key_heads": 2, "group": 2, "more": "rel_p2c", "rel_scale": 0.7},
    "p2c alone": {"num_keys": 100, "tables": ("rel_p2c",), "is_causal": True, "query_offset": 9},
    "lengths": {"batch": 2, "num_keys": 100, "more": "rel_p2c", "key_lengths": (100, 61), "query_offset": (0, -70)},
    "dropout": {"num_keys": 100, "more": "rel_p2c", "dropout_p": 0.2, "softcap": 4.0},
    "own query": {"num_keys": 100, "more": "rel_p2c", "rel_width": 8, "query_offset": -80, "rel_scale": -0.5},
    "every table": {"key_heads": 2, "tables": TABLES, "per_head": TABLES},
}
WIDE = {"stored_dq": (16, 128), "dq": (64, 64), "dkv": (32, 32), "dtable": (16, 128), "dp2c": (64, 64)}
"""Tiles of more keys, or queries, than a short table has rows."""


@pytest.mark.thorough
@pytest.mark.parametrize("is_wide", [False, True], ids=["", "wide"])
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, is_wide: bool) -> None:
    """Windows and tables that are short compared with the keys, with room for all keys or one block, and both kinds of pairs
    beyond a short table."""
    number, fields = list(BANDS).index(name), {"positions": (-4, 6, "clamp"), **BANDS[name]}
    tables = ("rel_key", "rel_bias", *(fields.pop("more", None),))
    fields = {"num_queries": 70, "num_keys": 150, "width": 8, "tables": tuple(filter(None, tables)), **fields}
    if is_wide and fields["positions"][1] < 50:
        fields["positions"] = (*fields["positions"][:2], "clamp" if fields["positions"][2] == "zero" else "zero")
    workspace = 0 if number % 2 == is_wide else None
    sample = Sample(**{"blocks": number, **fields}, seed=number, workspace=workspace)
    check(sample, Guarded(small=not is_wide, tiles=WIDE if is_wide else None))


# Tiles and tables.

TABLE_ROWS: dict[str, tuple[int, int]] = {
    **{"exact": (-44, 57), "one row short": (-43, 57), "longer": (-70, 80), "shorter": (-20, 8), "one row": (0, 0)},
    **{"one row of the future": (17, 17), "two rows": (-1, 0), "causal rows": (-44, 0), "wholly past": (-500, -200)},
    **{"past": (-40, -16), "wholly future": (300, 333), "future": (16, 48), "near": (-3, 7), "one row of the past": (-20, -20)},
    "two rows of the future": (5, 6),
}


@pytest.mark.parametrize("outside", ["clamp", "zero"])
@pytest.mark.parametrize("rows", TABLE_ROWS)
def test_tables(rows: str, outside: str) -> None:
    """Tables that cover all, some or none of the relative positions, with offsets and lengths, in different tiles.

    Also tables per head: memory after a table then belongs to the next head, and is not zero by chance.
    """
    number = list(TABLE_ROWS).index(rows)
    sample = Sample(num_queries=45, num_keys=58, key_heads=2, positions=(*TABLE_ROWS[rows], outside), blocks=number)
    check(replace(sample, tables=("rel_key", "rel_value"), query_offset=(0, 17, -9)[number % 3]), SMALL)
    masks: dict[str, Any] = {"is_causal": True, "query_offset": (20, -9, 17)[number % 3], "key_lengths": (49,)}
    tables = ("rel_key", "rel_bias" if number % 2 else "rel_p2c")
    check(replace(sample, blocks=number + 1, seed=1, tables=tables, per_head=TABLES, **masks), SMALL)


def selectable(kernel: str) -> list[TileConfig]:
    """A kernel's default configurations, without what the interpreter ignores: stages, registers and, with gather, warps."""
    rows = (row for row in selection.defaults() if row["kernel"] in ("", kernel) and row["term_set"] != "grid")
    found = set()
    for config in map(selection.config_of, rows):
        warps = 4 if config.rotation == "gather" else config.num_warps
        found.add(dataclasses.replace(config, num_warps=warps, num_stages=1, max_registers=None))
    return sorted(found, key=str)


SELECTABLE = {kernel: selectable(kernel) for kernel in KERNELS}


@pytest.mark.parametrize("number", range(max(map(len, SELECTABLE.values()))))
def test_every_tile_that_some_gpu_gets(number: int) -> None:
    """A full, a clamped and a bounded table, and none, with lengths that do not fill blocks of queries or keys."""
    tiles = {kernel: configs[number % len(configs)] for kernel, configs in SELECTABLE.items()}
    rows, columns = (max(getattr(tile, size) for tile in tiles.values()) for size in ("block_m", "block_n"))
    # With half of these queries, kernels that read dS would take a smaller tile.
    sample = Sample(num_queries=21 + 2 * rows, num_keys=columns + 40, query_offset=19, key_lengths=(columns + 35,), seed=number)
    kinds: tuple[dict[str, Any], ...] = (
        {"positions": (-sample.num_queries - 30, sample.num_keys, "clamp"), "tables": ("rel_key", "rel_p2c"), "is_causal": True},
        {"positions": (-3, 7, "clamp"), "tables": ("rel_key", "rel_p2c"), "dtype": "float16", "round_terms": True},
        {"positions": (-rows - 5, 2, "zero"), "tables": ("rel_key",), "is_causal": True},
        {"dtype": "float16"},
    )
    for place, fields in enumerate(kinds):
        mode = "grad" if place in (0, 1 + number % 3) else "no_grad"
        check(replace(sample, **fields, mode=mode), Way("triton", tiles=tiles))


@pytest.mark.thorough
@pytest.mark.parametrize("fields", [{"positions": (-4, 6, "clamp"), "tables": TABLES[:3]}, {"dtype": "float16", "scale": 0.02}])
def test_tiles_that_do_not_fit_are_replaced(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """By smaller ones, with a warning; results are right. A new plan has nothing of the first attempt."""
    limits, launch = {"forward": 32, "stored_dq": 16, "dq": 32, "dkv": 32, "dtable": 16}, Draft.launch

    def refuse(draft: Draft, name: str, kernel: Any, config: Any, *others: Any) -> None:
        if config is not None and config.block_m > limits.get(name, config.block_m):  # the delta kernel's is fixed
            selection.take_smaller(name, "interpreter", draft.selected[name], OutOfResources(99, 1, "shared memory"))
            raise DoesNotFit
        launch(draft, name, kernel, config, *others)

    monkeypatch.setattr(Draft, "launch", refuse)
    sizes = {
        "batch": 2,
        "num_queries": 70,
        "num_keys": 83,
        "tables": ("rel_key",),
        "positions": (-4, 6, "zero"),
        "rel_scale": 0.25,
    }
    masks = {"key_lengths": (83, 40), "is_causal": True, "query_offset": 13}
    selection.forget()
    try:
        with pytest.warns(RuntimeWarning, match="does not fit this GPU"):
            check(Sample(**{**sizes, **masks, **fields}), Way("triton"))
        replaced = {kernel for kernel, *_ in selection.tables("interpreter").smaller}
    finally:
        selection.forget()
    # With few queries, kernels that read dS may have smaller tiles than their configurations; see backward.shortened.
    assert replaced | {"stored_dq", "dtable"} == set(limits)


@pytest.mark.parametrize("kind", ["full", "clamp", pytest.param("zero", marks=pytest.mark.slow), None])
def test_windows_skip_tiles(kind: str | None) -> None:
    """With a fixed window, each kernel's loads grow linearly with the length: tiles outside are skipped. Without one they grow
    faster."""
    positions = None if kind is None else (-100, 100, "clamp") if kind == "full" else POSITIONS[kind]
    way = Way("triton", tiles={**TILES[1], "dtable": (16, 32)})

    def loads(length: int, window: tuple[int, int]) -> Counter[str]:
        sample = Sample(num_queries=length, num_keys=length, positions=positions, window_size=window)
        with recorded() as launches:
            compute(replace(sample, tables=TABLES[:3] if kind else ()), way)
        counted: Counter[str] = Counter()
        for launch in launches:  # there are two dtable kernels, for dS and for P
            counted[launch.kernel.removesuffix("_kernel")] += launch.loads
        return counted

    short, middle, long, unbounded = (loads(*call) for call in ((32, (9, 5)), (64, (9, 5)), (96, (9, 5)), (96, (-1, -1))))
    others = {None: {"dq"}, "full": {"stored_dq", "dtable"}}
    assert set(short) == {"forward", "delta", "dkv"} | others.get(kind, {"dq", "stored_dq", "dtable", "table_gradient"})
    for kernel in set(short) - {"delta", "table_gradient"}:  # which read no keys
        assert 0 < long[kernel] - middle[kernel] <= 1.05 * (middle[kernel] - short[kernel]), kernel
    assert all(unbounded[kernel] > 1.2 * long[kernel] for kernel in ("forward", "dkv"))


@pytest.mark.parametrize("limit", [None, 0])
def test_rows_of_no_sequence(limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed tensors that are longer than their sequences raise an error on a CPU. On a GPU, where that is not checked, results
    of the sequences are right."""
    sequences = ((7, 16), (13, 14), (10, 6))
    sample = Sample(sequences=sequences, tables=TABLES[:3], rel_width=12, positions=POSITIONS["clamp"])
    inputs, arguments = sample.inputs()
    arguments |= {name: arguments[name][:-1] for name in ("cu_seqlens_q", "cu_seqlens_k")}
    kernels = partial(attend_varlen, implementation="triton")
    monkeypatch.setenv("TRITON_RELATTN_WORKSPACE", "" if limit is None else str(limit))
    with pytest.raises(ValueError, match="cu_seqlens_q must rise from 0 to the total length 30"):
        forward_backward(kernels, inputs, **arguments)
    lengths = dict.fromkeys(("query", "rel_query", "d_out"), 20) | dict.fromkeys(("key", "value"), 30)
    short = {name: getattr(inputs, name)[:length] for name, length in lengths.items()}
    expected = forward_backward(kernels, inputs._replace(**short, d_lse=inputs.d_lse[:, :20]), **arguments)
    monkeypatch.setattr(validation, "_check_integers", lambda *_: None)  # values are not known
    with guarded():
        results = forward_backward(kernels, inputs, **arguments)
    for name, result in results.items():
        rows = {"out": 20, **lengths}.get(name.removeprefix("d_"))
        part = result[:, :20] if name == "lse" else result[:rows]
        assert torch.equal(part, expected[name]), name


def test_what_the_interpreter_cannot_do() -> None:
    """bfloat16, which it computes wrongly, float64, and wide heads raise errors instead of using another implementation."""
    for sizes, dtype, text in (
        ((1, 1, 20, 20, 16), torch.bfloat16, "interpreter computes bfloat16 wrongly"),
        ((1, 1, 20, 20, 16), torch.float64, r"not in torch\.float64"),
        ((1, 1, 4, 4, 257), torch.float32, "up to 256, got 257"),
    ):
        with pytest.raises(RuntimeError, match=text):
            attend(*make_inputs(*sizes, num_rows=7, dtype=dtype, seed=6)[:4], implementation="triton")

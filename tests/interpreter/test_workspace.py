"""The workspace of a backward: gradients from the dS and P of each pair that the dkv kernel stores, in parts."""

from __future__ import annotations

import itertools
import math
import random
import re
import sys
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch

from tests.interpreter.guard import Launch, programs_in_order
from tests.interpreter.launch import GRADIENTS, check_backward, resolve
from tests.interpreter.workspaces import (
    CALLS,
    EVERY_TABLE,
    LIMITS,
    PACKED_CALLS,
    POSITIONS,
    TILES,
    call_of,
    check_call,
    check_packed,
    check_parts,
    limit_of,
    named_call,
    pack_of,
    planned,
    results_of,
)
from tests.tolerance import assert_gradients_close_fp32
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core.spec import TABLES
from triton_relattn.kernels.call import cdiv
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.planning import VARIABLE, Plan
from triton_relattn.testing import make_inputs

# Every kind of call, with every kind of part.


def runs() -> list[Any]:
    """Each call with each kind of table and of parts; in the normal run once, with one of either. Tiles change from one to the
    next, and two in five are in float16."""
    every = []
    for number, name in enumerate([*CALLS, *PACKED_CALLS]):
        for (of_kind, kind), (of_limit, limit) in itertools.product(enumerate(POSITIONS), enumerate(LIMITS)):
            turn = number + number // 12 + of_kind + of_limit
            dtype = torch.float16 if turn % 5 < 2 and name != "packed_dropout" else torch.float32
            tiles = list(TILES)[(2 * (number // 12) + of_kind + of_limit) % 5]
            is_usual = of_kind == number % 3 and of_limit == number // 3 % 4
            marks = () if is_usual else pytest.mark.slow
            every.append(pytest.param(name, kind, limit, tiles, dtype, marks=marks))
    return every


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(("name", "kind", "limit", "tiles", "dtype"), runs(), ids=str)
def test_calls(
    name: str,
    kind: str,
    limit: str,
    tiles: str,
    dtype: torch.dtype,
    plans: list[Plan | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All results obey the error rules, whatever the parts; memory that nobody has written, with NaN in it, counts nowhere."""
    inputs, arguments = named_call(name, kind, dtype=dtype)
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES[tiles]))
    plans.clear()
    check_call(inputs, arguments, TILES[tiles])
    (plan,) = plans
    check_parts(plan, limit)


def test_the_normal_run_has_everything() -> None:
    usual = [run.values for run in runs() if not run.marks]
    names, *_ = zip(*usual, strict=True)
    assert set(names) == {*CALLS, *PACKED_CALLS}
    assert {(kind, limit) for _, kind, limit, *_ in usual} == set(itertools.product(POSITIONS, LIMITS))
    assert {(limit, tiles) for _, _, limit, tiles, _ in usual} == set(itertools.product(LIMITS, TILES))
    dtypes = (torch.float16, torch.float32)
    assert {(limit, dtype) for _, _, limit, _, dtype in usual} == set(itertools.product(LIMITS, dtypes))
    assert {(tiles, dtype) for _, _, _, tiles, dtype in usual} == set(itertools.product(TILES, dtypes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("every_table", "clamp"),
        ("packed_offsets", "zero"),
        pytest.param("rel_value_per_head", "clamp", marks=pytest.mark.slow),
        pytest.param("p2c_per_head", "full", marks=pytest.mark.slow),
        pytest.param("offsets_window", "zero", marks=pytest.mark.slow),
        pytest.param("packed_p2c", "clamp", marks=pytest.mark.slow),
    ],
)
def test_parts_change_only_how_sums_are_added_up(
    name: str, kind: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of tables, and those of queries where a part has some of their keys, are close; all else has the same bits."""
    inputs, arguments = named_call(name, kind)
    found = {}
    for limit in LIMITS:
        monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES["twice"]))
        plans.clear()
        found[limit] = results_of(inputs, arguments, TILES["twice"])
        check_parts(plans[0], limit)
    whole = found.pop("whole")
    gradients = [each for result, each in whole.items() if result.startswith("d_")]
    for limit, results in found.items():
        sums = TABLES if limit == "heads" else (*TABLES, "query", "rel_query")
        assert results.keys() == whole.keys()
        for result, expected in whole.items():
            if result.removeprefix("d_") in sums:
                assert_gradients_close_fp32(result, results[result], expected, gradients)
            else:
                assert torch.equal(results[result], expected), (limit, result)


# A band of keys in place of all.

BANDS: dict[str, tuple[RelativePositions, tuple[Any, Any], dict[str, Any], dict[str, Any]]] = {
    # table, queries and keys, of a pack for each sequence, options of make_inputs, arguments
    "full": (RelativePositions(-300, 300), (130, 150), {}, {"window_size": (9, 3), "query_offset": -5}),
    "clamp": (RelativePositions(-4, 6), (131, 260), {}, {"window_size": (20, 30)}),
    "clamp_causal": (RelativePositions(-6, 1), (35, 250), {}, {"query_offset": 215, "window_size": (25, -1), "is_causal": True}),
    "clamp_beside": (RelativePositions(40, 45), (70, 300), {}, {"query_offset": -20, "window_size": (16, 42)}),
    "clamp_values": (
        *(RelativePositions(-4, 6), (40, 260), {"rel_value": True}),
        {"query_offset": 90, "window_size": (10, 9), "dropout_p": 0.2},
    ),
    "zero_values": (
        *(RelativePositions(-4, 6, "zero"), (70, 140), {"rel_value": True, "rel_key": False}),
        {"query_offset": 50, "window_size": (12, 8)},
    ),
    "p2c": (RelativePositions(-4, 6), (131, 260), {"rel_p2c": True}, {"window_size": (20, 30), "query_offset": 60}),
    "offsets": (
        *(RelativePositions(-300, 300), (40, 260), {"rel_p2c": True, "batch": 2}),
        {"query_offset": torch.tensor([101, 230]), "window_size": (9, 3)},
    ),
    "packed": (
        *(RelativePositions(-4, 6), ((0, 70, 5), (9, 150, 130)), {"rel_value": True, "rel_width": 12}),
        {"query_offset": torch.tensor([0, 70, -2]), "window_size": (20, 9)},
    ),
}
BAND_RUNS = [
    (name, tiles, LIMITS[(number + place) % 4])
    for number, name in enumerate(BANDS)
    for place, tiles in enumerate(("registers", "long", "square", "wide"))
    if tiles != "square" or "clamp" in name or "p2c" in name
]


def test_more_queries_than_keys_at_offsets_of_their_own() -> None:
    """A row of the table meets more queries than a part has keys: each sequence's offset tells which."""
    inputs = make_inputs(2, 1, 150, 60, 8, num_rows=401, dtype=torch.float32, seed=1)
    arguments = {"positions": RelativePositions(-200, 200), "query_offset": torch.tensor([90, -7])}
    check_call(inputs, arguments, TILES["registers"])


@pytest.mark.thorough
@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(("name", "tiles", "limit"), BAND_RUNS)
def test_bands(name: str, tiles: str, limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds a band if a window is short compared with the keys, also for tiles that are wider; not so if there is
    room for some keys only."""
    positions, lengths, options, arguments = BANDS[name]
    dtype = torch.float16 if name in ("full", "clamp", "zero_values") else torch.float32
    options = {"batch": 1, "key_heads": 2, "num_rows": positions.num_rows, "rel_bias": options.get("rel_key", True), **options}
    if name == "packed":
        inputs, of_pack = pack_of("clamp", dict(zip("qk", lengths, strict=True)), **options)
        arguments = {**of_pack, **arguments}
    else:
        options |= {"num_queries": lengths[0], "num_keys": lengths[1], "dtype": dtype}
        inputs, _ = call_of("clamp", **options)
        arguments = {**arguments, "positions": positions, "enable_gqa": True}
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES[tiles]))
    plans.clear()
    check_call(inputs, arguments, TILES[tiles])
    (plan,) = plans
    check_parts(plan, limit)
    assert plan is not None and plan.layout.is_band == (limit in ("whole", "heads"))


# Sequences of very different lengths: those of a pack have a rectangle of the longest one's lengths each.

UNEQUAL: dict[str, dict[str, tuple[int, ...]]] = {
    "long_and_short": {"q": (0, 70, 1, 3, 0, 2), "k": (9, 1, 90, 2, 0, 33)},
    "long_and_empty": {"q": (1, 0, 0, 80), "k": (0, 100, 0, 85)},
    "the_longest_has_no_partner": {"q": (90, 0, 5, 17), "k": (0, 110, 40, 1)},
}


@pytest.mark.thorough
@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(
    ("lengths", "kind", "limit"),
    [
        pytest.param(
            lengths, kind, limit, marks=() if LIMITS[(number + 2 * place) % 4] == limit and place == number else pytest.mark.slow
        )
        for number, lengths in enumerate(UNEQUAL)
        for place, kind in enumerate(("zero", "clamp", "full"))
        for limit in LIMITS
    ],
)
def test_packed_sequences_of_very_different_lengths(
    lengths: str, kind: str, limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of a rectangle is never written, and counts nowhere. Keys that nobody sees may be NaN."""
    packed = UNEQUAL[lengths]
    inputs, arguments = pack_of(kind, packed, **EVERY_TABLE)
    key, value, offsets = inputs.key.clone(), inputs.value.clone(), torch.arange(len(packed["q"])) * 7 - 9
    unseen = torch.tensor([count == 0 for count in packed["q"]]).repeat_interleave(torch.tensor(packed["k"]))
    key[unseen], value[unseen] = math.nan, math.nan
    assert unseen.any()
    arguments |= {"positions": RelativePositions(-130, 130) if kind == "full" else POSITIONS[kind], "query_offset": offsets}
    if kind == "full":
        inputs, _ = pack_of(kind, packed, **EVERY_TABLE, num_rows=261)
        arguments["query_offset"] = 4
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES["registers"]))
    plans.clear()
    results = check_packed(inputs, arguments, TILES["registers"])
    (plan,) = plans
    check_parts(plan, limit)
    assert plan is not None and plan.rows == max(packed["q"])
    plans.clear()
    spoilt = results_of(inputs._replace(key=key, value=value), arguments, TILES["registers"])
    assert all(torch.equal(spoilt[name], result) for name, result in results.items())


@pytest.mark.parametrize("kind", POSITIONS)
def test_sharp_attention_in_float16(kind: str, plans: list[Plan | None]) -> None:
    """The gradients are as good as those of dS and P that are rounded once and summed exactly: delta is the exact one."""
    inputs, arguments = call_of(kind, sharp=True, **EVERY_TABLE, dtype=torch.float16)
    check_call(inputs, {**arguments, "is_causal": kind == "clamp", "query_offset": 5}, TILES["registers"])
    assert plans[0] is not None


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (40, 1), (16, 16), (17, 33), (31, 15), (64, 64)])
def test_lengths(num_queries: int, num_keys: int, plans: list[Plan | None]) -> None:
    """Every gradient within its rounding, element by element."""
    rows = num_queries + num_keys - 1
    inputs = make_inputs(1, 2, num_queries, num_keys, 16, num_rows=rows, dtype=torch.float32, seed=1)
    check_backward(inputs, TILES["square"], positions=RelativePositions(1 - num_queries, num_keys - 1))
    assert plans[0] is not None


@pytest.mark.thorough
def test_programs_that_share_rows(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs have every splits-th block of queries each; more than there are blocks are not asked for."""
    inputs, arguments = call_of("clamp", **EVERY_TABLE)
    monkeypatch.setattr(selection, "PROGRAMS_PER_MULTIPROCESSOR", 1000)
    check_call(inputs, arguments, TILES["registers"])
    assert plans[0] is not None


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0), (1, 0, 5, 7)])
def test_nothing(sizes: tuple[int, int, int, int], plans: list[Plan | None]) -> None:
    inputs = make_inputs(*sizes, 8, num_rows=9, **EVERY_TABLE, dtype=torch.float32, seed=1)
    results = results_of(inputs, {}, TILES["twice"])
    assert not any(results[f"d_{name}"].any() for name in TABLES) and not plans


# The same bits.


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [
        ("every_table", "clamp", "whole"),
        ("every_table", "full", "keys"),
        ("packed_offsets", "zero", "heads"),
        pytest.param("every_table_offsets", "zero", "block", marks=pytest.mark.slow),
        pytest.param("every_table", "zero", "heads", marks=pytest.mark.slow),
        pytest.param("packed_offsets", "clamp", "keys", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits(name: str, kind: str, limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, with programs in another order, and whichever gradients are wanted besides."""
    inputs, arguments = named_call(name, kind, dtype=torch.float16)
    run = partial(results_of, inputs, arguments, TILES["twice"])
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES["twice"]))
    expected = run()
    with programs_in_order("shuffled", seed=3):
        results = run()
    assert all(torch.equal(results[each], gradient) for each, gradient in expected.items())
    alone = ((each,) for each in GRADIENTS if each in expected)
    for wanted in (*alone, ("d_rel_value", "d_rel_p2c"), ("d_rel_bias", "d_value", "d_query")):
        some = run(wanted)
        assert set(some) == {"out", "lse", *wanted}
        for each in wanted:
            assert some[each].any() and torch.equal(some[each], expected[each]), (wanted, each)
    plans.clear()
    run(("d_rel_key",))
    check_parts(plans[0], limit)


def test_what_is_stored(plans: list[Plan | None], guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """dS and P each, only for gradients that need them; kernels run in their order, for each part if anything is stored, and none
    that no gradient needs."""
    inputs, arguments = named_call("every_table", "zero")
    shapes: list[tuple[int, ...]] = []
    new_empty = torch.Tensor.new_empty

    def recorded(tensor: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        created = new_empty(tensor, *sizes, **options).fill_(math.nan)
        shapes.append(tuple(created.shape))
        return created

    monkeypatch.setattr(torch.Tensor, "new_empty", recorded)
    monkeypatch.setenv(VARIABLE, limit_of("heads", inputs, arguments, TILES["twice"]))
    for wanted, stored, kernels in (
        (("d_key", "d_value"), 0, ["dkv"]),
        (("d_query",), 1, ["dkv", "dq"]),
        (("d_rel_query",), 1, ["dkv", "dq"]),
        (("d_rel_key",), 1, ["dkv", "dtable"]),
        (("d_rel_bias",), 1, ["dkv", "dtable"]),
        (("d_rel_value",), 1, ["dkv", "dtable"]),
        (("d_rel_p2c",), 1, ["dkv", "dp2c"]),
        (GRADIENTS, 2, ["dkv", "dq", "dtable", "dtable", "dp2c"]),
    ):
        plans.clear()
        shapes.clear()
        guarded_kernels.clear()
        results_of(inputs, arguments, TILES["twice"], wanted)
        (plan,) = plans
        assert plan is not None and plan.has_probs and shapes.count(plan.shape) == stored, wanted
        names = ("forward", "delta", *(2 if stored else 1) * kernels)
        assert [launch.kernel for launch in guarded_kernels] == [f"{each}_kernel" for each in names]


def test_packs_that_differ_in_the_number_of_sequences() -> None:
    """Calls that are alike in all sizes but this one share no plan."""
    inputs = make_inputs(1, 2, 40, 40, 16, num_rows=39, dtype=torch.float32, seed=4)
    tensors = [tensor[0].transpose(0, 1) for tensor in inputs[:3]]
    for starts in ([0, 20, 40], [0, 10, 20, 30, 40], [0, 20, 40]):
        cu_seqlens = torch.tensor(starts, dtype=torch.int32)
        results = []
        for implementation in ("triton", "reference"):
            leaves = [tensor.detach().clone().requires_grad_() for tensor in (*tensors, inputs.rel_key) if tensor is not None]
            attend: Any = fused_relative_attention_varlen
            out = attend(
                *leaves,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_k=cu_seqlens,
                max_seqlen_q=20,
                max_seqlen_k=20,
                implementation=implementation,
            )
            results.append(torch.autograd.grad(out, leaves, torch.ones_like(out) + tensors[0]))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, msg=str(starts))


# What nobody sees.


@pytest.mark.parametrize("limit", [*LIMITS[:1], LIMITS[2], *(pytest.param(LIMITS[n], marks=pytest.mark.slow) for n in (1, 3))])
@pytest.mark.parametrize("kind", ["full", "zero", "clamp"])
def test_what_nobody_sees(kind: str, limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no visible pair has may be NaN, as may keys that are padding; their gradient is 0, and the others' as without."""
    inputs, arguments = call_of(kind, **EVERY_TABLE, dtype=torch.float32 if kind == "zero" else torch.float16)
    arguments |= {"window_size": (3, 2), "key_lengths": torch.tensor([30, 30])}
    monkeypatch.setenv(VARIABLE, limit_of(limit, inputs, arguments, TILES["twice"]))
    rows = torch.arange(POSITIONS[kind].num_rows) + arguments["positions"].first
    unused = (rows < -3) | (rows > 2)
    spoilt = {name: getattr(inputs, name).clone() for name in ("key", "value", *TABLES)}
    for name, tensor in spoilt.items():
        if name in TABLES:
            tensor[unused] = math.nan
        else:
            tensor[:, :, 30:] = math.nan
    clean = results_of(inputs, arguments, TILES["twice"])
    results = results_of(inputs._replace(**spoilt), arguments, TILES["twice"])
    for name, gradient in clean.items():
        assert gradient.any() and torch.equal(results[name], gradient), name
    assert unused.any() and not any(results[f"d_{name}"][unused].any() for name in TABLES)
    check_parts(plans[-1], limit)


# How large the workspace is, and its parts.


def test_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; by default 256 MiB, or as much as query, key and value have, or one wave of programs needs, if that is more."""
    monkeypatch.delenv(VARIABLE, raising=False)
    inputs, arguments = call_of("full")
    tensors, _ = resolve(inputs, **arguments)
    usual = 256 * 2**20
    assert planning.limit(tensors, 0) == planning.limit(tensors, usual) == usual
    assert planning.limit(tensors, usual + 1) == usual + 1
    large = torch.empty(1, device="meta").expand(2**26, 2)
    all_three = 4 * (2**27 + tensors.key.numel() + tensors.value.numel())
    assert planning.limit(tensors._replace(query=large), usual) == all_three
    assert planning.limit(tensors._replace(query=large), all_three + 1) == all_three + 1
    for text, expected in (("12345", 12345), ("0", 0), (" 300 ", 300), ("", usual), (str(2**40), 2**40)):
        monkeypatch.setenv(VARIABLE, text)
        assert planning.limit(tensors, 1000) == expected
    for text in ("-1", "1e9", "256 MiB"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of bytes, such as 268435456, got '{text}'"):
            planning.limit(tensors, 0)
        with pytest.raises(ValueError, match="must be a number of bytes"):
            results_of(inputs, arguments, TILES["twice"])


WAVES = {
    # keys, window, multiprocessors
    "some keys": (512, (-1, -1), 2),
    "one head": (512, (-1, -1), 4),
    "several heads": (128, (-1, -1), 8),
    "band of several heads": (512, (4, 6), 16),
    "band of one head": (512, (4, 6), 2),
    "everything": (128, (-1, -1), 16),
}


@pytest.mark.parametrize("name", WAVES)
def test_one_wave_is_in_a_part(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However large the heads are, by default as many programs run at once as keep the GPU busy: here eight a multiprocessor."""
    num_keys, window, multiprocessors = WAVES[name]
    monkeypatch.setattr(planning, "limit", lambda _, wave: wave)
    inputs = make_inputs(4, 4, 40, num_keys, 8, num_rows=11, dtype=torch.float16, seed=1)
    plan = planned(inputs, {"window_size": window}, TILES["twice"], multiprocessors)
    programs = [part.stop_program - part.first_program for part in plan.parts]
    at_once = 8 * multiprocessors
    assert programs[0] >= at_once, plan
    assert name == "band of one head" or set(programs) == {at_once}  # whose other half costs nothing
    assert plan.layout.is_band == ("band" in name) and (len(plan.parts) == 1) == (name == "everything")


@pytest.mark.parametrize(("num_keys", "is_whole"), [(256, True), (320, True), (336, False)])
def test_the_rest_of_a_head_goes_with_a_wave(num_keys: int, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wave of 16 programs has 256 keys: of a head with up to a quarter more, all are stored at once."""
    monkeypatch.setattr(planning, "limit", lambda _, wave: wave)
    inputs = make_inputs(1, 3, 40, num_keys, 8, num_rows=None, dtype=torch.float16, seed=1)
    plan = planned(inputs, {}, TILES["twice"], 2)
    assert plan.has_whole_heads == is_whole and len(plan.parts) == (3 if is_whole else 6), plan


def total_cost(count: int, size: int, programs: int, multiprocessors: int, at_once: int) -> int:
    """What all parts cost: a start for each wave, and as much as a multiprocessor has programs in it."""
    cost = 0
    for first in range(0, count, size):
        left = min(size, count - first) * programs
        while left > 0:
            cost += planning.START_COST + cdiv(min(left, multiprocessors * at_once), multiprocessors)
            left -= multiprocessors * at_once
    return cost


@pytest.mark.parametrize("seed", range(60))
def test_the_size_of_parts_costs_least(seed: int) -> None:
    """Of sizes that cost the same the one of fewest parts, and then the smallest."""
    choose = random.Random(seed)
    count, programs = choose.choice((1, 2, 7, 16, 24, 64, 150)), choose.choice((1, 1, 2, 8, 33, 128))
    most, multiprocessors, at_once = choose.randint(1, count), choose.choice((1, 2, 7, 132)), choose.randint(1, 4)
    found = planning._part_size(count, most, programs, multiprocessors, at_once)
    costs = {size: total_cost(count, size, programs, multiprocessors, at_once) for size in range(1, most + 1)}
    ranks = {size: (cost, cdiv(count, size), size) for size, cost in costs.items()}
    assert ranks[found] == min(ranks.values())


def test_usual_sizes_of_parts() -> None:
    """Equal parts, full waves; a part of few programs is no worse than a wave that it would make fuller."""
    for (count, most, programs, multiprocessors, at_once), expected in {
        (64, 64, 16, 132, 2): 64,  # everything
        (64, 40, 16, 1, 2): 32,  # two equal parts
        (16, 10, 33, 132, 1): 8,  # as many waves in all, and as many parts
        (100, 99, 132, 132, 1): 50,
        (12, 5, 66, 132, 2): 4,  # whole waves
    }.items():
        assert planning._part_size(count, most, programs, multiprocessors, at_once) == expected, (count, most, programs)


@pytest.mark.parametrize("seed", range(40))
def test_no_part_exceeds_the_limit(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program of the dkv kernel is in one part, which has room for what it stores. Parts are whole heads if one fits, else
    blocks of the keys of one key head; only a part of a single block may have more than the limit."""
    choose = random.Random(seed)
    key_heads, group = choose.choice((1, 2, 3)), choose.choice((1, 2))
    shape: dict[str, Any] = {"heads": key_heads * group, "key_heads": key_heads, "batch": choose.choice((1, 3))}
    shape |= {"rel_value": seed % 2 == 0, "rel_key": seed % 3 < 2 or seed % 2 == 1, "rel_bias": seed % 6 == 1}
    shape |= {"num_keys": choose.choice((5, 43, 300)), "dtype": choose.choice((torch.float16, torch.float32))}
    inputs, arguments = call_of(choose.choice(list(POSITIONS)), **shape)
    if seed % 4 == 3:
        inputs, arguments = named_call(choose.choice(list(PACKED_CALLS)), choose.choice(list(POSITIONS)))
    tiles, multiprocessors = TILES[choose.choice(list(TILES))], choose.choice((1, 3, 20))
    size, block_n = inputs.query.element_size(), tiles["dkv"].block_n
    whole = planned(inputs, arguments, tiles, multiprocessors, 2**40)
    (every,) = whole.parts
    assert whole.has_probs == (inputs.rel_value is not None) and every.first_program == 0
    of_unit = whole.pairs * size * whole.group // whole.items
    for limit in (0, 1000, of_unit - 1, of_unit, *(choose.randint(1, 2 * whole.pairs * size) for _ in range(8))):
        monkeypatch.setenv(VARIABLE, str(limit))
        plan = planned(inputs, arguments, tiles, multiprocessors)
        assert (plan.has_probs, plan.rows, plan.blocks) == (whole.has_probs, whole.rows, whole.blocks)
        assert [program for part in plan.parts for program in range(*part)] == list(range(every.stop_program))
        lengths = [part.stop_program - part.first_program for part in plan.parts]
        if limit >= of_unit:
            assert all(length % plan.blocks == 0 for length in lengths)
            assert plan.columns == whole.columns and max(map(plan.items_of, plan.parts)) == plan.items
        else:
            assert plan.items == plan.group and plan.columns == max(lengths) * block_n and not plan.layout.is_band
            assert all(part.first_program // plan.blocks == (part.stop_program - 1) // plan.blocks for part in plan.parts)
        assert plan.pairs * size <= limit or set(lengths) == {1}


# Memory that there is not.


class Memory:
    """So many bytes for workspaces: new_empty of planning.py raises OutOfMemoryError if what is there takes more than that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.used = room, 0
        self.new_empty = torch.Tensor.new_empty
        monkeypatch.setattr(torch.Tensor, "new_empty", lambda tensor, *sizes, **options: self.create(tensor, *sizes, **options))

    def create(self, tensor: torch.Tensor, *sizes: Any, **options: Any) -> torch.Tensor:
        is_workspace = sys._getframe(2).f_globals["__name__"] == planning.__name__
        count = math.prod(*sizes) * tensor.element_size() if is_workspace else 0
        if self.used + count > self.room:
            raise torch.OutOfMemoryError(f"tried to allocate {count} bytes")
        created = self.new_empty(tensor, *sizes, **options)
        if created.is_floating_point():
            created.fill_(math.nan)
        self.used += count
        weakref.finalize(created, self.free, count)
        return created

    def free(self, count: int) -> None:
        self.used -= count


NO_MEMORY = r"no memory for a workspace of \d+ bytes; a smaller one is used, .* TRITON_RELATTN_WORKSPACE limits it"


@pytest.mark.parametrize(
    ("name", "kind", "share", "steps", "limit"),
    [
        ("every_table", "clamp", 0.9, 1, "heads"),
        ("bias_alone", "zero", 0.4, 2, "keys"),
        ("rel_value", "full", 0.2, 2, "block"),
        ("packed_offsets", "clamp", 0.3, 2, "heads"),
    ],
)
def test_with_less_memory_the_workspace_is_smaller(
    name: str, kind: str, share: float, steps: int, limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has half of the bytes, again and again, until there is room; with a warning each time. All gradients are right."""
    inputs, arguments = named_call(name, kind)
    size = inputs.query.element_size()
    whole = planned(inputs, arguments, TILES["square"])
    memory = Memory(monkeypatch, int(share * whole.pairs * size))
    plans.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_call(inputs, arguments, TILES["square"])
    texts = [str(each.message) for each in caught if each.category is RuntimeWarning]
    assert len(texts) == steps and all(re.match(NO_MEMORY, text) for text in texts), texts
    sizes = [plan.pairs * size for plan in plans[::2] if plan is not None]
    assert [re.findall(r"\d+", text)[0] for text in texts] == [str(each) for each in sizes[:-1]]
    assert all(after <= before // 2 for before, after in itertools.pairwise(sizes)) and sizes[-1] <= memory.room
    check_parts(plans[-1], limit)


def test_with_too_little_memory_for_both_the_first_is_freed(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """dS found room and P did not: half of both must fit where dS alone was."""
    inputs, arguments = named_call("rel_value", "zero")
    whole = planned(inputs, arguments, TILES["twice"])
    memory = Memory(monkeypatch, int(0.6 * whole.pairs * 4))
    with pytest.warns(RuntimeWarning, match=NO_MEMORY) as caught:
        check_call(inputs, arguments, TILES["twice"])
    assert len(caught) == 1 and memory.used == 0
    check_parts(plans[-1], "heads")


@pytest.mark.parametrize("limit", ["", "0"])
def test_without_memory_for_a_block_of_keys(limit: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says how much is needed, and torch's own; the warnings before it come only if anything else was tried."""
    inputs, arguments = named_call("rel_value_per_head", "clamp")
    least = planned(inputs, arguments, TILES["twice"], most_bytes=0)
    size = least.pairs * 4
    assert size == 2 * 37 * 16 * 2 * 4  # two heads that share their keys, of dS and of P
    memory = Memory(monkeypatch, size - 1)
    monkeypatch.setenv(VARIABLE, limit)
    text = f"the backward needs a workspace of {size} bytes at least, for 37 queries and one block of keys; tried to allocate "
    with warnings.catch_warnings(record=True) as caught, pytest.raises(torch.OutOfMemoryError, match=text) as raised:
        warnings.simplefilter("always")
        results_of(inputs, arguments, TILES["twice"])
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert bool(caught) == (limit == "") and all(re.match(NO_MEMORY, str(each.message)) for each in caught)
    del raised  # with its frames
    memory.room = size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_call(inputs, arguments, TILES["twice"])
    check_parts(plans[-1], "block")


def test_other_errors_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where memory is short the workspace is made smaller."""
    inputs, arguments = named_call("plain", "clamp")
    memory = Memory(monkeypatch, 2**40)

    def fail(*_: Any, **__: Any) -> torch.Tensor:
        if sys._getframe(2).f_globals["__name__"] == planning.__name__:
            raise RuntimeError("something else")
        return memory.new_empty(*_, **__).fill_(math.nan)

    monkeypatch.setattr(memory, "create", fail)
    with pytest.raises(RuntimeError, match="something else"), warnings.catch_warnings():
        warnings.simplefilter("error")
        results_of(inputs, arguments, TILES["twice"])

"""The table that meets the keys, rel_p2c, in the kernels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from tests.expected import assert_table_gradient, exact_results, table_gradient_budget, visible_pairs
from tests.interpreter.guard import Launch
from tests.interpreter.launch import OTHER, SMALL, all_gradients, check_every_term, run_backward, tile
from tests.samples import with_different_strides
from tests.tolerance import assert_bit_equal, within
from triton_relattn import RelativePositions
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.workspace import planning
from triton_relattn.kernels.workspace.table_sums import TableSums
from triton_relattn.testing import Inputs, make_inputs

REGISTERS = {
    "forward": TileConfig(32, 16, 2, 1, "scores", "registers"),
    "dkv": TileConfig(32, 32, 2, 1, "scores", "registers"),
    "dtable": tile(16, 16),
    "dq": tile(32, 32),
    "dp2c": tile(32, 32),
}
TILES = (SMALL, OTHER, REGISTERS, None)
WORKSPACES = ("0", "4000", "20000", "")
"""Limits in bytes: a block of keys of one head at a time, some keys, some heads, the usual one."""


def p2c_inputs(sizes: tuple[int, int, int, int] = (2, 2, 37, 41), num_rows: int = 101, **others: Any) -> Inputs:
    given: dict[str, Any] = {"rel_p2c": True, "dtype": torch.float32, "seed": 3, **others}
    return make_inputs(*sizes, 16, 12, num_rows=num_rows, **given)


FAR: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "both sides": ({}, {}),
    "shared keys": ({"sizes": (1, 4, 150, 160), "key_heads": 2}, {"enable_gqa": True, "rel_scale": 0.7}),
    "window": ({"sizes": (1, 2, 150, 160), "per_head": True}, {"window_size": (120, 90)}),
    "causal": ({"rel_key": False}, {"is_causal": True, "query_offset": 9}),
    "values and bias": ({"sizes": (1, 1, 150, 160), "rel_value": True, "rel_bias": True, "per_head": True}, {}),
    "lengths": ({"sizes": (2, 1, 90, 100)}, {"key_lengths": torch.tensor([100, 61]), "query_offset": torch.tensor([0, -70])}),
    "dropout": ({"rel_bias": True}, {"dropout_p": 0.2, "softcap": 4.0}),
    "own query": ({"rel_width": 8}, {"query_offset": -80, "rel_scale": -0.5}),
}
"""Inputs and arguments of calls with far tiles, past, future or both."""
FAR_RUNS = [
    (name, outside, number % 3, "0" if number // 2 % 2 != number % 2 else "")
    for number, (name, outside) in enumerate((name, outside) for name in FAR for outside in ("clamp", "zero"))
]


def far_call(name: str, outside: Any, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    positions = RelativePositions(-3, 4, outside)
    options, arguments = FAR[name]
    return p2c_inputs(**{"sizes": (1, 1, 90, 100), "num_rows": positions.num_rows, **options, **others}), {
        "positions": positions,
        **arguments,
    }


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "outside", "tiles", "limit"), FAR_RUNS)
def test_far_tiles(name: str, outside: Any, tiles: int, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a bounded table: one number for each key, and sums of dS for each key."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs, arguments = far_call(name, outside)
    sums, original = list[Any](), TableSums.add_up

    def add_up(self: TableSums, *of_far: Any) -> None:
        sums.append(of_far[-1])
        original(self, *of_far)

    monkeypatch.setattr(TableSums, "add_up", add_up)
    check_every_term(inputs, TILES[tiles], **arguments)
    assert outside == "zero" or any(each.any() for each in sums), "no pair is far from the table in these tiles"


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["0", ""])
def test_gradient_of_far_keys_in_float16(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As good as dS rounded once and summed exactly, though nearly all pairs have an end row."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs, arguments = far_call("window", "clamp", dtype=torch.float16, sharp=True)
    assert_table_gradient(
        "d_rel_p2c", all_gradients(inputs, REGISTERS, **arguments)["d_rel_p2c"], inputs, table="rel_p2c", **arguments
    )


@pytest.mark.thorough
@pytest.mark.parametrize("limit", ["0", "6000", ""])
def test_nan_of_an_end_that_no_pair_reaches(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the future with a causal mask, and keys that are padding or before the window, may hold NaN."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs, _ = far_call("both sides", "clamp")
    arguments: dict[str, Any] = {"window_size": (40, 0), "query_offset": 50, "key_lengths": torch.tensor([90])}
    arguments["positions"] = RelativePositions(-3, 4)
    spoilt: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in inputs._asdict().items()}
    spoilt["rel_p2c"][4:] = spoilt["rel_key"][4:] = math.nan
    spoilt["key"][:, :, :10] = spoilt["key"][:, :, 90:] = math.nan
    results = all_gradients(with_different_strides(Inputs(**spoilt)), SMALL, **arguments)
    assert_bit_equal(results, all_gradients(inputs, SMALL, **arguments))
    assert results["d_rel_p2c"][0].any() and not results["d_rel_p2c"][4:].any()


@pytest.mark.thorough
@pytest.mark.parametrize("outside", ["full", "clamp", "zero"])
@pytest.mark.parametrize("sharp", [False, True])
def test_table_gradient_in_float16(outside: Any, sharp: bool) -> None:
    """As good as dS rounded once and summed exactly, also of the end rows of a clamped table."""
    positions = RelativePositions(-50, 50) if outside == "full" else RelativePositions(-4, 6, outside)
    inputs = p2c_inputs((1, 2, 50, 45), positions.num_rows, dtype=torch.float16, sharp=sharp, per_head=sharp)
    arguments: dict[str, Any] = {"positions": positions, "query_offset": 5, "rel_scale": 0.4 if sharp else None}
    check_every_term(inputs, SMALL, **arguments)


def test_sums_of_end_rows_are_float32() -> None:
    """Nearly all pairs have an end of the table, and their sums over keys may be large."""
    inputs = make_inputs(1, 1, 16, 400, 16, num_rows=3, rel_p2c=True, rel_key=False, dtype=torch.float16, seed=1)
    inputs = inputs._replace(key=inputs.key.abs() + 1, d_out=inputs.d_out * 8)
    golden = exact_results(inputs)["d_rel_p2c"]
    result = run_backward(inputs, SMALL, ("d_rel_p2c",))["d_rel_p2c"]
    assert result is not None and result.dtype == torch.float16
    budgeted, budget = table_gradient_budget(inputs, table="rel_p2c")
    assert torch.equal(budgeted, golden)
    within("d_rel_p2c", (result.double() - golden).abs(), budget)


UNSEEN: dict[str, tuple[dict[str, Any], slice]] = {
    # arguments, and the table rows (of 101 from -50 on) that some of 37 queries and 41 keys has
    "lengths": ({"key_lengths": torch.tensor([7])}, slice(50 - 36, 50 + 7)),
    "causal_offset": ({"is_causal": True, "query_offset": -20}, slice(50 - 16, 51)),
    "window": ({"window_size": (2, 1), "query_offset": 9}, slice(48, 52)),
    "window_left": ({"window_size": (2, -1), "query_offset": 9, "key_lengths": torch.tensor([30])}, slice(48, 50 + 21)),
    "window_right": ({"window_size": (-1, 1), "query_offset": -9}, slice(50 - 27, 52)),
    "window_and_causal": ({"window_size": (3, 7), "is_causal": True, "query_offset": 9}, slice(47, 51)),
    "offsets": ({"window_size": (2, 1), "query_offset": torch.tensor([12])}, slice(48, 52)),
}


@pytest.mark.parametrize("limit", WORKSPACES[::3])
@pytest.mark.parametrize("case", UNSEEN)
def test_nan_that_no_query_sees(case: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that no visible pair has, keys and values that no query sees, and the storage around them may hold NaN."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    hiding, seen = UNSEEN[case]
    arguments = {**hiding, "positions": RelativePositions(-50, 50)}
    inputs = p2c_inputs((1, 1, 37, 41))
    unseen_keys = ~visible_pairs(inputs, **arguments).any(2)[0, 0]
    spoilt: dict[str, Any] = {name: None if tensor is None else tensor.clone() for name, tensor in inputs._asdict().items()}
    for name in ("rel_key", "rel_p2c"):
        spoilt[name][: seen.start] = spoilt[name][seen.stop :] = math.nan
    spoilt["key"][:, :, unseen_keys] = spoilt["value"][:, :, unseen_keys] = math.nan
    results = all_gradients(with_different_strides(Inputs(**spoilt)), SMALL, **arguments)
    assert_bit_equal(results, all_gradients(inputs, SMALL, **arguments))
    assert results["d_rel_p2c"][seen].any() and not results["d_rel_p2c"][: seen.start].any()
    assert not results["d_rel_p2c"][seen.stop :].any() and not results["d_key"][:, :, unseen_keys].any()


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_nan_that_only_an_empty_sequence_would_reach(packed: bool) -> None:
    """A sequence that has no keys, or packed one without queries, reaches no row, whatever its offset. Its keys may be NaN."""
    inputs = p2c_inputs((2, 1, 40, 40), num_rows=21, rel_key=False)
    arguments: dict[str, Any] = {"positions": RelativePositions(-10, 10), "query_offset": torch.tensor([60, -60])}
    if packed:
        lengths = {"q": (0, 40), "k": (40, 40)}
        rows = {name: getattr(inputs, name).transpose(1, 2).flatten(0, 1) for name in ("query", "key", "value")}
        rows["query"] = rows["query"][40:]
        inputs = inputs._replace(**rows, d_out=inputs.d_out[1:], d_lse=inputs.d_lse[1:])
        arguments |= {f"cu_seqlens_{which}": torch.tensor([0, *itertools.accumulate(each)]) for which, each in lengths.items()}
        arguments |= {"is_packed": True, "max_seqlen_q": 40, "max_seqlen_k": 40}
    else:
        arguments["key_lengths"] = torch.tensor([0, 40])
    assert inputs.rel_p2c is not None
    spoilt = inputs.rel_p2c.clone()
    spoilt[:-1] = math.nan  # all keys of the other sequence are in the far future
    key, value = inputs.key.clone(), inputs.value.clone()
    for keys in (key, value):
        keys[: 40 if packed else 1] = math.nan
    with_nan = inputs._replace(key=key, value=value, rel_p2c=spoilt)
    results, expected = (all_gradients(each, SMALL, **arguments) for each in (with_nan, inputs))
    assert_bit_equal(results, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("limit", WORKSPACES[::3])
def test_nan_in_one_query_stays_there(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradients of the other heads are bit-equal, also of those that come later in the same workspace."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs = p2c_inputs((1, 2, 37, 41), per_head=True)
    query = inputs.query.clone()
    query[0, 0, 30] = math.nan
    results, expected = (all_gradients(each, SMALL) for each in (inputs._replace(query=query), inputs))
    assert results["d_rel_p2c"][0].isnan().any() and results["d_key"][0, 0].isnan().any()
    assert torch.equal(results["d_rel_p2c"][1], expected["d_rel_p2c"][1])
    assert torch.equal(results["d_key"][0, 1], expected["d_key"][0, 1])


@pytest.mark.thorough
@pytest.mark.parametrize("limit", WORKSPACES[::3])
@pytest.mark.parametrize("wanted", ["d_rel_p2c", "d_key", "d_query", "d_rel_key"])
@pytest.mark.parametrize("num_rows", [101, 7])
def test_one_gradient_alone(wanted: str, limit: str, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same bits as with the others."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs = p2c_inputs(num_rows=num_rows)
    alone, expected = (
        run_backward(inputs, SMALL, names) for names in ((wanted,), ("d_rel_p2c", "d_key", "d_query", "d_rel_key"))
    )
    for name, result in alone.items():
        if name.startswith("d_"):
            assert (result is None) == (name != wanted)
    assert torch.equal(alone[wanted], expected[wanted])  # type: ignore[arg-type]


@pytest.mark.parametrize("limit", WORKSPACES[:3:2])
@pytest.mark.parametrize("per_head", [False, True])
def test_what_is_accessed(per_head: bool, limit: str, guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """No access beside the tensors, and no number that another program has written. One workspace serves both tables."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    all_gradients(p2c_inputs((1, 2, 20, 33), 11, per_head=per_head), SMALL, window_size=(-1, 9))
    of_tables = {"far_keys_kernel", "dtable_kernel", "dp2c_kernel"}
    kernels = {"forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel"}
    assert {launch.kernel for launch in guarded_kernels} == kernels | of_tables

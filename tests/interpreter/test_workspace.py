"""The gradient of a table as a product of the gradients of scores that the dkv kernel leaves in a workspace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cases import random_case
from tests.interpreter.guard import Launch, programs_in_order
from tests.interpreter.launch import GRADIENTS, all_gradients, check_backward, check_every_term, resolve, run_backward
from triton_relattn import RelativePositions
from triton_relattn.kernels import configs, workspace
from triton_relattn.kernels.arguments import Call
from triton_relattn.kernels.configs import TileConfig
from triton_relattn.kernels.workspace import VARIABLE, Plan
from triton_relattn.testing import Inputs, assert_gradients_close_fp32, make_inputs

POSITIONS = {
    "full": RelativePositions(-59, 59),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}
SEVERAL_HEADS = 20_000
"""Bytes for some of the heads of the calls below at a time."""
SOME_KEYS = 10_000
"""Bytes for a head's first keys, then for the next ones."""


def tile(block_m: int, block_n: int, **others: Any) -> TileConfig:
    return TileConfig(block_m, block_n, others.pop("num_warps", 1), 1, **others)


IN_REGISTERS: dict[str, Any] = {"rotation": "registers"}
TILES = {
    "twice": {"dq": tile(32, 16, carry="both"), "dkv": tile(32, 16), "dtable_words": tile(32, 16), "dp2c_words": tile(16, 16)},
    "square": {"dq": tile(32, 32, carry=None), "dkv": tile(16, 16), "dtable_words": tile(32, 32), "dp2c_words": tile(32, 32)},
    "registers": {
        "dq": tile(16, 16, carry="both"),
        "dkv": tile(32, 32, **IN_REGISTERS),
        "dtable_words": tile(16, 16),
        "dp2c_words": tile(32, 16),
    },
    "long": {
        "dq": tile(16, 16),
        "dkv": tile(32, 16, num_warps=2, **IN_REGISTERS),
        "dtable_words": tile(64, 32),
        "dp2c_words": tile(64, 32),
    },
}


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """A workspace of any size is used; the list gets what each call plans."""
    monkeypatch.delenv(VARIABLE)
    made: list[Plan | None] = []
    make = workspace.plan

    def plan(*call: Any) -> Plan | None:
        made.append(make(*call))
        return made[-1]

    monkeypatch.setattr(workspace, "plan", plan)
    return made


def table_gradients(inputs: Inputs, *others: Any, **arguments: Any) -> dict[str, torch.Tensor]:
    results = all_gradients(inputs, *others, **arguments)
    return {name: results[name] for name in ("d_rel_key", "d_rel_bias") if name in results}


def call_of(kind: str, **others: Any) -> tuple[Inputs, dict[str, Any]]:
    """Two batch entries, two heads that share their keys, odd lengths."""
    positions = POSITIONS[kind]
    options: dict[str, Any] = {"batch": 2, "heads": 2, "key_heads": 1, "num_queries": 37, "num_keys": 43}
    options |= {"width": 8, "value_width": 12, "num_rows": positions.num_rows, "dtype": torch.float32, "seed": 5, **others}
    return make_inputs(**options), {"positions": positions, "enable_gqa": True}


# Everything that a call may have.

CALLS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True, "query_offset": 6}),
    "per_head": ({"heads": 4, "key_heads": 2, "per_head": True, "rel_bias": True}, {}),
    "rel_query": ({"rel_width": 24, "rel_bias": True}, {"rel_scale": -0.4}),
    "narrow_rel_query": ({"rel_width": 3, "per_head": True}, {"is_causal": True}),
    "bias_alone": ({"rel_key": False, "rel_bias": True}, {"key_lengths": torch.tensor([43, 17])}),
    "lengths": ({"rel_bias": True}, {"key_lengths": torch.tensor([0, 20]), "query_offset": -9}),
    "window": ({}, {"window_size": (11, 5), "query_offset": 3}),
    "window_past": ({"per_head": True}, {"window_size": (7, -1)}),
    "bool_mask": ({}, {"attn_mask": torch.arange(43) % 3 != torch.arange(37)[:, None] % 4}),
    "float_mask": ({"rel_bias": True}, {"attn_mask": torch.randn(2, 1, 43, generator=torch.Generator().manual_seed(0))}),
    "dropout": ({"rel_bias": True}, {"dropout_p": 0.3}),
    "softcap": ({"rel_width": 8}, {"softcap": 3.0, "exact_query_grad": True}),
    "negative_scale": ({}, {"scale": -0.3}),
    "p2c": ({"rel_p2c": True}, {"key_lengths": torch.tensor([43, 17]), "query_offset": -9}),
    "p2c_alone": ({"rel_p2c": True, "rel_key": False, "per_head": True}, {"is_causal": True, "query_offset": 6}),
    "p2c_window": ({"rel_p2c": True, "rel_bias": True}, {"window_size": (11, 5), "rel_scale": 0.3}),
    "p2c_per_head": ({"heads": 4, "key_heads": 2, "per_head": True, "rel_p2c": True}, {"dropout_p": 0.3, "softcap": 3.0}),
}
RUNS = [
    pytest.param(
        *(name, kind, list(TILES)[number // 2 % 4], (None, SEVERAL_HEADS, SOME_KEYS)[number // 3 % 3]),
        marks=() if number % 2 else pytest.mark.slow,
    )
    for number, (name, kind) in enumerate((name, kind) for name in CALLS for kind in POSITIONS)
]


@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(("name", "kind", "tiles", "limit"), RUNS)
def test_calls(
    name: str, kind: str, tiles: str, limit: int | None, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All results obey the error rules; the tables' gradients are those of the dtable kernel, but for how they are summed."""
    inputs, arguments = call_of(kind, **CALLS[name][0])
    arguments |= CALLS[name][1]
    if limit is not None:
        monkeypatch.setenv(VARIABLE, str(limit))
    results = check_every_term(inputs, TILES[tiles], **arguments)
    (plan,) = plans
    assert plan is not None
    assert len(plan.parts) > 1 or limit is None
    monkeypatch.setenv(VARIABLE, "0")
    expected = all_gradients(inputs, TILES[tiles], **arguments)
    assert plans[1] is None
    for each, gradient in expected.items():
        of_table = each in ("d_rel_key", "d_rel_bias", "d_rel_p2c")
        if of_table or (kind == "clamp" and each in ("d_key", "d_value")):  # near tiles come after far ones
            assert_gradients_close_fp32(each, results[each], gradient, [expected[name] for name in GRADIENTS if name in expected])
        else:
            assert torch.equal(results[each], gradient), each


SHORT: dict[str, Any] = {
    "widths": (8, 16, 20),
    "value_widths": (8, 33),
    "rel_widths": (3, 24),
    "lengths": (1, 2, 15, 16, 17, 31, 33),
    "uneven_lengths": ((1, 40), (40, 1), (3, 35)),
}


@pytest.mark.parametrize("seed", [*range(24), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(24, 200))])
def test_random_combination(seed: int, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the dtable kernel takes; a fifth in float16, most in several parts."""
    inputs, arguments = random_case(seed, dtype=torch.float16 if seed % 5 == 4 else torch.float32, **SHORT)
    inputs = inputs._replace(rel_value=None)
    if inputs.rel_key is None and inputs.rel_bias is None:
        pytest.skip("there is no table for the scores")
    if isinstance(arguments.get("query_offset"), torch.Tensor):
        arguments["query_offset"] = 3
    if seed % 3:
        monkeypatch.setenv(VARIABLE, str((4_000, 20_000)[seed % 2]))
    check_every_term(inputs, (*TILES.values(), None)[seed % 5], **arguments)
    assert len(plans) == 1


BANDS: dict[str, tuple[RelativePositions, tuple[int, int], dict[str, Any]]] = {
    # table, queries and keys, arguments
    "clamp": (RelativePositions(-4, 6), (40, 260), {"query_offset": 90}),
    "clamp_causal": (RelativePositions(-6, 1), (35, 250), {"query_offset": 215, "is_causal": True}),
    "clamp_beside": (RelativePositions(40, 45), (70, 300), {"query_offset": -20}),
    "zero": (RelativePositions(-4, 6, "zero"), (150, 140), {}),
    "zero_past": (RelativePositions(-9, -3, "zero"), (141, 130), {"query_offset": 7}),
    "window": (RelativePositions(-300, 300), (130, 150), {"window_size": (9, 3), "query_offset": -5}),
    "window_of_clamped": (RelativePositions(-4, 6), (131, 260), {"window_size": (20, 30)}),
    "p2c_window": (RelativePositions(-4, 6), (131, 260), {"window_size": (20, 30), "query_offset": 60}),
}


@pytest.mark.thorough
@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(
    ("name", "tiles"),
    [
        (name, tiles)
        for name in BANDS
        for tiles in ("registers", "long", "square")
        if tiles != "square" or "clamp" in name or "p2c" in name
    ],
)
def test_bands(name: str, tiles: str, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace holds a band instead of whole rows if the table or the window is short compared with the keys."""
    positions, lengths, arguments = BANDS[name]
    inputs = make_inputs(
        1, 2, *lengths, 8, num_rows=positions.num_rows, rel_bias=True, rel_p2c="p2c" in name, dtype=torch.float32, seed=2
    )
    if tiles == "long":
        columns = 256 if "p2c" in name else 240 if "clamp" in name else 100
        monkeypatch.setenv(VARIABLE, str(4 * lengths[0] * columns))  # one head at a time
    check_every_term(inputs, TILES[tiles], positions=positions, **arguments)
    (plan,) = plans
    assert plan is not None and plan.skew > 0 and plan.columns < lengths[1], plan
    assert len(plan.parts) == 1 + (tiles == "long")


@pytest.mark.parametrize("kind", POSITIONS)
def test_sharp_attention_in_float16(kind: str, plans: list[Plan | None]) -> None:
    """The gradients are as good as gradients of scores that are rounded once and summed exactly: delta is the exact one."""
    inputs, arguments = call_of(kind, sharp=True, rel_bias=True, dtype=torch.float16)
    check_every_term(inputs, TILES["registers"], **arguments, is_causal=kind == "clamp", query_offset=5)
    assert plans[0] is not None


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (1, 40), (40, 1), (16, 16), (17, 33), (31, 15), (64, 64)])
def test_lengths(num_queries: int, num_keys: int, plans: list[Plan | None]) -> None:
    """Every gradient within its rounding, element by element."""
    rows = num_queries + num_keys - 1
    inputs = make_inputs(1, 2, num_queries, num_keys, 16, num_rows=rows, dtype=torch.float32, seed=1)
    check_backward(inputs, TILES["square"], positions=RelativePositions(1 - num_queries, num_keys - 1))
    assert plans[0] is not None


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("clamp", None),
        ("full", SOME_KEYS),
        pytest.param("zero", SEVERAL_HEADS, marks=pytest.mark.slow),
    ],
)
def test_the_same_bits(kind: str, limit: int | None, plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Again, with programs in another order, and whichever gradients are wanted besides."""
    inputs, arguments = call_of(kind, rel_bias=True, per_head=True, dtype=torch.float16)
    if limit is not None:
        monkeypatch.setenv(VARIABLE, str(limit))
    expected = all_gradients(inputs, TILES["twice"], **arguments)
    with programs_in_order("shuffled", seed=3):
        results = all_gradients(inputs, TILES["twice"], **arguments)
    assert all(torch.equal(results[name], gradient) for name, gradient in expected.items())
    for wanted in (
        ("d_key", "d_value"),
        ("d_rel_key",),
        ("d_rel_bias",),
        ("d_rel_key", "d_key"),
        ("d_rel_bias", "d_value", "d_query"),
    ):
        some = run_backward(inputs, TILES["twice"], wanted, **arguments)
        for name in wanted:
            gradient = some[name]
            assert gradient is not None and torch.equal(gradient, expected[name]), (wanted, name)
    assert all(plan is not None for plan in plans)


@pytest.mark.parametrize("kind", ["full", "zero", "clamp"])
def test_what_nobody_sees(kind: str, plans: list[Plan | None]) -> None:
    """Rows that no visible pair has may be NaN, as may keys that are padding; their gradient is 0, and the others' as without."""
    inputs, arguments = call_of(kind, rel_bias=True)
    arguments |= {"window_size": (3, 2), "key_lengths": torch.tensor([30, 30])}
    assert inputs.rel_key is not None and inputs.rel_bias is not None
    rows = torch.arange(inputs.rel_key.shape[0]) + arguments["positions"].first
    unused = (rows < -3) | (rows > 2)
    clean = all_gradients(inputs, TILES["twice"], **arguments)
    rel_key, rel_bias, key, value = (each.clone() for each in (inputs.rel_key, inputs.rel_bias, inputs.key, inputs.value))
    rel_key[unused], rel_bias[unused] = torch.nan, torch.nan
    key[:, :, 30:], value[:, :, 30:] = torch.nan, torch.nan
    poisoned = inputs._replace(rel_key=rel_key, rel_bias=rel_bias, key=key, value=value)
    results = all_gradients(poisoned, TILES["twice"], **arguments)
    for name, gradient in clean.items():
        assert torch.equal(results[name], gradient), name
    assert not results["d_rel_key"][unused].any() and not results["d_rel_bias"][unused].any()
    assert plans[0] is not None


@pytest.mark.thorough
def test_programs_that_share_rows(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs have every splits-th block of queries each; more than there are blocks are not asked for."""
    inputs, arguments = call_of("clamp", rel_bias=True)
    monkeypatch.setattr(configs, "PROGRAMS_PER_MULTIPROCESSOR", 1000)
    check_every_term(inputs, TILES["registers"], **arguments)
    assert plans[0] is not None


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (1, 2, 0, 7), (1, 2, 5, 0), (1, 0, 5, 7)])
def test_nothing(sizes: tuple[int, int, int, int], plans: list[Plan | None]) -> None:
    inputs = make_inputs(*sizes, 8, num_rows=9, dtype=torch.float32, seed=1)
    results = all_gradients(inputs, TILES["twice"])
    assert not results["d_rel_key"].any() and not plans


# Whether there is a workspace, and which.


def planned(inputs: Inputs, multiprocessors: int = 1, tiles: dict[str, TileConfig] | None = None, **arguments: Any) -> Any:
    tensors, spec = resolve(inputs, **arguments)
    return workspace.plan(Call(tensors, spec), tensors, spec, tiles or TILES["twice"], multiprocessors)


def reason(inputs: Inputs, **arguments: Any) -> str | None:
    tensors, spec = resolve(inputs, **arguments)
    return workspace.why_not(Call(tensors, spec), tensors)


@pytest.mark.thorough
def test_calls_that_keep_the_table_kernel(plans: list[Plan | None], guarded_kernels: list[Launch]) -> None:
    inputs, arguments = call_of("clamp")
    assert reason(inputs, **arguments) is None
    offsets = torch.tensor([3, -5])
    others = {
        "a table for the values": (call_of("clamp", rel_value=True)[0], arguments),
        "relative positions of their own": (inputs, {**arguments, "query_offset": offsets}),
        "no table for the scores": (call_of("clamp", num_rows=None)[0], {"enable_gqa": True}),
    }
    for why, (others_inputs, others_arguments) in others.items():
        assert why in str(reason(others_inputs, **others_arguments))
        assert planned(others_inputs, **others_arguments) is None
    tensors, spec = resolve(inputs, **arguments)
    call = Call(tensors, spec)
    assert "packed" in str(workspace.why_not(call, tensors._replace(cu_seqlens_q=offsets)))
    call.arch = "gfx942"
    assert "AMD" in str(workspace.why_not(call, tensors))
    check_every_term(inputs, TILES["twice"], **{**arguments, "query_offset": offsets})
    names = [launch.kernel for launch in guarded_kernels]
    assert "dtable_kernel" in names and "dtable_words_kernel" not in names
    guarded_kernels.clear()
    all_gradients(inputs, TILES["twice"], **arguments)
    names = [launch.kernel for launch in guarded_kernels]
    assert "dtable_kernel" not in names and "dtable_words_kernel" in names


def test_limit(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; by default as much as query, key and value have, or 256 MiB. None: the dtable kernel."""
    inputs, arguments = call_of("full")
    tensors, _ = resolve(inputs, **arguments)
    assert workspace.limit(tensors) == 256 * 2**20
    large = torch.empty(1, device="meta").expand(2**26, 2)
    assert workspace.limit(tensors._replace(query=large)) == 4 * (2**27 + tensors.key.numel() + tensors.value.numel())
    for text, expected in (("12345", 12345), ("0", 0), ("", 256 * 2**20)):
        monkeypatch.setenv(VARIABLE, text)
        assert workspace.limit(tensors) == expected
    for text in ("-1", "1e9", "256 MiB"):
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(ValueError, match="must be a number of bytes"):
            workspace.limit(tensors)
    monkeypatch.setenv(VARIABLE, "0")
    assert planned(inputs, **arguments) is None


def test_no_part_exceeds_the_limit(plans: list[Plan | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of all heads are in one part; parts are as large as the limit allows, and none of few programs is worth it."""
    inputs, arguments = call_of("full", heads=4, key_heads=2)
    blocks, unit = 3, 2 * 37 * 48 * 4  # three blocks of 16 keys; two heads share them
    for limit, most, programs in (
        (10 * unit, 12, [12]),
        (3 * unit, 9, [6, 6]),
        (unit, 3, [3] * 4),
        (unit - 1, 2, [2, 1] * 4),
        (unit // 3, 1, [1] * 12),
    ):
        monkeypatch.setenv(VARIABLE, str(limit))
        plan = planned(inputs, **arguments)
        assert plan is not None and [part.programs for part in plan.parts] == programs
        assert plan.items * plan.rows * plan.columns * 4 <= limit
        assert [part.first_program for part in plan.parts] == [sum(programs[:number]) for number in range(len(programs))]
        covered = [
            (item, key) for part in plan.parts for item in range(*part[2:4]) for key in range(part.first_key, part.stop_key, 16)
        ]
        assert sorted(covered) == [(item, key) for item in range(8) for key in range(0, 16 * blocks, 16)]
        assert planned(inputs, most, **arguments) == plan
        assert len(programs) == 1 or planned(inputs, most + 1, **arguments) is None
    monkeypatch.setenv(VARIABLE, str(unit // 3 - 1))
    assert planned(inputs, **arguments) is None
    monkeypatch.setenv(VARIABLE, str(100 * unit))
    assert planned(inputs, 1000, **arguments) is not None  # all of it at once

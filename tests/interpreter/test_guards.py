"""Every feature under guards: accesses inside the views, one writer an address, any order of programs, NaN around all inputs.

The guards themselves are tried on kernels that are wrong.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tests.interpreter.guard import (
    GuardedMemory,
    Launch,
    Order,
    guarded,
    in_poisoned_storage,
    poison_of,
    programs_in_order,
    recorded,
)
from tests.interpreter.launch import GRADIENTS, resolved, tile
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn._core.residual import keeps_residual
from triton_relattn._core.spec import AttentionSpec, AttentionTensors
from triton_relattn.kernels.backward import backward
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.forward import forward
from triton_relattn.kernels.workspace import planning
from triton_relattn.testing import Inputs, make_inputs

SMALL = {"forward": tile(32, 16), "dq": tile(32, 16), "dkv": tile(16, 16), "dtable": tile(32, 16), "dp2c": tile(16, 16)}
POSITIONS = {
    "none": None,
    "full": RelativePositions(-60, 60),
    "clamp": RelativePositions(-4, 6),
    "zero": RelativePositions(-4, 6, "zero"),
}

ORDERS: tuple[Order, ...] = ("reversed", "shuffled")
ALL_TERMS: dict[str, Any] = {"rel_width": 12, "rel_value": True, "rel_bias": True, "per_head": True}
EVERYTHING: dict[str, Any] = {
    "window_size": (25, 20),
    "rel_scale": 0.4,
    "dropout_p": 0.2,
    "softcap": 9.0,
    "enable_gqa": True,
}
FLOAT_MASK = torch.randn(2, 1, 20, 27, generator=torch.Generator().manual_seed(0)).masked_fill(torch.arange(27) == 20, -torch.inf)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # kind of table in the normal run, options of make_inputs, arguments
    "plain": ("none", {}, {}),
    "causal": ("full", {"heads": 1, "num_queries": 37}, {"is_causal": True}),
    "window": ("clamp", {"num_keys": 40}, {"window_size": (9, 5)}),
    "window_past": ("zero", {}, {"window_size": (7, -1), "is_causal": True}),
    "bool_mask": ("zero", {}, {"attn_mask": torch.arange(27) % 3 != torch.arange(20)[:, None] % 4}),
    "float_mask": ("clamp", {"batch": 2, "heads": 1}, {"attn_mask": FLOAT_MASK}),
    "key_lengths": ("full", {"batch": 3, "heads": 1}, {"key_lengths": torch.tensor([0, 27, 18])}),
    "groups": ("none", {"heads": 4, "key_heads": 2}, {"enable_gqa": True}),
    "dropout": ("zero", {}, {"dropout_p": 0.4}),
    "rel_query": ("clamp", {"rel_width": 12}, {}),
    "rel_value": ("full", {"rel_value": True}, {}),
    "rel_bias": ("clamp", {"rel_bias": True, "rel_key": False}, {"scale": -0.3}),
    "softcap": ("none", {}, {"softcap": 5.0}),
    "query_offset": ("zero", {"rel_bias": True}, {"query_offset": -6, "is_causal": True}),
    "query_offsets": ("zero", {"batch": 2, "heads": 1, "rel_value": True}, {"query_offset": torch.tensor([3, -5])}),
    "rel_p2c": ("clamp", {"rel_p2c": True}, {"query_offset": 10}),
    "float16_causal": ("full", {"dtype": torch.float16, "num_queries": 45, "num_keys": 40}, {"is_causal": True}),
    "odd_widths": ("full", {"width": 5, "value_width": 3, "rel_width": 21}, {}),
    "float16": ("clamp", {"dtype": torch.float16}, {}),
    "ratio_of_scales": ("zero", {"dtype": torch.float16}, {"scale": 0.1, "rel_scale": 0.3}),
    "everything": (
        "clamp",
        {"batch": 2, "key_heads": 1, **ALL_TERMS},
        {
            **EVERYTHING,
            "attn_mask": FLOAT_MASK,
            "key_lengths": torch.tensor([25, 27]),
            "query_offset": torch.tensor([3, -5]),
        },
    ),
}
NEED_A_TABLE = {"rel_query", "rel_value", "rel_bias", "rel_p2c", "query_offset", "query_offsets"}
NEED_A_TABLE |= {"odd_widths", "ratio_of_scales", "everything", "packed_everything"}
PACKING: dict[str, Any] = {
    "cu_seqlens_q": torch.tensor([0, 0, 7, 25, 25, 30]),
    "cu_seqlens_k": torch.tensor([0, 5, 16, 36, 36, 36], dtype=torch.int32),
    "max_seqlen_q": 18,
    "max_seqlen_k": 21,
}
PACKED_CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "packed": ("none", {}, {}),
    "packed_causal": ("full", {"heads": 1, "rel_bias": True}, {"is_causal": True}),
    "packed_everything": (
        "zero",
        {"key_heads": 1, **ALL_TERMS},
        {**EVERYTHING, "query_offset": torch.tensor([4, 3, -2, 0, 20])},
    ),
}


def case_of(name: str, kind: str) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and arguments, of fused_relative_attention or fused_relative_attention_varlen."""
    positions = POSITIONS[kind]
    options: dict[str, Any] = {"batch": 1, "heads": 2, "num_queries": 20, "num_keys": 27, "width": 8, "value_width": 12}
    options |= {"num_rows": None if positions is None else positions.num_rows, "dtype": torch.float32, "seed": 3}
    if name in CASES:
        _, of_inputs, arguments = CASES[name]
        return make_inputs(**{**options, **of_inputs}), {**arguments, "positions": positions}
    _, of_inputs, arguments = PACKED_CASES[name]
    inputs = make_inputs(**{**options, "num_queries": 30, "num_keys": 36, **of_inputs})
    in_order = {name: getattr(inputs, name) for name in ("query", "key", "value", "d_out", "rel_query")}
    packed = {name: tensor[0].transpose(0, 1) for name, tensor in in_order.items() if tensor is not None}
    return inputs._replace(**packed, d_lse=inputs.d_lse[0]), {**arguments, **PACKING, "positions": positions}


def results_of(inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig] | None) -> dict[str, torch.Tensor]:
    """out, lse, softmax_stats, the residual and the gradients of all tensors that there are."""
    inputs, tensors, spec = resolved(inputs, arguments)
    keeps = keeps_residual(tensors)
    out, lse, softmax_stats, residual = forward(tensors, spec, (tiles or {}).get("forward"), keeps_residual=keeps)
    gradients = backward(inputs.d_out, inputs.d_lse, out, softmax_stats, tensors, spec, tiles=tiles, residual=residual)
    named = {"out": out, "lse": lse, "softmax_stats": softmax_stats, "residual": residual}
    named |= dict(zip(GRADIENTS, gradients, strict=True))
    return {name: result for name, result in named.items() if result is not None}


def check_guarded(
    inputs: Inputs, arguments: dict[str, Any], tiles: dict[str, TileConfig] | None, order: Order, seed: int
) -> tuple[list[Launch], dict[str, torch.Tensor]]:
    """Run the call guarded, its programs in another order, and with NaN around all inputs.

    It gives, bit for bit, the results of contiguous inputs without any guard. To the end rows of a clamped table torch adds what
    lies beyond, a product whose last bits depend on strides: they are close.
    """
    choose = random.Random(seed)
    poisoned = Inputs(*(None if tensor is None else in_poisoned_storage(tensor, choose) for tensor in inputs))  # type: ignore[arg-type]
    others = {
        name: in_poisoned_storage(value, choose) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    with guarded() as launches, programs_in_order(order, seed):
        results = results_of(poisoned, others, tiles)
    contiguous = Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))  # type: ignore[arg-type]
    expected = results_of(contiguous, arguments, tiles)
    assert results.keys() == expected.keys()
    _, tensors, spec = resolved(inputs, arguments)
    is_clamped = spec.coverage(tensors.query_offsets is None) == "clamp"
    for name, exact in expected.items():
        result = results[name]
        if is_clamped and name in ("d_rel_key", "d_rel_value", "d_rel_p2c"):
            assert_near(name, result, exact)
            result, exact = (each[..., 1:-1, :] for each in (result, exact))
        assert not exact.isnan().any() and torch.equal(result, exact), name
    return launches, results


def runs(cases: dict[str, tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    """Each case with its kind of table, and in slow tests with every other; the orders in turn."""
    return [
        pytest.param(name, kind, ORDERS[(index + (kind == of_case)) % 2], marks=() if kind == of_case else pytest.mark.slow)
        for index, (name, (of_case, _, _)) in enumerate(cases.items())
        for kind in POSITIONS
        if kind != "none" or name not in NEED_A_TABLE
    ]


def kernels_of(tensors: AttentionTensors, spec: AttentionSpec) -> list[str]:
    """The kernels that a call runs. What is from dS takes a launch, and what is from P."""
    has_rows, has_values = tensors.rel_key is not None or tensors.rel_bias is not None, tensors.rel_value is not None
    is_clamped, has_p2c = spec.coverage(tensors.query_offsets is None) == "clamp", tensors.rel_p2c is not None
    before = ["far_keys"] * (has_p2c and is_clamped)
    of_pairs = [*["dq"] * (1 + (has_values and is_clamped)), *["dtable"] * (has_rows + has_values), *["dp2c"] * has_p2c]
    return [*before, "forward", *before, "delta", "dkv", *of_pairs]


@pytest.mark.parametrize(("name", "kind", "order"), [*runs(CASES), *runs(PACKED_CASES)])
def test_guarded(name: str, kind: str, order: Order) -> None:
    """The forward and every kernel of the backward."""
    inputs, arguments = case_of(name, kind)
    launches, results = check_guarded(inputs, arguments, SMALL, order, seed=len(name))
    _, tensors, spec = resolved(inputs, arguments)
    assert [launch.kernel.removesuffix("_kernel") for launch in launches] == kernels_of(tensors, spec)
    assert all(launch.loads > 0 and launch.stores > 0 for launch in launches)
    assert all(results[name].isfinite().all() and results[name].any() for name in GRADIENTS if name in results)


@pytest.mark.parametrize("limit", ["0", "4000"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("rel_value", "full"),
        ("rel_p2c", "clamp"),
        ("packed_everything", "zero"),
        pytest.param("everything", "clamp", marks=pytest.mark.slow),
        pytest.param("float16_causal", "full", marks=pytest.mark.slow),
    ],
)
def test_guarded_parts(name: str, kind: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The workspace in parts: no program reads what it has not got from the part before."""
    monkeypatch.setenv(planning.VARIABLE, limit)
    inputs, arguments = case_of(name, kind)
    launches, _ = check_guarded(inputs, arguments, SMALL, ORDERS[len(name) % 2], seed=len(limit))
    assert [launch.kernel for launch in launches].count("dkv_kernel") > 1


# Kernels that are wrong.

LARGEST = torch.iinfo(torch.int32).max


@triton.jit
def copy_kernel(source, target, length, step, SHIFT: tl.constexpr, STRIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """target[i] = source[i * STRIDE + SHIFT], 16 of them a program, step after step."""
    offsets = tl.program_id(0) * step + tl.arange(0, 16)
    loaded = tl.load(source + offsets * STRIDE + SHIFT, mask=offsets < length)
    tl.store(target + offsets, loaded, mask=offsets < length)


@triton.jit
def descriptor_kernel(source, target, length, beyond):  # type: ignore[no-untyped-def]
    """The same by tensor descriptors, that of the target for some elements beyond."""
    start = tl.program_id(0) * 16
    loaded = tl.make_tensor_descriptor(source, [length], [1], [16]).load([start])
    tl.make_tensor_descriptor(target, [length + beyond], [1], [16]).store([start], loaded)


@triton.jit
def previous_kernel(values):  # type: ignore[no-untyped-def]
    """values[program + 1] = values[program] + 1."""
    program = tl.program_id(0)
    tl.store(values + program + 1, tl.load(values + program) + 1)


@triton.jit
def odd_kernel(values, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Do one of several things, KIND, that no kernel should do."""
    offsets = tl.arange(0, 16)
    if KIND == "add":
        tl.atomic_add(values + offsets, 1.0)
    if KIND == "swap":
        tl.atomic_cas(values.to(tl.pointer_type(tl.int32)), 0, 7)
    if KIND == "twice":
        tl.store(values + offsets // 2, 1.0)
    if KIND == "wide":
        tl.store((values + offsets).to(tl.pointer_type(tl.int64)), offsets.to(tl.int64))
    if KIND == "overflow":
        tl.store(values + offsets + offsets * 0x7FFF_FFFF * 0, 1.0)
    if KIND == "null":
        tl.store(values + offsets - values.to(tl.int64) // 4, 1.0)


def storage_with_view(length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros, and a view of length elements in the middle of them; aligned, as descriptors want it."""
    storage = torch.zeros(length + 128, dtype=dtype)
    return storage, storage[64 : 64 + length]


@pytest.mark.parametrize(
    ("step", "shift", "stride", "targets", "expected"),
    [
        (16, 0, 2, 50, None),
        (16, 2, 2, 50, "program 3: 1 loads outside all views, the first 8 bytes behind an element of source"),
        (16, -2, 2, 50, "program 0: 1 loads outside all views, the first 8 bytes before an element of source"),
        (16, 0, 1, 50, "program 0: 8 loads outside all views, the first 4 bytes behind an element of source"),
        (16, 0, 2, 47, "program 2: 1 stores outside all views, the first 4 bytes behind an element of target"),
        (15, 0, 2, 50, "program 1: stores where program 0 stores, at 1 addresses, the first of target"),
    ],
    ids=["right", "load_beyond", "load_before", "load_between", "store_beyond", "two_writers"],
)
def test_a_wrong_access_is_reported_and_not_done(step: int, shift: int, stride: int, targets: int, expected: str | None) -> None:
    source = torch.ones(104, 2)[2:52, 0]
    storage, target = storage_with_view(targets)
    with recorded() as launches:
        copy_kernel[(4,)](source, target, 50, step, SHIFT=shift, STRIDE=stride)
    (launch,) = launches
    assert launch.loads and launch.stores
    assert [f"copy_kernel, {expected}"] == launch.violations[:1] if expected else not launch.violations
    assert not storage[:64].any() and not storage[64 + targets :].any()
    assert target.isnan().any() == (expected is not None and "loads" in expected)


def test_integers_from_outside_are_large() -> None:
    source, target = torch.ones(49, dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
    with recorded():
        copy_kernel[(4,)](source, target, 50, 16, SHIFT=0, STRIDE=1)
    assert (target[:49] == 1).all() and target[49] == LARGEST


@pytest.mark.parametrize("beyond", [0, 5])
def test_descriptors_are_guarded(beyond: int) -> None:
    source = torch.ones(40)
    storage, target = storage_with_view(40)
    with recorded() as launches:
        descriptor_kernel[(3,)](source, target, 40, beyond)
    (launch,) = launches
    assert launch.loads == 40 and target.all() and storage.count_nonzero() == 40
    assert len(launch.violations) == (beyond > 0) and all("program 2: 5 stores outside" in each for each in launch.violations)


def test_a_program_that_reads_what_another_writes() -> None:
    """It is reported, by the one that comes second; and in another order the result is another."""
    values = torch.zeros(5)
    with recorded() as launches:
        previous_kernel[(4,)](values)
    assert values.tolist() == [0, 1, 2, 3, 4]
    violation = "previous_kernel, program 1: loads what program 0 stores, at 1 addresses, the first of values"
    assert len(launches[0].violations) == 3 and launches[0].violations[0] == violation
    values.zero_()
    with recorded() as launches, programs_in_order("reversed"):
        previous_kernel[(4,)](values)
    assert values.tolist() == [0, 1, 1, 1, 1]
    violation = "previous_kernel, program 2: stores what program 3 loads, at 1 addresses, the first of values"
    assert len(launches[0].violations) == 3 and launches[0].violations[0] == violation


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("add", "an atomic FADD"),
        ("swap", "an atomic compare-and-swap"),
        ("twice", "stores twice at once to an address, of values"),
        ("wide", "16 stores outside all views, the first 8 bytes wide, at an element of values, which has 4"),
        ("overflow", "an overflow of int32 in mul"),
        ("null", "16 stores outside all views, the first 4 bytes wide, at an element of null, which has 0"),
    ],
)
def test_what_no_kernel_should_do(kind: str, expected: str) -> None:
    values = torch.zeros(16)
    with recorded() as launches:
        odd_kernel[(1,)](values, KIND=kind)
    assert launches[0].violations == [f"odd_kernel, program 0: {expected}"]
    assert kind in ("twice", "overflow") or not values.any()


def test_the_report() -> None:
    """It names ten violations and counts the rest; launches without any are not in it."""
    source, target = torch.ones(20), torch.zeros(20)
    with pytest.raises(AssertionError) as error, guarded():
        copy_kernel[(2,)](source, target, 20, 16, SHIFT=0, STRIDE=1)
        copy_kernel[(16,)](source, target, 20, 0, SHIFT=4, STRIDE=1)
    *named, last = str(error.value).splitlines()
    assert len(named) == 10 and last == "and 5 more"
    assert (
        named[0] == "15 violations: copy_kernel, program 1: stores where program 0 stores, at 16 addresses, the first of target"
    )


def test_a_launch_is_stopped() -> None:
    """Else one that reads its length from the wrong place would not end."""
    values = torch.zeros(300)
    with pytest.raises(InterpreterError, match="stopped after too many violations"), recorded() as launches:
        previous_kernel[(299,)](values)
    assert len(launches[0].violations) == 100 and values[-1] == 0


def test_a_fixture_guards_a_test(guarded_kernels: list[Launch]) -> None:
    copy_kernel[(1,)](torch.ones(16), torch.zeros(16), 16, 16, SHIFT=0, STRIDE=1)
    assert [launch.kernel for launch in guarded_kernels] == ["copy_kernel"]


def test_no_access_is_left_out() -> None:
    """The interpreter touches memory by functions that the guard has, too, and by no others."""
    members = vars(interpreter._interpreter)
    others = {name for name, each in members.items() if isinstance(each, type) or name[:2] == "__" or name[:3] == "fma"}
    functions = {name for name, each in members.items() if callable(each)} - others
    assert functions == {"load", "store", "atomic_cas", "atomic_rmw"}
    assert all(hasattr(GuardedMemory, name) for name in ("load", "store", "atomic_cas", "atomic_rmw"))


@triton.jit
def place_kernel(order, counter):  # type: ignore[no-untyped-def]
    """order[counter++] = this program's number in a grid of (2, 3, 4)."""
    place = (tl.program_id(0) * 3 + tl.program_id(1)) * 4 + tl.program_id(2)
    count = tl.load(counter)
    tl.store(order + count, place)
    tl.store(counter, count + 1)


def test_orders() -> None:
    """Every program runs once, and where it says; a shuffled launch differs from the next."""

    def order_of_programs() -> list[int]:
        order, counter = torch.zeros(24, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        place_kernel[(2, 3, 4)](order, counter)
        return order.tolist()

    natural = list(range(24))
    assert order_of_programs() == natural
    with programs_in_order("reversed") as launches:
        assert order_of_programs() == natural[::-1] and launches == [natural[::-1]]
    with programs_in_order("shuffled") as launches:
        shuffled = [order_of_programs() for _ in range(2)]
    assert launches == shuffled and all(sorted(each) == natural for each in shuffled)
    assert len({tuple(natural), tuple(natural[::-1]), *map(tuple, shuffled)}) == 4
    assert order_of_programs() == natural


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(7,), (3, 1), (2, 3, 4, 5), (0, 4)])
def test_storage_is_poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Everything in it but the view's elements, on every side of each row, and the view has the numbers."""
    numbers = torch.arange(math.prod(shape)).view(shape).remainder(2).to(dtype)
    for seed in range(8):
        view = in_poisoned_storage(numbers, random.Random(seed))
        assert torch.equal(view, numbers) and (len(shape) > 1 or view.is_contiguous())
        storage = view.as_strided((view.untyped_storage().nbytes() // view.element_size(),), (1,), 0)
        inside = torch.zeros(storage.shape, dtype=torch.bool)
        inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
        assert inside.sum() == view.numel() and not inside[0] and not inside[-1]
        around = storage[~inside]
        assert (around.isnan() if dtype.is_floating_point else around == poison_of(dtype)).all()


def test_poison_reaches_the_result() -> None:
    """A kernel that reads one element too far gets poison, and so does its result, even without a guard."""
    source, target = in_poisoned_storage(torch.ones(16), random.Random(0)), torch.zeros(16)
    copy_kernel[(1,)](source, target, 16, 16, SHIFT=1, STRIDE=1)
    assert target[15].isnan() and target.isnan().sum() == 1

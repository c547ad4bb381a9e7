"""The kernels with every term and argument, guarded, with the workspace in one or many parts; equal bits; lack of memory."""

from __future__ import annotations

import itertools
import random
import re
import sys
import warnings
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.conftest import without_plans
from tests.interpreter.calls import (
    CALLS,
    LIMITS,
    PACKED_CALLS,
    POSITIONS,
    TILES,
    named_call,
    packed_call,
    padded_call,
    workspace_limit,
)
from tests.interpreter.guard import Launch, Order, guarded, in_poisoned_storage, programs_in_order
from tests.interpreter.launch import GRADIENTS, all_gradients, check_all, check_forward_backward
from tests.tolerance import assert_gradients_close_fp32, assert_near
from triton_relattn import RelativePositions, fused_relative_attention_varlen
from triton_relattn._core.spec import TABLES
from triton_relattn.kernels import plan, table_gradient
from triton_relattn.kernels.call import Common, Dropout, Scaling, Sequences
from triton_relattn.kernels.workspace.stored import table_share
from triton_relattn.testing import Inputs, make_inputs

VARIABLE = "TRITON_RELATTN_WORKSPACE"
ORDERS: tuple[Order, ...] = ("reversed", "shuffled")


@pytest.fixture(autouse=True)
def usual_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


# All calls, with all kinds of parts.


def runs() -> list[Any]:
    """Each call with each kind of table and of parts; one combination of each call is not slow. Two in five are in float16."""
    cases = []
    for number, name in enumerate([*CALLS, *PACKED_CALLS]):
        for (kind_number, kind), (limit_number, limit) in itertools.product(enumerate(POSITIONS), enumerate(LIMITS)):
            turn = number + number // 12 + kind_number + limit_number
            dtype = torch.float16 if turn % 5 < 2 and name != "packed_dropout" else torch.float32
            tiles = list(TILES)[(2 * (number // 12) + kind_number + limit_number) % 5]
            is_usual = kind_number == number % 3 and limit_number == number // 3 % 4
            marks = () if is_usual else pytest.mark.slow
            cases.append(pytest.param(name, kind, limit, tiles, dtype, marks=marks))
    return cases


@pytest.mark.parametrize(("name", "kind", "limit", "tiles", "dtype"), runs(), ids=str)
def test_calls(name: str, kind: str, limit: str, tiles: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """All results obey the error rules for any parts and order of programs, with NaN around all inputs and in uninitialised
    memory. No program accesses memory outside of tensors, or stores where another does.

    Results have the same bits as those of contiguous inputs in the usual order, except the end rows of a clamped table: to them
    torch adds a product whose last bits depend on strides.
    """
    inputs, arguments = named_call(name, kind, dtype=dtype)
    monkeypatch.setenv(VARIABLE, workspace_limit(limit, inputs, arguments, TILES[tiles]))
    choose = random.Random(len(name))
    poisoned = Inputs(*(None if tensor is None else in_poisoned_storage(tensor, choose) for tensor in inputs))  # type: ignore[arg-type]
    others = {key: in_poisoned_storage(value, choose) if torch.is_tensor(value) else value for key, value in arguments.items()}
    with guarded() as launches, programs_in_order(ORDERS[len(name) % 2], seed=3):
        results = all_gradients(poisoned, TILES[tiles], **others)
    has_parts = limit != "whole" and name != "no_table"  # for which nothing is stored
    assert (sum(launch.kernel == "dkv_kernel" for launch in launches) > 1) == has_parts
    busy = {launch.kernel for launch in launches if launch.loads and launch.stores}
    assert busy == {launch.kernel for launch in launches}  # a part of empty sequences stores nothing
    check_all(results, inputs, **arguments)
    contiguous = Inputs(*(None if tensor is None else tensor.contiguous() for tensor in inputs))  # type: ignore[arg-type]
    for result, exact in all_gradients(contiguous, TILES[tiles], **arguments).items():
        found = results[result]
        if kind == "clamp" and result in ("d_rel_key", "d_rel_value", "d_rel_p2c"):
            assert_near(result, found, exact)
            found, exact = (tensor[..., 1:-1, :] for tensor in (found, exact))
        assert torch.equal(found, exact), result


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("every_table", "clamp"),
        ("packed_offsets", "zero"),
        pytest.param("rel_value_per_head", "clamp", marks=pytest.mark.slow),
        pytest.param("p2c_per_head", "full", marks=pytest.mark.slow),
    ],
)
def test_parts_change_only_how_sums_are_added_up(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of tables, and of queries if a part has only some keys, are close; all other results have the same bits."""
    inputs, arguments = named_call(name, kind)
    whole = all_gradients(inputs, TILES["twice"], **arguments)
    gradients = [gradient for result, gradient in whole.items() if result.startswith("d_")]
    for limit in LIMITS[1:]:
        monkeypatch.setenv(VARIABLE, workspace_limit(limit, inputs, arguments, TILES["twice"]))
        results = all_gradients(inputs, TILES["twice"], **arguments)
        sums = TABLES if limit == "heads" else (*TABLES, "query", "rel_query")
        assert results.keys() == whole.keys()
        for result, expected in whole.items():
            if result.removeprefix("d_") in sums:
                assert_gradients_close_fp32(result, results[result], expected, gradients)
            else:
                assert torch.equal(results[result], expected), (limit, result)


# Windows and short tables, for which the workspace stores a band of keys.

BANDS: dict[str, tuple[RelativePositions, tuple[Any, Any], dict[str, Any], dict[str, Any]]] = {
    # positions, queries and keys (of each packed sequence), options of make_inputs, arguments
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
    "table": (RelativePositions(-4, 6), (131, 260), {"rel_width": 12}, {"query_offset": 60, "softcap": 3.0}),
    "table_causal": (RelativePositions(-19, -3), (150, 170), {"rel_value": True}, {"query_offset": 20, "is_causal": True}),
    "table_future": (RelativePositions(7, 9, "zero"), (150, 140), {"rel_value": True}, {"query_offset": 3, "dropout_p": 0.2}),
    "table_p2c": (RelativePositions(-4, 6), (131, 260), {"rel_p2c": True, "per_head": True}, {"query_offset": -10}),
    "table_packed": (
        *(RelativePositions(-4, 6, "zero"), ((9, 150, 5), (9, 150, 130)), {"rel_p2c": True}),
        {"query_offset": torch.tensor([0, 7, -2]), "is_causal": True},
    ),
}
BAND_RUNS = [
    (name, tiles, ("whole", "some keys")[(number + place) % 2])
    for number, name in enumerate(BANDS)
    for place, tiles in enumerate(("registers", "long", "square", "wide"))
    if tiles != "square" or "clamp" in name or "p2c" in name
]


@pytest.mark.thorough
@pytest.mark.usefixtures("guarded_kernels")
@pytest.mark.parametrize(("name", "tiles", "limit"), BAND_RUNS)
def test_bands(name: str, tiles: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and tables that are short compared with the keys, also with tiles that are wider, and with room for some keys
    only."""
    positions, lengths, options, arguments = BANDS[name]
    dtype = torch.float16 if name in ("full", "clamp", "zero_values") else torch.float32
    options = {"batch": 1, "key_heads": 2, "num_rows": positions.num_rows, "rel_bias": options.get("rel_key", True), **options}
    if "packed" in name:
        inputs, packing = packed_call("clamp", dict(zip("qk", lengths, strict=True)), **options)
        arguments = {**packing, **arguments}
    else:
        options |= {"num_queries": lengths[0], "num_keys": lengths[1], "dtype": dtype}
        inputs, _ = padded_call("clamp", **options)
        arguments = {**arguments, "positions": positions, "enable_gqa": True}
    if limit == "some keys":
        monkeypatch.setenv(VARIABLE, "0")
    check_forward_backward(inputs, TILES[tiles], **arguments)


def test_more_queries_than_keys_at_different_offsets() -> None:
    """A row of the table has more queries than a part has keys, at offsets that differ by sequence."""
    inputs = make_inputs(2, 1, 150, 60, 8, num_rows=401, dtype=torch.float32, seed=1)
    arguments = {"positions": RelativePositions(-200, 200), "query_offset": torch.tensor([90, -7])}
    check_forward_backward(inputs, TILES["registers"], **arguments)


@pytest.mark.thorough
@pytest.mark.parametrize(("per_head", "kind"), [(False, "clamp"), (True, "full")])
def test_programs_that_share_rows(per_head: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of programs may share a table's sum; some of them may have no pairs."""
    positions, found = POSITIONS[kind], []
    inputs = make_inputs(2, 2, 33, 30, 16, num_rows=positions.num_rows, per_head=per_head, dtype=torch.float32, seed=8)
    for splits in (1, 2, 5):
        monkeypatch.setattr(table_gradient, "table_splits", lambda *_, splits=splits: splits)
        without_plans(monkeypatch)
        found.append(check_forward_backward(inputs, TILES["twice"], positions=positions)["d_rel_key"])
    assert any(not torch.equal(other, found[0]) for other in found[1:])  # the number of programs changed


@triton.jit
def share_kernel(target, first, num_blocks, common, num_heads, PER_HEAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """target [programs, 4] = what table_share returns."""
    share = table_share(first, 16, num_blocks, common, num_heads, PER_HEAD)
    for index in tl.static_range(4):
        tl.store(target + 4 * tl.program_id(0) + index, share[index])


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("queries", "keys", "offset"), [(200, 200, 0), (90, 230, 140), (200, 60, -70)])
@pytest.mark.parametrize(("left", "right"), [(None, None), (None, 0), (20, 100)])
def test_order_of_the_programs_of_a_table(
    queries: int, keys: int, offset: int, left: int | None, right: int | None, per_head: bool
) -> None:
    """Each program of a table's gradient has a share of its own, and of those with work longer loops come first."""
    heads, splits = 3, 2
    first, last = -offset - queries + 1, keys - 1 - offset if right is None else right
    blocks = -(-(last - first + 1) // 16)
    target = torch.full((blocks * (heads if per_head else 1) * splits, 4), -1, dtype=torch.int32)
    common = Common(
        Sequences(queries, keys, offset, None, None, None, None), (left, right), Dropout(), Scaling(1.0, None, 1.0, None)
    )
    share_kernel[(len(target),)](target, first, blocks, common, heads, per_head)
    assert {tuple(row) for row in target.tolist()} == set(
        itertools.product(range(blocks), range(heads if per_head else 1), range(splits), [splits])
    )
    position = torch.arange(keys) - torch.arange(queries)[:, None] - offset
    is_seen = (position >= (first if left is None else -left)) & (position <= last)
    num_queries = torch.bincount((position - first)[is_seen], minlength=16 * blocks).view(blocks, 16).amax(1)
    lengths = num_queries[target[:, 0].long()]
    lengths = lengths[lengths > 0]
    # Blocks are taken by their distance to the middle, so one side may be ahead by a block.
    assert len(lengths) > 0 and (lengths <= lengths.cummin(0).values + 16).all(), lengths


# Equal bits.


@pytest.mark.parametrize(
    ("name", "kind", "limit"),
    [
        ("every_table", "clamp", "whole"),
        pytest.param("every_table", "full", "keys", marks=pytest.mark.thorough),
        pytest.param("packed_offsets", "zero", "heads", marks=pytest.mark.thorough),
        pytest.param("every_table_offsets", "zero", "block", marks=pytest.mark.slow),
        pytest.param("packed_offsets", "clamp", "keys", marks=pytest.mark.slow),
    ],
)
def test_the_same_bits(name: str, kind: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second run gives the same bits, and so does each gradient if only some are computed."""
    inputs, arguments = named_call(name, kind, dtype=torch.float16)
    run = partial(all_gradients, inputs, TILES["twice"], **arguments)
    monkeypatch.setenv(VARIABLE, workspace_limit(limit, inputs, arguments, TILES["twice"]))
    expected = run()
    assert all(torch.equal(again, expected[result]) for result, again in run().items())
    single = ((gradient,) for gradient in GRADIENTS if gradient in expected)
    for wanted in (*single, ("d_rel_value", "d_rel_p2c"), ("d_rel_bias", "d_value", "d_query")):
        some = run(wanted=wanted)
        assert set(some) == {"out", "lse", *wanted}
        for result in wanted:
            assert some[result].any() and torch.equal(some[result], expected[result]), (wanted, result)


@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_only_needed_kernels_run(kind: str, guarded_kernels: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the kernels that the wanted gradients need are launched, once for each part."""
    inputs, arguments = named_call("every_table", kind)
    monkeypatch.setenv(VARIABLE, workspace_limit("heads", inputs, arguments, TILES["twice"]))
    far, far_keys = (["dq"], ["far_keys"]) if kind == "clamp" else ([], [])
    far, total = [*far, "table_gradient"], ["table_gradient"]
    for wanted, parts, kernels, last in (
        (("d_key", "d_value"), 1, ["dkv"], []),
        (("d_query",), 1, ["dkv"], ["dq"]),
        (("d_rel_query",), 2, ["dkv", "stored_dq"], ["dq"]),
        (("d_rel_key",), 2, ["dkv", "dtable"], far),
        (("d_rel_bias",), 2, ["dkv", "dtable"], far),
        (("d_rel_value",), 2, ["dkv", "dtable"], far),
        (("d_rel_p2c",), 2, ["dkv", "dp2c"], total),
        (GRADIENTS, 2, ["dkv", "stored_dq", "dtable", "dtable", "dp2c"], ["dq", *4 * total]),
    ):
        guarded_kernels.clear()
        all_gradients(inputs, TILES["twice"], wanted, **arguments)
        names = (*far_keys, "forward", *far_keys, "delta", *parts * kernels, *last)
        assert [launch.kernel for launch in guarded_kernels] == [f"{kernel}_kernel" for kernel in names], wanted


def test_packs_that_differ_in_the_number_of_sequences() -> None:
    """Calls that differ only in the number of sequences do not share cached plans."""
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


# The limit of the workspace, and lack of memory.


@pytest.mark.parametrize("text", ["-1", "1e9", "256 MiB"])
def test_invalid_limits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, arguments = padded_call("full")
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of bytes, such as 268435456, got '{text}'"):
        all_gradients(inputs, TILES["twice"], **arguments)


class Memory:
    """A limit in bytes for workspaces: a plan's scratch memory with a larger one raises OutOfMemoryError."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room, self.used = room, 0
        self.empty = torch.empty
        monkeypatch.setattr(torch, "empty", self.create)

    def create(self, *sizes: Any, **options: Any) -> torch.Tensor:
        caller = sys._getframe(1)
        is_scratch = caller.f_globals["__name__"] == plan.__name__
        count = caller.f_locals["self"].workspace_bytes if is_scratch else 0
        if self.used + count > self.room:
            raise torch.OutOfMemoryError(f"tried to allocate {count} bytes")
        created = self.empty(*sizes, **options)
        self.used += count
        weakref.finalize(created, self.free, count)
        return created

    def free(self, count: int) -> None:
        self.used -= count


NO_MEMORY = r"no memory for a workspace of \d+ bytes; a smaller one is used, .* TRITON_RELATTN_WORKSPACE limits it"


@pytest.mark.parametrize(
    ("name", "kind", "share", "steps"),
    [("every_table", "clamp", 0.9, 1), ("bias_alone", "zero", 0.4, 2), ("rel_value", "full", 0.2, 2)],
)
def test_with_less_memory_the_workspace_is_smaller(
    name: str, kind: str, share: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workspace is halved, with a warning each time, until there is memory for it. All gradients are right."""
    inputs, arguments = named_call(name, kind)
    whole = 2 * int(workspace_limit("heads", inputs, arguments, TILES["square"]))  # two batch entries
    memory = Memory(monkeypatch, int(share * whole))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_forward_backward(inputs, TILES["square"], **arguments)
    texts = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    assert len(texts) == steps and all(re.match(NO_MEMORY, text) for text in texts), texts
    sizes = [int(re.findall(r"\d+", text)[0]) for text in texts]
    assert sizes[0] == whole and all(after <= before // 2 for before, after in itertools.pairwise(sizes))
    assert memory.used == 0


def test_without_memory_for_a_block_of_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says how much memory is needed, and has torch's own as its cause. With that much the call is right."""
    inputs, arguments = named_call("rel_value_per_head", "clamp")
    size = 2 * 37 * 16 * 2 * 4  # two heads that share their keys, of dS and of P
    memory = Memory(monkeypatch, size - 1)
    text = f"the backward needs a workspace of {size} bytes at least, for 37 queries and one block of keys; tried to allocate "
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(torch.OutOfMemoryError, match=text) as raised:
            all_gradients(inputs, TILES["twice"], **arguments)
        assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
        del raised  # with its frames
        memory.room = size
        check_forward_backward(inputs, TILES["twice"], **arguments)


@pytest.mark.parametrize("offset", [0.0, 6.0])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("plain", "full"), ("causal", "clamp"), ("bias_alone", "zero"), ("rel_query", "clamp"), ("rel_value", "full")),
        ("every_table", "zero"),
    ],
)
def test_sharp_attention_in_float16(name: str, kind: str, offset: float) -> None:
    """Gradients have the errors of dS and P rounded once, which requires an exact delta, also with an offset of all values, which
    makes delta much larger than dP - delta."""
    inputs, arguments = named_call(name, kind, sharp=True, dtype=torch.float16)
    check_forward_backward(inputs._replace(value=inputs.value + offset), TILES["square"], **arguments)

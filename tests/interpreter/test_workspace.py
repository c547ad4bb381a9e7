"""The workspace of the backward: parts, the limit of its size, lack of memory, and the kernels and programs that read it."""

from __future__ import annotations

import itertools
import re
import sys
import warnings
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.check import check, compute
from tests.expected import INPUTS, TABLES
from tests.interpreter.guard import Guarded
from tests.interpreter.test_calls import LIMITS, SMALL, named_call, workspace_limit
from tests.samples import Sample
from tests.tolerance import assert_gradients_close_fp32
from triton_relattn.kernels import plan, table_gradient
from triton_relattn.kernels.call import Common, Dropout, Scaling, Sequences
from triton_relattn.kernels.workspace.stored import table_share


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "kind"), [("every table", "clamp"), ("packed, every table", "zero")])
def test_parts_change_only_how_sums_are_added_up(name: str, kind: str) -> None:
    """Gradients of tables, and of queries if a part has only some keys, are close; all other results have the same bits."""
    whole = compute(named_call(name, kind), SMALL)
    gradients = [gradient for result, gradient in whole.items() if result.startswith("d_")]
    for limit in LIMITS[1:]:
        results = compute(named_call(name, kind, limit), SMALL)
        sums = TABLES if limit == "heads" else (*TABLES, "query", "rel_query")
        for result, expected in whole.items():
            if result.removeprefix("d_") in sums:
                assert_gradients_close_fp32(result, results[result], expected, gradients)
            else:
                assert torch.equal(results[result], expected), (limit, result)


@pytest.mark.parametrize("kind", ["clamp", "zero"])
def test_only_needed_kernels_run(kind: str) -> None:
    """Only the kernels that the wanted gradients need are launched, once per part. These have the same bits alone."""
    sample = named_call("every table", kind, "heads", dtype="float16", batch=1, key_heads=2, group=1)
    way, every = Guarded(small=True), compute(sample, SMALL)
    far, far_keys = (["dq"], ["far_keys"]) if kind == "clamp" else ([], [])
    far, total = [*far, "table_gradient"], ["table_gradient"]
    for wanted, parts, kernels, last in (
        (("key", "value"), 1, ["dkv"], []),
        (("query",), 1, ["dkv"], ["dq"]),
        (("rel_query",), 2, ["dkv", "stored_dq"], ["dq"]),
        (("rel_key",), 2, ["dkv", "dtable"], far),
        (("rel_bias",), 2, ["dkv", "dtable"], far),
        (("rel_value",), 2, ["dkv", "dtable"], far),
        (("rel_p2c",), 2, ["dkv", "dp2c"], total),
        (INPUTS, 2, ["dkv", "stored_dq", "dtable", "dtable", "dp2c"], ["dq", *4 * total]),
    ):
        results = compute(replace(sample, requires_grad=wanted), way)
        assert results.keys() == {"out", "lse", *(f"d_{name}" for name in wanted)}
        assert all(torch.equal(result, every[name]) for name, result in results.items()), wanted
        names = (*far_keys, "forward", *far_keys, "delta", *parts * kernels, *last)
        assert [launch.kernel for launch in way.launches] == [f"{kernel}_kernel" for kernel in names], wanted


@pytest.mark.thorough
@pytest.mark.parametrize(("per_head", "kind"), [(False, "clamp"), (True, "full")])
def test_programs_that_share_rows(per_head: bool, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any number of programs may share a table's sum; some of them may have no pairs."""
    sample, found = named_call("key", kind, key_heads=2, group=1, per_head=TABLES * per_head), []
    for splits in (1, 2, 5):
        monkeypatch.setattr(table_gradient, "table_splits", lambda *_, splits=splits: splits)
        check(sample, SMALL)
        found.append(compute(sample, SMALL)["d_rel_key"])
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
    shares = {*itertools.product(range(blocks), range(heads if per_head else 1), range(splits), [splits])}
    target = torch.full((len(shares), 4), -1, dtype=torch.int32)
    sequences = Sequences(queries, keys, offset, None, None, None, None)
    common = Common(sequences, (left, right), Dropout(), Scaling(1.0, None, 1.0, None))
    share_kernel[(len(target),)](target, first, blocks, common, heads, per_head)
    assert {tuple(row) for row in target.tolist()} == shares
    position = torch.arange(keys) - torch.arange(queries)[:, None] - offset
    is_seen = (position >= (first if left is None else -left)) & (position <= last)
    num_queries = torch.bincount((position - first)[is_seen], minlength=16 * blocks).view(blocks, 16).amax(1)
    lengths = num_queries[target[:, 0].long()]
    lengths = lengths[lengths > 0]
    # Blocks are taken by their distance to the middle, so one side may be ahead by a block.
    assert len(lengths) > 0 and (lengths <= lengths.cummin(0).values + 16).all(), lengths


# The limit of the workspace, and lack of memory.


@pytest.mark.parametrize("text", ["-1", "1e9", "256 MiB"])
def test_invalid_limits(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_RELATTN_WORKSPACE", text)
    with pytest.raises(ValueError, match=f"WORKSPACE must be a number of bytes, such as 268435456, got '{text}'"):
        compute(Sample(tables=("rel_key",), positions=(0, 0, "clamp")), SMALL)


class Memory:
    """A limit in bytes for workspaces: a plan's scratch memory with a larger one raises OutOfMemoryError."""

    def __init__(self, room: int) -> None:
        self.room, self.used, self.empty = room, 0, torch.empty

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


def check_in(memory: Memory, sample: Sample) -> list[str]:
    """Compute and check the sample with this memory; return the texts of warnings."""
    inputs, arguments = sample.inputs()
    with pytest.MonkeyPatch.context() as patch, SMALL.computing(sample), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch, "empty", memory.create)
        results = SMALL.results(inputs, **arguments)
    SMALL.check(results, inputs, **arguments)
    return [str(warning.message) for warning in caught if warning.category is RuntimeWarning]


NO_MEMORY = r"no memory for a workspace of \d+ bytes; a smaller one is used, .* TRITON_RELATTN_WORKSPACE limits it"


@pytest.mark.parametrize(
    ("name", "kind", "share", "steps"),
    [("every table", "clamp", 0.9, 1), ("bias", "zero", 0.4, 2), ("key and value", "full", 0.2, 2)],
)
def test_with_less_memory_the_workspace_is_smaller(name: str, kind: str, share: float, steps: int) -> None:
    """The workspace is halved, with a warning each time, until there is memory for it. All gradients are right."""
    sample = named_call(name, kind)
    whole = 2 * (workspace_limit(sample, "heads") or 0)  # two batch entries
    memory = Memory(int(share * whole))
    texts = check_in(memory, sample)
    assert len(texts) == steps and all(re.match(NO_MEMORY, text) for text in texts), texts
    sizes = [int(re.findall(r"\d+", text)[0]) for text in texts]
    assert sizes[0] == whole and all(after <= before // 2 for before, after in itertools.pairwise(sizes))
    assert memory.used == 0


def test_without_memory_for_a_block_of_keys() -> None:
    """The error says how much memory is needed, and has torch's own as its cause. With that much the call is right."""
    size = 2 * 33 * 16 * 2 * 4  # two heads that share their keys, of dS and of P
    memory, sample = Memory(size - 1), named_call("value per head", "clamp")
    text = f"the backward needs a workspace of {size} bytes at least, for 33 queries and one block of keys; tried to allocate "
    with pytest.raises(torch.OutOfMemoryError, match=text) as raised:
        check_in(memory, sample)
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    del raised  # with its frames
    memory.room = size
    check_in(memory, sample)

"""Sequences of other lengths and offsets in the same blocks of the linear-memory path."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tests.conftest import cut_blocks
from tests.oracle import assert_same
from triton_relattn import RelativePositions, fused_relative_attention, fused_relative_attention_varlen
from triton_relattn._blockwise import stacks
from triton_relattn._blockwise.partition import BlockwiseCall
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.validation import resolve

TABLES = {"rel_key": (4,), "rel_value": (6,), "rel_bias": (), "rel_p2c": (4,)}


def drawn(seed: int) -> tuple[list[tuple[int, int]], list[int], dict[str, Any], list[str]]:
    """Queries and keys of sequences, their offsets, other arguments, and the tables that there are."""
    draw = random.Random(seed)
    count, longest = draw.randint(2, 9), draw.choice([1, 4, 20])
    lengths = [(draw.randint(0, longest), draw.randint(0, 30)) for _ in range(count)]
    if draw.random() < 0.5:
        lengths = [(queries, queries) for queries, _ in lengths]
    spread = draw.choice([0, 1, 5, 40])
    offsets = [draw.randint(-spread, spread) for _ in range(count)]
    if draw.random() < 0.3:  # as in decoding
        lengths, offsets = [(1, keys) for _, keys in lengths], [keys - 1 for _, keys in lengths]
    first = draw.randint(-30, 5)
    arguments = {
        "positions": RelativePositions(first, first + draw.randint(0, 60), draw.choice(["clamp", "zero"])),  # type: ignore[arg-type]
        "is_causal": draw.random() < 0.5,
        "window_size": draw.choice([(-1, -1), (draw.randint(-1, 8), draw.randint(-1, 8))]),
        "softcap": draw.choice([None, None, 3.0]),
        "dropout_p": draw.choice([0.0, 0.0, 0.3]),
    }
    names = draw.choice([["rel_key"], ["rel_value"], ["rel_bias"], ["rel_p2c"], list(TABLES)[:3], list(TABLES)])
    return lengths, offsets, arguments, names


def pairs(lengths: tuple[int, int], offset: int, arguments: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Relative positions of a sequence's pairs, and which of them are visible."""
    relative = torch.arange(lengths[1]) - torch.arange(lengths[0])[:, None] - offset
    left, right = arguments["window_size"]
    visible = (relative >= -left) | (left < 0)
    visible &= (relative <= right) | (right < 0)
    return relative, visible & ((relative <= 0) | (not arguments["is_causal"]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_together_as_alone(seed: int, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence as by the reference; NaN in all keys, values and table rows of no visible pair reaches nothing."""
    lengths, offsets, arguments, names = drawn(seed)
    if seed % 4:
        monkeypatch.setattr(stacks, "BLOCK_COST", 1 << 20)
    if seed % 4 == 3:
        cut_blocks(monkeypatch, 128, 300, 4)
    if not packed:
        lengths = [(lengths[0][0], keys) for _, keys in lengths]
    torch.manual_seed(seed)
    shapes = (4, 2, 4), (2, 2, 4), (2, 2, 6)  # heads, for the keys shared, and width

    def rows(number: int, which: int) -> torch.Tensor:
        return torch.randn(number, *(shapes[which][::2]), dtype=torch.float64)

    sequences = [(rows(m, 0), rows(n, 1), rows(n, 2)) for m, n in lengths]
    first, num_rows = arguments["positions"].first, arguments["positions"].num_rows
    tables = {name: torch.randn(num_rows, *TABLES[name], dtype=torch.float64) for name in names}
    unseen, used = [], torch.zeros(num_rows, dtype=torch.bool)
    for counts, offset in zip(lengths, offsets, strict=True):
        relative, visible = pairs(counts, offset, arguments)
        unseen.append(~visible.any(0))
        row = relative[visible] - first
        row = row.clamp(0, num_rows - 1) if arguments["positions"].outside == "clamp" else row[(row >= 0) & (row < num_rows)]
        used[row] = True

    def run(implementation: str, beside: float) -> list[torch.Tensor]:
        query, key, value = ([each[which].clone() for each in sequences] for which in range(3))
        for of_one, missing in zip([*zip(key, value, strict=True)], unseen, strict=True):
            for each in of_one:
                each[missing] = beside
        own = {name: torch.where(used.view(-1, *(1,) * (t.dim() - 1)), t, beside).requires_grad_() for name, t in tables.items()}
        torch.manual_seed(seed)
        given: dict[str, Any] = {**own, **arguments, "enable_gqa": True, "return_lse": True, "implementation": implementation}
        given["query_offset"] = torch.tensor(offsets)
        if packed:
            leaves = [torch.cat(each).requires_grad_() for each in (query, key, value)]
            starts = [torch.tensor([0, *(pair[which] for pair in lengths)]).cumsum(0) for which in (0, 1)]
            most: dict[str, Any] = {f"max_seqlen_{name}": max(pair[which] for pair in lengths) for which, name in enumerate("qk")}
            given |= most | {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
            results = fused_relative_attention_varlen(*leaves, **given)
        else:
            padded = [torch.stack(query), *(torch.full((len(lengths), 30, 2, width), beside).double() for width in (4, 6))]
            for tensor, parts in ((padded[1], key), (padded[2], value)):
                for place, part in zip(tensor, parts, strict=True):
                    place[: len(part)] = part
            leaves = [each.transpose(1, 2).contiguous().requires_grad_() for each in padded]
            given["key_lengths"] = torch.tensor([keys for _, keys in lengths])
            results = fused_relative_attention(*leaves, **given)
        out, lse = results
        torch.manual_seed(0)
        d_out, d_lse = torch.randn(out.shape).double(), torch.randn(lse.shape).double()
        total = (out * d_out).sum() + (torch.where(lse == -math.inf, 0, lse) * d_lse).sum()
        return [out, lse, *torch.autograd.grad(total, [*leaves, *own.values()])]

    results, expected = run("blockwise", math.nan), run("reference", 0.0)
    for number, (result, other, again) in enumerate(zip(results, expected, run("blockwise", math.nan), strict=True)):
        assert_same(str(number), result, other)
        assert torch.equal(result, again)


def blocks_of(lengths: list[int]) -> list[Any]:
    starts, query = torch.tensor([0, *lengths]).cumsum(0), torch.randn(sum(lengths), 8, 64)
    packing: dict[str, Any] = {"cu_seqlens": {"q": starts, "k": starts}, "max_seqlens": {"q": max(lengths), "k": max(lengths)}}
    return list(BlockwiseCall(*resolve(Arguments.of(query, query, query, **packing))).blocks())


def test_padding_is_bounded() -> None:
    """Short sequences share a few blocks, of which at most a quarter of the rows are padding; long ones are not padded."""
    draw = random.Random(0)
    lengths = [draw.randint(1, 16) for _ in range(512)]
    blocks = blocks_of(lengths)
    padded = sum(len(block.group.sequences.batch) * block.frame.num_queries for block in blocks)
    assert len(blocks) <= 12 and padded <= sum(lengths) / 0.75
    lengths = [draw.randint(150, 400) for _ in range(20)]
    assert all(block.group.no_queries is None for block in blocks_of(lengths))


def test_a_decoding_step_is_one_block() -> None:
    query, key = torch.randn(300, 8, 1, 64), torch.randn(300, 8, 64, 64)
    lengths = torch.randint(32, 64, (300,), generator=torch.Generator().manual_seed(0))
    tensors, spec = resolve(Arguments.of(query, key, key, torch.randn(33, 64), key_lengths=lengths, query_offset=lengths - 1))
    assert len(list(BlockwiseCall(tensors, spec).blocks())) == 1


@pytest.mark.parametrize("which", [0, 1, 2])
def test_nan_stays_in_its_sequence(which: int) -> None:
    """Bit for bit: what one sequence holds is no matter to those that are computed with it."""
    lengths = [5, 3, 4, 5, 1, 4]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    torch.manual_seed(0)
    tensors, table = [torch.randn(sum(lengths), 2, 8) for _ in range(3)], torch.randn(9, 8)
    results = []
    for content in (None, math.nan):
        leaves = [each.clone() for each in tensors]
        if content is not None:
            leaves[which][8:12] = content  # of the third sequence
        leaves = [each.requires_grad_() for each in leaves]
        given: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 5, "max_seqlen_k": 5}
        given |= {"rel_key": table, "implementation": "blockwise"}
        out = fused_relative_attention_varlen(leaves[0], leaves[1], leaves[2], **given)
        results.append((out, *torch.autograd.grad(out.sum(), leaves)))
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[8:12] = False
    assert results[1][0][8:12].isnan().any()
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean[others], other[others])


def test_rows_between_the_positions_of_two_sequences_may_hold_nan() -> None:
    """Sequences of which one needs rows 0 to 2 and the other 20 to 22 are not computed together."""
    torch.manual_seed(0)
    query, key, table = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 3, 4), torch.randn(23, 4)
    gradients = []
    for content in (0.0, math.nan):
        leaves = [each.clone() for each in (query, key, table)]
        leaves[2][3:20] = content
        leaves = [each.requires_grad_() for each in leaves]
        given: dict[str, Any] = {"query_offset": torch.tensor([22, 2]), "positions": RelativePositions(-22, 0)}
        out = fused_relative_attention(leaves[0], leaves[1], key, leaves[2], implementation="blockwise", **given)
        gradients.append(torch.autograd.grad(out.square().sum(), leaves))
    for clean, other in zip(*gradients, strict=True):
        assert torch.equal(clean, other)

"""A call may be a part of another: it drops what the whole drops there, and gradients that will be added up are not rounded."""

from __future__ import annotations

import pytest
import torch

from tests.way import Way
from triton_relattn import RelativePositions
from triton_relattn._core.arguments import Arguments
from triton_relattn._core.dropout import keep_mask, origins_of
from triton_relattn._core.grids import GridTensors
from triton_relattn._core.spec import TABLES
from triton_relattn._core.validation import resolve
from triton_relattn._implementations import IMPLEMENTATIONS
from triton_relattn._operators.grids import grid_attention
from triton_relattn._operators.ops import relative_attention

SEED, DROPOUT_P, LENGTH = torch.tensor([-987654321]), 0.4, 33


def kept(batch: slice, heads: slice, first_query: int, first_key: int) -> torch.Tensor:
    """What is kept of the whole call's probabilities, in a part with so many sequences and heads, and LENGTH queries and keys."""
    sequence, head, query = (torch.arange(9 + LENGTH)[each] for each in (batch, heads, slice(first_query, first_query + LENGTH)))
    indices = sequence[:, None, None, None], head[:, None, None], query[:, None]
    return keep_mask(SEED, DROPOUT_P, *indices, slice(first_key, first_key + LENGTH))


def normal(way: Way, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=way.dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_part_drops_what_the_whole_drops(is_packed: bool, way: Way) -> None:
    """Sequences, heads, queries and keys that are not the first: out shows what is kept for values that are the identity, and
    their gradient for such a d_out."""
    batch, heads = slice(1, 3), slice(2, 5)
    identity = torch.eye(LENGTH, dtype=way.dtype).expand(2, 3, LENGTH, LENGTH).contiguous()
    tensors = [normal(way, 2, 3, LENGTH, way.width), normal(way, 2, 3, LENGTH, way.width), identity]
    given = Arguments.of(*tensors, dropout_p=DROPOUT_P)
    if is_packed:
        starts, longest = dict.fromkeys("qk", torch.tensor([0, LENGTH, 2 * LENGTH])), dict.fromkeys("qk", LENGTH)
        rows = (each.transpose(1, 2).flatten(0, 1) for each in tensors)
        given = Arguments.of(*rows, dropout_p=DROPOUT_P, cu_seqlens=starts, max_seqlens=longest)
    call, spec = resolve(given)
    value = call.value.clone().requires_grad_()
    origins = origins_of(3, 6, SEED.device)[batch, heads] + torch.tensor([0, 0, 7, 5])
    call = call._replace(value=value, dropout_seed=SEED, dropout_origins=origins)
    out, _ = relative_attention(call, spec, IMPLEMENTATIONS[way.implementation])
    (d_value,) = torch.autograd.grad(out, value, call.value.detach())
    by_pair = [each.unflatten(2, (2, LENGTH))[0].transpose(0, 1) if is_packed else each for each in (out, d_value)]
    expected = kept(batch, heads, 7, 5)
    assert torch.equal(by_pair[0] != 0, expected) and torch.equal(by_pair[1].mT != 0, expected)


def test_a_part_on_a_grid(tiled: Way) -> None:
    """The same of sequences and heads of a call on a grid."""
    batch, heads, side = slice(1, 3), slice(2, 5), (3, 11)
    identity = torch.eye(LENGTH, dtype=tiled.dtype).expand(2, 3, LENGTH, LENGTH).contiguous().requires_grad_()
    query, rel_h, rel_w = (normal(tiled, *shape, tiled.width) for shape in ((2, 3, LENGTH), side[:1] * 2, side[1:] * 2))
    given = GridTensors(query, query, identity, rel_h, rel_w, SEED, origins_of(3, 6, SEED.device)[batch, heads])
    out = grid_attention(given, 0.3, DROPOUT_P, IMPLEMENTATIONS[tiled.implementation])
    (d_value,) = torch.autograd.grad(out, identity, identity.detach())
    expected = kept(batch, heads, 0, 0)
    assert torch.equal(out != 0, expected) and torch.equal(d_value.mT != 0, expected)


def test_wide_tables(tiled: Way) -> None:
    """Tables in float32 beside a query in float16: results are those of float16, and so are gradients, once they are rounded."""
    query = normal(tiled, 1, 2, LENGTH, tiled.width).half()
    widths = {name: () if name == "rel_bias" else (tiled.width,) for name in TABLES}
    tables = {name: normal(tiled, 9, *width).half() for name, width in widths.items()}
    call, spec = resolve(Arguments.of(query, query, query, **tables, positions=RelativePositions(-4, 4)))
    results = []
    for dtype in (torch.float16, torch.float32):
        leaves = {name: table.to(dtype).requires_grad_() for name, table in tables.items()}
        out, _ = relative_attention(call._replace(**leaves), spec, IMPLEMENTATIONS[tiled.implementation])
        results.append([out.detach(), *torch.autograd.grad(out, list(leaves.values()), query)])
    for narrow, wide in zip(*results, strict=True):
        assert wide.dtype == (torch.float16 if wide is results[1][0] else torch.float32)
        assert torch.equal(wide.half(), narrow)

"""Jagged nested tensors are computed as packed sequences, and export: AOTInductor."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near
from triton_relattn import RelativePositions, fused_relative_attention

LENGTHS = (5, 9, 1)


def jagged(width: int, seed: int, lengths: tuple[int, ...] = LENGTHS, heads: int = 2) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A nested tensor (B, H, N, D), and its sequences (H, N, D), as leaves."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(each, heads, width, generator=generator, dtype=torch.float64).requires_grad_() for each in lengths]
    nested = torch.nested.as_nested_tensor(parts, layout=torch.jagged)
    return nested.transpose(1, 2), parts


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_are_computed_one_by_one(causal: bool) -> None:
    table = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    (query, queries), (key, keys), (value, values) = jagged(8, 1), jagged(8, 2), jagged(6, 3)
    options: dict[str, Any] = {"is_causal": causal, "positions": RelativePositions(-4, 4), "query_offset": 0}
    out, lse = fused_relative_attention(query, key, value, table, return_lse=True, **options)
    assert out.is_nested and out.shape[0] == 3 and out.shape[3] == 6
    torch.nested.nested_tensor_from_jagged(out.transpose(1, 2).values().square(), out.offsets()).values().sum().backward()
    leaves = [*queries, *keys, *values, table]
    found = [each.grad.clone() for each in leaves if each.grad is not None]
    assert len(found) == len(leaves)
    for each in leaves:
        each.grad = None
    total = torch.zeros((), dtype=torch.float64)
    for number, parts in enumerate(zip(queries, keys, values, strict=True)):
        q, k, v = (each.transpose(0, 1)[None] for each in parts)
        expected, expected_lse = fused_relative_attention(q, k, v, table, return_lse=True, **options)
        assert_near("out", out.transpose(1, 2).unbind()[number], expected[0].transpose(0, 1))
        assert_near("lse", lse.transpose(1, 2).unbind()[number], expected_lse[0].T)
        total = total + expected.square().sum()
    total.backward()
    for gradient, each in zip(found, leaves, strict=True):
        assert_near("a gradient", gradient, each.grad)  # type: ignore[arg-type]


def test_what_is_not_jagged_alike_is_refused() -> None:
    (query, _), table = jagged(8, 1), torch.randn(9, 8, dtype=torch.float64)
    with pytest.raises(TypeError, match="key must be jagged as query is"):
        fused_relative_attention(query, torch.randn(3, 2, 9, 8, dtype=torch.float64), query, table)
    with pytest.raises(TypeError, match="query must be jagged as query is"):
        fused_relative_attention(query.transpose(1, 2), query, query, table)
    with pytest.raises(TypeError, match="no attn_mask and no key_lengths"):
        fused_relative_attention(query, query, query, table, key_lengths=torch.tensor([1, 1, 1]))


def test_sequences_that_do_not_belong_together_are_refused() -> None:
    """Lengths that differ by tensor, and holes between sequences: rows of others would be taken."""
    (query, _), table = jagged(8, 1), torch.randn(9, 8, dtype=torch.float64)
    (other, _), (same, _) = jagged(8, 2, (9, 5, 1)), jagged(8, 3)
    fused_relative_attention(query, query, same, table, rel_query=same)
    with pytest.raises(ValueError, match=r"value's sequences must be as long as key's, got \[9, 5, 1\] and \[5, 9, 1\]"):
        fused_relative_attention(query, query, other, table)
    with pytest.raises(ValueError, match="rel_query's sequences must be as long as query's"):
        fused_relative_attention(query, query, query, table, rel_query=other)
    cache = torch.randn(2, 6, 2, 8, dtype=torch.float64)
    lengths = torch.tensor([3, 6])
    holes = torch.nested.narrow(cache, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    with pytest.raises(ValueError, match="query has holes between its sequences"):
        fused_relative_attention(holes.transpose(1, 2), query, query, table)
    packed = torch.nested.as_nested_tensor(list(holes.unbind()), layout=torch.jagged).transpose(1, 2)
    out = fused_relative_attention(packed, packed, packed, table)
    for number, length in enumerate(lengths.tolist()):
        alone = cache[number, :length].transpose(0, 1)[None]
        expected = fused_relative_attention(alone, alone, alone, table)
        assert_near("out", out.transpose(1, 2).unbind()[number], expected[0].transpose(0, 1))


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_ahead_of_time_compilation(tmp_path: Path) -> None:
    """torch.export to AOTInductor, for any length, on a CPU."""

    class Attend(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(33, 16))

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return fused_relative_attention(query, query, query, self.table)

    model = Attend().eval()
    length = torch.export.Dim("length", min=2, max=512)
    with torch.no_grad():
        program = torch.export.export(model, (torch.randn(1, 2, 40, 16),), dynamic_shapes=({2: length},))
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for size in (40, 129):
            query = torch.randn(1, 2, size, 16)
            assert_near("the compiled program", compiled(query), model(query))

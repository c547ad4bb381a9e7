"""Conversions from other table layouts: literal cases, errors, gradients."""

from __future__ import annotations

import pytest
import torch

from triton_relattn import RelativePositions, tables


def test_general_layout_of_four_positions() -> None:
    """T = 4: seven columns, from r = 3 (the most distant future) to r = -3, become seven rows from r = -3 to r = 3."""
    general = torch.tensor([[3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0], [30.0, 20.0, 10.0, 0.0, -10.0, -20.0, -30.0]])
    table = tables.from_general_layout(general)
    assert table.tolist() == [[-3, -30], [-2, -20], [-1, -10], [0, 0], [1, 10], [2, 20], [3, 30]]


def test_word_two_to_word_one_is_column_four() -> None:
    """s_{2-1} is what word 2 adds for word 1, one step in its past: r = 1 - 2, column 4 (from 0) of the general layout, T = 4."""
    general = torch.arange(3.0 * 7).view(3, 7)
    row, _ = RelativePositions.centred(7).rows(torch.tensor(1 - 2))
    assert torch.equal(tables.from_general_layout(general)[row], general[:, 4])


def test_future_first() -> None:
    table = torch.tensor([[2.0, 5.0], [1.0, 4.0], [0.0, 3.0]])
    assert tables.from_future_first(table).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_per_head_tables_with_strides() -> None:
    """Each head on its own gives what the stack gives, also from a view that is strided and transposed."""
    general = torch.randn(3, 7, 10)[..., ::2].mT  # (heads, D, 2T - 1) = (3, 5, 7)
    assert tables.from_general_layout(general).shape == (3, 7, 5)
    for head in range(3):
        expected = torch.stack([general[head, :, column] for column in range(6, -1, -1)])
        assert torch.equal(tables.from_general_layout(general)[head], expected)
        assert torch.equal(tables.from_future_first(general.mT)[head], expected)


@pytest.mark.parametrize("convert", [tables.from_general_layout, tables.from_future_first])
def test_gradients_flow_to_the_given_table(convert: object) -> None:
    assert callable(convert)
    table = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(convert(table).shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((convert(table) * weights).sum(), table)
    # The conversion only moves elements, so each weight comes back to the element that it multiplied.
    assert torch.equal(convert(gradient), weights)


def test_general_layout_needs_an_odd_number_of_columns() -> None:
    with pytest.raises(ValueError, match=r"2T - 1, got shape \(3, 6\)"):
        tables.from_general_layout(torch.zeros(3, 6))


@pytest.mark.parametrize("convert", [tables.from_general_layout, tables.from_future_first])
def test_tables_have_two_dimensions(convert: object) -> None:
    assert callable(convert)
    with pytest.raises(ValueError, match=r"got \(7,\)"):
        convert(torch.zeros(7))

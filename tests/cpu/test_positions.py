"""Which table row a relative position gets: literal cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from triton_relattn import RelativePositions


def rows(positions: RelativePositions, relative_position: list[int] | torch.Tensor) -> tuple[list[int], list[bool]]:
    row, applies = positions.rows(torch.as_tensor(relative_position))
    return row.tolist(), applies.tolist()


def test_clipped_lookup_of_ten_words_with_k_3() -> None:
    """The example of Shaw et al.: words 0..9, clipping at 3; all rows of the lookup, by hand."""
    words = torch.arange(10)
    lookup, applies = RelativePositions(-3, 3).rows(words[None, :] - words[:, None])
    assert lookup[0].tolist() == [3, 4, 5, 6, 6, 6, 6, 6, 6, 6]
    assert lookup[1].tolist() == [2, 3, 4, 5, 6, 6, 6, 6, 6, 6]
    assert lookup[5].tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 6]
    assert lookup[9].tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert applies.all()


def test_zero_says_where_the_term_applies() -> None:
    assert rows(RelativePositions(-1, 2, "zero"), [-3, -2, -1, 0, 1, 2, 3]) == (
        [0, 0, 0, 1, 2, 3, 3],
        [False, False, True, True, True, True, False],
    )


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(-5, -3, [0, 0, 1, 2, 2, 2, 2, 2]), (3, 4, [0, 0, 0, 0, 0, 0, 0, 0]), (0, 0, [0] * 8), (-2, 1, [0, 0, 0, 0, 0, 1, 2, 3])],
    ids=["past", "future", "one_row", "even"],
)
def test_tables_that_do_not_straddle_zero(first: int, last: int, expected: list[int]) -> None:
    assert rows(RelativePositions(first, last), list(range(-6, 2))) == (expected, [True] * 8)


def test_relative_positions_of_any_strides() -> None:
    """A transposed and a strided view give what their contiguous copies give."""
    relative_position = torch.arange(-8, 8).view(4, 4)
    for view in (relative_position.T, relative_position[:, ::2], relative_position[:, :1].expand(4, 3)):
        for positions in (RelativePositions(-3, 2), RelativePositions(-3, 2, "zero")):
            assert rows(positions, view) == rows(positions, view.contiguous())


def test_num_rows_and_centred() -> None:
    assert RelativePositions(-3, 3).num_rows == 7
    assert RelativePositions(4, 4).num_rows == 1
    assert RelativePositions.centred(7) == RelativePositions(-3, 3, "clamp")
    assert RelativePositions.centred(1, "zero") == RelativePositions(0, 0, "zero")


@pytest.mark.parametrize("num_rows", [0, 2, 512])
def test_centred_needs_a_middle_row(num_rows: int) -> None:
    with pytest.raises(ValueError, match=rf"even number of rows \({num_rows}\).*positions=RelativePositions\(first, last\)"):
        RelativePositions.centred(num_rows)


def test_last_before_first() -> None:
    with pytest.raises(ValueError, match="first=3, last=-3"):
        RelativePositions(3, -3)


def test_one_number_alone() -> None:
    with pytest.raises(TypeError, match=r"needs first and last.*got 129 alone; RelativePositions.centred\(num_rows\)"):
        RelativePositions(129)


def test_unknown_outside() -> None:
    with pytest.raises(ValueError, match="'wrap'"):
        RelativePositions(-3, 3, "wrap")  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "last", "message"), [(-1.5, 2, "first must be an int, got -1.5"), (0, "2", "last .* got '2'")])
def test_bounds_are_integers(first: object, last: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        RelativePositions(first, last)  # type: ignore[arg-type]


def test_integers() -> None:
    """Whatever is an integer becomes an int; bool is none."""
    positions = RelativePositions(torch.tensor(-2), np.int32(3))  # type: ignore[arg-type]
    assert type(positions.first) is type(positions.last) is int and positions == RelativePositions(-2, 3)
    for first in (False, 1.0, "1", torch.tensor(1.0)):
        with pytest.raises(TypeError, match="first must be an int, got"):
            RelativePositions(first, 3)  # type: ignore[arg-type]

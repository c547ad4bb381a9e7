"""Several programs share the keys of a block of queries: the results are those of one program, whatever the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.check import WAYS
from tests.check import check as check_call
from tests.draws import OF_KERNELS, drawn
from tests.interpreter.launch import SMALL, check, resolve
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn.kernels import splits as key_splits
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import Inputs, make_inputs

NUMBERS = range(10)
LONG = OF_KERNELS._replace(longest=90)


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the device large and 16 keys enough for a program; return the numbers of splits, which grow as calls are made."""
    monkeypatch.setattr(key_splits, "LEAST_KEYS", 16)
    monkeypatch.setattr(selection, "multiprocessors", lambda _: 40)
    numbers: list[int] = []
    original = key_splits.launch_merge

    def recorded(call: Any, parts: torch.Tensor, softmax_stats: torch.Tensor, out: torch.Tensor, *others: torch.Tensor) -> None:
        numbers.append(parts.shape[1] // out.shape[1])
        original(call, parts, softmax_stats, out, *others)

    monkeypatch.setattr("triton_relattn.kernels.forward.launch_merge", recorded)
    return numbers


@pytest.mark.parametrize("number", NUMBERS)
def test_random_combination(number: int) -> None:
    """out, lse and all gradients, which use the merged statistics."""
    check_call(drawn(number, LONG, is_packed=False), WAYS[1])


@pytest.mark.parametrize("number", NUMBERS[:6])
def test_packed(number: int) -> None:
    check_call(drawn(number, LONG, is_packed=True), WAYS[1])


def decoded(**others: Any) -> Inputs:
    return make_inputs(2, 2, 1, 200, 16, 12, dtype=torch.float32, seed=3, **others)


@pytest.mark.parametrize("positions", [RelativePositions(-250, 0), RelativePositions(-40, 0), RelativePositions(-40, 0, "zero")])
@pytest.mark.parametrize("is_sharp", [False, True])
def test_decoding(positions: RelativePositions, is_sharp: bool, splits: list[int]) -> None:
    """One query at the end of its keys: near and far keys lie in different splits, and some splits see nothing."""
    inputs = decoded(num_rows=positions.num_rows, rel_value=True, sharp=is_sharp)
    lengths = torch.tensor([200, 21])
    check(inputs, SMALL["forward"], positions=positions, query_offset=lengths - 1, key_lengths=lengths, is_causal=True)
    assert splits == [10]


def test_repeats(splits: list[int]) -> None:
    """Merged in one order: the same bits each time. Without splits the statistics are the same maxima, and close sums."""
    inputs = decoded(num_rows=51)
    tensors, spec = resolve(inputs, query_offset=199)
    first, second = (forward(tensors, spec, SMALL["forward"]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True)) and splits == [10, 10]
    key_splits.LEAST_KEYS = 1000
    whole = forward(tensors, spec, SMALL["forward"])
    assert len(splits) == 2
    assert torch.equal(whole[2][:, :, 0], first[2][:, :, 0])
    for name, one, other in zip(("out", "lse", "statistics"), first[:3], whole[:3], strict=True):
        assert_near(name, one, other)


def test_residual(splits: list[int]) -> None:
    """To keep the residual of out, each block of queries has one program."""
    inputs = decoded(num_rows=401).to(torch.float16)
    tensors, spec = resolve(inputs, query_offset=199)
    split, whole = (forward(tensors, spec, SMALL["forward"], keeps_residual=keeps) for keeps in (False, True))
    assert splits == [10] and split[3] is None
    residual = whole[3]
    assert residual is not None and residual.shape == whole[0].shape and residual.any()
    for name, one, other in zip(("lse", "statistics"), split[1:3], whole[1:3], strict=True):
        assert_near(name, one, other)


def test_nobody_sees_anything() -> None:
    inputs = decoded(num_rows=51)
    tensors, spec = resolve(inputs, key_lengths=torch.tensor([0, 200]))
    out, lse, softmax_stats, _ = forward(tensors, spec, SMALL["forward"])
    assert not out[0].any() and bool((lse[0] == -torch.inf).all()) and not softmax_stats[0].any()
    assert bool(out[1].any()) and bool(lse[1].isfinite().all())


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the multiprocessors have room for, each with enough keys; a window bounds the keys that there are."""
    monkeypatch.setattr(key_splits, "LEAST_KEYS", 1024)
    inputs = make_inputs(1, 1, 1, 9000, 16, 16, num_rows=None, dtype=torch.float32, seed=3)
    number = key_splits.number_of_splits
    tile, device = SMALL["forward"], inputs.query.device
    _, spec = resolve(inputs)
    assert [number(spec, tile, programs, device) for programs in (1, 10, 20, 30, 400)] == [8, 4, 2, 1, 1]
    _, spec = resolve(inputs, window_size=(2500, 10))
    assert number(spec, tile, 1, device) == 2

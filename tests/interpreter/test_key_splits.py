"""Several programs share the keys of a block of queries, as in decoding, with the results of a single program."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conftest import without_plans
from tests.interpreter.calls import packed_call
from tests.interpreter.launch import SMALL, check, check_forward_backward, resolve
from tests.tolerance import assert_near
from triton_relattn import RelativePositions
from triton_relattn.kernels import splits as key_splits
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.draft import Slot
from triton_relattn.kernels.forward import forward
from triton_relattn.testing import Inputs, make_inputs


@pytest.fixture(autouse=True)
def splits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Split keys in short calls: many multiprocessors, and 16 keys per program. Returns the numbers of splits of plans."""
    monkeypatch.setattr(key_splits, "LEAST_KEYS", 16)
    monkeypatch.setattr(architectures, "multiprocessors", lambda _: 40)
    numbers: list[int] = []
    original = key_splits.launch_merge

    def recorded(call: Any, parts: Slot, softmax_stats: Slot, out: Slot, *others: Slot) -> None:
        numbers.append(parts.shape[1] // out.shape[1])
        original(call, parts, softmax_stats, out, *others)

    monkeypatch.setattr("triton_relattn.kernels.forward.launch_merge", recorded)
    return numbers


DECODED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "every table": ({"num_rows": 11, "rel_value": True, "rel_bias": True, "rel_p2c": True, "rel_width": 12}, {"softcap": 3.0}),
    "shared keys": ({"num_rows": 203, "key_heads": 1, "per_head": True}, {"enable_gqa": True, "dropout_p": 0.3}),
    "mask": ({"num_rows": None}, {"attn_mask": torch.arange(200) % 3 != 1}),
    "window": ({"num_rows": 203}, {"window_size": (150, 150), "query_offset": 120, "key_lengths": torch.tensor([200, 71])}),
}


@pytest.mark.parametrize("name", DECODED)
def test_calls(name: str, splits: list[int]) -> None:
    """out, lse and all gradients, for which the backward uses the merged statistics."""
    options, arguments = DECODED[name]
    inputs = make_inputs(2, 2, 3, 200, 16, 12, dtype=torch.float32, seed=3, **options)
    check_forward_backward(inputs, SMALL, **arguments)
    assert splits == [10]


def test_packed(splits: list[int]) -> None:
    inputs, arguments = packed_call("clamp", {"q": (1, 0, 9), "k": (90, 17, 200)}, rel_value=True, rel_bias=True)
    check_forward_backward(inputs, SMALL, **arguments)
    assert splits[0] > 1


def decoded(**others: Any) -> Inputs:
    return make_inputs(2, 2, 1, 200, 16, 12, dtype=torch.float32, seed=3, **others)


@pytest.mark.parametrize("positions", [RelativePositions(-250, 0), RelativePositions(-40, 0), RelativePositions(-40, 0, "zero")])
@pytest.mark.parametrize("is_sharp", [False, True])
def test_decoding(positions: RelativePositions, is_sharp: bool, splits: list[int]) -> None:
    """One query at the end of its keys: near and far keys are in different splits, and some splits have no visible key."""
    inputs = decoded(num_rows=positions.num_rows, rel_value=True, sharp=is_sharp)
    lengths = torch.tensor([200, 21])
    check(inputs, SMALL["forward"], positions=positions, query_offset=lengths - 1, key_lengths=lengths, is_causal=True)
    assert splits == [10]


def test_repeats(splits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits are merged in a fixed order, with equal bits. Without splits maxima are equal, and sums are close."""
    inputs = decoded(num_rows=51)
    tensors, spec = resolve(inputs, query_offset=199)
    first, second = (forward(tensors, spec, SMALL["forward"]) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first[:3], second[:3], strict=True)) and splits == [10]
    key_splits.LEAST_KEYS = 1000
    without_plans(monkeypatch)
    whole = forward(tensors, spec, SMALL["forward"])
    assert len(splits) == 1
    assert torch.equal(whole[2][:, :, 0], first[2][:, :, 0])
    for name, one, other in zip(("out", "lse", "statistics"), first[:3], whole[:3], strict=True):
        assert_near(name, one, other)


def test_residual(splits: list[int]) -> None:
    """A call that stores the residual of out has no splits, and the same lse and statistics."""
    inputs = decoded(num_rows=401).to(torch.float16)
    tensors, spec = resolve(inputs, query_offset=199)
    split, whole = (forward(tensors, spec, SMALL["forward"], keeps_residual=keeps) for keeps in (False, True))
    assert splits == [10] and split[3] is None
    residual = whole[3]
    assert residual is not None and residual.shape == whole[0].shape and residual.any()
    for name, one, other in zip(("lse", "statistics"), split[1:3], whole[1:3], strict=True):
        assert_near(name, one, other)


def test_no_visible_keys() -> None:
    inputs = decoded(num_rows=51)
    tensors, spec = resolve(inputs, key_lengths=torch.tensor([0, 200]))
    out, lse, softmax_stats, _ = forward(tensors, spec, SMALL["forward"])
    assert not out[0].any() and bool((lse[0] == -torch.inf).all()) and not softmax_stats[0].any()
    assert bool(out[1].any()) and bool(lse[1].isfinite().all())

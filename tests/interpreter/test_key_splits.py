"""Several programs share the keys of a block of queries, as in decoding, with the results of a single program."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.check import Way, check, compute
from tests.expected import TABLES
from tests.samples import Sample
from tests.tolerance import assert_near
from triton_relattn.kernels import splits as key_splits
from triton_relattn.kernels.config import architectures
from triton_relattn.kernels.draft import Slot

SMALL = Way("triton", small=True)
CALL = Sample(batch=2, key_heads=2, num_queries=3, num_keys=200, tables=("rel_key",), positions=(-101, 101, "clamp"))
ONE_QUERY: dict[str, Any] = {"num_queries": 1, "query_offset": (199, 20), "key_lengths": (200, 21), "is_causal": True}
DECODED = replace(CALL, positions=(-250, 0, "clamp"), **ONE_QUERY)


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


VALUES: dict[str, Any] = {**ONE_QUERY, "tables": ("rel_key", "rel_value"), "mode": "no_grad"}
CALLS: dict[str, dict[str, Any]] = {
    "every table": {"tables": TABLES, "rel_width": 12, "positions": (-5, 5, "clamp"), "softcap": 3.0},
    "shared keys": {"key_heads": 1, "group": 2, "per_head": TABLES, "dropout_p": 0.3},
    "mask": {"tables": (), "positions": None, "mask": "bool", "mask_shape": (200,)},
    "window": {"window_size": (150, 150), "query_offset": 120, "key_lengths": (200, 71)},
    "nothing to see": {"key_lengths": (0, 200)},
    "packed": {"sequences": ((1, 90), (0, 17), (9, 200)), "tables": TABLES[:3], "positions": (-4, 6, "clamp")},
    # One query at the end of its keys: near and far keys are in different splits, and some splits have no visible key.
    "decoding": {**VALUES, "positions": (-250, 0, "clamp")},
    "decoding, clamp": {**VALUES, "positions": (-40, 0, "clamp"), "sharp": True},
    "decoding, zero": {**VALUES, "positions": (-40, 0, "zero")},
    "decoding, sharp": {**VALUES, "positions": (-250, 0, "clamp"), "sharp": True},
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, splits: list[int]) -> None:
    """out, lse and all gradients, for which the backward uses the merged statistics."""
    check(replace(CALL, **CALLS[name]), SMALL)
    assert splits == [10] or (name == "packed" and splits[0] > 1)


def test_repeats(splits: list[int]) -> None:
    """Splits are merged in a fixed order, with equal bits. Without splits results are close."""
    first, second = (compute(DECODED, SMALL) for _ in range(2))
    assert all(torch.equal(result, second[name]) for name, result in first.items()) and splits == [10, 10]
    key_splits.LEAST_KEYS = 1000
    whole = compute(DECODED, SMALL)
    assert len(splits) == 2
    for name in ("out", "lse"):
        assert_near(name, first[name], whole[name])


def test_calls_that_keep_the_residual_have_no_splits(splits: list[int]) -> None:
    """In 16 bits, what is trained with gradients of a table stores more of out than splits can merge."""
    sample = replace(DECODED, dtype="float16")
    trained = compute(sample, SMALL)
    assert not splits
    alone = compute(replace(sample, mode="no_grad"), SMALL)
    assert splits == [10]
    assert_near("lse", alone["lse"], trained["lse"])

"""Configurations that do not fit are replaced by smaller ones, whose results are right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from tests.interpreter.launch import check_forward_backward
from triton_relattn import RelativePositions
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.draft import Draft
from triton_relattn.kernels.plan import DoesNotFit
from triton_relattn.testing import make_inputs

CLAMP, ZERO = RelativePositions(-4, 6), RelativePositions(-4, 6, "zero")


@pytest.fixture
def largest(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The largest block_m that each kernel can be launched with; larger ones raise OutOfResources as on a GPU."""
    limits = {"forward": 32, "stored_dq": 16, "dq": 32, "dkv": 32, "dtable": 16}
    launch = Draft.launch

    def refuse(draft: Draft, name: str, kernel: Any, config: Any, *others: Any) -> None:
        if config is not None and config.block_m > limits.get(name, config.block_m):  # the delta kernel's is fixed
            selection.take_smaller(name, "interpreter", draft.selected[name], OutOfResources(99, 1, "shared memory"))
            raise DoesNotFit
        launch(draft, name, kernel, config, *others)

    monkeypatch.setattr(Draft, "launch", refuse)
    selection.forget()
    yield limits
    selection.forget()


@pytest.mark.thorough
@pytest.mark.parametrize("positions", [CLAMP, ZERO], ids=["clamp", "zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_results_in_smaller_configurations(dtype: torch.dtype, positions: RelativePositions, largest: dict[str, int]) -> None:
    """All terms; in float16 also a large ratio of scales. A plan that is made again has nothing of the first attempt."""
    options: dict[str, Any] = {"rel_value": True, "rel_bias": True} if dtype == torch.float32 else {}
    inputs = make_inputs(2, 2, 70, 83, 16, num_rows=11, dtype=dtype, seed=1, **options)
    arguments: dict[str, Any] = {"positions": positions, "key_lengths": torch.tensor([83, 40]), "is_causal": True}
    arguments |= {"query_offset": 13} | ({} if dtype == torch.float32 else {"scale": 0.02, "rel_scale": 0.25})
    with pytest.warns(RuntimeWarning, match="does not fit this GPU"):
        check_forward_backward(inputs, None, **arguments)
    replaced = {kernel for kernel, *_ in selection.tables("interpreter").smaller}
    # With few queries, kernels that read dS may have smaller tiles than their configurations; see backward.shortened.
    assert replaced | {"stored_dq", "dtable"} == set(largest)

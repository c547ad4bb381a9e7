"""ONNX graphs of enabled models contain the stock forward, and accept all lengths."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.families import FAMILIES, output
from tests.libraries.standins import needs
from tests.tolerance import assert_at_most, dtype_tolerance
from triton_relattn import enable

NAMES = ("ids", "mask")


class LastHiddenState(nn.Module):
    """A model of transformers that returns its last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return output(self.model(input_ids=ids, attention_mask=mask))


def tokens(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(1, 50, (2, length)), (torch.arange(length) < torch.tensor([[length], [length - 5]])).long()


@needs("onnxscript")
@pytest.mark.parametrize("dynamo", [False, True], ids=["traced", "exported"])
@pytest.mark.parametrize("name", ["t5", "deberta_v2", "mpnet"])
def test_onnx_graphs_take_all_lengths(name: str, dynamo: bool, tmp_path: Path) -> None:
    import onnxruntime

    model: Any = FAMILIES[name].build(small=True, layers=2)
    stock = LastHiddenState(model.get_encoder() if name == "t5" else model).eval()
    enabled = copy.deepcopy(stock)
    assert enable(enabled)
    dynamic: dict[str, Any] = {"dynamic_shapes" if dynamo else "dynamic_axes": {key: {1: "length"} for key in NAMES}}
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(enabled, tokens(24), file, dynamo=dynamo, input_names=list(NAMES), **dynamic)
    session = onnxruntime.InferenceSession(file)
    for given in (tokens(24), tokens(40)):
        found = session.run(None, {key: tensor.numpy() for key, tensor in zip(NAMES, given, strict=True)})[0]
        with torch.no_grad():
            expected = stock(*given)
        error = (torch.from_numpy(found) - expected).abs()
        assert_at_most("the output", error, dtype_tolerance(torch.float32) * expected.abs().max())

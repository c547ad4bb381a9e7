"""The pictures show what the operator computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near

pytest.importorskip("matplotlib")

from tests.oracle import assert_same
from triton_relattn import RelativePositions, fused_relative_attention, plots
from triton_relattn.testing import make_inputs

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "table": ({"num_rows": 9}, {"is_causal": True, "query_offset": None}),
    "zero": ({"num_rows": 5, "per_head": True}, {"positions": RelativePositions(-3, 1, "zero"), "scale": 0.3, "rel_scale": 2.0}),
    "terms": ({"num_rows": 7, "rel_width": 3, "rel_bias": True}, {"query_offset": torch.tensor([2, -1])}),
    "bias": ({"num_rows": 7, "rel_key": False, "rel_bias": True}, {"key_lengths": torch.tensor([12, 5])}),
    "p2c": ({"num_rows": 7, "rel_p2c": True, "rel_key": False, "per_head": True}, {"rel_scale": 0.5}),
    "gqa": ({"num_rows": 7, "key_heads": 2, "rel_p2c": True}, {"enable_gqa": True, "window_size": (3, 4)}),
}


def call(name: str) -> tuple[Any, dict[str, Any]]:
    shapes, arguments = CASES[name]
    inputs = make_inputs(2, 4, 10, 12, 8, **{"num_rows": None, "dtype": torch.float64, "seed": 0, **shapes})
    return inputs, {**arguments, **inputs.terms()}


@pytest.mark.parametrize("name", CASES)
def test_terms_give_the_result(name: str) -> None:
    """Probabilities are the softmax of the sum of both terms where visible, and their product with the values is out."""
    inputs, arguments = call(name)
    content, position, probs = plots.attention_terms(inputs.query, inputs.key, inputs.rel_key, **arguments)
    assert content.shape == position.shape == probs.shape == (2, 4, 10, 12)
    visible = probs > 0
    sees = visible.any(-1, keepdim=True)
    logits = (content + position).masked_fill(~visible, -torch.inf).masked_fill(~sees, 0)
    assert_same("probs", logits.softmax(-1) * sees, probs)
    values = inputs.value.repeat_interleave(4 // inputs.value.shape[1], 1)
    out: Any = fused_relative_attention(inputs.query, inputs.key, inputs.value, inputs.rel_key, **arguments)
    assert_same("out", probs @ values, out)
    if name == "plain":
        assert not position.any()
        rel_value: Any = {"rel_value": torch.zeros(5, 8, dtype=torch.float64), "positions": RelativePositions(-3, 1)}
        assert torch.equal(plots.attention_terms(inputs.query, inputs.key, **rel_value)[2], probs)


def test_autocast_changes_nothing() -> None:
    inputs = make_inputs(1, 2, 10, 12, 8, num_rows=7, dtype=torch.float32, seed=0)
    expected = plots.attention_terms(inputs.query, inputs.key, inputs.rel_key)
    with torch.autocast("cpu", torch.bfloat16):
        found = plots.attention_terms(inputs.query, inputs.key, inputs.rel_key)
    assert all(torch.equal(each, other) for each, other in zip(found, expected, strict=True))


def test_mean_by_distance() -> None:
    """By explicit loops."""
    probs = torch.rand(2, 3, 4, 6, dtype=torch.float64)
    for offset in (0, 2, torch.tensor([1, -2])):
        distances, means = plots.mean_by_distance(probs, offset)
        found: dict[int, list[torch.Tensor]] = {}
        for b in range(2):
            for i in range(4):
                for j in range(6):
                    each = int(offset[b]) if isinstance(offset, torch.Tensor) else offset
                    found.setdefault(j - i - each, []).append(probs[b, :, i, j])
        assert distances.tolist() == sorted(found)
        assert_same("means", means, torch.stack([torch.stack(found[r]).mean(0) for r in sorted(found)], 1))


@pytest.mark.parametrize("name", CASES)
def test_figures(name: str, tmp_path: Path) -> None:
    inputs, arguments = call(name)
    inputs.query.requires_grad_()
    maps = plots.attention_maps(inputs.query, inputs.key, inputs.rel_key, head=2, batch=1, **arguments)
    titles = [axis.get_title(loc="left") for axis in maps.axes[:4]]
    assert titles == ["content term", "position term", "their sum", "probabilities"]
    images = [axis.get_images()[0].get_array() for axis in maps.axes[:4]]
    terms = plots.attention_terms(inputs.query, inputs.key, inputs.rel_key, **arguments)
    for image, term in zip((images[0], images[1], images[3]), terms, strict=True):
        assert_near("image", torch.as_tensor(image), term[1, 2])
    lines = plots.attention_by_distance(inputs.query, inputs.key, inputs.rel_key, **arguments)
    assert len(lines.axes[0].get_lines()) == 4 + 2  # heads, their mean, and r = 0
    for figure in (maps, lines):
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.thorough
def test_refuses() -> None:
    long = torch.zeros(1, 1, 5000, 1)
    with pytest.raises(ValueError, match="at most 4096 x 4096 pairs"):
        plots.attention_maps(long, long)
    with pytest.raises(ValueError, match="key must have query's"):
        plots.attention_maps(torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 3, 4))
    program = """
import sys, torch
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
from triton_relattn import plots
try:
    plots.attention_by_distance(*[torch.zeros(1, 1, 3, 4)] * 2)
except ImportError as error:
    assert 'pip install matplotlib' in str(error)
else:
    raise SystemExit(1)
"""
    subprocess.run([sys.executable, "-c", program], check=True)

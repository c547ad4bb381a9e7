"""The pictures show what the operator computes."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near, assert_same

pytest.importorskip("matplotlib")

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


@pytest.mark.parametrize("name", CASES)
def test_terms_and_figures(name: str, tmp_path: Path) -> None:
    """Probabilities are the softmax of the sum of both terms where visible, also under autocast; probabilities times values equal
    out, and the figures show these numbers."""
    shapes, arguments = CASES[name]
    inputs = make_inputs(2, 4, 10, 12, 8, **{"num_rows": None, "dtype": torch.float64, "seed": 0, **shapes})
    arguments = {**arguments, **inputs.terms()}
    given = (inputs.query.requires_grad_(), inputs.key, inputs.rel_key)
    with torch.autocast("cpu", torch.bfloat16):
        content, position, probs = (tensor.detach() for tensor in plots.attention_terms(*given, **arguments))
    assert content.shape == position.shape == probs.shape == (2, 4, 10, 12) and bool(position.any()) == (name != "plain")
    visible = probs > 0
    sees = visible.any(-1, keepdim=True)
    logits = (content + position).masked_fill(~visible, -torch.inf).masked_fill(~sees, 0)
    assert_same("probs", logits.softmax(-1) * sees, probs)
    out: Any = fused_relative_attention(inputs.query, inputs.key, inputs.value, inputs.rel_key, **arguments)
    assert_same("out", probs @ inputs.value.repeat_interleave(4 // inputs.value.shape[1], 1), out.detach())

    maps = plots.attention_maps(*given, head=2, batch=1, **arguments)
    for axis, term in zip(maps.axes, (content, position, content + position, probs), strict=False):
        image = torch.as_tensor(axis.get_images()[0].get_array().filled(torch.nan), dtype=torch.float64)
        shown = image.isfinite()
        assert shown.any()
        assert_near(axis.get_title(loc="left"), image[shown], term[1, 2][shown])
    lines = plots.attention_by_distance(*given, **arguments)
    assert len(lines.axes[0].get_lines()) == 4 + 2  # heads, their mean, and r = 0
    for figure in (maps, lines):
        figure.savefig(tmp_path / "figure.png")
        assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("offset", [None, 2, torch.tensor([1, -2])])
def test_means_by_distance(offset: Any) -> None:
    """The lines per head and of their mean match explicit loops."""
    query, key = make_inputs(2, 3, 4, 6, 8, num_rows=None, dtype=torch.float64, seed=0)[:2]
    *_, probs = plots.attention_terms(query, key, query_offset=offset)
    found: dict[int, list[torch.Tensor]] = {}
    for b, i, j in itertools.product(range(2), range(4), range(6)):
        shift = int(offset[b]) if isinstance(offset, torch.Tensor) else offset or 0
        found.setdefault(j - i - shift, []).append(probs[b, :, i, j])
    means = torch.stack([torch.stack(found[r]).mean(0) for r in sorted(found)], 1)
    lines = plots.attention_by_distance(query, key, query_offset=offset).axes[0].get_lines()
    for line, expected in zip(lines, [*means, means.mean(0)], strict=False):
        assert line.get_xdata().tolist() == sorted(found)
        assert_same("means", torch.tensor(line.get_ydata(), dtype=torch.float64), expected)


@pytest.mark.thorough
def test_refuses() -> None:
    """Refuses calls that are too long to draw, and machines without matplotlib."""
    long = torch.zeros(1, 1, 5000, 1)
    with pytest.raises(ValueError, match="limited to 4096 x 4096 pairs, got 5000 x 5000"):
        plots.attention_maps(long, long)
    program = """
import sys, torch
sys.modules["matplotlib"] = sys.modules["matplotlib.figure"] = None
from triton_relattn import plots
plots.attention_by_distance(*[torch.zeros(1, 1, 3, 4)] * 2)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode and "pip install matplotlib" in done.stderr

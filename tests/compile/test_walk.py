"""How far it is from the public function to a launch, and from autograd to those of the backward: what a reader has to follow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import triton_relattn
from bench.compiled import recorded_launches
from triton_relattn import fused_relative_attention
from triton_relattn._core import implementations

PACKAGE = str(Path(triton_relattn.__file__).parent)
MOST = {"forward": 50, "backward": 46}
"""Functions of the package that a call enters on the host, in its second run; more is a longer walk."""


def entered(function: Callable[[], object]) -> list[str]:
    """Return the package's functions that run, each once, in the order in which they are entered."""
    found: dict[str, None] = {}

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and "<" not in code.co_name:
            found[f"{Path(code.co_filename).relative_to(PACKAGE)}:{code.co_name}"] = None

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        function()
    finally:
        sys.setprofile(before)
    return list(found)


def test_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No longer than it was: functional, validation, the operator, the launcher, then one launcher for each kernel."""
    query, rel_key = (torch.randn(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((1, 2, 64, 64), (127, 64)))
    monkeypatch.setattr(implementations, "choose_implementation", lambda *_: "triton")
    results: list[torch.Tensor] = []

    def forward() -> None:
        results.append(fused_relative_attention(query, query, query, rel_key).sum())

    with recorded_launches("sm_90") as launches:
        forward()
        results.pop().backward()
        launches.clear()
        walks = {"forward": entered(forward), "backward": entered(lambda: results.pop().backward())}
    assert [launch.name for launch in launches] == ["forward", "dq", "dkv", "dtable_words"]
    for direction, walk in walks.items():
        assert len(walk) <= MOST[direction], "\n".join([direction, *walk])
    assert walks["forward"][0] == "functional.py:fused_relative_attention" and walks["backward"][0].startswith(
        "_operators/ops.py"
    )

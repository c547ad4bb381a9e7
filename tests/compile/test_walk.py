"""How far it is from the public function to a launch, and from autograd to those of the backward: what a reader has to follow."""

from __future__ import annotations

import re
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

PACKAGE = Path(triton_relattn.__file__).parent
DOCUMENTED = Path(__file__).parents[2] / "docs" / "development.md"
MOST_STEPS = 20
MOST_FUNCTIONS = {"forward": 56, "backward": 51}
"""Functions of the package that a call enters on the host, in its second run, with all helpers and checks."""
CHECKS = ("_core/validation.py", "_core/doubts.py:warn_of_doubts", "positions.py")


def entered(function: Callable[[], object]) -> dict[str, set[str]]:
    """Return the package's functions that run, in the order in which they are entered, and which others each of them calls."""
    calls: dict[str, set[str]] = {}

    def name_of(frame: FrameType | None) -> str | None:
        """Return file and name of the function of the package that a frame runs, or that has called it."""
        while frame is not None:
            code, file = frame.f_code, Path(frame.f_code.co_filename)
            name = code.co_qualname if hasattr(code, "co_qualname") else code.co_name
            if file.is_relative_to(PACKAGE) and "<" not in code.co_name:
                return f"{file.relative_to(PACKAGE).as_posix()}:{name.removesuffix('.<locals>.run')}"
            frame = frame.f_back
        return None

    def follow(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)) and "<" not in code.co_name:
            name, caller = name_of(frame), name_of(frame.f_back)
            assert name is not None
            calls.setdefault(name, set())
            if caller is not None:
                calls[caller].add(name)

    before = sys.getprofile()
    sys.setprofile(follow)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


def steps(calls: dict[str, set[str]]) -> list[str]:
    """Return the functions that a reader follows: those that call others, but for the checks below resolve."""
    return [name for name, callees in calls.items() if callees and (name.endswith(":resolve") or not name.startswith(CHECKS))]


def documented(direction: str) -> list[str]:
    """Return the functions in the first column of a table of the docs."""
    table = DOCUMENTED.read_text().split(f"| {direction} | does |\n")[1].split("\n\n")[0]
    return re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames have no qualified names")
def test_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is as the docs say: functional, validation, the operator, the launcher, then one launcher for each kernel."""
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
    for direction, calls in walks.items():
        walk = steps(calls)
        assert walk == documented(direction)
        assert len(walk) <= MOST_STEPS
        assert len(calls) <= MOST_FUNCTIONS[direction], "\n".join([direction, *calls])

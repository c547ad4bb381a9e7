"""The examples in the READMEs of the tools run as they stand, on kernels that are not ours."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINTED = {
    "emulator": "out of bounds",
    "cycles": "cycles for 64 x 64 elements",
    "mutants": "caught shop/__init__.py:2: * -> /",
}


@pytest.mark.parametrize("tool", PRINTED)
def test_example(tool: str, tmp_path: Path) -> None:
    """As a program of its own, which Triton needs the source of."""
    code = "".join(re.findall(r"```python\n(.*?)```", (ROOT / "tools" / tool / "README.md").read_text(), re.DOTALL))
    program = tmp_path / "example.py"
    program.write_text(code)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    child = subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment, check=False)
    assert child.returncode == 0, child.stderr
    assert PRINTED[tool] in child.stdout

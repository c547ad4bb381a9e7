"""What importing the package needs and brings along, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

USE = """
import torch
from triton_relattn import fused_relative_attention
from triton_relattn.testing import make_inputs, with_different_strides
inputs = with_different_strides(make_inputs(2, 3, 17, 19, 8, num_rows=7, dtype=torch.float32, seed=0))
"""


def run(program: str) -> str:
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert child.returncode == 0, child.stderr
    return child.stdout


def test_works_without_triton() -> None:
    """Forward and backward by default are blockwise, and right."""
    program = f"""
import sys
sys.modules["triton"] = None
{USE}
from triton_relattn.testing import assert_within_budget, dense_gradients, forward_backward
blockwise, reference = (
    forward_backward(fused_relative_attention, inputs, return_lse=True, implementation=name) for name in (None, "reference")
)
golden = dense_gradients(inputs)._asdict()
for name in blockwise:
    assert_within_budget(name, blockwise[name], golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
    print(name)
"""
    assert run(program).split() == ["out", "lse", "d_query", "d_key", "d_value", "d_rel_key"]


def test_triton_that_is_missing_is_named() -> None:
    program = f"""
import sys
sys.modules["triton"] = None
{USE}
from triton_relattn import can_run_triton
print(can_run_triton(inputs.query, inputs.value))
try:
    fused_relative_attention(*inputs[:4], implementation="triton")
except RuntimeError as error:
    print(error)
"""
    output = run(program)
    assert output.startswith('False\nimplementation="triton" cannot run here: the package triton is not installed')
    assert "pip install triton" in output


def test_interpreter_asked_for_after_the_import() -> None:
    """TRITON_INTERPRET=1 counts until the kernels are loaded, when "triton" is first looked at; after that it says why not."""
    program = f"""
import os
{USE}
if {{late}}:
    import triton_relattn.kernels.forward, triton_relattn.kernels.backward
os.environ["TRITON_INTERPRET"] = "1"
try:
    print(tuple(fused_relative_attention(*inputs[:4], implementation="triton").shape))
except NotImplementedError as error:
    print(error)
"""
    assert run(program.replace("{late}", "False")) == "(2, 3, 17, 8)\n"
    assert "set TRITON_INTERPRET=1 before the first import of triton and triton_relattn.kernels" in run(
        program.replace("{late}", "True")
    )


SAY = """
import os, sys
import torch
from triton_relattn import can_run_triton, fused_relative_attention

def attend(implementation=None):
    leaf = torch.randn(1, 1, 3, 16, requires_grad=True)
    return leaf, fused_relative_attention(leaf, leaf, leaf, torch.randn(3, 16), implementation=implementation)

def differentiate(leaf, out):
    out.sum().backward()
    return bool(leaf.grad.isfinite().all())

def say(implementation=None):
    try:
        print(implementation, differentiate(*attend(implementation)))
    except NotImplementedError as error:
        print(implementation, error)
"""


def test_interpreter_asked_for_after_triton_was_imported() -> None:
    """Triton's own functions are then compiled, the kernels that call them would be interpreted: neither works."""
    program = f"""
import triton
{SAY}
os.environ["TRITON_INTERPRET"] = "1"
print(can_run_triton(torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16)))
say("triton")
say()
"""
    able, explicit, default = run(program).splitlines()
    assert (able, default) == ("False", "None True")
    assert "cannot run here" in explicit and "TRITON_INTERPRET has changed after the first import of triton" in explicit


@pytest.mark.parametrize("after", ["import", "forward"])
def test_interpreter_no_longer_asked_for(after: str) -> None:
    """What TRITON_INTERPRET was when the kernels were loaded stays, also for a first backward after it was unset."""
    program = f"""
import os
os.environ["TRITON_INTERPRET"] = "1"
import triton
{SAY}
if {after == "forward"}:
    leaf, out = attend("triton")
del os.environ["TRITON_INTERPRET"]
if {after == "forward"}:
    print("triton", differentiate(leaf, out))
else:
    say("triton")
say()
"""
    explicit, default = run(program).splitlines()
    assert default == "None True"
    if after == "import":
        assert "TRITON_INTERPRET has changed after the first import of triton" in explicit
    else:
        assert explicit == "triton True"


def test_triton_that_does_not_work(tmp_path: Path) -> None:
    """Damaged, of another kind, old, or lacking a function: only an explicit "triton" notices, and says what is wrong."""
    contents = {
        'raise ImportError("libtriton.so: cannot open")': "ImportError: libtriton.so: cannot open",
        "1 / 0": "ZeroDivisionError: division by zero",
        '__version__ = "2.1.0"': "No module named 'triton.",
    }
    for number, content in enumerate(contents):
        (tmp_path / str(number) / "triton").mkdir(parents=True)
        (tmp_path / str(number) / "triton" / "__init__.py").write_text(content)
    program = f"""
{SAY}
for number in range({len(contents)} + 1):
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" or name.startswith("triton_relattn.kernels")]:
        del sys.modules[name]
    if number < {len(contents)}:
        sys.path.insert(0, {str(tmp_path)!r} + f"/{{number}}")
    else:
        del sys.path[:number]
        import triton
        del triton.constexpr_function
    print(can_run_triton(torch.randn(1, 1, 3, 16), torch.randn(1, 1, 3, 16)))
    say("triton")
    say()
"""
    lines = run(program).splitlines()
    assert lines[::3] == ["False"] * 4 and lines[2::3] == ["None True"] * 4
    for line, reason in zip(lines[1::3], (*contents.values(), "AttributeError"), strict=True):
        assert "cannot run here: the kernels cannot be loaded: " in line and reason in line, line


def test_importing_and_using_brings_no_optional_package() -> None:
    """torch may import what it likes; the package adds nothing to that, and loads its kernels only when they are used."""
    program = f"""
import sys
import torch
of_torch = set(sys.modules)
{USE}
fused_relative_attention(*inputs[:4])
added = {{name.partition(".")[0] for name in set(sys.modules) - of_torch}}
print(sorted(added & {{"triton", "matplotlib", "music21", "tqdm", "transformers"}}), "triton_relattn.kernels" in sys.modules)
"""
    assert run(program).split() == ["[]", "False"]


def test_importing_is_quick() -> None:
    """In less than a second beyond torch; the best of a few, since the machine may be busy."""
    program = "import time, torch; t = time.perf_counter(); import triton_relattn.nn; print(time.perf_counter() - t)"
    assert min(float(run(program)) for _ in range(3)) < 1


def test_public_names() -> None:
    program = """
import triton_relattn
print(sorted(name for name in triton_relattn.__all__ if getattr(triton_relattn, name, None) is None))
print(triton_relattn.__version__)
"""
    missing, version = run(program).split()
    assert missing == "[]" and version.count(".") == 2

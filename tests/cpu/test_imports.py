"""What an import of the package needs and loads, and what a GPU gets. Each test imports in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import triton_relattn

ROOT = Path(__file__).parents[2]
USE = """
import os, sys, torch
from triton_relattn import can_run_triton, fused_relative_attention
from triton_relattn.testing import make_inputs
inputs = make_inputs(2, 3, 17, 19, 8, num_rows=7, dtype=torch.float32, seed=0)

def attend(implementation=None):
    leaf = inputs.query.detach().requires_grad_()
    return leaf, fused_relative_attention(leaf, *inputs[1:4], implementation=implementation)

def say(implementation=None):
    try:
        leaf, out = attend(implementation)
        out.sum().backward()
        print(implementation, bool(leaf.grad.isfinite().all()))
    except (NotImplementedError, RuntimeError) as error:
        print(implementation, error)
"""


def run(program: str) -> list[str]:
    """The lines that a program prints."""
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout.splitlines()


ASKED = "triton_relattn.distributed, triton_relattn.nn, triton_relattn.plots, triton_relattn.testing"


def test_without_triton() -> None:
    """Forward and backward default to blockwise and are right; parts of the package are imported when they are asked for, the
    kernels with an error that names what is missing."""
    program = f"""
import sys, triton_relattn
sys.modules["triton"] = None
{USE}
from triton_relattn.testing import assert_within_budget, forward_backward
blockwise, reference, golden = (
    forward_backward(fused_relative_attention, given, return_lse=True, implementation=name)
    for given, name in ((inputs, None), (inputs, "reference"), (inputs.to(torch.float64), "reference"))
)
for name in blockwise:
    assert_within_budget(name, blockwise[name], golden[name], reference[name], factor=3 if name.startswith("d_") else 2)
print(*blockwise, can_run_triton(inputs.query, inputs.value))
print(*(module.__name__ for module in ({ASKED})))
say("triton")
"""
    first, names, *others = run(program)
    assert names == ASKED.replace(",", "")
    assert first.split() == ["out", "lse", "d_query", "d_key", "d_value", "d_rel_key", "False"]
    assert others[0].startswith('triton implementation="triton" cannot run here: the package triton is not installed')
    assert all(word in "\n".join(others) for word in ("NVIDIA, ROCm and XPU", "pip install triton-windows"))


CHANGED = "TRITON_INTERPRET has changed after the first import of triton"
WHEN = {
    "after the kernels were loaded": (
        f"{USE}\nsay('triton')\nos.environ['TRITON_INTERPRET'] = '1'\nsay('triton')",
        "set TRITON_INTERPRET=1 before the first import of triton and triton_relattn.kernels",
        "",
    ),
    "after triton was imported": (f"import triton\n{USE}\nos.environ['TRITON_INTERPRET'] = '1'\nsay('triton')", CHANGED, ""),
    "no longer, after a forward": (
        f"{USE}\nleaf, out = attend('triton')\ndel os.environ['TRITON_INTERPRET']\nout.sum().backward()\nprint('triton', "
        "bool(leaf.grad.isfinite().all()))",
        "True",
        "1",
    ),
}


@pytest.mark.thorough
@pytest.mark.parametrize("when", WHEN)
def test_interpreter_asked_for(when: str) -> None:
    """TRITON_INTERPRET counts as of the time when triton and the kernels were loaded; otherwise an explicit "triton" raises an
    explanation, and the default is blockwise."""
    program, expected, before = WHEN[when]
    setting = f"import os\nos.environ['TRITON_INTERPRET'] = '{before}'\n" if before else ""
    *_, explicit, default = run(f"{setting}{program}\nsay()")
    assert explicit.startswith("triton") and expected in explicit and default == "None True"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('raise ImportError("libtriton.so: cannot open")', "ImportError: libtriton.so: cannot open"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ('__version__ = "2.1.0"', "No module named 'triton."),
    ],
)
def test_triton_that_does_not_work(content: str, reason: str, tmp_path: Path) -> None:
    """If triton is damaged, of another kind, or old, only an explicit "triton" raises, and says what is wrong."""
    (tmp_path / "triton").mkdir(parents=True)
    (tmp_path / "triton" / "__init__.py").write_text(content)
    program = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n{USE}\nsay('triton')\nsay()"
    explicit, default = run(program)
    assert "cannot run here: the kernels cannot be loaded: " in explicit and reason in explicit and default == "None True"


ON_A_GPU = '''
import sys, warnings, torch
from torch._subclasses.fake_tensor import FakeTensorMode

class Properties:
    major, minor, name = 9, 0, "a GPU"

torch.cuda.get_device_properties = lambda device=None: Properties
from triton_relattn import fused_relative_attention

def attend(*tensors, **arguments):
    return fused_relative_attention(tensors[0], *tensors, **arguments)

def call(dtype=torch.float16, width=16, generation=8, compiled=False, **arguments):
    """Print the warnings of a call, then a line."""
    Properties.major = generation
    run = torch.compile(attend, fullgraph=True, backend="eager") if compiled else attend
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(*(torch.empty(*shape, width, device="cuda", dtype=dtype) for shape in ((1, 1, 4), (1, 1, 4), (7,))), **arguments)
    for warning in caught:
        print(warning.category.__name__, warning.message)
    print("--")
'''
"""A stand-in for a GPU, without memory. By default its calls run unchecked kernels and warn about that."""
UNCHECKED = "RuntimeWarning the Triton kernels have not been checked on this GPU"
WIDEST = int(re.findall(r"\| up to (\d+) each", (ROOT / "docs" / "usage.md").read_text())[0])
NOT_FOR_KERNELS = {
    'sys.modules["triton"] = None': ("", "the package triton is not installed"),
    'sys.modules["triton.runtime.jit"] = None': ("", "cannot be loaded: ModuleNotFoundError: import of triton.runtime.jit"),
    "dtype": ("dtype=torch.float64", "the kernels compute in float16, bfloat16 and float32, not in torch.float64"),
    "width": (f"width={WIDEST + 16}", f"the kernels take head widths up to {WIDEST}, got {WIDEST + 16} (query)"),
    "generation": ("generation=7", "a GPU has no bfloat16 matrix units"),
}


def test_parts_of_the_package_are_attributes() -> None:
    """All that is public can be imported; what there is not raises Python's usual error."""
    assert all(getattr(triton_relattn, name) is not None for name in triton_relattn.__all__)
    assert triton_relattn.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = triton_relattn.nothing


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
@pytest.mark.parametrize("what", [*NOT_FOR_KERNELS, "nothing"])
def test_a_gpu_is_told_once_what_computes(what: str, compiled: bool) -> None:
    """Why it gets blockwise, or that its kernels are unchecked: once, also when torch.compile traces, and not if that was
    requested. Kernels work without numpy, which only Triton's interpreter requires."""
    options, reason = NOT_FOR_KERNELS.get(what, ("", UNCHECKED))
    program = f"import sys\nsys.modules['numpy'] = None\n{ON_A_GPU}\n{what if 'modules' in what else ''}\n"
    for choice in ("triton" if what == "nothing" else "blockwise", None, None):
        program += f"call({options and f'{options}, '}implementation={choice!r}, compiled={compiled})\n"
    asked, warning, *others = run(program)
    assert asked == "--" and others == ["--", "--"] and warning.startswith("RuntimeWarning") and reason in warning
    if what != "nothing":
        assert "a call on a GPU is computed by " in warning
        assert 'implementation="blockwise" asks for that without this warning' in warning


NEWEST = re.findall(r"^triton==(\d+)\.(\d+)", (ROOT / "constraints-newest.txt").read_text(), re.MULTILINE)[0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("version", "is_new"),
    [
        (f"{NEWEST[0]}.{int(NEWEST[1]) + 1}.0", True),
        (f"{int(NEWEST[0]) + 1}.0.0+git5d4e", True),
        (f"{NEWEST[0]}.{NEWEST[1]}.9", False),
        ("nightly", False),
    ],
)
def test_a_gpu_with_an_untested_triton_is_told(version: str, is_new: bool) -> None:
    """The warning comes once per process and only if kernels are compiled: not for blockwise, nor on a CPU."""
    program = f"""
{ON_A_GPU}
import triton
triton.__version__ = {version!r}
call(implementation="blockwise")
with warnings.catch_warnings():
    warnings.simplefilter("error")
    attend(*(torch.zeros(1, 1, 4, 16) for _ in range(2)), torch.zeros(7, 16))
call(implementation="triton")
call(implementation="triton")
"""
    first, *warned, second, third = run(program)
    assert (first, second, third) == ("--",) * 3 and len(warned) == is_new
    for line in warned:
        assert line.startswith(f"RuntimeWarning Triton {version} is newer than {'.'.join(NEWEST)}, ") and "make gpu" in line


@pytest.mark.thorough
def test_importing_and_using_brings_no_optional_package() -> None:
    """Beyond what torch imports, the package imports no optional package, and it loads its kernels only on use."""
    program = f"import sys, torch\nloaded_by_torch = set(sys.modules)\n{USE}\nsay()\nprint(*set(sys.modules) - loaded_by_torch)"
    added = run(program)[-1].split()
    assert not {name.partition(".")[0] for name in added} & {"triton", "matplotlib", "music21", "tqdm", "transformers"}
    assert "triton_relattn.functional" in added and "triton_relattn.kernels" not in added

"""The modules that an import of the package needs and loads. Each test imports in a process of its own."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

from triton_relattn._implementations.kernels import NEWEST_TRITON

USE = """
import torch
from triton_relattn import fused_relative_attention
from triton_relattn.testing import make_inputs, with_different_strides
inputs = with_different_strides(make_inputs(2, 3, 17, 19, 8, num_rows=7, dtype=torch.float32, seed=0))
"""


LAYERS: tuple[tuple[str, ...], ...] = (
    ("positions",),
    ("_core",),
    ("_reference", "_blockwise", "kernels"),
    ("_implementations",),
    ("_operators",),
    ("merging",),
    ("_distributed",),
    ("_jagged",),
    ("functional",),
    ("grids", "tables", "testing", "plots"),
    ("distributed",),
    ("check", "nn"),
    ("integrations",),
    ("__init__", "__main__"),
)
"""Modules and folders of the package. Each imports, when it is imported, only from its own layer and from those before."""


def imports_of(path: Path, root: Path) -> set[str]:
    """Return the names within the package of the modules that a module imports when it is imported, dots between them."""
    folder = path.relative_to(root).parent.parts
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level > 0:
            base = [*folder[: len(folder) - node.level + 1], *(node.module or "").split(".")]
            name = ".".join(filter(None, base))
            for alias in node.names:
                inner = root.joinpath(*filter(None, name.split(".")), alias.name)
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                found.add(".".join(filter(None, (name, alias.name))) if is_module else name or "__init__")
    return found


def test_layers() -> None:
    """No module imports from a layer above its own, and none imports itself by way of others."""
    root = Path(__file__).parents[2] / "triton_relattn"
    layer_of = {name: number for number, names in enumerate(LAYERS) for name in names}
    graph = {}
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        graph[module.removesuffix(".__init__")] = imports_of(path, root) - {module}
    assert {name.partition(".")[0] for name in graph} == set(layer_of)
    for module, imported in graph.items():
        upward = {name for name in imported if layer_of[name.partition(".")[0]] > layer_of[module.partition(".")[0]]}
        assert not upward, (module, upward)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_tools_stand_apart() -> None:
    """They serve other projects, too: nothing of this repository is imported but what stands beside them."""
    root = Path(__file__).parents[2]
    for path in (root / "tools").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not {name.partition(".")[0] for name in names} & {"triton_relattn", "bench", "tests", "examples", "hub"}, path


def test_bench_has_one_door_to_the_kernels() -> None:
    root = Path(__file__).parents[2]
    for path in (root / "bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("triton_relattn.kernels"):
                assert node.module == "triton_relattn.kernels.introspect", path


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


@pytest.mark.thorough
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
    assert "NVIDIA, ROCm and XPU" in output and output.rstrip().count("pip install triton") == 2
    assert "pip install triton-windows" in output


@pytest.mark.thorough
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


@pytest.mark.thorough
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


@pytest.mark.thorough
@pytest.mark.parametrize("after", ["import", "forward"])
def test_interpreter_no_longer_asked_for(after: str) -> None:
    """The kernels keep the value that TRITON_INTERPRET had when they were loaded, even if the first backward comes after it was
    unset."""
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


@pytest.mark.thorough
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


ON_A_GPU = '''
import sys, warnings
from contextlib import nullcontext
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

class Properties:
    major, minor, name = 9, 0, "a GPU"

torch.cuda.get_device_properties = lambda device=None: Properties
from triton_relattn import fused_relative_attention
from triton_relattn._implementations import hardware
hardware.MEASURED = frozenset({(9, 0)})  # no warning that nobody has checked the kernels here

class Chosen(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.triton_relattn.attention_forward.default:
            print(args[-2])
        return function(*args, **(kwargs or {}))

def chosen(graph, _):
    print(*(node.args[-2] for node in graph.graph.nodes if node.target is torch.ops.triton_relattn.attention_forward.default))
    return graph

def attend(*tensors, **arguments):
    return fused_relative_attention(tensors[0], *tensors, **arguments)

def call(dtype=torch.float16, width=16, generation=9, compiled=False, dynamic=None, **arguments):
    """Prints the implementation, once for each graph if compiled, and then the warnings."""
    Properties.major = generation
    run = torch.compile(attend, fullgraph=True, backend=chosen, dynamic=dynamic) if compiled else attend
    with FakeTensorMode(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensors = [torch.empty(*shape, width, device="cuda", dtype=dtype) for shape in ((1, 1, 4), (1, 1, 4), (7,))]
        with nullcontext() if compiled else Chosen():
            run(*tensors, **arguments)
    for warning in caught:
        print(warning.category.__name__, warning.message)
'''


@pytest.mark.thorough
def test_a_gpu_without_numpy_gets_the_kernels() -> None:
    """Neither torch nor triton requires numpy; only Triton's interpreter does. The device is a stand-in, without memory."""
    program = f"""
import sys
sys.modules["numpy"] = None
{ON_A_GPU}
call()
from triton_relattn import can_run_triton
print(can_run_triton(torch.empty(1, 1, 1, 1), torch.empty(1, 1, 1, 1)))
"""
    assert run(program) == "triton\nFalse\n"


NO_TRITON = {
    'sys.modules["triton"] = None': "the package triton is not installed",
    'sys.modules["triton.runtime.jit"] = None': "the kernels cannot be loaded: ModuleNotFoundError: import of triton.runtime.jit",
}
NOT_FOR_KERNELS = {
    "dtype=torch.float64": "the kernels compute in float16, bfloat16 and float32, not in torch.float64",
    "width=272": "the kernels take head widths up to 256, got 272 (query), 272 (value)",
    "generation=7": "a GPU has no bfloat16 matrix units",
}


def assert_told_why(printed: str, reason: str) -> None:
    """Assert that a call which asks for blockwise gets no warning, and that calls which do not get one, once for all of them."""
    asked, default, warning, *again = printed.splitlines()
    assert {asked, default, *again} == {"blockwise"}
    assert warning.startswith("RuntimeWarning a call on a GPU is computed by ") and reason in warning
    assert 'implementation="blockwise" asks for that without this warning' in warning


@pytest.mark.thorough
@pytest.mark.parametrize("how", NO_TRITON)
def test_a_gpu_that_gets_blockwise_for_lack_of_triton_is_told_why(how: str) -> None:
    calls = "".join(f"call(implementation={implementation})\n" for implementation in ("'blockwise'", None, None))
    assert_told_why(run(f"{ON_A_GPU}\n{how}\n{calls}"), NO_TRITON[how])


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
def test_a_gpu_that_gets_blockwise_is_told_why(compiled: bool) -> None:
    """Once for each reason, also where torch.compile traces the call."""
    program = ON_A_GPU
    for what in NOT_FOR_KERNELS:
        for implementation in ("'blockwise'", None, None):
            program += f"call({what}, implementation={implementation}, compiled={compiled})\n"
        program += "print('---')\n"
    for printed, reason in zip(run(program).split("---\n"), NOT_FOR_KERNELS.values(), strict=False):
        assert_told_why(printed, reason)


NEWEST = ".".join(map(str, NEWEST_TRITON))
NEXT = f"{NEWEST_TRITON[0]}.{NEWEST_TRITON[1] + 1}.0"


@pytest.mark.thorough
def test_a_gpu_with_an_untested_triton_is_told() -> None:
    """Once in a process, and only where kernels are compiled: not for blockwise, nor on a CPU."""
    untested = (NEXT, f"{NEXT}+git5d4e", f"{NEWEST_TRITON[0] + 1}.0.0")
    known = (f"{NEWEST}.9", "3.8.0", "nightly")
    program = f"""
{ON_A_GPU}
import triton
from triton_relattn._core import warn
from triton_relattn._implementations import kernels as implementations
for number, version in enumerate({untested + known}):
    triton.__version__ = version
    implementations._untested_triton.cache_clear()
    warn._given.clear()
    call(implementation="blockwise")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(*(torch.zeros(1, 1, 4, 16) for _ in range(2)), torch.zeros(7, 16))
    for implementation in (None, "triton", None)[number % 2 :]:  # by default, or asked for: the first of all is told
        call(implementation=implementation)
    print("---")
"""
    *printed, rest = run(program).split("---\n")
    assert rest == "" and len(printed) == len(untested + known)
    for number, (version, lines) in enumerate(zip(untested + known, map(str.splitlines, printed), strict=True)):
        told = version in untested
        warned = lines[2 : 2 + told]
        assert lines[:2] + lines[2 + told :] == ["blockwise"] + ["triton"] * (3 - number % 2), lines
        for line in warned:
            assert line.startswith(f"RuntimeWarning Triton {version} is newer than {NEWEST}, ") and "make gpu" in line
            assert 'implementation="blockwise"' in line


@pytest.mark.thorough
def test_an_untested_triton_in_the_interpreter_is_no_matter() -> None:
    program = """
import os, warnings
os.environ["TRITON_INTERPRET"] = "1"
import torch, triton
triton.__version__ = "99.0.0"
from triton_relattn._implementations import choose_implementation
warnings.simplefilter("error")
print(choose_implementation("triton", torch.zeros(1, 1, 4, 16), torch.zeros(1, 1, 4, 16)).name)
"""
    assert run(program) == "triton\n"


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True], ids=["not_compiled", "compiled"])
def test_unchecked_kernels_on_a_gpu_warn_once(compiled: bool) -> None:
    """By default; not where they are asked for."""
    program = f"""
{ON_A_GPU}
hardware.MEASURED = frozenset()
for implementation in ("triton", None, None):
    call(implementation=implementation, compiled={compiled})
"""
    asked, default, warning, *again = run(program).splitlines()  # a compiled call is not traced again
    assert {asked, default, *again} == {"triton"}
    assert warning.startswith("RuntimeWarning the Triton kernels have been tested in an emulator")


@pytest.mark.thorough
def test_torch_compile_does_not_trace_what_looks_at_the_machine() -> None:
    """It would warn of a cache that it looks behind."""
    program = f"""
{ON_A_GPU}
for dynamic in (False, True):
    torch._dynamo.reset()
    call(compiled=True, dynamic=dynamic)
"""
    assert run(program) == "triton\ntriton\n"


@pytest.mark.thorough
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


@pytest.mark.thorough
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

"""Sizes of what a reader has in view at once: functions, parameters, files. They may shrink."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import triton_relattn

PACKAGE = Path(triton_relattn.__file__).parent
LONGEST_KERNEL, LONGEST_FUNCTION = 200, 145
MOST_PARAMETERS_OF_A_KERNEL = 16
LARGEST_FILE = 525
AVOIDED = ("What", "Of", "Those", "Its")


@functools.cache
def functions() -> list[tuple[Path, ast.FunctionDef]]:
    return [
        (path, node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    ]


def is_kernel(node: ast.FunctionDef) -> bool:
    return node.name.endswith("_kernel") and bool(node.decorator_list)


def test_kernels_take_few_arguments() -> None:
    kernels = {node.name: len(node.args.args) for _, node in functions() if is_kernel(node)}
    assert set(kernels) == {
        *("forward_kernel", "dq_kernel", "dkv_kernel", "dtable_kernel", "dtable_words_kernel", "dtable_ends_kernel"),
        *(
            "dp2c_kernel",
            "dp2c_words_kernel",
            "dq_words_kernel",
            "delta_kernel",
            "far_keys_kernel",
            "merge_kernel",
            "grid_forward_kernel",
            "grid_dq_kernel",
            "grid_dkv_kernel",
        ),
    }
    assert max(kernels.values()) <= MOST_PARAMETERS_OF_A_KERNEL, kernels


def test_functions_can_be_read() -> None:
    for path, node in functions():
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        most = LONGEST_KERNEL if is_kernel(node) else LONGEST_FUNCTION
        assert lines <= most, f"{path.name}: {node.name} has {lines} lines"


def test_a_kernel_and_its_launcher_share_a_file() -> None:
    kernels = [path for path, node in functions() if is_kernel(node)]
    assert len(kernels) == len(set(kernels))
    for path in kernels:
        launchers = [node.name for where, node in functions() if where == path and node.name.startswith(("launch_", "forward"))]
        assert launchers, path


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """As in "Load ...", "Return ...", "The ...": a sentence that begins with "What" has to be read twice."""
    for folder in (PACKAGE, *(PACKAGE.parent / name for name in ("bench", "examples", "tests"))):
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    first = node.value.split(maxsplit=1)[:1]
                    lines = (node.end_lineno or 0) - node.lineno
                    if first and first[0] in AVOIDED and (lines or len(node.value) > 30):
                        source = path.read_text().splitlines()[node.lineno - 1].strip()
                        assert not source.startswith('"""'), f"{path}: {source}"


def test_files_can_be_read() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = len(path.read_text().splitlines())
        assert lines <= LARGEST_FILE, f"{path}: {lines} lines"

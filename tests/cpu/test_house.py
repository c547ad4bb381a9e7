"""Where the kernels are to be found."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import triton_relattn

PACKAGE = Path(triton_relattn.__file__).parent


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


def test_a_kernel_and_its_launcher_share_a_file() -> None:
    kernels = [path for path, node in functions() if is_kernel(node)]
    assert len(kernels) == len(set(kernels))
    for path in kernels:
        launchers = [
            node.name
            for where, node in functions()
            if where == path and node.name.startswith(("launch_", "forward", "minimal_attention"))
        ]
        assert launchers, path

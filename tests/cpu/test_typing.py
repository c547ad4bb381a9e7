"""The types that a type checker sees when the package is installed from a wheel."""

from __future__ import annotations

import inspect
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import triton_relattn
from triton_relattn._core.arguments import Options, OptionsVarlen

ROOT = Path(__file__).parents[2]
USER = Path(__file__).with_name("typed_user.py")


@pytest.mark.thorough
def test_a_user_s_file_passes_mypy_strict(tmp_path: Path) -> None:
    """Results have the type implied by return_lse, and mypy sees no public name as private."""
    pytest.importorskip("mypy")
    pytest.importorskip("setuptools")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (installed,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    build = [sys.executable, "-c", "import setuptools; setuptools.setup()", "egg_info", "--egg-base", str(tmp_path)]
    subprocess.run([*build, "build_py", "--build-lib", str(installed)], check=True, cwd=ROOT, capture_output=True)
    assert (installed / "triton_relattn" / "py.typed").exists()
    (installed / "others.pth").write_text(str(Path(pytest.__file__).parents[1]))  # torch is also installed there
    shutil.copy(USER, tmp_path)  # in this file's folder, mypy would find the repository
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(tmp_path / "venv" / "bin" / "python")]
    command += ["--cache-dir", str(tmp_path / "cache"), "--config-file", "", USER.name]
    checked = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(("name", "options"), [("", Options), ("_varlen", OptionsVarlen)], ids=["padded", "packed"])
def test_every_option_has_its_type(name: str, options: Any) -> None:
    """The overloads, which type checkers read, have all parameters of the function, plus return_lse."""
    function: Any = getattr(triton_relattn, f"fused_relative_attention{name}")
    types, parameters = get_type_hints(function), inspect.signature(function).parameters.values()
    keywords = {parameter.name: parameter.default for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY}
    assert get_type_hints(options) == {name: types[name] for name in keywords if name != "return_lse"}
    assert options.__required_keys__ == {name for name, default in keywords.items() if default is inspect.Parameter.empty}

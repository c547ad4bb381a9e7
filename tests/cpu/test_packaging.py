"""The source distribution and the wheel hold the package with its data, and nothing that is only for developers."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import triton_relattn

ROOT = Path(__file__).parents[2]
VERSION = triton_relattn.__version__
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # setuptools puts other arguments there
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with both, built from a copy: setuptools leaves a build folder behind whose old files it would package."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "out", "build", "dist", "*.egg-info", "__pycache__"))
    done = subprocess.run([sys.executable, "-c", BUILD, folder], cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def package_files() -> set[str]:
    """All files of the package except its Markdown pages."""
    files = (path for path in (ROOT / "triton_relattn").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".md"}


def test_wheel(built: Path) -> None:
    """The package with its type marker, data and license, without tests, benchmarks and examples."""
    info = f"triton_relattn-{VERSION}.dist-info"
    with zipfile.ZipFile(built / f"triton_relattn-{VERSION}-py3-none-any.whl") as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(f"{info}/METADATA").decode())
    assert {name for name in names if not name.startswith(info)} == package_files() and "triton_relattn/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names and metadata["License-Expression"] == "Apache-2.0"
    required = [requirement for requirement in metadata.get_all("Requires-Dist") or () if "extra ==" not in requirement]
    assert required == ["torch>=2.11"], "torch brings the triton that it needs; another would be written over that"
    assert str(metadata.get_payload()).startswith((ROOT / "PACKAGE.md").read_text()[:200])


def test_source_distribution(built: Path) -> None:
    """The sources of the wheel, tests and documentation, without generated files."""
    with tarfile.open(built / f"triton_relattn-{VERSION}.tar.gz") as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = ("pyproject.toml", "PACKAGE.md", "README.md", "LICENSE", "NOTICE", "Makefile")
    assert package_files() | {*top, "tests/conftest.py", "bench/models.py"} <= names
    assert not [name for name in names if name.startswith(("out/", ".")) or "__pycache__" in name or name.endswith(".pyc")]


def test_the_version_is_one() -> None:
    """The citation and the newest section of the changelog have the version and its date."""
    citation, changelog = ((ROOT / name).read_text() for name in ("CITATION.cff", "CHANGELOG.md"))
    version, date = re.findall(r"^## \[(.*)\] - (.*)$", changelog, re.MULTILINE)[0]
    assert version == VERSION and f"\nversion: {version}\ndate-released: {date}\n" in citation


def test_a_placeholder_is_not_published(tmp_path: Path) -> None:
    """The workflow's check fails as long as pages name OWNER, and passes without."""
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    (check,) = re.findall(r"No placeholder is left\n\s+run: \|\n\s+(.*)\n", workflow)
    for name in check.partition('"OWNER" ')[2].split():
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    assert subprocess.run(["bash", "-ec", check], cwd=tmp_path, capture_output=True, check=False).returncode == 1
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        path.write_bytes(path.read_bytes().replace(b"OWNER", b"somebody"))
    assert subprocess.run(["bash", "-ec", check], cwd=tmp_path, capture_output=True, check=False).returncode == 0

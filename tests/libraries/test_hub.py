"""The exported repository for the Hugging Face hub: its files, and loading it with the package ``kernels``."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hub.__main__ import BACKENDS, digest, repository
from tests.libraries.standins import needs

ROOT = Path(__file__).parents[2]
REPO = "someone/triton-relattn"


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in Python."""
    given = {**os.environ, "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=cwd, env=given, check=False)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A git repository with this package, and files that git ignores."""
    root = tmp_path_factory.mktemp("checkout")
    for name in ("triton_relattn", "hub"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (root / ".gitignore").write_text("__pycache__/\n.env\n*.token\n/build/\n")
    who = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.invalid", "-c", "commit.gpgsign=false")
    for command in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "All")):
        subprocess.run(["git", *command], cwd=root, check=True)
    for name in ("triton_relattn/.env", "triton_relattn/kernels/hub.token", "hub/files/.env"):
        (root / name).write_text("secret")
    return root


@pytest.fixture(scope="module")
def exported(checkout: Path) -> Path:
    done = run("-m", "hub", "--repo", REPO, cwd=checkout, PYTHONPATH="")
    assert done.returncode == 0, done.stderr
    return checkout / "build" / "hub"


def test_only_what_git_tracks(exported: Path) -> None:
    """No file that git ignores is published."""
    names = {path.name for path in exported.rglob("*")}
    assert "layers.py" in names and not {".env", "hub.token", "__pycache__"} & names


@pytest.mark.parametrize("change", ["triton_relattn/new.py", "triton_relattn/tables.py", "hub/files/CARD.md", ""])
def test_other_folders_than_clean_checkouts_are_refused(change: str, checkout: Path, tmp_path: Path) -> None:
    """Uncommitted changes, and a copy without git: nothing is written, and the message says what to do."""
    place, ignored = (tmp_path, ()) if change else (checkout / "build", (".git", "build"))
    root = shutil.copytree(checkout, place / "copy", ignore=shutil.ignore_patterns(*ignored))
    said, status = "copy is not a git checkout\n", 1
    if change:
        (root / change).open("a").write("\n")
        said, status = f"commit or stash the changes first: {'??' if 'new' in change else ' M'} {change}", 2
    done = run("-m", "hub", "--out", str(tmp_path / "out"), cwd=root, PYTHONPATH="")
    assert done.returncode == status and said in done.stderr and not (tmp_path / "out").exists()
    assert change or (done.stderr.endswith(said) and done.stderr.count("\n") == 1)


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "../../x/y", "../x", "", "/", "a/", "/b", "a b/c", "a/b\n"])
def test_a_repository_has_an_owner_and_a_name(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="must be owner/name"):
        repository(name)
    assert repository("some-one/triton_relattn.2") == "some-one/triton_relattn.2"


def test_only_torch_and_triton_are_imported(exported: Path) -> None:
    """Imports of the package are relative; others are torch, triton and Python's standard library."""
    files = list((exported / "build" / "torch-cuda").rglob("*.py"))
    assert len(files) > 50
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [str(node.module)]
            strange = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"torch", "triton"}
            # For types only, not at runtime.
            assert strange <= {"typing_extensions"}, (path, strange)


def test_digests(exported: Path) -> None:
    """metadata.json of each variant has the digests of its files, and a module name that depends on them."""
    names = set()
    for backend in BACKENDS:
        variant = exported / "build" / f"torch-{backend}"
        metadata = json.loads((variant / "metadata.json").read_text())
        held = digest(variant)
        assert held.pop("metadata.json")
        assert metadata["digest"]["files"] == held and metadata["id"].isidentifier()
        assert "layers.py" in held and "kernels/forward.py" in held
        names.add(metadata["id"])
    assert len(names) == len(BACKENDS)


LOADED = """
import sys
from pathlib import Path
import torch
from kernels import get_loaded_kernels, get_local_kernel
import triton_relattn

loaded = get_local_kernel(Path(sys.argv[1]), backend="cpu")
torch.manual_seed(0)
inputs = [torch.randn(1, 2, 33, 8, requires_grad=True) for _ in range(3)] + [torch.randn(65, 8, requires_grad=True)]
results = []
for package in (loaded, triton_relattn):
    out = package.fused_relative_attention(*inputs, is_causal=True)
    results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
assert all(torch.equal(one, other) for one, other in zip(*results))
assert loaded.fused_relative_attention is not triton_relattn.fused_relative_attention
name = get_loaded_kernels()[0].metadata.id
assert loaded.__name__ == name and hasattr(torch.ops, name)
assert set(loaded.__all__) > set(triton_relattn.__all__) - {"enable", "disable"}
compiled = torch.compile(lambda *given: loaded.fused_relative_attention(*given), fullgraph=True, backend="aot_eager")
assert torch.equal(compiled(*inputs), loaded.fused_relative_attention(*inputs))
sys.path.insert(0, str(Path(sys.argv[1]) / "build" / "torch-cpu"))
import importlib.util
older = Path(sys.path[0]) / "triton_relattn" / "__init__.py"
spec = importlib.util.spec_from_file_location("an_older_name", older)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
assert torch.equal(module.fused_relative_attention(*inputs), loaded.fused_relative_attention(*inputs))
print(loaded.layers.RelPositionMultiHeadedAttention.__mro__[1].__name__)
"""


@needs("kernels")
def test_kernels_loads_it(exported: Path) -> None:
    """It loads beside the installed package with separate operators, also as older versions of kernels do, and compiles."""
    done = run("-c", LOADED, str(exported), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "Module\n"), done.stderr


@needs("kernels")
def test_its_own_test(exported: Path) -> None:
    """The published test passes with only the repository's name."""
    done = run("-m", "pytest", "-q", "tests", cwd=exported, LOCAL_KERNELS=f"{REPO}={exported}", PYTHONPATH="")
    assert done.returncode == 0, done.stdout + done.stderr

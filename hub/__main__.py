"""``python -m hub --out build/hub`` exports a repository that the package ``kernels`` of Hugging Face loads.

.. code-block:: text

    build.toml, flake.nix, CARD.md        for its kernel-builder
    torch-ext/triton_relattn/             the sources: the package without what needs other packages, and layers.py
    tests/                                a test of what is loaded
    build/torch-cpu/, build/torch-cuda/   what is loaded: the sources again, and metadata.json with a digest of them

The kernels are Python, which Triton compiles: what is built is a copy.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE, FILES = ROOT / "triton_relattn", Path(__file__).parent / "files"
NAME, VERSION, LICENSE = "triton-relattn", 0, "Apache-2.0"
"""Version 0: the hub's for kernels that may change."""
BACKENDS = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0", "8.6", "8.9", "9.0", "10.0", "12.0"]}}
LEFT_OUT = (
    "plots.py",
    "__main__.py",
    "transformers",
    "espnet.py",
    "nemo",
    "speechbrain.py",
    "x_transformers",
    "structure",
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hub", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "hub", help="the folder, which is replaced")
    parser.add_argument(
        "--repo", type=repository, default=f"OWNER/{NAME}", help="the repository on the hub, for build.toml and the card"
    )
    arguments = parser.parse_args()
    if changed := git("status", "--porcelain", "--", PACKAGE.name, "hub"):
        parser.error(f"commit or stash the changes first: {'; '.join(changed.splitlines())}")
    export(arguments.out, arguments.repo)
    print(arguments.out)


def repository(name: str) -> str:
    """Return the name of a repository if it is owner/name.

    Raises:
        argparse.ArgumentTypeError: it is not.
    """
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be owner/name, got {name!r}")
    return name


def git(*arguments: str) -> str:
    """Return what git says of this repository; exit if that is no checkout: only what git tracks is to be published."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        raise SystemExit(f"python -m hub: error: only files that git tracks are exported, and {ROOT} is not a git checkout")
    return subprocess.run(["git", "-C", ROOT, *arguments], stdout=subprocess.PIPE, text=True, check=True).stdout


def export(out: Path, repo: str) -> None:
    """Write the repository; out is replaced."""
    shutil.rmtree(out, ignore_errors=True)
    module = NAME.replace("-", "_")
    sources = out / "torch-ext" / module
    copy_sources(sources)
    (out / "tests").mkdir()
    for name, place in (("build.toml", out), ("flake.nix", out), ("CARD.md", out), ("test_triton_relattn.py", out / "tests")):
        (place / name).write_text((FILES / name).read_text().replace("OWNER/triton-relattn", repo))
    for backend, described in BACKENDS.items():
        variant = out / "build" / f"torch-{backend}"
        shutil.copytree(sources, variant)
        add_older_layout(variant, module)
        files = digest(variant)
        written = {
            # A name for each state of the sources, so that several can be loaded in one process.
            "id": f"_{module}_{backend}_{hashlib.sha256(json.dumps(files).encode()).hexdigest()[:7]}",
            "name": NAME,
            "version": VERSION,
            "license": LICENSE,
            "python-depends": [],
            "backend": described,
            "digest": {"algorithm": "sha256", "files": files},
        }
        (variant / "metadata.json").write_text(json.dumps(written, indent=2) + "\n")


def copy_sources(folder: Path) -> None:
    """Copy the part of the package that imports nothing but torch and triton, and say in it what is public.

    Only files that git tracks are copied, and no others that lie there, such as .env.
    """
    for name in git("ls-files", "-z", "--", PACKAGE.name).split("\0")[:-1]:
        path = Path(name).relative_to(PACKAGE.name)
        if path.suffix != ".md" and not set(path.parts) & set(LEFT_OUT):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / path)
    for name in ("enable.py", "report.py"):
        (folder / "integrations" / name).unlink()
    (folder / "layers.py").write_text((FILES / "layers.py").read_text())
    init = folder / "__init__.py"
    text = init.read_text().replace("from . import tables\n", "from . import layers, tables\n")
    text = (
        text.replace('    "disable",\n    "enable",\n', "").partition("\n\ndef __getattr__")[0] + "\n"
    )  # these need the libraries
    text = text.replace("if TYPE_CHECKING:\n    from .integrations.enable import disable, enable\n\n", "")
    text = text.replace("from typing import TYPE_CHECKING, Any\n\n", "")
    text = "\n".join(line for line in text.split("\n") if not line.startswith("enable, disable "))
    assert "enable" not in text
    init.write_text(text.replace('    "tables",\n', '    "layers",\n    "tables",\n'))


def add_older_layout(variant: Path, module: str) -> None:
    """Add the folder in which older versions of kernels look for the package, which has the same names."""
    (variant / module).mkdir()
    (variant / module / "__init__.py").write_text((FILES / "older_layout.py").read_text())


def digest(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file, in base 64, by its path."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {name: base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode() for name, path in files.items()}


if __name__ == "__main__":
    main()

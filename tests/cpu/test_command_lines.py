"""Command lines: those of the pages run where triton is not installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAM = r"python3? -m ((?:bench|triton_relattn|examples\.\w+)\b(?!\.)[^`\n]*"
TWO = "--methods triton_relattn,gather"
MORE = {
    "bench speed": f"--cases small --seconds 0 --no-verify {TWO}",
    "bench memory": f"--cases small --no-verify {TWO}",
    "bench models": "--families parakeet_attention --lengths 16 --batches 2 --rounds 1 --seconds 0 --small --no-memory --alone",
    "bench accuracy": "--length 20 --cases normal --dtypes fp32",
    "bench plot": "--out FOLDER",
    "bench verify": "--help",
    "examples.": "--help",
}
"""What is put behind a command so that it takes seconds, by how it begins."""
INSTEAD = {"n1500": "n20", "out/bench/": "bench/results/cpu/", "package.module:factory": "tests.cpu.stock:SpeechBlock"}
NEED_TRITON = tuple(f"bench {verb}" for verb in ("tune", "compile", "cycles", "host", "predictions"))
NEED_A_GPU = ("triton_relattn check", "triton_relattn tune")


def printed() -> list[str]:
    """The commands of all pages, in the text, or in a line of their own with a description behind."""
    found = ["examples.demo"]
    for page in PAGES:
        found += re.findall(rf"`{PROGRAM}(?:\n[^`\n]+)?)`", page.read_text())
        lines = re.findall(rf"^ *{PROGRAM})$", page.read_text(), re.MULTILINE)
        found += [re.split(r"\s{2,}(?=[^\s-])", line)[0] for line in lines]
    return [" ".join(each.split()) for each in found]


def made_small(command: str) -> str:
    for old, new in INSTEAD.items():
        command = command.replace(old, new)
    return " ".join([command, *(more for start, more in MORE.items() if command.startswith(start))])


def run(program: str, tmp_path: Path) -> str:
    """What a program prints, in a process that finds no triton, as those that it starts."""
    (tmp_path / "sitecustomize.py").write_text('import sys\n\nsys.modules["triton"] = None\n')
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN_ALL = """
import contextlib, io, json, os, runpy, sys, traceback
found = {{}}
for command in {commands}:
    module, *sys.argv[1:] = command.replace("FOLDER", {folder!r}).split()
    said, status = io.StringIO(), 0
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
            status = -1
    found[command] = (status, said.getvalue())
print(json.dumps(found))
"""
"""Runs commands as python -m does, in one process, which imports torch once."""


@pytest.mark.thorough
def test_commands_of_the_pages_without_triton(tmp_path: Path) -> None:
    """Most do their work. What compiles kernels says what it needs, and what needs a GPU says so."""
    for package in ("matplotlib", "music21", "tqdm", "transformers"):
        pytest.importorskip(package)
    commands = sorted({made_small(each) for each in printed() if "<" not in each})
    assert len(commands) > 20
    *_, found = run(RUN_ALL.format(commands=commands, folder=str(tmp_path)), tmp_path).splitlines()
    for command, (status, said) in json.loads(found).items():
        if command.startswith(NEED_TRITON):
            assert (status, said) == (2, "this needs the package triton: pip install triton\n"), command
        elif command.startswith(NEED_A_GPU):
            assert status == 2 and "There is no GPU here" in said, command
        else:
            assert status in (0, None) and said, (command, said)


def test_nothing_that_measures_on_a_cpu_imports_triton(tmp_path: Path) -> None:
    """Nor does it need more than torch to be imported and to say how it goes in a terminal."""
    assert run(IMPORTS, tmp_path) == "a b\n"


IMPORTS = """
import sys
sys.modules.update(dict.fromkeys(("matplotlib", "music21", "numpy", "tqdm", "transformers")))
from bench import models
from bench.report.progress import progress
from bench.verbs import accuracy, context, listing, memory, plot, speed, verify
from examples.demo.__main__ import arguments_of
sys.stderr.isatty = lambda: True
print(*progress("ab", str))
"""


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["context_parallel", "music_transformer", "sam"])
def test_examples_run_as_files(name: str) -> None:
    pytest.importorskip("tqdm")
    words = [sys.executable, str(ROOT / "examples" / f"{name}.py"), "--help"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "usage: " in done.stdout, done.stderr

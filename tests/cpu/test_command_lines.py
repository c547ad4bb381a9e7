"""Command lines: those of the pages run without triton; ``--help`` works; odd ones end at once, with a line and status 2."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import VERBS
from bench.report.rows import STAMP
from bench.verbs import speed

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(set((ROOT / "docs").glob("*.md")) - {ROOT / "docs/map.md"})]
PROGRAM = r"python3? -m ((?:bench|triton_relattn|examples\.\w+)\b(?!\.)[^`\n]*"
TWO = "--methods triton_relattn,gather"
MORE = {
    "bench speed": f"--cases small --seconds 0 --no-verify {TWO}",
    "bench compare": "--seconds 0",
    "bench memory": f"--cases small --no-verify {TWO}",
    "bench models": "--families parakeet_attention --lengths 16 --batches 2 --rounds 1 --seconds 0 --small --no-memory",
    "bench accuracy": "--length 20 --cases normal --dtypes fp32",
    "bench plot": "--out FOLDER",
    "bench readme": "--out FOLDER",
    "triton_relattn tune": "--shape b1,h1,n20,d16",
    "triton_relattn measure": "--length 20 --seconds 0 --inputs tests.cpu.test_measure:inputs",
    "examples.": "--help",
}
"""Arguments that make a command finish in seconds, by the command's beginning."""
INSTEAD = {
    "n1500": "n20",
    "n2048": "n20",
    "compare main": "compare HEAD",
    "lengths 200": "lengths 2",
    "out/bench/": "bench/results/cpu/",
    "enable --model package.module:factory": "enable --model tests.enable.models:small_t5",
    "package.module:factory": "tests.enable.stock:SpeechBlock",
}
NEED_TRITON = (*(f"bench {verb}" for verb in ("tune", "compile", "host", "gpu")), "bench.gpu")
NEED_A_GPU = ("triton_relattn check", "triton_relattn tune")


def need_all(*packages: str) -> None:
    """Skip a test where a package that some commands import is not installed."""
    for package in ("matplotlib", "music21", "tqdm", "transformers", *packages):
        pytest.importorskip(package)


def printed() -> list[str]:
    """The commands on all pages, inline or on a line of their own, possibly followed by a description."""
    found = ["examples.demo"]
    for page in PAGES:
        text = re.sub(r"\\\n\s*", "", page.read_text())  # a command may go on in the next line
        found += re.findall(rf"`{PROGRAM}(?:\n[^`\n]+)?)`", text)
        lines = re.findall(rf"^ *{PROGRAM})$", text, re.MULTILINE)
        found += [re.split(r"\s{2,}(?=[^\s-])", line)[0] for line in lines]
    return [" ".join(command.split()) for command in found]


def made_small(command: str) -> str:
    for old, new in INSTEAD.items():
        command = command.replace(old, new)
    return " ".join([command, *(more for start, more in MORE.items() if command.startswith(start))])


def main_of(program: str) -> Any:
    """The function that ``python -m`` runs."""
    is_module = importlib.util.find_spec(program).submodule_search_locations is None  # type: ignore[union-attr]
    return importlib.import_module(program if is_module else f"{program}.__main__").main


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
    """Most run to completion. Those that compile kernels or need a GPU report what is missing."""
    need_all()
    commands = sorted({"bench.gpu --results FOLDER", *(made_small(command) for command in printed() if "<" not in command)})
    assert len(commands) > 20
    (tmp_path / "sitecustomize.py").write_text('import sys\n\nsys.modules["triton"] = None\n')
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-c", RUN_ALL.format(commands=commands, folder=str(tmp_path))]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for command, (status, said) in json.loads(done.stdout.splitlines()[-1]).items():
        if command.startswith(NEED_TRITON):
            assert (status, said) == (2, "this needs the package triton: pip install triton\n"), command
        elif command.startswith(NEED_A_GPU):
            assert status == 2 and "There is no GPU here" in said, command
        else:
            assert status in (0, None) and said, (command, said)


ODD = """
    bench speed --shape b1,h3,kv2,n8
    bench speed --cases small --lengths 512
    bench speed --shape n5 --table 4
    bench speed --seconds nan
    bench speed --csv {file}/rows.csv
    bench accuracy --length 0
    bench models --lengths 0
    bench compile --features fuller
    bench tune --profile {file}/profile.csv
    bench compare /nonexistent host
    bench compare HEAD speed --seconds nan
    bench gpu --results {folder} --parts nothing
    bench plot {folder}
    bench plot {others}
    bench plot {lacking}
    triton_relattn enable --model torch.nn:Identity --lengths 0
    triton_relattn measure --length 64
    examples.demo --seconds -1
    examples.sam --small --sides 8
    examples.context_parallel --ranks 0
    examples.music_transformer train --heads 3
    examples.music_transformer train --resume --out {folder}
    examples.music_transformer generate {folder}
    examples.music_transformer summary {folder}/nothing
""".strip().splitlines()


@pytest.mark.parametrize("command", [line.strip() for line in ODD])
def test_odd_arguments_end_with_a_line(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Invalid arguments end the command with one line, before any long work starts."""
    need_all("triton")
    monkeypatch.setattr(speed, "tests_pass", lambda _: pytest.fail("the tests of what is measured begin"))
    monkeypatch.chdir(ROOT)
    contents = {"file": "", "others": "a,b\n1,2\n", "lacking": f"verb,{','.join(STAMP)}\nspeed{',' * len(STAMP)}\n"}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    program, *words = shlex.split(command.format(folder=tmp_path, **{name: tmp_path / name for name in contents}))
    with pytest.raises(SystemExit) as ended:
        main_of(program)(words)
    assert ended.value.code == 2
    assert re.fullmatch(r".*: error: .*\n", capsys.readouterr().err)
    assert {path.name for path in tmp_path.iterdir()} == set(contents)


PROGRAMS = (
    *(f"bench {verb}" for verb in VERBS),
    *(f"triton_relattn {verb}" for verb in ("", "enable", "check", "tune")),
    *("bench.gpu", "hub", "examples.demo", "examples.sam", "examples.context_parallel"),
    *(f"examples.music_transformer {verb}" for verb in ("", "train", "summary")),
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_help(program: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command's --help prints its usage."""
    need_all("triton")
    name, *words = program.split()
    monkeypatch.setattr(sys, "argv", [name, *words, "--help"])
    with pytest.raises(SystemExit) as ended:
        main_of(name)()
    assert ended.value.code == 0 and "usage: " in capsys.readouterr().out

"""The pages: examples in README, docs/ and docstrings run, and so do command lines, without triton; what is said of arguments,
families, papers and the longest audio is true; and English and lines are as CONTRIBUTING.md asks.

That links lead somewhere and every page is in the contents is checked by ``make docs``.
"""

from __future__ import annotations

import ast
import csv
import doctest
import importlib.util
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.__main__ import VERBS
from bench.report import longest
from bench.report.longest import EAGER, ENCODERS, Encoder
from bench.report.rows import STAMP
from bench.verbs import speed
from tests.libraries.standins import needs
from triton_relattn import enable, fused_relative_attention
from triton_relattn.__main__ import main
from triton_relattn.integrations.report import _Counter
from triton_relattn.integrations.transformers import supported_families

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "PACKAGE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
FURTHER = """CHANGELOG.md SECURITY.md examples/README.md bench/gpu/README.md hub/files/CARD.md tools/*/README.md .github/*.md
    triton_relattn/kernels/*.md"""
MARKDOWN = [*PAGES, *(path for name in FURTHER.split() for path in sorted(ROOT.glob(name)))]
every_page = pytest.mark.parametrize("page", MARKDOWN, ids=lambda page: page.relative_to(ROOT).as_posix())
AVOIDED = re.compile(
    r"\banew\b|\bonce more\b|\btold\b|\bhand(?:s|ed)? on\b|\bas many\b|\btoo(?=[.;:)]|$)|\bin turn\b|\bnot there\b|\bfor each\b"
    r"|\b(?:is|are) made\b|\bwhat is left\b|\bas it stands\b|\bstands? at\b|\bprove[nd]\b|\bbut for\b|\bas \w+ has it\b"
    r"|\btruth values\b|\bnumbers to add\b|\bmasks? of numbers\b|\bof the \w+ of the \w+ of\b",
    re.IGNORECASE,
)
"""Phrases that a native engineer would not use."""
LEGITIMATE = re.compile(r"\bfor each (?:other|in)\b")
ATOM = re.compile(r"(?:`+[^`]*`+|!?\[[^\]]*\]\([^)]*\)|<[^>]+>|\S)+")
"""Text without a possible line break: a word, a code span, a link."""


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def cells_of(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table(name: str, first: str) -> list[list[str]]:
    """The rows of the table of a page whose first column has this heading."""
    return [cells_of(line) for line in text_of(f"docs/{name}").split(f"\n| {first} |")[1].split("\n\n")[0].splitlines()[2:]]


WITH_EXAMPLES = [page for page in PAGES if PYTHON.search(page.read_text())]
COMPILES = [pytest.mark.thorough]  # docs/torch.md, with inductor


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=COMPILES if page.name == "torch.md" else (), id=page.name) for page in WITH_EXAMPLES]
)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every example of a page runs alone, as a reader copies it."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    for example in PYTHON.findall(page.read_text()):
        names: dict[str, Any] = {}
        exec(example, names)
        assert "out" not in names or names["out"].isfinite().all()
        assert max(map(len, example.splitlines())) <= 88, "what is wider than the site's column is cut there"


def avoided(text: str) -> list[str]:
    """The phrases in a text for which English has better ones, with their context."""
    text = LEGITIMATE.sub("", " ".join(text.split()))
    return [text[max(0, found.start() - 40) : found.end() + 40] for found in AVOIDED.finditer(text)]


@every_page
def test_wording_of_pages(page: Path) -> None:
    """Of the changelog, only the newest section is checked."""
    text = page.read_text()
    assert not avoided(text.split("\n## ")[1] if page.name == "CHANGELOG.md" else text)


SAYING = ("warn", "warn_once", "add_argument", "ArgumentParser", "Parser")


def test_wording_of_messages() -> None:
    """Wording of errors, warnings and command-line help."""
    for path in sorted((ROOT / "triton_relattn").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if isinstance(node, ast.Raise) or called in SAYING:
                parts = [str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)]
                assert not avoided(" ".join(parts)), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


@every_page
def test_width_of_lines(page: Path) -> None:
    """At most 80 columns, 88 for code. Table rows and unbreakable text may be wider."""
    in_code, wide = False, []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        is_code = in_code or line.startswith("    ")
        breakable = is_code or len(ATOM.findall(re.sub(r"^\s*([-*]|\d+\.)\s", "", line))) > 1
        if len(line) > (88 if is_code else 80) and breakable and not line.lstrip().startswith("|"):
            wide.append(f"{number}: {line}")
    assert not wide


MODULES = ("functional", "grids", "positions", "tables", "merging", "testing", "nn.table", "nn.attention", "integrations.enable")
OF_TRANSFORMERS = ("integrations.transformers.families",)


@pytest.mark.parametrize("name", (*MODULES, *OF_TRANSFORMERS))
def test_docstring_examples(name: str) -> None:
    if name in OF_TRANSFORMERS:
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    names = {"torch": torch, "fused_relative_attention": fused_relative_attention}
    result = doctest.testmod(importlib.import_module(f"triton_relattn.{name}"), extraglobs=names)
    assert result.attempted > 0 and result.failed == 0


def test_the_long_description_has_no_relative_links() -> None:
    """A package index cannot resolve them."""
    page = text_of("PACKAGE.md")
    assert "![" not in page and not re.search(r"\]\((?!\w+:|#)", page)


def test_make_targets_exist() -> None:
    """Every ``make target`` that a page names exists in the Makefile, and ``make help`` lists it."""
    helped = set(re.findall(r"^([a-z-]+):.*?## ", text_of("Makefile"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:`|^    )make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert {"setup", "test", "docs"} <= named <= helped, named - helped


def test_the_map() -> None:
    """Its modules exist, and import at their top only from their own row and from lower ones."""
    package = ROOT / "triton_relattn"
    files = {path: path.relative_to(package).with_suffix("").parts for path in package.rglob("*.py")}
    rooms, ways = (table.partition("\n\n")[0] for table in text_of("docs/map.md").split("|---|---|\n")[1:])
    for name in re.findall(r"`([\w/]+)`", ways):
        assert any("/".join(parts).endswith(name) for parts in files.values()), name
    row = {name: number for number, line in enumerate(rooms.splitlines()) for name in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert {parts[0] for parts in files.values()} - {"__init__"} == row.keys()
    for path, parts in files.items():
        for node in ast.parse(path.read_text()).body if parts != ("__init__",) else ():
            if isinstance(node, ast.ImportFrom) and node.level:
                origin = (*parts[: len(parts) - node.level], *(node.module or "").split("."))
                for name in origin[:1] if origin[0] else [alias.name for alias in node.names if alias.name in row]:
                    assert row[name] >= row[parts[0]], f"{path} imports {name}"


@pytest.mark.thorough
def test_figures_are_drawn(tmp_path: Path) -> None:
    """docs/figures.py draws exactly the figures in docs/_static. (Their bytes depend on the version of matplotlib.)"""
    pytest.importorskip("matplotlib")
    subprocess.run([sys.executable, ROOT / "docs" / "figures.py", "--out", tmp_path], check=True)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in (ROOT / "docs" / "_static").glob("*.svg")}


def test_every_family_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Every family is listed in docs/transformers.md, in README and on the command line, which without arguments describes the
    environment."""
    rows, families = table("transformers.md", "family"), supported_families()
    assert [row[:2] for row in rows] == [[family.name, family.adds] for family in families]
    assert f"[{len(rows)} families](docs/transformers.md)" in " ".join(text_of("README.md").split())
    assert main([]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said and "device: " in said and "implementation: " in said
    assert main(["--families"]) == 0
    for line, family in zip(capsys.readouterr().out.splitlines()[1:], families, strict=True):
        assert line.startswith(f"{family.name} ") and f" {family.adds} " in line and line.endswith(f" {family.since}")


def test_names_of_other_libraries_are_explained() -> None:
    """For each argument in the table of docs/migrate.md, the error names its equivalent here or says that it is not needed."""
    lines = [line for line in text_of("docs/migrate.md").splitlines() if line.startswith("| ")]
    names = {name for line in lines[1:] for cell in cells_of(line)[2:] for name in re.findall(r"`(\w+)(?:=[^`]*)?`", cell)}
    others = names - set(inspect.signature(fused_relative_attention).parameters)
    assert len(others) >= 5
    tensor, attend = torch.zeros(1, 1, 4, 8), fused_relative_attention
    for name in others:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .*"):
            attend(tensor, tensor, tensor, **{name: 1})  # type: ignore[call-overload]


def test_the_first_screen_fits_a_phone() -> None:
    """README has a hundred lines at most, and the words that a table cannot break are no wider than a phone's screen."""
    lines = text_of("README.md").splitlines()
    assert len(lines) <= 100
    rows = [cells_of(re.sub(r"\]\([^)]*\)|[*\[]", "", line)) for line in lines if line.startswith("|")]
    assert rows
    for row in rows:
        assert sum(max(map(len, cell.split() or [""])) + 2 for cell in row) <= 48, row


def test_answers_are_short_and_linked() -> None:
    answers = re.split(r"^## ", text_of("docs/answers.md"), flags=re.MULTILINE)[1:]
    assert len(answers) >= 20
    for answer in answers:
        heading, _, text = answer.partition("\n")
        assert len(text.strip().splitlines()) <= 5, heading
        assert re.search(r"\]\((?!http)[\w./-]+\.md", text), heading


def bibliography() -> dict[str, dict[str, str]]:
    """The entries of docs/cite.md: key -> fields."""
    found = re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", text_of("docs/cite.md"), re.DOTALL | re.MULTILINE)
    return {key: dict(re.findall(r"(\w+)\s*=\s*\{(.*?)\},?\n(?=\s+\w+\s*=|\Z)", fields, re.DOTALL)) for key, fields in found}


def plain(text: str) -> str:
    """Text without the braces that protect capitals, on one line."""
    return " ".join(text.replace("{", "").replace("}", "").split())


def test_the_citation_has_the_papers() -> None:
    """CITATION.cff and docs/cite.md have the same titles, years and arXiv identifiers."""
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    entries = bibliography()
    software = entries.pop("triton_relattn")
    assert plain(software["title"]) == citation["title"] and software["version"] == citation["version"]
    assert software["year"] == str(citation["date-released"])[:4]
    assert plain(software["author"]) == citation["authors"][0]["name"]
    page_entries = {(plain(entry["title"]), int(entry["year"]), entry.get("eprint")) for entry in entries.values()}
    file_entries = {
        (reference["title"], reference["year"], reference.get("url", "").partition("arxiv.org/abs/")[2] or None)
        for reference in citation["references"]
    }
    assert page_entries == file_entries and len(page_entries) == len(entries) == len(citation["references"])


def test_every_term_has_a_paper() -> None:
    """Every row of the table in docs/models.md is in the table of docs/cite.md, and its citation keys exist."""
    rows = table("cite.md", "model or term")
    assert {key for row in rows for key in re.findall(r"`(\w+)`", row[1])} == set(bibliography()) - {"triton_relattn"}
    named = "\n".join(row[0] for row in rows)
    for model, *_ in table("models.md", "model"):
        for name in re.findall(r"[A-Z][\w-]+(?: [A-Z0-9][\w-]*)?", model.split("(")[0].split(", proj")[0]):
            assert name in named, name


# Command lines: those of the pages run without triton; ``--help`` works; odd ones end at once, with a line and status 2.

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
    for page in (ROOT / "README.md", *sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs/map.md"})):
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


# docs/long-audio.md: what it says is computed, and its formulas are the bytes that stock and enabled models allocate.

SMALL: dict[str, Any] = {"layers": 2, "width": 128, "channels": 32, "parameters": 0.0}
FRAMES, NEAR = 8192, 0.05


def test_the_table_of_long_audio() -> None:
    assert f"<!-- begin longest: python -m bench.report.longest -->\n{longest.table()}\n\n<!-- end -->" in text_of(
        "docs/long-audio.md"
    )


@pytest.mark.parametrize("way", longest.WAYS)
@pytest.mark.parametrize("ours", [False, True])
def test_the_longest_audio_fits(way: str, ours: bool) -> None:
    count, per_parameter = longest.WAYS[way]
    for encoder in ENCODERS:
        frames = round(longest.longest(encoder, way, ours, 40) / encoder.factor / longest.HOP)
        room = 40 * longest.GIBIBYTE - per_parameter * encoder.parameters
        assert count(encoder, frames, ours) <= room < count(encoder, frames + 1, ours)


def parakeet(encoder: Encoder, dropout: float) -> Any:
    """A Parakeet encoder from transformers."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": encoder.width, "num_hidden_layers": encoder.layers, "num_attention_heads": encoder.heads}
    sizes |= {"intermediate_size": 4 * encoder.width, "subsampling_conv_channels": encoder.channels}
    names = ("dropout", "dropout_positions", "attention_dropout", "activation_dropout", "layerdrop")
    config = transformers.ParakeetEncoderConfig(**sizes, **dict.fromkeys(names, dropout))
    return transformers.ParakeetEncoder(config)


def conformer(encoder: Encoder, dropout: float) -> Any:
    """A Conformer from NeMo."""
    from tests.libraries.models import nemo

    sizes: dict[str, Any] = {"n_layers": encoder.layers, "d_model": encoder.width, "n_heads": encoder.heads}
    sizes |= {"feat_in": longest.MEL, "subsampling": "striding" if encoder.factor == 4 else "dw_striding"}
    sizes |= {"subsampling_factor": encoder.factor, "subsampling_conv_channels": encoder.channels}
    return nemo(**sizes, dropout=dropout, dropout_att=dropout)


def allocated(encoder: Encoder, ours: bool, way: str, dropout: float = 0.0, frames: int = FRAMES, device: str = "meta") -> int:
    """Peak bytes of the tensors, in training after a call that has made the sinusoids. SDPA's GPU kernels allocate nothing per
    pair; the meta device's version does in bfloat16, in float32."""
    is_nemo, dtype = encoder.pairs is EAGER, torch.bfloat16 if way.endswith("bfloat16") else torch.float32
    model, mel = (conformer if is_nemo else parakeet)(encoder, dropout), encoder.factor * frames
    if ours:
        assert enable(model)
    if way == "checkpointed":
        model.gradient_checkpointing_enable()
    model.to(device, dtype)
    signal = torch.zeros((1, longest.MEL, mel) if is_nemo else (1, mel, longest.MEL), device=device, dtype=dtype)
    given = {"audio_signal": signal, "length": torch.tensor([mel], device=device)} if is_nemo else {"input_features": signal}
    for train in (False, True) if way in ("training", "checkpointed") else (False,):
        model.train(train)
        with pytest.MonkeyPatch.context() as patch, _Counter() as counter, torch.set_grad_enabled(train):
            if dtype == torch.bfloat16:
                patch.setattr(nn.functional, "scaled_dot_product_attention", lambda query, *_, **__: torch.empty_like(query))
            out: Any = model(**given)
            if train:
                (out[0] if isinstance(out, tuple) else out.last_hidden_state).sum().backward()
    return counter.peak


COUNTED = ("inference", "training", "checkpointed", "inference in bfloat16")
NEMO = [
    pytest.param(encoder, way, dropout, marks=needs("nemo"), id=f"nemo-{encoder.name}-{way}-{dropout}")
    for encoder in ENCODERS
    if encoder.pairs is EAGER
    for way in COUNTED
    for dropout in (0.0, 0.1)
    if way != "checkpointed" and not (dropout and way == "inference in bfloat16")
]


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`:FutureWarning")
@pytest.mark.parametrize("ours", [False, True], ids=["stock", "enabled"])
@pytest.mark.parametrize(("encoder", "way", "dropout"), [*((ENCODERS[-1], way, 0.0) for way in COUNTED), *NEMO])
def test_the_formulas_are_what_is_allocated(encoder: Encoder, way: str, dropout: float, ours: bool) -> None:
    """Within 5 %, counted on the meta device. In NeMo a dropout mask has 4 bytes per element, and sinusoids cover the longest
    call so far; transformers would keep a mask, except in SDPA's GPU kernels."""
    encoder = replace(encoder, **SMALL)
    if way == "inference in bfloat16":
        expected = longest.WAYS[way][0](encoder, FRAMES, ours)
    elif way == "inference":
        expected = longest.forward(encoder, FRAMES, ours)
    else:
        counted = replace(encoder, positions=2) if encoder.pairs is EAGER else encoder
        mask = 4 if dropout else 0
        expected = longest.training(counted, FRAMES, ours, way == "checkpointed", mask=mask, gpu=False)
    assert allocated(encoder, ours, way, dropout) == pytest.approx(expected, rel=NEAR)


def test_the_formulas_on_a_cpu() -> None:
    encoder = replace(ENCODERS[-1], **SMALL | {"width": 32})
    peak = allocated(encoder, False, "inference", frames=512, device="cpu")
    assert peak == pytest.approx(longest.forward(encoder, 512, False), rel=NEAR)


def test_the_measured_hour() -> None:
    with open(ROOT / "bench" / "results" / "cpu" / "models_hour.csv") as file:
        rows = {(row["method"], row["direction"]): row for row in csv.DictReader(file)}
    for direction, name in (("forward", "forward"), ("forward+backward", "forward and backward")):
        row = rows["triton_relattn", direction]
        measured = f"{float(row['p50_ms']) / 1e3:.0f} s | {int(row['peak_bytes']) / 2**30:.2f} GiB"
        assert f"| enabled, {name} | {measured} |" in text_of("docs/long-audio.md")
    assert rows["eager", "forward"]["status"].removeprefix("out of memory: ") in text_of("docs/long-audio.md")

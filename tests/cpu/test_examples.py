"""The examples: they run, write what they say, and fail when a result is wrong; the music model trains, stops and goes on."""

from __future__ import annotations

import importlib
import json
import math
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_at_most, assert_near, dtype_tolerance

pytest.importorskip("matplotlib")
pytest.importorskip("music21")
pytest.importorskip("tqdm")

from music21 import converter

from bench.cases.methods import OURS
from bench.report.rows import read
from examples.demo import __main__ as demo
from examples.demo import layer
from examples.demo.sweep import COMPARED
from examples.music.tokens import HOLD, REST, VOCABULARY, chorales

example: Any = importlib.import_module("examples.music_transformer")
NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"
SMALL = {"chorales": 17, "length": 32, "distances": 16, "width": 16, "heads": 2, "layers": 2, "batch": 2, "steps": 6, "every": 2}
CPU = torch.device("cpu")


def is_png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The cells run in order, without % commands. They assert that results match the stock model's."""
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(re.sub(r"^%.*\n", "", "".join(cell["source"]), flags=re.MULTILINE), names)
    assert names["replaced"] and 2 * names["fused_mib"] < names["stock_mib"] and len(names["figure"].axes) == 6
    assert capsys.readouterr().out.count("MiB") == 2 and not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_sam_is_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes rows and a figure; with --processor-time only a table."""
    pytest.importorskip("transformers")
    from examples.sam import main

    assert main(["--sides", "96", "--small", "--processor-time"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["eager", "sdpa", OURS]
    assert main(["--sides", "96,160", "--small", "--seconds", "0.1", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "sam.csv")
    assert {row["method"] for row in rows} == {OURS, "eager", "sdpa"} and {row["status"] for row in rows} == {"ok"}
    assert {int(row["seqlen"]) for row in rows} == {36, 100} and "160 x 160" in capsys.readouterr().out
    assert is_png(tmp_path / "sam.png")


@pytest.mark.thorough
def test_the_demo_runs_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A real run, including its processes, at the shortest length at which memory can be measured."""
    assert demo.main(["--device", "cpu", "--quick", "--max-length", "256", "--out", str(tmp_path)]) == 0
    rows = read(tmp_path / "demo.csv")
    assert [row["method"] for row in rows] == list(COMPARED)
    assert all(row["status"] == "ok" and float(row["p50_ms"]) > 0 and int(row["peak_bytes"]) > 0 for row in rows)
    printed = capsys.readouterr().out
    assert is_png(tmp_path / "demo.png") and all(said in printed for said in ("BWV 253", "gradient of table", "Peak memory"))


@pytest.mark.parametrize(
    ("factor", "problem"), [(1.001, "more than"), (0.0, "all zero"), (float("nan"), "not finite")], ids=["off", "zero", "NaN"]
)
def test_a_wrong_gradient_fails_the_demo(
    factor: float, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table gradient that is wrong by a thousandth is detected, named, and stops the run before any measurement."""
    attend: Any = layer.fused_relative_attention

    def wrong(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor, **others: Any) -> Any:
        if table.requires_grad and table.dtype != torch.float64 and others.get("implementation") != "reference":
            table = table * 1.0
            table.register_hook(lambda gradient: factor * gradient)
        return attend(query, key, value, table, **others)

    monkeypatch.setattr(layer, "fused_relative_attention", wrong)
    assert demo.main(["--device", "cpu", "--max-length", "64", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "gradient of table" in said and problem in said and not list(tmp_path.iterdir())


def test_music_is_bach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first chord of BWV 253, A major over an eighth note, then another eighth; without music21 it says what to install."""
    music = chorales(1024)
    assert music.tokens[:8].tolist() == [73, 69, 64, 45, *[HOLD] * 4] and len(music.tokens) == 1024
    monkeypatch.setitem(sys.modules, "music21", None)
    assert demo.main(["--device", "cpu", "--max-length", "16"]) == 1
    assert "pip install music21" in capsys.readouterr().err


def train(out: Path, *options: str) -> int:
    return example.main(["train", "--device", "cpu", "--out", str(out), *(f"--{name}={SMALL[name]}" for name in SMALL), *options])


@pytest.mark.thorough
def test_trains_is_interrupted_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run writes the curve, figure, results, checkpoint and two pieces in four parts. After Ctrl-C in the third step, between
    checkpoints, it resumes to the same losses, weights and music, bit for bit."""
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(whole) == 0
    rows = example.report.read_csv(whole / "curve.csv")
    assert [(int(row["step"]), bool(row["validation"])) for row in rows] == [(step, step % 2 == 0) for step in range(1, 7)]
    [result] = example.report.read_csv(whole / "result.csv")
    loss = float(result["test"])
    assert is_png(whole / "loss.png") and 0 < float(result["ngram_test"]) < loss < 1.1 * math.log(VOCABULARY)
    voices = [float(result[f"test_{voice}"]) for voice in ("soprano", "alto", "tenor", "bass")]
    assert_at_most("voices", abs(sum(voices) / 4 - loss), dtype_tolerance(torch.float32) * loss)
    for name in ("continued.mid", "free.mid"):
        score = converter.parse(whole / name)
        assert len(score.parts) == 4 and score.highestTime <= 32 / 4 / 2

    step = example.Run.step

    def interrupted(run: Any, part: Any) -> float:
        if len(run.rows) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(run, part)

    with monkeypatch.context() as patch:
        patch.setattr(example.Run, "step", interrupted)
        assert train(halves) == 130
    torch.manual_seed(1234)
    assert example.main(["train", "--resume", "--device", "cpu", "--out", str(halves)]) == 0
    again = example.report.read_csv(halves / "curve.csv")
    assert [{**row, "seconds": ""} for row in again] == [{**row, "seconds": ""} for row in rows]
    one, other = (example.Run.load(folder, CPU).model.state_dict() for folder in (whole, halves))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (whole / "free.mid").read_bytes() == (halves / "free.mid").read_bytes()

    figure, absent = tmp_path / "summary.png", tmp_path / "absent"
    for words, said in (
        (["generate", whole, "--tokens", "24", "--prompt", "16", "--midi", tmp_path / "it.mid"], ["the first 16 of "]),
        (["difference", whole, halves], ["| 1 .. 6 |"]),
        (["summary", whole, halves, absent, "--figure", figure], ["| relative |", "| n-gram, order ", "absent has not ended"]),
    ):
        capsys.readouterr()
        assert example.main([str(word) for word in words]) == 0
        printed = capsys.readouterr().out
        assert all(part in printed for part in said)
    assert is_png(figure) and (tmp_path / "it.mid").exists()


def test_the_fused_operator_trains_as_the_dense_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses match in every step, with dropout, at the training length and twice that; they fall by a fifth in 120 steps."""
    monkeypatch.setattr(example.report, "draw_curve", lambda *_: None)
    split = example.chorales.split(example.chorales.load(SMALL["chorales"]))
    losses = []
    for implementation in ("blockwise", "reference"):
        settings = example.Settings(implementation=implementation, **(SMALL | {"steps": 120, "every": 40}))
        run = example.Run(settings, tmp_path / implementation, CPU)
        run.out.mkdir()
        assert run.train(split)
        losses.append([float(row[name]) for row in run.rows for name in ("train", "validation", "validation_twice") if row[name]])
    assert len(losses[0]) == 126 and losses[0][-1] < 0.8 * losses[0][0]
    assert_near("losses", torch.tensor(losses[0]), torch.tensor(losses[1]))


@pytest.mark.parametrize("attention", ["relative", "absolute", "none"])
@torch.no_grad()
def test_what_a_logit_depends_on(attention: str) -> None:
    """A logit does not depend on the future, also beyond the training length; it depends on the order of the past if attention
    uses positions."""
    torch.manual_seed(0)
    model = example.MusicTransformer(example.Settings(attention=attention, **(SMALL | {"layers": 1}))).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 64))
    one, other = model(tokens), model(torch.cat((tokens[:, :40], torch.randint(0, VOCABULARY, (2, 24))), 1))
    assert_near("one", one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 41:], other[:, 41:])
    permuted = model(torch.cat((tokens[:, :31].flip(1), tokens[:, 31:32]), 1))[:, -1]
    if attention == "none":
        assert_near("permuted", permuted, one[:, 31])
    else:
        assert (permuted - one[:, 31]).norm() > 0.01 * permuted.norm()


def test_midi_says_what_the_tokens_say(tmp_path: Path) -> None:
    eighths = [[60, 55, 52, HOLD], [HOLD, 57, REST, 48], [62, HOLD, REST, HOLD], [62, HOLD, 50, HOLD]]
    example.chorales.write_midi([token for eighth in eighths for token in eighth], tmp_path / "it.mid")
    parts = [part.flatten().notes for part in converter.parse(tmp_path / "it.mid").parts]
    assert [[(note.pitch.midi, float(note.offset), float(note.quarterLength)) for note in part] for part in parts] == [
        [(60, 0, 1), (62, 1, 0.5), (62, 1.5, 0.5)],
        [(55, 0, 0.5), (57, 0.5, 1.5)],
        [(52, 0, 0.5), (50, 1.5, 0.5)],
        [(48, 0.5, 1.5)],
    ]

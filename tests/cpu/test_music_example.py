"""The example trains, stops, goes on, writes music and reports; its model sees no future and no implementation differs."""

from __future__ import annotations

import importlib
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_at_most, assert_near, dtype_tolerance

pytest.importorskip("matplotlib")
pytest.importorskip("music21")
pytest.importorskip("tqdm")

from examples.music.tokens import HOLD, REST, VOCABULARY

SMALL = {"chorales": 17, "length": 32, "distances": 16, "width": 16, "heads": 2, "layers": 2, "batch": 2, "steps": 6, "every": 2}
CPU = torch.device("cpu")
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def example() -> Any:
    return importlib.import_module("examples.music_transformer")


def train(example: Any, out: Path, *options: str) -> int:
    given = [f"--{name}={value}" for name, value in SMALL.items()]
    return example.main(["train", "--device", "cpu", "--out", str(out), *given, *options])


@pytest.mark.thorough
def test_trains_is_interrupted_and_resumed(
    example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run writes the curve, figure, results, checkpoint and two pieces in four parts. After Ctrl-C in the third step, between
    checkpoints, it resumes to the same losses, weights and music, bit for bit."""
    from music21 import converter

    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert train(example, whole) == 0
    rows = example.report.read_csv(whole / "curve.csv")
    assert [(int(row["step"]), bool(row["validation"])) for row in rows] == [(step, step % 2 == 0) for step in range(1, 7)]
    assert (whole / "loss.png").read_bytes().startswith(PNG)
    [result] = example.report.read_csv(whole / "result.csv")
    assert 0 < float(result["ngram_test"]) < float(result["test"]) < 1.1 * math.log(VOCABULARY)
    voices = [float(result[f"test_{voice}"]) for voice in ("soprano", "alto", "tenor", "bass")]
    assert_at_most("voices", abs(sum(voices) / 4 - float(result["test"])), dtype_tolerance(torch.float32) * float(result["test"]))
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
        assert train(example, halves) == 130
    torch.manual_seed(1234)
    assert example.main(["train", "--resume", "--device", "cpu", "--out", str(halves)]) == 0
    again = example.report.read_csv(halves / "curve.csv")
    assert [{**row, "seconds": ""} for row in again] == [{**row, "seconds": ""} for row in rows]
    one, other = (example.Run.load(folder, CPU).model.state_dict() for folder in (whole, halves))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (whole / "free.mid").read_bytes() == (halves / "free.mid").read_bytes()

    capsys.readouterr()
    assert example.main(["generate", str(whole), "--tokens", "24", "--prompt", "16", "--midi", str(tmp_path / "it.mid")]) == 0
    assert "the first 16 of " in capsys.readouterr().out and (tmp_path / "it.mid").exists()
    assert example.main(["difference", str(whole), str(halves)]) == 0
    assert "| 1 .. 6 |" in capsys.readouterr().out
    figure = tmp_path / "summary.png"
    assert example.main(["summary", str(whole), str(halves), str(tmp_path / "absent"), "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert "| relative |" in printed and "| n-gram, order " in printed and "absent has not ended" in printed
    assert figure.read_bytes().startswith(PNG)


def test_the_fused_operator_trains_as_the_dense_one(example: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses match in every step, with dropout, at the training length and twice that; they fall by a third in 300 steps."""
    monkeypatch.setattr(example.report, "draw_curve", lambda *_: None)
    split = example.chorales.split(example.chorales.load(SMALL["chorales"]))
    losses = []
    for implementation in ("blockwise", "reference"):
        settings = example.Settings(implementation=implementation, **(SMALL | {"steps": 300, "every": 100}))
        run = example.Run(settings, tmp_path / implementation, CPU)
        run.out.mkdir()
        assert run.train(split)
        losses.append([float(row[name]) for row in run.rows for name in ("train", "validation", "validation_twice") if row[name]])
    assert len(losses[0]) == 306 and losses[0][-1] < 0.7 * losses[0][0]
    assert_near("losses", torch.tensor(losses[0]), torch.tensor(losses[1]))


@pytest.mark.parametrize("attention", ["relative", "absolute", "none"])
@torch.no_grad()
def test_what_a_logit_depends_on(example: Any, attention: str) -> None:
    """A logit does not depend on the future, also beyond the training length; it depends on the order of the past if attention
    uses positions."""
    torch.manual_seed(0)
    model = example.MusicTransformer(example.Settings(attention=attention, **(SMALL | {"layers": 1}))).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 64))
    changed = torch.cat((tokens[:, :40], torch.randint(0, VOCABULARY, (2, 24))), 1)
    one, other = model(tokens), model(changed)
    assert_near("one", one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 41:], other[:, 41:])
    permuted = model(torch.cat((tokens[:, :31].flip(1), tokens[:, 31:32]), 1))[:, -1]
    if attention == "none":
        assert_near("permuted", permuted, one[:, 31])
    else:
        assert (permuted - one[:, 31]).norm() > 0.01 * permuted.norm()


def test_midi_says_what_the_tokens_say(example: Any, tmp_path: Path) -> None:
    from music21 import converter

    eighths = [[60, 55, 52, HOLD], [HOLD, 57, REST, 48], [62, HOLD, REST, HOLD], [62, HOLD, 50, HOLD]]
    example.chorales.write_midi([token for eighth in eighths for token in eighth], tmp_path / "it.mid")
    parts = [part.flatten().notes for part in converter.parse(tmp_path / "it.mid").parts]
    notes = [
        [(note.pitch.midi, float(note.offset), float(note.quarterLength)) for note in part.flatten().notes] for part in parts
    ]
    assert notes == [
        [(60, 0, 1), (62, 1, 0.5), (62, 1.5, 0.5)],
        [(55, 0, 0.5), (57, 0.5, 1.5)],
        [(52, 0, 0.5), (50, 1.5, 0.5)],
        [(48, 0.5, 1.5)],
    ]

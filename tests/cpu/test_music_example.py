"""The example trains, stops, goes on, writes music and reports; its model sees no future and no implementation differs."""

from __future__ import annotations

import dataclasses
import importlib
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tolerance import assert_near, tolerance_of, within

pytest.importorskip("matplotlib")
pytest.importorskip("music21")
pytest.importorskip("tqdm")

from examples.music.tokens import HOLD, REST, VOCABULARY

SMALL = {"chorales": 17, "length": 32, "distances": 16, "width": 16, "heads": 2, "layers": 2, "batch": 2, "steps": 6, "every": 2}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def example() -> Any:
    return importlib.import_module("examples.music_transformer")


@pytest.fixture(scope="module")
def split(example: Any) -> Any:
    """A few chorales; their tokens stay in the cache folder of the tests."""
    return example.chorales.split(example.chorales.load(SMALL["chorales"]))


def train(example: Any, out: Path, *options: str, **settings: Any) -> int:
    given = [f"--{name.replace('_', '-')}={value}" for name, value in (SMALL | settings).items()]
    return example.main(["train", "--device", "cpu", "--out", str(out), *given, *options])


@pytest.fixture
def no_figures(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time of a test that is not about them."""
    monkeypatch.setattr(example.report, "draw_curve", lambda *_: None)


def losses(example: Any, folder: Path) -> list[dict[str, str]]:
    """The rows of the curve without their times."""
    rows = example.report.read_csv(folder / "curve.csv")
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_from_end_to_end(example: Any, split: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trains and leaves what it says: curve, figure, results, checkpoint, and two pieces in four parts."""
    from music21 import converter

    assert train(example, tmp_path) == 0
    rows = example.report.read_csv(tmp_path / "curve.csv")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [bool(row["validation"]) for row in rows] == [False, True] * 3
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    [result] = example.report.read_csv(tmp_path / "result.csv")
    assert 0 < float(result["ngram_test"]) < float(result["test"]) < 1.1 * math.log(VOCABULARY)
    voices = [float(result[f"test_{voice}"]) for voice in ("soprano", "alto", "tenor", "bass")]
    within("voices", abs(sum(voices) / 4 - float(result["test"])), tolerance_of(torch.float32) * float(result["test"]))
    for name in ("continued.mid", "free.mid"):
        score = converter.parse(tmp_path / name)
        assert len(score.parts) == 4 and score.highestTime <= 32 / 4 / 2
    capsys.readouterr()
    assert example.main(["generate", str(tmp_path), "--tokens", "24", "--prompt", "16", "--midi", str(tmp_path / "it.mid")]) == 0
    assert f"the first 16 of {split.test[0].name}" in capsys.readouterr().out
    assert (tmp_path / "it.mid").exists()


@pytest.mark.usefixtures("no_figures")
def test_interrupted_and_resumed_is_uninterrupted(
    example: Any, split: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third step, between two checkpoints: afterwards every loss and weight is the same bit for bit."""
    assert train(example, tmp_path / "whole") == 0
    whole_step = example.Run.step

    def interrupted(run: Any, part: Any) -> float:
        if len(run.rows) == 2:
            signal.raise_signal(signal.SIGINT)
        return whole_step(run, part)

    with monkeypatch.context() as patch:
        patch.setattr(example.Run, "step", interrupted)
        assert train(example, tmp_path / "halves") == 130
    assert len(losses(example, tmp_path / "halves")) == 3
    torch.manual_seed(1234)
    assert example.main(["train", "--resume", "--device", "cpu", "--out", str(tmp_path / "halves")]) == 0
    assert losses(example, tmp_path / "halves") == losses(example, tmp_path / "whole")
    whole, halves = (example.Run.load(tmp_path / name, CPU).model.state_dict() for name in ("whole", "halves"))
    assert all(torch.equal(whole[name], halves[name]) for name in whole)
    results = [example.report.read_csv(tmp_path / name / "result.csv")[0] for name in ("whole", "halves")]
    assert {**results[0], "seconds": ""} == {**results[1], "seconds": ""}
    assert (tmp_path / "whole" / "free.mid").read_bytes() == (tmp_path / "halves" / "free.mid").read_bytes()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("attention", ["relative", "absolute", "none"])
def test_the_fused_operator_trains_as_the_dense_one(example: Any, split: Any, tmp_path: Path, attention: str) -> None:
    """Losses of every step, with dropout, at the length of training and at twice that."""
    runs = []
    for implementation in ("blockwise", "reference"):
        settings = example.Settings(attention=attention, implementation=implementation, **SMALL)
        run = example.Run(settings, tmp_path / implementation, CPU)
        run.out.mkdir()
        assert run.train(split)
        runs.append([float(row[name]) for row in run.rows for name in ("train", "validation", "validation_twice") if row[name]])
    assert len(runs[0]) == 12
    assert_near("losses", torch.tensor(runs[0]), torch.tensor(runs[1]))
    rows = example.report.difference(tmp_path / "blockwise", tmp_path / "reference").splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| 1 .. 1", "| 1 .. 3", "| 1 .. 6"]
    for cell in rows[-1].strip("| ").split(" | ")[1:]:
        within("difference", float(cell), 2 * tolerance_of(torch.float32))


@pytest.mark.parametrize("attention", ["relative", "absolute", "none"])
@torch.no_grad()
def test_no_logit_depends_on_the_future(example: Any, attention: str) -> None:
    """Past the training length, too: those before stay, those from there on change."""
    torch.manual_seed(0)
    model = example.MusicTransformer(example.Settings(attention=attention, **SMALL)).eval()
    tokens = torch.randint(0, VOCABULARY, (2, 64))
    changed = tokens.clone()
    changed[:, 40:] = torch.randint(0, VOCABULARY, (2, 24))
    one, other = model(tokens), model(changed)
    assert_near("one", one[:, :40], other[:, :40])
    assert not torch.equal(one[:, 41:], other[:, 41:])


@torch.no_grad()
def test_what_attention_knows_of_position(example: Any) -> None:
    """Without positions, the last of several equal tokens and the same after a permutation of those before it look alike."""
    tokens = torch.randint(0, VOCABULARY, (1, 32))
    permuted = torch.cat((tokens[:, :31].flip(1), tokens[:, 31:]), 1)
    for attention, same in (("relative", False), ("absolute", False), ("none", True)):
        torch.manual_seed(0)
        settings = dataclasses.replace(example.Settings(attention=attention, **SMALL), layers=1)
        model = example.MusicTransformer(settings).eval()
        one, other = model(tokens)[:, -1], model(permuted)[:, -1]
        if same:
            assert_near(attention, one, other)
        else:
            assert (one - other).norm() > 0.01 * one.norm()


def test_generation(example: Any) -> None:
    """Longer than the training length: the prompt and then valid tokens; with a tiny top_p always the likeliest."""
    model = example.MusicTransformer(example.Settings(**SMALL))
    prompt = [73, 69, 64, 45]
    tokens = example.generate(model, prompt, 70, SMALL["length"], 1.0, 0.95)
    assert tokens[:4] == prompt and len(tokens) == 70
    assert all(0 <= token < VOCABULARY for token in tokens)
    logits = torch.randn(VOCABULARY)
    assert {example.sample(logits, 1.0, 1e-6) for _ in range(20)} == {int(logits.argmax())}
    assert len({example.sample(torch.zeros(VOCABULARY), 1.0, 1.0) for _ in range(99)}) > 20


def test_midi_says_what_the_tokens_say(example: Any, tmp_path: Path) -> None:
    from music21 import converter

    eighths = [[60, 55, 52, HOLD], [HOLD, 57, REST, 48], [62, HOLD, REST, HOLD], [62, HOLD, 50, HOLD]]
    example.chorales.write_midi([token for eighth in eighths for token in eighth], tmp_path / "it.mid")
    parts = converter.parse(tmp_path / "it.mid").parts
    heard = [
        [(note.pitch.midi, float(note.offset), float(note.quarterLength)) for note in part.flatten().notes] for part in parts
    ]
    assert heard == [
        [(60, 0, 1), (62, 1, 0.5), (62, 1.5, 0.5)],
        [(55, 0, 0.5), (57, 0.5, 1.5)],
        [(52, 0, 0.5), (50, 1.5, 0.5)],
        [(48, 0.5, 1.5)],
    ]


def test_data(example: Any, split: Any) -> None:
    """No tune in two parts; windows give every token once; batches depend on seed and step, and only move pitches."""
    parts = dataclasses.astuple(split)
    assert all(parts)
    tunes = [{chorale.tune for chorale in part} for part in (split.train, split.validation, split.test)]
    assert not tunes[0] & tunes[1] and not tunes[0] & tunes[2] and not tunes[1] & tunes[2]

    chorale = split.test[0]
    inputs, targets = example.chorales.windows([chorale], 40)
    assert torch.equal(targets[targets != example.IGNORED], chorale.tokens)
    assert inputs[0, 0] == example.EDGE and inputs[1, 0] == targets[0, -1] and torch.equal(inputs[:, 1:][0], targets[0, :-1])

    def draw(seed: int, step: int, transpose: bool = True) -> torch.Tensor:
        return example.chorales.training_batch(split.train, 32, 4, transpose, seed, step)[1]

    assert torch.equal(draw(1, 5), draw(1, 5))
    assert not torch.equal(draw(1, 5), draw(1, 6)) and not torch.equal(draw(1, 5), draw(2, 5))
    moved, plain = draw(1, 5), draw(1, 5, transpose=False)
    assert torch.equal(moved >= HOLD, plain >= HOLD) and (moved - plain).abs().max() <= 6


def test_counting(example: Any, split: Any) -> None:
    """Probabilities of a model of counts sum to 1, and transposing changes what is counted of the first token only."""
    model = example.Ngram(3, split.train)
    contexts = [(0,), (0, 128), (0, 0, 128), (0, 3, 0, 128)]
    symbols = {token for counts in model.counts.values() for token in counts}
    seen = sum(model._probability(contexts, token) for token in symbols)
    total = seen + (VOCABULARY - len(symbols)) * model._probability(contexts, 10**6)
    within("sum", abs(total - 1), tolerance_of(torch.float64))
    tokens = split.test[0].tokens
    moved = torch.where(tokens < HOLD, tokens + 3, tokens)
    one, other = (list(model._tokens(of.tolist())) for of in (tokens, moved))
    assert one[4:] == other[4:] and one[0] != other[0]


def write_run(example: Any, folder: Path, attention: str, seed: int, losses: list[float], **changed: Any) -> Path:
    """The CSV files of a run that ended."""
    folder.mkdir()
    settings = dataclasses.asdict(example.Settings(attention=attention, seed=seed)) | {"steps": 2} | changed
    measured = {name: losses[-1] + index for index, name in enumerate(example.report.MEASURED)}
    counted = {"ngram_order": 5, "ngram_validation": 1.25, "ngram_test": 1.5}
    result = {**settings, "parameters": 1234567, **counted, **measured}
    example.report.write_csv(folder / "result.csv", [result], result)
    rows = [
        {"step": step, "seconds": step, "train": loss, "validation": loss, "validation_twice": loss}
        for step, loss in enumerate(losses, 1)
    ]
    example.report.write_csv(folder / "curve.csv", rows, example.report.CURVE_COLUMNS)
    return folder


def test_summary(example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Mean and spread of each kind; runs that have not ended are named; runs of other conditions are refused."""
    runs = [
        write_run(example, tmp_path / "a", "none", 0, [3.0, 1.0]),
        write_run(example, tmp_path / "b", "none", 1, [3.0, 2.0]),
        write_run(example, tmp_path / "c", "relative", 0, [3.0, 0.5]),
        tmp_path / "absent",
    ]
    figure = tmp_path / "summary.png"
    assert example.main(["summary", *map(str, runs), "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert "| relative | 1,234,567 | 0 | 0.5000 | 1.5000 |" in printed
    assert "| none | 1,234,567 | 0, 1 | 1.5000 (1.0000 .. 2.0000) | 2.5000 (2.0000 .. 3.0000) |" in printed
    assert "| n-gram, order 5 | | | 1.2500 |  | 1.5000 |" in printed
    assert f"{tmp_path / 'absent'} has not ended" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="differ in width"):
        example.report.table([*runs, write_run(example, tmp_path / "d", "none", 2, [1.0], width=7)])


def test_readme_shows_the_results(example: Any) -> None:
    """The table in the README is that of the runs in the results folder."""
    folder = Path(__file__).parents[2] / "examples"
    runs = sorted(path for path in (folder / "results").iterdir() if path.is_dir())
    assert len(runs) == 9
    assert example.report.table(runs) in (folder / "README.md").read_text()

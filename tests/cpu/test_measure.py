"""``python -m triton_relattn measure``: a model before and after enable, each in a process of its own."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from triton_relattn import measure
from triton_relattn.__main__ import main
from triton_relattn._peaks import in_own_process

MODEL, INPUTS = "tests.enable.stock:SpeechBlock", "tests.cpu.test_measure:inputs"


def inputs(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    signal = torch.randn(1, 32, length)
    return signal, signal


def work(length: int = 300, **others: Any) -> measure.Work:
    return measure.Work(MODEL, INPUTS, length, 1, torch.float32, "cpu", False, 0.0)._replace(**others)


def test_measure(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints time and memory of both, and the difference of their outputs: nonzero, below 1e-5."""
    assert main(["measure", "--model", MODEL, "--inputs", INPUTS, "--length", "1500", "--seconds", "0", "--backward"]) == 0
    printed = capsys.readouterr().out
    [stock, ours] = [float(number.replace(",", "")) for number in re.findall(r" s +([\d,]+) MiB", printed)]
    assert ours < stock / 2, printed
    difference = re.search(r"largest relative difference of the outputs: (\S+)", printed)
    assert difference is not None and 0 < float(difference[1]) < 1e-5, printed
    assert "the model itself" in printed and "attention: 1 calls computed by triton_relattn, 0 by the stock class" in printed


def test_a_short_input_measures_nothing_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["measure", "--model", MODEL, "--inputs", INPUTS, "--length", "20", "--seconds", "0"]) == 0
    printed = capsys.readouterr().out
    assert "attention: 0 calls computed by triton_relattn, 1 by the stock class" in printed
    assert "take a longer input" in printed and "of the stock model's time" not in printed


def test_a_model_that_is_not_there() -> None:
    """A missing model gives a one-line error before any process starts."""
    with pytest.raises(SystemExit, match=r"nothing:model: No module named 'nothing'; expected package\.module:function"):
        main(["measure", "--model", "nothing:model"])


@pytest.mark.thorough
def test_a_stock_model_without_memory(tmp_path: Path) -> None:
    """The stock scores alone need 3.2 GB; that process ends with one line, and ours is still measured."""
    file = tmp_path / "outputs.pt"
    file.touch()
    given = (str(file), 2 << 30)
    assert in_own_process(measure.measure_model, (work(20_000), False, *given), None)["status"].startswith("out of memory: more")
    ours = in_own_process(measure.measure_model, (work(20_000), True, *given), None)
    assert ours["status"] == "ok" and "difference" not in ours


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inputs": None}, "the inputs of SpeechBlock are not known. Name a function with --inputs"),
        ({"model": "tests.enable.stock:nothing"}, "no attribute 'nothing'; expected package.module:function"),
        ({"model": "math:pi"}, "math:pi is float, not a torch.nn.Module"),
        ({"model": "torch.nn:Identity", "inputs": "math:floor"}, "Identity returns no floating-point tensor"),
    ],
)
def test_what_cannot_be_measured(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    assert said in measure.measure_model(work(**change), False, str(tmp_path / "outputs.pt"), -1)["status"]


@pytest.mark.parametrize(
    ("name", "sizes", "shape"),
    [
        ("input_ids", {"vocab_size": 7}, (2, 5)),
        ("input_values", {}, (2, 5)),
        ("input_features", {"num_mel_bins": 80}, (2, 5, 80)),
        ("input_features", {"feature_projection_input_dim": 160}, (2, 5, 160)),
    ],
)
def test_inputs_of_transformers(name: str, sizes: dict[str, int], shape: tuple[int, ...]) -> None:
    model = SimpleNamespace(main_input_name=name, config=SimpleNamespace(**sizes))
    assert {argument: tensor.shape for argument, tensor in measure.example_inputs(model, 5, 2).items()} == {name: shape}
    model.config.is_encoder_decoder = True
    assert ("decoder_input_ids" in measure.example_inputs(model, 5, 2)) == (name == "input_ids")


def test_differences() -> None:
    one, other = torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0])
    assert measure.largest_difference([one, one], [one, other]) == pytest.approx(1 / 3)
    assert measure.floating_tensors({"a": one, "b": (other, torch.tensor(1), [one])})[1] is other

"""Tuning: the fastest configuration with right results goes into the profile, and later calls use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from triton_relattn import RelativePositions, testing
from triton_relattn.__main__ import main, tune
from triton_relattn._core import validation
from triton_relattn._core.arguments import Arguments
from triton_relattn.kernels import tuning
from triton_relattn.kernels.call import call_of
from triton_relattn.kernels.config import selection
from triton_relattn.kernels.config.tile_config import KERNELS, TileConfig

DEFAULT = selection.tables("interpreter").select(
    "forward", selection.conditions("interpreter", torch.float32, "highest", 16, "full"), with_profile=False
)
OTHERS = [TileConfig(32, 16, 4, 1), TileConfig(16, 32, 4, 1), TileConfig(16, 16, 4, 1)]


@pytest.fixture(autouse=True)
def own_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("TRITON_RELATTN_CACHE", str(tmp_path))
    selection.forget()
    yield
    selection.forget()


def call_inputs(length: int = 40, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = testing.make_inputs(1, 2, length, length, 16, num_rows=2 * length - 1, dtype=torch.float32, seed=1, **changes)
    return inputs[:4], inputs.terms()


def with_times(monkeypatch: pytest.MonkeyPatch, milliseconds: dict[TileConfig, float]) -> None:
    """Make the candidates those with a time, and their measured times these."""
    monkeypatch.setattr(tuning, "nearest", lambda *_: [config for config in milliseconds if config != DEFAULT])

    def timed(functions: list[Callable[[], object]]) -> list[float]:
        return [milliseconds[function.args[-1]] for function in functions]  # type: ignore[attr-defined]

    monkeypatch.setattr(tuning, "timed_in_turn", timed)
    monkeypatch.setattr(tuning, "kernels_of", lambda *_: ["forward"])


def test_the_fastest_right_configuration_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one with wrong results, or that cannot be launched. Later calls of the kind use it, longer ones do not."""
    wrong, fails, best = OTHERS
    with_times(monkeypatch, {DEFAULT: 10.0, best: 5.0})
    monkeypatch.setattr(tuning, "nearest", lambda *_: [wrong, fails, best])
    forward = tuning.forward

    def spoiled(tensors: Any, spec: Any, config: TileConfig | None = None, **options: Any) -> Any:
        out, *others = forward(tensors, spec, config, **options)
        if config == fails:
            raise RuntimeError("out of resource: shared memory")
        if config == wrong:
            out[0, 1, 16:] = out[0, 0, 16:]
        return out, *others

    monkeypatch.setattr(tuning, "forward", spoiled)
    tensors, terms = call_inputs()
    (found,) = tuning.tune(*tensors, **terms)
    assert found == tuning.Tuned("forward", DEFAULT, best, 10.0, 5.0, 2)
    assert str(best.block_m) in str(found) and "2 tried" in str(found)
    for length, expected in ((40, best), (600, DEFAULT)):
        tensors, terms = call_inputs(length)
        assert call_of(*validation.resolve(Arguments(*tensors, **terms))).tile("forward") == expected
    (row,) = selection.load(tuning.profile_of(torch.device("cpu")), "interpreter")
    assert (row["milliseconds"], row["default_milliseconds"]) == ("5", "10")
    with_times(monkeypatch, {DEFAULT: 10.0, OTHERS[0]: 9.9})  # a gain within noise does not count
    (found,) = tuning.tune(*call_inputs()[0])
    assert found.best == DEFAULT and "stays" in str(found)


@pytest.mark.parametrize(
    "changes, arguments",
    [
        ({}, {}),
        ({"rel_key": False, "rel_bias": True, "per_head": True}, {"scale": 1.0}),
        ({"rel_p2c": True, "per_head": True}, {}),
        ({"rel_value": True}, {}),
        ({"rel_width": 16}, {"is_causal": True, "positions": RelativePositions(-39, 39)}),
    ],
    ids=["rel_key", "rel_bias", "rel_p2c", "rel_value", "rel_query"],
)
def test_every_kernel_of_a_call(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], arguments: dict[str, Any]) -> None:
    """All kernels of forward and backward are timed, and another tile has right results."""
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    tensors, terms = call_inputs(**changes)
    reported: list[tuning.Tuned] = []
    found = tuning.tune(*tensors, **terms, **arguments, dropout_p=0.5, most=1, report=reported.append)
    assert reported == found and {tuned.tried for tuned in found} == {2}
    assert {"forward", "dkv", "dtable"} <= {tuned.kernel for tuned in found} <= set(KERNELS)
    assert ("dp2c" in {tuned.kernel for tuned in found}) == ("rel_p2c" in changes)
    assert {row["kernel"] for row in selection.load(tuning.profile_of(torch.device("cpu")), "interpreter")} == {
        tuned.kernel for tuned in found
    }


def test_from_the_shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tuning, "ROUNDS", 1)
    monkeypatch.setattr(tuning, "kernels_of", lambda *_: ["forward"])
    calls = []
    run = tuning.tune

    def noted(*tensors: torch.Tensor, **given: Any) -> list[tuning.Tuned]:
        calls.append((tensors, given))
        return run(*tensors, most=1, **given)  # type: ignore[misc]

    monkeypatch.setattr(tuning, "tune", noted)
    monkeypatch.setattr("triton_relattn.__main__.tune", lambda options: tune(options, "cpu"))
    options = ["--shape", "b1,h4,kv2,n40,q24,d16", "--table", "9", "--dtype", "fp32", "--causal"]
    assert main(["tune", *options]) == 0
    printed = capsys.readouterr().out
    assert "forward" in printed and "profile-interpreter" in printed
    (query, key, value), given = calls[0]
    assert query.shape == (1, 4, 24, 16) and key.shape == value.shape == (1, 2, 40, 16) and given["rel_key"].shape == (9, 16)
    assert given["query_offset"] == 16 and given["is_causal"] and given["enable_gqa"]
    for term, name in (("rel_bias", "rel_bias"), ("none", None)):
        assert main(["tune", "--shape", "h2,n24,d16", "--dtype", "fp32", "--term", term]) == 0
        assert name is None or calls[-1][1][name].shape == (2, 47)


def test_tensors_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "kernels_are_interpreted", lambda: False)
    tensors, _ = call_inputs()
    with pytest.raises(RuntimeError, match="only a GPU can be tuned, and query is on cpu"):
        tuning.tune(*tensors)
    monkeypatch.setattr(selection, "profile_path", lambda _: None)
    with pytest.raises(OSError, match="TRITON_RELATTN_CACHE"):
        tuning.profile_of(torch.device("cpu"))

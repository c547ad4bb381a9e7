"""bench/predictions.csv is of the tiles that are selected now."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from bench.cases.attention import CLIPPED, Case
from bench.cases.methods import OURS
from bench.predictions import (
    GPUS,
    KEYS,
    PATH,
    Kernel,
    Wanted,
    row_of,
    seconds_of,
    wanted,
)
from bench.report.rows import read
from tools.cycles.machine import MACHINES
from tools.cycles.predict import SCORES, Prediction
from triton_relattn.kernels.config.selection import TileConfig
from triton_relattn.kernels.workspace import planning

MAKE = "the file is old: python -m bench predictions"


def test_the_file_is_of_the_tiles_that_are_selected() -> None:
    """Every time that is measured has a row with its present configurations, and no row is left over."""
    rows = {tuple(row[name] for name in KEYS): row for row in read(PATH)}
    expected = list(dict.fromkeys(what.key for target in GPUS for what in wanted(target)))
    assert [key for key in expected if key not in rows] == [], MAKE
    assert [key for key in rows if key not in set(expected)] == [], MAKE
    for row in rows.values():
        assert float(row["predicted_ms"]) > 0 and row["triton"], MAKE


def test_speeds_are_those_of_a_gpu() -> None:
    """No faster than the matrix units, and not absurdly slow; a table costs time, an A100 takes longer."""
    found = {tuple(row[name] for name in KEYS[:5]): float(row["tflops"] or 0) for row in read(PATH)}
    speeds = {key: value for key, value in found.items() if value}
    fastest = {"sm_90": 800, "sm_80": 312}
    assert all(5 < value < fastest[target] for (target, *_), value in speeds.items()), speeds
    for causal in ("", " causal"):
        name = f"b4 h32 n4096 d64 full{causal} bf16"
        for target in GPUS:
            assert found[target, "speed", name, OURS, "forward"] < found[target, "speed", name, "plain", "forward"]
        assert found["sm_80", "speed", name, OURS, "forward"] < found["sm_90", "speed", name, OURS, "forward"]


def loop(cycles: float) -> Any:
    class Loop:
        pass

    found = Loop()
    found.cycles = cycles  # type: ignore[attr-defined]
    return found


def prediction(*cycles: float) -> Prediction:
    return Prediction(MACHINES["sm_90"], 2, tuple(map(loop, cycles)), 2, 2)


TILE = TileConfig(64, 64, 4, 2)
FULL, CLIPPED_CASE = Case(4, 33, 4096, 64), Case(4, 33, 4096, 64, rows=CLIPPED)  # so that all multiprocessors have as much


def test_seconds() -> None:
    """Scores times cycles over cycles a second; the share near the diagonal; half if causal; the last wave."""
    a_second = MACHINES["sm_90"].cycles_per_second
    blocks = 4 * 33 * 64**2
    assert seconds_of(Kernel("forward", FULL, True, TILE), [prediction(1000)]) == pytest.approx(blocks * 1000 / a_second)
    near = (128 + 128) / 4096
    kernel = Kernel("forward", CLIPPED_CASE, True, TILE)
    expected = blocks * (1000 * near + 500 * (1 - near)) / a_second
    assert seconds_of(kernel, [prediction(1000, 500)]) == pytest.approx(expected)
    causal = Kernel("forward", Case(4, 33, 4096, 64, True), True, TILE)
    assert seconds_of(causal, [prediction(1000)]) == pytest.approx(blocks * 1000 / 2 * (4096 + 64) / 4096 / a_second)
    one = Kernel("forward", Case(1, 1, 64, 64), True, TILE)  # a single program, and 131 multiprocessors that wait for it
    assert seconds_of(one, [prediction(1000)]) == pytest.approx(1000 * 132 / a_second)
    padded = Kernel("forward", Case(132, 1, 65, 64), True, TILE)
    assert seconds_of(padded, [prediction(1000)]) == pytest.approx(132 * 4 * 1000 / a_second)


def test_seconds_of_several_programs_at_once() -> None:
    """Two take less for each than one alone, which the last wave may have."""
    a_second, found = MACHINES["sm_90"].cycles_per_second, [prediction(1000), prediction(800)]
    assert seconds_of(Kernel("forward", FULL, True, TILE), found) == pytest.approx(132 * 64**2 * 800 / a_second)
    three = Kernel("forward", Case(3 * 132, 1, 64, 64), True, TILE)  # for each multiprocessor
    assert seconds_of(three, found) == pytest.approx(132 * (2 * 800 + 1000) / a_second)


def test_seconds_of_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of the dkv kernel leave multiprocessors idle; blocks of queries that are spread have more positions; tiles of a table
    are partly empty."""
    a_second, blocks = MACHINES["sm_90"].cycles_per_second, 132 * 64**2
    dkv = Kernel("dkv", FULL, True, TILE)
    monkeypatch.setenv(planning.VARIABLE, str(2 * 132 * 4096**2))
    assert seconds_of(dkv, [prediction(1000)]) == pytest.approx(blocks * 1000 / a_second)
    monkeypatch.setenv(planning.VARIABLE, str(2 * 4096**2))  # of one head: 64 programs, and 68 multiprocessors have none
    assert seconds_of(dkv, [prediction(1000)]) == pytest.approx(132 * 132 * 64 * 1000 / a_second)
    assert seconds_of(Kernel("dkv", FULL, False, TILE), [prediction(1000)]) == pytest.approx(blocks * 1000 / a_second)
    query = Kernel("dq_from_ds", FULL, True, TILE)
    assert seconds_of(query, [prediction(1000)]) == pytest.approx(blocks * 1000 * (1 + 8 * 64 / 4096) / a_second)
    # 127 rows are three blocks of 56, at eight positions each; a block of queries has 16.
    table = Kernel("dtable", Case(1, 1, 64, 64), True, TILE)
    assert seconds_of(table, [prediction(1000)]) == pytest.approx(3 * 8 * 16 * 56 / SCORES * 1000 / a_second)
    from_memory = 2 * 64**2 * 64 / 56 / GPUS["sm_90"].memory_rate  # of a tile's 64 rows all are read
    assert seconds_of(table, [prediction(10)]) == pytest.approx(from_memory / a_second)


def test_rows() -> None:
    """The sum of the kernels; none if one of them is not known."""
    kernels = tuple(Kernel(name, FULL, True, TILE) for name in ("dq", "dkv", "dtable"))
    known = {kernel.representative: [prediction(1000)] for kernel in kernels}
    what = Wanted("speed", FULL, True, "backward", kernels)
    row = row_of(what, known)
    assert row is not None and row["cycles"] == 3000 and row["far_cycles"] is None
    milliseconds = 1e3 * sum(seconds_of(kernel, [prediction(1000)]) for kernel in kernels)
    assert float(row["predicted_ms"]) == pytest.approx(milliseconds, rel=1e-3)
    assert float(row["tflops"]) == pytest.approx(FULL.flops("backward", True)[0] / milliseconds / 1e9, rel=1e-3)
    assert row_of(what, {kernels[0].representative: [prediction(1000)]}) is None
    bounded = Kernel("forward", Case(32, 8, 500, 64, rows=511), True, TILE).representative
    assert bounded.case == Case(4, 32, 4096, 64, rows=CLIPPED) == Kernel("forward", CLIPPED_CASE, True, TILE).representative.case

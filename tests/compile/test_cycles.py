"""The model of cycles on compiled kernels: what their loops multiply, what serialises wgmma, calibration, the report."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("tqdm")

from bench.__main__ import main
from bench.cases.features import call
from bench.compile import KernelCase, predicted
from bench.compiled import compiled, recorded_launches, resources, selected
from bench.cycles.report import shown
from bench.cycles.sensitivity import AS_IT_IS, VARIED
from tools.cycles import calibrate
from tools.cycles.machine import MACHINES
from tools.cycles.predict import SCORES, predict, teraflops, why_serialised
from triton_relattn.kernels.forward import forward

PLAIN_PRODUCTS = {"forward": 2, "dq": 3, "dkv": 4}


@pytest.mark.parametrize("target", MACHINES)
@pytest.mark.parametrize("kernel", PLAIN_PRODUCTS)
def test_a_turn_is_a_tile(target: str, kernel: str) -> None:
    """Loops without a table multiply what attention multiplies for as many scores as a tile has, with a table more."""
    case = KernelCase(kernel, target, "bf16", 64, "none")
    found = predicted(case, case.config)
    assert found is not None and len(found.loops) == 1
    assert found.loops[0].operations == PLAIN_PRODUCTS[kernel] * 2 * SCORES * 64
    assert found.far_cycles is None and 1 <= found.programs <= 8
    assert 0.2 < max(found.loops[0].turn.busy.values()) <= 1


def test_beyond_a_bounded_table() -> None:
    """There is a loop without the table's products, and it takes less."""
    case = KernelCase("forward", "sm_90", "bf16", 64, "clamp")
    found = predicted(case, case.config)
    assert found is not None and found.far_cycles is not None
    assert found.loops[-1].operations == 2 * 2 * SCORES * 64 < found.loops[0].operations
    assert found.far_cycles < found.cycles == predicted(case, case.config).cycles  # type: ignore[union-attr]


def test_serialised_wgmma() -> None:
    """A wait after every single wgmma, as the assembler says itself, and not for another tile."""
    serialised = calibrate.compiled_known("keys, adding d_query", "sm_90", 64, (32, 128, 4, 2))
    found = predict(serialised, 32, 128)
    assert found is not None and found.is_serialised and (found.wgmma_products, found.wgmma_groups) == (4, 24)
    assert "serialized" in why_serialised(serialised)
    other = calibrate.compiled_known("queries", "sm_90", 64, (128, 32, 4, 2))
    found = predict(other, 128, 32)
    assert found is not None and not found.is_serialised and found.wgmma_groups == found.wgmma_products == 3
    assert why_serialised(other) == ""


@pytest.mark.parametrize(("index", "option"), [(0, (64, 64, 4, 4)), (1, (64, 64, 4, 3))])
def test_calibration(index: int, option: calibrate.Option) -> None:
    """The best configurations of Triton's tutorial are predicted near their published speed."""
    published = calibrate.PUBLISHED[index]
    assert option in published.parts[0].options
    candidate = calibrate.Candidate("forward", published.code, published.target, published.head_dim, option)
    found = calibrate.predict_known(candidate)
    assert found is not None and not found[1]
    speed = teraflops(found[0], MACHINES[published.target], published.head_dim, published.products)
    assert speed == pytest.approx(published.teraflops, rel=0.1)


def test_comparisons_take_the_best_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each comparison takes the fastest configuration that fits; the efficiency is fitted to kernels that do not spill."""
    first, second = calibrate.PUBLISHED[0], calibrate.PUBLISHED[1]
    monkeypatch.setattr(calibrate, "PUBLISHED", (first, second))
    cycles = {(64, 64): 500.0, (128, 64): 400.0}

    def known(candidate: calibrate.Candidate) -> tuple[float, bool] | None:
        block_m, block_n, _, stages = candidate.option
        value = cycles.get((block_m, block_n), 900.0) * candidate.head_dim / 64
        return None if (block_m, stages) == (128, 4) else (value + stages, candidate.head_dim == 128)

    comparisons = calibrate.compare(lambda _, candidates: map(known, candidates))
    assert [one.options for one in comparisons] == [((128, 64, 4, 3),)] * 2
    assert [one.spills for one in comparisons] == [False, True]
    machine = MACHINES["sm_90"]
    assert comparisons[0].model == teraflops(403, machine, 64, 2)
    assert calibrate.fitted_efficiency(comparisons) == pytest.approx(403 / comparisons[0].model * machine.efficiency)
    assert "spills" in shown(comparisons)


def test_what_has_no_model() -> None:
    for target in ("sm_86", "gfx942"):
        case = KernelCase("forward", target, "bf16", 64, "none")
        assert predict(compiled(case.kernel, target, *case.call), 64, 64) is None


@pytest.mark.thorough
def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    """A line for each kernel, for each call, for each design of the backward."""
    wanted = ("--features", "none,full", "--head-dims", "64", "--jobs", "1")
    assert main(["cycles", *wanted]) == 0
    printed = capsys.readouterr().out
    for kernel in ("forward", "dq", "dkv"):
        assert f"{kernel} sm_90 bf16 64 none" in printed and f"{kernel} sm_90 bf16 64 full" in printed
    lines = [line for line in printed.splitlines() if line.startswith(("  forward,", "  backward,"))]
    calls = {line.split("  ")[1].strip(): line.split() for line in lines}
    assert float(calls["forward, sm_90 bf16 64 none"][-1]) == 1 < float(calls["backward, sm_90 bf16 64 full"][-1]) < 10
    assert 100 < float(calls["forward, sm_90 bf16 64 none"][-2]) < 989
    assert "query from dS, writing hidden, sm_90 bf16 64 full" in printed and "MiB" in printed


def test_report_of_what_does_not_compile(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such\ninstruction")

    monkeypatch.setattr("bench.cycles.report.predicted", fail)
    assert main(["cycles", "--features", "none", "--head-dims", "64", "--jobs", "1"]) == 1
    assert "dq sm_90 bf16 64 none: RuntimeError: no such instruction" in capsys.readouterr().out


def test_sensitivity(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A kernel takes longer if the ALU is slow; the ratio of a call to itself stays."""
    monkeypatch.setattr("bench.cycles.report.selection.KERNELS", ("forward",))
    varied = {AS_IT_IS: VARIED[AS_IT_IS], "slow ALU": {"alu": 8.0}}
    monkeypatch.setattr("bench.cycles.sensitivity.VARIED", varied)
    assert main(["cycles", "--sensitivity", "--features", "none", "--head-dims", "64", "--jobs", "1"]) == 0
    printed = capsys.readouterr().out
    (slow,) = (line for line in printed.splitlines() if line.startswith("  slow ALU"))
    assert int(slow.split()[2].removesuffix("%")) > 0 and len(slow.split()) == 3  # the backward's kernels are not known
    assert "1.00 to 1.00" in printed


@pytest.mark.thorough
@pytest.mark.parametrize(("target", "width"), [("sm_80", 64), ("sm_90", 64), ("sm_90", 128)])
def test_forward_with_a_residual(target: str, width: int) -> None:
    """To keep the residual of out costs the forward a tenth at most: one more product, with 16 columns."""
    tensors, spec = call("full", torch.bfloat16, width)
    tile = selected("forward", target, tensors, spec)
    with recorded_launches(target) as launches:
        forward(tensors, spec, tile)
        forward(tensors, spec, tile, keeps_residual=True)
    plain, kept = (predict(launch.kernel, tile.block_m, tile.block_n) for launch in launches)
    assert plain is not None and kept is not None and resources(launches[1].kernel).fits(target)
    assert kept.wgmma_products == plain.wgmma_products + (target == "sm_90") and not kept.is_serialised
    assert kept.cycles <= 1.1 * plain.cycles

"""Calls of the package as compiled for GPUs, in their default configurations, forward and backward."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from tests.check import Results as Found
from tests.check import check, environment, run
from tests.emulator.calls import CALLS, Subject
from tests.expected import TABLES, table_gradient_budget
from tests.tolerance import assert_at_most
from tools.emulator.device import TARGETS
from triton_relattn.kernels import forward, splits
from triton_relattn.kernels.fences import LACKS_FENCES

SAMPLE = (
    Subject("sm_90", "bfloat16", 64, "full", (130, 130)),
    Subject("sm_90", "bfloat16", 128, "full causal sharp", (70, 70)),
    Subject("sm_90", "float16", 72, "zero varlen", (66, 90)),
    Subject("sm_80", "bfloat16", 64, "clamp causal dropout key_lengths", (65, 80)),
    Subject("sm_80", "float16", 40, "zero unaligned", (67, 70)),
    Subject("sm_90", "bfloat16", 64, "full rel_p2c per_head", (70, 130)),
    Subject("sm_80", "bfloat16", 64, "clamp rel_p2c", (130, 70)),
    Subject("sm_90", "bfloat16", 64, "clamp varlen offsets rel_value", (70, 90)),
    Subject("sm_80", "float16", 64, "full rel_value small_workspace", (70, 90)),
    Subject("sm_80", "tf32", 64, "clamp rel_bias sharp", (65, 80)),
)
"""A few kernels of every kind of GPU, dtype and width; all kinds of calls are slow."""
STRIDED_KEYS = Subject("sm_90", "bfloat16", 128, "clamp strided_key", (130, 130))
MENDED = (
    # wgmma read what no fence covers, where keys have other than unit stride and values have not.
    STRIDED_KEYS,
    # Kernels of one call rounded their terms differently.
    Subject("sm_90", "bfloat16", 128, "full sharp one_head", (150, 140)),
    Subject("sm_80", "bfloat16", 64, "full causal sharp", (130, 130)),
    Subject("sm_90", "bfloat16", 0, "random 1"),
    # Lanes that held the same row's delta differed in the last bits, and stored to one address.
    Subject("sm_80", "float32", 64, "none", (33, 50)),
)
"""Calls that the emulator has found to be wrong."""
MAIN = (("sm_80", "bfloat16", 64), ("sm_90", "bfloat16", 64))
OTHERS = [
    *(
        (target, dtype, width)
        for target in ("sm_80", "sm_90")
        for dtype in ("bfloat16", "float16")
        for width in (40, 64, 72, 128)
    ),
    *((target, dtype, 64) for target in ("sm_80", "sm_90") for dtype in ("float32", "tf32")),
    *(("sm_120", dtype, 64) for dtype in ("bfloat16", "float16")),
    *((target, "bfloat16", 128) for target in ("sm_86", "sm_89")),
]
LENGTHS = ((130, 130), (130, 130), (63, 63), (33, 200), (200, 33), (65, 96), (1, 90), (17, 16))


def drawn() -> Iterator[Subject]:
    """Every kind of call for the main GPUs, and for three of the others; lengths and the order of warps are drawn as well."""
    for number, name in enumerate(CALLS):
        choose = random.Random(name)
        for which in (*MAIN, *choose.sample(OTHERS, 3)):
            lengths = (33, 50) if which[1] == "float32" else choose.choice(LENGTHS)  # takes ten times as long
            yield Subject(*which, name, lengths, seed=number)


def random_calls() -> Iterator[Subject]:
    """Those of the tests on a GPU, and packed ones."""
    for seed in range(12):
        yield Subject("sm_90", "bfloat16", 0, f"random {seed}", seed=seed)
        yield Subject("sm_80", "float16", 0, f"random_varlen {seed}", seed=seed)


def results(subject: Subject) -> Found:
    """out, lse and all gradients, with nothing checked but the launches."""
    sample, way = subject.sample(), subject.way()
    with environment(sample, way):
        return run(sample, {**sample.call(), "implementation": "triton"})


@pytest.mark.parametrize("subject", SAMPLE, ids=str)
def test_sample(subject: Subject) -> None:
    check(subject.sample(), subject.way())


@pytest.mark.thorough
@pytest.mark.parametrize("subject", MENDED, ids=str)
def test_what_was_wrong(subject: Subject) -> None:
    check(subject.sample(), subject.way())


@pytest.mark.parametrize(
    "subject",
    [
        Subject("sm_90", "bfloat16", 64, "full rel_bias sharp", (70, 130)),
        Subject("sm_80", "tf32", 64, "clamp rel_bias sharp", (65, 80)),
        pytest.param(Subject("sm_80", "bfloat16", 64, "clamp rel_p2c rel_value sharp", (70, 90)), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_table_gradients(subject: Subject) -> None:
    """As good as dS (of rel_value: P) rounded once: an error of delta, which all scores of a query share, adds up in them.

    TF32 cuts dS to as many digits as float16 has, by up to a unit, which is twice what rounding takes.
    """
    is_tf32, sample = subject.dtype == "tf32", subject.sample()
    inputs, arguments = sample.inputs()
    found = results(subject)
    for table in set(TABLES) & set(sample.tables):
        golden, budget = table_gradient_budget(inputs.to(torch.float16) if is_tf32 else inputs, table=table, **arguments)
        gradient = found[f"d_{table}"]
        assert golden.any() and gradient is not None
        assert_at_most(table, (gradient.double() - golden).abs().max(), budget * (2 if is_tf32 else 1))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "dtype", "name"),
    [
        ("sm_90", "bfloat16", "clamp varlen offsets rel_value rel_bias"),
        ("sm_80", "float16", "zero varlen rel_value"),
        ("sm_80", "bfloat16", "full offsets rel_value rel_p2c"),
        ("sm_90", "float16", "clamp rel_value no_rel_key gqa"),
    ],
)
def test_parts_of_a_workspace(target: str, dtype: str, name: str) -> None:
    """One block of keys after the other, or all at once: both are right, and differ in nothing but how queries and tables are
    summed."""
    found = []
    for words in (name, f"{name} small_workspace"):
        subject, is_whole = Subject(target, dtype, 64, words, (70, 100)), words == name
        way = subject.way()
        check(subject.sample(), way)
        names = Counter(launch.name for launch in way.launches)
        assert (names["dkv"] == 1) == is_whole
        assert names["dtable"] == names["dkv"] * (1 if "no_rel_key" in name else 2)
        assert names["dq"] == names["dkv"] * (1 if "zero" in name else 2)  # of P, if it sums what lies beyond a table
        found.append(results(subject))
    for result in ("out", "lse", "d_key", "d_value"):
        whole, parts = (tensors[result] for tensors in found)
        assert whole is not None and parts is not None and torch.equal(whole, parts), result


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("target", "dtype", "name"), [("sm_80", "float32", "clamp"), ("sm_90", "bfloat16", "clamp no_rel_key rel_value")]
)
def test_programs_that_share_keys(target: str, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not where the residual is stored: in 16 bits with a table for the scores, if anything is differentiated."""
    monkeypatch.setattr(splits, "LEAST_KEYS", 64)
    subject = Subject(target, dtype, 64, f"{name} key_lengths", (1, 300))
    way = subject.way()
    check(subject.sample(), way)
    assert "merge" in [launch.name for launch in way.launches]


@pytest.mark.thorough
@pytest.mark.skipif(LACKS_FENCES, reason="kernels of this Triton get all fences from kernels/fences.py")
def test_triton_needs_aligned_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cp.async cannot load keys, Triton leaves out a fence. Once this fails, with_aligned_operands is no longer needed."""
    monkeypatch.setattr(forward, "with_aligned_operands", lambda tensors: tensors)
    with pytest.raises(AssertionError, match="wgmma reads what no proxy fence covers"):
        check(STRIDED_KEYS.sample(), STRIDED_KEYS.way())


@pytest.mark.slow
@pytest.mark.parametrize("subject", [*drawn(), *random_calls()], ids=str)
def test_call(subject: Subject) -> None:
    check(subject.sample(), subject.way())


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_order_of_warps_changes_nothing(target: str) -> None:
    """Out and gradients are the same bit for bit, however warps take turns: results are repeatable."""
    first, *others = (results(Subject(target, "bfloat16", 64, "clamp rel_value", (70, 133), seed)) for seed in range(3))
    for other in others:
        for name, result in first.items():
            assert (result is None and other[name] is None) or torch.equal(result, other[name])  # type: ignore[arg-type]


def test_drawn_calls_have_everything() -> None:
    """Each kind of call, for each kind of GPU, dtype and width."""
    subjects = list(drawn())
    assert {subject.name for subject in subjects} >= set(CALLS) and len(set(map(str, subjects))) > 4.8 * len(CALLS)
    assert {subject.target for subject in subjects} == set(TARGETS)
    assert {(subject.target, subject.dtype, subject.width) for subject in subjects} == {*MAIN, *OTHERS}

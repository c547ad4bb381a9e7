"""Calls of the package as compiled for GPUs, in their default configurations, forward and backward, and calls on a grid."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from tests.check import Results as Found
from tests.check import check, environment, run
from tests.emulator.calls import CALLS, Subject
from tests.emulator.way import Emulator
from tests.expected import TABLES, table_gradient_budget
from tests.grids import Case, assert_right, tensors
from tests.grids import results as results_on_grid
from tests.samples import Sample
from tests.tolerance import assert_at_most
from triton_relattn.kernels import forward, splits
from triton_relattn.kernels.config.architectures import LACKS_FENCES

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
"""Calls for each kind of GPU and dtype; the others are slow."""
STRIDED_KEYS = Subject("sm_90", "bfloat16", 128, "clamp strided_key", (130, 130))
FIXED = (
    # A fence was missing before wgmma if keys have a stride other than 1 and values have not.
    STRIDED_KEYS,
    # Kernels of one call rounded terms differently.
    Subject("sm_90", "bfloat16", 128, "full sharp one_head", (150, 140)),
    Subject("sm_80", "bfloat16", 64, "full causal sharp", (130, 130)),
    Subject("sm_90", "bfloat16", 0, "random 1"),
    # Lanes with the delta of the same row differed in the last bits, and stored it to one address.
    Subject("sm_80", "float32", 64, "none", (33, 50)),
)
"""Calls in which the emulator has found errors."""
IN_PARTS = (
    Subject("sm_90", "bfloat16", 64, "clamp varlen offsets rel_value rel_bias small_workspace", (70, 100)),
    Subject("sm_80", "float16", 64, "zero varlen rel_value small_workspace", (70, 100)),
    Subject("sm_80", "bfloat16", 64, "full offsets rel_value rel_p2c small_workspace", (70, 100)),
    Subject("sm_90", "float16", 64, "clamp rel_value no_rel_key gqa small_workspace", (70, 100)),
)
"""Calls with a workspace in many parts."""
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
    """All kinds of calls for the main targets and three others each, with random lengths and orders of warps."""
    for number, name in enumerate(CALLS):
        choose = random.Random(name)
        for which in (*MAIN, *choose.sample(OTHERS, 3)):
            lengths = (33, 50) if which[1] == "float32" else choose.choice(LENGTHS)  # takes ten times as long
            yield Subject(*which, name, lengths, seed=number)


def random_calls() -> Iterator[Subject]:
    """The calls of tests/gpu, and packed ones."""
    for seed in range(12):
        yield Subject("sm_90", "bfloat16", 0, f"random {seed}", seed=seed)
        yield Subject("sm_80", "float16", 0, f"random_varlen {seed}", seed=seed)


def results(subject: Subject) -> Found:
    """out, lse and all gradients, without comparing them."""
    sample, way = subject.sample(), subject.way()
    with environment(sample, way):
        return run(sample, {**sample.call(), "implementation": "triton"})


SLOW = (*drawn(), *random_calls())
ALL = [
    *SAMPLE,
    *(pytest.param(subject, marks=pytest.mark.thorough) for subject in (*FIXED, *IN_PARTS)),
    *(pytest.param(subject, marks=pytest.mark.slow) for subject in SLOW),
]


@pytest.mark.parametrize("subject", ALL, ids=str)
def test_call(subject: Subject) -> None:
    """All results are right, the emulator finds nothing, and a small workspace has parts."""
    way = subject.way()
    check(subject.sample(), way)
    assert (sum(launch.name == "dkv" for launch in way.launches) > 1) == ("small_workspace" in subject.name) or subject in SLOW


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
    """Gradients of tables have the error of dS (rel_value: P) rounded once; an error of delta would add up in them.

    TF32 truncates dS to the bits of float16, by up to one unit, which is twice the error of rounding.
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
    ("target", "dtype", "name"), [("sm_80", "float32", "clamp"), ("sm_90", "bfloat16", "clamp no_rel_key rel_value")]
)
def test_programs_that_share_keys(target: str, dtype: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs share the keys of a query, in calls that store no residual."""
    monkeypatch.setattr(splits, "LEAST_KEYS", 64)
    subject = Subject(target, dtype, 64, f"{name} key_lengths", (1, 300))
    way = subject.way()
    check(subject.sample(), way)
    assert "merge" in [launch.name for launch in way.launches]


@pytest.mark.thorough
@pytest.mark.skipif(LACKS_FENCES, reason="kernels of this Triton get all fences from the package")
def test_triton_needs_aligned_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton omits a fence if cp.async cannot load keys. Once this fails, with_aligned_operands is no longer needed."""
    monkeypatch.setattr(forward, "with_aligned_operands", lambda plan, tensors: tensors)
    with pytest.raises(AssertionError, match="wgmma reads what no proxy fence covers"):
        check(STRIDED_KEYS.sample(), STRIDED_KEYS.way())


@pytest.mark.thorough
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_the_order_of_warps_changes_nothing(target: str) -> None:
    """out and gradients have the same bits for any order of warps."""
    first, *others = (results(Subject(target, "bfloat16", 64, "clamp rel_value", (70, 133), seed)) for seed in range(3))
    for other in others:
        for name, result in first.items():
            assert (result is None and other[name] is None) or torch.equal(result, other[name])  # type: ignore[arg-type]


ON_GRIDS = {
    "a window": Case((14, 14), width=64, value_width=64),
    "as wide as a tile": Case((2, 64), width=64, value_width=64),
    "class token": Case((5, 7), prefix=1, width=64, value_width=64),
    "strips": Case((3, 70), prefix=70, width=64, value_width=64),
    "wide heads": Case((6, 14), width=80, value_width=80),
}


@pytest.mark.parametrize(
    ("target", "dtype", "name"),
    [
        *((target, "bfloat16", name) for target in ("sm_80", "sm_90") for name in ON_GRIDS),
        # Without matrix units, lanes that hold copies of the same sum store the same bits.
        *(("sm_80", "float32", name) for name in ("as wide as a tile", "class token")),
    ],
)
def test_call_on_a_grid(target: str, dtype: str, name: str) -> None:
    """All results are right, and the emulator finds nothing."""
    case, way = ON_GRIDS[name], Emulator(target=target)
    given = tensors(case, getattr(torch, dtype))
    with way.computing(Sample()):
        ours = results_on_grid("triton", case, given)
    assert [launch.name for launch in way.launches] == ["grid_forward", "grid_dq", "grid_dkv"]
    assert_right(case, ours, given)

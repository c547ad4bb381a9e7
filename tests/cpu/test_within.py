"""The one comparison: it fails when it should, and records. No test compares in another way."""

from __future__ import annotations

import ast
import csv
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triton_relattn._core.within import VARIABLE, assert_near, sum_allowance, tolerance_of, within

TESTS = Path(__file__).parents[1]
CURE = """
    Compare through triton_relattn/_core/within.py, which `make headroom` reads: within(what, error, allowance) with an allowance
    that is derived (sum_allowance: terms of a sum; torch.finfo: roundings that can be counted), or assert_near(what, actual,
    expected) of two ways to compute the same. Where nothing is rounded, compare with == or torch.equal."""
OTHER_COMPARISONS = ("assert_close", "allclose", "isclose", "approx", "assert_allclose", "assert_almost_equal")
UNROUNDED = {
    "compile/test_compile_report.py": "reports, rounded to a few digits",
    "compile/test_cycles.py": "a model of a GPU beside measurements",
    "compile/test_forward.py": "counted instructions",
    "cpu/test_bench.py": "the exponent of a fit",
    "cpu/test_cycles.py": "a model of a GPU",
    "cpu/test_demo.py": "the exponent of a fit",
    "cpu/test_gpu_parts.py": "seconds",
    "cpu/test_nn.py": "the deviation of random numbers",
    "cpu/test_predictions.py": "reports, rounded to a few digits",
}
"""Files that compare, with pytest.approx, what no processor rounds differently."""
COUNTED = {
    "cpu/test_docs.py": ("found[1]",),
    "cpu/test_dropout.py": ("dropped.mean", "differ.mean"),
    "cpu/test_music_example.py": ("moved - plain",),
    "cpu/test_transformers.py": ("sums.mean",),
    "fuzz/budget.py": ("result - golden",),
    "interpreter/test_backward.py": ("exact - rounded", "- logit"),
    "interpreter/test_forward.py": ("exact_lse - logit",),
}
"""Differences, by file and a part of their text, that are no rounding errors: of counts, shares of random numbers, or what a test
starts from; and the message that says where an error is."""


def is_small(node: ast.AST) -> bool:
    """Whether a chosen limit is written here: 1e-6, 2**-18, or units of a dtype, which are for the one comparison to count."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.right, ast.UnaryOp) and isinstance(node.right.op, ast.USub)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, float) and 0 < abs(node.value) < 1e-3
    return False


def is_error(node: ast.AST) -> bool:
    """Whether the size of a difference is taken: abs, norm or amax of a subtraction."""
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    inside = [node.func.value] if isinstance(node.func, ast.Attribute) else node.args
    return name in ("abs", "norm") and any(isinstance(each, ast.BinOp) and isinstance(each.op, ast.Sub) for each in inside)


def complaints(text: str, file: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            keywords = {each.arg: each.value for each in node.keywords}
            exact = all(isinstance(each := keywords.get(arg), ast.Constant) and each.value == 0 for arg in ("rtol", "atol"))
            is_torchs = isinstance(node.func, ast.Attribute)  # not a test's own function
            if name in OTHER_COMPARISONS and is_torchs and not exact and file not in UNROUNDED:
                yield node.lineno, f"{name} has tolerances that somebody chose"
            limits = node.args[2:] + [each for arg, each in keywords.items() if arg in ("allowance", "tolerance", "smallest")]
            if name in ("within", "assert_near") and any(is_small(each) for limit in limits for each in ast.walk(limit)):
                yield node.lineno, "an allowance that somebody chose"
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
                if isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE):
                    less, more = (left, right) if isinstance(operator, ast.Lt | ast.LtE) else (right, left)
                    if any(is_small(each) for each in ast.walk(more)):
                        yield node.lineno, f"{ast.unparse(more)} is a tolerance that somebody chose"
                    elif any(each in ast.unparse(less) for each in COUNTED.get(file, ())):
                        continue
                    elif any(is_error(each) for each in ast.walk(less)):
                        yield node.lineno, f"{ast.unparse(less)} is an error"


def test_all_errors_are_compared_in_one_place() -> None:
    found = [
        f"{path.relative_to(TESTS.parent)}:{line}: {complaint}"
        for path in sorted(TESTS.rglob("*.py"))
        for line, complaint in complaints(path.read_text(), path.relative_to(TESTS).as_posix())
    ]
    assert not found, "\n".join([*found, CURE])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("torch.testing.assert_close(a, b)", True),
        ("torch.testing.assert_close(a, b, rtol=0, atol=1e-5)", True),
        ("torch.testing.assert_close(a, b, rtol=0, atol=0)", False),
        ("assert np.allclose(a, b)", True),
        ("assert x == pytest.approx(3)", True),
        ("assert_close(a, b)", False),
        ("assert error <= 2**-18 * size", True),
        ("assert 1e-6 > error", True),
        ("assert error > 1e-6", False),
        ("assert (a - b).abs().max() <= budget", True),
        ("assert abs(a - b) < budget", True),
        ("assert (a - b).norm() > 0.1 * a.norm()", False),
        ("within('x', error, 1e-6 * size)", True),
        ("within('x', error, 3 * eps * size)", False),
        ("assert_near('x', a, b, tolerance=2.0**-9)", True),
    ],
)
def test_what_is_complained_about(text: str, wrong: bool) -> None:
    assert bool(list(complaints(text, "cpu/test_some.py"))) == wrong


def test_within() -> None:
    within("scalar", 1.0, 1.0)
    within("elements", torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]))
    within("nothing", torch.zeros(0), torch.zeros(0))
    within("what float32 does not hold", 1e296, 1e297)
    for error, allowance in (
        (1.01, 1.0),
        (1e297, 1e296),
        (math.nan, 1.0),
        (torch.tensor([0.1, 0.0]), torch.tensor([0.0, 1.0])),
        (torch.tensor([0.1, math.nan]), 1.0),
    ):
        with pytest.raises(AssertionError, match="x: off by"):
            within("x", error, allowance)
    for allowance in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(AssertionError, match="no allowance"):
            within("x", 0.0, allowance)
    with pytest.raises(AssertionError, match="absolute value"):
        within("x", -0.5, 1.0)
    with pytest.raises(AssertionError, match="as is said"):
        within("x", 2.0, 1.0, lambda: "as is said")


def test_near() -> None:
    right = torch.tensor([1000.0, 3.0, -math.inf], dtype=torch.float64)
    assert_near("x", right * (1 + 1e-13), right)
    assert_near("zero", torch.zeros(3), torch.zeros(3))
    assert_near("cancelled", torch.full((3,), 1e-13, dtype=torch.float64), torch.zeros(3, dtype=torch.float64), smallest=1.0)
    for wrong in (
        (right / 3 * 3.0000001, right),
        ((right / 3).float().double() * 3, right),  # by way of float32
        (right.float(), right),
        (right[:2], right),
        (right.nan_to_num(neginf=0), right),
        (right.nan_to_num(neginf=math.inf), right),
        (torch.full((3,), 1e-13), torch.zeros(3)),
    ):
        with pytest.raises(AssertionError, match="x: "):
            assert_near("x", *wrong)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_tolerance_is_for_sums_in_any_order(dtype: torch.dtype) -> None:
    """Twice what rounding needs, in as many terms; less than a rounding to the precision below, by as much."""
    eps, lower = torch.finfo(dtype).eps, torch.finfo(torch.float32 if dtype == torch.float64 else torch.float16).eps
    assert round(tolerance_of(dtype) / eps) == round(lower / tolerance_of(dtype))
    terms = int(tolerance_of(dtype) / eps / 2)
    products = torch.randn(terms, dtype=dtype).abs()
    within(
        "order",
        abs(float(products.cumsum(0)[-1].double() - products.double().sum())),
        sum_allowance(terms, float(products.sum()), dtype),
    )
    assert sum_allowance(terms, 1.0, dtype) <= tolerance_of(dtype)


def test_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "checks.csv"))
    within("one, two", torch.tensor([1.0, 3.0, 2.0]), torch.tensor([10.0, 4.0, 8.0]))
    with pytest.raises(AssertionError):
        within("three", 2.0, 1.0, measured=True)
    with (tmp_path / "checks.csv").open(newline="") as file:
        first, second = csv.reader(file)
    assert first[1:] == ["one, two", "3.000e+00", "4.000e+00", "0.7500", "0"] and second[1:] == [
        "three",
        "2.000e+00",
        "1.000e+00",
        "2.0000",
        "1",
    ]
    assert first[0].endswith("test_within.py::test_records")

"""Derived tolerances between two computations of the same result, and assertions on errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from triton_relattn.check import float32_gradient_budget

LOWER = {torch.float64: torch.float32, torch.float32: torch.float16}
"""The next lower precision, whose use in an intermediate step must be detected."""


def dtype_tolerance(dtype: torch.dtype) -> float:
    """Return the largest allowed difference of two computations in ``dtype``, relative to the largest value.

    It is the geometric mean of eps of dtype and of the next lower precision: 5.1e-12 for float64, 1.1e-5 for float32. That is
    23,000 (90) units, twice the rounding of sums of 23,000 (90) values in any order, see sum_allowance; rounding to the lower
    precision exceeds it by the same factor. In 16 bits, where only results are rounded, two units are allowed.
    """
    eps = torch.finfo(dtype).eps
    return math.sqrt(eps * torch.finfo(LOWER[dtype]).eps) if dtype in LOWER else 2 * eps


def sum_allowance(terms: int, magnitudes: torch.Tensor | float, dtype: torch.dtype = torch.float32) -> torch.Tensor | float:
    """Return the largest difference of two sums of ``terms`` products in dtype, in any two orders.

    The error of one is at most ``terms * eps / 2 * magnitudes`` (Higham, Accuracy and Stability, 4.2: one rounding of each
    product and of each addition); magnitudes is the sum of the products' absolute values. There is a factor of two of room.
    """
    return 2 * terms * torch.finfo(dtype).eps * magnitudes


def assert_at_most(
    what: str,
    error: torch.Tensor | float,
    allowance: torch.Tensor | float,
    message: Callable[[], str] | None = None,
) -> float:
    """Assert that an error is at most its allowance, and return the largest ratio; tensors are compared element by element.

    Args:
        what: the name of the compared quantity.
        allowance: positive; elements of a tensor may be zero where the error must be zero.
        message: makes the message of the error, instead of the default one.

    Raises:
        AssertionError: the error is larger than the allowance, or NaN; or the allowance is not positive.
    """
    ratio, worst, allowed = farthest(what, error, allowance)
    if ratio > 1:
        raise AssertionError(
            message() if message else f"{what}: off by {worst:.3e}, {ratio:.3g} times the allowance {allowed:.3e}"
        )
    return ratio


def farthest(what: str, error: torch.Tensor | float, allowance: torch.Tensor | float) -> tuple[float, float, float]:
    """Return the largest ratio of an error and its allowance, infinite for NaN, and both where that is."""
    errors, allowances = (torch.as_tensor(values, device="cpu", dtype=torch.float64).detach() for values in (error, allowance))
    if not bool((allowances >= 0).all()) or (allowances.dim() == 0 and not 0 < float(allowances) < math.inf):
        raise AssertionError(f"{what}: {allowance} is no allowance")
    if bool((errors < 0).any()):
        raise AssertionError(f"{what}: {float(errors.min())} is no error, take its absolute value")
    errors, allowances = torch.broadcast_tensors(errors, allowances)
    if errors.numel() == 0:
        return 0.0, 0.0, 0.0
    ratios = torch.where(errors == 0, 0.0, errors / allowances).flatten().nan_to_num(math.inf, math.inf)
    place = int(ratios.argmax())
    return float(ratios[place]), float(errors.flatten()[place]), float(allowances.flatten()[place])


def assert_near(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    tolerance: float | None = None,
    smallest: float = 0.0,
) -> None:
    """Assert that two results agree up to rounding, relative to the largest expected value.

    Args:
        tolerance: relative; by default :func:`dtype_tolerance` of the dtype.
        smallest: what the largest number is taken to be at least, where terms cancel.

    Raises:
        AssertionError: shapes, dtypes or the places of infinities and NaN differ, or the error is larger.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        found, wanted = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (actual, expected))
        raise AssertionError(f"{what}: {found}, expected {wanted}")
    actual, expected = actual.detach(), expected.detach()
    finite = expected.isfinite()
    beyond = [tensor[~finite].nan_to_num() for tensor in (actual, expected)]
    if not torch.equal(actual.isfinite(), finite) or not torch.equal(*beyond):
        raise AssertionError(f"{what}: infinities or NaN are in other places")
    if not finite.any():
        return
    right = expected[finite].double()
    largest = max(float(right.abs().max()), smallest)
    error = float((actual[finite].double() - right).abs().max())
    if largest == 0:
        if error:
            raise AssertionError(f"{what}: {error:.3e} where only zeros are expected")
        return
    assert_at_most(what, error, (dtype_tolerance(expected.dtype) if tolerance is None else tolerance) * largest)


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest magnitude (at least 1); -inf where -inf is expected."""
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: {actual.dtype}, {expected.dtype}"
    assert_near(name, actual, expected, smallest=1.0)


def assert_bit_equal(results: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Assert that the same results have the same bits, and NaN in the same places."""
    assert results.keys() == expected.keys()
    for name, result in results.items():
        assert torch.equal(result.nan_to_num(12345.0), expected[name].nan_to_num(12345.0)), name
        assert torch.equal(result.isnan(), expected[name].isnan()), name


def assert_gradients_close_fp32(
    name: str, actual: torch.Tensor, golden: torch.Tensor, all_golden: Iterable[torch.Tensor]
) -> None:
    """Assert that a float32 gradient is within its budget, in norm; of lse, -inf where golden is."""
    infinite = golden == -math.inf
    assert torch.equal(actual == -math.inf, infinite), f"{name}: -inf in other places"
    error, golden = (actual.double() - golden).masked_fill(infinite, 0), golden.masked_fill(infinite, 0)
    assert_at_most(name, error.norm(), float32_gradient_budget(golden, all_golden))

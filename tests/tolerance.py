"""How far two ways to compute the same may be apart, and comparisons of an error with what it may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch

from triton_relattn.check import float32_gradient_budget

LOWER = {torch.float64: torch.float32, torch.float32: torch.float16}
"""The precision below each: what a result has that was rounded to it on the way."""


def dtype_tolerance(dtype: torch.dtype) -> float:
    """Return how far apart, relative to their largest number, two ways to compute the same in ``dtype`` may be.

    It lies between the unit of dtype and that of the precision below, equally far from both on a logarithmic scale: 5.1e-12 for
    float64, 1.1e-5 for float32. So 23,000 (90) units are allowed, twice what rounding needs in sums of 23,000 (90) numbers in any
    order, see sum_allowance; a detour through the lower precision takes as many times more. Of 16 bits, in which results are
    rounded once: two units.
    """
    eps = torch.finfo(dtype).eps
    return math.sqrt(eps * torch.finfo(LOWER[dtype]).eps) if dtype in LOWER else 2 * eps


def sum_allowance(terms: int, magnitudes: torch.Tensor | float, dtype: torch.dtype = torch.float32) -> torch.Tensor | float:
    """Return the largest difference of two sums of ``terms`` products in dtype, in any two orders.

    Each is off by at most ``terms * eps / 2`` (Higham, Accuracy and Stability, 4.2: one rounding of each product, one of each
    addition) of ``magnitudes``, the sum of the products' absolute values; there is a factor of two to spare.
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
        what: the name of what is compared.
        allowance: positive; of tensors, elements may be zero, where the error must be.
        message: says more than that, if it fails.

    Raises:
        AssertionError: the error is larger, or NaN; or the allowance is none.
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
    """Assert that two ways to compute the same agree up to rounding, relative to the largest number that is expected.

    Args:
        tolerance: relative to that; :func:`tolerance_of` the dtype, unless something is derived that says more.
        smallest: what the largest number is taken to be at least, where terms cancel.

    Raises:
        AssertionError: shapes or dtypes differ, or the error is larger, or not finite numbers stand in other places.
    """
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        found, wanted = (f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in (actual, expected))
        raise AssertionError(f"{what}: {found}, expected {wanted}")
    actual, expected = actual.detach(), expected.detach()
    finite = expected.isfinite()
    beyond = [tensor[~finite].nan_to_num() for tensor in (actual, expected)]
    if not torch.equal(actual.isfinite(), finite) or not torch.equal(*beyond):
        raise AssertionError(f"{what}: not finite, or finite, where the other is not")
    if not finite.any():
        return
    right = expected[finite].double()
    largest = max(float(right.abs().max()), smallest)
    error = float((actual[finite].double() - right).abs().max())
    if largest == 0:
        if error:
            raise AssertionError(f"{what}: {error:.3e} where all that is expected is zero")
        return
    assert_at_most(what, error, (dtype_tolerance(expected.dtype) if tolerance is None else tolerance) * largest)


def assert_same(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to float64 rounding, relative to the largest magnitude (at least 1); -inf where -inf is expected."""
    assert actual.dtype == expected.dtype == torch.float64, f"{name}: {actual.dtype}, {expected.dtype}"
    assert_near(name, actual, expected, smallest=1.0)


def assert_bit_equal(results: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """The same results with the same numbers, NaN among them."""
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

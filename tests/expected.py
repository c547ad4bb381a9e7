"""The exact results of a call in float64, written independently of the package, and a budget for the rounding of each element.

The oracle is the dense definition, differentiated by autograd. A packed call is computed as the padded batch of its sequences.

Other rules compare errors with those of plain torch in the same precision, over many elements. That fails for calls with a single
key, terms that cancel, or 16 bits. The budget here is first-order error analysis, element by element: it grows with the magnitude
of what is summed, so that rounding always fits in it, and a wrong term does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.tolerance import assert_at_most
from triton_relattn import check
from triton_relattn.testing import Inputs, dropout_mask

UNITS = 16
"""Rounding errors that a number accumulates, in units in the last place."""
SMALLEST_SCALE = 2.0**-59
"""The smallest scale: the kernels replace scales nearer to 0 by it."""
SCALES_THAT_ROUND = 0.03, 16384.0
"""Terms at scales outside this range are never rounded to float16: docs/numerics.md."""
TABLES = ("rel_key", "rel_value", "rel_bias", "rel_p2c")
QUERY_INPUTS, KEY_INPUTS = ("query", "rel_query"), ("key", "value")
INPUTS = (*QUERY_INPUTS, *KEY_INPUTS, *TABLES)
"""The tensors that have gradients."""


class Precision(NamedTuple):
    """Errors of one implementation, to first order."""

    sums: float
    """Relative error of logits, probabilities and sums."""
    products: float = 0.0
    """Relative error of probabilities and dS where they are operands of products."""
    smallest: float = 0.0
    """Absolute error of those operands."""
    out: float = 0.0
    """Relative error of the out that delta is computed from; 0 if it is not."""
    rounds_terms: bool = False
    """Whether products with tables are rounded to float16 (for scales in SCALES_THAT_ROUND), and rel_bias with rel_key's."""


def arithmetic_precision(arithmetic: str | None, dtype: torch.dtype, rounds_terms: bool = False) -> Precision:
    """The errors of "triton", of "tf32" and of all others.

    "tf32" is "triton" in TF32, which cuts operands to the 11 bits of float16. The inputs have no more (see Sample.in_half), so
    that only probabilities and dS lose bits.
    """
    sums = UNITS * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if arithmetic == "tf32":
        return Precision(sums, torch.finfo(torch.float16).eps, out=torch.finfo(torch.float32).eps)
    if arithmetic != "triton":
        return Precision(sums)
    info = torch.finfo(dtype)
    low = info.eps if info.bits < 32 else 0.0
    return Precision(sums, low, info.tiny * low, info.eps, rounds_terms)


class Batch:
    """Converts between packed tensors and a padded batch; tensors of a call that is not packed stay as they are."""

    def __init__(self, call: dict[str, Any]) -> None:
        self.index, self.lengths = {}, {}
        for which in "qk" if call.get("cu_seqlens_q") is not None else "":
            starts = call[f"cu_seqlens_{which}"].long()
            places = starts[:-1, None] + torch.arange(call[f"max_seqlen_{which}"])
            self.index[which] = places.masked_fill(places >= starts[1:, None], starts[-1])
            self.lengths[which] = starts.diff()

    def padded(self, tensor: Tensor, which: str) -> Tensor:
        """(total, H, ...) as (B, H, N, ...), with zeros after each sequence."""
        if not self.index:
            return tensor
        return torch.cat((tensor, tensor.new_zeros(1, *tensor.shape[1:])))[self.index[which]].transpose(1, 2)

    def packed(self, tensor: Tensor, which: str) -> Tensor:
        """(B, H, N, ...) as (total, H, ...)."""
        return tensor.transpose(1, 2)[self.index[which] < self.lengths[which].sum()] if self.index else tensor

    def inputs(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        axes = dict.fromkeys(QUERY_INPUTS, "q") | dict.fromkeys(KEY_INPUTS, "k")
        return {name: self.padded(tensor, axes[name]) if name in axes else tensor for name, tensor in tensors.items()}


class Pairs:
    """Facts about each pair of query and key, (B, H, Nq, Nk): its table row, whether the table applies, whether the pair is
    visible, and what the mask adds."""

    def __init__(self, call: dict[str, Any], batch: Batch | None = None) -> None:
        batch = batch or Batch(call)
        query, key = batch.padded(call["query"], "q"), batch.padded(call["key"], "k")
        shape = (*query.shape[:3], key.shape[2])
        i, j = torch.arange(shape[2])[:, None], torch.arange(shape[3])
        by_entry = lambda numbers: numbers.view(-1, 1, 1, 1)  # noqa: E731
        offset = call.get("query_offset", 0)
        relative = (j - i - (by_entry(offset) if isinstance(offset, Tensor) and offset.dim() else int(offset))).expand(shape)
        self.num_rows = next(
            (call[name].shape[-1 if name == "rel_bias" else -2] for name in TABLES if call.get(name) is not None), 1
        )
        positions = call.get("positions")
        self.row = relative - (-(self.num_rows // 2) if positions is None else positions.first)
        self.applies = (self.row >= 0) & (self.row < self.num_rows) | (positions is None or positions.outside != "zero")
        self.row = self.row.clamp(0, self.num_rows - 1)
        left, right = call.get("window_size") or (-1, -1)
        right = 0 if call.get("is_causal") and right != 0 else right
        self.visible = ((relative >= -left) | (left < 0)) & ((relative <= right) | (right < 0))
        if batch.index:
            self.visible = self.visible & (i < by_entry(batch.lengths["q"])) & (j < by_entry(batch.lengths["k"]))
        if call.get("key_lengths") is not None:
            self.visible = self.visible & (j < by_entry(call["key_lengths"]))
        self.added, mask = torch.zeros(shape, dtype=torch.float64), call.get("attn_mask")
        if mask is not None:
            shown = mask if mask.dtype == torch.bool else mask != -math.inf
            self.visible = self.visible & shown
            self.added = self.added if mask.dtype == torch.bool else self.added + mask.double().masked_fill(~shown, 0)

    def by_pair(self, by_row: Tensor) -> Tensor:
        """Gather values by query and table row, (..., Nq, rows), to pairs, (..., Nq, Nk)."""
        return by_row.expand(*self.row.shape[:3], self.num_rows).gather(-1, self.row) * self.applies

    def terms(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q.k, p.E + k.F and b of each pair, zero for absent terms."""
        query = inputs["query"]
        key = inputs["key"].repeat_interleave(query.shape[1] // max(inputs["key"].shape[1], 1), 1)
        relative = bias = query.new_zeros(())
        if "rel_key" in inputs:
            relative = self.by_pair(inputs.get("rel_query", query) @ inputs["rel_key"].mT)
        if "rel_p2c" in inputs:
            relative = relative + (inputs["rel_p2c"] @ key.mT).gather(-2, self.row) * self.applies
        if "rel_bias" in inputs:
            bias = self.by_pair(inputs["rel_bias"][..., None, :])
        return query @ key.mT, relative, bias

    def attend(self, inputs: dict[str, Tensor], weights: Tensor) -> Tensor:
        """The sum over keys of weights (V + A)."""
        out = weights @ inputs["value"].repeat_interleave(weights.shape[1] // max(inputs["value"].shape[1], 1), 1)
        if "rel_value" not in inputs:
            return out
        by_row = weights.new_zeros(*weights.shape[:3], self.num_rows).scatter_add(-1, self.row, weights * self.applies)
        return out + by_row @ inputs["rel_value"]


def probabilities(logits: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Probabilities and lse of logits; zeros and -inf for queries that see nothing."""
    blind = ~pairs.visible.any(-1, keepdim=True)
    logits = logits.masked_fill(~pairs.visible, -math.inf).masked_fill(blind, 0)
    probs = torch.softmax(logits, -1).masked_fill(blind, 0) if logits.shape[-1] else logits
    # Not torch.logsumexp: its derivative is wrong for logits so large that the logarithm of the sum is rounded away.
    top = logits.detach().amax(-1) if logits.shape[-1] else logits.new_zeros(logits.shape[:3])
    lse = top + (logits - top[..., None]).exp().sum(-1).log()
    return probs, lse.masked_fill(blind[..., 0], -math.inf)


def logit_scales(call: dict[str, Any]) -> tuple[float, float]:
    scale = call["query"].shape[-1] ** -0.5 if call.get("scale") is None else call["scale"]
    return scale, scale if call.get("rel_scale") is None else call["rel_scale"]


def dropout_factors(call: dict[str, Any], keep: Tensor | None, pairs: Pairs) -> Tensor:
    """The factor of dropout for each probability: 1 / (1 - p), or 0."""
    if keep is None:
        return torch.ones_like(pairs.added)
    p = call["dropout_p"]
    return keep[..., : pairs.row.shape[2], : pairs.row.shape[3]].double() * (1 / (1 - p) if p < 1 else 0)


def forward(call: dict[str, Any], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out and lse of a call whose tensors are float64; autograd through it gives the gradients."""
    batch = Batch(call)
    pairs, inputs = Pairs(call, batch), batch.inputs({name: call[name] for name in INPUTS if call.get(name) is not None})
    (content, relative, bias), (scale, rel_scale), softcap = pairs.terms(inputs), logit_scales(call), call.get("softcap")
    logits = scale * content + rel_scale * relative + bias
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    probs, lse = probabilities(logits + pairs.added, pairs)
    out = batch.packed(pairs.attend(inputs, probs * dropout_factors(call, keep, pairs)), "q")
    return out, batch.packed(lse, "q").T if batch.index else lse


def exact(call: dict[str, Any], keep: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The inputs as leaves in float64, and out and lse of them."""
    leaves = {name: call[name].detach().double().requires_grad_() for name in INPUTS if call.get(name) is not None}
    return leaves, *forward({**call, **leaves}, keep)


def budgets(call: dict[str, Any], d_out: Tensor, d_lse: Tensor, keep: Tensor | None, precision: Precision) -> dict[str, Tensor]:
    """The budget of out, lse and each gradient, before the rounding of the results themselves."""
    leaves = {name: call[name].detach().double().abs().requires_grad_() for name in INPUTS if call.get(name) is not None}
    batch = Batch(call)
    signed = batch.inputs({name: call[name].detach().double() for name in leaves})
    pairs, sizes = Pairs({**call, **leaves}, batch), batch.inputs(leaves)
    d_out = batch.padded(d_out.double().abs(), "q")
    d_lse = batch.padded(d_lse.T, "q") if batch.index else d_lse
    visible, (scale, rel_scale), softcap, unit = pairs.visible, logit_scales(call), call.get("softcap"), precision.sums

    (content, relative, bias), size_terms = pairs.terms(signed), pairs.terms(sizes)
    with torch.no_grad():
        z = scale * content + rel_scale * relative + bias
        content, relative, bias = size_terms
        z_error = unit * ((abs(scale) + SMALLEST_SCALE) * content + abs(rel_scale) * relative + bias)
        if precision.rounds_terms and SCALES_THAT_ROUND[0] <= abs(scale) <= SCALES_THAT_ROUND[1]:
            half = torch.finfo(torch.float16)
            terms = abs(rel_scale) * relative + bias * ("rel_key" in sizes)
            z_error = z_error + half.eps * terms + half.tiny * half.eps * abs(scale) * bool({"rel_key", "rel_p2c"} & sizes.keys())
        slope, slope_error = torch.ones_like(z), torch.zeros_like(z)
        if softcap is not None:
            share = torch.tanh(z / softcap)
            slope = 1 - share.square()
            share_error = (slope * z_error / softcap + unit * (1 + share.abs())).clamp_max(2)
            slope_error = (2 * share.abs() + share_error) * share_error
            z, z_error = softcap * share, softcap * share_error
        if pairs.added.any():
            z, z_error = z + pairs.added, z_error + unit * (z.abs() + pairs.added.abs())
        z_error = z_error.masked_fill(~visible, 0)
        probs, lse = probabilities(z, pairs)
        shifts = ((probabilities(z + sign * z_error, pairs)[1] - lse).abs() for sign in (1, -1))
        lse_error = (torch.maximum(*shifts) + unit * (1 + lse.abs())).masked_fill(lse == -math.inf, 0)
        relative_error = (z_error + lse_error[..., None] + unit).masked_fill(~visible, 0)
        raised = torch.where(visible, (probs.log() + relative_error).clamp_max(0).exp(), 0)
        # Where lse is so large that rounding exceeds differences of logits, probabilities are arbitrary.
        probs_error = (raised - probs).clamp_min(0) + probs * relative_error.clamp_max(1)
        probs_error = visible * (probs_error + torch.finfo(torch.float32).tiny)
        probs_error = torch.where(relative_error > 0.5, visible * torch.maximum(probs_error, raised), probs_error)

        factors, tiniest = dropout_factors(call, keep, pairs), precision.smallest * visible
        operand_error = (probs_error + (precision.products + unit) * probs + tiniest) * factors
        out_error, out_size = (pairs.attend(sizes, weights) for weights in (operand_error, probs * factors))
    ones = torch.ones_like(probs, requires_grad=True)
    d_probs = torch.autograd.grad(pairs.attend(sizes, ones), ones, d_out)[0] * factors
    delta = (probs * d_probs).sum(-1, keepdim=True)
    delta_error = (probs_error * d_probs).sum(-1, keepdim=True) + 2 * unit * delta
    if precision.out:
        delta_error = delta_error + ((out_error + precision.out * out_size) * d_out).sum(-1, keepdim=True)
    inner = d_probs + delta + d_lse.abs()[..., None]
    d_scores = probs * inner * slope
    d_scores_error = slope * (probs_error * inner + probs * (delta_error + 2 * unit * inner)) + slope_error * inner * raised
    d_scores_error = d_scores_error + (precision.products + unit) * d_scores + tiniest

    # The rest is linear: sums of products with errors are gradients of sums of products.
    d_content = abs(scale) * d_scores_error + SMALLEST_SCALE * (d_scores + d_scores_error)
    tiniest_score, (content, relative, bias) = max(abs(scale), abs(rel_scale)) * tiniest, size_terms
    from_scores = (
        (d_content + tiniest_score) * content
        + (abs(rel_scale) * d_scores_error + tiniest_score) * relative
        + d_scores_error * bias
    )
    from_values = pairs.attend(sizes, operand_error) * d_out
    found = torch.autograd.grad(from_scores.sum() + from_values.sum(), list(leaves.values()), materialize_grads=True)
    results = {"out": batch.packed(out_error, "q"), "lse": batch.packed(lse_error, "q").T if batch.index else lse_error}
    return results | {f"d_{name}": budget for name, budget in zip(leaves, found, strict=True)}


def keep_mask(inputs: Inputs, dropout_p: float = 0.0, seed: int = 0, **arguments: Any) -> Tensor | None:
    """The mask of what dropout keeps after torch.manual_seed(seed), (B, H, Nq, Nk); None without dropout."""
    if not dropout_p:
        return None
    sizes = [*inputs.query.shape[:3], inputs.key.shape[2]]
    if "cu_seqlens_q" in arguments:
        sizes = [len(arguments["cu_seqlens_q"]) - 1, sizes[1], arguments["max_seqlen_q"], arguments["max_seqlen_k"]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return dropout_mask(*sizes, dropout_p)  # type: ignore[call-arg]


def exact_results(inputs: Inputs, *, keep: Tensor | None = None, **arguments: Any) -> dict[str, Tensor]:
    """out, lse and all gradients of a call, packed or not, in float64. keep: the mask of dropout, by default keep_mask's."""
    call = {name: getattr(inputs, name) for name in INPUTS} | arguments
    call = {name: value.cpu() if isinstance(value, Tensor) else value for name, value in call.items() if value is not None}
    leaves, out, lse = exact(call, keep_mask(inputs, **arguments) if keep is None else keep.cpu())
    cotangents = [inputs.d_out.double().cpu(), inputs.d_lse.double().cpu()]
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), cotangents, materialize_grads=True)
    results = {"out": out.detach(), "lse": lse.detach(), **dict(zip((f"d_{name}" for name in leaves), gradients, strict=True))}
    return {name: result.to(inputs.query.device) for name, result in results.items()}


def table_gradient_budget(
    inputs: Inputs, *, table: str = "rel_key", keep: Tensor | None = None, **arguments: Any
) -> tuple[Tensor, float]:
    """The exact gradient of a table and its largest allowed error, see triton_relattn.check; packed calls as padded ones."""
    keep = keep_mask(inputs, **arguments) if keep is None else keep
    if "cu_seqlens_q" in arguments:
        batch = Batch(arguments)
        tensors = batch.inputs({name: tensor for name, tensor in inputs._asdict().items() if tensor is not None})
        tensors |= {"d_out": batch.padded(inputs.d_out, "q"), "d_lse": batch.padded(inputs.d_lse.T, "q")}
        packing = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        arguments = {name: value for name, value in arguments.items() if name not in packing}
        inputs, arguments["key_lengths"] = Inputs(**tensors), batch.lengths["k"]
    return check.table_gradient_budget(inputs, table, keep=keep, **arguments)


def assert_table_gradient(name: str, actual: Tensor, inputs: Inputs, *, table: str = "rel_key", **arguments: Any) -> None:
    """Assert that a table's gradient is as accurate as an exact sum of dS (rel_value: P) rounded once to the inputs' dtype."""
    golden, budget = table_gradient_budget(inputs, table=table, **arguments)
    assert golden.any(), f"{name}: the exact gradient is all zero, the check would be vacuous"
    assert_at_most(name, (actual.double() - golden).abs().max(), budget)


def worst_draw(
    inputs: Inputs,
    golden: Callable[[Inputs], dict[str, Tensor]],
    reference: Callable[[Inputs], dict[str, Tensor]],
    draws: int = 3,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The golden results, and results of plain torch with the largest errors of several draws.

    The largest error of plain torch varies by up to a factor of two with the processor and by chance. Each further draw changes
    the inputs by one unit in the last place, which changes all rounding errors.
    """

    def moved(tensor: Tensor | None, generator: torch.Generator) -> Tensor | None:
        if tensor is None:
            return None
        steps = torch.randint(-1, 2, tensor.shape, generator=generator)
        return tensor * (1 + torch.finfo(tensor.dtype).eps * steps).to(tensor.dtype)

    right, errors = golden(inputs), list[dict[str, Tensor]]()
    for number in range(draws):
        generator = torch.Generator().manual_seed(number)
        changed = Inputs(*(moved(tensor, generator) for tensor in inputs)) if number else inputs  # type: ignore[arg-type]
        exact, found = golden(changed) if number else right, reference(changed)
        errors.append({name: (found[name].double() - exact[name]).masked_fill(exact[name].isinf(), 0) for name in found})
    worst = {name: max((draw[name] for draw in errors), key=lambda error: float(error.norm(math.inf))) for name in errors[0]}
    return right, {name: right[name] + error for name, error in worst.items()}


class Expected(NamedTuple):
    golden: Tensor
    budget: Tensor


def expected(
    call: dict[str, Any], d_out: Tensor, d_lse: Tensor, keep: Tensor | None, rounds_terms: bool = False
) -> dict[str, Expected]:
    """out, lse and the gradients of all tensors of a call, by "d_" and their names.

    Args:
        call: the arguments of a public function by name; "implementation" determines the budget.
        keep: the mask of dropout, (B, H, ...) at least as large as the longest sequence; None without dropout.
        rounds_terms: the kernels round terms to float16.
    """
    call = {name: value for name, value in call.items() if value is not None}
    leaves, out, lse = exact(call, keep)
    cotangents = [d_out.double(), d_lse.double()]
    gradients = torch.autograd.grad([out, lse], list(leaves.values()), cotangents, materialize_grads=True)
    golden = {"out": out.detach(), "lse": lse.detach(), **dict(zip((f"d_{name}" for name in leaves), gradients, strict=True))}
    precision = arithmetic_precision(call.get("implementation"), call["query"].dtype, rounds_terms)
    allowed = budgets(call, d_out, d_lse.double(), keep, precision)
    return {name: Expected(result, allowed[name].detach()) for name, result in golden.items()}


def result_dtype(name: str, call: dict[str, Any]) -> torch.dtype:
    """The dtype of a result: out has that of query, lse at least float32, a gradient that of its tensor."""
    query: torch.dtype = call["query"].dtype
    if name == "lse":
        return torch.promote_types(query, torch.float32)
    return query if name == "out" else call[name.removeprefix("d_")].dtype  # type: ignore[no-any-return]


def assert_within(name: str, actual: Tensor, golden: Tensor, budget: Tensor) -> float:
    """Assert that each element is within its budget plus the rounding to its dtype, where the dtype can hold it.

    Returns the largest error / allowance.
    """
    info = torch.finfo(actual.dtype)
    assert actual.shape == golden.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(golden.shape)}"
    assert not budget.isnan().any(), f"{name}: the budget is NaN"
    infinite = golden == -math.inf
    golden = golden.masked_fill(infinite, 0)
    budget = budget + info.eps * golden.abs() + info.tiny * (1 if info.bits >= 32 else info.eps)
    result = actual.detach().double().masked_fill(infinite, math.inf).masked_fill(infinite & (actual == -math.inf), 0)
    representable = golden.abs() + budget <= info.max

    def message() -> str:
        wrong = ~((result - golden).abs() <= budget) & representable
        where = tuple(wrong.nonzero()[0].tolist())
        exact = -math.inf if infinite[where] else golden[where].item()
        return (
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, first at {where}: "
            f"got {actual[where].item():.9g}, expected {exact:.9g} to within {budget[where].item():.3g}"
        )

    return assert_at_most(name, (result - golden).abs()[representable], budget[representable], message)

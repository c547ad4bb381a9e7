"""Plots of one attention call: its terms, and how far it looks. Needs matplotlib: ``pip install matplotlib``.

The functions compute densely, for sequences that are short enough to be looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from ._core import validation
from ._core.arguments import Arguments, Options
from ._core.dtypes import without_autocast
from ._core.names import require_names
from ._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from ._reference import position_term, resolved_reference
from .positions import RelativePositions

LARGEST = 4096 * 4096  # pairs
ACCENT, INK, MUTED = "#d1495b", "#1f2933", "#6b7785"


def attention_maps(
    query: torch.Tensor,
    key: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    batch: int = 0,
    head: int = 0,
    **arguments: Any,
) -> Any:
    """Draw heat maps of the content term, the position term, their sum, and the probabilities.

    Args:
        query: (B, Hq, Nq, D).
        key: (B, Hk, Nk, D).
        batch, head: the batch entry and the head to show.
        rel_key, arguments: as of :func:`triton_relattn.fused_relative_attention`. Those that concern values change nothing.

    Returns:
        A matplotlib Figure with four axes. The first three share a scale around 0.

    Raises:
        ValueError: as the functional, or more than 4096 x 4096 pairs.
        ImportError: matplotlib is not installed.
    """
    terms = attention_terms(query, key, rel_key, **arguments)
    content, position, probs = (tensor[batch, head].numpy(force=True) for tensor in terms)
    figure, axes = _figure(1, 4, (15.5, 4.1))
    total = content + position
    largest = max(float(abs(values).max()) for values in (content, position, total))
    panels = (("content term", content), ("position term", position), ("their sum", total))
    for axis, (title, values) in zip(axes, panels, strict=False):
        image = axis.imshow(values, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
        _describe(axis, title)
    figure.colorbar(image, ax=axes[:3], fraction=0.02, pad=0.02)
    image = axes[3].imshow(probs, cmap="magma", vmin=0, interpolation="nearest")
    _describe(axes[3], "probabilities")
    figure.colorbar(image, ax=axes[3], fraction=0.046, pad=0.04)
    return figure


def attention_by_distance(query: torch.Tensor, key: torch.Tensor, rel_key: torch.Tensor | None = None, **arguments: Any) -> Any:
    """Draw the mean probability against the relative position r = j - i - query_offset: a line for each head and one for their
    mean.

    The mean is over all pairs with that r, of all batch entries. Arguments and errors as of :func:`attention_maps`.

    Returns:
        A matplotlib Figure with one axis.
    """
    *_, probs = attention_terms(query, key, rel_key, **arguments)
    found = mean_by_distance(probs, arguments.get("query_offset"))
    distances, means = (tensor.numpy(force=True) for tensor in found)
    figure, (axis,) = _figure(1, 1, (7.5, 4.1))
    for line in means:
        axis.plot(distances, line, color=MUTED, alpha=0.35, linewidth=0.9)
    axis.plot(distances, means.mean(0), color=ACCENT, linewidth=2.2, label=f"mean of {len(means)} heads")
    axis.axvline(0, color=INK, linewidth=0.7)
    axis.set(xlabel="relative position r  (negative: past)", ylabel="mean probability", ylim=(0, None))
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    return figure


def attention_terms(
    query: torch.Tensor,
    key: torch.Tensor,
    rel_key: torch.Tensor | None = None,
    *,
    rel_query: torch.Tensor | None = None,
    rel_bias: torch.Tensor | None = None,
    rel_p2c: torch.Tensor | None = None,
    positions: RelativePositions | None = None,
    query_offset: int | torch.Tensor | None = None,
    scale: float | None = None,
    rel_scale: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return content term, position term and probabilities of a call, each (B, Hq, Nq, Nk), float32 or float64.

    Arguments and errors are as of :func:`attention_maps`. The terms are before softcap and masks; the probabilities are after
    them and before dropout.
    """
    num_queries = query.shape[2]
    batch, key_heads, num_keys = key.shape[:3]
    if num_queries * num_keys > LARGEST:
        raise ValueError(f"plots are limited to 4096 x 4096 pairs, got {num_queries} x {num_keys}")
    for name in ("rel_value", "dropout_p", "implementation", "return_lse"):  # change nothing here
        others.pop(name, None)
    if rel_key is None and rel_bias is None and rel_p2c is None:  # positions of a table for values, which is not shown
        positions = None
    identity = torch.eye(num_keys, dtype=query.dtype, device=query.device).expand(batch, key_heads, -1, -1)
    require_names("attention_terms", others, Options.__annotations__)
    arguments = Arguments(
        query,
        key,
        identity,
        rel_key,
        rel_query=rel_query,
        rel_bias=rel_bias,
        rel_p2c=rel_p2c,
        positions=positions,
        rel_scale=rel_scale,
        query_offset=query_offset,
        scale=scale,
        **others,
    )
    tensors, spec = validation.resolve(arguments)

    dtype = torch.promote_types(query.dtype, torch.float32)
    moved: dict[str, Any] = {
        name: None if each is None else each.detach().to(dtype) for name, each in zip(DIFFERENTIABLE, tensors, strict=False)
    }
    tensors = tensors._replace(**moved)
    with without_autocast(query.device):
        return _terms(tensors, spec)


def _terms(tensors: AttentionTensors, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    probs, _ = resolved_reference(tensors, spec)
    query, key, _, rel_query, rel_key, _, rel_bias, rel_p2c, *_ = tensors
    (heads, num_queries), (key_heads, num_keys) = query.shape[1:3], key.shape[1:3]
    key = key.repeat_interleave(heads // key_heads, 1)
    content = spec.scale * (query @ key.mT)
    offset = spec.query_offset if tensors.query_offsets is None else tensors.query_offsets.view(-1, 1, 1, 1)
    distance = torch.arange(num_keys, device=query.device) - torch.arange(num_queries, device=query.device)[:, None] - offset
    row, inside = RelativePositions(spec.first, spec.last, "clamp" if spec.clamp else "zero").rows(distance)
    p = query if rel_query is None else rel_query
    position = position_term(p, key, rel_key, rel_bias, rel_p2c, row.expand_as(content), inside, spec.rel_scale)
    return content, position, probs


def mean_by_distance(probs: torch.Tensor, query_offset: int | torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the relative positions that occur, (R,), and their mean probability in each head, (H, R), over all pairs."""
    batch, heads, num_queries, num_keys = probs.shape
    offset = query_offset.view(-1, 1, 1, 1) if isinstance(query_offset, torch.Tensor) else query_offset or 0
    distance = torch.arange(num_keys, device=probs.device) - torch.arange(num_queries, device=probs.device)[:, None] - offset
    distance = distance.expand(batch, 1, -1, -1)
    first = int(distance.min())
    index = (distance - first).expand_as(probs).transpose(0, 1).flatten(1)
    sums = probs.new_zeros(heads, int(index.max()) + 1)
    counts = sums.scatter_add(1, index, torch.ones_like(index, dtype=sums.dtype))
    sums = sums.scatter_add(1, index, probs.transpose(0, 1).flatten(1))
    present = counts[0] > 0
    return torch.arange(sums.shape[1], device=probs.device)[present] + first, (sums / counts.clamp(min=1))[:, present]


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("triton_relattn.plots needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def _describe(axis: Any, title: str) -> None:
    axis.set_title(title, loc="left", fontsize=11, color=INK)
    axis.set_xlabel("key j", color=MUTED)
    axis.set_ylabel("query i", color=MUTED)
    axis.tick_params(colors=MUTED)

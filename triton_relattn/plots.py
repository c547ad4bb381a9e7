"""Plots of one attention call: its terms, and how far it looks. Needs matplotlib: ``pip install matplotlib``.

The functions compute densely, for sequences that are short enough to be looked at.
"""

from __future__ import annotations

from typing import Any

import torch

from ._core.arguments import Arguments, Options
from ._core.dtypes import without_autocast
from ._core.names import require_names
from ._core.spec import DIFFERENTIABLE
from ._core.validation import resolve
from ._reference import probabilities, score_terms

LARGEST = 4096 * 4096  # pairs


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
    figure = _figure(15.5)
    axes = figure.subplots(1, 4)
    total = content + position
    largest = max(float(abs(term).max()) for term in (content, position, total))
    signed: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
    panels = {"content term": content, "position term": position, "their sum": total, "probabilities": probs}
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        colors = {"cmap": "magma", "vmin": 0} if values is probs else signed
        image = axis.imshow(values, interpolation="nearest", **colors)
        axis.set(xlabel="key j", ylabel="query i")
        axis.set_title(title, loc="left", fontsize=11)
        if values is not content and values is not position:  # one bar for the first three, one for the last
            figure.colorbar(image, ax=axis if values is probs else axes[:3], fraction=0.04, pad=0.03)
    return figure


def attention_by_distance(query: torch.Tensor, key: torch.Tensor, rel_key: torch.Tensor | None = None, **arguments: Any) -> Any:
    """Draw the mean probability against the relative position r = j - i - query_offset: a line per head and one for their
    mean.

    The mean is over all pairs with that r, of all batch entries. Arguments and errors as of :func:`attention_maps`.

    Returns:
        A matplotlib Figure with one axis.
    """
    *_, probs = attention_terms(query, key, rel_key, **arguments)
    offset = 0 if arguments.get("query_offset") is None else arguments["query_offset"]
    i, j = (torch.arange(size, device=probs.device) for size in probs.shape[2:])
    r = j - i[:, None] - torch.as_tensor(offset, device=probs.device).view(-1, 1, 1, 1)
    distances, index = r.expand_as(probs).unique(return_inverse=True)
    # (heads, R): sums over the pairs of each distance, and how many pairs it has
    index, pairs = (tensor.transpose(0, 1).flatten(1) for tensor in (index, probs))
    zeros = pairs.new_zeros(len(pairs), len(distances))
    means = zeros.scatter_add(1, index, pairs) / zeros.scatter_add(1, index, torch.ones_like(pairs))
    figure = _figure(7.5)
    axis = figure.subplots()
    for line in means:
        axis.plot(distances.tolist(), line.tolist(), color="gray", alpha=0.35, linewidth=0.9)
    axis.plot(distances.tolist(), means.mean(0).tolist(), color="crimson", linewidth=2.2, label=f"mean of {len(means)} heads")
    axis.axvline(0, color="black", linewidth=0.7)
    axis.set(xlabel="relative position r  (negative: past)", ylabel="mean probability", ylim=(0, None))
    axis.legend(frameon=False)
    return figure


def attention_terms(
    query: torch.Tensor, key: torch.Tensor, rel_key: torch.Tensor | None = None, **arguments: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return content term, position term and probabilities of a call, each (B, Hq, Nq, Nk), float32 or float64.

    Arguments and errors are as of :func:`attention_maps`. The terms are before softcap and masks; the probabilities are after
    them and before dropout.
    """
    if query.shape[2] * key.shape[2] > LARGEST:
        raise ValueError(f"plots are limited to 4096 x 4096 pairs, got {query.shape[2]} x {key.shape[2]}")
    for name in ("rel_value", "dropout_p", "implementation", "return_lse"):  # change nothing here
        arguments.pop(name, None)
    if rel_key is None and arguments.get("rel_bias") is None and arguments.get("rel_p2c") is None:
        arguments.pop("positions", None)  # of a table for values, which is not shown
    require_names("attention_terms", arguments, Options.__annotations__)
    tensors, spec = resolve(Arguments(query, key, key, rel_key, **arguments))
    dtype = torch.promote_types(query.dtype, torch.float32)
    given = {name: getattr(tensors, name) for name in DIFFERENTIABLE}
    tensors = tensors._replace(**{name: tensor.detach().to(dtype) for name, tensor in given.items() if tensor is not None})
    with without_autocast(query.device):
        content, position = score_terms(tensors, spec)
        position = torch.zeros_like(content) if position is None else position
        probs, _ = probabilities(content + position, tensors, spec, keep=None)
    return content, position, probs


def _figure(width: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("triton_relattn.plots needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, 4.1), layout="constrained")

"""The way of a call from a public function to an implementation.

A kind of call is checked, resolved and given to an implementation once. Later calls of that kind, whose ``key_of`` is the same,
are known. Where nothing watches (_core/watchers.py), autograd gets a call as a RelativeAttention; else torch's dispatcher does,
as an operator (_operators.py). Both ways end in the same functions of the implementation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from . import _implementations
from ._core import validation
from ._core.arguments import Arguments, asks_for_values, has_values
from ._core.dropout import draw_dropout
from ._core.dtypes import with_wide_tables
from ._core.spec import DIFFERENTIABLE, AttentionSpec, AttentionTensors
from ._core.watchers import PLAIN, facts_of, is_watched
from ._implementations import REFERENCE, Implementation, Results
from ._operators import SEQUENCE, is_differentiated, relative_attention
from .positions import RelativePositions

MOST_KNOWN = 4096
KINDS = frozenset((*PLAIN, type(None), bool, int, float, tuple, RelativePositions))
"""Of the arguments of calls that may be known."""
READ = ("attn_mask", "key_lengths", "query_offset", "cu_seqlens_q", "cu_seqlens_k")
"""The arguments whose values are checked where they can be read; tensors among them may have to be rearranged."""


class Known(NamedTuple):
    """All of a kind of call but its tensors. run: the implementation's forward, with tensors in the order of AttentionTensors, as
    long as its surroundings are these."""

    spec: AttentionSpec
    implementation: Implementation
    surroundings: Any
    run: Callable[..., Results]
    is_differentiated: bool
    is_rearranged: bool  # the implementation gets other tensors than the caller gave


_known: dict[Any, Known] = {}


def attend(arguments: Arguments, name: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute out (B, Hq, Nq, Dv) and lse (B, Hq, Nq), or (1, Hq, total_q, Dv) and (1, Hq, total_q) of a packed batch; lse may be
    None if it is not asked for. name: of the implementation, or None."""
    arguments = arguments.autocast()
    key = None if is_watched() else key_of(arguments, name)
    known = None if key is None else _known.get(key)
    if known is not None and (
        known.surroundings != known.implementation.surroundings(arguments.query) or (known.is_rearranged and asks_for_values())
    ):
        known = None
    if known is None:
        tensors, spec = validation.resolve(arguments)
        chosen = _implementations.choose_implementation(name, tensors.query, tensors.value, tensors.rel_query)
        if key is None or chosen is REFERENCE or tensors.query.device.type == "meta":
            return _attend_watched(tensors, spec, chosen, arguments.return_lse)
        tensors = _with_dropout(tensors, spec)
        read = [value for field in READ if isinstance(value := getattr(arguments, field), torch.Tensor)]
        known = _know(tensors, spec._replace(with_lse=arguments.return_lse), chosen, bool(read))
        if not any(map(has_values, read)):
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[key] = known
    elif known.is_rearranged:
        tensors = _with_dropout(validation.arranged(arguments), known.spec)
    else:
        query, keys, value, rel_key, rel_query, *tables = arguments[:8]
        tensors = _with_dropout(AttentionTensors(query, keys, value, rel_query, rel_key, *tables), known.spec)
    if known.is_differentiated:
        return _apply(known, *tensors) if known.spec.with_lse else (_apply(known, *tensors), None)
    out, lse, *_ = known.run(*tensors)
    return out, lse


def _with_dropout(tensors: AttentionTensors, spec: AttentionSpec) -> AttentionTensors:
    """Draw what dropout needs."""
    return tensors if spec.dropout_p == 0 else tensors._replace(**draw_dropout(tensors.query, tensors.num_sequences))


def _know(tensors: AttentionTensors, spec: AttentionSpec, chosen: Implementation, is_rearranged: bool) -> Known:
    """Decide how calls of a kind are computed."""
    differentiated = is_differentiated(tensors)
    save_extra = differentiated and chosen.saves_extra(tensors, spec)
    run, surroundings = chosen.prepared(tensors, spec, save_extra), chosen.surroundings(tensors.query)
    return Known(spec, chosen, surroundings, run, differentiated, is_rearranged)


def key_of(arguments: Arguments, name: str | None) -> Any:
    """Return all that the way of a call may depend on, tensors by what can be known without their values; None if there is
    a tensor of a subclass, or something unusual."""
    kinds = tuple(map(type, arguments))
    if not KINDS.issuperset(kinds):
        return None
    tensors, others = list[torch.Tensor](), list[Any]()
    for value, kind in zip(arguments, kinds, strict=True):
        if value is not None:
            (tensors if kind in PLAIN else others).append(value)  # type: ignore[arg-type]
    try:
        facts = tuple([facts_of(tensor) for tensor in tensors])
    except RuntimeError:  # sparse and nested tensors have no strides or no memory
        return None
    return (
        name,
        torch.is_grad_enabled(),
        kinds,  # also of scalars: 1 == True == 1.0
        *others,
        None if arguments.window_size is None else tuple(map(type, arguments.window_size)),
        facts,
        *[tensor.requires_grad for tensor in tensors],
    )


def _attend_watched(
    tensors: AttentionTensors, spec: AttentionSpec, implementation: Implementation, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute out and lse by the operator."""
    tensors = _with_dropout(tensors, spec)
    if type(tensors.query) is not torch.Tensor:
        tensors = with_wide_tables(tensors)
    return relative_attention(tensors, spec, implementation, return_lse)


class RelativeAttention(torch.autograd.Function):
    """A known call as autograd sees it."""

    @staticmethod
    def forward(ctx: Any, known: Known, *given: Any) -> Any:
        out, lse, softmax_stats, extra = known.run(*given)
        ctx.set_materialize_grads(False)
        ctx.known = known
        has_lse = known.spec.with_lse
        stats = (out, softmax_stats) if known.implementation.saves_stats else (None, None)
        ctx.save_for_backward(*stats, lse if has_lse else None, extra, *given)
        return (out, lse) if has_lse else out

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor | None, d_lse: torch.Tensor | None = None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors  # read once: checkpointing allows no more
        out, softmax_stats, lse, extra, *given = saved
        known, needs_grad = ctx.known, ctx.needs_input_grad[1 : 1 + len(DIFFERENTIABLE)]
        tensors = AttentionTensors(*given)
        if d_out is None:
            d_out = tensors.query.new_zeros(*tensors.query.shape[:3], tensors.value.shape[3])
        arguments = d_out, d_lse, out, lse, softmax_stats, extra, tensors, known.spec, known.implementation, needs_grad
        # A derivative that is itself differentiated is refused by the operator.
        is_plain = KINDS.issuperset(map(type, (d_out, d_lse, *saved)))
        watched = not is_plain or torch.is_grad_enabled() or is_watched()
        grads = SEQUENCE.differentiate(*arguments) if watched else SEQUENCE.gradients(*arguments)
        return None, *grads, *(None,) * (len(given) - len(DIFFERENTIABLE))


_apply = super(torch.autograd.Function, RelativeAttention).apply  # type: ignore[misc]
"""The apply of Function's base in C++. That of Function itself binds all arguments by inspect.signature, and looks for transforms
of torch.func, of which there are none here: it takes five times as long."""

"""The arguments of a call, as a user gives them: one type for all that is below the public functions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from ..positions import RelativePositions
from .dtypes import autocast_dtype, cast
from .names import unexpected

CHECK_VALUES_VARIABLE = "TRITON_RELATTN_CHECK_VALUES"


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether values can be read: now, and without waiting for a GPU, unless the user asks for that."""
    # A subclass (FakeTensor, ...) may have no values.
    readable = tensor.device.type == "cpu" or os.environ.get(CHECK_VALUES_VARIABLE) == "1"
    if not readable or type(tensor) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


class Terms(NamedTuple):
    """The relative terms of a call: tables, what they meet, and what their rows stand for."""

    rel_key: torch.Tensor | None = None
    rel_query: torch.Tensor | None = None
    rel_value: torch.Tensor | None = None
    rel_bias: torch.Tensor | None = None
    rel_p2c: torch.Tensor | None = None
    positions: RelativePositions | None = None
    rel_scale: float | None = None


class Arguments(NamedTuple):
    """All arguments of a call, which functional.py explains. validation.resolve checks them, and fills in what was left out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    terms: Terms = Terms()
    attn_mask: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    is_causal: bool = False
    window_size: tuple[int, int] | None = None
    query_offset: int | torch.Tensor | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    softcap: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    cu_seqlens: Mapping[str, torch.Tensor] | None = None  # by "q" and "k", of a packed batch
    max_seqlens: Mapping[str, int] | None = None

    @staticmethod
    def of(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rel_key: torch.Tensor | None = None, **named: Any
    ) -> Arguments:
        """Return arguments that are given as the public functions take them.

        Raises:
            TypeError: a name that there is not.
        """
        known = Arguments._fields + Terms._fields
        for name in named:
            if name not in known:
                raise unexpected("fused_relative_attention", name, known)
        return Arguments(query, key, value, Terms(rel_key)).replaced(**named)

    def replaced(self, **changes: Any) -> Arguments:
        """Return the arguments with some changed, those of the terms among them."""
        terms = {name: changes.pop(name) for name in Terms._fields if name in changes}
        return self._replace(terms=self.terms._replace(**terms), **changes)

    def by_name(self) -> dict[str, Any]:
        """Return all by their names, those of the terms among them."""
        return {name: value for name, value in self._asdict().items() if name != "terms"} | self.terms._asdict()

    def autocast(self) -> Arguments:
        """Return the arguments as torch.autocast makes them: operands of products in its dtype; what is added to the logits in
        float32."""
        dtype, terms = autocast_dtype(self.query), self.terms
        if dtype is None:
            return self
        of_terms = {name: cast(getattr(terms, name), dtype) for name in ("rel_key", "rel_query", "rel_value", "rel_p2c")}
        operands = {name: cast(getattr(self, name), dtype) for name in ("query", "key", "value")}
        terms = terms._replace(**of_terms, rel_bias=cast(terms.rel_bias, torch.float32))
        return self._replace(**operands, terms=terms, attn_mask=cast(self.attn_mask, torch.float32))

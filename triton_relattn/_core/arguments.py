"""The arguments of a call, as the public functions take them."""

from __future__ import annotations

import os
from typing import Any, NamedTuple, TypedDict

import torch

from ..positions import RelativePositions
from .dtypes import autocast_dtype, cast


class CommonOptions(TypedDict, total=False):
    """For type checkers: the keywords of both functions on which the type of the result does not depend."""

    rel_query: torch.Tensor | None
    rel_value: torch.Tensor | None
    rel_bias: torch.Tensor | None
    rel_p2c: torch.Tensor | None
    positions: RelativePositions | None
    is_causal: bool
    window_size: tuple[int, int] | None
    query_offset: int | torch.Tensor | None
    dropout_p: float
    scale: float | None
    rel_scale: float | None
    softcap: float | None
    enable_gqa: bool
    implementation: str | None


class Options(CommonOptions, total=False):
    attn_mask: torch.Tensor | None
    key_lengths: torch.Tensor | None


class OptionsVarlen(CommonOptions):
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Arguments(NamedTuple):
    """All arguments of a call; functional.py documents them, and validation.py checks them and fills in what was left out."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rel_key: torch.Tensor | None = None
    rel_query: torch.Tensor | None = None
    rel_value: torch.Tensor | None = None
    rel_bias: torch.Tensor | None = None
    rel_p2c: torch.Tensor | None = None
    positions: RelativePositions | None = None
    attn_mask: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    is_causal: bool = False
    window_size: tuple[int, int] | None = None
    query_offset: int | torch.Tensor | None = None
    dropout_p: float = 0.0
    scale: float | None = None
    rel_scale: float | None = None
    softcap: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    is_packed: bool = False
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None

    def row_shape(self, table: str) -> tuple[int, ...]:
        """Return the shape of one row of a table: (width,), or () for rel_bias."""
        if table == "rel_bias":
            return ()
        if table == "rel_value":
            return self.value.shape[-1:]
        return (self.query if table == "rel_p2c" or self.rel_query is None else self.rel_query).shape[-1:]

    def autocast(self) -> Arguments:
        """Return the arguments as torch.autocast wants them: operands of products in its dtype, bias and mask in float32."""
        dtype = autocast_dtype(self.query)
        if dtype is None:
            return self
        operands = ("query", "key", "value", "rel_key", "rel_query", "rel_value", "rel_p2c")
        changes: dict[str, Any] = {name: cast(getattr(self, name), dtype) for name in operands}
        changes |= {name: cast(getattr(self, name), torch.float32) for name in ("rel_bias", "attn_mask")}
        return self._replace(**changes)


def asks_for_values() -> bool:
    """Return whether the user wants values to be checked also where that waits for a GPU."""
    return os.environ.get("TRITON_RELATTN_CHECK_VALUES") == "1"


def has_values(tensor: torch.Tensor) -> bool:
    """Return whether values can be read without waiting for a GPU, unless the user asks to wait."""
    readable = tensor.device.type == "cpu" or asks_for_values()
    # A subclass (FakeTensor, ...) may have no values.
    if not readable or type(tensor) is not torch.Tensor or torch.compiler.is_compiling():
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def integers_of(tensor: Any) -> list[int]:
    """Return the values of a vector of integers; [] of anything else, or if they cannot be read."""
    is_vector = isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64) and tensor.dim() == 1
    return tensor.tolist() if is_vector and has_values(tensor) else []

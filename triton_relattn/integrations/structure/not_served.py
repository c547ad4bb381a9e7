"""Relative attention that is recognised and not replaced, each with what to do instead."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn


class NotServed(NamedTuple):
    """A kind of attention that the operator does not compute.

    title: what it is. attributes: names, each of which may stand for one of several; a module that has them all is of this kind.
    instead: what to do. of_embedding: whether the attributes are embeddings.
    """

    title: str
    attributes: tuple[tuple[str, ...], ...]
    instead: str
    of_embedding: bool = False


NOT_SERVED = (
    NotServed(
        "a bias by offset in a window of a grid (Swin, BEiT)",
        (("relative_position_bias_table",),),
        "its table has a row for each offset in two dimensions, which the operator has no term for; its windows are short: use "
        "scaled_dot_product_attention with the bias (H, N, N) as attn_mask",
    ),
    NotServed(
        "a bias by offset of a small network (SwinV2)",
        (("cpb_mlp", "continuous_position_bias_mlp"),),
        "the operator has no term for offsets in two dimensions; use scaled_dot_product_attention with the "
        "bias (H, N, N) as attn_mask",
    ),
    NotServed(
        "a bias by bucket that layers share (T5, WavLM)",
        (("relative_attention_bias", "relative_position_bias", "rel_attn_embed"),),
        "its layers pass the bias (H, N, N) on; enable knows those of transformers; in a model of your own pass on "
        "the table instead, and pass it as rel_bias",
        of_embedding=True,
    ),
    NotServed(
        "two streams and segments (XLNet)",
        (("r_w_bias",), ("r_s_bias",)),
        "its masks and segments are tensors of N x N for any order of prediction, which the model itself makes",
    ),
)


def of(module: nn.Module) -> NotServed | None:
    """Return what a module is recognised as, if it is none of the kinds that are replaced."""
    if isinstance(module, torch.jit.ScriptModule):
        return None
    embeddings = {name for name, child in module.named_children() if isinstance(child, nn.Embedding)}
    every = set(vars(module)) | set(module._modules) | set(module._parameters)
    for each in NOT_SERVED:
        has = embeddings if each.of_embedding else every
        if all(has & set(names) for names in each.attributes):
            return each
    return None

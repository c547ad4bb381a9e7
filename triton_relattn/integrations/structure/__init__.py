"""Relative attention that is found by its structure: parameters, children and arguments, in any module of any library or none.

A kind is a file: how a module is read, what is computed in place of its forward, and arguments for a comparison. What else is
recognised is a row of ``NOT_SERVED``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from ..comparison import Refused
from ..enabled import STRUCTURE, Match
from ..shadow import projections
from .enformer import DistanceFeatures
from .grid import DecomposedPositions
from .kind import Kind
from .music import PastRows
from .shaw import ClippedDistances
from .transformer_xl import ProjectedPositions
from .vits import WindowedVectors
from .wavlm import GatedBuckets

KINDS: tuple[type[Kind], ...] = (
    WindowedVectors,
    ProjectedPositions,
    DistanceFeatures,
    DecomposedPositions,
    ClippedDistances,
    PastRows,
    GatedBuckets,
)


class NotServed(NamedTuple):
    """A kind that enable does not serve: a module with one of each of the attributes, or embeddings, is of it.

    has_projections: only a module that projects queries, keys and values, since others have such names as well.
    """

    title: str
    attributes: tuple[tuple[str, ...], ...]
    instead: str
    has_embeddings: bool = False
    has_projections: bool = False


AS_MASK = "use scaled_dot_product_attention with the bias (H, N, N) as attn_mask"
IN_TWO_DIMENSIONS = f"the operator has no term for offsets in two dimensions, and such windows are short: {AS_MASK}"
BY_HAND = "write the call: docs/models.md has it"

NOT_SERVED = (
    NotServed(
        "a bias by offset in a window of a grid (Swin, BEiT, LeViT, MaxViT)",
        (("relative_position_bias_table", "attention_biases", "rel_pos_indices", "relative_indices"),),
        IN_TWO_DIMENSIONS,
    ),
    NotServed(
        "a bias by offset of a small network (SwinV2)",
        (("cpb_mlp", "continuous_position_bias_mlp", "relative_coords_log", "meta_mlp"),),
        IN_TWO_DIMENSIONS,
    ),
    NotServed(
        "biases by coordinates of the tokens (LayoutLMv2, LayoutLMv3)",
        (("rel_pos_x_bias",),),
        f"coordinates are no positions in a sequence: {AS_MASK}",
    ),
    NotServed(
        "a bias by segments and buckets (CPM-Ant)",
        (("relative_attention_bias",), ("num_segments",)),
        f"its rows depend on the tokens: {AS_MASK}",
    ),
    NotServed(
        "Transformer-XL's own layer, with a memory",
        (("qkv_net",), ("r_net",), ("o_net",)),
        f"{BY_HAND}, Transformer-XL's: tables.fold_transformer_xl folds the biases, and query_offset counts the memory",
    ),
    NotServed(
        "Shaw's term with other ends on either side, in WeNet's class",
        (("rel_k_embed",), ("max_left_rel_pos",), ("max_right_rel_pos",)),
        f"{BY_HAND}, rel_key with positions=RelativePositions(-max_left_rel_pos, max_right_rel_pos)",
    ),
    NotServed(
        "DeBERTa's terms in a class of its own package",
        (("pos_key_proj", "pos_proj"), ("query_proj", "in_proj"), ("pos_att_type",)),
        "transformers' DebertaV2Model takes the same weights, and enable knows it",
    ),
    NotServed(
        "a bias by bucket of the distance (T5)",
        (("relative_attention_bias", "relative_position_bias", "rel_attn_embed"),),
        "enable knows that of transformers' classes; in a model of your own make and pass on a row per distance instead, "
        "weight[tables.t5_buckets(...)].T, and pass it as rel_bias",
        has_embeddings=True,
    ),
    NotServed(
        "an embedding of distances that meets the query, or also the key (BERT's relative_key)",
        (("distance_embedding",),),
        f"enable knows that of transformers' classes; {BY_HAND}, Shaw's with rel_key, and with rel_p2c for the key",
        has_embeddings=True,
    ),
    NotServed(
        "two streams and segments (XLNet, Funnel)",
        (("r_w_bias",), ("r_s_bias",)),
        "its masks and segments are tensors of N x N for any order of prediction, which the model itself makes",
    ),
    NotServed("buckets of three streams (ProphetNet)", (("relative_pos_embeddings",),), "use the model's own code"),
    NotServed(
        "Transformer-XL's terms in a class of another form",
        (
            ("r_w_bias", "pos_bias_u", "u", "u_bias", "content_bias", "key_pos_bias"),
            ("r_r_bias", "pos_bias_v", "v", "v_bias", "pos_bias", "query_pos_bias", "key_pos_embeddings"),
        ),
        f"its forward takes other arguments than those that enable knows; {BY_HAND}, tables.fold_transformer_xl folds the terms",
        has_projections=True,
    ),
    NotServed(
        "positions on a grid in a class of another form (BoTNet, HaloNet, MONAI)",
        (("height_rel", "rel_height", "rel_positional_embedding"),),
        f"{BY_HAND}, decomposed_relative_attention",
    ),
    NotServed(
        "positions on a grid of three dimensions (SAM-Med3D)",
        (("rel_pos_h",), ("rel_pos_d", "rel_pos_t")),
        f"decomposed_relative_attention has two: {AS_MASK}",
    ),
    NotServed(
        "ALiBi with trained slopes (data2vec 2)",
        (("alibi_scale", "alibi_slopes", "learned_alibi_scale"),),
        f"{BY_HAND}, ALiBi's with the slopes times the distances as rel_bias",
    ),
    NotServed(
        "a row per distance that meets the query, in a class of another form (Music Transformer, Shaw et al.)",
        (
            (
                *("Er", "E", "rel_emb", "rel_embedding", "rel_embeddings", "relative_embeddings", "pos_layer", "rel_pos_enc"),
                *("rel_pos_emb", "relative_position", "relative_positions", "relative_position_k", "relative_position_embedding"),
                *("relative_positions_embeddings", "relative_positional_encoding", "relative_key_embeddings"),
            ),
        ),
        f"its forward is none of those that enable knows; {BY_HAND}, with the rows as rel_key",
        has_projections=True,
    ),
)


def find(module: nn.Module) -> Match | None:
    """Return the kind of a stock module, or what else it is recognised as; None if it is most likely something else."""
    if type(module).__module__.startswith("torch.nn.") or isinstance(module, torch.jit.ScriptModule):
        return None
    try:
        for kind in KINDS if projections(module) else ():
            if next(kind.layouts(module), None) is not None:
                return Match(kind.title, STRUCTURE, kind)
    except Refused as refused:
        return Match("relative attention", STRUCTURE, reason=str(refused))
    except Exception:  # an attribute may raise anything
        return None
    embeddings = {name for name, child in module.named_children() if isinstance(child, nn.Embedding)}
    attributes = {*vars(module), *module._modules, *module._parameters, *module._buffers}
    has_projections = len(projections(module)) > 1 or any(given == 3 * taken for taken, given in projections(module).values())
    for other in NOT_SERVED:
        names = embeddings if other.has_embeddings else attributes
        if (has_projections or not other.has_projections) and all(names & set(choices) for choices in other.attributes):
            return Match(other.title, STRUCTURE, reason=other.instead)
    return None


__all__ = ["KINDS", "NOT_SERVED", "find"]

"""What the arguments of other libraries, and of earlier versions, are called here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .removed import ARGUMENTS, removed

_MASKS = "is_causal, window_size, key_lengths or attn_mask"
_FOLDED = "an argument of tables.fold_transformer_xl, which returns query and rel_bias"
_WEIGHTS = "the probabilities are never formed"
_CACHE = "key and value, with the positions of the cache; query_offset is the number of keys before the first query"
_GRID = "decomposed_relative_attention"
_PACKED = "fused_relative_attention_varlen"
OTHER_NAMES = {
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sm_scale": "scale",
    "mask": "attn_mask",
    "attention_mask": "attn_mask",
    "attn_bias": "attn_mask, which has no gradient, or rel_bias, a learned bias by distance",
    "key_padding_mask": "key_lengths, or attn_mask=~key_padding_mask[:, None, None, :]",
    "mask_mod": _MASKS,
    "block_mask": _MASKS,
    "att_context_size": "window_size=(left, right)",
    "window": "window_size=(left, right)",
    "sliding_window": "window_size=(left, right)",
    **dict.fromkeys(("dropout", "attn_dropout", "attention_dropout"), "dropout_p"),
    "p": "dropout_p",
    "training": "dropout_p=p if training else 0.0",
    **dict.fromkeys(("logits_soft_cap", "logits_softcap", "logit_cap"), "softcap"),
    "is_gqa": "enable_gqa",
    "rel_pos": "rel_key",
    "rel_pos_emb": "rel_key",
    **dict.fromkeys(("pos_emb", "pos_embs"), "rel_key, projected and split into heads"),
    **dict.fromkeys(("pos_bias_u", "pos_bias_v", "r_w_bias", "r_r_bias"), _FOLDED),
    "position_bias": "rel_bias, (R,) or (heads, R), with an element per distance and not per pair",
    **dict.fromkeys(("bias", "pos_bias"), "rel_bias, a learned bias by distance, or attn_mask, a bias without a gradient"),
    "rel_embeddings": "rel_key, and rel_p2c for DeBERTa's second table, each projected and split into heads",
    **dict.fromkeys(
        ("max_distance", "max_relative_position", "max_relative_positions"),
        "positions=RelativePositions(-d, d) of a table with 2 d + 1 rows, d the largest distance",
    ),
    **dict.fromkeys(
        ("num_buckets", "relative_attention_num_buckets", "relative_attention_max_distance"),
        "rel_bias=weight[tables.t5_buckets(torch.arange(-max_distance, max_distance + 1), num_buckets, max_distance)].T, with "
        "scale=1.0",
    ),
    "relative_attention_bias": "rel_bias=weight[tables.t5_buckets(torch.arange(-128, 129))].T, with scale=1.0",
    "alibi_slopes": "rel_bias=tables.alibi_bias(slopes, first, last), with positions=RelativePositions(first, last)",
    **dict.fromkeys(("return_attn_probs", "return_softmax"), f"return_lse; {_WEIGHTS}"),
    **dict.fromkeys(("return_aux", "return_softmax_lse", "return_logsumexp"), "return_lse"),
    **dict.fromkeys(("past_key_value", "past_key_values", "kv_cache", "k_cache", "v_cache"), _CACHE),
    "cache_seqlens": "key_lengths, and query_offset, the number of keys before the first query",
    **dict.fromkeys(("seqused_k", "seq_lens", "kv_lens"), "key_lengths"),
    "backend": "implementation",
    "cu_seqlens": f"cu_seqlens_q and cu_seqlens_k of {_PACKED}",
    "segment_ids": f"cu_seqlens_q and cu_seqlens_k of {_PACKED}",
    **{f"cu_seq_lens_{which}": f"cu_seqlens_{which} of {_PACKED}" for which in "qk"},
    **{f"max_length_{which}": f"max_seqlen_{which} of {_PACKED}" for which in "qk"},
}
NOT_NEEDED = {
    "score_mod": "the terms are rel_key, rel_bias, rel_p2c and rel_value",
    "deterministic": "results repeat bit for bit, except on a GPU with implementation='reference', tables built by indexing and "
    "interpolated grid tables (docs/numerics.md, the same bits every time)",
    "kernel_options": "tile sizes are chosen per call, or by `python -m triton_relattn tune`",
    "block_table": "a paged cache has to be gathered into key and value",
    **dict.fromkeys(("need_weights", "output_attentions"), f"{_WEIGHTS}; plots.attention_terms has them for short sequences"),
    **dict.fromkeys(("attn_implementation", "dtype", "torch_dtype"), "a model that is enabled keeps its own"),
    "head_mask": "multiply the heads of out by it",
}
ELSEWHERE = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), _PACKED),
    **dict.fromkeys(("attn_mask", "key_lengths"), "fused_relative_attention"),
    **dict.fromkeys(("rel_pos_h", "rel_pos_w", "grid", "key_grid"), _GRID),
    "implementation": "an enabled model runs what its device supports; for one call, fused_relative_attention",
}
Function = TypeVar("Function", bound=Callable[..., Any])
CLOSE = 0.75  # of 1: one letter of four is wrong


def require_names(function: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError for an argument that a function does not have; the message says what it is called here."""
    allowed = list(allowed)
    for name in names:
        if name in allowed:
            continue
        hint = ""
        if name in ARGUMENTS:
            hint = f"; {removed('it', ARGUMENTS[name])}"
        elif name in OTHER_NAMES:
            hint = f"; here it is {OTHER_NAMES[name]}"
        elif name in NOT_NEEDED:
            hint = f"; there is none here: {NOT_NEEDED[name]}"
        elif name in ELSEWHERE:
            hint = f"; {ELSEWHERE[name]} has it"
        elif close := difflib.get_close_matches(name, allowed, 1, CLOSE):
            hint = f"; did you mean {close[0]!r}?"
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def refuse_unknown(function: Callable[..., Any], positional: Sequence[Any], named: Iterable[str]) -> None:
    """Raise TypeError for arguments beyond a function's parameters by position, and for names that it does not have."""
    parameters = inspect.signature(function).parameters.values()
    by_position = [parameter.name for parameter in parameters if parameter.kind == parameter.POSITIONAL_OR_KEYWORD]
    if positional:
        raise TypeError(
            f"{function.__name__}() takes {', '.join(by_position)} by position, and all others by name, as attn_mask=...; got "
            f"{len(by_position) + len(positional)} positional arguments"
        )
    by_name = [parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY]
    require_names(function.__name__, named, by_position + by_name)


def with_names(function: Function) -> Function:
    """Have a function without ``**`` arguments say what those that it does not have are called here."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        require_names(function.__name__, named, parameters)
        return function(*args, **named)

    return call  # type: ignore[return-value]

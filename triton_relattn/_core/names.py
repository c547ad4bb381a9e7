"""What the arguments of other libraries, and of earlier versions, are called here."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

_MASKS = "is_causal, window_size, key_lengths or attn_mask"
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
    "dropout": "dropout_p",
    "logits_soft_cap": "softcap",
    "is_gqa": "enable_gqa",
    "rel_pos": "rel_key",
    "rel_pos_emb": "rel_key",
    "pos_bias_u": "an argument of tables.fold_transformer_xl, which returns query and rel_bias",
    "pos_bias_v": "an argument of tables.fold_transformer_xl, which returns query and rel_bias",
    "position_bias": "rel_bias, (R,) or (heads, R), with a number per distance and not per pair",
    "alibi_slopes": "rel_bias=tables.alibi_bias(slopes, first, last), with positions=RelativePositions(first, last)",
    "return_attn_probs": "return_lse; the probabilities are never formed",
    "return_softmax": "return_lse; the probabilities are never formed",
    "return_aux": "return_lse",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k of fused_relative_attention_varlen",
}
NOT_NEEDED = {
    "score_mod": "the terms are rel_key, rel_bias, rel_p2c and rel_value",
    "deterministic": "results always repeat bit for bit",
    "exact_query_grad": "0.3 removed it, as the gradient of query is always as exact as those of the tables",
    "block_table": "a paged cache has to be gathered into key and value",
}
ELSEWHERE = {
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"), "fused_relative_attention_varlen"),
    **dict.fromkeys(("attn_mask", "key_lengths"), "fused_relative_attention"),
}
CLOSE = 0.75  # of 1: one letter of four is wrong


def refuse_unknown(function: Callable[..., Any], names: Iterable[str]) -> None:
    """Raise TypeError if a function was called with arguments that it does not have, with what they are called here."""
    for name in names:
        here = ""
        if name in OTHER_NAMES:
            here = f"; here it is {OTHER_NAMES[name]}"
        elif name in NOT_NEEDED:
            here = f"; there is none here: {NOT_NEEDED[name]}"
        elif name in ELSEWHERE:
            here = f"; {ELSEWHERE[name]} has it"
        elif close := difflib.get_close_matches(name, inspect.signature(function).parameters, 1, CLOSE):
            here = f"; did you mean {close[0]!r}?"
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{here}")

"""What the arguments of other libraries are called here."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T5_BIAS = "rel_bias=weight[tables.t5_buckets(torch.arange(-128, 129))].T, with scale=1.0"
"""The bias of a checkpoint of T5, whose weight has a row per bucket."""
_BUCKETS = "tables.t5_buckets(torch.arange(-max_distance, max_distance + 1), num_buckets, max_distance)"
_VARLEN = "fused_relative_attention_varlen"
_WEIGHTS = "the probabilities are never formed"
_WORDS = {
    "here it is {}": {
        "causal": "is_causal",
        "softmax_scale sm_scale": "scale",
        "mask attention_mask": "attn_mask",
        "attn_bias": "attn_mask, which has no gradient, or rel_bias, a learned bias by distance",
        "key_padding_mask": "key_lengths, or attn_mask=~key_padding_mask[:, None, None, :]",
        "mask_mod block_mask": "is_causal, window_size, key_lengths or attn_mask",
        "att_context_size window sliding_window": "window_size=(left, right)",
        "dropout attn_dropout attention_dropout p": "dropout_p",
        "training": "dropout_p=p if training else 0.0",
        "logits_soft_cap logits_softcap logit_cap": "softcap",
        "is_gqa": "enable_gqa",
        "rel_pos rel_pos_emb": "rel_key",
        "pos_emb pos_embs": "rel_key, projected and split into heads",
        "pos_bias_u pos_bias_v r_w_bias r_r_bias": "an argument of tables.fold_transformer_xl, which returns query and rel_bias",
        "position_bias": "rel_bias, (R,) or (heads, R), with an element per distance and not per pair",
        "bias pos_bias": "rel_bias, a learned bias by distance, or attn_mask, a bias without a gradient",
        "rel_embeddings": "rel_key, and rel_p2c for DeBERTa's second table, each projected and split into heads",
        "max_distance max_relative_position max_relative_positions": "positions=RelativePositions(-d, d) of a table with "
        "2 d + 1 rows, d the largest distance",
        "num_buckets relative_attention_num_buckets relative_attention_max_distance": f"rel_bias=weight[{_BUCKETS}].T, with "
        "scale=1.0",
        "relative_attention_bias": T5_BIAS,
        "alibi_slopes": "rel_bias=tables.alibi_bias(slopes, first, last), with positions=RelativePositions(first, last)",
        "return_attn_probs return_softmax": f"return_lse; {_WEIGHTS}",
        "return_aux return_softmax_lse return_logsumexp": "return_lse",
        "past_key_value past_key_values kv_cache k_cache v_cache": "key and value, with the positions of the cache; query_offset "
        "is the number of keys before the first query",
        "cache_seqlens": "key_lengths, and query_offset, the number of keys before the first query",
        "seqused_k seq_lens kv_lens": "key_lengths",
        "backend": "implementation",
        "cu_seqlens segment_ids": f"cu_seqlens_q and cu_seqlens_k of {_VARLEN}",
        "cu_seq_lens_q": f"cu_seqlens_q of {_VARLEN}",
        "cu_seq_lens_k": f"cu_seqlens_k of {_VARLEN}",
        "max_length_q": f"max_seqlen_q of {_VARLEN}",
        "max_length_k": f"max_seqlen_k of {_VARLEN}",
    },
    "there is none here: {}": {
        "score_mod": "the terms are rel_key, rel_bias, rel_p2c and rel_value",
        "deterministic": "results repeat bit for bit, except on a GPU with implementation='reference', tables built by indexing "
        "and interpolated grid tables (docs/numerics.md, the same bits every time)",
        "kernel_options": "tile sizes are chosen per call, or by `python -m triton_relattn tune`",
        "block_table": "a paged cache has to be gathered into key and value",
        "need_weights output_attentions": f"{_WEIGHTS}; plots.attention_terms has them for short sequences",
        "attn_implementation dtype torch_dtype": "a model that is enabled keeps its own",
        "head_mask": "multiply the heads of out by it",
    },
    "{} has it": {
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k": _VARLEN,
        "attn_mask key_lengths": "fused_relative_attention",
        "rel_pos_h rel_pos_w grid key_grid": "decomposed_relative_attention",
        "implementation": "an enabled model runs what its device supports; for one call, fused_relative_attention",
    },
}
WORDS = {sentence: {name: here for names, here in rows.items() for name in names.split()} for sentence, rows in _WORDS.items()}
"""By what an error says of them: the names of arguments elsewhere, and what stands for each here."""
CLOSE = 0.75  # of 1: one letter of four is wrong
Function = TypeVar("Function", bound=Callable[..., Any])


def require_names(function: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError for an argument that a function does not have; the message says what it is called here."""
    allowed = list(allowed)
    for name in names:
        if name in allowed:
            continue
        hints = [f"; {sentence.format(words[name])}" for sentence, words in WORDS.items() if name in words]
        hints += [f"; did you mean {close!r}?" for close in difflib.get_close_matches(name, allowed, 1, CLOSE)]
        raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{(hints or [''])[0]}")


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

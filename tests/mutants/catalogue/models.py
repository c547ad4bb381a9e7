"""Faults in the models of transformers that are enabled."""

from __future__ import annotations

from ..fault import Change, Fault

OF_FAMILIES = "triton_relattn/integrations/transformers"
ON_NUMBERS, ON_USE, ON_DECODERS, ON_WHOLE, ON_ARGUMENTS = (
    f"tests/cpu/test_transformers{name}.py" for name in ("", "_use", "_decoders", "_whole", "_arguments")
)
ON_PROOFS = "tests/cpu/test_proof.py"
SAME = f"{ON_NUMBERS}::test_the_same_in_float64"


def change(file: str, old: str, new: str) -> tuple[Change]:
    return (Change(f"{OF_FAMILIES}/{file}.py", old, new),)


OF_MODELS = (
    Fault(
        "enabled-models-are-custom-code",
        "transformers saves an enabled model's weights under internal names",
        (f"{ON_NUMBERS}::test_what_the_whole_model_saves",),
        change("encoder", 'checkpoints."""\n        return False', 'checkpoints."""\n        return True'),
    ),
    Fault(
        "half-enabled-models",
        "a model that is made of an enabled one's class has stock attention",
        (f"{ON_USE}::test_a_model_of_an_enabled_ones_class",),
        change("encoder", "        self.__class__ = type(self).__bases__[-1]\n        enable(self, prove=False)\n", ""),
    ),
    Fault(
        "a-changed-stock-class-is-trusted",
        "a model of a version that nobody has tested is enabled without a comparison, and computes something else",
        (f"{ON_PROOFS}::test_a_change_that_matters_is_refused",),
        (
            Change(
                "triton_relattn/integrations/replacement.py", "if not known.are_known(library.modules(*together)):", "if False:"
            ),
        ),
    ),
    Fault(
        "offset-is-the-caches-counter",
        "with a static cache, queries stand where the next ones will",
        (f"{ON_NUMBERS}::test_parts_of_a_sequence_with_a_static_cache",),
        change("heads", "return seen.clone() if isinstance(seen, torch.Tensor) else seen", "return seen"),
    ),
    Fault(
        "weights-are-missed-silently",
        "no warning where transformers collects weights that there are not",
        (f"{ON_USE}::test_weights_that_transformers_collects",),
        change("heads", 'any("attentions" in each for', 'any("weights" in each for'),
    ),
    Fault(
        "an-unknown-argument-is-swallowed",
        "a cache under a name of a later version is lost, and a decoder generates other tokens",
        (f"{ON_ARGUMENTS}::test_a_name_of_a_later_version",),
        (Change("triton_relattn/integrations/arguments.py", "        if lost:\n", "        if lost and not ignores:\n"),),
    ),
    Fault(
        "a-users-mask-is-made-causal",
        "a mask (B, 1, Nq, Nk) that shows the future shows the past alone",
        (f"{ON_DECODERS}::test_a_mask_of_the_users",),
        change("heads", "return not of_all and asked.get(", "return asked.get("),
    ),
    Fault(
        "cross-attention-reads-its-source-again",
        "a cache for both kinds of attention gets the encoder's keys at every step",
        (f"{ON_DECODERS}::test_generation", "-k", "t5-cache"),
        change("heads", "        cache.is_updated[module.layer_idx] = True\n", "        pass\n"),
    ),
    Fault(
        "sinks-have-the-wrong-sign",
        "a larger sink takes less",
        (SAME, "-k", "inkling2"),
        change("heads", "torch.sigmoid(lse - sinks)", "torch.sigmoid(lse + sinks)"),
    ),
    Fault(
        "t5-decoder-has-an-encoders-buckets",
        "half of a decoder's buckets are kept for the future",
        (SAME, "-k", "t5-whole"),
        change("t5", "self.relative_attention_max_distance, positions.last > 0", "self.relative_attention_max_distance, True"),
    ),
    Fault(
        "t5-forgets-where-queries-stand",
        "each piece of a sequence begins at position 0",
        (f"{ON_DECODERS}::test_pieces_of_a_decoders_sequence",),
        change("t5", '"query_offset": offset}', '"query_offset": 0}'),
    ),
    Fault(
        "view-hides-the-text-config",
        "the masks of a model in a model are those of stock attention",
        (f"{ON_NUMBERS}::test_masks_inside_the_whole_model",),
        change("masks", '"text", None if text is config else', '"text", None if text is not None else'),
    ),
    Fault(
        "deberta-scales-as-many-terms-as-there-could-be",
        "logits are divided by the root of three widths, whatever terms there are",
        (f"{ON_NUMBERS}::test_other_settings", "-k", "deberta_v2 and c2p"),
        change("deberta_v2", 'return 1 + ("c2p" in self.pos_att_type) + ("p2c" in self.pos_att_type)', "return 3"),
    ),
    Fault(
        "deberta-future-first",
        "the slots of the past and of the future are exchanged",
        (SAME, "-k", "deberta_v2-whole"),
        change("deberta_v2", "(span - counted).clamp", "(span + counted).clamp"),
    ),
    Fault(
        "deberta-ends-too-early",
        "distances that still have slots of their own take the last one",
        (f"{ON_NUMBERS}::test_other_settings", "-k", "deberta and buckets"),
        change("deberta_v2", "(buckets - middle + 1) / (middle - 1)", "(buckets - middle - 2) / (middle - 1)"),
    ),
    Fault(
        "deberta-padding-sees-the-real-keys",
        "queries that are padding attend to what is not",
        (SAME, "-k", "deberta_v2-padded"),
        change("deberta_v2", "torch.where(attends.bool(), out, value.mean(2, keepdim=True))", "out"),
    ),
    Fault(
        "wavlm-has-one-distance-too-few",
        "the most distant key has the bias of its neighbour",
        (f"{ON_NUMBERS}::test_other_settings", "-k", "wavlm"),
        change("wavlm", "min(self.max_distance, length - 1)", "min(self.max_distance, length - 2)"),
    ),
    Fault(
        "wavlm-gates-are-swapped",
        "the two gates change places",
        (SAME, "-k", "wavlm"),
        change("wavlm", "        a, b = sums", "        b, a = sums"),
    ),
    Fault(
        "speecht5-future-first",
        "the table is read in the model's order, the most distant future first",
        (SAME, "-k", "speecht5"),
        change("speecht5", "torch.arange(2 * self.max_length - 1, -1, -1,", "torch.arange(2 * self.max_length,"),
    ),
    Fault(
        "speecht5-decoder-is-enabled",
        "attention without a relative term, which has caches and masks of its own, is replaced, too",
        (f"{ON_WHOLE}::test_whole_models", "-k", "speecht5"),
        change("speecht5", "return not module.is_decoder", "return True"),
    ),
    Fault(
        "granite-sees-what-fills-up",
        "the last block's frames see the zeros that make it whole",
        (SAME, "-k", "granite_speech"),
        change("granite_speech", "        lengths[:, -1] = length - (len(blocks) // batch - 1) * self.context_size\n", ""),
    ),
    Fault(
        "parakeets-padding-forgets-u",
        "the gradient of the bias u lacks what padding adds",
        (SAME, "-k", "parakeet"),
        change("parakeet", "query = (query + self.bias_u[:, None]).to(query.dtype)", "query = query.to(query.dtype)"),
    ),
    Fault(
        "a-cache-forgets-what-it-gets",
        "only the first keys and values that a decoder with a cache meets are seen",
        (f"{ON_DECODERS}::test_pieces_of_a_sequence",),
        change(
            "heads",
            "    offset = first_position(cache, layer)\n    if cache is not None:",
            "    offset = first_position(cache, layer)\n    if cache is not None and offset == 0:",
        ),
    ),
    Fault(
        "nemotron-remembers-everything",
        "keys of a cache that has forgotten some count as the first ones",
        (f"{ON_NUMBERS}::test_streaming",),
        change("chunks", "missing = self.first_key - self.start", "missing = -self.start"),
    ),
    Fault(
        "nemotron-chunks-begin-with-the-queries",
        "chunks are counted from the first query, not from position 0",
        (f"{ON_NUMBERS}::test_streaming",),
        change("chunks", "self.queries, self.before = queries, first % self.size", "self.queries, self.before = queries, 0"),
    ),
    Fault(
        "nemotron-convolves-hidden-frames",
        "frames that see no real frame reach the convolution",
        (f"{ON_NUMBERS}::test_a_sequence_of_padding", "-k", "nemotron"),
        change("nemotron_asr_streaming", "all_masked_rows = ~cut.joined(sees.flatten(0, 1))[..., 0]", "all_masked_rows = None"),
    ),
    Fault(
        "gemma3n-sees-no-future",
        "the window ends at the query",
        (f"{ON_NUMBERS}::test_other_settings", "-k", "gemma3n"),
        change(
            "gemma3n", "window_size=(self.max_past_horizon, self.max_future_horizon)", "window_size=(self.max_past_horizon, 0)"
        ),
    ),
    Fault(
        "phi4-hides-padding",
        "the mask hides keys, where the model adds 1 to the logits of the others",
        (SAME, "-k", "phi4"),
        change("phi4_multimodal", "attention_mask.mask.to(hidden_states.dtype)", "attention_mask.mask.bool()"),
    ),
    Fault(
        "longt5-window-too-narrow",
        "the most distant neighbours are not seen",
        (SAME, "-k", "longt5"),
        change(
            "longt5",
            "window_size=(self.local_radius, self.local_radius)",
            "window_size=(self.local_radius - 1, self.local_radius)",
        ),
    ),
    Fault(
        "alibi-shows-padding",
        "padding has its bias, and is seen",
        (SAME, "-k", "(bloom or falcon) and padded"),
        change("bloom", "return bias.masked_fill(~attention_mask, -torch.inf)", "return bias.masked_fill(~attention_mask, 0.0)"),
    ),
    Fault(
        "falcon-biases-unscaled",
        "ALiBi is as large as before the scale",
        (SAME, "-k", "falcon"),
        change("falcon", "(0, (-1, self.num_heads)) / math.sqrt(self.head_dim)", "(0, (-1, self.num_heads))"),
    ),
    Fault(
        "masks-too-high-for-float32",
        "keys that are all hidden by float16's lowest number are not seen evenly",
        (f"{ON_USE}::test_nothing_but_padding_in_float16",),
        change("heads", "wide = torch.promote_types(dtype, torch.float32)", "wide = dtype"),
    ),
    Fault(
        "even-attention-beyond-float16",
        "the covariance of many keys and values is a sum that float16 does not hold",
        (f"{ON_USE}::test_even_attention_in_float16",),
        change("heads", "each = key.shape[2] ** -0.5", "each, scale = 1.0, scale / key.shape[2]"),
    ),
    Fault(
        "dropout-of-its-own-ignored",
        "a dropout module that trains in a model that does not drops nothing",
        (f"{ON_USE}::test_dropout_in_evaluation",),
        (Change("triton_relattn/integrations/heads.py", "return dropout.p if dropout.training else 0.0", "return 0.0"),),
    ),
    Fault(
        "deberta-mask-of-keys-is-of-padding",
        "a mask (B, 1, 1, N) of the user's makes queries of padding attend evenly",
        (f"{ON_USE}::test_a_mask_of_keys_alone",),
        change("deberta_v2", "attention_mask.dim() == 4 and attention_mask.shape[2] == 1", "attention_mask.dim() == 0"),
    ),
    Fault(
        "wavlm-buckets-of-t5",
        "buckets are rounded as T5 rounds them",
        (f"{ON_USE}::test_buckets_of_wavlm",),
        change(
            "wavlm",
            "self._relative_positions_bucket(distances)",
            '__import__("triton_relattn").tables.t5_buckets(distances, self.num_buckets, self.max_distance)',
        ),
    ),
    Fault(
        "falcon-without-alibi-is-enabled",
        "a model that rotates queries and keys gets attention that does not",
        (f"{ON_USE}::test_models_without_the_term",),
        change("falcon", "return bool(module.config.alibi)", "return True"),
    ),
    Fault(
        "chunks-see-one-frame-too-few",
        "of the frames before a chunk that it sees, the first is hidden",
        ("tests/cpu/test_seen.py::test_what_is_seen",),
        (Change("triton_relattn/integrations/seen.py", "position >= begin - left", "position > begin - left"),),
    ),
    Fault(
        "parts-forget-where-queries-stand",
        "queries after a cache stand at the first position",
        ("tests/cpu/test_seen.py::test_what_is_seen",),
        (Change("triton_relattn/integrations/seen.py", "self.first + queries.start - keys.start", "queries.start - keys.start"),),
    ),
)

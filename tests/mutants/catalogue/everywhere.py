"""Faults in what all implementations share."""

from __future__ import annotations

from ..fault import Change, Fault
from .places import (
    DROPOUT,
    KEPT,
    ON_DROPOUT,
    ON_FEATURES,
    ON_OPS,
    ON_POSITIONS,
    ON_TORCH,
    ON_VARLEN,
    OPS,
    POSITIONS,
    RANDOM,
    REFERENCE,
)

OF_ALL = (
    Fault(
        "dropout-from-the-start-of-the-word",
        "keys that do not begin with a word of random bits take those of the keys before",
        (f"{ON_DROPOUT}::test_words_are_philox",),
        (Change(DROPOUT, "[..., keys.start - 4 * start : keys.stop - 4 * start]", "[..., : keys.stop - keys.start]"),),
    ),
    Fault(
        "dropout-words-of-64-bits",
        "two of four words are compared with the bits above their 32",
        (f"{ON_DROPOUT}::test_words_are_philox",),
        (Change(DROPOUT, "c1 & _LOW_BITS, c2, c3 & _LOW_BITS", "c1, c2, c3"),),
    ),
    Fault(
        "dropout-seeds-of-vmap-do-not-fit",
        "seeds that vmap draws anew are mixed into numbers that have no dimension for them",
        (f"{ON_TORCH}::test_vmap_with_dropout_draws_anew[reference]",),
        (Change(DROPOUT, "^ counter ^ step).bitwise_and_", "^ counter).bitwise_xor_(step).bitwise_and_"),),
    ),
    Fault(
        "dropout-words-exchanged",
        "the kernels take the words of random bits in another order",
        (f"{ON_FEATURES}::test_every_implementation_drops_the_same[0.5]",),
        (Change(KEPT, "even = tl.where(offs_n & 2 == 0, word_0, word_2)", "even = tl.where(offs_n & 2 == 0, word_2, word_0)"),),
    ),
    Fault(
        "future-first",
        "tables are read with the most distant future first",
        (ON_POSITIONS,),
        (
            Change(
                POSITIONS,
                "row = relative_position.clamp(self.first, self.last) - self.first",
                "row = self.last - relative_position.clamp(self.first, self.last)",
            ),
        ),
    ),
    Fault(
        "packed-keys-of-the-wrong-sequence",
        "the keys of a packed sequence begin where its queries do",
        (f"{ON_VARLEN}::test_random_combination", "-k", "reference"),
        (
            Change(
                REFERENCE,
                "slice(*starts_k[number : number + 2])",
                "slice(starts_q[number], starts_q[number] + starts_k[number + 1] - starts_k[number])",
            ),
        ),
    ),
    Fault(
        "autocast-does-not-cast",
        "under autocast float32 inputs stay float32",
        (f"{ON_TORCH}::test_autocast_casts_as_for_sdpa",),
        (
            Change(
                "triton_relattn/_core/arguments.py",
                "        if dtype is None:\n",
                "        if dtype is not None:\n            dtype = torch.float32\n        if dtype is None:\n",
            ),
        ),
    ),
    Fault(
        "tangents-go-unnoticed",
        "forward mode gets zeros as derivatives where nothing has a gradient in reverse mode",
        (f"{ON_TORCH}::test_no_forward_mode_goes_unnoticed",),
        (Change(OPS, "    if forward_ad._current_level >= 0:\n        return True\n", ""),),
    ),
    Fault(
        "second-derivative-of-a-constant",
        "the backward cannot be told from one that nobody differentiates: terms of second derivatives are dropped",
        (f"{ON_OPS}::test_gradient_penalty_names_the_operator",),
        (
            Change(
                OPS,
                "if not _is_differentiated(arguments):",
                "if cls is _Backward or not _is_differentiated(arguments):",
            ),
        ),
    ),
    Fault(
        "gradients-in-another-order",
        "the gradients of key and value are exchanged",
        RANDOM,
        (
            Change(
                OPS,
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
                "    query, key, value, *others = gradients\n"
                "    gradients = (query, value, key, *others)\n"
                "    return tuple(tensors.query.new_empty(0) if gradient is None else gradient for gradient in gradients)",
            ),
        ),
    ),
)

"""A baseline: an interpolated n-gram model of the same tokens."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence

from .chorales import Chorale
from .tokens import HOLD, VOCABULARY, VOICES

Context = tuple[int, ...]


class Ngram:
    """The next token given the voice and the last ``order`` tokens; Witten-Bell smoothing, down to the uniform distribution.

    Pitches are relative to the previous note's, which is equivalent to counting all transpositions.
    """

    def __init__(self, order: int, chorales: Iterable[Chorale]) -> None:
        self.order = order
        self.counts: defaultdict[Context, Counter[int]] = defaultdict(Counter)
        for chorale in chorales:
            for contexts, token in self._tokens(chorale.tokens.tolist()):
                for context in contexts:
                    self.counts[context][token] += 1

    def _tokens(self, tokens: Sequence[int]) -> Iterator[tuple[list[Context], int]]:
        """Return each token's contexts, the shortest first, and the token, all relative to the last pitch."""
        last = 0
        for index, token in enumerate(tokens):
            before = tokens[max(index - self.order, 0) : index]
            history = tuple(other - last if other < HOLD else other for other in before)
            voice = index % VOICES
            yield (
                [(voice, *history[len(history) - size :]) for size in range(len(history) + 1)],
                (token - last if token < HOLD else token),
            )
            last = token if token < HOLD else last

    def loss(self, chorales: Iterable[Chorale]) -> float:
        """Nats per token."""
        losses = [
            -math.log(self._probability(contexts, token))
            for chorale in chorales
            for contexts, token in self._tokens(chorale.tokens.tolist())
        ]
        return sum(losses) / len(losses)

    def _probability(self, contexts: Sequence[Context], token: int) -> float:
        probability = 1 / VOCABULARY
        for context in contexts:
            if (counted := self.counts.get(context)) is not None:
                probability = (counted[token] + len(counted) * probability) / (counted.total() + len(counted))
        return probability

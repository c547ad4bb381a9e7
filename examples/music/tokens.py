"""Bach's four-part chorales, as the package music21 ships them, as a sequence of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

# A token is a MIDI pitch 0 .. 127 where a note begins, or one of these two.
HOLD, REST = 128, 129
VOCABULARY = 130
VOICES = 4
STEP = 0.5  # quarter notes: eighths, the shortest value in all but a few places of a chorale
CATALOGUE = range(253, 439)  # BWV numbers of the collection of four-part chorales


@dataclass(frozen=True)
class Music:
    """Tokens and what they are."""

    tokens: torch.Tensor
    """(N,) int64: soprano, alto, tenor and bass of one eighth note, then of the next."""
    titles: list[str]

    @property
    def notes(self) -> int:
        """The number of tokens that begin a note."""
        return int((self.tokens < HOLD).sum())


def voice_tokens(part: Any, steps: int) -> list[int]:
    """One token per step: the pitch that began since the step before, HOLD if it only goes on, REST if nothing sounds."""
    tokens = [REST] * steps
    for element in part.flatten().notesAndRests:
        if element.isRest:
            continue
        start, stop = float(element.offset), float(element.offset + element.duration.quarterLength)
        first = int(-(-start // STEP))
        tied = element.tie is not None and element.tie.type != "start"
        for step in range(first, min(int(-(-stop // STEP)), steps)):
            tokens[step] = HOLD if tied or step > first else max(pitch.midi for pitch in element.pitches)
    return tokens


def _chorales() -> Iterator[tuple[str, list[int]]]:
    """Title and tokens of one four-part chorale after the other, in catalogue order."""
    try:
        from music21 import corpus
    except ImportError as error:
        raise ImportError("the music comes from the package music21, which is missing: pip install music21") from error
    files = {path.stem: path for path in corpus.getComposer("bach")}
    for number in CATALOGUE:
        if f"bwv{number}" not in files:
            continue
        score = corpus.parse(files[f"bwv{number}"])
        if len(score.parts) == VOICES:
            steps = int(score.highestTime / STEP)
            voices = [voice_tokens(part, steps) for part in score.parts]
            yield f"BWV {number}", [token for step in zip(*voices, strict=True) for token in step]


def chorales(count: int) -> Music:
    """The first ``count`` tokens of the collection.

    Raises:
        ImportError: music21 is not installed; the message says how to install it.
        ValueError: the collection has fewer tokens.
    """
    tokens: list[int] = []
    titles: list[str] = []
    for title, more in _chorales():
        titles.append(title)
        tokens += more
        if len(tokens) >= count:
            return Music(torch.tensor(tokens[:count]), titles)
    raise ValueError(f"the chorales that music21 ships have {len(tokens)} tokens, fewer than {count}")

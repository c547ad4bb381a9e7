"""Bach's four-part chorales from music21's corpus: tokens, their split, windows of them, and MIDI files."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from triton_relattn._core.cache import cache_folder

from .tokens import HOLD, REST, STEP, VOCABULARY, VOICES, voice_tokens

EDGE = VOCABULARY  # stands before the first token of a chorale; it is read, never predicted
IGNORED = -100  # targets behind the last token
PARTS = ("Soprano", "Alto", "Tenor", "Bass")
TUNE = 8  # the number of intervals of the soprano that identify a hymn tune
Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, (windows, length) int64: the token before, and the token."""


@dataclass(frozen=True)
class Chorale:
    """A name in the catalogue such as bwv66.6, and tokens: soprano, alto, tenor and bass of each eighth note."""

    name: str
    tokens: torch.Tensor

    @property
    def number(self) -> int:
        """Number in the catalogue of Bach's works (BWV)."""
        return int(re.findall(r"\d+", self.name)[0])

    @property
    def tune(self) -> tuple[int, ...]:
        """The first intervals of the soprano, which identify a hymn tune: Bach set many of them several times."""
        soprano = self.tokens[::VOICES]
        return tuple(soprano[soprano < HOLD].diff()[:TUNE].tolist())


@dataclass(frozen=True)
class Split:
    train: list[Chorale]
    validation: list[Chorale]
    test: list[Chorale]


def load(count: int = 0) -> list[Chorale]:
    """The first chorales, or for 0 all 365. Parsing takes a minute or two, so that tokens are stored in the cache folder."""
    folder = cache_folder()
    if folder is None:
        found = _parse(count)
    else:
        cache = folder / f"chorales-{count or 'all'}-music21-{metadata.version('music21')}.json"
        if not cache.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write(cache, json.dumps(_parse(count)).encode())
        found = json.loads(cache.read_text())
    return [Chorale(name, torch.tensor(tokens)) for name, tokens in found.items()]


def _parse(count: int) -> dict[str, list[int]]:
    """Tokens of the works that have exactly four parts."""
    from music21 import corpus

    paths = sorted(path for path in corpus.getComposer("bach") if re.fullmatch(r"bwv\d.*\.(mxl|xml)", path.name))
    found: dict[str, list[int]] = {}
    for path in tqdm(paths, desc="reading chorales", disable=bool(count)):
        score = corpus.parse(path)
        if tuple(part.partName for part in score.parts) == PARTS:
            steps = int(score.highestTime / STEP)
            voices = [voice_tokens(part, steps) for part in score.parts]
            found[path.stem] = [token for step in zip(*voices, strict=True) for token in step]
        if count and len(found) == count:
            break
    return found


def write(path: Path, content: bytes) -> None:
    """Write a file atomically: an existing file is complete."""
    beside = path.with_name(path.name + ".part")
    beside.write_bytes(content)
    os.replace(beside, path)


def split(chorales: Sequence[Chorale]) -> Split:
    """Split 8:1:1 by the catalogue number of the first setting of each tune, so that no tune is in two parts."""
    first: dict[tuple[int, ...], int] = {}
    for chorale in chorales:
        first[chorale.tune] = min(chorale.number, first.get(chorale.tune, chorale.number))
    parts: tuple[list[Chorale], list[Chorale], list[Chorale]] = ([], [], [])
    for chorale in chorales:
        parts[{8: 1, 9: 2}.get(first[chorale.tune] % 10, 0)].append(chorale)
    return Split(*parts)


def _window(tokens: torch.Tensor, start: int, length: int) -> Batch:
    before = tokens[start - 1 : start] if start else torch.tensor([EDGE])
    targets = tokens[start : start + length]
    inputs = torch.cat((before, targets[:-1]))
    missing = (0, length - len(targets))
    return torch.nn.functional.pad(inputs, missing, value=EDGE), torch.nn.functional.pad(targets, missing, value=IGNORED)


def windows(chorales: Iterable[Chorale], length: int, *, first: int = 0, every: int = 0) -> Batch:
    """Every chorale cut into windows that begin at first, first + every, ...; every: by default the length.

    Raises:
        ValueError: none of them has a token there.
    """
    cut = [
        _window(chorale.tokens, start, length)
        for chorale in chorales
        for start in range(first, len(chorale.tokens), every or length)
    ]
    if not cut:
        raise ValueError(f"none of these chorales has more than {first} tokens")
    inputs, targets = zip(*cut, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def training_batch(chorales: Sequence[Chorale], length: int, size: int, transpose: bool, seed: int, step: int) -> Batch:
    """Random windows, transposed at random by -5 .. 6 semitones: a function of seed and step, so nothing else need be kept.

    A third or so of the windows begin where the chorale begins, as those do that models are judged by.
    """
    generator = random.Random(f"{seed} {step}")
    drawn = []
    for chorale in generator.choices(chorales, [len(chorale.tokens) for chorale in chorales], k=size):
        tokens = chorale.tokens
        last = max(len(tokens) - length, 0) // VOICES
        margin = length // VOICES // 2
        start = VOICES * min(max(generator.randint(-margin, last + margin), 0), last)
        semitones = generator.randint(-5, 6) * transpose
        drawn.append(_window(torch.where(tokens < HOLD, tokens + semitones, tokens), start, length))
    inputs, targets = zip(*drawn, strict=True)
    return torch.stack(inputs), torch.stack(targets)


def write_midi(tokens: Sequence[int], path: Path, beats_per_minute: int = 72) -> None:
    """Write a MIDI file with four parts; a HOLD without a previous note is silence."""
    from music21 import note, stream, tempo

    score = stream.Score()
    for voice, name in enumerate(PARTS):
        sounds: list[list[int]] = []  # token and how many eighths it lasts
        for token in tokens[voice::VOICES]:
            if token == HOLD and sounds:
                sounds[-1][1] += 1
            else:
                sounds.append([token, 1])
        part: Any = stream.Part(id=name)
        if voice == 0:
            part.append(tempo.MetronomeMark(number=beats_per_minute))
        for token, steps in sounds:
            duration = steps * STEP
            part.append(note.Note(token, quarterLength=duration) if token < HOLD else note.Rest(quarterLength=duration))
        score.insert(0, part)
    score.write("midi", fp=str(path))


def names(tokens: Sequence[int]) -> list[str]:
    """Readable tokens: C#4, -- (held), .. (silence)."""
    pitches = "C C# D Eb E F F# G Ab A Bb B".split()
    signs = {HOLD: "--", REST: ".."}
    return [signs.get(token) or f"{pitches[token % 12]}{token // 12 - 1}" for token in tokens]

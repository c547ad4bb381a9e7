"""A small Music Transformer (Huang et al., 2018) that learns to write four-part chorales from Bach's.

    python -m examples.music_transformer train --attention relative --out out/music/relative-0
    python -m examples.music_transformer train --resume --out out/music/relative-0
    python -m examples.music_transformer generate out/music/relative-0 --prompt 64 --temperature 0.9
    python -m examples.music_transformer summary out/music/{relative,absolute,none}-[0-9]

The model is a causal decoder; --attention chooses how it knows positions:

    relative   a learned vector for each distance, RelativeMultiheadAttention.music_transformer
    absolute   sinusoids of the position are added to the embedded tokens
    none       nothing but the causal mask
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bench.verbs.options import existing_device, new_file, new_folder, positive
from examples.music import chorales, report
from examples.music.chorales import EDGE, IGNORED, Chorale, Split
from examples.music.ngram import Ngram
from examples.music.tokens import VOCABULARY, VOICES
from triton_relattn._command_line import Parser, bounded
from triton_relattn.nn import RelativeMultiheadAttention
from triton_relattn.tables import sinusoids

CHECKPOINT = "checkpoint.pt"


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings that determine a run. Every field is an option of the command line; metadata has its help."""

    attention: str = dataclasses.field(
        default="relative", metadata={"choices": ("relative", "absolute", "none"), "help": "kind of position"}
    )
    implementation: str = dataclasses.field(
        default="auto",
        metadata={"choices": ("auto", "reference", "blockwise", "triton"), "help": "implementation of the operator"},
    )
    seed: int = dataclasses.field(default=0, metadata={"help": "seed of weights, dropout and order of the data"})
    steps: int = dataclasses.field(default=1500, metadata={"help": "steps of the optimizer"})
    length: int = dataclasses.field(default=256, metadata={"help": "tokens of a training window, four to an eighth note"})
    distances: int = dataclasses.field(default=128, metadata={"help": "rows of a table; larger distances share the last one"})
    batch: int = dataclasses.field(default=8, metadata={"help": "windows per step"})
    width: int = dataclasses.field(default=128, metadata={"help": "width of the model"})
    heads: int = dataclasses.field(default=4, metadata={"help": "heads per layer"})
    layers: int = dataclasses.field(default=3, metadata={"help": "layers, each attention and a feed-forward network"})
    dropout: float = dataclasses.field(default=0.1, metadata={"help": "dropout probability"})
    learning_rate: float = dataclasses.field(default=2e-3, metadata={"help": "peak learning rate"})
    transpose: int = dataclasses.field(
        default=1, metadata={"choices": (0, 1), "help": "transposition of training windows by -5 .. 6 semitones"}
    )
    chorales: int = dataclasses.field(default=0, metadata={"help": "number of chorales to read; 0: all"})
    every: int = dataclasses.field(default=100, metadata={"help": "steps between validations, which also save a checkpoint"})

    def __post_init__(self) -> None:
        if self.length % VOICES:
            raise ValueError(f"length must be a multiple of {VOICES}, the tokens of an eighth note, got {self.length}")
        if self.width % 2 or self.width % self.heads:
            raise ValueError(f"width must be even and a multiple of the {self.heads} heads, got {self.width}")
        if self.dropout > 1:
            raise ValueError(f"dropout must be a probability, got {self.dropout}")


class Block(nn.Module):
    """Attention and a feed-forward network, each with normalised inputs and a residual connection."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width, heads = settings.width, settings.heads
        options: dict[str, Any] = {
            "batch_first": True,
            "output_dropout": settings.dropout,
            "implementation": None if settings.implementation == "auto" else settings.implementation,
        }
        self.attention = (
            RelativeMultiheadAttention.music_transformer(width, heads, settings.distances, **options)
            if settings.attention == "relative"
            else RelativeMultiheadAttention(width, heads, **options)
        )
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(settings.dropout)
        )
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, is_causal=True)[0]
        return x + self.feed_forward(self.feed_forward_norm(x))


class MusicTransformer(nn.Module):
    """Logits of the next token, (windows, length, VOCABULARY), from the tokens so far, (windows, length)."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.has_positions = settings.attention == "absolute"
        self.embedding = nn.Embedding(VOCABULARY + 1, settings.width)  # one more: EDGE
        nn.init.normal_(self.embedding.weight, std=settings.width**-0.5)
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.Sequential(*(Block(settings) for _ in range(settings.layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        x = x * math.sqrt(x.shape[-1])
        if self.has_positions:
            x = x + sinusoids(0, tokens.shape[-1] - 1, x.shape[-1], dtype=x.dtype, device=x.device)
        return self.head(self.norm(self.blocks(self.dropout(x))))


def token_losses(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats, in the shape of targets, 0 where they are IGNORED."""
    return nn.functional.cross_entropy(model(inputs).transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")


@torch.no_grad()
def evaluate(model: nn.Module, batch: chorales.Batch, device: torch.device, size: int = 8) -> torch.Tensor:
    """The loss of each token, (windows, length), NaN after the ends of chorales: means are ``nanmean``."""
    model.eval()
    parts = zip(*(tensor.split(size) for tensor in batch), strict=True)
    losses = torch.cat([token_losses(model, inputs.to(device), targets.to(device)).cpu() for inputs, targets in parts])
    model.train()
    return losses.masked_fill(batch[1] == IGNORED, math.nan)


def held_out(model: nn.Module, part: Sequence[Chorale], name: str, length: int, device: torch.device) -> dict[str, float]:
    """Means of the losses of a part of the chorales: see the note that the table of report ends with; also by voice."""
    once, twice = (evaluate(model, chorales.windows(part, size), device) for size in (length, 2 * length))
    cut = evaluate(model, chorales.windows(part, length, first=length, every=2 * length), device)
    losses = {"": once, "_twice": twice, "_beyond": twice[:, length:], "_beyond_cut": cut}
    losses |= {f"_{voice.lower()}": once[:, index::VOICES] for index, voice in enumerate(chorales.PARTS)}
    return {name + kind: float(values.nanmean()) for kind, values in losses.items()}


def learning_rate(settings: Settings, step: int) -> float:
    """Linear up over 100 steps, then a quarter of a cosine wave down to 0 at the last."""
    return settings.learning_rate * min((step + 1) / 100, 1.0) * math.cos(math.pi / 2 * step / settings.steps)


class Run:
    """The state of training a model, and the folder where it is saved."""

    def __init__(self, settings: Settings, out: Path, device: torch.device) -> None:
        self.settings, self.out, self.device = settings, out, device
        torch.manual_seed(settings.seed)
        self.model = MusicTransformer(settings).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.98))
        self.rows: list[dict[str, Any]] = []
        self.seconds = 0.0

    def save(self) -> None:
        """Checkpoint, CSV file and figure."""
        state = {
            "settings": dataclasses.asdict(self.settings),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rows": self.rows,
            "seconds": self.seconds,
            "generator": torch.get_rng_state(),
            "generator_cuda": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        content = io.BytesIO()
        torch.save(state, content)
        chorales.write(self.out / CHECKPOINT, content.getvalue())
        report.write_csv(self.out / report.CURVE, self.rows, report.CURVE_COLUMNS)
        report.draw_curve(self.rows, self.out / "loss.png", self.settings.length)

    @classmethod
    def load(cls, out: Path, device: torch.device) -> Run:
        """Restore a saved run, with the state of torch's generator."""
        state = torch.load(out / CHECKPOINT, map_location="cpu")
        run = cls(Settings(**state["settings"]), out, device)
        run.model.load_state_dict(state["model"])
        run.optimizer.load_state_dict(state["optimizer"])
        run.rows, run.seconds = state["rows"], state["seconds"]
        torch.set_rng_state(state["generator"])
        if state["generator_cuda"] is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["generator_cuda"], device)
        return run

    def step(self, part: Sequence[Chorale]) -> float:
        """Do one step of the optimizer; return the loss of its batch."""
        settings, number = self.settings, len(self.rows)
        batch = chorales.training_batch(part, settings.length, settings.batch, bool(settings.transpose), settings.seed, number)
        inputs, targets = (tensor.to(self.device) for tensor in batch)
        loss = token_losses(self.model, inputs, targets).sum() / (targets != IGNORED).sum()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(settings, number)
        self.optimizer.step()
        return loss.item()

    def train(self, split: Split) -> bool:
        """Train up to the last step or Ctrl-C, and save a checkpoint. Returns whether it was the last step."""
        settings = self.settings
        validation = {
            "validation": chorales.windows(split.validation, settings.length),
            "validation_twice": chorales.windows(split.validation, 2 * settings.length),
        }
        losses: dict[str, float] = {}
        began = time.monotonic() - self.seconds
        with tqdm(total=settings.steps, initial=len(self.rows), desc=self.out.name) as bar, interruptible() as interrupted:
            while (step := len(self.rows) + 1) <= settings.steps and not interrupted:
                row = {"step": step, "train": self.step(split.train), **dict.fromkeys(validation)}
                self.rows.append(row)
                due = step % settings.every == 0 or step == settings.steps
                if due:
                    losses = {
                        name: float(evaluate(self.model, batch, self.device).nanmean()) for name, batch in validation.items()
                    }
                    row.update(losses)
                self.seconds = time.monotonic() - began
                row["seconds"] = round(self.seconds, 3)
                if due:
                    self.save()
                bar.set_postfix({"loss": row["train"], **losses})
                bar.update()
            if interrupted:
                self.save()
        return len(self.rows) == settings.steps


@contextmanager
def interruptible() -> Iterator[list[int]]:
    """A list that is empty until Ctrl-C is pressed, so that the step can finish; a second Ctrl-C interrupts it."""
    pressed: list[int] = []

    def note(number: int, _: Any) -> None:
        pressed.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def sample(logits: torch.Tensor, temperature: float, top_p: float) -> int:
    """One of the likeliest tokens with a total probability of top_p."""
    probabilities, tokens = (logits.cpu() / temperature).softmax(-1).sort(descending=True)
    probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
    return int(tokens[torch.multinomial(probabilities, 1)])


@torch.no_grad()
def generate(model: nn.Module, prompt: Sequence[int], count: int, length: int, temperature: float, top_p: float) -> list[int]:
    """The prompt and its continuation, count tokens in total; the context of each is a training window."""
    model.eval()
    device = next(model.parameters()).device
    tokens = [EDGE, *prompt]
    for _ in tqdm(range(len(prompt), count), desc="generating", leave=False):
        start = -(-max(len(tokens) - length, 0) // VOICES) * VOICES  # where a window of training could begin
        logits = model(torch.tensor([tokens[start:]], device=device))[0, -1]
        tokens.append(sample(logits, temperature, top_p))
    return tokens[1:]


def train(options: argparse.Namespace) -> int:
    """Train, evaluate, and let the model write two pieces."""
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.resume and not (options.out / CHECKPOINT).is_file():
        raise argparse.ArgumentError(None, f"--resume: {options.out} has no {CHECKPOINT}")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    if options.resume:
        run = Run.load(options.out, device)
    else:
        given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)}
        try:
            settings = Settings(**given)
        except ValueError as error:
            raise argparse.ArgumentError(None, str(error)) from error
        run = Run(settings, options.out, device)
        (options.out / report.RESULT).unlink(missing_ok=True)
    settings = run.settings
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    split = chorales.split(chorales.load(settings.chorales))
    if any(all(len(piece.tokens) <= settings.length for piece in part) for part in (split.validation, split.test)):
        raise argparse.ArgumentError(None, "no chorale for validation, or none for test, is longer than --length")
    print(f"{settings}\n{parameters:,} parameters on {device}")
    for name, part in dataclasses.asdict(split).items():
        print(f"{name}: {len(part)} chorales, {sum(len(chorale['tokens']) for chorale in part):,} tokens")
    if not run.train(split):
        print(f"interrupted after {len(run.rows)} steps; go on with train --resume --out {options.out}")
        return 130
    ngram = min((Ngram(order, split.train) for order in range(1, 9)), key=lambda model: model.loss(split.validation))
    result = {
        **dataclasses.asdict(settings),
        "parameters": parameters,
        "seconds": round(run.seconds, 1),
        "ngram_order": ngram.order,
        "ngram_validation": ngram.loss(split.validation),
        "ngram_test": ngram.loss(split.test),
        **held_out(run.model, split.validation, "validation", settings.length, device),
        **held_out(run.model, split.test, "test", settings.length, device),
    }
    report.write_csv(options.out / report.RESULT, [result], result)
    for name, value in result.items():
        if name.startswith(("ngram_v", "ngram_t", "validation", "test")):
            print(f"{name:20} {report.perplexity(value)}")
    for name, prompt in (("continued", settings.length // 4), ("free", 0)):
        compose(run, split.test, options.out / f"{name}.mid", prompt, settings.length)
    print(f"{run.seconds:.0f} s of training; {options.out}: {', '.join(sorted(path.name for path in options.out.iterdir()))}")
    return 0


def compose(
    run: Run, part: Sequence[Chorale], path: Path, prompt: int, count: int, temperature: float = 1.0, top_p: float = 0.95
) -> None:
    """Write a MIDI file that begins with ``prompt`` tokens of the first of these chorales."""
    given = part[0].tokens[:prompt].tolist()
    tokens = generate(run.model, given, count, run.settings.length, temperature, top_p)
    chorales.write_midi(tokens, path)
    beginning = f"the first {prompt} of {part[0].name}" if prompt else "nothing"
    print(f"{path}: {count} tokens from {beginning}; those that follow begin {' '.join(chorales.names(tokens[prompt:][:16]))}")


def compose_more(options: argparse.Namespace) -> int:
    """The verb generate."""
    run = Run.load(options.run, torch.device("cpu"))
    torch.manual_seed(options.seed)
    held = chorales.split(chorales.load(run.settings.chorales)).test
    path = options.midi or options.run / f"generated-{options.seed}.mid"
    compose(run, held[options.chorale :], path, options.prompt, options.tokens, options.temperature, options.top_p)
    return 0


def summarise(options: argparse.Namespace) -> int:
    """The verb summary."""
    try:
        print(report.table(options.runs))
    except ValueError as error:
        raise argparse.ArgumentError(None, str(error)) from error
    options.figure.parent.mkdir(parents=True, exist_ok=True)
    report.draw_summary(options.runs, options.figure)
    print(f"\n{options.figure}")
    return 0


def folder_with(name: str) -> Callable[[str], Path]:
    """A parser for the folder of a run that contains a file."""

    def parse(text: str) -> Path:
        if not (Path(text) / name).is_file():
            raise argparse.ArgumentTypeError(f"{text} has no {name}")
        return Path(text)

    return parse


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Adds the defaults that there are."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        has_one = action.default is not None and action.default is not False
        return super()._get_help_string(action) if has_one else action.help


def main(arguments: Sequence[str] | None = None) -> int:
    parser = Parser(
        prog="python -m examples.music_transformer", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True)

    verb = verbs.add_parser("train", help="train a model", formatter_class=Defaults)
    verb.set_defaults(run_verb=train)
    for field in dataclasses.fields(Settings):
        kind: Any = type(field.default)
        if kind is not str and "choices" not in field.metadata:
            kind = bounded(kind, 1 if kind is int and field.default else 0)
        verb.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default, **field.metadata)
    verb.add_argument("--out", type=new_folder, default=Path("out/music/run"), help="folder to write to")
    verb.add_argument("--resume", action="store_true", help="continue from the checkpoint in that folder, with its settings")
    verb.add_argument("--device", type=existing_device, help="device, cpu or cuda; cuda if there is one")

    verb = verbs.add_parser("generate", help="let a model write", formatter_class=Defaults)
    verb.set_defaults(run_verb=compose_more)
    verb.add_argument("run", type=folder_with(CHECKPOINT), help="folder of a run")
    verb.add_argument("--midi", type=new_file, help="file to write; by default in that folder")
    verb.add_argument("--prompt", type=bounded(int, 0), default=64, help="tokens of a held-out chorale to begin with; 0: none")
    verb.add_argument("--chorale", type=bounded(int, 0), default=0, help="number of the held-out chorale")
    verb.add_argument("--tokens", type=positive, default=256, help="tokens in all, four to an eighth note")
    verb.add_argument("--temperature", type=bounded(float, 0.01), default=1.0, help="temperature; below 1, likelier tokens")
    verb.add_argument(
        "--top-p", type=bounded(float, 1e-6, 1), default=0.95, help="total probability of the likeliest tokens to draw from"
    )
    verb.add_argument("--seed", type=int, default=0, help="seed of the draws")

    verb = verbs.add_parser("summary", help="table and figure of several runs")
    verb.set_defaults(run_verb=summarise)
    verb.add_argument("runs", type=Path, nargs="+", help="folders")
    verb.add_argument("--figure", type=new_file, default=Path("out/music/summary.png"), help="file to write (%(default)s)")

    verb = verbs.add_parser("difference", help="largest differences between the losses of two runs")
    verb.set_defaults(run_verb=lambda options: print(report.difference(*options.runs)) or 0)
    verb.add_argument("runs", type=folder_with(report.CURVE), nargs=2, help="folders")

    options = parser.parse_args(arguments)
    try:
        return options.run_verb(options)
    except argparse.ArgumentError as error:  # of arguments that do not go together
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())

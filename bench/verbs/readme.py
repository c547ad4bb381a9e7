"""Figures, tables and claims of README and docs that come from the rows in bench/results, written into these pages.

A part of a page stands between ``<!-- begin NAME: python -m bench readme -->`` and ``<!-- end -->``; NAME is one of PARTS.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean

from ..cases.methods import METHODS, OURS
from ..report import figures, gpu, models, summary
from ..report.figures import BEST_DENSE
from ..report.rows import ROOT, pivot, read
from ..report.text import digits, markdown_table, short_bytes, short_time, spread
from . import accuracy
from .options import new_folder

DOCS = ("long-audio", "sentences", "benchmarks", "benchmarks-cpu", "benchmarks-models", "numerics")
PAGES = ("README.md", *(f"docs/{page}.md" for page in DOCS), "examples/README.md")
PART = re.compile(r"(<!-- begin (\S+): python -m bench readme -->\n).*?(\n<!-- end -->\n)", re.DOTALL)
RESULTS = ROOT / "bench" / "results" / "cpu"
LENGTH = 8192
PEERS = {"flex_attention": "Compiled FlexAttention", "onnxruntime": "ONNX Runtime's Attention with a dense mask"}
SHOWN = (
    *("wav2vec2_bert", "wav2vec2_conformer", "parakeet", "parakeet_attention", "vits", "wavlm", "t5", "deberta_v2", "speecht5"),
    *("inkling", "gemma4", "sam"),
)
"""Families of models in the tables of docs/transformers.md."""
Measured = dict[str, dict[int, float]]
"""By method and length."""


def load(*files: str) -> list[dict[str, str]]:
    return [row for file in files for row in read(RESULTS / file)]


def measured(file: str, direction: str, column: str) -> Measured:
    """A column of a file's rows, of the best dense method as well."""
    return {name: dict(points) for name, points in figures.lines(load(file), direction, column, (*METHODS, BEST_DENSE)).items()}


def ratios(times: Measured, method: str, other: str) -> str:
    """The smallest and the largest ratio of two methods, over all lengths that have both."""
    return spread(times[method][length] / times[other][length] for length in times[method].keys() & times[other])


def on_cpu() -> str:
    """README's sentence about machines without a GPU."""
    memory = measured("memory.csv", "forward+backward", "peak_bytes")
    both = measured("speed.csv", "forward+backward", "p50_ms")
    row = next(row for row in load("speed.csv") if row["status"] == "ok")
    ours, dense = ((short_bytes(memory[name][LENGTH]), short_time(both[name][LENGTH])) for name in (OURS, BEST_DENSE))
    gain, none = (geometric_mean(models.over_ours(load("models.csv"), length, "p50_ms").values()) for length in (2048, 512))
    return (
        f"**On a CPU** it is plain PyTorch, block by block: {LENGTH:,} tokens, forward + backward, take {' and '.join(ours)}, "
        f"the leanest dense way {dense[0]}, the fastest {dense[1]} (8 heads of {row['head_dim']}, float32, {row['threads']} "
        f"threads). A model's layer is {gain:.1f} times as fast as stock with 2,048 tokens, {none:.2f} times with 512 (geometric "
        "means of 17 and 43). [All figures](docs/benchmarks-cpu.md)."
    )


def claims() -> str:
    """How fast ours is, beside dense methods, other packages and attention without a term: the worst and the best length."""
    forward, both = (measured("speed.csv", direction, "p50_ms") for direction in summary.DIRECTIONS)
    shortest, longest, longest_dense = min(both[OURS]), max(both[OURS]), max(both[BEST_DENSE])
    text = (
        f"At lengths {shortest} to {longest_dense:,} the forward is {ratios(forward, BEST_DENSE, OURS)} times as fast as the "
        f"fastest of {', '.join(f'`{name}`' for name in summary.DENSE)}, with the backward {ratios(both, BEST_DENSE, OURS)} "
        "times. "
    )
    for method, name in PEERS.items():
        text += f"{name} takes {ratios(forward, method, OURS)} times as long forward; it has no backward on a CPU. "
    return (
        f"{text}At lengths {shortest} to {longest:,} ours takes {ratios(forward, OURS, 'sdpa')} times as long as `sdpa` takes "
        f"without a term, with the backward {ratios(both, OURS, 'sdpa')} times."
    )


def machine(rows: Sequence[dict[str, str]]) -> str:
    """Where rows come from."""
    commits: dict[str, dict[str, None]] = {}
    for row in rows:
        threads = f"{row['threads']} thread{'s' * (row['threads'] != '1')}"
        where = f"{threads} of an {row['device'].removeprefix('CPU, ')}, torch {row['torch'].split('+')[0]}"
        commits.setdefault(where, {})[row["commit"].rstrip("+")] = None
    found = [f"{where}, commit{'s' * (len(names) > 1)} {' and '.join(names)}" for where, names in commits.items()]
    return f"\n\nMeasured on {'; '.join(found)}."


def with_machine(table: Callable[[Sequence[dict[str, str]]], str], *files: str, group: str = "") -> str:
    """A table of the rows of some files, and where they come from."""
    rows = [row for row in load(*files) if group in ("", row.get("group"))]
    return table(rows).strip() + machine(rows)


def huang() -> str:
    """Peaks of one causal head, in MB."""
    peaks = measured("huang.csv", "forward", "peak_bytes")
    methods = ("shaw_gather", "skewing", OURS, "plain")
    body = [[f"{n:,}", *(f"{peaks[method][n] / 1e6:,.1f}" for method in methods)] for n in peaks[OURS]]
    return markdown_table(["length", *methods], body)


def decoding() -> str:
    """One query and a cache of keys."""
    rows = [row for row in load("short.csv") if (row["group"], row["direction"]) == ("decode", "forward")]
    times = pivot(rows, ["batch", "seqlen"], "p50_ms")
    body = [[", ".join(size), digits(found[OURS]), digits(found["sdpa"])] for size, found in times.items()]
    return markdown_table(["batch, keys", "ours, ms", "SDPA without a term, ms"], body)


def model_tables() -> str:
    """Some families: how much faster at each length, time and memory at their longest one."""
    rows = load("models.csv")
    shortest = models.single_lengths(rows)[0]
    found = models.over_ours(rows, shortest, "p50_ms")
    worst, *_, best = sorted((ratio, case) for case, ratio in found.items())
    extremes = " and ".join(f"{ratio:.2f} ({models.family_title(case)})" for ratio, case in (worst, best))
    mean = geometric_mean(found.values())
    sentence = (
        f"With {shortest:,} tokens there is {'no' if mean < models.GAIN else 'a'} gain on average: {mean:.2f} times "
        f"({spread(found.values())}, {len(found)} models). The extremes are {extremes}."
    )
    return f"{models.tables(rows, SHOWN)}\n{sentence}{machine(rows)}"


def sentences() -> str:
    """Packed encoders with the smallest and the largest share of real tokens."""
    rows = [row for row in load("sentences.csv") if row["real"] in ("0.25", "0.85")]
    return models.sentences(rows) + machine(rows)


def music() -> str:
    from examples.music import report

    return report.table(sorted(path for path in (ROOT / "examples" / "results").iterdir() if path.is_dir()))


PARTS: dict[str, Callable[[], str]] = {
    "claims": claims,
    "lengths": lambda: with_machine(summary.markdown, "speed.csv", "memory.csv"),
    "bias": lambda: with_machine(summary.markdown, "bias.csv"),
    "new-lengths": lambda: with_machine(summary.new_lengths, "lengths.csv"),
    "huang": huang,
    "short": lambda: with_machine(summary.beside_dense, "short.csv", group="short"),
    "bf16": lambda: with_machine(summary.beside_dense, "short_bf16.csv"),
    "decoding": decoding,
    "accuracy": lambda: accuracy.markdown(load("accuracy.csv")),
    "models": model_tables,
    "models-short": lambda: models.ratios(load("models_short.csv"), SHOWN),
    "models-bf16": lambda: models.ratios(load("models_bf16.csv")),
    "sentences": sentences,
    "music": music,
    "gpu": lambda: "\n\n- ".join([gpu.first(), "\n- ".join([*gpu.gains(), *gpu.costs(), on_cpu()])]),
    "hour": gpu.hour,
    "gpu-speed": gpu.speed,
    "gpu-baselines": gpu.baselines,
    "gpu-deberta": gpu.deberta,
    "gpu-memory": gpu.memory,
}


def wrapped(text: str) -> str:
    """Markdown whose paragraphs and list items have lines of 80 columns; tables have one line per row."""

    def fill(line: str) -> str:
        indent = "  " * line.startswith("- ")
        return textwrap.fill(line, 80, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)

    return "\n".join(line if line.startswith("|") else fill(line) for line in text.splitlines())


def written(page: str) -> str:
    """A page with its parts as the rows have them now."""
    return PART.sub(lambda found: f"{found[1]}{wrapped(PARTS[found[2]]().strip())}\n{found[3]}", (ROOT / page).read_text())


def draw(folder: Path) -> list[Path]:
    """The H100's figures: memory and time side by side for README, memory, and time against the length for the benchmarks."""
    first, memory, times = (folder / f"{name}.png" for name in ("h100", "memory", "speed"))
    full = gpu.peaks()
    with figures.new_figure(first, f"{gpu.machine().removeprefix('an ')}: bfloat16. Dense: eager PyTorch.") as drawn:
        drawn.set_size_inches(figures.WIDTH, 3.7)
        left, right = drawn.subplots(1, 2)
        points = figures.lines(full, gpu.BOTH, "peak_bytes", figures.LEADING)
        dense, ours = points[figures.BEST_DENSE][-1], dict(points[OURS])
        title = f"1/{dense[1] / ours[dense[0]]:.0f} of the memory at {figures.short_length(dense[0])} tokens"
        figures.draw_panel(left, points, "bytes", title, "forward + backward, 8 heads of 64: peak memory")
        lost = figures.failures(full, gpu.BOTH, points)[figures.BEST_DENSE]
        figures.set_ticks(left, [*left.get_ylim(), 2 * dense[1]], "bytes")
        figures.mark_failure(left, lost, left.get_ylim()[1], figures.BEST_DENSE)
        where = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": figures.SMALL}
        left.annotate("out of memory (80 GB)", (lost, left.get_ylim()[1]), (-8, -6), **where)
        left.legend(loc="upper left", bbox_to_anchor=(0, 0.94), frameon=False, fontsize=figures.SMALL)
        figures.draw_times(right, gpu.shown())
        drawn.tight_layout(rect=(0, 0.06, 1, 1), w_pad=1.5)
    figures.draw_directions("memory", full, memory, tuple(figures.LEADING))
    long = [row for row in gpu.load() if (row["verb"], row["group"], row["head_dim"]) == ("speed", "long", "64")]
    figures.draw_directions("speed", long, times, tuple(figures.LEADING))
    return [first, memory, times]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=new_folder, default=ROOT, help="folder to write pages and figure into (the repository)")


def run(options: argparse.Namespace) -> int:
    for page in PAGES:
        path = options.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written(page))
        print(path)
    folder = options.out / gpu.RESULTS.relative_to(ROOT)
    folder.mkdir(parents=True, exist_ok=True)
    print(*draw(folder), sep="\n")
    return 0

"""Figures, tables and claims of README and docs that come from the rows in bench/results/cpu, written into these pages.

A part of a page stands between ``<!-- begin NAME: python -m bench readme -->`` and ``<!-- end -->``; NAME is one of PARTS.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ..cases.methods import OURS
from ..report import summary
from ..report.figures import INK, MUTED, draw_panel
from ..report.rows import ROOT, read
from ..report.summary import DENSE
from ..report.text import short_bytes, short_time
from . import accuracy
from . import lengths as new_lengths
from .options import new_folder

PAGES = ("README.md", "docs/benchmarks.md", "docs/numerics.md", "docs/transformers.md", "examples/README.md")
PART = re.compile(r"(<!-- begin (\S+): python -m bench readme -->\n).*?(\n<!-- end -->\n)", re.DOTALL)
RESULTS, FIGURE = ROOT / "bench" / "results" / "cpu", "first.png"
LENGTH = 8192
NAMES = {OURS: "triton_relattn", "dense": "best dense PyTorch", "sdpa": "SDPA without positions"}
LOOKS: dict[str, dict[str, Any]] = {
    OURS: {"color": "#d1495b", "marker": "o", "linewidth": 2.8},
    "dense": {"color": "#0b3954", "marker": "s"},
    "sdpa": {"color": "#6b7785", "marker": ".", "linestyle": ":"},
}
Measured = dict[int, dict[str, float]]


def measured(file: str, direction: str, column: str) -> Measured:
    """Return, by length, a column of our rows, of SDPA without positions and of the best dense method, "dense"."""
    found: Measured = {}
    for row in read(RESULTS / file):
        if row["direction"] == direction and row["status"] == "ok":
            found.setdefault(int(row["seqlen"]), {})[row["method"]] = float(row[column])
    for each in found.values():
        if dense := [each[method] for method in DENSE if method in each]:
            each["dense"] = min(dense)
    return found


def ratios(times: Measured, method: str, of: str) -> str:
    """The smallest and the largest of a ratio over all lengths that have it."""
    every = [each[method] / each[of] for each in times.values() if method in each and of in each]
    return f"{min(every):.1f} to {max(every):.1f}"


def speedups_of_models(length: int) -> list[float]:
    """How many times as fast models of transformers are as the fastest of their stock ways, one sequence."""
    times: dict[str, dict[str, float]] = {}
    for row in read(RESULTS / "models.csv"):
        wanted = (row["direction"], int(row["seqlen"]), row["batch"], row["status"]) == ("forward+backward", length, "1", "ok")
        if wanted and row["p50_ms"]:
            times.setdefault(row["case"], {})[row["method"]] = float(row["p50_ms"])
    return [min(t for method, t in each.items() if method != OURS) / each[OURS] for each in times.values() if len(each) > 1]


def first() -> str:
    """README's first screen."""
    memory = measured("memory.csv", "forward+backward", "peak_bytes")[LENGTH]
    forward, both = (measured("speed.csv", direction, "p50_ms") for direction in ("forward", "forward+backward"))
    lines = [f"![Peak memory and time against the sequence length]({(RESULTS / FIGURE).relative_to(ROOT)})", ""]
    lines += [f"| one attention call, {LENGTH:,} tokens, forward + backward | memory | time |", "|---|---|---|"]
    for method, name in NAMES.items():
        bold = "**" * (method == OURS)
        cells = f"{bold}{short_bytes(memory[method])}{bold} | {bold}{short_time(both[LENGTH][method])}{bold}"
        lines.append(f"| {name}{' (lower bound)' * (method == 'sdpa')} | {cells} |")
    row = next(row for row in read(RESULTS / "speed.csv") if row["status"] == "ok")
    device, torch = row["device"].removeprefix("CPU, "), row["torch"].split("+")[0]
    longest_dense = max(length for length in both if "dense" in both[length])
    short, long = speedups_of_models(512), speedups_of_models(2048)
    what = (
        f"Measured on {row['threads']} threads of a CPU ({device}, torch {torch}), 8 heads of {row['head_dim']}, float32. "
        f"From {min(both)} to {longest_dense:,} tokens {ratios(both, 'dense', OURS)} times as fast as the fastest dense method "
        f"(forward alone {ratios(forward, 'dense', OURS)}); from {min(both)} to {max(both):,} it takes "
        f"{ratios(both, OURS, 'sdpa')} times as long as attention without positions (forward {ratios(forward, OURS, 'sdpa')}). "
        f"A layer of a model of transformers is {geometric_mean(long):.2f} times as fast as stock with 2,048 tokens "
        f"({len(long)} models), and {geometric_mean(short):.2f} times with 512 ({len(short)}; geometric means, one sequence). "
        "[All figures](docs/benchmarks.md)."
    )
    return "\n".join([*lines, "", what, ""])


def claims() -> str:
    """How fast ours is, beside dense methods, other packages and attention without a term: the worst and the best length."""
    forward, both = (measured("speed.csv", direction, "p50_ms") for direction in summary.DIRECTIONS)
    longest_dense = max(length for length in both if "dense" in both[length])
    what = (
        f"At lengths {min(both)} to {longest_dense:,} the forward is {ratios(forward, 'dense', OURS)} times as fast as the "
        f"fastest of {', '.join(f'`{each}`' for each in DENSE)}, with the backward {ratios(both, 'dense', OURS)} times. "
    )
    for method, name in PEERS.items():
        if any(method in each for each in forward.values()):
            what += f"{name} takes {ratios(forward, method, OURS)} times as long forward; it has no backward on a CPU. "
    what += (
        f"At lengths {min(both)} to {max(both):,} ours takes {ratios(forward, OURS, 'sdpa')} times as long as `sdpa` takes "
        f"without a term, with the backward {ratios(both, OURS, 'sdpa')} times."
    )
    return what


PEERS = {"flex_attention": "Compiled FlexAttention", "onnxruntime": "ONNX Runtime's Attention with a dense mask"}


def lines(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def machine(*files: str) -> str:
    """Where the rows of some files come from."""
    found = dict.fromkeys(
        f"{row['threads']} thread{'s' * (row['threads'] != '1')} of an {row['device'].removeprefix('CPU, ')}, torch "
        f"{row['torch'].split('+')[0]}, commit {row['commit'].rstrip('+')}"
        for file in files
        for row in read(RESULTS / file)
    )
    return f"\n\nMeasured on {'; '.join(found)}."


def huang() -> str:
    """Peaks of one causal head, in MB."""
    peaks = measured("huang.csv", "forward", "peak_bytes")
    methods = ("shaw_gather", "skewing", OURS, "plain")
    body = [[f"{n:,}", *(f"{each[method] / 1e6:,.1f}" for method in methods)] for n, each in sorted(peaks.items())]
    return lines(["length", *methods], body)


def decoding() -> str:
    """One query and a cache of keys."""
    rows = [row for row in read(RESULTS / "short.csv") if (row["group"], row["direction"]) == ("decode", "forward")]
    times = {(row["case"], row["method"]): float(row["p50_ms"]) for row in rows if row["p50_ms"]}
    sizes = {row["case"]: f"{row['batch']}, {row['seqlen']}" for row in rows}
    body = [[size, *(short_time(times[case, method]) for method in (OURS, "sdpa"))] for case, size in sizes.items()]
    return lines(["batch, keys", "forward", "SDPA without a term"], body)


def short() -> str:
    rows = [row for row in read(RESULTS / "short.csv") if row["group"] == "short"]
    return summary.beside_dense(rows).strip() + machine("short.csv")


def some_models(text: str) -> str:
    """Of a table of models the heading, some families, and what stands below."""
    table = text.splitlines()
    return "\n".join(line for line in table if not re.match(r"\| \w+ \|", line) or line.split()[1] in ("model", *SHOWN))


def models() -> str:
    """Some families at their longest length, and how many were measured at each."""
    rows = read(RESULTS / "models.csv")
    families = {length: {row["case"] for row in rows if row["seqlen"] == length} for length in {row["seqlen"] for row in rows}}
    counts = ", ".join(f"{len(families[length])} at {int(length):,}" for length in sorted(families, key=int))
    return f"{some_models(summary.models(rows))}\n\nFamilies measured, by length: {counts}.{machine('models.csv')}"


SHOWN = (
    *("wav2vec2_bert", "wav2vec2_conformer", "parakeet", "parakeet_attention", "vits", "wavlm", "t5", "deberta_v2", "speecht5"),
    *("inkling", "gemma4", "sam"),
)
"""Families of models in the tables of docs/transformers.md."""


def music() -> str:
    from examples.music import report

    return report.table(sorted(path for path in (ROOT / "examples" / "results").iterdir() if path.is_dir()))


PARTS: dict[str, Callable[[], str]] = {
    "first": first,
    "claims": claims,
    "lengths": lambda: (
        summary.markdown([*read(RESULTS / "speed.csv"), *read(RESULTS / "memory.csv")]).strip()
        + machine("speed.csv", "memory.csv")
    ),
    "bias": lambda: summary.markdown(read(RESULTS / "bias.csv")).strip() + machine("bias.csv"),
    "new-lengths": lambda: new_lengths.markdown(read(RESULTS / "lengths.csv")).strip() + machine("lengths.csv"),
    "huang": huang,
    "short": short,
    "bf16": lambda: summary.beside_dense(read(RESULTS / "short_bf16.csv")).strip() + machine("short_bf16.csv"),
    "decoding": decoding,
    "accuracy": lambda: accuracy.markdown(read(RESULTS / "accuracy.csv")),
    "models": models,
    "models-short": lambda: some_models(summary.models(read(RESULTS / "models_short.csv"))),
    "models-bf16": lambda: summary.ratios(read(RESULTS / "models_bf16.csv")),
    "music": music,
}


def wrapped(text: str) -> str:
    """Markdown whose paragraphs have lines of 80 columns; tables have one line per row."""
    every = (line if line.startswith("|") else textwrap.fill(line, 80, break_on_hyphens=False) for line in text.splitlines())
    return "\n".join(every)


def written(page: str) -> str:
    """A page with its parts as the rows have them now."""
    return PART.sub(lambda found: f"{found[1]}{wrapped(PARTS[found[2]]().strip())}\n{found[3]}", (ROOT / page).read_text())


def draw(path: Path) -> None:
    """Memory and time side by side, with the methods' names at the ends of their lines."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10.5, "font.family": "DejaVu Sans", "text.color": INK}):
        figure, axes = plt.subplots(1, 2, figsize=(11.5, 3.9))
        for axis, quantity, title, found in (
            (axes[0], "bytes", "Peak memory", measured("memory.csv", "forward+backward", "peak_bytes")),
            (axes[1], "time", "Time", measured("speed.csv", "forward+backward", "p50_ms")),
        ):
            points = {m: [(n, each[m]) for n, each in sorted(found.items()) if m in each] for m in NAMES}
            draw_panel(axis, points, LOOKS, quantity, f"{title}, forward + backward")
            _name_lines(axis, points)
        figure.tight_layout(w_pad=8)
        figure.savefig(path, dpi=120, facecolor="white", bbox_inches="tight")
        plt.close(figure)


def _name_lines(axis: Any, points: Mapping[str, list[tuple[int, float]]]) -> None:
    for method, values in points.items():
        aside = {"xytext": (-10, 4), "ha": "right"} if method == "dense" else {"xytext": (8, 5 if method == OURS else -6)}
        look = {"color": LOOKS[method]["color"], "fontsize": 9.5, "fontweight": "bold" if method == OURS else None}
        axis.annotate(NAMES[method], values[-1], textcoords="offset points", va="center", **aside, **look)
    axis.tick_params(colors=MUTED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=new_folder, default=ROOT, help="folder to write pages and figure into (the repository)")


def run(options: argparse.Namespace) -> int:
    figure = options.out / (RESULTS / FIGURE).relative_to(ROOT)
    for page in PAGES:
        path = options.out / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written(page))
        print(path)
    figure.parent.mkdir(parents=True, exist_ok=True)
    draw(figure)
    print(figure)
    return 0

"""CSV files of runs, and figures and a table made from them."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.report.figures import DPI, FONT, INK, MUTED, SMALL, WIDTH, style

from .chorales import write

CURVE, RESULT = "curve.csv", "result.csv"
CURVE_COLUMNS = ("step", "seconds", "train", "validation", "validation_twice")
CONDITIONS = (
    *("steps", "length", "distances", "batch", "width", "heads", "layers"),
    *("dropout", "learning_rate", "transpose", "chorales"),
)
"""Settings that the runs of one table must agree in."""
COLORS = {"relative": "#d1495b", "absolute": "#0b3954", "none": "#79b4a9"}
MEASURED = {
    "validation": "validation",
    "validation_twice": "validation, 2x",
    "test": "test",
    "test_twice": "test, 2x",
    "test_beyond": "test, beyond",
    "test_beyond_cut": "the same, cut",
}
Row = Mapping[str, Any]


def write_csv(path: Path, rows: Sequence[Row], columns: Iterable[str]) -> None:
    """None is an empty cell."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(path, text.getvalue().encode())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def curve(rows: Sequence[Row], column: str) -> tuple[list[int], list[float]]:
    """Steps and losses; training losses are means between validations."""
    steps, losses, since = [], [], []
    for row in rows:
        since.append(float(row["train"]))
        if row["validation"] not in ("", None):
            steps.append(int(row["step"]))
            losses.append(statistics.fmean(since) if column == "train" else float(row[column]))
            since = []
    return steps, losses


def _style(axes: Any, title: str, subtitle: str = "") -> None:
    style(axes, title, "step", subtitle)
    axes.set_ylabel("loss (nats per token)", color=MUTED)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)


def draw_curve(rows: Sequence[Row], path: Path, length: int) -> None:
    """The losses of one run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    lines = {
        "train": (f"training, {length} tokens, with dropout", "#6b7785"),
        "validation": (f"validation, {length} tokens", COLORS["relative"]),
        "validation_twice": (f"validation, {2 * length} tokens", COLORS["absolute"]),
    }
    for column, (label, color) in lines.items():
        axes.plot(*curve(rows, column), label=label, color=color, linewidth=1.8)
    _style(axes, "Loss")
    figure.tight_layout()
    figure.savefig(path, dpi=120, facecolor="white")
    plt.close(figure)


def finished(folders: Iterable[Path]) -> dict[str, list[tuple[dict[str, str], list[dict[str, str]]]]]:
    """Result and curve of every run, by kind of attention; says which are left out because they have not ended.

    Raises:
        ValueError: they do not agree in CONDITIONS, or none has ended.
    """
    found: dict[str, list[tuple[dict[str, str], list[dict[str, str]]]]] = {}
    for folder in folders:
        if not (folder / RESULT).exists():
            print(f"{folder} has not ended and is left out")
            continue
        [result] = read_csv(folder / RESULT)
        found.setdefault(result["attention"], []).append((result, read_csv(folder / CURVE)))
    results = [result for runs in found.values() for result, _ in runs]
    if not results:
        raise ValueError("no run that has ended")
    for name in CONDITIONS:
        if len(values := {result[name] for result in results}) > 1:
            raise ValueError(f"these runs differ in {name}: {', '.join(sorted(values))}")
    return {kind: found[kind] for kind in COLORS if kind in found}


def table(folders: Iterable[Path]) -> str:
    """Markdown: mean (least .. most) over the seeds, in nats per token."""
    runs = finished(folders)
    lines = [
        f"| attention | parameters | seeds | {' | '.join(MEASURED.values())} |",
        "|---|---|---|" + "---|" * len(MEASURED),
    ]
    for kind, kind_runs in runs.items():
        results = [result for result, _ in kind_runs]
        cells = [_spread([float(result[name]) for result in results]) for name in MEASURED]
        seeds = ", ".join(sorted(result["seed"] for result in results))
        lines.append(f"| {kind} | {int(results[0]['parameters']):,} | {seeds} | {' | '.join(cells)} |")
    first = next(iter(runs.values()))[0][0]
    length = int(first["length"])
    ngram = {"validation": first["ngram_validation"], "test": first["ngram_test"]}
    counted = [f"{float(ngram[name]):.4f}" if name in ngram else "" for name in MEASURED]
    lines.append(f"| n-gram, order {first['ngram_order']} | | | {' | '.join(counted)} |")
    lines += [
        "",
        f"Nats per token, mean (least .. most) over the seeds, after {first['steps']} steps on windows of {length} tokens. "
        f"Validation and test: every held-out chorale cut into windows of {length}, every token counted. 2x: windows of "
        f"{2 * length}. Beyond: of these, the tokens after the first {length}. The same, cut: these tokens, in windows "
        f"of {length} that begin with them.",
    ]
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.4f}"
    return f"{statistics.fmean(values):.4f} ({min(values):.4f} .. {max(values):.4f})"


def draw_summary(folders: Iterable[Path], path: Path) -> None:
    """Validation losses of all runs: lines are means over the seeds, bands reach from the least to the most.

    Each panel says which kind ends lowest, and by how much.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = finished(folders)
    length = int(next(iter(runs.values()))[0][0]["length"])
    panels = {"validation": f"{length} tokens, as in training", "validation_twice": f"{2 * length} tokens, twice as long"}
    with plt.rc_context({"font.size": FONT, "text.color": INK}):
        figure, both = plt.subplots(1, 2, figsize=(WIDTH, 3.6), sharey=True)
        for axes, (column, where) in zip(both, panels.items(), strict=True):
            ends = {}
            for kind, kind_runs in runs.items():
                curves = [curve(rows, column) for _, rows in kind_runs]
                steps, losses = curves[0][0], list(zip(*(losses for _, losses in curves), strict=True))
                means = [statistics.fmean(values) for values in losses]
                axes.plot(steps, means, color=COLORS[kind], linewidth=1.8)
                axes.fill_between(steps, [*map(min, losses)], [*map(max, losses)], color=COLORS[kind], alpha=0.2, linewidth=0)
                ends[kind] = means[-1]
                _name(axes, f"{kind} {means[-1]:.2f}", (steps[-1], means[-1]), COLORS[kind])
            first, _ = next(iter(runs.values()))[0]
            if column == "validation":
                ngram = float(first["ngram_validation"])
                axes.plot([0, int(first["steps"])], [ngram] * 2, color=MUTED, linestyle=":", linewidth=1.4)
                _name(axes, f"n-gram {ngram:.2f}", (int(first["steps"]), ngram), MUTED)
            order = sorted(ends, key=ends.__getitem__)
            below = [f": {round(ends[second], 2) - round(ends[order[0]], 2):.2f} below {second}" for second in order[1:2]]
            _style(axes, "".join((order[0].capitalize(), *below)), f"windows of {where}")
            axes.set_xlim(0, steps[-1])
        seeds = max(map(len, runs.values()))
        both[0].set_ylabel(f"validation loss\n(nats per token, {seeds} seeds)", color=MUTED)
        both[1].set_ylabel("")
        figure.tight_layout(w_pad=1.5)
        figure.savefig(path, dpi=DPI, facecolor="white")
        plt.close(figure)


def _name(axes: Any, text: str, end: tuple[int, float], color: str) -> None:
    """Write a line's name after its end."""
    axes.annotate(text, end, (8, 0), textcoords="offset points", va="center", color=color, fontsize=SMALL)


def difference(first: Path, second: Path) -> str:
    """Markdown: the largest differences of the losses of two runs, over a quarter, a half and all of the steps."""
    rows = list(zip(*(read_csv(folder / CURVE) for folder in (first, second)), strict=False))
    columns = ("train", "validation", "validation_twice")
    lines = [f"| steps | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for steps in (len(rows) // 4, len(rows) // 2, len(rows)):
        cells = []
        for column in columns:
            differences = [abs(float(a[column]) - float(b[column])) for a, b in rows[:steps] if a[column] and b[column]]
            cells.append(f"{max(differences):.1e}" if differences else "")
        lines.append(f"| 1 .. {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def perplexity(loss: float) -> str:
    return f"{loss:.4f} nats per token (perplexity {math.exp(loss):.3f})"

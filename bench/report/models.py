"""Models: tables and the figure of rows of ``bench models``, ours beside the stock models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from ..cases.methods import OURS
from .figures import INK, MUTED, SMALL, STYLES, WIDTH, Row, caption, new_figure
from .rows import pivot
from .summary import DIRECTIONS
from .text import digits, markdown_table

NAMES = {
    "wav2vec2_bert": "Wav2Vec2-BERT",
    "wav2vec2_bert_relative": "Wav2Vec2-BERT, relative",
    "wav2vec2_conformer": "Wav2Vec2-Conformer",
    "seamless_m4t": "Seamless M4T",
    "seamless_m4t_v2": "Seamless M4T v2",
    "parakeet": "Parakeet",
    "parakeet_attention": "Parakeet, attention",
    "fastspeech2_conformer": "FastSpeech2Conformer",
    "nemotron_asr_streaming": "Nemotron ASR streaming",
    "vits": "VITS",
    "wavlm": "WavLM",
    "wavlm_stable": "WavLM, stable norm",
    "sew_d": "SEW-D",
    "speecht5": "SpeechT5",
    "granite_speech": "Granite Speech",
    "granite_speech_plus": "Granite Speech Plus",
    "granite_speech5": "Granite Speech 5",
    "gemma4": "Gemma 4, audio",
    "gemma3n": "Gemma 3n, audio",
    "phi4_multimodal": "Phi-4 multimodal",
    "t5": "T5",
    "mt5": "mT5",
    "umt5": "UMT5",
    "switch_transformers": "Switch Transformers",
    "pop2piano": "Pop2Piano",
    "pix2struct": "Pix2Struct",
    "longt5": "LongT5",
    "mpnet": "MPNet",
    "deberta": "DeBERTa",
    "deberta_v2": "DeBERTa v2, v3",
    "bloom": "BLOOM",
    "mpt": "MPT",
    "falcon": "Falcon with ALiBi",
    "inkling": "Inkling",
    "inkling2": "Inkling 2",
    "inkling2_loop": "Inkling 2 Loop",
    "sam": "SAM",
    "sam_hq": "SAM-HQ",
    "vitdet": "ViTDet",
    "seggpt": "SegGPT",
    "got_ocr2": "GOT-OCR2",
    "deepseek_ocr2": "DeepSeek-OCR2",
    "unlimited_ocr": "Unlimited-OCR",
    "slanext": "SLANeXt",
    "pp_formulanet": "PP-FormulaNet",
}
"""Names of the models of each family."""
PACKED = "packed"
"""The method that leaves padding out."""
GAIN = 1.05
"""A ratio from which on a figure shows a gain."""
Ratios = dict[str, float]


def family_title(case: str) -> str:
    return NAMES.get(case, case)


def singles(rows: Sequence[Row]) -> list[Row]:
    """Rows of one sequence."""
    return [row for row in rows if str(row["batch"]) == "1" and not row.get("real")]


def single_lengths(rows: Sequence[Row]) -> list[int]:
    """The lengths at which single sequences were measured, the shortest first."""
    return sorted({int(row["seqlen"]) for row in singles(rows) if row["status"] == "ok"})


def values(rows: Sequence[Row], column: str) -> dict[tuple[str, ...], dict[str, float]]:
    """By family and length, and then method, a column of what was measured, forward and backward of one sequence."""
    alike = (row for row in singles(rows) if (row["direction"], row["status"]) == (DIRECTIONS[1], "ok"))
    return pivot(alike, ["case", "seqlen"], column)


def over_ours(rows: Sequence[Row], length: int, column: str) -> Ratios:
    """By family, time or memory of the best stock method over ours."""
    found: Ratios = {}
    for (case, at), by_method in values(rows, column).items():
        ours, best = by_method.pop(OURS, 0.0), min(by_method.values(), default=0.0)
        if at == str(length) and ours > 0 and best > 0:  # a peak above the inputs may be 0
            found[case] = best / ours
    return found


def tables(rows: Sequence[Row], shown: Sequence[str] | None = None) -> str:
    """Single sequences and batches, as Markdown; means are over all families, lines of those that are shown, by default all."""
    padded = [row for row in rows if not row.get("real")]
    batches = [row for row in padded if row["batch"] and str(row["batch"]) != "1"]
    parts = [*single(padded, shown)] * bool(single_lengths(padded)) + [ratios(batches, shown)] * bool(batches)
    if packed := [row for row in rows if row.get("real")]:
        parts.append(sentences(packed))
    return "\n\n".join(parts) + "\n"


def sentences(rows: Sequence[Row]) -> str:
    """Times of batches by their share of real tokens, and how many times as long as packed the fastest stock method takes."""
    groups = pivot(rows, ["case", "seqlen", "batch", "real", "direction"], "p50_ms")
    methods = list(dict.fromkeys(row["method"] for row in rows if any(row["method"] in found for found in groups.values())))
    body = []
    for (case, length, batch, real, direction), found in groups.items():
        stock = [found[method] for method in found if method not in (OURS, PACKED)]
        gain = f"{min(stock) / found[PACKED]:.2f}" if stock and PACKED in found else "-"
        times = (f"{found[method]:,.0f}" if method in found else "-" for method in methods)
        body.append([family_title(case), f"{batch} x {length}", f"{float(real):.2f}", direction, *times, gain])
    return markdown_table(["sentences, ms", "batch", "real", "", *methods, "stock / packed"], body)


def single(rows: Sequence[Row], shown: Sequence[str] | None = None) -> list[str]:
    """Three tables: the speed-up at each length, and time and memory at the longest one of each family."""
    lengths = single_lengths(rows)
    ups = {length: over_ours(rows, length, "p50_ms") for length in lengths}
    cases = [case for case in dict.fromkeys(row["case"] for row in rows) if shown is None or case in shown]
    body = [[family_title(case), *(f"{ups[n][case]:.2f}" if case in ups[n] else "-" for n in lengths)] for case in cases]
    if len(cases) > 1 and all(ups.values()):
        body.append(["geometric mean of all", *(f"{geometric_mean(ups[n].values()):.2f} (of {len(ups[n])})" for n in lengths)])
    parts = [markdown_table(["stock time / ours, by length", *(f"{n:,}" for n in lengths)], body)]
    methods = list(dict.fromkeys(row["method"] for row in singles(rows)))
    for column, unit, scale in (("p50_ms", "time, s", 1e3), ("peak_bytes", "memory, MiB", 2**20)):
        by_length = sorted(values(rows, column).items(), key=lambda item: int(item[0][1]))
        last = {case: (int(at), found) for (case, at), found in by_length if OURS in found}
        body = [
            [
                family_title(case),
                f"{last[case][0]:,}",
                *(digits(found[name] / scale) if name in found else "-" for name in methods),
            ]
            for case in cases
            if case in last and (found := last[case][1])
        ]
        if body:
            parts.append(markdown_table([unit, "length", *methods], body))
    return parts


def ratios(rows: Sequence[Row], shown: Sequence[str] | None = None) -> str:
    """How many times as long as ours a stock model takes, a table for each direction, with means over all models."""
    sizes = list(dict.fromkeys((str(row["seqlen"]), str(row["batch"])) for row in rows))
    pairs = list(dict.fromkeys((row["case"], row["method"]) for row in rows if row["method"] != OURS))
    times, parts = pivot(rows, ["direction", "case", "seqlen", "batch"], "p50_ms"), []
    for direction in DIRECTIONS:
        found: dict[tuple[str, str], dict[tuple[str, str], float]] = {}
        for case, method in pairs:
            for size in sizes:
                by_method = times.get((direction, case, *size), {})
                if OURS in by_method and method in by_method:
                    found.setdefault((case, method), {})[size] = by_method[method] / by_method[OURS]
        body = [
            [family_title(case), method, *(f"{by_size[size]:.2f}" if size in by_size else "-" for size in sizes)]
            for (case, method), by_size in found.items()
            if shown is None or case in shown
        ]
        if body:
            columns = ([by_size[size] for by_size in found.values() if size in by_size] for size in sizes)
            body.append(["geometric mean", "", *(f"{geometric_mean(column):.2f}" if column else "-" for column in columns)])
            parts.append(markdown_table([direction, "stock", *(f"{length} x {batch}" for length, batch in sizes)], body))
    return "\n\n".join([*parts, "Time of the stock model over ours, medians."])


def draw_sentences(rows: Sequence[Row], path: Path) -> None:
    """How many times as fast as the fastest stock method packed encoders are, by the share of real tokens, a panel each way."""
    groups = pivot(rows, ["direction", "case", "batch", "real"], "p50_ms")
    lines: dict[str, dict[str, list[tuple[float, float]]]] = {direction: {} for direction in DIRECTIONS}
    for (direction, case, batch, real), found in groups.items():
        stock = [found[method] for method in found if method not in (OURS, PACKED)]
        if stock and PACKED in found:
            line = lines[direction].setdefault(f"{family_title(case)}, {batch} sentences", [])
            line.append((float(real), min(stock) / found[PACKED]))
    what = "One layer of real width; lengths of sentences are lognormal, padded to the longest; the fastest stock way."
    below = caption(rows, what)
    with new_figure(path, below) as figure:
        figure.set_size_inches(WIDTH, 4.2)
        panels = figure.subplots(1, len(DIRECTIONS), sharey=True)
        figure.subplots_adjust(left=0.08, right=0.98, top=0.9, bottom=0.27, wspace=0.08)
        looks = [STYLES[name] for name in (OURS, "shaw_gather", "gather", "skewing", "flex_attention", "dense_bias")]
        for axes, (direction, by_name) in zip(panels, lines.items(), strict=True):
            for (name, values), look in zip(by_name.items(), looks * len(by_name), strict=False):
                axes.plot(*zip(*sorted(values), strict=True), label=name, **(look | {"linewidth": 1.8, "markersize": 6}))
            shares = sorted({share for values in by_name.values() for share, _ in values})
            axes.plot(shares, [1 / share for share in shares], color=MUTED, linestyle=":", linewidth=1, label="1 / share")
            axes.axhline(1, color=MUTED, linewidth=0.8)
            axes.set_title(direction, loc="left", fontsize=10.5, color=INK)
            axes.set_xlabel("share of real tokens", color=INK)
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
        panels[0].set_ylabel("times as fast as stock", color=INK)
        panels[-1].legend(frameon=False, fontsize=SMALL)


COMPARISONS = {"p50_ms": ("time", "as long"), "peak_bytes": ("memory", "as much")}
NAMES_WIDE, BARS_WIDE, COLUMN, ROW, TITLE = 1.75, 1.6, 4.0, 0.19, 0.62  # inches


def draw(rows: Sequence[Row], path: Path) -> None:
    """Time and memory of the best stock method over ours: a bar per family, the largest gain first.

    On the left at the longest length of each family, on the right at the shortest of all. Of a single family, all lengths.
    """
    lengths, is_one = single_lengths(rows), len({row["case"] for row in rows}) == 1

    def panels(lengths: Sequence[int], *columns: str) -> list[tuple[Ratios, Sequence[int], str]]:
        """What there is of the columns: by name, the ratio at a family's longest length, or at each length of a single one."""
        found: dict[str, Ratios] = {column: {} for column in columns}
        for column, ratios in found.items():
            for length in lengths:
                for case, ratio in over_ours(rows, length, column).items():
                    ratios[family_title(case) + f", {length:,}" * is_one] = ratio
        return [(ratios, lengths, column) for column, ratios in found.items() if ratios]

    longer = lengths if is_one else lengths[1:] or lengths
    columns = [panels(longer, "p50_ms", "peak_bytes"), *[panels(lengths[:1], "p50_ms")] * (longer != lengths)]
    layers = f"{rows[0]['layers']} layer{'s' * (str(rows[0]['layers']) != '1')} of real width"
    what = (
        f"Forward + backward, {layers}, one sequence; the best stock way; titles: geometric means. Grey: no gain (below {GAIN})."
    )
    below = caption(rows, what)
    height = max(sum(ROW * len(found) + TITLE for found, *_ in column) for column in columns)
    height += 0.15 * len(below.splitlines()) + 0.2
    with new_figure(path, below) as figure:
        figure.set_size_inches(WIDTH, height)
        for number, column in enumerate(columns):
            bottom, start = height, COLUMN * number + NAMES_WIDE
            for found, compared_lengths, measured in column:
                tall = ROW * len(found)
                bottom -= TITLE + tall
                axes = figure.add_axes((start / WIDTH, bottom / height, BARS_WIDE / WIDTH, tall / height))
                draw_bars(axes, found, compared_lengths, *COMPARISONS[measured], is_one)


def draw_bars(axes: Any, found: Ratios, lengths: Sequence[int], what: str, comparison: str, is_one: bool) -> None:
    """A panel: names, bars that begin at 1, and the ratio at the end of each row; is_one: the rows are of one family."""
    ordered, mean = sorted(found.items(), key=lambda item: -item[1]), geometric_mean(found.values())
    for row, (_, ratio) in enumerate(ordered):
        gains = ratio >= GAIN
        axes.barh(row, ratio - 1, left=1, height=0.62, color=STYLES[OURS]["color"] if gains else "#aab4be")
        at_the_end = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "ha": "right"}
        look = {"fontsize": SMALL, "color": INK if gains else MUTED}
        axes.annotate(f"{ratio:.2f}" if ratio < 10 else f"{ratio:.1f}", (1, row), (30, 0), **at_the_end, **look)
    axes.set_yticks(range(len(ordered)), [name for name, _ in ordered], fontsize=SMALL)
    axes.set_ylim(len(ordered) - 0.4, -0.6)
    axes.set_xscale("log")
    most = max(4.0, *found.values())
    axes.set_xlim(min(most**-0.2, *found.values()), most)
    axes.set_xticks([])
    axes.minorticks_off()
    axes.axvline(1, color=MUTED, linewidth=0.8)
    axes.tick_params(colors=INK, length=0, pad=5)
    axes.spines[:].set_visible(False)
    shown = {"xycoords": "axes fraction", "textcoords": "offset points"}
    ends = dict.fromkeys((lengths[0], lengths[-1]))
    tokens = f"{(' to ' if len(lengths) > 2 else ' or ').join(f'{length:,}' for length in ends)} tokens"
    title = f"Stock takes {mean:.1f} times {comparison}" if mean >= GAIN else "No gain on average"
    if is_one:
        title = f"Stock takes {ordered[-1][1]:.1f} to {ordered[0][1]:.1f} times {comparison}"
    axes.annotate(title, (0, 1), (-118, 20), fontweight="bold", **shown)
    axes.annotate(f"{what}, stock / ours, at {tokens}", (0, 1), (-118, 6), fontsize=SMALL, color=MUTED, **shown)

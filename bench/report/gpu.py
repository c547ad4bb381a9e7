"""Tables and sentences for pages, from the rows of a GPU in bench/results/h100."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from ..cases.methods import OURS
from . import longest, summary
from .figures import BEST_DENSE, lines
from .rows import ROOT, is_stalled, number, read
from .summary import DENSE, DIRECTIONS
from .text import digits, markdown_table, short_bytes, spread

Row = dict[str, Any]
Rows = dict[tuple[str, str, str], Row]
"""By case, method and direction."""
RESULTS = ROOT / "bench" / "results" / "h100"
BOTH = DIRECTIONS[1]
FLASH, CUDNN, FLEX = "sdpa_flash", "sdpa_cudnn", "flex_attention"
SDPA_BIAS = ("sdpa_bias_efficient", "sdpa_bias_cudnn")
REPEATED = 1.1
"""A call's time repeated if those of two runs differ by no more than this factor."""
SHOWN = (
    ("16 x 1,024 tokens, full table", "dense", "b16 h32 n1024 d64 full bf16"),
    ("2 x 4,096 tokens, full table", "dense", "b2 h32 n4096 d64 full bf16"),
    ("4 x 4,096 tokens, 129 vectors", "", "b4 h32 n4096 d64 r129 bf16"),
    ("8 x 2,048 tokens, a bias", "", "b8 h32 n2048 d64 full bias bf16"),
)
"""README's calls: what they are called there, and the group and case of their rows."""
HOUR, DEBERTA = "b1 h16 n16384 d128 full bf16", "b2 h12 n8192 d64 r1047 p2c bf16"
PUBLISHED = (8.48, 45.26)
"""Forward and backward in ms. DisentangledFlash 1.1.1, its README on the package index: an H200, bfloat16, 12 heads of 64, 16,384
tokens in sequences of 8,192, its untuned kernels, torch 2.14 and Triton 3.8."""


@functools.cache
def load(run: str = "measure") -> list[Row]:
    """The rows of a run."""
    return list(read(RESULTS / run / "results.csv"))


@functools.cache
def load_times(group: str | None = None, run: str = "measure") -> Rows:
    """Times of whole calls in a run, of one group or of all."""
    rows = (row for row in load(run) if row["verb"] == "speed" and row["p50_ms"] and group in (None, row["group"]))
    return {(row["case"], row["method"], row["direction"]): row for row in rows}


def cases(rows: Rows, **columns: str) -> list[str]:
    """Those of the given columns, short ones first."""
    lengths = {key[0]: int(row["seqlen"]) for key, row in rows.items() if columns.items() <= row.items()}
    return sorted(lengths, key=lengths.__getitem__)


def machine() -> str:
    """Where the rows come from."""
    row = load()[0]
    driver = json.loads((RESULTS / "measure" / "environment.json").read_text())["driver"]
    versions = f"driver {driver}, torch {row['torch'].split('+')[0]}, Triton {row['triton']}"
    return f"an {row['device']} ({versions}), commit {row['commit'][:8]}"


def ratio(row: Row, other: Row) -> float:
    return number(row, "p50_ms") / number(other, "p50_ms")


def ratios(rows: Rows, method: str, other: str, direction: str, chosen: Sequence[str] = ()) -> list[float]:
    """How many times as long as the other method one takes, in the chosen cases or in all."""
    return [ratio(rows[case, method, direction], rows[case, other, direction]) for case in chosen or cases(rows)]


def time(row: Row) -> str:
    """A time and its mark: † if it is a 20th percentile, ‡ if that of a second run was another one."""
    again = load_times(run="again").get((row["case"], row["method"], row["direction"]))
    differs = again is not None and max(ratio(row, again), ratio(again, row)) > REPEATED
    return digits(number(row, "p50_ms")) + " †" * is_stalled(row) + " ‡" * differs


def fastest(rows: Rows, case: str, direction: str, methods: Sequence[str]) -> Row:
    found = [rows[case, name, direction] for name in methods if (case, name, direction) in rows]
    return min(found, key=lambda row: number(row, "p50_ms"))


def describe(row: Row) -> str:
    """A call in words: 4 x 4,096, 32 heads of 64, 129 rows, causal."""
    sizes = f"{row['batch']} x {int(row['seqlen']):,}, {row['heads']} heads of {row['head_dim']}"
    return f"{sizes}, {summary.describe_table(row)}" + ", causal" * (row["is_causal"] == "True")


def beside_sdpa(rows: Rows, case: str, direction: str) -> str:
    """Our time, and in brackets how many times those of FlashAttention and cuDNN it is."""
    others = (ratios(rows, OURS, method, direction, [case])[0] for method in (FLASH, CUDNN))
    return f"{time(rows[case, OURS, direction])} ({', '.join(f'{other:.1f}' for other in others)})"


def shown() -> list[tuple[str, dict[str, Row]]]:
    """README's calls: ours, the best other methods timed beside it, and SDPA without positions where the call was timed alone."""
    found = []
    for name, group, case in SHOWN:
        rows, alone = load_times(group), load_times()
        row = {"ours": rows[case, OURS, BOTH]}
        if (case, FLEX, BOTH) in rows:
            row["FlexAttention"] = rows[case, FLEX, BOTH]
        else:
            row["dense"] = fastest(rows, case, BOTH, DENSE)
        if (case, FLASH, BOTH) in alone:
            row["SDPA"] = alone[case, FLASH, BOTH]
        found.append((name, row))
    return found


def first() -> str:
    """README's table."""
    columns = ("ours", "FlexAttention", "dense", "SDPA")
    body = []
    for name, found in shown():
        cells = [f"{number(found[column], 'p50_ms'):.1f}" if column in found else "-" for column in columns]
        body.append([name, f"**{cells[0]}**", *cells[1:]])
    conditions = (
        f"Forward + backward on {machine()}: bfloat16, 32 heads of 64. Full table: a learned vector per distance. Compiled "
        "FlexAttention or the fastest of four eager dense ways ran beside ours, SDPA (FlashAttention-2, no positions) in another "
        "run. "
        "[All figures](docs/benchmarks.md)."
    )
    return f"{markdown_table(['ms', *columns], body)}\n\n{conditions}"


def gains() -> tuple[str, ...]:
    """What the table means for three kinds of models."""
    flex = ratio(*(dict(shown())[SHOWN[-1][0]][column] for column in ("FlexAttention", "ours")))
    forward, backward = (number(load_times("deberta")[DEBERTA, OURS, way], "p50_ms") for way in ("forward", "backward"))
    hours = [f"{seconds_per_hour(way):.1f} s" for way in DIRECTIONS]
    card = longest.CARDS[0]
    stock, enabled = (longest.longest(longest.ENCODERS[0], "inference", is_ours, card) / 60 for is_ours in (False, True))
    return (
        f"**Long audio** ([computed](docs/long-audio.md#how-long-can-the-audio-be)): stock Conformer-L in NeMo fits {stock:.0f} "
        f"minutes on {card} GB (float32 inference), an enabled one {enabled:.0f}. On an H100 in bfloat16 the attention of "
        f"{longest.ENCODERS[1].layers} FastConformer layers takes {hours[0]} for an hour of audio, {hours[1]} with the backward.",
        f"**T5**: with a bias per head and distance FlexAttention takes {flex:.1f} times as long as ours. T5's own, clamped at "
        "128, was not timed.",
        f"**DeBERTa**, 2 x 8,192 tokens, 12 heads of 64: {forward:.2f} ms forward, {backward:.2f} backward, if buckets saturate "
        f"at distance 512, as in v3. DisentangledFlash 1.1.1 [publishes](docs/benchmarks.md#deberta) "
        f"{' and '.join(map(str, PUBLISHED))} on an H200.",
    )


def of_medians(rows: Rows, case: str) -> float:
    """How many times SDPA's median forward + backward takes ours, stalls included."""
    return float(rows[case, OURS, BOTH]["p50_ms"]) / float(rows[case, FLASH, BOTH]["p50_ms"])


def seconds_per_hour(direction: str) -> float:
    """Seconds of the attention of FastConformer-XL's layers on an hour of audio, from a call of 16,384 tokens."""
    encoder, row = longest.ENCODERS[1], load_times("long")[HOUR, OURS, direction]
    frames = 3600 / (longest.HOP * encoder.factor)
    pairs = encoder.heads / int(row["heads"]) * (frames / int(row["seqlen"])) ** 2
    return encoder.layers * pairs * number(row, "p50_ms") / 1e3


def hour() -> str:
    """How long the attention of an hour of audio takes."""
    row, encoder = load_times("long")[HOUR, OURS, BOTH], longest.ENCODERS[1]
    layer = [f"{1e3 * seconds_per_hour(way) / encoder.layers:.0f} ms" for way in DIRECTIONS]
    model = [f"{seconds_per_hour(way):.1f} s" for way in DIRECTIONS]
    name, heads = encoder.name.partition(",")[0], f"{encoder.heads} heads of {encoder.width // encoder.heads}"
    return (
        f"How long it takes, on an H100 in bfloat16: the attention of a layer on an hour of audio ({name}, {heads}) {layer[0]} "
        f"forward and {layer[1]} with the backward, that of its {encoder.layers} layers {model[0]} and {model[1]}. This is "
        f"computed from a measured call of {int(row['seqlen']):,} tokens, since time grows with the square of the length."
    )


def costs() -> tuple[str, ...]:
    """README's caveats: what the term costs, and where it does not pay."""
    rows, speech, deberta = load_times("long"), load_times("speech"), load_times("deberta")
    full = {is_causal: cases(rows, head_dim="64", table="full", is_causal=is_causal) for is_causal in ("False", "True")}
    forward, both = (spread(ratios(rows, OURS, FLASH, way, full["False"])) for way in DIRECTIONS)
    causal, tables = max(ratios(rows, OURS, FLASH, BOTH, full["True"])), max(ratios(deberta, OURS, FLASH, BOTH))
    medians = [max(of_medians(rows, case) for case in full[is_causal]) for is_causal in ("False", "True")]
    cudnn = spread(ratios(rows, OURS, CUDNN, BOTH, full["False"]))
    short = max(of_medians(speech, case) for case in cases(speech))
    return (
        f"**What the term costs.** With a full table the forward takes {forward} times SDPA's time without positions, forward + "
        f"backward {both} times (causal up to {causal:.1f}, DeBERTa's two tables up to {tables:.1f}; medians, which launches "
        f"stalled, up to {medians[0]:.1f} and {medians[1]:.1f}). cuDNN without positions is faster: ours takes {cudnn} times its "
        "time.",
        f"**Where it does not pay.** Below 512 tokens launches dominate: up to {short:.0f} times SDPA's time at 200 tokens. The "
        "CPU overhead of a call is a quarter of that now (not timed on a GPU), hardly any in a [CUDA "
        "graph](docs/torch.md#short-sequences-on-a-gpu).",
        "**Memory.** The forward forms nothing of size N x N. The backward's workspace is quadratic up to a cap of 256 MiB, "
        f"which grows linearly from there (512 MiB at 16,384 tokens). {memory_sentence()}",
    )


def peaks() -> list[Row]:
    """Rows of peak memory with a row of the table per distance."""
    return [row for row in load() if row["verb"] == "memory" and row["table"] == "full"]


def memory_sentence() -> str:
    """Peaks of ours and of the leanest dense method, at the longest length that both have."""
    points = lines(peaks(), BOTH, "peak_bytes", (OURS, BEST_DENSE))
    length, dense = points[BEST_DENSE][-1]
    ours = dict(points[OURS])[length]
    return (
        f"With {length:,} tokens and 8 heads, forward + backward peaks at {short_bytes(ours)} above the inputs, dense PyTorch at "
        f"{short_bytes(dense)}."
    )


def speed() -> str:
    """Every length and kind of call, beside attention without positions, and short calls without launch overhead."""
    rows = load_times("long")
    parts = []
    for width in ("64", "128"):
        for is_causal in ("False", "True"):
            columns = {"head_dim": width, "is_causal": is_causal}
            body = []
            for pair in zip(cases(rows, table="full", **columns), cases(rows, table="clamp 129", **columns), strict=True):
                row = rows[pair[0], OURS, "forward"]
                size = f"{row['batch']} x {int(row['seqlen']):,}"
                body.append([size, *(beside_sdpa(rows, case, way) for case in pair for way in DIRECTIONS)])
            head = f"{row['heads']} heads of {width}{', causal' * (is_causal == 'True')}"
            kinds = [f"{table}: {way}" for table in ("full table", "129 rows") for way in DIRECTIONS]
            parts.append(markdown_table([head, *kinds], body))
    body = []
    for group, name in (("speech", "speech"), ("t5", "T5, unclamped"), ("deberta", "DeBERTa")):
        rows = load_times(group)
        for case in cases(rows):
            label = f"{name}: {describe(rows[case, OURS, 'forward'])}"
            body.append([label, *(beside_sdpa(rows, case, way) for way in DIRECTIONS)])
    parts.append(markdown_table(["sequences x tokens", *DIRECTIONS], body))
    checks, calls = read(RESULTS / "measure" / "checks.csv"), load_times("speech")
    graphs = sorted((row for row in checks if row["part"] == "graphs" and row["value"]), key=lambda row: float(row["value"]))
    found = [f"{digits(float(row['value']))} ms ({describe(calls[row['case'], OURS, row['direction']])})" for row in graphs]
    graph = f"As a CUDA graph, without launch overhead, forward + backward takes {', '.join(found)}."
    return "\n\n".join([*parts, f"Measured on {machine()}.", graph])


def beside(rows: Rows, methods: Sequence[str]) -> str:
    """Ours beside other methods, a line per call and direction; ratios are to the fastest of them."""
    present = [OURS, *(name for name in methods if any(key[1] == name for key in rows))]
    body = []
    for case in cases(rows):
        for direction in DIRECTIONS:
            ours, best = rows[case, OURS, direction], fastest(rows, case, direction, methods)
            cells = [time(rows[key]) if (key := (case, name, direction)) in rows else "-" for name in present]
            body.append([f"{describe(ours)}: {direction}", *cells, f"{ratio(best, ours):.1f}"])
    return markdown_table(["ms", *present, "ratio"], body)


def baselines() -> str:
    """Ours beside what people write today, and beside FlexAttention."""
    rows = load_times("dense")
    bias = {key: row for key, row in rows.items() if row["table"].endswith("bias")}
    vectors = {key: row for key, row in rows.items() if key not in bias}
    parts = [beside(vectors, DENSE), beside(bias, SDPA_BIAS), beside(load_times(""), [FLEX])]
    return "\n\n".join([*parts, f"Measured on {machine()}."])


def deberta() -> str:
    """Ours beside what another package publishes."""
    rows = load_times("deberta")
    forward, backward = (number(rows[DEBERTA, OURS, way], "p50_ms") for way in ("forward", "backward"))
    return (
        f"With both tables, 2 x 8,192 tokens and 12 heads of 64, ours takes {forward:.2f} ms forward and {backward:.2f} ms "
        "backward here, with 1,047 rows: DeBERTa v3's buckets tell distances up to 523 apart. DisentangledFlash 1.1.1 publishes "
        f"{PUBLISHED[0]} and {PUBLISHED[1]} ms: on an H200, in bfloat16, with its untuned kernels, torch 2.14 and Triton 3.8. "
        "The two were not timed side by side."
    )


def memory() -> str:
    """Peaks against the length."""
    table = summary.markdown(peaks()).strip().replace("| plain |", "| ours without a table |")
    return f"{table}\n\nMeasured on {machine()}."

"""Tables and sentences for pages, from the rows of a GPU in bench/results/h100."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..cases.methods import OURS
from . import summary
from .rows import ROOT, read
from .summary import DENSE, DIRECTIONS
from .text import digits, markdown_table

Row = dict[str, Any]
Rows = dict[tuple[str, str, str], Row]
"""By case, method and direction."""
RESULTS = ROOT / "bench" / "results" / "h100"
EARLIER = "d09a3ce6"
"""The commit of the rows in the folder "before", which bear the name of the checkout that measured them."""
FLASH, CUDNN, FLEX = "sdpa_flash", "sdpa_cudnn", "flex_attention"
SDPA_BIAS = ("sdpa_bias_efficient", "sdpa_bias_cudnn")
HELD_UP = 1.1
"""The median by the fastest fifth of the rounds, from which on the host held the GPU up in most of them."""
GAIN = 1.05
"""A ratio of two medians that is more than chance."""
SHOWN = ("1024", "4096", "16384")
"""Lengths in README."""


def timed(group: str | None = None, run: str = "measure") -> Rows:
    """Times of whole calls that a run has, of one group or of all."""
    rows = [row for row in read(RESULTS / run / "results.csv") if row["verb"] == "speed" and row["p50_ms"]]
    return {(row["case"], row["method"], row["direction"]): row for row in rows if group in (None, row["group"])}


def cases(rows: Rows, **columns: str) -> list[str]:
    """Those of the given columns, short ones first."""
    lengths = {key[0]: int(row["seqlen"]) for key, row in rows.items() if columns.items() <= row.items()}
    return sorted(lengths, key=lengths.__getitem__)


def machine() -> str:
    """Where the rows come from."""
    row = read(RESULTS / "measure" / "results.csv")[0]
    driver = json.loads((RESULTS / "measure" / "environment.json").read_text())["driver"]
    versions = f"driver {driver}, torch {row['torch'].split('+')[0]}, Triton {row['triton']}"
    return f"an {row['device']} ({versions}), commit {commit()}"


def commit() -> str:
    return str(read(RESULTS / "measure" / "results.csv")[0]["commit"])[: len(EARLIER)]


def is_held_up(row: Row) -> bool:
    """Whether the median is the host's: queueing takes longer than its head start, and a fifth of the rounds is faster."""
    return row["waits_for_host"] == "yes" and bool(row["p20_ms"]) and over(row, row, of="p20_ms") > HELD_UP


def median(row: Row, unit: str = "") -> str:
    return digits(float(row["p50_ms"])) + unit + " †" * is_held_up(row)


def over(row: Row, other: Row, column: str = "p50_ms", of: str = "") -> float:
    """The ratio of two rows in a column, or of one's column and another one of the other's."""
    return float(row[column]) / float(other[of or column])


def spread(ratios: Iterable[float]) -> str:
    """The smallest and the largest, one if they are the same."""
    found = sorted(ratios)
    return " to ".join(dict.fromkeys(f"{each:.1f}" for each in (found[0], found[-1])))


def fastest(rows: Rows, case: str, direction: str, methods: Sequence[str]) -> Row:
    found = [rows[case, name, direction] for name in methods if (case, name, direction) in rows]
    return min(found, key=lambda row: float(row["p50_ms"]))


def table_of(row: Row) -> str:
    """What a call adds to the scores, in words."""
    rows = row["table"].removesuffix(" p2c").removesuffix(" bias").removeprefix("clamp ")
    if row["table"].endswith("bias"):
        return "a bias"
    if row["table"].endswith("p2c"):
        return "two full tables" if rows == "full" else f"two tables of {int(rows):,} rows"
    return "full table" if rows == "full" else f"{rows} rows"


def call_of(row: Row) -> str:
    """A call in words: 4 x 4,096, 32 heads of 64, 129 rows, causal."""
    sizes = f"{row['batch']} x {int(row['seqlen']):,}, {row['heads']} heads of {row['head_dim']}, {table_of(row)}"
    return sizes + ", causal" * (row["is_causal"] == "True")


def beside_sdpa(rows: Rows, case: str, direction: str) -> str:
    """Our time, and in brackets how many times those of FlashAttention and cuDNN it is."""
    ours = rows[case, OURS, direction]
    ratios = ", ".join(f"{over(ours, rows[case, method, direction]):.1f}" for method in (FLASH, CUDNN))
    return f"{median(ours)} ({ratios})"


def first() -> str:
    """README's table and paragraph."""
    rows = timed("long")
    shown = [
        case
        for case in cases(rows, head_dim="64", table="full", is_causal="False")
        if rows[case, OURS, "forward"]["seqlen"] in SHOWN
    ]
    body, fifths = [], []
    for case in shown:
        row, cells = rows[case, OURS, "forward"], []
        for direction in DIRECTIONS:
            ours = rows[case, OURS, direction]
            cells += [median(ours, " ms"), f"{over(ours, rows[case, FLASH, direction]):.1f}"]
            fifths += [f"{digits(float(ours['p20_ms']))} ms"] * is_held_up(ours)
        body.append([f"{row['batch']} x {int(row['seqlen']):,} tokens", *cells])
    cudnn = [spread(over(rows[case, OURS, each], rows[case, CUDNN, each]) for case in shown) for each in DIRECTIONS]
    what = [
        f"Measured on {machine()}: bfloat16, 32 heads of 64, a table with a row per distance. ÷ SDPA: how many times as long as "
        "SDPA's FlashAttention takes without positions. "
        f"cuDNN's attention, also without, is faster: ours takes {cudnn[0]} times as long ({cudnn[1]} with the backward).",
        of_dense(),
        of_flex(),
        f"† The host held the GPU up in most rounds; the fastest fifth took at most {', '.join(fifths)}." * bool(fifths),
        "Earlier kernels were faster in some calls: [all figures](docs/benchmarks.md#on-an-h100).",
    ]
    head = ["one attention call on an H100", "forward", "÷ SDPA", "forward + backward", "÷ SDPA"]
    return f"{markdown_table(head, body)}\n\n{' '.join(filter(None, what))}"


def of_dense() -> str:
    """How much faster than the fastest dense method, in the calls where both were timed side by side."""
    rows, found = timed("dense"), []
    for case in cases(rows, head_dim="64", table="full"):
        row = rows[case, OURS, "forward"]
        forward, both = (over(fastest(rows, case, each, DENSE), rows[case, OURS, each]) for each in DIRECTIONS)
        found.append(f"{forward:.1f} times as long ({both:.1f}) with {row['batch']} x {int(row['seqlen']):,} tokens")
    return f"The fastest dense PyTorch takes {' and '.join(found)}."


def of_flex() -> str:
    """How much faster than FlexAttention."""
    rows = timed("")
    forward, both = (spread(over(rows[case, FLEX, each], rows[case, OURS, each]) for case in cases(rows)) for each in DIRECTIONS)
    return f"Compiled FlexAttention takes {forward} times as long ({both}) in {len(cases(rows))} calls."


def speed() -> str:
    """Every length and kind of call, beside attention without positions, and what earlier kernels took."""
    rows = timed("long")
    parts = []
    for width in ("64", "128"):
        for is_causal in ("False", "True"):
            columns = {"head_dim": width, "is_causal": is_causal}
            shown = {table: cases(rows, table=table, **columns) for table in ("full", "clamp 129")}
            body = []
            for pair in zip(*shown.values(), strict=True):
                row = rows[pair[0], OURS, "forward"]
                size = f"{row['batch']} x {int(row['seqlen']):,}"
                body.append([size, *(beside_sdpa(rows, case, each) for case in pair for each in DIRECTIONS)])
            head = f"{row['heads']} heads of {width}{', causal' * (is_causal == 'True')}"
            kinds = [f"{table}: {each}" for table in ("full table", "129 rows") for each in DIRECTIONS]
            parts.append(markdown_table([head, *kinds], body))
    body = []
    for group, name in (("speech", "speech"), ("t5", "T5"), ("deberta", "DeBERTa")):
        rows = timed(group)
        body += [
            [f"{name}: {call_of(rows[case, OURS, 'forward'])}", *(beside_sdpa(rows, case, each) for each in DIRECTIONS)]
            for case in cases(rows)
        ]
    parts.append(markdown_table(["sequences x tokens", *DIRECTIONS], body))
    return "\n\n".join([*parts, f"Measured on {machine()}.", graphs(), earlier()])


def graphs() -> str:
    """Short calls without the host."""
    rows = [row for row in read(RESULTS / "measure" / "checks.csv") if (row["part"], row["status"]) == ("graphs", "ok")]
    shown = timed("speech")
    found = [
        f"{digits(float(row['value']))} ms ({call_of(shown[row['case'], OURS, row['direction']])})"
        for row in sorted(rows, key=lambda row: float(row["value"]))
    ]
    return f"As a CUDA graph, without the host, forward + backward takes {', '.join(found)}."


def earlier() -> str:
    """Calls that earlier kernels computed faster, on the same machine within the hour."""
    before, again, both, body = timed(run="before"), timed(run="again"), DIRECTIONS[1], []
    rows = {key: row for group in ("long", "speech", "t5") for key, row in timed(group).items() if key in before}
    compared = cases(rows)
    for case in compared:
        row, other = rows[case, OURS, both], before[case, OURS, both]
        if over(row, other) > GAIN:
            ratios = [f"{over(row, other, column):.2f}" for column in ("p50_ms", "p20_ms")]
            body.append([call_of(row), digits(float(other["p50_ms"])), median(row), *ratios])
    plain = [key for key in again if key[1] == "plain" and key in before]
    backward = [over(again[key], before[key], "p20_ms") for key in plain if key[2] == "backward"]
    wide = [key for key, row in before.items() if key[1:] == ("plain", "forward") and row["head_dim"] == "128"]
    forward = [over(rows[key], before[key]) for key in wide]
    peaks = [over(again[key], before[key], "peak_bytes") for key in plain if key[2] == both]
    what = (
        f"The kernels of {EARLIER} were faster by more than {100 * (GAIN - 1):.0f} % in {len(body)} of the {len(compared)} calls "
        "that both computed on that machine within the hour. The last two columns have the ratios of the medians and of the "
        "fastest fifths of the rounds, in which the host holds the GPU up least:"
    )
    more = (
        f"Calls without a table lost as well: beside {EARLIER} their backward takes {spread(backward)} times as long (fastest "
        f"fifths), their forward {spread(forward)} times with heads of 128, and their peak is {spread(peaks)} times as high."
    )
    head = ["forward + backward, ms", EARLIER, commit(), "ratio", "of fastest fifths"]
    return f"{what}\n\n{markdown_table(head, body)}\n\n{more}"


def beside(rows: Rows, methods: Sequence[str]) -> str:
    """Ours beside other methods, a line per call and direction; ratios are to the fastest of them."""
    present = [OURS, *(name for name in methods if any(key[1] == name for key in rows))]
    body = []
    for case in cases(rows):
        for direction in DIRECTIONS:
            ours, best = rows[case, OURS, direction], fastest(rows, case, direction, methods)
            cells = [median(rows[key]) if (key := (case, name, direction)) in rows else "-" for name in present]
            body.append([f"{call_of(ours)}: {direction}", *cells, f"{over(best, ours):.1f}"])
    return markdown_table(["ms", *present, "ratio"], body)


def baselines() -> str:
    """Ours beside what people write today, and beside FlexAttention."""
    rows = timed("dense")
    bias = {key: row for key, row in rows.items() if row["table"].endswith("bias")}
    vectors = {key: row for key, row in rows.items() if key not in bias}
    parts = [beside(vectors, DENSE), beside(bias, SDPA_BIAS), beside(timed(""), [FLEX])]
    return "\n\n".join([*parts, f"Measured on {machine()}."])


def memory() -> str:
    """Peaks against the length."""
    rows = [row for row in read(RESULTS / "measure" / "results.csv") if row["verb"] == "memory" and row["table"] == "full"]
    return f"{summary.markdown(rows).strip()}\n\nMeasured on {machine()}."

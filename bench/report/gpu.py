"""Tables and sentences for pages, from the rows of a GPU in bench/results/h100."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..cases.methods import OURS
from . import summary
from .rows import ROOT, read
from .summary import DENSE, DIRECTIONS
from .text import digits, markdown_table, short_bytes

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
REPEATED = 1.1
"""The ratio of a call's medians in two runs, the larger by the smaller, up to which the time repeated."""
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


@functools.cache
def second_run() -> Rows:
    return timed(run="again")


def differs(row: Row) -> bool:
    """Whether a second run timed the same call, and had another median."""
    other = second_run().get((row.get("case", ""), row.get("method", ""), row.get("direction", "")))
    return other is not None and max(over(row, other), over(other, row)) > REPEATED


def median(row: Row, unit: str = "") -> str:
    """A median and its mark: † if the host held the GPU up, otherwise ‡ if a second run's was another one."""
    mark = " †" if is_held_up(row) else " ‡" * differs(row)
    return digits(float(row["p50_ms"])) + unit + mark


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
    stalled = f"† CPU launch overhead stalled the GPU in most rounds; the 20th percentile is {', '.join(fifths)}."
    parts = [
        f"{of_dense()} {of_flex()} {of_memory()}",
        "÷ SDPA: time relative to SDPA's FlashAttention without positions. cuDNN is faster still: ours takes "
        f"{cudnn[0]}x its time forward, {cudnn[1]}x forward + backward. {of_sdpa()} {of_earlier()} {CHANGED} "
        f"{stalled * bool(fifths)} "
        f"Measured on {machine()}: bfloat16, 32 heads of 64, a table with a row per distance. "
        "[All figures](docs/benchmarks.md#on-an-h100).",
    ]
    head = ["one attention call on an H100", "forward", "÷ SDPA", "forward + backward", "÷ SDPA"]
    return "\n\n".join([markdown_table(head, body), *parts])


CHANGED = "Since then four rows of tile sizes were retuned and launches are cached again; that was not timed on a GPU."


def of_sdpa() -> str:
    """Forward and backward beside SDPA's FlashAttention, in all calls that were timed."""
    both, found = DIRECTIONS[1], dict[str, list[float]]()
    for group in ("long", "t5", "deberta", "speech"):
        rows = timed(group)
        found[group] = [over(rows[case, OURS, both], rows[case, FLASH, both]) for case in cases(rows)]
    return (
        f"Of all calls timed, forward + backward is {spread(found['long'] + found['t5'])} times SDPA from 512 tokens on "
        f"(DeBERTa up to {max(found['deberta']):.1f}), and {spread(found['speech'])} times at 200 and 500 tokens, where CPU "
        "launch overhead dominates and dense was not timed."
    )


def of_dense() -> str:
    """How much faster than the fastest dense method, in the calls where both were timed side by side."""
    rows = timed("dense")
    shown = sorted(cases(rows, head_dim="64", table="full"), key=lambda case: int(rows[case, OURS, "forward"]["seqlen"]))
    lengths = " and ".join(f"{int(rows[case, OURS, 'forward']['seqlen']):,}" for case in shown)

    def slower(direction: str) -> str:
        pairs = [(fastest(rows, case, direction, DENSE), rows[case, OURS, direction]) for case in shown]
        return " and ".join(f"{over(*pair):.1f}x" for pair in pairs)

    forward, both = map(slower, DIRECTIONS)
    return (
        f"Timed beside ours, the fastest dense PyTorch takes {forward} its time with {lengths} tokens ({both} with the backward)."
    )


def of_flex() -> str:
    """How much faster than FlexAttention."""
    rows = timed("")
    forward, both = (spread(over(rows[case, FLEX, each], rows[case, OURS, each]) for case in cases(rows)) for each in DIRECTIONS)
    return (
        f"Compiled FlexAttention takes {forward}x its time ({both}x with the backward), in {NUMBERS[len(cases(rows))]} "
        "configurations."
    )


NUMBERS = ("no", "one", "two", "three", "four", "five", "six")


def peaks() -> list[Row]:
    """Rows of peak memory with a row of the table per distance."""
    rows = read(RESULTS / "measure" / "results.csv")
    return [row for row in rows if row["verb"] == "memory" and row["table"] == "full"]


def of_memory() -> str:
    """Peaks of ours and of the leanest dense method, at the longest length that both have."""
    found: dict[int, dict[str, float]] = {}
    for row in peaks():
        if row["direction"] == DIRECTIONS[1] and row["peak_bytes"]:
            found.setdefault(int(row["seqlen"]), {})[row["method"]] = float(row["peak_bytes"])
    length = max(length for length, each in found.items() if OURS in each and any(name in each for name in DENSE))
    dense = min(found[length][name] for name in DENSE if name in found[length])
    return (
        f"With {length:,} tokens and 8 heads, forward + backward peaks at {short_bytes(found[length][OURS])} above the inputs, "
        f"256 MiB or more of them a workspace; dense PyTorch peaks at {short_bytes(dense)}."
    )


def of_earlier() -> str:
    """How many calls an earlier version computed faster."""
    compared, faster = against_earlier()
    return f"An earlier version was more than {percent()} faster in {len(faster)} of {len(compared)} cases."


def percent() -> str:
    return f"{100 * (GAIN - 1):.0f} %"


def shared_with_earlier() -> Rows:
    """Rows of calls that an earlier version has as well."""
    before = timed(run="before")
    return {key: row for group in ("long", "speech", "t5") for key, row in timed(group).items() if key in before}


def against_earlier() -> tuple[list[str], list[tuple[Row, Row]]]:
    """Cases that an earlier version has as well, and rows of ours that it computed faster, each with its row."""
    rows, before, both = shared_with_earlier(), timed(run="before"), DIRECTIONS[1]
    pairs = [(rows[case, OURS, both], before[case, OURS, both]) for case in cases(rows)]
    return cases(rows), [pair for pair in pairs if over(*pair) > GAIN]


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
    """Short calls without launch overhead."""
    rows = [row for row in read(RESULTS / "measure" / "checks.csv") if (row["part"], row["status"]) == ("graphs", "ok")]
    shown = timed("speech")
    found = [
        f"{digits(float(row['value']))} ms ({call_of(shown[row['case'], OURS, row['direction']])})"
        for row in sorted(rows, key=lambda row: float(row["value"]))
    ]
    return f"As a CUDA graph, without launch overhead, forward + backward takes {', '.join(found)}."


def earlier() -> str:
    """Calls that earlier kernels computed faster, on the same machine within the hour."""
    before, again, both, body = timed(run="before"), second_run(), DIRECTIONS[1], []
    rows, (compared, faster) = shared_with_earlier(), against_earlier()
    for row, other in faster:
        ratios = [f"{over(row, other, column):.2f}" for column in ("p50_ms", "p20_ms")]
        body.append([call_of(row), digits(float(other["p50_ms"])), median(row), *ratios])
    plain = [key for key in again if key[1] == "plain" and key in before]
    backward = [over(again[key], before[key], "p20_ms") for key in plain if key[2] == "backward"]
    wide = [key for key, row in before.items() if key[1:] == ("plain", "forward") and row["head_dim"] == "128"]
    forward = [over(rows[key], before[key]) for key in wide]
    peaks = [over(again[key], before[key], "peak_bytes") for key in plain if key[2] == both]
    what = (
        f"The kernels of {EARLIER} were more than {percent()} faster in {len(body)} of the {len(compared)} calls timed with "
        "both, on that machine within the hour. The last two columns have the ratios of the medians and of the 20th percentiles "
        "of the rounds, in which CPU launch overhead counts least:"
    )
    more = (
        f"Calls without a table regressed as well: compared with {EARLIER}, their backward takes {spread(backward)} times as "
        f"long (20th percentiles), their forward {spread(forward)} times with heads of 128, and their peak is {spread(peaks)} "
        "times as high."
    )
    head = ["forward + backward, ms", EARLIER, commit(), "ratio", "of 20th percentiles"]
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
    named = summary.markdown(peaks()).strip().replace("| plain |", "| ours without a table |")
    return f"{named}\n\nMeasured on {machine()}."

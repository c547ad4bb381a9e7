"""Tables and sentences for pages, from the rows of a GPU in bench/results/h100."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

from ..cases.methods import OURS
from . import summary
from .rows import ROOT, pivot, read
from .summary import DENSE, DIRECTIONS
from .text import digits, markdown_table, short_bytes

Row = dict[str, Any]
Rows = dict[tuple[str, str, str], Row]
"""By case, method and direction."""
RESULTS = ROOT / "bench" / "results" / "h100"
EARLIER = "d09a3ce6"
"""The commit of the rows in the folder "before", which bear the name of the checkout that measured them."""
BOTH = DIRECTIONS[1]
FLASH, CUDNN, FLEX = "sdpa_flash", "sdpa_cudnn", "flex_attention"
SDPA_BIAS = ("sdpa_bias_efficient", "sdpa_bias_cudnn")
STALLED = 1.1
"""A median over the 20th percentile that is larger means that the host stalled the GPU in most rounds."""
GAIN = 1.05
"""A larger ratio of two medians is no chance."""
REPEATED = 1.1
"""A call's time repeated if its medians in two runs differ by no more than this factor."""
README_LENGTHS = ("1024", "4096", "16384")
CHANGED = (
    "Since then the backward of calls without a row for every distance and the loops of all kernels were rewritten, rows of tile "
    "sizes were retuned, and launches are cached again; that was not timed on a GPU."
)


@functools.cache
def load_times(group: str | None = None, run: str = "measure") -> Rows:
    """Times of whole calls in a run, of one group or of all."""
    rows = [row for row in read(RESULTS / run / "results.csv") if row["verb"] == "speed" and row["p50_ms"]]
    return {(row["case"], row["method"], row["direction"]): row for row in rows if group in (None, row["group"])}


def cases(rows: Rows, **columns: str) -> list[str]:
    """Those of the given columns, short ones first."""
    lengths = {key[0]: int(row["seqlen"]) for key, row in rows.items() if columns.items() <= row.items()}
    return sorted(lengths, key=lengths.__getitem__)


def commit() -> str:
    return str(read(RESULTS / "measure" / "results.csv")[0]["commit"])[: len(EARLIER)]


def machine() -> str:
    """Where the rows come from."""
    row = read(RESULTS / "measure" / "results.csv")[0]
    driver = json.loads((RESULTS / "measure" / "environment.json").read_text())["driver"]
    versions = f"driver {driver}, torch {row['torch'].split('+')[0]}, Triton {row['triton']}"
    return f"an {row['device']} ({versions}), commit {commit()}"


def ratio(row: Row, other: Row, column: str = "p50_ms") -> float:
    return float(row[column]) / float(other[column])


def ratios(rows: Rows, method: str, other: str, direction: str, chosen: Sequence[str] = ()) -> list[float]:
    """How many times as long as the other method one takes, in the chosen cases or in all."""
    return [ratio(rows[case, method, direction], rows[case, other, direction]) for case in chosen or cases(rows)]


def spread(found: Iterable[float]) -> str:
    """The smallest and the largest, one if they are the same."""
    ordered = sorted(found)
    return " to ".join(dict.fromkeys(f"{value:.1f}" for value in (ordered[0], ordered[-1])))


def is_stalled(row: Row) -> bool:
    """Whether the median is the host's: queueing takes longer than its head start, and a fifth of the rounds is faster."""
    return row["waits_for_host"] == "yes" and bool(row["p20_ms"]) and float(row["p50_ms"]) / float(row["p20_ms"]) > STALLED


def median(row: Row, unit: str = "") -> str:
    """A median and its mark: † if the host stalled the GPU, otherwise ‡ if a second run's was another one."""
    again = load_times(run="again").get((row["case"], row["method"], row["direction"]))
    differs = again is not None and max(ratio(row, again), ratio(again, row)) > REPEATED
    mark = " †" if is_stalled(row) else " ‡" * differs
    return digits(float(row["p50_ms"])) + unit + mark


def fastest(rows: Rows, case: str, direction: str, methods: Sequence[str]) -> Row:
    found = [rows[case, name, direction] for name in methods if (case, name, direction) in rows]
    return min(found, key=lambda row: float(row["p50_ms"]))


def describe(row: Row) -> str:
    """A call in words: 4 x 4,096, 32 heads of 64, 129 rows, causal."""
    rows = row["table"].removesuffix(" p2c").removesuffix(" bias").removeprefix("clamp ")
    if row["table"] == "none":
        table = "no table"
    elif row["table"].endswith("alibi"):
        table = "ALiBi"
    elif row["table"].endswith("bias"):
        table = "a bias" if rows == "full" else f"a bias of {int(rows)} rows"
    elif row["table"].endswith("p2c"):
        table = "two full tables" if rows == "full" else f"two tables of {int(rows):,} rows"
    else:
        table = "full table" if rows == "full" else f"{rows} rows"
    sizes = f"{row['batch']} x {int(row['seqlen']):,}, {row['heads']} heads of {row['head_dim']}"
    return f"{sizes}, {table}" + ", causal" * (row["is_causal"] == "True")


def beside_sdpa(rows: Rows, case: str, direction: str) -> str:
    """Our time, and in brackets how many times those of FlashAttention and cuDNN it is."""
    others = (ratios(rows, OURS, method, direction, [case])[0] for method in (FLASH, CUDNN))
    return f"{median(rows[case, OURS, direction])} ({', '.join(f'{other:.1f}' for other in others)})"


def first() -> str:
    """README's table and paragraph."""
    rows = load_times("long")
    full = cases(rows, head_dim="64", table="full", is_causal="False")
    shown = [case for case in full if rows[case, OURS, "forward"]["seqlen"] in README_LENGTHS]
    body, percentiles = [], []
    for case in shown:
        row, cells = rows[case, OURS, "forward"], []
        for direction in DIRECTIONS:
            ours = rows[case, OURS, direction]
            cells += [median(ours, " ms"), f"{ratio(ours, rows[case, FLASH, direction]):.1f}"]
            percentiles += [f"{digits(float(ours['p20_ms']))} ms"] * is_stalled(ours)
        body.append([f"{row['batch']} x {int(row['seqlen']):,} tokens", *cells])
    head = ["one attention call on an H100", "forward", "÷ SDPA", "forward + backward", "÷ SDPA"]
    cudnn = [spread(ratios(rows, OURS, CUDNN, direction, shown)) for direction in DIRECTIONS]
    compared, slower = regressions()
    conditions = (
        "÷ SDPA: time relative to SDPA's FlashAttention without positions. cuDNN is faster still: ours takes "
        f"{cudnn[0]}x its time forward, {cudnn[1]}x forward + backward. {sdpa_sentence()} "
        f"An earlier version was more than {100 * (GAIN - 1):.0f} % faster in {len(slower)} of {len(compared)} cases. {CHANGED} "
    )
    if percentiles:
        conditions += f"† CPU launch overhead stalled the GPU in most rounds; the 20th percentile is {', '.join(percentiles)}. "
    conditions += (
        f"Measured on {machine()}: bfloat16, 32 heads of 64, a table with a row per distance. "
        "[All figures](docs/benchmarks.md#on-an-h100)."
    )
    claims = f"{dense_sentence()} {flex_sentence()} {memory_sentence()}"
    return f"{markdown_table(head, body)}\n\n{claims}\n\n{conditions}"


def sdpa_sentence() -> str:
    """Forward and backward beside SDPA's FlashAttention, in all calls that were timed."""
    found = {group: ratios(load_times(group), OURS, FLASH, BOTH) for group in ("long", "t5", "deberta", "speech")}
    return (
        f"Of all calls timed, forward + backward is {spread(found['long'] + found['t5'])} times SDPA from 512 tokens on "
        f"(DeBERTa up to {max(found['deberta']):.1f}), and {spread(found['speech'])} times at 200 and 500 tokens, where CPU "
        "launch overhead dominates and dense was not timed."
    )


def dense_sentence() -> str:
    """How much faster than the fastest dense method, in the calls where both were timed side by side."""
    rows = load_times("dense")
    shown = cases(rows, head_dim="64", table="full")
    lengths = " and ".join(f"{int(rows[case, OURS, 'forward']['seqlen']):,}" for case in shown)
    forward, both = (
        " and ".join(f"{ratio(fastest(rows, case, way, DENSE), rows[case, OURS, way]):.1f}x" for case in shown)
        for way in DIRECTIONS
    )
    return (
        f"Timed beside ours, the fastest dense PyTorch takes {forward} its time with {lengths} tokens ({both} with the backward)."
    )


def flex_sentence() -> str:
    """How much faster than FlexAttention."""
    rows = load_times("")
    forward, both = (spread(ratios(rows, FLEX, OURS, way)) for way in DIRECTIONS)
    names = "no one two three four five six seven eight nine ten eleven twelve".split()
    number = names[len(cases(rows))]
    return f"Compiled FlexAttention takes {forward}x its time ({both}x with the backward), in {number} configurations."


def peaks() -> list[Row]:
    """Rows of peak memory with a row of the table per distance."""
    rows = read(RESULTS / "measure" / "results.csv")
    return [row for row in rows if row["verb"] == "memory" and row["table"] == "full"]


def memory_sentence() -> str:
    """Peaks of ours and of the leanest dense method, at the longest length that both have."""
    rows = pivot((row for row in peaks() if row["direction"] == BOTH), ["seqlen"], "peak_bytes")
    found = {int(length): by_method for (length,), by_method in rows.items()}
    length = max(n for n, by_method in found.items() if OURS in by_method and by_method.keys() & set(DENSE))
    dense = min(found[length][name] for name in DENSE if name in found[length])
    return (
        f"With {length:,} tokens and 8 heads, forward + backward peaks at {short_bytes(found[length][OURS])} above the inputs, "
        f"256 MiB or more of them a workspace; dense PyTorch peaks at {short_bytes(dense)}."
    )


def shared_rows() -> tuple[Rows, Rows]:
    """Rows of the calls that were timed now and with the earlier kernels: now, and then."""
    before = load_times(run="before")
    now = load_times("long") | load_times("speech") | load_times("t5")
    return {key: row for key, row in now.items() if key in before}, before


def regressions() -> tuple[list[str], list[tuple[Row, Row]]]:
    """Cases that both versions have, and rows of ours that the earlier one computed faster, each with its row."""
    rows, before = shared_rows()
    pairs = [(rows[case, OURS, BOTH], before[case, OURS, BOTH]) for case in cases(rows)]
    return cases(rows), [pair for pair in pairs if ratio(*pair) > GAIN]


def speed() -> str:
    """Every length and kind of call, beside attention without positions, and what earlier kernels took."""
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
    for group, name in (("speech", "speech"), ("t5", "T5"), ("deberta", "DeBERTa")):
        rows = load_times(group)
        for case in cases(rows):
            label = f"{name}: {describe(rows[case, OURS, 'forward'])}"
            body.append([label, *(beside_sdpa(rows, case, way) for way in DIRECTIONS)])
    parts.append(markdown_table(["sequences x tokens", *DIRECTIONS], body))
    return "\n\n".join([*parts, f"Measured on {machine()}.", graphs(), earlier()])


def graphs() -> str:
    """Short calls without launch overhead."""
    rows = [row for row in read(RESULTS / "measure" / "checks.csv") if (row["part"], row["status"]) == ("graphs", "ok")]
    rows.sort(key=lambda row: float(row["value"]))
    calls = load_times("speech")
    found = [f"{digits(float(row['value']))} ms ({describe(calls[row['case'], OURS, row['direction']])})" for row in rows]
    return f"As a CUDA graph, without launch overhead, forward + backward takes {', '.join(found)}."


def earlier() -> str:
    """Calls that earlier kernels computed faster, on the same machine within the hour."""
    (rows, before), again, (compared, slower) = shared_rows(), load_times(run="again"), regressions()
    body = [
        [describe(row), digits(float(other["p50_ms"])), median(row)]
        + [f"{ratio(row, other, column):.2f}" for column in ("p50_ms", "p20_ms")]
        for row, other in slower
    ]
    plain = [key for key in again if key[1] == "plain" and key in before]
    backward = [ratio(again[key], before[key], "p20_ms") for key in plain if key[2] == "backward"]
    wide = [key for key, row in before.items() if key[1:] == ("plain", "forward") and row["head_dim"] == "128"]
    forward = [ratio(rows[key], before[key]) for key in wide]
    memory = [ratio(again[key], before[key], "peak_bytes") for key in plain if key[2] == BOTH]
    before_table = (
        f"The kernels of {EARLIER} were more than {100 * (GAIN - 1):.0f} % faster in {len(body)} of the {len(compared)} calls "
        "timed with both, on that machine within the hour. The last two columns have the ratios of the medians and of the 20th "
        "percentiles of the rounds, in which CPU launch overhead counts least:"
    )
    after_table = (
        f"Calls without a table regressed as well: compared with {EARLIER}, their backward takes {spread(backward)} times as "
        f"long (20th percentiles), their forward {spread(forward)} times with heads of 128, and their peak is {spread(memory)} "
        "times as high."
    )
    head = ["forward + backward, ms", EARLIER, commit(), "ratio", "of 20th percentiles"]
    return f"{before_table}\n\n{markdown_table(head, body)}\n\n{after_table}"


def beside(rows: Rows, methods: Sequence[str]) -> str:
    """Ours beside other methods, a line per call and direction; ratios are to the fastest of them."""
    present = [OURS, *(name for name in methods if any(key[1] == name for key in rows))]
    body = []
    for case in cases(rows):
        for direction in DIRECTIONS:
            ours, best = rows[case, OURS, direction], fastest(rows, case, direction, methods)
            cells = [median(rows[key]) if (key := (case, name, direction)) in rows else "-" for name in present]
            body.append([f"{describe(ours)}: {direction}", *cells, f"{ratio(best, ours):.1f}"])
    return markdown_table(["ms", *present, "ratio"], body)


def baselines() -> str:
    """Ours beside what people write today, and beside FlexAttention."""
    rows = load_times("dense")
    bias = {key: row for key, row in rows.items() if row["table"].endswith("bias")}
    vectors = {key: row for key, row in rows.items() if key not in bias}
    parts = [beside(vectors, DENSE), beside(bias, SDPA_BIAS), beside(load_times(""), [FLEX])]
    return "\n\n".join([*parts, f"Measured on {machine()}."])


def memory() -> str:
    """Peaks against the length."""
    table = summary.markdown(peaks()).strip().replace("| plain |", "| ours without a table |")
    return f"{table}\n\nMeasured on {machine()}."

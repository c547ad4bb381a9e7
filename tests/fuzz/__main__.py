"""A long run, python -m tests.fuzz --seconds 300 --seed 0 [--kernels]. A failure is shrunk and printed as a command."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from typing import Any

ROUND = 10
"""Calls of one kind in a row."""
BROKEN_IN = 4
"""One round in so many is of broken calls."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Calls that hypothesis thinks of, for a long time.")
    parser.add_argument("--seconds", type=float, default=300, help="how long (default: 300)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first round (default: 0)")
    parser.add_argument("--kernels", action="store_true", help="the kernels, in Triton's interpreter, instead of blockwise")
    parser.add_argument("--case", help="check this one only: Case(...) or Broken(...), as a failure prints it")
    return parser.parse_args()


def kinds(case: Any) -> dict[str, str]:
    """Return the properties of a case that the table counts."""
    lengths = "packed" if case.sequences is not None else "padded" if case.key_lengths is not None else "all of one length"
    positions = "none" if case.positions is None else case.positions[2]
    hides = [name for name, there in (("causal", case.is_causal), ("window", case.window_size != (-1, -1))) if there]
    mask = "none" if case.mask is None else "bool" if case.mask == "bool" else f"numbers, {case.mask_low}"
    strides = {"expanded" if layout[3] else "reordered" for layout in case.layouts}
    return {
        "dtype": case.dtype,
        "tables": " ".join(case.tables) or "none",
        "outside": positions,
        "rel_query": "its own" if case.rel_width is not None else "the query" if "rel_key" in case.tables else "none",
        "lengths": lengths,
        "heads": "query is key is value" if case.same else "shared" if case.group > 1 else "not shared",
        "mask": mask,
        "window": " ".join(hides) or "none",
        "query_offset": "of each sequence"
        if isinstance(case.query_offset, tuple)
        else "0"
        if case.query_offset == 0
        else "a number",
        "dropout_p": f"{case.dropout_p:g}",
        "softcap": "none" if case.softcap is None else f"{case.softcap:g}",
        "scale": "by default" if case.scale is None else f"{case.scale:g}",
        "terms": "float16" if case.round_terms else "float32",
        "what is not used": "NaN" if case.spoilt else "numbers",
        "workspace": "by default" if case.workspace is None else f"{case.workspace}",
        "memory": " ".join(sorted(strides)) or "contiguous",
        "gradients": case.mode if case.mode != "grad" else f"through {case.cotangents}" if case.requires_grad else "none",
    }


def print_table(counts: dict[str, Counter[str]]) -> None:
    width = max(map(len, counts), default=0)
    for group, counter in counts.items():
        print(f"{group:{width}}  " + ", ".join(f"{kind} {number}" for kind, number in counter.most_common()))


def command(case: Any) -> str:
    return f"python -m tests.fuzz --case '{case!r}'"


def repeat(line: str) -> int:
    """Check the one case of a line."""
    from tests.fuzz.case import Broken, Case
    from tests.fuzz.properties import check, check_broken

    case = eval(line, {"Case": Case, "Broken": Broken})
    if isinstance(case, Broken):
        print(check_broken(case))
    else:
        check(case)
        print("right")
    return 0


def search(seconds: float, first_seed: int, kernels: bool) -> int:
    from hypothesis import assume
    from tqdm import tqdm

    from tests.fuzz.case import Broken, Case, NotApplicable
    from tests.fuzz.properties import check, check_broken
    from tests.fuzz.strategies import broken, cases, explore

    counts: dict[str, Counter[str]] = {}
    failed: list[Case | Broken] = []
    started = time.monotonic()
    bar = tqdm(total=round(seconds), unit="s", file=sys.stdout, mininterval=1)
    number = 0

    def count(groups: dict[str, str]) -> None:
        for group, kind in groups.items():
            counts.setdefault(group, Counter())[kind] += 1

    def body(case: Case | Broken) -> None:
        nonlocal number
        elapsed = time.monotonic() - started
        if elapsed > seconds and not failed:
            return
        try:
            if isinstance(case, Broken):
                outcome = {"broken call": check_broken(case)}
            else:
                check(case)
                outcome = kinds(case)
        except NotApplicable:
            assume(False)
            return
        except Exception:
            if not failed:
                bar.write("a failure; looking for the simplest such case")
            failed.append(case)
            raise
        if not failed:
            number += 1
            count(outcome)
            bar.update(min(int(elapsed), bar.total) - bar.n)
            bar.set_postfix_str(f"{number} calls", refresh=False)

    passed: set[Case | Broken] = set()
    error: Exception | None = None
    for index in itertools.count():
        if time.monotonic() - started > seconds:
            break
        strategy: Any = broken(kernels) if index % BROKEN_IN == BROKEN_IN - 1 else cases(kernels)
        try:
            first = first_seed * 1_000_003 + index * ROUND
            explore(strategy, body, range(first, first + ROUND), passed)
        except Exception as raised:
            error = raised
            break
    bar.close()
    print(f"{number} calls in {time.monotonic() - started:.0f} s, seed {first_seed}")
    print_table(counts)
    if error is None:
        return 0
    print(f"\n{type(error).__name__}: {error}")
    if failed:
        print(command(failed[-1]))
    return 1


def main() -> int:
    arguments = parse()
    if arguments.kernels or '"triton"' in (arguments.case or ""):
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported
    import torch

    torch.set_num_threads(1)
    if arguments.case is not None:
        return repeat(arguments.case)
    return search(arguments.seconds, arguments.seed, arguments.kernels)


if __name__ == "__main__":
    sys.exit(main())

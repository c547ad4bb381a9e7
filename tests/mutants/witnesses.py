"""Which test has noticed which fault, in witnesses.csv: the cases that ``make test`` has beside a share of the others."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).with_suffix(".csv")


def read_witnesses() -> dict[str, str]:
    """Return the test that noticed a fault, by the fault's name."""
    with FILE.open(newline="") as file:
        return {row["fault"]: row["test"] for row in csv.DictReader(file)}


def write_witnesses(tests: Mapping[str, str]) -> None:
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("fault", "test"))
        writer.writerows(sorted(tests.items()))

"""Text for the terminal and for pages: columns, bytes and times."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be, the first one to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *body)) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (
            f"{cell:<{width}}" if column == 0 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return "  ".join(("", first, *others)).rstrip()

    return "\n".join((line(header), line(["-" * width for width in widths]), *map(line, body)))


def markdown_table(header: Sequence[str], body: Sequence[Sequence[str]], others: str = "---:") -> str:
    """A table in Markdown, its first column to the left, the others to the right or as their rule says."""
    rule = ["---", *[others] * (len(header) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *body))


def digits(value: float) -> str:
    """Three digits: 0.574, 12.0, 26,700."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:#.3g}"


def short_bytes(count: float) -> str:
    """Three digits and MiB or GiB."""
    mebibytes = count / 2**20
    return f"{mebibytes / 1024:.3g} GiB" if mebibytes >= 1000 else f"{mebibytes:.3g} MiB"


def short_time(milliseconds: float) -> str:
    """Three digits and ms or s."""
    return f"{milliseconds / 1e3:.3g} s" if milliseconds >= 1000 else f"{milliseconds:.3g} ms"

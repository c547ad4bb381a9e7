"""Draw the figures of the documentation: ``python docs/figures.py [--out docs/_static] [--png]``.

Each is at most six inches wide with large type, so that it can be read on a phone. The same versions draw the same bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams.update(
    {
        "svg.hashsalt": "triton_relattn",
        "svg.fonttype": "path",
        "font.size": 13,
        "font.family": "DejaVu Sans",
        "text.color": "#1f2933",
    }
)

from matplotlib import pyplot  # noqa: E402
from matplotlib.patches import FancyArrowPatch, Rectangle  # noqa: E402

INK, MUTED, LINE, PAPER = "#1f2933", "#5b6672", "#b8c1ca", "#ffffff"
QUERY, KEY, TABLE = "#d1495b", "#2a7f9e", "#8a6d1d"
FAR, NEAR = "#e6eaee", "#8fc1d4"


def by_distance(distance: int, low: int, high: int) -> Any:
    """Return the color of a relative position between low and high."""
    return matplotlib.colormaps["viridis"](0.12 + 0.8 * (distance - low) / max(high - low, 1))


def cell(axes: Any, x: float, y: float, color: Any, text: str = "", size: int = 12, **options: Any) -> None:
    """Draw one square with its corner at (x, y)."""
    axes.add_patch(Rectangle((x, y), 1, 1, **{"facecolor": color, "edgecolor": PAPER, "linewidth": 1.5, **options}))
    if text:
        red, green, blue, _ = matplotlib.colors.to_rgba(color)
        dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.58
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=size, color=PAPER if dark else INK)


def canvas(width: float, height: float, x: tuple[float, float], y: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure and its only axes, without ticks, y pointing down."""
    figure = pyplot.figure(figsize=(width, height), facecolor=PAPER)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=x, ylim=(y[1], y[0]), aspect="equal")
    axes.axis("off")
    return figure, axes


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], **options: Any) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "-|>", "mutation_scale": 16, "linewidth": 1.8, "color": INK, **options}
    axes.add_patch(FancyArrowPatch(start, end, **style))


def signed(number: int) -> str:
    """Return the number with a true minus sign."""
    return str(number).replace("-", "\N{MINUS SIGN}")


def band() -> Any:
    """A tile of 4 x 4 pairs, its relative positions, and the 7 rows of the table that it needs."""
    m, n, first_query, first_key = 4, 4, 4, 8
    low, high = first_key - first_query - m + 1, first_key - first_query + n - 1
    figure, axes = canvas(6, 6.6, (-2.5, 9.9), (-2.2, 11.44))
    axes.text(-2.1, -1.45, "A tile: M = 4 queries, N = 4 keys", fontsize=15, weight="bold")
    axes.text(2.5 + 1, -0.75, "keys", color=KEY, ha="center", weight="bold")
    axes.text(-0.9, 2, "queries", color=QUERY, ha="center", va="center", rotation=90, weight="bold")
    for row in range(m):
        axes.text(0.5, row + 0.5, f"i = {first_query + row}", color=QUERY, ha="center", va="center")
        for column in range(n):
            r = first_key + column - first_query - row
            cell(axes, column + 1.5, row, by_distance(r, low, high), signed(r), 15)
    for column in range(n):
        axes.text(column + 2, -0.2, f"{first_key + column}", color=KEY, ha="center", va="center")
    axes.text(6, 0.9, "r = j \N{MINUS SIGN} i", fontsize=15, weight="bold")
    axes.text(6, 1.75, "is the same\nalong a\ndiagonal", color=MUTED, va="top")
    arrow(axes, (3.5, 4.25), (3.5, 6.3))
    axes.text(3.9, 5.3, "needs M + N \N{MINUS SIGN} 1 = 7 rows of E", va="center")
    for k, r in enumerate(range(low - 2, high + 2)):
        inside = low <= r <= high
        color = by_distance(r, low, high) if inside else FAR
        cell(axes, k - 1.5, 7.1, color, signed(r), 14)
    axes.text(-1.5, 6.85, "table E", color=TABLE, weight="bold", va="bottom")
    axes.plot([0.5, 0.5, 7.5, 7.5], [8.25, 8.45, 8.45, 8.25], color=INK, linewidth=1.8)
    axes.text(4, 8.65, "the band of this tile", ha="center", va="top")
    axes.plot([4.5, 4.5, 9.2], [9.75, 9.95, 9.95], color=MUTED, linewidth=1.6, linestyle=(0, (3, 2)))
    axes.text(6.9, 10.15, "next tile: 4 rows further", ha="center", va="top", color=MUTED)
    return figure


def rotation() -> Any:
    """A block of products, by distance, becomes a tile, by key: rotate row m by m, take what wraps from the block before."""
    n = 4
    figure, axes = canvas(6, 10.2, (-1.0, 10.0), (-1.3, 17.4))
    before = "#c9b8d9"
    now = "#4b7f52"

    def grid(x: float, y: float, elements: list[list[tuple[str, Any]]]) -> None:
        for row, line in enumerate(elements):
            for column, (text, color) in enumerate(line):
                cell(axes, x + column, y + row, color, text, 12)

    def block(letter: str, color: Any) -> list[list[tuple[str, Any]]]:
        return [[(f"{letter}{column}", color) for column in range(n)] for _ in range(n)]

    def rotated(elements: list[list[tuple[str, Any]]]) -> list[list[tuple[str, Any]]]:
        return [[line[(column - row) % n] for column in range(n)] for row, line in enumerate(elements)]

    def heading(y: float, number: str, text: str) -> None:
        axes.text(-0.7, y, number, fontsize=15, weight="bold", va="center")
        axes.text(-0.1, y, text, fontsize=14, va="center")

    old, new = block("a", before), block("b", now)
    heading(-0.6, "1", "multiply: columns are distances")
    grid(0.2, 0.6, old)
    grid(5.0, 0.6, new)
    axes.text(2.2, 0.25, "block before", color=MUTED, ha="center", va="center")
    axes.text(7.0, 0.25, "block of this tile", color=MUTED, ha="center", va="center")
    for row in range(n):
        axes.text(-0.2, row + 1.1, f"m={row}", color=QUERY, ha="center", va="center", fontsize=11, rotation=0)
    heading(5.5, "2", "rotate row m by m (a few shuffles)")
    grid(0.2, 6.2, rotated(old))
    grid(5.0, 6.2, rotated(new))
    for x in (0.2, 5.0):  # the wrapped part
        points_x, points_y = [x], [6.2]
        for row in range(n):
            points_x += [x + row, x + row]
            points_y += [6.2 + row, 7.2 + row]
        axes.plot([*points_x, x, x], [*points_y, 10.2, 6.2], color=INK, linewidth=2.2, solid_joinstyle="miter")
    axes.text(2.2, 10.55, "wrapped part: for this tile", color=MUTED, ha="center", va="center", fontsize=11.5)
    axes.text(
        7.0, 10.33, "the rest: for this tile\n(wrapped part: for the next)", color=MUTED, ha="center", va="top", fontsize=11.5
    )
    heading(12.7, "3", "select")
    tile = [[rotated(old)[row][column] if column < row else rotated(new)[row][column] for column in range(n)] for row in range(n)]
    x, y = 2.6, 12.6
    arrow(axes, (1.4, 10.95), (2.5, 15.4))
    arrow(axes, (7.0, 11.4), (6.0, 12.5))
    grid(x, y, tile)
    points_x, points_y = [x], [y]
    for row in range(n):
        points_x += [x + row, x + row]
        points_y += [y + row, y + row + 1]
    axes.plot([*points_x, x, x], [*points_y, y + n, y], color=INK, linewidth=2.2, solid_joinstyle="miter")
    axes.text(6.85, 13.6, "the tile:\ncolumns are keys,\nrow m starts m\ncolumns earlier", va="top", color=INK, fontsize=12.5)
    return figure


def near_and_far() -> Any:
    """The tiles of a whole sequence: which touch a clamped table, and which lie beyond it."""
    size, reach = 14, 2.2
    figure, axes = canvas(6, 7.3, (-2.0, 15.2), (-2.5, 18.43))
    axes.text(-1.7, -1.8, "Tiles of a clamped table", fontsize=15, weight="bold")
    axes.text(size / 2, -0.65, "keys", color=KEY, ha="center", weight="bold")
    axes.text(-0.9, size / 2, "queries", color=QUERY, va="center", ha="center", rotation=90, weight="bold")
    for row in range(size):
        for column in range(size):
            # A tile's distances, in units of tiles, lie strictly between column - row - 1 and column - row + 1.
            near = column - row - 1 < reach and column - row + 1 > -reach
            cell(axes, column, row, NEAR if near else FAR)
    for shift in (-reach, reach):
        start, stop = (0, -shift) if shift < 0 else (shift, 0), (size + shift, size) if shift < 0 else (size, size - shift)
        axes.plot([start[0], stop[0]], [start[1], stop[1]], color=TABLE, linewidth=2, linestyle=(0, (4, 2)))
    axes.text(2.9, 11.1, "first row of E\nfor all pairs", ha="center", va="center", fontsize=13)
    axes.text(11.0, 2.9, "last row of E\nfor all pairs", ha="center", va="center", fontsize=13)
    for y, color, text in ((14.7, NEAR, "near: product and rotation"), (15.95, FAR, "far: one scalar per query and side")):
        cell(axes, 0, y, color)
        axes.text(1.5, y + 0.5, text, va="center")
    axes.plot([0, 1.0], [17.7, 17.7], color=TABLE, linewidth=2, linestyle=(0, (4, 2)))
    axes.text(1.5, 17.7, "ends of the table: r = first, r = last", va="center", color=TABLE)
    return figure


FIGURES = {"band": band, "rotation": rotation, "near-and-far": near_and_far}


def main() -> None:
    """Write all figures as SVG, and as PNG to look at."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "_static")
    parser.add_argument("--png", action="store_true", help="also as PNG")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        figure = draw()
        figure.savefig(arguments.out / f"{name}.svg", metadata={"Date": None})
        if arguments.png:
            figure.savefig(arguments.out / f"{name}.png", dpi=100)
        pyplot.close(figure)


if __name__ == "__main__":
    main()

"""Curves drawn as text, with dots of Braille characters."""

import math
from collections.abc import Sequence
from typing import NamedTuple

BRAILLE = 0x2800  # the character without dots
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # the bit of a dot, by row and column in a character
LABEL_EVERY = 3  # rows between two labels of the y axis
MIN_COLUMNS = 10  # of the area between the axes


class Curve(NamedTuple):
    """A curve: points (x, y) with finite values.

    mark: the character that is drawn at each point, or "" for none. line: whether a line joins the points.
    """

    points: Sequence[tuple[float, float]]
    mark: str = ""
    line: bool = True


class _Axis(NamedTuple):
    low: float
    high: float
    dots: int  # number of dots along the axis

    def dot(self, value: float) -> int:
        """The index of the dot at a value from `low` to `high`; the middle one if `low` equals `high`."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(share * (self.dots - 1))

    def value(self, dot: float) -> float:
        return self.low + dot / (self.dots - 1) * (self.high - self.low)


def draw(curves: Sequence[Curve], columns: int, rows: int, x_name: str) -> list[str]:
    """The lines of text of a plot: `rows` rows, and two more for the x axis. If there are no points, no lines.

    The lines have at most `columns` characters, unless the labels need more room. The y axis is logarithmic if all
    values are positive. Each of its labels is the value at the middle of a row. Marks are drawn over lines, and over
    the marks of earlier curves. x_name: follows the last label of the x axis.
    """
    points = [point for curve in curves for point in curve.points]
    if not points:
        return []
    to_axis, from_axis = (math.log, math.exp) if min(y for _, y in points) > 0 else (float, float)
    ends = [to_axis(y) for _, y in points]
    y_axis = _Axis(min(ends), max(ends), 4 * rows)
    labels = [""] * rows
    for row in range(0, rows, LABEL_EVERY) if y_axis.high > y_axis.low else [rows // 2]:
        labels[row] = f"{from_axis(y_axis.value(4 * (rows - row) - 2.5)):.4g}"
    margin = max(map(len, labels))
    width = max(columns - margin - 2, MIN_COLUMNS)
    x_axis = _Axis(min(x for x, _ in points), max(x for x, _ in points), 2 * width)

    bits = [[0] * width for _ in range(rows)]
    marks: dict[tuple[int, int], str] = {}
    for curve in curves:
        dots = [(x_axis.dot(x), 4 * rows - 1 - y_axis.dot(to_axis(y))) for x, y in curve.points]  # from the top left
        for (x0, y0), (x1, y1) in zip(dots, dots[1:] or dots, strict=False) if curve.line else ():
            steps = max(abs(x1 - x0), abs(y1 - y0), 1)
            for step in range(steps + 1):
                x, y = x0 + round((x1 - x0) * step / steps), y0 + round((y1 - y0) * step / steps)
                bits[y // 4][x // 2] |= DOTS[y % 4][x % 2]
        marks |= {(y // 4, x // 2): curve.mark for x, y in dots if curve.mark}
    lines = []
    for row, label in enumerate(labels):
        cells = [marks.get((row, x)) or (chr(BRAILLE | dots) if dots else " ") for x, dots in enumerate(bits[row])]
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{''.join(cells)}".rstrip())
    start, end = _shorten(x_axis.low), f"{_shorten(x_axis.high)} {x_name}"
    return [*lines, f"{'':>{margin}} └{'─' * width}", f"{'':>{margin}}  {start}{end:>{width - len(start)}}"]


def _shorten(number: float) -> str:
    return f"{number:,.0f}" if abs(number) < 1e7 else f"{number:.3g}"

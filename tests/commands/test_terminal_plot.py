"""Curves drawn as text: points are where they belong."""

import itertools
import math

import pytest

from tinylm.commands.terminal_plot import Curve, draw

# Unicode's numbers of the dots of a braille character, by column and row; dot n is bit n - 1.
DOT_NUMBERS = {(0, 0): 1, (0, 1): 2, (0, 2): 3, (1, 0): 4, (1, 1): 5, (1, 2): 6, (0, 3): 7, (1, 3): 8}


def canvas(lines: list[str]) -> list[str]:
    """The rows of a drawing without the labels and the x axis."""
    return [line.partition("┤" if "┤" in line else "│")[2] for line in lines[:-2]]


def dots(lines: list[str]) -> set[tuple[int, int]]:
    """The columns and rows of the dots of a drawing, from the top left."""
    return {
        (2 * column + x, 4 * row + y)
        for row, text in enumerate(canvas(lines))
        for column, character in enumerate(text)
        if character != " "
        for (x, y), number in DOT_NUMBERS.items()
        if (ord(character) - 0x2800) >> (number - 1) & 1
    }


@pytest.mark.parametrize("columns", [40, 200])
def test_known_points_are_at_their_places_and_labels_are_the_values_of_their_rows(columns: int) -> None:
    """From 1 to e^4 on a logarithmic axis of 5 rows: e^k is k quarters of the way up."""
    points = [(100.0 * k, math.exp(k)) for k in range(5)]
    lines = draw([Curve(points, "o", line=False)], columns, 5, "steps")
    marks = {(x, y) for y, row in enumerate(canvas(lines)) for x, character in enumerate(row) if character == "o"}
    width = len(lines[-2].partition("└")[2])
    assert max(map(len, lines)) == columns
    for k, (x, y) in enumerate(sorted(marks)):
        assert y == 4 - k
        assert abs(x - k / 4 * (width - 1)) <= 1
    assert lines[-1].split() == ["0", "400", "steps"]
    # 19 dots between the ends of a linear axis from -19 to 0: the middle of the rows is at -1.5 and -13.5.
    lines = draw([Curve([(0.0, 0.0), (1.0, -19.0)])], 30, 5, "steps")
    assert [line.split()[0] for line in lines[:5] if "┤" in line] == ["-1.5", "-13.5"]
    assert [index for index, line in enumerate(lines[:5]) if "┤" in line] == [0, 3]


def test_a_line_joins_its_points_without_gaps() -> None:
    points = [(0.0, 9.0), (3.0, 2.0), (4.0, 7.0), (50.0, 3.0)]
    found = dots(draw([Curve(points)], 60, 8, "steps"))
    assert (0, 0) in found
    columns = sorted({x for x, _ in found})
    assert columns == list(range(columns[-1] + 1))
    for x, y in found - {(0, 0)}:
        assert any((x - dx, y - dy) in found for dx, dy in itertools.product((0, 1), (-1, 0, 1)) if (dx, dy) != (0, 0))


def test_a_single_point_a_constant_nothing_and_extreme_values_can_be_drawn() -> None:
    assert draw([], 40, 5, "steps") == draw([Curve([])], 40, 5, "steps") == []
    for points in ([(3.0, 1.5)], [(3.0, 1.5), (9.0, 1.5)]):
        lines = draw([Curve(points)], 40, 5, "steps")
        assert lines[2].startswith("1.5 ┤") and dots(lines)
        assert {y // 4 for _, y in dots(lines)} == {2}
    for points, columns in itertools.product(
        (
            [(0.0, 1e30), (2.0**53, 1e-30)],
            [(0.0, -1e30), (1.0, 1e30)],
            [(5.0, 1.0), (2.0, 3.0), (9.0, 0.0)],  # not in the order of the steps
            [(0.0, 5e-324), (1.0, 0.1)],
        ),
        (1, 20, 40),
    ):
        lines = draw([Curve(points, "o")], columns, 6, "steps")
        assert len(lines) == 8
        assert all(line.isprintable() for line in lines)
        assert max(map(len, lines)) <= max(columns, 40)

"""Curves as text: in their place, and never failing."""

from __future__ import annotations

import math

import pytest

from flows.cli.text_plot import Series, plot


def test_points_stand_where_their_values_are() -> None:
    points = [(0.0, 2.0), (0.5, 1.5), (1.0, 1.0)]
    lines = plot([Series(sign="o", points=points)], width=30, height=5)
    bodies = [line.split("│")[1] for line in lines[:5]]
    assert [body.find("o") for body in bodies] == [
        0,
        -1,
        (max(map(len, bodies)) - 1) // 2,
        -1,
        max(map(len, bodies)) - 1,
    ]
    assert lines[0].strip().startswith("2.0000")
    assert lines[4].strip().startswith("1.0000")
    assert lines[-1].strip().startswith("0 %")
    assert lines[-1].endswith("100 % of the budget")


def test_a_later_series_and_its_points_hide_marks_and_earlier_ones() -> None:
    same = [(0.0, 1.0), (1.0, 2.0)]
    lines = plot([Series(sign="a", points=same), Series(sign="b", points=same)], width=30, height=4, marks=[0.5])
    text = "".join(lines)
    assert "b" in text
    assert "│a" not in text
    assert "┆" in text


def test_a_few_values_far_above_do_not_flatten_the_rest() -> None:
    points = [(0.0, 100.0), *((0.1 * i, 2 - 0.1 * i) for i in range(1, 11))]
    lines = plot([Series(sign="o", points=points)], width=40, height=6)
    assert float(lines[0].split("│")[0]) < 10
    assert sum("o" in line for line in lines) >= 3


@pytest.mark.parametrize("values", [[math.nan], [math.inf, math.nan], []])
def test_without_a_finite_value_there_is_no_picture(values: list[float]) -> None:
    assert plot([Series(sign="o", points=[(0.5, value) for value in values])], width=40, height=5) == []


def test_one_value_alone_is_drawn() -> None:
    assert any("o" in line for line in plot([Series(sign="o", points=[(1.0, 3.0)])], width=20, height=3))

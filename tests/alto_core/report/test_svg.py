"""Scales, ticks and label placement."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alto_core.report.svg import Canvas, Scale, spread


def test_a_scale_maps_its_ends_and_clips_what_lies_outside() -> None:
    scale = Scale(low=1, high=100, start=200, end=0, log=True)
    assert scale(1) == 200
    assert scale(10) == pytest.approx(100)
    assert scale(1e9) == 0
    assert scale(1e-9) == 200


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e5), st.booleans(), st.integers(3, 9))
def test_ticks_lie_inside_the_range_and_are_few(low: float, factor: float, log: bool, at_most: int) -> None:
    scale = Scale(low=low, high=low * factor, start=0, end=1, log=log)
    ticks = scale.ticks(at_most)
    assert all(low * (1 - 1e-6) - 1e-9 <= tick <= low * factor * (1 + 1e-6) for tick in ticks)
    assert len(ticks) <= at_most + 1 or (log and factor > 10**at_most / 10)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=10))
def test_spread_labels_do_not_overlap_and_keep_their_order(wanted: list[float]) -> None:
    placed = spread(wanted, 14, -40, 140)
    assert all(b - a >= 14 - 1e-9 for a, b in itertools.pairwise(sorted(placed)))
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    assert [placed[i] for i in order] == sorted(placed)
    assert max(placed) <= 140 + 1e-9


def test_text_and_titles_are_escaped() -> None:
    canvas = Canvas(10, 10, 'a "picture" <of> & things')
    canvas.group("g", "<title>").text(1, 2, "</svg><script>\x07")
    canvas.rect(0, 0, -1, 2, "r", title="a & b")
    root = ElementTree.fromstring(canvas.render())
    texts = [element.text for element in root.iter() if element.text]
    assert texts == ["<title>", "</svg><script>\N{REPLACEMENT CHARACTER}", "a & b"]
    assert root.find(".//{*}rect").attrib["width"] == "0"  # type: ignore[union-attr]

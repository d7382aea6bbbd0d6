"""A small SVG canvas and axis scales. Elements are built as a tree, so text is escaped and the XML is well-formed.

Colours are CSS classes (`fate-diverging`, `ink`, `faint`), which the page defines for light and dark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

_NOT_IN_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff\ud800-\udfff]")


def printable(text: str) -> str:
    """Replace characters that neither XML nor a page can hold."""
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)


class Canvas:
    """One picture. Coordinates in pixels of its own width; it scales with the page."""

    def __init__(self, width: float, height: float, description: str):
        self.width, self.height = width, height
        self._root = ElementTree.Element(
            "svg",
            {
                "xmlns": "http://www.w3.org/2000/svg",
                "viewBox": f"0 0 {_n(width)} {_n(height)}",
                "role": "img",
                "aria-label": printable(description),
            },
        )
        self._parent = self._root

    def group(self, css: str, title: str = "") -> Canvas:
        """A canvas that draws into a group of this one; `title` is shown on hover."""
        inner = object.__new__(Canvas)
        inner.width, inner.height, inner._root = self.width, self.height, self._root
        inner._parent = ElementTree.SubElement(self._parent, "g", {"class": css})
        if title:
            ElementTree.SubElement(inner._parent, "title").text = printable(title)
        return inner

    def line(self, x1: float, y1: float, x2: float, y2: float, css: str) -> None:
        self._add("line", css, x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2))

    def polyline(self, points: Sequence[tuple[float, float]], css: str) -> None:
        self._add("polyline", css, points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points))

    def polygon(self, points: Sequence[tuple[float, float]], css: str, title: str = "") -> None:
        self._add("polygon", css, title, points=" ".join(f"{_n(x)},{_n(y)}" for x, y in points))

    def rect(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        css: str,
        title: str = "",
        radius: float = 0,
        opacity: float = 1,
    ) -> None:
        shape = {"x": x, "y": y, "width": max(0.0, width), "height": height, "rx": radius}
        attributes = {name: _n(value) for name, value in shape.items()}
        self._add("rect", css, title, **attributes, **({} if opacity == 1 else {"fill-opacity": f"{opacity:.2f}"}))

    def circle(self, x: float, y: float, radius: float, css: str) -> None:
        self._add("circle", css, cx=_n(x), cy=_n(y), r=_n(radius))

    def cross(self, x: float, y: float, radius: float, css: str) -> None:
        left, right, top, bottom = _n(x - radius), _n(x + radius), _n(y - radius), _n(y + radius)
        self._add("path", css, d=f"M{left} {top}L{right} {bottom}M{left} {bottom}L{right} {top}")

    def text(self, x: float, y: float, text: str, css: str = "", anchor: str = "start") -> None:
        element = self._add("text", css, x=_n(x), y=_n(y), **{"text-anchor": anchor})
        element.text = printable(text)

    def render(self) -> str:
        return ElementTree.tostring(self._root, encoding="unicode")

    def _add(self, tag: str, css: str, title: str = "", **attributes: str) -> ElementTree.Element:
        element = ElementTree.SubElement(self._parent, tag, {"class": css, **attributes} if css else attributes)
        if title:
            ElementTree.SubElement(element, "title").text = printable(title)
        return element


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps values in [low, high] to pixels in [start, end], linear or logarithmic; values outside go to the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        clipped = min(max(value, self.low), self.high)
        share = (self._at(clipped) - self._at(self.low)) / (self._at(self.high) - self._at(self.low))
        return self.start + share * (self.end - self.start)

    def _at(self, value: float) -> float:
        return math.log(value) if self.log else value

    def ticks(self, at_most: int) -> tuple[float, ...]:
        """Round values inside the range, at most about so many."""
        return _log_ticks(self.low, self.high, at_most) if self.log else _linear_ticks(self.low, self.high, at_most)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move label positions apart until neighbours are `gap` pixels away; keeps their order and the range."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    placed = [0.0] * len(wanted)
    last = low - gap
    for i in order:
        last = placed[i] = max(wanted[i], last + gap)
    last = high + gap
    for i in reversed(order):
        last = placed[i] = min(placed[i], last - gap)
    return placed


def _linear_ticks(low: float, high: float, at_most: int) -> tuple[float, ...]:
    raw = (high - low) / max(1, at_most)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1))


def _log_ticks(low: float, high: float, at_most: int) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for mantissas in ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
        ticks = [round(m * 10.0**p, 12) for p in powers for m in mantissas if low <= m * 10.0**p <= high]
        if len(ticks) <= at_most:
            break
    return tuple(ticks)


def _n(value: float) -> str:
    """One digit after the point is finer than a pixel and keeps the file small."""
    return f"{value:.1f}".removesuffix(".0")

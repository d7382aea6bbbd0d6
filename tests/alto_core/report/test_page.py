"""The HTML page: complete, well-formed, safe, and without a network."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from alto_core.domain import JobState, TaskState
from alto_core.report import ReportData
from alto_core.report.page import render_page
from alto_core.result import TaskResult

VOID = {"meta", "br", "link", "img", "hr", "input"}


class _Page(HTMLParser):
    """Collects tags and text, and checks that every element is closed by its own end tag."""

    def __init__(self, page: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def _pictures(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def test_shows_every_job_with_its_state_and_reason(report_data: ReportData) -> None:
    page = _Page(render_page(report_data))
    for row in report_data.jobs:
        assert row.job_id in page.text
        assert row.state in page.text
        if row.state is not JobState.FINISHED:
            assert row.reason in page.text


def test_shows_the_facts_that_a_reader_looks_for(report_data: ReportData) -> None:
    text = _Page(render_page(report_data)).text
    for fact in (
        "0.925",
        "untuned 0.000",
        "5 min 18 s",
        "1.2 %",
        "made version 1 (champion)",
        "name: made",
        "train   320",
        "Winner minus untuned, paired over 240 rows: loss -2.490",
        "Reverse: one two",
        "<b>one</b>",
        "at that speed the spared rows would have taken another",
        "6 go on",
    ):
        assert fact in text, fact


def test_pictures_are_well_formed_and_come_in_two_widths(report_data: ReportData) -> None:
    pictures = _pictures(render_page(report_data))
    # two scores, curves, one gate and what came of its jobs, fates, samples, learning rate and rank
    assert len(pictures) == 2 * 8
    for picture in pictures:
        assert picture.tag == "{http://www.w3.org/2000/svg}svg"


def test_every_coordinate_is_finite_and_inside_its_picture(report_data: ReportData) -> None:
    for picture in _pictures(render_page(report_data)):
        _, _, width, height = map(float, picture.attrib["viewBox"].split())
        for element in picture.iter():
            for name, limit in (
                ("x1", width),
                ("x2", width),
                ("y1", height),
                ("y2", height),
                ("cx", width),
                ("cy", height),
            ):
                if name in element.attrib:
                    assert 0 <= float(element.attrib[name]) <= limit + 1
            for pair in element.attrib.get("points", "").split():
                x, y = map(float, pair.split(","))
                assert 0 <= x <= width and 0 <= y <= height


def test_curves_are_there_for_every_job_coloured_by_fate(report_data: ReportData) -> None:
    curves = next(p for p in _pictures(render_page(report_data)) if "Loss of every job" in p.attrib["aria-label"])
    groups = [e.attrib["class"] for e in curves.iter() if e.attrib.get("class", "").startswith("job ")]
    expected = sorted(
        "winner" if row.job_id == report_data.result.winner else str(row.state) for row in report_data.jobs
    )
    assert sorted(css.removeprefix("job fate-") for css in groups) == expected
    titles = "".join(e.text or "" for e in curves.iter("{http://www.w3.org/2000/svg}title"))
    assert all(row.job_id in titles for row in report_data.jobs)


def test_nothing_is_fetched(report_data: ReportData) -> None:
    page = render_page(report_data)
    assert set(re.findall(r"https?://[^\"'\s<)]+", page)) <= {"http://www.w3.org/2000/svg"}
    tags = _Page(page).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object"}
    assert not [attrs for _, attrs in tags if {"src", "href", "onload", "onclick"} & set(attrs)]
    assert "@import" not in page and "url(" not in page


def test_what_users_wrote_is_escaped_and_unprintable_characters_are_replaced(report_data: ReportData) -> None:
    evil = "<script>alert(1)</script>\x00\x1b[31m\ud800\"'&"
    facts = dataclasses.replace(report_data.facts, task_id=evil, model=evil, data=evil, message=evil, task_file=evil)
    jobs = tuple(dataclasses.replace(row, reason=evil) for row in report_data.jobs)
    result = dataclasses.replace(report_data.result, adapter_folder=evil)
    data = dataclasses.replace(report_data, facts=facts, jobs=jobs, result=result, warnings=(evil,), data_table=evil)
    page = render_page(data)
    assert "<script" not in page
    assert "\x00" not in page and "\x1b" not in page
    page.encode("utf-8")
    assert _Page(page).text.count("<script>alert(1)</script>") >= 5
    _pictures(page)


@pytest.mark.parametrize("state", [TaskState.QUEUED, TaskState.RUNNING, TaskState.FAILED, TaskState.CANCELLED])
def test_a_task_without_measurements_has_a_page_too(report_data: ReportData, state: TaskState) -> None:
    jobs = tuple(
        dataclasses.replace(row, state=JobState.WAITING, step=0, best_val_loss=None, best_step=None, reason="")
        for row in report_data.jobs
    )
    facts = dataclasses.replace(report_data.facts, state=state, started=None, ended=None)
    data = ReportData(facts=facts, jobs=jobs, curves={}, result=TaskResult())
    text = _Page(render_page(data)).text
    assert "Nothing has been measured yet" in text
    assert all(row.job_id in text for row in jobs)


def test_losses_that_are_no_numbers_and_lone_points_are_drawn(report_data: ReportData) -> None:
    curves = {
        job_id: dataclasses.replace(curve, train_losses=(math.inf,) * len(curve.train_losses), val_losses=values)
        for (job_id, curve), values in zip(
            report_data.curves.items(),
            (
                (1.0,) + (math.nan,) * (len(c.val_losses) - 1) if i else (math.nan,) * len(c.val_losses)
                for i, c in enumerate(report_data.curves.values())
            ),
            strict=True,
        )
    }
    _pictures(render_page(dataclasses.replace(report_data, curves=curves)))


def test_equal_and_zero_losses_have_an_axis(report_data: ReportData) -> None:
    for value in (0.0, 0.7):
        curves = {
            job_id: dataclasses.replace(curve, val_losses=(value,) * len(curve.val_losses))
            for job_id, curve in report_data.curves.items()
        }
        assert "Loss of every job" in render_page(dataclasses.replace(report_data, curves=curves))


def test_sixty_jobs_stay_a_small_file(report_maker: Callable[[int], ReportData]) -> None:
    data = report_maker(7)
    page = render_page(data)
    assert len(page) < 1_000_000
    assert all(row.job_id in page for row in data.jobs)

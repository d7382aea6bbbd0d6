"""A look of the scheduler, from the store to what starts now."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from alto_core.cluster.gantt import bars_of, gantt_page, gantt_svg, gantt_text
from alto_core.cluster.placing import place_tasks, plan_now
from alto_core.cluster.situation import kept_plan, read_situation
from alto_core.domain import JobState
from alto_core.queue_states import Priority, QueueState, StopRequest
from alto_core.settings import Settings
from alto_core.store import Fleet, JobUpdate, Queue, Store
from tests.conftest import NO_PROCESS

from .conftest import Submit


def begin(queue: Queue, task_id: str, host_id: str, *gpus: int) -> None:
    attempt = queue.claim(task_id, host_id, gpus)
    assert attempt is not None
    queue.begin(task_id, attempt, NO_PROCESS)


def test_what_starts_now_is_what_fits_beside_what_runs(settings: Settings, queue: Queue, submit: Submit) -> None:
    submit("runs-1", num_gpus=1)
    begin(queue, "runs-1", "left", 0)
    submit("wide-1", num_gpus=2)
    submit("wide-2", num_gpus=2)
    submit("small-1", num_gpus=1)
    submit("huge-1", num_gpus=3)
    placements = place_tasks(settings, "submitted huge-1")
    assert [(p.host_id, p.gpus) for p in placements if p.task_id.startswith("wide")] == [("right", (0, 1))]
    assert {p.task_id for p in placements} >= {"small-1"}
    plan = queue.latest_plan()
    assert plan is not None
    assert (plan.reason, plan.makespan, set(plan.refusals)) == ("submitted huge-1", 120, {"huge-1"})
    assert "expected at most 2" in plan.refusals["huge-1"]
    assert queue.entry("wide-1").state is QueueState.WAITING, "placing claims nothing"


def test_paused_tasks_and_lost_hosts_take_no_part(settings: Settings, queue: Queue, submit: Submit) -> None:
    for task_id in ("a-1", "b-1"):
        submit(task_id, num_gpus=2)
    queue.request_stop("a-1", StopRequest.PAUSE)
    Fleet(settings).lose("left", silent_since=datetime.now(UTC))
    assert [(p.task_id, p.host_id) for p in place_tasks(settings, "x")] == [("b-1", "right")]
    Fleet(settings).lose("right", silent_since=datetime.now(UTC))
    assert place_tasks(settings, "x") == ()


def test_remaining_time_follows_the_rows_that_are_left(settings: Settings, queue: Queue, submit: Submit) -> None:
    job = submit("runs-1", expected_seconds=400.0)
    begin(queue, "runs-1", "left", 0)
    assert read_situation(settings).running[0].seconds == pytest.approx(400, abs=2)
    assert read_situation(settings, datetime.now(UTC) + timedelta(seconds=100)).running[0].seconds == pytest.approx(
        300, abs=2
    )
    Store(settings).update_jobs("runs-1", [JobUpdate(job_id=job.job_id, state=JobState.RUNNING, step=30)])
    assert read_situation(settings).running[0].seconds == 100
    Store(settings).update_jobs("runs-1", [JobUpdate(job_id=job.job_id, state=JobState.OVERFITTING)])
    assert read_situation(settings).running[0].seconds == 1, "its jobs have exited early"


def test_a_low_task_makes_room_for_a_deadline_once(settings: Settings, queue: Queue, submit: Submit) -> None:
    for side in ("left", "right"):
        submit(f"low-{side}", num_gpus=2, priority=Priority.BACKGROUND, expected_seconds=7200.0)
        begin(queue, f"low-{side}", side, 0, 1)
    submit("due-1", num_gpus=2, deadline=datetime.now(UTC) + timedelta(seconds=300))
    for _ in range(2):
        assert place_tasks(settings, "x") == ()
        stops = [queue.entry(task_id).stop for task_id in ("low-left", "low-right")]
        assert sorted(map(str, stops)) == ["None", "preempt"], "one host is enough"


def test_a_task_that_has_waited_long_moves_up(settings: Settings, submit: Submit) -> None:
    submit("old-1", priority=Priority.BACKGROUND)
    for days, expected in ((0.9, Priority.BACKGROUND), (1.1, Priority.NORMAL), (9.0, Priority.URGENT)):
        (request,) = read_situation(settings, datetime.now(UTC) + timedelta(days=days)).requests
        assert request.priority is expected


def test_the_owner_who_had_less_comes_first(settings: Settings, queue: Queue, submit: Submit) -> None:
    submit("ann-1", owner="ann", num_gpus=2, expected_seconds=3600.0)
    begin(queue, "ann-1", "left", 0, 1)
    Store(settings).start_task("ann-1")
    submit("ann-2", owner="ann", num_gpus=2)
    submit("bob-1", owner="bob", num_gpus=2)
    assert [p.task_id for p in place_tasks(settings, "x")] == ["bob-1"]


def test_a_plan_as_text_picture_and_page(settings: Settings, queue: Queue, submit: Submit) -> None:
    submit("runs-1")
    begin(queue, "runs-1", "left", 0)
    submit("<b>&-1", num_gpus=2)
    submit("huge-1", num_gpus=8)
    situation, found = plan_now(settings)
    plan = kept_plan(found, situation, "x")
    bars = bars_of(plan.placements, plan.at)
    assert {(bar.task_id, bar.host_id, bar.gpu) for bar in bars} == {
        ("runs-1", "left", 0),
        ("<b>&-1", "right", 0),
        ("<b>&-1", "right", 1),
    }
    lines = gantt_text(bars, width=60)
    assert lines[0].startswith("left 0  |a")
    assert all(len(line) <= 60 for line in lines[:4])
    assert any(line.startswith("a  runs-1: runs, ends in ") for line in lines)
    from xml.etree import ElementTree

    titles = [
        element.text for element in ElementTree.fromstring(gantt_svg(bars)).iter() if element.tag.endswith("title")
    ]
    assert any(title and title.startswith("<b>&-1: 0 s to 1 min") for title in titles)
    page = gantt_page(bars, "summary", plan.refusals)
    assert "<b>huge-1</b> cannot be planned: num_gpus: got 8" in page
    assert "<b>&-1" not in page
    assert gantt_text((), width=60) == []
    assert "<svg" in gantt_svg(())

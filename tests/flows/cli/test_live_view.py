"""The picture of a task on terminals of different sizes, recorded as text."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

from rich.console import Console

from alto_core.domain import JobState, LoraJob
from alto_core.report import JobRow
from alto_core.settings import Settings
from alto_core.store import Store
from flows.cli.lines import plain_lines
from flows.cli.live_view import render_view
from flows.cli.view import TaskView, Watcher


def _draw(view: TaskView, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, record=True, file=None, force_terminal=False, quiet=False)
    with console.capture() as capture:
        console.print(render_view(view, width=width, height=height))
    return capture.get().splitlines()


def _many(num: int) -> tuple[JobRow, ...]:
    states = (JobState.WAITING, JobState.UNDERPERFORMING, JobState.RUNNING, JobState.DIVERGING, JobState.FINISHED)
    return tuple(
        JobRow(
            job=LoraJob(
                learning_rate=1e-3 * (i + 1), lora_rank=8, lora_alpha=16, adapter_batch_size=8, target_modules=("q",)
            ),
            state=states[i % 5],
            total_steps=40,
            warmup_steps=4,
            step=i % 40,
            reason="a very long reason with numbers " * 9,
            best_val_loss=3.4733,
        )
        for i in range(num)
    )


def test_every_job_is_drawn_where_there_is_room(settings: Settings, running_task: str) -> None:
    view = Watcher(Store(settings), running_task).look()
    lines = _draw(view, 160, 50)
    assert len([line for line in lines if line.startswith("lr0.")]) == 4
    assert [line.split()[0] for line in lines if line.startswith("lr0.")] == [row.job_id for row in view.jobs]
    assert any("lr " in line and "rank" in line and "batch" in line for line in lines)


def test_sixty_jobs_fit_a_small_terminal_running_ones_first(settings: Settings, running_task: str) -> None:
    view = dataclasses.replace(Watcher(Store(settings), running_task).look(), jobs=_many(60))
    for width, height in ((80, 24), (100, 30), (200, 40)):
        lines = _draw(view, width, height)
        assert len(lines) <= height
        assert max(map(len, lines)) <= width
        drawn = [line for line in lines if line.startswith("lr0.")]
        whole = {f"{row.job_id} {row.state} {row.step}/40" for row in view.jobs}
        # however long the reasons are, ids, states and steps are never cut
        cells = [line.split() for line in drawn]
        first_state = 4 if width > 118 else 1
        assert {f"{c[0]} {c[first_state]} {c[first_state + 1]}" for c in cells} <= whole
        (rest,) = [line for line in lines if "more (" in line]
        assert int(rest.split()[2]) == 60 - len(drawn)
        running = [line for line in drawn if " running " in line]
        assert len(running) == min(12, len(drawn))
        assert drawn[: len(running)] == running


def test_a_task_without_a_record_is_preparing(settings: Settings) -> None:
    view = Watcher(Store(settings), "made-1").look()
    lines = _draw(view, 80, 24)
    assert "made-1" in lines[0] and "preparing" in lines[0]


def test_events_are_seen_once(settings: Settings, running_task: str) -> None:
    watcher = Watcher(Store(settings), running_task)
    first = watcher.look()
    assert [event.kind for event in first.new_events][:2] == ["stage", "stage"]
    second = watcher.look()
    assert second.new_events == ()
    assert second.recent_events == first.recent_events
    assert second.tokens_per_second == 187.0
    assert second.seconds_left is not None and second.seconds_left > 0


def test_plain_lines_put_evaluations_of_one_moment_together(settings: Settings, running_task: str) -> None:
    view = Watcher(Store(settings), running_task).look()
    lines = list(plain_lines(view.new_events, view.jobs, datetime.now(UTC) - timedelta(seconds=75)))
    assert all(line.startswith("[01:1") for line in lines)
    texts = [line[8:] for line in lines]
    assert texts[:2] == ["stage profile", "stage warmup"]
    assert texts[2].startswith("evaluated 3 jobs, best lr0.002-r8-b8-")
    assert "validation loss 1.2000" in texts[2]
    assert "ended at step 3 of 40, diverging: the [red]train[/red] loss is nan" in texts[3]
    assert texts[4] == "a kind that nobody knows"
    assert len(texts) == 5

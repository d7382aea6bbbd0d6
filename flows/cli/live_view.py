"""A task in the terminal: header, stages, table of jobs, latest events. Pure: `TaskView` in, rich renderable out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from alto_core import wording
from alto_core.domain import JobState, Stage, TaskState
from alto_core.report import JobRow
from flows.cli.lines import SILENT_KINDS, describe
from flows.cli.tables import GAP, bare_table
from flows.cli.view import TaskView, group_of

STATE_STYLES: dict[JobState, str] = {
    JobState.WAITING: "dim",
    JobState.RUNNING: "cyan",
    JobState.FINISHED: "green",
    JobState.DIVERGING: "red",
    JobState.OVERFITTING: "yellow",
    JobState.UNDERPERFORMING: "bright_black",
    JobState.FAILED: "bold magenta",
    JobState.CANCELLED: "dim",
}
TASK_STYLES = {TaskState.FINISHED: "bold green", TaskState.FAILED: "bold red", TaskState.CANCELLED: "yellow"}
WIDE, MEDIUM = 118, 96
"""Columns of a terminal from which tables have room for the single settings of a job, and for bar and train loss."""
BAR_WIDTH = 8
MIN_REASON_WIDTH = 12
MAX_EVENTS = 4
FRAME_LINES = 9
"""Lines around the jobs: header, stages, the table's head and rules, and the line of jobs left out."""


def render_view(view: TaskView, *, width: int, height: int | None) -> RenderableType:
    """Draw one moment of a task.

    Args:
        view: the task.
        width: columns of the terminal.
        height: lines of the terminal; None shows every job.
    """
    events = [e for e in view.recent_events if e.kind not in (*SILENT_KINDS, "stage")][-MAX_EVENTS:]
    room = None if height is None else max(3, height - FRAME_LINES - len(events))
    rows = {row.job_id: row for row in view.jobs}
    shown, left_out = _choose(view.jobs, room)
    parts: list[RenderableType] = [render_head(view)]
    if shown:
        parts.append(_job_table(shown, width=width))
    if left_out:
        parts.append(Text(f"  ... and {len(left_out)} more ({_by_state(left_out)})", style="dim"))
    for event in events:
        style = "red" if event.kind == "error" else "yellow" if event.kind == "warning" else "dim"
        parts.append(
            Text("  " + describe(event, rows.get(event.job_id or "")), style=style, no_wrap=True, overflow="ellipsis")
        )
    return Group(*parts)


def render_head(view: TaskView) -> RenderableType:
    """The task's state and its stages alone."""
    return Group(_header(view), _stages(view))


def _header(view: TaskView) -> Text:
    text = Text.assemble((view.task_id, "bold"), "  ", (view.state_word, TASK_STYLES.get(view.state, "cyan")))
    facts = [wording.duration(view.elapsed_seconds)]
    if view.seconds_left is not None and not view.state.is_end:
        facts.append(f"{'about' if view.is_forecast else 'at most'} {wording.duration(view.seconds_left)} left")
    if view.tokens_per_second is not None and not view.state.is_end:
        facts.append(f"{wording.count(view.tokens_per_second)} tokens/s")
    if view.samples.saved:
        facts.append(f"{wording.share(view.samples.saved_share)} of the rows saved")
    return text.append("  " + "  ·  ".join(facts), style="dim")


def _stages(view: TaskView) -> Text:
    """The six stages: done, at work, to come."""
    order = list(Stage)
    current = order.index(view.stage) if view.stage else -1
    text = Text()
    for i, stage in enumerate(order):
        done = i < current or view.state is TaskState.FINISHED
        at_work = i == current and not view.state.is_end
        sign, style = (
            ("✓", "green")
            if done
            else ("●", "bold cyan")
            if at_work
            else ("✗", "red")
            if i == current
            else ("○", "dim")
        )
        text.append(f"{sign} {stage}   ", style=style)
    return text


def _job_table(rows: Sequence[JobRow], *, width: int) -> Table:
    """Settings, bar and train loss need a wide terminal; the last column takes what is left over."""
    columns: list[tuple[str, list[Text | ProgressBar]]] = [("job", [_job_cell(row) for row in rows])]
    if width >= WIDE:
        columns += [
            ("lr", [Text(wording.rate(row.job.learning_rate)) for row in rows]),
            ("rank", [Text(str(row.job.lora_rank)) for row in rows]),
            ("batch", [Text(str(row.job.rows_per_update)) for row in rows]),
        ]
    columns.append(("state", [Text(str(row.state), style=STATE_STYLES[row.state]) for row in rows]))
    columns.append(("step", [Text(f"{row.step}/{row.total_steps}") for row in rows]))
    if width >= MEDIUM:
        columns.append(("", [_bar(row) for row in rows]))
        columns.append(("train", [Text(wording.loss(row.train_loss)) for row in rows]))
    columns.append(("val", [Text(wording.loss(row.val_loss)) for row in rows]))
    columns.append(("best", [Text(wording.loss(row.best_val_loss)) for row in rows]))

    table = bare_table()
    used = 0
    for name, cells in columns:
        column_width = max(len(name), *(BAR_WIDTH if isinstance(cell, ProgressBar) else len(cell) for cell in cells))
        table.add_column(
            name, width=column_width, justify="left" if name in ("job", "state") else "right", no_wrap=True
        )
        used += column_width + GAP
    reasons = [row.reason if row.state.is_end and row.state is not JobState.FINISHED else "" for row in rows]
    room = width - used
    with_reasons = room >= MIN_REASON_WIDTH
    if with_reasons:
        table.add_column("why it ended", width=room, no_wrap=True, overflow="ellipsis")
    for i, reason in enumerate(reasons):
        cells_of_row = [cells[i] for _, cells in columns]
        table.add_row(*cells_of_row, *([Text(reason, style="dim")] if with_reasons else []))
    return table


def _job_cell(row: JobRow) -> Text:
    ended_early = row.state.is_end and row.state is not JobState.FINISHED
    return Text(row.job_id, style="dim" if ended_early else "")


def _bar(row: JobRow) -> ProgressBar:
    style = STATE_STYLES[row.state]
    return ProgressBar(
        total=row.total_steps, completed=row.step, width=BAR_WIDTH, complete_style=style, finished_style=style
    )


def _choose(jobs: Sequence[JobRow], room: int | None) -> tuple[list[JobRow], list[JobRow]]:
    """All jobs in their first order where they fit; else the running ones first, and the rest counted."""
    if room is None or len(jobs) <= room:
        return list(jobs), []
    ordered = sorted(jobs, key=group_of)
    return ordered[:room], ordered[room:]


def _by_state(rows: Sequence[JobRow]) -> str:
    counts = Counter(row.state for row in rows)
    return ", ".join(f"{counts[state]} {state}" for state in JobState if counts[state])

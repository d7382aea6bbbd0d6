"""The end of a task, as text for people and as one object for machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from alto_core import wording
from alto_core.domain import TaskState
from alto_core.report import LeaderboardRow, leaderboard
from alto_core.settings import Settings
from flows.cli.live_view import MEDIUM, STATE_STYLES
from flows.cli.tables import bare_table
from flows.cli.view import TaskView


def print_outcome(view: TaskView, settings: Settings, console: Console) -> None:
    """Leaderboard, winner against the untuned model, savings, where everything is, and what to do next.

    Nothing for a task without a record: its error says it all.
    """
    if view.record is None:
        return
    console.print()
    if view.jobs:
        console.print(_board_table(view, width=console.width))
    if view.state is TaskState.FINISHED:
        _print_facts(_facts(view, settings), console)
    elif view.record.message not in ("", view.state):
        _print_facts([(str(view.state), view.record.message)], console)
    console.print()
    for command, purpose in next_commands(view):
        console.print(Text.assemble("  ", (command, "bold"), "  ", (purpose, "dim")), soft_wrap=True)


def outcome_object(view: TaskView, settings: Settings) -> dict[str, Any]:
    """The same as one JSON object."""
    result, samples = view.result, view.samples
    record = view.record
    return {
        "event": "result",
        "task_id": view.task_id,
        "state": str(view.state),
        "message": record.message if record else "",
        "winner": result.winner,
        "leaderboard": [line.as_dict() for line in _board(view)],
        "scores": result.to_dict()["scores"],
        "samples_planned": samples.planned,
        "samples_trained": samples.trained,
        "samples_saved_share": samples.saved_share,
        "seconds": result.seconds,
        "tracking_share": result.tracking_share,
        "evaluation_share": result.evaluation_share,
        "peak_bytes": result.peak_bytes,
        "adapter_folder": result.adapter_folder,
        "registered": result.to_dict()["registered"],
        "report": str(report_file(view, settings) or "") or None,
        "next": [command for command, _ in next_commands(view)],
    }


def next_commands(view: TaskView) -> list[tuple[str, str]]:
    """The commands that a user would want now."""
    again = [(f"alto resume {view.task_id}", "go on from the last checkpoint")]
    version = view.result.registered
    name = f"{version.name}/{version.version}" if version else ""
    return [
        *(again if view.state in (TaskState.FAILED, TaskState.CANCELLED) else []),
        *([(f"alto export {name} FOLDER", "the adapter to take along, checked for serving")] if name else []),
        (f"alto report {view.task_id}", "one HTML file with all curves, the gate and the savings"),
        ("alto ui", "MLflow and Prefect in the browser"),
    ]


def report_file(view: TaskView, settings: Settings) -> Path | None:
    path = settings.task_folder(view.task_id) / "report.html"
    return path if path.is_file() else None


def _board(view: TaskView) -> tuple[LeaderboardRow, ...]:
    assert view.record is not None
    return leaderboard(view.jobs, view.result, choose_by=view.record.task.evaluation.choose_by)


def _board_table(view: TaskView, *, width: int) -> Table:
    """The leaderboard. A terminal that is too narrow for it gets no columns of settings: ids of jobs name them."""
    board = _board(view)
    metric = next((s.metric for s in view.result.scores if s.metric), None)
    columns = {
        "#": lambda line: str(line.place or wording.NOTHING),
        "job": lambda line: line.row.job_id,
        "lr": lambda line: wording.rate(line.row.job.learning_rate),
        "rank": lambda line: str(line.row.job.lora_rank),
        "batch": lambda line: str(line.row.job.rows_per_update),
        "val loss": lambda line: wording.loss(line.row.best_val_loss),
        f"val {(metric or '').replace('_', ' ')}": _metric,
        "steps": lambda line: f"{line.row.step}/{line.row.total_steps}",
    }
    left_out = ({"lr", "rank", "batch"} if width < MEDIUM else set()) | ({"val "} if metric is None else set())
    columns = {name: cell for name, cell in columns.items() if name not in left_out}
    table = bare_table()
    for name in columns:
        table.add_column(name, justify="left" if name == "job" else "right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for line in board:
        state = f"{line.row.state}, winner" if line.is_winner else str(line.row.state)
        cells = [Text(cell(line)) for cell in columns.values()]
        style = "bold" if line.is_winner else ""
        table.add_row(*cells, Text(state, style=STATE_STYLES[line.row.state]), style=style)
    return table


def _metric(line: LeaderboardRow) -> str:
    return wording.NOTHING if line.val_metric is None else f"{line.val_metric.value:.3f}"


def _facts(view: TaskView, settings: Settings) -> list[tuple[str, str]]:
    result, samples = view.result, view.samples
    winner, untuned = result.score(result.winner, "test"), result.score(None, "test")
    facts = [("winner", result.winner or wording.NOTHING)]
    for name, score in (("on the test split", winner), ("untuned model", untuned)):
        if score is not None:
            metric = f"{(score.metric or '').replace('_', ' ')} {score.metric_value}, " if score.metric_value else ""
            rows = f" ({score.metric_value.num_rows} rows)" if score.metric_value else ""
            facts.append((name, f"{metric}loss {wording.loss(score.loss)} ± {score.loss_error:.4f}{rows}"))
    saved = (
        f"{wording.share(samples.saved_share)}: {wording.count(samples.saved)} of {wording.count(samples.planned)} rows"
    )
    reasons = ", ".join(
        f"{state} {wording.share(rows / samples.planned)}" for state, rows in samples.saved_by.items() if rows
    )
    facts.append(("training rows saved", f"{saved} ({reasons})" if reasons else saved))
    facts.append(
        ("wall time", wording.duration(result.seconds if result.seconds is not None else view.elapsed_seconds))
    )
    if result.evaluation_share is not None:
        facts.append(("spent on evaluation", f"{wording.share(result.evaluation_share)} of the time of training steps"))
    if result.tracking_share is not None:
        facts.append(("spent on tracking", wording.share(result.tracking_share, digits=1)))
    if result.peak_bytes:
        facts.append(("peak memory", wording.size(result.peak_bytes)))
    if result.adapter_folder:
        facts.append(("adapter", result.adapter_folder))
    if result.registered:
        facts.append(("registered", str(result.registered)))
    if path := report_file(view, settings):
        facts.append(("report", str(path)))
    return facts


def _print_facts(facts: list[tuple[str, str]], console: Console) -> None:
    console.print()
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        # paths stay whole, so that they can be copied
        console.print(Text.assemble((f"{name:<{width}}  ", "dim"), value), soft_wrap=True)
